//! Copies of 4 KiB by many threads: how many a second, and their cost to the callers.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use pinpool::{CopyQueue, Device, DeviceSlice, InFlight, PinnedBuf, Pool};

use crate::driver::{self, Driver, Pinned};
use crate::measure::{
    self, Rounds, Spread, at_least, at_most, beside, line, number, numbers, processor_time,
};
use crate::{PIECE, Random, checkout, pool, queue};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Bare,
    /// Bare batches by this many threads.
    Batch(usize),
    Stream,
    Queue,
    QueueFresh,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Batch(1) => "batch_1",
            Self::Batch(2) => "batch_2",
            Self::Batch(_) => "batch_3",
            Self::Stream => "stream",
            Self::Queue => "queue",
            Self::QueueFresh => "queue_fresh",
        }
    }
}

/// The figures of a contender's turn: copies a second, and ns of the caller's time a copy.
struct Turn {
    rate: f64,
    call: f64,
}

/// The state that all turns use.
struct Setup {
    device: Device,
    driver: Option<&'static Driver>,
    pool: Pool,
    queue: CopyQueue,
    burst: usize,
    turn: Duration,
}

/// Runs bursts on each thread until the time is over. `make` gets a thread's number and returns its burst, a function
/// that returns the time spent in calls.
fn bursts<B: FnMut() -> Duration>(setup: &Setup, threads: usize, make: impl Fn(usize) -> B + Sync) -> Turn {
    let barrier = Barrier::new(threads + 1);
    let (mut copies, mut call) = (0_u64, Duration::ZERO);
    let mut wall = Duration::ZERO;
    std::thread::scope(|scope| {
        let spawn = |t| {
            let (barrier, make) = (&barrier, &make);
            scope.spawn(move || {
                let mut burst = make(t);
                burst();
                barrier.wait();
                let since = Instant::now();
                let (mut copies, mut call) = (0, Duration::ZERO);
                while since.elapsed() < setup.turn {
                    call += burst();
                    copies += setup.burst as u64;
                }
                (copies, call, since.elapsed())
            })
        };
        let running: Vec<_> = (0..threads).map(spawn).collect();
        barrier.wait();
        for thread in running {
            let (of, time, took) = thread.join().expect("a thread of the bench");
            (copies, call, wall) = (copies + of, call + time, wall.max(took));
        }
    });
    Turn { rate: copies as f64 / wall.as_secs_f64(), call: call.as_nanos() as f64 / copies as f64 }
}

/// A thread's ranges, one for each copy of a burst.
fn ranges(setup: &Setup) -> Vec<DeviceSlice> {
    let memory = setup.device.alloc(setup.burst * PIECE).expect("device memory");
    (0..setup.burst).map(|i| memory.slice(i * PIECE..(i + 1) * PIECE).expect("within")).collect()
}

fn turn(setup: &Setup, way: Way, threads: usize) -> Turn {
    let burst = setup.burst;
    match way {
        Way::Bare => bursts(setup, threads, |_| {
            let driver = setup.driver.expect("a driver");
            driver.enter();
            let (stream, event) = (driver.stream(), driver.event());
            let (source, target) = (Pinned::new(driver, burst * PIECE), driver.allocate(burst * PIECE));
            move || {
                let since = Instant::now();
                for i in 0..burst {
                    let to = driver::Address(target.0 + (i * PIECE) as u64);
                    // SAFETY: within both, which live longer than the burst.
                    unsafe { driver.upload(to, source.memory.at(i * PIECE), PIECE, stream) };
                }
                driver.record(event, stream);
                let call = since.elapsed();
                while !driver.is_done(event) {
                    measure::spin(Duration::from_micros(2));
                }
                call
            }
        }),
        Way::Batch(batchers) => bursts(setup, batchers, |_| {
            let driver = setup.driver.expect("a driver");
            driver.enter();
            let (stream, event) = (driver.stream(), driver.event());
            let count = burst.min(256);
            let (source, target) = (Pinned::new(driver, burst * PIECE), driver.allocate(burst * PIECE));
            let mut random = Random(7);
            let places: Vec<usize> = random.order(burst).into_iter().map(|i| i * PIECE).collect();
            let mut sources: Vec<u64> =
                // SAFETY: within the memory.
                places.iter().map(|at| unsafe { source.memory.at(*at) } as u64).collect();
            let mut targets: Vec<u64> =
                random.order(burst).into_iter().map(|i| target.0 + (i * PIECE) as u64).collect();
            let mut lengths = vec![PIECE; burst];
            move || {
                let _kept = &source;
                let since = Instant::now();
                for ((to, from), len) in
                    targets.chunks_mut(count).zip(sources.chunks_mut(count)).zip(lengths.chunks_mut(count))
                {
                    // SAFETY: within both, which live longer than the burst, and each place once.
                    unsafe { driver.batch(to, from, len, stream) };
                }
                driver.record(event, stream);
                let call = since.elapsed();
                while !driver.is_done(event) {
                    measure::spin(Duration::from_micros(2));
                }
                call
            }
        }),
        Way::Stream => bursts(setup, threads, |t| {
            let (stream, ranges) = (setup.device.stream().expect("a stream"), ranges(setup));
            let mut kept: Vec<PinnedBuf> = (0..burst).map(|i| checkout(&setup.pool, PIECE, t + i)).collect();
            let mut flights: Vec<InFlight<PinnedBuf>> = Vec::with_capacity(burst);
            move || {
                let since = Instant::now();
                for (buf, range) in kept.drain(..).zip(&ranges) {
                    flights.push(stream.upload(buf, range).expect("a copy"));
                }
                let call = since.elapsed();
                kept.extend(flights.drain(..).map(|flight| flight.wait().expect("the device works")));
                call
            }
        }),
        Way::Queue => bursts(setup, threads, |t| {
            let (queue, ranges) = (setup.queue.clone(), ranges(setup));
            let mut kept: Vec<PinnedBuf> = (0..burst).map(|i| checkout(&setup.pool, PIECE, t + i)).collect();
            let mut flights: Vec<InFlight<PinnedBuf>> = Vec::with_capacity(burst);
            move || {
                let since = Instant::now();
                for (buf, range) in kept.drain(..).zip(&ranges) {
                    flights.push(queue.upload(buf, range).expect("a copy"));
                }
                let call = since.elapsed();
                kept.extend(flights.drain(..).map(|flight| flight.wait().expect("the device works")));
                call
            }
        }),
        Way::QueueFresh => bursts(setup, threads, |_| {
            let (queue, ranges) = (setup.queue.clone(), ranges(setup));
            move || {
                let mut last = None;
                let since = Instant::now();
                for range in &ranges {
                    let mut buf = setup.pool.checkout(PIECE).expect("room in the pool");
                    // SAFETY: the bytes are initialised, by the pool's filling or by the system's; filling is not part
                    // of the measurement.
                    unsafe { buf.assume_written(PIECE) };
                    last = Some(queue.upload(buf, range).expect("a copy"));
                }
                let call = since.elapsed();
                if let Some(last) = last {
                    drop(last.wait().expect("the device works"));
                }
                call
            }
        }),
    }
}

