//! Host memory that is more than registered: allocated by the driver, managed, registered as read-only; and the
//! devices' attributes, which say which of these there are.
//!
//! Allocations are real memory, filled with 0xA5. Every other one starts 512 bytes into a page, since that is what the
//! driver does with small ones and nothing promises more.

use std::alloc::Layout;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_uint;

use super::calls::write;
use super::world::*;
use crate::common::{entries, is_mapped, is_there};

const PAGE: usize = 4096;
const READ_ONLY: u32 = 8;

const CAN_MAP_HOST_MEMORY: i32 = 19;
const UNIFIED_ADDRESSING: i32 = 41;
const CONCURRENT_MANAGED_ACCESS: i32 = 89;
/// 0 under WSL2: the device has registered memory at another address.
const CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: i32 = 91;
/// 0 here: a machine in confidential-computing mode. (What a driver says there is not known; it refuses to register.)
const HOST_REGISTER_SUPPORTED: i32 = 99;
const READ_ONLY_REGISTER: i32 = 113;

struct Host {
    context: usize,
    len: usize,
    managed: bool,
    /// What the system allocated.
    block: (usize, Layout),
}

/// See the file's page.
#[derive(Default)]
pub struct Hosts {
    blocks: BTreeMap<usize, Host>,
    /// Starts of registrations that are read-only.
    pub read_only: BTreeSet<usize>,
    /// Where they differ from a large GPU's.
    attributes: BTreeMap<i32, i32>,
    /// How often a call was made with these flags.
    pub flags: BTreeMap<(&'static str, u32), u64>,
    made: usize,
}

impl Hosts {
    /// Allocations of some contexts.
    pub fn count(&self, of: impl Fn(usize) -> bool) -> usize {
        self.blocks.values().filter(|b| of(b.context)).count()
    }

    /// Destroys a context's allocations. (Their memory stays: a late copy may still read it.)
    pub fn forget(&mut self, context: usize) {
        self.blocks.retain(|_, b| b.context != context);
    }

    fn find(&self, at: usize, len: usize) -> Option<&Host> {
        let (start, host) = self.blocks.range(..=at).next_back()?;
        (at + len <= start + host.len).then_some(host)
    }

    /// The allocation that has this byte: start, length, context, and whether it is managed.
    pub fn around(&self, at: usize) -> Option<(usize, usize, usize, bool)> {
        let (start, host) = self.blocks.range(..=at).next_back()?;
        (at < start + host.len).then_some((*start, host.len, host.context, host.managed))
    }

    /// Whether these bytes are of one allocation.
    pub fn has(&self, at: usize, len: usize) -> bool {
        self.find(at, len).is_some()
    }

    /// Whether it is the start of managed memory.
    pub fn is_managed(&self, at: usize) -> bool {
        self.blocks.get(&at).is_some_and(|b| b.managed)
    }

    pub fn attribute(&self, attribute: i32) -> Option<i32> {
        let usual = match attribute {
            CAN_MAP_HOST_MEMORY | UNIFIED_ADDRESSING | CONCURRENT_MANAGED_ACCESS | READ_ONLY_REGISTER => 1,
            CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM | HOST_REGISTER_SUPPORTED => 1,
            _ => return None,
        };
        Some(self.attributes.get(&attribute).copied().unwrap_or(usual))
    }

    /// Gives all devices another value of an attribute.
    pub fn set_attribute(&mut self, attribute: i32, value: i32) {
        self.attributes.insert(attribute, value);
    }

    /// How far the device's addresses of registered memory are from the host's.
    pub fn shift(&self) -> usize {
        if self.lacks(CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) { 1 << 52 } else { 0 }
    }

    /// Notes the flags of a call, whether it succeeds or not.
    pub fn called_with(&mut self, call: &'static str, flags: u32) {
        *self.flags.entry((call, flags)).or_default() += 1;
    }

    fn lacks(&self, attribute: i32) -> bool {
        self.attribute(attribute) != Some(1)
    }
}

impl World {
    /// What is refused before overlaps are looked for.
    pub fn may_register(&mut self, start: usize, len: usize, flags: u32) -> Outcome {
        if flags & !15 != 0 {
            return self.violate("HST-7", format!("cuMemHostRegister with flags {flags:#x}"), INVALID_VALUE);
        }
        if self.hosts.lacks(HOST_REGISTER_SUPPORTED) {
            return Err(NOT_SUPPORTED);
        }
        let read_only = flags & READ_ONLY != 0;
        if read_only && self.hosts.lacks(READ_ONLY_REGISTER) {
            return self.violate("HST-8", format!("{start:#x}"), NOT_SUPPORTED);
        }
        if len == 0 || start == 0 || start.checked_add(len).is_none() {
            return Ok(());
        }
        if self.hosts.blocks.iter().any(|(s, b)| overlaps(start, len, *s, b.len)) {
            return self.violate("HST-3", format!("{len} bytes at {start:#x}"), INVALID_VALUE);
        }
        // The whole look takes long, beside short runs of which there are many.
        let mapped = if self.by_hand { is_there(start, len) } else { is_mapped(start, len, !read_only) };
        if !mapped {
            return self.violate("HST-5", format!("{len} bytes at {start:#x}"), INVALID_VALUE);
        }
        Ok(())
    }

