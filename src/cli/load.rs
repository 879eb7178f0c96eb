//! `pinpool load`: files go to device memory through the copy pipeline, and with `--verify` back again.
//!
//! A file is one transfer of the pipeline. A `.safetensors` file, an index of several, or a folder of such files is
//! loaded as tensors by the library's loader. With `--verify` the pipeline then downloads everything, and checksums are
//! computed: one for each chunk of a file, or one for each tensor of a checkpoint. Last, the file is read a second time
//! into ordinary memory, without the pool and the device, and its checksums are compared with those.
//!
//! [`prepare`] opens everything into a [`LoadRun`], so that a wrong command line is refused before any byte moves.
//! [`LoadRun::run`] moves one [`Input`] after the other and fills in a [`LoadReport`], which is printed also after an
//! error.

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

use super::args::{LoadArgs, UnpinnedArg};
use super::escape::{NAME, clean, text};
use super::spread::spread;
use super::{CliError, Result, sample, say};

/// The approximate length of an extent: short enough for the first to be ready soon, long enough for pinning at full
/// speed.
const EXTENT: usize = 64 << 20;
/// Longer segments get extents of at least 1 GiB, which hold enough of them.
const LARGE_SEGMENT: usize = EXTENT / 8;
/// The pipeline's chunks are multiples of this.
const CHUNK_STEP: usize = 4096;
/// How often the progress bar is updated.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// How long the command waits at its end until no buffer of the pool is out. All transfers are over by then.
const REST_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the command. The report goes to stdout, also after an error.
pub fn run(args: &LoadArgs) -> Result<()> {
    let run = prepare(args)?;
    let mut report = LoadReport::default();
    let result = run.run(args, &mut report);
    let stats = run.note();
    let device = run.device.clone();
    drop(run);
    // An error of the run goes before an error of closing.
    let result = result.and(super::close(device));
    let text = if args.json { super::json_line(&report.json(&stats)) } else { report.text(&stats) };
    result.and(super::print(&mut io::stdout(), &format!("{text}\n")))
}

/// One file, or one checkpoint, to move.
struct Input {
    name: String,
    len: u64,
    what: InputKind,
}

enum InputKind {
    File(Arc<File>),
    Tensors(Checkpoint),
}

/// Everything that the command has opened.
struct LoadRun {
    sources: Vec<Input>,
    device: Device,
    pool: Pool,
    pipeline: Pipeline,
    bar: ProgressBar,
}

/// The result: a line for each input, the verification's outcome, bytes and times.
#[derive(Debug, Default)]
struct LoadReport {
    device: String,
    lines: Vec<String>,
    verified: Option<bool>,
    upload: Moved,
    download: Moved,
}

/// Bytes moved, and the time that this took.
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

    /// GB/s of 10^9 bytes since the state `before`. `None`: no byte was moved, or no time passed.
    fn gb_per_s(self, before: Self) -> Option<f64> {
        let bytes = self.bytes - before.bytes;
        super::rate(bytes, self.time - before.time).filter(|_| bytes > 0)
    }
}

/// Opens everything, so that a command line that cannot be obeyed is refused before any byte moves.
fn prepare(args: &LoadArgs) -> Result<LoadRun> {
    let sources = args.files.iter().map(|path| open(path)).collect::<Result<Vec<_>, _>>()?;
    let device = super::open_device(&args.device)?;
    furnish(args, sources, device.clone()).inspect_err(|_| {
        let _ = super::close(device);
    })
}

