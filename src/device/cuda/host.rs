//! Host memory, as the driver knows it: registered, allocated by the driver itself, and managed.
//!
//! # Registering
//!
//! `cuMemHostRegister` takes ranges that start and end anywhere, refuses those that overlap a registered one by a byte,
//! and allows two on one page. A copy that starts in one registration and ends outside of it is refused, even where
//! another registration begins: so a range that is copied in one piece is registered in one piece. Every range is
//! registered as portable, that is, for every context of the process.
//!
//! No flag asks for a mapping into the device's address space. Where addresses are unified, as they are on every
//! platform that this crate supports, all registered memory is mapped (runtime API manual, `cudaHostRegisterDefault`;
//! seen on driver 580).
//!
//! # Refusals
//!
//! The driver says little about why it refuses: code 1 stands for a range that is not mapped, for one that cannot be
//! written to, for a shared mapping of a file whose file system does not let its pages be pinned for writing (ext4 and
//! its like on newer kernels; memory file systems do), and for memory that the driver allocated. The error lists the
//! remedies. Of memory that the crate has mapped itself none of that can be true. Drivers say 1 of it, too, where pages
//! cannot be pinned at the moment, and the same call succeeds later (sglang issues 7666 and 39744, 1Cat-vLLM 598).
//!
//! On machines in confidential-computing mode `cuMemHostRegister` always answers 801, and `cuMemHostAlloc` works (vLLM
//! issue 55428).

use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use super::api::CudaCode;
use super::{Cuda, check};
use crate::device::vendor::advise;
use crate::device::{HostAllocFlags, HostKind};
use crate::error::{DeviceError, Error, ErrorClass, Result};

/// cuda.h: CU_MEMHOSTREGISTER_PORTABLE: pinned for every context of the process.
const REGISTER_PORTABLE: u32 = 1;
/// cuda.h: CU_MEMHOSTREGISTER_READ_ONLY: the device only reads it.
const REGISTER_READ_ONLY: u32 = 8;
/// cuda.h: CU_MEMHOSTALLOC_PORTABLE, _DEVICEMAP and _WRITECOMBINED.
const ALLOC_PORTABLE: u32 = 1;
const ALLOC_MAPPED: u32 = 2;
const ALLOC_WRITE_COMBINED: u32 = 4;
/// cuda.h: CU_MEM_ATTACH_GLOBAL: any stream of any device may use it.
const ATTACH_GLOBAL: u32 = 1;

/// cuda.h: CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY.
const CAN_MAP_HOST_MEMORY: c_int = 19;
/// cuda.h: CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED. Older drivers do not know it.
const READ_ONLY_REGISTER: c_int = 113;

