//! Loading checkpoints in the safetensors format to the device, beside the link.
//!
//! # What is measured
//!
//! Two files in the page cache: `small`, 16,384 tensors of 16 KiB, and `large`, 64 tensors of 32 MiB (`--large-mib` for
//! another length of all). Each is loaded by 8 threads (or as many as there are cores), all tensors handed out, wall time
//! of the whole.
//!
//! | row | what it is |
//! | --- | --- |
//! | `copier` | the copier itself: the same range of the same file to the same memory, as one transfer of bytes |
//! | `load` | an opened checkpoint into existing device memory |
//! | `alloc` | the same, into device memory of its own, allocated and freed within the time |
//! | `open` | the same, the header read within the time as well |
//!
//! The *peak* is the best of all copies of 1 GiB from page-locked memory in this run. Rows follow each other in every
//! round, and each round begins with another row. A copy for the peak is among them, and a plain loop of as many
//! threads that reads the file into ordinary memory, which is as fast as staging can be on this machine. The bytes on
//! the device are compared with the file, once for each file, outside of the measured time.
//!
//! After three rounds of a file no other round begins when 8 s have passed. Each part prints when it ends.
//!
//! `--first FILE` measures one thing alone: the first load of a process, from the making of the pool to the last tensor. The
//! opening of the device is not in it.
//!
//! `benches/peers/safetensors_load.py` loads the same files by safetensors' own loaders; for it `--files FOLDER` keeps
//! the files in that folder. `--device NAME` (a GPU, else the host device), `--rounds N`. `cargo bench -p
//! pinpool-safetensors`, or the executable by itself.
#![allow(missing_docs, unsafe_code)]

#[path = "../../../benches/measure/mod.rs"]
mod measure;

use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use measure::link::{self, Link, UP};
use measure::{Rounds, Spread, at_least, flag, line, number, option, quick};
use pinpool::copier::FileSource;
use pinpool::{Copier, Device, DeviceSlice, Pool, Unpinned};
use pinpool_safetensors::{Checkpoint, DeviceTensor};

/// A file of equal tensors of bytes that do not repeat.
fn write(path: &Path, count: usize, len: usize) {
    let mut header = String::from("{");
    for number in 0..count {
        let comma = if number > 0 { "," } else { "" };
        let (from, to) = (number * len, (number + 1) * len);
        let shape = len / 2;
        header += &format!(
            r#"{comma}"model.layers.{number}.weight":{{"dtype":"BF16","shape":[{shape}],"data_offsets":[{from},{to}]}}"#
        );
    }
    header.push('}');
    // Padded as the format's own writer does it.
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let mut file = BufWriter::with_capacity(1 << 20, std::fs::File::create(path).expect("a file"));
    file.write_all(&(header.len() as u64).to_le_bytes()).expect("room for a file");
    file.write_all(header.as_bytes()).expect("room for a file");
    let mut block = vec![0; 1 << 24];
    link::fill(&mut block, 8);
    let (mut left, mut turn) = (count * len, 0_u64);
    while left > 0 {
        // Different from every block before it.
        turn += 1;
        block.chunks_exact_mut(4096).for_each(|page| page[..8].copy_from_slice(&turn.to_le_bytes()));
        let part = left.min(block.len());
        file.write_all(&block[..part]).expect("room for a file");
        left -= part;
    }
    file.flush().expect("room for a file");
}

/// A file, and the state that its rows share.
struct LoadSetup<'a> {
    name: &'a str,
    path: &'a Path,
    bytes: usize,
    checkpoint: Checkpoint,
    copier: &'a Copier,
    memory: &'a DeviceSlice,
}

