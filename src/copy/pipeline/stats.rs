//! What a pipeline has done so far.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of a pipeline since it was built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PipelineStats {
    /// Bytes of files that were read from the page cache.
    pub cached_bytes: u64,
    /// Bytes of files that were read past the page cache.
    pub direct_bytes: u64,
    /// Bytes of files that were read like any other, because the file system does not say what is cached, or refuses to go
    /// past the cache, or it was too little.
    pub buffered_bytes: u64,
    /// Bytes of files that were copied from where the page cache has them.
    pub window_bytes: u64,
    /// Windows of files that could not be registered, and were read instead.
    pub windows_refused: u64,
    /// Files that could not be opened for reading past the cache, or failed to be read so.
    pub direct_refused: u64,
}

/// The same, being counted. Relaxed throughout: sums, not signals.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) cached: AtomicU64,
    pub(super) direct: AtomicU64,
    pub(super) buffered: AtomicU64,
    pub(super) windows: AtomicU64,
    pub(super) windows_refused: AtomicU64,
    pub(super) direct_refused: AtomicU64,
}

impl Counters {
    pub(super) fn add(counter: &AtomicU64, n: usize) {
        counter.fetch_add(n as u64, Ordering::Relaxed);
    }

    pub(super) fn stats(&self) -> PipelineStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PipelineStats {
            cached_bytes: read(&self.cached),
            direct_bytes: read(&self.direct),
            buffered_bytes: read(&self.buffered),
            window_bytes: read(&self.windows),
            windows_refused: read(&self.windows_refused),
            direct_refused: read(&self.direct_refused),
        }
    }
}
