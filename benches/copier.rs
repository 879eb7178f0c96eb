//! Thousands of pieces by one call of a copier, and a lone short copy by an idle one.
//!
//! # Pageable pieces (`--only pageable`)
//!
//! 16,384 pieces of 16 KiB of pageable memory, in no order, to neighbouring places of device memory, and back to where
//! they were: `Copier::upload_slices` and `download_slices`. Each figure is over the pinned peak, measured just before:
//! the best of five copies of 64 MiB in the same direction. All bytes are compared after each measurement.
//!
//! # A lone copy (`--only lone`)
//!
//! One thread, one copy of 4 KiB at a time, from before the call until it is complete; once back to back, once with 2 ms
//! of sleep before each. By an idle copier: borrowed bytes (`slice`, and from the device `slice_down`). Beside them a
//! pinned buffer on a stream, which comes back (`stream`), and borrowed bytes by the stream's blocking calls
//! (`blocking`, `down`).
//!
//! # Running it
//!
//! `cargo bench --bench copier`, or the executable by itself. `--threads`, `--chunk` (KiB) and `--ringless` set the
//! copier; `--quick`, `--rounds` and `--count` what is measured. With `--ringless` no device ring is used, and pieces go
//! in batches. Without a GPU all of it runs on the host device, which only shows that it runs.
#![allow(missing_docs, unsafe_code)]

mod driver;
mod measure;

use std::time::{Duration, Instant};

use measure::small::{Random, checkout, peak, pool};
use measure::{Rounds, Spread, at_least, at_most, flag, line, number, quantile, wanted};
use pinpool::copier::CopierBuilder;
use pinpool::{Copier, Device, DeviceSlice, Pool};

/// Bytes of the copies that give the peak.
const WHOLE: usize = 64 << 20;
/// Bytes of the pool beside what the peak takes: for the copier's segments.
const SEGMENTS: usize = 256 << 20;
/// Bytes of a pageable piece, and of a lone copy.
const LEN: usize = 16 << 10;
const LONE: usize = 4 << 10;

/// A copier as the options say.
fn builder(pool: &Pool, device: &Device) -> CopierBuilder {
    let mut builder = Copier::builder(pool, device);
    if let n @ 1.. = number("threads", 0) {
        builder = builder.threads(n);
    }
    if let kib @ 1.. = number("chunk", 0) {
        builder = builder.chunk(kib << 10);
    }
    if flag("ringless") {
        builder = builder.ring(0);
    }
    builder
}

fn main() {
    let driver = driver::find();
    let device = Device::open(if driver.is_some() { "cuda:0" } else { "host" }).expect("a device");
    if wanted("pageable") {
        pageable(&device);
    }
    if wanted("lone") {
        lone(&device);
    }
    measure::used();
}

fn pageable(device: &Device) {
    let count = number("count", if measure::quick() { 512 } else { 16_384 });
    let rounds = number("rounds", if measure::quick() { 2 } else { 7 });
    let pool = pool(device, WHOLE + SEGMENTS);
    let copier = builder(&pool, device).share(SEGMENTS / 2).build().expect("a copier");
    let stream = device.stream().expect("a stream");
    let memory = device.alloc((count * LEN).max(WHOLE)).expect("device memory");
    let place = |at: usize| memory.slice(at * LEN..(at + 1) * LEN).expect("within");
    // The speed as a share of the pinned peak, measured just before.
    let share = |upload: bool, run: &mut dyn FnMut()| {
        let peak = peak(&pool, &stream, &memory, WHOLE, upload);
        let since = Instant::now();
        run();
        (count * LEN) as f64 / since.elapsed().as_nanos() as f64 / peak
    };
    let sources: Vec<Vec<u8>> = (0..count).map(|i| vec![(i * 7 + 3) as u8; LEN]).collect();
    let mut back: Vec<Vec<u8>> = (0..count).map(|_| vec![1; LEN]).collect();
    let order = Random(5).order(count);
    let pieces: Vec<(&[u8], DeviceSlice)> =
        order.iter().enumerate().map(|(at, source)| (&sources[*source][..], place(at))).collect();
    let mut shares = [Vec::new(), Vec::new()];
    // The first round is for warming up.
    for round in 0..=rounds {
        let up = share(true, &mut || copier.upload_slices(&pieces).expect("the device works"));
        back.iter_mut().for_each(|bytes| bytes.fill(1));
        let mut targets: Vec<(DeviceSlice, &mut [u8])> =
            back.iter_mut().enumerate().map(|(at, bytes)| (place(at), &mut bytes[..])).collect();
        let down = share(false, &mut || copier.download_slices(&mut targets).expect("the device works"));
        for (at, bytes) in back.iter().enumerate() {
            assert!(*bytes == sources[order[at]], "piece {at}");
        }
        if round > 0 {
            shares[0].push(up);
            shares[1].push(down);
        }
    }
    for ((way, gate), shares) in [("up", 0.80), ("down", 0.85)].into_iter().zip(&shares) {
        let permille: Vec<f64> = shares.iter().map(|share| share * 1e3).collect();
        line(format!("pageable_{way}_16k_permille"), 1, Spread::of(&permille));
        let what = format!("{count} pageable pieces of 16 KiB, {way}, of the pinned peak");
        at_least(what, Spread::of(shares), gate, Some(0.92));
    }
    let stats = copier.stats();
    println!(
        "{} MiB by the ring ({} launches of {} chunks), {} in batches",
        stats.ring_bytes >> 20,
        stats.launches,
        stats.launched_chunks,
        stats.batch_bytes >> 20
    );
}

