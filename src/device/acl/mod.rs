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
//! | `error.rs` | classes and names of its error codes |
//! | this one | opening a device, the current context; streams |
//! | `host.rs` | host memory: allocated by the library, registered, and which of it is page-locked |
//! | `memory.rs` | device memory, and the check of memory that the crate did not allocate |
//! | `copy.rs` | copies, and which of them may be asynchronous |
//! | `event.rs` | events of three kinds, by what the library has |
//! | `adopt.rs` | contexts and streams that the program made |
//!
//! The public module `acl` also calls what only Ascend has: by [`Driver::as_any`] it gets the [`Acl`] itself.
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

use std::any::Any;
use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

pub use self::adopt::About;
pub(crate) use self::adopt::adopt;
use self::api::{AclApi, AclContext, AclStream};
use self::error::AclCode;
use self::event::AclEvents;
use super::ending::Ending;
use super::gate;
use super::vendor::no_such;
use super::{DevicePtr, Driver, EventHandle, HostKind, StreamHandle, Transfer};
use crate::error::{DeviceError, Error, Result};
use crate::exit::{self, Pass};

/// acl_rt.h: aclrtRunMode's ACL_DEVICE: this program runs on the device itself, and its memory is the device's.
const RUN_ON_DEVICE: c_int = 0;
/// How long a call waits for a stream that is to be destroyed, in milliseconds. Work that the program has queued there
/// should be complete by then.
const LAST_WAIT_MS: i32 = 10_000;
/// The most bytes that one call allocates or pins. Allocations of some 200 GB and more are known to be refused on
/// machines with as much free.
const LONGEST_PIN: usize = 128 << 30;

const NO_DEVICE: &str = "no Ascend device is visible to this process: see npu-smi info, ASCEND_RT_VISIBLE_DEVICES, and \
                         the devices given to the container (/dev/davinci*)";

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
    /// Whether host memory may not start on a page: see `host`.
    pads: AtomicBool,
    /// Whether this is the device's default context, counted once. Another one is the program's.
    default: bool,
    /// The error that the device was lost with.
    lost: OnceLock<Error>,
    ending: Ending,
}

// SAFETY: a context may be current on any thread, on several at once; the library takes its own locks.
unsafe impl Send for Acl {}
// SAFETY: as above.
unsafe impl Sync for Acl {}

/// [`AclApi::install`].
pub(crate) fn install(first: u32, find: super::vendor::Find<'_>) -> std::result::Result<(), &'static str> {
    AclApi::install(first, find)
}

/// Opens Ascend device `ordinal`.
///
/// # Errors
/// [`Error::Unavailable`] without a usable library or without any device, [`Error::UnknownDevice`] for a bad ordinal,
/// and what the library says where it cannot use the device.
pub(crate) fn driver(ordinal: u32) -> Result<Arc<dyn Driver>> {
    let name: Arc<str> = format!("acl:{ordinal}").into();
    let api = AclApi::get(&name, Some(ordinal))?;
    let mut count = 0;
    // SAFETY: writes a number.
    match unsafe { api.device_count.call(&raw mut count) } {
        // Some versions answer with this code where there is no device.
        AclCode::NO_DEVICE => {
            api.expected();
            count = 0;
        }
        // Not an error of this device: `auto` need not try the next ordinal.
        code => check(api, &name, "aclrtGetDeviceCount", code)
            .map_err(|error| Error::unavailable(&name, &error))?,
    }
    if ordinal >= count {
        return Err(no_such("acl", &name, count, NO_DEVICE));
    }
    let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
    let own = name.clone();
    let (context, on_device) = on_other_thread(&name, move || {
        // SAFETY: the call takes a number.
        check(api, &own, "aclrtSetDevice", unsafe { api.set_device.call(ordinal) })?;
        current_context(api, &own).inspect_err(|_| _ = reset(api, &own, ordinal))
    })?;
    // Making the context may have registered exit handlers of the library's.
    gate::watch_exit();
    Ok(Acl::start(api, name, ordinal, context, on_device, true))
}

/// The address of the context that is current on this thread, and whether the program runs on the device itself.
fn current_context(api: &AclApi, name: &Arc<str>) -> Result<(usize, bool)> {
    let (mut context, mut mode): (AclContext, c_int) = (std::ptr::null_mut(), -1);
    // SAFETY: writes a handle.
    check(api, name, "aclrtGetCurrentContext", unsafe { api.context_get.call(&raw mut context) })?;
    // SAFETY: writes a number.
    check(api, name, "aclrtGetRunMode", unsafe { api.run_mode.call(&raw mut mode) })?;
    Ok((context as usize, mode == RUN_ON_DEVICE))
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
    if code == AclCode::SUCCESS { Ok(()) } else { Err(failed(api, device, call, code)) }
}

/// The error of a call, with the library's own message. The next call on this thread may overwrite that message.
#[cold]
fn failed(api: &AclApi, device: &Arc<str>, call: &'static str, code: AclCode) -> Error {
    let text = match api.recent() {
        _ if exit::exiting() => gate::ENDING.to_owned(),
        Some(said) => format!("{}: {said}", code.name()),
        None => code.name().to_owned(),
    };
    let (device, class) = (device.clone(), code.class());
    Error::Device(DeviceError { device, call, code: code.0.into(), text: text.into(), class })
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
            code => return Err(failed(api, name, "aclrtGetCurrentContext", code)),
        };
        // SAFETY: a context that exists for as long as the driver does.
        check(api, name, "aclrtSetCurrentContext", unsafe { api.context_set.call(context) })?;
        Ok(Self { api, theirs, _pass: pass })
    }
}

