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
