//! Copies: how buffers are handed to a stream and what comes back.
//!
//! An asynchronous call takes what it touches: the host buffer by value (or as an `Arc`), the
//! device memory as a counted handle. A refusal comes before the timeline or the driver hears of
//! the call, and carries the buffer back.

#![allow(unsafe_code)]

pub mod copier;
pub mod launch;

use std::ops::{DerefMut, RangeBounds};
use std::sync::Arc;

use stable_deref_trait::StableDeref;

pub use self::copier::Copier;
use crate::buffer::{InFlight, Lend, PinnedBuf, Registered, StreamBuf};
use crate::device::Transfer;
use crate::device::context::Context;
use crate::device::memory::{DeviceSlice, StridedSlice, bounds};
use crate::error::{Error, Result, SubmitError};
use crate::locks::Mutex;
use crate::sealed::{KEY, Key};
use crate::stream::Stream;
use crate::stream::hold::{Resource, Retain};
use crate::stream::timeline::{Submission, Ticket};

/// What to do where a capture is in the way.
const OUTSIDE: &str = "submit it outside the capture";

/// The sequence number of a submission whose driver call has not returned.
const NOT_YET: u64 = u64::MAX;

/// Device memory as an argument of a copy: a [`DeviceSlice`], a reference to one, or the result of
/// slicing one, whose error the call then reports. Sealed.
pub trait DeviceRange {
    #[doc(hidden)]
    fn get(&self, _: Key) -> Result<&DeviceSlice>;
}

impl DeviceRange for DeviceSlice {
    fn get(&self, _: Key) -> Result<&DeviceSlice> {
        Ok(self)
    }
}

impl<R: DeviceRange> DeviceRange for &R {
    fn get(&self, key: Key) -> Result<&DeviceSlice> {
        R::get(self, key)
    }
}

impl DeviceRange for Result<DeviceSlice> {
    fn get(&self, _: Key) -> Result<&DeviceSlice> {
        self.as_ref().map_err(Error::clone)
    }
}

/// Device memory of this device.
fn own(range: &impl DeviceRange, of: &Arc<Context>) -> Result<DeviceSlice> {
    let slice = range.get(KEY)?;
    slice.check_is_of(of)?;
    Ok(slice.clone())
}

/// Where the bytes of a pinned block belong on the device, one place behind the other: a
/// [`DeviceSlice`], a [`StridedSlice`], or a `Vec` of either. Sealed.
///
/// ```
/// # use pinpool::{Copier, Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (copier, cache) = (Copier::builder(&pool, &device).build()?, device.alloc(64 << 20)?);
/// let even = cache.strided(..4096, 1 << 20, 64)?; // a page in each plane of 1 MiB
/// copier.upload_pages(vec![(pool.checkout_zeroed(64 * 4096)?, even)])?.wait()?;
/// # Ok::<(), pinpool::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` names no places on the device",
    note = "a block belongs to a `DeviceSlice`, a `StridedSlice` or a `Vec` of either: put `?` behind `slice(..)` and `strided(..)`"
)]
pub trait Places: Send {
    /// Shows ranges of one length at even distances: from the first byte of the first to the last
    /// of the last, the length, and the distance.
    #[doc(hidden)]
    fn each(&self, _: Key, see: &mut impl FnMut(&DeviceSlice, usize, usize));
}

impl Places for DeviceSlice {
    fn each(&self, _: Key, see: &mut impl FnMut(&DeviceSlice, usize, usize)) {
        see(self, self.len(), self.len());
    }
}

impl Places for StridedSlice {
    fn each(&self, _: Key, see: &mut impl FnMut(&DeviceSlice, usize, usize)) {
        see(&self.whole, self.len, self.stride);
    }
}

impl<P: Places> Places for Vec<P> {
    fn each(&self, key: Key, see: &mut impl FnMut(&DeviceSlice, usize, usize)) {
        self.iter().for_each(|places| places.each(key, see));
    }
}

