//! The ledger: since when a segment is out, and which call checked it out.
//!
//! # How it works
//!
//! A hit reads no clock, so the pool does not know when most buffers were checked out. Two sources make up for that,
//! both of them off the hit path:
//!
//! - *Tracked pools* ([`PoolBuilder::track_checkouts`](crate::PoolBuilder::track_checkouts)) cache nothing, so
//!   every checkout and return takes the slow path, and each is entered here with its time, tag and call site.
//! - *Samples*: other pools enter one in [`SAMPLE`] of the checkouts that no cache served, and each that was requested
//!   as long-lived, which no cache serves.
//!
//! The entries are kept under the central pool's lock.
//!
//! # Invariant
//!
//! *An entry is always of the checkout that it was made for.* The buffer of an entered segment names the list that
//! always counts as full, in place of its class's (`central::raw`). So its return fails a comparison that each return
//! makes in any case (whether its list has room), leaves the fast path there, and closes the entry. The time is then
//! counted into the histogram of holding times.

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
    /// The number of the run that the segment is in.
    pub(crate) run: u32,
    /// When the segment was checked out.
    pub(crate) since: Instant,
    /// Bytes asked for.
    pub(crate) len: usize,
    pub(crate) origin: CheckoutSite,
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
    pub(crate) fn enter(&mut self, descriptor: usize, run: u32, len: usize, origin: CheckoutSite) {
        self.out.insert(descriptor, LedgerEntry { run, since: Instant::now(), len, origin });
    }

    pub(crate) fn has(&self, descriptor: usize) -> bool {
        self.out.contains_key(&descriptor)
    }

    /// The entries that are open, by the addresses of their descriptors.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (usize, &LedgerEntry)> {
        self.out.iter().map(|(descriptor, entry)| (*descriptor, entry))
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

#[cfg(all(test, not(loom)))]
mod tests {
    use std::hash::BuildHasher;

    use super::*;

    #[test]
    fn what_is_entered_is_counted_once() {
        let mut ledger = Ledger::default();
        ledger.close(1);
        let tag = Tag { name: Some("a"), long_lived: true };
        ledger.enter(1, 7, 10, CheckoutSite { tag, site: None });
        let [(1, entry)] = ledger.entries().collect::<Vec<_>>()[..] else { panic!("{ledger:?}") };
        assert_eq!((entry.run, entry.len, entry.origin.tag), (7, 10, tag));
        [1, 1].into_iter().for_each(|descriptor| ledger.close(descriptor));
        assert_eq!(ledger.holding().count(), 1);
        assert!(!ledger.has(1));
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
