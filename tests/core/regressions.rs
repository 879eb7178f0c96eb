//! Mistakes that were made once. Each test failed when it was written.

#![allow(unsafe_code, reason = "sandboxes and signals")]

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode};
use pinpool::{Checkout, Device, Error, InFlight, PinnedBuf, Pool, PoolBuilder, Request, Stream, Unpinned};

fn stepped(memory: usize) -> (HostNode, Device) {
    let node = HostNode::new(HostConfig::new().memory(memory).stepped(1)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    (node, device)
}

fn small(device: &Device) -> PoolBuilder {
    Pool::builder(device).capacity(256 << 10).unpinned(Unpinned::Allow)
}

fn fail(node: &HostNode, call: Call, failure: Failure) {
    node.fail(Fault { device: 0, call, nth: 0, failure });
}

/// Lets a call fail until the pool gives up on the stream.
fn lose(node: &HostNode, device: &Device, call: Call) {
    for _ in 0..2000 {
        fail(node, call, Failure::Argument);
        device.reap();
    }
    node.clear_faults();
}

/// Sends 4096 bytes and gives the handle up.
fn send(pool: &Pool, stream: &Stream, device: &Device) {
    let mut buf = pool.checkout(4096).unwrap();
    buf.try_resize(4096, 7).unwrap();
    drop(stream.upload(buf, device.alloc(4096).unwrap()).unwrap());
}

/// A capture elsewhere that makes recording an event fail is neither completion nor loss: the event is recorded later.
#[test]
fn a_capture_does_not_lose_a_stream() {
    for call in [Call::Record, Call::CreateEvent, Call::Query] {
        let (node, device) = stepped(1 << 20);
        let pool = small(&device).build().unwrap();
        let stream = device.stream().unwrap();
        send(&pool, &stream, &device);
        for _ in 0..100 {
            fail(&node, call, Failure::Capture);
            device.reap();
        }
        node.clear_faults();
        device.reap();
        while node.step() {}
        device.reap();
        let stats = pool.stats();
        assert_eq!((stats.in_flight_bytes, stats.quarantined_bytes), (0, 0), "{call:?}: {stats:?}");
        send(&pool, &stream, &device);
    }
}

/// The bound of a thread cache holds however often the thread goes to the pool.
#[test]
fn a_pool_is_not_hoarded_by_one_thread() {
    let (_node, device) = stepped(1 << 20);
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

/// A stream that is lost while its device lives may still use device memory: that memory stays allocated too.
#[test]
fn what_a_lost_stream_may_use_is_not_freed() {
    let (node, device) = stepped(1 << 20);
    let pool = small(&device).build().unwrap();
    let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
    send(&pool, &stream, &device);
    lose(&node, &device, Call::Record);
    assert_eq!(pool.stats().quarantined_bytes, 4160, "the stream is lost");
    while node.step() {}
    // A copy to memory that was freed would have killed the device.
    other.upload_blocking(&[1], device.alloc(1).unwrap()).unwrap();
}

/// When growing fails and nothing that is out could help, the wait ends with the reason.
#[test]
fn a_failed_growth_ends_the_wait() {
    let (node, device) = stepped(1 << 20);
    let pool = small(&device).initial(0).build().unwrap();
    fail(&node, Call::Pin, Failure::Argument);
    let refused = pool.checkout(4096).unwrap_err();
    assert!(matches!(&refused, Error::Device(e) if e.call == "pin"), "{refused}");
    // Only that call failed.
    pool.checkout(4096).unwrap();
}

/// The same where the device has threads: there no thread would ever have woken the waiter.
#[test]
fn a_failed_growth_ends_the_wait_on_threads() {
    for _ in 0..100 {
        let node = HostNode::new(HostConfig::new().memory(1 << 20)).unwrap();
        let device = Device::on(&node, 0).unwrap();
        let pool = small(&device).initial(0).build().unwrap();
        fail(&node, Call::Pin, Failure::Argument);
        let refused = pool.checkout_timeout(4096, Duration::from_secs(10)).unwrap_err();
        assert!(matches!(&refused, Error::Device(e) if e.call == "pin"), "{refused}");
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
    let (node, device) = stepped(1 << 20);
    let pool = small(&device).capacity(64 << 10).thread_cache(0).build().unwrap();
    let stream = device.stream().unwrap();
    let mut buf = pool.checkout(40 << 10).unwrap();
    buf.try_resize(1, 1).unwrap();
    let shared = Arc::new(buf);
    drop(stream.upload(shared.clone(), device.alloc(1).unwrap()).unwrap());
    let mut waiting: Checkout = pool.checkout_async(50 << 10);
    let looks = Arc::new(Looks(pool.clone(), Mutex::default()));
    let waker = Waker::from(looks.clone());
    assert!(Pin::new(&mut waiting).poll(&mut Context::from_waker(&waker)).is_pending());
    // The shared buffer is quarantined with its stream, which makes the request impossible.
    lose(&node, &device, Call::Query);
    assert_eq!(looks.1.lock().unwrap().len(), 1);
    let ended = Pin::new(&mut waiting).poll(&mut Context::from_waker(&waker));
    assert!(matches!(ended, Poll::Ready(Err(Error::Impossible { .. }))), "{ended:?}");
    drop(shared);
}

/// When all regions are in use and none is long enough for a request, it waits until some are idle.
#[test]
fn a_request_longer_than_any_region_waits_for_idle_ones() {
    let (_node, device) = stepped(1 << 20);
    let pool = small(&device).capacity(128 << 10).region(64 << 10).build().unwrap();
    let held = [pool.checkout(60 << 10).unwrap(), pool.checkout(60 << 10).unwrap()];
    let refused = pool.checkout(100 << 10).unwrap_err();
    assert!(matches!(refused, Error::Timeout(_)), "{refused}");
    // Regions without a buffer that is out make way.
    drop(held);
    pool.checkout(100 << 10).unwrap();
}

/// Whatever is shorter than an extent can be had, also where the segments of its size class are longer than that.
#[test]
fn a_request_as_long_as_an_extent_is_served() {
    let (_node, device) = stepped(1 << 20);
    let pool = small(&device).extent(64 << 10).region(64 << 10).initial(0).build().unwrap();
    for len in [(64 << 10) - 32, (64 << 10) - 33, (64 << 10) - 4096, (64 << 10) - 8192] {
        let buf = pool.try_checkout(len).unwrap_or_else(|e| panic!("{len}: {e}"));
        assert_eq!(pool.stats().pinned_bytes + pool.stats().unpinned_bytes, 64 << 10, "{len}");
        drop(buf);
        pool.check().unwrap();
    }
}

/// A pool on a device that only moves when it is stepped.
fn pool_with(setup: impl Fn(PoolBuilder) -> PoolBuilder) -> (HostNode, Device, Pool) {
    let node = HostNode::new(HostConfig::new().memory(1 << 20).stepped(1)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let pool = setup(Pool::builder(&device).unpinned(Unpinned::Allow)).build().unwrap();
    (node, device, pool)
}

#[test]
fn closing_while_somebody_waits_ends_the_waiting_mode() {
    let (_node, _device, pool) = pool_with(|b| b.capacity(1 << 20));
    let all = pool.try_checkout(Request::new((1 << 20) - 32).align(4096)).unwrap();
    let mut waiter = pool.checkout_many_async([Request::new(4096)]);
    let mut cx = Context::from_waker(Waker::noop());
    assert!(Pin::new(&mut waiter).poll(&mut cx).is_pending());
    pool.check().unwrap();
    assert!(!pool.shutdown(Duration::ZERO).drained);
    pool.check().unwrap();
    assert!(matches!(Pin::new(&mut waiter).poll(&mut cx), Poll::Ready(Err(Error::Closed))));
    drop(all);
    pool.check().unwrap();
}

#[test]
fn the_longest_request_is_served_where_its_class_fits_no_extent() {
    // 278 pages: a request for 1,095,520 bytes has a class of 1,179,712, longer than any extent can be.
    let extent = 278 * 4096;
    let (_node, _device, pool) = pool_with(|b| b.capacity(2 * extent).extent(extent));
    for len in [1_095_520, extent - 32] {
        let buf = pool.try_checkout(len).unwrap();
        assert_eq!(buf.capacity(), len);
        pool.check().unwrap();
    }
    assert!(matches!(pool.try_checkout(extent - 31), Err(Error::TooLong { .. })));
}

#[test]
fn idle_regions_make_way_for_a_request_that_fits_none_of_them() {
    let (_node, _device, pool) = pool_with(|b| b.capacity(1 << 20).region(64 << 10).initial(64 << 10));
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
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(waker)));
}

#[derive(Default)]
struct Woken(std::sync::atomic::AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, std::sync::atomic::Ordering::SeqCst);
    }
}

