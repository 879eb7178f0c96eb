//! Threads: the one place that starts them.
//!
//! A signal that is sent to the process is handled on any of its threads that does not block it. A
//! handler of the program may expect a thread of the program (its stack, its thread-locals, a place
//! to wait), and it must not interrupt a driver's call. So the crate's threads block every signal
//! except those that a thread raises itself and that cannot wait: a fault, a trap, an abort.
//!
//! The starting thread sets its own mask before it starts a thread and restores it afterwards: a
//! new thread has the mask from its first instruction, so no signal can reach it. Threads that a
//! driver starts on one of these threads have the same mask.
//!
//! The threads run the crate's code until the process ends. So before its first thread starts, the
//! crate makes `dlclose` leave the shared library that contains it where it is. Exit handlers of
//! that library then run at the end of the process, like those of the program.

use std::ffi::c_void;
use std::io;
use std::sync::Once;
use std::thread::{Builder, JoinHandle};

/// Starts a thread of the crate's.
///
/// # Errors
/// The system's error if it has no room for another thread.
pub(crate) fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    static STAYS: Once = Once::new();
    STAYS.call_once(stay_loaded);
    let _blocked = Blocked::now();
    #[allow(clippy::disallowed_methods, reason = "this is the one place")]
    Builder::new().name(name.into()).spawn(run)
}

/// Makes the system keep the shared library that this code is in until the process ends, although
/// the program unloads it. The program itself is never unloaded.
fn stay_loaded() {
    // SAFETY: fields that zeros are a valid value of: pointers and numbers.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    let here = stay_loaded as fn() as *const c_void;
    // SAFETY: the place for the result lives for the call.
    if unsafe { libc::dladdr(here, &raw mut found) } == 0 || found.dli_fname.is_null() {
        return;
    }
    // Nothing is loaded: the call finds what is there, or nothing where this is the program. The
    // handle is not closed. SAFETY: the name is the loader's own.
    unsafe { libc::dlopen(found.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
}

/// Blocks signals on this thread until it is dropped. Signals sent meanwhile come then.
struct Blocked {
    before: Option<libc::sigset_t>,
}

impl Blocked {
    fn now() -> Self {
        // SAFETY: sets, filled within, live for the calls, which change this thread's mask alone.
        let before = unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            for raised in [
                libc::SIGSEGV,
                libc::SIGBUS,
                libc::SIGFPE,
                libc::SIGILL,
                libc::SIGTRAP,
                libc::SIGSYS,
                libc::SIGABRT,
            ] {
                libc::sigdelset(&raw mut all, raised);
            }
            (libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut before) == 0).then_some(before)
        };
        Self { before }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // SAFETY: the mask that this thread had before.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
        }
    }
}
