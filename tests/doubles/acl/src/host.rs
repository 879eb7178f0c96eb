//! Page-locked host memory: allocated by the library, and registered.
//!
//! Allocations are real memory, filled with 0xA5. On a host they start on a multiple of 64 and of no more, since that
//! is what is promised; on the device (RC mode) on a multiple of 16 that is none of 64. Memory that is freed or
//! unregistered while a queued copy uses it is lost at once: copies from there then carry 0xDD, and copies to there are
//! discarded.

#![allow(non_snake_case)]

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ffi::c_void;
#[cfg(not(feature = "acl2022"))]
use std::ffi::{c_int, c_uint};

use crate::calls::{call, there, write};
use crate::codes::*;
use crate::world::*;

const PAGE: usize = 4096;
/// What one allocation may have: above some 200 GB they were seen to fail, however much is free.
const EXTENT: u64 = 200 << 30;

struct Host {
    len: usize,
    /// The device that was current.
    device: usize,
    /// What the system allocated.
    block: (usize, Layout),
}

struct Registered {
    len: usize,
    /// The device's address of it, if it has one.
    mapped: Option<usize>,
}

/// See the file's page.
#[derive(Default)]
pub struct Hosts {
    blocks: BTreeMap<usize, Host>,
    registered: BTreeMap<usize, Registered>,
    /// The most bytes of one allocation, and of all.
    extent: usize,
    limit: usize,
    /// Registering, and the attribute `VA_FLAG`: whether driver and product have it.
    can_register: bool,
    can_map: bool,
    made: usize,
}

impl Hosts {
    pub fn configure(&mut self) {
        self.extent = number("PINPOOL_STANDIN_EXTENT", EXTENT) as usize;
        self.limit = number("PINPOOL_STANDIN_HOST", u64::MAX) as usize;
        self.can_register = number("PINPOOL_STANDIN_REGISTER", 1) != 0;
        self.can_map = number("PINPOOL_STANDIN_VA", 0) != 0;
    }

    pub fn limit_to(&mut self, extent: usize, all: usize) {
        (self.extent, self.limit) = (extent, all);
    }

    pub fn enable(&mut self, register: bool, va: bool) {
        (self.can_register, self.can_map) = (register, va);
    }

    pub fn count(&self) -> usize {
        self.blocks.len()
    }

    pub fn registrations(&self) -> usize {
        self.registered.len()
    }

    /// Bytes that were allocated with a device current.
    pub fn used(&self, device: usize) -> usize {
        self.blocks.values().filter(|b| b.device == device).map(|b| b.len).sum()
    }

    /// The allocation that has these bytes: its start and length.
    pub fn allocation(&self, at: usize, len: usize) -> Option<(usize, usize)> {
        let (start, host) = self.blocks.range(..=at).next_back()?;
        (at.checked_add(len)? <= start + host.len).then_some((*start, host.len))
    }

    /// The registration that has these bytes.
    pub fn registration(&self, at: usize, len: usize) -> Option<(usize, usize)> {
        let (start, of) = self.registered.range(..=at).next_back()?;
        (at.checked_add(len)? <= start + of.len).then_some((*start, of.len))
    }

    pub fn is_locked(&self, at: usize, len: usize) -> bool {
        self.allocation(at, len).is_some() || self.registration(at, len).is_some()
    }

    /// Whether some of it is page-locked.
    pub fn is_locked_in_part(&self, at: usize, len: usize) -> bool {
        self.blocks.iter().any(|(s, b)| overlaps(at, len, *s, b.len))
            || self.registered.iter().any(|(s, r)| overlaps(at, len, *s, r.len))
    }

    /// Whether it is the device's address of registered memory.
    pub fn is_mapping(&self, at: usize) -> bool {
        self.registered.values().any(|r| r.mapped.is_some_and(|m| (m..m + r.len).contains(&at)))
    }
}