/// A handle whose drop panicked in the caller's waker dropped its buffer as if the device were done with it.
#[test]
fn a_waker_whose_drop_panics_frees_nothing_early() {
    let (node, device) = stepped(1 << 20);
    let pool = small(&device).build().unwrap();
    let stream = device.stream().unwrap();
    let mut buf = pool.checkout(4096).unwrap();
    buf.try_resize(4096, 7).unwrap();
    let mut flight = stream.upload(buf, device.alloc(4096).unwrap()).unwrap();
    poll_with_a_bomb(&mut flight);
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(flight)));
    assert_eq!(pool.stats().in_flight_bytes, 4160);
    pool.check().unwrap();
    while node.step() {}
    device.reap();
    assert_eq!(pool.stats().in_flight_bytes, 0);
    pool.check().unwrap();
}

/// The request that a cancelled wait made way for is woken, whatever the waker of the cancelled wait does.
#[test]
fn a_waker_whose_drop_panics_keeps_nobody_from_being_woken() {
    let (_node, device) = stepped(1 << 20);
    let pool = small(&device).capacity(64 << 10).build().unwrap();
    let held = pool.checkout(Request::new(32 << 10).align(4096)).unwrap();
    let mut large = pool.checkout_async(60 << 10);
    let mut fits = pool.checkout_async(Request::new(20 << 10).align(4096));
    poll_with_a_bomb(&mut large);
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(woken.clone());
    assert!(Pin::new(&mut fits).poll(&mut Context::from_waker(&waker)).is_pending());
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(large)));
    assert!(woken.0.load(std::sync::atomic::Ordering::SeqCst), "granted and not woken");
    assert!(matches!(Pin::new(&mut fits).poll(&mut Context::from_waker(&waker)), Poll::Ready(Ok(_))));
    drop(held);
}

