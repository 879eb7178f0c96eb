//! Checkpoints in the safetensors format to the device, beside the link and beside the format's own loader.
//!
//! # What is measured
//!
//! Two files in the page cache: `small`, 16,384 tensors of 16 KiB, and `large`, 64 tensors of 64 MiB (`--large-mib` for less
//! in all). Each is loaded by 8 threads (or as many as there are cores), all tensors handed out, wall time of the whole.
//!
//! | row | what it is |
//! | --- | --- |
//! | `load` | an opened checkpoint into device memory that is there |
//! | `alloc` | the same, into device memory of its own, allocated and freed within the time |
//! | `open` | the same, the header read within the time as well |
//! | `sums` | as `load`, with a checksum taken of each tensor |
//! | `python` | safetensors' own `load_file` for PyTorch, onto the GPU, where `python3` has both; by a process of its own |
//!
//! The *peak* is the best of all copies of the small file's bytes, or of 1 GiB, from page-locked memory in this run. Rows
//! follow each other in every round, a copy for the peak among them. What is on the device is compared with the file by
//! checksums, once for each file, outside of the time.
//!
//! `--device NAME` (a GPU, else the host device), `--rounds N`, `--chunk-kib N` for the pipeline's chunks. `cargo bench
//! --features safetensors --bench tensors`, or the executable by itself, from the repository's root.
#![allow(missing_docs, unsafe_code)]

mod measure;

use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use measure::{Spread, at_least, flag, line, number, option, quick};
use pinpool::pipeline::Pipeline;
use pinpool::safetensors::{Checkpoint, DeviceTensor, device_checksums};
use pinpool::{Device, DeviceBuffer, Pool, Stream, Unpinned};

/// What the peer is run by: seconds of each load, one a line.
const PEER: &str = "benches/peers/safetensors_load.py";

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
    // As the format's own writer does it.
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let mut file = BufWriter::with_capacity(1 << 20, std::fs::File::create(path).expect("a file"));
    file.write_all(&(header.len() as u64).to_le_bytes()).expect("room for a file");
    file.write_all(header.as_bytes()).expect("room for a file");
    let (mut x, mut block) = (0x9e37_79b9_7f4a_7c15_u64, vec![0; 1 << 16]);
    for _ in 0..count * len / block.len() {
        for eight in block.chunks_exact_mut(8) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            eight.copy_from_slice(&x.to_le_bytes());
        }
        file.write_all(&block).expect("room for a file");
    }
    file.flush().expect("room for a file");
}

fn timed(work: impl FnOnce() -> Vec<DeviceTensor>) -> f64 {
    let since = Instant::now();
    let tensors = work();
    let taken = since.elapsed().as_secs_f64();
    assert!(!tensors.is_empty());
    taken
}

