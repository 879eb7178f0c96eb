//! What threads cache: how much of it, where a batch comes from, and when it is taken back.
//!
//! A cached segment is of use to its thread alone, or between threads to its class alone. Any other request that finds
//! nothing else has to have it taken back to its run, and that has a price for those who cached it: an owner who is
//! kept out of its shard meanwhile takes the slow path for once, and one whose list is empty then misses once more. So
//! [`CentralPool::gather`] takes first what nobody misses, and stops as soon as the request is served:
//!
//! 1. what hangs in racks, and what the asking thread itself has;
//! 2. the shards of threads that are idle: that come by less than once in a millisecond;
//! 3. for a segment of a class, half of what the thread has of it that has most;
//! 4. everything, and for a class or for pages that can then not be had for certain, nothing.
//!
//! The last is for who cannot have it otherwise ([`Reach::All`]). As long as the pool may grow it grows instead, so
//! that a growing pool leaves its threads alone; where it can grow no more, all that is cached is within anybody's
//! reach. (Parts of it would not do in 4: what a large request needs is neighbours, and these may be anywhere.)

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use super::{CentralPool, Core, lease, queue};
use crate::freelist::{Roster, Shard, Slot, mode};
use crate::segment::{Class, Placement};
use crate::sync::Ordering;

/// How far a request may reach for what others have cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// What they will not miss, and a part of their segments of the very class.
    Idle,
    /// All of it.
    All,
}

impl CentralPool {
    pub(super) fn shard(&self) -> Option<&Shard> {
        lease::hot(self).or_else(|| lease::obtain(self))
    }

    /// A batch from a run: one to be used, the others into this thread's shard.
    pub(super) fn batch(&self, core: &mut Core, shard: &Shard, class: Class) -> Option<NonNull<Slot>> {
        let limit = self.limit(core, shard, class);
        let mut chain = core.arena.take_batch(class, (limit / 2).max(1));
        let slot = chain.pop()?;
        if !chain.is_empty() {
            let rest = match self.gate.enter(shard) {
                Some(mut held) => held.fill(class, chain),
                None => chain,
            };
            // SAFETY: just taken from their run, still free.
            unsafe { core.arena.give_chain(rest) };
        }
        Some(slot)
    }

    /// How many segments of a class this shard may hold; grants room for a class used for the first time, at the cost
    /// of the other classes where the shard's bytes are all granted.
    pub(super) fn limit(&self, core: &mut Core, shard: &Shard, class: Class) -> u32 {
        let Some(mut held) = self.gate.enter(shard) else { return 0 };
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
            // SAFETY: what a shard caches is free and alive.
            held.drain_all(|_, chain| unsafe { arena.give_chain(chain) });
            Class::all().for_each(|c| held.set_limit(c, 0));
        }
        held.set_limit(class, limit);
        limit
    }

    // --- taking back -------------------------------------------------------------------------------------------------

    /// A segment made of what is cached: see the module's page.
    pub(super) fn gather(
        &self,
        core: &mut Core,
        placement: Placement,
        mine: Option<&Shard>,
        reach: Reach,
    ) -> Option<NonNull<Slot>> {
        if self.collect_idle(core, mine, Some(placement)) {
            if let Some(slot) = queue::take_one(&mut core.arena, placement) {
                return Some(slot);
            }
        }
        if let Placement::Class(class) = placement {
            if let Some(slot) = self.collect_half(core, class) {
                return Some(slot);
            }
        }
        let any = reach == Reach::All && self.caches(core);
        if any && self.could_help(core, placement, core.roster.shards()) && self.collect(core) {
            return queue::take_one(&mut core.arena, placement);
        }
        None
    }

    /// Whether anything is cached. Exact while nobody moves.
    fn caches(&self, core: &Core) -> bool {
        // Pairs with those who take bookings away.
        self.racked.bytes.load(Ordering::Acquire) > 0 || core.roster.shards().any(|shard| shard.caches())
    }

    /// Whether a request might be served by what racks have and these shards. `false` is as good as certain: owners at
    /// work may have a segment more by now.
    fn could_help<'a>(
        &self,
        core: &Core,
        placement: Placement,
        shards: impl Iterator<Item = &'a Arc<Shard>> + Clone,
    ) -> bool {
        core.arena.could_gather(placement, |class| {
            let listed = shards.clone().map(|shard| shard.cached(class) as usize).sum::<usize>();
            // Batches that were on their way to a hook, or from one, a moment ago.
            listed + self.racked.bytes.load(Ordering::Relaxed) as usize / class.stride()
        })
    }

    /// Takes back what nobody misses: what is between threads, what this one has, and what idle ones have (not, if that
    /// cannot help the request). `false` if that was nothing.
    pub(super) fn collect_idle(
        &self,
        core: &mut Core,
        mine: Option<&Shard>,
        placement: Option<Placement>,
    ) -> bool {
        let mut any = self.take_down(core);
        if let Some(shard) = mine {
            Roster::mine(shard).drain_all(|_, chain| {
                any = true;
                // SAFETY: what a shard caches is free and alive.
                unsafe { core.arena.give_chain(chain) };
            });
        }
        let idle = core.roster.idle((!self.config.timeless).then(Instant::now));
        let helps = |placement| self.could_help(core, placement, idle.iter());
        if !idle.is_empty() && placement.is_none_or(helps) {
            self.gate.hush(&idle, &core.roster, |mut held| {
                held.drain_all(|_, chain| {
                    any = true;
                    // SAFETY: as above.
                    unsafe { core.arena.give_chain(chain) };
                });
            });
        }
        core.stats.collects += u64::from(any);
        any
    }

    /// A segment of a class from the thread that has most of them, half of which go to their runs.
    fn collect_half(&self, core: &mut Core, class: Class) -> Option<NonNull<Slot>> {
        let Core { arena, roster, stats, .. } = core;
        let most = roster.shards().max_by_key(|shard| shard.cached(class))?;
        if most.cached(class) == 0 {
            return None;
        }
        let most = most.clone();
        self.gate.hush(std::slice::from_ref(&most), roster, |mut held| {
            let half = most.cached(class).div_ceil(2) as u32;
            // SAFETY: what a shard caches is free and alive.
            unsafe { arena.give_chain(held.drain(class, half)) };
        });
        stats.collects += 1;
        arena.take(Placement::Class(class))
    }

    /// Takes back everything that shards and racks cache. `false` if that was nothing.
    pub(super) fn collect(&self, core: &mut Core) -> bool {
        if !self.caches(core) {
            return false;
        }
        self.gate.quiesce(mode::INSPECT, &core.roster);
        let any = self.sweep(core);
        self.gate.open(mode::INSPECT, &core.roster);
        core.stats.collects += u64::from(any);
        any
    }

    /// The same, where the owners are kept out already.
    pub(super) fn sweep(&self, core: &mut Core) -> bool {
        let mut any = false;
        let Core { arena, roster, .. } = &mut *core;
        for mut held in roster.quiet() {
            held.drain_all(|_, chain| {
                any = true;
                // SAFETY: what a shard caches is free and alive.
                unsafe { arena.give_chain(chain) };
            });
        }
        self.take_down(core) || any
    }
}