/// The target of a download: a [`PinnedBuf`], a [`StreamBuf`] of the same stream, or a
/// [`Registered`] value that can be written to. Sealed.
#[diagnostic::on_unimplemented(
    message = "a download cannot land in `{Self}`",
    label = "not a buffer that the device alone may write to",
    note = "downloads land in a `PinnedBuf`, a `StreamBuf` or a `Registered` value; `download_blocking` writes to borrowed memory"
)]
pub trait Landing: Sized + Send {
    /// What comes back at the end: the same type, or a host-ready buffer for a stream-ready one.
    type Landed: Lend;

    /// Start and capacity, if this stream may write there.
    #[doc(hidden)]
    fn target(&mut self, stream: &Stream, _: Key) -> Result<(*mut u8, usize)>;
    /// What is lent to the device, and comes back.
    #[doc(hidden)]
    fn land(self, _: Key) -> Self::Landed;
}

impl Landing for PinnedBuf {
    type Landed = Self;

    #[inline]
    fn target(&mut self, stream: &Stream, _: Key) -> Result<(*mut u8, usize)> {
        stream.may_use(self)?;
        Ok((self.as_mut_ptr(), self.capacity()))
    }

    fn land(self, _: Key) -> Self {
        self
    }
}

impl Landing for StreamBuf {
    type Landed = PinnedBuf;

    fn target(&mut self, stream: &Stream, _: Key) -> Result<(*mut u8, usize)> {
        if !Arc::ptr_eq(self.timeline(), stream.timeline()) {
            let (of, with) = ("another stream".into(), "this one".into());
            let remedy = "use it on the stream it was checked out on, or wait for it to use it elsewhere";
            return Err(Error::Mismatch { what: "a stream-ready buffer", of, with, remedy });
        }
        Ok((self.segment().base().as_ptr(), self.segment().len()))
    }

    fn land(self, _: Key) -> PinnedBuf {
        // SAFETY: the segment is on its way to the timeline; as the handle's half it is touched
        // only when it has landed, and nothing of it counts as written until then.
        unsafe { PinnedBuf::new(self.into_segment(), 0) }
    }
}

impl<T> Landing for Registered<T>
where
    T: DerefMut<Target = [u8]> + StableDeref + Send + Sync + 'static,
{
    type Landed = Self;

    fn target(&mut self, stream: &Stream, _: Key) -> Result<(*mut u8, usize)> {
        stream.may_use(self)?;
        if self.is_read_only() {
            return Err(Error::Unsupported(
                "the value was registered for reading only; register it with Device::register".into(),
            ));
        }
        let bytes: &mut [u8] = self;
        Ok((bytes.as_mut_ptr(), bytes.len()))
    }

    fn land(self, _: Key) -> Self {
        self
    }
}

/// The bytes written to a buffer. (Asked once: a value of the caller's may change its answer.)
fn written<B: Lend>(src: &B) -> Result<&[u8]> {
    let none = "no byte of the buffer was written yet, so there is nothing to copy; write to it first \
                (extend_from_slice, Write, BufMut), or say what was written by other means (set_len)";
    let bytes = src.bytes(KEY);
    if bytes.is_empty() { Err(Error::Argument(none.into())) } else { Ok(bytes) }
}

impl Stream {
    /// Copies all that was written to `src` into `dst`, which must be at least as long.
    ///
    /// Returns when the copy was submitted: work submitted to this stream later comes after it.
    ///
    /// # Errors
    /// [As every copy](Error#copies).
    pub fn upload<B: Lend>(&self, src: B, dst: impl DeviceRange) -> Result<InFlight<B>, SubmitError<B>> {
        self.upload_part(src, .., dst)
    }

