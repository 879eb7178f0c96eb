//! Pieces: any number of (host bytes, device range), of any lengths and alignments, as the work of one job.
//!
//! A call is looked at once before anything is copied ([`Survey`]): whether each piece can be copied, and which
//! allocations the job keeps. Chunks are cut as workers take them, in the order of the call, so that the first copy
//! starts while most of a long call is not cut yet.

use std::cell::UnsafeCell;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use super::engine::Engine;
use super::job::{Chunk, Cursor, Cut, Direction, Job, Needs, Work};
use super::layout::{LONGEST_ROW, Layout, ROW, Stretch};
use super::lent::{Block, Lent};
use super::packing::{Content, Packing, Pages, Piece, Run, Unpacking, announce, copy_out, transfer};
use super::way::IN_PLACE;
use crate::buffer::Lend;
use crate::buffer::sealed::Lend as _;
use crate::copy::Landing;
use crate::device::DevicePtr;
use crate::device::memory::{Allocation, DeviceSlice};
use crate::error::{Error, Result};
use crate::sealed::KEY;
use crate::segment::PAGE;
use crate::stream::timeline::RetainedResource;

/// Bytes of a chunk at least, unless fewer are left. At the start the link waits for the first chunks, and at the end
/// there is nothing to be done beside the last ones: chunks there are short.
pub(super) const LEAST: usize = 256 << 10;
/// Copies and bytes of a chunk whose pieces are in place; and copies, where they are the rows of a rectangle, which the
/// device copies by one call.
const MOST_IN_PLACE: (usize, usize) = (256, 32 << 20);
const MOST_ROWS: usize = 1024;
/// Windows of three pieces that tell whether all are rows.
const SAMPLES: usize = 256;

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

    /// Bytes of the next chunk's segment that are used.
    pub(super) fn next(&self, cursor: &Cursor) -> usize {
        let Self { most, least, hands } = *self;
        let growing = least + (most - least) / hands * cursor.chunks.min(hands);
        let even = usize::try_from(cursor.left).unwrap_or(usize::MAX) / (2 * hands);
        even.clamp(least, growing.min(most).max(least))
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
    known: HashSet<u64>,
}

impl Survey {
    /// For a transfer that has its place in the order of all.
    pub(super) fn ordered() -> Self {
        Self { is_ordered: true, ..Self::default() }
    }

    /// Looks at a piece's device memory.
    #[inline]
    pub(super) fn add(&mut self, engine: &Engine, memory: &DeviceSlice, len: usize) -> Result<()> {
        if len > memory.len() {
            return Err(Error::TooSmall { need: len, have: memory.len() });
        }
        self.bytes += len as u64;
        if self.is_ordered {
            let start = memory.address();
            match self.spans.last_mut().filter(|last| last.end == start) {
                Some(last) => last.end += len as u64,
                None => self.spans.push(start..start + len as u64),
            }
        }
        let number = memory.allocation_number();
        if self.memories.last().is_some_and(|last| Arc::as_ptr(last).addr() as u64 == number) {
            return Ok(());
        }
        if !memory.is_of(engine.device.context()) {
            return Err(Error::WrongDevice { device: engine.device.name().into() });
        }
        if self.memories.is_empty() || self.known.insert(number) {
            if self.memories.is_empty() {
                self.known.insert(number);
            }
            engine.admit(memory)?;
            self.memories.push(memory.allocation());
        }
        Ok(())
    }
}

/// The parts of a chunk: each piece, and the bytes of it from where to where.
pub(super) fn parts(
    chunk: &Chunk,
    piece: impl Fn(usize) -> Piece,
) -> impl Iterator<Item = (Piece, usize, usize)> {
    let Chunk { start, end, .. } = *chunk;
    (start.piece..end.piece + usize::from(end.from > 0)).map(move |n| {
        let found = piece(n);
        let from = if n == start.piece { start.from } else { 0 };
        let to = if n == end.piece { end.from } else { found.len };
        (found, from, to)
    })
}

/// What a chunk that goes through a segment may have.
pub(super) struct Limits<F, P> {
    /// Bytes of the segment, the table included; and bytes of pieces.
    pub(super) most: usize,
    pub(super) bytes: usize,
    /// Whether a piece may be in it.
    pub(super) fits: F,
    /// Where a piece that would be cut behind so many of its bytes is cut rather, by its number.
    pub(super) on_page: P,
}

