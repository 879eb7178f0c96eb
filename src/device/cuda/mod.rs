//! The driver of NVIDIA GPUs, through the CUDA driver API.
//!
//! # The files, in the order in which to read them
//!
//! | file | what is in it |
//! | --- | --- |
//! | `api.rs` | the library, loaded at run time, and its entry points; classes of error codes |
//! | this one | opening a GPU, the current context, capture modes; streams, events and single copies |
//! | `host.rs` | what the driver asks and answers about host memory; the limit of the heap on the device |
//! | `batch.rs` | many copies by one call |
//! | `spread/` | kernels that spread bytes over device memory and collect them, and streams of high priority |
//! | `pointers.rs` | the check of memory that the crate did not allocate |
//! | `adopt.rs`, `graph.rs` | contexts and streams that the program made; buffers tied to a captured graph |
//!
//! The crate calls this through [`Driver`]. The public modules `cuda` and `cudarc` also call what
//! only CUDA has: by [`Driver::as_any`] they get the [`Cuda`] itself.
//!
//! # Contexts
//!
//! The crate works in the device's primary context, the one that the runtime API, cudarc and the
//! frameworks use too. It is retained when the device is opened, and released by the last call of
//! the region thread. A context of the program's can be [adopted](adopt()) instead, and is never
//! destroyed. The crate's context is always current on its own threads. Elsewhere each call pushes
//! it, unless it is current, and pops it. The two most frequent calls do without, since sixteen
//! threads that push and pop take 1.7 us each (H100, driver 580): `cuEventQuery` and
//! `cuStreamIsCapturing` take the context of their handle, and name no error of a context in the
//! driver API manual.
//!
//! # Captures
//!
//! While any thread captures a graph in global mode, many calls are forbidden to every thread and
//! would spoil the capture (CUDA says: invalidate it); a query of an event is one of them. In
//! relaxed mode a thread declares that its calls have nothing to do with any capture. The crate's
//! threads are in that mode all the time, and others for the length of a call that needs it.
//!
//! # What is leaked
//!
//! Where the driver has shut down first (a process that exits, a fork), the crate calls nothing any
//! more and leaves everything as it is.

mod adopt;
mod api;
mod batch;
mod graph;
mod host;
mod pointers;
mod spread;

use std::any::Any;
use std::cell::Cell;
use std::ffi::{CStr, c_int};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

pub(crate) use self::adopt::adopt;
#[cfg(feature = "cudarc")]
pub(crate) use self::adopt::{LEGACY, PER_THREAD};
pub use self::api::install;
use self::api::{CUcontext, CUdevice, CUevent, CUstream, CudaApi, CudaCode};
use self::host::*;
use super::vendor::{advise, no_such, wait_out};
use super::{
    DevicePtr, Driver, EventHandle, GraphEnd, HostAllocFlags, HostKind, SpreadRun, SpreadWay, StreamHandle,
    Transfer, Whose,
};
use crate::error::{DeviceError, Error, ErrorClass, Result};
use crate::exit::{self, Pass};
use crate::locks::Mutex;
use crate::os;

/// cuda.h: CU_STREAM_NON_BLOCKING: no implicit order with the legacy default stream.
const NON_BLOCKING: u32 = 1;
/// cuda.h: CU_EVENT_DISABLE_TIMING, which makes recording several times cheaper.
const DISABLE_TIMING: u32 = 2;
/// cuda.h: CU_STREAM_CAPTURE_MODE_RELAXED.
const RELAXED: u32 = 2;

/// cuda.h: CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS: host and device may use it at once.
const CONCURRENT_MANAGED_ACCESS: c_int = 89;
/// cuda.h: CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, from CUDA 12.2 on.
const HOST_NUMA_ID: c_int = 134;

