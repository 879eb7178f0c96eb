//! cudarc beside the pool: copies between its slices and the pool's buffers, on its streams.
//!
//! A server that already computes through [cudarc](https://docs.rs/cudarc) gives the pool its
//! context and its streams, and keeps them. Its kernels and the pool's copies are then ordered by
//! the stream, and an upload goes into the server's own `CudaSlice`.
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
//! // SAFETY: the server captures none of its streams.
//! let stream = unsafe { CudarcStream::new(&server_stream)? }; // an Arc<CudaStream>
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
//! A `CudaSlice` belongs to a stream, on which it is freed, and cudarc keeps two events with it, so
//! that work on other streams waits for earlier uses. It does that only while its context *manages
//! synchronisation*: with event tracking on, and more than the default stream in use. A copy here
//! is made under cudarc's own guard, which makes the stream wait beforehand, and records the event
//! afterwards. So the slice is borrowed only while a copy is submitted: its drop, or a kernel that
//! uses it, comes after the copy. Where cudarc records nothing, only the slice's own stream orders
//! its uses, and a copy on another stream is refused ([`Error::Mismatch`]); so is a slice of
//! another `CudaContext` object's default stream, which stops tracking with its last stream.
//!
//! The events of a new slice were never recorded, and look like complete ones. So a copy on another
//! stream also waits, on the device, for all work that was queued on the slice's own stream. To
//! overlap with other streams' work, let the copying stream allocate the slices.
//!
//! The per-thread default stream is another stream on each thread, and a slice does not say which
//! thread's stream it belongs to. So a copy of such a slice waits for the work of all threads'
//! streams so far, and their later work waits for the copy, by the legacy default stream, which is
//! in order with all of them (CUDA C++ Programming Guide, "Per-thread Default Stream").
//!
//! cudarc keeps one event for the reads of a slice, recorded by the last read. A download here
//! waits for the read before it, so that its own event covers both; cudarc's own reads do not. So
//! where cudarc reads a slice on a second stream while a download of it is in flight, wait for the
//! download before the slice is written or dropped.
//!
//! # Waiting
//!
//! [`InFlight`] waits for an event of the pool's. (cudarc's own pinned slice waits for an event of
//! cudarc's, and an event that was never recorded reads as complete: on the default stream, and
//! with event tracking off, it shows bytes that are not copied yet, seen with 0.19.10.)
//!
//! # Passing a buffer to cudarc
//!
//! cudarc's `memcpy_htod` takes any `&[T]` and returns at once: the driver takes a copy of memory
//! that is not pinned. Of pinned memory it takes none: `memcpy_htod(&buf[..], ..)` reads the buffer
//! later, when it may be checked out again. **Never pass a slice of a pinned buffer to cudarc's own
//! copies**, but the buffer to the copies here. ([`PinnedBuf`](crate::PinnedBuf) is no `HostSlice`:
//! cudarc skips the wait that such a slice asks for while its context has an error on record, seen
//! with 0.19.10.)
//!
//! # Captures
//!
//! While a stream is captured all copies here are refused before anything is done to it or to the
//! slice's own stream. But cudarc's `begin_capture` and `end_capture` are safe to call, on any
//! thread, even between that check and the copy. So [`CudarcStream::new`] is `unsafe`, and depends
//! on [the promise about captures](crate::cuda#the-promise-about-captures).
//! `device(&context)?.stream()` makes a stream that no other code can reach.

#![allow(unsafe_code)]

mod shared;

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use ::cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice,
    DriverError, SyncOnDrop,
};
use bytemuck::AnyBitPattern;

use crate::buffer::{InFlight, Lend};
use crate::copy::Landing;
use crate::cuda::{adopt_context, adopt_stream};
use crate::device::context::Context;
use crate::device::cuda::{Cuda, LEGACY, PER_THREAD};
use crate::device::handle::Device;
use crate::error::{Error, ErrorClass, Result, SubmitError};
use crate::sealed::Key;
use crate::stream::Stream;

pub use self::shared::SharedSlice;

