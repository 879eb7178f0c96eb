//! A lone piece: where the copier has nothing to do, a short one goes at once, by a call of the driver on the calling
//! thread. A chunk would take several times as long: a thread has to wake for it, and another one for its end.
//!
//! The piece is copied to a buffer of its own length, which is sent on one of the copier's streams, as by
//! [`Stream::upload`](crate::Stream::upload). One piece at a time goes this way, so that pieces that come together are
//! combined into chunks.
//!
//! Borrowed bytes are waited for. The handle of a push is that of a job, as for any push; but no worker owns the job's only
//! chunk. The thread that sees the copy complete ends it: the device's reaper, or the thread that waits for the handle, or
//! looks at it, which asks by itself.
//!
//! In a burst of pushes the copier has nothing to do now and then, and a call of the driver would cost the pushing thread
//! more than a place in a chunk. So the copier must have had no chunk for a while ([`QUIET`]).

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use super::Copier;
use super::engine::Engine;
use super::job::{Body, Chunk, Cursor, Cut, Direction, End, Job, Needs, Plan, Work};
use super::packing::{Content, Packing};
use super::pieces::{Survey, finish};
use super::stats::Counters;
use super::transfer::Transfer;
use crate::buffer::PinnedBuf;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result, SubmitError};
use crate::locks::Mutex;
use crate::pool::Request;
use crate::stream::timeline::Ticket;

/// For how long the copier has had no chunk before a piece goes alone.
const QUIET: Duration = Duration::from_micros(100);
/// Bytes of a lone piece at most. With longer ones the way makes less of a difference.
const LONGEST: usize = 64 << 10;

/// The right to send a lone piece, which one piece has at a time. Its drop gives the right back.
struct Turn(Weak<Engine>);

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(engine) = self.0.upgrade() {
            // Relaxed, as in `turn`: the flag guards no memory.
            engine.lone.store(false, Ordering::Relaxed);
        }
    }
}

/// A push that is on its way alone. The timeline has it, as a waker, until the copy has ended.
struct Lone {
    ticket: Ticket,
    job: Arc<Job>,
    /// The job's chunk, until it has ended.
    chunk: Mutex<Option<(Chunk, Turn)>>,
}

impl Lone {
    /// Ends the job if the copy is complete, or never will be; else leaves a waker.
    fn look(self: &Arc<Self>) {
        let Ticket { timeline, seq } = &self.ticket;
        let said = match timeline.leave_waker(*seq, &Waker::from(self.clone())) {
            Ok(false) => return,
            other => other.map(drop),
        };
        let ended = self.chunk.lock().take();
        if let Some((chunk, turn)) = ended {
            // First: the thread that hears of the end may have the next lone piece.
            drop(turn);
            self.job.end(&chunk, said.into());
        }
    }
}

impl Wake for Lone {
    fn wake(self: Arc<Self>) {
        self.look();
    }
}

/// The work of a push that goes alone: one chunk, which its caller takes and sends.
struct Alone;

impl Work for Alone {
    fn needs(&self, _: &Cursor) -> Needs {
        Needs::Nothing
    }

    fn cut(&self, cursor: &mut Cursor, _: bool) -> Chunk {
        let bytes = cursor.left as usize;
        finish(cursor, Cut { piece: 1, from: 0 }, bytes, None)
    }

    fn prepare(&self, _: &Chunk, _: &mut Packing<'_>, _: &Job) -> Result<Content> {
        Err(Error::Internal("a lone piece is sent by its caller"))
    }
}

impl Copier {
    /// The right to send a lone piece of so many bytes, and a buffer for it: if the copier has nothing to do, and the
    /// pool has a buffer.
    fn turn(&self, bytes: usize) -> Option<(Turn, PinnedBuf)> {
        let engine = self.engine();
        let may = (1..=LONGEST).contains(&bytes) && engine.settings.threads > 0 && engine.is_idle(QUIET);
        // Relaxed: the flag guards no memory.
        if !may || engine.lone.swap(true, Ordering::Relaxed) {
            return None;
        }
        let turn = Turn(Arc::downgrade(engine));
        let buf = engine.segments.pool.try_checkout(Request::new(bytes).near(self.device())).ok()?;
        engine.permits.may_go(self.priority, bytes).then_some((turn, buf))
    }

