//! The central pool: what buffers drop into.
//!
//! It joins the free lists, the arena and the queue of those who wait into one store of segments, and decides how a
//! request is served, cheapest first:
//!
//! 1. *hit*: this thread's thread cache has a segment ([`crate::freelist::cache`]: plain loads and stores);
//! 2. *exchange*: the thread cache takes over a batch that another thread left on a transfer cache (two atomic
//!    operations; `transfer`);
//! 3. *batch*: under the lock, a batch of neighbours from a run, one to be used and the others into the thread cache;
//! 4. *gather*: what is cached where nobody misses it is taken back to its runs, idle runs are dissolved, and the
//!    request is tried again (`reclaim`);
//! 5. what is left is the pool's decision: to grow (`growth`), to take back what is cached where it is in use, too, to
//!    wait (`waiting`, `queue`), or to do without.
//!
//! Returns go the same way down: the thread cache, a transfer cache, the runs. While anybody waits the mode word sends
//! all returns to the lock, so that each segment that comes back meets the queue.
//!
//! # How long a central pool lives
//!
//! Buffers hold a bare pointer to their central pool, since a reference count would cost more than everything else on a
//! hit together. All buffers together hold one strong count, *the outstanding reference*. When the pool closes, the
//! mode word makes every return slow from then on, so those still out can be counted exactly, and the last one to come
//! back gives up the outstanding reference. A buffer that never comes back (leaked, or quarantined) keeps the central
//! pool and its memory for good, which is what it must do.
//!
//! # Counting
//!
//! Takes and returns are counted where they happen, in thread caches and, for the slow path, under the lock. Bytes out
//! are takes less returns times stride; free bytes are what is left. So the parts always sum to the whole.

#![allow(unsafe_code)]

mod census;
mod check;
mod growth;
mod lease;
#[cfg(all(test, loom))]
mod loom_models;
mod queue;
mod raw;
mod reclaim;
mod token;
mod transfer;
mod waiting;

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64 as StdAtomicU64, Ordering as StdOrdering};
use std::sync::{Arc, Weak};

use slab::Slab;

use crate::arena::Arena;
use crate::error::{Error, Result};
use crate::freelist::cache::Put;
use crate::freelist::{
    CacheTable, Descriptor, Gate, LISTS, ThreadCache, TransferCache, list_of, listed, mode, state,
};
use crate::region::Regions;
use crate::segment::{self, Class, Placement};
use crate::sync::{self, Mutex};
use crate::telemetry::counters::ClassTally;
use crate::telemetry::ledger::{Ledger, Sightings};

pub(crate) use census::OutSegment;
#[cfg(all(test, loom))]
pub(crate) use lease::end as end_leases;
use queue::Grant;
use queue::WaitQueue;
pub(crate) use queue::{WaitOutcome, Wake, Want};
pub(crate) use raw::{Fresh, Segment};
pub(crate) use reclaim::ReclaimLevel;
use token::Deposit;
pub use token::Token;
use transfer::Reservations;

/// How a central pool is set up.
#[derive(Clone, Debug)]
pub(crate) struct CentralConfig {
    /// Bytes that the central pool may hold at most; for messages and for [`Error::Impossible`].
    pub(crate) capacity: usize,
    /// Bytes that one thread's thread cache may cache at most.
    pub(crate) thread_cache: usize,
    /// Bytes that may hang in transfer caches, between threads, at most.
    pub(crate) shared_cache: usize,
    /// The longest request that an extent could ever serve.
    pub(crate) largest: usize,
    /// Bytes to grow by; 0: it has all that it will ever get.
    pub(crate) step: usize,
    /// Ignore the clock where it would decide something.
    pub(crate) timeless: bool,
    /// The devices served, by [`crate::device::context::Context::id`].
    pub(crate) serves: Vec<u64>,
    /// Every checkout is entered in the ledger. There is no thread cache then.
    pub(crate) track: bool,
}

