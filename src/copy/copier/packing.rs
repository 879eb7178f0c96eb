//! Filling a chunk's segment, and emptying it.

use std::mem::MaybeUninit;

use super::job::Direction;
use super::layout::{Layout, ROW, Stretch, table_at};
use super::lent::Lent;
use crate::buffer::PinnedBuf;
use crate::copy::pipeline::stores::{self, Stores};
use crate::device::{DevicePtr, Transfer};
use crate::error::Result;

/// What a prepared chunk is.
pub(super) enum Content {
    /// Bytes that are, or will be, in the segment.
    Packed,
    /// Copies of memory that the device reads or writes where it is, and what keeps that memory.
    InPlace(Vec<Transfer>, Lent),
    /// Pages: contiguous host memory for many places on the device.
    Pages(Pages),
}

/// Host memory that one copy moves to or from a slot of the ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) host: *mut u8,
    pub(super) offset: usize,
    pub(super) len: usize,
}

// SAFETY: an address, which means the same on every thread; each use says why it is valid.
unsafe impl Send for Run {}

/// A chunk of pages.
#[derive(Debug)]
pub(super) struct Pages {
    /// Where the runs lie one behind the other, as they do in a slot.
    pub(super) runs: Vec<Run>,
    /// Where their bytes belong on the device.
    pub(super) stretches: Vec<Stretch>,
    pub(super) data: usize,
    pub(super) lent: Lent,
}

impl Pages {
    /// One copy for each stretch, without a slot.
    pub(super) fn transfers(&self, direction: Direction) -> Vec<Transfer> {
        let mut runs = self.runs.iter().peekable();
        let copy = |stretch: &Stretch| {
            while runs.peek().is_some_and(|run| run.offset + run.len <= stretch.offset) {
                runs.next();
            }
            let run = runs.peek()?;
            // A stretch is within one run.
            let host = run.host.wrapping_add(stretch.offset - run.offset);
            Some(transfer(direction, host, stretch.place, stretch.len))
        };
        self.stretches.iter().filter_map(copy).collect()
    }
}

/// A copy in this direction.
pub(super) fn transfer(direction: Direction, host: *mut u8, device: DevicePtr, len: usize) -> Transfer {
    match direction {
        Direction::Up => Transfer::Upload { src: host, dst: device, len },
        Direction::Down => Transfer::Download { src: device, dst: host, len },
    }
}

