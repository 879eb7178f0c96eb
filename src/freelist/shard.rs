//! Shards: a few free segments of each class that one thread takes and returns by plain loads and stores.
//!
//! # How a hit costs no atomic read-modify-write
//!
//! A shard belongs to the pool and is leased to one thread at a time. That thread, the *owner*, is nearly always the
//! only one to touch it, so nearly always a lock would protect against nobody. Yet the pool must be able to take back
//! what an idle thread caches, to close, and to send everyone to the queue when somebody waits. So the shard has a lock
//! whose whole price is on the other side:
//!
//! ```text
//!   owner (each checkout and return)          the cold side (rare; one at a time, under the depot's lock)
//!   busy = 1                                  mode |= bits
//!   light fence (the compiler only)           heavy fence (membarrier: a full fence on every running thread)
//!   if mode != 0 { busy = 0; take the         wait until busy == 0
//!                  slow path }                work on the shard's lists
//!   work on the shard's lists                 mode &= !bits    (release)
//!   busy = 0                (release)
//! ```
//!
//! Either the owner's load of `mode` comes after the heavy fence and sees the bits, and the owner keeps out; or it came
//! before, and then its `busy = 1` is visible to the cold side, which waits. [`crate::sync`] has the fence and its
//! three modes; without `membarrier` the bit [`mode::FENCED`] is always set, which makes the owner's first look at
//! `mode` fail and sends it through [`Gate::look_fenced`], where it pays for a real fence.
//!
//! The owner's last access to a shard is `busy = 0`: a pool that is being freed waits for it.

use std::sync::Arc;

#[cfg(loom)]
use super::list_of;
use super::slot::{Chain, Slot};
use super::{LISTED, listed};
#[cfg(not(loom))]
use crate::segment::CLASSES;
use crate::segment::Class;
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering, light, yield_now};
use std::ptr::NonNull;

/// Why the owners of shards are kept out.
pub(crate) mod mode {
    /// The pool is closed: every return is slow, and the last one frees the depot.
    pub(crate) const CLOSED: u32 = 1;
    /// This is a forked child: nothing here is usable.
    pub(crate) const FORKED: u32 = 2;
    /// Somebody waits for memory: all of it goes through the queue.
    pub(crate) const WAITING: u32 = 4;
    /// Somebody is looking into the shards just now.
    pub(crate) const INSPECT: u32 = 8;
    /// No asymmetric fence here: owners fence for themselves. Alone it keeps nobody out.
    pub(crate) const FENCED: u32 = 16;
}

/// One class's list in a shard.
///
/// The fields are atomics so that a snapshot may read them at any time; only who holds the shard writes them, by a load
/// and a store, both relaxed.
///
/// A hit writes as few of them as can be, so what can be worked out is not kept: the list holds `limit - room` segments,
/// and as many were returned here as it holds and were taken, less those that came by the slow path.
#[derive(Debug)]
#[repr(align(32))]
struct Cell {
    head: AtomicPtr<Slot>,
    /// How many more segments the list may hold, as an `i32`: below 0 if it holds more than it may.
    room: AtomicU32,
    /// How many segments the list may hold. 0 until the depot has granted room for this class.
    limit: AtomicU32,
    /// Segments taken here since the shard was made. A thread may return what another took.
    takes: AtomicU64,
    /// Segments filled in less drained (wrapping).
    filled: AtomicU64,
}

impl Cell {
    fn new() -> Self {
        Self {
            head: AtomicPtr::new(std::ptr::null_mut()),
            room: AtomicU32::new(0),
            limit: AtomicU32::new(0),
            takes: AtomicU64::new(0),
            filled: AtomicU64::new(0),
        }
    }

    /// Segments in the list.
    fn count(&self) -> u32 {
        self.limit.load(Ordering::Relaxed).wrapping_sub(self.room.load(Ordering::Relaxed))
    }

