//! The command line: subcommands and options, their help texts, parsing of sizes.
//!
//! The comments on fields and variants are the help texts that the command prints.

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use pinpool::{Backing, HostAllocFlags, Unpinned};

const EXIT_STATUS: &str = "Exit status: 0 when everything was done (and every byte compared, if asked; doctor: no check \
                           failed), 1 for a mismatch, a device or a disk that is missing or fails, or memory that \
                           cannot be had, 2 for a command line that cannot be obeyed.";

/// A pool of page-locked host memory for inference servers
#[derive(Debug, Parser)]
#[command(name = "pinpool", version, propagate_version = true, after_help = EXIT_STATUS)]
pub struct Args {
    /// Print the library's log to stderr; twice for more of it
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Move files to a device through the pool, in overlapped chunks
    ///
    /// Each file is read by several threads, chunk by chunk, into page-locked buffers of the pool,
    /// and copied to device memory that holds all of it. A .safetensors file, an index of several
    /// (a .json file), or a folder with an index or such files in it is loaded as tensors, and
    /// checked tensor by tensor. Sizes are in KiB, MiB and GiB, speeds in GB/s of 10^9 bytes. The
    /// upload speed includes reading the file, and for tensors allocating their device memory; the
    /// download speed includes computing the checksums of the downloaded bytes.
    #[command(after_help = EXIT_STATUS)]
    Load(LoadArgs),
    /// Find what stands in the way of pinning and copying on this machine, and how to correct it
    ///
    /// Checks the memlock limit, memory, control groups, huge pages and NUMA; then opens the
    /// device, pins a little memory, copies it both ways, compares every byte, and prints the
    /// measured speed and that of the device's link. No setting is changed.
    #[command(after_help = EXIT_STATUS)]
    Doctor(DoctorArgs),
    /// Measure the link to a device in both directions, and the copier's share of its speed
    ///
    /// The pinned peak is the best of five copies from (or into) page-locked memory, on one stream
    /// or on several at once. Beside it, for the same bytes: the driver's plain copy of ordinary
    /// memory (one call); and with --threads threads the copier on ordinary memory, and copies in
    /// memory. Each figure is the best of five, wall time of the whole copy, and each time the
    /// bytes at the target are compared with the source.
    #[command(after_help = EXIT_STATUS)]
    Bench(BenchArgs),
    /// Watch the pools of a process that serves /metrics: memory, waits, size classes, devices,
    /// alarms
    ///
    /// Reads the address every interval and shows the metrics that a Prometheus server would read
    /// there: rates over 5 s, waits and alarms over the last minute. Ctrl-C ends it. The process
    /// needs a Sampler that feeds a recorder, as in the crate's examples/dashboard.rs.
    #[command(after_help = EXIT_STATUS)]
    Top(TopArgs),
}

#[derive(Debug, clap::Args)]
pub struct TopArgs {
    /// The address of the metrics; http:// and /metrics may be left out
    #[arg(value_name = "URL", default_value = "http://127.0.0.1:9185/metrics")]
    pub url: String,
    /// Print the metrics once as plain text, with rates over one interval
    #[arg(long)]
    pub once: bool,
    /// Seconds between two reads, 0.1 to 3600
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    pub interval: f64,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(n) if (0.1..=3600.0).contains(&n) => Ok(n),
        _ => Err("not a number of seconds from 0.1 to 3600".into()),
    }
}

