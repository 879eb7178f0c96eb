//! Where a central pool's memory comes from and goes to: regions are pinned for who asks while the capacity has room,
//! and those that are idle go where the capacity is used up and a request fits none that there is.
//!
//! What is planned is decided under the lock and counts at once: a new region's bytes as *growing*, those of regions
//! that go as *leaving*, so that what is pinned never exceeds the capacity, whoever plans meanwhile. It is carried out
//! after the lock is released, by the device's worker, which unpins before it pins; a device without threads does it
//! right then. Each extent serves those who wait as it comes.

use std::ops::DerefMut;
use std::ptr::NonNull;
use std::sync::Arc;

use stable_deref_trait::StableDeref;

use super::waiting::growth_failure;
use super::{CentralPool, Core, Wake, Want, state, sum};
use crate::error::{Error, RegisterError, Result};
use crate::region::{Adoptee, RegionId, RegionInfo};
use crate::segment;

/// A region to be made: these go first, then so many bytes are pinned.
#[derive(Debug)]
pub(crate) struct Growth {
    going: Vec<(RegionId, usize)>,
    bytes: usize,
}

/// The unit in which memory comes from the system, in bytes.
fn page() -> usize {
    crate::os::page_size().max(crate::segment::PAGE)
}

/// Bytes that a region for all of these must have at least.
pub(super) fn least(wants: &[Want]) -> usize {
    let bytes = sum(wants.iter().map(|w| w.placement.bytes()));
    bytes.checked_next_multiple_of(page()).unwrap_or(usize::MAX).max(page())
}

impl CentralPool {
    /// Counts bytes that are about to be pinned, whatever the capacity.
    pub(crate) fn plan_bytes(&self, bytes: usize) {
        self.core.lock().growing += bytes;
    }

    /// Whether there is room for another region for these wants, and nothing known against one. Then what is cached
    /// where it is in use stays there: see [`super::reclaim`].
    pub(crate) fn may_grow(&self, wants: &[Want]) -> bool {
        let core = self.core.lock();
        core.step > 0 && core.growth_failure.is_none() && core.room() >= least(wants)
    }

    /// Has another region pinned for these wants, in place of idle ones where the capacity is used up. Whether one is
    /// on its way (or, without threads, there).
    pub(crate) fn grow(self: &Arc<Self>, wants: &[Want]) -> bool {
        let growth = {
            let mut core = self.core.lock();
            // Who comes without waiting does not make others wait longer.
            let idle = core.queue.is_empty();
            core.plan(wants, idle)
        };
        growth.map(|growth| self.carry_out(growth)).is_some()
    }

    /// Not under the lock: without threads all of it happens now.
    pub(super) fn carry_out(self: &Arc<Self>, growth: Growth) {
        if let Some(regions) = &self.regions {
            // The worker unpins these before it pins what is planned.
            growth.going.into_iter().for_each(|(id, len)| {
                regions.remove(id);
                self.left(len);
            });
        }
        self.pin(growth.bytes);
    }

    /// Has the worker pin bytes that were planned; each extent is used as soon as it is there.
    pub(crate) fn pin(self: &Arc<Self>, bytes: usize) {
        let Some(regions) = &self.regions else { return };
        let (central, also) = (self.clone(), self.clone());
        let serve = move |id, base, len, pinned| {
            // SAFETY: an extent of our own regions, which stay until the central pool is gone; it is handed over once.
            unsafe { central.add_extent(id, base, len, pinned) };
            // Nobody needs the rest of a pool that was closed meanwhile.
            !central.closed()
        };
        regions.pin(bytes, serve, move |came, error| also.grown(bytes - came, error.as_ref()));
    }

    /// Pins memory that the caller has, as far as the capacity has room for it, and serves from it. Waits for the
    /// worker.
    pub(crate) fn adopt<T>(&self, memory: T) -> Result<RegionInfo, RegisterError<T>>
    where
        T: DerefMut<Target = [u8]> + StableDeref + Send + 'static,
    {
        let Some(regions) = &self.regions else {
            return Err(RegisterError { error: Error::Closed, memory: Some(memory) });
        };
        if let Err(error) = self.refuse_if_shut() {
            return Err(RegisterError { error, memory: Some(memory) });
        }
        let adoptee = Adoptee::new(memory)?;
        let len = adoptee.len();
        {
            let mut core = self.core.lock();
            let room = core.room();
            if len > room {
                drop(core);
                let capacity = self.config.capacity;
                return Err(adoptee.refused(Error::OverCapacity { len, room, capacity }));
            }
            core.growing += len;
        }
        let adopted = regions.adopt(adoptee).inspect_err(|_| self.grown(len, None))?;
        let info = adopted.info;
        for (base, len, pinned) in adopted.pieces() {
            // SAFETY: an extent of a region, which stays until the central pool is gone; it is handed over once.
            unsafe { self.add_extent(info.id, base, len, pinned) };
        }
        regions.served(info.id);
        self.grown(0, None);
        Ok(info)
    }

    /// Adds memory and serves those who wait for it.
    ///
    /// # Safety
    /// As for [`Arena::add_extent`]; the memory stays until the central pool is gone or [`CentralPool::retire`] gave it
    /// back.
    pub(crate) unsafe fn add_extent(&self, region: RegionId, base: NonNull<u8>, len: usize, pinned: bool) {
        let mut wakes = Vec::new();
        let mut core = self.core.lock();
        core.growing = core.growing.saturating_sub(len);
        // SAFETY: the caller's word.
        unsafe { core.arena.add_extent(region, base, len, pinned) };
        core.serve(&mut wakes);
        self.stop_waiting(&core);
        drop(core);
        wakes.into_iter().for_each(Wake::wake);
    }

