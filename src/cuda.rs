//! What only CUDA has: a server's own contexts and streams, raw handles, the device-side heap.
//!
//! A server that has CUDA streams wants copies on *those*, in order with its kernels, and buffers
//! that are kept until its kernels have read them. Here a raw `CUcontext` becomes a [`Device`], a
//! raw `CUstream` a [`Stream`], and the other way round. The runtime API's handles are the same
//! (`cudaStream_t` is `CUstream`), in the primary context, which [`Device::open`] opens.
//!
//! ```no_run
//! # fn enqueue_kernel(_: *mut std::ffi::c_void) -> *mut std::ffi::c_void { std::ptr::null_mut() }
//! # let server_stream = std::ptr::null_mut();
//! use pinpool::{Device, Pool, cuda};
//!
//! let device = Device::open("cuda:0")?;
//! let pool = Pool::builder(&device).build()?;
//! let weights = device.alloc(5)?;
//! // SAFETY: the server keeps its stream until everything that was submitted to it is complete.
//! let stream = unsafe { cuda::adopt_stream(&device, server_stream, ())? };
//!
//! let mut buf = pool.checkout(5)?;
//! buf.extend_from_slice(b"hello");
//! drop(stream.upload(buf, &weights)?); // in order with the server's kernels on this stream
//! # Ok::<(), pinpool::Error>(())
//! ```
//!
//! # Which library
//!
//! `libcuda.so.1` as the system's loader finds it, or the one that the environment variable
//! `PINPOOL_LIBCUDA` names. Its code runs in this process. So a program that does not trust its
//! environment (one with more rights than its user) unsets that variable before it opens a device.
//!
//! # What is different on a stream that the program can reach
//!
//! An adopted stream, and one of the crate after [`raw_stream`], may carry work that the crate does
//! not know of.
//!
//! - Every submit records its event at once, so that the event covers exactly what was queued by
//!   then: a [`hold`](Stream::hold) keeps a buffer until the server's own earlier kernels are
//!   complete. (Only [`hold_patiently`](Stream::hold_patiently) leaves the event to a later call.)
//! - The stream may be captured into a graph. Each submit asks the driver first
//!   (`cuStreamIsCapturing`) and is refused with [`Error::Capturing`], before anything could spoil
//!   the capture. [`Stream::hold_captured`] keeps a buffer that captured work uses for as long as
//!   the graph.
//! - The crate knows a stream by the driver's number for it (`cuStreamGetId`, CUDA 12.0), not by
//!   its handle, which the driver gives to later streams. So a stream that is adopted twice is one
//!   [`Stream`]. Without numbers, and during a capture, each adoption is a stream of its own, for
//!   which [`checkout_on`](crate::Pool::checkout_on) gives no buffer that is still in flight.
//!
//! # The promise about captures
//!
//! A stream that the program can reach neither enters nor leaves a capture while a thread is in a
//! call of this crate that is given the stream. A stream enters a capture by
//! `cuStreamBeginCapture`, or by a wait for an event that was recorded in one, and leaves it at the
//! capture's end. A lock around both keeps the promise, or capturing on the thread that copies.
//! (Events that this crate records between its calls are its own concern.)
//!
//! The functions below that are `unsafe`, and every use of a raw handle, depend on this promise.
//! Each call checks that the stream is not captured, but the driver offers no way to keep a capture
//! out between that check and the copy. A copy that gets into a capture so uses its buffer with
//! each launch of the graph, even after the buffer was checked out again.
//!
//! # The primary context
//!
//! `Device::open("cuda:N")` works in the GPU's *primary* context, which the runtime API
//! (`cudaMalloc`, `cudaMemcpy`), PyTorch, cudarc and candle use too. So memory can be used
//! together:
//!
//! - Their device memory goes into this crate's copies, by [`Device::raw_memory`], and this crate's
//!   into theirs, by [`DeviceSlice::address`](crate::DeviceSlice::address).
//! - Memory that the pool pins is pinned for them too (it is registered for all contexts), so
//!   `cudaMemcpyAsync` from a buffer of the pool runs at full speed. Such a copy must be complete
//!   before the buffer is dropped, or the buffer is [held](crate::Stream::hold).
//! - No call changes the caller's current context or capture mode.
//! - A sticky error that one of them causes (an illegal address in a kernel) hits all of them: the
//!   context is lost, and with it the device as this crate sees it ([`Device::lost`]).
//!
//! A context made with `cuCtxCreate` is separate, and a device of its own here ([`adopt_context`]):
//! its memory is refused by the [`Device::raw_memory`] of the primary context's device.
//!
//! # The order of work
//!
//! Two streams of one context have no order. Streams that this crate makes are *non-blocking*
//! (`CU_STREAM_NON_BLOCKING`): they have no implicit order with the legacy default stream, on which
//! `cudaMemcpy` and kernels launched on "stream 0" run. Where both use the same memory, order them:
//!
//! - the crate's work first: wait for the [copy](crate::InFlight::wait) before the other work
//!   starts;
//! - the crate's work last: synchronise with the other stream first;
//! - or adopt the other stream, and use [`Stream::wait_for`] in either direction.
//!
//! # The device-side heap
//!
//! Kernels' `malloc` and `new` take memory from a heap of fixed size in the context. Nothing
//! outside of a kernel can use that memory: no copy call accepts it, and [`Device::raw_memory`]
//! refuses it ([`Error::Argument`]). [`device_heap_limit`] returns the heap's size, and
//! [`set_device_heap_limit`] sets it, before the first module that uses it is loaded.

