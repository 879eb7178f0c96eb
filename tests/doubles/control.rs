//! What tests ask of any stand-in, by the same names: calls that are to fail, hanging, counts, the report. Each
//! stand-in compiles this beside its own `control.rs`, which has the controls that it alone has, and what its report
//! says.

use std::ffi::{CStr, c_char};

use crate::calls::call;
use crate::control::report;
use crate::world::{Fault, World, world};

/// # Safety
/// `text` is a string that ends with a zero byte.
unsafe fn text(text: *const c_char) -> String {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Locks the world and makes a change to it.
pub fn with<R>(f: impl FnOnce(&mut World) -> R) -> Option<R> {
    world().as_mut().map(f)
}

/// Makes the `nth` call of that name from now on fail once with `code`: before it has done anything, or, with `after`,
/// when all is done. Codes after which a device, its context or the library is of no use have that effect.
#[unsafe(no_mangle)]
unsafe extern "C" fn standin_fail(name: *const c_char, nth: u64, code: u32, after: bool) {
    // SAFETY: the caller's promise.
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

/// While it is set nothing runs: queries say "not ready", and a call that synchronises waits.
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
    // SAFETY: the caller's promise.
    let name = unsafe { text(name) };
    with(|w| w.counts.get(name.as_str()).copied()).flatten().unwrap_or(0)
}

/// Writes the report into `to`, at most `len` bytes, and returns how long all of it is; see [`report`].
#[unsafe(no_mangle)]
unsafe extern "C" fn standin_report(to: *mut u8, len: usize) -> usize {
    let report = with(|w| report(w)).unwrap_or_default();
    let n = report.len().min(len);
    if !to.is_null() {
        // SAFETY: the caller's promise: `to` has room for `len` bytes.
        unsafe { to.copy_from_nonoverlapping(report.as_ptr(), n) };
    }
    report.len()
}

/// A call that only fails if a test asked for that: for tests of the failing itself.
#[unsafe(no_mangle)]
extern "C" fn standin_nothing() -> u32 {
    call("standin_nothing", |_| Ok(()))
}
