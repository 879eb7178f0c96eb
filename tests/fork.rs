//! A fork, seen from the child: nothing of the parent's pools can be used there, and nothing that is dropped there does
//! anything. What the child finds comes back as its exit code, since it may not print (locks of the parent's threads
//! may be held for ever) nor unwind into the test harness.

#![cfg(target_os = "linux")]
#![allow(unsafe_code, reason = "fork is called here")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pinpool::host::{HostConfig, HostNode};
use pinpool::{Device, Error, Pool, Request, Stream, Unpinned};

/// Held by each test: no thread of another test is anywhere when one forks.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Runs `child` in a fork of this process, and says how it ended: its exit code, or `None` if it hung or was killed.
fn forked(child: impl FnOnce() -> i32) -> Option<i32> {
    // SAFETY: the child calls only what is under test here, which is to be safe in a fork, and then `_exit`.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork failed");
    if pid == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(99);
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(code) };
    }
    // Long enough for any child that does not hang.
    for _ in 0..6000 {
        let mut status = 0;
        // SAFETY: our child, and a place for its status.
        let ended = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
        if ended == pid {
            return libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    // SAFETY: our child, which is not reaped yet.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), 0);
    }
    None
}

/// The first of these that does not hold, as an exit code; 0 if all do.
fn first_wrong(checks: &[bool]) -> i32 {
    checks.iter().position(|ok| !ok).map_or(0, |at| at as i32 + 1)
}

fn device() -> Device {
    Device::on(&HostNode::new(HostConfig::new().memory(64 << 20)).unwrap(), 0).unwrap()
}

fn pool(device: &Device) -> Pool {
    let builder = Pool::builder(device).capacity(1 << 20).reserve("urgent", 128 << 10);
    builder.unpinned(Unpinned::Allow).build().unwrap()
}

#[test]
fn a_child_can_check_nothing_out() {
    let _alone = alone();
    let device = device();
    let (pool, stream) = (pool(&device), device.stream().unwrap());
    // Cached by this thread, so that in the parent it would be a hit.
    drop(pool.checkout(1000).unwrap());
    let token = pool.checkout(1000).unwrap().into_token();
    let code = forked(|| {
        let refused = |result: Result<(), Error>| result == Err(Error::Forked);
        let reserved = Request::new(1000).reserve("urgent");
        first_wrong(&[
            refused(pool.checkout(1000).map(drop)),
            refused(pool.try_checkout(1000).map(drop)),
            refused(pool.try_checkout(500_000).map(drop)),
            refused(
                pool.checkout_timeout(Request::new(1000).align(4096), Duration::from_secs(3600)).map(drop),
            ),
            refused(pool.checkout(reserved).map(drop)),
            refused(pool.checkout_many(&[1000.into(), 2000.into()], None).map(drop)),
            refused(pool.checkout_on(&stream, 1000).map(drop)),
            refused(pool.checkout_or_unpinned(1000).map(drop)),
            pool.redeem(token).is_err(),
            pool.trim(0) == 0,
            stream.synchronize() == Err(Error::Forked),
        ])
    });
    assert_eq!(code, Some(0), "which check failed, counted from 1; None: the child hung");
    // The parent has noticed nothing.
    drop(pool.redeem(token).unwrap());
    drop(pool.checkout(1000).unwrap());
    stream.synchronize().unwrap();
    assert_eq!(pool.stats().checked_out_bytes, 0);
    pool.check().unwrap();
}

