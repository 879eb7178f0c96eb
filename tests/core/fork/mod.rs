//! A fork, seen from the child: once its parent had opened a device, nothing of the crate can be used there, nothing
//! hangs, and nothing that is dropped there does anything. What the child finds comes back as its exit code, since it
//! may not print (locks of the parent's threads may be held for ever) nor unwind into the test harness.

#![cfg(target_os = "linux")]
#![allow(unsafe_code, reason = "fork is called here")]

mod threads;

use std::cell::Cell;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use pinpool::host::{HostConfig, HostNode};
use pinpool::telemetry::Sampler;
use pinpool::{Copier, Device, Error, Pool, Request, Result, Unpinned};

use crate::support::process::{self, forked};
use crate::support::{own_process, skip};

/// The first of these that does not hold, as an exit code; 0 if all do.
fn first_wrong(checks: &[bool]) -> i32 {
    checks.iter().position(|ok| !ok).map_or(0, |at| at as i32 + 1)
}

fn device() -> Device {
    Device::on(&HostNode::new(HostConfig::new().memory(64 << 20)).unwrap(), 0).unwrap()
}

fn pool(device: &Device) -> Pool {
    let builder = Pool::builder(device).capacity(1 << 20);
    builder.unpinned(Unpinned::Allow).build().unwrap()
}

#[test]
fn a_child_can_check_nothing_out() {
    own_process!();
    let device = device();
    let (pool, stream) = (pool(&device), device.stream().unwrap());
    // Cached by this thread, so that in the parent it would be a hit.
    drop(pool.checkout(1000).unwrap());
    let code = forked(|| {
        let refused = |result: Result<(), Error>| result == Err(Error::Forked);
        first_wrong(&[
            refused(pool.checkout(1000).map(drop)),
            refused(pool.try_checkout(1000).map(drop)),
            refused(pool.try_checkout(500_000).map(drop)),
            refused(
                pool.checkout_timeout(Request::new(1000).align(4096), Duration::from_secs(3600)).map(drop),
            ),
            refused(pool.checkout_many(&[1000.into(), 2000.into()], None).map(drop)),
            refused(pool.checkout_on(&stream, 1000).map(drop)),
            pool.trim(0) == 0,
            stream.synchronize() == Err(Error::Forked),
        ])
    });
    assert_eq!(code, Some(0), "which check failed, counted from 1; None: the child hung");
    // The parent has noticed nothing.
    drop(pool.checkout(1000).unwrap());
    stream.synchronize().unwrap();
    assert_eq!(pool.stats().checked_out_bytes, 0);
    pool.check().unwrap();
}

#[test]
fn drops_in_a_child_do_nothing() {
    own_process!();
    let node = HostNode::new(HostConfig::new().memory(64 << 20)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let (pool, stream) = (pool(&device), device.stream().unwrap());
    let memory = device.alloc(1000).unwrap();
    // In flight for as long as this takes.
    node.hang(0);
    let filled = || {
        let mut buf = pool.checkout(1000).unwrap();
        buf.try_resize(1000, 7).unwrap();
        buf
    };
    let mut everything = Some({
        let (bufs, sent) = (vec![filled(), filled()], stream.upload(filled(), &memory).unwrap());
        let held = stream.hold(filled()).unwrap();
        let large = pool.checkout(300_000).unwrap();
        let claimed = pool.checkout_on(&stream, 1000).unwrap();
        (bufs, sent, held, large, claimed)
    });
    // (The reaper marks what is in flight meanwhile, so events and the queue do change.)
    let counted =
        || (pool.stats(), node.live(0).streams, node.live(0).allocations, node.live(0).pinned_bytes);
    let before = counted();
    let mut mine = Some((pool.clone(), stream.clone(), memory.clone(), device.clone()));
    let code = forked(|| {
        drop(everything.take());
        drop(mine.take());
        0
    });
    assert_eq!(code, Some(0), "the child hung or died");
    assert_eq!(counted(), before);
    node.resume(0);
    let (bufs, sent, held, large, claimed) = everything.take().unwrap();
    assert!(*sent.wait().unwrap() == [7; 1000] && *held.wait().unwrap() == [7; 1000]);
    drop((bufs, large, claimed));
    stream.synchronize().unwrap();
    let stats = pool.stats();
    assert_eq!((stats.checked_out_bytes, stats.in_flight_bytes), (0, 0), "{stats:?}");
    pool.check().unwrap();
}

/// The last handles are dropped in the child, while threads of the parent hold their locks all the time.
#[test]
fn a_child_may_drop_the_last_handles_whatever_the_threads_are_doing() {
    own_process!();
    let stop = AtomicBool::new(false);
    let device = device();
    let shared = pool(&device);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let stream = device.stream().unwrap();
                let memory = device.alloc(1000).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    let mut buf = shared.checkout(1000).unwrap();
                    buf.try_resize(1000, 1).unwrap();
                    drop(stream.upload(buf, &memory).unwrap());
                    // Sent to the worker, which is another lock to be held.
                    drop(device.alloc(1).unwrap());
                }
            });
        }
        let mut wrong = None;
        for round in 0..150 {
            let mut mine = Some({
                let mut buf = shared.checkout(1000).unwrap();
                buf.try_resize(1000, 2).unwrap();
                let stream = device.stream().unwrap();
                let sent = stream.upload(buf, device.alloc(1000).unwrap()).unwrap();
                (
                    sent,
                    stream,
                    device.alloc(10).unwrap(),
                    shared.checkout(10).unwrap(),
                    device.clone(),
                    shared.clone(),
                )
            });
            let code = forked(|| {
                drop(mine.take());
                i32::from(shared.checkout(1000).err() != Some(Error::Forked))
            });
            if code != Some(0) {
                wrong = Some((round, code));
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert_eq!(wrong, None, "round, and how the child ended");
    });
    shared.check().unwrap();
}

