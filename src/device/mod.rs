//! Devices. The trait [`Driver`] is the contract: what a device must do.
//!
//! Regions, timelines and the pool are written against [`Driver`] and nothing else. Only the public
//! modules `cuda`, `cudarc` and `acl` call what one vendor has. A driver does what it is told and
//! reports what happened. It has no policy: that is in the modules above.
//!
//! To be read in this order: `host` (the shortest driver), `worker` (a device's thread for calls
//! that may block), `context` (an opened device), `memory`, `handle` (the public
//! [`Device`](handle::Device)). `cuda` and `acl` are the only modules that call a vendor's library,
//! through `gate`, which is shut when the process ends; `vendor` has what they share.
//!
//! # The rules that every driver keeps
//!
//! 1. *Order.* The work that is submitted to one stream happens in that order. Two streams have no
//!    order between them but that of [`Driver::wait_event`].
//! 2. *Lateness.* A copy may read its source and write its target at any time from the call on,
//!    until an event that was recorded after it is complete.
//! 3. *Events.* [`Driver::record`] covers all work that was submitted to the stream before. An
//!    event may be recorded again once seen complete. One never recorded reads as complete, so no
//!    caller asks about it.
//! 4. *Errors never read as complete.* [`Driver::query`] says `Ok(true)` only for complete work.
//!    After an error of [`Driver::copy`] or [`Driver::spread`] the copy or kernel may run or not.
//! 5. *Blocking calls let go.* [`Driver::copy_blocking`] returns only when the device will not
//!    touch the memory again, on an error too, and for a lost device: a lost CUDA context touches
//!    host memory no more; Ascend does not say so, and its devices never get the address of
//!    borrowed memory.
//! 6. *Threads.* All calls may come from any thread. Those that may block or synchronise a device
//!    (that pin, register, allocate, create or load, or undo that, but for
//!    [`Driver::create_event`]) come from the device's [`Worker`](worker::Worker) only. No call is
//!    made under a lock of the crate, unless the lock is for that call alone.
//! 7. *Loss.* After an error of class [`DeviceLost`](crate::ErrorClass::DeviceLost) every later
//!    call on that device fails with that class. Those that give something back may succeed.
//! 8. *Captures.* Where [`Driver::capturing`] says so, only what is to be a part of the graph is
//!    submitted to the stream or recorded there. Another event there is never complete: a query of
//!    it is an error of class [`Capture`](crate::ErrorClass::Capture).
//! 9. *Ending.* From the exit of the process on no call reaches the vendor's library: each fails
//!    with class [`DriverShutdown`](crate::ErrorClass::DriverShutdown). The exit waits for calls
//!    that are under way (`gate`, [`crate::exit`]).

#![allow(unsafe_code)]

#[cfg(feature = "acl")]
pub(crate) mod acl;
pub(crate) mod context;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod family;
#[cfg(any(feature = "acl", feature = "cuda"))]
mod gate;
pub(crate) mod handle;
pub mod host;
pub(crate) mod memory;
#[cfg(any(feature = "acl", feature = "cuda"))]
mod vendor;
pub(crate) mod worker;

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;

use crate::error::{Error, Result};

/// A stream as its driver knows it. Never used again once destroyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StreamHandle(pub u64);

/// An event as its driver knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct EventHandle(pub u64);

/// An address in a device's memory. Adding bytes stays in the allocation or is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub(crate) struct DevicePtr(pub u64);

/// One copy of `len` bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Transfer {
    /// Host to device.
    Upload { src: *const u8, dst: DevicePtr, len: usize },
    /// Device to host.
    Download { src: DevicePtr, dst: *mut u8, len: usize },
    /// Within the device.
    OnDevice { src: DevicePtr, dst: DevicePtr, len: usize },
    /// From host memory to other host memory, in the stream's order. [`Driver::copy`] may wait
    /// until the stream has come to it. [`Driver::copy_blocking`] does not take it.
    OnHost { src: *const u8, dst: *mut u8, len: usize },
}

