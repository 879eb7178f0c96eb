//! The driver of Ascend NPUs, through AscendCL (the C interface `libascendcl.so` of Huawei's CANN).
//!
//! The code depends on the documentation and the headers of that library, from 2022 on. No hardware was at hand, and
//! the crate's documentation says so.
//!
//! # The files, in the order in which to read them
//!
//! | file | what is in it |
//! | --- | --- |
//! | `api.rs` | the library, loaded at run time, and its entry points |
//! | `error.rs`, `names.rs` | classes and names of its error codes |
//! | this one | opening a device, the current context; streams |
//! | `host.rs` | host memory: allocated by the library, registered, and which of it is page-locked |
//! | `memory.rs` | device memory, and the check of memory that the crate did not allocate |
//! | `copy.rs` | copies, and which of them may be asynchronous |
//! | `event.rs` | events of three kinds, by what the library has |
//! | `adopt.rs` | contexts and streams that the program made |
//!
//! The crate calls this through [`Driver`]. The public module `acl` also calls what only Ascend has: by
//! [`Driver::as_any`] it gets the [`Acl`] itself.
//!
//! # Contexts
//!
//! Each thread has a current context of its own. The crate works in the device's *default* context, the one that
//! `aclrtSetDevice` gives to every thread and that the frameworks use. `aclrtSetDevice` counts it once when the device
//! is opened, and `aclrtResetDevice` releases it after the last reference to the driver is dropped. `aclrtSetDevice`
//! also changes the current context, and no call can make a thread have none again. So that call is made on a thread
//! that ends at once. Every other call reads the current context, sets the driver's where it is another one, and
//! restores the caller's. A thread that had none keeps the driver's: the library offers nothing better.
//!
//! # A device that is lost
//!
//! After an error that ends the device, or the library, no further call of any kind is made for it. Nothing is freed,
//! unregistered or destroyed, since the documentation does not say that the hardware touches memory no more. All of it
//! stays for good.

mod adopt;
mod api;
mod copy;
mod error;
mod event;
mod host;
mod memory;
mod names;

use std::any::Any;
use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

pub use self::adopt::About;
pub(crate) use self::adopt::adopt;
use self::api::{AclApi, AclContext, AclStream};
use self::error::AclCode;
use self::event::AclEvents;
use super::ending::{Ending, KeepAlive};
use super::gate;
use super::holds::Last;
use super::{DevicePtr, Driver, EventHandle, HostKind, StreamHandle, Transfer};
use crate::error::{DeviceError, Error, ErrorClass, Result};
use crate::exit::{self, Pass};

/// acl_rt.h: aclrtRunMode's ACL_DEVICE: this program runs on the device itself, and its memory is the device's.
const RUN_ON_DEVICE: c_int = 0;
/// acl_rt.h: aclrtStreamStatus's ACL_STREAM_STATUS_COMPLETE.
const STREAM_COMPLETE: c_int = 0;
/// How long a call waits for a stream that is to be destroyed, in milliseconds. Work that the program has queued there
/// should be complete by then.
const LAST_WAIT_MS: i32 = 10_000;
/// The most bytes that one call allocates or pins. Allocations of some 200 GB and more are known to be refused on
/// machines with as much free.
const LONGEST_PIN: usize = 128 << 30;

/// One context of an Ascend device.
#[derive(Debug)]
pub(crate) struct Acl {
    api: &'static AclApi,
    name: Arc<str>,
    /// The device's number, as the library counts those that the process may see.
    ordinal: i32,
    context: AclContext,
    /// Whether the program runs on the device itself ("RC mode").
    on_device: bool,
    events: AclEvents,
    host: host::Host,
    /// Whether this is the device's default context, counted once. Another one is the program's.
    default: bool,
    /// The error that the device was lost with.
    lost: OnceLock<DeviceError>,
    ending: Ending,
}

// SAFETY: a context may be current on any thread, on several at once; the library takes its own locks.
unsafe impl Send for Acl {}
// SAFETY: as above.
unsafe impl Sync for Acl {}

