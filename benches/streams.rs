//! What grows with the number of streams, of threads that have ended, of pools and of sizes: each row is the cost at its
//! large end over the cost at its small end, in one run, on the host device.
//!
//! | row | small end | large end |
//! | --- | --- | --- |
//! | a failing try, `stats()`, an upload and its wait | 16 streams open | 4,096 open: idle, and all but one hung |
//! | the reaper's share of a core | 16 streams hung | 4,096 hung, and 4,095 hung beside one that works |
//! | a sampler's poll | 256 streams open | 4,096 open (16 times as many) |
//! | the text of `/metrics` (feature `metrics`) | after 1,024 streams came and went | after 4,096 did |
//! | `stats()` after threads have ended | 16 threads | 1,024 threads |
//! | misses of small checkouts beside large ones of nine sizes | one size | nine sizes |
//! | misses of a thread that uses pools by turns | four pools | five pools |
//!
//! The last two are counts for a hundred checkouts, and not times. `--quick` only shows that the bench runs, `--only`
//! chooses among `streams`, `metrics`, `threads`, `sizes` and `pools`.

#![allow(unsafe_code, reason = "what the benches share asks the system for its clock")]

mod measure;

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use measure::{Spread, processor_time, quick, wanted};
use pinpool::host::{HostConfig, HostNode};
use pinpool::telemetry::Sampler;
use pinpool::{Device, DeviceSlice, InFlight, PinnedBuf, Pool, Stream, Unpinned};

const LEN: usize = 1024;

fn main() {
    println!("row | small end | large end | ratio");
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
    if wanted("sizes") {
        sizes();
    }
    if wanted("pools") {
        pools();
    }
}

/// Prints a row, and holds its ratio to the gate.
fn row(what: &str, unit: &str, small: f64, large: f64, gate: f64) {
    let ratio = large / small.max(f64::MIN_POSITIVE);
    let verdict = if ratio <= gate { "holds" } else { "MISSED" };
    println!("{what} | {small:.2} {unit} | {large:.2} {unit} | {ratio:.2}, at most {gate}: {verdict}");
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
        let node = HostNode::new(HostConfig::new()).expect("a node");
        let device = Device::on(&node, 0).expect("a device");
        let pool =
            Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build().expect("a pool");
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
        for at in 1..self.streams.len() {
            assert!(self.node.hang_stream(0, at), "a stream");
        }
        self.hung = (1..self.streams.len()).map(|at| self.upload(at)).collect();
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

    /// The reaper's share of a core, in per cent, while this thread does nothing, or uploads every 200 us.
    fn reaper(&self, works: bool) -> f64 {
        let time = Duration::from_millis(if quick() { 20 } else { 1000 });
        let (before, since) = (processor_time("pinpool-reap"), Instant::now());
        while since.elapsed() < time {
            if works {
                drop(self.upload(0).wait().expect("an upload"));
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        let used = processor_time("pinpool-reap") - before;
        used.as_secs_f64() / since.elapsed().as_secs_f64() * 100.0
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
    // The other device's reaper is among these, too: it has few streams.
    println!("the reaper, {many} streams hung | | {:.1}% of a core |", open.reaper(false));
    println!("the reaper, one of {many} streams works | | {:.1}% of a core |", open.reaper(true));
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
        let node = HostNode::new(HostConfig::new()).expect("a node");
        let device = Device::on(&node, 0).expect("a device");
        let pool =
            Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build().expect("a pool");
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
        let node = HostNode::new(HostConfig::new()).expect("a node");
        let device = Device::on(&node, 0).expect("a device");
        let pool =
            Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build().expect("a pool");
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

/// Misses of small checkouts, of a hundred, beside large ones of so many sizes.
fn sizes() {
    let misses = |sizes: usize| {
        let node = HostNode::new(HostConfig::new()).expect("a node");
        let device = Device::on(&node, 0).expect("a device");
        let pool =
            Pool::builder(&device).capacity(256 << 20).unpinned(Unpinned::Allow).build().expect("a pool");
        let (mut missed, mut all) = (0, 0);
        for round in 0..if quick() { 20 } else { 500 } {
            for size in 0..sizes {
                drop(pool.checkout((128 << 10) * (size + 4) / 4).expect("a large buffer"));
                for len in [100, 1000, 4096, 10_000] {
                    let before = pool.stats().misses;
                    drop(pool.checkout(len).expect("a small buffer"));
                    // The first rounds fill the cache.
                    if round > 2 {
                        missed += pool.stats().misses - before;
                        all += 1;
                    }
                }
            }
        }
        missed as f64 / f64::from(all) * 100.0
    };
    let (one, nine) = (misses(1), misses(9));
    println!("misses of small checkouts beside nine large sizes | {one:.2}% | {nine:.2}% | at most 1%");
}

/// Misses of a thread that uses so many pools by turns, of a hundred checkouts.
fn pools() {
    let misses = |count: usize| {
        let node = HostNode::new(HostConfig::new()).expect("a node");
        let device = Device::on(&node, 0).expect("a device");
        let build =
            |_| Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build().expect("a pool");
        let pools: Vec<Pool> = (0..count).map(build).collect();
        let round = || pools.iter().for_each(|pool| drop(pool.checkout(LEN).expect("a buffer")));
        let sum = || pools.iter().map(|pool| pool.stats().misses).sum::<u64>();
        (0..10).for_each(|_| round());
        let before = sum();
        (0..100).for_each(|_| round());
        (sum() - before) as f64 / count as f64
    };
    let (four, five) = (misses(4), misses(5));
    println!("misses with pools by turns | {four:.2}% | {five:.2}% | at most 0%");
}
