//! What looking costs those who are looked at.
//!
//! Threads check out and return, each from its own cache, while nobody looks (0), while a sampler polls ten times a second
//! and a subscriber takes its events (1), and the same with looks for stuck buffers at every poll (2). The three take turns
//! in one run; what counts is the ratio to the first. The subscriber keeps nothing, but is asked and told like any other.
//!
//! Besides: what a snapshot and a look cost whoever takes them, on a pool with many segments; and a checkout and return of a
//! pool that tracks its checkouts, beside one that does not.
//!
//! `--quick` is for a look that it runs. `--threads A,B` names the numbers of threads, `--rounds N` the rounds.

#![allow(unsafe_code, reason = "what the benches share asks the system for its clock")]

mod measure;

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use measure::{Rounds, Spread, at_most, beside, judge, line, number, numbers, quick};
use pinpool::telemetry::Sampler;
use pinpool::{Device, Pool, Unpinned};

/// Pairs between two looks at the clock.
const BURST: u32 = 2_000;

/// Takes every event and span, and keeps none.
struct Taker;

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Taker {
    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        struct Look;
        impl tracing::field::Visit for Look {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                black_box((field.name(), std::ptr::from_ref(value).addr()));
            }
        }
        event.record(&mut Look);
    }
}

fn pool(device: &Device, track: bool) -> Pool {
    let builder = Pool::builder(device).capacity(256 << 20).unpinned(Unpinned::Allow);
    let pool = builder.track_checkouts(track).build().expect("a pool");
    pool.wait_pinned(None).expect("pinned");
    pool
}

/// ns a pair, of the slowest thread, over so long.
fn pairs(pool: &Pool, threads: usize, time: Duration) -> f64 {
    let go = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let work = || {
            drop(pool.checkout(4096));
            while !go.load(Ordering::Acquire) {
                std::hint::spin_loop();
            }
            let (since, mut count) = (Instant::now(), 0u64);
            while since.elapsed() < time {
                for _ in 0..BURST {
                    drop(black_box(pool.checkout(4096)));
                }
                count += u64::from(BURST);
            }
            since.elapsed().as_nanos() as f64 / count as f64
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        go.store(true, Ordering::Release);
        workers.into_iter().map(|worker| worker.join().expect("a worker")).fold(0.0, f64::max)
    })
}

fn watched(device: &Device, threads: usize, rounds: usize, time: Duration) {
    let pool = pool(device, false);
    let mut all = Rounds::new(3);
    for _ in 0..rounds {
        for contender in 0..3 {
            let after = if contender == 2 { Duration::from_millis(1) } else { Duration::MAX };
            let sampler = Sampler::new(&pool).stuck_after(after);
            let sampling = (contender > 0).then(|| sampler.spawn(Duration::from_millis(100)));
            all.add(contender, pairs(&pool, threads, time));
            drop(sampling);
        }
    }
    line("telemetry_pair_unwatched", threads, all.spread(0));
    at_most(
        format!("a pair under a sampler, over one without, {threads} threads"),
        all.ratio(1, 0),
        1.02,
        None,
    );
    beside(format!("the same, looked at ten times a second, {threads} threads"), all.ratio(2, 0));
}

/// us of one call.
fn call(rounds: usize, mut run: impl FnMut()) -> Spread {
    let times: Vec<f64> = (0..rounds)
        .map(|_| {
            let since = Instant::now();
            run();
            since.elapsed().as_nanos() as f64 / 1e3
        })
        .collect();
    Spread::of(&times)
}

fn main() {
    use tracing_subscriber::layer::SubscriberExt;
    let subscriber = tracing_subscriber::registry().with(Taker);
    tracing::subscriber::set_global_default(subscriber).expect("the only subscriber");
    // No device is measured here.
    judge();
    let device = Device::open("host").expect("a host device");
    let (rounds, time) =
        if quick() { (2, Duration::from_millis(20)) } else { (15, Duration::from_millis(400)) };
    let rounds = number("rounds", rounds);
    for threads in numbers("threads", &[1, 2]) {
        watched(&device, threads, rounds, time);
    }

    let tracked = pool(&device, true);
    let plain = pool(&device, false);
    let mut both = Rounds::new(2);
    for _ in 0..rounds {
        both.add(0, pairs(&plain, 1, time / 4));
        both.add(1, pairs(&tracked, 1, time / 4));
    }
    line("telemetry_pair_tracked", 1, both.spread(1));

    // Some fifty thousand segments of 4 KiB, half of them out.
    let count = if quick() { 1_000 } else { 50_000 };
    let out: Vec<_> = (0..count).filter_map(|_| plain.try_checkout(4096).ok()).step_by(2).collect();
    line("telemetry_stats_us", 1, call(rounds, || _ = black_box(plain.stats())));
    line("telemetry_snapshot_us", 1, call(rounds, || _ = black_box(plain.snapshot())));
    line("telemetry_stuck_us", 1, call(rounds, || _ = black_box(plain.stuck(Duration::ZERO))));
    drop(out);
}