    /// Growing is over; `missing` of the planned bytes never came, because of `error`. Those who wait and cannot be
    /// served by anything that will ever come back get it.
    pub(crate) fn grown(&self, missing: usize, error: Option<&Error>) {
        let mut wakes = Vec::new();
        let mut core = self.core.lock();
        core.growing = core.growing.saturating_sub(missing);
        if let Some(error) = error {
            // Kept for those who have asked for this growth and have not joined the queue yet.
            core.growth_failure = Some(error.clone());
            core.stats.growth_failures += 1;
        }
        if core.growing == 0 {
            let mut queue = std::mem::take(&mut core.queue);
            queue.fail(&mut wakes, |wants| {
                growth_failure(&core, wants).or_else(|| self.hopeless(&core, wants))
            });
            core.queue = queue;
            self.start_waiting(&mut core);
        }
        core.serve(&mut wakes);
        self.stop_waiting(&core);
        drop(core);
        wakes.into_iter().for_each(Wake::wake);
    }

    /// Takes a region out, if nothing of it is used. Its bytes, which are returned, [are to leave](Self::left) before
    /// they count as room.
    pub(crate) fn retire(&self, region: RegionId) -> Option<usize> {
        let mut core = self.core.lock();
        // While someone waits, memory is short: nothing goes.
        if !core.queue.is_empty() {
            return None;
        }
        let len = core.arena.retire(region)?.iter().map(|extent| extent.1).sum();
        core.leaving += len;
        Some(len)
    }

    /// The worker was told to unpin so many of the bytes that were taken out. What it is told to pin from now on comes
    /// after that, so that what is pinned never exceeds the capacity.
    pub(crate) fn left(&self, bytes: usize) {
        let mut wakes = Vec::new();
        let mut core = self.core.lock();
        core.leaving -= bytes;
        // Whoever joined in between has found no room.
        core.serve(&mut wakes);
        self.stop_waiting(&core);
        drop(core);
        wakes.into_iter().for_each(Wake::wake);
    }

    /// Regions, their bytes and how many of these are free. Collects what is cached first.
    pub(crate) fn region_use(&self) -> Vec<(RegionId, usize, usize)> {
        let mut core = self.core.lock();
        self.reclaim_all(&mut core);
        core.arena.release_idle();
        core.arena.regions()
    }
}

impl Core {
    /// Where there is room for a region for the head, since others have taken what was pinned for it, or where there
    /// would be in place of regions that are idle by now: has it made, after the lock. Not after growing has just
    /// failed; and regions move once for a waiter, since it may be for nothing.
    pub(super) fn grow_for_head(&mut self, wakes: &mut Vec<Wake>) -> bool {
        let Some((wants, moved)) = self.queue.head() else { return false };
        // Tells most cases apart at once.
        if self.step == 0
            || self.growth_failure.is_some()
            || self.room() + self.arena.bytes().free < least(wants)
        {
            return false;
        }
        let wants = wants.to_vec();
        let Some(growth) = self.plan(&wants, !moved) else { return false };
        if !growth.going.is_empty() {
            self.queue.head_moved();
        }
        wakes.push(Wake::Grow(self.me.clone(), growth));
        true
    }

    /// Bytes that could still be pinned.
    pub(super) fn room(&self) -> usize {
        let held = self.arena.bytes().total + self.growing + self.leaving;
        self.capacity.saturating_sub(held) / page() * page()
    }

    /// Bytes that could be pinned if everything came back and the regions that are idle then went.
    pub(super) fn movable(&self) -> usize {
        if self.step == 0 {
            return 0;
        }
        let kept = if self.quarantined > 0 {
            self.arena.regions_with(&|descriptor| descriptor.word().state() == state::QUARANTINED)
        } else {
            0
        };
        self.capacity.saturating_sub(kept + self.growing) / page() * page()
    }

    /// Plans a region for these wants: its bytes count as growing until [`CentralPool::grown`]. Where the capacity has
    /// no room for it, regions of which nothing is used are taken out, the last to come first, if `may_move` and if
    /// that helps; but not while another is being made, nor for what a region has room for, if not now.
    fn plan(&mut self, wants: &[Want], may_move: bool) -> Option<Growth> {
        let least = least(wants);
        let mut going = Vec::new();
        if self.step == 0 {
            return None;
        }
        let mut left = self.room();
        if left < least {
            if !may_move || self.growing > 0 || self.never(wants).is_none() {
                return None;
            }
            self.arena.release_idle();
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
            // Ours, but nobody else's before it is really gone.
            left = self.room();
            self.leaving += going.iter().map(|(_, len)| len).sum::<usize>();
        }
        // The region is cut at its extents' edges: what does not fit before one comes after it.
        let need = wants.iter().fold(0usize, |at, w| {
            let (pages, align) = w.placement.fresh_pages();
            let bytes = (pages + align - 1) * segment::PAGE;
            let left = self.extent - at % self.extent;
            let at = if bytes > left { at.saturating_add(left % self.extent) } else { at };
            at.saturating_add(bytes)
        });
        let need = need.checked_next_multiple_of(page()).unwrap_or(usize::MAX);
        // What alignment adds is an upper bound: a region starts well aligned.
        let bytes = self.step.max(need).min(left);
        self.growing += bytes;
        self.stats.growths += 1;
        self.growth_failure = None;
        Some(Growth { going, bytes })
    }
}
