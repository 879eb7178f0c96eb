//! A control group with a memory limit, made for real: the command runs within it and has to find the limit
//! that the kernel would hold it to. Needs the right to make groups, which mostly is root's; without it the
//! test says why it was skipped, and the fabricated groups beside this are what is left.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::findings;
use crate::support::skip;
use crate::{fails, pinpool, stderr};

/// A group of the test's own, removed in the end.
struct Group {
    path: PathBuf,
    /// The file that bounds its memory.
    limit: &'static str,
}

impl Group {
    /// Beneath the group that this process is in, or beside it, as the version of the hierarchy allows: where
    /// one is mounted at its usual place.
    fn new(bytes: u64) -> std::io::Result<Self> {
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let of = |mark: &str| own.lines().find_map(|line| line.split_once(mark)).map(|(_, path)| path);
        let (parent, limit) = match of(":memory:") {
            Some(path) => (format!("memory{path}"), "memory.limit_in_bytes"),
            // A group with processes of its own, other than the root, cannot bound groups below it.
            None => {
                let path = Path::new(of("0::").unwrap_or("/"));
                (path.parent().unwrap_or(path).display().to_string(), "memory.max")
            }
        };
        let parent = Path::new("/sys/fs/cgroup").join(parent.trim_start_matches('/'));
        let group = Self { path: parent.join(format!("pinpool-doctor-{}", std::process::id())), limit };
        fs::create_dir(&group.path)?;
        fs::write(group.path.join(limit), bytes.to_string())?;
        Ok(group)
    }

    /// The command as a process of this group, from its first instruction on.
    fn pinpool(&self, args: &[&str]) -> Command {
        let file = fs::OpenOptions::new().write(true).open(self.path.join("cgroup.procs")).unwrap();
        let mut command = pinpool();
        command.args(args).args(["--device", "host"]);
        // SAFETY: between fork and exec only a system call is made, on a descriptor opened before.
        unsafe {
            // 0 stands for the process that writes it.
            command.pre_exec(move || std::io::Write::write_all(&mut &file, b"0"))
        };
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

/// The command sees what its groups leave, and takes a part of that: the kernel ends nothing.
#[test]
fn the_command_stays_within_a_real_group() {
    let group = match Group::new(200 << 20) {
        Ok(group) => group,
        Err(why) => return skip!("no control group can be made here: {why}"),
    };
    let said = format!("of 200 MiB ({} of {})", group.limit, group.path.display());
    // What is left is pinned and copied within the group, also where more is asked for, and the limit is
    // said.
    for (args, told) in [
        (&["--capacity", "1GiB"][..], "fail: SAID & the pool wants 1 GiB & the kernel ends"),
        (&["--capacity", "16MiB", "--pin", "400MiB"], "ok: SAID"),
        (&["--capacity", "184MiB"], "warn: SAID & leaves little"),
    ] {
        let found = findings(group.pinpool(&["doctor"]).args(args));
        found.is("cgroup", &told.replace("SAID", &said));
        let pin = found.check("pin")["found"].as_str().unwrap();
        assert!(pin.contains("MiB asked for; ") && pin.contains(" of memory are left)"), "{}", found.0);
    }
    for args in [["load"], ["bench"]] {
        let output = group.pinpool(&args).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
    }
    fails(&mut group.pinpool(&["bench", "--size", "64MiB"]), "no room to measure");
}
