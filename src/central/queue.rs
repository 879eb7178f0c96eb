//! The queue: the requests that wait for memory, and which of them is next.
//!
//! First come, first served, among those that what is free can serve. A request that cannot be served has a right to
//! its *window* alone ([`crate::arena`], `windows`): what is free elsewhere serves everybody, later requests included.
//!
//! Requests of one size class wait for the same segments, so they are served strictly in order. The first of them has a
//! window; the others come after it. Each request for whole pages, and each request for several buffers, has a window
//! of its own as long as the memory outside of all windows lasts, and waits for an earlier window's end otherwise.
//! Several buffers of one request are granted together or not at all.
//!
//! # Costs
//!
//! Waiters are found by their tickets, and by what they need: in a tree, and in a tree for each size. So a join, a
//! grant and a leave take logarithmic time, and a return that serves no waiter looks at the sizes that are waited for
//! and not at the waiters.
//!
//! The queue only decides. It belongs to the central pool's core, under its lock, and collects the wakes that follow.
//! The guard of the lock makes them after the unlock.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ptr::NonNull;
use std::sync::Weak;
use std::time::{Duration, Instant};

use super::{CentralPool, Fresh};
use crate::arena::{Arena, ClassSet, PageRange, set_of};
use crate::error::Result;
use crate::foreign::Task;
use crate::freelist::Descriptor;
use crate::segment::RegionId;
use crate::segment::{CLASSES, Class, PAGE, Placement};
use crate::sync::thread::Thread;
use crate::telemetry::counters::Histogram;

/// A request for one segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want {
    /// Requested bytes.
    pub(crate) len: usize,
    pub(crate) placement: Placement,
}

/// A plan: the regions `going` (with their bytes) are unpinned first, then `bytes` bytes are pinned.
#[derive(Debug)]
pub(crate) struct Growth {
    pub(super) going: Vec<(RegionId, usize)>,
    pub(super) bytes: usize,
}

/// What the caller does once the lock is released: above all, how it wakes a waiter.
#[derive(Debug)]
pub(crate) enum Wake {
    Thread(Thread),
    Task(Task),
    /// Carries out the plan of a region for the head of the queue.
    Grow(Weak<CentralPool>, Growth),
    /// Looks at the queue and the windows after a time.
    Look(Weak<CentralPool>),
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
            Self::Look(central) => CentralPool::look_later(central),
        }
    }
}

/// What a waiter needs. Waiters of one size are served in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Size {
    Class(Class),
    /// The pages that a single buffer needs, and their alignment.
    Pages(u32, usize),
    /// Several buffers: a number that requests for the same sizes share.
    Several(u64),
}

impl Size {
    fn of(wants: &[Want]) -> Self {
        match wants {
            [Want { placement: Placement::Class(class), .. }] => Self::Class(*class),
            [want] => {
                let (pages, align) = want.placement.fresh_pages();
                Self::Pages(u32::try_from(pages).unwrap_or(u32::MAX), align)
            }
            several => {
                let need = |want: &Want| match want.placement {
                    Placement::Class(class) => (class.index(), 0, 1),
                    Placement::Pages { span, align } => (CLASSES, span.div_ceil(PAGE), align),
                };
                let mut needs: Vec<_> = several.iter().map(need).collect();
                needs.sort_unstable();
                let mut hasher = DefaultHasher::new();
                needs.hash(&mut hasher);
                Self::Several(hasher.finish())
            }
        }
    }
}

/// Names a waiter. Waiters have tickets in the order in which they joined.
pub(super) type Ticket = usize;

#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) wants: Vec<Want>,
    pub(super) size: Size,
    pub(super) wake: Option<Wake>,
    /// Idle regions were replaced for it.
    replaced: bool,
    /// How often it gave up a window, and which ranges.
    pub(super) moves: u32,
    pub(super) given_up: Vec<PageRange>,
    since: Instant,
}

