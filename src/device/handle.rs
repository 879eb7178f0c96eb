//! The public [`Device`]: an opened device's context, and the reaper of its streams. `closing.rs`
//! has [`Device::close`].
//!
//! A process-wide table has each open device, or adopted context, under its driver's name. So a
//! device that is opened twice is one device with one reaper. The table keeps no device open.

#![allow(unsafe_code)]

mod closing;

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};

use crate::central::CentralPool;
use crate::device::Driver;
use crate::device::context::{Context, Hand};
use crate::device::host::HostNode;
use crate::device::memory::DeviceSlice;
use crate::device::{AdoptedContext, family};
use crate::error::{Error, Result, SubmitError};
use crate::escape::{NAME, clean};
use crate::foreign::KeepAlive;
use crate::locks::Mutex;
use crate::stream::timeline::reaper::Listing;
pub use closing::{CloseError, HeldBy};

/// A device: the thing on the other side of a copy.
///
/// Opened by name: `cuda:N` (an NVIDIA GPU, feature `cuda`; `cuda` is `cuda:0`), `acl:N` (an Ascend
/// NPU, feature `acl`), `host` or `host:N` (without any accelerator, see [`crate::host`]), `auto`
/// (the first GPU that can be opened, else the first NPU, else `host:0`; the log says what was
/// skipped and why). A server that needs an accelerator names it, since `auto` goes on without one.
///
/// CUDA's library is loaded when a GPU is first opened: `libcuda.so.1`, or what the environment
/// variable `PINPOOL_LIBCUDA` names. The pool works in the GPU's primary context, like the runtime
/// API and the frameworks; the modules `cuda` and `acl` adopt a server's own contexts and streams.
///
/// In the child of a fork nothing of this crate can be used if the process had begun to open a
/// device before. Every call that could block, take memory or reach a driver answers
/// [`Error::Forked`] at once, and the drop of an inherited value does nothing. So a server that
/// forks its workers opens devices in the workers.
///
/// Cloning gives another handle to the same device, and so does opening it again while it is open.
/// The driver's device is let go of after its last user's drop, for which [`Device::close`] waits.
#[derive(Clone)]
pub struct Device(Arc<DeviceInner>);

struct DeviceInner {
    context: Arc<Context>,
    listing: Arc<Listing>,
    /// The pools that may keep memory which the device pinned.
    pools: Arc<Mutex<Vec<Weak<CentralPool>>>>,
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        self.listing.close(&self.context);
    }
}

/// The devices that are open, by their names.
static OPENED: Mutex<Option<HashMap<String, Weak<DeviceInner>>>> = Mutex::new(None);

impl Device {
    /// Opens a device by name.
    ///
    /// # Errors
    /// As for [opening a device](Error#opening-a-device).
    pub fn open(name: &str) -> Result<Self> {
        crate::os::watch_forks()?;
        let span =
            crate::foreign::span!(INFO, target: "pinpool::device", "open", device = tracing::field::Empty);
        let _entered = span.enter();
        let driver = family::driver(name);
        // The device's own name, as everything else has it; `name` may be short for it.
        span.record(|span| match &driver {
            Ok(driver) => _ = span.record("device", driver.name()),
            Err(_) => _ = span.record("device", &*clean(name, NAME)),
        });
        let driver = driver?;
        Self::known(driver, None)
    }

    /// Opens a device that does nothing by itself, for this repository's tests. It has no threads
    /// and its pools no timers; a call that waits calls `advance`, which makes one piece of work
    /// happen, until it returns `false`. A device that is open stays as it is. No part of the API.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    #[doc(hidden)]
    pub fn by_hand(name: &str, advance: impl Fn() -> bool + Send + Sync + 'static) -> Result<Self> {
        crate::os::watch_forks()?;
        Self::known(family::driver(name)?, Some(Box::new(advance)))
    }

    /// Makes later opens of this device start it anew, though something that never ends keeps it
    /// open. For this repository's tests; no part of the API.
    #[doc(hidden)]
    pub fn abandon(name: &str) {
        OPENED.lock().get_or_insert_with(HashMap::new).remove(name);
    }

    /// The device that is open under the driver's name, or a new one.
    fn known(driver: Arc<dyn Driver>, hand: Option<Hand>) -> Result<Self> {
        let name = driver.name().to_owned();
        let mut open = OPENED.lock();
        let open = open.get_or_insert_with(HashMap::new);
        if let Some(inner) = open.get(&name).and_then(Weak::upgrade) {
            // The new driver may have a context to let go of, too.
            let holds = inner.context.holds().clone();
            inner.context.worker().send(move || holds.let_go(&*driver));
            return Ok(Self(inner));
        }
        let device = Self::start(Context::new(driver, hand)?)?;
        open.retain(|_, inner| inner.strong_count() > 0);
        open.insert(name, Arc::downgrade(&device.0));
        Ok(device)
    }

    /// The device of an adopted context.
    pub(crate) fn adopted(context: AdoptedContext, keep_alive: Option<KeepAlive>) -> Result<Self> {
        let device = match context {
            AdoptedContext::Default(name) => return Self::open(&name),
            AdoptedContext::Other(driver) => Self::known(driver, None)?,
        };
        keep_alive.into_iter().for_each(|kept| device.context().holds().keep(kept));
        Ok(device)
    }

