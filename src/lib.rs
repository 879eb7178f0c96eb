//! A pool of page-locked ("pinned") host memory for inference servers.
//!
//! Pinned memory is what accelerators copy from and to at full speed, and it is slow to get. So it is taken from the
//! system in large *regions*, once; regions are cut into *segments* by size class; a segment is checked out, filled,
//! copied to or from a device on a stream, and comes back by itself when the copy is done.
//!
//! # The one rule
//!
//! **A host-ready buffer never has device work outstanding, and getting one never waits for a stream unless the caller
//! chose to wait.** Stream order alone does not protect host memory: the CPU writes at once, while an earlier copy may
//! still read. So what may be done with a buffer is its type:
//!
//! | type | the CPU may | the device may |
//! | --- | --- | --- |
//! | [`PinnedBuf`], host-ready | read what was written, and write | do nothing |
//! | [`StreamBuf`], stream-ready | do nothing | use it on one stream, in order |
//! | [`InFlight`] | do nothing | read or write it at any time, until it is done |
//!
//! Submitting a copy takes the buffer; waiting for it, or awaiting it, gives it back; dropping the handle lets the
//! segment return to the pool by itself.
//!
//! # Example
//!
//! ```
//! use pinpool::{Device, Pool, Unpinned};
//!
//! let device = Device::open("auto")?; // or "cuda:0", "acl:0", "host"
//! // Refusing to go on without page locks is the default; this runs under any memlock limit.
//! let pool = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow).build()?;
//! let stream = device.stream()?;
//! let weights = device.alloc(5)?;
//!
//! let mut buf = pool.checkout(5)?; // host-ready, and ours alone
//! buf.extend_from_slice(b"hello");
//! let sent = stream.upload(buf, weights.slice(..))?; // takes buf: nobody can write under the copy
//! let buf = sent.wait()?; // have it back, to fill again
//! drop(stream.upload(buf, weights.slice(..))?); // or let it return when the copy is done
//!
//! let landing = pool.checkout_on(&stream, 5)?; // stream-ready: may still be in flight on this very stream
//! let back = stream.download(weights.slice(..), landing)?.wait()?;
//! assert_eq!(*back, *b"hello");
//! # Ok::<(), pinpool::Error>(())
//! ```
//!
//! # Where to look
//!
//! - Setting up: [`Device::open`], [`Pool::builder`], [`Device::stream`], [`Device::alloc`]; device memory in a
//!   stream's order by [`Stream::alloc`], that of others by [`Device::raw_memory`].
//! - Checking out: [`Pool::checkout`] and its `try_`, `_timeout`, `_async`, `_many` and `_on` forms;
//!   [`Pool::checkout_or_unpinned`] where plain memory is better than none. [`Request`] names alignment and reserve.
//! - Where memory comes from: [`PoolBuilder::backing`] for the pool's own, [`Pool::adopt`] for memory that the pool may
//!   cut up, [`Device::register`] for values that are copied from where they are.
//! - Copying: [`Stream::upload`], [`Stream::download`], their `_part` and `_blocking` forms, [`Stream::hold`] for work
//!   that others submit; [`Stream::copy_host`] from buffer to buffer.
//! - Many small copies: [`Device::copy_queue`], to which many threads push, and which submits in batches;
//!   [`CopyQueue::gather`], [`CopyQueue::scatter_blocking`] and their `_pinned` forms for thousands of pieces by one
//!   call; [`Stream::wait_for_copy`] to order other work behind a copy.
//! - Sharing: a server's own contexts and streams are adopted, and ours given out, by the modules `cuda` and `acl`
//!   (features of the same names); [`Stream::upload_captured`] and its like tie buffers to a graph that is being
//!   captured.
//! - Much at once: the module [`pipeline`]; checkpoints in the safetensors format: the module `safetensors` (feature
//!   `safetensors`).
//! - Looking: [`Pool::stats`], [`Pool::pinning`], [`Pool::regions`], [`Pool::check`]. For operators: [`telemetry`],
//!   with [`Pool::snapshot`], [`Pool::stuck`] and a [`Sampler`](telemetry::Sampler) that sends metrics.
//! - Ending: [`Pool::trim`], [`Pool::shutdown`], and for a process that ends or loads its driver anew
//!   [`Device::close`], which waits until everything has been given back. Dropping never waits, and buffers that are
//!   out stay usable.
//! - Errors: [`Error::class`] says what an error means for what comes next.
//! - Testing: [`host`], a device that can be told to be late, to fail, to hang and to die.
//!
//! # Foreign code
//!
//! The crate calls code of the program that embeds it: `tracing` subscribers, `metrics` recorders, wakers, sources and
//! sinks, [`PoolBuilder::before_unpin`], and the drop of registered, adopted and lent values. Such code may panic,
//! block, and call the crate. The rules:
//!
//! - It runs under no lock of the crate, never between a driver's acceptance of work and the entry that keeps the
//!   memory for it, and not on a thread that has lent borrowed memory to a device. What comes up there (an event, a
//!   wake, a drop) runs on the same thread afterwards: wakes first, then the others in order. So a subscriber may ask
//!   the pool whatever it likes, and run tasks until they are done.
//! - A panic is caught, told by an event of the target `pinpool::foreign` (a subscriber's own is not), and costs that
//!   one call: the event, the wake, the transfer whose source or sink it was. A payload whose drop panics is leaked.
//! - The crate's threads go on after a panic. What a mistake of the crate's own leaves in doubt is quarantined, and
//!   reads as [`Error::Internal`].
//! - A waker that is called while this thread runs another waker waits for its turn: wakes are made by a loop. A waker
//!   must not wait for a wake that the same thread is to make. Waits that would never end, since only this very thread
//!   could end them, are refused with [`Error::Unsupported`].
//! - The crate's threads block signals. Threads and processes that such code starts there begin with the same mask
//!   (`std::process::Command` keeps it): a process that is to hear `SIGTERM` is given a mask of its own.
//! - Code that a call is given for its own duration, and calls on the caller's thread (a reader for
//!   [`upload_read`](pipeline::Pipeline::upload_read), a writer, a closure), may panic through that call, which first
//!   waits for what it has under way.
//!
//! # The layer rule
//!
//! Each module knows only those above it in this table, so nothing calls upward; [`Pool`] puts them in order.
//! (Two types are named from below, not called: `arena` marks extents with `region`'s number, and a `Stream` keeps its
//! `device::handle::Device`.) Unsafe
//! code is denied everywhere but in the modules that are marked, and there each block says why it is sound.
//!
//! | module | what it knows | unsafe |
//! | --- | --- | --- |
//! | `escape` | text of others, made fit to be shown | |
//! | `error` | what can go wrong, and what that means | |
//! | `sealed` | what methods of sealed traits take, so that only the crate calls them | |
//! | `os` | the system calls, all of them | yes |
//! | `foreign` | code that is not the crate's: each call of it, and when it must not run | yes |
//! | `locks` | locks under which foreign code is put off | |
//! | `sync` | atomics, locks and fences: the standard library's or loom's | |
//! | `segment` | the segment rule and the size classes: integer arithmetic only | |
//! | `telemetry::counters`, `telemetry::ledger` | what is counted where it happens; since when a segment is out: numbers only | |
//! | `freelist` | the lock-free parts; no device and no policy | yes |
//! | `arena` | extents, runs and segments, and a check of every invariant | yes |
//! | `device` | the contract: what a device must do; below it, the devices | yes |
//! | `region` | where pinned ranges come from, written against the contract | yes |
//! | `central` | what buffers drop into: thread caches, waiters, returns | yes |
//! | `stream` | timelines and holds, and who finds out what is done | yes |
//! | `device::handle` | an opened device: its context, its reaper, its end | yes |
//! | `cuda` | what only CUDA has: contexts and streams that others made | yes |
//! | `buffer` | the types of buffers and of what is in flight | yes |
//! | `config` | how a pool is set up | |
//! | `telemetry::stuck` | the report on buffers that have been out for long | |
//! | `pool` | the public face: trying, growing, waiting, ending | yes |
//! | `copy` | copies between buffers and device memory; `copy::pipeline`: much of it | yes |
//! | `safetensors` | files of tensors on the pipeline: what they hold, where it goes, when it is there | |
//! | `cudarc` | cudarc's contexts, streams and slices beside the pool | yes |
//! | `acl` | what only Ascend has: the library, contexts and streams that others made | yes |
//! | `telemetry` | the snapshot, and the sampler that sends metrics | |
//!
//! # Features
//!
//! | feature | default | what it adds |
//! | --- | --- | --- |
//! | `acl` | yes | Ascend NPUs, as `acl:N`; the library is loaded at run time, nothing is needed to build or to start |
//! | `cuda` | yes | NVIDIA GPUs, as `cuda:N`; the driver is loaded at run time, nothing is needed to build or to start |
//! | `cudarc` | no | cudarc's contexts, streams and slices beside the pool, in the module `cudarc`; needs the Rust that cudarc needs (0.19.2 and later: 1.88) |
//! | `metrics` | no | a [`Sampler`](telemetry::Sampler) feeds the recorder of the `metrics` facade, too |
//! | `safetensors` | no | checkpoints in the safetensors format to device tensors, in the module `safetensors` |
//! | `cli` | no | the `pinpool` command: `load` moves files to a device and back, `bench` measures how fast, `doctor` says what stands in the way of pinning, `top` shows the pools of a process that serves `/metrics`; with `safetensors` |
//!
//! The host device is always there. Features are additive.
//!
//! What was tried on what: CUDA on H200 GPUs and on a stand-in driver; Ascend on a stand-in library alone, written from
//! CANN's documentation, since no hardware was at hand (`acl::hardware` says how to try it there).
//!
//! # Events
//!
//! The crate logs through [`tracing`], and never for a hit or a copy. The page of [`telemetry`] lists the targets,
//! levels and fields of all spans and of the events that an operator acts on, and all metrics.
//!
//! # Platforms
//!
//! Linux on x86_64 and aarch64, Rust 1.85 or later. Elsewhere the crate compiles and [`Device::open`] says that it is
//! unsupported.

