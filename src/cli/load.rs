//! `pinpool load`: files go to device memory through a pool, and back if asked.
//!
//! Up: each thread checks out a buffer, reads a chunk of the file into it, submits the copy and drops the handle; the
//! buffer comes back to the pool when the copy is done, and the thread is at its next chunk meanwhile. A thread never
//! has more than one buffer in hand, so a pool of a single buffer is enough to make progress. The upload is over when
//! all streams are.
//!
//! Back: each thread brings chunks of the device memory into buffers of the pool and takes their checksums. Then the
//! file is read a second time, past the pool and the device, and the checksums are compared.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pinpool::{Device, DeviceBuffer, Error, Pool, PoolStats, Request, Stream};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use super::args::{Load, Unpinned};
use super::sweep::{Chunk, count, sweep};
use super::{Failure, read, sample, say};

/// Extents are about so long: short enough for the first to be ready soon, long enough for pinning at full speed.
const EXTENT: usize = 64 << 20;
/// Chunks larger than this get the library's own extents, where there are enough of them in one.
const LARGE_SEGMENT: usize = EXTENT / 8;
/// How long the pool gets to come to rest in the end, where all streams are synchronised already.
const REST: Duration = Duration::from_secs(10);

/// Runs the command: what it found out goes to stdout, what went wrong to stderr.
pub fn run(args: &Load) -> ExitCode {
    let mut report = Report::default();
    let result = prepare(args).and_then(|job| {
        let result = job.run(args, &mut report);
        job.note(&mut report);
        result
    });
    let mut code = match &result {
        Ok(()) => 0,
        Err(failure) => {
            say(&format!("error: {failure}"));
            failure.exit_code()
        }
    };
    // A command line that could not be obeyed has nothing to report.
    if let Some(stats) = report.stats {
        let text = if args.json { report.json(&stats).to_string() } else { report.text(&stats) };
        let mut out = io::stdout();
        match writeln!(out, "{text}").and_then(|()| out.flush()) {
            // A closed pipe: nobody reads it, and the exit status tells the rest.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                say(&format!("error: the result cannot be written: {error}"));
                code = code.max(super::EXIT_FAILED);
            }
            _ => {}
        }
    }
    ExitCode::from(code)
}

/// One file to move.
struct Source {
    name: String,
    file: File,
    len: u64,
}

/// Everything that was opened.
struct Job {
    sources: Vec<Source>,
    device: Device,
    pool: Pool,
    streams: Vec<Stream>,
    bar: ProgressBar,
}

/// What was measured.
#[derive(Debug, Default)]
struct Report {
    device: String,
    lines: Vec<String>,
    bytes: u64,
    verified: Option<bool>,
    upload: Speed,
    download: Speed,
    stats: Option<PoolStats>,
}

/// Bytes moved in a time.
#[derive(Clone, Copy, Debug, Default)]
struct Speed {
    bytes: u64,
    time: Duration,
}

impl Speed {
    fn add(&mut self, bytes: u64, since: Instant) {
        self.bytes += bytes;
        self.time += since.elapsed();
    }

    /// GB/s of 10^9 bytes, if anything was moved.
    fn gb_per_s(self) -> Option<f64> {
        (self.bytes > 0 && !self.time.is_zero()).then(|| self.bytes as f64 / self.time.as_secs_f64() / 1e9)
    }
}

