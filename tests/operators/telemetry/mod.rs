//! What operators see, driven from outside: each condition is brought about, and then observed as an operator would.

/// Begins a test that records events: it has a process of its own, since a process has one subscriber.
macro_rules! recorded {
    () => {
        $crate::support::own_process!();
        $crate::record::record();
    };
}

mod events;
mod sampler;
mod stuck;
mod transfers;

use std::sync::Arc;
use std::time::Duration;

use pinpool::host::{HostConfig, HostNode};
use pinpool::telemetry::Sampler;
use pinpool::{Copier, Device, DeviceSlice, Error, PinnedBuf, Pool, PoolBuilder, Request, Stream, Unpinned};
use tracing::Level;

use crate::record::{Record, all, clear, event, events, span, spans};
use crate::support::hand::Machine;
use crate::support::until;

/// A machine with one device, and a pool of 1 MiB on it.
struct Bench<N = HostNode> {
    device: Device,
    pool: Pool,
    /// The last to be dropped: a machine looks at what was done to it.
    node: N,
}

impl Bench {
    /// On a host device, with threads.
    fn new(set: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Self {
        let node = HostNode::new(HostConfig::new()).unwrap();
        let device = Device::on(&node, 0).unwrap();
        Self::with(node, device, set)
    }
}

impl Bench<Machine> {
    /// On a simulated GPU that runs nothing by itself.
    fn by_hand(set: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Self {
        let machine = Machine::new(1, 256 << 20, 1);
        let device = machine.device(0);
        Self::with(machine, device, set)
    }

    /// Runs everything that is queued, and returns all that is complete.
    fn settle(&self) {
        // An event that a poll records is queued, too.
        while self.node.step() | self.device.reap() || self.node.queued(0) > 0 {}
    }

    /// The next call of that name fails for a reason that may pass.
    fn fail(&self, call: &str) {
        // cuda.h: CUDA_ERROR_OUT_OF_MEMORY.
        self.node.fail(call, 1, 2);
    }
}

impl<N> Bench<N> {
    fn with(node: N, device: Device, set: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Self {
        let pool = set(Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow)).build().unwrap();
        Self { node, device, pool }
    }

    /// A stream, and a page of device memory to copy to.
    fn target(&self) -> (Stream, DeviceSlice) {
        (self.device.stream().unwrap(), self.device.alloc(4096).unwrap())
    }

    /// A buffer of so many bytes, all written.
    #[track_caller]
    fn filled(&self, request: impl Into<Request>) -> PinnedBuf {
        let mut buf = self.pool.checkout(request).unwrap();
        let len = buf.capacity();
        buf.try_resize(len, 1).unwrap();
        buf
    }
}
