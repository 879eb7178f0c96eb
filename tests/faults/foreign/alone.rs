//! One misdeed at a time, each where it once did harm.

use std::panic::panic_any;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake};
use std::time::Duration;

use pinpool::Checkout;
use pinpool::host::HostConfig;

use crate::support::doubles::HANG;
use crate::support::doubles::gpu::{filled, until};
use crate::support::panicking::{self, Bomb, Call, act, quiet};
use crate::support::rig::Rig;
use crate::support::{in_use, own_process};

fn rig() -> Rig {
    Rig::new(HostConfig::new(), 1 << 20)
}

/// A subscriber asks the pool when an event reports that a stream is lost, and gets its answer. (In `chaos` it asks when
/// pinning fails, too.)
#[test]
fn a_subscriber_asks_the_pool_when_a_stream_is_lost() {
    own_process!();
    panicking::install();
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        let Rig { node, device, pool } = rig();
        let (asked, answered) = (pool.clone(), Arc::new(AtomicUsize::new(0)));
        let count = answered.clone();
        act(move |call, what| {
            if call == Call::Event && what.is_some_and(|what| *what.level() <= tracing::Level::WARN) {
                drop((asked.stats(), asked.snapshot(), asked.stuck(Duration::ZERO)));
                drop((asked.check(), asked.trim(0), asked.try_checkout(64)));
                drop((asked.pinning(), asked.regions()));
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        let (stream, small) = (device.stream().unwrap(), device.alloc(64).unwrap());
        node.hang(0);
        let flight = stream.upload(filled(&pool, &[1; 64]), &small).unwrap();
        node.kill(0);
        let lost = flight.wait_timeout(HANG).unwrap_err();
        assert!(lost.error.is_device_lost(), "{}", lost.error);
        until("the subscriber has had its answer", || answered.load(Ordering::Relaxed) > 0);
        _ = pool.stats();
        quiet();
        tell.send(())
    });
    told.recv_timeout(HANG).expect("a question hangs, or panicked");
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
    panicking::install();
    let Rig { node: _node, device: _device, pool } = rig();
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
    panicking::install();
    let Rig { node, device, pool } = rig();
    let first = pool.checkout(900_000).unwrap();
    let mut checkout = pool.checkout_async(900_000);
    assert!(Pin::new(&mut checkout).poll(cx).is_pending());
    assert_eq!(pool.stats().waiting, 1);
    assert!(Pin::new(&mut checkout).poll(cx).is_pending());
    drop(checkout);
    assert_eq!(pool.stats().waiting, 0);
    let (stream, memory) = (device.stream().unwrap(), device.alloc(64).unwrap());
    node.hang(0);
    let mut flight = stream.upload(filled(&pool, &[1; 64]), &memory).unwrap();
    assert!(Pin::new(&mut flight).poll(cx).is_pending());
    node.resume(0);
    until("the copy is done", || flight.is_done().unwrap());
    assert!(Pin::new(&mut flight).poll(cx).is_ready());
    drop((first, flight));
    until("all is back", || in_use(&pool) == 0);
    pool.check().unwrap();
}
