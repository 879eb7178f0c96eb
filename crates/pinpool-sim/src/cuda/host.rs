//! Host memory: registered, allocated by the driver, managed; and the devices' attributes, which say which of these
//! there are. Every other allocation starts 512 bytes into a page, since that is what the driver does with small ones
//! and nothing promises more.

use std::ffi::c_uint;

use super::*;
use crate::common::{entries, fails_if};
use crate::world::{Place, Registered, is_mapped, is_range, is_there};

const READ_ONLY: u32 = 8;

const CAN_MAP_HOST_MEMORY: i32 = 19;
const CONCURRENT_MANAGED_ACCESS: i32 = 89;
/// 0 under WSL2: the device has registered memory at another address.
const CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: i32 = 91;
/// 0 here: a machine in confidential-computing mode. (What a driver says there is not known; it refuses to register.)
const HOST_REGISTER_SUPPORTED: i32 = 99;
const READ_ONLY_REGISTER: i32 = 113;
/// -1: none is known.
const HOST_NUMA_ID: i32 = 134;
/// Those that are 1: these, unified addressing, and memory pools, which cudarc asks for.
const USUAL: [i32; 7] = [
    CAN_MAP_HOST_MEMORY,
    41,
    CONCURRENT_MANAGED_ACCESS,
    CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
    HOST_REGISTER_SUPPORTED,
    READ_ONLY_REGISTER,
    115,
];

impl World {
    /// What a device says about itself. `None`: there is no such attribute.
    pub(super) fn attribute(&self, device: usize, attribute: i32) -> Option<i32> {
        match attribute {
            HOST_NUMA_ID => Some(self.devices[device].numa_node),
            _ => {
                USUAL.contains(&attribute).then(|| self.cuda.attributes.get(&attribute).copied().unwrap_or(1))
            }
        }
    }

    fn lacks(&self, attribute: i32) -> bool {
        self.cuda.attributes.get(&attribute) == Some(&0)
    }

    /// How far the device's addresses of registered memory are from the host's.
    pub(super) fn shift(&self) -> usize {
        if self.lacks(CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) { 1 << 52 } else { 0 }
    }

    /// Notes the flags of the call under way, whether it succeeds or not.
    fn has_flags(&mut self, flags: u32, known: bool) -> Outcome {
        *self.flags.entry((self.call, flags)).or_default() += 1;
        if known { Ok(()) } else { self.broken("HST-7", INVALID_VALUE) }
    }

    pub(super) fn register(&mut self, start: usize, len: usize, flags: u32) -> Outcome {
        self.has_flags(flags, flags & !15 == 0)?;
        fails_if(NOT_SUPPORTED, self.lacks(HOST_REGISTER_SUPPORTED))?;
        let read_only = flags & READ_ONLY != 0;
        self.forbid("HST-8", NOT_SUPPORTED, read_only && self.lacks(READ_ONLY_REGISTER))?;
        self.forbid("MEM-3", INVALID_VALUE, !is_range(start, len))?;
        self.forbid("HST-3", INVALID_VALUE, self.is_allocated_in_part(start, len))?;
        // The whole look takes long, beside short runs of which there are many.
        let mapped = if self.by_hand { is_there(start, len) } else { is_mapped(start, len, !read_only) };
        self.forbid("HST-5", INVALID_VALUE, !mapped)?;
        self.forbid("MEM-1", ALREADY_REGISTERED, self.is_registered_in_part(start, len))?;
        self.registered.insert(start, Registered { len, read_only, mapped: start });
        Ok(())
    }

    /// Device memory that ends with a context.
    pub(super) fn allocate_in(&mut self, context: usize, len: usize) -> Outcome<usize> {
        fails_if(INVALID_VALUE, len == 0)?;
        self.allocate(self.contexts[&context].device, context, len, 0)
    }

    fn allocate_host_in(&mut self, context: usize, len: usize, managed: bool) -> Outcome<usize> {
        self.allocate_host((self.contexts[&context].device, context, managed), len, [512, 0])
    }

    /// Frees what was allocated in that way.
    pub(super) fn free_host_of(&mut self, at: usize, managed: bool) -> Outcome {
        let len = self.must(
            "HST-1",
            INVALID_VALUE,
            self.hosts.get(&at).filter(|host| host.managed == managed).map(|host| host.len),
        )?;
        self.take_back("HST-2", Place::Host(at), len);
        self.free_host(at);
        Ok(())
    }
}

entries! {
    Cuda, symbol, also [];

    fn cuMemHostAlloc(start: *mut usize, len: usize, flags: c_uint) in Here, |w| {
        let context = w.free_context()?;
        w.has_flags(flags, flags & !7 == 0)?;
        // Nothing, and no error.
        let at = if len == 0 { 0 } else { w.allocate_host_in(context, len, false)? };
        w.give(start, at)
    }

    fn cuMemFreeHost(start: usize) in Here, |w| {
        w.free_context()?;
        w.free_host_of(start, false)
    }

    fn cuMemAllocManaged(start: *mut usize, len: usize, flags: c_uint) in Here, |w| {
        let context = w.free_context()?;
        w.has_flags(flags, matches!(flags, 1 | 2))?;
        fails_if(INVALID_VALUE, len == 0)?;
        w.let_pass_if("HST-9", w.lacks(CONCURRENT_MANAGED_ACCESS));
        let at = w.allocate_host_in(context, len, true)?;
        w.give(start, at)
    }

    fn cuMemHostGetDevicePointer_v2(address: *mut usize, start: usize, flags: c_uint) in Here, |w| {
        w.current()?;
        w.forbid("HST-7", INVALID_VALUE, flags != 0)?;
        // The device cannot, which is no mistake of the caller's: there is no other way to ask for one page.
        fails_if(INVALID_VALUE, w.lacks(CAN_MAP_HOST_MEMORY))?;
        let is_registered = w.registration(start, 1).is_some();
        let is_known = is_registered || w.host(start, 1).is_some_and(|(_, host)| !host.managed);
        w.forbid("HST-4", INVALID_VALUE, !is_known)?;
        w.give(address, start + if is_registered { w.shift() } else { 0 })
    }
}