/// Opens everything, so that what the command line asks for in vain is known before anything is moved.
fn prepare(args: &Load) -> Result<Job, Failure> {
    let mut sources = args.files.iter().map(|path| open(path)).collect::<Result<Vec<_>, _>>()?;
    let device = Device::open(&args.device).map_err(|e| Failure::Usage(format!("--device: {e}")))?;
    let segment =
        Request::new(args.chunk).segment_bytes().map_err(|e| Failure::Usage(format!("--chunk: {e}")))?;
    let too_small = || {
        Failure::Usage(format!(
            "a --capacity of {} bytes is below one segment: a --chunk of {} bytes takes {segment}, and the pool counts \
             in whole pages",
            args.capacity, args.chunk
        ))
    };
    if args.capacity < segment {
        return Err(too_small());
    }
    // Whole segments fit into an extent, so that their edges waste nothing.
    let extent = if segment <= LARGE_SEGMENT {
        EXTENT / segment * segment.next_multiple_of(4096)
    } else {
        segment.saturating_add(2 << 20).max(1 << 30)
    };
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = args.threads.map_or(cores.min(8), std::num::NonZero::get);
    let failed = |what: &str, error: &Error| Failure::Failed(format!("{what}: {error}"));
    let streams: Result<Vec<Stream>, Error> = (0..threads).map(|_| device.stream()).collect();
    let streams = streams.map_err(|e| failed("a stream cannot be made", &e))?;
    let pool = Pool::builder(&device)
        .capacity(args.capacity)
        .initial(args.capacity)
        .extent(extent)
        .unpinned(match args.unpinned {
            Unpinned::Refuse => pinpool::Unpinned::Refuse,
            Unpinned::Allow => pinpool::Unpinned::Allow,
        })
        .build();
    let pool = pool.map_err(|error| match error {
        Error::Config(text) => Failure::Usage(text),
        error => failed("the pool cannot be built", &error),
    })?;
    if pool.stats().capacity_bytes < segment {
        return Err(too_small());
    }
    if sources.is_empty() {
        // Asked before so much is written.
        device.alloc(args.sample).map_err(|e| {
            Failure::Failed(format!(
                "{} has no room for a sample of {} bytes: {e}",
                device.name(),
                args.sample
            ))
        })?;
        let file = sample::make(args.sample as u64).map_err(|e| {
            let at = std::env::temp_dir();
            Failure::Failed(format!(
                "a sample of {} bytes cannot be made in {}: {e}",
                args.sample,
                at.display()
            ))
        })?;
        sources.push(Source { name: "sample".into(), file, len: args.sample as u64 });
    }
    Ok(Job { sources, device, pool, streams, bar: ProgressBar::hidden() })
}

/// Opens a file, if it is one.
fn open(path: &Path) -> Result<Source, Failure> {
    let name = path.display().to_string();
    let wrong = |text: &str| Failure::Usage(format!("{name}: {text}"));
    // Asked before opening: opening a named pipe would wait.
    let metadata = std::fs::metadata(path).map_err(|e| wrong(&e.to_string()))?;
    if metadata.is_dir() {
        return Err(wrong("is a directory"));
    }
    if !metadata.is_file() {
        return Err(wrong("is not a regular file"));
    }
    let file = File::open(path).map_err(|e| wrong(&e.to_string()))?;
    let len = file.metadata().map_err(|e| wrong(&e.to_string()))?.len();
    // Files that the system makes up as they are read have no length; those that are empty have nothing to read.
    if len == 0 && matches!(file.read_at(&mut [0], 0), Ok(1)) {
        return Err(wrong("has bytes but no length: copy it to a real file first"));
    }
    Ok(Source { name, file, len })
}

impl Job {
    fn run(&self, args: &Load, report: &mut Report) -> Result<(), Failure> {
        report.device = self.device.name().to_owned();
        for source in &self.sources {
            let result = self.load(args, source, report);
            self.bar.finish_and_clear();
            if let Err(Failure::Mismatch(_)) = &result {
                report.verified = Some(false);
            }
            result?;
        }
        report.verified = args.verify.then_some(true);
        Ok(())
    }

    fn load(&self, args: &Load, source: &Source, report: &mut Report) -> Result<(), Failure> {
        let len = usize::try_from(source.len).map_err(|_| source.failed("it is larger than all memory"))?;
        if len == 0 {
            report.lines.push(format!("{}: empty", source.name));
            return Ok(());
        }
        let memory = self
            .device
            .alloc(len)
            .map_err(|e| source.failed(format!("the device has no room for its {len} bytes: {e}")))?;
        let bar = self.progress(source, if args.verify { 3 } else { 1 });
        let (mut up, mut down) = (Speed::default(), Speed::default());

        let start = Instant::now();
        self.upload(source, &memory, args.chunk, &bar)?;
        up.add(source.len, start);
        report.upload.add(source.len, start);
        report.bytes += source.len;
        let mut line = format!("{}: {} to {}", source.name, human(source.len), report.device);
        line += &up.gb_per_s().map_or_else(String::new, |s| format!(" at {s:.2} GB/s"));

        if args.verify {
            let start = Instant::now();
            let sums = self.download(source, &memory, args.chunk, &bar)?;
            down.add(source.len, start);
            report.download.add(source.len, start);
            self.compare(source, &sums, args.chunk, &bar)?;
            line += &down.gb_per_s().map_or_else(String::new, |s| format!(", back at {s:.2} GB/s"));
            line += ", all checksums equal";
        }
        report.lines.push(line);
        Ok(())
    }

