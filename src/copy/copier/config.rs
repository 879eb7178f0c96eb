//! How a copier is set up.

use std::num::NonZero;
use std::sync::Arc;

use super::Copier;
use super::engine::Engine;
use super::types::{BESIDE, Priority, Settings};
use super::workers::Workers;
use crate::device::handle::Device;
use crate::error::{Error, Result};
use crate::pool::{Pool, Request};
use crate::segment::PAGE;

/// The default length of a chunk. A launch takes as long for 1 MiB as for 4, and each copy costs
/// the link some 2 us between it and the next one.
const CHUNK: usize = 4 << 20;
const LEAST_CHUNK: usize = PAGE;
/// A row of the kernels' tables has 32 bits for an offset.
const MOST_CHUNK: usize = 1 << 30;
/// Threads by default, if there are as many processors.
const THREADS: usize = 8;
/// Bulk copies in flight in each direction by default.
const DEPTH: usize = 8;
/// Bytes of pinned memory and of device memory that a copier uses at most.
const SHARE: usize = 256 << 20;
const RING: usize = 64 << 20;

/// Sets up a [`Copier`]: [`Copier::builder`]. Sizes are bytes.
#[derive(Clone, Debug)]
#[must_use = "nothing happens until `build`"]
pub struct CopierBuilder {
    pool: Pool,
    device: Device,
    threads: Option<usize>,
    chunk: Option<usize>,
    share: Option<usize>,
    ring: usize,
    depth: usize,
    rate: Option<u64>,
}

impl CopierBuilder {
    pub(super) fn new(pool: &Pool, device: &Device) -> Self {
        let (pool, device) = (pool.clone(), device.clone());
        Self { pool, device, threads: None, chunk: None, share: None, ring: RING, depth: DEPTH, rate: None }
    }

    /// Threads that fill and drain segments. They start with the first transfer. Default: one for
    /// each processor, at most 8. One thread more never calls a source, sink or file that may
    /// block.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Bytes of a chunk, 4 KiB to 1 GiB. Default: 4 MiB, less where the pool or the
    /// [share](Self::share) is small. A segment has 12 KiB more.
    pub fn chunk(mut self, bytes: usize) -> Self {
        self.chunk = Some(bytes);
        self
    }

    /// Bytes of the pool that the copier uses at most. Default: half of the pool's capacity, at
    /// most 256 MiB. One segment is used in any case.
    pub fn share(mut self, bytes: usize) -> Self {
        self.share = Some(bytes);
        self
    }

    /// Bytes of device memory for the ring, through which small scattered pieces go. It is
    /// allocated when it is first needed, and freed when it was unused for two seconds. Default: 64
    /// MiB. With 0, and on devices without the kernels for it, pieces are copied in batches.
    pub fn ring(mut self, bytes: usize) -> Self {
        self.ring = bytes;
        self
    }

    /// The most bulk chunks in flight in each direction. A copy of the foreground or of the program
    /// may wait for as many. Default: 8, which keeps the link busy; 2 for shorter waits.
    pub fn depth(mut self, chunks: usize) -> Self {
        self.depth = chunks;
        self
    }

    /// The most bytes per second of bulk transfers, both directions together. Default: no limit.
    pub fn rate(mut self, bytes_per_second: u64) -> Self {
        self.rate = Some(bytes_per_second);
        self
    }

    /// Builds the copier: makes its streams and loads its kernels, and starts no thread yet.
    ///
    /// # Errors
    /// [`Error::Argument`] for settings that make no sense; [`Error::Mismatch`] for a device that
    /// the pool does not serve.
    pub fn build(self) -> Result<Copier> {
        let settings = self.settings()?;
        let engine = Engine::new(self.pool, self.device, settings)?;
        Ok(Copier { workers: Arc::new(Workers::new(engine)), priority: Priority::Bulk, timeout: None })
    }

    fn settings(&self) -> Result<Settings> {
        let Self { ref pool, ref device, threads, chunk, share, ring, depth, rate } = *self;
        pool.check_serves(device.context())?;
        for (what, value, (least, most)) in [
            ("threads", threads, (1, 1 << 10)),
            ("a depth", Some(depth), (1, 1 << 10)),
            ("a chunk", chunk, (LEAST_CHUNK, MOST_CHUNK)),
        ] {
            if let Some(value) = value.filter(|value| !(least..=most).contains(value)) {
                return wrong(format!("{what} of {value}; {least} to {most} make sense"));
            }
        }
        if rate == Some(0) {
            return wrong(
                "a rate of 0 bytes a second, which would never end; leave it out for no limit".into(),
            );
        }
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let threads = threads.unwrap_or_else(|| cores.min(THREADS));
        let threads = if device.context().is_by_hand() { 0 } else { threads };
        let (capacity, largest) = pool.room();
        // The segment's header and its rounding, and the pool's class.
        let taken = |chunk: usize| {
            let request = Request::new(chunk + BESIDE).align(PAGE);
            request.segment_bytes().unwrap_or(usize::MAX)
        };
        let smallest = taken(LEAST_CHUNK);
        if let Some(share) = share.filter(|share| *share < smallest) {
            return wrong(format!("a share of {share} bytes; the smallest segment takes {smallest}"));
        }
        let share = share.unwrap_or_else(|| (capacity / 2).min(SHARE));
        let fits = |chunk: &usize| chunk + BESIDE <= largest && taken(*chunk) * 4 <= share;
        let mut halves = std::iter::successors(Some(CHUNK), |chunk| Some(chunk / 2));
        let chunk = chunk.or_else(|| halves.find(|chunk| *chunk <= LEAST_CHUNK || fits(chunk)));
        let chunk = chunk.unwrap_or(LEAST_CHUNK);
        if chunk + BESIDE > largest {
            return wrong(format!(
                "a chunk of {chunk} bytes; the pool's largest buffer has {largest}, and {BESIDE} are needed beside the \
                 chunk: make the chunk smaller or the pool or its extents larger"
            ));
        }
        let (segment, segments) = (chunk + BESIDE, (share / taken(chunk)).max(1));
        Ok(Settings { threads, chunk, segment, share, segments, depth, rate, ring })
    }
}

fn wrong(text: String) -> Result<Settings> {
    Err(Error::Argument(format!("a copier with {text}")))
}
