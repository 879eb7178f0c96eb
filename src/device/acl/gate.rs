//! The process's end. Threads of ours may be in the middle of freeing something when a program returns from `main`, and
//! the library's own handlers then take it down under them (calls after that have been seen to crash). So a handler
//! that runs before these shuts a gate: from there on no call is made, and what is still there goes with the process.
//! It waits for calls of our own threads that are under way, but not for long; calls on the program's threads are the
//! program's affair.

use std::cell::Cell;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::os;

/// How long the process's end waits for calls that are under way.
const GATE_TIMEOUT: Duration = Duration::from_secs(1);

/// Sequentially consistent, like `UNDER_WAY`: who passes counts first and looks here then, the handler shuts first and
/// looks at the count then; so one of the two sees the other.
static SHUT: AtomicBool = AtomicBool::new(false);
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Whether this is a thread of ours.
    static HELD_BY_THIS_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Leave to make calls, while it lives.
#[must_use]
pub(super) struct Pass {
    counted: bool,
}

impl Drop for Pass {
    fn drop(&mut self) {
        if self.counted {
            // Pairs with the handler's look; see there.
            UNDER_WAY.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// This is a thread of ours.
pub(super) fn enter() {
    HELD_BY_THIS_THREAD.set(true);
}

/// `None`: the process ends.
pub(super) fn pass() -> Option<Pass> {
    // Where a thread's own values are gone it is about to end, and counts as anybody's.
    let counted = HELD_BY_THIS_THREAD.try_with(Cell::get).unwrap_or(false);
    if counted {
        UNDER_WAY.fetch_add(1, Ordering::SeqCst);
    }
    let pass = Pass { counted };
    (!SHUT.load(Ordering::SeqCst)).then_some(pass)
}

/// Has the gate shut at the process's end, before the handlers of the library, which was loaded before.
pub(super) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if !os::at_exit(shut) {
            crate::foreign::warn!(target: "pinpool::device", "the process's end cannot be watched: calls may be made during it");
        }
    });
}

extern "C" fn shut() {
    if os::forked() {
        // The child of a fork has none of our threads, but maybe their count.
        return;
    }
    SHUT.store(true, Ordering::SeqCst);
    let since = Instant::now();
    while UNDER_WAY.load(Ordering::SeqCst) > 0 && since.elapsed() < GATE_TIMEOUT {
        std::thread::sleep(Duration::from_micros(50));
    }
}
