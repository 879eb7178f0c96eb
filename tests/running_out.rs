//! What happens when the pool has nothing left: failing, waiting, growing, trimming, and the end.
//!
//! Who waits is mostly a future here, polled by hand, on a stepped device: then the order of things is the test's own, and
//! a test needs no clock. What only threads can show (a parked waiter, pinning in the background) is on the threaded
//! device.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode, HostUsage};
use pinpool::{
    Checkout, Device, Error, HostBuf, PinnedBuf, Pool, PoolBuilder, PoolStats, RegionInfo, Request, Stream,
    Token,
};

const PAGE: usize = 4096;
/// Longer than anything takes here.
const HANG: Duration = Duration::from_secs(20);

struct Rig {
    node: HostNode,
    device: Device,
}

impl Rig {
    fn stepped() -> Self {
        Self::on(HostConfig::new().memory(8 << 20).stepped(7))
    }

    fn threads() -> Self {
        Self::on(HostConfig::new().memory(8 << 20))
    }

    fn on(config: HostConfig) -> Self {
        let node = HostNode::new(config).unwrap();
        let device = Device::on(&node, 0).unwrap();
        Self { node, device }
    }

    fn pool(&self, capacity: usize) -> Pool {
        self.builder(capacity).build().unwrap()
    }

    fn builder(&self, capacity: usize) -> PoolBuilder {
        Pool::builder(&self.device).capacity(capacity)
    }

    /// Everything is back where it came from, with threads a little later.
    fn all_is_given_back(self) {
        let Self { node, device } = self;
        drop(device);
        eventually(|| (node.live(0) == HostUsage::default()).then_some(()), || format!("{:?}", node.live(0)));
    }
}

/// Waits for something that happens by itself.
#[track_caller]
fn eventually<R>(mut what: impl FnMut() -> Option<R>, why: impl Fn() -> String) -> R {
    let since = Instant::now();
    loop {
        if let Some(found) = what() {
            return found;
        }
        assert!(since.elapsed() < HANG, "it does not happen: {}", why());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A request for so many pages of its own, in one piece.
fn pages(n: usize) -> Request<'static> {
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

/// Someone who waits: a future and the bell that it rings.
struct Waiter<F: Future> {
    future: Pin<Box<F>>,
    bell: Arc<Bell>,
}

impl<F: Future> Waiter<F> {
    fn new(future: F) -> Self {
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
    fn ready(mut self) -> F::Output {
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

fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    let since = Instant::now();
    loop {
        assert!(since.elapsed() < HANG, "a future hangs");
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park_timeout(HANG),
        }
    }
}

#[track_caller]
fn checked(pool: &Pool) -> PoolStats {
    pool.check().unwrap();
    let s = pool.stats();
    let parts = s.free_bytes + s.checked_out_bytes + s.in_flight_bytes + s.quarantined_bytes + s.cut_bytes;
    assert_eq!(parts, s.pinned_bytes + s.unpinned_bytes, "{s:?}");
    assert!(parts <= s.capacity_bytes, "{s:?}");
    s
}

/// Sends a buffer on its way and forgets about it.
fn send(stream: &Stream, mut buf: PinnedBuf) {
    buf.clear();
    buf.extend_from_slice(&[5; 32]);
    let target = stream.device().alloc(32).unwrap();
    drop(stream.upload(buf, target).unwrap());
}

fn drain(rig: &Rig) {
    while rig.node.step() | rig.device.reap() {}
}

// --- failing and waiting ---------------------------------------------------------------------------------------------

#[test]
fn it_fails_at_once_if_told_so() {
    let rig = Rig::stepped();
    let pool = rig.pool(64 << 10);
    let all = pool.checkout(pages(16)).unwrap();
    for _ in 0..3 {
        let error = pool.try_checkout(100).unwrap_err();
        assert_eq!(error, Error::Exhausted { len: 100, capacity: 64 << 10, growth: None });
        assert!(error.is_retryable());
    }
    let stats = checked(&pool);
    assert_eq!((stats.waits, stats.waiting, stats.checkouts), (0, 0, 1));
    drop(all);
    drop(pool.try_checkout(100).unwrap());
}

#[test]
fn a_deadline_leaves_no_trace() {
    let rig = Rig::threads();
    let pool = rig.pool(64 << 10);
    let all = pool.checkout(pages(16)).unwrap();
    let error = pool.checkout_timeout(100, Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, Error::Timeout(t) if t >= Duration::from_millis(20)), "{error}");
    let error = pool.checkout_many(&[pages(1), pages(2)], Some(Duration::ZERO)).unwrap_err();
    assert!(matches!(error, Error::Timeout(_)), "{error}");
    let stats = checked(&pool);
    assert_eq!((stats.waits, stats.timeouts, stats.waiting), (2, 2, 0));
    drop(all);
    assert_eq!(checked(&pool).checked_out_bytes, 0);
    drop(pool.try_checkout(pages(16)).unwrap());
}

#[test]
fn a_thread_waits_until_something_comes_back() {
    let rig = Rig::threads();
    let pool = rig.pool(64 << 10);
    for way in 0..3 {
        let all = pool.checkout(pages(16)).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| match way {
                0 => pool.checkout(5000).map(|b| b.capacity()),
                1 => pool.checkout_timeout(5000, HANG).map(|b| b.capacity()),
                _ => block_on(pool.checkout_async(5000)).map(|b| b.capacity()),
            });
            eventually(|| (pool.stats().waiting == 1).then_some(()), || format!("{pool:?}"));
            if way == 1 {
                // Back by way of a stream.
                send(&rig.device.stream().unwrap(), all);
            } else {
                drop(all);
            }
            assert_eq!(waiter.join().unwrap().unwrap(), 5000);
        });
    }
    eventually(|| (pool.stats().in_flight_bytes == 0).then_some(()), || format!("{pool:?}"));
    assert_eq!(checked(&pool).waits, 3);
}

