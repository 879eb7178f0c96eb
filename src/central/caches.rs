//! What is cached: how much a thread may cache, where its batches come from, where they go when its
//! lists are full, and when cached segments go back to their runs.
//!
//! # Exchange
//!
//! A thread that finds its cache empty takes a batch that another thread has left in the class's
//! transfer cache ([`crate::freelist::transfer`]), without the central pool's lock. A thread with a
//! full list leaves half of it there, or else in its runs, under the lock. Neither can overtake a
//! waiter: what a waiter has a right to is in no cache, since it was taken out when the waiter came
//! or chose its window, and no segment of a closed class is kept before this module has looked
//! (`waiting`).
//!
//! # Reclaiming
//!
//! A request that finds no free memory needs what is cached back in its runs, at a cost for the
//! threads that cached it: an owner that is shut out of its cache takes the slow path once, and one
//! whose list is then empty misses once more. So [`CentralPool::reclaim`] begins with what other
//! threads will hardly miss, and stops as soon as the request is served:
//!
//! 1. the transfer caches, and the cache of the thread that asks;
//! 2. the caches of idle threads, which use the pool less than once in a millisecond;
//! 3. for a segment of a class: half of its segments in the thread cache that has most of them;
//! 4. everything that is cached, unless it is certain that this would not serve the request. (A
//!    large request needs neighbours, and these may be in any cache.)
//!
//! Steps 3 and 4 are for requests that cannot be served otherwise ([`ReclaimLevel`]). As long as
//! the pool may grow, it grows and leaves its threads' caches alone: threads that kept taking each
//! other's segments would each wait ten times as long as for a hit. Where the pool can grow
//! no more, every request may reclaim everything. So may one that does not wait for the growth,
//! unless it is a copier's.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use super::{Arena, CentralPool, Core, Fresh, Want, pack, queue, thread_caches};
use crate::arena::set_of;
use crate::freelist::cache::HeldCache;
use crate::freelist::{CacheTable, Descriptor, LISTS, ThreadCache, TransferCache, list_of, listed};
use crate::segment::{Class, Placement};

/// The most segments of a class that a thread cache has room for, and the least.
const MOST_CACHED: usize = 64;
const LEAST_CACHED: usize = 2;
/// A class is alone in a thread cache if the others have room for at most this part of it.
const SHARE_OF_OTHERS: usize = 16;
/// The part of a thread cache's bytes that several classes have together, and the bytes that they
/// have at least. What threads cache of many sizes is most of what a pool pins beyond what is in
/// use: it lies scattered, and large segments find no place in between.
const SHARE_OF_SEVERAL: usize = 8;
const LEAST_OF_SEVERAL: usize = 8 << 20;

/// How much of what other threads have cached a request may reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReclaimLevel {
    /// What they will hardly miss: steps 1 and 2.
    Idle,
    /// All of it, if need be: steps 1 to 4.
    All,
}

/// Moves everything in a thread cache to its runs. `false`: there was nothing.
fn empty(arena: &mut Arena, mut held: HeldCache<'_>) -> bool {
    let mut any = false;
    held.drain_all(|_, chain| {
        any = true;
        // SAFETY: cached segments are free and alive; draining takes them off its lists.
        unsafe { arena.give_chain(chain) };
    });
    any
}

impl CentralPool {
    /// This thread's cache, with a new lease if it has none. Not under the lock.
    pub(super) fn cache(&self) -> Option<&ThreadCache> {
        thread_caches::obtain(self)
    }

    // --- taking ----------------------------------------------------------------------------------

