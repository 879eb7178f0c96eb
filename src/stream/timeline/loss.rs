//! Loss: when a stream is given up, and what becomes of what is in flight on it.
//!
//! After [`EVENT_TRIES`] failures in a row to record an event or to ask about one, or once the
//! device is lost, what is complete on the stream can never be known. So all that is in flight is
//! quarantined, and every waiter is woken and gets the error.

use super::super::hold::{After, give_up};
use super::{EVENT_TRIES, Timeline, TimelineState};
use crate::error::{Error, ErrorClass};
use crate::foreign;

/// Counts a failed attempt. Returns whether there is to be no other attempt.
pub(super) fn gives_up(failures: &mut u32, error: &Error) -> bool {
    // A capture's error says nothing about the stream's work, and the capture will end.
    if error.class() == ErrorClass::Capture {
        return false;
    }
    *failures += 1;
    error.is_device_lost() || *failures >= EVENT_TRIES
}

impl Timeline {
    /// Gives the stream up: quarantines what is in flight, and wakes all waiters.
    pub(crate) fn lose(&self, error: &Error) {
        // Quarantine wakes waiters when the lock is released, and these must not wait for a copy.
        crate::sync::landing(|| {
            let mut after = After::default();
            let mut state = self.state.lock();
            if self.lost.set(error.clone()).is_ok() {
                foreign::error!(
                    target: "pinpool::stream::lost",
                    device = self.context.name(),
                    stream = self.number,
                    %error,
                    entries = state.entries.len(),
                    "a stream is lost; what is in flight on it is quarantined"
                );
            }
            std::mem::take(&mut state.marks).into_iter().for_each(|mark| state.fail(mark.event));
            if state.quarantine(self.context.poisoned().is_some(), &mut after) {
                // They keep the device open. (Quarantined segments do that by way of their pool.)
                self.context.holds().note_quarantined();
            }
            after.wakes = std::mem::take(&mut state.waiting);
            drop(state);
            after.run();
        });
    }
}

impl TimelineState {
    /// Quarantines all that is in flight. What is being submitted follows when it joins.
    ///
    /// With `dead`, the whole device is lost and uses nothing any more, so device memory is let go
    /// of. Otherwise the copies may still be queued, and their device memory is leaked, since a
    /// device may die of a copy to freed memory. Returns whether a hold was lost on anything but
    /// segments.
    fn quarantine(&mut self, dead: bool, after: &mut After) -> bool {
        let mut keeps = false;
        for entry in self.entries.drain(..) {
            if let Some(flown) = entry.flown {
                flown.count(-1, -isize::from(flown.is_claimed()));
                give_up(&flown.segment, &mut after.quarantined);
            }
            let (free, kept) = if dead { (entry.memory, None) } else { (None, entry.memory) };
            for hold in entry.host.into_iter().chain(kept) {
                keeps |= hold.quarantine(&mut after.quarantined);
            }
            after.released.extend(free);
        }
        self.moves += 1;
        keeps
    }
}
