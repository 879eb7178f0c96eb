//! Host memory, as the driver knows it: registered, allocated by the driver itself, and managed.
//!
//! # Registering
//!
//! `cuMemHostRegister` takes ranges that start and end anywhere, refuses those that overlap a
//! registered one, and allows two on one page. A copy that leaves one registration is refused, even
//! into the next one: so a range that is copied in one piece is registered in one piece. Every
//! range is registered as portable, that is, for every context of the process.
//!
//! No flag asks for a mapping into the device's address space. Where addresses are unified, as they
//! are on every platform that this crate supports, all registered memory is mapped (runtime API
//! manual, `cudaHostRegisterDefault`; seen on driver 580).
//!
//! # Refusals
//!
//! The driver says little about why it refuses: code 1 stands for a range that is not mapped, one
//! that cannot be written to, a shared mapping of a file whose file system does not let its pages
//! be pinned for writing (ext4 and its like on newer kernels; memory file systems do), and for
//! memory of the driver. The error lists the remedies. For memory that the crate has mapped, 1
//! means that pages cannot be pinned now; the call succeeds later (sglang issues 7666 and 39744,
//! 1Cat-vLLM 598).
//!
//! On machines in confidential-computing mode `cuMemHostRegister` always answers 801, and
//! `cuMemHostAlloc` works (vLLM issue 55428).

use std::ffi::c_int;

use super::Cuda;
use super::api::CudaCode;
use crate::device::Whose;
use crate::device::vendor::advise;
use crate::error::{Error, Result};

/// cuda.h: CU_LIMIT_MALLOC_HEAP_SIZE.
const MALLOC_HEAP_SIZE: c_int = 2;
/// cuda.h: CU_MEMHOSTREGISTER_PORTABLE: pinned for every context of the process.
pub(super) const REGISTER_PORTABLE: u32 = 1;
/// cuda.h: CU_MEMHOSTREGISTER_READ_ONLY: the device only reads it.
pub(super) const REGISTER_READ_ONLY: u32 = 8;
/// cuda.h: CU_MEMHOSTALLOC_PORTABLE, _DEVICEMAP and _WRITECOMBINED.
pub(super) const ALLOC_PORTABLE: u32 = 1;
pub(super) const ALLOC_MAPPED: u32 = 2;
pub(super) const ALLOC_WRITE_COMBINED: u32 = 4;
/// cuda.h: CU_MEM_ATTACH_GLOBAL: any stream of any device may use it.
pub(super) const ATTACH_GLOBAL: u32 = 1;

/// cuda.h: CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY.
pub(super) const CAN_MAP_HOST_MEMORY: c_int = 19;
/// cuda.h: CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED. Older drivers do not know it.
pub(super) const READ_ONLY_REGISTER: c_int = 113;

const ALREADY_REGISTERED: CudaCode = CudaCode(712);
pub(super) const INVALID_VALUE: CudaCode = CudaCode(1);
pub(super) const NOT_SUPPORTED: CudaCode = CudaCode(801);

impl Cuda {
    /// Whether the device has an attribute. It has none that the driver does not know.
    pub(super) fn has(&self, attribute: c_int) -> Result<bool> {
        let mut value: c_int = 0;
        // SAFETY: writes a number.
        match unsafe { self.api.device_attribute.call(&raw mut value, attribute, self.device) } {
            INVALID_VALUE => Ok(false),
            code => self.said("cuDeviceGetAttribute", code).map(|()| value != 0),
        }
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
            Err(Error::Device(e)) if code == INVALID_VALUE => Err(Error::Argument(format!(
                "{e}: the device heap's limit cannot become {bytes} bytes now: a module whose kernels use the heap (malloc, \
                 new) is loaded; set the limit before any such module is loaded"
            ))),
            result => result,
        }
    }
}

/// The remedy where registering is refused with that code.
pub(super) fn remedy(code: CudaCode, whose: Whose) -> Option<&'static str> {
    match code {
        ALREADY_REGISTERED => Some(
            "a part of it is registered already, by this crate, the runtime or another library: register it once and share the \
             value (Arc), or copy by way of a pool's buffer",
        ),
        INVALID_VALUE if whose == Whose::Crate => Some(
            "the system could not pin these pages: memory is short, fragmented or being moved; try again, pin less in one \
             call (PoolBuilder::extent), or go on without (Unpinned::Allow)",
        ),
        INVALID_VALUE if whose == Whose::ProgramToRead => Some(
            "a part of it is not mapped for reading, or the driver allocated it itself, and then it is pinned as it is",
        ),
        INVALID_VALUE => Some(
            "a part of it is not mapped for reading and writing, or it is a shared mapping of a file whose pages cannot be \
             pinned for writing: use register_read_only for uploads, or a private mapping, or a memory file system; memory that \
             the driver allocated itself is pinned as it is",
        ),
        NOT_SUPPORTED => Some(
            "this device or system cannot register host memory: copy by way of a pool with Backing::HostAlloc",
        ),
        _ => None,
    }
}

pub(super) fn advised(error: Error, remedy: Option<&str>) -> Error {
    match remedy {
        Some(remedy) => advise(error, remedy),
        None => error,
    }
}
