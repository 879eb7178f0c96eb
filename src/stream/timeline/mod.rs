//! A stream's timeline: what was submitted, which events cover it, and what is known to be complete.
//!
//! # Sequence numbers and events
//!
//! ```text
//!   entries           a b c | d | e f g | h       each has the number that was open when its driver call had returned
//!   sequence number     5     6     7     8       8 is open
//!   events                 ^6      ^7             recorded after its number was closed; covers all numbers up to it
//!   completed           5
//! ```
//!
//! A thread that submits calls the driver first and reads the open sequence number afterwards. A thread that closes a
//! number first makes the next number open and records the event afterwards. So an entry that read number *t* was
//! submitted before *t* was closed, hence before the event of *t* was recorded, hence the event covers it. In the other
//! order, an entry could read a number whose event was recorded before the copy was submitted, and its segment would be
//! free while the copy still reads. (A loom model must catch that: `.ci/planted/seq_before_copy.patch`.)
//!
//! An event is published only after the driver recorded it, since an event that was never recorded asks as complete. If
//! recording fails, the entries wait for a later event, which covers them as well. The driver may have recorded the
//! failed one all the same, so that one is put aside until the later event is complete. If no event can be made, the
//! entries are quarantined.
//!
//! # Asking the driver
//!
//! Asking about an event is cheap for one thread and very dear for many at once (138 ns alone, 7.6 us among sixteen).
//! So one thread asks per timeline: asking is a role that a thread takes by one compare-and-swap. It is a thread that
//! waits or polls, or else the reaper. All other threads read `completed`.
//!
//! # Completion
//!
//! When an event was seen complete, the entries that it covers are removed *before* `completed` is raised. So a thread
//! that sees `completed` finds its segment's word and the statistics up to date. For each segment the handle and the
//! timeline meet in the state word ([`crate::freelist::descriptor`]). If the handle is still there, the segment waits
//! for it as COMPLETED; if the handle was dropped (DETACHED), the timeline returns the segment to its central pool.
//!
//! # Shared streams
//!
//! A stream is *shared* if it was adopted or its handle was given out: then the program submits work to it that this
//! crate does not see. On a shared stream each submit closes its sequence number, on the submitting thread. So the
//! event covers all that was queued when the call was made, and a hold covers the program's kernels. (A *patient* hold
//! leaves the number open, as a submit to another stream does: many holds share an event, which is recorded up to a
//! millisecond later, and covers what was queued meanwhile, too.)
//!
//! A shared stream can be captured into a graph. During a capture nothing may be submitted or recorded: it would not
//! run now, and would run again with each launch. So each submit asks the driver first, and so does each later attempt
//! to record an event that failed. (Such an attempt may run on a thread of the crate and ask just before a capture
//! begins. Its event is then a captured one. The driver says so when it is asked about the event, and a new event is
//! recorded after the capture.) A stream that is not shared is never asked about.
//!
//! A shared stream may be confined to one thread ([`crate::device::confined`]). All driver calls that get its handle are made on
//! that thread. Another thread leaves closing to it, unless that has failed there: then it records an event on the stream
//! that covers the confined one. (That stream waits for those of other threads, too, and using it would spoil a capture of
//! one: so it is used for nothing else, and asked about before.)
//!
//! # Invariants
//!
//! - An entry is first in `pending` (its driver call is under way), then in `entries` (in flight), and in one of them
//!   only. A claimed segment is in `claims` instead.
//! - `completed` only grows. `events` has only events whose recording succeeded.
//! - A closed number that no published event covers is at most `unpublished`, or its event is being recorded. So an
//!   event for it is due or under way.
//! - A lost timeline (`lost`) has no published events and no entries, and gets no event any more. An entry that joins it
//!   is quarantined by the thread that submitted it.
//!
//! # Files, in the order to read them
//!
//! This file: sequence numbers and entries, what is submitted. [`events`]: closing, recording, asking, completing.
//! [`waits`]: how threads and tasks wait. [`claims`]: stream-ready reuse. [`look`]:
//! what statistics and reports see.

mod claims;
mod events;
mod look;
#[cfg(all(test, not(loom)))]
mod tests;
mod waits;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crossbeam::utils::CachePadded;
use slab::Slab;

