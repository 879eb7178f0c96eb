//! The census: the bytes and counts of a central pool, by size class too, and a list of everything that is out.
//!
//! A snapshot adds up what the thread caches have counted, without stopping their owners. It holds the central pool's
//! lock, so nothing moves on the slow path meanwhile. Calls on the fast path go on. So each part is exact while no such
//! call is under way, and otherwise off by no more than the calls that are: one segment for a call, or, where a call
//! fills or empties a thread's list, as many as that list may hold. The snapshot reads each thread cache's numbers once
//! and derives everything from that one reading. So the parts sum to the whole at any time.
//!
//! A *look* lists all segments that are out. It takes longer, and goes batch by batch. Under the lock a batch of
//! descriptors is copied; for a moment all owners are shut out of their thread caches, to learn what these cache.
//! Everything else is derived with the lock released. So no other thread waits longer than for one batch, no matter how
//! large the pool is.

use std::time::{Duration, Instant};

use super::{CentralPool, CentralSnapshot, Core, Fresh, Segment, StdOrdering, mode};
use crate::freelist::{Descriptor, Word, state};
use crate::segment::{CLASSES, Class};
use crate::telemetry::counters::Histogram;
use crate::telemetry::ledger::{CheckoutSite, LedgerEntry, TrackedCheckout};

/// The least number of descriptors in a batch of a look.
const CENSUS_BATCH: usize = if cfg!(loom) { 1 } else { 4096 };

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

/// A segment that is out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutSegment {
    /// The descriptor's address. It is only compared.
    pub(crate) descriptor: usize,
    pub(crate) state: u16,
    pub(crate) granted: usize,
    /// How long the segment had been out when the look saw it.
    pub(crate) age: Duration,
    /// The segment's entry in the ledger.
    pub(crate) entry: LedgerEntry,
}

/// A segment that is out, as it is copied under the lock.
#[derive(Debug)]
struct FoundDescriptor {
    /// The segment's place in the arena, as [`Arena::for_each_given`](crate::arena::Arena::for_each_given) numbers
    /// them.
    place: u64,
    descriptor: usize,
    word: Word,
    granted: usize,
}

