//! What the tests of copiers and of checkpoints share: a host device of its own with a pool, bytes
//! to move, and a wait for a task's end.
#![allow(dead_code, reason = "each of them uses a part of it")]

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pinpool::copier::CopierBuilder;
use pinpool::host::{HostConfig, HostNode};
use pinpool::{Copier, Device, PinnedBuf, Pool, Request, Unpinned};

use super::{Random, in_use, until};

/// A device of its own, with a pool.
pub struct Rig {
    pub node: HostNode,
    pub device: Device,
    pub pool: Pool,
    /// Whether copies are made never to end, so that their memory stays quarantined.
    pub loses: AtomicBool,
}

impl Rig {
    pub fn new(config: HostConfig, capacity: usize) -> Self {
        let node = HostNode::new(config.memory(1 << 30)).unwrap();
        let device = Device::on(&node, 0).unwrap();
        let pool = Pool::builder(&device).capacity(capacity).unpinned(Unpinned::Allow).build().unwrap();
        Self { node, device, pool, loses: AtomicBool::new(false) }
    }

    pub fn plain() -> Self {
        Self::new(HostConfig::new(), 16 << 20)
    }

    pub fn late() -> Self {
        Self::new(HostConfig::new().late(Duration::from_micros(300), 11), 16 << 20)
    }

    /// Small chunks, so that there are many of them.
    pub fn builder(&self) -> CopierBuilder {
        Copier::builder(&self.pool, &self.device).threads(3).chunk(64 << 10).share(1 << 20)
    }

    pub fn copier(&self) -> Copier {
        self.builder().build().unwrap()
    }

    /// All that the pool has left. (A copier takes the shortest pieces, too.) A worker that found no chunk for a segment may
    /// return it shortly after a transfer has ended: a test that counts on an empty pool calls `all_is_back` first.
    pub fn emptied(&self) -> Vec<PinnedBuf> {
        let of = |request: Request| std::iter::from_fn(move || self.pool.try_checkout(request).ok());
        of(Request::new(64 << 10)).chain(of(Request::new(1).align(4096))).collect()
    }

    /// Everything is back, at once or a little later, and the sums are right.
    pub fn all_is_back(&self) {
        until("all is back", || {
            self.device.reap();
            in_use(&self.pool) + self.pool.stats().quarantined_bytes == 0
        });
        self.pool.check().unwrap();
    }
}

/// A test that passes leaves nothing behind, unless it has lost the device or a copy.
impl Drop for Rig {
    fn drop(&mut self) {
        let loses = self.loses.load(Ordering::Relaxed) || self.device.lost().is_some();
        if !loses && !std::thread::panicking() {
            self.all_is_back();
        }
    }
}

/// Bytes in which no two neighbourhoods are alike.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let (mut random, mut bytes) = (Random::new(seed), vec![0; len]);
    for eight in bytes.chunks_mut(8) {
        eight.copy_from_slice(&random.next().to_le_bytes()[..eight.len()]);
    }
    bytes
}

/// Runs a future on this thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
    super::block_on(|| std::thread::sleep(Duration::from_micros(50)), future)
}