thread_local! {
    /// Whether this is a thread of the crate: its context is always current, its mode always
    /// relaxed.
    static CUDA_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// One context of a GPU.
#[derive(Debug)]
pub(crate) struct Cuda {
    api: &'static CudaApi,
    name: Arc<str>,
    /// The GPU's number, as the driver counts.
    ordinal: c_int,
    device: CUdevice,
    context: CUcontext,
    numa_node: Option<u32>,
    /// Whether it is the primary context, which the crate has retained once; else the program's.
    primary: bool,
    /// Whether batches of copies can have addresses of host memory: see [`batch`].
    host_batches: bool,
    /// Held while a batch of copies is submitted: see [`batch`].
    batches: Mutex<()>,
    /// Whether registering host memory was found not to be supported.
    allocates: AtomicBool,
    /// The kernels that spread and collect, or why there are none; empty until they were asked for.
    kernels: OnceLock<Result<spread::Kernels>>,
}

// SAFETY: a context may be used from any thread; the driver takes its own locks.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

/// Opens GPU `ordinal`, as the driver counts the GPUs that the process may see.
///
/// # Errors
/// As for [opening a device](Error#opening-a-device).
pub(crate) fn driver(ordinal: u32) -> Result<Arc<dyn Driver>> {
    let name: Arc<str> = format!("cuda:{ordinal}").into();
    let api = CudaApi::get(&name, Some(ordinal))?;
    let _relaxed = CudaCurrent::relaxed(api, false);
    let said = |call, code| check(api, &name, call, code);
    let mut count: c_int = 0;
    // SAFETY: writes a number.
    said("cuDeviceGetCount", unsafe { api.device_count.call(&raw mut count) })
        // Not an error of this device: `auto` need not try the next ordinal.
        .map_err(|error| Error::unavailable(&name, &error))?;
    let index = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
    if index >= count {
        return Err(no_such("cuda", &name, count.unsigned_abs(), api::NO_GPU));
    }
    let mut device: CUdevice = 0;
    // SAFETY: writes a handle.
    said("cuDeviceGet", unsafe { api.device_get.call(&raw mut device, index) })?;
    let mut context: CUcontext = std::ptr::null_mut();
    // SAFETY: writes a handle.
    said("cuDevicePrimaryCtxRetain", unsafe { api.primary_retain.call(&raw mut context, device) })?;
    // Making the context may have registered exit handlers of the driver's.
    crate::device::gate::watch_exit();
    Ok(Arc::new(Cuda::new(api, name, index, device, context, true)))
}

/// The host's NUMA node that a GPU is attached to, as the driver says, else as the system says.
fn numa_node(api: &CudaApi, device: CUdevice) -> Option<u32> {
    let mut node: c_int = -1;
    // SAFETY: writes a number.
    let code = unsafe { api.device_attribute.call(&raw mut node, HOST_NUMA_ID, device) };
    if code == CudaCode::SUCCESS && node >= 0 {
        return u32::try_from(node).ok();
    }
    os::pci_node(&pci_address(api, device)?)
}

/// The GPU's place on the PCI bus, in the system's spelling.
fn pci_address(api: &CudaApi, device: CUdevice) -> Option<String> {
    // The driver writes domain:bus:device.function, and a zero.
    let mut bus = [0_u8; 32];
    // SAFETY: writes at most as many characters as the array has.
    let code = unsafe { api.device_pci_bus_id.call(bus.as_mut_ptr().cast(), bus.len() as c_int, device) };
    let bus = CStr::from_bytes_until_nul(&bus).ok().filter(|_| code == CudaCode::SUCCESS)?;
    Some(bus.to_str().ok()?.to_ascii_lowercase())
}

/// The most bytes of one registration. The kernel module fails from 512 GiB on (its list of pages
/// outgrows one piece), and Linux 6.11 to 6.13 fails from 2 GiB on.
fn longest_pin(kernel: Option<(u32, u32)>) -> usize {
    match kernel {
        Some((6, 11..=13)) => 1 << 30,
        _ => 256 << 30,
    }
}

fn check(api: &CudaApi, device: &Arc<str>, call: &'static str, code: CudaCode) -> Result<()> {
    if code == CudaCode::SUCCESS { Ok(()) } else { Err(failed(api, device, call, code)) }
}

#[cold]
fn failed(api: &CudaApi, device: &Arc<str>, call: &'static str, code: CudaCode) -> Error {
    let (text, class) = (api.text(code).into(), code.class());
    Error::Device(DeviceError { device: device.clone(), call, code: code.0.into(), text, class })
}

/// Sets this thread's capture mode, and returns the one before.
fn exchange_mode(api: &CudaApi, mut mode: u32) -> Option<u32> {
    // SAFETY: exchanges this thread's mode with a number.
    let code = unsafe { api.exchange_capture_mode.call(&raw mut mode) };
    (code == CudaCode::SUCCESS).then_some(mode)
}

/// Makes the crate's context current on this thread; its drop restores context and capture mode.
#[must_use]
struct CudaCurrent<'a> {
    api: &'a CudaApi,
    pushed: bool,
    /// The caller's capture mode, where it was changed.
    mode: Option<u32>,
    /// Dropped last: the process's exit waits for it. `None`: it has begun; every call is refused.
    _pass: Option<Pass>,
}

