//! Which shard of which pool this thread has.
//!
//! Two thread-locals, because one that has a destructor costs a check on each access: `HOT` is a bare table of the last
//! few pools used and is all that a hit reads; `LEASES` owns the leases and ends them when the thread does. A buffer
//! may be dropped inside another thread-local's destructor, after `LEASES` is gone: then `HOT` is empty, `LEASES` cannot
//! be reached, and the return takes the shared path under the depot's lock.
//!
//! Entries are found by the depot's address. It cannot be another depot's by now: an entry in `HOT` has a lease in
//! `LEASES`, whose weak count keeps the address taken, and goes no later than that.

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Weak};

use super::Depot;
use crate::freelist::Shard;
use crate::sync::thread_local;

/// Pools that one thread can use at full speed by turns.
const WAYS: u64 = 4;

type Entry = Cell<(*const Depot, *const Shard)>;

thread_local! {
    static HOT: [Entry; WAYS as usize] =
        const { [const { Cell::new((std::ptr::null(), std::ptr::null())) }; WAYS as usize] };
    static LEASES: Leases = const { Leases(RefCell::new(Vec::new())) };
}

/// Where in `HOT` a depot's entry is. A depot keeps its own, because a hit would feel even this.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    /// # Invariant
    /// The offset in bytes of one of the entries.
    offset: usize,
}

impl Way {
    /// Pools made one after the other have different ways.
    pub(super) fn new(number: u64) -> Self {
        Self { offset: (number % WAYS) as usize * size_of::<Entry>() }
    }

    #[inline(always)]
    fn of<R>(self, f: impl FnOnce(&Entry) -> R) -> Option<R> {
        // Without a destructor there is always an entry (but under loom, once a thread's locals are gone).
        // SAFETY: the offset is that of an entry (the invariant).
        HOT.try_with(|hot| f(unsafe { &*hot.as_ptr().byte_add(self.offset) })).ok()
    }
}

struct Lease {
    depot: u64,
    owner: Weak<Depot>,
    shard: Arc<Shard>,
}

struct Leases(RefCell<Vec<Lease>>);

impl Drop for Leases {
    fn drop(&mut self) {
        // It has no destructor, so this cannot fail (but under loom, where then nothing is left to be emptied).
        let _ = HOT.try_with(|hot| hot.iter().for_each(forget));
        for lease in self.0.take() {
            if let Some(depot) = lease.owner.upgrade() {
                depot.end_lease(&lease.shard);
            }
        }
    }
}

fn forget(entry: &Entry) {
    entry.set((std::ptr::null(), std::ptr::null()));
}

/// This thread's shard of the depot, if it was used lately.
#[inline(always)]
pub(super) fn hot<'a>(depot: &Depot) -> Option<&'a Shard> {
    let found = depot.way.of(|entry| {
        let (owner, shard) = entry.get();
        if !std::ptr::eq(owner, depot) {
            return None;
        }
        // SAFETY: an entry in HOT is backed by the lease in LEASES, which keeps the shard alive on this thread until
        // its destructor has emptied HOT; the caller uses the shard only within a call on this thread. So it is not
        // null either, which need not be looked at.
        unsafe {
            std::hint::assert_unchecked(!shard.is_null());
            Some(&*shard)
        }
    });
    found.flatten()
}

/// The same, leasing one if there is none yet. `None` while this thread's locals are being destroyed.
///
/// The caller must not hold the depot's lock.
pub(super) fn obtain<'a>(depot: &Depot) -> Option<&'a Shard> {
    LEASES
        .try_with(|leases| {
            let mut leases = leases.0.try_borrow_mut().ok()?;
            let known = leases.iter().find(|l| l.depot == depot.number()).map(|l| Arc::as_ptr(&l.shard));
            let shard = match known {
                Some(shard) => shard,
                None => {
                    leases.retain(|lease| {
                        let alive = lease.owner.strong_count() > 0;
                        if !alive {
                            // Its entry goes before its address does.
                            let gone = lease.owner.as_ptr();
                            Way::new(lease.depot).of(|e| (e.get().0 == gone).then(|| forget(e)));
                        }
                        alive
                    });
                    let shard = depot.begin_lease()?;
                    let pointer = Arc::as_ptr(&shard);
                    leases.push(Lease { depot: depot.number(), owner: depot.weak(), shard });
                    pointer
                }
            };
            let _ = depot.way.of(|entry| entry.set((std::ptr::from_ref(depot), shard)));
            // SAFETY: as in `hot`.
            unsafe { shard.as_ref() }
        })
        .ok()
        .flatten()
}

/// Ends this thread's leases as the thread's end does. For models: loom's `join` does not wait for thread-locals.
#[cfg(all(test, loom))]
pub(crate) fn end() {
    drop(LEASES.with(|leases| Leases(RefCell::new(leases.0.take()))));
}
