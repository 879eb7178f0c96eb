//! Pushes of 1 and 4 KiB by many threads: how many a second, and their cost to the callers; and a lone push.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use pinpool::copier::Transfer;
use pinpool::{Copier, Device, DeviceBuffer, DeviceSlice, InFlight, PinnedBuf, Pool};

use crate::driver::{self, Driver, Pinned};
use crate::measure::{
    self, Rounds, Spread, at_least, at_most, beside, flag, line, number, numbers, processor_time,
};
use crate::small::{Random, checkout, pool};
use crate::{SEGMENTS, builder};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Bare,
    /// Bare batches by this many threads.
    Batch(usize),
    Stream,
    Push,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Batch(1) => "batch_1",
            Self::Batch(2) => "batch_2",
            Self::Batch(_) => "batch_3",
            Self::Stream => "stream",
            Self::Push => "push",
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
    copier: Copier,
    /// Memory that all threads push to, each to places of its own, as to a cache.
    cache: Option<DeviceBuffer>,
    /// Bytes of a copy, and copies of a burst.
    len: usize,
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
fn ranges(setup: &Setup, t: usize) -> Vec<DeviceSlice> {
    let (len, all) = (setup.len, setup.burst * setup.len);
    let memory = match &setup.cache {
        Some(cache) => cache.slice(t * all..(t + 1) * all).expect("within"),
        None => setup.device.alloc(all).expect("device memory").into(),
    };
    let mut random = Random(11);
    random
        .order(setup.burst)
        .into_iter()
        .map(|i| memory.slice(i * len..(i + 1) * len).expect("within"))
        .collect()
}

