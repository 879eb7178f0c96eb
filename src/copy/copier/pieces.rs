//! Pieces: any number of (host bytes, device range), of any lengths and alignments, as the work of one job.
//!
//! A call is looked at once before anything is copied ([`Survey`]): whether each piece can be copied, and which
//! allocations the job keeps. Chunks are cut as workers take them, in the order of the call, so that the first copy
//! starts while most of a long call is not cut yet.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::engine::Engine;
use super::job::{Chunk, Cursor, Cut, Work};
use super::layout::Layout;
use super::packing::{Content, Packing, Piece, copy_out, unpack};
use crate::device::memory::{Allocation, DeviceSlice};
use crate::error::{Error, Result};
use crate::segment::PAGE;

/// Bytes of a chunk at least, unless fewer are left. At the start the link waits for the first chunks, and at the end
/// there is nothing to be done beside the last ones: chunks there are short.
pub(super) const LEAST: usize = 256 << 10;

/// How the chunks of a call grow and shrink.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ramp {
    /// Bytes of a segment, and of the first chunk.
    most: usize,
    least: usize,
    /// Threads that take chunks.
    hands: usize,
}

impl Ramp {
    pub(super) fn new(engine: &Engine) -> Self {
        let most = engine.settings.chunk;
        Self { most, least: LEAST.min(most), hands: engine.settings.threads + 1 }
    }

