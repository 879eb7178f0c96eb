//! Contexts and streams as servers make and use them: contexts beside the primary one, streams by number, the default
//! streams.

#![allow(non_snake_case)]

use std::ffi::{c_int, c_uint, c_void};

use crate::calls::{call, usable, write};
use crate::world::*;

/// Another stream on each thread. (Handles below it are the legacy default stream's.)
const PER_THREAD: usize = 2;

impl World {
    /// The number that a handle stands for in the current context: that of a default stream, made on first use.
    pub fn resolved(&mut self, handle: usize) -> usize {
        let current = STACK.with_borrow(|stack| stack.last().copied());
        let Some(context) = current.filter(|c| handle <= PER_THREAD && self.contexts.contains_key(c)) else {
            return handle;
        };
        if handle == PER_THREAD {
            let key = (context, thread());
            if let Some(own) = self.per_thread.get(&key) {
                return *own;
            }
            let made = self.create_stream(context, true);
            self.per_thread.insert(key, made);
            return made;
        }
        if let Some(legacy) = self.legacy.get(&context) {
            return *legacy;
        }
        let made = self.create_stream(context, true);
        self.legacy.insert(context, made);
        made
    }

    /// A handle that is free to be given to another stream.
    pub fn reusable(&self) -> Option<usize> {
        let mut destroyed = self.streams.iter().filter(|(_, s)| s.destroyed && s.queue.is_empty());
        destroyed.next_back().filter(|_| self.reuse).map(|(handle, _)| *handle)
    }

    /// What is submitted to the legacy stream comes after everything on per-thread default streams, and what is submitted
    /// to these after everything on the legacy stream. (So it is with all blocking streams, but no program should rely
    /// on that.)
    pub fn order_implicitly(&mut self, call: &str, handle: usize) -> Outcome {
        let handle = self.resolved(handle);
        let stream = self.stream(call, handle)?;
        let (context, captured) = (stream.context, stream.capture.is_some());
        let Some(legacy) = self.legacy.get(&context).copied().filter(|_| !captured) else { return Ok(()) };
        let of_threads: Vec<usize> = self.per_thread.values().copied().collect();
        let before = match handle {
            _ if handle == legacy => of_threads,
            _ if of_threads.contains(&handle) => vec![legacy],
            _ => return Ok(()),
        };
        for on in before {
            let unfinished = |s: &&Stream| s.context == context && s.done < s.submitted;
            if let Some(upto) = self.streams.get(&on).filter(unfinished).map(|s| s.submitted) {
                let stream = self.stream(call, handle)?;
                stream.queue.push_back(Op::Wait { stream: on, upto });
                stream.submitted += 1;
            }
        }
        Ok(())
    }

