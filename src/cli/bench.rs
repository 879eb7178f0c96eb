//! `pinpool bench`: what the link to a device gives, and what the pipeline makes of it, in one run.
//!
//! All figures move the same number of bytes, each five times, of which the best counts: the question is what this machine
//! can do, and whatever else runs on it only takes away from that. Before each of them its target is overwritten, and
//! afterwards compared with what was sent, outside of the time; so a figure of bytes that did not arrive is never printed.
//!
//! The pinned peak is measured without the pipeline: eight page-locked buffers that hold all of it, on one stream or on one
//! for each thread, whichever is faster (the host device's streams are threads). Then everything is a ratio: to the peak,
//! or, for the peak of a device that is the CPU itself, to copies in memory by threads of our own.

use std::borrow::Cow;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pinpool::pipeline::{Fill, Pipeline, Source};
use pinpool::{Device, DeviceBuffer, Error, InFlight, PinnedBuf, Pool, Stream, Unpinned};
use serde_json::json;

use super::args::Bench;
use super::{Failure, say};

/// Each figure is the best of so many.
const ROUNDS: usize = 5;
/// Bytes of a copy, where memory has room for them.
const SIZE: usize = 1 << 30;
/// Less says nothing about a link.
const LEAST: usize = 16 << 20;
/// Page-locked buffers that hold all of it together.
const BUFFERS: usize = 8;
/// What is gathered: pieces of so many bytes.
const PIECE: usize = 16 << 10;
const PAGE: usize = 4096;
/// Page-locked memory of the pipeline's at most.
const SHARE: usize = 256 << 20;

/// Runs the command.
pub fn run(args: &Bench) -> ExitCode {
    let result = prepare(args).and_then(|mut bench| bench.measure());
    let (report, mut code) = match result {
        Ok(report) => (report, 0),
        Err(failure) => {
            say(&format!("error: {failure}"));
            return ExitCode::from(failure.exit_code());
        }
    };
    let mut text = report.table();
    if args.json {
        text += &report.json();
        text.push('\n');
    }
    let mut out = io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // A closed pipe: nobody reads it, and the exit status tells the rest.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            say(&format!("error: the result cannot be written: {error}"));
            code = super::EXIT_FAILED;
        }
        _ => {}
    }
    ExitCode::from(code)
}

/// GB/s of 10^9 bytes.
#[derive(Debug, Default)]
struct Report {
    device: String,
    threads: usize,
    size: usize,
    asked: usize,
    unpinned: bool,
    memcpy: f64,
    peak_up: f64,
    peak_down: f64,
    pageable_up: f64,
    pipeline_up: f64,
    pipeline_down: f64,
    gather: f64,
}

/// Everything that the measurements share.
struct Bed {
    device: Device,
    threads: usize,
    size: usize,
    asked: usize,
    source: Arc<Vec<u8>>,
    target: Vec<u8>,
    memory: DeviceBuffer,
    bufs: Vec<PinnedBuf>,
    streams: Vec<Stream>,
    pipeline: Pipeline,
    unpinned: bool,
}

fn prepare(args: &Bench) -> Result<Bed, Failure> {
    let device = Device::open(&args.device).map_err(|e| Failure::Usage(format!("--device: {e}")))?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = args.threads.map_or(cores.min(8), std::num::NonZero::get);
    let asked = args.size.unwrap_or(SIZE);
    // Source, target, page-locked buffers, and on the host device its memory too: half of what there is, at most.
    let room = available().map_or(asked, |bytes| bytes / 8);
    let most = if args.size.is_some() { asked } else { asked.min(room.max(LEAST)) };
    // Buffers of whole pages, and pieces of them.
    let mut size = (most / (BUFFERS * PIECE)).max(1) * (BUFFERS * PIECE);
    loop {
        match bed(&device, threads, size, asked) {
            Ok(bed) => return Ok(bed),
            // On a GPU that others use, or under a limit that nobody told us about.
            Err(error) if error.is_retryable() && args.size.is_none() && size / 2 >= LEAST => size /= 2,
            Err(error) => {
                return Err(Failure::Failed(format!(
                    "{}: no room to measure with copies of {size} bytes: {error}; name less by --size",
                    device.name()
                )));
            }
        }
    }
}

