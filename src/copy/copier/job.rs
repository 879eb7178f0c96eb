//! One transfer: which of its chunks are taken, how far it has come, and how it ended.
//!
//! A chunk is *taken* by a worker, which owns it until the chunk has *ended*: its bytes have
//! arrived, or are known not to. The job is *over* when no chunk is left and none is under way.
//! After the first error or a cancel no further chunk is taken. So a thread that sees that a job is
//! over knows that no worker touches its memory.
//!
//! What a job reads or writes ([`Plan`]) is borrowed from a caller that waits until the job is
//! over, or owned by the job. A job has one lock. No other lock of the crate is taken under it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::chunk::{Chunk, Cursor, Ramp};
use super::trace::Trace;
use super::types::{Direction, Kind, Priority};
use crate::amount::Amount;
use crate::buffer::PinnedBuf;
use crate::error::{Error, Result, SubmitError, Waited};
use crate::foreign::Task;
use crate::stream::hold::Retain;
use crate::sync::thread::{self, Thread};
use crate::sync::{Mutex, MutexGuard};
use crate::timer::Planned;

/// What a job moves, and how. Several threads call `fill` and `drain` at once, each for a chunk of
/// its own, without a lock, and not when the job is over. The job ends with their error.
pub(super) trait Plan: Send + Sync {
    /// What chunks need of a worker. It is always the same.
    fn kind(&self) -> Kind {
        Kind::Staged
    }

    /// The open file that it reads, as a number that plans which read the same one have in common.
    fn file(&self) -> Option<usize> {
        None
    }

    /// What keeps the bytes of a chunk in place, and nothing else: all of it is quarantined with a
    /// lost stream. `None`: it is gone.
    fn lend(&self, _chunk: &Chunk) -> Option<Vec<Arc<dyn Retain>>> {
        None
    }

    /// Cuts off the next chunk, of at most `most` bytes, and moves the cursor behind it. Called
    /// while bytes are left, under the job's lock: runs no foreign code.
    fn next(&self, cursor: &mut Cursor, most: usize) -> Chunk;

    /// Fills the segment of a chunk that is on its way to the device, as the chunk was laid out.
    fn fill(&self, _chunk: &Chunk, _segment: &mut PinnedBuf) -> Result<()> {
        Ok(())
    }

    /// Takes the bytes of a chunk that has come from the device, from its segment.
    fn drain(&self, _chunk: &Chunk, _bytes: &[u8]) -> Result<()> {
        Ok(())
    }
}

/// What a handle gives back when its job is over, and has ended so. Called once.
pub(super) trait Values<B>: Send + Sync {
    /// # Errors
    /// The job's error, with what can be given back nevertheless.
    fn back(&self, outcome: Result<()>) -> Result<B, SubmitError<B>>;
}

/// How a chunk ended.
pub(super) enum End {
    Arrived,
    Failed(Error),
    /// The chunk was let go, since its job had stopped.
    Dropped,
}

impl From<Result<()>> for End {
    fn from(result: Result<()>) -> Self {
        result.map_or_else(Self::Failed, |()| Self::Arrived)
    }
}

/// How far a transfer has come: [`Transfer::progress`](super::Transfer::progress).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Bytes that have arrived.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
    /// All bytes before this offset of what is read or written have arrived. Of slices and blocks
    /// the offset counts the bytes of all of them, in the order of the call.
    pub landed_to: u64,
    /// The time since the transfer was started, until now or until it was over.
    pub elapsed: Duration,
    /// Whether the transfer is over, with or without an error.
    pub over: bool,
}

impl Progress {
    /// Bytes per second, on average.
    #[must_use]
    pub fn rate(&self) -> f64 {
        let seconds = self.elapsed.as_secs_f64();
        if seconds > 0.0 { self.done as f64 / seconds } else { 0.0 }
    }

