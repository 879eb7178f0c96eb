//! The ledger: since when a segment is out, and which call checked it out.
//!
//! # How it works
//!
//! A hit reads no clock, so the pool does not know when most buffers were checked out. Three sources make up for that,
//! all of them off the hit path:
//!
//! - *Tracked pools* ([`PoolBuilder::track_checkouts`](crate::PoolBuilder::track_checkouts)) cache nothing, so
//!   every checkout and return takes the slow path, and each is entered here with its time, tag and call site.
//! - *Samples*: other pools enter one in [`SAMPLE`] of the checkouts that no cache served, and each that was requested
//!   as long-lived, which no cache serves.
//! - *Looks*: a look at all segments that are out (`Pool::stuck`, a sampler) notes when it saw each of them first. A
//!   segment has been out at least since then.
//!
//! The entries of the first two ([`Ledger`]) are kept under the central pool's lock, the notes of the third
//! ([`Sightings`]) under a lock that only looks take.
//!
//! # Invariants
//!
//! *An entry is always of the checkout that it was made for.* The buffer of an entered segment names the list that
//! always counts as full, in place of its class's (`central::raw`). So its return fails a comparison that each return
//! makes in any case (whether its list has room), leaves the fast path there, and closes the entry. The time is then
//! counted into the histogram of holding times.
//!
//! *The age of a segment that was only seen is never too long.* Such a segment returns unnoticed, and may be out again
//! at the next look. Two numbers that never go back tell: the segment's generation, which grows with each flight, and,
//! for a segment that the program has, the number of segments of its class that ever came back. Only if neither has
//! grown is it certainly the same checkout; otherwise its age starts anew. In a class with many checkouts and returns
//! such ages are therefore always near zero: a leak there is found by a pool that tracks its checkouts.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::panic::Location;
use std::time::Instant;

use super::counters::Histogram;

/// One in this many of the checkouts that take the slow path is entered.
pub(crate) const SAMPLE: u64 = 8;

/// What a request says that its buffer is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tag {
    pub(crate) name: Option<&'static str>,
    /// To be held for long, which is no fault.
    pub(crate) long_lived: bool,
}

impl Tag {
    pub(crate) const NONE: Self = Self { name: None, long_lived: false };
}

/// The call that checked a segment out.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CheckoutSite {
    pub(crate) tag: Tag,
    pub(crate) site: Option<&'static Location<'static>>,
}

/// What is known of a checkout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LedgerEntry {
    /// When the segment was checked out, or first seen out.
    pub(crate) since: Instant,
    /// Whether `since` is the time of the checkout.
    pub(crate) exact: bool,
    /// Bytes asked for, if they are known.
    pub(crate) len: Option<usize>,
    pub(crate) origin: CheckoutSite,
}

/// A segment that a look finds out, and the numbers that tell this checkout from a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TrackedCheckout {
    /// The segment's place in the arena: a look visits segments in this order.
    pub(crate) place: u64,
    pub(crate) generation: u64,
    /// For a segment that the program has: how many segments of its class have come back so far.
    pub(crate) returns: Option<u64>,
}

/// Hashes addresses of descriptors. The crate allocates these, so no input can choose them to collide, and a
/// multiplication (by 2^64 over the golden ratio) spreads them: the upper half of the product differs in its lowest
/// bits, the lower half in its topmost, and hash tables use both.
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

/// The checkouts that were entered, by the address of their descriptor, which does not change while the segment is out.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    out: HashMap<usize, LedgerEntry, BuildHasherDefault<AddressHasher>>,
    holding: Histogram,
}

impl Ledger {
    /// Enters the checkout of a segment.
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

    /// Closes the entry of a segment that came back, if it has one.
    pub(crate) fn close(&mut self, descriptor: usize) {
        // Most pools have few entries, and most returns that come here have none.
        if self.out.is_empty() {
            return;
        }
        if let Some(entry) = self.out.remove(&descriptor) {
            self.holding.record(entry.since.elapsed());
        }
    }

    /// How long the entered segments that came back were out.
    pub(crate) fn holding(&self) -> &Histogram {
        &self.holding
    }
}

/// The segments without an entry that the last look found out, in order of their places, and when each was first seen.
/// Not under the central pool's lock, since only looks use it.
#[derive(Debug, Default)]
pub(crate) struct Sightings {
    seen: Vec<(TrackedCheckout, Instant)>,
}

/// A look at all segments that are out.
#[derive(Debug)]
pub(crate) struct SightingRound<'a> {
    sightings: &'a mut Sightings,
    /// How far this look has come in the list of the last one.
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
    /// Notes that a segment without an entry was seen out, not later than `now`, and returns what is known of it.
    /// Places come in ascending order.
    pub(crate) fn see(&mut self, checkout: TrackedCheckout, now: Instant) -> LedgerEntry {
        let same = |before: &TrackedCheckout| {
            // A segment whose copy has completed since, or whose handle was waited for, is of the same checkout as long
            // as no segment of its class came back.
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

    /// Ends the look. Segments that it did not see are forgotten.
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
        let tag = Tag { name: Some("a"), long_lived: true };
        ledger.enter(1, 10, CheckoutSite { tag, site: None });
        let entry = ledger.get(1).unwrap();
        assert_eq!((entry.exact, entry.len, entry.origin.tag), (true, Some(10), tag));
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
        assert!(see(7, Some(4)), "it may have come back, and be out again");
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
        // Descriptors lie 32 bytes apart. The bits that a table uses, the lowest and the seven topmost, must differ all
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