/// See the head of this module.
#[derive(Debug, Default)]
pub(crate) struct WaitQueue {
    /// Those that wait.
    pub(super) waiting: BTreeMap<Ticket, Waiter>,
    /// Their tickets, by size. No set is empty.
    pub(super) sizes: BTreeMap<Size, BTreeSet<Ticket>>,
    /// What became of those that wait no more, until they look.
    ended: BTreeMap<Ticket, Result<Vec<Fresh>>>,
    next: Ticket,
    /// Waiters of lower tickets were told of as waiting for long.
    told: Ticket,
    /// How long each wait that has ended took, with any outcome.
    waited: Histogram,
}

impl WaitQueue {
    /// Whether no request waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Times from joining to the end of the wait: a grant, an error, or leaving.
    pub(crate) fn waited(&self) -> &Histogram {
        &self.waited
    }

    /// The classes of which requests for one segment wait.
    pub(super) fn awaited(&self) -> ClassSet {
        let classes = self.sizes.keys().map_while(|size| match size {
            Size::Class(class) => Some(*class),
            _ => None,
        });
        classes.fold(0, |set, class| set | set_of(class))
    }

    /// Adds a waiter at the end.
    pub(crate) fn join(&mut self, wants: Vec<Want>, wake: Wake) -> Ticket {
        let (ticket, size, since) = (self.next, Size::of(&wants), Instant::now());
        self.next += 1;
        let (wake, given_up) = (Some(wake), Vec::new());
        let waiter = Waiter { wants, size, wake, replaced: false, moves: 0, given_up, since };
        self.waiting.insert(ticket, waiter);
        self.sizes.entry(size).or_default().insert(ticket);
        ticket
    }

    fn waiter(&self, ticket: Ticket) -> &Waiter {
        &self.waiting[&ticket]
    }

    /// The first waiter of a size.
    pub(super) fn first(&self, size: Size) -> Option<Ticket> {
        self.sizes.get(&size)?.first().copied()
    }

    /// The first waiter of each size.
    pub(super) fn firsts(&self) -> impl Iterator<Item = Ticket> + '_ {
        self.sizes.values().filter_map(|tickets| tickets.first().copied())
    }

    /// The outcome of a wait, which is told once. `None`: the waiter still waits, and is woken by `wake` from now on,
    /// if that is given. The second value is a wake that the caller drops after it has released the lock.
    pub(super) fn look(
        &mut self,
        ticket: Ticket,
        mut wake: Option<Wake>,
    ) -> (Option<Result<Vec<Fresh>>>, Option<Wake>) {
        if let Some(waiter) = self.waiting.get_mut(&ticket).filter(|_| wake.is_some()) {
            std::mem::swap(&mut waiter.wake, &mut wake);
        }
        (self.ended.remove(&ticket), wake)
    }

    /// Whether a waiter still waits.
    pub(crate) fn waits(&self, ticket: Ticket) -> bool {
        self.waiting.contains_key(&ticket)
    }

    /// What a waiter asks for.
    pub(super) fn wants(&self, ticket: Ticket) -> &[Want] {
        &self.waiter(ticket).wants
    }

    /// Whether idle regions were replaced for a waiter.
    pub(super) fn replaced(&self, ticket: Ticket) -> bool {
        self.waiter(ticket).replaced
    }

    /// Notes that idle regions are replaced for a waiter.
    pub(super) fn note_replaced(&mut self, ticket: Ticket) {
        self.waiting.get_mut(&ticket).into_iter().for_each(|waiter| waiter.replaced = true);
    }

    /// The waiter that came first.
    pub(super) fn head(&self) -> Option<Ticket> {
        self.waiting.keys().next().copied()
    }

    /// The first waiter that has waited for `age` and that no earlier call has told of, if it `may` be told of: since
    /// when it waits, and what it asks for. Of those behind it that have waited for as long no later call tells,
    /// either.
    pub(super) fn waits_long(
        &mut self,
        now: Instant,
        age: Duration,
        may: impl FnOnce() -> bool,
    ) -> Option<(Instant, &[Want])> {
        let is_long = |waiter: &Waiter| now.saturating_duration_since(waiter.since) >= age;
        let mut long = self.waiting.range(self.told..).take_while(|(_, waiter)| is_long(waiter));
        let first = long.next().filter(|_| may())?;
        self.told = long.last().unwrap_or(first).0 + 1;
        Some((first.1.since, &first.1.wants))
    }

    /// Takes a waiter out of the queue. `None`: it does not wait.
    pub(super) fn remove(&mut self, ticket: Ticket) -> Option<Waiter> {
        let waiter = self.waiting.remove(&ticket)?;
        self.waited.record(waiter.since.elapsed());
        let tickets = self.sizes.get_mut(&waiter.size)?;
        tickets.remove(&ticket);
        if tickets.is_empty() {
            self.sizes.remove(&waiter.size);
        }
        Some(waiter)
    }

    /// Ends a wait: the waiter finds the outcome when it [looks](Self::look).
    pub(super) fn finish(&mut self, ticket: Ticket, outcome: Result<Vec<Fresh>>) -> Option<Waiter> {
        let waiter = self.remove(ticket)?;
        self.ended.insert(ticket, outcome);
        Some(waiter)
    }

    // --- who is next -------------------------------------------------------------------------------------------------

    /// The first waiter that what is free outside of windows can probably serve, but for the sizes in `not`.
    pub(super) fn next(&self, arena: &Arena, not: &[Size]) -> Option<Ticket> {
        let largest = u32::try_from(arena.largest_free_pages()).unwrap_or(u32::MAX);
        let short = self.sizes.range(..=Size::Pages(largest, usize::MAX));
        let able = short.chain(self.sizes.range(Size::Several(0)..)).filter(|(size, tickets)| match size {
            Size::Class(class) => arena.could_take(Placement::Class(*class)),
            Size::Pages(..) => true,
            Size::Several(_) => tickets
                .first()
                .is_some_and(|first| self.wants(*first).iter().all(|want| arena.could_take(want.placement))),
        });
        able.filter(|(size, _)| !not.contains(size)).filter_map(|(_, tickets)| tickets.first().copied()).min()
    }
}