#[test]
fn on_a_stepped_device_the_waiter_moves_the_device() {
    let rig = Rig::stepped();
    let pool = rig.pool(64 << 10);
    let stream = rig.device.stream().unwrap();
    send(&stream, pool.checkout(pages(16)).unwrap());
    assert!(matches!(pool.try_checkout(9), Err(Error::Exhausted { .. })));
    drop(pool.checkout(9).unwrap());
    // Nothing can come back: nobody else moves the device, so waiting ends.
    let all = pool.checkout(pages(16)).unwrap();
    assert!(matches!(pool.checkout(9), Err(Error::Timeout(_))));
    drop(all);
    assert_eq!(checked(&pool).waiting, 0);
}

#[test]
fn plain_memory_says_that_it_is_plain() {
    let rig = Rig::stepped();
    let pool = rig.pool(64 << 10);
    assert!(matches!(pool.checkout_or_unpinned(5), Ok(HostBuf::Pinned(_))));
    let all = pool.checkout(pages(16)).unwrap();
    let Ok(HostBuf::Unpinned(mut plain)) = pool.checkout_or_unpinned(5000) else { panic!("pinned") };
    assert_eq!((plain.capacity(), plain.len()), (5000, 0));
    plain.try_extend_from_slice(&[3; 5000]).unwrap();
    assert_eq!(plain.try_extend_from_slice(&[3]), Err(Error::TooSmall { need: 1, have: 0 }));
    let (stream, memory) = (rig.device.stream().unwrap(), rig.device.alloc(5000).unwrap());
    stream.upload_blocking(&plain, &memory).unwrap();
    plain.try_resize(0, 0).unwrap();
    plain.try_resize(5000, 0).unwrap();
    stream.download_blocking(&memory, &mut plain).unwrap();
    assert!(plain.iter().all(|&b| b == 3));
    drop(pool.checkout_or_unpinned(7).unwrap());
    let stats = checked(&pool);
    assert_eq!((stats.unpinned_fallbacks, stats.unpinned_fallback_bytes), (2, 5007));
    assert_eq!((stats.unpinned_bytes, stats.waiting), (0, 0));
    // What is wrong with a request is wrong with plain memory too.
    assert!(matches!(pool.checkout_or_unpinned(0), Err(Error::ZeroLength)));
    assert!(matches!(pool.checkout_or_unpinned(1 << 30), Err(Error::TooLong { .. })));
    drop(all);
}

#[test]
fn nonsense_is_refused_whoever_asks() {
    let rig = Rig::stepped();
    let pool = rig.pool(64 << 10);
    for _ in 0..2 {
        assert!(matches!(pool.checkout(0), Err(Error::ZeroLength)));
        assert!(matches!(pool.checkout(usize::MAX), Err(Error::TooLong { .. })));
        assert!(matches!(pool.checkout(Request::new(1).align(3)), Err(Error::BadAlignment { .. })));
        assert!(matches!(pool.checkout(Request::new(1).reserve("none")), Err(Error::Config(_))));
        let asked = [Request::new(1), Request::new(0)];
        assert!(matches!(pool.checkout_many(&asked, None), Err(Error::ZeroLength)));
        assert!(matches!(block_on(pool.checkout_many_async(asked)), Err(Error::ZeroLength)));
        assert!(matches!(pool.redeem(Token::from_raw([1, 0, 0])), Err(Error::StaleToken)));
    }
    assert!(pool.checkout_many(&[], None).unwrap().is_empty());
    assert_eq!(checked(&pool).checkouts, 0);
}

#[test]
fn the_longest_request_is_an_extent() {
    let rig = Rig::stepped();
    let pool = rig.builder(256 << 10).extent(32 << 10).region(32 << 10).build().unwrap();
    // A class would round this up to more than an extent.
    let largest = (32 << 10) - 32;
    let bufs: Vec<_> = (0..8).map(|_| pool.checkout(largest).unwrap()).collect();
    assert_eq!(checked(&pool).pinned_bytes, 256 << 10);
    drop(bufs);
    assert_eq!(pool.checkout(largest + 1).unwrap_err(), Error::TooLong { len: largest + 1, largest });
    drop(pool.checkout(Request::new(largest).align(PAGE)).unwrap());
}

