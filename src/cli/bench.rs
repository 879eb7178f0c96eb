//! `pinpool bench`: what the link to a device gives, and what the pipeline makes of it, in one run.
//!
//! All figures move the same number of bytes, each five times, by turns, of which the best counts: the question is what this
//! machine can do, and whatever else runs on it only takes away from that. A figure is the wall time of the whole call, from
//! before the first byte is touched until the last is there. Each time the target is overwritten before, and compared with
//! what was sent afterwards, outside of the time; so a figure of bytes that did not arrive is never printed.
//!
//! The pinned peak is measured without the pipeline: eight page-locked buffers that hold all of it, on one stream or on one
//! for each thread, whichever is faster (the host device's streams are threads). Then everything is a ratio: to the peak,
//! and to copies in memory by as many threads of our own, which is the limit of whatever the CPU has to touch.
//!
//! The pageable path is what the driver does with ordinary memory by itself; the pipeline is given the same memory. The
//! gathered pieces lie all over it, and go through the copy queue by one call, which has as many threads pack them.

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pinpool::pipeline::Pipeline;
use pinpool::{
    CopyQueue, Device, DeviceBuffer, DeviceSlice, Error, InFlight, PinnedBuf, Pool, QueueOptions, Request,
    Stream, Unpinned,
};
use serde_json::json;

use super::args::Bench;
use super::{Failure, doctor, say};

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
/// The largest page of a system: pools count in whole ones.
const PAGE: usize = 64 << 10;
/// Page-locked memory of the pipeline's at most.
const SHARE: usize = 256 << 20;
/// All memory that is taken, in sizes of a copy: source, target, page-locked buffers, the pipeline's, and on the host device
/// its memory too.
const TIMES: usize = 5;

/// Runs the command.
pub fn run(args: &Bench) -> ExitCode {
    let result = super::open_device(&args.device).and_then(|device| {
        let result = prepare(args, &device).and_then(|mut bench| bench.measure());
        let closed = super::close(device);
        result.map(|report| (report, closed))
    });
    let failed = |failure: &Failure| {
        say(&format!("error: {failure}"));
        failure.exit_code()
    };
    let (report, closed) = match result {
        Ok(measured) => measured,
        Err(failure) => return ExitCode::from(failed(&failure)),
    };
    let mut code = 0;
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
    // What was measured before is as good as ever.
    if let Err(failure) = closed {
        code = failed(&failure);
    }
    ExitCode::from(code)
}

/// GB/s of 10^9 bytes.
#[derive(Debug, Default)]
struct Report {
    device: String,
    threads: usize,
    size: usize,
    /// Whether it would have been larger with more memory.
    small: bool,
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
    /// Whether it would have been larger with more memory.
    small: bool,
    source: Arc<Vec<u8>>,
    target: Vec<u8>,
    memory: DeviceBuffer,
    bufs: Vec<PinnedBuf>,
    streams: Vec<Stream>,
    pipeline: Pipeline,
    queue: CopyQueue,
    unpinned: bool,
}

fn prepare(args: &Bench, device: &Device) -> Result<Bed, Failure> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = args.threads.map_or(cores.min(8), std::num::NonZero::get);
    let most = match args.size {
        Some(size) => size,
        None => affordable(doctor::available()).map_err(|room| {
            let (room, need, least) = (told(room), told(LEAST * TIMES), told(LEAST));
            Failure::Failed(format!(
                "no room to measure: {room} of memory are left, and copies of {least} take {need}; name less by --size"
            ))
        })?,
    };
    // Buffers of whole pages, and pieces of them.
    let whole = |bytes: usize| (bytes / (BUFFERS * PIECE)).max(1) * (BUFFERS * PIECE);
    let mut size = whole(most);
    loop {
        match bed(device, threads, size) {
            Ok(bed) => return Ok(Bed { small: args.size.is_none() && size < SIZE, ..bed }),
            // On a GPU that others use, or under a limit that nobody told us about.
            Err(error) if error.is_retryable() && args.size.is_none() && size / 2 >= LEAST => {
                size = whole(size / 2);
            }
            Err(error) => {
                return Err(Failure::Failed(format!(
                    "{}: no room to measure with copies of {size} bytes: {error}; name less by --size",
                    device.name()
                )));
            }
        }
    }
}

/// Bytes of a copy, where all that is taken comes to half of the memory that is left, or to what the smallest copies need. An
/// error: less than that is left.
fn affordable(left: [Option<u64>; 2]) -> Result<usize, usize> {
    let Some(room) = left.into_iter().flatten().min() else { return Ok(SIZE) };
    match usize::try_from(room).unwrap_or(usize::MAX) {
        room if room < LEAST * TIMES => Err(room),
        room => Ok((room / (2 * TIMES)).clamp(LEAST, SIZE)),
    }
}

