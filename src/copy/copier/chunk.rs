//! What a chunk is, and where its bytes lie on both sides: arithmetic only. `route` says by which way
//! they go.
//!
//! ```text
//!   pieces on the device   [a][b]........[c].....
//!   the segment            [a][b]-[c]---|table]      a and b are one stretch, c is another one
//! ```
//!
//! Pieces that follow each other on the device, in one allocation, follow each other in the
//! segment: they are one *stretch*, which one copy moves. Every other stretch starts at an offset
//! that equals its device address modulo 16, since a kernel moves 16 bytes at a time. The table of
//! rows is last.
//!
//! The bytes of a chunk in place stay where the program has them: each of its *parts* is contiguous
//! there, and is copied through the ring to the same offset of a slot.

use super::device_ring::Slot;
use super::types::{Direction, Settings};
use crate::buffer::PinnedBuf;
use crate::device::{DevicePtr, SpreadRow, Transfer};
use crate::error::{Error, Result};

/// Bytes of a row of the table.
pub(super) const ROW: usize = size_of::<SpreadRow>();
/// The longest stretch of a row: the warps of a kernel share its rows, and one warp alone takes
/// long for a long one.
pub(super) const LONGEST_ROW: usize = 16 << 10;

/// The shortest chunk, unless fewer bytes are left. The link waits for the first chunks, and
/// nothing runs beside the last ones: these are short.
pub(super) const LEAST: usize = 256 << 10;

/// A place in a call's pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) piece: usize,
    /// Bytes of that piece before the place.
    pub(super) from: usize,
}

/// How far a call is cut into chunks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cursor {
    pub(super) at: Cut,
    /// Chunks so far, and bytes in them.
    pub(super) chunks: usize,
    pub(super) cut: u64,
    /// Bytes that are in none of them.
    pub(super) left: u64,
}

impl Cursor {
    /// Cuts off the next chunk: the `bytes` up to `end`, in these stretches. Its place is the
    /// number of the call's bytes before it.
    pub(super) fn cut_off(&mut self, end: Cut, bytes: usize, stretches: Vec<Stretch>) -> Chunk {
        let (index, at, landed_to) = (self.chunks, self.cut, self.cut + bytes as u64);
        self.at = end;
        self.chunks += 1;
        self.cut = landed_to;
        self.left -= bytes as u64;
        let data = stretches.last().map_or(0, |last| last.offset + last.len * last.count);
        let rows = stretches.iter().map(|each| each.count * each.len.div_ceil(LONGEST_ROW)).sum();
        Chunk { index, bytes, at, landed_to, parts: Vec::new(), stretches, data, rows }
    }
}

/// A part of a call that one worker moves.
#[derive(Debug)]
pub(super) struct Chunk {
    /// The chunk's place in the order of the call.
    pub(super) index: usize,
    pub(super) bytes: usize,
    /// Where the chunk's first byte lies in what the call reads or writes, for errors.
    pub(super) at: u64,
    /// [`Progress::landed_to`](super::Progress::landed_to) once it and all before it arrived.
    pub(super) landed_to: u64,
    /// Where the bytes are on the host, in the call's order: pieces that are filled or drained one
    /// by one, or parts of a chunk in place, where no stretch is in two of them.
    pub(super) parts: Vec<Part>,
    /// Where the bytes belong on the device.
    pub(super) stretches: Vec<Stretch>,
    /// Bytes before the table, and rows of it.
    pub(super) data: usize,
    pub(super) rows: usize,
}

impl Chunk {
    /// Where the table is in a slot, and in a segment.
    pub(super) fn table_at(&self) -> usize {
        self.data.next_multiple_of(ROW)
    }

    pub(super) fn table_len(&self) -> usize {
        self.rows * ROW
    }

    /// Writes the table.
    ///
    /// # Safety
    /// `at` is a multiple of a row's size, and has room for all rows.
    pub(super) unsafe fn write_table(&self, at: *mut u8) {
        let first = at.cast::<SpreadRow>();
        let rows = self.stretches.iter().flat_map(Stretch::ranges).flat_map(
            |Stretch { place, offset, len, .. }| {
                (0..len).step_by(LONGEST_ROW).map(move |from| SpreadRow {
                    place: DevicePtr(place.0 + from as u64),
                    // A segment is shorter than 4 GiB: see `CopierBuilder::chunk`.
                    offset: (offset + from) as u32,
                    len: (len - from).min(LONGEST_ROW) as u32,
                })
            },
        );
        // SAFETY: the caller's promise.
        rows.enumerate().for_each(|(n, row)| unsafe { first.add(n).write(row) });
    }

    /// Sets a segment's length to what is copied from it: the bytes, which are there, and for a
    /// chunk that goes `by_ring` the table, which is written now.
    pub(super) fn close(&self, direction: Direction, segment: &mut PinnedBuf, by_ring: bool) {
        let (host, at) = (segment.as_mut_ptr(), self.table_at());
        if by_ring {
            // SAFETY: there is room for the table, at a multiple of its rows' size from the
            // segment's start, a multiple of 64. The bytes between data and table are zeroed.
            unsafe {
                host.add(self.data).write_bytes(0, at - self.data);
                self.write_table(host.add(at));
            }
        }
        let len = match direction {
            Direction::Down => 0,
            Direction::Up if by_ring => at + self.table_len(),
            Direction::Up => self.data,
        };
        // SAFETY: written above and by who has filled the segment, without a gap.
        unsafe { segment.set_len(len) };
    }

