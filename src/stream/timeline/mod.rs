//! A stream's timeline: what was submitted, which events cover it, what is known to be complete.
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
//! A thread that submits calls the driver first and reads the open sequence number afterwards. A
//! thread that closes a number first makes the next number open and records the event afterwards.
//! So an entry that read number *t* was submitted before *t* was closed, hence before the event of
//! *t* was recorded, hence the event covers it. In the other order, an entry could read a number
//! whose event was recorded before the copy was submitted, and its segment would be free while the
//! copy still reads. (A loom model must catch that: `.ci/planted/seq_before_copy.patch`.)
//!
//! An event is published only after the driver recorded it, since an event that was never recorded
//! asks as complete. If recording fails, the entries wait for a later event, which covers them as
//! well. The driver may have recorded the failed one all the same, so that one is not used again
//! before the later event is complete. If no event can be made, the entries are quarantined.
//!
//! # Asking and completing
//!
//! Asking about an event is cheap for one thread and very dear for many at once (138 ns alone, 7.6
//! us among sixteen). So one thread asks per timeline: asking is a role that a thread takes by one
//! compare-and-swap. It is a thread that waits or polls, or else the reaper. All other threads read
//! `completed`.
//!
//! When an event was seen complete, the entries that it covers are removed *before* `completed` is
//! raised. So a thread that sees `completed` finds its segment's word and the statistics up to
//! date. For each segment the handle and the timeline meet in the state word
//! ([`crate::freelist::descriptor`]). If the handle is still there, the segment waits for it as
//! COMPLETED; if the handle was dropped (DETACHED), the timeline returns the segment to its central
//! pool.
//!
//! # Shared streams
//!
//! A stream is *shared* if it was adopted or its handle was given out: then the program submits
//! work to it that this crate does not see. On a shared stream each submit closes its sequence
//! number, on the submitting thread. So the event covers all that was queued when the call was
//! made, and a hold covers the program's kernels. (A *patient* hold leaves the number open, as a
//! submit to another stream does: many holds share an event, which is recorded up to a millisecond
//! later, and covers what was queued meanwhile, too.)
//!
//! A shared stream can be captured into a graph. During a capture nothing may be submitted or
//! recorded: it would not run now, and would run again with each launch. So each submit asks the
//! driver first, and so does each later attempt to record an event that failed. (Such an attempt
//! may run on a thread of the crate and ask just before a capture begins. Its event is then a
//! captured one. The driver says so when it is asked about the event, and a new event is recorded
//! after the capture.) A stream that is not shared is never asked about.
//!
//! A shared stream may be confined to one thread ([`crate::device::Confined`]). All driver calls
//! that get its handle are made on that thread. Another thread leaves closing to it, unless that
//! has failed there: then it records an event on the stream that covers the confined one. (That
//! stream waits for those of other threads, too, and using it would spoil a capture of one: so it
//! is used for nothing else, and asked about before.)
//!
//! # Invariants
//!
//! - `entries` has what is in flight, in the order of sequence numbers. `submitting` has the entries
//!   whose driver call is under way, without a number.
//! - A segment in flight belongs to one entry. While it is claimed, its claimer and the timeline
//!   change its word under the timeline's lock only.
//! - `completed` only grows. The driver is asked only about marks whose event was recorded.
//! - `marks` has the recorded events, in the order of sequence numbers. What is in flight under
//!   closed numbers above the last mark has none: a thread is recording it, or has failed to, and
//!   then another event is due.
//! - A lost timeline (`lost`) has nothing in flight and no marks, and it gets no event any more.
//!   What was being submitted is quarantined by the thread that submitted it.
//!
//! # Files, in the order to read them
//!
//! This file: sequence numbers and entries, what is submitted and claimed. [`completion`]: closing,
//! recording, asking, completing. [`loss`]: giving a stream up. [`waits`]: how threads and tasks
//! wait. [`reaper`]: the thread that looks when nobody waits. [`stats`]: what statistics and
//! reports see.

#![allow(unsafe_code)]

