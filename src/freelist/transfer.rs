//! Where thread caches leave batches for each other.
//!
//! A thread that returns more than it takes fills its thread cache; a thread that takes more than it returns empties
//! its own. Between them hangs a transfer cache for each class: a few slots, each with room for one batch. A batch is
//! moved as an array of addresses: neither side touches the descriptors themselves, whose lines the other's cache may
//! have, and thirty-two segments change hands for the price of a few lines.
//!
//! A slot goes from EMPTY to MOVING to FULL and, by way of MOVING again, back. Who has made it MOVING has its array for
//! itself; others go on to the next slot, so nobody waits for anybody. A transfer cache has a fixed number of slots,
//! and what finds none free goes back to its runs under the central pool's lock.
//!
//! All that hangs in transfer caches has a bound, so each slot *reserves* what it holds. A reservation stays when its
//! batch is taken down, since the next one is coming: a sum that each batch changed twice would travel between the two
//! threads as often as the slot itself. For the same reason an empty slot that has room reserved comes before one
//! without, whoever left it. Who finds everything reserved takes the reservations of empty slots away
//! ([`TransferCache::unreserve_idle`]).
//!
//! Owners of thread caches touch transfer caches inside the [`super::Gate`] only, so who has closed it finds no slot
//! MOVING. Whoever takes batches back without closing it leaves what is MOVING where it is.

use std::ptr::NonNull;
use std::sync::OnceLock;

use super::descriptor::{Chain, Descriptor};
use crate::sync::{AtomicPtr, AtomicU32, Ordering};

/// Batches that hang at most in a transfer cache. Few, because they are memory that no other class can use until it is
/// collected.
pub(crate) const SLOTS: usize = if cfg!(loom) { 2 } else { 8 };

/// Segments in a batch at most.
pub(crate) const BATCH: usize = if cfg!(loom) { 2 } else { 32 };

const EMPTY: u32 = 0;
const MOVING: u32 = 1;
const FULL: u32 = 2;

/// Two lines apart, since neighbouring lines are fetched in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct TransferSlot {
    state: AtomicU32,
    /// Belongs, with what follows, to whoever has made the slot MOVING; so these accesses are relaxed.
    count: AtomicU32,
    /// Segments that there is leave to hang here: no fewer than do. Others peek at it: a nonzero that is old is read
    /// again by who has made the slot MOVING, and a zero that is old is passed over.
    reserved: AtomicU32,
    descriptors: [AtomicPtr<Descriptor>; BATCH],
}

impl TransferSlot {
    fn new() -> Self {
        Self {
            state: AtomicU32::new(EMPTY),
            count: AtomicU32::new(0),
            reserved: AtomicU32::new(0),
            descriptors: std::array::from_fn(|_| AtomicPtr::new(std::ptr::null_mut())),
        }
    }

    /// Makes the slot ours, if it is in this state.
    fn enter(&self, from: u32) -> bool {
        // Acquire: pairs with the release in `leave`, so that a taker sees the batch, and a giver writes after the last
        // taker has read.
        #[cfg(not(pinpool_planted = "rack_take_relaxed"))]
        let order = Ordering::Acquire;
        #[cfg(pinpool_planted = "rack_take_relaxed")]
        let order = Ordering::Relaxed;
        // Looked at first: a failing exchange would take the line away from others for nothing.
        self.state.load(Ordering::Relaxed) == from
            && self.state.compare_exchange(from, MOVING, order, Ordering::Relaxed).is_ok()
    }

    fn leave(&self, to: u32) {
        // Release: pairs with the acquire in `enter`.
        #[cfg(not(pinpool_planted = "rack_full_relaxed"))]
        let order = Ordering::Release;
        #[cfg(pinpool_planted = "rack_full_relaxed")]
        let order = Ordering::Relaxed;
        self.state.store(to, order);
    }

    /// Gives up the reservation of an empty slot that is ours. How many segments it was for.
    fn unreserve(&self) -> u32 {
        let reserved = self.reserved.load(Ordering::Relaxed);
        self.reserved.store(0, Ordering::Relaxed);
        reserved
    }

    fn descriptors(&self) -> &[AtomicPtr<Descriptor>] {
        let count = self.count.load(Ordering::Relaxed) as usize;
        &self.descriptors[..count.min(BATCH)]
    }
}

/// The slots of one class, made when the first batch comes.
#[derive(Debug, Default)]
pub(crate) struct TransferCache {
    slots: OnceLock<Box<[TransferSlot; SLOTS]>>,
}

impl TransferCache {
    pub(crate) fn new() -> Self {
        let transfer = Self::default();
        // Loom does not see that making something once comes before its use by others.
        if cfg!(loom) {
            transfer.slots();
        }
        transfer
    }

    fn slots(&self) -> &[TransferSlot; SLOTS] {
        self.slots.get_or_init(|| Box::new(std::array::from_fn(|_| TransferSlot::new())))
    }