#[test]
fn first_come_first_served() {
    let rig = Rig::stepped();
    let pool = rig.pool(64 << 10);
    let (a, b) = (pool.checkout(pages(8)).unwrap(), pool.checkout(pages(8)).unwrap());
    let first = Waiter::new(pool.checkout_async(pages(6)));
    let mut second = Waiter::new(pool.checkout_async(pages(8)));
    let mut third = Waiter::new(pool.checkout_async(pages(2)));
    assert_eq!(pool.stats().waiting, 3);
    drop(a);
    // The third would fit beside the first, but the second is before it.
    let first = first.ready().unwrap();
    second.still_waits();
    third.still_waits();
    // Nor may somebody new take what is free.
    assert!(matches!(pool.try_checkout(pages(1)), Err(Error::Exhausted { .. })));
    drop(b);
    drop((first, second.ready().unwrap(), third.ready().unwrap()));
    let stats = checked(&pool);
    assert_eq!((stats.waiting, stats.waits, stats.checked_out_bytes), (0, 3, 0));
}

#[test]
fn a_big_request_is_passed_64_times_and_no_more() {
    let rig = Rig::stepped();
    let pool = rig.pool(128 << 10);
    // A run of small segments, one of them in use, and that far behind; and all but a few of the other pages.
    let mut few: Vec<_> = (0..130).map(|_| pool.checkout(32).unwrap()).collect();
    let small = few.pop();
    drop(few);
    let others = pool.checkout(pages(10)).unwrap();
    let mut big = Waiter::new(pool.checkout_async(pages(30)));
    let mut passed = Vec::new();
    let refusal = loop {
        match pool.try_checkout(32) {
            Ok(buf) => passed.push(buf),
            Err(error) => break error,
        }
    };
    assert_eq!(passed.len(), 64);
    assert!(matches!(refusal, Error::Exhausted { .. }), "{refusal}");
    assert!(checked(&pool).free_bytes > 10 * PAGE, "there is room for more small ones");
    // Small ones that wait are behind it as well, though one comes back.
    let mut late = Waiter::new(pool.checkout_async(32));
    passed.pop();
    late.still_waits();
    // More small ones come and go, until the run is empty.
    drop(others);
    big.still_waits();
    drop(passed);
    big.still_waits();
    drop(small);
    drop(big.ready().unwrap());
    drop(late.ready().unwrap());
    assert_eq!(checked(&pool).waiting, 0);
}

#[test]
fn what_the_head_could_use_is_not_given_past_it() {
    let rig = Rig::stepped();
    let pool = rig.pool(64 << 10);
    let all = pool.checkout(pages(16)).unwrap();
    let one = Waiter::new(pool.checkout_async(32));
    // The same class, but several at once: not before there are as many.
    let several = Waiter::new(pool.checkout_many_async([Request::new(32); 3]));
    let last = Waiter::new(pool.checkout_async(32));
    drop(all);
    drop((one.ready().unwrap(), several.ready().unwrap(), last.ready().unwrap()));
    assert_eq!(checked(&pool).checked_out_bytes, 0);
}

#[test]
fn several_buffers_come_together_or_not_at_all() {
    let rig = Rig::stepped();
    let pool = rig.pool(64 << 10);
    let (a, b) = (pool.checkout(pages(8)).unwrap(), pool.checkout(pages(8)).unwrap());
    let mut both = Waiter::new(pool.checkout_many_async([pages(8), pages(4), pages(4)]));
    drop(a);
    both.still_waits();
    assert_eq!(checked(&pool).checked_out_bytes, 8 * PAGE, "it holds none while it waits for the rest");
    drop(b);
    let bufs = both.ready().unwrap();
    assert_eq!(bufs.iter().map(|b| b.capacity()).collect::<Vec<_>>(), [8, 4, 4].map(|n| n * PAGE - 32));
    drop(bufs);
    let bufs = pool.checkout_many(&[pages(15), pages(1)], None).unwrap();
    assert_eq!(bufs.len(), 2);
    drop(bufs);
    // More than there can ever be.
    let error = pool.checkout_many(&[pages(8), pages(9)], None).unwrap_err();
    assert!(matches!(error, Error::Impossible { quarantined: 0, .. }), "{error}");
    assert_eq!(checked(&pool).checked_out_bytes, 0);
}

#[test]
fn a_dropped_future_leaves_no_trace() {
    let rig = Rig::stepped();
    let pool = rig.pool(64 << 10);
    let all = pool.checkout(pages(16)).unwrap();
    // Never polled.
    drop(pool.checkout_async(pages(3)));
    // Dropped while waiting, at the head: who comes next is served.
    let (a, b) = (pool.checkout(pages(1)).err(), pool.stats().waiting);
    assert!(matches!(a, Some(Error::Timeout(_))) && b == 0);
    let head = Waiter::new(pool.checkout_async(pages(16)));
    let next = Waiter::new(pool.checkout_async(pages(1)));
    let last = Waiter::new(pool.checkout_async(pages(16)));
    assert_eq!(pool.stats().waiting, 3);
    drop(head);
    assert_eq!(pool.stats().waiting, 2);
    drop(all);
    let next = next.ready().unwrap();
    // Granted and dropped unseen.
    let (mut last, granted) = (last, Waiter::new(pool.checkout_async(pages(2))));
    last.still_waits();
    drop(next);
    assert_eq!((last.rung(), granted.rung()), (1, 0));
    assert_eq!(checked(&pool).checked_out_bytes, 16 * PAGE);
    drop(last);
    assert_eq!(granted.rung(), 1, "what nobody took goes to the next");
    drop(granted);
    let stats = checked(&pool);
    assert_eq!((stats.checked_out_bytes, stats.waiting, stats.requested_bytes), (0, 0, 0));
    assert_eq!(stats.checkouts, stats.returns);
}