    /// A device of a host node, for tests: [`crate::host`] has an example. (The devices of two
    /// nodes have the same names, and so the same metrics.)
    ///
    /// # Errors
    /// [`Error::Unavailable`] for an ordinal that the node does not have.
    pub fn on(node: &HostNode, ordinal: u32) -> Result<Self> {
        crate::os::watch_forks()?;
        Self::start(Context::new(node.driver(ordinal)?, None)?)
    }

    pub(crate) fn start(context: Arc<Context>) -> Result<Self> {
        let listing = Listing::start(&context)?;
        Ok(Self(Arc::new(DeviceInner { context, listing, pools: Arc::default() })))
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.0.context
    }

    /// Notes that the memory of a pool may keep the device open.
    pub(crate) fn serves(&self, pool: &Arc<CentralPool>) {
        let mut pools = self.0.pools.lock();
        pools.retain(|pool| pool.strong_count() > 0);
        pools.push(Arc::downgrade(pool));
    }

    /// The driver as its own type, in the process that opened it; another kind "is `what`".
    pub(crate) fn driver_of<D: Any>(&self, what: &str) -> Result<&D> {
        crate::os::check_fork()?;
        let driver = self.context().driver().as_any().downcast_ref();
        driver.ok_or_else(|| Error::Unsupported(format!("{} is {what}", self.name())))
    }

    pub(crate) fn listing(&self) -> &Arc<Listing> {
        &self.0.listing
    }

    /// The device's name, such as `host:0`.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.context.name()
    }

    /// The host's NUMA node of the device: pools take their memory from there. `None`: neither the
    /// driver nor the system says, or the device is the host.
    #[must_use]
    pub fn numa_node(&self) -> Option<u32> {
        self.context().driver().numa_node()
    }

    /// The device's place on the PCI bus as Linux spells it (`0000:65:00.0`), its name under
    /// `/sys/bus/pci/devices`. `None`: unknown, or in the child of a fork.
    #[must_use]
    pub fn pci_address(&self) -> Option<String> {
        crate::os::check_fork().ok()?;
        self.context().driver().pci_address()
    }

    /// Device memory of `len` bytes, uninitialised, aligned to 256 bytes at least, usable on every
    /// stream. The call blocks until the memory is there; allocating and freeing may synchronise
    /// the device.
    ///
    /// # Errors
    /// [`Error::ZeroLength`]; else [as every call](Error#every-call), also when the device is out
    /// of memory.
    pub fn alloc(&self, len: usize) -> Result<DeviceSlice> {
        DeviceSlice::allocate(&self.0.context, len)
    }

    /// Device memory that the program or another library allocated, for use in every copy call: a
    /// raw `CUdeviceptr`, a pointer of the runtime API, another library's tensor.
    ///
    /// `owner` is the value that keeps the memory allocated, by value or as an `Arc`; `()` where
    /// something else sees to that. After the last handle's drop and the last copy it is dropped on
    /// the device's region thread, where its drop may block, but must not wait for a buffer of a
    /// pool. On a GPU the device's context is current there, and what the drop frees disturbs no
    /// capture. Where a stream was lost, and in the child of a fork, the owner is leaked.
    ///
    /// The range is checked here, once: on a GPU by `cuPointerGetAttributes`, in about a
    /// microsecond. Memory of `cuMemAlloc`, `cuMemAllocAsync`, `cuMemMap` and managed memory
    /// passes.
    ///
    /// # Ordering
    /// None is added: copies are ordered with other work on their own stream. Where streams of the
    /// program and of the crate both use the memory, make them wait for each other.
    ///
    /// # Errors
    /// With the owner: [`Error::Argument`], whose text says what is wrong (zero bytes, a host
    /// pointer, another device's or context's, past its allocation, unknown to the driver).
    ///
    /// # Safety
    /// Until `owner` is dropped (with an owner that keeps nothing: until the last handle is dropped
    /// and everything that used one was seen complete):
    /// - `address..address + len` stays allocated;
    /// - no kernel, no other library and, for managed memory, no CPU reads or writes it while a
    ///   copy of this crate writes it, or writes it while a copy reads it;
    /// - code that reads it as values of some type accepts the bytes that copies wrote there.
    pub unsafe fn raw_memory<O: Send + 'static>(
        &self,
        address: u64,
        len: usize,
        owner: O,
    ) -> Result<DeviceSlice, SubmitError<O>> {
        // SAFETY: the caller promises what `foreign` asks for: its contract is this function's.
        unsafe { DeviceSlice::foreign(self.context(), address, len, owner) }
    }

    /// Looks at every stream of the device on this thread, as a thread of the crate does by itself:
    /// records events for what was submitted, asks the driver what is complete, and returns the
    /// buffers of what is. Says whether anything was seen complete.
    pub fn reap(&self) -> bool {
        // In the child of a fork the locks may be held by threads that do not exist there.
        !crate::os::forked() && self.listing().look(true)
    }

    /// The error that the device was lost with, if it was.
    #[must_use]
    pub fn lost(&self) -> Option<Error> {
        self.0.context.poisoned().cloned()
    }
}

/// What keeps a context or a stream of the program alive. `None` where its drop does nothing, so
/// that it keeps nothing and takes the place of no later one.
pub(crate) fn kept<K: Any + Send + Sync>(keep_alive: K) -> Option<KeepAlive> {
    std::mem::needs_drop::<K>().then(|| KeepAlive::new(Box::new(keep_alive)))
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.name()).finish()
    }
}
