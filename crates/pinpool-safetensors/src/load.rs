//! Loading: where on the device tensors go, and handing them out as their copies complete.
//!
//! [`Loader`] collects what is asked for, chooses tensors, and starts one transfer of the copier for each file, or for each
//! prefix that comes [`first`](Loader::first) in it ([`Part`]), all before the first tensor comes out. [`Driver`] hands
//! the tensors out (`advance`), file by file. It keeps up to which offset the file's bytes are known to be on the device,
//! and asks the transfer only when a tensor ends behind that.
//!
//! # Invariants
//!
//! - The last tensor of a file comes out only when the transfer is over and the file was found unchanged. An error
//!   takes the place of a tensor, and ends the load.
//! - A call that waits (`load`, `Checkpoint::tensor`) returns only when nothing of its transfers is under way: its
//!   `Driver` waits when it is dropped.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::ops::{Deref, Range};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use pinpool::copier::{Canceller, Copier, CopyRange, FileSource, Progress, Reading, Transfer, may_wait};
use pinpool::{DeviceSlice, Error, Result};

use super::header::{Entry, Table, Tensor};
use super::share::Load;
use super::{Checkpoint, Files, NAME, Shard, reserved, shown};

/// The default alignment of tensors, in bytes. Kernels that load 16 bytes at a time need it (`float4`), and so do
/// tensor maps (the CUDA driver API's `cuTensorMapEncodeTiled`: a global address is 16-byte aligned).
const TENSOR_ALIGN: usize = 16;
/// The largest alignment that makes sense: a page of a device.
const LARGEST_ALIGN: usize = 2 << 20;

/// A tensor on the device, with what its file's header says of it. Work submitted to any stream from now on finds the
/// bytes there. The tensors of one file share a block of device memory, which lives until the last handle to any of them
/// is dropped.
#[derive(Clone, Debug)]
pub struct DeviceTensor {
    tensor: Tensor,
    slice: Option<DeviceSlice>,
}

impl DeviceTensor {
    /// Its bytes on the device, from an address on that is a multiple of the loader's alignment. `None` for a tensor
    /// without elements, which has none.
    #[must_use]
    pub fn slice(&self) -> Option<&DeviceSlice> {
        self.slice.as_ref()
    }
}

impl Deref for DeviceTensor {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

type Filter<'a> = Box<dyn FnMut(&Tensor) -> bool + 'a>;
type PlaceOf<'a> = Box<dyn FnMut(&Tensor) -> Result<Option<DeviceSlice>> + 'a>;

/// Where the device memory comes from.
enum Memory<'a> {
    /// The device, in a block for each file.
    Device,
    /// The caller, in a block for each file.
    Blocks(Box<dyn FnMut(usize) -> Result<DeviceSlice> + 'a>),
    /// The caller, for each tensor.
    Places(PlaceOf<'a>),
}

/// Which tensors of a file are loaded by one transfer: the file's number, and the places in its table, in their order.
pub(super) type Chosen = (u32, Vec<u32>);

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
/// assert_eq!(tensors[0].slice().map(|slice| slice.address() % 256), Some(0));
///
/// // To memory of the program's own, such as an allocation for each tensor.
/// let own = |tensor: &Tensor| device.alloc(tensor.bytes() as usize)?.slice(..).map(Some);
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
            first: Vec::new(),
            align: TENSOR_ALIGN,
            memory: Memory::Device,
            given: BTreeMap::new(),
            reading: Reading::Auto,
        }
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

