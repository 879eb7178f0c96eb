//! The pool gets larger and smaller again: growing, trimming, and when pinning is done.

use super::*;

/// Threads that miss while a region is being pinned do not each have another one pinned.
#[test]
fn one_region_is_pinned_for_all_that_it_serves() {
    const THREADS: usize = 8;
    let rig = Rig::threads();
    let pool = rig.builder(1 << 30).initial(0).region(16 << 20).extent(16 << 20).build().unwrap();
    let together = Barrier::new(THREADS);
    let misses_at_once = |len: usize, more: u64| {
        let before = pool.stats().growths;
        let held: Vec<_> = std::thread::scope(|scope| {
            let checkout = || {
                together.wait();
                pool.checkout_timeout(len, HANG).unwrap()
            };
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(checkout)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(pool.stats().growths - before, more);
        held
    };
    // Half of a region, and then what needs two more.
    let first = misses_at_once(1 << 20, 1);
    let second = misses_at_once(5 << 20, 3);
    assert_eq!(checked(&pool).pinned_bytes, 64 << 20);
    drop((first, second, pool));
    rig.all_is_given_back();
}

#[test]
fn growing_that_fails_is_the_waiters_error() {
    let rig = Rig::by_hand();
    let pool = rig.builder(256 << 10).initial(32 << 10).region(64 << 10).build().unwrap();
    let fail = || rig.refuse_pins(1);
    let refused = |error: &Error| matches!(error, Error::Device(e) if e.call == "cuMemHostRegister");
    // The growth of a region, and that of what is needed; from then on growths are no longer than that.
    rig.refuse_pins(2);
    let error = pool.checkout(pages(12)).unwrap_err();
    assert!(refused(&error), "{error}");
    assert_eq!(pool.pinning().error.as_ref().map(refused), Some(true));
    fail();
    let error = block_on(pool.checkout_async(pages(12))).unwrap_err();
    assert!(refused(&error), "{error}");
    fail();
    let error = pool.checkout_many(&[pages(8), pages(8)], None).unwrap_err();
    assert!(refused(&error), "each could be had, but not both: {error}");
    // A request that the existing memory can serve waits for it.
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
fn buffers_that_do_not_fit_together_are_not_waited_for() {
    let rig = Rig::by_hand();
    let pool = rig.pool(64 << 10);
    let aligned = |n: usize| pages(n).align(64 << 10);
    // Each alone would fit, but both only at the start.
    let both = [aligned(6), aligned(7)];
    let error = pool.checkout_many(&both, None).unwrap_err();
    assert!(matches!(error, Error::Impossible { .. }), "{error}");
    let error = block_on(pool.checkout_many_async(both)).unwrap_err();
    assert!(matches!(error, Error::Impossible { .. }), "{error}");
    // The requests behind it are served, and it is known at the latest when all is back.
    let first = pool.checkout(1).unwrap();
    let waiting = Waiter::new(pool.checkout_many_async(both));
    let next = Waiter::new(pool.checkout_async(pages(16)));
    drop(first);
    drop(next.ready().unwrap());
    assert!(matches!(waiting.ready(), Err(Error::Impossible { .. })));
    assert_eq!(checked(&pool).waiting, 0);
}

#[test]
fn pinning_can_be_asked_about_and_waited_for() {
    let rig = Rig::threads();
    let pool = rig.builder(16 << 20).initial(16 << 20).extent(1 << 20).build().unwrap();
    // It serves from its first extent.
    drop(pool.try_checkout(pages(128)).unwrap());
    let early = pool.pinning();
    assert!(early.ready >= 1 << 20 && early.ready <= early.wanted && early.wanted == 16 << 20, "{early:?}");
    let done = pool.wait_pinned(Some(HANG)).unwrap();
    assert_eq!((done.ready, done.wanted, &done.error), (16 << 20, 16 << 20, &None));
    assert!(done.busy >= done.longest_call && done.longest_call > Duration::ZERO);
    assert!(done.bytes_per_second().is_some_and(|speed| speed > 0.0));
    assert_eq!(checked(&pool).pinned_bytes, 16 << 20);
    assert_eq!(pool.wait_pinned(None).unwrap(), pool.pinning(), "nothing to wait for");
    pool.trim(0);
    let empty = pool.pinning();
    assert_eq!((empty.ready, empty.wanted), (0, 0));
    drop(pool);
    rig.all_is_given_back();
}

/// The worker wakes a thread that waits for a region's last extent before it has done its own bookkeeping. The region
/// may be idle by then, and is unpinned all the same.
#[test]
fn what_has_just_come_may_go_at_once() {
    const REGION: usize = 2 << 20;
    let rig = Rig::threads();
    for round in 0..100 {
        let pool = rig.builder(4 * REGION).region(REGION).initial(0).build().unwrap();
        drop(pool.checkout(1_900_000).unwrap());
        let len = pool.regions()[0].len;
        assert_eq!(pool.trim(0), len, "round {round}");
        drop(pool.checkout(1_900_000).unwrap());
        let pinning = pool.wait_pinned(Some(HANG)).unwrap();
        assert_eq!((pinning.wanted, pinning.ready, pinning.made), (len, len, 2 * len), "round {round}");
        checked(&pool);
    }
    rig.all_is_given_back();
}

/// A waker blocks until another request is served, for which it has given back what was in the way.
#[test]
fn memory_is_pinned_while_code_of_the_program_blocks() {
    let rig = Rig::threads();
    let pool = rig.builder(256 << 10).initial(128 << 10).region(128 << 10).build().unwrap();
    pool.wait_pinned(Some(HANG)).unwrap();
    let gives = Mutex::new(Some(pool.checkout(1).unwrap()));
    // It fits into a region that takes the place of the present one, when that is idle.
    let large = Waiter::new(pool.checkout_async(pages(33)));
    let (served, (saw, seen)) = (large.bell.clone(), std::sync::mpsc::channel());
    let blocks = waker(move || {
        drop(gives.lock().unwrap().take());
        until(|| served.0.load(Ordering::Relaxed) > 0, || "the waker waits in vain".into());
        saw.send(()).unwrap();
    });
    // The timer wakes a task of another pool.
    let other = rig.pool(64 << 10);
    let held = other.checkout(pages(16)).unwrap();
    let mut late = Box::pin(other.checkout_async(pages(16)).timeout(Duration::from_millis(10)));
    assert!(late.as_mut().poll(&mut Context::from_waker(&blocks)).is_pending());
    seen.recv_timeout(2 * HANG).expect("the waker waited in vain");
    drop((large.ready().unwrap(), held, late));
    drop((pool, other));
    rig.all_is_given_back();
}
