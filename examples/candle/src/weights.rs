//! The tensors of a checkpoint on their way to candle's device.
//!
//! [`Weights::open`] reads the headers, gives each tensor a place ([`place`](crate::place)) and starts one load of all
//! of them, of which many threads wait for tensors by name; it does not wait for bytes. [`Weights::get`] waits for its
//! one tensor. [`PinpoolVarBuilder`] is the same as a backend of candle's `VarBuilder`, so that any model of
//! candle-transformers is built while later weights are still under way.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use pinpool_safetensors::{Checkpoint, Load};

use crate::place::{self, Place};
use crate::{Pinned, wrap};

/// One tensor: what the header says of it, and its place.
struct Entry {
    dtype: DType,
    shape: Vec<usize>,
    bytes: u64,
    place: Place,
    /// Set when a thread has seen it arrive.
    there: OnceLock<()>,
}

/// A checkpoint whose tensors are on their way.
pub struct Weights {
    device: Device,
    pinned: Pinned,
    tensors: HashMap<String, Entry>,
    load: Load,
    bytes: u64,
    opening: Opening,
}

/// Where the time of [`Weights::open`] went.
#[derive(Clone, Copy, Debug, Default)]
pub struct Opening {
    /// Until the headers were read.
    pub headers: Duration,
    /// In candle's allocations, during which the files before are under way.
    pub places: Duration,
    /// Until all copies were queued.
    pub all: Duration,
}

impl Weights {
    /// Opens a checkpoint (a file, an index, or a folder) and starts its load. The thread waits for candle's allocations,
    /// and for no bytes.
    ///
    /// A tensor whose type candle or the device lacks is an error with its name.
    pub fn open(pinned: &Pinned, path: impl AsRef<Path>) -> Result<Self> {
        Self::open_where(pinned, path, &[], |_| true)
    }

    /// The same for the tensors whose names `wanted` accepts. Those whose names start with one of `first` come first.
    pub fn open_where(
        pinned: &Pinned,
        path: impl AsRef<Path>,
        first: &[&str],
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let since = Instant::now();
        let checkpoint = Checkpoint::open(path).map_err(wrap)?;
        let device = pinned.candle().clone();
        let (mut tensors, mut bytes) = (HashMap::new(), 0);
        for tensor in checkpoint.tensors().filter(|tensor| wanted(tensor.name())) {
            let (name, shape) = (tensor.name().to_owned(), tensor.shape().to_vec());
            let dtype =
                place::dtype(tensor.dtype(), &device).map_err(|error| error.context(format!("{name:?}")))?;
            bytes += tensor.bytes();
            let (place, there) = (Place::Empty, OnceLock::new());
            tensors.insert(name, Entry { dtype, shape, bytes: tensor.bytes(), place, there });
        }
        let mut opening = Opening { headers: since.elapsed(), ..Opening::default() };
        let loader = checkpoint.loader(pinned.copier()).filter(|tensor| wanted(tensor.name()));
        let loader = first.iter().fold(loader, |loader, prefix| loader.first(*prefix));
        let mut refused = None;
        // Called file by file, and the file's copies begin behind the last of its tensors. Candle's allocations are
        // aligned to more than any element needs.
        let loader = loader.align(1).places(|tensor| {
            let Some(entry) = tensors.get_mut(tensor.name()) else { return Ok(None) };
            let since = Instant::now();
            let len = entry.bytes as usize;
            match Place::new(pinned.device(), &device, entry.dtype, &entry.shape, len) {
                Ok(place) => entry.place = place,
                Err(error) => {
                    refused = Some(error.context(format!("{:?}", tensor.name())));
                    return Err(pinpool::Error::Argument("candle gave no memory".into()));
                }
            }
            opening.places += since.elapsed();
            Ok(entry.place.slice().cloned())
        });
        let load = loader.start().map_err(|error| refused.unwrap_or_else(|| wrap(error)))?;
        opening.all = since.elapsed();
        Ok(Self { device, pinned: pinned.clone(), tensors, load, bytes, opening })
    }

    /// Where the time of the call that opened it went.
    pub fn opening(&self) -> Opening {
        self.opening
    }

    /// The names, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of the tensors that were asked for and have arrived.
    pub fn landed(&self) -> u64 {
        self.tensors.values().filter(|entry| entry.there.get().is_some()).map(|entry| entry.bytes).sum()
    }

    /// Waits until a tensor is there.
    fn wait(&self, name: &str, entry: &Entry) -> Result<()> {
        if entry.there.get().is_none() {
            // `None`: another thread has asked for it, and it is there.
            self.load.take(name).map_err(wrap)?;
            let _ = entry.there.set(());
        }
        Ok(())
    }

    /// A tensor as the file has it. Waits for this one tensor, on any thread.
    pub fn get(&self, name: &str) -> Result<Tensor> {
        let Some(entry) = self.tensors.get(name) else {
            return Err(candle_core::Error::CannotFindTensor { path: name.to_owned() }.bt());
        };
        self.wait(name, entry)?;
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
        self.tensors.iter().try_for_each(|(name, entry)| self.wait(name, entry))
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
