//! What an entry keeps, and what becomes of it when the device is done with it or can never be shown to be.
//!
//! For each segment the handle and the timeline meet in its state word ([`crate::freelist::descriptor`]);
//! [`complete_segment`] and [`quarantine_segment`] are the timeline's side of that. For an entry they run under the
//! timeline's lock; what follows from them (returns, drops, wakes) is collected in [`After`] and done when the lock is
//! released. A copy of a batch has a [`RetainedResource`] in place of an entry.

#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Instant;

use crate::central::{Segment, Wake};
use crate::device::memory::Allocation;
use crate::foreign;
use crate::freelist::{Word, state};

/// A value that a device may use. Dropping this leaks the value. Only [`release`](Self::release) gives it back, to a
/// caller that knows the device to be done with it.
#[derive(Debug)]
pub(crate) struct InUse<T>(ManuallyDrop<T>);

impl<T> InUse<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(ManuallyDrop::new(value))
    }

    /// Gives the value back: the device is done with it, or never got it.
    pub(crate) fn release(self) -> T {
        ManuallyDrop::into_inner(self.0)
    }
}

impl<T> std::ops::Deref for InUse<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// What an entry keeps from being reused until its sequence number is complete.
#[derive(Debug)]
pub(crate) enum Retained {
    /// A segment, with its state word as of when it went in flight.
    Segment { segment: Segment, word: Word },
    /// Any other object, dropped when the device is done with it.
    Object(InUse<Box<dyn Retain>>),
    /// Nothing but the entry's device memory.
    Nothing,
}

/// What is handed to a timeline to be kept.
#[derive(Debug)]
pub(crate) enum Resource {
    /// A segment that is checked out.
    Segment(Segment),
    /// A segment claimed from this timeline, by its key.
    Claimed(usize),
    Object(Box<dyn Retain>),
}

/// How many segments were quarantined, and how many bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Quarantined {
    pub(crate) buffers: usize,
    pub(crate) bytes: usize,
}

impl Quarantined {
    /// Tells the central pool that a segment is quarantined, as its state word says already.
    pub(crate) fn one(segment: Segment) -> Self {
        let bytes = segment.granted();
        segment.quarantine();
        Self { buffers: 1, bytes }
    }

    /// Logs it for the operator of the process: the memory is not used again until the process ends.
    pub(crate) fn log(self) {
        let Self { buffers, bytes } = self;
        if buffers > 0 {
            crate::foreign::error!(
                target: "pinpool::stream::quarantine", buffers, bytes,
                "buffers are quarantined: the device cannot be shown to be done with them"
            );
        }
    }
}

impl std::iter::Sum for Quarantined {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |a, b| Self { buffers: a.buffers + b.buffers, bytes: a.bytes + b.bytes })
    }
}

/// An object that an entry keeps.
pub(crate) trait Retain: Send + std::fmt::Debug {
    /// The device can never be shown to be done with the object: leaks what the device may touch. Returns which
    /// segments are quarantined by that.
    fn quarantine(self: Box<Self>) -> Quarantined;

    /// Visits each segment that it keeps, for reports. Called under the timeline's lock.
    fn for_each_segment(&self, _visit: &mut dyn FnMut(&Segment)) {}

    /// Whether there is anything to leak.
    fn is_something(&self) -> bool {
        true
    }
}

impl Retain for () {
    fn quarantine(self: Box<Self>) -> Quarantined {
        Quarantined::default()
    }

    fn is_something(&self) -> bool {
        false
    }
}

/// What one copy of a batch uses of host memory. Such a copy has no entry of its own on a timeline; the owner of the
/// batch calls `complete` or `quarantine`. Forgotten or dropped, this leaks, and never lets anything be reused early.
#[derive(Debug)]
pub(crate) struct RetainedResource {
    retained: Retained,
    /// Bytes of its segment. The central pool counts them as in flight, from the start to the end, and no timeline does.
    bytes: usize,
}

impl RetainedResource {
    /// A segment is in flight by its state word from here on, and its bytes count as in flight until the end.
    pub(crate) fn of(resource: Resource) -> Self {
        let retained = match resource {
            Resource::Segment(segment) => {
                let bytes = segment.granted();
                let word = segment.central().in_one(|central| {
                    central.unlisted_in_flight(bytes as isize);
                    segment.descriptor().depart()
                });
                return Self { retained: Retained::Segment { segment, word }, bytes };
            }
            Resource::Object(object) => Retained::Object(InUse::new(object)),
            // A claim belongs to its timeline, and is no part of a batch.
            Resource::Claimed(_) => Retained::Nothing,
        };
        Self { retained, bytes: 0 }
    }

    /// Ends being in flight, by `end`.
    fn leave(segment: &Segment, bytes: usize, end: impl FnOnce() -> Option<Segment>) -> Option<Segment> {
        segment.central().in_one(|central| {
            central.unlisted_in_flight(-(bytes as isize));
            end()
        })
    }

