//! Pieces: any number of (host bytes, device range), of any lengths and alignments, as the plan of one job.
//!
//! A call is looked at once before anything is copied ([`Survey`]): whether each piece can be copied, and which
//! allocations the job keeps. Chunks are cut as workers take them, in the order of the call, so that the first copy
//! starts while most of a long call is not cut yet.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::sync::Arc;

use super::chunk::{Chunk, Cursor, Cut, Layout, Part, Stretch};
use super::engine::Engine;
use super::job::Plan;
use super::stores;
use super::types::Settings;
use crate::buffer::PinnedBuf;
use crate::device::DevicePtr;
use crate::device::memory::{Allocation, DeviceSlice};
use crate::error::{Error, Result};
use crate::segment::PAGE;

/// Bytes of a chunk at least, unless fewer are left. At the start the link waits for the first chunks, and at the end
/// there is nothing to be done beside the last ones: chunks there are short.
pub(super) const LEAST: usize = 256 << 10;

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
    pub(super) fn new(settings: &Settings) -> Self {
        let most = settings.chunk;
        Self { most, least: LEAST.min(most), hands: settings.threads.max(1) }
    }

    /// For chunks that no thread fills: the link waits for none of them, and long ones cost it least.
    pub(super) fn unfilled(settings: &Settings) -> Self {
        let Self { most, least, .. } = Self::new(settings);
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
    pub(super) memories: Vec<Arc<Allocation>>,
    /// The place among them of each, by its number.
    known: HashMap<u64, usize>,
    /// Which of the memories the last piece was in. The pieces of a block of a cache are each in another one, and those of
    /// the next block in the same ones again.
    at: usize,
}

impl Survey {
    /// Looks at a call of one piece.
    pub(super) fn one(engine: &Engine, memory: &DeviceSlice, len: usize) -> Result<Self> {
        let mut survey = Self::default();
        survey.add(engine, memory, len).map(|()| survey)
    }

    /// Looks at a piece's device memory.
    #[inline]
    pub(super) fn add(&mut self, engine: &Engine, memory: &DeviceSlice, len: usize) -> Result<()> {
        Error::unless_fits(len, memory.len())?;
        self.bytes = self.bytes.saturating_add(len as u64);
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

/// A piece of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) host: *mut u8,
    pub(super) len: usize,
    pub(super) device: u64,
    /// The number of the allocation that it is in.
    pub(super) memory: u64,
}

// SAFETY: an address, which means the same on every thread; each use says why it is valid.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Sync for Piece {}

impl Piece {
    /// The first bytes of device memory.
    pub(super) fn new(host: *mut u8, len: usize, memory: &DeviceSlice) -> Self {
        Self { host, len, device: memory.address(), memory: memory.allocation_number() }
    }
}

/// Cuts off a chunk of so many bytes, which goes through a segment, and lays it out. `on_page`: where a piece, by its
/// number, is cut rather than behind so many of its bytes.
pub(super) fn cut(
    count: usize,
    piece: impl Fn(usize) -> Piece,
    on_page: impl Fn(usize, usize) -> usize,
    full: usize,
    cursor: &mut Cursor,
) -> Chunk {
    let most = full + BESIDE;
    let mut layout = Layout::new(most);
    let (mut at, mut bytes) = (cursor.at, 0);
    let (mut parts, mut stretches): (Vec<Part>, Vec<Stretch>) = (Vec::new(), Vec::new());
    while at.piece < count {
        let next = piece(at.piece);
        if at.from == next.len {
            at = Cut { piece: at.piece + 1, from: 0 };
            continue;
        }
        if bytes >= full {
            break;
        }
        let left = next.len - at.from;
        let device = next.device.wrapping_add(at.from as u64);
        let Some(put) = layout.put(next.memory, device, left.min(full - bytes)) else { break };
        let mut end = at.from + put.len;
        if put.len < left {
            end = Some(on_page(at.piece, end)).filter(|page| *page > at.from).unwrap_or(end);
        }
        let (offset, len) = (put.offset, end - at.from);
        match stretches.last_mut() {
            Some(last) if put.joins => last.len += len,
            _ => stretches.push(Stretch { place: DevicePtr(device), offset, len }),
        }
        parts.push(Part { piece: at.piece, from: at.from, offset, len });
        bytes += len;
        at.from = end;
        if end < next.len {
            break;
        }
    }
    Chunk { parts, stretches, ..cursor.cut_off(at, bytes) }
}

/// Fills a chunk's segment: `fill` is given each part's number and place, and the gaps between are zeroed.
///
/// # Safety
/// `fill` has written all bytes of the place that it is given when it returns `Ok`.
pub(super) unsafe fn fill_parts(
    chunk: &Chunk,
    segment: &mut PinnedBuf,
    mut fill: impl FnMut(usize, &mut [MaybeUninit<u8>]) -> Result<()>,
) -> Result<()> {
    let (base, room) = (segment.as_mut_ptr(), segment.capacity());
    let mut end = 0;
    for (n, part) in chunk.parts.iter().enumerate() {
        if part.offset < end || part.offset + part.len > room {
            return Err(Error::Internal("a chunk is longer than its segment"));
        }
        // SAFETY: within the segment, which is borrowed exclusively.
        let place = unsafe {
            base.add(end).write_bytes(0, part.offset - end);
            std::slice::from_raw_parts_mut(base.add(part.offset).cast(), part.len)
        };
        end = part.offset + part.len;
        fill(n, place)?;
    }
    Ok(())
}

/// For [`cut`]: memory has no pages that count.
fn anywhere(_: usize, end: usize) -> usize {
    end
}

/// Bytes of a segment beside those of the pieces: for the table, and for gaps.
const BESIDE: usize = 2 * PAGE;

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
        Self { count, get, ramp: Ramp::new(&engine.settings) }
    }
}

