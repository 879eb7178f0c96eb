//! The exchange between threads: how a thread cache is filled from a transfer cache, and how it makes room by one.
//!
//! A thread that takes more than it returns finds its cache empty, and takes a batch that another thread has left in
//! the class's transfer cache. A thread that returns more than it takes finds its list full, and moves half of it to
//! the transfer cache ([`crate::freelist::transfer`]). Neither needs the lock. A batch that finds no slot goes to its runs,
//! under the lock.
//!
//! Neither can overtake a waiter. What a waiter has a right to is in no cache: it was taken out when the waiter came or
//! chose its window, and returns that it may have a right to pass a *fence* (`waiting`) that this module looks at
//! before it keeps a segment.
//!
//! The bytes in all transfer caches together are bounded ([`CentralConfig::shared_cache`](super::CentralConfig)), so a
//! batch is reserved before it is moved. A slot keeps its reservation when it is emptied, since the next batch is
//! likely to come. So reservations may be left for classes that no thread uses any more. A thread whose reservation is
//! refused drops the reservations of empty slots and tries once more. If no empty slot has one, every reservation is in
//! use, and the next few threads that are refused do not look.

use std::cell::Cell;
use std::ptr::NonNull;

use super::queue::Grant;
use super::{CentralPool, Core, Fresh};
use crate::freelist::cache::{HeldCache, Put};
use crate::freelist::{Descriptor, ThreadCache, list_of, listed};
use crate::segment::Class;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// After a look that found all reservations in use, this many refused threads assume the same and do not look.
const LOOKS_SKIPPED: u32 = if cfg!(loom) { 1 } else { 15 };

/// What the transfer caches of a central pool have reserved together.
#[derive(Debug)]
pub(super) struct Reservations {
    /// Reserved bytes: at least those that the slots hold. A thread that has emptied slots subtracts their reservations
    /// by a release, which pairs with the acquire in [`CentralPool::any_cached`]: a thread that finds nothing reserved
    /// sees where the segments went. All other changes only keep a sum, and are relaxed.
    pub(super) bytes: AtomicU64,
    /// How many refused threads will still assume that all reservations are in use. It is a hint: a lost update makes a
    /// thread look a little earlier or later. So it is relaxed and pairs with nothing.
    skips_left: AtomicU32,
}

impl Reservations {
    pub(super) fn new() -> Self {
        Self { bytes: AtomicU64::new(0), skips_left: AtomicU32::new(0) }
    }
}

impl CentralPool {
    // --- taking ------------------------------------------------------------------------------------------------------

    /// Takes a segment from this thread's cache, which is filled from a transfer cache if it is empty. Without the
    /// lock, and never before a waiter, which has a right to nothing that is cached. Says whether the cache had to be
    /// filled. `None` in the child of a fork.
    pub(crate) fn refill(&self, class: Class, len: usize) -> Option<(Fresh, bool)> {
        if self.gate.mode() != 0 {
            return None;
        }
        let (descriptor, filled) = self.take_via_transfer(class, len)?;
        Some((self.fresh(Grant { descriptor, len }), filled))
    }

    /// [`CentralPool::refill`] without the look at the mode, and without making a buffer of the segment.
    pub(super) fn take_via_transfer(&self, class: Class, len: usize) -> Option<(NonNull<Descriptor>, bool)> {
        let cache = self.cache()?;
        let mut held = self.gate.enter(cache)?;
        // Some callers have not tried for a hit, or have not found the cache: a thread that has completed copies since,
        // and one that uses more pools than it can find its caches of at once.
        if let Some(descriptor) = held.take(class, len) {
            return Some((descriptor, false));
        }
        if held.room(class) == 0 {
            return None;
        }
        if held.take_batch(class, &self.transfers[list_of(class)]) == 0 {
            return None;
        }
        Some((held.take(class, len)?, true))
    }

    // --- returning ---------------------------------------------------------------------------------------------------

    /// Returns a segment into this thread's cache after making room in it: the class gets more room, or half of the list
    /// goes to a transfer cache, or to its runs. `false`: the segment is still out, and the caller returns it otherwise.
    ///
    /// # Safety
    /// The descriptor is alive, out, of this class, in no list, and owned by the caller.
    pub(super) unsafe fn make_room(&self, class: Class, descriptor: NonNull<Descriptor>, len: usize) -> bool {
        let Some(cache) = self.cache() else { return false };
        let Some(mut held) = self.gate.enter(cache) else { return false };
        // SAFETY: this function's contract.
        if self.fences(class, unsafe { descriptor.as_ref() }.base()) {
            return false;
        }
        let room = held.room(class);
        if room == 0 {
            drop(held);
            // The class has no room in this cache yet, as in a thread that has only returned segments so far.
            let mut core = self.lock();
            if self.room(&mut core, cache, class) == 0 {
                return false;
            }
            // The lock is released last: a thread that frees the central pool has to take it first.
            // SAFETY: this function's contract.
            return unsafe { self.keep_in(cache, class, descriptor, len) };
        }
        if self.grow_room(&mut held, class) {
            drop(held);
            // SAFETY: this function's contract.
            return unsafe { self.keep_in(cache, class, descriptor, len) };
        }
        // A half that finds no slot stays in the list until this thread has the lock, so that a check or another thread
        // that reclaims finds it at any time.
        let overflows = !self.offload(class, &mut held, room.div_ceil(2));
        drop(held);
        // The room is made before the segment is returned: as long as the segment is out, the central pool is alive.
        // Once it counts as returned, the central pool may be freed.
        if overflows {
            let mut core = self.lock();
            // Where the gate keeps the owner out, the whole cache was reclaimed meanwhile, this half included.
            if let Some(mut held) = self.gate.enter(cache) {
                // SAFETY: drained from this thread's cache, so free and alive.
                unsafe { core.arena.give_chain(held.drain(class, room.div_ceil(2))) };
            }
            drop(core);
        }
        // SAFETY: this function's contract.
        unsafe { self.keep_in(cache, class, descriptor, len) }
    }

