//! Leases: which thread caches of which pools this thread has.
//!
//! There are three thread-locals:
//!
//! - `CURRENT_CACHE` is the thread cache of the pool that this thread used last. A hit reads nothing else: the gate's
//!   comparison tells whether the cache belongs to the right pool.
//! - `HOT` is a small table of the pools used last, for threads that use several pools by turns.
//! - `LEASES` owns the leases and ends them when the thread ends. It has a destructor, which costs a check on each
//!   access.
//!
//! A buffer may be dropped inside the destructor of another thread-local, after `LEASES` is destroyed. Then the other
//! two are empty, `LEASES` cannot be reached, and the return goes to the runs under the central pool's lock.
//!
//! Entries of `HOT` are found by the address of their central pool. No other central pool can have that address: an
//! entry in `HOT` has a lease in `LEASES`, and the lease's weak count keeps the allocation. The entry is removed before
//! the lease.

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Weak};

use super::CentralPool;
use crate::freelist::ThreadCache;
#[cfg(not(loom))]
use crate::freelist::cache::NO_CACHE;
use crate::sync::thread_local;

/// Number of pools that one thread can use by turns at the cost of a few more instructions.
const WAYS: u64 = 4;

type HotEntry = Cell<(*const CentralPool, *const ThreadCache)>;

#[cfg(not(loom))]
const NO_CACHE_PTR: *const ThreadCache = &raw const NO_CACHE;
/// Models have no constant thread caches.
#[cfg(loom)]
const NO_CACHE_PTR: *const ThreadCache = std::ptr::null();

thread_local! {
    static CURRENT_CACHE: Cell<*const ThreadCache> = const { Cell::new(NO_CACHE_PTR) };
    static HOT: [HotEntry; WAYS as usize] =
        const { [const { Cell::new((std::ptr::null(), std::ptr::null())) }; WAYS as usize] };
    static LEASES: Leases = const { Leases(RefCell::new(Vec::new())) };
}

/// Calls `f` with the place of a central pool's entry in `HOT`. Pools that were made one after the other have different
/// places.
fn way<R>(number: u64, f: impl FnOnce(&HotEntry) -> R) -> Option<R> {
    // `HOT` has no destructor, so it can always be reached (except under loom, once a thread's locals are destroyed).
    HOT.try_with(|hot| f(&hot[(number % WAYS) as usize])).ok()
}

struct Lease {
    /// The central pool's number.
    central: u64,
    /// The central pool that the thread cache belongs to.
    owner: Weak<CentralPool>,
    cache: Arc<ThreadCache>,
}

struct Leases(RefCell<Vec<Lease>>);

impl Drop for Leases {
    fn drop(&mut self) {
        forget_all();
        for lease in self.0.take() {
            if let Some(central) = lease.owner.upgrade() {
                central.end_lease(&lease.cache);
            }
        }
    }
}

fn forget(entry: &HotEntry) {
    entry.set((std::ptr::null(), std::ptr::null()));
}

/// Empties `CURRENT_CACHE` and `HOT`: from here on this thread finds a thread cache only through `LEASES`.
pub(super) fn forget_all() {
    // They have no destructors, so this cannot fail (except under loom, where then nothing is left to be emptied).
    let _ = CURRENT_CACHE.try_with(|current| current.set(NO_CACHE_PTR));
    let _ = HOT.try_with(|hot| hot.iter().for_each(forget));
}

/// The thread cache that this thread used last, which may be of any pool, or [`NO_CACHE`].
#[inline(always)]
pub(super) fn current<'a>() -> Option<&'a ThreadCache> {
    #[cfg(not(loom))]
    let cache = CURRENT_CACHE.get();
    #[cfg(loom)]
    let cache = CURRENT_CACHE.try_with(Cell::get).ok().filter(|cache| !cache.is_null())?;
    // SAFETY: it is `NO_CACHE`, which is static, or a lease in `LEASES` keeps it alive on this thread; the end of the
    // lease resets `CURRENT_CACHE` first. The caller uses it only within a call on this thread. Neither is null.
    Some(unsafe {
        std::hint::assert_unchecked(!cache.is_null());
        &*cache
    })
}

/// This thread's cache of the central pool, if the pool was used lately. The cache becomes the current one.
pub(super) fn hot<'a>(central: &CentralPool) -> Option<&'a ThreadCache> {
    let (owner, cache) = way(central.number(), Cell::get)?;
    if !std::ptr::eq(owner, central) {
        return None;
    }
    let _ = CURRENT_CACHE.try_with(|current| current.set(cache));
    // SAFETY: a lease in `LEASES` keeps an entry of `HOT` alive, as in `current`.
    unsafe { cache.as_ref() }
}

/// This thread's cache of the central pool, through `LEASES`, with a new lease if this thread has none. `None` while
/// this thread's locals are being destroyed, in the child of a fork, and where a closed pool would have to make a
/// lease.
///
/// The caller must not hold the central pool's lock.
pub(super) fn obtain<'a>(central: &CentralPool) -> Option<&'a ThreadCache> {
    // The fork has emptied the other two in the child. Since the child gets no cache here either, it never has a hit.
    if crate::os::forked() {
        return None;
    }
    LEASES
        .try_with(|leases| {
            let mut leases = leases.0.try_borrow_mut().ok()?;
            let known = leases.iter().find(|l| l.central == central.number()).map(|l| Arc::as_ptr(&l.cache));
            let cache = match known {
                Some(cache) => cache,
                None => {
                    leases.retain(|lease| {
                        let alive = lease.owner.strong_count() > 0;
                        if !alive {
                            // The entry is removed first: without the lease the address may be used again.
                            let freed = lease.owner.as_ptr();
                            way(lease.central, |e| (e.get().0 == freed).then(|| forget(e)));
                            let _ = CURRENT_CACHE.try_with(|current| {
                                (current.get() == Arc::as_ptr(&lease.cache))
                                    .then(|| current.set(NO_CACHE_PTR))
                            });
                        }
                        alive
                    });
                    let cache = central.begin_lease()?;
                    let pointer = Arc::as_ptr(&cache);
                    leases.push(Lease { central: central.number(), owner: central.weak(), cache });
                    pointer
                }
            };
            way(central.number(), |entry| entry.set((std::ptr::from_ref(central), cache)));
            let _ = CURRENT_CACHE.try_with(|current| current.set(cache));
            // SAFETY: as in `hot`.
            unsafe { cache.as_ref() }
        })
        .ok()
        .flatten()
}

/// Ends this thread's leases, as the end of the thread does. For models: loom's `join` does not wait for thread-locals.
#[cfg(all(test, loom))]
pub(crate) fn end() {
    drop(LEASES.with(|leases| Leases(RefCell::new(leases.0.take()))));
}