#[test]
fn a_waker_is_replaced_by_the_last_one() {
    let rig = Rig::stepped();
    let pool = rig.pool(64 << 10);
    let all = pool.checkout(pages(16)).unwrap();
    let mut future: Pin<Box<Checkout>> = Box::pin(pool.checkout_async(9));
    let bells: Vec<Arc<Bell>> = (0..3).map(|_| Arc::default()).collect();
    for bell in &bells {
        let waker = Waker::from(bell.clone());
        assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    }
    drop(all);
    let rung: Vec<usize> = bells.iter().map(|b| b.0.load(Ordering::Relaxed)).collect();
    assert_eq!(rung, [0, 0, 1]);
    assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
    let again = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(again, Poll::Ready(Err(_))), "polled after it was ready");
}

/// A task's waker may own the task, and the task buffers.
#[test]
fn a_waker_may_own_buffers_of_the_pool() {
    struct Task(Mutex<Option<PinnedBuf>>);
    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.lock().unwrap().take();
        }
    }
    let rig = Rig::stepped();
    let pool = rig.pool(64 << 10);
    let stream = rig.device.stream().unwrap();
    for way in 0..4 {
        let task = Arc::new(Task(Mutex::new(Some(pool.checkout(pages(1)).unwrap()))));
        let waker = Waker::from(task);
        let all = pool.checkout(pages(15)).unwrap();
        let mut future: Pin<Box<Checkout>> = Box::pin(pool.checkout_async(pages(15)));
        assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        drop(waker);
        match way {
            // The queue has the last handle to it, and lets go of it when the future goes,
            0 => drop(future),
            // when another one comes,
            1 => assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()),
            // or when it wakes.
            2 => drop(all),
            _ => {
                // The same for one who waits for a stream.
                drop(future);
                let waker = Waker::from(Arc::new(Task(Mutex::new(Some(all)))));
                let mut sent = Box::pin(stream.hold(pool.checkout(100).unwrap()).unwrap());
                assert!(sent.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
                drop(waker);
                drop(sent);
                drain(&rig);
            }
        }
        assert_eq!(pool.stats().waiting, usize::from(way == 1));
    }
    assert_eq!(checked(&pool).checked_out_bytes, 0);
}

/// Whoever holds it while asking for the next would wait for itself.
#[test]
fn one_small_buffer_does_not_use_up_a_small_pool() {
    let rig = Rig::stepped();
    let pool = rig.pool(256 << 10);
    let first = pool.checkout(5000).unwrap();
    assert!(checked(&pool).free_bytes > 240 << 10);
    let second = pool.try_checkout(10);
    assert!(second.is_ok(), "{second:?} with {:?}", pool.stats());
    drop(first);
}

// --- growing, trimming, reserves -------------------------------------------------------------------------------------

#[test]
fn it_grows_up_to_the_cap_and_is_trimmed() {
    let gone: Arc<Mutex<Vec<RegionInfo>>> = Arc::default();
    let rig = Rig::stepped();
    let told = gone.clone();
    let pool = rig
        .builder(1 << 20)
        .initial(128 << 10)
        .region(256 << 10)
        .extent(128 << 10)
        .before_unpin(move |region| told.lock().unwrap().push(*region))
        .build()
        .unwrap();
    assert_eq!(checked(&pool).pinned_bytes, 128 << 10);
    let mut bufs = Vec::new();
    let mut sizes = vec![128 << 10];
    loop {
        match pool.try_checkout(pages(32)) {
            Ok(buf) => bufs.push(buf),
            Err(error) => break assert!(matches!(error, Error::Exhausted { .. })),
        }
        sizes.push(checked(&pool).pinned_bytes);
    }
    sizes.dedup();
    assert_eq!(sizes, [128, 384, 640, 896, 1024].map(|kib| kib << 10));
    assert_eq!(bufs.len(), 8);
    let regions = pool.regions();
    assert_eq!(regions.iter().map(|r| r.len).sum::<usize>(), 1 << 20);
    for region in &regions {
        assert_eq!((region.base.as_ptr().addr() % (2 << 20), region.pinned), (0, region.len));
    }
    for buf in &bufs {
        let at = buf.as_ptr().addr();
        assert!(
            regions.iter().any(|r| (r.base.as_ptr().addr()..r.base.as_ptr().addr() + r.len).contains(&at)),
            "a buffer lies outside of the regions that are listed"
        );
    }
    // Used regions stay.
    assert_eq!((pool.trim(0), gone.lock().unwrap().len()), (0, 0));
    // Half of a region in use keeps all of it.
    let kept = bufs.swap_remove(1);
    drop(bufs);
    let trimmed = pool.trim(600 << 10);
    let left = checked(&pool).pinned_bytes;
    assert_eq!(left, (1 << 20) - trimmed);
    assert!(trimmed > 0 && left >= 600 << 10, "{trimmed} trimmed");
    pool.trim(0);
    assert_eq!(checked(&pool).pinned_bytes, 256 << 10);
    assert_eq!(rig.node.live(0).pinned_bytes, 256 << 10);
    assert_eq!(gone.lock().unwrap().iter().map(|r| r.len).sum::<usize>(), 768 << 10);
    // It grows again.
    let again: Vec<_> = std::iter::from_fn(|| pool.try_checkout(pages(32)).ok()).collect();
    assert_eq!(again.len(), 7);
    assert_eq!(checked(&pool).pinned_bytes, 1 << 20);
    drop((kept, again, pool));
    // Each region went once, and each was announced.
    let told = gone.lock().unwrap();
    let mut ids: Vec<_> = told.iter().map(|r| r.id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), told.len());
    assert_eq!(told.iter().map(|r| r.len).sum::<usize>(), (1 << 20) + (768 << 10));
    assert!(regions.iter().all(|r| told.contains(r)));
    drop(told);
    rig.all_is_given_back();
}

