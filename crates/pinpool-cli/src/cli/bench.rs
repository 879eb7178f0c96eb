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
//! [`Copies`] makes and compares one copy, for `pinpool doctor` as well. [`prepare`] makes a [`BenchSetup`], which
//! [`BenchSetup::measure`] runs in rounds.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use pinpool::{Copier, Device, DeviceBuffer, Error, PinnedBuf, Request, Stream, Unpinned};
use serde_json::{Value, json};

use super::amount::amount;
use super::args::{BackingArg, BenchArgs};
use super::spread::{each, spread};
use super::{CliError, Result, doctor, of_device, sample};

/// The copies of each figure, of which the best counts.
pub const ROUNDS: u32 = 5;
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
    let result = super::open_device(&args.device.name).and_then(|device| {
        let measured = measured(args, &device);
        let measured = measured.map(|told| (text, object) = told);
        // A device that does not close leaves the figures valid: they were measured before.
        measured.and(super::close(device))
    });
    super::exit(args.device.json.then_some(object), &text, result)
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

/// Makes what measures copies of the size that was asked for, or of one that five rounds of fit into the time.
fn prepare(args: &BenchArgs, device: &Device, over: Option<Instant>) -> Result<BenchSetup> {
    let threads = super::threads(args.threads);
    // Each buffer is a whole number of pieces.
    let whole = |bytes: usize| (bytes / (BUFFERS * PIECE)).max(1) * (BUFFERS * PIECE);
    let set_up = |size| set_up(device, args.device.backing, threads, size);
    let left = doctor::left().map_or(usize::MAX, |left| usize::try_from(left).unwrap_or(usize::MAX));
    let least = args.size.map_or(LEAST_SIZE, whole);
    // Where the control group's limit is in the way, the kernel would end a process of the group.
    if left / SIZES_TAKEN < least {
        let (left, need, size) = (amount(left), amount(least.saturating_mul(SIZES_TAKEN)), amount(least));
        return Err(CliError::Failed(format!(
            "no room to measure: {left} of memory are left, and copies of {size} take {need}; name less by --size"
        )));
    }
    let failed = |size: usize, error: Error| {
        let (name, size, why) = (device.name(), amount(size), of_device(device, &error));
        // Smaller copies, or fewer threads, may do without what is short.
        CliError::Failed(if error.is_retryable() {
            format!(
                "{name}: no room to measure with copies of {size}: {why}; name less by --size or --threads"
            )
        } else {
            format!("{name}: {why}")
        })
    };
    let mut size = least;
    if let Some(over) = over {
        let start = Instant::now();
        let mut small = set_up(least).map_err(|error| failed(least, error))?;
        let made = Instant::now();
        small.measure(Some(made), &ProgressBar::hidden())?;
        let takes = (made - start) + made.elapsed() * ROUNDS;
        let fit =
            over.saturating_duration_since(Instant::now()).as_secs_f64() / takes.as_secs_f64().max(1e-9);
        size = whole(affordable(left).min((least as f64 * fit) as usize));
        if size <= least {
            return Ok(small);
        }
    }
    loop {
        match set_up(size) {
            // Other programs use the GPU's memory, or a limit holds that no file shows.
            Err(error) if error.is_retryable() && size > least => size = whole(size / 2).max(least),
            made => return made.map_err(|error| failed(size, error)),
        }
    }
}

/// Bytes of a copy such that all memory that the command uses is half of the memory that is left, or what the smallest
/// copies need.
fn affordable(left: usize) -> usize {
    (left / (2 * SIZES_TAKEN)).clamp(LEAST_SIZE, USUAL_SIZE)
}

