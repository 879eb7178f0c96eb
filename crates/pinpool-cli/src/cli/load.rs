//! `pinpool load`: files go to device memory through a copier, and with `--verify` back again.
//!
//! A file is one transfer of the copier. A `.safetensors` file, an index of several, or a folder of
//! such files is loaded as tensors by the library's loader. With `--verify` the copier then
//! downloads everything into a sink that computes a checksum for each chunk's part of a tensor, and
//! they are compared with those of the files, read a second time into ordinary memory.
//!
//! [`prepare`] opens everything into a [`LoadRun`], before any byte moves. [`LoadRun::run`] moves
//! one [`Input`] after the other and fills in a [`LoadReport`], printed also after an error.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pinpool::copier::{CopyRange, FileSource, Sink, Transfer};
use pinpool::{Copier, Device, DeviceSlice, Error, Pool, PoolStats, Request};
use pinpool_safetensors::{Checkpoint, DeviceTensor};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use super::amount::{Amount, amount};
use super::args::LoadArgs;
use super::escape::{NAME, clean, text};
use super::spread::spread;
use super::{CliError, Result, doctor, of_device, progress, sample, say};

/// The length of an extent: long enough for pinning at full speed, and short enough that under a
/// memlock limit a part of the pool is pinned.
const EXTENT: usize = 64 << 20;
/// The capacity and the sample's size, where the command line names none and memory allows it.
const USUAL_CAPACITY: usize = 256 << 20;
const USUAL_SAMPLE: usize = 1 << 30;
/// The chunks that the pool has room for however little memory is left.
const LEAST_CHUNKS: usize = 2;
/// The copier's chunks are multiples of this.
const CHUNK_STEP: usize = 4096;
/// Bytes below which the time of an upload is told in place of its speed.
const FEW: u64 = 1 << 20;
/// How often it is shown how far a transfer is.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// How long the command waits for the pool's pinning, and at its end until no buffer is out.
const REST_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the command. The report goes to stdout, also after an error.
pub fn run(args: &LoadArgs) -> u8 {
    let mut report = LoadReport::default();
    let result = prepare(args).and_then(|run| {
        let result = run.run(args, &mut report);
        report.pool = Some(run.note());
        let device = run.device.clone();
        drop(run);
        // An error of the run goes before an error of closing.
        result.and(super::close(device))
    });
    let (object, text) =
        if args.device.json { (Some(report.json()), String::new()) } else { (None, report.text()) };
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
}

/// The result: a line for each input, the verification's outcome, bytes and times.
#[derive(Debug, Default)]
struct LoadReport {
    device: Option<String>,
    lines: Vec<String>,
    verified: Option<bool>,
    upload: Moved,
    download: Moved,
    /// `None`: nothing was opened.
    pool: Option<PoolStats>,
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

    /// As text: ` at 1.23 GB/s`. Of few bytes the time, which says nothing of a speed.
    fn told(self, before: Self) -> String {
        let (bytes, time) = (self.bytes - before.bytes, self.time - before.time);
        match self.gb_per_s(before) {
            Some(_) if bytes < FEW => format!(" in {:.1} ms", time.as_secs_f64() * 1e3),
            // A slow disk, or a busy machine.
            Some(speed) if speed < 0.1 => format!(" at {speed:.4} GB/s"),
            Some(speed) => format!(" at {speed:.2} GB/s"),
            None => String::new(),
        }
    }
}

/// Opens everything, so that a command line that cannot be obeyed is refused before any byte moves.
fn prepare(args: &LoadArgs) -> Result<LoadRun> {
    let sources = args.files.iter().map(|path| open(path)).collect::<Result<Vec<_>, _>>()?;
    let device = super::open_device(&args.device.name)?;
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
    let failed = |what: &str, error: &Error| CliError::Failed(format!("{what}: {error}"));
    // For nothing, nothing is pinned.
    let is_nothing = !sources.is_empty() && sources.iter().all(|source| source.len == 0);
    // Several segments, and what the copier adds at their ends, lie in one extent.
    let extent = segment.saturating_mul(4).saturating_add(2 << 20).max(EXTENT);
    let pool = super::pool(&device, args.device.backing)
        .capacity(capacity)
        .initial(if is_nothing { 0 } else { capacity })
        .extent(extent)
        .unpinned(args.unpinned)
        .build();
    let pool = pool.map_err(|error| match error {
        Error::Argument(text) => CliError::Usage(text),
        error => failed("the pool cannot be built", &error),
    })?;
    let copier = copier(&pool, &device, args, capacity)
        .map_err(|error| failed("the copier cannot be built", &error))?
        .filter(|_| pool.stats().capacity_bytes >= segment)
        .ok_or_else(too_small)?;
    if sources.is_empty() {
        let sample = args.sample.unwrap_or_else(|| USUAL_SAMPLE.min(quarter));
        let (len, told) = (sample as u64, amount(sample));
        // Checked before the sample is written, which takes long.
        device.alloc(sample).map_err(|e| {
            let why = of_device(&device, &e);
            CliError::Failed(format!("{} has no room for a sample of {told}: {why}", device.name()))
        })?;
        progress("making a sample");
        let file = sample::make(len).map_err(|e| {
            let at = std::env::temp_dir();
            CliError::Failed(format!("a sample of {told} cannot be made in {}: {e}", at.display()))
        });
        progress("");
        sources.push(Input { name: "sample".into(), len, what: InputKind::File(Arc::new(file?)) });
    }
    Ok(LoadRun { sources, device, pool, copier })
}

