//! The memory limits of this process's control groups, of version 1 and 2, at every level up to the mount.
//!
//! Pages of a region are charged to the group of the thread that touches them, and pinned pages cannot be reclaimed. So
//! pinning does not fail at a limit: the kernel ends a process of the group. The tightest limit may be at any level above
//! the process's own; a container's mounts decide which levels it sees.
//!
//! The command's checks use this file too, and their tests try it: it reads files below a root, which a test replaces.

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
    /// Of the memory in use, what the kernel can drop after all: page cache in use, and caches of its own.
    pub cached: u64,
}

/// The groups that count this process's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlGroups {
    /// 1 or 2.
    pub version: u32,
    /// Where the hierarchy is mounted, by the convention that all distributions and container runtimes follow.
    #[allow(dead_code, reason = "the command's checks read it")]
    pub point: &'static str,
    /// From this process's own group upward. A mount point without limits is the root of all groups, and left out.
    pub groups: Vec<ControlGroup>,
}

impl ControlGroup {
    /// Bytes that are left under one of its limits.
    pub fn left(&self, limit: Option<u64>) -> Option<u64> {
        Some(limit?.saturating_sub(self.used))
    }
}

impl ControlGroups {
    /// Reads the groups of this process from the files below `root`. `None`: no group counts memory, or the files cannot
    /// be read.
    pub fn read(root: &Path) -> Option<Self> {
        let own = text(root, "/proc/self/cgroup")?;
        let (version, path) = match group(&own, "memory") {
            Some(path) => (1, path),
            None => (2, group(&own, "")?),
        };
        let point = if version == 1 { "/sys/fs/cgroup/memory" } else { "/sys/fs/cgroup" };
        // A container without a namespace of its own has only its group mounted, and not the folders above it. Of a
        // process outside of what its namespace shows the kernel writes `/..`.
        let inner = if path.split('/').any(|part| part == "..") { "" } else { path.trim_start_matches('/') };
        let dirs = Path::new(inner).ancestors().map(|part| format!("{point}/{}", part.display()));
        let groups =
            dirs.filter_map(|dir| one(root, version, dir.trim_end_matches('/').to_owned())).collect();
        Some(Self { version, point, groups })
    }

    /// The name of the file with the limit at which the kernel ends a process.
    pub fn limit_file(&self) -> &'static str {
        if self.version == 2 { "memory.max" } else { "memory.limit_in_bytes" }
    }

    /// Bytes that this process may still use under the tightest limit of its groups. `None`: there is no limit.
    pub fn left(&self) -> Option<u64> {
        let of = |group: &ControlGroup| [group.left(group.max), group.left(group.high)];
        self.groups.iter().flat_map(of).flatten().min()
    }

    /// The group with the least memory left until the kernel ends a process, and how many bytes that are. What the kernel
    /// can drop counts as left.
    pub fn tightest(&self) -> Option<(u64, &ControlGroup)> {
        let left = |group: &ControlGroup| group.left(group.max).map(|left| left.saturating_add(group.cached));
        self.groups.iter().filter_map(|group| Some((left(group)?, group))).min_by_key(|(left, _)| *left)
    }
}

/// Bytes that the system below `root` has available, and bytes that this process's control groups still allow. `None`:
/// unknown, or no limit.
pub fn available(root: &Path) -> [Option<u64>; 2] {
    let meminfo = text(root, "/proc/meminfo").unwrap_or_default();
    let kib = stat(&meminfo, "MemAvailable:");
    [kib.and_then(|kib| kib.checked_mul(1024)), ControlGroups::read(root).and_then(|groups| groups.left())]
}

fn one(root: &Path, version: u32, path: String) -> Option<ControlGroup> {
    /// Version 2 writes `max` for no limit, version 1 the largest number of whole pages, which is above this.
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

/// The number in a line `key number`, as in a control group's `memory.stat`. A unit behind it is left out.
pub fn stat(text: &str, key: &str) -> Option<u64> {
    let number =
        |line: &str| line.strip_prefix(key)?.strip_prefix(' ')?.split_ascii_whitespace().next()?.parse().ok();
    text.lines().find_map(number)
}

/// The path of this process's group in the hierarchy of a controller; `""` stands for the unified hierarchy.
pub fn group(text: &str, controller: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        controllers.split(',').any(|name| name == controller).then(|| path.to_owned())
    })
}
