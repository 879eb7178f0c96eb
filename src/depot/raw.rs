//! A segment that is out, as a bare value: what buffers and timelines pass to each other.

use std::ptr::NonNull;

use super::{Depot, Grant};
use crate::freelist::{Slot, Word};
use crate::segment::Class;

/// The right to a segment that is out. Not `Drop`: who holds it decides what becomes of it, and forgetting it leaks the
/// segment, never more.
///
/// # Invariant
/// The slot is of this depot and not back, so both are alive.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a forgotten segment is lost to the pool"]
pub(crate) struct Segment {
    depot: NonNull<Depot>,
    slot: NonNull<Slot>,
    len: usize,
}

// SAFETY: the depot and the slot are Sync, and a segment is owned by one place at a time.
unsafe impl Send for Segment {}
// SAFETY: a shared segment only gives out addresses and atomics.
unsafe impl Sync for Segment {}

/// A segment that was checked out just now: host-ready, nothing written, and no other name for it. What a buffer is made
/// of.
#[derive(Debug)]
#[must_use = "a forgotten segment is lost to the pool"]
pub(crate) struct Fresh(Segment);

impl Fresh {
    /// # Safety
    /// The grant is this depot's, made just now, and nobody else uses it.
    #[inline(always)]
    pub(super) unsafe fn new(depot: &Depot, grant: Grant) -> Self {
        Self(Segment { depot: NonNull::from(depot), slot: grant.slot, len: grant.len })
    }

    #[inline(always)]
    pub(crate) fn into_segment(self) -> Segment {
        self.0
    }
}

impl Segment {
    /// Bytes that were asked for.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// First byte.
    #[inline(always)]
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.slot().base()
    }

    #[inline(always)]
    pub(crate) fn slot(&self) -> &Slot {
        // SAFETY: the invariant.
        unsafe { self.slot.as_ref() }
    }

    pub(crate) fn depot(&self) -> &Depot {
        // SAFETY: the invariant.
        unsafe { self.depot.as_ref() }
    }

    /// Whether both are of one depot.
    pub(crate) fn shares_depot(&self, other: &Self) -> bool {
        self.depot == other.depot
    }

    pub(crate) fn class(&self) -> Option<Class> {
        self.slot().class()
    }

    /// Bytes that the segment was given.
    pub(crate) fn granted(&self) -> usize {
        // SAFETY: the invariant.
        unsafe { Depot::granted(self.depot, self.slot) }
    }

    /// Whether its memory is really locked.
    pub(crate) fn pinned(&self) -> bool {
        // SAFETY: the invariant.
        unsafe { Depot::pinned(self.depot, self.slot) }
    }

    /// A second name for the same segment, for the two parties that meet in its state word.
    pub(crate) fn alias(&self) -> Self {
        Self { ..*self }
    }

    /// Another name's length, after [`Segment::rebook`] through this one's alias.
    pub(crate) fn relabel(&mut self, len: usize) {
        self.len = len;
    }

    /// Changes what it counts as asked for, for a claimer that asks for another length.
    pub(crate) fn rebook(&mut self, len: usize) {
        self.depot().rebook(self.len, len);
        self.len = len;
    }

    /// Returns it to the pool.
    ///
    /// # Safety
    /// The caller owns the segment in its present state, no device uses it, and no other name for it is used again.
    #[inline(always)]
    pub(crate) unsafe fn release(self) {
        // SAFETY: the invariant, and the caller's word.
        unsafe { Depot::put(self.depot, self.slot, self.len) }
    }

    /// Takes it out of use for good. Its word already says so.
    pub(crate) fn quarantine(self) {
        // SAFETY: the invariant; a quarantined segment is never returned.
        unsafe { Depot::quarantine(self.depot, self.slot) }
    }

    pub(crate) fn set(&self, state: u16) -> Word {
        self.slot().set(state)
    }
}
