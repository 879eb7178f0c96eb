//! Waiting for memory: joining and leaving the queue, serving it, and ending waits that nothing can serve any more.
//! [`super::queue`] decides which waiter is next.
//!
//! While a request waits, the mode word keeps all threads out of their thread caches, and what these held is back in
//! its runs. So each segment that comes back meets the queue, under the lock. There is one exception: while memory for
//! all waiters is being pinned, other threads keep their caches.

use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use super::growth::{growth_failure, least};
use super::{CentralPool, Core, Fresh, Grant, WaitOutcome, Wake, Want, mode, state, sum};
use crate::error::{Error, Result};
use crate::foreign::Task;
use crate::freelist::Descriptor;
use crate::sync;

impl CentralPool {
    /// Adds a request to the queue, and serves it at once if possible. Returns the waiter's key. With `covered`, memory
    /// for the request is being pinned already, so other threads keep their thread caches.
    ///
    /// # Errors
    /// [`Error::Closed`], [`Error::Forked`]; [`Error::Impossible`] or the error of the last growth if nothing can ever
    /// serve the request.
    pub(crate) fn join(&self, wants: Vec<Want>, wake: Wake, covered: bool) -> Result<usize> {
        self.refuse_if_shut()?;
        let mut wakes = Vec::new();
        let mut core = self.core.lock();
        self.refuse_if_shut()?;
        if let Some(error) = self.hopeless(&core, &wants).or_else(|| growth_failure(&core, &wants)) {
            return Err(error);
        }
        core.stats.waits += 1;
        let key = core.queue.join(wants, wake);
        if !(covered && core.growing > 0) {
            self.start_waiting(&mut core);
        }
        core.serve(&mut wakes);
        self.stop_waiting(&core);
        drop(core);
        wakes.into_iter().for_each(Wake::wake);
        Ok(key)
    }

    /// Sends all requests and returns to the queue, and moves everything that is cached to its runs. Does nothing if no
    /// request waits, or if the mode says WAITING already.
    pub(super) fn start_waiting(&self, core: &mut Core) {
        if core.queue.is_empty() || self.gate.mode() & mode::WAITING != 0 {
            return;
        }
        self.gate.quiesce(mode::WAITING, &core.table);
        self.reclaim_quiet(core);
    }

    /// Whether segments that come back go to a waiter. `false` also while memory for all waiters is being pinned.
    pub(crate) fn awaited(&self) -> bool {
        self.gate.mode() & mode::WAITING != 0
    }

    /// Admits owners to their thread caches again if no request waits any more.
    pub(super) fn stop_waiting(&self, core: &Core) {
        if core.queue.is_empty() && self.gate.mode() & mode::WAITING != 0 {
            self.gate.readmit(mode::WAITING, &core.table);
        }
    }

    /// The outcome of a waiter so far. Any but [`WaitOutcome::Waiting`] ends the wait, and the key. A waiter that still
    /// waits is woken through `waker` from now on, if that is given.
    pub(crate) fn look(&self, key: usize, waker: Option<&Waker>) -> WaitOutcome<Fresh> {
        // In the child of a fork a thread that no longer exists may hold the lock, and no segment comes back any more.
        if crate::os::forked() {
            return WaitOutcome::Failed(Error::Forked);
        }
        let wake = waker.map(|w| Wake::Task(Task::of(w)));
        // The replaced waker is dropped after the unlock: its task may be dropped with it, and buffers with the task.
        let (outcome, replaced) = self.core.lock().queue.look(key, wake);
        drop(replaced);
        match outcome {
            WaitOutcome::Waiting => WaitOutcome::Waiting,
            WaitOutcome::Granted(grants) => {
                WaitOutcome::Granted(grants.into_iter().map(|g| self.fresh(g)).collect())
            }
            WaitOutcome::Failed(error) => WaitOutcome::Failed(error),
        }
    }

    /// Whether a waiter still waits. The key stays valid after `false`, until [`CentralPool::look`] or
    /// [`CentralPool::leave`] ends it.
    pub(crate) fn waits(&self, key: usize) -> bool {
        self.core.lock().queue.waits(key)
    }

    /// Ends a wait early. What was granted meanwhile goes back to its runs.
    pub(crate) fn leave(&self, key: usize, timed_out: bool) {
        if crate::os::forked() {
            return;
        }
        let mut wakes = Vec::new();
        let mut core = self.core.lock();
        core.stats.timeouts += u64::from(timed_out);
        let mut last = false;
        // The waker is dropped after the unlock, as in `look`.
        let (outcome, waker) = core.queue.leave(key);
        if let WaitOutcome::Granted(grants) = outcome {
            for Grant { descriptor, len } in grants {
                // SAFETY: granted, so out and alive, and no other code has it: the waiter never saw it.
                unsafe {
                    let granted = core.arena.granted(descriptor);
                    core.granted = core.granted.wrapping_sub(granted as u64);
                    core.classes.gave(descriptor.as_ref().class(), granted);
                    descriptor.as_ref().returned();
                    core.arena.give(descriptor);
                }
                core.requested = core.requested.wrapping_sub(len as u64);
                core.puts += 1;
                last |= core.came_back(1);
            }
        }
        // The next waiter may be waiting for what this one gives back, or for its place at the head.
        core.serve(&mut wakes);
        self.stop_waiting(&core);
        drop(core);
        drop(waker);
        wakes.into_iter().for_each(Wake::wake);
        if last {
            // SAFETY: this drops the outstanding reference, once: the last segment is back. The caller holds a count of
            // its own.
            unsafe { Arc::decrement_strong_count(self.me.as_ptr()) };
        }
    }

