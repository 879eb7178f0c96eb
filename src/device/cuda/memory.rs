//! Memory in stream order, copies between host memory, and the limit of the device-side heap.
//!
//! # Copies between host memory
//!
//! The driver's call for them is of no use here: `cuMemcpyAsync` between two host ranges blocks its caller until the
//! stream has come to it, with pinned memory or not ("fully synchronous with respect to the host", as the API's page on
//! synchronisation says; measured, too: behind half a second of other work it took half a second, and so did
//! `cuMemcpyDtoDAsync` with the same memory as device pointers). A host function does what the contract asks for: it is
//! queued at once, it runs in the stream's order on one of the driver's threads, and it makes no driver call. After an
//! error of the device it is never called; its buffers are then quarantined with everything else there.

use std::ffi::c_int;
use std::sync::Arc;

use super::api::{CUdevice, CUstream, CudaApi};
use super::{Cuda, check};
use crate::device::{DevicePtr, callback};
use crate::error::{Error, Result};

/// cuda.h: CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED.
const MEMORY_POOLS_SUPPORTED: c_int = 115;
/// cuda.h: CU_LIMIT_MALLOC_HEAP_SIZE.
const MALLOC_HEAP_SIZE: c_int = 2;
/// cuda.h: CUDA_ERROR_INVALID_VALUE.
const INVALID_VALUE: i64 = 1;

/// Whether a device has memory in stream order, and the driver the calls for it.
pub(super) fn has_pools(api: &CudaApi, name: &Arc<str>, device: CUdevice) -> Result<bool> {
    if api.mem_alloc_async.is_none() || api.mem_free_async.is_none() {
        return Ok(false);
    }
    let mut supported: c_int = 0;
    // SAFETY: writes a number.
    let code = unsafe { api.device_attribute.call(&raw mut supported, MEMORY_POOLS_SUPPORTED, device) };
    check(api, name, "cuDeviceGetAttribute", code).map(|()| supported != 0)
}

impl Cuda {
    /// # Safety
    /// As for [`Driver::copy`](crate::device::Driver::copy).
    pub(super) unsafe fn copy_on_host(
        &self,
        stream: CUstream,
        src: *const u8,
        dst: *mut u8,
        len: usize,
    ) -> Result<()> {
        let (run, place) = callback::copy(src, dst, len);
        // SAFETY: the function finds its copy by the key `place`; the caller promises both ranges.
        self.said("cuLaunchHostFunc", unsafe { self.api.launch_host.call(stream, run, place) })
    }

    pub(super) fn pool_allocate(&self, stream: CUstream, len: usize) -> Result<DevicePtr> {
        let Some(allocate) = self.api.mem_alloc_async else { return Err(self.no_pools()) };
        let _current = self.relaxed()?;
        let mut ptr = 0;
        // SAFETY: writes an address.
        self.said("cuMemAllocAsync", unsafe { allocate.call(&raw mut ptr, len, stream) })
            .map(|()| DevicePtr(ptr))
    }

    pub(super) fn pool_free(&self, stream: CUstream, ptr: DevicePtr) -> Result<()> {
        let Some(free) = self.api.mem_free_async else { return Err(self.no_pools()) };
        let _current = self.relaxed()?;
        // SAFETY: allocated by this driver on this stream, freed once, and by the contract no longer in use.
        self.said("cuMemFreeAsync", unsafe { free.call(ptr.0, stream) })
    }

    fn no_pools(&self) -> Error {
        Error::Unsupported(format!(
            "{} has no memory pools; that takes a driver of CUDA 11.2 or later",
            self.name
        ))
    }

    /// The size of the device-side heap, in bytes.
    pub(crate) fn heap_limit(&self) -> Result<usize> {
        let _current = self.relaxed()?;
        let mut bytes = 0;
        // SAFETY: writes a number.
        let code = unsafe { self.api.ctx_get_limit.call(&raw mut bytes, MALLOC_HEAP_SIZE) };
        self.said("cuCtxGetLimit", code).map(|()| bytes)
    }

    /// Sets the size of the device-side heap. May synchronise the device.
    pub(crate) fn set_heap_limit(&self, bytes: usize) -> Result<()> {
        let _current = self.relaxed()?;
        // SAFETY: takes numbers only.
        let code = unsafe { self.api.ctx_set_limit.call(MALLOC_HEAP_SIZE, bytes) };
        match self.said("cuCtxSetLimit", code) {
            Err(Error::Device(e)) if e.code == INVALID_VALUE => Err(Error::Config(format!(
                "{e}: the device heap's limit cannot become {bytes} bytes now: a module whose kernels use the heap (malloc, \
                 new) is loaded; set the limit before any such module is loaded"
            ))),
            result => result,
        }
    }
}