    /// Starts the load. The tensors come out of the returned [`Load`], in the order of the files (but for those that come
    /// [`first`](Self::first)); dropping it cancels the rest.
    ///
    /// # Errors
    /// [`Error::Argument`]; [`Error::Device`] where the device has no memory, or is lost; for memory of the
    /// caller's [`Error::TooSmall`], [`Error::Mismatch`], and [`Error::Argument`] where it is not aligned or overlaps
    /// what was given before, for the place of a tensor as the cause in an [`Error::Tensor`]; [`Error::Read`] for a
    /// file that has become shorter since it was opened, [`Error::Malformed`] for one that was written to;
    /// [`Error::Forked`]. Transfers of other files that were started are cancelled.
    pub fn start(mut self) -> Result<Load> {
        let (chosen, mut driver) = (self.chosen(), Driver::new(false));
        self.begin(chosen, &mut driver)?;
        Ok(Load::new(self.checkpoint.0.clone(), driver))
    }

    /// Loads the tensors, and waits until all are on the device. They come in the order of the files.
    ///
    /// # Errors
    /// As for [`start`](Self::start) and [`Load`]; [`Error::Unsupported`] on a thread that must not wait (in a waker, a
    /// source or a sink).
    pub fn load(mut self) -> Result<Vec<DeviceTensor>> {
        let chosen = self.chosen();
        self.load_chosen(chosen)
    }

    pub(super) fn load_chosen(mut self, chosen: Vec<Chosen>) -> Result<Vec<DeviceTensor>> {
        // Checked before anything begins: this thread could not wait for it afterwards.
        may_wait()?;
        // Made first: where a later file is refused, its drop waits for the transfers that have begun.
        let mut driver = Driver::new(true);
        self.begin(chosen, &mut driver)?;
        let (mut tensors, bytes) = (Vec::new(), driver.count * size_of::<DeviceTensor>());
        reserved(tensors.try_reserve_exact(driver.count), "the list of tensors", bytes)?;
        // (Without a context, `advance` waits.)
        while let Poll::Ready(Some(tensor)) = driver.advance(None) {
            tensors.push(tensor?);
        }
        Ok(tensors)
    }

    /// What is loaded, in the order of the load.
    fn chosen(&mut self) -> Vec<Chosen> {
        // Those of each prefix, and the rest.
        let mut groups = vec![Vec::new(); self.first.len() + 1];
        for (number, shard) in (0..).zip(&self.checkpoint.0.shards) {
            let mut chosen = vec![Vec::new(); groups.len()];
            chosen[self.first.len()].reserve(shard.header.0.entries.len());
            let mut tensor = Tensor { table: shard.header.0.clone(), index: 0 };
            for (index, _) in shard.header.0.listed() {
                tensor.index = index;
                if self.filter.as_mut().is_none_or(|filter| filter(&tensor)) {
                    let group = self.first.iter().position(|prefix| tensor.name().starts_with(prefix));
                    chosen[group.unwrap_or(self.first.len())].push(index);
                }
            }
            groups.iter_mut().zip(chosen).for_each(|(group, chosen)| group.push((number, chosen)));
        }
        groups.into_iter().flatten().filter(|(_, chosen)| !chosen.is_empty()).collect()
    }

    /// Starts the transfers of all files.
    fn begin(&mut self, chosen: Vec<Chosen>, driver: &mut Driver) -> Result<()> {
        if !self.align.is_power_of_two() || self.align > LARGEST_ALIGN {
            return Err(Error::Argument(format!(
                "{} is no alignment: it must be a power of two of at most {LARGEST_ALIGN}",
                self.align
            )));
        }
        for (shard, chosen) in chosen {
            let part = self.begin_file(shard, chosen, driver.count)?;
            if part.chosen.is_empty() {
                continue;
            }
            if let Some(transfer) = &part.transfer {
                driver.watch.total += transfer.progress().total;
                driver.watch.transfers.push(transfer.canceller());
            }
            driver.count += part.chosen.len();
            driver.parts.push_back(part);
        }
        Ok(())
    }

