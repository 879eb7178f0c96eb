//! Mistakes that were made once. Each test failed when it was written.

#![allow(unsafe_code, reason = "sandboxes and signals")]

use std::os::unix::process::ExitStatusExt;
use std::panic::panic_any;
use std::process::ExitStatus;
use std::task::{Context, RawWaker, RawWakerVTable, Waker};

use super::*;
use crate::running_out::Waiter;
use crate::support::hand::Machine;
use crate::support::panicking::Bomb;
use crate::support::{is_pending, process, waker};

/// A device that runs nothing by itself.
fn by_hand() -> (Machine, Device) {
    let machine = Machine::new(1, 32 << 20, 1);
    let device = machine.device(0);
    (machine, device)
}

/// Polls once with a waker whose drop panics, and of which the future then has the only one.
fn poll_with_a_bomb<F: Future + Unpin>(future: &mut F) {
    let bomb = Bomb(1);
    let waker = waker(move || _ = &bomb);
    assert!(Pin::new(future).poll(&mut Context::from_waker(&waker)).is_pending());
    caught(|| drop(waker));
}

/// Goes on behind the panic of a waker's drop.
fn caught(call: impl FnOnce()) {
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
}

/// Polls twice with a waker that cannot be cloned, and so is not called.
fn poll_with_one_that_cannot_be_cloned<F: Future + Unpin>(future: &mut F) {
    fn bomb(_: *const ()) -> RawWaker {
        panic_any(Bomb(1))
    }
    fn no(_: *const ()) {}
    static TABLE: RawWakerVTable = RawWakerVTable::new(bomb, no, no, no);
    // SAFETY: the waker has no data to point at.
    let bad = unsafe { Waker::new(std::ptr::null(), &TABLE) };
    for _ in 0..2 {
        assert!(Pin::new(&mut *future).poll(&mut Context::from_waker(&bad)).is_pending());
    }
}

/// A handle whose drop panicked in the caller's waker dropped its buffer as if the device were done with it.
#[test]
fn a_waker_that_panics_when_it_is_dropped_or_cloned_frees_nothing_early() {
    let (machine, device) = by_hand();
    let pool = pool(&device, 256 << 10);
    let stream = device.stream().unwrap();
    let mut flight = stream.upload(filled(&pool, 4096, 7), device.alloc(4096).unwrap()).unwrap();
    poll_with_one_that_cannot_be_cloned(&mut flight);
    poll_with_a_bomb(&mut flight);
    caught(|| drop(flight));
    assert_eq!(checked(&pool).in_flight_bytes, 4160);
    while machine.step() {}
    device.reap();
    assert_eq!(checked(&pool).in_flight_bytes, 0);
    drop(pool);
    // No wake is lost, and no wait is left behind.
    let pool = crate::pool(&device, 64 << 10);
    // The request that a cancelled wait made way for is woken.
    let held = pool.checkout(Request::new(32 << 10).align(4096)).unwrap();
    let mut large = pool.checkout_async(60 << 10);
    poll_with_a_bomb(&mut large);
    let fits = Waiter::new(pool.checkout_async(Request::new(20 << 10).align(4096)));
    caught(|| drop(large));
    drop((fits.ready().unwrap(), held));
    // Nor is a wait, whose waker is replaced or cannot be cloned, left in the queue for ever.
    for poll in [poll_with_a_bomb, poll_with_one_that_cannot_be_cloned] {
        let held = pool.checkout(60 << 10).unwrap();
        let mut wait = pool.checkout_async(60 << 10);
        poll(&mut wait);
        caught(|| assert!(is_pending(&mut wait)));
        assert_eq!(pool.stats().waiting, 1);
        drop(wait);
        assert_eq!(pool.stats().waiting, 0);
        drop(held);
        pool.checkout(60 << 10).unwrap();
    }
}

