//! Devices, their run mode and memory, and contexts: the default one of each device, and those that are made.

use std::ffi::{c_int, c_uint};

use super::calls::{call, gives, there};
use super::codes::*;
use super::world::*;
use crate::common::entries;

/// What `aclrtMalloc` takes as a policy: how large the pages are, in the lower bits.
fn is_policy(w: &World, policy: c_uint) -> bool {
    let (largest, flags) = if w.is_old() { (5, 0) } else { (7, 0x10_1100) };
    policy & !flags <= largest
}

entries! {
    acl;

    fn aclrtGetDeviceCount(count: *mut u32) in here(), |w, name| {
        let all = |w: &mut World| if w.devices.is_empty() { Err(NO_DEVICE) } else { Ok(devices(w) as u32) };
        gives(w, count, all)
    }

    fn aclrtGetRunMode(mode: *mut c_uint) in here(), |w, name| {
        gives(w, mode, |w| Ok(c_uint::from(!w.on_device)))
    }

    fn aclrtSetDevice(device: c_int) in on(device), |w, name| {
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
    }

    fn aclrtResetDevice(device: c_int) in on(device), |w, name| {
        let device = w.device(device)?;
        if w.devices[device].sets == 0 {
            return w.violate("DEV-2", format!("device {device} is not set"), CONTEXT_NULL);
        }
        w.devices[device].sets -= 1;
        if w.devices[device].sets > 0 {
            return Ok(());
        }
        let of: Vec<usize> = w.contexts.iter().filter(|(_, c)| c.device == device).map(|(h, _)| *h).collect();
        let contexts = of.iter().filter(|c| w.contexts[*c].explicit).count();
        let left: usize = of.iter().flat_map(|c| w.owned(Some(*c))).map(|(_, count)| count).sum();
        if contexts + left > 0 {
            let text = format!("device {device} has {contexts} contexts and {left} streams and events");
            w.let_pass("DEV-1", text);
        }
        of.into_iter().for_each(|context| w.end_context(context));
        w.devices[device].default = None;
        // What a reset is for.
        w.devices[device].dead = None;
        Ok(())
    }

    fn aclrtGetDevice(device: *mut c_int) in here(), |w, name| {
        gives(w, device, |w| asked(w).map(|(_, of)| w.ordinal(of)))
    }
}

/// The current context, or an error that is no violation: there is no other way to ask.
fn asked(w: &World) -> Outcome<(usize, usize)> {
    let context = CURRENT.get();
    w.device_of(context).map(|device| (context, device)).ok_or(CONTEXT_NULL)
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeDevice() -> u32 {
    const NAME: &str = "aclrtSynchronizeDevice";
    let go_on = |w: &mut World| {
        let device = w.current_device()?;
        if !w.hung {
            w.run_device(device);
        }
        Ok(())
    };
    let code = call(NAME, here(), go_on);
    if code == 0 { super::streams::wait(NAME, here(), -1, go_on) } else { code }
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

entries! {
    acl;

    fn aclrtCreateContext(context: *mut usize, device: c_int) in on(device), |w, name| {
        let create = |w: &mut World| {
            let device = w.device(device)?;
            w.alive(device)?;
            let made = w.fresh();
            w.contexts.insert(made, Context { device, explicit: true, default_stream: None });
            w.opened += 1;
            CURRENT.set(made);
            Ok(made)
        };
        gives(w, context, create)
    }

    fn aclrtDestroyContext(context: usize) in of(context), |w, name| {
        there(w, context)?;
        if !w.contexts.get(&context).is_some_and(|c| c.explicit) {
            return w.violate("CTX-4", format!("{context:#x}"), CONTEXT_NULL);
        }
        w.end_context(context);
        Ok(())
    }

    /// Only a context can be made current: a thread that had one never has none again.
    fn aclrtSetCurrentContext(context: usize) in of(context), |w, name| {
        there(w, context)?;
        if !w.contexts.contains_key(&context) {
            return w.violate("CTX-2", format!("{context:#x}"), CONTEXT_NULL);
        }
        CURRENT.set(context);
        Ok(())
    }

    fn aclrtGetCurrentContext(context: *mut usize) in here(), |w, name| {
        gives(w, context, |w| asked(w).map(|(current, _)| current))
    }
}

// --- memory
// ------------------------------------------------------------------------------------------------------------

impl World {
    /// How much of a device's memory is used: where the program runs on the device, host memory is part of it.
    pub fn used(&self, device: usize) -> usize {
        let blocks: usize = self.blocks.values().filter(|(of, _)| *of == device).map(|(_, b)| b.len()).sum();
        blocks + if self.on_device { self.hosts.used(device) } else { 0 }
    }

    fn allocate(&mut self, len: usize, policy: c_uint) -> Outcome<usize> {
        let device = self.current_device()?;
        if len == 0 || !is_policy(self, policy) {
            return self.violate("ARG-2", format!("{len} bytes, policy {policy:#x}"), INVALID_PARAM);
        }
        if self.used(device).checked_add(len).is_none_or(|sum| sum > self.devices[device].memory) {
            return Err(MEMORY_ALLOCATION);
        }
        let at = self.made_up(len);
        self.blocks.insert(at, (device, vec![FRESH; len]));
        Ok(at)
    }
}

entries! {
    acl;

    fn aclrtMalloc(start: *mut usize, len: usize, policy: c_uint) in here(), |w, name| {
        gives(w, start, |w| w.allocate(len, policy))
    }

    /// Needs no context, and waits for nothing.
    fn aclrtFree(start: usize) in of(start), |w, name| {
        there(w, start)?;
        let Some((device, len)) = w.blocks.get(&start).map(|(device, bytes)| (*device, bytes.len())) else {
            return w.violate("MEM-5", format!("{start:#x} is no allocation"), PARAM_INVALID);
        };
        w.alive(device)?;
        if w.is_used(true, |place, n| matches!(place, Place::Device(p) if overlaps(*p, n, start, len))) {
            w.let_pass("MEM-6", format!("{start:#x} is used by what is queued"));
        }
        w.blocks.remove(&start);
        Ok(())
    }
}
