//! Sources, files and sinks as the plan of one job: ranges of what is read or written, each with
//! its place on the device.
//!
//! Ranges are sorted by offset; neighbours that are contiguous on both sides are joined.
//!
//! A chunk of a source or sink is packed like pieces of memory: each part is read to, or written
//! from, its place in the segment. A chunk of a file is one contiguous range that is read at once,
//! on whole pages where it can be, for reads past the page cache. Ranges that are close together in
//! the file share a chunk; what lies between them is read and not copied.

use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::chunk::{Chunk, Cursor, Cut, Stretch};
use super::engine::Engine;
use super::file::{FileSource, file_of, lies_at};
use super::job::{Plan, Values};
use super::pieces::{Piece, Survey, cut, fill_parts};
use super::source::{self, Fill, Sink, Source, leaves, read_error, shrunk, write_error};
use super::stores;
use super::types::{Counters, Kind};
use crate::buffer::PinnedBuf;
use crate::copy::{DeviceRange, own};
use crate::device::DevicePtr;
use crate::device::context::Context;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result, SubmitError};
use crate::foreign::{self, Owned};
use crate::locks::Mutex;
use crate::sealed::{KEY, Key};
use crate::segment::PAGE;

/// Gaps up to this length are read: one longer read is faster than two.
const GAP: u64 = 32 << 10;

/// A range of bytes of a source or sink, and its place on the device.
///
/// ```
/// # use pinpool::{Copier, Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (copier, memory) = (Copier::builder(&pool, &device).build()?, device.alloc(4096)?);
/// use pinpool::copier::CopyRange;
///
/// // The second half of the source comes first on the device.
/// let halves = vec![CopyRange::new(2048, memory.slice(..2048)?), CopyRange::new(0, memory.slice(2048..)?)];
/// copier.upload(vec![7; 4096], halves)?.wait()?;
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct CopyRange {
    /// The offset of the first byte in the source or sink, in bytes.
    pub at: u64,
    /// The place on the device, as long as the range.
    pub device: DeviceSlice,
}

impl CopyRange {
    /// The bytes of the source or sink from `at` on, as many as `device` has.
    #[must_use]
    pub fn new(at: u64, device: impl Into<DeviceSlice>) -> Self {
        Self { at, device: device.into() }
    }

    fn end(&self) -> u64 {
        self.at + self.device.len() as u64
    }
}

/// Which bytes of a source or sink go where: a `Vec<CopyRange>`, or a [`DeviceRange`] for all of a
/// source, or for the first bytes of a sink. Sealed.
pub trait CopyRanges {
    /// The ranges. `source`: what the source has.
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn list(self, of: &Arc<Context>, source: Option<Range<u64>>, _: Key) -> Result<Vec<CopyRange>>;
}

impl CopyRanges for Vec<CopyRange> {
    #[allow(private_interfaces)]
    fn list(self, _: &Arc<Context>, _: Option<Range<u64>>, _: Key) -> Result<Vec<CopyRange>> {
        Ok(self)
    }
}

impl<R: DeviceRange> CopyRanges for R {
    #[allow(private_interfaces)]
    fn list(self, of: &Arc<Context>, source: Option<Range<u64>>, _: Key) -> Result<Vec<CopyRange>> {
        let device = own(&self, of)?;
        let Some(Range { start: at, end }) = source else {
            return Ok(vec![CopyRange { at: 0, device }]);
        };
        let need = usize::try_from(end - at).unwrap_or(usize::MAX);
        Error::unless_fits(need, device.len())?;
        Ok(vec![CopyRange { at, device: device.slice(..need)? }])
    }
}

pub(super) struct Ranges {
    /// What errors and events call the source, file or sink.
    pub(super) name: Cow<'static, str>,
    pieces: Vec<CopyRange>,
    /// The end of the range that reaches furthest.
    end: u64,
}

impl Ranges {
    /// Checks, sorts and joins ranges, which may overlap.
    pub(super) fn new(
        engine: &Engine,
        name: Cow<'static, str>,
        mut pieces: Vec<CopyRange>,
        survey: &mut Survey,
    ) -> Result<Self> {
        if pieces.is_empty() {
            return Err(Error::empty());
        }
        for (n, piece) in pieces.iter().enumerate() {
            let len = piece.device.len();
            if piece.at.checked_add(len as u64).is_none() {
                return Err(leaves(piece.at, u64::MAX, len as u64));
            }
            survey.add(engine, &piece.device, len).map_err(|e| e.of_piece(n, len))?;
        }
        pieces.sort_by_key(|piece| piece.at);
        pieces.dedup_by(|next, last| {
            let device = if last.end() == next.at { last.device.joined(&next.device) } else { None };
            device.map(|device| last.device = device).is_some()
        });
        pieces.shrink_to_fit();
        let end = pieces.iter().map(CopyRange::end).max().unwrap_or(0);
        Ok(Self { name, pieces, end })
    }

