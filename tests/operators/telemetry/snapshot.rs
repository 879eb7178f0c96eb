//! The snapshot: each part after the conditions that it reports. (`tests/kept` has all fields on each kind of
//! device, and `tests/model` the sums after each of many operations.)

use std::time::Duration;

use pinpool::telemetry::ClassStats;
use pinpool::{Error, Request};

use super::{Bench, until};

fn class(classes: &[ClassStats], stride: Option<usize>) -> ClassStats {
    *classes
        .iter()
        .find(|class| class.stride == stride)
        .unwrap_or_else(|| panic!("{stride:?} in {classes:#?}"))
}

#[test]
fn classes_are_told_apart() {
    let bench = Bench::by_hand(|builder| builder);
    let small: Vec<_> = (0..3).map(|_| bench.pool.checkout(1000).unwrap()).collect();
    let large = bench.pool.checkout(Request::new(10_000).align(4096)).unwrap();
    drop(bench.pool.checkout(1000).unwrap());
    let s = bench.pool.snapshot();
    let of_small = class(&s.classes, Some(1088));
    assert_eq!((of_small.out, of_small.out_bytes, of_small.checkouts, of_small.returns), (3, 3264, 4, 1));
    assert!(of_small.free >= of_small.cached && of_small.cached >= 1, "{of_small:?}");
    let of_large = class(&s.classes, None);
    assert_eq!((of_large.out, of_large.checkouts, of_large.free), (1, 1, 0));
    // The rule asks for 10,048 bytes, and an aligned segment has whole pages.
    assert_eq!(of_large.out_bytes, 3 * 4096);
    assert_eq!(s.pool.requested_bytes, 13_000);
    assert_eq!(s.pool.granted_bytes, 3264 + 3 * 4096);
    assert_eq!(s.pool.rounding_bytes, s.pool.granted_bytes - 13_000);
    drop((small, large));
    let s = bench.pool.snapshot();
    assert_eq!(s.classes.iter().map(|c| c.out).sum::<u64>(), 0);
    assert_eq!((s.pool.granted_bytes, s.pool.rounding_bytes), (0, 0));
}

#[test]
fn devices_streams_and_errors() {
    let bench = Bench::by_hand(|builder| builder);
    let (one, two) = (bench.device.stream().unwrap(), bench.device.stream().unwrap());
    let memory = bench.device.alloc(4096).unwrap();
    for stream in [&one, &one, &two] {
        drop(stream.upload(bench.filled(4096), &memory).unwrap());
    }
    assert_eq!((one.stats().in_flight, one.stats().in_flight_bytes), (2, 2 * 4160));
    assert_eq!((two.stats().submitted, two.stats().completed), (1, 0));
    assert!(one.number() != two.number());
    let claimed = bench.pool.checkout_on(&two, 4096).unwrap();
    // Free ones come first, as long as there are any; then what is in flight is claimed.
    assert_eq!(two.stats().claimed_bytes, if claimed.was_claimed() { 4160 } else { 0 });
    drop(claimed);
    bench.settle();
    let s = bench.pool.snapshot();
    assert_eq!((s.pool.in_flight_bytes, s.devices[0].submitted, s.devices[0].completed), (0, 3, 3));
    assert_eq!(one.stats().seq, one.stats().completed_seq + 1, "all sequence numbers but the open one");
    // The first of each stream was timed.
    assert_eq!((s.devices[0].flight.count(), s.flight.count()), (2, 2));
    drop((one, two));
    let after = bench.device.stats();
    let counted = (after.streams.len(), after.submitted, after.completed);
    assert_eq!(counted, (0, 3, 3), "kept without the streams");

    let value = bench.device.register(vec![0u8; 8192]).unwrap();
    assert_eq!(bench.device.stats().registered_bytes, 8192);
    drop(value);
    bench.fail("cuMemAlloc_v2");
    assert!(bench.device.alloc(64).is_err());
    let stats = bench.device.stats();
    assert_eq!((stats.errors.transient, stats.errors.total(), stats.registered_bytes), (1, 1, 0));
    assert!(matches!(bench.pool.checkout(0), Err(Error::ZeroLength)));
    assert!(bench.pool.try_checkout(2 << 20).is_err());
    let errors = bench.pool.stats().errors;
    assert_eq!((errors.argument, errors.total()), (2, 2));
    bench.node.kill(0);
    assert!(bench.device.alloc(64).is_err());
    let stats = bench.device.stats();
    assert!(stats.lost.is_some() && stats.errors.device_lost == 1, "{stats:?}");
}

#[test]
fn waits_and_holding_are_timed() {
    let bench = Bench::new(|builder| builder.track_checkouts(true));
    let all = bench.pool.checkout(900 << 10).unwrap();
    let pause = Duration::from_millis(20);
    let error = bench.pool.checkout_timeout(512 << 10, pause).unwrap_err();
    let Error::Timeout(waited) = error else { panic!("{error}") };
    let first = bench.pool.snapshot().waiting;
    assert_eq!(first.count(), 1);
    // The search in other caches counts as part of the given time, and not as a wait.
    assert!(Duration::ZERO < first.sum() && first.sum() <= waited.time, "{first:?}");
    // A granted wait counts as well. The request has begun before it is seen to wait.
    let granted = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| bench.pool.checkout(512 << 10).is_ok());
        until("it waits", || bench.pool.stats().waiting == 1);
        std::thread::sleep(pause);
        drop(all);
        waiter.join().unwrap()
    });
    assert!(granted);
    let s = bench.pool.snapshot();
    assert_eq!((s.waiting.count(), s.pool.waits, s.pool.timeouts), (2, 2, 1));
    assert!(s.waiting.sum() - first.sum() >= pause, "{:?}", s.waiting);
    assert!(s.waiting.quantile(1.0).is_some_and(|bound| bound >= pause));
    // A pool that tracks times each checkout, and caches none.
    assert_eq!((s.holding.count(), s.pool.cached_bytes), (2, 0));
    assert!(s.holding.sum() >= pause, "{:?}", s.holding);
}
