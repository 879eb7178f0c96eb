//! The copier beside the link: the share of the pinned peak that each way to and from the device reaches.
//!
//! # What is measured
//!
//! The *peak* of each direction is the best of all copies of `--mib` (384) from, or into, page-locked memory in this
//! run: without staging, on one stream or on several at once, whichever is faster. Each row moves as much or more
//! through a copier of its own, on the same pool; figures are wall time of the whole call. The rows of a round follow
//! each other, a copy for the peak among them. The median of the rounds is printed, over the peak. All bytes at the
//! target are compared with the source, once for each row, outside of the measured time.
//!
//! | row | what it is |
//! | --- | --- |
//! | `file_T` | a file of `--file-mib` (1024) in the page cache to the device, T threads |
//! | `read_T` | the same, by ordinary reads |
//! | `slice_T` | touched ordinary memory to the device |
//! | `touched_T` | the device to touched ordinary memory |
//! | `fresh_T` | the device to a new vector |
//! | `both_T` | `slice_T` and `touched_T` at once, by a copier each, over both directions of the link at once |
//! | `both_T_one` | the same by one copier of twice as many threads, or `--one N` |
//! | `both_T_pinned` | the same, with a page-locked source of the upload |
//!
//! Beside each row the bench prints the speed of a plain loop of as many threads in the same round, without a device:
//! it reads the file, or copies by `memcpy`, 4 MiB at a time into (or out of) two page-locked segments for each thread.
//! A row that is as fast as that loop is as fast as staging can be on this machine.
//!
//! Then a foreground upload of 64 KiB, alone and during a bulk load: its 99th percentile and the bulk rate beside it,
//! by a stream of the caller's own, and by the copier, whose depth is 2. On the
//! host device the link is the CPU, which other programs use as well; there each row is compared with a copy of the
//! bare link right before it, and that copy with copies by threads of the bench (`memcpy`).
//!
//! `--device NAME` (a GPU, else the host device), `--rounds N`, `--only file` with the rows of files (default), `--only
//! memory` without, `--sweep` for other chunk lengths and depths. `cargo bench --bench bulk`, or the executable by
//! itself. With the lengths in parentheses the bench uses at most 4 GiB; the results are of `--mib
//! 4096 --file-mib 8192` (`benches/gpu.sh`), which takes 28 GiB. On the host device they are 128 and 512, and the
//! device's memory is part of the 4 GiB.
#![allow(missing_docs, unsafe_code)]

#[path = "measure/link.rs"]
mod link;
mod measure;

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use link::{DOWN, Link, UP, fill, memcpy};
use measure::{Spread, at_least, at_most, flag, line, number, option, quantile, quick, wanted};
use pinpool::copier::{FileSource, Priority, Reading};
use pinpool::{Copier, CopierBuilder, Device, DeviceSlice, PinnedBuf, Pool, Unpinned};

struct Bench {
    device: Device,
    pool: Pool,
    memory: [DeviceSlice; 2],
    source: Vec<u8>,
    target: Vec<u8>,
    /// Segments for the plain loops.
    segments: Vec<PinnedBuf>,
    file: Option<(tempfile::NamedTempFile, usize, DeviceSlice)>,
    cores: usize,
    gpu: bool,
}

impl Bench {
    fn builder(&self, threads: usize) -> CopierBuilder {
        Copier::builder(&self.pool, &self.device).threads(threads)
    }

    fn copier(&self, threads: usize) -> Copier {
        self.builder(threads).build().expect("a copier")
    }
}

/// Makes one transfer. Returns seconds, and bytes.
type Run<'a> = Box<dyn FnMut(&mut Bench) -> (f64, usize) + 'a>;

/// One way to or from the device.
struct Row<'a> {
    name: String,
    run: Run<'a>,
    direction: usize,
    threads: usize,
    plain: Plain,
}

/// The plain loop beside a row.
#[derive(Clone, Copy)]
enum Plain {
    Reading,
    Into,
    OutOf,
}

