//! The ledger: since when a segment is out, and who asked for it.
//!
//! A hit reads no clock, so of most buffers nobody knows when they were checked out. Three sources make up for it, all of
//! them off the hit path, and all kept here, under the depot's lock:
//!
//! - *Tracked pools* ([`PoolBuilder::track_checkouts`](crate::PoolBuilder::track_checkouts)) have no thread caches, so
//!   every checkout and return takes the slow path, and each is entered here with its time, tag and call site.
//! - *Samples*: other pools enter one in [`SAMPLE`] of the checkouts that take the slow path anyway.
//! - *Looks*: whoever looks at all that is out enters what is not there yet, with the time of the look. It has been out for
//!   so long at least.
//!
//! The return of an entered segment leaves the fast path, by a comparison that each return makes in any case
//! (`Slot::watch`), and closes the entry. So an entry always is of the checkout that it was made for. Those whose
//! beginning is known are counted into the histogram of holding.

use std::collections::HashMap;
use std::panic::Location;
use std::time::Instant;

use super::counters::Histogram;

/// One in so many of the checkouts that take the slow path is timed.
pub(crate) const SAMPLE: u64 = 8;

/// Who asked for a segment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Origin {
    pub(crate) tag: Option<&'static str>,
    pub(crate) site: Option<&'static Location<'static>>,
}

/// A checkout that was entered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    /// When it was checked out, or first seen.
    pub(crate) since: Instant,
    /// Whether that is when it was checked out.
    pub(crate) exact: bool,
    /// Bytes asked for, if that is known.
    pub(crate) len: Option<usize>,
    pub(crate) origin: Origin,
}

/// See the module's page. Slots are named by their address, which is theirs for as long as they are out.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    out: HashMap<usize, Entry>,
    holding: Histogram,
}

impl Ledger {
    /// A segment goes out.
    pub(crate) fn enter(&mut self, slot: usize, len: usize, origin: Origin) {
        self.out.insert(slot, Entry { since: Instant::now(), exact: true, len: Some(len), origin });
    }

    /// A segment is out, and was seen to be. Its entry, which may be an earlier one.
    pub(crate) fn see(&mut self, slot: usize, now: Instant) -> Entry {
        let new = Entry { since: now, exact: false, len: None, origin: Origin::default() };
        *self.out.entry(slot).or_insert(new)
    }

    pub(crate) fn has(&self, slot: usize) -> bool {
        self.out.contains_key(&slot)
    }

    /// A segment is back.
    pub(crate) fn close(&mut self, slot: usize) {
        // Most pools have few entries, and most returns that come here none.
        if self.out.is_empty() {
            return;
        }
        if let Some(entry) = self.out.remove(&slot).filter(|entry| entry.exact) {
            self.holding.record(entry.since.elapsed());
        }
    }

    /// Times of those that came back and whose beginning was known.
    pub(crate) fn holding(&self) -> &Histogram {
        &self.holding
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_seen_from_its_beginning_is_counted() {
        let mut ledger = Ledger::default();
        ledger.close(1);
        ledger.enter(1, 10, Origin { tag: Some("a"), site: None });
        let seen = ledger.see(1, Instant::now());
        assert_eq!(
            (seen.exact, seen.len, seen.origin.tag),
            (true, Some(10), Some("a")),
            "the earlier entry stays"
        );
        let first = Instant::now();
        assert!(!ledger.see(2, first).exact);
        assert_eq!(ledger.see(2, Instant::now()).since, first, "seen again, it is as old as it was");
        [1, 1, 2].into_iter().for_each(|slot| ledger.close(slot));
        assert_eq!(ledger.holding().count(), 1);
        assert!(!ledger.has(1) && !ledger.has(2));
    }
}