impl<F: Fn(usize) -> Piece> Plan for Borrowed<F> {
    fn next(&self, cursor: &mut Cursor, room: Option<usize>) -> Chunk {
        let most = self.ramp.next(cursor, room);
        cut(self.count, &self.get, anywhere, most, cursor)
    }

    fn fill(&self, chunk: &Chunk, segment: &mut PinnedBuf) -> Result<()> {
        let host = |part: &Part| (self.get)(part.piece).host.wrapping_add(part.from);
        // SAFETY: all of the place is written. The piece can be read: the promise of `new`.
        unsafe {
            fill_parts(chunk, segment, |n, place| {
                if let Some(next) = chunk.parts.get(n + 1) {
                    announce(host(next), next.len);
                }
                let src = host(&chunk.parts[n]);
                std::ptr::copy_nonoverlapping(src, place.as_mut_ptr().cast(), place.len());
                Ok(())
            })
        }
    }

    fn drain(&self, chunk: &Chunk, bytes: &[u8]) -> Result<()> {
        chunk.parts.iter().try_for_each(|part| {
            let (bytes, to) = (part.of(bytes)?, (self.get)(part.piece).host);
            // SAFETY: within the piece, which can be written: the promise of `new`. Each byte is in one chunk.
            unsafe { copy_out(bytes, to.add(part.from)) };
            Ok(())
        })
    }
}

/// Copies bytes out of a segment, past the caches: the memory that they go to is read later, if at all.
///
/// # Safety
/// As many bytes can be written at `to`, and no other thread uses them.
unsafe fn copy_out(from: &[u8], to: *mut u8) {
    // SAFETY: the caller's promise.
    let target = unsafe { std::slice::from_raw_parts_mut(to.cast::<MaybeUninit<u8>>(), from.len()) };
    stores::stream(from, target);
}

/// Has the processor fetch the beginnings of the pages of what is copied next: it goes on by itself within a page, and
/// stops at each page's end.
fn announce(at: *const u8, len: usize) {
    /// What the processor fetches ahead within, and the lines of it that set it going.
    const PAGE: usize = 4096;
    const LINES: usize = 4;
    for page in (0..len).step_by(PAGE) {
        (0..LINES).for_each(|line| stores::fetch(at.wrapping_add(page + line * 64)));
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

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Each byte of each piece is in one part, and in one stretch that leads to its place; a chunk fits its segment.
        #[test]
        fn chunks_have_all_bytes_of_all_pieces(
            lens in prop::collection::vec(0_usize..20_000, 1..40),
            gaps in prop::collection::vec(0_u64..3, 40),
            full in PAGE..60_000,
        ) {
            let (mut pieces, mut device) = (Vec::new(), 0);
            for (n, len) in lens.into_iter().enumerate() {
                device += gaps[n];
                pieces.push(Piece { host: std::ptr::null_mut(), len, device, memory: 0 });
                device += len as u64;
            }
            let left = pieces.iter().map(|piece| piece.len as u64).sum();
            let mut cursor = Cursor { left, ..Cursor::default() };
            let mut seen = vec![0; pieces.len()];
            while cursor.left > 0 {
                let chunk = cut(pieces.len(), |n| pieces[n], anywhere, full, &mut cursor);
                prop_assert!(chunk.bytes > 0 && chunk.bytes <= full);
                prop_assert_eq!(chunk.parts.iter().map(|part| part.len).sum::<usize>(), chunk.bytes);
                prop_assert_eq!(chunk.stretches.iter().map(|stretch| stretch.len).sum::<usize>(), chunk.bytes);
                let mut end = 0;
                for part in &chunk.parts {
                    prop_assert_eq!(part.from, seen[part.piece], "in order, without a gap");
                    prop_assert!(part.offset >= end);
                    (seen[part.piece], end) = (part.from + part.len, part.offset + part.len);
                    let has = |stretch: &&Stretch| part.offset >= stretch.offset && end <= stretch.offset + stretch.len;
                    let stretch = chunk.stretches.iter().find(has).unwrap();
                    let place = stretch.place.0 + (part.offset - stretch.offset) as u64;
                    prop_assert_eq!(place, pieces[part.piece].device + part.from as u64);
                }
                prop_assert!(end <= full + BESIDE);
            }
            prop_assert!(pieces.iter().zip(seen).all(|(piece, seen)| piece.len == seen));
        }
    }

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
}
