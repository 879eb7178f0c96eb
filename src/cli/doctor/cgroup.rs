//! The memory limits of control groups, at every level from this process's up to the mount.
//!
//! Pages of a region are charged to the group of the process that touches them, and pinned pages cannot be reclaimed.
//! So a limit that is hit does not make pinning fail: the kernel ends a process of the group (cgroup v2 guide on
//! `memory.max`), or slows all of it down for as long as it is above `memory.high`. Any level above the process's own
//! can be the one that binds; what a container sees of them depends on its mounts.

use super::report::size;
use super::system::System;
use super::{Case, Fixes, Verdict, parse};

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
pub fn cgroup(case: &Case) -> Verdict {
    if case.system.read("/proc/self/cgroup").is_none() {
        return Verdict::unseen("/proc/self/cgroup");
    }
    let Some((version, point, levels)) = levels(case.system) else {
        return Verdict::ok("no group counts memory here");
    };
    if levels.is_empty() {
        // A mount that is there and has no such files is the root of all groups, which has no limit.
        return if case.system.list(&point).is_empty() {
            Verdict::unseen(&point)
        } else {
            Verdict::ok(format!("no group counts memory here (cgroup v{version})"))
        };
    }
    let tightest = |limit: fn(&Level) -> Option<u64>| {
        let left = |level: &Level| level.left(limit(level));
        levels.iter().filter_map(|level| Some((left(level)?, level))).min_by_key(|(left, _)| *left)
    };
    let hard = tightest(|level| level.max);
    let soft = tightest(|level| level.high);
    let file = if version == 2 { "memory.max" } else { "memory.limit_in_bytes" };
    let said = |left: u64, level: &Level, file: &str, limit: Option<u64>| {
        format!("{} left of {} ({file} of {})", size(left), size(limit.unwrap_or(0)), level.path)
    };
    // A quarter more than what is needed, in whole steps.
    let step = if case.capacity >= 1 << 30 { 1 << 30 } else { 64 << 20_u64 };
    let needed = case.capacity.saturating_add(case.capacity / 4);
    let enough = |level: &Level| level.used.saturating_add(needed).div_ceil(step).saturating_mul(step);
    let wants = size(case.capacity);
    if let Some((left, level)) = hard.filter(|(left, _)| left / 5 * 4 < case.capacity) {
        let bytes = enough(level);
        let mut fix = set(level, "MemoryMax", file, bytes);
        fix.extend(fixes![
            Docker: "--memory={bytes} (or docker update --memory={bytes} --memory-swap={bytes})";
            Kubernetes: "resources.limits.memory: {}Mi in the container's description", bytes.div_ceil(1 << 20);
            Pool: "a capacity of {} or less", size(left / 5 * 4);
        ]);
        let found = said(left, level, file, level.max);
        return if left < case.capacity {
            let why = "and the kernel ends a process of the group that exceeds it";
            Verdict::fail(format!("{found}; the pool wants {wants}, {why}"), fix)
        } else {
            Verdict::warn(format!("{found}; a pool of {wants} leaves little for the rest"), fix)
        };
    }
    if let Some((left, level)) = soft.filter(|(left, _)| *left < case.capacity) {
        let (bytes, file) = (enough(level), "memory.high");
        let mut fix = set(level, "MemoryHigh", file, bytes);
        fix.extend(fixes![
            Docker: "echo {bytes} into {file} of its group, on the host";
            Kubernetes: "resources.requests.memory the same as limits.memory, with which no {file} is set";
            Pool: "a capacity of {} or less", size(left / 5 * 4);
        ]);
        let found = said(left, level, file, level.high);
        let why = "above it the kernel slows the whole group down, since pinned memory cannot be reclaimed";
        return Verdict::warn(format!("{found}; the pool wants {wants}, and {why}"), fix);
    }
    Verdict::ok(match hard {
        Some((left, level)) => said(left, level, file, level.max),
        None => format!("no limit (cgroup v{version}, {} levels seen)", levels.len()),
    })
}

/// How a machine's administrator raises a limit: systemd writes those of its own groups again, others are plain files.
fn set(level: &Level, property: &str, file: &str, bytes: u64) -> Fixes {
    let name = level.path.rsplit('/').next().unwrap_or_default();
    if [".service", ".slice", ".scope"].iter().any(|kind| name.ends_with(kind)) {
        return fixes![Shell: "sudo systemctl set-property {name} {property}={bytes}"];
    }
    fixes![Shell: "echo {bytes} | sudo tee {}/{file}", level.path.trim_end_matches('/')]
}

/// The version of the hierarchy that counts memory, where it is mounted, and the groups from this process's upward.
fn levels(system: &System) -> Option<(u32, String, Vec<Level>)> {
    let groups = system.read("/proc/self/cgroup")?;
    let mounts = system.text("/proc/self/mountinfo");
    let (version, path, mount, usual) = match parse::group(&groups, "memory") {
        Some(path) => (1, path, parse::mount(&mounts, "cgroup", "memory"), "/sys/fs/cgroup/memory"),
        None => (2, parse::group(&groups, "")?, parse::mount(&mounts, "cgroup2", ""), "/sys/fs/cgroup"),
    };
    let (root, point) = mount.unwrap_or_else(|| ("/".into(), usual.into()));
    // Of a hierarchy that is mounted from this process's group on, the group is the mount point itself. The same where
    // the process is outside of what its namespace shows (the kernel then writes /..).
    let inner = match path.strip_prefix(root.trim_end_matches('/')) {
        Some(inner) if !inner.split('/').any(|part| part == "..") => inner.trim_matches('/'),
        _ => "",
    };
    let mut levels = Vec::new();
    let mut inner = Some(inner);
    while let Some(part) = inner {
        let dir = format!("{}/{part}", point.trim_end_matches('/'));
        levels.extend(level(system, version, dir.trim_end_matches('/').to_owned()));
        inner = match part.rsplit_once('/') {
            Some((parent, _)) => Some(parent),
            None => (!part.is_empty()).then_some(""),
        };
    }
    Some((version, point, levels))
}

fn level(system: &System, version: u32, path: String) -> Option<Level> {
    /// No limit is the word `max` in version 2, and in version 1 the largest number of whole pages.
    const NONE: u64 = 1 << 62;
    let number = |file: &str| system.number(&format!("{path}/{file}"));
    let (used, max, dropped) = match version {
        1 => ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file"),
        _ => ("memory.current", "memory.max", "inactive_file"),
    };
    let cache = parse::stat(&system.text(&format!("{path}/memory.stat")), dropped).unwrap_or(0);
    let used = number(used)?.saturating_sub(cache);
    let max = number(max).filter(|limit| version != 1 || *limit < NONE);
    let high = if version == 1 { None } else { number("memory.high") };
    Some(Level { max, high, used, path })
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
