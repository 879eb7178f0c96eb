//! The legacy default stream, with kernels of the program before and behind the copies.

use super::{Gpu, HANG, filled, kernels, open, pool, round_trip, until};
use crate::rig::adopt;
use crate::support::kernels::Counts;

/// The caller's kernels before and after our copies, all on the legacy default stream.
pub fn legacy(gpu: &Gpu) {
    const TEST: &str = "the_legacy_default_stream_is_in_order_with_its_caller";
    const LEN: usize = 1 << 20;
    const ROUNDS: u64 = 50;
    let device = open(0);
    let pool = pool(&device);
    let stream = adopt(&device, 0).expect("the legacy default stream");
    let own = device.alloc(LEN).expect("device memory");
    let mut wrong: usize = (0..ROUNDS).map(|round| round_trip(&pool, &stream, &own, round)).sum();
    if let Some(kernels) = gpu.kernels() {
        let (counts, at) = (kernels.counts(), own.address());
        let mut landing = Vec::new();
        for round in 0..ROUNDS {
            let (before, after) = (round, round + 1_000_000);
            // Late, so that a copy that does not wait for it is caught.
            kernels.spin(2_000_000, 0);
            kernels.fill(at, LEN, before, 0);
            let buf = pool.checkout_timeout(LEN, HANG).expect("the pool has room");
            landing.push((stream.download(&own, buf).expect("a download"), before));
            drop(stream.upload(filled(&pool, LEN, after), &own).expect("an upload"));
            kernels.check(at, LEN, after, counts, 0);
            if landing.len() > 8 {
                let (flight, seed) = landing.remove(0);
                wrong += kernels::wrong(&flight.wait().expect("it lands"), seed);
            }
        }
        for (flight, seed) in landing {
            wrong += kernels::wrong(&flight.wait().expect("it lands"), seed);
        }
        gpu.raw.synchronize(0);
        let found = kernels.read(counts);
        println!("{TEST}: {ROUNDS} rounds between the caller's kernels: {found:?}");
        assert_eq!(found, Counts { wrong: 0, bytes: ROUNDS * LEN as u64, launches: ROUNDS });
    }
    until("all is back", || pool.stats().in_flight_bytes == 0);
    println!("{TEST}: {ROUNDS} round trips, {wrong} wrong bytes");
    assert_eq!(wrong, 0);
    pool.check().expect("the pool is whole");
    gpu.no_violations();
}