/// A copier that may use all of the pool. A chunk's segment has a page before and behind it: a
/// capacity of just the chunks makes these a little smaller. `None`: no chunk fits.
fn copier(pool: &Pool, device: &Device, args: &LoadArgs, capacity: usize) -> Result<Option<Copier>, Error> {
    let mut chunk = args.chunk.next_multiple_of(CHUNK_STEP);
    while chunk > 0 {
        let builder = Copier::builder(pool, device).threads(super::threads(args.threads));
        match builder.share(capacity).chunk(chunk).build() {
            Err(Error::Argument(_)) => chunk -= CHUNK_STEP,
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
    // Before opening, which would block on a named pipe. The library tells of missing files.
    let is_folder = match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() || metadata.is_dir() => metadata.is_dir(),
        Ok(_) => return Err(wrong("is not a regular file")),
        Err(error) if is_named && error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => return Err(unread(error)),
    };
    // An index may have any name; other files of the folder, such as config.json, are bytes.
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
    // A file that the kernel generates has bytes but a length of 0; an empty one has no byte.
    if len == 0 && matches!(file.read_at(&mut [0], 0), Ok(1)) {
        return Err(wrong("has bytes but no length: copy it to a real file first"));
    }
    Ok(Input { name, len, what: InputKind::File(Arc::new(file)) })
}

impl LoadRun {
    fn run(&self, args: &LoadArgs, report: &mut LoadReport) -> Result<()> {
        report.device = Some(self.device.name().to_owned());
        // Memory that is being pinned would slow the uploads. `note` tells of an error.
        let _ = self.pool.wait_pinned(Some(REST_TIMEOUT));
        for source in &self.sources {
            let result = self.load(args, source, report);
            progress("");
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
        let before = (report.upload, report.download);
        let what = match &source.what {
            InputKind::File(file) => {
                let device = &self.device;
                let memory = device.alloc(len).map_err(|e| {
                    let (name, why) = (device.name(), of_device(device, &e));
                    source.failed(format!("{name} has no room for its {}: {why}", amount(len)))
                })?;
                report.upload.add(source.len, || self.upload(source, file, &memory))?;
                if args.verify {
                    let place = memory.slice(..).map_err(|e| source.error(&e))?;
                    self.verify(
                        source,
                        &[Part { place, at: 0, from: 0, file: PartFile::Whole(file) }],
                        report,
                    )?;
                }
                String::new()
            }
            InputKind::Tensors(checkpoint) => {
                let tensors = report.upload.add(source.len, || self.upload_tensors(source, checkpoint))?;
                if args.verify {
                    self.verify_tensors(source, &tensors, report)?;
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
    fn upload(&self, source: &Input, file: &Arc<File>, memory: &DeviceSlice) -> Result<()> {
        let from = FileSource::new(file.clone(), source.name.clone());
        let from = from.and_then(|from| from.range(0..source.len)).map_err(|e| source.error(&e))?;
        let transfer = self.copier.upload(from, memory).map_err(|e| source.error(&e.error))?;
        self.watched(source, transfer, "up")?;
        Ok(())
    }

    /// Waits for a transfer, and shows how far it is.
    fn watched<T: Send + Sync + 'static>(
        &self,
        source: &Input,
        mut transfer: Transfer<T>,
        what: &str,
    ) -> Result<T> {
        loop {
            source.show(transfer.progress().done, what);
            match transfer.wait_timeout(PROGRESS_INTERVAL) {
                Ok(over) => return over.map_err(|e| source.error(&e.error)),
                Err(refused) => match refused.buffer {
                    Some(on) => transfer = on,
                    None => return Err(source.error(&refused.error)),
                },
            }
        }
    }

    /// Downloads all parts, reads them again from their files, and compares the checksums.
    fn verify(&self, source: &Input, parts: &[Part<'_>], report: &mut LoadReport) -> Result<()> {
        let sums = report.download.add(source.len, || self.download(source, parts))?;
        source.show(source.len, "back, comparing");
        spread(self.copier.stats().threads, sums.len(), |number| {
            let ChunkSum { offset, len, sum } = sums[number];
            let part = &parts[parts.partition_point(|part| part.at <= offset) - 1];
            let from = part.from + (offset - part.at);
            let mut bytes = super::zeros(len).map_err(|e| source.error(&e))?;
            let (name, read) = match part.file {
                PartFile::Whole(file) => (source.name.clone(), file.read_exact_at(&mut bytes, from)),
                PartFile::Tensor(_, path) => {
                    let read = File::open(path).and_then(|file| file.read_exact_at(&mut bytes, from));
                    (path.display().to_string(), read)
                }
            };
            read.map_err(|e| {
                let why = match e.kind() {
                    io::ErrorKind::UnexpectedEof => "it has become shorter".to_owned(),
                    _ => e.to_string(),
                };
                CliError::Failed(format!("{name}: cannot be read at offset {from}: {why}"))
            })?;
            if sum == xxh3_128(&bytes) {
                return Ok(());
            }
            let what = match part.file {
                PartFile::Tensor(name, _) => format!(" in tensor {name:?}: its bytes"),
                PartFile::Whole(_) => format!(" at offset {from}: bytes {from}..{}", from + len as u64),
            };
            Err(source.mismatch(format!("{what} did not come back as they are in the file")))
        })
    }

    /// Downloads all parts. Returns the checksums of their pieces, of which each is one chunk's.
    fn download(&self, source: &Input, parts: &[Part<'_>]) -> Result<Vec<ChunkSum>> {
        let pieces: Vec<_> = parts.iter().map(|part| CopyRange::new(part.at, part.place.clone())).collect();
        let sink = ChecksumSink { name: source.name.clone(), sums: Mutex::default() };
        let transfer = self.copier.download(pieces, sink).map_err(|e| source.error(&e.error))?;
        let sums = self.watched(source, transfer, "back")?.sums;
        let mut sums = sums.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        sums.sort_unstable_by_key(|sum| sum.offset);
        let came: u64 = sums.iter().map(|sum| sum.len as u64).sum();
        let is_twice = |pair: &[ChunkSum]| pair[0].offset + pair[0].len as u64 > pair[1].offset;
        // As many bytes, and none of them twice, are all of them.
        if came != source.len || sums.windows(2).any(is_twice) {
            return Err(source.mismatch(format!(": {came} bytes came back of {}", source.len)));
        }
        Ok(sums)
    }

    fn verify_tensors(
        &self,
        source: &Input,
        tensors: &[DeviceTensor],
        report: &mut LoadReport,
    ) -> Result<()> {
        let mut parts = Vec::new();
        for tensor in tensors {
            if let Some(place) = tensor.slice() {
                let (place, from) = (place.clone(), tensor.range().start);
                let at = parts.last().map_or(0, |part: &Part<'_>| part.at + part.place.len() as u64 + 1);
                parts.push(Part { place, at, from, file: PartFile::Tensor(tensor.name(), tensor.file()) });
            }
        }
        self.verify(source, &parts, report)
    }

    /// Loads a checkpoint's tensors into device memory.
    fn upload_tensors(&self, source: &Input, checkpoint: &Checkpoint) -> Result<Vec<DeviceTensor>> {
        let loading = checkpoint.loader(&self.copier).start().map_err(|e| source.error(&e))?;
        let mut tensors = Vec::new();
        tensors
            .try_reserve_exact(loading.left())
            .map_err(|e| source.failed(format!("no memory for a list of {} tensors: {e}", loading.left())))?;
        let (mut done, mut shown) = (0, Instant::now());
        for tensor in loading.blocking() {
            let tensor = tensor.map_err(|e| source.error(&e))?;
            done += tensor.bytes();
            if shown.elapsed() > PROGRESS_INTERVAL {
                source.show(done, "up");
                shown = Instant::now();
            }
            tensors.push(tensor);
        }
        Ok(tensors)
    }

    /// The pool's statistics at the end, with one warning if it is not all pinned, or made.
    fn note(&self) -> PoolStats {
        // Memory may still be being pinned, and the last copies' buffers may still be on their way
        // back. After an error one may stay in flight, so the wait has a deadline.
        let pinning = self.pool.wait_pinned(Some(REST_TIMEOUT));
        let (mut stats, deadline) = (self.pool.stats(), Instant::now() + REST_TIMEOUT);
        while stats.in_flight_bytes + stats.checked_out_bytes > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
            stats = self.pool.stats();
        }
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

impl Input {
    /// Shows how far a pass over the input is.
    fn show(&self, done: u64, what: &str) {
        let name = clean(&self.name, NAME);
        progress(&format!("{name}: {} of {} {what}", Amount(done), Amount(self.len)));
    }

    fn failed(&self, why: impl std::fmt::Display) -> CliError {
        CliError::Failed(format!("{}: {why}", self.name))
    }

    fn mismatch(&self, what: impl std::fmt::Display) -> CliError {
        CliError::Mismatch(format!("{}: mismatch{what}", self.name))
    }

    /// An error of the library, with the file's name added where the error does not contain it.
    fn error(&self, error: &Error) -> CliError {
        let text = error.to_string();
        if text.contains(&*clean(&self.name, NAME)) { CliError::Failed(text) } else { self.failed(text) }
    }
}

/// A part of the device's memory, and where its bytes are in a file.
struct Part<'a> {
    place: DeviceSlice,
    /// The offset of its first byte in the sink. No part begins where another ends, so that no
    /// bytes of two parts come together.
    at: u64,
    /// The offset of its first byte in the file.
    from: u64,
    file: PartFile<'a>,
}

#[derive(Clone, Copy)]
enum PartFile<'a> {
    Whole(&'a File),
    /// The tensor's name, and the path of its file.
    Tensor(&'a str, &'a Path),
}

/// The checksum of what a chunk had of one part.
#[derive(Clone, Copy, Debug)]
struct ChunkSum {
    offset: u64,
    len: usize,
    sum: u128,
}

/// A sink that keeps the checksums of what each chunk has of each part, and drops the bytes.
struct ChecksumSink {
    name: String,
    sums: Mutex<Vec<ChunkSum>>,
}

impl Sink for ChecksumSink {
    fn name(&self) -> std::borrow::Cow<'_, str> {
        (&*self.name).into()
    }

    fn put(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let sum = ChunkSum { offset, len: bytes.len(), sum: xxh3_128(bytes) };
        self.sums.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(sum);
        Ok(())
    }
}

impl LoadReport {
    fn json(&self) -> Value {
        let stats = &self.pool.unwrap_or_default();
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

    fn text(&self) -> String {
        let mut text: String = self.lines.iter().map(|line| format!("{line}\n")).collect();
        if let Some(PoolStats { pinned_bytes, checkouts, waits, .. }) = self.pool {
            let pinned = amount(pinned_bytes);
            text += &format!("pool: {pinned} pinned, {checkouts} checkouts, {waits} of them waited for\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A wrong byte on the device is found, in its tensor, and a file that became shorter.
    #[test]
    fn a_wrong_byte_on_the_device_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let header = r#"{"a":{"dtype":"U8","shape":[70001],"data_offsets":[0,70001]},
                         "b":{"dtype":"U8","shape":[300000],"data_offsets":[70001,370001]}}"#;
        let bytes = (0..370_001).map(|i| (i / 251 + i % 251) as u8);
        let front = (header.len() as u64).to_le_bytes().into_iter().chain(header.bytes());
        std::fs::write(&path, front.chain(bytes).collect::<Vec<u8>>()).unwrap();

        let device = Device::open("host").unwrap();
        let pool = Pool::builder(&device).capacity(8 << 20).unpinned(pinpool::Unpinned::Allow);
        let pool = pool.build().unwrap();
        let copier = Copier::builder(&pool, &device).chunk(64 << 10).build().unwrap();
        let run = LoadRun { sources: Vec::new(), device, pool, copier };
        let source = open(&path).unwrap();
        let InputKind::Tensors(checkpoint) = &source.what else { panic!("it is a checkpoint") };
        let loaded = run.upload_tensors(&source, checkpoint).unwrap();
        let verify = || run.verify_tensors(&source, &loaded, &mut LoadReport::default());
        verify().unwrap();
        for tensor in &loaded {
            let (all, len) = (tensor.slice().unwrap(), tensor.bytes() as usize);
            for place in [0, len / 2, len - 1] {
                let place = all.slice(place..=place).unwrap();
                let right = run.copier.download(&place, Vec::new()).unwrap().wait().unwrap();
                run.copier.upload_slice(&[!right[0]], &place).unwrap();
                let (error, tensor) = (verify().unwrap_err(), format!("tensor {:?}", tensor.name()));
                assert!(matches!(&error, CliError::Mismatch(text) if text.contains(&tensor)), "{error}");
                run.copier.upload_slice(&right, &place).unwrap();
            }
        }
        verify().unwrap();
        File::options().write(true).open(&path).unwrap().set_len(1000).unwrap();
        let error = verify().unwrap_err().to_string();
        assert!(error.contains("model.safetensors: cannot be read at offset"), "{error}");
    }
}
