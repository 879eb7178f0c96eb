//! The library's entry points but for copies, with the signatures of acl.h and acl_rt.h. Handles are numbers here and
//! pointers there.
//!
//! Host memory starts on a multiple of 64 and of no more, since that is what is promised; on the device (RC mode) on a
//! multiple of 16 that is none of 64.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_uint};

use super::*;
use crate::common::{At, Outcome, Vendor, call, entries, fails_if, thread, waiting_call};
use crate::world::{Event, Op, Place, Registered, World, is_mapped, is_range};

/// `aclrtHostRegister` takes pages of this size.
const PAGE: usize = 4096;
/// The longest error text, its end included.
const TEXT: usize = 512;
/// What an event may be made for: to make streams wait, as a time stamp, and to tell how far its stream has come.
const SYNC: c_uint = 1;
const ALLOWED: c_uint = 0x4B;

thread_local! {
    /// The latest error of this thread, until a call asks for it.
    static RECENT: RefCell<Option<String>> = const { RefCell::new(None) };
    /// The text handed out: always in the same place, so that a program with an old pointer reads another error's text.
    static SHOWN: RefCell<[u8; TEXT]> = const { RefCell::new([0; TEXT]) };
}

pub(crate) fn note_error(name: &str, code: u32) {
    if code != 0 {
        let text = format!("E{code}: {name} failed on thread {}", thread());
        // A thread that ends has no place for it any more.
        let _ = RECENT.try_with(|recent| recent.replace(Some(text)));
    }
}

impl World {
    /// What is refused whatever the call is. (The runtime does not check that it was initialised.)
    pub(crate) fn may_call_acl(&mut self) -> Outcome {
        if matches!(self.call, "aclInit" | "aclFinalize" | "aclGetRecentErrMsg") {
            return Ok(());
        }
        self.forbid("INIT-3", UNINITIALIZE, self.ended)?;
        self.let_pass_if("INIT-1", !self.ready);
        Ok(())
    }

    /// The current context, or an error that is no violation: there is no other way to ask.
    fn asked(&self) -> Outcome<usize> {
        let context = Vendor::Acl.current();
        if self.contexts.contains_key(&context) { Ok(context) } else { Err(CONTEXT_NULL) }
    }

    /// Runs all of a device, for a call that waits for that.
    fn drain_device(&mut self) -> Outcome {
        let device = self.current_device()?;
        if !self.hung {
            let of = self.streams_of(|context| self.contexts[&context].device == device);
            of.into_iter().for_each(|stream| self.drain(stream));
        }
        Ok(())
    }
}

