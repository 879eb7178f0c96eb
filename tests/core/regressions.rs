//! Mistakes that were made once. Each test failed when it was written.

#![allow(unsafe_code, reason = "sandboxes and signals")]

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use pinpool::host::{Call, Failure, Fault, HostConfig};
use pinpool::{Checkout, Device, Error, InFlight, PinnedBuf, Pool, PoolBuilder, Request, Stream};

use crate::running_out::Waiter;
use crate::support::hand::Machine;
use crate::{HANG, builder, filled, host, hosts, on, pool};

/// cuda.h: what is lost, what a capture forbids, and an error that concerns the one call.
const ILLEGAL_ADDRESS: u32 = 700;
const CAPTURE_UNSUPPORTED: u32 = 900;
const UNKNOWN: u32 = 999;

/// A device that runs nothing by itself.
fn by_hand() -> (Machine, Device) {
    let machine = Machine::new(1, 32 << 20, 1);
    let device = machine.device(0);
    (machine, device)
}

fn small(device: &Device) -> PoolBuilder {
    builder(device, 256 << 10)
}

/// Lets a call fail until the pool gives up on the stream.
fn lose(machine: &Machine, device: &Device, call: &str) {
    for _ in 0..2000 {
        machine.fail(call, 1, UNKNOWN);
        device.reap();
    }
    machine.calm();
}

/// Sends 4096 bytes and gives the handle up.
fn send(pool: &Pool, stream: &Stream, device: &Device) {
    drop(stream.upload(filled(pool, 4096, 7), device.alloc(4096).unwrap()).unwrap());
}

/// A capture elsewhere that makes recording an event fail is neither completion nor loss: the event is recorded later.
#[test]
fn a_capture_does_not_lose_a_stream() {
    for call in ["cuEventRecord", "cuEventCreate", "cuEventQuery"] {
        let (machine, device) = by_hand();
        let pool = small(&device).build().unwrap();
        let stream = device.stream().unwrap();
        send(&pool, &stream, &device);
        for _ in 0..100 {
            machine.fail(call, 1, CAPTURE_UNSUPPORTED);
            device.reap();
        }
        machine.calm();
        device.reap();
        while machine.step() {}
        device.reap();
        let stats = pool.stats();
        assert_eq!((stats.in_flight_bytes, stats.quarantined_bytes), (0, 0), "{call}: {stats:?}");
        send(&pool, &stream, &device);
    }
}

/// The bound of a thread cache holds however often the thread goes to the pool.
#[test]
fn a_pool_is_not_hoarded_by_one_thread() {
    let (_machine, device) = by_hand();
    let pool = small(&device).capacity(128 << 10).thread_cache(8 << 10).build().unwrap();
    let mut held = Vec::new();
    while let Ok(buf) = pool.try_checkout(32) {
        held.push(buf);
        if held.len() % 16 == 0 {
            pool.check().unwrap();
        }
    }
    pool.check().unwrap();
}

/// When growing fails and nothing that is out could help, the wait ends with the reason. Where the device has threads no
/// thread would ever have woken the waiter.
#[test]
fn a_failed_growth_ends_the_wait() {
    let refused = |pool: &Pool, call: &str| {
        let error = pool.checkout_timeout(4096, HANG).unwrap_err();
        assert!(matches!(&error, Error::Device(e) if e.call == call), "{error}");
        // Only that call failed.
        pool.checkout(4096).unwrap();
    };
    let (machine, device) = by_hand();
    machine.fail("cuMemHostRegister_v2", 1, UNKNOWN);
    refused(&small(&device).initial(0).build().unwrap(), "cuMemHostRegister");
    for _ in 0..100 {
        let (node, device) = host();
        node.fail(Fault { device: 0, call: Call::Pin, nth: 0, failure: Failure::Argument });
        refused(&small(&device).initial(0).build().unwrap(), "pin");
    }
}

