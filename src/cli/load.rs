//! `pinpool load`: files go to device memory through the copy pipeline, and back if asked.
//!
//! A file is one transfer of the pipeline. A `.safetensors` file, an index of several, or a folder of such is loaded as
//! tensors, by the library's own loader.
//!
//! With `--verify` the bytes come back through the pipeline. The command takes their checksums: of each chunk of a
//! file, of each tensor of a checkpoint. Then it reads the file a second time, without the pool and the device, and
//! compares the checksums.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use indicatif::style::TemplateError;
use indicatif::{DecimalBytes, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use pinpool::pipeline::{FileSource, Pipeline, Sink, Transfer};
use pinpool::safetensors::{Checkpoint, DeviceTensor, device_checksums};
use pinpool::{Device, DeviceBuffer, Error, Pool, PoolStats, Request};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use super::args::{Load, Unpinned};
use super::escape::{NAME, clean, text};
use super::spread::spread;
use super::{Failure, sample, say};

/// The length of extents, about: short enough for the first to be ready soon, long enough for pinning at full speed.
const EXTENT: usize = 64 << 20;
/// Segments larger than this get extents of 1 GiB or more, since too few of them fit into [`EXTENT`].
const LARGE_SEGMENT: usize = EXTENT / 8;
/// The pipeline's chunks are whole pages of this many bytes.
const PAGE: usize = 4096;
/// The time between two looks at the progress.
const LOOK: Duration = Duration::from_millis(100);
/// How long the command waits at its end until the pool has everything back. All streams are synchronised by then.
const REST: Duration = Duration::from_secs(10);

/// Runs the command. The report goes to stdout, after a failure too.
pub fn run(args: &Load) -> Result<(), Failure> {
    let job = prepare(args)?;
    let mut report = Report::default();
    let result = job.run(args, &mut report);
    let stats = job.note();
    let device = job.device.clone();
    drop(job);
    // Of several failures the first is reported.
    let result = result.and(super::close(device));
    let text = if args.json { super::json_line(&report.json(&stats)) } else { report.text(&stats) };
    result.and(super::print(&mut io::stdout(), &format!("{text}\n")))
}

/// One thing to move.
struct Source {
    name: String,
    len: u64,
    what: What,
}

enum What {
    File(Arc<File>),
    Tensors(Checkpoint),
}

/// Everything that was opened.
struct Job {
    sources: Vec<Source>,
    device: Device,
    pool: Pool,
    pipeline: Pipeline,
    bar: ProgressBar,
}

/// What was measured.
#[derive(Debug, Default)]
struct Report {
    device: String,
    lines: Vec<String>,
    verified: Option<bool>,
    upload: Moved,
    download: Moved,
}

/// Bytes moved in a time.
#[derive(Clone, Copy, Debug, Default)]
struct Moved {
    bytes: u64,
    time: Duration,
}

impl Moved {
    fn add(&mut self, bytes: u64, since: Instant) {
        self.bytes += bytes;
        self.time += since.elapsed();
    }

    /// GB/s of 10^9 bytes since `before`, an earlier value of this. `None` if nothing was moved since.
    fn gb_per_s(self, before: Self) -> Option<f64> {
        let bytes = self.bytes - before.bytes;
        super::rate(bytes, self.time - before.time).filter(|_| bytes > 0)
    }
}

/// Opens everything, so that a mistake in the command line is found before anything is moved.
fn prepare(args: &Load) -> Result<Job, Failure> {
    let sources = args.files.iter().map(|path| open(path)).collect::<Result<Vec<_>, _>>()?;
    let device = super::open_device(&args.device)?;
    furnish(args, sources, device.clone()).inspect_err(|_| {
        let _ = super::close(device);
    })
}

/// Makes what is needed on the device.
fn furnish(args: &Load, mut sources: Vec<Source>, device: Device) -> Result<Job, Failure> {
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
    // An extent holds a whole number of the pipeline's segments, so that nothing is lost at its end.
    let staged =
        Request::new(args.chunk.saturating_add(3 * PAGE)).align(PAGE).segment_bytes().unwrap_or(segment);
    let extent = if staged <= LARGE_SEGMENT {
        EXTENT / staged * staged.next_multiple_of(PAGE)
    } else {
        staged.saturating_add(2 << 20).max(1 << 30)
    };
    let failed = |what: &str, error: &Error| Failure::Failed(format!("{what}: {error}"));
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
    let pipeline = match pipeline(&pool, &device, args) {
        Ok(Some(pipeline)) => pipeline,
        Ok(None) => return Err(too_small()),
        Err(error) => return Err(failed("the pipeline cannot be built", &error)),
    };
    if sources.is_empty() {
        let len = args.sample;
        // Asked before the sample is written.
        device.alloc(len).map_err(|e| {
            Failure::Failed(format!("{} has no room for a sample of {len} bytes: {e}", device.name()))
        })?;
        let file = sample::make(len as u64).map_err(|e| {
            let at = std::env::temp_dir();
            Failure::Failed(format!("a sample of {len} bytes cannot be made in {}: {e}", at.display()))
        })?;
        let what = What::File(Arc::new(file));
        sources.push(Source { name: "sample".into(), len: len as u64, what });
    }
    Ok(Job { sources, device, pool, pipeline, bar: ProgressBar::hidden() })
}

/// A pipeline that may use all of the pool, with chunks of the length that was asked for. Where the capacity has just
/// that many bytes, the chunks are a little shorter, since a segment has a page before its chunk and one behind it.
/// `None`: no chunk fits.
fn pipeline(pool: &Pool, device: &Device, args: &Load) -> Result<Option<Pipeline>, Error> {
    let mut chunk = args.chunk.next_multiple_of(PAGE);
    while chunk > 0 {
        let builder = Pipeline::builder(pool, device).threads(super::threads(args.threads));
        match builder.share(args.capacity).chunk(chunk).build() {
            Err(Error::Config(_)) => chunk -= PAGE,
            built => return built.map(Some),
        }
    }
    Ok(None)
}

/// Whether a file cannot be opened because the command line names the wrong file, and not because the system fails.
fn is_named_wrongly(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{IsADirectory, NotADirectory, NotFound, PermissionDenied};
    matches!(kind, NotFound | PermissionDenied | NotADirectory | IsADirectory)
}

/// Opens a file, if it is one, or a folder's checkpoint.
fn open(path: &Path) -> Result<Source, Failure> {
    let name = path.display().to_string();
    let wrong = |text: &str| Failure::Usage(format!("{name}: {text}"));
    let unread = |e: io::Error| {
        // (Rust 1.85 has no `ErrorKind` for these two.)
        let by_name = matches!(e.raw_os_error(), Some(libc::ENAMETOOLONG | libc::ELOOP));
        let text = format!("{name}: {e}");
        if by_name || is_named_wrongly(e.kind()) { Failure::Usage(text) } else { Failure::Failed(text) }
    };
    // Asked before opening: opening a named pipe would wait.
    let metadata = std::fs::metadata(path).map_err(unread)?;
    if !metadata.is_file() && !metadata.is_dir() {
        return Err(wrong("is not a regular file"));
    }
    // (The error says what was looked for in a folder and is not there.)
    if metadata.is_dir() || name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json") {
        let checkpoint = Checkpoint::open(path).map_err(|error| match &error {
            Error::Read { kind, .. } if !is_named_wrongly(*kind) => Failure::Failed(error.to_string()),
            Error::OutOfMemory { .. } => Failure::Failed(error.to_string()),
            _ => Failure::Usage(error.to_string()),
        })?;
        return Ok(Source { name, len: checkpoint.bytes(), what: What::Tensors(checkpoint) });
    }
    let file = File::open(path).map_err(unread)?;
    let len = file.metadata().map_err(unread)?.len();
    // A file whose bytes the system makes up when they are read (in `/proc`, for example) has length 0 and gives a
    // byte. An empty file gives none.
    if len == 0 && matches!(file.read_at(&mut [0], 0), Ok(1)) {
        return Err(wrong("has bytes but no length: copy it to a real file first"));
    }
    Ok(Source { name, len, what: What::File(Arc::new(file)) })
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
            report.lines.push(format!("{}: empty", text(&source.name)));
            return Ok(());
        }
        let bar = self.progress(source, if args.verify { 3 } else { 1 });
        let before = (report.upload, report.download);
        let mut start = Instant::now();
        let what = match &source.what {
            What::File(file) => {
                let no_room = |e| source.failed(format!("the device has no room for its {len} bytes: {e}"));
                let memory = self.device.alloc(len).map_err(no_room)?;
                start = Instant::now();
                self.upload(source, file, &memory)?;
                report.upload.add(source.len, start);
                if args.verify {
                    start = Instant::now();
                    let sums = self.download(source, &memory)?;
                    report.download.add(source.len, start);
                    self.compare(source, file, &sums)?;
                }
                String::new()
            }
            What::Tensors(checkpoint) => {
                let tensors = self.upload_tensors(source, checkpoint)?;
                report.upload.add(source.len, start);
                if args.verify {
                    start = Instant::now();
                    let sums = device_checksums(&self.pipeline, &tensors).map_err(|e| source.error(&e))?;
                    bar.inc(source.len);
                    report.download.add(source.len, start);
                    self.compare_tensors(source, checkpoint, &tensors, &sums)?;
                }
                format!("{} tensors, ", tensors.len())
            }
        };
        let name = text(&source.name);
        let mut line = format!("{name}: {what}{} to {}", DecimalBytes(source.len), report.device);
        let speed = |what: &str, speed: Option<f64>| speed.map(|s| format!("{what} at {s:.2} GB/s"));
        line += &speed("", report.upload.gb_per_s(before.0)).unwrap_or_default();
        if args.verify {
            line += &speed(", back", report.download.gb_per_s(before.1)).unwrap_or_default();
            line += ", all checksums equal";
        }
        report.lines.push(line);
        Ok(())
    }

    /// Reads a file into device memory.
    fn upload(&self, source: &Source, file: &Arc<File>, memory: &DeviceBuffer) -> Result<(), Failure> {
        let from = FileSource::new(file.clone(), source.name.clone()).map_err(|e| source.error(&e))?;
        if from.len() < source.len {
            let (what, end, len) = (source.name.clone(), from.len(), source.len);
            return Err(source.error(&Error::Shrunk { what, end, len }));
        }
        let from = from.range(0..source.len).map_err(|e| source.error(&e))?;
        let transfer = self.pipeline.upload_file(from, memory).map_err(|e| source.error(&e.error))?;
        self.watched(source, transfer)?;
        Ok(())
    }

    /// Waits for a transfer, and shows how far it has come.
    fn watched<T: Send + Sync + 'static>(
        &self,
        source: &Source,
        mut transfer: Transfer<T>,
    ) -> Result<T, Failure> {
        let before = self.bar.position();
        loop {
            match transfer.wait_timeout(LOOK) {
                Ok(over) => {
                    self.bar.set_position(before + source.len);
                    return over.map_err(|e| source.error(&e.error));
                }
                Err(refused) => match refused.buffer {
                    Some(on) => transfer = on,
                    None => return Err(source.error(&refused.error)),
                },
            }
            self.bar.set_position(before + transfer.progress().done);
        }
    }

    /// Brings device memory back, and returns the checksum of each chunk, in order.
    fn download(&self, source: &Source, memory: &DeviceBuffer) -> Result<Vec<Part>, Failure> {
        let sums = Sums { name: source.name.clone(), parts: Mutex::default() };
        let transfer = self.pipeline.download(memory, sums).map_err(|e| source.error(&e.error))?;
        let Sums { parts, .. } = self.watched(source, transfer)?;
        let mut parts = parts.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        parts.sort_unstable_by_key(|part| part.offset);
        Ok(parts)
    }

    /// Reads the file again, into ordinary memory, and compares.
    fn compare(&self, source: &Source, file: &File, sums: &[Part]) -> Result<(), Failure> {
        spread(self.pipeline.threads(), sums.len(), |number| {
            let Part { offset, len, sum } = sums[number];
            let mut bytes = super::room(len).map_err(|e| source.error(&e))?;
            bytes.resize(len, 0);
            file.read_exact_at(&mut bytes, offset).map_err(|e| match e.kind() {
                io::ErrorKind::UnexpectedEof => source.short(offset),
                _ => source.failed(format!("cannot be read at offset {offset}: {e}")),
            })?;
            if sum != xxh3_128(&bytes) {
                let end = offset + len as u64;
                return Err(Failure::Mismatch(format!(
                    "{}: mismatch at offset {offset}: bytes {offset}..{end} did not come back as they are in the file",
                    source.name
                )));
            }
            self.bar.inc(len as u64);
            Ok(())
        })
    }

    /// Loads tensors.
    fn upload_tensors(&self, source: &Source, checkpoint: &Checkpoint) -> Result<Vec<DeviceTensor>, Failure> {
        let loading = checkpoint.loader(&self.pipeline).start().map_err(|e| source.error(&e))?;
        let mut tensors = Vec::new();
        tensors.try_reserve_exact(checkpoint.len()).map_err(|e| {
            source.failed(format!("no memory for a list of {} tensors: {e}", checkpoint.len()))
        })?;
        for tensor in loading {
            let tensor = tensor.map_err(|e| source.error(&e))?;
            self.bar.inc(tensor.tensor().len());
            tensors.push(tensor);
        }
        Ok(tensors)
    }

    /// Reads the tensors from their files again, and compares.
    fn compare_tensors(
        &self,
        source: &Source,
        checkpoint: &Checkpoint,
        tensors: &[DeviceTensor],
        sums: &[u128],
    ) -> Result<(), Failure> {
        spread(self.pipeline.threads(), tensors.len(), |number| {
            let tensor = &tensors[number];
            let right = checkpoint.file_checksum(tensor.name()).map_err(|e| source.error(&e))?;
            if right != sums.get(number).copied() {
                return Err(Failure::Mismatch(format!(
                    "{}: mismatch in tensor {:?}: its bytes did not come back as they are in the file",
                    source.name,
                    tensor.name()
                )));
            }
            self.bar.inc(tensor.tensor().len());
            Ok(())
        })
    }

    /// A bar on a terminal, nothing elsewhere.
    fn progress(&self, source: &Source, passes: u64) -> ProgressBar {
        let bar = &self.bar;
        if io::stderr().is_terminal() {
            bar.set_draw_target(ProgressDrawTarget::stderr());
            if let Ok(style) = style(source.len) {
                bar.set_style(style);
            }
            bar.set_message(clean(&source.name, NAME).into_owned());
        }
        bar.reset();
        bar.set_length(source.len.saturating_mul(passes));
        bar.clone()
    }

    /// What the pool has to say. Warns, once, if it is not all pinned.
    fn note(&self) -> PoolStats {
        // Memory that is still being pinned, and buffers that the last copies are giving back.
        let pinning = self.pool.wait_pinned(Some(REST));
        let stats = settle(&self.pool);
        if stats.unpinned_bytes > 0 {
            let (plain, all) = (stats.unpinned_bytes, stats.pinned_bytes + stats.unpinned_bytes);
            say(&format!(
                "warning: {plain} of the pool's {all} bytes are not pinned, since the system refused (see ulimit -l); copies \
                 from them are slower"
            ));
        } else if let Ok(Some(error)) = pinning.map(|p| p.error) {
            say(&format!("warning: the pool is smaller than its capacity: {error}"));
        }
        stats
    }
}

