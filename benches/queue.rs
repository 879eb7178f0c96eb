//! Small copies through the copy queue, beside the same copies submitted by their threads.
//!
//! # Rate (`--only rate`)
//!
//! Threads upload 4 KiB again and again, each to a range of its own. A thread pushes a burst, then waits until the burst's
//! copies are done, and begins again, as a server's worker does with a request; in this time the other threads push theirs.
//!
//! | contender | a copy is |
//! | --- | --- |
//! | `bare` | `cuMemcpyHtoDAsync` on a stream of the thread's; the burst ends with an event that is asked about |
//! | `batch` | one thread alone (or `--batchers`, each with a stream): `cuMemcpyBatchAsync` of 256 copies, the lists made before; what the driver can do at best |
//! | `stream` | `Stream::upload` on a stream of the thread's, of a buffer that the thread keeps |
//! | `queue` | `CopyQueue::upload` of a buffer that the thread keeps, waited for one handle after the other |
//! | `queue_fresh` | `checkout`, `CopyQueue::upload`, drop of the handle, but for the last of a burst, which is waited for |
//!
//! *rate* is copies a second of all threads together, wall time of everything. *call* is the time of a thread in its calls
//! (for `queue_fresh` the checkout is in it, and the drop), by copies: what submitting costs the caller.
//!
//! # A lone copy (`--only lone`)
//!
//! One thread, one copy of 4 KiB at a time, from before the call until `wait` returns: through the idle queue, and on a
//! stream. Once back to back, once with 2 ms of sleep before each.
//!
//! # Scattered pieces (`--only scatter`)
//!
//! Pieces of 16 and 64 KiB between random places of pinned buffers and random places of device memory, in both directions,
//! by 1 and by 4 pushing threads, against the pinned peak: the best of five copies of 64 MiB in the same direction. All
//! bytes are compared when the time is taken.
//!
//! # Gather (`--only gather`)
//!
//! 16,384 pieces of 16 KiB of pageable memory, in no order, to neighbouring places of device memory, and back to where they
//! were: `CopyQueue::gather` and `scatter_blocking`, by 1, 4 and 8 threads with a part of the pieces each, against the same
//! peak.
//!
//! # Running it
//!
//! `cargo bench --bench queue`, or the executable by itself; `--quick`, `--rounds`, `--threads 1,16`, `--burst`,
//! `--submitters` (of the queue) change what they say. Without a GPU the contenders of the pool run alone, on the host device: that shows that they run.
#![allow(missing_docs, unsafe_code)]

mod driver;
mod measure;

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use driver::{Driver, Pinned};
use measure::{
    Rounds, Spread, at_least, at_most, beside, line, number, numbers, processor_time, quantile, wanted,
};
use pinpool::{CopyQueue, Device, DeviceSlice, InFlight, PinnedBuf, Pool, QueueOptions, Unpinned};

const PIECE: usize = 4 << 10;

fn pool(device: &Device, capacity: usize) -> Pool {
    let builder = Pool::builder(device).capacity(capacity).initial(capacity);
    // On the host device it does not matter here whether pages are locked.
    let builder = if device.name().starts_with("host") { builder.unpinned(Unpinned::Allow) } else { builder };
    let pool = builder.build().expect("memory for a pool");
    let pinning = pool.wait_pinned(None).expect("pinning ends");
    assert!(pinning.error.is_none(), "{pinning:?}");
    pool
}

fn queue(device: &Device) -> CopyQueue {
    let options = QueueOptions::new();
    match number("submitters", 0) {
        0 => device.copy_queue().expect("a queue"),
        n => device.copy_queue_with(options.threads(n)).expect("a queue"),
    }
}

fn checkout(pool: &Pool, len: usize, seed: usize) -> PinnedBuf {
    let mut buf = pool.checkout(len).expect("room in the pool");
    buf.try_resize(len, seed as u8).expect("as long as that");
    buf
}

/// Random numbers, the same ones each time.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }

    /// 0 to `count`, in any order.
    fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for i in (1..count).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