    /// Reads the file into device memory.
    fn upload(
        &self,
        source: &Source,
        memory: &DeviceBuffer,
        chunk: usize,
        bar: &ProgressBar,
    ) -> Result<(), Failure> {
        sweep(&self.streams, source.len, chunk, |stream, part| {
            let mut buf = self.pool.checkout(part.len).map_err(|e| source.pool(&e))?;
            read::fill(&mut buf, &source.file, part.offset).map_err(|e| source.unread(part, &e))?;
            if buf.len() < part.len {
                return Err(source.short(part.offset + buf.len() as u64));
            }
            let sent = stream.upload(buf, memory.slice(part.range())).map_err(|e| source.failed(e))?;
            // The buffer comes back by itself.
            drop(sent);
            bar.inc(part.len as u64);
            Ok(())
        })
    }

    /// Brings device memory back, chunk by chunk, and returns the checksum of each.
    fn download(
        &self,
        source: &Source,
        memory: &DeviceBuffer,
        chunk: usize,
        bar: &ProgressBar,
    ) -> Result<Vec<OnceLock<u128>>, Failure> {
        let sums: Vec<OnceLock<u128>> = (0..count(source.len, chunk)).map(|_| OnceLock::new()).collect();
        sweep(&self.streams, source.len, chunk, |stream, part| {
            let landing = self.pool.checkout_on(stream, part.len).map_err(|e| source.pool(&e))?;
            let back = stream.download(memory.slice(part.range()), landing).map_err(|e| source.failed(e))?;
            let buf = back.wait().map_err(|e| source.failed(e))?;
            // Each chunk is done once.
            let _ = sums[part.index].set(xxh3_128(&buf));
            bar.inc(part.len as u64);
            Ok(())
        })?;
        Ok(sums)
    }

    /// Reads the file again, into ordinary memory, and compares.
    fn compare(
        &self,
        source: &Source,
        sums: &[OnceLock<u128>],
        chunk: usize,
        bar: &ProgressBar,
    ) -> Result<(), Failure> {
        sweep(&self.streams, source.len, chunk, |_, part| {
            let mut bytes = vec![0; part.len];
            source.file.read_exact_at(&mut bytes, part.offset).map_err(|e| match e.kind() {
                io::ErrorKind::UnexpectedEof => source.short(part.offset),
                _ => source.unread(part, &e),
            })?;
            if sums[part.index].get() != Some(&xxh3_128(&bytes)) {
                let end = part.offset + part.len as u64;
                return Err(Failure::Mismatch(format!(
                    "{}: mismatch at offset {}: bytes {}..{end} did not come back as they are in the file",
                    source.name, part.offset, part.offset
                )));
            }
            bar.inc(part.len as u64);
            Ok(())
        })
    }

    /// A bar on a terminal, nothing elsewhere.
    fn progress(&self, source: &Source, passes: u64) -> ProgressBar {
        let bar = &self.bar;
        if io::stderr().is_terminal() {
            bar.set_draw_target(ProgressDrawTarget::stderr());
            if let Ok(style) =
                ProgressStyle::with_template("{msg} {wide_bar} {percent}% {binary_bytes_per_sec}")
            {
                bar.set_style(style);
            }
            bar.set_message(source.name.clone());
        }
        bar.reset();
        bar.set_length(source.len.saturating_mul(passes));
        bar.clone()
    }

    /// Adds what the pool has to say, and warns, once, if it is not all pinned.
    fn note(&self, report: &mut Report) {
        // Memory that is still being pinned, and buffers that the last copies are giving back.
        let pinning = self.pool.wait_pinned(Some(REST));
        let stats = settle(&self.pool);
        if stats.unpinned_bytes > 0 {
            say(&format!(
                "warning: {} of the pool's {} bytes are not pinned, since the system refused (see ulimit -l); copies \
                 from them are slower",
                stats.unpinned_bytes,
                stats.pinned_bytes + stats.unpinned_bytes
            ));
        } else if let Ok(Some(error)) = pinning.map(|p| p.error) {
            say(&format!("warning: the pool is smaller than its capacity: {error}"));
        }
        report.stats = Some(stats);
    }
}

