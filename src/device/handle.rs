//! An opened device as its users have it: its driver's context, and the reaper of its streams.

#![allow(unsafe_code)]

mod closing;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};

use crate::locks::Mutex;

use crate::device::Driver;
use crate::device::context::Context;
use crate::device::holds::Tenant;
use crate::device::host::HostNode;
use crate::device::memory::{DeviceBuffer, DeviceSlice};
use crate::device::{AdoptedContext, ending::KeepAlive, family};
use crate::error::{Error, Result, SubmitError};
use crate::escape::{NAME, clean};
use crate::stream::Stream;
use crate::stream::reaper::{Listing, Reaper};
use crate::stream::timeline::Timeline;
pub use closing::{CloseError, HeldBy};

/// A device: the thing on the other side of a copy.
///
/// Opened by name: `cuda:N` (an NVIDIA GPU, feature `cuda`; `cuda` is `cuda:0`), `acl:N` (an Ascend NPU, feature
/// `acl`), `host` or `host:N` (a device without any accelerator, see [`crate::host`]), `auto` (the first GPU that can
/// be opened, else the first NPU, else `host:0`; the log says what was skipped and why). A server that needs an
/// accelerator names it, since `auto` goes on without one.
///
/// CUDA's library is loaded when a GPU is opened for the first time: `libcuda.so.1`, or what the environment variable
/// `PINPOOL_LIBCUDA` names. The pool works in the GPU's primary context, like the runtime API and the frameworks; with
/// the feature `cuda` a server's own contexts and streams can be adopted (module `cuda`). The module `acl` says the
/// same for Ascend.
///
/// In the child of a fork nothing of this crate can be used if the fork came after the process had begun to open a
/// device (any device, by whatever call, a [`HostNode`] included): every call that could block, take memory or reach a
/// driver answers [`Error::Forked`] at once, opening a device among them, and dropping what was inherited does nothing.
/// So a server that forks its workers opens devices in these, or starts them as programs by `std::process::Command`,
/// which is not affected.
///
/// Cloning gives another handle to the same device, and so does opening it again while it is open. It is let go of when
/// the last handle is gone, and all that came from it; [`Device::close`] waits for that.
#[derive(Clone)]
pub struct Device(Arc<DeviceInner>);

struct DeviceInner {
    context: Arc<Context>,
    reaper: Reaper,
    /// Streams that others can reach, by the driver's number for each, which is never another's.
    streams: Mutex<HashMap<u64, Weak<Timeline>>>,
}

/// Devices that are open, by what stands for each: a driver's name, or a context that others made.
static OPENED: Mutex<Option<HashMap<String, Weak<DeviceInner>>>> = Mutex::new(None);

impl Device {
    /// Opens a device by name.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] for a name that no device has, [`Error::Unavailable`] for one that cannot be used here;
    /// [`Error::Forked`] in the child of a process that had opened one before the fork; what the driver says where it
    /// has no context to give.
    pub fn open(name: &str) -> Result<Self> {
        if !cfg!(target_os = "linux") {
            return Err(Error::Unsupported("pinpool needs Linux".into()));
        }
        crate::os::watch_forks()?;
        let span =
            crate::foreign::span!(INFO, target: "pinpool::device", "open", device = &*clean(name, NAME));
        let _entered = span.enter();
        let driver = family::driver(name)?;
        Self::known(driver.name().to_owned(), driver)
    }

    /// The device that is open under this key, or a new one.
    pub(crate) fn known(key: String, driver: Arc<dyn Driver>) -> Result<Self> {
        let mut open = OPENED.lock();
        let open = open.get_or_insert_with(HashMap::new);
        let known = open.get(&key).and_then(Weak::upgrade);
        if let Some(inner) = known {
            // Whatever the new one has to undo belongs to the device that is open.
            driver.leave(inner.context.holds().last());
            return Ok(Self(inner));
        }
        let device = Self::start(Context::new(driver)?)?;
        open.retain(|_, inner| inner.strong_count() > 0);
        open.insert(key, Arc::downgrade(&device.0));
        Ok(device)
    }

    /// The device of a context that others made.
    pub(crate) fn adopted(context: AdoptedContext, keep_alive: Option<KeepAlive>) -> Result<Self> {
        match context {
            AdoptedContext::Default(name) => Self::open(&name),
            AdoptedContext::Other { key, driver } => {
                let device = Self::known(key, driver)?;
                if let Some(keep_alive) = keep_alive {
                    device.context().driver().keep(keep_alive);
                }
                Ok(device)
            }
        }
    }

