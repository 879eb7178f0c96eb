//! The central pool's lock.
//!
//! Whoever changes the core under the lock may free memory, or room for memory, that a waiter could have. So the guard
//! itself serves the queue before it lets the lock go, and makes the wakes after that. No path can forget it: nothing
//! else locks the core.
//!
//! The books are the exception. What is written there serves no one, and is written under locks of other modules.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::{Books, CentralPool, Core, Wake};
use crate::sync::{Mutex, MutexGuard};

/// The core and its lock. [`CentralPool::lock`] is the only way in.
#[derive(Debug)]
pub(super) struct CoreLock(Mutex<Core>);

/// Access to the core. Its end serves the queue if the core was changed through it.
#[must_use = "dropping it unlocks"]
pub(super) struct Locked<'a> {
    // Declared first, so dropped first: the wakes follow the unlock.
    core: MutexGuard<'a, Core>,
    central: &'a CentralPool,
    changed: bool,
    after: After,
}

/// What follows the unlock: the wakes, and further turns where there was more to serve than one turn may.
#[derive(Default)]
struct After {
    wakes: Vec<Wake>,
    more: Option<Arc<CentralPool>>,
}

impl CoreLock {
    pub(super) fn new(core: Core) -> Self {
        Self(Mutex::new(core))
    }

    /// The core without the queue's service, for tests that bring it into a state that no call leaves.
    #[cfg(test)]
    pub(super) fn lock(&self) -> MutexGuard<'_, Core> {
        self.0.lock()
    }
}

impl CentralPool {
    pub(super) fn lock(&self) -> Locked<'_> {
        Locked { core: self.core.0.lock(), central: self, changed: false, after: After::default() }
    }

    /// The lock, for a request that is not in the queue: the waiters that what is free can serve are served first. (While
    /// others have begun another turn meanwhile, `pending` is set again.)
    pub(super) fn served(&self) -> Locked<'_> {
        let mut locked = self.lock();
        if locked.pending {
            locked.changed = true;
            drop(locked);
            locked = self.lock();
        }
        locked
    }
}

impl Locked<'_> {
    /// The books, whose changes the queue does not wait for.
    pub(super) fn books(&mut self) -> &mut Books {
        &mut self.core.books
    }
}

impl Deref for Locked<'_> {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Core {
        self.changed = true;
        &mut self.core
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if !self.changed {
            return;
        }
        self.after.wakes = self.central.turn(&mut self.core);
        // Counted under the lock: once that is released, the central pool may be freed.
        self.after.more = if self.core.pending { self.central.weak().upgrade() } else { None };
    }
}

impl Drop for After {
    fn drop(&mut self) {
        self.wakes.drain(..).for_each(Wake::wake);
        let Some(central) = self.more.take() else { return };
        loop {
            let mut core = central.core.0.lock();
            let (wakes, pending) = (central.turn(&mut core), core.pending);
            drop(core);
            wakes.into_iter().for_each(Wake::wake);
            if !pending {
                return;
            }
        }
    }
}
