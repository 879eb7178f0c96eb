//! The central pool's lock.
//!
//! Whoever changes the core under the lock may free memory, or room for memory, that a waiter could have. So the guard
//! itself serves the queue before it lets the lock go, and makes the wakes after that. No path can forget it: nothing
//! else locks the core.
//!
//! What serves no one is the exception: the ledger, and counts, which are written under locks of other modules.

use std::ops::{Deref, DerefMut};

use super::{CentralPool, Core, Wake};
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

/// The wakes, which follow the unlock.
#[derive(Default)]
struct After(Vec<Wake>);

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

    /// The lock, for a request that is not in the queue.
    pub(super) fn lock_to_take(&self) -> Locked<'_> {
        let mut locked = self.lock();
        if locked.config.by_hand {
            self.tick(&mut locked);
        }
        locked
    }
}

impl Locked<'_> {
    /// The core for a check, or for a change of nothing that a waiter could have: the queue is not served.
    pub(super) fn as_is(&mut self) -> &mut Core {
        &mut self.core
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
        if self.changed {
            self.after.0 = self.central.turn(&mut self.core);
        }
    }
}

impl Drop for After {
    fn drop(&mut self) {
        self.0.drain(..).for_each(Wake::wake);
    }
}
