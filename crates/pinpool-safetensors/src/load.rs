//! Loading: where on the device tensors go, and handing them out as their copies complete.
//!
//! # How it works
//!
//! [`Loader`] collects what is asked for. `start_into` goes through the files in order: it chooses tensors, joins
//! neighbours to ranges (`runs`), gets one block of device memory for all of a file, and starts one transfer of the
//! copier for it ([`LoadPart`]). All files are queued before the first tensor comes out.
//!
//! A program that has memory for each tensor gives it by [`Loader::places`]; then there is a list of places. What is to
//! come [`first`](Loader::first) has transfers of its own, before the others.
//!
//! [`Loading`] hands the tensors out (`advance`), file by file. It keeps up to which offset the file's bytes are known
//! to be on the device, and asks the transfer only when a tensor ends behind that. The place of a tensor in the block
//! is worked out twice, by the same [`Layout`]: when the copy is planned, and when the tensor comes out. So no list of
//! places is kept.
//!
//! # Invariants
//!
//! - The last tensor of a file comes out only when the transfer is over and the file was found unchanged. An error
//!   takes the place of a tensor, and ends the load.
//! - A call that waits (`load`, `for_each`, `Checkpoint::tensor`) returns only when nothing of its transfers is under
//!   way ([`BlockingLoad`]).

use std::collections::{BTreeMap, VecDeque};
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use super::header::Tensor;
use super::shared::SharedLoad;
use super::tensor::DeviceTensor;
use super::{Checkpoint, Shard, reserved};
use crate::escape::{NAME, Shown};
use pinpool::copier::{Canceller, Copier, FileSource, Piece, Progress, Reading, Transfer, may_wait};
use pinpool::{DeviceSlice, Error, Result};

/// The default alignment of tensors, in bytes. Kernels that load 16 bytes at a time need it (`float4`), and so do
/// tensor maps (the CUDA driver API's `cuTensorMapEncodeTiled`: a global address is 16-byte aligned).
const TENSOR_ALIGN: usize = 16;
/// The largest alignment that makes sense: a page of a device.
const LARGEST_ALIGN: usize = 2 << 20;

type Filter<'a> = Box<dyn FnMut(&Tensor) -> bool + 'a>;

type PlaceOf<'a> = dyn FnMut(&Tensor) -> Result<Option<DeviceSlice>> + 'a;

/// Where the device memory comes from.
enum Memory<'a> {
    /// The device, in a block for each file.
    Device,
    /// The caller, in a block for each file.
    Blocks(Box<dyn FnMut(usize) -> Result<DeviceSlice> + 'a>),
    /// The caller, for each tensor.
    Places(Box<PlaceOf<'a>>),
}

/// Sets up a load: which tensors, and where they go. See [`Checkpoint::loader`].
///
/// ```
/// # use pinpool::{Copier, Device, Pool, Unpinned};
/// # let path = std::env::temp_dir().join(format!("pinpool-loader-{}.safetensors", std::process::id()));
/// # let header = br#"{"h.0.w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
/// # std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header, b"abcd"].concat())?;
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// # let copier = Copier::builder(&pool, &device).build()?;
/// # let checkpoint = Checkpoint::open(&path)?;
/// let tensors = checkpoint.loader(&copier).prefix("h.0.").align(256).load()?;
/// assert_eq!(tensors[0].address().map(|address| address % 256), Some(0));
/// # std::fs::remove_file(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "nothing is loaded until `start`, `load` or `for_each`"]
pub struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    copier: &'a Copier,
    prefixes: Vec<String>,
    filter: Option<Filter<'a>>,
    first: Vec<String>,
    align: usize,
    memory: Memory<'a>,
    /// The places that the caller gave, by address: start and end.
    given: BTreeMap<u64, u64>,
    reading: Reading,
    timeout: Option<Duration>,
    /// The end of that, once the load has started.
    deadline: Option<Instant>,
}