impl<'a> CudaCurrent<'a> {
    /// Relaxed mode, for calls that a capture on another thread could forbid, or that could spoil
    /// it. `pushed`: whether the drop pops a context that the caller has pushed.
    fn relaxed(api: &'a CudaApi, pushed: bool) -> Self {
        let mut current = Self { api, pushed, mode: None, _pass: exit::pass() };
        current.relax();
        current
    }

    fn relax(&mut self) {
        if !CUDA_THREAD.get() {
            self.mode = exchange_mode(self.api, RELAXED);
        }
    }
}

impl Drop for CudaCurrent<'_> {
    fn drop(&mut self) {
        if let Some(mode) = self.mode {
            exchange_mode(self.api, mode);
        }
        if self.pushed {
            let mut popped: CUcontext = std::ptr::null_mut();
            // SAFETY: pops the context that was pushed when this was made.
            unsafe { self.api.ctx_pop.call(&raw mut popped) };
        }
    }
}

impl Cuda {
    fn new(
        api: &'static CudaApi,
        name: Arc<str>,
        ordinal: c_int,
        device: CUdevice,
        context: CUcontext,
        primary: bool,
    ) -> Self {
        Self {
            api,
            name,
            ordinal,
            device,
            context,
            numa_node: numa_node(api, device),
            primary,
            host_batches: batch::shares_addresses(api, device),
            batches: Mutex::default(),
            allocates: AtomicBool::new(false),
            kernels: OnceLock::new(),
        }
    }

    fn said(&self, call: &'static str, code: CudaCode) -> Result<()> {
        check(self.api, &self.name, call, code)
    }

    /// The error of a call that another library made in this context.
    #[cfg(feature = "cudarc")]
    pub(crate) fn theirs(&self, call: &'static str, code: u32) -> Error {
        failed(self.api, &self.name, call, CudaCode(code))
    }

    /// Makes this context current.
    fn current(&self) -> Result<CudaCurrent<'_>> {
        let pass = exit::pass();
        let mut current: CUcontext = std::ptr::null_mut();
        // SAFETY: writes a handle.
        self.said("cuCtxGetCurrent", unsafe { self.api.ctx_get.call(&raw mut current) })?;
        let pushed = current != self.context;
        if pushed {
            // SAFETY: the retained primary context, or an adopted one that outlives this.
            self.said("cuCtxPushCurrent", unsafe { self.api.ctx_push.call(self.context) })?;
        }
        Ok(CudaCurrent { api: self.api, pushed, mode: None, _pass: pass })
    }

    /// Makes this context current, for a call that a capture elsewhere could forbid or suffer from.
    fn relaxed(&self) -> Result<CudaCurrent<'_>> {
        let mut current = self.current()?;
        current.relax();
        Ok(current)
    }

    /// Waits until the stream has nothing to do.
    fn synchronize(&self, handle: StreamHandle) -> Result<()> {
        let _current = self.relaxed()?;
        // SAFETY: a stream of this context that is alive.
        self.said("cuStreamSynchronize", unsafe { self.api.stream_synchronize.call(stream(handle)) })
    }
}

