//! Events, of the best kind that the library has.
//!
//! The contract wants events that can be recorded again and again. Those of `aclrtCreateEventExWithFlag` can, by the
//! documentation: recording one again overwrites what it stood for, and waits that were submitted before keep to that.
//! No resource of the hardware limits their number.
//!
//! Of older kinds nobody says that they can be recorded twice, and each that is recorded takes one of the device's
//! resources until it is destroyed: 1,023 on the smallest devices, for everybody together. So there a handle of ours
//! stands for no event at all until it is recorded; then one is made, and it is destroyed as soon as it was seen
//! complete (destroying never blocks, and does not need a context). An event of `aclrtCreateEventWithFlag` takes its
//! resource when it is made, and when none is left that is an error (207007). One of `aclrtCreateEvent` takes it when
//! it is recorded, and that may *block* until there is one; so it is recorded by whoever submits, never by the device's
//! thread, and of both kinds this crate has no more at a time than seven eighths of what the device has.
//!
//! # Asking
//!
//! Two calls tell whether an event is complete, and their answers have opposite polarity: of `aclrtQueryEventStatus` 1
//! is complete, of the older `aclrtQueryEvent` 0. What is neither of both is not complete, and an error is an error.
//!
//! Recording and asking by two threads may be seen in the wrong order, the documentation says; an event is asked about
//! only after the call that recorded it has returned, which is how marks are published.

use std::ffi::c_int;

use crate::locks::Mutex;
use slab::Slab;

use super::api::{AclApi, AclEvent};
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

type Create = unsafe extern "C" fn(*mut AclEvent, u32) -> AclCode;

#[derive(Clone, Copy, Debug)]
enum EventKind {
    /// Recorded again and again.
    Lasting(Create),
    /// A new one for each recording, whose resource is taken when it is made.
    Flagged(Create),
    /// A new one for each recording, which may block.
    Plain,
}

/// The events of a device, in one of the older kinds.
#[derive(Debug, Default)]
struct Brief {
    /// By handle: what it stands for just now.
    slots: Slab<Option<Raw>>,
    /// Events there are.
    made: usize,
}

#[derive(Clone, Copy, Debug)]
struct Raw(AclEvent);

// SAFETY: an event may be used from any thread.
unsafe impl Send for Raw {}

#[derive(Debug)]
pub(super) struct AclEvents {
    kind: EventKind,
    /// Events of the older kinds at a time.
    most: usize,
    brief: Mutex<Brief>,
    /// Those that were recorded to find something out, and are used again once they are complete.
    aside: Mutex<Vec<EventHandle>>,
}

impl AclEvents {
    pub(super) fn of(api: &AclApi) -> Self {
        // Those that last can only be asked about by the newer call.
        let kind = match (api.event_create_ex, api.event_query_status, api.event_create_with_flag) {
            (Some(create), Some(_), _) => EventKind::Lasting(create),
            (_, _, Some(create)) => EventKind::Flagged(create),
            _ => EventKind::Plain,
        };
        Self { kind, most: most(api.soc().as_deref()), brief: Mutex::default(), aside: Mutex::default() }
    }

    /// Whether recording one may wait for others to be destroyed.
    pub(super) fn may_block(&self) -> bool {
        matches!(self.kind, EventKind::Plain)
    }

    /// For later: it may not be complete.
    pub(super) fn set_aside(&self, event: EventHandle) {
        self.aside.lock().push(event);
    }

    pub(super) fn call(&self) -> &'static str {
        match self.kind {
            EventKind::Lasting(_) => "aclrtCreateEventExWithFlag",
            EventKind::Flagged(_) => "aclrtCreateEventWithFlag",
            EventKind::Plain => "aclrtCreateEvent",
        }
    }
}

/// How many events of the older kinds this crate may have at a time on a chip.
fn most(soc: Option<&str>) -> usize {
    let all = match soc.map(|name| name.trim_start_matches("Ascend")) {
        // Ascend 310 and 310P; the 310B is a different one.
        Some(name) if name.starts_with("310") && !name.starts_with("310B") => 1023,
        Some(_) => 65_535,
        None => 1023,
    };
    all - all / 8
}

fn handle(raw: AclEvent) -> EventHandle {
    EventHandle(raw as usize as u64)
}

fn raw(handle: EventHandle) -> AclEvent {
    handle.0 as usize as AclEvent
}

impl Acl {
    pub(super) fn event_create(&self) -> Result<EventHandle> {
        // Taken in a statement of its own: no call is made under the lock.
        let aside = self.events.aside.lock().pop();
        if let Some(event) = aside {
            match self.event_query(event) {
                Ok(true) => return Ok(event),
                _ => self.events.set_aside(event),
            }
        }
        match self.events.kind {
            EventKind::Lasting(create) => {
                let _current = self.current()?;
                self.event_make(|event| {
                    // SAFETY: writes a handle.
                    unsafe { create(event, SYNC | CAPTURE_STREAM_PROGRESS) }
                })
                .map(handle)
            }
            EventKind::Flagged(_) | EventKind::Plain => {
                let _pass = self.alive()?;
                Ok(EventHandle(self.events.brief.lock().slots.insert(None) as u64))
            }
        }
    }

    /// Nothing is in flight any more, and the device is about to be let go.
    pub(super) fn events_end(&self) {
        let aside = std::mem::take(&mut *self.events.aside.lock());
        for event in aside {
            // What others have queued before it may still run; destroying waits for nothing.
            if let Err(error) = self.event_destroy(event) {
                self.leaked();
                crate::foreign::warn!(target: "pinpool::device", device = &*self.name, %error, "an event is leaked");
            }
        }
    }

