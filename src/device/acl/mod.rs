//! Ascend NPUs, through AscendCL (the C interface `libascendcl.so` of Huawei's CANN).
//!
//! [`api`] finds the library at run time; here its calls are made to keep the contract's rules. What is relied on is
//! what its documentation and headers say, from 2022 on; no hardware was at hand, and the crate's documentation says
//! so.
//!
//! # Contexts
//!
//! A context is current on each thread by itself. The pool works in the device's *default* context, the one that
//! `aclrtSetDevice` gives to every thread and that the frameworks use; it is counted once by `aclrtSetDevice` when the
//! device is opened and let go by `aclrtResetDevice` when the last thing that needs it is gone. `aclrtSetDevice`
//! changes what is current, and a thread cannot be made to have nothing current again. So that call is made on a thread
//! that ends at once, and every other call looks what is current, sets ours where that is not it, and puts the caller's
//! back. A thread that had none keeps ours: that is all that the library offers.
//!
//! # A device that is lost
//!
//! After an error that ends the device, or the library, no further call is made for it, whatever it is: nothing is
//! freed, unregistered or destroyed, since the documentation does not say that the hardware has let go. All of it stays
//! for good.
//!
//! # Files
//!
//! [`api`]: the library. [`error`], [`names`]: its codes. [`host`]: page-locked memory, and what is known to be such.
//! [`memory`]: the device's. [`copy`]: copies, and which of them may run by themselves. [`event`]: events of three
//! kinds, by what the library has. [`adopt`]: contexts and streams of others. [`gate`]: the process's end.

mod adopt;
mod api;
mod copy;
mod error;
mod event;
mod gate;
mod host;
mod memory;
mod names;

use std::any::Any;
use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

pub(crate) use self::adopt::{ContextFacts, adopt};
use self::api::{AclApi, AclContext, AclStream};
pub(crate) use self::api::{library_candidates, use_library};
use self::error::AclCode;
use self::event::AclEvents;
use super::ending::{Ending, KeepAlive};
use super::holds::Last;
use super::{DevicePtr, Driver, EventHandle, HostKind, StreamHandle, Transfer};
use crate::error::{DeviceError, Error, ErrorClass, Result};

/// acl_rt.h: aclrtRunMode's ACL_DEVICE: this program runs on the device itself, and its memory is the device's.
const RUN_ON_DEVICE: c_int = 0;
/// acl_rt.h: aclrtStreamStatus's ACL_STREAM_STATUS_COMPLETE.
const STREAM_COMPLETE: c_int = 0;
/// How long a stream that is to be destroyed is waited for, in milliseconds. What others have queued there should be
/// done.
const LAST_WAIT_MS: i32 = 10_000;
/// More than one allocation can have: some 200 GB and more were refused on machines with as much to spare.
const LONGEST_PIN: usize = 128 << 30;

/// One context of an Ascend device.
#[derive(Debug)]
pub(crate) struct Acl {
    api: &'static AclApi,
    name: Arc<str>,
    /// Counted as the library counts those that the process may see.
    ordinal: i32,
    context: AclContext,
    /// Whether the program runs on the device itself ("RC mode").
    on_device: bool,
    events: AclEvents,
    host: host::Host,
    /// Handles that others made streams under.
    foreign: adopt::Foreign,
    /// The device's default context, counted once. Others are the server's.
    default: bool,
    /// What the device was lost with.
    lost: OnceLock<DeviceError>,
    ending: Ending,
}

// SAFETY: a context may be current on any thread, on several at once; the library does its own locking.
unsafe impl Send for Acl {}
// SAFETY: as above.
unsafe impl Sync for Acl {}

/// The driver of Ascend device `ordinal`.
///
/// # Errors
/// [`Error::Unavailable`] without a usable library or without any device, [`Error::UnknownDevice`] for a bad ordinal,
/// and what the library says where it cannot use the device.
pub(crate) fn driver(ordinal: u32) -> Result<Arc<dyn Driver>> {
    let name: Arc<str> = format!("acl:{ordinal}").into();
    let api = AclApi::get(&name)?;
    let mut count = 0;
    // SAFETY: writes a number.
    match unsafe { (api.device_count)(&raw mut count) } {
        // Some say so where there is none.
        AclCode::NO_DEVICE => {
            api.expected();
            count = 0;
        }
        // Of no device in particular: the next one would have the same.
        code => check(api, &name, "aclrtGetDeviceCount", code)
            .map_err(|error| Error::Unavailable { device: name.to_string(), why: error.to_string() })?,
    }
    if ordinal >= count {
        return Err(no_such(&name, count));
    }
    let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
    let found = FoundContext::default_of(api, &name, ordinal)?;
    let driver = Arc::new(Acl::new(api, name, ordinal, found, true));
    host::opened(&driver);
    Ok(driver)
}

/// Why no device can be opened where there are `count`.
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

/// A context, and what is asked in it.
struct FoundContext {
    context: AclContext,
    on_device: bool,
}

// SAFETY: a context may be current on any thread.
unsafe impl Send for FoundContext {}

