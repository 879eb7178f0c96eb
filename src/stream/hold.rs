//! Holds: what a device may still use is kept by one, whatever it is.
//!
//! A [`Hold`] is one use of memory by a device: a counted reference to what is used, which
//! implements [`Retain`]. Other references are the program's own (an `Arc` of a buffer, a slice of
//! device memory) and those of other entries. The last reference that goes lets go of the memory;
//! the program gets exclusive access only when it has the last one.
//!
//! A segment in flight needs no reference: its handle and the timeline meet in its state word
//! ([`crate::freelist::descriptor`]), so that a copy allocates nothing. [`Flown`] is the timeline's
//! side of that. A [`Loan`] makes a retained object of such a segment, for copies that share it.
//!
//! # Invariants
//!
//! - [`Hold::release`] alone drops the reference: the device was seen to be done with the memory,
//!   or never got it. Everything else (quarantine, a panic, a forgotten hold) leaks it, so the
//!   memory is neither used again nor freed.
//! - What is quarantined counts once, however many holds are lost: the segment's state word decides
//!   which is first.
//! - No lock is held where a hold is released, since what it kept may be the program's.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use crate::central::{Segment, Wake};
use crate::device::memory::Allocation;
use crate::foreign;
use crate::freelist::{Word, state};

/// What a device may use. Its drop lets go of it.
pub(crate) trait Retain: Send + Sync {
    /// Visits each segment that it keeps, for reports and to quarantine it. Whether it keeps
    /// anything else, which belongs to the device itself. Called under a timeline's lock.
    fn for_each_segment(&self, _visit: &mut dyn FnMut(&Segment)) -> bool {
        true
    }
}

impl Retain for () {}
impl Retain for Allocation {}

impl<R: Retain + ?Sized> Retain for Vec<Arc<R>> {
    fn for_each_segment(&self, visit: &mut dyn FnMut(&Segment)) -> bool {
        self.iter().fold(false, |others, part| part.for_each_segment(visit) | others)
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

    /// The device can never be shown to be done with the memory: the reference is never dropped.
    /// Adds the bytes of each segment that this call has quarantined. Whether anything of the
    /// device itself is kept so.
    pub(crate) fn quarantine(&self, bytes: &mut Vec<usize>) -> bool {
        self.0.for_each_segment(&mut |segment| {
            // One that is lent is in flight by its word, and no entry counts it.
            if let Some(state::FLIGHT | state::DETACHED) = give_up(segment, bytes) {
                segment.central().unlisted_in_flight(-(segment.granted() as isize));
            }
        })
    }

    pub(crate) fn for_each_segment(&self, visit: &mut dyn FnMut(&Segment)) {
        self.0.for_each_segment(visit);
    }
}

/// What is handed to a timeline to be kept.
#[derive(Debug)]
pub(crate) enum Resource {
    /// A segment that is checked out, or claimed from this timeline.
    Segment(Segment),
    Object(Arc<dyn Retain>),
    Nothing,
}

impl Resource {
    /// What several copies share that have no entries of their own for it. A segment is in flight
    /// from here on, until the last reference is dropped.
    pub(crate) fn shared(self) -> Arc<dyn Retain> {
        match self {
            Self::Segment(segment) => Arc::new(Loan(segment.central().in_one(|central| {
                central.unlisted_in_flight(segment.granted() as isize);
                Flown::new(segment.alias())
            }))),
            Self::Object(object) => object,
            Self::Nothing => Arc::new(()),
        }
    }
}

/// A segment in flight, as the timeline has it.
#[derive(Debug)]
pub(super) struct Flown {
    pub(super) segment: Segment,
    /// The segment's state word as of when it went in flight.
    pub(super) word: Word,
    pub(super) bytes: usize,
}

impl Flown {
    /// The segment goes in flight.
    pub(super) fn new(segment: Segment) -> Self {
        Self { bytes: segment.granted(), word: segment.descriptor().depart(), segment }
    }

    /// Changes the bytes that timelines have in flight, and those of them that are claimed, by this
    /// many times its own. The caller holds the timeline's lock.
    pub(super) fn count(&self, flying: isize, claimed: isize) {
        let bytes = self.bytes as isize;
        self.segment.central().change_flight(flying * bytes, claimed * bytes);
    }

