//! Waiting for memory: joining and leaving the queue, serving it, deadlines, and ending waits that
//! nothing can serve any more. [`super::queue`] decides which waiter is next, [`super::windows`]
//! what is withheld for it.
//!
//! # The rule
//!
//! A waiter has a right to what is free in its window, and to what comes back there; if a request
//! of the same size waits for longer, that one is served from the window first. A waiter for one
//! segment of a class has a right to each segment of the class that comes back outside of other
//! windows, too. Everything else serves everybody. What is free outside of windows when the lock is
//! let go serves no waiter: the guard of the lock sees to that.
//!
//! # Looks
//!
//! Returns do not look at everything that a new request would find: cached segments, and pages that
//! lengthen a window. So while a request waits, the timer looks every 100 ms, and takes these.
//!
//! # While memory is being pinned
//!
//! What is being pinned may serve all waiters. So they have no rights at first: no class is closed
//! for them, and no window is chosen. They have them once a look has found the oldest of them
//! waiting: pinning may take long.

use std::ptr::NonNull;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::growth::least;
use super::queue::{Size, Ticket, bytes, give_all, take_all};
use super::windows::{AWAITED, MOST_WINDOWS};
use super::{CentralPool, Core, Fresh, Wake, Want, sum};
use crate::arena::set_of;
use crate::error::{Error, Result, Shortage, Waited};
use crate::foreign::Task;
use crate::freelist::{Descriptor, listed};
use crate::segment::Class;
use crate::sync;

/// The time between two looks, and without a clock the requests on the slow path between them.
const LOOK: Duration = Duration::from_millis(100);
const TICKS: u32 = 64;

/// A request that waits, how many wait with it, and why growing failed.
#[derive(Debug)]
pub(crate) struct LongWait {
    pub(crate) waited: Duration,
    pub(crate) bytes: usize,
    pub(crate) buffers: usize,
    pub(crate) waiting: usize,
    pub(crate) growth: Option<Error>,
}

impl CentralPool {
    /// Adds a request to the queue, and serves it at once if possible. Returns the waiter's key.
    /// `most`: how many requests may wait at a time, this one included.
    ///
    /// # Errors
    /// [`Error::Closed`], [`Error::Forked`], [`Error::QueueFull`]; [`Error::Impossible`] or the
    /// error of the last growth if nothing can ever serve the request.
    pub(crate) fn join(&self, wants: Vec<Want>, wake: Wake, most: usize) -> Result<usize> {
        self.refuse_if_shut()?;
        let mut core = self.lock();
        self.refuse_if_shut()?;
        if let Some(error) = core.hopeless(&wants) {
            return Err(error);
        }
        if core.queue.waiting.len() >= most {
            return Err(Error::QueueFull { limit: most });
        }
        core.stats.waits += 1;
        let key = core.queue.join(wants, wake);
        let size = core.queue.waiting[&key].size;
        let leads = core.queue.first(size) == Some(key);
        let may_find = match size {
            Size::Class(_) => leads,
            _ if core.arena.windows.len() >= MOST_WINDOWS => false,
            Size::Several(_) => true,
            // One that no region can hold may have whole regions for a window.
            Size::Pages(need, _) => {
                core.windows.none_for.is_none_or(|none| (need as usize) < none)
                    || leads && core.outgrow(core.queue.wants(key))
            }
        };
        core.windows.wanted |= may_find;
        // The unlock serves it, if what came back meanwhile is not for one that waited longer.
        drop(core);
        Ok(key)
    }

    /// Serves the queue, and chooses windows, after a change.
    pub(super) fn turn(&self, core: &mut Core) {
        core.grant_waiters();
        // What windows that ended meanwhile had may serve others.
        while core.windows.wanted && core.has_rights() {
            self.arrange(core, false);
            core.grant_waiters();
        }
        // Opens the classes that need not be closed any more.
        let (closed, needed) = (core.windows.closed, core.classes_to_close());
        self.close_classes(core, [0, 1].map(|why| closed[why] & needed[why]));
        if core.queue.is_empty() {
            return;
        }
        if core.config.by_hand {
            // The next call is the end of the pause.
            core.refusal.iter_mut().for_each(|refusal| refusal.looks = 0);
        } else if !std::mem::replace(&mut core.windows.planned, true) && !cfg!(loom) {
            let central = self.me.clone();
            crate::timer::after(LOOK, move || {
                let Some(central) = central.upgrade() else { return };
                let mut core = central.lock();
                core.windows.planned = false;
                central.look_now(&mut core);
            });
        }
    }

