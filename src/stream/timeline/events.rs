//! Events: closing sequence numbers, asking about them, and what follows when one is seen complete or never will be.

use super::retained::After;
use super::{EVENT_TRIES, Timeline};
use crate::device::{EventHandle, StreamHandle};
use crate::error::{Error, ErrorClass, Result};
use crate::sync::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Instant;

impl Timeline {
    // --- marking -----------------------------------------------------------------------------------------------------

    /// Closes the open sequence number, if anything is in it, and records its event. Failing is no error of the
    /// caller's: the entries wait for a later event.
    pub(crate) fn close(&self) {
        let _ = self.close_open();
    }

    /// The same, for those who want to know.
    pub(super) fn close_open(&self) -> Result<()> {
        // For each stream that was shared meanwhile, or on which an event failed, a capture may have begun since.
        match self.is_capturing() {
            Ok(false) => self.close_with(false, |_| Ok(())),
            Ok(true) => Err(Error::Capturing { what: "recording an event", remedy: "end the capture first" }),
            Err(error) => {
                self.not_recorded(&error);
                Err(error)
            }
        }
    }

    /// The same for who has just submitted, and asked before.
    pub(super) fn close_submitted(&self) {
        let _ = self.close_with(false, |_| Ok(()));
    }

    /// Makes `waiter`, a stream of the same device, start its later work only after everything submitted here so far.
    pub(crate) fn wait_here(self: &Arc<Self>, waiter: StreamHandle) -> Result<()> {
        self.usable()?;
        // The event is new even where nothing is in flight: work that we do not see may be on the stream.
        let closed = self
            .close_with(true, |event| self.context.noting(self.context.driver().wait_event(waiter, event)));
        // After an error too: the event may be there, or due.
        if !std::mem::replace(&mut self.state.lock().listed, true) {
            self.reaper.list(self);
        }
        closed
    }

    /// Closes the open sequence number and records its event; `recorded` sees the event before anyone may recycle it.
    fn close_with(&self, always: bool, recorded: impl FnOnce(EventHandle) -> Result<()>) -> Result<()> {
        crate::os::check_fork()?;
        // The event first: without one nothing is closed.
        let event = self.context.event().inspect_err(|error| self.not_recorded(error))?;
        let seq = {
            let mut state = self.state.lock();
            let nothing = state.open_entries == 0 && state.unpublished == 0 && !always;
            if nothing || state.lost.is_some() {
                let lost = state.lost.clone();
                drop(state);
                self.context.recycle(event);
                return lost.map_or(Ok(()), Err);
            }
            let seq = state.open;
            state.open += 1;
            (state.open_entries, state.open_bytes) = (0, 0);
            state.unpublished = state.unpublished.max(seq);
            state.recording += 1;
            seq
        };
        #[cfg(pinpool_planted = "mark_before_record")]
        self.state.lock().events.push_back((seq, event));
        // Where recording fails the event may have been recorded all the same, so nobody may record it again before a
        // later event is complete. That event is due in any case.
        let result = self.context.noting(self.context.driver().record(event, self.stream));
        result.inspect_err(|error| {
            let lost = {
                let mut state = self.state.lock();
                state.recording -= 1;
                let lost = state.lost.is_some();
                // On a stream that was given up meanwhile nothing is due any more.
                if !lost {
                    let later = state.open;
                    state.doubtful.push((later, event));
                    state.unpublished = state.unpublished.max(seq);
                }
                lost
            };
            if lost {
                self.keep_back(event);
            }
            self.not_recorded(error);
        })?;
        let used = recorded(event);
        let mut state = self.state.lock();
        state.recording -= 1;
        if state.lost.is_some() && !cfg!(pinpool_planted = "mark_after_loss") {
            // Given up meanwhile: nobody takes events off the list any more. See there for the event.
            drop(state);
            self.keep_back(event);
            return used;
        }
        #[cfg(not(pinpool_planted = "mark_before_record"))]
        state.events.push_back((seq, event));
        if state.unpublished <= seq {
            state.unpublished = 0;
        }
        // Recording another failed after this sequence number was closed: whether that event comes before this event
        // nobody knows, so a later one is due for it, even if there is nothing else to come.
        if state.doubtful.iter().any(|&(later, _)| later > seq) && !cfg!(pinpool_planted = "doubt_forgotten")
        {
            state.unpublished = state.unpublished.max(seq);
        }
        state.record_failures = 0;
        used
    }