/// A waker may do anything, looking at the pool included: none is called under a lock.
#[test]
fn a_waker_may_look_at_the_pool() {
    struct Looks(Pool, Mutex<Vec<usize>>);
    impl Wake for Looks {
        fn wake(self: Arc<Self>) {
            self.1.lock().unwrap().push(self.0.stats().quarantined_bytes);
        }
    }
    let (machine, device) = by_hand();
    let pool = small(&device).capacity(64 << 10).thread_cache(0).build().unwrap();
    let stream = device.stream().unwrap();
    let shared = Arc::new(filled(&pool, 40 << 10, 1));
    drop(stream.upload(shared.clone(), device.alloc(40 << 10).unwrap()).unwrap());
    let mut waiting: Checkout = pool.checkout_async(50 << 10);
    let looks = Arc::new(Looks(pool.clone(), Mutex::default()));
    let waker = Waker::from(looks.clone());
    assert!(Pin::new(&mut waiting).poll(&mut Context::from_waker(&waker)).is_pending());
    // The shared buffer is quarantined with its stream, which makes the request impossible.
    lose(&machine, &device, "cuEventQuery");
    assert_eq!(looks.1.lock().unwrap().len(), 1);
    let ended = Pin::new(&mut waiting).poll(&mut Context::from_waker(&waker));
    assert!(matches!(ended, Poll::Ready(Err(Error::Impossible { .. }))), "{ended:?}");
    drop(shared);
    // The copy was submitted all the same. A stream that is lost is destroyed whatever it has queued.
    while machine.step() {}
}

#[test]
fn idle_regions_make_way_for_a_request_that_fits_none_of_them() {
    let (_machine, device) = by_hand();
    let pool = small(&device).capacity(1 << 20).region(64 << 10).initial(64 << 10).build().unwrap();
    // Sixteen regions, which use the capacity up.
    let small: Vec<_> = (0..16).map(|_| pool.try_checkout(60_000).unwrap()).collect();
    assert_eq!(pool.regions().len(), 16);
    assert!(matches!(pool.try_checkout(200_000), Err(Error::Exhausted(_))));
    let mut small = small.into_iter();
    let kept = small.next().unwrap();
    drop(small);
    let large = pool.try_checkout(200_000).unwrap();
    assert_eq!(large.capacity(), 200_000);
    let stats = pool.stats();
    assert!(stats.pinned_bytes + stats.unpinned_bytes <= 1 << 20, "{stats:?}");
    pool.check().unwrap();
    drop((kept, large));
    let most = pool.try_checkout((1 << 20) - 32).unwrap();
    assert_eq!((pool.regions().len(), most.capacity()), (1, (1 << 20) - 32));
    pool.check().unwrap();
}

/// A waker whose drop panics.
struct Bomb;

impl Wake for Bomb {
    fn wake(self: Arc<Self>) {
        std::mem::forget(self);
    }
}

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("a waker's drop");
    }
}

/// Polls once with a waker of which the future then has the only one.
fn poll_with_a_bomb<F: Future + Unpin>(future: &mut F) {
    let waker = Waker::from(Arc::new(Bomb));
    assert!(Pin::new(future).poll(&mut Context::from_waker(&waker)).is_pending());
    caught(|| drop(waker));
}

/// Goes on behind the panic of a waker's drop.
fn caught(call: impl FnOnce()) {
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
}

/// A handle whose drop panicked in the caller's waker dropped its buffer as if the device were done with it.
#[test]
fn a_waker_whose_drop_panics_frees_nothing_early() {
    let (machine, device) = by_hand();
    let pool = small(&device).build().unwrap();
    let stream = device.stream().unwrap();
    let mut flight = stream.upload(filled(&pool, 4096, 7), device.alloc(4096).unwrap()).unwrap();
    poll_with_a_bomb(&mut flight);
    caught(|| drop(flight));
    assert_eq!(pool.check().unwrap().in_flight_bytes, 4160);
    while machine.step() {}
    device.reap();
    assert_eq!(pool.check().unwrap().in_flight_bytes, 0);
}

#[test]
fn a_waker_whose_drop_panics_loses_no_wake_and_leaves_no_wait_behind() {
    let (_machine, device) = by_hand();
    let pool = small(&device).capacity(64 << 10).build().unwrap();
    // The request that a cancelled wait made way for is woken.
    let held = pool.checkout(Request::new(32 << 10).align(4096)).unwrap();
    let mut large = pool.checkout_async(60 << 10);
    poll_with_a_bomb(&mut large);
    let fits = Waiter::new(pool.checkout_async(Request::new(20 << 10).align(4096)));
    caught(|| drop(large));
    drop((fits.ready().unwrap(), held));
    // Nor is a wait, whose waker is replaced, left in the queue with nothing to end it.
    let held = pool.checkout(60 << 10).unwrap();
    let mut wait = pool.checkout_async(60 << 10);
    poll_with_a_bomb(&mut wait);
    caught(|| assert!(Pin::new(&mut wait).poll(&mut Context::from_waker(Waker::noop())).is_pending()));
    drop(wait);
    assert_eq!(pool.stats().waiting, 0);
    drop(held);
    pool.checkout(60 << 10).unwrap();
}

