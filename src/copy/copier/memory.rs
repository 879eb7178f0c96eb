//! The calls for memory: borrowed bytes, pinned buffers, and pinned blocks of many pages.

use std::borrow::Cow;
use std::sync::Arc;

use super::engine::Engine;
use super::job::{Body, Direction, Job, LentWork, Plan, Work};
use super::packing::Piece;
use super::pieces::{Buffer, Buffers, Down, LEAST, Paged, Ramp, Slices, Survey, Targets, Up, Values};
use super::trace::Trace;
use super::transfer::Transfer;
use super::worker::Worker;
use super::{Copier, may_wait};
use crate::buffer::Lend;
use crate::copy::{DeviceRange, Landing};
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result, SubmitError};
use crate::sealed::KEY;

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
        let mut survey = self.survey()?;
        for (n, (bytes, memory)) in pieces.iter().enumerate() {
            survey.add(engine, memory, bytes.len()).map_err(|e| e.of_piece(n, memory.len()))?;
        }
        let work = Slices { pieces, ramp: Ramp::new(engine) };
        let plan = self.plan(Direction::Up, survey, None);
        // SAFETY: lent until the job is read, which is what the call waits for.
        let job = unsafe { self.lend(plan, &work, Job::is_read) }?;
        if job.is_stopped() {
            engine.wait(&job, None, Job::is_over);
            job.outcome().unwrap_or(Ok(()))?;
        }
        Ok(Transfer::new(self.clone(), job, Arc::new(())))
    }

    /// Copies borrowed bytes to the front of `dst`, and returns when they are on the device. The CPU reads them: for a
    /// file that is mapped, and might become shorter meanwhile, call [`upload_file`](Self::upload_file), or
    /// [register](crate::Device::register) the mapping and call [`upload_pinned`](Self::upload_pinned).
    ///
    /// # Errors
    /// [`Error::Empty`], [`Error::TooSmall`], [`Error::WrongDevice`], a bad range; [`Error::Transfer`] with what the
    /// pool or the device said; [`Error::Unsupported`] on a thread of the crate (in a waker, a source or a sink), which
    /// must not wait.
    pub fn upload_slice(&self, src: &[u8], dst: impl DeviceRange) -> Result<()> {
        let dst = self.target(dst, src.len() as u64)?;
        self.survey()?;
        let mut survey = Survey::ordered();
        survey.add(self.engine(), &dst, src.len())?;
        let pieces = [(src, dst)];
        let work = Slices { pieces: &pieces, ramp: Ramp::new(self.engine()) };
        let plan = self.plan(Direction::Up, survey, Some("bytes in memory".into()));
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
        if src.len() > dst.len() {
            return Err(Error::TooSmall { need: src.len(), have: dst.len() });
        }
        self.download_to(&mut [(src, dst)], Survey::ordered(), Some("memory".into()))
    }

    /// Copies many ranges of device memory to borrowed memory, each as many bytes as its range has, and returns when
    /// all of it is there.
    ///
    /// # Errors
    /// As for [`upload_pieces`](Self::upload_pieces). After an error the targets' contents are undefined.
    pub fn download_pieces(&self, pieces: &mut [(DeviceSlice, &mut [u8])]) -> Result<()> {
        self.download_to(pieces, Survey::default(), None)
    }

    fn download_to(
        &self,
        pieces: &mut [(DeviceSlice, &mut [u8])],
        mut survey: Survey,
        name: Option<Cow<'static, str>>,
    ) -> Result<()> {
        let engine = self.engine();
        self.survey()?;
        for (n, (memory, target)) in pieces.iter().enumerate() {
            let added = match target.len() {
                have if have < memory.len() => Err(Error::TooSmall { need: memory.len(), have }),
                _ => survey.add(engine, memory, memory.len()),
            };
            added.map_err(|e| e.of_piece(n, memory.len()))?;
        }
        let work = Targets::new(pieces, Ramp::new(engine));
        let plan = self.plan(Direction::Down, survey, name);
        // SAFETY: lent until the job is over, which is what the call waits for.
        let job = unsafe { self.lend(plan, &work, Job::is_over) }?;
        job.outcome().unwrap_or(Ok(()))
    }

    /// What is known of a transfer before it starts.
    pub(super) fn plan(&self, direction: Direction, survey: Survey, name: Option<Cow<'static, str>>) -> Plan {
        let Survey { bytes: total, memories, spans, .. } = survey;
        Plan { direction, priority: self.priority, total, name, memories, spans, fed: false }
    }

    /// Runs a job of work that the caller lends, until `until` holds. The calling thread helps.
    ///
    /// # Safety
    /// Once `until` holds of a job, it uses the work no more.
    unsafe fn lend(&self, plan: Plan, work: &(dyn Work + '_), until: fn(&Job) -> bool) -> Result<Arc<Job>> {
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
        let name = plan.name.as_deref();
        let trace = name
            .map(|name| Trace::begin(self.device().name(), plan.direction, plan.priority, plan.total, name));
        let spans = std::mem::take(&mut plan.spans);
        let job = Job::new(plan, body, trace);
        if !spans.is_empty() {
            self.engine().order(&job, spans);
        }
        job
    }

    /// Before a blocking call.
    pub(super) fn survey(&self) -> Result<Survey> {
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
    /// Before anything is copied, with all buffers: [`Error::Piece`] with the buffer's number and [`Error::Empty`] (a
    /// buffer without bytes), [`Error::TooSmall`] or [`Error::WrongDevice`]; [`Error::Forked`], a lost device.
    #[allow(clippy::type_complexity, reason = "the buffers come back")]
    pub fn upload_buffers<B: Lend + 'static>(
        &self,
        buffers: Vec<(B, DeviceSlice)>,
    ) -> Result<Transfer<Vec<B>>, SubmitError<Vec<(B, DeviceSlice)>>> {
        let engine = self.engine();
        let context = engine.device.context();
        let look = |survey: &mut Survey, buffer: &B, memory: &DeviceSlice| {
            if !buffer.serves(context, KEY) {
                return Err(Error::WrongDevice { device: engine.device.name().into() });
            }
            // Asked once: a value of the caller's may answer otherwise the next time.
            let bytes = buffer.bytes(KEY);
            if bytes.is_empty() {
                return Err(Error::Empty);
            }
            survey.add(engine, memory, bytes.len())?;
            Ok(at(bytes.as_ptr().cast_mut(), bytes.len(), memory))
        };
        let mut found = self.found(buffers.len());
        let values = buffers
            .into_iter()
            .enumerate()
            .map(|(n, (value, memory))| {
                found.look(n, &memory, |survey| look(survey, &value, &memory));
                Up::Here(value, memory)
            })
            .collect();
        self.own_buffers(Direction::Up, found, values).map_err(|(error, values)| {
            SubmitError::refused(error, values.into_iter().filter_map(Up::refused).collect())
        })
    }

    /// Copies many ranges of device memory into pinned buffers: those of 48 KiB and more to where they belong, shorter
    /// ones by way of segments of the pool where it has any to spare. When all have arrived the handle gives the
    /// buffers back, each as long as its range.
    ///
    /// # Errors
    /// Before anything is copied, with all buffers: as for [`upload_buffers`](Self::upload_buffers), and
    /// [`Error::WrongStream`] in an [`Error::Piece`] for a [`StreamBuf`](crate::StreamBuf), whose memory a stream of the
    /// program's may use.
    #[allow(clippy::type_complexity, reason = "the buffers come back")]
    pub fn download_buffers<L: Landing + 'static>(
        &self,
        buffers: Vec<(DeviceSlice, L)>,
    ) -> Result<Transfer<Vec<L::Landed>>, SubmitError<Vec<(DeviceSlice, L)>>> {
        let engine = self.engine();
        let stream = engine.stream(Direction::Down, self.priority);
        let look = |survey: &mut Survey, memory: &DeviceSlice, landing: &mut L| {
            let (target, have) = landing.target(stream, KEY)?;
            if memory.len() > have {
                return Err(Error::TooSmall { need: memory.len(), have });
            }
            survey.add(engine, memory, memory.len())?;
            Ok(at(target, memory.len(), memory))
        };
        let mut found = self.found(buffers.len());
        let values = buffers
            .into_iter()
            .enumerate()
            .map(|(n, (memory, mut landing))| {
                found.look(n, &memory, |survey| look(survey, &memory, &mut landing));
                Down::Here(landing, memory)
            })
            .collect();
        self.own_buffers(Direction::Down, found, values).map_err(|(error, values)| {
            SubmitError::refused(error, values.into_iter().filter_map(Down::refused).collect())
        })
    }

    /// Copies all that was written to a pinned value (a [`PinnedBuf`](crate::PinnedBuf), a
    /// [`Registered`](crate::Registered)) from where it is, in chunks that leave room for others.
    ///
    /// # Errors
    /// With the value: [`Error::Empty`], [`Error::TooSmall`], [`Error::WrongDevice`] also for a buffer of a pool that
    /// does not serve the device, a bad range, a lost device.
    pub fn upload_pinned<B>(&self, value: B, dst: impl DeviceRange) -> Result<Transfer<B>, SubmitError<B>>
    where
        B: Lend + 'static,
    {
        let surveyed = (|| {
            if !value.serves(self.device().context(), KEY) {
                return Err(Error::WrongDevice { device: self.device().name().into() });
            }
            // Asked once: a value of the caller's may answer otherwise the next time.
            let bytes = value.bytes(KEY);
            let dst = self.target(dst, bytes.len() as u64)?;
            self.device().context().alive()?;
            let mut pages = PageSurvey { survey: Survey::ordered(), ..PageSurvey::default() };
            pages.add(self.engine(), bytes.as_ptr().cast_mut(), bytes.len(), &[dst])?;
            Ok(pages)
        })();
        let survey = match surveyed {
            Ok(surveyed) => surveyed,
            Err(error) => return Err(SubmitError::refused(error, value)),
        };
        let name = Some("pinned memory".into());
        match self.own_pages(Direction::Up, survey, vec![Up::Here(value, ())], name) {
            Ok(transfer) => Ok(transfer.single()),
            Err((error, value)) => {
                Err(SubmitError { error, buffer: value.and_then(|mut value| value.pop()) })
            }
        }
    }

    /// Device memory of this device.
    pub(super) fn own(&self, range: impl DeviceRange) -> Result<DeviceSlice> {
        crate::os::check_fork()?;
        let slice = range.resolve(KEY)?;
        if slice.is_of(self.device().context()) {
            return Ok(slice);
        }
        Err(Error::WrongDevice { device: self.device().name().into() })
    }

    /// As many bytes at its front.
    pub(super) fn target(&self, range: impl DeviceRange, len: u64) -> Result<DeviceSlice> {
        let slice = self.own(range)?;
        let need = usize::try_from(len).unwrap_or(usize::MAX);
        if need == 0 {
            return Err(Error::Empty);
        }
        if need > slice.len() {
            return Err(Error::TooSmall { need, have: slice.len() });
        }
        slice.slice(..need)
    }

    // --- pages -------------------------------------------------------------------------------------------------------

    /// Copies pinned blocks to device memory, each to many places: the first bytes of a block to its first place, and so
    /// on, one behind the other. No CPU moves the bytes: short pages go through the device ring. (A block of a cache of
    /// keys and values has a page for each layer.)
    ///
    /// # Errors
    /// Before anything is copied, with all blocks: [`Error::Piece`] with the block's number and [`Error::Empty`] (a block
    /// without places), [`Error::TooSmall`] (fewer bytes than its places have) or [`Error::WrongDevice`];
    /// [`Error::Forked`], a lost device.
    #[allow(clippy::type_complexity, reason = "the blocks come back")]
    pub fn upload_pages<B: Lend + 'static>(
        &self,
        blocks: Vec<(B, Vec<DeviceSlice>)>,
    ) -> Result<Transfer<Vec<B>>, SubmitError<Vec<(B, Vec<DeviceSlice>)>>> {
        let engine = self.engine();
        let surveyed = (|| {
            crate::os::check_fork()?;
            engine.device.context().alive()?;
            let mut pages = PageSurvey::default();
            let mut look = |block: &B, places: &[DeviceSlice]| {
                if !block.serves(engine.device.context(), KEY) {
                    return Err(Error::WrongDevice { device: engine.device.name().into() });
                }
                // Asked once: a value of the caller's may answer otherwise the next time.
                let bytes = block.bytes(KEY);
                pages.add(engine, bytes.as_ptr().cast_mut(), bytes.len(), places)
            };
            for (n, (block, places)) in blocks.iter().enumerate() {
                look(block, places).map_err(|e| e.of_piece(n, together(places)))?;
            }
            Ok(pages)
        })();
        let survey = match surveyed {
            Ok(surveyed) => surveyed,
            Err(error) => return Err(SubmitError::refused(error, blocks)),
        };
        let (blocks, places): (Vec<_>, Vec<_>) = blocks.into_iter().unzip();
        let values = blocks.into_iter().map(|block| Up::Here(block, ())).collect();
        self.own_pages(Direction::Up, survey, values, None).map_err(|(error, blocks)| {
            let buffer = blocks.map(|blocks| blocks.into_iter().zip(places).collect());
            SubmitError { error, buffer }
        })
    }

    /// Copies many places of device memory to pinned blocks, the places of a block one behind the other. When all have
    /// arrived the handle gives the blocks back, each as long as its places together.
    ///
    /// # Errors
    /// Before anything is copied, with all blocks: as for [`upload_pages`](Self::upload_pages), and
    /// [`Error::WrongStream`] in an [`Error::Piece`] for a [`StreamBuf`](crate::StreamBuf). After a start that failed (a
    /// lost device, no thread) the blocks return to their pools.
    #[allow(clippy::type_complexity, reason = "the blocks come back")]
    pub fn download_pages<L: Landing + 'static>(
        &self,
        mut blocks: Vec<(Vec<DeviceSlice>, L)>,
    ) -> Result<Transfer<Vec<L::Landed>>, SubmitError<Vec<(Vec<DeviceSlice>, L)>>> {
        let engine = self.engine();
        let surveyed = (|| {
            crate::os::check_fork()?;
            engine.device.context().alive()?;
            let mut pages = PageSurvey::default();
            let stream = engine.stream(Direction::Down, self.priority);
            for (n, (places, landing)) in blocks.iter_mut().enumerate() {
                let target = landing.target(stream, KEY);
                let added = target.and_then(|(start, have)| pages.add(engine, start, have, places));
                added.map_err(|e| e.of_piece(n, together(places)))?;
            }
            Ok(pages)
        })();
        let survey = match surveyed {
            Ok(surveyed) => surveyed,
            Err(error) => return Err(SubmitError::refused(error, blocks)),
        };
        let values = blocks.into_iter().map(|(_, landing)| Down::Here(landing, ())).collect();
        let started = self.own_pages(Direction::Down, survey, values, None);
        started.map_err(|(error, _)| SubmitError { error, buffer: None })
    }

    /// Starts a job that owns blocks. An error gives them back, if all of them are there.
    #[allow(clippy::type_complexity, reason = "the blocks come back")]
    fn own_pages<V: Buffer + 'static>(
        &self,
        direction: Direction,
        survey: PageSurvey,
        values: Vec<V>,
        name: Option<Cow<'static, str>>,
    ) -> std::result::Result<Transfer<Vec<V::Back>>, (Error, Option<Vec<V::Back>>)>
    where
        V::Back: 'static,
    {
        let engine = self.engine();
        let PageSurvey { survey, pages, lens } = survey;
        let values = values.into_iter().zip(lens).collect();
        let paged = Arc::new(Paged::new(pages, values, Ramp::unfilled(engine)));
        let plan = self.plan(direction, survey, name);
        let total = plan.total;
        let job = self.job(plan, Body::Owned(paged.clone()));
        if let Err(error) = engine.start(&job, total) {
            job.fail(error.clone());
            drop(job);
            let back = Arc::into_inner(paged)
                .and_then(|paged| paged.into_values().into_iter().collect::<Result<_>>().ok());
            return Err((error, back));
        }
        let values: Arc<dyn Values<Back = Vec<V::Back>>> = paged;
        Ok(Transfer::new(self.clone(), job, values))
    }

    /// Before buffers are looked at.
    fn found(&self, count: usize) -> Found {
        let said = crate::os::check_fork().and_then(|()| self.device().context().alive());
        Found { survey: Survey::default(), pieces: Vec::with_capacity(count), said }
    }

    /// Starts a job that owns what it moves, if nothing is wrong with that.
    #[allow(clippy::type_complexity, reason = "the buffers come back")]
    fn own_buffers<V: Buffer + 'static>(
        &self,
        direction: Direction,
        found: Found,
        values: Vec<V>,
    ) -> std::result::Result<Transfer<Vec<V::Back>>, (Error, Vec<V>)>
    where
        V::Back: 'static,
    {
        let engine = self.engine();
        let Found { survey, pieces, said } = found;
        if let Err(error) = said {
            return Err((error, values));
        }
        let buffers = Arc::new(Buffers::new(direction, pieces, values, Ramp::new(engine)));
        let plan = self.plan(direction, survey, None);
        let total = plan.total;
        let job = self.job(plan, Body::Owned(buffers.clone()));
        if let Err(error) = engine.start(&job, total) {
            job.fail(error.clone());
            drop(job);
            let values = Arc::into_inner(buffers).map(Buffers::into_values).unwrap_or_default();
            return Err((error, values));
        }
        let values: Arc<dyn Values<Back = Vec<V::Back>>> = buffers;
        Ok(Transfer::new(self.clone(), job, values))
    }
}

/// What was found of buffers before anything is copied. They are looked at while the caller's list becomes the job's,
/// since a list of many pieces is longer than caches are: each pass over it costs the time of a copy.
struct Found {
    survey: Survey,
    pieces: Vec<Piece>,
    /// What is wrong with the first that cannot be copied. None is looked at behind it.
    said: Result<()>,
}

impl Found {
    #[inline]
    fn look(&mut self, n: usize, memory: &DeviceSlice, look: impl FnOnce(&mut Survey) -> Result<Piece>) {
        if self.said.is_err() {
            return;
        }
        match look(&mut self.survey) {
            Ok(piece) => self.pieces.push(piece),
            Err(error) => self.said = Err(error.of_piece(n, memory.len())),
        }
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

/// Bytes of places together.
fn together(places: &[DeviceSlice]) -> usize {
    places.iter().fold(0, |all, place| all.saturating_add(place.len()))
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
        self.engine.wait(self.job, None, until);
    }
}
