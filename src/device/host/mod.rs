//! The host device: a device whose memory and streams are the host's own.
//!
//! It has two uses. On a machine without an accelerator it serves in earnest: each stream is a thread that copies at
//! the speed of `memcpy`, and a program written for pinned memory and streams runs unchanged. In tests it is the worst
//! device that the rules allow: it copies as late as it may, lets streams overtake each other, refuses calls, hangs and
//! dies, on demand. A server that embeds this crate can put its own code through the same.
//!
//! # Nodes
//!
//! A [`HostNode`] is a machine with one or more host devices. [`HostNode::system`] is the one that
//! `Device::open("host")` finds; tests make nodes of their own with [`HostNode::new`], which share nothing with it nor
//! with each other. Devices of a node are counted from 0 and are named `host:0`, `host:1` and so on.
//!
//! # With threads
//!
//! By default each stream has an operating system thread (`pinpool-host-N`) that runs the stream's operations in order
//! and sleeps when there are none. [`HostConfig::late`] makes the threads wait for a random time before each copy, so
//! that other streams come first, and whoever does not wait for an event reads what is not there yet.
//!
//! # Stepped
//!
//! With [`HostConfig::stepped`] there are no threads. Operations stay queued until [`HostNode::step`] or
//! [`HostNode::step_stream`] runs one; a copy reads its source and writes its target then and not before. From the same
//! seed and the same calls follows the same order, so a failing test can be run again.
//!
//! A copy that its caller waits for runs the operations before it on its stream, and those of other streams that it
//! must wait for. If it cannot, because something is hung or stalled, it is taken out of the queue and fails with
//! class [`Transient`](crate::ErrorClass::Transient). (With threads it waits until the device is resumed.)
//!
//! # Host memory
//!
//! Pinning and registering lock the pages (`mlock`, so the memlock limit applies) and write the range down: two that
//! overlap are refused, two that share a page are not. What the device allocates itself is a mapping, locked unless it
//! is managed memory. The device sees all of it at the host's own addresses.
//!
//! # Failing
//!
//! - [`HostNode::fail`] and [`HostNode::fail_any`] arm [`Fault`]s. With [`HostNode::start_trace`] a test learns how
//!   many calls a scenario makes, and can repeat it with each of them failing once.
//! - [`HostNode::hang`] and [`HostNode::hang_stream`] keep queued operations from running until resumed.
//! - [`HostNode::kill`] ends a device. Its queued operations are dropped, and once `kill` returns, or any call has
//!   failed with class [`DeviceLost`](crate::ErrorClass::DeviceLost), none of its copies touches host memory any more.
//!   Every later call fails so, with two exceptions: giving host pages and device memory back succeeds, and really
//!   gives them back. Destroying a stream or an event fails as well, but the device lets go of them, so that
//!   [`HostNode::live`] comes to zero.
//! - A queued copy whose device memory was freed before the copy ran kills the device, as accelerators die of an
//!   illegal address. So does one that runs on memory in a stream's order before that stream has come to the
//!   allocation.
//!
//! What is asked about a device that the node does not have reads as zero, and orders to it do nothing.

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

pub use fault::{Call, Failure, Fault};
pub use node::{HostNode, HostUsage};

use crate::error::{Error, ErrorClass, Result};

/// The most devices that a node can have.
const MAX_DEVICES: u32 = 1024;
/// Device memory where nothing was configured and the system has next to none.
const LEAST_MEMORY: usize = 64 << 20;

/// What a [`HostNode`] is to be like.
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

    /// The number of devices, 1 to 1024. One unless told.
    pub fn devices(mut self, devices: u32) -> Self {
        self.devices = devices;
        self
    }

    /// Bytes of memory of each device. Unless told, three quarters of the memory that is available when the node is
    /// made, shared out among its devices, and at least 64 MiB each. It is taken from the system as it is used.
    pub fn memory(mut self, bytes: usize) -> Self {
        self.memory = Some(bytes);
        self
    }

    /// No threads: operations run when [`HostNode::step`] is called, in an order that follows from the seed.
    pub fn stepped(mut self, seed: u64) -> Self {
        self.stepped = Some(seed);
        self
    }

    /// Each stream's thread waits before each copy, for a random time up to `max`. With a `max` of zero it only lets
    /// other threads go first, which is for tests that make many copies.
    ///
    /// Each stream's delays follow from the seed; what comes of them depends on the threads. Not together with
    /// [`stepped`](Self::stepped), where everything is as late as it can be.
    pub fn late(mut self, max: Duration, seed: u64) -> Self {
        self.late = Some((max, seed));
        self
    }

    fn check(&self) -> Result<()> {
        if !(1..=MAX_DEVICES).contains(&self.devices) {
            let devices = self.devices;
            return Err(Error::Config(format!("{devices} host devices; a node has 1 to {MAX_DEVICES}")));
        }
        if self.memory == Some(0) {
            return Err(Error::Config(
                "host devices with 0 bytes of memory; give them at least 1".to_owned(),
            ));
        }
        if self.stepped.is_some() && self.late.is_some() {
            let text = "a host node is either stepped or late; stepped operations wait until they are stepped anyway";
            return Err(Error::Config(text.to_owned()));
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

/// Why the device does not do what it was told, before it is known which call and device the error is to name.
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
        Self::argument(format!("this device has no {what} {handle:#x}, or has it no more"))
    }

    fn moment(text: impl Into<String>) -> Self {
        Self { class: ErrorClass::Transient, code: libc::EAGAIN, text: text.into() }
    }

    fn out_of_memory(text: impl Into<String>) -> Self {
        Self { class: ErrorClass::Transient, code: libc::ENOMEM, text: text.into() }
    }
}
