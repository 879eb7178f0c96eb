//! Thread caches: a few free segments of each class that one thread takes and returns by plain loads and stores.
//!
//! # How a hit costs no atomic read-modify-write
//!
//! A thread cache belongs to the pool and is leased to one thread at a time. That thread, the *owner*, is nearly always
//! the only one to touch it, so nearly always a lock would protect against nobody. Yet the pool must be able to take
//! back what an idle thread caches, to close, and to send everyone to the queue when somebody waits. So the thread
//! cache has a lock whose whole price is on the other side:
//!
//! ```text
//!   owner (each checkout and return)          the cold side (rare; one at a time, under the central pool's lock)
//!   busy = 1                                  mode |= bits; of every thread cache: pass = nobody's
//!   light fence (the compiler only)           heavy fence (membarrier: a full fence on every running thread)
//!   if pass != my pool { busy = 0; take the   wait until every busy == 0
//!                  slow path }                work on the thread caches' lists
//!   work on the thread cache's lists                 mode &= !bits; if mode == 0, of every thread cache: pass = the pool (release)
//!   busy = 0                (release)
//! ```
//!
//! Either the owner's load of `permit` comes after the heavy fence and finds it taken away, and the owner keeps out; or
//! it came before, and then its `busy = 1` is visible to the cold side, which waits. `permit` is in the thread cache,
//! and it is the pool's address: one comparison says both that this thread's thread cache is one of this pool and that
//! nobody keeps it out. [`crate::sync`] has the fence and its three modes; without `membarrier` the bit
//! [`mode::FENCED`] is always set, so no thread cache ever has its pass, and owners come in through [`Gate::enter`],
//! where they pay for a real fence. A gate whose `membarrier` is refused later gets that bit then, for good
//! ([`Gate::quiesce`] and [`Gate::revoke`] see to it).
//!
//! # What a hit writes
//!
//! A list is a stack in an array, and its height is the difference of two counters: how many segments ever came, and
//! how many ever went. A checkout writes only the second and a return only the first. A word that both wrote would be
//! changed twice by each pair, and the processor has to wait each time until what it has just stored can be loaded
//! again: two such waits are what two atomic increments cost. The counters serve the statistics, too.
//!
//! The owner's last access to a thread cache is `busy = 0`: a pool that is being freed waits for it.
//!
//! # Some thread caches, or all
//!
//! Whoever is kept out takes the slow path for once, and whose list is emptied misses once more. So where a few thread
//! caches will do, only these lose their pass ([`Gate::revoke`]), the mode stays as it is, and the owners of the others
//! go on. Which owners are idle anyway, the [`CacheTable`] finds out by comparing what each has counted with what it
//! had when it was last looked at.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use super::descriptor::{Chain, Descriptor};
use super::transfer::{BATCH, TransferCache};
use super::{CacheTable, LISTS, list_of, listed};
use crate::segment::Class;
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering, light, yield_now};

/// Why the owners of thread caches are kept out.
pub(crate) mod mode {
    /// The pool is closed: every return is slow, and the last one frees the central pool.
    pub(crate) const CLOSED: u32 = 1;
    /// Somebody waits for memory: all of it goes through the queue.
    pub(crate) const WAITING: u32 = 2;
    /// Somebody is looking into the thread caches just now.
    pub(crate) const INSPECT: u32 = 4;
    /// No asymmetric fence here: owners fence for themselves. Alone it keeps nobody out.
    pub(crate) const FENCED: u32 = 8;
}

/// One class's list in a thread cache.
///
/// The fields are atomics so that a snapshot may read them at any time; only who holds the thread cache writes them, by
/// a load and a store, both relaxed.
///
/// # Invariant
/// `came - went`, the segments in the list, is at most `limit`; so many places of the stack, from the second on, have
/// descriptors that are alive. (From the second on, because the topmost is then found without a subtraction.) The stack
/// has at least `limit + 1` places.
#[derive(Debug)]
#[repr(align(32))]
struct ClassList {
    stack: AtomicPtr<AtomicPtr<Descriptor>>,
    /// Segments returned and filled in since the thread cache was made.
    came: AtomicU64,
    /// Segments taken and drained since.
    went: AtomicU64,
    /// How many segments the list may hold. 0 until the central pool has granted room for this class.
    limit: AtomicU64,
}

