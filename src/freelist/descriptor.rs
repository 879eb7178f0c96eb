//! What the pool knows of one segment: 32 bytes, beside the memory, never in it.
//!
//! A hit only reads a descriptor: where its memory is, and which list it belongs to. So descriptors that lie in one
//! cache line may be in the hands of different threads, and none of them slows another down.
//!
//! # The state word
//!
//! ```text
//!  63                            24 23     16 15      0
//! +--------------------------------+---------+---------+
//! | generation                     | class   | state   |
//! +--------------------------------+---------+---------+
//! ```
//!
//! The generation grows by one whenever the segment goes in flight, so a timeline's entry for an earlier flight names a
//! word that no longer exists. (It wraps after 2^40 flights of one segment: twelve days of nothing else at one per
//! microsecond.) The class is fixed for the descriptor's life; [`LARGE`] stands for a segment that has a run of its
//! own.
//!
//! # The states, and who may leave them
//!
//! ```text
//!                 submit               drop the handle
//!   HOST -------------------> FLIGHT ----------------> DETACHED --.
//!    ^ ^                       |                         |         | claim
//!    | '------- COMPLETED <-----' event seen complete      |         v
//!    |  wait(), or                                       |    CLAIMED --> HOST, FLIGHT, DETACHED
//!    |  drop the handle                                  |
//!    '---------------------------------------------------'  event seen complete
//!   FLIGHT, DETACHED, CLAIMED --> QUARANTINED: the device is lost, or no event can be made. Nothing leaves it.
//! ```
//!
//! HOST says that no device is at it, and not whether it is free or checked out: it is free exactly when it stands in a
//! list (a thread cache's, a transfer cache's, its run's), and a word that said so too would be written twice by each
//! hit. (Builds with debug assertions write it all the same, and fail where a segment is taken or returned twice:
//! [`Descriptor::taken`].) Either way it has one owner, the list or the handle, who changes the word by plain stores.
//! Between FLIGHT and its successors two parties meet, the handle and whoever completes the sequence number, and both
//! use compare-and-swap.

use std::ptr::NonNull;

use super::{LISTS, list_of};
use crate::segment::Class;
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// The states of a segment.
pub(crate) mod state {
    /// Free or checked out.
    pub(crate) const HOST: u16 = 0;
    pub(crate) const FLIGHT: u16 = 2;
    pub(crate) const DETACHED: u16 = 3;
    pub(crate) const COMPLETED: u16 = 4;
    pub(crate) const CLAIMED: u16 = 5;
    pub(crate) const QUARANTINED: u16 = 6;

    pub(crate) fn name(state: u16) -> &'static str {
        match state {
            HOST => "free or checked out",
            FLIGHT => "in flight",
            DETACHED => "in flight, handle dropped",
            COMPLETED => "completed",
            CLAIMED => "claimed",
            QUARANTINED => "quarantined",
            _ => "unknown",
        }
    }
}

/// Stands in for the class of a segment that has a run of its own.
pub(crate) const LARGE: u8 = u8::MAX;

const GENERATION: u64 = 1 << 24;

/// In `list`, with debug assertions: the segment is out.
const OUT: u32 = 1 << 31;

/// A state word's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word(u64);

impl Word {
    pub(crate) fn state(self) -> u16 {
        self.0 as u16
    }
    pub(crate) fn generation(self) -> u64 {
        self.0 >> 24
    }
    #[inline(always)]
    pub(crate) fn class(self) -> Option<Class> {
        Class::new(usize::from((self.0 >> 16) as u8))
    }
    #[inline(always)]
    pub(crate) fn with(self, state: u16) -> Self {
        Self(self.0 & !0xFFFF | u64::from(state))
    }
    /// In flight, as never before.
    fn departed(self) -> Self {
        Self(self.with(state::FLIGHT).0.wrapping_add(GENERATION))
    }
}

/// What the pool knows of one segment.
#[derive(Debug)]
pub(crate) struct Descriptor {
    word: AtomicU64,
    /// First byte of the segment. Fixed.
    base: NonNull<u8>,
    /// The next descriptor of whichever list this one is in. Belongs to that list.
    link: AtomicPtr<Descriptor>,
    /// The run in the arena's table. Fixed.
    run: u32,
    /// Which list of a thread cache it belongs to; [`super::LISTS`] if to none. Fixed but for [`OUT`].
    list: AtomicU32,
}

