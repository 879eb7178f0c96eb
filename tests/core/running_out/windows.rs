//! What a request that waits withholds from others: its window, and nothing else.

use pinpool::Waited;

use super::*;

const MIB: usize = 1 << 20;

/// The example of the page: 4 MiB are held for long, and a request for 5 MiB waits.
#[test]
fn what_a_large_request_waits_for_is_all_that_others_go_without() {
    let rig = Rig::threads();
    let pool = rig.pool(8 * MIB);
    let held = pool.checkout(4 * MIB - 32).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| pool.checkout(5 << 20).map(|buf| buf.capacity()));
        eventually(|| (pool.stats().waiting == 1).then_some(()), || format!("{pool:?}"));
        // 3 MiB are outside of any range of 5 MiB.
        drop(pool.try_checkout(MIB).unwrap());
        let small: Vec<_> = (0..100).map(|_| pool.checkout(4096).unwrap()).collect();
        drop(small);
        // Threads keep their caches.
        let before = pool.stats();
        for _ in 0..1000 {
            drop(pool.checkout(4096).unwrap());
        }
        let after = pool.stats();
        assert!(after.misses <= before.misses + 2, "{before:?} {after:?}");
        // What does not fit beside the window is refused, with the reason.
        let error = pool.try_checkout(4 * MIB).unwrap_err();
        let Error::Exhausted(shortage) = &error else { panic!("{error}") };
        assert_eq!((shortage.requested, shortage.withheld_for), (4 * MIB, 5 << 20));
        assert!(shortage.withheld >= MIB - 4096 && shortage.largest < 4 * MIB, "{shortage:?}");
        assert!(shortage.free >= 4 * MIB - 4096 && shortage.pool == pool.name(), "{shortage:?}");
        assert!(error.to_string().contains("withheld for a request of 5 MiB that waits"), "{error}");
        checked(&pool);
        drop(held);
        assert_eq!(waiter.join().unwrap().unwrap(), 5 << 20);
    });
    assert_eq!(checked(&pool).checked_out_bytes, 0);
}

/// The error of a request that waited in vain counts what is withheld for others, and not its own window.
#[test]
fn a_request_that_gives_up_counts_its_own_window_as_free() {
    let patience = Duration::from_millis(20);
    let rig = Rig::threads();
    let pool = rig.pool(8 * MIB);
    let held = pool.checkout(4 * MIB - 32).unwrap();
    let alone = |error: Error| {
        let Error::Timeout(Waited { shortage: Some(shortage), .. }) = &error else { panic!("{error}") };
        assert_eq!((shortage.withheld, shortage.withheld_for), (0, 0), "{shortage:?}");
        assert!(shortage.free >= 4 * MIB - 4096 && shortage.largest >= 4 * MIB - 8192, "{shortage:?}");
        assert!(!error.to_string().contains("withheld"), "{error}");
    };
    alone(pool.checkout_timeout(5 << 20, patience).unwrap_err());
    alone(block_on(pool.checkout_async(5 << 20).timeout(patience)).unwrap_err());
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| pool.checkout(6 << 20).map(drop));
        eventually(|| (pool.stats().waiting == 1).then_some(()), || format!("{pool:?}"));
        let error = pool.checkout_timeout(5 << 20, patience).unwrap_err();
        let Error::Timeout(Waited { shortage: Some(shortage), .. }) = &error else { panic!("{error}") };
        assert!(shortage.withheld > 0 && shortage.withheld_for == 6 << 20, "{shortage:?}");
        drop(held);
        waiter.join().unwrap().unwrap();
    });
    // On a device that does not move by itself.
    let rig = Rig::by_hand();
    let pool = rig.pool(8 * MIB);
    let held = pool.checkout(4 * MIB - 32).unwrap();
    alone(pool.checkout(5 << 20).unwrap_err());
    drop(held);
    assert_eq!(checked(&pool).checked_out_bytes, 0);
}

#[test]
fn several_large_requests_have_windows_of_their_own() {
    let rig = Rig::by_hand();
    let pool = rig.pool(48 * PAGE);
    let held = [(); 6].map(|()| pool.checkout(pages(8)).unwrap());
    let waiters = [(); 2].map(|()| Waiter::new(pool.checkout_async(pages(12))));
    let mut last = Waiter::new(pool.checkout_async(pages(40)));
    // Each of the first two withholds 16 pages, and the last nothing: it waits for the others.
    let mut held = held.into_iter();
    let mut kept: Vec<_> = held.by_ref().skip(4).collect();
    for waiter in waiters {
        drop(waiter.ready().unwrap());
    }
    last.still_waits();
    checked(&pool);
    kept.pop();
    last.still_waits();
    kept.pop();
    drop(last.ready().unwrap());
    assert_eq!(checked(&pool).checked_out_bytes, 0);
}

#[test]
fn a_small_request_that_waits_is_served_by_what_comes_back_elsewhere() {
    let rig = Rig::by_hand();
    let pool = rig.pool(256 << 10);
    let mut held: Vec<_> = std::iter::from_fn(|| pool.try_checkout(4096).ok()).collect();
    assert!(held.len() > 50);
    // The first waiter of a class has a window, and any segment of the class serves it.
    let waiters: Vec<_> = (0..3).map(|_| Waiter::new(pool.checkout_async(4096))).collect();
    checked(&pool);
    for (waiter, at) in waiters.into_iter().zip([0, 20, 40]) {
        drop(held.remove(at));
        held.push(waiter.ready().unwrap());
        checked(&pool);
    }
    drop(held);
    assert_eq!(checked(&pool).checked_out_bytes, 0);
}

