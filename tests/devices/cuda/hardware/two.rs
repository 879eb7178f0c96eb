//! One pool for two GPUs of a node.

use pinpool::{Device, Pool};

use super::churn::{churn, count};
use super::poison::{LEN, kill};
use super::{StandIn, doubles, filled, kernels_of, open, round_trip, until};

/// The two, and a pool for both. `None`: there is one GPU.
fn open_two(raw: &StandIn) -> Option<(Device, Device, Pool)> {
    // It writes an int.
    let devices = raw.made("cuDeviceGetCount", &[]) & 0xFFFF_FFFF;
    if devices < 2 {
        crate::support::skip!("there is one GPU");
        assert!(!doubles::required_device("cuda:1"), "PINPOOL_REQUIRE names cuda:1");
        return None;
    }
    let (first, second) = (open(0), open(1));
    let pool = Pool::builder(&first).device(&second).capacity(256 << 20).initial(16 << 20);
    Some((first, second, pool.build().expect("a pool")))
}

pub fn both(raw: &StandIn) {
    let Some((first, second, pool)) = open_two(raw) else { return };
    std::thread::scope(|scope| {
        for (ordinal, device) in [(0, &first), (1, &second)] {
            let pool = &pool;
            scope.spawn(move || {
                churn(raw, pool, (device, ordinal), &kernels_of(raw, ordinal), (6, 3), count() / 2);
            });
        }
    });
    until("all is back", || pool.stats().in_flight_bytes == 0);
    pool.check().expect("the pool is whole");
}

/// One GPU dies, by a kernel's illegal address. The pool leaves the other serving if the driver does: the
/// test asks that device beside the pool. A driver may end CUDA in the whole process instead, as cuda.h
/// allows it to (seen: 580.159.04); then the other device says so, too, and nothing hangs.
pub fn one_dies(raw: &StandIn) {
    let Some((first, second, pool)) = open_two(raw) else { return };
    let (other, theirs) = (second.stream().expect("a stream"), second.alloc(LEN).expect("device memory"));
    round_trip(&pool, &other, &theirs, 3);
    let kernels = kernels_of(raw, 1);
    let beside = raw.stream();
    kill(raw, &first, &pool);
    raw.retain(1);
    let code = raw.call("cuStreamSynchronize", &[beside]);
    if code != 0 {
        println!("for cuda:1 the driver says {code} ({})", raw.word(code));
        let refused = other.upload(filled(&pool, LEN, 4), &theirs).expect_err("the driver has ended");
        assert!(refused.error.is_device_lost(), "{}", refused.error);
        until("the other one is lost, too", || second.lost().is_some());
        pool.check().expect("the pool is whole");
        return;
    }
    assert_eq!(second.lost(), None);
    churn(raw, &pool, (&second, 1), &kernels, (4, 2), count() / 4);
    // The pool grows: it is pinned for the living GPU, in a process where another one is dead.
    let before = pool.stats().pinned_bytes;
    let more: Vec<_> = (0..8 + before as u64 / LEN as u64).map(|seed| filled(&pool, LEN, seed)).collect();
    assert!(pool.stats().pinned_bytes > before, "{:?}", pool.pinning().error);
    drop(more);
    round_trip(&pool, &other, &theirs, 5);
    assert_eq!(second.lost(), None);
    pool.check().expect("the pool is whole");
    raw.retain(1);
    raw.ok("cuStreamDestroy_v2", &[beside]);
}
