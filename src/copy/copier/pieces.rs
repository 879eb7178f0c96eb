//! Pieces: any number of (host bytes, device ranges), of any lengths and alignments, as the plan of
//! one job; in borrowed memory, or in pinned blocks whose bytes the device copies from or to where
//! they are.
//!
//! A call is looked at once before anything is copied ([`Survey`]). Chunks are cut as workers take
//! them, in the order of the call. A call may have a hundred thousand pages, so ranges at even
//! distances are one [`Piece`].
//!
//! No CPU moves the bytes of blocks. The copies of a chunk have a share of each block that they
//! use, and the job has one of all. A block goes back when its last share is dropped.

use std::mem::MaybeUninit;
use std::sync::Arc;

use super::chunk::{Chunk, Cursor, Cut, LONGEST_ROW, Part, ROW, Stretch};
use super::engine::Engine;
use super::job::{Plan, Values};
use super::stores;
use super::types::{Direction, Kind};
use crate::buffer::{Lend, PinnedBuf};
use crate::device::DevicePtr;
use crate::device::memory::{Allocation, DeviceSlice};
use crate::error::{Error, Result, SubmitError};
use crate::locks::Mutex;
use crate::sealed::KEY;
use crate::segment::PAGE;
use crate::stream::hold::Retain;

/// Places that are equal modulo this many bytes are copied by accesses of as many bytes.
const WIDTH: u64 = 16;
/// A piece is cut where the chunk ends only where at least so much of it fits.
const LEAST_PART: usize = 4 << 10;
/// Bytes of a segment beside those of the pieces: for the table, and for gaps.
const BESIDE: usize = 2 * PAGE;

/// What was found before anything is copied.
#[derive(Default)]
pub(super) struct Survey {
    pub(super) bytes: u64,
    /// Each allocation at least once.
    pub(super) memories: Vec<Arc<Allocation>>,
    /// Which of the memories the last piece was in. The pieces of a block of a cache are each in
    /// another one, and those of the next block in the same ones again.
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
        memory.check_is_of(engine.device.context())?;
        self.at = self.memories.len();
        self.memories.push(memory.allocation());
        Ok(())
    }
}

/// A piece of a call: ranges of one length at even distances on the device, which follow each other
/// on the host. Most have one range. (A cache of keys and values has a block's pages like that, one
/// in each plane.)
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) host: *mut u8,
    /// Bytes of a range, how many ranges there are, and the distance from one to the next.
    pub(super) len: usize,
    pub(super) count: usize,
    pub(super) stride: usize,
    pub(super) device: u64,
    /// The number of the allocation that the piece is in; in place, of the block. What is in two of
    /// them is copied apart.
    pub(super) group: u64,
    /// The piece's place in what is read or written, where pages count.
    pub(super) at: u64,
}

// SAFETY: an address, which means the same on every thread; each use says why it is valid.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Sync for Piece {}

impl Piece {
    /// The first bytes of device memory.
    pub(super) fn new(host: *mut u8, len: usize, memory: &DeviceSlice) -> Self {
        let (device, group) = (memory.address(), memory.allocation_number());
        Self { host, len, count: 1, stride: len, device, group, at: 0 }
    }
}

