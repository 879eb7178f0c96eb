//! The blocks that C has, found by any address inside them.
//!
//! A block is a buffer behind an `Arc`: C has one reference, and each hold on a stream another. The buffer goes back to
//! its pool with the last. So freeing a block never waits, and a block that a device still reads is not reused.
//!
//! The map is in parts, of which each thread enters new blocks into its own. Threads that allocate and free at the same
//! time therefore take different locks. An address is looked for in the calling thread's part first, then in the others.
//!
//! Each part also knows the streams that its threads have last held blocks for: finding out what a stream is takes
//! several driver calls.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam::utils::CachePadded;
use parking_lot::Mutex;
use pinpool::{PinnedBuf, Stream};

/// More threads than this share parts.
const PARTS: usize = 32;

/// A block that C has.
#[derive(Debug)]
pub(super) struct Block {
    /// Shared with the holds on it.
    pub(super) buf: Arc<PinnedBuf>,
    /// The address of its first byte.
    pub(super) start: usize,
    /// The length that C asked for.
    pub(super) len: usize,
}

/// The streams that a part knows at most.
const STREAMS: usize = 16;
/// After so many holds a thread looks itself: blocks that it gives back are in its own cache, and the reaper's thread
/// need not keep up with all others.
const HOLDS_A_LOOK: u64 = 16;

/// A stream that blocks were held for: the index of its device in the pool's list, and its handle.
#[derive(Debug)]
struct KnownStream {
    device: usize,
    handle: usize,
    stream: Stream,
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

/// The newest blocks of a part lie beside its map: most are freed soon, and then have never been in it.
const RECENT: usize = 8;

#[derive(Debug, Default)]
struct Part {
    /// In no order. No more than `RECENT`; then they move into the map.
    recent: Vec<Block>,
    /// By the address of the first byte.
    blocks: BTreeMap<usize, Block>,
    /// The last used is the last.
    streams: Vec<KnownStream>,
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
        let Part { recent, blocks, .. } = &mut *part;
        if recent.len() >= RECENT {
            blocks.extend(recent.drain(..).map(|block| (block.start, block)));
        }
        recent.push(block);
    }

    /// Takes out the block that starts at an address.
    pub(super) fn remove(&self, start: usize) -> Option<Block> {
        self.in_parts(|part| {
            let block = match part.recent.iter().rposition(|block| block.start == start) {
                Some(at) => part.recent.swap_remove(at),
                None => part.blocks.remove(&start)?,
            };
            part.counts.frees += 1;
            part.counts.requested -= block.len as u64;
            Some(block)
        })
    }

    /// Uses the block that an address lies in.
    pub(super) fn with<R>(&self, address: usize, mut found: impl FnMut(&mut Block) -> R) -> Option<R> {
        self.in_parts(|part| {
            let inside = |block: &Block| address.wrapping_sub(block.start) < block.len.max(1);
            if let Some(block) = part.recent.iter_mut().find(|block| inside(block)) {
                return Some(found(block));
            }
            let below = (Bound::Unbounded, Bound::Included(address));
            let (start, block) = part.blocks.range_mut::<usize, _>(below).next_back()?;
            // The first byte is the block's own, though its length be 0.
            (address - start < block.len.max(1)).then(|| found(block))
        })
    }

    /// The stream with this handle, if the calling thread's part knows it.
    pub(super) fn stream(&self, device: usize, handle: usize) -> Option<Stream> {
        let part = self.parts[own()].lock();
        let found = part.streams.iter().rev().find(|known| (known.device, known.handle) == (device, handle));
        found.map(|known| known.stream.clone())
    }

    /// Counts a hold that was taken, and knows its stream from now on. Returns whether the calling thread is to look which
    /// holds are over.
    pub(super) fn held(&self, device: usize, handle: usize, new: Option<Stream>) -> bool {
        let mut part = self.parts[own()].lock();
        part.counts.holds += 1;
        let due = part.counts.holds % HOLDS_A_LOOK == 0;
        let Some(stream) = new else { return due };
        let oldest = (part.streams.len() >= STREAMS).then(|| part.streams[0].stream.clone());
        part.streams.push(KnownStream { device, handle, stream });
        drop(part);
        let Some(oldest) = oldest else { return due };
        // Only a stream whose holds have their events is not known any more: `pinpool_forget_stream` looks here.
        if oldest.record_holds().is_ok() {
            self.parts[own()].lock().streams.retain(|known| known.stream.number() != oldest.number());
        }
        due
    }

    /// All streams with this handle that are known.
    pub(super) fn known(&self, handle: usize) -> Vec<Stream> {
        let of_part = |part: &CachePadded<Mutex<Part>>| -> Vec<Stream> {
            let part = part.lock();
            part.streams
                .iter()
                .filter(|known| known.handle == handle)
                .map(|known| known.stream.clone())
                .collect()
        };
        self.parts.iter().flat_map(of_part).collect()
    }

    /// Knows the streams with this handle no more.
    pub(super) fn forget(&self, handle: usize) {
        for part in &self.parts {
            part.lock().streams.retain(|known| known.handle != handle);
        }
    }

    /// The sums over the parts. Each part is exact, and blocks that move meanwhile may be in none of them.
    pub(super) fn counts(&self) -> Counts {
        self.parts.iter().fold(Counts::default(), |sum, part| {
            let part = part.lock();
            Counts {
                blocks: sum.blocks + (part.recent.len() + part.blocks.len()) as u64,
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
        // Relaxed: a thread that has a block's address knows that the thread that entered it had a part by then.
        // (The first part is also that of threads that end.)
        let used = THREADS.load(Ordering::Relaxed).clamp(1, PARTS);
        (own..used).chain(0..own).find_map(|index| look(&mut self.parts[index].lock()))
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