/// Makes the pool, the pipeline and, for a command line without files, the sample.
fn furnish(args: &LoadArgs, mut sources: Vec<Input>, device: Device) -> Result<LoadRun> {
    let segment =
        Request::new(args.chunk).segment_bytes().map_err(|e| CliError::Usage(format!("--chunk: {e}")))?;
    let too_small = || {
        CliError::Usage(format!(
            "a --capacity of {} bytes is below one segment: a --chunk of {} bytes takes {segment}, and the pool counts \
             in whole pages",
            args.capacity, args.chunk
        ))
    };
    if args.capacity < segment {
        return Err(too_small());
    }
    // An extent is a multiple of the pipeline's segments, so that nothing is wasted at its edges.
    let staged = Request::new(args.chunk.saturating_add(3 * CHUNK_STEP))
        .align(CHUNK_STEP)
        .segment_bytes()
        .unwrap_or(segment);
    let extent = if staged <= LARGE_SEGMENT {
        EXTENT / staged * staged.next_multiple_of(CHUNK_STEP)
    } else {
        staged.saturating_add(2 << 20).max(1 << 30)
    };
    let failed = |what: &str, error: &Error| CliError::Failed(format!("{what}: {error}"));
    let pool = Pool::builder(&device)
        .capacity(args.capacity)
        .initial(args.capacity)
        .extent(extent)
        .unpinned(match args.unpinned {
            UnpinnedArg::Refuse => pinpool::Unpinned::Refuse,
            UnpinnedArg::Allow => pinpool::Unpinned::Allow,
        })
        .build();
    let pool = pool.map_err(|error| match error {
        Error::Config(text) => CliError::Usage(text),
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
        // Checked before the sample is written, which takes long.
        device.alloc(len).map_err(|e| {
            CliError::Failed(format!("{} has no room for a sample of {len} bytes: {e}", device.name()))
        })?;
        let file = sample::make(len as u64).map_err(|e| {
            let at = std::env::temp_dir();
            CliError::Failed(format!("a sample of {len} bytes cannot be made in {}: {e}", at.display()))
        })?;
        let what = InputKind::File(Arc::new(file));
        sources.push(Input { name: "sample".into(), len: len as u64, what });
    }
    Ok(LoadRun { sources, device, pool, pipeline, bar: ProgressBar::hidden() })
}

/// A pipeline that may use all of the pool. A chunk has a page before it and a page behind it in its segment, so where
/// the capacity is just that of the chunks, the chunks are a little smaller than asked. `None`: no chunk fits.
fn pipeline(pool: &Pool, device: &Device, args: &LoadArgs) -> Result<Option<Pipeline>, Error> {
    let mut chunk = args.chunk.next_multiple_of(CHUNK_STEP);
    while chunk > 0 {
        let builder = Pipeline::builder(pool, device).threads(super::threads(args.threads));
        match builder.share(args.capacity).chunk(chunk).build() {
            Err(Error::Config(_)) => chunk -= CHUNK_STEP,
            built => return built.map(Some),
        }
    }
    Ok(None)
}

/// Whether an error of opening a file is an error of the command line, and not of the system.
fn is_named_wrongly(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{IsADirectory, NotADirectory, NotFound, PermissionDenied};
    matches!(kind, NotFound | PermissionDenied | NotADirectory | IsADirectory)
}

/// Opens a regular file, or the checkpoint of a folder.
fn open(path: &Path) -> Result<Input> {
    let name = path.display().to_string();
    let wrong = |text: &str| CliError::Usage(format!("{name}: {text}"));
    let unread = |e: io::Error| {
        // These two have no stable `ErrorKind` in the oldest Rust that is supported.
        let by_name = matches!(e.raw_os_error(), Some(libc::ENAMETOOLONG | libc::ELOOP));
        let text = format!("{name}: {e}");
        if by_name || is_named_wrongly(e.kind()) { CliError::Usage(text) } else { CliError::Failed(text) }
    };
    // Before opening, which would block on a named pipe.
    let metadata = std::fs::metadata(path).map_err(unread)?;
    if !metadata.is_file() && !metadata.is_dir() {
        return Err(wrong("is not a regular file"));
    }
    // For a folder without a checkpoint the library's error says which files were looked for.
    if metadata.is_dir() || name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json") {
        let checkpoint = Checkpoint::open(path).map_err(|error| match &error {
            Error::Read { kind, .. } if !is_named_wrongly(*kind) => CliError::Failed(error.to_string()),
            Error::OutOfMemory { .. } => CliError::Failed(error.to_string()),
            _ => CliError::Usage(error.to_string()),
        })?;
        return Ok(Input { name, len: checkpoint.bytes(), what: InputKind::Tensors(checkpoint) });
    }
    let file = File::open(path).map_err(unread)?;
    let len = file.metadata().map_err(unread)?.len();
    // A file that the kernel generates on reading has bytes but a length of 0; an empty file has no byte to read.
    if len == 0 && matches!(file.read_at(&mut [0], 0), Ok(1)) {
        return Err(wrong("has bytes but no length: copy it to a real file first"));
    }
    Ok(Input { name, len, what: InputKind::File(Arc::new(file)) })
}

