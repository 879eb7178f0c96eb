//! Completion: closing sequence numbers, recording and asking events, and what follows when one was
//! seen complete: memory goes back to its pool, and waits end ([`After`]).
//!
//! [`Timeline::close`] closes and records; [`Timeline::ask`] asks about the oldest events;
//! `complete` is the one end, [`Timeline::lose`] the other. The reaper calls
//! [`Timeline::advance`], a waiting task `glance`.

use super::super::hold::After;
use super::loss::gives_up;
use super::{Mark, TIMED, Timeline, TimelineState};
use crate::device::{EventHandle, StreamHandle};
use crate::error::{Error, ErrorClass, Result};
use crate::foreign;
use crate::sync::{AtomicBool, MutexGuard, Ordering};
use std::sync::Arc;
use std::time::Instant;

impl Timeline {
    // --- closing and recording -------------------------------------------------------------------

    /// Closes the open sequence number, if it has entries, and records its event, or the one that
    /// closed numbers still wait for. After an error the entries wait for a later event.
    pub(crate) fn close(&self) -> Result<()> {
        let elsewhere = self.elsewhere();
        let closing = {
            let mut state = self.state.lock();
            let is_due = match elsewhere {
                None => state.has_open() || state.is_uncovered(),
                Some(_) => state.has_failed(),
            };
            if !is_due {
                return Ok(());
            }
            Closing::new(self, &mut state)
        };
        // A capture may have begun since the stream was shared, or since an event failed.
        let capturing = match elsewhere {
            None => self.is_capturing(),
            // The driver says if a capture is in the way of the stream that covers this one.
            Some(confined) => self.context.noting(self.context.driver().capturing(confined.covering)),
        };
        match capturing {
            Ok(false) => closing.record(None),
            Ok(true) => Err(Error::Capturing { what: "recording an event", remedy: "end the capture first" }),
            Err(error) => {
                self.not_recorded(&error);
                Err(error)
            }
        }
    }

    /// Makes later work of `waiter`, a stream of the same device, start only after everything
    /// submitted here so far.
    pub(crate) fn wait_here(self: &Arc<Self>, waiter: StreamHandle) -> Result<()> {
        self.usable()?;
        let (list, closing) = {
            let mut state = self.state.lock();
            (!std::mem::replace(&mut state.listed, true), Closing::new(self, &mut state))
        };
        if list {
            self.listing.list(self);
        }
        closing.record(Some(waiter))
    }

    /// Recording failed. The reaper tries again, since a later event covers the same entries.
    fn not_recorded(&self, error: &Error) {
        let give_up = {
            let mut state = self.state.lock();
            if state.has_open() && self.lost.get().is_none() {
                state.open += 1;
            }
            // On a device with a limited number of events, recorded ones are free again as the
            // stream goes on.
            let comes_back = error.class() == ErrorClass::Transient && !state.marks.is_empty();
            !comes_back && gives_up(&mut state.record_failures, error)
        };
        foreign::debug!(target: "pinpool::stream", device = self.context.name(), stream = self.number, %error, give_up, "an event could not be recorded");
        if give_up {
            self.lose(error);
        }
    }

    // --- asking ----------------------------------------------------------------------------------