/// What is in flight on a device that was named twice is not counted twice.
#[test]
fn a_device_named_twice_counts_once() {
    let (_machine, device) = by_hand();
    let pool = small(&device).device(&device).build().unwrap();
    let stream = device.stream().unwrap();
    let other = pool.checkout(4096).unwrap();
    send(&pool, &stream, &device);
    let stats = pool.stats();
    assert_eq!((stats.in_flight_bytes, stats.checked_out_bytes), (4160, 4160), "{stats:?}");
    assert_eq!(pool.devices().len(), 1);
    pool.check().unwrap();
    drop(other);
}

/// A waker that is called on the device's worker thread may ask for what that thread makes.
#[test]
fn a_waker_may_ask_the_device_for_memory() {
    struct Asks(Device, std::sync::mpsc::SyncSender<()>);
    impl Wake for Asks {
        fn wake(self: Arc<Self>) {
            drop((self.0.alloc(1).unwrap(), self.0.stream().unwrap()));
            let _ = self.1.try_send(());
        }
    }
    let device = host().1;
    let pool = small(&device).initial(0).build().unwrap();
    let (tell, told) = std::sync::mpsc::sync_channel(1);
    let waker = Waker::from(Arc::new(Asks(device, tell)));
    let mut wait = pool.checkout_async(4096);
    if Pin::new(&mut wait).poll(&mut Context::from_waker(&waker)).is_pending() {
        told.recv_timeout(HANG).expect("the worker waits for itself");
    }
}

/// A request that misses is one miss, however often it is tried before it fails or waits.
#[test]
fn a_miss_is_counted_once() {
    let (_machine, device) = by_hand();
    let pool = small(&device).capacity(64 << 10).build().unwrap();
    let misses = || pool.stats().misses;
    let held = pool.checkout(60 << 10).unwrap();
    assert_eq!(misses(), 1);
    pool.try_checkout(60 << 10).unwrap_err();
    assert_eq!(misses(), 2);
    pool.try_checkout_on(&device.stream().unwrap(), 60 << 10).map(drop).unwrap_err();
    assert_eq!(misses(), 3);
    drop(held);
}

/// A region is cut at its extents' edges, so one for several requests has an extent wherever the next does not fit.
#[test]
fn several_requests_grow_by_extents_that_hold_them() {
    for capacity in [128 << 10, 256 << 10] {
        let (_machine, device) = by_hand();
        let pool =
            small(&device).capacity(capacity).extent(64 << 10).region(64 << 10).initial(0).build().unwrap();
        let both = pool.checkout_many(&[Request::new(40 << 10), Request::new(40 << 10)], None);
        assert!(both.is_ok(), "{both:?}, {:?}", pool.stats());
        pool.check().unwrap();
    }
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
        let grown: Vec<_> = (0..8).map(|_| pool.checkout_timeout(PIECE, HANG).unwrap()).collect();
        let well = &devices[1 - dead as usize];
        let (stream, memory) = (well.stream().unwrap(), well.alloc(PIECE).unwrap());
        for mut buf in grown {
            buf.try_resize(PIECE, 7).unwrap();
            drop(stream.upload(buf, &memory).unwrap().wait().unwrap());
        }
        assert_eq!(pool.trim(0), 2 << 20, "all of it is free");
        // Memory of the caller's too.
        let adopted = pool.adopt(vec![0_u8; 512 << 10]).unwrap();
        assert!(adopted.len >= 256 << 10);
        pool.check().unwrap();
        assert_eq!(well.lost(), None);
    }
}

