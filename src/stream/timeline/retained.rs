//! What an entry holds, and what becomes of it when the device is done or never will be.
//!
//! For each segment the handle and the timeline meet in its state word ([`crate::freelist::descriptor`]);
//! [`complete_segment`] and [`quarantine_segment`] are the timeline's side of that. What follows from them for others
//! (returning, dropping, waking) is put down in [`After`] and done when the lock is released.

#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Instant;

use crate::central::{Segment, Wake};
use crate::device::memory::Allocation;
use crate::foreign;
use crate::freelist::{Word, state};
use crate::sync::{AtomicU32, Ordering};

/// Something that a device may use. Dropped, it is leaked: only [`release`](Self::release) lets it go, by a caller that
/// knows the device to be done with it.
#[derive(Debug)]
pub(crate) struct InUse<T>(ManuallyDrop<T>);

impl<T> InUse<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(ManuallyDrop::new(value))
    }

    /// The device is done with it, or never heard of it.
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

/// What keeps memory from being reused until its sequence number is complete.
#[derive(Debug)]
pub(crate) enum Retained {
    /// A segment, with the word that it had when it went in flight.
    Segment { segment: Segment, word: Word },
    /// A segment held by several timelines at once.
    Joint(Arc<Joint>),
    /// Anything else: it is dropped when the device is done with it.
    Object(InUse<Box<dyn Retain>>),
    /// Only the entry's device memory.
    Nothing,
}

/// What is lent to a timeline.
#[derive(Debug)]
pub(crate) enum Resource {
    /// A segment that is out.
    Segment(Segment),
    /// A segment claimed from this timeline, by its key.
    Claimed(usize),
    /// One timeline's part of a joint hold.
    Joint(Arc<Joint>),
    Object(Box<dyn Retain>),
}

/// Segments of pools that were taken out of use for good.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Quarantined {
    pub(crate) buffers: usize,
    pub(crate) bytes: usize,
}

impl Quarantined {
    /// Takes a segment out of use whose word says that it is.
    pub(crate) fn one(segment: Segment) -> Self {
        let bytes = segment.granted();
        segment.quarantine();
        Self { buffers: 1, bytes }
    }

    /// For whoever operates the process: that memory is gone until it ends.
    pub(crate) fn log(self) {
        let Self { buffers, bytes } = self;
        if buffers > 0 {
            crate::foreign::error!(
                target: "pinpool::stream::quarantine", buffers, bytes,
                "buffers are quarantined: nobody can prove that the device is done with them"
            );
        }
    }
}

impl std::iter::Sum for Quarantined {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |a, b| Self { buffers: a.buffers + b.buffers, bytes: a.bytes + b.bytes })
    }
}

/// Something that a hold owns.
pub(crate) trait Retain: Send + std::fmt::Debug {
    /// Nobody can prove that the device is done with it: leak what the device may touch. Which segments that took out
    /// of use.
    fn quarantine(self: Box<Self>) -> Quarantined;

    /// The address of the descriptor that it keeps, for reports.
    fn descriptor(&self) -> Option<usize> {
        None
    }

    /// The same for each descriptor, where there may be several. Called under the timeline's lock.
    fn for_each_descriptor(&self, visit: &mut dyn FnMut(usize)) {
        self.descriptor().into_iter().for_each(visit);
    }

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

/// A segment that comes back when several timelines are done with it.
#[derive(Debug)]
pub(crate) struct Joint {
    segment: Segment,
    word: Word,
    left: AtomicU32,
}

impl Joint {
    /// For `timelines` of them; the segment is in flight from here on.
    pub(crate) fn new(segment: Segment, timelines: u32) -> Arc<Self> {
        let bytes = segment.granted() as isize;
        let word = segment.central().in_one(|central| {
            central.joint_in_flight(bytes);
            segment.descriptor().depart()
        });
        Arc::new(Self { segment, word, left: AtomicU32::new(timelines) })
    }

    /// The address of its descriptor, for reports.
    fn descriptor(&self) -> usize {
        std::ptr::from_ref(self.segment.descriptor()).addr()
    }

    /// One of them is done. Whether it was the last, and the handle is gone: then the segment is the caller's.
    pub(super) fn complete(&self) -> Option<Segment> {
        // AcqRel: the last one sees what all the others saw complete.
        if self.left.fetch_sub(1, Ordering::AcqRel) != 1 {
            return None;
        }
        self.segment.central().joint_in_flight(-(self.segment.granted() as isize));
        complete_segment(&self.segment, self.word)
    }

    /// A part of the hold could not be placed: nobody will know when the segment is free.
    pub(crate) fn give_up(&self) {
        self.quarantine().map(Quarantined::one).unwrap_or_default().log();
    }

