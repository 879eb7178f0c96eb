//! What a chunk is, and where its pieces lie in its segment: arithmetic only.
//!
//! ```text
//!   pieces on the device   [a][b]........[c].....
//!   the segment            [a][b]-[c]---|table]      a and b are one stretch, c is another one
//! ```
//!
//! Pieces that follow each other on the device, in one allocation, follow each other in the segment: they are one
//! *stretch*, which one copy moves. Every other stretch starts at an offset that equals its device address modulo 16.
//! So a kernel that moves bytes between a copy of the segment on the device and the stretches' places can do it by 16
//! bytes at a time. Behind the bytes the segment has room for the table of rows that the kernel reads.
//!
//! The layout is made once, when the chunk is cut off the call, and the chunk keeps it.

use crate::device::{DevicePtr, SpreadRow};
use crate::error::{Error, Result};

/// Places that are equal modulo this many bytes are copied by accesses of as many bytes.
const WIDTH: u64 = 16;
/// Bytes of a row of the table.
pub(super) const ROW: usize = size_of::<SpreadRow>();
/// A stretch has a row for so many bytes: the rows of a kernel are shared among its warps, and one warp alone takes
/// long for a long row.
pub(super) const LONGEST_ROW: usize = 16 << 10;
/// A piece is cut at the end of a chunk only where at least so much of it fits.
const LEAST_PART: usize = 4 << 10;

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
    /// Cuts off the next chunk: the `bytes` up to `end`. Its place, for errors, is the number of the call's bytes before it.
    pub(super) fn cut_off(&mut self, end: Cut, bytes: usize) -> Chunk {
        let (at, landed_to) = (self.cut, self.cut + bytes as u64);
        let (parts, stretches) = (Vec::new(), Vec::new());
        let chunk = Chunk { index: self.chunks, start: self.at, end, bytes, at, landed_to, parts, stretches };
        self.at = end;
        self.chunks += 1;
        self.cut = landed_to;
        self.left -= bytes as u64;
        chunk
    }
}

/// A part of a call that one worker moves.
#[derive(Debug)]
pub(super) struct Chunk {
    /// Its place in the order of the call.
    pub(super) index: usize,
    pub(super) start: Cut,
    pub(super) end: Cut,
    pub(super) bytes: usize,
    /// Where its first byte lies in what the call reads or writes, for errors.
    pub(super) at: u64,
    /// [`Progress::landed_to`](super::Progress::landed_to) when it and all chunks before it have arrived.
    pub(super) landed_to: u64,
    /// Where its bytes lie in its segment, in the order of the call: of pieces that are filled or drained one by one.
    pub(super) parts: Vec<Part>,
    /// Where its bytes belong on the device. Of a chunk in place these are counted out when it is prepared.
    pub(super) stretches: Vec<Stretch>,
}

/// Bytes of one piece that lie in one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// The piece's number in the call, and where in it the part begins.
    pub(super) piece: usize,
    pub(super) from: usize,
    /// Its place in the segment.
    pub(super) offset: usize,
    pub(super) len: usize,
}

impl Part {
    /// Its bytes in a segment.
    pub(super) fn of<'a>(&self, segment: &'a [u8]) -> Result<&'a [u8]> {
        let short = Error::Internal("a chunk is shorter than its layout");
        segment.get(self.offset..self.offset + self.len).ok_or(short)
    }
}

/// Bytes that are contiguous on the device and in the segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) place: DevicePtr,
    pub(super) offset: usize,
    pub(super) len: usize,
}

impl Stretch {
    /// Its rows.
    pub(super) fn rows(&self) -> impl Iterator<Item = SpreadRow> + '_ {
        (0..self.len).step_by(LONGEST_ROW).map(|from| SpreadRow {
            place: DevicePtr(self.place.0 + from as u64),
            // A segment is shorter than 4 GiB: see `CopierBuilder::chunk`.
            offset: (self.offset + from) as u32,
            len: (self.len - from).min(LONGEST_ROW) as u32,
        })
    }
}

/// Where bytes that were put into a layout lie in the segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Put {
    pub(super) offset: usize,
    pub(super) len: usize,
    /// They belong to the stretch before them.
    pub(super) joins: bool,
}

/// A chunk that pieces are put into, one after the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Bytes of the segment that may be used, the table's included.
    most: usize,
    /// Bytes so far, without the table.
    at: usize,
    stretches: usize,
    /// Rows of all stretches but the last one, and the length of that one.
    rows: usize,
    last: usize,
    /// The allocation that the last stretch is in, and where it ends.
    end: (u64, u64),
}

impl Layout {
    pub(super) fn new(most: usize) -> Self {
        Self { most, at: 0, stretches: 0, rows: 0, last: 0, end: (u64::MAX, 0) }
    }