    /// Starts the transfer of a file. `before`: tensors of the load so far.
    fn begin_file(&mut self, shard: u32, mut chosen: Vec<u32>, before: usize) -> Result<Part> {
        let files = &self.checkpoint.0;
        let (table, total) = (files.shards[shard as usize].header.0.clone(), before + chosen.len());
        let (pieces, places) = match self.memory {
            Memory::Places(_) => self.places_of(&table, &mut chosen, total)?,
            Memory::Device | Memory::Blocks(_) => self.block_of(&table, &chosen)?,
        };
        let transfer = (!pieces.is_empty()).then(|| self.upload(files, shard, pieces)).transpose();
        let transfer = transfer.map_err(|error| match (error, &places) {
            (Error::Piece { piece, cause, .. }, Places::Own(_)) => {
                let mut with_bytes =
                    chosen.iter().filter(|index| !table.entries[**index as usize].is_empty());
                let tensor = with_bytes.nth(piece).map_or("", |index| table.name(*index));
                not_there(tensor, 0, total, *cause)
            }
            // All pieces are parts of one block.
            (Error::Piece { cause, .. }, Places::Block(..)) => *cause,
            (error, _) => error,
        })?;
        let (files, chosen) = (files.clone(), chosen.into());
        Ok(Part { files, table, shard, first: before, chosen, places, next: 0, transfer, complete_to: 0 })
    }

    /// Gives the tensors of a file one block of device memory.
    fn block_of(&mut self, table: &Table, chosen: &[u32]) -> Result<(Vec<CopyRange>, Places)> {
        // The ranges to copy: where they start in the file, and where they are in the block. Neighbours are joined before
        // pieces are made: there may be tens of thousands of tensors, and the link idles meanwhile.
        let (mut runs, mut end) = (Vec::<Run>::new(), 0);
        let entries = chosen.iter().map(|index| &table.entries[*index as usize]);
        for entry in entries.filter(|entry| !entry.is_empty()) {
            let place = next_place(end, entry.bytes(), self.align)?;
            end = place.end;
            match runs.last_mut() {
                Some((at, run)) if *at + run.len() as u64 == entry.from && run.end == place.start => {
                    run.end = place.end;
                }
                _ => runs.push((entry.from, place)),
            }
        }
        if runs.is_empty() {
            return Ok((Vec::new(), Places::Own(vec![None; chosen.len()])));
        }
        let block = self.block(end)?;
        let pieces = runs.iter().map(|(at, run)| Ok(CopyRange::new(*at, block.slice(run.clone())?)));
        Ok((pieces.collect::<Result<_>>()?, Places::Block(block, runs)))
    }

    /// Asks the caller for the places of tensors. Those without one are left out.
    fn places_of(
        &mut self,
        table: &Arc<Table>,
        chosen: &mut Vec<u32>,
        total: usize,
    ) -> Result<(Vec<CopyRange>, Places)> {
        let (mut pieces, mut places, mut kept) = (Vec::new(), Vec::new(), Vec::new());
        let mut tensor = Tensor { table: table.clone(), index: 0 };
        for index in chosen.drain(..) {
            tensor.index = index;
            let mut place = None;
            if !tensor.entry().is_empty() {
                let Memory::Places(get) = &mut self.memory else { break };
                let Some(slice) = get(&tensor)? else { continue };
                let slice = self.claim(&slice, tensor.bytes());
                let slice = slice.map_err(|cause| not_there(tensor.name(), 0, total, cause))?;
                pieces.push(CopyRange::new(tensor.range().start, slice.clone()));
                place = Some(slice);
            }
            kept.push(index);
            places.push(place);
        }
        *chosen = kept;
        Ok((pieces, Places::Own(places)))
    }

    /// Starts a transfer.
    fn upload(
        &self,
        files: &Arc<Files>,
        number: u32,
        pieces: Vec<CopyRange>,
    ) -> Result<Transfer<FileSource>> {
        let shard = &files.shards[number as usize];
        shard.unchanged()?;
        let source = match &shard.file {
            Some(file) => FileSource::new(file.clone(), shard.name.clone())?,
            None => {
                let files = files.clone();
                let open = move || files.shards[number as usize].reopened();
                FileSource::opened_by(open, shard.name.clone(), shard.opened.len())
            }
        };
        let transfer = self.copier.upload(source.reading(self.reading), pieces);
        transfer.map_err(|refused| refused.error)
    }

