//! The copy pipeline: much data to the device and back, at the speed of the link, in little pinned memory.
//!
//! ```
//! use pinpool::pipeline::{FileSource, Pipeline};
//! use pinpool::{Device, Pool, Unpinned};
//!
//! let device = Device::open("host")?;
//! let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
//! let pipeline = Pipeline::builder(&pool, &device).build()?; // usable from many threads at once
//!
//! let memory = device.alloc(3 << 20)?;
//! pipeline.upload_slice(&vec![7; 3 << 20], &memory)?; // borrowed: returns when the device has let go
//!
//! let load = pipeline.upload(vec![8; 1 << 20], memory.slice(..1 << 20))?; // owned: goes on by itself
//! println!("{:?} left", load.progress().remaining());
//! load.wait()?; // or load.await, load.cancel(), or drop it, which cancels
//!
//! let mut back = vec![0; 3 << 20];
//! pipeline.download_slice(&memory, &mut back)?;
//! assert!(back[..1 << 20].iter().all(|b| *b == 8) && back[1 << 20..].iter().all(|b| *b == 7));
//! # Ok::<(), pinpool::Error>(())
//! ```
//!
//! # The calls
//!
//! | from or to | call | |
//! | --- | --- | --- |
//! | borrowed bytes | [`upload_slice`](Pipeline::upload_slice), [`download_slice`](Pipeline::download_slice) | blocking |
//! | a fresh vector | [`download_vec`](Pipeline::download_vec), [`download_collect`](Pipeline::download_collect) | blocking, a [`Transfer`] |
//! | `Read`, `Write` | [`upload_read`](Pipeline::upload_read), [`download_write`](Pipeline::download_write) | blocking, on the caller's thread |
//! | owned bytes, any [`Source`] | [`upload`](Pipeline::upload), [`upload_pieces`](Pipeline::upload_pieces) | a [`Transfer`] |
//! | files | [`upload_file`](Pipeline::upload_file), [`upload_file_pieces`](Pipeline::upload_file_pieces) | a [`Transfer`] |
//! | page-locked values | [`upload_pinned`](Pipeline::upload_pinned) | a [`Transfer`]; not staged |
//! | any [`Sink`], [`FileSink`] | [`download`](Pipeline::download) | a [`Transfer`] |
//! | async streams, sockets | [`feed`](Pipeline::feed) | a [`Feed`], pushed to |
//!
//! *Pieces* say where on the device each range of a source goes: a file of a thousand tensors is one transfer, read in
//! the file's order. Pieces that lie one behind the other on both sides are copied as one, so give tensors neighbouring
//! slices of one allocation where that is possible: copies of 16 KiB reach a tenth of the link's speed, of 4 MiB all of
//! it. [`Transfer::wait_landed`] tells when the first of them can be used.
//!
//! # How it works
//!
//! A transfer is cut into chunks. Worker threads fill segments of the pool with them, and each is copied as soon as
//! fewer than [`depth`](PipelineBuilder::depth) chunks are in flight; the segment takes another chunk when its copy is
//! complete. Downloads run the other way round. So CPU and link are busy at once, in a bounded number of segments
//! ([`share`](PipelineBuilder::share)); when all of them are in use, transfers wait.
//!
//! Cached files are read, or copied from where the page cache has them, whichever is faster on the machine
//! ([`Reading`]).
//!
//! # Ordering
//!
//! The chunks of a transfer complete in any order; it is over when all have. Transfers of one pipeline that use the
//! same device memory take effect in the order of the calls. Only two things order a transfer with other streams:
//! [`Pipeline::wait_for`] before it, and its end: work submitted to any stream after the end was seen finds the bytes
//! there.
//!
//! # Priorities
//!
//! Bulk transfers leave room for others: at most `depth` of their chunks are in flight in each direction (and a window
//! of a file, if one is under way), an eighth of the segments is never theirs, and they do not wait in the pool's queue
//! while they have a segment. Transfers of a handle [with foreground priority](Pipeline::with_priority) go first, and
//! while one of their copies is in flight, bulk chunks go one by one. Copies by [`Stream`] calls wait for about as many
//! chunks as are in flight, unless the pipeline is told to [give way](Pipeline::give_way). While there is foreground
//! work, no pages of files are registered, which would hold up other copies. (Where the share, or what is left in the
//! pool, is a single segment, a foreground upload may wait for a bulk download that is under way.) An idle pipeline
//! uses no processor time, and holds no segment.