impl<'a> Loader<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint, copier: &'a Copier) -> Self {
        Self {
            checkpoint,
            copier,
            prefixes: Vec::new(),
            filter: None,
            first: Vec::new(),
            align: TENSOR_ALIGN,
            memory: Memory::Device,
            given: BTreeMap::new(),
            reading: Reading::Auto,
            timeout: None,
            deadline: None,
        }
    }

    /// Loads only tensors whose name starts with `prefix`. Called several times: with any of the prefixes. Default:
    /// all.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefixes.push(prefix.into());
        self
    }

    /// Loads only tensors for which `filter` is true (and whose name has the prefix, where one was given). Default:
    /// all.
    pub fn filter(mut self, filter: impl FnMut(&Tensor) -> bool + 'a) -> Self {
        self.filter = Some(Box::new(filter));
        self
    }

    /// Loads tensors whose name starts with `prefix` before the others, and gives them out first: what a server needs
    /// first, such as the embedding and the first layers. Called several times: in the order of the calls. A tensor
    /// that several prefixes meet comes with the first of them. Default: the order of the files.
    ///
    /// Each prefix makes a transfer of its own for each file that has such tensors.
    pub fn first(mut self, prefix: impl Into<String>) -> Self {
        self.first.push(prefix.into());
        self
    }

    /// The alignment of the tensors on the device, in bytes: a power of two of at most 2 MiB. Tensors whose length is a
    /// multiple of it lie side by side and are copied together; behind others there is a gap. Default: 16.
    pub fn align(mut self, bytes: usize) -> Self {
        self.align = bytes;
        self
    }

    /// Where the device memory comes from. `get` is called once for each file that tensors are loaded from (and for each
    /// [`first`](Self::first) of it), with the number of bytes, and gives at least as many, starting on a multiple of
    /// the alignment. Default: [`Device::alloc`](pinpool::Device::alloc).
    pub fn memory(mut self, get: impl FnMut(usize) -> Result<DeviceSlice> + 'a) -> Self {
        self.memory = Memory::Blocks(Box::new(get));
        self
    }

    /// Where each tensor goes: memory of the program's own, such as an allocation for each. In place of
    /// [`memory`](Self::memory). `get` is called once for each tensor that is to be loaded and has bytes, in the order
    /// of the load, by the call that starts it. It gives at least as many bytes, starting on a multiple of the
    /// alignment, or `None`, which leaves the tensor out. No two places overlap. Tensors that are short and apart are
    /// copied together all the same, and spread on the device.
    ///
    /// ```
    /// # use pinpool::{Copier, Device, Pool, Unpinned};
    /// # let path = std::env::temp_dir().join(format!("pinpool-places-{}.safetensors", std::process::id()));
    /// # let header = br#"{"h.0.w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    /// # std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header, b"abcd"].concat())?;
    /// # let device = Device::open("host")?;
    /// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
    /// # let copier = Copier::builder(&pool, &device).build()?;
    /// let checkpoint = Checkpoint::open(&path)?;
    /// let own = |tensor: &pinpool_safetensors::Tensor| device.alloc(tensor.len() as usize)?.slice(..).map(Some);
    /// let tensors = checkpoint.loader(&copier).places(own).load()?;
    /// # assert_eq!(tensors.len(), 1);
    /// # std::fs::remove_file(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn places(mut self, get: impl FnMut(&Tensor) -> Result<Option<DeviceSlice>> + 'a) -> Self {
        self.memory = Memory::Places(Box::new(get));
        self
    }

    /// How the files are read. Default: [`Reading::Auto`].
    pub fn reading(mut self, reading: Reading) -> Self {
        self.reading = reading;
        self
    }

    /// The load ends within `timeout` of its start, whatever it waits for: then the first tensor that is not on the device
    /// is [`Error::Timeout`]. It says, as [`Copier::with_timeout`] does, how far the file had come, what was waited for, and
    /// what happens to what is under way. Tensors that have arrived by then come out before. Default: the copier's.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Starts the load. The tensors come out of the returned [`Loading`], in the order of the files (but for those that
    /// come [`first`](Self::first)); dropping it cancels the rest.
    ///
    /// # Errors
    /// [`Error::BadAlignment`]; [`Error::Device`] where the device has no memory, or is lost; for memory of the
    /// caller's [`Error::TooSmall`], [`Error::WrongDevice`], and [`Error::Config`] where it is not aligned or overlaps
    /// what was given before, for the place of a tensor as the cause in an [`Error::Tensor`]; [`Error::Shrunk`] for a
    /// file that has become shorter since it was opened, [`Error::Malformed`] for one that was written to;
    /// [`Error::Forked`]. Transfers of other files that were started are cancelled.
    pub fn start(mut self) -> Result<Loading> {
        let mut loading = Loading::none();
        let choose = self.choice();
        self.start_into(&mut loading, choose)?;
        Ok(loading)
    }

    /// [`start`](Self::start) for calls that wait.
    fn start_blocking(mut self) -> Result<BlockingLoad> {
        let choose = self.choice();
        self.start_with(choose)
    }

    /// Which tensors of a shard are loaded.
    fn choice(&mut self) -> impl FnMut(&Shard) -> Chosen + use<'a> {
        let (prefixes, mut filter) = (std::mem::take(&mut self.prefixes), self.filter.take());
        move |shard| {
            if prefixes.is_empty() && filter.is_none() {
                return Chosen::All;
            }
            let mut is_wanted = |tensor: &Tensor| {
                let mut prefixes_of = prefixes.iter();
                (prefixes.is_empty() || prefixes_of.any(|prefix| tensor.name().starts_with(prefix)))
                    && filter.as_mut().is_none_or(|filter| filter(tensor))
            };
            let all = (0..).zip(shard.tensors.iter());
            Chosen::Some(all.filter(|(_, tensor)| is_wanted(tensor)).map(|(index, _)| index).collect())
        }
    }

    /// Starts a load of the tensors that are chosen of each shard, for a call that waits.
    pub(super) fn start_with(self, choose: impl FnMut(&Shard) -> Chosen) -> Result<BlockingLoad> {
        // Checked before anything begins: this thread could not wait for it afterwards.
        may_wait()?;
        // Made first: where a later shard is refused, its drop waits for the transfers that have begun.
        let mut load = BlockingLoad(Loading::none());
        self.start_into(&mut load.0, choose)?;
        Ok(load)
    }

    fn start_into(mut self, loading: &mut Loading, mut choose: impl FnMut(&Shard) -> Chosen) -> Result<()> {
        self.deadline = self.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if !self.align.is_power_of_two() || self.align > LARGEST_ALIGN {
            return Err(Error::BadAlignment { align: self.align, largest: LARGEST_ALIGN });
        }
        let mut groups: Vec<Vec<(&Arc<Shard>, Chosen)>> = Vec::new();
        groups.resize_with(self.first.len() + 1, Vec::new);
        for shard in &self.checkpoint.shards {
            let chosen = choose(shard);
            if self.first.is_empty() {
                groups[0].push((shard, chosen));
                continue;
            }
            for (group, chosen) in groups.iter_mut().zip(chosen.split(shard, &self.first)) {
                group.push((shard, chosen));
            }
        }
        for (shard, chosen) in groups.into_iter().flatten() {
            if chosen.count(shard) == 0 {
                continue;
            }
            let part = match self.memory {
                Memory::Places(_) => self.start_places(shard, &chosen, loading.count)?,
                Memory::Device | Memory::Blocks(_) => self.start_shard(shard, chosen, &loading.parts)?,
            };
            if part.left() > 0 {
                loading.total += part.bytes;
                loading.count += part.left();
                loading.parts.push_back(part);
            }
        }
        loading.ended = loading.parts.is_empty().then(Instant::now);
        Ok(())
    }

    /// The ranges to copy, in the file and in the block; the length of the block; and the number of bytes to copy.
    /// Neighbours are joined here, before pieces are made: there may be tens of thousands of tensors, and the link
    /// idles meanwhile.
    #[allow(clippy::type_complexity, reason = "a list of pairs, and two numbers")]
    fn runs(&self, shard: &Shard, chosen: &Chosen) -> Result<(Vec<(Range<u64>, Range<usize>)>, usize, u64)> {
        // The whole file is one range, as was found when it was opened: no tensor needs a look.
        if let (Chosen::All, Some((whole, even))) = (chosen, &shard.whole) {
            let bytes = whole.end - whole.start;
            if *even >= self.align {
                let place = Layout::new(self.align).put(bytes)?;
                let end = place.end;
                return Ok((vec![(whole.clone(), place)], end, bytes));
            }
        }
        let mut runs: Vec<(Range<u64>, Range<usize>)> = Vec::new();
        let (mut layout, mut bytes) = (Layout::new(self.align), 0);
        for tensor in chosen.tensors(shard).filter(|tensor| !tensor.is_empty()) {
            let (file, place) = (tensor.range(), layout.put(tensor.len())?);
            bytes += tensor.len();
            match runs.last_mut() {
                Some((from, to)) if from.end == file.start && to.end == place.start => {
                    (from.end, to.end) = (file.end, place.end);
                }
                _ => runs.push((file, place)),
            }
        }
        Ok((runs, layout.end, bytes))
    }

    fn start_shard(
        &mut self,
        shard: &Arc<Shard>,
        chosen: Chosen,
        before: &VecDeque<LoadPart>,
    ) -> Result<LoadPart> {
        let (runs, end, bytes) = self.runs(shard, &chosen)?;
        let mut part = LoadPart::new(shard, chosen, Places::Block(Layout::new(self.align), None), bytes);
        if bytes == 0 {
            return Ok(part);
        }
        let block = self.block(end)?;
        let apart = |other: &DeviceSlice| {
            let ends = |slice: &DeviceSlice, len| (slice.address(), slice.address() + len as u64);
            let (one, two) = (ends(&block, end), ends(other, other.len()));
            one.1 <= two.0 || two.1 <= one.0
        };
        if !before.iter().filter_map(LoadPart::block).all(apart) {
            return Err(Error::Config(format!(
                "the memory for the tensors of {} overlaps that for another file's; give each file memory of its own",
                shard.name
            )));
        }
        let pieces = runs.into_iter().map(|(file, place)| Ok(Piece::new(file.start, block.slice(place)?)));
        let pieces = pieces.collect::<Result<_>>()?;
        part.places = Places::Block(Layout::new(self.align), Some(block));
        // All pieces are parts of one block.
        self.begin(&mut part, pieces).map_err(|error| match error {
            Error::Piece { cause, .. } => *cause,
            error => error,
        })?;
        Ok(part)
    }

    /// Starts to load tensors to places of the caller's. `before`: tensors of the load so far.
    fn start_places(&mut self, shard: &Arc<Shard>, chosen: &Chosen, before: usize) -> Result<LoadPart> {
        let (mut loaded, mut places, mut pieces, mut bytes) = (Vec::new(), Vec::new(), Vec::new(), 0);
        let total = before + chosen.count(shard);
        let refused = |tensor: &Tensor, cause: Box<Error>| {
            let tensor = Shown(tensor.name(), NAME).to_string().into();
            Error::Tensor { tensor, landed: 0, total, cause }
        };
        for index in (0..chosen.count(shard)).filter_map(|number| chosen.get(shard, number)) {
            let tensor = &shard.tensors[index as usize];
            let mut place = None;
            if !tensor.is_empty() {
                let Memory::Places(get) = &mut self.memory else { break };
                let Some(slice) = get(tensor)? else { continue };
                let slice = self.place(tensor, &slice).map_err(|cause| refused(tensor, cause.into()))?;
                bytes += tensor.len();
                pieces.push(Piece::new(tensor.range().start, slice.clone()));
                place = Some(slice);
            }
            loaded.push(index);
            places.push(place);
        }
        let mut part = LoadPart::new(shard, Chosen::Some(loaded), Places::Each(places), bytes);
        if bytes == 0 {
            return Ok(part);
        }
        match self.begin(&mut part, pieces) {
            Ok(()) => Ok(part),
            // Of another device.
            Err(Error::Piece { piece, memory, cause }) => {
                let mut with_bytes = part.chosen.tensors(shard).filter(|tensor| !tensor.is_empty());
                Err(match with_bytes.nth(piece) {
                    Some(tensor) => refused(tensor, cause),
                    None => Error::Piece { piece, memory, cause },
                })
            }
            Err(error) => Err(error),
        }
    }

    /// The part of a place of the caller's that a tensor needs.
    fn place(&mut self, tensor: &Tensor, slice: &DeviceSlice) -> Result<DeviceSlice> {
        let len = usize::try_from(tensor.len()).unwrap_or(usize::MAX);
        if slice.len() < len {
            return Err(Error::TooSmall { need: len, have: slice.len() });
        }
        self.aligned(slice)?;
        let (start, end) = (slice.address(), slice.address() + tensor.len());
        let (below, above) = (self.given.range(..=start).next_back(), self.given.range(start..).next());
        if below.is_some_and(|(_, until)| *until > start) || above.is_some_and(|(from, _)| *from < end) {
            return Err(Error::Config(
                "its memory overlaps that for another tensor; give each tensor memory of its own".into(),
            ));
        }
        self.given.insert(start, end);
        // Bytes beyond `len` are not written to.
        slice.slice(..len)
    }

    /// Starts the transfer of a part.
    fn begin(&self, part: &mut LoadPart, pieces: Vec<Piece>) -> Result<()> {
        let shard = &part.shard;
        shard.unchanged()?;
        let source = match &shard.file {
            Some(file) => FileSource::new(file.clone(), shard.name.clone())?,
            None => {
                let again = shard.clone();
                FileSource::opened_by(move || again.file(), shard.name.clone(), shard.stamp.len)
            }
        };
        let source = source.reading(self.reading);
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let copier = left.map_or_else(|| self.copier.clone(), |left| self.copier.with_timeout(left));
        part.transfer = Some(copier.upload_file_ranges(source, pieces).map_err(|refused| refused.error)?);
        Ok(())
    }

    fn is_aligned(&self, slice: &DeviceSlice) -> bool {
        slice.address() % self.align as u64 == 0
    }

    /// An error for memory of the caller's that is not on the alignment.
    fn aligned(&self, slice: &DeviceSlice) -> Result<()> {
        if self.is_aligned(slice) {
            return Ok(());
        }
        Err(Error::Config(format!(
            "the memory for tensors starts at {:#x}, which is no multiple of {}; align it, or ask the loader for less",
            slice.address(),
            self.align
        )))
    }

    /// Device memory of so many bytes that starts on the alignment.
    fn block(&mut self, len: usize) -> Result<DeviceSlice> {
        if let Memory::Blocks(memory) = &mut self.memory {
            let slice = memory(len)?;
            if slice.len() < len {
                return Err(Error::TooSmall { need: len, have: slice.len() });
            }
            self.aligned(&slice)?;
            // Bytes beyond `len` are not written to.
            return slice.slice(..len);
        }
        let slice = DeviceSlice::from(self.copier.device().alloc(len)?);
        if self.is_aligned(&slice) {
            return Ok(slice);
        }
        drop(slice);
        // Rare: a device aligns its memory by itself, mostly to more than was asked for.
        let slice = DeviceSlice::from(self.copier.device().alloc(len.saturating_add(self.align))?);
        let skip = (slice.address().next_multiple_of(self.align as u64) - slice.address()) as usize;
        slice.slice(skip..skip + len)
    }

    /// Loads the tensors, and waits until all are on the device. They come in the order of the files.
    ///
    /// # Errors
    /// As for [`start`](Self::start) and [`Loading`]; [`Error::Unsupported`] on a thread that must not wait (in a
    /// waker, a source or a sink).
    pub fn load(self) -> Result<Vec<DeviceTensor>> {
        let mut loading = self.start_blocking()?;
        let (mut tensors, count) = (Vec::new(), loading.0.left());
        reserved(tensors.try_reserve_exact(count), "the list of tensors", count * size_of::<DeviceTensor>())?;
        for tensor in loading.0.blocking() {
            tensors.push(tensor?);
        }
        Ok(tensors)
    }

    /// Loads the tensors, and calls `each` with every one as soon as it is on the device, while others are being
    /// copied.
    ///
    /// # Errors
    /// As for [`load`](Self::load), and the first error that `each` returns, which ends the load.
    pub fn for_each(self, mut each: impl FnMut(DeviceTensor) -> Result<()>) -> Result<()> {
        self.start_blocking()?.0.blocking().try_for_each(|tensor| each(tensor?))
    }
}