/// Whether all of it is mapped for reading and writing.
fn is_mapped(start: usize, len: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut at = start;
    for line in maps.lines() {
        let mut words = line.split(' ');
        let (range, mode) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let parse = |text: &str| usize::from_str_radix(text, 16).unwrap_or(0);
        let (from, to) = range.split_once('-').map_or((0, 0), |(a, b)| (parse(a), parse(b)));
        if (from..to).contains(&at) && mode.starts_with("rw") {
            at = to;
        }
    }
    at >= start + len
}

impl World {
    fn allocate_host(&mut self, call: &str, len: usize) -> Outcome<usize> {
        let device = self.current_device(call)?;
        if len == 0 {
            return self.violate("ARG-2", format!("{call}: no bytes"), INVALID_PARAM);
        }
        let all: usize = self.hosts.blocks.values().map(|b| b.len).sum();
        let fits = |used: usize, limit: usize| used.checked_add(len).is_some_and(|sum| sum <= limit);
        let on_device = self.on_device && !fits(self.used(device), self.devices[device].memory);
        if !fits(0, self.hosts.extent) || !fits(all, self.hosts.limit) || on_device {
            return Err(MEMORY_ALLOCATION);
        }
        let whole = len.checked_add(PAGE).ok_or(MEMORY_ALLOCATION)?;
        let layout = Layout::from_size_align(whole, PAGE).map_err(|_| MEMORY_ALLOCATION)?;
        // SAFETY: not of size zero.
        let block = unsafe { std::alloc::alloc(layout) };
        if block.is_null() {
            return Err(MEMORY_ALLOCATION);
        }
        // SAFETY: as long as that.
        unsafe { block.write_bytes(FRESH, whole) };
        self.hosts.made += 1;
        // No more than is promised; twice as much every other time, as luck would have it.
        let promised = if self.on_device { 16 } else { 64 };
        let offset = if self.hosts.made.is_multiple_of(2) { promised } else { 3 * promised };
        let at = block as usize + offset;
        self.hosts.blocks.insert(at, Host { len, device, block: (block as usize, layout) });
        Ok(at)
    }

    fn free_host(&mut self, call: &str, at: usize) -> Outcome {
        let Some(len) = self.hosts.blocks.get(&at).map(|b| b.len) else {
            return self.violate("HST-1", format!("{call}: {at:#x}"), PARAM_INVALID);
        };
        if self.is_used(true, |place, n| matches!(place, Place::Host(p) if overlaps(*p, n, at, len))) {
            self.let_pass("HST-2", format!("{call}: {at:#x} is used by what is queued"));
        } else if self.streams.values().any(|s| !s.destroyed && s.used.contains(&at)) {
            self.let_pass("HST-3", format!("{call}: {at:#x} was used by a stream that was not waited for"));
        }
        for stream in self.streams.values_mut() {
            stream.used.remove(&at);
        }
        if self.hosts.registered.iter().any(|(s, r)| overlaps(at, len, *s, r.len)) {
            self.let_pass("REG-5", format!("{call}: {at:#x} is still registered"));
        }
        if let Some(Host { block: (block, layout), .. }) = self.hosts.blocks.remove(&at) {
            // SAFETY: allocated with that layout, and freed once.
            unsafe { std::alloc::dealloc(block as *mut u8, layout) };
        }
        Ok(())
    }

