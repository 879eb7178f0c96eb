//! The driver's entry points, with the signatures of cuda.h. Each counts itself, fails if a test asked for that, and
//! then does what `world.rs` has for it. Handles are numbers here and pointers there.

use std::ffi::{c_char, c_int, c_uint};

use super::world::*;
use crate::common::entries;

/// What every call begins and ends with: a call in the world with that number.
pub fn call(name: &'static str, number: usize, body: impl FnOnce(&mut World) -> Outcome) -> u32 {
    call_for(name, number, None, body)
}

/// A call with the event's context, which need not be current.
fn call_for(
    name: &'static str,
    number: usize,
    event: Option<usize>,
    body: impl FnOnce(&mut World) -> Outcome,
) -> u32 {
    let Some(_inside) = crate::end::Inside::begin(name) else { return DEINITIALIZED };
    let code = made(name, &mut world(number), event, body);
    super::graphs::run_due(number);
    code
}

fn made(
    name: &'static str,
    world: &mut World,
    event: Option<usize>,
    body: impl FnOnce(&mut World) -> Outcome,
) -> u32 {
    world.count(name);
    if world.ended {
        return DEINITIALIZED;
    }
    if !world.ready && !matches!(name, "cuInit" | "cuDriverGetVersion") {
        world.let_pass("INIT-1", name);
        return NOT_INITIALIZED;
    }
    if super::graphs::is_destructor() {
        world.let_pass("GRA-1", name);
        return NOT_PERMITTED;
    }
    let Some((code, after)) = world.strike(name) else { return body(world).err().unwrap_or_default() };
    if code == 0 && after {
        world.stalls = true;
        let code = body(world).err().unwrap_or_default();
        world.stalls = false;
        return code;
    }
    if after {
        let _ = body(world);
    }
    if is_device_lost(code) {
        let named = event.and_then(|event| world.events.get(&event)).map(|event| event.context);
        let current = named.or_else(|| STACK.with_borrow(|stack| stack.last().copied()));
        if let Some(context) = current.or_else(|| world.contexts.keys().next().copied()) {
            world.kill(context, code);
        }
    }
    world.ended |= code == DEINITIALIZED;
    code
}

/// Writes a result, if there is a place for it.
///
/// # Safety
/// `to` is null or valid for a write.
pub unsafe fn write<T>(world: &mut World, name: &str, to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return world.violate("ARG-1", name, INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

entries! {
    cuda;

    fn cuInit(flags: c_uint) in here(), |w, name| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if w.devices.is_empty() {
            return Err(NO_DEVICE);
        }
        if !std::mem::replace(&mut w.ready, true) {
            crate::end::end_with_process();
        }
        Ok(())
    }

    fn cuDriverGetVersion(version: *mut c_int) in here(), |w, name| {
        write(w, name, version, w.version)
    }

    fn cuDeviceGetCount(count: *mut c_int) in here(), |w, name| {
        write(w, name, count, devices(w) as c_int)
    }

    /// A program may ask for all numbers in turn: that is no call of other worlds.
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) in if here() > 0 { here() } else { on(ordinal) }, |w, name| {
        // A number that no device of another world has is refused when it is used.
        if usize::try_from(ordinal).map_or(true, |ordinal| here() == w.number && ordinal >= devices(w)) {
            return Err(INVALID_DEVICE);
        }
        write(w, name, device, ordinal)
    }

    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) in on(device), |w, name| {
        let device = w.device(device)?;
        write(w, name, value, w.attribute(device, attribute)?)
    }

    fn cuDeviceGetPCIBusId(text: *mut c_char, len: c_int, device: c_int) in on(device), |w, name| {
        // A function number that no device has: the system knows nothing of it.
        w.device(device)?;
        let id = format!("ffff:{:02x}:{:02x}.7\0", 0xff - (device >> 8), device & 0xff);
        if text.is_null() || id.len() > usize::try_from(len).unwrap_or(0) {
            return w.violate("ARG-1", name, INVALID_VALUE);
        }
        text.copy_from_nonoverlapping(id.as_ptr().cast(), id.len());
        Ok(())
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: u32, text: *mut *const c_char) -> u32 {
    let Some(_inside) = crate::end::Inside::begin("cuGetErrorName") else { return DEINITIALIZED };
    // SAFETY: the caller's promise.
    let Some(text) = (unsafe { text.as_mut() }) else { return INVALID_VALUE };
    *text = word(code).map_or(std::ptr::null(), |word| word.as_ptr());
    if word(code).is_some() { 0 } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(code: u32, text: *mut *const c_char) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { cuGetErrorName(code, text) }
}

