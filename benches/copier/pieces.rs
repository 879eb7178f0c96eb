//! Pieces that are neighbours on the device, and packing alone.

use std::sync::Barrier;
use std::time::Instant;

use pinpool::{Device, DeviceSlice, Pool};

use crate::Setup;
use crate::measure::{self, Spread, at_least, beside, line, number, numbers};
use crate::small::{Random, checkout};

const LEN: usize = 16 << 10;

fn count() -> usize {
    number("count", if measure::quick() { 512 } else { 16_384 })
}

fn rounds() -> usize {
    number("rounds", if measure::quick() { 2 } else { 7 })
}

fn permille(ratios: &[f64]) -> Spread {
    Spread::of(&ratios.iter().map(|r| r * 1e3).collect::<Vec<_>>())
}

impl Setup {
    fn neighbours(device: &Device) -> Self {
        Self::new(device, count() * LEN)
    }

    fn range(&self, place: usize) -> DeviceSlice {
        self.memory.slice(place * LEN..(place + 1) * LEN).expect("within")
    }

    /// The speed in GB/s, and as a share of the pinned peak, measured just before.
    fn speed(&self, upload: bool, run: impl FnOnce()) -> (f64, f64) {
        let peak = self.peak(upload);
        let since = Instant::now();
        run();
        let rate = (count() * LEN) as f64 / since.elapsed().as_nanos() as f64;
        (rate, rate / peak)
    }
}

/// Pageable memory, by several calling threads with a part each.
pub fn pageable(device: &Device) {
    let setup = Setup::neighbours(device);
    let (Setup { pool, copier, .. }, count) = (&setup, count());
    let sources: Vec<Vec<u8>> = (0..count).map(|i| vec![(i * 7 + 3) as u8; LEN]).collect();
    let mut back: Vec<Vec<u8>> = (0..count).map(|_| vec![1; LEN]).collect();
    let order = Random(5).order(count);
    let in_order: Vec<&[u8]> = order.iter().map(|i| &sources[*i][..]).collect();
    // The copier's threads and the caller.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let hands = number("threads", cores.min(8)) + 1;
    for callers in numbers("callers", &[1, 4, 8]) {
        let (mut up, mut down, mut over) = (Vec::new(), Vec::new(), [Vec::new(), Vec::new()]);
        for _ in 0..=rounds() {
            let packing = packed(pool, &in_order, hands);
            // Each caller's targets are neighbours; their sources are anywhere.
            let mut pieces: Vec<Vec<(&[u8], DeviceSlice)>> = (0..callers).map(|_| Vec::new()).collect();
            for place in 0..count {
                pieces[place * callers / count].push((&sources[order[place]], setup.range(place)));
            }
            let (rate, ratio) = setup.speed(true, || {
                std::thread::scope(|scope| {
                    for pieces in &pieces {
                        scope.spawn(|| {
                            copier.upload_slices(pieces).expect("the device works");
                        });
                    }
                });
            });
            up.push(ratio);
            over[0].push(rate / packing);
            back.iter_mut().for_each(|bytes| bytes.fill(1));
            let mut targets: Vec<Vec<(DeviceSlice, &mut [u8])>> = (0..callers).map(|_| Vec::new()).collect();
            for (place, bytes) in back.iter_mut().enumerate() {
                targets[place * callers / count].push((setup.range(place), bytes));
            }
            let (rate, ratio) = setup.speed(false, || {
                std::thread::scope(|scope| {
                    for targets in &mut targets {
                        scope.spawn(|| copier.download_slices(targets).expect("the device works"));
                    }
                });
            });
            down.push(ratio);
            over[1].push(rate / packing);
            for (place, bytes) in back.iter().enumerate() {
                assert!(*bytes == sources[order[place]], "piece {place}");
            }
        }
        for (way, mut ratios, mut over) in
            [("up", up, std::mem::take(&mut over[0])), ("down", down, std::mem::take(&mut over[1]))]
        {
            ratios.remove(0);
            over.remove(0);
            line(format!("pageable_{way}_16k_permille"), callers, permille(&ratios));
            let what = format!("{count} pageable pieces of 16 KiB, {way}, {callers} callers");
            beside(format!("{what}, of packing alone by {hands} threads"), Spread::of(&over));
            let what = format!("{what}, of the pinned peak");
            if callers == 1 {
                at_least(what, Spread::of(&ratios), if way == "up" { 0.80 } else { 0.85 }, Some(0.92));
            } else {
                beside(what, Spread::of(&ratios));
            }
        }
    }
    setup.say_ways();
}

/// GB/s of packing alone, without any copy by the device, by several threads.
fn packed(pool: &Pool, sources: &[&[u8]], threads: usize) -> f64 {
    const PART: usize = 2 << 20;
    let barrier = Barrier::new(threads + 1);
    let took = std::thread::scope(|scope| {
        let part = |t: usize| &sources[t * sources.len() / threads..(t + 1) * sources.len() / threads];
        let running: Vec<_> = (0..threads)
            .map(|t| {
                let (barrier, part) = (&barrier, part(t));
                scope.spawn(move || {
                    let mut bufs: Vec<_> = (0..4).map(|_| checkout(pool, PART, 0)).collect();
                    barrier.wait();
                    for (n, pieces) in part.chunks(PART / LEN).enumerate() {
                        let buf = &mut bufs[n % 4];
                        buf.clear();
                        for piece in pieces {
                            buf.try_extend_from_slice(piece).expect("room");
                        }
                    }
                    barrier.wait();
                    std::hint::black_box(bufs);
                })
            })
            .collect();
        barrier.wait();
        let since = Instant::now();
        barrier.wait();
        let took = since.elapsed();
        running.into_iter().for_each(|t| t.join().expect("a thread of the bench"));
        took
    });
    (sources.len() * LEN) as f64 / took.as_nanos() as f64
}

/// Packing alone.
pub fn packing(device: &Device) {
    let (setup, count) = (Setup::neighbours(device), count());
    let pool = &setup.pool;
    let order = Random(5).order(count);
    let pieces: Vec<Vec<u8>> = (0..count).map(|i| vec![i as u8; LEN]).collect();
    let sources: Vec<&[u8]> = order.iter().map(|i| &pieces[*i][..]).collect();
    for threads in numbers("packing", &[1, 4, 8, 12, 16]) {
        let rates: Vec<f64> = (0..rounds()).map(|_| packed(pool, &sources, threads) * 1e3).collect();
        let spread = Spread::of(&rates);
        println!("packing alone, {threads} threads: {:.1} GB/s", spread.mid / 1e3);
        line("packing_pageable_16k_mb_per_s", threads, spread);
    }
}