    #[cfg(not(feature = "acl2022"))]
    fn register(&mut self, call: &str, at: usize, len: usize, pin: bool, map: bool) -> Outcome<usize> {
        self.current(call)?;
        if at == 0 {
            return self.violate("ARG-1", call, INVALID_PARAM);
        }
        // The product or the driver cannot, which is no mistake of the caller's: there is no other way to ask.
        if !self.hosts.can_register || self.on_device {
            return Err(NOT_SUPPORTED);
        }
        let text = format!("{call}: {len} bytes at {at:#x}");
        if len == 0 || at.checked_add(len).is_none() {
            return self.violate("REG-4", text, PARAM_INVALID);
        }
        if !at.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) {
            return self.violate("REG-1", text, DRIVER_INTERNAL);
        }
        if self.hosts.registered.iter().any(|(s, r)| overlaps(at, len, *s, r.len)) {
            return self.violate("REG-2", text, ALREADY_REGISTERED);
        }
        if pin && self.hosts.blocks.iter().any(|(s, b)| overlaps(at, len, *s, b.len)) {
            return self.violate("REG-6", text, PARAM_INVALID);
        }
        if !is_mapped(at, len) {
            return self.violate("REG-4", text, PARAM_INVALID);
        }
        let mapped = map.then(|| self.address(len));
        self.hosts.registered.insert(at, Registered { len, mapped });
        Ok(mapped.unwrap_or(0))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtMallocHost(start: *mut *mut c_void, len: usize) -> u32 {
    const NAME: &str = "aclrtMallocHost";
    call(NAME, |w| {
        there(w, NAME, start)?;
        let at = w.allocate_host(NAME, len)?;
        // SAFETY: the caller's promise, here and in all calls below: what is written to is valid.
        unsafe { write(w, NAME, start, at as *mut c_void) }
    })
}

/// Needs no context, and waits for nothing.
#[unsafe(no_mangle)]
extern "C" fn aclrtFreeHost(start: *mut c_void) -> u32 {
    const NAME: &str = "aclrtFreeHost";
    call(NAME, |w| {
        there(w, NAME, start)?;
        w.free_host(NAME, start as usize)
    })
}

/// As the header has it: which attribute, and its value in 8 bytes.
#[cfg(not(feature = "acl2022"))]
#[repr(C)]
struct Attribute {
    attribute: c_uint,
    value: [u32; 2],
}

#[cfg(not(feature = "acl2022"))]
#[repr(C)]
struct Config {
    attributes: *const Attribute,
    count: usize,
}

#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtMallocHostWithCfg(start: *mut *mut c_void, len: u64, config: *const Config) -> u32 {
    const NAME: &str = "aclrtMallocHostWithCfg";
    const MODULE_ID: c_uint = 1;
    const VA_FLAG: c_uint = 3;
    call(NAME, |w| {
        there(w, NAME, start)?;
        // SAFETY: the caller's promise: null, or a configuration with that many attributes.
        let attributes: &[Attribute] = unsafe {
            match config.as_ref() {
                Some(config) if config.attributes.is_null() => {
                    return w.violate("ARG-1", format!("{NAME}: no attributes"), PARAM_INVALID);
                }
                Some(config) if config.count > 0 => {
                    std::slice::from_raw_parts(config.attributes, config.count)
                }
                _ => &[],
            }
        };
        for Attribute { attribute, value } in attributes {
            match *attribute {
                MODULE_ID => {}
                VA_FLAG if value[0] == 0 || w.hosts.can_map => {}
                // An older driver.
                VA_FLAG => return Err(NOT_SUPPORTED),
                other => {
                    return w.violate("ARG-2", format!("{NAME}: attribute {other}"), PARAM_INVALID);
                }
            }
        }
        let at = w.allocate_host(NAME, len as usize)?;
        // SAFETY: as above.
        unsafe { write(w, NAME, start, at as *mut c_void) }
    })
}

/// Waits for the current context's device.
#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
extern "C" fn aclrtFreeHostWithDevSync(start: *mut c_void) -> u32 {
    const NAME: &str = "aclrtFreeHostWithDevSync";
    call(NAME, |w| {
        there(w, NAME, start)?;
        let device = w.current_device(NAME)?;
        w.run_device(device);
        w.free_host(NAME, start as usize)
    })
}

