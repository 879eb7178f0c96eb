//! Filling a chunk's segment, and emptying it.

use std::mem::MaybeUninit;
use std::sync::Arc;

use super::job::{Direction, Memories};
use super::layout::{LONGEST_ROW, Layout, ROW, Stretch, table_at};
use super::lent::Lent;
use super::stores::{self, Stores};
use crate::buffer::PinnedBuf;
use crate::device::{DevicePtr, Transfer};
use crate::error::{Error, Result};

/// What a prepared chunk is.
pub(super) enum Content {
    /// Bytes that are, or will be, in the segment.
    Packed,
    /// Copies of memory that the device reads or writes where it is, and what keeps that memory.
    InPlace(Vec<Transfer>, Lent),
    /// Pages: contiguous host memory for many places on the device.
    Pages(Pages),
    /// Bytes that the caller has brought.
    Brought(Brought),
}

/// A segment that a caller has filled.
pub(super) struct Brought {
    pub(super) segment: PinnedBuf,
    pub(super) stretches: Vec<Stretch>,
    /// See [`super::segments`].
    pub(super) counts: bool,
    /// Pushes that are in it.
    pub(super) pushes: usize,
    /// The device memory of the chunk, where it is not the job's.
    pub(super) memories: Option<Arc<Memories>>,
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
    data: usize,
}

impl<'a> Packing<'a> {
    /// In a segment, of which so many bytes may be used; or without one, for a chunk whose bytes stay where they are.
    pub(super) fn new(direction: Direction, segment: Option<(&'a mut PinnedBuf, usize)>) -> Self {
        let most = segment.as_ref().map_or(0, |(segment, most)| (*most).min(segment.capacity()));
        let segment = segment.map(|(segment, _)| segment);
        Self { direction, segment, layout: Layout::new(most), stretches: Vec::new(), data: 0 }
    }

    /// In a segment that a caller has filled.
    pub(super) fn brought(direction: Direction, segment: &'a mut PinnedBuf, stretches: Vec<Stretch>) -> Self {
        let data = stretches.last().map_or(0, |last| last.offset + last.len);
        Self { direction, segment: Some(segment), layout: Layout::new(0), stretches, data }
    }

    /// Puts a piece's bytes from `from` to `to` at the end, as the layout has them: all of them, for a chunk that was
    /// cut by the same layout. For an upload `fill` writes each part: it is given the part's first byte in the piece,
    /// and the part's place in the segment, all of which it writes unless it fails.
    ///
    /// # Safety
    /// `fill` has written all bytes of the place that it is given when it returns `Ok`.
    pub(super) unsafe fn put(
        &mut self,
        piece: &Piece,
        from: usize,
        to: usize,
        mut fill: impl FnMut(usize, &mut [MaybeUninit<u8>]) -> Result<()>,
    ) -> Result<()> {
        let mut from = from;
        while from < to {
            let device = piece.device.wrapping_add(from as u64);
            let Some(part) = self.layout.put(piece.memory, device, to - from) else { return Ok(()) };
            let before = self.data;
            match self.stretches.last_mut() {
                Some(last) if part.joins => last.len += part.len,
                _ => self.stretches.push(Stretch {
                    place: DevicePtr(device),
                    offset: part.offset,
                    len: part.len,
                }),
            }
            self.data = part.offset + part.len;
            if let (Some(segment), Direction::Up) = (self.segment.as_mut(), self.direction) {
                // SAFETY: the layout keeps to the segment's capacity, and the segment is borrowed exclusively.
                let place = unsafe {
                    let base = segment.as_mut_ptr();
                    base.add(before).write_bytes(0, part.offset - before);
                    std::slice::from_raw_parts_mut(base.add(part.offset).cast(), part.len)
                };
                fill(from, place)?;
            }
            from += part.len;
        }
        Ok(())
    }

    /// The segment of a chunk that lays itself out: the bytes up to the buffer's length are written, and those of each
    /// [`stretch`](Self::stretch) are among them.
    pub(super) fn segment(&mut self) -> Option<&mut PinnedBuf> {
        self.segment.as_deref_mut()
    }

    pub(super) fn stretch(&mut self, stretch: Stretch) {
        self.data = self.data.max(stretch.offset + stretch.len);
        self.stretches.push(stretch);
    }

    fn rows(&self) -> usize {
        self.stretches.iter().map(|stretch| stretch.len.div_ceil(LONGEST_ROW)).sum()
    }

    /// Whether the table fits into the segment, behind the bytes.
    pub(super) fn has_room_for_table(&self) -> bool {
        let room = self.segment.as_ref().map_or(0, |segment| segment.capacity());
        table_at(self.data) + self.rows() * ROW <= room
    }

    /// Writes the table of rows behind the bytes, and gives what was laid out. The segment's length is then what is to
    /// be copied: the bytes and, with `table`, the table. `is_filled`: all bytes were written.
    pub(super) fn finish(self, table: bool, is_filled: bool) -> Packed {
        let rows = self.rows();
        let Self { direction, segment, stretches, data, .. } = self;
        let at = table_at(data);
        if let Some(segment) = segment {
            let base = segment.as_mut_ptr();
            if table {
                // SAFETY: there is room for the table (`has_room_for_table`), at a multiple of its rows' size from the
                // segment's start, which is a multiple of 64. The bytes between data and table are zeroed.
                unsafe {
                    base.add(data).write_bytes(0, at - data);
                    write_table(base.add(at), &stretches);
                }
            }
            let written = match (direction, table) {
                (Direction::Up, _) if !is_filled => 0,
                (Direction::Up, false) => data,
                (Direction::Up, true) => at + rows * ROW,
                (Direction::Down, _) => 0,
            };
            // SAFETY: written above and by `put`, without a gap, or by the chunk itself.
            unsafe { segment.set_len(written) };
        }
        Packed { data, rows, stretches }
    }

    /// Stretches so far, and bytes.
    pub(super) fn shape(&self) -> (usize, usize) {
        (self.stretches.len(), self.data)
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

    /// Gives `drain` a piece's bytes from `from` to `to`, part by part: each part's first byte in the piece, and its
    /// bytes in the segment.
    pub(super) fn put(
        &mut self,
        piece: &Piece,
        from: usize,
        to: usize,
        bytes: &[u8],
        mut drain: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut from = from;
        while from < to {
            let device = piece.device.wrapping_add(from as u64);
            let Some(part) = self.layout.put(piece.memory, device, to - from) else { return Ok(()) };
            let Some(source) = bytes.get(part.offset..part.offset + part.len) else {
                return Err(Error::Internal("a chunk is shorter than its layout"));
            };
            drain(from, source)?;
            from += part.len;
        }
        Ok(())
    }
}

/// Copies bytes out of a segment, past the caches: the memory that they go to is read later, if at all.
///
/// # Safety
/// As many bytes can be written at `to`, and no other thread uses them.
pub(super) unsafe fn copy_out(from: &[u8], to: *mut u8) {
    // SAFETY: the caller's promise.
    let target = unsafe { std::slice::from_raw_parts_mut(to.cast::<MaybeUninit<u8>>(), from.len()) };
    stores::copy(from, target, Stores::Streaming);
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