/// The load of a call that waits. Its drop waits until nothing of the load is under way, however the call ends:
/// otherwise the device could write to the caller's memory after the call.
pub(super) struct BlockingLoad(pub(super) Loading);

impl Drop for BlockingLoad {
    fn drop(&mut self) {
        self.0.cancel_and_wait();
    }
}

impl std::fmt::Debug for Loader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loader")
            .field("prefixes", &self.prefixes)
            .field("align", &self.align)
            .finish_non_exhaustive()
    }
}

/// Which of a shard's tensors are loaded.
pub(super) enum Chosen {
    All,
    /// Their places in the shard, in its order.
    Some(Vec<u32>),
}

impl Chosen {
    fn count(&self, shard: &Shard) -> usize {
        match self {
            Self::All => shard.tensors.len(),
            Self::Some(places) => places.len(),
        }
    }

    /// The place in the shard of the chosen tensor with this number.
    fn get(&self, shard: &Shard, number: usize) -> Option<u32> {
        match self {
            // The number fits: a header has no room for 2^32 tensors.
            Self::All => (number < shard.tensors.len()).then_some(number as u32),
            Self::Some(places) => places.get(number).copied(),
        }
    }

    /// Those of each prefix, and the rest.
    fn split(&self, shard: &Shard, first: &[String]) -> impl Iterator<Item = Self> + use<> {
        let mut groups = vec![Vec::new(); first.len() + 1];
        for index in (0..self.count(shard)).filter_map(|number| self.get(shard, number)) {
            let name = shard.tensors[index as usize].name();
            let group = first.iter().position(|prefix| name.starts_with(prefix)).unwrap_or(first.len());
            groups[group].push(index);
        }
        groups.into_iter().map(Self::Some)
    }