// SAFETY: addresses, which mean the same on every thread; the caller that hands them to a driver
// vouches for what is there.
unsafe impl Send for Transfer {}
// SAFETY: as above.
unsafe impl Sync for Transfer {}

/// One piece of a run: `len` bytes at `offset` of the packed bytes, and at `place` in device
/// memory. Laid out as the kernels read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct SpreadRow {
    pub(crate) place: DevicePtr,
    pub(crate) offset: u32,
    pub(crate) len: u32,
}

/// A table of [`SpreadRow`]s in device memory, and the packed bytes that they refer to, in device
/// memory too. The table is at a multiple of 16 bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct SpreadRun {
    pub(crate) packed: DevicePtr,
    pub(crate) table: DevicePtr,
    pub(crate) rows: u32,
}

/// Where the rows of a run go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpreadWay {
    /// From the packed bytes to their places.
    Spread,
    /// From their places to the packed bytes.
    Collect,
}

/// The most runs of one call of [`Driver::spread`].
pub(crate) const SPREAD_RUNS: usize = 32;

/// What a driver's callback calls when a graph has ended: it neither blocks nor calls the driver.
pub(crate) type GraphEnd = Box<dyn FnOnce() + Send>;

/// How a driver is asked to allocate page-locked memory: the flags of `cuMemHostAlloc`, in any
/// combination. (It is the driver API's form of `cudaHostAlloc`, and without flags of
/// `cudaMallocHost`.) On supported platforms this memory is portable and mapped with any flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct HostAllocFlags {
    /// `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context, not only for the first device's.
    pub portable: bool,
    /// `CU_MEMHOSTALLOC_DEVICEMAP`: devices can address it.
    pub mapped: bool,
    /// `CU_MEMHOSTALLOC_WRITECOMBINED`: not cached by the CPU. Writing it from front to back is
    /// fast, **reading it on the CPU is very slow**, tens of times slower: a pool of such memory is
    /// for uploads only. Whether copies gain anything depends on the machine; on some they are
    /// slower.
    pub write_combined: bool,
}

/// Host memory that a driver allocates itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostKind {
    /// Page-locked.
    Locked(HostAllocFlags),
    /// Managed: one address for the host and the devices. Its pages move to the processor that uses
    /// them, so they are not locked.
    Managed,
}

/// Whose host memory is registered, and what the device may do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whose {
    /// The crate's: whole pages, mapped privately and to be written to. So an error that says no
    /// more than that they cannot be locked is of class
    /// [`Transient`](crate::ErrorClass::Transient).
    Crate,
    /// The program's.
    Program,
    /// The program's, which the device only reads, and whose mapping may be read-only.
    ProgramToRead,
}

/// The thread that a stream is confined to, which alone can submit to it: CUDA's per-thread default
/// stream is one handle for another stream on every thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Confined {
    /// No other thread has or had this number. (The system's numbers are given again.)
    thread: std::thread::ThreadId,
    /// A stream of which an event, recorded on any thread, covers all work of the confined one: the
    /// reaper records there what could not be recorded on the confined thread.
    pub(crate) covering: StreamHandle,
}

impl Confined {
    /// Confined to the calling thread.
    pub(crate) fn here(covering: StreamHandle) -> Self {
        Self { thread: std::thread::current().id(), covering }
    }

    /// Whether the calling thread is the one.
    pub(crate) fn is_here(&self) -> bool {
        self.thread == std::thread::current().id()
    }
}

/// A context that the program or another library made.
pub(crate) enum AdoptedContext {
    /// The context that the crate works in when it opens the device with this name.
    Default(String),
    /// Another one, whose driver has the same name each time that it is adopted.
    Other(std::sync::Arc<dyn Driver>),
}