    /// Books segments that came by the slow path, or (wrapping) went.
    fn refill(&self, count: u32) {
        self.room.store(self.room.load(Ordering::Relaxed).wrapping_sub(count), Ordering::Relaxed);
        add(&self.filled, i64::from(count as i32) as u64);
    }
}

/// What `fetch_add` would do, where nobody else writes (wrapping).
#[inline(always)]
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

/// A shard. Its own cache lines: nobody else writes there while its owner works. The cells come first, so that finding
/// one is a shift and nothing else; what each hit writes besides follows in one line.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Shard {
    cells: [Cell; LISTED.end - LISTED.start],
    busy: AtomicU32,
    /// Sums of the requested lengths taken and returned here (wrapping). Two, because a sum that each hit changed twice
    /// would make the second change wait for the first.
    requested: AtomicU64,
    returned: AtomicU64,
    /// Spreads threads over the hooks of a rack.
    number: usize,
}

/// What a shard has counted for one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count {
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

impl Shard {
    fn new(number: usize) -> Self {
        Self {
            busy: AtomicU32::new(0),
            requested: AtomicU64::new(0),
            returned: AtomicU64::new(0),
            number,
            cells: std::array::from_fn(|_| Cell::new()),
        }
    }

    #[inline(always)]
    fn cell(&self, class: Class) -> Option<&Cell> {
        #[cfg(loom)]
        return self.cells.get(list_of(class));
        #[cfg(not(loom))]
        {
            const { assert!(LISTED.start == 0 && LISTED.end == CLASSES) };
            debug_assert!(class.index() < CLASSES);
            // SAFETY: there is a cell for each class, and a class's index is below their number.
            Some(unsafe { self.cells.get_unchecked(class.index()) })
        }
    }

    /// What was counted. Exact while nobody moves.
    pub(crate) fn count(&self, class: Class) -> Count {
        self.cell(class).map_or_else(Count::default, |cell| {
            let (takes, cached) = (cell.takes.load(Ordering::Relaxed), u64::from(cell.count()));
            let puts = takes.wrapping_add(cached).wrapping_sub(cell.filled.load(Ordering::Relaxed));
            Count { takes, puts, cached }
        })
    }

    /// Requested lengths taken less returned here; meaningful only in the sum over all shards (wrapping).
    pub(crate) fn requested(&self) -> u64 {
        self.requested.load(Ordering::Relaxed).wrapping_sub(self.returned.load(Ordering::Relaxed))
    }
}

/// Access to a shard's lists: its owner inside the gate, or the cold side that found it quiet.
#[derive(Debug)]
pub(crate) struct Held<'a> {
    shard: &'a Shard,
    owner: bool,
}

impl Drop for Held<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.owner {
            // Release: pairs with the acquire in `Gate::quiesce`, which then sees the lists as we left them.
            self.shard.busy.store(0, Ordering::Release);
        }
    }
}