/// Cuts a chunk off that goes through a segment.
pub(super) fn cut(
    count: usize,
    piece: impl Fn(usize) -> Piece,
    limits: Limits<impl Fn(&Piece) -> bool, impl Fn(usize, usize) -> usize>,
    cursor: &mut Cursor,
) -> Chunk {
    let Limits { most, bytes: full, fits, on_page } = limits;
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

/// A chunk of pieces in memory, of so many bytes.
fn cut_memory(
    count: usize,
    piece: impl Fn(usize) -> Piece,
    fits: impl Fn(&Piece) -> bool,
    cursor: &mut Cursor,
    bytes: usize,
) -> Chunk {
    let most = bytes + BESIDE;
    cut(count, piece, Limits { most, bytes, fits, on_page: |_, end| end }, cursor)
}

/// Bytes of a segment beside those of the pieces: for the table, and for gaps.
pub(super) const BESIDE: usize = 2 * PAGE;

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
unsafe fn pack(
    chunk: &Chunk,
    packing: &mut Packing<'_>,
    is_read: bool,
    piece: impl Fn(usize) -> Piece,
) -> Result<Content> {
    let mut parts = parts(chunk, piece).peekable();
    while let Some((this, from, to)) = parts.next() {
        if let (true, Some((next, ..))) = (is_read, parts.peek()) {
            announce(next);
        }
        // SAFETY: all of the place is written. The caller promises that the piece can be read.
        unsafe {
            packing.put(&this, from, to, |from, place| {
                let src = this.host.add(from);
                std::ptr::copy_nonoverlapping(src, place.as_mut_ptr().cast(), place.len());
                Ok(())
            })?;
        }
    }
    Ok(Content::Packed)
}

/// Takes a chunk's bytes out of its segment.
///
/// # Safety
/// The pieces can be written, and no other thread uses the chunk's bytes of them.
unsafe fn unpack(chunk: &Chunk, bytes: &[u8], piece: impl Fn(usize) -> Piece) -> Result<()> {
    let mut unpacking = Unpacking::new(chunk.most.unwrap_or(0));
    for (this, from, to) in parts(chunk, piece) {
        unpacking.put(&this, from, to, bytes, |from, bytes| {
            // SAFETY: within the piece; the caller's promise.
            unsafe { copy_out(bytes, this.host.add(from)) };
            Ok(())
        })?;
    }
    Ok(())
}

// --- borrowed --------------------------------------------------------------------------------------------------------

/// Borrowed bytes on their way to the device.
pub(super) struct Slices<'a> {
    pub(super) pieces: &'a [(&'a [u8], DeviceSlice)],
    pub(super) ramp: Ramp,
}

impl Slices<'_> {
    fn get(&self, n: usize) -> Piece {
        let (bytes, memory) = &self.pieces[n];
        piece(bytes.as_ptr().cast_mut(), bytes.len(), memory)
    }
}

fn piece(host: *mut u8, len: usize, memory: &DeviceSlice) -> Piece {
    Piece { host, len, device: memory.address(), memory: memory.allocation_number() }
}

impl Work for Slices<'_> {
    fn cut(&self, cursor: &mut Cursor, _: bool) -> Chunk {
        let most = self.ramp.next(cursor);
        cut_memory(self.pieces.len(), |n| self.get(n), |_| true, cursor, most)
    }

    fn prepare(&self, chunk: &Chunk, packing: &mut Packing<'_>, _: &Job) -> Result<Content> {
        // SAFETY: shared borrows of bytes.
        unsafe { pack(chunk, packing, true, |n| self.get(n)) }
    }
}

/// Borrowed memory that bytes from the device go to.
pub(super) struct Targets<'a> {
    first: *mut (DeviceSlice, &'a mut [u8]),
    count: usize,
    pub(super) ramp: Ramp,
}

// SAFETY: the list is borrowed exclusively for as long as this exists. Each byte of the targets is written by one
// thread, and the list itself is only read.
unsafe impl Send for Targets<'_> {}
// SAFETY: as above.
unsafe impl Sync for Targets<'_> {}

