//! What the pool knows of one segment: 32 bytes, beside the memory, never in it.
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
//! The generation grows by one with each checkout, so a token or a timeline entry from an earlier checkout names a word
//! that no longer exists. (It wraps after 2^40 checkouts of one segment: twelve days of nothing else at one per
//! microsecond.) The class is fixed for the slot's life; [`LARGE`] stands for a segment that has a run of its own.
//!
//! # The states, and who may leave them
//!
//! ```text
//!            take               submit               drop the handle
//!   FREE ----------> OUT ------------------> FLIGHT ----------------> DETACHED --.
//!    ^                ^ ^                      |                         |       | claim
//!    |     return     | '------- LANDED <------' mark seen complete      |       v
//!    '----------------'   wait()    |                                    |    CLAIMED --> OUT, FLIGHT, DETACHED
//!    ^------------------------------'  drop the handle                   |
//!    '-------------------------------------------------------------------'  mark seen complete
//!   FLIGHT, DETACHED, CLAIMED --> QUARANTINED: the device is lost, or no mark can be made. Nothing leaves it.
//! ```
//!
//! FREE and OUT have one owner each (a list, a handle), who changes the word by plain stores. Between FLIGHT and its
//! successors two parties meet, the handle and whoever completes the tick, and both use compare-and-swap.

use std::ptr::NonNull;

use crate::segment::Class;
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// The states of a segment.
pub(crate) mod state {
    pub(crate) const FREE: u16 = 0;
    pub(crate) const OUT: u16 = 1;
    pub(crate) const FLIGHT: u16 = 2;
    pub(crate) const DETACHED: u16 = 3;
    pub(crate) const LANDED: u16 = 4;
    pub(crate) const CLAIMED: u16 = 5;
    pub(crate) const QUARANTINED: u16 = 6;

    pub(crate) fn name(state: u16) -> &'static str {
        match state {
            FREE => "free",
            OUT => "checked out",
            FLIGHT => "in flight",
            DETACHED => "in flight, handle dropped",
            LANDED => "landed",
            CLAIMED => "claimed",
            QUARANTINED => "quarantined",
            _ => "unknown",
        }
    }
}

/// Stands in for the class of a segment that has a run of its own.
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
    /// From FREE, which is 0, to OUT in the next generation: one addition.
    #[inline(always)]
    fn taken(self) -> Self {
        debug_assert!(self.state() == state::FREE, "{} segment taken", state::name(self.state()));
        Self(self.0.wrapping_add(GENERATION | state::OUT as u64))
    }
    /// From OUT to FREE: one subtraction.
    #[inline(always)]
    fn returned(self) -> Self {
        debug_assert!(self.state() == state::OUT, "{} segment returned", state::name(self.state()));
        Self(self.0.wrapping_sub(state::OUT as u64))
    }
}

/// What the pool knows of one segment.
#[derive(Debug)]
pub(crate) struct Slot {
    word: AtomicU64,
    /// First byte of the segment. Fixed.
    base: NonNull<u8>,
    /// The next slot of whichever list this one is in. Belongs to that list.
    link: AtomicPtr<Slot>,
    /// The run in the arena's table. Fixed.
    run: u32,
    /// Slots in the chain that starts here, while it hangs in a rack.
    chain: AtomicU32,
}

// SAFETY: `base` is only handed on as an address; the memory behind it belongs to whoever owns the segment by the state
// word. All other fields are atomics or constant.
unsafe impl Send for Slot {}
// SAFETY: as above.
unsafe impl Sync for Slot {}

impl Slot {
    pub(crate) fn new(base: NonNull<u8>, class: Option<Class>, run: u32, generation: u64) -> Self {
        let class = class.map_or(LARGE, |c| c.index() as u8);
        Self {
            word: AtomicU64::new(generation << 24 | u64::from(class) << 16),
            base,
            link: AtomicPtr::new(std::ptr::null_mut()),
            run,
            chain: AtomicU32::new(0),
        }
    }

