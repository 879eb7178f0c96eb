//! What a prepared chunk is made of: where its bytes are on the host and on the device, and by which way they go.
//!
//! Copies between one contiguous range on each side run at the link's speed. Many short copies in a batch do not: with
//! 4 KiB each they reach a fifth of it, with 16 KiB half to three quarters, with 64 KiB all of it. One copy to the
//! device ring and a kernel that spreads the bytes there reaches 0.9 of the link with pieces of 1 KiB and more; but the
//! bytes arrive some 20 us later, which is more than a few copies take. (Measured on an H200.)

use super::chunk::{LONGEST_ROW, ROW, Stretch, table_at};
use super::lent::Lent;
use super::ring::Slot;
use super::types::Direction;
use crate::buffer::PinnedBuf;
use crate::device::{DevicePtr, SpreadRun, Transfer};

/// A way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// A copy for each stretch, in batches.
    Batch,
    /// One copy between the segment and the device ring, and a kernel that spreads or collects the bytes there.
    Ring,
}

/// Stretches that are so long on average are copied at full speed by themselves.
const LONG: usize = 48 << 10;
/// So many copies in one batch take no longer than a kernel. One thread at a time submits batches, some microseconds a
/// copy while others copy too, so more of them at the end of a call would last longer than the rest of it.
const FEW: usize = 8;

/// The way of a chunk.
fn way(stretches: usize, bytes: usize) -> Way {
    if stretches <= FEW || bytes / stretches.max(1) >= LONG { Way::Batch } else { Way::Ring }
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn few_or_long_stretches_go_in_batches() {
        for (stretches, len, expected) in [
            (1, 4 << 20, Way::Batch),
            (4096, 1 << 10, Way::Ring),
            (64, LONG, Way::Batch),
            (FEW, LONG - 1, Way::Batch),
            (FEW + 1, LONG - 1, Way::Ring),
        ] {
            assert_eq!(way(stretches, stretches * len), expected, "{stretches} of {len}");
        }
    }
}
