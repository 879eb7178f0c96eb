//! The queue: the requests that wait for memory, and which of them is next.
//!
//! First come, first served, among those that what is free can serve. A request that cannot be served has a right to
//! its *window* alone ([`crate::arena`], `windows`): what is free elsewhere serves everybody, later requests included.
//! So a small request does not wait for the memory that a large one waits for, nor the other way round, and no request
//! waits for a byte outside of its own window that any other request could have.
//!
//! Requests of one size class wait for the same segments, so they are served strictly in order. The first of them has a
//! window; the others come after it. Each request for whole pages, and each request for several buffers, has a window of
//! its own as long as the memory outside of all windows lasts, and waits for an earlier window's end otherwise. Several
//! buffers of one request are granted together or not at all. Where no range is long enough for all of them, the request
//! has several windows.
//!
//! # Costs
//!
//! Waiters are found by their order, and by what they need: each in a tree. So a join, a grant and a leave take
//! logarithmic time, and a return that serves no waiter looks at the sizes that are waited for and not at the waiters.
//!
//! The queue only decides. It belongs to the central pool's core, under its lock, and collects the wakes that follow.
//! The guard of the lock makes them after the unlock.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Bound;
use std::ptr::NonNull;
use std::sync::Weak;
use std::time::{Duration, Instant};

use slab::Slab;

use super::CentralPool;
use super::growth::Growth;
use crate::arena::{Arena, WindowId};
use crate::error::Error;
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
    /// Chooses windows anew after this time.
    Choose(Weak<CentralPool>, Duration),
    /// Tries the head's growth again after this time.
    Retry(Weak<CentralPool>, Duration),
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
            Self::Choose(central, after) => CentralPool::choose_later(central, after),
            Self::Retry(central, after) => CentralPool::grow_later(central, after),
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

/// What a waiter needs. Waiters of one size are served in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Size {
    Class(u8),
    /// The pages that a single buffer needs, and their alignment.
    Pages(u32, usize),
    /// Several buffers: a number that requests for the same sizes share.
    Several(u64),
}

