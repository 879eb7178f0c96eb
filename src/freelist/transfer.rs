//! Transfer caches: through them thread caches pass batches of free segments to each other.
//!
//! A thread that returns more than it takes fills its thread cache. A thread that takes more than it returns empties
//! its own. Between them each class has a transfer cache: a few slots, each with room for one batch. A batch moves as
//! an array of addresses. Neither thread touches the descriptors themselves, whose cache lines another core may have,
//! so 32 segments change their thread for the price of a few cache lines.
//!
//! A slot goes from EMPTY to MOVING to FULL, and by way of MOVING back to EMPTY. The thread that has made the slot
//! MOVING has its array to itself. Other threads go on to the next slot, so no thread waits for another. A transfer
//! cache has a fixed number of slots. A batch that finds no empty slot goes back to its runs under the central pool's
//! lock.
//!
//! The bytes in all transfer caches of a pool have a bound, so each slot *reserves* what it holds. A reservation stays
//! when its batch is taken, since the next batch is likely to come: a sum that each batch changed twice would travel
//! between the two threads' cores as often as the slot itself. For the same reason `put` prefers an empty slot whose
//! reservation is large enough, no matter which thread made it. A thread that finds the whole bound reserved drops the
//! reservations of empty slots ([`TransferCache::unreserve_idle`]).
//!
//! Owners of thread caches touch transfer caches inside the [`super::Gate`] only. So a cold side that has shut all
//! owners out finds no slot MOVING. A cold side that has not leaves slots that are MOVING as they are.

use std::ptr::NonNull;
use std::sync::OnceLock;

use super::descriptor::{Chain, Descriptor};
use crate::sync::{AtomicPtr, AtomicU32, Ordering};

/// Number of slots in a transfer cache. There are few, because other classes cannot use the memory in them until it is
/// reclaimed.
pub(crate) const SLOTS: usize = if cfg!(loom) { 2 } else { 8 };

/// The largest number of segments in a batch.
pub(crate) const BATCH: usize = if cfg!(loom) { 2 } else { 32 };

const EMPTY: u32 = 0;
const MOVING: u32 = 1;
const FULL: u32 = 2;

