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
use std::cell::UnsafeCell;
use std::io;
use std::sync::Arc;

use super::chunk::{Chunk, Cursor, Cut, Part, Stretch};
use super::engine::Engine;
use super::file::FileSource;
use super::job::Plan;
use super::pieces::{Piece as Place, Ramp, Survey, Values, cut, fill_parts};
use super::source::{Fill, Sink, Source, read_error, write_error};
use crate::buffer::PinnedBuf;
use crate::device::DevicePtr;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result};
use crate::foreign::{self, Owned};
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
    pieces: Vec<Piece>,
    /// The end of the range that reaches furthest.
    end: u64,
    ramp: Ramp,
}

/// The error of a source that has become shorter than `len` bytes since a transfer of it began.
pub(super) fn shrunk(what: String, end: u64, len: u64) -> Error {
    let text = format!(
        "it ends there, not at {len}: it has become shorter since its length was taken; load it again while no process \
         writes to it"
    );
    Error::Read { what, offset: end, kind: std::io::ErrorKind::UnexpectedEof, text }
}

impl Ranges {
    /// Looks at pieces, in any order. Those that overlap are allowed.
    pub(super) fn new(engine: &Engine, mut pieces: Vec<Piece>, survey: &mut Survey) -> Result<Self> {
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
        Ok(Self { pieces: joined, end, ramp: Ramp::new(&engine.settings) })
    }

    /// # Errors
    /// [`Error::Argument`] if a piece leaves these bounds.
    pub(super) fn within(self, start: u64, end: u64) -> Result<Self> {
        let first = self.pieces.first().map_or(start, |piece| piece.at);
        if first >= start && self.end <= end {
            return Ok(self);
        }
        let clip = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        Err(Error::out_of_range(clip(first), clip(self.end), clip(end)))
    }

    /// A piece as the layout knows it. It has no address on the host.
    fn get(&self, n: usize) -> Place {
        let Piece { device, .. } = &self.pieces[n];
        let (len, memory) = (device.len(), device.allocation_number());
        Place { host: std::ptr::null_mut(), len, device: device.address(), memory }
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

    fn cut(&self, cursor: &mut Cursor, room: Option<usize>) -> Chunk {
        let bytes = self.ramp.next(cursor, room);
        // A piece is cut on a page of the source: of files that are read or written past the page cache, whole ones are.
        let on_page = |n: usize, end: usize| {
            let at = self.pieces[n].at;
            ((at + end as u64) / PAGE as u64 * PAGE as u64).saturating_sub(at) as usize
        };
        self.placed(cut(self.pieces.len(), |n| self.get(n), on_page, bytes, cursor))
    }
}

/// Calls code of the program's, which may panic: that ends its transfer, and no thread.
fn guarded(call: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    foreign::call("a source or sink panicked: its transfer fails", call)
        .unwrap_or_else(|| Err(io::Error::other("it panicked; the panic's message is on standard error")))
}

/// A value that a job reads or writes, until its handle takes it back.
pub(super) struct Kept<T: Send + 'static>(UnsafeCell<Option<Owned<T>>>);

// SAFETY: shared while the job runs, by workers that only read the cell; taken by one thread when the job is over.
unsafe impl<T: Send + Sync + 'static> Sync for Kept<T> {}

impl<T: Send + 'static> Kept<T> {
    pub(super) fn new(value: T) -> Arc<Self> {
        Arc::new(Self(UnsafeCell::new(Some(Owned::new(value)))))
    }

    /// # Safety
    /// The job is not over, or its handle has not taken the value.
    unsafe fn get(&self) -> Result<&T> {
        // SAFETY: the caller's promise: no thread changes the cell.
        unsafe { &*self.0.get() }.as_deref().ok_or(Error::Closed)
    }
}

impl<T: Send + Sync + 'static> Values for Kept<T> {
    type Back = T;

    unsafe fn take(&self) -> Result<T> {
        // SAFETY: the caller's promise.
        unsafe { self.rescue() }.ok_or(Error::Closed)
    }

    unsafe fn rescue(&self) -> Option<T> {
        // SAFETY: the caller's promise: no other thread uses the cell. No device reads or writes the value.
        unsafe { &mut *self.0.get() }.take().map(Owned::into_inner)
    }
}

// --- sources ---------------------------------------------------------------------------------------------------------

