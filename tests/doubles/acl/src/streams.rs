//! Streams: made, destroyed, asked about, waited for.
//!
//! Waiting while the library hangs is done without its lock, so that other threads may go on, and counts as one call.

#![allow(non_snake_case)]

use std::collections::{BTreeSet, VecDeque};
use std::ffi::{c_int, c_uint, c_void};
use std::time::{Duration, Instant};

use crate::calls::{call, fails, there, write};
use crate::codes::*;
use crate::world::*;

/// Tasks of such a stream do not run before a model is loaded.
const PERSISTENT: c_uint = 4;
const DEVICE_USE_ONLY: c_uint = 0x20;

impl World {
    /// A stream that exists, of any context; null is the current context's default stream.
    pub fn stream(&mut self, call: &str, handle: usize) -> Outcome<usize> {
        let current = self.current(call)?;
        if handle == 0 {
            if let Some(default) = self.contexts[&current].default_stream {
                return Ok(default);
            }
            let made = self.create_stream(current);
            if let Some(context) = self.contexts.get_mut(&current) {
                context.default_stream = Some(made);
            }
            return Ok(made);
        }
        match self.streams.get(&handle).filter(|s| !s.destroyed) {
            None => self.violate("STR-1", format!("{call}: no stream {handle:#x}"), INVALID_HANDLE),
            Some(stream) => {
                let device = self.device_of(stream.context).ok_or(INVALID_HANDLE)?;
                self.alive(device)?;
                Ok(handle)
            }
        }
    }

    /// The same, of the current context only.
    pub fn stream_here(&mut self, call: &str, handle: usize) -> Outcome<usize> {
        let handle = self.stream(call, handle)?;
        if self.streams.get(&handle).map(|s| s.context) != Some(CURRENT.get()) {
            return self.violate(
                "CTX-3",
                format!("{call}: stream {handle:#x} of another context"),
                STREAM_CONTEXT,
            );
        }
        Ok(handle)
    }

    fn create_stream(&mut self, context: usize) -> usize {
        let old = self.streams.iter().rev().find(|(_, s)| self.reuse && s.destroyed && s.queue.is_empty());
        let old = old.map(|(handle, s)| (*handle, s.submitted));
        // Events that were recorded on the stream before, if there was one, are complete.
        let (handle, submitted) = old.unwrap_or_else(|| (self.fresh(), 0));
        let (done, queue) = (submitted, VecDeque::new());
        self.streams.insert(
            handle,
            Stream { context, queue, done, submitted, destroyed: false, used: BTreeSet::new() },
        );
        handle
    }

    fn new_stream(&mut self, call: &str, flags: c_uint) -> Outcome<usize> {
        let context = self.current(call)?;
        if flags & !0x3F != 0 {
            return self.violate("ARG-2", format!("{call}: flags {flags:#x}"), INVALID_PARAM);
        }
        if flags & (PERSISTENT | DEVICE_USE_ONLY) != 0 {
            self.let_pass("STR-3", format!("{call}: flags {flags:#x}"));
        }
        let device = self.device_of(context);
        let of = |s: &&Stream| !s.destroyed && self.device_of(s.context) == device;
        if self.streams.values().filter(of).count() >= self.stream_limit {
            return Err(NO_STREAM_RESOURCE);
        }
        Ok(self.create_stream(context))
    }

    fn destroy_stream(&mut self, call: &str, handle: usize, force: bool) -> Outcome {
        let handle = self.stream_here(call, handle)?;
        let Some(stream) = self.streams.get_mut(&handle) else { return Err(INVALID_HANDLE) };
        stream.destroyed = true;
        let left = stream.queue.iter().filter(|op| !matches!(op, Op::Record | Op::Wait { .. })).count();
        if force {
            stream.queue.clear();
            stream.done = stream.submitted;
        }
        if left > 0 {
            self.let_pass("STR-2", format!("{call}: {handle:#x} has {left} tasks queued"));
        }
        // It stays, for events that were recorded on it.
        self.drain(handle);
        Ok(())
    }
}

