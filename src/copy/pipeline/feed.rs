//! What can only be read, or written, in order: the caller's own thread, or task, fills and drains the segments, while
//! those before are on the wire.

use std::future::poll_fn;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::task::Poll;

use crate::locks::MutexGuard;

use super::Handle;
use super::engine::{Engine, PATIENCE, State, may_wait};
use super::job::{Direction, End, Job, Landed, Progress};
use super::plan::{Chunk, Parts};
use super::segments::Got;
use super::source::Fill;
use super::wire::{Load, Ready};
use super::workers::{read_error, write_error};
use crate::buffer::PinnedBuf;
use crate::error::{Error, Result};
use crate::foreign::Task;

/// An upload whose bytes the caller brings, in order: from a socket, a decoder, an async stream.
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned};
/// # use pinpool::pipeline::Pipeline;
/// # async fn receive() -> Option<Vec<u8>> { None }
/// # async fn example(pipeline: &Pipeline, memory: &pinpool::DeviceBuffer) -> pinpool::Result<()> {
/// let mut feed = pipeline.feed(memory)?;
/// while let Some(bytes) = receive().await {
///     feed.push(&bytes).await?; // waits for a segment when all are under way
/// }
/// let total = feed.finish().await?; // all of it is on the device
/// # let _ = total; Ok(())
/// # }
/// ```
///
/// Dropped without [`finish`](Self::finish) it is cancelled. As an [`io::Write`] it blocks, and so do the calls named
/// so.
pub struct Feed {
    handle: Arc<Handle>,
    job: Arc<Job>,
    current: Option<Filling>,
    pushed: u64,
    /// Nothing is to be cancelled.
    ended: bool,
}

/// A chunk that is being filled.
struct Filling {
    index: usize,
    chunk: Chunk,
    buf: PinnedBuf,
}

impl Feed {
    pub(super) fn new(handle: Arc<Handle>, job: Arc<Job>) -> Self {
        Self { handle, job, current: None, pushed: 0, ended: false }
    }

    /// For calls that return when nothing of it is on its way any more.
    pub(super) fn settled(&self) -> Settled {
        Settled { job: self.job.clone() }
    }

