//! Transfer caches: through them thread caches pass batches of free segments to each other.
//!
//! A thread that returns more than it takes fills its thread cache. A thread that takes more than it returns empties
//! its own. Between them each class has a transfer cache: a few slots, each with room for one batch. A batch moves as
//! an array of addresses. Neither thread touches the descriptors themselves, whose cache lines another core may have,
//! so 32 segments change their thread for the price of a few cache lines.
//!
//! A slot goes from EMPTY to MOVING to FULL, and by way of MOVING back to EMPTY. The thread that has made the slot
//! MOVING has its array to itself. Other threads go on to the next slot, so no thread waits for another. A batch that
//! finds no empty slot goes back to its runs under the central pool's lock.
//!
//! Each class has a quota of bytes, which the number and the room of its slots keep. Both are worked out once, so no
//! batch touches a sum that other threads change.
//!
//! Owners of thread caches touch transfer caches inside the [`super::Gate`] only. So a cold side that has shut all
//! owners out finds no slot MOVING. A cold side that has not leaves slots that are MOVING as they are.

use std::ptr::NonNull;
use std::sync::OnceLock;

use super::descriptor::{Chain, Descriptor};
use crate::sync::{AtomicPtr, AtomicU32, Ordering};

/// The most slots of a transfer cache. There are few, because other classes cannot use the memory in them until it is
/// reclaimed.
const MOST_SLOTS: usize = if cfg!(loom) { 2 } else { 8 };

/// The least slots of a transfer cache. With fewer of them, threads of one class would often find none that they can
/// use.
const LEAST_SLOTS: usize = if cfg!(loom) { 1 } else { 4 };

/// The largest number of segments in a batch.
const BATCH: usize = if cfg!(loom) { 2 } else { 32 };

const EMPTY: u32 = 0;
const MOVING: u32 = 1;
const FULL: u32 = 2;

/// Aligned to two cache lines, since processors fetch neighbouring lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct TransferSlot {
    state: AtomicU32,
    /// Segments in the slot. This field and the next belong to the thread that has made the slot MOVING, so accesses to
    /// them are relaxed. Only [`TransferCache::count`] reads this field without the slot, and says what it pairs with.
    count: AtomicU32,
    descriptors: [AtomicPtr<Descriptor>; BATCH],
}