    /// Copies between the host and a slot, or the places on the device. `segment`: the first of the
    /// host's bytes, and how many there are; else they are in the parts. The copies stay within
    /// these, and within the slot or the stretches.
    pub(super) fn transfers(
        &self,
        direction: Direction,
        segment: Option<(*mut u8, usize)>,
        slot: Option<&Slot>,
    ) -> Vec<Transfer> {
        let segment = segment.map(|(host, len)| Part { host, piece: 0, from: 0, offset: 0, len });
        let parts = segment.as_ref().map_or(&*self.parts, std::slice::from_ref);
        if let Some(slot) = slot {
            let copy = |part: &Part| transfer(direction, part.host, slot.at(part.offset), part.len);
            return parts.iter().map(copy).collect();
        }
        let mut parts = parts.iter().peekable();
        let copy = |stretch: Stretch| {
            while parts.next_if(|part| part.offset + part.len <= stretch.offset).is_some() {}
            let part = parts.peek()?;
            let host = part.host.wrapping_add(stretch.offset - part.offset);
            Some(transfer(direction, host, stretch.place, stretch.len))
        };
        self.stretches.iter().flat_map(Stretch::ranges).filter_map(copy).collect()
    }
}

/// A copy in this direction.
pub(super) fn transfer(direction: Direction, host: *mut u8, device: DevicePtr, len: usize) -> Transfer {
    match direction {
        Direction::Up => Transfer::Upload { src: host, dst: device, len },
        Direction::Down => Transfer::Download { src: device, dst: host, len },
    }
}

/// Contiguous host memory, or bytes of one piece, in one chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// The piece's number in the call, and where in it the part begins. In place: the block's.
    pub(super) piece: usize,
    pub(super) from: usize,
    /// The first byte, where it has an address.
    pub(super) host: *mut u8,
    /// The part's place in the segment, or among the bytes of the chunk.
    pub(super) offset: usize,
    pub(super) len: usize,
}

// SAFETY: an address, which means the same on every thread; each use says why it is valid.
unsafe impl Send for Part {}

impl Part {
    /// The part's bytes in a segment.
    pub(super) fn of<'a>(&self, segment: &'a [u8]) -> Result<&'a [u8]> {
        let short = Error::Internal("a chunk is shorter than its layout");
        segment.get(self.offset..self.offset + self.len).ok_or(short)
    }
}

/// How the chunks of a call grow and shrink.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ramp {
    /// Bytes of a segment, and of the first chunk.
    pub(super) most: usize,
    pub(super) least: usize,
    /// Threads that take chunks.
    pub(super) hands: usize,
}

impl Ramp {
    /// Chunks `in_place`, which no thread fills, are long: that costs the link least.
    pub(super) fn new(settings: &Settings, in_place: bool) -> Self {
        let (most, least) = (settings.chunk, LEAST.min(settings.chunk));
        match in_place {
            true => Self { most, least: least.max(most / 4), hands: 1 },
            false => Self { most, least, hands: settings.workers().max(1) },
        }
    }

    /// The bytes of the next chunk, at most `room`.
    pub(super) fn next(&self, cursor: &Cursor, room: Option<usize>) -> usize {
        let Self { most, least, hands } = *self;
        let growing = least + (most - least) / hands * cursor.chunks.min(hands);
        let even = usize::try_from(cursor.left).unwrap_or(usize::MAX) / (2 * hands);
        even.clamp(least, growing.min(most).max(least)).min(room.unwrap_or(usize::MAX))
    }
}

/// Bytes that are contiguous on the device and in the segment; in place, `count` ranges of them,
/// `stride` apart on the device. So a chunk of even pages is cut off, under the job's lock, without
/// a look at each page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) place: DevicePtr,
    pub(super) offset: usize,
    pub(super) len: usize,
    pub(super) count: usize,
    pub(super) stride: usize,
}

impl Stretch {
    /// The ranges, each as a stretch.
    pub(super) fn ranges(&self) -> impl Iterator<Item = Self> {
        let Self { place: DevicePtr(first), offset, len, count, stride } = *self;
        (0..count).map(move |n| {
            let place = DevicePtr(first.wrapping_add(stride.wrapping_mul(n) as u64));
            Self { place, offset: offset + n * len, len, count: 1, stride }
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Chunks that eight threads fill are short at both ends, so that all have some.
    #[test]
    fn chunks_that_no_thread_fills_are_long_at_once() {
        const MOST: usize = 4 << 20;
        let chunks = |least, hands| {
            let (ramp, mut cursor) =
                (Ramp { most: MOST, least, hands }, Cursor { left: 16 << 20, ..Cursor::default() });
            let next = |_| {
                let len = ramp.next(&cursor, None).min(cursor.left as usize);
                cursor.cut_off(Cut::default(), len, Vec::new());
                len >> 10
            };
            (0..100).map(next).take_while(|len| *len > 0).collect::<Vec<_>>()
        };
        let filled = chunks(256 << 10, 9);
        assert!(filled.len() > 16 && filled.iter().all(|len| *len < MOST >> 12), "{filled:?}");
        assert_eq!(chunks(MOST / 4, 1), [1024, 4096, 4096, 3584, 1792, 1024, 768]);
    }
}
