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
    let waiter = Waiter::new(pool.checkout_async(5 << 20));
    // 3 MiB are outside of any range of 5 MiB.
    drop(pool.try_checkout(MIB).unwrap());
    let small: Vec<_> = (0..100).map(|_| pool.checkout(4096).unwrap()).collect();
    drop(small);
    let before = pool.stats().misses;
    (0..1000).for_each(|_| drop(pool.checkout(4096).unwrap()));
    (0..1000).for_each(|_| drop(block_on(pool.checkout_async(4096)).unwrap()));
    assert!(pool.stats().misses <= before + 2, "{before} misses, now {:?}", pool.stats());
    // What does not fit beside the window is refused, with the reason.
    let error = pool.try_checkout(4 * MIB).unwrap_err();
    let Error::Exhausted(shortage) = &error else { panic!("{error}") };
    assert_eq!((shortage.requested, shortage.withheld_for), (4 * MIB, 5 << 20));
    assert!(shortage.withheld >= MIB - 4096 && shortage.largest < 4 * MIB, "{shortage:?}");
    assert!(shortage.free >= 4 * MIB - 4096 && shortage.pool == pool.name(), "{shortage:?}");
    assert!(error.to_string().contains("withheld for a request of 5 MiB that waits"), "{error}");
    checked(&pool);
    drop(held);
    drop(waiter.ready().unwrap());
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
    let waiter = Waiter::new(pool.checkout_async(6 << 20));
    let error = pool.checkout_timeout(5 << 20, patience).unwrap_err();
    let Error::Timeout(Waited { shortage: Some(shortage), .. }) = &error else { panic!("{error}") };
    assert!(shortage.withheld > 0 && shortage.withheld_for == 6 << 20, "{shortage:?}");
    drop(held);
    drop(waiter.ready().unwrap());
    assert_eq!(checked(&pool).checked_out_bytes, 0);
}

/// What else is in it serves others at once.
#[test]
fn a_quarantined_buffer_ends_a_window() {
    let rig = Rig::by_hand();
    let pool = rig.pool(32 * PAGE);
    let stream = rig.device.stream().unwrap();
    // What is free, what is sent and what is kept lie in this order.
    let (kept, sent) = (pool.checkout(pages(18)).unwrap(), pool.checkout(pages(6)).unwrap());
    let waiter = Waiter::new(pool.checkout_async(pages(12)));
    assert!(pool.try_checkout(pages(8)).is_err(), "withheld");
    send(&stream, sent);
    rig.node.kill(0);
    rig.drain();
    assert!(checked(&pool).quarantined_bytes > 0);
    drop(pool.try_checkout(pages(8)).unwrap());
    drop(kept);
    drop(waiter.ready().unwrap());
    assert_eq!(checked(&pool).checked_out_bytes, 0);
}
