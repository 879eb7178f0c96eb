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
//!
//! Beside each row of a file the bench prints the speed of a plain loop of as many threads in the same round, without a
//! device: it reads the file, 4 MiB at a time into two segments of ordinary memory for each thread. A row that is as fast
//! as that loop is as fast as staging can be on this machine.
//!
//! On the host device the link is the CPU, which other programs use as well.
//!
//! `--device NAME` (a GPU, else the host device), `--rounds N`, `--only file` with the rows of files (default), `--only
//! memory` without. `cargo bench --bench bulk`, or the executable by itself. With the lengths in parentheses the bench
//! uses at most 4 GiB. On the host device they are 128 and 512, and the device's memory is part of the 4 GiB.
#![allow(missing_docs, unsafe_code)]

mod measure;

use std::io::Write;
use std::time::Instant;

use measure::link::{self, DOWN, Link, UP, fill};
use measure::{Spread, at_least, flag, line, number, option, quick, wanted};
use pinpool::copier::{FileSource, Reading};
use pinpool::{Copier, Device, DeviceSlice, Pool};

struct Bench {
    device: Device,
    pool: Pool,
    memory: [DeviceSlice; 2],
    source: Vec<u8>,
    target: Vec<u8>,
    file: Option<(tempfile::NamedTempFile, usize, DeviceSlice)>,
    cores: usize,
    gpu: bool,
}

impl Bench {
    fn copier(&self, threads: usize) -> Copier {
        Copier::builder(&self.pool, &self.device).threads(threads).build().expect("a copier")
    }
}

/// Makes one transfer. Returns seconds, and bytes.
type Run<'a> = Box<dyn FnMut(&mut Bench) -> (f64, usize) + 'a>;

/// One way to or from the device.
struct Row<'a> {
    name: String,
    run: Run<'a>,
    direction: usize,
    /// For a row of a file: the threads that read it.
    reads: Option<usize>,
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
    Row { name, run: Box::new(run), direction: UP, reads: Some(threads) }
}

fn slice_row<'a>(name: String, copier: Copier) -> Row<'a> {
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
    Row { name, run: Box::new(run), direction: UP, reads: None }
}

fn touched_row<'a>(name: String, copier: Copier) -> Row<'a> {
    let run = move |bench: &mut Bench| {
        let taken = timed(bench.source.len(), || {
            copier.download_slice(&bench.memory[DOWN], &mut bench.target).expect("the transfer completes");
        });
        assert!(equal(&bench.source, &bench.target, bench.cores), "wrong bytes");
        taken
    };
    Row { name, run: Box::new(run), direction: DOWN, reads: None }
}

fn fresh_row<'a>(name: String, copier: Copier) -> Row<'a> {
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
    Row { name, run: Box::new(run), direction: DOWN, reads: None }
}

fn rows<'a>(bench: &Bench) -> Vec<Row<'a>> {
    let mut rows = Vec::new();
    let counts: &[usize] = if bench.gpu { &[8, 16] } else { &[2, 1] };
    if bench.file.is_some() {
        let threads = counts[0];
        rows.push(file_row(format!("file_{threads}"), bench.copier(threads), Reading::Auto));
        rows.push(file_row(format!("read_{threads}"), bench.copier(threads), Reading::Buffered));
    }
    for &threads in counts {
        rows.push(slice_row(format!("slice_{threads}"), bench.copier(threads)));
        rows.push(touched_row(format!("touched_{threads}"), bench.copier(threads)));
        rows.push(fresh_row(format!("fresh_{threads}"), bench.copier(threads)));
    }
    rows
}

