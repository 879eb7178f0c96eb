//! Loading: where on the device tensors go, and handing them out as their copies complete.
//!
//! # How it works
//!
//! [`Loader`] collects what is asked for. `start_into` goes through the files in order: it chooses tensors, joins
//! neighbours to pieces, gets one block of device memory for all of a file, and starts one transfer of the copier for it
//! ([`LoadPart`]). All files are queued before the first tensor comes out.
//!
//! A program that has memory for each tensor gives it by [`Loader::places`]. What is to come [`first`](Loader::first) has
//! transfers of its own, before the others.
//!
//! [`Loading`] hands the tensors out (`advance`), file by file. It keeps up to which offset the file's bytes are known
//! to be on the device, and asks the transfer only when a tensor ends behind that.
//!
//! # Invariants
//!
//! - The last tensor of a file comes out only when the transfer is over and the file was found unchanged. An error
//!   takes the place of a tensor, and ends the load.
//! - A call that waits (`load`, `Checkpoint::tensor`) returns only when nothing of its transfers is under way: its
//!   `Loading` waits when it is dropped.

use std::collections::{BTreeMap, VecDeque};
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use pinpool::copier::{Canceller, Copier, FileSource, Piece, Progress, Reading, Transfer, may_wait};
use pinpool::{DeviceSlice, Error, Result};

use super::header::Tensor;
use super::shared::SharedLoad;
use super::tensor::DeviceTensor;
use super::{Checkpoint, NAME, Shard, reserved, shown};

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
/// # use pinpool_safetensors::{Checkpoint, Tensor};
/// # let path = std::env::temp_dir().join(format!("pinpool-loader-{}.safetensors", std::process::id()));
/// # let header = br#"{"h.0.w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
/// # std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header, b"abcd"].concat())?;
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// # let copier = Copier::builder(&pool, &device).build()?;
/// # let checkpoint = Checkpoint::open(&path)?;
/// let tensors = checkpoint.loader(&copier).filter(|tensor| tensor.name().starts_with("h.0.")).align(256).load()?;
/// assert_eq!(tensors[0].address().map(|address| address % 256), Some(0));
///
/// // To memory of the program's own, such as an allocation for each tensor.
/// let own = |tensor: &Tensor| device.alloc(tensor.len() as usize)?.slice(..).map(Some);
/// let tensors = checkpoint.loader(&copier).places(own).load()?;
/// # assert_eq!(tensors.len(), 1);
/// # std::fs::remove_file(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "nothing is loaded until `start` or `load`"]
pub struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    copier: &'a Copier,
    filter: Option<Filter<'a>>,
    /// The one tensor that is loaded, in place of all: its file, and its place there.
    only: Option<(&'a Arc<Shard>, u32)>,
    first: Vec<String>,
    align: usize,
    memory: Memory<'a>,
    /// The memory that the caller gave, by address: start and end.
    given: BTreeMap<u64, u64>,
    reading: Reading,
}

