//! Device memory, and the function that moves bytes.
//!
//! *Addresses.* A device's memory is a set of mappings of this process, behind addresses that mean
//! nothing to the CPU: they count upwards, with gaps, and are never used again. So a stale address,
//! another device's, or one past an end is refused at submission, and hits no other allocation.
//!
//! *Races.* A program may tell two streams to write the same bytes at once. On an accelerator the
//! result is garbage; here it must not be a data race in the process, since safe code can ask for
//! it. So each MiB of an allocation has a lock, which a copy holds while it reads or writes there.
//! A copy within the device holds two, in the order of their addresses.

use std::ptr::{NonNull, from_ref};
use std::sync::Arc;

use crate::locks::Mutex;
use crate::os;

/// Bytes under one lock.
const PART: usize = 1 << 20;
/// Allocations of this size and more lie on huge pages where the system has them.
const HUGE: usize = 2 << 20;

/// One allocation. Operations that use it keep it.
pub(super) struct Block {
    pub(super) len: usize,
    data: NonNull<u8>,
    locks: Box<[Mutex<()>]>,
}

// SAFETY: the mapping belongs to the block, and is accessed under its locks only.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    /// `len` is not 0. `None`: the system has no such memory.
    pub(super) fn new(len: usize) -> Option<Arc<Self>> {
        let data = os::map(len, if len < HUGE { 1 } else { HUGE }).ok()?;
        if len >= HUGE {
            // Zeroing small pages would take most of the time of a first copy.
            os::advise_huge(data, len);
        }
        let locks = (0..len.div_ceil(PART)).map(|_| Mutex::new(())).collect();
        Some(Arc::new(Self { len, data, locks }))
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: mapped with this length, and this was the last reference to it.
        if let Err(error) = unsafe { os::unmap(self.data, self.len) } {
            crate::foreign::warn!(target: "pinpool::device::leak", %error, "device memory is leaked");
        }
    }
}

/// One side of a copy: an address of the host, or an allocation and an offset in it.
pub(super) enum Place {
    Host(*mut u8),
    Device(Arc<Block>, usize),
}

// SAFETY: an address, which the submitter promised for any copying thread (`Driver::copy`).
unsafe impl Send for Place {}

impl Place {
    /// The byte at `at`, how many from there on lie under one lock, and that lock.
    fn part(&self, at: usize) -> (*mut u8, usize, Option<&Mutex<()>>) {
        match self {
            Self::Host(start) => (start.wrapping_add(at), PART, None),
            Self::Device(block, start) => {
                let at = start + at;
                (block.data.as_ptr().wrapping_add(at), PART - at % PART, block.locks.get(at / PART))
            }
        }
    }
}

/// Copies `len` bytes.
///
/// # Safety
/// Both places have `len` bytes. Host memory is valid; nothing else writes it, or touches it if it
/// is the target.
pub(super) unsafe fn copy(from: &Place, to: &Place, len: usize) {
    let mut at = 0;
    while at < len {
        let ((source, most, first), (target, room, second)) = (from.part(at), to.part(at));
        let part = most.min(room).min(len - at);
        // All copies take two locks in one order: no deadlock. Both sides may have the same one.
        let order = |lock: Option<&Mutex<()>>| lock.map(from_ref);
        let (low, high) = if order(first) < order(second) { (first, second) } else { (second, first) };
        let _low = low.filter(|_| order(low) != order(high)).map(Mutex::lock);
        let _high = high.map(Mutex::lock);
        // SAFETY: the caller promises `part` bytes from `at` on at both sides, and keeps other code
        // away from host memory; the locks keep other copies from the device's. Sides may overlap.
        unsafe { std::ptr::copy(source, target, part) };
        at += part;
    }
}
