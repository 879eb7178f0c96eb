//! Reclaiming: how much a thread may cache, where its batches come from, and when they go back to their runs.
//!
//! A segment in a thread cache serves only that thread, and a segment in a transfer cache only its class. Any other
//! request that finds no free memory needs it back in its run, and that costs the threads that cached it something: an
//! owner that is shut out of its cache meanwhile takes the slow path once, and an owner whose list is then empty misses
//! once more. So [`CentralPool::reclaim`] begins with what other threads will hardly miss, and stops as soon as the
//! request is served:
//!
//! 1. the transfer caches, and the cache of the thread that asks;
//! 2. the caches of idle threads, which use the pool less than once in a millisecond;
//! 3. for a segment of a class: half of that class's segments in the thread cache that has most of them;
//! 4. everything that is cached, unless it is certain that this would not serve the request.
//!
//! Steps 3 and 4 are for requests that cannot be served otherwise ([`ReclaimLevel`]). As long as the pool may
//! grow, it grows instead and leaves its threads' caches alone: threads that took segments from each other for
//! good would each wait ten times as long as for a hit in a pool that has grown once. Where the pool can grow
//! no more, every request may reclaim everything. So may one that does not wait for the growth, except a
//! copier's, which is tried again. (A part of it would not do in step 4: a large request needs neighbours, and
//! these may be in any cache.)

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use super::{Arena, CentralPool, Core, Fresh, Want, lease, sum};
use crate::arena::set_of;
use crate::freelist::cache::HeldCache;
use crate::freelist::{CacheTable, Descriptor, LISTS, ThreadCache, TransferCache, list_of, listed, mode};
use crate::segment::{Class, Placement};

/// The most segments of a class that a thread cache has room for, and the least.
const MOST_CACHED: usize = 64;
const LEAST_CACHED: usize = 2;
/// A class is alone in a thread cache while the other classes have room for no more than this part of its bytes.
const SHARE_OF_OTHERS: usize = 16;
/// The part of a thread cache's bytes that several classes have together, and the bytes that they have at least. What
/// threads cache of many sizes is most of what a pool pins beyond what is in use: it lies scattered, and large segments
/// find no place in between.
const SHARE_OF_SEVERAL: usize = 8;
const LEAST_OF_SEVERAL: usize = 8 << 20;

/// The class that has room for the most bytes beyond its least room. `None`: no class has room.
fn most_spare(held: &HeldCache<'_>) -> Option<Class> {
    let beyond =
        |class: &Class, least: usize| (held.room(*class) as usize).saturating_sub(least) * class.stride();
    let most = listed().max_by_key(|class| (beyond(class, LEAST_CACHED), beyond(class, 0)));
    most.filter(|class| held.room(*class) > 0)
}

/// Moves everything in a thread cache to its runs. `false`: there was nothing.
fn empty(arena: &mut Arena, mut held: HeldCache<'_>) -> bool {
    let mut any = false;
    held.drain_all(|_, chain| {
        any = true;
        // SAFETY: segments in a thread cache are free and alive, and draining takes them off its lists.
        unsafe { arena.give_chain(chain) };
    });
    any
}

/// How much of what other threads have cached a request may reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReclaimLevel {
    /// What they will hardly miss: steps 1 and 2.
    Idle,
    /// All of it, if need be: steps 1 to 4.
    All,
}

impl CentralPool {
    /// This thread's cache, with a new lease if it has none. Not under the lock.
    pub(super) fn cache(&self) -> Option<&ThreadCache> {
        lease::obtain(self)
    }

    /// Takes a batch from a run. Returns one segment and moves the others into this thread's cache.
    pub(super) fn batch(
        &self,
        core: &mut Core,
        cache: &ThreadCache,
        class: Class,
    ) -> Option<NonNull<Descriptor>> {
        let room = self.room(core, cache, class);
        let mut chain = core.arena.take_batch(class, (room / 2).max(1));
        let descriptor = chain.pop()?;
        if !chain.is_empty() {
            let rest = match self.gate.enter(cache) {
                Some(mut held) => held.fill(class, chain),
                None => chain,
            };
            // SAFETY: just taken from their run, so alive and free, and the chain is their only list.
            unsafe { core.arena.give_chain(rest) };
        }
        Some(descriptor)
    }

    /// The number of segments of a class that this thread cache may hold. 0 while a request for a segment of the class
    /// waits.
    ///
    /// A class that is used for the first time gets room for half of the bytes that are left, or for [`LEAST_CACHED`]
    /// segments where the half is less. Where these do not fit either, other classes lose their room and what is in it:
    /// those first that have the most beyond these segments. (So rooms get smaller until all classes have one, if that
    /// is possible at all, and a class with few bytes keeps its room.) A room stays as it is until then.
    pub(super) fn room(&self, core: &mut Core, cache: &ThreadCache, class: Class) -> u32 {
        let Some(mut held) = self.gate.enter(cache) else { return 0 };
        if core.queue.awaited() & set_of(class) != 0 {
            return 0;
        }
        if held.room(class) > 0 || list_of(class) == LISTS {
            return held.room(class);
        }
        let (stride, share) = (class.stride(), self.share(held.rooms()));
        if LEAST_CACHED * stride > share {
            return 0;
        }
        while held.rooms() + LEAST_CACHED * stride > share {
            let Some(class) = most_spare(&held) else { break };
            // SAFETY: segments in a thread cache are free and alive, and this takes them off their list.
            unsafe { core.arena.give_chain(held.revoke(class)) };
            core.serve();
        }
        let half = (share - held.rooms()) / 2;
        held.grant(class, (half / stride).clamp(LEAST_CACHED, MOST_CACHED) as u32);
        if !self.is_open(class) {
            held.close(class);
        }
        held.room(class)
    }

