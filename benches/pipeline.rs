//! The copy pipeline beside the link: how much of the pinned peak each way to and from the device reaches.
//!
//! # What is measured
//!
//! The *peak* of each direction is the best of all copies of `--mib` (1024) from, or into, page-locked memory in this run: no
//! staging, on one stream or on several at once, whichever is faster. Each row moves as much or more through a pipeline of
//! its own, whose pool is the same; figures are wall time of the whole call. Rows of a round follow each other, a peak's
//! copy among them, and what is printed is the median of the rounds, over the peak. All that arrived is compared with what
//! was sent, once for each row, outside of the time.
//!
//! | row | what it is |
//! | --- | --- |
//! | `file_T` | a file of `--file-mib` (8192) in the page cache to the device, T threads |
//! | `read_T`, `mapped_T` | the same, read in any case, and copied from windows in any case |
//! | `slice_T` | touched ordinary memory to the device |
//! | `touched_T` | the device to touched ordinary memory |
//! | `fresh_T` | the device to a new vector |
//! | `both_8` | `slice_8` and `touched_8` at once, over the same two directions of the bare link at once |
//!
//! Then a foreground upload of 64 KiB, alone and during a bulk load: its 99th percentile, the bulk rate beside it. On the
//! host device, whose link is the CPU and whoever else uses that, each row is compared with a copy of the bare link right
//! before it, and that with copies by threads of the bench's own (`memcpy`).
//!
//! `--device NAME` (a GPU, else the host device), `--rounds N`, `--only A,B`, `--sweep` for chunk lengths and stores. `cargo
//! bench --bench pipeline`, or the executable by itself.
#![allow(missing_docs, unsafe_code)]

mod measure;

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use measure::{Spread, at_least, at_most, flag, line, number, option, quantile, quick, wanted};
use pinpool::pipeline::{FileSource, Pipeline, PipelineBuilder, Priority, Reading, Stores};
use pinpool::{Device, DeviceBuffer, InFlight, PinnedBuf, Pool, Stream, Unpinned};

/// Page-locked memory and streams, for the bare link.
struct Link {
    streams: Vec<Stream>,
    bufs: [Vec<PinnedBuf>; 2],
    piece: usize,
}

const UP: usize = 0;
const DOWN: usize = 1;

impl Link {
    fn new(pool: &Pool, device: &Device, bytes: usize) -> Self {
        let pieces = 8;
        let piece = bytes / pieces;
        let buf = |_| {
            let buf = pool.checkout_timeout(piece, Duration::from_secs(20));
            let mut buf = buf.expect("the pool is large enough");
            buf.try_resize(piece, 1).expect("within its capacity");
            buf
        };
        let bufs = [(0..pieces).map(buf).collect(), (0..pieces).map(buf).collect()];
        let streams = (0..8).map(|_| device.stream().expect("a stream")).collect();
        Self { streams, bufs, piece }
    }

    /// Moves all of it, on so many streams for each direction: seconds.
    fn run(&mut self, directions: &[usize], streams: usize, memory: [&DeviceBuffer; 2]) -> f64 {
        let since = Instant::now();
        let mut flights: [Vec<InFlight<PinnedBuf>>; 2] = [Vec::new(), Vec::new()];
        for number in 0..8 {
            let part = number * self.piece..(number + 1) * self.piece;
            for &direction in directions {
                let buf = self.bufs[direction].remove(0);
                let stream = &self.streams[direction * streams + number % streams];
                let slice = memory[direction].slice(part.clone());
                flights[direction].push(match direction {
                    UP => stream.upload(buf, slice).expect("a copy"),
                    _ => stream.download(slice, buf).expect("a copy"),
                });
            }
        }
        for (bufs, flights) in self.bufs.iter_mut().zip(flights) {
            bufs.extend(flights.into_iter().map(|flight| flight.wait().expect("the device works")));
        }
        since.elapsed().as_secs_f64()
    }
}

