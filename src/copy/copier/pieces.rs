//! Pieces: any number of (host bytes, device range), of any lengths and alignments, as the work of one job.
//!
//! A call is looked at once before anything is copied ([`Survey`]): whether each piece can be copied, and which
//! allocations the job keeps. Chunks are cut as workers take them, in the order of the call, so that the first copy
//! starts while most of a long call is not cut yet.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use super::engine::Engine;
use super::job::{Chunk, Cursor, Cut, Direction, Job, Needs, Work};
use super::layout::{Layout, Stretch};
use super::lent::Lent;
use super::packing::{Content, Packed, Packing, Piece, Run, copy_out, unpack};
use super::way::IN_PLACE;
use crate::buffer::Lend;
use crate::buffer::sealed::Sealed as _;
use crate::copy::{Landing, written};
use crate::device::memory::{Allocation, DeviceSlice};
use crate::error::{Error, Result};
use crate::sealed::KEY;
use crate::segment::PAGE;
use crate::stream::Stream;
use crate::stream::timeline::{Resource, RetainedResource};

/// Bytes of a chunk at least, unless fewer are left. At the start the link waits for the first chunks, and at the end
/// there is nothing to be done beside the last ones: chunks there are short.
pub(super) const LEAST: usize = 256 << 10;
/// Copies and bytes of a chunk whose pieces are in place.
const MOST_IN_PLACE: (usize, usize) = (256, 32 << 20);

/// How the chunks of a call grow and shrink.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ramp {
    /// Bytes of a segment, and of the first chunk.
    most: usize,
    least: usize,
    /// Threads that take chunks.
    hands: usize,
}

impl Ramp {
    pub(super) fn new(engine: &Engine) -> Self {
        let most = engine.settings.chunk;
        Self { most, least: LEAST.min(most), hands: engine.settings.threads + 1 }
    }

    /// For chunks that no thread fills: the link waits for none of them, and long ones cost it least.
    pub(super) fn unfilled(engine: &Engine) -> Self {
        let Self { most, least, .. } = Self::new(engine);
        Self { most, least: least.max(most / 4), hands: 1 }
    }

    /// Bytes of the next chunk's segment that are used, where it has so much room.
    pub(super) fn next(&self, cursor: &Cursor, room: Option<usize>) -> usize {
        let Self { most, least, hands } = *self;
        let growing = least + (most - least) / hands * cursor.chunks.min(hands);
        let even = usize::try_from(cursor.left).unwrap_or(usize::MAX) / (2 * hands);
        even.clamp(least, growing.min(most).max(least)).min(room.unwrap_or(usize::MAX))
    }
}

/// What was found before anything is copied.
#[derive(Default)]
pub(super) struct Survey {
    pub(super) bytes: u64,
    /// The device memory, by address, for a transfer that has its place in the order of all.
    pub(super) spans: Vec<Range<u64>>,
    is_ordered: bool,
    pub(super) memories: Vec<Arc<Allocation>>,
    /// The place among them of each, by its number.
    known: HashMap<u64, usize>,
    /// Which of the memories the last piece was in. The pieces of a block of a cache are each in another one, and those of
    /// the next block in the same ones again.
    at: usize,
}

impl Survey {
    /// For a transfer that has its place in the order of all.
    pub(super) fn ordered() -> Self {
        Self { is_ordered: true, ..Self::default() }
    }

    /// The same, of one piece.
    pub(super) fn one(engine: &Engine, memory: &DeviceSlice, len: usize) -> Result<Self> {
        let mut survey = Self::ordered();
        survey.add(engine, memory, len).map(|()| survey)
    }

