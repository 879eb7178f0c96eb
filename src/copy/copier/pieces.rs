//! Pieces: any number of (host bytes, device range), of any lengths and alignments, as the plan of one job.
//!
//! A call is looked at once before anything is copied ([`Survey`]): whether each piece can be copied, and which
//! allocations the job keeps. Chunks are cut as workers take them, in the order of the call, so that the first copy
//! starts while most of a long call is not cut yet.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::sync::Arc;

use super::chunk::{Chunk, Cursor, Cut, LONGEST_ROW, Part, ROW, Stretch};
use super::engine::Engine;
use super::job::Plan;
use super::stores;
use crate::buffer::PinnedBuf;
use crate::device::DevicePtr;
use crate::device::memory::{Allocation, DeviceSlice};
use crate::error::{Error, Result};
use crate::segment::PAGE;

/// Places that are equal modulo this many bytes are copied by accesses of as many bytes.
const WIDTH: u64 = 16;
/// A piece is cut where the segment ends only where at least so much of it fits.
const LEAST_PART: usize = 4 << 10;

/// What was found before anything is copied.
#[derive(Default)]
pub(super) struct Survey {
    pub(super) bytes: u64,
    pub(super) memories: Vec<Arc<Allocation>>,
    /// The place among them of each, by its number.
    known: HashMap<u64, usize>,
    /// Which of the memories the last piece was in. The pieces of a block of a cache are each in another one, and those
    /// of the next block in the same ones again.
    at: usize,
}

impl Survey {
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
    /// Its place in what is read or written, whose pages count: of files that are read or written past the page cache,
    /// whole ones are.
    pub(super) at: u64,
}

// SAFETY: an address, which means the same on every thread; each use says why it is valid.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Sync for Piece {}

impl Piece {
    /// The first bytes of device memory.
    pub(super) fn new(host: *mut u8, len: usize, memory: &DeviceSlice) -> Self {
        Self { host, len, device: memory.address(), memory: memory.allocation_number(), at: 0 }
    }
}

/// Cuts off a chunk of so many bytes, which goes through a segment, and lays it out. A piece is cut on a page where it
/// can be.
pub(super) fn cut(count: usize, piece: impl Fn(usize) -> Piece, full: usize, cursor: &mut Cursor) -> Chunk {
    let (mut at, mut bytes) = (cursor.at, 0);
    let (mut parts, mut stretches): (Vec<Part>, Vec<Stretch>) = (Vec::new(), Vec::new());
    // Rows of all stretches but the last one, and the allocation that the last one is in.
    let (mut rows, mut memory) = (0, u64::MAX);
    while at.piece < count {
        let next = piece(at.piece);
        let left = next.len - at.from;
        if left == 0 {
            at = Cut { piece: at.piece + 1, from: 0 };
            continue;
        }
        if bytes >= full {
            break;
        }
        let device = next.device.wrapping_add(at.from as u64);
        let last = stretches.last_mut();
        let (used, last_rows, ends) = last.as_ref().map_or((0, 0, None), |last| {
            let ends = last.place.0.wrapping_add(last.len as u64);
            (last.offset + last.len, last.len.div_ceil(LONGEST_ROW), Some((memory, ends)))
        });
        let joins = ends == Some((next.memory, device));
        let gap = if joins { 0 } else { (device.wrapping_sub(used as u64) % WIDTH) as usize };
        let offset = used + gap;
        let (wanted, room) = (left.min(full - bytes), room_behind(full, offset, rows + last_rows));
        if room < wanted && (room < LEAST_PART && used > 0) || room == 0 {
            break;
        }
        let mut len = wanted.min(room);
        if len < left {
            let end = next.at + (at.from + len) as u64;
            let on_page = (end / PAGE as u64 * PAGE as u64).saturating_sub(next.at + at.from as u64);
            len = if on_page > 0 { on_page as usize } else { len };
        }
        match last {
            Some(last) if joins => last.len += len,
            _ => {
                (rows, memory) = (rows + last_rows, next.memory);
                stretches.push(Stretch { place: DevicePtr(device), offset, len });
            }
        }
        parts.push(Part { piece: at.piece, from: at.from, offset, len });
        bytes += len;
        at.from += len;
        if len < left {
            break;
        }
    }
    Chunk { parts, ..cursor.cut_off(at, bytes, stretches) }
}

