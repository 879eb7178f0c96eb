//! The driver's entry points for contexts, memory, copies, streams and events, with the signatures of cuda.h. Handles
//! are numbers here and pointers there.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint};

use super::*;
use crate::common::{At, Vendor, entries, fails_if, thread, waiting_call};
use crate::world::{Capture, Event, Kind, Op, Place, Stream};

thread_local! {
    /// The calling thread's capture mode: 0 global, 1 thread-local, 2 relaxed.
    static MODE: Cell<u32> = const { Cell::new(0) };
}

/// What `cuCtxGetStreamPriorityRange` says: the greatest priority is the lowest number.
const PRIORITIES: [c_int; 2] = [0, -5];

impl World {
    /// A context that a thread may have current: none, or one that exists.
    fn usable(&mut self, context: usize) -> Outcome {
        match self.contexts.get(&context) {
            None if context != 0 => self.broken("CTX-2", CONTEXT_IS_DESTROYED),
            _ => Ok(()),
        }
    }

    /// A call that a capture may forbid to this thread.
    pub(super) fn unsafe_call(&mut self) -> Outcome {
        let (mode, thread) = (MODE.get(), thread());
        let forbids = |capture: &&mut Capture| match (mode, capture.mode) {
            (2, _) | (_, 2) => false,
            (0, 0) => true,
            _ => capture.thread == thread,
        };
        let captures = self.streams.values_mut().filter_map(|stream| stream.capture.as_mut()).filter(forbids);
        let spoiled = captures.map(|capture| capture.spoiled = true).count();
        self.forbid("CAP-1", CAPTURE_UNSUPPORTED, spoiled > 0)
    }

    /// The context that is current, for a call that a capture may forbid.
    pub(super) fn free_context(&mut self) -> Outcome<usize> {
        let context = self.current()?;
        self.unsafe_call()?;
        Ok(context)
    }

    /// An event of the current context.
    fn event(&mut self, handle: usize) -> Outcome<&mut Event> {
        let current = self.current()?;
        let context = self.any_event(handle)?.context;
        self.forbid("CTX-5", INVALID_HANDLE, context != current)?;
        self.any_event(handle)
    }

    /// A call that no capturing stream may be named in.
    fn not_captured(&mut self, stream: usize) -> Outcome {
        self.not_implicit(stream)?;
        if let Some(capture) = &mut self.stream(stream)?.capture {
            capture.spoiled = true;
            return self.broken("CAP-2", CAPTURE_UNSUPPORTED);
        }
        Ok(())
    }

    /// What is submitted to the legacy stream comes after everything on per-thread default streams, and what is
    /// submitted to these after everything on the legacy stream. (So it is with all blocking streams, but no program
    /// should rely on that.)
    pub(crate) fn order_implicitly(&mut self, handle: usize) -> Outcome {
        let handle = self.resolved(handle);
        let Stream { context, capture, .. } = self.stream(handle)?;
        let (context, captured) = (*context, capture.is_some());
        let Some(legacy) = self.contexts[&context].default_stream.filter(|_| !captured) else {
            return Ok(());
        };
        let of_threads: Vec<usize> = self.cuda.per_thread.values().copied().collect();
        let before = match handle {
            _ if handle == legacy => of_threads,
            _ if of_threads.contains(&handle) => vec![legacy],
            _ => return Ok(()),
        };
        for on in before {
            let unfinished = |s: &&Stream| s.context == context && s.done < s.submitted;
            if let Some(upto) = self.streams.get(&on).filter(unfinished).map(|s| s.submitted) {
                let stream = self.stream(handle)?;
                stream.queue.push_back(Op::Wait { stream: on, upto });
                stream.submitted += 1;
            }
        }
        Ok(())
    }

    /// The capture of a blocking stream of a context, after which its legacy stream comes.
    fn implied(&mut self, handle: usize) -> Option<&mut Capture> {
        let handle = self.resolved(handle);
        let (context, _) = self.contexts.iter().find(|(_, c)| c.default_stream == Some(handle))?;
        let mut implied = self.streams.values_mut().filter(|s| s.context == *context && s.blocking);
        implied.find_map(|s| s.capture.as_mut())
    }

    /// The legacy stream comes after everything on blocking streams, and so cannot be used while one is captured.
    pub(crate) fn not_implicit(&mut self, handle: usize) -> Outcome {
        let Some(capture) = self.implied(handle) else { return Ok(()) };
        capture.spoiled = true;
        self.broken("CAP-5", CAPTURE_IMPLICIT)
    }

