//! `pinpool bench`: the speed of the link to a device and of the copier, in one run.
//!
//! All figures move the same number of bytes, five times each, in turn. The best counts: other
//! programs can only make a copy slower. A figure is the wall time of the whole call, until the
//! last byte is in place. Before each copy the target is overwritten, and after it compared with
//! the source, outside of the time: no figure is printed for a copy that lost bytes.
//!
//! The pinned peak is measured without the copier: eight page-locked buffers hold all bytes, and
//! are copied on one stream or on one stream for each thread, whichever is faster (the host
//! device's streams are threads). The table shows each figure as a ratio to the peak, and to copies
//! in memory by as many threads, which bound each path on which the CPU touches the bytes.
//!
//! [`Copies`] makes and compares one copy, for `pinpool doctor` as well. [`set_up`] makes a
//! [`BenchSetup`], which [`BenchSetup::measure`] runs in rounds.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use pinpool::{Backing, Copier, Device, DeviceSlice, Error, PinnedBuf, Request, Stream, Unpinned};
use serde_json::{Value, json};

use super::amount::amount;
use super::args::BenchArgs;
use super::spread::each;
use super::{CliError, Result, doctor, of_device, progress, sample};

/// The copies of each figure, of which the best counts.
pub const ROUNDS: u32 = 5;
/// Bytes of a copy, where memory allows it: enough for a link's full speed.
const USUAL_SIZE: usize = 256 << 20;
/// The smallest copy: a smaller one does not show a link's speed.
const LEAST_SIZE: usize = 16 << 20;
/// Page-locked buffers, which together hold all bytes of a copy.
const BUFFERS: usize = 8;
/// A copy is as many of these as there are buffers, or a multiple of that.
const STEP: usize = 16 << 10;
/// The largest page size of a system: a pool's capacity is in whole pages.
const LARGEST_PAGE: usize = 64 << 10;
/// The most page-locked memory of the copier.
const COPIER_SHARE: usize = 256 << 20;
/// All memory that the command uses, in sizes of a copy: source, target, page-locked buffers, the
/// copier's memory, and on the host device the device's memory.
const SIZES_TAKEN: usize = 5;

/// Runs the command.
pub fn run(args: &BenchArgs) -> u8 {
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
    let left = doctor::left().map_or(usize::MAX, |left| usize::try_from(left).unwrap_or(usize::MAX));
    // Each buffer is a whole number of steps.
    let whole = |bytes: usize| (bytes / (BUFFERS * STEP)).max(1) * (BUFFERS * STEP);
    // By default all memory that the command uses is half of what is left.
    let usual = (left / (2 * SIZES_TAKEN)).clamp(LEAST_SIZE, USUAL_SIZE);
    let size = whole(args.size.unwrap_or(usual));
    // Where the control group's limit is in the way, the kernel would end a process of the group.
    if left / SIZES_TAKEN < size {
        let (left, need, size) = (amount(left), amount(size.saturating_mul(SIZES_TAKEN)), amount(size));
        return Err(CliError::Failed(format!(
            "no room to measure: {left} of memory are left, and copies of {size} take {need}; name less by --size"
        )));
    }
    progress("preparing");
    let setup = set_up(device, args.device.backing, super::threads(args.threads), size);
    let told = setup.map_err(|error| {
        // Smaller copies, or fewer threads, may do without what is short.
        let remedy = if error.is_retryable() { "; name less by --size or --threads" } else { "" };
        CliError::Failed(format!("{}: {}{remedy}", device.name(), of_device(device, &error)))
    });
    let told = told.and_then(|mut setup| {
        let speeds = setup.measure()?;
        Ok((setup.table(&speeds), object(Some((&setup, &speeds)))))
    });
    progress("");
    told
}

