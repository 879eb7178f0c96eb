//! One transfer: which of its chunks are taken, how far it has come, and how it ended.
//!
//! A chunk is *taken* by a worker, which then owns it until the chunk has *ended*: its bytes have arrived, or are known
//! not to. The job is *over* when no chunk is left to be taken and none is under way. After the first error, or when
//! the job is cancelled, no further chunk is taken. So the thread that sees that a job is over knows that no worker
//! touches what the job reads or writes.
//!
//! The bytes of a *fed* job come from its caller, chunk by chunk. Such a job is open until the caller closes it, and is
//! not over before.
//!
//! What a job reads or writes ([`Work`]) is borrowed from a caller that waits, or owned by the job, which drops it when
//! it is over. An upload reads all of it before its copies are complete, so a caller that lends bytes may go on as soon
//! as the job is [read](Job::is_read).
//!
//! A job has one lock. No other lock of the crate is taken under it, but that of the segments from a reader when one of
//! its chunks is taken.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::task::Waker;
use std::time::{Duration, Instant};

use super::config::Priority;
use super::packing::{Content, Packing};
use super::trace::Trace;
use crate::amount::Amount;
use crate::device::memory::Allocation;
use crate::error::{Error, Result, Waited};
use crate::foreign::Task;
use crate::stream::timeline::{Quarantined, Retain};
use crate::sync::thread::{self, Thread};
use crate::sync::{Mutex, MutexGuard};
use crate::timer::Planned;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Direction {
    #[default]
    Up,
    Down,
}

impl Direction {
    pub(super) fn other(self) -> Self {
        match self {
            Self::Up => Self::Down,
            Self::Down => Self::Up,
        }
    }
}

/// A place in a call's pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) piece: usize,
    /// Bytes of that piece before the place.
    pub(super) from: usize,
}

/// How far a call is cut into chunks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cursor {
    pub(super) at: Cut,
    /// Chunks so far, and bytes in them.
    pub(super) chunks: usize,
    pub(super) cut: u64,
    /// Bytes that are in none of them.
    pub(super) left: u64,
}

/// A part of a call that one worker moves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    /// Its place in the order of the call.
    pub(super) index: usize,
    pub(super) start: Cut,
    pub(super) end: Cut,
    pub(super) bytes: usize,
    /// Where its first byte lies in what the call reads or writes, for errors.
    pub(super) at: u64,
    /// [`Progress::landed_to`] when it and all chunks before it have arrived.
    pub(super) landed_to: u64,
    /// The bytes of a segment that its layout may use. `None`: its bytes are copied from or to where they are.
    pub(super) most: Option<usize>,
}

/// What a job moves. `prepare` and `drain` are called without a lock, by several threads at once, for a chunk by one
/// thread only.
pub(super) trait Work: Send + Sync {
    /// Whether `prepare` or `drain` may take long, since they run code of the program's or read files.
    fn may_block(&self) -> bool {
        false
    }

    /// Whether the caller itself takes the bytes of a download out of the segments, in order.
    fn is_pulled(&self) -> bool {
        false
    }

    /// Whether the worker that takes a chunk brings a segment for it.
    fn needs_segment(&self) -> bool {
        true
    }

    /// Cuts the next chunk, for a worker whose segment has room for so many bytes, or that has none, and moves the cursor
    /// behind it. Called while bytes are left, under the job's lock: runs no foreign code.
    fn cut(&self, cursor: &mut Cursor, room: Option<usize>) -> Chunk;

