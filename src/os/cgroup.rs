//! The memory limits of this process's control groups, versions 1 and 2, up to the mount.
//!
//! A region's pages are charged to the group of the thread that touches them, and pinned pages
//! cannot be reclaimed: at a limit the kernel ends a process of the group. The tightest limit may
//! be at any level above the process's own; a container's mounts decide which levels it sees.
//!
//! The command's checks use this file too; it reads files below a root, which tests replace.

use std::fs;
use std::path::Path;

/// A group at one level, with its limits and its use in bytes. `None`: no limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlGroup {
    /// The folder of its files.
    pub path: String,
    /// The limit at which the kernel ends a process.
    pub max: Option<u64>,
    /// The limit above which the kernel slows the whole group down (version 2 alone).
    pub high: Option<u64>,
    /// Memory in use, without the page cache that the kernel would drop at once.
    pub used: u64,
    /// The part of the memory in use that the kernel can drop: page cache, and caches of its own.
    pub cached: u64,
}

/// The groups that count this process's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlGroups {
    /// 1 or 2.
    pub version: u32,
    /// Where the hierarchy is mounted.
    #[allow(dead_code, reason = "the command's checks read it")]
    pub point: String,
    /// From this process's group upward. A mount point without limits, the root, is left out.
    pub groups: Vec<ControlGroup>,
}

impl ControlGroup {
    /// Bytes that are left under one of its limits.
    pub fn left(&self, limit: Option<u64>) -> Option<u64> {
        Some(limit?.saturating_sub(self.used))
    }
}

impl ControlGroups {
    /// Reads the groups of this process from the files below `root`. `None`: no group counts
    /// memory, the files cannot be read, or only groups of others are mounted.
    pub fn read(root: &Path) -> Option<Self> {
        let own = text(root, "/proc/self/cgroup")?;
        let mounts = text(root, "/proc/self/mountinfo").unwrap_or_default();
        let (version, path, kind, option, usual) = match group(&own, "memory") {
            Some(path) => (1, path, "cgroup", "memory", "/sys/fs/cgroup/memory"),
            None => (2, group(&own, "")?, "cgroup2", "", "/sys/fs/cgroup"),
        };
        let mut mounts = mounts.lines().filter_map(|line| mount(line, kind, option)).peekable();
        let (point, inner) = match mounts.peek() {
            Some(_) => mounts.find_map(|(top, point)| Some((point, below(top, &path)?)))?,
            None => (usual, below("/", &path)?),
        };
        let dirs = inner.ancestors().map(|part| format!("{point}/{}", part.display()));
        let groups =
            dirs.filter_map(|dir| one(root, version, dir.trim_end_matches('/').to_owned())).collect();
        Some(Self { version, point: point.to_owned(), groups })
    }

    /// The name of the file with the limit at which the kernel ends a process.
    pub fn limit_file(&self) -> &'static str {
        if self.version == 2 { "memory.max" } else { "memory.limit_in_bytes" }
    }

    /// Bytes left under the tightest limit of the process's groups. `None`: there is no limit.
    pub fn left(&self) -> Option<u64> {
        let of = |group: &ControlGroup| [group.left(group.max), group.left(group.high)];
        self.groups.iter().flat_map(of).flatten().min()
    }

    /// The group with the fewest bytes left until the kernel ends a process; caches count as left.
    pub(crate) fn tightest(&self) -> Option<(u64, &ControlGroup)> {
        let left = |group: &ControlGroup| group.left(group.max).map(|left| left.saturating_add(group.cached));
        self.groups.iter().filter_map(|group| Some((left(group)?, group))).min_by_key(|(left, _)| *left)
    }
}

/// Bytes that the system below `root` has available, and that the groups allow. `None`: unknown, or
/// no limit.
pub fn available(root: &Path) -> [Option<u64>; 2] {
    let meminfo = text(root, "/proc/meminfo").unwrap_or_default();
    let kib = stat(&meminfo, "MemAvailable:");
    [kib.and_then(|kib| kib.checked_mul(1024)), ControlGroups::read(root).and_then(|groups| groups.left())]
}

/// What a line of `/proc/self/mountinfo` mounts, if it is a file system `kind` that has `option`
/// among its options: the folder inside of the file system, and the mount point. The line: `36 35
/// 98:0 /folder /point rw shared:1 - kind source options`. A path with white space, which the
/// kernel writes in digits, is no path of anything, so its groups are unknown.
fn mount<'a>(line: &'a str, kind: &str, option: &str) -> Option<(&'a str, &'a str)> {
    let (front, back) = line.split_once(" - ")?;
    let (mut front, mut back) = (front.split(' ').skip(3), back.split(' '));
    let wanted =
        back.next()? == kind && (option.is_empty() || back.nth(1)?.split(',').any(|word| word == option));
    if wanted { Some((front.next()?, front.next()?)) } else { None }
}

