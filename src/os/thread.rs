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
    stay_loaded();
    let _blocked = Blocked::now();
    #[allow(clippy::disallowed_methods, reason = "this is the one place")]
    Builder::new().name(name.into()).spawn(run)
}

/// Makes the system keep the library that contains the crate when the program unloads it.
fn stay_loaded() {
    static ONCE: Once = Once::new();
    ONCE.call_once(super::pin_library);
}

/// This thread blocks signals until this is dropped. Those sent meanwhile come then.
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