    /// Copies the bytes `part` of what was written to `src`, like [`upload`](Self::upload).
    ///
    /// # Errors
    /// As for [`upload`](Self::upload).
    pub fn upload_part<B: Lend>(
        &self,
        src: B,
        part: impl RangeBounds<usize>,
        dst: impl DeviceRange,
    ) -> Result<InFlight<B>, SubmitError<B>> {
        let checked = (|| {
            let dst = self.own(dst)?;
            self.may_use(&src)?;
            let all = written(&src)?;
            let (start, end) = bounds(part, all.len())?;
            let bytes = &all[start..end];
            Error::unless_fits(bytes.len(), dst.len())?;
            self.timeline().not_capturing("an upload", OUTSIDE)?;
            let transfer = Transfer::Upload { src: bytes.as_ptr(), dst: dst.ptr(), len: bytes.len() };
            Ok((dst, transfer))
        })();
        let ((dst, transfer), src) = SubmitError::unless(checked, src)?;
        let (submission, mut flight) = self.begin_from(src, Some(dst.allocation()))?;
        // SAFETY: the entry keeps source and target until a mark after this call is seen complete.
        let result = unsafe { self.driver_copy(transfer) };
        flight.submitted(submission.commit());
        // An error drops it: the segment is in flight until a later mark is seen complete.
        result.map(|()| flight).map_err(|error| SubmitError { error, buffer: None })
    }

    /// The timeline's entry of a source, or of a held buffer, and its handle. If the driver's call
    /// panics, unwinding drops the handle, then the submission: the segment stays in flight.
    #[inline]
    fn begin_from<B: Lend>(
        &self,
        src: B,
        memory: Option<Arc<dyn Retain>>,
    ) -> Result<(Submission<'_>, InFlight<B>), SubmitError<B>> {
        let begun = self.timeline().begin(src.lend(KEY), memory);
        let (submission, src) = SubmitError::unless(begun, src)?;
        Ok((submission, InFlight::new(self.ticket(NOT_YET), src, None)))
    }

    /// Registers a download of `len` bytes on the timeline, and returns the entry and its handle.
    #[inline]
    fn begin_into<L: Landing>(
        &self,
        landing: L,
        memory: Option<Arc<dyn Retain>>,
        written: usize,
    ) -> Result<(Submission<'_>, InFlight<L::Landed>)> {
        let landed = landing.land(KEY);
        match self.timeline().begin(landed.lend(KEY), memory) {
            Ok(submission) => Ok((submission, InFlight::new(self.ticket(NOT_YET), landed, Some(written)))),
            // Lost since we looked. Nothing was submitted: a fresh segment goes back, and a claimed
            // one is with the timeline, which has quarantined it.
            Err(error) => {
                if let Resource::Segment(segment) = landed.lend(KEY) {
                    std::mem::forget(landed);
                    self.timeline().unclaim(segment);
                }
                Err(error)
            }
        }
    }

    /// Copies `src` into `landing`, which must be at least as long. A buffer need not be empty: what
    /// it had is overwritten, and at the end its length is the slice's. (A [`Registered`] value
    /// keeps its length, and the bytes behind the copy.)
    ///
    /// # Errors
    /// As for [`upload`](Self::upload); [`Error::Mismatch`] for a [`StreamBuf`] of another stream.
    pub fn download<L: Landing>(
        &self,
        src: impl DeviceRange,
        mut landing: L,
    ) -> Result<InFlight<L::Landed>, SubmitError<L>> {
        let checked = self.own(src).and_then(|src| {
            let (target, capacity) = landing.target(self, KEY)?;
            Error::unless_fits(src.len(), capacity)?;
            self.timeline().usable()?;
            self.timeline().not_capturing("a download", OUTSIDE)?;
            Ok((src, target))
        });
        let ((src, target), landing) = SubmitError::unless(checked, landing)?;
        let transfer = Transfer::Download { src: src.ptr(), dst: target, len: src.len() };
        let unsent = |error| SubmitError { error, buffer: None };
        let (submission, mut flight) =
            self.begin_into(landing, Some(src.allocation()), src.len()).map_err(unsent)?;
        // SAFETY: the entry keeps source and target until a mark after this call is seen complete.
        let result = unsafe { self.driver_copy(transfer) };
        flight.submitted(submission.commit());
        result.map(|()| flight).map_err(unsent)
    }