mod completion;
mod loss;
pub(crate) mod reaper;
mod stats;
#[cfg(all(test, not(loom)))]
mod tests;
mod waits;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crossbeam::utils::CachePadded;

use self::completion::Closing;
use self::reaper::Listing;
pub use self::stats::{EventState, StreamStats};
use super::hold::{Flown, Hold, Resource, Retain};
use crate::central::{CentralPool, Segment, Wake};
use crate::device::Confined;
use crate::device::context::Context;
use crate::device::{EventHandle, StreamHandle};
use crate::error::{Error, Result};
use crate::foreign::{self, Deferral, KeepAlive};
use crate::freelist::state;
use crate::segment::Class;
use crate::sync::{AtomicBool, AtomicU64, Mutex};

/// On a stream that is not shared, a sequence number is closed after this many entries or bytes,
/// whichever comes first.
const SEQ_ENTRIES: usize = 16;
const SEQ_BYTES: usize = 4 << 20;
/// Failures in a row of recording, or of asking, after which the timeline is given up. (Under loom
/// after the first, since each attempt is a part of the model.)
const EVENT_TRIES: u32 = if cfg!(loom) { 1 } else { 1000 };
/// One in this many submissions to a stream is timed, the first among them: a clock read for each
/// would be noticeable beside the cost of recording an event.
const TIMED: u64 = 16;

/// What was submitted: it keeps what its copy uses until its sequence number is complete.
#[derive(Debug)]
struct TimelineEntry {
    /// The sequence number, once the driver's call has returned.
    seq: u64,
    /// The entries and bytes of its sequence number, up to this one and with it.
    sum: (usize, usize),
    /// How many entries came before it: by this its submission finds it.
    number: u64,
    /// Host memory: a segment, or something else. (Without either: a claimer has submitted the
    /// segment again.)
    flown: Option<Flown>,
    host: Option<Hold>,
    /// Device memory.
    memory: Option<Hold>,
    /// When it was submitted, if it is one of the timed entries; else when a look first found it.
    since: Option<Instant>,
}

#[derive(Debug, Default)]
struct TimelineState {
    /// The open sequence number. They start at 1, so that `completed` = 0 covers nothing.
    open: u64,
    /// Threads that name the stream to the driver: a number is due, or a closed one's event.
    under_way: u32,
    /// Failures of recording after which no event was recorded, and of asking, none of them
    /// passing. After both, nothing was seen complete.
    record_failures: u32,
    ask_failures: u32,
    /// What is in flight, oldest first.
    entries: VecDeque<TimelineEntry>,
    /// What is being submitted, in any order.
    submitting: Vec<TimelineEntry>,
    /// The recorded events that are not known to be complete.
    marks: VecDeque<Mark>,
    /// Events whose recording failed, that a capture had, or that a lost timeline had, and the
    /// highest closed number at that time. They may be recorded all the same, so they are used
    /// again when an event that was recorded later is complete.
    failed: Vec<(u64, EventHandle)>,
    /// Threads and tasks that wait, by their sequence numbers and by numbers that are used once.
    waiting: BTreeMap<(u64, u64), Wake>,
    next_wait: u64,
    /// Counts changes of what is in flight, so that a reader that looks twice knows whether
    /// anything changed in between.
    moves: u64,
    /// Entries so far, and complete entries. (The timeline's own `completed` is a sequence number.)
    submitted: u64,
    completed: u64,
    /// Whether the timeline is on the reaper's list.
    listed: bool,
    /// The open sequence number at the reaper's last look, and how many looks in a row found
    /// nothing in flight.
    seen: u64,
    idle_looks: u32,
}

/// A recorded event, which covers all sequence numbers up to its own.
#[derive(Clone, Copy, Debug)]
struct Mark {
    seq: u64,
    event: EventHandle,
}

