//! A pool of page-locked ("pinned") host memory for inference servers.
//!
//! Accelerators copy at full speed from and to pinned memory only, and pinning takes long. So the
//! pool pins large *regions*, once, and cuts them into *segments* by size class. A segment is
//! checked out as a buffer, filled, copied on a stream to or from a device, and returns by itself
//! when the copy is complete.
//!
//! # The one rule
//!
//! **A host-ready buffer never has device work outstanding, and getting one never waits for a
//! stream unless the caller chose to wait.** Stream order alone does not protect host memory: the
//! CPU writes at once, while an earlier copy may still read. A buffer's type says what may be done:
//!
//! | type | the CPU may | the device may |
//! | --- | --- | --- |
//! | [`PinnedBuf`], host-ready | read what was written, and write | do nothing |
//! | [`StreamBuf`], stream-ready | do nothing | use it on one stream, in order |
//! | [`InFlight`], in flight | do nothing | read or write it at any time, until the copy is complete |
//!
//! A copy takes the buffer. Waiting for the copy, or awaiting it, gives the buffer back. Dropping
//! the handle lets the segment return to the pool when the copy is complete.
//!
//! # Example
//!
//! ```
//! use pinpool::{Device, Pool, Unpinned};
//!
//! let device = Device::open("auto")?; // or "cuda:0", "acl:0", "host"
//! // By default a memlock limit that is too low is an error; with `Allow` the pool goes on with unpinned memory.
//! let pool = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow).build()?;
//! let stream = device.stream()?;
//! let weights = device.alloc(5)?;
//!
//! let mut buf = pool.checkout(5)?; // host-ready, and this thread's alone
//! buf.extend_from_slice(b"hello");
//! let sent = stream.upload(buf, weights.slice(..))?; // takes `buf`: no code can write to it during the copy
//! let buf = sent.wait()?; // gives it back, to fill again
//! drop(stream.upload(buf, weights.slice(..))?); // or it returns to the pool when the copy is complete
//!
//! let landing = pool.checkout_on(&stream, 5)?; // stream-ready: may still be in flight on this very stream
//! let back = stream.download(weights.slice(..), landing)?.wait()?;
//! assert_eq!(*back, *b"hello");
//! # Ok::<(), pinpool::Error>(())
//! ```
//!
//! # Where to look
//!
//! | to | see |
//! | --- | --- |
//! | set up | [`Device::open`], [`Pool::builder`], [`Device::stream`], [`Device::alloc`] |
//! | check out | [`Pool::checkout`] and its `try_`, `_timeout`, `_async`, `_many` and `_on` forms; [`Request`] for alignment and tags |
//! | choose the memory | [`PoolBuilder::backing`], [`PoolBuilder::numa_node`]; [`Pool::adopt`] for memory that the pool may cut up, [`Device::register`] for values that are copied from where they are |
//! | copy | [`Stream::upload`], [`Stream::download`], their `_part` and `_blocking` forms; [`Stream::copy_host`] from buffer to buffer; [`Stream::wait_for_copy`] to order other work behind a copy |
//! | run kernels on buffers | [`Stream::hold`] keeps a buffer until they are done, [`Stream::hold_captured`] for as long as a graph that is being captured; [`host::launch`] runs functions on the host device as kernels |
//! | move thousands of pieces by one call | [`Copier::upload_slices`] and [`Copier::download_slices`] for borrowed memory; [`Copier::upload_pages`] and [`Copier::download_pages`] for pinned blocks |
//! | move gigabytes | [`Copier::upload_slice`], [`Copier::upload`], [`Copier::upload_read`] and the ways back: the module [`copier`] lists all; for checkpoints in the safetensors format the crate `pinpool-safetensors` |
//! | share | the modules `cuda` and `acl` (features of these names) adopt contexts and streams of the program, and give out their own; [`Device::raw_memory`] for device memory |
//! | watch | [`Pool::stats`], [`Pool::pinning`], [`Pool::regions`], [`Pool::check`]; [`telemetry`] with [`Pool::snapshot`], [`Pool::stuck`] and a [`Sampler`](telemetry::Sampler) that sends metrics |
//! | serve from tasks | [`Pool::checkout_async`]; the handles of copies are futures; `operations.md` (Async servers) lists the calls that block |
//! | end | [`Pool::trim`], [`Pool::shutdown`]; [`Device::close`] waits until the driver has everything back. Dropping never waits, and buffers that are out stay usable |
//! | handle errors | [`Error::class`]; `examples/async_server.rs` has an HTTP status for each class |
//! | test | [`host`], a device that can be told to be late, to fail, to hang and to die |
//!
//! The manual is in the folder `docs` of the repository and of the package: `operations.md`
//! (setting up a machine, limits, forks and signals, trouble), `cuda.md`, `ascend.md`,
//! `benchmarks.md`, and for a reader of the code `architecture.md`.
//!
//! # Calls into the program
//!
//! The crate calls code of the program: `tracing` subscribers, `metrics` recorders, wakers, sources
//! and sinks, host functions, [`PoolBuilder::before_unpin`], and the drop of registered, adopted
//! and lent values. Such code may panic, block, and call the crate. The rules:
//!
//! - **When it runs.** Under no lock of the crate, never between a driver's acceptance of work and
//!   the entry that keeps the memory for it, and not while its thread has lent borrowed memory to a
//!   device. A call that falls due there is made on the same thread afterwards: wakes first, then
//!   the others in order. So a subscriber may call the pool, and run tasks until they are done.
//! - **Panics.** A panic is caught, and reported by an event of the target `pinpool::foreign` (but
//!   for a subscriber's own). It ends that one call: the event, the wake, the transfer. A payload
//!   whose drop panics is leaked. All handles are [`UnwindSafe`](std::panic::UnwindSafe): a server
//!   may catch the panic of a request and go on with the pool, the device and the buffers.
//! - **Threads of the crate** go on after a panic. If a mistake of the crate leaves the state of
//!   memory in doubt, the memory is quarantined, and calls return [`Error::Internal`].
//! - **Wakers.** A wake that falls due while the thread runs another waker is made after that one.
//!   A waker must not wait for a wake that its own thread is to make. Waits that only their own
//!   thread could end are refused with [`Error::Unsupported`].
//! - **Signals.** The crate's threads block signals. Threads and processes that such code starts
//!   there inherit the mask (`Command` keeps it): set another for one that needs `SIGTERM`.
//! - **Code for one call**, a reader, a writer or a closure, which runs on the caller's thread, may
//!   panic through that call. The call first waits for its copies.
//!
//! # Features
//!
//! | feature | default | what it adds |
//! | --- | --- | --- |
//! | `acl` | yes | Ascend NPUs, as `acl:N`; the library is loaded at run time, nothing is needed to build or to start |
//! | `cuda` | yes | NVIDIA GPUs, as `cuda:N`; the driver is loaded at run time, nothing is needed to build or to start |
//! | `cudarc` | no | cudarc's contexts, streams and slices beside the pool, in the module `cudarc`; needs the Rust that cudarc needs (0.19.2 and later: 1.88) |
//! | `metrics` | no | a [`Sampler`](telemetry::Sampler) also feeds the recorder of the `metrics` facade |
//!
//! The host device is always there. Features are additive.
//!
//! # Other crates
//!
//! | crate | what it is |
//! | --- | --- |
//! | `pinpool-safetensors` | checkpoints in the safetensors format to device tensors |
//! | `pinpool-cli` | the `pinpool` command: `load` moves files to a device and back, `bench` measures how fast, `doctor` says what stands in the way of pinning, `top` shows the pools of a process that serves `/metrics` |
//! | `pinpool-capi` | the C interface: for programs in C, C++ and Python |
//!
//! # Public dependencies
//!
//! Types and traits of these crates are part of the interface, and another major version of one is
//! a breaking change: `bytes` 1 ([`PinnedBuf`] is a `BufMut`, `Bytes` a source), `bytemuck` 1
//! (bounds of typed views), `stable_deref_trait` 1 ([`StableDeref`], a bound of what is registered
//! or adopted); with the feature `cudarc` that crate's 0.19. Also `tracing` 0.1, `metrics` 0.24.
//!
//! CUDA was tested on H200 GPUs and on a simulated driver, Ascend on a simulated library alone,
//! written from CANN's documentation: the module `acl::hardware` says how to test it on hardware.
//!
//! # Events
//!
//! The crate logs through [`tracing`], and never for a hit or a copy. The page of [`telemetry`]
//! lists all spans, the events that an operator acts on, and all metrics.
//!
//! # Platforms
//!
//! Linux on x86_64 and aarch64, Rust 1.85 or later. The crate does not compile elsewhere.