/// Nor does a replaced waker whose drop panics leave a wait in the queue that nothing ends.
#[test]
fn a_waker_whose_drop_panics_leaves_no_wait_behind() {
    let (_node, device) = stepped(1 << 20);
    let pool = small(&device).capacity(64 << 10).build().unwrap();
    let held = pool.checkout(60 << 10).unwrap();
    let mut wait = pool.checkout_async(60 << 10);
    poll_with_a_bomb(&mut wait);
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        assert!(Pin::new(&mut wait).poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }));
    drop(wait);
    assert_eq!(pool.stats().waiting, 0);
    drop(held);
    pool.checkout(60 << 10).unwrap();
}

/// What is in flight on a device that was named twice is not counted twice.
#[test]
fn a_device_named_twice_counts_once() {
    let (_node, device) = stepped(1 << 20);
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
    let device = Device::on(&HostNode::new(HostConfig::new().memory(1 << 20)).unwrap(), 0).unwrap();
    let pool = small(&device).initial(0).build().unwrap();
    let (tell, told) = std::sync::mpsc::sync_channel(1);
    let waker = Waker::from(Arc::new(Asks(device, tell)));
    let mut wait = pool.checkout_async(4096);
    if Pin::new(&mut wait).poll(&mut Context::from_waker(&waker)).is_pending() {
        told.recv_timeout(Duration::from_secs(20)).expect("the worker waits for itself");
    }
}

