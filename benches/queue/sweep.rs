//! The driver at best: bare batches of many sizes.
//!
//! The lists of pieces at random places are prepared before; one thread or several call `cuMemcpyBatchAsync` on one
//! stream or on two in turn, with as many copies outstanding as in the queue.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::driver::{Driver, Event, Pinned, Stream};
use crate::measure::{self, number, numbers};
use crate::{PIECE, Random};

const TOTAL: usize = 256 << 20;

pub fn sweep(driver: &'static Driver) {
    driver.enter();
    let (source, target) = (Pinned::new(driver, TOTAL), driver.allocate(TOTAL));
    let at = |offset| {
        // SAFETY: within the memory.
        unsafe { source.memory.at(offset) as u64 }
    };
    println!("\nbare batches: GB/s, and ns of the calling thread's a piece");
    for kib in numbers("pieces", &[4, 16]) {
        let len = (kib << 10).max(PIECE);
        let count = TOTAL / len;
        let mut random = Random(7);
        let host: Vec<u64> = random.order(count).into_iter().map(|i| at(i * len)).collect();
        let far: Vec<u64> = random.order(count).into_iter().map(|i| target.0 + (i * len) as u64).collect();
        for upload in [true, false] {
            for threads in numbers("batchers", &[1, 2]) {
                for streams in [1, 2] {
                    for batch in numbers("batches", &[32, 64, 128, 256]) {
                        let way = if upload { "up" } else { "down" };
                        let (to, from) = if upload { (&far, &host) } else { (&host, &far) };
                        let (rate, call) = best(driver, to, from, len, batch, threads, streams);
                        println!(
                            "{kib} KiB {way}, {threads} threads with {streams} streams, batches of {batch}: \
                             {rate:.1} GB/s, {call:.0} ns"
                        );
                        println!(
                            "@ sweep_{way}_{kib}k_{streams}_streams_{batch}_mb_per_s {threads} {:.0}",
                            rate * 1e3
                        );
                    }
                }
            }
        }
    }
}

/// GB/s of bare batches with pieces of that length between random places, for the best of 1, 2 and 3 threads, and that
/// number of threads.
pub fn floor(driver: &'static Driver, len: usize, upload: bool) -> (f64, usize) {
    driver.enter();
    let (source, target) = (Pinned::new(driver, TOTAL), driver.allocate(TOTAL));
    let count = TOTAL / len;
    let mut random = Random(7);
    // SAFETY: within the memory.
    let host: Vec<u64> =
        random.order(count).into_iter().map(|i| unsafe { source.memory.at(i * len) as u64 }).collect();
    let far: Vec<u64> = random.order(count).into_iter().map(|i| target.0 + (i * len) as u64).collect();
    let (to, from) = if upload { (&far, &host) } else { (&host, &far) };
    let batch = if upload { 64 } else { 256 };
    let rates = (1..=3).map(|threads| (best(driver, to, from, len, batch, threads, 1).0, threads));
    rates.fold((0.0, 0), |most, rate| if rate.0 > most.0 { rate } else { most })
}

/// GB/s and ns a piece, the best of some rounds.
fn best(
    driver: &'static Driver,
    to: &[u64],
    from: &[u64],
    len: usize,
    batch: usize,
    threads: usize,
    streams: usize,
) -> (f64, f64) {
    let (mut rate, mut least) = (0.0_f64, f64::MAX);
    for _ in 0..number("rounds", if measure::quick() { 1 } else { 3 }) {
        let barrier = Barrier::new(threads + 1);
        let (took, call) = std::thread::scope(|scope| {
            let part = to.len() / threads;
            let running: Vec<_> = (0..threads)
                .map(|t| {
                    let (to, from) = (&to[t * part..][..part], &from[t * part..][..part]);
                    let barrier = &barrier;
                    scope.spawn(move || submit(driver, to, from, len, batch, streams, barrier))
                })
                .collect();
            barrier.wait();
            let since = Instant::now();
            let call: Duration = running.into_iter().map(|t| t.join().expect("a thread of the bench")).sum();
            (since.elapsed(), call)
        });
        rate = rate.max((to.len() * len) as f64 / took.as_nanos() as f64);
        least = least.min(call.as_nanos() as f64 / to.len() as f64);
    }
    (rate, least)
}

/// The time in the driver's calls.
fn submit(
    driver: &'static Driver,
    to: &[u64],
    from: &[u64],
    len: usize,
    batch: usize,
    streams: usize,
    barrier: &Barrier,
) -> Duration {
    const OUTSTANDING: usize = 1024;
    driver.enter();
    let lanes: Vec<(Stream, Vec<Event>)> = (0..streams)
        .map(|_| {
            let events = (0..(OUTSTANDING / batch / streams).max(2)).map(|_| driver.event()).collect();
            (driver.stream(), events)
        })
        .collect();
    let (mut to, mut from, mut lengths) = (to.to_vec(), from.to_vec(), vec![len; to.len()]);
    barrier.wait();
    let mut call = Duration::ZERO;
    let chunks = to.chunks_mut(batch).zip(from.chunks_mut(batch)).zip(lengths.chunks_mut(batch));
    for (n, ((to, from), lengths)) in chunks.enumerate() {
        let (stream, events) = &lanes[n % streams];
        let event = events[n / streams % events.len()];
        // The event of an earlier batch: no more batches than that are outstanding.
        while n / streams >= events.len() && !driver.is_done(event) {
            std::hint::spin_loop();
        }
        let since = Instant::now();
        // SAFETY: within both, which live longer than the call, and each place once.
        unsafe { driver.batch(to, from, lengths, *stream) };
        driver.record(event, *stream);
        call += since.elapsed();
    }
    lanes.iter().for_each(|(stream, _)| driver.synchronize(*stream));
    call
}