use self::claims::Claim;
pub use self::look::{EventState, StreamStats};
use self::waits::Waiting;
use super::hold::{After, Flown, Hold, Resource, Retain};
use super::reaper::Listing;
use crate::central::{CentralPool, Segment};
use crate::device::confined::Confined;
use crate::device::context::Context;
use crate::device::{EventHandle, StreamHandle};
use crate::error::{Error, Result};
use crate::foreign::{self, Deferral, KeepAlive};
use crate::freelist::state;
use crate::sync::{AtomicBool, AtomicU64, Mutex};

/// On a stream that is not shared, a sequence number is closed after this many entries or bytes, whichever comes first.
const SEQ_ENTRIES: usize = 16;
const SEQ_BYTES: usize = 4 << 20;
/// Failures in a row of recording, or of asking, after which the timeline is given up. (Under loom after the first,
/// since each attempt is a part of the model.)
const EVENT_TRIES: u32 = if cfg!(loom) { 1 } else { 1000 };
/// One in this many submissions to a stream is timed, the first among them: a clock read for each would be noticeable
/// beside the cost of recording an event.
pub(crate) const TIMED: u64 = 16;

/// Bytes of one central pool on this timeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Flight {
    /// In flight.
    pub(crate) bytes: usize,
    /// Of these, the bytes of segments that are claimed.
    pub(crate) claimed: usize,
}

/// What is in flight on a timeline. The central pools count the sums over all timelines.
#[derive(Debug, Default)]
struct Flights {
    /// By the central pool's number.
    by_central: Vec<(u64, Flight)>,
    /// Counts changes, so that a reader that looks twice knows whether anything changed in between.
    moves: u64,
}

impl Flights {
    /// Counts a change of the bytes of a central pool that are in flight, and of those that are claimed.
    fn change(&mut self, central: &CentralPool, bytes: isize, claimed: isize) {
        self.moves += 1;
        let number = central.number();
        let at = self.by_central.iter().position(|f| f.0 == number).unwrap_or_else(|| {
            self.by_central.retain(|f| f.1 != Flight::default());
            self.by_central.push((number, Flight::default()));
            self.by_central.len() - 1
        });
        let flight = &mut self.by_central[at].1;
        flight.bytes = flight.bytes.wrapping_add_signed(bytes);
        flight.claimed = flight.claimed.wrapping_add_signed(claimed);
        central.change_flight(bytes, claimed);
    }
}

/// What was submitted: it keeps what its copy uses until its sequence number is complete.
#[derive(Debug)]
struct TimelineEntry {
    /// Host memory: a segment, or something else.
    flown: Option<Flown>,
    host: Option<Hold>,
    /// Device memory.
    memory: Option<Hold>,
    /// When it was submitted, if it is one of the timed entries.
    since: Option<Instant>,
}

impl TimelineEntry {
    /// Visits each segment, for reports.
    fn for_each_segment(&self, visit: &mut dyn FnMut(&Segment)) {
        self.flown.iter().for_each(|flown| visit(&flown.segment));
        self.host.iter().for_each(|hold| hold.for_each_segment(visit));
    }
}

#[derive(Debug, Default)]
struct TimelineState {
    /// The open sequence number. They start at 1, so that `completed` = 0 covers nothing.
    open: u64,
    open_entries: usize,
    open_bytes: usize,
    /// The highest sequence number for which another event is due, since recording one failed; or 0. It is the open one
    /// where there was not even an event to record.
    unpublished: u64,
    /// Threads that have found a number of a shared stream due: they name the stream to the driver, to record its event.
    closing: u32,
    /// Events that are being recorded: their sequence numbers are closed, the events are not published yet.
    recording: u32,
    /// Failures in a row of recording, and of asking about the oldest event.
    record_failures: u32,
    query_failures: u32,
    /// Entries whose driver call is under way.
    pending: Slab<TimelineEntry>,
    /// Entries in flight by sequence number, oldest first.
    entries: VecDeque<(u64, TimelineEntry)>,
    claims: Slab<Claim>,
    /// Published events in the order of their publication, each with the highest sequence number that it covers.
    events: VecDeque<(u64, EventHandle)>,
    /// Events that may be recorded and never seen complete, or that a capture had, each with the number that was open
    /// then. They are free again when an event of that number or a later one is complete.
    aside: Vec<(u64, EventHandle)>,
    /// Threads and tasks that wait, by numbers of which none is used twice.
    waiting: BTreeMap<u64, Waiting>,
    next_wait: u64,
    flights: Flights,
    /// Number of entries so far, and of those that are complete. (The timeline's own `completed` is a sequence number.)
    submitted: u64,
    completed: u64,
    lost: Option<Error>,
    /// Whether the timeline is on the reaper's list.
    listed: bool,
    /// The open sequence number at the reaper's last look.
    seen: u64,
    /// When a look of the reaper's found that the sequence numbers up to this one were closed and not all complete.
    dates: VecDeque<(u64, Instant)>,
}

