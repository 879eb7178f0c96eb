//! Setting up a load: which tensors, where they go on the device, and by which transfers.
//!
//! [`Loader`] starts one transfer of the copier for each file, or for each prefix that comes
//! [`first`](Loader::first) in it ([`Part`]), all before the first tensor comes out of the
//! [`Load`].

use std::collections::BTreeMap;
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, OnceLock};

use pinpool::copier::{Copier, CopyRange, FileSource, Transfer, may_wait};
use pinpool::{DeviceSlice, Error, Result};

use super::Checkpoint;
use super::header::{Table, Tensor};
use super::share::{Load, Part, Shared};

/// The default alignment of tensors, in bytes. Kernels that load 16 bytes at a time need it
/// (`float4`), and so do tensor maps (the CUDA driver API's `cuTensorMapEncodeTiled`).
const TENSOR_ALIGN: usize = 16;

/// A tensor on the device, with what its file's header says of it. Work submitted to any stream
/// from now on finds the bytes there. The tensors of one file share a block of device memory, which
/// lives until the last handle to any of them, and to the load, is dropped.
#[derive(Clone, Debug)]
pub struct DeviceTensor {
    pub(super) tensor: Tensor,
    pub(super) slice: Option<DeviceSlice>,
}

impl DeviceTensor {
    /// Its bytes on the device, from an address on that is a multiple of the loader's alignment.
    /// `None` for a tensor without elements.
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

/// Sets up a load: which tensors, and where they go. See [`Checkpoint::loader`].
///
/// ```no_run
/// # use pinpool::{Copier, Device, Result};
/// # use pinpool_safetensors::{Checkpoint, Tensor};
/// # fn load(device: &Device, copier: &Copier) -> Result<()> {
/// # let checkpoint = Checkpoint::open("model.safetensors")?;
/// // To memory of the program's own, such as an allocation for each tensor.
/// let own = |tensor: &Tensor| device.alloc(tensor.bytes() as usize)?.slice(..).map(Some);
/// let load = checkpoint.loader(copier).places(own).first("h.0.").start()?;
///
/// // Several threads, each of which waits for the tensors that it needs.
/// let other = load.clone();
/// let layer = std::thread::spawn(move || other.take("h.0.w"));
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is loaded until `start` or `load`"]
pub struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    copier: &'a Copier,
    only: Option<Vec<Tensor>>,
    filter: Option<Filter<'a>>,
    first: Vec<String>,
    align: usize,
    memory: Memory<'a>,
    /// The memory that the caller gave, by address: start and end.
    given: BTreeMap<u64, u64>,
}

