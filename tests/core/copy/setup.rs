//! What these tests share: a host device with a pool, a copier and memory.

use std::time::Duration;

use pinpool::copier::CopierBuilder;
use pinpool::host::{Call, Failure, Fault, HostConfig};
use pinpool::{Copier, DeviceSlice, PinnedBuf};

use crate::support::rig::Rig;
pub use crate::support::{HANG, until};

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
    rig: Rig,
    pub copier: Copier,
    pub memory: DeviceSlice,
}

impl std::ops::Deref for Setup {
    type Target = Rig;
    fn deref(&self) -> &Rig {
        &self.rig
    }
}

impl Setup {
    pub fn new(
        config: HostConfig,
        capacity: usize,
        options: impl FnOnce(CopierBuilder) -> CopierBuilder,
    ) -> Self {
        let rig = Rig::new(config, capacity);
        rig.pool.wait_pinned(None).unwrap();
        let copier = options(Copier::builder(&rig.pool, &rig.device)).build().unwrap();
        let memory = rig.device.alloc(32 << 20).unwrap();
        Self { rig, copier, memory }
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
}