/// Cuts off a chunk of at most `full` bytes, and lays it out: for a segment, or in place. A piece
/// is cut on a page where it can be; in place, a range only where it is longer than a chunk.
pub(super) fn cut(
    cursor: &mut Cursor,
    full: usize,
    in_place: bool,
    piece: impl Fn(usize) -> Option<Piece>,
) -> Chunk {
    let (mut at, mut bytes, mut rows) = (cursor.at, 0, 0);
    let (mut parts, mut stretches): (Vec<Part>, Vec<Stretch>) = (Vec::new(), Vec::new());
    // The group of the last stretch.
    let mut group = None;
    'chunk: while let Some(next) = piece(at.piece) {
        let (mut range, mut from) =
            if at.from == 0 { (0, 0) } else { (at.from / next.len, at.from % next.len) };
        while range < next.count && next.len > 0 {
            let (left, step) = (next.len - from, next.stride.wrapping_mul(range).wrapping_add(from));
            let place = DevicePtr(next.device.wrapping_add(step as u64));
            let (last, is_new) = (stretches.last_mut(), group != Some(next.group));
            let used = last.as_ref().map_or(0, |last| last.offset + last.len * last.count);
            let ends = |last: &&mut Stretch| last.place.0.wrapping_add(last.len as u64) == place.0;
            let joined = last.filter(|last| !in_place && !is_new && ends(last));
            let offset = match in_place {
                false => used + (place.0.wrapping_sub(used as u64) % WIDTH) as usize,
                true if is_new => used.next_multiple_of(ROW),
                true => used,
            };
            let mut len = left.min(full - bytes).min(room_behind(full, offset, rows));
            let least = if in_place { left } else { left.min(LEAST_PART) };
            if len == 0 || len < least && bytes > 0 {
                break 'chunk;
            }
            if len < left {
                let start = next.at + at.from as u64;
                let on_page = ((start + len as u64) / PAGE as u64 * PAGE as u64).saturating_sub(start);
                len = if on_page > 0 { on_page as usize } else { len };
            }
            let rows_of = |len: usize| len.div_ceil(LONGEST_ROW);
            let mut count = 1;
            if in_place && range + 1 < next.count && len == next.len {
                let most = room_behind(full, offset, rows) / (len + rows_of(len) * ROW);
                count = most.min((full - bytes) / len).clamp(1, next.count - range);
            }
            match joined {
                Some(last) => {
                    rows += rows_of(last.len + len) - rows_of(last.len);
                    last.len += len;
                }
                None => {
                    rows += count * rows_of(len);
                    stretches.push(Stretch { place, offset, len, count, stride: next.stride });
                }
            }
            let moved = len * count;
            match parts.last_mut().filter(|_| in_place && !is_new) {
                Some(part) => part.len += moved,
                None => {
                    let number = if in_place { next.group as usize } else { at.piece };
                    let host = next.host.wrapping_add(at.from);
                    parts.push(Part { piece: number, from: at.from, host, offset, len: moved });
                }
            }
            group = Some(next.group);
            bytes += moved;
            at.from += moved;
            if len < left {
                break 'chunk;
            }
            (range, from) = (range + count, 0);
        }
        at = Cut { piece: at.piece + 1, from: 0 };
    }
    Chunk { parts, ..cursor.cut_off(at, bytes, stretches) }
}

/// Bytes that a chunk of `full` bytes has room for from `offset` in its segment on, behind
/// stretches with `rows` rows.
fn room_behind(full: usize, offset: usize, rows: usize) -> usize {
    // A row for these bytes, and one for the alignment of the table's end. Many bytes need a row
    // for each `LONGEST_ROW` of them.
    let table = (rows + 3) * ROW;
    let room = (full + BESIDE).saturating_sub(offset + table);
    room - room / (LONGEST_ROW / ROW)
}

/// Fills a chunk's segment: `fill` gets each part's number and place; gaps are zeroed.
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

// --- borrowed ------------------------------------------------------------------------------------

/// Memory that a caller lends, in pieces.
pub(super) struct Borrowed<F>(F);

// SAFETY: see `new`.
unsafe impl<F> Send for Borrowed<F> {}
// SAFETY: as above.
unsafe impl<F> Sync for Borrowed<F> {}

impl<F: Fn(usize) -> Option<Piece>> Borrowed<F> {
    /// # Safety
    /// Any thread may call `get`. While a job uses this, the pieces can be read, and are not
    /// written (for an upload); or can be written, and are not used otherwise (for a download).
    pub(super) unsafe fn new(get: F) -> Self {
        Self(get)
    }
}

impl<F: Fn(usize) -> Option<Piece>> Plan for Borrowed<F> {
    fn next(&self, cursor: &mut Cursor, most: usize) -> Chunk {
        cut(cursor, most, false, &self.0)
    }

    fn fill(&self, chunk: &Chunk, segment: &mut PinnedBuf) -> Result<()> {
        // SAFETY: all of the place is written. The piece can be read: the promise of `new`.
        unsafe {
            fill_parts(chunk, segment, |n, place| {
                if let Some(next) = chunk.parts.get(n + 1) {
                    announce(next.host, next.len);
                }
                let src = chunk.parts[n].host;
                std::ptr::copy_nonoverlapping(src, place.as_mut_ptr().cast(), place.len());
                Ok(())
            })
        }
    }

    fn drain(&self, chunk: &Chunk, bytes: &[u8]) -> Result<()> {
        chunk.parts.iter().try_for_each(|part| {
            let bytes = part.of(bytes)?;
            // SAFETY: within the piece, which is writable by `new`'s promise; a byte is in one
            // chunk.
            let to =
                unsafe { std::slice::from_raw_parts_mut(part.host.cast::<MaybeUninit<u8>>(), bytes.len()) };
            // Past the caches: the memory is read later, if at all.
            stores::stream(bytes, to);
            Ok(())
        })
    }
}

