//! Faults that a test arms, and the trace of calls.
//!
//! Every call of every device of a node passes [`FaultBook::on_call`] once, before it does anything. As long as no
//! fault is armed and no trace is kept, that is one relaxed load of a flag that no thread writes.

#![deny(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};

use crate::locks::Mutex;

/// A call that a device serves. A [`Fault`] is armed for one, and a trace is a list of them.
///
/// ```
/// use pinpool::host::{Call, HostConfig, HostNode};
/// # use pinpool::Device;
///
/// let node = HostNode::new(HostConfig::new())?;
/// let device = Device::on(&node, 0)?;
/// node.start_trace();
/// let memory = device.alloc(100)?;
/// assert_eq!(node.stop_trace(), [Call::Allocate]);
/// # drop(memory);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Call {
    /// Pins host pages, or registers host memory.
    Pin,
    /// Unpins host pages, or unregisters host memory.
    Unpin,
    /// Allocates host memory, by the device.
    AllocateHost,
    /// Frees host memory that the device allocated.
    FreeHost,
    /// Asks for the address at which the device sees host memory.
    DeviceAddress,
    /// Allocates device memory.
    Allocate,
    /// Frees device memory.
    Free,
    /// Checks memory that the crate did not allocate.
    Examine,
    /// Creates a stream.
    CreateStream,
    /// Destroys a stream.
    DestroyStream,
    /// Submits a copy.
    Copy,
    /// Copies, and waits for the copy.
    CopyBlocking,
    /// Queues a host function ([`launch`](crate::host::launch)).
    Launch,
    /// Creates an event.
    CreateEvent,
    /// Destroys an event.
    DestroyEvent,
    /// Records an event on a stream.
    Record,
    /// Asks whether an event is complete.
    Query,
    /// Makes a stream wait for an event.
    WaitEvent,
}

impl Call {
    /// Every kind of call, for tests that go through all of them.
    pub const ALL: [Self; 18] = [
        Self::Pin,
        Self::Unpin,
        Self::AllocateHost,
        Self::FreeHost,
        Self::DeviceAddress,
        Self::Allocate,
        Self::Free,
        Self::Examine,
        Self::CreateStream,
        Self::DestroyStream,
        Self::Copy,
        Self::CopyBlocking,
        Self::Launch,
        Self::CreateEvent,
        Self::DestroyEvent,
        Self::Record,
        Self::Query,
        Self::WaitEvent,
    ];

    /// The call's name, as errors show it, such as `copy_blocking`.
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
            Self::Examine => "examine",
            Self::CreateStream => "create_stream",
            Self::DestroyStream => "destroy_stream",
            Self::Copy => "copy",
            Self::CopyBlocking => "copy_blocking",
            Self::Launch => "launch",
            Self::CreateEvent => "create_event",
            Self::DestroyEvent => "destroy_event",
            Self::Record => "record",
            Self::Query => "query",
            Self::WaitEvent => "wait_event",
        }
    }

    /// Whether the call puts an operation into a stream's queue.
    ///
    /// [`Failure::RunsAnyway`] and [`Failure::Stall`] differ from other failures for such a call only.
    #[must_use]
    pub const fn queues(self) -> bool {
        matches!(self, Self::Copy | Self::CopyBlocking | Self::Launch | Self::Record | Self::WaitEvent)
    }
}

/// What an armed [`Fault`] does to its call.
///
/// ```
/// # use pinpool::{Device, Error, ErrorClass};
/// # use pinpool::host::{Failure, HostConfig, HostNode};
/// let node = HostNode::new(HostConfig::new())?;
/// let device = Device::on(&node, 0)?;
/// node.fail_any(0, Failure::Transient); // the next call, of any kind
/// assert_eq!(device.alloc(100).unwrap_err().class(), ErrorClass::Transient);
/// assert!(device.alloc(100).is_ok());
/// # Ok::<(), Error>(())
/// ```
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
    /// For a call that queues nothing, and for an allocation, this is the same as [`Failure::Transient`].
    RunsAnyway,
    /// Fails with class [`Capture`](crate::ErrorClass::Capture); nothing happens.
    Capture,
    /// Succeeds, but the operation and all that follow it on that stream do not run until
    /// [`HostNode::resume`](super::HostNode::resume) or [`resume_stream`](super::HostNode::resume_stream). For a call
    /// that queues nothing, this is no fault at all.
    Stall,
}

/// One call that is to fail: armed by [`HostNode::fail`](super::HostNode::fail).
///
/// ```
/// # use pinpool::{Device, Error};
/// use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode};
///
/// let node = HostNode::new(HostConfig::new())?;
/// let device = Device::on(&node, 0)?;
/// node.fail(Fault { device: 0, call: Call::Allocate, nth: 1, failure: Failure::DeviceLost });
/// assert!(device.alloc(100).is_ok(), "the first allocation from now");
/// assert!(device.alloc(100).unwrap_err().is_device_lost(), "the second");
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fault {
    /// The device, counted from 0.
    pub device: u32,
    /// The kind of call.
    pub call: Call,
    /// Which of those calls, counted from now; 0 is the next one.
    pub nth: u64,
    /// What happens to that call.
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
    /// Whether a fault is armed or a trace is kept.
    active: AtomicBool,
    book: Mutex<Book>,
    /// What a unit test does before each call.
    #[cfg(all(test, not(loom)))]
    pub(super) hook: std::sync::OnceLock<Hook>,
}

/// See [`FaultBook`].
#[cfg(all(test, not(loom)))]
pub(super) struct Hook(pub(super) Box<dyn Fn(Call) + Send + Sync>);

#[cfg(all(test, not(loom)))]
impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hook")
    }
}

impl FaultBook {
    /// Counts the call, and takes the fault that strikes it.
    #[inline]
    pub(super) fn on_call(&self, device: u32, call: Call) -> Option<Failure> {
        #[cfg(all(test, not(loom)))]
        self.hook.get().into_iter().for_each(|hook| (hook.0)(call));
        // Relaxed: a test that arms a fault for another thread's calls synchronises with that thread itself.
        if self.active.load(Ordering::Relaxed) { self.look_up(device, call) } else { None }
    }

    #[cold]
    fn look_up(&self, device: u32, call: Call) -> Option<Failure> {
        let mut book = self.book.lock();
        if let Some(trace) = &mut book.trace {
            trace.push(call);
            book.traced += 1;
        }
        // One fault strikes a call, the one that was armed first. Others that are due strike later calls.
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

    /// Disarms the faults that have not struck, and says how many there were.
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

    /// Ends the trace and returns it.
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
