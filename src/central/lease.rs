//! Which thread cache of which pool this thread has.
//!
//! Three thread-locals. `CURRENT_CACHE` is the thread cache of the pool that this thread used last, and all that a hit
//! reads: whether it is one of the right pool, the gate finds out by the comparison that it makes anyway. `HOT` is a
//! bare table of the last few pools used, for threads that use several by turns. `LEASES` owns the leases and ends them
//! when the thread does: it has a destructor, which costs a check on each access. A buffer may be dropped inside
//! another thread-local's destructor, after `LEASES` is gone: then the other two are empty, `LEASES` cannot be reached,
//! and the return takes the shared path under the central pool's lock.
//!
//! Entries are found by the central pool's address. It cannot be another central pool's by now: an entry in `HOT` has a
//! lease in `LEASES`, whose weak count keeps the address taken, and goes no later than that.

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Weak};

use super::CentralPool;
use crate::freelist::ThreadCache;
#[cfg(not(loom))]
use crate::freelist::cache::NO_CACHE;
use crate::sync::thread_local;

/// Pools that one thread can use by turns for some instructions more.
const WAYS: u64 = 4;

type HotEntry = Cell<(*const CentralPool, *const ThreadCache)>;

#[cfg(not(loom))]
const NO_CACHE_PTR: *const ThreadCache = &raw const NO_CACHE;
/// There are no constant thread caches in models.
#[cfg(loom)]
const NO_CACHE_PTR: *const ThreadCache = std::ptr::null();

thread_local! {
    static CURRENT_CACHE: Cell<*const ThreadCache> = const { Cell::new(NO_CACHE_PTR) };
    static HOT: [HotEntry; WAYS as usize] =
        const { [const { Cell::new((std::ptr::null(), std::ptr::null())) }; WAYS as usize] };
    static LEASES: Leases = const { Leases(RefCell::new(Vec::new())) };
}

/// Where in `HOT` a central pool's entry is. Pools made one after the other have different ways.
fn way<R>(number: u64, f: impl FnOnce(&HotEntry) -> R) -> Option<R> {
    // Without a destructor there is always an entry (but under loom, once a thread's locals are gone).
    HOT.try_with(|hot| f(&hot[(number % WAYS) as usize])).ok()
}

struct Lease {
    central: u64,
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

/// This thread finds no thread cache any more without asking `LEASES`.
pub(super) fn forget_all() {
    // They have no destructors, so this cannot fail (but under loom, where then nothing is left to be emptied).
    let _ = CURRENT_CACHE.try_with(|current| current.set(NO_CACHE_PTR));
    let _ = HOT.try_with(|hot| hot.iter().for_each(forget));
}

/// The thread cache that this thread used last, of whichever pool, or nobody's.
#[inline(always)]
pub(super) fn current<'a>() -> Option<&'a ThreadCache> {
    #[cfg(not(loom))]
    let cache = CURRENT_CACHE.get();
    #[cfg(loom)]
    let cache = CURRENT_CACHE.try_with(Cell::get).ok().filter(|cache| !cache.is_null())?;
    // SAFETY: nobody's, which is static, or backed by a lease in LEASES, which keeps it alive on this thread until its
    // end has reset CURRENT; the caller uses it only within a call on this thread. Neither is null.
    Some(unsafe {
        std::hint::assert_unchecked(!cache.is_null());
        &*cache
    })
}

/// This thread's thread cache of the central pool, if it was used lately. It is the current one from here on.
pub(super) fn hot<'a>(central: &CentralPool) -> Option<&'a ThreadCache> {
    let (owner, cache) = way(central.number(), Cell::get)?;
    if !std::ptr::eq(owner, central) {
        return None;
    }
    let _ = CURRENT_CACHE.try_with(|current| current.set(cache));
    // SAFETY: an entry in HOT is backed by a lease in LEASES, as in `current`.
    unsafe { cache.as_ref() }
}

/// The same, leasing one if there is none yet. `None` while this thread's locals are being destroyed, and in the child
/// of a fork.
///
/// The caller must not hold the central pool's lock.
pub(super) fn obtain<'a>(central: &CentralPool) -> Option<&'a ThreadCache> {
    // With the other two emptied at the fork, a child that never has one from here hits nothing.
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
                            // Its entry goes before its address does.
                            let gone = lease.owner.as_ptr();
                            way(lease.central, |e| (e.get().0 == gone).then(|| forget(e)));
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

/// Ends this thread's leases as the thread's end does. For models: loom's `join` does not wait for thread-locals.
#[cfg(all(test, loom))]
pub(crate) fn end() {
    drop(LEASES.with(|leases| Leases(RefCell::new(leases.0.take()))));
}