    /// How long the rest takes at the average rate. `None` before anything has arrived.
    #[must_use]
    pub fn remaining(&self) -> Option<Duration> {
        let left = self.total.saturating_sub(self.done) as f64;
        let rate = self.rate();
        (rate > 0.0).then(|| Duration::try_from_secs_f64(left / rate).unwrap_or(Duration::MAX))
    }
}

/// The offset that a wait for a job's end waits for.
pub(super) const END: u64 = u64::MAX;

/// What is known of a job before it starts.
pub(super) struct Start {
    pub(super) direction: Direction,
    pub(super) priority: Priority,
    /// Bytes of it.
    pub(super) total: u64,
    /// What errors and events call it. `None`: pieces of memory, whose errors have no place.
    pub(super) name: Option<Cow<'static, str>>,
    pub(super) trace: Option<Trace>,
    /// The device memory. Each copy of the job keeps all of it.
    pub(super) memories: Arc<dyn Retain>,
    /// How long it may take.
    pub(super) timeout: Option<Duration>,
    /// How long its chunks are.
    pub(super) ramp: Ramp,
}

pub(super) struct Job {
    pub(super) of: Start,
    pub(super) kind: Kind,
    /// [`Plan::file`].
    pub(super) file: Option<usize>,
    since: Instant,
    plan: Arc<dyn Plan>,
    state: Mutex<JobState>,
}

#[derive(Default)]
struct JobState {
    cursor: Cursor,
    /// Chunks that were taken and have not ended.
    active: usize,
    done: u64,
    /// The first chunk that has not arrived; later ones that have, with their `landed_to`.
    missing: usize,
    early: BTreeMap<usize, u64>,
    landed_to: u64,
    /// Why no further chunk is taken.
    stop: Option<Stop>,
    /// What the timer does at the deadline.
    alarm: Option<Planned>,
    /// Closed before the job counts as over. Taken by the thread that ends the job.
    trace: Option<Trace>,
    ending: bool,
    over: Option<Duration>,
    /// Threads that wait for a change, each under a number of its own.
    threads: Vec<(u64, Thread)>,
    next_thread: u64,
    /// Tasks that wait until the bytes before an offset have arrived. At most one waits for
    /// [`END`]: the task that awaits the handle.
    tasks: Vec<(u64, Task)>,
}

enum Stop {
    /// A chunk failed: the place and the error of the first one.
    Failed(usize, Error),
    /// The deadline has passed, and counts unless all has arrived nevertheless.
    Late(Error),
    Cancelled,
}

impl JobState {
    fn may_take(&self) -> bool {
        self.cursor.left > 0 && self.stop.is_none()
    }

    /// Stops with the error of a chunk, unless one before it has failed.
    fn fail(&mut self, place: usize, error: Error) {
        if !matches!(self.stop, Some(Stop::Failed(known, _)) if known <= place) {
            self.stop = Some(Stop::Failed(place, error));
        }
    }

    /// Whether the bytes before this offset have arrived, or the job is over.
    fn is_at(&self, offset: u64) -> bool {
        self.over.is_some() || offset <= self.landed_to.min(END - 1)
    }
}

/// The error of a transfer whose deadline has passed. `short`: what the pool lacks for a segment.
pub(super) fn late(
    name: &str,
    (done, total): (u64, u64),
    what: &str,
    short: Option<Error>,
    since: Instant,
) -> Error {
    let (done, total) = (Amount(done), Amount(total));
    let transfer = format!("{done} of {total} of {name} had arrived, and the transfer waited for {what}");
    let shortage = match short {
        Some(Error::Exhausted(shortage)) => Some(shortage),
        _ => None,
    };
    Error::Timeout(Waited { transfer: Some(transfer.into()), shortage, ..since.elapsed().into() })
}

impl Job {
    pub(super) fn new(mut of: Start, plan: Arc<dyn Plan>) -> Arc<Self> {
        let (cursor, trace) = (Cursor { left: of.total, ..Cursor::default() }, of.trace.take());
        let state = Mutex::new(JobState { cursor, trace, ..JobState::default() });
        let job =
            Arc::new(Self { of, kind: plan.kind(), file: plan.file(), since: Instant::now(), plan, state });
        job.settle(job.state.lock());
        job
    }