/// The device that works in a context of cudarc's, which it keeps alive. For the GPU's primary
/// context, as of `CudaContext::new`, it is the device of [`Device::open`].
///
/// # Errors
/// As for [`cuda::adopt_context`](crate::cuda::adopt_context).
pub fn device(context: &Arc<CudaContext>) -> Result<Device> {
    // SAFETY: the context is alive, and the device keeps it so.
    unsafe { adopt_context(context.cu_ctx().cast(), context.clone()) }
}

/// The error of a call that cudarc made in this context, as one of this crate's.
fn said(context: &Context, call: &'static str, error: Option<DriverError>) -> Result<()> {
    let Some(error) = error else { return Ok(()) };
    let cuda = context.driver().as_any().downcast_ref::<Cuda>();
    let error = cuda.map_or(Error::Internal("a context of cudarc's is of no GPU"), |cuda| {
        cuda.theirs(call, error.0 as u32)
    });
    context.noting(Err(error))
}

/// A slice that a copy is about to use.
struct Taken<'a> {
    range: crate::DeviceSlice,
    guard: SyncOnDrop<'a>,
    owner: Owner,
}

/// What keeps the order of a copy with other uses of a slice.
enum Owner {
    /// The slice's own stream is the copy's.
    Same,
    /// The slice's own stream is another one: cudarc's events.
    Other,
    /// The slice's own stream is some thread's: the legacy default stream, which is in order with
    /// the streams of all threads.
    SomeThread(Stream),
}

/// A stream of cudarc's, kept alive until everything on it is complete. It derefs to a [`Stream`].
#[derive(Clone)]
pub struct CudarcStream {
    /// The crate's handle to the stream.
    ours: Stream,
    /// cudarc's handle to the same stream.
    theirs: Arc<CudaStream>,
}

impl CudarcStream {
    /// Adopts a stream, in the device of its own context. The same stream adopted twice is the same
    /// stream. The per-thread default stream is the calling thread's own, and is used on this
    /// thread: see [`cuda::adopt_stream`](crate::cuda::adopt_stream).
    ///
    /// ```no_run
    /// # fn demo(server_stream: std::sync::Arc<cudarc::driver::CudaStream>) -> pinpool::Result<()> {
    /// use pinpool::cudarc::CudarcStream;
    ///
    /// // SAFETY: the server captures none of its streams.
    /// let stream = unsafe { CudarcStream::new(&server_stream)? };
    /// let zeros = stream.cudarc().alloc_zeros::<f32>(100).expect("cudarc's memory");
    /// let mut numbers = [1_u8; 400];
    /// stream.download_from_blocking(&zeros, &mut numbers)?;
    /// assert_eq!(numbers, [0; 400]);
    /// # Ok(()) }
    /// ```
    ///
    /// The call is `unsafe`, since cudarc lets safe code capture the stream at any time:
    ///
    /// ```compile_fail,E0133
    /// # fn demo(server_stream: std::sync::Arc<cudarc::driver::CudaStream>) -> pinpool::Result<()> {
    /// use pinpool::cudarc::CudarcStream;
    ///
    /// let stream = CudarcStream::new(&server_stream)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As for [`device`]; [`Error::Capturing`].
    ///
    /// # Safety
    /// - [The promise about captures](crate::cuda#the-promise-about-captures) holds for this
    ///   stream, and for the own streams of the slices that are copied on it. (cudarc's
    ///   `begin_capture` and `end_capture` take a stream in and out of a capture; so do its `join`
    ///   and `wait` for a stream or an event of a capture, and work that is given slices of a
    ///   captured stream.)
    /// - cudarc does not count streams of [`CudaContext::wrap_borrowed_stream`], and stops tracking
    ///   slices when a context has no other. Where a slice of such a stream is copied on another
    ///   stream, or another stream's slice on such a stream, the slice's `CudaContext` keeps a
    ///   stream of [`CudaContext::new_stream`] until the copy is complete.
    pub unsafe fn new(stream: &Arc<CudaStream>) -> Result<Self> {
        let device = device(stream.context())?;
        let keep_alive = stream.clone();
        // SAFETY: the stream is alive, and `ours` keeps it so. The caller promises the rest.
        let ours = unsafe { adopt_stream(&device, stream.cu_stream().cast(), keep_alive) }?;
        Ok(Self { ours, theirs: stream.clone() })
    }