// Which feature a thing needs stands beside it on docs.rs.
#![cfg_attr(docsrs, feature(doc_cfg))]
// Models use a part of the crate, other systems next to nothing; where there are no fences the system's barrier has no
// caller, and without a vendor's feature neither has what only that vendor's driver calls.
#![cfg_attr(
    any(loom, pinpool_rmw, not(target_os = "linux"), not(all(feature = "acl", feature = "cuda"))),
    allow(dead_code)
)]
// Foreign code, and locks, go through one module each: see `foreign`.
#![cfg_attr(not(test), deny(clippy::disallowed_macros, clippy::disallowed_methods, clippy::disallowed_types))]

// By name. The order of the layers is in the table above.
#[cfg(feature = "acl")]
pub mod acl;
mod arena;
mod buffer;
mod central;
mod config;
mod copy;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "cudarc")]
pub mod cudarc;
mod device;
mod error;
mod escape;
mod foreign;
mod freelist;
mod locks;
mod os;
mod pool;
mod region;
#[cfg(feature = "safetensors")]
pub mod safetensors;
mod sealed;
mod segment;
mod stream;
mod sync;
pub mod telemetry;

pub use buffer::{HostBuf, InFlight, Lend, PinnedBuf, Registered, StreamBuf, Token, UnpinnedBuf};
pub use config::PoolBuilder;
pub use copy::gather::{self, Gathered};
pub use copy::pipeline;
pub use copy::{CopyQueue, DeviceRange, GraphBuf, Landing, QueueOptions, QueueStats};
pub use device::HostAllocFlags;
#[doc(hidden)]
pub use device::family;
pub use device::handle::{CloseError, Device, HeldBy};
pub use device::holds::HeldPool;
pub use device::host;
pub use device::memory::{DeviceBuffer, DeviceSlice};
pub use error::{AddressFault, DeviceError, Error, ErrorClass, RegisterError, Result, SubmitError};
pub use pool::{Census, Checkout, CheckoutMany, Pool, PoolStats, Request, Shutdown};
pub use region::{Backing, HugePages, Pinning, RegionId, RegionInfo, Unpinned};
pub use stable_deref_trait::StableDeref;
pub use stream::Stream;

/// The examples of the README and of the pages in `docs` are compiled and run with the other examples.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
#[doc = include_str!("../docs/operations.md")]
#[doc = include_str!("../docs/cuda.md")]
pub struct Readme;
