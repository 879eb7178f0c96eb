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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::region::RegionId;
    use crate::segment::{Class, PAGE};
    use crate::sync::thread;

    const PAGES: usize = 32;
    const SMALL: usize = 5000;

    /// An arena in which a run of the class of `SMALL` is in use, by its third segment, and the rest is free.
    fn arena() -> Arena {
        let mut arena = Arena::new();
        let base = NonNull::new(std::ptr::without_provenance_mut(1 << 20)).unwrap();
        // SAFETY: the arena only does arithmetic on the address.
        unsafe { arena.add_extent(RegionId(0), base, PAGES * PAGE, true) };
        let held = [(); 3].map(|()| arena.take(want(SMALL).placement).unwrap());
        // SAFETY: each is out, and returned once.
        held[..2].iter().for_each(|segment| unsafe { arena.give(*segment) });
        arena
    }

    /// A request of a class up to twice [`SMALL`], or else one for whole pages.
    fn want(len: usize) -> Want {
        let align = if len <= 2 * SMALL { 64 } else { PAGE };
        Want { len, placement: Placement::of(len, align).unwrap() }
    }

    fn join(queue: &mut WaitQueue, wants: &[Want]) -> usize {
        queue.join(wants.to_vec(), Wake::Thread(thread::current()))
    }

    #[test]
    fn a_head_is_overtaken_so_often_and_for_so_long() {
        for timeless in [false, true] {
            let (mut arena, mut queue) = (arena(), WaitQueue::new(timeless));
            let overtakes = |queue: &mut WaitQueue, arena: &mut Arena| {
                let grant = queue.overtake(arena, &[want(SMALL)]);
                // SAFETY: just taken, and returned once.
                grant.inspect(|grant| unsafe { arena.give(grant.descriptor) }).is_some()
            };
            let head = join(&mut queue, &[want(PAGES * PAGE - 32)]);
            // In the future, so that the clock does not end it here.
            queue.waiters[head].since = Instant::now() + Duration::from_secs(3600);
            for n in 0..MAX_OVERTAKES {
                assert!(overtakes(&mut queue, &mut arena), "{n}");
            }
            assert!(!overtakes(&mut queue, &mut arena), "it was overtaken often enough");
            queue.waiters[head].overtaken = 0;
            queue.waiters[head].since = Instant::now().checked_sub(OVERTAKING_TIME).unwrap();
            assert_eq!(overtakes(&mut queue, &mut arena), timeless, "only a clock ends it");
        }
    }

    #[test]
    fn what_a_head_asks_for_and_more_than_one_segment_pass_no_head() {
        let (mut arena, mut queue) = (arena(), WaitQueue::new(true));
        join(&mut queue, &[want(PAGES * PAGE - 32), want(SMALL)]);
        assert!(queue.overtake(&mut arena, &[want(SMALL)]).is_none(), "the head asks for the class");
        let (mut arena, mut queue) = (self::arena(), WaitQueue::new(true));
        join(&mut queue, &[want(PAGES * PAGE - 32)]);
        assert!(queue.overtake(&mut arena, &[want(SMALL), want(SMALL)]).is_none());
        assert!(queue.overtake(&mut arena, &[want(PAGES * PAGE / 2)]).is_none(), "it has a run of its own");
        let other = 2 * SMALL;
        assert_ne!(Class::of(other), Class::of(SMALL));
        assert!(queue.overtake(&mut arena, &[want(other)]).is_none(), "no run of the class is in use");
        assert!(queue.overtake(&mut arena, &[want(SMALL)]).is_some());
    }

    #[test]
    fn those_behind_a_head_are_served_in_order() {
        let (mut arena, mut queue) = (arena(), WaitQueue::new(true));
        let head = join(&mut queue, &[want(PAGES * PAGE - 32)]);
        let behind = [want(2 * SMALL), want(SMALL), want(2 * SMALL), want(SMALL)];
        let keys = behind.map(|want| join(&mut queue, &[want]));
        let (mut wakes, mut taken) = (Vec::new(), Vec::new());
        queue.serve(&mut arena, &mut wakes, |_, grant| taken.push(grant.len));
        assert_eq!((wakes.len(), taken), (2, vec![SMALL, SMALL]));
        assert!(queue.waits(head) && queue.waits(keys[0]) && queue.waits(keys[2]));
        assert!(!queue.waits(keys[1]) && !queue.waits(keys[3]));
        assert_eq!((queue.len(), queue.waiters[head].overtaken), (3, 2));
        assert_eq!(queue.waited().count(), 2);
        let (outcome, _) = queue.look(keys[3], None);
        assert!(matches!(outcome, WaitOutcome::Granted(grants) if grants.len() == 1));
        // With the head gone the others come before what joins later.
        let (outcome, wake) = queue.leave(head);
        assert!(matches!(outcome, WaitOutcome::Waiting) && wake.is_some());
        assert_eq!(queue.waited().count(), 3);
        queue.serve(&mut arena, &mut wakes, |_, _| ());
        assert!(queue.is_empty() && wakes.len() == 4);
        let (outcome, _) = queue.leave(keys[0]);
        assert!(matches!(outcome, WaitOutcome::Granted(_)));
        assert_eq!(queue.waited().count(), 5, "a wait that has ended is counted once");
    }

    #[test]
    fn a_look_replaces_the_wake_of_what_waits() {
        let mut queue = WaitQueue::new(true);
        let key = join(&mut queue, &[want(SMALL)]);
        let other = || Some(Wake::Thread(thread::current()));
        assert!(matches!(queue.look(key, None), (WaitOutcome::Waiting, None)));
        assert!(matches!(queue.look(key, other()), (WaitOutcome::Waiting, Some(_))));
        let mut wakes = Vec::new();
        queue.fail(&mut wakes, |_| None);
        assert!(queue.waits(key) && wakes.is_empty());
        queue.fail(&mut wakes, |wants| (wants[0].len == SMALL).then_some(Error::Closed));
        assert_eq!((queue.waits(key), wakes.len(), queue.len()), (false, 1, 0));
        assert!(matches!(queue.look(key, other()), (WaitOutcome::Failed(Error::Closed), Some(_))));
    }

    #[test]
    fn all_or_nothing() {
        let mut arena = arena();
        let half = want(PAGES * PAGE / 2 - 32);
        assert!(take_all(&mut arena, &[half, half]).is_none(), "the run in use is in the way");
        let grants = take_all(&mut arena, &[want(SMALL), half]).unwrap();
        assert_eq!(grants.iter().map(|grant| grant.len).collect::<Vec<_>>(), [SMALL, half.len]);
    }
}
