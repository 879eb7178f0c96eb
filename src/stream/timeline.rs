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

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use crossbeam::utils::CachePadded;
use slab::Slab;

use super::reaper::Listing;
use crate::depot::{Depot, Segment, Wake};
use crate::device::context::Context;
use crate::device::memory::Allocation;
use crate::device::{EventHandle, StreamHandle};
use crate::error::{Error, ErrorClass, Result};
use crate::freelist::{Word, state};
use crate::segment::Class;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Mutex, MutexGuard, Ordering, drop_waker, thread};

/// On streams of ours a tick is closed after so many entries or bytes, whichever comes first.
const TICK_ENTRIES: usize = 16;
const TICK_BYTES: usize = 4 << 20;
/// How often in a row recording or asking may fail before what waits for a mark is given up. (Under loom at once, since
/// each try is a part of the model.)
const TRIES: u32 = if cfg!(loom) { 1 } else { 1000 };
/// How long a waiting thread asks by itself before it parks and leaves the asking to the reaper.
const SPIN: Duration = Duration::from_micros(50);

/// What keeps memory from being reused until its tick is complete.
#[derive(Debug)]
pub(crate) enum Held {
    /// A segment, with the word that it had when it went in flight.
    Segment { segment: Segment, word: Word },
    /// A segment held by several timelines at once.
    Joint(Arc<Joint>),
    /// Anything else: it is dropped when the device is done with it.
    Object(Box<dyn Keep>),
    /// Only the entry's device memory.
    Nothing,
}

/// Something that a hold owns.
pub(crate) trait Keep: Send + std::fmt::Debug {
    /// Nobody can prove that the device is done with it: leak what the device may touch.
    fn quarantine(self: Box<Self>);
}

/// A segment that comes back when several timelines are done with it.
#[derive(Debug)]
pub(crate) struct Joint {
    segment: Segment,
    word: Word,
    left: AtomicU32,
}

impl Joint {
    /// For `timelines` of them; the segment is in flight from here on.
    pub(crate) fn new(segment: Segment, timelines: u32) -> Arc<Self> {
        let word = segment.set(state::FLIGHT);
        segment.depot().joint_in_flight(segment.granted() as isize);
        Arc::new(Self { segment, word, left: AtomicU32::new(timelines) })
    }

    /// One of them is done. Whether it was the last, and the handle is gone: then the segment is the caller's.
    fn land(&self) -> Option<Segment> {
        // AcqRel: the last one sees what all the others saw complete.
        if self.left.fetch_sub(1, Ordering::AcqRel) != 1 {
            return None;
        }
        self.segment.depot().joint_in_flight(-(self.segment.granted() as isize));
        settle(&self.segment, self.word)
    }

    /// A part of the hold could not be placed: nobody will know when the segment is free.
    pub(crate) fn give_up(&self) {
        if let Some(segment) = self.quarantine() {
            segment.quarantine();
        }
    }

    fn quarantine(&self) -> Option<Segment> {
        let lost = condemn(&self.segment, self.word);
        if lost.is_some() {
            self.segment.depot().joint_in_flight(-(self.segment.granted() as isize));
        }
        lost
    }
}

/// The device is done with a segment: leave it to its handle, or take it if that is gone.
fn settle(segment: &Segment, word: Word) -> Option<Segment> {
    match segment.slot().exchange(word, state::LANDED) {
        Ok(_) => None,
        Err(found) if found == word.with(state::DETACHED) && !cfg!(pinpool_planted = "settle_looks_once") => {
            // Nobody else leaves DETACHED but the claimer, and both are under the timeline's lock.
            segment.slot().exchange(found, state::OUT).ok().map(|_| segment.alias())
        }
        Err(_) => None,
    }
}

/// The device will never be known to be done with it.
fn condemn(segment: &Segment, word: Word) -> Option<Segment> {
    let slot = segment.slot();
    [state::FLIGHT, state::DETACHED, state::CLAIMED]
        .into_iter()
        .any(|from| slot.exchange(word.with(from), state::QUARANTINED).is_ok())
        .then(|| segment.alias())
}