impl FoundContext {
    /// The default context of a device, which is counted once more.
    fn default_of(api: &'static AclApi, name: &Arc<str>, ordinal: i32) -> Result<Self> {
        on_other_thread(name, || {
            // SAFETY: the call takes a number.
            check(api, name, "aclrtSetDevice", unsafe { (api.set_device)(ordinal) })?;
            let found = Self::current(api, name);
            if found.is_err() {
                reset(api, name, ordinal);
            }
            found
        })
    }

    /// What is current on this thread.
    fn current(api: &AclApi, name: &Arc<str>) -> Result<Self> {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes a handle.
        check(api, name, "aclrtGetCurrentContext", unsafe { (api.context_get)(&raw mut context) })?;
        let mut mode: c_int = -1;
        // SAFETY: writes a number.
        check(api, name, "aclrtGetRunMode", unsafe { (api.run_mode)(&raw mut mode) })?;
        Ok(Self { context, on_device: mode == RUN_ON_DEVICE })
    }
}

/// Runs something on a thread of its own, so that no caller's thread has its device changed.
fn on_other_thread<R: Send>(name: &Arc<str>, run: impl FnOnce() -> Result<R> + Send) -> Result<R> {
    let unavailable = |why: String| Error::Unavailable { device: name.to_string(), why };
    std::thread::scope(|scope| {
        let thread = crate::os::thread::spawn_scoped(scope, format!("pinpool-{name}-open"), run);
        let thread = thread.map_err(|error| unavailable(format!("no thread could be started: {error}")))?;
        thread.join().unwrap_or_else(|_| Err(unavailable("the thread that opens it panicked".into())))
    })
}

/// Takes back one `aclrtSetDevice`. On a thread of ours. Whether it was.
fn reset(api: &AclApi, name: &Arc<str>, ordinal: i32) -> bool {
    gate::enter();
    let Some(_pass) = gate::pass() else { return false };
    // SAFETY: the call takes a number, and is one for one that set it.
    let reset = check(api, name, "aclrtResetDevice", unsafe { (api.reset_device)(ordinal) });
    if let Err(error) = &reset {
        crate::foreign::warn!(target: "pinpool::device", device = &**name, %error, "a device stays set");
    }
    reset.is_ok()
}

fn check(api: &AclApi, device: &Arc<str>, call: &'static str, code: AclCode) -> Result<()> {
    if code == AclCode::SUCCESS { Ok(()) } else { Err(Error::Device(failed(api, device, call, code))) }
}

/// With the library's own message, which the next call on this thread may overwrite.
#[cold]
fn failed(api: &AclApi, device: &Arc<str>, call: &'static str, code: AclCode) -> DeviceError {
    let text = match api.recent() {
        Some(said) => format!("{}: {said}", code.name()),
        None => code.name().to_owned(),
    };
    DeviceError { device: device.clone(), call, code: code.0.into(), text: text.into(), class: code.class() }
}

/// Adds to the library's words what to do.
fn advise(error: Error, remedy: &str) -> Error {
    match error {
        Error::Device(error) => {
            let text = format!("{}; {remedy}", error.text).into();
            Error::Device(DeviceError { text, ..error })
        }
        error => error,
    }
}

/// Our context is current on this thread, for as long as this lives. Then the caller's is again, if there was one.
#[must_use]
struct AclCurrent<'a> {
    api: &'a AclApi,
    theirs: Option<AclContext>,
    /// Dropped last.
    _pass: Option<gate::Pass>,
}

impl<'a> AclCurrent<'a> {
    /// Makes a context current.
    fn enter(
        api: &'a AclApi,
        name: &Arc<str>,
        context: AclContext,
        pass: Option<gate::Pass>,
    ) -> Result<Self> {
        let mut current: AclContext = std::ptr::null_mut();
        // SAFETY: writes a handle.
        let theirs = match unsafe { (api.context_get)(&raw mut current) } {
            AclCode::SUCCESS if current == context => return Ok(Self { api, theirs: None, _pass: pass }),
            AclCode::SUCCESS => Some(current),
            AclCode::CONTEXT_NULL => {
                api.expected();
                None
            }
            code => return Err(Error::Device(failed(api, name, "aclrtGetCurrentContext", code))),
        };
        // SAFETY: a context that is kept for as long as the driver is there.
        check(api, name, "aclrtSetCurrentContext", unsafe { (api.context_set)(context) })?;
        Ok(Self { api, theirs, _pass: pass })
    }
}

