//! `pinpool bench`: the speed of the link to a device and of the copier, in one run.
//!
//! All figures move the same number of bytes, up to five times each, in turn. The best counts: the question is what
//! this machine can do, and other programs on it can only make a copy slower. A round of small copies tells how large
//! the copies can be for five rounds in the time that was asked for; rounds that do not fit are left out. A figure is
//! the wall time of the whole call, from before the first byte is touched until the last is in place. The target is
//! overwritten before each copy and compared with the source after it, outside of the measured time; so no figure is
//! printed for a copy that lost bytes.
//!
//! The pinned peak is measured without the copier: eight page-locked buffers hold all bytes, and are copied on one
//! stream or on one stream for each thread, whichever is faster (the host device's streams are threads). The table
//! shows each figure as a ratio to the peak, and to copies in memory by as many threads, which bound each path on which
//! the CPU touches the bytes.
//!
//! The pageable path is the driver's own copy of ordinary memory; the copier copies the same memory. The pieces are
//! scattered over that memory, and one call of the copier uploads them.
//!
//! [`prepare`] makes a [`BenchSetup`], [`BenchSetup::measure`] runs the rounds, and `table` and `json` print them.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use pinpool::{
    Copier, Device, DeviceBuffer, DeviceSlice, Error, InFlight, PinnedBuf, Request, Stream, Unpinned,
};
use serde_json::{Value, json};

use super::amount::amount;
use super::args::{BackingArg, BenchArgs};
use super::spread::{each, spread};
use super::{CliError, Result, doctor, of_device, sample};

/// The copies of each figure, of which the best counts.
const ROUNDS: u32 = 5;
/// Bytes of a copy, where memory allows it.
const USUAL_SIZE: usize = 1 << 30;
/// The smallest copy: a smaller one does not show a link's speed.
const LEAST_SIZE: usize = 16 << 20;
/// Page-locked buffers, which together hold all bytes of a copy.
const BUFFERS: usize = 8;
/// Bytes of a piece.
const PIECE: usize = 16 << 10;
/// The largest page size of a system: a pool's capacity is in whole pages.
const LARGEST_PAGE: usize = 64 << 10;
/// The most page-locked memory of the copier.
const COPIER_SHARE: usize = 256 << 20;
/// All memory that the command uses, in sizes of a copy: source, target, page-locked buffers, the copier's memory,
/// and on the host device the device's memory.
const SIZES_TAKEN: usize = 5;

/// Runs the command.
pub fn run(args: &BenchArgs) -> ExitCode {
    let (mut text, mut object) = (String::new(), object(None));
    let result = super::open_device(&args.device).and_then(|device| {
        let measured = measured(args, &device);
        let measured = measured.map(|told| (text, object) = told);
        // A device that does not close leaves the figures valid: they were measured before.
        measured.and(super::close(device))
    });
    super::exit(args.json.then_some(object), &text, result)
}

/// Makes everything and measures it. Returns the table and the object.
fn measured(args: &BenchArgs, device: &Device) -> Result<(String, Value)> {
    let bar = super::progress_bar();
    if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {pos} of {len}, {elapsed}") {
        bar.set_style(style);
    }
    bar.set_message("preparing");
    let over = args.size.is_none().then(|| Instant::now() + Duration::from_secs_f64(args.seconds));
    let told = prepare(args, device, over).and_then(|mut setup| {
        let (speeds, rounds) = setup.measure(over, &bar)?;
        Ok((setup.table(&speeds, rounds), object(Some((&setup, &speeds, rounds)))))
    });
    bar.finish_and_clear();
    told
}

/// Everything that the measurements share.
struct BenchSetup {
    device: Device,
    threads: usize,
    size: usize,
    source: Arc<Vec<u8>>,
    target: Vec<u8>,
    memory: DeviceBuffer,
    bufs: Vec<PinnedBuf>,
    streams: Vec<Stream>,
    copier: Copier,
    unpinned: bool,
}