/// What a hit does not need of a list.
#[derive(Debug)]
struct ClassCounts {
    /// Of those that came, those that were filled in; of those that went, those that were drained.
    filled: AtomicU64,
    drained: AtomicU64,
    /// Places that the stack has.
    places: AtomicU64,
}

/// What `fetch_add` would do, where nobody else writes (wrapping).
#[inline(always)]
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

/// The same for what was filled and drained, after it was counted as come and gone. Release: pairs with the acquire in
/// `ThreadCache::count`.
fn note(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Release);
}

/// How often counters that change while they are read are read again. (Not in models, where each read is a step.)
const COUNT_READS: usize = if cfg!(loom) { 0 } else { 8 };

/// A thread cache. Its own cache lines: nobody else writes there while its owner works.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct ThreadCache {
    /// The gate that its owner may pass just now, if any.
    permit: AtomicPtr<Gate>,
    busy: AtomicU32,
    /// Spreads threads over the slots of a transfer cache.
    number: u32,
    /// Sums of the requested lengths taken and returned here (wrapping). Two, because a sum that each hit changed twice
    /// would make the second change wait for the first.
    requested: AtomicU64,
    returned: AtomicU64,
    /// The last one is for what has no list: its limit is 0.
    class_lists: [ClassList; LISTS + 1],
    class_counts: [ClassCounts; LISTS],
    /// The gate that the thread cache belongs to; only compared.
    home: *const Gate,
    /// The owner has found the gate's [`mode::FENCED`] and has fenced: what sees this sees all that it did before, and
    /// its next way in is by a fence, too.
    knows_fenced: AtomicU32,
    /// Written, in models, by whoever works on the lists: loom fails the model where two are not ordered.
    #[cfg(all(test, loom))]
    exclusive: crate::sync::UnsafeCell<()>,
}

// SAFETY: `home` is not dereferenced, and the stacks' descriptors are Sync and belong to who holds the thread cache.
unsafe impl Send for ThreadCache {}
// SAFETY: as above.
unsafe impl Sync for ThreadCache {}

/// Makes all of a thread cache but its addresses, in a constant or not.
macro_rules! blank {
    ($number:expr, $permit:expr, $home:expr, $class_lists:expr, $class_counts:expr) => {
        ThreadCache {
            permit: AtomicPtr::new($permit),
            busy: AtomicU32::new(0),
            number: $number,
            requested: AtomicU64::new(0),
            returned: AtomicU64::new(0),
            class_lists: $class_lists,
            class_counts: $class_counts,
            home: $home,
            knows_fenced: AtomicU32::new(0),
            #[cfg(all(test, loom))]
            exclusive: crate::sync::UnsafeCell::new(()),
        }
    };
}

/// What a thread has that has no thread cache: nobody passes a gate with it, which spares the hit a look for null.
#[cfg(not(loom))]
pub(crate) static NO_CACHE: ThreadCache = blank!(
    0,
    std::ptr::null_mut(),
    std::ptr::null(),
    [const { ClassList::new() }; LISTS + 1],
    [const { ClassCounts::new() }; LISTS]
);

impl ClassList {
    #[cfg(not(loom))]
    const fn new() -> Self {
        Self {
            stack: AtomicPtr::new(std::ptr::null_mut()),
            came: AtomicU64::new(0),
            went: AtomicU64::new(0),
            limit: AtomicU64::new(0),
        }
    }
    #[cfg(loom)]
    fn new() -> Self {
        Self {
            stack: AtomicPtr::new(std::ptr::null_mut()),
            came: AtomicU64::new(0),
            went: AtomicU64::new(0),
            limit: AtomicU64::new(0),
        }
    }

    /// Segments in the list. Wrong for a moment where the owner is at work.
    fn count(&self) -> u64 {
        let went = self.went.load(Ordering::Relaxed);
        self.came.load(Ordering::Relaxed).wrapping_sub(went)
    }

