//! Bytes in order: from a reader to the device, and from the device to a writer.
//!
//! The caller's thread fills or empties one segment while another one is copied, as a transfer of
//! pinned blocks. Both are beside the copier's share. A call with a segment goes on with it where
//! the pool has no second one to spare, and waits in the pool's queue only while it has none.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::time::{Duration, Instant};

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
    /// Reads on the caller's thread until the reader ends or `dst` is full, and returns the number
    /// of bytes when all are on the device. Nothing is in flight when it returns, after an error,
    /// too. The reader may wait for other transfers of this copier.
    ///
    /// # Errors
    /// [`Error::Read`] with what the reader said; else as for [`upload_slice`](Self::upload_slice).
    pub fn upload_read(&self, reader: &mut impl Read, dst: impl DeviceRange) -> Result<u64> {
        self.in_order(Direction::Up, dst, |call| call.read_from(reader))
    }

    /// Writes device memory to a writer, on the caller's thread, in order, and returns the number
    /// of bytes. The writer may wait for other transfers of this copier.
    ///
    /// # Errors
    /// [`Error::Write`] with what the writer said; else [as every transfer](Error#transfers).
    pub fn download_write(&self, src: impl DeviceRange, writer: &mut impl Write) -> Result<u64> {
        self.in_order(Direction::Down, src, |call| call.write_to(writer))
    }

    fn in_order(
        &self,
        direction: Direction,
        range: impl DeviceRange,
        run: impl FnOnce(&mut InOrder<'_>) -> Result<()>,
    ) -> Result<u64> {
        self.may_block()?;
        let (memory, since, state) = (self.own(range)?, Instant::now(), InOrderState::default());
        let name = if direction == Direction::Up { "the reader" } else { "the writer" };
        let trace = Trace::begin(self.device().name(), direction, self.priority, memory.len() as u64, name);
        let mut call = InOrder { copier: self, direction, name, memory, since, trace, state };
        let said = run(&mut call);
        // A reader that fails cancels the upload.
        if !matches!(said, Err(Error::Read { .. })) {
            call.state.outcome = Some(said.clone());
        }
        said.map(|()| call.state.done as u64)
    }
}

struct InOrder<'a> {
    copier: &'a Copier,
    direction: Direction,
    name: &'static str,
    memory: DeviceSlice,
    since: Instant,
    trace: Trace,
    state: InOrderState,
}

#[derive(Default)]
struct InOrderState {
    /// Segments under way, the oldest first, and where in the memory each begins.
    sent: VecDeque<(usize, Transfer<Vec<PinnedBuf>>)>,
    /// A segment that no copy uses.
    spare: Option<PinnedBuf>,
    /// Bytes that were sent, and bytes that have arrived.
    begun: usize,
    done: usize,
    /// Told to the span by the drop. `None`: a panic of the reader or the writer came before.
    outcome: Option<Result<()>>,
}

