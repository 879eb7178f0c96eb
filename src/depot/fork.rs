//! What a fork does to pools.
//!
//! The child of a fork has neither our threads nor (where the system agreed) the pinned pages, and locks may be held by
//! threads that it does not have. So in the child every pool is shut: a handler takes the one thread's shards away and sets a bit
//! in each depot's mode word, which who has no shard looks at, and from there nothing is locked, freed or unmapped any more.
//! `Command::spawn` is not affected: its child runs no code of ours before it becomes another program.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Depot;
use crate::freelist::mode;

/// Guards [`DEPOTS`]. A bare flag: the child of a fork must be able to reset it, which a mutex that parks does not allow.
static LOCKED: AtomicBool = AtomicBool::new(false);
static DEPOTS: Depots = Depots(std::cell::UnsafeCell::new(Vec::new()));

struct Depots(std::cell::UnsafeCell<Vec<(u64, *const Depot)>>);

// SAFETY: touched only while LOCKED is ours.
unsafe impl Sync for Depots {}

fn lock() {
    // Acquire: pairs with the release in `unlock`.
    while LOCKED.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
        std::thread::yield_now();
    }
}

fn unlock() {
    // Release: pairs with the acquire in `lock`.
    LOCKED.store(false, Ordering::Release);
}

fn in_child() {
    // SAFETY: the parent's side of the fork took the lock before forking, and this thread is the only one.
    for (_, depot) in unsafe { &*DEPOTS.0.get() } {
        // SAFETY: depots leave the list before they are freed.
        unsafe { &**depot }.gate().force(mode::FORKED);
    }
    // The mode is what a thread looks at that has no shard at hand, so the only one there is shall have none.
    super::lease::forget_all();
    unlock();
}

/// Adds a depot to those that a fork shuts.
pub(super) fn register(depot: &Depot) {
    static HANDLER: Once = Once::new();
    HANDLER.call_once(|| {
        if !crate::os::at_fork(lock, unlock, in_child) {
            crate::foreign::warn!(target: "pinpool::pool", "no fork handler could be installed: do not use a pool in a forked child");
        }
    });
    lock();
    // SAFETY: LOCKED is ours.
    unsafe { &mut *DEPOTS.0.get() }.push((depot.number(), std::ptr::from_ref(depot)));
    unlock();
}

/// Takes it out again.
pub(super) fn unregister(number: u64) {
    lock();
    // SAFETY: LOCKED is ours.
    unsafe { &mut *DEPOTS.0.get() }.retain(|(n, _)| *n != number);
    unlock();
}
