//! Looking at a central pool: its bytes and counts, by size class too, and everything that is out.
//!
//! What threads count in their thread caches is added up without stopping them. Under the central pool's lock nothing
//! moves on the slow path meanwhile; calls on the fast path do, so each part is exact when nobody moves, and otherwise
//! off by no more than the calls that are made while it is looked: one segment each, or, where a call fills or empties
//! a thread's list, as many as that list may hold. Each thread cache's numbers are read once, and everything is worked
//! out from that one reading. So the parts sum to the whole at any time.
//!
//! Looking at all that is out takes longer, and goes piece by piece: under the lock, and for a moment with everyone
//! kept out of the thread caches to learn what these cache, a piece is put down in numbers; what follows from them is
//! worked out with the lock released. So nobody waits longer than for a piece, whatever the pool's size.

use std::time::{Duration, Instant};

use super::{CentralPool, CentralSnapshot, Core, Fresh, Segment, StdOrdering, mode};
use crate::freelist::{Descriptor, Word, state};
use crate::segment::{CLASSES, Class};
use crate::telemetry::counters::Histogram;
use crate::telemetry::ledger::{CheckoutSite, LedgerEntry, TrackedCheckout};

/// Descriptors that are looked at in one go, under the lock, at least.
const CENSUS_BATCH: usize = if cfg!(loom) { 1 } else { 4096 };

/// Segments of one size class. `None` for those without: large or aligned ones, which have a run of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClassCount {
    pub(crate) class: Option<Class>,
    /// Segments that were cut and can be checked out.
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
    /// Stands for its descriptor. Only to be compared.
    pub(crate) descriptor: usize,
    pub(crate) state: u16,
    pub(crate) granted: usize,
    /// How long it had been out when it was seen.
    pub(crate) age: Duration,
    /// What the ledger has on it.
    pub(crate) entry: LedgerEntry,
}

/// A segment that is out, as it is put down under the lock.
#[derive(Debug)]
struct FoundDescriptor {
    place: u64,
    descriptor: usize,
    word: Word,
    granted: usize,
}

/// What a look puts down of one piece. Kept from one to the next for its memory's sake.
#[derive(Debug, Default)]
struct CensusBatch {
    /// The runs and addresses of all that is cached.
    cached: Vec<(u32, usize)>,
    found: Vec<FoundDescriptor>,
    /// Those of them that are entered in the ledger: their index, and the entry.
    entered: Vec<(usize, LedgerEntry)>,
    /// Segments that came back so far, by class and, last, without one.
    returns: Vec<u64>,
}

/// What stands for a descriptor.
fn name(descriptor: &Descriptor) -> usize {
    std::ptr::from_ref(descriptor).addr()
}

impl CentralPool {
    /// Bytes and counts. Exact when nobody moves; otherwise the parts still sum to the whole.
    pub(crate) fn snapshot(&self) -> CentralSnapshot {
        self.count(&self.core.lock(), None)
    }

    /// The same, with the parts by size class, of which those that were ever used are listed.
    pub(crate) fn snapshot_by_class(&self) -> (CentralSnapshot, Vec<ClassCount>) {
        let mut classes = Vec::new();
        let snapshot = self.count(&self.core.lock(), Some(&mut classes));
        (snapshot, classes)
    }

