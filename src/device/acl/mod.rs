//! The driver of Ascend NPUs, through AscendCL (the C interface `libascendcl.so` of Huawei's CANN).
//!
//! The code depends on the documentation and the headers of that library, from 2024 on. No hardware
//! was at hand, and the crate's documentation says so.
//!
//! # The files, in the order in which to read them
//!
//! | file | what is in it |
//! | --- | --- |
//! | `api.rs` | the library, loaded at run time, and its entry points |
//! | `error.rs` | classes and names of its error codes |
//! | this one | opening a device, the current context; streams and events |
//! | `host.rs` | host memory: allocated by the library, registered, and which of it is page-locked |
//! | `memory.rs` | device memory, and the check of memory that the crate did not allocate |
//! | `copy.rs` | copies, and which of them may be asynchronous |
//! | `adopt.rs` | contexts and streams that the program made |
//!
//! The public module `acl` gets the [`Acl`] by [`Driver::as_any`], for what only Ascend has.
//!
//! # Contexts
//!
//! The crate works in the device's *default* context, which `aclrtSetDevice` gives to every thread,
//! and which the frameworks use. `aclrtSetDevice` counts it once when the device is opened, and
//! the region thread releases it by `aclrtResetDevice`. `aclrtSetDevice` also changes the current
//! context, and no call can make a thread have none again: so a thread that ends at once makes that
//! call. Every call but these two reads the current context, sets the driver's where it is another
//! one, and restores the caller's. A thread that had none keeps the driver's.
//!
//! # Events
//!
//! The contract wants events that can be recorded again and again. Those of
//! `aclrtCreateEventExWithFlag` can, by the documentation: a new recording replaces the old one,
//! and earlier waits keep to the old one. Any status but "complete" means not complete. A record
//! and a query on two threads may be seen in the wrong order, but a timeline publishes an event
//! only after its recording has returned.
//!
//! # A device that is lost
//!
//! After an error that ends the device, or the library, no further call of any kind is made for it.
//! Nothing is freed, unregistered or destroyed, since the documentation does not say that the
//! hardware touches memory no more. All of it stays until the process ends.

mod adopt;
mod api;
mod copy;
mod error;
mod host;
mod memory;

use std::any::Any;
use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

pub use self::adopt::About;
pub(crate) use self::adopt::adopt;
pub use self::api::install;
use self::api::{AclApi, AclContext, AclEvent, AclStream};
use self::error::AclCode;
use self::host::{LOCKED, LockedMemory, REGISTER_MAPPED, REGISTER_PAGE, locked, refused};
use self::memory::{ALLOCATION_ALIGN, ALLOCATIONS};
use super::gate;
use super::vendor::no_such;
use super::{DevicePtr, Driver, EventHandle, HostKind, StreamHandle, Transfer, Whose};
use crate::error::{DeviceError, Error, Result};
use crate::exit::{self, Pass};
use crate::locks::Mutex;
use crate::os;

/// acl_rt.h: aclrtRunMode's ACL_DEVICE: this program runs on the device, in its memory.
const RUN_ON_DEVICE: c_int = 0;
/// How long a call waits for a stream that is to be destroyed, in milliseconds. Work that the
/// program has queued there should be complete by then.
const LAST_WAIT_MS: i32 = 10_000;
/// The most bytes that one call allocates or pins. Allocations of some 200 GB and more are known to
/// be refused on machines with as much free.
const LONGEST_PIN: usize = 128 << 30;
/// acl_rt.h: ACL_EVENT_SYNC and ACL_EVENT_CAPTURE_STREAM_PROGRESS: streams can be made to wait for
/// the event, and it tells how far its stream has come.
const EVENT_FLAGS: u32 = 1 | 2;
/// acl_rt.h: aclrtEventRecordedStatus.
const NOT_READY: c_int = 0;
const COMPLETE: c_int = 1;

const NO_DEVICE: &str = "no Ascend device is visible to this process: see npu-smi info, ASCEND_RT_VISIBLE_DEVICES, and \
                         the devices given to the container (/dev/davinci*)";

/// One context of an Ascend device.
#[derive(Debug)]
pub(crate) struct Acl {
    api: &'static AclApi,
    name: Arc<str>,
    /// The device's number, as the library counts the devices that the process may see.
    ordinal: i32,
    context: AclContext,
    /// Whether the program runs on the device itself ("RC mode").
    on_device: bool,
    /// The event that is recorded to check a stream, once there is one. The lock is for that alone.
    probe: Mutex<Option<EventHandle>>,
    /// Whether host memory may not start on a page: see `host`.
    pads: AtomicBool,
    /// Whether this is the device's default context, counted once. Another one is the program's.
    default: bool,
    /// The error that the device was lost with.
    lost: OnceLock<Error>,
    /// Whether something of the device stays until the process ends.
    leaks: AtomicBool,
    /// Whether this opening was let go of, or is about to be: see [`host::closed`].
    is_over: Mutex<bool>,
}

