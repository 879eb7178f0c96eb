//! What threads leave for each other: how a thread cache is filled from a transfer cache, and how it is relieved.
//!
//! A thread that takes more than it returns finds its thread cache empty and takes over a batch that another left on
//! the class's transfer cache; one that returns more than it takes finds it full and hangs up half of the list
//! ([`crate::freelist::transfer`]). Neither needs the lock, and neither decides who comes first: while anybody waits no
//! thread cache can be entered. What finds no slot goes to its runs, under the lock.
//!
//! What all transfer caches hold together is bounded ([`CentralConfig::shared_cache`](super::CentralConfig)), so each
//! batch is reserved before it is hung up. Slots keep their reservations when they are emptied, since the next batch is
//! coming; so what is reserved may be for classes that nobody uses any more, and who is refused takes those
//! reservations away and asks once more. Where there are none, all that is reserved hangs, and the next few who are
//! refused do not look.

use std::cell::Cell;
use std::ptr::NonNull;

use super::queue::Grant;
use super::{CentralPool, Core, Fresh, Wake};
use crate::freelist::cache::{HeldCache, Put};
use crate::freelist::{Descriptor, list_of, listed};
use crate::segment::Class;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// So many who are refused take it that all reservations are in use, after one who has looked and found it so.
const LOOKS_SKIPPED: u32 = if cfg!(loom) { 1 } else { 15 };

/// What the transfer caches of a central pool have reserved together.
#[derive(Debug)]
pub(super) struct Reservations {
    /// Bytes: no fewer than hang there. Who brings it down, having emptied what was reserved, does so by a release,
    /// which pairs with the acquire in [`CentralPool::any_cached`]: who finds nothing reserved sees where it went. All
    /// else is a sum, and relaxed.
    pub(super) bytes: AtomicU64,
    /// How many are still to take it that all of them are in use. A hint: whoever loses an update of it looks a little
    /// earlier or later, so it is relaxed, and pairs with nothing.
    rest: AtomicU32,
}

impl Reservations {
    pub(super) fn new() -> Self {
        Self { bytes: AtomicU64::new(0), rest: AtomicU32::new(0) }
    }
}

impl CentralPool {
    // --- taking ------------------------------------------------------------------------------------------------------

    /// A segment from this thread's thread cache after filling that from a transfer cache. No lock, and no decision who
    /// comes first: while anybody waits no thread cache can be entered. In the child of a fork there is none.
    pub(crate) fn refill(&self, class: Class, len: usize) -> Option<Fresh> {
        if self.gate.mode() != 0 {
            return None;
        }
        self.take_via_transfer(class, len).map(|descriptor| self.fresh(Grant { descriptor, len }))
    }

    /// Fills this thread's thread cache from a transfer cache and takes one of it.
    pub(super) fn take_via_transfer(&self, class: Class, len: usize) -> Option<NonNull<Descriptor>> {
        let cache = self.cache()?;
        let mut held = self.gate.enter(cache)?;
        // Not everyone has tried for a hit: requests for a reserve have not, nor has this thread since it reaped.
        if let Some(descriptor) = held.take(class, len) {
            return Some(descriptor);
        }
        if held.limit(class) == 0 {
            return None;
        }
        let (count, rest) = held.take_batch(class, &self.transfers[list_of(class)]);
        if count == 0 {
            return None;
        }
        let descriptor = held.take(class, len);
        drop(held);
        if !rest.is_empty() {
            let mut wakes = Vec::new();
            let mut core = self.core.lock();
            // SAFETY: it hung in a transfer cache, so it is free and alive.
            unsafe { core.arena.give_chain(rest) };
            // Whoever has begun to wait since has not found it.
            core.serve(&mut wakes);
            self.stop_waiting(&core);
            drop(core);
            wakes.into_iter().for_each(Wake::wake);
        }
        descriptor
    }

    // --- returning ---------------------------------------------------------------------------------------------------

