//! Limits of the system at which growing must end with an error that names them: control groups, and the number of
//! mappings.

#![cfg(target_os = "linux")]
#![allow(unsafe_code)]

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
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
        let pool = builder(&host().1, 1 << 30).region(64 << 20).initial(0).build().unwrap();
        let (mut held, timeout) = (Vec::new(), Duration::from_secs(4));
        let error = loop {
            match pool.checkout_timeout(15 << 20, timeout) {
                Ok(buf) => held.push(buf),
                Err(error) => break error,
            }
        };
        let count = held.len();
        println!("GROWN BY {count}: {error}");
        return;
    }
    let group = match Group::new(LIMIT) {
        Ok(group) => group,
        Err(error) => return skip!("no control group can be made here: {error}"),
    };
    let mut command = process::command("growth_past_a_control_groups_limit_is_an_error_that_names_it");
    command.env(CHILD, "1");
    let procs = std::ffi::CString::new(group.0.join("cgroup.procs").to_str().unwrap()).unwrap();
    // SAFETY: only system calls are made between fork and exec.
    unsafe {
        command.pre_exec(move || {
            let file = libc::open(procs.as_ptr(), libc::O_WRONLY);
            let written = libc::write(file, c"0".as_ptr().cast(), 1);
            libc::close(file);
            if written == 1 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => return skip!("no process can be put into a control group here: {error}"),
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}: {text}{}", output.status, String::from_utf8_lossy(&output.stderr));
    let line = text.lines().find(|line| line.contains("GROWN BY")).unwrap_or_else(|| panic!("{text}"));
    assert!(line.contains("pinpool-test-") && line.contains("of 192 MiB"), "{line}");
}

/// Mappings that the system does not join, until it allows no more.
fn use_up_mappings() -> Vec<*mut libc::c_void> {
    let mut all = Vec::with_capacity(1 << 20);
    while all.len() < all.capacity() {
        let prot = if all.len() % 2 == 0 { libc::PROT_NONE } else { libc::PROT_READ };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the system's choice.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), 4096, prot, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            break;
        }
        all.push(at);
    }
    all
}

#[test]
fn a_mapping_too_many_is_told_by_name() {
    own_process!();
    let most: usize = fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    if most > 1 << 20 {
        return skip!("the system allows {most} mappings");
    }
    let pool = builder(&host().1, 64 << 20).initial(0).build().unwrap();
    let all = use_up_mappings();
    let refused = pool.checkout(1 << 20);
    for at in &all {
        // SAFETY: mapped above, and nothing uses it.
        unsafe { libc::munmap(*at, 4096) };
    }
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("vm.max_map_count") && text.contains(&most.to_string()), "{text}");
}
