//! Loading: where on the device tensors go, and handing them out as they arrive.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use super::header::Tensor;
use super::sums::Sums;
use super::tensor::DeviceTensor;
use super::{Checkpoint, Shard, room};
use crate::copy::pipeline::{Canceller, FileSource, Piece, Pipeline, Progress, Reading, Transfer, may_wait};
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result};

/// Where tensors start, unless told: on multiples of as many bytes. Kernels that load 16 bytes at a time need it
/// (`float4`), and so do tensor maps (the CUDA driver API's `cuTensorMapEncodeTiled`: a global address is 16-byte
/// aligned).
const TENSOR_ALIGN: usize = 16;
/// The largest alignment that makes sense: a page of the device's.
const LARGEST_ALIGN: usize = 2 << 20;

type Filter<'a> = Box<dyn FnMut(&Tensor) -> bool + 'a>;
type MemorySource<'a> = Box<dyn FnMut(usize) -> Result<DeviceSlice> + 'a>;

/// Sets up a load: which tensors, and where they go.
#[must_use = "nothing is loaded until `start`, `load` or `for_each`"]
pub struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    pipeline: &'a Pipeline,
    prefixes: Vec<String>,
    filter: Option<Filter<'a>>,
    align: usize,
    memory: Option<MemorySource<'a>>,
    checksums: bool,
    reading: Reading,
}

