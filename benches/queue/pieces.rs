//! Pinned pieces between random places, submitted one by one by several threads.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use pinpool::{CopyQueue, Device, DeviceBuffer, DeviceSlice, PinnedBuf, Pool, Stream};

use crate::batches::floor;
use crate::driver::Driver;
use crate::measure::{self, Spread, at_least, beside, line, number, numbers};
use crate::{Random, checkout, peak, pool, queue};

pub fn scatter(driver: Option<&'static Driver>, device: &Device) {
    let quick = measure::quick();
    let rounds = number("rounds", if quick { 2 } else { 7 });
    let total = if quick { 16 << 20 } else { 256 << 20 };
    let whole = 64 << 20;
    let pool = pool(device, total + 2 * whole + (64 << 20));
    let (queue, stream) = (queue(device), device.stream().expect("a stream"));
    let memory = device.alloc(total.max(whole)).expect("device memory");
    for upload in [true, false] {
        for piece in numbers("pieces", &[16, 64]).into_iter().map(|kib| kib << 10) {
            let bare = driver.map(|driver| {
                let peak = peak(&pool, &stream, &memory, whole, upload);
                let (rate, batchers) = floor(driver, piece, upload);
                println!(
                    "\nscattered pieces of {} KiB, {}: bare batches by {batchers} threads reach {:.3} of the pinned peak",
                    piece >> 10,
                    if upload { "up" } else { "down" },
                    rate / peak
                );
                rate / peak
            });
            for threads in numbers("pushers", &[1, 4]) {
                let mut ratios = Vec::new();
                let mut best = 0.0_f64;
                for _ in 0..=rounds {
                    let peak = peak(&pool, &stream, &memory, whole, upload);
                    let rate = pieces(&pool, &stream, &queue, &memory, (total, piece), threads, upload);
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
                if let Some(bare) = bare {
                    beside(format!("{name}, over bare batches"), Spread::of(&[spread.mid / bare]));
                }
                at_least(name, spread, gate, Some(aim));
            }
        }
    }
}

/// GB/s of `total` bytes in pieces, each at a random place on both sides. The bytes are compared afterwards.
fn pieces(
    pool: &Pool,
    stream: &Stream,
    queue: &CopyQueue,
    memory: &DeviceBuffer,
    (total, piece): (usize, usize),
    threads: usize,
    upload: bool,
) -> f64 {
    let count = total / piece;
    let mut random = Random(count as u64 + 11);
    // The buffers are in random order as well, since that is the order in which a program uses them.
    let mut bufs: Vec<Option<PinnedBuf>> =
        (0..count).map(|i| Some(checkout(pool, piece, i * 7 + 3))).collect();
    let places = random.order(count);
    let order = random.order(count);
    if !upload {
        // The source of the download: at each place the bytes of the piece that belongs there.
        for (i, place) in places.iter().enumerate() {
            let at = place * piece;
            let buf = bufs[i].take().expect("there");
            let flight = queue.upload(buf, memory.slice(at..at + piece)).expect("a copy");
            let mut buf = flight.wait().expect("the device works");
            buf.fill(0xEE);
            bufs[i] = Some(buf);
        }
    }
    let mut work: Vec<Work> = (0..threads).map(|_| Vec::new()).collect();
    for (n, &i) in order.iter().enumerate() {
        let at = places[i] * piece;
        let buf = bufs[i].take().expect("there");
        work[n % threads].push((i, buf, memory.slice(at..at + piece).expect("within")));
    }
    let (mut back, took) = push(queue, work, upload);
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

type Work = Vec<(usize, PinnedBuf, DeviceSlice)>;

/// Each thread submits its part piece by piece.
fn push(queue: &CopyQueue, work: Vec<Work>, upload: bool) -> (Vec<(usize, PinnedBuf)>, Duration) {
    let barrier = Arc::new(Barrier::new(work.len() + 1));
    std::thread::scope(|scope| {
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
    })
}
