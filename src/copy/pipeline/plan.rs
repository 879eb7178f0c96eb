//! Cutting a transfer into chunks: integer arithmetic, and device ranges that it is applied to.
//!
//! A transfer is a list of pieces: bytes of the source (or of the sink) from some offset on, and where on the device they
//! go (or come from). Mostly there is one. A *chunk* is what is staged in one segment and submitted at once: a range of
//! the source of at most the chunk length, and the *parts* of it that go to the device, each by one copy. Chunks end on
//! multiples of a page of the source where they can, since that is where files are read past the page cache.
//!
//! The first chunks of an upload are short, since the wire is idle until the first of them is filled, and so are the last
//! of a download, after which it is the threads that are waited for. The last of an upload are shorter, too: where it is the
//! threads that are slower, they come to the end together, and none has to fill a long one while the wire waits.
//!
//! Pieces that lie one behind the other on both sides become one before anything else, so that a thousand tensors that
//! were given one block of device memory are copied like a single one. Pieces that are small and close together in the
//! source share a chunk: one read, several copies. A gap of up to [`GAP`] is read along and left out of the copies.

use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result};
use crate::segment::PAGE;

/// Bytes between two pieces that are read although nobody wants them, since one read of more is faster than two.
const GAP: u64 = 32 << 10;

/// Where bytes of a source go on the device, or from where on the device bytes of a sink come.
#[derive(Clone, Debug)]
pub struct Piece {
    /// First byte in the source or sink.
    pub at: u64,
    /// As many bytes, on the device.
    pub device: DeviceSlice,
}

impl Piece {
    /// The bytes of the source or sink from `at` on, as many as `device` has.
    #[must_use]
    pub fn new(at: u64, device: impl Into<DeviceSlice>) -> Self {
        Self { at, device: device.into() }
    }

    fn end(&self) -> u64 {
        self.at + self.device.len() as u64
    }
}

/// Which end of a transfer has short chunks, and how many of each length. (An upload's other end has shorter ones, too.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ramp {
    /// The start (uploads) or the end (downloads).
    pub(super) up: bool,
    /// Of each length: one for each thread.
    pub(super) threads: usize,
    /// The shortest.
    pub(super) least: usize,
}

impl Ramp {
    /// All chunks are alike.
    pub(super) const NONE: Self = Self { up: true, threads: 0, least: 0 };

    /// Bytes of the chunk with so many chunks before it and so many bytes left, where `chunk` is the most.
    fn len(self, chunk: usize, before: usize, left: u64) -> usize {
        // Eighths (of downloads alone), quarters and halves of a chunk, one of each for each thread, are what is left at the
        // end.
        let threads = (self.threads * chunk / 8) as u64;
        let longer = |ends: &[u64]| ends.iter().filter(|most| left > **most).count();
        let step = if self.threads == 0 {
            3
        } else if self.up {
            let first = before / self.threads;
            first.min(1 + longer(&[2 * threads, 6 * threads]))
        } else {
            longer(&[threads, 3 * threads, 7 * threads])
        };
        let len = chunk >> 3_usize.saturating_sub(step);
        // (A page at least, or a chunk would have nothing of its piece.)
        (len / PAGE * PAGE).max(self.least.min(chunk)).max(PAGE)
    }
}

/// One copy of a chunk.
#[derive(Clone, Debug)]
pub(super) struct Part {
    /// From the chunk's start.
    pub(super) offset: usize,
    pub(super) device: DeviceSlice,
}

/// What goes through one segment.
#[derive(Clone, Debug)]
pub(super) struct Chunk {
    /// First byte in the source or sink.
    pub(super) at: u64,
    pub(super) len: usize,
    pub(super) parts: Parts,
}

/// Most chunks have one part, which is all of them.
#[derive(Clone, Debug)]
pub(super) enum Parts {
    Whole(DeviceSlice),
    Several(Vec<Part>),
}

impl Chunk {
    /// Bytes that are copied: the length, less what lies between the parts.
    pub(super) fn wanted(&self) -> u64 {
        match &self.parts {
            Parts::Whole(_) => self.len as u64,
            Parts::Several(parts) => parts.iter().map(|part| part.device.len() as u64).sum(),
        }
    }
}

