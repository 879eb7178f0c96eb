//! The queue: the requests that wait for memory, and which of them is next.
//!
//! First come, first served, among the requests that free memory can serve. Others have a right to
//! their *window* alone ([`crate::arena`], `windows`): what is free elsewhere serves everybody.
//!
//! Requests of one size class wait for the same segments: they are served strictly in order, and
//! the first of them has the window. A request for whole pages or several buffers has a window of
//! its own as long as there is memory outside of all windows. Several buffers are granted together
//! or not at all.
//!
//! A tree finds waiters by their tickets, another those of a size. So a join, a grant and a leave
//! take logarithmic time, and a return that serves no waiter looks at the sizes that are waited
//! for, not at the waiters. The queue only decides. The central pool's core has it, under its lock;
//! [`super::waiting`] says how many may wait, and when a wait's time is over.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ptr::NonNull;
use std::time::Instant;

use super::Fresh;
use crate::arena::{Arena, ClassSet, PageRange, set_of};
use crate::error::Result;
use crate::foreign::Task;
use crate::freelist::Descriptor;
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

/// The bytes that segments for these wants take. It saturates: many requests together can ask for
/// more bytes than there are addresses.
pub(super) fn bytes(wants: &[Want]) -> usize {
    super::sum(wants.iter().map(|want| want.placement.bytes()))
}

/// How a waiter is woken. A task's waker runs after the locks that this thread holds.
#[derive(Debug)]
pub(crate) enum Wake {
    Thread(Thread),
    Task(Task),
}

impl Wake {
    pub(crate) fn wake(self) {
        match self {
            Self::Thread(thread) => thread.unpark(),
            Self::Task(task) => task.wake(),
        }
    }
}

/// What a waiter needs. Waiters of one size are served in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Size {
    Class(Class),
    /// The pages that a single buffer needs, and their alignment.
    Pages(u32, usize),
    /// Several buffers: a hash of their sorted placements.
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
    pub(super) wake: Wake,
    /// Idle regions were replaced for it.
    pub(super) replaced: bool,
    /// How often it gave up a window, and which ranges.
    pub(super) moves: u32,
    pub(super) given_up: Vec<PageRange>,
    pub(super) since: Instant,
}

/// See the head of this module.
#[derive(Debug, Default)]
pub(super) struct WaitQueue {
    /// The requests that wait.
    pub(super) waiting: BTreeMap<Ticket, Waiter>,
    /// The tickets of waiting requests, by size. No set is empty.
    pub(super) sizes: BTreeMap<Size, BTreeSet<Ticket>>,
    /// The outcomes of requests that wait no more, until their owners look.
    pub(super) ended: BTreeMap<Ticket, Result<Vec<Fresh>>>,
    /// The number of waiters so far, which is the next one's ticket.
    pub(super) joined: Ticket,
    /// How long each wait took, from joining to a grant, an error, or leaving.
    pub(super) waited: Histogram,
}

impl WaitQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The classes that have a request for one segment waiting.
    pub(super) fn awaited(&self) -> ClassSet {
        let classes = self.sizes.keys().map_while(|size| match size {
            Size::Class(class) => Some(*class),
            _ => None,
        });
        classes.fold(0, |set, class| set | set_of(class))
    }

    /// Adds a waiter at the end.
    pub(super) fn join(&mut self, wants: Vec<Want>, wake: Wake) -> Ticket {
        let (ticket, size, since) = (self.joined, Size::of(&wants), Instant::now());
        self.joined += 1;
        let waiter = Waiter { wants, size, wake, replaced: false, moves: 0, given_up: Vec::new(), since };
        self.waiting.insert(ticket, waiter);
        self.sizes.entry(size).or_default().insert(ticket);
        ticket
    }

    /// The first waiter of a size.
    pub(super) fn first(&self, size: Size) -> Option<Ticket> {
        self.sizes.get(&size)?.first().copied()
    }

    /// The first waiter of each size.
    pub(super) fn firsts(&self) -> impl Iterator<Item = Ticket> + '_ {
        self.sizes.values().filter_map(|tickets| tickets.first().copied())
    }

    /// What a waiter asks for.
    pub(super) fn wants(&self, ticket: Ticket) -> &[Want] {
        &self.waiting[&ticket].wants
    }

    /// The waiter that came first.
    pub(super) fn head(&self) -> Option<Ticket> {
        self.waiting.keys().next().copied()
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

    /// The first waiter, from a ticket on, that what is free outside of windows can probably serve
    /// and that leads the waiters of its size.
    pub(super) fn next(&self, arena: &Arena, from: Ticket) -> Option<Ticket> {
        let largest = u32::try_from(arena.largest_free_pages()).unwrap_or(u32::MAX);
        let short = self.sizes.range(..=Size::Pages(largest, usize::MAX));
        let leaders =
            short.chain(self.sizes.range(Size::Several(0)..)).filter_map(|(_, t)| t.first().copied());
        let able = |ticket: &Ticket| self.wants(*ticket).iter().all(|want| arena.could_take(want.placement));
        leaders.filter(|ticket| *ticket >= from).filter(able).min()
    }
}

/// The pages that a window for these wants must have, and the alignment of the first. For several
/// buffers that is what [`take_all`] takes, and the pages that alignments may cost.
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

/// Takes a segment for each of `wants`, or none at all. The longest come first, and no run is cut
/// that is longer than several need. (It would take pages that another of them needs.)
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
    for alike in order.chunk_by(|a, b| wants[*a].placement == wants[*b].placement) {
        for (at, i) in alike.iter().enumerate() {
            let Some(one) = arena.take_one_of(wants[*i].placement, alike.len() - at) else {
                give_all(arena, taken.into_iter().map(|(_, one)| one));
                return None;
            };
            taken.push((*i, one));
        }
    }
    taken.sort_unstable_by_key(|(i, _)| *i);
    Some(taken.into_iter().map(|(_, one)| one).collect())
}

/// Gives back what [`take_all`] took and nobody has seen.
pub(super) fn give_all(arena: &mut Arena, taken: impl Iterator<Item = NonNull<Descriptor>>) {
    for descriptor in taken {
        // SAFETY: just taken from outside of all windows: alive, in no list, its state still HOST,
        // and no other thread has seen it.
        let _ = unsafe { arena.give(descriptor) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::segment::RegionId;

    /// A window is as long as what it is for needs, however that is aligned and mixed.
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
            let taken = take_all(&mut arena, &wants).unwrap_or_else(|| panic!("{pages} pages: {wants:?}"));
            // SAFETY: out, so alive.
            let fits = |(one, want): (&_, &Want)| unsafe { arena.granted(*one) } >= want.len;
            assert!(taken.iter().zip(&wants).all(fits));
        }
    }
}
