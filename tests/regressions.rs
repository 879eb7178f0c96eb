//! One test for each bug that fuzzing, or anything else, has found: the shortest way to it.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use pinpool::host::{HostConfig, HostNode};
use pinpool::{Device, Error, Pool, PoolBuilder, Request, Unpinned};

/// A pool on a device that only moves when it is stepped.
fn stepped(setup: impl Fn(PoolBuilder) -> PoolBuilder) -> (HostNode, Device, Pool) {
    let node = HostNode::new(HostConfig::new().memory(1 << 20).stepped(1)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let pool = setup(Pool::builder(&device).unpinned(Unpinned::Allow)).build().unwrap();
    (node, device, pool)
}

#[test]
fn closing_while_somebody_waits_ends_the_waiting_mode() {
    let (_node, _device, pool) = stepped(|b| b.capacity(1 << 20));
    let all = pool.try_checkout(Request::new((1 << 20) - 32).align(4096)).unwrap();
    let mut waiter = pool.checkout_many_async([Request::new(4096)]);
    let mut cx = Context::from_waker(Waker::noop());
    assert!(Pin::new(&mut waiter).poll(&mut cx).is_pending());
    pool.check().unwrap();
    pool.shutdown(Duration::ZERO);
    pool.check().unwrap();
    assert!(matches!(Pin::new(&mut waiter).poll(&mut cx), Poll::Ready(Err(Error::Closed))));
    drop(all);
    pool.check().unwrap();
}

#[test]
fn the_longest_request_is_served_where_its_class_fits_no_extent() {
    // 278 pages: a request for 1,095,520 bytes has a class of 1,179,712, longer than any extent can be.
    let extent = 278 * 4096;
    let (_node, _device, pool) = stepped(|b| b.capacity(2 * extent).extent(extent));
    for len in [1_095_520, extent - 32] {
        let buf = pool.try_checkout(len).unwrap();
        assert_eq!(buf.capacity(), len);
        pool.check().unwrap();
    }
    assert!(matches!(pool.try_checkout(extent - 31), Err(Error::TooLong { .. })));
}

#[test]
fn idle_regions_make_way_for_a_request_that_fits_none_of_them() {
    let (_node, _device, pool) = stepped(|b| b.capacity(1 << 20).region(64 << 10).initial(64 << 10));
    // Sixteen regions, which use the capacity up.
    let small: Vec<_> = (0..16).map(|_| pool.try_checkout(60_000).unwrap()).collect();
    assert_eq!(pool.regions().len(), 16);
    assert!(matches!(pool.try_checkout(200_000), Err(Error::Exhausted { .. })));
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