    /// The stack's place at `at`.
    ///
    /// # Safety
    /// It is at most the limit, and the caller holds the thread cache.
    #[inline(always)]
    unsafe fn place(&self, at: u64) -> &AtomicPtr<Descriptor> {
        // SAFETY: the caller's word.
        unsafe { &*self.stack.load(Ordering::Relaxed).add(at as usize) }
    }

    /// Fails, with debug assertions, where more are said to be in the list than it may hold: then two have been at it.
    #[inline(always)]
    fn check(&self, count: u64) {
        debug_assert!(count <= self.limit.load(Ordering::Relaxed), "two were at one list: {self:?}");
    }

    /// Puts a segment on top and leaves the counting to the caller. `false`: there is no room.
    #[inline(always)]
    fn push(&self, descriptor: NonNull<Descriptor>) -> bool {
        let came = self.came.load(Ordering::Relaxed);
        let count = came.wrapping_sub(self.went.load(Ordering::Relaxed));
        if count >= self.limit.load(Ordering::Relaxed) {
            self.check(count);
            return false;
        }
        // SAFETY: at most the limit, which the stack has places for.
        unsafe { self.place(count + 1) }.store(descriptor.as_ptr(), Ordering::Relaxed);
        self.came.store(came.wrapping_add(1), Ordering::Relaxed);
        true
    }

    /// Takes the segment on top.
    #[inline(always)]
    fn pop(&self) -> Option<NonNull<Descriptor>> {
        let went = self.went.load(Ordering::Relaxed);
        let count = self.came.load(Ordering::Relaxed).wrapping_sub(went);
        if count == 0 {
            return None;
        }
        self.check(count);
        // SAFETY: the topmost place that has a descriptor.
        let descriptor = unsafe { NonNull::new_unchecked(self.place(count).load(Ordering::Relaxed)) };
        self.went.store(went.wrapping_add(1), Ordering::Relaxed);
        Some(descriptor)
    }

    /// Frees the stack, whose descriptors are the caller's by now.
    ///
    /// # Safety
    /// It has so many places, and the caller holds the thread cache.
    unsafe fn free(&self, places: u64) {
        let stack = self.stack.load(Ordering::Relaxed);
        if !stack.is_null() {
            // SAFETY: leaked by `set_limit` with so many places.
            drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(stack, places as usize)) });
        }
    }
}

impl ClassCounts {
    #[cfg(not(loom))]
    const fn new() -> Self {
        Self { filled: AtomicU64::new(0), drained: AtomicU64::new(0), places: AtomicU64::new(0) }
    }
    #[cfg(loom)]
    fn new() -> Self {
        Self { filled: AtomicU64::new(0), drained: AtomicU64::new(0), places: AtomicU64::new(0) }
    }
}

impl Drop for ThreadCache {
    fn drop(&mut self) {
        for (class_list, counts) in self.class_lists.iter().zip(&self.class_counts) {
            // SAFETY: nobody else has the thread cache any more; what it cached was taken back, or goes with the arena.
            unsafe { class_list.free(counts.places.load(Ordering::Relaxed)) };
        }
    }
}

/// What a thread cache has counted for one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CacheCounts {
    pub(crate) takes: u64,
    pub(crate) puts: u64,
    pub(crate) cached: u64,
}

/// What the owner found.
#[derive(Debug)]
pub(crate) enum Put {
    Kept,
    /// The list is full; the segment was not counted.
    Full,
}

impl ThreadCache {
    pub(super) fn new(number: usize, gate: &Gate) -> Self {
        blank!(
            number as u32,
            // Relaxed: it changes under the central pool's lock, which the caller holds.
            gate.permit(gate.mode.load(Ordering::Relaxed)),
            std::ptr::from_ref(gate),
            std::array::from_fn(|_| ClassList::new()),
            std::array::from_fn(|_| ClassCounts::new())
        )
    }

