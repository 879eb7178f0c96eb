//! Fragmentation while the requests of an inference server are replayed, beside the loss of rounding to powers of two.
//!
//! # The trace
//!
//! Three kinds of requests with log-normal lengths and exponential lifetimes, counted in requests:
//!
//! | kind | median | spread | lives for |
//! | --- | --- | --- | --- |
//! | metadata: token ids, block tables, results | 2 KiB | wide | 200 requests |
//! | blocks of a KV cache on their way out or in | 144 KiB | narrow | 1,500 requests |
//! | chunks of weights being loaded | 6 MiB | narrow | 40 requests |
//!
//! The mix goes through phases in which different kinds prevail (a model is loaded, traffic begins, traffic shifts to
//! longer contexts, a second model is loaded under traffic), so that memory cut for one kind must serve another.
//! Everything follows from the seed, on a simulated GPU on which nothing runs by itself, so the same seed prints the same
//! bytes.
//! The figures are of one thread, since the interleaving of threads would be another input.
//!
//! # What is printed
//!
//! Averages over the samples of each phase:
//!
//! - *rounding*: bytes granted less bytes asked for, in per cent of the granted, and beside it the same for rounding the
//!   same live requests up to powers of two (a real pool of powers of two would lose more: the segment rule's 32 bytes
//!   push a length that is a power of two to the next one);
//! - *cut*: bytes between segments that no segment covers, in per cent of the granted;
//! - *largest free*: the longest free run, in per cent of the free bytes. A segment in a thread cache is free, in no run.
//!
//! And for the whole trace: requests refused though enough bytes were free, and the most bytes that were out, for both
//! ways of rounding.
//!
//! `cargo bench --bench fragmentation`; `PINPOOL_BENCH_SEED` chooses another trace, `PINPOOL_BENCH_QUICK=1` a tenth of
//! it.
#![allow(missing_docs)]

#[allow(dead_code, unsafe_code, reason = "tests use more of it; handing functions to pinpool")]
#[path = "../tests/support/hand.rs"]
mod hand;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hand::Machine;
use pinpool::{Error, PinnedBuf, Pool, PoolBuilder};

const MIB: usize = 1 << 20;
const CAPACITY: usize = 384 * MIB;

/// SplitMix64, for a trace that is the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In (0, 1].
    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.unit().ln()
    }

    /// Standard normal, by Box and Muller.
    fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }
}

struct Kind {
    median: f64,
    sigma: f64,
    least: f64,
    most: f64,
    life: f64,
}

const KINDS: [Kind; 3] = [
    Kind { median: 2048.0, sigma: 1.4, least: 16.0, most: 262_144.0, life: 200.0 },
    Kind { median: 147_456.0, sigma: 0.4, least: 16_384.0, most: 2_097_152.0, life: 1500.0 },
    Kind { median: 6_291_456.0, sigma: 0.4, least: 1_048_576.0, most: 33_554_432.0, life: 40.0 },
];

struct Phase {
    name: &'static str,
    requests: u64,
    /// The weight of each kind in the mix.
    weights: [f64; 3],
    /// Factor on the lengths of cache blocks.
    longer: f64,
}

const PHASES: [Phase; 5] = [
    Phase { name: "load", requests: 20_000, weights: [0.2, 0.0, 0.8], longer: 1.0 },
    Phase { name: "serve", requests: 60_000, weights: [0.6, 0.4, 0.0], longer: 1.0 },
    Phase { name: "serve long", requests: 60_000, weights: [0.5, 0.5, 0.0], longer: 1.5 },
    Phase { name: "load + serve", requests: 40_000, weights: [0.4, 0.4, 0.2], longer: 1.0 },
    Phase { name: "overload", requests: 40_000, weights: [0.3, 0.4, 0.3], longer: 2.0 },
];

/// Sums over the samples of a phase, or maxima over the trace.
#[derive(Default)]
struct Sums {
    out: f64,
    rounding: f64,
    power: f64,
    cut: f64,
    free: f64,
    largest: f64,
    refused: u64,
    refused_though_free: u64,
}

fn power_of_two(len: usize) -> usize {
    len.next_power_of_two()
}

