//! What only Ascend has: the library, a server's own contexts and streams, raw handles.
//!
//! `Device::open("acl:0")` loads `libascendcl.so` and works in the device's default context, which
//! `aclrtSetDevice` gives to each thread, and which the frameworks use. Everything else works there
//! as on other devices. **No Ascend hardware was at hand when this was written**: the code depends
//! on CANN's documentation and headers, and the tests run on a simulated library that was written
//! from the same pages. [`hardware`] says how to try it on a real device, and what to send back.
//!
//! ```no_run
//! # let server_stream = std::ptr::null_mut();
//! use pinpool::{Device, Pool, acl};
//!
//! let device = Device::open("acl:0")?;
//! let pool = Pool::builder(&device).build()?; // of aclrtMallocHost's memory
//! let weights = device.alloc(5)?;
//! // SAFETY: the server keeps its stream until everything that was submitted to it is complete.
//! let stream = unsafe { acl::adopt_stream(&device, server_stream, ())? };
//!
//! let mut buf = pool.checkout(5)?;
//! buf.extend_from_slice(b"hello");
//! drop(stream.upload(buf, &weights)?); // in order with the server's work on this stream
//! # Ok::<(), pinpool::Error>(())
//! ```
//!
//! # Which library
//!
//! `libascendcl.so` as the system's loader finds it (CANN's `set_env.sh` sets its search path),
//! else in `lib64` of `ASCEND_TOOLKIT_HOME` or `ASCEND_HOME_PATH`, else where CANN's installers put
//! it. The environment variable `PINPOOL_LIBASCENDCL` names another one; then nothing else is
//! tried. The log says which one was loaded. The calls up to the end of 2023 (CANN 8.0) are
//! required; later ones are used where the library has them ([`about`] lists them). The crate calls
//! `aclInit`, and the program may have called it before. It never calls `aclFinalize`, which ends
//! the library for the process.
//!
//! The library's code runs in this process. So a program that does not trust its environment (one
//! with more rights than its user) unsets these three variables before it opens a device.
//!
//! # What is different from a GPU
//!
//! - **Memory.** `aclrtMallocHost` allocates a pool's memory, for each
//!   [extent](crate::PoolBuilder::extent). Registering memory ([`Pool::adopt`](crate::Pool::adopt),
//!   [`Device::register`](crate::Device::register),
//!   [`Backing::Registered`](crate::Backing::Registered)) needs `aclrtHostRegister`, and works in
//!   whole pages of 4 KiB: two values on one page are refused.
//! - **Alignment.** A copy is asynchronous only where both addresses are multiples of 64
//!   (documentation of `aclrtMemcpyAsync`, CANN 6.0 to 9.0) and the host's memory is page-locked.
//!   Every other copy *waits* for the stream, in the call. Buffers start on multiples of 64 and
//!   device memory on multiples of 256, so avoid parts of either that start elsewhere.
//! - **Memory by its address** ([`Device::raw_memory`]) is compared with the crate's allocations and
//!   with the host's memory. What is neither is taken for memory of the device.
//! - **Borrowed memory** ([`Stream::upload_blocking`], [`Stream::download_blocking`]) goes by way
//!   of the crate's own memory: the library does not say that a copy ends with its device.
//! - **Contexts.** A call of this crate restores the thread's current context. A thread that had
//!   none keeps the device's, since no call of the library removes it.
//! - **Streams** have no lasting numbers: an adopted stream is a new [`Stream`] each time, for
//!   which [`checkout_on`](crate::Pool::checkout_on) gives no buffer that is still in flight.
//! - **Captures** cannot be detected. Do not capture a stream while this crate submits to it.
//! - **Copies between host buffers** ([`Stream::copy_host`]) wait for the stream.
//! - **Several devices** may share a pool, as frameworks share `aclrtMallocHost`'s memory.
//! - **Sharing a process.** The crate sets a device once when it opens it (`aclrtSetDevice`), and
//!   resets it once when it closes it. A program that makes contexts there by `aclrtCreateContext`
//!   sets the device too, or closing it may end these contexts.
//! - **Ending.** Before host memory is freed the device's region thread drains every open device:
//!   trimming a busy server's pool waits for its queued work. A program that returns from `main`
//!   right after it dropped everything ends before that thread has freed it, and the memory is
//!   freed with the process. [`Device::close`] waits for the thread and `aclrtResetDevice`.
//! - **A lost device** is not called any more, and what it had is leaked: the device may still
//!   touch that.