/// A source on its way to the device.
pub(super) struct FromSource<S: Source> {
    pub(super) source: Arc<Kept<S>>,
    pub(super) name: Cow<'static, str>,
    pub(super) ranges: Ranges,
}

impl<S: Source> Plan for FromSource<S> {
    fn may_block(&self) -> bool {
        // SAFETY: the job is not over.
        unsafe { self.source.get() }.is_ok_and(|source| source.may_block(KEY))
    }

    fn next(&self, cursor: &mut Cursor, room: Option<usize>) -> Chunk {
        self.ranges.cut(cursor, room)
    }

    fn fill(&self, chunk: &Chunk, segment: &mut PinnedBuf) -> Result<()> {
        // SAFETY: a chunk was taken, so the job is not over.
        let source = unsafe { self.source.get() }?;
        let fill = |n: usize, into: &mut _| {
            let offset = self.ranges.part_at(&chunk.parts[n]);
            let mut fill = Fill::new(into);
            let filled = guarded(|| source.fill(offset, &mut fill));
            let (left, end) = (fill.remaining(), offset + fill.filled() as u64);
            filled.map_err(|error| read_error(&self.name, end, &error))?;
            if left > 0 {
                return Err(shrunk(self.name.clone().into_owned(), end, self.ranges.end));
            }
            Ok(())
        };
        // SAFETY: a `Fill` counts what was written, and all of it was.
        unsafe { fill_parts(chunk, segment, fill) }
    }
}

// --- sinks -----------------------------------------------------------------------------------------------------------

/// A sink that bytes from the device go to.
pub(super) struct ToSink<S: Sink> {
    pub(super) sink: Arc<Kept<S>>,
    pub(super) name: Cow<'static, str>,
    pub(super) ranges: Ranges,
}

impl<S: Sink> Plan for ToSink<S> {
    fn may_block(&self) -> bool {
        // SAFETY: the job is not over.
        unsafe { self.sink.get() }.is_ok_and(|sink| sink.may_block(KEY))
    }

    fn next(&self, cursor: &mut Cursor, room: Option<usize>) -> Chunk {
        self.ranges.cut(cursor, room)
    }

    fn drain(&self, chunk: &Chunk, bytes: &[u8]) -> Result<()> {
        // SAFETY: a chunk was taken and has not ended, so the job is not over.
        let sink = unsafe { self.sink.get() }?;
        chunk.parts.iter().try_for_each(|part| {
            let (offset, bytes) = (self.ranges.part_at(part), part.of(bytes)?);
            guarded(|| sink.put(offset, bytes))
                .map_err(|error| write_error(&self.name, sink.lies_at(offset, KEY), &error))
        })
    }
}

// --- files -----------------------------------------------------------------------------------------------------------

/// A file on its way to the device.
pub(super) struct FromFile {
    pub(super) file: Arc<Kept<FileSource>>,
    pub(super) ranges: Ranges,
    pub(super) engine: std::sync::Weak<Engine>,
}

impl Plan for FromFile {
    fn may_block(&self) -> bool {
        true
    }

    fn next(&self, cursor: &mut Cursor, room: Option<usize>) -> Chunk {
        let (start, pieces) = (cursor.at, &self.ranges.pieces);
        let at = self.ranges.offset(start);
        let len = (self.ranges.ramp.next(cursor, room) / PAGE * PAGE).max(PAGE) as u64;
        // The next chunk starts on a page.
        let most = (at - at % PAGE as u64).saturating_add(len);
        let (mut cut, mut end, mut bytes) = (start, at, 0);
        // The file's bytes lie in the segment from where they are within a page on.
        let (lead, mut stretches) = (at % PAGE as u64, Vec::new());
        while let Some(piece) = pieces.get(cut.piece) {
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
        let chunk = self.ranges.placed(cursor.cut_off(cut, bytes));
        Chunk { stretches, ..chunk }
    }

    fn fill(&self, chunk: &Chunk, segment: &mut PinnedBuf) -> Result<()> {
        // SAFETY: a chunk was taken, so the job is not over.
        let file = unsafe { self.file.get() }?;
        let engine = self.engine.upgrade().ok_or(Error::Closed)?;
        let start = chunk.stretches.first().map_or(0, |first| first.offset);
        let end = chunk.stretches.last().map_or(start, |last| last.offset + last.len);
        segment.clear();
        file.fill(chunk.at, end - start, segment, &engine.counters)
    }
}
