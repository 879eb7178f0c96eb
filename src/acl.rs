//! What only Ascend has: which library is loaded, sharing a device with a server, its contexts and streams for us and
//! ours for it.
//!
//! `Device::open("acl:0")` loads `libascendcl.so` and works in the device's default context, the one that
//! `aclrtSetDevice` gives to each thread and that the frameworks use. Everything else of this crate works there as on
//! other devices. **No Ascend hardware was at hand when this was written**: what is relied on is what the documentation
//! and headers of CANN say, and what is tested is tested on a stand-in library that was written from the same pages.
//! [`hardware`] says how to try it on a real device, and what to send back.
//!
//! ```no_run
//! # let server_stream = std::ptr::null_mut();
//! use pinpool::{Device, Pool, acl};
//!
//! let device = Device::open("acl:0")?;
//! let pool = Pool::builder(&device).build()?; // of aclrtMallocHost's memory
//! let weights = device.alloc(5)?;
//! // SAFETY: the server keeps its stream alive until everything that was submitted to it is done.
//! let stream = unsafe { acl::adopt_stream(&device, server_stream)? };
//!
//! let mut buf = pool.checkout(5)?;
//! buf.extend_from_slice(b"hello");
//! drop(stream.upload(buf, &weights)?); // in order with the server's work on this stream
//! # Ok::<(), pinpool::Error>(())
//! ```
//!
//! # Which library
//!
//! `libascendcl.so` as the system's loader finds it (CANN's `set_env.sh` tells it where), else in `lib64` of
//! `ASCEND_TOOLKIT_HOME` or `ASCEND_HOME_PATH`, else where CANN's installers put it. [`use_library`] or the environment
//! variable `PINPOOL_LIBASCENDCL` names another one; then nothing else is tried. The calls of January 2022 are
//! required; later ones are used where they are there ([`about`] lists them). `aclInit` is called, and may have been
//! called before by others; `aclFinalize` never is, since it ends the library for the whole process.
//!
//! What is loaded runs, so all of these are trusted as the program's own file is: the folders that the system's loader
//! searches, those that the three variables name, and CANN's usual ones. A user or process that can set the environment
//! or write there decides what runs in this one. A program that does not trust its environment (one with more rights
//! than its user) unsets these variables before it opens a device; a program that sets them itself answers for the
//! file, as for [`use_library`].
//!
//! # What is different from a GPU
//!
//! - **Memory.** A pool takes its memory from `aclrtMallocHost`, an allocation for each
//!   [extent](crate::PoolBuilder::extent). Registering memory ([`Pool::adopt`](crate::Pool::adopt),
//!   [`Device::register`](crate::Device::register), [`Backing::Registered`](crate::Backing::Registered)) needs
//!   `aclrtHostRegister`, and works in whole pages of 4 KiB: two values on one page are refused.
//! - **Alignment.** An asynchronous copy is made only where both addresses are multiples of 64 (documentation of
//!   `aclrtMemcpyAsync`, CANN 6.0 to 9.0) and the host's memory is page-locked. Every other copy, and one from memory
//!   that is not pinned, *waits* for the stream and is made before the call returns. Buffers start on multiples of 64
//!   and device memory on those of 256; so parts of either that start elsewhere are what to avoid.
//! - **Contexts.** A context is current on each thread by itself. A call of this crate on a thread that has another one
//!   current puts that back. A thread that had none has the device's context current afterwards, since the library has
//!   no call for having none.
//! - **Streams** have no lasting numbers: an adopted stream is a new one each time it is adopted, and
//!   [`checkout_on`](crate::Pool::checkout_on) hands out nothing that is still in flight there.
//! - **Captures** cannot be asked about. Do not capture a stream while this crate submits to it.
//! - **Copies between host buffers** ([`Stream::copy_host`]) run in the stream's order where the library has
//!   `aclrtLaunchHostFunc`; elsewhere, and on adopted streams, they wait for the stream.
//! - **Several devices** may share a pool, as they share `aclrtMallocHost`'s memory in the frameworks.
//! - **Sharing a process.** A device that is opened is set once more (`aclrtSetDevice`), and reset as often when it is
//!   closed. Who makes contexts there by `aclrtCreateContext` sets it too, or closing the device may end these.
//! - **Ending.** Before host memory is freed every open device is drained, on the worker thread: trimming a busy
//!   server's pool takes until its queued work is done. A program that ends right after it dropped everything ends
//!   before the worker is through, and its memory goes with the process: [`Device::close`] waits for it, and for
//!   `aclrtResetDevice`.
//! - **A lost device** is not called any more at all, and what it had is leaked: nobody says that it has let go.