// Here are the calls. `config.rs`: the settings. `transfer.rs`: the handles. `plan.rs`: the cutting. `engine.rs`:
// threads and order; `segments.rs`: who gets which; `share.rs`: how many are out, and who hears of it; `waking.rs`: who
// wakes whom; `workers.rs`: what the threads do; `wire.rs`: submitting; `arrival.rs`: arriving; `job.rs`: a transfer's
// state. `source.rs`, `file.rs`, `window.rs`, `feed.rs`, `collect.rs`: what is read and written. `stores.rs`,
// `direct.rs`: memory copies. `stats.rs`: the counts. `trace.rs`: the span.

#![allow(unsafe_code)]

mod arrival;
mod collect;
mod config;
mod direct;
mod engine;
mod feed;
mod file;
mod job;
mod plan;
mod segments;
mod share;
mod source;
mod stats;
pub(super) mod stores;
mod trace;
mod transfer;
mod waking;
mod window;
mod wire;
mod workers;

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

pub use self::collect::Collect;
pub use self::config::{PipelineBuilder, Priority, Staging};
pub use self::feed::Feed;
#[cfg(feature = "safetensors")]
pub(crate) use self::file::Tap;
pub use self::file::{FileSink, FileSource, Reading};
pub use self::job::Progress;
pub use self::plan::Piece;
pub use self::source::{Fill, Sink, Source};
pub use self::stats::PipelineStats;
#[doc(hidden)]
pub use self::stores::Stores;
pub use self::transfer::{Canceller, Transfer};

use self::collect::Filler;
use self::config::Settings;
use self::engine::Engine;
#[cfg(feature = "safetensors")]
pub(crate) use self::engine::may_wait;
use self::feed::Pull;
use self::job::{Body, Direction, Job};
use self::plan::{Plan, Ramp};
use self::source::ours::Token;
use self::source::{Borrowed, Landing};
use self::trace::Trace;
use self::wire::{InPlace, Shared};
use super::DeviceRange;
use crate::buffer::Lend;
use crate::device::handle::Device;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result, SubmitError};
use crate::pool::Pool;
use crate::sealed::KEY;
use crate::segment::PAGE;
use crate::stream::Stream;

/// By so much chunks are longer that are not staged.
const UNSTAGED: usize = 8;
/// Chunks are cut no smaller than this to give every thread one.
const LEAST: usize = 512 << 10;

/// Foreground calls up to this length are made on the caller's thread, where nothing is in the way.
const SMALL: usize = 256 << 10;

/// Moves much data between memory or files and one device. Cloning gives another handle to the same pipeline; all its
/// calls may come from many threads at once.
///
/// When the last handle is dropped, that of a [`Transfer`] included, its threads end.
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned, pipeline::Pipeline};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// let pipeline = Pipeline::builder(&pool, &device).threads(2).build()?;
/// let memory = device.alloc(1 << 20)?;
/// pipeline.upload_slice(&vec![7; 1 << 20], &memory)?;
/// assert_eq!(pipeline.download_vec(&memory)?, vec![7; 1 << 20]);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone)]
pub struct Pipeline {
    handle: Arc<Handle>,
    priority: Priority,
}

/// What keeps the engine's threads.
pub(super) struct Handle {
    engine: Arc<Engine>,
}

/// Bulk transfers make way while this guard lives: [`Pipeline::give_way`].
///
/// ```
/// use pinpool::pipeline::{GiveWay, Pipeline};
///
/// fn copy_own(pipeline: &Pipeline) {
///     let way: GiveWay = pipeline.give_way();
///     // ... copies on streams of your own ...
///     drop(way);
/// }
/// ```
pub struct GiveWay {
    handle: Arc<Handle>,
}

impl std::fmt::Debug for GiveWay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GiveWay").field("device", &self.handle.engine.device.name()).finish()
    }
}