    /// Looks at a piece's device memory.
    #[inline]
    pub(super) fn add(&mut self, engine: &Engine, memory: &DeviceSlice, len: usize) -> Result<()> {
        Error::unless_fits(len, memory.len())?;
        self.bytes = self.bytes.saturating_add(len as u64);
        if self.is_ordered {
            let start = memory.address();
            match self.spans.last_mut().filter(|last| last.end == start) {
                Some(last) => last.end += len as u64,
                None => self.spans.push(start..start + len as u64),
            }
        }
        let number = memory.allocation_number();
        let next = if self.at + 1 < self.memories.len() { self.at + 1 } else { 0 };
        for at in [self.at, next] {
            if self.memories.get(at).is_some_and(|known| Arc::as_ptr(known).addr() as u64 == number) {
                self.at = at;
                return Ok(());
            }
        }
        if let Some(at) = self.known.get(&number) {
            self.at = *at;
            return Ok(());
        }
        memory.check_is_of(engine.device.context())?;
        self.at = self.memories.len();
        self.known.insert(number, self.at);
        self.memories.push(memory.allocation());
        Ok(())
    }
}

/// Cuts a chunk of so many bytes off, which goes through a segment. `fits`: whether a piece may be in it. `on_page`: where
/// a piece, by its number, is cut rather than behind so many of its bytes.
pub(super) fn cut(
    count: usize,
    piece: impl Fn(usize) -> Piece,
    fits: impl Fn(&Piece) -> bool,
    on_page: impl Fn(usize, usize) -> usize,
    full: usize,
    cursor: &mut Cursor,
) -> Chunk {
    let most = full + BESIDE;
    let mut layout = Layout::new(most);
    let (mut at, mut bytes) = (cursor.at, 0);
    while at.piece < count {
        let next = piece(at.piece);
        if at.from == next.len {
            at = Cut { piece: at.piece + 1, from: 0 };
            continue;
        }
        if bytes >= full || !fits(&next) && bytes > 0 {
            break;
        }
        let left = next.len - at.from;
        let device = next.device.wrapping_add(at.from as u64);
        let Some(part) = layout.put(next.memory, device, left.min(full - bytes)) else { break };
        let mut end = at.from + part.len;
        if part.len < left {
            end = Some(on_page(at.piece, end)).filter(|page| *page > at.from).unwrap_or(end);
        }
        bytes += end - at.from;
        at.from = end;
        if end < next.len {
            break;
        }
    }
    finish(cursor, at, bytes, Some(most))
}

/// For [`cut`]: memory has no pages that count.
fn anywhere(_: usize, end: usize) -> usize {
    end
}

/// Bytes of a segment beside those of the pieces: for the table, and for gaps.
const BESIDE: usize = 2 * PAGE;

/// Moves the cursor behind a chunk. In memory a place is the number of the call's bytes before it.
pub(super) fn finish(cursor: &mut Cursor, end: Cut, bytes: usize, most: Option<usize>) -> Chunk {
    let (at, landed_to) = (cursor.cut, cursor.cut + bytes as u64);
    let chunk = Chunk { index: cursor.chunks, start: cursor.at, end, bytes, at, landed_to, most };
    cursor.at = end;
    cursor.chunks += 1;
    cursor.cut = landed_to;
    cursor.left -= bytes as u64;
    chunk
}

/// Fills or lays out a chunk that goes through a segment.
///
/// # Safety
/// For an upload the pieces can be read, and no thread writes them meanwhile.
unsafe fn pack(chunk: &Chunk, packing: &mut Packing<'_>, piece: impl Fn(usize) -> Piece) -> Result<Content> {
    // SAFETY: all of the place is written. The caller promises that the piece can be read.
    unsafe {
        packing.put(chunk, piece, |_, this, from, place| {
            let src = this.host.add(from);
            std::ptr::copy_nonoverlapping(src, place.as_mut_ptr().cast(), place.len());
            Ok(())
        })
    }
}