    /// Without a clock, a request outside of the queue is a tick, and many are followed by a look:
    /// before the request is tried, so that it finds what the look has brought back.
    pub(super) fn tick(&self, core: &mut Core) {
        core.windows.ticks += u32::from(!core.queue.is_empty());
        if core.windows.ticks >= TICKS {
            core.windows.ticks = 0;
            self.look_now(core);
            core.grant_waiters();
        }
    }

    fn look_now(&self, core: &mut Core) {
        if !core.queue.is_empty() {
            core.windows.looked = core.queue.joined;
            core.refusal.iter_mut().for_each(|refusal| refusal.looks = refusal.looks.saturating_sub(1));
            self.arrange(core, true);
        }
    }

    /// Checks closed classes, windows and the queue. `cached`: whether a class is cached.
    pub(super) fn check_waiting(
        &self,
        core: &mut Core,
        cached: impl Fn(Class) -> bool,
    ) -> std::result::Result<(), String> {
        for (id, window) in &core.arena.windows {
            if !core.queue.waiting.contains_key(&window.owner) || core.window(window.owner) != Some(id) {
                return Err(format!("request {} has a window and does not wait, or has two", window.owner));
            }
        }
        for ticket in core.queue.firsts().collect::<Vec<_>>() {
            let wants = core.queue.wants(ticket);
            if let Some(taken) = take_all(&mut core.arena, wants) {
                give_all(&mut core.arena, taken.into_iter());
                return Err(format!("a request waits that what is free can serve: {wants:?}"));
            }
        }
        if !core.queue.is_empty() && !core.windows.planned && !core.config.by_hand {
            return Err("a request waits and no look is planned".into());
        }
        if !core.has_rights() {
            return Ok(());
        }
        let [awaited, in_windows] = core.classes_to_close();
        for class in listed() {
            let (this, why) = (set_of(class), self.closed.why(class));
            let needed = if awaited & this != 0 { AWAITED } else { u32::from(in_windows & this != 0) };
            if why < needed {
                return Err(format!("{class:?} is closed by {why}, and {needed} is needed"));
            }
            if needed == AWAITED && cached(class) {
                return Err(format!("segments of {class:?} are cached, and a request waits for one"));
            }
        }
        let mut ranges = core.arena.window_addresses();
        match ranges.find(|(first, end)| !self.closed.holds(*first) || !self.closed.holds(end - 1)) {
            Some((first, end)) => Err(format!("returns do not find the window at {first:x} to {end:x}")),
            None => Ok(()),
        }
    }

    /// The outcome of a wait, which ends the key. `None`: the waiter still waits, and is woken
    /// through `waker` from now on, if that is given.
    pub(crate) fn look(&self, key: usize, waker: Option<&Waker>) -> Option<Result<Vec<Fresh>>> {
        // In a fork's child a missing thread may hold the lock, and no segment comes back.
        if crate::os::forked() {
            return Some(Err(Error::Forked));
        }
        // Cloned before the lock: this is the program's code.
        let task = waker.map(Task::of);
        let mut core = self.lock();
        let queue = &mut core.as_is().queue;
        if let (Some(waiter), Some(task)) = (queue.waiting.get_mut(&key), task) {
            waiter.wake = Wake::Task(task);
        }
        queue.ended.remove(&key)
    }

    /// Ends a wait early, and returns what was granted meanwhile.
    pub(crate) fn leave(&self, key: usize) {
        if crate::os::forked() {
            return;
        }
        let mut core = self.lock();
        let outcome = core.leave(key);
        core.stats.abandoned += u64::from(outcome.is_none());
        let mut last = None;
        // They go back under the lock, since a thread cache would keep them from the next waiter.
        for fresh in outcome.and_then(Result::ok).unwrap_or_default() {
            let segment = fresh.into_segment();
            let len = segment.len();
            // SAFETY: granted, so out, and no other code has it: the waiter never saw it.
            last = unsafe { core.put(segment.into_descriptor(), len) };
        }
        // The next waiter may be waiting for this one's place at the head.
        drop(core);
        // As in `put_slow`.
        drop(last);
    }