// SAFETY: `base` is only handed on as an address; the memory behind it belongs to whoever owns the segment by the state
// word. All other fields are atomics or constant.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    pub(crate) fn new(base: NonNull<u8>, class: Option<Class>, run: u32, generation: u64) -> Self {
        let list = class.map_or(LISTS, list_of) as u32;
        let class = class.map_or(LARGE, |c| c.index() as u8);
        Self {
            word: AtomicU64::new(generation << 24 | u64::from(class) << 16),
            base,
            link: AtomicPtr::new(std::ptr::null_mut()),
            run,
            list: AtomicU32::new(list),
        }
    }

    #[inline(always)]
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn run(&self) -> u32 {
        self.run
    }

    /// The word as it is. Acquire: pairs with the releasing exchanges below, so whoever sees a state sees what led to
    /// it.
    pub(crate) fn word(&self) -> Word {
        Word(self.word.load(Ordering::Acquire))
    }

    /// The class, which never changes.
    #[inline(always)]
    pub(crate) fn class(&self) -> Option<Class> {
        Word(self.word.load(Ordering::Relaxed)).class()
    }

    /// Which list of a thread cache it belongs to: at most [`super::LISTS`], which stands for none.
    pub(crate) fn list(&self) -> usize {
        // Relaxed, here and below: what is fixed was there before anyone had the descriptor, and the bit is its
        // owner's.
        (self.list.load(Ordering::Relaxed) & !OUT) as usize
    }

    /// From a list into the hands of whoever asked. With debug assertions it fails where the segment was out already.
    ///
    /// By a load and a store, since a read-modify-write would order what surrounds it, and hide from tests where that
    /// needs an order of its own.
    #[inline(always)]
    pub(crate) fn taken(&self) {
        if cfg!(debug_assertions) {
            let list = self.list.load(Ordering::Relaxed);
            assert!(list & OUT == 0, "a segment is given out that is out: {self:?}");
            self.list.store(list | OUT, Ordering::Relaxed);
        }
    }

    /// Back to a list. With debug assertions it fails where the segment was back already.
    #[inline(always)]
    pub(crate) fn returned(&self) {
        if cfg!(debug_assertions) {
            let list = self.list.load(Ordering::Relaxed);
            assert!(list & OUT != 0, "a segment is returned that is not out: {self:?}");
            self.list.store(list & !OUT, Ordering::Relaxed);
        }
    }

    /// To FLIGHT, in the next generation, by the one who owns the segment. Release: as for [`Descriptor::set`].
    pub(crate) fn depart(&self) -> Word {
        let word = Word(self.word.load(Ordering::Relaxed)).departed();
        self.word.store(word.0, Ordering::Release);
        word
    }

    /// To `to`, by the one who owns the segment. Release: pairs with the exchanges of whoever meets it there.
    #[inline(always)]
    pub(crate) fn set(&self, to: u16) -> Word {
        let word = Word(self.word.load(Ordering::Relaxed)).with(to);
        self.word.store(word.0, Ordering::Release);
        word
    }

    /// From exactly `from`, generation included, to the same generation's state `to`; else what is there instead.
    ///
    /// Acquire and release: the two parties that meet in a state hand the segment, and all that was done to its memory,
    /// to each other through this word.
    pub(crate) fn compare_exchange(&self, from: Word, to: u16) -> Result<Word, Word> {
        let to = from.with(to);
        self.word
            .compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Acquire)
            .map(|_| to)
            .map_err(Word)
    }

    fn next(&self) -> *mut Self {
        self.link.load(Ordering::Relaxed)
    }

    fn set_next(&self, next: *mut Self) {
        self.link.store(next, Ordering::Relaxed);
    }
}

/// A list of free descriptors of one class that somebody owns. Links are plain (relaxed): who hands a chain to another
/// thread does so through a lock or a releasing exchange.
///
/// # Invariant
/// Every descriptor in a chain is alive: its run is not dissolved while a descriptor of it is anywhere but in the run's
/// own list.
#[derive(Debug)]
#[must_use = "dropping a chain loses its segments"]
pub(crate) struct Chain {
    head: *mut Descriptor,
    count: u32,
}

// SAFETY: a chain owns its descriptors, and descriptors are Send.
unsafe impl Send for Chain {}

impl Chain {
    pub(crate) const fn new() -> Self {
        Self { head: std::ptr::null_mut(), count: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.count
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds a descriptor at the front.
    ///
    /// # Safety
    /// The descriptor is alive, free, and in no list.
    pub(crate) unsafe fn push(&mut self, descriptor: NonNull<Descriptor>) {
        // SAFETY: alive by the caller's word.
        unsafe { descriptor.as_ref() }.set_next(self.head);
        self.head = descriptor.as_ptr();
        self.count += 1;
    }

    /// Takes the descriptor at the front.
    pub(crate) fn pop(&mut self) -> Option<NonNull<Descriptor>> {
        let descriptor = NonNull::new(self.head)?;
        // SAFETY: descriptors in a chain are alive (the invariant).
        self.head = unsafe { descriptor.as_ref() }.next();
        self.count -= 1;
        Some(descriptor)
    }

    /// Splits off the first `count` descriptors.
    pub(crate) fn split(&mut self, count: u32) -> Self {
        let mut front = Self::new();
        while front.count < count {
            let Some(descriptor) = self.pop() else { break };
            // SAFETY: just popped from a chain, so alive, free and in no list.
            unsafe { front.push(descriptor) };
        }
        front
    }

    /// Every descriptor, front to back, without taking any.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Descriptor> {
        // SAFETY: descriptors in a chain are alive (the invariant).
        let first = unsafe { self.head.as_ref() };
        // SAFETY: as above.
        std::iter::successors(first, |descriptor| unsafe { descriptor.next().as_ref() })
    }
}

#[cfg(all(test, not(loom), debug_assertions))]
mod tests {
    use super::*;

    fn descriptor() -> Descriptor {
        Descriptor::new(NonNull::dangling(), Class::new(3), 0, 0)
    }

    #[test]
    fn a_segment_comes_and_goes() {
        let descriptor = descriptor();
        for _ in 0..2 {
            descriptor.taken();
            assert_eq!(descriptor.list(), 3, "whether it is out or not");
            descriptor.returned();
            assert_eq!(descriptor.list(), 3);
        }
    }

    #[test]
    #[should_panic(expected = "given out that is out")]
    fn a_double_take_is_noticed() {
        let descriptor = descriptor();
        descriptor.taken();
        descriptor.taken();
    }

    #[test]
    #[should_panic(expected = "returned that is not out")]
    fn a_double_return_is_noticed() {
        let descriptor = descriptor();
        descriptor.taken();
        descriptor.returned();
        descriptor.returned();
    }
}
