//! What a copier has done so far.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of a copier since it was built: [`Copier::stats`](super::Copier::stats). Each is right by itself; together
/// they are of one moment only while nothing is copied.
///
/// ```
/// # use pinpool::{Copier, Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// let copier = Copier::builder(&pool, &device).build()?;
/// let stats = copier.stats();
/// println!("{} bytes by the ring, {} in batches", stats.ring_bytes, stats.batch_bytes);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopierStats {
    /// Chunks that were moved. A short slice counts as one.
    pub chunks: u64,
    /// Bytes that went through the device ring, spread or collected there by a kernel.
    pub ring_bytes: u64,
    /// Bytes that went between a segment and their places by copies, and those of short slices, which need no segment.
    pub batch_bytes: u64,
    /// Bytes of pinned blocks that were copied between where they are and their places, without the ring.
    pub in_place_bytes: u64,
    /// Bytes of files that were read from the page cache.
    pub cached_bytes: u64,
    /// Bytes of files that were read past the page cache.
    pub direct_bytes: u64,
    /// Bytes of files that were read in the ordinary way: that was asked for, or the system does not tell what is cached,
    /// or refuses reads past the cache.
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

/// The same, being counted. Relaxed throughout: sums, not signals.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) chunks: AtomicU64,
    pub(super) ring: AtomicU64,
    pub(super) batch: AtomicU64,
    pub(super) in_place: AtomicU64,
    pub(super) cached: AtomicU64,
    pub(super) direct: AtomicU64,
    pub(super) buffered: AtomicU64,
    pub(super) direct_refused: AtomicU64,
}

impl Counters {
    pub(super) fn add(counter: &AtomicU64, n: usize) {
        counter.fetch_add(n as u64, Ordering::Relaxed);
    }

    pub(super) fn stats(&self) -> CopierStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        CopierStats {
            chunks: read(&self.chunks),
            ring_bytes: read(&self.ring),
            batch_bytes: read(&self.batch),
            in_place_bytes: read(&self.in_place),
            cached_bytes: read(&self.cached),
            direct_bytes: read(&self.direct),
            buffered_bytes: read(&self.buffered),
            direct_refused: read(&self.direct_refused),
            ..CopierStats::default()
        }
    }
}
