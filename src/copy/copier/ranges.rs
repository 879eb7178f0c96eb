//! Sources, files and sinks as the plan of one job: ranges of what is read or written, each with its place on the
//! device.
//!
//! Ranges are sorted by their offsets, and those that lie one behind the other on both sides are joined, so that a
//! thousand tensors with neighbouring places are one range.
//!
//! A chunk of a source or sink is packed like pieces of memory: each part is read to, or written from, its place in the
//! segment. A chunk of a file is one contiguous range of the file, which is read at once: it starts and ends on pages
//! of the file where it can, since that is how files are read past the page cache. Ranges that are close together in
//! the file share a chunk; what lies between them is read and left out of the copies.

use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::chunk::{Chunk, Cursor, Cut, Part, Stretch};
use super::engine::Engine;
use super::file::FileSource;
use super::job::{Plan, Values};
use super::pieces::{Piece as Place, Survey, cut, fill_parts};
use super::source::{self, Fill, Sink, Source, read_error, shrunk, write_error};
use super::stats::Counters;
use crate::buffer::PinnedBuf;
use crate::device::DevicePtr;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result, SubmitError};
use crate::foreign::{self, Owned};
use crate::locks::Mutex;
use crate::sealed::KEY;
use crate::segment::PAGE;

/// Bytes of a file between two ranges that are read though no range has them: one longer read is faster than two.
const GAP: u64 = 32 << 10;

/// Where bytes of a source go on the device, or from where on the device bytes of a sink come.
///
/// ```
/// # use pinpool::{Device, copier::Piece};
/// # let memory = Device::open("host")?.alloc(4096)?;
/// let second_page = Piece::new(4096, memory.slice(..)?); // bytes 4096..8192 of the source
/// # drop(second_page);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Piece {
    /// First byte in the source or sink.
    pub at: u64,
    /// As many bytes, on the device.
    pub device: DeviceSlice,
}

impl Piece {
    /// The bytes of the source or sink from `at` on, as many as `device` has.
    #[must_use]
    pub fn new(at: u64, device: impl Into<DeviceSlice>) -> Self {
        Self { at, device: device.into() }
    }

    fn end(&self) -> u64 {
        self.at + self.device.len() as u64
    }
}

/// See the module's page.
pub(super) struct Ranges {
    /// What errors and events call the source, file or sink.
    pub(super) name: Cow<'static, str>,
    pieces: Vec<Piece>,
    /// The end of the range that reaches furthest.
    end: u64,
}

impl Ranges {
    /// Looks at pieces, in any order. Those that overlap are allowed.
    pub(super) fn new(
        engine: &Engine,
        name: Cow<'static, str>,
        mut pieces: Vec<Piece>,
        survey: &mut Survey,
    ) -> Result<Self> {
        if pieces.is_empty() {
            return Err(Error::empty());
        }
        let clip = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        for (n, piece) in pieces.iter().enumerate() {
            let len = piece.device.len();
            if piece.at.checked_add(len as u64).is_none() {
                return Err(Error::out_of_range(clip(piece.at), usize::MAX, len));
            }
            survey.add(engine, &piece.device, len).map_err(|e| e.of_piece(n, len))?;
        }
        pieces.sort_by_key(|piece| piece.at);
        let mut joined: Vec<Piece> = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let last = joined.last_mut().filter(|last| last.end() == piece.at);
            match last.and_then(|last| last.device.joined(&piece.device).map(|device| (last, device))) {
                Some((last, device)) => last.device = device,
                None => joined.push(piece),
            }
        }
        joined.shrink_to_fit();
        let end = joined.iter().map(Piece::end).max().unwrap_or(0);
        Ok(Self { name, pieces: joined, end })
    }

    /// # Errors
    /// [`Error::Argument`] if a piece leaves these bounds.
    pub(super) fn within(self, Range { start, end }: Range<u64>) -> Result<Self> {
        let first = self.pieces.first().map_or(start, |piece| piece.at);
        if first >= start && self.end <= end {
            return Ok(self);
        }
        let clip = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        Err(Error::out_of_range(clip(first), clip(self.end), clip(end)))
    }

    /// A piece as the layout knows it. It has no address on the host.
    fn get(&self, n: usize) -> Place {
        let Piece { device, at } = &self.pieces[n];
        Place { at: *at, ..Place::new(std::ptr::null_mut(), device.len(), device) }
    }

    /// The offset of a place among the pieces; where none follows, the end of all.
    fn offset(&self, cut: Cut) -> u64 {
        self.pieces.get(cut.piece).map_or(self.end, |piece| piece.at + cut.from as u64)
    }

    /// The offset of a part.
    fn part_at(&self, part: &Part) -> u64 {
        self.pieces[part.piece].at + part.from as u64
    }

    /// Up to which offset everything is there when all before this place is: the first byte of what is missing.
    fn landed_to(&self, cut: Cut) -> u64 {
        // A later range may begin before this place, where ranges overlap.
        let next = self.pieces.get(cut.piece + 1).map_or(u64::MAX, |piece| piece.at);
        self.offset(cut).min(next)
    }

    /// A chunk, with places that are offsets.
    fn placed(&self, chunk: Chunk) -> Chunk {
        Chunk { at: self.offset(chunk.start), landed_to: self.landed_to(chunk.end), ..chunk }
    }

    fn cut(&self, cursor: &mut Cursor, most: usize) -> Chunk {
        self.placed(cut(self.pieces.len(), |n| self.get(n), most, cursor))
    }
}

