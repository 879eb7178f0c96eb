//! The calls for memory: borrowed bytes, and pinned blocks of many pages.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use super::chunk::Ramp;
use super::engine::Engine;
use super::job::{Job, Plan, Start, Values};
use super::pages::{Paged, Pages};
use super::pieces::{Borrowed, Piece, Survey};
use super::stats::count;
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

/// Bytes that are copied at once for a call that waits, at most. For longer ones the chunk's own time matters less, and a
/// driver's copy from or to memory that is not pinned is slower.
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
        self.upload_from(slices, None, None)
    }

    fn upload_from(
        &self,
        slices: &[(&[u8], DeviceSlice)],
        name: Option<Cow<'static, str>>,
        trace: Option<Trace>,
    ) -> Result<()> {
        self.may_block()?;
        let mut survey = Survey::default();
        for (n, (bytes, memory)) in slices.iter().enumerate() {
            survey.add(self.engine(), memory, bytes.len()).map_err(|e| e.of_piece(n, memory.len()))?;
        }
        let get = |n: usize| {
            let (bytes, memory) = &slices[n];
            Piece::new(bytes.as_ptr().cast_mut(), bytes.len(), memory)
        };
        // SAFETY: shared borrows of bytes.
        let plan = unsafe { Borrowed::new(slices.len(), get) };
        let start = Start { trace, ..self.begin(Direction::Up, survey, name) };
        // SAFETY: as above.
        unsafe { self.lend(start, plan) }
    }

    /// Copies borrowed bytes to the front of `dst`, and returns when they are on the device. Up to 256 KiB go by one call of
    /// the driver, and need no memory of the pool, unless the copier's depth or rate is in the way. The CPU reads the bytes:
    /// a file that is mapped, and might become shorter meanwhile, is a
    /// [`FileSource`](super::FileSource) of an [`upload`](Self::upload); or
    /// [register](crate::Device::register) the mapping and call [`upload_pages`](Self::upload_pages).
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::TooSmall`], [`Error::Mismatch`], a bad range; else as for [`Transfer::wait`].
    pub fn upload_slice(&self, src: &[u8], dst: impl DeviceRange) -> Result<()> {
        let dst = self.target(dst, src.len() as u64)?;
        self.may_block()?;
        let name = "bytes in memory";
        let said = self.at_once(Direction::Up, dst.len(), name, |stream| stream.upload_blocking(src, &dst));
        let trace = match said {
            Ok(said) => return said,
            Err(trace) => trace,
        };
        self.upload_from(&[(src, dst)], Some(name.into()), trace)
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
        let (name, to) = ("memory", &mut *dst);
        let said =
            self.at_once(Direction::Down, src.len(), name, |stream| stream.download_blocking(&src, to));
        match said {
            Ok(said) => said,
            Err(trace) => self.download_to(&mut [(src, dst)], Some(name.into()), trace),
        }
    }

    /// Copies a few bytes by a blocking call of the driver, for a caller that waits: a chunk takes half as long again.
    /// `Err`: they have to go as a chunk, with this trace if it has begun.
    fn at_once(
        &self,
        direction: Direction,
        bytes: usize,
        name: &'static str,
        copy: impl FnOnce(&Stream) -> Result<()>,
    ) -> std::result::Result<Result<()>, Option<Trace>> {
        let (engine, priority) = (self.engine(), self.priority);
        if bytes > AT_ONCE || engine.settings.threads == 0 {
            return Err(None);
        }
        // Before the permit: a subscriber may start a transfer, which the permit would be in the way of.
        let trace = Trace::begin(self.device().name(), direction, priority, bytes as u64, name);
        if !engine.may_send(direction, priority, bytes) {
            return Err(Some(trace));
        }
        let permit = Permit { engine, direction, priority };
        let since = Instant::now();
        let said = copy(engine.stream(direction, priority)).map_err(|cause| Error::Transfer {
            what: name.into(),
            offset: 0,
            cause: Box::new(cause),
        });
        count(&engine.counters, |stats| {
            stats.chunks += 1;
            stats.batch_bytes += bytes as u64;
        });
        drop(permit);
        trace.end(&said, if said.is_ok() { bytes as u64 } else { 0 }, since.elapsed());
        Ok(said)
    }

    /// Copies many ranges of device memory, each to the front of a borrowed slice, and returns when all of it is there.
    ///
    /// # Errors
    /// As for [`upload_slices`](Self::upload_slices). After an error the slices' contents are undefined.
    pub fn download_slices(&self, slices: &mut [(DeviceSlice, &mut [u8])]) -> Result<()> {
        self.download_to(slices, None, None)
    }

    fn download_to(
        &self,
        pieces: &mut [(DeviceSlice, &mut [u8])],
        name: Option<Cow<'static, str>>,
        trace: Option<Trace>,
    ) -> Result<()> {
        let (engine, mut survey) = (self.engine(), Survey::default());
        self.may_block()?;
        for (n, (memory, target)) in pieces.iter().enumerate() {
            let fits = Error::unless_fits(memory.len(), target.len());
            fits.and_then(|()| survey.add(engine, memory, memory.len()))
                .map_err(|e| e.of_piece(n, memory.len()))?;
        }
        let (first, count) = (pieces.as_mut_ptr(), pieces.len());
        let get = |n: usize| {
            // SAFETY: within the list, which is borrowed exclusively. The target's address is read without a borrow of the
            // target, whose bytes another thread may be writing.
            let (memory, target) = unsafe {
                let entry = first.add(n);
                (&(*entry).0, &raw mut *(*entry).1)
            };
            Piece::new(target.cast(), memory.len(), memory)
        };
        // SAFETY: borrowed exclusively, each as long as its range at least. The list itself is only read.
        let plan = unsafe { Borrowed::new(count, get) };
        let start = Start { trace, ..self.begin(Direction::Down, survey, name) };
        // SAFETY: as above.
        unsafe { self.lend(start, plan) }
    }

    /// What is known of a transfer before it starts.
    pub(super) fn begin(
        &self,
        direction: Direction,
        survey: Survey,
        name: Option<Cow<'static, str>>,
    ) -> Start {
        let Survey { bytes: total, memories, .. } = survey;
        let (priority, trace, ramp) = (self.priority, None, Ramp::new(&self.engine().settings));
        Start { direction, priority, total, name, memories, trace, timeout: self.timeout, ramp }
    }

    /// Runs a job of memory that the caller lends, and waits until it is over.
    ///
    /// # Safety
    /// The drop of the plan uses nothing that is lent: a worker may keep the job a moment longer than the call lasts.
    unsafe fn lend<F: Fn(usize) -> Piece>(&self, start: Start, plan: Borrowed<F>) -> Result<()> {
        let plan: Arc<dyn Plan + '_> = Arc::new(plan);
        // SAFETY: only the lifetime changes. The job uses its plan only before it is over, and `Lending` waits for that,
        // also on unwinding; the drop is the caller's promise.
        let plan = unsafe { std::mem::transmute::<Arc<dyn Plan + '_>, Arc<dyn Plan>>(plan) };
        let job = self.job(start, plan);
        let lending = Lending { workers: &self.workers, job: &job };
        self.workers.start().inspect_err(|error| job.fail(error.clone()))?;
        self.workers.add(&job);
        drop(lending);
        // A wait that ended in the child of a fork, before the job did, has moved nothing here.
        job.outcome().unwrap_or(Err(Error::Forked))
    }

    /// Makes a job, and its span if it has a name.
    fn job(&self, mut start: Start, plan: Arc<dyn Plan>) -> Arc<Job> {
        let Start { direction, priority, total, .. } = start;
        let begin = |name: &str| Trace::begin(self.device().name(), direction, priority, total, name);
        start.trace = start.trace.take().or_else(|| start.name.as_deref().map(begin));
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

    /// Copies pinned blocks to device memory, each to many places: the first bytes of a block to its first place, and so
    /// on, one behind the other. No CPU moves the bytes: short pages go through the device ring. (A block of a cache of
    /// keys and values has a page for each layer.)
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
        let lend = |(places, landing): (P, L)| {
            let (resource, half) = landing.lend(KEY);
            ((resource, L::Landed::from(half)), places)
        };
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
            places.each(KEY, &mut |(whole, len, stride)| {
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
        self.workers.wait(self.job, None, Job::is_over);
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
        let copy = || copier.at_once(Direction::Up, 1, "one byte", |_| panic!("the driver's copy panics"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(copy)).is_err());
        let sent = copier.at_once(Direction::Up, 1, "one byte", |_| Ok(()));
        assert!(matches!(sent, Ok(Ok(()))), "there is one permit, and it is free");
    }
}