    /// Hangs up a batch of these, of which there are at most [`BATCH`]; `false` where all slots are taken, or where
    /// none has reserved so many and `reserve` refuses what one lacks. `hint` spreads threads over the slots.
    pub(super) fn put<'a>(
        &self,
        hint: usize,
        batch: impl ExactSizeIterator<Item = *mut Descriptor> + 'a,
        reserve: impl FnOnce(u32) -> bool,
    ) -> bool {
        debug_assert!(batch.len() <= BATCH);
        let (slots, count) = (self.slots(), batch.len() as u32);
        let find = |suits: &dyn Fn(&TransferSlot) -> bool| {
            let mut order = (0..SLOTS).map(|i| &slots[hint.wrapping_add(i) % SLOTS]);
            order.find(|slot| suits(slot) && slot.enter(EMPTY))
        };
        // One that has room reserved, if there is any: else each thread would reserve anew beside what another has
        // left.
        let reserved = find(&|slot| slot.reserved.load(Ordering::Relaxed) >= count);
        let Some(slot) = reserved.or_else(|| find(&|_| true)) else { return false };
        let reserved = slot.reserved.load(Ordering::Relaxed);
        if count > reserved {
            if !reserve(count - reserved) {
                slot.leave(EMPTY);
                return false;
            }
            slot.reserved.store(count, Ordering::Relaxed);
        }
        slot.count.store(count, Ordering::Relaxed);
        slot.descriptors
            .iter()
            .zip(batch)
            .for_each(|(place, descriptor)| place.store(descriptor, Ordering::Relaxed));
        slot.leave(FULL);
        true
    }

    /// Takes a batch down, and shows it before anyone else may write there. How many there were; 0: there is no batch.
    pub(super) fn take(&self, hint: usize, sink: impl FnOnce(&[AtomicPtr<Descriptor>])) -> u32 {
        let Some(slots) = self.slots.get() else { return 0 };
        let Some(slot) =
            (0..SLOTS).map(|i| &slots[hint.wrapping_add(i) % SLOTS]).find(|slot| slot.enter(FULL))
        else {
            return 0;
        };
        let descriptors = slot.descriptors();
        let count = descriptors.len() as u32;
        sink(descriptors);
        slot.leave(EMPTY);
        count
    }

    /// Takes all batches down as a chain, and gives up all reservations, but for slots that others are at. The chain,
    /// and how many segments were reserved.
    pub(crate) fn drain(&self) -> (Chain, u32) {
        let (mut chain, mut reserved) = (Chain::new(), 0);
        for slot in self.slots.get().into_iter().flat_map(|slots| slots.iter()) {
            if slot.enter(FULL) {
                for descriptor in slot
                    .descriptors()
                    .iter()
                    .filter_map(|descriptor| NonNull::new(descriptor.load(Ordering::Relaxed)))
                {
                    // SAFETY: what hangs in a transfer cache is alive, free and in no other list, and it was just taken
                    // down.
                    unsafe { chain.push(descriptor) };
                }
                reserved += slot.unreserve();
                slot.leave(EMPTY);
            }
        }
        (chain, reserved + self.unreserve_idle())
    }

    /// Gives up the reservations of empty slots. How many segments they were for.
    pub(crate) fn unreserve_idle(&self) -> u32 {
        let mut reserved = 0;
        for slot in self.slots.get().into_iter().flat_map(|slots| slots.iter()) {
            // Looked at first, as in `enter`.
            if slot.reserved.load(Ordering::Relaxed) == 0 {
                continue;
            }
            #[cfg(pinpool_planted = "unbook_in_use")]
            if slot.state.load(Ordering::Relaxed) != FULL {
                reserved += slot.unreserve();
                continue;
            }
            if slot.enter(EMPTY) {
                reserved += slot.unreserve();
                slot.leave(EMPTY);
            }
        }
        reserved
    }

    /// Segments that the slots have reserved; `None` where one has more than it reserved. For `check()`, as `for_each`.
    pub(crate) fn reserved(&self) -> Option<u64> {
        let mut sum = 0;
        for slot in self.slots.get().into_iter().flat_map(|slots| slots.iter()) {
            // Acquire: pairs with the release in `leave`.
            let full = slot.state.load(Ordering::Acquire) == FULL;
            let reserved = slot.reserved.load(Ordering::Relaxed);
            if full && slot.count.load(Ordering::Relaxed) > reserved {
                return None;
            }
            sum += u64::from(reserved);
        }
        Some(sum)
    }

    /// Segments on the slots. Exact only while nobody moves.
    #[cfg(all(test, loom))]
    pub(crate) fn count(&self) -> usize {
        let mut count = 0;
        self.for_each(|_| count += 1);
        count
    }

    /// Visits every descriptor on the slots. For `check()`: under the central pool's lock, with every thread cache
    /// quiet.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(&Descriptor)) {
        for slot in self.slots.get().into_iter().flat_map(|slots| slots.iter()) {
            // Acquire: pairs with the release in `leave`.
            if slot.state.load(Ordering::Acquire) != FULL {
                continue;
            }
            for descriptor in slot.descriptors() {
                // SAFETY: nobody moves by the caller's word, and what hangs in a transfer cache is alive.
                if let Some(descriptor) = unsafe { descriptor.load(Ordering::Relaxed).as_ref() } {
                    visit(descriptor);
                }
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_hook_with_room_booked_comes_before_one_without() {
        let transfer = TransferCache::new();
        let put = |hint: usize, count: usize, reserve: &dyn Fn(u32) -> bool| {
            transfer.put(hint, vec![NonNull::dangling().as_ptr(); count].into_iter(), reserve)
        };
        let nothing_more = |more| panic!("{more} reserved, and there was room");
        assert!(put(0, 4, &|more| more == 4), "the first reserves");
        assert_eq!(transfer.take(0, |_| ()), 4);
        assert!(put(5, 3, &nothing_more), "whoever it is");
        assert!(!put(5, 4, &|more| more != 4), "it is in use, and a second one is refused");
        assert!(put(5, 4, &|more| more == 4), "or granted");
        assert_eq!((transfer.take(5, |_| ()), transfer.take(5, |_| ())), (4, 3));
        assert_eq!(transfer.reserved(), Some(8));
        assert!(
            put(1, 5, &|more| more == 5 || more == 1),
            "where none has enough, the rest of it or all is reserved"
        );
    }
}
