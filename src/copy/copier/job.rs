//! One transfer: which of its chunks are taken, how far it has come, and how it ended.
//!
//! A chunk is *taken* by a worker, which then owns it until the chunk has *ended*: its bytes have arrived, or are known
//! not to. The job is *over* when no chunk is left to be taken and none is under way. After the first error, or when
//! the job is cancelled, no further chunk is taken. So the thread that sees that a job is over knows that no worker
//! touches what the job reads or writes.
//!
//! What a job reads or writes ([`Work`]) is borrowed from a caller that waits, or owned by the job, which drops it when
//! it is over. An upload reads all of it before its copies are complete, so a caller that lends bytes may go on as soon
//! as the job is [read](Job::is_read).
//!
//! A job has one lock. No other lock of the crate is taken under it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::packing::{Content, Packing};
use crate::device::memory::Allocation;
use crate::error::{Error, Result};
use crate::foreign::Task;
use crate::stream::timeline::{Quarantined, Retain};
use crate::sync::Mutex;
use crate::sync::thread::{self, Thread};

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Up,
    Down,
}

/// A place in a call's pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) piece: usize,
    /// Bytes of that piece before the place.
    pub(super) from: usize,
}

/// How far a call is cut into chunks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor {
    pub(super) at: Cut,
    /// Chunks so far.
    pub(super) chunks: usize,
    /// Bytes that are in none of them.
    pub(super) left: u64,
}

/// Whether a chunk goes through a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needs {
    Segment,
    /// It is faster so, but the bytes can be copied from or to where they are.
    SegmentIfAny,
    Nothing,
}

/// A part of a call that one worker moves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    /// Its place in the order of the call.
    pub(super) index: usize,
    pub(super) start: Cut,
    pub(super) end: Cut,
    pub(super) bytes: usize,
    /// The bytes of a segment that its layout may use. `None`: its bytes are copied from or to where they are.
    pub(super) most: Option<usize>,
}

/// What a job moves. `prepare` and `drain` are called without a lock, by several threads at once, for a chunk by one
/// thread only.
pub(super) trait Work: Send + Sync {
    /// What the next chunk needs. Called while bytes are left, as `cut` is.
    fn needs(&self, _cursor: &Cursor) -> Needs {
        Needs::Segment
    }

    /// Cuts the next chunk, for a worker that has a segment or not, and moves the cursor behind it. Called under the
    /// job's lock: runs no foreign code.
    fn cut(&self, cursor: &mut Cursor, has_segment: bool) -> Chunk;

    /// Lays a chunk out, and fills it if it is on its way to the device.
    ///
    /// # Errors
    /// The error that the job ends with.
    fn prepare(&self, chunk: &Chunk, packing: &mut Packing<'_>) -> Result<Content>;

    /// Takes the bytes of a chunk that has come from the device, from the segment that it was laid out in.
    ///
    /// # Errors
    /// The error that the job ends with.
    fn drain(&self, chunk: &Chunk, bytes: &[u8]) -> Result<()>;
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

/// How far a transfer has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopyProgress {
    /// Bytes that have arrived.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
    /// All pieces of the call before this one have arrived.
    pub landed_to: usize,
    /// The time since the transfer was started, until now or until it was over.
    pub elapsed: Duration,
    /// Whether it is over, with or without an error.
    pub over: bool,
}

/// See the module's page.
pub(super) struct Job {
    pub(super) direction: Direction,
    pub(super) memories: Arc<Memories>,
    pub(super) total: u64,
    since: Instant,
    body: Body,
    state: Mutex<JobState>,
}

struct JobState {
    /// What was taken so far.
    cursor: Cursor,
    /// Chunks that are taken and have not ended, and how many of these a worker is preparing.
    active: usize,
    preparing: usize,
    done: u64,
    /// The first chunk that has not arrived, and those after it that have.
    missing: usize,
    early: BTreeMap<usize, usize>,
    /// All pieces before this one have arrived.
    landed_to: usize,
    /// The error of the first chunk that failed, by its place.
    error: Option<(usize, Error)>,
    cancelled: bool,
    over: Option<Duration>,
    threads: Vec<Thread>,
    wakers: Vec<(u64, Arc<Task>)>,
    next_waker: u64,
}

impl JobState {
    fn is_stopped(&self) -> bool {
        self.error.is_some() || self.cancelled
    }

    fn may_take(&self) -> bool {
        self.cursor.left > 0 && !self.is_stopped()
    }

    fn is_read(&self) -> bool {
        self.preparing == 0 && !self.may_take()
    }
}

/// Who is to be told of a change, after the lock.
#[derive(Default)]
struct Told {
    threads: Vec<Thread>,
    wakers: Vec<Arc<Task>>,
}

impl Told {
    fn tell(self) {
        self.threads.iter().for_each(Thread::unpark);
        self.wakers.into_iter().for_each(Task::wake_shared);
    }
}

impl Job {
    pub(super) fn new(
        direction: Direction,
        total: u64,
        body: Body,
        memories: Vec<Arc<Allocation>>,
    ) -> Arc<Self> {
        let state = JobState {
            cursor: Cursor { at: Cut::default(), chunks: 0, left: total },
            active: 0,
            preparing: 0,
            done: 0,
            missing: 0,
            early: BTreeMap::new(),
            landed_to: 0,
            error: None,
            cancelled: false,
            over: (total == 0).then_some(Duration::ZERO),
            threads: Vec::new(),
            wakers: Vec::new(),
            next_waker: 0,
        };
        let memories = Arc::new(Memories(memories));
        Arc::new(Self { direction, memories, total, since: Instant::now(), body, state: Mutex::new(state) })
    }