fn bed(device: &Device, threads: usize, size: usize) -> Result<Bed, Error> {
    let memory = device.alloc(size)?;
    let link = (0..BUFFERS).map(|_| pinned(device, size / BUFFERS)).collect::<Result<Vec<_>, _>>()?;
    let share = SHARE.min(size.max(LEAST));
    let pool = Pool::builder(device).capacity(share).initial(share).unpinned(Unpinned::Allow).build()?;
    let pipeline = Pipeline::builder(&pool, device).threads(threads).share(share).build()?;
    pool.wait_pinned(None)?;
    let queue = device.copy_queue_with(QueueOptions::new().packers(threads))?;
    let streams = (0..threads.min(BUFFERS)).map(|_| device.stream()).collect::<Result<_, _>>()?;
    let zeros = |len: usize| {
        let mut bytes = super::room(len)?;
        bytes.resize(len, 0);
        Ok::<_, Error>(bytes)
    };
    let (mut source, target) = (zeros(size)?, zeros(size)?);
    fill(&mut source, threads);
    let unpinned = pool.stats().unpinned_bytes > 0 || link.iter().any(|(_, pinned)| !pinned);
    let (device, source) = (device.clone(), Arc::new(source));
    let bufs = link.into_iter().map(|(buf, _)| buf).collect();
    Ok(Bed {
        device,
        threads,
        size,
        small: false,
        source,
        target,
        memory,
        bufs,
        streams,
        pipeline,
        queue,
        unpinned,
    })
}

/// A page-locked buffer, and whether it is: of a pool of its own, since a buffer lies in one extent, and how many of them fit
/// into the longest that a device can pin is the device's to say.
fn pinned(device: &Device, len: usize) -> Result<(PinnedBuf, bool), Error> {
    let bytes = capacity(len)?;
    let pool = Pool::builder(device).capacity(bytes).initial(bytes).extent(bytes);
    let pool = pool.unpinned(Unpinned::Allow).build()?;
    let pinning = pool.wait_pinned(None)?;
    // Nobody else has any of it: what is not there now never will be.
    let buf = pool.try_checkout(len).map_err(|error| match error {
        Error::Exhausted { .. } => pinning.error.unwrap_or(error),
        error => error,
    })?;
    Ok((buf, pool.stats().unpinned_bytes == 0))
}