impl Drop for AclCurrent<'_> {
    fn drop(&mut self) {
        if let Some(theirs) = self.theirs {
            // It can only fail for a context that was destroyed meanwhile.
            // SAFETY: what was current when this was made.
            if unsafe { (self.api.context_set)(theirs) } != AclCode::SUCCESS {
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
            foreign: adopt::Foreign::default(),
            default,
            lost: OnceLock::new(),
            ending: Ending::new(),
        }
    }

    /// Every outcome of a call for this device comes by here: after the one that ends it there is no other.
    fn said(&self, call: &'static str, code: AclCode) -> Result<()> {
        if code == AclCode::SUCCESS {
            return Ok(());
        }
        let error = failed(self.api, &self.name, call, code);
        if matches!(error.class, ErrorClass::DeviceLost | ErrorClass::Shutdown) {
            let _ = self.lost.set(error.clone());
        }
        Err(Error::Device(error))
    }

    /// Leave to make a call. An error, if the device was lost or the process ends.
    fn alive(&self) -> Result<gate::Pass> {
        if let Some(error) = self.lost.get() {
            return Err(Error::Device(error.clone()));
        }
        gate::pass().ok_or_else(|| {
            Error::Device(DeviceError {
                device: self.name.clone(),
                call: "a call",
                code: AclCode::UNINITIALIZED.0.into(),
                text: "not made, since the process ends".into(),
                class: ErrorClass::Shutdown,
            })
        })
    }

    /// Makes our context current, for a call that needs one.
    fn current(&self) -> Result<AclCurrent<'_>> {
        let pass = self.alive()?;
        AclCurrent::enter(self.api, &self.name, self.context, Some(pass)).inspect_err(|error| {
            if let Error::Device(error) = error {
                if matches!(error.class, ErrorClass::DeviceLost | ErrorClass::Shutdown) {
                    let _ = self.lost.set(error.clone());
                }
            }
        })
    }

    /// Something of the device's stays for good.
    fn leaked(&self) {
        self.ending.leaked();
    }

    /// Waits until the device has nothing to do.
    fn drained(&self) -> Result<()> {
        let _current = self.current()?;
        // SAFETY: the call takes nothing.
        self.said("aclrtSynchronizeDevice", unsafe { (self.api.device_synchronize)() })
    }

    /// Waits until the stream has nothing to do.
    fn drained_stream(&self, handle: StreamHandle) -> Result<()> {
        // SAFETY: a stream that is alive.
        self.said("aclrtSynchronizeStream", unsafe { (self.api.stream_synchronize)(stream(handle)) })
    }

    /// Waits for the last work on a stream that is to be destroyed, if others have left some there.
    fn last_work(&self, handle: StreamHandle) -> Result<()> {
        if let Some(query) = self.api.stream_query {
            let mut status = !STREAM_COMPLETE;
            // SAFETY: a stream of ours, and a place for a number.
            self.said("aclrtStreamQuery", unsafe { query(stream(handle), &raw mut status) })?;
            if status == STREAM_COMPLETE {
                return Ok(());
            }
        }
        match self.api.stream_synchronize_timeout {
            Some(wait) => {
                // SAFETY: a stream of ours.
                let code = unsafe { wait(stream(handle), LAST_WAIT_MS) };
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
        gate::enter();
        let Some(_pass) = gate::pass() else { return };
        // Where it fails the thread is like any other, and each call does it for itself.
        // SAFETY: our context, which is kept for as long as the driver is there.
        if unsafe { (self.api.context_set)(self.context) } != AclCode::SUCCESS {
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
        // SAFETY: the caller's word: mapped, and stays so.
        unsafe { self.host_register(base, len, false) }
    }

    unsafe fn unpin(&self, base: NonNull<u8>, _len: usize) -> Result<()> {
        // SAFETY: the caller's word: registered once, unregistered once.
        unsafe { self.host_unregister(base) }
    }

    unsafe fn register(&self, base: NonNull<u8>, len: usize, read_only: bool) -> Result<()> {
        // SAFETY: the caller's word: mapped, and stays so.
        unsafe { self.host_register(base, len, read_only) }
    }

    unsafe fn unregister(&self, base: NonNull<u8>, _len: usize) -> Result<()> {
        // SAFETY: the caller's word: registered once, unregistered once.
        unsafe { self.host_unregister(base) }
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
        // SAFETY: the caller's word: allocated once, freed once, and nobody uses it.
        unsafe { self.host_free(base) }
    }

    unsafe fn zero(&self, at: NonNull<u8>, len: usize) -> Result<()> {
        // SAFETY: the caller's word.
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
        self.said("aclrtCreateStream", unsafe { (self.api.stream_create)(&raw mut stream) })?;
        let handle = StreamHandle(stream as usize as u64);
        // Whatever had that handle before is gone.
        self.foreign.forget(handle);
        Ok(handle)
    }

    fn destroy_stream(&self, handle: StreamHandle) -> Result<()> {
        let _current = self.current()?;
        self.last_work(handle)?;
        // SAFETY: made by us, destroyed once, and its context is current.
        self.said("aclrtDestroyStream", unsafe { (self.api.stream_destroy)(stream(handle)) })
    }

    unsafe fn copy(&self, handle: StreamHandle, transfer: Transfer) -> Result<()> {
        // SAFETY: the caller's word.
        unsafe { self.submit_copy(handle, transfer) }
    }

    unsafe fn copy_blocking(&self, handle: StreamHandle, transfer: Transfer) -> Result<()> {
        // SAFETY: the caller's word.
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
        if crate::os::forked() {
            return;
        }
        // A lost device stays set, as everything there stays.
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
