//! The central pool: a store of segments, and how requests get them. Each pool has one.
//!
//! It joins thread caches, transfer caches, the arena and the queue of waiters. It tries to serve a
//! request in this order, cheapest first:
//!
//! 1. *hit*: this thread's cache has a segment ([`crate::freelist::cache`]: loads and stores);
//! 2. *exchange*: this thread's cache takes a batch that another thread left in a transfer cache,
//!    under the lock of that one (`caches`);
//! 3. *batch*: under the lock, a batch of a run: one for the request, others for the thread cache;
//! 4. *reclaim*: cached segments that other threads will hardly miss go back to their runs, and the
//!    request is tried again (`caches`);
//! 5. the rest is the pool's decision: to grow (`growth`), to reclaim the caches of busy threads
//!    too, to wait (`waiting`, `queue`), or to do without.
//!
//! Returns go the same way down. A segment to which a waiting request may have a right goes to the
//! lock instead, so that it meets the queue (`waiting`).
//!
//! # How long a central pool lives
//!
//! A buffer holds a bare pointer to its central pool: a reference count would cost more than a hit.
//! All buffers together hold one strong count, *the outstanding reference*, which the core keeps.
//! When the pool closes, owners are shut out of their thread caches for ever, and every return is
//! slow. So the segments out are counted exactly, and the last one's return drops the outstanding
//! reference. A buffer that never comes back (leaked, or quarantined) keeps the central pool until
//! the process ends.
//!
//! # Invariants
//!
//! - Each segment is in one place: in its run, in a thread cache, in a transfer cache, or out.
//! - Takes and returns are counted where they happen: in thread caches, and under the lock. Bytes
//!   out are takes less returns, times stride; free bytes are the rest. So the parts always sum up.
//! - Nothing that lies in a window is cached, and no segment of a class that a request waits for,
//!   once waiters have rights (`waiting`).
//! - No waiter could be served by what is free outside of windows.
//! - Whoever changes the core may free memory, or room for it, that a waiter could have. So the
//!   guard of the lock serves the queue before it unlocks, and nothing else locks the core.
//! - No driver call and no foreign code under the lock. Tasks are woken after the unlock, by the
//!   guard's deferral ([`crate::foreign`]). The guard itself has planned regions pinned after the
//!   unlock: foreign code further out on this thread may wait for that memory.
//!
//! Read on in `thread_caches` (which cache this thread has), `caches`, `queue`, `waiting` and `windows`,
//! `growth`, `raw` (the segment as a value), `census`, `check`. The pool calls all of it.

#![allow(unsafe_code)]

mod caches;
mod census;
mod check;
mod growth;
#[cfg(all(test, loom))]
mod loom_models;
mod queue;
mod raw;
#[cfg(all(test, not(loom)))]
mod tests;
mod thread_caches;
mod trim;
mod waiting;
mod windows;

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64 as StdAtomicU64, Ordering as StdOrdering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use crate::arena::Arena;
use crate::device::context::Context;
use crate::error::{Error, Result};
use crate::freelist::{CacheTable, Descriptor, Gate, LISTS, ThreadCache, TransferCache, listed};
use crate::region::Regions;
use crate::segment::{self, Class, Placement};
use crate::sync::{self, Mutex, MutexGuard};
use crate::telemetry::counters::ClassTally;
use crate::telemetry::ledger::Ledger;

pub(crate) use caches::ReclaimLevel;
pub(crate) use census::OutSegment;
use growth::Refusal;
use queue::WaitQueue;
pub(crate) use queue::{Wake, Want};
pub(crate) use raw::{Fresh, Segment, pack};
#[cfg(all(test, loom))]
pub(crate) use thread_caches::end as end_leases;
pub(crate) use waiting::LongWait;
use windows::{Closed, Windows};

