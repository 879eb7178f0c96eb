//! cudarc beside the pool: one context, one stream, and copies between the pool's buffers and cudarc's slices.
//!
//! A server that already computes through [cudarc](https://docs.rs/cudarc) hands the pool its context and its streams and
//! goes on as before. Its kernels and the pool's copies then follow each other in stream order, and what the pool uploads
//! is in the server's own `CudaSlice`.
//!
//! ```no_run
//! # fn demo(
//! #     server_stream: std::sync::Arc<cudarc::driver::CudaStream>,
//! #     activations: &mut cudarc::driver::CudaSlice<f32>,
//! #     logits: &cudarc::driver::CudaSlice<f32>,
//! #     bytes: &[u8],
//! # ) -> pinpool::Result<()> {
//! use pinpool::Pool;
//! use pinpool::cudarc::CudarcStream;
//!
//! let stream = CudarcStream::new(&server_stream)?; // an Arc<CudaStream>
//! let pool = Pool::builder(stream.device()).build()?;
//!
//! let mut buf = pool.checkout(bytes.len())?;
//! buf.extend_from_slice(bytes);
//! drop(stream.upload_to(buf, activations)?); // a CudaSlice<f32>, for the server's next kernel on that stream
//!
//! let landing = pool.checkout_on(&stream, logits.num_bytes())?;
//! let back = stream.download_from(logits, landing)?.wait()?;
//! println!("{:?}", back.view::<f32>()?);
//! # Ok(()) }
//! ```
//!
//! # How cudarc's slices stay safe
//!
//! A `CudaSlice` belongs to a stream, on which it is freed, and cudarc keeps two events with it, so that work on other
//! streams waits for what was done to it. It does that only while its context *manages synchronisation*: with event tracking
//! on, and more than the default stream in use. A copy of ours is therefore made under cudarc's own guard, like a copy of
//! cudarc's: the guard makes the stream wait beforehand, and records the event afterwards. Where cudarc records nothing,
//! only the slice's own stream orders what is done to it, and a copy on another stream is refused. So the slice is borrowed
//! only while a copy is submitted: dropping it afterwards, or giving it to a kernel, is ordered after the copy.
//!
//! # Waiting
//!
//! cudarc's own pinned slice waits for its event before it lets the CPU read, also where the event was never recorded, and
//! such an event counts as complete: on the default stream, and with event tracking off, it shows bytes that have not landed
//! (seen with 0.19.10). The pool does not rely on cudarc's events: [`InFlight`] waits for a mark of its own.
//!
//! # Handing a buffer to cudarc
//!
//! cudarc's `memcpy_htod` takes any `&[T]` and returns at once, since the driver takes a copy of memory that is not pinned.
//! Of pinned memory it takes none: `memcpy_htod(&buf[..], ..)` reads the buffer later, when it may be in other hands.
//! **Never hand a slice of a pinned buffer to cudarc's own copies.** [`CudarcStream::upload_to`] and
//! [`CudarcStream::download_from`] take the buffer for as long as the copy needs it, and
//! [`CudarcStream::upload_to_blocking`] and [`CudarcStream::download_from_blocking`] borrow it and return when the device
//! has let go. ([`PinnedBuf`](crate::PinnedBuf) is no `HostSlice` of cudarc's on purpose: cudarc skips the wait that such a
//! slice asks for while its context has an error on record, and returns `Ok` with the copy under way, seen with 0.19.10.)
//!
//! # Captures
//!
//! While a stream is captured all copies here are refused before anything is done to it or to the slice's own stream. What
//! [the one who captures promises](crate::cuda#what-the-one-who-captures-promises) holds for cudarc's `begin_capture` and
//! `end_capture` too, although these are safe to call: they are not called at the very time when another thread submits to
//! the stream by this crate.
//!
//! # Features
//!
//! A program has one cudarc, built with all features that anybody in it asks for, and many of these exclude each other. This
//! crate asks for those that go with any others: `fallback-dynamic-loading`, and the version of CUDA that the build system
//! has, else the latest. The pool itself calls the driver through its own table (see the page of `device::cuda`), so that
//! it works, and fails, in the same way with this feature and without.

#![allow(unsafe_code)]

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use ::cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice,
    SyncOnDrop,
};

use crate::buffer::{InFlight, Lend};
use crate::copy::Landing;
use crate::device::StreamHandle;
use crate::error::{Error, Result, SubmitError};
use crate::runtime::Device;
use crate::stream::Stream;

/// The device that works in a context of cudarc's. If it is the GPU's primary context, as `CudaContext::new` makes it, this
/// is the same device as [`Device::open`] gives. The device keeps the context alive.
///
/// # Errors
/// As for [`cuda::adopt_context`](crate::cuda::adopt_context).
pub fn device(context: &Arc<CudaContext>) -> Result<Device> {
    // SAFETY: the context is alive, and the device keeps it so.
    unsafe { crate::cuda::adopt_context_with(context.cu_ctx().cast(), context.clone()) }
}