    /// Makes a copy of a lone piece that the caller waits for.
    fn alone(
        &self,
        direction: Direction,
        bytes: usize,
        name: &'static str,
        copy: impl FnOnce(PinnedBuf) -> Result<()>,
    ) -> Option<Result<()>> {
        let (_turn, buf) = self.turn(bytes)?;
        let (trace, since) = (self.trace(direction, bytes as u64, name), Instant::now());
        let said = copy(buf);
        self.count_alone(bytes);
        trace.end(&said, if said.is_ok() { bytes as u64 } else { 0 }, since.elapsed());
        Some(said.map_err(|cause| Error::Transfer { what: name.into(), offset: 0, cause: Box::new(cause) }))
    }

    fn count_alone(&self, bytes: usize) {
        let counters = &self.engine().counters;
        Counters::add(&counters.chunks, 1);
        Counters::add(&counters.batch, bytes);
    }

    /// Uploads borrowed bytes and waits for them, if they go alone.
    pub(super) fn upload_alone(
        &self,
        bytes: &[u8],
        dst: &DeviceSlice,
        name: &'static str,
    ) -> Option<Result<()>> {
        self.alone(Direction::Up, bytes.len(), name, |mut buf| {
            buf.try_extend_from_slice(bytes)?;
            self.engine().stream(Direction::Up, self.priority).upload(buf, dst)?.wait().map(drop)
        })
    }

    /// Downloads to the front of borrowed memory, and waits for it, if the bytes go alone.
    pub(super) fn download_alone(
        &self,
        src: &DeviceSlice,
        dst: &mut [u8],
        name: &'static str,
    ) -> Option<Result<()>> {
        self.alone(Direction::Down, src.len(), name, |buf| {
            let came = self.engine().stream(Direction::Down, self.priority).download(src, buf)?.wait()?;
            dst[..came.len()].copy_from_slice(&came);
            Ok(())
        })
    }

    /// Sends a push, if it goes alone.
    pub(super) fn push_alone(&self, bytes: &[u8], memory: &DeviceSlice) -> Option<Result<Transfer>> {
        let (turn, mut buf) = self.turn(bytes.len())?;
        let stream = self.engine().stream(Direction::Up, self.priority);
        let sent = match buf.try_extend_from_slice(bytes) {
            Ok(()) => stream.upload(buf, memory),
            Err(error) => return Some(Err(error)),
        };
        // With its handle gone the buffer goes back to the pool by itself.
        let sent = match sent {
            Ok(flight) => flight.ticket().ok_or(Error::Internal("a copy on one stream has no ticket")),
            // Refused before the driver was asked.
            Err(SubmitError { error, buffer: Some(_) }) => return Some(Err(error)),
            Err(SubmitError { error, buffer: None }) => Err(error),
        };
        self.count_alone(bytes.len());
        Counters::add(&self.engine().counters.pushes, 1);
        let plan = Plan { total: bytes.len() as u64, ..self.plan(Direction::Up, Survey::default(), None) };
        let job = self.job(plan, Body::Owned(Arc::new(Alone)));
        let chunk = job.take(false, Needs::Nothing)?;
        job.prepared();
        match sent {
            Ok(ticket) => {
                job.goes_by(ticket.clone());
                let chunk = Mutex::new(Some((chunk, turn)));
                Arc::new(Lone { ticket, job: job.clone(), chunk }).look();
            }
            Err(error) => job.end(&chunk, End::Failed(error)),
        }
        Some(Ok(Transfer::new(self.clone(), job, Arc::new(()))))
    }
}