// Which feature a thing needs stands beside it on docs.rs.
#![cfg_attr(docsrs, feature(doc_cfg))]
// The models (`loom`) use a part of the crate, and without a vendor's feature some code is only
// that vendor's.
#![cfg_attr(any(loom, not(all(feature = "acl", feature = "cuda"))), allow(dead_code))]
// Code of the program is called by way of `foreign` alone, and locks are those of `locks`.
#![cfg_attr(not(test), deny(clippy::disallowed_macros, clippy::disallowed_methods, clippy::disallowed_types))]

// # The layers
//
// Each module uses only modules above it in this table, so that nothing calls upward. One type is
// named from below, and not called: `arena` marks extents with `region`'s number. Unsafe code is
// denied but in the modules that are marked; there each block says why it is sound.
// docs/architecture.md has a picture of the layers, and two walks through them.
//
// | module              | what it has                                                 | unsafe |
// | ------------------- | ----------------------------------------------------------- | ------ |
// | amount              | amounts of memory, to be shown                              |        |
// | escape              | text from outside, escaped and cut to be shown              |        |
// | error               | the errors, and what each means for the caller              |        |
// | sealed              | a key for methods that only the crate may call              |        |
// | exit                | the end of the process: from then on no driver is called    |        |
// | os                  | all system calls                                            | yes    |
// | foreign             | all calls of the program's code, and when none must be made | yes    |
// | locks               | locks under which the program's code is put off             |        |
// | sync                | atomics, locks and fences: std's or loom's                  |        |
// | timer               | the thread that wakes what waits for a time                 |        |
// | segment             | the segment rule and the size classes: integer arithmetic   |        |
// | telemetry::counters | histograms and counts: numbers only                         |        |
// | telemetry::ledger   | when segments were checked out: numbers only                |        |
// | freelist            | the lock-free parts; no device and no policy                | yes    |
// | arena               | extents, runs and segments, and a check of every invariant  | yes    |
// | device              | the contract that a device fulfils; below it, the devices   | yes    |
// | region              | where pinned ranges come from, by the contract              | yes    |
// | central             | the central pool: leases, reclaim, growth, queue of waiters | yes    |
// | stream              | timelines, holds and the reaper                             | yes    |
// | device::handle      | an opened device: its context, its reaper, its end          | yes    |
// | stream::handle      | the public stream: a timeline and its open device           |        |
// | cuda                | what only CUDA has: adopted contexts and streams            | yes    |
// | buffer              | the types of buffers, and of what is in flight              | yes    |
// | config              | how a pool is set up                                        |        |
// | telemetry::stuck    | the report on buffers that are out for long                 |        |
// | pool                | the public face: trying, growing, waiting, ending           | yes    |
// | copy                | copies of buffers to devices and back; the copier           | yes    |
// | host                | the host device's page, and functions on its streams        |        |
// | cudarc              | cudarc's contexts, streams and slices beside the pool       | yes    |
// | acl                 | what only Ascend has: the library, contexts and streams     | yes    |
// | telemetry           | the snapshot, and the sampler that sends metrics            |        |
// | unwind              | which types may be used after a panic                       |        |
//
// Below, the modules are in alphabetical order. The packages in `crates` use the public face alone;
// the command's doctor also uses a hidden module, `cgroup`, which no other program needs.