    /// Waits on this thread until the waiter is served. `since` is when the request began, for the error.
    ///
    /// # Errors
    /// The error that ended the wait; [`Error::Timeout`] when the deadline has passed.
    pub(crate) fn wait(&self, key: usize, deadline: Option<Instant>, since: Instant) -> Result<Vec<Fresh>> {
        loop {
            match self.look(key, None) {
                WaitOutcome::Granted(grants) => return Ok(grants),
                WaitOutcome::Failed(error) => return Err(error),
                WaitOutcome::Waiting => {}
            }
            if deadline.is_some_and(|d| Instant::now() >= d) {
                self.leave(key, true);
                return Err(Error::Timeout(since.elapsed()));
            }
            sync::thread::park_until(deadline);
        }
    }

    /// The error for a request that finds nothing and does not wait.
    pub(crate) fn exhausted(&self, len: usize) -> Error {
        let growth = self.core.lock().growth_failure.clone().map(Box::new);
        Error::Exhausted { len, capacity: self.config.capacity, growth }
    }

    /// [`Error::Impossible`] if neither segments that may come back nor memory that may still be pinned can serve these
    /// wants.
    pub(super) fn hopeless(&self, core: &Core, wants: &[Want]) -> Option<Error> {
        let total = sum(wants.iter().map(|w| w.placement.bytes()));
        let error = |len| {
            Some(Error::Impossible { len, quarantined: core.quarantined, capacity: self.config.capacity })
        };
        if total > self.config.capacity.saturating_sub(core.quarantined) {
            return error(sum(wants.iter().map(|w| w.len)));
        }
        // A region that is being pinned, or could still be, may serve them, also one in place of regions that get idle.
        if core.growing > 0 || core.room() + core.leaving >= least(wants) || core.movable() >= least(wants) {
            return None;
        }
        core.never(wants).and_then(|w| error(w.len))
    }

    /// Ends the waits that have become impossible, and serves those that this lets forward.
    pub(super) fn fail_hopeless(&self, core: &mut Core, wakes: &mut Vec<Wake>) {
        if core.queue.is_empty() {
            return;
        }
        let mut queue = std::mem::take(&mut core.queue);
        queue.fail(wakes, |wants| self.hopeless(core, wants));
        core.queue = queue;
        core.serve(wakes);
    }
}

impl Core {
    /// The first want that cannot be served together with the others of the same placement, even if every segment that
    /// is not quarantined comes back.
    pub(super) fn never<'a>(&self, wants: &'a [Want]) -> Option<&'a Want> {
        let stuck = |descriptor: &Descriptor| descriptor.word().state() == state::QUARANTINED;
        let stuck: Option<&dyn Fn(&Descriptor) -> bool> =
            if self.quarantined > 0 { Some(&stuck) } else { None };
        wants.iter().find(|want| {
            let alike = wants.iter().filter(|w| w.placement == want.placement).count();
            !self.arena.could_serve(want.placement, alike, stuck)
        })
    }

    /// Grants waiters what can be granted, and ends waits at the head that can never be served. The caller makes the
    /// wakes after the unlock.
    pub(super) fn serve(&mut self, wakes: &mut Vec<Wake>) {
        while !self.queue.is_empty() {
            self.grant(wakes);
            if self.growing > 0 || self.grow_for_head(wakes) {
                break;
            }
            // With nothing out and nothing being pinned, a wait that cannot be served now never can be. (`never` looks
            // at one placement at a time, and does not know whether buffers of several placements fit together.)
            if self.leaving > 0 || self.anything_out() {
                break;
            }
            let (quarantined, capacity, growth_failure) =
                (self.quarantined, self.capacity, self.growth_failure.clone());
            self.queue.fail_head(wakes, |wants| {
                let len = sum(wants.iter().map(|w| w.len));
                growth_failure.unwrap_or(Error::Impossible { len, quarantined, capacity })
            });
        }
    }

    /// Whether any segment can still come back. Valid only while nothing is cached.
    pub(super) fn anything_out(&self) -> bool {
        let bytes = self.arena.bytes();
        bytes.free + bytes.cut + self.quarantined < bytes.total
    }

    fn grant(&mut self, wakes: &mut Vec<Wake>) {
        let Self { arena, queue, takes, granted, requested, classes, .. } = self;
        queue.serve(arena, wakes, |arena, grant| {
            *takes += 1;
            // SAFETY: just taken from its run: alive, and no other thread has it.
            let (bytes, class) = unsafe {
                grant.descriptor.as_ref().taken();
                (arena.granted(grant.descriptor), grant.descriptor.as_ref().class())
            };
            *granted = granted.wrapping_add(bytes as u64);
            classes.took(class, bytes);
            *requested = requested.wrapping_add(grant.len as u64);
        });
    }
}