#![allow(unsafe_code)]

/// For users with Ascend hardware: how to run the tests on it, and what to send back.
#[doc = include_str!("../docs/ascend.md")]
pub mod hardware {}

use std::any::Any;
use std::ffi::c_void;

pub use crate::device::acl::About;
use crate::device::acl::Acl;
#[doc(hidden)]
pub use crate::device::acl::install;
use crate::device::handle::{Device, kept};
use crate::error::{Error, Result};
use crate::stream::Stream;

/// A device in a context that the server made (`aclrtCreateContext`). The default context of an
/// open device is recognised, and gives that device. So a server that has set its device calls
/// [`Device::open`], and adopts nothing.
///
/// `keep_alive` is dropped after the crate's last call in the context, on any thread. If the device
/// is open already and has a `keep_alive`, this one is dropped at once. `()` keeps nothing.
///
/// # Errors
/// [As an opening](Error#opening-a-device), and [`Error::Argument`] for null. `keep_alive` is
/// dropped.
///
/// # Safety
/// `context` is a context of AscendCL, and stays one until `keep_alive` is dropped. Where that
/// keeps nothing: until the device and everything that came from it has been dropped, and the
/// crate's threads have made their last calls.
pub unsafe fn adopt_context(context: *mut c_void, keep_alive: impl Any + Send + Sync) -> Result<Device> {
    let keep_alive = kept(keep_alive);
    // SAFETY: the caller promises that it is a context, and for how long.
    let context = unsafe { crate::device::acl::adopt(context) }?;
    Device::adopted(context, keep_alive)
}

/// A stream that the server made, for copies and holds in order with the server's own work on it.
/// Null is the default stream of the device's context. The stream is not destroyed.
///
/// On it every submit records its event at once, so a [`hold`](Stream::hold) keeps a buffer until
/// the server's own work that was queued before it is complete. (To find out whether the stream
/// belongs to the device's context, this call records an event on it.)
///
/// `keep_alive` is an owner of the stream, such as an `Arc` around it, kept for as long as anything
/// needs the stream, and dropped on the region thread, where the context is current. `()` keeps
/// nothing.
///
/// # Errors
/// [As for devices of one family](Error#devices-of-one-family), and [`Error::Mismatch`] for a
/// stream of another context. `keep_alive` is dropped.
///
/// # Safety
/// `stream` is not captured while this crate submits to it. It is a stream of AscendCL or null, and
/// stays one until `keep_alive` is dropped. Where that keeps nothing: until everything that was
/// submitted to it through this crate is known to be complete: the last handle in flight was waited
/// for, or [`Stream::synchronize`] has returned; behind a [patient hold](Stream::hold_patiently)
/// [`Stream::record_holds`] has succeeded as well.
pub unsafe fn adopt_stream(
    device: &Device,
    stream: *mut c_void,
    keep_alive: impl Any + Send + Sync,
) -> Result<Stream> {
    let (context, keep_alive) = (device.context(), kept(keep_alive));
    let acl = acl(device)?;
    context.alive()?;
    // SAFETY: the caller promises that it is a stream.
    let handle = context.noting(unsafe { acl.recognise(stream) })?;
    Ok(Stream::adopted(device, handle, None, keep_alive, None))
}

/// The `aclrtContext` that a device works in. It is valid for as long as the device is open.
///
/// # Errors
/// [As for devices of one family](Error#devices-of-one-family).
pub fn raw_context(device: &Device) -> Result<*mut c_void> {
    Ok(acl(device)?.raw_context())
}

/// The `aclrtStream` behind a stream, for servers that queue work of their own on it. It is valid
/// for as long as a handle to the stream exists, and must not be destroyed. From here on every
/// submit records its event at once: the stream may carry work that the crate does not know of.
///
/// # Errors
/// [As for devices of one family](Error#devices-of-one-family).
pub fn raw_stream(stream: &Stream) -> Result<*mut c_void> {
    acl(stream.device())?;
    stream.timeline().share();
    Ok(Acl::raw_stream(stream.timeline().stream()))
}

/// The facts about a device and its library.
///
/// # Errors
/// [As for devices of one family](Error#devices-of-one-family).
pub fn about(device: &Device) -> Result<About> {
    Ok(acl(device)?.about())
}

fn acl(device: &Device) -> Result<&Acl, Error> {
    device.driver_of("no Ascend device, and has no AscendCL contexts or streams")
}
