//! The calls for borrowed bytes, for sources and sinks, and for pinned blocks of many pages.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use super::chunk::Ramp;
use super::file::bounds;
use super::job::{END, Job, Plan, Start, Values};
use super::pieces::{Borrowed, Paged, Piece, Survey};
use super::ranges::{CopyRange, CopyRanges, Ranges, Reads, Writes};
use super::source::{self, Sink, Source};
use super::trace::Trace;
use super::transfer::Transfer;
use super::types::{Direction, Kind, Priority};
use super::worker::survived;
use super::workers::Workers;
use super::{Copier, may_wait};
use crate::buffer::Lend;
use crate::copy::{DeviceRange, Landing, Places, own, written};
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result, SubmitError};
use crate::sealed::KEY;
use crate::stream::Stream;

/// The longest copy that a waiting call makes at once. Beyond it a chunk's overhead matters less,
/// and a driver's copy of memory that is not pinned is slower.
const AT_ONCE: usize = 256 << 10;

type Name = Option<Cow<'static, str>>;

impl Copier {
    // --- borrowed --------------------------------------------------------------------------------

    /// Copies many slices of borrowed memory, each to the front of its device memory, and returns
    /// when all are on the device. For many short slices this is far faster than a call for each.
    ///
    /// # Errors
    /// [`Error::Piece`] with the slice's number; else [as every transfer](Error#transfers).
    pub fn upload_slices(&self, slices: &[(&[u8], DeviceSlice)]) -> Result<()> {
        self.upload_lent(slices, None)
    }

    fn upload_lent(&self, slices: &[(&[u8], DeviceSlice)], name: Name) -> Result<()> {
        let get = |n: usize| {
            let &(bytes, ref memory) = slices.get(n)?;
            Some((bytes.as_ptr().cast_mut(), <[u8]>::len(bytes), memory))
        };
        // SAFETY: shared borrows of bytes.
        unsafe { self.lend(Direction::Up, get, name) }
    }

    /// Copies borrowed bytes to the front of `dst`, and returns when they are on the device. Up to
    /// 256 KiB go by one driver call and need no memory of the pool, unless the copier's depth or
    /// rate is in the way. The CPU reads the bytes. For a mapped file that might become shorter,
    /// [`upload`](Self::upload) a [`FileSource`](super::FileSource), or
    /// [register](crate::Device::register) the mapping and call
    /// [`upload_pages`](Self::upload_pages).
    ///
    /// # Errors
    /// [As every transfer](Error#transfers).
    pub fn upload_slice(&self, src: &[u8], dst: impl DeviceRange) -> Result<()> {
        let dst = self.own(dst)?;
        Error::unless_fits(src.len(), dst.len())?;
        let (dst, name) = (dst.slice(..src.len())?, Cow::from("bytes in memory"));
        let said =
            self.at_once(Direction::Up, dst.len(), &name, |stream| stream.upload_blocking(src, &dst))?;
        if said { Ok(()) } else { self.upload_lent(&[(src, dst)], Some(name)) }
    }

    /// Copies device memory to the front of borrowed memory, and returns when it is there. After an
    /// error the memory's contents are undefined.
    ///
    /// # Errors
    /// As for [`upload_slice`](Self::upload_slice).
    pub fn download_slice(&self, src: impl DeviceRange, dst: &mut [u8]) -> Result<()> {
        let src = self.own(src)?;
        Error::unless_fits(src.len(), dst.len())?;
        let (to, name) = (&mut *dst, Cow::from("memory"));
        let said =
            self.at_once(Direction::Down, src.len(), &name, |stream| stream.download_blocking(&src, to))?;
        if said { Ok(()) } else { self.download_lent(&mut [(src, dst)], Some(name)) }
    }

    /// Copies a few bytes by a blocking driver call; a chunk takes half as long again. `false`:
    /// they have to go as a chunk.
    fn at_once(
        &self,
        direction: Direction,
        bytes: usize,
        name: &str,
        copy: impl FnOnce(&Stream) -> Result<()>,
    ) -> Result<bool> {
        self.may_block()?;
        let (engine, priority, since) = (self.engine(), self.priority, Instant::now());
        let is_short = bytes <= AT_ONCE && engine.settings.threads > 0;
        if !is_short || !engine.may_send(direction, priority, bytes) {
            return Ok(false);
        }
        let trace = Trace::begin(self.device().name(), direction, priority, bytes as u64, name);
        let said = survived(|| copy(engine.stream(direction, priority))).map_err(|e| e.of_transfer(name, 0));
        let mut stats = engine.counters.lock();
        stats.chunks += 1;
        stats.batch_bytes += bytes as u64;
        drop(stats);
        engine.landed(direction, priority);
        trace.end(&said, if said.is_ok() { bytes as u64 } else { 0 }, since.elapsed());
        said.map(|()| true)
    }

