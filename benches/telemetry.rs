//! The cost of telemetry, to the threads that use the pool and to its caller.
//!
//! *Watched.* Threads check out and return, each from its own cache, in one run without an end. Meanwhile the sampler's
//! thread polls or sleeps, by slices of a few milliseconds in the order off, on, on, off. A subscriber is installed and
//! takes the events. Other load on the machine affects both states alike, and drift cancels: each four slices give a
//! ratio of on to off, and the result is the median of hundreds of these ratios. With a poll in each slice this is a
//! hundred polls a second, a thousand times the usual rate. The gate is on the threads' processor time for a pair, plus
//! the sampler's own processor time as a share of the slice and the threads, as if every poll kept the threads from
//! their work. So it includes the effect of polls on the threads, and not that of other programs on a busy machine.
//!
//! *Polls, snapshots and looks*: their cost to the caller, on a pool with many segments out. A look for stuck buffers
//! is timed on a pool that tracks its checkouts, with no buffer old enough and with all of them (`_all`), as the sampler
//! takes it and as a report takes it, by the thousand buffers.
//!
//! *Tracked*: a checkout and return of a pool that tracks its checkouts, beside one that does not.
//!
//! `--quick` only shows that the bench runs. `--threads A,B` sets the numbers of threads, `--quads N` the number of
//! four slices, `--slice MS` their length, `--rounds N` the rounds of the other parts.

#![allow(unsafe_code, reason = "what the benches share asks the system for its clock")]

mod measure;

use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use measure::{Rounds, Spread, at_most, judge, line, number, numbers, quick};
use pinpool::telemetry::Sampler;
use pinpool::{Device, Pool, Unpinned};

/// Pairs between two readings of the clock.
const BURST: u32 = 2_000;

/// A subscriber's layer that takes every event and keeps none.
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

/// ns a pair, over `time`.
fn pairs(pool: &Pool, time: Duration) -> f64 {
    drop(pool.checkout(4096));
    let (since, mut count) = (Instant::now(), 0u64);
    while since.elapsed() < time {
        for _ in 0..BURST {
            drop(black_box(pool.checkout(4096)));
        }
        count += u64::from(BURST);
    }
    since.elapsed().as_nanos() as f64 / count as f64
}

/// A worker's slice: pairs, and nanoseconds of processor time.
#[derive(Clone, Copy, Default)]
struct Done {
    pairs: f64,
    processor: f64,
}

/// Processor time of this thread.
fn processor() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a local timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The number after the last slice: the run is over.
const OVER: usize = usize::MAX;

/// Checks out and returns until the run is over. Returns what it did in each slice.
fn worker(pool: &Pool, slice: &AtomicUsize) -> Vec<Done> {
    const SHORT: u32 = 200;
    let mut all = Vec::new();
    drop(pool.checkout(4096));
    // Relaxed: no other data depends on the slice's number.
    let mut now = slice.load(Ordering::Relaxed);
    while now != OVER {
        let (mut count, used) = (0u64, processor());
        loop {
            for _ in 0..SHORT {
                drop(black_box(pool.checkout(4096)));
            }
            count += u64::from(SHORT);
            let next = slice.load(Ordering::Relaxed);
            if next != now {
                let processor = processor().saturating_sub(used).as_nanos() as f64;
                // Slices that passed while this thread slept have no figures.
                all.resize(now, Done::default());
                all.push(Done { pairs: count as f64, processor });
                now = next;
                break;
            }
        }
    }
    all
}

