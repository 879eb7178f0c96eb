//! Bare copies of the work of a return on another thread, for [`super::relay`], which adds one part after the other.
//!
//! The memory is a pool's, with as many segments as circulate in the pool's own row, so that pages and caches are
//! alike.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize};

use crate::segment::Class;
use parking_lot::Mutex;
use pinpool::PinnedBuf;

use super::floor::{Copied, DESCRIPTOR, Descriptor, Out, Owned};
use super::stores::{PLAIN, pool};

/// The limit of a thread cache for this size in a pool of 1 GiB, and half of it.
const LIMIT: usize = 63;
const HALF: usize = LIMIT.div_ceil(2);
/// The segments that circulate: a queue of 256, two lists, and some on their way back.
const ROUND: usize = 512;

/// Segments of the pool's memory.
fn memory(count: usize) -> Vec<PinnedBuf> {
    let pool = pool(count * (PLAIN[0] + 64) * 9 / 8);
    (0..count).map(|_| pool.checkout(PLAIN[0]).expect("the pool is large enough")).collect()
}

fn list() -> usize {
    Class::of(PLAIN[0]).expect("a class").index()
}

/// One buffer after the other.
pub struct Cycle {
    bases: Vec<*mut u8>,
    _memory: Vec<PinnedBuf>,
}

// SAFETY: addresses, and memory that is only used through them.
unsafe impl Sync for Cycle {}

impl Cycle {
    pub fn new() -> Self {
        let mut memory = memory(ROUND);
        Self { bases: memory.iter_mut().map(PinnedBuf::as_mut_ptr).collect(), _memory: memory }
    }

    pub fn turn(&self) -> impl FnMut() -> *mut u8 {
        let mut at = 0;
        move || {
            at = (at + 1) % ROUND;
            self.bases[at]
        }
    }
}

/// Two lists that are not connected: the maker's is filled from a cycle, the dropper's is just emptied.
pub struct Apart<const PARTS: u32> {
    copy: Copied<PARTS>,
    cycle: Cycle,
}

impl<const PARTS: u32> Apart<PARTS> {
    pub fn new() -> Self {
        assert_eq!(PARTS & DESCRIPTOR, 0, "the cycle has no descriptors");
        Self { copy: Copied::new(PLAIN), cycle: Cycle::new() }
    }

    pub fn maker(&self) -> impl FnMut() -> Out {
        let (list, owned) = (list(), Owned::empty(list(), LIMIT));
        let mut at = 0;
        move || loop {
            if let Some(out) = self.copy.try_take(&owned, 0) {
                return out;
            }
            at = (at + HALF) % ROUND;
            let more = &self.cycle.bases[at..(at + HALF).min(ROUND)];
            owned.fill(list, more.iter().copied());
        }
    }

    pub fn dropper(&self) -> impl FnMut(Out) {
        let (list, owned) = (list(), Owned::empty(list(), LIMIT));
        move |mut out| {
            while let Err(back) = self.copy.try_give(&owned, out) {
                out = back;
                owned.drain(list, HALF).for_each(drop);
            }
        }
    }
}

const EMPTY: u32 = 0;
const MOVING: u32 = 1;
const FULL: u32 = 2;

/// Like a slot of a transfer cache.
#[repr(align(128))]
struct TransferSlot {
    state: AtomicU32,
    count: AtomicUsize,
    at: [AtomicPtr<u8>; HALF],
}

impl TransferSlot {
    fn enter(&self, from: u32) -> bool {
        self.state.load(Relaxed) == from
            && self.state.compare_exchange(from, MOVING, Acquire, Relaxed).is_ok()
    }
}

/// The address of a segment, or of its descriptor.
struct At(*mut u8);

// SAFETY: only an address.
unsafe impl Send for At {}

/// Two lists, with transfer slots through which halves of the dropper's list go back to the maker's.
pub struct Joined<const PARTS: u32> {
    copy: Copied<PARTS>,
    slots: [TransferSlot; 8],
    /// Segments that were not taken yet, or found no free slot.
    stock: Mutex<Vec<At>>,
    _descriptors: Vec<Descriptor>,
    _memory: Vec<PinnedBuf>,
}

impl<const PARTS: u32> Joined<PARTS> {
    pub fn new() -> Self {
        let mut memory = memory(ROUND * 2);
        let bases = memory.iter_mut().map(PinnedBuf::as_mut_ptr);
        let descriptors: Vec<Descriptor> = bases.map(Descriptor::new).collect();
        let stock = match PARTS & DESCRIPTOR {
            0 => memory.iter_mut().map(|buf| At(buf.as_mut_ptr())).collect(),
            _ => descriptors
                .iter()
                .map(|descriptor| At(std::ptr::from_ref(descriptor).cast_mut().cast()))
                .collect(),
        };
        let slot = |_| TransferSlot {
            state: AtomicU32::new(EMPTY),
            count: AtomicUsize::new(0),
            at: std::array::from_fn(|_| AtomicPtr::new(std::ptr::null_mut())),
        };
        let slots = std::array::from_fn(slot);
        Self {
            copy: Copied::new(PLAIN),
            slots,
            stock: Mutex::new(stock),
            _descriptors: descriptors,
            _memory: memory,
        }
    }

    pub fn maker(&self) -> impl FnMut() -> Out {
        let owned = Returned { home: self, owned: Owned::empty(list(), LIMIT) };
        move || loop {
            if let Some(out) = self.copy.try_take(&owned.owned, 0) {
                return out;
            }
            self.refill(&owned.owned);
        }
    }

    pub fn dropper(&self) -> impl FnMut(Out) {
        let owned = Returned { home: self, owned: Owned::empty(list(), LIMIT) };
        move |mut out| {
            while let Err(back) = self.copy.try_give(&owned.owned, out) {
                out = back;
                self.make_room(&owned.owned);
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn refill(&self, owned: &Owned) {
        if let Some(slot) = self.slots.iter().find(|slot| slot.enter(FULL)) {
            let count = slot.count.load(Relaxed);
            owned.fill(list(), slot.at[..count].iter().map(|at| at.load(Relaxed)));
            slot.state.store(EMPTY, Release);
            return;
        }
        let mut stock = self.stock.lock();
        let from = stock.len() - HALF;
        owned.fill(list(), stock.drain(from..).map(|at| at.0));
    }

    #[cold]
    #[inline(never)]
    fn make_room(&self, owned: &Owned) {
        let half = owned.drain(list(), HALF);
        match self.slots.iter().find(|slot| slot.enter(EMPTY)) {
            Some(slot) => {
                slot.count.store(HALF, Relaxed);
                slot.at.iter().zip(half).for_each(|(place, at)| place.store(at, Relaxed));
                slot.state.store(FULL, Release);
            }
            None => self.stock.lock().extend(half.map(At)),
        }
    }
}

/// A thread's lists; its segments go back to the stock at the thread's end.
struct Returned<'a, const PARTS: u32> {
    home: &'a Joined<PARTS>,
    owned: Owned,
}

impl<const PARTS: u32> Drop for Returned<'_, PARTS> {
    fn drop(&mut self) {
        let count = self.owned.count(list());
        self.home.stock.lock().extend(self.owned.drain(list(), count).map(At));
    }
}
