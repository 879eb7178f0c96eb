//! What a return on another thread takes, as bare copies that [`super::relay`] adds part by part.
//!
//! Memory is the pool's own, as many segments as go round there, so that pages and caches are alike.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize};

use crate::segment::Class;
use parking_lot::Mutex;
use pinpool::PinnedBuf;

use super::floor::{Copied, Out, Owned, SLOT, Slot};
use super::stores::{PLAIN, pool};

/// As many as a pool of 1 GiB lets a thread keep of that size, and half of it.
const LIMIT: usize = 63;
const HALF: usize = LIMIT.div_ceil(2);
/// As many as go round: a queue of 256, two lists, and some on their way back.
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

// SAFETY: addresses, and memory that nobody uses but through them.
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

/// Lists that have nothing to do with each other: the maker's is filled from a cycle, the dropper's is just emptied.
pub struct Apart<const PARTS: u32> {
    copy: Copied<PARTS>,
    cycle: Cycle,
}

impl<const PARTS: u32> Apart<PARTS> {
    pub fn new() -> Self {
        assert_eq!(PARTS & SLOT, 0, "the cycle has no slots");
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

/// Like a transfer cache's.
#[repr(align(128))]
struct Hook {
    state: AtomicU32,
    count: AtomicUsize,
    at: [AtomicPtr<u8>; HALF],
}

impl Hook {
    fn enter(&self, from: u32) -> bool {
        self.state.load(Relaxed) == from
            && self.state.compare_exchange(from, MOVING, Acquire, Relaxed).is_ok()
    }
}

/// An address, of what is kept.
struct At(*mut u8);

// SAFETY: only an address.
unsafe impl Send for At {}

/// Lists between which halves go back.
pub struct Hooked<const PARTS: u32> {
    copy: Copied<PARTS>,
    hooks: [Hook; 8],
    /// What has not gone out yet, or found no slot.
    stock: Mutex<Vec<At>>,
    _slots: Vec<Slot>,
    _memory: Vec<PinnedBuf>,
}

impl<const PARTS: u32> Hooked<PARTS> {
    pub fn new() -> Self {
        let mut memory = memory(ROUND * 2);
        let bases = memory.iter_mut().map(PinnedBuf::as_mut_ptr);
        let slots: Vec<Slot> = bases.map(Slot::new).collect();
        let stock = match PARTS & SLOT {
            0 => memory.iter_mut().map(|buf| At(buf.as_mut_ptr())).collect(),
            _ => slots.iter().map(|slot| At(std::ptr::from_ref(slot).cast_mut().cast())).collect(),
        };
        let hook = |_| Hook {
            state: AtomicU32::new(EMPTY),
            count: AtomicUsize::new(0),
            at: std::array::from_fn(|_| AtomicPtr::new(std::ptr::null_mut())),
        };
        let hooks = std::array::from_fn(hook);
        Self { copy: Copied::new(PLAIN), hooks, stock: Mutex::new(stock), _slots: slots, _memory: memory }
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
        if let Some(hook) = self.hooks.iter().find(|hook| hook.enter(FULL)) {
            let count = hook.count.load(Relaxed);
            owned.fill(list(), hook.at[..count].iter().map(|at| at.load(Relaxed)));
            hook.state.store(EMPTY, Release);
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
        match self.hooks.iter().find(|hook| hook.enter(EMPTY)) {
            Some(hook) => {
                hook.count.store(HALF, Relaxed);
                hook.at.iter().zip(half).for_each(|(place, at)| place.store(at, Relaxed));
                hook.state.store(FULL, Release);
            }
            None => self.stock.lock().extend(half.map(At)),
        }
    }
}

/// A thread's lists, which go back to the stock at its end.
struct Returned<'a, const PARTS: u32> {
    home: &'a Hooked<PARTS>,
    owned: Owned,
}

impl<const PARTS: u32> Drop for Returned<'_, PARTS> {
    fn drop(&mut self) {
        let count = self.owned.count(list());
        self.home.stock.lock().extend(self.owned.drain(list(), count).map(At));
    }
}