/// What a look copies in one batch. A look uses one value for all batches, to allocate its memory once.
#[derive(Debug, Default)]
struct CensusBatch {
    /// The runs and descriptor addresses of all cached segments.
    cached: Vec<(u32, usize)>,
    found: Vec<FoundDescriptor>,
    /// Those of `found` that are in the ledger: the index in `found`, and the entry.
    entered: Vec<(usize, LedgerEntry)>,
    /// Number of segments that came back so far, by class; the last is for segments without a class.
    returns: Vec<u64>,
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
            quarantined_segments: core.quarantined_segments,
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
        segment.central().lock().books().ledger.enter(name(segment.descriptor()), segment.len(), origin);
    }

    /// Starts the ledger's entry of a segment anew, if it has one.
    pub(crate) fn enter_again(&self, segment: &Segment, origin: CheckoutSite) {
        let mut core = self.lock();
        if core.books.ledger.has(name(segment.descriptor())) {
            core.books().ledger.enter(name(segment.descriptor()), segment.len(), origin);
        }
    }

    /// Lists the segments that are known to have been out for at least `threshold`, in no particular order. Walks the
    /// segments of all runs; the head of this module says how. A segment that goes out or comes back meanwhile may be
    /// listed or not.
    pub(crate) fn out_for(&self, threshold: Duration) -> Vec<OutSegment> {
        let mut out = Vec::new();
        if crate::os::forked() {
            return out;
        }
        // Another look waits here for this one. No caller holds another lock of the crate.
        let mut sightings = self.sightings.lock();
        let mut look = sightings.look();
        let (mut batch, mut next) = (CensusBatch::default(), Some(0));
        while let Some(from) = next {
            next = self.copy_batch(from, &mut batch);
            // After the batch was copied, so that no segment counts as seen earlier than it was.
            let now = Instant::now();
            let mut entered = batch.entered.iter().peekable();
            for (i, found) in batch.found.iter().enumerate() {
                let entry = match entered.next_if(|(index, _)| *index == i) {
                    Some((_, entry)) => *entry,
                    None => look.see(found.checkout(&batch.returns), now),
                };
                let age = now.saturating_duration_since(entry.since);
                if age >= threshold {
                    let FoundDescriptor { descriptor, word, granted, .. } = *found;
                    out.push(OutSegment { descriptor, state: word.state(), granted, age, entry });
                }
            }
        }
        look.end();
        out
    }

    /// Copies what is out of the runs from the number `from` on, as many runs as make a batch. Returns the number to go
    /// on from, if there are more.
    fn copy_batch(&self, from: usize, batch: &mut CensusBatch) -> Option<usize> {
        let CensusBatch { cached, found, entered, returns } = batch;
        cached.clear();
        found.clear();
        entered.clear();
        returns.clear();
        let core = self.lock();
        let mut note = |descriptor: &Descriptor| cached.push((descriptor.run(), name(descriptor)));
        self.gate.quiesce(mode::INSPECT, &core.table);
        for held in core.table.quiet() {
            Class::all().for_each(|class| held.for_each(class, &mut note));
        }
        self.transfers.iter().for_each(|transfer| transfer.for_each(&mut note));
        // Counted while owners are still shut out: a segment that comes back after this shows in the next look's
        // counts.
        returns.extend(Class::all().map(Some).chain([None]).map(|class| core.returns(class)));
        self.gate.readmit(mode::INSPECT, &core.table);
        // From here on hits go on: a cached segment may go out, and the other way round. But nothing enters or leaves a
        // run as long as this thread holds the lock. The batch has at least as many descriptors as are cached, since
        // each batch looks at all of these.
        core.arena.for_each_given(
            from,
            CENSUS_BATCH.max(cached.len()),
            cached,
            |place, descriptor, granted| {
                if let Some(entry) = core.books.ledger.get(name(descriptor)) {
                    entered.push((found.len(), entry));
                }
                found.push(FoundDescriptor {
                    place,
                    descriptor: name(descriptor),
                    word: descriptor.word(),
                    granted,
                });
            },
        )
    }

    /// Counts a change of the bytes that several timelines hold at once. None of these timelines counts them.
    pub(crate) fn joint_in_flight(&self, change: isize) {
        // Relaxed: a sum, not a signal.
        self.joint.fetch_add(change as u64, StdOrdering::Relaxed);
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
        // AcqRel, then release: as for a lock. Pairs with the load in `joint_bytes`.
        self.halfway.fetch_add(1, StdOrdering::AcqRel);
        let made = change(self);
        self.halfway.fetch_sub(1, StdOrdering::Release);
        made
    }

    /// The bytes that several timelines hold at once, and whether no change of them is under way.
    pub(crate) fn joint_bytes(&self) -> (usize, bool) {
        // Acquire: pairs with `in_one`.
        let stable = self.halfway.load(StdOrdering::Acquire) == 0;
        (self.joint.load(StdOrdering::Relaxed) as usize, stable)
    }
}

impl FoundDescriptor {
    fn checkout(&self, returns: &[u64]) -> TrackedCheckout {
        TrackedCheckout {
            place: self.place,
            generation: self.word.generation(),
            // A segment in flight cannot have been returned and checked out again: that would be another generation.
            returns: (self.word.state() == state::HOST)
                .then(|| returns[self.word.class().map_or(CLASSES, Class::index)]),
        }
    }
}

impl Core {
    /// Number of segments of a class that came back so far. Exact while all owners are shut out.
    fn returns(&self, class: Option<Class>) -> u64 {
        let here = self.classes.of(class).1;
        let caches = self.table.caches().filter_map(|cache| class.map(|class| cache.count(class).puts));
        caches.fold(here, u64::wrapping_add)
    }

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
