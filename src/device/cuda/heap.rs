//! The limit of the device-side heap.

use std::ffi::c_int;

use super::Cuda;
use crate::error::{Error, Result};

/// cuda.h: CU_LIMIT_MALLOC_HEAP_SIZE.
const MALLOC_HEAP_SIZE: c_int = 2;
/// cuda.h: CUDA_ERROR_INVALID_VALUE.
const INVALID_VALUE: i64 = 1;

impl Cuda {
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
            Err(Error::Device(e)) if e.code == INVALID_VALUE => Err(Error::Argument(format!(
                "{e}: the device heap's limit cannot become {bytes} bytes now: a module whose kernels use the heap (malloc, \
                 new) is loaded; set the limit before any such module is loaded"
            ))),
            result => result,
        }
    }
}