fn main() {
    // Asked for by cargo, which tests benches too.
    if flag("test") {
        return println!("tensors: not a test");
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
    let rounds = number("rounds", if quick() { 3 } else { 7 });
    let large = number("large-mib", if gpu && !quick() { 4096 } else { 256 }) << 20;
    let folder = tempfile::tempdir().expect("a folder");
    let files = [("small", 16_384, 16 << 10), ("large", 64, large / 64)].map(|(name, count, len)| {
        let path = folder.path().join(format!("{name}.safetensors"));
        write(&path, count, len);
        (name, path, count * len)
    });

    let link = 1 << if gpu { 30 } else { 27 };
    let builder = Pool::builder(&device).capacity(link + (400 << 20)).initial(link + (400 << 20));
    let builder = builder.extent(link + (400 << 20)).region(link + (400 << 20));
    let pool =
        if gpu { builder } else { builder.unpinned(Unpinned::Allow) }.build().expect("memory for a pool");
    pool.wait_pinned(None).expect("pinning ends");
    let builder = Pipeline::builder(&pool, &device).threads(cores.min(8)).share(256 << 20);
    let chunk = option("chunk-kib").map(|kib| kib.parse::<usize>().expect("a number") << 10);
    let pipeline = match chunk {
        Some(chunk) => builder.chunk(chunk),
        None => builder,
    };
    let pipeline = pipeline.build().expect("a pipeline");
    let memory = device
        .alloc(link.max(files.iter().map(|file| file.2).max().unwrap_or(0) + (1 << 20)))
        .expect("device memory");
    let streams: Vec<Stream> = (0..2).map(|_| device.stream().expect("a stream")).collect();
    let mut pinned = Some(pool.checkout(link).expect("room"));
    pinned.as_mut().expect("there").try_resize(link, 3).expect("within its capacity");
    let mut peak = 0.0_f64;
    let mut link_round = |len: usize| {
        let buf = pinned.take().expect("back");
        let since = Instant::now();
        let buf =
            streams[0].upload_part(buf, ..len, memory.slice(..len)).expect("a copy").wait().expect("arrives");
        peak = peak.max(len as f64 / since.elapsed().as_secs_f64() / 1e9);
        pinned = Some(buf);
        peak
    };

    for (name, path, bytes) in &files {
        let checkpoint = Checkpoint::open(path).expect("a checkpoint");
        let into = |_: &Pipeline, checkpoint: &Checkpoint, memory: &DeviceBuffer, sums: bool| {
            let loader = checkpoint.loader(&pipeline).checksums(sums).memory(|len| memory.slice(..len));
            loader.load().expect("arrives")
        };
        // Once for warmth, and to see that every byte is there.
        let tensors = into(&pipeline, &checkpoint, &memory, true);
        let back = device_checksums(&pipeline, &tensors).expect("comes back");
        for (tensor, back) in tensors.iter().zip(back) {
            assert_eq!(tensor.checksum(), Some(back), "{}", tensor.name());
        }
        drop(tensors);
        let mut rows: Vec<(&str, Vec<f64>)> =
            ["load", "alloc", "open", "sums"].map(|row| (row, Vec::new())).into();
        for _ in 0..rounds {
            link_round(link);
            link_round((*bytes).min(link));
            for (row, taken) in &mut rows {
                taken.push(match *row {
                    "load" => timed(|| into(&pipeline, &checkpoint, &memory, false)),
                    "sums" => timed(|| into(&pipeline, &checkpoint, &memory, true)),
                    "alloc" => timed(|| checkpoint.loader(&pipeline).load().expect("arrives")),
                    _ => timed(|| {
                        let checkpoint = Checkpoint::open(path).expect("a checkpoint");
                        checkpoint.loader(&pipeline).load().expect("arrives")
                    }),
                });
            }
        }
        let peak = link_round(link);
        let rates =
            |taken: &[f64]| taken.iter().map(|seconds| *bytes as f64 / seconds / 1e9).collect::<Vec<_>>();
        println!("{name}: {bytes} bytes, {}, pinned peak {peak:.2} GB/s", device.name());
        let mut ours = Spread::of(&[0.0]);
        for (row, taken) in &rows {
            let spread = Spread::of(&rates(taken));
            let over = Spread::of(&rates(taken).iter().map(|rate| rate / peak).collect::<Vec<_>>());
            println!(
                "{name}_{row:<12} {:>7.2} GB/s   {:.3} of the peak ({:.3} to {:.3})",
                spread.mid, over.mid, over.low, over.high
            );
            let Spread { low, mid, high } = spread;
            line(
                format!("tensors_mb_per_s_{name}_{row}"),
                1,
                Spread { low: low * 1e3, mid: mid * 1e3, high: high * 1e3 },
            );
            if *row == "load" {
                ours = spread;
                if gpu {
                    let (gate, aim) = if *name == "small" { (0.88, Some(0.93)) } else { (0.95, None) };
                    at_least(format!("{name} tensors over the pinned peak"), over, gate, aim);
                }
            }
        }
        if gpu {
            match peer(path, rounds.min(3)) {
                Ok(taken) => {
                    let spread = Spread::of(&rates(&taken));
                    println!("{name}_python       {:>7.2} GB/s", spread.mid);
                    let Spread { low, mid, high } = spread;
                    let line_of = Spread { low: low * 1e3, mid: mid * 1e3, high: high * 1e3 };
                    line(format!("tensors_mb_per_s_{name}_python"), 1, line_of);
                    let times = Spread::of(&[ours.mid / mid]);
                    at_least(
                        format!("{name} tensors over safetensors' loader"),
                        times,
                        if *name == "small" { 50.0 } else { 6.0 },
                        None,
                    );
                }
                Err(why) => println!("{name}_python: skipped, {why}"),
            }
        }
    }
}

/// Seconds that safetensors' own loader takes, the first left out.
fn peer(path: &Path, rounds: usize) -> Result<Vec<f64>, String> {
    let mut command = Command::new("python3");
    let output =
        command.arg(PEER).arg(path).arg((rounds + 1).to_string()).output().map_err(|e| e.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(said.lines().last().unwrap_or("it said nothing").to_owned());
    }
    let seconds: Result<Vec<f64>, _> = text.split_whitespace().skip(1).map(str::parse).collect();
    match seconds {
        Ok(seconds) if !seconds.is_empty() => Ok(seconds),
        _ => Err(format!("it said {text:?}")),
    }
}