/// A request that misses is one miss, however often it is tried before it fails or waits.
#[test]
fn a_miss_is_counted_once() {
    let (_node, device) = stepped(1 << 20);
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
        let (_node, device) = stepped(1 << 20);
        let pool =
            small(&device).capacity(capacity).extent(64 << 10).region(64 << 10).initial(0).build().unwrap();
        let both = pool.checkout_many(&[Request::new(40 << 10), Request::new(40 << 10)], None);
        assert!(both.is_ok(), "{both:?}, {:?}", pool.stats());
        pool.check().unwrap();
    }
}

/// Two threads that trimmed at once counted one unpinned region twice: room that never came back, or an overflow.
#[test]
fn a_region_goes_once_however_many_trim() {
    const REGION: usize = 64 << 10;
    let device = Device::on(&HostNode::new(HostConfig::new().memory(1 << 20)).unwrap(), 0).unwrap();
    let gone = Arc::new(Mutex::new(0));
    let seen = gone.clone();
    let built = Pool::builder(&device).capacity(4 * REGION).region(REGION).unpinned(Unpinned::Allow);
    let pool = built.before_unpin(move |info| *seen.lock().unwrap() += info.len).build().unwrap();
    let said: usize = std::thread::scope(|scope| {
        let trimmers: Vec<_> =
            (0..3).map(|_| scope.spawn(|| (0..2000).map(|_| pool.trim(0)).sum::<usize>())).collect();
        for _ in 0..2000 {
            // All of the capacity, so that a region that is counted as leaving for good is missed.
            let all: Vec<_> =
                (0..4).map(|_| pool.checkout_timeout(60 << 10, Duration::from_secs(20))).collect();
            assert!(all.iter().all(Result::is_ok), "{all:?}, {:?}", pool.stats());
        }
        trimmers.into_iter().map(|trimmer| trimmer.join().unwrap()).sum()
    });
    drop(pool);
    // The worker tells of each region, in its own time.
    let since = std::time::Instant::now();
    while *gone.lock().unwrap() < said && since.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(1));
    }
    // The others were given back with the pool.
    let (gone, left) = (*gone.lock().unwrap(), 4 * REGION);
    assert!((said..=said + left).contains(&gone), "{said} bytes were said to go, {gone} went");
}

