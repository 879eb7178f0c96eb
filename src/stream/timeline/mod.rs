//! A stream's timeline: what was submitted, what events cover it, and what is known to be complete.
//!
//! # Sequence numbers and events
//!
//! ```text
//!   entries      a b c | d | e f g | h        each with the sequence number that was open when its driver call had returned
//!   sequence number           5     6     7     8 (open)
//!   events                ^6        ^7         an event recorded after the sequence number was closed: covers all sequence numbers up to it
//!   completed     5
//! ```
//!
//! Whoever submits calls the driver first and reads the open sequence number afterwards. Whoever closes a sequence
//! number first makes the next one open and records its event afterwards. So an entry that read sequence number *t* was
//! submitted before *t* was closed, hence before the event of *t* was recorded, hence the event covers it. Read in the
//! other order, an entry could get a sequence number whose event was recorded before its copy was submitted, and would
//! be freed while the copy still reads: that is the mistake `tick_before_copy` that the loom model must catch.
//!
//! An event is published only when the recording succeeded, since an event that was never recorded asks as complete. If
//! it failed, its entries wait for a later event, which covers them as well; if no event can be made, they are
//! quarantined.
//!
//! # Who asks
//!
//! Asking the driver about one event is cheap for one thread and very dear for many at once, so asking is a role, taken
//! by try-acquire: by a thread in `wait()` if it is free, else by the reaper. Everyone else reads `completed`.
//!
//! # Landing
//!
//! When an event was seen complete, the entries that it covers are taken out *before* `completed` is raised: whoever
//! sees `completed` therefore finds its segment's word completed and the books balanced. For each segment the handle
//! and the timeline meet in the state word ([`crate::freelist::descriptor`]): if the handle is still there the segment
//! waits for it as COMPLETED, if it was dropped (DETACHED) the timeline returns the segment to its central pool.
//!
//! # Streams that others can reach
//!
//! On a stream that was adopted, or whose handle was given out, others submit work that nobody tells us of. So there
//! each submit closes its sequence number, on the thread that submits: its event covers all that was queued when the
//! call was made, and a hold covers the server's own kernels. And such a stream can be captured into a graph. Then
//! nothing is submitted and nothing recorded: it would not run, and would run again with each launch. Each submit asks
//! first; so does whoever makes up for an event that failed. (That one may be a thread of ours, and ask just before a
//! capture begins. Its event is then a captured one, which says so when it is asked about, and a new event is made
//! after the capture.)
//!
//! Streams of ours whose handle nobody has are never asked about.
//!
//! # Files
//!
//! Here are sequence numbers and entries: what is submitted. [`events`]: what closes, asks and completes. [`retained`]:
//! what an entry keeps. [`waits`]: who waits. [`claims`]: stream-ready reuse. [`look`]: what statistics and reports
//! see.

mod claims;
mod events;
mod look;
mod retained;
#[cfg(all(test, not(loom)))]
mod tests;
mod waits;

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use crossbeam::utils::CachePadded;
use slab::Slab;

use self::claims::Claim;
pub use self::look::EventState;
pub(crate) use self::look::Stillness;
use self::retained::{After, InUse, Retained, TimelineEntry, complete_segment, quarantine_segment};
pub(crate) use self::retained::{Joint, Quarantined, Resource, Retain, RetainedResource};
use self::waits::Waiting;
pub(crate) use self::waits::{SPIN, WaitKey};
use super::reaper::Listing;
use crate::central::CentralPool;
use crate::device::context::Context;
use crate::device::memory::Allocation;
use crate::device::{EventHandle, StreamHandle};
use crate::error::{Error, Result};
use crate::foreign::{self, Deferral, KeepAlive};
use crate::freelist::state;
use crate::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard};