    /// Returns a segment into this thread cache, if the gate admits the owner, the list has room, and no request may have
    /// a right to the segment. `false`: nothing was done.
    ///
    /// # Safety
    /// As for [`CentralPool::make_room`].
    pub(super) unsafe fn keep_in(
        &self,
        cache: &ThreadCache,
        class: Class,
        descriptor: NonNull<Descriptor>,
        len: usize,
    ) -> bool {
        let Some(mut held) = self.gate.enter(cache) else { return false };
        // SAFETY: this function's contract.
        if self.fences(class, unsafe { descriptor.as_ref() }.base()) {
            return false;
        }
        if self.unfenced(class) {
            held.lift(class);
        }
        // SAFETY: this function's contract, and the fence was looked at inside the gate.
        matches!(unsafe { held.put_behind_fence(class, descriptor, len) }, Put::Kept)
    }

    /// Moves up to `count` segments of a thread cache to the class's transfer cache, within the bound on all transfer
    /// caches. `false`: no segment was moved.
    pub(super) fn offload(&self, class: Class, held: &mut HeldCache<'_>, count: u32) -> bool {
        let (transfer, stride) = (&self.transfers[list_of(class)], class.stride() as u64);
        let refused = Cell::new(false);
        // Added first and compared then, so that all reservations together stay within the bound. (If each thread
        // compared first, two could pass at once.)
        let reserve = |more: u32| {
            let bytes = u64::from(more) * stride;
            let sum = self.reservations.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
            refused.set(sum > self.config.shared_cache as u64);
            if refused.get() {
                self.reservations.bytes.fetch_sub(bytes, Ordering::Relaxed);
            }
            !refused.get()
        };
        if held.offload(class, count, transfer, reserve) > 0 {
            return true;
        }
        // Empty slots of other classes may hold reservations that no thread uses any more.
        refused.get() && self.unreserve() && held.offload(class, count, transfer, reserve) > 0
    }

    // --- reservations ------------------------------------------------------------------------------------------------

    /// Drops the reservations of empty slots, for a thread whose reservation was refused. `false`: there were none, or
    /// there were none a moment ago. (Where full slots use up the bound, looking at all slots would cost each return
    /// more than everything else.)
    fn unreserve(&self) -> bool {
        let Reservations { bytes, skips_left } = &*self.reservations;
        // Spares the look where nothing is reserved, or no transfer cache is allowed.
        if bytes.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let left = skips_left.load(Ordering::Relaxed);
        if left > 0 {
            skips_left.store(left - 1, Ordering::Relaxed);
            return false;
        }
        let mut any = false;
        for (class, transfer) in listed().zip(&self.transfers) {
            let reserved = transfer.unreserve_idle();
            if reserved > 0 {
                // Release: pairs with the acquire in `any_cached`.
                bytes.fetch_sub(u64::from(reserved) * class.stride() as u64, Ordering::Release);
                any = true;
            }
        }
        if !any {
            skips_left.store(LOOKS_SKIPPED, Ordering::Relaxed);
        }
        any
    }

    /// Moves all batches in transfer caches to their runs, and drops their reservations. A batch that an owner is
    /// moving meanwhile is left. `false`: there was nothing.
    pub(super) fn drain_transfers(&self, core: &mut Core) -> bool {
        let mut any = false;
        for (class, transfer) in listed().zip(&self.transfers) {
            let (chain, reserved) = transfer.drain();
            any |= !chain.is_empty();
            if reserved > 0 {
                // Release: pairs with the acquire in `any_cached`.
                self.reservations
                    .bytes
                    .fetch_sub(u64::from(reserved) * class.stride() as u64, Ordering::Release);
            }
            // SAFETY: just taken from a transfer cache, so free and alive.
            unsafe { core.arena.give_chain(chain) };
        }
        any
    }
}

#[cfg(all(test, not(loom)))]
pub(super) mod tests {
    use std::ptr::NonNull;
    use std::sync::Arc;

