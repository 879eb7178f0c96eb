//! What only CUDA has: sharing a GPU with a server, its contexts and streams for us and ours for it, and the
//! device-side heap.
//!
//! A server that has CUDA streams of its own wants copies on *those*, in order with its kernels, and buffers that are
//! kept until its kernels have read them. Here a raw `CUcontext` becomes a [`Device`], a raw `CUstream` a [`Stream`],
//! and the other way round. The runtime API's handles are the same (`cudaStream_t` is `CUstream`), and the runtime
//! works in the primary context, which is what [`Device::open`] opens.
//!
//! ```no_run
//! # fn enqueue_kernel(_: *mut std::ffi::c_void) -> *mut std::ffi::c_void { std::ptr::null_mut() }
//! # let server_stream = std::ptr::null_mut();
//! use pinpool::{Device, Pool, cuda};
//!
//! let device = Device::open("cuda:0")?;
//! let pool = Pool::builder(&device).build()?;
//! let weights = device.alloc(5)?;
//! // SAFETY: the server keeps its stream alive until everything that was submitted to it is done.
//! let stream = unsafe { cuda::adopt_stream(&device, server_stream)? };
//!
//! let mut buf = pool.checkout(5)?;
//! buf.extend_from_slice(b"hello");
//! drop(stream.upload(buf, &weights)?); // in order with the server's kernels on this stream
//! # Ok::<(), pinpool::Error>(())
//! ```
//!
//! # Which library
//!
//! `libcuda.so.1` as the system's loader finds it, or the one that the environment variable `PINPOOL_LIBCUDA` names.
//! What is loaded runs, so both are trusted as the program's own file is: a user or process that can set the
//! environment, or write to the folders that the loader searches, decides what runs in this one. A program that does
//! not trust its environment (one with more rights than its user) unsets that variable before it opens a device.
//!
//! # What is different on a stream that others can reach
//!
//! Adopted streams, and ours once their handle was [given out](raw_stream), may carry work that nobody tells us of.
//!
//! - Every submit records its event at once, so that it covers exactly what was queued by then; a
//!   [`hold`](Stream::hold) therefore keeps a buffer until the server's own kernels, queued before, are done.
//! - The stream may be captured into a graph. Each submit asks the driver first (`cuStreamIsCapturing`) and is refused
//!   with [`Error::Capturing`], buffer and all, before anything could spoil the capture. What is to be a part of the
//!   graph says so: [`Stream::upload_captured`], [`Stream::download_captured`], [`Stream::hold_captured`].
//! - A stream is known by the driver's number for it (`cuStreamGetId`, CUDA 12.0), not by its handle, which the driver
//!   gives to other streams later. Adopted twice it is one stream here; a new stream under an old handle is another.
//!   Drivers without numbers: each adoption stands for itself, and [`checkout_on`](crate::Pool::checkout_on) hands out
//!   nothing that is still in flight.
//!
//! # What the one who captures promises
//!
//! A stream that others can reach neither enters nor leaves a capture while a thread is in a call of this crate that is
//! given the stream, or memory that was [allocated on it](Stream::alloc). It enters one by `cuStreamBeginCapture`, or
//! by being made to wait for an event that was recorded in one, and leaves it when the capture is ended. A lock that is
//! taken on both sides keeps the promise, and so does capturing on the thread that copies. (Between its calls this
//! crate may record events on the stream at any time; these it deals with.)
//!
//! The functions below that are `unsafe`, and whatever is done with a raw handle, rest on that. Each call looks whether
//! the stream is captured, but the driver has no means to keep a capture out between that look and the copy, nor to
//! find out afterwards. A copy that gets into a capture so reads or writes its buffer with each launch of the graph,
//! also when the buffer is long back in its pool and another's.
//!
//! # The primary context
//!
//! `Device::open("cuda:N")` works in the GPU's *primary* context: the one that the runtime API (`cudaMalloc`,
//! `cudaMemcpy`), PyTorch, cudarc and candle use. So what they allocate and what this crate allocates is one world:
//!
//! - Their device memory goes into every copy call of this crate, by [`Device::raw_memory`]; ours into their kernels
//!   and copies, by [`DeviceSlice::address`](crate::DeviceSlice::address).
//! - Memory that the pool pins is pinned for them too (it is registered for all contexts), so `cudaMemcpyAsync` from a
//!   buffer of the pool runs at full speed. They must be done with it before the buffer is dropped, or hold it:
//!   [`Stream::hold`](crate::Stream::hold).
//! - No call of this crate changes which context is current on the caller's thread, nor its capture mode.
//! - A sticky error that one of them causes (an illegal address in a kernel) is everybody's: the context is lost, and
//!   with it the device as this crate sees it ([`Device::lost`]).
//!
//! A context made with `cuCtxCreate` is another world, and a device of its own here ([`adopt_context`]): its memory is
//! refused by the [`Device::raw_memory`] of the primary one's device.
//!
//! # What is in order with what
//!
//! Being in one context orders nothing. Streams that this crate makes are *non-blocking* (`CU_STREAM_NON_BLOCKING`):
//! they have no implicit order with the legacy default stream, on which `cudaMemcpy` and kernels launched on "stream 0"
//! run, so neither side ever waits for the other by accident, nor by design. Where both use the same memory, say so:
//!
//! - ours, then theirs: wait for the handle of the copy ([`InFlight::wait`](crate::InFlight::wait)) before they start;
//! - theirs, then ours: synchronise with their stream first;
//! - or adopt their stream, and use [`Stream::wait_for`] in either direction.
//!
//! # The device-side heap
//!
//! Kernels that call `malloc` or `new` take memory from a heap of fixed size that the driver sets aside in the context.
//! Nothing outside of a kernel can use what they get: no copy call accepts it, and [`Device::raw_memory`] says so
//! ([`AddressFault::Unknown`](crate::AddressFault::Unknown)). [`device_heap_limit`] tells the heap's size, and
//! [`set_device_heap_limit`] sets it, before the first module that uses the heap is loaded.

