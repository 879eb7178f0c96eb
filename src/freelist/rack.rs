//! Where shards leave batches for each other.
//!
//! A thread that returns more than it takes fills its shard; a thread that takes more than it returns empties its own.
//! Between them hangs a rack for each class: a few hooks, each with room for one batch. A batch is moved as an array of
//! addresses: neither side touches the slots themselves, whose lines the other's cache may have, and thirty-two
//! segments change hands for the price of a few lines.
//!
//! A hook goes from EMPTY to MOVING to FULL and, by way of MOVING again, back. Who has made it MOVING has its array for
//! itself; others go on to the next hook, so nobody waits for anybody. A rack has a fixed number of hooks, and what
//! finds none free goes back to its runs under the central pool's lock.
//!
//! All that hangs in racks has a bound, so each hook *books* what it holds. A booking stays when its batch is taken
//! down, since the next one is coming: a sum that each batch changed twice would travel between the two threads as
//! often as the hook itself. For the same reason an empty hook that has room booked comes before one without, whoever
//! left it. Who finds everything booked takes the bookings of empty hooks away ([`Rack::unbook_idle`]).
//!
//! Owners of shards touch racks inside the [`super::Gate`] only, so who has closed it finds no hook MOVING. Whoever
//! takes batches back without closing it leaves what is MOVING where it is.

use std::ptr::NonNull;
use std::sync::OnceLock;

use super::slot::{Chain, Slot};
use crate::sync::{AtomicPtr, AtomicU32, Ordering};

/// Batches that hang at most in a rack. Few, because they are memory that no other class can use until it is collected.
pub(crate) const HOOKS: usize = if cfg!(loom) { 2 } else { 8 };

/// Segments in a batch at most.
pub(crate) const BATCH: usize = if cfg!(loom) { 2 } else { 32 };

const EMPTY: u32 = 0;
const MOVING: u32 = 1;
const FULL: u32 = 2;

/// Two lines apart, since neighbouring lines are fetched in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct Hook {
    state: AtomicU32,
    /// Belongs, with what follows, to whoever has made the hook MOVING; so these accesses are relaxed.
    count: AtomicU32,
    /// Segments that there is leave to hang here: no fewer than do. Others peek at it: a nonzero that is old is read
    /// again by who has made the hook MOVING, and a zero that is old is passed over.
    booked: AtomicU32,
    slots: [AtomicPtr<Slot>; BATCH],
}

impl Hook {
    fn new() -> Self {
        Self {
            state: AtomicU32::new(EMPTY),
            count: AtomicU32::new(0),
            booked: AtomicU32::new(0),
            slots: std::array::from_fn(|_| AtomicPtr::new(std::ptr::null_mut())),
        }
    }

    /// Makes the hook ours, if it is in this state.
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

    /// Gives up the booking of an empty hook that is ours. How many segments it was for.
    fn unbook(&self) -> u32 {
        let booked = self.booked.load(Ordering::Relaxed);
        self.booked.store(0, Ordering::Relaxed);
        booked
    }

    fn slots(&self) -> &[AtomicPtr<Slot>] {
        let count = self.count.load(Ordering::Relaxed) as usize;
        &self.slots[..count.min(BATCH)]
    }
}

/// The hooks of one class, made when the first batch comes.
#[derive(Debug, Default)]
pub(crate) struct Rack {
    hooks: OnceLock<Box<[Hook; HOOKS]>>,
}

impl Rack {
    pub(crate) fn new() -> Self {
        let rack = Self::default();
        // Loom does not see that making something once comes before its use by others.
        if cfg!(loom) {
            rack.hooks();
        }
        rack
    }

    fn hooks(&self) -> &[Hook; HOOKS] {
        self.hooks.get_or_init(|| Box::new(std::array::from_fn(|_| Hook::new())))
    }