/// Opens Ascend device `ordinal`.
///
/// # Errors
/// [`Error::Unavailable`] without a usable library or without any device, [`Error::UnknownDevice`] for a bad ordinal,
/// and what the library says where it cannot use the device.
pub(crate) fn driver(ordinal: u32) -> Result<Arc<dyn Driver>> {
    let name: Arc<str> = format!("acl:{ordinal}").into();
    let api = AclApi::get(&name)?;
    let mut count = 0;
    // SAFETY: writes a number.
    match unsafe { api.device_count.call(&raw mut count) } {
        // Some versions answer with this code where there is no device.
        AclCode::NO_DEVICE => {
            // Here and below: the refusal is no error, so its message is removed.
            api.expected();
            count = 0;
        }
        // Not an error of this device: `auto` need not try the next ordinal.
        code => check(api, &name, "aclrtGetDeviceCount", code)
            .map_err(|error| Error::unavailable(&name, &error))?,
    }
    if ordinal >= count {
        return Err(no_such(&name, count));
    }
    let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
    let found = FoundContext::default_of(api, &name, ordinal)?;
    // Making the context may have registered exit handlers of the library's.
    gate::watch_exit();
    let driver = Arc::new(Acl::new(api, name, ordinal, found, true));
    host::opened(&driver);
    Ok(driver)
}

/// The error for a name whose ordinal is not below `count`, the number of devices.
fn no_such(name: &str, count: u32) -> Error {
    match count {
        0 => Error::Unavailable {
            device: name.into(),
            why: "no Ascend device is visible to this process: see npu-smi info, ASCEND_RT_VISIBLE_DEVICES, and the devices \
                  given to the container (/dev/davinci*)"
                .into(),
        },
        1 => Error::UnknownDevice { name: name.into(), known: "there is only acl:0".into() },
        n => Error::UnknownDevice { name: name.into(), known: format!("there are acl:0 to acl:{}", n - 1) },
    }
}

/// A context, and an answer that the library gives while the context is current.
struct FoundContext {
    context: AclContext,
    on_device: bool,
}

// SAFETY: a context may be current on any thread.
unsafe impl Send for FoundContext {}

impl FoundContext {
    /// The default context of a device, which is counted once more.
    fn default_of(api: &'static AclApi, name: &Arc<str>, ordinal: i32) -> Result<Self> {
        let own = name.clone();
        on_other_thread(name, move || {
            // SAFETY: the call takes a number.
            check(api, &own, "aclrtSetDevice", unsafe { api.set_device.call(ordinal) })?;
            let found = Self::current(api, &own);
            if found.is_err() {
                reset(api, &own, ordinal);
            }
            found
        })
    }

    /// The context that is current on this thread.
    fn current(api: &AclApi, name: &Arc<str>) -> Result<Self> {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes a handle.
        check(api, name, "aclrtGetCurrentContext", unsafe { api.context_get.call(&raw mut context) })?;
        let mut mode: c_int = -1;
        // SAFETY: writes a number.
        check(api, name, "aclrtGetRunMode", unsafe { api.run_mode.call(&raw mut mode) })?;
        Ok(Self { context, on_device: mode == RUN_ON_DEVICE })
    }
}

/// Runs something on a thread of its own, so that the current context of the caller's thread does not change.
fn on_other_thread<R: Send + 'static>(
    name: &Arc<str>,
    run: impl FnOnce() -> Result<R> + Send + 'static,
) -> Result<R> {
    let unavailable = |why: String| Error::Unavailable { device: name.to_string(), why };
    let thread = crate::os::thread::spawn(format!("pinpool-{name}-open"), run);
    let thread = thread.map_err(|error| unavailable(format!("no thread could be started: {error}")))?;
    thread.join().unwrap_or_else(|_| Err(unavailable("the thread that opens it panicked".into())))
}