    #[cfg(all(test, loom))]
    pub(crate) fn has_seen_fenced(&self) -> bool {
        self.knows_fenced.load(Ordering::Relaxed) != 0
    }

    #[inline(always)]
    fn class_list(&self, list: usize) -> &ClassList {
        debug_assert!(list <= LISTS);
        // SAFETY: lists are numbered below `LISTS`, which itself stands for none; that many cells and one there are.
        unsafe { self.class_lists.get_unchecked(list) }
    }

    /// What was counted. Exact while nobody moves. Otherwise never less than what was counted when the call began.
    ///
    /// The four counters belong together and are read one after the other. What the owner does in between would show as
    /// if so many segments were out, or back, so where that was more than one call it is read again: a reader that lost
    /// its processor in between would report nonsense.
    pub(crate) fn count(&self, class: Class) -> CacheCounts {
        let list = list_of(class);
        let (Some(class_list), Some(counts)) = (self.class_lists.get(list), self.class_counts.get(list))
        else {
            return CacheCounts::default();
        };
        // Acquire: pairs with the releases in `note`. What was filled and drained is read first, so that it is never
        // more than what came and went. The other two keep their order by it.
        let read = || {
            [&counts.filled, &counts.drained, &class_list.came, &class_list.went]
                .map(|n| n.load(Ordering::Acquire))
        };
        let mut seen = read();
        for _ in 0..COUNT_READS {
            let again = read();
            if again[..2] == seen[..2] && again[2].wrapping_sub(seen[2]) <= 1 {
                break;
            }
            seen = again;
        }
        let [filled, drained, came, went] = seen;
        CacheCounts {
            takes: went.wrapping_sub(drained),
            puts: came.wrapping_sub(filled),
            cached: came.wrapping_sub(went),
        }
    }

    /// Numbers of which each take and each return changes one.
    pub(super) fn tally(&self) -> (u64, u64) {
        // Relaxed: compared with what they are another time.
        (self.requested.load(Ordering::Relaxed), self.returned.load(Ordering::Relaxed))
    }

    /// Whether anything is in its lists. Exact while nobody moves.
    pub(crate) fn any_cached(&self) -> bool {
        self.class_lists.iter().any(|class_list| class_list.count() > 0)
    }

    /// Segments in a class's list. Exact while nobody moves.
    pub(crate) fn cached(&self, class: Class) -> u64 {
        // More than there are, if the owner is at work in between.
        self.class_lists
            .get(list_of(class))
            .map_or(0, |class_list| class_list.count().min(class_list.limit.load(Ordering::Relaxed)))
    }

    /// Requested lengths taken less returned here; meaningful only in the sum over all thread caches (wrapping).
    pub(crate) fn requested(&self) -> u64 {
        self.requested.load(Ordering::Relaxed).wrapping_sub(self.returned.load(Ordering::Relaxed))
    }
}

/// Access to a thread cache's lists: its owner's inside the gate, or the cold side's that found it quiet.
#[derive(Debug)]
pub(crate) struct HeldCache<'a> {
    cache: &'a ThreadCache,
}

impl<'a> HeldCache<'a> {
    /// For the cold side that has found it quiet, and for its owner outside of the gate.
    pub(super) fn of(cache: &'a ThreadCache) -> Self {
        Self { cache }
    }
}

/// The owner's access, from the gate on.
#[derive(Debug)]
pub(crate) struct EnteredCache<'a>(HeldCache<'a>);

impl<'a> Deref for EnteredCache<'a> {
    type Target = HeldCache<'a>;
    #[inline(always)]
    fn deref(&self) -> &HeldCache<'a> {
        &self.0
    }
}

impl DerefMut for EnteredCache<'_> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl Drop for EnteredCache<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // Release: pairs with the acquire in `Gate::quiesce`, which then sees the lists as we left them.
        self.0.cache.busy.store(0, Ordering::Release);
    }
}

