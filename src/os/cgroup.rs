//! The memory limits of this process's control groups, of version 1 and 2, at every level up to the mount.
//!
//! Pages of a region are charged to the group of the thread that touches them, and pinned pages cannot be reclaimed. So
//! pinning does not fail at a limit: the kernel ends a process of the group. The tightest limit may be at any level above
//! the process's own; a container's mounts decide which levels it sees.
//!
//! The command's checks use this file too. It reads files below a root, which a test replaces.

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
    /// Where the hierarchy is mounted.
    #[allow(dead_code, reason = "the command's checks read it")]
    pub point: String,
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
        let mounts = text(root, "/proc/self/mountinfo").unwrap_or_default();
        let (version, path, mounted, usual) = match group(&own, "memory") {
            Some(path) => (1, path, mount(&mounts, "cgroup", "memory"), "/sys/fs/cgroup/memory"),
            None => (2, group(&own, "")?, mount(&mounts, "cgroup2", ""), "/sys/fs/cgroup"),
        };
        let (top, point) = mounted.unwrap_or_else(|| ("/".into(), usual.into()));
        // If the hierarchy is mounted from this process's group on, the mount point is the group itself. The same is
        // assumed if the process is outside of what its namespace shows (the kernel then writes /..). What is mounted may
        // also be the group of others.
        let is_outside = [&path, &top].iter().any(|path| path.split('/').any(|part| part == ".."));
        let inner = match Path::new(&path).strip_prefix(&top) {
            _ if is_outside => Path::new(""),
            Ok(inner) => inner,
            Err(_) => return None,
        };
        let first = point.trim_end_matches('/');
        let dirs = inner.ancestors().map(|part| format!("{first}/{}", part.display()));
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

/// The first mount of a file system `kind` that has `option` among the file system's options: the folder inside the
/// file system that is mounted, and the mount point. A line of `/proc/self/mountinfo`: `36 35 98:0 /root /point rw
/// shared:1 - kind source options`.
pub fn mount(text: &str, kind: &str, option: &str) -> Option<(String, String)> {
    text.lines().find_map(|line| {
        let (front, back) = line.split_once(" - ")?;
        let (mut front, mut back) = (front.split(' ').skip(3), back.split(' '));
        let wanted = back.next()? == kind
            && (option.is_empty() || back.nth(1).unwrap_or_default().split(',').any(|word| word == option));
        if wanted { Some((unescape(front.next()?), unescape(front.next()?))) } else { None }
    })
}

/// Decodes a path, in which the kernel writes white space and backslashes as three octal digits behind a backslash.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let code = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(code.unwrap_or(b'\\'));
        bytes.extend_from_slice(&part.as_bytes()[if code.is_some() { 3 } else { 0 }..]);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A machine's files in a folder that goes with the value.
    struct Machine(std::path::PathBuf);

    impl Machine {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let root = std::env::temp_dir().join(format!("pinpool-cgroup-{}-{name}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Self(root)
        }
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn groups_of_both_versions_tell_what_they_leave() {
        let meminfo = ("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    2097152 kB\n");
        let old = Machine::new(
            "v1",
            &[
                meminfo,
                ("proc/self/cgroup", "4:cpu,memory:/outer/inner\n0::/\n"),
                ("proc/self/mountinfo", "36 35 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"),
                ("sys/fs/cgroup/memory/outer/inner/memory.usage_in_bytes", "104857600\n"),
                ("sys/fs/cgroup/memory/outer/inner/memory.limit_in_bytes", "9223372036854771712\n"),
                ("sys/fs/cgroup/memory/outer/memory.usage_in_bytes", "209715200\n"),
                ("sys/fs/cgroup/memory/outer/memory.limit_in_bytes", "268435456\n"),
                (
                    "sys/fs/cgroup/memory/outer/memory.stat",
                    "total_inactive_file 52428800\ntotal_active_file 1048576\n",
                ),
            ],
        );
        assert_eq!(available(&old.0), [Some(2048 * MIB), Some(106 * MIB)]);
        let groups = ControlGroups::read(&old.0).unwrap();
        let (left, tightest) = groups.tightest().unwrap();
        assert_eq!((left, &*tightest.path), (107 * MIB, "/sys/fs/cgroup/memory/outer"));
        assert_eq!((groups.version, groups.limit_file()), (1, "memory.limit_in_bytes"));

        let new = Machine::new(
            "v2",
            &[
                meminfo,
                ("proc/self/cgroup", "0::/a/b\n"),
                ("sys/fs/cgroup/a/b/memory.current", "104857600\n"),
                ("sys/fs/cgroup/a/b/memory.max", "209715200\n"),
                ("sys/fs/cgroup/a/b/memory.high", "157286400\n"),
                ("sys/fs/cgroup/a/b/memory.stat", "active_file 10485760\nslab_reclaimable 1048576\n"),
                ("sys/fs/cgroup/a/memory.current", "104857600\n"),
                ("sys/fs/cgroup/a/memory.max", "max\n"),
            ],
        );
        assert_eq!(available(&new.0), [Some(2048 * MIB), Some(50 * MIB)], "memory.high is tighter");
        let groups = ControlGroups::read(&new.0).unwrap();
        let (left, tightest) = groups.tightest().unwrap();
        assert_eq!((left, &*tightest.path), (111 * MIB, "/sys/fs/cgroup/a/b"));

        let none = Machine::new("none", &[meminfo, ("proc/self/cgroup", "3:cpu:/\n")]);
        assert_eq!(available(&none.0), [Some(2048 * MIB), None]);
        assert_eq!(available(Path::new("/nowhere")), [None, None]);
    }

    #[test]
    fn a_group_of_others_that_is_mounted_is_not_ones_own() {
        let left = |own: &str| {
            let files = [
                ("proc/self/cgroup", &*format!("0::{own}\n")),
                ("proc/self/mountinfo", "36 35 0:30 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup rw\n"),
                ("sys/fs/cgroup/memory.current", "104857600\n"),
                ("sys/fs/cgroup/memory.max", "104857600\n"),
            ];
            let machine = Machine::new("others", &files);
            ControlGroups::read(&machine.0)?.tightest().map(|(left, _)| left)
        };
        assert_eq!(["/docker/abc", "/../abc"].map(left), [Some(0), Some(0)]);
        assert_eq!(["/user.slice/shell", "/docker/abcd"].map(left), [None, None]);
    }
}
