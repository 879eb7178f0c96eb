//! Step 7 of a checkout for a thread: it waits until memory comes back, or is pinned.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Obtained, Pool, Request};
use crate::central::{self, Fresh, ReclaimLevel, WaitOutcome, Wake};
use crate::error::Result;
use crate::telemetry::stuck;

impl Pool {
    /// Serves requests that are made together, or none of them.
    pub(super) fn acquire_all(
        &self,
        requests: &[Request],
        limit: WaitLimit,
        since: Instant,
        max_waiting: usize,
    ) -> Result<Vec<Fresh>> {
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let wants = self.wants(requests)?;
        let growing = match self.try_hard(&wants)? {
            Obtained::Granted(granted) => return Ok(granted),
            Obtained::Nothing { growing } => growing,
        };
        let central = &self.0.central;
        let len = central::sum(wants.iter().map(|w| w.len));
        // A thread of this crate would wait for itself: it pins memory, or finds out what is complete.
        let limit = if crate::sync::own().is_some() { WaitLimit::None } else { limit };
        let deadline = match limit {
            // The growth is for later requests. This one may not wait for it.
            WaitLimit::None => {
                return self.try_all(&wants, ReclaimLevel::Half)?.ok_or_else(|| central.exhausted(len));
            }
            WaitLimit::For(timeout) => since.checked_add(timeout),
            WaitLimit::Forever => None,
        };
        let span =
            crate::foreign::span!(DEBUG, target: "pinpool::pool", "wait", pool = self.name(), bytes = len);
        let _entered = span.enter();
        let wake = Wake::Thread(crate::sync::thread::current());
        let key = central.join(wants, wake, growing, max_waiting)?;
        if self.stepped() {
            return self.wait_stepped(key, len, since);
        }
        self.watch_waits();
        self.reap();
        central.wait(key, len, deadline, since)
    }

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
            let (long, waits) =
                central.long_wait(crate::timer::now(), stuck::LONG_WAIT, || pool.may_report());
            if let Some(long) = long {
                stuck::report(pool.name(), long.waited, Some(&long), central, pool.devices());
            }
            if waits {
                pool.watch_waits();
            }
        });
    }

    /// Waits where nothing moves by itself: this thread steps the devices.
    fn wait_stepped(&self, key: usize, len: usize, since: Instant) -> Result<Vec<Fresh>> {
        let central = &self.0.central;
        loop {
            match central.look(key, None) {
                WaitOutcome::Granted(granted) => return Ok(granted),
                WaitOutcome::Failed(error) => return Err(error),
                WaitOutcome::Waiting => {}
            }
            let moved =
                self.0.devices.iter().any(|d| d.context().driver().stepped().is_some_and(|s| s.step()));
            if !self.reap() && !moved {
                return central.give_up(key, len, since);
            }
        }
    }
}

/// How long a request may wait.
#[derive(Clone, Copy, Debug)]
pub(super) enum WaitLimit {
    None,
    For(Duration),
    Forever,
}
