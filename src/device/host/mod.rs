//! The host device, in plain Rust. [`crate::host`] is its page.
//!
//! The files, in the order in which to read them. This one: how a node is set up, and by what calls
//! tests hang its devices and make them fail. `memory`: device memory. `node`: what a node has, the
//! streams' threads, and how a device dies. `driver`: the contract's calls.

mod driver;
mod memory;
mod node;

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub(crate) use self::driver::HostDriver;
pub(crate) use self::node::HostFunction;
use self::node::{Node, State};
use super::HostKind;
use crate::error::{Error, Result};

/// The most devices that a node can have.
const MAX_DEVICES: u32 = 1024;
/// Bytes of device memory at least, where none is configured and the system has next to none.
const LEAST_MEMORY: usize = 64 << 20;

/// The configuration of a [`HostNode`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct HostConfig {
    devices: u32,
    memory: Option<usize>,
    late: Option<(Duration, u64)>,
}

impl HostConfig {
    /// One device, without delays.
    pub fn new() -> Self {
        Self { devices: 1, memory: None, late: None }
    }

    /// The number of devices, 1 to 1024. The default is 1.
    pub fn devices(mut self, devices: u32) -> Self {
        self.devices = devices;
        self
    }

    /// The memory of each device, in bytes. The default is three quarters of the available memory,
    /// divided among the devices, and at least 64 MiB each. It is taken as it is used.
    pub fn memory(mut self, bytes: usize) -> Self {
        self.memory = Some(bytes);
        self
    }

    /// Each stream's thread waits before each copy and host function, for a random time up to
    /// `max`. A `max` of zero only yields to other threads, for tests that make many copies.
    ///
    /// Each stream's delays follow from the seed; their effect depends on the scheduler.
    pub fn late(mut self, max: Duration, seed: u64) -> Self {
        self.late = Some((max, seed));
        self
    }

    /// Bytes of memory of each device.
    fn capacity(&self) -> usize {
        self.memory.unwrap_or_else(|| {
            let available = crate::os::available_memory().unwrap_or(0);
            let share = available / 4 * 3 / u64::from(self.devices.max(1));
            usize::try_from(share).unwrap_or(usize::MAX).max(LEAST_MEMORY)
        })
    }
}

impl Default for HostConfig {
    fn default() -> Self {
        Self::new()
    }
}

macro_rules! calls {
    ($($(#[$doc:meta])* $call:ident $name:literal,)*) => {
        /// A call that a device serves. A [`Fault`] is armed for one; a trace lists them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Call {
            $($(#[$doc])* $call,)*
        }

        impl Call {
            /// Every kind of call, for tests that go through all of them.
            pub const ALL: [Self; 18] = [$(Self::$call),*];

            /// The call's name, as errors show it, such as `copy_blocking`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$call => $name,)*
                }
            }
        }
    };
}

calls! {
    /// Pins host pages, or registers host memory.
    Pin "pin",
    /// Unpins host pages, or unregisters host memory.
    Unpin "unpin",
    /// Allocates host memory, by the device.
    AllocateHost "allocate_host",
    /// Frees host memory that the device allocated.
    FreeHost "free_host",
    /// Asks for the address at which the device sees host memory.
    DeviceAddress "device_address",
    /// Allocates device memory.
    Allocate "allocate",
    /// Frees device memory.
    Free "free",
    /// Checks memory that the crate did not allocate.
    Examine "examine",
    /// Creates a stream.
    CreateStream "create_stream",
    /// Destroys a stream.
    DestroyStream "destroy_stream",
    /// Submits a copy.
    Copy "copy",
    /// Copies, and waits for the copy.
    CopyBlocking "copy_blocking",
    /// Queues a host function ([`launch`](crate::host::launch)).
    Launch "launch",
    /// Creates an event.
    CreateEvent "create_event",
    /// Destroys an event.
    DestroyEvent "destroy_event",
    /// Records an event on a stream.
    Record "record",
    /// Asks whether an event is complete.
    Query "query",
    /// Makes a stream wait for an event.
    WaitEvent "wait_event",
}

/// What an armed [`Fault`] does to its call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// Fails with class [`Argument`](crate::ErrorClass::Argument); nothing happens.
    Argument,
    /// Fails with class [`Transient`](crate::ErrorClass::Transient); nothing happens.
    Transient,
    /// Kills the device, as [`HostNode::kill`] does, and fails with class
    /// [`DeviceLost`](crate::ErrorClass::DeviceLost).
    DeviceLost,
    /// Fails with class [`Transient`](crate::ErrorClass::Transient), but the operation is queued
    /// and runs. Without an operation, and for an allocation, this is [`Failure::Transient`].
    RunsAnyway,
    /// Fails with class [`Capture`](crate::ErrorClass::Capture); nothing happens.
    Capture,
    /// Succeeds, but the operation and all that follow it on that stream wait for
    /// [`HostNode::resume`]. Without an operation this is no fault.
    Stall,
}

/// One call that is to fail: armed by [`HostNode::fail`].
///
/// ```
/// # use pinpool::{Device, Error, ErrorClass};
/// use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode};
///
/// let node = HostNode::new(HostConfig::new())?;
/// let device = Device::on(&node, 0)?;
/// node.start_trace();
/// node.fail(Fault { device: 0, call: Call::Allocate, nth: 1, failure: Failure::Transient });
/// let memory = device.alloc(100)?; // the first allocation from now
/// assert_eq!(device.alloc(100).unwrap_err().class(), ErrorClass::Transient, "the second");
/// assert_eq!(node.trace(), [Call::Allocate, Call::Allocate]);
/// # drop(memory);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fault {
    /// The device, counted from 0.
    pub device: u32,
    /// The kind of call.
    pub call: Call,
    /// Which of those calls, counted from now; 0 is the next one.
    pub nth: u64,
    /// What happens to that call.
    pub failure: Failure,
}

