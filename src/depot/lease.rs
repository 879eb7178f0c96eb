//! Which shard of which pool this thread has.
//!
//! Two thread-locals, because one that has a destructor costs a check on each access: `HOT` is a bare table of the last
//! few pools used and is all that a hit reads; `LEASES` owns the leases and ends them when the thread does. A buffer
//! may be dropped inside another thread-local's destructor, after `LEASES` is gone: then `HOT` is empty, `LEASES` cannot
//! be reached, and the return takes the shared path under the depot's lock.
//!
//! Entries are found by the depot's number, which is never used twice, so an entry of a pool that is gone is harmless.

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Weak};

use super::Depot;
use crate::freelist::Shard;
use crate::sync::thread_local;

/// Pools that one thread can use at full speed by turns.
const WAYS: usize = 4;

thread_local! {
    static HOT: [Cell<(u64, *const Shard)>; WAYS] =
        const { [const { Cell::new((0, std::ptr::null())) }; WAYS] };
    static LEASES: Leases = const { Leases(RefCell::new(Vec::new())) };
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
        let _ = HOT.try_with(|hot| hot.iter().for_each(|way| way.set((0, std::ptr::null()))));
        for lease in self.0.take() {
            if let Some(depot) = lease.owner.upgrade() {
                depot.end_lease(&lease.shard);
            }
        }
    }
}

/// This thread's shard of the depot with this number, if it was used lately.
#[inline(always)]
pub(super) fn hot<'a>(depot: u64) -> Option<&'a Shard> {
    let (number, shard) = HOT.try_with(|hot| hot[depot as usize % WAYS].get()).ok()?;
    // SAFETY: an entry in HOT is backed by the lease in LEASES, which keeps the shard alive on this thread until its
    // destructor has emptied HOT; the caller uses the shard only within a call on this thread.
    if number == depot { unsafe { shard.as_ref() } } else { None }
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
                    leases.retain(|l| l.owner.strong_count() > 0);
                    let shard = depot.begin_lease()?;
                    let pointer = Arc::as_ptr(&shard);
                    leases.push(Lease { depot: depot.number(), owner: depot.weak(), shard });
                    pointer
                }
            };
            HOT.with(|hot| hot[depot.number() as usize % WAYS].set((depot.number(), shard)));
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