    fn event_make(&self, create: impl FnOnce(*mut AclEvent) -> AclCode) -> Result<AclEvent> {
        let mut event: AclEvent = std::ptr::null_mut();
        let code = create(&raw mut event);
        self.said(self.events.call(), code).map(|()| event)
    }

    pub(super) fn event_destroy(&self, handle: EventHandle) -> Result<()> {
        match self.events.kind {
            EventKind::Lasting(_) => {
                let _pass = self.alive()?;
                // SAFETY: made by us, destroyed once.
                self.said("aclrtDestroyEvent", unsafe { (self.api.event_destroy)(raw(handle)) })
            }
            EventKind::Flagged(_) | EventKind::Plain => {
                let last = self.events.brief.lock().slots.try_remove(handle.0 as usize).flatten();
                last.map_or(Ok(()), |event| self.event_drop(event))
            }
        }
    }

    /// Destroys an event of an older kind, which no handle stands for any more.
    fn event_drop(&self, event: Raw) -> Result<()> {
        let _pass = self.alive()?;
        // SAFETY: made by us, destroyed once.
        self.said("aclrtDestroyEvent", unsafe { (self.api.event_destroy)(event.0) })?;
        // Only now: one that is not destroyed keeps its resource.
        self.events.brief.lock().made -= 1;
        Ok(())
    }

    pub(super) fn event_record(&self, handle: EventHandle, on: StreamHandle) -> Result<()> {
        let _current = self.current()?;
        let event = match self.events.kind {
            EventKind::Lasting(_) => raw(handle),
            EventKind::Flagged(create) => self.event_renew(handle, |event| {
                // SAFETY: writes a handle.
                unsafe { create(event, SYNC) }
            })?,
            EventKind::Plain => self.event_renew(handle, |event| {
                // SAFETY: writes a handle.
                unsafe { (self.api.event_create)(event) }
            })?,
        };
        // SAFETY: an event and a stream that are alive, and the stream's context is current.
        self.said("aclrtRecordEvent", unsafe { (self.api.event_record)(event, stream(on)) })
    }

    /// A new event behind a handle.
    fn event_renew(
        &self,
        handle: EventHandle,
        create: impl FnOnce(*mut AclEvent) -> AclCode,
    ) -> Result<AclEvent> {
        let at = handle.0 as usize;
        // It may be there still where its recording had failed.
        let last = self.events.brief.lock().slots.get_mut(at).and_then(Option::take);
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
        let made = self.event_make(create).map(Raw);
        let mut brief = self.events.brief.lock();
        match made {
            Ok(event) => {
                if let Some(slot) = brief.slots.get_mut(at) {
                    *slot = Some(event);
                }
                Ok(event.0)
            }
            Err(error) => {
                brief.made -= 1;
                Err(error)
            }
        }
    }

    /// As the library says it, and before it would block.
    #[cold]
    fn event_limit(&self) -> Error {
        let code = AclCode::NO_EVENT_RESOURCE;
        let text = format!(
            "{}: {} events of {} are recorded and not complete, and pinpool takes no more of what the device has; they come \
             back as their streams go on",
            code.name(),
            self.events.most,
            self.events.call()
        );
        Error::Device(DeviceError {
            device: self.name.clone(),
            call: self.events.call(),
            code: code.0.into(),
            text: text.into(),
            class: ErrorClass::Transient,
        })
    }

    pub(super) fn event_query(&self, handle: EventHandle) -> Result<bool> {
        let _pass = self.alive()?;
        let at = handle.0 as usize;
        let event = match self.events.kind {
            EventKind::Lasting(_) => raw(handle),
            EventKind::Flagged(_) | EventKind::Plain => {
                match self.events.brief.lock().slots.get(at).copied().flatten() {
                    Some(event) => event.0,
                    None => return Ok(true),
                }
            }
        };
        let complete = self.event_ask(event)?;
        if complete && !matches!(self.events.kind, EventKind::Lasting(_)) {
            let last = self.events.brief.lock().slots.get_mut(at).and_then(Option::take);
            if let Some(Err(error)) = last.map(|event| self.event_drop(event)) {
                // It is complete all the same.
                self.leaked();
                crate::foreign::warn!(target: "pinpool::device", device = &*self.name, %error, "an event is leaked");
            }
        }
        Ok(complete)
    }

    fn event_ask(&self, event: AclEvent) -> Result<bool> {
        if let Some(ask) = self.api.event_query_status {
            let mut status = RECORDED_NOT_READY;
            // SAFETY: an event that is alive, and a place for a number.
            self.said("aclrtQueryEventStatus", unsafe { ask(event, &raw mut status) })?;
            return Ok(status == RECORDED_COMPLETE);
        }
        let mut status = STATUS_NOT_READY;
        // SAFETY: as above.
        self.said("aclrtQueryEvent", unsafe { (self.api.event_query)(event, &raw mut status) })?;
        Ok(status == STATUS_COMPLETE)
    }

    pub(super) fn event_wait(&self, on: StreamHandle, handle: EventHandle) -> Result<()> {
        let _current = self.current()?;
        let event = match self.events.kind {
            EventKind::Lasting(_) => raw(handle),
            EventKind::Flagged(_) | EventKind::Plain => {
                match self.events.brief.lock().slots.get(handle.0 as usize).copied().flatten() {
                    Some(event) => event.0,
                    // Complete, and so there is nothing to wait for.
                    None => return Ok(()),
                }
            }
        };
        // SAFETY: a stream and an event that are alive, and the stream's context is current.
        self.said("aclrtStreamWaitEvent", unsafe { (self.api.stream_wait_event)(stream(on), event) })
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