/// A stream of cudarc's as a stream of the pool's, kept alive until everything on it is done. Everything that can be done
/// with a [`Stream`] can be done with it.
#[derive(Clone)]
pub struct CudarcStream {
    ours: Stream,
    theirs: Arc<CudaStream>,
}

impl CudarcStream {
    /// Adopts a stream, in the device of its own context. The same stream adopted twice is the same stream.
    ///
    /// # Errors
    /// As for [`device`]; [`Error::Unsupported`] for the per-thread default stream; [`Error::Capturing`].
    pub fn new(stream: &Arc<CudaStream>) -> Result<Self> {
        let device = device(stream.context())?;
        // SAFETY: the stream is alive, and ours keeps it so. The promise about captures is on the module's page.
        let ours =
            unsafe { crate::cuda::adopt_stream_with(&device, stream.cu_stream().cast(), stream.clone()) }?;
        Ok(Self { ours, theirs: stream.clone() })
    }

    /// cudarc's own.
    #[must_use]
    pub fn cudarc(&self) -> &Arc<CudaStream> {
        &self.theirs
    }

    /// Copies all that was written to `src` to the front of a `CudaSlice` or `CudaViewMut`, which must be at least as long.
    /// What is done to the slice afterwards, by cudarc or by the pool, comes after the copy.
    ///
    /// # Errors
    /// As for [`Stream::upload`], [`Error::Capturing`] also where the slice's own stream is captured; with the buffer
    /// [`Error::Unordered`] for a slice of another stream where cudarc tracks no events, [`Error::WrongDevice`] for one of
    /// another context, and what cudarc's context has noted ([`CudaContext::check_err`]), which would break the order.
    pub fn upload_to<B: Lend, T: bytemuck::AnyBitPattern>(
        &self,
        src: B,
        dst: &mut impl SliceMut<T>,
    ) -> Result<InFlight<B>, SubmitError<B>> {
        match self.target(dst) {
            Ok((range, guard)) => {
                let sent = self.ours.upload(src, range);
                self.release(guard);
                sent
            }
            Err(error) => Err(SubmitError::refused(error, src)),
        }
    }

    /// Copies a `CudaSlice`, `CudaView` or `CudaViewMut` into `landing`, which must be at least as long. What is done to
    /// the slice afterwards, by cudarc or by the pool, comes after the copy.
    ///
    /// # Errors
    /// As for [`Stream::download`] and [`upload_to`](Self::upload_to).
    pub fn download_from<T, L: Landing>(
        &self,
        src: &impl Slice<T>,
        landing: L,
    ) -> Result<InFlight<L::Landed>, SubmitError<L>> {
        match self.source(src) {
            Ok((range, guard)) => {
                let sent = self.ours.download(range, landing);
                self.release(guard);
                sent
            }
            Err(error) => Err(SubmitError::refused(error, landing)),
        }
    }

    /// Copies borrowed memory, pinned or not, to the front of a `CudaSlice` or `CudaViewMut` in stream order, and returns when
    /// the device has let go of it, on an error too.
    ///
    /// # Errors
    /// As for [`Stream::upload_blocking`] and [`upload_to`](Self::upload_to).
    pub fn upload_to_blocking<T: bytemuck::AnyBitPattern>(
        &self,
        src: &[u8],
        dst: &mut impl SliceMut<T>,
    ) -> Result<()> {
        let (range, guard) = self.target(dst)?;
        let done = self.ours.upload_blocking(src, range);
        self.release(guard);
        done
    }

    /// Copies a `CudaSlice`, `CudaView` or `CudaViewMut` into borrowed memory in stream order, and returns when it has
    /// landed. After an error the contents of `dst` are undefined.
    ///
    /// # Errors
    /// As for [`Stream::download_blocking`] and [`upload_to`](Self::upload_to).
    pub fn download_from_blocking<T>(&self, src: &impl Slice<T>, dst: &mut [u8]) -> Result<()> {
        let (range, guard) = self.source(src)?;
        let done = self.ours.download_blocking(range, dst);
        self.release(guard);
        done
    }