    fn count(&self, core: &Core, classes: Option<&mut Vec<ClassCount>>) -> CentralSnapshot {
        let bytes = core.arena.bytes();
        let (mut takes, mut puts, mut out, mut requested) =
            (core.takes, core.puts, core.granted, core.requested);
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
                    #[cfg(pinpool_planted = "classes_counted_apart")]
                    let count = cache.count(class);
                    let all = &mut by_class[class.index()];
                    all.takes = all.takes.wrapping_add(count.takes);
                    all.puts = all.puts.wrapping_add(count.puts);
                }
            }
        }
        if let (Some(classes), Some(by_class)) = (classes, by_class) {
            classes.extend(by_class.into_iter().map(ClassCount::settled).filter(ClassCount::is_used));
            // The sum of the parts, each as it is shown.
            out = classes.iter().map(|c| c.out_bytes as u64).sum();
        }
        // A call under way may be counted on one side only: never below nothing, never more than there is.
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
            takes,
            puts,
            waiting: core.queue.len(),
            growing: core.growing,
            stats: core.stats,
        }
    }

    /// How long requests waited for memory, and how long buffers that were timed were out.
    pub(crate) fn histograms(&self) -> (Histogram, Histogram) {
        let core = self.core.lock();
        (*core.queue.waited(), *core.ledger.holding())
    }

    /// Whether every checkout is to be entered in the ledger.
    pub(crate) fn tracks(&self) -> bool {
        self.config.track
    }

    /// Enters a checkout in the ledger, before anybody else has the buffer.
    pub(crate) fn enter(fresh: &mut Fresh, origin: CheckoutSite) {
        fresh.track();
        let segment = fresh.segment();
        segment.central().core.lock().ledger.enter(name(segment.descriptor()), segment.len(), origin);
    }

    /// The same for a segment that may be in it already: then its entry starts anew, else none is made.
    pub(crate) fn enter_again(&self, segment: &Segment, origin: CheckoutSite) {
        let mut core = self.core.lock();
        if core.ledger.has(name(segment.descriptor())) {
            core.ledger.enter(name(segment.descriptor()), segment.len(), origin);
        }
    }

    /// Everything that has been out for at least `threshold`, as far as that is known, in no certain order. Walks all
    /// segments that were cut; the module's page says how. What comes and goes meanwhile may be there or not.
    pub(crate) fn out_for(&self, threshold: Duration) -> Vec<OutSegment> {
        let mut out = Vec::new();
        if crate::os::forked() {
            return out;
        }
        // Who else looks waits for us. Nobody who holds a lock of ours comes here.
        let mut sightings = self.sightings.lock();
        let mut look = sightings.look();
        let (mut piece, mut next) = (CensusBatch::default(), Some(0));
        while let Some(from) = next {
            next = self.put_down(from, &mut piece);
            // Later than all that was seen, so that nothing is taken to have been seen for longer than it was.
            let now = Instant::now();
            let mut entered = piece.entered.iter().peekable();
            for (i, found) in piece.found.iter().enumerate() {
                let entry = match entered.next_if(|(index, _)| *index == i) {
                    Some((_, entry)) => *entry,
                    None => look.see(found.checkout(&piece.returns), now),
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

    /// Puts down what is out of the runs from this number on, as many as make a piece. Where to go on, if there are
    /// more.
    fn put_down(&self, from: usize, piece: &mut CensusBatch) -> Option<usize> {
        let CensusBatch { cached, found, entered, returns } = piece;
        cached.clear();
        found.clear();
        entered.clear();
        returns.clear();
        let core = self.core.lock();
        let mut note = |descriptor: &Descriptor| cached.push((descriptor.run(), name(descriptor)));
        self.gate.quiesce(mode::INSPECT, &core.table);
        for held in core.table.quiet() {
            Class::all().for_each(|class| held.for_each(class, &mut note));
        }
        self.transfers.iter().for_each(|transfer| transfer.for_each(&mut note));
        // With what is cached: what comes back from here on has been out, and shows in the next look's numbers.
        returns.extend(Class::all().map(Some).chain([None]).map(|class| core.returns(class)));
        self.gate.readmit(mode::INSPECT, &core.table);
        // From here on hits go on: what is cached now may go out, and the other way round, but nothing enters or leaves
        // a run as long as we have the lock.
        // As many as are cached at least, since each piece looks at all of these.
        core.arena.for_each_given(
            from,
            CENSUS_BATCH.max(cached.len()),
            cached,
            |place, descriptor, granted| {
                if let Some(entry) = core.ledger.get(name(descriptor)) {
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

    /// Books bytes that several timelines hold together, which none of them counts.
    pub(crate) fn joint_in_flight(&self, change: isize) {
        // Relaxed: a sum, not a signal.
        self.joint.fetch_add(change as u64, StdOrdering::Relaxed);
    }

    /// Makes a change that takes several steps, so that a check does not take it half-way.
    pub(crate) fn in_one<R>(&self, change: impl FnOnce(&Self) -> R) -> R {
        // AcqRel, release: as for a lock. Pairs with the load in `joint_bytes`.
        self.halfway.fetch_add(1, StdOrdering::AcqRel);
        let made = change(self);
        self.halfway.fetch_sub(1, StdOrdering::Release);
        made
    }

    /// What is reserved there, and whether no change is half-way.
    pub(crate) fn joint_bytes(&self) -> (usize, bool) {
        // Acquire: pairs with `in_one`.
        let settled = self.halfway.load(StdOrdering::Acquire) == 0;
        (self.joint.load(StdOrdering::Relaxed) as usize, settled)
    }
}

impl FoundDescriptor {
    fn checkout(&self, returns: &[u64]) -> TrackedCheckout {
        TrackedCheckout {
            place: self.place,
            generation: self.word.generation(),
            // On its way it cannot have been returned and checked out again: that would be another generation.
            returns: (self.word.state() == state::HOST)
                .then(|| returns[self.word.class().map_or(CLASSES, Class::index)]),
        }
    }
}

impl Core {
    /// Segments of a class that came back so far. Exact while everyone is kept out.
    fn returns(&self, class: Option<Class>) -> u64 {
        let here = self.classes.of(class).1;
        let caches = self.table.caches().filter_map(|cache| class.map(|class| cache.count(class).puts));
        caches.fold(here, u64::wrapping_add)
    }

    /// What is counted under the lock, for each class by its index, and then for what has none.
    fn by_class(&self) -> Vec<ClassCount> {
        let count = |class: Option<Class>| {
            let (takes, puts) = self.classes.of(class);
            ClassCount { class, free: 0, cached: 0, out: 0, out_bytes: 0, takes, puts }
        };
        let mut all: Vec<ClassCount> = Class::all().map(Some).chain([None]).map(count).collect();
        // All that were cut, until it is known how many of them are out.
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
    /// Divides what was cut into what is out and what is free.
    fn settled(mut self) -> Self {
        if let Some(class) = self.class {
            let out = (self.takes.wrapping_sub(self.puts) as i64).max(0) as u64;
            self.out = out.min(self.free);
            self.out_bytes = self.out as usize * class.stride();
            self.free -= self.out;
            // What is not in its run is out or cached.
            self.cached = self.cached.saturating_sub(self.out);
        }
        self
    }

    fn is_used(&self) -> bool {
        self.takes > 0 || self.free > 0
    }
}
