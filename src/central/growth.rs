//! Growth: where a central pool's memory comes from. A request that finds no memory has a region
//! pinned while the capacity has room, one at a time. Where it has none and no region holds the
//! request, idle regions are unpinned ([`super::trim`]) to make room for one that does.
//!
//! A plan is made under the lock and counts at once: a new region's bytes as *growing*, and regions
//! that are to go not at all. So what is pinned never exceeds the capacity, however many threads
//! plan: the region thread unpins these regions before it pins more. On a device without threads
//! the caller does it, after the unlock. Each extent serves waiters as soon as it is pinned.
//!
//! # The rule
//!
//! 1. While requests wait and no memory is being pinned, a region is planned for the queue's head,
//!    if it needs a longer one and idle ones make room for that; else for the first waiter for
//!    which there is room. None is planned for one for which a region as short was refused.
//! 2. A refusal that may pass strands nobody: the growth is tried again at once with half as many
//!    bytes, down to what the waiter needs, and then after a pause that doubles, at the queue's
//!    looks (`waiting`). (Without a clock the next change is the end of the pause.)
//! 3. A request that only growing can serve gets the error of a growth that was as short as it
//!    could be, or that will not be tried again.

use std::ops::DerefMut;
use std::ptr::NonNull;
use std::sync::Arc;

use stable_deref_trait::StableDeref;

use super::queue::{Ticket, bytes, give_all, take_all};
use super::{CentralPool, Core, Want, sum};
use crate::error::{Error, ErrorClass, Result, Shortage, SubmitError};
use crate::region::{Adoptee, Owner, RegionId, RegionInfo};
use crate::segment;

/// The longest pause before a growth is tried again, in looks.
const MOST_PAUSE: u32 = 8;

/// A growth that failed, until another one succeeds.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) error: Error,
    /// Bytes that did not come.
    pub(super) missing: usize,
    /// The pause after which a growth as short as this is tried again, in looks, and how many of
    /// them are still to come.
    pub(super) pause: u32,
    pub(super) looks: u32,
}

impl Refusal {
    fn may_pass(&self) -> bool {
        self.error.class() == ErrorClass::Transient
    }

    /// Whether the pause is over after which it is tried again.
    fn is_due(&self) -> bool {
        self.may_pass() && self.looks == 0
    }

    /// Whether a growth of `need` bytes is tried at once, since it is shorter.
    pub(super) fn allows(&self, need: usize) -> bool {
        self.may_pass() && self.missing > need
    }
}

/// The unit in which regions are mapped, in bytes.
fn page() -> usize {
    crate::os::page_size().max(segment::PAGE)
}

/// The smallest region, in bytes, that can serve all wants.
pub(super) fn least(wants: &[Want]) -> usize {
    bytes(wants).checked_next_multiple_of(page()).unwrap_or(usize::MAX).max(page())
}

impl CentralPool {
    /// Has `bytes` bytes pinned, whatever the capacity.
    pub(crate) fn grow_by(&self, bytes: usize) {
        self.lock().grow_by(bytes);
    }

    /// Whether the capacity has room for another region for these wants, and the last growth did
    /// not fail. Then the caches of busy threads are not reclaimed: see `caches`.
    pub(crate) fn may_grow(&self, wants: &[Want]) -> bool {
        let core = self.lock();
        core.config.step > 0 && core.refused().is_none() && core.room_beside() >= least(wants)
    }

    /// Has another region pinned for these wants, in place of idle regions where the capacity is
    /// used up. `true`: memory is being pinned (or, on a device without threads, is pinned).
    ///
    /// No other region is planned meanwhile, nor if memory has come that serves them, since the
    /// caller tried: threads often miss together, and one region may serve them all.
    pub(crate) fn grow(&self, wants: &[Want]) -> bool {
        let mut core = self.lock();
        if core.growing > 0 {
            return true;
        }
        if let Some(taken) = take_all(&mut core.arena, wants) {
            give_all(&mut core.arena, taken.into_iter());
            return true;
        }
        // While others wait, a request outside of the queue takes no idle region away from them.
        let may_move = core.queue.is_empty();
        core.plan(wants, may_move)
    }

