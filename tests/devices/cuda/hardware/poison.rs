//! A fault that ends a context ends what is in flight there and nothing else.

use pinpool::{Device, ErrorClass, Pool};

use super::{StandIn, filled, kernels_of, open, pool, raw_stream, until};
use crate::support::kernels::POKE;

/// Longer than the calls meanwhile take; a fault ends it at once.
const STALL_NANOSECONDS: u64 = 10_000_000_000;
pub const LEN: usize = 100_000;

/// Ends the first GPU's context with a sticky error, while copies are in flight there.
pub fn kill(raw: &StandIn, device: &Device, pool: &Pool) {
    let (stream, memory) = (device.stream().expect("a stream"), device.alloc(LEN).expect("device memory"));
    raw.retain(0);
    // Made before anything is stalled: loading a module may wait for that.
    let (poke, beside, byte) = (raw.kernel(POKE, c"poke"), raw.stream(), raw.memory(1));
    // Once at an address where it may store: the kernel works.
    raw.start(poke, 1, 1, beside, &[byte as u64]);
    raw.synchronize(beside);
    kernels_of(raw, 0).spin(STALL_NANOSECONDS, raw_stream(&stream));
    let waited: Vec<_> =
        (0..4).map(|n| stream.upload(filled(pool, LEN, n), &memory).expect("an upload")).collect();
    for n in 0..4 {
        drop(stream.upload(filled(pool, LEN, n), &memory).expect("an upload"));
    }
    assert!(pool.stats().in_flight_bytes >= 4 * LEN, "nothing is held up: {:?}", pool.stats());
    std::thread::scope(|scope| {
        for flight in waited {
            scope.spawn(|| {
                let error = flight.wait().expect_err("it never ran, and is not said to have");
                assert_eq!(error.class(), ErrorClass::DeviceLost, "{error}");
            });
        }
        // To the page that nothing is ever mapped at.
        raw.start(poke, 1, 1, beside, &[0x10]);
        let code = raw.call("cuStreamSynchronize", &[beside]);
        println!("a kernel that stores to 0x10: {code} ({})", raw.word(code));
        assert_ne!(code, 0, "the store went through");
    });
    assert!(device.lost().is_some_and(|error| error.is_device_lost()), "{:?}", device.lost());
    until("all is quarantined", || pool.stats().in_flight_bytes == 0);
    assert!(pool.stats().quarantined_bytes >= 8 * LEN, "{:?}", pool.stats());
    let refused = stream.upload(filled(pool, 100, 1), &memory).expect_err("the device is lost");
    assert!(refused.error.is_device_lost() && refused.buffer.is_some(), "{refused:?}");
    assert!(device.alloc(1).is_err_and(|error| error.is_device_lost()));
    pool.check().expect("the pool is whole");
}

pub fn illegal_address(raw: &StandIn) {
    let device = open(0);
    kill(raw, &device, &pool(&device));
}
