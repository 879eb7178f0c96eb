//! The exchange between threads, without the central pool's lock.
//!
//! A thread that finds its cache empty takes a batch that another thread has left in the class's transfer
//! cache ([`crate::freelist::transfer`]). A thread that finds its list full leaves half of it there, or in its
//! runs, under the lock, where there is no room. Such batches are kept from other classes until a request
//! finds no free memory and takes everything back.
//!
//! Neither can overtake a waiter. What a waiter has a right to is in no cache: it was taken out when the
//! waiter came or chose its window. A class to which a waiter may have a right is *closed* (`waiting`), which
//! this module looks at before it keeps a segment.

use std::ptr::NonNull;

use super::{CentralPool, Core, Fresh, tag};
use crate::freelist::{Descriptor, ThreadCache, list_of};
use crate::segment::Class;

impl CentralPool {
    // --- taking ------------------------------------------------------------------------------------------------------

    /// Takes a segment from this thread's cache, which is filled from a transfer cache if it is empty. Without the
    /// lock, and never before a waiter, which has a right to nothing that is cached. `None` in the child of a fork.
    pub(crate) fn refill(&self, class: Class, len: usize) -> Option<Fresh> {
        let mut held = self.gate.enter(self.cache()?)?;
        // Some callers have not tried for a hit: a thread that has completed copies since.
        let descriptor = held.take(class, len).or_else(|| {
            // A class without a list has no room either.
            if held.room(class) > 0 {
                held.take_batch(class, &self.transfers[list_of(class)]);
            }
            held.take(class, len)
        })?;
        // SAFETY: taken just now, of this class.
        Some(unsafe { Fresh::of_tag(self, descriptor, tag(len, list_of(class))) })
    }

    // --- returning ---------------------------------------------------------------------------------------------------

    /// Returns a segment into this thread's cache, in which there is made room if need be: the class gets its room, or
    /// half of the list goes to a transfer cache, or to its runs. `false`: the segment is still out, and the caller
    /// returns it under the lock. So it is where a waiting request may have a right to the segment.
    ///
    /// # Safety
    /// The descriptor is alive, out, of this class, in no list, and owned by the caller.
    pub(super) unsafe fn keep(&self, class: Class, descriptor: NonNull<Descriptor>, len: usize) -> bool {
        let Some(cache) = self.cache() else { return false };
        // SAFETY: this function's contract.
        if unsafe { self.keep_in(cache, class, descriptor, len) } {
            return true;
        }
        // The room is made before the segment is returned: as long as the segment is out, the central pool is alive.
        // Once it counts as returned, the central pool may be freed.
        // SAFETY: this function's contract.
        unsafe {
            !self.closes(class, descriptor.as_ref().base())
                && self.make_room(cache, class)
                && self.keep_in(cache, class, descriptor, len)
        }
    }

    /// Makes room in this thread cache for another segment of a class. `false`: there is none.
    fn make_room(&self, cache: &ThreadCache, class: Class) -> bool {
        let Some(mut held) = self.gate.enter(cache) else { return false };
        let half = held.room(class).div_ceil(2);
        // A half that finds no room there stays in the list until this thread has the lock, so that a check or another
        // thread that reclaims finds it at any time.
        if half > 0 && held.offload(class, half, &self.transfers[list_of(class)]) > 0 {
            return true;
        }
        drop(held);
        let mut core = self.lock();
        if half == 0 {
            // The class has no room in this cache yet, as in a thread that has only returned segments so far.
            return self.room(&mut core, cache, class) > 0;
        }
        // Where the gate keeps the owner out, the whole cache was reclaimed meanwhile, this half included.
        if let Some(mut held) = self.gate.enter(cache) {
            // SAFETY: drained from this thread's cache, so free and alive.
            unsafe { core.arena.give_chain(held.drain(class, half)) };
        }
        true
    }

    /// Returns a segment into this thread cache, if the gate admits the owner, the list has room, and no request may
    /// have a right to the segment. `false`: nothing was done.
    ///
    /// # Safety
    /// As for [`CentralPool::keep`].
    unsafe fn keep_in(
        &self,
        cache: &ThreadCache,
        class: Class,
        descriptor: NonNull<Descriptor>,
        len: usize,
    ) -> bool {
        let Some(mut held) = self.gate.enter(cache) else { return false };
        // SAFETY: this function's contract.
        if self.closes(class, unsafe { descriptor.as_ref() }.base()) {
            return false;
        }
        if self.is_open(class) {
            held.open(class);
        }
        // SAFETY: this function's contract, and that no request has a right to it was seen inside the gate.
        unsafe { held.put_closed(class, descriptor, len) }
    }

    // --- reclaiming --------------------------------------------------------------------------------------------------

    /// Moves all batches in transfer caches to their runs. A batch that an owner is moving meanwhile is left. `false`:
    /// there was nothing.
    pub(super) fn drain_transfers(&self, core: &mut Core) -> bool {
        let mut any = false;
        for transfer in &self.transfers {
            let chain = transfer.drain();
            any |= !chain.is_empty();
            // SAFETY: just taken from a transfer cache, so free and alive.
            unsafe { core.arena.give_chain(chain) };
        }
        any
    }
}
