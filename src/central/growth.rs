//! Growth: where a central pool's memory comes from and where it goes. A request that finds no memory has a region
//! pinned while the capacity has room, one region at a time. So do requests that find memory only when the devices
//! were asked what is complete, if they lose much time by that. Where the capacity is used up and the request fits
//! into no region, idle regions are unpinned to make room for one that fits.
//!
//! A plan is made under the lock and counts at once: a new region's bytes as *growing*, the bytes of regions that are
//! to go as *leaving*. So what is pinned never exceeds the capacity, no matter how many threads plan. The plan is
//! carried out after the lock is released, by the region thread of the device, which unpins before it pins. On a device
//! without threads the caller does it at once. Each extent serves waiters as soon as it is pinned.
//!
//! # After a failure
//!
//! A refusal that may pass strands nobody. While requests wait, a growth that failed is tried again: at once with half as
//! many bytes, down to what the queue's head needs, and then after a pause that doubles. Growths get longer again as they
//! succeed. A request that only growing can serve does not wait for that: it gets the error once a growth of what the head
//! needs has failed. Without a clock the next call on the slow path is the pause.

use std::ops::DerefMut;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering as StdOrdering;
use std::time::{Duration, Instant};

use stable_deref_trait::StableDeref;

use super::queue::Growth;
use super::{CentralPool, Core, Wake, Want, sum};
use crate::error::{Error, ErrorClass, Result, Shortage, SubmitError};
use crate::region::{Adoptee, RegionId, RegionInfo};
use crate::segment;

/// When requests that were [served late](CentralPool::served_late) have lost so much time within a window, another region
/// is pinned, which takes about as long. (With less memory than eight threads of a server used, they lost a third of the
/// window. Where copies end late now and then, requests lose a few milliseconds, which more memory does not save.)
const LOST: Duration = Duration::from_millis(20);
/// What one request counts at most: code of the program may have run meanwhile.
const LOST_BY_ONE: Duration = Duration::from_millis(4);
const WINDOW: Duration = Duration::from_millis(100);

/// The pause before the head's growth is tried again, at first and at most.
const PAUSE: Duration = Duration::from_millis(10);
const MOST_PAUSE: Duration = Duration::from_secs(1);

/// What growths that failed tell the next ones.
#[derive(Debug)]
pub(super) struct Retry {
    /// The most bytes that a growth asks for, where its requests need no more.
    most: usize,
    /// Bytes that the last growth lacked in the end.
    missing: usize,
    /// Why the last growth that has ended failed, for what errors say.
    pub(super) why: Option<Error>,
    /// The pause before the next try, whether it is under way, and whether it is over.
    pause: Duration,
    planned: bool,
    due: bool,
}