/// Takes a chunk's bytes out of its segment.
///
/// # Safety
/// The pieces can be written, and no other thread uses the chunk's bytes of them.
unsafe fn unpack_memory(chunk: &Chunk, bytes: &[u8], piece: impl Fn(usize) -> Piece) -> Result<()> {
    unpack(chunk, bytes, piece, |_, this, from, bytes| {
        // SAFETY: within the piece; the caller's promise.
        unsafe { copy_out(bytes, this.host.add(from)) };
        Ok(())
    })
}

// --- borrowed --------------------------------------------------------------------------------------------------------

/// Memory that a caller lends, as so many pieces.
pub(super) struct Borrowed<F> {
    count: usize,
    get: F,
    ramp: Ramp,
}

// SAFETY: see `new`.
unsafe impl<F> Send for Borrowed<F> {}
// SAFETY: as above.
unsafe impl<F> Sync for Borrowed<F> {}

impl<F: Fn(usize) -> Piece> Borrowed<F> {
    /// # Safety
    /// Several threads may call `get` at once, with numbers less than `count`. For as long as this exists, the pieces
    /// that it gives can be read, and are not written (for an upload); or can be written, and are not used otherwise (for
    /// a download).
    pub(super) unsafe fn new(engine: &Engine, count: usize, get: F) -> Self {
        Self { count, get, ramp: Ramp::new(engine) }
    }
}

impl<F: Fn(usize) -> Piece> Work for Borrowed<F> {
    fn cut(&self, cursor: &mut Cursor, room: Option<usize>) -> Chunk {
        let most = self.ramp.next(cursor, room);
        cut(self.count, &self.get, |_| true, anywhere, most, cursor)
    }

    fn prepare(&self, chunk: &Chunk, packing: &mut Packing<'_>, _: &Job) -> Result<Content> {
        // SAFETY: the promise of `new`.
        unsafe { pack(chunk, packing, &self.get) }
    }

    fn drain(&self, chunk: &Chunk, bytes: &[u8]) -> Result<()> {
        // SAFETY: the promise of `new`; each byte is in one chunk.
        unsafe { unpack_memory(chunk, bytes, &self.get) }
    }
}

// --- owned -----------------------------------------------------------------------------------------------------------

/// What a handle gives back when its job is over.
pub(super) trait Values: Send + Sync {
    type Back;

    /// # Safety
    /// The job is over, without an error. Called at most once, as is `rescue`.
    unsafe fn take(&self) -> Result<Self::Back>;

    /// What can be given back though the job has failed or was cancelled.
    ///
    /// # Safety
    /// The job is over. Called at most once, as is `take`.
    unsafe fn rescue(&self) -> Option<Self::Back> {
        None
    }
}

impl Values for () {
    type Back = ();

    unsafe fn take(&self) -> Result<()> {
        Ok(())
    }
}

/// Which way pinned buffers of a job go.
pub(super) trait Side {
    const DIRECTION: Direction;
    /// What the caller gives: the buffer and, beside it, where on the device its bytes belong.
    type Given: Send;
    type Beside;
    /// What is left of it while it is lent.
    type Lent: Send;
    /// What comes back.
    type Back;

    fn beside(given: &Self::Given) -> &Self::Beside;

    /// What is read first to find the buffer's bytes, if that is elsewhere; else null.
    fn descriptor(given: &Self::Given) -> *const u8;

    /// The buffer's first byte; and how many there are, or for a download how many it has room for. An error: this stream's
    /// copies cannot use it.
    fn look(given: &mut Self::Given, stream: &Stream) -> Result<(*mut u8, usize)>;

    /// Lends it to the device, which then reads it, or writes so many bytes to it.
    fn lend(given: Self::Given, written: usize) -> (RetainedResource, Self::Lent, Self::Beside);

    /// The job has ended well: gives back what was not lent, but read by the CPU, or written, so many bytes.
    fn unlent(given: Self::Given, written: usize) -> Result<Self::Back>;

    /// The job is over: gives back what was lent.
    fn finish(lent: Self::Lent) -> Result<Self::Back>;