/// On streams of ours a sequence number is closed after so many entries or bytes, whichever comes first.
const SEQ_ENTRIES: usize = 16;
const SEQ_BYTES: usize = 4 << 20;
/// How often in a row recording or asking may fail before what waits for an event is given up. (Under loom at once,
/// since each try is a part of the model.)
const EVENT_TRIES: u32 = if cfg!(loom) { 1 } else { 1000 };
/// One in so many submissions to a stream is timed, the first among them: reading the clock would be felt beside a
/// record.
pub(crate) const TIMED: u64 = 16;

/// Bytes of one central pool on this timeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Flight {
    pub(crate) bytes: usize,
    pub(crate) claimed: usize,
}

#[derive(Debug)]
struct TimelineState {
    /// The open sequence number. Sequence numbers start at 1, so that `completed` = 0 covers nothing.
    open: u64,
    open_entries: usize,
    open_bytes: usize,
    /// The highest closed sequence number for which no event was published, or 0.
    unpublished: u64,
    /// Events that are being recorded: closed sequence numbers whose event is not published yet.
    recording: u32,
    /// Attempts at recording, and at asking about the oldest event, that failed in a row.
    record_failures: u32,
    query_failures: u32,
    /// Events whose recording failed, so that nobody knows whether they were recorded, each with the sequence number
    /// whose event comes after that attempt for certain.
    doubtful: Vec<(u64, EventHandle)>,
    /// Entries whose driver call is under way.
    pending: Slab<TimelineEntry>,
    /// By sequence number, oldest first.
    entries: VecDeque<(u64, TimelineEntry)>,
    claims: Slab<Claim>,
    /// Published events, in the order of their recording.
    events: VecDeque<(u64, EventHandle)>,
    waiting: Slab<Waiting>,
    next_wait: u64,
    flights: Vec<(u64, Flight)>,
    /// Counts changes of what is in flight, so that who looks twice knows whether anything happened in between.
    moves: u64,
    /// Entries so far, and those of them that are complete.
    submitted: u64,
    completed: u64,
    lost: Option<Error>,
    /// Whether the reaper has this timeline on its list.
    listed: bool,
    /// The open sequence number at the reaper's last look.
    seen: u64,
}

/// See the module's page.
#[derive(Debug)]
pub(crate) struct Timeline {
    /// Never another's in this process.
    number: u64,
    context: Arc<Context>,
    stream: StreamHandle,
    /// Whether sequence numbers may stay open for a while, where nobody else submits.
    lingers: bool,
    /// Whether others can reach the stream. Changed under the state's lock, once; who submits looks under that lock
    /// whether its sequence number may stay open. Without the lock it is only a hint: whoever gives a handle to others,
    /// who then capture, does so before they do. (Not loom's: no model has such streams.)
    shared: std::sync::atomic::AtomicBool,
    /// Whether it is this very stream, whatever its handle, so that order on it can be relied on without waiting.
    claims: bool,
    /// Made by us, so destroyed by us.
    destroy: bool,
    /// What keeps a stream of others alive, if its owner said so.
    keep_alive: OnceLock<KeepAlive>,
    reaper: Listing,
    completed: CachePadded<AtomicU64>,
    /// Whether `lost` is set in the state, for those who only look. Set under the lock, with release, before anyone is
    /// woken; pairs with the acquire in `is_complete`, which then reads the error under the lock.
    given_up: AtomicBool,
    /// Whether somebody asks just now.
    asking: AtomicBool,
    /// Who is about to book what was quarantined: raised under the state's lock, with the segments' words, and lowered
    /// when their central pools know. (Not loom's: only checks look.)
    booking: std::sync::atomic::AtomicU32,
    /// What leads here, if anything does.
    upstream: OnceLock<Weak<dyn Upstream>>,
    state: Mutex<TimelineState>,
}

/// A queue that leads to a timeline: what it holds is on its way, and in flight by its segments' words already.
pub(crate) trait Upstream: std::fmt::Debug + Send + Sync {
    /// Bytes of a pool that wait there and that nothing else counts; and a number that changes with them, if no change
    /// is half-way.
    fn queued(&self, central: u64) -> (usize, Option<u64>);
}