/// A stream's timeline. The module's page describes it.
#[derive(Debug)]
pub(crate) struct Timeline {
    /// Unique in this process.
    number: u64,
    context: Arc<Context>,
    stream: StreamHandle,
    /// Whether the stream is shared. Set once, under the state's lock; a submit reads it under that
    /// lock to decide whether its sequence number may stay open. Without the lock it is a hint
    /// only, which is enough: the program gets the handle, and so can begin a capture, only after
    /// the flag was set. (Not loom's type: in no model a read without the lock matters.)
    shared: std::sync::atomic::AtomicBool,
    /// Whether segments in flight here may be claimed: only if the stream has no other timeline.
    claims: bool,
    /// Whether the crate made the stream, and so destroys it.
    destroy: bool,
    /// The thread that submits to the stream, if only one can.
    confined: Option<Confined>,
    /// What keeps an adopted stream alive, if the program gave it.
    keep_alive: OnceLock<KeepAlive>,
    /// Looks at the timeline until it is idle. Called under no lock of a timeline.
    listing: Arc<Listing>,
    /// The highest sequence number that is known to be complete.
    completed: CachePadded<AtomicU64>,
    /// The error with which the stream was given up. Set under the lock, before waiters are woken.
    lost: OnceLock<Error>,
    /// Whether a thread has the role of asking.
    asking: AtomicBool,
    state: Mutex<TimelineState>,
}

impl Timeline {
    /// The timeline of a stream. `own`: the crate made it; else the program did. `claims`: it has
    /// no other timeline.
    pub(crate) fn new(
        context: Arc<Context>,
        stream: StreamHandle,
        own: bool,
        claims: bool,
        confined: Option<Confined>,
        listing: Arc<Listing>,
    ) -> Arc<Self> {
        static NUMBERS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        Arc::new(Self {
            number: NUMBERS.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
            context,
            stream,
            shared: std::sync::atomic::AtomicBool::new(!own),
            claims,
            destroy: own,
            confined,
            keep_alive: OnceLock::new(),
            listing,
            completed: CachePadded::new(AtomicU64::new(0)),
            lost: OnceLock::new(),
            asking: AtomicBool::new(false),
            state: Mutex::new(TimelineState { open: 1, ..TimelineState::default() }),
        })
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

    /// An error if nothing can be submitted.
    pub(crate) fn usable(&self) -> Result<()> {
        self.context.alive()?;
        self.not_lost()
    }

    /// The error with which the stream was given up.
    fn not_lost(&self) -> Result<()> {
        self.lost.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    // --- shared streams --------------------------------------------------------------------------

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
        _ = self.close();
    }

    /// Gives `keep_alive` to the timeline, unless it has one already, of the same stream.
    pub(crate) fn keep(&self, keep_alive: KeepAlive) {
        let _ = self.keep_alive.set(keep_alive);
    }

    /// The confinement, if the calling thread cannot name the stream.
    fn elsewhere(&self) -> Option<Confined> {
        self.confined.filter(|confined| !confined.is_here())
    }

    /// An error if the calling thread cannot name the stream: to be asked before any call that the
    /// driver gets its handle in.
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

    // --- submitting ------------------------------------------------------------------------------

    /// Enters what is about to be handed to the driver. After an error it is not in flight.
    pub(crate) fn begin(
        self: &Arc<Self>,
        retained: Resource,
        memory: Option<Arc<dyn Retain>>,
    ) -> Result<Submission<'_>> {
        self.context.alive()?;
        self.nameable()?;
        let mut state = self.state.lock();
        self.not_lost()?;
        let (mut flown, mut host) = (None, None);
        match retained {
            Resource::Segment(segment) => {
                let claimed = state.claimed(&segment);
                let (bytes, claims) = if claimed.is_some() { (0, -1) } else { (1, 0) };
                // What a claim follows is still to be seen complete, and may use device memory.
                claimed.into_iter().for_each(|entry| entry.flown = None);
                flown.insert(Flown::new(segment)).count(bytes, claims);
            }
            Resource::Object(object) => host = Some(Hold::new(object)),
            Resource::Nothing => {}
        }
        state.moves += 1;
        let number = state.submitted;
        state.submitted += 1;
        let since = (number % TIMED == 0).then(Instant::now);
        let memory = memory.map(Hold::new);
        state.submitting.push(TimelineEntry { seq: 0, sum: (0, 0), number, flown, host, memory, since });
        // Foreign code is put off from here until the entry has its sequence number.
        let deferral = foreign::defer();
        Ok(Submission { timeline: self, number: Some(number), patient: false, _deferral: deferral })
    }

