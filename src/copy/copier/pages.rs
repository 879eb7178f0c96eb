//! Pages: pinned blocks, each contiguous on the host, whose bytes belong to many places on the device, as the plan of one
//! job.
//!
//! No CPU moves the bytes. The device copies whole chunks of blocks to the ring, and a kernel spreads the pages there; or
//! the other way round. A call may have a hundred thousand pages, so it keeps none of the caller's lists: places at even
//! distances are one [`Series`], and the pages of a chunk are counted out where the chunk is prepared.

use std::ops::Range;
use std::sync::Arc;

use super::chunk::{Chunk, Cursor, Cut, LONGEST_ROW, ROW, Stretch};
use super::job::{Plan, Values};
use super::lent::Lent;
use super::packing::{Packed, Run};
use super::types::Direction;
use crate::buffer::Lend;
use crate::device::DevicePtr;
use crate::error::{Result, SubmitError};
use crate::locks::Mutex;
use crate::sealed::KEY;
use crate::stream::hold::{Resource, Retain};

/// Pages of one length at even distances on the device, which follow each other in a block. (A cache of keys and values
/// has a block's pages like that, one in each plane.)
#[derive(Clone, Copy, Debug)]
struct Series {
    /// Its bytes of the block.
    start: usize,
    end: usize,
    /// The first page, and from there to the next one.
    device: u64,
    stride: u64,
    /// Bytes of a page.
    len: usize,
}

/// What a table row, and what is lost to alignment where a block begins, add to so many bytes of a page at most.
fn with_rows(len: usize) -> usize {
    len + (2 + len / LONGEST_ROW) * ROW
}

/// A block's bytes: contiguous on the host, in pages on the device.
struct Laid {
    host: *mut u8,
    len: usize,
    /// Which of the call's series.
    series: Range<usize>,
}

// SAFETY: an address, which means the same on every thread; each use says why it is valid.
unsafe impl Send for Laid {}
// SAFETY: as above.
unsafe impl Sync for Laid {}

/// Where the blocks of a call are, on the host and on the device.
#[derive(Default)]
pub(super) struct Pages {
    blocks: Vec<Laid>,
    series: Vec<Series>,
}

impl Pages {
    /// Adds a block, whose first bytes are at `host`. Its pages are [put](Self::put) there.
    pub(super) fn add(&mut self, host: *mut u8) {
        self.blocks.push(Laid { host, len: 0, series: self.series.len()..self.series.len() });
    }

    /// Puts pages at the end of the block that was added last: so many of `len` bytes, the first one at `device`.
    pub(super) fn put(&mut self, device: u64, len: usize, stride: usize, count: usize) {
        let Some(block) = self.blocks.last_mut() else { return };
        let start = block.len;
        block.len = start.saturating_add(len.saturating_mul(count));
        let last = if block.series.is_empty() { None } else { self.series.last_mut() };
        if count > 1 || !last.is_some_and(|last| last.add(device, len)) {
            self.series.push(Series { start, end: block.len, device, stride: stride as u64, len });
            block.series.end += 1;
        }
    }

    /// Bytes of the block that was added last.
    pub(super) fn last(&self) -> usize {
        self.blocks.last().map_or(0, |block| block.len)
    }

    /// The series of a block that have its bytes from this one on.
    fn from(&self, block: &Laid, from: usize) -> &[Series] {
        let series = &self.series[block.series.clone()];
        &series[series.partition_point(|series| series.end <= from)..]
    }

    /// Cuts a chunk of at most so many bytes off, its rows included: between pages, and within a page only where one is
    /// longer than that.
    fn cut(&self, most: usize, cursor: &mut Cursor) -> Chunk {
        let (mut at, mut bytes, mut used) = (cursor.at, 0, 0);
        while let Some(block) = self.blocks.get(at.piece) {
            let Some(series) = self.from(block, at.from).first() else { break };
            let (_, left) = series.place(at.from);
            let room = (most - used).saturating_sub(ROW);
            let taken = if with_rows(left) <= room {
                let whole = (series.end - at.from - left) / series.len;
                let more = whole.min((room - with_rows(left)) / with_rows(series.len));
                used += with_rows(left) + more * with_rows(series.len);
                left + more * series.len
            } else if used == 0 {
                used = most;
                room - room / (LONGEST_ROW / ROW) - 2 * ROW
            } else {
                break;
            };
            bytes += taken;
            at.from += taken;
            if at.from == block.len {
                at = Cut { piece: at.piece + 1, from: 0 };
            }
        }
        cursor.cut_off(at, bytes)
    }