    /// Copies within the device, `src` to the front of `dst`. What ends up in `dst` is undefined
    /// where the two overlap.
    ///
    /// # Errors
    /// As for [`upload`](Self::upload).
    pub fn copy(&self, src: impl DeviceRange, dst: impl DeviceRange) -> Result<InFlight<()>> {
        let (src, dst) = (self.own(src)?, self.own(dst)?);
        Error::unless_fits(src.len(), dst.len())?;
        self.timeline().not_capturing("a copy within the device", OUTSIDE)?;
        let transfer = Transfer::OnDevice { src: src.ptr(), dst: dst.ptr(), len: src.len() };
        let memory = Arc::new(vec![src.allocation(), dst.allocation()]);
        let submission = self.timeline().begin(Resource::Nothing, Some(memory))?;
        // SAFETY: no host memory; the entry keeps the device memory.
        let result = unsafe { self.driver_copy(transfer) };
        let ticket = self.ticket(submission.commit());
        result.map(|()| InFlight::new(ticket, (), None))
    }

    /// Copies all that was written to `src` into `landing`, which must be at least as long, in this
    /// stream's order. Each buffer comes back by its own handle, the target with the number of
    /// bytes copied as its length.
    ///
    /// **On an accelerator the call waits** for what was submitted to the stream before, and then
    /// the calling thread copies (CUDA driver API, "API synchronization behavior": "fully
    /// synchronous with respect to the host"). On a host device it returns when the copy is queued.
    ///
    /// # Errors
    /// With both buffers, as for [`upload`](Self::upload); [`Error::Mismatch`] for a [`StreamBuf`]
    /// of another stream.
    #[allow(clippy::type_complexity, reason = "two handles, or both buffers back")]
    pub fn copy_host<B: Lend, L: Landing>(
        &self,
        src: B,
        mut landing: L,
    ) -> Result<(InFlight<B>, InFlight<L::Landed>), SubmitError<(B, L)>> {
        let checked = (|| {
            self.may_use(&src)?;
            let bytes = written(&src)?;
            let (dst, capacity) = landing.target(self, KEY)?;
            let len = bytes.len();
            Error::unless_fits(len, capacity)?;
            self.timeline().usable()?;
            self.timeline().not_capturing("a copy between host buffers", OUTSIDE)?;
            Ok((Transfer::OnHost { src: bytes.as_ptr(), dst, len }, len))
        })();
        let ((transfer, len), (src, landing)) = SubmitError::unless(checked, (src, landing))?;
        let (source, mut sent) = match self.begin_from(src, None) {
            Ok(sent) => sent,
            Err(SubmitError { error, buffer }) => {
                return Err(SubmitError { error, buffer: buffer.map(|src| (src, landing)) });
            }
        };
        let unsent = |error| SubmitError { error, buffer: None };
        // After an error the source, entered before the stream was lost, is quarantined with it.
        let (submission, mut landed) = self.begin_into(landing, None, len).map_err(unsent)?;
        // SAFETY: the two entries keep source and target, which are two buffers, until a mark after
        // this call is seen complete.
        let result = unsafe { self.driver_copy(transfer) };
        // Under one tick or two: both are covered by a mark after the copy.
        sent.submitted(source.commit());
        landed.submitted(submission.commit());
        result.map(|()| (sent, landed)).map_err(unsent)
    }

    /// Keeps `buf` until everything submitted to this stream so far is done, for servers whose own
    /// kernels use it: submit these first, then hold. `stream.hold(())?.await` lets a task wait for
    /// the stream, as [`synchronize`](Self::synchronize) lets a thread.
    ///
    /// A refused hold gives the buffer back, while kernels submitted before may still use it.
    ///
    /// # Errors
    /// [As every copy](Error#copies). For captures there is [`hold_captured`](Self::hold_captured).
    pub fn hold<B: Lend>(&self, buf: B) -> Result<InFlight<B>, SubmitError<B>> {
        self.hold_by(buf, false)
    }

