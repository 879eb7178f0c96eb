//! Events: three ways to make them, which differ in what they may be used for and in whether their number is limited.
//!
//! An event by `aclrtCreateEvent` takes one of the device's resources when it is recorded, and recording blocks where
//! none is left; one by `aclrtCreateEventWithFlag` with `ACL_EVENT_SYNC` takes it when it is made; one by
//! `aclrtCreateEventExWithFlag` never. The same status has two polarities: for `aclrtQueryEvent` 0 is complete, for
//! `aclrtQueryEventStatus` 1.

#![allow(non_snake_case)]

use std::ffi::{c_int, c_uint, c_void};

use crate::calls::{call, there, write};
use crate::codes::*;
use crate::streams::{is_timeout, wait};
use crate::world::*;

const SYNC: c_uint = 1;
const EXTERNAL: c_uint = 0x20;

/// How it was made.
#[derive(Clone, Copy, PartialEq)]
pub enum Made {
    Plain,
    WithFlag(c_uint),
    ExWithFlag(c_uint),
}

pub struct Event {
    pub context: usize,
    made: Made,
    /// Where it was recorded last: the stream, the operations that it covers, and on which thread.
    recorded: Option<(usize, u64, usize)>,
    seen: bool,
    /// It holds one of the device's resources.
    counted: bool,
    /// It was reset and must not have been: it is never complete again.
    broken: bool,
    /// How often a query still says "not ready", whatever is done.
    patience: u32,
}

impl World {
    /// An event that exists, on a device that works. No context is needed.
    fn event(&mut self, call: &str, handle: usize) -> Outcome<&mut Event> {
        if handle == 0 {
            return self.violate("ARG-1", call, INVALID_PARAM);
        }
        let Some(device) = self.events.get(&handle).and_then(|e| self.device_of(e.context)) else {
            return self.violate("EVT-1", format!("{call}: no event {handle:#x}"), INVALID_HANDLE);
        };
        self.alive(device)?;
        self.events.get_mut(&handle).ok_or(INVALID_HANDLE)
    }

    /// Events that hold one of a device's resources.
    pub fn counted_events(&self, device: Option<usize>) -> usize {
        self.events.values().filter(|e| e.counted && self.device_of(e.context) == device).count()
    }

    fn create_event(&mut self, call: &str, made: Made) -> Outcome<usize> {
        let context = self.current(call)?;
        let (flags, allowed) = match made {
            Made::Plain => (0, 0),
            Made::WithFlag(flags) => (flags, if cfg!(feature = "acl2022") { 0xB } else { 0x3B }),
            Made::ExWithFlag(flags) => (flags, 0x4B),
        };
        if flags & !allowed != 0 || (made != Made::Plain && flags == 0) {
            return self.violate("ARG-2", format!("{call}: flags {flags:#x}"), INVALID_PARAM);
        }
        let counted = matches!(made, Made::WithFlag(flags) if flags & (SYNC | EXTERNAL) != 0);
        if counted && self.counted_events(self.device_of(context)) >= self.event_limit {
            return Err(NO_EVENT_RESOURCE);
        }
        let handle = self.fresh();
        let event = Event { context, made, recorded: None, seen: false, counted, broken: false, patience: 0 };
        self.events.insert(handle, event);
        Ok(handle)
    }

    fn pending(&self, event: &Event) -> bool {
        let at = event.recorded.filter(|_| !event.seen);
        at.is_some_and(|(stream, upto, _)| self.streams.get(&stream).is_some_and(|s| s.done < upto))
    }

    fn record(&mut self, event: usize, stream: usize) -> Outcome {
        const NAME: &str = "aclrtRecordEvent";
        let stream = self.stream_here(NAME, stream)?;
        let context = self.event(NAME, event)?.context;
        let device = self.device_of(CURRENT.get());
        if self.device_of(context) != device {
            return self.violate(
                "CTX-5",
                format!("{NAME}: {event:#x} and {stream:#x} of two devices"),
                PARAM_INVALID,
            );
        }
        if self.events.get(&event).is_some_and(|e| self.pending(e)) {
            self.let_pass("EVT-3", format!("{event:#x} is recorded and not complete"));
        }
        let limited = self.events.get(&event).is_some_and(|e| e.made == Made::Plain && !e.counted);
        if limited && self.counted_events(device) >= self.event_limit {
            return self.violate("EVT-8", format!("{event:#x}: none is left"), NO_EVENT_RESOURCE);
        }
        let upto = self.submit(stream, Op::Record);
        let patience = (self.random() % 3) as u32;
        let event = self.event(NAME, event)?;
        event.counted |= event.made == Made::Plain;
        (event.recorded, event.seen, event.broken) = (Some((stream, upto, thread())), false, false);
        event.patience = patience;
        Ok(())
    }

