//! The copier: many pieces of memory to the device and back, at the speed of the link.
//!
//! The copy engines of a GPU move long contiguous ranges at the link's speed, and short scattered ones at a fraction of
//! it. So a copier packs scattered pieces into segments of a pool, several threads at once, and moves each segment by
//! one long copy to a ring of device memory, where a kernel of the crate's spreads the bytes to their places. (From the
//! device a kernel collects them, and the CPU takes them out of the segment.) Long pinned pieces are copied from where
//! they are.
//!
//! # Files, in the order to read them
//!
//! | file | what is in it |
//! | --- | --- |
//! | this one | the public calls |
//! | `job.rs` | one transfer: which of its chunks are taken, and how it ended |
//! | `worker.rs` | what a thread does that moves chunks |
//! | `scheduler.rs` | which job the threads turn to, and how they sleep |
//! | `engine.rs` | what the threads share; submitting copies |
//! | `flights.rs` | the copies in flight, and which thread finds out that they are complete |
//! | `way.rs` | by which way a chunk goes |
//! | `layout.rs`, `packing.rs` | where pieces lie in a segment; filling and emptying it |
//! | `lent.rs` | pinned buffers that copies use where they are |
//! | `ring.rs`, `spreader.rs` | the device ring, and the kernels that work on it |
//! | `pieces.rs` | pieces and buffers as a job's work |
//! | `transfer.rs`, `config.rs`, `stats.rs` | the handle, the settings, the counts |
//!
//! The crate's root publishes the types here; no other module calls this one.
//!
//! # Invariants
//!
//! - A worker owns a chunk from the moment in which it takes the chunk to the chunk's end. It waits only while it owns
//!   none.
//! - Memory that a caller lends is read or written by CPUs alone, and by none after the call has returned.
//! - A slot of the ring is free only when the copy and the kernel that used it were seen complete.

#![allow(unsafe_code)]

mod config;
mod engine;
mod flights;
mod job;
mod layout;
mod lent;
#[cfg(all(test, loom))]
mod loom_models;
mod packing;
mod pieces;
mod ring;
mod scheduler;
mod spreader;
mod stats;
mod transfer;
mod way;
mod worker;

use std::sync::Arc;

pub use self::config::CopierBuilder;
pub use self::job::CopyProgress;
pub use self::stats::CopierStats;
pub use self::transfer::Copying;

use self::engine::Engine;
use self::job::{Body, Direction, Job};
use self::packing::Piece;
use self::pieces::{Buffers, Down, Paged, Ramp, Slices, Survey, Targets, Up, Values};
use self::worker::Worker;
use super::Landing;
use crate::buffer::Lend;
use crate::device::handle::Device;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result, SubmitError};
use crate::pool::Pool;
use crate::sealed::KEY;
use crate::stream::Stream;

/// An error on a thread of the crate's, where a waker or the like is about to wait for what that very thread does.
fn may_wait() -> Result<()> {
    let own = crate::sync::own();
    if own.is_none() && !crate::sync::finds_out() {
        return Ok(());
    }
    let what = "a wait for a transfer on a thread of the crate, in a waker for example; wake a task or thread of your \
                own, and wait there";
    Err(Error::Unsupported(what.into()))
}

/// Moves many pieces of memory between the host and one device. A clone is another handle to the same copier. All calls
/// may come from many threads at once.
///
/// # Pieces
/// A call takes any number of pieces of any lengths, at any addresses. Pieces without bytes are left out. Each piece's
/// device memory must be as long as the piece at least; what is beyond stays as it is. Where two pieces of a call
/// overlap on the device, either may win, byte by byte.
///
/// # Ordering
/// There is none but through handles: the pieces of a call arrive in any order, and so do calls. To have work happen
/// after a transfer, wait for its handle. To have a transfer happen after the work of a stream, call
/// [`wait_for`](Self::wait_for).
///
/// # What it uses
/// Segments of the pool, at most [`CopierBuilder::share`] bytes, and device memory, at most [`CopierBuilder::ring`].
/// An idle copier uses no processor time and holds no segment, and after two seconds no device memory.
///
/// # The end
/// Dropping the last handle waits for nothing: transfers that were started go on, and then the threads end.
///
/// ```
/// # use pinpool::{Copier, Device, Pool, Unpinned};
/// let device = Device::open("auto")?;
/// let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// let copier = Copier::builder(&pool, &device).build()?;
///
/// // A thousand blocks of a cache, each to its own place.
/// let (cache, blocks) = (device.alloc(8 << 20)?, vec![7_u8; 1000 * 4096]);
/// let mut pieces = Vec::new();
/// for (n, block) in blocks.chunks(4096).enumerate() {
///     pieces.push((block, cache.slice(n * 8192..n * 8192 + 4096)?));
/// }
/// copier.upload_pieces(&pieces)?.wait()?;
///
/// let mut back = vec![0; 4096];
/// copier.download_pieces(&mut [(cache.slice(999 * 8192..999 * 8192 + 4096)?, &mut back[..])])?;
/// assert_eq!(back, blocks[..4096]);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone)]
pub struct Copier(Arc<Handle>);

