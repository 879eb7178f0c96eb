//! The floor: a bare copy of a hit, with its parts removed one at a time.
//!
//! It shows the cost of each part, and the cost that remains without everything that makes the pool safe to share.
//! Parts overlap in the processor, so a part costs less beside others than alone. The copy is one of the stores that
//! the patterns run on, so it is measured by single pairs (`floor`) and with 64 live buffers (`live_parts`). In
//! [`super::relay`] one thread takes and another gives (`cross_thread_return`).

use std::cell::Cell;
use std::ptr::null;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::Relaxed, compiler_fence};
use std::sync::atomic::{Ordering, Ordering::Acquire, Ordering::Release};

use crate::segment::{CLASSES, Class};

use super::Contender;
use super::pair::{Work, entry};
use super::stores::{PLAIN, PinpoolPlain, Store, TwoFetchAdds, pool, touch};

/// The parts: finding the class of a length; the busy word; the permit; counting requested bytes; finding the thread
/// cache by a thread-local; reading a segment's address from its descriptor, and not from the list.
pub const CLASS: u32 = 1;
pub const BUSY: u32 = 2;
pub const PERMIT: u32 = 4;
pub const BYTES: u32 = 8;
pub const LOCAL: u32 = 16;
pub const DESCRIPTOR: u32 = 32;
pub const ALL: u32 = 63;

/// Segments of each size: more than are out at a time.
const EACH: usize = 100;

/// Its address stands for that of the pool in the permits.
static POOL: u8 = 0;

#[repr(align(32))]
struct List {
    stack: AtomicPtr<AtomicPtr<u8>>,
    came: AtomicU64,
    went: AtomicU64,
    limit: AtomicU64,
}

#[repr(C, align(128))]
struct ThreadCache {
    permit: AtomicPtr<u8>,
    busy: AtomicU32,
    requested: AtomicU64,
    returned: AtomicU64,
    lists: [List; CLASSES],
}

/// Like a segment's descriptor.
#[repr(align(32))]
pub struct Descriptor {
    base: AtomicPtr<u8>,
}

impl Descriptor {
    pub fn new(base: *mut u8) -> Self {
        Self { base: AtomicPtr::new(base) }
    }
}

thread_local! {
    static CURRENT: Cell<*const ThreadCache> = const { Cell::new(null()) };
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

// SAFETY: two addresses and two numbers, which belong to no thread.
unsafe impl Send for Out {}

/// A thread's cache, and the memory that its lists point to.
pub struct Owned {
    cache: Box<ThreadCache>,
    _stacks: Vec<Box<[AtomicPtr<u8>]>>,
    _descriptors: Vec<Descriptor>,
    _memory: Vec<Vec<u8>>,
}

impl Owned {
    /// Makes the calling thread's cache. Each list has room for `limit` segments; its stack begins with an unused
    /// place, so that the topmost segment is at the count, without a subtraction.
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
        let cache = Box::new(ThreadCache {
            permit: AtomicPtr::new((&raw const POOL).cast_mut()),
            busy: AtomicU32::new(0),
            requested: AtomicU64::new(0),
            returned: AtomicU64::new(0),
            lists: cells,
        });
        CURRENT.set(&raw const *cache);
        Self { cache, _stacks: stacks, _descriptors: Vec::new(), _memory: Vec::new() }
    }

    /// An empty cache with room for `limit` segments of one class.
    pub fn empty(list: usize, limit: usize) -> Self {
        Self::new(&[(list, Vec::new())], limit)
    }

    /// The number of segments in a list.
    pub fn count(&self, list: usize) -> usize {
        let List { came, went, .. } = &self.cache.lists[list];
        came.load(Relaxed).wrapping_sub(went.load(Relaxed)) as usize
    }

    /// Puts segments into a list that has room for them.
    pub fn fill(&self, list: usize, from: impl ExactSizeIterator<Item = *mut u8>) {
        let List { stack, came, limit, .. } = &self.cache.lists[list];
        let count = self.count(list) as u64;
        let more = from.len() as u64;
        assert!(count + more <= limit.load(Relaxed));
        for (at, place) in (count as usize + 1..).zip(from) {
            // SAFETY: the stack has that many places, and one.
            unsafe { &*stack.load(Relaxed).add(at) }.store(place, Relaxed);
        }
        add(came, more);
    }

    /// Takes `count` segments off a list that has them.
    pub fn drain(&self, list: usize, count: usize) -> impl Iterator<Item = *mut u8> {
        let List { stack, went, .. } = &self.cache.lists[list];
        let have = self.count(list);
        assert!(count <= have);
        add(went, count as u64);
        // SAFETY: as above.
        (have - count + 1..=have).map(|at| unsafe { &*stack.load(Relaxed).add(at) }.load(Relaxed))
    }
}