/// How a central pool is set up.
#[derive(Clone, Debug)]
pub(crate) struct CentralConfig {
    /// The most bytes that the central pool may hold.
    pub(crate) capacity: usize,
    /// The most bytes that one thread cache may cache.
    pub(crate) thread_cache: usize,
    /// The most bytes that the transfer cache of one class may hold, to the nearest segment.
    pub(crate) transfer_cache: usize,
    /// The longest request that an extent can serve, in bytes.
    pub(crate) largest: usize,
    /// Bytes to grow by. 0: the central pool never grows.
    pub(crate) step: usize,
    /// The devices are moved by hand: without timers or clocks, so that a seed reproduces a run.
    pub(crate) by_hand: bool,
    /// The devices served, by [`crate::device::context::Context::id`], with their names.
    pub(crate) devices: Vec<(u64, Arc<str>)>,
    /// Every checkout is entered in the ledger. Then `thread_cache` is 0: nothing is cached.
    pub(crate) track: bool,
}

impl CentralConfig {
    /// [`Error::Mismatch`] about `what`, a pool or its buffer, unless the pool serves the device.
    pub(crate) fn check_serves(&self, what: &'static str, device: &Context) -> Result<()> {
        if self.devices.iter().any(|(id, _)| *id == device.id()) {
            return Ok(());
        }
        let names: Vec<&str> = self.devices.iter().map(|(_, name)| &**name).collect();
        let remedy = "name that device to the pool too (PoolBuilder::device), or use a pool that serves it";
        Err(Error::Mismatch { what, of: names.join(", "), with: device.name().to_owned(), remedy })
    }
}

/// See the head of this module.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct CentralPool {
    /// First, so that its address, which a hit compares, is the central pool's address.
    gate: Gate,
    // Often read and rarely written: together, and in other cache lines than what is often written.
    number: u64,
    config: CentralConfig,
    transfers: Vec<TransferCache>,
    /// The returns that may be for a waiter.
    closed: Closed,
    /// Bytes that a copier has in flight without entries of their own, maybe on several timelines.
    unlisted: StdAtomicU64,
    /// Bytes of copies in flight on one timeline alone, over all timelines, and those of them that
    /// are claimed. In a cache line of their own: every copy changes them, beside a driver call
    /// that costs many times as much.
    flight: crossbeam::utils::CachePadded<[StdAtomicU64; 2]>,
    /// Changes of `unlisted` under way together with one of a segment's word. Only for checks.
    halfway: StdAtomicU64,
    me: Weak<Self>,
    /// What "the lock" protects.
    core: crossbeam::utils::CachePadded<Mutex<Core>>,
    /// Kept until nothing can reach the memory any more.
    regions: Option<Arc<Regions>>,
}

#[derive(Debug)]
struct Core {
    config: CentralConfig,
    /// The outstanding reference, until the pool is closed and nothing is out.
    outstanding: Option<Arc<CentralPool>>,
    /// After closing: the number of segments that are still out.
    left: Option<u64>,
    me: Weak<CentralPool>,
    arena: Arena,
    table: CacheTable,
    queue: WaitQueue,
    /// What is withheld for whom.
    windows: Windows,
    /// Takes and returns by class, of the slow path and of thread caches that have left the table.
    classes: ClassTally,
    ledger: Ledger,
    /// Requested bytes that the slow path gave out, less the bytes that it took back. It wraps,
    /// since a hit may take and the slow path return.
    requested: u64,
    /// Bytes of quarantined segments.
    quarantined: usize,
    /// Each of them: its run, the address of its descriptor, and when it was quarantined.
    quarantined_segments: Vec<(u32, usize, Instant)>,
    /// Bytes of regions that are being pinned.
    growing: usize,
    /// The part of `growing` that is pinned after the unlock.
    planned: usize,
    /// The last growth that ended, if it failed.
    refusal: Option<Refusal>,
    stats: Stats,
}

/// What happened on the slow path since the central pool was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stats {
    pub(crate) reclaims: u64,
    pub(crate) waits: u64,
    /// Waits that were given up at their deadline, and waits whose future was dropped.
    pub(crate) timeouts: u64,
    pub(crate) abandoned: u64,
    /// Regions that were planned for requests, and how many of them came in part or not at all.
    pub(crate) growths: u64,
    pub(crate) growth_failures: u64,
}