    /// The event of a stream that is lost. A dead device lets go of its events. One of a device that is alive may still
    /// be recorded, for all we know: nobody may use or destroy it.
    fn keep_back(&self, event: EventHandle) {
        if self.is_dead() {
            self.context.recycle(event);
        } else {
            self.context.holds().leaked(1);
        }
    }

    /// How many events may have been recorded though the driver said that they were not.
    #[cfg(all(test, loom))]
    pub(crate) fn doubts(&self) -> usize {
        self.state.lock().doubtful.len()
    }

    /// Recording failed. The reaper tries again, since a later event covers the same entries.
    fn not_recorded(&self, error: &Error) {
        let give_up = {
            let mut state = self.state.lock();
            if state.open_entries > 0 && state.unpublished == 0 {
                // Not even an event: closing is due all the same.
                state.seen = state.open;
            }
            // Where a device has only so many events, those of the events there are come back as the stream goes on.
            let comes_back = error.class() == ErrorClass::Transient && !state.events.is_empty();
            !comes_back && gives_up(&mut state.record_failures, error)
        };
        crate::foreign::debug!(target: "pinpool::stream", device = self.context.name(), stream = self.number, %error, give_up, "an event could not be recorded");
        if give_up {
            self.lose(error);
        }
    }

    // --- asking ------------------------------------------------------------------------------------------------------