impl Default for Retry {
    fn default() -> Self {
        Self { most: usize::MAX, missing: 0, why: None, pause: PAUSE, planned: false, due: false }
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

/// The error of the last growth, for wants that no segment that may come back can ever serve. Other wants wait for
/// segments to come back.
pub(super) fn growth_failure(core: &Core, wants: &[Want]) -> Option<Error> {
    let error = core.growth_failure.as_ref().filter(|_| core.growing == 0 && !core.shrinks(wants))?;
    core.never(wants).map(|_| error.clone())
}

impl CentralPool {
    /// Counts bytes as growing that the caller is about to have pinned. The capacity is not looked at.
    pub(crate) fn plan_bytes(&self, bytes: usize) {
        self.lock().growing += bytes;
    }

    /// Whether the capacity has room for another region for these wants, and the last growth did not fail. Then the
    /// caches of busy threads are not reclaimed: see [`super::reclaim`].
    pub(crate) fn may_grow(&self, wants: &[Want]) -> bool {
        self.lock().may_grow(wants)
    }

    /// A request was served by what came back when the devices were asked what is complete: nothing else was free. That
    /// took it from `since` to `now`. After many of these another region is pinned, which nothing waits for.
    pub(crate) fn served_late(self: &Arc<Self>, wants: &[Want], since: Instant, now: Instant) {
        if self.config.timeless {
            return;
        }
        let growth = {
            let mut core = self.lock();
            if !core.is_often_late(since, now) || core.growing > 0 || !core.may_grow(wants) {
                return;
            }
            core.plan(wants, false)
        };
        growth.into_iter().for_each(|growth| self.carry_out(growth));
    }

    /// Has another region pinned for these wants, in place of idle regions where the capacity is used up. `true`: memory
    /// is being pinned (or, on a device without threads, is pinned).
    ///
    /// While memory is being pinned no other region is planned, nor if memory has come since there were `extents`
    /// [extents](Self::extents), which the caller asked before it tried: many threads often miss at once, and one region
    /// may serve them all. If it does not, the queue's head has another one pinned.
    pub(crate) fn grow(self: &Arc<Self>, wants: &[Want], extents: u64) -> bool {
        let growth = {
            let mut core = self.lock();
            if core.growing > 0 || self.extents() != extents {
                return true;
            }
            // While others wait, a request that is not in the queue takes no idle region away from them.
            let idle = core.queue.is_empty();
            core.plan(wants, idle)
        };
        growth.map(|growth| self.carry_out(growth)).is_some()
    }

    /// The number of extents that were ever added.
    pub(crate) fn extents(&self) -> u64 {
        // Relaxed: written under the lock. A caller that reads a number and then locks finds those extents.
        self.extents.load(StdOrdering::Relaxed)
    }

    /// Carries a plan out. Not under the lock: on a device without threads all of it happens here.
    pub(super) fn carry_out(self: &Arc<Self>, growth: Growth) {
        if let Some(regions) = &self.regions {
            // The region thread unpins these before it pins what is planned.
            growth.going.into_iter().for_each(|(id, len)| {
                regions.remove(id);
                self.left(len);
            });
        }
        self.pin(growth.bytes);
    }

    /// Has the region thread pin bytes that were planned. Each extent serves requests as soon as it is pinned.
    pub(crate) fn pin(self: &Arc<Self>, bytes: usize) {
        let Some(regions) = &self.regions else { return };
        let (central, also) = (self.clone(), self.clone());
        let serve = move |id, base, len, pinned| {
            // SAFETY: an extent of this central pool's own regions, which live until the central pool is freed. It is
            // handed over once.
            unsafe { central.add_extent(id, base, len, pinned) };
            // A pool that was closed meanwhile does not need the rest.
            !central.closed()
        };
        regions.pin(bytes, serve, move |came, error| also.grown(bytes - came, error.as_ref()));
    }

    /// Pins memory of the caller and serves requests from it. Waits for the region thread.
    ///
    /// # Errors
    /// [`Error::Exhausted`] if the capacity has no room for it now, [`Error::Impossible`] if never, [`Error::Closed`],
    /// [`Error::Forked`], and what the region thread answers. The error carries the memory back.
    pub(crate) fn adopt<T>(&self, memory: T) -> Result<RegionInfo, SubmitError<T>>
    where
        T: DerefMut<Target = [u8]> + StableDeref + Send + 'static,
    {
        let Some(regions) = &self.regions else {
            return Err(SubmitError { error: Error::Closed, buffer: Some(memory) });
        };
        if let Err(error) = self.refuse_if_shut() {
            return Err(SubmitError { error, buffer: Some(memory) });
        }
        let adoptee = Adoptee::new(memory)?;
        let len = adoptee.len();
        {
            let mut core = self.lock();
            let room = core.room();
            if len > room {
                let (quarantined, capacity) = (core.quarantined, self.config.capacity);
                let error = if len > capacity.saturating_sub(quarantined) {
                    Error::Impossible { len, quarantined, capacity }
                } else {
                    Error::Exhausted(Box::new(Shortage { room: Some(room), ..core.shortage(len) }))
                };
                drop(core);
                return Err(adoptee.refused(error));
            }
            core.growing += len;
        }
        let serve = |id, base, len, pinned| {
            // SAFETY: an extent of a region, which lives until the central pool is freed. It is handed over once.
            unsafe { self.add_extent(id, base, len, pinned) };
        };
        let info = regions.adopt(adoptee, serve).inspect_err(|_| self.grown(len, None))?;
        self.grown(0, None);
        Ok(info)
    }

    /// Adds an extent and serves waiters from it.
    ///
    /// # Safety
    /// As for `Arena::add_extent`. The memory stays until the central pool is freed or [`CentralPool::retire`] has
    /// removed it.
    pub(crate) unsafe fn add_extent(&self, region: RegionId, base: NonNull<u8>, len: usize, pinned: bool) {
        let mut core = self.lock();
        core.growing = core.growing.saturating_sub(len);
        // SAFETY: this function's contract.
        unsafe { core.arena.add_extent(region, base, len, pinned) };
        self.extents.fetch_add(1, StdOrdering::Relaxed);
        core.extended();
    }

    /// Notes that an extent is pinned that was not.
    pub(crate) fn pinned_after_all(&self, base: NonNull<u8>) {
        self.lock().arena.pinned_after_all(base);
    }

    /// Ends a growth. `missing` of the planned bytes were not pinned, because of `error`. A waiter gets this error if
    /// no segment that may come back can serve it.
    pub(crate) fn grown(&self, missing: usize, error: Option<&Error>) {
        let mut core = self.lock();
        core.growing = core.growing.saturating_sub(missing);
        core.retry.due = false;
        if let Some(error) = error {
            // Kept for requests that have caused this growth and have not joined the queue yet.
            core.growth_failure = Some(error.clone());
            core.stats.growth_failures += 1;
            (core.retry.why, core.retry.missing) = (Some(error.clone()), missing);
            core.retry.most = (missing / 2 / page() * page()).max(page());
        } else if missing == 0 {
            let (most, planned) = (core.retry.most.saturating_mul(2), core.retry.planned);
            core.retry = Retry { most, planned, ..Retry::default() };
        }
        if core.growing == 0 {
            core.fail(|core, wants| growth_failure(core, wants).or_else(|| self.hopeless(core, wants)));
            core.extended();
        }
    }

    /// Tries the head's growth again after a pause.
    pub(super) fn grow_later(central: std::sync::Weak<Self>, pause: Duration) {
        if cfg!(loom) {
            return;
        }
        crate::timer::after(pause, move || {
            let Some(central) = central.upgrade() else { return };
            let mut core = central.lock();
            (core.retry.planned, core.retry.due) = (false, true);
        });
    }

    /// Removes a region, if none of it is used, and returns its bytes. They count as leaving, and not as room, until
    /// the caller says that they [have left](Self::left).
    pub(crate) fn retire(&self, region: RegionId) -> Option<usize> {
        let mut core = self.lock();
        // While a request waits, memory is short: no region is removed.
        if !core.queue.is_empty() {
            return None;
        }
        let len = core.arena.retire(region)?;
        core.leaving += len;
        Some(len)
    }

    /// Ends the leaving of so many bytes: the region thread was told to unpin them. It does that before anything that
    /// it is told to pin from now on, so what is pinned never exceeds the capacity.
    pub(crate) fn left(&self, bytes: usize) {
        let mut core = self.lock();
        // A waiter that joined in between has found no room. It is served now.
        core.leaving -= bytes;
    }

    /// The regions, each with its bytes and how many of them are free. Reclaims everything that is cached first.
    pub(crate) fn region_use(&self) -> Vec<(RegionId, usize, usize)> {
        let mut core = self.lock();
        self.reclaim_all(&mut core);
        core.arena.regions()
    }
}

impl Core {
    /// Plans a region for the head of the queue, to be carried out after the unlock: other requests may have taken what
    /// was pinned for the head, and regions may be idle by now. After a growth that failed, one is planned if it may be
    /// shorter, or a pause is over. For each waiter idle regions are replaced at most once, since that may not help.
    /// `true`: a region is planned.
    pub(super) fn grow_for_head(&mut self) -> bool {
        // These cheap tests decide most cases.
        let Some((wants, may_move)) = self.next_to_grow() else { return false };
        if self.growth_failure.is_some() && !(self.may_pass() && (self.retry.due || self.shrinks(wants))) {
            return false;
        }
        let wants = wants.to_vec();
        let Some(growth) = self.plan(&wants, may_move) else { return false };
        if !growth.going.is_empty() {
            self.queue.head().into_iter().for_each(|head| self.queue.note_replaced(head));
        }
        self.wakes.push(Wake::Grow(self.me.clone(), growth));
        true
    }

    /// The waiter that a growth is planned for, as its wants, and whether idle regions may make way: the head, if there may
    /// be room for a region for it. After a growth that failed also the one that needs least, since the failed one may have
    /// been for any.
    fn next_to_grow(&self) -> Option<(&[Want], bool)> {
        let head = self.queue.head().filter(|_| self.step > 0)?;
        let (head, moved) = (self.queue.wants(head), self.queue.replaced(head));
        let (failed, least_of_head) = (self.growth_failure.is_some(), least(head));
        let may_move = !moved && self.room() + self.arena.bytes().free >= least_of_head;
        let room = self.room_beside();
        if may_move && (!failed || self.never(head).is_some()) || room >= least_of_head {
            return Some((head, !moved));
        }
        // Nothing needs less than a page.
        let mut others = self.queue.firsts().take_while(|_| room > 0).map(|key| self.queue.wants(key));
        others.find(|wants| room >= least(wants)).map(|wants| (wants, false))
    }

    /// Whether the last growth failed for a reason that may pass.
    fn may_pass(&self) -> bool {
        self.growth_failure.as_ref().is_some_and(|error| error.class() == ErrorClass::Transient)
    }

    /// Whether the last growth failed for a reason that may pass, and the next one may be shorter: that for a waiter, or
    /// for these wants where nothing waits.
    fn shrinks(&self, wants: &[Want]) -> bool {
        let next = if self.queue.is_empty() { Some(wants) } else { self.next_to_grow().map(|next| next.0) };
        self.may_pass() && next.is_some_and(|next| self.retry.missing > self.need(next))
    }

    /// A waiter waits for a growth that failed: how long until it is tried again.
    pub(super) fn pause_of_growth(&mut self) -> Option<Duration> {
        if self.queue.is_empty() {
            self.retry.pause = PAUSE;
        }
        let waits = self.growing == 0 && !self.retry.planned && !self.retry.due && self.may_pass();
        if !waits || self.next_to_grow().is_none() {
            return None;
        }
        if self.timeless {
            self.retry.due = true;
            return None;
        }
        self.retry.planned = true;
        let pause = self.retry.pause;
        self.retry.pause = (pause * 2).min(MOST_PAUSE);
        Some(pause)
    }

    /// Notes a request that was served late. Whether such requests have lost much time in this window.
    fn is_often_late(&mut self, since: Instant, now: Instant) -> bool {
        let (window, lost) = &mut self.late;
        if window.is_none_or(|window| now.saturating_duration_since(window) > WINDOW) {
            (*window, *lost) = (Some(since), Duration::ZERO);
        }
        *lost += now.saturating_duration_since(since).min(LOST_BY_ONE);
        *lost >= LOST
    }

    fn may_grow(&self, wants: &[Want]) -> bool {
        self.step > 0 && self.growth_failure.is_none() && self.room_beside() >= least(wants)
    }

    /// Bytes that could be pinned now.
    pub(super) fn room(&self) -> usize {
        let held = self.arena.bytes().total + self.growing + self.leaving;
        self.capacity.saturating_sub(held) / page() * page()
    }

    /// Bytes that could be pinned if every segment came back and all regions that are idle then were unpinned.
    pub(super) fn movable(&self) -> usize {
        if self.step == 0 {
            return 0;
        }
        let kept = self.arena.stuck_regions();
        self.capacity.saturating_sub(kept + self.growing) / page() * page()
    }

    /// Plans a region for these wants. Its bytes count as growing until [`CentralPool::grown`]. Where the capacity has
    /// no room for it, idle regions are removed, the newest first, if `may_move` and if that helps. But none is removed
    /// while another region is being pinned, nor for wants that the present regions can serve once segments come back.
    pub(super) fn plan(&mut self, wants: &[Want], may_move: bool) -> Option<Growth> {
        let least = least(wants);
        let mut going = Vec::new();
        if self.step == 0 {
            return None;
        }
        let mut left = self.room_beside();
        if left < least {
            if !may_move || self.growing > 0 || self.never(wants).is_none() {
                return None;
            }
            let mut idle = self.arena.regions();
            idle.retain(|(_, len, free)| len == free);
            idle.sort_unstable_by_key(|r| std::cmp::Reverse(r.0));
            for (id, len, _) in idle {
                if left < least {
                    left += len;
                    going.push((id, len));
                }
            }
            if left < least {
                return None;
            }
            going.retain(|(id, _)| self.arena.retire(*id).is_some());
            // This plan may count on these bytes. For other plans they are leaving, and no room yet.
            left = self.room_beside();
            self.leaving += going.iter().map(|(_, len)| len).sum::<usize>();
        }
        let bytes = self.step.min(self.retry.most).max(self.need(wants)).min(left);
        self.growing += bytes;
        self.stats.growths += 1;
        self.growth_failure = None;
        self.late = (None, Duration::ZERO);
        Some(Growth { going, bytes })
    }

    /// The bytes of a region that serves these wants. An upper bound: it counts the worst case of each alignment, and
    /// regions start well aligned.
    fn need(&self, wants: &[Want]) -> usize {
        // A segment does not cross the edge of an extent: what does not fit before an edge comes after it.
        let need = wants.iter().fold(0usize, |at, w| {
            let (pages, align) = w.placement.fresh_pages();
            let bytes = (pages + align - 1) * segment::PAGE;
            let left = self.extent - at % self.extent;
            let at = if bytes > left { at.saturating_add(left % self.extent) } else { at };
            at.saturating_add(bytes)
        });
        need.checked_next_multiple_of(page()).unwrap_or(usize::MAX)
    }
}