/// What keeps the threads from ending.
struct Handle(Arc<Engine>);

impl Drop for Handle {
    fn drop(&mut self) {
        if !crate::os::forked() {
            self.0.scheduler.close();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if crate::os::forked() {
            // The parent's threads use these.
            std::mem::forget(self.inline.get_mut().take());
        }
    }
}

impl Copier {
    /// Starts setting up a copier between a pool, which serves the device, and the device.
    pub fn builder(pool: &Pool, device: &Device) -> CopierBuilder {
        CopierBuilder::new(pool, device)
    }

    fn start(engine: Arc<Engine>) -> Self {
        Self(Arc::new(Handle(engine)))
    }

    fn engine(&self) -> &Arc<Engine> {
        &self.0.0
    }

    /// The pool that it takes segments from.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.engine().pool
    }

    /// The device that it copies to and from.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.engine().device
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> CopierStats {
        let engine = self.engine();
        let mut stats = engine.counters.stats();
        if crate::os::forked() {
            return stats;
        }
        (stats.ring, stats.ring_refused) = engine.ring.stats();
        for spreader in engine.spreaders.iter().flatten() {
            let (launches, chunks) = spreader.stats();
            stats.launches += launches;
            stats.launched_chunks += chunks;
        }
        stats.has_kernels = engine.spreaders.is_some();
        stats
    }

    /// Moves transfers on as far as that needs no waiting, on the calling thread. Whether anything has changed. For
    /// [stepped](crate::host::HostConfig::stepped) devices, whose copiers have no threads: there transfers go on within
    /// this call, and within those that start a transfer or wait for one. Elsewhere it does nothing.
    pub fn reap(&self) -> bool {
        let engine = self.engine();
        engine.settings.threads == 0 && !crate::os::forked() && Worker::advance(engine)
    }

    /// Makes all copies that are submitted from now on wait for what was submitted to `stream` so far: for kernels that
    /// still use the memory, or that write what is downloaded. The caller does not wait; transfers of others do.
    ///
    /// # Errors
    /// As for [`Stream::wait_for`].
    pub fn wait_for(&self, stream: &Stream) -> Result<()> {
        let both = [Direction::Up, Direction::Down];
        both.into_iter().flat_map(|way| self.engine().streams(way)).try_for_each(|own| own.wait_for(stream))
    }

    // --- borrowed ----------------------------------------------------------------------------------------------------

    /// Copies many pieces of borrowed memory to device memory. The calling thread, with the copier's threads, packs
    /// them into segments of the pool. When this returns, all bytes have been read, and the last of them are on their
    /// way: the handle tells when all are on the device.
    ///
    /// # Errors
    /// Before anything is copied: [`Error::TooSmall`], [`Error::WrongDevice`], [`Error::Forked`], a lost device. Later
    /// as for [`Copying::wait`], when no byte of the pieces is read any more. [`Error::Unsupported`] on a thread of the
    /// crate, which must not wait.
    pub fn upload_pieces(&self, pieces: &[(&[u8], DeviceSlice)]) -> Result<Copying> {
        let engine = self.engine();
        let mut survey = self.survey()?;
        for (bytes, memory) in pieces {
            survey.add(engine, memory, bytes.len())?;
        }
        let work = Slices { pieces, ramp: Ramp::new(engine) };
        // SAFETY: `Reading` waits until the job is read, also on unwinding.
        let job = unsafe { engine.lend(Direction::Up, survey.bytes, &work, survey.memories) };
        let reading = Lending { engine, job: &job, until: Job::is_read };
        engine.start(&job).inspect_err(|error| job.fail(error.clone()))?;
        drop(reading);
        if job.is_stopped() {
            job.wait(None, Job::is_over);
            job.outcome().unwrap_or(Ok(()))?;
        }
        Ok(Copying::new(engine.clone(), job, Arc::new(())))
    }

