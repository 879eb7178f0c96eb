//! Events: closing sequence numbers, recording and asking, and what follows when an event was seen complete or never
//! will be.
//!
//! [`Timeline::close`] closes and records; [`Timeline::ask`] asks about the oldest events; `complete` and
//! [`Timeline::lose`] are the two ends. The reaper calls [`Timeline::advance`], a waiting task `glance`.

use super::super::hold::After;
use super::{EVENT_TRIES, Timeline, TimelineState};
use crate::device::{EventHandle, StreamHandle};
use crate::error::{Error, ErrorClass, Result};
use crate::sync::{AtomicBool, Ordering};
use std::sync::Arc;

impl Timeline {
    // --- closing and recording ---------------------------------------------------------------------------------------

    /// Closes the open sequence number, if it has entries, and records its event. After an error the entries wait for a
    /// later event.
    pub(crate) fn close(&self) -> Result<()> {
        // A capture may have begun since the stream was shared, or since an event failed.
        let capturing = match self.elsewhere() {
            None => self.is_capturing(),
            Some(_) if self.state.lock().unpublished == 0 => return Ok(()),
            // The driver says if a capture is in the way of the stream that covers this one.
            Some(confined) => self.context.noting(self.context.driver().capturing(confined.covering)),
        };
        match capturing {
            Ok(false) => self.close_with(false, |_| Ok(())),
            Ok(true) => Err(Error::Capturing { what: "recording an event", remedy: "end the capture first" }),
            Err(error) => {
                self.not_recorded(&error);
                Err(error)
            }
        }
    }

    /// Makes later work of `waiter`, a stream of the same device, start only after everything submitted here so far.
    pub(crate) fn wait_here(self: &Arc<Self>, waiter: StreamHandle) -> Result<()> {
        self.usable()?;
        // An event is recorded even if nothing is in flight: work that the crate does not see may be on the stream.
        let closed = self
            .close_with(true, |event| self.context.noting(self.context.driver().wait_event(waiter, event)));
        // After an error too: the event may have been recorded, or is due.
        if !std::mem::replace(&mut self.state.lock().listed, true) {
            self.watcher.list(self);
        }
        closed
    }

    /// Closes the open sequence number and records its event, with `always` also if nothing waits for one. `recorded`
    /// gets the event before it can be recycled.
    pub(super) fn close_with(
        &self,
        always: bool,
        recorded: impl FnOnce(EventHandle) -> Result<()>,
    ) -> Result<()> {
        crate::os::check_fork()?;
        // The event comes first: without one nothing is closed.
        let event = self.context.event().inspect_err(|error| self.not_recorded(error))?;
        let seq = {
            let mut state = self.state.lock();
            let nothing = state.open_entries == 0 && state.unpublished == 0 && !always;
            if nothing || self.lost.get().is_some() {
                drop(state);
                self.context.recycle(event);
                return self.not_lost();
            }
            let seq = state.open;
            state.open += 1;
            (state.open_entries, state.open_bytes) = (0, 0);
            state.under_way += 1;
            seq
        };
        let recording = Recording { timeline: self, seq, event };
        let stream = self.elsewhere().map_or(self.stream, |confined| confined.covering);
        if let Err(error) = self.context.noting(self.context.driver().record(event, stream)) {
            drop(recording);
            self.not_recorded(&error);
            return Err(error);
        }
        let used = recorded(event);
        std::mem::forget(recording);
        let mut state = self.state.lock();
        state.under_way -= 1;
        if self.lost.get().is_some() {
            // Given up meanwhile: nothing removes events from the list any more. For the event see `keep_back`.
            drop(state);
            self.keep_back(event);
            return used;
        }
        state.events.push_back((seq, event));
        state.record_failures = 0;
        if state.unpublished <= seq {
            state.unpublished = 0;
        }
        used
    }

    /// Puts an event of a lost stream away. A lost device uses no events any more. On a device that is alive the event
    /// may still be recorded later, so it is neither used again nor destroyed.
    fn keep_back(&self, event: EventHandle) {
        if self.is_dead() {
            self.context.recycle(event);
        } else {
            self.context.holds().leaked(1);
        }
    }