/// A pool whose first device was lost could not grow any more, nor give memory back, though another one was well.
#[test]
fn a_pool_grows_as_long_as_one_device_is_left() {
    const PIECE: usize = 200 << 10;
    // The device is known to be lost before the pool grows, or growing finds it out; the device is either of the two.
    for (known, dead) in [(true, 0), (false, 0), (true, 1), (false, 1)] {
        let node = HostNode::new(HostConfig::new().devices(2).memory(4 << 20)).unwrap();
        let devices = [Device::on(&node, 0).unwrap(), Device::on(&node, 1).unwrap()];
        let built = Pool::builder(&devices[0]).device(&devices[1]).capacity(2 << 20).initial(256 << 10);
        let pool = built.region(256 << 10).extent(256 << 10).unpinned(Unpinned::Allow).build().unwrap();
        node.kill(dead);
        if known {
            assert!(devices[dead as usize].alloc(1).unwrap_err().is_device_lost());
        }
        let grown: Vec<_> =
            (0..8).map(|_| pool.checkout_timeout(PIECE, Duration::from_secs(20)).unwrap()).collect();
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

/// What overflows is too long by the pool's own measure, as any other excess.
#[test]
fn the_largest_length_is_the_pools_own_whatever_was_asked_for() {
    let device = Device::open("host").unwrap();
    let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
    for len in [2 << 20, usize::MAX / 2, usize::MAX] {
        let error = pool.checkout(len).unwrap_err();
        assert!(matches!(error, Error::TooLong { largest, .. } if largest <= 1 << 20), "{len}: {error}");
    }
}

/// Threads of the crate run code of the program, which must not wait there for what only that thread does.
#[test]
fn nobody_waits_for_the_thread_that_he_is_on() {
    use std::sync::mpsc;

    let device = Device::open("host").unwrap();
    let build = |initial| {
        let builder = Pool::builder(&device).capacity(8 << 20).initial(initial).region(4 << 20);
        builder.unpinned(Unpinned::Allow).build().unwrap()
    };
    // An owner is dropped on the thread that pins: a checkout there that has to grow is refused, not waited for.
    struct Asks(Pool, mpsc::Sender<Result<PinnedBuf, Error>>);
    impl Drop for Asks {
        fn drop(&mut self) {
            let _ = self.1.send(self.0.checkout(3 << 20));
        }
    }
    let pool = build(4 << 20);
    let _first = pool.checkout(3 << 20).unwrap();
    let memory = device.alloc(64).unwrap();
    let (tell, told) = mpsc::channel();
    #[allow(unsafe_code, reason = "memory by its address")]
    // SAFETY: the memory outlives what is made of it here.
    let owned = unsafe { device.raw_memory(memory.address(), 64, Asks(pool.clone(), tell)) };
    drop(owned.unwrap());
    let asked = told.recv_timeout(Duration::from_secs(20)).expect("it waits for itself");
    assert!(matches!(asked, Err(Error::Exhausted(_))), "{asked:?}");
    // The pool has grown all the same.
    drop(pool.checkout(3 << 20).unwrap());

    // A waker runs on the thread that finds out what is done.
    struct Waits(Mutex<Option<InFlight<PinnedBuf>>>, mpsc::Sender<Option<Error>>);
    impl Wake for Waits {
        fn wake(self: Arc<Self>) {
            if let Some(flight) = self.0.lock().unwrap().take() {
                let _ = self.1.send(flight.wait().err());
            }
        }
    }
    let node = HostNode::new(HostConfig::new().late(Duration::from_millis(20), 3)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let pool = Pool::builder(&device).capacity(8 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let (stream, other, memory) =
        (device.stream().unwrap(), device.stream().unwrap(), device.alloc(1 << 20).unwrap());
    let upload = |stream: &Stream| {
        let mut buf = pool.checkout(1 << 20).unwrap();
        buf.try_resize(1 << 20, 1).unwrap();
        stream.upload(buf, &memory).unwrap()
    };
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
    let error = told.recv_timeout(Duration::from_secs(20)).expect("it waits for itself");
    assert!(matches!(error, None | Some(Error::Unsupported(_))), "{error:?}");
    drop((first, others));
    assert!(pool.shutdown(Duration::from_secs(20)).drained);
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
    let node = HostNode::new(HostConfig::new().memory(16 << 20)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let build = || Pool::builder(&device).capacity(4 << 20).unpinned(Unpinned::Allow).build().unwrap();
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
    let test = "signals_are_for_the_programs_threads";
    if !in_a_process(test, "all", |status, text| assert!(status.success(), "{text}")) {
        return;
    }
    let node = HostNode::new(HostConfig::new().memory(64 << 20)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let pool = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow).build().unwrap();
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

/// A stepped device has no thread that drops the owners of foreign memory: an owner is dropped after the submission
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
    let (node, device) = stepped(32 << 20);
    let pool = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let (stream, memory) = (device.stream().unwrap(), device.alloc(8 << 20).unwrap());
    let asked = Arc::default();
    let owner = Asks(pool.clone(), Arc::clone(&asked));
    // SAFETY: memory of the device's, which lives for as long as this test.
    let slice = unsafe { device.raw_memory(memory.address(), 4096, owner) }.map_err(|e| e.error).unwrap();
    let mut small = pool.checkout(100).unwrap();
    small.try_resize(100, 1).unwrap();
    drop(stream.upload(small, slice).unwrap());
    // So large that its own submission records the event, which fails for good.
    let mut large = pool.checkout(5 << 20).unwrap();
    large.try_resize(5 << 20, 1).unwrap();
    let _out = pool.checkout(8 << 20).unwrap();
    fail(&node, Call::Record, Failure::DeviceLost);
    let _ = stream.upload(large, memory.slice(..).unwrap());
    assert_eq!(*asked.lock().unwrap(), [true], "dropped once, and its request waits");
}
