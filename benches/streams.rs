//! What grows with the number of streams, of threads that have ended, of pools and of sizes: each row is the cost at its
//! large end over the cost at its small end, in one run, on the host device.
//!
//! | row | small end | large end |
//! | --- | --- | --- |
//! | a failing try, `stats()`, an upload and its wait | 16 streams open | 4,096 open: idle, and all but one hung |
//! | a sampler's poll | 256 streams open | 4,096 open (16 times as many) |
//! | the text of `/metrics` (feature `metrics`) | after 1,024 streams came and went | after 4,096 did |
//! | `stats()` after threads have ended | 16 threads | 1,024 threads |
//! | misses of a thread that uses pools by turns | four pools | five pools |
//!
//! The last is a count for a hundred checkouts, and no time. `--quick` only shows that the bench runs, `--only` chooses
//! among `streams`, `metrics`, `threads` and `pools`.

#![allow(unsafe_code, reason = "what the benches share asks the system for its clock")]

mod measure;

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use measure::{Spread, quick, wanted};
use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode};
use pinpool::telemetry::Sampler;
use pinpool::{Device, DeviceSlice, InFlight, PinnedBuf, Pool, Stream, Unpinned};

const LEN: usize = 1024;

fn main() {
    println!("| work | few | many | times | at most |\n| --- | --- | --- | --- | --- |");
    if wanted("streams") {
        streams();
    }
    #[cfg(feature = "metrics")]
    if wanted("metrics") {
        metrics();
    }
    if wanted("threads") {
        threads();
    }
    if wanted("pools") {
        pools();
    }
}

/// Prints a row, and holds its ratio to the gate.
fn row(what: &str, unit: &str, small: f64, large: f64, gate: f64) {
    let ratio = large / small.max(f64::MIN_POSITIVE);
    let verdict = if ratio <= gate { "holds" } else { "MISSED" };
    println!("| {what} | {small:.2} {unit} | {large:.2} {unit} | {ratio:.2} | {gate} times: {verdict} |");
}