impl TransferSlot {
    fn new() -> Self {
        Self {
            state: AtomicU32::new(EMPTY),
            count: AtomicU32::new(0),
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

    fn descriptors(&self) -> &[AtomicPtr<Descriptor>] {
        let count = self.count.load(Ordering::Relaxed) as usize;
        &self.descriptors[..count.min(BATCH)]
    }
}

/// The transfer cache of one class.
#[derive(Debug)]
pub(crate) struct TransferCache {
    /// The number of slots, and of segments for which each has room. Both are 0 where the quota is too small.
    count: usize,
    room: usize,
    /// Made when the first batch comes.
    slots: OnceLock<Box<[TransferSlot]>>,
}

impl TransferCache {
    /// For a class of this stride, whose transfer cache may hold `quota` bytes, to the nearest segment. (Strides are a
    /// little more than a power of two, and quotas mostly are one: eight batches are to fit where eight powers would.) It
    /// has from [`LEAST_SLOTS`] to [`MOST_SLOTS`] slots, or none where fewer than [`LEAST_SLOTS`] segments fit.
    pub(crate) fn new(quota: usize, stride: usize) -> Self {
        let most = Some((quota + stride / 2) / stride).filter(|most| *most >= LEAST_SLOTS).unwrap_or(0);
        let room = most.div_ceil(MOST_SLOTS).min(BATCH);
        let count = most.checked_div(room).unwrap_or(0).min(MOST_SLOTS);
        let transfer = Self { count, room, slots: OnceLock::new() };
        // Loom does not see that initialising a `OnceLock` comes before its use by other threads.
        if cfg!(loom) {
            transfer.slots();
        }
        transfer
    }

    fn slots(&self) -> &[TransferSlot] {
        self.slots.get_or_init(|| (0..self.count).map(|_| TransferSlot::new()).collect())
    }

    /// The slots that were made.
    fn made(&self) -> &[TransferSlot] {
        self.slots.get().map_or(&[], |slots| slots)
    }

    /// The most segments in a batch.
    pub(super) fn room(&self) -> usize {
        self.room
    }

    /// Puts a batch of at most [`TransferCache::room`] segments into a slot. `false`: no slot is empty. `hint`, here and
    /// in `take`, is the slot to look at first, so that threads spread over the slots.
    pub(crate) fn put(&self, hint: usize, batch: impl ExactSizeIterator<Item = *mut Descriptor>) -> bool {
        debug_assert!(batch.len() <= BATCH);
        let Some(slot) = entered(self.slots(), hint, EMPTY) else { return false };
        slot.count.store(batch.len() as u32, Ordering::Relaxed);
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
        let Some(slot) = entered(self.made(), hint, FULL) else { return 0 };
        let descriptors = slot.descriptors();
        let stay = descriptors.len().saturating_sub(most as usize);
        let taken = &descriptors[stay..];
        sink(taken);
        // Release: pairs with the acquire in `count`.
        slot.count.store(stay as u32, Ordering::Release);
        slot.leave(if stay == 0 { EMPTY } else { FULL });
        taken.len() as u32
    }

    /// Takes all batches as one chain, except in slots that another thread is moving.
    pub(crate) fn drain(&self) -> Chain {
        let mut chain = Chain::new();
        for slot in self.made() {
            if slot.enter(FULL) {
                for descriptor in slot
                    .descriptors()
                    .iter()
                    .filter_map(|descriptor| NonNull::new(descriptor.load(Ordering::Relaxed)))
                {
                    // SAFETY: a segment in a slot is alive, free and in no other list, and the slot is emptied here.
                    unsafe { chain.push(descriptor) };
                }
                slot.count.store(0, Ordering::Relaxed);
                slot.leave(EMPTY);
            }
        }
        chain
    }

    /// Segments in the slots. Exact while no thread moves a batch. A caller that finds none sees where those went that
    /// were there, unless another thread has drained the slots.
    pub(crate) fn count(&self) -> usize {
        // Acquire: pairs with the release in `take`.
        self.made().iter().map(|slot| slot.count.load(Ordering::Acquire) as usize).sum()
    }

    /// Visits every descriptor in the slots. For `check()` and the census: under the central pool's lock, with all
    /// owners shut out.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(&Descriptor)) {
        for slot in self.made() {
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

/// The first of the slots, from the number `hint` on and around, that could be made MOVING from the state `from`.
fn entered(slots: &[TransferSlot], hint: usize, from: u32) -> Option<&TransferSlot> {
    let (before, behind) = slots.split_at(hint.checked_rem(slots.len())?);
    behind.iter().chain(before).find(|slot| slot.enter(from))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn slots_keep_the_quota_of_their_class() {
        let shape = |quota: usize, stride: usize| {
            let transfer = TransferCache::new(quota, stride);
            (transfer.count, transfer.room)
        };
        // None, where fewer than four segments fit. What is missing may be half a segment.
        assert_eq!([shape(0, 64), shape(223, 64), shape(224, 64)], [(0, 0), (0, 0), (4, 1)]);
        // Up to eight hold one segment each. Where more fit, the slots have room for more.
        assert_eq!([shape(8 * 64, 64), shape(9 * 64, 64), shape(19 * 64, 64)], [(8, 1), (4, 2), (6, 3)]);
        // A batch has no more than 32 segments, and there are no more than eight slots.
        assert_eq!([shape(200 * 64, 64), shape(1 << 30, 64)], [(8, 25), (8, 32)]);
        for quota in (0..100_000).step_by(777) {
            for stride in [32, 1000, 4160] {
                let (count, room) = shape(quota, stride);
                assert!(count * room * stride <= quota + stride / 2);
            }
        }
    }

    #[test]
    fn a_batch_goes_to_the_first_empty_slot() {
        let transfer = TransferCache::new(4 * 64, 64);
        let batch = || std::iter::once(NonNull::dangling().as_ptr());
        let put = |hint: usize| transfer.put(hint, batch());
        assert!(put(3) && put(3) && put(usize::MAX) && put(0));
        assert!(!put(0) && transfer.count() == 4, "all slots are in use");
        assert_eq!([transfer.take(2, 1, |_| ()), transfer.take(2, 0, |_| ())], [1, 0]);
        assert_eq!((transfer.count(), put(0), put(0)), (3, true, false));
        let none = TransferCache::new(3 * 64, 64);
        assert_eq!((none.put(0, batch()), none.take(0, 1, |_| ()), none.count()), (false, 0, 0));
    }
}