    /// # Errors
    /// [`Error::Argument`] if a range leaves these bounds.
    pub(super) fn within(self, Range { start, end }: Range<u64>) -> Result<Self> {
        match self.pieces.first().map_or(start, |piece| piece.at) {
            first if first < start || self.end > end => Err(leaves(first, self.end, end)),
            _ => Ok(self),
        }
    }

    /// Whether any byte is in two ranges.
    fn overlap(&self) -> bool {
        self.pieces.windows(2).any(|pair| pair[0].end() > pair[1].at)
    }

    /// What lies before and between ranges that do not overlap, and is in none.
    fn gaps(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let starts = self.pieces.iter().map(|piece| piece.at);
        let ends = std::iter::once(0).chain(self.pieces.iter().map(CopyRange::end));
        ends.zip(starts).map(|(end, start)| end..start).filter(|gap| !gap.is_empty())
    }

    /// The offset of a place among the ranges; where none follows, the end of all.
    fn offset(&self, piece: usize, from: usize) -> u64 {
        self.pieces.get(piece).map_or(self.end, |piece| piece.at + from as u64)
    }

    /// The next chunk, with places that are offsets.
    fn cut(&self, cursor: &mut Cursor, most: usize, of_file: bool) -> Chunk {
        let at = self.offset(cursor.at.piece, cursor.at.from);
        let chunk = match of_file {
            true => self.cut_file(cursor, at, most),
            // A range has no address on the host.
            false => cut(cursor, most, false, |n| {
                let CopyRange { device, at } = self.pieces.get(n)?;
                Some(Piece { at: *at, ..Piece::new(std::ptr::null_mut(), device.len(), device) })
            }),
        };
        // Up to the first missing byte. Where ranges overlap, a later one may begin before it.
        let next = self.pieces.get(cursor.at.piece + 1).map_or(u64::MAX, |piece| piece.at);
        let landed_to = self.offset(cursor.at.piece, cursor.at.from).min(next);
        Chunk { at, landed_to, ..chunk }
    }

    /// A stretch of the file from `at` on with all ranges in it, which is read at once.
    fn cut_file(&self, cursor: &mut Cursor, at: u64, most: usize) -> Chunk {
        let len = (most / PAGE * PAGE).max(PAGE) as u64;
        // The file's bytes keep their place within a page. The next chunk starts on a page.
        let page = at - at % PAGE as u64;
        let most = page.saturating_add(len);
        let (mut cut, mut end, mut bytes, mut stretches) = (cursor.at, at, 0, Vec::new());
        while let Some(piece) = self.pieces.get(cut.piece) {
            let from = piece.at + cut.from as u64;
            // A range that overlaps another has chunks of its own.
            if bytes > 0 && (from < end || from >= most || from > end.saturating_add(GAP)) {
                break;
            }
            end = piece.end().min(most);
            let (offset, len) = ((from - page) as usize, (end - from) as usize);
            let place = DevicePtr(piece.device.address() + cut.from as u64);
            stretches.push(Stretch { place, offset, len, count: 1, stride: 0 });
            bytes += len;
            if piece.end() > most {
                cut.from += len;
                break;
            }
            cut = Cut { piece: cut.piece + 1, from: 0 };
        }
        cursor.cut_off(cut, bytes, stretches)
    }
}

/// Calls code of the program's, which may panic: that ends its transfer, and no thread.
fn guarded(call: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    foreign::call("a source or sink panicked: its transfer fails", call)
        .unwrap_or_else(|| Err(io::Error::other("it panicked; the panic's message is on standard error")))
}

/// What the program gave. The handle takes it at the end; a worker has a share meanwhile.
struct Given<T: Send + 'static>(Mutex<Option<Arc<Owned<T>>>>);

impl<T: Send + 'static> Given<T> {
    fn new(value: T) -> Self {
        Self(Mutex::new(Some(Arc::new(Owned::new(value)))))
    }

    fn share(&self) -> Result<Arc<Owned<T>>> {
        self.0.lock().clone().ok_or(Error::Closed)
    }

    fn back(&self, outcome: Result<()>) -> Result<T, SubmitError<T>> {
        let value = self.0.lock().take();
        // The job is over, so no worker has a share.
        let buffer = value.and_then(Arc::into_inner).map(Owned::into_inner);
        match (outcome, buffer) {
            (Ok(()), Some(value)) => Ok(value),
            (outcome, buffer) => Err(SubmitError { error: outcome.err().unwrap_or(Error::Closed), buffer }),
        }
    }
}

/// Ranges of a source as the plan of one job.
pub(super) struct Reads<S: Source> {
    source: Given<S>,
    ranges: Ranges,
    counters: Arc<Counters>,
    /// Chunks are stretches of a file, each read at once.
    of_file: bool,
}