#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::c_void;

use crate::device::Driver;
use crate::device::cuda::Cuda;
#[doc(hidden)]
pub use crate::device::cuda::install;
use crate::device::handle::{Device, kept};
use crate::error::{Error, Result};
use crate::stream::Stream;

/// A device in a context that the server made (`cuCtxCreate`), not the GPU's primary one.
///
/// The context is not destroyed, and the caller's current context stays. The primary context of a
/// GPU is recognised, and gives the same device as [`Device::open`]. The same context adopted again
/// gives the same device while that is open. Two contexts of one GPU are two devices: device
/// memory, streams and events cannot be exchanged between them, while pinned memory is usable in
/// both (name both to [`Pool::builder`](crate::Pool::builder)).
///
/// `keep_alive` is dropped after the crate's last call in the context, on any thread. Its drop may
/// destroy the context, or tell the server that it may. If the device is open already and has a
/// `keep_alive`, this one is dropped at once; so it is for a primary context. `()` keeps nothing.
///
/// # Errors
/// [As an opening](Error#opening-a-device), and [`Error::Argument`] for null. `keep_alive` is
/// dropped.
///
/// # Safety
/// `context` is a CUDA context, and stays one until `keep_alive` is dropped. Where that keeps
/// nothing: until the device and everything that came from it (streams, device memory, pools,
/// buffers in flight) has been dropped, and the crate's threads have made their last calls.
///
/// ```no_run
/// # struct ServerContext;
/// # impl ServerContext { fn raw(&self) -> *mut std::ffi::c_void { std::ptr::null_mut() } }
/// # let server_context = std::sync::Arc::new(ServerContext);
/// use pinpool::cuda;
///
/// // SAFETY: the context is destroyed by the drop of the last of its `Arc`s, and the device has one.
/// let device = unsafe { cuda::adopt_context(server_context.raw(), server_context.clone())? };
/// let stream = device.stream()?; // a stream in that context
/// # drop(stream);
/// # Ok::<(), pinpool::Error>(())
/// ```
pub unsafe fn adopt_context(context: *mut c_void, keep_alive: impl Any + Send + Sync) -> Result<Device> {
    let keep_alive = kept(keep_alive);
    // SAFETY: the caller promises that it is a context, and for how long.
    let context = unsafe { crate::device::cuda::adopt(context) }?;
    Device::adopted(context, keep_alive)
}