    /// The bytes that the classes of a thread cache share, if those that have room have it for so many bytes: all of
    /// its bytes for a class that is alone, an eighth, or [`LEAST_OF_SEVERAL`], for several.
    fn share(&self, rooms: usize) -> usize {
        let all = self.config.thread_cache;
        if rooms <= all / SHARE_OF_OTHERS {
            all
        } else {
            all.min((all / SHARE_OF_SEVERAL).max(LEAST_OF_SEVERAL))
        }
    }

    // --- reclaiming --------------------------------------------------------------------------------------------------

    /// Takes a segment for each of `wants` after reclaiming what is cached, in the steps of the head of this module.
    pub(super) fn reclaim(
        &self,
        core: &mut Core,
        wants: &[Want],
        mine: Option<&ThreadCache>,
        level: ReclaimLevel,
    ) -> Option<Vec<Fresh>> {
        let take = |core: &mut Core, is_reclaimed: bool| {
            if !is_reclaimed {
                return None;
            }
            // What comes back is first for those that wait.
            core.serve();
            core.take(wants)
        };
        let bytes = sum(wants.iter().map(|want| want.placement.bytes()));
        let is_reclaimed = self.reclaim_idle(core, mine, bytes);
        let taken = take(core, is_reclaimed);
        if taken.is_some() || level == ReclaimLevel::Idle {
            return taken;
        }
        if let [Want { placement: Placement::Class(class), .. }] = wants {
            let is_reclaimed = self.reclaim_half(core, *class);
            let taken = take(core, is_reclaimed);
            if taken.is_some() {
                return taken;
            }
        }
        let may = self.could_help(core, bytes, core.table.caches().as_slice());
        let is_reclaimed = may && self.reclaim_all(core);
        take(core, is_reclaimed)
    }

    /// Whether anything is cached. Exact while no call is under way on the fast path.
    fn any_cached(&self, core: &Core) -> bool {
        self.transfers.iter().any(|transfer| transfer.count() > 0)
            || core.table.caches().any(|cache| cache.any_cached())
    }

    /// Whether there would be `bytes` bytes with the segments in transfer caches and these thread caches. An estimate,
    /// as long as owners work: one may have a segment more, and a batch that is being moved may count twice or not at
    /// all.
    fn could_help(&self, core: &Core, bytes: usize, caches: &[Arc<ThreadCache>]) -> bool {
        let cached = |class: Class| {
            let listed = caches.iter().map(|cache| cache.cached(class) as usize).sum::<usize>();
            (listed + self.transfers.get(list_of(class)).map_or(0, TransferCache::count)) * class.stride()
        };
        let (arena, all) = (core.arena.bytes(), Class::all().map(cached).sum::<usize>());
        all > 0 && arena.free - arena.withheld + all >= bytes
    }

    /// Reclaims what other threads will hardly miss: the transfer caches, this thread's cache, and the caches of idle
    /// threads (these only if that may help a request for `bytes` bytes). `false`: there was nothing.
    fn reclaim_idle(&self, core: &mut Core, mine: Option<&ThreadCache>, bytes: usize) -> bool {
        let mut any = self.drain_transfers(core);
        any |= mine.is_some_and(|cache| empty(&mut core.arena, CacheTable::mine(cache)));
        let idle = core.table.idle((!self.config.by_hand).then(Instant::now));
        if !idle.is_empty() && self.could_help(core, bytes, &idle) {
            self.gate.revoke(&idle, |held| any |= empty(&mut core.arena, held));
        }
        core.stats.reclaims += u64::from(any);
        any
    }

    /// Moves half of the class's segments in one thread cache, which has most of them, to their runs. `false`: there
    /// were none.
    fn reclaim_half(&self, core: &mut Core, class: Class) -> bool {
        let Core { arena, table, stats, .. } = core;
        let most = table.caches().max_by_key(|cache| cache.cached(class));
        let Some(most) = most.filter(|most| most.cached(class) > 0) else { return false };
        let most = most.clone();
        self.gate.revoke(std::slice::from_ref(&most), |mut held| {
            let half = most.cached(class).div_ceil(2) as u32;
            // SAFETY: segments in a thread cache are free and alive, and draining takes them off its lists.
            unsafe { arena.give_chain(held.drain(class, half)) };
        });
        stats.reclaims += 1;
        true
    }

    /// Reclaims everything in thread caches and transfer caches. `false`: there was nothing.
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

    /// [`CentralPool::reclaim_all`] where all owners are shut out already.
    pub(super) fn reclaim_quiet(&self, core: &mut Core) -> bool {
        let Core { arena, table, .. } = &mut *core;
        let mut any = false;
        table.quiet().for_each(|held| any |= empty(arena, held));
        self.drain_transfers(core) || any
    }
}