/// Writes the table of rows of these stretches.
///
/// # Safety
/// `at` is a multiple of a row's size, and has room for all rows.
pub(super) unsafe fn write_table(at: *mut u8, stretches: &[Stretch]) {
    let mut row = at.cast::<crate::device::SpreadRow>();
    for each in stretches.iter().flat_map(Stretch::rows) {
        // SAFETY: the caller's promise.
        unsafe {
            row.write(each);
            row = row.add(1);
        }
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

/// A chunk that is being laid out. `segment`: where its bytes go, unless it is in place.
pub(super) struct Packing<'a> {
    direction: Direction,
    segment: Option<&'a mut PinnedBuf>,
    layout: Layout,
    stretches: Vec<Stretch>,
}

impl<'a> Packing<'a> {
    /// In a segment, of which so many bytes may be used; or without one, for a chunk whose bytes stay where they are.
    pub(super) fn new(direction: Direction, segment: Option<(&'a mut PinnedBuf, usize)>) -> Self {
        let most = segment.as_ref().map_or(0, |(segment, most)| (*most).min(segment.capacity()));
        let segment = segment.map(|(segment, _)| segment);
        Self { direction, segment, layout: Layout::new(most), stretches: Vec::new() }
    }

    /// Puts a piece's bytes from `from` to `to` at the end, as the layout has them: all of them, for a chunk that was
    /// cut by the same layout.
    ///
    /// # Safety
    /// For an upload the piece's bytes can be read, and no thread writes them meanwhile.
    pub(super) unsafe fn put(&mut self, piece: &Piece, from: usize, to: usize) {
        let mut from = from;
        while from < to {
            let device = piece.device.wrapping_add(from as u64);
            let Some(part) = self.layout.put(piece.memory, device, to - from) else { return };
            let before = self.stretches.last().map_or(0, |last| last.offset + last.len);
            match self.stretches.last_mut() {
                Some(last) if part.joins => last.len += part.len,
                _ => self.stretches.push(Stretch {
                    place: DevicePtr(device),
                    offset: part.offset,
                    len: part.len,
                }),
            }
            if let Some(segment) = self.segment.as_mut() {
                // SAFETY: the layout keeps to the segment's capacity. The segment is borrowed exclusively, and the
                // caller promises that the piece can be read.
                unsafe {
                    let base = segment.as_mut_ptr();
                    base.add(before).write_bytes(0, part.offset - before);
                    if self.direction == Direction::Up {
                        std::ptr::copy_nonoverlapping(piece.host.add(from), base.add(part.offset), part.len);
                    }
                }
            }
            from += part.len;
        }
    }

    /// Writes the table of rows behind the bytes, and gives what was laid out. The segment's length is then what is to
    /// be copied: the bytes and, with `table`, the table.
    pub(super) fn finish(self, table: bool) -> Packed {
        let Self { direction, segment, layout, stretches } = self;
        let (data, rows) = (layout.data(), layout.rows());
        let at = table_at(data);
        if let Some(segment) = segment {
            let base = segment.as_mut_ptr();
            if table {
                // SAFETY: the layout has left room for the table, at a multiple of its rows' size from the segment's
                // start, which is a multiple of 64. The bytes between data and table are zeroed.
                unsafe {
                    base.add(data).write_bytes(0, at - data);
                    write_table(base.add(at), &stretches);
                }
            }
            let written = match (direction, table) {
                (Direction::Up, false) => data,
                (Direction::Up, true) => at + rows * ROW,
                (Direction::Down, _) => 0,
            };
            // SAFETY: written above and by `put`, without a gap.
            unsafe { segment.set_len(written) };
        }
        Packed { data, rows, stretches }
    }

    /// Stretches so far, and bytes.
    pub(super) fn shape(&self) -> (usize, usize) {
        (self.layout.stretches(), self.layout.data())
    }
}

/// A chunk that was laid out.
#[derive(Debug)]
pub(super) struct Packed {
    /// Bytes before the table.
    pub(super) data: usize,
    pub(super) rows: usize,
    pub(super) stretches: Vec<Stretch>,
}

/// Walks over the parts of a chunk as [`Packing::put`] has laid them out.
pub(super) struct Unpacking {
    layout: Layout,
}

impl Unpacking {
    pub(super) fn new(most: usize) -> Self {
        Self { layout: Layout::new(most) }
    }

    /// Copies a piece's bytes from `from` to `to` out of the segment.
    ///
    /// # Safety
    /// The piece can be written, and no other thread uses these bytes of it.
    pub(super) unsafe fn put(&mut self, piece: &Piece, from: usize, to: usize, bytes: &[u8]) -> Result<()> {
        let mut from = from;
        while from < to {
            let device = piece.device.wrapping_add(from as u64);
            let Some(part) = self.layout.put(piece.memory, device, to - from) else { return Ok(()) };
            let Some(source) = bytes.get(part.offset..part.offset + part.len) else {
                return Err(crate::error::Error::Internal("a chunk is shorter than its layout"));
            };
            // SAFETY: within the piece, by the caller's promise.
            let target = unsafe {
                std::slice::from_raw_parts_mut(piece.host.add(from).cast::<MaybeUninit<u8>>(), part.len)
            };
            stores::copy(source, target, Stores::Streaming);
            from += part.len;
        }
        Ok(())
    }
}

/// Has the processor fetch the beginnings of the pages of a piece that is copied next: it goes on by itself within a
/// page, and stops at each page's end.
pub(super) fn announce(piece: &Piece) {
    #[cfg(target_arch = "x86_64")]
    {
        /// What the processor fetches ahead within, and the lines of it that set it going.
        const PAGE: usize = 4096;
        const LINES: usize = 4;
        for page in (0..piece.len).step_by(PAGE) {
            for line in 0..LINES {
                // SAFETY: SSE is a part of x86_64; a prefetch reads nothing, wherever it points.
                unsafe {
                    std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
                        piece.host.wrapping_add(page + line * 64).cast_const().cast(),
                    );
                }
            }
        }
    }
    let _ = piece;
}