    /// Pins memory of the caller and serves requests from it. Waits for the region thread.
    ///
    /// # Errors
    /// [`Error::Exhausted`] if the capacity has no room for it now, [`Error::Impossible`] if never,
    /// [`Error::Closed`], and what the region thread answers. The error carries the memory back.
    pub(crate) fn adopt<T>(self: &Arc<Self>, memory: T) -> Result<RegionInfo, SubmitError<T>>
    where
        T: DerefMut<Target = [u8]> + StableDeref + Send + 'static,
    {
        let Some(regions) = self.regions.as_ref().filter(|_| !self.closed()) else {
            return Err(SubmitError { error: Error::Closed, buffer: Some(memory) });
        };
        let adoptee = Adoptee::new(memory)?;
        let len = adoptee.len();
        let mut core = self.lock();
        let (room, quarantined, capacity) = (core.room(), core.quarantined, self.config.capacity);
        if len > room {
            let error = if len > capacity.saturating_sub(quarantined) {
                Error::Impossible { len, quarantined, capacity }
            } else {
                Error::Exhausted(Box::new(Shortage { room: Some(room), ..core.shortage(len) }))
            };
            drop(core);
            return Err(adoptee.refused(error));
        }
        core.growing += len;
        drop(core);
        let owner: Arc<dyn Owner> = self.clone();
        regions.adopt(adoptee, &owner)
    }
}

impl Owner for CentralPool {
    /// Adds an extent and serves waiters from it. A closed pool does not need the rest.
    unsafe fn add_extent(&self, region: RegionId, base: NonNull<u8>, len: usize, pinned: bool) -> bool {
        let mut core = self.lock();
        core.growing = core.growing.saturating_sub(len);
        // SAFETY: this function's contract. The regions live until the central pool is freed, or
        // `Core::retire` has removed what is in them.
        unsafe { core.arena.add_extent(region, base, len, pinned) };
        core.seek_windows();
        !self.closed()
    }

    fn pinned_after_all(&self, base: NonNull<u8>) {
        self.lock().arena.pinned_after_all(base);
    }

    /// Ends a growth. `missing` of the planned bytes were not pinned, because of `error`. A waiter
    /// gets this error if no segment that may come back can serve it.
    fn grown(&self, missing: usize, error: Option<&Error>) {
        let mut core = self.lock();
        core.growing = core.growing.saturating_sub(missing);
        match error {
            Some(error) => core.refuse(error.clone(), missing),
            None if missing == 0 => core.refusal = None,
            None => {}
        }
        if core.growing == 0 {
            core.fail_hopeless();
            core.seek_windows();
        }
    }
}

impl Core {
    /// Plans a region as the rule at the head of this module says. `true`: one is planned.
    pub(super) fn grow_for_queue(&mut self) -> bool {
        let Some(head) = self.queue.head().filter(|_| self.config.step > 0) else { return false };
        if self.may_replace(head) && self.grow_for(head) {
            return true;
        }
        let room = self.room_beside();
        let fits = |key: &Ticket| room >= least(self.queue.wants(*key)) && self.may_try(*key);
        // Nothing needs less than a page.
        let first = self.queue.firsts().take_while(|_| room > 0).filter(fits).min();
        first.is_some_and(|key| self.grow_for(key))
    }

    /// Whether idle regions have enough bytes to make way for a waiter. They may do so at once,
    /// whatever is withheld for it, since that may never come back.
    fn may_replace(&self, key: Ticket) -> bool {
        let waiter = &self.queue.waiting[&key];
        !waiter.replaced
            && self.room() + self.arena.bytes().free >= least(&waiter.wants)
            && self.outgrow(&waiter.wants)
            && self.may_try(key)
    }

    /// Plans a region for a waiter, if need be in place of idle regions. They are replaced at most
    /// once for each waiter: it may not help. `false`: there is no room.
    pub(super) fn grow_for(&mut self, key: Ticket) -> bool {
        let Some(waiter) = self.queue.waiting.get(&key) else { return false };
        let (wants, may_move, before) = (waiter.wants.clone(), !waiter.replaced, self.arena.bytes().total);
        let is_planned = self.plan(&wants, may_move);
        let has_moved = self.arena.bytes().total < before;
        self.queue.waiting.get_mut(&key).into_iter().for_each(|waiter| waiter.replaced |= has_moved);
        is_planned
    }

