//! What these tests share: a device with a pool, a copier and memory. Threads move the device, or the
//! test by hand.

#[cfg(feature = "cuda")]
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode};
use pinpool::{Copier, CopierBuilder, Device, DeviceSlice, PinnedBuf, Pool, Unpinned};

#[cfg(feature = "cuda")]
use crate::support::hand;
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

/// How many calls had failed when those that were to fail were last taken back.
#[cfg(feature = "cuda")]
type Struck = AtomicU64;

/// What the device is of: a host node with threads, or a simulated machine that is moved by hand.
pub enum Node {
    Host(HostNode),
    #[cfg(feature = "cuda")]
    Hand(hand::Machine, Struck),
}

impl From<HostConfig> for Node {
    fn from(config: HostConfig) -> Self {
        Self::Host(HostNode::new(config.memory(160 << 20)).unwrap())
    }
}

impl Node {
    /// A machine that the test moves by hand, where the feature is there.
    pub fn by_hand(seed: u64) -> Option<Self> {
        #[cfg(feature = "cuda")]
        let made = Some(Self::Hand(hand::Machine::new(1, 256 << 20, seed), Struck::default()));
        #[cfg(not(feature = "cuda"))]
        let made = Some(seed).and(None);
        made
    }

    /// With threads, with threads that are late, and by hand.
    pub fn each() -> impl Iterator<Item = Self> {
        let late = HostConfig::new().late(Duration::from_micros(100), 3);
        [HostConfig::new(), late].into_iter().map(Self::from).chain(Self::by_hand(5))
    }

    fn device(&self) -> Device {
        match self {
            Self::Host(node) => Device::on(node, 0).unwrap(),
            #[cfg(feature = "cuda")]
            Self::Hand(machine, _) => machine.device(0),
        }
    }

    /// The node, of a device that threads move.
    pub fn host(&self) -> &HostNode {
        match self {
            Self::Host(node) => node,
            #[cfg(feature = "cuda")]
            Self::Hand(..) => panic!("a machine by hand"),
        }
    }

    /// Before calls of a thread that the test has started.
    pub fn enter(&self) {
        #[cfg(feature = "cuda")]
        if let Self::Hand(machine, _) = self {
            machine.enter();
        }
    }

    /// Moves a device by hand.
    pub fn step(&self) -> bool {
        match self {
            Self::Host(_) => false,
            #[cfg(feature = "cuda")]
            Self::Hand(machine, _) => machine.step(),
        }
    }

    /// While it is set nothing runs.
    pub fn hang(&self, hung: bool) {
        match self {
            Self::Host(node) if hung => node.hang(0),
            Self::Host(node) => node.resume(0),
            #[cfg(feature = "cuda")]
            Self::Hand(machine, _) => machine.hang(hung),
        }
    }

    /// Makes a call fail, counted from 0. A GPU copies many pieces by one call, so of its copies it is
    /// the first or the second.
    pub fn fail(&self, call: Call, nth: u64, failure: Failure) {
        match self {
            Self::Host(node) => node.fail(Fault { device: 0, call, nth, failure }),
            #[cfg(feature = "cuda")]
            Self::Hand(machine, _) => {
                let (code, after) = match failure {
                    Failure::Argument => (1, false),
                    Failure::Transient => (2, false),
                    Failure::RunsAnyway => (2, true),
                    other => panic!("{other:?}"),
                };
                let (names, nth): (&[_], _) = match call {
                    Call::Copy => {
                        (&["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyBatchAsync"], nth % 2)
                    }
                    Call::Record => (&["cuEventRecord"], nth),
                    Call::Query => (&["cuEventQuery"], nth),
                    Call::CreateEvent => (&["cuEventCreate"], nth),
                    other => panic!("{other:?}"),
                };
                for name in names {
                    machine.command(&format!("fail {name} {} {code} {after}", nth + 1));
                }
            }
        }
    }

    /// No call fails any more. Whether all that were to fail did; by hand, whether any did since the last time.
    pub fn calm(&self) -> bool {
        match self {
            Self::Host(node) => node.clear_faults() == 0,
            #[cfg(feature = "cuda")]
            Self::Hand(machine, before) => {
                machine.calm();
                let struck = machine.command("struck").parse().unwrap();
                before.swap(struck, Ordering::Relaxed) < struck
            }
        }
    }

    /// Operations that are queued.
    pub fn queued(&self) -> usize {
        match self {
            Self::Host(node) => node.live(0).queued,
            #[cfg(feature = "cuda")]
            Self::Hand(machine, _) => machine.queued(0),
        }
    }
}

pub struct Setup {
    pub device: Device,
    pub pool: Pool,
    pub copier: Copier,
    pub memory: DeviceSlice,
    /// The last to be dropped: a machine looks at what was done to it.
    pub node: Node,
}

impl Setup {
    pub fn new(
        node: impl Into<Node>,
        capacity: usize,
        options: impl FnOnce(CopierBuilder) -> CopierBuilder,
    ) -> Self {
        let node = node.into();
        let device = node.device();
        let pool = Pool::builder(&device).capacity(capacity).unpinned(Unpinned::Allow).build().unwrap();
        let copier = options(Copier::builder(&pool, &device)).build().unwrap();
        let memory = device.alloc(32 << 20).unwrap();
        Self { node, device, pool, copier, memory }
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

    /// Whether a copier could have a segment.
    pub fn has_room(&self) -> bool {
        self.pool.try_checkout(1 << 20).is_ok()
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

    /// Lets what does not move by itself do a step.
    pub fn advance(&self) {
        self.node.step();
        self.copier.reap();
        self.device.reap();
    }

    /// Waits until nothing of the pool is in use.
    pub fn all_back_to(&self, pool: &Pool) {
        let since = Instant::now();
        while in_use(pool) > 0 {
            assert!(since.elapsed() < HANG, "never back: {:?}", pool.stats());
            self.advance();
            std::thread::yield_now();
        }
        pool.check().unwrap();
        #[cfg(feature = "cuda")]
        if let Node::Hand(machine, _) = &self.node {
            assert_eq!(machine.violations(), "");
        }
    }

    pub fn all_back(&self) {
        self.all_back_to(&self.pool);
    }
}
