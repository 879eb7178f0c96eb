//! Contexts and streams as servers make and use them: contexts beside the primary one, streams by number, the default
//! streams.

use std::ffi::{c_int, c_uint};

use super::calls::write;
use super::world::*;
use crate::common::entries;

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

    /// What is submitted to the legacy stream comes after everything on per-thread default streams, and what is
    /// submitted to these after everything on the legacy stream. (So it is with all blocking streams, but no program
    /// should rely on that.)
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

entries! {
    cuda;

    fn cuCtxCreate_v2(context: *mut usize, _flags: c_uint, device: c_int) in on(device), |w, name| {
        let device = w.device(device)?;
        let made = w.add_context(device);
        STACK.with_borrow_mut(|stack| stack.push(made));
        write(w, name, context, made)
    }

    fn cuCtxDestroy_v2(context: usize) in of(context), |w, name| {
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
    }

    fn cuCtxGetDevice(device: *mut c_int) in here(), |w, name| {
        let context = w.current(name)?;
        let of = w.ordinal(w.contexts[&context].device);
        write(w, name, device, of)
    }

    fn cuDevicePrimaryCtxGetState(
        device: c_int,
        flags: *mut c_uint,
        active: *mut c_int,
    ) in on(device), |w, name| {
        let device = w.device(device)?;
        let is = c_int::from(w.devices[device].primary.is_some());
        write(w, name, flags, 0)?;
        write(w, name, active, is)
    }

    fn cuStreamGetCtx(stream: usize, context: *mut usize) in of(stream), |w, name| {
        w.current(name)?;
        let handle = w.resolved(stream);
        // A stream of any context: the call asks for just that.
        let Some(of) = w.streams.get(&handle).filter(|s| !s.destroyed).map(|s| s.context) else {
            return w.violate("STR-1", format!("{name}: no stream {handle:#x}"), INVALID_HANDLE);
        };
        write(w, name, context, of)
    }

    fn cuStreamGetId(stream: usize, id: *mut u64) in of(stream), |w, name| {
        super::calls::not_captured(w, name, stream)?;
        let of = w.stream(name, stream)?.id;
        write(w, name, id, of)
    }
}

/// What `cuCtxGetStreamPriorityRange` says: the greatest priority is the lowest number.
const PRIORITIES: [c_int; 2] = [0, -5];

entries! {
    cuda;

    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) in here(), |w, name| {
        w.current(name)?;
        write(w, name, least, PRIORITIES[0])?;
        write(w, name, greatest, PRIORITIES[1])
    }

    fn cuStreamCreateWithPriority(stream: *mut usize, flags: c_uint, priority: c_int) in here(), |w, name| {
        let context = w.current(name)?;
        let made = w.create_stream(context, flags & 1 == 0);
        let [least, greatest] = PRIORITIES;
        w.stream(name, made)?.priority = priority.clamp(greatest, least);
        write(w, name, stream, made)
    }

    fn cuStreamGetPriority(stream: usize, priority: *mut c_int) in of(stream), |w, name| {
        let of = w.stream(name, stream)?.priority;
        write(w, name, priority, of)
    }

    fn cuStreamIsCapturing(stream: usize, status: *mut c_uint) in of(stream), |w, name| {
        // A default stream is the current context's.
        let of = match stream {
            default @ ..=PER_THREAD => w.stream(name, default)?,
            other => w.any_stream(name, other)?,
        };
        let (context, is) = (of.context, of.capture.as_ref().map_or(0, |c| if c.spoiled { 2 } else { 1 }));
        let handle = w.resolved(stream);
        let implied = |s: &Stream| s.context == context && s.blocking && s.capture.is_some();
        if w.legacy.values().any(|h| *h == handle) && w.streams.values().any(implied) {
            // Asking spoils nothing.
            return Err(CAPTURE_IMPLICIT);
        }
        write(w, name, status, is)
    }

    // Calls that pinpool does not make, and a program that shares a context with it does.

    fn cuCtxSynchronize() in here(), |w, name| {
        let context = w.current(name)?;
        w.unsafe_call(name)?;
        let streams: Vec<usize> =
            w.streams.iter().filter(|(_, s)| s.context == context).map(|(handle, _)| *handle).collect();
        streams.into_iter().for_each(|stream| w.run(stream, u64::MAX));
        Ok(())
    }

    /// An event that was never recorded counts as complete, as for `cuEventQuery`.
    fn cuEventSynchronize(event: usize) in of(event), |w, name| {
        w.unsafe_call(name)?;
        let event = w.event(name, event)?;
        if event.captured {
            return w.violate("CAP-3", format!("{name}: recorded in a capture"), CAPTURED_EVENT);
        }
        if let Some((stream, upto)) = event.recorded {
            event.seen = true;
            w.run(stream, upto);
        }
        Ok(())
    }
}