/// The bytes and counts of a central pool at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CentralSnapshot {
    pub(crate) total: usize,
    pub(crate) unpinned: usize,
    pub(crate) free: usize,
    /// Of the free bytes, those in thread caches and transfer caches.
    pub(crate) cached: usize,
    /// Checked out or in flight: taken, and neither returned nor quarantined.
    pub(crate) out: usize,
    pub(crate) requested: usize,
    pub(crate) quarantined: usize,
    pub(crate) quarantined_segments: u64,
    pub(crate) cut: usize,
    pub(crate) largest_free: usize,
    pub(crate) takes: u64,
    pub(crate) puts: u64,
    pub(crate) waiting: usize,
    pub(crate) stats: Stats,
}

impl CentralPool {
    pub(crate) fn new(config: CentralConfig, regions: Option<Arc<Regions>>) -> Arc<Self> {
        static NUMBERS: StdAtomicU64 = StdAtomicU64::new(1);
        // Relaxed: the numbers need only differ.
        let number = NUMBERS.fetch_add(1, StdOrdering::Relaxed);
        let central = Arc::new_cyclic(|me| Self {
            gate: Gate::new(sync::asymmetric()),
            number,
            regions,
            transfers: listed()
                .map(|class| TransferCache::new(config.transfer_cache, class.stride()))
                .collect(),
            closed: Closed::new(),
            unlisted: StdAtomicU64::new(0),
            flight: crossbeam::utils::CachePadded::default(),
            halfway: StdAtomicU64::new(0),
            me: me.clone(),
            core: crossbeam::utils::CachePadded::new(Mutex::new(Core {
                config: config.clone(),
                outstanding: None,
                left: None,
                me: me.clone(),
                arena: Arena::new(),
                table: CacheTable::default(),
                queue: WaitQueue::default(),
                windows: Windows::default(),
                classes: ClassTally::new(),
                ledger: Ledger::default(),
                requested: 0,
                quarantined: 0,
                quarantined_segments: Vec::new(),
                growing: 0,
                planned: 0,
                refusal: None,
                stats: Stats::default(),
            })),
            config,
        });
        crate::os::empty_in_child(thread_caches::forget);
        // See "How long a central pool lives".
        central.lock().as_is().outstanding = Some(central.clone());
        central
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Whether the pool was closed.
    pub(crate) fn closed(&self) -> bool {
        self.gate.is_closed()
    }

    pub(crate) fn config(&self) -> &CentralConfig {
        &self.config
    }

    // --- taking ----------------------------------------------------------------------------------

    /// A hit: takes a segment from this thread's cache. `None`: the caller goes on with
    /// [`CentralPool::refill`] and [`CentralPool::try_take`].
    ///
    /// Gives the descriptor, which fits into a register: see the note in `Pool`.
    #[inline(always)]
    pub(crate) fn hit(&self, class: Class, len: usize) -> Option<NonNull<Descriptor>> {
        let hit = self
            .gate
            .enter_by_permit(thread_caches::current()?)
            .and_then(|mut inside| inside.take(class, len));
        hit.or_else(|| self.hit_other(class, len))
    }

    /// [`CentralPool::hit`] where this thread has used another pool since, or where owners execute
    /// a fence. (Also where the list is empty: a hit looks at its outcome once.)
    #[cold]
    #[inline(never)]
    fn hit_other(&self, class: Class, len: usize) -> Option<NonNull<Descriptor>> {
        self.gate.enter(self.cache()?)?.take(class, len)
    }

    /// Turns a request into a [`Want`], and refuses what this central pool can never serve. Lengths
    /// and alignments are in bytes.
    pub(crate) fn place(&self, len: usize, align: usize) -> Result<Want> {
        // A length that overflows is too long for any pool. The error tells this one's longest.
        let placement = Placement::of(len, align).map_err(|error| match error {
            Error::TooLong { len, largest } => {
                Error::TooLong { len, largest: largest.min(self.config.largest) }
            }
            error => error,
        })?;
        // In regions aligned to less than `align`, a part of an extent's start may be lost.
        let lost = self.regions.as_ref().map_or(0, |regions| align.saturating_sub(regions.aligned()));
        let largest = self.config.largest.saturating_sub(lost);
        if len > largest {
            return Err(Error::TooLong { len, largest });
        }
        let placement = match placement {
            // The length fits an extent and the class's stride does not: it has its own run.
            Placement::Class(class) if class.stride() > largest + 32 => {
                Placement::Pages { span: segment::span(len)?, align: 1 }
            }
            placement => placement,
        };
        Ok(Want { len, placement })
    }

    fn refuse_if_shut(&self) -> Result<()> {
        crate::os::check_fork()?;
        if self.closed() { Err(Error::Closed) } else { Ok(()) }
    }

    /// Takes a segment for each of `wants`, or none at all: from what is free, or is cached within
    /// the reclaim level, and no waiter has a right to. `None`: not now.
    ///
    /// # Errors
    /// [`Error::Closed`], [`Error::Forked`].
    #[cold]
    pub(crate) fn try_take(&self, wants: &[Want], level: ReclaimLevel) -> Result<Option<Vec<Fresh>>> {
        self.refuse_if_shut()?;
        let single = match *wants {
            [Want { len, placement: Placement::Class(class) }] => Some((class, len)),
            _ => None,
        };
        if let Some(fresh) = single.and_then(|(class, len)| self.refill(class, len)) {
            return Ok(Some(vec![fresh]));
        }
        // Before the lock: leasing a thread cache takes the lock, too.
        let cache = self.cache();
        let mut core = self.lock();
        if self.config.by_hand {
            self.tick(&mut core);
        }
        self.refuse_if_shut()?;
        let batch = single.zip(cache).and_then(|((class, len), cache)| {
            let descriptor = self.batch(&mut core, cache, class)?;
            Some(vec![core.took(descriptor, len)])
        });
        let granted = batch.or_else(|| core.take(wants));
        Ok(granted.or_else(|| self.reclaim(&mut core, wants, cache, level)))
    }

    // --- returning -------------------------------------------------------------------------------

    /// Returns a segment. The last one that is out of a closed pool frees the central pool.
    ///
    /// # Safety
    /// `this` is the descriptor's central pool. The descriptor is out and owned by the caller;
    /// `len` is the length that it was taken for, `list` its list (or [`LISTS`], to note the return
    /// in the ledger). The caller touches neither `this` nor the descriptor afterwards.
    #[inline(always)]
    pub(crate) unsafe fn put(this: NonNull<Self>, descriptor: NonNull<Descriptor>, len: usize, list: usize) {
        // SAFETY: a descriptor that is out keeps its central pool alive (by the outstanding
        // reference) until it is counted as returned.
        let central = unsafe { this.as_ref() };
        if let Some(mut inside) =
            thread_caches::current().and_then(|cache| central.gate.enter_by_permit(cache))
        {
            // SAFETY: alive, out, in no list, and owned by the caller, which passes it on.
            if unsafe { inside.put(descriptor, len, list) } {
                return;
            }
        }
        // SAFETY: `put_slow` has the contract of this function, and nothing was done yet.
        unsafe { Self::put_slow(this, descriptor, len, list) }
    }

    #[cold]
    unsafe fn put_slow(this: NonNull<Self>, descriptor: NonNull<Descriptor>, len: usize, list: usize) {
        // SAFETY: as in `put`.
        let central = unsafe { this.as_ref() };
        if crate::os::forked() {
            return;
        }
        // SAFETY: alive, and owned by the caller.
        let segment = unsafe { descriptor.as_ref() };
        if list == LISTS {
            // The ledger may have an entry: its segments have no list, so their return comes here.
            central.lock().as_is().ledger.close(descriptor.addr().get());
            segment.untrack();
        }
        // SAFETY: as above.
        if segment.class().is_some_and(|class| unsafe { central.keep(class, descriptor, len) }) {
            return;
        }
        let mut core = central.lock();
        // SAFETY: alive, owned by the caller, in no list.
        let last = unsafe { core.put(descriptor, len) };
        drop(core);
        // This may free the central pool. Nothing of it is touched afterwards.
        drop(last);
    }

    /// Counts a segment as quarantined. It stays taken; waiters that need it get an error.
    ///
    /// # Safety
    /// This is the descriptor's central pool, and only the caller can change its state.
    unsafe fn quarantine(&self, descriptor: NonNull<Descriptor>) {
        let mut core = self.lock();
        // SAFETY: a descriptor that is out is alive.
        let (bytes, run) = unsafe { (core.arena.granted(descriptor), descriptor.as_ref().run()) };
        core.quarantined += bytes;
        core.quarantined_segments.push((run, descriptor.addr().get(), Instant::now()));
        // SAFETY: as above, and it never comes back.
        let window = unsafe { core.arena.quarantine(descriptor) };
        if let Some(window) = window {
            core.end_window(window);
        }
        core.fail_hopeless();
    }

    // --- threads ---------------------------------------------------------------------------------

    fn begin_lease(&self) -> Option<Arc<ThreadCache>> {
        if self.closed() {
            return None;
        }
        Some(self.lock().table.lease(&self.gate))
    }

    /// Ends the lease of a thread that ends, on that thread. Its cache's segments go to the runs.
    fn end_lease(&self, cache: &Arc<ThreadCache>) {
        if crate::os::forked() {
            return;
        }
        let mut core = self.lock();
        let Core { arena, table, .. } = &mut *core;
        // SAFETY: segments in a thread cache are free and alive; draining takes them off its lists.
        table.give_up(cache, |_, chain| unsafe { arena.give_chain(chain) });
        core.count_on(cache);
    }

    // --- the end ---------------------------------------------------------------------------------

    /// Closes the central pool. From here on no checkout succeeds, waiters get [`Error::Closed`],
    /// and the last return frees the central pool.
    pub(crate) fn close(self: &Arc<Self>) {
        if crate::os::forked() {
            return;
        }
        let mut core = self.lock();
        if core.left.is_some() {
            return;
        }
        self.gate.close(&core.table);
        self.reclaim_quiet(&mut core);
        while let Some(head) = core.queue.head() {
            core.end(head, Err(Error::Closed));
        }
        // Only after all owners are shut out: from here on returns are counted one by one.
        let (takes, puts, _) = core.tally().sums();
        core.left = Some(takes - puts);
        let last = core.came_back(0);
        drop(core);
        drop(last);
    }

    /// A reference that keeps the central pool alive beyond the return of the caller's segment.
    pub(crate) fn kept(&self) -> Option<Arc<Self>> {
        self.me.upgrade()
    }

    /// Number of segments that are out.
    pub(crate) fn outstanding(&self) -> u64 {
        let core = self.lock();
        core.left.unwrap_or_else(|| {
            // While owners work, a return may be counted before the checkout that it ends.
            let (takes, puts, _) = core.tally().sums();
            (takes.wrapping_sub(puts) as i64).max(0) as u64
        })
    }

    // --- looking ---------------------------------------------------------------------------------

    /// Whether the memory of this central pool keeps the device with this context open.
    pub(crate) fn keeps(&self, context: u64) -> bool {
        self.regions.as_ref().is_some_and(|regions| regions.keep(context))
    }

    /// Whether this address, in a segment that is out, is the driver's managed memory.
    pub(crate) fn is_managed(&self, at: NonNull<u8>) -> bool {
        self.regions.as_ref().is_some_and(|regions| regions.is_managed(at))
    }
}

impl Core {
    /// Takes a segment for each of `wants`, or none at all, from what is free outside of windows.
    fn take(&mut self, wants: &[Want]) -> Option<Vec<Fresh>> {
        let taken = queue::take_all(&mut self.arena, wants)?;
        Some(taken.into_iter().zip(wants).map(|(one, want)| self.took(one, want.len)).collect())
    }