impl<'a> Loader<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint, pipeline: &'a Pipeline) -> Self {
        Self {
            checkpoint,
            pipeline,
            prefixes: Vec::new(),
            filter: None,
            align: TENSOR_ALIGN,
            memory: None,
            checksums: false,
            reading: Reading::Auto,
        }
    }

    /// Loads tensors whose name starts with this; called several times, with any of them. Default: all.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefixes.push(prefix.into());
        self
    }

    /// Loads tensors of which this is true (and whose name has the prefix, if one was named). Default: all.
    pub fn filter(mut self, filter: impl FnMut(&Tensor) -> bool + 'a) -> Self {
        self.filter = Some(Box::new(filter));
        self
    }

    /// Starts each tensor on a multiple of so many bytes, a power of two of at most 2 MiB. Tensors whose length is a
    /// multiple of it lie side by side and are copied together; behind others there is a gap. Default: 16.
    pub fn align(mut self, bytes: usize) -> Self {
        self.align = bytes;
        self
    }

    /// Gets the device memory by this call, once for each file of which anything is loaded: for so many bytes at least,
    /// starting on a multiple of the alignment. Default: [`Device::alloc`](crate::Device::alloc).
    pub fn memory(mut self, get: impl FnMut(usize) -> Result<DeviceSlice> + 'a) -> Self {
        self.memory = Some(Box::new(get));
        self
    }

    /// Takes the checksum of each tensor's bytes as they are read: [`DeviceTensor::checksum`]. The files then go
    /// through the CPU, which costs some speed. Default: no.
    pub fn checksums(mut self, take: bool) -> Self {
        self.checksums = take;
        self
    }

    /// How the files are read. Default: [`Reading::Auto`].
    pub fn reading(mut self, reading: Reading) -> Self {
        self.reading = reading;
        self
    }

    /// Starts it. The tensors come out of what is returned, in the order of the files; dropping that cancels the rest.
    ///
    /// # Errors
    /// [`Error::BadAlignment`]; what allocating says; [`Error::TooSmall`], [`Error::WrongDevice`] and [`Error::Config`]
    /// for memory of your own that does not fit, or is given for two files; [`Error::Shrunk`] for a file that has
    /// become shorter since it was opened, [`Error::Malformed`] for one that was written to; a lost device. What was
    /// started for other files is cancelled.
    pub fn start(mut self) -> Result<Loading> {
        let mut loading = Loading::none();
        let choose = self.choice();
        self.start_into(&mut loading, choose)?;
        Ok(loading)
    }

    /// The same for calls that wait.
    fn start_settled(mut self) -> Result<SettledLoad> {
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

    /// Starts it with the tensors that are chosen of each shard, for a call that waits.
    pub(super) fn start_with(self, choose: impl FnMut(&Shard) -> Chosen) -> Result<SettledLoad> {
        // Before anything has begun, which could not be waited for either.
        may_wait()?;
        // What has begun when a later shard is refused is waited for too.
        let mut settled = SettledLoad(Loading::none());
        self.start_into(&mut settled.0, choose)?;
        Ok(settled)
    }

    fn start_into(mut self, loading: &mut Loading, mut choose: impl FnMut(&Shard) -> Chosen) -> Result<()> {
        crate::os::check_fork()?;
        if !self.align.is_power_of_two() || self.align > LARGEST_ALIGN {
            return Err(Error::BadAlignment { align: self.align, largest: LARGEST_ALIGN });
        }
        for shard in &self.checkpoint.shards {
            let chosen = choose(shard);
            if chosen.count(shard) > 0 {
                let part = self.start_shard(shard, chosen, &loading.parts)?;
                loading.total += part.bytes;
                loading.parts.push_back(part);
            }
        }
        loading.ended = loading.parts.is_empty().then(Instant::now);
        Ok(())
    }

    /// Ranges of the file, and of the block, that are copied; the block's end, and how many bytes that are. Neighbours
    /// are joined here, not by a piece for each tensor: there may be tens of thousands, and the link waits.
    #[allow(clippy::type_complexity, reason = "three numbers")]
    fn runs(&self, shard: &Shard, chosen: &Chosen) -> Result<(Vec<(Range<u64>, Range<usize>)>, usize, u64)> {
        // Found out when it was opened: nothing is to be done for each of them.
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
        let mut part = LoadPart {
            shard: shard.clone(),
            chosen,
            next: 0,
            layout: Layout::new(self.align),
            block: None,
            transfer: None,
            landed_to: 0,
            sums: None,
            bytes,
        };
        if bytes == 0 {
            return Ok(part);
        }
        let block = self.block(end)?;
        let apart = |other: &DeviceSlice| {
            let ends = |slice: &DeviceSlice, len| (slice.address(), slice.address() + len as u64);
            let (one, two) = (ends(&block, end), ends(other, other.len()));
            one.1 <= two.0 || two.1 <= one.0
        };
        if !before.iter().filter_map(|part| part.block.as_ref()).all(apart) {
            return Err(Error::Config(format!(
                "the memory for the tensors of {} overlaps that for another file's; give each file memory of its own",
                shard.name
            )));
        }
        shard.unchanged()?;
        let mut source = FileSource::new(shard.file.clone(), shard.name.clone())?.reading(self.reading);
        if self.checksums {
            let sums = Arc::new(Sums::new(part.chosen.tensors(shard)));
            source = source.tap(sums.clone());
            part.sums = Some(sums);
        }
        let pieces = runs.into_iter().map(|(file, place)| Ok(Piece::new(file.start, block.slice(place)?)));
        let pieces = pieces.collect::<Result<_>>()?;
        part.transfer =
            Some(self.pipeline.upload_file_pieces(source, pieces).map_err(|refused| refused.error)?);
        part.block = Some(block);
        Ok(part)
    }

    /// Device memory of so many bytes that starts on the alignment.
    fn block(&mut self, len: usize) -> Result<DeviceSlice> {
        let aligned = |slice: &DeviceSlice| slice.address() % self.align as u64 == 0;
        if let Some(memory) = &mut self.memory {
            let slice = memory(len)?;
            if slice.len() < len {
                return Err(Error::TooSmall { need: len, have: slice.len() });
            }
            if !aligned(&slice) {
                return Err(Error::Config(format!(
                    "the memory for tensors starts at {:#x}, which is no multiple of {}; align it, or ask the loader for less",
                    slice.address(),
                    self.align
                )));
            }
            // What is beyond is the caller's still.
            return slice.slice(..len);
        }
        let slice = DeviceSlice::from(self.pipeline.device().alloc(len)?);
        if aligned(&slice) {
            return Ok(slice);
        }
        drop(slice);
        // Rare: devices align by themselves, and better than most want.
        let slice = DeviceSlice::from(self.pipeline.device().alloc(len.saturating_add(self.align))?);
        let skip = (slice.address().next_multiple_of(self.align as u64) - slice.address()) as usize;
        slice.slice(skip..skip + len)
    }

    /// Loads everything, and waits for it: the tensors in the order of the files.
    ///
    /// # Errors
    /// As for [`start`](Self::start) and [`Loading`]; [`Error::Unsupported`] on a thread of the library's (in a waker,
    /// a source or a sink), which must not wait.
    pub fn load(self) -> Result<Vec<DeviceTensor>> {
        let mut loading = self.start_settled()?;
        let (mut tensors, count) = (Vec::new(), loading.0.left());
        room(tensors.try_reserve_exact(count), "the list of tensors", count * size_of::<DeviceTensor>())?;
        for tensor in &mut loading.0 {
            tensors.push(tensor?);
        }
        Ok(tensors)
    }

    /// Loads everything, and calls `each` for each tensor when it has arrived, while others are on their way.
    ///
    /// # Errors
    /// As for [`load`](Self::load), and the first that `each` returns, which ends it.
    pub fn for_each(self, mut each: impl FnMut(DeviceTensor) -> Result<()>) -> Result<()> {
        self.start_settled()?.0.try_for_each(|tensor| each(tensor?))
    }
}

/// A load of a call that returns when nothing of it is on its way any more, whichever way it ends: memory of the
/// caller's would else be written after it.
pub(super) struct SettledLoad(pub(super) Loading);

