//! Stream-ready reuse: a segment in flight is claimed for later work on the same stream, which comes after the earlier
//! work by the stream's order. The pool first asks its central pool whether a request waits for memory
//! ([`CentralPool::awaited`]); while one does, the pool claims nothing.
//!
//! The completing thread and the claimer decide by one compare-and-swap on the segment's state word, from DETACHED. A
//! claim is resolved (its segment became host-ready), submitted again ([`Timeline::begin`]) or given up.

#![allow(unsafe_code)]

use std::time::Instant;

use super::super::hold::{Flown, Hold};
use super::{Timeline, TimelineEntry};
use crate::central::{CentralPool, Segment};
use crate::freelist::state;
use crate::segment::Class;

/// A segment that was claimed before its sequence number was complete.
#[derive(Debug)]
pub(super) struct Claim {
    /// The sequence number of the flight that the claim follows.
    pub(super) seq: u64,
    pub(super) flown: Flown,
    pub(super) memory: Option<Hold>,
    pub(super) since: Option<Instant>,
    /// The sequence number is complete, or the segment was quarantined. The timeline counts the claim's bytes no more.
    pub(super) completed: bool,
}

impl Timeline {
    /// Claims a segment of this class and central pool that is in flight on this stream alone and whose handle was
    /// dropped: the youngest, since the oldest will be free first anyway.
    pub(crate) fn claim(&self, central: &CentralPool, class: Class) -> Option<(usize, Segment)> {
        // During a capture, newly submitted work does not come after what is in flight.
        if crate::os::forked() || !self.claims || !self.is_capturing().is_ok_and(|capturing| !capturing) {
            return None;
        }
        let mut state = self.state.lock();
        let fits = |Flown { segment, word, .. }: &Flown| {
            // A handle may be dropped at this moment: only a word that says DETACHED, in this generation, is claimed.
            let from = word.with(state::DETACHED);
            segment.central().number() == central.number()
                && segment.class() == Some(class)
                && central.may_claim(class, segment.base())
                && segment.descriptor().compare_exchange(from, state::CLAIMED).is_ok()
        };
        let at = state.entries.iter().rposition(|(_, entry)| entry.flown.as_ref().is_some_and(fits))?;
        let (seq, TimelineEntry { flown, memory, since, .. }) = state.entries.remove(at)?;
        let flown = flown?;
        state.flights.change(flown.segment.central(), 0, flown.bytes as isize);
        let alias = flown.segment.alias();
        let claim = Claim { seq, flown, memory, since, completed: false };
        Some((state.claims.insert(claim), alias))
    }

    /// Gives the claimed segment the length that the claimer asked for, in the statistics too.
    pub(crate) fn rebook_claim(&self, key: usize, len: usize) {
        let mut state = self.state.lock();
        state.claims[key].flown.segment.rebook(len);
    }

    /// The sequence number after which a claimed segment is host-ready. `None`: it is host-ready already.
    pub(crate) fn claimed_until(&self, key: usize) -> Option<u64> {
        let state = self.state.lock();
        let claim = &state.claims[key];
        (!claim.completed).then_some(claim.seq)
    }

    /// Ends a claim whose sequence number is complete, and takes the segment. `None`: the segment was quarantined.
    pub(crate) fn resolve_claim(&self, key: usize) -> Option<Segment> {
        let claim = self.state.lock().claims.remove(key);
        debug_assert!(claim.completed, "resolved a claim that has not completed");
        let segment = claim.flown.segment;
        (segment.descriptor().word().state() == state::HOST).then_some(segment)
    }

    /// Gives up a claim that was not used: the segment goes back under its old sequence number, or to its central pool
    /// if that number is complete.
    pub(crate) fn unclaim(&self, key: usize) {
        if crate::os::forked() {
            return;
        }
        let mut state = self.state.lock();
        let Claim { seq, flown, memory, since, completed } = state.claims.remove(key);
        let Flown { segment, word, bytes } = &flown;
        if !completed
            && segment.descriptor().compare_exchange(word.with(state::CLAIMED), state::DETACHED).is_ok()
        {
            state.flights.change(segment.central(), 0, -(*bytes as isize));
            state.insert(seq, TimelineEntry { flown: Some(flown), host: None, memory, since });
            return;
        }
        drop(state);
        let segment = flown.segment;
        if segment.descriptor().word().state() == state::HOST {
            // SAFETY: completed: every event that covers it was seen complete, and the claimer gives it up here.
            unsafe { segment.release() };
        }
    }
}
