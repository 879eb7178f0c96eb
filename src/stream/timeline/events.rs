//! Events: closing sequence numbers, recording and asking, and what follows when an event was seen complete or never
//! will be.
//!
//! [`Timeline::close`] closes and records; [`Timeline::ask`] asks about the oldest events; `complete` and
//! [`Timeline::lose`] are the two ends. The reaper calls [`Timeline::advance`], a waiting task `glance`.

use super::super::hold::After;
use super::{EVENT_TRIES, EventState, Mark, Timeline, TimelineState};
use crate::device::{EventHandle, StreamHandle};
use crate::error::{Error, ErrorClass, Result};
use crate::sync::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Instant;

impl Timeline {
    // --- closing and recording ---------------------------------------------------------------------------------------

    /// Closes the open sequence number, if it has entries, and records its event. After an error the entries wait for a
    /// later event.
    pub(crate) fn close(&self) -> Result<()> {
        // A capture may have begun since the stream was shared, or since an event failed.
        let capturing = match self.elsewhere() {
            None => self.is_capturing(),
            Some(_) if !self.state.lock().is_failing() => return Ok(()),
            // The driver says if a capture is in the way of the stream that covers this one.
            Some(confined) => self.context.noting(self.context.driver().capturing(confined.covering)),
        };
        match capturing {
            Ok(false) => self.close_now(None),
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
        let closed = self.close_now(Some(waiter));
        // After an error too: the event may have been recorded, or is due.
        if !std::mem::replace(&mut self.state.lock().listed, true) {
            self.listing.list(self);
        }
        closed
    }

    /// Closes the open sequence number and records its event. A `waiter` waits for that event, which is then recorded
    /// even if nothing is in flight: work that the crate does not see may be on the stream.
    pub(super) fn close_now(&self, waiter: Option<StreamHandle>) -> Result<()> {
        crate::os::check_fork()?;
        // The event comes first: where none can be made, the number is closed without one, and another is due.
        let event = self.context.event().inspect_err(|error| self.not_recorded(error))?;
        let mut recording = {
            let mut state = self.state.lock();
            let nothing = state.open_entries == 0 && !state.is_failing() && waiter.is_none();
            if nothing || self.lost.get().is_some() {
                drop(state);
                self.context.recycle(event);
                return self.not_lost();
            }
            state.close(EventState::Due, Some(event));
            state.under_way += 1;
            Recording { timeline: self, seq: state.open - 1, event, recorded: false }
        };
        let stream = self.elsewhere().map_or(self.stream, |confined| confined.covering);
        if let Err(error) = self.context.noting(self.context.driver().record(event, stream)) {
            drop(recording);
            self.not_recorded(&error);
            return Err(error);
        }
        // Before the event is published, since it may be used again from then on.
        let waits = waiter
            .map_or(Ok(()), |waiter| self.context.noting(self.context.driver().wait_event(waiter, event)));
        recording.recorded = true;
        waits
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
            if state.open_entries > 0 && self.lost.get().is_none() {
                state.close(EventState::Failing, None);
            }
            // On a device with a limited number of events, recorded ones are free again as the stream goes on.
            let comes_back = error.class() == ErrorClass::Transient && state.recorded().is_some();
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
        if self.asking.load(Ordering::Relaxed)
            || self.asking.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return false;
        }
        let role = Asking(&self.asking);
        let mut progress = false;
        loop {
            let Some((seq, event)) = self.state.lock().recorded() else { break };
            match self.context.noting(self.context.driver().query(event)) {
                Ok(true) => {
                    // If the stream was lost meanwhile, `lose` has dealt with its events.
                    self.complete(seq);
                    progress = true;
                }
                Ok(false) => break,
                // The driver cannot answer now: that is neither completion nor loss.
                Err(error) if error.class() == ErrorClass::Transient => break,
                // The event was recorded into a capture, so it will never be complete. A new event covers the same
                // sequence numbers.
                Err(error) if error.class() == ErrorClass::Capture && self.is_shared() => {
                    self.state.lock().fail(seq);
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

    /// The event of a mark was seen complete, and covers all sequence numbers up to `seq`.
    fn complete(&self, seq: u64) {
        let mut after = After::default();
        let mut state = self.state.lock();
        // If the stream was lost meanwhile, `lose` has dealt with its events.
        let Some(mark) = state.place(seq).and_then(|at| state.marks.remove(at)) else { return };
        let free = state.free_before(seq);
        (state.record_failures, state.ask_failures) = (0, 0);
        if seq > self.completed.load(Ordering::Relaxed) {
            state.complete(seq, self.context.flights(), &mut after);
            // Release: pairs with the acquire in `is_complete`. Stored under the lock, after the entries were
            // completed.
            self.completed.store(seq, Ordering::Release);
            let later = state.waiting.split_off(&(seq + 1, 0));
            after.wakes = std::mem::replace(&mut state.waiting, later);
        }
        drop(state);
        for event in mark.event.into_iter().chain(free) {
            self.context.recycle(event);
        }
        crate::sync::landing(|| after.run());
    }

    /// What is complete on this stream can never be known: quarantines what is in flight, and wakes all waiters.
    pub(crate) fn lose(&self, error: &Error) {
        // What is quarantined wakes waiters when the lock is released, and these must not wait for a copy either.
        crate::sync::landing(|| self.lose_landing(error));
    }

    fn lose_landing(&self, error: &Error) {
        let mut after = After::default();
        let mut state = self.state.lock();
        if self.lost.set(error.clone()).is_ok() {
            crate::foreign::error!(
                target: "pinpool::stream::lost",
                device = self.context.name(),
                stream = self.number,
                %error,
                entries = state.entries.len(),
                "a stream is lost; what is in flight on it is quarantined"
            );
        }
        let marks = std::mem::take(&mut state.marks);
        if state.quarantine(self.is_dead(), &mut after) {
            // They keep the device open. (Quarantined segments do that by way of their pool.)
            self.context.holds().note_quarantined();
        }
        after.wakes = std::mem::take(&mut state.waiting);
        drop(state);
        for Mark { state, event, .. } in marks {
            match (state, event) {
                (EventState::Recorded, Some(event)) => self.keep_back(event),
                (EventState::Failing, Some(event)) => self.context.set_aside(event),
                // The thread that records it finds the mark gone.
                _ => {}
            }
        }
        after.run();
    }

    /// The reaper's look: closes the open sequence number if it was open at the last look already (with `now`, in any
    /// case), and asks the driver. Returns whether anything completed.
    pub(crate) fn advance(&self, now: bool) -> bool {
        self.look_at(|| {
            let mut state = self.state.lock();
            let due = (state.open_entries > 0 && (now || state.seen == state.open)) || state.is_failing();
            state.seen = state.open;
            state.date_marks();
            due.then(|| UnderWay::new(self, &mut state))
        })
    }

    /// A look for a caller that asks about `seq` and will ask again: closes it if it is open, and asks the driver. If
    /// the state's lock is taken at that moment, closing is left to a later look.
    pub(super) fn glance(&self, seq: u64) {
        self.look_at(|| {
            let mut state = self.state.try_lock()?;
            let due = (state.open_entries > 0 && seq >= state.open) || state.is_failing();
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
        match self.state.lock().is_failing() {
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

/// An event that is being recorded. Its drop, after an error or by a panic too, says how that ended: where it was not
/// recorded for certain, the sequence number is left to a later event.
struct Recording<'a> {
    timeline: &'a Timeline,
    seq: u64,
    event: EventHandle,
    recorded: bool,
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        let mut state = self.timeline.state.lock();
        state.under_way -= 1;
        match state.place(self.seq) {
            Some(at) if self.recorded => {
                state.marks[at].state = EventState::Recorded;
                state.record_failures = 0;
            }
            Some(_) => state.fail(self.seq),
            // For a stream that was given up meanwhile no event is due any more.
            None => {
                drop(state);
                self.timeline.keep_back(self.event);
            }
        }
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
    /// Opens the next sequence number, and marks the one that was open until now.
    fn close(&mut self, state: EventState, event: Option<EventHandle>) {
        self.marks.push_back(Mark { seq: self.open, state, event, since: None });
        self.open += 1;
        (self.open_entries, self.open_bytes) = (0, 0);
    }

    /// The place of the mark of a number, unless that has failed or the stream was lost.
    fn place(&self, seq: u64) -> Option<usize> {
        let at = self.marks.partition_point(|mark| mark.seq < seq);
        let mark = self.marks.get(at)?;
        (mark.seq == seq && mark.state != EventState::Failing).then_some(at)
    }

    /// The oldest event that was recorded, with its number.
    pub(super) fn recorded(&self) -> Option<(u64, EventHandle)> {
        let mark = self.marks.iter().find(|mark| mark.state == EventState::Recorded)?;
        mark.event.map(|event| (mark.seq, event))
    }

    /// The event of a mark may be recorded and does not count: another one is due.
    fn fail(&mut self, seq: u64) {
        if let Some(mark) = self.place(seq).and_then(|at| self.marks.remove(at)) {
            let (seq, state) = (self.open - 1, EventState::Failing);
            self.marks.push_back(Mark { seq, state, since: None, ..mark });
        }
    }

    /// Whether entries wait for an event in place of one that failed.
    pub(super) fn is_failing(&self) -> bool {
        let last = self.marks.iter().rev().find(|mark| mark.state != EventState::Due);
        last.is_some_and(|mark| mark.state == EventState::Failing) && !self.entries.is_empty()
    }

    /// The events that failed before the number `seq` was closed, whose own event was seen complete: they are free.
    fn free_before(&mut self, seq: u64) -> Vec<EventHandle> {
        let before = self.marks.partition_point(|mark| mark.seq < seq);
        let (failed, others): (Vec<_>, Vec<_>) =
            self.marks.drain(..before).partition(|mark| mark.state == EventState::Failing);
        others.into_iter().rev().for_each(|mark| self.marks.push_front(mark));
        failed.into_iter().filter_map(|mark| mark.event).collect()
    }

    /// Notes when the reaper found the marks that are new, for reports.
    fn date_marks(&mut self) {
        for mark in self.marks.iter_mut().rev().take_while(|mark| mark.since.is_none()) {
            mark.since = Some(Instant::now());
        }
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