    pub(super) fn tensors<'a>(&'a self, shard: &'a Shard) -> impl Iterator<Item = &'a Tensor> {
        (0..self.count(shard))
            .filter_map(|number| self.get(shard, number))
            .map(|place| &shard.tensors[place as usize])
    }
}

/// Where tensors go in a block: in their order, each on the alignment, with no other gaps between them.
#[derive(Clone, Copy)]
struct Layout {
    align: usize,
    /// The end of the last tensor.
    end: usize,
}

impl Layout {
    fn new(align: usize) -> Self {
        Self { align, end: 0 }
    }

    /// The place of the next tensor, which has `len` bytes, at least one.
    fn put(&mut self, len: u64) -> Result<Range<usize>> {
        let start = self.end.checked_next_multiple_of(self.align);
        let place = start.zip(usize::try_from(len).ok()).and_then(|(start, len)| {
            let end = start.checked_add(len).filter(|end| *end <= isize::MAX as usize)?;
            Some(start..end)
        });
        let place = place.ok_or_else(|| Error::OutOfMemory {
            wanted: usize::MAX,
            text: "the tensors are more than the address space holds".into(),
        })?;
        self.end = place.end;
        Ok(place)
    }
}

/// Where the tensors of a part are.
enum Places {
    /// In a block, which there is not where they have no bytes; and the places of those that have come out.
    Block(Layout, Option<DeviceSlice>),
    /// Where the caller said, in the order of the chosen ones.
    Each(Vec<Option<DeviceSlice>>),
}