    /// Whether it is complete. What it covers runs when it is.
    fn query(&mut self, call: &str, handle: usize) -> Outcome<bool> {
        let hung = self.hung;
        let event = self.event(call, handle)?;
        let unrecorded = matches!(event.made, Made::ExWithFlag(_));
        if event.broken {
            return Ok(false);
        }
        let Some((stream, upto, _)) = event.recorded else {
            self.let_pass("EVT-2", format!("{call}: {handle:#x} was never recorded"));
            return Ok(unrecorded);
        };
        if event.seen {
            return Ok(true);
        }
        if hung {
            return Ok(false);
        }
        if event.patience > 0 {
            event.patience -= 1;
            return Ok(false);
        }
        self.run(stream, upto);
        self.event(call, handle)?.seen = true;
        Ok(true)
    }

    fn destroy_event(&mut self, handle: usize) -> Outcome {
        self.event("aclrtDestroyEvent", handle)?;
        if self.events.get(&handle).is_some_and(|e| self.pending(e)) {
            self.let_pass("EVT-4", format!("{handle:#x} is not complete"));
        }
        self.events.remove(&handle);
        Ok(())
    }

    /// One that was made to be waited for by streams. Those of `aclrtCreateEvent` are.
    fn must_sync(&mut self, call: &str, handle: usize) -> Outcome {
        match self.event(call, handle)?.made {
            Made::WithFlag(flags) | Made::ExWithFlag(flags) if flags & SYNC == 0 => {
                self.violate("EVT-5", format!("{call}: {handle:#x} without ACL_EVENT_SYNC"), NOT_SUPPORTED)
            }
            _ => Ok(()),
        }
    }

    fn must_not_be_ex(&mut self, call: &str, handle: usize) -> Outcome {
        if matches!(self.event(call, handle)?.made, Made::ExWithFlag(_)) {
            return self.violate("EVT-7", format!("{call}: {handle:#x}"), NOT_SUPPORTED);
        }
        Ok(())
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtCreateEvent(event: *mut *mut c_void) -> u32 {
    // SAFETY: the caller's promise, here and in all calls below: what is written to is valid.
    unsafe { create("aclrtCreateEvent", event, Made::Plain) }
}

#[cfg(not(feature = "acl5"))]
#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtCreateEventWithFlag(event: *mut *mut c_void, flag: c_uint) -> u32 {
    // SAFETY: as above.
    unsafe { create("aclrtCreateEventWithFlag", event, Made::WithFlag(flag)) }
}

#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtCreateEventExWithFlag(event: *mut *mut c_void, flag: c_uint) -> u32 {
    // SAFETY: as above.
    unsafe { create("aclrtCreateEventExWithFlag", event, Made::ExWithFlag(flag)) }
}