#![allow(unsafe_code)]

pub mod hardware;

use std::any::Any;
use std::ffi::c_void;
use std::path::{Path, PathBuf};

use crate::device::acl::Acl;
use crate::device::ending::KeepAlive;
use crate::device::handle::Device;
use crate::error::{Error, Result};
use crate::stream::Stream;

/// Chooses the library to load in place of the one that would be found: a path, or a name for the system's loader.
/// Before the first Ascend device is opened, `auto` included; the same choice again is no error.
///
/// # Errors
/// [`Error::Config`]: another library was chosen, loaded or looked for before.
///
/// # Safety
/// What is loaded runs: a library's constructors when it is loaded, its functions from then on. The file that the path
/// or the name leads to is AscendCL, or a library whose constructors do nothing unsound and whose functions of these
/// names do what AscendCL documents; and it is that file until the first Ascend device was opened.
///
/// # Examples
/// ```no_run
/// // SAFETY: the image puts CANN's own library there, and nothing else writes to that folder.
/// unsafe { pinpool::acl::use_library("/opt/cann/lib64/libascendcl.so")? };
/// # Ok::<(), pinpool::Error>(())
/// ```
pub unsafe fn use_library(path: impl AsRef<Path>) -> Result<()> {
    crate::device::acl::use_library(path.as_ref())
}

/// The files that are tried when the first Ascend device is opened, in this order; the first that can be loaded is
/// taken. One without a folder is looked for by the system's loader. For whoever wants to know what is in the way.
#[must_use]
pub fn library_candidates() -> Vec<PathBuf> {
    crate::device::acl::library_candidates()
}

/// A device that works in a context that the server made (`aclrtCreateContext`), instead of the device's default one.
///
/// The context is not destroyed, and on the caller's thread the current context stays what it was. The default context
/// of a device that is open is recognised, and gives that device (a server that has set its device opens it here by
/// [`Device::open`], and adopts nothing); the same context adopted again gives the same device while that is there.
///
/// # Errors
/// [`Error::Unavailable`] without a usable library, [`Error::Config`] for null, and what the library says.
///
/// # Safety
/// `context` is a context of AscendCL, and stays one until the device and everything that came from it (streams, device
/// memory, pools, buffers in flight) is gone and threads of ours have made their last calls. [`adopt_context_with`]
/// tells when that is.
pub unsafe fn adopt_context(context: *mut c_void) -> Result<Device> {
    // SAFETY: the caller's word.
    let context = unsafe { crate::device::acl::adopt(context) }?;
    Device::adopted(context, None)
}

/// The same, leaving something with the device that is dropped, on any thread, after its last call: by its drop the
/// server hears that the context may be destroyed, or destroys it. If the device was there already and has a keeper,
/// this one is dropped at once. It is not kept for a default context, which the library counts by itself.
///
/// # Errors
/// As for [`adopt_context`]; the keeper is dropped.
///
/// # Safety
/// `context` is a context of AscendCL, and stays one until the keeper is dropped.
pub unsafe fn adopt_context_with(context: *mut c_void, keep_alive: impl Any + Send + Sync) -> Result<Device> {
    // SAFETY: the caller's word.
    let context = unsafe { crate::device::acl::adopt(context) }?;
    Device::adopted(context, Some(KeepAlive::new(Box::new(keep_alive))))
}