impl<'a> Loader<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint, copier: &'a Copier) -> Self {
        Self {
            checkpoint,
            copier,
            filter: None,
            only: None,
            first: Vec::new(),
            align: TENSOR_ALIGN,
            memory: Memory::Device,
            given: BTreeMap::new(),
            reading: Reading::Auto,
        }
    }

    /// Loads only this tensor.
    pub(super) fn only(mut self, shard: &'a Arc<Shard>, place: u32) -> Self {
        self.only = Some((shard, place));
        self
    }

    /// Loads only tensors for which `filter` is true. Default: all.
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
    pub fn places(mut self, get: impl FnMut(&Tensor) -> Result<Option<DeviceSlice>> + 'a) -> Self {
        self.memory = Memory::Places(Box::new(get));
        self
    }

    /// How the files are read. Default: [`Reading::Auto`].
    pub fn reading(mut self, reading: Reading) -> Self {
        self.reading = reading;
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
    pub fn start(self) -> Result<Loading> {
        let mut loading = Loading::none(false);
        self.start_into(&mut loading)?;
        Ok(loading)
    }

    /// [`start`](Self::start) for calls that wait.
    pub(super) fn start_waiting(self) -> Result<Loading> {
        // Checked before anything begins: this thread could not wait for it afterwards.
        may_wait()?;
        // Made first: where a later file is refused, its drop waits for the transfers that have begun.
        let mut loading = Loading::none(true);
        self.start_into(&mut loading)?;
        Ok(loading)
    }

    /// Loads the tensors, and waits until all are on the device. They come in the order of the files.
    ///
    /// # Errors
    /// As for [`start`](Self::start) and [`Loading`]; [`Error::Unsupported`] on a thread that must not wait (in a
    /// waker, a source or a sink).
    pub fn load(self) -> Result<Vec<DeviceTensor>> {
        let mut loading = self.start_waiting()?;
        let (mut tensors, count) = (Vec::new(), loading.left());
        reserved(tensors.try_reserve_exact(count), "the list of tensors", count * size_of::<DeviceTensor>())?;
        for tensor in loading.blocking() {
            tensors.push(tensor?);
        }
        Ok(tensors)
    }

    fn start_into(mut self, loading: &mut Loading) -> Result<()> {
        if !self.align.is_power_of_two() || self.align > LARGEST_ALIGN {
            return Err(Error::BadAlignment { align: self.align, largest: LARGEST_ALIGN });
        }
        for (shard, chosen) in self.chosen() {
            let part = match self.memory {
                Memory::Places(_) => self.start_places(shard, chosen, loading.count)?,
                Memory::Device | Memory::Blocks(_) => self.start_block(shard, chosen)?,
            };
            if part.left() > 0 {
                if let Some(transfer) = &part.transfer {
                    loading.watch.total += transfer.progress().total;
                    loading.watch.transfers.push(transfer.canceller());
                }
                loading.count += part.left();
                loading.parts.push_back(part);
            }
        }
        if loading.parts.is_empty() {
            loading.end();
        }
        Ok(())
    }

    /// The files and which of their tensors are loaded, in the order of the load.
    fn chosen(&mut self) -> Vec<(&'a Arc<Shard>, Vec<u32>)> {
        if let Some((shard, place)) = self.only {
            return vec![(shard, vec![place])];
        }
        // Those of each prefix, and the rest.
        let mut groups = vec![Vec::new(); self.first.len() + 1];
        for shard in &self.checkpoint.shards {
            let mut chosen = vec![Vec::new(); groups.len()];
            for (place, tensor) in (0..).zip(shard.tensors.iter()) {
                if self.filter.as_mut().is_none_or(|filter| filter(tensor)) {
                    let group = self.first.iter().position(|prefix| tensor.name().starts_with(prefix));
                    chosen[group.unwrap_or(self.first.len())].push(place);
                }
            }
            groups.iter_mut().zip(chosen).for_each(|(group, chosen)| group.push((shard, chosen)));
        }
        groups.into_iter().flatten().filter(|(_, chosen)| !chosen.is_empty()).collect()
    }

    /// Starts to load tensors of a file to one block of device memory.
    fn start_block(&mut self, shard: &Arc<Shard>, chosen: Vec<u32>) -> Result<LoadPart> {
        // Where each goes, and the ranges to copy, in the file and in the block. Neighbours are joined before pieces are
        // made: there may be tens of thousands of tensors, and the link idles meanwhile.
        let (mut ranges, mut runs, mut end) = (Vec::new(), Vec::<(Range<u64>, Range<usize>)>::new(), 0);
        for tensor in chosen.iter().map(|place| &shard.tensors[*place as usize]) {
            if tensor.is_empty() {
                ranges.push(0..0);
                continue;
            }
            let (file, place) = (tensor.range(), next_place(end, tensor.len(), self.align)?);
            end = place.end;
            match runs.last_mut() {
                Some((from, to)) if from.end == file.start && to.end == place.start => {
                    (from.end, to.end) = (file.end, place.end);
                }
                _ => runs.push((file, place.clone())),
            }
            ranges.push(place);
        }
        let mut part = LoadPart::new(shard, chosen);
        if runs.is_empty() {
            part.places.resize(part.chosen.len(), None);
            return Ok(part);
        }
        let block = self.block(end)?;
        let pieces = runs.into_iter().map(|(file, place)| Ok(Piece::new(file.start, block.slice(place)?)));
        // All pieces are parts of one block.
        self.begin(&mut part, pieces.collect::<Result<_>>()?).map_err(|error| match error {
            Error::Piece { cause, .. } => *cause,
            error => error,
        })?;
        let places = ranges.into_iter().map(|place| match place.is_empty() {
            true => Ok(None),
            false => block.slice(place).map(Some),
        });
        part.places = places.collect::<Result<_>>()?;
        Ok(part)
    }

    /// Starts to load tensors to places of the caller's. `before`: tensors of the load so far.
    fn start_places(&mut self, shard: &Arc<Shard>, chosen: Vec<u32>, before: usize) -> Result<LoadPart> {
        let (total, mut pieces) = (before + chosen.len(), Vec::new());
        let refused = |tensor: &Tensor, cause: Error| {
            let tensor = shown(tensor.name(), NAME).into();
            Error::Tensor { tensor, landed: 0, total, cause: cause.into() }
        };
        let mut part = LoadPart::new(shard, Vec::new());
        for index in chosen {
            let tensor = &shard.tensors[index as usize];
            let mut place = None;
            if !tensor.is_empty() {
                let Memory::Places(get) = &mut self.memory else { break };
                let Some(slice) = get(tensor)? else { continue };
                let slice = self.claim(&slice, tensor.len()).map_err(|cause| refused(tensor, cause))?;
                pieces.push(Piece::new(tensor.range().start, slice.clone()));
                place = Some(slice);
            }
            part.chosen.push(index);
            part.places.push(place);
        }
        if !pieces.is_empty() {
            self.begin(&mut part, pieces).map_err(|error| match error {
                Error::Piece { piece, cause, .. } => {
                    let mut with_bytes = part.tensors().filter(|tensor| !tensor.is_empty());
                    with_bytes.nth(piece).map_or(Error::Closed, |tensor| refused(tensor, *cause))
                }
                error => error,
            })?;
        }
        Ok(part)
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
        let transfer = self.copier.upload_file_ranges(source.reading(self.reading), pieces);
        part.transfer = Some(transfer.map_err(|refused| refused.error)?);
        Ok(())
    }

    /// Device memory of so many bytes that starts on the alignment.
    fn block(&mut self, len: usize) -> Result<DeviceSlice> {
        if let Memory::Blocks(memory) = &mut self.memory {
            let slice = memory(len)?;
            return self.claim(&slice, len as u64);
        }
        // A device aligns its memory by itself, mostly to more than is asked for.
        let device = self.copier.device();
        let mut slice = DeviceSlice::from(device.alloc(len)?);
        if slice.address() % self.align as u64 != 0 {
            drop(slice);
            slice = DeviceSlice::from(device.alloc(len.saturating_add(self.align))?);
        }
        let skip = (slice.address().next_multiple_of(self.align as u64) - slice.address()) as usize;
        slice.slice(skip..skip + len)
    }

    /// The front of memory of the caller's, which nothing else of the load uses. Bytes beyond `len` are not written to.
    fn claim(&mut self, slice: &DeviceSlice, len: u64) -> Result<DeviceSlice> {
        let need = usize::try_from(len).unwrap_or(usize::MAX);
        if slice.len() < need {
            return Err(Error::TooSmall { need, have: slice.len() });
        }
        let (start, end, align) = (slice.address(), slice.address() + len, self.align);
        if start % align as u64 != 0 {
            return Err(Error::Config(format!(
                "the memory for tensors starts at {start:#x}, which is no multiple of {align}; align it, or ask the \
                 loader for less"
            )));
        }
        let (below, above) = (self.given.range(..=start).next_back(), self.given.range(start..).next());
        if below.is_some_and(|(_, until)| *until > start) || above.is_some_and(|(from, _)| *from < end) {
            return Err(Error::Config(
                "its memory overlaps what was given before; give each tensor, or each file, memory of its own".into(),
            ));
        }
        self.given.insert(start, end);
        slice.slice(..need)
    }
}

