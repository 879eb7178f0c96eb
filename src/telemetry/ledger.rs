//! The ledger: since when a segment is out, and who asked for it.
//!
//! A hit reads no clock, so of most buffers nobody knows when they were checked out. Three sources make up for it, all
//! of them off the hit path. The first two are kept under the central pool's lock, the third under one that only looks
//! take:
//!
//! - *Tracked pools* ([`PoolBuilder::track_checkouts`](crate::PoolBuilder::track_checkouts)) have no thread caches, so
//!   every checkout and return takes the slow path, and each is entered here with its time, tag and call site.
//! - *Samples*: other pools enter one in [`SAMPLE`] of the checkouts that nothing cached could serve.
//! - *Looks*: whoever looks at all that is out notes since when he has seen it. It has been out for so long at least.
//!
//! The return of an entered segment leaves the fast path, by a comparison that each return makes in any case (whether
//! its list has room: to the name that such a buffer has of its segment no list belongs), and closes the entry. So an
//! entry always is of the checkout that it was made for, and is counted into the histogram of holding when that ends.
//!
//! What was only seen returns unnoticed, and may be out again at the next look. That is told apart by what cannot go
//! back: the generation, which grows with each flight, and, for what is in somebody's hands, the number of segments of
//! its class that ever came back. Only if that has not grown it is certainly the same checkout; else its time starts
//! anew. So the age of a buffer that was only seen is never too long, and in a class with much coming and going it is
//! always about nothing: who looks for a leak there has the pool track its checkouts.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::panic::Location;
use std::time::Instant;

use super::counters::Histogram;

/// One in so many of the checkouts that take the slow path is timed.
pub(crate) const SAMPLE: u64 = 8;

/// Who asked for a segment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CheckoutSite {
    pub(crate) tag: Option<&'static str>,
    pub(crate) site: Option<&'static Location<'static>>,
}

/// What is known of a checkout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LedgerEntry {
    /// When it was checked out, or first seen.
    pub(crate) since: Instant,
    /// Whether that is when it was checked out.
    pub(crate) exact: bool,
    /// Bytes asked for, if that is known.
    pub(crate) len: Option<usize>,
    pub(crate) origin: CheckoutSite,
}

/// A segment that a look finds out, and what tells this checkout from a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TrackedCheckout {
    /// Where it is in the arena: looks come by in this order.
    pub(crate) place: u64,
    pub(crate) generation: u64,
    /// Where it is in somebody's hands: segments of its class that came back so far.
    pub(crate) returns: Option<u64>,
}

/// Hashes addresses. They are ours, so nobody chooses them to collide, and a multiplication (by 2^64 over the golden
/// ratio) spreads them: the product's upper half differs in the lowest bits, its lower half in the topmost, and tables
/// go by both.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_usize((*byte).into()));
    }

    fn write_usize(&mut self, n: usize) {
        let product = u128::from(self.0 ^ n as u64) * 0x9E37_79B9_7F4A_7C15;
        self.0 = product as u64 ^ (product >> 64) as u64;
    }
}

/// Checkouts that were entered. Descriptors are named by their address, which is theirs for as long as they are out.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    out: HashMap<usize, LedgerEntry, BuildHasherDefault<AddressHasher>>,
    holding: Histogram,
}

impl Ledger {
    /// A segment goes out.
    pub(crate) fn enter(&mut self, descriptor: usize, len: usize, origin: CheckoutSite) {
        self.out
            .insert(descriptor, LedgerEntry { since: Instant::now(), exact: true, len: Some(len), origin });
    }

    pub(crate) fn has(&self, descriptor: usize) -> bool {
        self.out.contains_key(&descriptor)
    }

    pub(crate) fn get(&self, descriptor: usize) -> Option<LedgerEntry> {
        self.out.get(&descriptor).copied()
    }

    /// A segment is back.
    pub(crate) fn close(&mut self, descriptor: usize) {
        // Most pools have few entries, and most returns that come here none.
        if self.out.is_empty() {
            return;
        }
        if let Some(entry) = self.out.remove(&descriptor) {
            self.holding.record(entry.since.elapsed());
        }
    }

    /// Times of those that came back.
    pub(crate) fn holding(&self) -> &Histogram {
        &self.holding
    }
}

/// What the last look found that had no entry, in order of places, and when that was first seen. Not under the central
/// pool's lock: those who look are the only ones to need it.
#[derive(Debug, Default)]
pub(crate) struct Sightings {
    seen: Vec<(TrackedCheckout, Instant)>,
}