fn bed(device: &Device, threads: usize, size: usize, asked: usize) -> Result<Bed, Error> {
    let memory = device.alloc(size)?;
    let piece = size / BUFFERS;
    let capacity = BUFFERS * (piece + PAGE);
    let link = Pool::builder(device).capacity(capacity).initial(capacity).extent(capacity);
    let link = link.unpinned(Unpinned::Allow).build()?;
    let bufs: Result<Vec<PinnedBuf>, Error> = (0..BUFFERS).map(|_| link.checkout(piece)).collect();
    let share = SHARE.min(size.max(LEAST));
    let pool = Pool::builder(device).capacity(share).initial(share).unpinned(Unpinned::Allow).build()?;
    let pipeline = Pipeline::builder(&pool, device).threads(threads).share(share).build()?;
    pool.wait_pinned(None)?;
    link.wait_pinned(None)?;
    let streams = (0..threads.min(BUFFERS)).map(|_| device.stream()).collect::<Result<_, _>>()?;
    let vec = |len: usize| {
        let mut vec: Vec<u8> = Vec::new();
        let text =
            |e: std::collections::TryReserveError| Error::OutOfMemory { wanted: len, text: e.to_string() };
        vec.try_reserve_exact(len).map_err(text)?;
        vec.resize(len, 0);
        Ok::<_, Error>(vec)
    };
    let (mut source, target) = (vec(size)?, vec(size)?);
    fill(&mut source, threads);
    let unpinned = link.stats().unpinned_bytes + pool.stats().unpinned_bytes > 0;
    let (device, source, bufs) = (device.clone(), Arc::new(source), bufs?);
    Ok(Bed { device, threads, size, asked, source, target, memory, bufs, streams, pipeline, unpinned })
}

/// Memory that is available, as the system says.
fn available() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: usize = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Bytes of which no two neighbourhoods are alike.
fn fill(bytes: &mut [u8], threads: usize) {
    each(bytes, threads, |start, part| {
        let mut x = start as u64 ^ 0x9e37_79b9_7f4a_7c15;
        for eight in part.chunks_mut(8) {
            // Marsaglia's xorshift, of 64 bits.
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            let n = eight.len();
            eight.copy_from_slice(&x.to_le_bytes()[..n]);
        }
    });
}

/// Cuts memory into a part for each thread, and calls `work` with where the part starts.
fn each(bytes: &mut [u8], threads: usize, work: impl Fn(usize, &mut [u8]) + Sync) {
    let part = bytes.len().div_ceil(threads).next_multiple_of(PAGE);
    std::thread::scope(|scope| {
        let mut parts = bytes.chunks_mut(part).enumerate();
        let own = parts.next();
        for (number, bytes) in parts {
            let work = &work;
            scope.spawn(move || work(number * part, bytes));
        }
        if let Some((_, bytes)) = own {
            work(0, bytes);
        }
    });
}

/// Pieces of 16 KiB from all over a vector, each once, as one source.
struct Scattered {
    bytes: Arc<Vec<u8>>,
    /// Coprime to the number of pieces: multiples of it come to all of them.
    step: usize,
}

impl Scattered {
    fn new(bytes: Arc<Vec<u8>>) -> Self {
        let pieces = bytes.as_slice().len() / PIECE;
        let coprime = |step: &usize| gcd(*step, pieces) == 1;
        // About the golden section of all: neighbours come from far apart.
        let step = (pieces * 5 / 8 + 1..).find(coprime).unwrap_or(1);
        Self { bytes, step }
    }

    /// Where the bytes at a piece's place come from.
    fn from(&self, piece: usize) -> usize {
        piece * self.step % (self.bytes.as_slice().len() / PIECE) * PIECE
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Source for Scattered {
    fn len(&self) -> u64 {
        self.bytes.as_slice().len() as u64
    }

    fn name(&self) -> Cow<'_, str> {
        "scattered pieces".into()
    }

    fn fill(&self, offset: u64, into: &mut Fill<'_>) -> io::Result<()> {
        let mut at = offset as usize;
        while into.remaining() > 0 {
            let (piece, skip) = (at / PIECE, at % PIECE);
            let from = self.from(piece);
            at += into.push(&self.bytes[from + skip..from + PIECE]);
        }
        Ok(())
    }
}

impl Bed {
    fn measure(&mut self) -> Result<Report, Failure> {
        let mut report = Report {
            device: self.device.name().to_owned(),
            threads: self.threads,
            size: self.size,
            asked: self.asked,
            unpinned: self.unpinned,
            ..Report::default()
        };
        report.memcpy = self.memcpy()?;
        (report.peak_up, report.peak_down) = self.link()?;
        report.pageable_up = self.up("the pageable upload", |bed| {
            let stream = &bed.streams[0];
            stream.upload_blocking(&bed.source, &bed.memory)
        })?;
        report.pipeline_up =
            self.up("the pipeline's upload", |bed| bed.pipeline.upload_slice(&bed.source, &bed.memory))?;
        report.gather = self.gather()?;
        report.pipeline_down = self.down()?;
        Ok(report)
    }