/// Moves all of the source, or as much of the file, by a plain loop of several threads, 4 MiB at a time through two
/// segments for each. Returns bytes a second.
fn plain(bench: &mut Bench, what: Plain, threads: usize) -> f64 {
    const CHUNK: usize = 4 << 20;
    let mut segments = std::mem::take(&mut bench.segments);
    while segments.len() < threads {
        let mut two = bench.pool.checkout_timeout(2 * CHUNK, Duration::from_secs(20)).expect("room");
        two.try_resize(2 * CHUNK, 1).expect("within its capacity");
        segments.push(two);
    }
    let file = bench.file.as_ref().map(|file| file.0.as_file());
    let (source, target) = (&bench.source, &mut bench.target);
    let len = source.len();
    let since = Instant::now();
    std::thread::scope(|scope| {
        let part = len.div_ceil(threads).next_multiple_of(8);
        let parts = source.chunks(part).zip(target.chunks_mut(part));
        for (number, ((from, to), segments)) in parts.zip(&mut segments).enumerate() {
            scope.spawn(move || {
                let places = (0..from.len()).step_by(CHUNK).zip([0, CHUNK].into_iter().cycle());
                for (at, segment) in places {
                    let n = CHUNK.min(from.len() - at);
                    let segment = &mut segments[segment..segment + n];
                    match (what, file) {
                        (Plain::Reading, Some(file)) => {
                            let at = (number * part + at) as u64;
                            file.read_exact_at(segment, at).expect("the file is there");
                        }
                        (Plain::OutOf, _) => to[at..at + n].copy_from_slice(segment),
                        _ => segment.copy_from_slice(&from[at..at + n]),
                    }
                }
            });
        }
    });
    let taken = since.elapsed().as_secs_f64();
    bench.segments = segments;
    len as f64 / taken
}

fn timed(bytes: usize, work: impl FnOnce()) -> (f64, usize) {
    let since = Instant::now();
    work();
    (since.elapsed().as_secs_f64(), bytes)
}

fn equal(a: &[u8], b: &[u8], threads: usize) -> bool {
    let part = a.len().div_ceil(threads).max(1);
    a.len() == b.len()
        && std::thread::scope(|scope| {
            let parts: Vec<_> =
                a.chunks(part).zip(b.chunks(part)).map(|(a, b)| scope.spawn(move || a == b)).collect();
            parts.into_iter().all(|part| part.join().expect("compares"))
        })
}

fn file_row<'a>(name: String, copier: Copier, reading: Reading) -> Row<'a> {
    let threads = copier.stats().threads;
    let mut checked = false;
    let run = move |bench: &mut Bench| {
        let (file, len, memory) = bench.file.as_ref().expect("made");
        let source = FileSource::open(file.path()).expect("opens").reading(reading);
        let taken = timed(*len, || {
            copier.upload(source, memory).expect("starts").wait().expect("the transfer completes");
        });
        if !std::mem::replace(&mut checked, true) {
            // The file repeats the source.
            let check = Copier::builder(&bench.pool, &bench.device).build().expect("a copier");
            for at in (0..*len).step_by(bench.source.len()) {
                let n = bench.source.len().min(len - at);
                check
                    .download_slice(memory.slice(at..at + n), &mut bench.target[..n])
                    .expect("the transfer completes");
                assert!(equal(&bench.source[..n], &bench.target[..n], bench.cores), "wrong bytes at {at}");
            }
        }
        taken
    };
    Row { name, run: Box::new(run), direction: UP, threads, plain: Plain::Reading }
}

fn slice_row<'a>(name: String, copier: Copier) -> Row<'a> {
    let threads = copier.stats().threads;
    let mut checked = false;
    let run = move |bench: &mut Bench| {
        let taken = timed(bench.source.len(), || {
            copier.upload_slice(&bench.source, &bench.memory[UP]).expect("the transfer completes");
        });
        if !std::mem::replace(&mut checked, true) {
            bench.target.fill(0);
            copier.download_slice(&bench.memory[UP], &mut bench.target).expect("the transfer completes");
            assert!(equal(&bench.source, &bench.target, bench.cores), "wrong bytes");
        }
        taken
    };
    Row { name, run: Box::new(run), direction: UP, threads, plain: Plain::Into }
}

fn touched_row<'a>(name: String, copier: Copier) -> Row<'a> {
    let threads = copier.stats().threads;
    let run = move |bench: &mut Bench| {
        let taken = timed(bench.source.len(), || {
            copier.download_slice(&bench.memory[DOWN], &mut bench.target).expect("the transfer completes");
        });
        assert!(equal(&bench.source, &bench.target, bench.cores), "wrong bytes");
        taken
    };
    Row { name, run: Box::new(run), direction: DOWN, threads, plain: Plain::OutOf }
}

