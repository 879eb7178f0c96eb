//! Where shards leave whole chains for each other.
//!
//! A thread that returns more than it takes fills its shard; a thread that takes more than it returns empties its own.
//! Between them hangs a rack for each class: a few hooks, each empty or holding one chain. Putting is a
//! compare-and-swap of an empty hook, taking a swap. A chain is owned before it is looked into, so there is neither the
//! ABA problem nor a read of memory that may be gone, which a linked stack of chains would have; the price is that a
//! rack has a fixed number of hooks, and what finds none free goes back to its runs under the depot's lock.

use crate::sync::{AtomicPtr, Ordering};

use super::slot::{Chain, Slot};

/// Chains that hang at most in a rack. Few, because they are memory that no other class can use until it is collected.
pub(crate) const HOOKS: usize = if cfg!(loom) { 2 } else { 8 };

/// The hooks of one class.
#[derive(Debug)]
pub(crate) struct Rack {
    hooks: [AtomicPtr<Slot>; HOOKS],
}

impl Rack {
    pub(crate) fn new() -> Self {
        Self { hooks: std::array::from_fn(|_| AtomicPtr::new(std::ptr::null_mut())) }
    }

    /// Hangs a chain up, or gives it back where all hooks are taken. `hint` spreads threads over the hooks.
    pub(crate) fn put(&self, hint: usize, chain: Chain) -> Result<(), Chain> {
        let Chain { head, count } = chain;
        if head.is_null() {
            return Ok(());
        }
        // SAFETY: the chain is ours, so its slots are alive.
        unsafe { &*head }.set_chained(count);
        for i in 0..HOOKS {
            let hook = &self.hooks[(hint + i) % HOOKS];
            // Looked at first: a failing exchange would take the line away from others for nothing.
            // Release: pairs with the acquire in `take`, which then sees the links and the count.
            if hook.load(Ordering::Relaxed).is_null()
                && hook
                    .compare_exchange(std::ptr::null_mut(), head, Ordering::Release, Ordering::Relaxed)
                    .is_ok()
            {
                return Ok(());
            }
        }
        Err(Chain { head, count })
    }

    /// Takes a chain down.
    pub(crate) fn take(&self, hint: usize) -> Option<Chain> {
        for i in 0..HOOKS {
            let hook = &self.hooks[(hint + i) % HOOKS];
            if hook.load(Ordering::Relaxed).is_null() {
                continue;
            }
            // Acquire: pairs with the release in `put`.
            #[cfg(not(pinpool_planted = "rack_take_relaxed"))]
            let order = Ordering::Acquire;
            #[cfg(pinpool_planted = "rack_take_relaxed")]
            let order = Ordering::Relaxed;
            let head = hook.swap(std::ptr::null_mut(), order);
            if !head.is_null() {
                // SAFETY: the swap made the chain ours; its slots are alive (the chain's invariant).
                let count = unsafe { &*head }.chained();
                return Some(Chain { head, count });
            }
        }
        None
    }

    /// Segments on the hooks. Exact only while nobody moves.
    #[cfg(all(test, loom))]
    pub(crate) fn count(&self) -> u32 {
        let count = |hook: &AtomicPtr<Slot>| {
            let head = hook.load(Ordering::Acquire);
            // SAFETY: called under the depot's lock with every shard quiet, so nobody takes the chain meanwhile.
            unsafe { head.as_ref() }.map_or(0, Slot::chained)
        };
        self.hooks.iter().map(count).sum()
    }

    /// Visits every slot on the hooks. For `check()`: nobody may move meanwhile.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(&Slot)) {
        for hook in &self.hooks {
            let head = hook.load(Ordering::Acquire);
            // SAFETY: called under the depot's lock with every shard quiet, so the slots stay where they are.
            let first = unsafe { head.as_ref() };
            // SAFETY: as above.
            std::iter::successors(first, |slot| unsafe { slot.next().as_ref() }).for_each(&mut visit);
        }
    }
}
