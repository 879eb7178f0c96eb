//! Requests when nothing is left: refusals, deadlines, their order, and futures that are dropped or woken.

use super::*;
use crate::{builder, host};

/// A timeout says how long it waited and what there was; a wait that is given up is no timeout.
#[test]
fn a_deadline_leaves_no_trace() {
    let rig = Rig::threads();
    let pool = rig.pool(64 << 10);
    let all = pool.checkout(pages(16)).unwrap();
    let (timeout, both) = (Duration::from_millis(20), [pages(1), pages(2)]);
    let since = Instant::now();
    for (error, requested) in [
        (pool.checkout_timeout(100, timeout).unwrap_err(), 100),
        (block_on(pool.checkout_async(100).timeout(timeout)).unwrap_err(), 100),
        (pool.checkout_many(&both, Some(timeout)).unwrap_err(), 3 * PAGE - 64),
        (block_on(pool.checkout_many_async(both).timeout(timeout)).unwrap_err(), 3 * PAGE - 64),
    ] {
        let Error::Timeout(waited) = &error else { panic!("{error}") };
        assert!(timeout <= waited.time && waited.time <= since.elapsed(), "{timeout:?} {waited:?}");
        let shortage = waited.shortage.as_ref().unwrap();
        assert_eq!((shortage.requested, shortage.free, shortage.pool.as_str()), (requested, 0, pool.name()));
    }
    // A future that is dropped while it waits is abandoned, and one that never waited is not.
    drop(Waiter::new(pool.checkout_async(1)));
    drop(Waiter::new(pool.checkout_many_async(both)));
    drop(Waiter::new(pool.checkout_async(100).timeout(HANG)));
    drop(pool.checkout_async(1));
    drop(pool.checkout_async(100).timeout(HANG));
    let served = Waiter::new(pool.checkout_async(pages(1)));
    let stats = checked(&pool);
    assert_eq!((stats.waits, stats.timeouts, stats.abandoned, stats.waiting), (8, 4, 3, 1));
    drop(all);
    drop(served);
    let stats = checked(&pool);
    assert_eq!((stats.waits, stats.timeouts, stats.abandoned, stats.waiting), (8, 4, 3, 0));
    assert_eq!(stats.checked_out_bytes, 0);
    drop(pool.try_checkout(pages(16)).unwrap());
    assert_eq!(block_on(pool.checkout_async(100).timeout(timeout)).unwrap().capacity(), 100);
}

/// Whatever fits into an extent can be had, also where the segments of its size class are longer than that.
#[test]
fn the_longest_request_is_an_extent() {
    let rig = Rig::by_hand();
    // 278 pages: a request for 1,095,520 bytes has a class of 1,179,712.
    for (extent, lens) in [
        (8 * PAGE, vec![]),
        (16 * PAGE, vec![16 * PAGE - 33, 15 * PAGE, 14 * PAGE]),
        (278 * PAGE, vec![1_095_520]),
    ] {
        let builder = rig.builder(8 * extent).extent(extent).region(extent).initial(0);
        let pool = builder.build().unwrap();
        let largest = extent - 32;
        for len in lens.into_iter().chain([largest]) {
            let buf = pool.try_checkout(len).unwrap_or_else(|e| panic!("{len}: {e}"));
            assert_eq!((buf.capacity(), checked(&pool).pinned_bytes), (len, extent));
        }
        let bufs: Vec<_> = (0..8).map(|_| pool.checkout(largest).unwrap()).collect();
        assert_eq!(checked(&pool).pinned_bytes, 8 * extent);
        drop(bufs);
        let refused = Error::TooLong { len: largest + 1, largest };
        assert_eq!(pool.checkout(largest + 1).unwrap_err(), refused);
        assert_eq!(pool.try_checkout(largest + 1).unwrap_err(), refused);
        drop(pool.checkout(Request::new(largest).align(PAGE)).unwrap());
    }
}

/// Many requests together can ask for more bytes than there are addresses.
#[test]
fn a_sum_beyond_all_numbers_is_impossible() {
    let pool = builder(&host().1, usize::MAX).extent(usize::MAX).region(64 << 10).build().unwrap();
    // The longest that an extent can have, so often that the sum wraps around.
    let many = vec![Request::new((1 << 42) - 4096 - 32); (1 << 22) + 2];
    let error = pool.checkout_many(&many, Some(HANG)).unwrap_err();
    assert!(matches!(error, Error::Impossible { .. }), "{error}");
}

/// The last deadline that a future was given counts, and the task that polled last is woken at it.
#[test]
fn a_deadline_that_is_changed_wakes_the_task() {
    let rig = Rig::threads();
    let pool = rig.pool(64 << 10);
    let all = pool.checkout(pages(16)).unwrap();
    let [short, longer] = [5, 60].map(Duration::from_millis);
    for (first, then) in [(short, longer), (2 * HANG, longer), (longer, short), (Duration::MAX, short)] {
        let bell = Waker::from(Arc::<Bell>::default());
        // Until one waits: on a busy machine a short deadline is over by the first poll.
        let waiting = loop {
            let mut waiting = Box::pin(pool.checkout_async(1).timeout(first));
            if waiting.as_mut().poll(&mut Context::from_waker(&bell)).is_pending() {
                break waiting;
            }
        };
        let since = Instant::now();
        let error = block_on(Pin::into_inner(waiting).timeout(then)).unwrap_err();
        assert!(
            matches!(error, Error::Timeout(_)) && since.elapsed() >= then,
            "{first:?}, {then:?}: {error}"
        );
    }
    drop(all);
    assert!(checked(&pool).timeouts >= 4);
}

