//! Bytes in order: from a reader to the device, and from the device to a writer.
//!
//! The caller's thread fills or empties one segment while the copy of another one, a transfer of pinned blocks, is
//! under way. Both are beside the copier's share. A call that has a segment goes on with it where the pool has no
//! second one to spare, and waits in the pool's queue only while it has none.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::time::Instant;

use super::Copier;
use super::job::late;
use super::source::{read_error, write_error};
use super::trace::Trace;
use super::transfer::Transfer;
use super::types::Direction;
use crate::buffer::PinnedBuf;
use crate::copy::DeviceRange;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result};

/// Segments of a call at most.
const SEGMENTS: usize = 2;

impl Copier {
    /// Reads until the reader ends or `dst` is full, on the caller's thread, and returns the number of bytes when all
    /// are on the device. After an error too it returns only when nothing of it is in flight any more. The reader may
    /// wait for other transfers of this copier.
    ///
    /// # Errors
    /// [`Error::Read`] with what the reader said; else as for [`upload_slice`](Self::upload_slice).
    pub fn upload_read(&self, reader: &mut impl Read, dst: impl DeviceRange) -> Result<u64> {
        let mut call = InOrder::new(self, Direction::Up, dst, "the reader")?;
        let said = call.read_from(reader);
        call.end(said)
    }

    /// Writes device memory to a writer, on the caller's thread, in order. How many bytes, which are all. The writer
    /// may wait for other transfers of this copier.
    ///
    /// # Errors
    /// [`Error::Write`] with what the writer said; else as for [`download_slice`](Self::download_slice).
    pub fn download_write(&self, src: impl DeviceRange, writer: &mut impl Write) -> Result<u64> {
        let mut call = InOrder::new(self, Direction::Down, src, "the writer")?;
        let said = call.write_to(writer);
        call.end(said)
    }
}

/// See the module's page.
struct InOrder<'a> {
    copier: &'a Copier,
    direction: Direction,
    memory: DeviceSlice,
    name: &'static str,
    /// Segments under way, the oldest first, and where in `memory` each begins.
    sent: VecDeque<(usize, Transfer<Vec<PinnedBuf>>)>,
    /// Bytes that were sent, and bytes that have arrived.
    begun: usize,
    done: usize,
    since: Instant,
    deadline: Option<Instant>,
    trace: Option<Trace>,
}

impl<'a> InOrder<'a> {
    fn new(
        copier: &'a Copier,
        direction: Direction,
        range: impl DeviceRange,
        name: &'static str,
    ) -> Result<Self> {
        copier.may_block()?;
        let memory = copier.own(range)?;
        let (sent, since) = (VecDeque::new(), Instant::now());
        let deadline = copier.timeout.and_then(|timeout| since.checked_add(timeout));
        let total = memory.len() as u64;
        let trace = Some(Trace::begin(copier.device().name(), direction, copier.priority, total, name));
        Ok(Self { copier, direction, memory, name, sent, begun: 0, done: 0, since, deadline, trace })
    }

    fn read_from(&mut self, reader: &mut impl Read) -> Result<()> {
        let mut ended = false;
        while !ended && self.begun < self.memory.len() {
            let free = if self.sent.len() < SEGMENTS { self.segment()? } else { None };
            let mut buf = match free {
                Some(buf) => buf,
                None => self.land()?.1,
            };
            ended = self.fill(&mut buf, reader)?;
            if !buf.is_empty() {
                self.send(buf)?;
            }
        }
        while !self.sent.is_empty() {
            self.land()?;
        }
        Ok(())
    }

    /// Fills a segment. Whether the reader has ended.
    fn fill(&self, buf: &mut PinnedBuf, reader: &mut impl Read) -> Result<bool> {
        let (len, mut have, mut ended) = (self.room(buf), 0, false);
        // Readers take initialised memory only: once for each chunk, however little they read at a time.
        buf.try_resize(len, 0)?;
        while have < len && !ended {
            match reader.read(&mut buf[have..]) {
                Ok(0) => ended = true,
                Ok(n) => have += n.min(len - have),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(read_error(self.name, (self.begun + have) as u64, &error)),
            }
        }
        buf.truncate(have);
        Ok(ended)
    }