/// Undoes one `aclrtSetDevice`, on one of the crate's threads. Whether it succeeded.
fn reset(api: &AclApi, name: &Arc<str>, ordinal: i32) -> bool {
    // SAFETY: the call takes a number, and there is one such call for each `aclrtSetDevice`.
    let reset = check(api, name, "aclrtResetDevice", unsafe { api.reset_device.call(ordinal) });
    if let Err(error) = &reset {
        crate::foreign::warn!(target: "pinpool::device", device = &**name, %error, "a device stays set");
    }
    reset.is_ok()
}

fn check(api: &AclApi, device: &Arc<str>, call: &'static str, code: AclCode) -> Result<()> {
    if code == AclCode::SUCCESS { Ok(()) } else { Err(Error::Device(failed(api, device, call, code))) }
}

/// The error of a call, with the library's own message. The next call on this thread may overwrite that message.
#[cold]
fn failed(api: &AclApi, device: &Arc<str>, call: &'static str, code: AclCode) -> DeviceError {
    let text = match api.recent() {
        _ if exit::exiting() => gate::ENDING.to_owned(),
        Some(said) => format!("{}: {said}", code.name()),
        None => code.name().to_owned(),
    };
    DeviceError { device: device.clone(), call, code: code.0.into(), text: text.into(), class: code.class() }
}

/// Adds the remedy to the library's text.
fn advise(error: Error, remedy: &str) -> Error {
    match error {
        Error::Device(error) => {
            let text = format!("{}; {remedy}", error.text).into();
            Error::Device(DeviceError { text, ..error })
        }
        error => error,
    }
}

/// While this exists, the driver's context is current on this thread. Its drop restores the caller's, if there was one.
#[must_use]
struct AclCurrent<'a> {
    api: &'a AclApi,
    theirs: Option<AclContext>,
    /// Dropped last.
    _pass: Option<Pass>,
}

impl<'a> AclCurrent<'a> {
    /// Makes a context current.
    fn enter(api: &'a AclApi, name: &Arc<str>, context: AclContext, pass: Option<Pass>) -> Result<Self> {
        let mut current: AclContext = std::ptr::null_mut();
        // SAFETY: writes a handle.
        let theirs = match unsafe { api.context_get.call(&raw mut current) } {
            AclCode::SUCCESS if current == context => return Ok(Self { api, theirs: None, _pass: pass }),
            AclCode::SUCCESS => Some(current),
            AclCode::CONTEXT_NULL => {
                api.expected();
                None
            }
            code => return Err(Error::Device(failed(api, name, "aclrtGetCurrentContext", code))),
        };
        // SAFETY: a context that exists for as long as the driver does.
        check(api, name, "aclrtSetCurrentContext", unsafe { api.context_set.call(context) })?;
        Ok(Self { api, theirs, _pass: pass })
    }
}

impl Drop for AclCurrent<'_> {
    fn drop(&mut self) {
        if let Some(theirs) = self.theirs {
            // It can only fail for a context that was destroyed meanwhile. SAFETY: the context that was current when
            // this was made.
            if unsafe { self.api.context_set.call(theirs) } != AclCode::SUCCESS {
                self.api.expected();
            }
        }
    }
}

impl Acl {
    fn new(api: &'static AclApi, name: Arc<str>, ordinal: i32, found: FoundContext, default: bool) -> Self {
        Self {
            api,
            name,
            ordinal,
            context: found.context,
            on_device: found.on_device,
            events: AclEvents::of(api),
            host: host::Host::new(found.on_device),
            default,
            lost: OnceLock::new(),
            ending: Ending::new(),
        }
    }

    /// Every outcome of a call for this device passes here. After an outcome that ends the device no call is made.
    fn said(&self, call: &'static str, code: AclCode) -> Result<()> {
        if code == AclCode::SUCCESS {
            return Ok(());
        }
        let error = failed(self.api, &self.name, call, code);
        if matches!(error.class, ErrorClass::DeviceLost | ErrorClass::DriverShutdown) {
            let _ = self.lost.set(error.clone());
        }
        Err(Error::Device(error))
    }

