//! The calls for memory: borrowed bytes, and pinned blocks of many pages.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use super::chunk::Ramp;
use super::engine::Engine;
use super::job::{Job, Named, Plan, Start, Values};
use super::pages::{Paged, Pages};
use super::pieces::{Borrowed, Piece, Survey};
use super::trace::Trace;
use super::transfer::Transfer;
use super::types::{Direction, Priority};
use super::workers::Workers;
use super::{Copier, may_wait};
use crate::buffer::Lend;
use crate::copy::{DeviceRange, Landing, Places, written};
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result, SubmitError};
use crate::sealed::KEY;
use crate::stream::Stream;
use crate::stream::hold::Resource;

/// Bytes that are copied at once for a call that waits, at most. For longer ones the chunk's own time matters less, and
/// a driver's copy from or to memory that is not pinned is slower.
const AT_ONCE: usize = 256 << 10;

impl Copier {
    // --- borrowed ----------------------------------------------------------------------------------------------------

    /// Copies many slices of borrowed memory, each to the front of its device memory, and returns when all are on the
    /// device. For many short slices this is far faster than a call for each.
    ///
    /// # Errors
    /// Before anything is copied: [`Error::Piece`] with the slice's number and [`Error::TooSmall`] or
    /// [`Error::Mismatch`]; a lost device. Later as for [`Transfer::wait`].
    pub fn upload_slices(&self, slices: &[(&[u8], DeviceSlice)]) -> Result<()> {
        self.upload_lent(slices, None)
    }

    fn upload_lent(&self, slices: &[(&[u8], DeviceSlice)], named: Option<Named>) -> Result<()> {
        let get = |n: usize| {
            let (bytes, memory) = &slices[n];
            (bytes.as_ptr().cast_mut(), bytes.len(), memory)
        };
        // SAFETY: shared borrows of bytes.
        unsafe { self.lend(Direction::Up, slices.len(), get, named) }
    }

