//! [`HostNode`]: a machine with host devices, by which tests hang them and make them fail.

#![deny(unsafe_code)]

use std::fmt;
use std::sync::{Arc, OnceLock};

use super::node::{Node, State};
use super::{Call, Fault, HostConfig, MAX_DEVICES};
use crate::device::HostKind;
use crate::error::{Error, Result};

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
pub struct HostNode(pub(super) Arc<Node>);

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
    /// [`Failure::Stall`](super::Failure::Stall).
    pub fn resume(&self, device: u32) {
        self.with(|state| {
            _ = state.units.get_mut(device as usize).map(|unit| unit.hung = false);
            let own = state.queued.values_mut().filter(|operation| operation.device == device as usize);
            own.for_each(|operation| operation.stalled = false);
            self.0.resumed.notify_all();
        });
    }

    /// What the device has that was not given back, for tests that look for leaks.
    #[must_use]
    pub fn live(&self, device: u32) -> HostUsage {
        let at = device as usize;
        self.with(|state| {
            let mut usage = HostUsage {
                streams: state.streams.values().filter(|stream| stream.device == at).count(),
                events: state.events.values().filter(|(device, _)| *device == at).count(),
                allocations: state.memory.values().filter(|block| block.device == at).count(),
                allocated_bytes: state.used(at),
                queued: state.queued(at),
                ..HostUsage::default()
            };
            for (start, (end, (_, kind))) in state.ranges.iter().filter(|(_, (_, owner))| owner.0 == at) {
                usage.pinned_bytes += if *kind == Some(HostKind::Managed) { 0 } else { end - start };
                usage.host_bytes += if kind.is_some() { end - start } else { 0 };
            }
            usage
        })
    }
}

impl fmt::Debug for HostNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostNode").field("devices", &self.devices()).finish()
    }
}
