//! What these tests share: a host device with a pool, a copier and memory.

use std::time::{Duration, Instant};

use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode};
use pinpool::{Copier, CopierBuilder, Device, DeviceSlice, PinnedBuf, Pool, Unpinned};

use crate::support::in_use;

/// Longer than anything takes.
pub const HANG: Duration = Duration::from_secs(20);

/// Waits until it is so.
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !so() {
        assert!(since.elapsed() < HANG, "never: {what}");
        std::thread::yield_now();
    }
}

/// Runs what may hang instead of failing.
pub fn ends<T: Send + 'static>(what: &str, test: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, ended) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        let _done = done;
        test()
    });
    let ended = ended.recv_timeout(2 * HANG);
    assert_ne!(ended, Err(std::sync::mpsc::RecvTimeoutError::Timeout), "hangs: {what}");
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A device that is late, each time by another part of this.
pub fn late(micros: u64) -> HostConfig {
    HostConfig::new().late(Duration::from_micros(micros), 3)
}

pub struct Setup {
    pub node: HostNode,
    pub device: Device,
    pub pool: Pool,
    pub copier: Copier,
    pub memory: DeviceSlice,
}

impl Setup {
    pub fn new(
        config: HostConfig,
        capacity: usize,
        options: impl FnOnce(CopierBuilder) -> CopierBuilder,
    ) -> Self {
        let node = HostNode::new(config.memory(160 << 20)).unwrap();
        let device = Device::on(&node, 0).unwrap();
        let pool = Pool::builder(&device).capacity(capacity).unpinned(Unpinned::Allow).build().unwrap();
        let copier = options(Copier::builder(&pool, &device)).build().unwrap();
        let memory = device.alloc(32 << 20).unwrap();
        Self { node, device, pool, copier, memory }
    }

    /// Makes a call fail, counted from 0.
    pub fn fail(&self, call: Call, nth: u64, failure: Failure) {
        self.node.fail(Fault { device: 0, call, nth, failure });
    }

    /// No call fails any more. Whether all that were to fail did.
    pub fn calm(&self) -> bool {
        self.node.clear_faults() == 0
    }

    /// A buffer with these bytes.
    pub fn filled(&self, bytes: &[u8]) -> PinnedBuf {
        let mut buf = self.pool.checkout(bytes.len()).unwrap();
        buf.extend_from_slice(bytes);
        buf
    }

    /// What device memory holds, by a stream.
    pub fn read(&self, place: &DeviceSlice) -> PinnedBuf {
        let stream = self.device.stream().unwrap();
        stream.download(place, self.pool.checkout(place.len()).unwrap()).unwrap().wait().unwrap()
    }

    /// All that the pool has. A worker that is about to put a segment into its cache has it for a moment longer.
    pub fn emptied(&self) -> Vec<PinnedBuf> {
        self.pool.wait_pinned(Some(HANG)).unwrap();
        let mut all = Vec::new();
        until("nothing is left", || {
            for len in [8 << 20, 1 << 20, 64 << 10, 4 << 10, 64] {
                all.extend(std::iter::from_fn(|| self.pool.try_checkout(len).ok()));
            }
            self.pool.stats().free_bytes < 128
        });
        all
    }

    /// Waits until nothing of the pool is in use.
    pub fn all_back(&self) {
        self.all_back_to(&self.pool);
    }

    pub fn all_back_to(&self, pool: &Pool) {
        until("all is back", || {
            self.device.reap();
            in_use(pool) == 0
        });
        pool.check().unwrap();
    }
}
