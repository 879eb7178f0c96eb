//! What threads cache: how much of it, where a batch comes from, and when it is taken back.
//!
//! A cached segment is of use to its thread alone, or between threads to its class alone. Any other request that finds
//! nothing else has to have it taken back to its run, and that has a price for those who cached it: an owner who is
//! kept out of its thread cache meanwhile takes the slow path for once, and one whose list is empty then misses once
//! more. So [`CentralPool::reclaim`] takes first what nobody misses, and stops as soon as the request is served:
//!
//! 1. what hangs in transfer caches, and what the asking thread itself has;
//! 2. the thread caches of threads that are idle: that come by less than once in a millisecond;
//! 3. for a segment of a class, half of what the thread has of it that has most;
//! 4. everything, and for a class or for pages that can then not be had for certain, nothing.
//!
//! The last is for who cannot have it otherwise ([`ReclaimLevel::All`]). As long as the pool may grow it grows instead,
//! so that a growing pool leaves its threads alone; where it can grow no more, all that is cached is within anybody's
//! reach. (Parts of it would not do in 4: what a large request needs is neighbours, and these may be anywhere.)

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use super::{CentralPool, Core, lease, queue};
use crate::freelist::{CacheTable, Descriptor, ThreadCache, mode};
use crate::segment::{Class, Placement};
use crate::sync::Ordering;

/// How far a request may reach for what others have cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReclaimLevel {
    /// What they will not miss, and a part of their segments of the very class.
    Idle,
    /// All of it.
    All,
}

impl CentralPool {
    pub(super) fn cache(&self) -> Option<&ThreadCache> {
        lease::hot(self).or_else(|| lease::obtain(self))
    }

    /// A batch from a run: one to be used, the others into this thread's thread cache.
    pub(super) fn batch(
        &self,
        core: &mut Core,
        cache: &ThreadCache,
        class: Class,
    ) -> Option<NonNull<Descriptor>> {
        let limit = self.limit(core, cache, class);
        let mut chain = core.arena.take_batch(class, (limit / 2).max(1));
        let descriptor = chain.pop()?;
        if !chain.is_empty() {
            let rest = match self.gate.enter(cache) {
                Some(mut held) => held.fill(class, chain),
                None => chain,
            };
            // SAFETY: just taken from their run, still free.
            unsafe { core.arena.give_chain(rest) };
        }
        Some(descriptor)
    }

    /// How many segments of a class this thread cache may hold; grants room for a class used for the first time, at the
    /// cost of the other classes where the thread cache's bytes are all granted.
    pub(super) fn limit(&self, core: &mut Core, cache: &ThreadCache, class: Class) -> u32 {
        let Some(mut held) = self.gate.enter(cache) else { return 0 };
        let limit = held.limit(class);
        if limit > 0 || !held.has(class) {
            return limit;
        }
        let (budget, stride) = (self.config.thread_cache, class.stride());
        let limit = match budget / 8 / stride {
            0 | 1 if stride * 4 <= budget => 2,
            0 | 1 => return 0,
            n => n.min(64) as u32,
        };
        let granted: usize = Class::all().map(|c| held.limit(c) as usize * c.stride()).sum();
        if granted + limit as usize * stride > budget {
            let arena = &mut core.arena;
            // SAFETY: what a thread cache caches is free and alive.
            held.drain_all(|_, chain| unsafe { arena.give_chain(chain) });
            Class::all().for_each(|c| held.set_limit(c, 0));
        }
        held.set_limit(class, limit);
        limit
    }

    // --- taking back -------------------------------------------------------------------------------------------------

    /// A segment made of what is cached: see the module's page.
    pub(super) fn reclaim(
        &self,
        core: &mut Core,
        placement: Placement,
        mine: Option<&ThreadCache>,
        level: ReclaimLevel,
    ) -> Option<NonNull<Descriptor>> {
        if self.reclaim_idle(core, mine, Some(placement)) {
            if let Some(descriptor) = queue::take_one(&mut core.arena, placement) {
                return Some(descriptor);
            }
        }
        if let Placement::Class(class) = placement {
            if let Some(descriptor) = self.reclaim_half(core, class) {
                return Some(descriptor);
            }
        }
        let any = level == ReclaimLevel::All && self.any_cached(core);
        if any && self.could_help(core, placement, core.table.caches()) && self.reclaim_all(core) {
            return queue::take_one(&mut core.arena, placement);
        }
        None
    }

