//! Segment descriptors: what the pool knows of a segment, in 32 bytes beside pinned memory.
//!
//! A hit only reads a descriptor, for where the memory is. So different threads may own descriptors
//! that lie in one cache line, and none of these threads slows another down.
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
//! The generation grows by one whenever the segment goes in flight, so a timeline's entry for an
//! earlier flight names no present word. (It wraps after 2^40 flights of one segment: at one a
//! microsecond, twelve days.) The class is fixed; [`LARGE`] stands for a run of its own.
//!
//! # The states, and what leaves them
//!
//! *In flight* a device may use the segment. Two parties know of it then: a *handle* of the
//! program, and a stream's *timeline*, by an entry for each flight ([`crate::stream`]). The handle
//! of a DETACHED segment was dropped. Such a segment can be *claimed* before its flight ends: it is
//! lent again, for later work on the same stream. The timeline completes a flight once an event
//! that covers it is complete.
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
//! HOST says that no device uses the segment. Whether the segment is free, the word does not say:
//! it is free exactly when it is in a list (a thread cache's, a transfer cache's, its run's), and
//! each hit would write such a word twice. (Debug assertions have a field: [`Descriptor::taken`].)
//! In HOST the segment has one owner, the list or the handle, and only the owner changes the word,
//! by plain stores. From FLIGHT on the handle and the completing thread meet, and both use
//! compare-and-swap.

use std::ptr::NonNull;

use super::{LISTS, list_of};
use crate::segment::Class;
use crate::sync::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

/// The states of a segment.
pub(crate) mod state {
    /// Free or checked out.
    pub(crate) const HOST: u16 = 0;
    /// In flight, and its handle is there.
    pub(crate) const FLIGHT: u16 = 2;
    /// In flight, and its handle was dropped: the timeline returns it.
    pub(crate) const DETACHED: u16 = 3;
    /// The device is done, and the segment waits for its handle.
    pub(crate) const COMPLETED: u16 = 4;
    /// In flight, and claimed for later work on the same stream.
    pub(crate) const CLAIMED: u16 = 5;
    /// Never used again: the device cannot be shown to be done with it.
    pub(crate) const QUARANTINED: u16 = 6;

    pub(crate) fn name(state: u16) -> &'static str {
        const NAMES: [&str; 7] = [
            "free or checked out",
            "unknown",
            "in flight",
            "in flight, handle dropped",
            "completed",
            "claimed",
            "quarantined",
        ];
        NAMES.get(usize::from(state)).unwrap_or(&"unknown")
    }
}

/// The class byte of a segment that has a run of its own.
pub(crate) const LARGE: u8 = u8::MAX;

const GENERATION: u64 = 1 << 24;

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
}

/// What the pool knows of one segment.
#[derive(Debug)]
pub(crate) struct Descriptor {
    word: AtomicU64,
    /// First byte of the segment. Fixed.
    base: NonNull<u8>,
    /// The next descriptor in the chain that this one is in. Belongs to that chain.
    link: AtomicPtr<Descriptor>,
    /// The run's index in the arena's table. Fixed.
    run: u32,
    /// Whether the ledger tracks the segment's return.
    tracked: AtomicBool,
    /// Whether the segment is in no list: noted with debug assertions.
    out: AtomicBool,
}

// SAFETY: `base` is only passed on as an address; the memory behind it belongs to the owner of the
// segment by the state word. All other fields are atomics or constant.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    pub(crate) fn new(base: NonNull<u8>, class: Option<Class>, run: u32, generation: u64) -> Self {
        let class = class.map_or(LARGE, |c| c.index() as u8);
        Self {
            word: AtomicU64::new(generation << 24 | u64::from(class) << 16),
            base,
            link: AtomicPtr::new(std::ptr::null_mut()),
            run,
            tracked: AtomicBool::new(false),
            out: AtomicBool::new(false),
        }
    }

    #[inline(always)]
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn run(&self) -> u32 {
        self.run
    }

    /// The word now. Acquire: pairs with the releasing stores and exchanges below, so a thread that
    /// sees a state sees what led to it.
    pub(crate) fn word(&self) -> Word {
        Word(self.word.load(Ordering::Acquire))
    }

    /// The class, which never changes.
    #[inline(always)]
    pub(crate) fn class(&self) -> Option<Class> {
        Word(self.word.load(Ordering::Relaxed)).class()
    }

    /// The index of the segment's list in a thread cache: [`super::LISTS`] for none, as while the
    /// ledger tracks its return.
    pub(crate) fn list(&self) -> usize {
        // Relaxed, here and below: the field belongs to the segment's owner.
        let tracked = self.tracked.load(Ordering::Relaxed);
        self.class().filter(|_| !tracked).map_or(LISTS, list_of)
    }

    /// Sends the segment's return to the slow path until [`Descriptor::untrack`]. For its owner.
    pub(crate) fn track(&self) {
        self.tracked.store(true, Ordering::Relaxed);
    }

    /// Gives a segment its class's list again. For its owner.
    pub(crate) fn untrack(&self) {
        self.tracked.store(false, Ordering::Relaxed);
    }

    /// Notes that the segment goes out of its list. Debug assertions panic if it was out.
    #[inline(always)]
    pub(crate) fn taken(&self) {
        self.note_out(true);
    }

    /// Notes that the segment goes back to a list. Debug assertions panic if it was not out.
    #[inline(always)]
    pub(crate) fn returned(&self) {
        self.note_out(false);
    }

    /// A load and a store: a read-modify-write would hide a missing order from tests.
    #[inline(always)]
    fn note_out(&self, out: bool) {
        if cfg!(debug_assertions) {
            let wrong = if out { "given out that is out" } else { "returned that is not out" };
            assert!(self.out.load(Ordering::Relaxed) != out, "a segment is {wrong} already: {self:?}");
            self.out.store(out, Ordering::Relaxed);
        }
    }

    /// Changes the state to FLIGHT, in the next generation. For the segment's owner. Release: as
    /// for [`Descriptor::set`].
    pub(crate) fn depart(&self) -> Word {
        let flight = Word(self.word.load(Ordering::Relaxed)).with(state::FLIGHT);
        let word = Word(flight.0.wrapping_add(GENERATION));
        self.word.store(word.0, Ordering::Release);
        word
    }

    /// Changes the state to `to`, in the same generation. For the segment's owner. Release: pairs
    /// with the acquire of the load and of the exchange of the party that meets this state.
    #[inline(always)]
    pub(crate) fn set(&self, to: u16) -> Word {
        let word = Word(self.word.load(Ordering::Relaxed)).with(to);
        self.word.store(word.0, Ordering::Release);
        word
    }

    /// Changes the word from exactly `from`, generation included, to the state `to` of the same
    /// generation. If the word differs from `from`, it stays, and the error is its value.
    ///
    /// Acquire and release: the two parties that meet in a state hand the segment, and all that was
    /// done to its memory, to each other through this word.
    pub(crate) fn compare_exchange(&self, from: Word, to: u16) -> Result<Word, Word> {
        let to = from.with(to);
        self.word
            .compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Acquire)
            .map(|_| to)
            .map_err(Word)
    }
}