impl std::fmt::Debug for Loader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loader")
            .field("first", &self.first)
            .field("align", &self.align)
            .finish_non_exhaustive()
    }
}

/// Where a tensor of `len` bytes, at least one, goes in a block behind another that ends at `end`.
fn next_place(end: usize, len: u64, align: usize) -> Result<Range<usize>> {
    let start = end.checked_next_multiple_of(align);
    let place = start.zip(usize::try_from(len).ok()).and_then(|(start, len)| {
        let end = start.checked_add(len).filter(|end| *end <= isize::MAX as usize)?;
        Some(start..end)
    });
    place.ok_or_else(|| Error::OutOfMemory {
        wanted: usize::MAX,
        text: "the tensors are more than the address space holds".into(),
    })
}

/// What is loaded of one file by one transfer.
struct LoadPart {
    shard: Arc<Shard>,
    /// Which of the file's tensors, in its order.
    chosen: Vec<u32>,
    /// Where each of them goes. `None`: it has no bytes, or has come out.
    places: Vec<Option<DeviceSlice>>,
    /// How many have come out.
    next: usize,
    /// `None` where the chosen tensors have no bytes, and when it is over.
    transfer: Option<Transfer<FileSource>>,
    /// All of the file before this offset is on the device, as of the last time that the transfer was asked.
    complete_to: u64,
}