    /// Lays a chunk out, and fills it if it is on its way to the device.
    ///
    /// # Errors
    /// The error that the job ends with.
    fn prepare(&self, chunk: &Chunk, packing: &mut Packing<'_>) -> Result<Content>;

    /// Takes the bytes of a chunk that has come from the device, from the segment that it was laid out in.
    ///
    /// # Errors
    /// The error that the job ends with.
    fn drain(&self, _chunk: &Chunk, _bytes: &[u8]) -> Result<()> {
        Ok(())
    }
}

/// How a chunk ended.
#[derive(Debug)]
pub(super) enum End {
    Arrived,
    Failed(Error),
    /// It was let go, since its job had stopped.
    Dropped,
}

impl From<Result<()>> for End {
    fn from(result: Result<()>) -> Self {
        result.map_or_else(Self::Failed, |()| Self::Arrived)
    }
}

/// Where a job's [`Work`] is.
pub(super) enum Body {
    Owned(Arc<dyn Work>),
    /// Valid until the job is over, or (for an upload) until it is read.
    Lent(LentWork),
}

impl Body {
    fn work(&self) -> *const dyn Work {
        match self {
            Self::Owned(work) => &raw const **work,
            Self::Lent(LentWork(work)) => *work,
        }
    }
}

/// The address of [`Work`] that a caller lends.
#[derive(Clone, Copy)]
pub(super) struct LentWork(*const dyn Work);

// SAFETY: an address of a value that several threads may use at once (`Work` is `Sync`).
unsafe impl Send for LentWork {}
// SAFETY: as above.
unsafe impl Sync for LentWork {}

impl LentWork {
    /// # Safety
    /// `work` stays where it is until the job that is made with this is over, or for an upload until it is read.
    pub(super) unsafe fn new(work: &(dyn Work + '_)) -> Self {
        let work: *const (dyn Work + '_) = work;
        // SAFETY: only the lifetime of the pointer's type changes; the caller's promise stands in for it.
        Self(unsafe { std::mem::transmute::<*const (dyn Work + '_), *const (dyn Work + 'static)>(work) })
    }
}

/// The device memory of a job. Each of its copies keeps all of it.
#[derive(Debug)]
pub(super) struct Memories(pub(super) Vec<Arc<Allocation>>);

/// A copy's share of the memory.
#[derive(Debug)]
pub(super) struct KeptMemories(
    #[allow(dead_code, reason = "kept, and never looked at")] pub(super) Vec<Arc<Memories>>,
);

impl Retain for KeptMemories {
    fn quarantine(self: Box<Self>) -> Quarantined {
        // The device may use it for good: it is leaked.
        std::mem::forget(self);
        Quarantined::default()
    }
}

/// How far a transfer has come: [`Transfer::progress`](super::Transfer::progress).
///
/// ```
/// # use pinpool::{Copier, Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (copier, memory) = (Copier::builder(&pool, &device).build()?, device.alloc(1 << 20)?);
/// let load = copier.upload(vec![7; 1 << 20], &memory)?;
/// let progress = load.progress();
/// println!("{} of {} bytes, {:?} left", progress.done, progress.total, progress.remaining());
/// # load.wait()?;
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Bytes that have arrived.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
    /// All bytes before this offset of what is read or written have arrived. For a call with many pieces of memory the
    /// offset counts the bytes of all of them, in the order of the call.
    pub landed_to: u64,
    /// All pieces of the call before this one have arrived: of a call with pages its blocks. (A source's or file's pieces
    /// count in the order of their offsets.)
    pub landed_pieces: usize,
    /// The time since the transfer was started, until now or until it was over.
    pub elapsed: Duration,
    /// Whether it is over, with or without an error.
    pub over: bool,
}

impl Progress {
    /// Bytes a second, on average.
    #[must_use]
    pub fn rate(&self) -> f64 {
        let seconds = self.elapsed.as_secs_f64();
        if seconds > 0.0 { self.done as f64 / seconds } else { 0.0 }
    }