    /// Returns into this thread's thread cache after making room in it: half of the list goes to a transfer cache, or
    /// to its runs. `false`: nothing was done.
    ///
    /// # Safety
    /// The descriptor is alive, out, of this class, in no list, and the caller's.
    pub(super) unsafe fn make_room(&self, class: Class, descriptor: NonNull<Descriptor>, len: usize) -> bool {
        let Some(cache) = self.cache() else { return false };
        let Some(mut held) = self.gate.enter(cache) else { return false };
        let limit = held.limit(class);
        if limit == 0 {
            drop(held);
            // A thread that only returns has been granted no room yet.
            let mut core = self.core.lock();
            if self.limit(&mut core, cache, class) == 0 {
                return false;
            }
            // The lock is released last, and who frees the central pool has to take it first.
            let Some(mut held) = self.gate.enter(cache) else { return false };
            // SAFETY: the caller's word.
            return matches!(unsafe { held.put(descriptor, len, list_of(class)) }, Put::Kept);
        }
        // What finds no slot stays here until the lock is ours, so that it can be found at any time.
        let overflows = !self.offload(class, &mut held, limit.div_ceil(2));
        #[cfg(pinpool_planted = "room_counts_first")]
        if overflows {
            let half = held.drain(class, limit.div_ceil(2));
            // SAFETY: the caller's word.
            let kept = matches!(unsafe { held.put(descriptor, len, list_of(class)) }, Put::Kept);
            drop(held);
            // SAFETY: drained from our thread cache, so free and alive.
            unsafe { self.core.lock().arena.give_chain(half) };
            return kept;
        }
        drop(held);
        // While our segment is still out the central pool is certain to live; once it is counted as returned, it may be
        // gone.
        if overflows {
            let mut core = self.core.lock();
            // Kept out only if it was all taken back meanwhile.
            if let Some(mut held) = self.gate.enter(cache) {
                // SAFETY: drained from our thread cache, so free and alive.
                unsafe { core.arena.give_chain(held.drain(class, limit.div_ceil(2))) };
            }
            let mut wakes = Vec::new();
            core.serve(&mut wakes);
            self.stop_waiting(&core);
            drop(core);
            wakes.into_iter().for_each(Wake::wake);
        }
        let Some(mut held) = self.gate.enter(cache) else { return false };
        // SAFETY: the caller's word.
        matches!(unsafe { held.put(descriptor, len, list_of(class)) }, Put::Kept)
    }