/// See the module's page.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct CentralPool {
    /// First, so that its address, which a hit compares, is the central pool's own.
    gate: Gate,
    // Read often, written hardly ever: together, and away from what is written.
    number: u64,
    config: CentralConfig,
    transfers: Vec<TransferCache>,
    reservations: crossbeam::utils::CachePadded<Reservations>,
    /// Bytes held by several timelines at once; what one timeline holds, it counts itself.
    joint: StdAtomicU64,
    /// Changes of that which are being made together with a segment's word. Only checks look.
    halfway: StdAtomicU64,
    me: Weak<Self>,
    /// What those remember who look at all that is out. Locked before the core.
    sightings: Mutex<Sightings>,
    core: crossbeam::utils::CachePadded<Mutex<Core>>,
    /// Kept until nobody can reach the memory any more.
    regions: Option<Arc<Regions>>,
}

#[derive(Debug)]
struct Core {
    arena: Arena,
    table: CacheTable,
    queue: WaitQueue,
    /// Counted on the slow path, over all classes.
    takes: u64,
    puts: u64,
    /// The same by class.
    classes: ClassTally,
    ledger: Ledger,
    /// Granted and requested bytes taken less returned on the slow path (wrapping, since a hit may return them).
    granted: u64,
    requested: u64,
    quarantined: usize,
    quarantined_segments: u64,
    /// As configured.
    capacity: usize,
    extent: usize,
    step: usize,
    me: Weak<CentralPool>,
    /// After closing: segments that are not back yet.
    outstanding: Option<u64>,
    /// Bytes of regions that are being pinned.
    growing: usize,
    /// Bytes that were taken out, and that the worker has not been told to unpin yet.
    leaving: usize,
    /// Why growing failed last, until it is tried again.
    growth_failure: Option<Error>,
    stats: Stats,
    /// Segments that went out as tokens.
    tokens: Slab<Deposit>,
}

/// What happened on the slow path since the central pool was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stats {
    pub(crate) reclaims: u64,
    pub(crate) waits: u64,
    pub(crate) timeouts: u64,
    /// Regions that were asked of the system for a request, and those that came in part or not at all.
    pub(crate) growths: u64,
    pub(crate) growth_failures: u64,
}

/// A central pool's bytes and counts at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CentralSnapshot {
    pub(crate) total: usize,
    pub(crate) unpinned: usize,
    pub(crate) free: usize,
    /// Of the free bytes, those in thread caches and transfer caches.
    pub(crate) cached: usize,
    /// Checked out or in flight: all that was taken and is neither back nor quarantined.
    pub(crate) out: usize,
    pub(crate) requested: usize,
    pub(crate) quarantined: usize,
    pub(crate) quarantined_segments: u64,
    pub(crate) cut: usize,
    pub(crate) largest_free: usize,
    pub(crate) takes: u64,
    pub(crate) puts: u64,
    pub(crate) waiting: usize,
    pub(crate) growing: usize,
    pub(crate) stats: Stats,
}

/// What [`CentralPool::try_take`] found.
#[derive(Debug)]
pub(crate) enum Take {
    Got(Fresh),
    /// Nothing free, and nothing cached within reach that would help.
    Empty,
}