    /// A device of a host node made by hand, for tests. (Those of two nodes have the same names, and so the same
    /// metrics.)
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] for an ordinal that the node does not have; [`Error::Forked`].
    pub fn on(node: &HostNode, ordinal: u32) -> Result<Self> {
        crate::os::watch_forks()?;
        Self::start(Context::new(node.driver(ordinal)?)?)
    }

    fn start(context: Arc<Context>) -> Result<Self> {
        let reaper = Reaper::start(&context)?;
        Ok(Self(Arc::new(DeviceInner { context, reaper, streams: Mutex::new(HashMap::new()) })))
    }

    /// The timeline that is known by this number, or a new one.
    pub(crate) fn known_stream(&self, id: u64, make: impl FnOnce() -> Arc<Timeline>) -> Arc<Timeline> {
        let mut streams = self.0.streams.lock();
        if let Some(timeline) = streams.get(&id).and_then(Weak::upgrade) {
            return timeline;
        }
        let timeline = make();
        streams.retain(|_, timeline| timeline.strong_count() > 0);
        streams.insert(id, Arc::downgrade(&timeline));
        timeline
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.0.context
    }

    pub(crate) fn listing(&self) -> &Listing {
        self.0.reaper.listing()
    }

    /// The device is told what keeps it open, beside its own handles.
    pub(crate) fn enter(&self, tenant: Arc<dyn Tenant>) {
        self.context().holds().enter(tenant);
    }

    /// Its name, such as `host:0`.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.context.name()
    }

    /// The host's NUMA node that the device hangs on, as its driver or the system knows it; pools take their memory
    /// from there. `None`: nobody says, or the device is the host.
    #[must_use]
    pub fn numa_node(&self) -> Option<u32> {
        self.context().driver().numa_node()
    }

    /// The device's place on the PCI bus as Linux spells it (`0000:65:00.0`: domain, bus, device, function), which is
    /// its name under `/sys/bus/pci/devices`. On CUDA from `cuDeviceGetPCIBusId`. `None`: it has none, or nobody says,
    /// as in the child of a fork.
    #[must_use]
    pub fn pci_address(&self) -> Option<String> {
        crate::os::check_fork().ok()?;
        self.context().driver().pci_address()
    }

    /// A new stream of our own. Costly on some devices: make streams at start-up.
    ///
    /// # Errors
    /// What the driver says; the device's loss.
    pub fn stream(&self) -> Result<Stream> {
        Stream::create(self)
    }

    /// Device memory of `len` bytes, uninitialised, aligned to 256 bytes at least, there for every stream at once.
    /// Allocating and freeing may synchronise the device: [`Stream::alloc`] does not.
    ///
    /// # Errors
    /// [`Error::ZeroLength`]; what the driver says, out of memory among it; the device's loss.
    pub fn alloc(&self, len: usize) -> Result<DeviceBuffer> {
        DeviceBuffer::new(&self.0.context, len)
    }

    /// Device memory that somebody else allocated, for use in every copy call: a raw `CUdeviceptr`, the runtime API's
    /// pointers, another library's tensor. The one way in for addresses: what a copy call takes is always a
    /// [`DeviceSlice`], which has been checked and is kept by whoever uses it.
    ///
    /// `owner` is whatever keeps the memory allocated, by value or as an `Arc`; `()` where something else sees to that.
    /// It is dropped when the last handle is gone and the last copy in flight is done, on the device's worker thread,
    /// which may wait for it. (Where a stream was lost and its device lives on, and in the child of a fork, it is
    /// leaked: nobody knows whether the memory is still used.) On a GPU the device's context is current
    /// there, and what it frees disturbs no capture. Its drop must not wait for a buffer of a pool: the pool
    /// grows on that very thread.
    ///
    /// The range is checked here, once: on a GPU by `cuPointerGetAttributes`. Memory of `cuMemAlloc`, `cuMemAllocAsync`
    /// and `cuMemMap` passes, and so does managed memory. The check takes a microsecond or so and never waits. What an
    /// address means can change afterwards, which the owner is there to prevent.
    ///
    /// # Ordering
    /// None is added: copies are ordered with other work on their own stream. Make streams of others and ours wait for
    /// each other where they use the memory both.
    ///
    /// # Errors
    /// With the owner: [`Error::BadAddress`], whose [`AddressFault`](crate::AddressFault) says what is wrong (a host
    /// pointer, another device's, a range past its allocation, another context's, or nothing that the driver knows of);
    /// [`Error::Empty`] for a length of zero; the device's loss.
    ///
    /// # Safety
    /// Until `owner` is dropped, or with an owner that keeps nothing until the last handle is dropped and everything
    /// that used one was seen complete:
    /// - `address..address + len` stays allocated;
    /// - nobody else reads or writes it while a copy of this crate writes it, or writes it while one reads it: neither
    ///   kernels, nor other libraries, nor, for managed memory, the CPU;
    /// - whoever reads it as values of some type gets along with the bytes that copies wrote there.
    pub unsafe fn raw_memory<O: Send + 'static>(
        &self,
        address: u64,
        len: usize,
        owner: O,
    ) -> Result<DeviceSlice, SubmitError<O>> {
        // SAFETY: the caller's word.
        unsafe { DeviceSlice::foreign(self.context(), address, len, owner) }
            .map_err(|(error, owner)| SubmitError::refused(error, owner))
    }

    /// Looks at every stream of the device on this thread: closes what is open, asks what is done, returns what landed.
    /// The reaper does that by itself; a stepped device has no reaper, there this is how buffers come back. Whether
    /// anything landed.
    pub fn reap(&self) -> bool {
        // In the child of a fork the locks may be anyone's.
        !crate::os::forked() && self.listing().advance()
    }

    /// The error that the device was lost with, if it was.
    #[must_use]
    pub fn lost(&self) -> Option<Error> {
        self.0.context.poisoned().cloned()
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.name()).finish()
    }
}
