//! Waits: reports of long ones, and the waits of devices that move only when they are stepped.

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
        if self.stepped() || self.0.watched.swap(true, Ordering::Relaxed) {
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

    /// Makes one piece of work of a stepped device happen, if there is any.
    pub(super) fn step(&self) -> bool {
        self.0.devices.iter().any(|d| d.context().driver().stepped().is_some_and(|stepped| stepped.step()))
    }

    /// Waits where nothing moves by itself: this thread steps the devices.
    pub(super) fn wait_stepped(&self, key: usize, len: usize, since: Instant) -> Result<Vec<Fresh>> {
        let central = &self.0.central;
        loop {
            if let Some(outcome) = central.look(key, None) {
                return outcome;
            }
            let moved = self.step();
            if !self.reap() && !moved {
                return central.give_up(key, len, since);
            }
        }
    }
}