impl CentralPool {
    pub(crate) fn new(config: CentralConfig, regions: Option<Arc<Regions>>) -> Arc<Self> {
        static NUMBERS: StdAtomicU64 = StdAtomicU64::new(1);
        // Relaxed: only to be different.
        let number = NUMBERS.fetch_add(1, StdOrdering::Relaxed);
        let central = Arc::new_cyclic(|me| Self {
            gate: Gate::new(sync::asymmetric()),
            number,
            regions,
            transfers: listed().map(|_| TransferCache::new()).collect(),
            reservations: crossbeam::utils::CachePadded::new(Reservations::new()),
            joint: StdAtomicU64::new(0),
            halfway: StdAtomicU64::new(0),
            me: me.clone(),
            sightings: Mutex::new(Sightings::default()),
            core: crossbeam::utils::CachePadded::new(Mutex::new(Core {
                arena: Arena::new(),
                table: CacheTable::default(),
                queue: WaitQueue::new(config.timeless),
                tokens: Slab::new(),
                takes: 0,
                puts: 0,
                classes: ClassTally::new(),
                ledger: Ledger::default(),
                granted: 0,
                requested: 0,
                quarantined: 0,
                quarantined_segments: 0,
                capacity: config.capacity,
                extent: config.largest + 32,
                step: config.step,
                me: me.clone(),
                outstanding: None,
                growing: 0,
                leaving: 0,
                growth_failure: None,
                stats: Stats::default(),
            })),
            config,
        });
        crate::os::empty_in_child(lease::forget_all);
        // the outstanding reference count: see "How long a central pool lives".
        std::mem::forget(central.clone());
        central
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    fn weak(&self) -> Weak<Self> {
        self.me.clone()
    }

    /// Whether the pool was closed.
    pub(crate) fn closed(&self) -> bool {
        self.gate.mode() & mode::CLOSED != 0
    }

    pub(crate) fn config(&self) -> &CentralConfig {
        &self.config
    }

    // --- taking ------------------------------------------------------------------------------------------------------

    /// A hit: this thread's thread cache has a segment. Everything else is [`CentralPool::try_take`]'s.
    #[inline(always)]
    pub(crate) fn hit(&self, class: Class, len: usize) -> Option<Fresh> {
        // The ways join with a descriptor, which fits a register, and not with what is made of it: see the note in
        // `Pool`.
        let descriptor = match self.gate.enter_by_permit(lease::current()?) {
            Some(mut inside) => inside.take(class, len)?,
            None => self.hit_other(class, len)?,
        };
        // SAFETY: taken from this central pool just now, and of the class.
        Some(unsafe { Fresh::of_list(self, Grant { descriptor, len }, list_of(class)) })
    }

    /// The same where this thread has used another pool since, or has to fence for itself.
    #[cold]
    #[inline(never)]
    fn hit_other(&self, class: Class, len: usize) -> Option<NonNull<Descriptor>> {
        self.gate.enter(lease::hot(self)?)?.take(class, len)
    }

    /// Hands out what was taken just now.
    #[inline(always)]
    fn fresh(&self, grant: Grant) -> Fresh {
        // SAFETY: only called with grants of this central pool, once each, by who has just taken them from a list.
        unsafe { Fresh::new(self, grant) }
    }

    /// Checks what can be refused without looking at the memory.
    pub(crate) fn place(&self, len: usize, align: usize) -> Result<Want> {
        // What overflows is too long for any pool: for this one by its own measure.
        let placement = Placement::of(len, align).map_err(|error| match error {
            Error::TooLong { len, largest } => {
                Error::TooLong { len, largest: largest.min(self.config.largest) }
            }
            error => error,
        })?;
        // Where regions start less well aligned than that, a part of an extent is lost in front.
        let lost = self.regions.as_ref().map_or(0, |regions| align.saturating_sub(regions.aligned()));
        let largest = self.config.largest.saturating_sub(lost);
        if len > largest {
            return Err(Error::TooLong { len, largest });
        }
        let placement = match placement {
            // The length fits into an extent and the class's stride does not: it gets a run of its own.
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

    /// A segment, if one is free anywhere, or cached within reach, and nobody has to wait for it first.
    ///
    /// # Errors
    /// [`Error::Closed`], [`Error::Forked`].
    #[cold]
    pub(crate) fn try_take(&self, want: Want, level: ReclaimLevel) -> Result<Take> {
        self.refuse_if_shut()?;
        if let Placement::Class(class) = want.placement {
            if let Some(descriptor) = self.take_via_transfer(class, want.len) {
                return Ok(Take::Got(self.fresh(Grant { descriptor, len: want.len })));
            }
        }
        // Obtained before the lock is taken: leasing takes it too.
        let cache = self.cache();
        let mut core = self.core.lock();
        self.refuse_if_shut()?;
        if !core.queue.is_empty() && !cfg!(pinpool_planted = "take_overtakes") {
            // First come, first served, but for what the head cannot use.
            let Core { arena, queue, .. } = &mut *core;
            let passed = queue.overtake(arena, &[want]);
            return Ok(passed.map_or(Take::Empty, |g| Take::Got(self.fresh(core.took(g.descriptor, g.len)))));
        }
        if let (Placement::Class(class), Some(cache)) = (want.placement, cache) {
            if let Some(descriptor) = self.batch(&mut core, cache, class) {
                return Ok(Take::Got(self.fresh(core.took(descriptor, want.len))));
            }
        }
        if let Some(descriptor) = queue::take_one(&mut core.arena, want.placement) {
            return Ok(Take::Got(self.fresh(core.took(descriptor, want.len))));
        }
        Ok(match self.reclaim(&mut core, want.placement, cache, level) {
            Some(descriptor) => Take::Got(self.fresh(core.took(descriptor, want.len))),
            None => Take::Empty,
        })
    }

    /// All of several, or none.
    pub(crate) fn try_take_all(&self, wants: &[Want], level: ReclaimLevel) -> Result<Option<Vec<Fresh>>> {
        self.refuse_if_shut()?;
        let cache = self.cache();
        let mut core = self.core.lock();
        self.refuse_if_shut()?;
        if !core.queue.is_empty() {
            return Ok(None);
        }
        let mut grants = queue::take_all(&mut core.arena, wants);
        if grants.is_none() && self.reclaim_idle(&mut core, cache, None) {
            grants = queue::take_all(&mut core.arena, wants);
        }
        if grants.is_none() && level == ReclaimLevel::All && self.reclaim_all(&mut core) {
            grants = queue::take_all(&mut core.arena, wants);
        }
        Ok(grants.map(|grants| grants.iter().map(|g| self.fresh(core.took(g.descriptor, g.len))).collect()))
    }

    // --- returning ---------------------------------------------------------------------------------------------------

    /// Returns a segment. This may be the last anyone does with the central pool: it can be gone when this returns.
    ///
    /// # Safety
    /// `this` is the descriptor's central pool; the descriptor is out and the caller's to give, `len` what it was taken
    /// for, `list` its list; the caller touches neither afterwards.
    #[inline(always)]
    pub(crate) unsafe fn put(this: NonNull<Self>, descriptor: NonNull<Descriptor>, len: usize, list: usize) {
        // SAFETY: a descriptor that is out keeps its central pool alive (the outstanding reference) until it is counted
        // as returned.
        let central = unsafe { this.as_ref() };
        if let Some(mut inside) = lease::current().and_then(|cache| central.gate.enter_by_permit(cache)) {
            // SAFETY: alive, in no list, and the caller's.
            if let Put::Kept = unsafe { inside.put(descriptor, len, list) } {
                return;
            }
        }
        // SAFETY: the caller's word, passed on.
        unsafe { Self::put_slow(this, descriptor, len, list) }
    }

    #[cold]
    unsafe fn put_slow(this: NonNull<Self>, descriptor: NonNull<Descriptor>, len: usize, list: usize) {
        // SAFETY: as in `put`.
        let central = unsafe { this.as_ref() };
        if crate::os::forked() {
            return;
        }
        // SAFETY: alive, and the caller's.
        let class = unsafe { descriptor.as_ref() }.class();
        if let Some(class) = class {
            if list == LISTS {
                // Not for want of a list, but because somebody wants to know when it comes back.
                #[cfg(not(pinpool_planted = "ledger_left_open"))]
                central.core.lock().ledger.close(descriptor.addr().get());
            }
            // SAFETY: as above.
            if unsafe { central.keep(class, descriptor, len) } {
                return;
            }
        }
        // SAFETY: as above.
        if class.is_some_and(|class| unsafe { central.make_room(class, descriptor, len) }) {
            return;
        }
        #[cfg(pinpool_planted = "wake_before_grant")]
        central.core.lock().queue.head_wake().into_iter().for_each(Wake::wake);
        let mut wakes = Vec::new();
        let mut core = central.core.lock();
        // SAFETY: the descriptor is alive until it is given.
        let (granted, class) = unsafe { (core.arena.granted(descriptor), descriptor.as_ref().class()) };
        core.granted = core.granted.wrapping_sub(granted as u64);
        core.classes.gave(class, granted);
        core.ledger.close(descriptor.addr().get());
        core.requested = core.requested.wrapping_sub(len as u64);
        core.puts += 1;
        // SAFETY: alive, the caller's, in no list.
        unsafe {
            descriptor.as_ref().returned();
            core.arena.give(descriptor);
        }
        core.serve(&mut wakes);
        central.stop_waiting(&core);
        let last = core.came_back(1);
        drop(core);
        wakes.into_iter().for_each(Wake::wake);
        if last {
            // SAFETY: the outstanding reference, given up by the last of the outstanding reference; nothing is touched
            // afterwards. (Not by way of `this`, which may come from a reference, and then reaches the central pool and
            // not its counts.)
            unsafe { Arc::decrement_strong_count(central.me.as_ptr()) };
        }
    }

    /// Returns into this thread's thread cache: it may have used another pool since, or has to fence for itself.
    /// `false`: nothing was done.
    ///
    /// # Safety
    /// The descriptor is alive, out, of this class, in no list, and the caller's.
    unsafe fn keep(&self, class: Class, descriptor: NonNull<Descriptor>, len: usize) -> bool {
        let held = self.cache().and_then(|cache| self.gate.enter(cache));
        // SAFETY: the caller's word.
        held.is_some_and(|mut held| matches!(unsafe { held.put(descriptor, len, list_of(class)) }, Put::Kept))
    }

    /// Events a segment as never to be reused. It stays taken for good.
    ///
    /// # Safety
    /// `this` is the descriptor's central pool, and the descriptor is in a state that only the caller leaves.
    pub(crate) unsafe fn quarantine(this: NonNull<Self>, descriptor: NonNull<Descriptor>) {
        // SAFETY: a descriptor that is not back keeps its central pool alive.
        let central = unsafe { this.as_ref() };
        if crate::os::forked() {
            return;
        }
        let mut wakes = Vec::new();
        {
            let mut core = central.core.lock();
            // SAFETY: alive, as above.
            core.quarantined += unsafe { core.arena.granted(descriptor) };
            core.quarantined_segments += 1;
            central.fail_hopeless(&mut core, &mut wakes);
            central.stop_waiting(&core);
        }
        wakes.into_iter().for_each(Wake::wake);
    }

    // --- threads -----------------------------------------------------------------------------------------------------

    fn begin_lease(&self) -> Option<Arc<ThreadCache>> {
        if self.closed() {
            return None;
        }
        Some(self.core.lock().table.lease(&self.gate))
    }

    /// A thread ends: what it cached goes back to the runs.
    fn end_lease(&self, cache: &Arc<ThreadCache>) {
        if crate::os::forked() {
            return;
        }
        let mut wakes = Vec::new();
        #[cfg(pinpool_planted = "exit_drains_unlocked")]
        let early = CacheTable::drain_unlocked(cache);
        let mut core = self.core.lock();
        let Core { arena, table, .. } = &mut *core;
        #[cfg(pinpool_planted = "exit_drains_unlocked")]
        for chain in early {
            // SAFETY: free and alive, if it were this thread's to drain.
            unsafe { arena.give_chain(chain) };
        }
        // SAFETY: what a thread cache caches is free and alive.
        table.give_up(cache, |_, chain| unsafe { arena.give_chain(chain) });
        core.serve(&mut wakes);
        self.stop_waiting(&core);
        drop(core);
        wakes.into_iter().for_each(Wake::wake);
    }

    // --- the end -----------------------------------------------------------------------------------------------------

    /// Closes the central pool: no checkout succeeds any more, waits end, and the last return frees it.
    pub(crate) fn close(self: &Arc<Self>) {
        if crate::os::forked() {
            return;
        }
        let mut wakes = Vec::new();
        let mut core = self.core.lock();
        if core.outstanding.is_some() {
            return;
        }
        let early = cfg!(pinpool_planted = "close_counts_early").then(|| core.counted());
        self.gate.quiesce(mode::CLOSED, &core.table);
        self.reclaim_quiet(&mut core);
        core.queue.fail(&mut wakes, |_| Some(Error::Closed));
        self.stop_waiting(&core);
        // Not before everyone is kept out: from here on returns are counted one by one.
        let (takes, puts) = early.unwrap_or_else(|| core.counted());
        core.outstanding = Some(takes - puts);
        let last = core.came_back(0);
        drop(core);
        wakes.into_iter().for_each(Wake::wake);
        if last {
            // SAFETY: the outstanding reference; the outstanding reference is empty, and the caller holds a count of
            // its own.
            unsafe { Arc::decrement_strong_count(Arc::as_ptr(self)) };
        }
    }

    /// Segments that are not back yet.
    pub(crate) fn outstanding(&self) -> u64 {
        let core = self.core.lock();
        core.outstanding.unwrap_or_else(|| {
            // While owners are at work a return may be counted before the checkout that it ends.
            let (takes, puts) = core.counted();
            (takes.wrapping_sub(puts) as i64).max(0) as u64
        })
    }

    // --- looking -----------------------------------------------------------------------------------------------------

    /// Whether its memory keeps the device with this context open.
    pub(crate) fn keeps(&self, context: u64) -> bool {
        self.regions.as_ref().is_some_and(|regions| regions.keep(context))
    }

    /// Bytes that a segment was given.
    ///
    /// # Safety
    /// `this` is the descriptor's central pool, and the descriptor is not back yet.
    pub(crate) unsafe fn granted(this: NonNull<Self>, descriptor: NonNull<Descriptor>) -> usize {
        // SAFETY: by the caller's word both are alive.
        let (central, class) = unsafe { (this.as_ref(), descriptor.as_ref().class()) };
        match class {
            Some(class) => class.stride(),
            // SAFETY: as above.
            None => unsafe { central.core.lock().arena.granted(descriptor) },
        }
    }

    /// Whether the memory at this address, which is of a segment that is out, is the driver's managed memory.
    pub(crate) fn is_managed(&self, at: NonNull<u8>) -> bool {
        self.regions.as_ref().is_some_and(|regions| regions.is_managed(at))
    }

    /// Whether a segment's memory is really locked.
    ///
    /// # Safety
    /// As for [`CentralPool::granted`].
    pub(crate) unsafe fn pinned(this: NonNull<Self>, descriptor: NonNull<Descriptor>) -> bool {
        // SAFETY: by the caller's word both are alive.
        !crate::os::forked() && unsafe { this.as_ref().core.lock().arena.pinned(descriptor) }
    }

    /// Books another requested length for a segment that stays out.
    fn rebook(&self, from: usize, to: usize) {
        let mut core = self.core.lock();
        core.requested = core.requested.wrapping_add(to as u64).wrapping_sub(from as u64);
    }
}

impl Core {
    /// Counts a segment that the slow path gives out.
    fn took(&mut self, descriptor: NonNull<Descriptor>, len: usize) -> Grant {
        self.takes += 1;
        // SAFETY: just taken from its run: alive, and ours alone.
        let (granted, class) = unsafe {
            descriptor.as_ref().taken();
            (self.arena.granted(descriptor), descriptor.as_ref().class())
        };
        self.granted = self.granted.wrapping_add(granted as u64);
        self.classes.took(class, granted);
        self.requested = self.requested.wrapping_add(len as u64);
        Grant { descriptor, len }
    }

    /// Takes and returns over all threads.
    fn counted(&self) -> (u64, u64) {
        let mut sum = (self.takes, self.puts);
        for cache in self.table.caches() {
            for class in Class::all() {
                let count = cache.count(class);
                sum = (sum.0.wrapping_add(count.takes), sum.1.wrapping_add(count.puts));
            }
        }
        sum
    }

    /// After closing: so many are back. Whether those were the last.
    fn came_back(&mut self, n: u64) -> bool {
        match &mut self.outstanding {
            Some(left) => {
                *left -= n;
                *left == 0
            }
            None => false,
        }
    }
}

/// A sum that ends at the largest number: many requests together can ask for more than there are addresses.
pub(crate) fn sum(bytes: impl Iterator<Item = usize>) -> usize {
    bytes.fold(0, usize::saturating_add)
}