impl Timeline {
    /// Of a stream of ours.
    pub(crate) fn new(context: Arc<Context>, stream: StreamHandle, reaper: Listing) -> Arc<Self> {
        Self::make(context, stream, true, true, reaper)
    }

    /// Of a stream that others made. `claims`: nothing else will ever be known by this timeline.
    pub(crate) fn adopted(
        context: Arc<Context>,
        stream: StreamHandle,
        claims: bool,
        reaper: Listing,
    ) -> Arc<Self> {
        Self::make(context, stream, false, claims, reaper)
    }

    fn make(
        context: Arc<Context>,
        stream: StreamHandle,
        own: bool,
        claims: bool,
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
            keep_alive: OnceLock::new(),
            reaper,
            completed: CachePadded::new(AtomicU64::new(0)),
            given_up: AtomicBool::new(false),
            asking: AtomicBool::new(false),
            booking: std::sync::atomic::AtomicU32::new(0),
            upstream: OnceLock::new(),
            state: Mutex::new(TimelineState {
                open: 1,
                open_entries: 0,
                open_bytes: 0,
                unpublished: 0,
                recording: 0,
                record_failures: 0,
                query_failures: 0,
                doubtful: Vec::new(),
                pending: Slab::new(),
                entries: VecDeque::new(),
                claims: Slab::new(),
                events: VecDeque::new(),
                waiting: Slab::new(),
                next_wait: 0,
                flights: Vec::new(),
                moves: 0,
                submitted: 0,
                completed: 0,
                lost: None,
                listed: false,
                seen: 0,
            }),
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

    /// What leads to this timeline, once.
    pub(crate) fn fed_by(&self, upstream: Weak<dyn Upstream>) {
        let _ = self.upstream.set(upstream);
    }

    /// Whether the device is lost, and not only this stream.
    fn is_dead(&self) -> bool {
        self.context.poisoned().is_some()
    }

    /// Has the reaper look again soon: somebody parked.
    pub(crate) fn expedite(self: &Arc<Self>) {
        self.reaper.expedite(self);
    }

    /// Whether anything can be submitted.
    pub(crate) fn usable(&self) -> Result<()> {
        crate::os::check_fork()?;
        self.context.alive()?;
        self.state.lock().lost.clone().map_or(Ok(()), Err)
    }

    // --- streams that others can reach -------------------------------------------------------------------------------

    /// Whether others can submit to the stream.
    pub(crate) fn is_shared(&self) -> bool {
        self.shared.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// From here on others can reach the stream.
    pub(crate) fn share(&self) {
        {
            let _state = self.state.lock();
            self.shared.store(true, std::sync::atomic::Ordering::Relaxed);
        }
        // Their work is not to be waited for by what is there already.
        self.close();
    }

    /// Leaves `keep_alive` with the timeline, unless it has one: then that keeps the same stream alive.
    pub(crate) fn keep(&self, keep_alive: KeepAlive) {
        let _ = self.keep_alive.set(keep_alive);
    }

    /// Whether the stream is being captured. Asks the driver only about streams that others can reach.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        if !self.is_shared() {
            return Ok(false);
        }
        crate::os::check_fork()?;
        self.context.alive()?;
        self.context.noting(self.context.driver().capturing(self.stream))
    }

    /// An error that says what was refused and what to do, if the stream is being captured.
    pub(crate) fn not_capturing(&self, what: &'static str, remedy: &'static str) -> Result<()> {
        if self.is_capturing()? { Err(Error::Capturing { what, remedy }) } else { Ok(()) }
    }

    // --- submitting --------------------------------------------------------------------------------------------------