#[derive(Debug)]
struct Entry {
    held: Held,
    memory: Option<Arc<Allocation>>,
    bytes: usize,
}

/// A segment that was claimed for stream-ready reuse before its tick was complete.
#[derive(Debug)]
struct Claim {
    tick: u64,
    segment: Segment,
    word: Word,
    memory: Option<Arc<Allocation>>,
    bytes: usize,
    landed: bool,
}

/// Someone who waits for a tick.
#[derive(Debug)]
struct Waiting {
    id: u64,
    tick: u64,
    wake: Wake,
}

/// Names someone who waits. The place may be another's by now, the number is never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WaitKey {
    place: usize,
    id: u64,
}

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
    lost: Option<Error>,
    /// Whether the reaper has this timeline on its list.
    listed: bool,
    /// The open tick at the reaper's last look.
    seen: u64,
}

/// See the module's page.
#[derive(Debug)]
pub(crate) struct Timeline {
    context: Arc<Context>,
    stream: StreamHandle,
    /// A stream of ours, where ticks may stay open for a while. On others work that we do not see may follow.
    own: bool,
    /// Made by us, so destroyed by us.
    destroy: bool,
    reaper: Listing,
    completed: CachePadded<AtomicU64>,
    /// Whether somebody asks just now.
    asking: AtomicBool,
    state: Mutex<State>,
}

/// What is done after the lock is released.
#[derive(Debug, Default)]
struct After {
    returned: Vec<Segment>,
    quarantined: Vec<Segment>,
    /// Objects that the device may use for good. They book what they leak, which can wake somebody.
    condemned: Vec<Box<dyn Keep>>,
    dropped: Vec<(Held, Option<Arc<Allocation>>)>,
    wakes: Vec<Wake>,
}

impl After {
    fn run(self) {
        for segment in self.returned {
            // SAFETY: settled: the handle is gone and every mark that covers it was seen complete.
            unsafe { segment.release() };
        }
        for segment in self.quarantined {
            segment.quarantine();
        }
        self.condemned.into_iter().for_each(|object| object.quarantine());
        for (held, memory) in self.dropped {
            // Objects are the caller's own types: their drop may panic, and must not take the reaper along.
            if catch_unwind(AssertUnwindSafe(|| drop((held, memory)))).is_err() {
                tracing::error!(target: "pinpool::stream", "dropping an object that a hold kept panicked");
            }
        }
        self.wakes.into_iter().for_each(Wake::wake);
    }
}

