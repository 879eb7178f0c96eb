//! What statistics and reports see of a timeline: how far it is, and which event each buffer on it waits for.

use super::{Flight, Timeline};
use crate::sync::Ordering;

/// What the completion of a buffer's work hangs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventState {
    /// The driver is being called to submit it.
    Submitting,
    /// Nothing is recorded behind it yet: its sequence number is still open.
    Due,
    /// The event is recorded and the device has not reached it.
    Recorded,
    /// Recording the event failed, or it went into a graph; it is tried again.
    Failing,
    /// The stream is lost: it will never be known.
    Lost,
}

impl EventState {
    /// The same in words of one word each, as events have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Submitting => "submitting",
            Self::Due => "due",
            Self::Recorded => "recorded",
            Self::Failing => "failing",
            Self::Lost => "lost",
        }
    }
}

/// A timeline at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TimelineLook {
    /// Entries so far, and those of them that are complete.
    pub(crate) submitted: u64,
    pub(crate) completed: u64,
    /// Entries in flight, their driver calls under way among them. Claims that have not completed are not.
    pub(crate) entries: usize,
    /// Bytes in flight, over all central pools.
    pub(crate) flight: Flight,
    /// The open sequence number, and the highest that is known to be complete.
    pub(crate) open: u64,
    pub(crate) completed_seq: u64,
    /// Events that were recorded and not seen complete.
    pub(crate) events: usize,
    pub(crate) lost: bool,
}

/// Two threads that drive one stepped device: when one of them may say that nothing will come any more.
///
/// There may be nothing to step because the other one has stepped it, and is in the midst of finding out what is done,
/// or has not submitted yet. So nobody may be in the midst of anything, before a look and after it, and that several
/// times in a row: what was submitted between two looks is stepped, or seen to be done, by the next.
#[derive(Debug, Default)]
pub(crate) struct Stillness(u32);

impl Stillness {
    /// There was nothing to step. Whether nothing will come any more; `busy`: somebody was in the midst of something.
    pub(crate) fn is_final(&mut self, busy: bool) -> bool {
        self.0 = if busy { 0 } else { self.0 + 1 };
        if busy {
            crate::sync::yield_now();
        }
        self.0 > 2
    }

    /// There was something.
    pub(crate) fn stepped(&mut self) {
        self.0 = 0;
    }
}

impl Timeline {
    /// Whether another thread finds out just now what is done, or that all is lost, or records an event.
    pub(crate) fn is_busy(&self) -> bool {
        // Acquire: pairs with the release of who has asked: what that one has found out is seen after this.
        let finds_out = self.asking.load(Ordering::Acquire) || self.state.lock().recording > 0;
        // Acquire: pairs with the releases behind it. (It goes up under the lock.)
        finds_out || self.booking.load(std::sync::atomic::Ordering::Acquire) > 0
    }

    /// How far it is.
    pub(crate) fn look(&self) -> TimelineLook {
        let state = self.state.lock();
        let mut flight = Flight::default();
        for (_, part) in &state.flights {
            flight.bytes += part.bytes;
            flight.claimed += part.claimed;
        }
        TimelineLook {
            submitted: state.submitted,
            completed: state.completed,
            entries: state.entries.len() + state.pending.len(),
            flight,
            open: state.open,
            // Raised under the lock that we hold.
            completed_seq: self.completed.load(Ordering::Relaxed),
            events: state.events.len(),
            lost: state.lost.is_some(),
        }
    }

    /// Everything on it that keeps a segment: the address of its descriptor, its sequence number, and the event that it
    /// waits for.
    pub(crate) fn for_each_kept(&self, mut visit: impl FnMut(usize, u64, EventState)) {
        let state = self.state.lock();
        // Once, not for each of thousands: an event covers all sequence numbers up to its own.
        let recorded = state.events.iter().map(|(covers, _)| *covers).max();
        let event = |seq: u64| match () {
            () if state.lost.is_some() => EventState::Lost,
            () if recorded.is_some_and(|covers| covers >= seq) => EventState::Recorded,
            () if seq <= state.unpublished => EventState::Failing,
            () => EventState::Due,
        };
        for (_, entry) in &state.pending {
            entry
                .retained
                .for_each_descriptor(&mut |descriptor| visit(descriptor, state.open, EventState::Submitting));
        }
        for (seq, entry) in &state.entries {
            let event = event(*seq);
            entry.retained.for_each_descriptor(&mut |descriptor| visit(descriptor, *seq, event));
        }
        for (_, claim) in state.claims.iter().filter(|(_, claim)| !claim.completed) {
            visit(std::ptr::from_ref(claim.segment.descriptor()).addr(), claim.seq, event(claim.seq));
        }
    }
}