    /// Changes its state, if it is `from` and this is still the same flight.
    pub(super) fn exchange(&self, from: u16, to: u16) -> bool {
        self.segment.descriptor().compare_exchange(self.word.with(from), to).is_ok()
    }

    /// Whether it is claimed. The caller holds the timeline's lock.
    pub(super) fn is_claimed(&self) -> bool {
        self.segment.descriptor().word() == self.word.with(state::CLAIMED)
    }

    /// The device is done with it: leaves the segment to its handle or its claimer; or, if the
    /// handle was dropped, gives it to the caller, which has to return it to the pool.
    ///
    /// A segment that is left to another thread keeps neither the descriptor nor the central pool
    /// alive any more.
    pub(super) fn complete(&self) -> Option<Segment> {
        if self.exchange(state::FLIGHT, state::COMPLETED) {
            return None;
        }
        // Only a claimer and the completing thread change a word from DETACHED or CLAIMED, and
        // where claims are possible both hold the timeline's lock.
        if self.exchange(state::DETACHED, state::HOST) {
            return Some(self.segment.alias());
        }
        self.exchange(state::CLAIMED, state::HOST);
        None
    }
}

/// Quarantines a segment that a device may use for ever, and adds its bytes. Returns its state
/// until then; `None`: it was quarantined before. (A waiter that its central pool wakes for it is
/// woken when the caller's lock is released.)
pub(super) fn give_up(segment: &Segment, bytes: &mut Vec<usize>) -> Option<u16> {
    let descriptor = segment.descriptor();
    let mut word = descriptor.word();
    while word.state() != state::QUARANTINED {
        match descriptor.compare_exchange(word, state::QUARANTINED) {
            Ok(_) => {
                bytes.push(segment.granted());
                segment.alias().quarantine();
                return Some(word.state());
            }
            // The handle was dropped at this moment, or another hold is lost.
            Err(now) => word = now,
        }
    }
    None
}

/// A segment in flight that is no entry's. Its drop completes the flight. The central pool counts
/// its bytes as in flight until then, and no timeline does.
struct Loan(Flown);

impl Drop for Loan {
    fn drop(&mut self) {
        // The change ends after the word says that the flight is complete. From then on the handle
        // may return the segment, and with the last segment of a closed pool the central pool would
        // be freed.
        let _kept = self.0.segment.central().kept();
        let returned = self.0.segment.central().in_one(|central| {
            central.unlisted_in_flight(-(self.0.bytes as isize));
            self.0.complete()
        });
        if let Some(segment) = returned {
            // SAFETY: completed: the handle is gone and every hold released, so the device is done
            // with it.
            unsafe { segment.release() };
        }
    }
}

impl Retain for Loan {
    fn for_each_segment(&self, visit: &mut dyn FnMut(&Segment)) -> bool {
        visit(&self.0.segment);
        false
    }
}

/// What follows from a completion or a loss, to be done after the timeline's lock is released.
#[derive(Debug, Default)]
pub(super) struct After {
    pub(super) returned: Vec<Segment>,
    pub(super) released: Vec<Hold>,
    /// The bytes of each segment that was quarantined.
    pub(super) quarantined: Vec<usize>,
    pub(super) wakes: BTreeMap<(u64, u64), Wake>,
}

impl After {
    /// Returns, drops and wakes. The calling thread may have the role of asking, or be submitting,
    /// and have more to do; so it does this inside of [`crate::sync::landing`], where a waker that
    /// waits for a copy is refused.
    pub(super) fn run(self) {
        for segment in self.returned {
            // SAFETY: completed: the handle is gone, and events that cover it were seen complete.
            unsafe { segment.release() };
        }
        if !self.quarantined.is_empty() {
            // For the operator: the memory is not used again until the process ends.
            foreign::error!(
                target: "pinpool::stream::quarantine",
                buffers = self.quarantined.len(),
                bytes = self.quarantined.iter().sum::<usize>(),
                "buffers are quarantined: the device cannot be shown to be done with them"
            );
        }
        for hold in self.released {
            _ = foreign::survive("letting go of what a copy used panicked: it may be leaked", || {
                hold.release();
            });
        }
        self.wakes.into_values().for_each(Wake::wake);
    }
}