impl Timeline {
    pub(crate) fn new(context: Arc<Context>, stream: StreamHandle, own: bool, reaper: Listing) -> Arc<Self> {
        let (destroy, own) = (own, own && !context.driver().record_may_block());
        let timeline = Arc::new(Self {
            context,
            stream,
            own,
            destroy,
            reaper,
            completed: CachePadded::new(AtomicU64::new(0)),
            asking: AtomicBool::new(false),
            state: Mutex::new(State {
                open: 1,
                open_entries: 0,
                open_bytes: 0,
                unmarked: 0,
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

    pub(crate) fn stream(&self) -> StreamHandle {
        self.stream
    }

    /// Whether the device is lost, and not only this stream.
    fn is_dead(&self) -> bool {
        self.context.poisoned().is_some()
    }

    pub(crate) fn forked(&self) -> bool {
        self.context.forked()
    }

    /// Whether anything can be submitted.
    pub(crate) fn usable(&self) -> Result<()> {
        if self.forked() {
            return Err(Error::Forked);
        }
        self.context.alive()?;
        self.state.lock().lost.clone().map_or(Ok(()), Err)
    }

    // --- submitting --------------------------------------------------------------------------------------------------

    /// Enters what is about to be handed to the driver. Nothing has been handed out yet when this fails.
    pub(crate) fn begin(
        self: &Arc<Self>,
        held: Lent,
        memory: Option<Arc<Allocation>>,
    ) -> std::result::Result<Submission<'_>, (Error, Lent)> {
        if self.forked() {
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
                let word = segment.set(state::FLIGHT);
                state.flight(segment.depot()).bytes += bytes;
                (Held::Segment { segment, word }, bytes)
            }
            Lent::Claimed(key) => {
                let claim = state.claims.remove(key);
                let depot = claim.segment.depot().number();
                let word = claim.segment.set(state::FLIGHT);
                if claim.landed {
                    state.flight_of(depot).bytes += claim.bytes;
                } else {
                    state.flight_of(depot).claimed -= claim.bytes;
                    if claim.memory.is_some() {
                        // The copy that the claim stands behind still uses its device memory.
                        state.insert(
                            claim.tick,
                            Entry { held: Held::Nothing, memory: claim.memory, bytes: 0 },
                        );
                    }
                }
                (Held::Segment { segment: claim.segment, word }, claim.bytes)
            }
            Lent::Joint(joint) => (Held::Joint(joint), 0),
            Lent::Object(object) => (Held::Object(object), 0),
        };
        state.moves += 1;
        let key = state.pending.insert(Entry { held, memory, bytes });
        Ok(Submission { timeline: self, key: Some(key), tick: planted_tick(&state) })
    }

    /// The driver was called: the entry joins under the tick that is open now.
    fn commit(self: &Arc<Self>, key: usize, early: Option<u64>) -> u64 {
        let mut after = After::default();
        let mut state = self.state.lock();
        let entry = state.pending.remove(key);
        let tick = early.unwrap_or(state.open);
        state.open_entries += 1;
        state.open_bytes += entry.bytes;
        state.insert(tick, entry);
        if state.lost.is_some() {
            state.quarantine(self.is_dead(), &mut after);
        }
        let close = !self.own || state.open_entries >= TICK_ENTRIES || state.open_bytes >= TICK_BYTES;
        let list = !std::mem::replace(&mut state.listed, true);
        drop(state);
        if list {
            self.reaper.list(self);
        }
        after.run();
        if close {
            self.close();
        }
        tick
    }

    // --- marking -----------------------------------------------------------------------------------------------------

    /// Closes the open tick, if anything is in it, and records its mark. Failing is no error of the caller's: the entries
    /// wait for a later mark.
    pub(crate) fn close(&self) {
        let _ = self.close_with(false, |_| Ok(()));
    }

    /// Makes `waiter`, a stream of the same device, start its later work only after everything submitted here so far.
    pub(crate) fn wait_here(self: &Arc<Self>, waiter: StreamHandle) -> Result<()> {
        self.usable()?;
        // The mark is new even where nothing is in flight: work that we do not see may be on the stream.
        self.close_with(true, |event| self.context.noting(self.context.driver().wait_event(waiter, event)))?;
        if !std::mem::replace(&mut self.state.lock().listed, true) {
            self.reaper.list(self);
        }
        Ok(())
    }

    /// Closes the open tick and records its mark; `recorded` sees the event before anyone may recycle it.
    fn close_with(&self, always: bool, recorded: impl FnOnce(EventHandle) -> Result<()>) -> Result<()> {
        if self.forked() {
            return Err(Error::Forked);
        }
        // The event first: without one nothing is closed.
        let event = self.context.event().inspect_err(|error| self.not_marked(error))?;
        let tick = {
            let mut state = self.state.lock();
            let nothing = state.open_entries == 0 && state.unmarked == 0 && !always;
            if nothing || state.lost.is_some() {
                let lost = state.lost.clone();
                drop(state);
                self.context.recycle(event);
                return lost.map_or(Ok(()), Err);
            }
            let tick = state.open;
            state.open += 1;
            (state.open_entries, state.open_bytes) = (0, 0);
            state.unmarked = state.unmarked.max(tick);
            tick
        };
        #[cfg(pinpool_planted = "mark_before_record")]
        self.state.lock().marks.push_back((tick, event));
        // Where recording fails the event may have been recorded all the same, so nobody may record it again before a
        // later mark is complete. That mark is due in any case.
        let result = self.context.noting(self.context.driver().record(event, self.stream));
        result.inspect_err(|error| {
            {
                let mut state = self.state.lock();
                let later = state.open;
                state.doubtful.push((later, event));
                // On a stream that was given up meanwhile nothing is due any more.
                if state.lost.is_none() {
                    state.unmarked = state.unmarked.max(tick);
                }
            }
            self.not_marked(error);
        })?;
        let used = recorded(event);
        let mut state = self.state.lock();
        if state.lost.is_some() && !cfg!(pinpool_planted = "mark_after_loss") {
            // Given up meanwhile: nobody takes marks off the list any more. See there for the event.
            drop(state);
            if self.is_dead() {
                self.context.recycle(event);
            }
            return used;
        }
        #[cfg(not(pinpool_planted = "mark_before_record"))]
        state.marks.push_back((tick, event));
        if state.unmarked <= tick {
            state.unmarked = 0;
        }
        state.unrecorded = 0;
        used
    }

    /// Recording failed. The reaper tries again, since a later mark covers the same entries.
    fn not_marked(&self, error: &Error) {
        let give_up = {
            let mut state = self.state.lock();
            if state.open_entries > 0 && state.unmarked == 0 {
                // Not even an event: closing is due all the same.
                state.seen = state.open;
            }
            gives_up(&mut state.unrecorded, error)
        };
        tracing::debug!(target: "pinpool::stream", device = self.context.name(), %error, give_up, "a mark could not be recorded");
        if give_up {
            self.lose(error);
        }
    }

    // --- asking ------------------------------------------------------------------------------------------------------

    /// Asks about the oldest marks, unless somebody else does. Whether anything landed.
    pub(crate) fn ask(&self) -> bool {
        // Looked at first: an exchange, failing or not, would take the line away from the one who asks.
        // Acquire: pairs with the release below, so that askers follow one another.
        if self.forked()
            || self.asking.load(Ordering::Relaxed)
            || self.asking.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return false;
        }
        let mut progress = false;
        loop {
            let Some((tick, event)) = self.state.lock().marks.front().copied() else { break };
            match self.context.noting(self.context.driver().query(event)) {
                Ok(true) => {
                    // On a stream that was lost meanwhile a dead device's events were given back with the other marks.
                    if self.land(tick) || !self.is_dead() {
                        self.context.recycle(event);
                    }
                    progress = true;
                }
                Ok(false) => break,
                // Not ready to be asked: neither completion nor loss.
                Err(error) if error.class() == ErrorClass::Moment => break,
                Err(error) => {
                    if !gives_up(&mut self.state.lock().unasked, &error) {
                        break;
                    }
                    self.asking.store(false, Ordering::Release);
                    self.lose(&error);
                    return true;
                }
            }
        }
        self.asking.store(false, Ordering::Release);
        progress
    }

    /// The front mark was seen complete, and covers all ticks up to `tick`. `false`: the stream was lost meanwhile.
    fn land(&self, tick: u64) -> bool {
        let mut after = After::default();
        let mut state = self.state.lock();
        if state.lost.is_some() {
            return false;
        }
        state.marks.pop_front();
        state.unasked = 0;
        if tick > self.completed.load(Ordering::Relaxed) {
            state.land(tick, &mut after);
            // Release: pairs with the acquire in `is_complete`. Raised under the lock, after the entries were settled.
            self.completed.store(tick, Ordering::Release);
            state.take_wakes(&mut after, |t| t <= tick);
        }
        let mut certain = Vec::new();
        state.doubtful.retain(|&(later, event)| {
            let is_certain = later <= tick;
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
            tracing::error!(
                target: "pinpool::stream",
                device = self.context.name(),
                %error,
                entries = state.entries.len(),
                "a stream is lost; what is in flight on it is quarantined"
            );
            state.lost = Some(error.clone());
        }
        let marks = std::mem::take(&mut state.marks).into_iter().chain(std::mem::take(&mut state.doubtful));
        state.quarantine(self.is_dead(), &mut after);
        state.take_wakes(&mut after, |_| true);
        drop(state);
        // A dead device lets go of its events. Those of one that is alive may still be recorded, for all we know: nobody
        // may use or destroy them.
        if self.is_dead() {
            marks.for_each(|(_, event)| self.context.recycle(event));
        }
        after.run();
    }

    /// The reaper's look: closes what has been open since the last look (or at once, with `now`), and asks.
    pub(crate) fn pass(&self, now: bool) -> bool {
        if self.forked() {
            return false;
        }
        if let Some(error) = self.context.poisoned() {
            self.lose(error);
        }
        let due = {
            let mut state = self.state.lock();
            let due = (state.open_entries > 0 && (now || state.seen == state.open)) || state.unmarked > 0;
            state.seen = state.open;
            due
        };
        if due {
            self.close();
        }
        self.ask()
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

    // --- waiting -----------------------------------------------------------------------------------------------------

    /// Whether a tick is complete.
    ///
    /// # Errors
    /// The stream is lost: it never will be.
    pub(crate) fn is_complete(&self, tick: u64) -> Result<bool> {
        // Acquire: pairs with the release in `land`.
        if self.completed.load(Ordering::Acquire) >= tick {
            return Ok(true);
        }
        if self.forked() {
            return Err(Error::Forked);
        }
        let state = self.state.lock();
        match &state.lost {
            Some(_) if self.completed.load(Ordering::Acquire) >= tick => Ok(true),
            Some(error) => Err(error.clone()),
            None => Ok(false),
        }
    }

    /// The same, after having had a look.
    pub(crate) fn poll_complete(&self, tick: u64) -> Result<bool> {
        if self.completed.load(Ordering::Acquire) < tick {
            self.pass(true);
        }
        self.is_complete(tick)
    }

    /// Closes the tick if it is still open, so that its completion can be seen.
    fn flush(&self, tick: u64) {
        let open = self.state.lock().open;
        if tick >= open {
            self.close();
        }
    }

    /// Waits until a tick is complete.
    ///
    /// # Errors
    /// [`Error::Timeout`], or what the stream was lost with.
    pub(crate) fn wait(self: &Arc<Self>, tick: u64, deadline: Option<Instant>) -> Result<()> {
        if self.is_complete(tick)? {
            return Ok(());
        }
        let since = Instant::now();
        let late = |now: Instant| deadline.is_some_and(|d| now >= d);
        self.flush(tick);
        if let Some(stepped) = self.context.driver().stepped() {
            loop {
                self.pass(true);
                if self.is_complete(tick)? {
                    return Ok(());
                }
                // A device that cannot move by itself will not do so later either.
                if !stepped.step() && !self.poll_complete(tick)? {
                    return Err(Error::Timeout(since.elapsed()));
                }
            }
        }
        while since.elapsed() < SPIN {
            if !self.ask() {
                std::hint::spin_loop();
                thread_yield();
            }
            if self.is_complete(tick)? {
                return Ok(());
            }
        }
        loop {
            let key = {
                let mut state = self.state.lock();
                if state.lost.is_some() || self.completed.load(Ordering::Relaxed) >= tick {
                    None
                } else {
                    Some(state.wait(tick, Wake::Thread(thread::current())))
                }
            };
            if let Some(key) = key {
                self.reaper.hurry(self);
                thread::park_until(deadline);
                let _thread = self.state.lock().stop_waiting(key);
            }
            if self.is_complete(tick)? {
                return Ok(());
            }
            if late(Instant::now()) {
                return Err(Error::Timeout(since.elapsed()));
            }
        }
    }

    /// Leaves a waker, in place of the one left before under `key`. `true`: complete already, nothing was left.
    pub(crate) fn wake_later(
        self: &Arc<Self>,
        tick: u64,
        key: &mut Option<WaitKey>,
        waker: &Waker,
    ) -> Result<bool> {
        self.forget_waker(key);
        self.flush(tick);
        if self.poll_complete(tick)? {
            return Ok(true);
        }
        // Cloned before the lock: that is the caller's code.
        let waker = waker.clone();
        {
            let mut state = self.state.lock();
            if state.lost.is_none() && self.completed.load(Ordering::Relaxed) < tick {
                *key = Some(state.wait(tick, Wake::Task(waker)));
            }
        }
        if key.is_some() {
            self.reaper.hurry(self);
            return Ok(false);
        }
        self.is_complete(tick)
    }

    /// Takes the waker back.
    pub(crate) fn forget_waker(&self, key: &mut Option<WaitKey>) {
        // In the child of a fork the lock may be anyone's.
        if let Some(key) = key.take().filter(|_| !self.forked()) {
            // Dropped after the lock, since a task may go with it, and buffers with the task.
            let waker = self.state.lock().stop_waiting(key);
            drop_waker(waker);
        }
    }

    // --- claiming ----------------------------------------------------------------------------------------------------

    /// Claims a segment of this class and depot that is in flight here alone and whose handle was dropped: the youngest,
    /// since the oldest is the next to be free anyway.
    pub(crate) fn claim(&self, depot: &Depot, class: Class) -> Option<(usize, Segment)> {
        if self.forked() {
            return None;
        }
        let mut state = self.state.lock();
        let fits = |entry: &Entry| match &entry.held {
            Held::Segment { segment, word } => {
                // The handle may be dropped just now: only a word that says DETACHED, in this generation, is claimed.
                let from = word.with(state::DETACHED);
                #[cfg(pinpool_planted = "claim_on_sight")]
                let from = segment.slot().word();
                segment.depot().number() == depot.number()
                    && segment.class() == Some(class)
                    && segment.slot().exchange(from, state::CLAIMED).is_ok()
            }
            _ => false,
        };
        let at = state.entries.iter().rposition(|(_, entry)| fits(entry))?;
        let (tick, entry) = state.entries.remove(at)?;
        let Held::Segment { segment, word } = entry.held else { return None };
        state.flight_of(depot.number()).claimed += entry.bytes;
        let alias = segment.alias();
        let claim = Claim { tick, segment, word, memory: entry.memory, bytes: entry.bytes, landed: false };
        Some((state.claims.insert(claim), alias))
    }

    /// Books the length that the claimer asked for.
    pub(crate) fn rebook_claim(&self, key: usize, len: usize) {
        let mut state = self.state.lock();
        state.claims[key].segment.rebook(len);
    }

    /// Until when a claimed segment is not host-ready. `None`: it is.
    pub(crate) fn claimed_until(&self, key: usize) -> Option<u64> {
        let state = self.state.lock();
        let claim = &state.claims[key];
        (!claim.landed).then_some(claim.tick)
    }

    /// A claimed segment that became host-ready leaves the timeline. `None`: it was quarantined.
    pub(crate) fn resolve_claim(&self, key: usize) -> Option<Segment> {
        let claim = self.state.lock().claims.remove(key);
        debug_assert!(claim.landed, "resolved a claim that has not landed");
        (claim.segment.slot().word().state() == state::OUT).then_some(claim.segment)
    }

    /// A claimed segment was not used: back under its old tick, or to its depot if that is complete.
    pub(crate) fn unclaim(&self, key: usize) {
        if self.forked() {
            return;
        }
        let mut state = self.state.lock();
        let Claim { tick, segment, word, memory, bytes, landed } = state.claims.remove(key);
        if !landed && segment.slot().exchange(word.with(state::CLAIMED), state::DETACHED).is_ok() {
            state.flight_of(segment.depot().number()).claimed -= bytes;
            state.insert(tick, Entry { held: Held::Segment { segment, word }, memory, bytes });
            return;
        }
        drop(state);
        if segment.slot().word().state() == state::OUT {
            // SAFETY: landed: every mark that covers it was seen complete, and the claimer gives it up here.
            unsafe { segment.release() };
        }
    }

    // --- looking -----------------------------------------------------------------------------------------------------

    /// Bytes of a depot that are in flight here, and how many of these are claimed; and a count of all changes so far.
    pub(crate) fn flight(&self, depot: u64) -> (Flight, u64) {
        let state = self.state.lock();
        let flight = state.flights.iter().find(|f| f.0 == depot).map_or_else(Flight::default, |f| f.1);
        (flight, state.moves)
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
        // A timeline with anything in flight is on the reaper's list, and so is not dropped.
        if !self.destroy || self.forked() {
            return;
        }
        let (driver, stream) = (self.context.driver().clone(), self.stream);
        self.context.worker().send(move || {
            if let Err(error) = driver.destroy_stream(stream) {
                tracing::warn!(target: "pinpool::stream", device = driver.name(), %error, "a stream is leaked");
            }
        });
    }
}

impl Keep for () {
    fn quarantine(self: Box<Self>) {}
}

/// Counts a failed attempt. Whether there is to be no other.
fn gives_up(failures: &mut u32, error: &Error) -> bool {
    // A capture says nothing about the stream's work, and ends sooner or later.
    if error.class() == ErrorClass::Capture {
        return false;
    }
    *failures += 1;
    error.is_sticky() || *failures >= TRIES
}

fn thread_yield() {
    crate::sync::yield_now();
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
            let Some((_, Entry { held, memory, bytes })) = self.entries.pop_front() else { break };
            match held {
                Held::Segment { segment, word } => {
                    self.flight(segment.depot()).bytes -= bytes;
                    after.returned.extend(settle(&segment, word));
                    after.dropped.push((Held::Nothing, memory));
                }
                Held::Joint(joint) => {
                    after.returned.extend(joint.land());
                    after.dropped.push((Held::Nothing, memory));
                }
                held @ (Held::Object(_) | Held::Nothing) => after.dropped.push((held, memory)),
            }
        }
        let mut landed = Vec::new();
        for (_, claim) in self.claims.iter_mut().filter(|(_, c)| c.tick <= tick && !c.landed) {
            claim.landed = true;
            // Whoever holds the claim looks at `landed` under this lock, so the word can only be CLAIMED.
            let _ = claim.segment.slot().exchange(claim.word.with(state::CLAIMED), state::OUT);
            landed.push((claim.segment.depot().number(), claim.bytes));
            after.dropped.push((Held::Nothing, claim.memory.take()));
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
        let After { quarantined, dropped, condemned, .. } = after;
        let mut let_go = |memory: Option<Arc<Allocation>>| {
            if dead {
                dropped.push((Held::Nothing, memory));
            } else {
                std::mem::forget(memory);
            }
        };
        for (_, Entry { held, memory, bytes }) in std::mem::take(&mut self.entries) {
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

    fn take_wakes(&mut self, after: &mut After, due: impl Fn(u64) -> bool) {
        if self.waiting.is_empty() {
            return;
        }
        let places: Vec<usize> = self.waiting.iter().filter(|(_, w)| due(w.tick)).map(|(k, _)| k).collect();
        after.wakes.extend(places.into_iter().map(|k| self.waiting.remove(k).wake));
    }

    fn wait(&mut self, tick: u64, wake: Wake) -> WaitKey {
        self.next_wait += 1;
        let id = self.next_wait;
        WaitKey { place: self.waiting.insert(Waiting { id, tick, wake }), id }
    }

    #[must_use = "to be dropped after the lock"]
    fn stop_waiting(&mut self, key: WaitKey) -> Option<Wake> {
        let theirs = self.waiting.get(key.place).is_some_and(|w| w.id == key.id);
        theirs.then(|| self.waiting.remove(key.place).wake)
    }
}

/// What is lent to a timeline.
#[derive(Debug)]
pub(crate) enum Lent {
    /// A segment that is out.
    Segment(Segment),
    /// A segment claimed from this timeline, by its key.
    Claimed(usize),
    /// One timeline's part of a joint hold.
    Joint(Arc<Joint>),
    Object(Box<dyn Keep>),
}

/// A submission under way. Dropped uncommitted, by a panic for instance, it counts as handed to the driver all the same:
/// in flight until a later mark, not free.
#[derive(Debug)]
pub(crate) struct Submission<'a> {
    timeline: &'a Arc<Timeline>,
    key: Option<usize>,
    tick: Option<u64>,
}

impl Submission<'_> {
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
