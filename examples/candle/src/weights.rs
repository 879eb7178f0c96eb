//! The tensors of a checkpoint on their way to candle's device.
//!
//! [`Weights::open`] reads the headers, gives each tensor a place ([`place`](crate::place)) and submits all files at
//! once; it does not wait for bytes. [`Weights::get`] waits for its one tensor. [`PinpoolVarBuilder`] is the same as a
//! backend of candle's `VarBuilder`, so that any model of candle-transformers is built while later weights are still
//! under way.

use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::path::Path;
use std::sync::{Arc, OnceLock, RwLock};

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use pinpool::copier::{FileSource, Piece, Transfer};
use pinpool::safetensors::{Checkpoint, Header};

use crate::place::{self, Place};
use crate::{Pinned, wrap};

/// One tensor: what the header says of it, and its place.
struct Entry {
    dtype: DType,
    shape: Vec<usize>,
    place: Place,
    shard: usize,
    /// The number of pieces of the shard up to this one, this one included.
    pieces: usize,
}

/// One file.
struct Shard {
    name: String,
    file: Arc<File>,
    opened: Metadata,
    bytes: u64,
    /// `None` after the end of the transfer was asked for, or without pieces.
    transfer: RwLock<Option<Transfer<FileSource>>>,
    /// Why the transfer failed.
    failed: OnceLock<String>,
}

impl Shard {
    /// Waits until the first pieces have arrived, in the file's order.
    fn wait(&self, pieces: usize) -> Result<()> {
        if let Some(transfer) = &*self.transfer.read().unwrap_or_else(|broken| broken.into_inner())
            && transfer.wait_pieces(pieces)
        {
            return Ok(());
        }
        self.end()
    }

    /// Waits for the end of the transfer. The error is that of the transfer, for every caller.
    fn end(&self) -> Result<()> {
        // More pieces than there are: until the transfer is over. Other threads go on waiting for theirs meanwhile.
        if let Some(transfer) = &*self.transfer.read().unwrap_or_else(|broken| broken.into_inner()) {
            let _ = transfer.wait_pieces(usize::MAX);
        }
        let mut transfer = self.transfer.write().unwrap_or_else(|broken| broken.into_inner());
        if let Some(transfer) = transfer.take()
            && let Err(failed) = transfer.wait()
        {
            let _ = self.failed.set(failed.error.to_string());
        }
        match self.failed.get() {
            Some(why) => candle_core::bail!("{why}"),
            None => Ok(()),
        }
    }

    /// An error if the file was written to since it was opened.
    fn unchanged(&self) -> Result<()> {
        let now = self.file.metadata()?;
        if (now.len(), now.modified()?) != (self.opened.len(), self.opened.modified()?) {
            candle_core::bail!("{}: it was written to during the load", self.name);
        }
        Ok(())
    }
}

/// A checkpoint whose tensors are on their way.
pub struct Weights {
    device: Device,
    pinned: Pinned,
    shards: Vec<Shard>,
    tensors: HashMap<String, Entry>,
    bytes: u64,
}

impl Weights {
    /// Opens a checkpoint (a file, an index, or a folder) and starts its load. The thread waits for candle's allocations,
    /// and for no bytes.
    pub fn open(pinned: &Pinned, path: impl AsRef<Path>) -> Result<Self> {
        Self::open_where(pinned, path, |_| true)
    }