impl LoadRun {
    fn run(&self, args: &LoadArgs, report: &mut LoadReport) -> Result<()> {
        report.device = self.device.name().to_owned();
        for source in &self.sources {
            let result = self.load(args, source, report);
            self.bar.finish_and_clear();
            if let Err(CliError::Mismatch(_)) = &result {
                report.verified = Some(false);
            }
            result?;
        }
        report.verified = args.verify.then_some(true);
        Ok(())
    }

    fn load(&self, args: &LoadArgs, source: &Input, report: &mut LoadReport) -> Result<()> {
        let len = usize::try_from(source.len).map_err(|_| source.failed("it is larger than all memory"))?;
        if len == 0 {
            report.lines.push(format!("{}: empty", text(&source.name)));
            return Ok(());
        }
        let bar = self.progress(source, if args.verify { 3 } else { 1 });
        let before = (report.upload, report.download);
        let mut start = Instant::now();
        let what = match &source.what {
            InputKind::File(file) => {
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
            InputKind::Tensors(checkpoint) => {
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

    /// Uploads a file into device memory.
    fn upload(&self, source: &Input, file: &Arc<File>, memory: &DeviceBuffer) -> Result<()> {
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

    /// Waits for a transfer and updates the progress bar.
    fn watched<T: Send + Sync + 'static>(&self, source: &Input, mut transfer: Transfer<T>) -> Result<T> {
        let before = self.bar.position();
        loop {
            match transfer.wait_timeout(PROGRESS_INTERVAL) {
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

    /// Downloads device memory. Returns the checksum of each chunk, in order.
    fn download(&self, source: &Input, memory: &DeviceBuffer) -> Result<Vec<ChunkSum>> {
        let sums = ChecksumSink { name: source.name.clone(), parts: Mutex::default() };
        let transfer = self.pipeline.download(memory, sums).map_err(|e| source.error(&e.error))?;
        let ChecksumSink { parts, .. } = self.watched(source, transfer)?;
        let mut parts = parts.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        parts.sort_unstable_by_key(|part| part.offset);
        Ok(parts)
    }

    /// Reads the file again, into ordinary memory, and compares the checksums.
    fn compare(&self, source: &Input, file: &File, sums: &[ChunkSum]) -> Result<()> {
        spread(self.pipeline.threads(), sums.len(), |number| {
            let ChunkSum { offset, len, sum } = sums[number];
            let mut bytes = super::room(len).map_err(|e| source.error(&e))?;
            bytes.resize(len, 0);
            file.read_exact_at(&mut bytes, offset).map_err(|e| match e.kind() {
                io::ErrorKind::UnexpectedEof => source.short(offset),
                _ => source.failed(format!("cannot be read at offset {offset}: {e}")),
            })?;
            if sum != xxh3_128(&bytes) {
                let end = offset + len as u64;
                return Err(CliError::Mismatch(format!(
                    "{}: mismatch at offset {offset}: bytes {offset}..{end} did not come back as they are in the file",
                    source.name
                )));
            }
            self.bar.inc(len as u64);
            Ok(())
        })
    }

    /// Loads a checkpoint's tensors into device memory.
    fn upload_tensors(&self, source: &Input, checkpoint: &Checkpoint) -> Result<Vec<DeviceTensor>> {
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

    /// Reads the tensors from their files again, and compares the checksums.
    fn compare_tensors(
        &self,
        source: &Input,
        checkpoint: &Checkpoint,
        tensors: &[DeviceTensor],
        sums: &[u128],
    ) -> Result<()> {
        spread(self.pipeline.threads(), tensors.len(), |number| {
            let tensor = &tensors[number];
            let right = checkpoint.file_checksum(tensor.name()).map_err(|e| source.error(&e))?;
            if right != sums.get(number).copied() {
                return Err(CliError::Mismatch(format!(
                    "{}: mismatch in tensor {:?}: its bytes did not come back as they are in the file",
                    source.name,
                    tensor.name()
                )));
            }
            self.bar.inc(tensor.tensor().len());
            Ok(())
        })
    }

    /// A progress bar on a terminal, a hidden one elsewhere.
    fn progress(&self, source: &Input, passes: u64) -> ProgressBar {
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

    /// The pool's statistics at the end. Prints one warning if a part of the pool is not pinned, or was not made.
    fn note(&self) -> PoolStats {
        // Memory may still be being pinned, and the last copies' buffers may still be on their way back.
        let pinning = self.pool.wait_pinned(Some(REST_TIMEOUT));
        let stats = stats_at_rest(&self.pool);
        if stats.unpinned_bytes > 0 {
            let (plain, all) = (stats.unpinned_bytes, stats.pinned_bytes + stats.unpinned_bytes);
            say(&format!(
                "warning: {plain} of the pool's {all} bytes are not pinned, since the system refused (see ulimit -l); \
                 copies from them are slower"
            ));
        } else if let Ok(Some(error)) = pinning.map(|p| p.error) {
            say(&format!("warning: the pool is smaller than its capacity: {error}"));
        }
        stats
    }
}

/// The progress bar's line for an input of `len` bytes.
fn style(len: u64) -> Result<ProgressStyle, TemplateError> {
    let style = ProgressStyle::with_template(
        "{msg} {wide_bar} {percent}% {moved}, {decimal_bytes_per_sec}, {eta} left",
    )?;
    Ok(style.with_key("moved", move |state: &ProgressState, line: &mut dyn std::fmt::Write| {
        // A failed write is ignored: there is no other place for the text.
        let _ = line.write_str(&moved(state.pos(), len));
    }))
}

/// The progress of an input of `len` bytes, of which `done` bytes are done, all passes added up.
fn moved(done: u64, len: u64) -> String {
    let pass = done.saturating_sub(1).checked_div(len).unwrap_or(0).min(2);
    let what = ["up", "back", "compared"][pass as usize];
    format!("{} of {} {what}", DecimalBytes(done - pass * len), DecimalBytes(len))
}

/// The statistics when no buffer is out any more. After an error one may stay in flight, so the wait has a deadline.
fn stats_at_rest(pool: &Pool) -> PoolStats {
    let deadline = Instant::now() + REST_TIMEOUT;
    loop {
        let stats = pool.stats();
        if stats.in_flight_bytes + stats.checked_out_bytes == 0 || Instant::now() >= deadline {
            return stats;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Input {
    fn failed(&self, why: impl std::fmt::Display) -> CliError {
        CliError::Failed(format!("{}: {why}", self.name))
    }

    /// An error of the library, with the file's name added where the error does not contain it.
    fn error(&self, error: &Error) -> CliError {
        match error {
            Error::Read { .. } | Error::Shrunk { .. } | Error::Transfer { .. } | Error::Cancelled { .. } => {
                CliError::Failed(error.to_string())
            }
            _ => self.failed(error),
        }
    }

    fn short(&self, end: u64) -> CliError {
        self.failed(format!("ends at byte {end}, not at {}: it has become shorter", self.len))
    }
}

/// The checksum of a downloaded chunk.
#[derive(Clone, Copy, Debug)]
struct ChunkSum {
    offset: u64,
    len: usize,
    sum: u128,
}

/// A sink that keeps the checksum of each chunk and drops the bytes.
struct ChecksumSink {
    name: String,
    parts: Mutex<Vec<ChunkSum>>,
}

impl Sink for ChecksumSink {
    fn name(&self) -> std::borrow::Cow<'_, str> {
        (&*self.name).into()
    }

    fn put(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let part = ChunkSum { offset, len: bytes.len(), sum: xxh3_128(bytes) };
        self.parts.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(part);
        Ok(())
    }
}

impl LoadReport {
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
    use super::super::args::{Args, Command};
    use super::*;
    use clap::Parser;

    #[test]
    fn a_wrong_byte_on_the_device_is_found_and_named() {
        let line = "pinpool load --device host --sample 300000 --chunk 65536 --capacity 1MiB --threads 2";
        let Command::Load(args) = Args::parse_from(line.split(' ')).command else { panic!("{line}") };
        let run = prepare(&args).unwrap();
        let source = &run.sources[0];
        let InputKind::File(file) = &source.what else { panic!("a sample is a file") };
        let memory = run.device.alloc(300_000).unwrap();
        run.upload(source, file, &memory).unwrap();
        let sums = run.download(source, &memory).unwrap();
        run.compare(source, file, &sums).unwrap();

        // A byte in the third chunk and one in the last are wrong: the first of them is reported.
        let stream = run.device.stream().unwrap();
        for at in [299_999, 131_072 + 17] {
            let mut byte = [0];
            stream.download_blocking(memory.slice(at..=at), &mut byte).unwrap();
            stream.upload_blocking(&[!byte[0]], memory.slice(at..=at)).unwrap();
        }
        let sums = run.download(source, &memory).unwrap();
        let failure = run.compare(source, file, &sums).unwrap_err();
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
