//! The plain data that the copier's parts share: they import this file; it imports none of them.

use crate::locks::Mutex;
use crate::segment::PAGE;

/// Bytes of a segment beside the chunk's: a file's chunk begins within a page and ends with one;
/// behind it is room for a table.
pub(super) const BESIDE: usize = 3 * PAGE;

/// Which transfers go first: [`Copier::with_priority`](super::Copier::with_priority).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Priority {
    /// Loads of much data: in the order of their starts, both directions at once, with at most
    /// [`depth`](super::CopierBuilder::depth) chunks in flight in each direction, and one beside a
    /// foreground copy. An eighth of the segments, at least one of four, is never theirs.
    #[default]
    Bulk,
    /// Requests whose latency counts: before all bulk transfers, on streams of their own, with
    /// segments kept for them, and without the rate limit.
    Foreground,
}

/// Everything decided.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub(super) threads: usize,
    /// Bytes of a chunk, and of a segment.
    pub(super) chunk: usize,
    pub(super) segment: usize,
    pub(super) share: usize,
    /// Segments in use at most.
    pub(super) segments: usize,
    /// Bulk copies in flight in each direction at most.
    pub(super) depth: usize,
    pub(super) rate: Option<u64>,
    /// Bytes of the device ring at most.
    pub(super) ring: usize,
}

impl Settings {
    /// Threads that are started: one more, which never blocks, replaces the waiting caller's.
    pub(super) fn workers(&self) -> usize {
        self.threads + usize::from(self.threads > 0)
    }
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Direction {
    #[default]
    Up,
    Down,
}

impl Direction {
    pub(super) fn other(self) -> Self {
        if self == Self::Up { Self::Down } else { Self::Up }
    }
}

/// What a job's chunks need of the worker that takes one. A worker takes chunks of its kind and of
/// lesser ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// Nothing: their bytes are copied from or to where they are on the host
    /// ([`Chunk::parts`](super::chunk::Chunk::parts)).
    InPlace,
    /// A segment.
    Staged,
    /// A segment and time: to fill or drain it, code of the program's, or a file, may block the
    /// worker.
    Blocking,
}

/// Counts of a copier since it was built, and its settings:
/// [`Copier::stats`](super::Copier::stats). They are of one moment only while nothing is copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopierStats {
    /// Threads that fill and drain segments, but for the one that never blocks.
    pub threads: usize,
    /// Bytes of a chunk.
    pub chunk: usize,
    /// Bytes of the pool that the copier uses at most.
    pub share: usize,
    /// Chunks that were moved. A short slice counts as one.
    pub chunks: u64,
    /// Bytes that went through the device ring, spread or collected there by a kernel.
    pub ring_bytes: u64,
    /// Bytes that went between a segment and their places by copies, and bytes of short slices.
    pub batch_bytes: u64,
    /// Bytes of pinned blocks, readers and writers that were copied in place without the ring.
    pub in_place_bytes: u64,
    /// Bytes of files that were read from the page cache.
    pub cached_bytes: u64,
    /// Bytes of files that were read past the page cache.
    pub direct_bytes: u64,
    /// Bytes of files that were read in the ordinary way, cached or not.
    pub buffered_bytes: u64,
    /// Kernels that were launched.
    pub launches: u64,
    /// Chunks that kernels worked on.
    pub launched_chunks: u64,
    /// Bytes of device memory that the ring has now.
    pub ring: usize,
    /// Whether the device has the kernels that spread and collect bytes. Without them all pieces
    /// are copied in batches.
    pub has_kernels: bool,
}

/// What is counted so far; what is not counted is filled in when a program asks.
pub(super) type Counters = Mutex<CopierStats>;