    /// Counts a segment that the slow path gives out.
    fn took(&mut self, descriptor: NonNull<Descriptor>, len: usize) -> Fresh {
        // SAFETY: just taken from its run: alive, and no other thread has it.
        let (segment, granted) = unsafe { (descriptor.as_ref(), self.arena.granted(descriptor)) };
        segment.taken();
        self.classes.took(segment.class(), granted);
        self.arena.note_peak();
        self.requested = self.requested.wrapping_add(len as u64);
        // SAFETY: as above. This core's central pool is alive while it is locked.
        unsafe { Fresh::of_packed(&*self.me.as_ptr(), descriptor, pack(len, segment.list())) }
    }

    /// Puts a segment back that was out, and serves the waiter that has a right to it. Returns the
    /// outstanding reference if it was the last one, as [`Core::came_back`] does.
    ///
    /// # Safety
    /// The descriptor is alive, in no list, and owned by the caller.
    #[must_use]
    unsafe fn put(&mut self, descriptor: NonNull<Descriptor>, len: usize) -> Option<Arc<CentralPool>> {
        // SAFETY: the descriptor is alive until the arena gets it back.
        let (granted, class) = unsafe { (self.arena.granted(descriptor), descriptor.as_ref().class()) };
        self.classes.gave(class, granted);
        self.requested = self.requested.wrapping_sub(len as u64);
        // SAFETY: as above.
        unsafe { descriptor.as_ref() }.returned();
        // SAFETY: this function's contract.
        let is_served = class.is_some_and(|class| unsafe { self.hand_over(descriptor, class) });
        if !is_served {
            // SAFETY: this function's contract, and nobody was given the segment.
            let window = unsafe { self.arena.give(descriptor) };
            window.into_iter().for_each(|window| self.came(window));
        }
        self.came_back(1)
    }