    /// Takes a segment from this thread's cache, filled from a transfer cache if empty. Without the
    /// lock, and never before a waiter: it has a right to nothing cached. `None` in a fork's child.
    pub(crate) fn refill(&self, class: Class, len: usize) -> Option<Fresh> {
        let mut held = self.gate.enter(self.cache()?)?;
        // Some callers have not tried for a hit: a thread that has completed copies since.
        let descriptor = held.take(class, len).or_else(|| {
            if let Some(transfer) = self.transfers.get(list_of(class)) {
                held.take_batch(class, transfer);
            }
            held.take(class, len)
        })?;
        // SAFETY: taken just now, of this class.
        Some(unsafe { Fresh::of_packed(self, descriptor, pack(len, list_of(class))) })
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
            // SAFETY: just taken from their run: alive and free, and the chain is their only list.
            unsafe { core.arena.give_chain(rest) };
        }
        Some(descriptor)
    }

    /// How many segments of a class this thread cache may hold: 0 while a request waits for it.
    ///
    /// A class that is first used gets room for half of the bytes that are left, or for
    /// [`LEAST_CACHED`] segments if that is more. Where these do not fit, other classes lose their
    /// room and what is in it, those first that have the most beyond these segments. (So rooms get
    /// smaller until all classes have one, if possible, and a class with few bytes keeps its room.)
    fn room(&self, core: &mut Core, cache: &ThreadCache, class: Class) -> u32 {
        let Some(mut held) = self.gate.enter(cache) else { return 0 };
        if core.queue.awaited() & set_of(class) != 0 {
            return 0;
        }
        if held.room(class) > 0 || list_of(class) == LISTS {
            return held.room(class);
        }
        // All of the bytes are for a class that is alone, and a part for several.
        let (all, stride) = (self.config.thread_cache, class.stride());
        let is_alone = held.rooms() <= all / SHARE_OF_OTHERS;
        let share = if is_alone { all } else { all.min((all / SHARE_OF_SEVERAL).max(LEAST_OF_SEVERAL)) };
        if LEAST_CACHED * stride > share {
            return 0;
        }
        while held.rooms() + LEAST_CACHED * stride > share {
            let beyond = |class: &Class, least: usize| {
                (held.room(*class) as usize).saturating_sub(least) * class.stride()
            };
            let most = listed().max_by_key(|class| (beyond(class, LEAST_CACHED), beyond(class, 0)));
            let Some(most) = most.filter(|class| held.room(*class) > 0) else { break };
            // SAFETY: cached segments are free and alive; this takes them off their list.
            unsafe { core.arena.give_chain(held.revoke(most)) };
            core.grant_waiters();
        }
        let half = (share - held.rooms()) / 2;
        held.grant(class, (half / stride).clamp(LEAST_CACHED, MOST_CACHED) as u32);
        if !self.is_open(class) {
            held.close(class);
        }
        held.room(class)
    }

    // --- returning -------------------------------------------------------------------------------

    /// Returns a segment into this thread's cache, and makes room there if need be: the class gets
    /// its room, or half of the list goes to a transfer cache or its runs. `false`: the segment is
    /// still out, maybe for a waiter, and the caller returns it under the lock.
    ///
    /// # Safety
    /// The descriptor is alive, out, of this class, in no list, and owned by the caller.
    pub(super) unsafe fn keep(&self, class: Class, descriptor: NonNull<Descriptor>, len: usize) -> bool {
        let Some(cache) = self.cache() else { return false };
        // SAFETY: alive by this function's contract.
        let base = unsafe { descriptor.as_ref() }.base();
        for is_made in [false, true] {
            let Some(mut held) = self.gate.enter(cache) else { return false };
            if !self.may_claim(class, base) {
                return false;
            }
            if self.is_open(class) {
                held.open(class);
            }
            // SAFETY: this function's contract; inside the gate no request had a right to it.
            if unsafe { held.put_closed(class, descriptor, len) } {
                return true;
            }
            drop(held);
            // Made before the segment is returned: after that the central pool may be freed.
            if is_made || !self.make_room(cache, class) {
                return false;
            }
        }
        false
    }

    /// Makes room in this thread cache for another segment of a class. `false`: there is none.
    fn make_room(&self, cache: &ThreadCache, class: Class) -> bool {
        let Some(mut held) = self.gate.enter(cache) else { return false };
        let half = held.room(class).div_ceil(2);
        // A half that finds no room there stays in the list until this thread has the lock, so that
        // a check or another thread that reclaims finds it at any time.
        if half > 0 && held.offload(class, half, &self.transfers[list_of(class)]) > 0 {
            return true;
        }
        drop(held);
        let mut core = self.lock();
        if half == 0 {
            // The class has no room here yet, as in a thread that has only returned segments.
            return self.room(&mut core, cache, class) > 0;
        }
        // If the gate keeps the owner out, the whole cache was reclaimed, this half included.
        if let Some(mut held) = self.gate.enter(cache) {
            // SAFETY: drained from this thread's cache, so free and alive.
            unsafe { core.arena.give_chain(held.drain(class, half)) };
        }
        true
    }

    // --- reclaiming ------------------------------------------------------------------------------

    /// Takes a segment for each of `wants` after reclaiming, in the steps of this module's head.
    pub(super) fn reclaim(
        &self,
        core: &mut Core,
        wants: &[Want],
        mine: Option<&ThreadCache>,
        level: ReclaimLevel,
    ) -> Option<Vec<Fresh>> {
        let bytes = queue::bytes(wants);
        for step in 0..3 {
            let any = match step {
                0 => self.reclaim_idle(core, mine, bytes),
                _ if level == ReclaimLevel::Idle => false,
                1 => self.reclaim_half(core, wants),
                _ => self.could_help(core, bytes, &core.table) && self.reclaim_all(core),
            };
            if any {
                // Waiting requests have the first right to what comes back.
                core.grant_waiters();
                let taken = core.take(wants);
                if taken.is_some() {
                    return taken;
                }
            }
        }
        None
    }

    /// Whether there would be `bytes` bytes with the segments in transfer caches and these thread
    /// caches. An estimate while owners work: one may have a segment more, and a batch that is
    /// being moved may count twice or not at all.
    fn could_help(&self, core: &Core, bytes: usize, caches: &[Arc<ThreadCache>]) -> bool {
        let cached = |class: Class| {
            let listed = caches.iter().map(|cache| cache.cached(class) as usize).sum::<usize>();
            (listed + self.transfers.get(list_of(class)).map_or(0, TransferCache::count)) * class.stride()
        };
        let (arena, all) = (core.arena.bytes(), Class::all().map(cached).sum::<usize>());
        all > 0 && arena.free - arena.withheld + all >= bytes
    }

    /// Reclaims what other threads will hardly miss: the transfer caches, this thread's cache, and
    /// idle threads' (if that may help with `bytes` bytes). `false`: there was nothing.
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

    /// For a segment of a class, moves half of the class's segments in the thread cache that has
    /// most of them to their runs. `false`: there were none.
    fn reclaim_half(&self, core: &mut Core, wants: &[Want]) -> bool {
        let [Want { placement: Placement::Class(class), .. }] = *wants else { return false };
        let Core { arena, table, stats, .. } = core;
        let most = table.caches().max_by_key(|cache| cache.cached(class));
        let Some(most) = most.filter(|most| most.cached(class) > 0) else { return false };
        self.gate.revoke(std::slice::from_ref(most), |mut held| {
            let half = most.cached(class).div_ceil(2) as u32;
            // SAFETY: cached segments are free and alive; draining takes them off its lists.
            unsafe { arena.give_chain(held.drain(class, half)) };
        });
        stats.reclaims += 1;
        true
    }

    /// Reclaims everything in thread caches and transfer caches. `false`: there was nothing.
    pub(super) fn reclaim_all(&self, core: &mut Core) -> bool {
        // Exact while no call is under way on the fast path.
        let any_cached = self.transfers.iter().any(|transfer| transfer.count() > 0)
            || core.table.caches().any(|cache| cache.any_cached());
        if !any_cached {
            return false;
        }
        self.gate.quiesce(&core.table);
        let any = self.reclaim_quiet(core);
        self.gate.readmit(&core.table);
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

    /// Moves all batches in transfer caches to their runs. A batch that an owner is moving
    /// meanwhile is left. `false`: there was nothing.
    fn drain_transfers(&self, core: &mut Core) -> bool {
        let mut any = false;
        for transfer in &self.transfers {
            let chain = transfer.drain();
            any |= !chain.is_empty();
            // SAFETY: just taken from a transfer cache, so free and alive.
            unsafe { core.arena.give_chain(chain) };
        }
        any
    }
}
