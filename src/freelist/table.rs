//! The thread caches of a pool: which threads lease them, and which of these are idle. A thread
//! cache is in the table, under the central pool's lock, from its first use to its thread's end.

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ThreadCache;
use super::cache::{Gate, HeldCache};
use super::descriptor::Chain;
use crate::segment::Class;

/// An owner that has done nothing for this long counts as idle: a thread cache that is emptied
/// meanwhile costs it one miss. (Models have no time: there no owner gets idle.)
const IDLE: Duration = if cfg!(loom) { Duration::MAX } else { Duration::from_millis(1) };

/// The thread caches of a pool.
#[derive(Debug, Default)]
pub(crate) struct CacheTable {
    caches: Vec<Arc<ThreadCache>>,
    /// For each of them, what the owner had counted at an earlier look, and since when.
    seen: Vec<Option<((u64, u64), Instant)>>,
}

impl Deref for CacheTable {
    type Target = [Arc<ThreadCache>];
    fn deref(&self) -> &Self::Target {
        &self.caches
    }
}

impl CacheTable {
    /// Makes a thread cache, and leases it to the calling thread.
    pub(crate) fn lease(&mut self, gate: &Gate) -> Arc<ThreadCache> {
        let cache = Arc::new(ThreadCache::new(gate));
        self.caches.push(cache.clone());
        self.seen.push(None);
        cache
    }

    /// Ends a lease, on the owner's thread and under the central pool's lock. `sink` gets the
    /// segments that were in the thread cache. The caller counts on what the cache had counted.
    pub(crate) fn give_up(&mut self, cache: &Arc<ThreadCache>, sink: impl FnMut(Class, Chain)) {
        Self::mine(cache).drain_all(sink);
        if let Some(at) = self.caches.iter().position(|row| Arc::ptr_eq(row, cache)) {
            self.caches.swap_remove(at);
            self.seen.swap_remove(at);
        }
    }

    /// All thread caches.
    pub(crate) fn caches(&self) -> std::slice::Iter<'_, Arc<ThreadCache>> {
        self.caches.iter()
    }

    /// All thread caches, for the cold side between [`Gate::quiesce`] and [`Gate::readmit`].
    pub(crate) fn quiet(&self) -> impl Iterator<Item = HeldCache<'_>> {
        self.caches().map(|cache| HeldCache { cache })
    }

    /// Access to a thread cache for its owner outside of the gate, under the central pool's lock.
    /// The cold side works only under that lock, so no other thread works on the cache.
    pub(crate) fn mine(cache: &ThreadCache) -> HeldCache<'_> {
        HeldCache { cache }
    }

    /// The thread caches with segments and idle owners: a look at least [`IDLE`] before `now` found
    /// the same counts. With `now` as `None` there is no clock, and all owners count as idle.
    pub(crate) fn idle(&mut self, now: Option<Instant>) -> Vec<Arc<ThreadCache>> {
        let mut idle = Vec::new();
        for (cache, seen) in self.caches.iter().zip(&mut self.seen) {
            let count = cache.tally();
            let is_idle = match (now, *seen) {
                (None, _) => true,
                (Some(now), Some((before, since))) if before == count => {
                    now.saturating_duration_since(since) >= IDLE
                }
                (Some(now), _) => {
                    *seen = Some((count, now));
                    false
                }
            };
            if is_idle && cache.any_cached() {
                idle.push(cache.clone());
            }
        }
        idle
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::ptr::NonNull;

    use super::super::{Descriptor, list_of};
    use super::*;

    #[test]
    fn an_owner_that_has_done_nothing_for_a_while_is_idle() {
        let (gate, mut table, class) = (Gate::new(true), CacheTable::default(), Class::of(100).unwrap());
        let (cache, start) = (table.lease(&gate), Instant::now());
        let segment = Descriptor::new(NonNull::dangling(), Some(class), 0, 0);
        let mut idle = |looks| table.idle(Some(start + IDLE * looks)).len();
        let mut held = CacheTable::mine(&cache);
        held.grant(class, 1);
        assert_eq!((idle(0), idle(1)), (0, 0), "nothing is cached");
        segment.taken();
        // SAFETY: it is alive, out, and in no list.
        assert!(unsafe { held.put(NonNull::from(&segment), 100, list_of(class)) });
        assert_eq!((idle(2), idle(3)), (0, 1), "a return is work");
        held.take(class, 100).unwrap();
        // SAFETY: as above.
        assert!(unsafe { held.put(NonNull::from(&segment), 100, list_of(class)) });
        assert_eq!((idle(4), idle(5)), (0, 1), "so is a checkout");
    }
}