/// A list of free descriptors of one class, linked through the descriptors. The chain's owner owns
/// them. Links are relaxed: a lock or a releasing exchange hands a chain to another thread.
///
/// # Invariant
/// Every descriptor in a chain is alive: its run is not dissolved while a descriptor of it is
/// anywhere but in the run's own list.
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
        // SAFETY: alive by this function's contract.
        unsafe { descriptor.as_ref() }.link.store(self.head, Ordering::Relaxed);
        self.head = descriptor.as_ptr();
        self.count += 1;
    }

    /// Takes the descriptor at the front.
    pub(crate) fn pop(&mut self) -> Option<NonNull<Descriptor>> {
        let descriptor = NonNull::new(self.head)?;
        // SAFETY: descriptors in a chain are alive (the invariant).
        self.head = unsafe { descriptor.as_ref() }.link.load(Ordering::Relaxed);
        self.count -= 1;
        Some(descriptor)
    }

    /// Splits off the first `count` descriptors, or all if there are fewer.
    pub(crate) fn split(&mut self, count: u32) -> Self {
        let mut front = Self::new();
        while front.count < count {
            let Some(descriptor) = self.pop() else { break };
            // SAFETY: just popped from a chain, so alive, free and in no list.
            unsafe { front.push(descriptor) };
        }
        front
    }

    /// Iterates over the descriptors, front to back. The chain stays as it is.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Descriptor> {
        // SAFETY: descriptors in a chain are alive (the invariant).
        let first = unsafe { self.head.as_ref() };
        // SAFETY: as above.
        std::iter::successors(first, |descriptor| unsafe { descriptor.link.load(Ordering::Relaxed).as_ref() })
    }
}

#[cfg(all(test, not(loom), debug_assertions))]
mod tests {
    use super::*;

    #[test]
    fn each_state_has_its_name() {
        let states = [state::HOST, state::FLIGHT, state::DETACHED, state::COMPLETED, state::CLAIMED];
        let names = ["free or checked out", "in flight", "in flight, handle dropped", "completed", "claimed"];
        assert_eq!(states.map(state::name), names);
        assert_eq!([state::QUARANTINED, 1, 7].map(state::name), ["quarantined", "unknown", "unknown"]);
    }

    fn descriptor(class: Option<Class>, generation: u64) -> Descriptor {
        Descriptor::new(NonNull::dangling(), class, 0, generation)
    }

    #[test]
    fn a_word_has_three_parts() {
        let descriptor = self::descriptor(Class::new(3), 7);
        let word = descriptor.word();
        assert_eq!((word.generation(), word.class(), word.state()), (7, Class::new(3), state::HOST));
        let flight = descriptor.depart();
        assert_eq!(flight, descriptor.word());
        assert_eq!((flight.generation(), flight.class(), flight.state()), (8, Class::new(3), state::FLIGHT));
        assert_eq!(descriptor.compare_exchange(word, state::COMPLETED), Err(flight));
        let completed = descriptor.compare_exchange(flight, state::COMPLETED).unwrap();
        assert_eq!((completed.generation(), completed.state()), (8, state::COMPLETED));
        assert_eq!(descriptor.set(state::HOST), flight.with(state::HOST));
        let large = self::descriptor(None, 0);
        assert_eq!((large.class(), large.list(), large.word().class()), (None, LISTS, None));
        assert_eq!(descriptor.list(), 3);
        descriptor.track();
        assert_eq!(descriptor.list(), LISTS);
    }

    #[test]
    #[should_panic(expected = "given out that is out")]
    fn a_double_take_is_noticed() {
        let descriptor = descriptor(None, 0);
        (0..2).for_each(|_| descriptor.taken());
    }

    #[test]
    #[should_panic(expected = "returned that is not out")]
    fn a_double_return_is_noticed() {
        descriptor(None, 0).returned();
    }
}