    /// How long the rest takes at that rate. `None` before anything has arrived.
    #[must_use]
    pub fn remaining(&self) -> Option<Duration> {
        let left = self.total.saturating_sub(self.done) as f64;
        let rate = self.rate();
        (rate > 0.0).then(|| Duration::try_from_secs_f64(left / rate).unwrap_or(Duration::MAX))
    }
}

/// What is known of a job before it starts.
pub(super) struct Plan {
    pub(super) direction: Direction,
    pub(super) priority: Priority,
    pub(super) total: u64,
    /// What is read or written, for errors and events. `None`: pieces of memory, whose errors have no place.
    pub(super) name: Option<Cow<'static, str>>,
    pub(super) memories: Vec<Arc<Allocation>>,
    /// Its device memory, if it has its place in the order of all transfers.
    pub(super) spans: Vec<Range<u64>>,
    /// The bytes come from the caller, later.
    pub(super) fed: bool,
    /// Its span, if that has begun.
    pub(super) trace: Option<Trace>,
    /// How long it may take.
    pub(super) timeout: Option<Duration>,
}

/// See the module's page.
pub(super) struct Job {
    pub(super) direction: Direction,
    pub(super) priority: Priority,
    pub(super) memories: Arc<Memories>,
    pub(super) name: Option<Cow<'static, str>>,
    /// What the work says: see [`Work`].
    pub(super) may_block: bool,
    pub(super) is_pulled: bool,
    pub(super) needs_segment: bool,
    pub(super) deadline: Option<Instant>,
    since: Instant,
    body: Body,
    state: Mutex<JobState>,
    /// How far it had come when it was over, for handles that do not keep the job.
    pub(super) last: Arc<OnceLock<Progress>>,
}

#[derive(Default)]
struct JobState {
    cursor: Cursor,
    total: u64,
    /// More bytes may come from the caller.
    open: bool,
    /// Earlier transfers use its device memory: no chunk is taken.
    held: bool,
    /// They are over.
    released: bool,
    /// Called when it is over.
    after: Option<Box<dyn FnOnce() + Send>>,
    /// Chunks that were taken and have not ended.
    active: usize,
    /// Of these, those that are being prepared.
    preparing: usize,
    ended: usize,
    done: u64,
    /// The first chunk that has not arrived; and what follows when those behind it that have arrived are the next.
    missing: usize,
    early: BTreeMap<usize, (usize, u64)>,
    landed: (usize, u64),
    /// The error of the first chunk that failed, by its place.
    error: Option<(usize, Error)>,
    cancelled: bool,
    /// Its deadline has passed: the error, unless all has arrived nevertheless.
    late: Option<Error>,
    /// What the timer does at the deadline.
    alarm: Option<Planned>,
    /// Closed before the job counts as over. Taken by the thread that ends the job.
    trace: Option<Trace>,
    ending: bool,
    over: Option<Duration>,
    /// Threads and tasks that wait for a change, each under a number of its own.
    threads: Vec<(u64, Thread)>,
    wakers: Vec<(u64, Arc<Task>)>,
    next_waiter: u64,
}

impl JobState {
    fn is_stopped(&self) -> bool {
        self.error.is_some() || self.cancelled || self.late.is_some()
    }

    fn may_take(&self) -> bool {
        self.cursor.left > 0 && !self.held && !self.is_stopped()
    }

    /// Whether bytes are left that will be taken, now or later.
    fn has_left(&self) -> bool {
        self.cursor.left > 0 && !self.is_stopped()
    }

    fn is_read(&self) -> bool {
        self.preparing == 0 && !self.has_left()
    }

    /// Whether nothing is under way, and nothing will be.
    fn is_at_end(&self) -> bool {
        self.active == 0 && !self.has_left() && !self.open
    }

    fn told(&mut self) -> Told {
        let wakers = self.wakers.drain(..).map(|(_, task)| task).collect();
        Told { threads: std::mem::take(&mut self.threads), wakers }
    }
}

/// Who is to be told of a change, after the lock.
#[derive(Default)]
struct Told {
    threads: Vec<(u64, Thread)>,
    wakers: Vec<Arc<Task>>,
}

impl Told {
    fn tell(self) {
        self.threads.iter().for_each(|(_, thread)| thread.unpark());
        self.wakers.into_iter().for_each(Task::wake_shared);
    }
}

impl Job {
    pub(super) fn new(plan: Plan, body: Body) -> Arc<Self> {
        let Plan { direction, priority, total, name, memories, fed, spans: _, trace, timeout } = plan;
        let (since, left) = (Instant::now(), if fed { 0 } else { total });
        let (may_block, is_pulled, needs_segment) = {
            let work = body.work();
            // SAFETY: a lender waits from here on.
            let work = unsafe { &*work };
            (work.may_block(), work.is_pulled(), work.needs_segment())
        };
        let state = JobState {
            cursor: Cursor { left, ..Cursor::default() },
            total,
            open: fed,
            trace,
            ..JobState::default()
        };
        let job = Arc::new(Self {
            direction,
            priority,
            memories: Arc::new(Memories(memories)),
            name,
            may_block,
            is_pulled,
            needs_segment,
            deadline: timeout.and_then(|timeout| since.checked_add(timeout)),
            since,
            body,
            state: Mutex::new(state),
            last: Arc::default(),
        });
        job.settle(job.state.lock());
        job
    }