fn replay(seed: u64, scale: u64, title: &str, setup: impl Fn(PoolBuilder) -> PoolBuilder) {
    let machine = Machine::new(1, MIB, seed);
    let device = machine.device(0);
    let builder = Pool::builder(&device).capacity(CAPACITY).initial(CAPACITY);
    let pool = setup(builder).build().expect("memory for a pool");

    println!("\n{title}, capacity {} MiB", CAPACITY / MIB);
    println!(
        "{:<14} {:>9} {:>9} {:>13} {:>8} {:>13} {:>9} {:>12}",
        "phase", "out MiB", "rounding", "powers of 2", "cut", "largest free", "refused", "though free"
    );
    let mut random = Random(seed);
    let mut live: BinaryHeap<Reverse<(u64, u64)>> = BinaryHeap::new();
    let mut bufs: std::collections::HashMap<u64, PinnedBuf> = std::collections::HashMap::new();
    let (mut now, mut power) = (0u64, 0usize);
    let (mut most, mut most_power) = (0, 0);
    for phase in &PHASES {
        let mut sums = Sums::default();
        let mut samples = 0.0;
        for n in 0..phase.requests / scale {
            now += 1;
            while live.peek().is_some_and(|Reverse((end, _))| *end <= now) {
                let Some(Reverse((_, id))) = live.pop() else { break };
                power -= bufs.remove(&id).map_or(0, |buf| power_of_two(buf.capacity()));
            }
            let total: f64 = phase.weights.iter().sum();
            let mut pick = random.unit() * total;
            let at = phase.weights.iter().position(|w| {
                pick -= w;
                pick <= 0.0
            });
            let at = at.unwrap_or(0);
            let kind = &KINDS[at];
            let factor = if at == 1 { phase.longer } else { 1.0 };
            let len =
                (kind.median * factor * (kind.sigma * random.normal()).exp()).clamp(kind.least, kind.most);
            let (len, end) = (len as usize, now + 1 + random.exponential(kind.life) as u64);
            match pool.try_checkout(len) {
                Ok(buf) => {
                    power += power_of_two(len);
                    bufs.insert(now, buf);
                    live.push(Reverse((end, now)));
                }
                Err(Error::Exhausted(_)) => {
                    sums.refused += 1;
                    sums.refused_though_free += u64::from(pool.stats().free_bytes >= len + 64);
                }
                Err(error) => panic!("{len} bytes: {error}"),
            }
            if n % 50 == 0 {
                let s = pool.stats();
                samples += 1.0;
                sums.out += s.checked_out_bytes as f64;
                sums.rounding += (s.checked_out_bytes - s.requested_bytes) as f64;
                sums.power += (power - s.requested_bytes) as f64;
                sums.cut += s.cut_bytes as f64;
                sums.free += s.free_bytes as f64;
                sums.largest += s.largest_free_bytes as f64;
                most = most.max(s.checked_out_bytes);
                most_power = most_power.max(power);
            }
        }
        let percent = |part: f64, whole: f64| if whole > 0.0 { 100.0 * part / whole } else { 0.0 };
        println!(
            "{:<14} {:>9.1} {:>8.2}% {:>12.2}% {:>7.2}% {:>12.1}% {:>9} {:>12}",
            phase.name,
            sums.out / samples / MIB as f64,
            percent(sums.rounding, sums.out),
            percent(sums.power, sums.out - sums.rounding + sums.power),
            percent(sums.cut, sums.out),
            percent(sums.largest, sums.free),
            sums.refused,
            sums.refused_though_free,
        );
    }
    pool.check().expect("the pool is sound");
    drop(bufs);
    let after = pool.stats();
    assert_eq!(after.free_bytes + after.cut_bytes, CAPACITY, "everything came back: {after:?}");
    println!(
        "out at most: {:.1} MiB; rounded to powers of two: {:.1} MiB",
        most as f64 / MIB as f64,
        most_power as f64 / MIB as f64
    );
}

fn main() {
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    let seed = number("PINPOOL_BENCH_SEED").unwrap_or(20_261_121);
    let scale = if number("PINPOOL_BENCH_QUICK").is_some_and(|n| n != 0) { 10 } else { 1 };
    println!("seed {seed}");
    replay(seed, scale, "as configured by default", |b| b);
    replay(seed, scale, "extents of 64 MiB", |b| b.extent(64 * MIB));
    replay(seed, scale, "threads keep 256 KiB at most", |b| b.thread_cache(256 << 10));
}
