//! Events: three ways to make them, which differ in what they may be used for and in whether their number is limited.
//!
//! An event by `aclrtCreateEvent` takes one of the device's resources when it is recorded, and recording blocks where
//! none is left; one by `aclrtCreateEventWithFlag` with `ACL_EVENT_SYNC` takes it when it is made; one by
//! `aclrtCreateEventExWithFlag` never. The same status has two polarities: for `aclrtQueryEvent` 0 is complete, for
//! `aclrtQueryEventStatus` 1.

use std::ffi::c_uint;

use super::calls::{call, gives};
use super::codes::*;
use super::world::*;

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
    /// Where it was recorded last: the stream, and the operations that it covers.
    recorded: Option<(usize, u64)>,
    seen: bool,
    /// It holds one of the device's resources.
    counted: bool,
    /// How often a query still says "not ready", whatever is done.
    patience: u32,
}

impl World {
    /// An event that exists, on a device that works. No context is needed.
    fn event(&mut self, handle: usize) -> Outcome<&mut Event> {
        if handle == 0 {
            return self.violate("ARG-1", "null", INVALID_PARAM);
        }
        let Some(device) = self.events.get(&handle).and_then(|e| self.device_of(e.context)) else {
            return self.violate("EVT-1", format!("no event {handle:#x}"), INVALID_HANDLE);
        };
        self.alive(device)?;
        self.events.get_mut(&handle).ok_or(INVALID_HANDLE)
    }

    /// Events that hold one of a device's resources.
    pub fn counted_events(&self, device: Option<usize>) -> usize {
        self.events.values().filter(|e| e.counted && self.device_of(e.context) == device).count()
    }

    fn create_event(&mut self, made: Made) -> Outcome<usize> {
        let context = self.current()?;
        let (flags, allowed) = match made {
            Made::Plain => (0, 0),
            Made::WithFlag(flags) => (flags, if self.is_of_2022() { 0xB } else { 0x3B }),
            Made::ExWithFlag(flags) => (flags, 0x4B),
        };
        if flags & !allowed != 0 || (made != Made::Plain && flags == 0) {
            return self.violate("ARG-2", format!("flags {flags:#x}"), INVALID_PARAM);
        }
        let counted = matches!(made, Made::WithFlag(flags) if flags & (SYNC | EXTERNAL) != 0);
        if counted && self.counted_events(self.device_of(context)) >= self.event_limit {
            return Err(NO_EVENT_RESOURCE);
        }
        let handle = self.fresh();
        let event = Event { context, made, recorded: None, seen: false, counted, patience: 0 };
        self.events.insert(handle, event);
        Ok(handle)
    }

    fn pending(&self, event: &Event) -> bool {
        let at = event.recorded.filter(|_| !event.seen);
        at.is_some_and(|(stream, upto)| self.streams.get(&stream).is_some_and(|s| s.done < upto))
    }

    fn record(&mut self, event: usize, stream: usize) -> Outcome {
        let stream = self.stream_here(stream)?;
        let context = self.event(event)?.context;
        let device = self.device_of(CURRENT.get());
        if self.device_of(context) != device {
            let text = format!("{event:#x} and {stream:#x} of two devices");
            return self.violate("CTX-5", text, PARAM_INVALID);
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
        let event = self.event(event)?;
        event.counted |= event.made == Made::Plain;
        (event.recorded, event.seen) = (Some((stream, upto)), false);
        event.patience = patience;
        Ok(())
    }

    /// Whether it is complete. What it covers runs when it is.
    fn query(&mut self, handle: usize) -> Outcome<bool> {
        let hung = self.hung;
        let event = self.event(handle)?;
        let unrecorded = matches!(event.made, Made::ExWithFlag(_));
        let Some((stream, upto)) = event.recorded else {
            self.let_pass("EVT-2", format!("{handle:#x} was never recorded"));
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
        self.event(handle)?.seen = true;
        Ok(true)
    }

    fn destroy_event(&mut self, handle: usize) -> Outcome {
        self.event(handle)?;
        if self.events.get(&handle).is_some_and(|e| self.pending(e)) {
            self.let_pass("EVT-4", format!("{handle:#x} is not complete"));
        }
        self.events.remove(&handle);
        Ok(())
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtCreateEvent(event: *mut usize) -> u32 {
    // SAFETY: the caller's promise, here and in all calls below: what is written to is valid.
    unsafe { gives("aclrtCreateEvent", here(), event, |w| w.create_event(Made::Plain)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtCreateEventWithFlag(event: *mut usize, flag: c_uint) -> u32 {
    // SAFETY: as above.
    unsafe { gives("aclrtCreateEventWithFlag", here(), event, |w| w.create_event(Made::WithFlag(flag))) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtCreateEventExWithFlag(event: *mut usize, flag: c_uint) -> u32 {
    // SAFETY: as above.
    unsafe { gives("aclrtCreateEventExWithFlag", here(), event, |w| w.create_event(Made::ExWithFlag(flag))) }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtDestroyEvent(event: usize) -> u32 {
    call("aclrtDestroyEvent", of(event), |w| w.destroy_event(event))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtRecordEvent(event: usize, stream: usize) -> u32 {
    call("aclrtRecordEvent", of(stream), |w| w.record(event, stream))
}

/// 0: complete; 1: not ready. Deprecated, and documented for the thread that recorded only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtQueryEvent(event: usize, status: *mut c_uint) -> u32 {
    let query = |w: &mut World| {
        if matches!(w.event(event)?.made, Made::ExWithFlag(_)) {
            return w.violate("EVT-7", format!("{event:#x}"), NOT_SUPPORTED);
        }
        w.query(event).map(|complete| c_uint::from(!complete))
    };
    // SAFETY: as above.
    unsafe { gives("aclrtQueryEvent", of(event), status, query) }
}

/// 1: complete; 0: not ready.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtQueryEventStatus(event: usize, status: *mut c_uint) -> u32 {
    // SAFETY: as above.
    unsafe { gives("aclrtQueryEventStatus", of(event), status, |w| w.query(event).map(c_uint::from)) }
}

/// The stream is the current context's; the event may be another device's. Never recorded: nothing to wait for.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtStreamWaitEvent(stream: usize, event: usize) -> u32 {
    call("aclrtStreamWaitEvent", of(stream), |w| {
        let stream = w.stream_here(stream)?;
        let (made, recorded) = w.event(event).map(|e| (e.made, e.recorded))?;
        if matches!(made, Made::WithFlag(flags) | Made::ExWithFlag(flags) if flags & SYNC == 0) {
            return w.violate("EVT-5", format!("{event:?} without ACL_EVENT_SYNC"), NOT_SUPPORTED);
        }
        match recorded {
            None => w.let_pass("EVT-2", format!("{event:?} was never recorded")),
            Some((on, upto)) => drop(w.submit(stream, Op::Wait { stream: on, upto })),
        }
        Ok(())
    })
}