fn stream(handle: StreamHandle) -> CUstream {
    handle.0 as usize as CUstream
}

fn event(handle: EventHandle) -> CUevent {
    handle.0 as usize as CUevent
}

impl Driver for Cuda {
    fn name(&self) -> &str {
        &self.name
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn let_go(&self) -> bool {
        if let Some(Ok(kernels)) = self.kernels.get() {
            kernels.unload(self.api, self.context);
        }
        let _relaxed = CudaCurrent::relaxed(self.api, false);
        // After an error the driver is shutting down, and nothing is left to do. SAFETY: retained
        // once when this was made.
        !self.primary || unsafe { self.api.primary_release.call(self.device) == CudaCode::SUCCESS }
    }

    fn enter_thread(&self) {
        let _pass = exit::pass();
        // After a failure the thread is like any other: each call sets context and mode itself.
        // SAFETY: the retained primary context, or an adopted one that outlives this.
        if unsafe { self.api.ctx_set.call(self.context) } != CudaCode::SUCCESS {
            return;
        }
        CUDA_THREAD.set(exchange_mode(self.api, RELAXED).is_some());
    }

    fn longest_pin(&self) -> usize {
        longest_pin(os::kernel())
    }

    fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    fn pci_address(&self) -> Option<String> {
        pci_address(self.api, self.device)
    }

    fn allocates(&self) -> bool {
        self.allocates.load(Ordering::Relaxed)
    }

    unsafe fn register(&self, base: NonNull<u8>, len: usize, whose: Whose) -> Result<()> {
        let _current = self.relaxed()?;
        // Where the device lacks the flag, memory that can be written to is registered without it.
        let flags = match whose == Whose::ProgramToRead && self.has(READ_ONLY_REGISTER)? {
            true => REGISTER_PORTABLE | REGISTER_READ_ONLY,
            false => REGISTER_PORTABLE,
        };
        // SAFETY: the caller promises that the range is mapped, and stays so.
        let code = unsafe { self.api.host_register.call(base.as_ptr().cast(), len, flags) };
        let advised = |error| advised(error, remedy(code, whose));
        self.said("cuMemHostRegister", code).map_err(|error| match (code, advised(error)) {
            (INVALID_VALUE, Error::Device(error)) if whose == Whose::Crate => {
                Error::Device(DeviceError { class: ErrorClass::Transient, ..error })
            }
            (NOT_SUPPORTED, error) if whose == Whose::Crate => {
                // Relaxed: a thread that does not see it yet asks the driver once more.
                if !self.allocates.swap(true, Ordering::Relaxed) {
                    crate::foreign::warn!(
                        target: "pinpool::region", device = &*self.name, %error,
                        "host memory cannot be registered here: pools whose backing is not set take memory that the \
                         driver allocates (Backing::HostAlloc)"
                    );
                }
                Error::Unsupported(error.to_string())
            }
            (_, error) => error,
        })
    }

    unsafe fn unpin(&self, base: NonNull<u8>, _len: usize) -> Result<()> {
        let _current = self.relaxed()?;
        // SAFETY: the caller promises that it is registered, and that no copy uses it.
        let code = unsafe { self.api.host_unregister.call(base.as_ptr().cast()) };
        self.said("cuMemHostUnregister", code)
    }

    fn can_use(&self, kind: HostKind) -> Result<()> {
        match kind {
            HostKind::Managed if !self.has(CONCURRENT_MANAGED_ACCESS)? => Err(Error::Unsupported(format!(
                "{}: the host may not touch managed memory while the device works (CONCURRENT_MANAGED_ACCESS is 0), so a pool \
                 cannot be made of it; use Backing::Registered or Backing::HostAlloc",
                self.name
            ))),
            HostKind::Managed | HostKind::Locked(_) => Ok(()),
        }
    }

    fn allocate_host(&self, len: usize, kind: HostKind) -> Result<NonNull<u8>> {
        self.can_use(kind)?;
        let _current = self.relaxed()?;
        let (call, address) = match kind {
            HostKind::Locked(HostAllocFlags { portable, mapped, write_combined }) => {
                let flag = |on, flag| if on { flag } else { 0 };
                let flags = flag(portable, ALLOC_PORTABLE)
                    | flag(mapped, ALLOC_MAPPED)
                    | flag(write_combined, ALLOC_WRITE_COMBINED);
                let mut at = std::ptr::null_mut();
                // SAFETY: writes an address.
                let code = unsafe { self.api.host_alloc.call(&raw mut at, len, flags) };
                self.said("cuMemHostAlloc", code)?;
                ("cuMemHostAlloc", at.cast())
            }
            HostKind::Managed => {
                let mut at = 0;
                // SAFETY: writes an address.
                let code = unsafe { self.api.managed_alloc.call(&raw mut at, len, ATTACH_GLOBAL) };
                self.said("cuMemAllocManaged", code)?;
                // One address, for the host and the device.
                ("cuMemAllocManaged", std::ptr::with_exposed_provenance_mut(at as usize))
            }
        };
        NonNull::new(address)
            .ok_or_else(|| Error::OutOfMemory { wanted: len, text: format!("{call} gave no address") })
    }

    unsafe fn free_host(&self, base: NonNull<u8>, _len: usize, kind: HostKind) -> Result<()> {
        let _current = self.relaxed()?;
        match kind {
            HostKind::Locked(_) => {
                // SAFETY: the caller promises host memory of the driver's, freed once, unused.
                self.said("cuMemFreeHost", unsafe { self.api.host_free.call(base.as_ptr().cast()) })
            }
            HostKind::Managed => {
                let address = base.as_ptr().expose_provenance() as u64;
                // SAFETY: the caller promises that it is managed memory, freed once and not in use.
                self.said("cuMemFree", unsafe { self.api.mem_free.call(address) })
            }
        }
    }

    fn device_address(&self, at: NonNull<u8>) -> Result<u64> {
        let _current = self.relaxed()?;
        let mut address = 0;
        // SAFETY: writes an address; one that the driver does not know is refused.
        let code = unsafe { self.api.host_device_pointer.call(&raw mut address, at.as_ptr().cast(), 0) };
        check(self.api, &self.name, "cuMemHostGetDevicePointer", code).map(|()| address).map_err(|error| {
            if code == INVALID_VALUE && self.has(CAN_MAP_HOST_MEMORY) == Ok(false) {
                return Error::Unsupported(format!(
                    "{} cannot map host memory (CAN_MAP_HOST_MEMORY is 0); copy the buffer instead",
                    self.name
                ));
            }
            match code {
                INVALID_VALUE => {
                    advise(error, "the memory is not pinned for this device; copy the buffer instead")
                }
                _ => error,
            }
        })
    }

    fn allocate(&self, len: usize) -> Result<DevicePtr> {
        let _current = self.relaxed()?;
        let mut ptr = 0;
        // SAFETY: writes an address.
        let code = unsafe { self.api.mem_alloc.call(&raw mut ptr, len) };
        self.said("cuMemAlloc", code).map(|()| DevicePtr(ptr))
    }

    fn free(&self, ptr: DevicePtr) -> Result<()> {
        let _current = self.relaxed()?;
        // SAFETY: allocated by this driver, freed once, and by the contract no longer in use.
        let code = unsafe { self.api.mem_free.call(ptr.0) };
        self.said("cuMemFree", code)
    }

    fn examine(&self, ptr: DevicePtr, len: usize) -> Result<()> {
        let found = self.attributes(ptr)?;
        self.fault(ptr.0, len, &found).map_or(Ok(()), |fault| Err(fault.of(&self.name, ptr.0, len)))
    }

    fn create_stream(&self, urgent: bool) -> Result<StreamHandle> {
        let _current = self.relaxed()?;
        // The greatest priority is the lowest number, and other streams have priority 0.
        let (mut least, mut priority): (c_int, c_int) = (0, 0);
        if urgent {
            // SAFETY: writes two numbers.
            let code = unsafe { self.api.priority_range.call(&raw mut least, &raw mut priority) };
            self.said("cuCtxGetStreamPriorityRange", code)?;
        }
        let mut stream: CUstream = std::ptr::null_mut();
        // SAFETY: writes a handle.
        let code = unsafe { self.api.stream_create.call(&raw mut stream, NON_BLOCKING, priority) };
        self.said("cuStreamCreateWithPriority", code).map(|()| StreamHandle(stream as usize as u64))
    }

    fn destroy_stream(&self, handle: StreamHandle) -> Result<()> {
        let _current = self.relaxed()?;
        // SAFETY: created by this driver, destroyed once.
        self.said("cuStreamDestroy", unsafe { self.api.stream_destroy.call(stream(handle)) })
    }

    unsafe fn copy(&self, handle: StreamHandle, transfer: Transfer) -> Result<()> {
        // No capture forbids it, pageable memory included (tried on driver 580.159 in global mode).
        let _current = self.current()?;
        let (api, stream) = (self.api, stream(handle));
        match transfer {
            Transfer::Upload { src, dst, len } => {
                // SAFETY: the caller promises the source; the copy's handle keeps the target's
                // allocation.
                self.said("cuMemcpyHtoDAsync", unsafe {
                    api.copy_to_device.call(dst.0, src.cast(), len, stream)
                })
            }
            Transfer::Download { src, dst, len } => {
                // SAFETY: as above, the other way round.
                self.said("cuMemcpyDtoHAsync", unsafe {
                    api.copy_to_host.call(dst.cast(), src.0, len, stream)
                })
            }
            Transfer::OnDevice { src, dst, len } => {
                // SAFETY: both are within allocations that the copy's handles keep.
                self.said("cuMemcpyDtoDAsync", unsafe { api.copy_on_device.call(dst.0, src.0, len, stream) })
            }
            Transfer::OnHost { src, dst, len } => {
                // `cuMemcpyAsync` would take as long: it is "fully synchronous with respect to the
                // host" here (driver API manual, "API synchronization behavior").
                self.synchronize(handle)?;
                // SAFETY: the caller promises both ranges; the stream's earlier work is complete.
                unsafe { dst.copy_from_nonoverlapping(src, len) };
                Ok(())
            }
        }
    }

    unsafe fn copy_many(
        &self,
        handle: StreamHandle,
        transfers: &[Transfer],
        failed: &mut dyn FnMut(usize, Error),
    ) {
        // A copy from host to host is no copy of the device's.
        let may_join = |transfer: &Transfer| match transfer {
            Transfer::Upload { .. } | Transfer::Download { .. } => self.host_batches,
            Transfer::OnDevice { .. } => true,
            Transfer::OnHost { .. } => false,
        };
        for (n, call) in transfers.chunks(batch::MOST).enumerate() {
            let mut failed = |place, error| failed(n * batch::MOST + place, error);
            // A batch of one would cost more than a copy.
            let batched = call.len() > 1
                && call.iter().all(may_join)
                // SAFETY: the caller's promise, handed on.
                && unsafe { self.try_batch(handle, call) }
                    .is_some_and(|said| batch::concluded(&self.name, said, call.len(), &mut failed));
            if batched {
                continue;
            }
            for (place, transfer) in call.iter().enumerate() {
                // SAFETY: the caller's promise covers each transfer. A copy that an earlier call
                // may have submitted writes the same bytes again.
                if let Err(error) = unsafe { self.copy(handle, *transfer) } {
                    failed(place, error);
                }
            }
        }
    }

    fn load_spread(&self) -> Result<bool> {
        self.load_kernels().map(|()| true)
    }

    unsafe fn spread(&self, handle: StreamHandle, way: SpreadWay, runs: &[SpreadRun]) -> Result<()> {
        // SAFETY: the caller promises what `launch` asks for: its contract is this function's.
        unsafe { self.launch(handle, way, runs) }
    }

    unsafe fn copy_blocking(&self, handle: StreamHandle, transfer: Transfer) -> Result<()> {
        // One pass for both: the process's exit waits until the copy is complete.
        let _pass = exit::pass();
        // SAFETY: the caller's promise holds until this returns, and `wait_out` waits for the copy.
        let copied = unsafe { self.copy(handle, transfer) };
        // After an error too: the copy may be under way all the same.
        wait_out(&self.name, || self.synchronize(handle)).and(copied)
    }

    fn create_event(&self) -> Result<EventHandle> {
        let _current = self.relaxed()?;
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: writes a handle.
        let code = unsafe { self.api.event_create.call(&raw mut event, DISABLE_TIMING) };
        self.said("cuEventCreate", code).map(|()| EventHandle(event as usize as u64))
    }

    fn destroy_event(&self, handle: EventHandle) -> Result<()> {
        let _current = self.relaxed()?;
        // SAFETY: created by this driver, destroyed once.
        self.said("cuEventDestroy", unsafe { self.api.event_destroy.call(event(handle)) })
    }

    fn record(&self, handle: EventHandle, on: StreamHandle) -> Result<()> {
        let _current = self.current()?;
        // SAFETY: an event and a stream of this context, both alive.
        self.said("cuEventRecord", unsafe { self.api.event_record.call(event(handle), stream(on)) })
    }

    fn query(&self, handle: EventHandle) -> Result<bool> {
        let _relaxed = CudaCurrent::relaxed(self.api, false);
        // SAFETY: an event of this context that is alive.
        match unsafe { self.api.event_query.call(event(handle)) } {
            CudaCode::NOT_READY => Ok(false),
            code => self.said("cuEventQuery", code).map(|()| true),
        }
    }

    fn wait_event(&self, on: StreamHandle, handle: EventHandle) -> Result<()> {
        let _current = self.current()?;
        // SAFETY: as in `record`.
        self.said("cuStreamWaitEvent", unsafe {
            self.api.stream_wait_event.call(stream(on), event(handle), 0)
        })
    }

    fn capturing(&self, on: StreamHandle) -> Result<bool> {
        // The default streams are those of the current context. Other handles name their context.
        let _current = (on.0 <= adopt::PER_THREAD as u64).then(|| self.current()).transpose()?;
        let mut status: u32 = 0;
        // SAFETY: a stream that is alive, and a place for a number.
        let code = unsafe { self.api.stream_is_capturing.call(stream(on), &raw mut status) };
        // A spoiled capture is one too: nothing can be submitted before it is ended.
        self.said("cuStreamIsCapturing", code).map(|()| status != 0)
    }

    fn keep_with_graph(&self, on: StreamHandle, ended: GraphEnd) -> Result<bool> {
        self.keep(on, ended)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::longest_pin;

    #[test]
    fn one_registration_stays_below_what_kernels_can_do() {
        for (kernel, most) in [
            (Some((6, 10)), 256 << 30),
            (Some((6, 11)), 1 << 30),
            (Some((6, 13)), 1 << 30),
            (Some((6, 14)), 256 << 30),
        ] {
            assert_eq!(longest_pin(kernel), most, "{kernel:?}");
        }
        assert_eq!(longest_pin(None), 256 << 30);
    }
}