#[test]
fn trimming_leaves_a_region_alone_that_is_being_pinned() {
    for _ in 0..4 {
        let rig = Rig::threads();
        let pool = rig.builder(32 << 20).initial(32 << 20).extent(512 << 10).pin_threads(1).build().unwrap();
        while pool.pinning().error.is_none() && pool.pinning().ready < 32 << 20 {
            pool.trim(0);
            if pool.pinning().wanted == 0 {
                break;
            }
        }
        pool.wait_pinned(Some(HANG)).unwrap();
        checked(&pool);
        // All that the pool thinks it has is there.
        let mut bufs = Vec::new();
        while let Ok(mut buf) = pool.try_checkout(pages(128)) {
            let full = buf.capacity();
            buf.try_resize(full, 1).unwrap();
            bufs.push(buf);
            pool.wait_pinned(Some(HANG)).unwrap();
        }
        drop(bufs);
        drop(pool);
        rig.all_is_given_back();
    }
}

#[test]
fn growing_that_fails_is_the_waiters_error() {
    let rig = Rig::stepped();
    let pool = rig.builder(256 << 10).initial(32 << 10).region(64 << 10).build().unwrap();
    let fail = || rig.node.fail(Fault { device: 0, call: Call::Pin, nth: 0, failure: Failure::Moment });
    let refused = |error: &Error| matches!(error, Error::Device(e) if e.call == "pin");
    fail();
    let error = pool.checkout(pages(12)).unwrap_err();
    assert!(refused(&error), "{error}");
    assert_eq!(pool.pinning().error.as_ref().map(refused), Some(true));
    fail();
    let error = block_on(pool.checkout_async(pages(12))).unwrap_err();
    assert!(refused(&error), "{error}");
    fail();
    let error = pool.checkout_many(&[pages(8), pages(8)], None).unwrap_err();
    assert!(refused(&error), "each could be had, but not both: {error}");
    // Who can be served by what is there waits for it.
    let all = pool.checkout(pages(8)).unwrap();
    fail();
    let waiter = Waiter::new(pool.checkout_async(pages(8)));
    drop(all);
    drop(waiter.ready().unwrap());
    // The next attempt may succeed.
    drop(pool.checkout(pages(12)).unwrap());
    assert_eq!(pool.pinning().error, None);
    assert_eq!(checked(&pool).waiting, 0);
}

#[test]
fn what_fits_no_region_makes_idle_ones_go() {
    let rig = Rig::stepped();
    let pool = rig.builder(256 << 10).initial(128 << 10).region(128 << 10).build().unwrap();
    // It fits into the capacity, but not into what is left of it, nor into the region that there is while that is used.
    let small = pool.checkout(1).unwrap();
    assert!(matches!(pool.try_checkout(pages(33)), Err(Error::Exhausted { .. })));
    let mut waiting = Waiter::new(pool.checkout_async(pages(33)));
    let next = Waiter::new(pool.checkout_async(pages(1)));
    waiting.still_waits();
    // Idle by now, the region goes for one that is large enough; what came later is behind it.
    drop(small);
    let large = waiting.ready().unwrap();
    assert!(checked(&pool).pinned_bytes <= 256 << 10);
    drop((large, next.ready().unwrap()));
    // Who asks while everything is idle does not wait for it.
    drop(pool.try_checkout(pages(64)).unwrap());
    assert_eq!(checked(&pool).waiting, 0);
}

#[test]
fn what_fits_no_region_waits_on_threads() {
    let rig = Rig::threads();
    let stream = rig.device.stream().unwrap();
    let pool = rig.builder(256 << 10).initial(64 << 10).region(64 << 10).build().unwrap();
    for _ in 0..50 {
        // Every region has something in flight, and is idle only one by one.
        while let Ok(buf) = pool.try_checkout(pages(7)) {
            send(&stream, buf);
        }
        drop(pool.checkout_timeout(pages(40), HANG).unwrap());
        pool.trim(0);
    }
    assert_eq!(checked(&pool).checked_out_bytes, 0);
}

#[test]
fn regions_of_reserves_have_numbers_of_their_own() {
    let rig = Rig::stepped();
    let pool = rig.builder(256 << 10).reserve("a", 64 << 10).reserve("b", 64 << 10).build().unwrap();
    let mut ids: Vec<_> = pool.regions().iter().map(|r| r.id).collect();
    assert_eq!(ids.len(), 3);
    ids.dedup();
    assert_eq!(ids.len(), 3, "{ids:?}");
}

