//! What a chunk is made of: where its bytes are on the host and on the device. Filling a segment, and emptying it.

use std::mem::MaybeUninit;

use super::job::{Chunk, Direction};
use super::layout::{LONGEST_ROW, Layout, ROW, Stretch, table_at};
use super::lent::Lent;
use super::ring::Slot;
use super::stores;
use super::way::{Way, way};
use crate::buffer::PinnedBuf;
use crate::device::memory::DeviceSlice;
use crate::device::{DevicePtr, SpreadRun, Transfer};
use crate::error::{Error, Result};

/// What a prepared chunk is.
pub(super) enum Content {
    /// Bytes that are, or will be, in the segment.
    Packed,
    /// Memory that the device reads or writes where it is, and what keeps that memory.
    Lent(Packed, Lent),
    /// Bytes that the caller has brought.
    Brought(Brought),
}

/// A segment that a caller has filled.
pub(super) struct Brought {
    pub(super) segment: PinnedBuf,
    pub(super) stretches: Vec<Stretch>,
    /// See [`super::segments`].
    pub(super) counts: bool,
}

/// The host's side of a chunk.
pub(super) enum Host {
    /// A segment. With the table, if the chunk goes through the ring.
    Segment(PinnedBuf),
    Lent(Lent),
}

/// Contiguous host memory. `offset`: where its bytes are among the chunk's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) host: *mut u8,
    pub(super) offset: usize,
    pub(super) len: usize,
}

// SAFETY: an address, which means the same on every thread; each use says why it is valid.
unsafe impl Send for Run {}

/// A chunk that was laid out.
#[derive(Debug)]
pub(super) struct Packed {
    /// Where its bytes are on the host. Those of a slot of the ring have the same offsets.
    runs: Vec<Run>,
    /// Where its bytes belong on the device. Each stretch is within one run.
    stretches: Vec<Stretch>,
    /// Bytes before the table.
    pub(super) data: usize,
    pub(super) rows: usize,
    pub(super) way: Way,
}

impl Packed {
    /// Copies from and to where the bytes are.
    pub(super) fn new(runs: Vec<Run>, stretches: Vec<Stretch>) -> Self {
        let data = stretches.last().map_or(0, |last| last.offset + last.len);
        let rows = stretches.iter().map(|stretch| stretch.len.div_ceil(LONGEST_ROW)).sum();
        Self { runs, stretches, data, rows, way: Way::Batch }
    }

    /// In a segment, whose length is then what is to be copied from it: the bytes, which are written there, and the
    /// table. `room`: as for [`choose`](Self::choose).
    pub(super) fn in_segment(
        direction: Direction,
        segment: &mut PinnedBuf,
        stretches: Vec<Stretch>,
        room: usize,
    ) -> Self {
        let host = segment.as_mut_ptr();
        let run = |len| vec![Run { host, offset: 0, len }];
        let mut packed = Self::new(run(0), stretches);
        packed.choose(room.min(segment.capacity()));
        let (data, at) = (packed.data, packed.table_at());
        let mut len = data;
        if packed.way == Way::Ring {
            // SAFETY: there is room for the table, at a multiple of its rows' size from the segment's start, which is a
            // multiple of 64. The bytes between data and table are zeroed.
            unsafe {
                host.add(data).write_bytes(0, at - data);
                packed.write_table(host.add(at));
            }
            if direction == Direction::Up {
                len = at + packed.rows * ROW;
            }
        }
        packed.runs = run(len);
        // SAFETY: written above and by who has filled the segment, without a gap.
        unsafe { segment.set_len(if direction == Direction::Up { len } else { 0 }) };
        packed
    }

    /// Chooses the way. `room`: bytes of a slot, 0 where there is no ring.
    pub(super) fn choose(&mut self, room: usize) {
        let fits = self.table_at() + self.rows * ROW <= room;
        // As many copies lead to the ring as there are runs.
        if fits && self.runs.len() < self.stretches.len() {
            self.way = way(self.stretches.len(), self.data);
        }
    }

    /// Where the table is in a slot, and in a segment.
    pub(super) fn table_at(&self) -> usize {
        table_at(self.data)
    }

    /// Writes the table.
    ///
    /// # Safety
    /// `at` is a multiple of a row's size, and has room for all rows.
    pub(super) unsafe fn write_table(&self, at: *mut u8) {
        let mut row = at.cast::<crate::device::SpreadRow>();
        for each in self.stretches.iter().flat_map(Stretch::rows) {
            // SAFETY: the caller's promise.
            unsafe {
                row.write(each);
                row = row.add(1);
            }
        }
    }

    /// Copies between where the bytes are on the host and a slot, or where they belong on the device: within the runs,
    /// and within the slot or the stretches.
    pub(super) fn transfers(&self, direction: Direction, slot: Option<&Slot>) -> Vec<Transfer> {
        if let Some(slot) = slot {
            let copy = |run: &Run| transfer(direction, run.host, slot.at(run.offset), run.len);
            return self.runs.iter().map(copy).collect();
        }
        let mut runs = self.runs.iter().peekable();
        let copy = |stretch: &Stretch| {
            while runs.next_if(|run| run.offset + run.len <= stretch.offset).is_some() {}
            let run = runs.peek()?;
            let host = run.host.wrapping_add(stretch.offset - run.offset);
            Some(transfer(direction, host, stretch.place, stretch.len))
        };
        self.stretches.iter().filter_map(copy).collect()
    }

    /// What a kernel does with the bytes in a slot.
    pub(super) fn spread(&self, slot: &Slot) -> SpreadRun {
        SpreadRun { packed: slot.at(0), table: slot.at(self.table_at()), rows: self.rows as u32 }
    }
}

