//! What tests ask of any stand-in, by the same names: calls that are to fail, hanging, counts, the report. Each
//! stand-in compiles this beside its own `control.rs`, which has the controls that it alone has, and what its report
//! says.

use std::ffi::{CStr, c_char, c_int};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::calls::call;
use crate::control::report;
use crate::world::{Fault, World, idle_world, world};

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

// --- the end of the process ------------------------------------------------------------------------------------------

/// The file that gets the report when the process ends.
const REPORT: &str = "PINPOOL_STANDIN_REPORT";
/// How long the library takes to take itself down, where a report is asked for: late calls have time to come.
const TAKING_DOWN: Duration = Duration::from_millis(30);

/// Whether the library has begun to take itself down.
static ENDING: AtomicBool = AtomicBool::new(false);
/// The calls under way.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
/// What was broken from then on: the world's lock may be held by a thread that does not go on.
static LATE: Mutex<Vec<String>> = Mutex::new(Vec::new());

unsafe extern "C" {
    fn atexit(handler: extern "C" fn()) -> c_int;
}

/// A call under way.
pub struct Inside;

impl Inside {
    /// Begins a call. `None`: the library takes itself down, and the call is refused.
    pub fn begin(name: &str) -> Option<Self> {
        INSIDE.fetch_add(1, Ordering::SeqCst);
        let inside = Self;
        if !ENDING.load(Ordering::SeqCst) {
            return Some(inside);
        }
        broken(format!("END-1 {name} after the exit began"));
        None
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.fetch_sub(1, Ordering::SeqCst);
    }
}

fn broken(text: String) {
    LATE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(text);
}

/// The lines of a report on what was broken since the library began to take itself down.
pub fn late() -> String {
    let late = LATE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    late.iter().map(|text| format!("violation {text}\n")).collect()
}

/// Takes the library down, as a driver's own exit handler does.
#[unsafe(no_mangle)]
extern "C" fn standin_take_down() {
    if ENDING.swap(true, Ordering::SeqCst) {
        return;
    }
    let inside = INSIDE.load(Ordering::SeqCst);
    if inside > 0 {
        broken(format!("END-2 {inside} calls are under way"));
    }
    if std::env::var_os(REPORT).is_some() {
        std::thread::sleep(TAKING_DOWN);
    }
}

/// Registers the exit handler: when the library is loaded, and again when it is initialised, as late as a driver may.
pub extern "C" fn end_with_process() {
    // SAFETY: the function lives as long as the library, which is not unloaded before the process ends.
    unsafe { atexit(standin_take_down) };
}

/// The loader calls what is listed here when the library is loaded, and below when the process exits, after all exit
/// handlers.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = end_with_process;

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_THE_END: extern "C" fn() = at_the_end;

/// Writes the report into the file that the environment names: what a program did that has no test in it. No error could
/// be reported to it; a missing file shows that.
extern "C" fn at_the_end() {
    let Some(path) = std::env::var_os(REPORT).filter(|path| !path.is_empty()) else {
        return;
    };
    for _ in 0..1000 {
        if let Some(guard) = idle_world() {
            let text = guard.as_ref().map(report).unwrap_or_default();
            let _ = std::fs::write(path, text);
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