/// Calls code of the program's, which may panic: that ends its transfer, and no thread.
fn guarded(call: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    foreign::call("a source or sink panicked: its transfer fails", call)
        .unwrap_or_else(|| Err(io::Error::other("it panicked; the panic's message is on standard error")))
}

/// What a transfer reads from or writes to, on the host's side.
pub(super) trait Storage: Send + Sync + 'static {
    /// What the program gave.
    type Value;

    fn into_value(self) -> Self::Value;

    /// What errors and events call it.
    fn name(&self) -> Cow<'static, str>;

    /// What no piece may leave.
    fn bounds(&self) -> Result<Range<u64>> {
        Ok(0..u64::MAX)
    }

    /// See [`Plan::may_block`].
    fn may_block(&self) -> bool;

    /// Cuts off the next chunk. By default each range's part is read or written by itself.
    fn cut(ranges: &Ranges, cursor: &mut Cursor, most: usize) -> Chunk {
        ranges.cut(cursor, most)
    }

    /// Reads the bytes of a chunk into its segment.
    fn read(&self, _ranges: &Ranges, _chunk: &Chunk, _segment: &mut PinnedBuf) -> Result<()> {
        Err(Error::Internal("bytes were read from a sink"))
    }

    /// Writes the bytes of a chunk from its segment.
    fn write(&self, _ranges: &Ranges, _chunk: &Chunk, _bytes: &[u8]) -> Result<()> {
        Err(Error::Internal("bytes were written to a source"))
    }
}

/// Ranges of a source, file or sink, as the plan of one job.
pub(super) struct Blob<S: Storage> {
    /// Taken by the handle when the job is over. A worker that reads or writes has a share meanwhile.
    storage: Mutex<Option<Arc<Owned<S>>>>,
    ranges: Ranges,
}

impl<S: Storage> Blob<S> {
    pub(super) fn new(storage: S, ranges: Ranges) -> Arc<Self> {
        Arc::new(Self { storage: Mutex::new(Some(Arc::new(Owned::new(storage)))), ranges })
    }

    fn storage(&self) -> Result<Arc<Owned<S>>> {
        self.storage.lock().clone().ok_or(Error::Closed)
    }
}

impl<S: Storage> Plan for Blob<S> {
    fn may_block(&self) -> bool {
        self.storage().is_ok_and(|storage| storage.may_block())
    }

    fn next(&self, cursor: &mut Cursor, most: usize) -> Chunk {
        S::cut(&self.ranges, cursor, most)
    }

    fn fill(&self, chunk: &Chunk, segment: &mut PinnedBuf) -> Result<()> {
        self.storage()?.read(&self.ranges, chunk, segment)
    }

    fn drain(&self, chunk: &Chunk, bytes: &[u8]) -> Result<()> {
        self.storage()?.write(&self.ranges, chunk, bytes)
    }
}

impl<S: Storage> Values for Blob<S> {
    type Back = S::Value;

    fn back(&self, outcome: Result<()>) -> Result<S::Value, SubmitError<S::Value>> {
        let storage = self.storage.lock().take();
        // The job is over, so no worker has a share.
        let value = storage.and_then(Arc::into_inner).map(|storage| storage.into_inner().into_value());
        match (outcome, value) {
            (Ok(()), Some(value)) => Ok(value),
            (outcome, buffer) => Err(SubmitError { error: outcome.err().unwrap_or(Error::Closed), buffer }),
        }
    }
}