/// Aligned to two cache lines, since processors fetch neighbouring lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct TransferSlot {
    state: AtomicU32,
    /// Segments in the slot. This field and those below belong to the thread that has made the slot MOVING, so accesses
    /// to them are relaxed.
    count: AtomicU32,
    /// Segments that the slot has reserved room for: at least `count`. Other threads also read it without the slot. A
    /// stale value does no harm: the thread reads the field again once it has made the slot MOVING, and a slot with a
    /// stale zero is left out once.
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

    /// Makes the slot MOVING if it is in the state `from`. `true`: the slot belongs to this thread until it calls
    /// `leave`.
    fn enter(&self, from: u32) -> bool {
        // Acquire: pairs with the release in `leave`. So the thread that takes a batch sees it, and the thread that
        // puts one writes after the last taker has read.
        // Loaded first: an exchange that fails would take the cache line from another core for nothing.
        self.state.load(Ordering::Relaxed) == from
            && self.state.compare_exchange(from, MOVING, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    fn leave(&self, to: u32) {
        // Release: pairs with the acquire in `enter`.
        self.state.store(to, Ordering::Release);
    }

    /// Drops the reservation of an empty slot that belongs to this thread. Returns how many segments it was for.
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

/// The slots of one class. They are made when the first batch comes.
#[derive(Debug, Default)]
pub(crate) struct TransferCache {
    slots: OnceLock<Box<[TransferSlot; SLOTS]>>,
}

impl TransferCache {
    pub(crate) fn new() -> Self {
        let transfer = Self::default();
        // Loom does not see that initialising a `OnceLock` comes before its use by other threads.
        if cfg!(loom) {
            transfer.slots();
        }
        transfer
    }

    fn slots(&self) -> &[TransferSlot; SLOTS] {
        self.slots.get_or_init(|| Box::new(std::array::from_fn(|_| TransferSlot::new())))
    }

    /// Puts a batch of at most [`BATCH`] segments into a slot. `false`: no slot is empty, or no empty slot has a large
    /// enough reservation and `reserve` refuses the number of segments by which it is too small. `hint`, here and in
    /// `take`, is the slot to look at first, so that threads spread over the slots.
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
        // A slot with a large enough reservation first: else each thread would make a reservation of its own beside
        // those that other threads have left.
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

    /// Takes a batch, or `most` of its segments: the others stay in their slot. `sink` sees what is taken while the slot
    /// still belongs to this thread. Returns how many segments these are; 0: there is no batch.
    pub(super) fn take(&self, hint: usize, most: u32, sink: impl FnOnce(&[AtomicPtr<Descriptor>])) -> u32 {
        let Some(slots) = self.slots.get() else { return 0 };
        let Some(slot) =
            (0..SLOTS).map(|i| &slots[hint.wrapping_add(i) % SLOTS]).find(|slot| slot.enter(FULL))
        else {
            return 0;
        };
        let descriptors = slot.descriptors();
        let stay = descriptors.len().saturating_sub(most as usize);
        let taken = &descriptors[stay..];
        sink(taken);
        slot.count.store(stay as u32, Ordering::Relaxed);
        slot.leave(if stay == 0 { EMPTY } else { FULL });
        taken.len() as u32
    }

    /// Takes all batches as one chain and drops all reservations, except in slots that another thread is moving.
    /// Returns the chain, and how many segments the dropped reservations were for.
    pub(crate) fn drain(&self) -> (Chain, u32) {
        let (mut chain, mut reserved) = (Chain::new(), 0);
        for slot in self.slots.get().into_iter().flat_map(|slots| slots.iter()) {
            if slot.enter(FULL) {
                for descriptor in slot
                    .descriptors()
                    .iter()
                    .filter_map(|descriptor| NonNull::new(descriptor.load(Ordering::Relaxed)))
                {
                    // SAFETY: a segment in a slot is alive, free and in no other list, and the slot is emptied here.
                    unsafe { chain.push(descriptor) };
                }
                reserved += slot.unreserve();
                slot.leave(EMPTY);
            }
        }
        (chain, reserved + self.unreserve_idle())
    }

    /// Drops the reservations of empty slots. Returns how many segments they were for.
    pub(crate) fn unreserve_idle(&self) -> u32 {
        let mut reserved = 0;
        for slot in self.slots.get().into_iter().flat_map(|slots| slots.iter()) {
            // Loaded first, as in `enter`.
            if slot.reserved.load(Ordering::Relaxed) == 0 {
                continue;
            }
            if slot.enter(EMPTY) {
                reserved += slot.unreserve();
                slot.leave(EMPTY);
            }
        }
        reserved
    }

    /// Segments that the slots have reserved; `None` if a slot holds more than it has reserved. For `check()`, under
    /// the conditions of `for_each`.
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

    /// Segments in the slots. Exact while no thread moves a batch.
    #[cfg(all(test, loom))]
    pub(crate) fn count(&self) -> usize {
        let mut count = 0;
        self.for_each(|_| count += 1);
        count
    }

    /// Visits every descriptor in the slots. For `check()` and the census: under the central pool's lock, with all
    /// owners shut out.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(&Descriptor)) {
        for slot in self.slots.get().into_iter().flat_map(|slots| slots.iter()) {
            // Acquire: pairs with the release in `leave`.
            if slot.state.load(Ordering::Acquire) != FULL {
                continue;
            }
            for descriptor in slot.descriptors() {
                // SAFETY: no batch moves meanwhile (the caller sees to that), and a segment in a slot is alive.
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
        let nothing_more = |more| panic!("{more} reserved although a slot has room reserved");
        assert!(put(0, 4, &|more| more == 4), "the first batch reserves");
        assert_eq!(transfer.take(0, u32::MAX, |_| ()), 4);
        assert!(put(5, 3, &nothing_more), "another thread uses the reservation");
        assert!(!put(5, 4, &|more| more != 4), "that slot is in use, and a second reservation is refused");
        assert!(put(5, 4, &|more| more == 4), "a second reservation is granted");
        assert_eq!((transfer.take(5, u32::MAX, |_| ()), transfer.take(5, u32::MAX, |_| ())), (4, 3));
        assert_eq!(transfer.reserved(), Some(8));
        assert!(
            put(1, 5, &|more| more == 5 || more == 1),
            "where no slot has enough, the missing part or the whole is reserved"
        );
    }
}