entries! {
    cuda;

    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) in on(device), |w, name| {
        let device = w.device(device)?;
        let made = w.retain(device);
        write(w, name, context, made)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: c_int) in on(device), |w, name| {
        let device = w.device(device)?;
        w.release(device)
    }

    fn cuCtxGetCurrent(context: *mut usize) in here(), |w, name| {
        let current = STACK.with_borrow(|stack| stack.last().copied()).unwrap_or(0);
        write(w, name, context, current)
    }
}

/// A context that a thread may have current: none, or one that exists.
pub fn usable(w: &mut World, name: &str, context: usize) -> Outcome {
    match w.contexts.get(&context) {
        None if context != 0 => w.violate("CTX-2", format!("{name}: {context:#x}"), CONTEXT_IS_DESTROYED),
        _ => Ok(()),
    }
}

entries! {
    cuda;

    fn cuCtxSetCurrent(context: usize) in of(context), |w, name| {
        usable(w, name, context)?;
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            if context != 0 {
                stack.push(context);
            }
        });
        Ok(())
    }

    fn cuCtxPushCurrent_v2(context: usize) in of(context), |w, name| {
        if context == 0 {
            return w.violate("ARG-1", name, INVALID_CONTEXT);
        }
        usable(w, name, context)?;
        STACK.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(context: *mut usize) in here(), |w, name| {
        match STACK.with_borrow_mut(Stack::pop) {
            None => w.violate("CTX-3", "nothing to pop", INVALID_CONTEXT),
            // Null is allowed here: then no result is written.
            Some(_) if context.is_null() => Ok(()),
            Some(popped) => write(w, name, context, popped),
        }
    }
}

/// Takes the time that a first registration takes beside its pages, without the world's lock.
fn registering() -> usize {
    let number = here();
    let first = std::mem::take(&mut world(number).first_pin);
    std::thread::sleep(first);
    number
}

entries! {
    cuda;

    fn cuMemHostRegister_v2(start: usize, len: usize, flags: c_uint) in registering(), |w, name| {
        w.current(name)?;
        w.unsafe_call(name)?;
        w.hosts.called_with(name, flags);
        w.may_register(start, len, flags)?;
        w.register(start, len)?;
        w.registered_as(start, flags);
        Ok(())
    }

    fn cuMemHostUnregister(start: usize) in here(), |w, name| {
        w.current(name)?;
        w.unsafe_call(name)?;
        w.unregister(start)
    }

    fn cuMemAlloc_v2(address: *mut u64, len: usize) in here(), |w, name| {
        let context = w.current(name)?;
        w.unsafe_call(name)?;
        let at = w.allocate(context, len)?;
        write(w, name, address, at)
    }

    fn cuMemFree_v2(address: u64) in here(), |w, name| {
        w.current(name)?;
        w.unsafe_call(name)?;
        if w.hosts.is_managed(address as usize) {
            return w.free_host(address as usize, true);
        }
        w.free(address)
    }
}

impl World {
    fn copy_async(&mut self, name: &str, src: Place, dst: Place, len: usize, stream: usize) -> Outcome {
        self.stream(name, stream)?;
        self.check(name, src, len)?;
        self.check(name, dst, len)?;
        self.may_write(name, dst, len)?;
        let captured = self.stream(name, stream)?.capture.is_some();
        // Memory that is not page-locked: its bytes are taken at once, and there when the call returns.
        if !captured && !self.by_hand && self.is_pageable(src, len) {
            let bytes = self.bytes(src, len);
            return self.submit(name, stream, Op::Staged { bytes, dst }).map(drop);
        }
        let upto = self.submit(name, stream, Op::Copy { src, dst, len })?;
        if !captured && !self.by_hand && !self.hung && self.is_pageable(dst, len) {
            let stream = self.resolved(stream);
            self.run(stream, upto);
        }
        Ok(())
    }
}