// SAFETY: a context may be current on any thread, on several at once; the library takes its own
// locks.
unsafe impl Send for Acl {}
// SAFETY: as above.
unsafe impl Sync for Acl {}

/// Opens Ascend device `ordinal`.
///
/// # Errors
/// As for [opening a device](Error#opening-a-device).
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

/// The context that is current on this thread, and whether the program runs on the device.
fn current_context(api: &AclApi, name: &Arc<str>) -> Result<(usize, bool)> {
    let (mut context, mut mode): (AclContext, c_int) = (std::ptr::null_mut(), -1);
    // SAFETY: writes a handle.
    check(api, name, "aclrtGetCurrentContext", unsafe { api.context_get.call(&raw mut context) })?;
    // SAFETY: writes a number.
    check(api, name, "aclrtGetRunMode", unsafe { api.run_mode.call(&raw mut mode) })?;
    Ok((context as usize, mode == RUN_ON_DEVICE))
}

/// Runs something on a thread of its own, so that this thread's current context stays.
fn on_other_thread<R: Send + 'static>(
    name: &Arc<str>,
    run: impl FnOnce() -> Result<R> + Send + 'static,
) -> Result<R> {
    let unavailable = |why: String| Error::Unavailable { device: name.to_string(), why };
    let thread = crate::os::thread::spawn(format!("pinpool-{name}-open"), run);
    let thread = thread.map_err(|error| unavailable(format!("no thread could be started: {error}")))?;
    thread.join().unwrap_or_else(|_| Err(unavailable("the thread that opens it panicked".into())))
}

/// Undoes one `aclrtSetDevice`, on a thread of the crate. Whether it succeeded.
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

/// A call's error, with the library's own message, which this thread's next call may overwrite.
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

/// Keeps the driver's context current on this thread. Its drop restores the caller's, if any.
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
        // SAFETY: a context that exists until the driver is let go of.
        check(api, name, "aclrtSetCurrentContext", unsafe { api.context_set.call(context) })?;
        Ok(Self { api, theirs, _pass: pass })
    }
}

