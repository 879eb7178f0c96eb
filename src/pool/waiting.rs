//! Step 7 of a checkout for a thread: it waits until memory comes back, or is pinned.
//!
//! A request that names a reserve may be served by two stores: it waits in the reserve's queue, and while memory for
//! the main store is being pinned it looks there too, each time that more has been pinned (`wait_grown`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::{Obtained, Pool, Request, Store};
use crate::central::{self, CentralPool, Fresh, Leaving, ReclaimLevel, WaitOutcome, Wake, Want};
use crate::error::Result;
use crate::telemetry::stuck;

impl Pool {
    /// Serves requests that are made together, or none of them.
    pub(super) fn acquire_all(
        &self,
        requests: &[Request<'_>],
        limit: WaitLimit,
        since: Instant,
        max_waiting: usize,
    ) -> Result<Vec<Fresh>> {
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let plan = self.plan(requests)?;
        let growing = match self.try_hard(&plan)? {
            Obtained::Granted(granted) => return Ok(granted),
            Obtained::Nothing { growing } => growing,
        };
        let central = &plan.store.central;
        let len = central::sum(plan.wants.iter().map(|w| w.len));
        // A thread of this crate would wait for itself: it pins memory, or finds out what is complete.
        let limit = if crate::sync::own().is_some() { WaitLimit::None } else { limit };
        let deadline = match limit {
            // The growth is for later requests. This one may not wait for it.
            WaitLimit::None => {
                return self.try_plan(&plan, ReclaimLevel::Half)?.ok_or_else(|| central.exhausted(len));
            }
            WaitLimit::For(timeout) => since.checked_add(timeout),
            WaitLimit::Forever => None,
        };
        let span =
            crate::foreign::span!(DEBUG, target: "pinpool::pool", "wait", pool = self.name(), bytes = len);
        let _entered = span.enter();
        let wake = Wake::Thread(crate::sync::thread::current());
        let key = central.join(plan.wants, wake, growing, max_waiting)?;
        if self.stepped() {
            return self.wait_stepped(plan.store, key, len, since);
        }
        self.watch_waits();
        self.reap();
        if let Some(granted) = plan.first.and_then(|first| self.wait_grown(central, key, &first, deadline)) {
            return Ok(granted);
        }
        central.wait(key, len, deadline, since)
    }

    /// Waits for a reserve while memory for the main store is being pinned, and takes what the main store gets first.
    /// `None`: the wait at the reserve or its time is over, or only the reserve can serve the request from here on.
    pub(super) fn wait_grown(
        &self,
        central: &CentralPool,
        key: usize,
        first: &[Want],
        deadline: Option<Instant>,
    ) -> Option<Vec<Fresh>> {
        let waker = Waker::from(Arc::new(Unparks(crate::sync::thread::current())));
        loop {
            let (grown, over) = self.take_grown(first, &waker);
            if grown.is_some() {
                central.leave(key, Leaving::Served);
                return grown;
            }
            if over || !central.waits(key) || deadline.is_some_and(|d| Instant::now() >= d) {
                return None;
            }
            crate::sync::thread::park_until(deadline);
        }
    }

    /// What the main store has now for a request that waits for a reserve, and whether pinning for it is over. If it is
    /// not, the waker is woken when more has been pinned.
    pub(super) fn take_grown(&self, first: &[Want], waker: &Waker) -> (Option<Vec<Fresh>>, bool) {
        let main = &self.0.main;
        // In this order: an extent that is pinned between the two calls is found by the second.
        let over = main.regions.poll(waker).is_some();
        let granted = self.try_all(main, first, ReclaimLevel::Idle).ok().flatten();
        (granted, over)
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
            let (mut any, now) = (false, crate::timer::now());
            for central in pool.centrals() {
                let (long, waits) = central.long_wait(now, stuck::LONG_WAIT, || pool.may_report());
                any |= waits;
                if let Some(long) = long {
                    stuck::report(pool.name(), long.waited, Some(&long), pool.centrals(), pool.devices());
                }
            }
            if any {
                pool.watch_waits();
            }
        });
    }

    /// Waits where nothing moves by itself: this thread steps the devices.
    pub(super) fn wait_stepped(
        &self,
        store: &Store,
        key: usize,
        len: usize,
        since: Instant,
    ) -> Result<Vec<Fresh>> {
        loop {
            match store.central.look(key, None) {
                WaitOutcome::Granted(granted) => return Ok(granted),
                WaitOutcome::Failed(error) => return Err(error),
                WaitOutcome::Waiting => {}
            }
            let moved =
                self.0.devices.iter().any(|d| d.context().driver().stepped().is_some_and(|s| s.step()));
            if !self.reap() && !moved {
                return store.central.give_up(key, len, since);
            }
        }
    }
}

/// Wakes a thread.
pub(super) struct Unparks(crate::sync::thread::Thread);

impl std::task::Wake for Unparks {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// How long a request may wait.
#[derive(Clone, Copy, Debug)]
pub(super) enum WaitLimit {
    None,
    For(Duration),
    Forever,
}
