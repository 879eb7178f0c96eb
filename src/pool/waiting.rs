//! Waits: reports of long ones, and the waits on devices that a test moves by hand.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Pool;
use crate::central::Fresh;
use crate::error::Result;
use crate::telemetry::stuck;

impl Pool {
    /// Has the timer report waits that last for long. Every request that has joined a queue calls it.
    pub(super) fn watch_waits(&self) {
        // Relaxed: who finds a look planned has joined a queue that the look locks after it has cleared this.
        if self.is_by_hand() || self.0.watched.swap(true, Ordering::Relaxed) {
            return;
        }
        let pool = self.downgrade();
        crate::timer::after(stuck::LONG_WAIT, move || {
            let Some(pool) = pool.upgrade() else { return };
            pool.0.watched.store(false, Ordering::Relaxed);
            let central = pool.central();
            let (long, waits) = central.long_wait(Instant::now(), stuck::LONG_WAIT, || pool.may_report());
            if let Some(long) = long {
                stuck::report(pool.name(), long.waited, Some(&long), central, pool.devices());
            }
            if waits {
                pool.watch_waits();
            }
        });
    }

    /// Moves devices by hand one step on, and takes back what is complete. Whether anything has changed.
    pub(super) fn advance(&self) -> bool {
        let moved = self.0.devices.iter().any(|d| d.context().advance());
        self.reap() | moved
    }

    /// Waits where nothing moves by itself: this thread moves the devices, for as long as that changes anything.
    pub(super) fn wait_by_hand(&self, key: usize, len: usize, since: Instant) -> Result<Vec<Fresh>> {
        let central = &self.0.central;
        loop {
            if let Some(outcome) = central.look(key, None) {
                return outcome;
            }
            if !self.advance() {
                return central.give_up(key, len, since);
            }
        }
    }
}