fn fresh_row<'a>(name: String, copier: Copier) -> Row<'a> {
    let threads = copier.stats().threads;
    let run = move |bench: &mut Bench| {
        let mut back = Vec::new();
        let taken = timed(bench.source.len(), || {
            back = copier
                .download(&bench.memory[DOWN], Vec::new())
                .expect("starts")
                .wait()
                .expect("the transfer completes");
        });
        assert!(equal(&bench.source, &back, bench.cores), "wrong bytes");
        taken
    };
    Row { name, run: Box::new(run), direction: DOWN, threads, plain: Plain::OutOf }
}

fn rows<'a>(bench: &Bench) -> Vec<Row<'a>> {
    let mut rows = Vec::new();
    let counts: &[usize] = if bench.gpu { &[8, 4, 1] } else { &[2, 1] };
    if bench.file.is_some() {
        for &threads in counts {
            rows.push(file_row(format!("file_{threads}"), bench.copier(threads), Reading::Auto));
            rows.push(file_row(format!("read_{threads}"), bench.copier(threads), Reading::Buffered));
        }
    }
    let many: &[usize] = if bench.gpu { &[8, 16] } else { &[2, 1] };
    for &threads in many {
        rows.push(slice_row(format!("slice_{threads}"), bench.copier(threads)));
        rows.push(touched_row(format!("touched_{threads}"), bench.copier(threads)));
        rows.push(fresh_row(format!("fresh_{threads}"), bench.copier(threads)));
    }
    if flag("sweep") {
        for &threads in many {
            for (mib, depth) in SWEEP {
                let copier = || {
                    let builder = bench.builder(threads).chunk(mib << 20).depth(depth);
                    builder.build().expect("a copier")
                };
                let word = format!("{threads}_{mib}mib_{depth}deep");
                rows.push(slice_row(format!("slice_{word}"), copier()));
                rows.push(touched_row(format!("touched_{word}"), copier()));
                rows.push(fresh_row(format!("fresh_{word}"), copier()));
                if bench.file.is_some() {
                    rows.push(file_row(format!("read_{word}"), copier(), Reading::Buffered));
                }
            }
        }
    }
    rows
}

/// What `--sweep` tries: mebibytes of a chunk, and chunks in flight.
const SWEEP: [(usize, usize); 7] = [(2, 16), (4, 2), (4, 4), (4, 8), (4, 12), (8, 4), (8, 8)];

/// Gate and aim of a row, over the peak.
fn gate(row: &str) -> Option<(f64, Option<f64>)> {
    Some(match row {
        "file_8" => (0.95, Some(0.97)),
        "file_4" => (0.65, None),
        "slice_8" => (0.92, None),
        "touched_16" => (0.94, None),
        "touched_8" => (0.88, None),
        "fresh_16" => (0.60, None),
        _ => return None,
    })
}