fn prepare(args: &BenchArgs, device: &Device, over: Option<Instant>) -> Result<BenchSetup> {
    let threads = super::threads(args.threads);
    // Each buffer is a whole number of pieces.
    let whole = |bytes: usize| (bytes / (BUFFERS * PIECE)).max(1) * (BUFFERS * PIECE);
    let set_up = |size| {
        set_up(device, args.backing, threads, size).map_err(|error| {
            let (name, size, why) = (device.name(), amount(size), of_device(device, &error));
            // Smaller copies, or fewer threads, may do without what is short.
            let text = if error.is_retryable() {
                format!("{name}: no room to measure with copies of {size}: {why}; name less by --size or --threads")
            } else {
                format!("{name}: {why}")
            };
            (error.is_retryable(), CliError::Failed(text))
        })
    };
    let Some(over) = over else {
        let size = whole(args.size.unwrap_or(LEAST_SIZE));
        // Where the control group's limit is in the way, the kernel would end a process of the group.
        return match doctor::left() {
            Some(left) if left / (SIZES_TAKEN as u64) < size as u64 => Err(no_room(left as usize, size)),
            _ => set_up(size).map_err(|(_, error)| error),
        };
    };
    let most = affordable(doctor::left()).map_err(|room| no_room(room, LEAST_SIZE))?;
    let start = Instant::now();
    let mut small = set_up(LEAST_SIZE).map_err(|(_, error)| error)?;
    let made = Instant::now();
    small.measure(Some(made), &ProgressBar::hidden())?;
    let takes = (made - start) + made.elapsed() * ROUNDS;
    let fit = over.saturating_duration_since(Instant::now()).as_secs_f64() / takes.as_secs_f64().max(1e-9);
    let mut size = whole(most.min((LEAST_SIZE as f64 * fit) as usize));
    while size > LEAST_SIZE {
        match set_up(size) {
            Ok(setup) => return Ok(setup),
            // Other programs use the GPU's memory, or a limit holds that no file shows.
            Err((true, _)) => size = whole(size / 2),
            Err((false, error)) => return Err(error),
        }
    }
    Ok(small)
}

fn no_room(left: usize, size: usize) -> CliError {
    let (left, need, size) = (amount(left), amount(size.saturating_mul(SIZES_TAKEN)), amount(size));
    CliError::Failed(format!(
        "no room to measure: {left} of memory are left, and copies of {size} take {need}; name less by --size"
    ))
}

/// Bytes of a copy such that all memory that the command uses is half of the memory that is left, or what the smallest
/// copies need. `Err`: the memory that is left, which is less than the smallest copies need.
fn affordable(left: Option<u64>) -> Result<usize, usize> {
    let Some(room) = left else { return Ok(USUAL_SIZE) };
    match usize::try_from(room).unwrap_or(usize::MAX) {
        room if room < LEAST_SIZE * SIZES_TAKEN => Err(room),
        room => Ok((room / (2 * SIZES_TAKEN)).clamp(LEAST_SIZE, USUAL_SIZE)),
    }
}

fn set_up(
    device: &Device,
    backing: Option<BackingArg>,
    threads: usize,
    size: usize,
) -> Result<BenchSetup, Error> {
    let memory = device.alloc(size)?;
    let link =
        (0..BUFFERS).map(|_| pinned(device, backing, size / BUFFERS)).collect::<Result<Vec<_>, _>>()?;
    let share = COPIER_SHARE.min(size.max(LEAST_SIZE));
    let pool = super::pool(device, backing).capacity(share).initial(share);
    let pool = pool.unpinned(Unpinned::Allow).build()?;
    pool.wait_pinned(None)?;
    let copier = Copier::builder(&pool, device).threads(threads).share(share).build()?;
    let streams = (0..threads.min(BUFFERS)).map(|_| device.stream()).collect::<Result<_, _>>()?;
    let zeros = |len: usize| {
        let mut bytes = super::room(len)?;
        bytes.resize(len, 0);
        Ok::<_, Error>(bytes)
    };
    let (mut source, target) = (zeros(size)?, zeros(size)?);
    each(&mut source, threads, |start, part| sample::fill(part, start as u64));
    let unpinned = pool.stats().unpinned_bytes > 0 || link.iter().any(|(_, pinned)| !pinned);
    let (device, source) = (device.clone(), Arc::new(source));
    let bufs = link.into_iter().map(|(buf, _)| buf).collect();
    Ok(BenchSetup { device, threads, size, source, target, memory, bufs, streams, copier, unpinned })
}

