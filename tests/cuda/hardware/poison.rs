//! A fault that ends a context ends what is in flight there and nothing else; a wrong argument ends nothing.

use pinpool::{Device, ErrorClass, Stream};

use super::{Gpu, filled, open, pool, raw_memory, raw_stream, round_trip, until};
use crate::support::kernels::POKE;

/// Longer than the calls meanwhile take; a fault ends it at once.
const STALL_NANOSECONDS: u64 = 10_000_000_000;

/// Keeps what is submitted to the stream from now on from running.
pub fn stall(gpu: &Gpu, ordinal: usize, stream: &Stream) {
    match gpu.stand_in() {
        Some(stand_in) => stand_in.hang(true),
        None => {
            let kernels = gpu.kernels_of(ordinal).expect("a real GPU");
            kernels.spin(STALL_NANOSECONDS, raw_stream(stream));
        }
    }
}

/// Ends a GPU's context with a sticky error. Made before anything is stalled: loading a module may wait for that.
pub struct Fault<'a> {
    gpu: &'a Gpu,
    ordinal: usize,
    /// The kernel and a stream, on a real GPU.
    kernel: Option<(usize, usize)>,
}

impl<'a> Fault<'a> {
    pub fn new(gpu: &'a Gpu, ordinal: usize) -> Self {
        let kernel = gpu.real.then(|| {
            gpu.raw.enter(ordinal);
            let poke = gpu.raw.kernel(gpu.raw.module(POKE), c"poke");
            let (stream, memory) = (gpu.raw.stream(), gpu.raw.alloc(1));
            // Once at an address where it may store: the kernel works.
            gpu.raw.launch(poke, 1, 1, stream, &[memory]);
            gpu.raw.synchronize(stream);
            (poke, stream)
        });
        Self { gpu, ordinal, kernel }
    }

    /// Ends the context, which is current on the caller's thread.
    pub fn strike(self) {
        let (gpu, Some((poke, stream))) = (self.gpu, self.kernel) else {
            self.gpu.raw.stand_in().kill(self.ordinal, 700);
            return self.gpu.raw.stand_in().hang(false);
        };
        // To the page that nothing is ever mapped at.
        gpu.raw.launch(poke, 1, 1, stream, &[0x10]);
        let code = gpu.raw.synchronized(stream);
        println!("a kernel that stores to 0x10: {code} ({})", gpu.raw.name(code));
        assert_ne!(code, 0, "the store went through");
    }
}

/// Everything that a lost device refuses.
fn refuses(device: &Device, stream: &Stream, pool: &pinpool::Pool, memory: &pinpool::DeviceSlice) {
    let refused = stream.upload(filled(pool, 100, 1), memory).expect_err("the device is lost");
    assert!(refused.error.is_device_lost() && refused.buffer.is_some(), "{refused:?}");
    for error in [
        device.alloc(1).expect_err("the device is lost"),
        device.stream().expect_err("the device is lost"),
        stream.synchronize().expect_err("the device is lost"),
    ] {
        assert!(error.is_device_lost(), "{error}");
    }
}

pub fn illegal_address(gpu: &Gpu) {
    const TEST: &str = "an_illegal_address_poisons_and_nothing_hangs";
    const LEN: usize = 100_000;
    let device = open(0);
    let (pool, stream, memory) = (pool(&device), device.stream(), device.alloc(LEN));
    let (stream, memory) = (stream.expect("a stream"), memory.expect("device memory"));
    let fault = Fault::new(gpu, 0);
    stall(gpu, 0, &stream);
    let waited: Vec<_> =
        (0..4).map(|n| stream.upload(filled(&pool, LEN, n), &memory).expect("an upload")).collect();
    for n in 0..4 {
        drop(stream.upload(filled(&pool, LEN, n), &memory).expect("an upload"));
    }
    let in_flight = pool.stats().in_flight_bytes;
    assert!(in_flight >= 4 * LEN, "nothing is held up: {:?}", pool.stats());
    let errors = std::thread::scope(|scope| {
        let waiters: Vec<_> = waited
            .into_iter()
            .map(|flight| scope.spawn(|| flight.wait().expect_err("it never ran, and is not said to have")))
            .collect();
        fault.strike();
        waiters.into_iter().map(|waiter| waiter.join().expect("a waiter")).collect::<Vec<_>>()
    });
    for error in &errors {
        assert_eq!(error.class(), ErrorClass::DeviceLost, "{error}");
    }
    println!("{TEST}: {} waiters woke with: {}", errors.len(), errors[0]);
    assert!(device.lost().is_some_and(|error| error.is_device_lost()), "{:?}", device.lost());
    until("all is quarantined", || pool.stats().in_flight_bytes == 0);
    let quarantined = pool.stats().quarantined_bytes;
    assert!(quarantined >= 8 * LEN, "{:?}", pool.stats());
    refuses(&device, &stream, &pool, &memory);
    pool.check().expect("the pool is whole");
    gpu.no_violations();
    drop((pool, stream, memory, device));
    println!(
        "{TEST}: {in_flight} bytes were in flight, {quarantined} are quarantined, later calls are refused"
    );
}

pub fn wrong_argument(gpu: &Gpu) {
    const TEST: &str = "a_wrong_argument_poisons_nothing";
    const LEN: usize = 64 << 20;
    let device = open(0);
    let (pool, stream, memory) = (pool(&device), device.stream(), device.alloc(100_000));
    let (stream, memory) = (stream.expect("a stream"), memory.expect("device memory"));
    let error = device.alloc(1 << 60).expect_err("no GPU has as much");
    println!("{TEST}: an allocation of 1 EiB: {error}");
    assert!(!error.is_device_lost(), "{error}");
    let refused = if let Some(stand_in) = gpu.stand_in() {
        stand_in.fail("cuMemcpyHtoDAsync_v2", 1, 1, false);
        stream.upload(filled(&pool, 100, 1), &memory).expect_err("it was told to fail").error
    } else {
        // Device memory that its owner frees too early, against the contract: the driver says so.
        gpu.raw.enter(0);
        let freed = gpu.raw.alloc(LEN);
        let slice = raw_memory(&device, freed, LEN).expect("an allocation of the caller's");
        gpu.raw.free(freed);
        stream.upload(filled(&pool, 100, 1), slice).expect_err("the memory is gone").error
    };
    println!("{TEST}: a copy to memory that is gone: {refused}");
    assert_eq!(refused.class(), ErrorClass::Argument, "{refused}");
    assert_eq!(device.lost(), None);
    let wrong: usize = (0..50).map(|n| round_trip(&pool, &stream, &memory, n)).sum();
    until("all is back", || pool.stats().in_flight_bytes == 0);
    assert_eq!((wrong, pool.stats().quarantined_bytes), (0, 0), "{:?}", pool.stats());
    pool.check().expect("the pool is whole");
    gpu.no_violations();
    println!("{TEST}: 50 round trips after two refusals, nothing is quarantined");
}