    /// The same where no handle asks for it.
    fn abandon(lent: Self::Lent);
}

/// Buffers on their way to the device.
pub(super) struct Up<B, M>(PhantomData<(B, M)>);

impl<B: Lend, M: Send> Side for Up<B, M> {
    const DIRECTION: Direction = Direction::Up;
    type Given = (B, M);
    type Beside = M;
    type Lent = B;
    type Back = B;

    fn beside((_, beside): &(B, M)) -> &M {
        beside
    }

    fn descriptor((value, _): &(B, M)) -> *const u8 {
        value.descriptor(KEY)
    }

    fn look((value, _): &mut (B, M), stream: &Stream) -> Result<(*mut u8, usize)> {
        stream.may_use(value)?;
        let bytes = written(value)?;
        Ok((bytes.as_ptr().cast_mut(), bytes.len()))
    }

    fn lend((value, beside): (B, M), _: usize) -> (RetainedResource, B, M) {
        (RetainedResource::of(value.lend(KEY)), value, beside)
    }

    fn unlent((value, _): (B, M), _: usize) -> Result<B> {
        Ok(value)
    }

    fn finish(value: B) -> Result<B> {
        value.finish(None, KEY)
    }

    fn abandon(value: B) {
        value.abandon(KEY);
    }
}

/// Buffers that bytes from the device go to.
pub(super) struct Down<L, M>(PhantomData<(L, M)>);

impl<L: Landing, M: Send> Side for Down<L, M> {
    const DIRECTION: Direction = Direction::Down;
    type Given = (M, L);
    type Beside = M;
    /// With the bytes that are written to it.
    type Lent = (L::Landed, usize);
    type Back = L::Landed;

    fn beside((beside, _): &(M, L)) -> &M {
        beside
    }

    fn descriptor((_, landing): &(M, L)) -> *const u8 {
        landing.descriptor(KEY)
    }

    fn look((_, landing): &mut (M, L), stream: &Stream) -> Result<(*mut u8, usize)> {
        landing.target(stream, KEY)
    }

    fn lend((beside, landing): (M, L), written: usize) -> (RetainedResource, Self::Lent, M) {
        let (resource, half) = landing.lend(KEY);
        (RetainedResource::of(resource), (L::Landed::from(half), written), beside)
    }

    fn unlent((_, landing): (M, L), written: usize) -> Result<L::Landed> {
        // SAFETY: the job has ended well, so all bytes of the range were copied to the buffer's start.
        let half = unsafe { landing.filled(written, KEY) };
        half.map(L::Landed::from).ok_or(Error::Internal("a buffer cannot be written by the CPU"))
    }

    fn finish((value, written): Self::Lent) -> Result<L::Landed> {
        value.finish(Some(written), KEY)
    }

    fn abandon((value, _): Self::Lent) {
        value.abandon(KEY);
    }
}

/// A buffer of a job. Where what is beside it is a [`DeviceSlice`], the caller's list becomes the job's in place: this is no
/// longer than what is given.
pub(super) enum Held<S: Side> {
    Given(S::Given),
    /// `None`: between the two.
    Lent(Option<S::Lent>),
}

impl<S: Side> Held<S> {
    /// Lends it. With what was given beside it.
    pub(super) fn lend(&mut self, written: usize) -> (RetainedResource, Option<S::Beside>) {
        match std::mem::replace(self, Self::Lent(None)) {
            Self::Given(given) => {
                let (resource, lent, beside) = S::lend(given, written);
                *self = Self::Lent(Some(lent));
                (resource, Some(beside))
            }
            // Not so: a piece in place is in one chunk.
            lent => {
                *self = lent;
                (RetainedResource::of(Resource::Object(Box::new(()))), None)
            }
        }
    }

    fn back(self, written: usize) -> Result<S::Back> {
        match self {
            Self::Given(given) => S::unlent(given, written),
            Self::Lent(Some(lent)) => S::finish(lent),
            Self::Lent(None) => Err(Error::Internal("a buffer was lost while it was lent")),
        }
    }