/// Has the processor fetch the beginnings of the pages of what is copied next: it goes on by itself
/// within a page, and stops at each page's end.
fn announce(at: *const u8, len: usize) {
    // Four lines of a page set the processor going.
    let lines = |page| (0..4).map(move |line| page + line * 64);
    (0..len).step_by(PAGE).flat_map(lines).for_each(|line| stores::fetch(at.wrapping_add(line)));
}

// --- pinned --------------------------------------------------------------------------------------

/// Pinned blocks: each is contiguous on the host and belongs to many places on the device.
pub(super) struct Paged<B: Lend> {
    pieces: Vec<Piece>,
    /// What the handle gives back, and for a download the bytes that are written to it.
    values: Mutex<Vec<(B, Option<usize>)>>,
    /// The job's share of each block, until it is over.
    blocks: Mutex<Vec<Arc<dyn Retain>>>,
}

impl<B: Lend> Paged<B> {
    /// `blocks`: each, as the handle gives it back, and its bytes.
    pub(super) fn new(
        direction: Direction,
        pieces: Vec<Piece>,
        blocks: impl Iterator<Item = (B, usize)>,
    ) -> Self {
        let lent = blocks.map(|(value, len)| {
            (value.lend(KEY).shared(), (value, (direction == Direction::Down).then_some(len)))
        });
        let (blocks, values): (Vec<_>, Vec<_>) = lent.unzip();
        Self { pieces, values: Mutex::new(values), blocks: Mutex::new(blocks) }
    }
}

impl<B: Lend> Plan for Paged<B> {
    fn kind(&self) -> Kind {
        Kind::InPlace
    }

    fn lend(&self, chunk: &Chunk) -> Option<Vec<Arc<dyn Retain>>> {
        let blocks = self.blocks.lock();
        chunk.parts.iter().map(|part| blocks.get(part.piece).cloned()).collect()
    }

    fn next(&self, cursor: &mut Cursor, most: usize) -> Chunk {
        cut(cursor, most, true, |n| self.pieces.get(n).copied())
    }
}

impl<B: Lend> Values<Vec<B>> for Paged<B> {
    fn back(&self, outcome: Result<()>) -> Result<Vec<B>, SubmitError<Vec<B>>> {
        let refused = |error| SubmitError { error, buffer: None };
        // After an error the drop lets the blocks go: the device may still use them.
        outcome.map_err(refused)?;
        // The job has ended well, so no chunk has a share any more: all blocks go back here.
        let blocks = std::mem::take(&mut *self.blocks.lock());
        drop(blocks);
        let values = std::mem::take(&mut *self.values.lock());
        let mut failed = None;
        let back = values.into_iter().filter_map(|(value, written)| match failed {
            None => value.finish(written, KEY).map_err(|error| failed = Some(error)).ok(),
            Some(_) => {
                value.abandon(KEY);
                None
            }
        });
        let back = back.collect();
        failed.map_or(Ok(back), |error| Err(refused(error)))
    }
}

