//! Events of `aclrtCreateEventExWithFlag`, whose number no resource of the device limits.

use std::ffi::c_uint;

use super::calls::gives;
use super::codes::*;
use super::world::*;
use crate::common::entries;

/// What an event may be made for: to make streams wait, as a time stamp, and to tell how far its stream has come.
const SYNC: c_uint = 1;
const ALLOWED: c_uint = 0x4B;

pub struct Event {
    pub context: usize,
    flags: c_uint,
    /// Where it was recorded last: the stream, and the operations that it covers.
    recorded: Option<(usize, u64)>,
    seen: bool,
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

    fn create_event(&mut self, flags: c_uint) -> Outcome<usize> {
        let context = self.current()?;
        if flags == 0 || flags & !ALLOWED != 0 {
            return self.violate("ARG-2", format!("flags {flags:#x}"), INVALID_PARAM);
        }
        let handle = self.fresh();
        let event = Event { context, flags, recorded: None, seen: false, patience: 0 };
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
        let upto = self.submit(stream, Op::Record);
        let patience = (self.random() % 3) as u32;
        let event = self.event(event)?;
        (event.recorded, event.seen) = (Some((stream, upto)), false);
        event.patience = patience;
        Ok(())
    }

    /// Whether it is complete. What it covers runs when it is.
    fn query(&mut self, handle: usize) -> Outcome<bool> {
        let hung = self.hung;
        let event = self.event(handle)?;
        let Some((stream, upto)) = event.recorded else {
            self.let_pass("EVT-2", format!("{handle:#x} was never recorded"));
            return Ok(true);
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

entries! {
    acl;

    fn aclrtCreateEventExWithFlag(event: *mut usize, flags: c_uint) in here(), |w, name| {
        gives(w, event, |w| w.create_event(flags))
    }

    fn aclrtDestroyEvent(event: usize) in of(event), |w, name| { w.destroy_event(event) }

    fn aclrtRecordEvent(event: usize, stream: usize) in of(stream), |w, name| { w.record(event, stream) }

    /// 1: complete; 0: not ready.
    fn aclrtQueryEventStatus(event: usize, status: *mut c_uint) in of(event), |w, name| {
        gives(w, status, |w| w.query(event).map(c_uint::from))
    }

    /// The stream is the current context's; the event may be another device's. Never recorded: nothing to wait for.
    fn aclrtStreamWaitEvent(stream: usize, event: usize) in of(stream), |w, name| {
        let stream = w.stream_here(stream)?;
        let (flags, recorded) = w.event(event).map(|e| (e.flags, e.recorded))?;
        if flags & SYNC == 0 {
            return w.violate("EVT-5", format!("{event:?} without ACL_EVENT_SYNC"), NOT_SUPPORTED);
        }
        match recorded {
            None => w.let_pass("EVT-2", format!("{event:?} was never recorded")),
            Some((on, upto)) => drop(w.submit(stream, Op::Wait { stream: on, upto })),
        }
        Ok(())
    }
}