    /// Hangs up a batch of these, of which there are at most [`BATCH`]; `false` where all hooks are taken, or where
    /// none has booked so many and `book` refuses what one lacks. `hint` spreads threads over the hooks.
    pub(super) fn put<'a>(
        &self,
        hint: usize,
        batch: impl ExactSizeIterator<Item = *mut Slot> + 'a,
        book: impl FnOnce(u32) -> bool,
    ) -> bool {
        debug_assert!(batch.len() <= BATCH);
        let (hooks, count) = (self.hooks(), batch.len() as u32);
        let find = |suits: &dyn Fn(&Hook) -> bool| {
            let mut order = (0..HOOKS).map(|i| &hooks[hint.wrapping_add(i) % HOOKS]);
            order.find(|hook| suits(hook) && hook.enter(EMPTY))
        };
        // One that has room booked, if there is any: else each thread would book anew beside what another has left.
        let booked = find(&|hook| hook.booked.load(Ordering::Relaxed) >= count);
        let Some(hook) = booked.or_else(|| find(&|_| true)) else { return false };
        let booked = hook.booked.load(Ordering::Relaxed);
        if count > booked {
            if !book(count - booked) {
                hook.leave(EMPTY);
                return false;
            }
            hook.booked.store(count, Ordering::Relaxed);
        }
        hook.count.store(count, Ordering::Relaxed);
        hook.slots.iter().zip(batch).for_each(|(place, slot)| place.store(slot, Ordering::Relaxed));
        hook.leave(FULL);
        true
    }

    /// Takes a batch down, and shows it before anyone else may write there. How many there were; 0: there is no batch.
    pub(super) fn take(&self, hint: usize, sink: impl FnOnce(&[AtomicPtr<Slot>])) -> u32 {
        let Some(hooks) = self.hooks.get() else { return 0 };
        let Some(hook) =
            (0..HOOKS).map(|i| &hooks[hint.wrapping_add(i) % HOOKS]).find(|hook| hook.enter(FULL))
        else {
            return 0;
        };
        let slots = hook.slots();
        let count = slots.len() as u32;
        sink(slots);
        hook.leave(EMPTY);
        count
    }

    /// Takes all batches down as a chain, and gives up all bookings, but for hooks that others are at. The chain, and
    /// how many segments were booked.
    pub(crate) fn strip(&self) -> (Chain, u32) {
        let (mut chain, mut booked) = (Chain::new(), 0);
        for hook in self.hooks.get().into_iter().flat_map(|hooks| hooks.iter()) {
            if hook.enter(FULL) {
                for slot in hook.slots().iter().filter_map(|slot| NonNull::new(slot.load(Ordering::Relaxed)))
                {
                    // SAFETY: what hangs in a rack is alive, free and in no other list, and it was just taken down.
                    unsafe { chain.push(slot) };
                }
                booked += hook.unbook();
                hook.leave(EMPTY);
            }
        }
        (chain, booked + self.unbook_idle())
    }

    /// Gives up the bookings of empty hooks. How many segments they were for.
    pub(crate) fn unbook_idle(&self) -> u32 {
        let mut booked = 0;
        for hook in self.hooks.get().into_iter().flat_map(|hooks| hooks.iter()) {
            // Looked at first, as in `enter`.
            if hook.booked.load(Ordering::Relaxed) == 0 {
                continue;
            }
            #[cfg(pinpool_planted = "unbook_in_use")]
            if hook.state.load(Ordering::Relaxed) != FULL {
                booked += hook.unbook();
                continue;
            }
            if hook.enter(EMPTY) {
                booked += hook.unbook();
                hook.leave(EMPTY);
            }
        }
        booked
    }

    /// Segments that the hooks have booked; `None` where one has more than it booked. For `check()`, as `for_each`.
    pub(crate) fn booked(&self) -> Option<u64> {
        let mut sum = 0;
        for hook in self.hooks.get().into_iter().flat_map(|hooks| hooks.iter()) {
            // Acquire: pairs with the release in `leave`.
            let full = hook.state.load(Ordering::Acquire) == FULL;
            let booked = hook.booked.load(Ordering::Relaxed);
            if full && hook.count.load(Ordering::Relaxed) > booked {
                return None;
            }
            sum += u64::from(booked);
        }
        Some(sum)
    }

    /// Segments on the hooks. Exact only while nobody moves.
    #[cfg(all(test, loom))]
    pub(crate) fn count(&self) -> usize {
        let mut count = 0;
        self.for_each(|_| count += 1);
        count
    }

    /// Visits every slot on the hooks. For `check()`: under the central pool's lock, with every shard quiet.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(&Slot)) {
        for hook in self.hooks.get().into_iter().flat_map(|hooks| hooks.iter()) {
            // Acquire: pairs with the release in `leave`.
            if hook.state.load(Ordering::Acquire) != FULL {
                continue;
            }
            for slot in hook.slots() {
                // SAFETY: nobody moves by the caller's word, and what hangs in a rack is alive.
                if let Some(slot) = unsafe { slot.load(Ordering::Relaxed).as_ref() } {
                    visit(slot);
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
        let rack = Rack::new();
        let put = |hint: usize, count: usize, book: &dyn Fn(u32) -> bool| {
            rack.put(hint, vec![NonNull::dangling().as_ptr(); count].into_iter(), book)
        };
        let nothing_more = |more| panic!("{more} booked, and there was room");
        assert!(put(0, 4, &|more| more == 4), "the first books");
        assert_eq!(rack.take(0, |_| ()), 4);
        assert!(put(5, 3, &nothing_more), "whoever it is");
        assert!(!put(5, 4, &|more| more != 4), "it is in use, and a second one is refused");
        assert!(put(5, 4, &|more| more == 4), "or granted");
        assert_eq!((rack.take(5, |_| ()), rack.take(5, |_| ())), (4, 3));
        assert_eq!(rack.booked(), Some(8));
        assert!(
            put(1, 5, &|more| more == 5 || more == 1),
            "where none has enough, the rest of it or all is booked"
        );
    }
}
