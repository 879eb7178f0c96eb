//! A stream's timeline: what was submitted, what marks cover it, and what is known to be complete.
//!
//! # Ticks and marks
//!
//! ```text
//!   entries      a b c | d | e f g | h        each with the tick that was open when its driver call had returned
//!   tick           5     6     7     8 (open)
//!   marks                ^6        ^7         an event recorded after the tick was closed: covers all ticks up to it
//!   completed     5
//! ```
//!
//! Whoever submits calls the driver first and reads the open tick afterwards. Whoever closes a tick first makes the next
//! one open and records its event afterwards. So an entry that read tick *t* was submitted before *t* was closed, hence
//! before the event of *t* was recorded, hence the event covers it. Read in the other order, an entry could get a tick
//! whose event was recorded before its copy was submitted, and would be freed while the copy still reads: that is the
//! mistake `tick_before_copy` that the loom model must catch.
//!
//! A mark is published only when the recording succeeded, since an event that was never recorded asks as complete. If it
//! failed, its entries wait for a later mark, which covers them as well; if no mark can be made, they are quarantined.
//!
//! # Who asks
//!
//! Asking the driver about one event is cheap for one thread and very dear for many at once, so asking is a role, taken
//! by try-acquire: by a thread in `wait()` if it is free, else by the reaper. Everyone else reads `completed`.
//!
//! # Landing
//!
//! When a mark was seen complete, the entries that it covers are taken out *before* `completed` is raised: whoever
//! sees `completed` therefore finds its segment's word settled and the books balanced. For each segment the handle and
//! the timeline meet in the state word ([`crate::freelist::slot`]): if the handle is still there the segment waits for
//! it as LANDED, if it was dropped (DETACHED) the timeline returns the segment to its depot.
//!
//! # Streams that others can reach
//!
//! On a stream that was adopted, or whose handle was given out, others submit work that nobody tells us of. So there each
//! submit closes its tick, on the thread that submits: its mark covers all that was queued when the call was made, and a
//! hold covers the server's own kernels. And such a stream can be captured into a graph. Then nothing is submitted and
//! nothing recorded: it would not run, and would run again with each launch. Each submit asks first; so does whoever
//! makes up for a mark that failed. (That one may be a thread of ours, and ask just before a capture begins. Its event is
//! then a captured one, which says so when it is asked about, and a new mark is made after the capture.)
//!
//! Streams of ours whose handle nobody has are never asked about.
//!
//! # Files
//!
//! Here are ticks and entries: what is submitted. [`marks`]: what closes, asks and lands. [`held`]: what an entry keeps.
//! [`waits`]: who waits. [`claims`]: stream-ready reuse. [`look`]: what statistics and reports see.

mod claims;
mod held;
mod look;
mod marks;
#[cfg(all(test, not(loom)))]
mod tests;
mod waits;

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use crossbeam::utils::CachePadded;
use slab::Slab;

use self::claims::Claim;
use self::held::{After, Entry, Held, InUse, condemn, settle};
pub(crate) use self::held::{Gone, Joint, Keep, Lent, Loan};
pub use self::look::Mark;
pub(crate) use self::look::Stillness;
use self::waits::Waiting;
pub(crate) use self::waits::{SPIN, WaitKey};
use super::reaper::Listing;
use crate::depot::Depot;
use crate::device::context::Context;
use crate::device::memory::Allocation;
use crate::device::{EventHandle, StreamHandle};
use crate::error::{Error, Result};
use crate::foreign::{self, Deferral, Keeper};
use crate::freelist::state;
use crate::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard};

/// On streams of ours a tick is closed after so many entries or bytes, whichever comes first.
const TICK_ENTRIES: usize = 16;
const TICK_BYTES: usize = 4 << 20;
/// How often in a row recording or asking may fail before what waits for a mark is given up. (Under loom at once, since
/// each try is a part of the model.)
const TRIES: u32 = if cfg!(loom) { 1 } else { 1000 };
/// One in so many submissions to a stream is timed, the first among them: reading the clock would be felt beside a record.
pub(crate) const TIMED: u64 = 16;