    fn abandon(self) {
        if let Self::Lent(Some(lent)) = self {
            S::abandon(lent);
        }
    }
}

/// The buffers of a job. Each is changed by one worker, which lends it, and after the job by the handle.
pub(super) struct List<S: Side>(pub(super) UnsafeCell<Vec<Held<S>>>);

// SAFETY: see above; what other workers read of a buffer is its address alone, which is not here.
unsafe impl<S: Side> Sync for List<S> {}

impl<S: Side> List<S> {
    /// Gives all back, those that were not lent with so many bytes written.
    ///
    /// # Safety
    /// The job is over, and this is called once.
    pub(super) unsafe fn take(&self, written: impl Iterator<Item = usize>) -> Result<Vec<S::Back>> {
        // SAFETY: no worker uses the list any more, and the caller is the only one that takes it.
        let values = std::mem::take(unsafe { &mut *self.0.get() });
        let mut failed = None;
        // In place: another list of many would be new memory.
        let back = values.into_iter().zip(written).filter_map(|(value, written)| match failed {
            None => value.back(written).map_err(|error| failed = Some(error)).ok(),
            Some(_) => {
                value.abandon();
                None
            }
        });
        let mut back: Vec<_> = back.collect();
        back.shrink_to_fit();
        failed.map_or(Ok(back), Err)
    }
}

impl<S: Side> Drop for List<S> {
    fn drop(&mut self) {
        std::mem::take(self.0.get_mut()).into_iter().for_each(Held::abandon);
    }
}

/// Pinned buffers that a job owns.
pub(super) struct Buffers<S: Side> {
    pieces: Vec<Piece>,
    values: List<S>,
    ramp: Ramp,
}

impl<S: Side> Buffers<S> {
    /// `pieces`: where each buffer's bytes are, in the order of the values.
    pub(super) fn new(pieces: Vec<Piece>, values: Vec<Held<S>>, ramp: Ramp) -> Self {
        Self { pieces, values: List(UnsafeCell::new(values)), ramp }
    }
}

/// Whether a piece is copied from or to where it is.
fn stays(piece: &Piece) -> bool {
    piece.len >= IN_PLACE
}

impl<S: Side> Work for Buffers<S> {
    fn needs(&self, cursor: &Cursor) -> Needs {
        let stays = self.pieces.get(cursor.at.piece).is_some_and(stays);
        match (stays, cursor.at.from) {
            (true, 0) => Needs::Nothing,
            (false, 0) => Needs::SegmentIfAny,
            // The rest of a piece whose other part was packed.
            _ => Needs::Segment,
        }
    }

    fn cut(&self, cursor: &mut Cursor, room: Option<usize>) -> Chunk {
        let most = self.ramp.next(cursor, room);
        let needs = self.needs(cursor);
        if room.is_some() && needs != Needs::Nothing {
            let (get, fits) = (|n: usize| self.pieces[n], |piece: &Piece| !stays(piece));
            return cut(self.pieces.len(), get, fits, anywhere, most, cursor);
        }
        let (most, most_bytes) = MOST_IN_PLACE;
        let (mut end, mut bytes) = (cursor.at.piece, 0);
        while end < self.pieces.len() && end - cursor.at.piece < most && bytes < most_bytes {
            // A short one joins only where there is no segment for it.
            if needs == Needs::Nothing && !stays(&self.pieces[end]) {
                break;
            }
            bytes += self.pieces[end].len;
            end += 1;
        }
        finish(cursor, Cut { piece: end, from: 0 }, bytes, None)
    }

