//! The blocks that C has, found by any address inside them.
//!
//! A block is a buffer behind an `Arc`: C has one reference, and each hold on a stream another. The buffer goes back to
//! its pool with the last. So freeing a block never waits, and a block that a device still reads is not reused.
//!
//! The map is in parts, of which each thread enters new blocks into its own. Threads that allocate and free at the same
//! time therefore take different locks. An address is looked for in the calling thread's part first, then in the others.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam::utils::CachePadded;

use crate::buffer::PinnedBuf;
use crate::locks::Mutex;

/// More threads than this share parts.
const PARTS: usize = 32;

/// A block that C has.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) buf: Arc<PinnedBuf>,
    /// The address of its first byte.
    pub(super) start: usize,
    /// The length that C asked for.
    pub(super) len: usize,
}

/// What is counted in a part, under its lock.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) blocks: u64,
    pub(super) requested: u64,
    pub(super) allocations: u64,
    pub(super) frees: u64,
    pub(super) holds: u64,
}

#[derive(Debug, Default)]
struct Part {
    /// By the address of the first byte.
    blocks: BTreeMap<usize, Block>,
    /// `blocks` is not counted here, since the map knows it.
    counts: Counts,
}

#[derive(Debug)]
pub(super) struct Blocks {
    parts: [CachePadded<Mutex<Part>>; PARTS],
}

impl Blocks {
    pub(super) fn new() -> Self {
        Self { parts: std::array::from_fn(|_| CachePadded::default()) }
    }

    pub(super) fn enter(&self, block: Block) {
        let mut part = self.parts[own()].lock();
        part.counts.allocations += 1;
        part.counts.requested += block.len as u64;
        part.blocks.insert(block.start, block);
    }

    /// Takes out the block that starts at an address.
    pub(super) fn remove(&self, start: usize) -> Option<Block> {
        self.in_parts(|part| {
            let block = part.blocks.remove(&start)?;
            part.counts.frees += 1;
            part.counts.requested -= block.len as u64;
            Some(block)
        })
    }

    /// Uses the block that an address lies in.
    pub(super) fn with<R>(&self, address: usize, mut found: impl FnMut(&mut Block) -> R) -> Option<R> {
        self.in_parts(|part| {
            let below = (Bound::Unbounded, Bound::Included(address));
            let (start, block) = part.blocks.range_mut::<usize, _>(below).next_back()?;
            // The first byte is the block's own, though its length be 0.
            (address - start < block.len.max(1)).then(|| found(block))
        })
    }

    /// Counts a hold that was taken.
    pub(super) fn count_hold(&self) {
        self.parts[own()].lock().counts.holds += 1;
    }

    /// The sums over the parts. Each part is exact, and blocks that move meanwhile may be in none of them.
    pub(super) fn counts(&self) -> Counts {
        self.parts.iter().fold(Counts::default(), |sum, part| {
            let part = part.lock();
            Counts {
                blocks: sum.blocks + part.blocks.len() as u64,
                requested: sum.requested + part.counts.requested,
                allocations: sum.allocations + part.counts.allocations,
                frees: sum.frees + part.counts.frees,
                holds: sum.holds + part.counts.holds,
            }
        })
    }

    /// The first that `look` finds, in the calling thread's part and then in the others.
    fn in_parts<R>(&self, mut look: impl FnMut(&mut Part) -> Option<R>) -> Option<R> {
        let own = own();
        (own..PARTS).chain(0..own).find_map(|index| look(&mut self.parts[index].lock()))
    }
}

/// The part of the calling thread.
fn own() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    std::thread_local! {
        // Relaxed: the number stands for nothing else.
        static OWN: usize = THREADS.fetch_add(1, Ordering::Relaxed) % PARTS;
    }
    // A thread that ends, whose thread-locals may be gone, has the first.
    OWN.try_with(|own| *own).unwrap_or(0)
}
