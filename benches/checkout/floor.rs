//! The floor: a bare copy of what a hit does, with its parts taken away one at a time.
//!
//! It shows what each part costs, and what is left when all that makes the pool safe to share is gone. Parts overlap in the
//! processor, so a part costs less where others are still there.

use std::cell::Cell;
use std::hint::black_box;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::Relaxed, compiler_fence};
use std::sync::atomic::{Ordering, Ordering::Acquire, Ordering::Release};
use std::time::{Duration, Instant};

use pinpool::segment::{CLASSES, Class};

use super::Contender;
use super::stores::{PLAIN, PinpoolPlain, Store, TwoFetchAdds, pool};

/// The parts: the class of a length; the busy word; the pass; requested bytes; the thread's shard from a thread-local.
const CLASS: u32 = 1;
const BUSY: u32 = 2;
const PASS: u32 = 4;
const BYTES: u32 = 8;
const LOCAL: u32 = 16;
const ALL: u32 = 31;

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

thread_local! {
    static CURRENT: Cell<*const Shard> = const { Cell::new(null()) };
}

#[inline(always)]
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(n), Relaxed);
}

/// Takes and gives back `iters` times; `None` if anything is not as it should be.
#[inline(never)]
fn run<const PARTS: u32>(shard: &Shard, pool: *const u8, iters: u64) -> Option<()> {
    // Into the shard and out of it around `f`.
    #[inline(always)]
    fn inside<const PARTS: u32, R>(shard: &Shard, pool: *const u8, f: impl FnOnce(&Shard) -> R) -> Option<R> {
        let shard = if PARTS & LOCAL == 0 {
            shard
        } else {
            // SAFETY: set to a shard that lives for ever before.
            unsafe { &*CURRENT.get() }
        };
        if PARTS & BUSY != 0 {
            shard.busy.store(1, Relaxed);
            compiler_fence(Ordering::SeqCst);
        }
        let passes = PARTS & PASS == 0 || std::ptr::eq(shard.pass.load(Acquire), pool);
        let result = passes.then(|| f(shard));
        if PARTS & BUSY != 0 {
            shard.busy.store(0, Release);
        }
        result
    }
    for _ in 0..iters {
        let len = black_box(PLAIN[0]);
        let class = if PARTS & CLASS == 0 { 63 } else { Class::of(len)?.index() };
        let start = inside::<PARTS, _>(shard, pool, |shard| {
            let list = shard.lists.get(class)?;
            let went = list.went.load(Relaxed);
            let count = list.came.load(Relaxed).wrapping_sub(went);
            if count == 0 {
                return None;
            }
            // SAFETY: the stack has more places than that.
            let start = unsafe { &*list.stack.load(Relaxed).add(count as usize) }.load(Relaxed);
            list.went.store(went + 1, Relaxed);
            if PARTS & BYTES != 0 {
                add(&shard.requested, len as u64);
            }
            Some(start)
        })??;
        // SAFETY: a page of ours.
        unsafe { start.write_volatile(1) };
        inside::<PARTS, _>(shard, pool, |shard| {
            let list = shard.lists.get(class)?;
            let came = list.came.load(Relaxed);
            let count = came.wrapping_sub(list.went.load(Relaxed));
            if count >= list.limit.load(Relaxed) {
                return None;
            }
            // SAFETY: as above.
            unsafe { &*list.stack.load(Relaxed).add(count as usize + 1) }.store(start, Relaxed);
            list.came.store(came + 1, Relaxed);
            if PARTS & BYTES != 0 {
                add(&shard.returned, len as u64);
            }
            Some(())
        })??;
    }
    Some(())
}

fn shard(pool: *const u8) -> &'static Shard {
    let list = || {
        let page = || AtomicPtr::new(Box::leak(vec![0u8; 4096].into_boxed_slice()).as_mut_ptr());
        let stack: Box<[AtomicPtr<u8>]> = (0..64).map(|_| page()).collect();
        List {
            stack: AtomicPtr::new(Box::leak(stack).as_mut_ptr()),
            came: AtomicU64::new(8),
            went: AtomicU64::new(0),
            limit: AtomicU64::new(60),
        }
    };
    let empty = || List {
        stack: AtomicPtr::new(null_mut()),
        came: AtomicU64::new(0),
        went: AtomicU64::new(0),
        limit: AtomicU64::new(0),
    };
    let used = [63, Class::of(PLAIN[0]).map_or(0, Class::index)];
    Box::leak(Box::new(Shard {
        pass: AtomicPtr::new(pool.cast_mut()),
        busy: AtomicU32::new(0),
        requested: AtomicU64::new(0),
        returned: AtomicU64::new(0),
        lists: std::array::from_fn(|i| if used.contains(&i) { list() } else { empty() }),
    }))
}

pub fn contenders() -> Vec<Contender> {
    fn bare<const PARTS: u32>(name: &'static str, shard: &'static Shard, pool: usize) -> Contender {
        Contender::new(name, move |_, iters| {
            CURRENT.set(shard);
            let since = Instant::now();
            black_box(run::<PARTS>(shard, std::ptr::without_provenance(pool), iters)).expect("a hit");
            since.elapsed()
        })
    }
    fn adds(_: usize, iters: u64) -> Duration {
        let mut local = TwoFetchAdds.local();
        let since = Instant::now();
        for _ in 0..iters {
            TwoFetchAdds.take(&mut local, black_box(0));
            TwoFetchAdds.give(&mut local, ());
        }
        since.elapsed()
    }
    let real = PinpoolPlain { pool: pool(64 << 20), len: PLAIN[0] };
    let hits = move |_: usize, iters: u64| {
        let since = Instant::now();
        for _ in 0..iters {
            let buf = real.take(&mut (), black_box(0));
            real.give(&mut (), buf);
        }
        since.elapsed()
    };
    let pool = std::ptr::from_ref(Box::leak(Box::new(0u8)));
    let (shard, pool) = (shard(pool), pool.addr());
    vec![
        Contender::new("two_fetch_adds", adds),
        Contender::new("pinpool", hits),
        bare::<ALL>("all_parts", shard, pool),
        bare::<{ ALL & !CLASS }>("no_class", shard, pool),
        bare::<{ ALL & !BUSY }>("no_busy_word", shard, pool),
        bare::<{ ALL & !PASS }>("no_pass", shard, pool),
        bare::<{ ALL & !BYTES }>("no_requested_bytes", shard, pool),
        bare::<{ ALL & !LOCAL }>("no_thread_local", shard, pool),
        bare::<{ ALL & !(BUSY | PASS) }>("no_gate", shard, pool),
        bare::<{ CLASS | BYTES }>("class_and_bytes", shard, pool),
        bare::<0>("the_stack_alone", shard, pool),
    ]
}
