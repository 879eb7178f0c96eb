//! Setting up a load: which tensors, where on the device they go, and the transfers that bring them there.
//!
//! [`Loader`] starts one transfer of the copier for each file, or for each prefix that comes [`first`](Loader::first)
//! in it ([`Part`]), all before the first tensor comes out. A [`Load`] then hands them out.

use std::collections::BTreeMap;
use std::ops::{Deref, Range};
use std::sync::OnceLock;

use pinpool::copier::{Copier, CopyRange, FileSource, Reading, Transfer, may_wait};
use pinpool::{DeviceSlice, Error, Result};

use super::header::Tensor;
use super::share::{Load, Part, Shared};
use super::{Checkpoint, NAME, shown};

/// The default alignment of tensors, in bytes. Kernels that load 16 bytes at a time need it (`float4`), and so do
/// tensor maps (the CUDA driver API's `cuTensorMapEncodeTiled`: a global address is 16-byte aligned).
const TENSOR_ALIGN: usize = 16;
/// The largest alignment that makes sense: a page of a device.
const LARGEST_ALIGN: usize = 2 << 20;

/// A tensor on the device, with what its file's header says of it. Work submitted to any stream from now on finds the
/// bytes there. The tensors of one file share a block of device memory, which lives until the last handle to any of
/// them, and to the load, is dropped.
#[derive(Clone, Debug)]
pub struct DeviceTensor {
    pub(super) tensor: Tensor,
    pub(super) slice: Option<DeviceSlice>,
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
type Chosen = (u32, Vec<u32>);

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
///
/// // Several threads, each of which waits for the tensors that it needs.
/// let load = checkpoint.loader(&copier).first("h.0.").start()?;
/// let other = load.clone();
/// let layer = std::thread::spawn(move || other.take("h.0.w"));
/// assert_eq!(layer.join().unwrap()?.map(|tensor| tensor.shape().to_vec()), Some(vec![4]));
/// assert!(load.take("h.0.w")?.is_none(), "a tensor comes out once");
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
    /// first, such as the first layers. Called several times: in the order of the calls; a tensor that several prefixes
    /// meet comes with the first of them. Each makes a transfer of its own for each file that has such tensors.
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

    /// Where the device memory comes from. `get` is called once for each file that tensors are loaded from (and for
    /// each [`first`](Self::first) of it), with the number of bytes, and gives at least as many, starting on a multiple
    /// of the alignment. Default: [`Device::alloc`](pinpool::Device::alloc).
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

