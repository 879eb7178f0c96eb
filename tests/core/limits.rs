//! Limits of the system at which growing must end with an error that names them: control groups, and the
//! number of mappings. And a capacity beyond all of them.

#![cfg(target_os = "linux")]
#![allow(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::support::{own_process, process, skip};
use crate::{builder, host};

const CHILD: &str = "PINPOOL_LIMITS_CHILD";

/// A new control group below this process's own, which goes with the value.
struct Group(PathBuf);

impl Group {
    fn new(limit: usize) -> std::io::Result<Self> {
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let of = |mark: &str| {
            own.lines().find_map(|line| Some(line.split_once(mark)?.1.trim_start_matches('/').to_owned()))
        };
        let (dir, file) = match of(":memory:") {
            Some(path) => (Path::new("/sys/fs/cgroup/memory").join(path), "memory.limit_in_bytes"),
            None => (Path::new("/sys/fs/cgroup").join(of("0::").unwrap_or_default()), "memory.max"),
        };
        let dir = dir.join(format!("pinpool-test-{}", std::process::id()));
        fs::create_dir(&dir)?;
        let group = Self(dir);
        fs::write(group.0.join(file), limit.to_string())?;
        Ok(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn growth_past_a_control_groups_limit_is_an_error_that_names_it() {
    const LIMIT: usize = 192 << 20;
    if std::env::var_os(CHILD).is_some() {
        let pool = builder(&host().1, 1 << 30).region(16 << 20).initial(0).build().unwrap();
        let mut held = Vec::new();
        let error = loop {
            match pool.checkout_timeout(15 << 20, Duration::from_secs(2)) {
                Ok(buf) => held.push(buf),
                Err(error) => break error,
            }
        };
        println!("GROWN BY {}: {error}", held.len());
        return;
    }
    let group = match Group::new(LIMIT) {
        Ok(group) => group,
        Err(error) => return skip!("no control group can be made here: {error}"),
    };
    let again = process::command("growth_past_a_control_groups_limit_is_an_error_that_names_it");
    let mut command = Command::new("sh");
    command.args(["-c", "echo 0 > \"$0\" || exit 77; exec \"$@\""]).arg(group.0.join("cgroup.procs"));
    command.arg(again.get_program()).args(again.get_args());
    command.envs(again.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = command.env(CHILD, "1").output().unwrap();
    if output.status.code() == Some(77) {
        return skip!("no process can be put into a control group here");
    }
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}: {text}{}", output.status, String::from_utf8_lossy(&output.stderr));
    let line = text.lines().find(|line| line.contains("GROWN BY")).unwrap_or_else(|| panic!("{text}"));
    assert!(line.contains("pinpool-test-") && line.contains("of 192 MiB"), "{line}");
}

#[test]
fn a_mapping_too_many_is_told_by_name() {
    own_process!();
    let most: usize = fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    if most > 1 << 20 {
        return skip!("the system allows {most} mappings");
    }
    let pool = builder(&host().1, 64 << 20).initial(0).build().unwrap();
    // Mappings that the system does not join, until it allows no more.
    let map = |prot| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the system's choice.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), 4096, prot, flags, -1, 0) };
        (at != libc::MAP_FAILED).then_some(at)
    };
    let mut all = Vec::with_capacity(most);
    all.extend([libc::PROT_NONE, libc::PROT_READ].into_iter().cycle().map_while(map).take(most));
    let refused = pool.checkout(1 << 20);
    for at in &all {
        // SAFETY: mapped above, and nothing uses it.
        unsafe { libc::munmap(*at, 4096) };
    }
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("vm.max_map_count") && text.contains(&most.to_string()), "{text}");
}

/// A capacity is a bound and no request: nothing but the start is pinned or made ready for it.
#[test]
fn a_capacity_beyond_the_machine_takes_what_is_used_alone() {
    let device = host().1;
    let pool = builder(&device, 1 << 40).initial(8 << 20).build().unwrap();
    let taken = || pool.stats().pinned_bytes + pool.stats().unpinned_bytes;
    assert_eq!((taken(), pool.stats().capacity_bytes), (8 << 20, 1 << 40));
    drop(pool.checkout(1 << 20).unwrap());
    assert_eq!(taken(), 8 << 20);
    pool.check().unwrap();
    let pool = builder(&device, usize::MAX).initial(0).region(4 << 20).build().unwrap();
    assert!(usize::MAX - pool.stats().capacity_bytes < 1 << 20);
    drop(pool.checkout(1 << 20).unwrap());
    assert_eq!(pool.stats().pinned_bytes + pool.stats().unpinned_bytes, 4 << 20);
    pool.check().unwrap();
}