/// What is in flight on a device that was named twice is not counted twice; and a request that misses is one
/// miss, however often it is tried before it is served or fails.
#[test]
fn nothing_is_counted_twice() {
    let (_machine, device) = by_hand();
    let pool = builder(&device, 64 << 10).device(&device).build().unwrap();
    let stream = device.stream().unwrap();
    assert_eq!(pool.devices().len(), 1);
    let _held = pool.checkout(4096).unwrap();
    assert_eq!(pool.stats().misses, 1);
    drop(stream.upload(filled(&pool, 4096, 7), device.alloc(4096).unwrap()).unwrap());
    let stats = checked(&pool);
    assert_eq!((stats.in_flight_bytes, stats.checked_out_bytes), (4160, 4160), "{stats:?}");
    let before = pool.stats().misses;
    pool.try_checkout(60 << 10).unwrap_err();
    pool.try_checkout_on(&stream, 60 << 10).map(drop).unwrap_err();
    assert_eq!(pool.stats().misses - before, 2);
}

/// A pool whose first device was lost could not grow any more, nor give memory back, though another one was well.
#[test]
fn a_pool_grows_as_long_as_one_device_is_left() {
    const PIECE: usize = 200 << 10;
    // The device is known to be lost before the pool grows, or growing finds it out; the device is either of the two.
    for (known, dead) in [(true, 0), (false, 0), (true, 1), (false, 1)] {
        let (node, devices) = hosts();
        let built = builder(&devices[0], 2 << 20).device(&devices[1]).initial(256 << 10);
        let pool = built.region(256 << 10).extent(256 << 10).build().unwrap();
        node.kill(dead);
        if known {
            assert!(devices[dead as usize].alloc(1).unwrap_err().is_device_lost());
        }
        let grown: Vec<_> = (0..8).map(|_| filled(&pool, PIECE, 7)).collect();
        let well = &devices[1 - dead as usize];
        let (stream, memory) = (well.stream().unwrap(), well.alloc(PIECE).unwrap());
        for buf in grown {
            drop(stream.upload(buf, &memory).unwrap().wait().unwrap());
        }
        assert_eq!(pool.trim(0), 2 << 20, "all of it is free");
        // Memory of the caller's too.
        assert!(pool.adopt(vec![0_u8; 512 << 10]).unwrap().len >= 256 << 10);
        checked(&pool);
        assert_eq!(well.lost(), None);
        // Where all devices are dead, the caller is told, and gets the memory back.
        node.kill(1 - dead);
        let refused = pool.adopt(vec![0_u8; 512 << 10]).unwrap_err();
        assert!(refused.error.is_device_lost() && refused.buffer.is_some_and(|m| m.len() == 512 << 10));
    }
}

/// Threads of the crate run code of the program, which must not wait there for what only that thread does.
#[test]
fn nobody_waits_for_the_thread_that_he_is_on() {
    let device = Device::open("host").unwrap();
    // An owner is dropped on the thread that pins: a checkout there that has to grow is refused, not waited for.
    struct Asks(Pool, mpsc::Sender<Result<PinnedBuf, Error>>);
    impl Drop for Asks {
        fn drop(&mut self) {
            let _ = self.1.send(self.0.checkout(3 << 20));
        }
    }
    let grows = builder(&device, 8 << 20).initial(4 << 20).region(4 << 20).build().unwrap();
    let _first = grows.checkout(3 << 20).unwrap();
    let memory = device.alloc(64).unwrap();
    let (tell, told) = mpsc::channel();
    // SAFETY: the memory outlives what is made of it here.
    let owned = unsafe { device.raw_memory(memory.address(), 64, Asks(grows.clone(), tell)) };
    drop(owned.unwrap());
    let asked = told.recv_timeout(HANG).expect("it waits for itself");
    assert!(matches!(asked, Err(Error::Exhausted(_))), "{asked:?}");
    // The pool has grown all the same.
    drop(grows.checkout(3 << 20).unwrap());

    // A waker that the thread which pins calls may ask for what only that thread makes.
    let empty = builder(&device, 256 << 10).initial(0).build().unwrap();
    let (tell, told) = mpsc::sync_channel(1);
    let waker = waker(move || {
        drop((device.alloc(1).unwrap(), device.stream().unwrap()));
        let _ = tell.try_send(());
    });
    let mut wait = empty.checkout_async(4096);
    if Pin::new(&mut wait).poll(&mut Context::from_waker(&waker)).is_pending() {
        told.recv_timeout(HANG).expect("the worker waits for itself");
    }
}