    /// Puts bytes at the end: as many as fit of `len` bytes, which lie at `device` in an allocation. `None`: the chunk
    /// is full.
    #[inline]
    pub(super) fn put(&mut self, memory: u64, device: u64, len: usize) -> Option<Put> {
        let joins = self.end == (memory, device) && self.stretches > 0;
        let gap = if joins { 0 } else { (device.wrapping_sub(self.at as u64) % WIDTH) as usize };
        let offset = self.at + gap;
        // Two rows more than there are: the stretch's, and one for the end of the table's alignment. A long stretch
        // needs a row for each `LONGEST_ROW` bytes.
        let table = (self.rows() + 3) * ROW;
        let room = self.most.saturating_sub(offset + table);
        let room = room - room / (LONGEST_ROW / ROW);
        if room < len && (room < LEAST_PART && self.at > 0) || room == 0 {
            return None;
        }
        let len = len.min(room);
        if joins {
            self.last += len;
        } else {
            self.rows = self.rows();
            self.stretches += 1;
            self.last = len;
        }
        self.at = offset + len;
        self.end = (memory, device.wrapping_add(len as u64));
        Some(Put { offset, len, joins })
    }

    /// Rows of the table.
    #[inline]
    pub(super) fn rows(&self) -> usize {
        self.rows + self.last.div_ceil(LONGEST_ROW)
    }
}

/// Where a table starts that lies behind so many bytes.
pub(super) fn table_at(data: usize) -> usize {
    data.next_multiple_of(ROW)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Pieces as (allocation, device address, length), cut into chunks as a call cuts them.
    #[allow(clippy::type_complexity, reason = "a chunk, and its parts by piece and offset")]
    fn chunks(pieces: &[(u64, u64, usize)], most: usize) -> Vec<(Layout, Vec<(usize, usize, Put)>)> {
        let mut all = Vec::new();
        let mut chunk = (Layout::new(most), Vec::new());
        for (n, &(memory, device, len)) in pieces.iter().enumerate() {
            let mut from = 0;
            while from < len {
                match chunk.0.put(memory, device + from as u64, len - from) {
                    Some(part) => {
                        chunk.1.push((n, from, part));
                        from += part.len;
                    }
                    None => all.push(std::mem::replace(&mut chunk, (Layout::new(most), Vec::new()))),
                }
            }
        }
        all.push(chunk);
        all
    }

    proptest! {
        /// Each byte of each piece is in one chunk, parts do not overlap there, the table fits behind them, and only
        /// neighbours on the device are one stretch.
        #[test]
        fn parts_cover_all_pieces_and_fit(
            pieces in prop::collection::vec((0_u64..3, 0_u64..100_000, 0_usize..40_000), 0..60),
            neighbours in prop::collection::vec(any::<bool>(), 60),
            most in 8_192_usize..200_000,
        ) {
            let mut pieces = pieces;
            for n in 1..pieces.len() {
                if neighbours[n] {
                    let (memory, device, len) = pieces[n - 1];
                    (pieces[n].0, pieces[n].1) = (memory, device + len as u64);
                }
            }
            let mut seen = vec![0; pieces.len()];
            for (layout, parts) in chunks(&pieces, most) {
                let mut end = 0;
                let mut stretches: Vec<(u64, Stretch)> = Vec::new();
                for (n, from, part) in parts {
                    prop_assert_eq!(seen[n], from, "in order, without a gap");
                    seen[n] += part.len;
                    prop_assert!(part.len > 0 && part.offset >= end);
                    let device = pieces[n].1 + from as u64;
                    if part.joins {
                        let last = stretches.last_mut().unwrap();
                        prop_assert_eq!((last.0, last.1.place.0 + last.1.len as u64), (pieces[n].0, device));
                        prop_assert_eq!(part.offset, end);
                        last.1.len += part.len;
                    } else {
                        prop_assert_eq!(part.offset as u64 % WIDTH, device % WIDTH);
                        let place = DevicePtr(device);
                        stretches.push((pieces[n].0, Stretch { place, offset: part.offset, len: part.len }));
                    }
                    end = part.offset + part.len;
                }
                let rows: usize = stretches.iter().map(|(_, stretch)| stretch.rows().count()).sum();
                prop_assert_eq!((layout.rows(), layout.at, layout.stretches), (rows, end, stretches.len()));
                prop_assert!(table_at(end) + rows * ROW <= most);
            }
            prop_assert!(pieces.iter().zip(seen).all(|(piece, seen)| piece.2 == seen));
        }
    }

    #[test]
    fn rows_are_a_stretch_cut_into_parts() {
        let stretch = Stretch { place: DevicePtr(1000), offset: 8, len: 2 * LONGEST_ROW + 5 };
        let rows: Vec<_> = stretch.rows().map(|row| (row.place.0, row.offset, row.len)).collect();
        let long = LONGEST_ROW as u32;
        assert_eq!(
            rows,
            [
                (1000, 8, long),
                (1000 + u64::from(long), 8 + long, long),
                (1000 + 2 * u64::from(long), 8 + 2 * long, 5)
            ]
        );
    }
}
