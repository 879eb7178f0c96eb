//! The calls for memory: borrowed bytes, and pinned blocks of many pages.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use super::config::Priority;
use super::engine::Engine;
use super::job::{Body, Direction, Job, LentWork, Plan, Work};
use super::packing::Piece;
use super::pages::{Down, Paged, Pages, Side, Up};
use super::pieces::{Borrowed, LEAST, Ramp, Survey, Values};
use super::stats::Counters;
use super::trace::Trace;
use super::transfer::Transfer;
use super::worker::Worker;
use super::{Copier, may_wait};
use crate::buffer::Lend;
use crate::copy::places::Sealed as _;
use crate::copy::{DeviceRange, Landing, Places};
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result, SubmitError};
use crate::sealed::KEY;
use crate::stream::Stream;

/// Bytes that are copied at once for a call that waits, at most. For longer ones the chunk's own time matters less, and a
/// driver's copy from or to memory that is not pinned is slower.
const AT_ONCE: usize = 64 << 10;

impl Copier {
    // --- borrowed ----------------------------------------------------------------------------------------------------

    /// Copies many pieces of borrowed memory to device memory. The calling thread, with the copier's threads, packs
    /// them into segments of the pool. When this returns, all bytes have been read, and the last of them are on their
    /// way: the handle tells when all are on the device.
    ///
    /// # Errors
    /// Before anything is copied: [`Error::Piece`] with the piece's number and [`Error::TooSmall`] or
    /// [`Error::WrongDevice`]; [`Error::Forked`], a lost device. Later as for [`Transfer::wait`], when no byte of the
    /// pieces is read any more. [`Error::Unsupported`] on a thread of the crate, which must not wait.
    pub fn upload_pieces(&self, pieces: &[(&[u8], DeviceSlice)]) -> Result<Transfer> {
        let engine = self.engine();
        self.may_block()?;
        let mut survey = Survey::default();
        for (n, (bytes, memory)) in pieces.iter().enumerate() {
            survey.add(engine, memory, bytes.len()).map_err(|e| e.of_piece(n, memory.len()))?;
        }
        let work = slices(engine, pieces);
        let plan = self.plan(Direction::Up, survey, None);
        // SAFETY: lent until the job is read, which is what the call waits for.
        let job = unsafe { self.lend(plan, &work, Job::is_read) }?;
        if job.is_stopped() {
            engine.wait(&job, None, Job::is_over);
            job.outcome().unwrap_or(Ok(()))?;
        }
        Ok(Transfer::new(self.clone(), job, Arc::new(())))
    }

    /// Copies borrowed bytes to the front of `dst`, and returns when they are on the device. Up to 64 KiB go by one call of
    /// the driver, and need no memory of the pool, unless an earlier transfer is in the way. The CPU reads the bytes: for a
    /// file that is mapped, and might become shorter meanwhile, call [`upload_file`](Self::upload_file), or
    /// [register](crate::Device::register) the mapping and call [`upload_pages`](Self::upload_pages).
    ///
    /// # Errors
    /// [`Error::Empty`], [`Error::TooSmall`], [`Error::WrongDevice`], a bad range; [`Error::Transfer`] with what the
    /// pool or the device said; [`Error::Unsupported`] on a thread of the crate (in a waker, a source or a sink), which
    /// must not wait.
    pub fn upload_slice(&self, src: &[u8], dst: impl DeviceRange) -> Result<()> {
        let dst = self.target(dst, src.len() as u64)?;
        self.may_block()?;
        let name = "bytes in memory";
        let said = self.at_once(Direction::Up, &dst, name, |stream| stream.upload_blocking(src, &dst));
        let trace = match said {
            Ok(said) => return said,
            Err(trace) => trace,
        };
        let survey = Survey::one(self.engine(), &dst, src.len())?;
        let pieces = [(src, dst)];
        let work = slices(self.engine(), &pieces);
        let plan = Plan { trace, ..self.plan(Direction::Up, survey, Some(name.into())) };
        // SAFETY: lent until the job is over, which is what the call waits for.
        let job = unsafe { self.lend(plan, &work, Job::is_over) }?;
        job.outcome().unwrap_or(Ok(()))
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
        let said = self.at_once(Direction::Down, &src, name, |stream| stream.download_blocking(&src, to));
        match said {
            Ok(said) => said,
            Err(trace) => self.download_to(&mut [(src, dst)], Survey::ordered(), Some(name.into()), trace),
        }
    }