/// A task that waits is polled by whoever joins it with others, any number of times.
#[test]
fn a_deadline_wakes_the_task_that_polled_last_and_keeps_no_other() {
    let rig = Rig::threads();
    let pool = rig.pool(64 << 10);
    let all = pool.checkout(pages(16)).unwrap();
    let bells = [(); 2].map(|()| Arc::<Bell>::default());
    let timeout = Duration::from_millis(300);
    let until = Instant::now() + timeout;
    let mut waiting = Box::pin(pool.checkout_async(1).timeout(timeout));
    for bell in &bells {
        for _ in 0..100 {
            let is_pending =
                waiting.as_mut().poll(&mut Context::from_waker(&bell.clone().into())).is_pending();
            assert!(is_pending || Instant::now() >= until);
        }
    }
    let kept = bells.each_ref().map(Arc::strong_count);
    if Instant::now() < until {
        // One for the queue and one for the deadline, and that of this test.
        assert_eq!(kept, [1, 3]);
        while bells[1].0.load(Ordering::Relaxed) == 0 {
            assert!(until.elapsed() < HANG, "it sleeps on");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(Instant::now() >= until && bells[0].0.load(Ordering::Relaxed) == 0);
    }
    drop(waiting);
    // The timer's thread may be behind its wake still.
    while bells.iter().any(|bell| Arc::strong_count(bell) > 1) {
        assert!(until.elapsed() < HANG, "a dropped request keeps a task");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(all);
}

#[test]
fn a_bounded_queue_refuses_who_would_be_one_more() {
    let rig = Rig::threads();
    let pool = rig.builder(64 << 10).max_waiting(2).build().unwrap();
    let all = pool.checkout(pages(16)).unwrap();
    let first = Waiter::new(pool.checkout_async(pages(1)));
    let second = Waiter::new(pool.checkout_many_async([pages(1), pages(2)]));
    let stream = rig.device.stream().unwrap();
    let ways: [&dyn Fn() -> Result<(), Error>; 5] = [
        &|| pool.checkout(1).map(drop),
        &|| pool.checkout_timeout(1, HANG).map(drop),
        &|| pool.checkout_many(&[Request::new(1); 2], None).map(drop),
        &|| pool.checkout_on(&stream, 1).map(drop),
        &|| block_on(pool.checkout_async(1)).map(drop),
    ];
    for way in ways {
        let error = way().unwrap_err();
        assert!(matches!(error, Error::QueueFull { limit: 2 }) && error.is_retryable(), "{error}");
        assert!(error.to_string().contains("max_waiting"), "{error}");
    }
    let stats = checked(&pool);
    assert_eq!((stats.waits, stats.timeouts, stats.queue_full, stats.errors.transient), (2, 0, 5, 5));
    // A place that gets free is the next one's.
    drop(first);
    let third = Waiter::new(pool.checkout_async(pages(1)));
    drop(all);
    drop((second.ready().unwrap(), third.ready().unwrap()));
    // What is free needs no place.
    drop(pool.checkout(pages(16)).unwrap());

    // All refusals are counted by their reasons.
    let pool = rig.builder(64 << 10).max_waiting(0).build().unwrap();
    let all = pool.checkout(pages(16)).unwrap();
    assert!(pool.try_checkout(1).is_err() && pool.try_checkout(1).is_err());
    assert!(matches!(pool.checkout(1), Err(Error::QueueFull { limit: 0 })));
    assert!(pool.checkout_many(&[pages(9), pages(9)], None).is_err());
    assert!(pool.checkout(0).is_err(), "a wrong argument is no refusal");
    drop(all);
    drop(pool.checkout(1).unwrap());
    let _ = pool.shutdown(HANG);
    assert!(pool.checkout(1).is_err());
    let stats = pool.stats();
    assert_eq!((stats.exhausted, stats.queue_full, stats.impossible, stats.errors.closed), (2, 1, 1, 1));
    assert_eq!(stats.errors.total(), 6);
}

#[test]
fn a_bounded_queue_is_exact_however_many_come_at_once() {
    const THREADS: usize = 12;
    const MOST: usize = 5;
    let rig = Rig::threads();
    let pool = rig.builder(64 << 10).max_waiting(MOST).build().unwrap();
    let together = Barrier::new(THREADS);
    for _ in 0..20 {
        let all = Mutex::new(pool.checkout(pages(16)).ok());
        let refused = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    together.wait();
                    match pool.checkout_timeout(100, HANG) {
                        Ok(buf) => drop(buf),
                        Err(Error::QueueFull { limit: MOST }) => {
                            // The last one that is refused lets the others go on.
                            if refused.fetch_add(1, Ordering::Relaxed) + 1 == THREADS - MOST {
                                drop(all.lock().unwrap().take());
                            }
                        }
                        Err(error) => panic!("{error}"),
                    }
                });
            }
        });
        assert_eq!(refused.into_inner(), THREADS - MOST);
    }
    assert_eq!((checked(&pool).waiting, checked(&pool).timeouts), (0, 0));
}