fn turn(setup: &Setup, way: Way, threads: usize) -> Turn {
    let (burst, len) = (setup.burst, setup.len);
    match way {
        Way::Bare => bursts(setup, threads, |_| {
            let driver = setup.driver.expect("a driver");
            driver.enter();
            let (stream, event) = (driver.stream(), driver.event());
            let (source, target) = (Pinned::new(driver, burst * len), driver.allocate(burst * len));
            move || {
                let since = Instant::now();
                for i in 0..burst {
                    let to = driver::Address(target.0 + (i * len) as u64);
                    // SAFETY: within both, which live longer than the burst.
                    unsafe { driver.upload(to, source.memory.at(i * len), len, stream) };
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
            let (source, target) = (Pinned::new(driver, burst * len), driver.allocate(burst * len));
            let mut random = Random(7);
            let places: Vec<usize> = random.order(burst).into_iter().map(|i| i * len).collect();
            let mut sources: Vec<u64> =
                // SAFETY: within the memory.
                places.iter().map(|at| unsafe { source.memory.at(*at) } as u64).collect();
            let mut targets: Vec<u64> =
                random.order(burst).into_iter().map(|i| target.0 + (i * len) as u64).collect();
            let mut lengths = vec![len; burst];
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
            let (stream, ranges) = (setup.device.stream().expect("a stream"), ranges(setup, t));
            let mut kept: Vec<PinnedBuf> = (0..burst).map(|i| checkout(&setup.pool, len, t + i)).collect();
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
        Way::Push => bursts(setup, threads, |t| {
            let (copier, ranges) = (setup.copier.clone(), ranges(setup, t));
            let source = vec![t as u8; burst * len];
            let mut sent: Vec<Transfer> = Vec::with_capacity(burst);
            move || {
                let since = Instant::now();
                for (bytes, range) in source.chunks(len).zip(&ranges) {
                    sent.push(copier.push(bytes, range).expect("a push"));
                }
                let call = since.elapsed();
                sent.drain(..).for_each(|sent| sent.wait().expect("the device works"));
                call
            }
        }),
    }
}

pub fn rate(driver: Option<&'static Driver>, device: &Device) {
    let pool = pool(device, 256 << 20);
    for len in numbers("lens", &[1, 4]) {
        of_length(driver, device, &pool, len << 10);
    }
}

fn of_length(driver: Option<&'static Driver>, device: &Device, pool: &Pool, len: usize) {
    let quick = measure::quick();
    let rounds = number("rounds", if quick { 2 } else { 7 });
    let burst = number("burst", 256);
    let pushers = numbers("pushers", &[1, 4, 16]);
    let most = pushers.iter().copied().max().unwrap_or(1);
    let setup = Setup {
        device: device.clone(),
        driver,
        cache: flag("cache").then(|| device.alloc(most * burst * len).expect("device memory")),
        copier: builder(pool, device).share(SEGMENTS / 2).build().expect("a copier"),
        pool: pool.clone(),
        len,
        burst,
        turn: Duration::from_millis(if quick { 20 } else { 100 }),
    };
    let mut ways = vec![Way::Stream, Way::Push];
    if let Some(driver) = driver {
        ways.insert(0, Way::Bare);
        if driver.can_batch() {
            (1..=3).for_each(|batchers| ways.insert(batchers, Way::Batch(batchers)));
        }
    }
    for threads in pushers {
        let (mut rates, mut calls) = (Rounds::new(ways.len()), Rounds::new(ways.len()));
        let (mut worker, mut pushes, mut chunks) = (0.0, 0.0, 0.0);
        let (mut ring, mut launches) = (0.0, 0.0);
        for round in 0..=rounds {
            for i in (0..ways.len()).map(|i| (i + round) % ways.len()) {
                let before = (processor_time("pinpool-copy-"), setup.copier.stats());
                let turn = turn(&setup, ways[i], threads);
                if round == 0 {
                    continue;
                }
                // In thousands of copies a second, since the lines' figures have one decimal.
                rates.add(i, turn.rate / 1e3);
                calls.add(i, turn.call);
                if ways[i] == Way::Push {
                    let after = setup.copier.stats();
                    worker += processor_time("pinpool-copy-").saturating_sub(before.0).as_nanos() as f64;
                    pushes += (after.pushes - before.1.pushes) as f64;
                    chunks += (after.chunks - before.1.chunks) as f64;
                    ring += (after.launched_chunks - before.1.launched_chunks) as f64;
                    launches += (after.launches - before.1.launches) as f64;
                }
            }
        }
        println!("\npushes of {len} bytes, {threads} threads, bursts of {burst}: {rounds} rounds by turns");
        println!("{:<12} {:>12} {:>10}", "", "copies/s, k", "call, ns");
        for (i, way) in ways.iter().enumerate() {
            println!("{:<12} {:>12.0} {:>10.0}", way.name(), rates.spread(i).mid, calls.spread(i).mid);
            line(format!("rate_{}_{len}_kcopies_per_s", way.name()), threads, rates.spread(i));
            line(format!("rate_{}_{len}_call", way.name()), threads, calls.spread(i));
        }
        let at = |way| ways.iter().position(|&w| w == way).expect("it ran");
        let push = at(Way::Push);
        let rate = rates.spread(push).mid;
        println!(
            "pushes: chunks of {:.0}, {:.1} thousand a second, {:.2} of them by the ring, {:.1} a launch; processor time of \
             the copier's threads: {:.0} ns a push, {:.1} us a chunk, {:.2} processors",
            pushes / chunks,
            rate * chunks / pushes,
            ring / chunks,
            ring / f64::max(launches, 1.0),
            worker / pushes,
            worker / chunks / 1e3,
            worker / pushes * rate / 1e6
        );
        beside("the rate of pushes over that of Stream::upload", rates.ratio(push, at(Way::Stream)));
        if driver.is_some() {
            beside("the rate of pushes over that of bare calls", rates.ratio(push, at(Way::Bare)));
        }
        if threads == 16 {
            let best =
                ways.iter().filter(|way| matches!(way, Way::Batch(_))).map(|&way| rates.spread(at(way)).mid);
            if let Some(best) = best.reduce(f64::max) {
                println!("the driver's own batches at best: {:.2} million copies a second", best / 1e3);
                beside(
                    "the rate of pushes over that of the driver's own batches at best",
                    Spread::of(&[rates.spread(push).mid / best]),
                );
            }
            let millions = Spread::of(&rates.values(push).iter().map(|k| k / 1e3).collect::<Vec<_>>());
            let (gate, aim) = if len <= 1 << 10 { (8.0, 20.0) } else { (6.0, 11.0) };
            at_least(
                format!("16 threads, millions of pushes of {len} bytes a second"),
                millions,
                gate,
                Some(aim),
            );
            let micros = Spread::of(&calls.values(push).iter().map(|ns| ns / 1e3).collect::<Vec<_>>());
            at_most(format!("16 threads, us of the caller's a push of {len} bytes"), micros, 2.0, Some(0.5));
        }
    }
}