/// The progress of several transfers together.
fn progress(done: u64, total: u64, elapsed: Duration, landed_to: u64, over: bool) -> Progress {
    let mut progress = Progress::default();
    (progress.done, progress.total, progress.landed_to) = (done, total, landed_to);
    (progress.elapsed, progress.over) = (elapsed, over);
    progress
}

/// What is loaded of one file by one transfer.
struct LoadPart {
    shard: Arc<Shard>,
    chosen: Chosen,
    /// How many tensors have come out.
    next: usize,
    places: Places,
    /// `None` where the chosen tensors have no bytes, and when it is over.
    transfer: Option<Transfer<FileSource>>,
    /// All of the file before this offset is on the device, as of the last time that the transfer was asked.
    complete_to: u64,
    /// Bytes of the chosen tensors.
    bytes: u64,
}

impl Drop for LoadPart {
    fn drop(&mut self) {
        self.transfer.iter().for_each(Transfer::cancel);
    }
}

impl LoadPart {
    fn new(shard: &Arc<Shard>, chosen: Chosen, places: Places, bytes: u64) -> Self {
        let shard = shard.clone();
        Self { shard, chosen, next: 0, places, transfer: None, complete_to: 0, bytes }
    }

    fn block(&self) -> Option<&DeviceSlice> {
        match &self.places {
            Places::Block(_, block) => block.as_ref(),
            Places::Each(_) => None,
        }
    }

