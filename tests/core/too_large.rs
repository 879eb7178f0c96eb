//! A request that no region of a grown pool has room for waits for idle regions, and no longer than its timeout.

use std::time::Duration;

use pinpool::{Error, Pool, Request};

use crate::{HANG, builder, host};

const SHORT: Duration = Duration::from_millis(20);

/// A pool that has grown to `regions` regions of 1 MiB.
fn grown(capacity: usize, regions: usize) -> Pool {
    let pool = builder(&host().1, capacity).region(1 << 20).build().unwrap();
    let bufs: Vec<_> = (0..regions).map(|_| pool.checkout(900 << 10).unwrap()).collect();
    drop(bufs);
    assert_eq!(pool.regions().len(), regions);
    pool
}

#[test]
fn where_regions_use_up_the_capacity() {
    let pool = grown(4 << 20, 4);
    let bufs: Vec<_> = (0..4).map(|_| pool.checkout(900 << 10).unwrap()).collect();
    let error = pool.checkout_timeout(3 << 20, SHORT).unwrap_err();
    assert!(matches!(error, Error::Timeout(_)), "{error}");
    let pair = [4096.into(), (2 << 20).into()];
    let error = pool.checkout_many(&pair, Some(SHORT)).unwrap_err();
    assert!(matches!(error, Error::Timeout(_)), "{error}");
    // Idle regions make way for a larger one, and as soon as enough are idle.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| pool.checkout_timeout(3 << 20, HANG));
        while pool.stats().waiting == 0 {
            std::thread::yield_now();
        }
        drop(bufs);
        assert!(waiting.join().unwrap().is_ok());
    });
    assert!(pool.checkout_many(&pair, Some(HANG)).is_ok());
}

#[test]
fn where_what_is_left_is_too_little() {
    let pool = grown(4 << 20, 2);
    let bufs: Vec<_> = (0..2).map(|_| pool.checkout(900 << 10).unwrap()).collect();
    let error = pool.checkout_timeout(3 << 20, SHORT).unwrap_err();
    assert!(matches!(error, Error::Timeout(_)), "{error}");
    // A region of its own for what still fits.
    assert!(pool.checkout_timeout(1_900_000, HANG).is_ok());
    drop(bufs);
}

/// Many requests together can ask for more bytes than there are addresses.
#[test]
fn where_the_sum_is_beyond_all_numbers() {
    let pool = builder(&host().1, usize::MAX).extent(usize::MAX).region(64 << 10).build().unwrap();
    // The longest that an extent can have, so often that the sum wraps around.
    let many = vec![Request::new((1 << 42) - 4096 - 32); (1 << 22) + 2];
    let error = pool.checkout_many(&many, Some(HANG)).unwrap_err();
    assert!(matches!(error, Error::Impossible { .. }), "{error}");
    pool.checkout(4096).unwrap();
}