impl Drop for SettledLoad {
    fn drop(&mut self) {
        self.0.settle();
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
    /// By their places in the shard, in its order.
    Some(Vec<u32>),
}

impl Chosen {
    fn count(&self, shard: &Shard) -> usize {
        match self {
            Self::All => shard.tensors.len(),
            Self::Some(places) => places.len(),
        }
    }

    /// The place in the shard of the one with so many before it.
    fn get(&self, shard: &Shard, number: usize) -> Option<u32> {
        match self {
            // (A header has no room for more than that.)
            Self::All => (number < shard.tensors.len()).then_some(number as u32),
            Self::Some(places) => places.get(number).copied(),
        }
    }

    fn tensors<'a>(&'a self, shard: &'a Shard) -> impl Iterator<Item = &'a Tensor> {
        (0..self.count(shard))
            .filter_map(|number| self.get(shard, number))
            .map(|place| &shard.tensors[place as usize])
    }
}

/// Where tensors go in a block: in their order, each on the alignment, with nothing between them but what that takes.
/// Worked out when it is planned, and once more as they are handed out.
#[derive(Clone, Copy)]
struct Layout {
    align: usize,
    /// One past the last.
    end: usize,
}

impl Layout {
    fn new(align: usize) -> Self {
        Self { align, end: 0 }
    }

    /// The place of the next tensor, which has so many bytes, and some.
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

/// What is loaded of one file.
struct LoadPart {
    shard: Arc<Shard>,
    chosen: Chosen,
    /// How many were handed out, and where they are.
    next: usize,
    layout: Layout,
    /// `None`, as the transfer: there are no bytes.
    block: Option<DeviceSlice>,
    transfer: Option<Transfer<FileSource>>,
    /// All of the file before this offset has arrived, as far as we have asked.
    landed_to: u64,
    sums: Option<Arc<Sums>>,
    bytes: u64,
}

impl LoadPart {
    /// How many were not handed out.
    fn left(&self) -> usize {
        self.chosen.count(&self.shard) - self.next
    }

    /// The next tensor, which has arrived.
    fn out(&mut self, index: u32) -> Result<DeviceTensor> {
        self.next += 1;
        let tensor = &self.shard.tensors[index as usize];
        let slice = match &self.block {
            Some(block) if !tensor.is_empty() => Some(block.slice(self.layout.put(tensor.len())?)?),
            _ => None,
        };
        let sum = self.sums.as_ref().and_then(|sums| sums.of(&tensor.range()));
        Ok(DeviceTensor::new(self.shard.tensors.clone(), index, slice, sum))
    }
}

/// Tensors on their way. An iterator, which waits for the next; and a [`Stream`](futures_core::Stream), of no
/// particular runtime.
///
/// **Dropped, it cancels the rest**; tensors that were handed out stay. After an error, which comes in the place of the
/// first tensor that it took, there is nothing more. With the last tensor it has ended: nobody need ask for one more,
/// and the pipeline has given back everything that it had for it.
///
/// # Errors
/// Of each item: [`Error::Read`] and [`Error::Shrunk`] with file and offset; [`Error::Transfer`] with what the pool or
/// the device said; [`Error::Cancelled`]; [`Error::Malformed`], in the place of the last tensor of a file that was
/// written to meanwhile: then what came of it may be wrong.
#[must_use = "dropping it cancels the load"]
pub struct Loading {
    parts: VecDeque<LoadPart>,
    total: u64,
    /// Bytes that have arrived of files that are done with, and of these, bytes before which nothing is missing.
    before: u64,
    landed: u64,
    since: Instant,
    ended: Option<Instant>,
}

impl Loading {
    /// Of nothing yet.
    fn none() -> Self {
        Self { parts: VecDeque::new(), total: 0, before: 0, landed: 0, since: Instant::now(), ended: None }
    }

    /// The next tensor. `None`: there are no more.
    ///
    /// # Errors
    /// See [`Loading`].
    pub async fn next_tensor(&mut self) -> Option<Result<DeviceTensor>> {
        poll_fn(|cx| self.advance(Some(cx))).await
    }

    /// How many tensors are still to come.
    #[must_use]
    pub fn left(&self) -> usize {
        self.parts.iter().map(LoadPart::left).sum()
    }

    /// How far it has come: bytes of tensors, over all files. `landed_to` counts them one behind the other.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let (mut done, mut landed, mut whole) = (self.before, self.landed, true);
        for part in &self.parts {
            let Some(progress) = part.transfer.as_ref().map(Transfer::progress) else { continue };
            done += progress.done;
            whole = whole && progress.done == progress.total;
            if whole {
                landed += part.bytes;
            }
        }
        let until = self.ended.unwrap_or_else(Instant::now);
        let over = self.ended.is_some();
        Progress::of(done, self.total, until.duration_since(self.since), landed, over)
    }