impl LoadSetup<'_> {
    /// Device memory for the rows that do not allocate.
    fn load(&self) -> Vec<DeviceTensor> {
        let loader = self.checkpoint.loader(self.copier);
        loader.memory(|len| self.memory.slice(..len)).load().expect("the transfer completes")
    }

    /// The range of the file that holds its tensors.
    fn range(&self) -> std::ops::Range<u64> {
        let ends = self.checkpoint.tensors().map(|tensor| tensor.range().end);
        let start = self.checkpoint.tensors().next().map_or(0, |tensor| tensor.range().start);
        start..ends.max().unwrap_or(start)
    }

    /// Checks every byte on the device.
    fn check(&self) {
        let file = std::fs::File::open(self.path).expect("a file");
        for tensor in self.load() {
            let back = self
                .copier
                .download(tensor.slice().expect("it has bytes"), Vec::new())
                .expect("starts")
                .wait()
                .expect("comes back");
            let mut right = vec![0; back.len()];
            file.read_exact_at(&mut right, tensor.range().start).expect("is read");
            assert!(back == right, "{}", tensor.name());
        }
    }

    /// Runs a row once. Returns the seconds.
    fn row(&self, row: &str) -> f64 {
        let since = Instant::now();
        let tensors = match row {
            "copier" => {
                let source = FileSource::open(self.path).and_then(|file| file.range(self.range()));
                let since = Instant::now();
                let source = source.expect("a file");
                let sent = self.copier.upload(source, self.memory.slice(..self.bytes));
                sent.expect("starts").wait().expect("the transfer completes");
                return since.elapsed().as_secs_f64();
            }
            "load" => self.load(),
            "alloc" => self.checkpoint.loader(self.copier).load().expect("the transfer completes"),
            _ => {
                let checkpoint = Checkpoint::open(self.path).expect("a checkpoint");
                checkpoint.loader(self.copier).load().expect("the transfer completes")
            }
        };
        let taken = since.elapsed().as_secs_f64();
        assert_eq!(tensors.len(), self.checkpoint.tensors().count());
        taken
    }
}

/// The first load of a process.
fn first(device: &Device, path: &Path) {
    let since = Instant::now();
    let builder = Pool::builder(device).capacity(256 << 20).unpinned(Unpinned::Allow);
    let copier = Copier::builder(&builder.build().expect("a pool"), device).build().expect("a copier");
    let checkpoint = Checkpoint::open(path).expect("a checkpoint");
    let tensors = checkpoint.loader(&copier).load().expect("the transfer completes");
    let taken = since.elapsed().as_secs_f64();
    assert_eq!(tensors.len(), checkpoint.tensors().count());
    println!("the first load of a process: {:.2} GB/s", checkpoint.bytes() as f64 / taken / 1e9);
    line("tensors_first_load_ms", copier.stats().threads, Spread::of(&[taken * 1e3]));
}

/// The fewest rounds, and the time after which no other round of a file begins.
const ENOUGH: usize = 3;
const LONGEST: Duration = Duration::from_secs(8);
const ROWS: [&str; 4] = ["copier", "load", "alloc", "open"];

