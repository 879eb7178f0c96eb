//! Where on candle's device each tensor of a checkpoint goes, and how its bytes get there.
//!
//! On a GPU each tensor is an allocation of candle's own, since candle frees its memory tensor by tensor. The
//! allocations are made first, one after the other; one wait for candle's stream then orders all copies behind them.
//! The copier gets each file as one transfer of pieces, so that small tensors cost no more than large ones. On candle's
//! CPU device a place is memory of the crate's host device, from which candle's tensor is made when it is asked for.
//!
//! All unsafe code of the package that names addresses is here.

#![allow(unsafe_code)]

use candle_core::{DType, Device, Result, Tensor};
use pinpool::DeviceSlice;

use crate::wrap;

/// The place of one tensor.
pub(crate) enum Place {
    /// A tensor without bytes.
    Empty,
    /// Candle's CPU device: memory of the crate's host device.
    Host(DeviceSlice),
    /// The tensor itself, whose bytes are valid when they have landed, and its memory.
    #[cfg(feature = "cuda")]
    Cuda(Tensor, DeviceSlice),
}

impl Place {
    /// Memory for a tensor. Copies may use it after [`settle`].
    pub(crate) fn new(
        pinned: &pinpool::Device,
        device: &Device,
        dtype: DType,
        shape: &[usize],
        len: usize,
    ) -> Result<Self> {
        if len == 0 {
            return Ok(Self::Empty);
        }
        match device {
            Device::Cpu => Ok(Self::Host(pinned.alloc(len).map_err(wrap)?.slice(..).map_err(wrap)?)),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                let (tensor, address) = cuda::alloc(cuda, dtype, shape)?;
                let slice = cuda::memory(pinned, &tensor, address, len)?;
                Ok(Self::Cuda(tensor, slice))
            }
            _ => candle_core::bail!(
                "no tensors of {dtype:?} {shape:?} on this device: it is neither a CPU nor CUDA"
            ),
        }
    }

    /// The memory, unless there is none.
    pub(crate) fn slice(&self) -> Option<&DeviceSlice> {
        match self {
            Self::Empty => None,
            Self::Host(slice) => Some(slice),
            #[cfg(feature = "cuda")]
            Self::Cuda(_, slice) => Some(slice),
        }
    }
}

/// Waits until all places that this thread has made can be written by other streams.
pub(crate) fn settle(device: &Device) -> Result<()> {
    device.synchronize()
}

/// The crate's device for a device of candle's. For a GPU it works in candle's own context.
pub(crate) fn device(device: &Device) -> Result<pinpool::Device> {
    match device {
        Device::Cpu => pinpool::Device::open("host").map_err(wrap),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => pinpool::cudarc::device(cuda.cuda_stream().context()).map_err(wrap),
        _ => candle_core::bail!("pinpool serves candle's CPU and CUDA devices only"),
    }
}

/// The memory of a contiguous tensor on a GPU, for a copy. What was submitted to candle's stream by this thread is
/// complete when this returns. `None`: the tensor is on the CPU.
pub(crate) fn borrowed(pinned: &pinpool::Device, tensor: &Tensor) -> Result<Option<DeviceSlice>> {
    match tensor.device() {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => {
            let address = cuda::address(tensor)?;
            let len = tensor.elem_count() * tensor.dtype().size_in_bytes();
            tensor.device().synchronize()?;
            cuda::memory(pinned, tensor, address, len).map(Some)
        }
        _ => {
            let _ = pinned;
            Ok(None)
        }
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DeviceRepr};
    use candle_core::cuda_backend::{CudaDType, CudaDevice};
    use candle_core::{CudaStorage, DType, Result, Storage, Tensor};
    use half::{bf16, f16};
    use pinpool::DeviceSlice;

    use crate::wrap;

    /// The same call for each element type that has one in candle's backend and in the format.
    macro_rules! for_dtype {
        ($dtype:expr, $call:ident($($arg:expr),*)) => {
            match $dtype {
                DType::U8 => $call::<u8>($($arg),*),
                DType::U32 => $call::<u32>($($arg),*),
                DType::I16 => $call::<i16>($($arg),*),
                DType::I32 => $call::<i32>($($arg),*),
                DType::I64 => $call::<i64>($($arg),*),
                DType::BF16 => $call::<bf16>($($arg),*),
                DType::F16 => $call::<f16>($($arg),*),
                DType::F32 => $call::<f32>($($arg),*),
                DType::F64 => $call::<f64>($($arg),*),
                dtype => candle_core::bail!("tensors of {dtype:?} have no place on a GPU yet"),
            }
        };
    }

    /// A tensor of candle's own whose bytes are not initialised, and its address.
    pub(super) fn alloc(device: &CudaDevice, dtype: DType, shape: &[usize]) -> Result<(Tensor, u64)> {
        for_dtype!(dtype, alloc_of(device, shape))
    }

    fn alloc_of<T: CudaDType + DeviceRepr>(device: &CudaDevice, shape: &[usize]) -> Result<(Tensor, u64)> {
        // SAFETY: candle hands the tensor out only after `Shard::wait` has seen its bytes arrive, and every pattern of
        // bits is a value of each of the types above.
        let slice = unsafe { device.alloc::<T>(shape.iter().product()) }?;
        let address = slice.device_ptr(&device.cuda_stream()).0;
        let storage = CudaStorage::wrap_cuda_slice(slice, device.clone());
        Ok((Tensor::from((Storage::Cuda(storage), shape)), address))
    }

    /// The address of a contiguous tensor.
    pub(super) fn address(tensor: &Tensor) -> Result<u64> {
        for_dtype!(tensor.dtype(), address_of(tensor))
    }

    fn address_of<T: CudaDType + DeviceRepr>(tensor: &Tensor) -> Result<u64> {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { candle_core::bail!("the tensor is not on a GPU") };
        let Some((start, _)) = layout.contiguous_offsets() else { candle_core::bail!("the tensor has gaps") };
        let slice = storage.as_cuda_slice::<T>()?;
        Ok(slice.device_ptr(&storage.device.cuda_stream()).0 + (start * size_of::<T>()) as u64)
    }

    /// A tensor's memory as a range that the crate's copies take. The range keeps the tensor.
    pub(super) fn memory(
        pinned: &pinpool::Device,
        tensor: &Tensor,
        address: u64,
        len: usize,
    ) -> Result<DeviceSlice> {
        // SAFETY: the tensor, which is the owner, keeps its memory allocated. The callers wait for candle's stream
        // before the first copy, and give a tensor to other code only when its copy is complete; a download is waited
        // for before its call returns. All patterns of bits are values.
        unsafe { pinned.raw_memory(address, len, tensor.clone()) }.map_err(|refused| wrap(refused.error))
    }
}