/// Each way of a lone copy, and the one that it is compared with.
const WAYS: [(&str, usize); 5] =
    [("stream", 0), ("blocking", 1), ("slice", 1), ("down", 3), ("slice_down", 3)];

fn lone(device: &Device) {
    let rounds = number("rounds", if measure::quick() { 5 } else { 31 });
    let pool = pool(device, 64 << 20);
    let stream = device.stream().expect("a stream");
    let copier = builder(&pool, device).build().expect("a copier");
    let memory = device.alloc(LONE).expect("device memory");
    let (mut buf, mut bytes) = (Some(checkout(&pool, LONE, 1)), vec![3; LONE]);
    let mut once = |way: usize| -> f64 {
        let own = buf.take().expect("it came back");
        let since = Instant::now();
        let own = match WAYS[way].0 {
            "stream" => stream.upload(own, &memory).expect("a copy").wait().expect("the device works"),
            name => {
                match name {
                    "blocking" => stream.upload_blocking(&bytes, &memory).expect("a copy"),
                    "slice" => copier.upload_slice(&bytes, &memory).expect("a copy"),
                    "down" => stream.download_blocking(&memory, &mut bytes).expect("a copy"),
                    _ => copier.download_slice(&memory, &mut bytes).expect("a copy"),
                }
                own
            }
        };
        let taken = since.elapsed().as_nanos() as f64;
        buf = Some(own);
        taken
    };
    for (title, idle, samples) in [("back to back", 0, 64), ("after 2 ms without work", 2, 16)] {
        let mut medians = Rounds::new(WAYS.len());
        for round in 0..=rounds {
            for i in (0..WAYS.len()).map(|i| (i + round) % WAYS.len()) {
                // Long enough for the copier's threads to fall asleep.
                std::thread::sleep(Duration::from_millis(1));
                let one = |_| {
                    if idle > 0 {
                        std::thread::sleep(Duration::from_millis(idle));
                    }
                    once(i)
                };
                let taken: Vec<f64> = (0..samples).map(one).collect();
                if round > 0 {
                    medians.add(i, quantile(&taken, 0.5));
                }
            }
        }
        println!("\na lone copy of {LONE} bytes, {title}: {rounds} rounds by turns, {samples} copies each");
        for (i, (name, _)) in WAYS.into_iter().enumerate() {
            println!("{name:<12} {:>9.0} ns", medians.spread(i).mid);
            line(format!("lone_{name}_{LONE}{}", if idle > 0 { "_idle" } else { "" }), 1, medians.spread(i));
        }
        for (i, (name, direct)) in WAYS.into_iter().enumerate().filter(|(i, (_, direct))| i != direct) {
            let over: Spread = medians.ratio(i, direct);
            at_most(format!("a lone {name} over {}, {title}", WAYS[direct].0), over, 1.1, Some(1.0));
        }
    }
}
