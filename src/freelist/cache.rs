//! Thread caches: free segments by size class, taken and returned by plain loads and stores.
//!
//! # How a hit costs no atomic read-modify-write
//!
//! A thread cache belongs to the pool and is leased to one thread at a time. That thread, the
//! *owner*, is nearly always alone with the cache, so an ordinary lock would cost a
//! read-modify-write for nothing. Yet the pool must be able to reclaim what an idle thread caches,
//! to close, and to send all memory through the queue while a request waits. The thread that does
//! so, the *cold side*, holds the central pool's lock. It pays for a cache's lock:
//!
//! ```text
//!   owner (each checkout and return)              cold side (rare; under the central pool's lock)
//!   busy = 1                                      of each thread cache: permit = null
//!   light fence (the compiler only)               heavy fence (membarrier: a full fence on every running thread)
//!   if permit != my pool { busy = 0; slow path }  wait until every busy == 0
//!   work on the cache's lists                     work on the caches' lists
//!   busy = 0                (release)             of each thread cache: permit = the pool (release)
//! ```
//!
//! If the owner's load of `permit` comes after the heavy fence, it finds null, and the owner stays
//! out. If it comes before, then the owner's `busy = 1` is visible to the cold side, which waits
//! for the owner to leave. The value of `permit` is the address of the pool's gate: one comparison
//! tells that the cache belongs to this pool and that the cold side does not work on it. When the
//! pool is closed, no cache gets its permit back.
//!
//! [`crate::sync`] describes the fence and its two modes. Without `membarrier` owners fence, and
//! their permits have another value ([`Gate::enter`]).
//!
//! # What a hit writes
//!
//! A list is a stack in an array. Its height is the difference of two counters: how many segments
//! ever came into the list, and how many ever went out of it. A checkout writes only the second, a
//! return only the first. A single counter would change twice in each pair, and each time the
//! processor would have to wait until the value that it has just stored can be loaded again: two
//! such waits cost as much as two atomic increments. The counters also serve the statistics.
//!
//! The owner's last access is `busy = 0`: the thread that frees the pool waits for it.
//!
//! # Revoking the permits of some thread caches, or of all
//!
//! An owner without a permit takes the slow path once, and one whose list was emptied misses once
//! more. So where a few thread caches are enough, only these lose their permits ([`Gate::revoke`]),
//! and other owners go on; [`super::CacheTable`] knows the idle ones.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use super::descriptor::{Chain, Descriptor};
use super::transfer::TransferCache;
use super::{LISTS, list_of, listed};
use crate::segment::Class;
use crate::sync::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, light, yield_now};

/// One class's list in a thread cache, in a cache line of its own. Only the cache's holder writes
/// the fields, by a load and a store, both relaxed; a snapshot reads them at any time.
///
/// # Invariant
/// `came - went`, the number of segments in the list, is at most `room`. That many places of the
/// stack, from the second on, hold descriptors that are alive. (The first stays unused: so the
/// topmost one is found without a subtraction.) The stack has `room + 1` places, or none without
/// room. `limit` is the room, or 0 if the class is closed.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct ClassList {
    stack: AtomicPtr<AtomicPtr<Descriptor>>,
    /// Segments that came into the list since the thread cache was made: returned or filled in.
    came: AtomicU64,
    /// Segments that went out of the list since then: taken or drained.
    went: AtomicU64,
    /// Number of segments up to which a hit may return one.
    limit: AtomicU64,
    /// The part of `came` that was filled in, and the part of `went` that was drained.
    filled: AtomicU64,
    drained: AtomicU64,
    /// How many segments the list may hold. 0 until the central pool has granted room.
    room: AtomicU64,
}

/// Adds to a counter that no other thread writes (wrapping): a load and a store in place of a
/// `fetch_add`. `order` is release for `filled` and `drained`, which change after `came` and
/// `went`: it pairs with the acquire in `ThreadCache::count`.
#[inline(always)]
fn add(counter: &AtomicU64, n: u64, order: Ordering) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), order);
}

/// How often counters that changed meanwhile are read again. (In models a read is a step.)
const COUNT_READS: usize = if cfg!(loom) { 0 } else { 8 };