/// The pages that a window for these wants must have, and the alignment of the first. For several buffers these are the
/// pages that [`take_all`] takes, and those that alignments may cost.
pub(super) fn window_pages(wants: &[Want]) -> (usize, usize) {
    if let [want] = wants {
        return want.placement.fresh_pages();
    }
    let mut segments = [0; CLASSES];
    let mut pages = 0usize;
    for want in wants {
        match want.placement {
            Placement::Class(class) => segments[class.index()] += 1,
            Placement::Pages { span, align } => pages = pages.saturating_add(span.div_ceil(PAGE) + align - 1),
        }
    }
    let of_classes = Class::all().zip(segments).map(|(class, count)| class.pages_of(count));
    (of_classes.fold(pages, usize::saturating_add), 1)
}

/// Takes a segment for each of `wants`, or none at all. Takes the longest segments first, and cuts no run that is
/// longer than several need. (A longer one takes pages that another of the wants may need.)
pub(super) fn take_all(arena: &mut Arena, wants: &[Want]) -> Option<Vec<NonNull<Descriptor>>> {
    if let [want] = wants {
        return Some(vec![arena.take(want.placement)?]);
    }
    let mut order: Vec<usize> = (0..wants.len()).collect();
    order.sort_by_key(|i| match wants[*i].placement {
        Placement::Class(class) => (Reverse(class.stride().div_ceil(PAGE)), Reverse(1), class.index()),
        Placement::Pages { span, align } => (Reverse(span.div_ceil(PAGE)), Reverse(align), CLASSES),
    });
    let mut taken = Vec::with_capacity(wants.len());
    let mut alike = order.chunk_by(|a, b| wants[*a].placement == wants[*b].placement);
    if !alike.all(|alike| arena.take_several(wants[alike[0]].placement, alike.len(), &mut taken)) {
        give_all(arena, taken);
        return None;
    }
    let mut taken: Vec<_> = order.into_iter().zip(taken).collect();
    taken.sort_unstable_by_key(|(i, _)| *i);
    Some(taken.into_iter().map(|(_, descriptor)| descriptor).collect())
}