/// A stream's timeline. The module's page describes it.
#[derive(Debug)]
pub(crate) struct Timeline {
    /// Unique in this process.
    number: u64,
    context: Arc<Context>,
    stream: StreamHandle,
    /// Whether a sequence number may stay open for a while, on a stream that is not shared. `false` where recording an
    /// event may block: the submitting thread then closes each number, so that the reaper need not.
    lingers: bool,
    /// Whether the stream is shared. Set once, under the state's lock; a submit reads it under that lock to decide
    /// whether its sequence number may stay open. Without the lock it is a hint only, which is enough: the program gets
    /// the handle, and so can begin a capture, only after the flag was set. (Not loom's type: in no model a read
    /// without the lock matters.)
    shared: std::sync::atomic::AtomicBool,
    /// Whether segments in flight here may be claimed: only if the stream has no other timeline.
    claims: bool,
    /// Whether the crate made the stream, and so destroys it.
    destroy: bool,
    /// The thread that submits to the stream, if only one can.
    confined: Option<Confined>,
    /// What keeps an adopted stream alive, if the program gave it.
    keep_alive: OnceLock<KeepAlive>,
    reaper: Listing,
    /// The highest sequence number that is known to be complete.
    completed: CachePadded<AtomicU64>,
    /// Whether `lost` is set in the state, for readers without the lock. Set under the lock, with release, before any
    /// waiter is woken; pairs with the acquire in `is_complete`, which then reads the error under the lock.
    given_up: AtomicBool,
    /// Whether a thread has the role of asking.
    asking: AtomicBool,
    /// Threads that have quarantined segments here and have not yet told the central pools. Raised under the state's
    /// lock together with the change of the segments' words, lowered when the central pools know. (Not loom's type:
    /// only checks read it.)
    accounting: std::sync::atomic::AtomicU32,
    state: Mutex<TimelineState>,
}

