//! What a copier has done so far.

use crate::locks::Mutex;

/// Counts of a copier since it was built, and its settings: [`Copier::stats`](super::Copier::stats). Together the
/// counts are of one moment only while nothing is copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopierStats {
    /// Threads that fill and drain segments. One more, which never blocks on a program's code, is not counted.
    pub threads: usize,
    /// Bytes of a chunk.
    pub chunk: usize,
    /// Bytes of the pool that the copier uses at most.
    pub share: usize,
    /// Chunks that were moved. A short slice counts as one.
    pub chunks: u64,
    /// Bytes that went through the device ring, spread or collected there by a kernel.
    pub ring_bytes: u64,
    /// Bytes that went between a segment and their places by copies, and those of short slices, which need no segment.
    pub batch_bytes: u64,
    /// Bytes of pinned blocks that were copied between where they are and their places, without the ring. The segments
    /// of readers and writers count as such blocks.
    pub in_place_bytes: u64,
    /// Bytes of files that were read from the page cache.
    pub cached_bytes: u64,
    /// Bytes of files that were read past the page cache.
    pub direct_bytes: u64,
    /// Bytes of files that were read in the ordinary way: that was asked for, or the system does not tell what is
    /// cached, or refuses reads past the cache.
    pub buffered_bytes: u64,
    /// Files that could not be opened for reading past the cache, or failed to be read so.
    pub direct_refused: u64,
    /// Kernels that were launched, and the chunks that they worked on.
    pub launches: u64,
    /// See [`launches`](Self::launches).
    pub launched_chunks: u64,
    /// Bytes of device memory that the ring has now.
    pub ring: usize,
    /// How often the device has refused memory for the ring. Pieces were copied in batches for a second then.
    pub ring_refused: u64,
    /// Whether the device has the kernels. Without them all pieces are copied in batches.
    pub has_kernels: bool,
}

/// What is counted so far; what is not counted is filled in when a program asks.
pub(super) type Counters = Mutex<CopierStats>;
