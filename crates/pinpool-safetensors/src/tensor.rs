//! A tensor on the device.

use std::sync::Arc;

use ::safetensors::Dtype;
use pinpool::DeviceSlice;

use super::header::Tensor;

/// A tensor on the device. Work submitted to any stream from now on finds the bytes there. The tensors of one file
/// share a block of device memory, which lives until the last handle to any of them is dropped.
#[derive(Clone)]
pub struct DeviceTensor {
    /// The list of all tensors of its file, which all handles share, and its index there: so a handle takes the same
    /// few bytes whatever the tensor's name and shape are.
    all: Arc<Vec<Tensor>>,
    index: u32,
    slice: Option<DeviceSlice>,
}

impl DeviceTensor {
    /// `index` is an index into `all`.
    pub(super) fn new(all: Arc<Vec<Tensor>>, index: u32, slice: Option<DeviceSlice>) -> Self {
        Self { all, index, slice }
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

    /// The tensor as its file's header describes it.
    #[must_use]
    pub fn tensor(&self) -> &Tensor {
        &self.all[self.index as usize]
    }

    /// Its bytes on the device. `None` for a tensor without elements, which has none.
    #[must_use]
    pub fn slice(&self) -> Option<&DeviceSlice> {
        self.slice.as_ref()
    }

    /// The address of its first byte, a multiple of the loader's alignment: see [`DeviceSlice::address`]. `None` for a
    /// tensor without elements.
    #[must_use]
    pub fn address(&self) -> Option<u64> {
        self.slice.as_ref().map(DeviceSlice::address)
    }
}

impl std::fmt::Debug for DeviceTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceTensor").field("tensor", self.tensor()).field("slice", &self.slice).finish()
    }
}