entries! {
    cuda;

    fn cuMemcpyHtoDAsync_v2(dst: u64, src: usize, len: usize, stream: usize) in of(stream), |w, name| {
        w.copy_async(name, Place::Host(src), Place::Device(dst), len, stream)
    }

    fn cuMemcpyDtoHAsync_v2(dst: usize, src: u64, len: usize, stream: usize) in of(stream), |w, name| {
        w.copy_async(name, Place::Device(src), Place::Host(dst), len, stream)
    }

    fn cuMemcpyDtoDAsync_v2(dst: u64, src: u64, len: usize, stream: usize) in of(stream), |w, name| {
        w.copy_async(name, Place::Device(src), Place::Device(dst), len, stream)
    }

    fn cuStreamCreate(stream: *mut usize, flags: c_uint) in here(), |w, name| {
        let context = w.current(name)?;
        let made = w.create_stream(context, flags & 1 == 0);
        write(w, name, stream, made)
    }

    fn cuStreamDestroy_v2(stream: usize) in of(stream), |w, name| {
        w.destroy_stream(stream)
    }
}

/// A call that no capturing stream may be named in.
pub fn not_captured(w: &mut World, name: &str, stream: usize) -> Outcome {
    w.not_implicit(name, stream)?;
    if let Some(capture) = &mut w.stream(name, stream)?.capture {
        capture.spoiled = true;
        return w.violate("CAP-2", format!("{name} on {stream:#x}"), CAPTURE_UNSUPPORTED);
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: usize) -> u32 {
    const NAME: &str = "cuStreamSynchronize";
    let (number, mut upto) = (of(stream), None);
    let code = call(NAME, number, |w| {
        w.unsafe_call(NAME)?;
        not_captured(w, NAME, stream)?;
        let submitted = w.stream(NAME, stream)?.submitted;
        if w.hung {
            upto = Some(submitted);
            return Ok(());
        }
        let stream = w.resolved(stream);
        w.run(stream, submitted);
        // What ran may have ended the context.
        w.current(NAME).map(drop)
    });
    // Not under the lock, and not as another call.
    while let Some(submitted) = upto {
        std::thread::sleep(std::time::Duration::from_millis(1));
        let mut world = world(number);
        if !world.hung {
            let resolved = world.resolved(stream);
            world.run(resolved, submitted);
            upto = None;
            if let Err(code) = world.current(NAME) {
                return code;
            }
        }
        drop(world);
        super::graphs::run_due(number);
    }
    code
}

entries! {
    cuda;

    fn cuStreamWaitEvent(stream: usize, event: usize, _flags: c_uint) in of(stream), |w, name| {
        let (captured, recorded) = {
            let event = w.event(name, event)?;
            (event.captured, event.recorded)
        };
        if captured {
            return w.violate(
                "CAP-3",
                format!("{name}: {event:#x} was recorded in a capture"),
                CAPTURED_EVENT,
            );
        }
        if let Some(capture) = &mut w.stream(name, stream)?.capture {
            capture.spoiled = true;
            let text = format!("{name}: {event:#x} is not of the capture of {stream:#x}");
            return w.violate("CAP-6", text, CAPTURE_ISOLATION);
        }
        match recorded {
            // Never recorded: nothing to wait for.
            None => Ok(()),
            Some((on, upto)) => w.submit(name, stream, Op::Wait { stream: on, upto }).map(drop),
        }
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) in here(), |w, name| {
        if mode.is_null() {
            return w.violate("ARG-1", name, INVALID_VALUE);
        }
        let new = mode.read();
        if new > 2 {
            return Err(INVALID_VALUE);
        }
        mode.write(MODE.replace(new));
        Ok(())
    }

    fn cuEventCreate(event: *mut usize, _flags: c_uint) in here(), |w, name| {
        let context = w.current(name)?;
        let made = w.create_event(context);
        write(w, name, event, made)
    }

    fn cuEventDestroy_v2(event: usize) in of(event), |w, name| {
        w.destroy_event(event)
    }

    fn cuEventRecord(event: usize, stream: usize) in of(stream), |w, name| {
        w.record(event, stream)
    }

}

/// It needs no current context.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: usize) -> u32 {
    call_for("cuEventQuery", of(event), Some(event), |w| {
        w.unsafe_call("cuEventQuery")?;
        w.query(event)
    })
}