    /// After closing: counts `n` segments as back. When none is out any more, returns the
    /// outstanding reference, to be dropped after the unlock.
    #[must_use]
    fn came_back(&mut self, n: u64) -> Option<Arc<CentralPool>> {
        let left = self.left.as_mut()?;
        *left -= n;
        if *left == 0 { self.outstanding.take() } else { None }
    }
}

/// Access to the core. Its end serves the queue if the core was changed through it.
#[must_use = "dropping it unlocks"]
struct Locked<'a> {
    // Declared first, so dropped first: what was planned is pinned after the unlock.
    core: MutexGuard<'a, Core>,
    central: &'a CentralPool,
    changed: bool,
    planned: Planned,
}

/// Bytes that are pinned for a central pool when this is dropped.
struct Planned(Option<(Arc<CentralPool>, usize)>);

impl Drop for Planned {
    fn drop(&mut self) {
        let Some((central, bytes)) = self.0.take() else { return };
        if let Some(regions) = &central.regions {
            regions.pin(bytes, central.clone());
        }
    }
}

impl CentralPool {
    /// Locks the core. The only way in.
    fn lock(&self) -> Locked<'_> {
        Locked { core: self.core.lock(), central: self, changed: false, planned: Planned(None) }
    }
}

impl Locked<'_> {
    /// The core for a check, or for a change of nothing that a waiter could have (the ledger,
    /// counts): the queue is not served.
    fn as_is(&mut self) -> &mut Core {
        &mut self.core
    }
}

impl Deref for Locked<'_> {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Core {
        self.changed = true;
        &mut self.core
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if self.changed {
            self.central.turn(&mut self.core);
            if self.core.planned > 0 {
                let bytes = std::mem::take(&mut self.core.planned);
                self.planned.0 = self.central.kept().map(|central| (central, bytes));
            }
        }
    }
}

/// A saturating sum: many requests together can ask for more bytes than there are addresses.
pub(crate) fn sum(bytes: impl Iterator<Item = usize>) -> usize {
    bytes.fold(0, usize::saturating_add)
}