impl Size {
    fn of(wants: &[Want]) -> Self {
        match wants {
            [Want { placement: Placement::Class(class), .. }] => Self::Class(class.index() as u8),
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

#[derive(Debug)]
struct Waiter {
    wants: Vec<Want>,
    size: Size,
    /// Its place in the order.
    number: u64,
    outcome: WaitOutcome,
    wake: Option<Wake>,
    /// What is withheld for it.
    windows: Vec<WindowId>,
    /// How often its window was exchanged.
    moves: u32,
    /// Idle regions were replaced for it.
    moved: bool,
    /// Its windows are whole regions that are to be replaced.
    replaces: bool,
    since: Instant,
}

/// See the head of this module.
#[derive(Debug)]
pub(crate) struct WaitQueue {
    waiters: Slab<Waiter>,
    /// Keys of the waiters that still wait, in the order in which they joined.
    order: BTreeMap<u64, usize>,
    /// The same by size.
    sizes: BTreeSet<(Size, u64)>,
    /// Those that may choose a window and have none: not those behind another of the same class.
    unplaced: BTreeSet<u64>,
    next: u64,
    /// Waiters of lower numbers were told of as waiting for long.
    told: u64,
    /// How many requests for one segment of a class wait, by class.
    awaited: Vec<u32>,
    /// The waiter that each window is withheld for, by the window's number.
    owners: Vec<usize>,
    /// How long each wait that has ended took, with any outcome.
    waited: Histogram,
}

impl WaitQueue {
    pub(crate) fn new() -> Self {
        Self {
            waiters: Slab::new(),
            order: BTreeMap::new(),
            sizes: BTreeSet::new(),
            unplaced: BTreeSet::new(),
            next: 0,
            told: 0,
            awaited: vec![0; CLASSES],
            owners: Vec::new(),
            waited: Histogram::default(),
        }
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

    /// How many requests for one segment of a class wait.
    pub(crate) fn awaited(&self, class: Class) -> u32 {
        self.awaited[class.index()]
    }

    /// Adds a waiter at the end. Returns its key.
    pub(crate) fn join(&mut self, wants: Vec<Want>, wake: Wake) -> usize {
        let size = Size::of(&wants);
        if let Size::Class(class) = size {
            self.awaited[usize::from(class)] += 1;
        }
        let (number, since) = (self.next, Instant::now());
        self.next += 1;
        let key = self.waiters.insert(Waiter {
            wants,
            size,
            number,
            outcome: WaitOutcome::Waiting,
            wake: Some(wake),
            windows: Vec::new(),
            moves: 0,
            moved: false,
            replaces: false,
            since,
        });
        self.order.insert(number, key);
        self.sizes.insert((size, number));
        if self.chooses(size, number) {
            self.unplaced.insert(number);
        }
        key
    }

    /// Whether a waiter may have a window: of several for the same class the first.
    fn chooses(&self, size: Size, number: u64) -> bool {
        !matches!(size, Size::Class(_)) || self.first(size) == Some(number)
    }

    /// Whether a waiter is not behind another of the same class.
    pub(super) fn is_first(&self, key: usize) -> bool {
        let waiter = &self.waiters[key];
        self.chooses(waiter.size, waiter.number)
    }

    /// The first waiter of a size.
    fn first(&self, size: Size) -> Option<u64> {
        self.sizes.range((size, 0)..=(size, u64::MAX)).next().map(|found| found.1)
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

    /// The size of a waiter.
    pub(super) fn size(&self, key: usize) -> Size {
        self.waiters[key].size
    }

    /// Whether there is a waiter of this key that still waits.
    pub(super) fn keeps_waiting(&self, key: usize) -> bool {
        self.waiters.get(key).is_some_and(|waiter| self.order.get(&waiter.number) == Some(&key))
    }

    /// The key of the first waiter of a size.
    pub(super) fn first_key(&self, size: Size) -> Option<usize> {
        self.first(size).map(|number| self.order[&number])
    }

    /// What a waiter asks for.
    pub(super) fn wants(&self, key: usize) -> &[Want] {
        &self.waiters[key].wants
    }

    /// Removes a waiter. Returns its outcome, with what was granted meanwhile, and as in [`WaitQueue::look`] a wake to
    /// be dropped after the lock is released. The caller ends its windows.
    pub(crate) fn leave(&mut self, key: usize, ended: &mut Vec<WindowId>) -> (WaitOutcome, Option<Wake>) {
        if self.waits(key) {
            self.remove(key, ended);
        }
        let Waiter { outcome, wake, .. } = self.waiters.remove(key);
        (outcome, wake)
    }

    /// The head's wants, and whether idle regions were replaced for it already.
    pub(crate) fn head(&self) -> Option<(&[Want], bool)> {
        let head = &self.waiters[*self.order.values().next()?];
        Some((&head.wants, head.moved))
    }

    /// Notes that idle regions are replaced for the head.
    pub(crate) fn head_moved(&mut self) {
        if let Some(head) = self.head_key() {
            self.note_replaced(head);
        }
    }

    /// Whether idle regions may be replaced for a waiter: they were not yet.
    pub(super) fn may_replace(&self, key: usize) -> bool {
        !self.waiters[key].moved
    }

    /// Notes that idle regions are replaced for a waiter.
    pub(super) fn note_replaced(&mut self, key: usize) {
        self.waiters[key].moved = true;
    }

    /// Whether a waiter's windows are whole regions that are to be replaced.
    pub(super) fn replaces(&self, key: usize) -> bool {
        self.waiters[key].replaces
    }

    /// Notes that a waiter's windows are such regions.
    pub(super) fn set_replaces(&mut self, key: usize) {
        self.waiters[key].replaces = true;
    }

    /// The key of the waiter that came first.
    pub(super) fn head_key(&self) -> Option<usize> {
        self.order.values().next().copied()
    }

    /// The first waiter that has waited for `age` and that no earlier call has told of, if it `may` be told of: since when
    /// it waits, and what it asks for. Of those behind it that have waited for as long no later call tells, either.
    pub(super) fn waits_long(
        &mut self,
        now: Instant,
        age: Duration,
        may: impl FnOnce() -> bool,
    ) -> Option<(Instant, &[Want])> {
        let is_long = |key: usize| now.saturating_duration_since(self.waiters[key].since) >= age;
        let mut long = self.order.range(self.told..).map(|(_, key)| *key).take_while(|key| is_long(*key));
        let first = long.next().filter(|_| may())?;
        let last = long.last().unwrap_or(first);
        self.told = self.waiters[last].number + 1;
        Some((self.waiters[first].since, &self.waiters[first].wants))
    }

    /// The waiter behind a place, in the order of sizes: its key, and its place.
    pub(super) fn after(&self, place: Option<(Size, u64)>) -> Option<(usize, Size, u64)> {
        let behind = place.map_or(Bound::Unbounded, Bound::Excluded);
        let (size, number) = *self.sizes.range((behind, Bound::Unbounded)).next()?;
        Some((self.order[&number], size, number))
    }

    /// Takes a waiter that still waits out of the order.
    fn remove(&mut self, key: usize, ended: &mut Vec<WindowId>) {
        let waiter = &mut self.waiters[key];
        let (size, number) = (waiter.size, waiter.number);
        let (windows, replaces) = (std::mem::take(&mut waiter.windows), waiter.replaces);
        self.waited.record(waiter.since.elapsed());
        if let Size::Class(class) = size {
            self.awaited[usize::from(class)] -= 1;
        }
        self.order.remove(&number);
        self.unplaced.remove(&number);
        let first = self.first(size) == Some(number);
        self.sizes.remove(&(size, number));
        match (first, size, self.first(size)) {
            // The next waiter of the class inherits the window, or may choose one.
            (true, Size::Class(_), Some(next)) => {
                self.unplaced.insert(next);
                if !windows.is_empty() {
                    let next = self.order[&next];
                    self.place(next, windows);
                    self.waiters[next].replaces = replaces;
                }
            }
            _ => ended.extend(windows),
        }
    }

    /// Ends a wait. The caller ends the windows that were withheld for it.
    pub(super) fn finish(
        &mut self,
        key: usize,
        outcome: WaitOutcome,
        ended: &mut Vec<WindowId>,
        wakes: &mut Vec<Wake>,
    ) {
        self.remove(key, ended);
        let waiter = &mut self.waiters[key];
        waiter.outcome = outcome;
        wakes.extend(waiter.wake.take());
    }

    // --- windows -----------------------------------------------------------------------------------------------------

    /// The first waiters that may choose a window and have none, up to `most` of them.
    pub(super) fn unplaced(&self, most: usize) -> Vec<usize> {
        self.unplaced.iter().take(most).map(|number| self.order[number]).collect()
    }

    pub(super) fn any_unplaced(&self) -> bool {
        !self.unplaced.is_empty()
    }

    /// What is withheld for a waiter.
    pub(super) fn windows(&self, key: usize) -> &[WindowId] {
        &self.waiters[key].windows
    }

    /// How often a waiter's window was exchanged.
    pub(super) fn moves(&self, key: usize) -> u32 {
        self.waiters[key].moves
    }

    /// Notes that a waiter's window is exchanged.
    pub(super) fn moved(&mut self, key: usize) {
        self.waiters[key].moves += 1;
    }

    /// Gives a waiter windows.
    pub(super) fn place(&mut self, key: usize, windows: Vec<WindowId>) {
        for window in &windows {
            let index = window.index();
            self.owners.resize(self.owners.len().max(index + 1), usize::MAX);
            self.owners[index] = key;
        }
        let waiter = &mut self.waiters[key];
        debug_assert!(waiter.windows.is_empty());
        waiter.windows = windows;
        self.unplaced.remove(&waiter.number);
    }

    /// The waiter that a window is withheld for.
    pub(super) fn owner(&self, window: WindowId) -> usize {
        self.owners[window.index()]
    }

    /// The waiters that have a window, in their order.
    pub(super) fn owners(&self) -> Vec<usize> {
        let mut owners: Vec<usize> = self.owners.clone();
        owners.retain(|key| self.waiters.get(*key).is_some_and(|w| !w.windows.is_empty()));
        owners.sort_unstable_by_key(|key| self.waiters[*key].number);
        owners.dedup();
        owners
    }

    /// Takes a waiter's windows from it.
    pub(super) fn displace(&mut self, key: usize) -> Vec<WindowId> {
        let waiter = &mut self.waiters[key];
        waiter.replaces = false;
        self.unplaced.insert(waiter.number);
        std::mem::take(&mut waiter.windows)
    }

    // --- who is next -------------------------------------------------------------------------------------------------

    /// The first waiter that what is free outside of windows can probably serve, but for the sizes in `not`.
    pub(super) fn next(&self, arena: &Arena, not: &[Size]) -> Option<(usize, Size)> {
        let largest = arena.largest_free_pages();
        let mut best: Option<(u64, Size)> = None;
        let mut from = (Size::Class(0), 0);
        while let Some(&(size, number)) = self.sizes.range(from..).next() {
            from = (size, u64::MAX);
            let could = match size {
                Size::Class(class) => {
                    Class::new(class.into()).is_some_and(|class| arena.could_take(Placement::Class(class)))
                }
                // These come in the order of their pages.
                Size::Pages(pages, _) if pages as usize > largest => {
                    from = (Size::Several(0), 0);
                    false
                }
                Size::Pages(..) => true,
                Size::Several(_) => {
                    self.wants(self.order[&number]).iter().all(|want| arena.could_take(want.placement))
                }
            };
            if could && best.is_none_or(|best| number < best.0) && !not.contains(&size) {
                best = Some((number, size));
            }
        }
        best.map(|(number, size)| (self.order[&number], size))
    }
}

/// The pages that a window for these wants must have, and the alignment of the first. For several buffers these are the
/// pages that [`take_tightly`] takes, and those that alignments may cost.
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

/// Takes a segment for a placement. Where none is free, idle runs are dissolved first, and then runs in use are
/// shortened.
fn take_one(arena: &mut Arena, placement: Placement) -> Option<NonNull<Descriptor>> {
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
    // What is given back at once was never in use.
    let peak = arena.peak();
    let mut taken: Vec<_> = wants.iter().map_while(|want| take_one(arena, want.placement)).collect();
    if taken.len() < wants.len() {
        give_all(arena, taken);
        arena.set_peak(peak);
        let tightly = if wants.len() > 1 { take_tightly(arena, wants) } else { None };
        let Some(tightly) = tightly else {
            arena.set_peak(peak);
            return None;
        };
        taken = tightly;
    }
    Some(wants.iter().zip(taken).map(|(want, descriptor)| Grant { descriptor, len: want.len }).collect())
}

/// [`take_all`] of whatever is free: takes the longest segments first, and cuts no run that is longer than they need. (A
/// run of its class's shape takes pages that another of the wants may need, and makes two pieces of what is free.)
fn take_tightly(arena: &mut Arena, wants: &[Want]) -> Option<Vec<NonNull<Descriptor>>> {
    arena.release_idle();
    arena.shorten_runs();
    let mut taken = Vec::with_capacity(wants.len());
    for (i, count) in by_need(wants) {
        let Some(descriptor) = arena.take_tightly(wants[i].placement, count) else {
            give_all(arena, taken.into_iter().map(|(_, descriptor)| descriptor).collect());
            return None;
        };
        taken.push((i, descriptor));
    }
    taken.sort_unstable_by_key(|(i, _)| *i);
    Some(taken.into_iter().map(|(_, descriptor)| descriptor).collect())
}

/// The order in which wants are taken tightly: the index of each, and how many of the same placement are left with it.
fn by_need(wants: &[Want]) -> Vec<(usize, usize)> {
    let mut order: Vec<usize> = (0..wants.len()).collect();
    order.sort_by_key(|i| match wants[*i].placement {
        Placement::Class(class) => (Reverse(class.stride().div_ceil(PAGE)), Reverse(1), class.index()),
        Placement::Pages { span, align } => (Reverse(span.div_ceil(PAGE)), Reverse(align), CLASSES),
    });
    let alike = order.chunk_by(|a, b| wants[*a].placement == wants[*b].placement);
    alike.flat_map(|alike| alike.iter().copied().zip((1..=alike.len()).rev())).collect()
}

/// Whether what is free outside of windows serves all of `wants`.
pub(super) fn serves_all(arena: &Arena, wants: &[Want]) -> bool {
    arena.serves_all(by_need(wants).into_iter().map(|(i, count)| (wants[i].placement, count)))
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
    use crate::region::RegionId;
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
        held[..2].iter().for_each(|segment| assert!(unsafe { arena.give(*segment) }.is_none()));
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
    fn the_first_that_can_be_served_is_next() {
        let (arena, mut queue) = (arena(), WaitQueue::new());
        let next = |queue: &WaitQueue, not: &[Size]| queue.next(&arena, not).map(|next| next.0);
        let large = join(&mut queue, &[want(PAGES * PAGE - 32)]);
        assert_eq!(next(&queue, &[]), None, "a run is in use");
        let keys = [SMALL, 2 * SMALL, SMALL].map(|len| join(&mut queue, &[want(len)]));
        assert_eq!(next(&queue, &[]), Some(keys[0]));
        let size = queue.size(keys[0]);
        assert_eq!(
            next(&queue, &[size]),
            None,
            "the run in use takes all pages, so there are none for the other class"
        );
        assert_eq!((queue.awaited(Class::of(SMALL).unwrap()), queue.len()), (2, 4));
        let (mut wakes, mut ended) = (Vec::new(), Vec::new());
        queue.finish(keys[0], WaitOutcome::Granted(Vec::new()), &mut ended, &mut wakes);
        assert_eq!((wakes.len(), queue.waited().count(), next(&queue, &[])), (1, 1, Some(keys[2])));
        let (outcome, _) = queue.look(keys[0], None);
        assert!(matches!(outcome, WaitOutcome::Granted(grants) if grants.is_empty()));
        let (outcome, wake) = queue.leave(large, &mut ended);
        assert!(matches!(outcome, WaitOutcome::Waiting) && wake.is_some() && ended.is_empty());
        assert_eq!((queue.head_key(), queue.len(), queue.waited().count()), (Some(keys[1]), 2, 2));
    }

    #[test]
    fn windows_are_for_the_first_of_a_class_and_for_each_large_request() {
        let (mut arena, mut queue) = (arena(), WaitQueue::new());
        let small = [(); 3].map(|()| join(&mut queue, &[want(SMALL)]));
        let large = [(); 2].map(|()| join(&mut queue, &[want(4 * PAGE)]));
        let several = join(&mut queue, &[want(SMALL), want(SMALL)]);
        assert_eq!(queue.unplaced(9), [small[0], large[0], large[1], several]);
        assert_eq!(queue.unplaced(2), [small[0], large[0]]);
        let range = arena.choose_window(2, 1).unwrap();
        let window = arena.withhold(range, 2, 1);
        queue.place(small[0], vec![window]);
        assert_eq!(queue.unplaced(9), [large[0], large[1], several]);
        assert_eq!((queue.owner(window), queue.owners()), (small[0], vec![small[0]]));
        // The next of the class inherits the window.
        let (mut wakes, mut ended) = (Vec::new(), Vec::new());
        queue.finish(small[0], WaitOutcome::Failed(Error::Closed), &mut ended, &mut wakes);
        assert_eq!((queue.owner(window), queue.windows(small[1])), (small[1], &[window][..]));
        assert!(ended.is_empty());
        let _ = queue.leave(small[2], &mut ended);
        assert!(ended.is_empty());
        let _ = queue.leave(small[1], &mut ended);
        assert_eq!(ended, [window]);
        assert!(queue.owners().is_empty());
    }

    #[test]
    fn a_look_replaces_the_wake_of_what_waits() {
        let mut queue = WaitQueue::new();
        let key = join(&mut queue, &[want(SMALL)]);
        let other = || Some(Wake::Thread(thread::current()));
        assert!(matches!(queue.look(key, None), (WaitOutcome::Waiting, None)));
        assert!(matches!(queue.look(key, other()), (WaitOutcome::Waiting, Some(_))));
        let (mut wakes, mut ended) = (Vec::new(), Vec::new());
        queue.finish(key, WaitOutcome::Failed(Error::Closed), &mut ended, &mut wakes);
        assert_eq!((queue.waits(key), wakes.len(), queue.len()), (false, 1, 0));
        assert!(matches!(queue.look(key, other()), (WaitOutcome::Failed(Error::Closed), Some(_))));
    }

    #[test]
    fn a_window_is_as_long_as_what_it_is_for() {
        assert_eq!(window_pages(&[want(SMALL)]), (2, 1));
        let aligned = Want { len: PAGE, placement: Placement::Pages { span: 3 * PAGE, align: 8 } };
        assert_eq!(window_pages(&[aligned]), (3, 8));
        assert_eq!(window_pages(&[aligned, want(SMALL), want(SMALL)]), (3 + 7 + 3, 1));
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
            assert!(serves_all(&arena, &wants), "{wants:?}");
            let grants = take_all(&mut arena, &wants).unwrap_or_else(|| panic!("{pages} pages: {wants:?}"));
            assert!(grants.iter().zip(&wants).all(|(grant, want)| grant.len == want.len));
        }
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