    /// For chunks that no thread fills: the link waits for none of them, and long ones cost it least.
    pub(super) fn unfilled(engine: &Engine) -> Self {
        let Self { most, least, .. } = Self::new(engine);
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

/// What was found before anything is copied.
#[derive(Default)]
pub(super) struct Survey {
    pub(super) bytes: u64,
    /// The device memory, by address, for a transfer that has its place in the order of all.
    pub(super) spans: Vec<Range<u64>>,
    is_ordered: bool,
    pub(super) memories: Vec<Arc<Allocation>>,
    /// The place among them of each, by its number.
    known: HashMap<u64, usize>,
    /// Which of the memories the last piece was in. The pieces of a block of a cache are each in another one, and those of
    /// the next block in the same ones again.
    at: usize,
}

impl Survey {
    /// For a transfer that has its place in the order of all.
    pub(super) fn ordered() -> Self {
        Self { is_ordered: true, ..Self::default() }
    }

    /// The same, of one piece.
    pub(super) fn one(engine: &Engine, memory: &DeviceSlice, len: usize) -> Result<Self> {
        let mut survey = Self::ordered();
        survey.add(engine, memory, len).map(|()| survey)
    }

    /// Looks at a piece's device memory.
    #[inline]
    pub(super) fn add(&mut self, engine: &Engine, memory: &DeviceSlice, len: usize) -> Result<()> {
        Error::unless_fits(len, memory.len())?;
        self.bytes = self.bytes.saturating_add(len as u64);
        if self.is_ordered {
            let start = memory.address();
            match self.spans.last_mut().filter(|last| last.end == start) {
                Some(last) => last.end += len as u64,
                None => self.spans.push(start..start + len as u64),
            }
        }
        let number = memory.allocation_number();
        let next = if self.at + 1 < self.memories.len() { self.at + 1 } else { 0 };
        for at in [self.at, next] {
            if self.memories.get(at).is_some_and(|known| Arc::as_ptr(known).addr() as u64 == number) {
                self.at = at;
                return Ok(());
            }
        }
        if let Some(at) = self.known.get(&number) {
            self.at = *at;
            return Ok(());
        }
        memory.check_is_of(engine.device.context())?;
        self.at = self.memories.len();
        self.known.insert(number, self.at);
        self.memories.push(memory.allocation());
        Ok(())
    }
}

/// Cuts a chunk of so many bytes off, which goes through a segment. `on_page`: where a piece, by its number, is cut rather
/// than behind so many of its bytes.
pub(super) fn cut(
    count: usize,
    piece: impl Fn(usize) -> Piece,
    on_page: impl Fn(usize, usize) -> usize,
    full: usize,
    cursor: &mut Cursor,
) -> Chunk {
    let most = full + BESIDE;
    let mut layout = Layout::new(most);
    let (mut at, mut bytes) = (cursor.at, 0);
    while at.piece < count {
        let next = piece(at.piece);
        if at.from == next.len {
            at = Cut { piece: at.piece + 1, from: 0 };
            continue;
        }
        if bytes >= full {
            break;
        }
        let left = next.len - at.from;
        let device = next.device.wrapping_add(at.from as u64);
        let Some(part) = layout.put(next.memory, device, left.min(full - bytes)) else { break };
        let mut end = at.from + part.len;
        if part.len < left {
            end = Some(on_page(at.piece, end)).filter(|page| *page > at.from).unwrap_or(end);
        }
        bytes += end - at.from;
        at.from = end;
        if end < next.len {
            break;
        }
    }
    finish(cursor, at, bytes, Some(most))
}

/// For [`cut`]: memory has no pages that count.
fn anywhere(_: usize, end: usize) -> usize {
    end
}

/// Bytes of a segment beside those of the pieces: for the table, and for gaps.
const BESIDE: usize = 2 * PAGE;

/// Moves the cursor behind a chunk. In memory a place is the number of the call's bytes before it.
pub(super) fn finish(cursor: &mut Cursor, end: Cut, bytes: usize, most: Option<usize>) -> Chunk {
    let (at, landed_to) = (cursor.cut, cursor.cut + bytes as u64);
    let chunk = Chunk { index: cursor.chunks, start: cursor.at, end, bytes, at, landed_to, most };
    cursor.at = end;
    cursor.chunks += 1;
    cursor.cut = landed_to;
    cursor.left -= bytes as u64;
    chunk
}

// --- borrowed --------------------------------------------------------------------------------------------------------

/// Memory that a caller lends, as so many pieces.
pub(super) struct Borrowed<F> {
    count: usize,
    get: F,
    ramp: Ramp,
}

// SAFETY: see `new`.
unsafe impl<F> Send for Borrowed<F> {}
// SAFETY: as above.
unsafe impl<F> Sync for Borrowed<F> {}

impl<F: Fn(usize) -> Piece> Borrowed<F> {
    /// # Safety
    /// Several threads may call `get` at once, with numbers less than `count`. For as long as this exists, the pieces
    /// that it gives can be read, and are not written (for an upload); or can be written, and are not used otherwise (for
    /// a download).
    pub(super) unsafe fn new(engine: &Engine, count: usize, get: F) -> Self {
        Self { count, get, ramp: Ramp::new(engine) }
    }
}

impl<F: Fn(usize) -> Piece> Work for Borrowed<F> {
    fn cut(&self, cursor: &mut Cursor, room: Option<usize>) -> Chunk {
        let most = self.ramp.next(cursor, room);
        cut(self.count, &self.get, anywhere, most, cursor)
    }

    fn prepare(&self, chunk: &Chunk, packing: &mut Packing<'_>) -> Result<Content> {
        // SAFETY: all of the place is written. The piece can be read: the promise of `new`.
        unsafe {
            packing.put(chunk, &self.get, |_, this, from, place| {
                let src = this.host.add(from);
                std::ptr::copy_nonoverlapping(src, place.as_mut_ptr().cast(), place.len());
                Ok(())
            })
        }
    }

    fn drain(&self, chunk: &Chunk, bytes: &[u8]) -> Result<()> {
        unpack(chunk, bytes, &self.get, |_, this, from, bytes| {
            // SAFETY: within the piece, which can be written: the promise of `new`. Each byte is in one chunk.
            unsafe { copy_out(bytes, this.host.add(from)) };
            Ok(())
        })
    }
}

// --- owned -----------------------------------------------------------------------------------------------------------

/// What a handle gives back when its job is over.
pub(super) trait Values: Send + Sync {
    type Back;

    /// # Safety
    /// The job is over, without an error. Called at most once, as is `rescue`.
    unsafe fn take(&self) -> Result<Self::Back>;

    /// What can be given back though the job has failed or was cancelled.
    ///
    /// # Safety
    /// The job is over. Called at most once, as is `take`.
    unsafe fn rescue(&self) -> Option<Self::Back> {
        None
    }
}

impl Values for () {
    type Back = ();

    unsafe fn take(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{Cursor, Cut, Ramp};

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