/// From here on this thread is refused `membarrier`.
fn refuse_membarrier() {
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let filter = [
        step(0x20, 0, 0, 0),
        step(0x15, 0, 1, libc::SYS_membarrier as u32),
        step(0x06, 0, 0, 0x0005_0000 | libc::EPERM as u32),
        step(0x06, 0, 0, 0x7fff_0000),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the filter lives for the call, which changes what this thread may ask of the system.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, 2, &raw const program), 0);
    }
}

/// A sandbox that was put up after the first pool refused the barrier, which was logged, and then a buffer had two
/// owners. The process ends instead, and a switch makes pools that need no barrier.
#[test]
fn a_sandbox_that_comes_late_makes_no_second_owner() {
    const PART: &str = "PINPOOL_TEST_PART";
    let Ok(part) = std::env::var(PART) else {
        for (part, fences) in [("late", "0"), ("fences", "1"), ("early", "0")] {
            let mut command = process::command("a_sandbox_that_comes_late_makes_no_second_owner");
            let output = command.env(PART, part).env("PINPOOL_FENCES", fences).output().unwrap();
            let text = format!("{part}: {output:?}");
            if part == "late" {
                assert_eq!(ExitStatus::signal(&output.status), Some(libc::SIGABRT), "{text}");
                assert!(text.contains("pinpool: the system call membarrier is refused"), "{text}");
                assert!(text.contains("PINPOOL_FENCES=1"), "{text}");
            } else {
                assert!(output.status.success(), "{text}");
            }
        }
        return;
    };
    if part == "early" {
        refuse_membarrier();
    }
    let pool = pool(&host().1, 4 << 20);
    let use_it = |mark: u8| {
        let (a, b) = (filled(&pool, 64, mark), filled(&pool, 64, mark + 100));
        assert!(*a == [mark; 64] && *b == [mark + 100; 64], "a buffer has two owners");
    };
    // Takes back what another thread caches, while that thread sleeps.
    let (used, was_used) = mpsc::channel();
    let (end, ends) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let ends = ends;
            use_it(1);
            used.send(()).unwrap();
            ends.recv().unwrap_err();
            use_it(2);
        });
        was_used.recv().unwrap();
        assert!(pool.stats().cached_bytes > 0);
        refuse_membarrier();
        assert_eq!(pool.trim(0), 4 << 20);
        drop(end);
    });
    checked(&pool);
}

/// Handlers of the program ran on the library's threads.
#[test]
fn signals_are_for_the_programs_threads() {
    own_process!();
    let device = host().1;
    let pool = pool(&device, 16 << 20);
    let (stream, memory) = (device.stream().unwrap(), device.alloc(4 << 20).unwrap());
    let copier = Copier::builder(&pool, &device).build().unwrap();
    drop(copier.upload(vec![1; 4 << 20], &memory).unwrap().wait().unwrap());
    let sampling = Sampler::new(&pool).spawn(Duration::from_secs(1)).unwrap();
    // What each thread of ours blocks, by its name, which it gives itself when it begins.
    let threads = || -> Vec<(String, u64)> {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let all = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).ok());
        let look = |status: String| {
            let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
            (field("Name:").to_owned(), u64::from_str_radix(field("SigBlk:"), 16).unwrap())
        };
        all.map(look).filter(|(name, _)| name.starts_with("pinpool-")).collect()
    };
    let kinds = ["reap", "copy", "sample", "host"].map(|kind| format!("pinpool-{kind}"));
    let mask = |signals: &[libc::c_int]| signals.iter().fold(0, |mask, signal| mask | 1_u64 << (signal - 1));
    let raised =
        mask(&[libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGABRT, libc::SIGTRAP]);
    let wanted =
        mask(&[libc::SIGINT, libc::SIGTERM, libc::SIGUSR1, libc::SIGCHLD, libc::SIGPROF, libc::SIGRTMIN()]);
    // The C library blocks all of them for an instant where a thread begins, ends, or starts another.
    let is_settled = || {
        let threads = threads();
        let all = kinds.iter().all(|kind| threads.iter().any(|(name, _)| name.starts_with(kind)));
        all && threads.iter().all(|(_, blocked)| blocked & (wanted | raised) == wanted)
    };
    until(is_settled, || format!("{kinds:?} in {:x?}, and they are to block {wanted:x}", threads()));
    drop((sampling, copier, stream));
}
