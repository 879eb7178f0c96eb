//! Limits of the system at which growing must end with an error that names them: control groups, and the
//! number of mappings. And a capacity beyond all of them.

#![cfg(target_os = "linux")]
#![allow(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};

use super::*;

/// A new control group below this process's own, which this process is in for as long as the value lives.
struct Group(PathBuf);

impl Group {
    fn enter(limit: usize) -> std::io::Result<Self> {
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
        fs::write(group.0.join("cgroup.procs"), "0")?;
        Ok(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("../cgroup.procs"), "0");
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn growth_past_a_control_groups_limit_is_an_error_that_names_it() {
    own_process!();
    let _group = match Group::enter(192 << 20) {
        Ok(group) => group,
        Err(error) => return skip!("no control group can be made and entered here: {error}"),
    };
    let pool = builder(&host().1, 1 << 30).region(16 << 20).initial(0).build().unwrap();
    let mut held = Vec::new();
    while pool.wait_pinned(Some(HANG)).unwrap().error.is_none() {
        held.extend(pool.try_checkout(15 << 20));
    }
    // Growing is tried again now and then: what a request is told between two attempts.
    let told = || pool.checkout_timeout(15 << 20, Duration::from_millis(20)).unwrap_err().to_string();
    let is_named = |text: &String| text.contains("pinpool-test-") && text.contains("of 192 MiB");
    assert!((0..100).map(|_| told()).any(|text| is_named(&text)), "{}", told());
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
    let more = builder(&device, 8 << 20).initial((8 << 20) + 4096).build().unwrap_err();
    assert!(more.to_string().contains("are 4 KiB more than the capacity of 8 MiB"), "{more}");
    let pool = builder(&device, usize::MAX).initial(0).region(4 << 20).build().unwrap();
    assert!(usize::MAX - pool.stats().capacity_bytes < 1 << 20);
    drop(pool.checkout(1 << 20).unwrap());
    assert_eq!(pool.stats().pinned_bytes + pool.stats().unpinned_bytes, 4 << 20);
    pool.check().unwrap();
}