/// A thread cache, in cache lines of its own.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct ThreadCache {
    /// First, so that the address of a list is one addition. The last list stands for segments that
    /// have no list: its limit is 0.
    class_lists: [ClassList; LISTS + 1],
    /// The permit of the cache's own gate while the owner may enter, else null.
    permit: AtomicPtr<Gate>,
    /// 1 while the owner is inside, or tries to enter.
    busy: AtomicU32,
    /// Sums of the requested lengths, in bytes, that were taken and returned here (wrapping). There
    /// are two, because the second change of a single sum would wait for the first.
    requested: AtomicU64,
    returned: AtomicU64,
    /// The gate that the thread cache belongs to. It is only compared.
    home: *const Gate,
    /// In models, each thread that works on the lists writes here: loom fails the model where two
    /// such accesses are not ordered.
    #[cfg(all(test, loom))]
    exclusive: crate::sync::UnsafeCell<()>,
}

// SAFETY: `home` is not dereferenced. The stacks' descriptors are Sync and belong to the thread
// that holds the thread cache.
unsafe impl Send for ThreadCache {}
// SAFETY: as above.
unsafe impl Sync for ThreadCache {}

/// The cache of a thread that leases none. No gate admits it: a hit need not look for null.
// SAFETY: a thread cache consists of integers and of pointers that may be null.
#[cfg(not(loom))]
pub(crate) static NO_CACHE: ThreadCache = unsafe { std::mem::MaybeUninit::zeroed().assume_init() };

impl ClassList {
    /// Number of segments in the list. Inexact while another thread works on the list.
    fn count(&self) -> u64 {
        let went = self.went.load(Ordering::Relaxed);
        self.came.load(Ordering::Relaxed).wrapping_sub(went)
    }

    /// The stack's place at `at`.
    ///
    /// # Safety
    /// `at` is at most the room, and the caller holds the thread cache.
    #[inline(always)]
    unsafe fn place(&self, at: u64) -> &AtomicPtr<Descriptor> {
        // SAFETY: by this function's contract `at` is at most the room, and the stack has `room +
        // 1` places; only the holder of the thread cache replaces the stack.
        unsafe { &*self.stack.load(Ordering::Relaxed).add(at as usize) }
    }

    /// Puts a segment on top, if the list has fewer than `most`, at most the room, which the
    /// comparison loads last. The caller counts what the segment is returned or filled in as.
    #[inline(always)]
    fn push(&self, descriptor: NonNull<Descriptor>, most: &AtomicU64) -> bool {
        let came = self.came.load(Ordering::Relaxed);
        let count = came.wrapping_sub(self.went.load(Ordering::Relaxed));
        if count >= most.load(Ordering::Relaxed) {
            return false;
        }
        // SAFETY: `count` is below the room, so this place exists; the caller holds the cache.
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
        // SAFETY: the topmost place that holds a descriptor (the invariant of `ClassList`), so not
        // null; the caller holds the thread cache.
        let descriptor = unsafe { NonNull::new_unchecked(self.place(count).load(Ordering::Relaxed)) };
        self.went.store(went.wrapping_add(1), Ordering::Relaxed);
        Some(descriptor)
    }

    /// Gives the list, which is empty, another room.
    fn set_room(&self, room: u64) {
        // SAFETY: the caller holds the thread cache, and the stack is replaced here.
        unsafe { self.free() };
        let places = if room == 0 { 0 } else { room + 1 };
        let stack: Box<[AtomicPtr<Descriptor>]> = (0..places).map(|_| AtomicPtr::default()).collect();
        self.stack.store(Box::into_raw(stack).cast(), Ordering::Relaxed);
        self.room.store(room, Ordering::Relaxed);
        self.limit.store(room, Ordering::Relaxed);
    }

    /// Frees the stack.
    ///
    /// # Safety
    /// No thread uses the list until it has got another stack.
    unsafe fn free(&self) {
        let room = self.room.load(Ordering::Relaxed) as usize;
        if room > 0 {
            let stack = std::ptr::slice_from_raw_parts_mut(self.stack.load(Ordering::Relaxed), room + 1);
            // SAFETY: `set_room` leaked this box with `room + 1` places; no thread uses it any
            // more.
            drop(unsafe { Box::from_raw(stack) });
        }
    }
}

