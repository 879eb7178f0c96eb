//! Events, of the best kind that the library has.
//!
//! The contract wants events that can be recorded again and again. Those of `aclrtCreateEventExWithFlag` can, by the
//! documentation: a new recording replaces the old one, and waits that were submitted before keep to the old one. No
//! resource of the hardware limits their number.
//!
//! The documentation does not say that events of the older kinds can be recorded twice, and each recorded event takes
//! one of the device's resources until it is destroyed: 1,023 on the smallest devices, for all programs together. So an
//! [`EventHandle`] of these kinds names no event of the library's until it is recorded. The record call creates one,
//! and the query that sees it complete destroys it (destroying never blocks, and needs no context).
//!
//! An event of `aclrtCreateEventWithFlag` takes its resource when it is created, and if none is left that is an error
//! (207007). An event of `aclrtCreateEvent` takes it when it is recorded, and that call may *block* until there is one.
//! So the submitting thread records it, never the reaper ([`Driver::record_may_block`]). Of both kinds the crate has at
//! most seven eighths of the device's number at a time.
//!
//! # Queries
//!
//! Two calls say whether an event is complete, and their answers have opposite polarity: `aclrtQueryEventStatus`
//! returns 1 for complete, the older `aclrtQueryEvent` 0. Any other status means that it is not complete, and an error
//! is reported as such.
//!
//! By the documentation, a record and a query on two threads may be seen in the wrong order. A timeline publishes an
//! event only after the call that recorded it has returned, so no query comes too early.
//!
//! [`Driver::record_may_block`]: crate::device::Driver::record_may_block

use std::ffi::c_int;

use crate::locks::Mutex;
use slab::Slab;

use super::api::{AclApi, AclEvent, CreateEvent};
use super::error::AclCode;
use super::{Acl, stream};
use crate::device::{EventHandle, StreamHandle};
use crate::error::{DeviceError, Error, ErrorClass, Result};

/// acl_rt.h: ACL_EVENT_SYNC: streams can be made to wait for it.
const SYNC: u32 = 1;
/// acl_rt.h: ACL_EVENT_CAPTURE_STREAM_PROGRESS: it tells how far its stream has come.
const CAPTURE_STREAM_PROGRESS: u32 = 2;
/// acl_rt.h: aclrtEventRecordedStatus, of aclrtQueryEventStatus.
const RECORDED_NOT_READY: c_int = 0;
const RECORDED_COMPLETE: c_int = 1;
/// acl_rt.h: aclrtEventStatus, of aclrtQueryEvent.
const STATUS_COMPLETE: c_int = 0;
const STATUS_NOT_READY: c_int = 1;

#[derive(Clone, Copy, Debug)]
enum EventKind {
    /// Recorded again and again.
    Lasting(CreateEvent),
    /// A new event for each recording. It takes its resource when it is created.
    Flagged(CreateEvent),
    /// A new event for each recording. It takes its resource when it is recorded, and that may block.
    Plain,
}

/// The events of a device, in one of the older kinds.
#[derive(Debug, Default)]
struct Brief {
    /// By handle: the library's event that it names just now.
    slots: Slab<Option<EventHandle>>,
    /// The number of the library's events that exist.
    made: usize,
}

impl Brief {
    fn take(&mut self, handle: EventHandle) -> Option<EventHandle> {
        self.slots.get_mut(handle.0 as usize)?.take()
    }
}

#[derive(Debug)]
pub(super) struct AclEvents {
    kind: EventKind,
    /// The most events of the older kinds at a time.
    most: usize,
    brief: Mutex<Brief>,
    /// Events that were recorded to check a stream. They are used again once they are complete.
    aside: Mutex<Vec<EventHandle>>,
}

impl AclEvents {
    pub(super) fn of(api: &AclApi) -> Self {
        // Events that can be recorded again can only be queried by the newer call.
        let kind = match (api.event_create_ex, api.event_query_status, api.event_create_with_flag) {
            (Some(create), Some(_), _) => EventKind::Lasting(create),
            (_, _, Some(create)) => EventKind::Flagged(create),
            _ => EventKind::Plain,
        };
        Self { kind, most: most(api.soc().as_deref()), brief: Mutex::default(), aside: Mutex::default() }
    }