    /// A pass to make a call. An error, if the device was lost or the process ends.
    fn alive(&self) -> Result<Pass> {
        if let Some(error) = self.lost.get() {
            return Err(Error::Device(error.clone()));
        }
        exit::pass().ok_or_else(|| {
            Error::Device(DeviceError {
                device: self.name.clone(),
                call: "a call",
                code: AclCode::UNINITIALIZED.0.into(),
                text: gate::ENDING.into(),
                class: ErrorClass::DriverShutdown,
            })
        })
    }

    /// Makes the driver's context current, for a call that needs one.
    fn current(&self) -> Result<AclCurrent<'_>> {
        let pass = self.alive()?;
        AclCurrent::enter(self.api, &self.name, self.context, Some(pass)).inspect_err(|error| {
            if let Error::Device(error) = error {
                if matches!(error.class, ErrorClass::DeviceLost | ErrorClass::DriverShutdown) {
                    let _ = self.lost.set(error.clone());
                }
            }
        })
    }

    /// Notes that something of the device's stays for good.
    fn leaked(&self) {
        self.ending.leaked();
    }

    /// Waits until the device has nothing to do.
    fn drained(&self) -> Result<()> {
        let _current = self.current()?;
        // SAFETY: the call takes nothing.
        self.said("aclrtSynchronizeDevice", unsafe { self.api.device_synchronize.call() })
    }

    /// Waits until the stream has nothing to do.
    fn drained_stream(&self, handle: StreamHandle) -> Result<()> {
        // SAFETY: a stream that is alive.
        self.said("aclrtSynchronizeStream", unsafe { self.api.stream_synchronize.call(stream(handle)) })
    }

    /// Waits for the last work on a stream that is to be destroyed: the program may have left some there.
    fn last_work(&self, handle: StreamHandle) -> Result<()> {
        if let Some(query) = self.api.stream_query {
            let mut status = !STREAM_COMPLETE;
            // SAFETY: a stream of this driver that is alive, and a place for a number.
            self.said("aclrtStreamQuery", unsafe { query.call(stream(handle), &raw mut status) })?;
            if status == STREAM_COMPLETE {
                return Ok(());
            }
        }
        match self.api.stream_synchronize_timeout {
            Some(wait) => {
                // SAFETY: a stream of this driver that is alive.
                let code = unsafe { wait.call(stream(handle), LAST_WAIT_MS) };
                self.said("aclrtSynchronizeStreamWithTimeout", code)
            }
            None => self.drained_stream(handle),
        }
    }
}

fn stream(handle: StreamHandle) -> AclStream {
    handle.0 as usize as AclStream
}

impl Driver for Acl {
    fn name(&self) -> &str {
        &self.name
    }

    fn family(&self) -> &'static str {
        "acl"
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn leave(&self, last: Last) {
        self.ending.leave(last);
    }

    fn keep(&self, keep_alive: KeepAlive) {
        self.ending.keep(keep_alive);
    }

    fn enter_thread(&self) {
        // Where it fails the thread is like any other, and each call sets the context itself. SAFETY: the driver's
        // context, which exists for as long as the driver does.
        if unsafe { self.api.context_set.call(self.context) } != AclCode::SUCCESS {
            self.api.expected();
        }
    }

    fn record_may_block(&self) -> bool {
        self.events.may_block()
    }

    fn longest_pin(&self) -> usize {
        LONGEST_PIN
    }

    fn allocates(&self) -> bool {
        true
    }

    unsafe fn pin(&self, base: NonNull<u8>, len: usize) -> Result<()> {
        // SAFETY: the caller promises that the range is mapped, and stays so.
        unsafe { self.host_register(base, len, false) }
    }

    unsafe fn unpin(&self, base: NonNull<u8>, _len: usize) -> Result<()> {
        // SAFETY: the caller promises that the range was registered, that this is the one call that unregisters it, and
        // that no copy uses it.
        unsafe { self.host_unregister(base) }
    }

