//! Pages: pinned blocks, each contiguous on the host, whose bytes belong to many places on the device, as the plan of
//! one job.
//!
//! No CPU moves the bytes. The device copies whole chunks of blocks to the ring, and a kernel spreads the pages there;
//! or the other way round. A call may have a hundred thousand pages, so it keeps none of the caller's lists: places at
//! even distances are one [`Series`], and pages are counted out when their chunk is cut off.
//!
//! The copies of a chunk have a share of each block that they use, and the job has one of all. A block goes back when
//! its last share is dropped.

use std::sync::Arc;

use super::chunk::{Chunk, Cursor, Cut, LONGEST_ROW, ROW, Run, Stretch};
use super::job::{Plan, Values};
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
    /// Which of the call's blocks, and where the first page's bytes are.
    block: usize,
    host: *mut u8,
    /// The first page, and from there to the next one.
    device: u64,
    stride: u64,
    /// Bytes of a page, and how many there are.
    len: usize,
    count: usize,
}

// SAFETY: an address, which means the same on every thread; each use says why it is valid.
unsafe impl Send for Series {}
// SAFETY: as above.
unsafe impl Sync for Series {}

/// What a table row, and what is lost to alignment where a block begins, add to so many bytes of a page at most.
fn with_rows(len: usize) -> usize {
    len + (2 + len / LONGEST_ROW) * ROW
}

/// Where the blocks of a call are, on the host and on the device.
#[derive(Default)]
pub(super) struct Pages {
    series: Vec<Series>,
    /// Where each block begins, and how many bytes its pages have.
    blocks: Vec<(*mut u8, usize)>,
}

// SAFETY: as for `Series`.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Adds a block, whose first bytes are at `host`. Its pages are [put](Self::put) there.
    pub(super) fn add(&mut self, host: *mut u8) {
        self.blocks.push((host, 0));
    }

    /// Puts pages at the end of the block that was added last: so many of `len` bytes, the first one at `device`.
    pub(super) fn put(&mut self, device: u64, len: usize, stride: usize, count: usize) {
        let block = self.blocks.len().saturating_sub(1);
        let Some((host, used)) = self.blocks.last_mut() else { return };
        let (host, stride) = (host.wrapping_add(*used), stride as u64);
        self.series.push(Series { block, host, device, stride, len, count });
        *used = used.saturating_add(len.saturating_mul(count));
    }

    /// Bytes of the block that was added last.
    pub(super) fn last(&self) -> usize {
        self.blocks.last().map_or(0, |(_, len)| *len)
    }

    /// Cuts a chunk of at most so many bytes off, its rows included: between pages, and within a page only where one is
    /// longer than that. (In a [`Cut`] of pages the piece is a series.)
    fn cut(&self, most: usize, cursor: &mut Cursor) -> Chunk {
        let (mut at, mut bytes, mut used, mut data) = (cursor.at, 0, 0, 0_usize);
        let (mut runs, mut stretches): (Vec<Run>, Vec<Stretch>) = (Vec::new(), Vec::new());
        let mut last_block = None;
        while let Some(series) = self.series.get(at.piece).filter(|_| used < most) {
            // A copy for each block: the driver refuses one that reaches over two registrations.
            if last_block != Some(series.block) {
                last_block = Some(series.block);
                data = data.next_multiple_of(ROW);
                let (host, block) = (series.host.wrapping_add(at.from), series.block);
                runs.push(Run { host, offset: data, len: 0, block });
            }
            let (mut page, mut from) = (at.from / series.len, at.from % series.len);
            let start = data;
            while page < series.count {
                let (left, room) = (series.len - from, (most - used).saturating_sub(ROW));
                let mut len = left;
                if with_rows(left) <= room {
                    used += with_rows(left);
                } else if used == 0 {
                    len = room - room / (LONGEST_ROW / ROW) - 2 * ROW;
                    used = most;
                } else {
                    used = most;
                    break;
                }
                let place = series.device.wrapping_add(series.stride.wrapping_mul(page as u64));
                let place = DevicePtr(place.wrapping_add(from as u64));
                stretches.push(Stretch { place, offset: data, len });
                data += len;
                (page, from) = if len == left { (page + 1, 0) } else { (page, from + len) };
            }
            let cut = data - start;
            bytes += cut;
            runs.last_mut().into_iter().for_each(|run| run.len += cut);
            at.from += cut;
            if page == series.count {
                at = Cut { piece: at.piece + 1, from: 0 };
            }
        }
        runs.retain(|run| run.len > 0);
        Chunk { runs, ..cursor.cut_off(at, bytes, stretches) }
    }
}