    /// Copies a few bytes by a blocking call of the driver, for a caller that waits: a chunk takes half as long again.
    /// `Err`: they have to go as a chunk, with this trace if it has begun.
    fn at_once(
        &self,
        direction: Direction,
        memory: &DeviceSlice,
        name: &'static str,
        copy: impl FnOnce(&Stream) -> Result<()>,
    ) -> std::result::Result<Result<()>, Option<Trace>> {
        let (engine, bytes, priority) = (self.engine(), memory.len(), self.priority);
        if bytes > AT_ONCE || engine.settings.threads == 0 {
            return Err(None);
        }
        // Before the turn: a subscriber may start a transfer, which the turn would be in the way of.
        let trace = Trace::begin(self.device().name(), direction, priority, bytes as u64, name);
        let Some(turn) = engine.turn(direction, priority, memory) else { return Err(Some(trace)) };
        let since = Instant::now();
        let said = copy(engine.stream(direction, priority));
        let of_transfer = |cause| Error::Transfer { what: name.into(), offset: 0, cause: Box::new(cause) };
        let said = said.map_err(of_transfer);
        Counters::add(&engine.counters.chunks, 1);
        Counters::add(&engine.counters.batch, bytes);
        drop(turn);
        trace.end(&said, if said.is_ok() { bytes as u64 } else { 0 }, since.elapsed());
        Ok(said)
    }

    /// Copies many ranges of device memory to borrowed memory, each as many bytes as its range has, and returns when
    /// all of it is there.
    ///
    /// # Errors
    /// As for [`upload_pieces`](Self::upload_pieces). After an error the targets' contents are undefined.
    pub fn download_pieces(&self, pieces: &mut [(DeviceSlice, &mut [u8])]) -> Result<()> {
        self.download_to(pieces, Survey::default(), None, None)
    }

    fn download_to(
        &self,
        pieces: &mut [(DeviceSlice, &mut [u8])],
        mut survey: Survey,
        name: Option<Cow<'static, str>>,
        trace: Option<Trace>,
    ) -> Result<()> {
        let engine = self.engine();
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
        let work = unsafe { Borrowed::new(engine, count, get) };
        let plan = Plan { trace, ..self.plan(Direction::Down, survey, name) };
        // SAFETY: lent until the job is over, which is what the call waits for.
        let job = unsafe { self.lend(plan, &work, Job::is_over) }?;
        job.outcome().unwrap_or(Ok(()))
    }

    /// What is known of a transfer before it starts.
    pub(super) fn plan(&self, direction: Direction, survey: Survey, name: Option<Cow<'static, str>>) -> Plan {
        let Survey { bytes: total, memories, spans, .. } = survey;
        let (priority, fed, trace) = (self.priority, false, None);
        Plan { direction, priority, total, name, memories, spans, fed, trace, timeout: self.timeout }
    }