/// The capacity of a pool for one buffer: what a request is rounded up to, and a page at the edge.
fn capacity(len: usize) -> Result<usize, Error> {
    let segment = Request::new(len).segment_bytes()?;
    let bytes = segment.checked_add(PAGE).and_then(|bytes| bytes.checked_next_multiple_of(PAGE));
    bytes.ok_or_else(|| Error::OutOfMemory { wanted: len, text: "more than the address space".into() })
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

/// Cuts memory into a part of whole pieces for each thread, and calls `work` with where the part starts. A thread that cannot
/// be started is done without.
fn each(bytes: &mut [u8], threads: usize, work: impl Fn(usize, &mut [u8]) + Sync) {
    let part = bytes.len().div_ceil(threads).next_multiple_of(PIECE);
    let count = bytes.len().div_ceil(part);
    let parts = Mutex::new(bytes.chunks_mut(part).enumerate());
    let run = || {
        loop {
            let next = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((number, bytes)) = next else { break };
            work(number * part, bytes);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..count {
            // The others do what one that cannot be started leaves.
            if std::thread::Builder::new().spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
}

/// Pieces of 16 KiB from all over a vector, each once, put one behind the other.
struct Scattered {
    pieces: usize,
    /// Coprime to the number of pieces: multiples of it come to all of them.
    step: usize,
}

impl Scattered {
    /// Of a vector of so many bytes.
    fn new(bytes: usize) -> Self {
        let pieces = bytes / PIECE;
        let coprime = |step: &usize| gcd(*step, pieces) == 1;
        // About the golden section of all: neighbours come from far apart.
        let step = (pieces * 5 / 8 + 1..).find(coprime).unwrap_or(1);
        Self { pieces, step }
    }

    /// Where the bytes at a piece's place come from.
    fn from(&self, piece: usize) -> usize {
        piece * self.step % self.pieces * PIECE
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// What is measured, in the order of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Figure {
    Memcpy,
    /// Page-locked memory, on so many streams.
    LinkUp(usize),
    LinkDown(usize),
    PageableUp,
    PipelineUp,
    PipelineDown,
    Gather,
}

impl Figure {
    fn name(self) -> &'static str {
        match self {
            Self::Memcpy => "the copy in memory",
            Self::LinkUp(_) => "the pinned upload",
            Self::LinkDown(_) => "the pinned download",
            Self::PageableUp => "the pageable upload",
            Self::PipelineUp => "the pipeline's upload",
            Self::PipelineDown => "the pipeline's download",
            Self::Gather => "the gathered pieces",
        }
    }

    /// Whether it changes the device's memory; else it changes the host's.
    fn is_upload(self) -> bool {
        matches!(self, Self::LinkUp(_) | Self::PageableUp | Self::PipelineUp | Self::Gather)
    }
}

impl Bed {
    fn measure(&mut self) -> Result<Report, Failure> {
        let many = self.streams.len();
        let mut figures = vec![Figure::Memcpy, Figure::LinkUp(1), Figure::LinkDown(1)];
        if many > 1 {
            figures.extend([Figure::LinkUp(many), Figure::LinkDown(many)]);
        }
        figures.extend([Figure::PageableUp, Figure::PipelineUp, Figure::PipelineDown, Figure::Gather]);
        let mut times = vec![Duration::MAX; figures.len()];
        // Round by round, so that what else goes on meets all of them alike.
        for _ in 0..ROUNDS {
            for (figure, best) in figures.iter().zip(&mut times) {
                let time = self.once(*figure)?;
                *best = (*best).min(time);
            }
        }
        let speed = |wanted: &dyn Fn(Figure) -> bool| {
            let times = figures.iter().zip(&times).filter(|(figure, _)| wanted(**figure));
            let best = times.map(|(_, time)| *time).min().unwrap_or(Duration::MAX);
            self.size as f64 / best.as_secs_f64().max(1e-9) / 1e9
        };
        Ok(Report {
            device: self.device.name().to_owned(),
            threads: self.threads,
            size: self.size,
            small: self.small,
            unpinned: self.unpinned,
            memcpy: speed(&|figure| figure == Figure::Memcpy),
            peak_up: speed(&|figure| matches!(figure, Figure::LinkUp(_))),
            peak_down: speed(&|figure| matches!(figure, Figure::LinkDown(_))),
            pageable_up: speed(&|figure| figure == Figure::PageableUp),
            pipeline_up: speed(&|figure| figure == Figure::PipelineUp),
            pipeline_down: speed(&|figure| figure == Figure::PipelineDown),
            gather: speed(&|figure| figure == Figure::Gather),
        })
    }

    fn failed(&self, error: &Error) -> Failure {
        Failure::Failed(format!("{}: {error}", self.device.name()))
    }

    /// Measures once. The target is overwritten before, and compared afterwards.
    fn once(&mut self, figure: Figure) -> Result<Duration, Failure> {
        self.prepare(figure).map_err(|e| self.failed(&e))?;
        let taken = self.run(figure).map_err(|e| self.failed(&e))?;
        self.look(figure)?;
        Ok(taken)
    }

    /// How long it takes.
    fn run(&mut self, figure: Figure) -> Result<Duration, Error> {
        let source = self.source.clone();
        let pieces = if figure == Figure::Gather { self.pieces(&source)? } else { Vec::new() };
        let since = Instant::now();
        match figure {
            Figure::Memcpy => each(&mut self.target, self.threads, |start, part| {
                part.copy_from_slice(&source[start..start + part.len()]);
            }),
            Figure::LinkUp(streams) => {
                self.all(streams, |stream, buf, slice| stream.upload(buf, slice).map_err(|e| e.error))?;
            }
            Figure::LinkDown(streams) => {
                self.all(streams, |stream, buf, slice| stream.download(slice, buf).map_err(|e| e.error))?;
            }
            Figure::PageableUp => self.streams[0].upload_blocking(&source, &self.memory)?,
            Figure::PipelineUp => self.pipeline.upload_slice(&source, &self.memory)?,
            Figure::PipelineDown => self.pipeline.download_slice(&self.memory, &mut self.target)?,
            Figure::Gather => self.queue.gather_blocking(self.pipeline.pool(), &pieces)?,
        }
        Ok(since.elapsed())
    }

    /// Pieces from all over the source, and where on the device they go: one behind the other.
    fn pieces<'a>(&self, source: &'a [u8]) -> Result<Vec<(&'a [u8], DeviceSlice)>, Error> {
        let scattered = Scattered::new(self.size);
        let piece = |number: usize| {
            let (from, to) = (scattered.from(number), number * PIECE);
            Ok((&source[from..from + PIECE], self.memory.slice(to..to + PIECE)?))
        };
        (0..self.size / PIECE).map(piece).collect()
    }

    /// Puts what is to be sent where it is sent from, and something else where it goes.
    fn prepare(&mut self, figure: Figure) -> Result<(), Error> {
        let piece = self.size / BUFFERS;
        if matches!(figure, Figure::LinkUp(_)) {
            for (number, buf) in self.bufs.iter_mut().enumerate() {
                buf.clear();
                buf.try_extend_from_slice(&self.source[number * piece..(number + 1) * piece])?;
            }
        }
        if !figure.is_upload() && figure != Figure::Memcpy {
            // Something of an earlier figure's may be there.
            self.streams[0].upload_blocking(&self.source, &self.memory)?;
        }
        each(&mut self.target, self.threads, |_, part| part.fill(0));
        match figure {
            Figure::LinkDown(_) => self.bufs.iter_mut().for_each(|buf| buf.fill(0)),
            figure if figure.is_upload() => self.streams[0].upload_blocking(&self.target, &self.memory)?,
            _ => {}
        }
        Ok(())
    }

    /// Whether what arrived is what was sent.
    fn look(&mut self, figure: Figure) -> Result<(), Failure> {
        if figure.is_upload() {
            // Past the pipeline.
            self.run(Figure::LinkDown(1)).map_err(|e| self.failed(&e))?;
        }
        if figure.is_upload() || matches!(figure, Figure::LinkDown(_)) {
            let piece = self.size / BUFFERS;
            for (part, buf) in self.target.chunks_mut(piece).zip(&self.bufs) {
                part.copy_from_slice(buf);
            }
        }
        let (source, scattered) = (&self.source, Scattered::new(self.size));
        let first = AtomicUsize::new(usize::MAX);
        each(&mut self.target, self.threads, |start, part| {
            for (number, piece) in part.chunks(PIECE).enumerate() {
                let at = start + number * PIECE;
                let from = if figure == Figure::Gather { scattered.from(at / PIECE) } else { at };
                if *piece != source[from..from + piece.len()] {
                    // Relaxed: a number, read when all have ended.
                    first.fetch_min(at, Ordering::Relaxed);
                    return;
                }
            }
        });
        match first.into_inner() {
            usize::MAX => Ok(()),
            at => {
                let (what, end) = (figure.name(), self.size.min(at + PIECE));
                Err(Failure::Mismatch(format!("{what}: mismatch in bytes {at}..{end}")))
            }
        }
    }

    /// Copies all page-locked buffers at once, on so many streams.
    fn all(
        &mut self,
        streams: usize,
        copy: impl Fn(&Stream, PinnedBuf, pinpool::DeviceSlice) -> Result<InFlight<PinnedBuf>, Error>,
    ) -> Result<(), Error> {
        let piece = self.size / BUFFERS;
        let mut flights = Vec::with_capacity(BUFFERS);
        for (number, buf) in std::mem::take(&mut self.bufs).into_iter().enumerate() {
            let slice = self.memory.slice(number * piece..(number + 1) * piece)?;
            flights.push(copy(&self.streams[number % streams], buf, slice)?);
        }
        self.bufs = flights.into_iter().map(InFlight::wait).collect::<Result<_, _>>()?;
        Ok(())
    }
}

fn told(bytes: usize) -> String {
    doctor::size(bytes as u64)
}

impl Report {
    fn table(&self) -> String {
        let Self { device, threads, size, .. } = self;
        let mut text = format!("{device}, {threads} threads, copies of {}, best of {ROUNDS}\n", told(*size));
        if self.small {
            text += &format!("({} would be better, but memory is small)\n", told(SIZE));
        }
        if self.unpinned {
            text += "(the system refused to pin memory, see ulimit -l: what is called pinned here is not)\n";
        }
        text += "\n                                   GB/s   of the pinned peak   of copies in memory\n";
        let rows = [
            ("pinned peak, to the device", self.peak_up, self.peak_up),
            ("pinned peak, from the device", self.peak_down, self.peak_down),
            ("copies in memory, by as many", self.memcpy, self.peak_up),
            ("pageable memory to the device", self.pageable_up, self.peak_up),
            ("pipeline, to the device", self.pipeline_up, self.peak_up),
            ("pipeline, from the device", self.pipeline_down, self.peak_down),
            ("pieces of 16 KiB, gathered", self.gather, self.peak_up),
        ];
        for (name, speed, peak) in rows {
            let (over, beside) = (100.0 * speed / peak, 100.0 * speed / self.memcpy);
            text += &format!("{name:<32}{speed:>7.2}{over:>20.1}%{beside:>21.1}%\n");
        }
        text
    }

    fn json(&self) -> String {
        // Three decimals: more is noise.
        let short = |speed: f64| (speed * 1000.0).round() / 1000.0;
        super::json_line(&json!({
            "pinned_peak_upload_gb_per_s": short(self.peak_up),
            "pinned_peak_download_gb_per_s": short(self.peak_down),
            "pageable_upload_gb_per_s": short(self.pageable_up),
            "memcpy_gb_per_s": short(self.memcpy),
            "pipeline_upload_gb_per_s": short(self.pipeline_up),
            "pipeline_download_gb_per_s": short(self.pipeline_down),
            "gather_gb_per_s": short(self.gather),
            "threads": self.threads,
            "device": self.device,
            "unpinned": self.unpinned,
            "size_bytes": self.size,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattered_pieces_are_each_taken_once_and_from_far_apart() {
        for pieces in [1, 2, 3, 8, 64, 1000, 4096] {
            let scattered = Scattered::new(pieces * PIECE);
            let mut from: Vec<usize> = (0..pieces).map(|piece| scattered.from(piece)).collect();
            if pieces > 3 {
                assert!(from.windows(2).all(|pair| pair[0] + PIECE != pair[1]), "{pieces}");
            }
            from.sort_unstable();
            assert!(from.iter().enumerate().all(|(place, from)| *from == place * PIECE), "{pieces}");
        }
    }

    #[test]
    fn half_of_what_is_left_is_taken_at_most() {
        let mib = |n: u64| Some(n << 20);
        for (left, size) in [
            ([None, None], Ok(SIZE)),
            ([mib(64 << 10), None], Ok(SIZE)),
            // In a container the system's figure is the machine's.
            ([mib(64 << 10), mib(4000)], Ok(400 << 20)),
            ([mib(4000), mib(64 << 10)], Ok(400 << 20)),
            ([None, mib(4000)], Ok(400 << 20)),
            ([mib(80), None], Ok(LEAST)),
            ([mib(64 << 10), mib(79)], Err(79 << 20)),
            ([mib(64 << 10), Some(0)], Err(0)),
        ] {
            assert_eq!(affordable(left), size, "{left:?}");
        }
        for size in [LEAST, 100 << 20, SIZE] {
            // What `bed` takes, as far as it grows with the size.
            let share = SHARE.min(size.max(LEAST));
            assert!(4 * size + share <= TIMES * size, "{size}");
        }
    }

    #[test]
    fn a_pool_for_one_buffer_has_it() {
        let device = Device::open("host").unwrap();
        let sizes = [1, 5, 31, 37, 63, 64, 77, 136, 152, 255, 256, 257, 300, 1000, 2080];
        for len in sizes.map(|pieces| pieces * PIECE) {
            let (buf, _) = pinned(&device, len).unwrap();
            assert!(buf.capacity() >= len);
        }
        // Linux 6.11 to 6.13 pins a GiB for a GPU at once: of the default size an extent of that has seven with their edges.
        assert!(capacity(SIZE / BUFFERS).unwrap() <= 1 << 30);
        assert!(capacity(isize::MAX as usize).is_err());
    }

    #[test]
    fn bytes_that_did_not_arrive_are_no_figure() {
        let device = Device::open("host").unwrap();
        let mut bed = bed(&device, 2, 1 << 20).unwrap();
        let figures = [Figure::LinkUp(2), Figure::PageableUp, Figure::PipelineUp, Figure::Gather];
        for figure in figures.into_iter().chain([Figure::Memcpy, Figure::LinkDown(1), Figure::PipelineDown]) {
            bed.once(figure).unwrap();
            bed.prepare(figure).unwrap();
            let nothing = bed.look(figure).unwrap_err();
            assert!(nothing.to_string().contains("mismatch in bytes 0.."), "{figure:?} {nothing}");
        }
        // A part of it.
        bed.prepare(Figure::PipelineUp).unwrap();
        bed.pipeline.upload_slice(&bed.source[..1 << 19], &bed.memory).unwrap();
        let partly = bed.look(Figure::PipelineUp).unwrap_err();
        // All pieces, each in a wrong place.
        bed.prepare(Figure::Gather).unwrap();
        bed.pipeline.upload_slice(&bed.source, &bed.memory).unwrap();
        let mixed = bed.look(Figure::Gather).unwrap_err();
        assert!(mixed.to_string().contains("the gathered pieces: mismatch in bytes 16384.."), "{mixed}");
        assert!(partly.to_string().contains("the pipeline's upload: mismatch in bytes 524288.."), "{partly}");
    }
}