/// Pinned blocks, each of which is contiguous on the host and belongs to many places on the device.
pub(super) struct Paged<B: Lend> {
    pages: Pages,
    /// What the handle gives back, and for a download the bytes that are written to it.
    values: Mutex<Vec<(B, Option<usize>)>>,
    /// The job's share of each block, until it is over.
    blocks: Mutex<Vec<Arc<dyn Retain>>>,
}

impl<B: Lend> Paged<B> {
    /// `lent`: each block as the device has it, and what the handle gives back, in the order of `pages`.
    pub(super) fn new(direction: Direction, pages: Pages, lent: Vec<(Resource, B)>) -> Self {
        let (mut blocks, mut values) = (Vec::new(), Vec::new());
        for ((resource, value), (_, len)) in lent.into_iter().zip(&pages.blocks) {
            blocks.push(resource.shared());
            values.push((value, (direction == Direction::Down).then_some(*len)));
        }
        Self { pages, values: Mutex::new(values), blocks: Mutex::new(blocks) }
    }
}

impl<B: Lend> Plan for Paged<B> {
    fn is_in_place(&self) -> bool {
        true
    }

    fn lend(&self, chunk: &Chunk) -> Option<Vec<Arc<dyn Retain>>> {
        let blocks = self.blocks.lock();
        chunk.runs.iter().map(|run| blocks.get(run.block).cloned()).collect()
    }

    fn next(&self, cursor: &mut Cursor, most: usize) -> Chunk {
        self.pages.cut(most, cursor)
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

    /// A block's pages: at even distances, or anywhere.
    fn block() -> impl Strategy<Value = Vec<Part>> {
        let even = (0_u64..1 << 40, 1_usize..70_000, 0_usize..1 << 20, 1_usize..40)
            .prop_map(|(at, len, gap, count)| (at, len, len + gap, count));
        let any = (0_u64..1 << 40, 1_usize..70_000).prop_map(|(at, len)| (at, len, len, 1));
        prop::collection::vec(prop_oneof![1 => even, 9 => any], 1..40)
    }

    /// The address and length of each page.
    fn pages_of(block: &[Part]) -> Vec<(u64, usize)> {
        let each =
            |&(at, len, stride, count): &Part| (0..count).map(move |n| (at + (n * stride) as u64, len));
        block.iter().flat_map(each).collect()
    }

    proptest! {
        /// Each byte of each block is in one chunk and goes where its page is. A chunk with its rows keeps to its
        /// length, and ends where the next page does not fit.
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
            let left = pages.blocks.iter().map(|(_, len)| *len as u64).sum();
            let mut cursor = Cursor { left, ..Cursor::default() };
            let mut copies = Vec::new();
            // Bytes of the next page, with its rows.
            let next = |at: Cut| {
                let left = pages.series.get(at.piece).map(|series| series.len - at.from % series.len);
                left.map_or(usize::MAX / 2, with_rows)
            };
            while cursor.left > 0 {
                let is_long = next(cursor.at) + ROW > most;
                let chunk = pages.cut(most, &mut cursor);
                prop_assert!(chunk.bytes > 0 && chunk.table_at() + chunk.table_len() <= most);
                let found = chunk.transfers(Direction::Up, None, None);
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
}