/// The child opens a device of its own. The last handle of the parent's device is dropped there, whose threads do not
/// exist in the child.
#[test]
fn a_child_may_drop_a_device_and_a_pool_for_good() {
    own_process!();
    for round in 0..20 {
        let mut device = Some(device());
        let mut pool = Some(pool(device.as_ref().unwrap()));
        let stream = device.as_ref().unwrap().stream().unwrap();
        let mut buf = pool.as_ref().unwrap().checkout(1000).unwrap();
        buf.try_resize(1000, 3).unwrap();
        let mut sent = Some(stream.upload(buf, device.as_ref().unwrap().alloc(1000).unwrap()).unwrap());
        let mut stream = Some(stream);
        let code = forked(|| {
            drop((sent.take(), stream.take(), pool.take(), device.take()));
            0
        });
        assert_eq!(code, Some(0), "round {round}");
        assert!(*sent.take().unwrap().wait().unwrap() == [3; 1000]);
    }
}

/// Runs the body of a test in a process of its own, in which nothing was opened: no other test is in it.
fn in_a_fresh_process(test: &str, body: impl FnOnce()) {
    const FRESH: &str = "PINPOOL_TEST_FORK_FRESH";
    if std::env::var_os(FRESH).is_some() {
        return body();
    }
    assert!(process::command(test).env(FRESH, "1").status().unwrap().success());
}

fn is_forked<T, E: Into<Error>>(result: Result<T, E>) -> bool {
    result.map_err(Into::into).err() == Some(Error::Forked)
}

/// Opens a device and copies there and back. Whether all of it worked.
fn works() -> bool {
    let run = || -> Result<bool> {
        let device = Device::open("host")?;
        let pool = Pool::builder(&device).capacity(256 << 10).unpinned(Unpinned::Allow).build()?;
        let (stream, memory) = (device.stream()?, device.alloc(1000)?);
        let mut buf = pool.checkout(1000)?;
        buf.extend_from_slice(&[9; 1000]);
        let buf = stream.upload(buf, &memory)?.wait()?;
        let back = stream.download(&memory, buf)?.wait()?;
        Ok(*back == [9; 1000] && pool.check().is_ok())
    };
    run() == Ok(true)
}