/// The line of a source that has so many bytes.
fn style(len: u64) -> Result<ProgressStyle, TemplateError> {
    let style = ProgressStyle::with_template(
        "{msg} {wide_bar} {percent}% {moved}, {decimal_bytes_per_sec}, {eta} left",
    )?;
    Ok(style.with_key("moved", move |state: &ProgressState, line: &mut dyn std::fmt::Write| {
        // (A line that cannot be written has no place for that either.)
        let _ = line.write_str(&moved(state.pos(), len));
    }))
}

/// How far a source is, of which so many bytes are done in all passes.
fn moved(done: u64, len: u64) -> String {
    let pass = done.saturating_sub(1).checked_div(len).unwrap_or(0).min(2);
    let what = ["up", "back", "compared"][pass as usize];
    format!("{} of {} {what}", DecimalBytes(done - pass * len), DecimalBytes(len))
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

    /// What the library says, with the file's name where that does not have it.
    fn error(&self, error: &Error) -> Failure {
        match error {
            Error::Read { .. } | Error::Shrunk { .. } | Error::Transfer { .. } | Error::Cancelled { .. } => {
                Failure::Failed(error.to_string())
            }
            _ => self.failed(error),
        }
    }

    fn short(&self, end: u64) -> Failure {
        self.failed(format!("ends at byte {end}, not at {}: it has become shorter", self.len))
    }
}