/// A transfer, cut up.
#[derive(Debug)]
pub(super) struct Plan {
    pieces: Vec<Piece>,
    /// Of each chunk: the piece it starts in, and the offset there. With how many pieces it reaches into.
    chunks: Vec<Cut>,
    chunk: usize,
    wanted: u64,
    /// Where pieces overlap: of each chunk, the first byte that it or any later one has.
    starts: Vec<u64>,
    /// The first device address, and one past the last.
    bounds: (u64, u64),
}

#[derive(Clone, Copy, Debug)]
struct Cut {
    piece: usize,
    /// Bytes of that piece which earlier chunks have.
    skip: u64,
    /// One past the last piece.
    until: usize,
    len: usize,
}

impl Plan {
    /// Cuts pieces, in any order, into chunks of at most `chunk` bytes, a multiple of a page. With `share` one chunk may
    /// have several parts (uploads); without, each has one (downloads, whose copies start at a segment's start).
    pub(super) fn new(mut pieces: Vec<Piece>, chunk: usize, share: bool, ramp: Ramp) -> Result<Self> {
        debug_assert!(chunk > 0 && chunk % PAGE == 0);
        if pieces.is_empty() {
            return Err(Error::Empty);
        }
        if let Some(piece) = pieces.iter().find(|p| p.at.checked_add(p.device.len() as u64).is_none()) {
            return Err(Error::OutOfRange {
                start: usize::try_from(piece.at).unwrap_or(usize::MAX),
                end: usize::MAX,
                len: piece.device.len(),
            });
        }
        pieces.sort_by_key(|piece| piece.at);
        let mut joined: Vec<Piece> = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let last = joined.last_mut().filter(|last| last.end() == piece.at);
            match last.and_then(|last| last.device.joined(&piece.device).map(|device| (last, device))) {
                Some((last, device)) => last.device = device,
                None => joined.push(piece),
            }
        }
        joined.shrink_to_fit();
        let wanted = joined.iter().map(|piece| piece.device.len() as u64).sum();
        let start = joined.iter().map(|piece| piece.device.address()).min().unwrap_or(0);
        let end = joined.iter().map(|piece| piece.device.address() + piece.device.len() as u64).max();
        let bounds = (start, end.unwrap_or(0));
        let (chunks, starts) = (Vec::new(), Vec::new());
        let mut plan = Self { pieces: joined, chunks, chunk, wanted, starts, bounds };
        plan.cut(share, ramp);
        plan.find_starts();
        Ok(plan)
    }

    fn cut(&mut self, share: bool, ramp: Ramp) {
        let (mut piece, mut skip) = (0, 0);
        let mut left = self.wanted;
        while let Some(first) = self.pieces.get(piece) {
            let start = first.at + skip;
            // So that the next chunk starts on a page.
            let len = ramp.len(self.chunk, self.chunks.len(), left) as u64;
            let most = (start - start % PAGE as u64).saturating_add(len);
            let mut end = first.end().min(most);
            // Without what lies between the pieces.
            let mut wanted = end - start;
            let (from, from_skip) = (piece, skip);
            if first.end() > most {
                skip += end - start;
            } else {
                (piece, skip) = (piece + 1, 0);
                while let Some(next) = self.pieces.get(piece).filter(|_| share) {
                    // (One that overlaps another has chunks of its own.)
                    if next.at < end || next.at >= most || next.at > end.saturating_add(GAP) {
                        break;
                    }
                    end = end.max(next.end().min(most));
                    wanted += end - next.at;
                    if next.end() > most {
                        skip = most - next.at;
                        break;
                    }
                    piece += 1;
                }
            }
            let until = if skip > 0 { piece + 1 } else { piece };
            left = left.saturating_sub(wanted);
            self.chunks.push(Cut { piece: from, skip: from_skip, until, len: (end - start) as usize });
        }
    }

    /// A piece that overlaps another has its chunks behind that one's, though they start before its end.
    fn find_starts(&mut self) {
        let starts: Vec<u64> = (0..self.count()).map(|index| self.range(index).0).collect();
        if !starts.is_sorted() {
            let mut least = u64::MAX;
            self.starts = starts
                .into_iter()
                .rev()
                .map(|start| (least.min(start), least = least.min(start)).0)
                .collect();
            self.starts.reverse();
        }
    }

    /// Everything of the source before this offset is in chunks before that one.
    pub(super) fn landed_before(&self, index: usize) -> u64 {
        match self.starts.get(index) {
            Some(start) => *start,
            None if index < self.count() => self.range(index).0,
            None => self.end(),
        }
    }

    /// How many chunks there are.
    pub(super) fn count(&self) -> usize {
        self.chunks.len()
    }

    /// Bytes of a chunk at most.
    pub(super) fn chunk_len(&self) -> usize {
        self.chunk
    }

    /// Bytes that are copied in all.
    pub(super) fn wanted(&self) -> u64 {
        self.wanted
    }

    /// One past the last byte of the source that is needed.
    pub(super) fn end(&self) -> u64 {
        self.pieces.iter().map(Piece::end).max().unwrap_or(0)
    }

    /// The device addresses that it lies between.
    pub(super) fn bounds(&self) -> (u64, u64) {
        self.bounds
    }

    /// The pieces, in the source's order, joined where they can be.
    pub(super) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Start and length of a chunk in the source or sink.
    pub(super) fn range(&self, index: usize) -> (u64, usize) {
        let cut = self.chunks[index];
        (self.pieces[cut.piece].at + cut.skip, cut.len)
    }

    /// A chunk with its parts.
    ///
    /// # Errors
    /// None in fact: the ranges lie within their pieces.
    pub(super) fn chunk(&self, index: usize) -> Result<Chunk> {
        let cut = self.chunks[index];
        let (at, len) = self.range(index);
        let end = at + len as u64;
        let part = |piece: &Piece, skip: u64| {
            let until = (end - piece.at).min(piece.device.len() as u64);
            piece.device.slice(skip as usize..until as usize)
        };
        let first = &self.pieces[cut.piece];
        if cut.until == cut.piece + 1 {
            return Ok(Chunk { at, len, parts: Parts::Whole(part(first, cut.skip)?) });
        }
        let mut parts = vec![Part { offset: 0, device: part(first, cut.skip)? }];
        for piece in &self.pieces[cut.piece + 1..cut.until] {
            parts.push(Part { offset: (piece.at - at) as usize, device: part(piece, 0)? });
        }
        Ok(Chunk { at, len, parts: Parts::Several(parts) })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Device;
    use crate::host::{HostConfig, HostNode};

    /// Every byte that is wanted is in exactly one part, no chunk is empty or too long, and they go on where the last ended.
    fn is_whole(plan: &Plan, most: usize) {
        let mut parts: Vec<(u64, u64)> = Vec::new();
        for index in 0..plan.count() {
            let (at, len) = plan.range(index);
            assert!(len > 0 && len <= most, "chunk {index} of {len} bytes");
            let chunk = plan.chunk(index).unwrap();
            match chunk.parts {
                Parts::Whole(to) => parts.push((at, to.len() as u64)),
                Parts::Several(several) => {
                    parts.extend(several.iter().map(|p| (at + p.offset as u64, p.device.len() as u64)));
                }
            }
        }
        assert_eq!(parts.iter().map(|p| p.1).sum::<u64>(), plan.wanted());
        let of_pieces = plan.pieces().iter().flat_map(|p| p.at..p.end());
        assert!(parts.into_iter().flat_map(|(at, len)| at..at + len).eq(of_pieces));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn chunks_are_never_empty_and_have_every_byte(
            pieces in prop::collection::vec((1_usize..20_000, prop_oneof![Just(0_u64), 1..40_000_u64]), 1..20),
            start in 0..9000_u64,
            pages in 1_usize..20,
            share in any::<bool>(),
            up in any::<bool>(),
            threads in 0_usize..5,
            least in prop_oneof![Just(0_usize), Just(PAGE), Just(16 * PAGE)],
        ) {
            let node = HostNode::new(HostConfig::new().memory(16 << 20)).unwrap();
            let memory = Device::on(&node, 0).unwrap().alloc(1 << 20).unwrap();
            let (mut list, mut at, mut to) = (Vec::new(), start, 0);
            for (len, gap) in pieces {
                at += gap;
                list.push(Piece::new(at, memory.slice(to..to + len).unwrap()));
                (at, to) = (at + len as u64, to + len + 1);
            }
            let chunk = pages * PAGE;
            let plan = Plan::new(list, chunk, share, Ramp { up, threads, least: least.min(chunk) }).unwrap();
            is_whole(&plan, chunk);
        }
    }
}
