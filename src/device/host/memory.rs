//! Device memory: heap memory behind addresses that mean nothing to the CPU.
//!
//! *Addresses.* Each device has an address space of its own: the top 16 bits of an address name the device. Allocations
//! are laid out one after the other with a gap between them, and no address is used again before all have been used. So
//! an address that is stale, of another device, or past an end is refused when the copy is submitted, and hits no other
//! allocation.
//!
//! *Races.* Two streams may be told to write the same bytes at once. On a real device the result is garbage; here it
//! must not become a data race in the process that hosts the device. So each access takes a lock, one for each stripe
//! of 1 MiB. No thread holds two of these locks, so they cannot deadlock: a copy within the device reads into a buffer
//! of its own, and then writes.
//!
//! *Lifetime.* A queued operation keeps its allocation's memory. A flag says that the memory was freed meanwhile, so an
//! operation that runs late is a reported error, and never an access to memory with another owner.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::amount::amount;
use crate::locks::Mutex;

use super::Refusal;
use crate::device::address::AddressFault;
use crate::os;

/// Bytes under one lock.
pub(super) const STRIPE: usize = 1 << 20;
/// Alignment of allocations' addresses.
const HOST_PAGE: u64 = 4096;
/// Alignment of the heap memory behind them. It is what `calloc` gives by itself: for more, std zeroes by hand, which
/// would page in all of a large allocation at once.
const HEAP_ALIGN: usize = 16;
/// Addresses between two allocations that belong to neither.
const ADDRESS_GAP: u64 = 1 << 20;
/// Bits of an address below the device's number.
const SPACE_BITS: u32 = 48;

/// Allocations of this size and more are mappings of their own, on huge pages where the system has them.
const MAPPED: usize = 2 << 20;

/// One allocation.
pub(super) struct HostAllocation {
    address: u64,
    layout: Layout,
    data: NonNull<u8>,
    stripes: Box<[Mutex<()>]>,
    freed: AtomicBool,
}

// SAFETY: the heap memory belongs to the allocation and is accessed under the stripes' locks only.
unsafe impl Send for HostAllocation {}
// SAFETY: as above.
unsafe impl Sync for HostAllocation {}

impl HostAllocation {
    fn new(address: u64, len: usize) -> Option<Self> {
        let layout = Layout::from_size_align(len, HEAP_ALIGN).ok().filter(|layout| layout.size() > 0)?;
        let data = if len >= MAPPED {
            let data = os::map(len, MAPPED).ok()?;
            // Most of a first copy's time would go into zeroing small pages.
            os::advise_huge(data, len);
            data
        } else {
            // SAFETY: the layout has a size above zero.
            NonNull::new(unsafe { alloc_zeroed(layout) })?
        };
        let stripes = (0..len.div_ceil(STRIPE)).map(|_| Mutex::new(())).collect();
        Some(Self { address, layout, data, stripes, freed: AtomicBool::new(false) })
    }

    /// Whether the memory was freed, so that no copy may use it.
    pub(super) fn is_freed(&self) -> bool {
        // Acquire: pairs with the release store in `HostMemory::free`.
        self.freed.load(Ordering::Acquire)
    }

    fn len(&self) -> usize {
        self.layout.size()
    }

    /// Calls `f` for each part of the range that lies in one stripe: stripe, offset, length.
    fn pieces(&self, offset: usize, len: usize, mut f: impl FnMut(&Mutex<()>, usize, usize)) {
        // Unreachable, since every range was checked when it was submitted. The unsafe copies below depend on it.
        assert!(offset <= self.len() && len <= self.len() - offset, "range outside of its allocation");
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let stripe = at / STRIPE;
            let stop = end.min((stripe + 1) * STRIPE);
            f(&self.stripes[stripe], at, stop - at);
            at = stop;
        }
    }

    /// Copies out of the allocation.
    ///
    /// # Safety
    /// `to..to + len` is writable, nothing else uses it during the call, and it is not part of device memory.
    unsafe fn read(&self, offset: usize, to: *mut u8, len: usize) {
        self.pieces(offset, len, |stripe, at, n| {
            let _alone = stripe.lock();
            // SAFETY: `pieces` keeps `at..at + n` within the allocation, whose other readers and writers the lock keeps
            // out; the target
            // is the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(self.data.as_ptr().add(at), to.add(at - offset), n) }
        });
    }

    /// Copies into the allocation.
    ///
    /// # Safety
    /// `from..from + len` is initialised, nothing writes it during the call, and it is not part of device memory.
    unsafe fn write(&self, offset: usize, from: *const u8, len: usize) {
        self.pieces(offset, len, |stripe, at, n| {
            let _alone = stripe.lock();
            // SAFETY: `pieces` keeps `at..at + n` within the allocation, whose other readers and writers the lock keeps
            // out; the source is the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(from.add(at - offset), self.data.as_ptr().add(at), n) }
        });
    }
}

