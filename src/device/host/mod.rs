//! The host device, in plain Rust. [`crate::host`] is its page.
//!
//! The files, in the order in which to read them. `memory`: device memory, and the function that moves bytes. `unit`:
//! one device: its streams with their threads, its events, and how it dies. `driver`: the contract's calls. `fault`:
//! armed faults and traces. `node`: the machine, its pinned ranges, and the public handle to it. Only `memory`, `unit`
//! and `driver` have unsafe code. The crate calls this through `Driver`, and a program through `HostNode`.

mod driver;
mod fault;
mod memory;
mod node;
#[cfg(all(test, not(loom)))]
mod tests;
mod unit;

use std::time::Duration;

pub(crate) use driver::HostDriver;
pub use fault::{Call, Failure, Fault};
pub use node::{HostNode, HostUsage};
pub(crate) use unit::HostFunction;

use crate::error::{Error, Result};

/// The most devices that a node can have.
const MAX_DEVICES: u32 = 1024;
/// Bytes of device memory at least, where none is configured and the system has next to none.
const LEAST_MEMORY: usize = 64 << 20;

/// The configuration of a [`HostNode`].
///
/// ```
/// use pinpool::host::{HostConfig, HostNode};
///
/// let node = HostNode::new(HostConfig::new().devices(2).memory(1 << 30))?;
/// assert_eq!(node.devices(), 2);
/// # Ok::<(), pinpool::Error>(())
/// ```
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

    /// The memory of each device, in bytes. The default is three quarters of the memory that is available when the node
    /// is made, divided among its devices, and at least 64 MiB each. It is taken from the system as it is used.
    pub fn memory(mut self, bytes: usize) -> Self {
        self.memory = Some(bytes);
        self
    }

    /// Each stream's thread waits before each copy and each host function, for a random time up to `max`. With a `max`
    /// of zero it only yields to other threads, which is for tests that make many copies.
    ///
    /// Each stream's delays follow from the seed; their effect depends on how the threads are scheduled.
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
            let text = "host devices with 0 bytes of memory; give them at least 1";
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
