//! An upload whose bytes the caller brings, in order: the caller's thread, or task, fills the segments.
//!
//! A full segment is a chunk of the job, which a worker then sends. A feed has at most [`MOST`] segments, filled or under
//! way. The first does not count against the copier's share, and is waited for in the pool's queue as any request is;
//! for another one the feed waits until a chunk of its own has ended.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::io::{self, Read, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use super::engine::Engine;
use super::job::{Chunk, Cursor, Cut, Job, Needs, Progress, Work};
use super::layout::Stretch;
use super::packing::{Brought, Content, Packing};
use super::pieces::finish;
use super::source::read_error;
use super::transfer::Transfer;
use super::{Copier, may_wait};
use crate::buffer::PinnedBuf;
use crate::device::DevicePtr;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result, SubmitError};
use crate::locks::Mutex;
use crate::pool::Checkout;

/// Segments of a feed at most.
const MOST: usize = 3;

/// An upload whose bytes the caller brings, in order: from a socket, a decoder, an async stream.
///
/// ```
/// # use pinpool::{Copier, Device, Pool, Unpinned};
/// # async fn receive() -> Option<Vec<u8>> { None }
/// # async fn example(copier: &Copier, memory: &pinpool::DeviceBuffer) -> pinpool::Result<()> {
/// let mut feed = copier.feed(memory)?;
/// while let Some(bytes) = receive().await {
///     feed.push(&bytes).await?; // waits for a segment when all are under way
/// }
/// let total = feed.finish().await?; // all of it is on the device
/// # let _ = total; Ok(())
/// # }
/// ```
///
/// Dropped without [`finish`](Self::finish) it is cancelled: bytes that were not pushed cannot arrive. As an
/// [`io::Write`] it blocks, and so do the calls named so.
pub struct Feed {
    copier: Copier,
    job: Arc<Job>,
    work: Arc<Fed>,
    /// The segment that is being filled.
    current: Option<Segment>,
    /// The place in the pool's queue of a task that waits for its first segment.
    place: Option<Checkout>,
    /// Bytes that were pushed, and of these those in chunks that were sent; chunks that were sent.
    pushed: u64,
    sent: u64,
    chunks: usize,
    /// Nothing is to be cancelled.
    ended: bool,
}

/// A segment, which counts against the copier's share or not.
struct Segment {
    buf: PinnedBuf,
    counts: bool,
}

/// What the workers see of a feed.
pub(super) struct Fed {
    memory: DeviceSlice,
    /// Bytes of a chunk at most.
    chunk: usize,
    /// Segments that were sent, by the indices of their chunks, until a worker takes them.
    ready: Mutex<BTreeMap<usize, Segment>>,
}

impl Fed {
    pub(super) fn new(engine: &Engine, memory: DeviceSlice) -> Arc<Self> {
        let chunk = engine.settings.chunk.min(memory.len());
        Arc::new(Self { memory, chunk, ready: Mutex::default() })
    }
}

impl Work for Fed {
    fn needs(&self, _: &Cursor) -> Needs {
        Needs::Nothing
    }

    fn cut(&self, cursor: &mut Cursor, _: Option<usize>) -> Chunk {
        let from = cursor.at.from;
        let sent = self.ready.lock().get(&cursor.chunks).map(|segment| segment.buf.len());
        // One that was sent is there until its chunk is prepared.
        let bytes = sent.unwrap_or(usize::try_from(cursor.left).unwrap_or(usize::MAX));
        finish(cursor, Cut { piece: 0, from: from + bytes }, bytes, Some(usize::MAX))
    }

    fn prepare(&self, chunk: &Chunk, _: &mut Packing<'_>, _: &Job) -> Result<Content> {
        let ready = self.ready.lock().remove(&chunk.index);
        let Some(Segment { buf: segment, counts }) = ready else { return Err(Error::Closed) };
        let place = DevicePtr(self.memory.address() + chunk.start.from as u64);
        let stretches = vec![Stretch { place, offset: 0, len: chunk.bytes }];
        Ok(Content::Brought(Brought { segment, stretches, counts, pushes: 0, memories: None }))
    }
}

impl Feed {
    pub(super) fn new(copier: Copier, job: Arc<Job>, work: Arc<Fed>) -> Self {
        let (current, place) = (None, None);
        Self { copier, job, work, current, place, pushed: 0, sent: 0, chunks: 0, ended: false }
    }

