//! What tests tell the stand-in and ask it. Looked up by name, like the driver's own calls.

use std::ffi::{CStr, c_char};
use std::fmt::Write;

use crate::calls::call;
use crate::world::{Fault, World, world};

/// # Safety
/// `text` is a string that ends with a zero byte.
unsafe fn text(text: *const c_char) -> String {
    // SAFETY: the caller's word.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn with<R>(f: impl FnOnce(&mut World) -> R) -> Option<R> {
    world().as_mut().map(f)
}

/// Everything as when the library was loaded; handles from before name nothing any more.
#[unsafe(no_mangle)]
extern "C" fn standin_reset() {
    with(World::reset);
}

/// Makes the `nth` call of that name from now on fail once with `code`: before it has done anything, or, with `after`,
/// when all is done. A sticky code kills the context, and 4 ends the driver.
#[unsafe(no_mangle)]
unsafe extern "C" fn standin_fail(name: *const c_char, nth: u64, code: u32, after: bool) {
    // SAFETY: the caller's word.
    let call = unsafe { text(name) };
    with(|w| w.faults.push(Fault { call, left: nth, code, after }));
}

/// No call is to fail any more.
#[unsafe(no_mangle)]
extern "C" fn standin_calm() {
    with(|w| w.faults.clear());
}

/// How many calls were made to fail so far.
#[unsafe(no_mangle)]
extern "C" fn standin_struck() -> u64 {
    with(|w| w.struck).unwrap_or(0)
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

/// While it is set nothing runs: queries say "not ready", and who synchronises waits.
#[unsafe(no_mangle)]
extern "C" fn standin_hang(hung: bool) {
    with(|w| w.hung = hung);
}

/// While it is set, new streams get the handles of destroyed ones, as a driver's do.
#[unsafe(no_mangle)]
extern "C" fn standin_reuse(reuse: bool) {
    with(|w| w.reuse = reuse);
}

/// How often a call was made.
#[unsafe(no_mangle)]
unsafe extern "C" fn standin_calls(name: *const c_char) -> u64 {
    // SAFETY: the caller's word.
    let name = unsafe { text(name) };
    with(|w| w.counts.get(name.as_str()).copied()).flatten().unwrap_or(0)
}

/// Writes what is known into `to`, at most `len` bytes, and says how long all of it is. One line each: `violation ID
/// text`, `leak what count` (what is there, and what contexts had left when they went), `note what count`, `call name
/// count`; and `over` when every context that was retained was released, or was to be.
#[unsafe(no_mangle)]
unsafe extern "C" fn standin_report(to: *mut u8, len: usize) -> usize {
    let report = with(|w| {
        let mut all = String::new();
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
        // Asked for, whatever came of it: releasing is the last call that anyone makes.
        if w.counts.get("cuDevicePrimaryCtxRelease_v2").copied().unwrap_or(0) >= w.retains {
            all.push_str("over\n");
        }
        for (what, count) in &w.notes {
            let _ = writeln!(all, "note {what} {count}");
        }
        for (name, count) in &w.counts {
            let _ = writeln!(all, "call {name} {count}");
        }
        all
    });
    let report = report.unwrap_or_default();
    let n = report.len().min(len);
    if !to.is_null() {
        // SAFETY: the caller's word: `to` has room for `len` bytes.
        unsafe { to.copy_from_nonoverlapping(report.as_ptr(), n) };
    }
    report.len()
}

/// A call that only fails if it was told to: for tests of the failing itself.
#[unsafe(no_mangle)]
extern "C" fn standin_nothing() -> u32 {
    call("standin_nothing", |_| Ok(()))
}
