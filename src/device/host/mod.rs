//! The host device, in plain Rust. [`crate::host`] is its page.
//!
//! The files, in the order in which to read them. `node`: the machine, and the public handle to it. `unit`: one device's
//! streams, memory and events, whether it is alive or hung. `stream`: a queue of operations, and how they run. `event`
//! and `memory`: an event table without locks; device memory behind addresses of its own. `driver`: the contract's
//! calls. `fault`: armed faults and traces. `node`, `unit`, `event` and `fault` have no unsafe code. The crate calls
//! this through `Driver`, and a program through `HostNode`.

mod driver;
mod event;
mod fault;
mod memory;
mod node;
mod stream;
mod unit;

#[cfg(all(test, not(loom)))]
mod tests;

use std::time::Duration;

pub(crate) use driver::HostDriver;
pub use fault::{Call, Failure, Fault};
pub use node::{HostNode, HostUsage};

use crate::error::{Error, ErrorClass, Result};

/// The most devices that a node can have.
const MAX_DEVICES: u32 = 1024;
/// Bytes of device memory at least, where none is configured and the system has next to none.
const LEAST_MEMORY: usize = 64 << 20;

/// The configuration of a [`HostNode`].
///
/// ```
/// use pinpool::host::{HostConfig, HostNode};
///
/// let node = HostNode::new(HostConfig::new().devices(2).memory(1 << 30).stepped(7))?;
/// assert_eq!(node.devices(), 2);
/// assert!(!node.step(), "nothing is queued");
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct HostConfig {
    devices: u32,
    memory: Option<usize>,
    stepped: Option<u64>,
    late: Option<(Duration, u64)>,
}

impl HostConfig {
    /// One device, with threads, without delays.
    pub fn new() -> Self {
        Self { devices: 1, memory: None, stepped: None, late: None }
    }

    /// The number of devices, 1 to 1024. The default is 1.
    pub fn devices(mut self, devices: u32) -> Self {
        self.devices = devices;
        self
    }

    /// The memory of each device, in bytes. The default is three quarters of the memory that is available when the node
    /// is made, divided among its devices, and at least 64 MiB each. It is taken from the system as it is used.
    pub fn memory(mut self, bytes: usize) -> Self {
        self.memory = Some(bytes);
        self
    }

    /// No threads: operations run when [`HostNode::step`] is called, in an order that follows from the seed.
    pub fn stepped(mut self, seed: u64) -> Self {
        self.stepped = Some(seed);
        self
    }

    /// Each stream's thread waits before each copy and each host function, for a random time up to `max`. With a `max` of zero it only yields
    /// to other threads, which is for tests that make many copies.
    ///
    /// Each stream's delays follow from the seed; their effect depends on how the threads are scheduled. A node cannot
    /// be [`stepped`](Self::stepped) as well, since there everything is as late as it can be.
    pub fn late(mut self, max: Duration, seed: u64) -> Self {
        self.late = Some((max, seed));
        self
    }

    fn check(&self) -> Result<()> {
        if !(1..=MAX_DEVICES).contains(&self.devices) {
            let devices = self.devices;
            return Err(Error::Argument(format!("{devices} host devices; a node has 1 to {MAX_DEVICES}")));
        }
        if self.memory == Some(0) {
            return Err(Error::Argument(
                "host devices with 0 bytes of memory; give them at least 1".to_owned(),
            ));
        }
        if self.stepped.is_some() && self.late.is_some() {
            let text = "a host node is either stepped or late; stepped operations wait until they are stepped anyway";
            return Err(Error::Argument(text.to_owned()));
        }
        Ok(())
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

/// What [`HostDriver::launch`] queues: a function of the program's, which gets the bytes that it reads and those that it writes.
pub(crate) type HostFunction = Box<dyn FnOnce(&[&[u8]], &mut [&mut [u8]]) + Send>;

/// Why the device refuses a call. [`HostUnit::error`](unit::HostUnit::error) adds the names of the call and the device.
#[derive(Debug)]
struct Refusal {
    class: ErrorClass,
    code: i32,
    text: String,
}

impl Refusal {
    fn argument(text: impl Into<String>) -> Self {
        Self { class: ErrorClass::Argument, code: libc::EINVAL, text: text.into() }
    }

    /// A bad address.
    fn fault(text: impl Into<String>) -> Self {
        Self { class: ErrorClass::Argument, code: libc::EFAULT, text: text.into() }
    }

    fn unknown(what: &str, handle: u64) -> Self {
        Self::argument(format!("this device has no {what} {handle:#x}, or has destroyed it"))
    }

    fn transient(text: impl Into<String>) -> Self {
        Self { class: ErrorClass::Transient, code: libc::EAGAIN, text: text.into() }
    }

    fn out_of_memory(text: impl Into<String>) -> Self {
        Self { class: ErrorClass::Transient, code: libc::ENOMEM, text: text.into() }
    }
}