/// The median time of a call, in microseconds.
fn median(times: usize, mut call: impl FnMut()) -> f64 {
    call();
    let times: Vec<f64> = (0..times)
        .map(|_| {
            let since = Instant::now();
            call();
            since.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    Spread::of(&times).mid
}

/// A host device of its own, and a pool of so many bytes on it.
fn device_and_pool(capacity: usize) -> (HostNode, Device, Pool) {
    let node = HostNode::new(HostConfig::new()).expect("a node");
    let device = Device::on(&node, 0).expect("a device");
    let builder = Pool::builder(&device).capacity(capacity).unpinned(Unpinned::Allow);
    let pool = builder.build().expect("a pool");
    (node, device, pool)
}

/// A device with many streams, all of which have uploaded once, and a pool that is full but for a little.
struct Open {
    node: HostNode,
    pool: Pool,
    streams: Vec<Stream>,
    memory: DeviceSlice,
    hung: Vec<InFlight<PinnedBuf>>,
    _full: PinnedBuf,
}

impl Open {
    fn new(count: usize) -> Self {
        let (node, device, pool) = device_and_pool(64 << 20);
        let memory = device.alloc(LEN).expect("memory");
        let streams: Vec<Stream> = (0..count).map(|_| device.stream().expect("a stream")).collect();
        let full = pool.checkout(40 << 20).expect("a large buffer");
        let open = Self { node, pool, streams, memory, hung: Vec::new(), _full: full };
        for at in 0..count {
            drop(open.upload(at).wait().expect("an upload"));
        }
        open
    }

    fn upload(&self, at: usize) -> InFlight<PinnedBuf> {
        let mut buf = self.pool.checkout(LEN).expect("a buffer");
        buf.extend_from_slice(&[1; LEN]);
        self.streams[at].upload(buf, &self.memory).expect("an upload")
    }

    /// Hangs all streams but the first, with an upload on each.
    fn hang(&mut self) {
        self.hung = (1..self.streams.len())
            .map(|at| {
                self.node.fail(Fault { device: 0, call: Call::Copy, nth: 0, failure: Failure::Stall });
                self.upload(at)
            })
            .collect();
        // Until they are no news any more.
        std::thread::sleep(Duration::from_millis(50));
    }

    /// A failing try, statistics, an upload and its wait, in microseconds.
    fn costs(&self) -> [f64; 3] {
        let times = if quick() { 10 } else { 300 };
        [
            median(times, || assert!(self.pool.try_checkout(40 << 20).is_err(), "the pool is full")),
            median(times, || _ = std::hint::black_box(self.pool.stats())),
            median(times, || drop(self.upload(0).wait().expect("an upload"))),
        ]
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.node.resume(0);
    }
}

fn streams() {
    let many = if quick() { 64 } else { 4096 };
    let (mut few, mut open) = (Open::new(16), Open::new(many));
    let names = ["a failing try", "stats()", "an upload and its wait"];
    let compare = |few: &Open, open: &Open, state: &str| {
        let (small, large) = (few.costs(), open.costs());
        for (i, name) in names.iter().enumerate() {
            row(&format!("{name}, {many} streams {state}"), "us", small[i], large[i], 3.0);
        }
    };
    compare(&few, &open, "idle");
    few.hang();
    open.hang();
    compare(&few, &open, "hung");
    drop(open);
    let small = Open::new(if quick() { 16 } else { 256 });
    let poll = |open: &Open| {
        let mut sampler = Sampler::new(&open.pool);
        median(if quick() { 3 } else { 50 }, || _ = sampler.poll())
    };
    let small_poll = poll(&small);
    let open = Open::new(many);
    row(&format!("a poll, {many} streams"), "us", small_poll, poll(&open), 16.0);
}

/// The length of the answer to a scrape after streams came and went.
#[cfg(feature = "metrics")]
fn metrics() {
    let text = |lived: usize| {
        let (_node, device, pool) = device_and_pool(1 << 20);
        let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
        let mut sampler = Sampler::new(&pool);
        for _ in 0..lived / 64 {
            let streams: Vec<Stream> = (0..64).map(|_| device.stream().expect("a stream")).collect();
            ::metrics::with_local_recorder(&recorder, || sampler.poll());
            drop(streams);
        }
        recorder.handle().render().len() as f64
    };
    // The first 256 streams have names there, for good: an exporter forgets none.
    let (few, many) = if quick() { (256, 512) } else { (1024, 4096) };
    row(&format!("/metrics after {many} streams"), "bytes", text(few), text(many), 1.1);
}

fn threads() {
    let cost = |count: usize| {
        let (_node, _device, pool) = device_and_pool(64 << 20);
        let all = Arc::new(Barrier::new(count));
        let threads: Vec<_> = (0..count)
            .map(|_| {
                let (pool, all) = (pool.clone(), all.clone());
                std::thread::spawn(move || {
                    drop(pool.checkout(LEN).expect("a buffer"));
                    all.wait();
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().expect("it ends"));
        median(if quick() { 10 } else { 300 }, || _ = std::hint::black_box(pool.stats()))
    };
    let many = if quick() { 64 } else { 1024 };
    row(&format!("stats() after {many} threads have ended"), "us", cost(16), cost(many), 3.0);
}

/// Misses of a thread that uses so many pools by turns, of a hundred checkouts.
fn pools() {
    let misses = |count: usize| {
        let pools: Vec<_> = (0..count).map(|_| device_and_pool(1 << 20)).collect();
        let round = || pools.iter().for_each(|(.., pool)| drop(pool.checkout(LEN).expect("a buffer")));
        let sum = || pools.iter().map(|(.., pool)| pool.stats().misses).sum::<u64>();
        (0..10).for_each(|_| round());
        let before = sum();
        (0..100).for_each(|_| round());
        (sum() - before) as f64 / count as f64
    };
    let (four, five) = (misses(4), misses(5));
    let verdict = if five > 0.0 { "MISSED" } else { "holds" };
    println!(
        "| misses of a thread that uses four, five pools by turns | {four:.2}% | {five:.2}% | | 0%: {verdict} |"
    );
}
