//! A segment that is out, as a bare value. Buffers and timelines pass it to each other.

use std::ptr::NonNull;

use super::CentralPool;
use crate::freelist::{Descriptor, LISTS};
use crate::segment::Class;

/// The right to a segment that is out. It has no `Drop`: its holder decides what becomes of the
/// segment. Forgetting it leaks the segment, and nothing else.
///
/// # Invariant
/// The descriptor is of this central pool and out, so both are alive.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a forgotten segment is lost to the pool"]
pub(crate) struct Segment {
    central: NonNull<CentralPool>,
    descriptor: NonNull<Descriptor>,
    /// The requested bytes, and in the lowest bits the index of the segment's list in a thread
    /// cache ([`LISTS`] for a segment without a class, and for one whose return the ledger is to
    /// see). So a return need not load the index from the descriptor before it touches the list.
    len_and_list: u64,
}

/// Bits of `len_and_list` that hold the list: a byte, which processors can extract by itself. The
/// length of the longest extent has 43 bits, so a length has room above.
const LIST: u32 = 8;
const _: () = assert!(LISTS < 1 << LIST);

/// A segment's requested bytes and the index of its list, in one word.
#[inline(always)]
pub(crate) fn pack(len: usize, list: usize) -> u64 {
    (len as u64) << LIST | list as u64
}

// SAFETY: the central pool and the descriptor are Sync; one place at a time owns a segment.
unsafe impl Send for Segment {}
// SAFETY: a shared segment only gives out addresses and atomics.
unsafe impl Sync for Segment {}

/// A segment that was just checked out: host-ready, nothing written, and no
/// [alias](Segment::alias). A buffer is made of it.
#[derive(Debug)]
#[must_use = "a forgotten segment is lost to the pool"]
pub(crate) struct Fresh(Segment);

impl Fresh {
    /// Makes a segment of a descriptor that was just taken or is [`Segment::into_descriptor`]'s.
    ///
    /// # Safety
    /// The descriptor is of a segment of this central pool, and is used once. No byte counts as
    /// written. `len_and_list` is [packed](pack) of the requested length and the
    /// descriptor's list.
    #[inline(always)]
    pub(crate) unsafe fn of_packed(
        central: &CentralPool,
        descriptor: NonNull<Descriptor>,
        len_and_list: u64,
    ) -> Self {
        Self(Segment { central: NonNull::from(central), descriptor, len_and_list })
    }

    #[inline(always)]
    pub(crate) fn into_segment(self) -> Segment {
        self.0
    }

    pub(crate) fn segment(&self) -> &Segment {
        &self.0
    }

    /// Hands the segment out without a list: its return takes the slow path, to the ledger.
    pub(super) fn track(&mut self) {
        self.0.descriptor().track();
        self.0.len_and_list = pack(self.0.len(), LISTS);
    }
}

impl Segment {
    /// The requested bytes.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        (self.len_and_list >> LIST) as usize
    }

    #[inline(always)]
    fn list(&self) -> usize {
        (self.len_and_list & ((1 << LIST) - 1)) as usize
    }

    /// The segment's descriptor alone, which a function can return in a register.
    pub(crate) fn into_descriptor(self) -> NonNull<Descriptor> {
        self.descriptor
    }

    #[inline(always)]
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.descriptor().base()
    }

    #[inline(always)]
    pub(crate) fn descriptor(&self) -> &Descriptor {
        // SAFETY: the invariant.
        unsafe { self.descriptor.as_ref() }
    }

    /// The address of its descriptor, which tells it from all other segments that are out.
    pub(super) fn name(&self) -> usize {
        self.descriptor.addr().get()
    }

    pub(crate) fn central(&self) -> &CentralPool {
        // SAFETY: the invariant.
        unsafe { self.central.as_ref() }
    }

    pub(crate) fn class(&self) -> Option<Class> {
        self.descriptor().class()
    }

    /// Bytes that were given to the segment.
    pub(crate) fn granted(&self) -> usize {
        match self.class() {
            Some(class) => class.stride(),
            // SAFETY: the invariant.
            None => unsafe { self.central().lock().arena.granted(self.descriptor) },
        }
    }

    /// Whether its memory is pinned, and not plain memory in its place.
    pub(crate) fn pinned(&self) -> bool {
        // SAFETY: the invariant.
        !crate::os::forked() && unsafe { self.central().lock().arena.pinned(self.descriptor) }
    }

    /// A second value for the same segment: the handle and the timeline have one each, and meet in
    /// its state word.
    pub(crate) fn alias(&self) -> Self {
        Self { ..*self }
    }

    /// Changes the requested length, in the statistics too: a segment in flight that is claimed for
    /// another request has that request's length from then on.
    pub(crate) fn rebook(&mut self, len: usize) {
        let mut core = self.central().lock();
        let requested = &mut core.as_is().requested;
        *requested = requested.wrapping_add(len as u64).wrapping_sub(self.len() as u64);
        drop(core);
        self.len_and_list = pack(len, self.list());
    }

    /// Returns the segment to the pool.
    ///
    /// # Safety
    /// The caller owns the segment, no device uses it, and no alias of it is used again.
    #[inline(always)]
    pub(crate) unsafe fn release(self) {
        // SAFETY: the invariant, and this function's contract.
        unsafe { CentralPool::put(self.central, self.descriptor, self.len(), self.list()) }
    }

    /// Takes the segment out of use permanently. Its state is QUARANTINED already.
    pub(crate) fn quarantine(self) {
        // SAFETY: the invariant; no thread takes a segment out of QUARANTINED.
        unsafe { self.central().quarantine(self.descriptor) }
    }
}
