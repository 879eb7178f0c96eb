//! The pool itself, on the host device and on simulated GPUs that a test moves by hand: checkout and return, threads,
//! requests that wait, growth and its limits, closing, host functions, and a fork. And copiers, on host devices.

mod async_server;
mod buffers;
mod closing;
mod copy;
mod fork;
mod host;
mod launch;
mod limits;
mod memlock;
#[cfg(feature = "cuda")]
mod regressions;
#[cfg(feature = "cuda")]
mod running_out;
#[path = "../support/mod.rs"]
mod support;
mod threads;

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode, HostUsage};
use pinpool::telemetry::Sampler;
use pinpool::{
    Copier, Device, DeviceSlice, Error, PinnedBuf, Pool, PoolBuilder, PoolStats, Request, Stream, Unpinned,
};
use support::{HANG, own_process, skip};

/// A host device, and the node that it is of.
fn host() -> (HostNode, Device) {
    on(HostConfig::new())
}

fn on(config: HostConfig) -> (HostNode, Device) {
    let node = HostNode::new(config).unwrap();
    let device = Device::on(&node, 0).unwrap();
    (node, device)
}

/// Two of one node.
fn hosts() -> (HostNode, [Device; 2]) {
    let node = HostNode::new(HostConfig::new().devices(2)).unwrap();
    let devices = [0, 1].map(|ordinal| Device::on(&node, ordinal).unwrap());
    (node, devices)
}

/// For a pool whose memory need not be pinned.
fn builder(device: &Device, capacity: usize) -> PoolBuilder {
    Pool::builder(device).capacity(capacity).unpinned(Unpinned::Allow)
}

fn pool(device: &Device, capacity: usize) -> Pool {
    builder(device, capacity).build().unwrap()
}

/// A buffer that is full of a byte.
fn filled(pool: &Pool, request: impl Into<Request>, byte: u8) -> PinnedBuf {
    let mut buf = pool.checkout(request).unwrap();
    let len = buf.capacity();
    buf.try_resize(len, byte).unwrap();
    buf
}

/// The pool's books are in order: a check finds nothing, and the parts are the whole.
#[track_caller]
fn checked(pool: &Pool) -> PoolStats {
    pool.check().unwrap();
    let s = pool.stats();
    let parts = s.free_bytes + s.checked_out_bytes + s.in_flight_bytes + s.quarantined_bytes + s.cut_bytes;
    assert_eq!(parts, s.pinned_bytes + s.unpinned_bytes, "{s:?}");
    assert!(parts <= s.capacity_bytes, "{s:?}");
    s
}

/// Waits for what another thread does.
#[track_caller]
fn until(mut so: impl FnMut() -> bool, why: impl Fn() -> String) {
    let since = Instant::now();
    while !so() {
        assert!(since.elapsed() < HANG, "it does not happen: {}", why());
        std::thread::sleep(Duration::from_millis(1));
    }
}