entries! {
    Acl, files, also [
        aclrtGetSocName aclGetRecentErrMsg aclrtSynchronizeDevice aclrtSynchronizeStream
        aclrtSynchronizeStreamWithTimeout
    ];

    fn aclInit(path: *const c_char) in Here, |w| {
        if !path.is_null() {
            let path = std::ffi::CStr::from_ptr(path).to_string_lossy();
            if !path.is_empty() && !std::path::Path::new(path.as_ref()).exists() {
                return Err(INVALID_FILE);
            }
        }
        w.ended = false;
        fails_if(REPEAT_INITIALIZE, std::mem::replace(&mut w.ready, true))?;
        crate::end::end_with_process();
        Ok(())
    }

    /// Destroys everything, whatever other code uses it.
    fn aclFinalize() in Here, |w| {
        w.forbid("INIT-4", REPEAT_FINALIZE, !w.ready)?;
        w.let_pass("INIT-2");
        (w.ready, w.ended) = (false, true);
        let contexts: Vec<usize> = w.contexts.keys().copied().collect();
        contexts.into_iter().for_each(|context| w.end_context(context));
        w.devices.iter_mut().for_each(|device| (device.uses, device.primary) = (0, None));
        Ok(())
    }

    fn aclrtGetDeviceCount(count: *mut u32) in Here, |w| {
        fails_if(NO_DEVICE, w.devices.is_empty())?;
        w.give(count, w.device_count() as u32)
    }

    fn aclrtGetRunMode(mode: *mut c_uint) in Here, |w| { w.give(mode, c_uint::from(!w.acl.on_device)) }

    fn aclrtSetDevice(device: c_int) in On(device), |w| {
        let device = w.device(device)?;
        let context = w.retain(device);
        Vendor::Acl.stack(|stack| stack.set(context));
        Ok(())
    }

    fn aclrtResetDevice(device: c_int) in On(device), |w| {
        let device = w.device(device)?;
        let Some(default) = w.release(device)? else { return Ok(()) };
        let of: Vec<usize> = w.contexts.iter().filter(|(_, c)| c.device == device).map(|(h, _)| *h).collect();
        let left: usize = of.iter().flat_map(|context| w.owned(Some(*context))).map(|(_, count)| count).sum();
        w.let_pass_if("DEV-1", of != [default] || left > 0);
        of.into_iter().for_each(|context| w.end_context(context));
        // What a reset is for.
        w.devices[device].dead = None;
        Ok(())
    }

    fn aclrtGetDevice(device: *mut c_int) in Here, |w| {
        let context = w.asked()?;
        w.give(device, w.ordinal(w.contexts[&context].device))
    }

    fn aclrtCreateContext(context: *mut usize, device: c_int) in On(device), |w| {
        let device = w.device(device)?;
        w.devices[device].dead.map_or(Ok(()), Err)?;
        let made = w.add_context(device);
        w.opened += 1;
        Vendor::Acl.stack(|stack| stack.set(made));
        w.give(context, made)
    }

    fn aclrtDestroyContext(context: usize) in Of(context), |w| { w.destroy_context(context) }

    /// Only a context can be made current: a thread that had one never has none again.
    fn aclrtSetCurrentContext(context: usize) in Of(context), |w| {
        w.forbid("CTX-2", CONTEXT_NULL, !w.contexts.contains_key(&context))?;
        Vendor::Acl.stack(|stack| stack.set(context));
        Ok(())
    }

    fn aclrtGetCurrentContext(context: *mut usize) in Here, |w| {
        let current = w.asked()?;
        w.give(context, current)
    }

    fn aclrtMalloc(start: *mut usize, len: usize, policy: c_uint) in Here, |w| {
        let device = w.current_device()?;
        // How large the pages are, in the lower bits.
        let (largest, flags) = if w.acl.old { (5, 0) } else { (7, 0x10_1100) };
        w.forbid("ARG-2", INVALID_PARAM, len == 0 || policy & !flags > largest)?;
        // On a multiple of 64 and, every other one, of no more.
        let offset = if w.random().is_multiple_of(2) { 64 } else { 0 };
        let at = w.allocate(device, 0, len, offset)?;
        w.give(start, at)
    }

    /// Needs no context, and waits for nothing.
    fn aclrtFree(start: usize) in Of(start), |w| {
        let device = w.blocks.get(&start).map(|block| block.device);
        let device = w.must("MEM-7", PARAM_INVALID, device)?;
        w.devices[device].dead.map_or(Ok(()), Err)?;
        w.free_block("MEM-8", start);
        Ok(())
    }

    fn aclrtMallocHost(start: *mut usize, len: usize) in Here, |w| {
        let device = w.current_device()?;
        w.forbid("ARG-2", INVALID_PARAM, len == 0)?;
        fails_if(MEMORY_ALLOCATION, w.acl.on_device && !w.fits(device, len))?;
        let promised = if w.acl.on_device { 16 } else { 64 };
        let at = w.allocate_host((device, 0, false), len, [promised, 3 * promised])?;
        w.give(start, at)
    }

    /// Waits for nothing.
    fn aclrtFreeHost(start: usize) in Here, |w| {
        let len = w.must("HST-1", PARAM_INVALID, w.hosts.get(&start).map(|host| host.len))?;
        let was_used = w.streams.values().any(|s| !s.destroyed && s.used.contains(&start));
        let is_queued = w.take_back("HST-2", Place::Host(start), len);
        w.let_pass_if("HST-10", was_used && !is_queued);
        w.let_pass_if("MEM-4", w.is_registered_in_part(start, len));
        w.free_host(start);
        Ok(())
    }

    fn aclrtHostRegister(start: usize, len: u64, kind: c_uint, mapped: *mut usize) in Here, |w| {
        let len = len as usize;
        w.current()?;
        // The other types are reserved.
        w.forbid("ARG-2", INVALID_PARAM, kind != 0)?;
        // The product cannot, which is no mistake of the caller's: there is no other way to ask.
        fails_if(NOT_SUPPORTED, w.acl.on_device)?;
        w.forbid("MEM-3", PARAM_INVALID, !is_range(start, len))?;
        let pages = start.is_multiple_of(PAGE) && len.is_multiple_of(PAGE);
        w.forbid("REG-1", DRIVER_INTERNAL, !pages)?;
        w.forbid("MEM-1", ALREADY_REGISTERED, w.is_registered_in_part(start, len))?;
        w.forbid("HST-5", PARAM_INVALID, !is_mapped(start, len, true))?;
        let at = w.made_up(len, 0);
        w.registered.insert(start, Registered { len, read_only: false, mapped: at });
        w.give(mapped, at)
    }

    fn aclrtHostUnregister(start: usize) in Here, |w| {
        w.current()?;
        w.unregister(start, NOT_REGISTERED)
    }

    fn aclrtCreateStream(stream: *mut usize) in Here, |w| {
        let context = w.current()?;
        let made = w.create_stream(context, false);
        w.give(stream, made)
    }

    fn aclrtDestroyStream(stream: usize) in Of(stream), |w| { w.destroy_stream(stream) }

    /// No resource of the device limits the number of such events.
    fn aclrtCreateEventExWithFlag(event: *mut usize, flags: c_uint) in Here, |w| {
        let context = w.current()?;
        w.forbid("ARG-2", INVALID_PARAM, flags == 0 || flags & !ALLOWED != 0)?;
        let made = w.create_event(context, flags);
        w.give(event, made)
    }

    fn aclrtDestroyEvent(event: usize) in Of(event), |w| {
        w.any_event(event)?;
        w.destroy_event(event)
    }

    fn aclrtRecordEvent(event: usize, stream: usize) in Of(stream), |w| { w.record(event, stream) }

    /// 1: complete; 0: not ready.
    fn aclrtQueryEventStatus(event: usize, status: *mut c_uint) in Of(event), |w| {
        let is_complete = w.query(event)?;
        w.give(status, is_complete.into())
    }

    /// The stream is the current context's; the event may be another device's. Never recorded: nothing to wait for.
    fn aclrtStreamWaitEvent(stream: usize, event: usize) in Of(stream), |w| {
        w.stream(stream)?;
        let Event { flags, recorded, .. } = *w.any_event(event)?;
        w.forbid("EVT-5", NOT_SUPPORTED, flags & SYNC == 0)?;
        match recorded {
            None => w.let_pass("EVT-2"),
            Some((on, upto)) => drop(w.submit(stream, Op::Wait { stream: on, upto })?),
        }
        Ok(())
    }
}