    /// Copies many ranges of device memory to borrowed memory, each as many bytes as its range has, and returns when
    /// all of it is there.
    ///
    /// # Errors
    /// As for [`upload_pieces`](Self::upload_pieces). After an error the targets' contents are undefined.
    pub fn download_pieces(&self, pieces: &mut [(DeviceSlice, &mut [u8])]) -> Result<()> {
        let engine = self.engine();
        let mut survey = self.survey()?;
        for (memory, target) in pieces.iter() {
            if memory.len() > target.len() {
                return Err(Error::TooSmall { need: memory.len(), have: target.len() });
            }
            survey.add(engine, memory, memory.len())?;
        }
        let work = Targets::new(pieces, Ramp::new(engine));
        // SAFETY: `Lending` waits until the job is over, also on unwinding.
        let job = unsafe { engine.lend(Direction::Down, survey.bytes, &work, survey.memories) };
        let lending = Lending { engine, job: &job, until: Job::is_over };
        engine.start(&job).inspect_err(|error| job.fail(error.clone()))?;
        drop(lending);
        job.outcome().unwrap_or(Ok(()))
    }

    fn survey(&self) -> Result<Survey> {
        crate::os::check_fork()?;
        may_wait()?;
        self.device().context().alive()?;
        Ok(Survey::default())
    }

    // --- pinned buffers ----------------------------------------------------------------------------------------------

