//! Faults that a test arms, and the trace of calls.
//!
//! Every call of every device of a node passes [`FaultBook::on_call`] once, before it does anything. As long as no
//! fault is armed and no trace is kept, that is one relaxed load of a flag that no thread writes.

#![deny(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};

use crate::locks::Mutex;

macro_rules! calls {
    ($($(#[$doc:meta])* $call:ident $name:literal,)*) => {
        /// A call that a device serves. A [`Fault`] is armed for one, and a trace is a list of them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Call {
            $($(#[$doc])* $call,)*
        }

        impl Call {
            /// Every kind of call, for tests that go through all of them.
            pub const ALL: [Self; 18] = [$(Self::$call),*];

            /// The call's name, as errors show it, such as `copy_blocking`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$call => $name,)*
                }
            }
        }
    };
}

calls! {
    /// Pins host pages, or registers host memory.
    Pin "pin",
    /// Unpins host pages, or unregisters host memory.
    Unpin "unpin",
    /// Allocates host memory, by the device.
    AllocateHost "allocate_host",
    /// Frees host memory that the device allocated.
    FreeHost "free_host",
    /// Asks for the address at which the device sees host memory.
    DeviceAddress "device_address",
    /// Allocates device memory.
    Allocate "allocate",
    /// Frees device memory.
    Free "free",
    /// Checks memory that the crate did not allocate.
    Examine "examine",
    /// Creates a stream.
    CreateStream "create_stream",
    /// Destroys a stream.
    DestroyStream "destroy_stream",
    /// Submits a copy.
    Copy "copy",
    /// Copies, and waits for the copy.
    CopyBlocking "copy_blocking",
    /// Queues a host function ([`launch`](crate::host::launch)).
    Launch "launch",
    /// Creates an event.
    CreateEvent "create_event",
    /// Destroys an event.
    DestroyEvent "destroy_event",
    /// Records an event on a stream.
    Record "record",
    /// Asks whether an event is complete.
    Query "query",
    /// Makes a stream wait for an event.
    WaitEvent "wait_event",
}

/// What an armed [`Fault`] does to its call.
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
/// # use pinpool::{Device, Error, ErrorClass};
/// use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode};
///
/// let node = HostNode::new(HostConfig::new())?;
/// let device = Device::on(&node, 0)?;
/// node.start_trace();
/// node.fail(Fault { device: 0, call: Call::Allocate, nth: 1, failure: Failure::Transient });
/// let memory = device.alloc(100)?; // the first allocation from now
/// assert_eq!(device.alloc(100).unwrap_err().class(), ErrorClass::Transient, "the second");
/// assert_eq!(node.stop_trace(), [Call::Allocate, Call::Allocate]);
/// # drop(memory);
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

pub(super) struct Armed {
    /// `None`: any call of any device.
    pub(super) target: Option<(u32, Call)>,
    /// The number of such calls that pass before the one that fails.
    pub(super) left: u64,
    pub(super) failure: Failure,
}

/// The faults of a node that have not struck yet, and its trace.
#[derive(Default)]
pub(super) struct FaultBook {
    /// Whether a fault is armed or a trace is kept.
    active: AtomicBool,
    book: Mutex<Book>,
    /// What a unit test does before each call.
    #[cfg(all(test, not(loom)))]
    pub(super) hook: std::sync::OnceLock<Box<dyn Fn(Call) + Send + Sync>>,
}

#[derive(Default)]
pub(super) struct Book {
    pub(super) armed: Vec<Armed>,
    pub(super) trace: Option<Vec<Call>>,
}

impl FaultBook {
    /// Whether no fault is armed, no trace is kept and no hook is set, so that [`on_call`](Self::on_call) would do
    /// nothing.
    pub(super) fn is_idle(&self) -> bool {
        #[cfg(all(test, not(loom)))]
        if self.hook.get().is_some() {
            return false;
        }
        // Relaxed: as in `on_call`.
        !self.active.load(Ordering::Relaxed)
    }

    /// Counts the call, and takes the fault that strikes it.
    #[inline]
    pub(super) fn on_call(&self, device: u32, call: Call) -> Option<Failure> {
        #[cfg(all(test, not(loom)))]
        self.hook.get().into_iter().for_each(|hook| hook(call));
        // Relaxed: a test that arms a fault for another thread's calls synchronises with that thread itself.
        if !self.active.load(Ordering::Relaxed) {
            return None;
        }
        self.change(|book| {
            book.trace.iter_mut().for_each(|trace| trace.push(call));
            // One fault strikes a call, the one that was armed first. Others that are due strike later calls.
            let mut strikes = None;
            book.armed.retain_mut(|armed| {
                if armed.target.is_some_and(|target| target != (device, call)) {
                    return true;
                }
                if armed.left == 0 && strikes.is_none() {
                    strikes = Some(armed.failure);
                    return false;
                }
                armed.left = armed.left.saturating_sub(1);
                true
            });
            strikes
        })
    }

    /// Reads or changes what is armed and recorded.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut Book) -> R) -> R {
        let mut book = self.book.lock();
        let result = change(&mut book);
        self.active.store(!book.armed.is_empty() || book.trace.is_some(), Ordering::Relaxed);
        result
    }
}