    /// The best of the rounds, in GB/s.
    fn best(&mut self, mut round: impl FnMut(&mut Self) -> Result<(), Error>) -> Result<f64, Failure> {
        let mut best = Duration::MAX;
        for _ in 0..ROUNDS {
            let since = Instant::now();
            round(self).map_err(|e| self.failed(&e))?;
            best = best.min(since.elapsed());
        }
        Ok(self.size as f64 / best.as_secs_f64().max(1e-9) / 1e9)
    }

    fn failed(&self, error: &Error) -> Failure {
        Failure::Failed(format!("{}: {error}", self.device.name()))
    }

    fn memcpy(&mut self) -> Result<f64, Failure> {
        let (source, threads) = (self.source.clone(), self.threads);
        let copied = self.best(|bed| {
            each(&mut bed.target, threads, |start, part| {
                part.copy_from_slice(&source[start..start + part.len()])
            });
            Ok(())
        })?;
        self.compare("the copy in memory", |at| at)?;
        Ok(copied)
    }

    /// Page-locked memory, both ways.
    fn link(&mut self) -> Result<(f64, f64), Failure> {
        let piece = self.size / BUFFERS;
        let mut bufs = std::mem::take(&mut self.bufs);
        for (number, buf) in bufs.iter_mut().enumerate() {
            buf.clear();
            buf.try_extend_from_slice(&self.source[number * piece..(number + 1) * piece])
                .map_err(|e| self.failed(&e))?;
        }
        let many = self.streams.len();
        let mut ways = vec![1, many];
        ways.dedup();
        self.wipe()?;
        let mut up = 0.0_f64;
        for &streams in &ways {
            up = up.max(self.best(|bed| {
                bufs = bed.all(std::mem::take(&mut bufs), streams, |stream, buf, slice| {
                    stream.upload(buf, slice).map_err(|e| e.error)
                })?;
                Ok(())
            })?);
        }
        for buf in &mut bufs {
            buf.fill(0);
        }
        let mut down = 0.0_f64;
        for &streams in &ways {
            down = down.max(self.best(|bed| {
                bufs = bed.all(std::mem::take(&mut bufs), streams, |stream, buf, slice| {
                    stream.download(slice, buf).map_err(|e| e.error)
                })?;
                Ok(())
            })?);
        }
        // Both at once: what came back is what went up.
        for (number, buf) in bufs.iter().enumerate() {
            if buf[..] != self.source[number * piece..(number + 1) * piece] {
                return Err(Failure::Mismatch(format!(
                    "page-locked buffer {number} did not come back as it went up"
                )));
            }
        }
        self.bufs = bufs;
        Ok((up, down))
    }

    /// Copies all buffers at once, on so many streams.
    fn all(
        &self,
        bufs: Vec<PinnedBuf>,
        streams: usize,
        copy: impl Fn(&Stream, PinnedBuf, pinpool::DeviceSlice) -> Result<InFlight<PinnedBuf>, Error>,
    ) -> Result<Vec<PinnedBuf>, Error> {
        let piece = self.size / BUFFERS;
        let mut flights = Vec::with_capacity(bufs.len());
        for (number, buf) in bufs.into_iter().enumerate() {
            let slice = self.memory.slice(number * piece..(number + 1) * piece)?;
            flights.push(copy(&self.streams[number % streams], buf, slice)?);
        }
        flights.into_iter().map(InFlight::wait).collect()
    }

    /// Overwrites what is on the device.
    fn wipe(&mut self) -> Result<(), Failure> {
        self.target[..].fill(0);
        self.pipeline.upload_slice(&self.target, &self.memory).map_err(|e| self.failed(&e))
    }

    /// An upload, whose bytes are brought back afterwards.
    fn up(&mut self, what: &str, copy: impl Fn(&Self) -> Result<(), Error>) -> Result<f64, Failure> {
        self.wipe()?;
        let best = self.best(|bed| copy(bed))?;
        self.bring_back()?;
        self.compare(what, |at| at)?;
        Ok(best)
    }

    /// By buffers and a stream, past the pipeline.
    fn bring_back(&mut self) -> Result<(), Failure> {
        let piece = self.size / BUFFERS;
        let bufs = std::mem::take(&mut self.bufs);
        let back = self.all(bufs, 1, |stream, buf, slice| stream.download(slice, buf).map_err(|e| e.error));
        self.bufs = back.map_err(|e| self.failed(&e))?;
        for (part, buf) in self.target.chunks_mut(piece).zip(&self.bufs) {
            part.copy_from_slice(buf);
        }
        Ok(())
    }

