//! The plain data that the copier's parts share: they import this file, and it imports none of them.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::segment::PAGE;

/// Bytes of a segment beside the chunk's: a file's chunk begins within a page and is read to the end of one; behind it
/// is room for a table.
pub(super) const BESIDE: usize = 3 * PAGE;

/// Which transfers go first: [`Copier::with_priority`](super::Copier::with_priority).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Priority {
    /// Loads of much data: in the order in which they were started, both directions at once, with at most
    /// [`depth`](super::CopierBuilder::depth) chunks in flight in each direction, and one while a foreground copy is.
    /// An eighth of the segments, at least one of four, is never theirs.
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

/// What the chunks of a job need of a worker. A worker that takes chunks of one kind takes those of lesser kinds, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// Nothing: their bytes stay where they are.
    InPlace,
    /// A segment.
    Staged,
    /// A segment and time: code of the program's, or a file, may block the worker.
    Blocking,
}

/// A role that one thread has at a time. Others do not wait for it.
#[derive(Debug, Default)]
pub(super) struct Role(AtomicBool);

impl Role {
    /// Takes the role, until the drop of what this gives.
    pub(super) fn take(&self) -> Option<Taken<'_>> {
        // Acquire: pairs with the release in the drop of the one before.
        let is_free = !self.0.load(Ordering::Relaxed) && !self.0.swap(true, Ordering::Acquire);
        is_free.then(|| Taken(self))
    }
}

pub(super) struct Taken<'a>(&'a Role);

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        // Release: pairs with the acquire in `take`.
        self.0.0.store(false, Ordering::Release);
    }
}
