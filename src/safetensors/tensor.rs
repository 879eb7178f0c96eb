//! A tensor on the device.

use std::io::{self, Write};
use std::sync::Arc;

use super::header::Tensor;
use super::sums::Hasher;
use crate::copy::pipeline::{Piece, Pipeline};
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result};

use ::safetensors::Dtype;

/// A tensor that has arrived on the device. Its memory lives for as long as a handle to it, or to a tensor beside it: those
/// of one file share a block. Whatever is submitted to any stream from now on finds the bytes there.
#[derive(Clone)]
pub struct DeviceTensor {
    /// All of its file, and which of them it is: the file's one list serves all, so that thousands cost nothing each.
    all: Arc<Vec<Tensor>>,
    index: u32,
    slice: Option<DeviceSlice>,
    checksum: Option<u128>,
}

impl DeviceTensor {
    /// `index` is a place in the list.
    pub(super) fn new(
        all: Arc<Vec<Tensor>>,
        index: u32,
        slice: Option<DeviceSlice>,
        checksum: Option<u128>,
    ) -> Self {
        Self { all, index, slice, checksum }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.tensor().name()
    }

    /// The type of its elements.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.tensor().dtype()
    }

    /// Elements along each axis.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        self.tensor().shape()
    }

    /// What its file says of it.
    #[must_use]
    pub fn tensor(&self) -> &Tensor {
        &self.all[self.index as usize]
    }

    /// Its bytes on the device. `None`: it has none, as it has no elements.
    #[must_use]
    pub fn slice(&self) -> Option<&DeviceSlice> {
        self.slice.as_ref()
    }

    /// The address of its first byte, a multiple of the loader's alignment: see [`DeviceSlice::address`]. `None`: it has
    /// no bytes.
    #[must_use]
    pub fn address(&self) -> Option<u64> {
        self.slice.as_ref().map(DeviceSlice::address)
    }

    /// The XXH3 (128 bits) of its bytes as they were read, if [that was asked for](super::Loader::checksums).
    #[must_use]
    pub fn checksum(&self) -> Option<u128> {
        self.checksum
    }

    /// The same of its bytes on the device, which are brought back for that.
    ///
    /// # Errors
    /// As for [`device_checksums`].
    pub fn device_checksum(&self, pipeline: &Pipeline) -> Result<u128> {
        let sums = device_checksums(pipeline, std::slice::from_ref(self))?;
        sums.first().copied().ok_or(Error::Empty)
    }
}

impl std::fmt::Debug for DeviceTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceTensor")
            .field("tensor", self.tensor())
            .field("slice", &self.slice)
            .field("checksum", &self.checksum)
            .finish()
    }
}

/// The XXH3 (128 bits) of tensors' bytes as they are on the device, in the same order: brought back through the pipeline, and
/// summed up on the caller's thread. Tensors that lie side by side come back in large chunks.
///
/// # Errors
/// As for [`Pipeline::download_write`].
pub fn device_checksums(pipeline: &Pipeline, tensors: &[DeviceTensor]) -> Result<Vec<u128>> {
    let mut pieces = Vec::new();
    let mut at = 0;
    for slice in tensors.iter().filter_map(DeviceTensor::slice) {
        pieces.push(Piece::new(at, slice));
        at += slice.len() as u64;
    }
    let lens = tensors.iter().map(|tensor| tensor.slice.as_ref().map_or(0, DeviceSlice::len));
    let mut splitter =
        Splitter { lens: lens.collect(), sums: Vec::new(), current: Hasher::default(), left: 0 };
    splitter.advance();
    if !pieces.is_empty() {
        pipeline.download_write_pieces(pieces, &mut splitter)?;
    }
    let Splitter { lens, sums, .. } = splitter;
    match sums.len() == lens.len() {
        true => Ok(sums),
        false => Err(Error::TooSmall { need: lens.len(), have: sums.len() }),
    }
}

/// Takes the checksums of parts that come one behind the other.
struct Splitter {
    lens: Vec<usize>,
    sums: Vec<u128>,
    current: Hasher,
    /// Bytes of the part under way that are still to come.
    left: usize,
}

impl Splitter {
    /// Goes to the next part that has bytes, or to the end.
    fn advance(&mut self) {
        while let Some(&len) = self.lens.get(self.sums.len()) {
            if len > 0 {
                self.left = len;
                return;
            }
            self.sums.push(Hasher::default().digest());
        }
    }
}

impl Write for Splitter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(self.left);
        self.current.update(&bytes[..n]);
        self.left -= n;
        if self.left == 0 && n > 0 {
            self.sums.push(std::mem::take(&mut self.current).digest());
            self.advance();
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
