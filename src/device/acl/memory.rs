//! Device memory: allocations, and the check of an address that the crate did not allocate.
//!
//! `aclrtMalloc` promises multiples of 64 bytes, and the contract wants 256. So an allocation that
//! starts elsewhere is made again with 256 bytes more, and freed by the library's own address.
//!
//! Newer libraries say what an address is (`aclrtPointerGetAttributes`), but not its allocation's
//! length, and fail for memory that they do not know. So the crate lists its own allocations.

use std::collections::BTreeMap;
use std::ffi::c_int;

use crate::locks::Mutex;

use super::Acl;
use super::api::PointerAttributes;
use super::host::is_locked;
use crate::device::address::AddressFault;
use crate::error::{Error, Result};
use crate::os;

/// The contract's alignment of allocations, in bytes.
pub(super) const ALLOCATION_ALIGN: u64 = 256;
/// acl_rt.h: aclrtMemMallocPolicy's ACL_MEM_MALLOC_HUGE_FIRST.
const HUGE_FIRST: c_int = 0;
/// acl_rt.h: aclrtMemLocationType.
const LOCATION_HOST: c_int = 0;
const LOCATION_DEVICE: c_int = 1;
const MANAGED: c_int = 3;
const HOST_NUMA: c_int = 4;

/// All allocations of all devices, by device and first byte, with their lengths and the library's
/// addresses. (Each device has its own part of one range of addresses.)
pub(super) static ALLOCATIONS: Mutex<BTreeMap<(i32, u64), (usize, u64)>> = Mutex::new(BTreeMap::new());

impl Acl {
    pub(super) fn malloc(&self, len: usize) -> Result<u64> {
        let _current = self.current()?;
        let mut at = std::ptr::null_mut();
        // SAFETY: writes an address.
        self.said("aclrtMalloc", unsafe { self.api.malloc.call(&raw mut at, len, HUGE_FIRST) })?;
        match at.expose_provenance() {
            0 => Err(Error::OutOfMemory { wanted: len, text: "aclrtMalloc gave no address".into() }),
            address => Ok(address as u64),
        }
    }

    pub(super) fn free_at(&self, at: u64) -> Result<()> {
        let _pass = self.alive()?;
        // SAFETY: allocated by this driver, freed once, unused by contract. Needs no context.
        self.said("aclrtFree", unsafe {
            self.api.free.call(std::ptr::with_exposed_provenance_mut(at as usize))
        })
    }

    /// What is wrong with a range, if anything is known to be.
    pub(super) fn fault(&self, address: u64, len: usize) -> Result<Option<AddressFault>> {
        if let Some((ordinal, start, size)) = allocation(address) {
            if ordinal != self.ordinal {
                return Ok(Some(AddressFault::OtherDevice { device: format!("acl:{ordinal}") }));
            }
            let over = len.saturating_sub(size - (address - start) as usize);
            return Ok((over > 0).then_some(AddressFault::PastEnd { start, size, over }));
        }
        if is_locked(std::ptr::without_provenance(address as usize), 1) {
            return Ok(Some(AddressFault::Host { registered: true }));
        }
        let plain = || match os::is_host_memory(address) {
            Some(true) => AddressFault::Host { registered: false },
            _ => AddressFault::Unknown,
        };
        let Some(ask) = self.api.pointer_attributes else {
            // No answer. Memory that is not the host's may be the device's; in RC mode any may be.
            let is_host = os::is_host_memory(address) == Some(true) && !self.on_device;
            return Ok((is_host || address < os::page_size() as u64).then(plain));
        };
        let mut found = PointerAttributes::unknown();
        let _current = self.current()?;
        // SAFETY: writes the attributes.
        let code = unsafe { ask.call(std::ptr::without_provenance(address as usize), &raw mut found) };
        match self.said("aclrtPointerGetAttributes", code) {
            Err(error) if error.is_device_lost() => return Err(error),
            // Some versions return an error for memory that they do not know.
            Err(_) => return Ok(Some(plain())),
            Ok(()) => {}
        }
        Ok(match found.location_type {
            LOCATION_DEVICE if found.location_id == self.ordinal.unsigned_abs() => None,
            LOCATION_DEVICE => {
                Some(AddressFault::OtherDevice { device: format!("acl:{}", found.location_id) })
            }
            MANAGED => None,
            // Where the program runs on the device, its memory is the device's.
            LOCATION_HOST | HOST_NUMA if self.on_device => None,
            LOCATION_HOST | HOST_NUMA => Some(AddressFault::Host { registered: true }),
            _ => Some(plain()),
        })
    }
}

/// The crate's allocation that an address lies in: its device, its first byte and its length.
fn allocation(address: u64) -> Option<(i32, u64, usize)> {
    let all = ALLOCATIONS.lock();
    let mut entries = all.iter().map(|(&(ordinal, start), &(len, _))| (ordinal, start, len));
    entries.find(|&(_, start, len)| (start..start + len as u64).contains(&address))
}
