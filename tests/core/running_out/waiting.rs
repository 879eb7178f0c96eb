//! Requests when nothing is left: refusals, deadlines, their order, and futures that are dropped or woken.

use super::*;

#[test]
fn it_fails_at_once_if_told_so() {
    let rig = Rig::by_hand();
    let pool = rig.pool(64 << 10);
    let all = pool.checkout(pages(16)).unwrap();
    for _ in 0..3 {
        let error = pool.try_checkout(100).unwrap_err();
        let Error::Exhausted(shortage) = &error else { panic!("{error}") };
        assert_eq!((shortage.requested, shortage.capacity, &shortage.growth), (100, 64 << 10, &None));
        assert!(error.is_retryable());
    }
    let stats = checked(&pool);
    assert_eq!((stats.waits, stats.waiting, stats.checkouts), (0, 0, 1));
    drop(all);
    drop(pool.try_checkout(100).unwrap());
}

/// A timeout says how long it waited and what there was; a wait that is given up is no timeout.
#[test]
fn a_deadline_leaves_no_trace() {
    let rig = Rig::threads();
    let pool = rig.pool(64 << 10);
    let all = pool.checkout(pages(16)).unwrap();
    let timeout = Duration::from_millis(20);
    let ways: [&dyn Fn() -> Error; 2] = [&|| pool.checkout_timeout(100, timeout).unwrap_err(), &|| {
        block_on(pool.checkout_async(100).timeout(timeout)).unwrap_err()
    }];
    for way in ways {
        let since = Instant::now();
        let error = way();
        let Error::Timeout(waited) = &error else { panic!("{error}") };
        assert!(timeout <= waited.time && waited.time <= since.elapsed(), "{timeout:?} {waited:?}");
        let shortage = waited.shortage.as_ref().unwrap();
        assert_eq!((shortage.requested, shortage.free, shortage.pool.as_str()), (100, 0, pool.name()));
    }
    let both = [pages(1), pages(2)];
    let error = pool.checkout_many(&both, Some(Duration::ZERO)).unwrap_err();
    assert!(matches!(error, Error::Timeout(_)), "{error}");
    let error = block_on(pool.checkout_many_async(both).timeout(Duration::ZERO)).unwrap_err();
    assert!(matches!(error, Error::Timeout(_)), "{error}");
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
                // Returned by way of a stream.
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
fn by_hand_the_waiter_moves_the_device() {
    let rig = Rig::by_hand();
    let pool = rig.pool(64 << 10);
    let stream = rig.device.stream().unwrap();
    send(&stream, pool.checkout(pages(16)).unwrap());
    assert!(matches!(pool.try_checkout(9), Err(Error::Exhausted(_))));
    drop(pool.checkout(9).unwrap());
    // Nothing can come back: no other thread steps the device, so waiting ends.
    let all = pool.checkout(pages(16)).unwrap();
    assert!(matches!(pool.checkout(9), Err(Error::Timeout(_))));
    drop(all);
    assert_eq!(checked(&pool).waiting, 0);
}

#[test]
fn nonsense_is_refused_in_every_call() {
    let rig = Rig::by_hand();
    let pool = rig.pool(64 << 10);
    for _ in 0..2 {
        assert!(matches!(pool.checkout(0), Err(Error::ZeroLength)));
        for len in [2 << 20, usize::MAX / 2, usize::MAX] {
            let error = pool.checkout(len).unwrap_err();
            assert!(matches!(error, Error::TooLong { largest, .. } if largest <= 64 << 10), "{len}: {error}");
        }
        assert!(matches!(
            pool.checkout(Request::new(1).align(3)),
            Err(Error::Argument(text)) if text.contains("no alignment")
        ));
        let asked = [Request::new(1), Request::new(0)];
        assert!(matches!(pool.checkout_many(&asked, None), Err(Error::ZeroLength)));
        assert!(matches!(block_on(pool.checkout_many_async(asked)), Err(Error::ZeroLength)));
    }
    assert!(pool.checkout_many(&[], None).unwrap().is_empty());
    assert_eq!(checked(&pool).checkouts, 0);
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

#[test]
fn first_come_first_served() {
    let rig = Rig::by_hand();
    let pool = rig.pool(64 << 10);
    let (a, b) = (pool.checkout(pages(8)).unwrap(), pool.checkout(pages(8)).unwrap());
    let first = Waiter::new(pool.checkout_async(pages(6)));
    let mut second = Waiter::new(pool.checkout_async(pages(8)));
    let third = Waiter::new(pool.checkout_async(pages(2)));
    assert_eq!(pool.stats().waiting, 3);
    drop(a);
    // The third fits beside the first, and needs nothing that the second waits for.
    let (first, third) = (first.ready().unwrap(), third.ready().unwrap());
    second.still_waits();
    // Nor may a new request take what the second waits for.
    drop(first);
    drop(b);
    let second = second.ready().unwrap();
    drop((second, third));
    let stats = checked(&pool);
    assert_eq!((stats.waiting, stats.waits, stats.checked_out_bytes), (0, 3, 0));
}

#[test]
fn what_waits_in_order_is_not_passed() {
    let rig = Rig::by_hand();
    let pool = rig.pool(64 << 10);
    let (a, b) = (pool.checkout(pages(8)).unwrap(), pool.checkout(pages(8)).unwrap());
    let mut all = Waiter::new(pool.checkout_async(pages(16)));
    let mut second = Waiter::new(pool.checkout_async(pages(2)));
    drop(a);
    all.still_waits();
    second.still_waits();
    assert!(matches!(pool.try_checkout(pages(1)), Err(Error::Exhausted(_))));
    drop(b);
    drop(all.ready().unwrap());
    drop(second.ready().unwrap());
    assert_eq!(checked(&pool).waiting, 0);
}

#[test]
fn what_the_head_could_use_is_not_given_past_it() {
    let rig = Rig::by_hand();
    let pool = rig.pool(64 << 10);
    let all = pool.checkout(pages(16)).unwrap();
    let one = Waiter::new(pool.checkout_async(32));
    // The same class, but several at once: not served before as many are free.
    let several = Waiter::new(pool.checkout_many_async([Request::new(32); 3]));
    let last = Waiter::new(pool.checkout_async(32));
    drop(all);
    drop((one.ready().unwrap(), several.ready().unwrap(), last.ready().unwrap()));
    assert_eq!(checked(&pool).checked_out_bytes, 0);
}

#[test]
fn several_buffers_come_together_or_not_at_all() {
    let rig = Rig::by_hand();
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
    // More than the pool can ever have.
    let error = pool.checkout_many(&[pages(8), pages(9)], None).unwrap_err();
    assert!(matches!(error, Error::Impossible { quarantined: 0, .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("capacity of 64 KiB;") && !text.contains("quarantined"), "{text}");
    assert_eq!(checked(&pool).checked_out_bytes, 0);
}

#[test]
fn a_dropped_future_leaves_no_trace() {
    let rig = Rig::by_hand();
    let pool = rig.pool(64 << 10);
    let all = pool.checkout(pages(16)).unwrap();
    // Never polled.
    drop(pool.checkout_async(pages(3)));
    // Dropped while waiting, at the head: the next request is served.
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
    // Granted, and dropped before it was polled.
    let (mut last, granted) = (last, Waiter::new(pool.checkout_async(pages(2))));
    last.still_waits();
    drop(next);
    assert_eq!((last.rung(), granted.rung()), (1, 0));
    assert_eq!(checked(&pool).checked_out_bytes, 16 * PAGE);
    drop(last);
    assert_eq!(granted.rung(), 1, "what was not taken goes to the next");
    drop(granted);
    let stats = checked(&pool);
    assert_eq!((stats.checked_out_bytes, stats.waiting, stats.requested_bytes), (0, 0, 0));
    assert_eq!(stats.checkouts, stats.returns);
}

#[test]
fn a_waker_is_replaced_by_the_last_one() {
    let rig = Rig::by_hand();
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

/// The last deadline that a future was given counts, and the task that polled last is woken at it.
#[test]
fn a_deadline_that_is_changed_wakes_the_task() {
    let rig = Rig::threads();
    let pool = rig.pool(64 << 10);
    let all = pool.checkout(pages(16)).unwrap();
    let [short, longer] = [5, 60].map(Duration::from_millis);
    for (first, then) in [(short, longer), (2 * HANG, longer), (longer, short), (Duration::MAX, short)] {
        let mut waiting = Box::pin(pool.checkout_async(1).timeout(first));
        let bell = Waker::from(Arc::<Bell>::default());
        assert!(waiting.as_mut().poll(&mut Context::from_waker(&bell)).is_pending());
        let since = Instant::now();
        let error = block_on(Pin::into_inner(waiting).timeout(then)).unwrap_err();
        assert!(
            matches!(error, Error::Timeout(_)) && since.elapsed() >= then,
            "{first:?}, {then:?}: {error}"
        );
    }
    drop(all);
    assert_eq!(checked(&pool).timeouts, 4);
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
    assert_eq!((stats.waits, stats.timeouts, stats.refused.queue_full, stats.errors.transient), (2, 0, 5, 5));
    // A place that gets free is the next one's.
    drop(first);
    let third = Waiter::new(pool.checkout_async(pages(1)));
    drop(all);
    drop((second.ready().unwrap(), third.ready().unwrap()));
    // What is free needs no place.
    drop(pool.checkout(pages(16)).unwrap());

    let pool = rig.builder(64 << 10).max_waiting(0).build().unwrap();
    let all = pool.checkout(pages(16)).unwrap();
    assert!(matches!(pool.checkout(1), Err(Error::QueueFull { limit: 0 })));
    drop(all);
    drop(pool.checkout(1).unwrap());
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

#[test]
fn refused_checkouts_are_counted_by_reason() {
    let rig = Rig::threads();
    let pool = rig.builder(64 << 10).max_waiting(0).build().unwrap();
    let all = pool.checkout(pages(16)).unwrap();
    assert!(pool.try_checkout(1).is_err() && pool.try_checkout(1).is_err());
    assert!(pool.checkout(1).is_err());
    assert!(pool.checkout_many(&[pages(9), pages(9)], None).is_err());
    assert!(pool.checkout(0).is_err(), "a wrong argument is no refusal");
    drop(all);
    let _ = pool.shutdown(HANG);
    assert!(pool.checkout(1).is_err());
    let refused = pool.stats().refused;
    assert_eq!(refused.by_reason(), [("exhausted", 2), ("queue_full", 1), ("impossible", 1), ("closed", 1)]);
    assert_eq!((refused.total(), pool.stats().errors.total()), (5, 6));
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
    let rig = Rig::by_hand();
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
            // The queue has the last handle to the waker, and drops it when the future is dropped,
            0 => drop(future),
            // when another waker replaces it,
            1 => assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()),
            // or when it is woken.
            2 => drop(all),
            _ => {
                // The same for a future that waits for a stream.
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

/// Otherwise a thread that asks for a second buffer while it holds the first would wait for itself.
#[test]
fn one_small_buffer_does_not_use_up_a_small_pool() {
    let rig = Rig::by_hand();
    let pool = rig.pool(256 << 10);
    let first = pool.checkout(5000).unwrap();
    assert!(checked(&pool).free_bytes > 240 << 10);
    let second = pool.try_checkout(10);
    assert!(second.is_ok(), "{second:?} with {:?}", pool.stats());
    drop(first);
}

/// A segment that is in flight on a stream and about to return is for a waiter, not for the next request on the same
/// stream.
#[test]
fn a_claim_does_not_pass_a_waiter() {
    let rig = Rig::by_hand();
    let pool = rig.pool(64 << 10);
    let (stream, memory) = (rig.device.stream().unwrap(), rig.device.alloc(50_000).unwrap());
    let landing = pool.checkout_on(&stream, 50_000).unwrap();
    drop(stream.download(&memory, landing).unwrap());
    // Without a waiter it is claimed where it is, again and again.
    for _ in 0..3 {
        let landing = pool.try_checkout_on(&stream, 50_000).unwrap();
        assert_eq!(checked(&pool).claimed_bytes, checked(&pool).in_flight_bytes);
        drop(stream.download(&memory, landing).unwrap());
    }
    let mut waiter = Waiter::new(pool.checkout_async(50_000));
    let refused = pool.try_checkout_on(&stream, 50_000);
    assert!(matches!(refused, Err(Error::Exhausted(_))), "{refused:?}");
    waiter.still_waits();
    drain(&rig);
    drop(waiter.ready().unwrap());
    // Without a waiter claims go on.
    drop(stream.download(&memory, pool.checkout_on(&stream, 50_000).unwrap()).unwrap());
    drop(pool.try_checkout_on(&stream, 50_000).unwrap());
    drain(&rig);
    assert_eq!(checked(&pool).waits, 1);
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
        eventually(|| (pool.pinning().wanted == 4 * MIB).then_some(()), || format!("{:?}", pool.pinning()));
        held.extend(std::iter::from_fn(|| pool.try_checkout(LEN).ok()));
        let waiter = Waiter::new(pool.checkout_async(LEN));
        held.truncate(held.len() - 16);
        eventually(|| (waiter.rung() > 0).then_some(()), || format!("{:?}", checked(&pool)));
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