impl<'a> Targets<'a> {
    pub(super) fn new(pieces: &mut [(DeviceSlice, &'a mut [u8])], ramp: Ramp) -> Self {
        Self { first: pieces.as_mut_ptr(), count: pieces.len(), ramp }
    }

    fn get(&self, n: usize) -> Piece {
        debug_assert!(n < self.count);
        // SAFETY: within the list, which is borrowed exclusively. The target's address is read without a borrow of the
        // target, whose bytes another thread may be writing.
        let (memory, target) = unsafe {
            let entry = self.first.add(n);
            (&(*entry).0, &raw mut *(*entry).1)
        };
        piece(target.cast(), memory.len(), memory)
    }
}

impl Work for Targets<'_> {
    fn cut(&self, cursor: &mut Cursor, _: bool) -> Chunk {
        let most = self.ramp.next(cursor);
        cut_memory(self.count, |n| self.get(n), |_| true, cursor, most)
    }

    fn prepare(&self, chunk: &Chunk, packing: &mut Packing<'_>, _: &Job) -> Result<Content> {
        // SAFETY: a download's chunk is laid out only.
        unsafe { pack(chunk, packing, false, |n| self.get(n)) }
    }

    fn drain(&self, chunk: &Chunk, bytes: &[u8]) -> Result<()> {
        // SAFETY: borrowed exclusively, each as long as its range at least, and each byte is in one chunk.
        unsafe { unpack(chunk, bytes, |n| self.get(n)) }
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

/// A pinned buffer of a job.
pub(super) trait Buffer: Send {
    /// What comes back.
    type Back;

    /// Lends it to the device, which then reads it, or writes so many bytes to it.
    fn lend(&mut self, written: usize) -> RetainedResource;

    /// The job is over: gives it back, with so many bytes written by the CPU where it was not lent.
    fn back(self, written: usize) -> Result<Self::Back>;

    /// The same where no handle asks for it.
    fn abandon(self);
}

/// A buffer on its way to the device, with what the caller gave beside it, for a call that is refused. Where that is a
/// [`DeviceSlice`], the caller's list becomes the job's in place: this is no longer than the pair.
pub(super) enum Up<B: Lend, M = ()> {
    Here(B, M),
    /// `None`: between the two.
    Lent(Option<B>),
}

impl<B: Lend, M> Up<B, M> {
    /// The caller's pair, unless the buffer was lent.
    pub(super) fn refused(self) -> Option<(B, M)> {
        match self {
            Self::Here(value, beside) => Some((value, beside)),
            Self::Lent(_) => None,
        }
    }
}

impl<B: Lend, M: Send> Buffer for Up<B, M> {
    type Back = B;

    fn lend(&mut self, _: usize) -> RetainedResource {
        match std::mem::replace(self, Self::Lent(None)) {
            Self::Here(value, _) => {
                let resource = RetainedResource::of(value.lend(KEY));
                *self = Self::Lent(Some(value));
                resource
            }
            other => lent_before(self, other),
        }
    }

    fn back(self, _: usize) -> Result<B> {
        match self {
            Self::Here(value, _) => Ok(value),
            Self::Lent(Some(value)) => value.finish(None, KEY),
            Self::Lent(None) => Err(LOST),
        }
    }

    fn abandon(self) {
        if let Self::Lent(Some(value)) = self {
            value.abandon(KEY);
        }
    }
}

/// A buffer that bytes from the device go to, with what the caller gave beside it: as [`Up`].
pub(super) enum Down<L: Landing, M = ()> {
    Here(L, M),
    /// With the bytes that are written to it. `None`: between the two.
    Lent(Option<(L::Landed, usize)>),
}

impl<L: Landing, M> Down<L, M> {
    /// The caller's pair, unless the buffer was lent.
    pub(super) fn refused(self) -> Option<(M, L)> {
        match self {
            Self::Here(landing, beside) => Some((beside, landing)),
            Self::Lent(_) => None,
        }
    }
}

impl<L: Landing, M: Send> Buffer for Down<L, M> {
    type Back = L::Landed;

    fn lend(&mut self, written: usize) -> RetainedResource {
        match std::mem::replace(self, Self::Lent(None)) {
            Self::Here(landing, _) => {
                let (resource, half) = landing.lend(KEY);
                *self = Self::Lent(Some((L::Landed::from(half), written)));
                RetainedResource::of(resource)
            }
            other => lent_before(self, other),
        }
    }

    fn back(self, written: usize) -> Result<L::Landed> {
        match self {
            // SAFETY: the job has ended well, so all bytes of the range were copied to the buffer's start.
            Self::Here(landing, _) => match unsafe { landing.filled(written, KEY) } {
                Some(half) => Ok(L::Landed::from(half)),
                None => Err(Error::Internal("a buffer cannot be written by the CPU")),
            },
            Self::Lent(Some((value, written))) => value.finish(Some(written), KEY),
            Self::Lent(None) => Err(LOST),
        }
    }

    fn abandon(self) {
        if let Self::Lent(Some((value, _))) = self {
            value.abandon(KEY);
        }
    }
}

const LOST: Error = Error::Internal("a buffer was lost while it was lent");

/// Not so: a piece in place is in one chunk.
#[cold]
fn lent_before<B>(place: &mut B, lent: B) -> RetainedResource {
    *place = lent;
    RetainedResource::of(crate::stream::timeline::Resource::Object(Box::new(())))
}

/// Pinned buffers that a job owns.
pub(super) struct Buffers<V: Buffer> {
    direction: Direction,
    pieces: Vec<Piece>,
    /// Each is changed by the worker that prepares the one chunk that it is in place in, and after the job by the
    /// handle.
    values: UnsafeCell<Vec<V>>,
    /// The pieces are the rows of rectangles, nearly all of them.
    rows: bool,
    ramp: Ramp,
}

// SAFETY: see `values`; what a chunk's worker reads of a packed buffer is its address alone.
unsafe impl<V: Buffer> Sync for Buffers<V> {}
// SAFETY: buffers and addresses.
unsafe impl<V: Buffer> Send for Buffers<V> {}

impl<V: Buffer> Buffers<V> {
    /// `pieces`: where each buffer's bytes are, in the order of the values.
    pub(super) fn new(direction: Direction, pieces: Vec<Piece>, values: Vec<V>, ramp: Ramp) -> Self {
        let rows = are_rows(&pieces);
        Self { direction, pieces, values: UnsafeCell::new(values), rows, ramp }
    }

    /// Whether a piece is copied from or to where it is.
    fn stays(&self, piece: &Piece) -> bool {
        self.rows || piece.len >= IN_PLACE
    }

    /// The values, none of which was lent: the job was never started.
    pub(super) fn into_values(mut self) -> Vec<V> {
        std::mem::take(self.values.get_mut())
    }
}

/// Whether pieces are mostly rows of rectangles, which the device copies at full speed from where they are: equally
/// long, and at even distances on both sides, in the order of the call.
fn are_rows(pieces: &[Piece]) -> bool {
    let windows = pieces.len().saturating_sub(2);
    let step = (windows / SAMPLES).max(1);
    let far = |a: &Piece, b: &Piece| {
        let follows = a.host.addr() < b.host.addr() && a.device < b.device && a.len == b.len;
        follows.then(|| (b.host.addr() - a.host.addr(), b.device - a.device))
    };
    let mut sampled = pieces.windows(3).step_by(step).peekable();
    if sampled.peek().is_none() {
        return false;
    }
    let (mut seen, mut even) = (0, 0);
    for window in sampled {
        let [a, b, c] = window else { continue };
        seen += 1;
        even += usize::from(far(a, b).is_some() && far(a, b) == far(b, c));
    }
    even >= seen - seen / 4
}

impl<V: Buffer> Work for Buffers<V> {
    fn needs(&self, cursor: &Cursor) -> Needs {
        let stays = self.pieces.get(cursor.at.piece).is_some_and(|piece| self.stays(piece));
        match (stays, cursor.at.from) {
            (true, 0) => Needs::Nothing,
            (false, 0) => Needs::SegmentIfAny,
            // The rest of a piece whose other part was packed.
            _ => Needs::Segment,
        }
    }

    fn cut(&self, cursor: &mut Cursor, has_segment: bool) -> Chunk {
        let most = self.ramp.next(cursor);
        let needs = self.needs(cursor);
        if has_segment && needs != Needs::Nothing {
            return cut_memory(
                self.pieces.len(),
                |n| self.pieces[n],
                |piece| !self.stays(piece),
                cursor,
                most,
            );
        }
        let most = if self.rows { MOST_ROWS } else { MOST_IN_PLACE.0 };
        let (mut end, mut bytes) = (cursor.at.piece, 0);
        while end < self.pieces.len() && end - cursor.at.piece < most && bytes < MOST_IN_PLACE.1 {
            // A short one joins only where there is no segment for it.
            if needs == Needs::Nothing && !self.stays(&self.pieces[end]) {
                break;
            }
            bytes += self.pieces[end].len;
            end += 1;
        }
        finish(cursor, Cut { piece: end, from: 0 }, bytes, None)
    }

    fn prepare(&self, chunk: &Chunk, packing: &mut Packing<'_>, _: &Job) -> Result<Content> {
        if chunk.most.is_some() {
            let is_read = self.direction == Direction::Up;
            // SAFETY: the job owns the buffers, and no device writes to those that are packed.
            return unsafe { pack(chunk, packing, is_read, |n| self.pieces[n]) };
        }
        let range = chunk.start.piece..chunk.end.piece;
        let mut transfers = Vec::with_capacity(range.len());
        let mut retained = Vec::with_capacity(range.len());
        for n in range {
            let Piece { host, len, device, .. } = self.pieces[n];
            // SAFETY: the list is never changed in length while there are chunks, and this chunk alone has the entry.
            let value = unsafe { &mut *(*self.values.get()).as_mut_ptr().add(n) };
            retained.push(value.lend(len));
            if len > 0 {
                transfers.push(transfer(self.direction, host, DevicePtr(device), len));
            }
        }
        Ok(Content::InPlace(transfers, Lent::buffers(retained)))
    }

    fn drain(&self, chunk: &Chunk, bytes: &[u8]) -> Result<()> {
        // SAFETY: the job owns the buffers, each of which can be written and is long enough; each byte is in one chunk.
        unsafe { unpack(chunk, bytes, |n| self.pieces[n]) }
    }
}

impl<V: Buffer> Values for Buffers<V> {
    type Back = Vec<V::Back>;

    unsafe fn take(&self) -> Result<Vec<V::Back>> {
        // SAFETY: the job is over, so no worker uses the list, and the caller is the only one that takes it.
        let values = std::mem::take(unsafe { &mut *self.values.get() });
        let mut left = values.into_iter().zip(&self.pieces);
        let mut back = Vec::with_capacity(left.len());
        while let Some((value, piece)) = left.next() {
            match value.back(piece.len) {
                Ok(value) => back.push(value),
                Err(error) => {
                    left.for_each(|(value, _)| value.abandon());
                    return Err(error);
                }
            }
        }
        Ok(back)
    }
}

impl<V: Buffer> Drop for Buffers<V> {
    fn drop(&mut self) {
        std::mem::take(self.values.get_mut()).into_iter().for_each(Buffer::abandon);
    }
}

// --- pages -----------------------------------------------------------------------------------------------------------

/// Pinned blocks, each of which is contiguous on the host and belongs to many places on the device.
pub(super) struct Paged<V: Buffer> {
    /// The pages of all blocks, block after block.
    pages: Vec<Piece>,
    /// The block of each page.
    owners: Vec<u32>,
    /// The blocks' values, with the bytes that belong to each; the job's shares of what is lent, until it is over.
    values: UnsafeCell<Vec<(V, usize)>>,
    blocks: UnsafeCell<Vec<Arc<Block>>>,
    ramp: Ramp,
}

// SAFETY: the cells are changed before the job starts and after it is over, and `blocks` is only read meanwhile.
unsafe impl<V: Buffer> Sync for Paged<V> {}
// SAFETY: buffers and addresses.
unsafe impl<V: Buffer> Send for Paged<V> {}

impl<V: Buffer> Paged<V> {
    /// `pages`: with the block that each belongs to. All blocks are lent from here on.
    pub(super) fn new(pages: Vec<(Piece, u32)>, mut values: Vec<(V, usize)>, ramp: Ramp) -> Self {
        let blocks = values.iter_mut().map(|(value, len)| Block::new(value.lend(*len))).collect();
        let (pages, owners) = pages.into_iter().unzip();
        Self { pages, owners, values: UnsafeCell::new(values), blocks: UnsafeCell::new(blocks), ramp }
    }

    /// The values: the job was never started, so no copy uses them.
    pub(super) fn into_values(mut self) -> Vec<Result<V::Back>> {
        self.blocks.get_mut().clear();
        let values = std::mem::take(self.values.get_mut());
        values.into_iter().map(|(value, len)| value.back(len)).collect()
    }
}

impl<V: Buffer> Work for Paged<V> {
    fn needs(&self, _: &Cursor) -> Needs {
        Needs::Nothing
    }

    fn cut(&self, cursor: &mut Cursor, _: bool) -> Chunk {
        let most = self.ramp.next(cursor);
        let (mut at, mut bytes, mut used) = (cursor.at, 0, 0);
        while let Some(page) = self.pages.get(at.piece) {
            let left = page.len - at.from;
            // Its row or rows, and what may be lost to alignment where a block begins.
            let room = (most - used).saturating_sub(3 * ROW);
            let len = left.min(room - room / (LONGEST_ROW / ROW));
            if len < left && used > 0 || len == 0 {
                break;
            }
            bytes += len;
            used += len + (2 + len / LONGEST_ROW) * ROW;
            at = if len == left {
                Cut { piece: at.piece + 1, from: 0 }
            } else {
                Cut { from: at.from + len, ..at }
            };
            if at.from > 0 {
                break;
            }
        }
        finish(cursor, at, bytes, None)
    }

    fn prepare(&self, chunk: &Chunk, _: &mut Packing<'_>, _: &Job) -> Result<Content> {
        // SAFETY: changed only before the job starts and after it is over.
        let blocks = unsafe { &*self.blocks.get() };
        let (mut runs, mut stretches): (Vec<Run>, Vec<Stretch>) = (Vec::new(), Vec::new());
        let mut lent = Lent::default();
        let (mut data, mut last) = (0_usize, None);
        let numbers = chunk.start.piece..;
        for (n, (page, from, to)) in numbers.zip(parts(chunk, |n| self.pages[n])) {
            let (owner, len) = (self.owners[n], to - from);
            let host = page.host.wrapping_add(from);
            if last != Some(owner) {
                lent.blocks.extend(blocks.get(owner as usize).cloned());
                last = Some(owner);
            }
            match runs.last_mut() {
                Some(run) if run.host.wrapping_add(run.len) == host => run.len += len,
                _ => {
                    data = data.next_multiple_of(ROW);
                    runs.push(Run { host, offset: data, len });
                }
            }
            let place = DevicePtr(page.device.wrapping_add(from as u64));
            stretches.push(Stretch { place, offset: data, len });
            data += len;
        }
        Ok(Content::Pages(Pages { runs, stretches, data, lent }))
    }
}

impl<V: Buffer> Values for Paged<V> {
    type Back = Vec<V::Back>;

    unsafe fn take(&self) -> Result<Vec<V::Back>> {
        // SAFETY: the job is over, so no worker uses the lists, and the caller is the only one that takes them.
        let (blocks, values) =
            unsafe { (std::mem::take(&mut *self.blocks.get()), std::mem::take(&mut *self.values.get())) };
        // The job has ended well, so no chunk has a share any more: all blocks go back here.
        drop(blocks);
        let mut left = values.into_iter();
        let mut back = Vec::with_capacity(left.len());
        while let Some((value, len)) = left.next() {
            match value.back(len) {
                Ok(value) => back.push(value),
                Err(error) => {
                    left.for_each(|(value, _)| value.abandon());
                    return Err(error);
                }
            }
        }
        Ok(back)
    }
}

impl<V: Buffer> Drop for Paged<V> {
    fn drop(&mut self) {
        std::mem::take(self.values.get_mut()).into_iter().for_each(|(value, _)| value.abandon());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{Cursor, Cut, DeviceSlice, Down, Ramp, Up};
    use crate::buffer::PinnedBuf;

    /// The lengths of the chunks of a call with so many bytes.
    fn chunks(ramp: Ramp, left: usize) -> Vec<usize> {
        let mut cursor = Cursor { at: Cut::default(), chunks: 0, cut: 0, left: left as u64 };
        let mut lens = Vec::new();
        while cursor.left > 0 {
            lens.push(ramp.next(&cursor).min(cursor.left as usize));
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
        assert!(size_of::<Up<PinnedBuf, DeviceSlice>>() <= size_of::<(PinnedBuf, DeviceSlice)>());
        assert!(size_of::<Down<PinnedBuf, DeviceSlice>>() <= size_of::<(DeviceSlice, PinnedBuf)>());
        let list: Vec<(u64, u64)> = vec![(1, 2); 100];
        let before = list.as_ptr().addr();
        let became: Vec<[u64; 2]> = list.into_iter().enumerate().map(|(n, (a, _))| [a, n as u64]).collect();
        assert_eq!(became.as_ptr().addr(), before, "the standard library collects in place");
    }
}