#[test]
fn buffers_that_do_not_fit_together_are_not_waited_for() {
    let rig = Rig::stepped();
    let pool = rig.pool(64 << 10);
    let aligned = |n: usize| pages(n).align(64 << 10);
    // Each alone would fit, but both only at the start.
    let both = [aligned(6), aligned(7)];
    let error = pool.checkout_many(&both, None).unwrap_err();
    assert!(matches!(error, Error::Impossible { .. }), "{error}");
    let error = block_on(pool.checkout_many_async(both)).unwrap_err();
    assert!(matches!(error, Error::Impossible { .. }), "{error}");
    // Known at the latest when all is back; and those behind are served.
    let first = pool.checkout(1).unwrap();
    let waiting = Waiter::new(pool.checkout_many_async(both));
    let next = Waiter::new(pool.checkout_async(pages(16)));
    drop(first);
    assert!(matches!(waiting.ready(), Err(Error::Impossible { .. })));
    drop(next.ready().unwrap());
    assert_eq!(checked(&pool).waiting, 0);
}

#[test]
fn a_reserve_is_for_those_who_name_it() {
    let rig = Rig::stepped();
    let pool = rig.builder(128 << 10).reserve("decode", 32 << 10).reserve("other", 32 << 10).build().unwrap();
    assert_eq!(checked(&pool).pinned_bytes, 128 << 10);
    // As long as the pool proper has something, the reserve stays untouched.
    drop(pool.checkout(pages(16).reserve("decode")).unwrap());
    let early = pool.checkout_async(pages(2).reserve("decode"));
    let all = pool.checkout(pages(16)).unwrap();
    assert!(matches!(pool.try_checkout(1), Err(Error::Exhausted { .. })));
    let reserved = pool.try_checkout(pages(4).reserve("decode")).unwrap();
    assert!(matches!(pool.try_checkout(pages(8).reserve("decode")), Err(Error::Exhausted { .. })));
    // What counts is what is free when it is asked for, not when the future was made.
    let early = block_on(early).unwrap();
    // Waiting for the reserve is no matter of the pool proper, and the other way round.
    let named = Waiter::new(pool.checkout_async(pages(8).reserve("decode")));
    let mut unnamed = Waiter::new(pool.checkout_async(pages(1)));
    drop((early, reserved));
    unnamed.still_waits();
    let named = named.ready().unwrap();
    drop(all);
    drop(unnamed.ready().unwrap());
    drop(pool.checkout(pages(8).reserve("other")).unwrap());
    let stream = rig.device.stream().unwrap();
    let all = pool.checkout(pages(16)).unwrap();
    drop(pool.try_checkout_on(&stream, Request::new(100).reserve("other")).unwrap());
    assert!(matches!(pool.try_checkout_on(&stream, 100), Err(Error::Exhausted { .. })));
    drop((all, named));
    let mixed = [Request::new(1), Request::new(1).reserve("decode")];
    assert!(matches!(pool.checkout_many(&mixed, None), Err(Error::Config(_))));
    let stats = checked(&pool);
    assert_eq!((stats.checkouts, stats.returns, stats.checked_out_bytes), (9, 9, 0), "{stats:?}");
    // A reserve is never trimmed.
    assert_eq!((pool.trim(0), checked(&pool).pinned_bytes), (64 << 10, 64 << 10));
}

#[test]
fn pinning_can_be_asked_about_and_awaited() {
    let rig = Rig::threads();
    for awaited in [false, true] {
        let pool = rig.builder(16 << 20).initial(16 << 20).extent(1 << 20).build().unwrap();
        // It serves from its first extent.
        drop(pool.try_checkout(pages(128)).unwrap());
        let early = pool.pinning();
        assert!(
            early.ready >= 1 << 20 && early.ready <= early.wanted && early.wanted == 16 << 20,
            "{early:?}"
        );
        let done = if awaited { block_on(pool.pinned()) } else { pool.wait_pinned(Some(HANG)).unwrap() };
        assert_eq!((done.ready, done.wanted, &done.error), (16 << 20, 16 << 20, &None));
        assert!(done.busy >= done.longest_call && done.longest_call > Duration::ZERO);
        assert_eq!(checked(&pool).pinned_bytes, 16 << 20);
        assert_eq!(block_on(pool.pinned()), pool.pinning(), "nothing to wait for");
        pool.trim(0);
        let empty = pool.pinning();
        assert_eq!((empty.ready, empty.wanted), (0, 0));
    }
    rig.all_is_given_back();
}

// --- trouble ---------------------------------------------------------------------------------------------------------

