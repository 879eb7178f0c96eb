//! The system calls: every one of the crate is in this file or the folder beside it, behind a safe
//! or plainly `unsafe` function that returns the crate's own errors.
//!
//! Two things in this file are less obvious than a call and its error code.
//!
//! *Alignment.* `mmap` promises a page; a region wants 2 MiB, so that huge pages can back it.
//! [`map`] therefore asks for the alignment on top of the length and gives the two ends back, so
//! the range that it returns can be unmapped in one piece.
//!
//! *Locking.* The kernel refuses `mlock` with three codes (ENOMEM, EPERM, EAGAIN) that have one
//! cure, raising the memlock limit, so they become one error that shows the limit. It is only
//! shown, never used to predict: a process with CAP_IPC_LOCK is not bound by it.
//!
//! Nothing here keeps state of the pool's. The only foreign code called is the subscriber's.
//!
//! This file has the calls on memory and processors, and what `/proc` tells. `file` has the calls
//! on files, `thread` starts threads, `cgroup` reads what control groups leave, `barrier` has the
//! barrier for all threads, and `fork` says what a fork does. Every module may call this one.

#![allow(unsafe_code)]

pub(crate) mod barrier;
pub mod cgroup;
pub(crate) mod file;
mod fork;
pub(crate) mod thread;

pub use fork::forked;
pub(crate) use fork::{check_fork, empty_in_child, watch_forks};

use std::fs;
use std::io::{self, Read as _};
use std::ops::Range;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::OnceLock;

use libc::{c_long, c_void};

use crate::amount::Amount;
use crate::error::{Error, Result};

/// The size of a page in bytes; a power of two.
pub(crate) fn page_size() -> usize {
    static SIZE: OnceLock<usize> = OnceLock::new();
    *SIZE.get_or_init(|| {
        // SAFETY: sysconf only reads a value.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        // POSIX has no failure for this name; if it had, the smallest page would be a safe choice.
        usize::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(4096)
    })
}

/// Maps `len` bytes (some, in whole pages) of zeroes on a multiple of `align`, a power of two.
pub(crate) fn map(len: usize, align: usize) -> Result<NonNull<u8>> {
    debug_assert!(len > 0 && align.is_power_of_two());
    let page = page_size();
    // mmap aligns to a page; beyond that, up to a page less than the alignment is lost in front.
    let slack = align.saturating_sub(page);
    let too_much = || Error::OutOfMemory { wanted: len, text: "more than the address space".to_owned() };
    let len = len.checked_next_multiple_of(page).ok_or_else(too_much)?;
    let total = len.checked_add(slack).ok_or_else(too_much)?;

    // SAFETY: a new anonymous mapping, where the kernel chooses, touches nothing that exists.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            total,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    let start = match NonNull::new(start.cast::<u8>()) {
        Some(start) if start.as_ptr().cast() != libc::MAP_FAILED => start,
        _ => return Err(refused(len)),
    };

    // At most the slack, since the mapping starts on a page.
    let front = start.addr().get().next_multiple_of(align) - start.addr().get();
    // SAFETY: front <= slack, so all offsets lie within the mapping, and both ends are whole unused
    // pages. If the kernel refuses to split it (too many mappings), the ends stay mapped.
    unsafe {
        let base = start.add(front);
        if front > 0 {
            libc::munmap(start.as_ptr().cast(), front);
        }
        if slack > front {
            libc::munmap(base.add(len).as_ptr().cast(), slack - front);
        }
        Ok(base)
    }
}

/// Undoes [`map`], for all of it or for a part.
///
/// # Safety
/// `base..base + len` are whole pages of a range of `map`'s, and nothing uses them any more.
pub(crate) unsafe fn unmap(base: NonNull<u8>, len: usize) -> Result<()> {
    // SAFETY: the caller's promise.
    if unsafe { libc::munmap(base.as_ptr().cast(), len) } == 0 { Ok(()) } else { Err(refused(len)) }
}

/// Asks for huge pages under the range. `false`: the kernel will not, which costs speed only.
pub(crate) fn advise_huge(base: NonNull<u8>, len: usize) -> bool {
    advise(base, len, libc::MADV_HUGEPAGE)
}