    /// How many tensors have not come out.
    fn left(&self) -> usize {
        self.chosen.count(&self.shard) - self.next
    }

    /// The next tensor, which is on the device.
    fn out(&mut self, index: u32) -> Result<DeviceTensor> {
        let tensor = &self.shard.tensors[index as usize];
        let slice = match &mut self.places {
            Places::Block(layout, Some(block)) if !tensor.is_empty() => {
                Some(block.slice(layout.put(tensor.len())?)?)
            }
            Places::Block(..) => None,
            Places::Each(places) => places.get_mut(self.next).and_then(Option::take),
        };
        self.next += 1;
        Ok(DeviceTensor::new(self.shard.tensors.clone(), index, slice))
    }
}

/// A load under way. For tasks it is a [`Stream`](futures_core::Stream) of the tensors, on any runtime, and
/// [`next_tensor`](Self::next_tensor) gives the next one. For threads, which wait, there are
/// [`next_blocking`](Self::next_blocking) and the iterator [`blocking`](Self::blocking): these are methods, so that no
/// `for` and no `next` in a task blocks its runtime unseen.
///
/// **Dropped, it cancels the rest**; tensors that have come out stay. An error comes in the place of the first tensor
/// that cannot be loaded, and ends the load. The load has ended when the last tensor comes out: the copier has then
/// given back all memory that it used for it, and no further call is needed.
///
/// ```
/// # use pinpool::{Copier, Device, Pool, Unpinned};
/// # let path = std::env::temp_dir().join(format!("pinpool-loading-{}.safetensors", std::process::id()));
/// # let header = br#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
/// # std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header, b"abcd"].concat())?;
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// # let copier = Copier::builder(&pool, &device).build()?;
/// # let checkpoint = Checkpoint::open(&path)?;
/// let mut loading = checkpoint.loader(&copier).start()?;
/// while let Some(tensor) = loading.next_blocking() {
///     println!("{:?}, {} bytes copied", tensor?.name(), loading.progress().done);
/// }
/// # std::fs::remove_file(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Of each item: [`Error::Tensor`] with the name of the first tensor that is not on the device, how many are, and the
/// cause ([`Error::Read`] and [`Error::Shrunk`] with file and offset, [`Error::Transfer`] with the error of the pool or
/// the device); [`Error::Cancelled`]; [`Error::Timeout`] after the load's [deadline](Loader::timeout);
/// [`Error::Malformed`] in the place of the last tensor of a file that was
/// written to meanwhile, whose other tensors may then be wrong; [`Error::Forked`].
#[must_use = "dropping it cancels the load"]
pub struct Loading {
    parts: VecDeque<LoadPart>,
    /// Tensors of the whole load.
    count: usize,
    total: u64,
    /// Of files that have ended: bytes that were copied.
    done_before: u64,
    /// Of these, bytes before which none is missing.
    contiguous_before: u64,
    since: Instant,
    ended: Option<Instant>,
}

impl Loading {
    /// A load of nothing yet.
    fn none() -> Self {
        Self {
            parts: VecDeque::new(),
            count: 0,
            total: 0,
            done_before: 0,
            contiguous_before: 0,
            since: Instant::now(),
            ended: None,
        }
    }

    /// The next tensor, for a task, which is not blocked. `None`: there are no more.
    ///
    /// # Errors
    /// See [`Loading`].
    pub async fn next_tensor(&mut self) -> Option<Result<DeviceTensor>> {
        poll_fn(|cx| self.advance(Some(cx))).await
    }

