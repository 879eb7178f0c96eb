//! `pinpool load`: files go to device memory through a copier, and with `--verify` back again.
//!
//! A file is one transfer of the copier. A `.safetensors` file, an index of several, or a folder of such files is
//! loaded as tensors by the library's loader. With `--verify` the copier then downloads everything, and checksums are
//! computed: one for each chunk of a file, or one for each tensor of a checkpoint. Last, the file is read a second time
//! into ordinary memory, without the pool and the device, and its checksums are compared with those.
//!
//! [`prepare`] opens everything into a [`LoadRun`], so that a wrong command line is refused before any byte moves.
//! [`LoadRun::run`] moves one [`Input`] after the other and fills in a [`LoadReport`], which is printed also after an
//! error. What bounds the uploads is told by counters of the system ([`Taken`]).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use pinpool::copier::{FileSource, Sink, Transfer};
use pinpool::safetensors::{Checkpoint, DeviceTensor, device_checksums};
use pinpool::{Copier, Device, DeviceBuffer, Error, Pool, PoolStats, Request};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use super::amount::{Amount, amount};
use super::args::{LoadArgs, UnpinnedArg};
use super::escape::{NAME, clean, text};
use super::spread::spread;
use super::{CliError, Result, doctor, of_device, sample, say};

/// The approximate length of an extent: short enough for the first to be ready soon, long enough for pinning at full
/// speed.
const EXTENT: usize = 64 << 20;
/// Longer segments get extents of at least 1 GiB, which hold enough of them.
const LARGE_SEGMENT: usize = EXTENT / 8;
/// The capacity and the sample's size, where the command line names none and memory allows it.
const USUAL_CAPACITY: usize = 256 << 20;
const USUAL_SAMPLE: usize = 1 << 30;
/// The chunks that the pool has room for however little memory is left.
const LEAST_CHUNKS: usize = 2;
/// The copier's chunks are multiples of this.
const CHUNK_STEP: usize = 4096;
/// The fewest bytes of uploads of which what bounds them is told.
const TELLING: u64 = 32 << 20;
/// Bytes below which the time of an upload is told in place of its speed.
const FEW: u64 = 1 << 20;
/// How often the progress bar is updated.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// How long the command waits until the pool is pinned, and at its end until no buffer is out: all transfers are over
/// by then.
const REST_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the command. The report goes to stdout, also after an error.
pub fn run(args: &LoadArgs) -> ExitCode {
    let mut report = LoadReport::default();
    let result = prepare(args).and_then(|run| {
        let result = run.run(args, &mut report);
        report.pool = Some(run.note());
        let device = run.device.clone();
        drop(run);
        // An error of the run goes before an error of closing.
        result.and(super::close(device))
    });
    let (object, text) = if args.json { (Some(report.json()), String::new()) } else { (None, report.text()) };
    super::exit(object, &text, result)
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
    copier: Copier,
    bar: ProgressBar,
}

/// The result: a line for each input, the verification's outcome, bytes and times.
#[derive(Debug, Default)]
struct LoadReport {
    device: Option<String>,
    lines: Vec<String>,
    verified: Option<bool>,
    upload: Moved,
    download: Moved,
    /// During the uploads.
    taken: Taken,
    /// `None`: nothing was opened.
    pool: Option<PoolStats>,
}

/// What this process has taken of the system so far, or in a while, in bytes. Zeros where the system does not tell.
#[derive(Clone, Copy, Debug, Default)]
struct Taken {
    /// Memory that is there, but the pool's.
    fresh: u64,
    /// Read from disks.
    read: u64,
}

impl Taken {
    fn now(pool: &Pool) -> Self {
        let ([own, read], stats) = (doctor::taken(), pool.stats());
        Self { fresh: own.saturating_sub((stats.pinned_bytes + stats.unpinned_bytes) as u64), read }
    }

    fn add(&mut self, now: Self, before: Self) {
        self.fresh += now.fresh.saturating_sub(before.fresh);
        self.read += now.read.saturating_sub(before.read);
    }
}

/// Bytes moved, and the time that this took.
#[derive(Clone, Copy, Debug, Default)]
struct Moved {
    bytes: u64,
    time: Duration,
}