/// Bytes of one depot on this timeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Flight {
    pub(crate) bytes: usize,
    pub(crate) claimed: usize,
}

#[derive(Debug)]
struct State {
    /// The open tick. Ticks start at 1, so that `completed` = 0 covers nothing.
    open: u64,
    open_entries: usize,
    open_bytes: usize,
    /// The highest closed tick for which no mark was published, or 0.
    unmarked: u64,
    /// Marks that are being recorded: closed ticks whose event is not published yet.
    recording: u32,
    /// Attempts at recording, and at asking about the oldest mark, that failed in a row.
    unrecorded: u32,
    unasked: u32,
    /// Events whose recording failed, so that nobody knows whether they were recorded, each with the tick whose mark
    /// comes after that attempt for certain.
    doubtful: Vec<(u64, EventHandle)>,
    /// Entries whose driver call is under way.
    pending: Slab<Entry>,
    /// By tick, oldest first.
    entries: VecDeque<(u64, Entry)>,
    claims: Slab<Claim>,
    /// Published marks, in the order of their recording.
    marks: VecDeque<(u64, EventHandle)>,
    waiting: Slab<Waiting>,
    next_wait: u64,
    flights: Vec<(u64, Flight)>,
    /// Counts changes of what is in flight, so that who looks twice knows whether anything happened in between.
    moves: u64,
    /// Entries so far, and those of them that have landed.
    submitted: u64,
    landed: u64,
    lost: Option<Error>,
    /// Whether the reaper has this timeline on its list.
    listed: bool,
    /// The open tick at the reaper's last look.
    seen: u64,
}

/// See the module's page.
#[derive(Debug)]
pub(crate) struct Timeline {
    /// Never another's in this process.
    number: u64,
    context: Arc<Context>,
    stream: StreamHandle,
    /// Whether ticks may stay open for a while, where nobody else submits.
    lingers: bool,
    /// Whether others can reach the stream. Changed under the state's lock, once; who submits looks under that lock whether
    /// its tick may stay open. Without the lock it is only a hint: whoever gives a handle to others, who then capture, does
    /// so before they do. (Not loom's: no model has such streams.)
    shared: std::sync::atomic::AtomicBool,
    /// Whether it is this very stream, whatever its handle, so that order on it can be relied on without waiting.
    claims: bool,
    /// Made by us, so destroyed by us.
    destroy: bool,
    /// What keeps a stream of others alive, if its owner said so.
    keeper: OnceLock<Keeper>,
    reaper: Listing,
    completed: CachePadded<AtomicU64>,
    /// Whether `lost` is set in the state, for those who only look. Set under the lock, with release, before anyone is woken;
    /// pairs with the acquire in `is_complete`, which then reads the error under the lock.
    given_up: AtomicBool,
    /// Whether somebody asks just now.
    asking: AtomicBool,
    /// Who is about to book what was quarantined: raised under the state's lock, with the segments' words, and lowered when
    /// their depots know. (Not loom's: only checks look.)
    booking: std::sync::atomic::AtomicU32,
    /// What leads here, if anything does.
    upstream: OnceLock<Weak<dyn Upstream>>,
    state: Mutex<State>,
}