    /// Runs a job of work that the caller lends, until `until` holds. The calling thread helps.
    ///
    /// # Safety
    /// Once `until` holds of a job, it uses the work no more.
    pub(super) unsafe fn lend(
        &self,
        plan: Plan,
        work: &(dyn Work + '_),
        until: fn(&Job) -> bool,
    ) -> Result<Arc<Job>> {
        let engine = self.engine();
        let total = plan.total;
        // SAFETY: `Lending` waits until `until` holds, also on unwinding.
        let body = Body::Lent(unsafe { LentWork::new(work) });
        let job = self.job(plan, body);
        let lending = Lending { engine, job: &job, until };
        // A single chunk is the calling thread's own: no other thread is woken for it.
        if total > LEAST as u64 || engine.settings.threads == 0 {
            engine.start(&job, total).inspect_err(|error| job.fail(error.clone()))?;
        }
        drop(lending);
        Ok(job)
    }

    /// Makes a job, its span if it has a name, and its place in the order if it has one.
    pub(super) fn job(&self, mut plan: Plan, body: Body) -> Arc<Job> {
        let Plan { direction, priority, total, .. } = plan;
        let begin = |name: &str| Trace::begin(self.device().name(), direction, priority, total, name);
        plan.trace = plan.trace.take().or_else(|| plan.name.as_deref().map(begin));
        let spans = std::mem::take(&mut plan.spans);
        let job = Job::new(plan, body);
        if !spans.is_empty() {
            self.engine().order(&job, spans);
        }
        let engine = Arc::downgrade(self.engine());
        job.end_in_time(move || engine.upgrade().map(|engine| engine.segments.shortage()));
        job
    }

    /// Before a call.
    pub(super) fn alive(&self) -> Result<()> {
        crate::os::check_fork()?;
        self.device().context().alive()
    }

    /// Before a blocking call.
    pub(super) fn may_block(&self) -> Result<()> {
        may_wait()?;
        self.alive()
    }

    /// Device memory of this device.
    pub(super) fn own(&self, range: impl DeviceRange) -> Result<DeviceSlice> {
        crate::os::check_fork()?;
        let slice = range.get(KEY)?;
        slice.check_is_of(self.device().context())?;
        Ok(slice.clone())
    }

    /// As many bytes at its front.
    pub(super) fn target(&self, range: impl DeviceRange, len: u64) -> Result<DeviceSlice> {
        let slice = self.own(range)?;
        let need = usize::try_from(len).unwrap_or(usize::MAX);
        if need == 0 {
            return Err(Error::Empty);
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
    /// Before anything is copied, with all blocks: [`Error::Piece`] with the block's number and [`Error::Empty`] (a block
    /// without places: an empty `Vec`), [`Error::Unwritten`], [`Error::TooSmall`] (fewer bytes than its places have) or
    /// [`Error::WrongDevice`];
    /// [`Error::Forked`], a lost device.
    #[allow(clippy::type_complexity, reason = "the blocks come back")]
    pub fn upload_pages<B: Lend + 'static, P: Places + 'static>(
        &self,
        blocks: Vec<(B, P)>,
    ) -> Result<Transfer<Vec<B>>, SubmitError<Vec<(B, P)>>> {
        self.pages::<Up<B, P>>(blocks)
    }

    /// Copies many places of device memory to pinned blocks, the places of a block one behind the other. When all have
    /// arrived the handle gives the blocks back, each as long as its places together.
    ///
    /// # Errors
    /// Before anything is copied, with all blocks: as for [`upload_pages`](Self::upload_pages), and
    /// [`Error::WrongStream`] in an [`Error::Piece`] for a [`StreamBuf`](crate::StreamBuf).
    #[allow(clippy::type_complexity, reason = "the blocks come back")]
    pub fn download_pages<L: Landing + 'static, P: Places + 'static>(
        &self,
        blocks: Vec<(P, L)>,
    ) -> Result<Transfer<Vec<L::Landed>>, SubmitError<Vec<(P, L)>>> {
        self.pages::<Down<L, P>>(blocks)
    }

    /// Starts a job that owns blocks, if nothing is wrong with any.
    #[allow(clippy::type_complexity, reason = "the blocks come back")]
    fn pages<S: Side<Beside: Places> + 'static>(
        &self,
        mut given: Vec<S::Given>,
    ) -> Result<Transfer<Vec<S::Back>>, SubmitError<Vec<S::Given>>> {
        let engine = self.engine();
        let (mut survey, mut pages) = (Survey::default(), Pages::default());
        let looked = (|| {
            self.alive()?;
            let stream = engine.stream(S::DIRECTION, Priority::Foreground);
            for (n, block) in given.iter_mut().enumerate() {
                let (looked, mut added) = (S::look(block, stream), Ok(()));
                pages.add(looked.as_ref().map_or(std::ptr::null_mut(), |(host, _)| *host));
                S::beside(block).each(KEY, &mut |(whole, len, stride)| {
                    let count = (whole.len() - len) / stride + 1;
                    pages.put(whole.address(), len, stride, count);
                    if looked.is_ok() && added.is_ok() {
                        added = survey.add(engine, whole, len * count);
                    }
                });
                let fits = |have| match pages.last() {
                    0 => Err(Error::Empty),
                    need => Error::unless_fits(need, have),
                };
                let looked = looked.and_then(|(_, have)| added.and_then(|()| fits(have)));
                looked.map_err(|e| e.of_piece(n, pages.last()))?;
            }
            engine.start_threads()
        })();
        let ((), given) = SubmitError::unless(looked, given)?;
        let (paged, _places) = Paged::<S>::new(pages, given, Ramp::unfilled(engine));
        let (plan, paged) = (self.plan(S::DIRECTION, survey, None), Arc::new(paged));
        Ok(self.run(plan, paged.clone(), paged))
    }

    /// Starts a job that owns what it moves, on threads that were started.
    pub(super) fn run<B>(
        &self,
        plan: Plan,
        work: Arc<dyn Work>,
        values: Arc<dyn Values<Back = B>>,
    ) -> Transfer<B> {
        let total = plan.total;
        let job = self.job(plan, Body::Owned(work));
        self.engine().go(&job, total);
        Transfer::new(self.clone(), job, values)
    }
}

/// Borrowed bytes on their way to the device.
fn slices<'a>(engine: &Engine, pieces: &'a [(&'a [u8], DeviceSlice)]) -> impl Work + use<'a> {
    let get = |n: usize| {
        let (bytes, memory) = &pieces[n];
        Piece::new(bytes.as_ptr().cast_mut(), bytes.len(), memory)
    };
    // SAFETY: shared borrows of bytes.
    unsafe { Borrowed::new(engine, pieces.len(), get) }
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
        self.engine.wait(self.job, None, until);
    }
}