    /// Starts the load. The tensors come out of the returned [`Load`], in the order of the files (but for those that
    /// come [`first`](Self::first)); dropping it cancels the rest.
    ///
    /// # Errors
    /// [`Error::Argument`]; [`Error::Device`] where the device has no memory, or is lost; for memory of the
    /// caller's [`Error::TooSmall`], [`Error::Mismatch`], and [`Error::Argument`] where it is not aligned or overlaps
    /// what was given before, for the place of a tensor as the cause in an [`Error::Tensor`]; [`Error::Read`] for a
    /// file that has become shorter since it was opened, [`Error::Malformed`] for one that was written to;
    /// [`Error::Forked`]. Transfers of other files that were started are cancelled.
    pub fn start(mut self) -> Result<Load> {
        let chosen = self.chosen();
        self.begin(chosen, false)
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

    pub(super) fn load_chosen(self, chosen: Vec<Chosen>) -> Result<Vec<DeviceTensor>> {
        // Checked before anything begins: this thread could not wait for it afterwards.
        may_wait()?;
        let load = self.begin(chosen, true)?;
        let mut tensors = Vec::with_capacity(load.left());
        for tensor in load.blocking() {
            tensors.push(tensor?);
        }
        Ok(tensors)
    }

    /// What is loaded, in the order of the load.
    fn chosen(&mut self) -> Vec<Chosen> {
        let headers = &self.checkpoint.0.headers;
        // What meets the first prefix of all files, then what meets the second, and so on, and last the rest.
        let files = (0..=self.first.len()).flat_map(|_| 0..headers.len() as u32);
        let mut chosen: Vec<Chosen> = files.map(|number| (number, Vec::new())).collect();
        for (number, header) in headers.iter().enumerate() {
            if self.filter.is_none() && self.first.is_empty() {
                chosen[number].1 = (0..header.0.entries.len() as u32).collect();
                continue;
            }
            let mut tensor = Tensor { table: header.0.clone(), index: 0 };
            for index in 0..header.0.entries.len() as u32 {
                tensor.index = index;
                if self.filter.as_mut().is_none_or(|filter| filter(&tensor)) {
                    let group = self.first.iter().position(|prefix| tensor.name().starts_with(prefix));
                    let group = group.unwrap_or(self.first.len());
                    chosen[group * headers.len() + number].1.push(index);
                }
            }
        }
        chosen.retain(|(_, chosen)| !chosen.is_empty());
        chosen
    }

    /// Starts the transfers of all files. `waits`: the caller waits for all of them, also where one is refused.
    fn begin(mut self, chosen: Vec<Chosen>, waits: bool) -> Result<Load> {
        if !self.align.is_power_of_two() || self.align > LARGEST_ALIGN {
            return Err(Error::Argument(format!(
                "{} is no alignment: it must be a power of two of at most {LARGEST_ALIGN}",
                self.align
            )));
        }
        // Made first: where a later file is refused, its drop cancels the transfers that have begun.
        let mut load = Shared::new(self.checkpoint.0.clone(), waits);
        for (number, mut chosen) in chosen {
            let first = load.parts.last().map_or(0, Part::end);
            let ranges = match self.memory {
                Memory::Places(_) => self.places_of(number, &mut chosen, first)?,
                Memory::Device | Memory::Blocks(_) => self.block_of(number, &chosen)?,
            };
            if chosen.is_empty() {
                continue;
            }
            let mut part = Part { number, first, chosen, ranges, transfer: None, verdict: OnceLock::new() };
            part.transfer = self.upload(&part)?;
            load.parts.push(part);
        }
        Ok(Load::new(load))
    }

    /// Gives the tensors of a file one block of device memory.
    fn block_of(&mut self, number: u32, chosen: &[u32]) -> Result<Vec<CopyRange>> {
        let table = &self.checkpoint.0.headers[number as usize].0;
        // There may be tens of thousands of tensors, and the link idles meanwhile: all of a file, if no alignment parts
        // them, are one range without a look at each. (All bits: an index has left some out, which an alignment to 1
        // does not show.)
        let is_joined = table.lengths != u64::MAX && table.lengths & (self.align as u64 - 1) == 0;
        let is_whole = is_joined && chosen.len() == table.entries.len();
        let ends = table.entries.first().zip(table.entries.last()).filter(|_| is_whole);
        let whole = ends.map(|(first, last)| (first.from, last.to));
        let some = if is_whole { &[] } else { chosen };
        let some = some.iter().map(|index| &table.entries[*index as usize]);
        let some = some.map(|entry| (entry.from, entry.to));
        // The ranges to copy: where they start in the file, and where they are in the block. Neighbours are joined.
        let (mut runs, mut end, mut behind) = (Vec::<(u64, Range<usize>)>::new(), 0_usize, 0);
        for (from, to) in whole.into_iter().chain(some).filter(|(from, to)| from < to) {
            // The alignment is a power of two; a division would be most of a plan's time. (Saturated, it is more than
            // any memory.)
            let start = end.saturating_add(self.align - 1) & !(self.align - 1);
            if from != behind || start != end {
                runs.last_mut().into_iter().for_each(|(_, run)| run.end = end);
                runs.push((from, start..start));
            }
            end = start.saturating_add(usize::try_from(to - from).unwrap_or(usize::MAX));
            behind = to;
        }
        let Some((_, last)) = runs.last_mut() else { return Ok(Vec::new()) };
        last.end = end;
        let block = self.block(end)?;
        runs.into_iter().map(|(at, run)| Ok(CopyRange::new(at, block.slice(run)?))).collect()
    }

    /// Asks the caller for the places of tensors. Those without one are left out. `before`: tensors of the load so far.
    fn places_of(&mut self, number: u32, chosen: &mut Vec<u32>, before: usize) -> Result<Vec<CopyRange>> {
        let (mut ranges, mut kept, total) = (Vec::new(), Vec::new(), before + chosen.len());
        let mut tensor = Tensor { table: self.checkpoint.0.headers[number as usize].0.clone(), index: 0 };
        for index in chosen.drain(..) {
            tensor.index = index;
            if !tensor.entry().is_empty() {
                let Memory::Places(get) = &mut self.memory else { break };
                let Some(slice) = get(&tensor)? else { continue };
                let slice = self.claim(&slice, tensor.bytes());
                let slice = slice.map_err(|cause| not_there(tensor.name(), 0, total, cause))?;
                ranges.push(CopyRange::new(tensor.range().start, slice));
            }
            kept.push(index);
        }
        *chosen = kept;
        Ok(ranges)
    }

    /// Starts the transfer of a part. `None`: its tensors have no bytes.
    fn upload(&self, part: &Part) -> Result<Option<Transfer<FileSource>>> {
        if part.ranges.is_empty() {
            return Ok(None);
        }
        let files = &self.checkpoint.0;
        let shard = &files.shards[part.number as usize];
        shard.unchanged()?;
        let source = FileSource::new(shard.file.clone(), shard.name.clone())?.reading(self.reading);
        let transfer = self.copier.upload(source, part.ranges.clone());
        transfer.map(Some).map_err(|refused| match (refused.error, &self.memory) {
            (Error::Piece { piece, cause, .. }, Memory::Places(_)) => {
                let table = &files.headers[part.number as usize].0;
                let mut with_bytes =
                    part.chosen.iter().filter(|index| !table.entries[**index as usize].is_empty());
                let tensor = with_bytes.nth(piece).map_or("", |index| table.name(*index));
                not_there(tensor, 0, part.end(), *cause)
            }
            // All pieces are parts of one block.
            (Error::Piece { cause, .. }, Memory::Device | Memory::Blocks(_)) => *cause,
            (error, _) => error,
        })
    }

    /// Device memory of so many bytes that starts on the alignment.
    fn block(&mut self, len: usize) -> Result<DeviceSlice> {
        if let Memory::Blocks(memory) = &mut self.memory {
            let slice = memory(len)?;
            return self.claim(&slice, len as u64);
        }
        // A device aligns its memory by itself, mostly to more than is asked for.
        let device = self.copier.device();
        let misfit = |slice: &DeviceSlice| slice.address().wrapping_neg() as usize & (self.align - 1);
        let slice = device.alloc(len)?;
        if misfit(&slice) == 0 {
            return Ok(slice);
        }
        drop(slice);
        let slice = device.alloc(len.saturating_add(self.align))?;
        slice.slice(misfit(&slice)..misfit(&slice) + len)
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
        // The one that starts last before its end reaches furthest, since none overlaps another.
        if self.given.range(..end).next_back().is_some_and(|(_, until)| *until > start) {
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
        f.debug_struct("Loader").field("first", &self.first).finish_non_exhaustive()
    }
}

/// The error for a tensor that is not on the device, while `landed` of the load's `total` are.
pub(super) fn not_there(tensor: &str, landed: usize, total: usize, cause: Error) -> Error {
    Error::Tensor { tensor: shown(tensor, NAME).into(), landed, total, cause: cause.into() }
}
