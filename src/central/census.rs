//! The census: the bytes and counts of a central pool, by size class too, and a list of what is known to be out for long.
//!
//! A snapshot adds up what the thread caches have counted, without stopping their owners. It holds the central pool's
//! lock, so nothing moves on the slow path meanwhile. Calls on the fast path go on. So each part is exact while no such
//! call is under way, and otherwise off by no more than the calls that are: one segment for a call, or, where a call
//! fills or empties a thread's list, as many as that list may hold. The snapshot reads each thread cache's numbers once
//! and derives everything from that one reading. So the parts sum to the whole at any time.

use std::time::{Duration, Instant};

use super::{Books, CentralPool, CentralSnapshot, Core, Fresh, Segment, StdOrdering};
use crate::freelist::Descriptor;
use crate::segment::Class;
use crate::telemetry::counters::Histogram;
use crate::telemetry::ledger::{CheckoutSite, LedgerEntry};

/// Segments of one size class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClassCount {
    /// `None`: the large and aligned segments, which have a run of their own.
    pub(crate) class: Option<Class>,
    /// Segments of runs that can be checked out.
    pub(crate) free: u64,
    /// Of these, those in thread caches and transfer caches.
    pub(crate) cached: u64,
    /// Checked out, in flight or quarantined.
    pub(crate) out: u64,
    /// Bytes of these.
    pub(crate) out_bytes: usize,
    pub(crate) takes: u64,
    pub(crate) puts: u64,
}

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

/// The number that identifies a descriptor: its address.
fn name(descriptor: &Descriptor) -> usize {
    std::ptr::from_ref(descriptor).addr()
}

impl CentralPool {
    /// Bytes and counts. Exact while no call is under way; the parts sum to the whole at any time.
    pub(crate) fn snapshot(&self) -> CentralSnapshot {
        self.count(&self.lock(), None)
    }

    /// The same, with the size classes that were ever used.
    pub(crate) fn snapshot_by_class(&self) -> (CentralSnapshot, Vec<ClassCount>) {
        let mut classes = Vec::new();
        let snapshot = self.count(&self.lock(), Some(&mut classes));
        (snapshot, classes)
    }

    fn count(&self, core: &Core, classes: Option<&mut Vec<ClassCount>>) -> CentralSnapshot {
        let bytes = core.arena.bytes();
        let (mut takes, mut puts, mut out, mut requested) =
            (core.takes, core.puts, core.granted, core.books.requested);
        let mut by_class = classes.as_ref().map(|_| core.by_class());
        for cache in core.table.caches() {
            requested = requested.wrapping_add(cache.requested());
            for class in Class::all() {
                let count = cache.count(class);
                takes = takes.wrapping_add(count.takes);
                puts = puts.wrapping_add(count.puts);
                let net = count.takes.wrapping_sub(count.puts);
                out = out.wrapping_add(net.wrapping_mul(class.stride() as u64));
                if let Some(by_class) = &mut by_class {
                    let all = &mut by_class[class.index()];
                    all.takes = all.takes.wrapping_add(count.takes);
                    all.puts = all.puts.wrapping_add(count.puts);
                }
            }
        }
        if let (Some(classes), Some(by_class)) = (classes, by_class) {
            classes.extend(by_class.into_iter().map(ClassCount::divided).filter(ClassCount::is_used));
            // The sum of the classes as they are reported, so that the two agree.
            out = classes.iter().map(|c| c.out_bytes as u64).sum();
        }
        // A call under way may be counted on one side only: the result is clamped to what is possible.
        let taken = (out as i64).max(0) as usize;
        let taken = taken.min(bytes.total - bytes.cut).max(core.quarantined);
        let free = bytes.total - bytes.cut - taken;
        CentralSnapshot {
            total: bytes.total,
            unpinned: bytes.unpinned,
            free,
            cached: free.saturating_sub(bytes.free),
            out: taken - core.quarantined,
            requested: (requested as i64).max(0) as usize,
            quarantined: core.quarantined,
            quarantined_segments: core.quarantined_segments.len() as u64,
            cut: bytes.cut,
            largest_free: bytes.largest_free,
            withheld: bytes.withheld,
            takes,
            puts,
            waiting: core.queue.len(),
            growing: core.growing,
            stats: core.stats,
        }
    }

    /// The most bytes that were in use or cached at a time since the call before, or since the pool was built.
    pub(crate) fn take_peak(&self) -> usize {
        self.lock().arena.take_peak()
    }