    /// The same for the tensors whose names `wanted` accepts.
    pub fn open_where(
        pinned: &Pinned,
        path: impl AsRef<Path>,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let checkpoint = Checkpoint::open(path).map_err(wrap)?;
        let device = pinned.candle().clone();
        let (mut shards, mut tensors, mut plans, mut bytes) = (Vec::new(), HashMap::new(), Vec::new(), 0);
        for path in checkpoint.files() {
            let name = path.display().to_string();
            let file = Arc::new(File::open(path)?);
            let opened = file.metadata()?;
            let header = Header::read(&file, &name).map_err(wrap)?;
            let mut pieces = Vec::new();
            // The tensors of a header are in the file's order, which is the order in which pieces arrive.
            for tensor in header.tensors.iter().filter(|tensor| wanted(tensor.name())) {
                let (dtype, shape) = (DType::try_from(tensor.dtype())?, tensor.shape().to_vec());
                let len = usize::try_from(tensor.len()).map_err(candle_core::Error::wrap)?;
                let place = Place::new(pinned.device(), &device, dtype, &shape, len)?;
                if let Some(slice) = place.slice() {
                    pieces.push(Piece::new(tensor.range().start, slice.clone()));
                }
                let entry = Entry { dtype, shape, place, shard: shards.len(), pieces: pieces.len() };
                tensors.insert(tensor.name().to_owned(), entry);
            }
            let of_file = pieces.iter().map(|piece| piece.device.len() as u64).sum();
            bytes += of_file;
            plans.push(pieces);
            shards.push(Shard {
                name,
                file,
                opened,
                bytes: of_file,
                transfer: RwLock::new(None),
                failed: OnceLock::new(),
            });
        }
        place::settle(&device)?;
        for (shard, pieces) in shards.iter_mut().zip(plans) {
            if pieces.is_empty() {
                continue;
            }
            let source = FileSource::new(shard.file.clone(), shard.name.clone()).map_err(wrap)?;
            let transfer =
                pinned.copier().upload_file_ranges(source, pieces).map_err(|refused| wrap(refused.error))?;
            shard.transfer = RwLock::new(Some(transfer));
        }
        Ok(Self { device, pinned: pinned.clone(), shards, tensors, bytes })
    }

    /// The names, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that have arrived.
    pub fn landed(&self) -> u64 {
        let landed =
            |shard: &Shard| match &*shard.transfer.read().unwrap_or_else(|broken| broken.into_inner()) {
                Some(transfer) => transfer.progress().done,
                None if shard.failed.get().is_none() => shard.bytes,
                None => 0,
            };
        self.shards.iter().map(landed).sum()
    }

    /// A tensor as the file has it. Waits for this one tensor, on any thread.
    pub fn get(&self, name: &str) -> Result<Tensor> {
        let Some(entry) = self.tensors.get(name) else {
            return Err(candle_core::Error::CannotFindTensor { path: name.to_owned() }.bt());
        };
        if entry.place.slice().is_some() {
            self.shards[entry.shard].wait(entry.pieces)?;
        }
        match &entry.place {
            Place::Empty => Tensor::zeros(entry.shape.as_slice(), entry.dtype, &self.device),
            Place::Host(slice) => {
                let bytes = self.pinned.read(slice)?;
                Tensor::from_raw_buffer(&bytes, entry.dtype, &entry.shape, &self.device)
            }
            #[cfg(feature = "cuda")]
            Place::Cuda(tensor, _) => Ok(tensor.clone()),
        }
    }

    /// Waits for all bytes. A file that was written to meanwhile is an error.
    pub fn finish(&self) -> Result<()> {
        for shard in &self.shards {
            shard.end()?;
            shard.unchanged()?;
        }
        Ok(())
    }

    /// A builder for models, whose tensors have this type.
    pub fn var_builder(self: &Arc<Self>, dtype: DType) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(PinpoolVarBuilder(self.clone())), dtype, self.device.clone())
    }
}

/// [`Weights`] as a backend of candle's `VarBuilder`. `get` waits for its one tensor; another type is a cast on the
/// device, in the order of the calling thread's stream.
pub struct PinpoolVarBuilder(pub Arc<Weights>);

impl SimpleBackend for PinpoolVarBuilder {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        if tensor.shape() != &shape {
            candle_core::bail!(
                "shape mismatch for {name:?}: the model has {shape:?}, the file {:?}",
                tensor.shape()
            );
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.0.get(name)?.to_dtype(dtype)?.to_device(device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.tensors.contains_key(name)
    }
}