struct Bench {
    device: Device,
    pool: Pool,
    memory: [DeviceBuffer; 2],
    source: Vec<u8>,
    target: Vec<u8>,
    file: Option<(tempfile::NamedTempFile, usize, DeviceBuffer)>,
    cores: usize,
    gpu: bool,
}

impl Bench {
    fn builder(&self, threads: usize) -> PipelineBuilder {
        Pipeline::builder(&self.pool, &self.device).threads(threads)
    }

    fn pipeline(&self, threads: usize) -> Pipeline {
        self.builder(threads).build().expect("a pipeline")
    }
}

/// What one row does: seconds, and bytes.
type Row<'a> = (String, Box<dyn FnMut(&mut Bench) -> (f64, usize) + 'a>, usize);

fn timed(bytes: usize, work: impl FnOnce()) -> (f64, usize) {
    let since = Instant::now();
    work();
    (since.elapsed().as_secs_f64(), bytes)
}

fn fill(bytes: &mut [u8], threads: usize) {
    let part = bytes.len().div_ceil(threads).next_multiple_of(8);
    std::thread::scope(|scope| {
        for (number, part) in bytes.chunks_mut(part).enumerate() {
            scope.spawn(move || {
                let mut x = number as u64 + 0x9e37_79b9_7f4a_7c15;
                for eight in part.chunks_mut(8) {
                    x ^= x << 13;
                    x ^= x >> 7;
                    x ^= x << 17;
                    let n = eight.len();
                    eight.copy_from_slice(&x.to_le_bytes()[..n]);
                }
            });
        }
    });
}