pub(crate) fn symbol(name: &str) -> Option<*const std::ffi::c_void> {
    files(name).or_else(|| super::copies::files(name))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetSocName() -> *const c_char {
    let Some(_inside) = crate::end::Inside::begin("aclrtGetSocName") else { return std::ptr::null() };
    c"Ascend910B-standin".as_ptr()
}

/// The latest error of this thread, once. Null: there was none since the last call asked. An older pointer shows this
/// text.
#[unsafe(no_mangle)]
pub extern "C" fn aclGetRecentErrMsg() -> *const c_char {
    call(Vendor::Acl, "aclGetRecentErrMsg", At::Here, |_| Ok(()));
    let Some(text) = RECENT.take() else { return std::ptr::null() };
    SHOWN.with_borrow_mut(|shown| {
        let n = text.len().min(TEXT - 1);
        shown[..n].copy_from_slice(&text.as_bytes()[..n]);
        shown[n..].fill(0);
        shown.as_ptr().cast()
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeDevice() -> u32 {
    let go_on = World::drain_device;
    waiting_call(Vendor::Acl, "aclrtSynchronizeDevice", At::Here, (-1, 0), |_| Ok(()), go_on)
}

/// The stream may be another context's.
fn synchronize(name: &'static str, stream: usize, timeout: c_int) -> u32 {
    // -1, or a number of milliseconds.
    let check = |w: &mut World| match timeout {
        0 | ..=-2 => w.broken("ARG-2", PARAM_INVALID),
        _ => Ok(()),
    };
    waiting_call(Vendor::Acl, name, At::Of(stream), (timeout, STREAM_SYNC_TIMEOUT), check, |w| {
        w.current()?;
        let handle = w.resolved(stream);
        w.any_stream(handle)?;
        if !w.hung {
            w.drain(handle);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeStream(stream: usize) -> u32 {
    synchronize("aclrtSynchronizeStream", stream, -1)
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeStreamWithTimeout(stream: usize, timeout: c_int) -> u32 {
    synchronize("aclrtSynchronizeStreamWithTimeout", stream, timeout)
}
