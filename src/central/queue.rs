//! Who waits for memory, and who is next.
//!
//! First come, first served. The one exception: while the head waits for something large, a later request may take a
//! segment of a run that is in use anyway and that the head could not use as it is; this costs the head nothing now,
//! but keeps that run in use, so nothing overtakes a head that was passed [`PASSES`] times or has waited
//! [`OVERTAKING_TIME`]. Several buffers of one request are granted together or not at all, and only at the head.
//!
//! The queue only decides. It is a part of the central pool's core, under its lock, and hands out whom to wake; the
//! waking is done after the lock is released.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Weak;
use std::time::{Duration, Instant};

use slab::Slab;

use super::CentralPool;
use super::growth::Growth;
use crate::arena::Arena;
use crate::error::Error;
use crate::foreign::Task;
use crate::freelist::Descriptor;
use crate::segment::Placement;
use crate::sync::thread::Thread;
use crate::telemetry::counters::Histogram;

/// A head that was passed so often is passed no more.
pub(crate) const PASSES: u32 = 64;
/// Nor one that has waited so long.
pub(crate) const OVERTAKING_TIME: Duration = Duration::from_millis(10);

/// One segment asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want {
    pub(crate) len: usize,
    pub(crate) placement: Placement,
}

/// A segment given.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    pub(crate) descriptor: NonNull<Descriptor>,
    pub(crate) len: usize,
}

// SAFETY: a grant is the ownership of a segment, whose descriptor is Sync.
unsafe impl Send for Grant {}

/// What to do once the lock is released: above all, how to wake a waiter.
#[derive(Debug)]
pub(crate) enum Wake {
    Thread(Thread),
    Task(Task),
    /// Has a region made for who waits.
    Grow(Weak<CentralPool>, Growth),
}

impl Wake {
    pub(crate) fn wake(self) {
        match self {
            Self::Thread(thread) => thread.unpark(),
            Self::Task(task) => task.wake(),
            Self::Grow(central, growth) => {
                if let Some(central) = central.upgrade() {
                    central.carry_out(growth);
                }
            }
        }
    }
}

/// What became of a waiter.
#[derive(Debug)]
pub(crate) enum WaitOutcome<G = Grant> {
    Waiting,
    Granted(Vec<G>),
    Failed(Error),
}

#[derive(Debug)]
struct Waiter {
    wants: Vec<Want>,
    outcome: WaitOutcome,
    wake: Option<Wake>,
    passed: u32,
    /// Regions were moved for it.
    moved: bool,
    since: Instant,
}

/// See the module's page.
#[derive(Debug, Default)]
pub(crate) struct WaitQueue {
    waiters: Slab<Waiter>,
    /// Keys of those still waiting, in order of arrival.
    order: VecDeque<usize>,
    /// Pools on a stepped device ignore the clock, so that a seed reproduces.
    timeless: bool,
    /// How long those waited who wait no more, whatever they got.
    waited: Histogram,
}

impl WaitQueue {
    pub(crate) fn new(timeless: bool) -> Self {
        Self { timeless, ..Self::default() }
    }

    /// Whether nobody waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    /// Times from joining to the end of the wait: a grant, an error, or giving up.
    pub(crate) fn waited(&self) -> &Histogram {
        &self.waited
    }

    /// Joins at the end.
    pub(crate) fn join(&mut self, wants: Vec<Want>, wake: Wake) -> usize {
        let since = Instant::now();
        let key = self.waiters.insert(Waiter {
            wants,
            outcome: WaitOutcome::Waiting,
            wake: Some(wake),
            passed: 0,
            moved: false,
            since,
        });
        self.order.push_back(key);
        key
    }

    /// Replaces how a waiter is woken; if it waits no more, takes its outcome and removes it. The other half is what
    /// the caller is to drop after releasing the lock.
    pub(crate) fn look(&mut self, key: usize, wake: Option<Wake>) -> (WaitOutcome, Option<Wake>) {
        let waiter = &mut self.waiters[key];
        if matches!(waiter.outcome, WaitOutcome::Waiting) {
            let replaced = if wake.is_some() { std::mem::replace(&mut waiter.wake, wake) } else { None };
            return (WaitOutcome::Waiting, replaced);
        }
        let Waiter { outcome, wake: left, .. } = self.waiters.remove(key);
        (outcome, left.or(wake))
    }

    /// Whether a waiter still waits.
    pub(crate) fn waits(&self, key: usize) -> bool {
        matches!(self.waiters[key].outcome, WaitOutcome::Waiting)
    }

    /// Leaves the queue. What was granted meanwhile comes out with it, and as in [`WaitQueue::look`] what is to be
    /// dropped after the lock.
    pub(crate) fn leave(&mut self, key: usize) -> (WaitOutcome, Option<Wake>) {
        self.order.retain(|&k| k != key);
        let Waiter { outcome, wake, since, .. } = self.waiters.remove(key);
        if matches!(outcome, WaitOutcome::Waiting) {
            self.waited.record(since.elapsed());
        }
        (outcome, wake)
    }