    /// How far it has come. The total is what the device memory has room for.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.job.progress()
    }

    /// Bytes that were pushed.
    #[must_use]
    pub fn pushed(&self) -> u64 {
        self.pushed
    }

    /// Appends bytes. Waits, without blocking the thread, for a segment when all are under way.
    ///
    /// Dropping the future before it is ready may leave a part of the bytes appended: drop the feed then too.
    ///
    /// # Errors
    /// [`Error::TooSmall`] where the device memory is full; what the transfer failed with.
    pub async fn push(&mut self, mut bytes: &[u8]) -> Result<()> {
        crate::os::check_fork()?;
        self.check_room(bytes.len())?;
        while !bytes.is_empty() {
            if self.current.is_none() {
                let buf = self.segment().await?;
                self.begin(buf)?;
            }
            bytes = &bytes[self.put(bytes)?..];
        }
        Ok(())
    }

    /// The same, blocking the thread.
    ///
    /// # Errors
    /// As for [`push`](Self::push).
    pub fn push_blocking(&mut self, mut bytes: &[u8]) -> Result<()> {
        crate::os::check_fork()?;
        self.check_room(bytes.len())?;
        while !bytes.is_empty() {
            self.ready()?;
            bytes = &bytes[self.put(bytes)?..];
        }
        Ok(())
    }

    /// Sends what is left, waits until all bytes are on the device, and returns their number.
    ///
    /// # Errors
    /// What the transfer failed with.
    pub async fn finish(mut self) -> Result<u64> {
        crate::os::check_fork()?;
        self.last()?;
        let mut key = None;
        let job = self.job.clone();
        let outcome = poll_fn(|cx| job.wake_later(&mut key, cx.waker()).map_or(Poll::Pending, Poll::Ready));
        let outcome = outcome.await;
        self.ended = true;
        outcome.map(|()| self.pushed)
    }

    /// The same, blocking the thread.
    ///
    /// # Errors
    /// What the transfer failed with.
    pub fn finish_blocking(mut self) -> Result<u64> {
        crate::os::check_fork()?;
        may_wait()?;
        self.last()?;
        self.job.wait_over(None);
        self.ended = true;
        self.job.outcome().unwrap_or(Ok(())).map(|()| self.pushed)
    }

    fn check_room(&self, more: usize) -> Result<()> {
        let have = self.job.plan.wanted() - self.pushed;
        if more as u64 <= have {
            return Ok(());
        }
        Err(Error::TooSmall { need: more, have: usize::try_from(have).unwrap_or(usize::MAX) })
    }

    /// Sees to it that there is a chunk to fill.
    fn ready(&mut self) -> Result<()> {
        if self.current.is_some() {
            return Ok(());
        }
        let buf = self.handle.engine.wait_for_segment(&self.job)?;
        self.begin(buf)
    }

    async fn segment(&self) -> Result<PinnedBuf> {
        let engine = &self.handle.engine;
        let tried = poll_fn(|cx| {
            if let Err(error) = crate::os::check_fork() {
                return Poll::Ready(Err(error));
            }
            // Before the lock: to clone a waker is foreign code.
            let task = (self.job.id, Task::of(cx.waker()));
            let mut state = engine.state.lock();
            if let Some(tried) = engine.try_for_segment(&mut state, &self.job) {
                drop(state);
                return Poll::Ready(tried);
            }
            // Woken, all of them, when a segment comes back or a transfer is over.
            let known = state.wakers.iter_mut().find(|known| known.0 == self.job.id);
            let old = match known {
                Some(known) => Some(std::mem::replace(known, task)),
                None => {
                    state.wakers.push(task);
                    None
                }
            };
            drop(state);
            drop(old);
            Poll::Pending
        });
        if let Some(buf) = tried.await? {
            return Ok(buf);
        }
        // We have none, and the pool has none: in its queue, like anybody.
        let seat = Seat { engine, taken: true };
        let buf = engine.pool.checkout_async(engine.request()).await?;
        seat.keep();
        Ok(buf)
    }

    fn begin(&mut self, buf: PinnedBuf) -> Result<()> {
        let engine = &self.handle.engine;
        let Some((index, _)) = self.job.begin(1) else {
            engine.give_back(&mut engine.state.lock(), Direction::Up, Some(buf));
            return Err(self.job.stopped_with());
        };
        match self.job.plan.chunk(index) {
            Ok(chunk) => {
                self.current = Some(Filling { index, chunk, buf });
                Ok(())
            }
            Err(error) => {
                let mut state = engine.state.lock();
                engine.give_back(&mut state, Direction::Up, Some(buf));
                engine.end(&mut state, &self.job, index, Err(error.clone()));
                Err(error)
            }
        }
    }

    /// Puts bytes into the chunk being filled, and sends it when it is full. How many were taken.
    fn put(&mut self, bytes: &[u8]) -> Result<usize> {
        let stores = self.handle.engine.settings.fills;
        let Some(Filling { chunk, buf, .. }) = &mut self.current else { return Ok(0) };
        let left = chunk.len - buf.len();
        let taken = Fill::new(buf, left, stores).push(bytes);
        self.taken(taken);
        Ok(taken)
    }

    fn taken(&mut self, n: usize) {
        self.pushed += n as u64;
        if self.current.as_ref().is_some_and(|f| f.buf.len() == f.chunk.len) {
            self.send();
        }
    }

    fn send(&mut self) {
        let Some(Filling { index, chunk, buf }) = self.current.take() else { return };
        let engine = &self.handle.engine;
        let job = self.job.clone();
        engine.submit(
            &mut engine.state.lock(),
            Ready { job, index, chunk, load: Load::Segment(buf, 0), by: 0, at_once: false },
        );
    }

    /// Sends what there is of the last chunk, and says that nothing follows.
    fn last(&mut self) -> Result<()> {
        match &mut self.current {
            // The bytes have ended where the chunk before did.
            Some(Filling { buf, .. }) if buf.is_empty() => {
                if let Some(Filling { index, buf, .. }) = self.current.take() {
                    let engine = &self.handle.engine;
                    engine.give_back(&mut engine.state.lock(), Direction::Up, Some(buf));
                    self.job.retract(index);
                }
            }
            Some(Filling { chunk, buf, .. }) => {
                if let Parts::Whole(to) = &chunk.parts {
                    chunk.parts = Parts::Whole(to.slice(..buf.len())?);
                    chunk.len = buf.len();
                    self.send();
                } else {
                    // Not so: a feed has one piece, and each of its chunks one part.
                    self.abandon();
                }
            }
            None => {}
        }
        self.handle.engine.close_job(&self.job);
        Ok(())
    }

    /// Gives the chunk being filled back.
    fn abandon(&mut self) {
        let Some(Filling { index, buf, .. }) = self.current.take() else { return };
        let engine = &self.handle.engine;
        let mut state = engine.state.lock();
        engine.give_back(&mut state, Direction::Up, Some(buf));
        engine.end(&mut state, &self.job, index, End::Dropped);
    }

    /// Reads until the reader ends, or the memory is full.
    pub(super) fn read_from(&mut self, reader: &mut impl Read, name: &str) -> Result<()> {
        while self.pushed < self.job.plan.wanted() {
            self.ready()?;
            let pushed = self.pushed;
            let Some(Filling { chunk, buf, .. }) = &mut self.current else { return Ok(()) };
            let (before, len) = (buf.len(), chunk.len);
            // Readers take initialised memory only: once for each chunk, however little they read at a time.
            buf.try_resize(len, 0)?;
            let mut have = before;
            let ended = loop {
                match reader.read(&mut buf[have..]) {
                    Ok(0) => break Ok(true),
                    Ok(n) => have += n.min(len - have),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => break Err(read_error(name, pushed + (have - before) as u64, &error)),
                }
                if have == len {
                    break Ok(false);
                }
            };
            buf.truncate(have);
            self.taken(have - before);
            if ended? {
                break;
            }
        }
        Ok(())
    }
}