/// Gate and aim of a row, over the peak.
fn gate(row: &str) -> Option<(f64, Option<f64>)> {
    Some(match row {
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
    let (device, gpu) = link::device();
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
    let pool = measure::small::pinned(&device, builder);
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
    let mut bench = Bench { target: vec![1; bytes], device, pool, memory, source, file, cores, gpu };
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
    let mut taken: Vec<Vec<f64>> = vec![Vec::new(); rows.len()];
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
        for (row, (taken, loops)) in rows.iter_mut().zip(taken.iter_mut().zip(&mut loops)) {
            let (seconds, moved) = (row.run)(&mut bench);
            taken.push(moved as f64 / seconds / 1e9);
            if let (Some(threads), Some((file, len, _))) = (row.reads, &bench.file) {
                loops.push(*len as f64 / link::read(file.as_file(), *len, threads) / 1e9);
            }
        }
        for ((_, run), together) in pairs.iter_mut().zip(&mut together) {
            let (seconds, moved) = run(&mut bench);
            together.push(moved as f64 / seconds / 1e9);
        }
    }
    drop(pairs);
    let rows: Vec<_> = rows.into_iter().map(|row| (row.name, row.direction, row.reads)).collect();
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
    for ((name, direction, reads), (taken, loops)) in rows.iter().zip(taken.iter().zip(&loops)) {
        let spread = Spread::of(taken);
        let over = Spread::of(&taken.iter().map(|rate| rate / peaks[*direction]).collect::<Vec<_>>());
        println!(
            "{name:<20} {:>7.2} GB/s   {:.3} of the peak ({:.3} to {:.3})",
            spread.mid, over.mid, over.low, over.high
        );
        line(format!("bulk_mb_per_s_{name}"), 1, mega(spread));
        if let Some(threads) = reads {
            let reading = Spread::of(loops);
            println!("{:<20} {:>7.2} GB/s   by {threads} threads that only read the file", "", reading.mid);
            line(format!("plain_loop_mb_per_s_{name}"), *threads, mega(reading));
            if name == "file_8" {
                let most = loops.iter().map(|rate| rate.min(peaks[UP]));
                let over: Vec<f64> = taken.iter().zip(most).map(|(rate, most)| rate / most).collect();
                let what = format!("{name} over the lesser of the peak and of reading alone");
                at_least(what, Spread::of(&over), 0.98, None);
            }
        }
        if let Some((gate, aim)) = gate(name) {
            at_least(format!("{name} over the pinned peak"), over, gate, aim);
        }
    }
    for (name, taken) in PAIRS.iter().zip(&together) {
        let over = Spread::of(&taken.iter().map(|rate| rate / both).collect::<Vec<_>>());
        println!("{name:<20} {:>7.2} GB/s   {:.3} of the bare link's both", Spread::of(taken).mid, over.mid);
        line(format!("bulk_mb_per_s_{name}"), 1, mega(Spread::of(taken)));
        at_least(format!("{name} over the bare link's both"), over, 0.9, None);
    }
    drop(link);
    println!("{:?}", copier.stats());
    let stats = bench.pool.stats();
    assert_eq!(stats.in_flight_bytes + stats.checked_out_bytes, 0, "{stats:?}");
    measure::used();
}

fn mega(Spread { low, mid, high }: Spread) -> Spread {
    Spread { low: low * 1e3, mid: mid * 1e3, high: high * 1e3 }
}

const PAIRS: [&str; 2] = ["both_8", "both_8_one"];

/// A row with both directions at once. Returns seconds, and bytes.
type Pair<'a> = (&'static str, Box<dyn FnMut(&mut Bench) -> (f64, usize) + 'a>);

/// In the order of [`PAIRS`].
fn pairs<'a>(bench: &Bench) -> Vec<Pair<'a>> {
    let threads = bench.cores.min(8);
    let two = [bench.copier(threads), bench.copier(threads)];
    let one = bench.copier(number("one", 2 * threads));
    let staged = |[up, down]: [Copier; 2]| {
        move |bench: &mut Bench| {
            let Bench { source, target, memory, .. } = bench;
            timed(2 * source.len(), || {
                std::thread::scope(|scope| {
                    scope.spawn(|| up.upload_slice(source, &memory[UP]).expect("the transfer completes"));
                    down.download_slice(&memory[DOWN], target).expect("the transfer completes");
                });
            })
        }
    };
    vec![(PAIRS[0], Box::new(staged(two))), (PAIRS[1], Box::new(staged([one.clone(), one])))]
}