    /// Planted: the head is woken before it is served.
    #[cfg(pinpool_planted = "wake_before_grant")]
    pub(crate) fn head_wake(&mut self) -> Option<Wake> {
        self.waiters[*self.order.front()?].wake.take()
    }

    /// What the head asks for, and whether regions were moved for it already.
    pub(crate) fn head(&self) -> Option<(&[Want], bool)> {
        let head = &self.waiters[*self.order.front()?];
        Some((&head.wants, head.moved))
    }

    pub(crate) fn head_moved(&mut self) {
        if let Some(&head) = self.order.front() {
            self.waiters[head].moved = true;
        }
    }

    /// Ends the head's wait with an error.
    pub(crate) fn fail_head(&mut self, wakes: &mut Vec<Wake>, error: impl FnOnce(&[Want]) -> Error) {
        if let Some(&head) = self.order.front() {
            let error = error(&self.waiters[head].wants);
            self.finish(head, WaitOutcome::Failed(error), wakes);
        }
    }

    fn finish(&mut self, key: usize, outcome: WaitOutcome, wakes: &mut Vec<Wake>) {
        self.order.retain(|&k| k != key);
        let waiter = &mut self.waiters[key];
        waiter.outcome = outcome;
        self.waited.record(waiter.since.elapsed());
        wakes.extend(waiter.wake.take());
    }

    /// Grants whatever can be granted now. `taken` sees each segment that is given out.
    pub(crate) fn serve(
        &mut self,
        arena: &mut Arena,
        wakes: &mut Vec<Wake>,
        mut taken: impl FnMut(&mut Arena, Grant),
    ) {
        while let Some(&head) = self.order.front() {
            let Some(grants) = take_all(arena, &self.waiters[head].wants) else { break };
            for grant in &grants {
                taken(arena, *grant);
            }
            self.finish(head, WaitOutcome::Granted(grants), wakes);
        }
        // The head cannot be served as things are. Who may pass it?
        let mut at = 1;
        while at < self.order.len() {
            let key = self.order[at];
            let wants = std::mem::take(&mut self.waiters[key].wants);
            let granted = self.overtake(arena, &wants);
            self.waiters[key].wants = wants;
            match granted {
                Some(grant) => {
                    taken(arena, grant);
                    self.finish(key, WaitOutcome::Granted(vec![grant]), wakes);
                }
                None => at += 1,
            }
        }
    }

    /// What a request that is not at the head may have all the same: one segment of a run that is in use anyway, of a
    /// class that the head has not asked for.
    pub(crate) fn overtake(&mut self, arena: &mut Arena, wants: &[Want]) -> Option<Grant> {
        let head = &mut self.waiters[*self.order.front()?];
        let tired = head.passed >= PASSES || (!self.timeless && head.since.elapsed() >= OVERTAKING_TIME);
        if tired {
            return None;
        }
        let &[Want { len, placement: Placement::Class(class) }] = wants else { return None };
        if head.wants.iter().any(|w| w.placement == Placement::Class(class)) {
            return None;
        }
        let descriptor = arena.take_from_partly_used(class)?;
        head.passed += 1;
        Some(Grant { descriptor, len })
    }

    /// Ends every wait for which `verdict` has an error.
    pub(crate) fn fail(&mut self, wakes: &mut Vec<Wake>, verdict: impl Fn(&[Want]) -> Option<Error>) {
        for key in self.order.clone() {
            if let Some(error) = verdict(&self.waiters[key].wants) {
                self.finish(key, WaitOutcome::Failed(error), wakes);
            }
        }
    }
}

/// A segment for a placement, giving up what runs do not use where that is what it takes.
pub(crate) fn take_one(arena: &mut Arena, placement: Placement) -> Option<NonNull<Descriptor>> {
    let again = |arena: &mut Arena, more: bool| if more { arena.take(placement) } else { None };
    let mut taken = arena.take(placement);
    if taken.is_none() {
        let more = arena.release_idle();
        taken = again(arena, more);
    }
    if taken.is_none() {
        let more = arena.shorten_runs();
        taken = again(arena, more);
    }
    taken
}

/// All of them or none.
pub(crate) fn take_all(arena: &mut Arena, wants: &[Want]) -> Option<Vec<Grant>> {
    let mut grants = Vec::with_capacity(wants.len());
    for want in wants {
        match take_one(arena, want.placement) {
            Some(descriptor) => grants.push(Grant { descriptor, len: want.len }),
            None => {
                for grant in grants {
                    // SAFETY: just taken, never shown to anyone, still marked free.
                    unsafe { arena.give(grant.descriptor) };
                }
                return None;
            }
        }
    }
    Some(grants)
}
