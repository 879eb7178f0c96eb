//! The floor: a bare copy of what a hit does, with its parts taken away one at a time.
//!
//! It shows what each part costs, and what is left when all that makes the pool safe to share is gone. Parts overlap in
//! the processor, so a part costs less where others are still there. The copy is one of the stores that the patterns
//! run on, so the same is known of a pair at a time (`floor`) and of 64 live buffers (`live_parts`). [`super::relay`]
//! has one thread take and another give (`cross_thread_return`).

use std::cell::Cell;
use std::ptr::null;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::Relaxed, compiler_fence};
use std::sync::atomic::{Ordering, Ordering::Acquire, Ordering::Release};

use crate::segment::{CLASSES, Class};

use super::Contender;
use super::pair::{Work, entry};
use super::stores::{PLAIN, PinpoolPlain, Store, TwoFetchAdds, pool, touch};

/// The parts: the class of a length; the busy word; the pass; requested bytes; the thread's thread cache from a
/// thread-local; where a segment is, from what is known of it, and not from the list.
pub const CLASS: u32 = 1;
pub const BUSY: u32 = 2;
pub const PASS: u32 = 4;
pub const BYTES: u32 = 8;
pub const LOCAL: u32 = 16;
pub const SLOT: u32 = 32;
pub const ALL: u32 = 63;

/// More than are out at a time.
const EACH: usize = 100;

/// Stands for the pool in thread caches.
static POOL: u8 = 0;

#[repr(align(32))]
struct List {
    stack: AtomicPtr<AtomicPtr<u8>>,
    came: AtomicU64,
    went: AtomicU64,
    limit: AtomicU64,
}

#[repr(C, align(128))]
struct Shard {
    pass: AtomicPtr<u8>,
    busy: AtomicU32,
    requested: AtomicU64,
    returned: AtomicU64,
    lists: [List; CLASSES],
}

/// What is known of a segment.
#[repr(align(32))]
pub struct Slot {
    base: AtomicPtr<u8>,
}

impl Slot {
    pub fn new(base: *mut u8) -> Self {
        Self { base: AtomicPtr::new(base) }
    }
}

thread_local! {
    static CURRENT: Cell<*const Shard> = const { Cell::new(null()) };
}

#[inline(always)]
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(n), Relaxed);
}

/// A buffer, as large as the pool's.
pub struct Out {
    pool: *const u8,
    at: *mut u8,
    tag: u64,
    written: usize,
}

// SAFETY: two addresses and two numbers, of no thread's own.
unsafe impl Send for Out {}

/// A thread's thread cache, full, with all that hangs on it.
pub struct Owned {
    shard: Box<Shard>,
    _stacks: Vec<Box<[AtomicPtr<u8>]>>,
    _slots: Vec<Slot>,
    _memory: Vec<Vec<u8>>,
}

impl Owned {
    /// This thread's from here on, with the topmost of each list found without a subtraction; `limit` each.
    fn new(lists: &[(usize, Vec<*mut u8>)], limit: usize) -> Self {
        let mut cells: [List; CLASSES] = std::array::from_fn(|_| List {
            stack: AtomicPtr::new(std::ptr::null_mut()),
            came: AtomicU64::new(0),
            went: AtomicU64::new(0),
            limit: AtomicU64::new(limit as u64),
        });
        let mut stacks = Vec::new();
        for (list, at) in lists {
            let rest = std::iter::repeat_n(null::<u8>().cast_mut(), limit - at.len());
            let stack: Box<[AtomicPtr<u8>]> = [null::<u8>().cast_mut()]
                .into_iter()
                .chain(at.iter().copied())
                .chain(rest)
                .map(AtomicPtr::new)
                .collect();
            cells[*list].stack = AtomicPtr::new(stack.as_ptr().cast_mut());
            cells[*list].came = AtomicU64::new(at.len() as u64);
            stacks.push(stack);
        }
        let shard = Box::new(Shard {
            pass: AtomicPtr::new((&raw const POOL).cast_mut()),
            busy: AtomicU32::new(0),
            requested: AtomicU64::new(0),
            returned: AtomicU64::new(0),
            lists: cells,
        });
        CURRENT.set(&raw const *shard);
        Self { shard, _stacks: stacks, _slots: Vec::new(), _memory: Vec::new() }
    }