    pub(super) fn quarantine(&self) -> Option<Segment> {
        let lost = quarantine_segment(&self.segment, self.word);
        if lost.is_some() {
            self.segment.central().joint_in_flight(-(self.segment.granted() as isize));
        }
        lost
    }
}

/// What a copy uses of the host's, lent by its handle to a copy that no entry of its own stands for: one of a batch.
/// Whoever has the batch says what became of it. Forgotten, it leaks; it is never let go by dropping.
#[derive(Debug)]
pub(crate) struct RetainedResource {
    retained: Retained,
    bytes: usize,
}

impl RetainedResource {
    /// A segment counts as in flight by its word from here on. (The bytes are booked by the queue.)
    pub(crate) fn of(resource: Resource) -> Self {
        match resource {
            Resource::Segment(segment) => {
                let bytes = segment.granted();
                let word = segment.descriptor().depart();
                Self { retained: Retained::Segment { segment, word }, bytes }
            }
            Resource::Object(object) => Self { retained: Retained::Object(InUse::new(object)), bytes: 0 },
            Resource::Joint(joint) => Self { retained: Retained::Joint(joint), bytes: 0 },
            // Claims are one timeline's own, and nobody lends them elsewhere.
            Resource::Claimed(_) => Self { retained: Retained::Nothing, bytes: 0 },
        }
    }

    /// Bytes to be booked as in flight, and a segment of the pool to book them with.
    pub(crate) fn booked(&self) -> Option<(&Segment, usize)> {
        match &self.retained {
            Retained::Segment { segment, .. } => Some((segment, self.bytes)),
            _ => None,
        }
    }

    /// The address of each descriptor that it keeps, for reports.
    pub(crate) fn for_each_descriptor(&self, visit: &mut dyn FnMut(usize)) {
        self.retained.for_each_descriptor(visit);
    }

    /// The device is done with it, or never heard of it. `true`: the handle is gone, nobody will ask.
    pub(crate) fn complete(self) -> bool {
        let returned = match self.retained {
            Retained::Segment { segment, word } => complete_segment(&segment, word),
            Retained::Joint(joint) => joint.complete(),
            Retained::Object(object) => {
                drop(object.release());
                None
            }
            Retained::Nothing => None,
        };
        let gone = returned.is_some();
        if let Some(segment) = returned {
            // SAFETY: completed: the handle is gone, and by the caller's word the device is done with it.
            unsafe { segment.release() };
        }
        gone
    }

    /// The device will never be known to be done with it. What that takes out of use.
    pub(crate) fn quarantine(self) -> Quarantined {
        let lost = match self.retained {
            Retained::Segment { segment, word } => quarantine_segment(&segment, word),
            Retained::Joint(joint) => joint.quarantine(),
            Retained::Object(object) => return object.release().quarantine(),
            Retained::Nothing => None,
        };
        lost.map(Quarantined::one).unwrap_or_default()
    }
}

impl Retained {
    /// The address of each descriptor that it keeps, for reports.
    pub(super) fn for_each_descriptor(&self, visit: &mut dyn FnMut(usize)) {
        match self {
            Self::Segment { segment, .. } => visit(std::ptr::from_ref(segment.descriptor()).addr()),
            Self::Joint(joint) => visit(joint.descriptor()),
            Self::Object(object) => object.for_each_descriptor(visit),
            Self::Nothing => {}
        }
    }
}

/// The device is done with a segment: leave it to its handle, or take it if that is gone.
pub(super) fn complete_segment(segment: &Segment, word: Word) -> Option<Segment> {
    match segment.descriptor().compare_exchange(word, state::COMPLETED) {
        Ok(_) => None,
        Err(found) if found == word.with(state::DETACHED) && !cfg!(pinpool_planted = "settle_looks_once") => {
            // Nobody else leaves DETACHED but the claimer, and both are under the timeline's lock.
            segment.descriptor().compare_exchange(found, state::HOST).ok().map(|_| segment.alias())
        }
        Err(_) => None,
    }
}

/// The device will never be known to be done with it.
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
    /// When it was submitted, if it is one of those that are timed.
    pub(super) since: Option<Instant>,
}

/// What an entry held that a device is done with: an object, and device memory.
type Released = (Option<Box<dyn Retain>>, Option<Arc<Allocation>>);

/// What is done after the lock is released.
#[derive(Debug, Default)]
pub(super) struct After {
    pub(super) returned: Vec<Segment>,
    pub(super) quarantined: Vec<Segment>,
    /// Objects that the device may use for good. They book what they leak, which can wake somebody.
    pub(super) quarantined_objects: Vec<InUse<Box<dyn Retain>>>,
    /// Whether device memory is kept for good.
    pub(super) kept: bool,
    pub(super) dropped: Vec<Released>,
    pub(super) wakes: Vec<Wake>,
    /// When those were submitted that were timed and are complete.
    pub(super) flown: Vec<Instant>,
}

impl After {
    /// Whoever does may be the one who asks, or submits, and have more to do: nobody who is woken may wait here.
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