    /// Whether a growth for this waiter is tried: none as short was refused, or the pause is over.
    pub(super) fn may_try(&self, key: Ticket) -> bool {
        let need = || self.need(self.queue.wants(key));
        self.refused().is_none_or(|refusal| refusal.is_due() || refusal.allows(need()))
    }

    /// Counts bytes as growing, and has the region thread pin them after the unlock. Each extent
    /// serves requests when it is pinned.
    fn grow_by(&mut self, bytes: usize) {
        self.growing += bytes;
        self.planned += bytes;
    }

    /// The last growth, if it failed and no other one is under way.
    pub(super) fn refused(&self) -> Option<&Refusal> {
        self.refusal.as_ref().filter(|_| self.growing == 0)
    }

    /// Notes that a growth failed. If it came after a pause, the next pause is twice as long.
    pub(super) fn refuse(&mut self, error: Error, missing: usize) {
        self.stats.growth_failures += 1;
        let pause = match self.refusal.take().filter(|_| !self.queue.is_empty()) {
            Some(before) if before.looks == 0 => (before.pause * 2).min(MOST_PAUSE),
            Some(before) => before.pause,
            None => 1,
        };
        self.refusal = Some(Refusal { error, missing, pause, looks: pause });
    }

    /// Bytes that could be pinned now.
    pub(super) fn room(&self) -> usize {
        let held = self.arena.bytes().total + self.growing;
        self.config.capacity.saturating_sub(held) / page() * page()
    }

    /// Bytes that could be pinned now for a request that has no windows: the room, less what
    /// requests whose windows are regions to replace need beyond the bytes of these regions.
    pub(super) fn room_beside(&self) -> usize {
        let replacing = self.arena.windows.iter().filter(|(_, window)| window.replaces);
        let missing =
            replacing.map(|(_, window)| least(self.queue.wants(window.owner)).saturating_sub(window.bytes()));
        self.room().saturating_sub(sum(missing))
    }

    /// Plans a region for these wants, which is pinned after the unlock. Its bytes count as growing
    /// until [`CentralPool::grown`]. If the capacity has no room and `may_move`, idle regions are
    /// removed, the newest first, where that helps. None is removed while another region is being
    /// pinned, nor for wants that the present regions can serve later. `false`: there is no room.
    pub(super) fn plan(&mut self, wants: &[Want], may_move: bool) -> bool {
        let (least, mut left) = (least(wants), self.room_beside());
        if self.config.step == 0 {
            return false;
        }
        if left < least {
            if !may_move || self.growing > 0 || !self.outgrow(wants) {
                return false;
            }
            let going = self.idle_regions();
            let enough = going.iter().position(|(_, len)| {
                left += len;
                left >= least
            });
            let Some(last) = enough else { return false };
            going[..=last].iter().for_each(|(id, _)| self.retire(*id));
            left = self.room_beside();
        }
        let half = |refusal: &Refusal| refusal.missing / 2 / page() * page();
        let step = self.config.step;
        let most = self.refusal.as_ref().map_or(step, half).min(step);
        let bytes = most.max(self.need(wants)).min(left);
        self.grow_by(bytes);
        self.stats.growths += 1;
        true
    }

    /// The bytes of a region that serves these wants. An upper bound: it counts the worst case of
    /// each alignment, and regions start well aligned.
    pub(super) fn need(&self, wants: &[Want]) -> usize {
        // A segment crosses no edge of an extent: what does not fit before one comes after it.
        let extent = self.config.largest + 32;
        let need = wants.iter().fold(0usize, |at, w| {
            let (pages, align) = w.placement.fresh_pages();
            let bytes = (pages + align - 1) * segment::PAGE;
            let left = extent - at % extent;
            let at = if bytes > left { at.saturating_add(left % extent) } else { at };
            at.saturating_add(bytes)
        });
        need.checked_next_multiple_of(page()).unwrap_or(usize::MAX)
    }
}
