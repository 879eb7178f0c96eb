//! A fork, seen from the child: once its parent had opened a device, nothing of the crate can be used there, nothing
//! hangs, and nothing that is dropped there does anything. What the child finds comes back as its exit code, since it
//! may not print (locks of the parent's threads may be held for ever) nor unwind into the test harness.

#![cfg(target_os = "linux")]
#![allow(unsafe_code, reason = "fork is called here")]

mod threads;

use std::cell::Cell;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use pinpool::{CloseError, Result};

use super::*;
use crate::support::process::forked;
use crate::support::value::Value;

/// The first of these that does not hold, as an exit code; 0 if all do.
fn first_wrong(checks: &[bool]) -> i32 {
    checks.iter().position(|ok| !ok).map_or(0, |at| at as i32 + 1)
}

fn is_forked<T, E: Into<Error>>(result: Result<T, E>) -> bool {
    result.map_err(Into::into).err() == Some(Error::Forked)
}

/// Opens a device and copies there and back. Whether all of it worked.
fn works() -> bool {
    let run = || -> Result<bool> {
        let device = Device::open("host")?;
        let pool = crate::builder(&device, 256 << 10).build()?;
        let (stream, memory) = (device.stream()?, device.alloc(1000)?);
        let mut buf = pool.checkout(1000)?;
        buf.extend_from_slice(&[9; 1000]);
        let buf = stream.upload(buf, &memory)?.wait()?;
        let back = stream.download(&memory, buf)?.wait()?;
        Ok(*back == [9; 1000] && pool.check().is_ok())
    };
    run() == Ok(true)
}

/// A server that forks its workers before it opens anything.
#[test]
fn a_child_of_a_process_that_opened_nothing_is_like_any_other() {
    own_process!();
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
}