    /// cudarc's own handle to the stream.
    #[must_use]
    pub fn cudarc(&self) -> &Arc<CudaStream> {
        &self.theirs
    }

    /// Copies the written bytes of `src` to the front of a `CudaSlice` or `CudaViewMut`, which must
    /// be at least as long. Later uses of the slice, by cudarc or by the pool, come after the copy.
    ///
    /// # Errors
    /// As for [`Stream::upload`]; [`Error::Capturing`] also where the slice's own stream is
    /// captured; [`Error::Mismatch`] for a slice of another context, or of another stream where
    /// nothing would keep the order; and an error that cudarc's context has on record
    /// ([`CudaContext::check_err`]), which would break the order.
    pub fn upload_to<B: Lend, T: AnyBitPattern>(
        &self,
        src: B,
        dst: &mut impl SliceMut<T>,
    ) -> Result<InFlight<B>, SubmitError<B>> {
        match self.target(dst) {
            Ok(taken) => self.copy(taken, |range| self.ours.upload(src, range)),
            Err(error) => Err(SubmitError::refused(error, src)),
        }
    }

    /// Copies a `CudaSlice`, `CudaView` or `CudaViewMut` into `landing`, which must be at least as
    /// long. Later uses of the slice, by cudarc or by the pool, come after the copy.
    ///
    /// # Errors
    /// As for [`Stream::download`] and [`upload_to`](Self::upload_to).
    pub fn download_from<T, L: Landing>(
        &self,
        src: &impl Slice<T>,
        landing: L,
    ) -> Result<InFlight<L::Landed>, SubmitError<L>> {
        match self.source(src) {
            Ok(taken) => self.copy(taken, |range| self.ours.download(range, landing)),
            Err(error) => Err(SubmitError::refused(error, landing)),
        }
    }

    /// Copies borrowed memory, pinned or not, to the front of a `CudaSlice` or `CudaViewMut` in
    /// stream order, and returns when the device has let go of it, on an error too.
    ///
    /// # Errors
    /// As for [`Stream::upload_blocking`] and [`upload_to`](Self::upload_to).
    pub fn upload_to_blocking<T: AnyBitPattern>(&self, src: &[u8], dst: &mut impl SliceMut<T>) -> Result<()> {
        self.copy(self.target(dst)?, |range| self.ours.upload_blocking(src, range))
    }

    /// Copies a `CudaSlice`, `CudaView` or `CudaViewMut` into borrowed memory in stream order, and
    /// returns when the copy is complete. After an error the contents of `dst` are undefined.
    ///
    /// # Errors
    /// As for [`Stream::download_blocking`] and [`upload_to`](Self::upload_to).
    pub fn download_from_blocking<T>(&self, src: &impl Slice<T>, dst: &mut [u8]) -> Result<()> {
        self.copy(self.source(src)?, |range| self.ours.download_blocking(range, dst))
    }

    /// A copy of a slice, and then the event or the wait after which the slice may be used again.
    fn copy<R>(&self, taken: Taken<'_>, copy: impl FnOnce(crate::DeviceSlice) -> R) -> R {
        let done = copy(taken.range);
        self.release(taken.guard, &taken.owner);
        done
    }

    fn source<'a, T>(&'a self, src: &'a impl Slice<T>) -> Result<Taken<'a>> {
        let bytes = self.bytes::<T>(src)?;
        let owner = self.enter(src.stream())?;
        let (address, guard) = src.device_ptr(&self.theirs);
        let refused = match &guard {
            // On the slice's own stream too: the guard's record replaces another stream's.
            SyncOnDrop::Record(Some((read, _))) => self.theirs.wait(read).err(),
            _ => None,
        };
        let waited = match said(self.ours.device().context(), "cuStreamWaitEvent", refused) {
            // Recorded in a capture that has ended, the event stands for no read.
            Err(error) if !matches!(owner, Owner::Other) && error.class() == ErrorClass::Capture => Ok(()),
            waited => waited,
        };
        self.take(src.stream(), owner, address, bytes, guard, waited)
    }