const ALREADY_REGISTERED: CudaCode = CudaCode(712);
const INVALID_VALUE: CudaCode = CudaCode(1);
const NOT_SUPPORTED: CudaCode = CudaCode(801);

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

    /// # Safety
    /// The range is mapped, and stays so until it is unregistered.
    pub(super) unsafe fn host_register(&self, base: NonNull<u8>, len: usize, read_only: bool) -> Result<()> {
        let _current = self.relaxed()?;
        // Where the device does not know the flag, memory that can be written to is registered without it.
        let flags = match read_only && self.has(READ_ONLY_REGISTER)? {
            true => REGISTER_PORTABLE | REGISTER_READ_ONLY,
            false => REGISTER_PORTABLE,
        };
        // SAFETY: the caller promises that the range is mapped, and stays so.
        let code = unsafe { self.api.host_register.call(base.as_ptr().cast(), len, flags) };
        self.said("cuMemHostRegister", code).map_err(|error| advised(error, remedy(code, read_only)))
    }

    /// Registers memory that the crate has mapped itself.
    ///
    /// # Safety
    /// As for `host_register`.
    pub(super) unsafe fn host_pin(&self, base: NonNull<u8>, len: usize) -> Result<()> {
        let _current = self.relaxed()?;
        // SAFETY: the caller promises that the range is mapped, and stays so.
        let code = unsafe { self.api.host_register.call(base.as_ptr().cast(), len, REGISTER_PORTABLE) };
        self.said("cuMemHostRegister", code).map_err(|error| match (code, advised(error, pin_remedy(code))) {
            (INVALID_VALUE, Error::Device(error)) => {
                Error::Device(DeviceError { class: ErrorClass::Transient, ..error })
            }
            (NOT_SUPPORTED, error) => {
                // Relaxed: a thread that does not see it yet asks the driver once more.
                if !self.allocates.swap(true, Ordering::Relaxed) {
                    crate::foreign::warn!(
                        target: "pinpool::region", device = &*self.name, %error,
                        "host memory cannot be registered here: pools whose backing is not set take memory that the \
                         driver allocates (Backing::HostAlloc)"
                    );
                }
                Error::Unsupported(error.to_string())
            }
            (_, error) => error,
        })
    }

    /// # Safety
    /// Registered once, unregistered once, and no copy uses it.
    pub(super) unsafe fn host_unregister(&self, base: NonNull<u8>) -> Result<()> {
        let _current = self.relaxed()?;
        // SAFETY: the caller promises that it is registered, and that no copy uses it.
        let code = unsafe { self.api.host_unregister.call(base.as_ptr().cast()) };
        self.said("cuMemHostUnregister", code)
    }

    pub(super) fn host_allocate(&self, len: usize, kind: HostKind) -> Result<NonNull<u8>> {
        let _current = self.relaxed()?;
        let (call, address) = match kind {
            HostKind::Locked(HostAllocFlags { portable, mapped, write_combined }) => {
                let flag = |on, flag| if on { flag } else { 0 };
                let flags = flag(portable, ALLOC_PORTABLE)
                    | flag(mapped, ALLOC_MAPPED)
                    | flag(write_combined, ALLOC_WRITE_COMBINED);
                let mut at = std::ptr::null_mut();
                // SAFETY: writes an address.
                let code = unsafe { self.api.host_alloc.call(&raw mut at, len, flags) };
                self.said("cuMemHostAlloc", code)?;
                ("cuMemHostAlloc", at.cast())
            }
            HostKind::Managed => {
                let mut at = 0;
                // SAFETY: writes an address.
                let code = unsafe { self.api.managed_alloc.call(&raw mut at, len, ATTACH_GLOBAL) };
                self.said("cuMemAllocManaged", code)?;
                // One address, for the host and the device.
                ("cuMemAllocManaged", std::ptr::with_exposed_provenance_mut(at as usize))
            }
        };
        NonNull::new(address)
            .ok_or_else(|| Error::OutOfMemory { wanted: len, text: format!("{call} gave no address") })
    }

    /// # Safety
    /// Allocated once as this kind, freed once, and not in use.
    pub(super) unsafe fn host_free(&self, base: NonNull<u8>, kind: HostKind) -> Result<()> {
        let _current = self.relaxed()?;
        match kind {
            HostKind::Locked(_) => {
                // SAFETY: the caller promises that it is host memory of the driver's, freed once and not in use.
                self.said("cuMemFreeHost", unsafe { self.api.host_free.call(base.as_ptr().cast()) })
            }
            HostKind::Managed => {
                let address = base.as_ptr().expose_provenance() as u64;
                // SAFETY: the caller promises that it is managed memory, freed once and not in use.
                self.said("cuMemFree", unsafe { self.api.mem_free.call(address) })
            }
        }
    }

    pub(super) fn host_device_address(&self, at: NonNull<u8>) -> Result<u64> {
        let _current = self.relaxed()?;
        let mut address = 0;
        // SAFETY: writes an address; one that the driver does not know is refused.
        let code = unsafe { self.api.host_device_pointer.call(&raw mut address, at.as_ptr().cast(), 0) };
        check(self.api, &self.name, "cuMemHostGetDevicePointer", code).map(|()| address).map_err(|error| {
            if code == INVALID_VALUE && self.has(CAN_MAP_HOST_MEMORY) == Ok(false) {
                return Error::Unsupported(format!(
                    "{} cannot map host memory (CAN_MAP_HOST_MEMORY is 0); copy the buffer instead",
                    self.name
                ));
            }
            match code {
                INVALID_VALUE => {
                    advise(error, "the memory is not pinned for this device; copy the buffer instead")
                }
                _ => error,
            }
        })
    }
}

/// The remedy where pinning memory of the crate's own is refused with that code.
fn pin_remedy(code: CudaCode) -> Option<&'static str> {
    match code {
        INVALID_VALUE => Some(
            "the system could not pin these pages: memory is short, fragmented or being moved; try again, pin less in one \
             call (PoolBuilder::extent), or go on without (Unpinned::Allow)",
        ),
        code => remedy(code, false),
    }
}

/// The remedy where registering is refused with that code.
fn remedy(code: CudaCode, read_only: bool) -> Option<&'static str> {
    match code {
        ALREADY_REGISTERED => Some(
            "a part of it is registered already, by this crate, the runtime or another library: register it once and share the \
             value (Arc), or copy by way of a pool's buffer",
        ),
        INVALID_VALUE if read_only => Some(
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

fn advised(error: Error, remedy: Option<&str>) -> Error {
    match remedy {
        Some(remedy) => advise(error, remedy),
        None => error,
    }
}