impl Held<'_> {
    pub(crate) fn number(&self) -> usize {
        self.shard.number
    }

    /// Takes a segment, marked and counted as checked out.
    #[inline(always)]
    pub(crate) fn take(&mut self, class: Class, requested: usize) -> Option<NonNull<Slot>> {
        let cell = self.shard.cell(class)?;
        let slot = NonNull::new(cell.head.load(Ordering::Relaxed))?;
        // SAFETY: slots in a shard's list are alive: their runs count them as given out.
        let s = unsafe { slot.as_ref() };
        cell.head.store(s.next(), Ordering::Relaxed);
        s.mark_taken();
        cell.room.store(cell.room.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        add(&cell.takes, 1);
        add(&self.shard.requested, requested as u64);
        Some(slot)
    }

    /// Returns a segment, marked free, unless the list is full.
    ///
    /// # Safety
    /// The slot is alive, of this class, out, and in no list; it is the caller's to give.
    #[inline(always)]
    pub(crate) unsafe fn put(&mut self, class: Class, slot: NonNull<Slot>, requested: usize) -> Put {
        let Some(cell) = self.shard.cell(class) else { return Put::Full };
        let room = cell.room.load(Ordering::Relaxed) as i32;
        if room <= 0 {
            return Put::Full;
        }
        // SAFETY: alive by the caller's word.
        let s = unsafe { slot.as_ref() };
        s.mark_returned();
        s.set_next(cell.head.load(Ordering::Relaxed));
        cell.head.store(slot.as_ptr(), Ordering::Relaxed);
        cell.room.store((room - 1) as u32, Ordering::Relaxed);
        add(&self.shard.returned, requested as u64);
        Put::Kept
    }

    /// How many segments of this class the shard may hold.
    pub(crate) fn limit(&self, class: Class) -> u32 {
        self.shard.cell(class).map_or(0, |cell| cell.limit.load(Ordering::Relaxed))
    }

    /// Changes that. What is above the new limit stays until it is taken or drained.
    pub(crate) fn set_limit(&mut self, class: Class, limit: u32) {
        if let Some(cell) = self.shard.cell(class) {
            cell.room.store(limit.wrapping_sub(cell.count()), Ordering::Relaxed);
            cell.limit.store(limit, Ordering::Relaxed);
        }
    }

    /// Whether this shard has a list for the class at all.
    pub(crate) fn has(&self, class: Class) -> bool {
        self.shard.cell(class).is_some()
    }

    /// Adds a chain to the list without counting it as returned.
    pub(crate) fn fill(&mut self, class: Class, mut chain: Chain) {
        let Some(cell) = self.shard.cell(class) else {
            debug_assert!(chain.is_empty(), "filled a class without a list");
            return;
        };
        let count = chain.len();
        while let Some(slot) = chain.pop() {
            // SAFETY: popped from a chain: alive, free and in no list.
            unsafe { slot.as_ref() }.set_next(cell.head.load(Ordering::Relaxed));
            cell.head.store(slot.as_ptr(), Ordering::Relaxed);
        }
        cell.refill(count);
    }

    /// Takes up to `count` segments off the list without counting them as checked out.
    pub(crate) fn drain(&mut self, class: Class, count: u32) -> Chain {
        let Some(cell) = self.shard.cell(class) else { return Chain::new() };
        let mut list = Chain { head: cell.head.load(Ordering::Relaxed), count: cell.count() };
        let front = list.split(count);
        cell.head.store(list.head, Ordering::Relaxed);
        cell.refill(front.count.wrapping_neg());
        front
    }

    /// Everything that the shard caches.
    pub(crate) fn drain_all(&mut self, mut sink: impl FnMut(Class, Chain)) {
        for class in listed() {
            let chain = self.drain(class, u32::MAX);
            if !chain.is_empty() {
                sink(class, chain);
            }
        }
    }

    /// Visits the slots of one list. For `check()`.
    pub(crate) fn for_each(&self, class: Class, visit: impl FnMut(&Slot)) {
        let Some(cell) = self.shard.cell(class) else { return };
        let list = Chain { head: cell.head.load(Ordering::Relaxed), count: cell.count() };
        list.iter().for_each(visit);
        // Only looked at: the list stays the shard's.
        let _ = std::mem::ManuallyDrop::new(list);
    }
}