fn main() {
    // `cargo test` runs benches with this argument.
    if flag("test") {
        return println!("bulk: not a test");
    }
    let device = option("device")
        .map_or_else(|| Device::open("cuda:0").or_else(|_| Device::open("host")), |name| Device::open(&name));
    let device = device.expect("a device");
    let gpu = device.name().starts_with("cuda");
    let required = std::env::var("PINPOOL_REQUIRE").is_ok_and(|names| names.contains("cuda"));
    assert!(gpu || !required, "PINPOOL_REQUIRE asks for a GPU");
    if gpu {
        measure::judge();
    }
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let bytes = number("mib", if gpu && !quick() { 384 } else { 128 }) << 20;
    let file_bytes = number("file-mib", if gpu && !quick() { 1024 } else { 512 }) << 20;
    let rounds = number("rounds", if quick() { 3 } else { 5 });
    // Each piece of the bare link fills an extent.
    let extent = bytes / 8 + (2 << 20);
    let capacity = 16 * extent + (640 << 20);
    let file_bytes = if !wanted("memory") || wanted("file") { file_bytes } else { 0 };
    measure::plan(
        option("mib").or(option("file-mib")).is_some(),
        &[
            ("the pool", capacity),
            ("ordinary memory, touched and fresh", 3 * bytes),
            ("a file in the page cache", file_bytes),
            ("the host device's memory", if gpu { 0 } else { 2 * bytes + file_bytes }),
        ],
    );
    let builder = Pool::builder(&device).capacity(capacity).initial(capacity).region(capacity).extent(extent);
    let builder = if gpu { builder } else { builder.unpinned(Unpinned::Allow) };
    let pool = builder.build().expect("memory for a pool");
    let pinning = pool.wait_pinned(None).expect("pinning ends");
    assert!(pinning.error.is_none(), "{pinning:?}");
    let mut source = vec![0; bytes];
    fill(&mut source, cores);
    let file = (file_bytes > 0).then(|| {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        for at in (0..file_bytes).step_by(bytes) {
            file.write_all(&source[..bytes.min(file_bytes - at)]).expect("room for a file");
        }
        (file, file_bytes, device.alloc(file_bytes).expect("device memory"))
    });
    let memory = [device.alloc(bytes).expect("device memory"), device.alloc(bytes).expect("device memory")];
    let mut bench = Bench {
        target: vec![1; bytes],
        segments: Vec::new(),
        device,
        pool,
        memory,
        source,
        file,
        cores,
        gpu,
    };
    let copier = bench.copier(cores.min(8));
    copier.upload_slice(&bench.source, &bench.memory[DOWN]).expect("the transfer completes");

    let mut link = Link::new(&bench.pool, &bench.device, bytes, &[UP, DOWN]);
    let mut peaks = [f64::INFINITY; 2];
    let mut both = f64::INFINITY;
    let streams: &[usize] = if gpu { &[1, 2] } else { &[1, 2, 4] };
    let mut peak = |bench: &Bench, link: &mut Link, peaks: &mut [f64; 2]| {
        // Into separate memory: the rows' memory is compared.
        let memory = [&bench.memory[UP], &bench.memory[UP]];
        for &streams in streams {
            for direction in [UP, DOWN] {
                peaks[direction] = peaks[direction].min(link.run(&[direction], streams, memory));
            }
            both = both.min(link.run(&[UP, DOWN], streams, memory));
        }
    };
    peak(&bench, &mut link, &mut peaks);
    let mut rows = rows(&bench);
    let mut copied = f64::INFINITY;
    let mut taken: Vec<Vec<f64>> = vec![Vec::new(); rows.len()];
    let mut beside: Vec<Vec<f64>> = vec![Vec::new(); rows.len()];
    let mut copies = Vec::new();
    let mut loops: Vec<Vec<f64>> = vec![Vec::new(); rows.len()];
    let mut pairs = pairs(&bench);
    let mut together: Vec<Vec<f64>> = vec![Vec::new(); pairs.len()];
    // Once for warming up: the copiers' threads start, and the device's memory is touched.
    for Row { name, run, .. } in &mut rows {
        let (seconds, bytes) = run(&mut bench);
        println!("warm: {name}: {:.2} GB/s", bytes as f64 / seconds / 1e9);
    }
    for _ in 0..rounds {
        peak(&bench, &mut link, &mut peaks);
        if !gpu {
            let mut alone = [f64::INFINITY; 2];
            peak(&bench, &mut link, &mut alone);
            let by = [cores, 2 * cores].map(|threads| memcpy(&bench.source, &mut bench.target, threads));
            let by = by[0].min(by[1]);
            copied = copied.min(by);
            copies.push(by / alone[UP].min(alone[DOWN]));
        }
        let figures = taken.iter_mut().zip(&mut beside).zip(&mut loops);
        for (row, ((taken, beside), loops)) in rows.iter_mut().zip(figures) {
            let mut alone = [f64::INFINITY; 2];
            if !gpu {
                peak(&bench, &mut link, &mut alone);
            }
            let (seconds, moved) = (row.run)(&mut bench);
            taken.push(moved as f64 / seconds / 1e9);
            beside.push(moved as f64 / seconds / (bytes as f64 / alone[row.direction]));
            loops.push(plain(&mut bench, row.plain, row.threads) / 1e9);
        }
        for ((_, run), together) in pairs.iter_mut().zip(&mut together) {
            let (seconds, moved) = run(&mut bench, &mut link);
            together.push(moved as f64 / seconds / 1e9);
        }
    }
    drop(pairs);
    bench.segments.clear();
    let rows: Vec<_> =
        rows.into_iter().map(|row| (row.name, row.direction, row.plain, row.threads)).collect();
    let peaks = peaks.map(|seconds| bytes as f64 / seconds / 1e9);
    let both = 2.0 * bytes as f64 / both / 1e9;
    println!(
        "{}: pinned peak {:.2} GB/s up, {:.2} down, {both:.2} both at once; {} cores",
        bench.device.name(),
        peaks[UP],
        peaks[DOWN],
        cores
    );
    line("link_mb_per_s_up", 1, Spread::of(&[peaks[UP] * 1e3]));
    line("link_mb_per_s_down", 1, Spread::of(&[peaks[DOWN] * 1e3]));
    line("link_mb_per_s_both", 1, Spread::of(&[both * 1e3]));
    if !gpu {
        let copied = bytes as f64 / copied / 1e9;
        println!("memcpy by {cores} threads {copied:.2} GB/s");
        at_least("the host device's peak over memcpy", Spread::of(&copies), 0.9, None);
    }
    let figures = taken.iter().zip(&beside).zip(&loops);
    for ((name, direction, plain, threads), ((taken, beside), loops)) in rows.iter().zip(figures) {
        let spread = Spread::of(taken);
        let over = match gpu {
            true => Spread::of(&taken.iter().map(|rate| rate / peaks[*direction]).collect::<Vec<_>>()),
            false => Spread::of(beside),
        };
        let what = match plain {
            Plain::Reading => "reading",
            Plain::Into => "copying into segments",
            Plain::OutOf => "copying out of them",
        };
        println!(
            "{name:<20} {:>7.2} GB/s   {:.3} of the peak ({:.3} to {:.3})   {what} alone {:.2} by {threads}",
            spread.mid,
            over.mid,
            over.low,
            over.high,
            Spread::of(loops).mid
        );
        line(format!("bulk_mb_per_s_{name}"), 1, mega(spread));
        line(format!("plain_loop_mb_per_s_{name}"), *threads, mega(Spread::of(loops)));
        let gate = if gpu { gate(name) } else { (name == "slice_2").then_some((0.85, None)) };
        if let Some((gate, aim)) = gate {
            at_least(format!("{name} over the pinned peak"), over, gate, aim);
        }
    }
    for (name, taken) in PAIRS.iter().zip(&together) {
        let over = Spread::of(&taken.iter().map(|rate| rate / both).collect::<Vec<_>>());
        println!("{name:<20} {:>7.2} GB/s   {:.3} of the bare link's both", Spread::of(taken).mid, over.mid);
        line(format!("bulk_mb_per_s_{name}"), 1, mega(Spread::of(taken)));
        if *name == PAIRS[0] {
            at_least("both directions at once over the bare link's", over, 0.9, None);
        }
    }
    drop(link);
    for (mib, depth) in SWEEP.iter().filter(|_| flag("sweep")) {
        println!("chunks of {mib} MiB, {depth} in flight:");
        let builder = bench.builder(bench.cores.min(8)).chunk(mib << 20).depth(*depth);
        foreground(&bench, builder.build().expect("a copier"), peaks[UP]);
    }
    let builder = bench.builder(bench.cores.min(8)).depth(2);
    foreground(&bench, builder.build().expect("a copier"), peaks[UP]);
    println!("{:?}", copier.stats());
    let stats = bench.pool.stats();
    assert_eq!(stats.in_flight_bytes + stats.checked_out_bytes, 0, "{stats:?}");
    measure::used();
}