impl Drop for AclCurrent<'_> {
    fn drop(&mut self) {
        let Some(theirs) = self.theirs else { return };
        // It can only fail for a context that was destroyed meanwhile. SAFETY: the context that was
        // current when this was made.
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
            probe: Mutex::default(),
            pads: on_device.into(),
            default,
            lost: OnceLock::new(),
            leaks: AtomicBool::new(false),
            is_over: Mutex::default(),
        });
        host::opened(&driver);
        driver
    }

    /// Every call's outcome passes here. After one that ends the device no call is made.
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

    /// Notes that something of the device stays until the process ends.
    fn leaked(&self) {
        self.leaks.store(true, Ordering::Relaxed);
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

fn event(handle: EventHandle) -> AclEvent {
    handle.0 as usize as AclEvent
}

impl Driver for Acl {
    fn name(&self) -> &str {
        &self.name
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn let_go(&self) -> bool {
        host::closed(self);
        // A lost device stays set, like everything else there.
        if self.lost.get().is_some() {
            return false;
        }
        // The program's earlier work may still run; destroying an event waits for nothing.
        let probe = self.probe.lock().take();
        if let Some(Err(error)) = probe.map(|event| self.destroy_event(event)) {
            self.leaked();
            crate::foreign::warn!(target: "pinpool::device", device = &*self.name, %error, "an event is leaked");
        }
        (!self.default || reset(self.api, &self.name, self.ordinal)) && !self.leaks.load(Ordering::Relaxed)
    }

    fn enter_thread(&self) {
        // Where it fails the thread is like any other, and each call sets the context itself.
        // SAFETY: the driver's context, which exists until it is let go of.
        if unsafe { self.api.context_set.call(self.context) } != AclCode::SUCCESS {
            self.api.expected();
        }
    }

    fn longest_pin(&self) -> usize {
        LONGEST_PIN
    }

    fn allocates(&self) -> bool {
        true
    }

    unsafe fn unpin(&self, base: NonNull<u8>, _len: usize) -> Result<()> {
        let (found, Some(unregister)) = (self.host_locked(base)?, self.api.host_unregister) else {
            return Err(Error::Unsupported(format!("{} registers no memory", self.name)));
        };
        self.drain_all()?;
        let _current = self.current()?;
        let pages = base.as_ptr().map_addr(|_| found.from);
        // SAFETY: the caller promises that no copy uses it; `pages` is what was registered.
        self.said("aclrtHostUnregister", unsafe { unregister.call(pages.cast()) })?;
        // After the call: on an error the pages are still registered. No other caller gets the
        // addresses before this returns.
        LOCKED.lock().remove(&base.as_ptr().addr());
        Ok(())
    }

    unsafe fn register(&self, base: NonNull<u8>, len: usize, _whose: Whose) -> Result<()> {
        let unsupported = |why: String| Err(Error::Unsupported(format!("{}: {why}", self.name)));
        let (Some(register), Some(_)) = (self.api.host_register, self.api.host_unregister) else {
            return unsupported(
                "this libascendcl.so has no aclrtHostRegister (CANN 8.2 and later do), so memory that it did not allocate \
                 cannot be page-locked; copy by way of a pool with Backing::HostAlloc"
                    .into(),
            );
        };
        let start = base.as_ptr().addr();
        let end = start.checked_add(len).filter(|end| *end <= usize::MAX - REGISTER_PAGE);
        let Some(end) = end else { return Err(Error::out_of_range(start, usize::MAX, len)) };
        let (from, to) = (start / REGISTER_PAGE * REGISTER_PAGE, end.next_multiple_of(REGISTER_PAGE));
        if LOCKED.lock().values().any(|found| found.from < to && from < found.to) {
            return unsupported(format!(
                "a page of {REGISTER_PAGE} bytes under this memory is page-locked already, and Ascend registers whole pages, \
                 once: register it once and share the value (Arc), start it on a page of its own, or copy by way of a pool's \
                 buffer"
            ));
        }
        if os::is_writable(from, to - from) == Some(false) {
            return unsupported(
                "this memory cannot be written to, and Ascend registers no memory that its process cannot write: copy by way \
                 of a pool's buffer, or map it privately and for writing"
                    .into(),
            );
        }
        let pages = base.as_ptr().map_addr(|_| from);
        let mut device = std::ptr::null_mut();
        let _current = self.current()?;
        // SAFETY: the caller promises the range; the rest of the pages at both ends is mapped,
        // since a system page is mapped as a whole.
        let code =
            unsafe { register.call(pages.cast(), (to - from) as u64, REGISTER_MAPPED, &raw mut device) };
        self.said("aclrtHostRegister", code).map_err(|error| refused(code, error))?;
        let of_start = device.addr() as u64 + (start - from) as u64;
        let device = (!device.is_null()).then_some((self.ordinal, of_start));
        LOCKED.lock().insert(start, LockedMemory { len, from, to, device });
        Ok(())
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
        let page = os::page_size();
        // Relaxed, here and below: a thread that reads an old value makes one more call.
        let mut all = if self.pads.load(Ordering::Relaxed) { len.saturating_add(page) } else { len };
        let mut at = self.host_malloc(all)?;
        if all == len && at.as_ptr().addr() % page != 0 {
            self.pads.store(true, Ordering::Relaxed);
            // SAFETY: allocated just now, and not in use.
            unsafe { self.host_free_at(at) }.inspect_err(|_| self.leaked())?;
            all = len.saturating_add(page);
            at = self.host_malloc(all)?;
        }
        let from = at.as_ptr().expose_provenance();
        let front = from.next_multiple_of(page) - from;
        // SAFETY: `front` is less than a page, and unless it is 0 the allocation has a page more.
        let base = unsafe { at.add(front) };
        let entry = LockedMemory { len, from, to: from + all, device: None };
        LOCKED.lock().insert(base.as_ptr().addr(), entry);
        Ok(base)
    }

    unsafe fn free_host(&self, base: NonNull<u8>, _len: usize, _kind: HostKind) -> Result<()> {
        let found = self.host_locked(base)?;
        self.drain_all()?;
        // Before the call: another thread may be given the same addresses at once.
        LOCKED.lock().remove(&base.as_ptr().addr());
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut(found.from)).unwrap_or(base);
        // SAFETY: the caller's promise, and `start` is the address that the library gave.
        unsafe { self.host_free_at(start) }.inspect_err(|_| {
            // The memory stays, and stays page-locked.
            LOCKED.lock().insert(base.as_ptr().addr(), found);
        })
    }

    unsafe fn zero(&self, at: NonNull<u8>, len: usize) -> Result<()> {
        // In RC mode page-locked memory is the device's, and the library writes it.
        if !self.on_device || locked(at.as_ptr().addr(), len).is_none() {
            // SAFETY: the caller promises that the range can be written and is not in use.
            unsafe { at.write_bytes(0, len) };
            return Ok(());
        }
        let _current = self.current()?;
        // SAFETY: the caller promises that the range can be written and is not in use.
        self.said("aclrtMemset", unsafe { self.api.memset.call(at.as_ptr().cast(), len, 0, len) })
    }

    fn device_address(&self, at: NonNull<u8>) -> Result<u64> {
        let _pass = self.alive()?;
        let address = at.as_ptr().addr();
        match locked(address, 1) {
            Some((start, LockedMemory { device: Some((ordinal, device)), .. }))
                if ordinal == self.ordinal =>
            {
                Ok(device + (address - start) as u64)
            }
            _ => Err(Error::Unsupported(format!(
                "{} has no address of its own for this memory: only what was registered with this very device has \
                 (Device::register, Pool::adopt, Backing::Registered); copy the buffer instead",
                self.name
            ))),
        }
    }

    fn allocate(&self, len: usize) -> Result<DevicePtr> {
        let mut at = self.malloc(len)?;
        if at % ALLOCATION_ALIGN != 0 {
            self.free_at(at).inspect_err(|_| self.leaked())?;
            at = self.malloc(len.saturating_add(ALLOCATION_ALIGN as usize))?;
        }
        let start = at.next_multiple_of(ALLOCATION_ALIGN);
        ALLOCATIONS.lock().insert((self.ordinal, start), (len, at));
        Ok(DevicePtr(start))
    }

    fn free(&self, ptr: DevicePtr) -> Result<()> {
        let _pass = self.alive()?;
        let found = ALLOCATIONS.lock().remove(&(self.ordinal, ptr.0));
        let (_, at) = found.ok_or_else(|| {
            Error::Unsupported(format!("{}: no memory of aclrtMalloc starts there", self.name))
        })?;
        self.free_at(at)
    }

    fn examine(&self, ptr: DevicePtr, len: usize) -> Result<()> {
        let _pass = self.alive()?;
        self.fault(ptr.0, len).map_or(Ok(()), |fault| Err(fault.of(&self.name, ptr.0, len)))
    }

    fn create_stream(&self, _urgent: bool) -> Result<StreamHandle> {
        let _current = self.current()?;
        let mut stream: AclStream = std::ptr::null_mut();
        // SAFETY: writes a handle.
        self.said("aclrtCreateStream", unsafe { self.api.stream_create.call(&raw mut stream) })?;
        Ok(StreamHandle(stream as usize as u64))
    }

    fn destroy_stream(&self, handle: StreamHandle) -> Result<()> {
        let _current = self.current()?;
        // The program may have left work there. SAFETY: a stream of this driver that is alive.
        let code = unsafe { self.api.stream_synchronize_timeout.call(stream(handle), LAST_WAIT_MS) };
        self.said("aclrtSynchronizeStreamWithTimeout", code)?;
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
        let _current = self.current()?;
        let mut event: AclEvent = std::ptr::null_mut();
        // SAFETY: writes a handle.
        let code = unsafe { self.api.event_create.call(&raw mut event, EVENT_FLAGS) };
        self.said("aclrtCreateEventExWithFlag", code)?;
        Ok(EventHandle(event as usize as u64))
    }

    fn destroy_event(&self, handle: EventHandle) -> Result<()> {
        let _pass = self.alive()?;
        // SAFETY: created by this driver, destroyed once.
        self.said("aclrtDestroyEvent", unsafe { self.api.event_destroy.call(event(handle)) })
    }

    fn record(&self, handle: EventHandle, on: StreamHandle) -> Result<()> {
        let _current = self.current()?;
        // SAFETY: an event and a stream that are alive, and the stream's context is current.
        self.said("aclrtRecordEvent", unsafe { self.api.event_record.call(event(handle), stream(on)) })
    }

    fn query(&self, handle: EventHandle) -> Result<bool> {
        let _pass = self.alive()?;
        let mut status = NOT_READY;
        // SAFETY: an event that is alive, and a place for a number.
        let code = unsafe { self.api.event_query.call(event(handle), &raw mut status) };
        self.said("aclrtQueryEventStatus", code)?;
        Ok(status == COMPLETE)
    }

    fn wait_event(&self, on: StreamHandle, handle: EventHandle) -> Result<()> {
        let _current = self.current()?;
        // SAFETY: a stream and an event that are alive, and the stream's context is current.
        let code = unsafe { self.api.stream_wait_event.call(stream(on), event(handle)) };
        self.said("aclrtStreamWaitEvent", code)
    }
}