impl Moved {
    /// Adds what moves so many bytes.
    fn add<T>(&mut self, bytes: u64, moves: impl FnOnce() -> Result<T>) -> Result<T> {
        let since = Instant::now();
        let moved = moves()?;
        self.bytes += bytes;
        self.time += since.elapsed();
        Ok(moved)
    }

    /// GB/s of 10^9 bytes since the state `before`. `None`: no byte was moved, or no time passed.
    fn gb_per_s(self, before: Self) -> Option<f64> {
        let bytes = self.bytes - before.bytes;
        super::rate(bytes, self.time - before.time).filter(|_| bytes > 0)
    }

    /// The same as text: ` at 1.23 GB/s`. Of few bytes the time, since that is a call's and says nothing of a speed.
    fn told(self, before: Self) -> String {
        let (bytes, time) = (self.bytes - before.bytes, self.time - before.time);
        match self.gb_per_s(before) {
            Some(_) if bytes < FEW => format!(" in {:.1} ms", time.as_secs_f64() * 1e3),
            // A slow disk.
            Some(speed) if speed < 0.1 => format!(" at {speed:.4} GB/s"),
            Some(speed) => format!(" at {speed:.2} GB/s"),
            None => String::new(),
        }
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

/// Makes the pool, the copier and, for a command line without files, the sample.
fn furnish(args: &LoadArgs, mut sources: Vec<Input>, device: Device) -> Result<LoadRun> {
    let segment =
        Request::new(args.chunk).segment_bytes().map_err(|e| CliError::Usage(format!("--chunk: {e}")))?;
    // The pool, the sample's file and the sample on the host device take three quarters together.
    let quarter = doctor::left().map_or(usize::MAX, |left| usize::try_from(left / 4).unwrap_or(usize::MAX));
    let capacity = args.capacity.unwrap_or_else(|| USUAL_CAPACITY.min(quarter).max(LEAST_CHUNKS * segment));
    let too_small = || {
        CliError::Usage(format!(
            "a --capacity of {} is below one segment: a --chunk of {} takes {}, and the pool counts in whole pages",
            amount(capacity),
            amount(args.chunk),
            amount(segment)
        ))
    };
    if capacity < segment {
        return Err(too_small());
    }
    // An extent is a multiple of the copier's segments, so that nothing is wasted at its edges.
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
    // For nothing, nothing is pinned.
    let is_nothing = !sources.is_empty() && sources.iter().all(|source| source.len == 0);
    let pool = super::pool(&device, args.backing)
        .capacity(capacity)
        .initial(if is_nothing { 0 } else { capacity })
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
    let copier = match copier(&pool, &device, args, capacity) {
        Ok(Some(copier)) => copier,
        Ok(None) => return Err(too_small()),
        Err(error) => return Err(failed("the copier cannot be built", &error)),
    };
    let bar = super::progress_bar();
    if sources.is_empty() {
        let sample = args.sample.unwrap_or_else(|| USUAL_SAMPLE.min(quarter));
        let (len, told) = (sample as u64, amount(sample));
        // Checked before the sample is written, which takes long.
        device.alloc(sample).map_err(|e| {
            let why = of_device(&device, &e);
            CliError::Failed(format!("{} has no room for a sample of {told}: {why}", device.name()))
        })?;
        show(&bar, "sample", len, &["made"]);
        let file = sample::make(len, |part| bar.inc(part)).map_err(|e| {
            let at = std::env::temp_dir();
            CliError::Failed(format!("a sample of {told} cannot be made in {}: {e}", at.display()))
        });
        bar.finish_and_clear();
        sources.push(Input { name: "sample".into(), len, what: InputKind::File(Arc::new(file?)) });
    }
    Ok(LoadRun { sources, device, pool, copier, bar })
}

/// A copier that may use all of the pool. A chunk has a page before it and a page behind it in its segment, so where
/// the capacity is just that of the chunks, the chunks are a little smaller than asked. `None`: no chunk fits.
fn copier(pool: &Pool, device: &Device, args: &LoadArgs, capacity: usize) -> Result<Option<Copier>, Error> {
    let mut chunk = args.chunk.next_multiple_of(CHUNK_STEP);
    while chunk > 0 {
        let builder = Copier::builder(pool, device).threads(super::threads(args.threads));
        match builder.share(capacity).chunk(chunk).build() {
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
    let is_json = name.ends_with(".json");
    let is_named = name.ends_with(".safetensors") || is_json && name.contains("index");
    // Before opening, which would block on a named pipe. Of a checkpoint's file that is missing the library says more.
    let is_folder = match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() || metadata.is_dir() => metadata.is_dir(),
        Ok(_) => return Err(wrong("is not a regular file")),
        Err(error) if is_named && error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => return Err(unread(error)),
    };
    // An index may have any name; other files of a checkpoint's folder, such as config.json, are bytes.
    let maps = || std::fs::read_to_string(path).is_ok_and(|text| text.contains("\"weight_map\""));
    let is_checkpoint = is_named || is_json && maps();
    // For a folder without a checkpoint the library's error says which files were looked for.
    if is_folder || is_checkpoint {
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
        report.device = Some(self.device.name().to_owned());
        // Memory that is still being pinned would count as taken by the uploads. An error is told by `note`.
        let _ = self.pool.wait_pinned(Some(REST_TIMEOUT));
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
        let bar = &self.bar;
        show(bar, &source.name, source.len, if args.verify { &PASSES } else { &PASSES[..1] });
        let before = (report.upload, report.download, Taken::now(&self.pool));
        let what = match &source.what {
            InputKind::File(file) => {
                let device = &self.device;
                let memory = device.alloc(len).map_err(|e| {
                    let (name, why) = (device.name(), of_device(device, &e));
                    source.failed(format!("{name} has no room for its {}: {why}", amount(len)))
                })?;
                report.upload.add(source.len, || self.upload(source, file, &memory))?;
                report.taken.add(Taken::now(&self.pool), before.2);
                if args.verify {
                    let sums = report.download.add(source.len, || self.download(source, &memory))?;
                    self.compare(source, file, &sums)?;
                }
                String::new()
            }
            InputKind::Tensors(checkpoint) => {
                let tensors = report.upload.add(source.len, || self.upload_tensors(source, checkpoint))?;
                report.taken.add(Taken::now(&self.pool), before.2);
                if args.verify {
                    let sums = || device_checksums(&self.copier, &tensors).map_err(|e| source.error(&e));
                    let sums = report.download.add(source.len, sums)?;
                    bar.inc(source.len);
                    self.compare_tensors(source, checkpoint, &tensors, &sums)?;
                }
                format!("{} tensors, ", tensors.len())
            }
        };
        let name = text(&source.name);
        let mut line = format!("{name}: {what}{} to {}", Amount(source.len), self.device.name());
        line += &report.upload.told(before.0);
        if args.verify {
            if source.len > 0 {
                line += &format!(", back{}", report.download.told(before.1));
            }
            line += ", all checksums equal";
        }
        report.lines.push(line);
        Ok(())
    }

    /// Uploads a file into device memory.
    fn upload(&self, source: &Input, file: &Arc<File>, memory: &DeviceBuffer) -> Result<()> {
        let from = FileSource::new(file.clone(), source.name.clone()).map_err(|e| source.error(&e))?;
        if from.len() < source.len {
            return Err(source.shrunk(from.len()));
        }
        let from = from.range(0..source.len).map_err(|e| source.error(&e))?;
        let transfer = self.copier.upload_file(from, memory).map_err(|e| source.error(&e.error))?;
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
        let transfer = self.copier.download(memory, sums).map_err(|e| source.error(&e.error))?;
        let ChecksumSink { parts, .. } = self.watched(source, transfer)?;
        let mut parts = parts.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        parts.sort_unstable_by_key(|part| part.offset);
        Ok(parts)
    }

    /// Reads the file again, into ordinary memory, and compares the checksums.
    fn compare(&self, source: &Input, file: &File, sums: &[ChunkSum]) -> Result<()> {
        spread(self.copier.threads(), sums.len(), |number| {
            let ChunkSum { offset, len, sum } = sums[number];
            let mut bytes = super::room(len).map_err(|e| source.error(&e))?;
            bytes.resize(len, 0);
            file.read_exact_at(&mut bytes, offset).map_err(|e| match e.kind() {
                io::ErrorKind::UnexpectedEof => source.shrunk(offset),
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
        let mut loading = checkpoint.loader(&self.copier).start().map_err(|e| source.error(&e))?;
        let mut tensors = Vec::new();
        tensors.try_reserve_exact(checkpoint.len()).map_err(|e| {
            source.failed(format!("no memory for a list of {} tensors: {e}", checkpoint.len()))
        })?;
        for tensor in loading.blocking() {
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
        spread(self.copier.threads(), tensors.len(), |number| {
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

    /// The pool's statistics at the end. Prints one warning if a part of the pool is not pinned, or was not made.
    fn note(&self) -> PoolStats {
        // Memory may still be being pinned, and the last copies' buffers may still be on their way back.
        let pinning = self.pool.wait_pinned(Some(REST_TIMEOUT));
        let stats = stats_at_rest(&self.pool);
        if stats.unpinned_bytes > 0 {
            let (plain, all) = (stats.unpinned_bytes, stats.pinned_bytes + stats.unpinned_bytes);
            let (plain, all) = (amount(plain), amount(all));
            say(&format!(
                "warning: {plain} of the pool's {all} are not pinned, since the system refused (see ulimit -l); \
                 copies from them are slower"
            ));
        } else if let Ok(Some(error)) = pinning.map(|p| p.error) {
            say(&format!("warning: the pool is smaller than its capacity: {error}"));
        }
        stats
    }
}

/// What is done with an input, one after the other.
const PASSES: [&str; 3] = ["up", "back", "compared"];

/// Begins the progress of an input of `len` bytes, all passes added up.
fn show(bar: &ProgressBar, name: &str, len: u64, passes: &'static [&str]) {
    let all = len.saturating_mul(passes.len() as u64);
    let moved = move |state: &ProgressState, line: &mut dyn std::fmt::Write| {
        let done = state.pos();
        let pass = done.saturating_sub(1).checked_div(len).unwrap_or(0).min(passes.len() as u64 - 1);
        let (part, what) = (Amount(done - pass * len), passes[pass as usize]);
        // A failed write is ignored: there is no other place for the text.
        let _ = write!(line, "{part} of {} {what}", Amount(len));
    };
    let line = "{msg} {wide_bar} {percent}% {moved}, {decimal_bytes_per_sec}, {eta} left";
    if let Ok(style) = ProgressStyle::with_template(line) {
        bar.set_style(style.with_key("moved", moved));
    }
    bar.set_message(clean(name, NAME).into_owned());
    bar.set_length(all);
    bar.reset();
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
            Error::Read { .. }
            | Error::Shrunk { .. }
            | Error::Transfer { .. }
            | Error::Tensor { .. }
            | Error::Cancelled { .. } => CliError::Failed(error.to_string()),
            _ => self.failed(error),
        }
    }

    /// The file ends here by now.
    fn shrunk(&self, end: u64) -> CliError {
        self.error(&Error::Shrunk { what: self.name.clone(), end, len: self.len })
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
    /// What bounded the uploads, as a word and in words. `None`: too few bytes to tell.
    fn bound(&self) -> Option<(&'static str, &'static str)> {
        let half = self.upload.bytes / 2;
        if half < TELLING / 2 {
            return None;
        }
        // Each of the two is far slower than a copy in memory.
        Some(match self.taken {
            Taken { read, .. } if read >= half => {
                ("disk", "reading the disk, since the page cache did not have the file")
            }
            Taken { fresh, .. } if fresh >= half => (
                "fresh_memory",
                "fresh memory from the system, which is the host device's (an accelerator has its own)",
            ),
            _ => ("copying", "the link or the processor's copying, which pinpool bench tells apart"),
        })
    }

    fn json(&self) -> Value {
        let stats = &self.pool.unwrap_or_default();
        json!({
            "device": self.device,
            "bound": self.bound().map(|(word, _)| word),
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

    fn text(&self) -> String {
        let mut text: String = self.lines.iter().map(|line| format!("{line}\n")).collect();
        if let Some((_, words)) = self.bound() {
            text += &format!("bound by: {words}\n");
        }
        if let Some(PoolStats { pinned_bytes, checkouts, waits, .. }) = self.pool {
            let pinned = amount(pinned_bytes);
            text += &format!("pool: {pinned} pinned, {checkouts} checkouts, {waits} of them waited for\n");
        }
        text
    }
}