impl HeldCache<'_> {
    /// The list, to be worked on.
    #[inline(always)]
    fn class_list(&self, list: usize) -> &ClassList {
        #[cfg(all(test, loom))]
        self.cache.exclusive.with_mut(|_| ());
        self.cache.class_list(list)
    }

    /// The same with what is beside it, unless that stands for no list.
    fn both(&self, class: Class) -> Option<(&ClassList, &ClassCounts)> {
        let list = list_of(class);
        self.cache.class_counts.get(list).map(|counts| (self.class_list(list), counts))
    }

    /// Takes a segment, counted as checked out.
    #[inline(always)]
    pub(crate) fn take(&mut self, class: Class, requested: usize) -> Option<NonNull<Descriptor>> {
        let descriptor = self.class_list(list_of(class)).pop()?;
        // SAFETY: what was in the list is alive.
        unsafe { descriptor.as_ref() }.taken();
        add(&self.cache.requested, requested as u64);
        Some(descriptor)
    }

    /// Returns a segment, unless the list is full.
    ///
    /// # Safety
    /// The descriptor is alive, out, and in no list; it is the caller's to give, and `list` is its list.
    #[inline(always)]
    pub(crate) unsafe fn put(
        &mut self,
        descriptor: NonNull<Descriptor>,
        requested: usize,
        list: usize,
    ) -> Put {
        if !self.class_list(list).push(descriptor) {
            return Put::Full;
        }
        // SAFETY: alive by the caller's word, and nobody else takes it from the list before we leave.
        unsafe { descriptor.as_ref() }.returned();
        add(&self.cache.returned, requested as u64);
        Put::Kept
    }

    /// How many segments of this class the thread cache may hold.
    pub(crate) fn limit(&self, class: Class) -> u32 {
        self.cache.class_list(list_of(class)).limit.load(Ordering::Relaxed) as u32
    }

    /// Changes how many segments of this class the thread cache may hold; not to fewer than it does.
    pub(crate) fn set_limit(&mut self, class: Class, limit: u32) {
        let Some((class_list, counts)) = self.both(class) else { return };
        let (limit, places) = (u64::from(limit), counts.places.load(Ordering::Relaxed));
        if limit >= places {
            let count = class_list.count();
            let descriptor = |at| match (1..=count).contains(&at) {
                // SAFETY: one of those that have descriptors.
                true => unsafe { class_list.place(at) }.load(Ordering::Relaxed),
                false => std::ptr::null_mut(),
            };
            let stack: Box<[AtomicPtr<Descriptor>]> =
                (0..=limit).map(|at| AtomicPtr::new(descriptor(at))).collect();
            // SAFETY: ours, and what it held was copied.
            unsafe { class_list.free(places) };
            class_list.stack.store(Box::into_raw(stack).cast(), Ordering::Relaxed);
            counts.places.store(limit + 1, Ordering::Relaxed);
        }
        class_list.limit.store(limit.max(class_list.count()), Ordering::Relaxed);
    }

    /// Whether this thread cache has a list for the class at all.
    pub(crate) fn has(&self, class: Class) -> bool {
        list_of(class) < LISTS
    }

    /// Adds a chain to the list without counting it as returned. What there is no room for comes back.
    #[must_use = "dropping a chain loses its segments"]
    pub(crate) fn fill(&mut self, class: Class, mut chain: Chain) -> Chain {
        let Some((class_list, counts)) = self.both(class) else { return chain };
        while let Some(descriptor) = chain.pop() {
            if !class_list.push(descriptor) {
                // SAFETY: just popped.
                unsafe { chain.push(descriptor) };
                break;
            }
            note(&counts.filled, 1);
        }
        chain
    }

    /// Takes up to `count` segments off the list without counting them as checked out.
    pub(crate) fn drain(&mut self, class: Class, count: u32) -> Chain {
        let mut chain = Chain::new();
        let Some((class_list, counts)) = self.both(class) else { return chain };
        while chain.len() < count {
            let Some(descriptor) = class_list.pop() else { break };
            note(&counts.drained, 1);
            // SAFETY: what was in the list is alive, free, and by now in no list.
            unsafe { chain.push(descriptor) };
        }
        chain
    }

    /// Leaves up to `count` segments, and no more than [`BATCH`], on a transfer cache; which half of the list it is
    /// makes no difference to who takes them. How many; 0: the transfer cache is full, the list empty, or `reserve`
    /// refuses them.
    pub(crate) fn offload(
        &mut self,
        class: Class,
        count: u32,
        transfer: &TransferCache,
        reserve: impl FnOnce(u32) -> bool,
    ) -> u32 {
        let Some((class_list, counts)) = self.both(class) else { return 0 };
        let (have, count) = (class_list.count(), u64::from(count).min(BATCH as u64));
        let from = have.saturating_sub(count);
        // SAFETY: those that have descriptors.
        let batch = (from as usize..have as usize).map(|at| unsafe { class_list.place(at as u64 + 1) });
        let batch = batch.map(|place| place.load(Ordering::Relaxed));
        if have == 0 || !transfer.put(self.cache.number as usize, batch, reserve) {
            return 0;
        }
        add(&class_list.went, have - from);
        note(&counts.drained, have - from);
        (have - from) as u32
    }

    /// Takes a batch off a transfer cache into the list, all of it at once. How many; 0: there was none. What there is
    /// no room for comes with it.
    pub(crate) fn take_batch(&mut self, class: Class, transfer: &TransferCache) -> (u32, Chain) {
        let mut rest = Chain::new();
        let Some((class_list, counts)) = self.both(class) else { return (0, rest) };
        let count = transfer.take(self.cache.number as usize, |batch| {
            let have = class_list.count();
            let room = class_list.limit.load(Ordering::Relaxed).saturating_sub(have) as usize;
            let (fits, over) = batch.split_at(room.min(batch.len()));
            for (at, descriptor) in (have + 1..).zip(fits) {
                // SAFETY: at most the limit, which the stack has places for.
                unsafe { class_list.place(at) }.store(descriptor.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            add(&class_list.came, fits.len() as u64);
            note(&counts.filled, fits.len() as u64);
            for descriptor in
                over.iter().filter_map(|descriptor| NonNull::new(descriptor.load(Ordering::Relaxed)))
            {
                // SAFETY: it hung in the transfer cache, so it is alive and free, and by now in no list.
                unsafe { rest.push(descriptor) };
            }
        });
        (count, rest)
    }

    /// Everything that the thread cache caches.
    pub(crate) fn drain_all(&mut self, mut sink: impl FnMut(Class, Chain)) {
        for class in listed() {
            let chain = self.drain(class, u32::MAX);
            if !chain.is_empty() {
                sink(class, chain);
            }
        }
    }

    /// Visits the descriptors of one list. For `check()`.
    pub(crate) fn for_each(&self, class: Class, mut visit: impl FnMut(&Descriptor)) {
        let class_list = self.class_list(list_of(class));
        for at in 1..=class_list.count() {
            // SAFETY: one of those that have descriptors, which are alive.
            visit(unsafe { &*class_list.place(at).load(Ordering::Relaxed) });
        }
    }
}

/// The pool's mode word, and the way into its thread caches.
///
/// It stays where it is as long as it has thread caches, which know it by its address.
#[derive(Debug)]
pub(crate) struct Gate {
    mode: AtomicU32,
}

impl Gate {
    pub(crate) fn new(asymmetric: bool) -> Self {
        Self { mode: AtomicU32::new(if asymmetric { 0 } else { mode::FENCED }) }
    }

    /// The bits that are set, less [`mode::FENCED`].
    pub(crate) fn mode(&self) -> u32 {
        // Acquire: pairs with the read-modify-writes of who sets and clears bits. What is decided by it outside of the
        // lock is looked at again inside.
        self.mode.load(Ordering::Acquire) & !mode::FENCED
    }

    /// What thread caches have as their pass in this mode.
    fn permit(&self, mode: u32) -> *mut Self {
        if mode == 0 { std::ptr::from_ref(self).cast_mut() } else { std::ptr::null_mut() }
    }

    /// The way in for the thread that owns the thread cache, be it one of this pool or of another. `None`: it is of
    /// another, its owner is kept out just now, or has to come by [`Gate::enter`].
    #[inline(always)]
    pub(crate) fn enter_by_permit<'a>(&self, cache: &'a ThreadCache) -> Option<EnteredCache<'a>> {
        // Pairs with the load in `quiesce`.
        cache.busy.store(1, Ordering::Relaxed);
        light();
        // Its drop is the way out, whether we get in or not.
        let inside = EnteredCache(HeldCache { cache });
        // Acquire: pairs with the release in `readmit`, so that we see the lists as the cold side left them.
        if std::ptr::eq(cache.permit.load(Ordering::Acquire), self) { Some(inside) } else { None }
    }

    /// The same, also where owners fence for themselves.
    #[inline(never)]
    pub(crate) fn enter<'a>(&self, cache: &'a ThreadCache) -> Option<EnteredCache<'a>> {
        // Relaxed: once it is set it stays. An owner that does not see it yet finds no pass, or is waited for in
        // `go_over_to_fences`.
        if self.mode.load(Ordering::Relaxed) & mode::FENCED == 0 {
            return self.enter_by_permit(cache);
        }
        if !std::ptr::eq(cache.home, self) {
            return None;
        }
        // Pairs with the load in `quiesce`.
        cache.busy.store(1, Ordering::Relaxed);
        let inside = EnteredCache(HeldCache { cache });
        #[cfg(pinpool_rmw)]
        // A read-modify-write instead of a fence, for tools that do not model fences: it either follows the cold side's
        // own in the word's order and sees its bits, or precedes it, and then (release, acquire) the cold side sees
        // busy = 1.
        let seen = self.mode.fetch_add(0, Ordering::AcqRel);
        #[cfg(not(pinpool_rmw))]
        let seen = {
            // Store busy, fence, load mode: pairs with store mode, fence, load busy in `quiesce` and `revoke`.
            #[cfg(not(pinpool_planted = "fallback_no_fence"))]
            crate::sync::fence(Ordering::SeqCst);
            // Acquire: pairs with the releases in `readmit` and `revoke`, so that we see the lists as the cold side
            // left them.
            self.mode.load(Ordering::Acquire)
        };
        // Looked at first: nearly always it is set.
        if cache.knows_fenced.load(Ordering::Relaxed) == 0 {
            // Release: pairs with the acquire in `go_over_to_fences`.
            cache.knows_fenced.store(1, Ordering::Release);
        }
        if seen == mode::FENCED { Some(inside) } else { None }
    }

    /// Sets `bits` and waits until no owner is inside. The caller holds the central pool's lock, and until
    /// [`Gate::readmit`] has cleared every keeping-out bit, owners stay out and the cold side may hold the thread
    /// caches.
    pub(crate) fn quiesce(&self, bits: u32, table: &CacheTable) {
        // AcqRel: see `enter` under `pinpool_rmw`; elsewhere the fence orders it.
        self.mode.fetch_or(bits, Ordering::AcqRel);
        self.revoke_and_wait(table.caches(), bits, table);
    }

    /// Clears `bits`, and lets owners in again if they were the last. The caller holds the central pool's lock.
    pub(crate) fn readmit(&self, bits: u32, table: &CacheTable) {
        // Release: pairs with the acquire of who looks at the mode.
        let left = self.mode.fetch_and(!bits, Ordering::Release) & !bits;
        self.restore_permits(left, table.caches());
    }

    /// Works on some thread caches while the owners of all others go on. The caller holds the central pool's lock.
    ///
    /// Where owners fence for themselves, they look at the mode, which is one for all: then all are kept out.
    pub(crate) fn revoke(
        &self,
        caches: &[Arc<ThreadCache>],
        table: &CacheTable,
        mut work: impl FnMut(HeldCache<'_>),
    ) {
        // Relaxed: set under the lock alone, for good.
        let fenced = self.mode.load(Ordering::Relaxed) & mode::FENCED != 0
            && !cfg!(pinpool_planted = "hush_by_pass_alone");
        if fenced {
            // AcqRel: as in `quiesce`.
            self.mode.fetch_or(mode::INSPECT, Ordering::AcqRel);
        }
        let fenced = self.revoke_and_wait(caches.iter(), mode::INSPECT, table) || fenced;
        caches.iter().for_each(|cache| work(HeldCache { cache }));
        let left = if fenced {
            // Release: as in `readmit`.
            self.mode.fetch_and(!mode::INSPECT, Ordering::Release) & !mode::INSPECT
        } else {
            // Relaxed: changes under the lock alone.
            self.mode.load(Ordering::Relaxed)
        };
        self.restore_permits(left, caches.iter());
    }

    /// Takes these thread caches' passes away, and waits until none of their owners is inside. Where there is a mode to
    /// be set, it is set before. Whether owners fence for themselves only from here on: then `bits` were set, too.
    fn revoke_and_wait<'a>(
        &self,
        caches: impl Iterator<Item = &'a Arc<ThreadCache>> + Clone,
        bits: u32,
        table: &CacheTable,
    ) -> bool {
        // Relaxed: before the fence, which pairs with `light` in `enter_by_permit`.
        caches.clone().for_each(|cache| cache.permit.store(std::ptr::null_mut(), Ordering::Relaxed));
        // Relaxed: set under the lock alone, for good.
        let fenced = self.mode.load(Ordering::Relaxed) & mode::FENCED != 0;
        let refused = !crate::sync::heavy(fenced);
        if refused {
            self.go_over_to_fences(bits, table);
        }
        #[cfg(not(pinpool_planted = "shard_no_wait"))]
        for cache in caches {
            // Acquire: pairs with the release when the owner leaves.
            while cache.busy.load(Ordering::Acquire) != 0 {
                yield_now();
            }
        }
        refused
    }

    /// Has all owners fence for themselves, for good: the barrier is refused. Returns when each owner is known to have
    /// seen that; where that cannot be had, the process ends. (`crate::sync` says how it is known.)
    #[cold]
    fn go_over_to_fences(&self, bits: u32, table: &CacheTable) {
        // Before the mode, which releases it: an owner that sees that mode finds no pass.
        table.caches().for_each(|cache| cache.permit.store(std::ptr::null_mut(), Ordering::Relaxed));
        // AcqRel: as in `quiesce`.
        self.mode.fetch_or(mode::FENCED | bits, Ordering::AcqRel);
        crate::sync::fence(Ordering::SeqCst);
        #[cfg(not(pinpool_planted = "refused_unproven"))]
        for (cache, owner) in table.leases() {
            let since = (!cfg!(loom)).then(Instant::now);
            // Acquire: pairs with the release in `enter`.
            while cache.knows_fenced.load(Ordering::Acquire) == 0 && !crate::sync::is_known(owner) {
                if since.is_some_and(|since| since.elapsed() > crate::sync::PROOF_TIMEOUT) {
                    crate::os::barrier::die(
                        "the system call membarrier is refused, which was granted when the pool was built, and a thread that \
                         uses the pool cannot be seen to have let go of its cache: a second owner of its buffers cannot be \
                         ruled out. Put up the sandbox before the first pool is built, or let it grant membarrier.",
                    );
                }
                crate::sync::pause();
            }
        }
        crate::foreign::warn!(
            target: "pinpool::pool::membarrier",
            "membarrier is refused, which was granted when the pool was built: checkouts fence for themselves from here on, and \
             are slower; put up sandboxes before the first pool is built, or let them grant membarrier"
        );
    }

    /// Gives them their passes again, if the mode has it.
    fn restore_permits<'a>(&self, mode: u32, caches: impl Iterator<Item = &'a Arc<ThreadCache>>) {
        if mode == 0 {
            // Release: pairs with the acquire in `enter_by_permit`.
            caches.for_each(|cache| cache.permit.store(self.permit(0), Ordering::Release));
        }
    }

    /// Sets bits without keeping anyone out.
    pub(crate) fn force(&self, bits: u32) {
        // AcqRel: as in `quiesce`.
        self.mode.fetch_or(bits, Ordering::AcqRel);
    }
}
