//! What an address is, as the driver sees it: the check for memory that somebody else allocated.
//!
//! One call tells everything: `cuPointerGetAttributes`, which unlike its singular does not fail for addresses that the
//! driver knows nothing of. (Seen on driver 580: for those it says success, gives no type, and leaves the range as it
//! was.) Such an address is one of three things. Ordinary host memory is found in the process's own table of mappings.
//! What is left has been freed, or is memory that a kernel's `malloc` gave: the driver owns that heap as a whole and
//! knows nothing of what is in it, and no copy call accepts it. The two cannot be told apart from outside, so the error
//! names both.
//!
//! The type of memory is that of cuda.h's `CUmemorytype`; managed memory says `POINTER_DEVICE` and is told by an
//! attribute of its own. Memory of pools and of `cuMemMap` belongs to no context (null), and is used in any of its
//! device's. For the latter the driver gives the whole reservation as the range: whether every part of it is mapped, it
//! finds out when it copies.

use std::ffi::{c_int, c_uint, c_void};

use super::Cuda;
use super::api::CUcontext;
use crate::device::DevicePtr;
use crate::error::{AddressFault, Error, Result};
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

/// What the driver says about an address.
#[derive(Debug)]
struct Attributes {
    context: CUcontext,
    kind: c_uint,
    managed: c_uint,
    ordinal: c_int,
    start: u64,
    size: usize,
}

impl Cuda {
    /// Whether copies of this device can use memory that others allocated.
    pub(super) fn examine_range(&self, ptr: DevicePtr, len: usize) -> Result<()> {
        let found = self.attributes(ptr)?;
        self.fault(ptr.0, len, &found).map_or(Ok(()), |fault| {
            Err(Error::BadAddress { device: self.name.to_string(), address: ptr.0, len, fault })
        })
    }

    fn attributes(&self, ptr: DevicePtr) -> Result<Attributes> {
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
        // SAFETY: as many names as places, and each place is of the type that cuda.h gives for its name.
        let code = unsafe {
            (self.api.pointer_attributes)(names.len() as c_uint, names.as_ptr(), places.as_ptr(), ptr.0)
        };
        self.said("cuPointerGetAttributes", code).map(|()| found)
    }

    /// What is wrong with a range, if anything is.
    fn fault(&self, address: u64, len: usize, found: &Attributes) -> Option<AddressFault> {
        let is_device = found.kind == POINTER_DEVICE || found.managed != 0;
        if !is_device {
            return Some(match (found.kind, os::is_host_memory(address)) {
                (POINTER_HOST, _) => AddressFault::Host { registered: true },
                (_, Some(true)) => AddressFault::Host { registered: false },
                _ => AddressFault::Unknown,
            });
        }
        // Managed memory moves between the devices, and says where it is at home.
        if found.ordinal != self.ordinal && found.managed == 0 {
            return Some(AddressFault::OtherDevice { device: format!("cuda:{}", found.ordinal) });
        }
        if !found.context.is_null() && found.context != self.context && found.managed == 0 {
            return Some(AddressFault::OtherContext);
        }
        let (start, size) = (found.start, found.size);
        // Where the driver gives no range there is nothing to hold against it.
        let left = (start as usize).wrapping_add(size).wrapping_sub(address as usize);
        let over = if size == 0 { 0 } else { len.saturating_sub(left) };
        (over > 0).then_some(AddressFault::PastEnd { start, size, over })
    }
}