impl Drop for GiveWay {
    fn drop(&mut self) {
        self.handle.engine.way_given();
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.engine.close();
    }
}

impl Pipeline {
    /// Starts setting up a pipeline between a pool, which serves the device, and the device.
    pub fn builder(pool: &Pool, device: &Device) -> PipelineBuilder {
        PipelineBuilder::new(pool, device)
    }

    fn start(pool: Pool, device: Device, settings: Settings, priority: Priority) -> Result<Self> {
        let engine = Engine::new(pool, device, settings)?;
        Ok(Self { handle: Arc::new(Handle { engine }), priority })
    }

    /// A handle to the same pipeline whose transfers have this priority.
    #[must_use]
    pub fn with_priority(&self, priority: Priority) -> Self {
        Self { handle: self.handle.clone(), priority }
    }

    /// For copies of your own on streams of your own, which the pipeline does not know of: while the guard is held,
    /// bulk chunks of this pipeline go one by one in each direction, and no pages of files are registered. Your copy
    /// waits for what is in flight already, at most [`depth`](PipelineBuilder::depth) chunks (and a window of a file,
    /// if one is under way), and for nothing that comes later. The pipeline stays open as long as the guard lives.
    /// (Transfers with [`Priority::Foreground`] do this by themselves.)
    ///
    /// ```
    /// # use pinpool::{pipeline::Pipeline, Device, Pool, Unpinned};
    /// # let device = Device::open("host")?;
    /// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
    /// # let pipeline = Pipeline::builder(&pool, &device).build()?;
    /// # let (stream, memory) = (device.stream()?, device.alloc(4096)?);
    /// let mut token = pool.checkout(4096)?;
    /// token.try_resize(4096, 1)?;
    /// let way = pipeline.give_way();
    /// let token = stream.upload(token, &memory)?.wait()?;
    /// drop(way);
    /// # drop(token);
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    #[must_use = "the way is given as long as this lives"]
    pub fn give_way(&self) -> GiveWay {
        self.handle.engine.give_way();
        GiveWay { handle: self.handle.clone() }
    }