impl<B: Lend> Drop for Paged<B> {
    fn drop(&mut self) {
        std::mem::take(self.values.get_mut()).into_iter().for_each(|(value, _)| value.abandon(KEY));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What pieces are made of: their group, device address, length, gap between ranges, and number
    /// of ranges; and where a piece of one range begins behind the one before, if it is to.
    type Made = ((u64, u64, usize, usize, usize), Option<u64>);

    fn made() -> impl Strategy<Value = Made> {
        let one =
            (0_u64..3, 0_u64..100_000, 0_usize..70_000).prop_map(|(group, at, len)| (group, at, len, 0, 1));
        let even = (0_u64..3, 0_u64..1 << 40, 1_usize..70_000, 0_usize..1 << 20, 1_usize..40);
        (prop_oneof![9 => one, 1 => even], prop::option::of(0_u64..3))
    }

    /// A chunk of even pages is cut off without a look at each page.
    #[test]
    fn even_pages_are_a_few_stretches_of_a_chunk() {
        const FULL: usize = 256 << 10;
        for (len, stride, count) in [(1, 64, 40_000), (4096, 1 << 20, 400), (20_000, 20_000, 99)] {
            let piece = Piece { host: std::ptr::null_mut(), len, count, stride, device: 64, group: 0, at: 0 };
            let mut cursor = Cursor { left: (len * count) as u64, ..Cursor::default() };
            while cursor.left > 0 {
                let chunk = cut(&mut cursor, FULL, true, |n| (n == 0).then_some(piece));
                assert!(chunk.stretches.len() < 5, "{len}: {:?}", chunk.stretches);
                assert!(chunk.table_at() + chunk.table_len() <= FULL + BESIDE, "{len}: {} rows", chunk.rows);
            }
        }
    }

    proptest! {
        /// Each byte of each piece is in one part, and goes to its place, between a segment or a
        /// slot and the device and between the pieces and the device. The table fits behind all of
        /// them.
        #[test]
        fn chunks_have_all_bytes_of_all_pieces(
            made in prop::collection::vec(made(), 1..60),
            full in PAGE..300_000,
            in_place in any::<bool>(),
        ) {
            let (mut pieces, mut block): (Vec<Piece>, u64) = (Vec::new(), 0);
            for ((group, device, len, gap, count), behind) in made {
                let (host, stride) = (std::ptr::null_mut(), len + gap);
                let mut piece = Piece { host, len, count, stride, device, group, at: 0 };
                let last = pieces.last().copied().zip(behind);
                if let Some((last, gap)) = last.filter(|_| count == 1) {
                    (piece.group, piece.device) = (last.group, last.device + last.len as u64 + gap);
                }
                let mut host = std::ptr::without_provenance_mut::<u8>((pieces.len() + 1) << 40);
                if in_place {
                    // The pieces of a block follow each other on the host.
                    block += u64::from(group == 0);
                    let last = pieces.last().filter(|last| last.group == block);
                    host = last.map_or(host, |last| last.host.wrapping_add(last.len * last.count));
                    piece.group = block;
                }
                pieces.push(Piece { host, ..piece });
            }
            let left = pieces.iter().map(|piece| (piece.len * piece.count) as u64).sum();
            let mut cursor = Cursor { left, ..Cursor::default() };
            // Where each byte is on the host and on the device: ranges that are due, and that come.
            let due = pieces.iter().flat_map(|piece| {
                (0..piece.count).map(|n| {
                    let (host, device) = (n * piece.len, (n * piece.stride) as u64);
                    (piece.host.addr() + host, piece.device + device, piece.len)
                })
            });
            let mut due = due.filter(|range| range.2 > 0);
            let mut open = None;
            while cursor.left > 0 {
                let chunk = cut(&mut cursor, full, in_place, |n| pieces.get(n).copied());
                prop_assert!(chunk.bytes > 0 && chunk.bytes <= full);
                prop_assert_eq!(chunk.parts.iter().map(|part| part.len).sum::<usize>(), chunk.bytes);
                prop_assert!(chunk.parts.is_sorted_by_key(|part| part.offset));
                prop_assert!(chunk.table_at() + chunk.table_len() <= full + BESIDE);
                // In a segment a stretch has several parts, each at its distance from the stretch's
                // place; in place, a part has several stretches.
                let (parts, stretches) = (&chunk.parts, chunk.stretches.iter().flat_map(Stretch::ranges));
                let stretches: Vec<_> = stretches.collect();
                let spans: Vec<_> = match in_place {
                    true => stretches.iter().map(|s| (s.offset, s.len)).collect(),
                    false => parts.iter().map(|p| (p.offset, p.len)).collect(),
                };
                let copies = spans.into_iter().map(|(at, len)| {
                    let part = parts.iter().find(|p| p.offset <= at && at + len <= p.offset + p.len).unwrap();
                    let stretch = stretches.iter().find(|s| s.offset <= at && at + len <= s.offset + s.len).unwrap();
                    let (from, to) = (at - part.offset, (at - stretch.offset) as u64);
                    (part.host.addr() + from, stretch.place.0 + to, len)
                });
                let is_wide = |s: &Stretch| s.place.0 % WIDTH == s.offset as u64 % WIDTH;
                prop_assert!(in_place || stretches.iter().all(is_wide));
                prop_assert!(!in_place || parts.iter().all(|part| part.offset % ROW == 0));
                for (mut host, mut device, mut len) in copies {
                    while len > 0 {
                        let (from, to, left) = open.take().or_else(|| due.next()).unwrap();
                        prop_assert_eq!((from, to), (host, device));
                        let now = len.min(left);
                        open = Some((from + now, to + now as u64, left - now)).filter(|range| range.2 > 0);
                        (host, device, len) = (host + now, device + now as u64, len - now);
                    }
                }
            }
            prop_assert!(open.is_none() && due.next().is_none());
        }
    }
}