    /// Where the bytes of a chunk are.
    fn lay_out(&self, chunk: &Chunk) -> Packed {
        let (mut runs, mut stretches): (Vec<Run>, Vec<Stretch>) = (Vec::new(), Vec::new());
        let mut data = 0_usize;
        let Chunk { start, end, .. } = *chunk;
        let blocks = touched(chunk);
        for (n, block) in blocks.clone().zip(&self.blocks[blocks.clone()]) {
            let from = if n == start.piece { start.from } else { 0 };
            let to = if n == end.piece { end.from } else { block.len };
            // A copy for each block: the driver refuses one that reaches over two registrations.
            data = data.next_multiple_of(ROW);
            runs.push(Run { host: block.host.wrapping_add(from), offset: data, len: to - from });
            let mut at = from;
            for series in self.from(block, from).iter().take_while(|series| series.start < to) {
                while at < to.min(series.end) {
                    let (place, left) = series.place(at);
                    let len = left.min(to - at);
                    stretches.push(Stretch { place, offset: data, len });
                    at += len;
                    data += len;
                }
            }
        }
        Packed::new(runs, stretches)
    }
}

/// The blocks that a chunk has bytes of. (In a [`Cut`] of pages the piece is a block.)
fn touched(chunk: &Chunk) -> Range<usize> {
    chunk.start.piece..chunk.end.piece + usize::from(chunk.end.from > 0)
}

impl Series {
    /// Adds the block's next page, if it is one of the series: with the second page the distance is known.
    fn add(&mut self, device: u64, len: usize) -> bool {
        let count = ((self.end - self.start) / self.len) as u64;
        if count == 1 {
            self.stride = device.wrapping_sub(self.device);
        }
        let is_next = self.len == len && device == self.device.wrapping_add(count.wrapping_mul(self.stride));
        if is_next {
            self.end = self.end.saturating_add(len);
        }
        is_next
    }

    /// Where the block's byte `at` is on the device, and how many bytes there are from there to the page's end.
    fn place(&self, at: usize) -> (DevicePtr, usize) {
        let (page, from) = ((at - self.start) / self.len, (at - self.start) % self.len);
        let device = self.device.wrapping_add((page as u64).wrapping_mul(self.stride));
        (DevicePtr(device.wrapping_add(from as u64)), self.len - from)
    }
}

/// Pinned blocks, each of which is contiguous on the host and belongs to many places on the device.
pub(super) struct Paged<B: Lend> {
    pages: Pages,
    /// What the handle gives back, and for a download the bytes that are written to it.
    values: Mutex<Vec<(B, Option<usize>)>>,
    /// The job's shares of what is lent, until it is over.
    blocks: Mutex<Vec<Arc<dyn Retain>>>,
}

impl<B: Lend> Paged<B> {
    /// `lent`: each block as the device has it, and what the handle gives back, in the order of `pages`.
    pub(super) fn new(direction: Direction, pages: Pages, lent: Vec<(Resource, B)>) -> Self {
        let (mut blocks, mut values) = (Vec::new(), Vec::new());
        for ((resource, value), laid) in lent.into_iter().zip(&pages.blocks) {
            blocks.push(resource.shared());
            values.push((value, (direction == Direction::Down).then_some(laid.len)));
        }
        Self { pages, values: Mutex::new(values), blocks: Mutex::new(blocks) }
    }
}

impl<B: Lend> Plan for Paged<B> {
    fn needs_segment(&self) -> bool {
        false
    }

    fn next(&self, cursor: &mut Cursor, most: usize) -> Chunk {
        self.pages.cut(most, cursor)
    }

    fn lend(&self, chunk: &Chunk) -> Option<(Packed, Lent)> {
        let lent = Lent::new(self.blocks.lock().get(touched(chunk)).unwrap_or_default());
        Some((self.pages.lay_out(chunk), lent))
    }
}

impl<B: Lend> Values for Paged<B> {
    type Back = Vec<B>;

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
    use crate::device::Transfer;

    /// Pages as they are put: the first one's address, their length, distance and number.
    type Part = (u64, usize, usize, usize);

    /// A block's pages: at even distances, put together or one by one, or anywhere.
    fn block() -> impl Strategy<Value = Vec<Part>> {
        let even = (0_u64..1 << 40, 1_usize..70_000, 0_usize..1 << 20, 1_usize..40, any::<bool>()).prop_map(
            |(at, len, gap, count, together)| match together {
                true => vec![(at, len, len + gap, count)],
                false => (0..count).map(|n| (at + (n * (len + gap)) as u64, len, len, 1)).collect(),
            },
        );
        let falling = (1_u64 << 30..1 << 40, 1_usize..70_000, 0_u64..1 << 20, 1_u64..40)
            .prop_map(|(at, len, step, count)| (0..count).map(|n| (at - n * step, len, len, 1)).collect());
        let any = prop::collection::vec((0_u64..1 << 40, 1_usize..70_000), 1..20)
            .prop_map(|pages| pages.into_iter().map(|(at, len)| (at, len, len, 1)).collect());
        prop::collection::vec(prop_oneof![even, falling, any], 1..4)
            .prop_map(|parts: Vec<Vec<_>>| parts.concat())
    }

