//! The driver's entry points, with the signatures of cuda.h. Each counts itself, fails if a test asked for that, and
//! then does what `world.rs` has for it. Handles are numbers here and pointers there.

#![allow(non_snake_case)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::world::*;

/// What every call begins and ends with.
pub fn call(name: &'static str, body: impl FnOnce(&mut World) -> Outcome) -> u32 {
    let Some(_inside) = crate::shared::Inside::begin(name) else { return DEINITIALIZED };
    let code = locked(name, body);
    crate::graphs::run_due();
    code
}

fn locked(name: &'static str, body: impl FnOnce(&mut World) -> Outcome) -> u32 {
    let mut guard = world();
    let Some(world) = guard.as_mut() else { return INVALID_VALUE };
    *world.counts.entry(name).or_default() += 1;
    if world.ended {
        return DEINITIALIZED;
    }
    if !world.ready && !matches!(name, "cuInit" | "cuDriverGetVersion") {
        let refused: Outcome = world.violate("INIT-1", name, NOT_INITIALIZED);
        return refused.err().unwrap_or_default();
    }
    if crate::graphs::is_destructor() {
        let refused: Outcome = world.violate("GRA-1", name, NOT_PERMITTED);
        return refused.err().unwrap_or_default();
    }
    let mut due = None;
    for fault in world.faults.iter_mut().filter(|f| f.call == name && f.left > 0) {
        fault.left -= 1;
        if fault.left == 0 {
            due = Some((fault.code, fault.after));
        }
    }
    let Some((code, after)) = due else { return body(world).err().unwrap_or_default() };
    world.struck += 1;
    if after {
        let _ = body(world);
    }
    if is_device_lost(code) {
        let current = STACK.with_borrow(|stack| stack.last().copied());
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

// --- opening
// -----------------------------------------------------------------------------------------------------------

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: c_uint) -> u32 {
    call("cuInit", |w| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if w.devices.is_empty() {
            return Err(NO_DEVICE);
        }
        if !std::mem::replace(&mut w.ready, true) {
            crate::shared::end_with_process();
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> u32 {
    // SAFETY: the caller's promise, here and in all calls below: what is written to is valid.
    call("cuDriverGetVersion", |w| unsafe { write(w, "cuDriverGetVersion", version, w.version) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> u32 {
    // SAFETY: as above.
    call("cuDeviceGetCount", |w| unsafe { write(w, "cuDeviceGetCount", count, w.devices.len() as c_int) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> u32 {
    call("cuDeviceGet", |w| {
        w.device(ordinal)?;
        // SAFETY: as above.
        unsafe { write(w, "cuDeviceGet", device, ordinal) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> u32 {
    call("cuDeviceGetAttribute", |w| {
        let device = w.device(device)?;
        // SAFETY: as above.
        unsafe { write(w, "cuDeviceGetAttribute", value, w.attribute(device, attribute)?) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetPCIBusId(text: *mut c_char, len: c_int, device: c_int) -> u32 {
    call("cuDeviceGetPCIBusId", |w| {
        // A function number that no device has: the system knows nothing of it.
        let id = format!("ffff:ff:{:02x}.7\0", w.device(device)?);
        if text.is_null() || id.len() > usize::try_from(len).unwrap_or(0) {
            return w.violate("ARG-1", "cuDeviceGetPCIBusId", INVALID_VALUE);
        }
        // SAFETY: as above: there is room.
        unsafe { text.copy_from_nonoverlapping(id.as_ptr().cast(), id.len()) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(code: u32, text: *mut *const c_char) -> u32 {
    let Some(_inside) = crate::shared::Inside::begin("cuGetErrorName") else { return DEINITIALIZED };
    let name: &CStr = match code {
        0 => c"CUDA_SUCCESS",
        1 => c"CUDA_ERROR_INVALID_VALUE",
        2 => c"CUDA_ERROR_OUT_OF_MEMORY",
        3 => c"CUDA_ERROR_NOT_INITIALIZED",
        4 => c"CUDA_ERROR_DEINITIALIZED",
        100 => c"CUDA_ERROR_NO_DEVICE",
        101 => c"CUDA_ERROR_INVALID_DEVICE",
        201 => c"CUDA_ERROR_INVALID_CONTEXT",
        215 => c"CUDA_ERROR_UNSUPPORTED_LIMIT",
        218 => c"CUDA_ERROR_INVALID_PTX",
        400 => c"CUDA_ERROR_INVALID_HANDLE",
        500 => c"CUDA_ERROR_NOT_FOUND",
        600 => c"CUDA_ERROR_NOT_READY",
        700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        709 => c"CUDA_ERROR_CONTEXT_IS_DESTROYED",
        712 => c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        713 => c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        716 => c"CUDA_ERROR_MISALIGNED_ADDRESS",
        719 => c"CUDA_ERROR_LAUNCH_FAILED",
        800 => c"CUDA_ERROR_NOT_PERMITTED",
        803 => c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        900 => c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        901 => c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        905 => c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
        906 => c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        907 => c"CUDA_ERROR_CAPTURED_EVENT",
        908 => c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
        _ => {
            if !text.is_null() {
                // SAFETY: as above.
                unsafe { text.write(std::ptr::null()) };
            }
            return INVALID_VALUE;
        }
    };
    if text.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: as above.
    unsafe { text.write(name.as_ptr()) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(code: u32, text: *mut *const c_char) -> u32 {
    // SAFETY: as above.
    unsafe { cuGetErrorName(code, text) }
}

// --- contexts
// ----------------------------------------------------------------------------------------------------------

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> u32 {
    call("cuDevicePrimaryCtxRetain", |w| {
        let device = w.device(device)?;
        let made = w.retain(device);
        // SAFETY: as above.
        unsafe { write(w, "cuDevicePrimaryCtxRetain", context, made as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> u32 {
    call("cuDevicePrimaryCtxRelease_v2", |w| {
        let device = w.device(device)?;
        w.release(device)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> u32 {
    call("cuCtxGetCurrent", |w| {
        let current = STACK.with_borrow(|stack| stack.last().copied()).unwrap_or(0);
        // SAFETY: as above.
        unsafe { write(w, "cuCtxGetCurrent", context, current as *mut c_void) }
    })
}

/// A context that a thread may have current: none, or one that exists.
pub fn usable(w: &mut World, name: &str, context: usize) -> Outcome {
    match w.contexts.get(&context) {
        None if context != 0 => w.violate("CTX-2", format!("{name}: {context:#x}"), CONTEXT_IS_DESTROYED),
        _ => Ok(()),
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> u32 {
    call("cuCtxSetCurrent", |w| {
        usable(w, "cuCtxSetCurrent", context as usize)?;
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            if !context.is_null() {
                stack.push(context as usize);
            }
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> u32 {
    call("cuCtxPushCurrent_v2", |w| {
        if context.is_null() {
            return w.violate("ARG-1", "cuCtxPushCurrent_v2", INVALID_CONTEXT);
        }
        usable(w, "cuCtxPushCurrent_v2", context as usize)?;
        STACK.with_borrow_mut(|stack| stack.push(context as usize));
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut *mut c_void) -> u32 {
    call("cuCtxPopCurrent_v2", |w| match STACK.with_borrow_mut(Vec::pop) {
        None => w.violate("CTX-3", "nothing to pop", INVALID_CONTEXT),
        // Null is allowed here: then no result is written.
        Some(_) if context.is_null() => Ok(()),
        // SAFETY: as above.
        Some(popped) => unsafe { write(w, "cuCtxPopCurrent_v2", context, popped as *mut c_void) },
    })
}

// --- memory
// ------------------------------------------------------------------------------------------------------------

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(start: *mut c_void, len: usize, flags: c_uint) -> u32 {
    static FIRST: std::sync::Once = std::sync::Once::new();
    FIRST.call_once(|| {
        std::thread::sleep(std::time::Duration::from_millis(number("PINPOOL_STANDIN_FIRST_PIN_MS", 0)));
    });
    call("cuMemHostRegister_v2", |w| {
        w.current("cuMemHostRegister_v2")?;
        w.unsafe_call("cuMemHostRegister_v2")?;
        w.hosts.called_with("cuMemHostRegister_v2", flags);
        w.may_register(start as usize, len, flags)?;
        w.register(start as usize, len)?;
        w.registered_as(start as usize, flags);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(start: *mut c_void) -> u32 {
    call("cuMemHostUnregister", |w| {
        w.current("cuMemHostUnregister")?;
        w.unsafe_call("cuMemHostUnregister")?;
        w.unregister(start as usize)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, len: usize) -> u32 {
    call("cuMemAlloc_v2", |w| {
        let context = w.current("cuMemAlloc_v2")?;
        w.unsafe_call("cuMemAlloc_v2")?;
        let at = w.allocate(context, len)?;
        // SAFETY: as above.
        unsafe { write(w, "cuMemAlloc_v2", address, at) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> u32 {
    call("cuMemFree_v2", |w| {
        w.current("cuMemFree_v2")?;
        w.unsafe_call("cuMemFree_v2")?;
        if w.hosts.is_managed(address as usize) {
            return w.free_host(address as usize, true);
        }
        w.free(address)
    })
}

fn copy(name: &'static str, src: Place, dst: Place, len: usize, stream: *mut c_void) -> u32 {
    call(name, |w| {
        w.stream(name, stream as usize)?;
        w.check(name, src, len)?;
        w.check(name, dst, len)?;
        w.may_write(name, dst, len)?;
        let captured = w.stream(name, stream as usize)?.capture.is_some();
        // Memory that is not page-locked: its bytes are taken at once, and there when the call returns.
        if !captured && w.is_pageable(src, len) {
            let bytes = w.bytes(src, len);
            return w.submit(name, stream as usize, Op::Staged { bytes, dst }).map(drop);
        }
        let upto = w.submit(name, stream as usize, Op::Copy { src, dst, len })?;
        if !captured && !w.hung && w.is_pageable(dst, len) {
            let stream = w.resolved(stream as usize);
            w.run(stream, upto);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(dst: u64, src: *const c_void, len: usize, stream: *mut c_void) -> u32 {
    copy("cuMemcpyHtoDAsync_v2", Place::Host(src as usize), Place::Device(dst), len, stream)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: u64, len: usize, stream: *mut c_void) -> u32 {
    copy("cuMemcpyDtoHAsync_v2", Place::Device(src), Place::Host(dst as usize), len, stream)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(dst: u64, src: u64, len: usize, stream: *mut c_void) -> u32 {
    copy("cuMemcpyDtoDAsync_v2", Place::Device(src), Place::Device(dst), len, stream)
}

// --- streams
// -----------------------------------------------------------------------------------------------------------

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut *mut c_void, flags: c_uint) -> u32 {
    call("cuStreamCreate", |w| {
        let context = w.current("cuStreamCreate")?;
        let made = w.create_stream(context, flags & 1 == 0);
        // SAFETY: as above.
        unsafe { write(w, "cuStreamCreate", stream, made as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> u32 {
    call("cuStreamDestroy_v2", |w| w.destroy_stream(stream as usize))
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
extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> u32 {
    const NAME: &str = "cuStreamSynchronize";
    let mut hung = false;
    let code = call(NAME, |w| {
        w.unsafe_call(NAME)?;
        not_captured(w, NAME, stream as usize)?;
        let upto = w.stream(NAME, stream as usize)?.submitted;
        let stream = w.resolved(stream as usize);
        hung = w.hung || w.is_slow(stream, upto);
        if !hung {
            w.run(stream, upto);
        }
        // What ran may have ended the context.
        w.current(NAME).map(drop)
    });
    // Not under the lock, and not as another call.
    while hung {
        std::thread::sleep(std::time::Duration::from_millis(1));
        if let Some(world) = world().as_mut().filter(|w| !w.hung) {
            let waited = world.stream(NAME, stream as usize).map(|s| s.submitted);
            let stream = world.resolved(stream as usize);
            hung = waited.is_ok_and(|upto| world.is_slow(stream, upto));
            if !hung {
                world.run(stream, u64::MAX);
                if let Err(code) = waited.and_then(|_| world.current(NAME)) {
                    return code;
                }
            }
        }
        crate::graphs::run_due();
    }
    code
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, _flags: c_uint) -> u32 {
    const NAME: &str = "cuStreamWaitEvent";
    call(NAME, |w| {
        let (captured, recorded) = {
            let event = w.event(NAME, event as usize)?;
            (event.captured, event.recorded)
        };
        if captured {
            return w.violate(
                "CAP-3",
                format!("{NAME}: {event:?} was recorded in a capture"),
                CAPTURED_EVENT,
            );
        }
        if let Some(capture) = &mut w.stream(NAME, stream as usize)?.capture {
            capture.spoiled = true;
            let text = format!("{NAME}: {event:?} is not of the capture of {stream:?}");
            return w.violate("CAP-6", text, CAPTURE_ISOLATION);
        }
        match recorded {
            // Never recorded: nothing to wait for.
            None => Ok(()),
            Some((on, upto)) => w.submit(NAME, stream as usize, Op::Wait { stream: on, upto }).map(drop),
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) -> u32 {
    call("cuThreadExchangeStreamCaptureMode", |w| {
        if mode.is_null() {
            return w.violate("ARG-1", "cuThreadExchangeStreamCaptureMode", INVALID_VALUE);
        }
        // SAFETY: as above.
        let new = unsafe { mode.read() };
        if new > 2 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: as above.
        unsafe { mode.write(MODE.replace(new)) };
        Ok(())
    })
}

// --- events
// ------------------------------------------------------------------------------------------------------------

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut *mut c_void, _flags: c_uint) -> u32 {
    call("cuEventCreate", |w| {
        let context = w.current("cuEventCreate")?;
        let made = w.create_event(context);
        // SAFETY: as above.
        unsafe { write(w, "cuEventCreate", event, made as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> u32 {
    call("cuEventDestroy_v2", |w| w.destroy_event(event as usize))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: *mut c_void, stream: *mut c_void) -> u32 {
    call("cuEventRecord", |w| w.record(event as usize, stream as usize))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: *mut c_void) -> u32 {
    call("cuEventQuery", |w| {
        w.unsafe_call("cuEventQuery")?;
        w.query(event as usize)
    })
}