    /// Leaves some of a thread cache's segments on a transfer cache, as long as transfer caches hold no more than their
    /// share.
    pub(super) fn offload(&self, class: Class, held: &mut HeldCache<'_>, count: u32) -> bool {
        let (transfer, stride) = (&self.transfers[list_of(class)], class.stride() as u64);
        let refused = Cell::new(false);
        // Booked beforehand, so that all together stay within the bound. (Looked at first and reserved then, two would
        // pass.)
        let reserve = |more: u32| {
            let bytes = u64::from(more) * stride;
            #[cfg(not(pinpool_planted = "book_looks_first"))]
            let sum = self.reservations.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
            #[cfg(pinpool_planted = "book_looks_first")]
            let sum = self.reservations.bytes.load(Ordering::Relaxed) + bytes;
            refused.set(sum > self.config.shared_cache as u64);
            #[cfg(pinpool_planted = "book_looks_first")]
            if !refused.get() {
                self.reservations.bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            #[cfg(not(any(pinpool_planted = "book_looks_first", pinpool_planted = "refused_stays_booked")))]
            if refused.get() {
                self.reservations.bytes.fetch_sub(bytes, Ordering::Relaxed);
            }
            !refused.get()
        };
        if held.offload(class, count, transfer, reserve) > 0 {
            return true;
        }
        // What is reserved may be for classes that nobody uses any more.
        refused.get() && self.unreserve() && held.offload(class, count, transfer, reserve) > 0
    }

    // --- reservations ------------------------------------------------------------------------------------------------

    /// Takes away what empty slots have reserved, for who is refused. `false` if that was nothing, or was nothing a
    /// moment ago: where the bound is used up by what hangs, a look at all slots would cost each return more than all
    /// else.
    fn unreserve(&self) -> bool {
        let Reservations { bytes, rest } = &*self.reservations;
        // Tells at once where nothing is reserved, or may be.
        if bytes.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let left = rest.load(Ordering::Relaxed);
        if left > 0 {
            rest.store(left - 1, Ordering::Relaxed);
            return false;
        }
        let mut any = false;
        for (class, transfer) in listed().zip(&self.transfers) {
            let reserved = transfer.unreserve_idle();
            if reserved > 0 {
                // Pairs with `any_cached`.
                bytes.fetch_sub(u64::from(reserved) * class.stride() as u64, Ordering::Release);
                any = true;
            }
        }
        if !any {
            rest.store(LOOKS_SKIPPED, Ordering::Relaxed);
        }
        any
    }

    /// Takes down what hangs in transfer caches, with what it reserved. Where owners are at it meanwhile, what they
    /// have in their hands just then is left. `false` if there was nothing.
    pub(super) fn drain_transfers(&self, core: &mut Core) -> bool {
        let mut any = false;
        for (class, transfer) in listed().zip(&self.transfers) {
            let (chain, reserved) = transfer.drain();
            any |= !chain.is_empty();
            if reserved > 0 {
                // Pairs with `any_cached`.
                self.reservations
                    .bytes
                    .fetch_sub(u64::from(reserved) * class.stride() as u64, Ordering::Release);
            }
            // SAFETY: what hangs in a transfer cache is free and alive.
            unsafe { core.arena.give_chain(chain) };
        }
        any
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::ptr::NonNull;
    use std::sync::Arc;

    use super::{LOOKS_SKIPPED, Ordering, list_of};
    use crate::central::{CentralConfig, CentralPool, Fresh, ReclaimLevel, Take};
    use crate::region::RegionId;
    use crate::segment::Class;

    const BYTES: usize = 1 << 20;

    fn central(shared_cache: usize) -> Arc<CentralPool> {
        let central = CentralPool::new(
            CentralConfig {
                capacity: BYTES,
                thread_cache: 64 << 10,
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
            Take::Empty => panic!("there is enough"),
        }
    }

    /// Takes so many, and returns them all: more than a thread cache keeps goes to the transfer cache.
    fn burst(central: &CentralPool, len: usize, count: usize) {
        let out: Vec<Fresh> = (0..count).map(|_| take(central, len)).collect();
        // SAFETY: ours, and nothing uses them.
        out.into_iter().for_each(|fresh| unsafe { fresh.into_segment().release() });
        central.check(|_, _| ()).unwrap();
    }

    fn hanging(central: &CentralPool, len: usize) -> usize {
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
            let hangs = hanging(&central, LEN) * (LEN + 64);
            assert!(hangs <= shared, "{hangs} bytes of at most {shared}");
            assert_eq!(hangs > 0, shared > 0, "a list has few segments here, so that a batch of them fits");
            // Some slots are emptied, and filled again.
            burst(&central, LEN, 100);
            assert!(hanging(&central, LEN) * (LEN + 64) <= shared);
            end(&central);
        }
    }

    #[test]
    fn bookings_that_nobody_uses_are_for_others() {
        const LEN: usize = 4096;
        const OTHER: usize = 8192;
        let central = central(40_000);
        burst(&central, LEN, 100);
        let hung = hanging(&central, LEN);
        // All of it out: the slots are empty, and what they have reserved leaves no room for others.
        assert!(hung * (LEN + 64) + OTHER + 64 > 40_000);
        let out: Vec<Fresh> = (0..100).map(|_| take(&central, LEN)).collect();
        assert_eq!(hanging(&central, LEN), 0);
        burst(&central, OTHER, 40);
        assert!(hanging(&central, OTHER) > 0, "the others' reservations were in the way");
        // SAFETY: ours, and nothing uses them.
        out.into_iter().for_each(|fresh| unsafe { fresh.into_segment().release() });
        central.check(|_, _| ()).unwrap();
        end(&central);
    }

    #[test]
    fn who_is_refused_looks_for_idle_bookings_now_and_then() {
        const LEN: usize = 4096;
        let central = central(20_000);
        burst(&central, LEN, 100);
        let hung = hanging(&central, LEN);
        assert!(hung > 0 && central.reservations.bytes.load(Ordering::Relaxed) + LEN as u64 + 64 > 20_000);
        // Up to here there may have been looks in vain, and after this one there was one certainly.
        (0..=LOOKS_SKIPPED).for_each(|_| assert!(!central.unreserve(), "all of it hangs"));
        let out: Vec<Fresh> = (0..100).map(|_| take(&central, LEN)).collect();
        assert_eq!(hanging(&central, LEN), 0);
        let looks = (1..).find(|_| central.unreserve()).unwrap();
        assert!((1..=LOOKS_SKIPPED + 1).contains(&looks), "{looks}");
        assert_eq!(central.reservations.bytes.load(Ordering::Relaxed), 0);
        // SAFETY: ours, and nothing uses them.
        out.into_iter().for_each(|fresh| unsafe { fresh.into_segment().release() });
        central.check(|_, _| ()).unwrap();
        end(&central);
    }
}