    use super::{LOOKS_SKIPPED, Ordering, list_of};
    use crate::central::{CentralConfig, CentralPool, Fresh, ReclaimLevel, Take};
    use crate::region::RegionId;
    use crate::segment::Class;

    pub(in crate::central) const BYTES: usize = 1 << 20;

    /// What a thread caches: half of it are two segments of 8 KiB.
    pub(in crate::central) const CACHE: usize = 4 * (8192 + 64);

    /// A central pool with 1 MiB.
    pub(in crate::central) fn central(shared_cache: usize) -> Arc<CentralPool> {
        let central = CentralPool::new(
            CentralConfig {
                capacity: BYTES,
                thread_cache: CACHE,
                shared_cache,
                largest: BYTES - 32,
                step: 0,
                timeless: true,
                serves: Vec::new(),
                track: false,
            },
            None,
        );
        let base = NonNull::new(std::ptr::without_provenance_mut(BYTES)).unwrap();
        // SAFETY: the arena only does arithmetic on it.
        unsafe { central.add_extent(RegionId(0), base, BYTES, true) };
        central
    }

    fn take(central: &CentralPool, len: usize) -> Fresh {
        let want = central.place(len, 64).unwrap();
        if let Some(fresh) = Class::of(len).and_then(|class| central.hit(class, len)) {
            return fresh;
        }
        match central.try_take(want, ReclaimLevel::Idle).unwrap() {
            Take::Got(fresh) => fresh,
            Take::Empty => panic!("the memory should be enough"),
        }
    }

    /// Takes `count` segments and returns them all. What a thread cache cannot hold goes to the transfer cache.
    fn burst(central: &CentralPool, len: usize, count: usize) {
        let out: Vec<Fresh> = (0..count).map(|_| take(central, len)).collect();
        // SAFETY: this test owns them, and nothing uses them.
        out.into_iter().for_each(|fresh| unsafe { fresh.into_segment().release() });
        central.check(|_, _| ()).unwrap();
    }

    /// Segments in the transfer cache of the class of `len`.
    fn transferred(central: &CentralPool, len: usize) -> usize {
        let mut count = 0;
        central.transfers[list_of(Class::of(len).unwrap())].for_each(|_| count += 1);
        count
    }

    fn end(central: &Arc<CentralPool>) {
        central.close();
        assert_eq!(central.outstanding(), 0);
    }

    #[test]
    fn what_hangs_between_threads_stays_within_its_bound() {
        const LEN: usize = 4096;
        for shared in [0, 10_000, 40_000, 1 << 20] {
            let central = central(shared);
            burst(&central, LEN, 100);
            let bytes = transferred(&central, LEN) * (LEN + 64);
            assert!(bytes <= shared, "{bytes} bytes of at most {shared}");
            assert_eq!(bytes > 0, shared > 0, "a list has few segments here, so that a batch of them fits");
            // This empties some slots and fills them again.
            burst(&central, LEN, 100);
            assert!(transferred(&central, LEN) * (LEN + 64) <= shared);
            end(&central);
        }
    }

    #[test]
    fn bookings_that_nobody_uses_are_for_others() {
        const LEN: usize = 4096;
        const OTHER: usize = 8192;
        let central = central(40_000);
        burst(&central, LEN, 100);
        let count = transferred(&central, LEN);
        // With all segments out the slots are empty, and their reservations leave no room for the other class.
        assert!(count * (LEN + 64) + OTHER + 64 > 40_000);
        let out: Vec<Fresh> = (0..100).map(|_| take(&central, LEN)).collect();
        assert_eq!(transferred(&central, LEN), 0);
        burst(&central, OTHER, 40);
        assert!(transferred(&central, OTHER) > 0, "reservations of empty slots were in the way");
        // SAFETY: this test owns them, and nothing uses them.
        out.into_iter().for_each(|fresh| unsafe { fresh.into_segment().release() });
        central.check(|_, _| ()).unwrap();
        end(&central);
    }

    #[test]
    fn who_is_refused_looks_for_idle_bookings_now_and_then() {
        const LEN: usize = 4096;
        let central = central(20_000);
        burst(&central, LEN, 100);
        let count = transferred(&central, LEN);
        assert!(count > 0 && central.reservations.bytes.load(Ordering::Relaxed) + LEN as u64 + 64 > 20_000);
        // Before this there may have been looks in vain. One of these calls certainly looks.
        (0..=LOOKS_SKIPPED).for_each(|_| assert!(!central.unreserve(), "all reservations are in use"));
        let out: Vec<Fresh> = (0..100).map(|_| take(&central, LEN)).collect();
        assert_eq!(transferred(&central, LEN), 0);
        let looks = (1..).find(|_| central.unreserve()).unwrap();
        assert!((1..=LOOKS_SKIPPED + 1).contains(&looks), "{looks}");
        assert_eq!(central.reservations.bytes.load(Ordering::Relaxed), 0);
        // SAFETY: this test owns them, and nothing uses them.
        out.into_iter().for_each(|fresh| unsafe { fresh.into_segment().release() });
        central.check(|_, _| ()).unwrap();
        end(&central);
    }
}