/// A look at everything that is out.
#[derive(Debug)]
pub(crate) struct SightingRound<'a> {
    sightings: &'a mut Sightings,
    /// How far it has come in the last look's.
    at: usize,
    seen: Vec<(TrackedCheckout, Instant)>,
}

impl Sightings {
    /// Begins a look.
    pub(crate) fn look(&mut self) -> SightingRound<'_> {
        let seen = Vec::with_capacity(self.seen.len());
        SightingRound { sightings: self, at: 0, seen }
    }
}

impl SightingRound<'_> {
    /// A segment without an entry was seen out, not later than `now`. Places come in ascending order. What is known of
    /// it.
    pub(crate) fn see(&mut self, checkout: TrackedCheckout, now: Instant) -> LedgerEntry {
        let same = |before: &TrackedCheckout| {
            // Landed or waited for since, it is the same one still, as far as nothing came back.
            (before.place, before.generation) == (checkout.place, checkout.generation)
                && checkout.returns.is_none_or(|now| before.returns.is_some_and(|before| before == now))
        };
        let earlier = &self.sightings.seen;
        while earlier.get(self.at).is_some_and(|(before, _)| before.place < checkout.place) {
            self.at += 1;
        }
        let before = earlier.get(self.at).filter(|(before, _)| same(before));
        let since = before.map_or(now, |(_, since)| *since);
        self.seen.push((checkout, since));
        LedgerEntry { since, exact: false, len: None, origin: CheckoutSite::default() }
    }

    /// Everything was seen; what was not is forgotten.
    pub(crate) fn end(self) {
        self.sightings.seen = self.seen;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::hash::BuildHasher;

    use super::*;

    #[test]
    fn what_is_entered_is_counted_once() {
        let mut ledger = Ledger::default();
        ledger.close(1);
        ledger.enter(1, 10, CheckoutSite { tag: Some("a"), site: None });
        let entry = ledger.get(1).unwrap();
        assert_eq!((entry.exact, entry.len, entry.origin.tag), (true, Some(10), Some("a")));
        [1, 1].into_iter().for_each(|descriptor| ledger.close(descriptor));
        assert_eq!(ledger.holding().count(), 1);
        assert!(!ledger.has(1));
    }

    #[test]
    fn only_what_is_certainly_the_same_grows_older() {
        let mut sightings = Sightings::default();
        let mut see = |generation, returns| {
            let mut look = sightings.look();
            let now = Instant::now();
            let entry = look.see(TrackedCheckout { place: 1, generation, returns }, now);
            look.end();
            std::thread::sleep(std::time::Duration::from_millis(1));
            entry.since == now
        };
        assert!(see(7, Some(3)), "never seen before");
        assert!(!see(7, Some(3)), "nothing of its class came back since");
        assert!(see(7, Some(4)), "it may have, and be out again");
        assert!(see(8, None), "in flight since");
        assert!(!see(8, None), "in the same flight");
        assert!(see(8, Some(9)), "completed: it may have come back since it was seen in flight");
        assert!(see(9, None), "another flight");
    }

    #[test]
    fn what_a_look_does_not_find_is_forgotten() {
        let mut sightings = Sightings::default();
        let start = Instant::now();
        let mut look_for = |places: &[u64], after: u64| {
            let now = start + std::time::Duration::from_secs(after);
            let mut look = sightings.look();
            let see =
                |place: &u64| look.see(TrackedCheckout { place: *place, generation: 0, returns: None }, now);
            let ages: Vec<u64> = places.iter().map(see).map(|e| (now - e.since).as_secs()).collect();
            look.end();
            ages
        };
        assert_eq!(look_for(&[1, 3, 5], 1), [0, 0, 0]);
        assert_eq!(look_for(&[0, 1, 2, 5, 6], 3), [0, 2, 0, 2, 0], "each by its own place");
        assert_eq!(look_for(&[1, 3, 6], 6), [5, 0, 3], "the third was not there in between");
    }

    #[test]
    fn addresses_are_spread() {
        // Descriptors lie 32 bytes apart: what a table goes by, the lowest bits and the seven topmost, must differ all
        // the same.
        let hash =
            |n: usize| BuildHasherDefault::<AddressHasher>::default().hash_one(0x7F00_0000_1000 + n * 32);
        let mut buckets = vec![0; 1024];
        (0..4096).for_each(|n| buckets[hash(n) as usize % 1024] += 1);
        assert!(buckets.iter().all(|n| *n <= 16), "{:?}", buckets.iter().max());
        let tops: std::collections::HashSet<u64> = (0..4096).map(|n| hash(n) >> 57).collect();
        assert!(tops.len() > 100, "{}", tops.len());
    }
}