/// Whether what is free outside of windows serves all of `wants`. Takes it, and gives it back.
pub(super) fn serves_all(arena: &mut Arena, wants: &[Want]) -> bool {
    let Some(taken) = take_all(arena, wants) else { return false };
    give_all(arena, taken);
    true
}

fn give_all(arena: &mut Arena, taken: Vec<NonNull<Descriptor>>) {
    for descriptor in taken {
        // SAFETY: just taken: alive, in no list, its state still HOST, and no other thread has seen it. It is from
        // outside of all windows.
        let _ = unsafe { arena.give(descriptor) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::segment::RegionId;

    const SMALL: usize = 1000;

    /// An arena of three pages: in one of them, of three segments for `SMALL` one is out, and the others are in use.
    fn arena() -> Arena {
        let mut arena = Arena::new();
        let base = NonNull::new(std::ptr::without_provenance_mut(1 << 20)).unwrap();
        // SAFETY: the arena only does arithmetic on the address.
        unsafe { arena.add_extent(RegionId(0), base, 3 * PAGE, true) };
        let held = [(); 3].map(|()| arena.take(want(SMALL).placement).unwrap());
        arena.take(want(2 * PAGE - 32).placement).unwrap();
        // SAFETY: each is out, and returned once.
        held[..2].iter().for_each(|segment| assert!(unsafe { arena.give(*segment) }.is_none()));
        arena
    }

    /// A request of a class up to twice [`SMALL`], or else one for whole pages.
    fn want(len: usize) -> Want {
        let align = if len <= 2 * SMALL { 64 } else { PAGE };
        Want { len, placement: Placement::of(len, align).unwrap() }
    }

    #[test]
    fn a_window_is_as_long_as_what_it_is_for() {
        assert_eq!(window_pages(&[want(SMALL)]), (1, 1));
        let aligned = Want { len: PAGE, placement: Placement::Pages { span: 3 * PAGE, align: 8 } };
        assert_eq!(window_pages(&[aligned]), (3, 8));
        assert_eq!(window_pages(&[aligned, want(SMALL), want(SMALL)]), (3 + 7 + 1, 1));
    }

    #[test]
    fn what_a_window_has_serves_what_it_is_for() {
        let mut seed = 1u64;
        let mut below = |n: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % n
        };
        for _ in 0..3000 {
            let mut wants = Vec::new();
            for _ in 0..1 + below(8) {
                let most = [300, 5000, 100_000, 400_000][below(4)];
                let align = if below(3) == 0 { 64 << below(9) } else { 64 };
                let len = 1 + below(most);
                let want = Want { len, placement: Placement::of(len, align).unwrap() };
                let alike = if below(3) == 0 { 1 + below(70) } else { 1 };
                wants.extend(vec![want; alike]);
            }
            let (pages, align) = window_pages(&wants);
            let (mut arena, first) = (Arena::new(), (1 + below(4)) * align);
            let base = NonNull::new(std::ptr::without_provenance_mut((4096 + first) * PAGE)).unwrap();
            // SAFETY: the arena only does arithmetic on the address.
            unsafe { arena.add_extent(RegionId(0), base, pages * PAGE, true) };
            assert!(serves_all(&mut arena, &wants), "{wants:?}");
            let taken = take_all(&mut arena, &wants).unwrap_or_else(|| panic!("{pages} pages: {wants:?}"));
            // SAFETY: out, so alive.
            let fits = |(one, want): (&_, &Want)| unsafe { arena.granted(*one) } >= want.len;
            assert!(taken.iter().zip(&wants).all(fits));
        }
    }

    #[test]
    fn all_or_nothing() {
        let mut arena = arena();
        let several =
            |small: usize, pages: usize| [vec![want(SMALL); small], vec![want(PAGE - 32); pages]].concat();
        let before = arena.bytes();
        for wants in [several(3, 0), several(1, 1)] {
            assert!(!serves_all(&mut arena, &wants) && take_all(&mut arena, &wants).is_none());
        }
        assert!(serves_all(&mut arena, &several(2, 0)));
        assert_eq!(arena.bytes(), before);
        assert_eq!(take_all(&mut arena, &several(2, 0)).map(|taken| taken.len()), Some(2));
    }
}