    fn target<'a, T>(&'a self, dst: &'a mut impl SliceMut<T>) -> Result<Taken<'a>> {
        let bytes = self.bytes::<T>(dst)?;
        let stream = dst.stream().clone();
        let owner = self.enter(&stream)?;
        let (address, guard) = dst.device_ptr_mut(&self.theirs);
        self.take(&stream, owner, address, bytes, guard, Ok(()))
    }

    /// The length, in bytes, of a slice of this stream's context.
    fn bytes<T>(&self, slice: &impl DeviceSlice<T>) -> Result<usize> {
        let context = slice.stream().context();
        if context.cu_ctx() != self.theirs.context().cu_ctx() {
            let of = format!("cuda:{}", context.ordinal());
            return Err(Error::wrong_memory(&of, self.ours.device().name()));
        }
        match slice.len() * size_of::<T>() {
            0 => Err(Error::empty()),
            bytes => Ok(bytes),
        }
    }

    /// Checks for captures, and makes this stream wait for the slice's own, if that is another one.
    ///
    /// It runs before cudarc's guard, whose wait would spoil a capture of this stream; and a wait
    /// for an event of a capture that the slice's own stream is in would draw this one into it.
    fn enter(&self, owner: &Arc<CudaStream>) -> Result<Owner> {
        const WHAT: &str = "a copy of a slice of cudarc's";
        const OUTSIDE_CAPTURE: &str = "submit it outside the capture";
        self.ours.timeline().not_capturing(WHAT, OUTSIDE_CAPTURE)?;
        let capturing = |error: Error| match error.class() {
            ErrorClass::Capture => Error::Capturing { what: WHAT, remedy: OUTSIDE_CAPTURE },
            _ => error,
        };
        let handle = owner.cu_stream() as usize;
        let order = if handle == PER_THREAD {
            // SAFETY: it lives as long as its context, and is never captured.
            let legacy = unsafe { adopt_stream(self.ours.device(), LEGACY as *mut _, ()) };
            let legacy = legacy.and_then(|legacy| self.ours.wait_for(&legacy).map(|()| legacy));
            Owner::SomeThread(legacy.map_err(capturing)?)
        } else if handle == self.theirs.cu_stream() as usize {
            Owner::Same
        } else {
            self.orders(owner)?;
            // SAFETY: the stream is alive, since the slice has it, and the adopted stream keeps it
            // so. The promise about captures is `new`'s.
            let owner = unsafe { adopt_stream(self.ours.device(), owner.cu_stream().cast(), owner.clone()) };
            owner.and_then(|owner| self.ours.wait_for(&owner)).map_err(capturing)?;
            Owner::Other
        };
        self.nothing_noted(owner)?;
        Ok(order)
    }

    /// An error, unless cudarc makes the slice's later uses and end wait for another stream's copy.
    fn orders(&self, owner: &CudaStream) -> Result<()> {
        let (handle, ours) = (owner.cu_stream() as usize, self.theirs.context());
        // cudarc asks the slice's own context each time. That tracks while it has a stream: the
        // slice's, unless that is a default stream, or this one, if both are of one `CudaContext`.
        let lasts = handle > PER_THREAD || Arc::ptr_eq(owner.context(), ours);
        let tracked = [owner.context(), ours].iter().all(|c| c.is_managing_stream_synchronization());
        if tracked && lasts { Ok(()) } else { Err(self.unordered()) }
    }

    /// The error for a slice of another stream, between which and this one cudarc keeps no order.
    fn unordered(&self) -> Error {
        let (of, with) = ("another stream".into(), self.ours.device().name().into());
        let remedy = "cudarc keeps no order between the two (event tracking is off, or was when the slice was made, or \
                      a default stream is among them), so the slice could be used or freed before the copy ends; copy \
                      on the slice's own stream";
        Error::Mismatch { what: "a cudarc slice", of, with, remedy }
    }

