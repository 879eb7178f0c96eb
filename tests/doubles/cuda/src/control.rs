//! What tests ask of this stand-in alone, and what its report says. Looked up by name, like the driver's own calls; the
//! controls of all stand-ins are in `tests/doubles/control.rs`.

use std::fmt::Write;

use crate::shared::{late, with};
use crate::world::World;

/// Everything as when the library was loaded; handles from before name nothing any more.
#[unsafe(no_mangle)]
extern "C" fn standin_reset() {
    with(World::reset);
}

/// Kills the primary context of a device with that code.
#[unsafe(no_mangle)]
extern "C" fn standin_kill(device: usize, code: u32) {
    with(|w| {
        if let Some((context, _)) = w.devices.get(device).and_then(|d| d.primary) {
            w.kill(context, code);
        }
    });
}

/// One line each: `violation ID text`, `leak what count` (what is there, and what contexts had left when they were
/// destroyed), `note what count`, `call name count`, `flags name flags count` (how often a call was made with these
/// flags); and `over` when every context that was retained was released, or was to be.
pub fn report(w: &World) -> String {
    let mut all = late();
    for violation in &w.violations {
        let _ = writeln!(all, "violation {violation}");
    }
    let retained: usize = w.devices.iter().filter_map(|d| d.primary).map(|(_, count)| count).sum();
    let there = w.owned(None).map(|(what, n)| (what, n + w.left.get(what).copied().unwrap_or(0)));
    let leaks = [("contexts", retained)].into_iter().chain(there);
    let more = [
        ("registrations", w.registered.len()),
        ("graphs", w.graphs.count()),
        ("objects", w.graphs.objects()),
    ];
    for (what, count) in leaks.chain(more).filter(|leak| leak.1 > 0) {
        let _ = writeln!(all, "leak {what} {count}");
    }
    // Counts though the call may have failed: releasing is the last call that a program makes.
    if w.counts.get("cuDevicePrimaryCtxRelease_v2").copied().unwrap_or(0) >= w.retains {
        all.push_str("over\n");
    }
    for (what, count) in &w.notes {
        let _ = writeln!(all, "note {what} {count}");
    }
    for (name, count) in &w.counts {
        let _ = writeln!(all, "call {name} {count}");
    }
    for ((name, flags), count) in &w.hosts.flags {
        let _ = writeln!(all, "flags {name} {flags} {count}");
    }
    all
}