/// A stream that the server made, for copies and holds in order with the server's own work on it.
/// The [module's page](self) says what is different on it. The stream is not destroyed.
///
/// 0 and `CU_STREAM_LEGACY` (1) are the legacy default stream of the device's context.
/// `CU_STREAM_PER_THREAD` (2) is the calling thread's own stream: other threads can wait for what
/// is in flight on it, and get [`Error::Mismatch`] where they would submit to it or order it.
///
/// `keep_alive` is an owner of the stream, such as an `Arc` around it, kept for as long as anything
/// needs the stream: handles to it, and what is in flight on it. It is dropped on the device's
/// region thread, where the context is current. If the stream was adopted before and still has a
/// `keep_alive`, this one is dropped at once. `()` keeps nothing.
///
/// # Errors
/// [As for devices of one family](Error#devices-of-one-family), and [`Error::Mismatch`] for a
/// stream of another context. `keep_alive` is dropped.
///
/// # Safety
/// The promise about captures on the [module's page](self) is kept. `stream` is a CUDA stream, and
/// stays one until `keep_alive` is dropped. Where that keeps nothing: until everything that was
/// submitted to it through this crate is known to be complete: the last handle in flight was waited
/// for, or [`Stream::synchronize`] has returned; behind a [patient hold](Stream::hold_patiently)
/// [`Stream::record_holds`] has succeeded as well. (Default streams live long enough: the legacy
/// one as long as its context, and a thread's own until its work is complete.)
pub unsafe fn adopt_stream(
    device: &Device,
    stream: *mut c_void,
    keep_alive: impl Any + Send + Sync,
) -> Result<Stream> {
    let (context, keep_alive) = (device.context(), kept(keep_alive));
    let cuda = cuda(device)?;
    context.alive()?;
    // SAFETY: the caller promises that it is a stream.
    let handle = context.noting(unsafe { cuda.recognise(stream) })?;
    // To ask for the number of a stream that is being captured spoils the capture (driver 580).
    let id = match context.noting(cuda.capturing(handle))? {
        true => None,
        false => context.noting(cuda.stream_id(handle))?,
    };
    Ok(Stream::adopted(device, handle, id, keep_alive, Cuda::confined(handle)))
}

/// The `CUcontext` that a device works in. It is valid for as long as the device is open.
///
/// # Errors
/// [As for devices of one family](Error#devices-of-one-family).
pub fn raw_context(device: &Device) -> Result<*mut c_void> {
    Ok(cuda(device)?.raw_context())
}

/// The `CUstream` behind a stream, for servers that launch kernels of their own on it. It is valid
/// for as long as a handle to the stream exists, and must not be destroyed. From here on the
/// program can reach the stream: see the [module's page](self).
///
/// # Errors
/// [As for devices of one family](Error#devices-of-one-family).
///
/// ```no_run
/// # fn launch_kernel_on(_: *mut std::ffi::c_void) {}
/// # use pinpool::{Device, Pool, cuda};
/// # let device = Device::open("cuda:0")?;
/// # let pool = Pool::builder(&device).build()?;
/// # let buffer = pool.checkout(100)?;
/// let stream = device.stream()?;
/// launch_kernel_on(cuda::raw_stream(&stream)?);
/// let held = stream.hold(buffer)?; // until that kernel is complete
/// # drop(held);
/// # Ok::<(), pinpool::Error>(())
/// ```
pub fn raw_stream(stream: &Stream) -> Result<*mut c_void> {
    let timeline = stream.timeline();
    let (context, handle) = (timeline.context(), timeline.stream());
    let cuda = cuda(stream.device())?;
    if !timeline.is_capturing()? {
        context.alive()?;
        // An adoption of the handle is to give this very stream.
        if let Some(id) = context.noting(cuda.stream_id(handle))? {
            stream.device().listing().identify(timeline, id);
        }
        timeline.share();
    }
    Ok(Cuda::raw_stream(handle))
}

