//! Host memory: registered bytes that share pages, and memory that the device allocates.

use std::ptr::NonNull;

use super::*;
use crate::device::HostAllocFlags;

const KINDS: [HostKind; 2] = [
    HostKind::Locked(HostAllocFlags { portable: true, mapped: false, write_combined: true }),
    HostKind::Managed,
];

fn page() -> usize {
    crate::os::page_size()
}

/// Bytes of the range that the kernel has locked.
fn locked(start: usize, len: usize) -> usize {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let parse = |text: &str| usize::from_str_radix(text, 16).ok();
    let (mut from, mut to, mut sum) = (0, 0, 0);
    for line in smaps.lines() {
        let range = line.split(' ').next().and_then(|r| r.split_once('-'));
        if let Some((Some(a), Some(b))) = range.map(|(a, b)| (parse(a), parse(b))) {
            (from, to) = (a, b);
        } else if line.strip_prefix("VmFlags:").is_some_and(|flags| flags.split(' ').any(|f| f == "lo")) {
            // The kernel may have joined the range with its neighbours.
            sum += to.min(start + len).saturating_sub(from.max(start));
        }
    }
    sum
}

#[test]
fn ranges_of_bytes_share_pages_and_do_not_overlap() {
    let (rig, page) = (Rig::stepped(), page());
    let base = crate::os::map(4 * page, 1).unwrap();
    let at = |offset: usize| {
        // SAFETY: within the mapping.
        unsafe { base.add(offset) }
    };
    // SAFETY: mapped until the end, and used by no copy.
    let register = |offset: usize, len: usize| unsafe { rig.driver.register(at(offset), len, false) };
    // SAFETY: as above.
    let unregister = |offset: usize, len: usize| unsafe { rig.driver.unpin(at(offset), len) };
    register(100, page).unwrap();
    register(100 + page, 50).unwrap();
    register(3 * page - 1, 2).unwrap();
    for (offset, len) in [(99, 2), (100, 1), (page, 200), (99 + page, 1), (3 * page, 1), (0, 4 * page)] {
        let error = register(offset, len).unwrap_err();
        assert!(error.to_string().contains("overlaps"), "{error}");
    }
    assert!(register(0, 0).is_err());
    assert_eq!(rig.node.live(0).pinned_bytes, page + 52);
    // A range is unregistered only as a whole, and once.
    for (offset, len) in [(100, page - 1), (101, page), (0, 1)] {
        assert!(unregister(offset, len).is_err());
    }
    assert_eq!(rig.driver.device_address(at(149 + page)).unwrap(), at(149 + page).as_ptr().addr() as u64);
    assert!(rig.driver.device_address(at(150 + page)).is_err());
    unregister(100 + page, 50).unwrap();
    assert!(unregister(100 + page, 50).is_err());
    register(100 + page, 50).unwrap();
    unregister(100, page).unwrap();
    unregister(3 * page - 1, 2).unwrap();
    unregister(100 + page, 50).unwrap();
    assert_eq!(rig.node.live(0), HostUsage::default());
    // SAFETY: mapped above, and nothing uses it.
    unsafe { crate::os::unmap(base, 4 * page).unwrap() };
}

#[test]
fn a_page_stays_locked_for_its_neighbour() {
    let (rig, page) = (Rig::stepped(), page());
    let base = crate::os::map(3 * page, 1).unwrap();
    // SAFETY: within the mapping.
    let second = unsafe { base.add(page + 10) };
    let of_ours = || locked(base.as_ptr().addr(), 3 * page) / page;
    // SAFETY: mapped until the end, and used by no copy.
    unsafe {
        if rig.driver.register(base, page + 10, true).is_err() || of_ours() == 0 {
            println!("skipped: the memlock limit is used up, or nothing is ever locked here");
            return;
        }
        rig.driver.register(second, page, true).unwrap();
        assert_eq!(of_ours(), 3);
        rig.driver.unpin(base, page + 10).unwrap();
        assert_eq!(of_ours(), 2, "the page that both are on is still the other's");
        rig.driver.unpin(second, page).unwrap();
        assert_eq!(of_ours(), 0);
        crate::os::unmap(base, 3 * page).unwrap();
    }
}

#[test]
fn allocated_memory_is_freed_as_what_it_was() {
    let (rig, page) = (Rig::stepped(), page());
    for kind in KINDS {
        let other = if kind == KINDS[0] { KINDS[1] } else { KINDS[0] };
        let Ok(base) = rig.driver.allocate_host(2 * page, kind) else {
            println!("skipped: the memlock limit is used up");
            continue;
        };
        // SAFETY: just allocated, with this length.
        unsafe { base.write_bytes(7, 2 * page) };
        let live = rig.node.live(0);
        let pinned = if kind == HostKind::Managed { 0 } else { 2 * page };
        assert_eq!((live.host_bytes, live.pinned_bytes), (2 * page, pinned));
        // SAFETY: refused, so nothing is freed.
        unsafe {
            assert!(rig.driver.free_host(base, page, kind).is_err());
            assert!(rig.driver.free_host(base.add(page), page, kind).is_err());
            assert!(rig.driver.free_host(base, 2 * page, other).is_err());
            assert!(rig.driver.free_host(NonNull::dangling(), page, kind).is_err());
        }
        // SAFETY: pinned already, by the device itself.
        assert_eq!(unsafe { rig.driver.pin(base, page) }.is_err(), pinned > 0);
        if pinned == 0 {
            // SAFETY: pinned just now.
            unsafe { rig.driver.unpin(base, page).unwrap() };
        }
        // SAFETY: allocated once, freed once.
        unsafe { rig.driver.free_host(base, 2 * page, kind).unwrap() };
        assert_eq!(rig.node.live(0), HostUsage::default());
    }
}

#[test]
fn a_dead_device_gives_host_memory_back() {
    let (rig, page) = (Rig::stepped(), page());
    let base = rig.driver.allocate_host(page, HostKind::Managed).unwrap();
    rig.node.kill(0);
    assert!(rig.driver.allocate_host(page, HostKind::Managed).unwrap_err().is_device_lost());
    assert!(rig.driver.device_address(base).unwrap_err().is_device_lost());
    // SAFETY: allocated once, freed once.
    unsafe { rig.driver.free_host(base, page, HostKind::Managed).unwrap() };
    assert_eq!(rig.node.live(0), HostUsage::default());
}