    /// It was registered.
    pub fn registered_as(&mut self, start: usize, flags: u32) {
        if flags & READ_ONLY != 0 {
            self.hosts.read_only.insert(start);
        }
    }

    /// A copy may not write to read-only memory.
    pub fn may_write(&mut self, call: &str, dst: Place, len: usize) -> Outcome {
        let Place::Host(at) = dst else { return Ok(()) };
        let registered = &self.registered;
        let within = |s: &usize| registered.get(s).is_some_and(|l| overlaps(at, len, *s, *l));
        if self.hosts.read_only.iter().any(within) {
            return self.violate("HST-6", format!("{call}: {len} bytes at {at:#x}"), INVALID_VALUE);
        }
        Ok(())
    }

    fn allocate_host(&mut self, context: usize, len: usize, managed: bool) -> Outcome<usize> {
        let layout = Layout::from_size_align(len + PAGE, PAGE).map_err(|_| OUT_OF_MEMORY)?;
        // SAFETY: not of size zero.
        let block = unsafe { std::alloc::alloc(layout) };
        if block.is_null() {
            return Err(OUT_OF_MEMORY);
        }
        // SAFETY: as long as that.
        unsafe { block.write_bytes(0xA5, len + PAGE) };
        self.hosts.made += 1;
        let at = block as usize + if self.hosts.made.is_multiple_of(2) { 512 } else { 0 };
        self.hosts.blocks.insert(at, Host { context, len, managed, block: (block as usize, layout) });
        Ok(at)
    }

    /// Frees what was allocated in that way.
    pub fn free_host(&mut self, at: usize, managed: bool) -> Outcome {
        let Some(len) = self.hosts.blocks.get(&at).filter(|b| b.managed == managed).map(|b| b.len) else {
            return self.violate("HST-1", format!("{at:#x}"), INVALID_VALUE);
        };
        if self.run_users(|place, n| matches!(place, Place::Host(p) if overlaps(*p, n, at, len))) {
            self.let_pass("HST-2", format!("{at:#x} is used by a queued copy"));
        }
        if let Some(Host { block: (block, layout), .. }) = self.hosts.blocks.remove(&at) {
            // SAFETY: allocated with that layout, and freed once.
            unsafe { std::alloc::dealloc(block as *mut u8, layout) };
        }
        Ok(())
    }
}

entries! {
    cuda;

    fn cuMemHostAlloc(start: *mut usize, len: usize, flags: c_uint) in here(), |w, name| {
        let context = w.current(name)?;
        w.unsafe_call(name)?;
        w.hosts.called_with(name, flags);
        if flags & !7 != 0 {
            return w.violate("HST-7", format!("{name} with flags {flags:#x}"), INVALID_VALUE);
        }
        // Nothing, and no error.
        let at = if len == 0 { 0 } else { w.allocate_host(context, len, false)? };
        write(w, name, start, at)
    }

    fn cuMemFreeHost(start: usize) in here(), |w, name| {
        w.current(name)?;
        w.unsafe_call(name)?;
        w.free_host(start, false)
    }

    fn cuMemAllocManaged(start: *mut u64, len: usize, flags: c_uint) in here(), |w, name| {
        let context = w.current(name)?;
        w.unsafe_call(name)?;
        w.hosts.called_with(name, flags);
        if !matches!(flags, 1 | 2) {
            return w.violate("HST-7", format!("{name} with flags {flags:#x}"), INVALID_VALUE);
        }
        if len == 0 {
            return Err(INVALID_VALUE);
        }
        if w.hosts.lacks(CONCURRENT_MANAGED_ACCESS) {
            w.let_pass("HST-9", name);
        }
        let at = w.allocate_host(context, len, true)?;
        write(w, name, start, at as u64)
    }

    fn cuMemHostGetDevicePointer_v2(address: *mut u64, start: usize, flags: c_uint) in here(), |w, name| {
        w.current(name)?;
        if flags != 0 {
            return w.violate("HST-7", format!("{name} with flags {flags:#x}"), INVALID_VALUE);
        }
        // The device cannot, which is no mistake of the caller's: there is no other way to ask for one page.
        if w.hosts.lacks(CAN_MAP_HOST_MEMORY) {
            return Err(INVALID_VALUE);
        }
        let at = start;
        let registered = w.registered.iter().any(|(s, l)| (*s..s + l).contains(&at));
        let allocated = w.hosts.find(at, 1).is_some_and(|b| !b.managed);
        if !registered && !allocated {
            return w.violate("HST-4", format!("{at:#x}"), INVALID_VALUE);
        }
        let shift = if registered { w.hosts.shift() } else { 0 };
        write(w, name, address, (at + shift) as u64)
    }
}
