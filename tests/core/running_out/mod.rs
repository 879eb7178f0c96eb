//! What happens when the pool has nothing left: failing, waiting, growing, trimming, and closing.
//!
//! A waiter is mostly a future here, polled by hand, on a stepped device: then the test determines the order of events,
//! and needs no clock. What only threads can show (a parked waiter, pinning in the background) is on the threaded
//! device.

mod growing;
mod retries;
mod trouble;
mod waiting;
mod windows;

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode, HostUsage};
use pinpool::{
    Checkout, Device, Error, PinnedBuf, Pool, PoolBuilder, PoolStats, RegionInfo, Request, Stream, Unpinned,
};

const PAGE: usize = 4096;
/// Longer than anything takes here.
const HANG: Duration = Duration::from_secs(20);

struct Rig {
    node: HostNode,
    device: Device,
}

impl Rig {
    fn stepped() -> Self {
        Self::on(HostConfig::new().memory(8 << 20).stepped(7))
    }

    fn threads() -> Self {
        Self::on(HostConfig::new().memory(8 << 20))
    }

    fn on(config: HostConfig) -> Self {
        let node = HostNode::new(config).unwrap();
        let device = Device::on(&node, 0).unwrap();
        Self { node, device }
    }

    fn pool(&self, capacity: usize) -> Pool {
        self.builder(capacity).build().unwrap()
    }

    fn builder(&self, capacity: usize) -> PoolBuilder {
        Pool::builder(&self.device).capacity(capacity)
    }

    /// The next so many calls that pin fail for a reason that may pass.
    fn refuse_pins(&self, count: u64) {
        for _ in 0..count {
            self.node.fail(Fault { device: 0, call: Call::Pin, nth: 0, failure: Failure::Transient });
        }
    }

    /// Everything is back where it came from, with threads a little later.
    fn all_is_given_back(self) {
        let Self { node, device } = self;
        drop(device);
        eventually(|| (node.live(0) == HostUsage::default()).then_some(()), || format!("{:?}", node.live(0)));
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
struct Waiter<F: Future> {
    future: Pin<Box<F>>,
    bell: Arc<Bell>,
}

impl<F: Future> Waiter<F> {
    fn new(future: F) -> Self {
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
    fn ready(mut self) -> F::Output {
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

fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    let since = Instant::now();
    loop {
        assert!(since.elapsed() < HANG, "a future hangs");
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park_timeout(HANG),
        }
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
    while rig.node.step() | rig.device.reap() {}
}
