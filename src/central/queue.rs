//! The queue: the requests that wait for memory, and which of them is next.
//!
//! First come, first served, with one exception. While the head waits for something large, a later request may take a
//! segment of a run that is in use anyway and that the head cannot use as it is. This costs the head nothing now, but
//! it keeps that run in use. So no request overtakes a head that was overtaken [`MAX_OVERTAKES`] times or has waited
//! for [`OVERTAKING_TIME`]. Several buffers of one request are granted together or not at all, and only at the head.
//!
//! The queue only decides. It belongs to the central pool's core, under its lock, and collects the wakes that follow.
//! The caller makes them after it has released the lock.

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

/// No request overtakes a head that was overtaken this often.
pub(crate) const MAX_OVERTAKES: u32 = 64;
/// No request overtakes a head that has waited this long.
pub(crate) const OVERTAKING_TIME: Duration = Duration::from_millis(10);

/// A request for one segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want {
    /// Requested bytes.
    pub(crate) len: usize,
    pub(crate) placement: Placement,
}

/// A segment that was taken for a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    pub(crate) descriptor: NonNull<Descriptor>,
    /// Requested bytes.
    pub(crate) len: usize,
}

// SAFETY: a grant is the ownership of a segment, and the segment's descriptor is Sync.
unsafe impl Send for Grant {}

/// What the caller does once the lock is released: above all, how it wakes a waiter.
#[derive(Debug)]
pub(crate) enum Wake {
    Thread(Thread),
    Task(Task),
    /// Carries out the plan of a region for the head of the queue.
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

/// What became of a waiter. `G` is a granted segment: a [`Grant`] in the queue, a [`super::Fresh`] outside of it.
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
    /// How often other requests have overtaken it.
    overtaken: u32,
    /// Idle regions were replaced for it.
    moved: bool,
    since: Instant,
}

/// See the head of this module.
#[derive(Debug, Default)]
pub(crate) struct WaitQueue {
    waiters: Slab<Waiter>,
    /// Keys of the waiters that still wait, in the order in which they joined.
    order: VecDeque<usize>,
    /// Ignore the clock: pools on a stepped device do so, so that a seed reproduces a run.
    timeless: bool,
    /// How long each wait that has ended took, with any outcome.
    waited: Histogram,
}

impl WaitQueue {
    pub(crate) fn new(timeless: bool) -> Self {
        Self { timeless, ..Self::default() }
    }

    /// Whether no request waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    /// Times from joining to the end of the wait: a grant, an error, or leaving.
    pub(crate) fn waited(&self) -> &Histogram {
        &self.waited
    }

    /// Adds a waiter at the end. Returns its key.
    pub(crate) fn join(&mut self, wants: Vec<Want>, wake: Wake) -> usize {
        let since = Instant::now();
        let key = self.waiters.insert(Waiter {
            wants,
            outcome: WaitOutcome::Waiting,
            wake: Some(wake),
            overtaken: 0,
            moved: false,
            since,
        });
        self.order.push_back(key);
        key
    }

    /// The outcome of a waiter. A waiter that still waits is woken by `wake` from now on, if that is given. A waiter
    /// that waits no more is removed. The second value is a wake that the caller drops after it has released the lock.
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

    /// Removes a waiter. Returns its outcome, with what was granted meanwhile, and as in [`WaitQueue::look`] a wake to
    /// be dropped after the lock is released.
    pub(crate) fn leave(&mut self, key: usize) -> (WaitOutcome, Option<Wake>) {
        self.order.retain(|&k| k != key);
        let Waiter { outcome, wake, since, .. } = self.waiters.remove(key);
        if matches!(outcome, WaitOutcome::Waiting) {
            self.waited.record(since.elapsed());
        }
        (outcome, wake)
    }

    /// The head's wants, and whether idle regions were replaced for it already.
    pub(crate) fn head(&self) -> Option<(&[Want], bool)> {
        let head = &self.waiters[*self.order.front()?];
        Some((&head.wants, head.moved))
    }

    /// Notes that idle regions are replaced for the head.
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

    /// Grants everything that can be granted now. `taken` sees each segment that is given out.
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
        // The head cannot be served now. Later requests may overtake it.
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

    /// Takes what a request may have that is not at the head: one segment of a run that is in use anyway, of a class
    /// that the head does not ask for.
    pub(crate) fn overtake(&mut self, arena: &mut Arena, wants: &[Want]) -> Option<Grant> {
        let head = &mut self.waiters[*self.order.front()?];
        let exempt =
            head.overtaken >= MAX_OVERTAKES || (!self.timeless && head.since.elapsed() >= OVERTAKING_TIME);
        if exempt {
            return None;
        }
        let &[Want { len, placement: Placement::Class(class) }] = wants else { return None };
        if head.wants.iter().any(|w| w.placement == Placement::Class(class)) {
            return None;
        }
        let descriptor = arena.take_from_partly_used(class)?;
        head.overtaken += 1;
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

/// Takes a segment for a placement. Where none is free, idle runs are dissolved first, and then runs in use are
/// shortened.
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

/// Takes a segment for each of `wants`, or none at all.
pub(crate) fn take_all(arena: &mut Arena, wants: &[Want]) -> Option<Vec<Grant>> {
    let mut grants = Vec::with_capacity(wants.len());
    for want in wants {
        match take_one(arena, want.placement) {
            Some(descriptor) => grants.push(Grant { descriptor, len: want.len }),
            None => {
                for grant in grants {
                    // SAFETY: just taken: alive, in no list, its state still HOST, and no other thread has seen it.
                    unsafe { arena.give(grant.descriptor) };
                }
                return None;
            }
        }
    }
    Some(grants)
}