fn watched(device: &Device, threads: usize, quads: usize, length: Duration) {
    let pool = pool(device, false);
    let slice = AtomicUsize::new(0);
    let (wake, woken) = sync_channel::<()>(1);
    let (all, spent) = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(|| worker(&pool, &slice))).collect();
        let mut sampler = Sampler::new(&pool).stuck_after(Duration::MAX);
        let sampling = scope.spawn(move || {
            // The first poll sends everything; the measured polls send only changes.
            sampler.poll();
            let (mut spent, mut before) = (Vec::new(), processor());
            while woken.recv().is_ok() {
                sampler.poll();
                let now = processor();
                spent.push((now - before).as_nanos() as f64);
                before = now;
            }
            spent
        });
        std::thread::sleep(length);
        for at in 1..=4 * quads {
            slice.store(at, Ordering::Relaxed);
            if matches!(at % 4, 2 | 3) {
                wake.send(()).expect("a sampler");
            }
            std::thread::sleep(length);
        }
        slice.store(OVER, Ordering::Relaxed);
        drop(wake);
        let all: Vec<Vec<Done>> = workers.into_iter().map(|w| w.join().expect("a worker")).collect();
        (all, sampling.join().expect("the sampler"))
    });
    let mut rounds = Rounds::new(2);
    for quad in 0..quads {
        let sum = |slices: [usize; 2]| {
            let parts = all
                .iter()
                .flat_map(|done| slices.map(|n| done.get(4 * quad + n).copied().unwrap_or_default()));
            parts.fold(Done::default(), |a, b| Done {
                pairs: a.pairs + b.pairs,
                processor: a.processor + b.processor,
            })
        };
        let [off, on] = [sum([1, 4]), sum([2, 3])];
        if off.pairs > 0.0 && on.pairs > 0.0 {
            // Each four slices have two with polls: the sampler's time as a share of the threads' time in these two.
            let polls: f64 = spent[2 * quad..].iter().take(2).sum();
            let share = polls / (2.0 * length.as_nanos() as f64 * threads as f64);
            for (contender, (done, share)) in [(off, 0.0), (on, share)].into_iter().enumerate() {
                rounds.add(contender, done.processor / done.pairs * (1.0 + share));
            }
        }
    }
    let what =
        format!("a pair while a sampler polls every {length:?}, over one while it sleeps, {threads} threads");
    line("telemetry_pair_unwatched", threads, rounds.spread(0));
    line("telemetry_pair_watched", threads, rounds.spread(1));
    at_most(what, rounds.ratio(1, 0), 1.02, None);
    let polls: Vec<f64> = spent.iter().map(|nanos| nanos / 1e3).collect();
    line("telemetry_polled_us", threads, Spread::of(&polls));
}

/// us of processor time of one call.
fn call(rounds: usize, mut run: impl FnMut()) -> Spread {
    let times: Vec<f64> = (0..rounds)
        .map(|_| {
            let before = processor();
            run();
            (processor() - before).as_nanos() as f64 / 1e3
        })
        .collect();
    Spread::of(&times)
}

fn main() {
    use tracing_subscriber::layer::SubscriberExt;
    let subscriber = tracing_subscriber::registry().with(Taker);
    tracing::subscriber::set_global_default(subscriber).expect("the only subscriber");
    // Gates are judged on the host device as well: no device is measured here.
    judge();
    let device = Device::open("host").expect("a host device");
    let (rounds, time) =
        if quick() { (2, Duration::from_millis(20)) } else { (15, Duration::from_millis(400)) };
    let rounds = number("rounds", rounds);
    let quads = number("quads", if quick() { 3 } else { 250 });
    let slice = Duration::from_millis(number("slice", if quick() { 2 } else { 10 }) as u64);
    for threads in numbers("threads", &[1, 2]) {
        watched(&device, threads, quads, slice);
    }

    let tracked = pool(&device, true);
    let plain = pool(&device, false);
    let mut both = Rounds::new(2);
    for _ in 0..rounds {
        both.add(0, pairs(&plain, time / 4));
        both.add(1, pairs(&tracked, time / 4));
    }
    line("telemetry_pair_tracked", 1, both.spread(1));

    // Some fifty thousand segments of 4 KiB, half of them out.
    let count = if quick() { 1_000 } else { 50_000 };
    let out: Vec<_> = (0..count).filter_map(|_| plain.try_checkout(4096).ok()).step_by(2).collect();
    line("telemetry_stats_us", 1, call(rounds, || _ = black_box(plain.stats())));
    line("telemetry_snapshot_us", 1, call(rounds, || _ = black_box(plain.snapshot())));
    let mut sampler = Sampler::new(&plain).stuck_after(Duration::MAX);
    line("telemetry_poll_us", 1, call(rounds, || _ = sampler.poll()));
    drop(out);
    let out: Vec<_> = (0..count / 2).filter_map(|_| tracked.try_checkout(4096).ok()).collect();
    let thousands = out.len() as f64 / 1e3;
    for (name, after) in [("", Duration::MAX), ("_all", Duration::ZERO)] {
        let Spread { low, mid, high } = call(rounds * 4, || _ = black_box(tracked.stuck(after)));
        let each = Spread { low: low / thousands, mid: mid / thousands, high: high / thousands };
        line(format!("telemetry_stuck{name}_us_a_thousand"), 1, each);
    }
    drop(out);
    measure::used();
}
