//! The ledger: since when a segment is out, and who asked for it.
//!
//! A hit reads no clock, so of most buffers nobody knows when they were checked out. Three sources make up for it, all of
//! them off the hit path, and all kept here, under the depot's lock:
//!
//! - *Tracked pools* ([`PoolBuilder::track_checkouts`](crate::PoolBuilder::track_checkouts)) have no thread caches, so
//!   every checkout and return takes the slow path, and each is entered here with its time, tag and call site.
//! - *Samples*: other pools enter one in [`SAMPLE`] of the checkouts that nothing cached could serve.
//! - *Looks*: whoever looks at all that is out notes since when he has seen it. It has been out for so long at least.
//!
//! The return of an entered segment leaves the fast path, by a comparison that each return makes in any case (whether its
//! list has room: to the name that such a buffer has of its segment no list belongs), and closes the entry. So an entry
//! always is of the checkout that it was made for, and is counted into the histogram of holding when that ends.
//!
//! What was only seen returns unnoticed, and may be out again at the next look. That is told apart by what cannot go back:
//! the generation, which grows with each flight, and, for what is in somebody's hands, the number of segments of its class
//! that ever came back. Only if that has not grown it is certainly the same checkout; else its time starts anew. So the age
//! of a buffer that was only seen is never too long, and in a class with much coming and going it is always about nothing:
//! who looks for a leak there has the pool track its checkouts.

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

/// What is known of a checkout.
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

/// A segment that a look finds out, and what tells this checkout from a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Checkout {
    pub(crate) slot: usize,
    pub(crate) generation: u64,
    /// Where it is in somebody's hands: segments of its class that came back so far.
    pub(crate) returns: Option<u64>,
}

/// See the module's page. Slots are named by their address, which is theirs for as long as they are out.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    out: HashMap<usize, Entry>,
    holding: Histogram,
    /// What the last look found that had no entry, by slot, and when that was first seen.
    seen: HashMap<usize, (Checkout, Instant)>,
}

/// A look at everything that is out.
#[derive(Debug)]
pub(crate) struct Look<'a> {
    ledger: &'a mut Ledger,
    now: Instant,
    seen: HashMap<usize, (Checkout, Instant)>,
}

impl Ledger {
    /// A segment goes out.
    pub(crate) fn enter(&mut self, slot: usize, len: usize, origin: Origin) {
        self.out.insert(slot, Entry { since: Instant::now(), exact: true, len: Some(len), origin });
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
        if let Some(entry) = self.out.remove(&slot) {
            self.holding.record(entry.since.elapsed());
        }
    }

    /// Times of those that came back.
    pub(crate) fn holding(&self) -> &Histogram {
        &self.holding
    }

    /// Begins a look.
    pub(crate) fn look(&mut self) -> Look<'_> {
        Look { now: Instant::now(), seen: HashMap::new(), ledger: self }
    }
}

impl Look<'_> {
    /// A segment is out. What is known of it.
    pub(crate) fn see(&mut self, checkout: &Checkout) -> Entry {
        if let Some(entry) = self.ledger.out.get(&checkout.slot) {
            return *entry;
        }
        let same = |before: &Checkout| {
            // Landed or waited for since, it is the same one still, as far as nothing came back.
            before.generation == checkout.generation
                && checkout.returns.is_none_or(|now| before.returns.is_some_and(|before| before == now))
        };
        let before = self.ledger.seen.get(&checkout.slot).filter(|(before, _)| same(before));
        let since = before.map_or(self.now, |(_, since)| *since);
        self.seen.insert(checkout.slot, (*checkout, since));
        Entry { since, exact: false, len: None, origin: Origin::default() }
    }

    /// Everything was seen; what was not is forgotten.
    pub(crate) fn end(self) {
        self.ledger.seen = self.seen;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_is_entered_is_counted_once() {
        let mut ledger = Ledger::default();
        ledger.close(1);
        ledger.enter(1, 10, Origin { tag: Some("a"), site: None });
        let checkout = Checkout { slot: 1, generation: 0, returns: Some(0) };
        let mut look = ledger.look();
        let entry = look.see(&checkout);
        look.end();
        assert_eq!((entry.exact, entry.len, entry.origin.tag), (true, Some(10), Some("a")));
        [1, 1].into_iter().for_each(|slot| ledger.close(slot));
        assert_eq!(ledger.holding().count(), 1);
        assert!(!ledger.has(1));
    }

    #[test]
    fn only_what_is_certainly_the_same_grows_older() {
        let mut ledger = Ledger::default();
        let mut see = |generation, returns| {
            let mut look = ledger.look();
            let entry = look.see(&Checkout { slot: 1, generation, returns });
            let first = entry.since == look.now;
            look.end();
            std::thread::sleep(std::time::Duration::from_millis(1));
            first
        };
        assert!(see(7, Some(3)), "never seen before");
        assert!(!see(7, Some(3)), "nothing of its class came back since");
        assert!(see(7, Some(4)), "it may have, and be out again");
        assert!(see(8, None), "in flight since");
        assert!(!see(8, None), "in the same flight");
        assert!(see(8, Some(9)), "landed: it may have come back since it was seen in flight");
        assert!(see(9, None), "another flight");
    }

    #[test]
    fn what_a_look_does_not_find_is_forgotten() {
        let mut ledger = Ledger::default();
        let checkout = Checkout { slot: 1, generation: 0, returns: Some(0) };
        let mut look = ledger.look();
        let first = look.see(&checkout).since;
        look.end();
        std::thread::sleep(std::time::Duration::from_millis(1));
        ledger.look().end();
        assert!(ledger.look().see(&checkout).since > first);
    }
}