/// Waits as long as the library hangs, `timeout` milliseconds at most (-1: for ever, 0: `late` is of no use), and then
/// makes the call.
pub fn wait(
    name: &'static str,
    timeout: c_int,
    late: u32,
    mut go_on: impl FnMut(&mut World) -> Outcome,
) -> u32 {
    let since = Instant::now();
    let mut waited = false;
    loop {
        if let Some(world) = world().as_mut().filter(|w| !w.hung) {
            return if waited { go_on(world).err().unwrap_or_default() } else { 0 };
        }
        waited = true;
        let limit = u64::try_from(timeout).map(Duration::from_millis);
        if limit.is_ok_and(|limit| since.elapsed() >= limit) {
            return fails(name, late);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// -1, or a number of milliseconds.
pub fn is_timeout(w: &mut World, name: &str, timeout: c_int) -> Outcome {
    if timeout == 0 || timeout < -1 {
        return w.violate("ARG-2", format!("{name}: a timeout of {timeout} ms"), PARAM_INVALID);
    }
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtCreateStream(stream: *mut *mut c_void) -> u32 {
    const NAME: &str = "aclrtCreateStream";
    call(NAME, |w| {
        there(w, NAME, stream)?;
        let made = w.new_stream(NAME, 0)?;
        // SAFETY: the caller's promise, here and in all calls below: what is written to is valid.
        unsafe { write(w, NAME, stream, made as *mut c_void) }
    })
}

#[cfg(not(feature = "acl5"))]
#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtCreateStreamWithConfig(
    stream: *mut *mut c_void,
    _priority: c_uint,
    flags: c_uint,
) -> u32 {
    const NAME: &str = "aclrtCreateStreamWithConfig";
    call(NAME, |w| {
        there(w, NAME, stream)?;
        let made = w.new_stream(NAME, flags)?;
        // SAFETY: as above.
        unsafe { write(w, NAME, stream, made as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn aclrtDestroyStream(stream: *mut c_void) -> u32 {
    const NAME: &str = "aclrtDestroyStream";
    call(NAME, |w| {
        there(w, NAME, stream)?;
        w.destroy_stream(NAME, stream as usize, false)
    })
}

/// What is queued never runs.
#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
extern "C" fn aclrtDestroyStreamForce(stream: *mut c_void) -> u32 {
    const NAME: &str = "aclrtDestroyStreamForce";
    call(NAME, |w| {
        there(w, NAME, stream)?;
        w.destroy_stream(NAME, stream as usize, true)
    })
}

/// What is queued never runs.
#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
extern "C" fn aclrtStreamAbort(stream: *mut c_void) -> u32 {
    const NAME: &str = "aclrtStreamAbort";
    call(NAME, |w| {
        let handle = w.stream(NAME, stream as usize)?;
        if let Some(stream) = w.streams.get_mut(&handle) {
            stream.queue.clear();
            stream.done = stream.submitted;
        }
        Ok(())
    })
}

/// The stream may be another context's.
fn synchronize(name: &'static str, stream: *mut c_void, timeout: c_int) -> u32 {
    let go_on = |w: &mut World| {
        let handle = w.stream(name, stream as usize)?;
        if !w.hung {
            w.drain(handle);
        }
        Ok(())
    };
    let code = call(name, |w| {
        is_timeout(w, name, timeout)?;
        go_on(w)
    });
    if code == 0 { wait(name, timeout, STREAM_SYNC_TIMEOUT, go_on) } else { code }
}

#[unsafe(no_mangle)]
extern "C" fn aclrtSynchronizeStream(stream: *mut c_void) -> u32 {
    synchronize("aclrtSynchronizeStream", stream, -1)
}

#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
extern "C" fn aclrtSynchronizeStreamWithTimeout(stream: *mut c_void, timeout: c_int) -> u32 {
    synchronize("aclrtSynchronizeStreamWithTimeout", stream, timeout)
}

/// 0: all of it is done; 1: not. It says 1 once for each task that is queued, and a task runs each time.
#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtStreamQuery(stream: *mut c_void, status: *mut c_uint) -> u32 {
    const NAME: &str = "aclrtStreamQuery";
    call(NAME, |w| {
        there(w, NAME, status)?;
        let handle = w.stream(NAME, stream as usize)?;
        let next = w.streams.get(&handle).filter(|s| s.done < s.submitted).map(|s| s.done + 1);
        if let Some(next) = next.filter(|_| !w.hung) {
            w.run(handle, next);
        }
        // SAFETY: as above.
        unsafe { write(w, NAME, status, c_uint::from(next.is_some())) }
    })
}