/// The size, in bytes, of the heap from which kernels on this GPU take memory by `malloc` and `new`
/// (`CU_LIMIT_MALLOC_HEAP_SIZE` of the device's context; 8 MiB by default).
///
/// # Errors
/// [As for devices of one family](Error#devices-of-one-family).
pub fn device_heap_limit(device: &Device) -> Result<usize> {
    let cuda = cuda(device)?;
    device.context().alive()?;
    device.context().noting(cuda.heap_limit())
}

/// Sets the size, in bytes, of the heap of [`device_heap_limit`], for all code in the device's
/// context. The driver may round it up. The call can synchronise the device, so it is for the start
/// of a server.
///
/// # Errors
/// [`Error::Argument`] once a module whose kernels use the heap is loaded (`cuCtxSetLimit` says
/// `CUDA_ERROR_INVALID_VALUE`); else [as for devices of one family](Error#devices-of-one-family).
pub fn set_device_heap_limit(device: &Device, bytes: usize) -> Result<()> {
    cuda(device)?;
    let context = device.context();
    context.alive()?;
    let (maker, device) = (context.clone(), device.clone());
    context.worker().call(move || maker.noting(cuda(&device)?.set_heap_limit(bytes)))
}

/// The kernels that spread and collect bytes, for this repository's tests. No part of the API.
#[doc(hidden)]
pub mod spread {
    use std::ffi::c_void;

    use super::{Cuda, cuda};
    use crate::device::handle::Device;
    use crate::device::{DevicePtr, Driver, SpreadRow, SpreadRun, SpreadWay, StreamHandle};
    use crate::error::Result;

    /// A row of a table: where it is, its place among the packed bytes, its length.
    pub fn row(place: u64, offset: u32, len: u32) -> [u8; size_of::<SpreadRow>()] {
        let row = SpreadRow { place: DevicePtr(place), offset, len };
        // SAFETY: two structures of one size, and the first has no padding.
        unsafe { std::mem::transmute::<SpreadRow, [u8; 16]>(row) }
    }

    /// Loads the kernels.
    ///
    /// # Errors
    /// What the driver's `load_spread` says.
    pub fn load(device: &Device) -> Result<()> {
        cuda(device)?;
        let (context, device) = (device.context().clone(), device.clone());
        context.worker().call(move || device.context().noting(cuda(&device)?.load_spread()).map(drop))
    }

    /// Launches one for runs, each of them packed bytes, a table, and the number of its rows.
    ///
    /// # Errors
    /// What the driver's `spread` says.
    ///
    /// # Safety
    /// As for the driver's `spread`; and the stream is one of the device's.
    pub unsafe fn launch(
        device: &Device,
        stream: *mut c_void,
        collect: bool,
        runs: &[(u64, u64, u32)],
    ) -> Result<()> {
        let run = |&(packed, table, rows): &(u64, u64, u32)| SpreadRun {
            packed: DevicePtr(packed),
            table: DevicePtr(table),
            rows,
        };
        let way = if collect { SpreadWay::Collect } else { SpreadWay::Spread };
        let runs: Vec<SpreadRun> = runs.iter().map(run).collect();
        // SAFETY: the caller's promise.
        let launched = unsafe { cuda(device)?.spread(StreamHandle(stream as usize as u64), way, &runs) };
        device.context().noting(launched)
    }

    /// A stream of high priority, which the caller destroys.
    ///
    /// # Errors
    /// What the driver's `create_stream` says.
    pub fn urgent_stream(device: &Device) -> Result<*mut c_void> {
        cuda(device)?;
        let (context, device) = (device.context().clone(), device.clone());
        let made =
            context.worker().call(move || device.context().noting(cuda(&device)?.create_stream(true)))?;
        Ok(Cuda::raw_stream(made))
    }
}

fn cuda(device: &Device) -> Result<&Cuda, Error> {
    device.driver_of("no GPU of NVIDIA's, and has no CUDA contexts or streams")
}