fn mega(Spread { low, mid, high }: Spread) -> Spread {
    Spread { low: low * 1e3, mid: mid * 1e3, high: high * 1e3 }
}

const PAIRS: [&str; 3] = ["both_8", "both_8_one", "both_8_pinned"];

/// A row with both directions at once. Returns seconds, and bytes.
type Pair<'a> = (&'static str, Box<dyn FnMut(&mut Bench, &mut Link) -> (f64, usize) + 'a>);

/// In the order of [`PAIRS`].
fn pairs<'a>(bench: &Bench) -> Vec<Pair<'a>> {
    let threads = bench.cores.min(8);
    let two = [bench.copier(threads), bench.copier(threads)];
    let one = bench.copier(number("one", 2 * threads));
    let staged = |[up, down]: [Copier; 2]| {
        move |bench: &mut Bench, _: &mut Link| {
            let Bench { source, target, memory, .. } = bench;
            timed(2 * source.len(), || {
                std::thread::scope(|scope| {
                    scope.spawn(|| up.upload_slice(source, &memory[UP]).expect("the transfer completes"));
                    down.download_slice(&memory[DOWN], target).expect("the transfer completes");
                });
            })
        }
    };
    let pinned = {
        let two = [bench.copier(threads), bench.copier(threads)];
        move |bench: &mut Bench, link: &mut Link| {
            let Bench { source, target, memory, .. } = bench;
            let [up, down] = &two;
            timed(2 * source.len(), || {
                let there = |number: usize| {
                    memory[UP].slice(number * link.piece..(number + 1) * link.piece).expect("within")
                };
                let bufs = std::mem::take(&mut link.bufs[UP]).into_iter().enumerate();
                let sent = up.upload_pages(bufs.map(|(number, buf)| (buf, there(number))).collect());
                down.download_slice(&memory[DOWN], target).expect("the transfer completes");
                link.bufs[UP] = sent.expect("starts").wait().expect("the transfer completes");
            })
        }
    };
    vec![
        (PAIRS[0], Box::new(staged(two))),
        (PAIRS[1], Box::new(staged([one.clone(), one]))),
        (PAIRS[2], Box::new(pinned)),
    ]
}