#[test]
fn drops_in_a_child_do_nothing() {
    let _alone = alone();
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
        let held = Stream::hold_on_all(&[&stream, &stream], filled()).unwrap();
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

/// The last handles go in the child, while threads of the parent hold their locks all the time.
#[test]
fn a_child_may_drop_the_last_handles_whatever_the_threads_are_doing() {
    let _alone = alone();
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

/// A device of the child's own, with the last handle of the parent's gone there: its threads do not exist.
#[test]
fn a_child_may_drop_a_device_and_a_pool_for_good() {
    let _alone = alone();
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

/// Locks that another thread of the parent holds at the moment of the fork stay locked in the child, those inside of
/// libraries included; no pool can change that. So this is about a parent whose threads are asleep, in a process of its
/// own.
#[test]
fn a_child_can_have_a_pool_of_its_own() {
    const ALONE: &str = "PINPOOL_TEST_FORK_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        again.args(["--exact", "a_child_can_have_a_pool_of_its_own", "--nocapture"]);
        assert!(again.env(ALONE, "1").status().unwrap().success());
        return;
    }
    let device = device();
    let parents = pool(&device);
    let kept = parents.checkout(1000).unwrap();
    // Until the device's threads have nothing more to do and sleep.
    parents.wait_pinned(None).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let code = forked(|| {
        // A new process in all but name: its own device with its own threads.
        let own = HostNode::new(HostConfig::new().memory(1 << 20));
        let Ok(device) = own.and_then(|node| Device::on(&node, 0)) else { return 1 };
        let builder = Pool::builder(&device).capacity(256 << 10).unpinned(Unpinned::Allow);
        let Ok(pool) = builder.build() else { return 2 };
        let (Ok(mut buf), Ok(stream), Ok(memory)) =
            (pool.checkout(1000), device.stream(), device.alloc(1000))
        else {
            return 3;
        };
        buf.extend_from_slice(&[9; 1000]);
        let Ok(sent) = stream.upload(buf, &memory) else { return 4 };
        let Ok(buf) = sent.wait() else { return 5 };
        first_wrong(&[
            *buf == [9; 1000],
            pool.check().is_ok(),
            parents.checkout(1).err() == Some(Error::Forked),
            // The system's device is opened anew as well.
            Device::open("host").is_ok_and(|d| d.stream().is_ok()),
        ])
    });
    assert_eq!(code, Some(0), "which check failed, counted from 1; None: the child hung");
    drop(kept);
    parents.check().unwrap();
}

#[test]
fn other_programs_can_be_started() {
    let _alone = alone();
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

/// Whoever looks at a pool in the child, or ends it, is not kept waiting for threads that the child does not have.
#[test]
fn a_child_waits_for_nothing() {
    let _alone = alone();
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
            // A new pool on the parent's device has nobody to pin for it.
            Pool::builder(&device).build().map(drop) == Err(Error::Forked),
            started.elapsed() < Duration::from_secs(10),
        ]);
        drop(out);
        wrong
    });
    assert_eq!(code, Some(0));
    drop(pool);
}

/// Bytes whose drop is counted.
struct Counted(Vec<u8>, std::sync::Arc<std::sync::atomic::AtomicUsize>);

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
    let _alone = alone();
    let device = device();
    let pool = Pool::builder(&device).capacity(1 << 20).initial(0).unpinned(Unpinned::Allow).build().unwrap();
    let dropped = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let value = |len: usize| Counted(vec![3; len], dropped.clone());
    pool.adopt(value(256 << 10)).map_err(Error::from).unwrap();
    // One that is over: nothing but its handles keeps its memory.
    let closed =
        Pool::builder(&device).capacity(1 << 20).initial(0).unpinned(Unpinned::Allow).build().unwrap();
    closed.adopt(value(256 << 10)).map_err(Error::from).unwrap();
    assert!(closed.shutdown(Duration::from_secs(20)).drained);
    let (Ok(one), Ok(two)) = (device.register(value(5000)), device.register(value(5000))) else {
        return println!("skipped: the memlock limit is used up");
    };
    let buf = pool.checkout(1000).unwrap();
    let (mut one, mut two, mut gone) = (Some(one), Some(two), Some((device, pool, closed)));
    let code = forked(|| {
        let (one, two, (device, pool, closed)) =
            (one.take().unwrap(), two.take().unwrap(), gone.take().unwrap());
        let adopted = pool.adopt(value(256 << 10));
        let registered = device.register(value(5000));
        let checks = [
            adopted.as_ref().is_err_and(|e| e.error == Error::Forked && e.memory.is_some()),
            registered.as_ref().is_err_and(|e| e.error == Error::Forked && e.memory.is_some()),
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
    use std::future::Future;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};
    let _alone = alone();
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

/// What there is belongs to the parent, whose threads are not here: nobody could be waited for.
#[test]
fn a_child_closes_no_device() {
    let _alone = alone();
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
