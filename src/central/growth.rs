//! Growth: where a central pool's memory comes from and where it goes. A request that finds no memory has a region
//! pinned while the capacity has room, one region at a time. Where the capacity is used up and the request fits into no
//! region, idle regions are unpinned to make room for one that fits.
//!
//! A plan is made under the lock and counts at once: a new region's bytes as *growing*, the bytes of regions that are
//! to go as *leaving*. So what is pinned never exceeds the capacity, no matter how many threads plan. The plan is
//! carried out after the lock is released, by the region thread of the device, which unpins before it pins. On a device
//! without threads the caller does it at once. Each extent serves waiters as soon as it is pinned.
//!
//! # The rule
//!
//! 1. While requests wait and no memory is being pinned, a region is planned for the queue's head; where there is no
//!    room for it, or a region as short was refused, for the first waiter that the room is enough for.
//! 2. A refusal that may pass strands nobody: the growth is tried again at once with half as many bytes, down to what
//!    the waiter needs, and then after a pause that doubles. (Without a clock the next call on the slow path is the
//!    pause.)
//! 3. A request that only growing can serve gets the error of a growth that was as short as it could be, or that will
//!    not be tried again.

use std::ops::DerefMut;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering as StdOrdering;
use std::time::Duration;

use stable_deref_trait::StableDeref;

use super::queue::Growth;
use super::{CentralPool, Core, Wake, Want, sum};
use crate::error::{Error, ErrorClass, Result, Shortage, SubmitError};
use crate::region::{Adoptee, Owner, RegionId, RegionInfo};
use crate::segment;

/// The pause before the head's growth is tried again, at first and at most.
const PAUSE: Duration = Duration::from_millis(10);
const MOST_PAUSE: Duration = Duration::from_secs(1);

/// A growth that failed, until another one succeeds.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) error: Error,
    /// Bytes that did not come.
    missing: usize,
    /// How long it takes until a growth as short as this is tried again, and whether that is over.
    pause: Duration,
    due: bool,
}

impl Refusal {
    pub(super) fn new(error: Error, missing: usize) -> Self {
        Self { error, missing, pause: PAUSE, due: false }
    }

    fn may_pass(&self) -> bool {
        self.error.class() == ErrorClass::Transient
    }

    /// Whether a growth of `need` bytes is tried at once, since it is shorter.
    fn allows(&self, need: usize) -> bool {
        self.may_pass() && self.missing > need
    }
}

/// The unit in which regions are mapped, in bytes.
fn page() -> usize {
    crate::os::page_size().max(crate::segment::PAGE)
}

/// The least number of bytes of a region that can serve all of these.
pub(super) fn least(wants: &[Want]) -> usize {
    let bytes = sum(wants.iter().map(|w| w.placement.bytes()));
    bytes.checked_next_multiple_of(page()).unwrap_or(usize::MAX).max(page())
}

/// The error of the last growth, for wants that growing alone can serve, if no shorter growth follows: for these wants,
/// or for those of a waiter.
pub(super) fn growth_failure(core: &Core, wants: &[Want]) -> Option<Error> {
    let refusal = core.refused()?;
    let own = Some(wants).filter(|_| core.config.step > 0);
    let next = core.next_to_grow().map(|next| next.0);
    let is_retried = own.into_iter().chain(next).any(|wants| refusal.allows(core.need(wants)));
    if is_retried { None } else { Some(refusal.error.clone()) }
}

impl CentralPool {
    /// Counts bytes as growing that the caller is about to have pinned. The capacity is not looked at.
    pub(crate) fn plan_bytes(&self, bytes: usize) {
        self.lock().growing += bytes;
    }

    /// Whether the capacity has room for another region for these wants, and the last growth did not fail. Then the
    /// caches of busy threads are not reclaimed: see [`super::reclaim`].
    pub(crate) fn may_grow(&self, wants: &[Want]) -> bool {
        let core = self.lock();
        core.config.step > 0 && core.refused().is_none() && core.room_beside() >= least(wants)
    }

    /// Has another region pinned for these wants, in place of idle regions where the capacity is used up. `true`:
    /// memory is being pinned (or, on a device without threads, is pinned).
    ///
    /// While memory is being pinned no other region is planned, nor if memory has come since there were `extents`
    /// [extents](Self::extents), which the caller asked before it tried: many threads often miss at once, and one
    /// region may serve them all. If it does not, the queue's head has another one pinned.
    pub(crate) fn grow(self: &Arc<Self>, wants: &[Want], extents: u64) -> bool {
        let mut core = self.lock();
        if core.growing > 0 || self.extents() != extents {
            return true;
        }
        // While others wait, a request that is not in the queue takes no idle region away from them.
        let may_move = core.queue.is_empty();
        let growth = core.plan(wants, may_move);
        drop(core);
        growth.map(|growth| self.carry_out(growth)).is_some()
    }