    /// Device memory of so many bytes that starts on the alignment.
    fn block(&mut self, len: usize) -> Result<DeviceSlice> {
        if let Memory::Blocks(memory) = &mut self.memory {
            let slice = memory(len)?;
            return self.claim(&slice, len as u64);
        }
        // A device aligns its memory by itself, mostly to more than is asked for.
        let device = self.copier.device();
        let mut slice = device.alloc(len)?;
        if slice.address() % self.align as u64 != 0 {
            drop(slice);
            slice = device.alloc(len.saturating_add(self.align))?;
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
            return Err(Error::Argument(format!(
                "the memory for tensors starts at {start:#x}, which is no multiple of {align}; align it, or ask the \
                 loader for less"
            )));
        }
        let (below, above) = (self.given.range(..=start).next_back(), self.given.range(start..).next());
        if below.is_some_and(|(_, until)| *until > start) || above.is_some_and(|(from, _)| *from < end) {
            return Err(Error::Argument(
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
    // The alignment is a power of two; a division would be most of a plan's time.
    let start = end.checked_add(align - 1).map(|end| end & !(align - 1));
    let place = start.zip(usize::try_from(len).ok()).and_then(|(start, len)| {
        let end = start.checked_add(len).filter(|end| *end <= isize::MAX as usize)?;
        Some(start..end)
    });
    place.ok_or_else(|| Error::OutOfMemory {
        wanted: usize::MAX,
        text: "the tensors are more than the address space holds".into(),
    })
}

/// The error for a tensor that is not on the device, while `landed` of the load's `total` are.
fn not_there(tensor: &str, landed: usize, total: usize, cause: Error) -> Error {
    Error::Tensor { tensor: shown(tensor, NAME).into(), landed, total, cause: cause.into() }
}

/// Bytes that lie side by side in the file, from this offset on, and in a block.
type Run = (u64, Range<usize>);

/// Where the tensors of a part go.
enum Places {
    /// Into one block.
    Block(DeviceSlice, Vec<Run>),
    /// Each to memory of its own. `None`: it has no bytes, or has come out.
    Own(Vec<Option<DeviceSlice>>),
}

/// What is loaded of one file by one transfer.
pub(super) struct Part {
    files: Arc<Files>,
    /// Of its file.
    table: Arc<Table>,
    pub(super) shard: u32,
    /// How many tensors of the load come before.
    pub(super) first: usize,
    /// Which of the file's tensors, in its order.
    pub(super) chosen: Arc<Vec<u32>>,
    places: Places,
    /// How many have come out.
    next: usize,
    /// `None` where the chosen tensors have no bytes, and when it is over.
    transfer: Option<Transfer<FileSource>>,
    /// All of the file before this offset is on the device, as of the last time that the transfer was asked.
    complete_to: u64,
}

impl Part {
    fn shard(&self) -> &Shard {
        &self.files.shards[self.shard as usize]
    }

    fn is_last(&self) -> bool {
        self.next + 1 == self.chosen.len()
    }

    /// The next tensor, which has not come out.
    fn entry(&self) -> &Entry {
        &self.table.entries[self.chosen[self.next] as usize]
    }

    /// The end of the next tensor in the file.
    fn end(&self) -> u64 {
        let entry = self.entry();
        if entry.is_empty() { 0 } else { entry.to }
    }

    /// The next tensor, which is on the device.
    fn out(&mut self) -> Result<DeviceTensor> {
        let index = self.chosen[self.next];
        let (from, bytes) = (self.entry().from, self.entry().bytes() as usize);
        let slice = match &mut self.places {
            Places::Own(slices) => slices[self.next].take(),
            Places::Block(..) if bytes == 0 => None,
            Places::Block(block, runs) => {
                // The last run that starts no later than the tensor has it.
                let (at, run) = &runs[runs.partition_point(|(at, _)| *at <= from).saturating_sub(1)];
                let start = run.start + (from - at) as usize;
                Some(block.slice(start..start + bytes)?)
            }
        };
        self.next += 1;
        Ok(DeviceTensor { tensor: Tensor { table: self.table.clone(), index }, slice })
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.transfer.iter().for_each(Transfer::cancel);
    }
}

/// Looks at the transfers of a load and cancels them.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    transfers: Vec<Canceller>,
    total: u64,
    pub(super) since: Instant,
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

/// Hands out the tensors of a load, in its order. Not shared: see [`Load`].
pub(super) struct Driver {
    pub(super) parts: VecDeque<Part>,
    /// Tensors of the whole load.
    pub(super) count: usize,
    pub(super) watch: Watch,
    /// Its drop waits until nothing of it is under way.
    waits: bool,
}

impl Driver {
    /// A load of nothing yet.
    fn new(waits: bool) -> Self {
        let watch = Watch { transfers: Vec::new(), total: 0, since: Instant::now() };
        Self { parts: VecDeque::new(), count: 0, watch, waits }
    }

    /// The next tensor, if it is known to be on the device and is not the last of its file.
    pub(super) fn landed(&mut self) -> Option<Result<DeviceTensor>> {
        let part = self.parts.front_mut()?;
        (!part.is_last() && part.end() <= part.complete_to).then(|| part.out())
    }

    /// The next tensor. The thread waits for it, or, with `cx`, the task does. The last tensor of a file comes out when
    /// the file's transfer is over, since the caller need not call again to learn of an error.
    pub(super) fn advance(&mut self, mut cx: Option<&mut Context<'_>>) -> Poll<Option<Result<DeviceTensor>>> {
        if pinpool::forked() {
            self.parts.clear();
            return Poll::Ready(Some(Err(Error::Forked)));
        }
        if let Some(tensor) = self.landed() {
            return Poll::Ready(Some(tensor));
        }
        let Some(part) = self.parts.front_mut() else { return Poll::Ready(None) };
        let end = part.end();
        if let Some(transfer) = part.transfer.as_mut().filter(|_| end > part.complete_to) {
            let _ = match &mut cx {
                None => transfer.wait_landed(end),
                Some(cx) => ready!(transfer.poll_landed(cx, end)),
            };
            part.complete_to = transfer.progress().landed_to;
        }
        let complete = end <= part.complete_to;
        if complete && !part.is_last() {
            return Poll::Ready(Some(part.out()));
        }
        // The transfer is over, or about to be: all of its copies are complete, or it has failed.
        let has_bytes = part.transfer.is_some();
        let over = match (&mut part.transfer, &mut cx) {
            (None, _) => None,
            (Some(transfer), Some(cx)) => Some(ready!(Pin::new(transfer).poll(cx))),
            (transfer, None) => transfer.take().map(Transfer::wait),
        };
        let over = over.map_or(Ok(()), |over| over.map(drop).map_err(|refused| refused.error));
        // Checked after the last byte was read.
        let over = over.and_then(|()| if has_bytes { part.shard().unchanged() } else { Ok(()) });
        let last = over.and_then(|()| if complete { part.out() } else { Err(Error::Closed) });
        let last = last.map_err(|error| match error {
            // Those are of the load or of the file, and not of a tensor.
            Error::Cancelled { .. } | Error::Timeout(_) | Error::Malformed { .. } | Error::Forked => error,
            cause => {
                let tensor = part.table.name(part.chosen[part.next]);
                not_there(tensor, part.first + part.next, self.count, cause)
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
        Poll::Ready(Some(last))
    }

    /// Cancels all transfers that are left, and then waits for each until the device is done with it.
    fn cancel_and_wait(&mut self) {
        self.watch.cancel();
        for transfer in self.parts.drain(..).filter_map(|mut part| part.transfer.take()) {
            let _ = transfer.wait();
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if self.waits {
            self.cancel_and_wait();
        }
    }
}