    fn gather(&mut self) -> Result<f64, Failure> {
        self.wipe()?;
        let best = self.best(|bed| {
            let scattered = Scattered::new(bed.source.clone());
            bed.pipeline.upload(scattered, &bed.memory)?.wait()?;
            Ok(())
        })?;
        self.bring_back()?;
        let scattered = Scattered::new(self.source.clone());
        self.compare("the gathered pieces", |at| scattered.from(at / PIECE))?;
        Ok(best)
    }

    fn down(&mut self) -> Result<f64, Failure> {
        let stream = &self.streams[0];
        stream.upload_blocking(&self.source, &self.memory).map_err(|e| self.failed(&e))?;
        self.target[..].fill(0);
        let best = self.best(|bed| bed.pipeline.download_slice(&bed.memory, &mut bed.target))?;
        self.compare("the pipeline's download", |at| at)?;
        Ok(best)
    }

    /// Whether each piece of the target is what lies in the source where `from` says.
    fn compare(&self, what: &str, from: impl Fn(usize) -> usize) -> Result<(), Failure> {
        for (number, piece) in self.target.chunks(PIECE).enumerate() {
            let (at, from) = (number * PIECE, from(number * PIECE));
            if piece != &self.source[from..from + piece.len()] {
                return Err(Failure::Mismatch(format!(
                    "{what}: mismatch in bytes {at}..{}",
                    at + piece.len()
                )));
            }
        }
        Ok(())
    }
}

impl Report {
    fn table(&self) -> String {
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        let mut text = format!(
            "{}, {} threads, copies of {:.0} MiB, best of {ROUNDS}\n",
            self.device,
            self.threads,
            mib(self.size)
        );
        if self.size < self.asked {
            text += &format!("({:.0} MiB would be better, but memory is small)\n", mib(self.asked));
        }
        if self.unpinned {
            text += "(the system refused to pin memory, see ulimit -l: what is called pinned here is not)\n";
        }
        text += "\n                                   GB/s   of the pinned peak\n";
        let rows = [
            ("pinned peak, to the device", self.peak_up, self.peak_up),
            ("pinned peak, from the device", self.peak_down, self.peak_down),
            ("copies in memory", self.memcpy, self.peak_up),
            ("pageable memory to the device", self.pageable_up, self.peak_up),
            ("pipeline, to the device", self.pipeline_up, self.peak_up),
            ("pipeline, from the device", self.pipeline_down, self.peak_down),
            ("pieces of 16 KiB, gathered", self.gather, self.peak_up),
        ];
        for (name, speed, peak) in rows {
            text += &format!("{name:<32}{speed:>7.2}{:>20.1}%\n", 100.0 * speed / peak);
        }
        text
    }

    fn json(&self) -> String {
        // Three decimals: more is noise.
        let short = |speed: f64| (speed * 1000.0).round() / 1000.0;
        json!({
            "pinned_peak_upload_gb_per_s": short(self.peak_up),
            "pinned_peak_download_gb_per_s": short(self.peak_down),
            "pageable_upload_gb_per_s": short(self.pageable_up),
            "memcpy_gb_per_s": short(self.memcpy),
            "pipeline_upload_gb_per_s": short(self.pipeline_up),
            "pipeline_download_gb_per_s": short(self.pipeline_down),
            "gather_gb_per_s": short(self.gather),
            "threads": self.threads,
            "device": self.device,
        })
        .to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattered_pieces_are_each_taken_once_and_from_far_apart() {
        for pieces in [1, 2, 3, 8, 64, 1000, 4096] {
            let bytes = Arc::new(vec![0; pieces * PIECE]);
            let scattered = Scattered::new(bytes);
            let mut from: Vec<usize> = (0..pieces).map(|piece| scattered.from(piece)).collect();
            if pieces > 3 {
                assert!(from.windows(2).all(|pair| pair[0] + PIECE != pair[1]), "{pieces}");
            }
            from.sort_unstable();
            assert!(from.iter().enumerate().all(|(place, from)| *from == place * PIECE), "{pieces}");
        }
    }

    #[test]
    fn bytes_that_did_not_arrive_are_no_figure() {
        let device = Device::open("host").unwrap();
        let mut bed = bed(&device, 2, 1 << 20, 1 << 20).unwrap();
        let refused = bed.up("nothing", |_| Ok(())).unwrap_err();
        assert!(refused.to_string().contains("mismatch"), "{refused}");
        let partly =
            bed.up("a part", |bed| bed.streams[0].upload_blocking(&bed.source[..1 << 19], &bed.memory));
        assert!(partly.unwrap_err().to_string().contains("mismatch in bytes 524288.."));
    }
}