/// Asks for pages of the ordinary size under the range. `false`: the kernel knows no others.
pub(crate) fn advise_small(base: NonNull<u8>, len: usize) -> bool {
    advise(base, len, libc::MADV_NOHUGEPAGE)
}

/// Keeps the range out of forked children. `false`: children will see a copy of it.
pub(crate) fn dont_fork(base: NonNull<u8>, len: usize) -> bool {
    advise(base, len, libc::MADV_DONTFORK)
}

/// Makes the kernel provide the pages of the range now, as if each were written to. `false`: it did
/// not (before Linux 5.14 it cannot), and a page comes when it is touched.
pub(crate) fn populate(base: NonNull<u8>, len: usize) -> bool {
    advise(base, len, libc::MADV_POPULATE_WRITE)
}

/// Makes the pages of the range, which have not been touched yet, come from a NUMA node as long as
/// that has any. `false`: the kernel knows no such node, and a page comes from where it is touched.
pub(crate) fn prefer_node(base: NonNull<u8>, len: usize, node: u32) -> bool {
    const BITS: usize = u64::BITS as usize;
    const NODES: usize = 1024;
    let mut mask = [0_u64; NODES / BITS];
    let Some(word) = mask.get_mut(node as usize / BITS) else { return false };
    *word = 1 << (node as usize % BITS);
    // SAFETY: a policy changes no contents; the mask lives for the call and has as many bits as are
    // named, and for a range that is not mapped the kernel answers with an error.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            base.as_ptr(),
            len,
            c_long::from(libc::MPOL_PREFERRED),
            mask.as_ptr(),
            NODES + 1,
            0,
        )
    };
    done == 0
}

/// Makes this thread run on those processors of a NUMA node alone that it may run on. `false`:
/// nothing changed.
pub(crate) fn run_on_node(node: u32) -> bool {
    let Ok(list) = fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist")) else {
        return false;
    };
    let Some(mut set) = allowed_cpus() else { return false };
    let (here, most): (Vec<usize>, _) = (cpu_list(&list).collect(), libc::CPU_SETSIZE as usize);
    for cpu in (0..most).filter(|cpu| !here.contains(cpu)) {
        // SAFETY: within the set.
        unsafe { libc::CPU_CLR(cpu, &mut set) };
    }
    // If no processor is left, the kernel refuses.
    // SAFETY: the set lives for the call; 0 is this thread.
    unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) == 0 }
}

/// The processors that this thread may run on: others may have been excluded.
fn allowed_cpus() -> Option<libc::cpu_set_t> {
    // SAFETY: a set of numbers, for which zeros are the empty one.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set lives for the call, which fills it; 0 is this thread.
    let asked = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) };
    (asked == 0).then_some(set)
}

/// The numbers in a list such as `0-3,8`.
fn cpu_list(text: &str) -> impl Iterator<Item = usize> {
    text.trim().split(',').flat_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let range = first.parse().ok().zip(last.parse().ok());
        let (first, last): (usize, usize) = range.unwrap_or((1, 0));
        first..=last
    })
}