/// Uploads of 64 KiB, alone and during a bulk load.
fn foreground(bench: &Bench, bulk: Copier, peak: f64) {
    const LEN: usize = 64 << 10;
    let count = if quick() { 200 } else { 2000 };
    let stream = bench.device.stream().expect("a stream");
    let memory = bench.device.alloc(LEN).expect("device memory");
    let first = bulk.with_priority(Priority::Foreground);
    let bytes = vec![5; LEN];
    let mut own = Some(bench.pool.checkout(LEN).expect("room"));
    own.as_mut().expect("there").extend_from_slice(&bytes);
    let direct = |own: &mut Option<PinnedBuf>| {
        let buf = own.take().expect("back");
        *own = Some(stream.upload(buf, &memory).expect("a copy").wait().expect("the transfer completes"));
    };
    let mut times = |what: &mut dyn FnMut(&mut Option<PinnedBuf>)| -> Vec<f64> {
        (0..count)
            .map(|_| {
                let since = Instant::now();
                what(&mut own);
                let taken = since.elapsed().as_secs_f64() * 1e6;
                std::thread::sleep(Duration::from_micros(100));
                taken
            })
            .collect()
    };
    let through =
        |_: &mut Option<PinnedBuf>| first.upload_slice(&bytes, &memory).expect("the transfer completes");
    let mut all = || [times(&mut |own| direct(own)), times(&mut |own| through(own))];
    let idle = all();
    let stop = AtomicBool::new(false);
    let (mut moved, mut took) = (0_u64, 0.0);
    let busy = std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let (since, mut moved) = (Instant::now(), 0);
            // Relaxed: no other data depends on the flag.
            while !stop.load(Ordering::Relaxed) {
                bulk.upload_slice(&bench.source, &bench.memory[UP]).expect("the transfer completes");
                moved += bench.source.len() as u64;
            }
            (moved, since.elapsed().as_secs_f64())
        });
        std::thread::sleep(Duration::from_millis(20));
        let busy = all();
        stop.store(true, Ordering::Relaxed);
        (moved, took) = load.join().expect("loads");
        busy
    });
    let chunk = bulk.stats().chunk as f64 / peak / 1e3;
    println!(
        "bulk load meanwhile: {:.2} GB/s; two chunks take {:.1} us",
        moved as f64 / took / 1e9,
        2.0 * chunk
    );
    let kinds = ["direct", "copier"];
    for (what, (idle, busy)) in kinds.iter().zip(idle.iter().zip(&busy)) {
        let (before, during) = (quantile(idle, 0.99), quantile(busy, 0.99));
        println!(
            "foreground 64 KiB, {what}: p50 {:.1} us idle, {:.1} during the load; p99 {before:.1}, {during:.1}",
            quantile(idle, 0.5),
            quantile(busy, 0.5)
        );
        let over = during / (before + 2.0 * chunk);
        if *what == "direct" {
            // The copier is not told of the foreground copy.
            println!("its p99 during the load over idle p99 and two chunks: {over:.3}");
            continue;
        }
        at_most(
            format!("foreground, {what}: p99 during the load over idle p99 and two chunks"),
            Spread::of(&[over]),
            1.0,
            None,
        );
    }
}