    /// What the job reads or writes.
    ///
    /// # Safety
    /// A chunk can be taken under the lock that the caller holds; or the caller has taken one, and is preparing it, or
    /// (for a download) has not ended it.
    pub(super) unsafe fn work(&self) -> &dyn Work {
        // SAFETY: the job's own; or the lender waits until no chunk is being prepared, for a download until none is left.
        unsafe { &*self.body.work() }
    }

    /// Whether a chunk can be taken.
    pub(super) fn may_take(&self) -> bool {
        self.state.lock().may_take()
    }

    /// Takes the next chunk, for a worker whose segment has so much room, or that has none. Its taker prepares it.
    pub(super) fn take(&self, room: Option<usize>) -> Option<Chunk> {
        let mut state = self.state.lock();
        if !state.may_take() {
            return None;
        }
        // SAFETY: bytes are left to be taken, so the lender still waits.
        let chunk = unsafe { self.work() }.cut(&mut state.cursor, room);
        state.active += 1;
        state.preparing += 1;
        Some(chunk)
    }

    /// The taker of a chunk has prepared it, and reads or writes the [`Work`] of an upload no more.
    pub(super) fn prepared(&self) {
        let mut state = self.state.lock();
        state.preparing -= 1;
        let told = if state.is_read() { state.told() } else { Told::default() };
        drop(state);
        told.tell();
    }

    /// A chunk has ended. Called once for each chunk that was taken, after [`prepared`](Self::prepared).
    pub(super) fn end(&self, chunk: &Chunk, end: End) {
        let mut state = self.state.lock();
        state.active -= 1;
        state.ended += 1;
        match end {
            End::Arrived => {
                state.done += chunk.bytes as u64;
                state.early.insert(chunk.index, (chunk.end.piece, chunk.landed_to));
                while let Some(landed) = {
                    let missing = state.missing;
                    state.early.remove(&missing)
                } {
                    state.missing += 1;
                    state.landed = landed;
                }
            }
            End::Failed(error) if state.error.as_ref().is_none_or(|known| chunk.index < known.0) => {
                state.error = Some((chunk.index, self.failed_at(chunk.at, error)));
            }
            End::Failed(_) | End::Dropped => {}
        }
        self.settle(state);
    }

    /// An error, with what it is about: the first byte of a chunk.
    fn failed_at(&self, offset: u64, error: Error) -> Error {
        match (&self.name, error) {
            (None, error)
            | (
                _,
                error @ (Error::Transfer { .. }
                | Error::Read { .. }
                | Error::Write { .. }
                | Error::Shrunk { .. }),
            ) => error,
            (Some(name), cause) => {
                Error::Transfer { what: name.clone().into_owned(), offset, cause: Box::new(cause) }
            }
        }
    }

    /// The job ends with this error, unless a chunk fails.
    pub(super) fn fail(&self, error: Error) {
        let mut state = self.state.lock();
        if state.over.is_none() {
            let (place, at) = (state.cursor.chunks, state.cursor.cut);
            state.error.get_or_insert_with(|| (place, self.failed_at(at, error)));
            self.settle(state);
        }
    }

    /// No further chunk is taken.
    pub(super) fn cancel(&self) {
        let mut state = self.state.lock();
        if state.over.is_none() {
            state.cancelled = true;
            self.settle(state);
        }
    }

