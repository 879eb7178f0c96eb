//! Which cache a thread has: a lease of one for each pool that it uses, in two thread-locals. They
//! end with the thread, and what was cached goes back.
//!
//! `CURRENT_CACHE` is the thread cache of the pool that this thread used last. A hit reads nothing
//! else: the gate's comparison tells whether it is the right pool's. `LEASES` owns the leases and
//! ends them with the thread. It has a destructor, which costs a check on each access.
//!
//! A buffer may be dropped inside the destructor of another thread-local, after `LEASES` is
//! destroyed. Then `CURRENT_CACHE` is empty, and the return goes to the runs, under the central
//! pool's lock. A thread cache belongs to the gate whose address it has. No other central pool can
//! have that address: the lease's weak count keeps the allocation, and `CURRENT_CACHE` is emptied
//! before the lease ends.

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Weak};

use super::CentralPool;
use crate::freelist::ThreadCache;
#[cfg(not(loom))]
use crate::freelist::cache::NO_CACHE;
use crate::sync::thread_local;

#[cfg(not(loom))]
const NO_CACHE_PTR: *const ThreadCache = &raw const NO_CACHE;
/// Models have no constant thread caches.
#[cfg(loom)]
const NO_CACHE_PTR: *const ThreadCache = std::ptr::null();

thread_local! {
    static CURRENT_CACHE: Cell<*const ThreadCache> = const { Cell::new(NO_CACHE_PTR) };
    static LEASES: Leases = const { Leases(RefCell::new(Vec::new())) };
}

struct Lease {
    /// The central pool that the thread cache belongs to.
    owner: Weak<CentralPool>,
    cache: Arc<ThreadCache>,
}

struct Leases(RefCell<Vec<Lease>>);

impl Drop for Leases {
    fn drop(&mut self) {
        forget();
        for lease in self.0.take() {
            if let Some(central) = lease.owner.upgrade() {
                central.end_lease(&lease.cache);
            }
        }
    }
}

/// Empties `CURRENT_CACHE`: from here on this thread finds a thread cache only through `LEASES`.
pub(super) fn forget() {
    set_current(NO_CACHE_PTR);
}

fn set_current(cache: *const ThreadCache) {
    // It has no destructor, so this cannot fail (but under loom, with nothing left to set).
    let _ = CURRENT_CACHE.try_with(|current| current.set(cache));
}

/// The thread cache that this thread used last, which may be of any pool, or [`NO_CACHE`].
#[inline(always)]
pub(super) fn current<'a>() -> Option<&'a ThreadCache> {
    #[cfg(not(loom))]
    let cache = CURRENT_CACHE.get();
    #[cfg(loom)]
    let cache = CURRENT_CACHE.try_with(Cell::get).ok().filter(|cache| !cache.is_null())?;
    // SAFETY: it is `NO_CACHE`, which is static, or a lease in `LEASES` keeps it alive on this
    // thread and resets `CURRENT_CACHE` before it ends. The caller uses it only within a call on
    // this thread. Neither is null.
    Some(unsafe {
        std::hint::assert_unchecked(!cache.is_null());
        &*cache
    })
}

/// This thread's cache of the central pool, with a new lease if it has none. It becomes the current
/// one. `None` while this thread's locals are being destroyed, in the child of a fork, and where a
/// closed pool would have to make a lease.
///
/// The caller must not hold the central pool's lock.
pub(super) fn obtain<'a>(central: &CentralPool) -> Option<&'a ThreadCache> {
    let cache = current().filter(|cache| cache.belongs_to(&central.gate));
    // A fork empties `CURRENT_CACHE` in the child, which gets no cache here, so never a hit.
    if cache.is_some() || crate::os::forked() {
        return cache;
    }
    LEASES.try_with(|leases| leases.find_or_begin(central)).ok().flatten()
}

impl Leases {
    fn find_or_begin<'a>(&self, central: &CentralPool) -> Option<&'a ThreadCache> {
        let mut leases = self.0.try_borrow_mut().ok()?;
        let known = leases.iter().find(|lease| std::ptr::eq(lease.owner.as_ptr(), central));
        let cache = match known {
            Some(lease) => Arc::as_ptr(&lease.cache),
            None => {
                // Before a lease ends here: the current cache may be the one that it owns.
                forget();
                leases.retain(|lease| lease.owner.strong_count() > 0);
                let cache = central.begin_lease()?;
                let pointer = Arc::as_ptr(&cache);
                leases.push(Lease { owner: central.me.clone(), cache });
                pointer
            }
        };
        set_current(cache);
        // SAFETY: as in `current`.
        unsafe { cache.as_ref() }
    }
}

/// Ends this thread's leases, as its end does. Loom's `join` does not wait for thread-locals.
#[cfg(all(test, loom))]
pub(crate) fn end() {
    drop(LEASES.with(|leases| Leases(RefCell::new(leases.0.take()))));
}
