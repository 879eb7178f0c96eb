//! Device memory: allocations, and the check of an address that the crate did not allocate.
//!
//! `aclrtMalloc` promises multiples of 64 bytes, and the contract wants 256. So an allocation that
//! starts elsewhere is made again with 256 bytes more, and freed by the library's own address.
//!
//! No call that every version has tells what an address is. So the crate lists its own allocations,
//! and takes an address that is in none of them, and is no host memory, for the device's.

use std::collections::BTreeMap;
use std::ffi::c_int;

use crate::locks::Mutex;

use super::Acl;
use super::host::locked;
use crate::device::memory::AddressFault;
use crate::error::{Error, Result};
use crate::os;

/// The contract's alignment of allocations, in bytes.
pub(super) const ALLOCATION_ALIGN: u64 = 256;
/// acl_rt.h: aclrtMemMallocPolicy's ACL_MEM_MALLOC_HUGE_FIRST.
const HUGE_FIRST: c_int = 0;

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
    pub(super) fn fault(&self, address: u64, len: usize) -> Option<AddressFault> {
        if let Some((ordinal, start, size)) = allocation(address) {
            if ordinal != self.ordinal {
                return Some(AddressFault::OtherDevice { device: format!("acl:{ordinal}") });
            }
            let over = len.saturating_sub(size - (address - start) as usize);
            return (over > 0).then_some(AddressFault::PastEnd { start, size, over });
        }
        if locked(address as usize, 1).is_some() {
            return Some(AddressFault::Host { registered: true });
        }
        // In RC mode the program's memory is the device's.
        match os::is_host_memory(address) {
            Some(true) if !self.on_device => Some(AddressFault::Host { registered: false }),
            _ => (address < os::page_size() as u64).then_some(AddressFault::Unknown),
        }
    }
}

/// The crate's allocation that an address lies in: its device, its first byte and its length.
fn allocation(address: u64) -> Option<(i32, u64, usize)> {
    let all = ALLOCATIONS.lock();
    let mut entries = all.iter().map(|(&(ordinal, start), &(len, _))| (ordinal, start, len));
    entries.find(|&(_, start, len)| (start..start + len as u64).contains(&address))
}