fn set_up(
    device: &Device,
    backing: Option<BackingArg>,
    threads: usize,
    size: usize,
) -> Result<BenchSetup, Error> {
    let memory = device.alloc(size)?;
    // The longest extent that a device can pin differs between devices, so an extent is as long as one buffer needs.
    let extent = capacity(size / BUFFERS)?;
    let all = extent.saturating_mul(BUFFERS);
    let link = super::pool(device, backing).capacity(all).initial(all).extent(extent);
    let link = link.unpinned(Unpinned::Allow).build()?;
    let pinning = link.wait_pinned(None)?;
    // No other thread uses this pool: a checkout that fails now would always fail.
    let buf = |_| link.try_checkout(size / BUFFERS);
    let bufs = (0..BUFFERS).map(buf).collect::<Result<_, _>>().map_err(|error| match error {
        Error::Exhausted { .. } => pinning.error.unwrap_or(error),
        error => error,
    })?;
    let share = COPIER_SHARE.min(size.max(LEAST_SIZE));
    let pool = super::pool(device, backing).capacity(share).initial(share);
    let pool = pool.unpinned(Unpinned::Allow).build()?;
    pool.wait_pinned(None)?;
    let copier = Copier::builder(&pool, device).threads(threads).share(share).build()?;
    let streams = (0..threads.min(BUFFERS)).map(|_| device.stream()).collect::<Result<_, _>>()?;
    let unpinned = [link.stats(), pool.stats()].iter().any(|stats| stats.unpinned_bytes > 0);
    let copies = Copies::new(memory, bufs, streams, threads, Duration::MAX, 0)?;
    Ok(BenchSetup { device: device.clone(), size, copies, copier, unpinned })
}

/// The length of an extent for one buffer: that of its segment, and a page at the edge.
fn capacity(len: usize) -> Result<usize, Error> {
    let segment = Request::new(len).segment_bytes()?;
    let bytes =
        segment.checked_add(LARGEST_PAGE).and_then(|bytes| bytes.checked_next_multiple_of(LARGEST_PAGE));
    bytes.ok_or_else(|| Error::OutOfMemory { wanted: len, text: "more than the address space".into() })
}

/// Where a copy writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Device,
    /// The page-locked buffers.
    Pinned,
    /// Ordinary memory.
    Memory,
}

/// The same bytes in ordinary memory, in page-locked buffers and on a device, and room for what is copied back.
pub struct Copies {
    source: Arc<Vec<u8>>,
    target: Vec<u8>,
    memory: DeviceBuffer,
    bufs: Vec<PinnedBuf>,
    streams: Vec<Stream>,
    threads: usize,
    /// How long a copy on a stream may take.
    patience: Duration,
}

impl Copies {
    /// The buffers share the device memory equally. `first` is the place of the first byte in the sample's sequence.
    pub fn new(
        memory: DeviceBuffer,
        mut bufs: Vec<PinnedBuf>,
        streams: Vec<Stream>,
        threads: usize,
        patience: Duration,
        first: u64,
    ) -> Result<Self, Error> {
        let zeros = |len: usize| {
            let mut bytes = super::room(len)?;
            bytes.resize(len, 0);
            Ok::<_, Error>(bytes)
        };
        let (mut source, target) = (zeros(memory.len())?, zeros(memory.len())?);
        each(&mut source, threads, |start, part| sample::fill(part, first + start as u64));
        let part = memory.len() / bufs.len();
        for buf in &mut bufs {
            buf.try_resize(part, 0)?;
        }
        Ok(Self { source: Arc::new(source), target, memory, bufs, streams, threads, patience })
    }