    /// An error if cudarc's contexts have one on record. The guard records one there where this
    /// stream could not be made to wait, and does not even try while there is one.
    fn nothing_noted(&self, owner: &CudaStream) -> Result<()> {
        for context in [self.theirs.context(), owner.context()] {
            said(self.ours.device().context(), "a call that cudarc noted", context.check_err().err())?;
        }
        Ok(())
    }

    /// Records the slice's event behind the copy, or waits: the slice's next use comes after it.
    fn release(&self, mut guard: SyncOnDrop<'_>, owner: &Owner) {
        if matches!(owner, Owner::SomeThread(legacy) if legacy.wait_for(&self.ours).is_err()) {
            self.wait_somehow();
        }
        let SyncOnDrop::Record(target) = &mut guard else { return };
        let context = self.theirs.context();
        // `orders` has promised the event to another stream's slice, tracked or not.
        let wanted = matches!(owner, Owner::Other) || context.is_managing_stream_synchronization();
        let Some((event, stream)) = target.take().filter(|_| wanted) else { return };
        if let Err(error) = event.record(stream) {
            self.wait_somehow();
            context.record_err::<()>(Err(error));
        }
    }

    /// Waits until the copy is complete.
    fn wait_somehow(&self) {
        // `synchronize` fails in a waker, which must not wait for its own thread; the driver's own
        // wait needs no thread of this process. Where that fails too the stream is lost.
        if self.ours.synchronize().is_err() {
            let _ = self.theirs.synchronize();
        }
    }

    /// A slice as memory for a copy, if this stream waits for earlier uses, and later uses wait for
    /// the copy.
    fn take<'a>(
        &self,
        stream: &CudaStream,
        owner: Owner,
        address: u64,
        bytes: usize,
        guard: SyncOnDrop<'a>,
        waited: Result<()>,
    ) -> Result<Taken<'a>> {
        let usable = waited.and_then(|()| {
            self.nothing_noted(stream)?;
            // A slice that was made while its context tracked nothing has no event.
            if matches!(owner, Owner::Other)
                && !matches!(guard, SyncOnDrop::Record(Some(_)) | SyncOnDrop::Sync(Some(_)))
            {
                return Err(self.unordered());
            }
            // SAFETY: the slice is borrowed, so it is not freed before the copy is submitted. Later
            // it is freed on its own stream, which is this one or waits for the guard's event.
            unsafe { self.ours.device().raw_memory(address, bytes, ()) }.map_err(Error::from)
        });
        match usable {
            Ok(range) => Ok(Taken { range, guard, owner }),
            Err(error) => {
                // There is no copy. If the guard recorded the event, it would no longer stand for
                // the use before, and this stream may not wait for that.
                std::mem::forget(guard);
                Err(error)
            }
        }
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

/// A source of copies on a [`CudarcStream`]: `CudaSlice`, `CudaView`, `CudaViewMut`. The trait is
/// sealed, since safe code can implement cudarc's own trait for any type, with an invented address.
pub trait Slice<T>: DevicePtr<T> {
    #[doc(hidden)]
    fn seal(_: Key);
}

/// A target of copies on a [`CudarcStream`]: `CudaSlice`, `CudaViewMut`. Sealed, like [`Slice`].
pub trait SliceMut<T>: DevicePtrMut<T> {
    #[doc(hidden)]
    fn seal(_: Key);
}

impl<T> Slice<T> for CudaSlice<T> {
    fn seal(_: Key) {}
}
impl<T> Slice<T> for CudaView<'_, T> {
    fn seal(_: Key) {}
}
impl<T> Slice<T> for CudaViewMut<'_, T> {
    fn seal(_: Key) {}
}
impl<T> SliceMut<T> for CudaSlice<T> {
    fn seal(_: Key) {}
}
impl<T> SliceMut<T> for CudaViewMut<'_, T> {
    fn seal(_: Key) {}
}
