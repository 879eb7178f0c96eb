//! Page-locked host memory: allocated by the library, and registered.
//!
//! Allocations are real memory, filled with 0xA5. On a host they start on a multiple of 64 and of no more, since that
//! is what is promised; on the device (RC mode) on a multiple of 16 that is none of 64. Memory that is freed or
//! unregistered while a queued copy uses it is lost at once: copies from there then carry 0xDD, and copies to there are
//! discarded.

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};

use super::calls::{gives, there};
use super::codes::*;
use super::world::*;
use crate::common::{entries, is_mapped};

const PAGE: usize = 4096;
/// What one allocation may have: above some 200 GB they were seen to fail, however much is free.
const EXTENT: usize = 200 << 30;

struct Host {
    len: usize,
    /// The device that was current.
    device: usize,
    /// What the system allocated.
    block: (usize, Layout),
}

struct Registered {
    len: usize,
    /// The device's address of it.
    mapped: usize,
}

/// See the file's page.
#[derive(Default)]
pub struct Hosts {
    blocks: BTreeMap<usize, Host>,
    registered: BTreeMap<usize, Registered>,
    /// The most bytes of one allocation, and of all.
    extent: usize,
    limit: usize,
    /// Whether driver and product have it.
    pub can_register: bool,
    made: usize,
}

impl Hosts {
    /// What there is where nothing else is said.
    pub fn usual() -> Self {
        Self { extent: EXTENT, limit: usize::MAX, can_register: true, ..Self::default() }
    }

    pub fn limit_to(&mut self, extent: usize, all: usize) {
        (self.extent, self.limit) = (extent, all);
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
        self.registered.values().any(|r| (r.mapped..r.mapped + r.len).contains(&at))
    }
}

impl World {
    fn allocate_host(&mut self, len: usize) -> Outcome<usize> {
        let device = self.current_device()?;
        if len == 0 {
            return self.violate("ARG-2", "no bytes", INVALID_PARAM);
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
        note_host(at, Some(self.number));
        Ok(at)
    }

    fn free_host(&mut self, at: usize) -> Outcome {
        let Some(len) = self.hosts.blocks.get(&at).map(|b| b.len) else {
            return self.violate("HST-1", format!("{at:#x}"), PARAM_INVALID);
        };
        if self.is_used(true, |place, n| matches!(place, Place::Host(p) if overlaps(*p, n, at, len))) {
            self.let_pass("HST-2", format!("{at:#x} is used by what is queued"));
        } else if self.streams.values().any(|s| !s.destroyed && s.used.contains(&at)) {
            self.let_pass("HST-3", format!("{at:#x} was used by a stream that was not waited for"));
        }
        for stream in self.streams.values_mut() {
            stream.used.remove(&at);
        }
        if self.hosts.registered.iter().any(|(s, r)| overlaps(at, len, *s, r.len)) {
            self.let_pass("REG-5", format!("{at:#x} is still registered"));
        }
        if let Some(Host { block: (block, layout), .. }) = self.hosts.blocks.remove(&at) {
            note_host(at, None);
            // SAFETY: allocated with that layout, and freed once.
            unsafe { std::alloc::dealloc(block as *mut u8, layout) };
        }
        Ok(())
    }

    fn register(&mut self, at: usize, len: usize) -> Outcome<usize> {
        self.current()?;
        if at == 0 {
            return self.violate("ARG-1", "null", INVALID_PARAM);
        }
        // The product or the driver cannot, which is no mistake of the caller's: there is no other way to ask.
        if !self.hosts.can_register || self.on_device {
            return Err(NOT_SUPPORTED);
        }
        let text = format!("{len} bytes at {at:#x}");
        if len == 0 || at.checked_add(len).is_none() {
            return self.violate("REG-4", text, PARAM_INVALID);
        }
        if !at.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) {
            return self.violate("REG-1", text, DRIVER_INTERNAL);
        }
        if self.hosts.registered.iter().any(|(s, r)| overlaps(at, len, *s, r.len)) {
            return self.violate("REG-2", text, ALREADY_REGISTERED);
        }
        if !is_mapped(at, len, true) {
            return self.violate("REG-4", text, PARAM_INVALID);
        }
        let mapped = self.made_up(len);
        self.hosts.registered.insert(at, Registered { len, mapped });
        Ok(mapped)
    }
}

entries! {
    acl;

    fn aclrtMallocHost(start: *mut usize, len: usize) in here(), |w, name| {
        gives(w, start, |w| w.allocate_host(len))
    }

    /// Needs no context, and waits for nothing.
    fn aclrtFreeHost(start: usize) in of_host(start), |w, name| {
        there(w, start)?;
        w.free_host(start)
    }

    /// Mapped; the other types are reserved.
    fn aclrtHostRegister(start: usize, len: u64, kind: c_uint, mapped: *mut usize) in here(), |w, name| {
        let register = |w: &mut World| match kind {
            0 => w.register(start, len as usize),
            _ => w.violate("ARG-2", format!("type {kind}"), INVALID_PARAM),
        };
        gives(w, mapped, register)
    }

    fn aclrtHostUnregister(start: usize) in here(), |w, name| {
        w.current()?;
        there(w, start)?;
        let Some(len) = w.hosts.registered.get(&start).map(|r| r.len) else {
            return w.violate("REG-3", format!("{start:#x}"), NOT_REGISTERED);
        };
        if w.is_used(true, |place, n| matches!(place, Place::Host(p) if overlaps(*p, n, start, len))) {
            w.let_pass("REG-5", format!("{start:#x} is used by what is queued"));
        }
        w.hosts.registered.remove(&start);
        Ok(())
    }
}

/// As the header has it; 28 bytes.
#[repr(C)]
pub struct PointerAttributes {
    id: u32,
    location: c_int,
    page_size: u32,
    reserved: [u32; 4],
}

entries! {
    acl;

    /// 0: page-locked host memory; 1: device memory; 2: known as neither.
    fn aclrtPointerGetAttributes(start: usize, to: *mut PointerAttributes) in here(), |w, name| {
        let attributes = |w: &mut World| {
            there(w, start)?;
            let device = w.blocks.range(..=start).next_back().filter(|(s, (_, b))| start < *s + b.len());
            let (id, location) = match device.map(|(_, (device, _))| *device) {
                Some(device) => (device as u32, 1),
                None if w.hosts.is_locked(start, 1) => (0, 0),
                None => (0, 2),
            };
            Ok(PointerAttributes { id, location, page_size: 4096, reserved: [0; 4] })
        };
        gives(w, to, attributes)
    }
}
