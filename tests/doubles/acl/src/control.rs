//! What tests ask of this stand-in alone, and what its report says. Looked up by name, like the library's own calls;
//! the controls of all stand-ins are in `tests/doubles/control.rs`.

use std::fmt::Write;

use crate::calls::forget;
use crate::shared::{late, with};
use crate::world::{CURRENT, World, overlaps};

/// Everything as when the library was loaded; handles from before name nothing any more. Of what threads have of their
/// own, only the calling thread's part is reset.
#[unsafe(no_mangle)]
extern "C" fn standin_reset() {
    with(World::reset);
    CURRENT.set(0);
    forget();
}

/// Kills a device with that code.
#[unsafe(no_mangle)]
extern "C" fn standin_kill(device: usize, code: u32) {
    with(|w| w.kill(device, code));
}

/// Whether a copy may still use this memory that had not ended when its device was lost.
#[unsafe(no_mangle)]
extern "C" fn standin_late(at: usize, len: usize) -> bool {
    let uses = |side: &(usize, usize)| overlaps(at, len, side.0, side.1);
    with(|w| w.late.iter().flatten().any(uses)).unwrap_or(false)
}

/// Whether the program is said to run on the device (RC mode). To be set before anything is allocated.
#[unsafe(no_mangle)]
extern "C" fn standin_on_device(on_device: bool) {
    with(|w| w.on_device = on_device);
}

/// Whether every copy is of a whole segment, so that the distance between them can be checked.
#[unsafe(no_mangle)]
extern "C" fn standin_segments(whole: bool) {
    with(|w| w.whole_segments = whole);
}

/// How many events and streams each device has from now on.
#[unsafe(no_mangle)]
extern "C" fn standin_limits(events: usize, streams: usize) {
    with(|w| (w.event_limit, w.stream_limit) = (events, streams));
}

/// How many bytes of page-locked memory one allocation may have, and all together.
#[unsafe(no_mangle)]
extern "C" fn standin_host_limits(extent: usize, all: usize) {
    with(|w| w.hosts.limit_to(extent, all));
}

/// Whether product and driver can register memory, and allocate it with `VA_FLAG`.
#[unsafe(no_mangle)]
extern "C" fn standin_abilities(register: bool, va: bool) {
    with(|w| w.hosts.enable(register, va));
}

/// One line each: `violation ID text`, `leak what count` (what is there, and what contexts had left when they were
/// destroyed), `note what count`, `call name count`, `last name`, which call came last; and `over` when every device
/// that was set was reset and every context that was made was destroyed, or was to be.
pub fn report(w: &World) -> String {
    let mut all = late();
    for violation in &w.violations {
        let _ = writeln!(all, "violation {violation}");
    }
    let there = w.owned(None).map(|(what, n)| (what, n + w.left.get(what).copied().unwrap_or(0)));
    let leaks = [
        ("devices", w.devices.iter().map(|d| d.sets).sum()),
        ("contexts", w.contexts.values().filter(|c| c.explicit).count()),
    ];
    let more = [
        ("allocations", w.blocks.len()),
        ("hosts", w.hosts.count()),
        ("registrations", w.hosts.registrations()),
    ];
    for (what, count) in leaks.into_iter().chain(there).chain(more).filter(|leak| leak.1 > 0) {
        let _ = writeln!(all, "leak {what} {count}");
    }
    // Counts though the call may have failed: these are the last calls that a program makes.
    let count = |name| w.counts.get(name).copied().unwrap_or(0);
    let closed = ["aclrtResetDevice", "aclrtResetDeviceForce", "aclrtDestroyContext"].map(count);
    if closed.into_iter().sum::<u64>() >= w.opened {
        all.push_str("over\n");
    }
    let _ = writeln!(all, "last {}", w.last);
    for (what, count) in &w.notes {
        let _ = writeln!(all, "note {what} {count}");
    }
    for (name, count) in &w.counts {
        let _ = writeln!(all, "call {name} {count}");
    }
    all
}
