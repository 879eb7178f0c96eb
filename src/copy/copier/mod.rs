//! The copier: much data, or many pieces of it, to the device and back at the speed of the link.
//!
//! ```
//! use pinpool::copier::FileSource;
//! use pinpool::{Copier, Device, Pool, Unpinned};
//!
//! let device = Device::open("host")?;
//! let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
//! let copier = Copier::builder(&pool, &device).build()?; // usable from many threads at once
//!
//! let memory = device.alloc(3 << 20)?;
//! copier.upload_slice(&vec![7; 3 << 20], &memory)?; // borrowed: returns when it is on the device
//!
//! let load = copier.upload(vec![8; 1 << 20], memory.slice(..1 << 20))?; // owned: goes on by itself
//! println!("{:?} left", load.progress().remaining());
//! assert!(load.wait_landed(4096)); // the first bytes are on the device, and can be used
//! load.wait()?; // or load.await, or load.cancel(); the source comes back
//! copier.upload(FileSource::open("Cargo.toml")?, memory.slice(1 << 20..))?.wait()?;
//! let first: Vec<u8> = copier.download(memory.slice(..4096), Vec::new())?.wait()?;
//!
//! let mut back = vec![0; 3 << 20];
//! copier.download_slice(&memory, &mut back)?;
//! assert!(back[..1 << 20].iter().all(|b| *b == 8) && first == back[..4096]);
//! # Ok::<(), pinpool::Error>(())
//! ```
//!
//! # The calls
//!
//! | from or to | calls | |
//! | --- | --- | --- |
//! | borrowed bytes | [`upload_slice`](Copier::upload_slice), [`download_slice`](Copier::download_slice) | blocking |
//! | many slices of borrowed bytes | [`upload_slices`](Copier::upload_slices), [`download_slices`](Copier::download_slices) | blocking |
//! | owned bytes, a vector, a file, any [`Source`], any [`Sink`] | [`upload`](Copier::upload), [`download`](Copier::download) | a [`Transfer`] |
//! | pinned blocks of many pages each | [`upload_pages`](Copier::upload_pages), [`download_pages`](Copier::download_pages) | a [`Transfer`] |
//! | `Read`, `Write` | [`upload_read`](Copier::upload_read), [`download_write`](Copier::download_write) | blocking, on the caller's thread |
//!
//! # How it works
//!
//! A GPU moves long contiguous ranges at the link's speed, and short scattered ones at a fraction
//! of it. So a transfer is cut into chunks: threads fill segments of the pool, several at once, and
//! one long copy moves each. Bytes that belong to many places are copied to a ring of device
//! memory, from which a kernel spreads them; on the way back a kernel collects them, and the CPU
//! takes them out of the segment. Pinned blocks of pages are copied in place.
//!
//! # Ordering
//!
//! **Transfers are unordered**, also those of one copier that use the same device memory: they run
//! at once, and their chunks complete in any order. Three things order a transfer:
//!
//! - Its end, which [`Transfer::wait`], `await` and a blocking call see. A transfer that is
//!   started, and work that is submitted to any stream, afterwards finds its bytes.
//! - The arrival of [a part](Transfer::wait_landed) of it, for that part.
//! - [`Copier::wait_for`]: copies that are submitted later wait for what a stream was given before.
//!
//! A program that overwrites what another transfer uses waits for that transfer's handle first.
//!
//! # Streams of bytes
//!
//! A thread that reads from a pipe or a decoder calls [`upload_read`](Copier::upload_read). An
//! async task needs no copier: it fills a buffer of [`Pool::checkout_async`], uploads it
//! ([`Stream::upload`]), and fills the next one meanwhile.
//!
//! # A pool that others hold
//!
//! A copier with segments goes on with those while the pool has no more of their length. One
//! without takes the longest free range, down to 4 KiB for a chunk. Where there is none, it waits
//! in the pool's queue like any other request, for 16 KiB, which take 20 KiB in one piece.
//! Beside a cache that never gives up any of the pool, a transfer waits for ever, unless it has a
//! deadline ([`Copier::with_timeout`]): give such a cache and the loads a pool each.

// The files, in the order to read them. The calls: `calls`, `read_write`; what a program gives:
// `source`, `file`. A transfer: `job`, its handle `transfer`. What moves it: `workers`, `worker`,
// its `stages`, `scheduler`, `engine`, `segments`; on the device `device_ring`, `spreader`. Chunks:
// `chunk`, by which way they go `route`; plans: `pieces`, `ranges`.
//
// Invariants:
// - A worker owns a chunk from taking it to the chunk's end. It parks only while it owns none.
// - Memory that a caller lends is read or written by CPUs alone, but for short slices, which a
//   driver copies. After the call nothing reads or writes it.
// - A slot of the ring is free only when the copy and the kernel that used it were seen complete.