    /// Ends a wait for `len` bytes whose time is over, after a last look beyond the request's
    /// window: what got free beside it may lengthen that. `since` is when the request began.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    pub(crate) fn give_up(&self, key: usize, len: usize, since: Instant) -> Result<Vec<Fresh>> {
        let mut core = self.lock();
        if core.queue.waiting.contains_key(&key) {
            core.window(key).into_iter().for_each(|id| core.end_window(id));
            core.grant(key);
        }
        core.leave(key).unwrap_or_else(|| {
            core.stats.timeouts += 1;
            let (time, shortage) = (since.elapsed(), Some(Box::new(core.shortage(len))));
            Err(Error::Timeout(Waited { time, transfer: None, shortage }))
        })
    }

    /// Waits on this thread until the waiter is served. `since` is when the request began, and
    /// `len` its bytes, for the error.
    ///
    /// # Errors
    /// The error that ended the wait; [`Error::Timeout`] when the deadline has passed.
    pub(crate) fn wait(
        &self,
        key: usize,
        len: usize,
        deadline: Option<Instant>,
        since: Instant,
    ) -> Result<Vec<Fresh>> {
        loop {
            if let Some(outcome) = self.look(key, None) {
                return outcome;
            }
            if deadline.is_some_and(|d| Instant::now() >= d) {
                return self.give_up(key, len, since);
            }
            sync::thread::park_until(deadline);
        }
    }

    /// The request that has waited for longest.
    pub(crate) fn longest_wait(&self) -> Option<LongWait> {
        let core = self.lock();
        let waiter = core.queue.waiting.values().next()?;
        Some(LongWait {
            waited: waiter.since.elapsed(),
            bytes: sum(waiter.wants.iter().map(|want| want.len)),
            buffers: waiter.wants.len(),
            waiting: core.queue.waiting.len(),
            growth: core.refusal.as_ref().map(|refusal| refusal.error.clone()),
        })
    }

    /// The error for a request that finds nothing and does not wait.
    pub(crate) fn exhausted(&self, len: usize) -> Error {
        Error::Exhausted(Box::new(self.lock().shortage(len)))
    }
}

impl Core {
    /// Whether waiters have rights: while memory is pinned, only once a look found the head
    /// waiting.
    fn has_rights(&self) -> bool {
        self.queue.head().is_some_and(|head| self.growing == 0 || head < self.windows.looked)
    }

    /// The error for wants that neither segments that may come back nor memory to be pinned can
    /// serve: [`Error::Impossible`], or the error of the last growth, if no shorter growth would
    /// do.
    pub(super) fn hopeless(&self, wants: &[Want]) -> Option<Error> {
        if bytes(wants) > self.config.capacity.saturating_sub(self.quarantined) {
            return Some(self.impossible(wants));
        }
        if !self.outgrow(wants) {
            return None;
        }
        let may_grow = self.config.step > 0;
        if !may_grow && self.growing == 0 && self.room() < least(wants) {
            return Some(self.impossible(wants));
        }
        let refusal = self.refused()?;
        let is_retried = may_grow && refusal.allows(self.need(wants));
        if is_retried { None } else { Some(refusal.error.clone()) }
    }

    fn impossible(&self, wants: &[Want]) -> Error {
        let len = sum(wants.iter().map(|w| w.len));
        Error::Impossible { len, quarantined: self.quarantined, capacity: self.config.capacity }
    }

    /// Whether the extents could not hold all of these, or those of one placement, even if every
    /// segment came back. Of quarantined segments the bytes count, and not the places.
    pub(super) fn outgrow(&self, wants: &[Want]) -> bool {
        if bytes(wants) > self.arena.bytes().total.saturating_sub(self.quarantined) {
            return true;
        }
        let mut alike: Vec<(&Want, usize)> = Vec::new();
        for want in wants {
            match alike.iter_mut().find(|(first, _)| first.placement == want.placement) {
                Some((_, count)) => *count += 1,
                None => alike.push((want, 1)),
            }
        }
        alike.into_iter().any(|(want, count)| self.arena.fits(want.placement) < count)
    }