impl<'a> Loader<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint, copier: &'a Copier) -> Self {
        Self {
            checkpoint,
            copier,
            only: None,
            filter: None,
            first: Vec::new(),
            align: TENSOR_ALIGN,
            memory: Memory::Device,
            given: BTreeMap::new(),
        }
    }

    /// Loads only these tensors of the checkpoint, or [rows](Tensor::rows) of them, and of these the
    /// ones for which a [`filter`](Self::filter) is true. Their order does not matter. Default: all.
    pub fn only(mut self, tensors: impl IntoIterator<Item = Tensor>) -> Self {
        self.only = Some(tensors.into_iter().collect());
        self
    }

    /// Loads only tensors for which `filter` is true. Default: all.
    pub fn filter(mut self, filter: impl FnMut(&Tensor) -> bool + 'a) -> Self {
        self.filter = Some(Box::new(filter));
        self
    }

    /// Loads tensors whose name starts with `prefix` before the others, and gives them out first:
    /// what a server needs first, such as the first layers. Prefixes come in the order of the
    /// calls; a tensor belongs to the first one that it meets. Each makes a transfer of its own for
    /// each file that has such tensors.
    pub fn first(mut self, prefix: impl Into<String>) -> Self {
        self.first.push(prefix.into());
        self
    }

    /// The alignment of the tensors on the device, in bytes: a power of two. Tensors whose length
    /// is a multiple of it are copied together; others leave a gap. Default: 16.
    pub fn align(mut self, bytes: usize) -> Self {
        self.align = bytes;
        self
    }

    /// Where the device memory comes from. `get` is called once for each file (and for each
    /// [`first`](Self::first) of it) with the number of bytes, and gives at least as many, from a
    /// multiple of the alignment on. Default: [`Device::alloc`](pinpool::Device::alloc).
    pub fn memory(mut self, get: impl FnMut(usize) -> Result<DeviceSlice> + 'a) -> Self {
        self.memory = Memory::Blocks(Box::new(get));
        self
    }

    /// Where each tensor goes, in place of [`memory`](Self::memory): memory of the program's own,
    /// such as an allocation for each. The starting call calls `get` once for each tensor that has
    /// bytes, in the order of the load. `get` gives at least as many bytes, from a multiple of the
    /// alignment on, or `None`, which leaves the tensor out. No two places overlap. Short tensors
    /// are copied together all the same, and spread on the device.
    pub fn places(mut self, get: impl FnMut(&Tensor) -> Result<Option<DeviceSlice>> + 'a) -> Self {
        self.memory = Memory::Places(Box::new(get));
        self
    }

    /// Starts the load. The tensors come out of the returned [`Load`], in the order of the files
    /// (but for those that come [`first`](Self::first)); dropping it cancels the rest.
    ///
    /// # Errors
    /// [`Error::Argument`] for a wrong alignment, and for a tensor that is of another checkpoint or
    /// there twice. Of the caller's memory: [`Error::Mismatch`], and
    /// [`Error::Argument`] where it is short, not aligned, or overlaps what was given before; for
    /// the place of a tensor these are the cause in an [`Error::Tensor`]. [`Error::Malformed`] for
    /// a file that was written to since it was opened. Else [as every call](Error#every-call).
    /// Transfers that were started are cancelled.
    pub fn start(self) -> Result<Load> {
        self.begin(false)
    }

    /// Loads the tensors in the order of the files, and waits until all are on the device.
    ///
    /// # Errors
    /// As for [`start`](Self::start) and [`Load`].
    pub fn load(self) -> Result<Vec<DeviceTensor>> {
        // Checked before anything begins: this thread could not wait for it afterwards.
        may_wait()?;
        let load = self.begin(true)?;
        load.blocking().collect()
    }

    /// What is loaded, with the number of its prefix: the tensors of the first prefix in all files,
    /// then those of the second, and so on, and last the rest.
    fn chosen(&mut self) -> Result<Vec<(usize, Tensor)>> {
        let files = &self.checkpoint.0.tables;
        let all = match self.only.take() {
            Some(mut only) => {
                let is_ours = |table: &Arc<Table>| {
                    files.get(table.number as usize).is_some_and(|file| Arc::ptr_eq(file, table))
                };
                let refused = |tensor: &Tensor, why: &str| {
                    let name = tensor.name();
                    Err(Error::Argument(format!("tensor \"{name:.200}\" {why}")))
                };
                if let Some(other) = only.iter().find(|tensor| !is_ours(&tensor.table)) {
                    return refused(other, "is of another checkpoint; load it from there");
                }
                only.sort_by_key(place);
                if let Some(twice) = only.windows(2).find(|pair| place(&pair[0]) == place(&pair[1])) {
                    return refused(&twice[0], "is asked for twice; make two loads of it");
                }
                only
            }
            None => self.checkpoint.tensors().collect(),
        };
        let (mut chosen, rest) = (Vec::with_capacity(all.len()), self.first.len());
        for tensor in all {
            if self.filter.as_mut().is_none_or(|filter| filter(&tensor)) {
                let group = self.first.iter().position(|prefix| tensor.name().starts_with(prefix));
                chosen.push((group.unwrap_or(rest), tensor));
            }
        }
        chosen.sort_by_key(|(group, _)| *group);
        Ok(chosen)
    }

    /// Starts the transfers of all files. `waits`: the caller waits for all of them, also where one
    /// is refused.
    fn begin(mut self, waits: bool) -> Result<Load> {
        if !self.align.is_power_of_two() {
            let why = format!("{} is no alignment: it must be a power of two", self.align);
            return Err(Error::Argument(why));
        }
        // Made first: its drop cancels the transfers that have begun if a later file is refused.
        let (files, is_taken, next) = (self.checkpoint.0.clone(), Vec::new(), AtomicUsize::new(0));
        let mut load = Shared { files, parts: Vec::new(), waits, is_taken, next };
        let chosen = self.chosen()?;
        let file = |(group, tensor): &(usize, Tensor)| (*group, tensor.table.number);
        for chosen in chosen.chunk_by(|one, next| file(one) == file(next)) {
            let first = load.parts.last().map_or(0, Part::end);
            let mut chosen: Vec<Tensor> = chosen.iter().map(|(_, tensor)| tensor.clone()).collect();
            let number = chosen[0].table.number;
            let ranges = match self.memory {
                Memory::Places(_) => self.places_of(&mut chosen)?,
                Memory::Device | Memory::Blocks(_) => self.block_of(&chosen)?,
            };
            if chosen.is_empty() {
                continue;
            }
            load.is_taken.extend(chosen.iter().map(|_| AtomicBool::new(false)));
            let (landed_to, verdict) = (AtomicU64::new(0), OnceLock::new());
            let mut part = Part { number, first, chosen, ranges, transfer: None, landed_to, verdict };
            part.transfer = self.upload(&part)?;
            load.parts.push(part);
        }
        Ok(Load(load.into()))
    }

    /// Gives the tensors of a file one block of device memory.
    fn block_of(&mut self, chosen: &[Tensor]) -> Result<Vec<CopyRange>> {
        // The ranges to copy, from the file to the block. Neighbours are joined.
        let (mut runs, mut end) = (Vec::<(u64, Range<usize>)>::new(), 0_usize);
        for tensor in chosen.iter().filter(|tensor| tensor.bytes() > 0) {
            let from = tensor.range().start;
            // The alignment is a power of two; a division would be most of a plan's time.
            // (Saturated, it is more than any memory.)
            let start = end.saturating_add(self.align - 1) & !(self.align - 1);
            let is_behind = |at: u64, run: &Range<usize>| run.end == start && at + run.len() as u64 == from;
            end = start.saturating_add(usize::try_from(tensor.bytes()).unwrap_or(usize::MAX));
            match runs.last_mut() {
                Some((at, run)) if is_behind(*at, run) => run.end = end,
                _ => runs.push((from, start..end)),
            }
        }
        if runs.is_empty() {
            return Ok(Vec::new());
        }
        let block = self.block(end)?;
        runs.into_iter().map(|(at, run)| Ok(CopyRange::new(at, block.slice(run)?))).collect()
    }

    /// Asks the caller for the places of tensors. Those without one are left out.
    fn places_of(&mut self, chosen: &mut Vec<Tensor>) -> Result<Vec<CopyRange>> {
        let (mut ranges, total) = (Vec::new(), chosen.len());
        for tensor in std::mem::take(chosen) {
            if tensor.bytes() > 0 {
                let Memory::Places(get) = &mut self.memory else { break };
                let Some(slice) = get(&tensor)? else { continue };
                let slice = self.claim(&slice, tensor.bytes());
                let slice = slice.map_err(|cause| not_there(tensor.name(), 0, total, cause))?;
                ranges.push(CopyRange::new(tensor.range().start, slice));
            }
            chosen.push(tensor);
        }
        Ok(ranges)
    }

    /// Starts the transfer of a part. `None`: its tensors have no bytes.
    fn upload(&self, part: &Part) -> Result<Option<Transfer<FileSource>>> {
        if part.ranges.is_empty() {
            return Ok(None);
        }
        let files = &self.checkpoint.0;
        files.unchanged(part.number)?;
        let table = &files.tables[part.number as usize];
        let source = FileSource::new(files.shards[part.number as usize].file.clone(), table.what())?;
        let transfer = self.copier.upload(source, part.ranges.clone());
        transfer.map(Some).map_err(|refused| match refused.error {
            Error::Piece { cause, .. } => *cause,
            error => error,
        })
    }

    /// Device memory of so many bytes that starts on the alignment.
    fn block(&mut self, len: usize) -> Result<DeviceSlice> {
        if let Memory::Blocks(memory) = &mut self.memory {
            let slice = memory(len)?;
            return self.claim(&slice, len as u64);
        }
        // The device aligns to 256 bytes by itself.
        let more = if self.align > 256 { self.align } else { 0 };
        let slice = self.copier.device().alloc(len.saturating_add(more))?;
        let start = slice.address().wrapping_neg() as usize & (self.align - 1);
        slice.slice(start..start + len)
    }

    /// The front of memory of the caller's, which nothing else of the load uses. Bytes beyond `len`
    /// are not written.
    fn claim(&mut self, slice: &DeviceSlice, len: u64) -> Result<DeviceSlice> {
        let slice = slice.slice(..usize::try_from(len).unwrap_or(usize::MAX))?;
        let (start, end, align) = (slice.address(), slice.address() + len, self.align);
        if start % align as u64 != 0 {
            let why = format!("its memory starts at {start:#x}, which is no multiple of {align}; align it");
            return Err(Error::Argument(why));
        }
        // The one that starts last before its end reaches furthest, since none overlaps another.
        if self.given.range(..end).next_back().is_some_and(|(_, until)| *until > start) {
            let why = "its memory overlaps what was given before; give each tensor or file memory of its own";
            return Err(Error::Argument(why.into()));
        }
        self.given.insert(start, end);
        Ok(slice)
    }
}

/// Where a tensor is: the number of its file, and its place in the file.
fn place(tensor: &Tensor) -> (u32, u32) {
    (tensor.table.number, tensor.index)
}

/// The error for a tensor that is not on the device, while `landed` of the load's `total` are.
pub(super) fn not_there(tensor: &str, landed: usize, total: usize, cause: Error) -> Error {
    Error::Tensor { tensor: format!("{tensor:.200}").into(), landed, total, cause: cause.into() }
}