    /// The legacy stream comes after everything on blocking streams, and so cannot be used while one is captured.
    pub fn not_implicit(&mut self, call: &str, handle: usize) -> Outcome {
        let handle = self.resolved(handle);
        let Some(context) = self.legacy.iter().find(|(_, h)| **h == handle).map(|(c, _)| *c) else {
            return Ok(());
        };
        let mut implied = self.streams.values_mut().filter(|s| s.context == context && s.blocking);
        let Some(capture) = implied.find_map(|s| s.capture.as_mut()) else { return Ok(()) };
        capture.spoiled = true;
        self.violate("CAP-5", format!("{call} on the legacy stream"), CAPTURE_IMPLICIT)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxCreate_v2(context: *mut *mut c_void, _flags: c_uint, device: c_int) -> u32 {
    call("cuCtxCreate_v2", |w| {
        let device = w.device(device)?;
        let made = w.fresh();
        w.contexts.insert(made, Context { device, dead: None });
        STACK.with_borrow_mut(|stack| stack.push(made));
        // SAFETY: the caller's promise, here and in all calls below: what is written to is valid.
        unsafe { write(w, "cuCtxCreate_v2", context, made as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxDestroy_v2(context: *mut c_void) -> u32 {
    call("cuCtxDestroy_v2", |w| {
        let context = context as usize;
        let primary = w.devices.iter().any(|d| d.primary.is_some_and(|(primary, _)| primary == context));
        if primary || !w.contexts.contains_key(&context) {
            return w.violate("CTX-6", format!("{context:#x}"), INVALID_CONTEXT);
        }
        w.end_context(context);
        STACK.with_borrow_mut(|stack| {
            if stack.last() == Some(&context) {
                stack.pop();
            }
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetDevice(device: *mut c_int) -> u32 {
    call("cuCtxGetDevice", |w| {
        let context = w.current("cuCtxGetDevice")?;
        usable(w, "cuCtxGetDevice", context)?;
        let of = w.contexts[&context].device as c_int;
        // SAFETY: as above.
        unsafe { write(w, "cuCtxGetDevice", device, of) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxGetState(
    device: c_int,
    flags: *mut c_uint,
    active: *mut c_int,
) -> u32 {
    const NAME: &str = "cuDevicePrimaryCtxGetState";
    call(NAME, |w| {
        let device = w.device(device)?;
        let is = c_int::from(w.devices[device].primary.is_some());
        // SAFETY: as above.
        unsafe {
            write(w, NAME, flags, 0)?;
            write(w, NAME, active, is)
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamGetCtx(stream: *mut c_void, context: *mut *mut c_void) -> u32 {
    const NAME: &str = "cuStreamGetCtx";
    call(NAME, |w| {
        w.current(NAME)?;
        let handle = w.resolved(stream as usize);
        // A stream of any context: the call asks for just that.
        let Some(of) = w.streams.get(&handle).filter(|s| !s.destroyed).map(|s| s.context) else {
            return w.violate("STR-1", format!("{NAME}: no stream {handle:#x}"), INVALID_HANDLE);
        };
        // SAFETY: as above.
        unsafe { write(w, NAME, context, of as *mut c_void) }
    })
}

#[cfg(not(feature = "cuda11"))]
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamGetId(stream: *mut c_void, id: *mut u64) -> u32 {
    const NAME: &str = "cuStreamGetId";
    call(NAME, |w| {
        crate::calls::not_captured(w, NAME, stream as usize)?;
        let of = w.stream(NAME, stream as usize)?.id;
        // SAFETY: as above.
        unsafe { write(w, NAME, id, of) }
    })
}

/// What `cuCtxGetStreamPriorityRange` says: the greatest priority is the lowest number.
const PRIORITIES: [c_int; 2] = [0, -5];

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> u32 {
    const NAME: &str = "cuCtxGetStreamPriorityRange";
    call(NAME, |w| {
        w.current(NAME)?;
        // SAFETY: as above.
        unsafe {
            write(w, NAME, least, PRIORITIES[0])?;
            write(w, NAME, greatest, PRIORITIES[1])
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut *mut c_void,
    flags: c_uint,
    priority: c_int,
) -> u32 {
    const NAME: &str = "cuStreamCreateWithPriority";
    call(NAME, |w| {
        let context = w.current(NAME)?;
        let made = w.create_stream(context, flags & 1 == 0);
        let [least, greatest] = PRIORITIES;
        w.stream(NAME, made)?.priority = priority.clamp(greatest, least);
        // SAFETY: as above.
        unsafe { write(w, NAME, stream, made as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamGetPriority(stream: *mut c_void, priority: *mut c_int) -> u32 {
    const NAME: &str = "cuStreamGetPriority";
    call(NAME, |w| {
        let of = w.stream(NAME, stream as usize)?.priority;
        // SAFETY: as above.
        unsafe { write(w, NAME, priority, of) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamIsCapturing(stream: *mut c_void, status: *mut c_uint) -> u32 {
    const NAME: &str = "cuStreamIsCapturing";
    call(NAME, |w| {
        // A default stream is the current context's.
        let of = match stream as usize {
            default @ ..=PER_THREAD => w.stream(NAME, default)?,
            other => w.any_stream(NAME, other)?,
        };
        let (context, is) = (of.context, of.capture.as_ref().map_or(0, |c| if c.spoiled { 2 } else { 1 }));
        let handle = w.resolved(stream as usize);
        let implied = |s: &Stream| s.context == context && s.blocking && s.capture.is_some();
        if w.legacy.values().any(|h| *h == handle) && w.streams.values().any(implied) {
            // Asking spoils nothing.
            return Err(CAPTURE_IMPLICIT);
        }
        // SAFETY: as above.
        unsafe { write(w, NAME, status, is) }
    })
}