    /// Makes one copy. What it writes is overwritten before it and compared after it. Returns the copy's time, and the
    /// offset of the first wrong byte, if there is one. `order` is where each piece of the target comes from.
    pub fn once(
        &mut self,
        to: Target,
        order: impl Fn(usize) -> usize + Sync,
        copy: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<(Duration, Option<usize>), Error> {
        self.fill(to != Target::Device);
        self.plain(Target::Device, 1)?;
        self.fill(to == Target::Device);
        each(&mut self.target, self.threads, |_, part| part.fill(0));
        let since = Instant::now();
        copy(self)?;
        let took = since.elapsed();
        if to == Target::Device {
            // By plain copies, so that an error of the copier cannot hide itself.
            self.fill(false);
            self.plain(Target::Pinned, 1)?;
        }
        if to != Target::Memory {
            for (part, buf) in self.target.chunks_mut(self.memory.len() / self.bufs.len()).zip(&self.bufs) {
                part.copy_from_slice(buf);
            }
        }
        let compared = spread(self.threads, self.target.len().div_ceil(PIECE), |piece| {
            let (at, from) = (piece * PIECE, order(piece) * PIECE);
            let target = &self.target[at..self.target.len().min(at + PIECE)];
            let source = &self.source[from..from + target.len()];
            if target == source {
                return Ok(());
            }
            Err(at + target.iter().zip(source).take_while(|(got, sent)| got == sent).count())
        });
        Ok((took, compared.err()))
    }

    /// Writes the source's bytes, or zeros, into the page-locked buffers.
    fn fill(&mut self, source: bool) {
        let parts = self.source.chunks(self.memory.len() / self.bufs.len());
        for (buf, part) in self.bufs.iter_mut().zip(parts) {
            if source { buf.copy_from_slice(part) } else { buf.fill(0) }
        }
    }

    /// Copies everything without a copier: between the device and all page-locked buffers at once, on so many streams,
    /// or in memory.
    pub fn plain(&mut self, to: Target, streams: usize) -> Result<(), Error> {
        if to == Target::Memory {
            let source = &self.source;
            each(&mut self.target, self.threads, |start, part| {
                part.copy_from_slice(&source[start..start + part.len()]);
            });
            return Ok(());
        }
        let part = self.memory.len() / self.bufs.len();
        let mut flights = Vec::with_capacity(self.bufs.len());
        for (number, buf) in std::mem::take(&mut self.bufs).into_iter().enumerate() {
            let stream = &self.streams[number % streams];
            let slice = self.memory.slice(number * part..(number + 1) * part)?;
            flights.push(match to {
                Target::Device => stream.upload(buf, slice)?,
                _ => stream.download(slice, buf)?,
            });
        }
        let back = flights.into_iter().map(|flight| Ok(flight.wait_timeout(self.patience)?));
        self.bufs = back.collect::<Result<_, Error>>()?;
        Ok(())
    }
}

/// The piece of the source that is placed at position `piece`: neighbours come from far apart, and each comes once.
fn scattered(piece: usize, pieces: usize) -> usize {
    // A prime of which half, rounded down, is a prime too: no number of pieces has a common factor with it, and for none
    // above two are neighbours one piece apart.
    const STEP: usize = 2_147_483_579;
    piece * STEP % pieces
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

/// Each figure with where it writes, its key in the object, its line in the table, and its name in messages, in the
/// order of a round.
const FIGURES: [(Figure, Target, &str, &str, &str); 7] = [
    (LinkUp, Target::Device, "pinned_peak_upload", "pinned peak, to the device", "pinned upload"),
    (LinkDown, Target::Pinned, "pinned_peak_download", "pinned peak, from the device", "pinned download"),
    (Memcpy, Target::Memory, "memcpy", "copies in memory, by as many", "copy in memory"),
    (PageableUp, Target::Device, "pageable_upload", "pageable memory to the device", "pageable upload"),
    (SliceUp, Target::Device, "copier_upload", "copier, to the device", "copier's upload"),
    (SliceDown, Target::Memory, "copier_download", "copier, from the device", "copier's download"),
    (Pieces, Target::Device, "pieces", "scattered pieces of 16 KiB", "scattered pieces"),
];

/// GB/s of 10^9 bytes, in the order of [`FIGURES`].
type Speeds = [f64; FIGURES.len()];

/// Everything that the measurements share.
struct BenchSetup {
    device: Device,
    size: usize,
    copies: Copies,
    copier: Copier,
    unpinned: bool,
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
            for (number, best) in best.iter_mut().enumerate() {
                let (figure, .., name) = FIGURES[number];
                bar.set_message(name);
                bar.inc(1);
                *best = (*best).min(self.once(number, 1)?);
                let streams = self.copies.streams.len();
                if matches!(figure, LinkUp | LinkDown) && streams > 1 {
                    *best = (*best).min(self.once(number, streams)?);
                }
            }
        }
        Ok((best.map(|time| self.size as f64 / time.as_secs_f64().max(1e-9) / 1e9), rounds))
    }

    /// Measures one copy of the figure of this number.
    fn once(&mut self, number: usize, streams: usize) -> Result<Duration> {
        let (figure, to, .., name) = FIGURES[number];
        let (took, wrong) = self.copy(figure, to, streams).map_err(|error| {
            CliError::Failed(format!("{}: {}", self.device.name(), of_device(&self.device, &error)))
        })?;
        match wrong.map(|at| at / PIECE * PIECE) {
            None => Ok(took),
            Some(at) => {
                Err(CliError::Mismatch(format!("the {name}: mismatch in bytes {at}..{}", at + PIECE)))
            }
        }
    }

