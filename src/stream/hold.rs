//! Holds: what a device may still use is kept by one, whatever it is.
//!
//! A [`Hold`] is one use of memory by a device: a counted reference to what is used, which implements [`Retain`]. An
//! entry on a timeline has a hold on its device memory and, where its host memory is no segment, one on that. Other
//! references are the program's own (an `Arc` of a buffer, a slice of device memory) and those of other entries. The
//! last reference that goes lets go of the memory; the program gets exclusive access only when it has the last one.
//!
//! A segment in flight needs no reference: its handle and the timeline meet in its state word
//! ([`crate::freelist::descriptor`]), so that a copy allocates nothing. [`Flown`] is the timeline's side of that. A
//! [`Loan`] makes a retained object of such a segment, for copies that share it.
//!
//! # Invariants
//!
//! - A hold ends in one of two ways. [`Hold::release`] drops the reference: the device was seen to be done with the
//!   memory, or never got it. Everything else (quarantine, a panic, a forgotten hold) leaks the reference, so the count
//!   never comes to zero again, and the memory is neither used again nor freed.
//! - What is quarantined is counted once, however many holds are lost: the segment's state word decides which is first.
//! - No lock is held where a hold ends, since what it kept may be the program's.

#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Instant;

use crate::central::{Segment, Wake};
use crate::device::memory::Allocation;
use crate::foreign;
use crate::freelist::{Word, state};

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

/// What a device may use. Its drop lets go of it.
pub(crate) trait Retain: Send + Sync {
    /// The device can never be shown to be done with it, and a reference to it is leaked. Returns which segments are
    /// quarantined by that.
    fn quarantine(&self) -> Quarantined {
        Quarantined::default()
    }

    /// Visits each segment that it keeps, for reports. Called under a timeline's lock.
    fn for_each_segment(&self, _visit: &mut dyn FnMut(&Segment)) {}
}

impl Retain for () {}
impl Retain for Allocation {}

impl<R: Retain + ?Sized> Retain for Vec<Arc<R>> {
    fn quarantine(&self) -> Quarantined {
        self.iter().map(|part| part.quarantine()).sum()
    }

    fn for_each_segment(&self, visit: &mut dyn FnMut(&Segment)) {
        self.iter().for_each(|part| part.for_each_segment(visit));
    }
}

impl std::fmt::Debug for dyn Retain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Retain")
    }
}

/// One use of memory by a device. See the module's page.
#[derive(Debug)]
pub(crate) struct Hold(ManuallyDrop<Arc<dyn Retain>>);

impl Hold {
    pub(crate) fn new(on: Arc<dyn Retain>) -> Self {
        Self(ManuallyDrop::new(on))
    }

    /// Ends the use: the device is done with the memory, or never got it.
    pub(crate) fn release(self) {
        drop(ManuallyDrop::into_inner(self.0));
    }

    /// The device can never be shown to be done with the memory.
    pub(crate) fn quarantine(self) -> Quarantined {
        // The reference is leaked: dropping a hold does not drop it.
        self.0.quarantine()
    }

    pub(crate) fn for_each_segment(&self, visit: &mut dyn FnMut(&Segment)) {
        self.0.for_each_segment(visit);
    }
}

/// What is handed to a timeline to be kept.
#[derive(Debug)]
pub(crate) enum Resource {
    /// A segment that is checked out.
    Segment(Segment),
    /// A segment claimed from this timeline, by its key.
    Claimed(usize),
    Object(Arc<dyn Retain>),
    Nothing,
}

impl Resource {
    /// What several copies share that have no entries of their own for it. A segment is in flight from here on, until
    /// the last reference is dropped.
    pub(crate) fn shared(self) -> Arc<dyn Retain> {
        match self {
            Self::Segment(segment) => Arc::new(Loan::new(segment)),
            Self::Object(object) => object,
            // A claim belongs to its timeline, and is shared by nobody.
            Self::Claimed(_) | Self::Nothing => Arc::new(()),
        }
    }
}

/// A segment in flight, as the timeline has it.
#[derive(Debug)]
pub(super) struct Flown {
    pub(super) segment: Segment,
    /// Its state word as of when it went in flight.
    pub(super) word: Word,
    pub(super) bytes: usize,
}

impl Flown {
    /// The segment goes in flight.
    pub(super) fn new(segment: Segment) -> Self {
        Self { bytes: segment.granted(), word: segment.descriptor().depart(), segment }
    }

    /// The device is done with it: leaves the segment to its handle; or, if the handle was dropped, gives it to the
    /// caller, which has to return it to the pool.
    pub(super) fn complete(&self) -> Option<Segment> {
        let (descriptor, word) = (self.segment.descriptor(), self.word);
        match descriptor.compare_exchange(word, state::COMPLETED) {
            Ok(_) => None,
            Err(found) if found == word.with(state::DETACHED) => {
                // Only a claimer and the completing thread change a word from DETACHED, and where claims are possible
                // both hold the timeline's lock.
                descriptor.compare_exchange(found, state::HOST).ok().map(|_| self.segment.alias())
            }
            Err(_) => None,
        }
    }

    /// The device can never be shown to be done with it. Returns the segment if this call has quarantined it.
    pub(super) fn quarantine(&self) -> Option<Segment> {
        let descriptor = self.segment.descriptor();
        [state::FLIGHT, state::DETACHED, state::CLAIMED]
            .into_iter()
            .any(|from| descriptor.compare_exchange(self.word.with(from), state::QUARANTINED).is_ok())
            .then(|| self.segment.alias())
    }
}

/// A segment in flight that is no entry's. Its drop completes the flight. The central pool counts its bytes as in
/// flight until then, and no timeline does.
struct Loan(Flown);

impl Loan {
    fn new(segment: Segment) -> Self {
        Self(segment.central().in_one(|central| {
            central.unlisted_in_flight(segment.granted() as isize);
            Flown::new(segment.alias())
        }))
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let returned = self.0.segment.central().in_one(|central| {
            central.unlisted_in_flight(-(self.0.bytes as isize));
            self.0.complete()
        });
        if let Some(segment) = returned {
            // SAFETY: completed: the handle is gone, and every hold was released, so the device is done with it.
            unsafe { segment.release() };
        }
    }
}

impl Retain for Loan {
    fn quarantine(&self) -> Quarantined {
        let first = self.0.segment.central().in_one(|central| {
            let first = self.0.quarantine();
            first.inspect(|_| central.unlisted_in_flight(-(self.0.bytes as isize)))
        });
        first.map(Quarantined::one).unwrap_or_default()
    }

    fn for_each_segment(&self, visit: &mut dyn FnMut(&Segment)) {
        visit(&self.0.segment);
    }
}

/// What follows from a completion or a loss, to be done after the timeline's lock is released.
#[derive(Debug, Default)]
pub(super) struct After {
    pub(super) returned: Vec<Segment>,
    pub(super) released: Vec<Hold>,
    pub(super) quarantined: Vec<Segment>,
    /// Holds that the device may need for good. Quarantining them calls their pools, which can wake waiters.
    pub(super) lost: Vec<Hold>,
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
        segments.chain(self.lost.into_iter().map(Hold::quarantine)).sum::<Quarantined>().log();
        for hold in self.released {
            _ = foreign::survive("letting go of what a copy used panicked: it may be leaked", || {
                hold.release();
            });
        }
        self.wakes.into_iter().for_each(Wake::wake);
    }
}
