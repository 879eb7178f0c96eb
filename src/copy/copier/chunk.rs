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

use super::types::Settings;
use crate::device::{DevicePtr, SpreadRow};
use crate::error::{Error, Result};

/// Bytes of a row of the table.
pub(super) const ROW: usize = size_of::<SpreadRow>();
/// A stretch has a row for so many bytes: the rows of a kernel are shared among its warps, and one warp alone takes
/// long for a long row.
pub(super) const LONGEST_ROW: usize = 16 << 10;

/// Bytes of a chunk at least, unless fewer are left. At the start the link waits for the first chunks, and at the end
/// there is nothing to be done beside the last ones: chunks there are short.
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
    pub(super) fn new(settings: &Settings) -> Self {
        let most = settings.chunk;
        Self { most, least: LEAST.min(most), hands: settings.workers().max(1) }
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

/// Where a table starts that lies behind so many bytes.
pub(super) fn table_at(data: usize) -> usize {
    data.next_multiple_of(ROW)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

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
