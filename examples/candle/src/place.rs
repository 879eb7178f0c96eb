//! Where on candle's device each tensor of a checkpoint goes, and how its bytes get there.
//!
//! On a GPU each tensor is an allocation of candle's own, since candle frees its memory tensor by tensor. A wait for
//! candle's stream after each orders all copies behind it: nothing else is on that stream, so it takes microseconds.
//! The copier gets each file as one transfer of pieces, so that small tensors cost no more than large ones, and the
//! first file is under way while the second's tensors are allocated. On candle's CPU device a place is memory of the
//! crate's host device, from which candle's tensor is made when it is asked for.
//!
//! All unsafe code of the package that names addresses is here.

#![allow(unsafe_code)]

use candle_core::{DType, Device, Result, Tensor};
use pinpool::DeviceSlice;
use pinpool_safetensors::Dtype;

use crate::wrap;

/// Candle's type for one of the format's, for a tensor that a device of candle's can have.
pub(crate) fn dtype(of: Dtype, device: &Device) -> Result<DType> {
    let Ok(dtype) = DType::try_from(of) else {
        candle_core::bail!(
            "candle has no type for {of:?}: convert it, or leave it out (`Weights::open_where`)"
        )
    };
    // Candle keeps these as bytes, computes with none of them, and copies none back.
    let is_kept_only = matches!(dtype, DType::F4 | DType::F6E2M3 | DType::F6E3M2 | DType::F8E8M0);
    if is_kept_only && !device.is_cpu() {
        candle_core::bail!(
            "candle has no kernels for {of:?}: load it on the CPU, convert it, or leave it out (`Weights::open_where`)"
        )
    }
    Ok(dtype)
}

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
    /// Memory for a tensor, which copies on any stream may use from now on.
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
                // The allocation is in the order of candle's stream.
                device.synchronize()?;
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
                DType::F8E4M3 => $call::<float8::F8E4M3>($($arg),*),
                dtype => candle_core::bail!("candle has no kernels for {dtype:?}"),
            }
        };
    }

    /// A tensor of candle's own whose bytes are not initialised, and its address.
    pub(super) fn alloc(device: &CudaDevice, dtype: DType, shape: &[usize]) -> Result<(Tensor, u64)> {
        for_dtype!(dtype, alloc_of(device, shape))
    }

    fn alloc_of<T: CudaDType + DeviceRepr>(device: &CudaDevice, shape: &[usize]) -> Result<(Tensor, u64)> {
        // SAFETY: the callers hand the tensor out only when they have seen its bytes arrive, and every pattern of bits is a
        // value of each of the types above.
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
        // SAFETY: the tensor, which is the owner, keeps its memory allocated. The callers have waited for candle's
        // stream, and give a tensor to other code only when its copy is complete; a download is waited
        // for before its call returns. All patterns of bits are values.
        unsafe { pinned.raw_memory(address, len, tensor.clone()) }.map_err(|refused| wrap(refused.error))
    }
}
