//! The end of the process: who calls [`crate::exit::shut`], and when.
//!
//! Exit handlers run in the reverse order of their registration, and the crate's is to run before the driver's. The
//! driver registers its own when it is loaded, when it is initialised, or later. So the crate registers its handler
//! again after each step of opening a device.
//!
//! # A library that is unloaded
//!
//! The crate's threads run the crate's code, so a shared library that contains the crate must not be unloaded while
//! they exist, and they exist until the process ends. [`stay_loaded`] makes `dlclose` leave such a library where it is.
//! Its exit handlers then run at the end of the process, like those of the program.

use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How often the exit handler is registered at most: devices may be opened and closed any number of times.
const MOST_HANDLERS: usize = 32;

/// Makes the gate shut before the exit handlers run that were registered so far.
pub(crate) fn watch_exit() {
    extern "C" fn at_exit() {
        // The child of a fork has none of the crate's threads, but may have their counts.
        if !super::forked() {
            crate::exit::shut();
        }
    }
    static HANDLERS: AtomicUsize = AtomicUsize::new(0);
    // Relaxed: a count. The limit is one of memory, and may be passed by as many as there are threads here.
    if HANDLERS.load(Ordering::Relaxed) < MOST_HANDLERS
        && HANDLERS.fetch_add(1, Ordering::Relaxed) < MOST_HANDLERS
        && !super::at_exit(at_exit)
    {
        crate::foreign::warn!(
            target: "pinpool::device",
            "the system has no room for an exit handler: the driver may be called while it is taken down"
        );
    }
}

/// Makes the system keep the library that contains the crate when the program unloads it. Called before the crate's
/// first thread is started.
pub(super) fn stay_loaded() {
    static ONCE: Once = Once::new();
    ONCE.call_once(super::pin_library);
}