    /// Asks about the oldest events, unless another thread does. Returns whether any completed.
    pub(crate) fn ask(&self) -> bool {
        // A plain load first: a compare-and-swap, failing or not, would take the cache line away
        // from the asking thread. Acquire: pairs with the release in `Asking`, so that the threads
        // that ask follow one another.
        if self.asking.load(Ordering::Relaxed)
            || self.asking.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return false;
        }
        let role = Asking(&self.asking);
        let mut progress = false;
        loop {
            let Some(Mark { seq, event }) = self.state.lock().marks.front().copied() else { break };
            match self.context.noting(self.context.driver().query(event)) {
                Ok(true) => {
                    self.complete(seq);
                    progress = true;
                }
                Ok(false) => break,
                // The driver cannot answer now: that is neither completion nor loss.
                Err(error) if error.class() == ErrorClass::Transient => break,
                // The event was recorded into a capture, so it will never be complete. A new event
                // covers the same sequence numbers.
                Err(error) if error.class() == ErrorClass::Capture && self.is_shared() => {
                    let mut state = self.state.lock();
                    if let Some(mark) = state.take_mark(seq) {
                        state.fail(mark.event);
                    }
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
        let Some(mark) = state.take_mark(seq) else { return };
        // Events that failed before this number was closed come before its event, if at all.
        let (free, failed): (Vec<_>, _) = state.failed.drain(..).partition(|(closed, _)| *closed < seq);
        state.failed = failed;
        (state.record_failures, state.ask_failures) = (0, 0);
        if seq > self.completed.load(Ordering::Relaxed) {
            state.complete(seq, &self.context.flights, &mut after);
            // Release: pairs with the acquire in `is_complete`. Stored under the lock, after the
            // entries were completed.
            self.completed.store(seq, Ordering::Release);
            let later = state.waiting.split_off(&(seq + 1, 0));
            after.wakes = std::mem::replace(&mut state.waiting, later);
        }
        drop(state);
        self.context.recycle(mark.event);
        free.into_iter().for_each(|(_, event)| self.context.recycle(event));
        crate::sync::landing(|| after.run());
    }

    /// The reaper's look: closes the open sequence number if it was open at the last look already
    /// (with `now`, in any case), and asks the driver. Returns whether anything completed.
    pub(crate) fn advance(&self, now: bool) -> bool {
        if crate::os::forked() {
            return false;
        }
        self.look_at(Some(self.state.lock()), |state| {
            let seen = std::mem::replace(&mut state.seen, state.open);
            // Of what is in flight, this look finds what was submitted after the last one.
            let (found, at) = (state.entries.iter_mut().rev(), Instant::now());
            found.take_while(|entry| entry.seq >= seen).for_each(|entry| _ = entry.since.get_or_insert(at));
            now || seen == state.open
        })
    }

    /// A look for a caller that asks about `seq` and will ask again: closes it if it is open, and
    /// asks the driver. If the state's lock is taken at that moment, closing is left to a later
    /// look.
    pub(super) fn glance(&self, seq: u64) {
        if !crate::os::forked() {
            self.look_at(self.state.try_lock(), |state| seq >= state.open);
        }
    }

    /// Closes the open sequence number if asked to or an event failed, and asks the driver.
    fn look_at(
        &self,
        state: Option<MutexGuard<'_, TimelineState>>,
        wants: impl FnOnce(&mut TimelineState) -> bool,
    ) -> bool {
        let due = state.is_some_and(|mut state| wants(&mut state) && state.has_open() || state.has_failed());
        if let Some(error) = self.context.poisoned() {
            self.lose(error);
        }
        if due {
            _ = self.close();
        }
        self.ask()
    }

    /// [`close`](Self::close) for a stream that is destroyed afterwards, once its work is complete:
    /// no other thread names it to the driver any more. The caller knows that none submits.
    ///
    /// # Errors
    /// The number is not closed, or its event is still due: then the stream is still named.
    pub(crate) fn close_for_good(&self) -> Result<()> {
        const OUTSIDE: &str = "end the capture, and call again";
        if self.elsewhere().is_none() {
            self.not_capturing("recording the events of holds", OUTSIDE)?;
        }
        self.close()?;
        loop {
            let state = self.state.lock();
            // A thread that found the number due just before may be in a call of the driver, which
            // does not take long.
            if state.under_way == 0 {
                return match state.is_uncovered() {
                    true => Err(Error::Capturing { what: "an event of the stream", remedy: OUTSIDE }),
                    false => self.not_lost(),
                };
            }
            drop(state);
            crate::sync::yield_now();
        }
    }

    /// Marks the timeline as off the reaper's list if nothing is in flight, and returns whether it
    /// did. For the reaper, which has the list.
    pub(crate) fn unlist(&self) -> bool {
        let mut state = self.state.lock();
        (state.listed, state.idle_looks) = (!state.is_idle(), 0);
        !state.listed
    }

    /// How many looks of the reaper in a row, this one among them, found nothing in flight.
    pub(super) fn count_idle(&self) -> u32 {
        let mut state = self.state.lock();
        state.idle_looks = if state.is_idle() { state.idle_looks + 1 } else { 0 };
        state.idle_looks
    }

    /// Whether nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.state.lock().is_idle()
    }
}

/// A thread that closes a sequence number and records its event. Meanwhile it names the stream to
/// the driver. Its drop, after an error or by a panic too, says how that ended: where the event was
/// not recorded for certain, the number is left to a later event.
pub(super) struct Closing<'a> {
    timeline: &'a Timeline,
    /// The number that was closed, and its event.
    mark: Option<Mark>,
    recorded: bool,
}

