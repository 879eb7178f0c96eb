//! One misdeed at a time, each where it once did harm.

use std::future::Future;
use std::panic::panic_any;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake};
use std::time::Duration;

use pinpool::host::{Call as HostCall, Failure, Fault, HostConfig, HostNode};
use pinpool::{Checkout, Device, PinnedBuf, Pool, Request, Unpinned};

use super::hostile::{Bomb, Call, Turn, act, quiet, waker};
use crate::support::doubles::HANG;
use crate::support::doubles::gpu::until;
use crate::support::value::Value;
use crate::support::{in_use, own_process};

const LONG: usize = 300_000;

fn node() -> (HostNode, Device) {
    let node = HostNode::new(HostConfig::new().memory(64 << 20)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    (node, device)
}

fn pool(device: &Device, capacity: usize) -> Pool {
    Pool::builder(device).capacity(capacity).thread_cache(0).unpinned(Unpinned::Allow).build().unwrap()
}

/// A pool that has pinned 1 MiB, and grows by as much.
fn growing(device: &Device, capacity: usize) -> Pool {
    let pool = Pool::builder(device).capacity(capacity).initial(1 << 20).region(1 << 20);
    let pool = pool.unpinned(Unpinned::Allow).build().unwrap();
    pool.wait_pinned(None).unwrap();
    pool
}

/// A value that panics when it is dropped, and how often it was.
fn bad(len: usize) -> (Value, Arc<AtomicUsize>) {
    let dropped = Arc::new(AtomicUsize::new(0));
    let count = dropped.clone();
    let value = Value::new(vec![0; len], move || {
        count.fetch_add(1, Ordering::Relaxed);
        panic_any(Bomb(1));
    });
    (value, dropped)
}

fn filled(pool: &Pool, len: usize, byte: u8) -> PinnedBuf {
    let mut buf = pool.checkout(len).unwrap();
    buf.try_resize(len, byte).unwrap();
    buf
}

/// Runs a call that ends on time, or hangs.
fn on_time<T: Send + 'static>(what: &str, run: impl FnOnce() -> T + Send + 'static) -> T {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || tell.send(run()));
    told.recv_timeout(HANG).unwrap_or_else(|_| panic!("{what} hangs, or panicked"))
}

/// An upload waits on a stream whose handle, like the buffer's, is dropped: only the timeline has it. Then the reaper
/// meets `trouble` on another stream. The upload must still read its own bytes, though other requests ask the pool for
/// memory meanwhile.
fn an_upload_outlives(trouble: impl FnOnce(&HostNode, &Device, &Pool)) {
    let (node, device) = node();
    let pool = pool(&device, 1 << 20);
    let first = device.stream().unwrap();
    let hung = device.stream().unwrap();
    let target = device.alloc(LONG).unwrap();
    // By the order in which they were made.
    node.hang_stream(0, 1);
    drop(hung.upload(Arc::new(filled(&pool, LONG, 0xaa)), &target).unwrap());
    drop(hung);
    std::thread::sleep(Duration::from_millis(20));
    trouble(&node, &device, &pool);
    let mut others = Vec::new();
    while let Ok(mut other) = pool.try_checkout(LONG) {
        other.try_resize(LONG, 0x55).unwrap();
        others.push(other);
    }
    assert!(others.len() < 3, "the buffer in flight was handed out");
    node.resume(0);
    until("the upload is done", || node.queued(0) == 0);
    let mut back = vec![0; LONG];
    first.download_blocking(&target, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 0xaa), "the device holds {:#x}, 0xaa was uploaded", back[0]);
    drop(others);
    // The reaper works as before.
    drop(first.upload(filled(&pool, 64, 1), &target).unwrap());
    until("a later copy is done", || in_use(&pool) == 0);
    pool.check().unwrap();
}

#[test]
fn a_waker_panics_with_a_payload_whose_drop_panics() {
    own_process!();
    let _turn = Turn::take();
    an_upload_outlives(|node, device, pool| {
        let stream = device.stream().unwrap();
        let small = device.alloc(64).unwrap();
        node.hang_stream(0, 2);
        let mut flight = stream.upload(filled(pool, 64, 1), &small).unwrap();
        let woken = Arc::new(AtomicUsize::new(0));
        let bad = waker({
            let woken = woken.clone();
            move || {
                woken.fetch_add(1, Ordering::Relaxed);
                panic_any(Bomb(3));
            }
        });
        assert!(Pin::new(&mut flight).poll(&mut Context::from_waker(&bad)).is_pending());
        node.resume_stream(0, 2);
        until("the task is woken", || woken.load(Ordering::Relaxed) > 0);
        drop(flight);
    });
}