impl Timeline {
    /// The timeline of a stream. `own`: the crate made it; else the program did. `claims`: it has no other timeline.
    pub(crate) fn new(
        context: Arc<Context>,
        stream: StreamHandle,
        own: bool,
        claims: bool,
        confined: Option<Confined>,
        reaper: Listing,
    ) -> Arc<Self> {
        let lingers = !context.driver().record_may_block();
        static NUMBERS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let timeline = Arc::new(Self {
            number: NUMBERS.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
            context,
            stream,
            lingers,
            shared: std::sync::atomic::AtomicBool::new(!own),
            claims,
            destroy: own,
            confined,
            keep_alive: OnceLock::new(),
            reaper,
            completed: CachePadded::new(AtomicU64::new(0)),
            given_up: AtomicBool::new(false),
            asking: AtomicBool::new(false),
            accounting: std::sync::atomic::AtomicU32::new(0),
            state: Mutex::new(TimelineState { open: 1, ..TimelineState::default() }),
        });
        timeline.reaper.know(&timeline);
        timeline
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn stream(&self) -> StreamHandle {
        self.stream
    }

    /// Whether the whole device is lost, and not only this stream.
    fn is_dead(&self) -> bool {
        self.context.poisoned().is_some()
    }

    /// An error if nothing can be submitted.
    pub(crate) fn usable(&self) -> Result<()> {
        self.context.alive()?;
        self.state.lock().lost.clone().map_or(Ok(()), Err)
    }

    // --- shared streams ----------------------------------------------------------------------------------------------

    /// Whether the program can submit to the stream. A hint without the lock, see the field.
    fn is_shared(&self) -> bool {
        self.shared.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// From here on the stream is shared.
    pub(crate) fn share(&self) {
        {
            let _state = self.state.lock();
            self.shared.store(true, std::sync::atomic::Ordering::Relaxed);
        }
        // So that an event covers what is in flight now, and not the program's later work too.
        self.close();
    }

    /// Gives `keep_alive` to the timeline, unless it has one already: that one keeps the same stream alive.
    pub(crate) fn keep(&self, keep_alive: KeepAlive) {
        let _ = self.keep_alive.set(keep_alive);
    }

    /// The confinement, if the calling thread cannot name the stream.
    fn elsewhere(&self) -> Option<Confined> {
        self.confined.filter(|confined| !confined.is_here())
    }

    /// An error if the calling thread cannot name the stream: to be asked before any call that the driver gets its
    /// handle in.
    fn nameable(&self) -> Result<()> {
        match self.elsewhere() {
            Some(_) => Err(Error::Mismatch {
                what: "the per-thread default stream",
                of: "another thread".into(),
                with: self.context.name().into(),
                remedy: "submit on the thread that adopted it, or adopt this thread's own",
            }),
            None => Ok(()),
        }
    }

    /// Whether the stream is being captured. Asks the driver about shared streams only.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        crate::os::check_fork()?;
        if !self.is_shared() {
            return Ok(false);
        }
        self.nameable()?;
        self.context.alive()?;
        self.context.noting(self.context.driver().capturing(self.stream))
    }

    /// An error that says what was refused and what to do instead, if the stream is being captured.
    pub(crate) fn not_capturing(&self, what: &'static str, remedy: &'static str) -> Result<()> {
        if self.is_capturing()? { Err(Error::Capturing { what, remedy }) } else { Ok(()) }
    }

    // --- submitting --------------------------------------------------------------------------------------------------

    /// Enters what is about to be handed to the driver. On an error the driver was not called, and the resource comes
    /// back.
    pub(crate) fn begin(
        self: &Arc<Self>,
        retained: Resource,
        memory: Option<Arc<dyn Retain>>,
    ) -> std::result::Result<Submission<'_>, (Error, Resource)> {
        if let Err(error) = self.context.alive().and_then(|()| self.nameable()) {
            return Err((error, retained));
        }
        let mut state = self.state.lock();
        if let Some(error) = &state.lost {
            return Err((error.clone(), retained));
        }
        let (mut flown, mut host) = (None, None);
        match retained {
            Resource::Segment(segment) => {
                let departed = flown.insert(Flown::new(segment));
                state.flights.change(departed.segment.central(), departed.bytes as isize, 0);
            }
            Resource::Claimed(key) => {
                let Claim { seq, flown: earlier, memory, since, completed } = state.claims.remove(key);
                let departed = flown.insert(Flown::new(earlier.segment));
                let (central, bytes) = (departed.segment.central(), departed.bytes as isize);
                if completed {
                    state.flights.change(central, bytes, 0);
                } else {
                    state.flights.change(central, 0, -bytes);
                    // What the claim follows is still to be seen complete, and may use device memory.
                    state.insert(seq, TimelineEntry { flown: None, host: None, memory, since });
                }
            }
            Resource::Object(object) => host = Some(Hold::new(object)),
            Resource::Nothing => {}
        }
        state.flights.moves += 1;
        // Loom's models take no time.
        let timed = !cfg!(loom) && state.submitted % TIMED == 0;
        state.submitted += 1;
        let since = timed.then(Instant::now);
        let memory = memory.map(Hold::new);
        let key = state.pending.insert(TimelineEntry { flown, host, memory, since });
        // Foreign code is put off from here until the entry has its sequence number.
        let deferral = foreign::defer();
        Ok(Submission { timeline: self, key: Some(key), patient: false, _deferral: deferral })
    }