#![allow(unsafe_code)]

mod calls;
mod chunk;
mod config;
mod device_ring;
mod engine;
mod file;
mod job;
#[cfg(all(test, loom))]
mod loom_models;
mod pieces;
mod ranges;
mod rate;
mod read_write;
mod route;
mod scheduler;
mod segments;
mod source;
mod spreader;
mod stores;
mod trace;
mod transfer;
mod types;
mod worker;
mod workers;

use std::sync::Arc;
use std::time::Duration;

pub use self::config::CopierBuilder;
pub use self::file::{FileSink, FileSource, Reading};
pub use self::job::Progress;
pub use self::ranges::{CopyRange, CopyRanges};
pub use self::source::{Fill, Sink, Source};
pub use self::transfer::Transfer;
pub use self::types::{CopierStats, Priority};

use self::engine::Engine;
use self::types::Settings;
use self::workers::Workers;
use crate::device::handle::Device;
use crate::error::{Error, Result};
use crate::pool::Pool;
use crate::stream::Stream;

/// Whether this thread may wait for a transfer. Code that starts several and waits for them
/// afterwards asks before it starts the first.
///
/// # Errors
/// [`Error::Unsupported`] where it [must not](Error#waits).
pub fn may_wait() -> Result<()> {
    let what = "a wait for a transfer on one of the crate's own threads: in a waker, a source or a sink; wake a task or \
                thread of yours, and wait there";
    match crate::sync::own().is_none() && !crate::sync::finds_out() {
        true => Ok(()),
        false => Err(Error::Unsupported(what.into())),
    }
}

/// Moves data between the host and one device. A clone is another handle to the same copier, and
/// all calls may come from many threads. The [module's page](self) has the calls and their order.
///
/// # What it uses
/// Segments of the pool, at most [`CopierBuilder::share`] bytes, and device memory, at most
/// [`CopierBuilder::ring`]. An idle copier uses no processor time, no segment, and after two
/// seconds no device memory. Beside the share, a running [`upload_read`](Self::upload_read) or
/// [`download_write`](Self::download_write) uses one or two segments. Dropping the last handle
/// waits for nothing: transfers go on, and then the threads end.
#[derive(Clone)]
pub struct Copier {
    workers: Arc<Workers>,
    priority: Priority,
    timeout: Option<Duration>,
}

impl Copier {
    /// Starts setting up a copier between a pool, which serves the device, and the device.
    pub fn builder(pool: &Pool, device: &Device) -> CopierBuilder {
        CopierBuilder::new(pool, device)
    }

    fn engine(&self) -> &Arc<Engine> {
        &self.workers.engine
    }

    /// A handle whose transfers have this priority. Without it they are [`Priority::Bulk`].
    #[must_use]
    pub fn with_priority(&self, priority: Priority) -> Self {
        Self { priority, ..self.clone() }
    }

    /// A handle whose transfers end `timeout` after their call at the latest, whatever they wait
    /// for: memory of the pool, the rate, a source. Copies of short slices have no deadline.
    ///
    /// At the deadline no further chunk is begun. The transfer ends with
    /// [`Error::Timeout`](crate::Error::Timeout), whose text says how far it had come and what it
    /// waited for. Chunks under way come first: a source or sink that does not return, or a device
    /// that hangs, keeps the transfer from ending; [`Transfer::wait_timeout`] gives up the wait
    /// alone. A transfer whose last chunks arrive late ends well.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self.clone() }
    }

    /// The pool that the copier takes segments from.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.engine().segments.pool
    }

    /// The device that the copier copies to and from.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.engine().device
    }

    /// Counts since the copier was built, and its settings.
    #[must_use]
    pub fn stats(&self) -> CopierStats {
        let engine = self.engine();
        let Settings { threads, chunk, share, .. } = engine.settings;
        if crate::os::forked() {
            return CopierStats { threads, chunk, share, ..CopierStats::default() };
        }
        let ring = engine.ring.len();
        let has_kernels = engine.spreaders.is_some();
        CopierStats { threads, chunk, share, ring, has_kernels, ..*engine.counters.lock() }
    }

    /// For tests that move a device by hand: does what can be done. Whether anything changed.
    #[doc(hidden)]
    pub fn reap(&self) -> bool {
        !crate::os::forked() && self.workers.advance()
    }

    /// Makes all copies that are submitted from now on wait for what `stream` was given so far, for
    /// kernels that still use the memory or write what is downloaded. The caller does not wait.
    ///
    /// # Errors
    /// As for [`Stream::wait_for`].
    pub fn wait_for(&self, stream: &Stream) -> Result<()> {
        self.engine().streams().try_for_each(|own| own.wait_for(stream))
    }
}

impl std::fmt::Debug for Copier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Copier").field("device", &self.device().name()).finish_non_exhaustive()
    }
}