/// # Safety
/// `event` is null or valid for a write.
unsafe fn create(name: &'static str, event: *mut *mut c_void, how: Made) -> u32 {
    call(name, |w| {
        there(w, name, event)?;
        let made = w.create_event(name, how)?;
        // SAFETY: the caller's promise.
        unsafe { write(w, name, event, made as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn aclrtDestroyEvent(event: *mut c_void) -> u32 {
    call("aclrtDestroyEvent", |w| w.destroy_event(event as usize))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtRecordEvent(event: *mut c_void, stream: *mut c_void) -> u32 {
    call("aclrtRecordEvent", |w| w.record(event as usize, stream as usize))
}

/// Only for events made with `ACL_EVENT_SYNC`. The documentation leaves open what happens to those by
/// `aclrtCreateEvent`; users saw programs hang, and so this one is never complete until it is recorded again.
#[unsafe(no_mangle)]
extern "C" fn aclrtResetEvent(event: *mut c_void, stream: *mut c_void) -> u32 {
    const NAME: &str = "aclrtResetEvent";
    call(NAME, |w| {
        w.stream_here(NAME, stream as usize)?;
        let handle = event as usize;
        match w.event(NAME, handle)?.made {
            Made::Plain => {
                w.event(NAME, handle)?.broken = true;
                w.let_pass("EVT-6", format!("{handle:#x} is of aclrtCreateEvent"));
                return Ok(());
            }
            Made::ExWithFlag(_) => {
                return w.violate(
                    "EVT-6",
                    format!("{handle:#x} is of aclrtCreateEventExWithFlag"),
                    NOT_SUPPORTED,
                );
            }
            Made::WithFlag(_) => w.must_sync(NAME, handle)?,
        }
        w.event(NAME, handle)?.recorded = None;
        Ok(())
    })
}

/// 0: complete; 1: not ready. Deprecated, and documented for the thread that recorded only.
#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtQueryEvent(event: *mut c_void, status: *mut c_uint) -> u32 {
    const NAME: &str = "aclrtQueryEvent";
    call(NAME, |w| {
        there(w, NAME, status)?;
        w.must_not_be_ex(NAME, event as usize)?;
        if w.event(NAME, event as usize)?.recorded.is_some_and(|(_, _, on)| on != thread()) {
            w.note("QUERIED-ELSEWHERE");
        }
        let complete = w.query(NAME, event as usize)?;
        // SAFETY: as above.
        unsafe { write(w, NAME, status, c_uint::from(!complete)) }
    })
}

/// 1: complete; 0: not ready.
#[cfg(not(feature = "acl5"))]
#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtQueryEventStatus(event: *mut c_void, status: *mut c_uint) -> u32 {
    const NAME: &str = "aclrtQueryEventStatus";
    call(NAME, |w| {
        there(w, NAME, status)?;
        let complete = w.query(NAME, event as usize)?;
        // SAFETY: as above.
        unsafe { write(w, NAME, status, c_uint::from(complete)) }
    })
}

/// 0: the streams that wait for it go on; 1: not yet.
#[cfg(not(feature = "acl5"))]
#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtQueryEventWaitStatus(event: *mut c_void, status: *mut c_uint) -> u32 {
    const NAME: &str = "aclrtQueryEventWaitStatus";
    call(NAME, |w| {
        there(w, NAME, status)?;
        w.must_not_be_ex(NAME, event as usize)?;
        w.must_sync(NAME, event as usize)?;
        let complete = w.query(NAME, event as usize)?;
        // SAFETY: as above.
        unsafe { write(w, NAME, status, c_uint::from(!complete)) }
    })
}

fn synchronize(name: &'static str, event: *mut c_void, timeout: c_int) -> u32 {
    let go_on = |w: &mut World| {
        let hung = w.hung;
        let event = w.event(name, event as usize)?;
        let Some((stream, upto, _)) = event.recorded else { return Ok(()) };
        if !hung {
            event.seen = true;
            w.run(stream, upto);
        }
        Ok(())
    };
    let code = call(name, |w| {
        is_timeout(w, name, timeout)?;
        if w.event(name, event as usize)?.recorded.is_none() {
            w.let_pass("EVT-2", format!("{name}: {event:?} was never recorded"));
        }
        go_on(w)
    });
    if code == 0 { wait(name, timeout, EVENT_SYNC_TIMEOUT, go_on) } else { code }
}

#[unsafe(no_mangle)]
extern "C" fn aclrtSynchronizeEvent(event: *mut c_void) -> u32 {
    synchronize("aclrtSynchronizeEvent", event, -1)
}

#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
extern "C" fn aclrtSynchronizeEventWithTimeout(event: *mut c_void, timeout: c_int) -> u32 {
    synchronize("aclrtSynchronizeEventWithTimeout", event, timeout)
}

/// The stream is the current context's; the event may be another device's. Never recorded: nothing to wait for.
#[unsafe(no_mangle)]
extern "C" fn aclrtStreamWaitEvent(stream: *mut c_void, event: *mut c_void) -> u32 {
    const NAME: &str = "aclrtStreamWaitEvent";
    call(NAME, |w| {
        let stream = w.stream_here(NAME, stream as usize)?;
        w.must_sync(NAME, event as usize)?;
        match w.event(NAME, event as usize)?.recorded {
            None => w.let_pass("EVT-2", format!("{NAME}: {event:?} was never recorded")),
            Some((on, upto, _)) => drop(w.submit(stream, Op::Wait { stream: on, upto })),
        }
        Ok(())
    })
}

/// Half a millisecond for each operation between the two, on one stream.
#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtEventElapsedTime(ms: *mut f32, start: *mut c_void, end: *mut c_void) -> u32 {
    const NAME: &str = "aclrtEventElapsedTime";
    call(NAME, |w| {
        there(w, NAME, ms)?;
        let from = w.event(NAME, start as usize)?.recorded;
        let to = w.event(NAME, end as usize)?.recorded;
        let (Some((_, from, _)), Some((_, to, _))) = (from, to) else { return Err(TIMESTAMP_INVALID) };
        // SAFETY: as above.
        unsafe { write(w, NAME, ms, to.saturating_sub(from) as f32 / 2.0) }
    })
}

const TIMESTAMP_INVALID: u32 = 107_006;

#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtGetEventAvailNum(count: *mut u32) -> u32 {
    const NAME: &str = "aclrtGetEventAvailNum";
    call(NAME, |w| {
        let device = w.current_device(NAME)?;
        let left = w.event_limit.saturating_sub(w.counted_events(Some(device)));
        // SAFETY: as above.
        unsafe { write(w, NAME, count, left as u32) }
    })
}