/// The NUMA node that a PCI device is attached to. `None`: the system does not tell.
pub(crate) fn pci_node(bus: &str) -> Option<u32> {
    let path = format!("/sys/bus/pci/devices/{}/numa_node", bus.to_ascii_lowercase());
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Makes this thread's sleeps end on time. By default the kernel may end them up to 50 us later.
pub(crate) fn sleep_precisely() {
    // SAFETY: a number of nanoseconds, for this thread alone. Should it fail, sleeps are longer.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000 as libc::c_ulong) };
}

/// The kernel's version, as major and minor number.
pub(crate) fn kernel() -> Option<(u32, u32)> {
    kernel_version(&fs::read_to_string("/proc/sys/kernel/osrelease").ok()?)
}

fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Only for advice that leaves contents as they are, in this process.
fn advise(base: NonNull<u8>, len: usize, advice: libc::c_int) -> bool {
    // SAFETY: the kinds of advice given above change neither contents nor validity in this process,
    // and for a range that is not mapped the kernel answers with an error.
    unsafe { libc::madvise(base.as_ptr().cast::<c_void>(), len, advice) == 0 }
}

/// Locks the pages of the range in memory, faulting them in. On an error none stays locked.
pub(crate) fn lock(base: NonNull<u8>, len: usize) -> Result<()> {
    // SAFETY: mlock changes no contents, and an unmapped range gives an error.
    if unsafe { libc::mlock(base.as_ptr().cast(), len) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    // The kernel may have locked a part before it met the page that it could not lock.
    // SAFETY: as for mlock.
    unsafe { libc::munlock(base.as_ptr().cast(), len) };
    Err(match error.raw_os_error() {
        Some(libc::ENOMEM | libc::EPERM | libc::EAGAIN) => {
            let limit =
                memlock_limit().map_or_else(|| "unlimited".to_owned(), |limit| Amount(limit).to_string());
            Error::MemLock { wanted: len, limit }
        }
        _ => Error::OutOfMemory { wanted: len, text: error.to_string() },
    })
}

/// Unlocks the pages of the range.
pub(crate) fn unlock(base: NonNull<u8>, len: usize) -> Result<()> {
    // SAFETY: munlock changes no contents, and an unmapped range gives an error.
    if unsafe { libc::munlock(base.as_ptr().cast(), len) } == 0 { Ok(()) } else { Err(refused(len)) }
}

/// How many bytes this process may lock without privileges. `None`: any number.
pub(crate) fn memlock_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a live rlimit that the call fills.
    let asked = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    if asked != 0 || limit.rlim_cur == libc::RLIM_INFINITY {
        return None;
    }
    Some(limit.rlim_cur)
}

/// Bytes of memory that this process could still take: the lesser of what the system has available
/// and what control groups (of either version) have left. Page cache could be dropped too.
pub(crate) fn available_memory() -> Option<u64> {
    cgroup::available(Path::new("/")).into_iter().flatten().min()
}

/// Refuses memory that the process's control groups would not carry: once touched, the kernel would
/// end a process. Unreadable groups refuse nothing. Swap does not count as room.
pub(crate) fn refuse_over_cgroups(len: usize) -> Result<()> {
    over_cgroups(Path::new("/"), len)
}

fn over_cgroups(root: &Path, len: usize) -> Result<()> {
    // The driver's tables of the pages, and what the process takes beside.
    const BESIDE: u64 = 1 << 20;
    let need = (len as u64).saturating_add(len as u64 / 64).saturating_add(BESIDE);
    let Some(groups) = cgroup::ControlGroups::read(root) else { return Ok(()) };
    let Some((left, group)) = groups.tightest().filter(|(left, _)| *left < need) else { return Ok(()) };
    let (left, limit) = (Amount(left), Amount(group.max.unwrap_or(0)));
    let (path, file) = (&group.path, groups.limit_file());
    let text = format!(
        "the control group {path} has {left} left of {limit} ({file}), and the kernel ends a process of a group that \
         exceeds this; raise the limit, lower the pool's capacity, or let the pool try all the same \
         (PoolBuilder::check_cgroups)"
    );
    Err(Error::OutOfMemory { wanted: len, text })
}

/// Whether the address is in memory that this process can read or write like any other: mapped with
/// such a permission, and not a window of a GPU's driver. Slow, since it reads a table of the
/// kernel's: for saying what a wrong address is. `None`: the table cannot be read.
pub(crate) fn is_host_memory(address: u64) -> Option<bool> {
    Some(maps_host_memory(&maps()?, address as usize))
}

/// Whether this process may write to all of a range. `None`: the table cannot be read.
pub(crate) fn is_writable(start: usize, len: usize) -> Option<bool> {
    Some(maps_writable(&maps()?, start, start + len))
}

/// The table of this process's mappings. The path of a mapped file can be any bytes.
fn maps() -> Option<String> {
    Some(String::from_utf8_lossy(&fs::read("/proc/self/maps").ok()?).into_owned())
}

/// Address range, permissions and path (or nothing) of each mapping, in order of the addresses.
/// Lines read `from-to perms offset device inode path`, in hexadecimal.
fn mappings(maps: &str) -> impl Iterator<Item = (Range<usize>, &str, &str)> {
    maps.lines().filter_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (from, to) = fields.next()?.split_once('-')?;
        let range = usize::from_str_radix(from, 16).ok()?..usize::from_str_radix(to, 16).ok()?;
        Some((range, fields.next()?, fields.nth(3).unwrap_or_default()))
    })
}

