//! The check of an address that the crate did not allocate.
//!
//! One call answers it: `cuPointerGetAttributes`, which unlike `cuPointerGetAttribute` does not
//! fail for an unknown address. (Seen on driver 580: it then returns success, gives no type, and
//! leaves the range as it was.) An unknown address is one of three things. Ordinary host memory is
//! found in the process's own table of mappings. Otherwise the memory was freed, or it came from a
//! kernel's `malloc`: the driver owns that heap as a whole and does not know its parts, and no copy
//! call accepts them. These two look the same, so the error names both.
//!
//! The types of memory are cuda.h's `CUmemorytype`. Managed memory has the type
//! `POINTER_DEVICE` and an attribute of its own. Memory of pools and of `cuMemMap` belongs to no
//! context (null), and may be used in any context of its device. For `cuMemMap` the driver gives
//! the whole reservation as the range, mapped or not: a copy to an unmapped part fails later.

use std::ffi::{c_int, c_uint, c_void};

use super::Cuda;
use super::api::CUcontext;
use crate::device::DevicePtr;
use crate::device::memory::AddressFault;
use crate::error::Result;
use crate::os;

// cuda.h: CUpointer_attribute.
const CONTEXT: c_int = 1;
const MEMORY_TYPE: c_int = 2;
const IS_MANAGED: c_int = 8;
const DEVICE_ORDINAL: c_int = 9;
const RANGE_START_ADDR: c_int = 11;
const RANGE_SIZE: c_int = 12;

// cuda.h: CUmemorytype.
const POINTER_HOST: c_uint = 1;
const POINTER_DEVICE: c_uint = 2;

/// The driver's answer about an address.
#[derive(Debug)]
pub(super) struct Attributes {
    context: CUcontext,
    kind: c_uint,
    managed: c_uint,
    ordinal: c_int,
    start: u64,
    size: usize,
}

impl Cuda {
    pub(super) fn attributes(&self, ptr: DevicePtr) -> Result<Attributes> {
        let mut found =
            Attributes { context: std::ptr::null_mut(), kind: 0, managed: 0, ordinal: -1, start: 0, size: 0 };
        let names = [CONTEXT, MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL, RANGE_START_ADDR, RANGE_SIZE];
        let places: [*mut c_void; 6] = [
            (&raw mut found.context).cast(),
            (&raw mut found.kind).cast(),
            (&raw mut found.managed).cast(),
            (&raw mut found.ordinal).cast(),
            (&raw mut found.start).cast(),
            (&raw mut found.size).cast(),
        ];
        let _current = self.relaxed()?;
        // SAFETY: as many names as places, each place of the type that cuda.h gives for its name.
        let code = unsafe {
            self.api.pointer_attributes.call(names.len() as c_uint, names.as_ptr(), places.as_ptr(), ptr.0)
        };
        self.said("cuPointerGetAttributes", code).map(|()| found)
    }

    /// What is wrong with a range, if anything is.
    pub(super) fn fault(&self, address: u64, len: usize, found: &Attributes) -> Option<AddressFault> {
        let is_device = found.kind == POINTER_DEVICE || found.managed != 0;
        if !is_device {
            return Some(match (found.kind, os::is_host_memory(address)) {
                (POINTER_HOST, _) => AddressFault::Host { registered: true },
                (_, Some(true)) => AddressFault::Host { registered: false },
                _ => AddressFault::Unknown,
            });
        }
        // Managed memory moves between the devices; its ordinal names its home.
        if found.ordinal != self.ordinal && found.managed == 0 {
            return Some(AddressFault::OtherDevice { device: format!("cuda:{}", found.ordinal) });
        }
        if !found.context.is_null() && found.context != self.context && found.managed == 0 {
            return Some(AddressFault::OtherContext);
        }
        let (start, size) = (found.start, found.size);
        // Where the driver gives no range, `len` cannot be checked.
        let left = (start as usize).wrapping_add(size).wrapping_sub(address as usize);
        let over = if size == 0 { 0 } else { len.saturating_sub(left) };
        (over > 0).then_some(AddressFault::PastEnd { start, size, over })
    }
}