impl Drop for HostAllocation {
    fn drop(&mut self) {
        if self.len() >= MAPPED {
            // SAFETY: mapped with this length, and this was the last reference to it.
            if let Err(error) = unsafe { os::unmap(self.data, self.len()) } {
                crate::foreign::warn!(target: "pinpool::device::leak", %error, "device memory is leaked");
            }
            return;
        }
        // SAFETY: made by `alloc_zeroed` with this layout, and this was the last reference to it.
        unsafe { dealloc(self.data.as_ptr(), self.layout) }
    }
}

impl fmt::Debug for HostAllocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{:#x}", self.address, self.len())
    }
}

/// A checked range of device memory. It keeps the memory allocated.
#[derive(Clone, Debug)]
pub(super) struct HostPlace {
    allocation: Arc<HostAllocation>,
    offset: usize,
    len: usize,
}

impl HostPlace {
    /// Bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_freed(&self) -> bool {
        self.allocation.is_freed()
    }

    /// Whether a copy from here to `to`, front to back, would overwrite bytes before they are read.
    pub(super) fn runs_into(&self, to: &Self) -> bool {
        Arc::ptr_eq(&self.allocation, &to.allocation)
            && self.offset < to.offset
            && to.offset - self.offset < self.len
    }

    /// Copies `len` bytes at `at` within the range to `to`.
    ///
    /// # Safety
    /// As for [`HostAllocation::read`].
    pub(super) unsafe fn read(&self, at: usize, to: *mut u8, len: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.allocation.read(self.offset + at, to, len) }
    }

    /// Copies `len` bytes from `from` to `at` within the range.
    ///
    /// # Safety
    /// As for [`HostAllocation::write`].
    pub(super) unsafe fn write(&self, at: usize, from: *const u8, len: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.allocation.write(self.offset + at, from, len) }
    }
}

#[derive(Debug)]
struct Table {
    by_address: BTreeMap<u64, Arc<HostAllocation>>,
    /// Bytes allocated.
    used: usize,
    /// Where the next allocation goes.
    next: u64,
}

/// One device's memory.
#[derive(Debug)]
pub(super) struct HostMemory {
    ordinal: u32,
    capacity: usize,
    table: Mutex<Table>,
}

impl HostMemory {
    pub(super) fn new(ordinal: u32, capacity: usize) -> Self {
        let table = Table { by_address: BTreeMap::new(), used: 0, next: space(ordinal).0 };
        Self { ordinal, capacity, table: Mutex::new(table) }
    }

    /// Number of allocations and their bytes.
    pub(super) fn usage(&self) -> (usize, usize) {
        let table = self.table.lock();
        (table.by_address.len(), table.used)
    }

    pub(super) fn allocate(&self, len: usize) -> Result<u64, Refusal> {
        if len == 0 {
            return Err(Refusal::argument("0 bytes of device memory were asked for"));
        }
        let mut table = self.table.lock();
        let left = self.capacity - table.used;
        if len > left {
            let [len, left, all] = [len, left, self.capacity].map(amount);
            let text = format!("out of device memory: {len} wanted, {left} of {all} left");
            return Err(Refusal::out_of_memory(text));
        }
        let Some(address) = table.place(self.ordinal, len as u64) else {
            return Err(Refusal::out_of_memory(format!(
                "no gap of {} among the device's addresses",
                amount(len)
            )));
        };
        // Under the lock, or another allocation could take the gap. Large memory is only mapped here; the first use
        // pages it in.
        let Some(allocation) = HostAllocation::new(address, len) else {
            return Err(Refusal::out_of_memory(format!(
                "the system has no {} for device memory",
                amount(len)
            )));
        };
        table.used += len;
        table.by_address.insert(address, Arc::new(allocation));
        Ok(address)
    }

    /// Whether a range of addresses is memory of this device. `Err(None)`: it is no device's.
    pub(super) fn examine(&self, address: u64, len: usize) -> Result<(), Option<AddressFault>> {
        let table = self.table.lock();
        let below = table.by_address.range(..=address).next_back();
        let here = below.filter(|(start, allocation)| address - *start < allocation.len() as u64);
        let Some((start, allocation)) = here else {
            let owner = self.owner(address);
            return Err(owner.map(|owner| AddressFault::OtherDevice { device: format!("host:{owner}") }));
        };
        let left = allocation.len() - (address - start) as usize;
        if len > left {
            let (start, size, over) = (*start, allocation.len(), len - left);
            return Err(Some(AddressFault::PastEnd { start, size, over }));
        }
        Ok(())
    }

    pub(super) fn free(&self, address: u64) -> Result<(), Refusal> {
        let freed = {
            let mut table = self.table.lock();
            let freed = table.by_address.remove(&address);
            if let Some(allocation) = &freed {
                allocation.freed.store(true, Ordering::Release);
                table.used -= allocation.len();
            }
            freed
        };
        match freed {
            // The memory itself is freed by this drop, outside of the lock, or with the last operation that names it.
            Some(_) => Ok(()),
            None => Err(self.no_such(address, "is not the start of an allocation")),
        }
    }