    /// Copies many pinned buffers to device memory: those of 48 KiB and more from where they are, shorter ones packed
    /// into segments of the pool where it has any to spare. The buffers are lent until the handle gives them back.
    ///
    /// # Errors
    /// Before anything is copied, with all buffers: [`Error::Empty`] for a buffer without bytes, [`Error::TooSmall`],
    /// [`Error::WrongDevice`], [`Error::Forked`], a lost device.
    #[allow(clippy::type_complexity, reason = "the buffers come back")]
    pub fn upload_buffers<B: Lend + 'static>(
        &self,
        buffers: Vec<(B, DeviceSlice)>,
    ) -> Result<Copying<Vec<B>>, SubmitError<Vec<(B, DeviceSlice)>>> {
        let engine = self.engine();
        let surveyed = (|| {
            crate::os::check_fork()?;
            engine.device.context().alive()?;
            let (mut survey, mut pieces) = (Survey::default(), Vec::with_capacity(buffers.len()));
            for (buffer, memory) in &buffers {
                if !buffer.serves(engine.device.context(), KEY) {
                    return Err(Error::WrongDevice { device: engine.device.name().into() });
                }
                // Asked once: a value of the caller's may answer otherwise the next time.
                let bytes = buffer.bytes(KEY);
                if bytes.is_empty() {
                    return Err(Error::Empty);
                }
                survey.add(engine, memory, bytes.len())?;
                pieces.push(at(bytes.as_ptr().cast_mut(), bytes.len(), memory));
            }
            Ok((survey, pieces))
        })();
        let (survey, pieces) = match surveyed {
            Ok(surveyed) => surveyed,
            Err(error) => return Err(SubmitError::refused(error, buffers)),
        };
        let (values, memories): (Vec<_>, Vec<_>) = buffers.into_iter().map(|(b, m)| (Up::new(b), m)).unzip();
        self.own(Direction::Up, pieces, values, survey).map_err(|(error, values)| {
            let back = values.into_iter().zip(memories).map(|(up, memory)| (up.value, memory)).collect();
            SubmitError::refused(error, back)
        })
    }

    /// Copies many ranges of device memory into pinned buffers: those of 48 KiB and more to where they belong, shorter
    /// ones by way of segments of the pool where it has any to spare. When all have arrived the handle gives the
    /// buffers back, each as long as its range.
    ///
    /// # Errors
    /// Before anything is copied, with all buffers: as for [`upload_buffers`](Self::upload_buffers);
    /// [`Error::WrongStream`] for a [`StreamBuf`](crate::StreamBuf), whose memory a stream of the program's may use.
    #[allow(clippy::type_complexity, reason = "the buffers come back")]
    pub fn download_buffers<L: Landing + 'static>(
        &self,
        mut buffers: Vec<(DeviceSlice, L)>,
    ) -> Result<Copying<Vec<L::Landed>>, SubmitError<Vec<(DeviceSlice, L)>>> {
        let engine = self.engine();
        let surveyed = (|| {
            crate::os::check_fork()?;
            engine.device.context().alive()?;
            let (mut survey, mut pieces) = (Survey::default(), Vec::with_capacity(buffers.len()));
            for (memory, landing) in &mut buffers {
                let (target, capacity) = landing.target(engine.stream(Direction::Down), KEY)?;
                if memory.len() > capacity {
                    return Err(Error::TooSmall { need: memory.len(), have: capacity });
                }
                survey.add(engine, memory, memory.len())?;
                pieces.push(at(target, memory.len(), memory));
            }
            Ok((survey, pieces))
        })();
        let (survey, pieces) = match surveyed {
            Ok(surveyed) => surveyed,
            Err(error) => return Err(SubmitError::refused(error, buffers)),
        };
        let (memories, values): (Vec<_>, Vec<_>) =
            buffers.into_iter().map(|(m, landing)| (m, Down::Here(landing))).unzip();
        self.own(Direction::Down, pieces, values, survey).map_err(|(error, values)| {
            let here = |(memory, down)| match down {
                Down::Here(landing) => Some((memory, landing)),
                _ => None,
            };
            SubmitError::refused(error, memories.into_iter().zip(values).filter_map(here).collect())
        })
    }

    // --- pages -------------------------------------------------------------------------------------------------------

    /// Copies pinned blocks to device memory, each to many places: the first bytes of a block to its first place, and so
    /// on, one behind the other. No CPU moves the bytes: short pages go through the device ring. (A block of a cache of
    /// keys and values has a page for each layer.)
    ///
    /// # Errors
    /// Before anything is copied, with all blocks: [`Error::Empty`] for a block without places, [`Error::TooSmall`] for
    /// a block with fewer bytes than its places have; as for [`upload_buffers`](Self::upload_buffers).
    #[allow(clippy::type_complexity, reason = "the blocks come back")]
    pub fn upload_pages<B: Lend + 'static>(
        &self,
        blocks: Vec<(B, Vec<DeviceSlice>)>,
    ) -> Result<Copying<Vec<B>>, SubmitError<Vec<(B, Vec<DeviceSlice>)>>> {
        let engine = self.engine();
        let surveyed = (|| {
            crate::os::check_fork()?;
            engine.device.context().alive()?;
            let mut pages = PageSurvey::default();
            for (block, places) in &blocks {
                if !block.serves(engine.device.context(), KEY) {
                    return Err(Error::WrongDevice { device: engine.device.name().into() });
                }
                // Asked once: a value of the caller's may answer otherwise the next time.
                let bytes = block.bytes(KEY);
                pages.add(engine, bytes.as_ptr().cast_mut(), bytes.len(), places)?;
            }
            Ok(pages)
        })();
        let survey = match surveyed {
            Ok(surveyed) => surveyed,
            Err(error) => return Err(SubmitError::refused(error, blocks)),
        };
        let (blocks, places): (Vec<_>, Vec<_>) = blocks.into_iter().unzip();
        let values = blocks.into_iter().map(Up::new).collect();
        self.own_pages(Direction::Up, survey, values).map_err(|(error, blocks)| {
            let buffer = blocks.map(|blocks| blocks.into_iter().zip(places).collect());
            SubmitError { error, buffer }
        })
    }

    /// Copies many places of device memory to pinned blocks, the places of a block one behind the other. When all have
    /// arrived the handle gives the blocks back, each as long as its places together.
    ///
    /// # Errors
    /// Before anything is copied, with all blocks: as for [`upload_pages`](Self::upload_pages);
    /// [`Error::WrongStream`] for a [`StreamBuf`](crate::StreamBuf). After a start that failed (a lost device, no
    /// thread) the blocks return to their pools.
    #[allow(clippy::type_complexity, reason = "the blocks come back")]
    pub fn download_pages<L: Landing + 'static>(
        &self,
        mut blocks: Vec<(Vec<DeviceSlice>, L)>,
    ) -> Result<Copying<Vec<L::Landed>>, SubmitError<Vec<(Vec<DeviceSlice>, L)>>> {
        let engine = self.engine();
        let surveyed = (|| {
            crate::os::check_fork()?;
            engine.device.context().alive()?;
            let mut pages = PageSurvey::default();
            for (places, landing) in &mut blocks {
                let (target, capacity) = landing.target(engine.stream(Direction::Down), KEY)?;
                pages.add(engine, target, capacity, places)?;
            }
            Ok(pages)
        })();
        let survey = match surveyed {
            Ok(surveyed) => surveyed,
            Err(error) => return Err(SubmitError::refused(error, blocks)),
        };
        let values = blocks.into_iter().map(|(_, landing)| Down::Here(landing)).collect();
        let started = self.own_pages(Direction::Down, survey, values);
        started.map_err(|(error, _)| SubmitError { error, buffer: None })
    }

    /// Starts a job that owns blocks. An error gives them back, if all of them are there.
    #[allow(clippy::type_complexity, reason = "the blocks come back")]
    fn own_pages<V: pieces::Buffer + 'static>(
        &self,
        direction: Direction,
        survey: PageSurvey,
        values: Vec<V>,
    ) -> std::result::Result<Copying<Vec<V::Back>>, (Error, Option<Vec<V::Back>>)>
    where
        V::Back: 'static,
    {
        let engine = self.engine();
        let PageSurvey { survey, pages, lens } = survey;
        let values = values.into_iter().zip(lens).collect();
        let paged = Arc::new(Paged::new(pages, values, Ramp::new(engine)));
        let job = Job::new(direction, survey.bytes, Body::Owned(paged.clone()), survey.memories);
        if let Err(error) = engine.start(&job) {
            drop(job);
            let back = Arc::into_inner(paged)
                .and_then(|paged| paged.into_values().into_iter().collect::<Result<_>>().ok());
            return Err((error, back));
        }
        let values: Arc<dyn Values<Back = Vec<V::Back>>> = paged;
        Ok(Copying::new(engine.clone(), job, values))
    }

    /// Starts a job that owns what it moves.
    #[allow(clippy::type_complexity, reason = "the buffers come back")]
    fn own<V: pieces::Buffer + 'static>(
        &self,
        direction: Direction,
        pieces: Vec<Piece>,
        values: Vec<V>,
        survey: Survey,
    ) -> std::result::Result<Copying<Vec<V::Back>>, (Error, Vec<V>)>
    where
        V::Back: 'static,
    {
        let engine = self.engine();
        let buffers = Arc::new(Buffers::new(direction, pieces, values, Ramp::new(engine)));
        let job = Job::new(direction, survey.bytes, Body::Owned(buffers.clone()), survey.memories);
        if let Err(error) = engine.start(&job) {
            drop(job);
            let values = Arc::into_inner(buffers).map(Buffers::into_values).unwrap_or_default();
            return Err((error, values));
        }
        let values: Arc<dyn Values<Back = Vec<V::Back>>> = buffers;
        Ok(Copying::new(engine.clone(), job, values))
    }
}