/// Bytes that a chunk of `full` bytes has room for from this place in its segment on, behind stretches with so many
/// rows.
fn room_behind(full: usize, offset: usize, rows: usize) -> usize {
    // Two rows more than there are: that of the bytes, and one for the end of the table's alignment. Many bytes need a
    // row for each `LONGEST_ROW` of them.
    let table = (rows + 3) * ROW;
    let room = (full + BESIDE).saturating_sub(offset + table);
    room - room / (LONGEST_ROW / ROW)
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

/// Bytes of a segment beside those of the pieces: for the table, and for gaps.
const BESIDE: usize = 2 * PAGE;

// --- borrowed --------------------------------------------------------------------------------------------------------

/// Memory that a caller lends, as so many pieces.
pub(super) struct Borrowed<F> {
    count: usize,
    get: F,
}

// SAFETY: see `new`.
unsafe impl<F> Send for Borrowed<F> {}
// SAFETY: as above.
unsafe impl<F> Sync for Borrowed<F> {}

impl<F: Fn(usize) -> Piece> Borrowed<F> {
    /// # Safety
    /// Several threads may call `get` at once, with numbers less than `count`. While a job uses this, the pieces can be
    /// read, and are not written (for an upload); or can be written, and are not used otherwise (for a download).
    pub(super) unsafe fn new(count: usize, get: F) -> Self {
        Self { count, get }
    }
}

impl<F: Fn(usize) -> Piece> Plan for Borrowed<F> {
    fn next(&self, cursor: &mut Cursor, most: usize) -> Chunk {
        cut(self.count, &self.get, most, cursor)
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
            let (bytes, to) = (part.of(bytes)?, (self.get)(part.piece).host.cast::<MaybeUninit<u8>>());
            // SAFETY: within the piece, which can be written: the promise of `new`. Each byte is in one chunk.
            let target = unsafe { std::slice::from_raw_parts_mut(to.add(part.from), bytes.len()) };
            // Past the caches: the memory is read later, if at all.
            stores::stream(bytes, target);
            Ok(())
        })
    }
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

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Each byte of each piece is in one part, and in one stretch that leads to its place. Parts do not overlap.
        /// Only neighbours on the device are one stretch, and the table fits behind all of them.
        #[test]
        fn chunks_have_all_bytes_of_all_pieces(
            places in prop::collection::vec((0_u64..3, 0_u64..100_000, 0_usize..40_000), 1..60),
            gaps in prop::collection::vec(prop::option::of(0_u64..3), 60),
            full in PAGE..200_000,
        ) {
            let mut pieces: Vec<Piece> = Vec::new();
            for (&(memory, device, len), gap) in places.iter().zip(gaps) {
                let host = std::ptr::null_mut();
                let behind = pieces.last().zip(gap);
                let behind = behind.map(|(last, gap)| (last.memory, last.device + last.len as u64 + gap));
                let (memory, device) = behind.unwrap_or((memory, device));
                pieces.push(Piece { host, len, device, memory, at: 0 });
            }
            let left = pieces.iter().map(|piece| piece.len as u64).sum();
            let mut cursor = Cursor { left, ..Cursor::default() };
            let mut seen = vec![0; pieces.len()];
            while cursor.left > 0 {
                let chunk = cut(pieces.len(), |n| pieces[n], full, &mut cursor);
                prop_assert!(chunk.bytes > 0 && chunk.bytes <= full);
                prop_assert_eq!(chunk.parts.iter().map(|part| part.len).sum::<usize>(), chunk.bytes);
                prop_assert_eq!(chunk.stretches.iter().map(|stretch| stretch.len).sum::<usize>(), chunk.bytes);
                let mut end = 0;
                // Of each stretch its allocation, and where it ends.
                let mut ends: Vec<Option<(u64, u64)>> = vec![None; chunk.stretches.len()];
                for part in &chunk.parts {
                    prop_assert_eq!(part.from, seen[part.piece], "in order, without a gap");
                    prop_assert!(part.len > 0 && part.offset >= end);
                    (seen[part.piece], end) = (part.from + part.len, part.offset + part.len);
                    let has = |stretch: &Stretch| part.offset >= stretch.offset && end <= stretch.offset + stretch.len;
                    let n = chunk.stretches.iter().position(has).unwrap();
                    let stretch = &chunk.stretches[n];
                    let Piece { device, memory, .. } = pieces[part.piece];
                    let device = device + part.from as u64;
                    prop_assert_eq!(stretch.place.0 + (part.offset - stretch.offset) as u64, device);
                    prop_assert!(ends[n].is_none_or(|end| end == (memory, device)));
                    ends[n] = Some((memory, device + part.len as u64));
                }
                prop_assert!(chunk.stretches.iter().all(|s| s.place.0 % WIDTH == s.offset as u64 % WIDTH));
                let rows: usize = chunk.stretches.iter().map(|stretch| stretch.rows().count()).sum();
                prop_assert_eq!((rows * ROW, end), (chunk.table_len(), chunk.data));
                prop_assert!(chunk.table_at() + rows * ROW <= full + BESIDE);
            }
            prop_assert!(pieces.iter().zip(seen).all(|(piece, seen)| piece.len == seen));
        }
    }
}