    /// [`hold`](Self::hold), with an event that many holds share: for programs that hold buffers
    /// more often than they copy, on a stream of their own, where an event for each would cost
    /// most.
    ///
    /// It waits for everything that was submitted before the call, as `hold` does, and for what is
    /// submitted until the event is recorded: by the next copy or hold that records one, by the
    /// sixteenth hold that shares it, when the handle is asked, awaited or waited for, or up to a
    /// millisecond later by a thread of the crate. No stream waits for the hold;
    /// [`wait_for_copy`](Self::wait_for_copy) and [`wait_for`](Self::wait_for) order other streams
    /// behind it, by an event that they record at once.
    ///
    /// # The end of the stream
    /// While the event is due, and a moment longer, a thread of the crate may name the stream to
    /// the driver. So the program destroys a stream of its own when
    /// [`record_holds`](Self::record_holds) has succeeded and the work is complete. The hold's end
    /// is not enough.
    ///
    /// # Errors
    /// As for [`hold`](Self::hold).
    pub fn hold_patiently<B: Lend>(&self, buf: B) -> Result<InFlight<B>, SubmitError<B>> {
        self.hold_by(buf, true)
    }

    /// Records the event of all [patient holds](Self::hold_patiently) so far, for a program that
    /// destroys its stream. After a success, and if nothing more is submitted to the stream, the
    /// crate names it to the driver no more; what was queued on it must still complete before it is
    /// destroyed. The call does not wait for the device. No other thread submits to the stream
    /// meanwhile.
    ///
    /// # Errors
    /// [`Error::Capturing`]; else [as every call](Error#every-call). After [`Error::Capturing`] or
    /// an error of the driver the crate may still name the stream: call again.
    pub fn record_holds(&self) -> Result<()> {
        crate::os::check_fork()?;
        self.timeline().close_for_good()
    }

    fn hold_by<B: Lend>(&self, buf: B, patient: bool) -> Result<InFlight<B>, SubmitError<B>> {
        let remedy = "keep the buffer for as long as the graph instead: hold_captured";
        let checked = self.may_use(&buf).and_then(|()| self.timeline().not_capturing("a hold", remedy));
        let ((), buf) = SubmitError::unless(checked, buf)?;
        let (mut submission, mut flight) = self.begin_from(buf, None)?;
        submission.patient = patient;
        flight.submitted(submission.commit());
        Ok(flight)
    }