    /// What errors call it.
    pub(super) fn name(&self) -> &str {
        self.of.name.as_deref().unwrap_or("pieces")
    }

    /// What the job reads or writes.
    ///
    /// # Safety
    /// The caller owns a chunk of the job: a lender waits until no chunk is left.
    pub(super) unsafe fn plan(&self) -> &dyn Plan {
        &*self.plan
    }

    /// Whether a chunk can be taken.
    pub(super) fn may_take(&self) -> bool {
        self.state.lock().may_take()
    }

    /// Takes the next chunk, for a worker whose segment has `room` bytes, or that has no segment.
    pub(super) fn take(&self, room: Option<usize>) -> Option<Chunk> {
        let mut state = self.state.lock();
        if !state.may_take() {
            return None;
        }
        let most = self.of.ramp.next(&state.cursor, room);
        // Bytes are left to be taken, so a lender still waits.
        let chunk = self.plan.next(&mut state.cursor, most);
        state.active += 1;
        Some(chunk)
    }

    /// A chunk has ended. Called once for each chunk that was taken.
    pub(super) fn end(&self, chunk: &Chunk, end: End) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.active -= 1;
        match end {
            End::Arrived => {
                state.done += chunk.bytes as u64;
                state.early.insert(chunk.index, chunk.landed_to);
                while let Some(landed_to) = state.early.remove(&state.missing) {
                    state.missing += 1;
                    state.landed_to = landed_to;
                }
            }
            End::Failed(error) => state.fail(chunk.index, self.failed_at(chunk.at, error)),
            End::Dropped => {}
        }
        self.settle(guard);
    }

    /// An error, with what it is about: the first byte of a chunk.
    fn failed_at(&self, offset: u64, error: Error) -> Error {
        match (&self.of.name, error) {
            (None, error)
            | (_, error @ (Error::Transfer { .. } | Error::Read { .. } | Error::Write { .. })) => error,
            (Some(name), error) => error.of_transfer(name, offset),
        }
    }

    /// The job ends with this error, unless a chunk fails.
    pub(super) fn fail(&self, error: Error) {
        self.stop(|state| {
            let (place, at) = (state.cursor.chunks, state.cursor.cut);
            state.fail(place, self.failed_at(at, error));
        });
    }

    /// Stops the job, if it is not over: no further chunk is taken. `why` is kept in the state.
    fn stop(&self, why: impl FnOnce(&mut JobState)) {
        let mut state = self.state.lock();
        if state.over.is_none() {
            why(&mut state);
            self.settle(state);
        }
    }

    /// No further chunk is taken.
    pub(super) fn cancel(&self) {
        self.stop(|state| _ = state.stop.get_or_insert(Stop::Cancelled));
    }

    /// Has the job end at its deadline. `short`: what its pool lacks for a segment.
    pub(super) fn end_in_time(self: &Arc<Self>, short: impl FnOnce() -> Option<Error> + Send + 'static) {
        let deadline = self.of.timeout.and_then(|timeout| self.since.checked_add(timeout));
        let (Some(deadline), job) = (deadline, Arc::downgrade(self)) else { return };
        let alarm = crate::timer::at_time(deadline, move || {
            if let Some(job) = job.upgrade() {
                job.expire(short);
            }
        });
        let mut state = self.state.lock();
        if state.over.is_none() {
            state.alarm = Some(alarm);
            return;
        }
        drop(state);
        crate::timer::cancel(alarm);
    }

    /// The deadline has passed: no further chunk is taken. Chunks under way go on to their end.
    fn expire(&self, short: impl FnOnce() -> Option<Error>) {
        let state = self.state.lock();
        let (done, is_idle) = (state.done, state.active == 0);
        drop(state);
        // The pool's lock is taken, so without this one.
        let (what, short) = match is_idle {
            true => ("a segment of the pool, a thread of the copier, or the transfers before it", short()),
            false => (
                "chunks that are under way, or what is read or written, a call of which has not returned",
                None,
            ),
        };
        let error = late(self.name(), (done, self.of.total), what, short, self.since);
        self.stop(|state| _ = state.stop.get_or_insert(Stop::Late(error)));
    }

    /// Tells all that wait of a change, and ends the job if nothing is or will be under way.
    fn settle<'a>(&'a self, mut state: MutexGuard<'a, JobState>) {
        if state.active == 0 && !state.may_take() && !state.ending {
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
        }
        let alarm = state.over.and_then(|_| state.alarm.take());
        let threads = std::mem::take(&mut state.threads);
        let tasks = std::mem::take(&mut state.tasks);
        let (due, wait): (Vec<_>, _) = tasks.into_iter().partition(|(offset, _)| state.is_at(*offset));
        state.tasks = wait;
        drop(state);
        alarm.into_iter().for_each(crate::timer::cancel);
        threads.iter().for_each(|(_, thread)| thread.unpark());
        due.into_iter().for_each(|(_, task)| task.wake());
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.state.lock().stop.is_some()
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_at(END)
    }

    /// Whether the bytes before this offset have arrived, or the job is over.
    pub(super) fn is_at(&self, offset: u64) -> bool {
        self.state.lock().is_at(offset)
    }

    /// How it ended, if it is over.
    pub(super) fn outcome(&self) -> Option<Result<()>> {
        let state = self.state.lock();
        state.over.map(|_| self.how(&state))
    }

    fn how(&self, state: &JobState) -> Result<()> {
        let is_short = state.done < self.of.total;
        match &state.stop {
            Some(Stop::Failed(_, error)) => Err(error.clone()),
            Some(Stop::Late(error)) if is_short => Err(error.clone()),
            _ if is_short => {
                Err(Error::Cancelled { what: self.name().into(), done: state.done, total: self.of.total })
            }
            _ => Ok(()),
        }
    }

    pub(super) fn progress(&self) -> Progress {
        let state = self.state.lock();
        let elapsed = state.over.unwrap_or_else(|| self.since.elapsed());
        let (total, landed_to, over) = (self.of.total, state.landed_to, state.over.is_some());
        Progress { done: state.done, total, landed_to, elapsed, over }
    }

    /// Parks this thread until the bytes before `offset` have arrived, the job is over or the
    /// deadline has passed. `false`: the deadline came first.
    pub(super) fn wait(&self, deadline: Option<Instant>, offset: u64) -> bool {
        let mut state = self.state.lock();
        state.next_thread += 1;
        let number = state.next_thread;
        loop {
            let there = state.is_at(offset);
            if there || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return there;
            }
            // Under the lock of the look: what changes later unparks this thread.
            state.threads.push((number, thread::current()));
            drop(state);
            thread::park_until(deadline);
            state = self.state.lock();
            state.threads.retain(|(other, _)| *other != number);
        }
    }

    /// Whether the bytes before `offset` arrived or the job is over; else wakes the task then.
    pub(super) fn poll(&self, waker: &Waker, offset: u64) -> bool {
        // Before the lock: cloning a waker is foreign code, and so is dropping one.
        let mut task = Some(Task::of(waker));
        let mut state = self.state.lock();
        let there = state.is_at(offset);
        if !there {
            let is_same = |(other, waits): &&mut (u64, Task)| {
                *other == offset && (offset == END || task.as_ref().is_some_and(|task| waits.will_wake(task)))
            };
            match state.tasks.iter_mut().find(is_same) {
                Some((_, waits)) => task = task.map(|task| std::mem::replace(waits, task)),
                None => state.tasks.extend(task.take().map(|task| (offset, task))),
            }
        }
        drop(state);
        drop(task);
        there
    }

    pub(super) fn forget_tasks(&self) {
        let _old = std::mem::take(&mut self.state.lock().tasks);
    }
}