#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::c_void;

use crate::device::cuda::Cuda;
use crate::device::ending::KeepAlive;
use crate::device::handle::Device;
use crate::error::{Error, Result};
use crate::stream::Stream;

/// A device that works in a context that the server made (`cuCtxCreate`), instead of the GPU's primary one.
///
/// The context is not destroyed, and on the caller's thread the current context stays what it was. The primary context
/// of a GPU is recognised, and gives the same device as [`Device::open`] does; the same context adopted again gives the
/// same device while that is there. Two contexts of one GPU are two devices: device memory, streams and events are not
/// exchanged between them, while pinned memory is usable in both (name both to
/// [`Pool::builder`](crate::Pool::builder)).
///
/// # Errors
/// [`Error::Unavailable`] without a usable driver, [`Error::Config`] for null, and what the driver says.
///
/// # Safety
/// `context` is a CUDA context, and stays one until the device and everything that came from it (streams, device
/// memory, pools, buffers in flight) is gone and threads of ours have made their last calls. [`adopt_context_with`]
/// tells when that is.
pub unsafe fn adopt_context(context: *mut c_void) -> Result<Device> {
    // SAFETY: the caller's word.
    let context = unsafe { crate::device::cuda::adopt(context) }?;
    Device::adopted(context, None)
}

/// The same, leaving something with the device that is dropped, on any thread, after its last call: by its drop the
/// server hears that the context may be destroyed, or destroys it. If the device was there already and has a keeper,
/// this one is dropped at once. It is not kept for a primary context, which the driver counts by itself.
///
/// # Errors
/// As for [`adopt_context`]; the keeper is dropped.
///
/// # Safety
/// `context` is a CUDA context, and stays one until the keeper is dropped.
pub unsafe fn adopt_context_with(context: *mut c_void, keep_alive: impl Any + Send + Sync) -> Result<Device> {
    // SAFETY: the caller's word.
    let context = unsafe { crate::device::cuda::adopt(context) }?;
    Device::adopted(context, Some(KeepAlive::new(Box::new(keep_alive))))
}

/// A stream that the server made, for copies and holds in order with the server's own work on it.
///
/// 0 and `CU_STREAM_LEGACY` (1) are the legacy default stream of the device's context. The stream is not destroyed. See
/// the [module's page](self) for what is different on it.
///
/// # Errors
/// [`Error::Unsupported`] for a device that is no GPU, and for `CU_STREAM_PER_THREAD` (2), which is another stream on
/// each thread. [`Error::WrongContext`] for a stream of another context. [`Error::Capturing`] while the stream is being
/// captured into a graph: adopt it before. What the driver says; the device's loss.
///
/// # Safety
/// `stream` is a CUDA stream, and stays one until everything that was submitted to it through this crate is known to be
/// complete: the last handle in flight was waited for, or [`Stream::synchronize`] came back. [`adopt_stream_with`]
/// leaves that to an owner. And the promise about captures on the [module's page](self).
pub unsafe fn adopt_stream(device: &Device, stream: *mut c_void) -> Result<Stream> {
    // SAFETY: the caller's word.
    unsafe { adopt(device, stream, None) }
}

