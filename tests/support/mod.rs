//! What the executables of tests/ share: see tests/README.md.

#![allow(dead_code, unused_imports, unused_macros, reason = "each executable uses a part of it")]

pub mod cold;
pub mod doubles;
pub mod exits;
#[cfg(feature = "cuda")]
#[allow(unsafe_code, reason = "handing functions to pinpool")]
pub mod hand;
pub mod kernels;
pub mod panicking;
pub mod process;
pub mod rig;
pub mod skip;
pub mod value;

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

pub(crate) use process::own_process;
pub(crate) use skip::skip;

/// Longer than anything takes here: what has not happened by then hangs.
pub const HANG: Duration = Duration::from_secs(60);

/// Waits until it is so; no test asserts how long that takes.
#[track_caller]
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !so() {
        assert!(since.elapsed() < HANG, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A waker that makes a call.
pub fn waker(call: impl Fn() + Send + Sync + 'static) -> Waker {
    struct Calls<F>(F);
    impl<F: Fn() + Send + Sync + 'static> Wake for Calls<F> {
        fn wake(self: Arc<Self>) {
            (self.0)();
        }
    }
    Waker::from(Arc::new(Calls(call)))
}

/// Whether a future is ready yet, polled with a waker that does nothing.
pub fn is_pending<F: Future + Unpin>(future: &mut F) -> bool {
    pin!(future).poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

/// Polls a future until it is ready, after each wake-up only; `pump` waits a little, or makes what does not move by itself
/// do a step.
pub fn block_on<F: Future>(pump: impl Fn(), future: F) -> F::Output {
    let wakes = Arc::new(AtomicUsize::new(0));
    let count = wakes.clone();
    let waker = waker(move || _ = count.fetch_add(1, Ordering::SeqCst));
    let (mut future, since) = (pin!(future), Instant::now());
    loop {
        let before = wakes.load(Ordering::SeqCst);
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        while wakes.load(Ordering::SeqCst) == before {
            assert!(since.elapsed() < 3 * HANG, "a future hangs");
            pump();
        }
    }
}

/// The number that a variable of the environment has.
pub fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |v| v.parse().unwrap_or_else(|e| panic!("{name}={v}: {e}")))
}

/// Random numbers, the same in each run.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, bound: usize) -> usize {
        ((self.next() >> 11) % bound as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// Bytes of a pool that are checked out or in flight, at one moment: between two looks a buffer may go from one sum to
/// the other.
pub fn in_use(pool: &pinpool::Pool) -> usize {
    let stats = pool.stats();
    stats.checked_out_bytes + stats.in_flight_bytes
}

/// What device memory holds, by a copier.
pub fn downloaded(copier: &pinpool::Copier, from: impl pinpool::copier::CopyRanges) -> Vec<u8> {
    copier.download(from, Vec::new()).unwrap().wait().unwrap()
}

/// Bytes that depend on their place and on the seed. They are copied from a table: a test makes many, unoptimised.
pub fn bytes(seed: usize, len: usize) -> Vec<u8> {
    // No length of a page or a chunk is a multiple of it: bytes that land one of these off differ.
    const PERIOD: usize = 65_521;
    static TABLE: LazyLock<Vec<u8>> =
        LazyLock::new(|| (0..PERIOD as u32).map(|i| (i.wrapping_mul(0x9E37_79B1) >> 13) as u8).collect());
    let mut made = Vec::with_capacity(len);
    let mut part = &TABLE[seed.wrapping_mul(97) % PERIOD..];
    while made.len() < len {
        made.extend_from_slice(&part[..part.len().min(len - made.len())]);
        part = &TABLE;
    }
    made
}