    fn prepare(&self, chunk: &Chunk, packing: &mut Packing<'_>, _: &Job) -> Result<Content> {
        if chunk.most.is_some() {
            // SAFETY: the job owns the buffers, and no device writes to those that are packed.
            return unsafe { pack(chunk, packing, |n| self.pieces[n]) };
        }
        let (mut lent, mut runs, mut stretches, mut offset) = (Lent::default(), Vec::new(), Vec::new(), 0);
        for n in chunk.start.piece..chunk.end.piece {
            let piece = self.pieces[n];
            let Piece { host, len, .. } = piece;
            // SAFETY: the list is never changed in length while there are chunks, and this chunk alone has the entry.
            let value = unsafe { &mut *(*self.values.0.get()).as_mut_ptr().add(n) };
            lent.retained.push(value.lend(len).0);
            if len > 0 {
                runs.push(Run { host, offset, len });
                stretches.push(Stretch { place: piece.place(0), offset, len });
                offset += len;
            }
        }
        Ok(Content::Lent(Packed::new(runs, stretches), lent))
    }

    fn drain(&self, chunk: &Chunk, bytes: &[u8]) -> Result<()> {
        // SAFETY: the job owns the buffers, each of which can be written and is long enough; each byte is in one chunk.
        unsafe { unpack_memory(chunk, bytes, |n| self.pieces[n]) }
    }
}

impl<S: Side> Values for Buffers<S> {
    type Back = Vec<S::Back>;

    unsafe fn take(&self) -> Result<Vec<S::Back>> {
        // SAFETY: the caller's promise.
        unsafe { self.values.take(self.pieces.iter().map(|piece| piece.len)) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{Cursor, Cut, DeviceSlice, Down, Held, Ramp, Up};
    use crate::buffer::PinnedBuf;

    /// The lengths of the chunks of a call with so many bytes.
    fn chunks(ramp: Ramp, left: usize) -> Vec<usize> {
        let mut cursor = Cursor { at: Cut::default(), chunks: 0, cut: 0, left: left as u64 };
        let mut lens = Vec::new();
        while cursor.left > 0 {
            lens.push(ramp.next(&cursor, None).min(cursor.left as usize));
            cursor.chunks += 1;
            cursor.left -= lens.last().map_or(0, |len| *len as u64);
        }
        lens
    }

    /// In KiB: those that eight threads fill are short at both ends, so that all have some; others nearly never.
    #[test]
    fn chunks_that_no_thread_fills_are_long_at_once() {
        const MOST: usize = 4 << 20;
        let filled = chunks(Ramp { most: MOST, least: 256 << 10, hands: 9 }, 16 << 20);
        assert!(filled.len() > 16 && filled.iter().all(|len| *len < MOST / 4), "{filled:?}");
        let unfilled = chunks(Ramp { most: MOST, least: MOST / 4, hands: 1 }, 16 << 20);
        assert_eq!(
            unfilled.iter().map(|len| len >> 10).collect::<Vec<_>>(),
            [1024, 4096, 4096, 3584, 1792, 1024, 768]
        );
    }

    /// So the caller's list becomes the job's without another one.
    #[test]
    fn a_job_keeps_no_longer_entries_than_its_caller() {
        assert!(size_of::<Held<Up<PinnedBuf, DeviceSlice>>>() <= size_of::<(PinnedBuf, DeviceSlice)>());
        assert!(size_of::<Held<Down<PinnedBuf, DeviceSlice>>>() <= size_of::<(DeviceSlice, PinnedBuf)>());
        let list: Vec<(u64, u64)> = vec![(1, 2); 100];
        let before = list.as_ptr().addr();
        let became: Vec<[u64; 2]> = list.into_iter().enumerate().map(|(n, (a, _))| [a, n as u64]).collect();
        assert_eq!(became.as_ptr().addr(), before, "the standard library collects in place");
        let back: Vec<u64> =
            became.into_iter().zip(0..).filter_map(|([a, _], n)| (n < 99).then_some(a)).collect();
        assert_eq!((back.as_ptr().addr(), back.len()), (before, 99), "and so it does when they come back");
    }
}