    /// Has the job end at its deadline. `short`: what its pool lacks for a segment.
    pub(super) fn end_in_time(self: &Arc<Self>, short: impl FnOnce() -> Option<Error> + Send + 'static) {
        let (Some(deadline), job) = (self.deadline, Arc::downgrade(self)) else { return };
        let alarm = crate::timer::at_time(deadline, move || {
            if let Some(job) = job.upgrade() {
                job.expire(short);
            }
        });
        let mut state = self.state.lock();
        if state.over.is_none() {
            state.alarm = alarm;
            return;
        }
        drop(state);
        alarm.into_iter().for_each(crate::timer::cancel);
    }

    /// The deadline has passed: no further chunk is taken. Chunks under way go on to their end.
    pub(super) fn expire(&self, short: impl FnOnce() -> Option<Error>) {
        let state = self.state.lock();
        if state.over.is_some() || state.is_stopped() {
            return;
        }
        let is_idle = state.active == 0 && !state.held;
        let what = match &*state {
            JobState { held: true, .. } => "earlier transfers that use the same device memory",
            JobState { preparing: 1.., .. } if self.may_block => {
                "what is read, a call of which has not returned"
            }
            JobState { active: 1.., .. } => "chunks that are under way",
            JobState { open: true, .. } => "further bytes of its caller, or a segment for them",
            _ => "a segment of the pool, or the transfers before it",
        };
        let (done, total) = (state.done, state.total);
        drop(state);
        let name = self.name.as_deref().unwrap_or("pieces");
        let transfer = format!(
            "{} of {} of {name} had arrived, and the transfer waited for {what}",
            Amount(done),
            Amount(total)
        );
        // The pool's lock is taken, so without this one.
        let shortage = match if is_idle { short() } else { None } {
            Some(Error::Exhausted { shortage, .. }) => shortage,
            _ => None,
        };
        let waited = Waited { transfer: Some(transfer.into()), shortage, ..self.since.elapsed().into() };
        let mut state = self.state.lock();
        if state.over.is_none() {
            state.late = Some(Error::Timeout(waited));
            self.settle(state);
        }
    }

    // --- fed jobs ----------------------------------------------------------------------------------------------------

    /// The caller has brought so many bytes more. `false`: the job has stopped, and no worker takes them.
    pub(super) fn feed(&self, bytes: usize) -> bool {
        let mut state = self.state.lock();
        if state.is_stopped() {
            return false;
        }
        state.cursor.left += bytes as u64;
        true
    }

    /// The caller brings no more.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        if std::mem::take(&mut state.open) {
            if !state.is_stopped() {
                state.total = state.cursor.cut + state.cursor.left;
            }
            self.settle(state);
        }
    }

    /// Chunks that have ended.
    pub(super) fn ended(&self) -> usize {
        self.state.lock().ended
    }

