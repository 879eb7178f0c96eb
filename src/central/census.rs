//! The census: the bytes and counts of a central pool, by size class too, and a list of what is
//! known to be out for long.
//!
//! A snapshot adds up what the thread caches have counted, under the central pool's lock and
//! without stopping their owners. It reads each thread cache's numbers once and derives everything
//! from that, so the parts sum to the whole at any time. Each part is exact while no call on the
//! fast path is under way, and else off by what such calls move: a segment each, or a list's
//! length.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{CentralPool, CentralSnapshot, Core, Fresh, Segment, StdOrdering};
use crate::freelist::{ThreadCache, listed};
use crate::segment::{CLASSES, Class};
use crate::telemetry::counters::{ClassStats, ClassTally, Histogram};
use crate::telemetry::ledger::{CheckoutSite, LedgerEntry};

/// A segment that is out, and that the ledger has or that is quarantined.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutSegment {
    /// The descriptor's address. It is only compared.
    pub(crate) descriptor: usize,
    pub(crate) state: u16,
    pub(crate) granted: usize,
    /// When it was checked out, or quarantined if the ledger does not have it.
    pub(crate) since: Instant,
    /// The segment's entry in the ledger.
    pub(crate) entry: Option<LedgerEntry>,
}

impl CentralPool {
    pub(crate) fn snapshot(&self) -> CentralSnapshot {
        let core = self.lock();
        let (takes, puts, out) = core.tally().sums();
        core.snapshot(takes, puts, out)
    }

    /// [`CentralPool::snapshot`], with the size classes that were ever used.
    pub(crate) fn snapshot_by_class(&self) -> (CentralSnapshot, Vec<ClassStats>) {
        let core = self.lock();
        let tally = core.tally();
        let classes = core.by_class(&tally);
        let (takes, puts, _) = tally.sums();
        // The sum of the classes as they are reported, so that the two agree.
        let out = classes.iter().map(|class| class.out_bytes as u64).sum();
        (core.snapshot(takes, puts, out), classes)
    }

    /// The most bytes in use or cached at a time since the last call, or since the pool was built.
    pub(crate) fn take_peak(&self) -> usize {
        self.lock().arena.take_peak()
    }

    /// How long requests waited for memory, and how long timed buffers were out.
    pub(crate) fn histograms(&self) -> (Histogram, Histogram) {
        let core = self.lock();
        (core.queue.waited, *core.ledger.holding())
    }

    /// Enters a checkout in the ledger, before any other thread has the buffer.
    pub(crate) fn enter(fresh: &mut Fresh, origin: CheckoutSite) {
        fresh.track();
        let segment = fresh.segment();
        segment.central().lock().as_is().enter(segment, origin);
    }

    /// Starts the ledger's entry of a segment anew, if it has one.
    pub(crate) fn enter_again(&self, segment: &Segment, origin: CheckoutSite) {
        let mut core = self.lock();
        if core.ledger.has(segment.name()) {
            core.as_is().enter(segment, origin);
        }
    }

    /// The segments that the ledger has, or that are quarantined, for `threshold` or longer.
    pub(crate) fn out_for(&self, threshold: Duration) -> Vec<OutSegment> {
        let core = self.lock();
        let ledger = &core.ledger;
        let entered = ledger.entries().map(|(at, entry)| (entry.run, at, entry.since, Some(*entry)));
        let quarantined = core.quarantined_segments.iter().filter(|(_, at, _)| !ledger.has(*at));
        let quarantined = quarantined.map(|&(run, at, since)| (run, at, since, None));
        let now = Instant::now();
        let old = |since: Instant| now.saturating_duration_since(since) >= threshold;
        let found = entered.chain(quarantined).filter(|(_, _, since, _)| old(*since));
        let out = found.filter_map(|(run, at, since, entry)| {
            let (descriptor, granted) = core.arena.descriptor_at(run, at)?;
            Some(OutSegment { descriptor: at, state: descriptor.word().state(), granted, since, entry })
        });
        out.collect()
    }

    /// Counts a change of a copier's bytes in flight without entries, which no timeline counts.
    pub(crate) fn unlisted_in_flight(&self, change: isize) {
        // Relaxed, here and below: sums, not signals.
        self.unlisted.fetch_add(change as u64, StdOrdering::Relaxed);
    }

    /// Counts a change of the bytes in flight on one timeline alone, and of the claimed ones among
    /// them. The caller holds that timeline's lock.
    pub(crate) fn change_flight(&self, bytes: isize, claimed: isize) {
        for (sum, change) in self.flight.iter().zip([bytes, claimed]).filter(|(_, change)| *change != 0) {
            sum.fetch_add(change as u64, StdOrdering::Relaxed);
        }
    }