    /// Keeps `buf` for as long as the graph that this stream is being captured into: for servers
    /// whose captured kernels and copies use the buffer.
    ///
    /// The buffer is kept until the graph, everything made from it (executable graphs, also those
    /// updated by `cuGraphExecUpdate`, clones, graphs that have it as a child) and all their
    /// launches are gone. Then it returns to its pool. Until then it counts as checked out, and if
    /// the driver ends first, it never returns. An `Arc` of a buffer stays readable by its other
    /// owners.
    ///
    /// Within one capture this call may come before or after the work that uses the buffer. After a
    /// refusal nothing is kept: do not launch the graph once the buffer is gone.
    ///
    /// # Errors
    /// With the buffer: [`Error::Argument`] on a stream that is in no capture (use
    /// [`hold`](Self::hold)); [`Error::Capturing`] if the capture is spoiled;
    /// [`Error::Unsupported`] before CUDA 11.3; [`Error::Mismatch`]; else [as every
    /// call](Error#every-call).
    // No event says when a graph is launched for the last time. So the buffer is tied to the graph:
    // the driver counts what a graph keeps, hands it on to what is made from it, and calls when all
    // of that is gone. The device's worker then drops the buffer: the callback must not.
    pub fn hold_captured<B: Lend + 'static>(&self, buf: B) -> Result<(), SubmitError<B>> {
        let timeline = self.timeline();
        let usable = self.may_use(&buf).and_then(|()| timeline.usable());
        let ((), buf) = SubmitError::unless(usable, buf)?;
        let context = timeline.context();
        // After a refusal the driver may still have the function, which then finds nothing here.
        let kept = Arc::new(Mutex::new(Some(buf)));
        let (theirs, home, worker) = (kept.clone(), context.clone(), context.worker().clone());
        // The driver's callback may neither call the driver nor wait: it only sends. Nor may it let
        // go of the last of a context, whose owner may destroy it; the last of a worker may be.
        let gone = Box::new(move || worker.send(move || drop((theirs, home))));
        let not_captured = "hold_captured needs a stream that is being captured into a graph, and this one is not; use \
                            hold where nothing is captured";
        let spoiled = Error::Capturing {
            what: "keeping a buffer with the graph",
            remedy: "the capture is spoiled: end it, and begin another",
        };
        let error = match context.noting(context.driver().keep_with_graph(timeline.stream(), gone)) {
            Ok(true) => return Ok(()),
            Ok(false) => match timeline.is_capturing() {
                Ok(false) => Error::Argument(not_captured.into()),
                Ok(true) => spoiled,
                Err(error) => error,
            },
            Err(error) => error,
        };
        let buffer = kept.lock().take();
        Err(SubmitError { error, buffer })
    }

    /// Copies borrowed memory, pinned or not, to the device in stream order, and returns when the
    /// device has let go of it, on an error too.
    ///
    /// # Errors
    /// [As every copy](Error#copies).
    pub fn upload_blocking(&self, src: &[u8], dst: impl DeviceRange) -> Result<()> {
        let dst = self.own(dst)?;
        bounds(.., src.len())?;
        Error::unless_fits(src.len(), dst.len())?;
        let transfer = Transfer::Upload { src: src.as_ptr(), dst: dst.ptr(), len: src.len() };
        // SAFETY: borrowed for the whole call, and the call returns when the device has let go.
        unsafe { self.driver_copy_blocking(transfer) }
    }

    /// Copies device memory into borrowed memory in stream order, and waits. `dst` must be at least
    /// as long as `src`. After an error its contents are undefined.
    ///
    /// # Errors
    /// As for [`upload_blocking`](Self::upload_blocking).
    pub fn download_blocking(&self, src: impl DeviceRange, dst: &mut [u8]) -> Result<()> {
        let src = self.own(src)?;
        Error::unless_fits(src.len(), dst.len())?;
        let transfer = Transfer::Download { src: src.ptr(), dst: dst.as_mut_ptr(), len: src.len() };
        // SAFETY: borrowed for the whole call, and the call returns when the device has let go.
        unsafe { self.driver_copy_blocking(transfer) }
    }

    /// Makes what is submitted to this stream from now on start only after `copy` is complete,
    /// which may be on any stream of the device. The caller does not wait, and the copy's handle
    /// tells its outcome.
    ///
    /// # Errors
    /// As for [`wait_for`](Self::wait_for), and that the copy failed or was lost, if that is known.
    pub fn wait_for_copy<B: Lend>(&self, copy: &InFlight<B>) -> Result<()> {
        copy.precede(self)
    }

    /// [`Error::Mismatch`], unless this stream's copies can use a buffer.
    #[inline]
    fn may_use(&self, buf: &impl Lend) -> Result<()> {
        buf.check_serves(self.timeline().context(), KEY)
    }

    fn ticket(&self, seq: u64) -> Ticket {
        Ticket { timeline: self.timeline().clone(), seq }
    }

    /// Device memory of this stream's device.
    fn own(&self, range: impl DeviceRange) -> Result<DeviceSlice> {
        own(&range, self.timeline().context())
    }

    /// # Safety
    /// As for [`crate::device::Driver::copy`].
    unsafe fn driver_copy(&self, transfer: Transfer) -> Result<()> {
        let context = self.timeline().context();
        // SAFETY: the caller's word.
        let result = context.noting(unsafe { context.driver().copy(self.timeline().stream(), transfer) });
        result.inspect(|()| context.count_copied([&transfer]))
    }

    /// # Safety
    /// As for [`crate::device::Driver::copy_blocking`].
    unsafe fn driver_copy_blocking(&self, transfer: Transfer) -> Result<()> {
        self.timeline().usable()?;
        self.timeline().not_capturing("a blocking copy", OUTSIDE)?;
        let context = self.timeline().context();
        // What is borrowed is with the device until this ends.
        let _deferral = crate::foreign::defer();
        // SAFETY: the caller's word.
        let result = unsafe { context.driver().copy_blocking(self.timeline().stream(), transfer) };
        context.noting(result).inspect(|()| context.count_copied([&transfer]))
    }
}
