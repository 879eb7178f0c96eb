//! A control group with a memory limit, made for real: the doctor runs within it and has to find the limit that the
//! kernel would hold it to. Needs the right to make groups, which mostly is root's; without it the test says why it was
//! skipped, and the fabricated groups beside this are what is left.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{doctor, findings};
use crate::support::skip;
use crate::{pinpool, stderr};

/// A group of the test's own, removed in the end.
struct Group {
    path: PathBuf,
    /// The file that bounds its memory.
    limit: &'static str,
}

impl Group {
    /// Beneath the group that this process is in, or beside it, as the version of the hierarchy allows.
    fn new(bytes: u64) -> Result<Self, String> {
        let read = |path: &str| fs::read_to_string(path).map_err(|error| format!("{path}: {error}"));
        let (groups, mounts) = (read("/proc/self/cgroup")?, read("/proc/self/mountinfo")?);
        let own = |controller: &str| {
            groups.lines().find_map(|line| {
                let (names, path) = line.split_once(':')?.1.split_once(':')?;
                names.split(',').any(|name| name == controller).then_some(path)
            })
        };
        // Where a hierarchy is mounted that begins at its root, so that paths in it are as /proc has them.
        let mount = |kind: &str, controller: &str| {
            mounts.lines().find_map(|line| {
                let (front, back) = line.split_once(" - ")?;
                let (mut front, mut back) = (front.split(' ').skip(3), back.split(' '));
                let fits = front.next()? == "/"
                    && back.next()? == kind
                    && (controller.is_empty() || back.nth(1)?.split(',').any(|name| name == controller));
                fits.then(|| front.next().map(PathBuf::from))?
            })
        };
        let (parent, limit) = match own("memory") {
            Some(path) => {
                let mount = mount("cgroup", "memory").ok_or("the memory hierarchy is not mounted")?;
                (mount.join(path.trim_start_matches('/')), "memory.limit_in_bytes")
            }
            None => {
                let path = own("").ok_or("this process is in no group")?;
                let mount = mount("cgroup2", "").ok_or("the unified hierarchy is not mounted")?;
                // A group with processes of its own, other than the root, cannot bound groups below it.
                let parent = Path::new(path).parent().unwrap_or(Path::new("/"));
                let parent = mount.join(parent.strip_prefix("/").unwrap_or(parent));
                let passed = fs::read_to_string(parent.join("cgroup.subtree_control")).unwrap_or_default();
                if !passed.split_ascii_whitespace().any(|name| name == "memory") {
                    return Err(format!("{} passes no memory limits on", parent.display()));
                }
                (parent, "memory.max")
            }
        };
        // A number of its own, since tests run side by side.
        static GROUPS: AtomicU32 = AtomicU32::new(0);
        let number = GROUPS.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("pinpool-doctor-{}-{number}", std::process::id()));
        fs::create_dir(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let group = Self { path, limit };
        let file = group.path.join(limit);
        fs::write(&file, bytes.to_string()).map_err(|error| format!("{}: {error}", file.display()))?;
        Ok(group)
    }

    fn doctor(&self, capacity: &str) -> Command {
        let mut command = doctor();
        command.args(["--device", "host", "--capacity", capacity, "--pin", "2MiB"]);
        self.with(command)
    }

    /// The command as a process of this group, from its first instruction on.
    fn with(&self, mut command: Command) -> Command {
        let procs = self.path.join("cgroup.procs");
        let file = fs::OpenOptions::new().write(true).open(procs).unwrap();
        // SAFETY: between fork and exec only a system call is made, on a descriptor opened before.
        unsafe {
            command.pre_exec(move || {
                use std::os::fd::AsRawFd;
                // 0 stands for the process that writes it.
                match libc::write(file.as_raw_fd(), b"0".as_ptr().cast(), 1) {
                    1 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            });
        }
        command
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Processes that have just ended are in it for a little longer.
        for _ in 0..100 {
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        eprintln!("{} could not be removed", self.path.display());
    }
}

/// A group with that limit. `None`, and said: none can be made.
fn group_of(bytes: u64) -> Option<Group> {
    Group::new(bytes).inspect_err(|why| skip!("no control group can be made here: {why}")).ok()
}

#[test]
fn a_real_group_with_a_limit_is_found() {
    let Some(group) = group_of(256 << 20) else { return };
    let path = group.path.to_str().unwrap();
    let said = format!("of 256 MiB ({} of {path})", group.limit);
    let found = findings(&mut group.doctor("1GiB"));
    found.is("cgroup", &format!("fail: {said} & the pool wants 1 GiB & the kernel ends"));
    // What fits is pinned and copied within the group, and the limit is said all the same.
    let found = findings(&mut group.doctor("16MiB"));
    found.is("cgroup", &format!("ok: {said}"));
    let memlock = &found.check("memlock")["status"];
    assert!(found.check("pin")["status"] != "fail" || memlock == "fail", "{}", found.0);
    // Little is left past the pool.
    findings(&mut group.doctor("240MiB")).is("cgroup", &format!("warn: {said} & leaves little"));
}

/// The command sees what its groups leave, and takes a part of that: the kernel ends nothing.
#[test]
fn the_command_stays_within_a_real_group() {
    let Some(group) = group_of(200 << 20) else { return };
    let pinpool = |args: &[&str]| {
        let mut command = pinpool();
        command.args(args).args(["--device", "host"]);
        group.with(command)
    };
    // By themselves, and told to take more than there is.
    for args in [&["doctor", "--capacity", "1GiB"][..], &["doctor", "--pin", "4GiB"]] {
        let mut command = pinpool(args);
        let found = findings(command.env_remove("PINPOOL_LIBCUDA"));
        assert!(found.check("pin")["found"].as_str().unwrap().contains("of memory are left"), "{}", found.0);
    }
    for args in [["load"], ["bench"]] {
        let output = pinpool(&args).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
    }
    let output = pinpool(&["bench", "--size", "64MiB"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("no room to measure"), "{}", stderr(&output));
}
