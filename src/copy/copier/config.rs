//! How a copier is set up.

use std::num::NonZero;

use super::Copier;
use super::engine::Engine;
use crate::device::handle::Device;
use crate::error::{Error, Result};
use crate::pool::Pool;

/// Bytes of a chunk where nothing else is said. A launch takes as long for 1 MiB as for 4, and each copy costs the
/// link some 2 us between it and the next one.
const CHUNK: usize = 4 << 20;
const LEAST_CHUNK: usize = 16 << 10;
/// A row of the kernels' tables has 32 bits for an offset.
const MOST_CHUNK: usize = 1 << 30;
/// Threads where nothing else is said, if there are as many processors.
const THREADS: usize = 8;
const MOST_THREADS: usize = 1 << 10;
/// Copies in flight in each direction.
const DEPTH: usize = 6;
/// Bytes of pinned memory and of device memory that a copier uses at most.
const SHARE: usize = 256 << 20;
const RING: usize = 64 << 20;

/// Sets up a [`Copier`]: [`Copier::builder`]. Sizes are bytes.
///
/// ```
/// # use pinpool::{Copier, Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// let copier = Copier::builder(&pool, &device).threads(2).chunk(1 << 20).ring(16 << 20).build()?;
/// # drop(copier);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing happens until `build`"]
pub struct CopierBuilder {
    pool: Pool,
    device: Device,
    threads: Option<usize>,
    chunk: Option<usize>,
    share: Option<usize>,
    ring: usize,
}

/// Everything decided.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub(super) threads: usize,
    /// Bytes of a segment.
    pub(super) chunk: usize,
    /// Segments in use at most.
    pub(super) segments: usize,
    pub(super) depth: usize,
    /// Bytes of the device ring at most.
    pub(super) ring: usize,
}

impl CopierBuilder {
    pub(super) fn new(pool: &Pool, device: &Device) -> Self {
        let (pool, device) = (pool.clone(), device.clone());
        Self { pool, device, threads: None, chunk: None, share: None, ring: RING }
    }

    /// Threads that fill and drain segments, beside the thread of a blocking call. They start with the first transfer
    /// and sleep when there is nothing to do. Default: as many as there are processors, at most 8. A stepped device has
    /// none.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Bytes of a segment, 16 KiB to 1 GiB. Default: 4 MiB, less where the pool or the [share](Self::share) is small.
    pub fn chunk(mut self, bytes: usize) -> Self {
        self.chunk = Some(bytes);
        self
    }

    /// Bytes of the pool that the copier uses at most. Default: half of the pool's capacity, at most 256 MiB. One
    /// segment is used in any case.
    pub fn share(mut self, bytes: usize) -> Self {
        self.share = Some(bytes);
        self
    }

    /// Bytes of device memory for the device ring, through which small scattered pieces go. It is allocated when it is
    /// first needed, and freed when it was unused for two seconds. Default: 64 MiB. With 0, and on devices without the
    /// kernels for it, pieces are copied in batches.
    pub fn ring(mut self, bytes: usize) -> Self {
        self.ring = bytes;
        self
    }

    /// Builds the copier: makes its streams and loads its kernels, and starts no thread yet.
    ///
    /// # Errors
    /// [`Error::Config`] for settings that make no sense; [`Error::WrongDevice`] for a device that the pool does not
    /// serve; the driver's error.
    pub fn build(self) -> Result<Copier> {
        let settings = self.settings()?;
        Ok(Copier::start(Engine::new(self.pool, self.device, settings)?))
    }

    fn settings(&self) -> Result<Settings> {
        let wrong = |text: String| Err(Error::Config(text));
        if !self.pool.serves(self.device.context()) {
            return Err(Error::WrongDevice { device: self.device.name().into() });
        }
        let is_stepped = self.device.context().driver().stepped().is_some();
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let threads = match self.threads {
            Some(0) => return wrong("a copier with threads of 0; it needs at least 1".into()),
            Some(threads) if threads > MOST_THREADS => {
                return wrong(format!(
                    "a copier with threads of {threads}; at most {MOST_THREADS} make sense"
                ));
            }
            _ if is_stepped => 0,
            Some(threads) => threads,
            None => cores.min(THREADS),
        };
        let (capacity, largest) = self.pool.room();
        let share = self.share.unwrap_or_else(|| (capacity / 2).min(SHARE));
        let chunk = match self.chunk {
            Some(bytes) if (LEAST_CHUNK..=MOST_CHUNK).contains(&bytes) => bytes,
            Some(bytes) => {
                return wrong(format!(
                    "a copier with a chunk of {bytes} bytes; {LEAST_CHUNK} to {MOST_CHUNK} make sense"
                ));
            }
            None => {
                let mut chunk = CHUNK;
                while chunk > LEAST_CHUNK && (chunk > largest || chunk * 2 > share) {
                    chunk /= 2;
                }
                chunk
            }
        };
        if chunk > largest {
            return wrong(format!(
                "a copier with a chunk of {chunk} bytes; the pool's largest buffer has {largest}: make the chunk \
                 smaller or the pool or its extents larger"
            ));
        }
        Ok(Settings { threads, chunk, segments: (share / chunk).max(1), depth: DEPTH, ring: self.ring })
    }
}
