//! The memory limits of control groups, at every level from this process's up to the mount.
//!
//! Pages of a region are charged to the group of the process that touches them, and pinned pages cannot be reclaimed. So
//! a limit that is hit does not make pinning fail: the kernel ends a process of the group (cgroup v2 guide on
//! `memory.max`), or slows all of it down for as long as it is above `memory.high`. Any level above the process's own
//! can be the one that binds; what a container sees of them depends on its mounts.

use super::place::By;
use super::report::size;
use super::system::System;
use super::{Case, Check, parse};

/// One group on the way up. `None`: no limit.
#[derive(Debug)]
struct Level {
    path: String,
    max: Option<u64>,
    high: Option<u64>,
    /// In use, past what the kernel would drop at once.
    used: u64,
}

impl Level {
    fn left(&self, limit: Option<u64>) -> Option<u64> {
        Some(limit?.saturating_sub(self.used))
    }
}

/// Bytes that the groups leave this process, by the tightest of their limits. `None`: there is no limit.
pub fn left(system: &System) -> Option<u64> {
    let (_, _, levels) = levels(system)?;
    levels.iter().flat_map(|level| [level.left(level.max), level.left(level.high)]).flatten().min()
}

/// The groups' limits against the capacity.
pub fn cgroup(case: &Case) -> Check {
    const NAME: &str = "cgroup";
    if case.system.read("/proc/self/cgroup").is_none() {
        return Check::unseen(NAME, "/proc/self/cgroup");
    }
    let Some((version, point, levels)) = levels(case.system) else {
        return Check::ok(NAME, "no group counts memory here");
    };
    if levels.is_empty() {
        // A mount that is there and has no such files is the root of all groups, which has no limit.
        return if case.system.list(&point).is_empty() {
            Check::unseen(NAME, &point)
        } else {
            Check::ok(NAME, format!("no group counts memory here (cgroup v{version})"))
        };
    }
    let tightest = |limit: fn(&Level) -> Option<u64>| {
        let left = |level: &Level| level.left(limit(level));
        levels.iter().filter_map(|level| Some((left(level)?, level))).min_by_key(|(left, _)| *left)
    };
    let hard = tightest(|level| level.max);
    let soft = tightest(|level| level.high);
    let (file, file_high) =
        if version == 2 { ("memory.max", "memory.high") } else { ("memory.limit_in_bytes", "") };
    let said = |left: u64, level: &Level, file: &str, limit: Option<u64>| {
        format!("{} left of {} ({file} of {})", size(left), size(limit.unwrap_or(0)), level.path)
    };
    // A quarter more than what is needed, in whole steps.
    let enough = |level: &Level| {
        let step = if case.capacity >= 1 << 30 { 1 << 30 } else { 64 << 20 };
        level
            .used
            .saturating_add(case.capacity.saturating_add(case.capacity / 4))
            .div_ceil(step)
            .saturating_mul(step)
    };
    if let Some((left, level)) = hard.filter(|(left, _)| left / 5 * 4 < case.capacity) {
        let bytes = enough(level);
        let mut fix = set(level, "MemoryMax", file, bytes);
        fix.extend([
            (
                By::Docker,
                format!("--memory={bytes} (or docker update --memory={bytes} --memory-swap={bytes})"),
            ),
            (
                By::Kubernetes,
                format!(
                    "resources.limits.memory: {}Mi in the container's description",
                    bytes.div_ceil(1 << 20)
                ),
            ),
        ]);
        fix.push((By::Pool, format!("a capacity of {} or less", size(left / 5 * 4))));
        let found = said(left, level, file, level.max);
        let fix = case.remedies(&fix);
        return if left < case.capacity {
            let found = format!(
                "{found}; the pool wants {}, and the kernel ends a process of the group that exceeds it",
                size(case.capacity)
            );
            Check::fail(NAME, found, fix)
        } else {
            let found = format!("{found}; a pool of {} leaves little for the rest", size(case.capacity));
            Check::warn(NAME, found, fix)
        };
    }
    if let Some((left, level)) = soft.filter(|(left, _)| *left < case.capacity) {
        let bytes = enough(level);
        let mut fix = set(level, "MemoryHigh", file_high, bytes);
        fix.extend([
            (By::Docker, format!("echo {bytes} into {file_high} of its group, on the host")),
            (
                By::Kubernetes,
                "resources.requests.memory the same as limits.memory, with which no memory.high is set"
                    .into(),
            ),
            (By::Pool, format!("a capacity of {} or less", size(left / 5 * 4))),
        ]);
        return Check::warn(
            NAME,
            format!(
                "{}; the pool wants {}, and above it the kernel slows the whole group down, since pinned memory cannot \
                 be reclaimed",
                said(left, level, file_high, level.high),
                size(case.capacity)
            ),
            case.remedies(&fix),
        );
    }
    Check::ok(
        NAME,
        match hard {
            Some((left, level)) => said(left, level, file, level.max),
            None => format!("no limit (cgroup v{version}, {} levels seen)", levels.len()),
        },
    )
}