/// The statistics once nothing is in flight any more. After a failure something may stay so.
fn settle(pool: &Pool) -> PoolStats {
    let deadline = Instant::now() + REST;
    loop {
        let stats = pool.stats();
        if stats.in_flight_bytes + stats.checked_out_bytes == 0 || Instant::now() >= deadline {
            return stats;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Source {
    fn failed(&self, why: impl std::fmt::Display) -> Failure {
        Failure::Failed(format!("{}: {why}", self.name))
    }

    fn unread(&self, part: Chunk, error: &io::Error) -> Failure {
        self.failed(format!("cannot be read at offset {}: {error}", part.offset))
    }

    fn short(&self, end: u64) -> Failure {
        self.failed(format!("ends at byte {end}, not at {}: it has become shorter", self.len))
    }

    fn pool(&self, error: &Error) -> Failure {
        match error {
            Error::TooLong { .. } => Failure::Usage(format!("--chunk: {error}")),
            _ => self.failed(error),
        }
    }
}

impl Report {
    fn json(&self, stats: &PoolStats) -> Value {
        json!({
            "device": self.device,
            "bytes": self.bytes,
            "verified": self.verified,
            "upload_gb_per_s": self.upload.gb_per_s(),
            "download_gb_per_s": self.download.gb_per_s(),
            "pool": {
                "pinned_bytes": stats.pinned_bytes,
                "free_bytes": stats.free_bytes,
                "checked_out_bytes": stats.checked_out_bytes,
                "in_flight_bytes": stats.in_flight_bytes,
                "quarantined_bytes": stats.quarantined_bytes,
                "cut_bytes": stats.cut_bytes,
                "unpinned_bytes": stats.unpinned_bytes,
                "checkouts": stats.checkouts,
                "waits": stats.waits,
            },
        })
    }

    fn text(&self, stats: &PoolStats) -> String {
        let pool = format!(
            "pool: {} pinned, {} checkouts, {} of them waited for",
            human(stats.pinned_bytes as u64),
            stats.checkouts,
            stats.waits
        );
        self.lines.iter().chain([&pool]).map(String::as_str).collect::<Vec<_>>().join("\n")
    }
}

/// A size for people, of powers of ten like the speeds.
fn human(bytes: u64) -> String {
    let (unit, name) = match bytes {
        0..1_000 => return format!("{bytes} B"),
        1_000..1_000_000 => (1e3, "kB"),
        1_000_000..1_000_000_000 => (1e6, "MB"),
        1_000_000_000.. => (1e9, "GB"),
    };
    format!("{:.2} {name}", bytes as f64 / unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn args(line: &[&str]) -> Load {
        let line = ["pinpool", "load", "--device", "host"].iter().chain(line);
        match super::super::args::Args::parse_from(line).command {
            super::super::args::Command::Load(load) => load,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_wrong_byte_on_the_device_is_found_and_named() {
        let args = args(&["--sample", "300000", "--chunk", "65536", "--capacity", "1MiB", "--threads", "2"]);
        let job = prepare(&args).unwrap();
        let source = &job.sources[0];
        let memory = job.device.alloc(300_000).unwrap();
        job.upload(source, &memory, args.chunk, &job.bar).unwrap();
        let sums = job.download(source, &memory, args.chunk, &job.bar).unwrap();
        job.compare(source, &sums, args.chunk, &job.bar).unwrap();

        // One byte in the third chunk, and one in the last: the first of them is reported.
        for at in [299_999, 131_072 + 17] {
            let mut byte = [0];
            job.streams[0].download_blocking(memory.slice(at..=at), &mut byte).unwrap();
            job.streams[0].upload_blocking(&[!byte[0]], memory.slice(at..=at)).unwrap();
        }
        let sums = job.download(source, &memory, args.chunk, &job.bar).unwrap();
        let failure = job.compare(source, &sums, args.chunk, &job.bar).unwrap_err();
        assert!(failure.to_string().contains("mismatch at offset 131072"), "{failure}");
        assert_eq!(failure.exit_code(), super::super::EXIT_FAILED);
    }

    #[test]
    fn sizes_are_told() {
        assert_eq!(human(999), "999 B");
        assert_eq!(human(64 << 20), "67.11 MB");
        assert_eq!(human(1_500_000_000), "1.50 GB");
    }
}