    fn copy(
        &mut self,
        figure: Figure,
        to: Target,
        streams: usize,
    ) -> Result<(Duration, Option<usize>), Error> {
        let (copier, source, all) = (&self.copier, self.copies.source.clone(), self.size / PIECE);
        let order = |piece| if figure == Pieces { scattered(piece, all) } else { piece };
        let piece = |number: usize| {
            let (from, to) = (order(number) * PIECE, number * PIECE);
            Ok((&source[from..from + PIECE], self.copies.memory.slice(to..to + PIECE)?))
        };
        let count = if figure == Pieces { all } else { 0 };
        let pieces: Vec<_> = (0..count).map(piece).collect::<Result<_, Error>>()?;
        self.copies.once(to, order, |copies| {
            match figure {
                LinkUp | LinkDown | Memcpy => copies.plain(to, streams)?,
                PageableUp => copies.streams[0].upload_blocking(&source, &copies.memory)?,
                SliceUp => copier.upload_slice(&source, &copies.memory)?,
                SliceDown => copier.download_slice(&copies.memory, &mut copies.target)?,
                Pieces => copier.upload_pieces(&pieces)?.wait()?,
            }
            Ok(())
        })
    }

    fn table(&self, speeds: &Speeds, rounds: u32) -> String {
        let (name, threads, size) = (self.device.name(), self.copies.threads, amount(self.size));
        let mut text = format!("{name}, {threads} threads, copies of {size}, best of {rounds}\n");
        if self.unpinned {
            text += "(the system refused to pin memory, see ulimit -l: what is called pinned here is not)\n";
        }
        text += "\n                                   GB/s   of the pinned peak   of copies in memory\n";
        let [up, down, memcpy, ..] = speeds;
        for ((figure, .., line, _), speed) in FIGURES.iter().zip(speeds) {
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
        "threads": setup.map(|setup| setup.copies.threads),
        "device": setup.map(|setup| setup.device.name()),
        "unpinned": setup.map(|setup| setup.unpinned),
        "size_bytes": setup.map(|setup| setup.size),
        "rounds": measured.map(|(.., rounds)| rounds),
    });
    for (at, (_, _, key, ..)) in FIGURES.iter().enumerate() {
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
            let mut from: Vec<usize> = (0..pieces).map(|piece| scattered(piece, pieces)).collect();
            if pieces > 3 {
                assert!(from.windows(2).all(|pair| pair[0] + 1 != pair[1]), "{pieces}");
            }
            from.sort_unstable();
            assert!(from.iter().enumerate().all(|(place, from)| *from == place), "{pieces}");
        }
    }

    #[test]
    fn half_of_what_is_left_is_taken_at_most() {
        for (left, size) in
            [(usize::MAX, USUAL_SIZE), (64 << 30, USUAL_SIZE), (4000 << 20, 400 << 20), (0, LEAST_SIZE)]
        {
            assert_eq!(affordable(left), size, "{left}");
        }
        for size in [LEAST_SIZE, 100 << 20, USUAL_SIZE] {
            // The memory that `set_up` uses, as far as it grows with the size.
            let share = COPIER_SHARE.min(size.max(LEAST_SIZE));
            assert!(4 * size + share <= SIZES_TAKEN * size, "{size}");
        }
        // Linux 6.11 to 6.13 pins at most 1 GiB for a GPU in one call. An extent for one buffer stays below that.
        assert!(capacity(USUAL_SIZE / BUFFERS).unwrap() <= 1 << 30);
    }

    #[test]
    fn bytes_that_did_not_arrive_are_no_figure() {
        let device = Device::open("host").unwrap();
        let mut setup = set_up(&device, None, 2, 1 << 20).unwrap();
        let source = setup.copies.source.clone();
        for (number, (figure, to, ..)) in FIGURES.into_iter().enumerate() {
            setup.once(number, 1).unwrap();
            setup.once(number, 2).unwrap();
            let nothing = setup.copies.once(to, |piece| piece, |_| Ok(())).unwrap();
            assert_eq!(nothing.1.map(|at| at / PIECE), Some(0), "{figure:?}");
        }
        // Half of the bytes; and all pieces, in the wrong places.
        let pieces = (1 << 20) / PIECE;
        let half = |copies: &mut Copies| {
            setup.copier.upload_slice(&source[..1 << 19], &copies.memory)?;
            Ok(())
        };
        let wrong = setup.copies.once(Target::Device, |piece| piece, half).unwrap().1;
        assert_eq!(wrong.map(|at| at / PIECE), Some(pieces / 2));
        let plain = |copies: &mut Copies| copies.plain(Target::Device, 1);
        let wrong = setup.copies.once(Target::Device, |piece| scattered(piece, pieces), plain).unwrap().1;
        assert_eq!(wrong.map(|at| at / PIECE), Some(1));
    }
}