/// The pool's mode word, which every owner reads before it touches its shard.
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
        self.mode.load(Ordering::Acquire) & !mode::FENCED
    }

    /// The owner's way in. `None`: take the slow path, which finds out why.
    #[inline(always)]
    pub(crate) fn enter<'a>(&self, shard: &'a Shard) -> Option<Held<'a>> {
        // Pairs with the load in `quiesce`.
        shard.busy.store(1, Ordering::Relaxed);
        light();
        // Its drop is the way out, whether we get in or not.
        let held = Held { shard, owner: true };
        // Acquire: pairs with the release in `open`, so that we see the lists as the cold side left them.
        if self.mode.load(Ordering::Acquire) == 0 || self.look_fenced() { Some(held) } else { None }
    }

    /// The owner's second look, behind a fence of its own. Whether [`mode::FENCED`] is all that is set.
    #[cold]
    #[inline(never)]
    fn look_fenced(&self) -> bool {
        #[cfg(pinpool_rmw)]
        // A read-modify-write instead of a fence, for tools that do not model fences: it either follows the cold side's
        // own in the word's order and sees its bits, or precedes it, and then (release, acquire) the cold side sees
        // busy = 1.
        let seen = self.mode.fetch_add(0, Ordering::AcqRel);
        #[cfg(not(pinpool_rmw))]
        let seen = {
            // Store busy, fence, load mode: pairs with store mode, fence, load busy in `quiesce`.
            #[cfg(not(pinpool_planted = "shard_no_fence"))]
            crate::sync::fence(Ordering::SeqCst);
            self.mode.load(Ordering::Acquire)
        };
        seen == mode::FENCED
    }

    /// Sets `bits` and waits until no owner is inside. The caller holds the depot's lock, and until [`Gate::open`] has
    /// cleared every keeping-out bit, owners stay out and the cold side may hold the shards.
    pub(crate) fn quiesce<'a>(&self, bits: u32, shards: impl Iterator<Item = &'a Arc<Shard>>) {
        // AcqRel: see `look_fenced` under `pinpool_rmw`; elsewhere the fence orders it.
        self.mode.fetch_or(bits, Ordering::AcqRel);
        crate::sync::heavy();
        for shard in shards {
            // Acquire: pairs with the release when the owner leaves.
            #[cfg(not(pinpool_planted = "shard_no_wait"))]
            while shard.busy.load(Ordering::Acquire) != 0 {
                yield_now();
            }
        }
    }

    /// Clears `bits`.
    pub(crate) fn open(&self, bits: u32) {
        // Release: pairs with the acquire in `enter`.
        self.mode.fetch_and(!bits, Ordering::Release);
    }

    /// Sets bits without waiting for anyone. For the child of a fork, which is alone.
    pub(crate) fn force(&self, bits: u32) {
        self.mode.fetch_or(bits, Ordering::AcqRel);
    }
}

/// The shards of a pool and who leases them. Lives under the depot's lock.
#[derive(Debug, Default)]
pub(crate) struct Roster {
    shards: Vec<(Arc<Shard>, bool)>,
}

impl Roster {
    /// A shard for a thread: one that nobody leases, or a new one.
    pub(crate) fn lease(&mut self) -> Arc<Shard> {
        if let Some((shard, leased)) = self.shards.iter_mut().find(|(_, leased)| !leased) {
            *leased = true;
            return shard.clone();
        }
        let shard = Arc::new(Shard::new(self.shards.len()));
        self.shards.push((shard.clone(), true));
        shard
    }

    /// Ends a lease; the owner's own call, on its thread. What the shard cached goes to `sink`.
    pub(crate) fn give_up(&mut self, shard: &Arc<Shard>, sink: impl FnMut(Class, Chain)) {
        // The owner is here and not inside the gate, and the cold side works only under the lock that we hold.
        Held { shard, owner: false }.drain_all(sink);
        if let Some((_, leased)) = self.shards.iter_mut().find(|(s, _)| Arc::ptr_eq(s, shard)) {
            *leased = false;
        }
    }

    /// Planted: a shard is drained by its owner as if nobody else could be at it.
    #[cfg(pinpool_planted = "exit_drains_unlocked")]
    pub(crate) fn drain_unlocked(shard: &Shard) -> Vec<Chain> {
        let mut chains = Vec::new();
        Held { shard, owner: false }.drain_all(|_, chain| chains.push(chain));
        chains
    }

    /// All shards.
    pub(crate) fn shards(&self) -> impl Iterator<Item = &Arc<Shard>> {
        self.shards.iter().map(|(shard, _)| shard)
    }

    /// The shards to work on, after [`Gate::quiesce`] and before [`Gate::open`].
    pub(crate) fn quiet(&self) -> impl Iterator<Item = Held<'_>> {
        self.shards().map(|shard| Held { shard, owner: false })
    }
}