#[test]
fn waiting_ends_when_quarantine_has_made_it_impossible() {
    for threads in [false, true] {
        let rig = if threads { Rig::threads() } else { Rig::stepped() };
        let pool = rig.pool(64 << 10);
        let stream = rig.device.stream().unwrap();
        rig.node.hang(0);
        let kept = pool.checkout(pages(6)).unwrap();
        send(&stream, pool.checkout(pages(10)).unwrap());
        let mut possible = Waiter::new(pool.checkout_async(pages(6)));
        let hopeless = [
            Waiter::new(pool.checkout_many_async([pages(7)])),
            Waiter::new(pool.checkout_many_async([pages(3), pages(4)])),
            Waiter::new(pool.checkout_many_async([pages(4), pages(4)])),
        ];
        rig.node.kill(0);
        eventually(
            || {
                rig.device.reap();
                (pool.stats().quarantined_bytes > 0).then_some(())
            },
            || format!("{pool:?}"),
        );
        for waiter in hopeless {
            eventually(|| (waiter.rung() == 1).then_some(()), || "it is not woken".into());
            let error = waiter.ready().unwrap_err();
            assert!(
                matches!(error, Error::Impossible { quarantined, .. } if quarantined == 10 * PAGE),
                "{error}"
            );
        }
        possible.still_waits();
        let error = pool.checkout(pages(7)).unwrap_err();
        assert!(matches!(error, Error::Impossible { .. }), "{error}");
        drop(kept);
        drop(possible.ready().unwrap());
        assert!(stream.synchronize().unwrap_err().is_sticky());
        assert!(rig.device.lost().is_some() && rig.device.stream().is_err());
        let stats = checked(&pool);
        assert_eq!((stats.quarantined_bytes, stats.in_flight_bytes), (10 * PAGE, 0));
        let end = pool.shutdown(HANG);
        assert_eq!((end.drained, end.outstanding, end.quarantined_bytes), (false, 1, 10 * PAGE));
    }
}

#[test]
fn a_stuck_stream_keeps_only_its_own_buffers() {
    for threads in [false, true] {
        let rig = if threads { Rig::threads() } else { Rig::stepped() };
        let pool = rig.pool(64 << 10);
        let (stuck, going) = (rig.device.stream().unwrap(), rig.device.stream().unwrap());
        assert!(rig.node.hang_stream(0, 0));
        send(&stuck, pool.checkout(pages(4)).unwrap());
        let held = Stream::hold_on_all(&[&going, &stuck], pool.checkout(pages(1)).unwrap()).unwrap();
        for _ in 0..50 {
            // Everything that the other stream uses comes round and round.
            send(&going, pool.checkout_timeout(pages(8), HANG).unwrap());
        }
        going.synchronize().unwrap();
        eventually(
            || {
                rig.device.reap();
                (pool.stats().in_flight_bytes == 5 * PAGE).then_some(())
            },
            || format!("{pool:?}"),
        );
        assert!(!held.is_done().unwrap());
        let error = held.wait_timeout(Duration::from_millis(1)).unwrap_err();
        assert!(matches!(error.error, Error::Timeout(_)));
        assert!(rig.node.resume_stream(0, 0));
        drop(error.buffer.unwrap().wait().unwrap());
        stuck.synchronize().unwrap();
        let stats =
            eventually(|| Some(pool.stats()).filter(|s| s.in_flight_bytes == 0), || format!("{pool:?}"));
        assert_eq!((stats.checked_out_bytes, stats.quarantined_bytes), (0, 0));
        checked(&pool);
    }
}

#[test]
fn a_panic_in_the_callers_code_loses_nothing() {
    let rig = Rig::threads();
    let pool = rig.pool(2 << 20);
    let stream = rig.device.stream().unwrap();
    let quietly = std::panic::take_hook();
    std::panic::set_hook(Box::new(|info| {
        if !info.to_string().contains("on purpose") {
            eprintln!("{info}");
        }
    }));
    for _ in 0..20 {
        let caught = catch_unwind(AssertUnwindSafe(|| {
            let mut filled = pool.checkout(1000).unwrap();
            filled.extend_from_slice(&[1; 1000]);
            let shared = Arc::new(filled);
            let memory = rig.device.alloc(1000).unwrap();
            let _sent = stream.upload(shared.clone(), &memory).unwrap();
            let _held = stream.hold(pool.checkout(5000).unwrap()).unwrap();
            let _ready = pool.checkout_on(&stream, 1000).unwrap();
            let _waiting = pool.checkout_async(10);
            let _several = pool.checkout_many(&[Request::new(10), pages(3)], None).unwrap();
            let _landing = stream.download(&memory, pool.checkout(1000).unwrap()).unwrap();
            panic!("on purpose");
        }));
        assert!(caught.is_err());
        // A panic of a thread that holds a shard.
        let thread = std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    let _buf = (pool.checkout(100).unwrap(), pool.checkout(100).unwrap());
                    panic!("on purpose");
                })
                .join()
        });
        assert!(thread.is_err());
    }
    std::panic::set_hook(quietly);
    stream.synchronize().unwrap();
    let stats =
        eventually(|| Some(pool.stats()).filter(|s| s.checkouts == s.returns), || format!("{pool:?}"));
    assert_eq!((stats.in_flight_bytes, stats.checked_out_bytes, stats.quarantined_bytes), (0, 0, 0));
    checked(&pool);
    drop((stream, pool));
    rig.all_is_given_back();
}