#[test]
fn a_subscriber_panics_on_the_reaper() {
    own_process!();
    let turn = Turn::take();
    let heard = Arc::new(AtomicUsize::new(0));
    let count = heard.clone();
    turn.act(move |heard| {
        if heard.call == Call::Event && heard.target().starts_with("pinpool::stream") {
            count.fetch_add(1, Ordering::Relaxed);
            panic_any(Bomb(1));
        }
    });
    an_upload_outlives(|node, device, pool| {
        let stream = device.stream().unwrap();
        let small = device.alloc(64).unwrap();
        // An event about an attempt that failed.
        node.fail(Fault { device: 0, call: HostCall::Record, nth: 0, failure: Failure::Transient });
        drop(stream.upload(filled(pool, 64, 1), &small).unwrap());
        until("the subscriber has heard", || heard.load(Ordering::Relaxed) > 0);
    });
    turn.quiet();
}

/// The value is dropped on the device's worker thread, which other calls need.
#[test]
fn a_registered_value_panics_when_it_is_dropped() {
    own_process!();
    let _turn = Turn::take();
    let (node, device) = node();
    let pool = growing(&device, 16 << 20);
    let pinned = node.live(0).pinned_bytes;
    let good = device.register(vec![7; 65_536]).unwrap();
    let (bad, dropped) = bad(4096);
    drop(device.register(bad).unwrap());
    until("the value is dropped", || dropped.load(Ordering::Relaxed) == 1);
    drop(good);
    until("the other value is unregistered", || device.registered_bytes() == 0);
    assert_eq!(node.live(0).pinned_bytes, pinned);
    drop(device.alloc(64).unwrap());
    drop(pool.checkout_timeout(800_000, HANG).unwrap());
    drop(pool.checkout_many(&[800_000; 3].map(Request::new), Some(HANG)).unwrap());
    pool.wait_pinned(Some(HANG)).unwrap();
}

/// Adopted memory is given back on the worker, too.
#[test]
fn adopted_memory_panics_when_it_is_dropped() {
    own_process!();
    let _turn = Turn::take();
    let (_node, device) = node();
    let pool = Pool::builder(&device).capacity(8 << 20).initial(0).unpinned(Unpinned::Allow).build().unwrap();
    let (bad, dropped) = bad(1 << 20);
    pool.adopt(bad).unwrap();
    drop(pool);
    until("the memory is dropped", || dropped.load(Ordering::Relaxed) == 1);
    drop(device.alloc(64).unwrap());
    device.close(HANG).unwrap();
}

/// A subscriber that calls the pool when an event reports trouble.
fn the_subscriber_asks(how: &'static str, trouble: fn(&HostNode, &Device, &Pool)) {
    let _turn = Turn::take();
    on_time(how, move || {
        let (node, device) = node();
        let pool = growing(&device, 8 << 20);
        let asked = pool.clone();
        let answered = Arc::new(AtomicUsize::new(0));
        let count = answered.clone();
        act(move |heard| {
            let warns = heard.what.is_some_and(|what| *what.level() <= tracing::Level::WARN);
            if heard.call != Call::Event || !warns {
                return;
            }
            let pool = &asked;
            match how {
                "stats" => _ = pool.stats(),
                "snapshot" => drop(pool.snapshot()),
                "stuck" => drop(pool.stuck(Duration::ZERO)),
                "pinning" => drop((pool.pinning(), pool.regions())),
                "checkout" => drop(pool.try_checkout(64)),
                _ => drop((pool.check(), pool.trim(0))),
            }
            count.fetch_add(1, Ordering::Relaxed);
        });
        trouble(&node, &device, &pool);
        until("the subscriber has had its answer", || answered.load(Ordering::Relaxed) > 0);
        _ = pool.stats();
        quiet();
    });
}

fn a_stream_is_lost(node: &HostNode, device: &Device, pool: &Pool) {
    let stream = device.stream().unwrap();
    let small = device.alloc(64).unwrap();
    node.hang(0);
    let flight = stream.upload(filled(pool, 64, 1), &small).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    node.kill(0);
    let lost = flight.wait_timeout(HANG).unwrap_err();
    assert!(lost.error.is_device_lost(), "{}", lost.error);
}

fn pinning_fails(node: &HostNode, _: &Device, pool: &Pool) {
    node.fail(Fault { device: 0, call: HostCall::Pin, nth: 0, failure: Failure::Argument });
    // Whether another attempt serves the request does not matter here.
    drop(pool.checkout_timeout(900_000, Duration::from_millis(500)));
    drop(pool.checkout_many(&[900_000; 2].map(Request::new), Some(Duration::from_millis(500))));
}

macro_rules! asks {
    ($($name:ident: $how:literal, $trouble:ident;)*) => {
        $(#[test]
        fn $name() {
            own_process!();
            the_subscriber_asks($how, $trouble);
        })*
    };
}

