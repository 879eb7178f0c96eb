//! The blocks that C has, found by any address inside them.
//!
//! A block is a buffer behind an `Arc`: C has one reference, and each hold on a stream another. The
//! last one returns the buffer. So freeing never waits, and a block in use is not reused.
//!
//! The map is in parts, of which each thread enters new blocks into its own. Threads that allocate
//! and free at the same time therefore take different locks. An address is looked for in the
//! calling thread's part first, then in the others.
//!
//! Each part knows the streams of its threads: to find one out takes several driver calls.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam::utils::CachePadded;
use parking_lot::Mutex;
use pinpool::{Error, PinnedBuf, Stream};

use crate::status::Fault;

/// The handle that is another stream on each thread.
const PER_THREAD: usize = 2;
/// More threads than this share parts.
const PARTS: usize = 32;

/// A block that C has.
#[derive(Debug)]
pub(super) struct Block {
    /// Shared with the holds on it.
    pub(super) buf: Arc<PinnedBuf>,
    /// The length that C asked for.
    pub(super) len: usize,
}

/// After so many holds a thread looks itself: blocks that it gives back are in its own cache, and
/// the reaper's thread need not keep up with all others.
const HOLDS_A_LOOK: u64 = 16;

/// What is counted in a part, under its lock.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) requested: u64,
    pub(super) allocations: u64,
    pub(super) frees: u64,
    pub(super) holds: u64,
}

/// The newest blocks of a part lie beside its map: most are freed before they enter it.
const RECENT: usize = 8;

#[derive(Debug, Default)]
struct Part {
    /// In no order. No more than `RECENT`; then they move into the map.
    recent: Vec<(usize, Block)>,
    /// By the address of the first byte.
    blocks: BTreeMap<usize, Block>,
    /// The streams that blocks were held for, by handle and by the device's index in the pool.
    streams: BTreeMap<(usize, usize), Stream>,
    counts: Counts,
}

#[derive(Debug, Default)]
pub(super) struct Blocks {
    parts: [CachePadded<Mutex<Part>>; PARTS],
}

impl Blocks {
    /// Enters a block, by the address of its first byte.
    pub(super) fn enter(&self, start: usize, block: Block) {
        let mut part = self.parts[own()].lock();
        part.counts.allocations += 1;
        part.counts.requested += block.len as u64;
        let Part { recent, blocks, .. } = &mut *part;
        if recent.len() >= RECENT {
            blocks.extend(recent.drain(..));
        }
        recent.push((start, block));
    }

    /// Takes out the block that starts at an address.
    pub(super) fn remove(&self, start: usize) -> Result<Block, Fault> {
        self.in_parts(start, |part| {
            let block = match part.recent.iter().rposition(|recent| recent.0 == start) {
                Some(at) => part.recent.swap_remove(at).1,
                None => part.blocks.remove(&start)?,
            };
            part.counts.frees += 1;
            part.counts.requested -= block.len as u64;
            Some(block)
        })
    }

    /// Uses the block that an address lies in, and the address where it starts.
    pub(super) fn with<R>(&self, address: usize, found: impl Fn(usize, &mut Block) -> R) -> Result<R, Fault> {
        self.in_parts(address, |part| {
            // The first byte is the block's own, though its length be 0.
            let inside = |start: usize, block: &Block| address.wrapping_sub(start) < block.len.max(1);
            if let Some((start, block)) = part.recent.iter_mut().find(|(start, block)| inside(*start, block))
            {
                return Some(found(*start, block));
            }
            let (start, block) = part.blocks.range_mut(..=address).next_back()?;
            inside(*start, block).then(|| found(*start, block))
        })
    }

    /// The stream with this handle, which the calling thread's part knows from the first time on,
    /// until [`forget`](Self::forget).
    pub(super) fn stream(
        &self,
        device: usize,
        handle: usize,
        adopt: impl FnOnce() -> Result<Stream, Error>,
    ) -> Result<Stream, Error> {
        let part = &self.parts[own()];
        if let Some(known) = part.lock().streams.get(&(handle, device)).cloned() {
            return Ok(known);
        }
        let stream = adopt()?;
        if handle != PER_THREAD {
            part.lock().streams.insert((handle, device), stream.clone());
        }
        Ok(stream)
    }

    /// Counts a hold. Returns whether the calling thread is to look which holds are over.
    pub(super) fn held(&self) -> bool {
        let mut part = self.parts[own()].lock();
        part.counts.holds += 1;
        part.counts.holds % HOLDS_A_LOOK == 0
    }

    /// Has the events of all holds on streams with this handle recorded, and forgets the streams.
    pub(super) fn forget(&self, handle: usize) -> Result<(), Error> {
        for part in &self.parts {
            let devices = (handle, 0)..=(handle, usize::MAX);
            let all: Vec<Stream> = part.lock().streams.range(devices).map(|known| known.1.clone()).collect();
            all.iter().try_for_each(Stream::record_holds)?;
            part.lock().streams.retain(|key, _| key.0 != handle);
        }
        Ok(())
    }

    /// The sums over the parts, of which each is exact.
    pub(super) fn counts(&self) -> Counts {
        let mut sum = Counts::default();
        for part in &self.parts {
            let counts = part.lock().counts;
            sum.requested += counts.requested;
            sum.allocations += counts.allocations;
            sum.frees += counts.frees;
            sum.holds += counts.holds;
        }
        sum
    }

    /// The first that `look` finds, in the calling thread's part and then in the others.
    fn in_parts<R>(&self, address: usize, look: impl Fn(&mut Part) -> Option<R>) -> Result<R, Fault> {
        let own = own();
        // Relaxed: a thread that has a block's address knows that the entering thread had a part.
        // (The first part is also that of threads that end.)
        let used = THREADS.load(Ordering::Relaxed).clamp(1, PARTS);
        let found = (own..used).chain(0..own).find_map(|index| look(&mut self.parts[index].lock()));
        found.ok_or_else(|| Fault::no_block(address))
    }
}

/// The number of threads that were given a part.
static THREADS: AtomicUsize = AtomicUsize::new(0);

/// The part of the calling thread.
fn own() -> usize {
    std::thread_local! {
        // Relaxed: the number stands for nothing else.
        static OWN: usize = THREADS.fetch_add(1, Ordering::Relaxed) % PARTS;
    }
    // A thread that ends, whose thread-locals may be gone, has the first.
    OWN.try_with(|own| *own).unwrap_or(0)
}