    /// The number of extents that were ever added.
    pub(crate) fn extents(&self) -> u64 {
        // Relaxed: written under the lock. A caller that reads a number and then locks finds those extents.
        self.extents.load(StdOrdering::Relaxed)
    }

    /// Carries a plan out. Not under the lock: on a device without threads all of it happens here.
    pub(super) fn carry_out(self: &Arc<Self>, growth: Growth) {
        // The region thread unpins these before it pins what is planned.
        self.unpin(growth.going);
        self.pin(growth.bytes);
    }

    /// Has the region threads unpin regions that were retired, before anything that they are told to pin from now on.
    /// So what is pinned never exceeds the capacity.
    fn unpin(&self, going: Vec<(RegionId, usize)>) {
        let Some(regions) = &self.regions else { return };
        for (id, len) in going {
            regions.remove(id);
            // A waiter that joined in between has found no room. It is served now.
            self.lock().leaving -= len;
        }
    }

    /// Has the region thread pin bytes that were planned. Each extent serves requests as soon as it is pinned.
    pub(crate) fn pin(self: &Arc<Self>, bytes: usize) {
        let Some(regions) = &self.regions else { return };
        regions.pin(bytes, self.clone());
    }

    /// Pins memory of the caller and serves requests from it. Waits for the region thread.
    ///
    /// # Errors
    /// [`Error::Exhausted`] if the capacity has no room for it now, [`Error::Impossible`] if never, [`Error::Closed`],
    /// and what the region thread answers. The error carries the memory back.
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
    /// Adds an extent and serves waiters from it. A pool that was closed meanwhile does not need
    /// the rest.
    unsafe fn add_extent(&self, region: RegionId, base: NonNull<u8>, len: usize, pinned: bool) -> bool {
        let mut core = self.lock();
        core.growing = core.growing.saturating_sub(len);
        // SAFETY: this function's contract. The regions live until the central pool is freed, or `Core::retire` has
        // removed what is in them.
        unsafe { core.arena.add_extent(region, base, len, pinned) };
        self.extents.fetch_add(1, StdOrdering::Relaxed);
        core.extended();
        !self.closed()
    }

    fn pinned_after_all(&self, base: NonNull<u8>) {
        self.lock().arena.pinned_after_all(base);
    }

    /// Ends a growth. `missing` of the planned bytes were not pinned, because of `error`. A waiter gets this error if
    /// no segment that may come back can serve it.
    fn grown(&self, missing: usize, error: Option<&Error>) {
        let mut core = self.lock();
        core.growing = core.growing.saturating_sub(missing);
        if let Some(error) = error {
            core.refuse(error.clone(), missing);
        } else if missing == 0 {
            core.refusal = None;
        }
        if core.growing == 0 {
            core.fail_hopeless();
            core.extended();
        }
        let is_timed = error.is_some() && !core.config.by_hand && !cfg!(loom);
        let refusal = core.refusal.as_ref().filter(|refusal| is_timed && refusal.may_pass());
        let (pause, failures) = (refusal.map(|refusal| refusal.pause), core.stats.growth_failures);
        drop(core);
        if let Some(pause) = pause {
            let central = self.me.clone();
            crate::timer::after(pause, move || {
                let Some(central) = central.upgrade() else { return };
                let mut core = central.lock();
                // A growth that failed meanwhile has a pause of its own.
                if core.stats.growth_failures == failures {
                    core.growth_is_due();
                }
            });
        }
    }
}

impl CentralPool {
    /// Gives idle regions back, the newest first, as long as `keep` bytes stay. Returns how many bytes go. None goes
    /// while a request waits, since memory is short, nor while memory is being pinned: more of the region may follow.
    pub(crate) fn trim(&self, keep: usize) -> usize {
        let mut core = self.lock();
        self.reclaim_all(&mut core);
        if !core.queue.is_empty() || core.growing > 0 {
            return 0;
        }
        let mut total = core.arena.bytes().total;
        let mut going = core.idle_regions();
        going.retain(|(_, len)| {
            let goes = total - len >= keep;
            total -= if goes { *len } else { 0 };
            goes
        });
        core.retire(&going);
        drop(core);
        let bytes = going.iter().map(|(_, len)| len).sum();
        self.unpin(going);
        bytes
    }
}

impl Core {
    /// Plans a region as the rule at the head of this module says, to be carried out after the unlock. `true`: one is
    /// planned. For each waiter idle regions are replaced at most once, since that may not help.
    pub(super) fn grow_for_head(&mut self) -> bool {
        // Its cheap tests decide most cases.
        let Some((wants, may_move)) = self.next_to_grow() else { return false };
        let wants = wants.to_vec();
        let Some(growth) = self.plan(&wants, may_move) else { return false };
        if !growth.going.is_empty() {
            self.queue.head().into_iter().for_each(|head| self.queue.note_replaced(head));
        }
        self.wakes.push(Wake::Grow(self.me.clone(), growth));
        true
    }

