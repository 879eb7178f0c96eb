//! Devices, their run mode and memory, and contexts: the default one of each device, and those that are made.

#![allow(non_snake_case)]

use std::ffi::{c_int, c_uint, c_void};

use crate::calls::{call, there, write};
use crate::codes::*;
use crate::world::*;

/// What `aclrtMalloc` takes as a policy: how large the pages are, in the lower bits.
fn is_policy(policy: c_uint) -> bool {
    let largest = if cfg!(feature = "acl2022") { 5 } else { 7 };
    let flags = if cfg!(feature = "acl2022") { 0 } else { 0x10_1100 };
    policy & !flags <= largest
}

#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtGetDeviceCount(count: *mut u32) -> u32 {
    call("aclrtGetDeviceCount", |w| {
        if w.devices.is_empty() {
            return Err(NO_DEVICE);
        }
        // SAFETY: the caller's promise, here and in all calls below: what is written to is valid.
        unsafe { write(w, "aclrtGetDeviceCount", count, w.devices.len() as u32) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtGetRunMode(mode: *mut c_uint) -> u32 {
    // SAFETY: as above.
    call("aclrtGetRunMode", |w| unsafe { write(w, "aclrtGetRunMode", mode, c_uint::from(!w.on_device)) })
}

#[unsafe(no_mangle)]
extern "C" fn aclrtSetDevice(device: c_int) -> u32 {
    call("aclrtSetDevice", |w| {
        let device = w.device(device)?;
        let context = match w.devices[device].default {
            Some(context) => context,
            None => {
                let context = w.fresh();
                w.contexts.insert(context, Context { device, explicit: false, default_stream: None });
                w.devices[device].default = Some(context);
                context
            }
        };
        w.devices[device].sets += 1;
        w.opened += 1;
        CURRENT.set(context);
        Ok(())
    })
}

fn reset(w: &mut World, call: &str, device: c_int, force: bool) -> Outcome {
    let device = w.device(device)?;
    if w.devices[device].sets == 0 {
        return w.violate("DEV-2", format!("{call}: device {device} is not set"), CONTEXT_NULL);
    }
    w.devices[device].sets -= 1;
    if !force && w.devices[device].sets > 0 {
        return Ok(());
    }
    w.devices[device].sets = 0;
    let of: Vec<usize> = w.contexts.iter().filter(|(_, c)| c.device == device).map(|(h, _)| *h).collect();
    let contexts = of.iter().filter(|c| w.contexts[*c].explicit).count();
    let left: usize = of.iter().flat_map(|c| w.owned(Some(*c))).map(|(_, count)| count).sum();
    if contexts + left > 0 {
        w.let_pass(
            "DEV-1",
            format!("{call}: device {device} has {contexts} contexts and {left} streams and events"),
        );
    }
    of.into_iter().for_each(|context| w.end_context(context));
    w.devices[device].default = None;
    // What a reset is for.
    w.devices[device].dead = None;
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn aclrtResetDevice(device: c_int) -> u32 {
    call("aclrtResetDevice", |w| reset(w, "aclrtResetDevice", device, false))
}

#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
extern "C" fn aclrtResetDeviceForce(device: c_int) -> u32 {
    call("aclrtResetDeviceForce", |w| reset(w, "aclrtResetDeviceForce", device, true))
}

/// The current context, or an error that is no violation: there is no other way to ask.
fn asked(w: &World) -> Outcome<(usize, usize)> {
    let context = CURRENT.get();
    w.device_of(context).map(|device| (context, device)).ok_or(CONTEXT_NULL)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtGetDevice(device: *mut c_int) -> u32 {
    call("aclrtGetDevice", |w| {
        let (_, of) = asked(w)?;
        // SAFETY: as above.
        unsafe { write(w, "aclrtGetDevice", device, of as c_int) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn aclrtSynchronizeDevice() -> u32 {
    const NAME: &str = "aclrtSynchronizeDevice";
    let code = call(NAME, |w| {
        let device = w.current_device(NAME)?;
        if !w.hung {
            w.run_device(device);
        }
        Ok(())
    });
    if code == 0 {
        crate::streams::wait(NAME, -1, 0, |w| w.current_device(NAME).map(|d| w.run_device(d)))
    } else {
        code
    }
}

impl World {
    /// Runs everything on a device.
    pub fn run_device(&mut self, device: usize) {
        let streams: Vec<usize> = self
            .streams
            .iter()
            .filter(|(_, s)| self.device_of(s.context) == Some(device))
            .map(|(handle, _)| *handle)
            .collect();
        streams.into_iter().for_each(|stream| self.drain(stream));
    }
}

// --- contexts
// ----------------------------------------------------------------------------------------------------------

#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtCreateContext(context: *mut *mut c_void, device: c_int) -> u32 {
    const NAME: &str = "aclrtCreateContext";
    call(NAME, |w| {
        there(w, NAME, context)?;
        let device = w.device(device)?;
        w.alive(device)?;
        let made = w.fresh();
        w.contexts.insert(made, Context { device, explicit: true, default_stream: None });
        w.opened += 1;
        CURRENT.set(made);
        // SAFETY: as above.
        unsafe { write(w, NAME, context, made as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn aclrtDestroyContext(context: *mut c_void) -> u32 {
    const NAME: &str = "aclrtDestroyContext";
    call(NAME, |w| {
        there(w, NAME, context)?;
        let context = context as usize;
        if !w.contexts.get(&context).is_some_and(|c| c.explicit) {
            return w.violate("CTX-4", format!("{context:#x}"), CONTEXT_NULL);
        }
        w.end_context(context);
        Ok(())
    })
}

/// Only a context can be made current: a thread that had one never has none again.
#[unsafe(no_mangle)]
extern "C" fn aclrtSetCurrentContext(context: *mut c_void) -> u32 {
    const NAME: &str = "aclrtSetCurrentContext";
    call(NAME, |w| {
        there(w, NAME, context)?;
        let context = context as usize;
        if !w.contexts.contains_key(&context) {
            return w.violate("CTX-2", format!("{NAME}: {context:#x}"), CONTEXT_NULL);
        }
        CURRENT.set(context);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtGetCurrentContext(context: *mut *mut c_void) -> u32 {
    call("aclrtGetCurrentContext", |w| {
        let (current, _) = asked(w)?;
        // SAFETY: as above.
        unsafe { write(w, "aclrtGetCurrentContext", context, current as *mut c_void) }
    })
}

// --- memory
// ------------------------------------------------------------------------------------------------------------

impl World {
    /// How much of a device's memory is used: where the program runs on the device, host memory is part of it.
    pub fn used(&self, device: usize) -> usize {
        let blocks: usize = self.blocks.values().filter(|(of, _)| *of == device).map(|(_, b)| b.len()).sum();
        blocks + if self.on_device { self.hosts.used(device) } else { 0 }
    }

    fn allocate(&mut self, call: &str, len: usize, policy: c_uint) -> Outcome<usize> {
        let device = self.current_device(call)?;
        if len == 0 || !is_policy(policy) {
            return self.violate("ARG-2", format!("{call}: {len} bytes, policy {policy:#x}"), INVALID_PARAM);
        }
        if self.used(device).checked_add(len).is_none_or(|sum| sum > self.devices[device].memory) {
            return Err(MEMORY_ALLOCATION);
        }
        let at = self.address(len);
        self.blocks.insert(at, (device, vec![FRESH; len]));
        Ok(at)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtMalloc(start: *mut *mut c_void, len: usize, policy: c_uint) -> u32 {
    const NAME: &str = "aclrtMalloc";
    call(NAME, |w| {
        there(w, NAME, start)?;
        let at = w.allocate(NAME, len, policy)?;
        // SAFETY: as above.
        unsafe { write(w, NAME, start, at as *mut c_void) }
    })
}

#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtMallocAlign32(start: *mut *mut c_void, len: usize, policy: c_uint) -> u32 {
    const NAME: &str = "aclrtMallocAlign32";
    call(NAME, |w| {
        there(w, NAME, start)?;
        let at = w.allocate(NAME, len, policy)?;
        // SAFETY: as above.
        unsafe { write(w, NAME, start, at as *mut c_void) }
    })
}

/// Needs no context, and waits for nothing.
#[unsafe(no_mangle)]
extern "C" fn aclrtFree(start: *mut c_void) -> u32 {
    const NAME: &str = "aclrtFree";
    call(NAME, |w| {
        there(w, NAME, start)?;
        let at = start as usize;
        let Some((device, len)) = w.blocks.get(&at).map(|(device, bytes)| (*device, bytes.len())) else {
            return w.violate("MEM-5", format!("{at:#x} is no allocation"), PARAM_INVALID);
        };
        w.alive(device)?;
        if w.is_used(true, |place, n| matches!(place, Place::Device(p) if overlaps(*p, n, at, len))) {
            w.let_pass("MEM-6", format!("{at:#x} is used by what is queued"));
        }
        w.blocks.remove(&at);
        Ok(())
    })
}

/// The attribute tells kinds of memory apart; there is one.
#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtGetMemInfo(attribute: c_uint, free: *mut usize, total: *mut usize) -> u32 {
    const NAME: &str = "aclrtGetMemInfo";
    call(NAME, |w| {
        let device = w.current_device(NAME)?;
        if attribute > 9 {
            return w.violate("ARG-2", format!("{NAME}: attribute {attribute}"), INVALID_PARAM);
        }
        let all = w.devices[device].memory;
        // SAFETY: as above.
        unsafe {
            write(w, NAME, free, all.saturating_sub(w.used(device)))?;
            write(w, NAME, total, all)
        }
    })
}