impl Drop for AclCurrent<'_> {
    fn drop(&mut self) {
        let Some(theirs) = self.theirs else { return };
        // It can only fail for a context that was destroyed meanwhile. SAFETY: the context that was current when this
        // was made.
        if unsafe { self.api.context_set.call(theirs) } != AclCode::SUCCESS {
            self.api.expected();
        }
    }
}

impl Acl {
    /// The driver for a context, which host memory waits for from now on when it is freed.
    fn start(
        api: &'static AclApi,
        name: Arc<str>,
        ordinal: i32,
        context: usize,
        on_device: bool,
        default: bool,
    ) -> Arc<Self> {
        let driver = Arc::new(Self {
            api,
            name,
            ordinal,
            context: context as AclContext,
            on_device,
            events: AclEvents::of(api),
            pads: on_device.into(),
            default,
            lost: OnceLock::new(),
            ending: Ending::new(),
        });
        host::opened(&driver);
        driver
    }

    /// Every outcome of a call for this device passes here. After an outcome that ends the device no call is made.
    fn said(&self, call: &'static str, code: AclCode) -> Result<()> {
        self.noting(check(self.api, &self.name, call, code))
    }

    fn noting<R>(&self, outcome: Result<R>) -> Result<R> {
        outcome.inspect_err(|error| {
            if error.is_device_lost() {
                let _ = self.lost.set(error.clone());
            }
        })
    }

    /// A pass to make a call. An error, if the device was lost or the process ends.
    fn alive(&self) -> Result<Pass> {
        if let Some(error) = self.lost.get() {
            return Err(error.clone());
        }
        exit::pass().ok_or_else(|| failed(self.api, &self.name, "a call", AclCode::UNINITIALIZED))
    }

    /// Makes the driver's context current, for a call that needs one.
    fn current(&self) -> Result<AclCurrent<'_>> {
        let pass = self.alive()?;
        self.noting(AclCurrent::enter(self.api, &self.name, self.context, Some(pass)))
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
}

fn stream(handle: StreamHandle) -> AclStream {
    handle.0 as usize as AclStream
}

impl Driver for Acl {
    fn name(&self) -> &str {
        &self.name
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn ending(&self) -> &Ending {
        &self.ending
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

    unsafe fn unpin(&self, base: NonNull<u8>, _len: usize) -> Result<()> {
        // SAFETY: the caller promises that the range was registered, that this is the one call that unregisters it, and
        // that no copy uses it.
        unsafe { self.host_unregister(base) }
    }

    unsafe fn register(&self, base: NonNull<u8>, len: usize, _read_only: bool) -> Result<()> {
        // SAFETY: the caller promises that the range is mapped, and stays so.
        unsafe { self.host_register(base, len) }
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
        // In RC mode page-locked memory is the device's too, and the library writes it. Elsewhere the CPU does.
        if !self.on_device || !host::is_locked(at.as_ptr(), len) {
            // SAFETY: the caller promises that the range can be written and is not in use.
            unsafe { at.write_bytes(0, len) };
            return Ok(());
        }
        let _current = self.current()?;
        // SAFETY: the caller promises that the range can be written and is not in use.
        self.said("aclrtMemset", unsafe { self.api.memset.call(at.as_ptr().cast(), len, 0, len) })
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
        let _pass = self.alive()?;
        let fault = self.fault(ptr.0, len)?;
        fault.map_or(Ok(()), |fault| Err(fault.of(&self.name, ptr.0, len)))
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
        // The program may have left work there.
        match self.api.stream_synchronize_timeout {
            Some(wait) => {
                // SAFETY: a stream of this driver that is alive.
                let code = unsafe { wait.call(stream(handle), LAST_WAIT_MS) };
                self.said("aclrtSynchronizeStreamWithTimeout", code)?;
            }
            None => self.drained_stream(handle)?,
        }
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