/// How a machine's administrator raises a limit: systemd writes those of its own groups again, others are plain files.
fn set(level: &Level, property: &str, file: &str, bytes: u64) -> Vec<(By, String)> {
    let name = level.path.rsplit('/').next().unwrap_or_default();
    if [".service", ".slice", ".scope"].iter().any(|kind| name.ends_with(kind)) {
        return vec![(By::Shell, format!("sudo systemctl set-property {name} {property}={bytes}"))];
    }
    vec![(By::Shell, format!("echo {bytes} | sudo tee {}/{file}", level.path.trim_end_matches('/')))]
}

/// The version of the hierarchy that counts memory, where it is mounted, and the groups from this process's upward.
fn levels(system: &System) -> Option<(u32, String, Vec<Level>)> {
    let groups = system.read("/proc/self/cgroup")?;
    let mounts = parse::mounts(&system.read("/proc/self/mountinfo").unwrap_or_default());
    let counts = |options: &str| options.split(',').any(|option| option == "memory");
    let (version, path, mount) = match parse::group(&groups, "memory") {
        Some(path) => (1, path, mounts.iter().find(|m| m.kind == "cgroup" && counts(&m.options))),
        None => (2, parse::group(&groups, "")?, mounts.iter().find(|m| m.kind == "cgroup2")),
    };
    let (root, point) = match (mount, version) {
        (Some(mount), _) => (mount.root.as_str(), mount.point.clone()),
        (None, 1) => ("/", "/sys/fs/cgroup/memory".into()),
        (None, _) => ("/", "/sys/fs/cgroup".into()),
    };
    // Of a hierarchy that is mounted from this process's group on, the group is the mount point itself. The same where
    // the process is outside of what its namespace shows (the kernel then writes /..).
    let inner = match path.strip_prefix(root.trim_end_matches('/')) {
        Some(inner) if !inner.split('/').any(|part| part == "..") => inner.trim_matches('/'),
        _ => "",
    };
    let mut levels = Vec::new();
    let mut inner = Some(inner);
    while let Some(part) = inner {
        let dir =
            if part.is_empty() { point.clone() } else { format!("{}/{part}", point.trim_end_matches('/')) };
        levels.extend(if version == 1 { level_v1(system, dir) } else { level_v2(system, dir) });
        inner = match part.rsplit_once('/') {
            Some((parent, _)) => Some(parent),
            None if part.is_empty() => None,
            None => Some(""),
        };
    }
    Some((version, point, levels))
}

fn level_v2(system: &System, path: String) -> Option<Level> {
    // "max" is no number, and no limit.
    let number = |file: &str| system.number(&format!("{path}/{file}"));
    let used = number("memory.current")?;
    let stat = system.read(&format!("{path}/memory.stat")).unwrap_or_default();
    let cache = parse::stat(&stat, "inactive_file").unwrap_or(0);
    let (max, high) = (number("memory.max"), number("memory.high"));
    Some(Level { max, high, used: used.saturating_sub(cache), path })
}

fn level_v1(system: &System, path: String) -> Option<Level> {
    /// No limit is written as the largest number of whole pages.
    const NONE: u64 = 1 << 62;
    let number = |file: &str| system.number(&format!("{path}/{file}"));
    let used = number("memory.usage_in_bytes")?;
    let stat = system.read(&format!("{path}/memory.stat")).unwrap_or_default();
    let cache = parse::stat(&stat, "total_inactive_file").unwrap_or(0);
    let max = number("memory.limit_in_bytes").filter(|limit| *limit < NONE);
    Some(Level { max, high: None, used: used.saturating_sub(cache), path })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_of_all_limits_is_what_is_left() {
        let root = tempfile::tempdir().unwrap();
        let system = System::new(root.path());
        let file = |path: &str, text: &str| {
            let path = system.at(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        assert_eq!(left(&system), None);
        file("/proc/self/cgroup", "0::/pod/server\n");
        file("/sys/fs/cgroup/pod/server/memory.current", "1000\n");
        file("/sys/fs/cgroup/pod/server/memory.max", "max\n");
        assert_eq!(left(&system), None);
        file("/sys/fs/cgroup/pod/memory.current", "5000\n");
        file("/sys/fs/cgroup/pod/memory.max", "9000\n");
        assert_eq!(left(&system), Some(4000));
        // What the kernel would drop at once is no use of it.
        file("/sys/fs/cgroup/pod/memory.stat", "anon 1\ninactive_file 2000\n");
        assert_eq!(left(&system), Some(6000));
        file("/sys/fs/cgroup/pod/server/memory.high", "4000\n");
        assert_eq!(left(&system), Some(3000));
    }
}