    /// The next tensor. Waits for it, and blocks this thread meanwhile. `None`: there are no more.
    ///
    /// # Errors
    /// See [`Loading`].
    pub fn next_blocking(&mut self) -> Option<Result<DeviceTensor>> {
        match self.advance(None) {
            Poll::Ready(next) => next,
            // Impossible: without `cx`, `advance` waits.
            Poll::Pending => None,
        }
    }

    /// An iterator over the tensors, which waits for each, and blocks its thread meanwhile. Dropped, it leaves the load
    /// as it is.
    ///
    /// ```
    /// use pinpool_safetensors::{DeviceTensor, Loading};
    ///
    /// fn rest(mut loading: Loading) -> pinpool::Result<Vec<DeviceTensor>> {
    ///     loading.blocking().collect()
    /// }
    /// ```
    pub fn blocking(&mut self) -> BlockingTensors<'_> {
        BlockingTensors(self)
    }

    /// The tensors for many threads, each of which waits for those that it needs.
    pub fn share(self) -> SharedLoad {
        SharedLoad::new(self)
    }

    /// The names of the tensors that have not come out yet.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().flat_map(|part| part.chosen.tensors(&part.shard).skip(part.next)).map(Tensor::name)
    }

    /// The number of tensors that have not come out yet.
    #[must_use]
    pub fn left(&self) -> usize {
        self.parts.iter().map(LoadPart::left).sum()
    }

    /// How far the load has come, in bytes of tensors over all files. `landed_to` counts them as if the files lay one
    /// behind the other.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let (mut done, mut contiguous, mut whole) = (self.done_before, self.contiguous_before, true);
        for part in &self.parts {
            let Some(progress) = part.transfer.as_ref().map(Transfer::progress) else { continue };
            done += progress.done;
            whole = whole && progress.done == progress.total;
            if whole {
                contiguous += part.bytes;
            }
        }
        let until = self.ended.unwrap_or_else(Instant::now);
        let over = self.ended.is_some();
        progress(done, self.total, until.duration_since(self.since), contiguous, over)
    }

    /// Cancels the load: no further chunk is begun. Tensors that are on the device still come out, and then
    /// [`Error::Cancelled`].
    pub fn cancel(&self) {
        self.parts.iter().filter_map(|part| part.transfer.as_ref()).for_each(Transfer::cancel);
    }

    /// A handle that looks at the load and cancels it, for another thread.
    #[must_use]
    pub fn canceller(&self) -> LoadCanceller {
        let transfers = self.parts.iter().filter_map(|part| part.transfer.as_ref());
        let cancellers = transfers.map(Transfer::canceller).collect();
        let (before, landed_before) = (self.done_before, self.contiguous_before);
        LoadCanceller { cancellers, before, landed_before, total: self.total, since: self.since }
    }

    /// Cancels all transfers that are left, and then waits for each until the device is done with it.
    fn cancel_and_wait(&mut self) {
        self.cancel();
        self.parts
            .drain(..)
            .filter_map(|mut part| part.transfer.take())
            .for_each(|transfer| _ = transfer.wait());
    }

    /// The next tensor. The thread waits for it, or, with `cx`, the task does. The last tensor of a file comes out when
    /// the file's transfer is over, since the caller need not call again to learn of an error.
    fn advance(&mut self, mut cx: Option<&mut Context<'_>>) -> Poll<Option<Result<DeviceTensor>>> {
        if pinpool::forked() && !self.parts.is_empty() {
            self.parts.clear();
            self.ended.get_or_insert_with(Instant::now);
            return Poll::Ready(Some(Err(Error::Forked)));
        }
        let Some(part) = self.parts.front_mut() else {
            self.ended.get_or_insert_with(Instant::now);
            return Poll::Ready(None);
        };
        let mut last_index = None;
        if let Some(index) = part.chosen.get(&part.shard, part.next) {
            let tensor = &part.shard.tensors[index as usize];
            let end = tensor.range().end;
            let complete = match (&mut part.transfer, &mut cx) {
                _ if tensor.is_empty() || end <= part.complete_to => true,
                (None, _) => false,
                (Some(transfer), cx) => {
                    let complete = match cx {
                        None => transfer.wait_landed(end),
                        Some(cx) => ready!(transfer.poll_landed(cx, end)),
                    };
                    part.complete_to = transfer.progress().landed_to;
                    complete
                }
            };
            if complete && part.left() > 1 {
                return Poll::Ready(Some(part.out(index)));
            }
            last_index = complete.then_some(index);
        }
        // The transfer is over, or about to be: all of its copies are complete, or it has failed.
        let mut done = part.transfer.as_ref().map_or(0, |transfer| transfer.progress().done);
        let over = match (&mut part.transfer, &mut cx) {
            (None, _) => Ok(()),
            (Some(transfer), Some(cx)) => ready!(Pin::new(transfer).poll(cx)).map(drop).map_err(|e| e.error),
            (transfer, None) => match transfer.take() {
                Some(transfer) => transfer.wait().map(drop).map_err(|e| e.error),
                None => Ok(()),
            },
        };
        // Chunks that were under way have completed since; a transfer that was waited for is not there to be asked.
        done = done.max(part.transfer.as_ref().map_or(0, |transfer| transfer.progress().done));
        // Checked after the last byte was read.
        let over = over.and_then(|()| if part.bytes > 0 { part.shard.unchanged() } else { Ok(()) });
        let last = over.and_then(|()| last_index.map_or(Err(Error::Closed), |index| part.out(index)));
        let (is_whole, bytes) = (last_index.is_some(), part.bytes);
        let missing = part.chosen.get(&part.shard, part.next).filter(|_| last.is_err());
        let missing =
            missing.map(|index| Shown(part.shard.tensors[index as usize].name(), NAME).to_string().into());
        let last = last.map_err(|error| match (error, missing) {
            // Those are of the load or of the file, and not of a tensor.
            (
                error @ (Error::Cancelled { .. }
                | Error::Timeout(_)
                | Error::Malformed { .. }
                | Error::Forked),
                _,
            ) => error,
            (cause, Some(tensor)) => {
                let (landed, total) = (self.count - self.left(), self.count);
                Error::Tensor { tensor, landed, total, cause: cause.into() }
            }
            (error, None) => error,
        });
        self.done_before += if is_whole { bytes } else { done };
        self.contiguous_before += if is_whole { bytes } else { 0 };
        self.parts.pop_front();
        if last.is_err() {
            // The transfers of the other files are cancelled. Bytes of theirs that were copied count all the same.
            let sum = self.progress();
            (self.done_before, self.contiguous_before) =
                (sum.done, if is_whole { sum.landed_to } else { self.contiguous_before });
            match cx {
                None => self.cancel_and_wait(),
                Some(_) => self.parts.clear(),
            }
        }
        if self.parts.is_empty() {
            self.ended = Some(Instant::now());
        }
        Poll::Ready(Some(last))
    }
}