#[test]
fn a_panic_in_a_callback_loses_nothing() {
    struct Bomb;
    impl Wake for Bomb {
        fn wake(self: Arc<Self>) {
            panic!("on purpose, in a waker");
        }
    }
    let rig = Rig::threads();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let pool = rig
        .builder(128 << 10)
        .before_unpin(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
            panic!("on purpose, before unpinning");
        })
        .build()
        .unwrap();
    let stream = rig.device.stream().unwrap();
    let bomb = Waker::from(Arc::new(Bomb));
    let mut cx = Context::from_waker(&bomb);
    // Woken by the reaper, which has others to wake and to bring back.
    rig.node.hang(0);
    let mut sent = Box::pin(stream.hold(pool.checkout(pages(30)).unwrap()).unwrap());
    assert!(sent.as_mut().poll(&mut cx).is_pending());
    let mut waiting: Pin<Box<Checkout>> = Box::pin(pool.checkout_async(pages(3)));
    assert!(waiting.as_mut().poll(&mut cx).is_pending());
    rig.node.resume(0);
    let landed = eventually(
        || match sent.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(buf) => Some(buf.unwrap()),
            Poll::Pending => None,
        },
        || format!("{pool:?}"),
    );
    drop(landed);
    let granted = block_on(waiting).unwrap();
    // And the reaper still works.
    send(&stream, granted);
    drop(pool.checkout_timeout(pages(32), HANG).unwrap());
    assert_eq!(checked(&pool).checked_out_bytes, 0);
    drop((stream, pool, sent));
    rig.all_is_given_back();
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

#[test]
fn buffers_outlive_their_pool() {
    for threads in [false, true] {
        let rig = if threads { Rig::threads() } else { Rig::stepped() };
        let stream = rig.device.stream().unwrap();
        let memory = rig.device.alloc(4096).unwrap();
        let pool = rig.builder(1 << 20).reserve("more", 64 << 10).build().unwrap();
        let hog = pool.checkout(pages(240)).unwrap();
        let more = pool.checkout(pages(16).reserve("more")).unwrap();
        drop(hog);
        let mut out = pool.checkout(4096).unwrap();
        let reserved = pool.checkout(4096).unwrap();
        let ready = pool.checkout_on(&stream, 1000).unwrap();
        let mut sent = pool.checkout(4096).unwrap();
        sent.extend_from_slice(&[6; 4096]);
        let sent = stream.upload(sent, &memory).unwrap();
        send(&stream, pool.checkout(1000).unwrap());
        // Somebody still waits when the last handle goes: not for ever.
        let waiting = pool.clone().checkout_async(10);
        drop(pool);
        drop(waiting);
        assert!(rig.node.live(0).pinned_bytes == 1 << 20);
        // All of it works on.
        out.extend_from_slice(&[8; 4096]);
        drop(sent.wait().unwrap());
        let back = stream.download(&memory, reserved).unwrap().wait().unwrap();
        assert!(*back == [6; 4096] && *out == [8; 4096]);
        let out = stream.upload(out, &memory).unwrap().wait().unwrap();
        stream.synchronize().unwrap();
        drop((out, more, back, ready, memory, stream));
        rig.all_is_given_back();
    }
}

#[test]
fn shutting_down_ends_all_waits() {
    for threads in [false, true] {
        let rig = if threads { Rig::threads() } else { Rig::stepped() };
        let pool = rig.builder(128 << 10).reserve("more", 64 << 10).build().unwrap();
        let stream = rig.device.stream().unwrap();
        let all = [pool.checkout(pages(16)).unwrap(), pool.checkout(pages(16).reserve("more")).unwrap()];
        let one = Waiter::new(pool.checkout_async(1));
        let named = Waiter::new(pool.checkout_many_async([Request::new(1).reserve("more")]));
        std::thread::scope(|scope| {
            let parked = threads.then(|| scope.spawn(|| pool.checkout(7)));
            if threads {
                eventually(|| (pool.stats().waiting == 3).then_some(()), || format!("{pool:?}"));
            }
            let end = pool.shutdown(Duration::ZERO);
            assert_eq!((end.drained, end.outstanding, end.quarantined_bytes), (false, 2, 0));
            if let Some(parked) = parked {
                assert!(matches!(parked.join().unwrap(), Err(Error::Closed)));
            }
        });
        assert!(matches!(one.ready(), Err(Error::Closed)));
        assert!(matches!(named.ready(), Err(Error::Closed)));
        assert!(matches!(pool.checkout(1), Err(Error::Closed)));
        assert!(matches!(block_on(pool.checkout_async(1)), Err(Error::Closed)));
        let [a, b] = all;
        drop(a);
        send(&stream, b);
        let end = pool.shutdown(HANG);
        assert_eq!((end.drained, end.outstanding), (true, 0));
        assert_eq!(checked(&pool).free_bytes, 128 << 10);
        drop((pool, stream));
        rig.all_is_given_back();
    }
}

/// Memory that is on its way to the pool proper is for those who wait for a reserve as well, however they wait.
#[test]
fn who_waits_for_a_reserve_gets_what_the_pool_grows_by() {
    let rig = Rig::threads();
    let urgent = || Request::new(60 << 10).reserve("urgent");
    for how in 0..2 {
        let builder = rig.builder(128 << 10).region(64 << 10).initial(0).reserve("urgent", 64 << 10);
        let pool = builder.build().unwrap();
        // The reserve's, since there is nothing else yet; or from the first region, and then the reserve is left.
        let held = pool.checkout_timeout(urgent(), HANG).unwrap();
        let got = match how {
            0 => pool.checkout_timeout(urgent(), HANG),
            _ => block_on(pool.checkout_async(urgent())),
        };
        assert!(got.is_ok(), "{how}: {got:?}, {:?}", pool.stats());
        assert_eq!(checked(&pool).waiting, 0);
        drop(held);
    }
}