    /// One with room for so many of a class, and nothing in it.
    pub fn empty(list: usize, limit: usize) -> Self {
        Self::new(&[(list, Vec::new())], limit)
    }

    /// How many are in a list.
    pub fn count(&self, list: usize) -> usize {
        let List { came, went, .. } = &self.shard.lists[list];
        came.load(Relaxed).wrapping_sub(went.load(Relaxed)) as usize
    }

    /// Puts these into a list that has room for them.
    pub fn fill(&self, list: usize, from: impl ExactSizeIterator<Item = *mut u8>) {
        let List { stack, came, limit, .. } = &self.shard.lists[list];
        let count = self.count(list) as u64;
        let more = from.len() as u64;
        assert!(count + more <= limit.load(Relaxed));
        for (at, place) in (count as usize + 1..).zip(from) {
            // SAFETY: the stack has that many places, and one.
            unsafe { &*stack.load(Relaxed).add(at) }.store(place, Relaxed);
        }
        add(came, more);
    }

    /// Takes so many off a list that has them.
    pub fn drain(&self, list: usize, count: usize) -> impl Iterator<Item = *mut u8> {
        let List { stack, went, .. } = &self.shard.lists[list];
        let have = self.count(list);
        assert!(count <= have);
        add(went, count as u64);
        // SAFETY: as above.
        (have - count + 1..=have).map(|at| unsafe { &*stack.load(Relaxed).add(at) }.load(Relaxed))
    }
}

/// The copy with these parts.
pub struct Copied<const PARTS: u32> {
    sizes: &'static [usize],
    /// The lists of the sizes, for who does not work them out.
    lists: Vec<usize>,
}

impl<const PARTS: u32> Copied<PARTS> {
    pub fn new(sizes: &'static [usize]) -> Self {
        Self { sizes, lists: sizes.iter().filter_map(|len| Class::of(*len)).map(Class::index).collect() }
    }

    /// Into the thread cache and out of it around `f`.
    #[inline(always)]
    fn inside<R>(local: &Owned, pool: *const u8, f: impl FnOnce(&Shard) -> Option<R>) -> Option<R> {
        let shard = if PARTS & LOCAL == 0 {
            &*local.shard
        } else {
            // SAFETY: set by `local`, on this thread, to the thread cache that `local` keeps.
            unsafe { &*CURRENT.get() }
        };
        if PARTS & BUSY != 0 {
            shard.busy.store(1, Relaxed);
            compiler_fence(Ordering::SeqCst);
        }
        let passes = PARTS & PASS == 0 || std::ptr::eq(shard.pass.load(Acquire), pool);
        let result = if passes { f(shard) } else { None };
        if PARTS & BUSY != 0 {
            shard.busy.store(0, Release);
        }
        result
    }

    /// A hit, if there is one.
    #[inline(always)]
    pub fn try_take(&self, local: &Owned, size: usize) -> Option<Out> {
        let len = self.sizes[size];
        let list = match PARTS & CLASS {
            0 => self.lists[size],
            _ => Class::of(len).expect("a class").index(),
        };
        let pool = &raw const POOL;
        let at = Self::inside(local, pool, |shard| {
            // SAFETY: there is one for each class.
            let cell = unsafe { shard.lists.get_unchecked(list) };
            let went = cell.went.load(Relaxed);
            let count = cell.came.load(Relaxed).wrapping_sub(went);
            if count == 0 {
                return None;
            }
            // SAFETY: the stack has more places than that.
            let at = unsafe { &*cell.stack.load(Relaxed).add(count as usize) }.load(Relaxed);
            cell.went.store(went.wrapping_add(1), Relaxed);
            if PARTS & BYTES != 0 {
                add(&shard.requested, len as u64);
            }
            Some(at)
        })?;
        let base = match PARTS & SLOT {
            0 => at,
            // SAFETY: a slot, which is kept by whoever filled the lists.
            _ => unsafe { &*at.cast::<Slot>() }.base.load(Relaxed),
        };
        // SAFETY: ours, and longer than 0.
        unsafe { touch(base) };
        Some(Out { pool, at, tag: (len as u64) << 8 | list as u64, written: 0 })
    }