    /// The driver was called: the entry joins the sequence number that is open now. `patient`: on a shared stream, too, the
    /// number may stay open for a while.
    fn commit(self: &Arc<Self>, key: usize, patient: bool) -> u64 {
        let mut state = self.state.lock();
        // Read under the lock: a thread that shares the stream after this closes the sequence number itself.
        let shared = self.is_shared();
        let entry = state.pending.remove(key);
        let seq = state.open;
        state.open_entries += 1;
        state.open_bytes += entry.flown.as_ref().map_or(0, |flown| flown.bytes);
        state.insert(seq, entry);
        let lost = state.lost.clone();
        let lingers = self.lingers && (!shared || patient && self.confined.is_none());
        let close = !lingers || state.open_entries >= SEQ_ENTRIES || state.open_bytes >= SEQ_BYTES;
        let list = !std::mem::replace(&mut state.listed, true);
        drop(state);
        if list {
            self.reaper.list(self);
        }
        if let Some(error) = lost {
            self.lose(&error);
        }
        if close {
            self.close_submitted();
        }
        seq
    }

    // --- looking -----------------------------------------------------------------------------------------------------

    /// Bytes of a central pool that are in flight here, and how many of these are claimed; and a count of all changes so
    /// far, or `None` while a change is half done.
    pub(crate) fn flight(&self, central: u64) -> (Flight, Option<u64>) {
        let state = self.state.lock();
        let known = state.flights.by_central.iter().find(|f| f.0 == central);
        let flight = known.map_or_else(Flight::default, |f| f.1);
        // Acquire: pairs with the releases that lower `accounting`.
        let accounted = self.accounting.load(std::sync::atomic::Ordering::Acquire) == 0;
        (flight, accounted.then_some(state.flights.moves))
    }

    /// The sequence number of everything submitted so far, for a caller that has nothing to submit.
    pub(crate) fn checkpoint(self: &Arc<Self>) -> Result<u64> {
        let submission = self.begin(Resource::Nothing, None).map_err(|(error, _)| error)?;
        Ok(submission.commit())
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        let keep_alive = self.keep_alive.take();
        if crate::os::forked() {
            // They are the parent's: its tasks are among the waiters.
            let waiting = std::mem::take(&mut self.state.get_mut().waiting);
            return std::mem::forget((keep_alive, waiting));
        }
        self.reaper.forget(self.number);
        let aside = std::mem::take(&mut self.state.get_mut().aside);
        aside.into_iter().for_each(|(_, event)| self.context.set_aside(event));
        // A timeline with anything in flight is on the reaper's list and so is not dropped, unless a panic has removed
        // it from the list.
        if !self.state.get_mut().is_idle() {
            self.lose(&Error::Internal("a stream was dropped with work in flight"));
            self.context.holds().leaked(1);
            let state = self.state.get_mut();
            self.context.count_past(state.submitted, state.completed);
            return std::mem::forget(keep_alive);
        }
        if let Some(keep_alive) = keep_alive {
            // Its drop may destroy the stream, or do anything else. The adopted context, which the stream is in, is
            // kept until then.
            let driver = self.context.driver().clone();
            self.context.worker().send(move || {
                drop(keep_alive);
                drop(driver);
            });
        }
        let state = self.state.get_mut();
        self.context.count_past(state.submitted, state.completed);
        if !self.destroy {
            return;
        }
        let (driver, stream, holds) =
            (self.context.driver().clone(), self.stream, self.context.holds().clone());
        self.context.worker().send(move || {
            if let Err(error) = driver.destroy_stream(stream) {
                holds.leaked(1);
                crate::foreign::warn!(target: "pinpool::stream::leak", device = driver.name(), %error, "a stream is leaked");
            }
        });
    }
}

impl TimelineState {
    fn is_idle(&self) -> bool {
        self.pending.is_empty()
            && self.entries.is_empty()
            && self.events.is_empty()
            && self.unpublished == 0
            // A later event may have been published before the one that is still being recorded.
            && self.recording == 0
            && self.open_entries == 0
            && self.claims.iter().all(|(_, c)| c.completed)
    }

    /// Inserts in the order of sequence numbers; nearly always at the end.
    fn insert(&mut self, seq: u64, entry: TimelineEntry) {
        let at = self.entries.iter().rposition(|(t, _)| *t <= seq).map_or(0, |i| i + 1);
        self.entries.insert(at, (seq, entry));
    }