    /// Begins nothing further. What has arrived still comes out, then [`Error::Cancelled`].
    pub fn cancel(&self) {
        self.parts.iter().filter_map(|part| part.transfer.as_ref()).for_each(Transfer::cancel);
    }

    /// A handle that cancels it, for another thread.
    #[must_use]
    pub fn canceller(&self) -> LoadCanceller {
        let transfers = self.parts.iter().filter_map(|part| part.transfer.as_ref());
        LoadCanceller { cancellers: transfers.map(Transfer::canceller).collect() }
    }

    /// Cancels what is left, all of it first, and waits until the device has let go.
    fn settle(&mut self) {
        self.cancel();
        self.parts.drain(..).filter_map(|part| part.transfer).for_each(Transfer::settle);
    }

    /// The next, waited for by the thread, or by the task. The last of a file comes when all that there is to say about
    /// the file is known, since nobody need ask for more.
    fn advance(&mut self, mut cx: Option<&mut Context<'_>>) -> Poll<Option<Result<DeviceTensor>>> {
        if crate::os::forked() && !self.parts.is_empty() {
            self.parts.clear();
            self.ended.get_or_insert_with(Instant::now);
            return Poll::Ready(Some(Err(Error::Forked)));
        }
        let Some(part) = self.parts.front_mut() else {
            self.ended.get_or_insert_with(Instant::now);
            return Poll::Ready(None);
        };
        let mut there = None;
        if let Some(index) = part.chosen.get(&part.shard, part.next) {
            let tensor = &part.shard.tensors[index as usize];
            let end = tensor.range().end;
            let landed = match (&mut part.transfer, &mut cx) {
                _ if tensor.is_empty() || end <= part.landed_to => true,
                (None, _) => false,
                (Some(transfer), cx) => {
                    let landed = match cx {
                        None => transfer.wait_landed(end),
                        Some(cx) => ready!(transfer.poll_landed(cx, end)),
                    };
                    part.landed_to = transfer.progress().landed_to;
                    landed
                }
            };
            if landed && part.left() > 1 {
                return Poll::Ready(Some(part.out(index)));
            }
            there = landed.then_some(index);
        }
        // The transfer is over, or about to be: all of its bytes have landed, or it has failed.
        let mut done = part.transfer.as_ref().map_or(0, |transfer| transfer.progress().done);
        let over = match (&mut part.transfer, &mut cx) {
            (None, _) => Ok(()),
            (Some(transfer), Some(cx)) => ready!(Pin::new(transfer).poll(cx)).map(drop).map_err(|e| e.error),
            (transfer, None) => match transfer.take() {
                Some(transfer) => transfer.wait().map(drop).map_err(|e| e.error),
                None => Ok(()),
            },
        };
        // What was under way still arrived, where we can ask.
        done = done.max(part.transfer.as_ref().map_or(0, |transfer| transfer.progress().done));
        // Asked when the last byte was read.
        let over = over.and_then(|()| if part.bytes > 0 { part.shard.unchanged() } else { Ok(()) });
        let last = over.and_then(|()| there.map_or(Err(Error::Closed), |index| part.out(index)));
        self.before += if there.is_some() { part.bytes } else { done };
        self.landed += if there.is_some() { part.bytes } else { 0 };
        self.parts.pop_front();
        if last.is_err() {
            // The others are cancelled; what has arrived of them has.
            let sum = self.progress();
            (self.before, self.landed) =
                (sum.done, if there.is_some() { sum.landed_to } else { self.landed });
            match cx {
                None => self.settle(),
                Some(_) => self.parts.clear(),
            }
        }
        if self.parts.is_empty() {
            self.ended = Some(Instant::now());
        }
        Poll::Ready(Some(last))
    }
}

impl Iterator for Loading {
    type Item = Result<DeviceTensor>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.advance(None) {
            Poll::Ready(next) => next,
            // Not so: a thread waits.
            Poll::Pending => None,
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        // An error comes in the place of one, and ends it.
        (0, Some(self.left()))
    }
}

impl std::iter::FusedIterator for Loading {}

impl futures_core::Stream for Loading {
    type Item = Result<DeviceTensor>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.advance(Some(cx))
    }
}

impl std::fmt::Debug for Loading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loading").field("progress", &self.progress()).finish_non_exhaustive()
    }
}

/// Cancels a load, from anywhere.
#[derive(Clone, Debug)]
pub struct LoadCanceller {
    cancellers: Vec<Canceller>,
}

impl LoadCanceller {
    /// As [`Loading::cancel`].
    pub fn cancel(&self) {
        self.cancellers.iter().for_each(Canceller::cancel);
    }
}
