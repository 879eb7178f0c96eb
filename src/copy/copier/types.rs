//! The plain data that the copier's parts share: they import this file, and it imports none of them.

use crate::segment::PAGE;

/// Bytes of a segment beside the chunk's: a file's chunk begins within a page and is read to the end of one; behind it
/// is room for a table.
pub(super) const BESIDE: usize = 3 * PAGE;

/// Which transfers go first: [`Copier::with_priority`](super::Copier::with_priority).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Priority {
    /// Loads of much data: in the order in which they were started, both directions at once, with at most
    /// [`depth`](super::CopierBuilder::depth) chunks in flight in each direction.
    #[default]
    Bulk,
    /// Requests whose latency counts: before all bulk transfers, on streams of their own, with segments kept for them.
    /// The rate limit does not hold for them.
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
    /// Threads that are started: one more, which never blocks, in place of the caller's, which waits.
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
        match self {
            Self::Up => Self::Down,
            Self::Down => Self::Up,
        }
    }
}