fn set_up(
    device: &Device,
    backing: Option<Backing>,
    threads: usize,
    size: usize,
) -> Result<BenchSetup, Error> {
    let memory = device.alloc(size)?;
    // The longest extent differs between devices, so an extent is as long as one buffer needs.
    let extent = capacity(size / BUFFERS)?;
    let all = extent.saturating_mul(BUFFERS);
    let link = super::pool(device, backing).capacity(all).initial(all).extent(extent);
    let link = link.unpinned(Unpinned::Allow).build()?;
    let pinning = link.wait_pinned(None)?;
    // No other thread uses this pool: a checkout that fails now would always fail.
    let buf = |_| link.try_checkout(size / BUFFERS);
    let bufs = (0..BUFFERS).map(buf).collect::<Result<_, _>>().map_err(|error| match error {
        Error::Exhausted(_) => pinning.error.unwrap_or(error),
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

/// The same bytes in ordinary and in page-locked memory and on a device, and room for results.
pub struct Copies {
    source: Vec<u8>,
    target: Vec<u8>,
    memory: DeviceSlice,
    bufs: Vec<PinnedBuf>,
    streams: Vec<Stream>,
    threads: usize,
    /// How long a copy on a stream may take.
    patience: Duration,
}

impl Copies {
    /// The buffers share the device memory. `first` is the first byte's place in the sequence.
    pub fn new(
        memory: DeviceSlice,
        mut bufs: Vec<PinnedBuf>,
        streams: Vec<Stream>,
        threads: usize,
        patience: Duration,
        first: u64,
    ) -> Result<Self, Error> {
        let (mut source, target) = (super::zeros(memory.len())?, super::zeros(memory.len())?);
        sample::fill(&mut source, first);
        let part = memory.len() / bufs.len();
        for buf in &mut bufs {
            buf.try_resize(part, 0)?;
        }
        Ok(Self { source, target, memory, bufs, streams, threads, patience })
    }

    /// Makes one copy. What it writes is overwritten before it and compared after it. Returns the
    /// copy's time, and the offset of the first wrong byte, if there is one.
    pub fn once(
        &mut self,
        to: Target,
        copy: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<(Duration, Option<usize>), Error> {
        self.fill(to != Target::Device);
        self.plain(Target::Device, 1)?;
        self.fill(to == Target::Device);
        self.target.fill(0);
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
        if self.target == self.source {
            return Ok((took, None));
        }
        let wrong = self.target.iter().zip(&self.source).position(|(got, sent)| got != sent);
        Ok((took, wrong))
    }

    /// Writes the source's bytes, or zeros, into the page-locked buffers.
    fn fill(&mut self, source: bool) {
        let parts = self.source.chunks(self.memory.len() / self.bufs.len());
        for (buf, part) in self.bufs.iter_mut().zip(parts) {
            if source { buf.copy_from_slice(part) } else { buf.fill(0) }
        }
    }

    /// Copies all without a copier: the page-locked buffers on so many streams, or in memory.
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

/// Makes one copy of a figure; page-locked memory is copied on so many streams.
type CopyFn = fn(&Copier, &mut Copies, usize) -> Result<(), Error>;

/// Each figure's key in the object, line in the table, target and copy, in a round's order.
const FIGURES: [(&str, &str, Target, CopyFn); 6] = [
    ("pinned_peak_upload", "pinned peak, to the device", Target::Device, |_, copies, streams| {
        copies.plain(Target::Device, streams)
    }),
    ("pinned_peak_download", "pinned peak, from the device", Target::Pinned, |_, copies, streams| {
        copies.plain(Target::Pinned, streams)
    }),
    ("memcpy", "copies in memory, by as many", Target::Memory, |_, copies, _| {
        copies.plain(Target::Memory, 1)
    }),
    ("pageable_upload", "pageable memory to the device", Target::Device, |_, copies, _| {
        copies.streams[0].upload_blocking(&copies.source, &copies.memory)
    }),
    ("copier_upload", "copier, to the device", Target::Device, |copier, copies, _| {
        copier.upload_slice(&copies.source, &copies.memory)
    }),
    ("copier_download", "copier, from the device", Target::Memory, |copier, copies, _| {
        copier.download_slice(&copies.memory, &mut copies.target)
    }),
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
    fn measure(&mut self) -> Result<Speeds> {
        let mut best = [Duration::MAX; FIGURES.len()];
        // Round by round, so that other load on the machine slows all figures alike.
        for round in 1..=ROUNDS {
            for (number, best) in best.iter_mut().enumerate() {
                let (key, name, ..) = FIGURES[number];
                progress(&format!("{name}: {round} of {ROUNDS}"));
                let most = if key.starts_with("pinned") { self.copies.streams.len() } else { 1 };
                for streams in BTreeSet::from([1, most]) {
                    *best = (*best).min(self.once(number, streams)?);
                }
            }
        }
        Ok(best.map(|time| self.size as f64 / time.as_secs_f64().max(1e-9) / 1e9))
    }

    /// Measures one copy of the figure of this number.
    fn once(&mut self, number: usize, streams: usize) -> Result<Duration> {
        let (_, name, to, copy) = FIGURES[number];
        let measured = self.copies.once(to, |copies| copy(&self.copier, copies, streams));
        let (took, wrong) = measured.map_err(|error| {
            CliError::Failed(format!("{}: {}", self.device.name(), of_device(&self.device, &error)))
        })?;
        match wrong {
            None => Ok(took),
            Some(at) => Err(CliError::Mismatch(format!("{name}: mismatch at byte {at}"))),
        }
    }

    fn table(&self, speeds: &Speeds) -> String {
        let (name, threads, size) = (self.device.name(), self.copies.threads, amount(self.size));
        let mut text = format!("{name}, {threads} threads, copies of {size}, best of {ROUNDS}\n");
        if self.unpinned {
            text += "(the system refused to pin memory, see ulimit -l: what is called pinned here is not)\n";
        }
        text += "\n                                   GB/s   of the pinned peak   of copies in memory\n";
        let [up, down, memcpy, ..] = speeds;
        for ((key, line, ..), speed) in FIGURES.iter().zip(speeds) {
            let peak = if key.ends_with("download") { down } else { up };
            let (over, beside) = (100.0 * speed / peak, 100.0 * speed / memcpy);
            text += &format!("{line:<32}{speed:>7.2}{over:>20.1}%{beside:>21.1}%\n");
        }
        text
    }
}

/// The object of what was measured, null where nothing was.
fn object(measured: Option<(&BenchSetup, &Speeds)>) -> Value {
    let setup = measured.map(|(setup, ..)| setup);
    let mut object = json!({
        "threads": setup.map(|setup| setup.copies.threads),
        "device": setup.map(|setup| setup.device.name()),
        "unpinned": setup.map(|setup| setup.unpinned),
        "size_bytes": setup.map(|setup| setup.size),
        "rounds": setup.map(|_| ROUNDS),
    });
    for (at, (key, ..)) in FIGURES.iter().enumerate() {
        // Three decimals: more is noise.
        let speed = measured.map(|(_, speeds)| (speeds[at] * 1000.0).round() / 1000.0);
        object[format!("{key}_gb_per_s")] = speed.into();
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_did_not_arrive_are_no_figure() {
        let device = Device::open("host").unwrap();
        let mut setup = set_up(&device, None, 2, 1 << 20).unwrap();
        for (number, (key, _, to, _)) in FIGURES.into_iter().enumerate() {
            setup.once(number, 1).unwrap();
            setup.once(number, 2).unwrap();
            let nothing = setup.copies.once(to, |_| Ok(())).unwrap();
            assert!(nothing.1.is_some_and(|at| at < 16), "{key}");
        }
        let half = |copies: &mut Copies| setup.copier.upload_slice(&copies.source[..1 << 19], &copies.memory);
        let wrong = setup.copies.once(Target::Device, half).unwrap().1;
        assert!(wrong.is_some_and(|at| (1 << 19..(1 << 19) + 16).contains(&at)), "{wrong:?}");
    }
}
