//! What happens when the pool has nothing left: failing, waiting, growing, trimming, and closing.
//!
//! A waiter is mostly a future here, polled by hand, on a simulated GPU that the test moves: then the test determines the
//! order of events, and needs no clock. What only threads can show (a parked waiter, pinning in the background) is on the
//! host device.

mod growing;
mod retries;
mod trouble;
mod waiting;
mod windows;

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode, HostUsage};
use pinpool::{
    Checkout, Device, Error, PinnedBuf, Pool, PoolBuilder, PoolStats, RegionInfo, Request, Stream, Unpinned,
};

use crate::HANG;
use crate::support::hand::Machine;
use crate::support::rig::block_on;

const PAGE: usize = 4096;
/// cuda.h: CUDA_ERROR_OUT_OF_MEMORY, which may pass.
const OUT_OF_MEMORY: u32 = 2;

/// What a device is of.
enum Node {
    Hand(Machine),
    Threads(HostNode),
}

struct Rig {
    device: Device,
    /// The last to be dropped: a machine looks at what was done to it.
    node: Node,
}

impl Rig {
    fn by_hand() -> Self {
        let machine = Machine::new(1, 8 << 20, 7);
        Self { device: machine.device(0), node: Node::Hand(machine) }
    }

    fn threads() -> Self {
        let node = HostNode::new(HostConfig::new().memory(8 << 20)).unwrap();
        Self { device: Device::on(&node, 0).unwrap(), node: Node::Threads(node) }
    }

    /// One of each kind, by turns.
    fn both() -> impl Iterator<Item = Self> {
        [Self::by_hand, Self::threads].into_iter().map(|rig| rig())
    }

    fn has_threads(&self) -> bool {
        matches!(self.node, Node::Threads(_))
    }

    fn pool(&self, capacity: usize) -> Pool {
        self.builder(capacity).build().unwrap()
    }

    fn builder(&self, capacity: usize) -> PoolBuilder {
        Pool::builder(&self.device).capacity(capacity)
    }

    /// The next so many calls that pin fail for a reason that may pass.
    fn refuse_pins(&self, count: u64) {
        for nth in 0..count {
            match &self.node {
                Node::Hand(machine) => machine.fail("cuMemHostRegister_v2", nth + 1, OUT_OF_MEMORY),
                Node::Threads(node) => {
                    node.fail(Fault { device: 0, call: Call::Pin, nth: 0, failure: Failure::Transient });
                }
            }
        }
    }

    /// While it is set nothing runs.
    fn hang(&self, hung: bool) {
        match &self.node {
            Node::Hand(machine) => machine.hang(hung),
            Node::Threads(node) if hung => node.hang(0),
            Node::Threads(node) => node.resume(0),
        }
    }

    /// The same of the first stream.
    fn hang_stream(&self, hung: bool) {
        assert!(match &self.node {
            Node::Hand(machine) if hung => machine.hold(0, 0),
            Node::Hand(machine) => {
                machine.resume(0, Some(0));
                true
            }
            Node::Threads(node) if hung => node.hang_stream(0, 0),
            Node::Threads(node) => node.resume_stream(0, 0),
        });
    }

    fn kill(&self) {
        match &self.node {
            Node::Hand(machine) => machine.kill(0),
            Node::Threads(node) => node.kill(0),
        }
    }

    /// Bytes that the driver has pinned.
    fn pinned(&self) -> usize {
        match &self.node {
            Node::Hand(machine) => machine.registered(),
            Node::Threads(node) => node.live(0).pinned_bytes,
        }
    }

    /// Everything is back where it came from, with threads a little later; and no rule of the driver's was broken.
    fn all_is_given_back(self) {
        let Self { node, device } = self;
        drop(device);
        let left = || match &node {
            Node::Hand(machine) => (!machine.is_clean()).then(|| machine.report()),
            Node::Threads(node) => {
                let live = node.live(0);
                (live != HostUsage::default()).then(|| format!("{live:?}"))
            }
        };
        eventually(|| left().is_none().then_some(()), || format!("{:?}", left()));
    }
}

/// Waits for something that happens by itself.
#[track_caller]
fn eventually<R>(mut what: impl FnMut() -> Option<R>, why: impl Fn() -> String) -> R {
    let since = Instant::now();
    loop {
        if let Some(found) = what() {
            return found;
        }
        assert!(since.elapsed() < HANG, "it does not happen: {}", why());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A request for `n` pages of its own, in one piece.
fn pages(n: usize) -> Request {
    Request::new(n * PAGE - 32).align(PAGE)
}

/// Counts how often it is woken.
#[derive(Default)]
struct Bell(AtomicUsize);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A request that waits: a future and the waker that it is polled with.
pub struct Waiter<F: Future> {
    future: Pin<Box<F>>,
    bell: Arc<Bell>,
}

impl<F: Future> Waiter<F> {
    pub fn new(future: F) -> Self {
        let mut waiter = Self { future: Box::pin(future), bell: Arc::default() };
        assert!(waiter.poll().is_none(), "there was no need to wait");
        waiter
    }

    fn poll(&mut self) -> Option<F::Output> {
        let waker = Waker::from(self.bell.clone());
        match self.future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    fn rung(&self) -> usize {
        self.bell.0.load(Ordering::Relaxed)
    }

    /// It was woken, and has what it waits for.
    #[track_caller]
    pub fn ready(mut self) -> F::Output {
        assert_eq!(self.rung(), 1);
        self.poll().expect("woken for nothing")
    }

    /// It was not woken, and has nothing.
    #[track_caller]
    fn still_waits(&mut self) {
        assert_eq!(self.rung(), 0);
        assert!(self.poll().is_none());
    }
}

#[track_caller]
fn checked(pool: &Pool) -> PoolStats {
    pool.check().unwrap();
    let s = pool.stats();
    let parts = s.free_bytes + s.checked_out_bytes + s.in_flight_bytes + s.quarantined_bytes + s.cut_bytes;
    assert_eq!(parts, s.pinned_bytes + s.unpinned_bytes, "{s:?}");
    assert!(parts <= s.capacity_bytes, "{s:?}");
    s
}

/// Submits a buffer and drops the handle.
fn send(stream: &Stream, mut buf: PinnedBuf) {
    buf.clear();
    buf.extend_from_slice(&[5; 32]);
    let target = stream.device().alloc(32).unwrap();
    drop(stream.upload(buf, target).unwrap());
}

fn drain(rig: &Rig) {
    let step = || matches!(&rig.node, Node::Hand(machine) if machine.step());
    while step() | rig.device.reap() {}
}