/// A buffer, and whether it is page-locked. It has a pool of its own, since a buffer lies in one extent, and the
/// longest extent that a device can pin, and so the number of buffers in it, differs between devices.
fn pinned(device: &Device, backing: Option<BackingArg>, len: usize) -> Result<(PinnedBuf, bool), Error> {
    let bytes = capacity(len)?;
    let pool = super::pool(device, backing).capacity(bytes).initial(bytes).extent(bytes);
    let pool = pool.unpinned(Unpinned::Allow).build()?;
    let pinning = pool.wait_pinned(None)?;
    // No other thread uses this pool: a checkout that fails now would always fail.
    let buf = pool.try_checkout(len).map_err(|error| match error {
        Error::Exhausted { .. } => pinning.error.unwrap_or(error),
        error => error,
    })?;
    Ok((buf, pool.stats().unpinned_bytes == 0))
}

/// The capacity of a pool for one buffer: the length of its segment, and a page at the edge.
fn capacity(len: usize) -> Result<usize, Error> {
    let segment = Request::new(len).segment_bytes()?;
    let bytes =
        segment.checked_add(LARGEST_PAGE).and_then(|bytes| bytes.checked_next_multiple_of(LARGEST_PAGE));
    bytes.ok_or_else(|| Error::OutOfMemory { wanted: len, text: "more than the address space".into() })
}

/// An order of a vector's pieces of 16 KiB in which neighbours come from far apart, and each piece comes once.
struct Scattered {
    pieces: usize,
    /// Coprime to the number of pieces: its multiples reach all of them.
    step: usize,
}

impl Scattered {
    /// For a vector of `bytes` bytes.
    fn new(bytes: usize) -> Self {
        let pieces = bytes / PIECE;
        let coprime = |step: &usize| gcd(*step, pieces) == 1;
        // Near the golden section of the number of pieces: neighbours come from far apart.
        let step = (pieces * 5 / 8 + 1..).find(coprime).unwrap_or(1);
        Self { pieces, step }
    }