    /// Whether it is host memory that is not page-locked.
    fn is_pageable(&self, place: Place, len: usize) -> bool {
        matches!(place, Place::Host(at) if !self.is_locked(at, len))
    }

    /// Checks one side of a copy that is about to be submitted.
    pub(super) fn check(&mut self, place: Place, len: usize, written: bool) -> Outcome {
        let at = place.address();
        if let Place::Device(_) = place {
            let context = self.current()?;
            self.check_heap(at)?;
            return match self.block(at, len).map(|(_, block, _)| (block.context, block.kind)) {
                None | Some((_, Kind::Dying)) => self.broken("MEM-6", INVALID_VALUE),
                Some((of, _)) if of != context => self.broken("CTX-5", INVALID_VALUE),
                Some(_) => Ok(()),
            };
        }
        self.forbid("MEM-6", INVALID_VALUE, at == 0)?;
        if !self.is_pageable(place, len) {
            let read_only = self.registration(at, len).is_some_and(|(_, of)| of.read_only);
            return if written && read_only { self.broken("HST-6", INVALID_VALUE) } else { Ok(()) };
        }
        self.forbid("MEM-5", INVALID_VALUE, self.is_registered_in_part(at, len))
    }

    fn copy_async(&mut self, src: Place, dst: Place, len: usize, stream: usize) -> Outcome {
        let captured = self.stream(stream)?.capture.is_some();
        self.check(src, len, false)?;
        self.check(dst, len, true)?;
        // Memory that is not page-locked: its bytes are taken at once, and there when the call returns.
        let at_once = !captured && !self.by_hand;
        if at_once && self.is_pageable(src, len) {
            let bytes = self.bytes(src, len);
            return self.submit(stream, Op::Staged { bytes, dst }).map(drop);
        }
        let upto = self.submit(stream, Op::Copy { src, dst, len })?;
        if at_once && !self.hung && self.is_pageable(dst, len) {
            let stream = self.resolved(stream);
            self.run(stream, upto);
        }
        Ok(())
    }

    // Memory in stream order has its address at once, and attributes with it; it may be used once its stream has reached
    // it. After the call that frees it the address is unknown (so it was seen on driver 580: the attributes are cleared
    // when `cuMemFreeAsync` has returned), and the memory is freed when the stream reaches that.

    /// A copy runs that uses such memory.
    pub(crate) fn check_born(&mut self, place: Place, len: usize) {
        let Place::Device(at) = place else { return };
        let kind = self.block(at, len).map(|(_, block, _)| block.kind);
        self.let_pass_if("POOL-1", kind == Some(Kind::Pool { born: false }));
    }
}

/// Takes the time that a first registration takes beside its pages, without the world's lock.
fn registering() -> At {
    let number = Vendor::Cuda.here();
    let first = std::mem::take(&mut Vendor::Cuda.world(number).cuda.first_pin);
    std::thread::sleep(first);
    At::Here
}