impl<S: Source> Reads<S> {
    pub(super) fn new(source: S, ranges: Ranges, counters: Arc<Counters>) -> Self {
        let of_file = file_of(&source).is_some();
        Self { source: Given::new(source), ranges, counters, of_file }
    }
}

impl<S: Source> Plan for Reads<S> {
    fn kind(&self) -> Kind {
        let may_block = self.source.share().is_ok_and(|source| source.may_block(KEY));
        if may_block { Kind::Blocking } else { Kind::Staged }
    }

    fn file(&self) -> Option<usize> {
        self.source.share().ok().and_then(|source| file_of(&**source).map(FileSource::identity))
    }

    fn next(&self, cursor: &mut Cursor, most: usize) -> Chunk {
        self.ranges.cut(cursor, most, self.of_file)
    }

    fn fill(&self, chunk: &Chunk, segment: &mut PinnedBuf) -> Result<()> {
        let (ranges, source) = (&self.ranges, self.source.share()?);
        if let Some(file) = file_of(&**source) {
            let start = chunk.stretches.first().map_or(0, |first| first.offset);
            segment.clear();
            return file.read(chunk.at, chunk.data - start, segment, &self.counters);
        }
        let fill = |n: usize, into: &mut _| {
            let offset = ranges.offset(chunk.parts[n].piece, chunk.parts[n].from);
            let mut fill = Fill::new(into);
            let filled = guarded(|| source.fill(offset, &mut fill));
            let end = offset + fill.filled() as u64;
            filled.map_err(|error| read_error(&ranges.name, end, &error))?;
            match fill.remaining() {
                0 => Ok(()),
                _ => Err(shrunk(ranges.name.to_string(), end, ranges.end)),
            }
        };
        // SAFETY: a `Fill` counts what was written, and all of it was.
        unsafe { fill_parts(chunk, segment, fill) }
    }
}

impl<S: Source> Values<S> for Reads<S> {
    fn back(&self, outcome: Result<()>) -> Result<S, SubmitError<S>> {
        self.source.back(outcome)
    }
}

/// Ranges of a sink as the plan of one job.
pub(super) struct Writes<S: Sink> {
    sink: Given<S>,
    ranges: Ranges,
    /// The first byte of a vector.
    first: Option<AtomicPtr<u8>>,
}

impl<S: Sink> Writes<S> {
    /// # Errors
    /// With the sink as it was: no memory to write to, or ranges that overlap in memory.
    pub(super) fn new(mut sink: S, ranges: Ranges) -> Result<Self, SubmitError<S>> {
        let vector = source::vector_of(&mut sink);
        let room = vector.map(|vector| source::room(vector, ranges.end, ranges.overlap()));
        let (first, sink) = SubmitError::unless(room.transpose(), sink)?;
        Ok(Self { sink: Given::new(sink), ranges, first: first.map(AtomicPtr::new) })
    }
}

impl<S: Sink> Plan for Writes<S> {
    fn kind(&self) -> Kind {
        if self.first.is_none() { Kind::Blocking } else { Kind::Staged }
    }

    fn next(&self, cursor: &mut Cursor, most: usize) -> Chunk {
        self.ranges.cut(cursor, most, false)
    }

    fn drain(&self, chunk: &Chunk, bytes: &[u8]) -> Result<()> {
        let (ranges, sink) = (&self.ranges, self.sink.share()?);
        chunk.parts.iter().try_for_each(|part| {
            let (offset, bytes) = (ranges.offset(part.piece, part.from), part.of(bytes)?);
            let Some(first) = &self.first else {
                return guarded(|| sink.put(offset, bytes))
                    .map_err(|error| write_error(&ranges.name, lies_at(&**sink, offset), &error));
            };
            // SAFETY: the vector has room up to the end of its ranges, which nobody else uses
            // before the job is over. No two ranges overlap, and each byte is in one chunk.
            let to = unsafe {
                // Relaxed: it was written before the job was shared.
                let first = first.load(Ordering::Relaxed).add(offset as usize);
                std::slice::from_raw_parts_mut(first.cast(), bytes.len())
            };
            // Past the caches: the memory is read later, if at all.
            stores::stream(bytes, to);
            Ok(())
        })
    }
}

impl<S: Sink> Values<S> for Writes<S> {
    fn back(&self, outcome: Result<()>) -> Result<S, SubmitError<S>> {
        let mut sink = self.sink.back(outcome)?;
        if let Some(vector) = source::vector_of(&mut sink) {
            // SAFETY: there was room before the job began, and it has ended well.
            unsafe { source::grow(vector, self.ranges.gaps(), self.ranges.end) };
        }
        Ok(sink)
    }
}