    /// What the job reads or writes.
    ///
    /// # Safety
    /// A chunk can be taken under the lock that the caller holds; or the caller has taken one, and is preparing it, or
    /// (for a download) has not ended it.
    pub(super) unsafe fn work(&self) -> &dyn Work {
        match &self.body {
            Body::Owned(work) => &**work,
            // SAFETY: the lender waits until no chunk is being prepared, for a download until none is left.
            Body::Lent(LentWork(work)) => unsafe { &**work },
        }
    }

    /// Whether a chunk can be taken.
    pub(super) fn may_take(&self) -> bool {
        self.state.lock().may_take()
    }

    /// What the next chunk needs, if there is one.
    pub(super) fn needs(&self) -> Option<Needs> {
        let state = self.state.lock();
        // SAFETY: bytes are left to be taken, so the lender still waits.
        state.may_take().then(|| unsafe { self.work() }.needs(&state.cursor))
    }

    /// Takes the next chunk, for a worker that has a segment or not. Its taker prepares it.
    pub(super) fn take(&self, has_segment: bool) -> Option<Chunk> {
        let mut state = self.state.lock();
        if !state.may_take() {
            return None;
        }
        // SAFETY: as in `needs`.
        let work = unsafe { self.work() };
        // Another worker may have taken the chunk that this one has looked at.
        if !has_segment && work.needs(&state.cursor) == Needs::Segment {
            return None;
        }
        let chunk = work.cut(&mut state.cursor, has_segment);
        state.active += 1;
        state.preparing += 1;
        Some(chunk)
    }

    /// The taker of a chunk has prepared it, and reads or writes the [`Work`] of an upload no more.
    pub(super) fn prepared(&self) {
        let mut state = self.state.lock();
        state.preparing -= 1;
        let told = if state.is_read() { self.told(&mut state) } else { Told::default() };
        drop(state);
        told.tell();
    }

    /// A chunk has ended. Called once for each chunk that was taken, after [`prepared`](Self::prepared).
    pub(super) fn end(&self, chunk: &Chunk, end: End) {
        let mut state = self.state.lock();
        state.active -= 1;
        match end {
            End::Arrived => {
                state.done += chunk.bytes as u64;
                state.early.insert(chunk.index, chunk.end.piece);
                while let Some(pieces) = {
                    let missing = state.missing;
                    state.early.remove(&missing)
                } {
                    state.missing += 1;
                    state.landed_to = pieces;
                }
            }
            End::Failed(error) if state.error.as_ref().is_none_or(|known| chunk.index < known.0) => {
                state.error = Some((chunk.index, error));
            }
            End::Failed(_) | End::Dropped => {}
        }
        let told = self.settle(&mut state);
        drop(state);
        told.tell();
    }

    /// The job ends with this error, unless a chunk fails.
    pub(super) fn fail(&self, error: Error) {
        let mut state = self.state.lock();
        if state.over.is_some() {
            return;
        }
        let place = state.cursor.chunks;
        state.error.get_or_insert((place, error));
        let told = self.settle(&mut state);
        drop(state);
        told.tell();
    }

    /// No further chunk is taken.
    pub(super) fn cancel(&self) {
        let mut state = self.state.lock();
        if state.over.is_some() {
            return;
        }
        state.cancelled = true;
        let told = self.settle(&mut state);
        drop(state);
        told.tell();
    }

    fn settle(&self, state: &mut JobState) -> Told {
        if state.active == 0 && !state.may_take() && state.over.is_none() {
            state.over = Some(self.since.elapsed());
        }
        self.told(state)
    }

    fn told(&self, state: &mut JobState) -> Told {
        Told {
            threads: std::mem::take(&mut state.threads),
            wakers: state.wakers.drain(..).map(|(_, task)| task).collect(),
        }
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
        Some(match &state.error {
            Some((_, error)) => Err(error.clone()),
            None if state.done < self.total => {
                Err(Error::Cancelled { what: "pieces".into(), done: state.done, total: self.total })
            }
            None => Ok(()),
        })
    }

    pub(super) fn progress(&self) -> CopyProgress {
        let state = self.state.lock();
        CopyProgress {
            done: state.done,
            total: self.total,
            landed_to: state.landed_to,
            elapsed: state.over.unwrap_or_else(|| self.since.elapsed()),
            over: state.over.is_some(),
        }
    }

    /// Parks this thread until something of the job has changed, `until` holds, or the deadline has passed.
    pub(super) fn wait(&self, deadline: Option<Instant>, until: impl Fn(&Self) -> bool) -> bool {
        loop {
            // Left before the look: what changes after the look unparks this thread.
            self.state.lock().threads.push(thread::current());
            if until(self) {
                return true;
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return false;
            }
            thread::park_until(deadline);
        }
    }

    /// Leaves a waker, in place of the one that was left under `key`. The job's next change wakes it.
    pub(super) fn wake_later(&self, key: &mut Option<u64>, waker: &Waker) {
        // Before the lock: cloning a waker is foreign code.
        let task = Arc::new(Task::of(waker));
        let mut state = self.state.lock();
        let known = key.and_then(|key| state.wakers.iter().position(|(other, _)| *other == key));
        let old = known.map(|place| state.wakers.swap_remove(place));
        state.next_waker += 1;
        *key = Some(state.next_waker);
        let entry = (state.next_waker, task);
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