    /// Something has changed: tells all that wait, and ends the job if nothing of it is left.
    fn settle<'a>(&'a self, mut state: MutexGuard<'a, JobState>) {
        if state.is_at_end() && !state.ending {
            state.ending = true;
            if let Some(trace) = state.trace.take() {
                let (done, elapsed) = (state.done, self.since.elapsed());
                let outcome = self.how(&state);
                // A subscriber is called, so without the lock. Nothing changes any more.
                drop(state);
                trace.end(&outcome, done, elapsed);
                state = self.state.lock();
            }
            state.over = Some(self.since.elapsed());
            let _ = self.last.set(self.progress_of(&state));
        }
        let is_over = state.over.is_some();
        let (after, alarm) = if is_over { (state.after.take(), state.alarm.take()) } else { (None, None) };
        let told = state.told();
        drop(state);
        alarm.into_iter().for_each(crate::timer::cancel);
        if let Some(after) = after {
            after();
        }
        told.tell();
    }

    /// No chunk is taken before [`release`](Self::release) is called. `after` is called when the job is over.
    pub(super) fn hold(&self, held: bool, after: Box<dyn FnOnce() + Send>) {
        let mut state = self.state.lock();
        // What it waits for may have ended before this call.
        state.held = held && !state.released;
        state.after = Some(after);
        // It may be over already, without bytes.
        self.settle(state);
    }

    /// Chunks may be taken from now on. The bytes that are left for them.
    pub(super) fn release(&self) -> u64 {
        let mut state = self.state.lock();
        state.held = false;
        state.released = true;
        let left = state.cursor.left;
        self.settle(state);
        left
    }

    /// Whether a thread that waits for the job can move a chunk of it now, and no call of the program's would hold it up.
    pub(super) fn may_hasten(&self) -> bool {
        let state = self.state.lock();
        !self.may_block && !self.is_pulled && !state.open && state.may_take()
    }

    /// Whether no worker will read what the job uploads any more.
    pub(super) fn is_read(&self) -> bool {
        self.state.lock().is_read()
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.state.lock().is_stopped()
    }

    pub(super) fn is_over(&self) -> bool {
        self.state.lock().over.is_some()
    }

    /// How it ended, if it is over.
    pub(super) fn outcome(&self) -> Option<Result<()>> {
        let state = self.state.lock();
        state.over?;
        Some(self.how(&state))
    }

    fn how(&self, state: &JobState) -> Result<()> {
        match &state.error {
            Some((_, error)) => Err(error.clone()),
            None if state.done < state.total && state.late.is_some() => {
                Err(state.late.clone().unwrap_or(Error::Closed))
            }
            None if state.done < state.total => {
                let what = self.name.as_deref().unwrap_or("pieces").to_owned();
                Err(Error::Cancelled { what, done: state.done, total: state.total })
            }
            None => Ok(()),
        }
    }

    /// The error of a job that has stopped.
    pub(super) fn stopped_with(&self) -> Error {
        let stopped = self.how(&self.state.lock());
        stopped.err().unwrap_or(Error::Closed)
    }

    pub(super) fn progress(&self) -> Progress {
        self.progress_of(&self.state.lock())
    }

    fn progress_of(&self, state: &JobState) -> Progress {
        Progress {
            done: state.done,
            total: state.total,
            landed_to: state.landed.1,
            landed_pieces: state.landed.0,
            elapsed: state.over.unwrap_or_else(|| self.since.elapsed()),
            over: state.over.is_some(),
        }
    }

    /// Parks this thread until something of the job has changed, `until` holds, or the deadline has passed.
    pub(super) fn wait(&self, deadline: Option<Instant>, until: impl Fn(&Self) -> bool) -> bool {
        loop {
            // Left before the look: what changes after the look unparks this thread.
            let mut state = self.state.lock();
            state.next_waiter += 1;
            let number = state.next_waiter;
            state.threads.push((number, thread::current()));
            drop(state);
            let there = until(self);
            if there || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                self.state.lock().threads.retain(|(other, _)| *other != number);
                return there;
            }
            thread::park_until(deadline);
            self.state.lock().threads.retain(|(other, _)| *other != number);
        }
    }

    /// Leaves a waker, in place of the one that was left under `key`. The job's next change wakes it.
    pub(super) fn wake_later(&self, key: &mut Option<u64>, waker: &Waker) {
        // Before the lock: cloning a waker is foreign code.
        let task = Arc::new(Task::of(waker));
        let mut state = self.state.lock();
        let known = key.and_then(|key| state.wakers.iter().position(|(other, _)| *other == key));
        let old = known.map(|place| state.wakers.swap_remove(place));
        state.next_waiter += 1;
        *key = Some(state.next_waiter);
        let entry = (state.next_waiter, task);
        state.wakers.push(entry);
        drop(state);
        drop(old);
    }

    pub(super) fn forget_waker(&self, key: &mut Option<u64>) {
        let Some(key) = key.take().filter(|_| !crate::os::forked()) else { return };
        let mut state = self.state.lock();
        let known = state.wakers.iter().position(|(other, _)| *other == key);
        let old = known.map(|place| state.wakers.swap_remove(place));
        drop(state);
        drop(old);
    }
}