    /// Recording failed. The reaper tries again, since a later event covers the same entries.
    fn not_recorded(&self, error: &Error) {
        let give_up = {
            let mut state = self.state.lock();
            if state.open_entries > 0 && state.unpublished == 0 {
                state.unpublished = state.open;
            }
            // On a device with a limited number of events, published events are free again as the stream goes on.
            let comes_back = error.class() == ErrorClass::Transient && !state.events.is_empty();
            !comes_back && gives_up(&mut state.record_failures, error)
        };
        crate::foreign::debug!(target: "pinpool::stream", device = self.context.name(), stream = self.number, %error, give_up, "an event could not be recorded");
        if give_up {
            self.lose(error);
        }
    }

    // --- asking ------------------------------------------------------------------------------------------------------

    /// Asks about the oldest events, unless another thread is asking. Returns whether anything completed.
    pub(crate) fn ask(&self) -> bool {
        // A plain load first: a compare-and-swap, failing or not, would take the cache line away from the asking
        // thread. Acquire: pairs with the release in `Asking`, so that the threads that ask follow one another.
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
                    // If the stream was lost meanwhile, `lose` has dealt with its events.
                    if self.complete(seq) {
                        self.context.recycle(event);
                    }
                    progress = true;
                }
                Ok(false) => break,
                // The driver cannot answer now: that is neither completion nor loss.
                Err(error) if error.class() == ErrorClass::Transient => break,
                // The event was recorded into a capture, so it will never be complete. A new event covers the same
                // sequence numbers.
                Err(error) if error.class() == ErrorClass::Capture && self.is_shared() => {
                    self.forget_event(seq, event);
                    break;
                }
                Err(error) => {
                    if !gives_up(&mut self.state.lock().ask_failures, &error) {
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

    /// The front event is void: it was recorded into a capture, which may go on. A later event is due.
    fn forget_event(&self, seq: u64, event: EventHandle) {
        let mut state = self.state.lock();
        // `lose` has dealt with the events of a lost stream.
        if self.lost.get().is_none() && state.events.front() == Some(&(seq, event)) {
            state.events.pop_front();
            state.void(seq, event);
        }
    }

    /// The front event was seen complete, and covers all sequence numbers up to `seq`. `false`: the stream was lost
    /// meanwhile.
    fn complete(&self, seq: u64) -> bool {
        let mut after = After::default();
        let mut state = self.state.lock();
        if self.lost.get().is_some() {
            return false;
        }
        state.events.pop_front();
        (state.record_failures, state.ask_failures) = (0, 0);
        if seq > self.completed.load(Ordering::Relaxed) {
            let flights = self.context.flights();
            state.complete(seq, &mut after, |since| flights.record(since.elapsed()));
            // Release: pairs with the acquire in `is_complete`. Stored under the lock, after the entries were
            // completed.
            self.completed.store(seq, Ordering::Release);
            let later = state.waiting.split_off(&(seq + 1, 0));
            after.wakes = std::mem::replace(&mut state.waiting, later);
        }
        let (free, aside): (Vec<_>, _) =
            std::mem::take(&mut state.aside).into_iter().partition(|(open, _)| *open <= seq);
        state.aside = aside;
        drop(state);
        free.into_iter().for_each(|(_, event)| self.context.recycle(event));
        after.run();
        true
    }

    /// What is complete on this stream can never be known: quarantines what is in flight, and wakes all waiters.
    pub(crate) fn lose(&self, error: &Error) {
        let mut after = After::default();
        let mut state = self.state.lock();
        if self.lost.set(error.clone()).is_ok() {
            crate::foreign::error!(
                target: "pinpool::stream::lost",
                device = self.context.name(),
                stream = self.number,
                %error,
                entries = state.joined(),
                "a stream is lost; what is in flight on it is quarantined"
            );
        }
        let events = std::mem::take(&mut state.events);
        let aside = std::mem::take(&mut state.aside);
        state.quarantining += 1;
        state.quarantine(self.is_dead(), &mut after);
        if !after.lost.is_empty() {
            // They keep the device open. (Quarantined segments do that by way of their pool.)
            self.context.holds().note_quarantined();
        }
        after.wakes = std::mem::take(&mut state.waiting);
        drop(state);
        aside.into_iter().for_each(|(_, event)| self.context.set_aside(event));
        events.into_iter().for_each(|(_, event)| self.keep_back(event));
        after.run();
        self.state.lock().quarantining -= 1;
    }

    /// The reaper's look: closes the open sequence number if it was open at the last look already (with `now`, in any
    /// case), and asks the driver. Returns whether anything completed.
    pub(crate) fn advance(&self, now: bool) -> bool {
        self.look_at(|| {
            let mut state = self.state.lock();
            let due = (state.open_entries > 0 && (now || state.seen == state.open)) || state.unpublished > 0;
            state.seen = state.open;
            // Relaxed: only changed under the lock, which is held here.
            state.note_date(self.completed.load(Ordering::Relaxed));
            due.then(|| UnderWay::new(self, &mut state))
        })
    }

    /// A look for a caller that asks about `seq` and will ask again: closes it if it is open, and asks the driver. If
    /// the state's lock is taken at that moment, closing is left to a later look.
    pub(super) fn glance(&self, seq: u64) {
        self.look_at(|| {
            let mut state = self.state.try_lock()?;
            let due = (state.open_entries > 0 && seq >= state.open)
                || (state.unpublished > 0 && seq <= state.unpublished);
            due.then(|| UnderWay::new(self, &mut state))
        });
    }

    /// Closes the open sequence number if it is `due`, and asks the driver.
    fn look_at<'a>(&'a self, due: impl FnOnce() -> Option<UnderWay<'a>>) -> bool {
        if crate::os::forked() {
            return false;
        }
        if let Some(error) = self.context.poisoned() {
            self.lose(error);
        }
        if let Some(_under_way) = due() {
            _ = self.close();
        }
        self.ask()
    }

    /// [`close`](Self::close) for a stream that is destroyed afterwards, once its work is complete: no other
    /// thread names it to the driver any more. The caller knows that none submits.
    ///
    /// # Errors
    /// The number is not closed, or its event is still due: then the stream is still named.
    pub(crate) fn close_for_good(&self) -> Result<()> {
        self.close()?;
        // A thread that found the number due just before may be in a call of the driver, which does not take long.
        while self.state.lock().under_way > 0 {
            crate::sync::yield_now();
        }
        match self.state.lock().unpublished > 0 {
            true => Err(Error::Capturing {
                what: "an event of the stream",
                remedy: "end the capture, and call again",
            }),
            false => Ok(()),
        }
    }

    /// Marks the timeline as off the reaper's list if nothing is in flight, and returns whether it did. For the reaper,
    /// which has the list.
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

/// An event that is being recorded. Its drop, after an error or by a panic, leaves the sequence number to a later event.
/// The event itself may have been recorded all the same.
struct Recording<'a> {
    timeline: &'a Timeline,
    seq: u64,
    event: EventHandle,
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        let Self { timeline, seq, event } = *self;
        let mut state = timeline.state.lock();
        state.under_way -= 1;
        // For a stream that was given up meanwhile no event is due any more.
        if timeline.lost.get().is_some() {
            drop(state);
            return timeline.keep_back(event);
        }
        state.void(seq, event);
    }
}

/// A thread that has found a number due and closes it.
struct UnderWay<'a>(&'a Timeline);

impl<'a> UnderWay<'a> {
    fn new(timeline: &'a Timeline, state: &mut TimelineState) -> Self {
        state.under_way += 1;
        Self(timeline)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.state.lock().under_way -= 1;
    }
}

/// The role of the thread that asks. Unwinding ends it too, so that another thread can ask.
struct Asking<'a>(&'a AtomicBool);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        // Release: pairs with the acquire in `ask`.
        self.0.store(false, Ordering::Release);
    }
}

impl TimelineState {
    /// An event may be recorded and does not count: another one is due for the numbers up to `seq`.
    fn void(&mut self, seq: u64, event: EventHandle) {
        self.unpublished = self.unpublished.max(seq);
        self.aside.push((self.open, event));
    }
}

/// Counts a failed attempt. Returns whether there is to be no other attempt.
fn gives_up(failures: &mut u32, error: &Error) -> bool {
    // An error of a capture says nothing about the stream's work, and a capture ends sooner or later.
    if error.class() == ErrorClass::Capture {
        return false;
    }
    *failures += 1;
    error.is_device_lost() || *failures >= EVENT_TRIES
}
