//! What only CUDA has: living in one process with others who use the same GPU.
//!
//! # The primary context
//!
//! `Device::open("cuda:N")` works in the GPU's *primary* context: the one that the runtime API (`cudaMalloc`,
//! `cudaMemcpy`), PyTorch, cudarc and candle use. So what they allocate and what this crate allocates is one world:
//!
//! - Their device memory goes into every copy call of this crate, by [`Device::raw_memory`]; ours into their kernels and
//!   copies, by [`DeviceSlice::address`](crate::DeviceSlice::address).
//! - Memory that the pool pins is pinned for them too (it is registered for all contexts), so `cudaMemcpyAsync` from a
//!   buffer of the pool runs at full speed. They must be done with it before the buffer is dropped, or hold it:
//!   [`Stream::hold`](crate::Stream::hold).
//! - No call of this crate changes which context is current on the caller's thread, nor its capture mode.
//! - A sticky error that one of them causes (an illegal address in a kernel) is everybody's: the context is lost, and with
//!   it the device as this crate sees it ([`Device::lost`]).
//!
//! A context made with `cuCtxCreate` is another world: its memory is refused by [`Device::raw_memory`].
//!
//! # What is in order with what
//!
//! Being in one context orders nothing. Streams that this crate makes are *non-blocking* (`CU_STREAM_NON_BLOCKING`): they
//! have no implicit order with the legacy default stream, on which `cudaMemcpy` and kernels launched on "stream 0" run,
//! so neither side ever waits for the other by accident, nor by design. Where both use the same memory, say so:
//!
//! - ours, then theirs: wait for the handle of the copy ([`InFlight::wait`](crate::InFlight::wait)) before they start;
//! - theirs, then ours: synchronise with their stream first.
//!
//! # The device-side heap
//!
//! Kernels that call `malloc` or `new` take memory from a heap of fixed size that the driver sets aside in the context.
//! Nothing outside of a kernel can use what they get: no copy call accepts it, and [`Device::raw_memory`] says so
//! ([`AddressFault::Unknown`](crate::AddressFault::Unknown)). [`device_heap_limit`] tells the heap's size, and
//! [`set_device_heap_limit`] sets it, before the first module that uses the heap is loaded.

use crate::device::cuda::Cuda;
use crate::error::{Error, Result};
use crate::runtime::Device;

/// Bytes of the heap from which kernels on this GPU take memory by `malloc` and `new` (`CU_LIMIT_MALLOC_HEAP_SIZE` of the
/// primary context; 8 MiB unless somebody set it).
///
/// # Errors
/// [`Error::Unsupported`] for a device that is no GPU; the device's loss; what the driver says.
pub fn device_heap_limit(device: &Device) -> Result<usize> {
    if device.context().forked() {
        return Err(Error::Forked);
    }
    device.context().alive()?;
    device.context().noting(gpu(device)?.heap_limit())
}

/// Sets the limit of that heap, in bytes, for everyone in the primary context. The driver may round it up:
/// [`device_heap_limit`] tells what it became. Can synchronise the device, so it is for the start of a server.
///
/// # Errors
/// [`Error::Config`] once a module whose kernels use the heap is loaded (`cuCtxSetLimit` says `CUDA_ERROR_INVALID_VALUE`);
/// [`Error::Unsupported`] for a device that is no GPU; the device's loss; what the driver says, out of memory among it.
pub fn set_device_heap_limit(device: &Device, bytes: usize) -> Result<()> {
    gpu(device)?;
    let context = device.context();
    context.alive()?;
    let (maker, device) = (context.clone(), device.clone());
    context.worker().call(move || maker.noting(gpu(&device)?.set_heap_limit(bytes)))
}

fn gpu(device: &Device) -> Result<&Cuda> {
    let gpu = device.context().driver().cuda();
    gpu.ok_or_else(|| Error::Unsupported(format!("{} is no GPU; open one as cuda:N", device.name())))
}