/// A stream that the server made, for copies and holds in order with the server's own work on it. Null is the default
/// stream of the device's context. The stream is not destroyed.
///
/// On it every submit records its event at once, so that it covers exactly what was queued by then; a
/// [`hold`](Stream::hold) therefore keeps a buffer until the server's own work, queued before, is done. (To find out
/// whether the stream belongs to the device's context, an event is recorded on it.)
///
/// # Errors
/// [`Error::Unsupported`] for a device that is not Ascend's, [`Error::WrongContext`] for a stream of another context.
/// What the library says; the device's loss.
///
/// # Safety
/// `stream` is a stream of AscendCL or null, and stays one until everything that was submitted to it through this crate
/// is known to be complete: the last handle in flight was waited for, or [`Stream::synchronize`] came back.
/// [`adopt_stream_with`] leaves that to an owner. It is not captured while this crate submits to it.
pub unsafe fn adopt_stream(device: &Device, stream: *mut c_void) -> Result<Stream> {
    // SAFETY: the caller's word.
    unsafe { adopt(device, stream, None) }
}

/// The same, with an owner of the stream that is kept for as long as anything needs the stream: handles to it and what
/// is in flight on it. It is dropped on the device's worker thread, where the context is current.
///
/// # Errors
/// As for [`adopt_stream`]; the keeper is dropped.
///
/// # Safety
/// `stream` is a stream of AscendCL, and stays one until the keeper is dropped. It is not captured while this crate
/// submits to it.
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
    let acl = acl(device)?;
    context.alive()?;
    // SAFETY: the caller's word: a stream.
    let handle = context.noting(unsafe { acl.recognise(raw) })?;
    Ok(Stream::adopted(device, handle, None, keep_alive))
}

/// The `aclrtContext` that a device works in. It is valid for as long as the device is open.
///
/// # Errors
/// [`Error::Unsupported`] for a device that is not Ascend's.
pub fn raw_context(device: &Device) -> Result<*mut c_void> {
    Ok(acl(device)?.raw_context())
}

/// The `aclrtStream` behind a stream, for servers that queue work of their own on it. It is valid for as long as a
/// handle to the stream is there, and must not be destroyed. From here on the stream is one that others can reach:
/// every submit records its event at once. Subscribe no thread to it (`aclrtSubscribeReport`) while
/// [`Stream::copy_host`] is used on it: that may launch host functions, and the two must not meet on one stream
/// (documentation of `aclrtLaunchHostFunc`).
///
/// # Errors
/// [`Error::Unsupported`] for a stream of a device that is not Ascend's.
pub fn raw_stream(stream: &Stream) -> Result<*mut c_void> {
    acl(stream.device())?;
    stream.timeline().share();
    Ok(Acl::raw_stream(stream.timeline().stream()))
}

/// What a device and its library are: for logs, and for reports about hardware that was never seen.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct About {
    /// The library that was loaded.
    pub library: PathBuf,
    /// The version of its interface (`aclrtGetVersion`): 1.15.0 is that of CANN 8.5.
    pub version: Option<(i32, i32, i32)>,
    /// The chip (`aclrtGetSocName`).
    pub soc: Option<String>,
    /// Whether the program runs on the device itself, in RC mode (`aclrtGetRunMode` says ACL_DEVICE).
    pub on_device: bool,
    /// The call by which events are made.
    pub events: &'static str,
    /// The calls that came after January 2022, and whether this library has them.
    pub later: Vec<(&'static str, bool)>,
}

/// What a device and its library are.
///
/// # Errors
/// [`Error::Unsupported`] for a device that is not Ascend's.
pub fn about(device: &Device) -> Result<About> {
    let crate::device::acl::ContextFacts { library, version, soc, on_device, events, later } =
        acl(device)?.about();
    Ok(About { library, version, soc, on_device, events, later })
}

/// The device's driver, in the process that opened it.
fn acl(device: &Device) -> Result<&Acl> {
    crate::os::check_fork()?;
    device.context().driver().as_any().downcast_ref().ok_or_else(|| {
        Error::Unsupported(format!(
            "{} is no Ascend device, and has no AscendCL contexts or streams",
            device.name()
        ))
    })
}