    /// The waiter that a growth is planned for, as its wants, and whether idle regions may make way: the head, if there
    /// may be room for a region for it, and the first other one that the room is enough for. After a growth that failed
    /// only one that needs less, until its pause is over.
    fn next_to_grow(&self) -> Option<(&[Want], bool)> {
        let head = self.queue.head().filter(|_| self.config.step > 0)?;
        let (head, moved) = (self.queue.wants(head), self.queue.replaced(head));
        let (refused, least_of_head) = (self.refused(), least(head));
        let is_tried =
            |wants: &[Want]| refused.is_none_or(|refusal| refusal.due || refusal.allows(self.need(wants)));
        let may_move = !moved && self.room() + self.arena.bytes().free >= least_of_head;
        let room = self.room_beside();
        let may_move = may_move && (refused.is_none() || self.never(head).is_some());
        if (may_move || room >= least_of_head) && is_tried(head) {
            return Some((head, !moved));
        }
        // Nothing needs less than a page.
        let mut others = self.queue.firsts().take_while(|_| room > 0).map(|key| self.queue.wants(key));
        others.find(|wants| room >= least(wants) && is_tried(wants)).map(|wants| (wants, false))
    }

    /// The last growth, if it failed and no other one is under way.
    pub(super) fn refused(&self) -> Option<&Refusal> {
        self.refusal.as_ref().filter(|_| self.growing == 0)
    }

    /// Notes that a growth failed. If it was one after a pause, the next pause is twice as long.
    fn refuse(&mut self, error: Error, missing: usize) {
        self.stats.growth_failures += 1;
        let mut refusal = Refusal::new(error, missing);
        if let Some(before) = self.refusal.take().filter(|_| !self.queue.is_empty()) {
            let longer = if before.due { before.pause * 2 } else { before.pause };
            refusal.pause = longer.min(MOST_PAUSE);
        }
        self.refusal = Some(refusal);
    }

    /// The pause after a growth that failed is over.
    pub(super) fn growth_is_due(&mut self) {
        let passing = self.refusal.iter_mut().filter(|refusal| refusal.may_pass());
        passing.for_each(|refusal| refusal.due = true);
    }

    /// Bytes that could be pinned now.
    pub(super) fn room(&self) -> usize {
        let held = self.arena.bytes().total + self.growing + self.leaving;
        self.config.capacity.saturating_sub(held) / page() * page()
    }

    /// Bytes that could be pinned if every segment came back and all regions that are idle then were unpinned.
    pub(super) fn movable(&self) -> usize {
        if self.config.step == 0 {
            return 0;
        }
        let regions = self.arena.regions();
        let kept = regions.values().filter(|region| region.stuck).map(|region| region.bytes).sum::<usize>();
        self.config.capacity.saturating_sub(kept + self.growing) / page() * page()
    }

    /// Plans a region for these wants. Its bytes count as growing until [`CentralPool::grown`]. Where the capacity has
    /// no room for it, idle regions are removed, the newest first, if `may_move` and if that helps. But none is removed
    /// while another region is being pinned, nor for wants that the present regions can serve once segments come back.
    pub(super) fn plan(&mut self, wants: &[Want], may_move: bool) -> Option<Growth> {
        let least = least(wants);
        let mut going = Vec::new();
        if self.config.step == 0 {
            return None;
        }
        let mut left = self.room_beside();
        if left < least {
            if !may_move || self.growing > 0 || self.never(wants).is_none() {
                return None;
            }
            going = self.idle_regions();
            let enough = going.iter().position(|(_, len)| {
                left += len;
                left >= least
            });
            going.truncate(enough? + 1);
            self.retire(&going);
            // This plan may count on these bytes. For other plans they are leaving, and no room yet.
            left = self.room_beside() + going.iter().map(|(_, len)| len).sum::<usize>();
        }
        let half = |refusal: &Refusal| refusal.missing / 2 / page() * page();
        let step = self.config.step;
        let most = self.refusal.as_ref().map_or(step, half).min(step);
        let bytes = most.max(self.need(wants)).min(left);
        self.growing += bytes;
        self.stats.growths += 1;
        Some(Growth { going, bytes })
    }

    /// The regions of which nothing is used, the newest first, each with its bytes.
    fn idle_regions(&self) -> Vec<(RegionId, usize)> {
        let regions = self.arena.regions().into_iter().rev();
        regions.filter(|(_, region)| region.idle).map(|(id, region)| (id, region.bytes)).collect()
    }

    /// Removes idle regions. Their bytes count as leaving, and not as room, until the region thread was told to unpin
    /// them.
    fn retire(&mut self, idle: &[(RegionId, usize)]) {
        for (id, len) in idle {
            self.leaving += len;
            let gone = self.arena.retire(*id);
            debug_assert_eq!(gone, Some(*len), "an idle region can go");
        }
    }

    /// The bytes of a region that serves these wants. An upper bound: it counts the worst case of each alignment, and
    /// regions start well aligned.
    fn need(&self, wants: &[Want]) -> usize {
        // A segment does not cross the edge of an extent: what does not fit before an edge comes after it.
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