/// A task's waker may own the task, and the task buffers.
#[test]
fn a_waker_may_own_buffers_of_the_pool() {
    let owner = |buf: PinnedBuf| {
        let owned = Mutex::new(Some(buf));
        waker(move || drop(owned.lock().unwrap().take()))
    };
    let rig = Rig::by_hand();
    let pool = rig.pool(64 << 10);
    let stream = rig.device.stream().unwrap();
    for way in 0..4 {
        let waker = owner(pool.checkout(pages(1)).unwrap());
        let all = pool.checkout(pages(15)).unwrap();
        let mut future: Pin<Box<Checkout>> = Box::pin(pool.checkout_async(pages(15)));
        assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        drop(waker);
        match way {
            // The queue has the last handle to the waker, and drops it when the future is dropped,
            0 => drop(future),
            // when another waker replaces it,
            1 => assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()),
            // or when it is woken.
            2 => drop(all),
            _ => {
                // The same for a future that waits for a stream.
                drop(future);
                let waker = owner(all);
                let mut sent = Box::pin(stream.hold(pool.checkout(100).unwrap()).unwrap());
                assert!(sent.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
                drop(waker);
                drop(sent);
                rig.drain();
            }
        }
        assert_eq!(pool.stats().waiting, usize::from(way == 1));
    }
    assert_eq!(checked(&pool).checked_out_bytes, 0);
}

/// Wakers that poll their task at once, where they are called: each serves the next. By a loop, so
/// any number of them.
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
    const TASKS: usize = 5_000;
    let rig = Rig::threads();
    let (pool, served) = (rig.pool(64 << 10), Arc::new(AtomicUsize::new(0)));
    let first = pool.checkout(pages(16)).unwrap();
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| Arc::new(Task(Mutex::new(Some(pool.checkout_async(pages(16)))), served.clone())))
        .collect();
    tasks.iter().for_each(|task| task.clone().run());
    assert_eq!(pool.stats().waiting, TASKS);
    // A stack for a few hundred frames of the crate.
    let thread = std::thread::Builder::new().stack_size(256 << 10);
    thread.spawn(move || drop(first)).unwrap().join().unwrap();
    until(|| served.load(Ordering::Relaxed) == TASKS, || format!("{pool:?}"));
    assert_eq!(checked(&pool).waiting, 0);
}

/// Adopted memory counts as being pinned from the call on, and a callback may keep the thread that pins for long.
#[test]
fn what_comes_back_serves_a_waiter_however_long_other_memory_is_being_pinned() {
    const LEN: usize = 8000;
    const MIB: usize = 1 << 20;
    for is_behind_another in [false, true] {
        let rig = Rig::threads();
        let (go, may_go) = std::sync::mpsc::channel::<()>();
        let may_go = Mutex::new(may_go);
        let before_unpin = move |_: &RegionInfo| may_go.lock().unwrap().recv().unwrap_or_default();
        let other = rig.builder(MIB).initial(MIB).before_unpin(before_unpin).build().unwrap();
        // The room is for what is adopted.
        let builder = rig.builder(4 * MIB).initial(3 * MIB).region(3 * MIB).thread_cache(MIB);
        let pool = builder.build().unwrap();
        pool.wait_pinned(Some(HANG)).unwrap();
        other.wait_pinned(Some(HANG)).unwrap();
        let mut held = Vec::new();
        while pool.stats().free_bytes > 64 << 10 {
            held.push(pool.checkout(LEN).unwrap());
        }
        let first = is_behind_another.then(|| Waiter::new(pool.checkout_async(3 * MIB / 2)));
        other.trim(0);
        let adopts = {
            let pool = pool.clone();
            std::thread::spawn(move || pool.adopt(vec![0_u8; MIB + PAGE - 1]).is_ok())
        };
        until(|| pool.pinning().wanted == 4 * MIB, || format!("{:?}", pool.pinning()));
        held.extend(std::iter::from_fn(|| pool.try_checkout(LEN).ok()));
        let waiter = Waiter::new(pool.checkout_async(LEN));
        held.truncate(held.len() - 16);
        until(|| waiter.rung() > 0, || format!("{:?}", checked(&pool)));
        drop(waiter.ready().unwrap());
        assert!(!adopts.is_finished());
        go.send(()).unwrap();
        assert!(adopts.join().unwrap());
        drop(held);
        if let Some(first) = first {
            drop(first.ready().unwrap());
        }
        drop((pool, other));
        rig.all_is_given_back();
    }
}
