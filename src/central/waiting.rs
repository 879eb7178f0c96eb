//! Waiting for memory, seen from the central pool: joining and leaving the queue, serving it, and ending waits that
//! nothing can serve any more. Who is next is decided by [`super::queue`].
//!
//! While anybody waits, the mode word keeps all threads out of their thread caches, and what these cached is back in
//! its runs: each segment that comes back meets the queue under the lock. Not so while memory for the only waiters is
//! on its way from the system: then nobody else needs to hurry.

use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use super::growth::least;
use super::{CentralPool, Core, Fresh, Grant, WaitOutcome, Wake, Want, mode, state, sum};
use crate::error::{Error, Result};
use crate::foreign::Task;
use crate::freelist::Descriptor;
use crate::sync;

impl CentralPool {
    /// Joins the queue, served at once if that is possible. With `covered`, memory for it is on its way from the
    /// system, so nobody else needs to hurry: other threads keep their thread caches.
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

    /// Sends everyone to the queue, and brings all that is cached to the runs.
    pub(super) fn start_waiting(&self, core: &mut Core) {
        if core.queue.is_empty() || self.gate.mode() & mode::WAITING != 0 {
            return;
        }
        if cfg!(pinpool_planted = "wait_without_quiesce") {
            self.gate.force(mode::WAITING);
        } else {
            self.gate.quiesce(mode::WAITING, &core.table);
        }
        self.reclaim_quiet(core);
    }

    /// Whether a request waits here that what comes back is to go to. `false` while the memory for all that wait is on
    /// its way from the system.
    pub(crate) fn awaited(&self) -> bool {
        self.gate.mode() & mode::WAITING != 0
    }

    pub(super) fn stop_waiting(&self, core: &Core) {
        if core.queue.is_empty() && self.gate.mode() & mode::WAITING != 0 {
            self.gate.readmit(mode::WAITING, &core.table);
        }
    }

    /// What became of a waiter. Anything but [`WaitOutcome::Waiting`] ends it.
    pub(crate) fn look(&self, key: usize, waker: Option<&Waker>) -> WaitOutcome<Fresh> {
        // In the child of a fork the lock may be anyone's, and nothing comes any more.
        if crate::os::forked() {
            return WaitOutcome::Failed(Error::Forked);
        }
        let wake = waker.map(|w| Wake::Task(Task::of(w)));
        // The one that is replaced goes after the lock, since a task may go with it, and buffers with the task.
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

    /// Whether a waiter still waits. To be followed by [`CentralPool::look`] or [`CentralPool::leave`].
    pub(crate) fn waits(&self, key: usize) -> bool {
        self.core.lock().queue.waits(key)
    }

    /// Ends a wait early; what was granted meanwhile goes back.
    pub(crate) fn leave(&self, key: usize, timed_out: bool) {
        if crate::os::forked() {
            return;
        }
        let mut wakes = Vec::new();
        let mut core = self.core.lock();
        core.stats.timeouts += u64::from(timed_out);
        let mut last = false;
        // Its waker goes after the lock, since a task may go with it, and buffers with the task.
        let (outcome, waker) = core.queue.leave(key);
        if let WaitOutcome::Granted(grants) = outcome {
            for Grant { descriptor, len } in grants {
                // SAFETY: granted, so out and alive, and the waiter never saw it.
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
        // What it gives back may be what the next waits for, and its place what held that up.
        if !cfg!(pinpool_planted = "leave_serves_nobody") {
            core.serve(&mut wakes);
        }
        self.stop_waiting(&core);
        drop(core);
        drop(waker);
        wakes.into_iter().for_each(Wake::wake);
        if last {
            // SAFETY: the outstanding reference, given up by the last of the outstanding reference. The caller holds a
            // count of its own.
            unsafe { Arc::decrement_strong_count(self.me.as_ptr()) };
        }
    }

    /// Waits for a place in the queue to be served.
    ///
    /// # Errors
    /// What ended the wait; [`Error::Timeout`] when the deadline passed.
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

    /// The error for who does not wait.
    pub(crate) fn exhausted(&self, len: usize) -> Error {
        let growth = self.core.lock().growth_failure.clone().map(Box::new);
        Error::Exhausted { len, capacity: self.config.capacity, growth }
    }

    pub(super) fn hopeless(&self, core: &Core, wants: &[Want]) -> Option<Error> {
        let total = sum(wants.iter().map(|w| w.placement.bytes()));
        let error = |len| {
            Some(Error::Impossible { len, quarantined: core.quarantined, capacity: self.config.capacity })
        };
        if total > self.config.capacity.saturating_sub(core.quarantined) {
            return error(sum(wants.iter().map(|w| w.len)));
        }
        // What is on its way, or could still be, may serve them; and regions that are idle one day can go for it.
        if core.growing > 0 || core.room() + core.leaving >= least(wants) || core.movable() >= least(wants) {
            return None;
        }
        core.never(wants).and_then(|w| error(w.len))
    }

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

/// What growing failed with, for wants that nothing there is can ever serve. Whoever could be served by what will come
/// back waits for that.
pub(super) fn growth_failure(core: &Core, wants: &[Want]) -> Option<Error> {
    let error = core.growth_failure.as_ref().filter(|_| core.growing == 0)?;
    core.never(wants).map(|_| error.clone())
}

impl Core {
    /// The first of these that cannot be had together with its like, whatever comes back: what is quarantined is in the
    /// way.
    pub(super) fn never<'a>(&self, wants: &'a [Want]) -> Option<&'a Want> {
        let stuck = |descriptor: &Descriptor| descriptor.word().state() == state::QUARANTINED;
        let stuck: Option<&dyn Fn(&Descriptor) -> bool> =
            if self.quarantined > 0 { Some(&stuck) } else { None };
        wants.iter().find(|want| {
            let alike = wants.iter().filter(|w| w.placement == want.placement).count();
            !self.arena.could_serve(want.placement, alike, stuck)
        })
    }

    /// Grants what can be granted to those who wait.
    pub(super) fn serve(&mut self, wakes: &mut Vec<Wake>) {
        while !self.queue.is_empty() {
            self.grant(wakes);
            if self.growing > 0 || self.grow_for_head(wakes) {
                break;
            }
            // With nothing out and nothing on its way, what cannot be had now never can: `never` knows that at once for
            // one buffer, but not how several fit together.
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

    /// Whether any segment can still come back. Of use only while nothing is cached.
    fn anything_out(&self) -> bool {
        let bytes = self.arena.bytes();
        bytes.free + bytes.cut + self.quarantined < bytes.total
    }

    fn grant(&mut self, wakes: &mut Vec<Wake>) {
        let Self { arena, queue, takes, granted, requested, classes, .. } = self;
        queue.serve(arena, wakes, |arena, grant| {
            *takes += 1;
            // SAFETY: just taken from its run: alive, and ours alone.
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