/// Whether mappings that can be written to cover the range.
fn maps_writable(maps: &str, start: usize, end: usize) -> bool {
    let writable = mappings(maps).filter(|(_, permissions, _)| permissions.starts_with("rw"));
    writable.fold(start, |at, (range, ..)| if range.contains(&at) { range.end } else { at }) >= end
}

/// Whether a mapping has the address in memory of the host's.
fn maps_host_memory(maps: &str, address: usize) -> bool {
    // Drivers reserve their devices' addresses without permission, or map them from a device file.
    // Shared memory is mapped from under /dev too (/dev/zero, /dev/shm).
    let windows = ["/dev/nvidia", "/dev/dxg", "/dev/davinci", "/dev/devmm_svm"];
    mappings(maps).any(|(range, permissions, path)| {
        let is_window = windows.iter().any(|window| path.starts_with(window));
        range.contains(&address) && !permissions.starts_with("--") && !is_window
    })
}

/// Makes the process's exit call `handler` before the handlers that were registered so far.
/// `false`: the system has no memory for it. The handler must not panic.
pub(crate) fn at_exit(handler: extern "C" fn()) -> bool {
    // SAFETY: the function lives as long as the process.
    unsafe { libc::atexit(handler) == 0 }
}

/// The error of the call that has just failed for `len` bytes.
fn refused(len: usize) -> Error {
    let error = io::Error::last_os_error();
    let full = (error.raw_os_error() == Some(libc::ENOMEM)).then(few_mappings_left).flatten();
    Error::OutOfMemory { wanted: len, text: format!("{error}{}", full.unwrap_or_default()) }
}