    fn write_to(&mut self, writer: &mut impl Write) -> Result<()> {
        let mut spare = None;
        loop {
            // The next copies are under way while the writer has a segment.
            while self.begun < self.memory.len() && self.sent.len() < SEGMENTS {
                let free = if spare.is_some() { spare.take() } else { self.segment()? };
                let Some(buf) = free else { break };
                self.send(buf)?;
            }
            if self.sent.is_empty() {
                return Ok(());
            }
            let (at, buf) = self.land()?;
            writer.write_all(&buf).map_err(|error| write_error(self.name, at as u64, &error))?;
            spare = Some(buf);
        }
    }

    /// Bytes of the next chunk in this segment.
    fn room(&self, buf: &PinnedBuf) -> usize {
        let engine = self.copier.engine();
        engine.settings.chunk.min(engine.segments.room(buf)).min(self.memory.len() - self.begun)
    }

    /// Another segment. `None`: there is none to spare now, and one of the call's own comes back.
    fn segment(&self) -> Result<Option<PinnedBuf>> {
        let segments = &self.copier.engine().segments;
        let got = match self.sent.is_empty() {
            true => segments.wait(self.deadline).map(Some),
            false => segments.second(),
        };
        got.map_err(|error| match error {
            Error::Timeout(_) => self.late("a segment of the pool", Some(segments.shortage())),
            error => self.failed(self.begun, error),
        })
    }

    /// Starts the copy of the next chunk.
    fn send(&mut self, buf: PinnedBuf) -> Result<()> {
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let copier = Copier { timeout: left, ..self.copier.clone() };
        let len = if self.direction == Direction::Up { buf.len() } else { self.room(&buf) };
        let place = self.memory.slice(self.begun..self.begun + len)?;
        let sent = match self.direction {
            Direction::Up => copier.upload_pages(vec![(buf, place)]).map_err(|refused| refused.error),
            Direction::Down => copier.download_pages(vec![(place, buf)]).map_err(|refused| refused.error),
        };
        let sent = sent.map_err(|error| self.failed(self.begun, error))?;
        self.sent.push_back((self.begun, sent));
        self.begun += len;
        Ok(())
    }

    /// Waits for the oldest copy: where in the memory it begins, and its segment.
    fn land(&mut self) -> Result<(usize, PinnedBuf)> {
        let none = Error::Internal("no copy is under way");
        let (at, sent) = self.sent.pop_front().ok_or(none.clone())?;
        let landed = sent.wait().map_err(|refused| match refused.error {
            Error::Timeout(_) => self.late("its caller, the rate, or copies of other transfers", None),
            error => self.failed(at, error),
        })?;
        let buf = landed.into_iter().next().ok_or(none)?;
        self.done += buf.len();
        Ok((at, buf))
    }

    fn failed(&self, at: usize, cause: Error) -> Error {
        // With a lost device a pool says that it has nothing more to give, which is not the cause.
        let cause = Box::new(self.copier.engine().device.lost().unwrap_or(cause));
        Error::Transfer { what: self.name.into(), offset: at as u64, cause }
    }

    fn late(&self, what: &str, short: Option<Error>) -> Error {
        late(self.name, (self.done as u64, self.memory.len() as u64), what, short, self.since)
    }

    fn end(mut self, said: Result<()>) -> Result<u64> {
        // A reader that fails cancels the upload, as the drop does.
        if !matches!(said, Err(Error::Read { .. })) {
            self.finish(&said);
        }
        said.map(|()| self.done as u64)
    }

    /// Waits until nothing is under way, and closes the span.
    fn finish(&mut self, said: &Result<()>) {
        while !self.sent.is_empty() {
            let _ = self.land();
        }
        if let Some(trace) = self.trace.take() {
            trace.end(said, self.done as u64, self.since.elapsed());
        }
    }
}

impl Drop for InOrder<'_> {
    fn drop(&mut self) {
        // By a panic of the reader or the writer, or after the end, when nothing is left.
        let (what, done, total) = (self.name.into(), self.done as u64, self.memory.len() as u64);
        self.finish(&Err(Error::Cancelled { what, done, total }));
    }
}
