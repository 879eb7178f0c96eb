//! A fault that ends a context ends what is in flight there and nothing else.

use pinpool::{ErrorClass, Stream};

use super::{Raw, filled, kernels_of, open, pool, raw_stream, until};
use crate::support::kernels::POKE;

/// Longer than the calls meanwhile take; a fault ends it at once.
const STALL_NANOSECONDS: u64 = 10_000_000_000;

/// Keeps what is submitted to the stream from now on from running.
pub fn stall(raw: &Raw, ordinal: usize, stream: &Stream) {
    kernels_of(raw, ordinal).spin(STALL_NANOSECONDS, raw_stream(stream));
}

/// Ends a GPU's context with a sticky error, by a kernel. Made before anything is stalled: loading a module may wait
/// for that.
pub struct Fault<'a> {
    raw: &'a Raw,
    poke: usize,
    stream: usize,
}

impl<'a> Fault<'a> {
    pub fn new(raw: &'a Raw, ordinal: usize) -> Self {
        raw.enter(ordinal);
        let poke = raw.kernel(POKE, c"poke");
        let (stream, memory) = (raw.stream(), raw.memory(1));
        // Once at an address where it may store: the kernel works.
        raw.start(poke, 1, 1, stream, &[memory as u64]);
        raw.synchronize(stream);
        Self { raw, poke, stream }
    }

    /// Ends the context, which is current on the caller's thread.
    pub fn strike(self) {
        let Self { raw, poke, stream } = self;
        // To the page that nothing is ever mapped at.
        raw.start(poke, 1, 1, stream, &[0x10]);
        let code = raw.call("cuStreamSynchronize", &[stream]);
        println!("a kernel that stores to 0x10: {code} ({})", raw.word(code));
        assert_ne!(code, 0, "the store went through");
    }
}

pub fn illegal_address(raw: &Raw) {
    const TEST: &str = "an_illegal_address_poisons_and_nothing_hangs";
    const LEN: usize = 100_000;
    let device = open(0);
    let (pool, stream, memory) = (pool(&device), device.stream(), device.alloc(LEN));
    let (stream, memory) = (stream.expect("a stream"), memory.expect("device memory"));
    let fault = Fault::new(raw, 0);
    stall(raw, 0, &stream);
    let waited: Vec<_> =
        (0..4).map(|n| stream.upload(filled(&pool, LEN, n), &memory).expect("an upload")).collect();
    for n in 0..4 {
        drop(stream.upload(filled(&pool, LEN, n), &memory).expect("an upload"));
    }
    assert!(pool.stats().in_flight_bytes >= 4 * LEN, "nothing is held up: {:?}", pool.stats());
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
    assert!(pool.stats().quarantined_bytes >= 8 * LEN, "{:?}", pool.stats());
    let refused = stream.upload(filled(&pool, 100, 1), &memory).expect_err("the device is lost");
    assert!(refused.error.is_device_lost() && refused.buffer.is_some(), "{refused:?}");
    assert!(device.alloc(1).is_err_and(|error| error.is_device_lost()));
    pool.check().expect("the pool is whole");
}