#[test]
fn a_child_opens_nothing_once_its_parent_has() {
    own_process!();
    let node = HostNode::new(HostConfig::new().devices(2).memory(64 << 20)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let opens = || {
        #[allow(unused_mut, reason = "there is more to open with the features")]
        let mut wrong = vec![
            is_forked(Device::open("host")),
            is_forked(Device::open("auto")),
            is_forked(Device::open("cuda:0")),
            is_forked(Device::open("acl:0")),
            is_forked(HostNode::new(HostConfig::new())),
            is_forked(Device::on(&node, 1)),
            is_forked(Device::on(&HostNode::system(), 0)),
            is_forked(Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build()),
            is_forked(device.stream()),
            is_forked(device.alloc(1)),
            device.pci_address().is_none(),
            // Nor does a node's handle do anything, or hang.
            !node.step(),
            node.queued(0) == 0,
            {
                node.hang(0);
                node.kill(1);
                node.trace().is_empty()
            },
        ];
        #[cfg(feature = "cuda")]
        // SAFETY: null is no context, and is not looked at.
        wrong.push(is_forked(unsafe { pinpool::cuda::adopt_context(std::ptr::null_mut(), ()) }));
        #[cfg(feature = "acl")]
        // SAFETY: as above.
        wrong.push(is_forked(unsafe { pinpool::acl::adopt_context(std::ptr::null_mut(), ()) }));
        first_wrong(&wrong)
    };
    let code = forked(|| match opens() {
        // And so it is in a child of the child.
        0 => forked(opens).unwrap_or(98),
        wrong => wrong,
    });
    assert_eq!(code, Some(0), "which check failed, counted from 1; None: the child hung, 98: its child");
    assert!(node.live(0).streams == 0 && device.lost().is_none());
}

/// A server that forks its workers before it opens anything.
#[test]
fn a_child_of_a_process_that_opened_nothing_is_like_any_other() {
    in_a_fresh_process("a_child_of_a_process_that_opened_nothing_is_like_any_other", || {
        for _ in 0..3 {
            let code = forked(|| match works() {
                // The child has opened one by now.
                true => forked(|| i32::from(!is_forked(Device::open("host")))).unwrap_or(2),
                false => 3,
            });
            assert_eq!(
                code,
                Some(0),
                "1, 2: a child of the child's can open a device, or hangs; 3: the child cannot"
            );
        }
        assert!(works(), "and the parent can");
        assert_eq!(forked(|| i32::from(!is_forked(Device::open("host")))), Some(0));
    });
}

/// While another thread opens the process's first device.
#[test]
fn a_child_made_in_the_midst_of_the_first_opening_can_open_or_is_told() {
    in_a_fresh_process("a_child_made_in_the_midst_of_the_first_opening_can_open_or_is_told", || {
        for round in 0..60_u64 {
            let code = forked(|| {
                // A thread that is just starting may hold a lock of the standard library's, which no child can start a
                // thread without.
                let started = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
                let starts = started.clone();
                let opens = std::thread::spawn(move || {
                    starts.store(true, std::sync::atomic::Ordering::Release);
                    Device::open("host").map(drop)
                });
                while !started.load(std::sync::atomic::Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                (0..round * 20).for_each(|_| std::hint::spin_loop());
                let code = forked(|| match Device::open("host") {
                    Ok(device) => i32::from(device.stream().is_err()),
                    Err(Error::Forked) => 0,
                    Err(_) => 2,
                });
                if opens.join().is_ok_and(|opened| opened.is_ok()) { code.unwrap_or(3) } else { 4 }
            });
            assert_eq!(code, Some(0), "round {round}; 3: the child of the child hung");
        }
    });
}

/// Everything that can be waited for, all of it hung.
#[test]
fn a_child_is_told_by_whatever_it_waits_for() {
    own_process!();
    let node = HostNode::new(HostConfig::new().memory(64 << 20)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let pool = Pool::builder(&device).capacity(4 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let (stream, memory) = (device.stream().unwrap(), device.alloc(1 << 20).unwrap());
    let bulk = Copier::builder(&pool, &device).threads(2).chunk(64 << 10).share(1 << 20).build().unwrap();
    let copier = Copier::builder(&pool, &device).threads(2).chunk(64 << 10).share(512 << 10).build().unwrap();
    let filled = |len: usize| {
        let mut buf = pool.checkout(len).unwrap();
        buf.try_resize(len, 1).unwrap();
        buf
    };
    let at = |range| memory.slice(range).unwrap();
    let done = Cell::new(Some(stream.upload(filled(1000), at(0..1000)).unwrap()));
    stream.synchronize().unwrap();
    node.hang(0);
    let flight = Cell::new(Some(stream.upload(filled(1000), at(0..1000)).unwrap()));
    let awaited = Cell::new(Some(stream.upload(filled(1000), at(0..1000)).unwrap()));
    let claimed = Cell::new(Some(pool.checkout_on(&stream, 1000).unwrap()));
    let bytes = vec![1_u8; 300_000];
    let upload = || Cell::new(Some(bulk.upload(bytes.clone(), at(0..300_000)).unwrap()));
    let (ticket, polled, left) = (upload(), upload(), upload());
    let pieces = [(&[1_u8; 100][..], at(0..100))];
    let copying = || Cell::new(Some(copier.upload_pages(vec![(filled(100), at(0..100))]).unwrap()));
    let (copying, copying_too, cancelled) = (copying(), copying(), copying());
    // Left with a waker each, where that can be done.
    let mut idle = Context::from_waker(Waker::noop());
    let (mut awaited, mut polled) = (awaited.take().unwrap(), polled.take().unwrap());
    assert!(Pin::new(&mut awaited).poll(&mut idle).is_pending());
    assert!(Pin::new(&mut polled).poll(&mut idle).is_pending());
    let (awaited, polled) = (Cell::new(Some(awaited)), Cell::new(Some(polled)));
    let ready = |polled: Poll<bool>| polled == Poll::Ready(true);
    let poll = |future: &mut dyn FnMut(&mut Context<'_>) -> Poll<bool>| {
        ready(future(&mut Context::from_waker(Waker::noop())))
    };
    type Case<'a> = (&'a str, Box<dyn Fn() -> bool + 'a>);
    let cases: Vec<Case<'_>> = vec![
        ("a copy that was done", Box::new(|| is_forked(done.take().unwrap().wait()))),
        ("a copy", Box::new(|| is_forked(flight.take().unwrap().wait()))),
        ("a copy, for a while", Box::new(|| is_forked(flight.take().unwrap().wait_timeout(Duration::MAX)))),
        ("whether a copy is done", Box::new(|| is_forked(flight.take().unwrap().is_done()))),
        (
            "a copy, by a task",
            Box::new(|| {
                let mut copy = awaited.take().unwrap();
                poll(&mut |cx| Pin::new(&mut copy).poll(cx).map(is_forked))
            }),
        ),
        ("order behind a copy", Box::new(|| is_forked(stream.wait_for_copy(&flight.take().unwrap())))),
        ("a stream-ready buffer", Box::new(|| is_forked(claimed.take().unwrap().wait()))),
        ("a stream", Box::new(|| is_forked(stream.synchronize()))),
        ("a blocking copy", Box::new(|| is_forked(stream.upload_blocking(&[1; 10], at(0..10))))),
        ("a hold", Box::new(|| is_forked(stream.hold(())))),
        ("a copier's transfer", Box::new(|| is_forked(copying.take().unwrap().wait()))),
        (
            "a copier's transfer, for a while",
            Box::new(|| {
                let waited = copying.take().unwrap().wait_timeout(Duration::MAX);
                waited.is_ok_and(|ended| ended.is_err_and(|failed| failed.error == Error::Forked))
            }),
        ),
        ("order behind a copier's transfer", Box::new(|| is_forked(copying.take().unwrap().order(&stream)))),
        ("a part of a copier's transfer", Box::new(|| !copying.take().unwrap().wait_landed(1))),
        (
            "a copier's transfer, by a task",
            Box::new(|| {
                let mut copying = copying_too.take().unwrap();
                copying.is_over() && poll(&mut |cx| Pin::new(&mut copying).poll(cx).map(is_forked))
            }),
        ),
        (
            "a copier's transfer that is cancelled",
            Box::new(|| {
                let copying = cancelled.take().unwrap();
                copying.cancel();
                is_forked(copying.wait())
            }),
        ),
        (
            "new pieces",
            Box::new(|| {
                let mut back = [0; 100];
                is_forked(copier.upload_slices(&pieces))
                    && is_forked(copier.download_slices(&mut [(at(0..100), &mut back[..])]))
            }),
        ),
        (
            "new blocks",
            Box::new(|| {
                is_forked(copier.upload_pages(vec![((), at(0..100))]).map_err(|refused| refused.error))
                    && is_forked(copier.wait_for(&stream))
                    && !copier.reap()
                    && copier.stats().chunks <= 3
            }),
        ),
        ("a new copier", Box::new(|| is_forked(Copier::builder(&pool, &device).build()))),
        ("a transfer", Box::new(|| is_forked(ticket.take().unwrap().wait()))),
        (
            "a transfer, for a while",
            Box::new(|| ticket.take().unwrap().wait_timeout(Duration::MAX).is_ok_and(is_forked)),
        ),
        ("a part of a transfer", Box::new(|| !ticket.take().unwrap().wait_landed(10))),
        (
            "a transfer, by a task",
            Box::new(|| {
                let mut transfer = polled.take().unwrap();
                poll(&mut |cx| transfer.poll_landed(cx, 10).map(|landed| !landed))
                    && poll(&mut |cx| Pin::new(&mut transfer).poll(cx).map(is_forked))
            }),
        ),
        (
            "a cancelled transfer",
            Box::new(|| {
                let transfer = ticket.take().unwrap();
                transfer.canceller().cancel();
                transfer.cancel();
                let over =
                    transfer.is_over() && transfer.progress().over && transfer.canceller().progress().over;
                over && is_forked(transfer.wait())
            }),
        ),
        (
            "transfers that are dropped",
            Box::new(|| {
                drop((ticket.take(), left.take(), polled.take()));
                true
            }),
        ),
        ("a new transfer", Box::new(|| is_forked(bulk.upload(vec![1_u8; 1000], at(0..1000))))),
        ("a slice", Box::new(|| is_forked(bulk.upload_slice(&[1; 1000], at(0..1000))))),
        ("a vector", Box::new(|| is_forked(bulk.download(at(0..10), Vec::new())))),
        ("a reader", Box::new(|| is_forked(bulk.upload_read(&mut &[1_u8; 10][..], at(0..10))))),
        ("a writer", Box::new(|| is_forked(bulk.download_write(at(0..10), &mut Vec::new())))),
        ("a copier behind a stream", Box::new(|| is_forked(bulk.wait_for(&stream)))),
        ("a new bulk", Box::new(|| is_forked(Copier::builder(&pool, &device).build()))),
        ("memory", Box::new(|| is_forked(pool.checkout(1000)) && is_forked(pool.wait_pinned(None)))),
        (
            "memory, by a task",
            Box::new(|| {
                let mut checkout = pin!(pool.checkout_async(1000));
                poll(&mut |cx| checkout.as_mut().poll(cx).map(is_forked))
            }),
        ),
        (
            "a sampler",
            Box::new(|| {
                !Sampler::new(&pool).poll() && is_forked(Sampler::new(&pool).spawn(Duration::from_secs(1)))
            }),
        ),
        (
            "the device's end",
            Box::new(|| device.clone().close(Duration::MAX).is_err_and(|error| error.held_by().forked)),
        ),
    ];
    // Until what can be under way is.
    std::thread::sleep(Duration::from_millis(100));
    for (what, case) in &cases {
        assert_eq!(forked(|| i32::from(!case())), Some(0), "{what}; None: it hangs");
    }
    drop(cases);
    node.resume(0);
    for ticket in [ticket, polled, left] {
        assert_eq!(ticket.take().unwrap().wait().unwrap(), bytes, "the parent's go on");
    }
    stream.synchronize().unwrap();
}

#[test]
fn other_programs_can_be_started() {
    own_process!();
    let device = device();
    let (pool, stream) = (pool(&device), device.stream().unwrap());
    let mut buf = pool.checkout(1000).unwrap();
    buf.extend_from_slice(&[5; 1000]);
    let sent = stream.upload(buf, device.alloc(1000).unwrap()).unwrap();
    let output = std::process::Command::new("echo").arg("started").output().unwrap();
    assert_eq!(output.stdout, b"started\n");
    assert!(*sent.wait().unwrap() == [5; 1000]);
    drop(pool.checkout(1000).unwrap());
    assert_eq!(pool.stats().checked_out_bytes, 0);
}

/// A look at a pool in the child, or its shutdown, does not wait for threads that the child does not have.
#[test]
fn a_child_waits_for_nothing() {
    own_process!();
    let device = device();
    let (pool, stream) = (pool(&device), device.stream().unwrap());
    let out = pool.checkout(1000).unwrap();
    let landing = pool.checkout_on(&stream, 1000).unwrap();
    let started = std::time::Instant::now();
    let code = forked(|| {
        let ended = pool.shutdown(Duration::from_secs(20));
        let wrong = first_wrong(&[
            !ended.drained,
            pool.check().is_err(),
            pool.wait_pinned(None).is_err(),
            pool.regions().is_empty(),
            pool.pinning().ready == 0,
            !device.reap(),
            landing.wait().is_err(),
            started.elapsed() < Duration::from_secs(10),
        ]);
        drop(out);
        wrong
    });
    assert_eq!(code, Some(0));
    drop(pool);
}

/// Bytes whose drop is counted.
struct Counted(Vec<u8>, Arc<std::sync::atomic::AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

impl std::ops::Deref for Counted {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl std::ops::DerefMut for Counted {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

// SAFETY: a vector that is not resized stays where it is.
unsafe impl pinpool::StableDeref for Counted {}

#[test]
fn the_callers_memory_is_left_alone_in_a_child() {
    own_process!();
    let device = device();
    let pool = Pool::builder(&device).capacity(1 << 20).initial(0).unpinned(Unpinned::Allow).build().unwrap();
    let dropped = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let value = |len: usize| Counted(vec![3; len], dropped.clone());
    pool.adopt(value(256 << 10)).map_err(Error::from).unwrap();
    // One that is complete: only its handles keep its memory.
    let closed =
        Pool::builder(&device).capacity(1 << 20).initial(0).unpinned(Unpinned::Allow).build().unwrap();
    closed.adopt(value(256 << 10)).map_err(Error::from).unwrap();
    assert!(closed.shutdown(Duration::from_secs(20)).drained);
    let (Ok(one), Ok(two)) = (device.register(value(5000)), device.register(value(5000))) else {
        return skip!("the memlock limit is used up");
    };
    let buf = pool.checkout(1000).unwrap();
    let (mut one, mut two, mut gone) = (Some(one), Some(two), Some((device, pool, closed)));
    let code = forked(|| {
        let (one, two, (device, pool, closed)) =
            (one.take().unwrap(), two.take().unwrap(), gone.take().unwrap());
        let adopted = pool.adopt(value(256 << 10));
        let registered = device.register(value(5000));
        let checks = [
            adopted.as_ref().is_err_and(|e| e.error == Error::Forked && e.buffer.is_some()),
            registered.as_ref().is_err_and(|e| e.error == Error::Forked && e.buffer.is_some()),
            one.device_address(&device) == Err(Error::Forked),
            buf.device_address(&device) == Err(Error::Forked),
            // It is a value like any other to read.
            one.iter().all(|b| *b == 3),
            one.into_inner().is_err(),
        ];
        std::mem::forget((adopted, registered));
        drop((two, pool, closed, device));
        let wrong = first_wrong(&checks);
        if wrong == 0 && dropped.load(Ordering::SeqCst) > 0 { 50 } else { wrong }
    });
    assert_eq!(code, Some(0), "which check failed, counted from 1; 50: something was dropped");
    drop((one, two, buf, gone));
    let since = std::time::Instant::now();
    while dropped.load(Ordering::SeqCst) < 4 {
        assert!(since.elapsed() < Duration::from_secs(20), "the parent drops them");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A task that was waiting in the parent is polled in the child, while threads of the parent hold the pool's locks.
#[test]
fn a_task_that_waits_is_told_in_a_child() {
    own_process!();
    let stop = AtomicBool::new(false);
    let device = device();
    let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
    pool.wait_pinned(None).unwrap();
    let all: Vec<_> = std::iter::from_fn(|| pool.try_checkout(64 << 10).ok()).collect();
    let mut waiting = pool.checkout_async(64 << 10);
    assert!(Pin::new(&mut waiting).poll(&mut Context::from_waker(Waker::noop())).is_pending());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let _ = pool.stats();
                }
            });
        }
        let wrong = (0..50)
            .map(|_| {
                forked(|| match Pin::new(&mut waiting).poll(&mut Context::from_waker(Waker::noop())) {
                    Poll::Ready(Err(Error::Forked)) => 0,
                    Poll::Ready(_) => 1,
                    Poll::Pending => 2,
                })
            })
            .find(|code| *code != Some(0));
        stop.store(true, Ordering::Relaxed);
        assert_eq!(wrong, None, "2: it waits for ever; None: it hangs");
    });
    drop(all);
    assert!(Pin::new(&mut waiting).poll(&mut Context::from_waker(Waker::noop())).is_ready());
}

/// What is there belongs to the parent, whose threads are not here: the child could wait for none of them.
#[test]
fn a_child_closes_no_device() {
    own_process!();
    let device = device();
    let pool = pool(&device);
    let mut closes = Some(device.clone());
    let code = forked(|| {
        let closed = closes.take().map(|device| device.close(Duration::from_secs(3600)));
        let Some(Err(error)) = closed else { return 1 };
        let forked = error.held_by().forked;
        let again = error.wait(Duration::from_secs(3600)).is_err_and(|error| error.held_by().forked);
        first_wrong(&[true, forked, again])
    });
    assert_eq!(code, Some(0));
    drop((closes, pool));
    device.close(Duration::from_secs(60)).unwrap();
}