    /// Copies borrowed bytes to the front of `dst`, and returns when they are on the device. Up to 256 KiB go by one
    /// call of the driver, and need no memory of the pool, unless the copier's depth or rate is in the way. The CPU
    /// reads the bytes: a file that is mapped, and might become shorter meanwhile, is a
    /// [`FileSource`](super::FileSource) of an [`upload`](Self::upload); or [register](crate::Device::register) the
    /// mapping and call [`upload_pages`](Self::upload_pages).
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::TooSmall`], [`Error::Mismatch`], a bad range; else as for [`Transfer::wait`].
    pub fn upload_slice(&self, src: &[u8], dst: impl DeviceRange) -> Result<()> {
        let dst = self.target(dst, src.len() as u64)?;
        self.may_block()?;
        let named = self.named(Direction::Up, dst.len() as u64, "bytes in memory".into());
        let said = self.at_once(Direction::Up, dst.len(), &named, |stream| stream.upload_blocking(src, &dst));
        said.unwrap_or_else(|| self.upload_lent(&[(src, dst)], Some(named)))
    }

    /// Copies device memory to the front of borrowed memory, and returns when it is there. After an error the memory's
    /// contents are undefined.
    ///
    /// # Errors
    /// As for [`upload_slice`](Self::upload_slice).
    pub fn download_slice(&self, src: impl DeviceRange, dst: &mut [u8]) -> Result<()> {
        let src = self.own(src)?;
        Error::unless_fits(src.len(), dst.len())?;
        self.may_block()?;
        let named = self.named(Direction::Down, src.len() as u64, "memory".into());
        let to = &mut *dst;
        let said =
            self.at_once(Direction::Down, src.len(), &named, |stream| stream.download_blocking(&src, to));
        said.unwrap_or_else(|| self.download_lent(&mut [(src, dst)], Some(named)))
    }

    /// Copies a few bytes by a blocking call of the driver, for a caller that waits: a chunk takes half as long again.
    /// `None`: they have to go as a chunk.
    fn at_once(
        &self,
        direction: Direction,
        bytes: usize,
        (name, trace): &Named,
        copy: impl FnOnce(&Stream) -> Result<()>,
    ) -> Option<Result<()>> {
        let (engine, priority) = (self.engine(), self.priority);
        let is_short = bytes <= AT_ONCE && engine.settings.threads > 0;
        if !is_short || !engine.may_send(direction, priority, bytes) {
            return None;
        }
        let permit = Permit { engine, direction, priority };
        let since = Instant::now();
        let said = copy(engine.stream(direction, priority)).map_err(|cause| Error::Transfer {
            what: name.clone().into_owned(),
            offset: 0,
            cause: Box::new(cause),
        });
        let mut stats = engine.counters.lock();
        stats.chunks += 1;
        stats.batch_bytes += bytes as u64;
        drop(stats);
        drop(permit);
        trace.end(&said, if said.is_ok() { bytes as u64 } else { 0 }, since.elapsed());
        Some(said)
    }

    /// Copies many ranges of device memory, each to the front of a borrowed slice, and returns when all of it is there.
    ///
    /// # Errors
    /// As for [`upload_slices`](Self::upload_slices). After an error the slices' contents are undefined.
    pub fn download_slices(&self, slices: &mut [(DeviceSlice, &mut [u8])]) -> Result<()> {
        self.download_lent(slices, None)
    }

    fn download_lent(&self, slices: &mut [(DeviceSlice, &mut [u8])], named: Option<Named>) -> Result<()> {
        let (first, count) = (slices.as_mut_ptr(), slices.len());
        let get = |n: usize| {
            // SAFETY: within the list, which is borrowed exclusively. The target's address is read without a borrow of
            // the target, whose bytes another thread may be writing.
            let (memory, target) = unsafe {
                let entry = first.add(n);
                (&(*entry).0, &raw mut *(*entry).1)
            };
            (target.cast(), target.len(), memory)
        };
        // SAFETY: borrowed exclusively. The list itself is only read.
        unsafe { self.lend(Direction::Down, count, get, named) }
    }

    /// Copies so many pieces that the caller lends, and waits until that is over. `get`: where a piece is on the host,
    /// how long it is there, and its device memory.
    ///
    /// # Safety
    /// Several threads may call `get` at once, and its drop does nothing. The pieces can be read, and are not written
    /// (for an upload); or can be written, and are not used otherwise (for a download).
    unsafe fn lend<'a>(
        &self,
        direction: Direction,
        count: usize,
        get: impl Fn(usize) -> (*mut u8, usize, &'a DeviceSlice),
        named: Option<Named>,
    ) -> Result<()> {
        self.may_block()?;
        let mut survey = Survey::default();
        for n in 0..count {
            let (_, len, memory) = get(n);
            let fits = match direction {
                Direction::Up => Ok(len),
                Direction::Down => Error::unless_fits(memory.len(), len).map(|()| memory.len()),
            };
            let added = fits.and_then(|len| survey.add(self.engine(), memory, len));
            added.map_err(|e| e.of_piece(n, memory.len()))?;
        }
        let piece = |n| {
            let (host, len, memory) = get(n);
            Piece::new(host, len.min(memory.len()), memory)
        };
        // SAFETY: the caller's promise.
        let plan: Arc<dyn Plan + '_> = Arc::new(unsafe { Borrowed::new(count, piece) });
        // SAFETY: only the lifetime changes. The job uses its plan only before it is over, and `Lending` waits for
        // that, also on unwinding. A worker may keep the job a moment longer: the plan's drop is that of `get`.
        let plan = unsafe { std::mem::transmute::<Arc<dyn Plan + '_>, Arc<dyn Plan>>(plan) };
        let job = self.job(self.begin(direction, survey, named), plan);
        let lending = Lending { workers: &self.workers, job: &job };
        self.workers.start().inspect_err(|error| job.fail(error.clone()))?;
        self.workers.add(&job);
        drop(lending);
        // A wait that ended in the child of a fork, before the job did, has moved nothing here.
        job.outcome().unwrap_or(Err(Error::Forked))
    }

    /// A name for errors and events, and the span that begins under it.
    pub(super) fn named(&self, direction: Direction, total: u64, name: Cow<'static, str>) -> Named {
        let trace = Trace::begin(self.device().name(), direction, self.priority, total, &name);
        (name, trace)
    }

    /// What is known of a transfer before it starts.
    pub(super) fn begin(&self, direction: Direction, survey: Survey, named: Option<Named>) -> Start {
        let Survey { bytes: total, memories, .. } = survey;
        let (priority, timeout, ramp) = (self.priority, self.timeout, Ramp::new(&self.engine().settings));
        Start { direction, priority, total, named, memories, timeout, ramp }
    }

    fn job(&self, start: Start, plan: Arc<dyn Plan>) -> Arc<Job> {
        let job = Job::new(start, plan);
        let engine = Arc::downgrade(self.engine());
        job.end_in_time(move || engine.upgrade().map(|engine| engine.segments.shortage()));
        job
    }

    /// Before a call.
    pub(super) fn alive(&self) -> Result<()> {
        self.device().context().alive()
    }

    /// Before a blocking call.
    pub(super) fn may_block(&self) -> Result<()> {
        may_wait()?;
        self.alive()
    }

    /// Device memory of this device.
    pub(super) fn own(&self, range: impl DeviceRange) -> Result<DeviceSlice> {
        let slice = range.get(KEY)?;
        slice.check_is_of(self.device().context())?;
        Ok(slice.clone())
    }

    /// As many bytes at its front.
    pub(super) fn target(&self, range: impl DeviceRange, len: u64) -> Result<DeviceSlice> {
        let slice = self.own(range)?;
        let need = usize::try_from(len).unwrap_or(usize::MAX);
        if need == 0 {
            return Err(Error::empty());
        }
        Error::unless_fits(need, slice.len())?;
        slice.slice(..need)
    }

    // --- pages -------------------------------------------------------------------------------------------------------

    /// Copies pinned blocks to device memory, each to many places: the first bytes of a block to its first place, and
    /// so on, one behind the other. No CPU moves the bytes: short pages go through the device ring. (A block of a cache
    /// of keys and values has a page for each layer.)
    ///
    /// # Errors
    /// Before anything is copied, with all blocks: [`Error::Piece`] with the block's number and [`Error::Argument`] (a
    /// block without places or bytes), [`Error::TooSmall`] (fewer bytes than its places have) or [`Error::Mismatch`];
    /// [`Error::Forked`], a lost device.
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
        let (found, blocks) = SubmitError::unless(looked, blocks)?;
        // Places of many pages take long to drop: that comes when the copies have begun.
        let (lent, _places): (_, Vec<P>) =
            blocks.into_iter().map(|(block, places)| ((block.lend(KEY), block), places)).unzip();
        Ok(self.run_pages(Direction::Up, found, lent))
    }

    /// Copies many places of device memory to pinned blocks, the places of a block one behind the other. When all have
    /// arrived the handle gives the blocks back, each as long as its places together.
    ///
    /// # Errors
    /// Before anything is copied, with all blocks: as for [`upload_pages`](Self::upload_pages), and
    /// [`Error::Mismatch`] in an [`Error::Piece`] for a [`StreamBuf`](crate::StreamBuf).
    #[allow(clippy::type_complexity, reason = "the blocks come back")]
    pub fn download_pages<L: Landing + 'static, P: Places + 'static>(
        &self,
        mut blocks: Vec<(P, L)>,
    ) -> Result<Transfer<Vec<L::Landed>>, SubmitError<Vec<(P, L)>>> {
        let stream = self.engine().stream(Direction::Down, Priority::Foreground);
        let each = blocks.iter_mut().map(|(places, landing)| (landing.target(stream, KEY), &*places));
        let looked = self.survey_pages(each);
        let (found, blocks) = SubmitError::unless(looked, blocks)?;
        let lend = |(places, landing): (P, L)| (landing.land(KEY), places);
        let (lent, _places): (_, Vec<P>) = blocks.into_iter().map(lend).unzip();
        Ok(self.run_pages(Direction::Down, found, lent))
    }

    /// Looks at blocks, each with its first byte and how many it has (or has room for), and its places.
    fn survey_pages<'a, P: Places + 'a>(
        &self,
        blocks: impl Iterator<Item = (Result<(*mut u8, usize)>, &'a P)>,
    ) -> Result<(Survey, Pages)> {
        self.alive()?;
        let (mut survey, mut pages) = (Survey::default(), Pages::default());
        for (n, (looked, places)) in blocks.enumerate() {
            let mut added = Ok(());
            pages.add(looked.as_ref().map_or(std::ptr::null_mut(), |(host, _)| *host));
            places.each(KEY, &mut |whole, len, stride| {
                let count = (whole.len() - len) / stride + 1;
                pages.put(whole.address(), len, stride, count);
                if looked.is_ok() && added.is_ok() {
                    added = survey.add(self.engine(), whole, len * count);
                }
            });
            let fits = |have| match pages.last() {
                0 => Err(Error::empty()),
                need => Error::unless_fits(need, have),
            };
            let looked = looked.and_then(|(_, have)| added.and_then(|()| fits(have)));
            looked.map_err(|e| e.of_piece(n, pages.last()))?;
        }
        self.workers.start().map(|()| (survey, pages))
    }

    /// Starts a job that owns blocks.
    fn run_pages<B: Lend + 'static>(
        &self,
        direction: Direction,
        (survey, pages): (Survey, Pages),
        lent: Vec<(Resource, B)>,
    ) -> Transfer<Vec<B>> {
        let ramp = Ramp::unfilled(&self.engine().settings);
        let start = Start { ramp, ..self.begin(direction, survey, None) };
        self.run(start, Arc::new(Paged::new(direction, pages, lent)))
    }

    /// Starts a job that owns what it moves, on threads that were started.
    pub(super) fn run<B>(
        &self,
        start: Start,
        plan: Arc<impl Plan + Values<Back = B> + 'static>,
    ) -> Transfer<B> {
        let job = self.job(start, plan.clone());
        self.workers.add(&job);
        Transfer::new(self.clone(), job, plan)
    }
}

/// A permit ([`Engine::may_send`]) for a copy that its caller waits for. Its drop, also on unwinding, gives it back.
struct Permit<'a> {
    engine: &'a Engine,
    direction: Direction,
    priority: Priority,
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.engine.sent(self.direction, self.priority, None);
    }
}

/// While this exists, memory that the caller lends is used. Its drop waits until it is used no more.
struct Lending<'a> {
    workers: &'a Workers,
    job: &'a Arc<Job>,
}

impl Drop for Lending<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.job.cancel();
        }
        self.workers.wait(self.job, None, |progress| progress.over);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::handle::Device;
    use crate::{Pool, Unpinned};

    #[test]
    fn a_copy_that_unwinds_gives_its_permit_back() {
        let device = Device::open("host").unwrap();
        let pool = Pool::builder(&device).capacity(4 << 20).unpinned(Unpinned::Allow).build().unwrap();
        let copier = Copier::builder(&pool, &device).depth(1).build().unwrap();
        let named = copier.named(Direction::Up, 1, "one byte".into());
        let copy = || copier.at_once(Direction::Up, 1, &named, |_| panic!("the driver's copy panics"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(copy)).is_err());
        let sent = copier.at_once(Direction::Up, 1, &named, |_| Ok(()));
        assert!(matches!(sent, Some(Ok(()))), "there is one permit, and it is free");
    }
}
