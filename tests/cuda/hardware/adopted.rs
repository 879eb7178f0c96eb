//! Streams of the server's: the legacy default stream, and a handle that the driver gives again.

use pinpool::Error;

use super::{Gpu, HANG, bridge, filled, kernels, open, pool, round_trip, skip, until};
use crate::support::kernels::Counts;

/// The caller's kernels before and after our copies, all on the legacy default stream.
pub fn legacy(gpu: &Gpu) {
    const TEST: &str = "the_legacy_default_stream_is_in_order_with_its_caller";
    const LEN: usize = 1 << 20;
    const ROUNDS: u64 = 50;
    let device = open(0);
    let pool = pool(&device);
    let Some(stream) = bridge::adopt_stream(&device, 0) else {
        return skip(TEST, "adopted streams are not switched on");
    };
    let stream = stream.expect("the legacy default stream");
    let own = device.alloc(LEN).expect("device memory");
    let mut wrong: usize = (0..ROUNDS).map(|round| round_trip(&pool, &stream, &own, round)).sum();
    if let (Some(kernels), Some(at)) = (gpu.kernels(), bridge::address(&own)) {
        let counts = kernels.counts();
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
    } else if gpu.real {
        skip(TEST, "addresses are not switched on");
    }
    until("all is back", || pool.stats().in_flight_bytes == 0);
    println!("{TEST}: {ROUNDS} round trips, {wrong} wrong bytes");
    assert_eq!(wrong, 0);
    pool.check().expect("the pool is whole");
    gpu.no_violations();
}

/// The driver gives a destroyed stream's handle to a new one: what was made for the old stream does not serve the new
/// one.
pub fn recreated(gpu: &Gpu) {
    const TEST: &str = "a_handle_that_comes_again_is_another_stream";
    const TRIES: usize = 1000;
    let device = open(0);
    let pool = pool(&device);
    gpu.raw.enter(0);
    let raw = gpu.raw.stream();
    let Some(old) = bridge::adopt_stream(&device, raw) else {
        return skip(TEST, "adopted streams are not switched on");
    };
    let old = old.expect("a stream of the caller's");
    let memory = device.alloc(100_000).expect("device memory");
    assert_eq!(round_trip(&pool, &old, &memory, 1), 0);
    let ready = pool.checkout_on(&old, 100_000).expect("a buffer for the old stream");
    old.synchronize().expect("all is done");
    gpu.raw.destroy(raw);
    if let Some(stand_in) = gpu.stand_in().filter(|stand_in| stand_in.has("standin_reuse")) {
        // SAFETY: `control.rs` of the stand-in has the signature.
        unsafe { stand_in.get::<extern "C" fn(bool)>("standin_reuse")(true) };
    }
    let mut others = Vec::new();
    let found = (0..TRIES).find_map(|tried| {
        let made = gpu.raw.stream();
        if made == raw {
            return Some(tried + 1);
        }
        others.push(made);
        None
    });
    others.iter().for_each(|other| gpu.raw.destroy(*other));
    let Some(tries) = found else {
        println!("{TEST}: the handle {raw:#x} did not come again in {TRIES} tries");
        assert!(!gpu.real, "it came again within a few tries on every driver so far");
        return;
    };
    let new = bridge::adopt_stream(&device, raw).expect("switched on").expect("a stream of the caller's");
    let refused = stream_ready(&new, &memory, ready);
    println!(
        "{TEST}: the handle {raw:#x} came again after {tries} tries; a buffer of the old stream: {refused}"
    );
    assert!(matches!(refused, Error::Mismatch { what: "a stream-ready buffer", .. }), "{refused}");
    let wrong: usize = (0..20).map(|n| round_trip(&pool, &new, &memory, n)).sum();
    assert_eq!(wrong, 0);
    new.synchronize().expect("all is done");
    until("all is back", || pool.stats().in_flight_bytes == 0);
    drop((old, new));
    pool.check().expect("the pool is whole");
    gpu.no_violations();
}

/// The error of a download into another stream's buffer.
fn stream_ready(stream: &pinpool::Stream, memory: &pinpool::DeviceSlice, buf: pinpool::StreamBuf) -> Error {
    match stream.download(memory, buf) {
        Ok(_) => panic!("a buffer of the old stream was taken for the new one"),
        Err(refused) => refused.error,
    }
}