    unsafe fn register(&self, base: NonNull<u8>, len: usize, read_only: bool) -> Result<()> {
        // SAFETY: as in `pin`.
        unsafe { self.host_register(base, len, read_only) }
    }

    fn can_use(&self, kind: HostKind) -> Result<()> {
        match kind {
            HostKind::Locked(_) => Ok(()),
            HostKind::Managed => Err(Error::Unsupported(format!(
                "{}: no pool is made of Ascend's managed memory; use Backing::HostAlloc",
                self.name
            ))),
        }
    }

    fn allocate_host(&self, len: usize, kind: HostKind) -> Result<NonNull<u8>> {
        self.can_use(kind)?;
        self.host_allocate(len)
    }

    unsafe fn free_host(&self, base: NonNull<u8>, _len: usize, _kind: HostKind) -> Result<()> {
        // SAFETY: the caller promises that it was allocated once, is freed once, and is not in use.
        unsafe { self.host_free(base) }
    }

    unsafe fn zero(&self, at: NonNull<u8>, len: usize) -> Result<()> {
        // SAFETY: the caller promises that the range can be written and is not in use.
        unsafe { self.host_zero(at, len) }
    }

    fn device_address(&self, at: NonNull<u8>) -> Result<u64> {
        self.host_device_address(at)
    }

    fn allocate(&self, len: usize) -> Result<DevicePtr> {
        self.memory_allocate(len)
    }

    fn free(&self, ptr: DevicePtr) -> Result<()> {
        self.memory_free(ptr)
    }

    fn examine(&self, ptr: DevicePtr, len: usize) -> Result<()> {
        self.memory_examine(ptr, len)
    }

    fn create_stream(&self) -> Result<StreamHandle> {
        let _current = self.current()?;
        let mut stream: AclStream = std::ptr::null_mut();
        // SAFETY: writes a handle.
        self.said("aclrtCreateStream", unsafe { self.api.stream_create.call(&raw mut stream) })?;
        Ok(StreamHandle(stream as usize as u64))
    }

    fn destroy_stream(&self, handle: StreamHandle) -> Result<()> {
        let _current = self.current()?;
        self.last_work(handle)?;
        // SAFETY: created by this driver, destroyed once, and its context is current.
        self.said("aclrtDestroyStream", unsafe { self.api.stream_destroy.call(stream(handle)) })
    }

    unsafe fn copy(&self, handle: StreamHandle, transfer: Transfer) -> Result<()> {
        // SAFETY: the caller promises what `submit_copy` asks for: its contract is this function's.
        unsafe { self.submit_copy(handle, transfer) }
    }

    unsafe fn copy_blocking(&self, handle: StreamHandle, transfer: Transfer) -> Result<()> {
        // SAFETY: the caller promises what `copy_here` asks for: its contract is this function's.
        unsafe { self.copy_here(handle, transfer) }
    }

    fn create_event(&self) -> Result<EventHandle> {
        self.event_create()
    }

    fn destroy_event(&self, handle: EventHandle) -> Result<()> {
        self.event_destroy(handle)
    }

    fn record(&self, handle: EventHandle, on: StreamHandle) -> Result<()> {
        self.event_record(handle, on)
    }

    fn query(&self, handle: EventHandle) -> Result<bool> {
        self.event_query(handle)
    }

    fn wait_event(&self, on: StreamHandle, handle: EventHandle) -> Result<()> {
        self.event_wait(on, handle)
    }
}

impl Drop for Acl {
    fn drop(&mut self) {
        // A lost device stays set, like everything else there.
        if self.lost.get().is_some() {
            return self.leaked();
        }
        self.events_end();
        if self.default {
            let (api, name, ordinal) = (self.api, self.name.clone(), self.ordinal);
            self.ending.end(&self.name, false, move || reset(api, &name, ordinal));
        }
    }
}