/// What was found of blocks before anything is copied.
#[derive(Default)]
struct PageSurvey {
    survey: Survey,
    pages: Vec<(Piece, u32)>,
    /// Bytes of each block that belong to its places.
    lens: Vec<usize>,
}

impl PageSurvey {
    fn add(&mut self, engine: &Engine, host: *mut u8, have: usize, places: &[DeviceSlice]) -> Result<()> {
        let mut need = 0_usize;
        for place in places {
            self.survey.add(engine, place, place.len())?;
            self.pages.push((at(host.wrapping_add(need), place.len(), place), self.lens.len() as u32));
            need = need.saturating_add(place.len());
        }
        match need {
            0 => Err(Error::Empty),
            need if need > have => Err(Error::TooSmall { need, have }),
            need => {
                self.lens.push(need);
                Ok(())
            }
        }
    }
}

fn at(host: *mut u8, len: usize, memory: &DeviceSlice) -> Piece {
    Piece { host, len, device: memory.address(), memory: memory.allocation_number() }
}

/// While this exists, memory that the caller lends is used. Its drop helps, and waits until it is used no more.
struct Lending<'a> {
    engine: &'a Arc<Engine>,
    job: &'a Arc<Job>,
    until: fn(&Job) -> bool,
}

impl Drop for Lending<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.job.cancel();
        }
        let until = self.until;
        // A panic here is a mistake of the crate's. The memory is lent on until no thread uses it.
        let helped =
            crate::foreign::survive("a transfer's caller panicked: its transfer is cancelled", || match self
                .engine
                .settings
                .threads
            {
                0 => Worker::step_until(self.engine, self.job, until),
                _ => Worker::new(self.engine).assist(self.job, until),
            });
        if helped.is_none() {
            self.job.cancel();
        }
        self.job.wait(None, until);
    }
}

impl std::fmt::Debug for Copier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Copier").field("device", &self.device().name()).finish_non_exhaustive()
    }
}
