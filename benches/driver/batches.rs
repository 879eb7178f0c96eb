//! Bare batches: pieces between random places by the driver's own calls, without the crate.
#![allow(dead_code, reason = "each bench uses a part of it")]

use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::driver::{Driver, Event, Pinned, Stream};
use crate::measure::{self, number};
use crate::small::Random;

/// Bytes of all pieces.
pub const TOTAL: usize = 256 << 20;

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
pub fn best(
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
