//! An upload from a reader: the caller's thread fills segments, in order, and workers send them.
//!
//! A full segment is a chunk of the job. At most [`MOST`] are filled or under way. One of them does not count against the
//! copier's share, and is waited for in the pool's queue as any request is; for another one the caller waits until a
//! chunk of its own has ended. The reader is code of the program's and may panic: then the drop of [`Upload`] ends the
//! job.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::sync::Arc;

use super::Copier;
use super::job::{Chunk, Cursor, Cut, Job, Work};
use super::layout::Stretch;
use super::packing::{Brought, Content, Packing};
use super::pieces::finish;
use super::source::read_error;
use super::transfer::Transfer;
use crate::buffer::PinnedBuf;
use crate::device::DevicePtr;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result};
use crate::locks::Mutex;

/// Segments of a call at most.
const MOST: usize = 3;

/// A segment, which counts against the copier's share or not.
struct Segment {
    buf: PinnedBuf,
    counts: bool,
}

/// What the workers see of it.
pub(super) struct FromReader {
    memory: DeviceSlice,
    /// Segments that were sent, by the indices of their chunks, until a worker takes them.
    ready: Mutex<BTreeMap<usize, Segment>>,
}

impl FromReader {
    pub(super) fn new(memory: DeviceSlice) -> Arc<Self> {
        Arc::new(Self { memory, ready: Mutex::default() })
    }
}

impl Work for FromReader {
    fn needs_segment(&self) -> bool {
        false
    }

    fn cut(&self, cursor: &mut Cursor, _: Option<usize>) -> Chunk {
        let from = cursor.at.from;
        let sent = self.ready.lock().get(&cursor.chunks).map(|segment| segment.buf.len());
        // One that was sent is there until its chunk is prepared.
        let bytes = sent.unwrap_or(usize::try_from(cursor.left).unwrap_or(usize::MAX));
        finish(cursor, Cut { piece: 0, from: from + bytes }, bytes, Some(usize::MAX))
    }

    fn prepare(&self, chunk: &Chunk, _: &mut Packing<'_>) -> Result<Content> {
        let ready = self.ready.lock().remove(&chunk.index);
        let Some(Segment { buf: segment, counts }) = ready else { return Err(Error::Closed) };
        let place = DevicePtr(self.memory.address() + chunk.start.from as u64);
        let stretches = vec![Stretch { place, offset: 0, len: chunk.bytes }];
        Ok(Content::Brought(Brought { segment, stretches, counts }))
    }
}

/// The caller's side of it.
pub(super) struct Upload<'a> {
    copier: &'a Copier,
    job: Arc<Job>,
    work: Arc<FromReader>,
    /// The segment that is being filled.
    current: Option<Segment>,
    /// Bytes in chunks that were sent, and these chunks.
    sent: usize,
    chunks: usize,
}

impl<'a> Upload<'a> {
    pub(super) fn new(copier: &'a Copier, job: Arc<Job>, work: Arc<FromReader>) -> Self {
        Self { copier, job, work, current: None, sent: 0, chunks: 0 }
    }

    /// Uploads until the reader ends, or the memory is full. How many bytes.
    pub(super) fn read_from(mut self, reader: &mut impl Read, name: &str) -> Result<u64> {
        let mut ended = false;
        while !ended && self.sent < self.work.memory.len() {
            self.wait_segment()?;
            ended = self.fill(reader, name)?;
            self.send()?;
        }
        self.job.close();
        Transfer::new(self.copier.clone(), self.job.clone(), Arc::new(())).wait()?;
        Ok(self.sent as u64)
    }

    /// Sees to it that there is a segment to fill.
    fn wait_segment(&mut self) -> Result<()> {
        let (engine, job) = (self.copier.engine(), &self.job);
        while self.current.is_none() {
            crate::os::check_fork()?;
            if job.is_stopped() {
                return Err(job.stopped_with());
            }
            let ended = job.ended();
            self.current = match self.chunks - ended {
                0 => {
                    let buf = engine.segments.wait(job.deadline).map_err(|error| self.late(error))?;
                    Some(Segment { buf, counts: false })
                }
                MOST.. => None,
                _ => engine.segments.take_more(job.priority)?.map(|buf| Segment { buf, counts: true }),
            };
            if self.current.is_none() {
                engine.wait(job, None, |job| job.ended() > ended || job.is_stopped());
            }
        }
        Ok(())
    }

    /// The error of a wait for a segment, whose deadline is the job's.
    fn late(&self, error: Error) -> Error {
        if !matches!(error, Error::Timeout(_)) {
            return error;
        }
        self.job.expire(|| Some(self.copier.engine().segments.shortage()));
        self.job.stopped_with()
    }

    /// Fills the segment. Whether the reader has ended.
    fn fill(&mut self, reader: &mut impl Read, name: &str) -> Result<bool> {
        let Some(Segment { buf, .. }) = &mut self.current else { return Ok(true) };
        let engine = self.copier.engine();
        let len =
            engine.settings.chunk.min(engine.segments.room(buf)).min(self.work.memory.len() - self.sent);
        // Readers take initialised memory only: once for each chunk, however little they read at a time.
        buf.try_resize(len, 0)?;
        let mut have = 0;
        let mut ended = false;
        while have < len && !ended {
            match reader.read(&mut buf[have..]) {
                Ok(0) => ended = true,
                Ok(n) => have += n.min(len - have),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(read_error(name, (self.sent + have) as u64, &error)),
            }
        }
        buf.truncate(have);
        Ok(ended)
    }

    /// Sends the segment, if there is anything in it.
    fn send(&mut self) -> Result<()> {
        let Some(segment) = self.current.take_if(|segment| !segment.buf.is_empty()) else { return Ok(()) };
        let len = segment.buf.len();
        self.work.ready.lock().insert(self.chunks, segment);
        if !self.job.feed(len) {
            return Err(self.job.stopped_with());
        }
        self.chunks += 1;
        self.sent += len;
        self.copier.engine().start(&self.job, len as u64).inspect_err(|error| self.job.fail(error.clone()))
    }
}

/// Ends the job, if that is not over, and waits until it is: what is in flight would arrive in memory that its owner uses
/// again.
impl Drop for Upload<'_> {
    fn drop(&mut self) {
        let mut segments: Vec<Segment> = self.current.take().into_iter().collect();
        if crate::os::forked() {
            std::mem::forget(segments);
            return;
        }
        self.job.cancel();
        // Those that no worker has taken, and none will.
        segments.extend(std::mem::take(&mut *self.work.ready.lock()).into_values());
        for Segment { buf, counts } in segments {
            drop(buf);
            if counts {
                self.copier.engine().segments.gone();
            }
        }
        self.job.close();
        self.copier.engine().wait(&self.job, None, Job::is_over);
    }
}