    /// Enters what is about to be handed to the driver. Nothing has been handed out yet when this fails.
    pub(crate) fn begin(
        self: &Arc<Self>,
        retained: Resource,
        memory: Option<Arc<Allocation>>,
    ) -> std::result::Result<Submission<'_>, (Error, Resource)> {
        if crate::os::forked() {
            return Err((Error::Forked, retained));
        }
        if let Err(error) = self.context.alive() {
            return Err((error, retained));
        }
        let mut state = self.state.lock();
        if let Some(error) = &state.lost {
            return Err((error.clone(), retained));
        }
        let (retained, bytes) = match retained {
            Resource::Segment(segment) => {
                let bytes = segment.granted();
                let word = segment.descriptor().depart();
                state.flight(segment.central()).bytes += bytes;
                (Retained::Segment { segment, word }, bytes)
            }
            Resource::Claimed(key) => {
                let claim = state.claims.remove(key);
                let central = claim.segment.central().number();
                let word = claim.segment.descriptor().depart();
                if claim.completed {
                    state.flight_of(central).bytes += claim.bytes;
                } else {
                    state.flight_of(central).claimed -= claim.bytes;
                    if claim.memory.is_some() {
                        // The copy that the claim stands behind still uses its device memory.
                        state.insert(
                            claim.seq,
                            TimelineEntry {
                                retained: Retained::Nothing,
                                memory: claim.memory,
                                bytes: 0,
                                since: claim.since,
                            },
                        );
                    }
                }
                (Retained::Segment { segment: claim.segment, word }, claim.bytes)
            }
            Resource::Joint(joint) => (Retained::Joint(joint), 0),
            Resource::Object(object) => (Retained::Object(InUse::new(object)), 0),
        };
        state.moves += 1;
        // Under loom none: nothing depends on it.
        let timed = !cfg!(loom) && state.submitted % TIMED == 0;
        state.submitted += 1;
        let since = timed.then(Instant::now);
        let memory = InUse::new(memory);
        let key = state.pending.insert(TimelineEntry { retained, memory, bytes, since });
        // From here on until the entry has joined.
        let deferral = foreign::defer();
        Ok(Submission { timeline: self, key: Some(key), seq: planted_seq(&state), _deferral: deferral })
    }

    /// The driver was called: the entry joins under the sequence number that is open now.
    fn commit(self: &Arc<Self>, key: usize, early: Option<u64>) -> u64 {
        let mut after = After::default();
        #[cfg(pinpool_planted = "shared_seen_early")]
        let shared = self.is_shared();
        let mut state = self.state.lock();
        // Under the lock: whoever shares the stream after this closes the sequence number.
        #[cfg(not(pinpool_planted = "shared_seen_early"))]
        let shared = self.is_shared();
        let entry = state.pending.remove(key);
        let seq = early.unwrap_or(state.open);
        state.open_entries += 1;
        state.open_bytes += entry.bytes;
        state.insert(seq, entry);
        let lost = state.lost.is_some();
        if lost {
            self.booking.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            state.quarantine(self.is_dead(), &mut after);
            self.note_kept(&after);
        }
        let lingers = self.lingers && !shared;
        let close = !lingers || state.open_entries >= SEQ_ENTRIES || state.open_bytes >= SEQ_BYTES;
        let list = !std::mem::replace(&mut state.listed, true);
        drop(state);
        if list {
            self.reaper.list(self);
        }
        if lost {
            after.run();
            // Release: pairs with the acquire in `flight`.
            self.booking.fetch_sub(1, std::sync::atomic::Ordering::Release);
        }
        if close {
            self.close_submitted();
        }
        seq
    }

    /// What never comes back keeps the device open. (Segments do that by way of their pool.)
    fn note_kept(&self, after: &After) {
        if after.kept || after.quarantined_objects.iter().any(|object| object.is_something()) {
            self.context.holds().note_quarantined();
        }
    }

    // --- looking -----------------------------------------------------------------------------------------------------

    /// Bytes of a central pool that are in flight here or wait upstream, and how many of these are claimed; and a count
    /// of all changes so far, if none is half-way.
    pub(crate) fn flight(&self, central: u64) -> (Flight, Option<u64>) {
        let upstream = self.upstream.get().and_then(Weak::upgrade);
        let (queued, arrivals) = upstream.map_or((0, Some(0)), |upstream| upstream.queued(central));
        let state = self.state.lock();
        let mut flight = state.flights.iter().find(|f| f.0 == central).map_or_else(Flight::default, |f| f.1);
        flight.bytes += queued;
        // Acquire: pairs with the releases behind `booking`.
        let booked = self.booking.load(std::sync::atomic::Ordering::Acquire) == 0;
        (flight, arrivals.filter(|_| booked).map(|arrivals| state.moves + arrivals))
    }

    /// An event for everything submitted so far, without an entry: for those who only need to know.
    pub(crate) fn checkpoint(self: &Arc<Self>) -> Result<u64> {
        let nothing = Resource::Object(Box::new(()));
        let submission = self.begin(nothing, None).map_err(|(error, _)| error)?;
        Ok(submission.commit())
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        let keep_alive = self.keep_alive.take();
        if crate::os::forked() {
            // The parent's, tasks that wait among it.
            let waiting = std::mem::take(&mut self.state.get_mut().waiting);
            return std::mem::forget((keep_alive, waiting));
        }
        // A timeline with anything in flight is on the reaper's list, and so is not dropped, unless a panic has taken
        // it off.
        if !self.state.get_mut().is_idle() {
            self.lose(&Error::Internal("a stream was dropped with work in flight"));
            self.context.holds().leaked(1);
            let state = self.state.get_mut();
            self.context.count_past(state.submitted, state.completed);
            return std::mem::forget(keep_alive);
        }
        if let Some(keep_alive) = keep_alive {
            // It may destroy the stream, and be anything. A context of others is kept until then, which the stream is
            // in.
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

/// With the mistake planted: the sequence number is read before the driver is called.
fn planted_seq(state: &MutexGuard<'_, TimelineState>) -> Option<u64> {
    if cfg!(pinpool_planted = "tick_before_copy") { Some(state.open) } else { None }
}

impl TimelineState {
    fn is_idle(&self) -> bool {
        self.pending.is_empty()
            && self.entries.is_empty()
            && self.events.is_empty()
            && self.unpublished == 0
            // Whose event another one may have overtaken.
            && self.recording == 0
            && self.open_entries == 0
            && self.claims.iter().all(|(_, c)| c.completed)
    }

    fn flight(&mut self, central: &CentralPool) -> &mut Flight {
        self.flight_of(central.number())
    }

    fn flight_of(&mut self, central: u64) -> &mut Flight {
        self.moves += 1;
        let at = self.flights.iter().position(|f| f.0 == central).unwrap_or_else(|| {
            self.flights.retain(|f| f.1 != Flight::default());
            self.flights.push((central, Flight::default()));
            self.flights.len() - 1
        });
        &mut self.flights[at].1
    }

    /// In order of sequence numbers; nearly always at the end.
    fn insert(&mut self, seq: u64, entry: TimelineEntry) {
        let at = self.entries.iter().rposition(|(t, _)| *t <= seq).map_or(0, |i| i + 1);
        self.entries.insert(at, (seq, entry));
    }

    fn complete(&mut self, seq: u64, after: &mut After) {
        while self.entries.front().is_some_and(|(t, _)| *t <= seq) {
            let Some((_, TimelineEntry { retained, memory, bytes, since })) = self.entries.pop_front() else {
                break;
            };
            self.completed += 1;
            after.flown.extend(since);
            match retained {
                Retained::Segment { segment, word } => {
                    self.flight(segment.central()).bytes -= bytes;
                    after.returned.extend(complete_segment(&segment, word));
                    after.dropped.push((None, memory.release()));
                }
                Retained::Joint(joint) => {
                    after.returned.extend(joint.complete());
                    after.dropped.push((None, memory.release()));
                }
                Retained::Object(object) => after.dropped.push((Some(object.release()), memory.release())),
                Retained::Nothing => after.dropped.push((None, memory.release())),
            }
        }
        let mut completed = Vec::new();
        for (_, claim) in self.claims.iter_mut().filter(|(_, c)| c.seq <= seq && !c.completed) {
            claim.completed = true;
            // Whoever holds the claim looks at `completed` under this lock, so the word can only be CLAIMED.
            let _ = claim.segment.descriptor().compare_exchange(claim.word.with(state::CLAIMED), state::HOST);
            completed.push((claim.segment.central().number(), claim.bytes));
            after.dropped.push((None, claim.memory.take().release()));
        }
        for (central, bytes) in completed {
            let flight = self.flight_of(central);
            flight.bytes -= bytes;
            flight.claimed -= bytes;
        }
    }

    /// Everything that has joined is never to be reused. What is pending follows when it joins.
    ///
    /// With `dead`, the whole device is gone and uses nothing any more. Otherwise the copies may still be queued, and
    /// their device memory is leaked: a device that finds it freed may die of that.
    fn quarantine(&mut self, dead: bool, after: &mut After) {
        let After { quarantined, dropped, quarantined_objects, kept, .. } = after;
        let mut let_go = |memory: InUse<Option<Arc<Allocation>>>| {
            if dead {
                dropped.push((None, memory.release()));
            } else {
                // Leaked with this.
                *kept |= memory.is_some();
            }
        };
        for (_, TimelineEntry { retained, memory, bytes, .. }) in std::mem::take(&mut self.entries) {
            match retained {
                Retained::Segment { segment, word } => {
                    self.flight(segment.central()).bytes -= bytes;
                    quarantined.extend(quarantine_segment(&segment, word));
                }
                Retained::Joint(joint) => quarantined.extend(joint.quarantine()),
                Retained::Object(object) => quarantined_objects.push(object),
                Retained::Nothing => {}
            }
            let_go(memory);
        }
        let mut lost = Vec::new();
        for (_, claim) in self.claims.iter_mut().filter(|(_, c)| !c.completed) {
            claim.completed = true;
            quarantined.extend(quarantine_segment(&claim.segment, claim.word));
            lost.push((claim.segment.central().number(), claim.bytes));
            let_go(claim.memory.take());
        }
        for (central, bytes) in lost {
            let flight = self.flight_of(central);
            flight.bytes -= bytes;
            flight.claimed -= bytes;
        }
        (self.open_entries, self.open_bytes, self.unpublished) = (0, 0, 0);
    }
}

/// A submission under way. Dropped uncommitted, by a panic for instance, it counts as handed to the driver all the
/// same: in flight until a later event, not free.
#[derive(Debug)]
pub(crate) struct Submission<'a> {
    timeline: &'a Arc<Timeline>,
    key: Option<usize>,
    seq: Option<u64>,
    /// Ends when the entry has joined: fields are dropped after the drop below.
    _deferral: Deferral,
}

impl Submission<'_> {
    /// Device memory that the driver has just given, to be kept like that of a copy.
    pub(crate) fn keep(&self, memory: Arc<Allocation>) {
        if let Some(key) = self.key {
            self.timeline.state.lock().pending[key].memory = InUse::new(Some(memory));
        }
    }

    /// What else is to be kept until the sequence number is complete, where [`Timeline::begin`] was given nothing:
    /// known only when that has succeeded, since it is not given back. Before the driver is called.
    pub(crate) fn carry(&self, object: Box<dyn Retain>) {
        if let Some(key) = self.key {
            self.timeline.state.lock().pending[key].retained = Retained::Object(InUse::new(object));
        }
    }

    /// The driver was called, with whatever outcome. The sequence number under which the entry is in flight.
    pub(crate) fn commit(mut self) -> u64 {
        self.key.take().map_or(0, |key| self.timeline.commit(key, self.seq))
    }
}

impl Drop for Submission<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key.take() {
            self.timeline.commit(key, self.seq);
        }
    }
}

/// A place on a timeline that can be waited for.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    pub(crate) timeline: Arc<Timeline>,
    pub(crate) seq: u64,
}