    /// Grants waiters what can be granted, and ends waits at the head that can never be served.
    pub(super) fn grant_waiters(&mut self) {
        loop {
            self.grant_from_free();
            let Some(head) = self.queue.head() else { return };
            // With nothing out and nothing being pinned, a wait that cannot be served now never can
            // be. (`outgrow` does not see whether several placements fit together.)
            let may_come = self.arena.given_out() > self.quarantined;
            if self.growing > 0 || self.grow_for_queue() || may_come {
                return;
            }
            // What is withheld is free, too: it serves the head, or is unpinned for a region that
            // does. (Regions to be replaced may have come back while others were pinned.)
            self.windows().into_iter().for_each(|id| self.end_window(id));
            if !self.grant(head) && !self.grow_for_queue() {
                let failed = self.refused().map(|refusal| refusal.error.clone());
                let error = failed.unwrap_or_else(|| self.impossible(self.queue.wants(head)));
                self.end(head, Err(error));
            }
        }
    }

    /// Grants waiters what is free outside of windows.
    fn grant_from_free(&mut self) {
        let mut from = 0;
        while let Some(key) = self.queue.next(&self.arena, from) {
            let had_window = self.window(key).is_some();
            // What was withheld for it may be what others wait for.
            from = if self.grant(key) && had_window { 0 } else { key + 1 };
        }
    }

    /// Ends the waits that have become impossible. The first of a size stands for all.
    pub(super) fn fail_hopeless(&mut self) {
        for size in self.queue.sizes.keys().copied().collect::<Vec<_>>() {
            while let Some(first) = self.queue.first(size) {
                let Some(error) = self.hopeless(self.queue.wants(first)) else { break };
                self.end(first, Err(error));
            }
        }
    }

    /// Ends a wait, and what was withheld for it. The waiter finds the outcome when it looks.
    pub(super) fn end(&mut self, key: Ticket, outcome: Result<Vec<Fresh>>) {
        if let Some(waiter) = self.queue.remove(key) {
            self.queue.ended.insert(key, outcome);
            waiter.wake.wake();
            self.pass_on(key, waiter.size);
        }
    }

    /// Takes a waiter out of the queue. Returns its outcome, if it has one.
    fn leave(&mut self, key: Ticket) -> Option<Result<Vec<Fresh>>> {
        let Some(waiter) = self.queue.remove(key) else { return self.queue.ended.remove(&key) };
        self.pass_on(key, waiter.size);
        None
    }

    /// A waiter of this size has left: the next one of the same class inherits its window.
    fn pass_on(&mut self, key: Ticket, size: Size) {
        let Some(id) = self.window(key) else { return };
        match self.queue.first(size).filter(|_| matches!(size, Size::Class(_))) {
            Some(heir) => {
                let window = &mut self.arena.windows[id];
                (window.owner, window.looks) = (heir, 0);
            }
            None => self.end_window(id),
        }
    }

    /// Serves a waiter from what is free outside of windows. `false`: that is not enough.
    pub(super) fn grant(&mut self, key: Ticket) -> bool {
        let wants = self.queue.wants(key).to_vec();
        let Some(granted) = self.take(&wants) else { return false };
        self.end(key, Ok(granted));
        true
    }

    /// Gives a segment that came back to the oldest waiter of its class, unless it lies in
    /// another's window. `false`: it is still the caller's.
    ///
    /// # Safety
    /// The descriptor is of this class, alive, free, in no list, and owned by the caller.
    pub(super) unsafe fn hand_over(&mut self, descriptor: NonNull<Descriptor>, class: Class) -> bool {
        let Some(key) = self.queue.first(Size::Class(class)) else { return false };
        // SAFETY: this function's contract.
        let lies_in = unsafe { self.arena.window_of(descriptor) };
        if lies_in.is_some() && lies_in != self.window(key) {
            return false;
        }
        let len = self.queue.wants(key)[0].len;
        let granted = self.took(descriptor, len);
        self.end(key, Ok(vec![granted]));
        true
    }

    /// What there is for a request of `len` bytes that is not served.
    pub(super) fn shortage(&self, len: usize) -> Shortage {
        let bytes = self.arena.bytes();
        let owners = self.arena.windows.iter().map(|(_, window)| self.queue.wants(window.owner));
        Shortage {
            requested: len,
            free: bytes.free,
            largest: bytes.largest_free,
            withheld: bytes.withheld,
            withheld_for: owners.map(|wants| sum(wants.iter().map(|want| want.len))).max().unwrap_or(0),
            capacity: self.config.capacity,
            waiting: self.queue.waiting.len(),
            growth: self.refusal.as_ref().map(|refusal| Box::new(refusal.error.clone())),
            ..Shortage::default()
        }
    }
}
