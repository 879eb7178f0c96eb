//! Streams: made, destroyed, asked about, waited for.
//!
//! Waiting while the library hangs is done without its lock, so that other threads may go on, and counts as one call.

use std::collections::{BTreeSet, VecDeque};
use std::ffi::c_int;
use std::time::{Duration, Instant};

use super::calls::{call, fails, gives, there};
use super::codes::*;
use super::world::*;
use crate::common::entries;

impl World {
    /// A stream that exists, of any context; null is the current context's default stream.
    pub fn stream(&mut self, handle: usize) -> Outcome<usize> {
        let current = self.current()?;
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
            None => self.violate("STR-1", format!("no stream {handle:#x}"), INVALID_HANDLE),
            Some(stream) => {
                let device = self.device_of(stream.context).ok_or(INVALID_HANDLE)?;
                self.alive(device)?;
                Ok(handle)
            }
        }
    }

    /// The same, of the current context only.
    pub fn stream_here(&mut self, handle: usize) -> Outcome<usize> {
        let handle = self.stream(handle)?;
        if self.streams.get(&handle).map(|s| s.context) != Some(CURRENT.get()) {
            return self.violate("CTX-3", format!("stream {handle:#x} of another context"), STREAM_CONTEXT);
        }
        Ok(handle)
    }

    fn create_stream(&mut self, context: usize) -> usize {
        let (handle, queue, used) = (self.fresh(), VecDeque::new(), BTreeSet::new());
        let made = Stream { context, queue, done: 0, submitted: 0, destroyed: false, used };
        self.streams.insert(handle, made);
        handle
    }

    fn new_stream(&mut self) -> Outcome<usize> {
        let context = self.current()?;
        let device = self.device_of(context);
        let of = |s: &&Stream| !s.destroyed && self.device_of(s.context) == device;
        if self.streams.values().filter(of).count() >= self.stream_limit {
            return Err(NO_STREAM_RESOURCE);
        }
        Ok(self.create_stream(context))
    }

    fn destroy_stream(&mut self, handle: usize) -> Outcome {
        let handle = self.stream_here(handle)?;
        let Some(stream) = self.streams.get_mut(&handle) else { return Err(INVALID_HANDLE) };
        stream.destroyed = true;
        let left = stream.queue.iter().filter(|op| !matches!(op, Op::Record | Op::Wait { .. })).count();
        if left > 0 {
            self.let_pass("STR-2", format!("{handle:#x} has {left} tasks queued"));
        }
        // It stays, for events that were recorded on it.
        self.drain(handle);
        Ok(())
    }
}

/// Waits as long as the library hangs, `timeout` milliseconds at most (-1: for ever), and then makes the call.
pub fn wait(
    name: &'static str,
    number: usize,
    timeout: c_int,
    mut go_on: impl FnMut(&mut World) -> Outcome,
) -> u32 {
    let since = Instant::now();
    let mut waited = false;
    loop {
        let mut world = world(number);
        if !world.hung {
            return if waited { go_on(&mut world).err().unwrap_or_default() } else { 0 };
        }
        drop(world);
        waited = true;
        let limit = u64::try_from(timeout).map(Duration::from_millis);
        if limit.is_ok_and(|limit| since.elapsed() >= limit) {
            return fails(name, STREAM_SYNC_TIMEOUT);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

entries! {
    acl;

    fn aclrtCreateStream(stream: *mut usize) in here(), |w, name| {
        gives(w, stream, World::new_stream)
    }

    fn aclrtDestroyStream(stream: usize) in of(stream), |w, name| {
        there(w, stream)?;
        w.destroy_stream(stream)
    }
}

/// The stream may be another context's.
fn synchronize(name: &'static str, stream: usize, timeout: c_int) -> u32 {
    let go_on = |w: &mut World| {
        let handle = w.stream(stream)?;
        if !w.hung {
            w.drain(handle);
        }
        Ok(())
    };
    let number = of(stream);
    let code = call(name, number, |w| {
        // -1, or a number of milliseconds.
        if timeout == 0 || timeout < -1 {
            return w.violate("ARG-2", format!("a timeout of {timeout} ms"), PARAM_INVALID);
        }
        go_on(w)
    });
    if code == 0 { wait(name, number, timeout, go_on) } else { code }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeStream(stream: usize) -> u32 {
    synchronize("aclrtSynchronizeStream", stream, -1)
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeStreamWithTimeout(stream: usize, timeout: c_int) -> u32 {
    synchronize("aclrtSynchronizeStreamWithTimeout", stream, timeout)
}