    /// How long requests waited for memory, and how long timed buffers were out.
    pub(crate) fn histograms(&self) -> (Histogram, Histogram) {
        let core = self.lock();
        (*core.queue.waited(), *core.books.ledger.holding())
    }

    /// Whether every checkout is to be entered in the ledger.
    pub(crate) fn tracks(&self) -> bool {
        self.config.track
    }

    /// Enters a checkout in the ledger, before any other thread has the buffer.
    pub(crate) fn enter(fresh: &mut Fresh, origin: CheckoutSite) {
        fresh.track();
        let segment = fresh.segment();
        segment.central().lock().books().enter(segment, origin);
    }

    /// Starts the ledger's entry of a segment anew, if it has one.
    pub(crate) fn enter_again(&self, segment: &Segment, origin: CheckoutSite) {
        let mut core = self.lock();
        if core.books.ledger.has(name(segment.descriptor())) {
            core.books().enter(segment, origin);
        }
    }

    /// The segments that the ledger has, or that are quarantined, for at least `threshold`, in no particular order.
    pub(crate) fn out_for(&self, threshold: Duration) -> Vec<OutSegment> {
        let core = self.lock();
        let ledger = &core.books.ledger;
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

    /// Counts a change of the bytes that a copier has in flight without entries of their own. No timeline counts them.
    pub(crate) fn unlisted_in_flight(&self, change: isize) {
        // Relaxed: a sum, not a signal.
        self.unlisted.fetch_add(change as u64, StdOrdering::Relaxed);
    }

    /// Counts a change of the bytes that one timeline alone holds in flight, and of those that are claimed. The caller
    /// holds that timeline's lock.
    pub(crate) fn change_flight(&self, bytes: isize, claimed: isize) {
        // Relaxed, here and below: sums, not signals.
        for (sum, change) in self.flight.iter().zip([bytes, claimed]) {
            if change != 0 {
                sum.fetch_add(change as u64, StdOrdering::Relaxed);
            }
        }
    }

    /// Bytes that timelines hold in flight, each of them one timeline alone, and those of them that are claimed.
    pub(crate) fn flight(&self) -> (usize, usize) {
        let [bytes, claimed] = [0, 1].map(|i: usize| self.flight[i].load(StdOrdering::Relaxed) as usize);
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

    /// The bytes that a copier has in flight without entries of their own, and whether no change of them is under way.
    pub(crate) fn unlisted_bytes(&self) -> (usize, bool) {
        // Acquire: pairs with `in_one`.
        let stable = self.halfway.load(StdOrdering::Acquire) == 0;
        (self.unlisted.load(StdOrdering::Relaxed) as usize, stable)
    }
}

impl Books {
    fn enter(&mut self, segment: &Segment, origin: CheckoutSite) {
        let descriptor = segment.descriptor();
        self.ledger.enter(name(descriptor), descriptor.run(), segment.len(), origin);
    }
}

impl Core {
    /// What is counted under the lock, for each class by its index; the last is for segments without a class.
    fn by_class(&self) -> Vec<ClassCount> {
        let count = |class: Option<Class>| {
            let (takes, puts) = self.classes.of(class);
            ClassCount { class, free: 0, cached: 0, out: 0, out_bytes: 0, takes, puts }
        };
        let mut all: Vec<ClassCount> = Class::all().map(Some).chain([None]).map(count).collect();
        // Here `free` holds all segments of the class's runs, and `cached` those that the runs' lists do not hold.
        // `divided` subtracts those that are out.
        self.arena.for_each_class(|class, segments, in_runs| {
            all[class.index()].free += segments;
            all[class.index()].cached += segments - in_runs;
        });
        if let Some(large) = all.last_mut() {
            large.out = large.takes.wrapping_sub(large.puts);
            large.out_bytes = self.classes.large_bytes();
        }
        all
    }
}

impl ClassCount {
    /// Divides the segments of the class's runs into those that are out and those that are free.
    fn divided(mut self) -> Self {
        if let Some(class) = self.class {
            let out = (self.takes.wrapping_sub(self.puts) as i64).max(0) as u64;
            self.out = out.min(self.free);
            self.out_bytes = self.out as usize * class.stride();
            self.free -= self.out;
            // A segment that its run's list does not hold is out or cached.
            self.cached = self.cached.saturating_sub(self.out);
        }
        self
    }

    fn is_used(&self) -> bool {
        self.takes > 0 || self.free > 0
    }
}
