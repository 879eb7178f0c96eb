//! What the tests of the copy queue share: a host device of its own with a pool, a queue,
//! and memory to copy to.

use pinpool::host::{HostConfig, HostNode};
use pinpool::{CopyQueue, Device, DeviceBuffer, Pool, QueueOptions, Unpinned};

/// See the module's page.
pub struct Setup {
    pub node: HostNode,
    pub device: Device,
    pub pool: Pool,
    pub queue: CopyQueue,
    pub memory: DeviceBuffer,
}

impl Setup {
    /// With a pool of `capacity` bytes, and `memory` bytes on the device.
    pub fn new(config: HostConfig, capacity: usize, options: QueueOptions, memory: usize) -> Self {
        let node = HostNode::new(config).unwrap();
        let device = Device::on(&node, 0).unwrap();
        let pool = Pool::builder(&device).capacity(capacity).unpinned(Unpinned::Allow).build().unwrap();
        let queue = device.copy_queue_with(options).unwrap();
        let memory = device.alloc(memory).unwrap();
        Self { node, device, pool, queue, memory }
    }
}
