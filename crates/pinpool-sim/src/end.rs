//! The end of a process: what a driver's own exit handler does, and the report of a program that has no test in it.
//! And the commands that a program sends to a library that it has loaded.

use std::ffi::{CStr, c_char, c_int};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::{Vendor, locked};

/// The file that gets the report when the process ends.
const REPORT: &str = "PINPOOL_SIM_REPORT";
/// How long the library takes to take itself down, where a report is asked for: late calls have time to come.
const TAKING_DOWN: Duration = Duration::from_millis(30);

static ENDING: AtomicBool = AtomicBool::new(false);
static INSIDE: AtomicUsize = AtomicUsize::new(0);
/// What was broken from then on: the world's lock may be held by a thread that does not go on.
static LATE: Mutex<Vec<String>> = Mutex::new(Vec::new());

unsafe extern "C" {
    fn atexit(handler: extern "C" fn()) -> c_int;
}

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
    locked(&LATE).push(text);
}

/// The lines of a report on what was broken since the library began to take itself down.
pub fn late() -> String {
    let late = locked(&LATE);
    late.iter().map(|text| format!("violation {text}\n")).collect()
}

/// Takes the library down, as a driver's own exit handler does.
extern "C" fn take_down() {
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
    unsafe { atexit(take_down) };
}

/// The loader calls what is listed here when the library is loaded, and below when the process exits, after all exit
/// handlers.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = end_with_process;

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_THE_END: extern "C" fn() = at_the_end;

/// Writes the report into the file that the environment names: what a program did that has no test in it. No error
/// could be reported to it; a missing file shows that.
extern "C" fn at_the_end() {
    let Some(path) = std::env::var_os(REPORT).filter(|path| !path.is_empty()) else {
        return;
    };
    for _ in 0..1000 {
        if let (Some(cuda), Some(acl)) = (Vendor::Cuda.last_report(), Vendor::Acl.last_report()) {
            let _ = std::fs::write(path, cuda + &acl);
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Answers a command to the GPUs of the loaded library. Writes the answer to `to`, at most `len` bytes, and returns
/// how long all of it is.
///
/// # Safety
/// `text` is a string that ends with a zero byte, and `to` has room for `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn sim_cuda(text: *const c_char, to: *mut u8, len: usize) -> usize {
    // SAFETY: the caller's promise.
    let answer = Vendor::Cuda.world(0).command(&unsafe { CStr::from_ptr(text) }.to_string_lossy());
    // SAFETY: the caller's promise.
    unsafe { to.copy_from_nonoverlapping(answer.as_ptr(), answer.len().min(len)) };
    answer.len()
}