    /// The offset in the vector of the piece that is placed at position `piece`.
    fn from(&self, piece: usize) -> usize {
        piece * self.step % self.pieces * PIECE
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Figure {
    /// Page-locked memory, on one stream or several.
    LinkUp,
    LinkDown,
    Memcpy,
    PageableUp,
    SliceUp,
    SliceDown,
    Pieces,
}
use Figure::{LinkDown, LinkUp, Memcpy, PageableUp, Pieces, SliceDown, SliceUp};

/// Each figure with its key in the object, its line in the table, and its name in messages, in the order of a round.
const FIGURES: [(Figure, &str, &str, &str); 7] = [
    (LinkUp, "pinned_peak_upload", "pinned peak, to the device", "pinned upload"),
    (LinkDown, "pinned_peak_download", "pinned peak, from the device", "pinned download"),
    (Memcpy, "memcpy", "copies in memory, by as many", "copy in memory"),
    (PageableUp, "pageable_upload", "pageable memory to the device", "pageable upload"),
    (SliceUp, "copier_upload", "copier, to the device", "copier's upload"),
    (SliceDown, "copier_download", "copier, from the device", "copier's download"),
    (Pieces, "pieces", "scattered pieces of 16 KiB", "scattered pieces"),
];

/// GB/s of 10^9 bytes, in the order of [`FIGURES`].
type Speeds = [f64; FIGURES.len()];

impl Figure {
    /// Whether the copy goes to the device's memory; else it goes to the host's.
    fn is_upload(self) -> bool {
        matches!(self, LinkUp | PageableUp | SliceUp | Pieces)
    }

    fn is_link(self) -> bool {
        matches!(self, LinkUp | LinkDown)
    }
}

impl BenchSetup {
    /// The speeds, and the rounds that there was time for: at least one, all of them where the time has no end.
    fn measure(&mut self, over: Option<Instant>, bar: &ProgressBar) -> Result<(Speeds, u32)> {
        let mut best = [Duration::MAX; FIGURES.len()];
        bar.set_length(u64::from(ROUNDS) * FIGURES.len() as u64);
        let (mut rounds, start) = (0, Instant::now());
        // Round by round, so that other load on the machine slows all figures alike.
        while rounds == 0
            || rounds < ROUNDS && over.is_none_or(|over| Instant::now() + start.elapsed() / rounds <= over)
        {
            rounds += 1;
            for ((figure, .., name), best) in FIGURES.iter().zip(&mut best) {
                bar.set_message(*name);
                bar.inc(1);
                *best = (*best).min(self.once(*figure, 1)?);
                if figure.is_link() && self.streams.len() > 1 {
                    *best = (*best).min(self.once(*figure, self.streams.len())?);
                }
            }
        }
        Ok((best.map(|time| self.size as f64 / time.as_secs_f64().max(1e-9) / 1e9), rounds))
    }

    fn failed(&self, error: &Error) -> CliError {
        CliError::Failed(format!("{}: {}", self.device.name(), of_device(&self.device, error)))
    }

    /// Measures one copy. The target is overwritten before it and compared after it.
    fn once(&mut self, figure: Figure, streams: usize) -> Result<Duration> {
        self.prepare(figure).map_err(|e| self.failed(&e))?;
        let taken = self.run(figure, streams).map_err(|e| self.failed(&e))?;
        self.compare(figure)?;
        Ok(taken)
    }

    /// Makes the copy. Returns the time that it took.
    fn run(&mut self, figure: Figure, streams: usize) -> Result<Duration, Error> {
        let source = self.source.clone();
        let pieces = if figure == Pieces { self.pieces(&source)? } else { Vec::new() };
        let since = Instant::now();
        match figure {
            Memcpy => each(&mut self.target, self.threads, |start, part| {
                part.copy_from_slice(&source[start..start + part.len()]);
            }),
            LinkUp => self.all(streams, |stream, buf, slice| Ok(stream.upload(buf, slice)?))?,
            LinkDown => self.all(streams, |stream, buf, slice| Ok(stream.download(slice, buf)?))?,
            PageableUp => self.streams[0].upload_blocking(&source, &self.memory)?,
            SliceUp => self.copier.upload_slice(&source, &self.memory)?,
            SliceDown => self.copier.download_slice(&self.memory, &mut self.target)?,
            Pieces => self.copier.upload_pieces(&pieces)?.wait()?,
        }
        Ok(since.elapsed())
    }

    /// Pieces scattered over the source, and their targets on the device, one behind the other.
    fn pieces<'a>(&self, source: &'a [u8]) -> Result<Vec<(&'a [u8], DeviceSlice)>, Error> {
        let scattered = Scattered::new(self.size);
        let piece = |number: usize| {
            let (from, to) = (scattered.from(number), number * PIECE);
            Ok((&source[from..from + PIECE], self.memory.slice(to..to + PIECE)?))
        };
        (0..self.size / PIECE).map(piece).collect()
    }

    /// Writes the source's bytes where the copy reads, and zeros where it writes.
    fn prepare(&mut self, figure: Figure) -> Result<(), Error> {
        if figure == LinkUp {
            for (buf, part) in self.bufs.iter_mut().zip(self.source.chunks(self.size / BUFFERS)) {
                buf.clear();
                buf.try_extend_from_slice(part)?;
            }
        }
        if !figure.is_upload() && figure != Memcpy {
            // Device memory may hold the bytes of an earlier figure.
            self.streams[0].upload_blocking(&self.source, &self.memory)?;
        }
        each(&mut self.target, self.threads, |_, part| part.fill(0));
        match figure {
            LinkDown => self.bufs.iter_mut().for_each(|buf| buf.fill(0)),
            figure if figure.is_upload() => self.streams[0].upload_blocking(&self.target, &self.memory)?,
            _ => {}
        }
        Ok(())
    }

    /// Compares the bytes at the target with the source.
    fn compare(&mut self, figure: Figure) -> Result<()> {
        if figure.is_upload() {
            // By plain copies, so that an error of the copier cannot hide itself.
            self.run(LinkDown, 1).map_err(|e| self.failed(&e))?;
        }
        if figure.is_upload() || figure == LinkDown {
            for (part, buf) in self.target.chunks_mut(self.size / BUFFERS).zip(&self.bufs) {
                part.copy_from_slice(buf);
            }
        }
        let scattered = Scattered::new(self.size);
        let compared = spread(self.threads, self.size / PIECE, |piece| {
            let at = piece * PIECE;
            let from = if figure == Pieces { scattered.from(piece) } else { at };
            let same = self.target[at..at + PIECE] == self.source[from..from + PIECE];
            if same { Ok(()) } else { Err(at) }
        });
        let Err(at) = compared else { return Ok(()) };
        let name = FIGURES.iter().find(|(other, ..)| *other == figure).map_or("", |(.., name)| *name);
        Err(CliError::Mismatch(format!("the {name}: mismatch in bytes {at}..{}", at + PIECE)))
    }

    /// Copies all page-locked buffers at once, on `streams` streams.
    fn all(
        &mut self,
        streams: usize,
        copy: impl Fn(&Stream, PinnedBuf, DeviceSlice) -> Result<InFlight<PinnedBuf>, Error>,
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

    fn table(&self, speeds: &Speeds, rounds: u32) -> String {
        let (name, threads, size) = (self.device.name(), self.threads, amount(self.size));
        let mut text = format!("{name}, {threads} threads, copies of {size}, best of {rounds}\n");
        if self.unpinned {
            text += "(the system refused to pin memory, see ulimit -l: what is called pinned here is not)\n";
        }
        text += "\n                                   GB/s   of the pinned peak   of copies in memory\n";
        let [up, down, memcpy, ..] = speeds;
        for ((figure, _, line, _), speed) in FIGURES.iter().zip(speeds) {
            let peak = if matches!(figure, LinkDown | SliceDown) { down } else { up };
            let (over, beside) = (100.0 * speed / peak, 100.0 * speed / memcpy);
            text += &format!("{line:<32}{speed:>7.2}{over:>20.1}%{beside:>21.1}%\n");
        }
        text
    }
}

/// The object of what was measured, null where nothing was.
fn object(measured: Option<(&BenchSetup, &Speeds, u32)>) -> Value {
    let setup = measured.map(|(setup, ..)| setup);
    let mut object = json!({
        "threads": setup.map(|setup| setup.threads),
        "device": setup.map(|setup| setup.device.name()),
        "unpinned": setup.map(|setup| setup.unpinned),
        "size_bytes": setup.map(|setup| setup.size),
        "rounds": measured.map(|(.., rounds)| rounds),
    });
    for (at, (_, key, ..)) in FIGURES.iter().enumerate() {
        // Three decimals: more is noise.
        let speed = measured.map(|(_, speeds, _)| (speeds[at] * 1000.0).round() / 1000.0);
        object[format!("{key}_gb_per_s")] = speed.into();
    }
    object
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
            (None, Ok(USUAL_SIZE)),
            (mib(64 << 10), Ok(USUAL_SIZE)),
            (mib(4000), Ok(400 << 20)),
            (mib(79), Err(79 << 20)),
            (Some(0), Err(0)),
        ] {
            assert_eq!(affordable(left), size, "{left:?}");
        }
        for size in [LEAST_SIZE, 100 << 20, USUAL_SIZE] {
            // The memory that `set_up` uses, as far as it grows with the size.
            let share = COPIER_SHARE.min(size.max(LEAST_SIZE));
            assert!(4 * size + share <= SIZES_TAKEN * size, "{size}");
        }
        // Linux 6.11 to 6.13 pins at most 1 GiB for a GPU in one call. A pool for one buffer stays below that.
        assert!(capacity(USUAL_SIZE / BUFFERS).unwrap() <= 1 << 30);
    }

    #[test]
    fn bytes_that_did_not_arrive_are_no_figure() {
        let device = Device::open("host").unwrap();
        let mut setup = set_up(&device, None, 2, 1 << 20).unwrap();
        for (figure, ..) in FIGURES {
            setup.once(figure, 1).unwrap();
            setup.once(figure, 2).unwrap();
            setup.prepare(figure).unwrap();
            let nothing = setup.compare(figure).unwrap_err();
            assert!(nothing.to_string().contains("mismatch in bytes 0.."), "{figure:?} {nothing}");
        }
        // Half of the bytes; and all pieces, in the wrong places.
        for (figure, len, wrong) in [
            (SliceUp, 1 << 19, "the copier's upload: mismatch in bytes 524288.."),
            (Pieces, 1 << 20, "the scattered pieces: mismatch in bytes 16384.."),
        ] {
            setup.prepare(figure).unwrap();
            setup.copier.upload_slice(&setup.source[..len], &setup.memory).unwrap();
            let error = setup.compare(figure).unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
    }
}