    fn are_lasting(&self) -> bool {
        matches!(self.kind, EventKind::Lasting(_))
    }

    /// Whether recording an event may wait until others are destroyed.
    pub(super) fn may_block(&self) -> bool {
        matches!(self.kind, EventKind::Plain)
    }

    /// Keeps an event that may not be complete, to be used again later.
    pub(super) fn set_aside(&self, event: EventHandle) {
        self.aside.lock().push(event);
    }

    /// The library's call that creates events.
    pub(super) fn call(&self) -> &'static str {
        match self.kind {
            EventKind::Lasting(_) => "aclrtCreateEventExWithFlag",
            EventKind::Flagged(_) => "aclrtCreateEventWithFlag",
            EventKind::Plain => "aclrtCreateEvent",
        }
    }
}

/// The most events of the older kinds that the crate may have at a time on a chip.
fn most(soc: Option<&str>) -> usize {
    let all = match soc.map(|name| name.trim_start_matches("Ascend")) {
        // Ascend 310 and 310P. The 310B is a different chip.
        Some(name) if name.starts_with("310") && !name.starts_with("310B") => 1023,
        Some(_) => 65_535,
        None => 1023,
    };
    all - all / 8
}

fn raw(event: EventHandle) -> AclEvent {
    event.0 as usize as AclEvent
}

impl Acl {
    pub(super) fn event_create(&self) -> Result<EventHandle> {
        // A statement of its own, which ends with the lock: no call is made under it.
        let aside = self.events.aside.lock().pop();
        if let Some(event) = aside {
            match self.event_query(event) {
                Ok(true) => return Ok(event),
                _ => self.events.set_aside(event),
            }
        }
        if self.events.are_lasting() {
            let _current = self.current()?;
            return self.event_make();
        }
        let _pass = self.alive()?;
        Ok(EventHandle(self.events.brief.lock().slots.insert(None) as u64))
    }

    /// Destroys the events that were set aside. Nothing is in flight any more, and the driver is being dropped.
    pub(super) fn events_end(&self) {
        for event in std::mem::take(&mut *self.events.aside.lock()) {
            // Work that the program queued before it may still run; destroying an event waits for nothing.
            if let Err(error) = self.event_destroy(event) {
                self.event_leaked(&error);
            }
        }
    }

    fn event_leaked(&self, error: &Error) {
        self.leaked();
        crate::foreign::warn!(target: "pinpool::device", device = &*self.name, %error, "an event is leaked");
    }

    /// A new event of the library's. The context is current.
    fn event_make(&self) -> Result<EventHandle> {
        let mut event: AclEvent = std::ptr::null_mut();
        // SAFETY: each of these writes a handle.
        let code = unsafe {
            match self.events.kind {
                EventKind::Lasting(create) => create.call(&raw mut event, SYNC | CAPTURE_STREAM_PROGRESS),
                EventKind::Flagged(create) => create.call(&raw mut event, SYNC),
                EventKind::Plain => self.api.event_create.call(&raw mut event),
            }
        };
        self.said(self.events.call(), code).map(|()| EventHandle(event as usize as u64))
    }

    pub(super) fn event_destroy(&self, handle: EventHandle) -> Result<()> {
        if self.events.are_lasting() {
            return self.event_drop(handle);
        }
        let last = self.events.brief.lock().slots.try_remove(handle.0 as usize).flatten();
        last.map_or(Ok(()), |event| self.event_drop(event))
    }

    /// Destroys an event of the library's, which no handle names any more.
    fn event_drop(&self, event: EventHandle) -> Result<()> {
        let _pass = self.alive()?;
        // SAFETY: created by this driver, destroyed once.
        self.said("aclrtDestroyEvent", unsafe { self.api.event_destroy.call(raw(event)) })?;
        if !self.events.are_lasting() {
            // Only now: an event that is not destroyed keeps its resource.
            self.events.brief.lock().made -= 1;
        }
        Ok(())
    }