    /// The address and length of each page.
    fn pages_of(block: &[Part]) -> Vec<(u64, usize)> {
        let each =
            |&(at, len, stride, count): &Part| (0..count).map(move |n| (at + (n * stride) as u64, len));
        block.iter().flat_map(each).collect()
    }

    proptest! {
        /// Each byte of each block is in one chunk and goes where its page is. A chunk with its rows keeps to its length,
        /// and ends where the next page does not fit.
        #[test]
        fn chunks_have_all_pages(blocks in prop::collection::vec(block(), 1..6), most in 4_096_usize..300_000) {
            let mut pages = Pages::default();
            // A block of the host at every 2^40 bytes.
            let host = |n: usize| std::ptr::without_provenance_mut::<u8>((n + 1) << 40);
            for (n, block) in blocks.iter().enumerate() {
                pages.add(host(n));
                block.iter().for_each(|&(at, len, stride, count)| pages.put(at, len, stride, count));
                prop_assert_eq!(pages.last(), pages_of(block).iter().map(|page| page.1).sum::<usize>());
            }
            let left = pages.blocks.iter().map(|block| block.len as u64).sum();
            let mut cursor = Cursor { left, ..Cursor::default() };
            let mut copies = Vec::new();
            // Bytes of the next page, with its rows.
            let next = |at: Cut| {
                let series = pages.blocks.get(at.piece).map(|block| pages.from(block, at.from)[0]);
                series.map_or(usize::MAX / 2, |series| with_rows(series.place(at.from).1))
            };
            while cursor.left > 0 {
                let is_long = next(cursor.at) + ROW > most;
                let chunk = pages.cut(most, &mut cursor);
                let packed = pages.lay_out(&chunk);
                prop_assert!(chunk.bytes > 0 && packed.table_at() + packed.rows * ROW <= most);
                let found = packed.transfers(Direction::Up, None);
                let bytes: usize = found.iter().map(Transfer::len).sum();
                prop_assert_eq!(bytes, chunk.bytes);
                let used: usize = found.iter().map(|copy| with_rows(copy.len())).sum();
                prop_assert!(is_long || used + next(cursor.at) + ROW > most);
                prop_assert!(!is_long || bytes + most / 1000 + 5 * ROW >= most);
                copies.extend(found);
            }
            // The copies, joined where a page was cut, are the pages.
            let mut copies = copies.into_iter();
            for (n, block) in blocks.iter().enumerate() {
                let mut from = 0;
                for (device, len) in pages_of(block) {
                    let end = from + len;
                    let first = from;
                    while from < end {
                        let Some(Transfer::Upload { src, dst, len }) = copies.next() else { panic!("a copy is missing") };
                        prop_assert_eq!(src.addr(), host(n).addr() + from);
                        prop_assert_eq!(dst.0, device.wrapping_add((from - first) as u64));
                        from += len;
                    }
                    prop_assert_eq!(from, end);
                }
            }
            prop_assert!(copies.next().is_none());
        }
    }

    #[test]
    fn places_at_even_distances_are_one_series() {
        let mut pages = Pages::default();
        let mut add = |places: &[(u64, usize)]| {
            pages.add(std::ptr::null_mut());
            places.iter().for_each(|(device, len)| pages.put(*device, *len, *len, 1));
        };
        add(&(0..64).map(|n| (n << 20, 4096)).collect::<Vec<_>>());
        add(&(0..64).map(|n| ((n * n) << 20, 4096)).collect::<Vec<_>>());
        add(&[(0, 8), (100, 8), (200, 16), (300, 16)]);
        pages.add(std::ptr::null_mut());
        pages.put(0, 8, 1 << 20, 64);
        pages.put(64 << 20, 8, 8, 1);
        // Several at once are a series of their own, at the same distance too.
        pages.put(65 << 20, 8, 1 << 20, 3);
        let counts: Vec<usize> = pages.blocks.iter().map(|block| block.series.len()).collect();
        assert_eq!(
            counts,
            [1, 32, 2, 2],
            "the first series of the last block goes on with a page at its distance"
        );
        assert_eq!(pages.last(), 68 * 8);
    }
}