    /// The driver was called: the entry joins the sequence number that is open now. `patient`: on a
    /// shared stream, too, the number may stay open for a while.
    fn commit(self: &Arc<Self>, number: u64, patient: bool) -> u64 {
        let mut state = self.state.lock();
        // Under the lock: a thread that shares the stream later closes the sequence number itself.
        let shared = self.is_shared();
        let seq = state.open;
        state.join(number, seq);
        let lingers = (!shared || patient && self.confined.is_none()) && !state.is_full();
        let list = !std::mem::replace(&mut state.listed, true);
        let closing = (!lingers).then(|| Closing::new(self, &mut state));
        drop(state);
        if list {
            self.listing.list(self);
        }
        if let Some(error) = self.lost.get() {
            self.lose(error);
        }
        // A failure leaves the entry to a later event. The submitter asked about a capture.
        _ = closing.map(|closing| closing.record(None));
        seq
    }

    // --- stream-ready reuse ----------------------------------------------------------------------

    // A segment in flight is claimed for later work on the same stream, which comes after the
    // earlier work by the stream's order. A segment that a waiting request may have a right to is
    // not claimed ([`CentralPool::may_claim`]). The completing thread and the claimer decide by one
    // compare-and-swap on the segment's state word, from DETACHED. A claim ends when its segment is
    // submitted again, becomes host-ready or is given up.

    /// Claims a segment of this class and central pool that is in flight on this stream alone and
    /// whose handle was dropped: the youngest, since the oldest will be free first anyway. The
    /// segment has the length `len` from then on.
    pub(crate) fn claim(&self, central: &CentralPool, class: Class, len: usize) -> Option<Segment> {
        // During a capture, newly submitted work does not come after what is in flight.
        if !self.claims || !self.is_capturing().is_ok_and(|capturing| !capturing) {
            return None;
        }
        let mut state = self.state.lock();
        let fits = |flown: &&mut Flown| {
            let segment = &flown.segment;
            // A handle may be dropped at this moment: only a word that says DETACHED, in this
            // generation, is claimed.
            segment.central().number() == central.number()
                && segment.class() == Some(class)
                && central.may_claim(class, segment.base())
                && flown.exchange(state::DETACHED, state::CLAIMED)
        };
        let flown = state.entries.iter_mut().rev().filter_map(|entry| entry.flown.as_mut()).find(fits)?;
        flown.segment.rebook(len);
        flown.count(0, 1);
        let alias = flown.segment.alias();
        state.moves += 1;
        Some(alias)
    }

    /// The sequence number after which a claimed segment is host-ready. `None`: it is host-ready
    /// already, or was quarantined.
    pub(crate) fn claimed_until(&self, segment: &Segment) -> Option<u64> {
        self.state.lock().claimed(segment).map(|entry| entry.seq)
    }