    pub(super) fn event_record(&self, handle: EventHandle, on: StreamHandle) -> Result<()> {
        let _current = self.current()?;
        let event = if self.events.are_lasting() { handle } else { self.event_renew(handle)? };
        // SAFETY: an event and a stream that are alive, and the stream's context is current.
        self.said("aclrtRecordEvent", unsafe { self.api.event_record.call(raw(event), stream(on)) })
    }

    /// A new event behind a handle.
    fn event_renew(&self, handle: EventHandle) -> Result<EventHandle> {
        // The last event may still be there where its recording had failed.
        let last = self.events.brief.lock().take(handle);
        if let Some(last) = last {
            self.event_drop(last).inspect_err(|_| self.leaked())?;
        }
        {
            let mut brief = self.events.brief.lock();
            if brief.made >= self.events.most {
                return Err(self.event_limit());
            }
            brief.made += 1;
        }
        let made = self.event_make();
        let mut brief = self.events.brief.lock();
        match &made {
            Ok(event) => {
                if let Some(slot) = brief.slots.get_mut(handle.0 as usize) {
                    *slot = Some(*event);
                }
            }
            Err(_) => brief.made -= 1,
        }
        made
    }

    /// The library's own error for this, before the library would block.
    #[cold]
    fn event_limit(&self) -> Error {
        let (code, call) = (AclCode::NO_EVENT_RESOURCE, self.events.call());
        let text = format!(
            "{}: {} events of {call} are recorded and not complete, and pinpool takes no more of what the device has; \
             they come back as their streams go on",
            code.name(),
            self.events.most
        );
        Error::Device(DeviceError {
            device: self.name.clone(),
            call,
            code: code.0.into(),
            text: text.into(),
            class: ErrorClass::Transient,
        })
    }

    /// The library's event that a handle names. `None`: it is complete, or was never recorded.
    fn event_of(&self, handle: EventHandle) -> Option<EventHandle> {
        if self.events.are_lasting() {
            return Some(handle);
        }
        self.events.brief.lock().slots.get(handle.0 as usize).copied().flatten()
    }

    pub(super) fn event_query(&self, handle: EventHandle) -> Result<bool> {
        let _pass = self.alive()?;
        let Some(event) = self.event_of(handle) else { return Ok(true) };
        let complete = self.event_ask(raw(event))?;
        if complete && !self.events.are_lasting() {
            let last = self.events.brief.lock().take(handle);
            if let Some(Err(error)) = last.map(|event| self.event_drop(event)) {
                // The event is complete all the same.
                self.event_leaked(&error);
            }
        }
        Ok(complete)
    }

    fn event_ask(&self, event: AclEvent) -> Result<bool> {
        if let Some(ask) = self.api.event_query_status {
            let mut status = RECORDED_NOT_READY;
            // SAFETY: an event that is alive, and a place for a number.
            self.said("aclrtQueryEventStatus", unsafe { ask.call(event, &raw mut status) })?;
            return Ok(status == RECORDED_COMPLETE);
        }
        let mut status = STATUS_NOT_READY;
        // SAFETY: as above.
        self.said("aclrtQueryEvent", unsafe { self.api.event_query.call(event, &raw mut status) })?;
        Ok(status == STATUS_COMPLETE)
    }

    pub(super) fn event_wait(&self, on: StreamHandle, handle: EventHandle) -> Result<()> {
        let _current = self.current()?;
        let Some(event) = self.event_of(handle) else { return Ok(()) };
        // SAFETY: a stream and an event that are alive, and the stream's context is current.
        self.said("aclrtStreamWaitEvent", unsafe { self.api.stream_wait_event.call(stream(on), raw(event)) })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::most;

    #[test]
    fn small_chips_have_few_events() {
        for (soc, few) in [
            (None, true),
            (Some("Ascend310"), true),
            (Some("Ascend310P3"), true),
            (Some("Ascend310B4"), false),
            (Some("Ascend910B2C"), false),
            (Some("Ascend910A"), false),
        ] {
            assert_eq!(most(soc) < 1023, few, "{soc:?}");
        }
    }
}