impl Drop for ThreadCache {
    fn drop(&mut self) {
        for class_list in &self.class_lists {
            // SAFETY: no other thread has the thread cache any more. What it cached was reclaimed,
            // or is freed with the arena.
            unsafe { class_list.free() };
        }
    }
}

impl ThreadCache {
    pub(super) fn new(gate: &Gate) -> Self {
        Self {
            permit: AtomicPtr::new(gate.permit_now()),
            busy: AtomicU32::default(),
            requested: AtomicU64::default(),
            returned: AtomicU64::default(),
            class_lists: std::array::from_fn(|_| ClassList::default()),
            home: gate,
            #[cfg(all(test, loom))]
            exclusive: crate::sync::UnsafeCell::new(()),
        }
    }

    #[inline(always)]
    fn class_list(&self, list: usize) -> &ClassList {
        debug_assert!(list <= LISTS);
        // SAFETY: lists are numbered below `LISTS`, and `LISTS` itself stands for none. The array
        // has `LISTS + 1` elements.
        unsafe { self.class_lists.get_unchecked(list) }
    }

    /// The checkouts and returns that were counted for a class. Exact while no thread works on the
    /// list. Otherwise the counts are not less than they were when the call began.
    ///
    /// What the owner does between two of the four reads appears as if that many segments were out,
    /// or back. So where it made more than one call in between, the counters are read again.
    pub(crate) fn count(&self, class: Class) -> (u64, u64) {
        let list = self.class_list(list_of(class));
        // Acquire: pairs with the releases in `add`. `filled` and `drained` are read first, so that
        // they never exceed `came` and `went`. The acquires also keep `came` before `went`, so that
        // a take from this list whose return to it is counted is counted, too.
        let counters = [&list.filled, &list.drained, &list.came, &list.went];
        let read = || counters.map(|counter| counter.load(Ordering::Acquire));
        let mut seen = read();
        for _ in 0..COUNT_READS {
            let again = read();
            if again[..2] == seen[..2] && again[2].wrapping_sub(seen[2]) <= 1 {
                break;
            }
            seen = again;
        }
        let [filled, drained, came, went] = seen;
        (went.wrapping_sub(drained), came.wrapping_sub(filled))
    }

    /// Whether the thread cache is one of this gate's.
    pub(crate) fn belongs_to(&self, gate: &Gate) -> bool {
        std::ptr::eq(self.home, gate)
    }

    /// A number that differs from the numbers of most other thread caches.
    fn number(&self) -> usize {
        std::ptr::from_ref(self).addr() / size_of::<Self>()
    }

    /// Two numbers. Each take and each return changes one of them.
    pub(super) fn tally(&self) -> (u64, u64) {
        // Relaxed: the caller only compares them with their values at another time.
        (self.requested.load(Ordering::Relaxed), self.returned.load(Ordering::Relaxed))
    }

    /// Whether any list holds a segment. Exact while no thread works on the lists.
    pub(crate) fn any_cached(&self) -> bool {
        self.class_lists.iter().any(|class_list| class_list.count() > 0)
    }

    /// Number of segments in a class's list. Exact while no thread works on the list.
    pub(crate) fn cached(&self, class: Class) -> u64 {
        // While the owner works, the difference can exceed the room, hence the minimum.
        let list = self.class_list(list_of(class));
        list.count().min(list.room.load(Ordering::Relaxed))
    }

    /// Requested bytes that were taken here, less those returned here (wrapping). Only the sum over
    /// all thread caches has a meaning: a segment may be returned to another one.
    pub(crate) fn requested(&self) -> u64 {
        self.requested.load(Ordering::Relaxed).wrapping_sub(self.returned.load(Ordering::Relaxed))
    }
}