/// Copies by threads of its own.
fn memcpy(from: &[u8], to: &mut [u8], threads: usize) -> f64 {
    let part = from.len().div_ceil(threads);
    let since = Instant::now();
    std::thread::scope(|scope| {
        for (from, to) in from.chunks(part).zip(to.chunks_mut(part)) {
            scope.spawn(|| to.copy_from_slice(from));
        }
    });
    since.elapsed().as_secs_f64()
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

fn file_row<'a>(name: String, pipeline: Pipeline, reading: Reading) -> Row<'a> {
    let mut checked = false;
    let run = move |bench: &mut Bench| {
        let (file, len, memory) = bench.file.as_ref().expect("made");
        let source = FileSource::open(file.path()).expect("opens").reading(reading);
        let taken = timed(*len, || {
            pipeline.upload_file(source, memory).expect("starts").wait().expect("arrives");
        });
        if !std::mem::replace(&mut checked, true) {
            // The file is the source, over and over.
            let check = Pipeline::builder(&bench.pool, &bench.device).build().expect("a pipeline");
            for at in (0..*len).step_by(bench.source.len()) {
                let n = bench.source.len().min(len - at);
                check.download_slice(memory.slice(at..at + n), &mut bench.target[..n]).expect("arrives");
                assert!(equal(&bench.source[..n], &bench.target[..n], bench.cores), "wrong bytes at {at}");
            }
        }
        taken
    };
    (name, Box::new(run), UP)
}

fn slice_row<'a>(name: String, pipeline: Pipeline) -> Row<'a> {
    let mut checked = false;
    let run = move |bench: &mut Bench| {
        let taken = timed(bench.source.len(), || {
            pipeline.upload_slice(&bench.source, &bench.memory[UP]).expect("arrives");
        });
        if !std::mem::replace(&mut checked, true) {
            bench.target.fill(0);
            pipeline.download_slice(&bench.memory[UP], &mut bench.target).expect("arrives");
            assert!(equal(&bench.source, &bench.target, bench.cores), "wrong bytes");
        }
        taken
    };
    (name, Box::new(run), UP)
}

fn touched_row<'a>(name: String, pipeline: Pipeline) -> Row<'a> {
    let run = move |bench: &mut Bench| {
        let taken = timed(bench.source.len(), || {
            pipeline.download_slice(&bench.memory[DOWN], &mut bench.target).expect("arrives");
        });
        assert!(equal(&bench.source, &bench.target, bench.cores), "wrong bytes");
        taken
    };
    (name, Box::new(run), DOWN)
}

fn fresh_row<'a>(name: String, pipeline: Pipeline) -> Row<'a> {
    let run = move |bench: &mut Bench| {
        let mut back = Vec::new();
        let taken = timed(bench.source.len(), || {
            back = pipeline.download_vec(&bench.memory[DOWN]).expect("arrives");
        });
        assert!(equal(&bench.source, &back, bench.cores), "wrong bytes");
        taken
    };
    (name, Box::new(run), DOWN)
}

fn rows<'a>(bench: &Bench) -> Vec<Row<'a>> {
    let mut rows = Vec::new();
    let counts: &[usize] = if bench.gpu { &[8, 4, 1] } else { &[2, 1] };
    if bench.file.is_some() {
        for &threads in counts {
            let pipeline = bench.pipeline(threads);
            rows.push(file_row(format!("file_{threads}"), pipeline.clone(), Reading::Auto));
            rows.push(file_row(format!("read_{threads}"), pipeline.clone(), Reading::Buffered));
            rows.push(file_row(format!("mapped_{threads}"), pipeline, Reading::Mapped));
        }
    }
    let many: &[usize] = if bench.gpu { &[8, 16] } else { &[2, 1] };
    for &threads in many {
        rows.push(slice_row(format!("slice_{threads}"), bench.pipeline(threads)));
        rows.push(touched_row(format!("touched_{threads}"), bench.pipeline(threads)));
        rows.push(fresh_row(format!("fresh_{threads}"), bench.pipeline(threads)));
    }
    if flag("sweep") {
        for &threads in many {
            for (word, stores) in [("cached", Stores::Cached), ("streaming", Stores::Streaming)] {
                let pipeline = bench.builder(threads).stores(stores).build().expect("a pipeline");
                rows.push(slice_row(format!("slice_{threads}_{word}"), pipeline.clone()));
                rows.push(touched_row(format!("touched_{threads}_{word}"), pipeline.clone()));
            }
            for mib in [1, 2, 4, 16] {
                let pipeline = bench.builder(threads).chunk(mib << 20).build().expect("a pipeline");
                rows.push(slice_row(format!("slice_{threads}_{mib}mib"), pipeline.clone()));
                rows.push(touched_row(format!("touched_{threads}_{mib}mib"), pipeline));
            }
            for depth in [1, 3, 4, 8] {
                let pipeline = bench.builder(threads).depth(depth).build().expect("a pipeline");
                rows.push(slice_row(format!("slice_{threads}_depth{depth}"), pipeline.clone()));
                rows.push(touched_row(format!("touched_{threads}_depth{depth}"), pipeline));
            }
        }
    }
    rows
}

/// Gate and aim of a row, over the peak.
fn gate(row: &str) -> Option<(f64, Option<f64>)> {
    Some(match row {
        "file_8" => (0.95, Some(0.97)),
        "file_4" => (0.65, None),
        "file_1" => (0.40, None),
        "slice_8" => (0.92, None),
        "touched_16" => (0.94, None),
        "touched_8" => (0.88, None),
        "fresh_16" => (0.60, None),
        _ => return None,
    })
}

fn main() {
    // Asked for by cargo, which tests benches too.
    if flag("test") {
        return println!("pipeline: not a test");
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
    let bytes = number("mib", if gpu && !quick() { 1024 } else { 128 }) << 20;
    let file_bytes = number("file-mib", if gpu && !quick() { 8192 } else { 512 }) << 20;
    let rounds = number("rounds", if quick() { 3 } else { 7 });
    // The bare link's pieces fill an extent each.
    let extent = bytes / 8 + (2 << 20);
    let capacity = 16 * extent + (640 << 20);
    let builder = Pool::builder(&device).capacity(capacity).initial(capacity).region(capacity).extent(extent);
    let builder = if gpu { builder } else { builder.unpinned(Unpinned::Allow) };
    let pool = builder.build().expect("memory for a pool");
    let pinning = pool.wait_pinned(None).expect("pinning ends");
    assert!(pinning.error.is_none(), "{pinning:?}");
    let mut source = vec![0; bytes];
    fill(&mut source, cores);
    let file = wanted("file").then(|| {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        for at in (0..file_bytes).step_by(bytes) {
            file.write_all(&source[..bytes.min(file_bytes - at)]).expect("room for a file");
        }
        (file, file_bytes, device.alloc(file_bytes).expect("device memory"))
    });
    let memory = [device.alloc(bytes).expect("device memory"), device.alloc(bytes).expect("device memory")];
    let mut bench = Bench { target: vec![1; bytes], device, pool, memory, source, file, cores, gpu };
    let pipeline = bench.pipeline(cores.min(8));
    pipeline.upload_slice(&bench.source, &bench.memory[DOWN]).expect("arrives");

    let mut link = Link::new(&bench.pool, &bench.device, bytes);
    let mut peaks = [f64::INFINITY; 2];
    let mut both = f64::INFINITY;
    let streams: &[usize] = if gpu { &[1, 2] } else { &[1, 2, 4] };
    let mut peak = |bench: &Bench, peaks: &mut [f64; 2]| {
        // Into memory of its own: the rows' is compared.
        let memory = [&bench.memory[UP], &bench.memory[UP]];
        for &streams in streams {
            for direction in [UP, DOWN] {
                peaks[direction] = peaks[direction].min(link.run(&[direction], streams, memory));
            }
            both = both.min(link.run(&[UP, DOWN], streams, memory));
        }
    };
    peak(&bench, &mut peaks);
    let mut rows = rows(&bench);
    let mut copied = f64::INFINITY;
    let mut taken: Vec<Vec<f64>> = vec![Vec::new(); rows.len()];
    let mut beside: Vec<Vec<f64>> = vec![Vec::new(); rows.len()];
    let mut copies = Vec::new();
    let mut together = Vec::new();
    // Once for warmth, and for what is measured by the pipelines themselves.
    for (name, run, _) in &mut rows {
        let (seconds, bytes) = run(&mut bench);
        println!("warm: {name}: {:.2} GB/s", bytes as f64 / seconds / 1e9);
    }
    for _ in 0..rounds {
        peak(&bench, &mut peaks);
        if !gpu {
            let mut alone = [f64::INFINITY; 2];
            peak(&bench, &mut alone);
            let by = [cores, 2 * cores].map(|threads| memcpy(&bench.source, &mut bench.target, threads));
            let by = by[0].min(by[1]);
            copied = copied.min(by);
            copies.push(by / alone[UP].min(alone[DOWN]));
        }
        for (((_, run, direction), taken), beside) in rows.iter_mut().zip(&mut taken).zip(&mut beside) {
            let mut alone = [f64::INFINITY; 2];
            if !gpu {
                peak(&bench, &mut alone);
            }
            let (seconds, moved) = run(&mut bench);
            taken.push(moved as f64 / seconds / 1e9);
            beside.push(moved as f64 / seconds / (bytes as f64 / alone[*direction]));
        }
        let (up, down) = (bench.pipeline(8.min(cores)), bench.pipeline(8.min(cores)));
        let (source, target) = (&bench.source, &mut bench.target);
        let memory = &bench.memory;
        together.push(timed(2 * bytes, || {
            std::thread::scope(|scope| {
                scope.spawn(|| up.upload_slice(source, &memory[UP]).expect("arrives"));
                down.download_slice(&memory[DOWN], target).expect("arrives");
            });
        }));
    }
    drop(rows);
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
    let names: Vec<(String, usize)> = self::rows(&bench).into_iter().map(|row| (row.0, row.2)).collect();
    for (((name, direction), taken), beside) in names.iter().zip(&taken).zip(&beside) {
        let spread = Spread::of(taken);
        let over = match gpu {
            true => Spread::of(&taken.iter().map(|rate| rate / peaks[*direction]).collect::<Vec<_>>()),
            false => Spread::of(beside),
        };
        println!(
            "{name:<20} {:>7.2} GB/s   {:.3} of the peak ({:.3} to {:.3})",
            spread.mid, over.mid, over.low, over.high
        );
        let Spread { low, mid, high } = spread;
        line(
            format!("pipeline_mb_per_s_{name}"),
            1,
            Spread { low: low * 1e3, mid: mid * 1e3, high: high * 1e3 },
        );
        let gate = if gpu { gate(name) } else { (name == "slice_2").then_some((0.85, None)) };
        if let Some((gate, aim)) = gate {
            at_least(format!("{name} over the pinned peak"), over, gate, aim);
        }
    }
    let rates: Vec<f64> =
        together.iter().map(|(seconds, bytes)| *bytes as f64 / seconds / 1e9 / both).collect();
    at_least("both directions at once over the bare link's", Spread::of(&rates), 0.9, None);
    drop(link);
    foreground(&bench, peaks[UP]);
    println!("{:?}", pipeline.stats());
    let stats = bench.pool.stats();
    assert_eq!(stats.in_flight_bytes + stats.checked_out_bytes, 0, "{stats:?}");
}

/// Uploads of 64 KiB, alone and during a bulk load.
fn foreground(bench: &Bench, peak: f64) {
    const LEN: usize = 64 << 10;
    let count = if quick() { 200 } else { 2000 };
    let stream = bench.device.stream().expect("a stream");
    let memory = bench.device.alloc(LEN).expect("device memory");
    let bulk = Arc::new(bench.pipeline(bench.cores.min(8)));
    let first = bulk.with_priority(Priority::Foreground);
    let bytes = vec![5; LEN];
    let mut own = Some(bench.pool.checkout(LEN).expect("room"));
    own.as_mut().expect("there").extend_from_slice(&bytes);
    let direct = |own: &mut Option<PinnedBuf>| {
        let buf = own.take().expect("back");
        *own = Some(stream.upload(buf, &memory).expect("a copy").wait().expect("arrives"));
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
    let through = |_: &mut Option<PinnedBuf>| first.upload_slice(&bytes, &memory).expect("arrives");
    let idle = [times(&mut |own| direct(own)), times(&mut |own| through(own))];
    let stop = AtomicBool::new(false);
    let (mut moved, mut took) = (0_u64, 0.0);
    let busy = std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let (since, mut moved) = (Instant::now(), 0);
            // Relaxed: a flag.
            while !stop.load(Ordering::Relaxed) {
                bulk.upload_slice(&bench.source, &bench.memory[UP]).expect("arrives");
                moved += bench.source.len() as u64;
            }
            (moved, since.elapsed().as_secs_f64())
        });
        std::thread::sleep(Duration::from_millis(20));
        let busy = [times(&mut |own| direct(own)), times(&mut |own| through(own))];
        stop.store(true, Ordering::Relaxed);
        (moved, took) = load.join().expect("loads");
        busy
    });
    let wire = bulk.chunk() as f64 / peak / 1e3;
    println!(
        "bulk load meanwhile: {:.2} GB/s; two chunks take {:.1} us",
        moved as f64 / took / 1e9,
        2.0 * wire
    );
    for (what, (idle, busy)) in ["direct", "pipeline"].iter().zip(idle.iter().zip(&busy)) {
        let (before, during) = (quantile(idle, 0.99), quantile(busy, 0.99));
        println!(
            "foreground 64 KiB, {what}: p50 {:.1} us idle, {:.1} during the load; p99 {before:.1}, {during:.1}",
            quantile(idle, 0.5),
            quantile(busy, 0.5)
        );
        at_most(
            format!("foreground, {what}: p99 during the load over idle p99 and two chunks"),
            Spread::of(&[during / (before + 2.0 * wire)]),
            1.0,
            None,
        );
    }
}