    /// Checks a range and finds the allocation that it lies in.
    pub(super) fn find(&self, address: u64, len: usize) -> Result<HostPlace, Refusal> {
        let table = self.table.lock();
        let Some((_, allocation)) = table.by_address.range(..=address).next_back() else {
            return Err(self.no_such(address, "is outside of any allocation"));
        };
        let (start, size) = (allocation.address, allocation.len());
        let offset = address - start;
        if offset > size as u64 || (offset == size as u64 && len > 0) {
            return Err(self.no_such(address, "is outside of any allocation"));
        }
        let offset = offset as usize;
        if len > size - offset {
            let over = len - (size - offset);
            return Err(Refusal::fault(format!(
                "{len} bytes at device address {address:#x} run {over} bytes past the end of the allocation at \
                 {start:#x} of {size} bytes"
            )));
        }
        Ok(HostPlace { allocation: Arc::clone(allocation), offset, len })
    }

    fn no_such(&self, address: u64, what: &str) -> Refusal {
        Refusal::fault(match self.owner(address) {
            Some(owner) => {
                format!("device address {address:#x} belongs to host:{owner}, not to host:{}", self.ordinal)
            }
            None => format!("device address {address:#x} {what}"),
        })
    }

    /// The other device that the address belongs to, if it belongs to one.
    fn owner(&self, address: u64) -> Option<u64> {
        let owner = (address >> SPACE_BITS).checked_sub(1)?;
        (owner != u64::from(self.ordinal) && owner < u64::from(super::MAX_DEVICES)).then_some(owner)
    }
}

/// The first address of a device, and the first one past its last.
fn space(ordinal: u32) -> (u64, u64) {
    // Not from 0, so that a null address is never good.
    let start = (u64::from(ordinal) + 1) << SPACE_BITS;
    (start, start + (1 << SPACE_BITS))
}

impl Table {
    /// Chooses addresses for `len` bytes.
    fn place(&mut self, ordinal: u32, len: u64) -> Option<u64> {
        let (first, last) = space(ordinal);
        let need = len.checked_next_multiple_of(HOST_PAGE)?.checked_add(ADDRESS_GAP)?;
        if need > last - self.next {
            // All addresses have been used. From here on they are used again, the lowest gap first.
            let mut at = first;
            for allocation in self.by_address.values() {
                if allocation.address - at >= need {
                    break;
                }
                at = allocation.address + (allocation.len() as u64).next_multiple_of(HOST_PAGE) + ADDRESS_GAP;
            }
            return (need <= last - at).then_some(at);
        }
        let at = self.next;
        self.next += need;
        Some(at)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_used_again_only_when_all_were_used() {
        let memory = HostMemory::new(0, 1 << 30);
        let a = memory.allocate(10).unwrap();
        let b = memory.allocate(10).unwrap();
        memory.free(a).unwrap();
        let c = memory.allocate(10).unwrap();
        assert!(a < b && b < c);
        memory.table.lock().next = space(0).1 - 8192;
        assert_eq!(memory.allocate(10).unwrap(), a, "the lowest gap");
        let d = memory.allocate(10).unwrap();
        assert!(d > c);
        assert_eq!(memory.usage(), (4, 40));
    }

    #[test]
    fn addresses_say_whose_they_are() {
        let (here, there) = (HostMemory::new(0, 1 << 20), HostMemory::new(1, 1 << 20));
        let (a, b) = (here.allocate(100).unwrap(), there.allocate(100).unwrap());
        assert!(here.find(b, 1).unwrap_err().text.contains("belongs to host:1"));
        assert!(there.find(a, 1).unwrap_err().text.contains("belongs to host:0"));
        assert!(here.find(0, 1).unwrap_err().text.contains("outside of any"));
        assert!(here.find(a + 100, 1).unwrap_err().text.contains("outside of any"));
        assert!(here.find(a - 1, 1).unwrap_err().text.contains("outside of any"));
        assert!(here.find(u64::MAX, 1).unwrap_err().text.contains("outside of any"));
        assert!(here.find(a + 1, 100).unwrap_err().text.contains("1 bytes past the end"));
        assert!(here.find(a + 1, usize::MAX).is_err());
        here.find(a, 100).unwrap();
        here.find(a + 99, 1).unwrap();
        here.find(a + 100, 0).unwrap();
    }

    #[test]
    fn ranges_cross_stripes() {
        let memory = HostMemory::new(0, 1 << 30);
        let len = 3 * STRIPE + 5;
        let address = memory.allocate(len).unwrap();
        let place = memory.find(address, len).unwrap();
        let bytes: Vec<u8> = (0..2 * STRIPE + 3).map(|i| (i % 251) as u8).collect();
        let mut back = vec![0; bytes.len()];
        // SAFETY: nothing else uses the two vectors, and they are as long as the range.
        unsafe {
            place.write(STRIPE - 1, bytes.as_ptr(), bytes.len());
            place.read(STRIPE - 1, back.as_mut_ptr(), back.len());
        }
        assert!(bytes == back);
    }
}