/// Access to a thread cache's lists, as the invariants in [`super`] say: for the owner inside the
/// gate or under the central pool's lock, and for the cold side after it has shut the owner out.
#[derive(Debug)]
pub(crate) struct HeldCache<'a> {
    pub(super) cache: &'a ThreadCache,
}

/// The owner's access inside the gate. Its drop is the way out.
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
        // Release: pairs with the acquire in `Gate::quiesce`, so that the cold side sees the lists
        // as the owner left them.
        self.0.cache.busy.store(0, Ordering::Release);
    }
}

impl HeldCache<'_> {
    /// The list at this index. The caller works on it.
    #[inline(always)]
    fn class_list(&self, list: usize) -> &ClassList {
        #[cfg(all(test, loom))]
        self.cache.exclusive.with_mut(|_| ());
        self.cache.class_list(list)
    }

    /// A class's list. A class that is not cached has a list without room.
    fn list(&self, class: Class) -> &ClassList {
        self.class_list(list_of(class))
    }

    /// Takes a segment and counts it as checked out.
    #[inline(always)]
    pub(crate) fn take(&mut self, class: Class, requested: usize) -> Option<NonNull<Descriptor>> {
        let descriptor = self.class_list(list_of(class)).pop()?;
        // SAFETY: a descriptor in a list is alive.
        unsafe { descriptor.as_ref() }.taken();
        add(&self.cache.requested, requested as u64, Ordering::Relaxed);
        Some(descriptor)
    }

    /// Returns a segment. `false`: the list is full; the segment is the caller's and not counted.
    ///
    /// # Safety
    /// The descriptor is alive, out, in no list, and owned by the caller. `list` is its list.
    #[inline(always)]
    pub(crate) unsafe fn put(
        &mut self,
        descriptor: NonNull<Descriptor>,
        requested: usize,
        list: usize,
    ) -> bool {
        let class_list = self.class_list(list);
        if !class_list.push(descriptor, &class_list.limit) {
            return false;
        }
        // SAFETY: alive by this function's contract, and no other thread takes it from the list
        // before the owner leaves.
        unsafe { descriptor.as_ref() }.returned();
        add(&self.cache.returned, requested as u64, Ordering::Relaxed);
        true
    }

    /// [`HeldCache::put`] for a segment of a class that may be closed.
    ///
    /// # Safety
    /// As for [`HeldCache::put`], and no request has a right to the segment.
    pub(crate) unsafe fn put_closed(
        &mut self,
        class: Class,
        descriptor: NonNull<Descriptor>,
        requested: usize,
    ) -> bool {
        let class_list = self.list(class);
        if !class_list.push(descriptor, &class_list.room) {
            return false;
        }
        // SAFETY: as in `put`.
        unsafe { descriptor.as_ref() }.returned();
        add(&self.cache.returned, requested as u64, Ordering::Relaxed);
        true
    }

    /// Sends a class's returns to the slow path. For the cold side, which shut the owner out.
    pub(crate) fn close(&mut self, class: Class) {
        self.list(class).limit.store(0, Ordering::Relaxed);
    }

    /// Reopens a class after [`HeldCache::close`].
    pub(crate) fn open(&mut self, class: Class) {
        let class_list = self.list(class);
        class_list.limit.store(class_list.room.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Number of segments of this class that the thread cache may hold.
    pub(crate) fn room(&self, class: Class) -> u32 {
        self.list(class).room.load(Ordering::Relaxed) as u32
    }

    /// The bytes for which the thread cache has room, of all classes.
    pub(crate) fn rooms(&self) -> usize {
        listed().map(|class| self.room(class) as usize * class.stride()).sum()
    }

    /// Lets the thread cache hold this many segments of a class that has a list and no room yet.
    pub(crate) fn grant(&mut self, class: Class, room: u32) {
        self.list(class).set_room(room.into());
    }

    /// Takes the room of a class away. Returns what its list held.
    pub(crate) fn revoke(&mut self, class: Class) -> Chain {
        let chain = self.drain(class, u32::MAX);
        self.list(class).set_room(0);
        chain
    }

    /// Moves a chain into the list, without counting returns. Gives back what has no room.
    #[must_use = "dropping a chain loses its segments"]
    pub(crate) fn fill(&mut self, class: Class, mut chain: Chain) -> Chain {
        let class_list = self.list(class);
        while let Some(descriptor) = chain.pop() {
            if !class_list.push(descriptor, &class_list.room) {
                // SAFETY: just popped from a chain, so alive, free and in no list.
                unsafe { chain.push(descriptor) };
                break;
            }
            add(&class_list.filled, 1, Ordering::Release);
        }
        chain
    }

    /// Takes up to `count` segments from the list, without counting them as checked out.
    pub(crate) fn drain(&mut self, class: Class, count: u32) -> Chain {
        let mut chain = Chain::new();
        let class_list = self.list(class);
        while chain.len() < count {
            let Some(descriptor) = class_list.pop() else { break };
            add(&class_list.drained, 1, Ordering::Release);
            // SAFETY: it was in the list, so it is alive and free, and now it is in no list.
            unsafe { chain.push(descriptor) };
        }
        chain
    }

    /// Moves up to `count` segments from the top of the list to a transfer cache. Returns how many:
    /// 0 if the transfer cache is full or the list is empty.
    pub(crate) fn offload(&mut self, class: Class, count: u32, transfer: &TransferCache) -> u32 {
        let class_list = self.list(class);
        let have = class_list.count() as usize;
        // SAFETY: places up to the count, which is at most the room, so each holds a descriptor.
        let at = |place: usize| unsafe {
            NonNull::new_unchecked(class_list.place(place as u64 + 1).load(Ordering::Relaxed))
        };
        let batch = (have.saturating_sub(count as usize)..have).rev().map(at);
        let moved = transfer.put(self.cache.number(), batch) as u64;
        add(&class_list.went, moved, Ordering::Relaxed);
        add(&class_list.drained, moved, Ordering::Release);
        moved as u32
    }

    /// Moves segments from a transfer cache into the list, up to half of its room.
    pub(crate) fn take_batch(&mut self, class: Class, transfer: &TransferCache) {
        let class_list = self.list(class);
        let room = class_list.room.load(Ordering::Relaxed);
        let most = room.div_ceil(2).min(room.saturating_sub(class_list.count()));
        transfer.take(self.cache.number(), most as usize, |descriptor| {
            let pushed = class_list.push(descriptor, &class_list.room);
            debug_assert!(pushed, "the list has room for as many as it asks for");
            add(&class_list.filled, 1, Ordering::Release);
        });
    }

    /// Empties all lists. `sink` gets the segments of each class as a chain.
    pub(crate) fn drain_all(&mut self, mut sink: impl FnMut(Class, Chain)) {
        for class in listed() {
            let chain = self.drain(class, u32::MAX);
            if !chain.is_empty() {
                sink(class, chain);
            }
        }
    }

    /// Visits the descriptors of one list. For `check()` and the census.
    pub(crate) fn for_each(&self, class: Class, mut visit: impl FnMut(&Descriptor)) {
        let class_list = self.class_list(list_of(class));
        for at in 1..=class_list.count() {
            // SAFETY: a place up to the count, which holds a descriptor that is alive.
            visit(unsafe { &*class_list.place(at).load(Ordering::Relaxed) });
        }
    }
}

/// The way into the thread caches of a pool.
///
/// A gate does not move as long as it has thread caches, since these know it by its address.
#[derive(Debug)]
pub(crate) struct Gate {
    /// Every return is slow from then on, and the last one frees the central pool.
    closed: AtomicBool,
    /// Owners execute a fence of their own, since there is no asymmetric one.
    is_fenced: bool,
}

impl Gate {
    pub(crate) fn new(asymmetric: bool) -> Self {
        Self { closed: AtomicBool::new(false), is_fenced: !asymmetric }
    }

    /// Whether [`Gate::close`] was called.
    pub(crate) fn is_closed(&self) -> bool {
        // Acquire: pairs with the release in `close`. A caller that decides by it outside of the
        // lock looks again inside.
        self.closed.load(Ordering::Acquire)
    }

    /// The permit of an owner that may come in: the gate's address. Where owners fence it is that
    /// of the byte behind, which is no gate's, so that only [`Gate::enter`] finds it valid.
    fn permit(&self) -> *mut Self {
        std::ptr::from_ref(self).cast_mut().wrapping_byte_add(self.is_fenced.into())
    }

    /// The permit to give a thread cache: none once the pool is closed.
    fn permit_now(&self) -> *mut Self {
        // Relaxed: it changes under the central pool's lock, which the caller holds.
        if self.closed.load(Ordering::Relaxed) { std::ptr::null_mut() } else { self.permit() }
    }

    /// The way in for the owner of a thread cache of any pool. `None`: the cache belongs to another
    /// pool, the owner is kept out now, or it has to come by [`Gate::enter`].
    #[inline(always)]
    pub(crate) fn enter_by_permit<'a>(&self, cache: &'a ThreadCache) -> Option<EnteredCache<'a>> {
        // Pairs with the load of `busy` in `quiesce`. Relaxed: `light`, which pairs with the heavy
        // fence there, orders this store before the load of the permit.
        cache.busy.store(1, Ordering::Relaxed);
        light();
        // Dropping it is the way out, also where the owner does not get in.
        let inside = EnteredCache(HeldCache { cache });
        // Acquire: pairs with the release in `readmit`: the lists are as the cold side left them.
        if std::ptr::eq(cache.permit.load(Ordering::Acquire), self) { Some(inside) } else { None }
    }

    /// [`Gate::enter_by_permit`], also for gates whose owners execute a fence, which they do here.
    #[inline(never)]
    pub(crate) fn enter<'a>(&self, cache: &'a ThreadCache) -> Option<EnteredCache<'a>> {
        if !self.is_fenced {
            return self.enter_by_permit(cache);
        }
        // As in `enter_by_permit`, with a full fence on both sides.
        cache.busy.store(1, Ordering::Relaxed);
        let inside = EnteredCache(HeldCache { cache });
        // Store busy, fence, load permit: pairs with store permit, fence, load busy in `quiesce`.
        crate::sync::fence(Ordering::SeqCst);
        // Acquire: pairs with the release in `readmit`, as in `enter_by_permit`.
        let permit = cache.permit.load(Ordering::Acquire);
        if std::ptr::eq(permit, self.permit()) { Some(inside) } else { None }
    }

    /// Shuts the owners of these thread caches out: revokes their permits, and waits until none is
    /// inside. The caller holds the central pool's lock. They stay out, and the cold side may hold
    /// their caches, until [`Gate::readmit`] admits them.
    pub(crate) fn quiesce(&self, caches: &[Arc<ThreadCache>]) {
        // Relaxed: before the fence, which pairs with the owner's in `enter_by_permit` or `enter`.
        caches.iter().for_each(|cache| cache.permit.store(std::ptr::null_mut(), Ordering::Relaxed));
        crate::sync::heavy(self.is_fenced);
        for cache in caches {
            // Acquire: pairs with the release by which the owner leaves (`EnteredCache`'s drop).
            while cache.busy.load(Ordering::Acquire) != 0 {
                yield_now();
            }
        }
    }

    /// Admits these owners again, unless the pool is closed. Under the central pool's lock.
    pub(crate) fn readmit(&self, caches: &[Arc<ThreadCache>]) {
        // Release: pairs with the acquires in `enter_by_permit` and `enter`.
        caches.iter().for_each(|cache| cache.permit.store(self.permit_now(), Ordering::Release));
    }

    /// Shuts the owners of all thread caches out for ever. Under the central pool's lock.
    pub(crate) fn close(&self, caches: &[Arc<ThreadCache>]) {
        // Release: pairs with the acquire in `is_closed`.
        self.closed.store(true, Ordering::Release);
        self.quiesce(caches);
    }

    /// Runs `work` on some thread caches while other owners go on. Under the central pool's lock.
    pub(crate) fn revoke(&self, caches: &[Arc<ThreadCache>], work: impl FnMut(HeldCache<'_>)) {
        self.quiesce(caches);
        caches.iter().map(|cache| HeldCache { cache }).for_each(work);
        self.readmit(caches);
    }
}
