//! A segment that is out, as a bare value: what buffers and timelines pass to each other.

use std::ptr::NonNull;

use super::{CentralPool, Grant};
use crate::freelist::{Descriptor, LISTS};
use crate::segment::Class;

/// The address without [`WATCHED_BIT`]. A descriptor's is not zero without it.
fn unwatched(descriptor: NonNull<Descriptor>) -> NonNull<Descriptor> {
    NonNull::new(descriptor.as_ptr().map_addr(|at| at & !WATCHED_BIT)).unwrap_or(descriptor)
}

/// The right to a segment that is out. Not `Drop`: who holds it decides what becomes of it, and forgetting it leaks the
/// segment, never more.
///
/// # Invariant
/// The descriptor is of this central pool and not back, so both are alive.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a forgotten segment is lost to the pool"]
pub(crate) struct Segment {
    central: NonNull<CentralPool>,
    descriptor: NonNull<Descriptor>,
    /// Bytes that were asked for, and below them which list of a thread cache it belongs to: a return that had to load
    /// that from the descriptor would find its list, and with it whatever it reads and writes, only after the checkout
    /// has found the descriptor.
    tag: u64,
}

/// Bits of a tag that the list has: a byte, which processors can take off a word by itself. The longest extent has 43
/// bits, so a length has room above.
const LIST: u32 = 8;
const _: () = assert!(LISTS < 1 << LIST);

#[inline(always)]
fn tag(len: usize, list: usize) -> u64 {
    (len as u64) << LIST | list as u64
}

/// In the address of a descriptor on its way: the return is watched.
const WATCHED_BIT: usize = 1;
const _: () = assert!(align_of::<Descriptor>() > WATCHED_BIT);

// SAFETY: the central pool and the descriptor are Sync, and a segment is owned by one place at a time.
unsafe impl Send for Segment {}
// SAFETY: a shared segment only gives out addresses and atomics.
unsafe impl Sync for Segment {}

/// A segment that was checked out just now: host-ready, nothing written, and no other name for it. What a buffer is
/// made of.
#[derive(Debug)]
#[must_use = "a forgotten segment is lost to the pool"]
pub(crate) struct Fresh(Segment);

impl Fresh {
    /// # Safety
    /// The grant is this central pool's, made just now, and nobody else uses it.
    #[inline(always)]
    pub(super) unsafe fn new(central: &CentralPool, grant: Grant) -> Self {
        // SAFETY: granted, so alive.
        let list = unsafe { grant.descriptor.as_ref() }.list();
        // SAFETY: the caller's word.
        unsafe { Self::of_list(central, grant, list) }
    }

    /// # Safety
    /// As for [`Fresh::new`], and `list` is the descriptor's.
    #[inline(always)]
    pub(super) unsafe fn of_list(central: &CentralPool, grant: Grant, list: usize) -> Self {
        Self(Segment {
            central: NonNull::from(central),
            descriptor: grant.descriptor,
            tag: tag(grant.len, list),
        })
    }

    /// # Safety
    /// From [`Segment::into_parts`], once: of a segment with this length, of which nothing has been written that
    /// counts.
    // Never inlined: what the slow path then leaves in registers costs the hit two of its own.
    #[cold]
    #[inline(never)]
    pub(crate) unsafe fn from_parts(
        (central, descriptor): (NonNull<CentralPool>, NonNull<Descriptor>),
        len: usize,
    ) -> Self {
        let watched = descriptor.addr().get() & WATCHED_BIT != 0;
        let descriptor = if watched { unwatched(descriptor) } else { descriptor };
        // SAFETY: a segment that is out keeps its central pool alive, and the caller's word.
        let mut fresh = unsafe { Self::new(central.as_ref(), Grant { descriptor, len }) };
        if watched {
            fresh.watch();
        }
        fresh
    }

    #[inline(always)]
    pub(crate) fn into_segment(self) -> Segment {
        self.0
    }

    pub(crate) fn segment(&self) -> &Segment {
        &self.0
    }

    /// Has its return take the slow path, so that it can be noted there: to this name of it no list belongs.
    pub(super) fn watch(&mut self) {
        self.0.tag = tag(self.0.len(), LISTS);
    }
}

impl Segment {
    /// Bytes that were asked for.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        (self.tag >> LIST) as usize
    }

    #[inline(always)]
    fn list(&self) -> usize {
        (self.tag & ((1 << LIST) - 1)) as usize
    }

    /// Its addresses. Two of them, and no length: so much a function can return in registers. Whether its return is
    /// watched is in a bit that a descriptor's address does not use.
    pub(crate) fn into_parts(self) -> (NonNull<CentralPool>, NonNull<Descriptor>) {
        let watched = if self.list() == LISTS { WATCHED_BIT } else { 0 };
        (self.central, self.descriptor.map_addr(|at| at | watched))
    }

    /// First byte.
    #[inline(always)]
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.descriptor().base()
    }

    #[inline(always)]
    pub(crate) fn descriptor(&self) -> &Descriptor {
        // SAFETY: the invariant.
        unsafe { self.descriptor.as_ref() }
    }

    pub(crate) fn central(&self) -> &CentralPool {
        // SAFETY: the invariant.
        unsafe { self.central.as_ref() }
    }

    /// Whether both are of one central pool.
    pub(crate) fn shares_central(&self, other: &Self) -> bool {
        self.central == other.central
    }

    pub(crate) fn class(&self) -> Option<Class> {
        self.descriptor().class()
    }

    /// Bytes that the segment was given.
    pub(crate) fn granted(&self) -> usize {
        // SAFETY: the invariant.
        unsafe { CentralPool::granted(self.central, self.descriptor) }
    }

    /// Whether its memory is really locked.
    pub(crate) fn pinned(&self) -> bool {
        // SAFETY: the invariant.
        unsafe { CentralPool::pinned(self.central, self.descriptor) }
    }

    /// A second name for the same segment, for the two parties that meet in its state word.
    pub(crate) fn alias(&self) -> Self {
        Self { ..*self }
    }

    /// Another name's length, after [`Segment::rebook`] through this one's alias.
    pub(crate) fn relabel(&mut self, len: usize) {
        self.tag = tag(len, self.list());
    }

    /// Changes what it counts as asked for, for a claimer that asks for another length.
    pub(crate) fn rebook(&mut self, len: usize) {
        self.central().rebook(self.len(), len);
        self.relabel(len);
    }

    /// Returns it to the pool.
    ///
    /// # Safety
    /// The caller owns the segment in its present state, no device uses it, and no other name for it is used again.
    #[inline(always)]
    pub(crate) unsafe fn release(self) {
        // SAFETY: the invariant, and the caller's word.
        unsafe { CentralPool::put(self.central, self.descriptor, self.len(), self.list()) }
    }

    /// Takes it out of use for good. Its word already says so.
    pub(crate) fn quarantine(self) {
        // SAFETY: the invariant; a quarantined segment is never returned.
        unsafe { CentralPool::quarantine(self.central, self.descriptor) }
    }
}