/// Threads of the crate run code of the program, which must not wait there for what only that thread does.
#[test]
fn nobody_waits_for_the_thread_that_he_is_on() {
    use std::sync::mpsc;

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
    #[allow(unsafe_code, reason = "memory by its address")]
    // SAFETY: the memory outlives what is made of it here.
    let owned = unsafe { device.raw_memory(memory.address(), 64, Asks(grows.clone(), tell)) };
    drop(owned.unwrap());
    let asked = told.recv_timeout(HANG).expect("it waits for itself");
    assert!(matches!(asked, Err(Error::Exhausted(_))), "{asked:?}");
    // The pool has grown all the same.
    drop(grows.checkout(3 << 20).unwrap());

    // A waker runs on the thread that finds out what is done.
    struct Waits(Mutex<Option<InFlight<PinnedBuf>>>, mpsc::Sender<Option<Error>>);
    impl Wake for Waits {
        fn wake(self: Arc<Self>) {
            if let Some(flight) = self.0.lock().unwrap().take() {
                let _ = self.1.send(flight.wait().err());
            }
        }
    }
    let (_node, device) = on(HostConfig::new().late(Duration::from_millis(20), 3));
    let pool = pool(&device, 8 << 20);
    let (stream, other, memory) =
        (device.stream().unwrap(), device.stream().unwrap(), device.alloc(1 << 20).unwrap());
    let upload = |stream: &Stream| stream.upload(filled(&pool, 1 << 20, 1), &memory).unwrap();
    let (tell, told) = mpsc::channel();
    // Many more behind it, so that the other is under way when the first wakes.
    let mut others: Vec<_> = (0..5).map(|_| upload(&other)).collect();
    let waker = Waker::from(Arc::new(Waits(Mutex::new(others.pop()), tell)));
    // Until one copy is not complete at once, on whatever machine.
    let first = loop {
        let mut first = Box::pin(upload(&stream));
        if matches!(first.as_mut().poll(&mut Context::from_waker(&waker)), Poll::Pending) {
            break first;
        }
    };
    // Complete by then, or refused: but the waker never waited for it.
    let error = told.recv_timeout(HANG).expect("it waits for itself");
    assert!(matches!(error, None | Some(Error::Unsupported(_))), "{error:?}");
    drop((first, others));
    assert!(pool.shutdown(HANG).drained);
}

/// Runs this test's `part` in a process of its own, on that one's first thread; `true` in that process. Its exit status
/// and output are passed to `verdict` here.
#[cfg(target_os = "linux")]
fn in_a_process(test: &str, part: &str, verdict: impl FnOnce(std::process::ExitStatus, &str)) -> bool {
    const PART: &str = "PINPOOL_TEST_PART";
    if let Ok(now) = std::env::var(PART) {
        return now == part;
    }
    let fences = if part == "fences" { "1" } else { "0" };
    let mut command = crate::support::process::command(test);
    let output = command.env(PART, part).env("PINPOOL_FENCES", fences).output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    verdict(output.status, &format!("{part}:\n{out}{err}"));
    false
}

/// From here on this thread is refused `membarrier`.
#[cfg(target_os = "linux")]
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
#[cfg(target_os = "linux")]
fn a_sandbox_that_comes_late_makes_no_second_owner() {
    let test = "a_sandbox_that_comes_late_makes_no_second_owner";
    let well = |status: std::process::ExitStatus, text: &str| assert!(status.success(), "{text}");
    let device = host().1;
    let build = || pool(&device, 4 << 20);
    let use_it = |pool: &Pool, mark: u8| {
        let fill = |mark: u8| {
            let mut buf = pool.checkout(64).unwrap();
            buf.extend_from_slice(&[mark; 64]);
            buf
        };
        let (a, b) = (fill(mark), fill(mark + 100));
        assert!(*a == [mark; 64] && *b == [mark + 100; 64], "a buffer has two owners");
    };
    // Takes back what another thread caches, while that thread sleeps.
    let take_back = |pool: &Pool| {
        let (used, was_used) = std::sync::mpsc::channel();
        let (end, ends) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let ends = ends;
                use_it(pool, 1);
                used.send(()).unwrap();
                ends.recv().unwrap_err();
                use_it(pool, 2);
            });
            was_used.recv().unwrap();
            assert!(pool.stats().cached_bytes > 0);
            refuse_membarrier();
            assert_eq!(pool.trim(0), 4 << 20);
            drop(end);
        });
        pool.check().unwrap();
    };
    let aborted = |status: std::process::ExitStatus, text: &str| {
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(status.signal(), Some(libc::SIGABRT), "{text}");
        assert!(text.contains("pinpool: the system call membarrier is refused"), "{text}");
        assert!(text.contains("PINPOOL_FENCES=1"), "{text}");
    };
    // Sanitizers build pools that need no barrier.
    if in_a_process(test, "late", if cfg!(pinpool_rmw) { well } else { aborted }) {
        take_back(&build());
    }
    if in_a_process(test, "fences", well) {
        take_back(&build());
    }
    // A sandbox that was there before the pool.
    if in_a_process(test, "early", well) {
        refuse_membarrier();
        take_back(&build());
    }
}