/// A queue that leads to a timeline: what it holds is on its way, and in flight by its segments' words already.
pub(crate) trait Upstream: std::fmt::Debug + Send + Sync {
    /// Bytes of a pool that wait there and that nothing else counts; and a number that changes with them, if no change is
    /// half-way.
    fn queued(&self, depot: u64) -> (usize, Option<u64>);
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
            keeper: OnceLock::new(),
            reaper,
            completed: CachePadded::new(AtomicU64::new(0)),
            given_up: AtomicBool::new(false),
            asking: AtomicBool::new(false),
            booking: std::sync::atomic::AtomicU32::new(0),
            upstream: OnceLock::new(),
            state: Mutex::new(State {
                open: 1,
                open_entries: 0,
                open_bytes: 0,
                unmarked: 0,
                recording: 0,
                unrecorded: 0,
                unasked: 0,
                doubtful: Vec::new(),
                pending: Slab::new(),
                entries: VecDeque::new(),
                claims: Slab::new(),
                marks: VecDeque::new(),
                waiting: Slab::new(),
                next_wait: 0,
                flights: Vec::new(),
                moves: 0,
                submitted: 0,
                landed: 0,
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
    pub(crate) fn hurry(self: &Arc<Self>) {
        self.reaper.hurry(self);
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

    /// Leaves `keeper` with the timeline, unless it has one: then that keeps the same stream alive.
    pub(crate) fn keep(&self, keeper: Keeper) {
        let _ = self.keeper.set(keeper);
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
        held: Lent,
        memory: Option<Arc<Allocation>>,
    ) -> std::result::Result<Submission<'_>, (Error, Lent)> {
        if crate::os::forked() {
            return Err((Error::Forked, held));
        }
        if let Err(error) = self.context.alive() {
            return Err((error, held));
        }
        let mut state = self.state.lock();
        if let Some(error) = &state.lost {
            return Err((error.clone(), held));
        }
        let (held, bytes) = match held {
            Lent::Segment(segment) => {
                let bytes = segment.granted();
                let word = segment.slot().depart();
                state.flight(segment.depot()).bytes += bytes;
                (Held::Segment { segment, word }, bytes)
            }
            Lent::Claimed(key) => {
                let claim = state.claims.remove(key);
                let depot = claim.segment.depot().number();
                let word = claim.segment.slot().depart();
                if claim.landed {
                    state.flight_of(depot).bytes += claim.bytes;
                } else {
                    state.flight_of(depot).claimed -= claim.bytes;
                    if claim.memory.is_some() {
                        // The copy that the claim stands behind still uses its device memory.
                        state.insert(
                            claim.tick,
                            Entry { held: Held::Nothing, memory: claim.memory, bytes: 0, since: claim.since },
                        );
                    }
                }
                (Held::Segment { segment: claim.segment, word }, claim.bytes)
            }
            Lent::Joint(joint) => (Held::Joint(joint), 0),
            Lent::Object(object) => (Held::Object(InUse::new(object)), 0),
        };
        state.moves += 1;
        // Under loom none: nothing depends on it.
        let timed = !cfg!(loom) && state.submitted % TIMED == 0;
        state.submitted += 1;
        let since = timed.then(Instant::now);
        let memory = InUse::new(memory);
        let key = state.pending.insert(Entry { held, memory, bytes, since });
        // From here on until the entry has joined.
        let deferral = foreign::defer();
        Ok(Submission { timeline: self, key: Some(key), tick: planted_tick(&state), _deferral: deferral })
    }

    /// The driver was called: the entry joins under the tick that is open now.
    fn commit(self: &Arc<Self>, key: usize, early: Option<u64>) -> u64 {
        let mut after = After::default();
        #[cfg(pinpool_planted = "shared_seen_early")]
        let shared = self.is_shared();
        let mut state = self.state.lock();
        // Under the lock: whoever shares the stream after this closes the tick.
        #[cfg(not(pinpool_planted = "shared_seen_early"))]
        let shared = self.is_shared();
        let entry = state.pending.remove(key);
        let tick = early.unwrap_or(state.open);
        state.open_entries += 1;
        state.open_bytes += entry.bytes;
        state.insert(tick, entry);
        let lost = state.lost.is_some();
        if lost {
            self.booking.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            state.quarantine(self.is_dead(), &mut after);
            self.note_kept(&after);
        }
        let lingers = self.lingers && !shared;
        let close = !lingers || state.open_entries >= TICK_ENTRIES || state.open_bytes >= TICK_BYTES;
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
        tick
    }

    /// What never comes back keeps the device open. (Segments do that by way of their pool.)
    fn note_kept(&self, after: &After) {
        if after.kept || after.condemned.iter().any(|object| object.is_something()) {
            self.context.holds().condemn();
        }
    }

    // --- looking -----------------------------------------------------------------------------------------------------

    /// Bytes of a depot that are in flight here or wait upstream, and how many of these are claimed; and a count of all
    /// changes so far, if none is half-way.
    pub(crate) fn flight(&self, depot: u64) -> (Flight, Option<u64>) {
        let upstream = self.upstream.get().and_then(Weak::upgrade);
        let (queued, arrivals) = upstream.map_or((0, Some(0)), |upstream| upstream.queued(depot));
        let state = self.state.lock();
        let mut flight = state.flights.iter().find(|f| f.0 == depot).map_or_else(Flight::default, |f| f.1);
        flight.bytes += queued;
        // Acquire: pairs with the releases behind `booking`.
        let booked = self.booking.load(std::sync::atomic::Ordering::Acquire) == 0;
        (flight, arrivals.filter(|_| booked).map(|arrivals| state.moves + arrivals))
    }

    /// A mark for everything submitted so far, without an entry: for those who only need to know.
    pub(crate) fn checkpoint(self: &Arc<Self>) -> Result<u64> {
        let nothing = Lent::Object(Box::new(()));
        let submission = self.begin(nothing, None).map_err(|(error, _)| error)?;
        Ok(submission.commit())
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        let keeper = self.keeper.take();
        if crate::os::forked() {
            // The parent's, tasks that wait among it.
            let waiting = std::mem::take(&mut self.state.get_mut().waiting);
            return std::mem::forget((keeper, waiting));
        }
        // A timeline with anything in flight is on the reaper's list, and so is not dropped, unless a panic has taken it off.
        if !self.state.get_mut().is_idle() {
            self.lose(&Error::Internal("a stream was dropped with work in flight"));
            self.context.holds().leaked(1);
            let state = self.state.get_mut();
            self.context.count_past(state.submitted, state.landed);
            return std::mem::forget(keeper);
        }
        if let Some(keeper) = keeper {
            // It may destroy the stream, and be anything. A context of others is kept until then, which the stream is in.
            let driver = self.context.driver().clone();
            self.context.worker().send(move || {
                drop(keeper);
                drop(driver);
            });
        }
        let state = self.state.get_mut();
        self.context.count_past(state.submitted, state.landed);
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

/// With the mistake planted: the tick is read before the driver is called.
fn planted_tick(state: &MutexGuard<'_, State>) -> Option<u64> {
    if cfg!(pinpool_planted = "tick_before_copy") { Some(state.open) } else { None }
}

impl State {
    fn is_idle(&self) -> bool {
        self.pending.is_empty()
            && self.entries.is_empty()
            && self.marks.is_empty()
            && self.unmarked == 0
            // Whose mark another one may have overtaken.
            && self.recording == 0
            && self.open_entries == 0
            && self.claims.iter().all(|(_, c)| c.landed)
    }

    fn flight(&mut self, depot: &Depot) -> &mut Flight {
        self.flight_of(depot.number())
    }

    fn flight_of(&mut self, depot: u64) -> &mut Flight {
        self.moves += 1;
        let at = self.flights.iter().position(|f| f.0 == depot).unwrap_or_else(|| {
            self.flights.retain(|f| f.1 != Flight::default());
            self.flights.push((depot, Flight::default()));
            self.flights.len() - 1
        });
        &mut self.flights[at].1
    }

    /// In order of ticks; nearly always at the end.
    fn insert(&mut self, tick: u64, entry: Entry) {
        let at = self.entries.iter().rposition(|(t, _)| *t <= tick).map_or(0, |i| i + 1);
        self.entries.insert(at, (tick, entry));
    }

    fn land(&mut self, tick: u64, after: &mut After) {
        while self.entries.front().is_some_and(|(t, _)| *t <= tick) {
            let Some((_, Entry { held, memory, bytes, since })) = self.entries.pop_front() else { break };
            self.landed += 1;
            after.flown.extend(since);
            match held {
                Held::Segment { segment, word } => {
                    self.flight(segment.depot()).bytes -= bytes;
                    after.returned.extend(settle(&segment, word));
                    after.dropped.push((None, memory.release()));
                }
                Held::Joint(joint) => {
                    after.returned.extend(joint.land());
                    after.dropped.push((None, memory.release()));
                }
                Held::Object(object) => after.dropped.push((Some(object.release()), memory.release())),
                Held::Nothing => after.dropped.push((None, memory.release())),
            }
        }
        let mut landed = Vec::new();
        for (_, claim) in self.claims.iter_mut().filter(|(_, c)| c.tick <= tick && !c.landed) {
            claim.landed = true;
            // Whoever holds the claim looks at `landed` under this lock, so the word can only be CLAIMED.
            let _ = claim.segment.slot().exchange(claim.word.with(state::CLAIMED), state::HOST);
            landed.push((claim.segment.depot().number(), claim.bytes));
            after.dropped.push((None, claim.memory.take().release()));
        }
        for (depot, bytes) in landed {
            let flight = self.flight_of(depot);
            flight.bytes -= bytes;
            flight.claimed -= bytes;
        }
    }

    /// Everything that has joined is never to be reused. What is pending follows when it joins.
    ///
    /// With `dead`, the whole device is gone and uses nothing any more. Otherwise the copies may still be queued, and
    /// their device memory is leaked: a device that finds it freed may die of that.
    fn quarantine(&mut self, dead: bool, after: &mut After) {
        let After { quarantined, dropped, condemned, kept, .. } = after;
        let mut let_go = |memory: InUse<Option<Arc<Allocation>>>| {
            if dead {
                dropped.push((None, memory.release()));
            } else {
                // Leaked with this.
                *kept |= memory.is_some();
            }
        };
        for (_, Entry { held, memory, bytes, .. }) in std::mem::take(&mut self.entries) {
            match held {
                Held::Segment { segment, word } => {
                    self.flight(segment.depot()).bytes -= bytes;
                    quarantined.extend(condemn(&segment, word));
                }
                Held::Joint(joint) => quarantined.extend(joint.quarantine()),
                Held::Object(object) => condemned.push(object),
                Held::Nothing => {}
            }
            let_go(memory);
        }
        let mut lost = Vec::new();
        for (_, claim) in self.claims.iter_mut().filter(|(_, c)| !c.landed) {
            claim.landed = true;
            quarantined.extend(condemn(&claim.segment, claim.word));
            lost.push((claim.segment.depot().number(), claim.bytes));
            let_go(claim.memory.take());
        }
        for (depot, bytes) in lost {
            let flight = self.flight_of(depot);
            flight.bytes -= bytes;
            flight.claimed -= bytes;
        }
        (self.open_entries, self.open_bytes, self.unmarked) = (0, 0, 0);
    }
}

/// A submission under way. Dropped uncommitted, by a panic for instance, it counts as handed to the driver all the same:
/// in flight until a later mark, not free.
#[derive(Debug)]
pub(crate) struct Submission<'a> {
    timeline: &'a Arc<Timeline>,
    key: Option<usize>,
    tick: Option<u64>,
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

    /// What else is to be kept until the tick is complete, where [`Timeline::begin`] was given nothing: known only when that
    /// has succeeded, since it is not given back. Before the driver is called.
    pub(crate) fn carry(&self, object: Box<dyn Keep>) {
        if let Some(key) = self.key {
            self.timeline.state.lock().pending[key].held = Held::Object(InUse::new(object));
        }
    }

    /// The driver was called, with whatever outcome. The tick under which the entry is in flight.
    pub(crate) fn commit(mut self) -> u64 {
        self.key.take().map_or(0, |key| self.timeline.commit(key, self.tick))
    }
}

impl Drop for Submission<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key.take() {
            self.timeline.commit(key, self.tick);
        }
    }
}

/// A place on a timeline that can be waited for.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    pub(crate) timeline: Arc<Timeline>,
    pub(crate) tick: u64,
}