    /// Bytes that timelines hold in flight, each on one alone, and those of them that are claimed.
    pub(crate) fn flight(&self) -> (usize, usize) {
        let [bytes, claimed] = self.flight.each_ref().map(|sum| sum.load(StdOrdering::Relaxed) as usize);
        (bytes, claimed)
    }

    /// Makes a change in several steps, and tells checks meanwhile that it is under way.
    pub(crate) fn in_one<R>(&self, change: impl FnOnce(&Self) -> R) -> R {
        // AcqRel, then release: as for a lock. Pairs with the load in `unlisted_bytes`.
        self.halfway.fetch_add(1, StdOrdering::AcqRel);
        let made = change(self);
        self.halfway.fetch_sub(1, StdOrdering::Release);
        made
    }

    /// The bytes in flight of copiers without entries, and whether no change of them is under way.
    pub(crate) fn unlisted_bytes(&self) -> (usize, bool) {
        // Acquire: pairs with `in_one`.
        let stable = self.halfway.load(StdOrdering::Acquire) == 0;
        (self.unlisted.load(StdOrdering::Relaxed) as usize, stable)
    }
}

impl Core {
    fn enter(&mut self, segment: &Segment, origin: CheckoutSite) {
        self.ledger.enter(segment.name(), segment.descriptor().run(), segment.len(), origin);
    }

    /// What was counted of each class, under the lock and by threads. Exact while owners are shut
    /// out.
    pub(super) fn tally(&self) -> ClassTally {
        let mut tally = self.classes.clone();
        self.table.caches().for_each(|cache| count_on(&mut tally, cache));
        tally
    }

    /// Counts on what a thread cache has counted that leaves the table. Its owner has ended.
    pub(super) fn count_on(&mut self, cache: &ThreadCache) {
        self.requested = self.requested.wrapping_add(cache.requested());
        count_on(&mut self.classes, cache);
    }

    /// The bytes and counts, with `out` bytes out. A call under way may be counted on one
    /// side only: `out` is clamped to what is possible.
    fn snapshot(&self, takes: u64, puts: u64, out: u64) -> CentralSnapshot {
        let bytes = self.arena.bytes();
        let requested = |sum: u64, cache: &Arc<ThreadCache>| sum.wrapping_add(cache.requested());
        let requested = self.table.caches().fold(self.requested, requested);
        let taken = (out as i64).max(0) as usize;
        let taken = taken.min(bytes.total - bytes.cut).max(self.quarantined);
        let free = bytes.total - bytes.cut - taken;
        CentralSnapshot {
            total: bytes.total,
            unpinned: self.arena.unpinned(),
            free,
            cached: free.saturating_sub(bytes.free),
            out: taken - self.quarantined,
            requested: (requested as i64).max(0) as usize,
            quarantined: self.quarantined,
            quarantined_segments: self.quarantined_segments.len() as u64,
            cut: bytes.cut,
            largest_free: bytes.largest_free,
            takes,
            puts,
            waiting: self.queue.waiting.len(),
            stats: self.stats,
        }
    }

    /// The classes that were ever used, smallest first, and last the segments without one. Of the
    /// segments that a class's runs were cut into, those are free that are not out, and those
    /// cached that are neither out nor in the runs' lists.
    fn by_class(&self, tally: &ClassTally) -> Vec<ClassStats> {
        let mut cut = [(0, 0); CLASSES];
        self.arena.for_each_class(|class, segments, in_runs| {
            let (all, free) = &mut cut[class.index()];
            *all += segments;
            *free += in_runs;
        });
        let of_class = |class: Class| {
            let ((segments, in_runs), (takes, puts)) = (cut[class.index()], tally.of(Some(class)));
            let out = ((takes.wrapping_sub(puts) as i64).max(0) as u64).min(segments);
            let (free, out_bytes) = (segments - out, out as usize * class.stride());
            let cached = free.saturating_sub(in_runs);
            let stride = Some(class.stride());
            ClassStats { stride, free, cached, out, out_bytes, checkouts: takes, returns: puts }
        };
        let (takes, puts) = tally.of(None);
        let (out, out_bytes) = (takes.wrapping_sub(puts), tally.large_bytes());
        let large = ClassStats { out, out_bytes, checkouts: takes, returns: puts, ..ClassStats::default() };
        Class::all().map(of_class).chain([large]).filter(|class| class.checkouts > 0).collect()
    }
}

/// Counts on what a thread cache has counted.
fn count_on(tally: &mut ClassTally, cache: &ThreadCache) {
    for class in listed() {
        let (takes, puts) = cache.count(class);
        tally.count_on(class, takes, puts);
    }
}
