//! The end of the process.
//!
//! A process may end at any moment: by `main` returning, by `exit` on any thread, by a panic. The
//! exit handlers run while all other threads go on; one of them is that by which an accelerator's
//! driver takes itself down. A thread that is inside the driver then, or calls it later, may crash.
//! So an exit handler of the crate runs before the driver's and *shuts the gate*:
//!
//! 1. From then on no [`Pass`] is given out. Every call of a vendor's library needs one
//!    (`device::gate`), on any thread. So does every drop of a value of the program's
//!    ([`crate::foreign::discard`]), since that drop may call the library too.
//! 2. The handler waits until the threads that have a pass give it back, but not for longer than
//!    [`EXIT_TIMEOUT`]: a call behind a kernel that hangs never returns.
//! 3. All else is left to the system: nothing is freed, and no events are sent.
//!
//! Exit handlers run in the reverse order of their registration. The driver registers its own when
//! it is loaded, when it is initialised, or later; so the crate registers its handler again after
//! each step of opening a device (`watch_exit` of [`crate::device`]'s gate).
//!
//! # What a pass costs
//!
//! A thread counts its pass on one of [`STRIPES`] counters, by two atomic additions on a cache line
//! that hardly any other thread uses. A pass within another pass of the same thread only counts how
//! deep it is. A checkout or a return that makes no driver call takes no pass.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam::utils::CachePadded;

/// How long the exit handler waits for threads that have a pass.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// The number of counters. Threads beyond this number share them.
const STRIPES: usize = 64;

/// Sequentially consistent, like `PASSES`: `pass` adds to a counter and then reads this flag, the
/// handler sets the flag and then reads the counters. So at least one of the two sees the other.
static SHUT: AtomicBool = AtomicBool::new(false);
/// The number of threads that have a pass.
static PASSES: [CachePadded<AtomicUsize>; STRIPES] =
    [const { CachePadded::new(AtomicUsize::new(0)) }; STRIPES];

thread_local! {
    /// How many passes this thread has. (Without a destructor, so that others' can take a pass.)
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// Which counter this thread uses, plus one.
    static STRIPE: Cell<usize> = const { Cell::new(0) };
}

/// The right to call a vendor's library while it exists. The exit of the process waits for it.
#[derive(Debug)]
#[must_use = "the right ends when this is dropped"]
pub(crate) struct Pass {
    /// Keeps it on its thread.
    _thread: PhantomData<*const ()>,
}

/// The right to call a vendor's library. `None`: the process's exit has begun.
#[inline]
pub(crate) fn pass() -> Option<Pass> {
    let depth = DEPTH.get();
    if depth == 0 {
        let passes = counter();
        passes.fetch_add(1, Ordering::SeqCst);
        if SHUT.load(Ordering::SeqCst) {
            passes.fetch_sub(1, Ordering::SeqCst);
            return None;
        }
    }
    DEPTH.set(depth + 1);
    Some(Pass { _thread: PhantomData })
}

impl Drop for Pass {
    #[inline]
    fn drop(&mut self) {
        // The exit handler has set it to zero if it runs on this very thread.
        let depth = DEPTH.get().saturating_sub(1);
        DEPTH.set(depth);
        if depth == 0 {
            // Pairs with the load in `shut`, which then sees all that was done under the pass.
            counter().fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// This thread's counter.
fn counter() -> &'static AtomicUsize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let stripe = match STRIPE.get() {
        0 => {
            // Relaxed: the numbers only spread the threads.
            let stripe = NEXT.fetch_add(1, Ordering::Relaxed) % STRIPES;
            STRIPE.set(stripe + 1);
            stripe
        }
        known => known - 1,
    };
    &PASSES[stripe]
}

/// Whether the process's exit has begun.
#[inline]
pub(crate) fn exiting() -> bool {
    SHUT.load(Ordering::Relaxed)
}

/// Shuts the gate: the exit handler. Takes no lock, since it may run in a signal handler.
pub(crate) fn shut() {
    if SHUT.swap(true, Ordering::SeqCst) {
        return;
    }
    // This thread may have a pass: a signal handler or driver's callback has called `exit`.
    let own = usize::from(DEPTH.replace(0) > 0);
    let since = Instant::now();
    let passes = || PASSES.iter().map(|passes| passes.load(Ordering::SeqCst)).sum::<usize>();
    while passes() > own && since.elapsed() < EXIT_TIMEOUT {
        std::thread::sleep(Duration::from_micros(50));
    }
}

#[cfg(all(test, not(loom)))]
#[test]
fn passes_nest_and_are_counted_once_for_each_thread() {
    let (outer, inner) = (pass(), pass());
    assert_eq!(DEPTH.get(), 2);
    drop(inner);
    // Other tests may share the counter, and add to it.
    assert!(counter().load(Ordering::SeqCst) >= 1 && DEPTH.get() == 1);
    drop(outer);
    assert_eq!((DEPTH.get(), std::thread::spawn(|| DEPTH.get()).join().ok()), (0, Some(0)));
}