/// A chunk that came back.
#[derive(Clone, Copy, Debug)]
struct Part {
    offset: u64,
    len: usize,
    sum: u128,
}

/// Takes the checksums of what comes back.
struct Sums {
    name: String,
    parts: Mutex<Vec<Part>>,
}

impl Sink for Sums {
    fn name(&self) -> std::borrow::Cow<'_, str> {
        (&*self.name).into()
    }

    fn put(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let part = Part { offset, len: bytes.len(), sum: xxh3_128(bytes) };
        self.parts.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(part);
        Ok(())
    }
}

impl Report {
    fn json(&self, stats: &PoolStats) -> Value {
        json!({
            "device": self.device,
            "bytes": self.upload.bytes,
            "verified": self.verified,
            "upload_gb_per_s": self.upload.gb_per_s(Moved::default()),
            "download_gb_per_s": self.download.gb_per_s(Moved::default()),
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
            DecimalBytes(stats.pinned_bytes as u64),
            stats.checkouts,
            stats.waits
        );
        self.lines.iter().chain([&pool]).map(String::as_str).collect::<Vec<_>>().join("\n")
    }
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
        let What::File(file) = &source.what else { panic!("a sample is a file") };
        let memory = job.device.alloc(300_000).unwrap();
        job.upload(source, file, &memory).unwrap();
        let sums = job.download(source, &memory).unwrap();
        job.compare(source, file, &sums).unwrap();

        // One byte in the third chunk, and one in the last: the first of them is reported.
        let stream = job.device.stream().unwrap();
        for at in [299_999, 131_072 + 17] {
            let mut byte = [0];
            stream.download_blocking(memory.slice(at..=at), &mut byte).unwrap();
            stream.upload_blocking(&[!byte[0]], memory.slice(at..=at)).unwrap();
        }
        let sums = job.download(source, &memory).unwrap();
        let failure = job.compare(source, file, &sums).unwrap_err();
        assert!(failure.to_string().contains("mismatch at offset 131072"), "{failure}");
        assert_eq!(failure.exit_code(), super::super::EXIT_FAILED);
    }

    #[test]
    fn the_line_says_how_many_bytes_of_how_many() {
        style(1).unwrap();
        for (done, text) in [
            (0, "0 B of 4.00 MB up"),
            (1_500_000, "1.50 MB of 4.00 MB up"),
            (4_000_000, "4.00 MB of 4.00 MB up"),
            (4_000_001, "1 B of 4.00 MB back"),
            (9_000_000, "1.00 MB of 4.00 MB compared"),
            (12_000_000, "4.00 MB of 4.00 MB compared"),
        ] {
            assert_eq!(moved(done, 4_000_000), text);
        }
        assert_eq!(moved(0, 0), "0 B of 0 B up");
    }
}