    /// Visits each retained segment, for reports.
    pub(crate) fn for_each_segment(&self, visit: &mut dyn FnMut(&Segment)) {
        self.retained.for_each_segment(visit);
    }

    /// The device is done with it, or never got it. `true`: a handle was dropped, so no handle will ask about the copy.
    pub(crate) fn complete(self) -> bool {
        let Self { retained, bytes } = self;
        let returned = match retained {
            Retained::Segment { segment, word } => {
                Self::leave(&segment, bytes, || complete_segment(&segment, word))
            }
            Retained::Object(object) => {
                drop(object.release());
                None
            }
            Retained::Nothing => None,
        };
        let was_dropped = returned.is_some();
        if let Some(segment) = returned {
            // SAFETY: completed: the handle is gone, and by the caller's word the device is done with it.
            unsafe { segment.release() };
        }
        was_dropped
    }

    /// The device can never be shown to be done with it. Returns what is quarantined by that.
    pub(crate) fn quarantine(self) -> Quarantined {
        let Self { retained, bytes } = self;
        let lost = match retained {
            Retained::Segment { segment, word } => {
                Self::leave(&segment, bytes, || quarantine_segment(&segment, word))
            }
            Retained::Object(object) => return object.release().quarantine(),
            Retained::Nothing => None,
        };
        lost.map(Quarantined::one).unwrap_or_default()
    }
}

impl Retained {
    /// Visits each retained segment, for reports.
    pub(super) fn for_each_segment(&self, visit: &mut dyn FnMut(&Segment)) {
        match self {
            Self::Segment { segment, .. } => visit(segment),
            Self::Object(object) => object.for_each_segment(visit),
            Self::Nothing => {}
        }
    }
}

/// The device is done with a segment: leaves it to its handle; or, if the handle was dropped, gives it to the caller,
/// which has to return it to the pool.
pub(super) fn complete_segment(segment: &Segment, word: Word) -> Option<Segment> {
    match segment.descriptor().compare_exchange(word, state::COMPLETED) {
        Ok(_) => None,
        Err(found) if found == word.with(state::DETACHED) => {
            // Only a claimer and the completing thread change a word from DETACHED, and where claims are possible both
            // hold the timeline's lock.
            segment.descriptor().compare_exchange(found, state::HOST).ok().map(|_| segment.alias())
        }
        Err(_) => None,
    }
}

/// The device can never be shown to be done with the segment. Returns it if this call has quarantined it.
pub(super) fn quarantine_segment(segment: &Segment, word: Word) -> Option<Segment> {
    let descriptor = segment.descriptor();
    [state::FLIGHT, state::DETACHED, state::CLAIMED]
        .into_iter()
        .any(|from| descriptor.compare_exchange(word.with(from), state::QUARANTINED).is_ok())
        .then(|| segment.alias())
}

#[derive(Debug)]
pub(super) struct TimelineEntry {
    pub(super) retained: Retained,
    pub(super) memory: InUse<Option<Arc<Allocation>>>,
    pub(super) bytes: usize,
    /// When it was submitted, if it is one of the timed entries.
    pub(super) since: Option<Instant>,
}

/// What a completed entry kept, to be dropped: an object, and device memory.
type Released = (Option<Box<dyn Retain>>, Option<Arc<Allocation>>);

/// What is to be done after the lock is released.
#[derive(Debug, Default)]
pub(super) struct After {
    pub(super) returned: Vec<Segment>,
    pub(super) quarantined: Vec<Segment>,
    /// Objects that the device may use for good. Quarantining them calls their pools, which can wake waiters.
    pub(super) quarantined_objects: Vec<InUse<Box<dyn Retain>>>,
    /// Whether device memory is kept for good.
    pub(super) kept: bool,
    pub(super) dropped: Vec<Released>,
    pub(super) wakes: Vec<Wake>,
    /// When the timed entries that are complete were submitted.
    pub(super) timed: Vec<Instant>,
}

impl After {
    /// Returns, drops and wakes. The calling thread may have the role of asking, or be submitting, and have more to do;
    /// so a waker that runs in here must not wait for a copy, and is refused (`sync::finds_out`).
    pub(super) fn run(self) {
        crate::sync::landing(|| self.run_all());
    }

    fn run_all(self) {
        for segment in self.returned {
            // SAFETY: completed: the handle is gone and every event that covers it was seen complete.
            unsafe { segment.release() };
        }
        let segments = self.quarantined.into_iter().map(Quarantined::one);
        let objects = self.quarantined_objects.into_iter().map(|object| object.release().quarantine());
        segments.chain(objects).sum::<Quarantined>().log();
        for released in self.dropped {
            _ = foreign::survive("letting go of what a copy used panicked: it may be leaked", || {
                drop(released)
            });
        }
        self.wakes.into_iter().for_each(Wake::wake);
    }
}