/// A window begins inside of a run, at a page that a segment crosses: that segment lies in the window.
#[test]
fn a_window_begins_at_a_segments_edge_and_not_at_a_pages() {
    let rig = Rig::by_hand();
    // Segments that do not divide a page, in runs of several pages.
    for len in [200, 1000, 3000, 5000, 7000] {
        let pool = rig.pool(64 * PAGE);
        for free in [4, 16, 40] {
            let gap = pool.checkout(pages(free)).unwrap();
            let mut held: Vec<_> = std::iter::from_fn(|| pool.try_checkout(len).ok()).collect();
            drop(gap);
            let waiter = Waiter::new(pool.checkout_async(pages(free + 2)));
            // The checks find a segment that is cached although it lies in the window.
            let mut back = held.len();
            while back > 0 && waiter.rung() == 0 {
                back -= 1;
                drop(held.swap_remove(back * 7 % held.len()));
                checked(&pool);
            }
            drop(waiter.ready().unwrap());
            drop(held);
            assert_eq!(checked(&pool).checked_out_bytes, 0);
        }
    }
}

/// These requests are served beside a thread for each of the other sizes, which holds so many bytes of it at most.
fn served_under_load(pool: &Pool, sizes: &[usize], most: usize, requests: impl Iterator<Item = usize>) {
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for len in sizes.iter().copied() {
            let stop = &stop;
            scope.spawn(move || {
                let mut held = std::collections::VecDeque::new();
                while !stop.load(Ordering::Relaxed) {
                    match pool.try_checkout(len) {
                        Ok(buf) => held.push_back(buf),
                        Err(_) => drop(held.pop_front()),
                    }
                    if held.len() > most / len {
                        held.pop_front();
                    }
                }
            });
        }
        for len in requests {
            let buf = pool.checkout_timeout(len, HANG);
            assert!(buf.is_ok(), "{len}: {buf:?} {:?}", pool.stats());
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(checked(pool).checked_out_bytes, 0);
}

/// No region is long enough, and small requests keep coming.
#[test]
fn regions_that_are_to_be_replaced_get_idle_under_constant_load() {
    let rig = Rig::threads();
    let pool = rig.builder(MIB).region(128 << 10).build().unwrap();
    served_under_load(&pool, &[1000, 4096], 200 << 10, [300, 500, 400].into_iter().map(|kib| kib << 10));
}

/// The only memory that is ever free is what a thread takes and returns from its cache.
#[test]
fn a_request_is_served_under_constant_load_of_other_sizes() {
    let rig = Rig::threads();
    let pool = rig.pool(2 * MIB);
    let requests = [MIB, MIB / 2, 9000, 100, MIB].into_iter().flat_map(|len| [len; 20]);
    served_under_load(&pool, &[3000, 4096, 20_000, 60_000], 500 << 10, requests);
}

/// A buffer in the window is never returned, and another range would do.
#[test]
fn a_window_that_does_not_empty_is_exchanged() {
    for rig in Rig::both() {
        let pool = rig.pool(64 * PAGE);
        // The first half has fewer bytes out than the second, in one buffer that is kept.
        let halves = [pool.checkout(pages(31)).unwrap(), pool.checkout(pages(33)).unwrap()];
        let [first, second] = halves;
        let waiter = Waiter::new(pool.checkout_async(pages(20)));
        drop(second);
        let waited = if !rig.has_threads() {
            // There is no clock: calls on the slow path count.
            let mut waiter = Some(waiter);
            (0..1000).find_map(|_| {
                drop(pool.try_checkout(pages(2)));
                waiter.take_if(|waiter| waiter.rung() > 0)
            })
        } else {
            eventually(|| (waiter.rung() > 0).then_some(()), || format!("{pool:?}"));
            Some(waiter)
        };
        drop(waited.unwrap().ready().unwrap());
        drop(first);
        assert_eq!(checked(&pool).checked_out_bytes, 0);
    }
}

#[test]
fn a_quarantined_buffer_ends_a_window() {
    let rig = Rig::by_hand();
    let pool = rig.pool(32 * PAGE);
    let stream = rig.device.stream().unwrap();
    let (sent, kept) = (pool.checkout(pages(14)).unwrap(), pool.checkout(pages(18)).unwrap());
    let waiter = Waiter::new(pool.checkout_async(pages(12)));
    send(&stream, sent);
    rig.kill();
    drain(&rig);
    assert!(checked(&pool).quarantined_bytes > 0);
    drop(kept);
    drop(waiter.ready().unwrap());
    assert_eq!(checked(&pool).checked_out_bytes, 0);
}

#[test]
fn a_storm_of_waiters_is_served_in_order() {
    let rig = Rig::by_hand();
    let pool = rig.pool(MIB);
    let all = pool.checkout(MIB - 32).unwrap();
    let waiters: Vec<_> = (0..240).map(|_| Waiter::new(pool.checkout_async(4096))).collect();
    checked(&pool);
    drop(all);
    let bufs: Vec<_> = waiters.into_iter().map(|waiter| waiter.ready().unwrap()).collect();
    assert_eq!((bufs.len(), checked(&pool).waiting), (240, 0));
}