impl LoadPart {
    fn new(shard: &Arc<Shard>, chosen: Vec<u32>) -> Self {
        Self { shard: shard.clone(), chosen, places: Vec::new(), next: 0, transfer: None, complete_to: 0 }
    }

    /// The tensors that have not come out.
    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.chosen[self.next..].iter().map(|place| &self.shard.tensors[*place as usize])
    }

    fn left(&self) -> usize {
        self.chosen.len() - self.next
    }

    /// The next tensor, which is on the device.
    fn out(&mut self) -> DeviceTensor {
        let (index, slice) = (self.chosen[self.next], self.places[self.next].take());
        self.next += 1;
        DeviceTensor::new(self.shard.tensors.clone(), index, slice)
    }
}

impl Drop for LoadPart {
    fn drop(&mut self) {
        self.transfer.iter().for_each(Transfer::cancel);
    }
}

/// Looks at the transfers of a load and cancels them.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    transfers: Vec<Canceller>,
    total: u64,
    since: Instant,
}

impl Watch {
    pub(super) fn cancel(&self) {
        self.transfers.iter().for_each(Canceller::cancel);
    }

    /// The load is over when all of its transfers are.
    pub(super) fn progress(&self) -> Progress {
        let mut all = Progress::default();
        (all.total, all.over) = (self.total, true);
        let mut whole = true;
        for progress in self.transfers.iter().map(Canceller::progress) {
            all.done += progress.done;
            whole = whole && progress.done == progress.total;
            all.landed_to += if whole { progress.total } else { 0 };
            all.over = all.over && progress.over;
            all.elapsed = all.elapsed.max(progress.elapsed);
        }
        if !all.over {
            all.elapsed = self.since.elapsed();
        }
        all
    }
}

/// A load under way. [`next_tensor`](Self::next_tensor) gives a task the next tensor, on any runtime. For threads, which
/// wait, there are [`next_blocking`](Self::next_blocking) and the iterator [`blocking`](Self::blocking).
///
/// **Dropped, it cancels the rest**; tensors that have come out stay. An error comes in the place of the first tensor
/// that cannot be loaded, and ends the load. The load has ended when the last tensor comes out: the copier has then
/// given back all memory that it used for it, and no further call is needed. Another thread looks at a load and cancels
/// it by a handle of [`share`](Self::share).
///
/// # Errors
/// Of each item: [`Error::Tensor`] with the name of the first tensor that is not on the device, how many are, and the
/// cause ([`Error::Read`] and [`Error::Shrunk`] with file and offset, [`Error::Transfer`] with the error of the pool or
/// the device); [`Error::Cancelled`]; [`Error::Timeout`] after the copier's deadline ([`Copier::with_timeout`]), when the
/// tensors that have arrived by then have come out; [`Error::Malformed`] in the place of the last tensor of a file that
/// was written to meanwhile, whose other tensors may then be wrong; [`Error::Forked`].
#[must_use = "dropping it cancels the load"]
pub struct Loading {
    parts: VecDeque<LoadPart>,
    /// Tensors of the whole load.
    count: usize,
    watch: Watch,
    /// How far it had come at its end.
    ended: Option<Progress>,
    /// Its drop waits until nothing of it is under way.
    waits: bool,
}

