//! What operators see, driven from outside: each condition is brought about, and then observed as an operator would.
//!
//! A test that records events has a process of its own, since a process has one subscriber.

mod copied;
mod events;
#[cfg(feature = "metrics")]
mod facade;
mod record;
mod sampler;
mod snapshot;
mod stuck;
mod sums;
mod transfers;

use std::time::{Duration, Instant};

use pinpool::host::{HostConfig, HostNode};
use pinpool::{Device, Pool, PoolBuilder, Unpinned};

/// Longer than anything takes here: a condition that has not come by then hangs.
const HANG: Duration = Duration::from_secs(30);

/// A node with one device, and a pool of 1 MiB on it.
struct Bench {
    node: HostNode,
    device: Device,
    pool: Pool,
}

impl Bench {
    fn new(config: HostConfig, set: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Self {
        let node = HostNode::new(config).unwrap();
        let device = Device::on(&node, 0).unwrap();
        let pool = set(Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow)).build().unwrap();
        Self { node, device, pool }
    }

    fn stepped(set: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Self {
        Self::new(HostConfig::new().stepped(1), set)
    }

    /// Runs everything that is queued, and returns all that is complete.
    fn settle(&self) {
        // An event that a poll records is queued, too.
        while self.node.step() | self.device.reap() || self.node.queued(0) > 0 {}
    }
}

/// Waits for what another thread does.
fn eventually(what: &str, mut there: impl FnMut() -> bool) {
    let since = Instant::now();
    while !there() {
        assert!(since.elapsed() < HANG, "not in {HANG:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