pub fn rate(driver: Option<&'static Driver>, device: &Device) {
    let quick = measure::quick();
    let rounds = number("rounds", if quick { 2 } else { 7 });
    let burst = number("burst", 256);
    let setup = Setup {
        device: device.clone(),
        driver,
        pool: pool(device, 256 << 20),
        queue: queue(device),
        burst,
        turn: Duration::from_millis(if quick { 20 } else { 100 }),
    };
    let mut ways = vec![Way::Stream, Way::Queue, Way::QueueFresh];
    if let Some(driver) = driver {
        ways.insert(0, Way::Bare);
        if driver.can_batch() {
            (1..=3).for_each(|batchers| ways.insert(batchers, Way::Batch(batchers)));
        }
    }
    for threads in numbers("threads", &[1, 4, 16]) {
        let (mut rates, mut calls) = (Rounds::new(ways.len()), Rounds::new(ways.len()));
        let (mut sender, mut reaper, mut copies, mut batches) = (0.0, 0.0, 0.0, 0.0);
        for round in 0..=rounds {
            for i in (0..ways.len()).map(|i| (i + round) % ways.len()) {
                let before =
                    (processor_time("pinpool-send-"), processor_time("pinpool-reap-"), setup.queue.stats());
                let turn = turn(&setup, ways[i], threads);
                if round == 0 {
                    continue;
                }
                // In thousands of copies a second, since the lines' figures have one decimal.
                rates.add(i, turn.rate / 1e3);
                calls.add(i, turn.call);
                if ways[i] == Way::Queue {
                    let after = setup.queue.stats();
                    sender += processor_time("pinpool-send-").saturating_sub(before.0).as_nanos() as f64;
                    reaper += processor_time("pinpool-reap-").saturating_sub(before.1).as_nanos() as f64;
                    copies += (after.copies - before.2.copies) as f64;
                    batches += (after.batches - before.2.batches) as f64;
                }
            }
        }
        println!(
            "\nrate, {PIECE} bytes a copy, {threads} threads, bursts of {burst}: {rounds} rounds by turns"
        );
        println!("{:<12} {:>12} {:>10}", "", "copies/s, k", "call, ns");
        for (i, way) in ways.iter().enumerate() {
            println!("{:<12} {:>12.0} {:>10.0}", way.name(), rates.spread(i).mid, calls.spread(i).mid);
            line(format!("rate_{}_{PIECE}_kcopies_per_s", way.name()), threads, rates.spread(i));
            line(format!("rate_{}_{PIECE}_call", way.name()), threads, calls.spread(i));
        }
        println!(
            "queue: batches of {:.0} copies; processor time a copy: {:.0} ns of its thread's, {:.0} ns of the reaper's",
            copies / batches,
            sender / copies,
            reaper / copies
        );
        let at = |way| ways.iter().position(|&w| w == way).expect("it ran");
        let queue = at(Way::Queue);
        beside("the queue's rate over that of Stream::upload", rates.ratio(queue, at(Way::Stream)));
        if driver.is_some() {
            beside("the queue's rate over that of bare calls", rates.ratio(queue, at(Way::Bare)));
        }
        if threads == 16 {
            let best =
                ways.iter().filter(|way| matches!(way, Way::Batch(_))).map(|&way| rates.spread(at(way)).mid);
            if let Some(best) = best.reduce(f64::max) {
                println!("the driver's own batches at best: {:.2} million copies a second", best / 1e3);
                beside(
                    "the queue's rate over that of the driver's own batches at best",
                    Spread::of(&[rates.spread(queue).mid / best]),
                );
            }
            let millions = Spread::of(&rates.values(queue).iter().map(|k| k / 1e3).collect::<Vec<_>>());
            at_least(
                "16 threads through the queue, millions of 4 KiB copies a second",
                millions,
                2.0,
                Some(3.0),
            );
            let micros = Spread::of(&calls.values(queue).iter().map(|ns| ns / 1e3).collect::<Vec<_>>());
            at_most("16 threads through the queue, us of the caller's a copy", micros, 0.5, Some(0.1));
        }
    }
}
