//! The end of the process. The crate's threads may be in the middle of freeing something when a program returns from
//! `main`, and the library's own exit handlers then take the library down under them (calls after that have been seen
//! to crash). So an exit handler of the crate runs before these and shuts a gate: from then on no call is made, and the
//! rest is freed with the process. The handler waits for calls of the crate's own threads that are under way, but not
//! for long. It does not wait for calls on the program's threads: the program must not return from `main` during these.

use std::cell::Cell;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::os;

/// How long the exit handler waits for calls that are under way.
const GATE_TIMEOUT: Duration = Duration::from_secs(1);

/// Sequentially consistent, like `UNDER_WAY`: `pass` adds to the count and then reads this flag, the handler sets the
/// flag and then reads the count. So at least one of the two sees the other.
static SHUT: AtomicBool = AtomicBool::new(false);
/// The number of passes that the crate's own threads have.
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Whether this is one of the crate's own threads.
    static ACL_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// The right to make calls, for as long as it exists.
#[must_use]
pub(super) struct Pass {
    counted: bool,
}

impl Drop for Pass {
    fn drop(&mut self) {
        if self.counted {
            // Pairs with the load in `shut`, which then sees everything that the call has done.
            UNDER_WAY.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Notes that this is one of the crate's own threads.
pub(super) fn enter() {
    ACL_THREAD.set(true);
}

/// The right to make calls. `None`: the process ends.
pub(super) fn pass() -> Option<Pass> {
    // A thread whose thread-locals are destroyed is about to end, and counts as one of the program's.
    let counted = ACL_THREAD.try_with(Cell::get).unwrap_or(false);
    if counted {
        UNDER_WAY.fetch_add(1, Ordering::SeqCst);
    }
    let pass = Pass { counted };
    (!SHUT.load(Ordering::SeqCst)).then_some(pass)
}

/// Makes the gate shut at the end of the process. Exit handlers run in reverse order, and the library was loaded
/// before, so this one runs before the library's.
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
        // The child of a fork has none of the crate's threads, but may have their count.
        return;
    }
    SHUT.store(true, Ordering::SeqCst);
    let since = Instant::now();
    while UNDER_WAY.load(Ordering::SeqCst) > 0 && since.elapsed() < GATE_TIMEOUT {
        std::thread::sleep(Duration::from_micros(50));
    }
}