    fn source<'a, T>(&'a self, src: &'a impl Slice<T>) -> Result<(crate::DeviceSlice, SyncOnDrop<'a>)> {
        let bytes = self.bytes::<T>(src)?;
        self.not_capturing(src.stream())?;
        self.nothing_noted(src.stream())?;
        let (address, guard) = src.device_ptr(&self.theirs);
        self.range(src.stream(), address, bytes, guard)
    }

    fn target<'a, T>(
        &'a self,
        dst: &'a mut impl SliceMut<T>,
    ) -> Result<(crate::DeviceSlice, SyncOnDrop<'a>)> {
        let bytes = self.bytes::<T>(dst)?;
        let owner = dst.stream().clone();
        self.not_capturing(&owner)?;
        self.nothing_noted(&owner)?;
        let (address, guard) = dst.device_ptr_mut(&self.theirs);
        self.range(&owner, address, bytes, guard)
    }

    /// The length of a slice of our context.
    fn bytes<T>(&self, slice: &impl DeviceSlice<T>) -> Result<usize> {
        if slice.stream().context().cu_ctx() != self.theirs.context().cu_ctx() {
            return Err(Error::WrongDevice { device: self.ours.device().name().into() });
        }
        match slice.len() * size_of::<T>() {
            0 => Err(Error::Empty),
            bytes => Ok(bytes),
        }
    }

    /// Before the guard: it makes our stream wait, which spoils a capture of that, and for events that the slice's own
    /// stream may have recorded into one, which draws ours into it.
    fn not_capturing(&self, owner: &Arc<CudaStream>) -> Result<()> {
        const OUTSIDE: &str = "submit it outside the capture";
        const WHAT: &str = "a copy of a slice of cudarc's";
        let timeline = self.ours.timeline();
        timeline.not_capturing(WHAT, OUTSIDE)?;
        let (handle, context) = (owner.cu_stream() as usize as u64, timeline.context());
        // The legacy default stream, which is never captured, is not to be asked about beside other captures.
        if handle == 0 || handle == self.theirs.cu_stream() as usize as u64 {
            return Ok(());
        }
        match context.noting(context.driver().capturing(StreamHandle(handle)))? {
            true => Err(Error::Capturing { what: WHAT, remedy: OUTSIDE }),
            false => Ok(()),
        }
    }

    /// The guard notes it where our stream could not be made to wait, and does not even try while anything is noted.
    fn nothing_noted(&self, owner: &Arc<CudaStream>) -> Result<()> {
        for context in [self.theirs.context(), owner.context()] {
            let Err(error) = context.check_err() else { continue };
            let context = self.ours.timeline().context();
            return match context.driver().cuda() {
                Some(cuda) => context.noting(Err(cuda.theirs("a call that cudarc noted", error.0 as u32))),
                None => Ok(()),
            };
        }
        Ok(())
    }

    /// The copy was submitted: has its event recorded, or else waits, so that the slice's next use comes after it either way.
    fn release(&self, mut guard: SyncOnDrop<'_>) {
        let SyncOnDrop::Record(target) = &mut guard else { return };
        let context = self.theirs.context();
        let managed = context.is_managing_stream_synchronization();
        let Some((event, stream)) = target.take().filter(|_| managed) else { return };
        if let Err(error) = event.record(stream) {
            // A waker must not wait for what its own thread finds out; the driver's wait needs nobody. Where that fails too the
            // stream is lost, mostly with its device, which copies nothing any more.
            if self.ours.synchronize().is_err() {
                let _ = self.theirs.synchronize();
            }
            context.record_err::<()>(Err(error));
        }
    }

    /// A slice as memory that a copy can use, if what comes later is known to come after the copy.
    fn range<'a>(
        &self,
        owner: &Arc<CudaStream>,
        address: u64,
        bytes: usize,
        guard: SyncOnDrop<'a>,
    ) -> Result<(crate::DeviceSlice, SyncOnDrop<'a>)> {
        self.nothing_noted(owner)?;
        let same = owner.cu_stream() == self.theirs.cu_stream();
        let recorded = matches!(guard, SyncOnDrop::Record(Some(_)) | SyncOnDrop::Sync(Some(_)))
            && self.theirs.context().is_managing_stream_synchronization()
            // There can be several for one context. This one says whether what is done to the slice waits for its events.
            && owner.context().is_managing_stream_synchronization();
        if !same && !recorded {
            return Err(Error::Unordered { device: self.ours.device().name().into() });
        }
        // SAFETY: the slice is borrowed, so that it is not freed before the copy was submitted; freeing it later happens
        // on its own stream, which is this one or waits for the event that the guard records.
        let range = unsafe { self.ours.device().raw_memory(address, bytes, ()) }?;
        Ok((range, guard))
    }
}

impl Deref for CudarcStream {
    type Target = Stream;
    fn deref(&self) -> &Stream {
        &self.ours
    }
}

impl fmt::Debug for CudarcStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CudarcStream").field(&self.ours).finish()
    }
}

/// What can be copied from: `CudaSlice`, `CudaView`, `CudaViewMut`. Sealed: cudarc's own trait can be implemented for
/// anything, by safe code that makes an address up.
pub trait Slice<T>: DevicePtr<T> + sealed::Sealed {}

/// What can be copied to: `CudaSlice`, `CudaViewMut`. Sealed.
pub trait SliceMut<T>: DevicePtrMut<T> + sealed::Sealed {}

mod sealed {
    use super::{CudaSlice, CudaView, CudaViewMut};
    pub trait Sealed {}
    impl<T> Sealed for CudaSlice<T> {}
    impl<T> Sealed for CudaView<'_, T> {}
    impl<T> Sealed for CudaViewMut<'_, T> {}
}

impl<T> Slice<T> for CudaSlice<T> {}
impl<T> Slice<T> for CudaView<'_, T> {}
impl<T> Slice<T> for CudaViewMut<'_, T> {}
impl<T> SliceMut<T> for CudaSlice<T> {}
impl<T> SliceMut<T> for CudaViewMut<'_, T> {}