pub(super) struct FromSource<S>(pub(super) S);

impl<S: Source> Storage for FromSource<S> {
    type Value = S;

    fn into_value(self) -> S {
        self.0
    }

    fn name(&self) -> Cow<'static, str> {
        source::name("the source", || self.0.name().into_owned())
    }

    fn bounds(&self) -> Result<Range<u64>> {
        source::length(&self.0).map(|len| 0..len)
    }

    fn may_block(&self) -> bool {
        self.0.may_block(KEY)
    }

    fn read(&self, ranges: &Ranges, chunk: &Chunk, segment: &mut PinnedBuf) -> Result<()> {
        let fill = |n: usize, into: &mut _| {
            let offset = ranges.part_at(&chunk.parts[n]);
            let mut fill = Fill::new(into);
            let filled = guarded(|| self.0.fill(offset, &mut fill));
            let (left, end) = (fill.remaining(), offset + fill.filled() as u64);
            filled.map_err(|error| read_error(&ranges.name, end, &error))?;
            if left > 0 {
                return Err(shrunk(ranges.name.clone().into_owned(), end, ranges.end));
            }
            Ok(())
        };
        // SAFETY: a `Fill` counts what was written, and all of it was.
        unsafe { fill_parts(chunk, segment, fill) }
    }
}

pub(super) struct ToSink<S>(pub(super) S);

impl<S: Sink> Storage for ToSink<S> {
    type Value = S;

    fn into_value(self) -> S {
        self.0
    }

    fn name(&self) -> Cow<'static, str> {
        source::name("the target", || self.0.name().into_owned())
    }

    fn may_block(&self) -> bool {
        self.0.may_block(KEY)
    }

    fn write(&self, ranges: &Ranges, chunk: &Chunk, bytes: &[u8]) -> Result<()> {
        chunk.parts.iter().try_for_each(|part| {
            let (offset, bytes) = (ranges.part_at(part), part.of(bytes)?);
            guarded(|| self.0.put(offset, bytes))
                .map_err(|error| write_error(&ranges.name, self.0.lies_at(offset, KEY), &error))
        })
    }
}

/// A file, and where what is read of it counts.
pub(super) struct FromFile(pub(super) FileSource, pub(super) Arc<Counters>);

impl Storage for FromFile {
    type Value = FileSource;

    fn into_value(self) -> FileSource {
        self.0
    }

    fn name(&self) -> Cow<'static, str> {
        self.0.name().to_owned().into()
    }

    fn bounds(&self) -> Result<Range<u64>> {
        Ok(self.0.start()..self.0.end())
    }

    fn may_block(&self) -> bool {
        true
    }

    /// A stretch of the file with all ranges in it, which is read at once.
    fn cut(ranges: &Ranges, cursor: &mut Cursor, most: usize) -> Chunk {
        let start = cursor.at;
        let at = ranges.offset(start);
        let len = (most / PAGE * PAGE).max(PAGE) as u64;
        // The next chunk starts on a page.
        let most = (at - at % PAGE as u64).saturating_add(len);
        let (mut cut, mut end, mut bytes) = (start, at, 0);
        // The file's bytes lie in the segment from where they are within a page on.
        let (lead, mut stretches) = (at % PAGE as u64, Vec::new());
        while let Some(piece) = ranges.pieces.get(cut.piece) {
            let from = piece.at + cut.from as u64;
            // A range that overlaps another has chunks of its own.
            if bytes > 0 && (from < end || from >= most || from > end.saturating_add(GAP)) {
                break;
            }
            let until = piece.end().min(most);
            let (offset, len) = ((lead + from - at) as usize, (until - from) as usize);
            let place = DevicePtr(piece.device.address() + cut.from as u64);
            stretches.push(Stretch { place, offset, len });
            bytes += len;
            end = until;
            if piece.end() > most {
                cut.from = (most - piece.at) as usize;
                break;
            }
            cut = Cut { piece: cut.piece + 1, from: 0 };
        }
        let chunk = ranges.placed(cursor.cut_off(cut, bytes));
        Chunk { stretches, ..chunk }
    }

    fn read(&self, _: &Ranges, chunk: &Chunk, segment: &mut PinnedBuf) -> Result<()> {
        let Self(file, counters) = self;
        let start = chunk.stretches.first().map_or(0, |first| first.offset);
        let end = chunk.stretches.last().map_or(start, |last| last.offset + last.len);
        segment.clear();
        file.fill(chunk.at, end - start, segment, counters)
    }
}