asks! {
    a_subscriber_asks_for_statistics_when_a_stream_is_lost: "stats", a_stream_is_lost;
    a_subscriber_asks_for_a_snapshot_when_a_stream_is_lost: "snapshot", a_stream_is_lost;
    a_subscriber_asks_for_what_is_out_when_a_stream_is_lost: "stuck", a_stream_is_lost;
    a_subscriber_checks_when_a_stream_is_lost: "check", a_stream_is_lost;
    a_subscriber_asks_for_statistics_when_pinning_fails: "stats", pinning_fails;
    a_subscriber_asks_how_pinning_goes_when_it_fails: "pinning", pinning_fails;
    a_subscriber_asks_for_memory_when_pinning_fails: "checkout", pinning_fails;
}

/// Each call that a subscriber gets for the spans of pinning panics once. Pinning goes on, and ends.
#[test]
fn a_subscriber_panics_in_the_spans_of_pinning() {
    own_process!();
    let turn = Turn::take();
    for call in [Call::NewSpan, Call::Enter, Call::Exit, Call::Close] {
        for nth in 0..4 {
            let (_node, device) = node();
            let pool = growing(&device, 8 << 20);
            let left = Arc::new(AtomicUsize::new(nth));
            turn.act(move |heard| {
                if heard.call == call {
                    let turn = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
                    if turn.is_err() && left.swap(usize::MAX, Ordering::Relaxed) == 0 {
                        panic_any(Bomb(1));
                    }
                }
            });
            let all = [900_000; 3].map(Request::new);
            drop(pool.checkout_many(&all, Some(HANG)).unwrap_or_else(|e| panic!("{call:?} {nth}: {e}")));
            pool.wait_pinned(Some(HANG)).unwrap_or_else(|e| panic!("{call:?} {nth}: {e}"));
            turn.quiet();
            assert_eq!(pool.stats().waiting, 0);
            pool.check().unwrap();
        }
    }
}

/// Wakers that poll their task at once, where they are called: each serves the next. By a loop, so any number of them.
#[test]
fn wakers_that_poll_at_once_take_no_stack() {
    struct Task(Mutex<Option<Checkout>>, Arc<AtomicUsize>);
    impl Task {
        fn run(self: Arc<Self>) {
            let Some(mut checkout) = self.0.lock().unwrap().take() else { return };
            let waker = self.clone().into();
            match Pin::new(&mut checkout).poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(buf) => {
                    self.1.fetch_add(1, Ordering::Relaxed);
                    // Serves the next request of the queue.
                    drop(buf.unwrap());
                }
                Poll::Pending => *self.0.lock().unwrap() = Some(checkout),
            }
        }
    }
    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.run();
        }
    }
    own_process!();
    let _turn = Turn::take();
    let (_node, device) = node();
    let pool = pool(&device, 1 << 20);
    let served = Arc::new(AtomicUsize::new(0));
    const TASKS: usize = 5_000;
    let first = pool.checkout(900_000).unwrap();
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| Arc::new(Task(Mutex::new(Some(pool.checkout_async(900_000))), served.clone())))
        .collect();
    tasks.iter().for_each(|task| task.clone().run());
    assert_eq!(pool.stats().waiting, TASKS);
    // A stack for a few hundred frames of the crate.
    let thread = std::thread::Builder::new().stack_size(256 << 10);
    thread.spawn(move || drop(first)).unwrap().join().unwrap();
    until("all are served", || served.load(Ordering::Relaxed) == TASKS);
    assert_eq!(pool.stats().waiting, 0);
}

/// Cloning a waker is foreign code, too: a wait with such a waker is not woken, and stands in no other's way.
#[test]
fn a_waker_that_cannot_be_cloned_leaves_no_trace() {
    use std::task::{RawWaker, RawWakerVTable, Waker};
    fn clone(_: *const ()) -> RawWaker {
        panic_any(Bomb(1))
    }
    fn nothing(_: *const ()) {}
    static TABLE: RawWakerVTable = RawWakerVTable::new(clone, nothing, nothing, nothing);
    // SAFETY: the waker has no data to point at.
    let bad = unsafe { Waker::new(std::ptr::null(), &TABLE) };
    let cx = &mut Context::from_waker(&bad);
    own_process!();
    let _turn = Turn::take();
    let (node, device) = node();
    let pool = pool(&device, 1 << 20);
    let first = pool.checkout(900_000).unwrap();
    let mut checkout = pool.checkout_async(900_000);
    assert!(Pin::new(&mut checkout).poll(cx).is_pending());
    assert_eq!(pool.stats().waiting, 1);
    assert!(Pin::new(&mut checkout).poll(cx).is_pending());
    drop(checkout);
    assert_eq!(pool.stats().waiting, 0);
    let (stream, memory) = (device.stream().unwrap(), device.alloc(64).unwrap());
    node.hang(0);
    let mut flight = stream.upload(filled(&pool, 64, 1), &memory).unwrap();
    assert!(Pin::new(&mut flight).poll(cx).is_pending());
    node.resume(0);
    until("the copy is done", || flight.is_done().unwrap());
    assert!(Pin::new(&mut flight).poll(cx).is_ready());
    drop((first, flight));
    until("all is back", || in_use(&pool) == 0);
    pool.check().unwrap();
}