impl futures_core::Stream for Loading {
    type Item = Result<DeviceTensor>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.advance(Some(cx))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        // An error takes the place of a tensor, and ends the load.
        (0, Some(self.left()))
    }
}

/// The tensors of a load, each of which the thread waits for: [`Loading::blocking`].
#[derive(Debug)]
#[must_use = "nothing is waited for until it is iterated over"]
pub struct BlockingTensors<'a>(&'a mut Loading);

impl Iterator for BlockingTensors<'_> {
    type Item = Result<DeviceTensor>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next_blocking()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        futures_core::Stream::size_hint(self.0)
    }
}

impl std::iter::FusedIterator for BlockingTensors<'_> {}

impl std::fmt::Debug for Loading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loading").field("progress", &self.progress()).finish_non_exhaustive()
    }
}

/// Looks at a load and cancels it, from any thread, also while another one waits for a tensor: [`Loading::canceller`]. It
/// keeps neither the load nor its memory alive.
///
/// ```
/// use pinpool_safetensors::{LoadCanceller, Loading};
///
/// /// Shows how far a load has come, until it is over.
/// fn show(loading: &Loading) -> std::thread::JoinHandle<()> {
///     let load: LoadCanceller = loading.canceller();
///     std::thread::spawn(move || {
///         while !load.progress().over {
///             println!("{} of {} bytes", load.progress().done, load.progress().total);
///             std::thread::sleep(std::time::Duration::from_millis(100));
///         }
///     })
/// }
/// ```
#[derive(Clone, Debug)]
pub struct LoadCanceller {
    /// Of the files that had not ended, and the bytes of the others: all, and those before which none is missing.
    cancellers: Vec<Canceller>,
    before: u64,
    landed_before: u64,
    total: u64,
    since: Instant,
}

impl LoadCanceller {
    /// Cancels the load, like [`Loading::cancel`].
    pub fn cancel(&self) {
        self.cancellers.iter().for_each(Canceller::cancel);
    }

    /// How far the load has come, as [`Loading::progress`] says it. It is over when all of its transfers are, whether or not
    /// their tensors have come out.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let (mut done, mut landed, mut whole, mut over) = (self.before, self.landed_before, true, true);
        let mut elapsed = Duration::ZERO;
        for progress in self.cancellers.iter().map(Canceller::progress) {
            done += progress.done;
            whole = whole && progress.done == progress.total;
            landed += if whole { progress.total } else { 0 };
            over = over && progress.over;
            elapsed = elapsed.max(progress.elapsed);
        }
        let elapsed = if over { elapsed } else { self.since.elapsed() };
        progress(done, self.total, elapsed, landed, over)
    }
}
