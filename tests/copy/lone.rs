//! Lone pieces: what an idle copier sends at once, on the calling thread; how that ends where a device fails, hangs or
//! dies; and what does not go this way.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode};
use pinpool::{Copier, Device, DeviceBuffer, DeviceSlice, Error, ErrorClass, Pool, Unpinned};

use crate::support::{bytes, in_use};

const LEN: usize = 3000;
/// The longest that goes alone.
const LONGEST: usize = 64 << 10;
const HANG: Duration = Duration::from_secs(20);

struct Setup {
    node: HostNode,
    device: Device,
    pool: Pool,
    copier: Copier,
    memory: DeviceBuffer,
}

fn setup() -> Setup {
    let node = HostNode::new(HostConfig::new().memory(64 << 20)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let pool = Pool::builder(&device).capacity(32 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let copier = Copier::builder(&pool, &device).threads(2).build().unwrap();
    let memory = device.alloc(4 << 20).unwrap();
    Setup { node, device, pool, copier, memory }
}

impl Setup {
    fn range(&self, i: usize) -> DeviceSlice {
        self.memory.slice(i * LONGEST..i * LONGEST + LEN).unwrap()
    }

    fn is_there(&self, i: usize) {
        let mut back = vec![0; LEN];
        self.copier.download_slice(self.range(i), &mut back).unwrap();
        assert!(back == bytes(i, LEN), "piece {i}");
    }

    fn until(&self, what: &str, there: impl Fn() -> bool) {
        let since = Instant::now();
        while !there() {
            assert!(since.elapsed() < HANG, "never: {what}; {:?}", self.pool.stats());
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn all_back(&self) {
        self.until("all is back", || in_use(&self.pool) == 0);
        self.pool.check().unwrap();
    }
}

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn an_idle_copier_sends_a_short_piece_without_a_segment() {
    let s = setup();
    for i in 0..20 {
        s.copier.upload_slice(&bytes(i, LEN), s.range(i)).unwrap();
        s.is_there(i);
        s.copier.push(&bytes(i + 20, LEN), s.range(i + 20)).unwrap().wait().unwrap();
        s.is_there(i + 20);
    }
    let stats = s.copier.stats();
    assert_eq!((stats.pushes, stats.chunks, stats.batch_bytes), (20, 80, 80 * LEN as u64));
    // What a chunk's segment takes was never needed.
    assert!(s.pool.stats().pinned_bytes + s.pool.stats().unpinned_bytes > 0);
    s.node.hang(0);
    let alone = s.copier.push(&bytes(1, LEN), s.range(0)).unwrap();
    assert!(in_use(&s.pool) <= 2 * LEN, "{:?}", s.pool.stats());
    assert!(!alone.is_over());
    // The next ones are combined while it is on its way.
    let others: Vec<_> = (1..10).map(|i| s.copier.push(&bytes(i, LEN), s.range(i)).unwrap()).collect();
    assert!(in_use(&s.pool) > LONGEST, "{:?}", s.pool.stats());
    s.node.resume(0);
    others.into_iter().for_each(|sent| sent.wait().unwrap());
    let progress = alone.progress();
    alone.wait().unwrap();
    assert_eq!(progress.total, LEN as u64);
    (1..10).for_each(|i| s.is_there(i));
    s.all_back();
}

#[test]
fn the_longest_go_alone_and_longer_ones_do_not() {
    let s = setup();
    for (len, alone) in [(1, true), (LONGEST, true), (LONGEST + 1, false)] {
        let before = s.copier.stats();
        s.node.hang(0);
        let sent = s.copier.push(&bytes(5, len), &s.memory).unwrap();
        assert_eq!(in_use(&s.pool) <= LONGEST + LONGEST / 8, alone, "{len} bytes: {:?}", s.pool.stats());
        s.node.resume(0);
        sent.wait().unwrap();
        assert_eq!(s.copier.stats().pushes - before.pushes, 1);
        let mut back = vec![0; len];
        s.copier.download_slice(s.memory.slice(..len).unwrap(), &mut back).unwrap();
        assert!(back == bytes(5, len), "{len} bytes");
        s.all_back();
    }
}

/// Without a thread that waits: the device's reaper ends the push, and wakes the task.
#[test]
fn a_task_hears_of_the_end() {
    let s = setup();
    for lost in [false, true] {
        s.node.hang(0);
        let mut sent = pin!(s.copier.push(&bytes(1, LEN), s.range(1)).unwrap());
        let flag = Arc::new(Flag(AtomicBool::new(false)));
        let waker = Waker::from(flag.clone());
        assert!(sent.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        std::thread::sleep(Duration::from_millis(5));
        assert!(!flag.0.load(Ordering::SeqCst));
        if lost {
            s.node.kill(0);
        }
        s.node.resume(0);
        s.until("it is woken", || flag.0.load(Ordering::SeqCst));
        match sent.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(Ok(())) => assert!(!lost),
            Poll::Ready(Err(refused)) => assert!(lost && refused.error.class() == ErrorClass::DeviceLost),
            Poll::Pending => panic!("it was woken before the end"),
        }
    }
    assert!(s.copier.push(&bytes(1, LEN), s.range(1)).is_err());
    assert!(s.copier.upload_slice(&bytes(1, LEN), s.range(1)).is_err());
}

#[test]
fn a_wait_ends_at_its_deadline_and_goes_on() {
    let s = setup();
    s.node.hang(0);
    let sent = s.copier.push(&bytes(1, LEN), s.range(1)).unwrap();
    let since = Instant::now();
    let refused = sent.wait_timeout(Duration::from_millis(20)).expect_err("it hangs");
    assert!(since.elapsed() >= Duration::from_millis(20) && matches!(refused.error, Error::Timeout(_)));
    s.node.resume(0);
    refused.buffer.expect("the handle").wait().unwrap();
    s.is_there(1);
    // Dropped, it goes on by itself.
    drop(s.copier.push(&bytes(2, LEN), s.range(2)).unwrap());
    s.all_back();
    s.is_there(2);
}

/// An error of the driver's is the transfer's, and the next lone piece goes as before.
#[test]
fn the_driver_refuses_a_lone_copy() {
    let s = setup();
    for _ in 0..3 {
        let fail = || s.node.fail(Fault { device: 0, call: Call::Copy, nth: 0, failure: Failure::Argument });
        fail();
        let sent = s.copier.push(&bytes(1, LEN), s.range(1)).unwrap();
        assert!(sent.wait().is_err());
        fail();
        match s.copier.upload_slice(&bytes(1, LEN), s.range(1)) {
            Err(Error::Transfer { what, offset: 0, .. }) => assert_eq!(what, "bytes in memory"),
            other => panic!("{other:?}"),
        }
        fail();
        let said = s.copier.download_slice(s.range(1), &mut [0; LEN]);
        assert!(matches!(said, Err(Error::Transfer { .. })), "{said:?}");
        s.node.clear_faults();
        s.copier.push(&bytes(1, LEN), s.range(1)).unwrap().wait().unwrap();
        s.is_there(1);
        s.all_back();
    }
}

/// A short call comes behind an earlier one that writes the same memory and is not over.
#[test]
fn a_short_call_waits_for_those_before_it() {
    let s = setup();
    for _ in 0..10 {
        s.node.hang(0);
        let load = s.copier.upload(bytes(7, 1 << 20), s.memory.slice(..1 << 20).unwrap()).unwrap();
        std::thread::scope(|scope| {
            let short = scope.spawn(|| s.copier.upload_slice(&bytes(3, LEN), s.range(3)));
            std::thread::sleep(Duration::from_millis(2));
            s.node.resume(0);
            short.join().unwrap().unwrap();
        });
        load.wait().unwrap();
        s.is_there(3);
    }
    s.all_back();
    drop(s.device);
}

/// A pool without room for a lone piece's buffer: the piece waits for a segment as others do.
#[test]
fn a_full_pool_makes_a_lone_piece_wait() {
    let s = setup();
    s.pool.wait_pinned(None).unwrap();
    let mut taken = Vec::new();
    for len in [8 << 20, 1 << 20, 64 << 10, 4 << 10, 64] {
        taken.extend(std::iter::from_fn(|| s.pool.try_checkout(len).ok()));
    }
    std::thread::scope(|scope| {
        let short = scope.spawn(|| s.copier.upload_slice(&bytes(3, LEN), s.range(3)));
        std::thread::sleep(Duration::from_millis(5));
        assert!(!short.is_finished());
        taken.clear();
        short.join().unwrap().unwrap();
    });
    s.is_there(3);
    s.all_back();
}