/// A copy in this direction.
pub(super) fn transfer(direction: Direction, host: *mut u8, device: DevicePtr, len: usize) -> Transfer {
    match direction {
        Direction::Up => Transfer::Upload { src: host, dst: device, len },
        Direction::Down => Transfer::Download { src: device, dst: host, len },
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

    /// Where its byte `from` belongs on the device.
    pub(super) fn place(&self, from: usize) -> DevicePtr {
        DevicePtr(self.device.wrapping_add(from as u64))
    }
}

/// The parts of a chunk: each piece, by its number in the call, and the bytes of it from where to where.
pub(super) fn parts(
    chunk: &Chunk,
    piece: impl Fn(usize) -> Piece,
) -> impl Iterator<Item = (usize, Piece, usize, usize)> {
    let Chunk { start, end, .. } = *chunk;
    (start.piece..end.piece + usize::from(end.from > 0)).map(move |n| {
        let found = piece(n);
        let from = if n == start.piece { start.from } else { 0 };
        let to = if n == end.piece { end.from } else { found.len };
        (n, found, from, to)
    })
}

/// A chunk that is being laid out in a segment, unless it is in place.
pub(super) struct Packing<'a> {
    direction: Direction,
    segment: Option<&'a mut PinnedBuf>,
    layout: Layout,
    pub(super) stretches: Vec<Stretch>,
}

impl<'a> Packing<'a> {
    /// In a segment, of which so many bytes may be used; or without one, for a chunk whose bytes stay where they are.
    pub(super) fn new(direction: Direction, segment: Option<(&'a mut PinnedBuf, usize)>) -> Self {
        let most = segment.as_ref().map_or(0, |(segment, most)| (*most).min(segment.capacity()));
        let segment = segment.map(|(segment, _)| segment);
        Self { direction, segment, layout: Layout::new(most), stretches: Vec::new() }
    }

    /// Lays a chunk out as it was cut. For an upload `fill` writes each part: it is given the piece and its number, the
    /// part's first byte in the piece, and the part's place in the segment.
    ///
    /// # Safety
    /// `fill` has written all bytes of the place that it is given when it returns `Ok`.
    pub(super) unsafe fn put(
        &mut self,
        chunk: &Chunk,
        piece: impl Fn(usize) -> Piece,
        mut fill: impl FnMut(usize, &Piece, usize, &mut [MaybeUninit<u8>]) -> Result<()>,
    ) -> Result<Content> {
        let mut parts = parts(chunk, piece).peekable();
        while let Some((n, this, from, to)) = parts.next() {
            if let (Direction::Up, Some((_, next, from, to))) = (self.direction, parts.peek()) {
                announce(next, *from, *to);
            }
            let mut before = self.layout.data();
            self.layout.put_all((this.memory, this.device), from, to, |from, part| {
                match self.stretches.last_mut() {
                    Some(last) if part.joins => last.len += part.len,
                    _ => {
                        let place = this.place(from);
                        self.stretches.push(Stretch { place, offset: part.offset, len: part.len });
                    }
                }
                let gap = part.offset - before;
                before = part.offset + part.len;
                let (Some(segment), Direction::Up) = (self.segment.as_mut(), self.direction) else {
                    return Ok(());
                };
                // SAFETY: the layout keeps to the segment's capacity, and the segment is borrowed exclusively.
                let place = unsafe {
                    let base = segment.as_mut_ptr();
                    base.add(part.offset - gap).write_bytes(0, gap);
                    std::slice::from_raw_parts_mut(base.add(part.offset).cast(), part.len)
                };
                fill(n, &this, from, place)
            })?;
        }
        Ok(Content::Packed)
    }

    /// The segment of a chunk that lays itself out: the bytes up to the buffer's length are written, and those of each
    /// stretch are among them.
    pub(super) fn segment(&mut self) -> Option<&mut PinnedBuf> {
        self.segment.as_deref_mut()
    }
}

/// Gives `drain` the bytes of a chunk out of its segment: the number of each piece, the piece, the first byte of a part
/// of it, and the part's bytes.
pub(super) fn unpack(
    chunk: &Chunk,
    bytes: &[u8],
    piece: impl Fn(usize) -> Piece,
    mut drain: impl FnMut(usize, &Piece, usize, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut layout = Layout::new(chunk.most.unwrap_or(0));
    for (n, this, from, to) in parts(chunk, piece) {
        layout.put_all((this.memory, this.device), from, to, |from, part| {
            match bytes.get(part.offset..part.offset + part.len) {
                Some(source) => drain(n, &this, from, source),
                None => Err(Error::Internal("a chunk is shorter than its layout")),
            }
        })?;
    }
    Ok(())
}

/// Copies bytes out of a segment, past the caches: the memory that they go to is read later, if at all.
///
/// # Safety
/// As many bytes can be written at `to`, and no other thread uses them.
pub(super) unsafe fn copy_out(from: &[u8], to: *mut u8) {
    // SAFETY: the caller's promise.
    let target = unsafe { std::slice::from_raw_parts_mut(to.cast::<MaybeUninit<u8>>(), from.len()) };
    stores::stream(from, target);
}

/// Has the processor fetch the beginnings of the pages of what is copied next: it goes on by itself within a page, and
/// stops at each page's end.
fn announce(piece: &Piece, from: usize, to: usize) {
    /// What the processor fetches ahead within, and the lines of it that set it going.
    const PAGE: usize = 4096;
    const LINES: usize = 4;
    if !piece.host.is_null() {
        for page in (from..to).step_by(PAGE) {
            (0..LINES).for_each(|line| stores::fetch(piece.host.wrapping_add(page + line * 64)));
        }
    }
}