#[cfg(not(target_os = "linux"))]
compile_error!(
    "pinpool runs on Linux alone; name it under [target.'cfg(target_os = \"linux\")'.dependencies]"
);

#[cfg(feature = "acl")]
pub mod acl;
mod amount;
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
mod exit;
mod foreign;
mod freelist;
pub mod host;
mod locks;
mod os;
mod pool;
mod region;
mod segment;
mod stream;
mod sync;
pub mod telemetry;
mod timer;
mod unwind;

pub use buffer::{InFlight, Lend, PinnedBuf, Registered, StreamBuf};
pub use config::PoolBuilder;
pub use copy::copier;
pub use copy::{Copier, DeviceRange, Landing, Places};
pub use device::HostAllocFlags;
pub use device::handle::{CloseError, Device, HeldBy};
pub use device::memory::{DeviceSlice, StridedSlice};
pub use error::{DeviceError, Error, ErrorClass, Result, Shortage, SubmitError, Waited};
#[doc(hidden)]
pub use os::cgroup;
pub use os::forked;
pub use pool::{Checkout, Pool, PoolStats, Request, Shutdown};
pub use region::{Backing, HugePages, Pinning, RegionInfo, Unpinned};
pub use stable_deref_trait::StableDeref;
pub use stream::Stream;

/// What keeps sealed traits sealed.
///
/// A trait that the crate's generic code uses is public, and so are the methods of the traits that
/// it stands on: with a bound on it, code outside the crate can call them, hidden or not. So each
/// takes a `Key`, which only the crate can name or make. (No public function returns one.)
mod sealed {
    /// Proof that the crate itself makes the call.
    #[derive(Clone, Copy, Debug)]
    pub struct Key(());

    /// The one key.
    pub(crate) const KEY: Key = Key(());
}

/// Compiles and runs the examples of the README and of the pages in `docs`, too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
#[doc = include_str!("../docs/operations.md")]
#[doc = include_str!("../docs/cuda.md")]
pub struct Readme;