/// The device of a subcommand that opens one, and the form of its result.
#[derive(Debug, clap::Args)]
pub struct DeviceArgs {
    /// The device: auto, host, host:N, cuda:N or acl:N
    #[arg(long = "device", value_name = "DEVICE", default_value = "auto")]
    pub name: String,
    /// Where page-locked memory comes from: registered (the system's, registered with the device)
    /// or host-alloc (the driver's) [default: whichever the device does best]
    #[arg(long, value_name = "BACKING", value_parser = backing)]
    pub backing: Option<Backing>,
    /// Print one JSON object, on the last line of stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    pub device: DeviceArgs,
    /// The memory that the server's pool is going to pin; limits are compared with it
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = size)]
    pub capacity: usize,
    /// The memory to pin and copy for a trial, 1MiB at least [default: 64MiB, or the capacity if
    /// less]
    ///
    /// The trial uses four times as much memory, and half of what is left at most.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub pin: Option<usize>,
    /// Read /proc and /sys below this folder, for tests
    #[arg(long, value_name = "DIR", hide = true)]
    pub root: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub struct LoadArgs {
    /// Files to move, or folders with a checkpoint; without any, a temporary sample is made
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// The most memory that the pool may pin, such as 64MiB [default: 256MiB, or a quarter of what
    /// is left if less]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub capacity: Option<usize>,
    /// Bytes copied at a time
    #[arg(long, value_name = "SIZE", default_value = "4MiB", value_parser = size)]
    pub chunk: usize,
    /// Threads that read and check [default: one per core, at most 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Where the system refuses to pin memory: refuse (fail) or allow (a warning, and memory that
    /// is not pinned)
    #[arg(long, value_name = "WHAT", default_value = "allow", value_parser = unpinned)]
    pub unpinned: Unpinned,
    /// Download everything again and compare its checksums with the file's
    #[arg(long)]
    pub verify: bool,
    /// The sample's size, where no file is given [default: 1GiB, or a quarter of what is left if
    /// less]
    #[arg(long, value_name = "SIZE", value_parser = size, conflicts_with = "files")]
    pub sample: Option<usize>,
}

#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Bytes of each copy, rounded down to whole 128 KiB; the command uses five times as much
    /// memory [default: 256MiB, or a tenth of what is left if less]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub size: Option<usize>,
    /// Threads of the copier, and of copies in memory [default: one per core, at most 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
}

fn unpinned(text: &str) -> Result<Unpinned, String> {
    match text {
        "refuse" => Ok(Unpinned::Refuse),
        "allow" => Ok(Unpinned::Allow),
        _ => Err("neither refuse nor allow".into()),
    }
}

fn backing(text: &str) -> Result<Backing, String> {
    match text {
        "registered" => Ok(Backing::Registered),
        "host-alloc" => Ok(Backing::HostAlloc(HostAllocFlags::default())),
        _ => Err("neither registered nor host-alloc".into()),
    }
}

/// Parses a size: whole bytes, or a number with a unit.
fn size(text: &str) -> Result<usize, String> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit.trim_start().to_ascii_lowercase();
    let power = |prefix| "kmgt".find(prefix).map(|power| power as u32 + 1);
    let mut letters = unit.chars();
    let factor = match (letters.next(), letters.as_str()) {
        (None | Some('b'), "") => Some(1),
        (Some(prefix), "ib") => power(prefix).map(|power| 1024_u128.pow(power)),
        (Some(prefix), "b") => power(prefix).map(|power| 1000_u128.pow(power)),
        _ => None,
    };
    // "1.5" is 15 of tenths. What is left of a byte is cut off.
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    let is_number =
        [whole, part].iter().all(|digits| (1..=18).contains(&digits.len()) && !digits.contains('.'));
    let is_whole = factor != Some(1) || !number.contains('.');
    let Some(factor) = factor.filter(|_| is_number && is_whole) else {
        let why = "not a size: write bytes, or a number with KiB, MiB, GiB or TiB, such as 64MiB or 1.5GiB";
        return Err(why.into());
    };
    let tenths = format!("{whole}{part}").parse::<u128>().ok().and_then(|n| n.checked_mul(factor));
    match tenths.map(|n| n / 10_u128.pow(part.len() as u32)).and_then(|n| isize::try_from(n).ok()) {
        Some(0) => Err("a size of 0 is too small".into()),
        Some(bytes) => Ok(bytes as usize),
        None => Err("a size beyond all memory".into()),
    }
}