/// The path of a group from the mounted group `top` on. `None`: it is not below that one. Outside
/// of what a namespace shows the kernel writes `/..`: there the mounted group counts.
fn below<'a>(top: &str, path: &'a str) -> Option<&'a Path> {
    let is_outside = [top, path].iter().any(|path| path.split('/').any(|part| part == ".."));
    if is_outside { Some(Path::new("")) } else { Path::new(path).strip_prefix(top).ok() }
}

fn one(root: &Path, version: u32, path: String) -> Option<ControlGroup> {
    /// Version 2 writes `max` for no limit, version 1 the most whole pages, which is above this.
    const NO_LIMIT: u64 = 1 << 62;
    let number = |file: &str| text(root, &format!("{path}/{file}"))?.trim().parse::<u64>().ok();
    let (used, max, [idle, busy, kernels]) = match version {
        1 => (
            "memory.usage_in_bytes",
            "memory.limit_in_bytes",
            ["total_inactive_file", "total_active_file", "total_slab_reclaimable"],
        ),
        _ => ("memory.current", "memory.max", ["inactive_file", "active_file", "slab_reclaimable"]),
    };
    let counts = text(root, &format!("{path}/memory.stat")).unwrap_or_default();
    let [idle, busy, kernels] = [idle, busy, kernels].map(|key| stat(&counts, key).unwrap_or(0));
    let used = number(used)?.saturating_sub(idle);
    let max = number(max).filter(|limit| version != 1 || *limit < NO_LIMIT);
    let high = if version == 1 { None } else { number("memory.high") };
    Some(ControlGroup { max, high, used, cached: busy.saturating_add(kernels).min(used), path })
}

/// The file's text. Bytes that are no text (a mount point can be named anything) are replaced.
fn text(root: &Path, path: &str) -> Option<String> {
    let bytes = fs::read(root.join(path.trim_start_matches('/'))).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// The number in a line `key number`, as in `memory.stat`, without a unit behind it.
pub fn stat(text: &str, key: &str) -> Option<u64> {
    let number =
        |line: &str| line.strip_prefix(key)?.strip_prefix(' ')?.split_ascii_whitespace().next()?.parse().ok();
    text.lines().find_map(number)
}

/// The path of this process's group by a controller; `""`: in the unified hierarchy.
pub fn group(text: &str, controller: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        controllers.split(',').any(|name| name == controller).then(|| path.to_owned())
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// What is left in the tightest group of a process in the group `own`, of version 2. A group
    /// below each mounted folder has one byte more left than below the one before.
    fn left(own: &str, mounted: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path.trim_start_matches('/'));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let mut mounts = String::from("22 1 0:5 / /proc rw - proc proc rw\n");
        for (n, (top, point)) in mounted.iter().enumerate() {
            mounts +=
                &format!("36 35 0:30 {top} {point} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n");
            for (path, max) in [("", 1000 + n), ("/worker", 100 + n)] {
                write(&format!("{point}{path}/memory.current"), "0\n");
                write(&format!("{point}{path}/memory.max"), &format!("{max}\n"));
            }
        }
        write("/proc/self/mountinfo", &mounts);
        write("/proc/self/cgroup", &format!("0::{own}\n"));
        ControlGroups::read(root.path())?.left()
    }

    #[test]
    fn ones_own_group_is_looked_up_below_what_is_mounted() {
        let (container, all) = (("/docker/abc", "/sys/fs/cgroup"), ("/", "/sys/fs/cgroup"));
        for (own, mounted, expected) in [
            ("/docker/abc", &[container][..], Some(1000)),
            ("/docker/abc/worker", &[container], Some(100)),
            ("/worker", &[all], Some(100)),
            ("/worker", &[("/", "/elsewhere")], Some(100)),
            ("/worker", &[], None),
            // Outside of what its namespace shows.
            ("/../abc", &[container], Some(1000)),
            // Groups of others are mounted, and then its own too.
            ("/user.slice/shell", &[container], None),
            ("/docker/abcd", &[container], None),
            ("/docker", &[container], None),
            ("/", &[container], None),
            ("/worker", &[container, ("/", "/host")], Some(101)),
            // What cannot be told is unknown.
            ("/a b", &[("/a\\040b", "/sys/fs/cgroup")], None),
        ] {
            assert_eq!(left(own, mounted), expected, "{own} {mounted:?}");
        }
    }

    #[test]
    fn the_hierarchy_of_version_1_is_found_by_its_controller() {
        let line = "36 35 0:30 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory";
        assert_eq!(mount(line, "cgroup", "memory"), Some(("/docker/abc", "/sys/fs/cgroup/memory")));
        assert_eq!(mount(line, "cgroup", "cpu"), None);
        assert_eq!(mount(line, "cgroup2", ""), None);
    }
}