entries! {
    Cuda, symbol, also [cuGetErrorName cuGetErrorString cuStreamSynchronize];

    fn cuInit(flags: c_uint) in Here, |w| {
        fails_if(INVALID_VALUE, flags != 0)?;
        fails_if(NO_DEVICE, w.devices.is_empty())?;
        if !std::mem::replace(&mut w.ready, true) {
            crate::end::end_with_process();
        }
        Ok(())
    }

    fn cuDriverGetVersion(version: *mut c_int) in Here, |w| { w.give(version, w.cuda.version) }

    fn cuDeviceGetCount(count: *mut c_int) in Here, |w| { w.give(count, w.device_count() as c_int) }

    /// A program may ask for all numbers in turn: that is no call of other worlds.
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) in if Vendor::Cuda.here() > 0 { Here } else { On(ordinal) }, |w| {
        // A number that no device of another world has is refused when it is used.
        let is_own = Vendor::Cuda.here() == w.number;
        if usize::try_from(ordinal).map_or(true, |ordinal| is_own && ordinal >= w.device_count()) {
            return Err(INVALID_DEVICE);
        }
        w.give(device, ordinal)
    }

    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) in On(device), |w| {
        let device = w.device(device)?;
        let of = w.attribute(device, attribute).ok_or(INVALID_VALUE)?;
        w.give(value, of)
    }

    fn cuDeviceGetPCIBusId(text: *mut c_char, len: c_int, device: c_int) in On(device), |w| {
        // A function number that no device has: the system knows nothing of it.
        w.device(device)?;
        let id = format!("ffff:{:02x}:{:02x}.7\0", 0xff - (device >> 8), device & 0xff);
        let has_room = id.len() <= usize::try_from(len).unwrap_or(0);
        w.forbid("ARG-1", INVALID_VALUE, text.is_null() || !has_room)?;
        text.copy_from_nonoverlapping(id.as_ptr().cast(), id.len());
        Ok(())
    }

    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) in On(device), |w| {
        let device = w.device(device)?;
        let made = w.retain(device);
        w.give(context, made)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: c_int) in On(device), |w| {
        let device = w.device(device)?;
        let last = w.release(device)?;
        last.into_iter().for_each(|context| w.end_context(context));
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) in On(device), |w| {
        let device = w.device(device)?;
        w.give(flags, 0)?;
        w.give(active, c_int::from(w.devices[device].primary.is_some()))
    }

    fn cuCtxCreate_v2(context: *mut usize, _flags: c_uint, device: c_int) in On(device), |w| {
        let device = w.device(device)?;
        let made = w.add_context(device);
        Vendor::Cuda.stack(|stack| stack.push(made));
        w.give(context, made)
    }

    fn cuCtxDestroy_v2(context: usize) in Of(context), |w| {
        w.destroy_context(context)?;
        if Vendor::Cuda.current() == context {
            Vendor::Cuda.stack(|stack| stack.pop());
        }
        Ok(())
    }

    fn cuCtxGetDevice(device: *mut c_int) in Here, |w| {
        let of = w.current_device()?;
        w.give(device, w.ordinal(of))
    }

    fn cuCtxGetCurrent(context: *mut usize) in Here, |w| { w.give(context, Vendor::Cuda.current()) }

    fn cuCtxSetCurrent(context: usize) in Of(context), |w| {
        w.usable(context)?;
        Vendor::Cuda.stack(|stack| stack.set(context));
        Ok(())
    }

    fn cuCtxPushCurrent_v2(context: usize) in Of(context), |w| {
        w.forbid("ARG-1", INVALID_CONTEXT, context == 0)?;
        w.usable(context)?;
        Vendor::Cuda.stack(|stack| stack.push(context));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(context: *mut usize) in Here, |w| {
        match Vendor::Cuda.stack(|stack| stack.pop()) {
            None => w.broken("CTX-3", INVALID_CONTEXT),
            // Null is allowed here: then no result is written.
            Some(_) if context.is_null() => Ok(()),
            Some(popped) => w.give(context, popped),
        }
    }

    fn cuCtxSynchronize() in Here, |w| {
        let context = w.free_context()?;
        w.streams_of(|of| of == context).into_iter().for_each(|stream| w.drain(stream));
        Ok(())
    }

    fn cuMemHostRegister_v2(start: usize, len: usize, flags: c_uint) in registering(), |w| {
        w.free_context()?;
        w.register(start, len, flags)
    }

    fn cuMemHostUnregister(start: usize) in Here, |w| {
        w.free_context()?;
        // Page-locked, and not the start of a registration: the driver knows it.
        w.unregister(start, if w.is_locked(start, 1) { INVALID_VALUE } else { NOT_REGISTERED })
    }

    fn cuMemAlloc_v2(address: *mut usize, len: usize) in Here, |w| {
        let context = w.free_context()?;
        let at = w.allocate_in(context, len)?;
        w.give(address, at)
    }

    fn cuMemFree_v2(address: usize) in Here, |w| {
        w.free_context()?;
        if w.hosts.get(&address).is_some_and(|host| host.managed) {
            return w.free_host_of(address, true);
        }
        w.forbid("MEM-7", INVALID_VALUE, !w.blocks.contains_key(&address))?;
        w.free_block("MEM-8", address);
        Ok(())
    }

    fn cuMemAllocAsync(address: *mut usize, len: usize, stream: usize) in Of(stream), |w| {
        let context = w.current()?;
        w.stream(stream)?;
        let at = w.allocate_in(context, len)?;
        w.be(at, Kind::Pool { born: false });
        w.submit(stream, Op::Allocate(at))?;
        w.give(address, at)
    }

    /// Plain memory may be freed in a stream's order, too.
    fn cuMemFreeAsync(address: usize, stream: usize) in Of(stream), |w| {
        w.stream(stream)?;
        let kind = w.blocks.get(&address).map(|block| block.kind);
        w.forbid("MEM-7", INVALID_VALUE, !matches!(kind, Some(Kind::Plain | Kind::Pool { .. })))?;
        w.be(address, Kind::Dying);
        w.submit(stream, Op::Free(address)).map(drop)
    }

    fn cuMemcpyHtoDAsync_v2(dst: usize, src: usize, len: usize, stream: usize) in Of(stream), |w| {
        w.copy_async(Place::Host(src), Place::Device(dst), len, stream)
    }

    fn cuMemcpyDtoHAsync_v2(dst: usize, src: usize, len: usize, stream: usize) in Of(stream), |w| {
        w.copy_async(Place::Device(src), Place::Host(dst), len, stream)
    }

    fn cuMemcpyDtoDAsync_v2(dst: usize, src: usize, len: usize, stream: usize) in Of(stream), |w| {
        w.copy_async(Place::Device(src), Place::Device(dst), len, stream)
    }

    fn cuStreamCreate(stream: *mut usize, flags: c_uint) in Here, |w| {
        let context = w.current()?;
        let made = w.create_stream(context, flags & 1 == 0);
        w.give(stream, made)
    }

    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) in Here, |w| {
        w.current()?;
        w.give(least, PRIORITIES[0])?;
        w.give(greatest, PRIORITIES[1])
    }

    fn cuStreamCreateWithPriority(stream: *mut usize, flags: c_uint, priority: c_int) in Here, |w| {
        let context = w.current()?;
        let made = w.create_stream(context, flags & 1 == 0);
        let [least, greatest] = PRIORITIES;
        w.stream(made)?.priority = priority.clamp(greatest, least);
        w.give(stream, made)
    }

    fn cuStreamGetPriority(stream: usize, priority: *mut c_int) in Of(stream), |w| {
        let of = w.stream(stream)?.priority;
        w.give(priority, of)
    }

    fn cuStreamDestroy_v2(stream: usize) in Of(stream), |w| { w.destroy_stream(stream) }

    /// A stream of any context: the call asks for just that.
    fn cuStreamGetCtx(stream: usize, context: *mut usize) in Of(stream), |w| {
        w.current()?;
        let handle = w.resolved(stream);
        let of = w.any_stream(handle)?.context;
        w.give(context, of)
    }

    fn cuStreamGetId(stream: usize, id: *mut u64) in Of(stream), |w| {
        w.not_captured(stream)?;
        let of = w.stream(stream)?.id;
        w.give(id, of)
    }

    /// A default stream is the current context's. Asking spoils nothing.
    fn cuStreamIsCapturing(stream: usize, status: *mut c_uint) in Of(stream), |w| {
        let of = if stream <= PER_THREAD { w.stream(stream)? } else { w.any_stream(stream)? };
        let is = of.capture.as_ref().map_or(0, |capture| if capture.spoiled { 2 } else { 1 });
        fails_if(CAPTURE_IMPLICIT, w.implied(stream).is_some())?;
        w.give(status, is)
    }

    fn cuStreamWaitEvent(stream: usize, event: usize, _flags: c_uint) in Of(stream), |w| {
        let Event { captured, recorded, .. } = *w.event(event)?;
        w.forbid("CAP-3", CAPTURED_EVENT, captured)?;
        if let Some(capture) = &mut w.stream(stream)?.capture {
            capture.spoiled = true;
            return w.broken("CAP-6", CAPTURE_ISOLATION);
        }
        // Never recorded: nothing to wait for.
        let Some((on, upto)) = recorded else { return Ok(()) };
        w.submit(stream, Op::Wait { stream: on, upto }).map(drop)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) in Here, |w| {
        w.forbid("ARG-1", INVALID_VALUE, mode.is_null())?;
        fails_if(INVALID_VALUE, mode.read() > 2)?;
        mode.write(MODE.replace(mode.read()));
        Ok(())
    }

    fn cuEventCreate(event: *mut usize, flags: c_uint) in Here, |w| {
        let context = w.current()?;
        let made = w.create_event(context, flags);
        w.give(event, made)
    }

    fn cuEventDestroy_v2(event: usize) in Of(event), |w| {
        w.event(event)?;
        w.destroy_event(event)
    }

    fn cuEventRecord(event: usize, stream: usize) in Of(stream), |w| {
        w.event(event)?;
        w.record(event, stream)
    }

    /// It needs no current context.
    fn cuEventQuery(event: usize) in Of(event), |w| {
        w.unsafe_call()?;
        if w.query(event)? { Ok(()) } else { Err(NOT_READY) }
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

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: usize) -> u32 {
    let mut upto = None;
    let check = |w: &mut World| {
        w.unsafe_call()?;
        w.not_captured(stream)
    };
    waiting_call(Vendor::Cuda, "cuStreamSynchronize", At::Of(stream), (-1, 0), check, |w| {
        let submitted = w.stream(stream)?.submitted;
        let upto = *upto.get_or_insert(submitted);
        if !w.hung {
            let stream = w.resolved(stream);
            w.run(stream, upto);
        }
        // What ran may have ended the context.
        w.current().map(drop)
    })
}