    /// The pool that it takes segments from.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.handle.engine.pool
    }

    /// The device that it copies to and from.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.handle.engine.device
    }

    /// Bytes that go through one segment.
    #[must_use]
    pub fn chunk(&self) -> usize {
        self.handle.engine.settings.chunk
    }

    /// Bytes of the pool that it uses at most.
    #[must_use]
    pub fn share(&self) -> usize {
        self.handle.engine.settings.share
    }

    /// Threads that fill and drain.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.handle.engine.settings.threads
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> PipelineStats {
        self.handle.engine.counters.stats()
    }

    /// Limits what bulk transfers move, in bytes a second; `None`: no limit. 0 is the same as
    /// `None` here (the builder refuses it).
    pub fn set_rate(&self, bytes_per_second: Option<u64>) {
        if crate::os::forked() {
            return;
        }
        let engine = &self.handle.engine;
        let mut state = engine.state.lock();
        state.set_rate(bytes_per_second.filter(|rate| *rate > 0));
        state.share.events += 1;
        engine.call_all(&state);
        engine.bells.iter().for_each(|bell| _ = bell.notify_one());
    }

    /// Makes all copies that are submitted from now on wait for what was submitted to `stream` so far: for kernels that
    /// still use the memory, or that write what is downloaded. The caller does not wait; transfers of others do.
    ///
    /// # Errors
    /// As for [`Stream::wait_for`].
    pub fn wait_for(&self, stream: &Stream) -> Result<()> {
        let both = self.handle.engine.streams.iter();
        both.flat_map(|s| s.bulk.iter().chain([&s.foreground])).try_for_each(|own| own.wait_for(stream))
    }

    // --- to the device -----------------------------------------------------------------------------------------------

    /// Copies borrowed bytes to the front of `dst`, and returns when the device has let go of them, on an error too.
    /// The CPU reads them: for a file that is mapped, and might become shorter meanwhile, call
    /// [`upload_file`](Self::upload_file), or [register](Device::register) the mapping and call
    /// [`upload_pinned`](Self::upload_pinned).
    ///
    /// # Errors
    /// [`Error::Empty`], [`Error::TooSmall`], [`Error::WrongDevice`], a bad range; [`Error::Transfer`] with what the
    /// pool or the device said; [`Error::Unsupported`] on a thread of the library's (in a waker, a source or a sink),
    /// which must not wait.
    pub fn upload_slice(&self, src: &[u8], dst: impl DeviceRange) -> Result<()> {
        let dst = self.target(dst, src.len() as u64)?;
        engine::may_wait()?;
        if self.is_small(src.len()) {
            if let Some(done) = self.upload_now(src, &dst) {
                return done;
            }
        }
        // SAFETY: we return when the transfer is over, and then nobody has it.
        let borrowed = unsafe { Borrowed::new(src) };
        let plan = self.plan(vec![Piece { at: 0, device: dst }], Direction::Up, true)?;
        let job = self.begin(Direction::Up, plan, "bytes in memory", Body::Source(Arc::new(borrowed)))?;
        job.wait_over(None);
        job.outcome().unwrap_or(Ok(()))
    }

    /// Copies all of a source to the front of `dst`. Goes on by itself: see [`Transfer`].
    ///
    /// # Errors
    /// With the source: [`Error::Empty`], [`Error::TooSmall`], [`Error::WrongDevice`], a bad range, a lost device.
    pub fn upload<S: Source>(&self, source: S, dst: impl DeviceRange) -> Result<Transfer<S>, SubmitError<S>> {
        match source::length(&source).and_then(|len| self.target(dst, len)) {
            Ok(device) => self.upload_pieces(source, vec![Piece { at: 0, device }]),
            Err(error) => Err(SubmitError::refused(error, source)),
        }
    }

    /// Copies ranges of a source to where each belongs.
    ///
    /// # Errors
    /// As for [`upload`](Self::upload), and [`Error::OutOfRange`] for a piece that leaves the source.
    pub fn upload_pieces<S: Source>(
        &self,
        source: S,
        pieces: Vec<Piece>,
    ) -> Result<Transfer<S>, SubmitError<S>> {
        let name = source::name("the source", || source.name());
        let memory = source.memory(Token).is_some();
        let plan = self.plan(pieces, Direction::Up, memory);
        let plan = plan.and_then(|plan| within(plan, 0, source::length(&source)?));
        self.transfer(Direction::Up, source, plan, &name, |shared| Body::Source(shared))
    }

    /// Copies a file, or the range of it that the source names, to the front of `dst`. A file that has become shorter
    /// is an error; one that is written to meanwhile is not, and arrives partly old and partly new: see [`FileSource`]
    /// for how to find out.
    ///
    /// # Errors
    /// With the source, as for [`upload`](Self::upload).
    #[allow(clippy::result_large_err, reason = "the error carries the source back")]
    pub fn upload_file(
        &self,
        source: FileSource,
        dst: impl DeviceRange,
    ) -> Result<Transfer<FileSource>, SubmitError<FileSource>> {
        match self.target(dst, source.len()) {
            Ok(device) => {
                let at = source.start();
                self.upload_file_pieces(source, vec![Piece { at, device }])
            }
            Err(error) => Err(SubmitError::refused(error, source)),
        }
    }

    /// Copies ranges of a file, by the file's offsets, to where each belongs.
    ///
    /// # Errors
    /// As for [`upload_pieces`](Self::upload_pieces).
    #[allow(clippy::result_large_err, reason = "the error carries the source back")]
    pub fn upload_file_pieces(
        &self,
        source: FileSource,
        pieces: Vec<Piece>,
    ) -> Result<Transfer<FileSource>, SubmitError<FileSource>> {
        let name = source.name().to_owned();
        let (start, end) = (source.start(), source.end());
        let plan = self.plan(pieces, Direction::Up, false).and_then(|plan| within(plan, start, end));
        self.transfer(Direction::Up, source, plan, &name, Body::File)
    }

    /// Copies all that was written to a page-locked value (a [`PinnedBuf`](crate::PinnedBuf), a
    /// [`Registered`](crate::Registered)) from where it is, in chunks that leave room for others.
    ///
    /// # Errors
    /// With the value, as for [`upload`](Self::upload); [`Error::WrongDevice`] for a buffer of a pool that does not
    /// serve the device.
    pub fn upload_pinned<B>(&self, value: B, dst: impl DeviceRange) -> Result<Transfer<B>, SubmitError<B>>
    where
        B: Lend + Sync + 'static,
        Arc<B>: Lend,
    {
        if !value.serves(self.device().context(), KEY) {
            let error = Error::WrongDevice { device: self.device().name().into() };
            return Err(SubmitError::refused(error, value));
        }
        let plan = self
            .target(dst, value.bytes(KEY).len() as u64)
            .and_then(|device| self.plan(vec![Piece { at: 0, device }], Direction::Up, false));
        let body = |shared: Arc<B>| Body::InPlace(Arc::new(Shared(shared)) as Arc<dyn InPlace>);
        self.transfer(Direction::Up, value, plan, "page-locked memory", body)
    }

    /// Reads until the reader ends or `dst` is full, on the caller's thread, and returns the number of bytes when all
    /// are on the device. After an error too it returns only when nothing of it is in flight any more.
    ///
    /// # Errors
    /// [`Error::Read`] with what the reader said; else as for [`upload_slice`](Self::upload_slice).
    pub fn upload_read(&self, reader: &mut impl Read, dst: impl DeviceRange) -> Result<u64> {
        engine::may_wait()?;
        let feed = self.feed(dst)?;
        // Goes behind the feed, which cancels what is not finished.
        let _settled = feed.settled();
        let mut feed = feed;
        feed.read_from(reader, "the reader")?;
        feed.finish_blocking()
    }

    /// An upload to the front of `dst` whose bytes are pushed, in order.
    ///
    /// # Errors
    /// [`Error::WrongDevice`], a bad range, a lost device.
    pub fn feed(&self, dst: impl DeviceRange) -> Result<Feed> {
        let device = self.own(dst)?;
        let plan = self.plan(vec![Piece { at: 0, device }], Direction::Up, false)?;
        let job = self.begin(Direction::Up, plan, "what is fed", Body::Fed)?;
        Ok(Feed::new(self.handle.clone(), job))
    }

    // --- from the device ---------------------------------------------------------------------------------------------

    /// Copies device memory to the front of borrowed memory, and returns when the copy is complete. After an error the
    /// memory's contents are undefined.
    ///
    /// # Errors
    /// As for [`upload_slice`](Self::upload_slice).
    pub fn download_slice(&self, src: impl DeviceRange, dst: &mut [u8]) -> Result<()> {
        let src = self.own(src)?;
        if src.len() > dst.len() {
            return Err(Error::TooSmall { need: src.len(), have: dst.len() });
        }
        engine::may_wait()?;
        if self.is_small(src.len()) {
            if let Some(done) = self.download_now(&src, dst) {
                return done;
            }
        }
        // SAFETY: borrowed exclusively, and we return when the transfer is over, and then nobody has it.
        let landing =
            unsafe { Landing::new(dst.as_mut_ptr(), dst.len(), self.handle.engine.settings.drains) };
        let plan = self.plan(vec![Piece { at: 0, device: src }], Direction::Down, true)?;
        let job = self.begin(Direction::Down, plan, "memory", Body::Sink(Arc::new(landing)))?;
        job.wait_over(None);
        job.outcome().unwrap_or(Ok(()))
    }

    /// Copies device memory into a new vector, on huge pages where the system has them: touching memory for the first
    /// time is what takes longest.
    ///
    /// # Errors
    /// As for [`download_slice`](Self::download_slice); [`Error::OutOfMemory`].
    pub fn download_vec(&self, src: impl DeviceRange) -> Result<Vec<u8>> {
        self.download_collect(src)?.wait()?.into_vec()
    }

    /// The same, going on by itself: see [`Transfer`].
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; else as for [`download`](Self::download).
    pub fn download_collect(&self, src: impl DeviceRange) -> Result<Transfer<Collect>> {
        let device = self.own(src)?;
        let collect = Collect::new(device.len())?;
        let stores = self.handle.engine.settings.touches;
        let plan = self.plan(vec![Piece { at: 0, device }], Direction::Down, true);
        let body = |shared| Body::Sink(Arc::new(Filler::new(shared, stores)));
        Ok(self.transfer(Direction::Down, collect, plan, "a new vector", body)?)
    }

    /// Copies device memory to a sink. Goes on by itself: see [`Transfer`].
    ///
    /// # Errors
    /// With the sink: [`Error::WrongDevice`], a bad range, a lost device.
    pub fn download<S: Sink>(&self, src: impl DeviceRange, sink: S) -> Result<Transfer<S>, SubmitError<S>> {
        match self.own(src) {
            Ok(device) => self.download_pieces(vec![Piece { at: 0, device }], sink),
            Err(error) => Err(SubmitError::refused(error, sink)),
        }
    }

    /// Copies ranges of device memory to where in the sink each belongs.
    ///
    /// # Errors
    /// As for [`download`](Self::download).
    pub fn download_pieces<S: Sink>(
        &self,
        pieces: Vec<Piece>,
        sink: S,
    ) -> Result<Transfer<S>, SubmitError<S>> {
        let name = source::name("the target", || sink.name());
        let plan = self.plan(pieces, Direction::Down, sink.place(Token).is_some());
        self.transfer(Direction::Down, sink, plan, &name, |shared| Body::Sink(shared))
    }

    /// Writes device memory to a writer, on the caller's thread, in order. How many bytes, which are all.
    ///
    /// The writer may wait for other transfers of this pipeline, a [`Feed`]'s say, if the [share](Self::share) has five
    /// segments or more, and for another such download if it has seven.
    ///
    /// # Errors
    /// [`Error::Write`] with what the writer said; else as for [`download_slice`](Self::download_slice).
    pub fn download_write(&self, src: impl DeviceRange, writer: &mut impl Write) -> Result<u64> {
        let device = self.own(src)?;
        self.download_write_pieces(vec![Piece { at: 0, device }], writer)
    }

    /// Writes several ranges of device memory to a writer, on the caller's thread, in the order of their offsets: what
    /// lies between them is left out. How many bytes.
    ///
    /// # Errors
    /// As for [`download_write`](Self::download_write).
    pub fn download_write_pieces(&self, pieces: Vec<Piece>, writer: &mut impl Write) -> Result<u64> {
        engine::may_wait()?;
        let plan = self.plan(pieces, Direction::Down, false)?;
        let job = self.begin(Direction::Down, plan, "the writer", Body::Pulled)?;
        Pull::new(self.handle.clone(), job).write_to(writer, "the writer")
    }

    // --- at once -----------------------------------------------------------------------------------------------------

    /// Whether a blocking call is made on the caller's own thread, which is faster than to wait for one of ours.
    fn is_small(&self, len: usize) -> bool {
        self.priority == Priority::Foreground && len <= SMALL
    }

    /// Uploads through a segment of its own. `None`: there is none, or an earlier transfer is in the way.
    fn upload_now(&self, src: &[u8], dst: &DeviceSlice) -> Option<Result<()>> {
        let engine = &self.handle.engine;
        if src.is_empty() || engine.is_in_use(dst, Direction::Up) {
            return None;
        }
        let mut buf = engine.pool.try_checkout(src.len()).ok()?;
        buf.try_extend_from_slice(src).ok()?;
        let _urgent = engine.hurry(Direction::Up);
        let sent = engine.streams[Direction::Up as usize].foreground.upload(buf, dst);
        let arrived = sent.map_err(Error::from).and_then(|sent| sent.wait().map(drop));
        Some(arrived.map_err(|error| failed("bytes in memory", error)))
    }

    fn download_now(&self, src: &DeviceSlice, dst: &mut [u8]) -> Option<Result<()>> {
        let engine = &self.handle.engine;
        if engine.is_in_use(src, Direction::Down) {
            return None;
        }
        let buf = engine.pool.try_checkout(src.len()).ok()?;
        let _urgent = engine.hurry(Direction::Down);
        let sent = engine.streams[Direction::Down as usize].foreground.download(src, buf);
        let landed = sent.map_err(Error::from).and_then(crate::InFlight::wait);
        let copied = landed.map(|buf| dst[..buf.len()].copy_from_slice(&buf));
        Some(copied.map_err(|error| failed("memory", error)))
    }

    // --- all of them -------------------------------------------------------------------------------------------------

    /// Device memory of this device.
    fn own(&self, range: impl DeviceRange) -> Result<DeviceSlice> {
        crate::os::check_fork()?;
        let slice = range.resolve(KEY)?;
        if slice.is_of(self.device().context()) {
            return Ok(slice);
        }
        Err(Error::WrongDevice { device: self.device().name().into() })
    }

    /// As many bytes at its front.
    fn target(&self, range: impl DeviceRange, len: u64) -> Result<DeviceSlice> {
        let slice = self.own(range)?;
        let need = usize::try_from(len).unwrap_or(usize::MAX);
        if need > slice.len() {
            return Err(Error::TooSmall { need, have: slice.len() });
        }
        slice.slice(..need)
    }

    fn plan(&self, pieces: Vec<Piece>, direction: Direction, memory: bool) -> Result<Plan> {
        crate::os::check_fork()?;
        if pieces.iter().any(|piece| !piece.device.is_of(self.device().context())) {
            return Err(Error::WrongDevice { device: self.device().name().into() });
        }
        let Settings { chunk, threads, staged, .. } = self.handle.engine.settings;
        // Two for each thread, so that all are busy to the end, unless that makes chunks slow.
        let total: usize = pieces.iter().map(|piece| piece.device.len()).sum();
        let even = (total / (2 * threads)).next_multiple_of(PAGE);
        if memory && !staged {
            // No segment is held, and each call has its price.
            return Plan::new(
                pieces,
                even.clamp(PAGE, chunk.saturating_mul(UNSTAGED)),
                direction == Direction::Up,
                Ramp::NONE,
            );
        }
        let chunk = even.max(LEAST).min(chunk);
        let up = direction == Direction::Up;
        Plan::new(pieces, chunk, up, Ramp { up, threads, least: LEAST.min(chunk) })
    }

    fn begin(&self, direction: Direction, plan: Plan, name: &str, body: Body) -> Result<Arc<Job>> {
        let (priority, staged) = (self.priority, self.handle.engine.settings.staged);
        let trace = Trace::begin(self.device().name(), direction, priority, plan.wanted(), name);
        let job = |id| Job::new(id, direction, priority, plan, name.to_owned(), body, staged);
        let started = self.handle.engine.start(|id| job(id).traced(trace.clone()));
        started.inspect_err(|error| trace.end(&Err(error.clone()), 0, Duration::ZERO))
    }

    fn transfer<T: Send + Sync + 'static>(
        &self,
        direction: Direction,
        value: T,
        plan: Result<Plan>,
        name: &str,
        body: impl FnOnce(Arc<T>) -> Body,
    ) -> Result<Transfer<T>, SubmitError<T>> {
        let plan = match plan {
            Ok(plan) => plan,
            Err(error) => return Err(SubmitError::refused(error, value)),
        };
        let shared = Arc::new(value);
        match self.begin(direction, plan, name, body(shared.clone())) {
            Ok(job) => Ok(Transfer::new(self.handle.clone(), job, shared)),
            // The job is gone, if there was one.
            Err(error) => Err(SubmitError { error, buffer: Arc::into_inner(shared) }),
        }
    }
}

fn failed(what: &str, cause: Error) -> Error {
    Error::Transfer { what: what.into(), offset: 0, cause: Box::new(cause) }
}

/// A plan whose pieces all lie within the source.
fn within(plan: Plan, start: u64, end: u64) -> Result<Plan> {
    let first = plan.pieces().first().map_or(start, |piece| piece.at);
    if first >= start && plan.end() <= end {
        return Ok(plan);
    }
    let clip = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    Err(Error::OutOfRange { start: clip(first), end: clip(plan.end()), len: clip(end) })
}

impl std::fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pipeline")
            .field("device", &self.device().name())
            .field("threads", &self.threads())
            .field("chunk", &self.chunk())
            .field("share", &self.share())
            .finish_non_exhaustive()
    }
}