    /// Copies ranges of device memory, each to the front of a borrowed slice, and waits for all.
    ///
    /// # Errors
    /// As for [`upload_slices`](Self::upload_slices); the slices' contents are then undefined.
    pub fn download_slices(&self, slices: &mut [(DeviceSlice, &mut [u8])]) -> Result<()> {
        self.download_lent(slices, None)
    }

    fn download_lent(&self, slices: &mut [(DeviceSlice, &mut [u8])], name: Name) -> Result<()> {
        let (first, count) = (slices.as_mut_ptr(), slices.len());
        let get = |n: usize| {
            if n >= count {
                return None;
            }
            // SAFETY: within the list, which is borrowed exclusively. The target's address is read
            // without a borrow of the target, whose bytes another thread may be writing.
            let (memory, target) = unsafe {
                let entry = first.add(n);
                (&(*entry).0, &raw mut *(*entry).1)
            };
            Some((target.cast(), target.len(), memory))
        };
        // SAFETY: borrowed exclusively. The list itself is only read.
        unsafe { self.lend(Direction::Down, get, name) }
    }

    /// Copies pieces that the caller lends, and waits until that is over. `get`: a piece's host
    /// address, how long it is there, and its device memory.
    ///
    /// # Safety
    /// Any thread may call `get`, and its drop does nothing. The pieces can be read, and are not
    /// written (for an upload); or can be written, and are not used otherwise (for a download).
    unsafe fn lend<'a>(
        &self,
        direction: Direction,
        get: impl Fn(usize) -> Option<(*mut u8, usize, &'a DeviceSlice)>,
        name: Name,
    ) -> Result<()> {
        self.may_block()?;
        let mut survey = Survey::default();
        for n in 0.. {
            let Some((_, len, memory)) = get(n) else { break };
            let fits = match direction {
                Direction::Up => Ok(len),
                Direction::Down => Error::unless_fits(memory.len(), len).map(|()| memory.len()),
            };
            let added = fits.and_then(|len| survey.add(self.engine(), memory, len));
            added.map_err(|e| e.of_piece(n, memory.len()))?;
        }
        let piece = |n| get(n).map(|(host, len, memory)| Piece::new(host, len.min(memory.len()), memory));
        // SAFETY: the caller's promise.
        let plan: Arc<dyn Plan + '_> = Arc::new(unsafe { Borrowed::new(piece) });
        // SAFETY: only the lifetime changes. The job uses its plan only before it is over, and
        // `Lending` waits for that, also on unwinding. A worker may keep it a moment longer, only
        // to drop it: that drops `get`, which does nothing by this function's contract.
        let plan = unsafe { std::mem::transmute::<Arc<dyn Plan + '_>, Arc<dyn Plan>>(plan) };
        self.workers.start()?;
        let job = self.job(direction, survey, name, plan);
        let lending = Lending { workers: &self.workers, job: &job };
        self.workers.add(&job);
        drop(lending);
        // A wait that ended in the child of a fork, before the job did, has moved nothing here.
        job.outcome().unwrap_or(Err(Error::Forked))
    }

    /// A transfer that waits to be started.
    fn job(&self, direction: Direction, found: Survey, name: Name, plan: Arc<dyn Plan>) -> Arc<Job> {
        let (Survey { bytes: total, memories, .. }, priority) = (found, self.priority);
        let begin =
            |name: &Cow<'_, str>| Trace::begin(self.device().name(), direction, priority, total, name);
        let (trace, memories, timeout) = (name.as_ref().map(begin), Arc::new(memories), self.timeout);
        let ramp = Ramp::new(&self.engine().settings, plan.kind() == Kind::InPlace);
        let start = Start { direction, priority, total, name, trace, memories, timeout, ramp };
        let (job, engine) = (Job::new(start, plan), Arc::downgrade(self.engine()));
        job.end_in_time(move || engine.upgrade().map(|engine| engine.segments.shortage()));
        job
    }

    /// Starts a transfer that owns what it moves, on threads that were started.
    fn run<B>(
        &self,
        direction: Direction,
        survey: Survey,
        name: Name,
        plan: impl Plan + Values<B> + 'static,
    ) -> Transfer<B> {
        let plan = Arc::new(plan);
        let job = self.job(direction, survey, name, plan.clone());
        self.workers.add(&job);
        Transfer::new(self.clone(), job, plan)
    }

    /// Before a blocking call.
    pub(super) fn may_block(&self) -> Result<()> {
        may_wait()?;
        self.device().context().alive()
    }

    /// Device memory of this device.
    pub(super) fn own(&self, range: impl DeviceRange) -> Result<DeviceSlice> {
        own(&range, self.device().context())
    }

    // --- sources and sinks -----------------------------------------------------------------------

    /// Copies a source to the device: all of it to the front of a
    /// [`DeviceRange`](crate::DeviceRange), or ranges of it, each to its place. Goes on by itself.
    ///
    /// A file of a thousand tensors is one transfer, read in the file's order;
    /// [`Transfer::wait_landed`] tells when the first of them can be used.
    ///
    /// # Errors
    /// With the source: [`Error::Argument`] for a source without bytes, no range, or a range that
    /// leaves the source; else [as every transfer](Error#transfers).
    #[allow(clippy::result_large_err, reason = "the error carries the source back")]
    pub fn upload<S: Source>(
        &self,
        source: S,
        places: impl CopyRanges,
    ) -> Result<Transfer<S>, SubmitError<S>> {
        let looked = self.device().context().alive().and_then(|()| {
            let bounds = bounds(&source)?;
            let name = source::name("the source", || source.name().into_owned());
            let list = places.list(self.device().context(), Some(bounds.clone()), KEY)?;
            let (survey, ranges) = self.survey_ranges(name, list)?;
            Ok((survey, ranges.within(bounds)?))
        });
        let ((survey, ranges), source) = SubmitError::unless(looked, source)?;
        let name = Some(ranges.name.clone());
        Ok(self.run(Direction::Up, survey, name, Reads::new(source, ranges, self.engine().counters.clone())))
    }

    /// Copies device memory to a sink: a [`DeviceRange`](crate::DeviceRange) to its start, or
    /// ranges, each to its offset. Goes on by itself.
    ///
    /// # Errors
    /// With the sink: [`Error::Argument`] for no range; [`Error::OutOfMemory`] for a vector; else
    /// [as every transfer](Error#transfers).
    pub fn download<S: Sink>(&self, places: impl CopyRanges, sink: S) -> Result<Transfer<S>, SubmitError<S>> {
        let looked = self.device().context().alive().and_then(|()| {
            let name = source::name("the target", || sink.name().into_owned());
            self.survey_ranges(name, places.list(self.device().context(), None, KEY)?)
        });
        let ((survey, ranges), sink) = SubmitError::unless(looked, sink)?;
        let name = Some(ranges.name.clone());
        Ok(self.run(Direction::Down, survey, name, Writes::new(sink, ranges)?))
    }

    fn survey_ranges(&self, name: Cow<'static, str>, ranges: Vec<CopyRange>) -> Result<(Survey, Ranges)> {
        let mut survey = Survey::default();
        let ranges = Ranges::new(self.engine(), name, ranges, &mut survey)?;
        self.workers.start().map(|()| (survey, ranges))
    }

    // --- pages -----------------------------------------------------------------------------------

    /// Copies pinned blocks to device memory, each to many places, one behind the other. No CPU
    /// moves the bytes: short pages go through the device ring. (A block of a cache of keys and
    /// values has a page for each layer.)
    ///
    /// # Errors
    /// With all blocks: [`Error::Piece`] with the block's number; its cause is [`Error::Argument`]
    /// for a block without places or bytes, [`Error::TooSmall`] for one with fewer bytes than its
    /// places. Else [as every transfer](Error#transfers).
    #[allow(clippy::type_complexity, reason = "the blocks come back")]
    pub fn upload_pages<B: Lend + 'static, P: Places + 'static>(
        &self,
        mut blocks: Vec<(B, P)>,
    ) -> Result<Transfer<Vec<B>>, SubmitError<Vec<(B, P)>>> {
        let stream = self.engine().stream(Direction::Up, Priority::Foreground);
        let each = blocks.iter_mut().map(|(block, places)| {
            let bytes = stream.may_use(block).and_then(|()| written(block));
            (bytes.map(|bytes| (bytes.as_ptr().cast_mut(), bytes.len())), &*places)
        });
        let looked = self.survey_pages(each);
        let ((survey, pieces, lens), blocks) = SubmitError::unless(looked, blocks)?;
        // Dropping the places of many pages takes long, so it comes when the copies have begun.
        let (blocks, _places): (Vec<B>, Vec<P>) = blocks.into_iter().unzip();
        let plan = Paged::new(Direction::Up, pieces, blocks.into_iter().zip(lens));
        Ok(self.run(Direction::Up, survey, None, plan))
    }

    /// Copies places of device memory to pinned blocks, those of a block one behind the other. The
    /// handle gives the blocks back, each as long as its places together.
    ///
    /// # Errors
    /// As for [`upload_pages`](Self::upload_pages), and [`Error::Mismatch`] in an [`Error::Piece`]
    /// for a [`StreamBuf`](crate::StreamBuf).
    #[allow(clippy::type_complexity, reason = "the blocks come back")]
    pub fn download_pages<L: Landing + 'static, P: Places + 'static>(
        &self,
        mut blocks: Vec<(P, L)>,
    ) -> Result<Transfer<Vec<L::Landed>>, SubmitError<Vec<(P, L)>>> {
        let stream = self.engine().stream(Direction::Down, Priority::Foreground);
        let each = blocks.iter_mut().map(|(places, landing)| (landing.target(stream, KEY), &*places));
        let looked = self.survey_pages(each);
        let ((survey, pieces, lens), blocks) = SubmitError::unless(looked, blocks)?;
        let land = |(places, landing): (P, L)| (landing.land(KEY), places);
        let (blocks, _places): (Vec<_>, Vec<P>) = blocks.into_iter().map(land).unzip();
        let plan = Paged::new(Direction::Down, pieces, blocks.into_iter().zip(lens));
        Ok(self.run(Direction::Down, survey, None, plan))
    }

    /// The pieces of blocks, and the bytes of each block. A block is given with its first byte and
    /// how many it has (or has room for), and its places.
    fn survey_pages<'a, P: Places + 'a>(
        &self,
        blocks: impl Iterator<Item = (Result<(*mut u8, usize)>, &'a P)>,
    ) -> Result<(Survey, Vec<Piece>, Vec<usize>)> {
        self.device().context().alive()?;
        let (mut survey, mut pieces, mut lens) = (Survey::default(), Vec::new(), Vec::new());
        for (n, (looked, places)) in blocks.enumerate() {
            let (mut need, mut added) = (0_usize, Ok(()));
            let host = looked.as_ref().map_or(std::ptr::null_mut(), |(host, _)| *host);
            places.each(KEY, &mut |whole, len, stride| {
                let count = (whole.len() - len) / stride + 1;
                let (host, device) = (host.wrapping_add(need), whole.address());
                pieces.push(Piece { host, len, count, stride, device, group: n as u64, at: 0 });
                need = need.saturating_add(len.saturating_mul(count));
                if looked.is_ok() && added.is_ok() {
                    added = survey.add(self.engine(), whole, len * count);
                }
            });
            let looked = looked.and_then(|(_, have)| {
                added?;
                if need == 0 { Err(Error::empty()) } else { Error::unless_fits(need, have) }
            });
            looked.map_err(|e| e.of_piece(n, need))?;
            lens.push(need);
        }
        self.workers.start().map(|()| (survey, pieces, lens))
    }
}

/// While this exists, memory of the caller is used. Its drop waits until it is used no more.
struct Lending<'a> {
    workers: &'a Workers,
    job: &'a Arc<Job>,
}

impl Drop for Lending<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.job.cancel();
        }
        self.workers.wait(self.job, None, END);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Device, Pool, Unpinned};

    #[test]
    fn a_copy_that_panics_gives_its_permit_back() {
        let device = Device::open("host").unwrap();
        let pool = Pool::builder(&device).capacity(4 << 20).unpinned(Unpinned::Allow).build().unwrap();
        let copier = Copier::builder(&pool, &device).depth(1).build().unwrap();
        let copy = |copy: fn(&Stream) -> Result<()>| copier.at_once(Direction::Up, 1, "a byte", copy);
        copy(|_| panic!("the driver's copy panics")).unwrap_err();
        assert!(copy(|_| Ok(())).unwrap(), "there is one permit, and it is free");
    }
}
