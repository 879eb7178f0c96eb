//! Pinned pieces at random places on both sides, by one call, beside the driver's own batches.

use std::time::{Duration, Instant};

use pinpool::{Copier, Device, DeviceSlice, PinnedBuf};

use crate::Setup;
use crate::batches::floor;
use crate::driver::Driver;
use crate::measure::{self, Spread, at_least, beside, line, number, numbers};
use crate::small::{Random, checkout};

pub fn scattered(driver: Option<&'static Driver>, device: &Device) {
    let quick = measure::quick();
    let rounds = number("rounds", if quick { 2 } else { 7 });
    let total = if quick { 16 << 20 } else { 256 << 20 };
    // Short pieces take up to an eighth more.
    let setup = Setup::new(device, total + total / 4, total);
    for upload in [true, false] {
        for piece in numbers("pieces", &[1, 4, 16, 64]).into_iter().map(|kib| kib << 10) {
            let (kib, way) = (piece >> 10, if upload { "up" } else { "down" });
            let bare = driver.map(|driver| {
                let peak = setup.peak(upload);
                let (rate, batchers) = floor(driver, piece, upload);
                println!(
                    "\nscattered pieces of {kib} KiB, {way}: bare batches by {batchers} threads reach {:.3} of the pinned \
                     peak",
                    rate / peak
                );
                rate / peak
            });
            let (mut ratios, mut best) = (Vec::new(), 0.0_f64);
            for _ in 0..=rounds {
                let peak = setup.peak(upload);
                let rate = once(&setup, total, piece, upload);
                ratios.push(rate / peak);
                best = best.max(rate);
            }
            ratios.remove(0);
            let spread = Spread::of(&ratios);
            println!("\nscattered pieces of {kib} KiB, {way}, one call: {best:.1} GB/s at best");
            let name = format!("scattered pieces of {kib} KiB, {way}, one call, of the pinned peak");
            let permille: Vec<f64> = ratios.iter().map(|ratio| ratio * 1e3).collect();
            line(format!("scattered_{way}_{kib}k_permille"), 1, Spread::of(&permille));
            if let Some(bare) = bare {
                beside(format!("{name}, over bare batches"), Spread::of(&[spread.mid / bare]));
            }
            match (kib, upload) {
                (16, true) => at_least(name, spread, 0.80, Some(0.92)),
                (16, false) => at_least(name, spread, 0.85, Some(0.92)),
                (64, _) => at_least(name, spread, 0.94, Some(0.97)),
                _ => beside(name, spread),
            }
        }
    }
    setup.say_ways();
}

/// GB/s of `total` bytes in pieces, each at a random place on both sides. The bytes are compared afterwards.
fn once(setup: &Setup, total: usize, piece: usize, upload: bool) -> f64 {
    let Setup { pool, copier, stream, memory } = setup;
    let count = total / piece;
    let mut random = Random(count as u64 + 11);
    let byte = |i: usize| (i * 7 + 3) as u8;
    // The buffers are in random order as well, since that is the order in which a program uses them.
    let mut bufs: Vec<Option<PinnedBuf>> =
        (0..count).map(|i| Some(checkout(pool, piece, if upload { i * 7 + 3 } else { 0xEE }))).collect();
    let places = random.order(count);
    let order = random.order(count);
    if !upload {
        // The source of the download: at each place the bytes of the piece that belongs there.
        let mut all = vec![0; total];
        for (i, place) in places.iter().enumerate() {
            all[place * piece..][..piece].fill(byte(i));
        }
        stream.upload_blocking(&all, memory.slice(..total)).expect("a copy");
    }
    let mut work = Vec::with_capacity(count);
    for &i in &order {
        let (at, buf) = (places[i] * piece, bufs[i].take().expect("there"));
        work.push((buf, memory.slice(at..at + piece).expect("within")));
    }
    let (back, took) = call(copier, work, upload);
    if upload {
        let mut all = vec![0; total];
        stream.download_blocking(memory.slice(..total), &mut all).expect("a copy");
        for (i, place) in places.iter().enumerate() {
            assert!(all[place * piece..][..piece].iter().all(|found| *found == byte(i)), "piece {i}");
        }
    } else {
        for (buf, i) in back.iter().zip(order) {
            assert!(buf.iter().all(|found| *found == byte(i)), "piece {i}");
        }
    }
    total as f64 / took.as_nanos() as f64
}

fn call(copier: &Copier, work: Vec<(PinnedBuf, DeviceSlice)>, upload: bool) -> (Vec<PinnedBuf>, Duration) {
    if upload {
        let since = Instant::now();
        let back = copier.upload_buffers(work).expect("copies").wait().expect("the device works");
        return (back, since.elapsed());
    }
    let work = work.into_iter().map(|(buf, range)| (range, buf)).collect();
    let since = Instant::now();
    let back = copier.download_buffers(work).expect("copies").wait().expect("the device works");
    (back, since.elapsed())
}