/// While another thread opens the process's first device.
#[test]
fn a_child_made_in_the_midst_of_the_first_opening_can_open_or_is_told() {
    own_process!();
    for round in 0..60_u64 {
        let code = forked(|| {
            // A thread that is just starting may hold a lock of the standard library's, which no child can start a
            // thread without.
            let started = Arc::new(AtomicBool::new(false));
            let starts = started.clone();
            let opens = std::thread::spawn(move || {
                starts.store(true, Ordering::Release);
                Device::open("host").map(drop)
            });
            while !started.load(Ordering::Acquire) {
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
}

/// A child hears that it is one, and does not hang.
#[track_caller]
fn told(what: &str, case: impl Fn() -> bool) {
    assert_eq!(forked(|| i32::from(!case())), Some(0), "{what}; None: it hangs");
}

/// Everything that can be opened, and everything that can be waited for, all of it hung.
#[test]
fn a_child_is_told_by_whatever_it_opens_or_waits_for() {
    own_process!();
    let (node, [device, _]) = hosts();
    let pool = crate::pool(&device, 4 << 20);
    let (stream, memory) = (device.stream().unwrap(), device.alloc(1 << 20).unwrap());
    let bulk = Copier::builder(&pool, &device).threads(2).chunk(64 << 10).share(1 << 20).build().unwrap();
    let filled = |len: usize| filled(&pool, len, 1);
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
    let pages = Cell::new(Some(bulk.upload_pages(vec![(filled(100), at(0..100))]).unwrap()));
    // Left with a waker each, where that can be done.
    let mut idle = Context::from_waker(Waker::noop());
    let (mut awaited, mut polled) = (awaited.take().unwrap(), polled.take().unwrap());
    assert!(Pin::new(&mut awaited).poll(&mut idle).is_pending());
    assert!(Pin::new(&mut polled).poll(&mut idle).is_pending());
    let (awaited, polled) = (Cell::new(Some(awaited)), Cell::new(Some(polled)));
    let poll = |future: &mut dyn FnMut(&mut Context<'_>) -> Poll<bool>| {
        future(&mut Context::from_waker(Waker::noop())) == Poll::Ready(true)
    };
    // Cached by this thread, so that in the parent it would be a hit.
    drop(pool.checkout(1000).unwrap());
    // Until what can be under way is.
    std::thread::sleep(Duration::from_millis(100));
    told("a copy that was done", || is_forked(done.take().unwrap().wait()));
    told("a copy", || is_forked(flight.take().unwrap().wait()));
    told("a copy, for a while", || is_forked(flight.take().unwrap().wait_timeout(Duration::MAX)));
    told("whether a copy is done", || is_forked(flight.take().unwrap().is_done()));
    told("a copy, by a task", || {
        let mut copy = awaited.take().unwrap();
        poll(&mut |cx| Pin::new(&mut copy).poll(cx).map(is_forked))
    });
    told("order behind a copy", || is_forked(stream.wait_for_copy(&flight.take().unwrap())));
    told("a stream-ready buffer", || is_forked(claimed.take().unwrap().wait()));
    told("a stream", || is_forked(stream.synchronize()) && is_forked(stream.hold(())));
    told("a blocking copy", || is_forked(stream.upload_blocking(&[1; 10], at(0..10))));
    told("new pieces", || {
        let mut back = [0; 100];
        is_forked(bulk.upload_slices(&pieces))
            && is_forked(bulk.download_slices(&mut [(at(0..100), &mut back[..])]))
    });
    told("new blocks", || {
        is_forked(bulk.upload_pages(vec![((), at(0..100))]).map_err(|refused| refused.error))
            && is_forked(bulk.wait_for(&stream))
            && !bulk.reap()
            && bulk.stats().chunk == 64 << 10
    });
    told("new devices", || {
        let by_name = ["host", "auto", "cuda:0", "acl:0"].map(Device::open);
        by_name.into_iter().all(is_forked)
            && is_forked(HostNode::new(HostConfig::new()))
            && is_forked(Device::on(&node, 1))
            && is_forked(Device::on(&HostNode::system(), 0))
            && is_forked(crate::builder(&device, 1 << 20).build())
            && device.pci_address().is_none()
    });
    // SAFETY: null is no context, and is not looked at.
    #[cfg(feature = "cuda")]
    told("a context", || is_forked(unsafe { pinpool::cuda::adopt_context(std::ptr::null_mut(), ()) }));
    // SAFETY: as above.
    #[cfg(feature = "acl")]
    told("a context", || is_forked(unsafe { pinpool::acl::adopt_context(std::ptr::null_mut(), ()) }));
    told("a node, whose handle does nothing", || {
        node.hang(0);
        node.kill(1);
        node.trace().is_empty() && node.live(0).queued == 0
    });
    told("a new copier", || is_forked(Copier::builder(&pool, &device).build()));
    told("a transfer of pages", || is_forked(pages.take().unwrap().wait()));
    told("order behind a transfer", || is_forked(ticket.take().unwrap().order(&stream)));
    told("a transfer", || is_forked(ticket.take().unwrap().wait()));
    told("a transfer, for a while", || {
        ticket.take().unwrap().wait_timeout(Duration::MAX).is_ok_and(is_forked)
    });
    told("a part of a transfer", || !ticket.take().unwrap().wait_landed(10));
    told("a transfer, by a task", || {
        let mut transfer = polled.take().unwrap();
        poll(&mut |cx| transfer.poll_landed(cx, 10).map(|landed| !landed))
            && poll(&mut |cx| Pin::new(&mut transfer).poll(cx).map(is_forked))
    });
    told("a cancelled transfer", || {
        let transfer = ticket.take().unwrap();
        transfer.cancel();
        let over = transfer.is_over() && transfer.progress().over;
        over && is_forked(transfer.wait())
    });
    told("transfers that are dropped", || {
        drop((ticket.take(), left.take(), polled.take()));
        true
    });
    told("new transfers", || {
        is_forked(bulk.upload(vec![1_u8; 1000], at(0..1000)))
            && is_forked(bulk.download(at(0..10), Vec::new()))
            && is_forked(bulk.upload_slice(&[1; 1000], at(0..1000)))
    });
    told("a reader", || is_forked(bulk.upload_read(&mut &[1_u8; 10][..], at(0..10))));
    told("a writer", || is_forked(bulk.download_write(at(0..10), &mut Vec::new())));
    told("memory", || {
        is_forked(pool.checkout(1000))
            && is_forked(pool.try_checkout(500_000))
            && is_forked(pool.wait_pinned(None))
    });
    told("memory, by a task", || {
        let mut checkout = pin!(pool.checkout_async(1000));
        poll(&mut |cx| checkout.as_mut().poll(cx).map(is_forked))
    });
    told("a sampler", || {
        !Sampler::new(&pool).poll() && is_forked(Sampler::new(&pool).spawn(Duration::from_secs(1)))
    });
    told("the device's end", || {
        let again = |error: CloseError| error.wait(Duration::MAX).is_err_and(|e| e.held_by().forked);
        device.clone().close(Duration::MAX).is_err_and(|e| e.held_by().forked && again(e))
    });
    node.resume(0);
    for ticket in [ticket, polled, left] {
        assert_eq!(ticket.take().unwrap().wait().unwrap(), bytes, "the parent's go on");
    }
    stream.synchronize().unwrap();
}

#[test]
fn the_callers_memory_is_left_alone_in_a_child() {
    own_process!();
    let device = host().1;
    let [pool, closed] = [(); 2].map(|()| builder(&device, 1 << 20).initial(0).build().unwrap());
    let there = Arc::new(AtomicUsize::new(0));
    let count = || there.load(Ordering::SeqCst);
    let value = |len: usize| Value::counted(vec![3; len], &there);
    pool.adopt(value(256 << 10)).map_err(Error::from).unwrap();
    // One that is complete: only its handles keep its memory.
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
        let before = count();
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
        if wrong == 0 && count() != before + 2 { 50 } else { wrong }
    });
    assert_eq!(code, Some(0), "which check failed, counted from 1; 50: something was dropped");
    drop((one, two, buf, gone));
    until(|| count() == 0, || "the parent drops them".into());
}