    /// A return, if the list has room.
    #[inline(always)]
    pub fn try_give(&self, local: &Owned, out: Out) -> Result<(), Out> {
        let Out { pool, at, tag, written } = out;
        debug_assert_eq!(written, 0);
        let kept = Self::inside(local, pool, |shard| {
            // SAFETY: as above.
            let cell = unsafe { shard.lists.get_unchecked((tag & 255) as usize) };
            let came = cell.came.load(Relaxed);
            let count = came.wrapping_sub(cell.went.load(Relaxed));
            if count >= cell.limit.load(Relaxed) {
                return None;
            }
            // SAFETY: as above.
            unsafe { &*cell.stack.load(Relaxed).add(count as usize + 1) }.store(at, Relaxed);
            cell.came.store(came.wrapping_add(1), Relaxed);
            if PARTS & BYTES != 0 {
                add(&shard.returned, tag >> 8);
            }
            Some(())
        });
        kept.ok_or(Out { pool, at, tag, written })
    }
}

impl<const PARTS: u32> Store for Copied<PARTS> {
    type Local = Owned;
    type Buf = Out;

    fn local(&self) -> Owned {
        let memory: Vec<Vec<u8>> = self.sizes.iter().map(|len| vec![0; (len + 64) * EACH + 64]).collect();
        let bases = |size: usize| {
            let start: *const u8 = memory[size].as_ptr();
            let start = start.cast_mut().wrapping_add(start.align_offset(64));
            (0..EACH).map(move |i| start.wrapping_add((self.sizes[size] + 64) * i))
        };
        let slots: Vec<Slot> =
            (0..self.sizes.len()).flat_map(bases).map(|at| Slot { base: AtomicPtr::new(at) }).collect();
        let stacks: Vec<(usize, Vec<*mut u8>)> = (self.lists.iter().enumerate())
            .map(|(size, list)| {
                let slots = slots[size * EACH..][..EACH].iter();
                let at = match PARTS & SLOT {
                    0 => bases(size).collect(),
                    _ => slots.map(|slot| std::ptr::from_ref(slot).cast_mut().cast()).collect(),
                };
                (*list, at)
            })
            .collect();
        Owned { _slots: slots, _memory: memory, ..Owned::new(&stacks, EACH) }
    }

    #[inline(always)]
    fn take(&self, local: &mut Owned, size: usize) -> Out {
        self.try_take(local, size).expect("there are more than are out")
    }

    #[inline(always)]
    fn give(&self, local: &mut Owned, out: Out) {
        self.try_give(local, out).map_err(|_| ()).expect("there is room for all");
    }
}

pub fn contenders() -> Vec<Contender> {
    fn copy<const PARTS: u32>(name: &'static str) -> Contender {
        entry(name, Copied::<PARTS>::new(PLAIN), Work::Pair, 1)
    }
    vec![
        entry("two_fetch_adds", TwoFetchAdds, Work::Pair, 1),
        entry("pinpool", PinpoolPlain { pool: pool(2 << 30), len: PLAIN[0] }, Work::Pair, 1),
        copy::<ALL>("all_parts"),
        copy::<{ ALL & !CLASS }>("no_class"),
        copy::<{ ALL & !BUSY }>("no_busy_word"),
        copy::<{ ALL & !PASS }>("no_pass"),
        copy::<{ ALL & !BYTES }>("no_requested_bytes"),
        copy::<{ ALL & !LOCAL }>("no_thread_local"),
        copy::<{ ALL & !SLOT }>("no_slot"),
        copy::<{ ALL & !(BUSY | PASS) }>("no_gate"),
        copy::<{ CLASS | BYTES }>("class_and_bytes"),
        copy::<0>("the_stack_alone"),
    ]
}