impl Loading {
    /// A load of nothing yet.
    fn none(waits: bool) -> Self {
        let watch = Watch { transfers: Vec::new(), total: 0, since: Instant::now() };
        Self { parts: VecDeque::new(), count: 0, watch, ended: None, waits }
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
    pub fn blocking(&mut self) -> impl Iterator<Item = Result<DeviceTensor>> {
        std::iter::from_fn(|| self.next_blocking())
    }

    /// The tensors for many threads and tasks, each of which waits for those that it needs.
    pub fn share(self) -> SharedLoad {
        let watch = self.watch.clone();
        SharedLoad::new(self, watch)
    }

    /// The tensors that have not come out yet.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.parts.iter().flat_map(LoadPart::tensors)
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
        self.ended.unwrap_or_else(|| {
            let mut progress = self.watch.progress();
            (progress.over, progress.elapsed) = (false, self.watch.since.elapsed());
            progress
        })
    }

    /// Cancels the load: no further chunk is begun. Tensors that are on the device still come out, and then
    /// [`Error::Cancelled`].
    pub fn cancel(&self) {
        self.watch.cancel();
    }

    fn end(&mut self) {
        let mut progress = self.watch.progress();
        progress.over = true;
        self.ended.get_or_insert(progress);
    }

    /// Cancels all transfers that are left, and then waits for each until the device is done with it.
    fn cancel_and_wait(&mut self) {
        self.cancel();
        for transfer in self.parts.drain(..).filter_map(|mut part| part.transfer.take()) {
            let _ = transfer.wait();
        }
    }

    /// The next tensor. The thread waits for it, or, with `cx`, the task does. The last tensor of a file comes out when
    /// the file's transfer is over, since the caller need not call again to learn of an error.
    fn advance(&mut self, mut cx: Option<&mut Context<'_>>) -> Poll<Option<Result<DeviceTensor>>> {
        let Some(part) = self.parts.front_mut() else { return Poll::Ready(None) };
        if pinpool::forked() {
            self.parts.clear();
            self.end();
            return Poll::Ready(Some(Err(Error::Forked)));
        }
        let end =
            part.tensors().next().map_or(0, |tensor| if tensor.is_empty() { 0 } else { tensor.range().end });
        let mut complete = end <= part.complete_to;
        if let Some(transfer) = part.transfer.as_mut().filter(|_| !complete) {
            complete = match &mut cx {
                None => transfer.wait_landed(end),
                Some(cx) => ready!(transfer.poll_landed(cx, end)),
            };
            part.complete_to = transfer.progress().landed_to;
        }
        if complete && part.left() > 1 {
            return Poll::Ready(Some(Ok(part.out())));
        }
        let has_bytes = part.transfer.is_some();
        // The transfer is over, or about to be: all of its copies are complete, or it has failed.
        let over = match (&mut part.transfer, &mut cx) {
            (None, _) => None,
            (Some(transfer), Some(cx)) => Some(ready!(Pin::new(transfer).poll(cx))),
            (transfer, None) => transfer.take().map(Transfer::wait),
        };
        let over = over.map_or(Ok(()), |over| over.map(drop).map_err(|refused| refused.error));
        // Checked after the last byte was read.
        let over = over.and_then(|()| if has_bytes { part.shard.unchanged() } else { Ok(()) });
        let tensor = part.tensors().next().map(|tensor| shown(tensor.name(), NAME).into());
        let last = match over {
            Ok(()) if complete => Ok(part.out()),
            Ok(()) => Err(Error::Closed),
            Err(error) => Err(error),
        };
        let last = last.map_err(|error| match (error, tensor) {
            // Those are of the load or of the file, and not of a tensor.
            (
                error @ (Error::Cancelled { .. }
                | Error::Timeout(_)
                | Error::Malformed { .. }
                | Error::Forked),
                _,
            )
            | (error, None) => error,
            (cause, Some(tensor)) => {
                let (landed, total) = (self.count - self.left(), self.count);
                Error::Tensor { tensor, landed, total, cause: cause.into() }
            }
        });
        self.parts.pop_front();
        if last.is_err() {
            // The transfers of the other files are cancelled. Bytes of theirs that were copied count all the same.
            match cx {
                None => self.cancel_and_wait(),
                Some(_) => self.parts.clear(),
            }
        }
        if self.parts.is_empty() {
            self.end();
        }
        Poll::Ready(Some(last))
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        if self.waits {
            self.cancel_and_wait();
        }
    }
}

impl std::fmt::Debug for Loading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loading").field("progress", &self.progress()).finish_non_exhaustive()
    }
}