    /// Notes when the reaper found entries in flight, for reports. An open sequence number may get entries later, so only
    /// closed ones are noted.
    fn note_date(&mut self, completed: u64) {
        let closed = self.open - 1;
        if closed > completed && self.dates.back().is_none_or(|(noted, _)| *noted < closed) {
            self.dates.push_back((closed, Instant::now()));
        }
    }

    fn complete(&mut self, seq: u64, after: &mut After) {
        while self.dates.front().is_some_and(|(closed, _)| *closed <= seq) {
            self.dates.pop_front();
        }
        while self.entries.front().is_some_and(|(t, _)| *t <= seq) {
            let Some((_, TimelineEntry { flown, host, memory, since })) = self.entries.pop_front() else {
                break;
            };
            self.completed += 1;
            after.timed.extend(since);
            if let Some(flown) = flown {
                self.flights.change(flown.segment.central(), -(flown.bytes as isize), 0);
                after.returned.extend(flown.complete());
            }
            after.released.extend(host.into_iter().chain(memory));
        }
        for (_, claim) in self.claims.iter_mut().filter(|(_, c)| c.seq <= seq && !c.completed) {
            claim.completed = true;
            self.completed += 1;
            after.timed.extend(claim.since);
            // The holder of the claim reads `completed` under this lock, so the word can only be CLAIMED.
            let Flown { segment, word, bytes } = &claim.flown;
            let _ = segment.descriptor().compare_exchange(word.with(state::CLAIMED), state::HOST);
            self.flights.change(segment.central(), -(*bytes as isize), -(*bytes as isize));
            after.released.extend(claim.memory.take());
        }
    }

    /// Quarantines every entry that has joined a sequence number. A pending entry follows when it joins.
    ///
    /// With `dead`, the whole device is lost and uses nothing any more, so device memory is let go of. Otherwise the
    /// copies may still be queued, and their device memory is leaked, since a device may die of a copy to freed memory.
    fn quarantine(&mut self, dead: bool, after: &mut After) {
        let After { quarantined, released, lost, .. } = after;
        // Of the device's memory.
        let mut memories = Vec::new();
        for (_, TimelineEntry { flown, host, memory, .. }) in std::mem::take(&mut self.entries) {
            if let Some(flown) = flown {
                self.flights.change(flown.segment.central(), -(flown.bytes as isize), 0);
                quarantined.extend(flown.quarantine());
            }
            lost.extend(host);
            memories.extend(memory);
        }
        for (_, claim) in self.claims.iter_mut().filter(|(_, c)| !c.completed) {
            claim.completed = true;
            quarantined.extend(claim.flown.quarantine());
            let bytes = claim.flown.bytes as isize;
            self.flights.change(claim.flown.segment.central(), -bytes, -bytes);
            memories.extend(claim.memory.take());
        }
        if dead { released } else { lost }.append(&mut memories);
        (self.open_entries, self.open_bytes, self.unpublished) = (0, 0, 0);
        self.dates.clear();
    }
}

/// A submission under way. If it is dropped uncommitted, by a panic for instance, its entry counts as handed to the
/// driver all the same: it is in flight until a later event, not free.
#[derive(Debug)]
pub(crate) struct Submission<'a> {
    timeline: &'a Arc<Timeline>,
    key: Option<usize>,
    /// Whether the sequence number may stay open for a while on a shared stream, too.
    pub(crate) patient: bool,
    /// Ends after the entry has joined: fields are dropped after `drop` below.
    _deferral: Deferral,
}

impl Submission<'_> {
    /// The driver was called, with whatever result. Returns the sequence number of the entry in flight.
    pub(crate) fn commit(mut self) -> u64 {
        self.join()
    }

    fn join(&mut self) -> u64 {
        self.key.take().map_or(0, |key| self.timeline.commit(key, self.patient))
    }
}

impl Drop for Submission<'_> {
    fn drop(&mut self) {
        self.join();
    }
}

/// A sequence number of a timeline: what a handle waits for.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    pub(crate) timeline: Arc<Timeline>,
    pub(crate) seq: u64,
}
