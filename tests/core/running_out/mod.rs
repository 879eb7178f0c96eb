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

use std::sync::{Barrier, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use pinpool::{Checkout, RegionInfo};

use super::*;
use crate::support::hand::Machine;
use crate::support::rig::block_on;
use crate::support::waker;

const PAGE: usize = 4096;
/// cuda.h: CUDA_ERROR_OUT_OF_MEMORY, which may pass.
const OUT_OF_MEMORY: u32 = 2;

/// A device with threads, or one that the test moves.
struct Rig<N = HostNode> {
    device: Device,
    /// The last to be dropped: a machine looks at what was done to it.
    node: N,
}

impl Rig<Machine> {
    fn by_hand() -> Self {
        let machine = Machine::new(1, 8 << 20, 7);
        Self { device: machine.device(0), node: machine }
    }

    /// The next so many calls that pin fail for a reason that may pass.
    fn refuse_pins(&self, count: u64) {
        (1..=count).for_each(|nth| self.node.fail("cuMemHostRegister_v2", nth, OUT_OF_MEMORY));
    }

    fn drain(&self) {
        while self.node.step() | self.device.reap() {}
    }
}

impl Rig {
    fn threads() -> Self {
        let node = HostNode::new(HostConfig::new().memory(8 << 20)).unwrap();
        Self { device: Device::on(&node, 0).unwrap(), node }
    }

    /// The next so many calls that pin fail for a reason that may pass.
    fn refuse_pins(&self, count: u64) {
        let fault = Fault { device: 0, call: Call::Pin, nth: 0, failure: Failure::Transient };
        (0..count).for_each(|_| self.node.fail(fault));
    }

    /// Everything is back where it came from, a little later.
    fn all_is_given_back(self) {
        let Self { node, device } = self;
        drop(device);
        until(|| node.live(0) == HostUsage::default(), || format!("{:?}", node.live(0)));
    }
}

impl<N> Rig<N> {
    fn pool(&self, capacity: usize) -> Pool {
        self.builder(capacity).build().unwrap()
    }

    fn builder(&self, capacity: usize) -> PoolBuilder {
        Pool::builder(&self.device).capacity(capacity)
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

/// Submits a buffer and drops the handle.
fn send(stream: &Stream, mut buf: PinnedBuf) {
    buf.clear();
    buf.extend_from_slice(&[5; 32]);
    let target = stream.device().alloc(32).unwrap();
    drop(stream.upload(buf, target).unwrap());
}
