//! Faults that a test arms, and the trace of calls.
//!
//! Every call of every device of a node passes [`FaultBook::on_call`] once, before it does anything. As long as no
//! fault is armed and no trace is kept, that is one relaxed load of a flag that nobody writes.

#![deny(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};

use crate::locks::Mutex;

/// A call that a device serves: what a fault can be armed for, and what a trace is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Call {
    /// Locking host pages, registering host memory.
    Pin,
    /// Unlocking host pages, unregistering host memory.
    Unpin,
    /// Taking host memory of the device's own.
    AllocateHost,
    /// Giving host memory of the device's own back.
    FreeHost,
    /// Asking where the device sees host memory.
    DeviceAddress,
    /// Taking device memory.
    Allocate,
    /// Giving device memory back.
    Free,
    /// Taking device memory in a stream's order.
    AllocateOn,
    /// Giving device memory back in a stream's order.
    FreeOn,
    /// Looking at memory that others allocated.
    Examine,
    /// Making a stream.
    CreateStream,
    /// Destroying a stream.
    DestroyStream,
    /// Submitting a copy.
    Copy,
    /// Copying and waiting for it.
    CopyBlocking,
    /// Making an event.
    CreateEvent,
    /// Destroying an event.
    DestroyEvent,
    /// Recording an event on a stream.
    Record,
    /// Asking whether an event is complete.
    Query,
    /// Making a stream wait for an event.
    WaitEvent,
}

impl Call {
    /// Every kind of call, for tests that go through all of them.
    pub const ALL: [Self; 19] = [
        Self::Pin,
        Self::Unpin,
        Self::AllocateHost,
        Self::FreeHost,
        Self::DeviceAddress,
        Self::Allocate,
        Self::Free,
        Self::AllocateOn,
        Self::FreeOn,
        Self::Examine,
        Self::CreateStream,
        Self::DestroyStream,
        Self::Copy,
        Self::CopyBlocking,
        Self::CreateEvent,
        Self::DestroyEvent,
        Self::Record,
        Self::Query,
        Self::WaitEvent,
    ];

    /// The call's name, as errors show it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pin => "pin",
            Self::Unpin => "unpin",
            Self::AllocateHost => "allocate_host",
            Self::FreeHost => "free_host",
            Self::DeviceAddress => "device_address",
            Self::Allocate => "allocate",
            Self::Free => "free",
            Self::AllocateOn => "allocate_on",
            Self::FreeOn => "free_on",
            Self::Examine => "examine",
            Self::CreateStream => "create_stream",
            Self::DestroyStream => "destroy_stream",
            Self::Copy => "copy",
            Self::CopyBlocking => "copy_blocking",
            Self::CreateEvent => "create_event",
            Self::DestroyEvent => "destroy_event",
            Self::Record => "record",
            Self::Query => "query",
            Self::WaitEvent => "wait_event",
        }
    }

    /// Whether the call puts an operation into a stream's queue.
    #[must_use]
    pub const fn queues(self) -> bool {
        matches!(
            self,
            Self::Copy
                | Self::CopyBlocking
                | Self::AllocateOn
                | Self::FreeOn
                | Self::Record
                | Self::WaitEvent
        )
    }
}

/// What an armed fault does to its call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// Fails with class [`Argument`](crate::ErrorClass::Argument); nothing happens.
    Argument,
    /// Fails with class [`Transient`](crate::ErrorClass::Transient); nothing happens.
    Transient,
    /// Kills the device, as [`HostNode::kill`](super::HostNode::kill) does, and fails with class
    /// [`DeviceLost`](crate::ErrorClass::DeviceLost).
    DeviceLost,
    /// Fails with class [`Transient`](crate::ErrorClass::Transient), but the operation is queued and runs all the same.
    /// For a call that queues nothing, and for an allocation, the same as [`Failure::Transient`].
    RunsAnyway,
    /// Fails with class [`Capture`](crate::ErrorClass::Capture); nothing happens.
    Capture,
    /// Succeeds, but the operation and all that follow it on that stream do not run until
    /// [`HostNode::resume`](super::HostNode::resume) or [`resume_stream`](super::HostNode::resume_stream). For a call
    /// that queues nothing, no fault at all.
    Stall,
}

/// One call that is to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fault {
    /// The device, counted from 0.
    pub device: u32,
    /// The kind of call.
    pub call: Call,
    /// Which of those calls, counted from now; 0 is the next one.
    pub nth: u64,
    /// What happens to it.
    pub failure: Failure,
}

#[derive(Debug)]
struct Armed {
    device: Option<u32>,
    call: Option<Call>,
    left: u64,
    failure: Failure,
}

#[derive(Debug, Default)]
struct Book {
    armed: Vec<Armed>,
    trace: Option<Vec<Call>>,
    traced: u64,
}

/// The faults of a node that have not struck yet, and its trace.
#[derive(Debug, Default)]
pub(super) struct FaultBook {
    /// Whether there is anything in the book.
    active: AtomicBool,
    book: Mutex<Book>,
}

impl FaultBook {
    /// Counts the call and says what is to become of it.
    #[inline]
    pub(super) fn on_call(&self, device: u32, call: Call) -> Option<Failure> {
        // Relaxed: whoever arms a fault for calls of other threads has told them by other means.
        if self.active.load(Ordering::Relaxed) { self.look_up(device, call) } else { None }
    }

    #[cold]
    fn look_up(&self, device: u32, call: Call) -> Option<Failure> {
        let mut book = self.book.lock();
        if let Some(trace) = &mut book.trace {
            trace.push(call);
            book.traced += 1;
        }
        // One fault strikes a call, the one that was armed first; others due for the same call strike the next.
        let mut strikes = None;
        book.armed.retain_mut(|armed| {
            if armed.device.is_some_and(|d| d != device) || armed.call.is_some_and(|c| c != call) {
                return true;
            }
            if armed.left > 0 {
                armed.left -= 1;
            } else if strikes.is_none() {
                strikes = Some(armed.failure);
                return false;
            }
            true
        });
        self.note_activity(&book);
        strikes
    }

    pub(super) fn arm(&self, device: Option<u32>, call: Option<Call>, nth: u64, failure: Failure) {
        let mut book = self.book.lock();
        book.armed.push(Armed { device, call, left: nth, failure });
        self.note_activity(&book);
    }

    /// Forgets the faults that have not struck; says how many there were.
    pub(super) fn disarm(&self) -> usize {
        let mut book = self.book.lock();
        let left = book.armed.len();
        book.armed.clear();
        self.note_activity(&book);
        left
    }

    pub(super) fn start_trace(&self) {
        let mut book = self.book.lock();
        book.trace = Some(Vec::new());
        book.traced = 0;
        self.note_activity(&book);
    }

    /// Ends the trace and hands it out.
    pub(super) fn stop_trace(&self) -> Vec<Call> {
        let mut book = self.book.lock();
        let trace = book.trace.take().unwrap_or_default();
        self.note_activity(&book);
        trace
    }

    pub(super) fn trace(&self) -> Vec<Call> {
        self.book.lock().trace.clone().unwrap_or_default()
    }

    pub(super) fn calls(&self) -> u64 {
        self.book.lock().traced
    }

    fn note_activity(&self, book: &Book) {
        self.active.store(!book.armed.is_empty() || book.trace.is_some(), Ordering::Relaxed);
    }
}
