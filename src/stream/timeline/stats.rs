//! What statistics and reports see of a timeline: how far it has come, and which event each of its
//! buffers waits for.

use std::time::Instant;

use super::{Timeline, TimelineState};
use crate::central::Segment;
use crate::sync::Ordering;

/// How far a stream has come towards the completion of a buffer's work: what stands between the
/// buffer and its return. In reports on buffers that have been out for long
/// ([`StuckBuffer`](crate::telemetry::StuckBuffer)). When a stream is lost, its buffers are
/// quarantined and wait for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventState {
    /// The driver is being called to submit the work.
    Submitting,
    /// No event is recorded for the work yet; one is due.
    Due,
    /// The event is recorded, and the device has not reached it.
    Recorded,
    /// Recording the event failed, or the event went into a graph; recording is tried again.
    Failing,
}

impl EventState {
    /// The state in one word, as log events have it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Submitting => "submitting",
            Self::Due => "due",
            Self::Recorded => "recorded",
            Self::Failing => "failing",
        }
    }
}

/// A stream's counts: [`Stream::stats`](crate::Stream::stats).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamStats {
    /// The stream's [number](crate::Stream::number).
    pub stream: u64,
    /// Copies and holds submitted to the stream.
    pub submitted: u64,
    /// Copies and holds known to be complete. What was quarantined with a lost stream never is.
    pub completed: u64,
    /// Copies and holds in flight.
    pub in_flight: usize,
    /// Bytes of pools' segments in flight, without segments that an `Arc` shares or that a copier
    /// copies in place.
    pub in_flight_bytes: usize,
    /// The part of the bytes in flight that stream-ready buffers have claimed.
    pub claimed_bytes: usize,
    /// The open sequence number, which the next submission gets.
    pub seq: u64,
    /// The last sequence number that is known to be complete.
    pub completed_seq: u64,
    /// Events that were recorded and not seen complete yet.
    pub events: usize,
    /// Whether the stream is lost.
    pub lost: bool,
}

impl Timeline {
    /// Bytes of a central pool that are in flight here, how many of these are claimed, and a count
    /// of all changes so far.
    pub(crate) fn flight(&self, central: u64) -> (usize, usize, u64) {
        let state = self.state.lock();
        let (bytes, claimed) = state.flight(Some(central));
        (bytes, claimed, state.moves)
    }

    /// The counts now. Not in the child of a fork.
    pub(crate) fn look(&self) -> StreamStats {
        let state = self.state.lock();
        let (in_flight_bytes, claimed_bytes) = state.flight(None);
        StreamStats {
            stream: self.number(),
            submitted: state.submitted,
            completed: state.completed,
            in_flight: state.entries.len() + state.submitting.len(),
            in_flight_bytes,
            claimed_bytes,
            seq: state.open,
            // Only changed under the lock, which is held here.
            completed_seq: self.completed.load(Ordering::Relaxed),
            events: state.marks.len(),
            lost: self.lost.get().is_some(),
        }
    }

    /// Visits each retained segment: its sequence number, the state of the event that it waits for,
    /// and since when it is known to be in flight.
    pub(crate) fn for_each_kept(&self, mut visit: impl FnMut(&Segment, u64, EventState, Option<Instant>)) {
        let state = self.state.lock();
        let closed = if state.under_way == 0 { EventState::Failing } else { EventState::Due };
        let event = |seq| match seq {
            seq if seq <= state.covered() => EventState::Recorded,
            seq if seq < state.open => closed,
            _ => EventState::Due,
        };
        let in_flight = state.entries.iter().map(|entry| (entry, entry.seq, event(entry.seq)));
        let submitting = state.submitting.iter().map(|entry| (entry, state.open, EventState::Submitting));
        for (entry, seq, event) in in_flight.chain(submitting) {
            let mut visit = |segment: &Segment| visit(segment, seq, event, entry.since);
            entry.flown.iter().for_each(|flown| visit(&flown.segment));
            entry.host.iter().for_each(|hold| hold.for_each_segment(&mut visit));
        }
    }
}

impl TimelineState {
    /// Bytes in flight and of these the claimed ones, of one central pool or of all.
    fn flight(&self, central: Option<u64>) -> (usize, usize) {
        let all = self.entries.iter().chain(&self.submitting).filter_map(|entry| entry.flown.as_ref());
        let own = all.filter(|flown| central.is_none_or(|number| number == flown.segment.central().number()));
        own.fold((0, 0), |(bytes, claimed), flown| {
            (bytes + flown.bytes, claimed + if flown.is_claimed() { flown.bytes } else { 0 })
        })
    }
}