    #[inline(always)]
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn run(&self) -> u32 {
        self.run
    }

    /// The word as it is. Acquire: pairs with the releasing exchanges below, so whoever sees a state sees what led to it.
    pub(crate) fn word(&self) -> Word {
        Word(self.word.load(Ordering::Acquire))
    }

    /// The class, which never changes.
    #[inline(always)]
    pub(crate) fn class(&self) -> Option<Class> {
        Word(self.word.load(Ordering::Relaxed)).class()
    }

    /// Has the segment's return take the slow path. Whether it will.
    pub(crate) fn watch(&self) -> bool {
        self.class().is_none()
    }

    /// FREE to OUT, by the one who just took it out of a list. Relaxed: the owner is alone with it.
    #[inline(always)]
    pub(crate) fn mark_taken(&self) -> Word {
        let word = Word(self.word.load(Ordering::Relaxed)).taken();
        self.word.store(word.0, Ordering::Relaxed);
        word
    }

    /// OUT to FREE, by its owner, who is about to put it into a list. Release, as for [`Slot::set`].
    #[inline(always)]
    pub(crate) fn mark_returned(&self) {
        let word = Word(self.word.load(Ordering::Relaxed)).returned();
        self.word.store(word.0, Ordering::Release);
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
    pub(crate) fn exchange(&self, from: Word, to: u16) -> Result<Word, Word> {
        let to = from.with(to);
        self.word
            .compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Acquire)
            .map(|_| to)
            .map_err(Word)
    }

    #[inline(always)]
    pub(super) fn next(&self) -> *mut Self {
        self.link.load(Ordering::Relaxed)
    }

    #[inline(always)]
    pub(super) fn set_next(&self, next: *mut Self) {
        self.link.store(next, Ordering::Relaxed);
    }

    pub(super) fn chained(&self) -> u32 {
        self.chain.load(Ordering::Relaxed)
    }

    pub(super) fn set_chained(&self, count: u32) {
        self.chain.store(count, Ordering::Relaxed);
    }
}

/// A list of free slots of one class that somebody owns. Links are plain (relaxed): who hands a chain to another thread
/// does so through a lock or a releasing exchange.
///
/// # Invariant
/// Every slot in a chain is alive: its run is not dissolved while a slot of it is anywhere but in the run's own list.
#[derive(Debug)]
#[must_use = "dropping a chain loses its segments"]
pub(crate) struct Chain {
    pub(super) head: *mut Slot,
    pub(super) count: u32,
}

// SAFETY: a chain owns its slots, and slots are Send.
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

    /// Adds a slot at the front.
    ///
    /// # Safety
    /// The slot is alive, free, and in no list.
    pub(crate) unsafe fn push(&mut self, slot: NonNull<Slot>) {
        // SAFETY: alive by the caller's word.
        unsafe { slot.as_ref() }.set_next(self.head);
        self.head = slot.as_ptr();
        self.count += 1;
    }

    /// Takes the slot at the front.
    pub(crate) fn pop(&mut self) -> Option<NonNull<Slot>> {
        let slot = NonNull::new(self.head)?;
        // SAFETY: slots in a chain are alive (the invariant).
        self.head = unsafe { slot.as_ref() }.next();
        self.count -= 1;
        Some(slot)
    }

    /// Splits off the first `count` slots.
    pub(crate) fn split(&mut self, count: u32) -> Self {
        let mut front = Self::new();
        while front.count < count {
            let Some(slot) = self.pop() else { break };
            // SAFETY: just popped from a chain, so alive, free and in no list.
            unsafe { front.push(slot) };
        }
        front
    }

    /// Every slot, front to back, without taking any.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Slot> {
        // SAFETY: slots in a chain are alive (the invariant).
        let first = unsafe { self.head.as_ref() };
        // SAFETY: as above.
        std::iter::successors(first, |slot| unsafe { slot.next().as_ref() })
    }
}