impl<'a> Closing<'a> {
    pub(super) fn new(timeline: &'a Timeline, state: &mut TimelineState) -> Self {
        state.under_way += 1;
        Self { timeline, mark: None, recorded: false }
    }

    /// Closes the open sequence number and records its event. A `waiter` waits for that event,
    /// which is then recorded even if nothing is in flight: work that the crate does not see may be
    /// on the stream.
    pub(super) fn record(mut self, waiter: Option<StreamHandle>) -> Result<()> {
        crate::os::check_fork()?;
        let timeline = self.timeline;
        let context = &timeline.context;
        // The event comes first: where none can be made, the number is closed without one, and
        // another is due.
        let event = context.event().inspect_err(|error| timeline.not_recorded(error))?;
        {
            let mut state = timeline.state.lock();
            let nothing = !state.has_open() && !state.is_uncovered() && waiter.is_none();
            if nothing || timeline.lost.get().is_some() {
                drop(state);
                context.recycle(event);
                return timeline.not_lost();
            }
            self.mark = Some(Mark { seq: state.open, event });
            state.open += 1;
        }
        let stream = timeline.elsewhere().map_or(timeline.stream, |confined| confined.covering);
        if let Err(error) = context.noting(context.driver().record(event, stream)) {
            drop(self);
            timeline.not_recorded(&error);
            return Err(error);
        }
        // Before the event is published, since it may be used again from then on.
        let waits =
            waiter.map_or(Ok(()), |waiter| context.noting(context.driver().wait_event(waiter, event)));
        self.recorded = true;
        waits
    }
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let mut state = self.timeline.state.lock();
        state.under_way -= 1;
        let Some(mark) = self.mark else { return };
        if self.recorded && self.timeline.lost.get().is_none() {
            let at = state.marks.partition_point(|other| other.seq < mark.seq);
            state.marks.insert(at, mark);
            state.record_failures = 0;
        } else {
            state.fail(mark.event);
        }
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
    /// Removes the mark of a number, unless the stream was lost.
    fn take_mark(&mut self, seq: u64) -> Option<Mark> {
        let at = self.marks.iter().position(|mark| mark.seq == seq)?;
        self.marks.remove(at)
    }

    /// Keeps an event that may be recorded and does not count.
    pub(super) fn fail(&mut self, event: EventHandle) {
        self.failed.push((self.open - 1, event));
    }

    /// The highest number that a recorded event covers which was not seen complete. 0: none.
    pub(super) fn covered(&self) -> u64 {
        self.marks.back().map_or(0, |mark| mark.seq)
    }

    /// Whether entries of closed numbers wait for an event that is not recorded.
    pub(super) fn is_uncovered(&self) -> bool {
        let closed = self.entries.iter().rfind(|entry| entry.seq < self.open);
        closed.is_some_and(|entry| entry.seq > self.covered())
    }

    /// Whether an event failed, and no thread is about to record another one.
    pub(super) fn has_failed(&self) -> bool {
        self.is_uncovered() && self.under_way == 0
    }

    /// Completes the entries up to a sequence number. `flights` gets how long the timed ones took.
    fn complete(
        &mut self,
        seq: u64,
        flights: &crate::locks::Mutex<crate::telemetry::counters::Histogram>,
        after: &mut After,
    ) {
        self.moves += 1;
        while self.entries.front().is_some_and(|entry| entry.seq <= seq) {
            let Some(entry) = self.entries.pop_front() else { break };
            self.completed += 1;
            if let Some(since) = entry.since.filter(|_| entry.number % TIMED == 0) {
                flights.lock().record(since.elapsed());
            }
            if let Some(flown) = entry.flown {
                // Counted before the word changes: from then on the handle may return the segment,
                // and with the last segment of a closed pool the central pool is freed.
                flown.count(-1, -isize::from(flown.is_claimed()));
                after.returned.extend(flown.complete());
            }
            after.released.extend(entry.host.into_iter().chain(entry.memory));
        }
    }
}