    /// Whether anything is cached. Exact while nobody moves.
    fn any_cached(&self, core: &Core) -> bool {
        // Pairs with those who take reservations away.
        self.reservations.bytes.load(Ordering::Acquire) > 0
            || core.table.caches().any(|cache| cache.any_cached())
    }

    /// Whether a request might be served by what transfer caches have and these thread caches. `false` is as good as
    /// certain: owners at work may have a segment more by now.
    fn could_help<'a>(
        &self,
        core: &Core,
        placement: Placement,
        caches: impl Iterator<Item = &'a Arc<ThreadCache>> + Clone,
    ) -> bool {
        core.arena.could_reclaim(placement, |class| {
            let listed = caches.clone().map(|cache| cache.cached(class) as usize).sum::<usize>();
            // Batches that were on their way to a slot, or from one, a moment ago.
            listed + self.reservations.bytes.load(Ordering::Relaxed) as usize / class.stride()
        })
    }

    /// Takes back what nobody misses: what is between threads, what this one has, and what idle ones have (not, if that
    /// cannot help the request). `false` if that was nothing.
    pub(super) fn reclaim_idle(
        &self,
        core: &mut Core,
        mine: Option<&ThreadCache>,
        placement: Option<Placement>,
    ) -> bool {
        let mut any = self.drain_transfers(core);
        if let Some(cache) = mine {
            CacheTable::mine(cache).drain_all(|_, chain| {
                any = true;
                // SAFETY: what a thread cache caches is free and alive.
                unsafe { core.arena.give_chain(chain) };
            });
        }
        let idle = core.table.idle((!self.config.timeless).then(Instant::now));
        let helps = |placement| self.could_help(core, placement, idle.iter());
        if !idle.is_empty() && placement.is_none_or(helps) {
            self.gate.revoke(&idle, &core.table, |mut held| {
                held.drain_all(|_, chain| {
                    any = true;
                    // SAFETY: as above.
                    unsafe { core.arena.give_chain(chain) };
                });
            });
        }
        core.stats.reclaims += u64::from(any);
        any
    }

    /// A segment of a class from the thread that has most of them, half of which go to their runs.
    fn reclaim_half(&self, core: &mut Core, class: Class) -> Option<NonNull<Descriptor>> {
        let Core { arena, table, stats, .. } = core;
        let most = table.caches().max_by_key(|cache| cache.cached(class))?;
        if most.cached(class) == 0 {
            return None;
        }
        let most = most.clone();
        self.gate.revoke(std::slice::from_ref(&most), table, |mut held| {
            let half = most.cached(class).div_ceil(2) as u32;
            // SAFETY: what a thread cache caches is free and alive.
            unsafe { arena.give_chain(held.drain(class, half)) };
        });
        stats.reclaims += 1;
        arena.take(Placement::Class(class))
    }

    /// Takes back everything that thread caches and transfer caches cache. `false` if that was nothing.
    pub(super) fn reclaim_all(&self, core: &mut Core) -> bool {
        if !self.any_cached(core) {
            return false;
        }
        self.gate.quiesce(mode::INSPECT, &core.table);
        let any = self.reclaim_quiet(core);
        self.gate.readmit(mode::INSPECT, &core.table);
        core.stats.reclaims += u64::from(any);
        any
    }

    /// The same, where the owners are kept out already.
    pub(super) fn reclaim_quiet(&self, core: &mut Core) -> bool {
        let mut any = false;
        let Core { arena, table, .. } = &mut *core;
        for mut held in table.quiet() {
            held.drain_all(|_, chain| {
                any = true;
                // SAFETY: what a thread cache caches is free and alive.
                unsafe { arena.give_chain(chain) };
            });
        }
        self.drain_transfers(core) || any
    }
}