/// What to do where the process has nearly as many mappings as the system allows.
fn few_mappings_left() -> Option<String> {
    let most: u64 = fs::read_to_string("/proc/sys/vm/max_map_count").ok()?.trim().parse().ok()?;
    // Piece by piece: a process without mappings left may be given no memory for the whole table.
    let (mut table, mut piece, mut used) = (fs::File::open("/proc/self/maps").ok()?, [0; 4096], 0_u64);
    loop {
        match table.read(&mut piece).ok()? {
            0 => break,
            n => used += piece[..n].iter().filter(|byte| **byte == b'\n').count() as u64,
        }
    }
    // A mapping that is aligned is made of three.
    (used + 8 > most).then(|| {
        format!(
            "; the process has {used} mappings, and vm.max_map_count allows {most}: raise it (sysctl -w \
             vm.max_map_count={})",
            most.saturating_mul(4)
        )
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn maps_at_the_alignment_and_gives_all_of_it_back() {
        let page = page_size();
        for align in [1, page, 16 * page, 2 << 20, 1 << 30] {
            for len in [1, page, (2 << 20) + page] {
                let base = map(len, align).unwrap();
                assert_eq!(base.as_ptr() as usize % align.max(page), 0);
                let whole = len.next_multiple_of(page);
                // SAFETY: within the mapping just made, which only this test knows.
                unsafe {
                    assert_eq!(base.as_ptr().read(), 0);
                    base.as_ptr().add(whole - 1).write(7);
                    unmap(base, whole).unwrap();
                }
            }
        }
        for (len, align) in [(usize::MAX, 4096), (usize::MAX - (1 << 20), 2 << 20), (1 << 60, 4096)] {
            assert!(matches!(map(len, align), Err(Error::OutOfMemory { .. })));
        }
    }

    #[test]
    fn memory_that_the_groups_would_not_carry_is_refused_by_their_name() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let refuses = |len| over_cgroups(root.path(), len);
        assert_eq!(refuses(1 << 40), Ok(()), "nothing can be read");
        write("proc/self/cgroup", "0::/server\n");
        write("sys/fs/cgroup/server/memory.current", "104857600\n");
        write("sys/fs/cgroup/server/memory.max", "max\n");
        assert_eq!(refuses(1 << 40), Ok(()), "there is no limit");
        write("sys/fs/cgroup/server/memory.max", "209715200\n");
        assert_eq!(refuses(64 << 20), Ok(()));
        // What the kernel can drop counts as left.
        write("sys/fs/cgroup/server/memory.stat", "active_file 41943040\nslab_reclaimable 1048576\n");
        assert_eq!(refuses(128 << 20), Ok(()));
        write("sys/fs/cgroup/server/memory.stat", "anon 41943040\n");
        let refused = refuses(128 << 20).unwrap_err();
        let text = refused.to_string();
        for part in
            ["128 MiB", "/sys/fs/cgroup/server", "100 MiB left of 200 MiB", "memory.max", "check_cgroups"]
        {
            assert!(refused.is_retryable() && text.contains(part), "{part:?} is missing: {text}");
        }
    }

    #[test]
    fn reads_what_the_system_says_about_itself() {
        assert_eq!(kernel_version("6.12.3-generic"), Some((6, 12)));
        assert_eq!(kernel_version("5.4"), Some((5, 4)));
        assert_eq!(kernel_version("unknown"), None);
        assert!(kernel().is_some_and(|version| version >= (3, 0)));
        let cpus = |text: &str| cpu_list(text).collect::<Vec<_>>();
        assert_eq!(cpus("0-3,8\n"), [0, 1, 2, 3, 8]);
        assert_eq!(cpus("5"), [5]);
        assert_eq!(cpus("\n"), [0; 0]);
        assert_eq!(pci_node("ffff:ff:1f.7"), None);
    }

    #[test]
    fn a_thread_stays_on_the_processors_that_it_was_given() {
        // In a thread of its own, which ends with whatever processors it may run on.
        let run = || {
            // SAFETY: within the set.
            let has = |set: &libc::cpu_set_t, cpu: usize| unsafe { libc::CPU_ISSET(cpu, set) };
            let mut set = allowed_cpus().unwrap();
            let first = (0..libc::CPU_SETSIZE as usize).find(|cpu| has(&set, *cpu)).unwrap();
            // SAFETY: a set of numbers, filled within; it lives for the call.
            unsafe {
                libc::CPU_ZERO(&mut set);
                libc::CPU_SET(first, &mut set);
                assert_eq!(libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set), 0);
            }
            // Those nodes may have all processors, or not exist.
            (0..4).for_each(|node| _ = run_on_node(node));
            // SAFETY: two sets that live.
            assert!(unsafe { libc::CPU_EQUAL(&allowed_cpus().unwrap(), &set) });
        };
        std::thread::spawn(run).join().unwrap();
    }

    #[test]
    fn tells_what_addresses_are() {
        let maps = "1000-3000 rw-p 00000000 00:00 0\n\
                    3000-4000 rw-s 00000000 00:00 0\n\
                    5000-6000 r--p 00000000 08:01 1 /a file\n\
                    6000-7000 rw-p 00000000 00:00 0\n\
                    8000-9000 ---p 00000000 00:00 0\n\
                    9000-a000 rw-s 00000000 00:06 9                  /dev/nvidia0\n\
                    a000-b000 rw-s 00000000 00:01 9                  /dev/zero (deleted)\n";
        for (start, end, is_host, is_writable) in [
            (0x1000, 0x4000, true, true),
            (0x1800, 0x3001, true, true),
            (0x3fff, 0x4001, true, false),
            (0x5000, 0x5001, true, false),
            (0x5000, 0x7000, true, false),
            (0x0, 0x2000, false, false),
            (0x8000, 0x8001, false, false),
            (0x9000, 0x9001, false, true),
            (0xafff, 0xb000, true, true),
        ] {
            let told = (maps_host_memory(maps, start), maps_writable(maps, start, end));
            assert_eq!(told, (is_host, is_writable), "{start:#x}..{end:#x}");
        }
        let mut local = 1_u8;
        let address = (&raw mut local).addr();
        assert_eq!((is_host_memory(address as u64), is_writable(address, 1)), (Some(true), Some(true)));
        assert_eq!((is_host_memory(1), is_writable(1, 1)), (Some(false), Some(false)));
    }
}