/// What a device must do. The module's page has the rules.
pub(crate) trait Driver: fmt::Debug + Send + Sync + 'static {
    /// The device as [`Device::open`](crate::Device::open) names it, such as `host:0`.
    fn name(&self) -> &str;

    /// What its name begins with. Devices of one family can share pinned memory.
    fn family(&self) -> &str {
        self.name().split(':').next().unwrap_or_default()
    }

    /// This driver as its own type, for what only its vendor has.
    fn as_any(&self) -> &dyn Any;

    /// The last call for this opening of the device, made once, on the device's worker: it lets go
    /// of the device. Whether that has everything back.
    fn let_go(&self) -> bool {
        true
    }

    /// Called first on each thread of the crate that makes calls: the driver may set the thread up.
    fn enter_thread(&self) {}

    /// The most bytes that one call of [`Driver::register`] can pin.
    fn longest_pin(&self) -> usize {
        usize::MAX
    }

    /// Whether pools take memory of the driver's where nothing else is asked for. Asked before each
    /// region: a driver may find out by a [`register`](Self::register) that is not supported.
    fn allocates(&self) -> bool {
        false
    }

    /// The NUMA node of the host that the device is attached to, if that is known.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// The device's place on the PCI bus as Linux writes it (`domain:bus:device.function`).
    fn pci_address(&self) -> Option<String> {
        None
    }

    /// Makes exactly `len` bytes at `base` known to the device, wherever they start, and locks
    /// their pages. On an error nothing is left registered. A range that overlaps another one is
    /// refused; one on the same page only where the driver knows whole pages alone (Ascend).
    ///
    /// # Safety
    /// The range is mapped, writable unless the device is only to read it, and stays so until
    /// [`Driver::unpin`] has succeeded.
    unsafe fn register(&self, base: NonNull<u8>, len: usize, whose: Whose) -> Result<()>;

    /// Undoes a [`Driver::register`]. After an error the range must never be unmapped.
    ///
    /// # Safety
    /// `base` and `len` are those of one successful call, undone once, and no copy uses the range.
    unsafe fn unpin(&self, base: NonNull<u8>, len: usize) -> Result<()>;

    /// [`Error::Unsupported`] with the reason, where the device cannot use memory of this kind.
    fn can_use(&self, _kind: HostKind) -> Result<()> {
        Ok(())
    }

    /// Host memory of the driver's own: `len` bytes, a multiple of the system's page size,
    /// uninitialised. Drivers promise no useful alignment.
    fn allocate_host(&self, len: usize, kind: HostKind) -> Result<NonNull<u8>>;

    /// Frees what [`Driver::allocate_host`] gave. After an error it is never freed.
    ///
    /// # Safety
    /// The arguments are those of one earlier successful `allocate_host`, freed at most once, and
    /// no thread and no device uses the memory.
    unsafe fn free_host(&self, base: NonNull<u8>, len: usize, kind: HostKind) -> Result<()>;

    /// Writes zeros over `len` bytes of host memory, pinned or not, and returns when they are
    /// written. The CPU does it, unless the device has the memory for its own.
    ///
    /// # Safety
    /// The range can be written, and no other thread and no device uses it.
    unsafe fn zero(&self, at: NonNull<u8>, len: usize) -> Result<()> {
        // SAFETY: the caller promises that the range can be written and is not in use.
        unsafe { at.write_bytes(0, len) };
        Ok(())
    }

    /// Where the device sees the byte of pinned, registered or allocated host memory that the host
    /// sees at `at`. (Managed memory has one address.) Never blocks.
    fn device_address(&self, at: NonNull<u8>) -> Result<u64>;

    /// Device memory of `len` bytes, uninitialised, aligned to 256 bytes at least.
    fn allocate(&self, len: usize) -> Result<DevicePtr>;

    /// Frees device memory. The memory must not be in use.
    fn free(&self, ptr: DevicePtr) -> Result<()>;

    /// Whether this device's copies can use memory that the crate did not allocate:
    /// [`Error::Argument`] if not, or what the driver says. Never blocks.
    fn examine(&self, ptr: DevicePtr, len: usize) -> Result<()>;

    /// A new stream. An `urgent` one has its kernels scheduled before others', where the device has
    /// priorities.
    fn create_stream(&self, urgent: bool) -> Result<StreamHandle>;

    /// Destroys a stream that the crate made, once all its work is complete. A stream that was lost
    /// may have work queued, which goes on.
    fn destroy_stream(&self, stream: StreamHandle) -> Result<()>;

    /// Submits a copy. Returns before the copy has happened, unless it is one from host to host.
    ///
    /// # Safety
    /// Host memory named by `transfer` is valid, not written (as a source) and not touched (as a
    /// target) until an event recorded on `stream` later is complete, after an error too.
    unsafe fn copy(&self, stream: StreamHandle, transfer: Transfer) -> Result<()>;

    /// Submits copies without an order: nothing that one writes is read or written by another. Each
    /// is submitted, or reported to `failed` with its place and an error as of [`Driver::copy`].
    ///
    /// # Safety
    /// As for [`Driver::copy`], for each of them.
    unsafe fn copy_many(
        &self,
        stream: StreamHandle,
        transfers: &[Transfer],
        failed: &mut dyn FnMut(usize, Error),
    ) {
        for (place, transfer) in transfers.iter().enumerate() {
            // SAFETY: the caller promises for each transfer what `copy` asks for.
            if let Err(error) = unsafe { self.copy(stream, *transfer) } {
                failed(place, error);
            }
        }
    }

    /// Makes the kernels of [`Driver::spread`] ready. A failure is final: a later call returns the
    /// same error. `Ok(false)`: there are none for devices of this family.
    fn load_spread(&self) -> Result<bool> {
        Ok(false)
    }

    /// Submits one kernel that copies the rows of at most [`SPREAD_RUNS`] runs. Where rows overlap
    /// on the side that is written, either wins, byte by byte; none overlaps anything that the call
    /// reads. The stream is never captured; a capture elsewhere survives the call.
    ///
    /// # Safety
    /// The runs' memory and the rows' places are valid on the device until an event recorded on
    /// `stream` later is complete, after an error too. The tables are there when the stream comes
    /// to the kernel, and stay until it is complete. [`Driver::load_spread`] has succeeded.
    unsafe fn spread(&self, _stream: StreamHandle, _way: SpreadWay, _runs: &[SpreadRun]) -> Result<()> {
        Err(Error::Unsupported(format!("{} has no kernels that spread bytes", self.name())))
    }

    /// Copies in stream order, and returns when the device has let go, also on errors.
    ///
    /// # Safety
    /// Host memory named by `transfer` is valid, and no other code writes it (as a source) or
    /// touches it (as a target), until this call returns. It need not be pinned.
    unsafe fn copy_blocking(&self, stream: StreamHandle, transfer: Transfer) -> Result<()>;

    /// A new event, never recorded.
    fn create_event(&self) -> Result<EventHandle>;

    /// Destroys an event that is complete or never recorded, or any event when nothing else of the
    /// device exists.
    fn destroy_event(&self, event: EventHandle) -> Result<()>;

    /// Records `event` on `stream`. After an error it may be recorded all the same.
    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()>;

    /// Whether all work that `event` covers is complete. `Ok(false)`: not yet. Never blocks.
    fn query(&self, event: EventHandle) -> Result<bool>;

    /// Work that is submitted to `stream` from now on starts only after `event` is complete.
    fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()>;

    /// Whether `stream` is being captured into a graph, by a spoiled capture too. Called only for
    /// streams that the program can reach. Never blocks, and harms no capture.
    fn capturing(&self, _stream: StreamHandle) -> Result<bool> {
        Ok(false)
    }

    /// Makes the graph that `stream` is being captured into keep something: `ended` is called when
    /// that graph, all made from it, and all their launches have ended. `false`: the stream is in
    /// no capture, or a spoiled one. After `false` or an error `ended` is dropped or called, at any
    /// time.
    fn keep_with_graph(&self, _stream: StreamHandle, ended: GraphEnd) -> Result<bool> {
        drop(ended);
        Ok(false)
    }
}