/// Handlers of the program ran on the library's threads.
#[test]
#[cfg(target_os = "linux")]
fn signals_are_for_the_programs_threads() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static HANDLED: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn handle(_: libc::c_int) {
        HANDLED.fetch_add(1, Ordering::Relaxed);
    }
    crate::support::own_process!();
    let device = host().1;
    let pool = pool(&device, 16 << 20);
    let (stream, memory) = (device.stream().unwrap(), device.alloc(4 << 20).unwrap());
    let copier = pinpool::Copier::builder(&pool, &device).build().unwrap();
    drop(copier.upload(vec![1; 4 << 20], &memory).unwrap().wait().unwrap());
    let sampling = pinpool::telemetry::Sampler::new(&pool).spawn(Duration::from_secs(1)).unwrap();
    // What each thread of ours blocks, by its name, which it gives itself when it begins.
    let threads = || -> Vec<(String, u64)> {
        let status = |task: std::io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(task.unwrap().path().join("status")).ok()
        };
        let look = |status: String| {
            let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
            (field("Name:").to_owned(), u64::from_str_radix(field("SigBlk:"), 16).unwrap())
        };
        let all = std::fs::read_dir("/proc/self/task").unwrap().filter_map(status).map(look);
        all.filter(|(name, _)| name.starts_with("pinpool-")).collect()
    };
    let kinds = ["reap", "copy", "sample", "host"].map(|kind| format!("pinpool-{kind}"));
    let mask = |signals: &[libc::c_int]| signals.iter().fold(0, |mask, signal| mask | 1_u64 << (signal - 1));
    let raised =
        mask(&[libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGABRT, libc::SIGTRAP]);
    let wanted =
        mask(&[libc::SIGINT, libc::SIGTERM, libc::SIGUSR1, libc::SIGCHLD, libc::SIGPROF, libc::SIGRTMIN()]);
    let since = std::time::Instant::now();
    let threads = loop {
        let threads = threads();
        let all = kinds.iter().all(|kind| threads.iter().any(|(name, _)| name.starts_with(kind)));
        // The C library blocks all of them for an instant where a thread begins, ends, or starts another.
        if all && threads.iter().all(|(_, blocked)| blocked & raised == 0) {
            break threads;
        }
        assert!(since.elapsed() < Duration::from_secs(20), "{kinds:?} in {threads:x?}");
        std::thread::yield_now();
    };
    for (name, blocked) in threads {
        assert_eq!(blocked & wanted, wanted, "{name} blocks {blocked:x}");
    }
    // A signal that comes while only those threads could take it waits for this thread.
    // SAFETY: the handler only counts; sets of signals, filled within.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut set, libc::SIGUSR1);
        assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()), 0);
        libc::signal(libc::SIGUSR1, handle as extern "C" fn(libc::c_int) as libc::sighandler_t);
        // Where the harness has a thread of its own beside this one, that thread may take it.
        let alone = libc::getpid() == libc::syscall(libc::SYS_gettid) as libc::pid_t;
        assert_eq!(libc::kill(libc::getpid(), libc::SIGUSR1), 0);
        std::thread::sleep(Duration::from_millis(50));
        assert!(!alone || HANDLED.load(Ordering::Relaxed) == 0, "a thread of ours has handled it");
        assert_eq!(libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut()), 0);
        assert_eq!(HANDLED.load(Ordering::Relaxed), 1);
    }
    drop((sampling, copier, stream));
}

/// A device that is moved by hand has no thread that drops the owners of foreign memory: an owner is dropped after the submission
/// that found the device dead, and may use the pool.
#[test]
fn an_owner_of_device_memory_is_not_dropped_within_a_submission() {
    struct Asks(Pool, Arc<Mutex<Vec<bool>>>);
    impl Drop for Asks {
        fn drop(&mut self) {
            let mut checkout = self.0.checkout_async(8 << 20);
            let first = Pin::new(&mut checkout).poll(&mut Context::from_waker(Waker::noop()));
            self.1.lock().unwrap().push(first.is_pending());
        }
    }
    let (machine, device) = by_hand();
    let pool = pool(&device, 16 << 20);
    let (stream, memory) = (device.stream().unwrap(), device.alloc(8 << 20).unwrap());
    let asked = Arc::default();
    let owner = Asks(pool.clone(), Arc::clone(&asked));
    // SAFETY: memory of the device's, which lives for as long as this test.
    let slice = unsafe { device.raw_memory(memory.address(), 4096, owner) }.map_err(|e| e.error).unwrap();
    drop(stream.upload(filled(&pool, 100, 1), slice).unwrap());
    // So large that its own submission records the event, which fails for good.
    let large = filled(&pool, 5 << 20, 1);
    let _out = pool.checkout(8 << 20).unwrap();
    machine.fail("cuEventRecord", 1, ILLEGAL_ADDRESS);
    let _ = stream.upload(large, memory.slice(..).unwrap());
    assert_eq!(*asked.lock().unwrap(), [true], "dropped once, and its request waits");
}