/// What a host device has that was not given back: see [`HostNode::live`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostUsage {
    /// The number of streams created and not destroyed.
    pub streams: usize,
    /// The number of events created and not destroyed.
    pub events: usize,
    /// The number of allocations of device memory.
    pub allocations: usize,
    /// The bytes of these allocations.
    pub allocated_bytes: usize,
    /// Bytes of host memory that the device has pinned.
    pub pinned_bytes: usize,
    /// Bytes of host memory that the device has allocated; page-locked ones are pinned, too.
    pub host_bytes: usize,
    /// The number of operations queued or running.
    pub queued: usize,
}

/// A machine with host devices. Clones are the same machine.
///
/// The [module's page](crate::host) says what its devices do. All methods may be called from any
/// thread. In the child of a fork they do nothing, and report nothing.
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned};
/// use pinpool::host::{HostConfig, HostNode};
///
/// let node = HostNode::new(HostConfig::new())?;
/// let device = Device::on(&node, 0)?;
/// # let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (stream, memory, mut buffer) = (device.stream()?, device.alloc(4)?, pool.checkout(4)?);
/// # buffer.extend_from_slice(b"data");
/// node.hang(0);
/// let copy = stream.upload(buffer, memory.slice(..)?)?;
/// assert!(!copy.is_done()? && node.live(0).queued > 0, "nothing runs on a hung device");
/// node.resume(0);
/// copy.wait()?;
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone)]
pub struct HostNode(Arc<Node>);

impl HostNode {
    /// A new node.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) if the configuration makes no sense.
    pub fn new(config: HostConfig) -> Result<Self> {
        crate::os::watch_forks()?;
        let devices = config.devices;
        if !(1..=MAX_DEVICES).contains(&devices) {
            return Err(Error::Argument(format!("{devices} host devices; a node has 1 to {MAX_DEVICES}")));
        }
        Ok(Self(Node::new(&config)))
    }

    /// The node behind `Device::open("host")`: one device, without delays. The first call makes it.
    #[must_use]
    pub fn system() -> Self {
        static SYSTEM: OnceLock<HostNode> = OnceLock::new();
        let new = || Self(Node::new(&HostConfig::new()));
        if crate::os::watch_forks().is_err() {
            // In the child of a fork none is put there: the fork may have copied the cell while
            // another thread of the parent was filling it.
            return SYSTEM.get().cloned().unwrap_or_else(new);
        }
        SYSTEM.get_or_init(new).clone()
    }

    /// Looks at the node or changes it. In the child of a fork it does nothing: locks may be held
    /// there by threads that do not exist.
    fn with<R: Default>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        if crate::os::forked() { R::default() } else { change(&mut self.0.state.lock()) }
    }

    /// The number of devices.
    #[must_use]
    pub fn devices(&self) -> u32 {
        self.with(|state| state.units.len() as u32)
    }

    /// Arms a fault. It strikes once. Of several that are due for one call, the first armed
    /// strikes, and the others strike later calls.
    pub fn fail(&self, fault: Fault) {
        self.with(|state| state.armed.push(fault));
    }

    /// Disarms all faults that have not struck, and says how many there were.
    pub fn clear_faults(&self) -> usize {
        self.with(|state| state.armed.drain(..).count())
    }

    /// Begins to record calls to the node's devices, and forgets those recorded before. The record
    /// grows with each call.
    pub fn start_trace(&self) {
        self.with(|state| state.trace = Some(Vec::new()));
    }

    /// The calls recorded so far, in order, those that failed included.
    #[must_use]
    pub fn trace(&self) -> Vec<Call> {
        self.with(|state| state.trace.clone().unwrap_or_default())
    }

    /// Kills the device. The call waits for copies that are under way: when it returns, no copy of
    /// the device touches host memory any more.
    pub fn kill(&self, device: u32) {
        if device < self.devices() {
            self.0.kill(&mut self.0.state.lock(), device as usize, "the device was killed");
        }
    }

    /// Keeps the device's queued operations from running, on all its streams and those made later.
    /// Operations that are running come to their end.
    pub fn hang(&self, device: u32) {
        self.with(|state| _ = state.units.get_mut(device as usize).map(|unit| unit.hung = true));
    }

    /// Lets everything on the device run again: it undoes [`hang`](Self::hang) and
    /// [`Failure::Stall`].
    pub fn resume(&self, device: u32) {
        self.with(|state| {
            let Some(unit) = state.units.get_mut(device as usize) else { return };
            unit.hung = false;
            unit.queued.values_mut().for_each(|operation| operation.stalled = false);
            self.0.resumed.notify_all();
        });
    }

    /// What the device has that was not given back, for tests that look for leaks.
    #[must_use]
    pub fn live(&self, device: u32) -> HostUsage {
        self.with(|state| {
            let Some(unit) = state.units.get(device as usize) else { return HostUsage::default() };
            let sum = |counts: fn(Option<HostKind>) -> bool| {
                let ranges = unit.ranges.iter().filter(|(_, (_, kind))| counts(*kind));
                ranges.map(|(start, (end, _))| end - start).sum()
            };
            HostUsage {
                streams: unit.streams.len(),
                events: unit.events.len(),
                allocations: unit.memory.len(),
                allocated_bytes: unit.used(),
                pinned_bytes: sum(|kind| kind != Some(HostKind::Managed)),
                host_bytes: sum(|kind| kind.is_some()),
                queued: unit.queued.len(),
            }
        })
    }
}

impl fmt::Debug for HostNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostNode").field("devices", &self.devices()).finish()
    }
}