    fn engine(&self) -> &Arc<Engine> {
        self.copier.engine()
    }

    /// For calls that return when nothing of it is on its way any more.
    pub(super) fn settled(&self) -> Settled {
        Settled { copier: self.copier.clone(), job: self.job.clone() }
    }

    /// How far it has come. The total is what the device memory has room for, until the feed is finished.
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
            poll_fn(|cx| self.poll_segment(cx)).await?;
            bytes = &bytes[self.put(bytes)?..];
        }
        Ok(())
    }

    /// The same, blocking the thread.
    ///
    /// # Errors
    /// As for [`push`](Self::push); [`Error::Unsupported`] on a thread of the crate, which must not wait.
    pub fn push_blocking(&mut self, mut bytes: &[u8]) -> Result<()> {
        crate::os::check_fork()?;
        self.check_room(bytes.len())?;
        while !bytes.is_empty() {
            self.wait_segment()?;
            bytes = &bytes[self.put(bytes)?..];
        }
        Ok(())
    }

    /// Sends what is left, waits until all bytes are on the device, and returns their number. Dropped before it is
    /// ready, the future cancels the feed.
    ///
    /// # Errors
    /// What the transfer failed with.
    pub async fn finish(mut self) -> Result<u64> {
        crate::os::check_fork()?;
        self.last()?;
        let outcome = self.transfer().await;
        self.over(outcome)
    }

    /// The same, blocking the thread.
    ///
    /// # Errors
    /// What the transfer failed with; [`Error::Unsupported`] on a thread of the crate, which must not wait.
    pub fn finish_blocking(mut self) -> Result<u64> {
        crate::os::check_fork()?;
        may_wait()?;
        self.last()?;
        let outcome = self.transfer().wait();
        self.over(outcome)
    }

    /// All of it, for a wait.
    fn transfer(&self) -> Transfer {
        Transfer::new(self.copier.clone(), self.job.clone(), Arc::new(()))
    }

    fn over(&mut self, outcome: Result<(), SubmitError<()>>) -> Result<u64> {
        self.ended = true;
        self.let_go();
        outcome.map_err(|refused| refused.error).map(|()| self.pushed)
    }

    fn room(&self) -> u64 {
        self.work.memory.len() as u64 - self.pushed
    }

    fn check_room(&self, more: usize) -> Result<()> {
        Error::unless_fits(more, usize::try_from(self.room()).unwrap_or(usize::MAX))
    }

    // --- segments ----------------------------------------------------------------------------------------------------

    /// Chunks that were sent and have not ended.
    fn under_way(&self) -> usize {
        self.chunks - self.job.ended()
    }

    /// A segment beside those that are under way, if there is one now.
    fn try_more(&self) -> Result<Option<Segment>> {
        if self.under_way() >= MOST {
            return Ok(None);
        }
        let more = self.engine().segments.take_more(self.job.priority)?;
        Ok(more.map(|buf| Segment { buf, counts: true }))
    }

    /// Sees to it that there is a segment to fill.
    fn wait_segment(&mut self) -> Result<()> {
        while self.current.is_none() {
            may_wait()?;
            if self.job.is_stopped() {
                return Err(self.job.stopped_with());
            }
            let ended = self.job.ended();
            self.current = if self.chunks == ended {
                let buf = self.engine().segments.wait(self.job.deadline).map_err(|error| self.late(error))?;
                Some(Segment { buf, counts: false })
            } else {
                self.try_more()?
            };
            if self.current.is_none() {
                self.engine().wait(&self.job, None, |job| job.ended() > ended || job.is_stopped());
            }
        }
        Ok(())
    }

    /// The error of a wait for a segment, whose deadline is the job's.
    fn late(&self, error: Error) -> Error {
        if !matches!(error, Error::Timeout(_)) {
            return error;
        }
        self.job.expire(|| Some(self.engine().segments.shortage()));
        self.job.stopped_with()
    }

    /// The same for a task.
    fn poll_segment(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        crate::os::check_fork()?;
        let mut key = None;
        while self.current.is_none() {
            if self.job.is_stopped() {
                return Poll::Ready(Err(self.job.stopped_with()));
            }
            let ended = self.job.ended();
            if self.chunks == ended {
                let segments = &self.copier.engine().segments;
                let any = if self.place.is_none() { segments.try_any()? } else { None };
                let buf = match any {
                    Some(buf) => buf,
                    None => {
                        let timeout = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
                        let place = self.place.get_or_insert_with(|| match self.job.deadline {
                            Some(deadline) => segments.ask_pool().timeout(timeout(deadline)),
                            None => segments.ask_pool(),
                        });
                        let short = ready!(Pin::new(place).poll(cx));
                        self.place = None;
                        segments.or_longer(short.map_err(|error| self.late(error))?)?
                    }
                };
                self.current = Some(Segment { buf, counts: false });
                break;
            }
            // The waker first: a chunk that ends after the look wakes the task.
            self.job.wake_later(&mut key, cx.waker());
            self.current = self.try_more()?;
            if self.current.is_none() && self.job.ended() == ended && !self.job.is_stopped() {
                return Poll::Pending;
            }
            self.job.forget_waker(&mut key);
        }
        Poll::Ready(Ok(()))
    }

    /// Bytes of the chunk that is being filled.
    fn chunk(&self) -> usize {
        let left = self.work.memory.len() as u64 - self.sent;
        let room = |segment: &Segment| self.engine().segments.room(&segment.buf);
        let room = self.current.as_ref().map_or(usize::MAX, room);
        self.work.chunk.min(room).min(usize::try_from(left).unwrap_or(usize::MAX))
    }

    /// Puts bytes into the segment, and sends it when it is full. How many were taken.
    fn put(&mut self, bytes: &[u8]) -> Result<usize> {
        let chunk = self.chunk();
        let Some(Segment { buf, .. }) = &mut self.current else { return Ok(0) };
        let taken = bytes.len().min(chunk - buf.len());
        buf.try_extend_from_slice(&bytes[..taken])?;
        self.taken(taken)?;
        Ok(taken)
    }

    fn taken(&mut self, n: usize) -> Result<()> {
        self.pushed += n as u64;
        let chunk = self.chunk();
        if self.current.as_ref().is_some_and(|segment| segment.buf.len() == chunk) {
            self.send()
        } else {
            Ok(())
        }
    }

    fn send(&mut self) -> Result<()> {
        let Some(segment) = self.current.take() else { return Ok(()) };
        let len = segment.buf.len();
        self.work.ready.lock().insert(self.chunks, segment);
        if !self.job.feed(len) {
            return Err(self.job.stopped_with());
        }
        self.chunks += 1;
        self.sent += len as u64;
        self.engine().start(&self.job, len as u64).inspect_err(|error| self.job.fail(error.clone()))
    }

    /// Sends what there is of the last chunk, and says that nothing follows.
    fn last(&mut self) -> Result<()> {
        match &self.current {
            Some(segment) if !segment.buf.is_empty() => self.send()?,
            _ => self.let_go(),
        }
        self.job.close();
        Ok(())
    }

    /// Gives the segments back that no worker has.
    fn let_go(&mut self) {
        let mut segments: Vec<Segment> = self.current.take().into_iter().collect();
        if self.job.is_stopped() {
            segments.extend(std::mem::take(&mut *self.work.ready.lock()).into_values());
        }
        for Segment { buf, counts } in segments {
            drop(buf);
            if counts {
                self.engine().segments.gone();
            }
        }
    }

    /// Reads until the reader ends, or the memory is full.
    pub(super) fn read_from(&mut self, reader: &mut impl Read, name: &str) -> Result<()> {
        while self.room() > 0 {
            self.wait_segment()?;
            let (pushed, len) = (self.pushed, self.chunk());
            let Some(Segment { buf, .. }) = &mut self.current else { return Ok(()) };
            let before = buf.len();
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
            self.taken(have - before)?;
            if ended? {
                break;
            }
        }
        Ok(())
    }
}

/// Waits until the feed is over that has been dropped before, when the reader failed or panicked: what is in flight
/// would arrive in memory that its owner uses again.
pub(super) struct Settled {
    copier: Copier,
    job: Arc<Job>,
}

impl Drop for Settled {
    fn drop(&mut self) {
        if !crate::os::forked() {
            self.copier.engine().wait(&self.job, None, Job::is_over);
        }
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        if crate::os::forked() {
            std::mem::forget((self.current.take(), self.place.take()));
            return;
        }
        if self.ended {
            return;
        }
        self.job.cancel();
        self.let_go();
        self.job.close();
    }
}

/// Blocks while all segments are under way. `Ok(0)` when the device memory is full.
impl Write for Feed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let have = usize::try_from(self.room()).unwrap_or(usize::MAX);
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