fn main() {
    // `cargo test` runs benches with this argument.
    if flag("test") {
        return println!("tensors: not a test");
    }
    let begun = Instant::now();
    let (device, gpu) = link::device();
    if let Some(path) = option("first") {
        return first(&device, Path::new(&path));
    }
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let rounds = number("rounds", if quick() { 3 } else { 5 });
    let large = number("large-mib", if gpu && !quick() { 2048 } else { 256 }) << 20;
    let link_bytes = 1 << if gpu { 30 } else { 27 };
    // Each piece of the bare link fills an extent.
    let extent = link_bytes / 8 + (2 << 20);
    let capacity = 8 * extent + (400 << 20);
    measure::plan(
        option("large-mib").is_some(),
        &[
            ("the pool", capacity),
            ("files in the page cache", large + (256 << 20)),
            // Memory for all rows, and for the row that allocates.
            ("the host device's memory", if gpu { 0 } else { 2 * large.max(256 << 20) }),
        ],
    );
    let own = tempfile::tempdir().expect("a folder");
    let folder = option("files").map_or_else(|| own.path().to_owned(), PathBuf::from);
    let files = [("small", 16_384, 16 << 10), ("large", 64, large / 64)].map(|(name, count, len)| {
        let path = folder.join(format!("{name}.safetensors"));
        write(&path, count, len);
        (name, path, count * len)
    });

    let builder = Pool::builder(&device).capacity(capacity).initial(capacity).region(capacity).extent(extent);
    let pool = measure::small::pinned(&device, builder);
    let threads = cores.min(8);
    let copier = Copier::builder(&pool, &device).threads(threads).share(256 << 20);
    let copier = copier.build().expect("a copier");
    let longest = files.iter().map(|file| file.2).max().unwrap_or(0) + (1 << 20);
    let memory = device.alloc(link_bytes.max(longest)).expect("device memory");
    let mut link = Link::new(&pool, &device, link_bytes, &[UP]);
    let mut peak = 0.0_f64;
    let mut around = |peak: &mut f64| {
        for streams in [1, 2] {
            let taken = link.run(&[UP], streams, [&memory, &memory]);
            *peak = peak.max(link_bytes as f64 / taken / 1e9);
        }
    };

    for (name, path, bytes) in &files {
        let checkpoint = Checkpoint::open(path).expect("a checkpoint");
        let setup = LoadSetup { name, path, bytes: *bytes, checkpoint, copier: &copier, memory: &memory };
        // Also for warming up.
        setup.check();
        println!("{name}: every byte is right, {:.1} s since the start", begun.elapsed().as_secs_f64());
        let mut seconds = Rounds::new(ROWS.len());
        let (file, mut loop_speed) = (std::fs::File::open(path).expect("a file"), Vec::new());
        let since = Instant::now();
        for round in 0..rounds {
            // A slow machine gets fewer rounds.
            if round >= ENOUGH && since.elapsed() > LONGEST {
                println!(
                    "{name}: {round} rounds of {rounds}, which took {:.1} s",
                    since.elapsed().as_secs_f64()
                );
                break;
            }
            around(&mut peak);
            loop_speed.push(*bytes as f64 / link::read(&file, *bytes, threads) / 1e9);
            // In another order each round, so that no row always follows the same one.
            for turn in 0..ROWS.len() {
                let row = (round + turn) % ROWS.len();
                seconds.add(row, setup.row(ROWS[row]));
                // The device's thread frees what the row allocated, which would slow the next row.
                if matches!(ROWS[row], "alloc" | "open") {
                    drop(setup.load());
                }
            }
        }
        around(&mut peak);
        setup.table(&seconds, peak, Spread::of(&loop_speed), threads, gpu);
    }
    measure::used();
}

impl LoadSetup<'_> {
    /// Bytes over seconds, in GB/s.
    fn rates(&self, seconds: &[f64]) -> Vec<f64> {
        seconds.iter().map(|seconds| self.bytes as f64 / seconds / 1e9).collect()
    }

    fn table(&self, seconds: &Rounds, peak: f64, memory: Spread, threads: usize, gpu: bool) {
        let Self { name, bytes, .. } = self;
        println!(
            "{name}: {bytes} bytes, {}, pinned peak {peak:.2} GB/s; a plain loop of {threads} threads reads it at {:.2} GB/s ({:.2} to {:.2})",
            self.copier.device().name(),
            memory.mid,
            memory.low,
            memory.high
        );
        for (row, what) in ROWS.iter().enumerate() {
            let rates = self.rates(seconds.values(row));
            let Spread { low, mid, high } = Spread::of(&rates);
            let over = Spread::of(&rates.iter().map(|rate| rate / peak).collect::<Vec<_>>());
            // Each row over the copier's own row.
            let beside = seconds.ratio(0, row);
            println!(
                "{name}_{what:<12} {mid:>7.2} GB/s   {:.3} of the peak ({:.3} to {:.3}), {:.3} of the copier ({:.3} to {:.3})",
                over.mid, over.low, over.high, beside.mid, beside.low, beside.high
            );
            line(
                format!("tensors_mb_per_s_{name}_{what}"),
                threads,
                Spread { low: low * 1e3, mid: mid * 1e3, high: high * 1e3 },
            );
            if *what == "load" && gpu {
                let (gate, aim) = if *name == "small" { (0.88, Some(0.93)) } else { (0.95, None) };
                at_least(format!("{name} tensors over the pinned peak"), over, gate, aim);
            }
        }
    }
}