/// Mapped; the other types are reserved.
#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtHostRegister(
    start: *mut c_void,
    len: u64,
    kind: c_uint,
    mapped: *mut *mut c_void,
) -> u32 {
    const NAME: &str = "aclrtHostRegister";
    call(NAME, |w| {
        there(w, NAME, mapped)?;
        if kind != 0 {
            return w.violate("ARG-2", format!("{NAME}: type {kind}"), INVALID_PARAM);
        }
        let at = w.register(NAME, start as usize, len as usize, false, true)?;
        // SAFETY: as above.
        unsafe { write(w, NAME, mapped, at as *mut c_void) }
    })
}

#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
extern "C" fn aclrtHostRegisterV2(start: *mut c_void, len: u64, flags: c_uint) -> u32 {
    const NAME: &str = "aclrtHostRegisterV2";
    const MAPPED: c_uint = 2;
    const PINNED: c_uint = 0x1000_0000;
    call(NAME, |w| {
        if flags == 0 || flags & !(MAPPED | PINNED) != 0 {
            return w.violate("ARG-2", format!("{NAME}: flags {flags:#x}"), INVALID_PARAM);
        }
        let (pin, map) = (flags & PINNED != 0, flags & MAPPED != 0);
        w.register(NAME, start as usize, len as usize, pin, map).map(drop)
    })
}

#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
extern "C" fn aclrtHostUnregister(start: *mut c_void) -> u32 {
    const NAME: &str = "aclrtHostUnregister";
    call(NAME, |w| {
        w.current(NAME)?;
        there(w, NAME, start)?;
        let at = start as usize;
        let Some(len) = w.hosts.registered.get(&at).map(|r| r.len) else {
            return w.violate("REG-3", format!("{at:#x}"), NOT_REGISTERED);
        };
        if w.is_used(true, |place, n| matches!(place, Place::Host(p) if overlaps(*p, n, at, len))) {
            w.let_pass("REG-5", format!("{NAME}: {at:#x} is used by what is queued"));
        }
        w.hosts.registered.remove(&at);
        Ok(())
    })
}

#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtHostGetDevicePointer(
    start: *mut c_void,
    mapped: *mut *mut c_void,
    flags: c_uint,
) -> u32 {
    const NAME: &str = "aclrtHostGetDevicePointer";
    call(NAME, |w| {
        w.current(NAME)?;
        there(w, NAME, start)?;
        there(w, NAME, mapped)?;
        if flags != 0 {
            return w.violate("ARG-2", format!("{NAME}: flags {flags:#x}"), INVALID_PARAM);
        }
        let at = start as usize;
        let found =
            w.hosts.registration(at, 1).and_then(|(s, _)| Some(w.hosts.registered[&s].mapped? + at - s));
        let Some(found) = found else {
            return w.violate("REG-3", format!("{NAME}: {at:#x}"), NOT_REGISTERED);
        };
        // SAFETY: as above.
        unsafe { write(w, NAME, mapped, found as *mut c_void) }
    })
}

/// As the header has it; 28 bytes.
#[cfg(not(feature = "acl2022"))]
#[repr(C)]
struct PointerAttributes {
    id: u32,
    location: c_int,
    page_size: u32,
    reserved: [u32; 4],
}

/// 0: page-locked host memory; 1: device memory; 2: known as neither.
#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtPointerGetAttributes(start: *const c_void, to: *mut PointerAttributes) -> u32 {
    const NAME: &str = "aclrtPointerGetAttributes";
    call(NAME, |w| {
        there(w, NAME, start.cast_mut())?;
        let at = start as usize;
        let device = w.blocks.range(..=at).next_back().filter(|(s, (_, b))| at < *s + b.len());
        let (id, location) = match device.map(|(_, (device, _))| *device) {
            Some(device) => (device as u32, 1),
            None if w.hosts.is_locked(at, 1) => (0, 0),
            None => (0, 2),
        };
        // SAFETY: as above.
        unsafe { write(w, NAME, to, PointerAttributes { id, location, page_size: 4096, reserved: [0; 4] }) }
    })
}