impl InOrder<'_> {
    /// What is left of the time that the call may take.
    fn left(&self) -> Option<Duration> {
        self.copier.timeout.map(|timeout| timeout.saturating_sub(self.since.elapsed()))
    }

    fn read_from(&mut self, reader: &mut impl Read) -> Result<()> {
        let mut ended = false;
        while !ended && self.state.begun < self.memory.len() {
            let Some(mut buf) = self.segment()? else {
                self.state.spare = Some(self.land()?.1);
                continue;
            };
            ended = self.fill(&mut buf, reader)?;
            if !buf.is_empty() {
                self.send(buf)?;
            }
        }
        while !self.state.sent.is_empty() {
            self.land()?;
        }
        Ok(())
    }

    /// Fills a segment. Whether the reader has ended.
    fn fill(&self, buf: &mut PinnedBuf, reader: &mut impl Read) -> Result<bool> {
        let (len, mut have, mut ended) = (self.room(buf), 0, false);
        // Readers take initialised memory only: once a chunk, however little they read at a time.
        buf.try_resize(len, 0)?;
        while have < len && !ended {
            match reader.read(&mut buf[have..]) {
                Ok(0) => ended = true,
                Ok(n) => have += n.min(len - have),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(read_error(self.name, (self.state.begun + have) as u64, &error)),
            }
        }
        buf.truncate(have);
        Ok(ended)
    }

    fn write_to(&mut self, writer: &mut impl Write) -> Result<()> {
        loop {
            // The next copies are under way while the writer has a segment.
            while self.state.begun < self.memory.len() {
                let Some(buf) = self.segment()? else { break };
                self.send(buf)?;
            }
            if self.state.sent.is_empty() {
                return Ok(());
            }
            let (at, buf) = self.land()?;
            writer.write_all(&buf).map_err(|error| write_error(self.name, at as u64, &error))?;
            self.state.spare = Some(buf);
        }
    }

    /// Bytes of the next chunk in this segment.
    fn room(&self, buf: &PinnedBuf) -> usize {
        let engine = self.copier.engine();
        engine.settings.chunk.min(engine.segments.room(buf)).min(self.memory.len() - self.state.begun)
    }

    /// A segment. `None`: there is none to spare now, and one that is under way comes back.
    fn segment(&mut self) -> Result<Option<PinnedBuf>> {
        let segments = &self.copier.engine().segments;
        let got = match self.state.sent.len() {
            _ if self.state.spare.is_some() => return Ok(self.state.spare.take()),
            0 => segments.wait(self.left()).map(Some),
            SEGMENTS.. => Ok(None),
            _ => segments.second(),
        };
        got.map_err(|error| match error {
            Error::Timeout(_) => self.late("a segment of the pool", Some(segments.shortage())),
            error => self.failed(self.state.begun, error),
        })
    }

    /// Starts the copy of the next chunk.
    fn send(&mut self, buf: PinnedBuf) -> Result<()> {
        let copier = Copier { timeout: self.left(), ..self.copier.clone() };
        let len = if self.direction == Direction::Up { buf.len() } else { self.room(&buf) };
        let place = self.memory.slice(self.state.begun..self.state.begun + len)?;
        let sent = match self.direction {
            Direction::Up => copier.upload_pages(vec![(buf, place)]).map_err(|refused| refused.error),
            Direction::Down => copier.download_pages(vec![(place, buf)]).map_err(|refused| refused.error),
        };
        let sent = sent.map_err(|error| self.failed(self.state.begun, error))?;
        self.state.sent.push_back((self.state.begun, sent));
        self.state.begun += len;
        Ok(())
    }

    /// Waits for the oldest copy: where in the memory it begins, and its segment.
    fn land(&mut self) -> Result<(usize, PinnedBuf)> {
        let none = Error::Internal("no copy is under way");
        let (at, sent) = self.state.sent.pop_front().ok_or(none.clone())?;
        let landed = sent.wait().map_err(|refused| match refused.error {
            Error::Timeout(_) => self.late("its caller, the rate, or copies of other transfers", None),
            error => self.failed(at, error),
        })?;
        let buf = landed.into_iter().next().ok_or(none)?;
        self.state.done += buf.len();
        Ok((at, buf))
    }

    fn failed(&self, at: usize, cause: Error) -> Error {
        // With a lost device a pool says that it has nothing more to give, which is not the cause.
        self.copier.engine().device.lost().unwrap_or(cause).of_transfer(self.name, at as u64)
    }

    fn late(&self, what: &str, short: Option<Error>) -> Error {
        late(self.name, (self.state.done as u64, self.memory.len() as u64), what, short, self.since)
    }
}

impl Drop for InOrder<'_> {
    /// Waits until nothing is under way, and closes the span.
    fn drop(&mut self) {
        while !self.state.sent.is_empty() {
            let _ = self.land();
        }
        let (done, total) = (self.state.done as u64, self.memory.len() as u64);
        let cancelled = || Err(Error::Cancelled { what: self.name.into(), done, total });
        self.trace.end(&self.state.outcome.clone().unwrap_or_else(cancelled), done, self.since.elapsed());
    }
}