/// The same, with an owner of the stream, such as an `Arc` around it, that is kept for as long as anything
/// needs the stream: handles to it and what is in flight on it. It is dropped on the device's worker thread,
/// where the context is current. If the stream was adopted before with a keeper that is still there, this one
/// is dropped at once.
///
/// # Errors
/// As for [`adopt_stream`]; the keeper is dropped.
///
/// # Safety
/// `stream` is a CUDA stream, and stays one until the keeper is dropped. And the promise about captures on the
/// [module's page](self).
pub unsafe fn adopt_stream_with(
    device: &Device,
    stream: *mut c_void,
    keep_alive: impl Any + Send + Sync,
) -> Result<Stream> {
    // SAFETY: the caller's word.
    unsafe { adopt(device, stream, Some(KeepAlive::new(Box::new(keep_alive)))) }
}

/// # Safety
/// As for [`adopt_stream`] and [`adopt_stream_with`].
unsafe fn adopt(device: &Device, raw: *mut c_void, keep_alive: Option<KeepAlive>) -> Result<Stream> {
    let context = device.context();
    let cuda = cuda(device)?;
    context.alive()?;
    // SAFETY: the caller's word: a stream.
    let handle = context.noting(unsafe { cuda.recognise(raw) })?;
    let id = context.noting(cuda.stream_id(handle))?;
    Ok(Stream::adopted(device, handle, id, keep_alive))
}

/// The `CUcontext` that a device works in. It is valid for as long as the device is open.
///
/// # Errors
/// [`Error::Unsupported`] for a device that is no GPU.
pub fn raw_context(device: &Device) -> Result<*mut c_void> {
    Ok(cuda(device)?.raw_context())
}

/// The `CUstream` behind a stream, for servers that launch kernels of their own on it. It is valid for as long as a
/// handle to the stream is there, and must not be destroyed. From here on the stream is one that others can reach: see
/// the [module's page](self).
///
/// # Errors
/// [`Error::Unsupported`] for a stream of a device that is no GPU; what the driver says; the device's loss.
pub fn raw_stream(stream: &Stream) -> Result<*mut c_void> {
    let timeline = stream.timeline();
    let (context, handle) = (timeline.context(), timeline.stream());
    let cuda = cuda(stream.device())?;
    if !timeline.is_capturing()? {
        context.alive()?;
        // Whoever adopts the handle is to get this very stream.
        if let Some(id) = context.noting(cuda.stream_id(handle))? {
            stream.device().known_stream(id, || timeline.clone());
        }
        timeline.share();
    }
    Ok(Cuda::raw_stream(handle))
}

/// Bytes of the heap from which kernels on this GPU take memory by `malloc` and `new` (`CU_LIMIT_MALLOC_HEAP_SIZE` of
/// the device's context; 8 MiB unless somebody set it).
///
/// # Errors
/// [`Error::Unsupported`] for a device that is no GPU; the device's loss; what the driver says.
pub fn device_heap_limit(device: &Device) -> Result<usize> {
    let cuda = cuda(device)?;
    device.context().alive()?;
    device.context().noting(cuda.heap_limit())
}

/// Sets the limit of that heap, in bytes, for everyone in the device's context. The driver may round it up:
/// [`device_heap_limit`] tells what it became. Can synchronise the device, so it is for the start of a server.
///
/// # Errors
/// [`Error::Config`] once a module whose kernels use the heap is loaded (`cuCtxSetLimit` says
/// `CUDA_ERROR_INVALID_VALUE`); [`Error::Unsupported`] for a device that is no GPU; the device's loss; what the driver
/// says, out of memory among it.
pub fn set_device_heap_limit(device: &Device, bytes: usize) -> Result<()> {
    cuda(device)?;
    let context = device.context();
    context.alive()?;
    let (maker, device) = (context.clone(), device.clone());
    context.worker().call(move || maker.noting(cuda(&device)?.set_heap_limit(bytes)))
}

/// The device's driver, in the process that opened it.
fn cuda(device: &Device) -> Result<&Cuda> {
    crate::os::check_fork()?;
    device.context().driver().as_any().downcast_ref().ok_or_else(|| {
        Error::Unsupported(format!(
            "{} is no GPU of NVIDIA's, and has no CUDA contexts or streams",
            device.name()
        ))
    })
}
