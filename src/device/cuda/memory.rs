//! Memory in stream order, copies between host memory, and the limit of the device-side heap.
//!
//! # Copies between host memory
//!
//! The driver has a call for them, and it is of no use here: `cuMemcpyAsync` between two host ranges keeps its caller
//! until the stream has come to it, pinned or not ("fully synchronous with respect to the host", as the API's page on
//! synchronisation says; measured, too: behind half a second of other work it took half a second, and so did
//! `cuMemcpyDtoDAsync` given the same memory as device pointers). A host function does what the contract asks for: it
//! is queued at once, it runs in the stream's order on a thread of the driver's, and it makes no driver call. After an
//! error of the device it is never called; then what it was to copy is quarantined with everything else there.

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
    let code = unsafe { (api.device_attribute)(&raw mut supported, MEMORY_POOLS_SUPPORTED, device) };
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
        // SAFETY: the function finds what it is to copy by its place; the ranges are the caller's word.
        self.said("cuLaunchHostFunc", unsafe { (self.api.launch_host)(stream, run, place) })
    }

    pub(super) fn pool_allocate(&self, stream: CUstream, len: usize) -> Result<DevicePtr> {
        let Some(allocate) = self.api.mem_alloc_async else { return Err(self.no_pools()) };
        let _current = self.relaxed()?;
        let mut ptr = 0;
        // SAFETY: writes an address.
        self.said("cuMemAllocAsync", unsafe { allocate(&raw mut ptr, len, stream) }).map(|()| DevicePtr(ptr))
    }

    pub(super) fn pool_free(&self, stream: CUstream, ptr: DevicePtr) -> Result<()> {
        let Some(free) = self.api.mem_free_async else { return Err(self.no_pools()) };
        let _current = self.relaxed()?;
        // SAFETY: allocated by us on this stream, freed once, and no longer in use by the contract.
        self.said("cuMemFreeAsync", unsafe { free(ptr.0, stream) })
    }

    fn no_pools(&self) -> Error {
        Error::Unsupported(format!(
            "{} has no memory pools; that takes a driver of CUDA 11.2 or later",
            self.name
        ))
    }

    /// Bytes of the device-side heap.
    pub(crate) fn heap_limit(&self) -> Result<usize> {
        let _current = self.relaxed()?;
        let mut bytes = 0;
        // SAFETY: writes a number.
        let code = unsafe { (self.api.ctx_get_limit)(&raw mut bytes, MALLOC_HEAP_SIZE) };
        self.said("cuCtxGetLimit", code).map(|()| bytes)
    }

    /// Sets it. May synchronise the device.
    pub(crate) fn set_heap_limit(&self, bytes: usize) -> Result<()> {
        let _current = self.relaxed()?;
        // SAFETY: takes numbers only.
        let code = unsafe { (self.api.ctx_set_limit)(MALLOC_HEAP_SIZE, bytes) };
        match self.said("cuCtxSetLimit", code) {
            Err(Error::Device(e)) if e.code == INVALID_VALUE => Err(Error::Config(format!(
                "{e}: the device heap's limit cannot become {bytes} bytes now: a module whose kernels use the heap (malloc, \
                 new) is loaded; set the limit before any such module is loaded"
            ))),
            result => result,
        }
    }
}