// --- rate --------------------------------------------------------------------------------------------------------------

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Bare,
    Batch,
    Stream,
    Queue,
    QueueFresh,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Batch => "batch",
            Self::Stream => "stream",
            Self::Queue => "queue",
            Self::QueueFresh => "queue_fresh",
        }
    }
}

/// What one turn of a contender took: copies a second, and ns of the caller's a copy.
struct Turn {
    rate: f64,
    call: f64,
}

/// What all turns use.
struct Setup {
    device: Device,
    driver: Option<&'static Driver>,
    pool: Pool,
    queue: CopyQueue,
    burst: usize,
    turn: Duration,
}

/// Runs bursts on each thread until the time is up. `make` gets a thread's number and makes its burst, which returns the
/// time spent in calls.
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
        Way::Batch => bursts(setup, number("batchers", 1), |_| {
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
                    // SAFETY: filled when the pool was made, or by the system; filling is no part of what is measured.
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

fn rate(driver: Option<&'static Driver>, device: &Device) {
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
            ways.insert(1, Way::Batch);
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
                // In thousands of copies a second, as the lines' figures have one digit.
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

// --- a lone copy -------------------------------------------------------------------------------------------------------

fn lone(device: &Device) {
    let rounds = number("rounds", if measure::quick() { 5 } else { 31 });
    let pool = pool(device, 4 << 20);
    let (stream, queue) = (device.stream().expect("a stream"), queue(device));
    let memory = device.alloc(PIECE).expect("device memory");
    let mut buf = Some(checkout(&pool, PIECE, 1));
    let mut once = |queued: bool| -> f64 {
        let since = Instant::now();
        let own = buf.take().expect("it came back");
        let flight = if queued { queue.upload(own, &memory) } else { stream.upload(own, &memory) };
        buf = Some(flight.expect("a copy").wait().expect("the device works"));
        since.elapsed().as_nanos() as f64
    };
    for (title, idle, samples) in [("back to back", 0, 64), ("after 2 ms without work", 2, 16)] {
        let mut medians = Rounds::new(2);
        for round in 0..=rounds {
            for i in [round % 2, (round + 1) % 2] {
                // So that the queue's thread has gone to sleep.
                std::thread::sleep(Duration::from_millis(1));
                let one = |_| {
                    if idle > 0 {
                        std::thread::sleep(Duration::from_millis(idle));
                    }
                    once(i == 1)
                };
                let taken: Vec<f64> = (0..samples).map(one).collect();
                if round > 0 {
                    medians.add(i, quantile(&taken, 0.5));
                }
            }
        }
        println!("\na lone copy of {PIECE} bytes, {title}: {rounds} rounds by turns, {samples} copies each");
        for (i, name) in ["stream", "queue"].into_iter().enumerate() {
            println!("{name:<12} {:>9.0} ns", medians.spread(i).mid);
            line(format!("lone_{name}_{PIECE}{}", if idle > 0 { "_idle" } else { "" }), 1, medians.spread(i));
        }
        at_most(
            format!("a lone copy through the queue over the direct one, {title}"),
            medians.ratio(1, 0),
            1.2,
            None,
        );
    }
}

// --- scattered pieces --------------------------------------------------------------------------------------------------

fn scatter(device: &Device) {
    let quick = measure::quick();
    let rounds = number("rounds", if quick { 2 } else { 7 });
    let total = if quick { 16 << 20 } else { 256 << 20 };
    let whole = 64 << 20;
    let pool = pool(device, total + 2 * whole + (64 << 20));
    let (queue, stream) = (queue(device), device.stream().expect("a stream"));
    let memory = device.alloc(total.max(whole)).expect("device memory");
    for upload in [true, false] {
        for piece in [16 << 10, 64 << 10] {
            for threads in [1, 4] {
                let mut ratios = Vec::new();
                let mut best = 0.0_f64;
                for _ in 0..=rounds {
                    let peak = peak(&pool, &stream, &memory, whole, upload);
                    let rate = pieces(device, &pool, &queue, &memory, total, piece, threads, upload);
                    ratios.push(rate / peak);
                    best = best.max(rate);
                }
                ratios.remove(0);
                let (kib, way) = (piece >> 10, if upload { "up" } else { "down" });
                let spread = Spread::of(&ratios);
                println!("\nscattered pieces of {kib} KiB, {way}, {threads} threads: {best:.1} GB/s at best");
                let name = format!("pieces of {kib} KiB, {way}, {threads} threads, of the pinned peak");
                line(
                    format!("scatter_{way}_{kib}k_permille"),
                    threads,
                    Spread::of(&ratios.iter().map(|r| r * 1e3).collect::<Vec<_>>()),
                );
                let (gate, aim) = if piece == 16 << 10 { (0.75, 0.85) } else { (0.94, 0.97) };
                at_least(name, spread, gate, Some(aim));
            }
        }
    }
}

// --- gather ------------------------------------------------------------------------------------------------------------

fn gather(device: &Device) {
    const LEN: usize = 16 << 10;
    let quick = measure::quick();
    let rounds = number("rounds", if quick { 2 } else { 7 });
    let count = if quick { 512 } else { 16_384 };
    let whole = 64 << 20;
    let pool = pool(device, 256 << 20);
    let (queue, stream) = (queue(device), device.stream().expect("a stream"));
    let memory = device.alloc((count * LEN).max(whole)).expect("device memory");
    let sources: Vec<Vec<u8>> = (0..count).map(|i| vec![(i * 7 + 3) as u8; LEN]).collect();
    for threads in [1, 4, 8] {
        let (mut up, mut down) = (Vec::new(), Vec::new());
        for _ in 0..=rounds {
            let order = Random(5).order(count);
            let range = |place: usize| memory.slice(place * LEN..(place + 1) * LEN).expect("within");
            let mut pieces: Vec<Vec<(&[u8], DeviceSlice)>> = (0..threads).map(|_| Vec::new()).collect();
            // Each thread's places are neighbours, their sources anywhere.
            for place in 0..count {
                pieces[place * threads / count].push((&sources[order[place]], range(place)));
            }
            let peak_up = peak(&pool, &stream, &memory, whole, true);
            let since = Instant::now();
            std::thread::scope(|scope| {
                for pieces in &pieces {
                    scope.spawn(|| queue.gather_blocking(&pool, pieces).expect("the device works"));
                }
            });
            let took = since.elapsed();
            up.push((count * LEN) as f64 / took.as_nanos() as f64 / peak_up);
            let peak_down = peak(&pool, &stream, &memory, whole, false);
            let mut back: Vec<Vec<u8>> = (0..count).map(|_| vec![1; LEN]).collect();
            let mut targets: Vec<Vec<(DeviceSlice, &mut [u8])>> = (0..threads).map(|_| Vec::new()).collect();
            for (place, bytes) in back.iter_mut().enumerate() {
                targets[place * threads / count].push((range(place), bytes));
            }
            let since = Instant::now();
            std::thread::scope(|scope| {
                for targets in &mut targets {
                    scope.spawn(|| queue.scatter_blocking(&pool, targets).expect("the device works"));
                }
            });
            down.push((count * LEN) as f64 / since.elapsed().as_nanos() as f64 / peak_down);
            for (place, bytes) in back.iter().enumerate() {
                assert!(*bytes == sources[order[place]], "piece {place}");
            }
        }
        for (way, mut ratios) in [("up", up), ("down", down)] {
            ratios.remove(0);
            let permille: Vec<f64> = ratios.iter().map(|r| r * 1e3).collect();
            line(format!("gather_{way}_16k_permille"), threads, Spread::of(&permille));
            let what =
                format!("{count} pageable pieces of 16 KiB, {way}, {threads} threads, of the pinned peak");
            if threads == 8 {
                at_least(what, Spread::of(&ratios), 0.88, Some(0.93));
            } else {
                beside(what, Spread::of(&ratios));
            }
        }
    }
}

/// GB/s of the best of five large copies.
fn peak(
    pool: &Pool,
    stream: &pinpool::Stream,
    memory: &pinpool::DeviceBuffer,
    len: usize,
    upload: bool,
) -> f64 {
    let mut buf = checkout(pool, len, 5);
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let since = Instant::now();
        let flight = if upload {
            stream.upload(buf, memory.slice(..len))
        } else {
            stream.download(memory.slice(..len), buf)
        };
        buf = flight.expect("a copy").wait().expect("the device works");
        best = best.min(since.elapsed());
    }
    len as f64 / best.as_nanos() as f64
}

/// GB/s of as many pieces as make up `total`, each at a random place on both sides; bytes are compared afterwards.
#[allow(clippy::too_many_arguments, reason = "a bench's parameters")]
fn pieces(
    device: &Device,
    pool: &Pool,
    queue: &CopyQueue,
    memory: &pinpool::DeviceBuffer,
    total: usize,
    piece: usize,
    threads: usize,
    upload: bool,
) -> f64 {
    let count = total / piece;
    let mut random = Random(count as u64 + 11);
    // Buffers in random order as well, since that is the order in which they are used.
    let mut bufs: Vec<Option<PinnedBuf>> =
        (0..count).map(|i| Some(checkout(pool, piece, i * 7 + 3))).collect();
    let places = random.order(count);
    let order = random.order(count);
    let stream = device.stream().expect("a stream");
    if !upload {
        // What is to be read: at each place the bytes of the piece that goes there.
        for (i, place) in places.iter().enumerate() {
            let at = place * piece;
            let buf = bufs[i].take().expect("there");
            let flight = queue.upload(buf, memory.slice(at..at + piece)).expect("a copy");
            let mut buf = flight.wait().expect("the device works");
            buf.fill(0xEE);
            bufs[i] = Some(buf);
        }
    }
    let mut work: Vec<Vec<(usize, PinnedBuf, DeviceSlice)>> = (0..threads).map(|_| Vec::new()).collect();
    for (n, &i) in order.iter().enumerate() {
        let at = places[i] * piece;
        let buf = bufs[i].take().expect("there");
        work[n % threads].push((i, buf, memory.slice(at..at + piece).expect("within")));
    }
    let barrier = Arc::new(Barrier::new(threads + 1));
    let (mut back, took) = std::thread::scope(|scope| {
        let running: Vec<_> = work
            .into_iter()
            .map(|work| {
                let (barrier, queue) = (barrier.clone(), queue.clone());
                scope.spawn(move || {
                    let mut flights = Vec::with_capacity(work.len());
                    barrier.wait();
                    for (i, buf, range) in work {
                        let flight =
                            if upload { queue.upload(buf, range) } else { queue.download(range, buf) };
                        flights.push((i, flight.expect("a copy")));
                    }
                    flights
                        .into_iter()
                        .map(|(i, f)| (i, f.wait().expect("the device works")))
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        barrier.wait();
        let since = Instant::now();
        let back: Vec<_> =
            running.into_iter().flat_map(|t| t.join().expect("a thread of the bench")).collect();
        (back, since.elapsed())
    });
    if upload {
        let mut all = vec![0; total];
        stream.download_blocking(memory.slice(..total), &mut all).expect("a copy");
        for (i, place) in places.iter().enumerate() {
            let expected = (i * 7 + 3) as u8;
            assert!(all[place * piece..][..piece].iter().all(|byte| *byte == expected), "piece {i}");
        }
    } else {
        for (i, buf) in back.drain(..) {
            let expected = (i * 7 + 3) as u8;
            assert!(buf.iter().all(|byte| *byte == expected), "piece {i}");
        }
    }
    total as f64 / took.as_nanos() as f64
}

fn main() {
    let driver = driver::find();
    let device = Device::open(if driver.is_some() { "cuda:0" } else { "host" }).expect("a device");
    if wanted("rate") {
        rate(driver, &device);
    }
    if wanted("lone") {
        lone(&device);
    }
    if wanted("scatter") {
        scatter(&device);
    }
    if wanted("gather") {
        gather(&device);
    }
}