    /// Asks about the oldest events, unless somebody else does. Whether anything completed.
    pub(crate) fn ask(&self) -> bool {
        // Looked at first: an exchange, failing or not, would take the line away from the one who asks.
        // Acquire: pairs with the release below, so that askers follow one another.
        if crate::os::forked()
            || self.asking.load(Ordering::Relaxed)
            || self.asking.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return false;
        }
        let role = Asking(&self.asking);
        let mut progress = false;
        loop {
            let Some((seq, event)) = self.state.lock().events.front().copied() else { break };
            match self.context.noting(self.context.driver().query(event)) {
                Ok(true) => {
                    // On a stream that was lost meanwhile a dead device's events were given back with the other events.
                    if self.complete(seq) || !self.is_dead() {
                        self.context.recycle(event);
                    }
                    progress = true;
                }
                Ok(false) => break,
                // Not ready to be asked: neither completion nor loss.
                Err(error) if error.class() == ErrorClass::Transient => break,
                // Recorded into a capture, by all we know: it will never be complete. A new event covers the same
                // sequence numbers.
                Err(error) if error.class() == ErrorClass::Capture && self.is_shared() => {
                    self.forget_event(seq, event);
                    break;
                }
                Err(error) => {
                    if !gives_up(&mut self.state.lock().query_failures, &error) {
                        break;
                    }
                    drop(role);
                    self.lose(&error);
                    return true;
                }
            }
        }
        progress
    }

    /// The front event is none. Its event may be recorded again when a later event is complete, which is due.
    fn forget_event(&self, seq: u64, event: EventHandle) {
        let mut state = self.state.lock();
        // What a lost stream had is dealt with.
        if state.lost.is_none() && state.events.front() == Some(&(seq, event)) {
            state.events.pop_front();
            let later = state.open;
            state.doubtful.push((later, event));
            state.unpublished = state.unpublished.max(seq);
        }
    }

    /// The front event was seen complete, and covers all sequence numbers up to `seq`. `false`: the stream was lost
    /// meanwhile.
    fn complete(&self, seq: u64) -> bool {
        let mut after = After::default();
        let mut state = self.state.lock();
        if state.lost.is_some() {
            return false;
        }
        state.events.pop_front();
        state.query_failures = 0;
        if seq > self.completed.load(Ordering::Relaxed) {
            state.complete(seq, &mut after);
            if !after.flown.is_empty() {
                let now = Instant::now();
                let flights = self.context.flights();
                after.flown.drain(..).for_each(|since| flights.record(now.saturating_duration_since(since)));
            }
            // Release: pairs with the acquire in `is_complete`. Raised under the lock, after the entries were
            // completed.
            self.completed.store(seq, Ordering::Release);
            state.take_wakes(&mut after, |t| t <= seq);
        }
        let mut certain = Vec::new();
        state.doubtful.retain(|&(later, event)| {
            let is_certain = later <= seq;
            if is_certain {
                certain.push(event);
            }
            !is_certain
        });
        drop(state);
        certain.into_iter().for_each(|event| self.context.recycle(event));
        after.run();
        true
    }

    /// Nobody will ever know what is complete on this stream: what is in flight is quarantined, who waits is told.
    pub(crate) fn lose(&self, error: &Error) {
        let mut after = After::default();
        let mut state = self.state.lock();
        if state.lost.is_none() {
            crate::foreign::error!(
                target: "pinpool::stream::lost",
                device = self.context.name(),
                stream = self.number,
                %error,
                entries = state.entries.len(),
                "a stream is lost; what is in flight on it is quarantined"
            );
            state.lost = Some(error.clone());
            // Release: pairs with the acquire in `is_complete`.
            self.given_up.store(true, Ordering::Release);
        }
        let events = std::mem::take(&mut state.events).into_iter().chain(std::mem::take(&mut state.doubtful));
        self.booking.fetch_add(1, Ordering::Relaxed);
        state.quarantine(self.is_dead(), &mut after);
        self.note_kept(&after);
        state.take_wakes(&mut after, |_| true);
        drop(state);
        // A dead device lets go of its events. Those of one that is alive may still be recorded, for all we know:
        // nobody may use or destroy them.
        if self.is_dead() {
            events.for_each(|(_, event)| self.context.recycle(event));
        } else {
            self.context.holds().leaked(events.count());
        }
        after.run();
        // Release: pairs with the acquire in `flight`.
        self.booking.fetch_sub(1, Ordering::Release);
    }

    /// The reaper's look: closes what has been open since the last look (or at once, with `now`), and asks.
    pub(crate) fn advance(&self, now: bool) -> bool {
        if crate::os::forked() {
            return false;
        }
        if let Some(error) = self.context.poisoned() {
            self.lose(error);
        }
        let due = {
            let mut state = self.state.lock();
            let due = (state.open_entries > 0 && (now || state.seen == state.open)) || state.unpublished > 0;
            state.seen = state.open;
            due
        };
        if due {
            self.close();
        }
        self.ask()
    }

    /// A look of someone who comes again, for the sake of one sequence number: closes it if it is open, and asks.
    /// Whoever is in the middle of something here is not waited for.
    pub(super) fn glance(&self, seq: u64) {
        if crate::os::forked() {
            return;
        }
        if let Some(error) = self.context.poisoned() {
            self.lose(error);
        }
        let due = self.state.try_lock().is_some_and(|state| {
            (state.open_entries > 0 && seq >= state.open)
                || (state.unpublished > 0 && seq <= state.unpublished)
        });
        if due {
            self.close();
        }
        self.ask();
    }

    /// Takes the timeline off the reaper's list if nothing is going on. The reaper's own call.
    pub(crate) fn unlist(&self) -> bool {
        let mut state = self.state.lock();
        let idle = state.is_idle();
        if idle {
            state.listed = false;
        }
        idle
    }

    /// Whether nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.state.lock().is_idle()
    }
}

/// The role of the one who asks. It ends by unwinding, too: others are to ask then.
struct Asking<'a>(&'a AtomicBool);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        // Release: pairs with the acquire in `ask`.
        self.0.store(false, Ordering::Release);
    }
}

/// Counts a failed attempt. Whether there is to be no other.
pub(super) fn gives_up(failures: &mut u32, error: &Error) -> bool {
    // A capture says nothing about the stream's work, and ends sooner or later.
    if error.class() == ErrorClass::Capture {
        return false;
    }
    *failures += 1;
    error.is_device_lost() || *failures >= EVENT_TRIES
}