/// Waits until the feed is over that has been dropped before, when the reader failed or panicked: what is on the wire
/// would land in memory that its owner uses again.
pub(super) struct Settled {
    job: Arc<Job>,
}

impl Drop for Settled {
    fn drop(&mut self) {
        self.job.wait_over(None);
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        if crate::os::forked() || self.ended {
            return;
        }
        self.handle.engine.cancel(&self.job);
        self.abandon();
        self.handle.engine.close_job(&self.job);
    }
}

/// Blocks while all segments are under way. `Ok(0)` when the device memory is full.
impl Write for Feed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let have = usize::try_from(self.job.plan.wanted() - self.pushed).unwrap_or(usize::MAX);
        let n = bytes.len().min(have);
        self.push_blocking(&bytes[..n])?;
        Ok(n)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl std::fmt::Debug for Feed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Feed").field("pushed", &self.pushed).finish_non_exhaustive()
    }
}

/// A segment that is counted and not there yet.
struct Seat<'a> {
    engine: &'a Engine,
    taken: bool,
}

impl Seat<'_> {
    fn keep(mut self) {
        self.taken = false;
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        if self.taken && !crate::os::forked() {
            self.engine.give_back(&mut self.engine.state.lock(), Direction::Up, None);
        }
    }
}

impl Engine {
    /// A segment for a feed, for which its thread waits.
    fn wait_for_segment(&self, job: &Arc<Job>) -> Result<PinnedBuf> {
        may_wait()?;
        let mut state = self.state.lock();
        loop {
            if job.stopped() {
                return Err(job.stopped_with());
            }
            let events = state.share.events;
            if state.may_begin(job.id) {
                match self.acquire(&mut state, Direction::Up, job, true) {
                    Got::Segment(buf) => return Ok(buf),
                    Got::Failed(error) => return Err(error),
                    Got::NotNow => {}
                }
            }
            if state.share.events != events {
                continue;
            }
            if !state.share.lies_down(true) {
                self.room.wait(&mut state);
            } else if self.room.wait_for(&mut state, PATIENCE).timed_out() {
                self.look_again(&mut state);
            }
        }
    }

    /// The same for a task. `None`: not now. `Some(Ok(None))`: one is counted, and to be had from the pool.
    fn try_for_segment(
        &self,
        state: &mut MutexGuard<'_, State>,
        job: &Arc<Job>,
    ) -> Option<Result<Option<PinnedBuf>>> {
        loop {
            if job.stopped() {
                return Some(Err(job.stopped_with()));
            }
            let events = state.share.events;
            if state.may_begin(job.id) {
                match self.acquire(state, Direction::Up, job, false) {
                    Got::Segment(buf) => return Some(Ok(Some(buf))),
                    Got::Failed(error) => return Some(Err(error)),
                    Got::NotNow if state.take_seat(Direction::Up) => return Some(Ok(None)),
                    Got::NotNow => {}
                }
            }
            if state.share.events == events {
                return None;
            }
        }
    }
}

/// A download that the caller drains, in order.
pub(super) struct Pull {
    handle: Arc<Handle>,
    job: Arc<Job>,
}

impl Pull {
    pub(super) fn new(handle: Arc<Handle>, job: Arc<Job>) -> Self {
        Self { handle, job }
    }

    pub(super) fn write_to(self, writer: &mut impl Write, name: &str) -> Result<u64> {
        let engine = &self.handle.engine;
        let mut written = 0;
        for index in 0..self.job.plan.count() {
            let Some(landed) = self.job.take_landed(index) else { break };
            let mut hand = Hand { pull: &self, landed: Some(landed), end: Some(End::Dropped) };
            let Some(landed) = &hand.landed else { break };
            let len = landed.buf.len() as u64;
            let put = writer.write_all(&landed.buf).map_err(|error| write_error(name, written, &error));
            let failed = put.is_err();
            hand.end = Some(put.map(|()| len).into());
            drop(hand);
            crate::os::check_fork()?;
            engine.pump(&mut engine.state.lock(), Direction::Down);
            if failed {
                break;
            }
            written += len;
        }
        engine.close_job(&self.job);
        self.job.wait_over(None);
        self.job.outcome().unwrap_or(Ok(())).map(|()| written)
    }
}

/// A chunk in the caller's hands: given back when it is written, and when the writer panics.
struct Hand<'a> {
    pull: &'a Pull,
    landed: Option<Landed>,
    end: Option<End>,
}

impl Drop for Hand<'_> {
    fn drop(&mut self) {
        let (Some(Landed { index, buf }), Some(end)) = (self.landed.take(), self.end.take()) else { return };
        if crate::os::forked() {
            return;
        }
        let engine = &self.pull.handle.engine;
        let mut state = engine.state.lock();
        engine.give_back(&mut state, Direction::Down, Some(buf));
        engine.end(&mut state, &self.pull.job, index, end);
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        self.handle.engine.cancel(&self.job);
        self.handle.engine.close_job(&self.job);
    }
}
