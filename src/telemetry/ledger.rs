//! The ledger: since when a segment is out, and which call checked it out.
//!
//! A hit reads no clock, so the pool does not know when most buffers were checked out. Two sources
//! off the hit path make up for that, with entries under the central pool's lock:
//!
//! - *Tracked pools* ([`PoolBuilder::track_checkouts`](crate::PoolBuilder::track_checkouts)) cache
//!   nothing: every checkout takes the slow path, and is entered with time, tag and call site.
//! - *Samples*: other pools enter one in [`SAMPLE`] of the checkouts that no cache served, and each
//!   long-lived one, which no cache serves.
//!
//! Invariant: *an entry is always of the checkout that it was made for.* The buffer of an entered
//! segment names the list that always counts as full, not its class's (`central::raw`). So its
//! return fails the comparison that each return makes, leaves the fast path, and closes the entry.

use std::collections::BTreeMap;
use std::panic::Location;
use std::time::Instant;

use super::counters::Histogram;

/// One in this many of the checkouts that take the slow path is entered.
const SAMPLE: u64 = 8;

/// What a request says that its buffer is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tag {
    pub(crate) name: Option<&'static str>,
    /// To be held for long, which is no fault.
    pub(crate) long_lived: bool,
}

impl Tag {
    pub(crate) const NONE: Self = Self { name: None, long_lived: false };

    /// Whether a checkout with this tag is entered, the `nth` on its pool's slow path.
    pub(crate) fn is_entered(self, nth: u64, tracked: bool) -> bool {
        nth % SAMPLE == 0 || self.long_lived || tracked
    }
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

/// The checkouts that were entered, by their descriptors' addresses, fixed while they are out.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    out: BTreeMap<usize, LedgerEntry>,
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
        if let Some(entry) = self.out.remove(&descriptor) {
            self.holding.record(entry.since.elapsed());
        }
    }

    /// How long the entered segments that came back were out.
    pub(crate) fn holding(&self) -> &Histogram {
        &self.holding
    }
}
