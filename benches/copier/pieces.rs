//! Pieces that are neighbours on the device, pageable and pinned; and packing alone.

use std::sync::Barrier;
use std::time::Instant;

use pinpool::{Device, DeviceSlice, PinnedBuf, Pool};

use crate::Setup;
use crate::measure::{self, Rounds, Spread, at_least, beside, line, number, numbers};
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
    fn neighbours(device: &Device, pinned: usize) -> Self {
        Self::new(device, pinned * (LEN + LEN / 8), count() * LEN)
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
    let setup = Setup::neighbours(device, 0);
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
                            copier
                                .upload_pieces(pieces)
                                .and_then(|sent| Ok(sent.wait()?))
                                .expect("the device works");
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
                        scope.spawn(|| copier.download_pieces(targets).expect("the device works"));
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

/// Packing alone, from pageable and from pinned memory.
pub fn packing(device: &Device) {
    let (setup, count) = (Setup::neighbours(device, count()), count());
    let pool = &setup.pool;
    let order = Random(5).order(count);
    let pageable: Vec<Vec<u8>> = (0..count).map(|i| vec![i as u8; LEN]).collect();
    let pinned: Vec<PinnedBuf> = (0..count).map(|i| checkout(pool, LEN, i)).collect();
    let pageable: Vec<&[u8]> = order.iter().map(|i| &pageable[*i][..]).collect();
    let pinned: Vec<&[u8]> = order.iter().map(|i| &pinned[*i][..]).collect();
    for (what, sources) in [("pageable", &pageable), ("pinned", &pinned)] {
        for threads in numbers("packing", &[1, 4, 8, 12, 16]) {
            let rates: Vec<f64> = (0..rounds()).map(|_| packed(pool, sources, threads) * 1e3).collect();
            let spread = Spread::of(&rates);
            println!("packing alone, {what}, {threads} threads: {:.1} GB/s", spread.mid / 1e3);
            line(format!("packing_{what}_16k_mb_per_s"), threads, spread);
        }
    }
}

/// Pinned pieces that are neighbours on the device, by one caller: as buffers, for which the copier chooses the way,
/// and as borrowed memory.
pub fn pinned(device: &Device) {
    let (setup, count) = (Setup::neighbours(device, count()), count());
    let Setup { pool, copier, .. } = &setup;
    let order = Random(5).order(count);
    let mut bufs: Vec<PinnedBuf> = (0..count).map(|i| checkout(pool, LEN, i * 7 + 3)).collect();
    let ways = [
        "up by upload_buffers",
        "up by upload_pieces",
        "down by download_buffers",
        "down by download_pieces",
    ];
    let mut ratios = Rounds::new(ways.len());
    for round in 0..=rounds() {
        let mut turn = [0.0; 4];
        // Random places on the host, neighbours on the device.
        let mut there: Vec<Option<PinnedBuf>> = bufs.drain(..).map(Some).collect();
        let pieces: Vec<(PinnedBuf, DeviceSlice)> = (0..count)
            .map(|place| (there[order[place]].take().expect("there"), setup.range(place)))
            .collect();
        let mut came = Vec::new();
        (_, turn[0]) = setup.speed(true, || {
            came = copier.upload_buffers(pieces).expect("copies").wait().expect("the device works");
        });
        let pieces: Vec<(&[u8], DeviceSlice)> =
            came.iter().enumerate().map(|(place, buf)| (&buf[..], setup.range(place))).collect();
        (_, turn[1]) = setup.speed(true, || {
            copier.upload_pieces(&pieces).and_then(|sent| Ok(sent.wait()?)).expect("the device works");
        });
        drop(pieces);
        came.iter_mut().for_each(|buf| buf.fill(1));
        let pieces: Vec<_> =
            came.into_iter().enumerate().map(|(place, buf)| (setup.range(place), buf)).collect();
        let mut came = Vec::new();
        (_, turn[2]) = setup.speed(false, || {
            came = copier.download_buffers(pieces).expect("copies").wait().expect("the device works");
        });
        for (place, buf) in came.iter_mut().enumerate() {
            let expected = (order[place] * 7 + 3) as u8;
            assert!(buf.iter().all(|byte| *byte == expected), "piece {place}");
            buf.fill(1);
        }
        let mut targets: Vec<(DeviceSlice, &mut [u8])> =
            came.iter_mut().enumerate().map(|(place, buf)| (setup.range(place), &mut buf[..])).collect();
        (_, turn[3]) = setup.speed(false, || copier.download_pieces(&mut targets).expect("the device works"));
        drop(targets);
        let mut sorted: Vec<Option<PinnedBuf>> = (0..count).map(|_| None).collect();
        for (place, buf) in came.into_iter().enumerate() {
            assert!(buf.iter().all(|byte| *byte == (order[place] * 7 + 3) as u8), "piece {place}");
            sorted[order[place]] = Some(buf);
        }
        bufs.extend(sorted.into_iter().flatten());
        if round > 0 {
            turn.into_iter().enumerate().for_each(|(way, ratio)| ratios.add(way, ratio));
        }
    }
    for (i, way) in ways.into_iter().enumerate() {
        line(format!("pinned_{}_16k_permille", way.replace(' ', "_")), 1, permille(ratios.values(i)));
        beside(format!("{count} pinned pieces of 16 KiB, {way}, of the pinned peak"), ratios.spread(i));
    }
    setup.say_ways();
}
