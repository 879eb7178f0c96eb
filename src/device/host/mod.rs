//! The host device, in plain Rust. [`crate::host`] is its page.
//!
//! The files, in the order in which to read them. This one: how a node is set up, and what can be
//! made to fail. `memory`: device memory. `node`: what a node has, the streams' threads, and how a
//! device dies. `driver`: the contract's calls. `handle`: the public handle to a node.

mod driver;
mod handle;
mod memory;
mod node;
#[cfg(all(test, not(loom)))]
mod tests;

use std::time::Duration;

pub(crate) use driver::HostDriver;
pub use handle::{HostNode, HostUsage};
pub(crate) use node::HostFunction;

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
