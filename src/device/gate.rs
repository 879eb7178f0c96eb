//! The way into a vendor's library: every entry point is an [`Entry`], whose call takes a pass.
//!
//! [`crate::exit`] says why, and when no pass is given any more. A call that is refused then
//! returns a code of the class [`DriverShutdown`](crate::ErrorClass::DriverShutdown), as the
//! library itself does when it has shut down, so callers need no case of their own.
//!
//! Calls that belong together (a context is made current, a call is made in it, the caller's
//! context is restored) take one pass around all of them.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The most registrations of the exit handler: devices may be opened any number of times.
const MOST_HANDLERS: usize = 32;

/// Makes the gate shut before the exit handlers that were registered so far. Called after each step
/// of opening a device: the driver registers a handler when loaded, when initialised, or later.
pub(super) fn watch_exit() {
    extern "C" fn at_exit() {
        // The child of a fork has none of the crate's threads, but may have their counts.
        if !crate::os::forked() {
            crate::exit::shut();
        }
    }
    static HANDLERS: AtomicUsize = AtomicUsize::new(0);
    // Relaxed: a count.
    if HANDLERS.fetch_add(1, Ordering::Relaxed) < MOST_HANDLERS && !crate::os::at_exit(at_exit) {
        crate::foreign::warn!(
            target: "pinpool::device",
            "the system has no room for an exit handler: the driver may be called while it is taken down"
        );
    }
}

/// What a refused call says.
pub(super) const ENDING: &str = "not called, since the process ends";

/// What a call returns that was not made, since the process ends.
pub(super) trait Refused {
    fn refused() -> Self;
}

impl<T> Refused for *const T {
    fn refused() -> Self {
        std::ptr::null()
    }
}

/// An entry point of a vendor's library.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry<F>(F);

impl<F: Copy> Entry<F> {
    /// The entry point at an address.
    ///
    /// # Safety
    /// `F` is a function pointer of the type of the function at `address`, which is there for as
    /// long as the process runs.
    pub(super) unsafe fn at(address: *const std::ffi::c_void) -> Self {
        const { assert!(size_of::<F>() == size_of::<*const std::ffi::c_void>()) };
        // SAFETY: the caller's promise: both are pointers to the function.
        Self(unsafe { std::mem::transmute_copy(&address) })
    }
}

macro_rules! callable {
    ($($arg:ident: $ty:ident),*) => {
        impl<R: Refused, $($ty),*> Entry<unsafe extern "C" fn($($ty),*) -> R> {
            /// Makes the call, unless the process ends.
            ///
            /// # Safety
            /// The entry point's contract.
            #[allow(clippy::too_many_arguments, reason = "as many as the entry point has")]
            pub(super) unsafe fn call(&self, $($arg: $ty),*) -> R {
                let Some(_pass) = crate::exit::pass() else { return R::refused() };
                // SAFETY: the caller's promise.
                unsafe { (self.0)($($arg),*) }
            }
        }
    };
}

callable!();
callable!(a: A);
callable!(a: A, b: B);
callable!(a: A, b: B, c: C);
callable!(a: A, b: B, c: C, d: D);
callable!(a: A, b: B, c: C, d: D, e: E);
callable!(a: A, b: B, c: C, d: D, e: E, f: G);
callable!(a: A, b: B, c: C, d: D, e: E, f: G, g: H);
callable!(a: A, b: B, c: C, d: D, e: E, f: G, g: H, h: I, i: J);
callable!(a: A, b: B, c: C, d: D, e: E, f: G, g: H, h: I, i: J, j: K, k: L);