/// The copy of a hit with the parts in `PARTS`.
pub struct Copied<const PARTS: u32> {
    sizes: &'static [usize],
    /// The list of each size, for copies without [`CLASS`].
    lists: Vec<usize>,
}

impl<const PARTS: u32> Copied<PARTS> {
    pub fn new(sizes: &'static [usize]) -> Self {
        Self { sizes, lists: sizes.iter().filter_map(|len| Class::of(*len)).map(Class::index).collect() }
    }

    /// Calls `f` on the thread cache, between entering and leaving it.
    #[inline(always)]
    fn inside<R>(local: &Owned, pool: *const u8, f: impl FnOnce(&ThreadCache) -> Option<R>) -> Option<R> {
        let cache = if PARTS & LOCAL == 0 {
            &*local.cache
        } else {
            // SAFETY: set by `local`, on this thread, to the thread cache that `local` keeps.
            unsafe { &*CURRENT.get() }
        };
        if PARTS & BUSY != 0 {
            cache.busy.store(1, Relaxed);
            compiler_fence(Ordering::SeqCst);
        }
        let permitted = PARTS & PERMIT == 0 || std::ptr::eq(cache.permit.load(Acquire), pool);
        let result = if permitted { f(cache) } else { None };
        if PARTS & BUSY != 0 {
            cache.busy.store(0, Release);
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
        let at = Self::inside(local, pool, |cache| {
            // SAFETY: there is a list for each class.
            let cell = unsafe { cache.lists.get_unchecked(list) };
            let went = cell.went.load(Relaxed);
            let count = cell.came.load(Relaxed).wrapping_sub(went);
            if count == 0 {
                return None;
            }
            // SAFETY: the stack has more places than that.
            let at = unsafe { &*cell.stack.load(Relaxed).add(count as usize) }.load(Relaxed);
            cell.went.store(went.wrapping_add(1), Relaxed);
            if PARTS & BYTES != 0 {
                add(&cache.requested, len as u64);
            }
            Some(at)
        })?;
        let base = match PARTS & DESCRIPTOR {
            0 => at,
            // SAFETY: with `DESCRIPTOR` the lists hold addresses of descriptors, which the filler of the lists keeps.
            _ => unsafe { &*at.cast::<Descriptor>() }.base.load(Relaxed),
        };
        // SAFETY: the segment was taken off the list by this call, and no size is 0.
        unsafe { touch(base) };
        Some(Out { pool, at, tag: (len as u64) << 8 | list as u64, written: 0 })
    }

    /// A return, if the list has room.
    #[inline(always)]
    pub fn try_give(&self, local: &Owned, out: Out) -> Result<(), Out> {
        let Out { pool, at, tag, written } = out;
        debug_assert_eq!(written, 0);
        let kept = Self::inside(local, pool, |cache| {
            // SAFETY: as above.
            let cell = unsafe { cache.lists.get_unchecked((tag & 255) as usize) };
            let came = cell.came.load(Relaxed);
            let count = came.wrapping_sub(cell.went.load(Relaxed));
            if count >= cell.limit.load(Relaxed) {
                return None;
            }
            // SAFETY: as above.
            unsafe { &*cell.stack.load(Relaxed).add(count as usize + 1) }.store(at, Relaxed);
            cell.came.store(came.wrapping_add(1), Relaxed);
            if PARTS & BYTES != 0 {
                add(&cache.returned, tag >> 8);
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
        let descriptors: Vec<Descriptor> =
            (0..self.sizes.len()).flat_map(bases).map(|at| Descriptor { base: AtomicPtr::new(at) }).collect();
        let stacks: Vec<(usize, Vec<*mut u8>)> = (self.lists.iter().enumerate())
            .map(|(size, list)| {
                let descriptors = descriptors[size * EACH..][..EACH].iter();
                let at = match PARTS & DESCRIPTOR {
                    0 => bases(size).collect(),
                    _ => descriptors
                        .map(|descriptor| std::ptr::from_ref(descriptor).cast_mut().cast())
                        .collect(),
                };
                (*list, at)
            })
            .collect();
        Owned { _descriptors: descriptors, _memory: memory, ..Owned::new(&stacks, EACH) }
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
        copy::<{ ALL & !PERMIT }>("no_permit"),
        copy::<{ ALL & !BYTES }>("no_requested_bytes"),
        copy::<{ ALL & !LOCAL }>("no_thread_local"),
        copy::<{ ALL & !DESCRIPTOR }>("no_descriptor"),
        copy::<{ ALL & !(BUSY | PERMIT) }>("no_protocol"),
        copy::<{ CLASS | BYTES }>("class_and_bytes"),
        copy::<0>("the_stack_alone"),
    ]
}