    /// Gives up a segment that was not used. A claimed one stays in flight under its sequence
    /// number. One that is host-ready, since it was fresh or its number is complete, goes back to
    /// its central pool.
    pub(crate) fn unclaim(&self, segment: Segment) {
        if crate::os::forked() {
            return;
        }
        let mut state = self.state.lock();
        if let Some(flown) = state.claimed(&segment).and_then(|entry| entry.flown.as_ref()) {
            flown.exchange(state::CLAIMED, state::DETACHED);
            flown.count(0, -1);
            state.moves += 1;
            return;
        }
        drop(state);
        if segment.descriptor().word().state() == state::HOST {
            // SAFETY: fresh, or events that cover it were seen complete; and its owner gives it up.
            unsafe { segment.release() };
        }
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
        // A timeline with anything in flight is on the reaper's list and so is not dropped, unless
        // a panic has removed it from the list.
        let idle = self.state.get_mut().is_idle();
        if !idle {
            self.lose(&Error::Internal("a stream was dropped with work in flight"));
            self.context.holds().leaked(1);
        }
        let state = self.state.get_mut();
        state.failed.drain(..).for_each(|(_, event)| self.context.set_aside(event));
        self.context.count_past(state.submitted, state.completed);
        if !idle {
            return std::mem::forget(keep_alive);
        }
        if keep_alive.is_none() && !self.destroy {
            return;
        }
        let context = self.context.clone();
        let destroyed = self.destroy.then_some(self.stream);
        self.context.worker().send(move || {
            // Its drop may destroy the stream, or do anything else. The adopted context, which the
            // stream is in, is kept until then.
            drop(keep_alive);
            if let Some(Err(error)) = destroyed.map(|stream| context.driver().destroy_stream(stream)) {
                context.holds().leaked(1);
                crate::foreign::warn!(target: "pinpool::stream::leak", device = context.name(), %error, "a stream is leaked");
            }
        });
    }
}

impl TimelineState {
    fn is_idle(&self) -> bool {
        // (A later event may have been published before one that is still being recorded.)
        self.entries.is_empty() && self.submitting.is_empty() && self.under_way == 0 && self.marks.is_empty()
    }

    /// An entry that was being submitted is in flight. Its sequence number is the highest so far.
    fn join(&mut self, number: u64, seq: u64) {
        let Some(at) = self.submitting.iter().position(|entry| entry.number == number) else { return };
        let entry = self.submitting.swap_remove(at);
        let (count, bytes) = self.sum(seq);
        let sum = (count + 1, bytes + entry.flown.as_ref().map_or(0, |flown| flown.bytes));
        self.entries.push_back(TimelineEntry { seq, sum, ..entry });
    }

    /// Whether the open sequence number has entries.
    fn has_open(&self) -> bool {
        self.entries.back().is_some_and(|entry| entry.seq == self.open)
    }

    /// The entries and bytes so far of a sequence number: the highest that entries have, or a
    /// later one.
    fn sum(&self, seq: u64) -> (usize, usize) {
        self.entries.back().filter(|last| last.seq == seq).map_or((0, 0), |last| last.sum)
    }

    /// Whether the open sequence number has as many entries or bytes as it may have.
    fn is_full(&self) -> bool {
        let (count, bytes) = self.sum(self.open);
        count >= SEQ_ENTRIES || bytes >= SEQ_BYTES
    }

    /// The entry with a claimed segment. `None`: it is not claimed, or was seen complete.
    fn claimed(&mut self, segment: &Segment) -> Option<&mut TimelineEntry> {
        // A claim ends under the lock, so a word that says CLAIMED goes on saying so.
        if segment.descriptor().word().state() != state::CLAIMED {
            return None;
        }
        let is = |flown: &Flown| std::ptr::eq(flown.segment.descriptor(), segment.descriptor());
        self.entries.iter_mut().rev().find(|entry| entry.flown.as_ref().is_some_and(is))
    }
}

/// A submission under way. If it is dropped uncommitted, by a panic for instance, its entry counts
/// as handed to the driver all the same: it is in flight until a later event, not free.
#[derive(Debug)]
pub(crate) struct Submission<'a> {
    timeline: &'a Arc<Timeline>,
    /// The number of the entry.
    number: Option<u64>,
    /// Whether the sequence number may stay open for a while on a shared stream, too.
    pub(crate) patient: bool,
    /// Ends after the entry has joined: fields are dropped after `drop` below.
    _deferral: Deferral,
}

impl Submission<'_> {
    /// The driver was called, with any result. Returns the entry's sequence number.
    pub(crate) fn commit(mut self) -> u64 {
        self.join()
    }

    fn join(&mut self) -> u64 {
        self.number.take().map_or(0, |number| self.timeline.commit(number, self.patient))
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
