//! The thread caches of a pool: which threads lease them, and which of these threads are idle.
//!
//! The table lives under the central pool's lock. A thread cache is made when a thread needs one and none is left over
//! from a thread that has ended. Of the caches of ended threads a few stay in the table, for threads to come. The others
//! leave it, and the central pool counts on what they had counted: so what the pool does for each cache goes with the
//! threads that are alive.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ThreadCache;
use super::cache::{Gate, HeldCache};
use super::descriptor::Chain;
use crate::segment::Class;

/// An owner that has done nothing for this long counts as idle. A thread cache that is emptied meanwhile costs its
/// owner one miss, which is little for a thread that uses the pool so rarely. (Models have no time: there no owner gets
/// idle.)
const IDLE: Duration = if cfg!(loom) { Duration::MAX } else { Duration::from_millis(1) };

/// The most thread caches that stay in the table for threads to come.
const SPARE: usize = 4;

/// A thread cache and its lease.
#[derive(Debug)]
struct TableRow {
    cache: Arc<ThreadCache>,
    leased: bool,
    /// What the owner had counted at an earlier look, and when a look first found that.
    seen: Option<((u64, u64), Instant)>,
}

/// The thread caches of a pool and the threads that lease them.
#[derive(Debug, Default)]
pub(crate) struct CacheTable {
    rows: Vec<TableRow>,
    /// The number of caches made so far.
    made: usize,
}

impl CacheTable {
    /// Leases a thread cache to the calling thread: one that no thread leases, or a new one.
    pub(crate) fn lease(&mut self, gate: &Gate) -> Arc<ThreadCache> {
        if let Some(row) = self.rows.iter_mut().find(|row| !row.leased) {
            row.leased = true;
            return row.cache.clone();
        }
        let cache = Arc::new(ThreadCache::new(self.made, gate));
        self.made += 1;
        self.rows.push(TableRow { cache: cache.clone(), leased: true, seen: None });
        cache
    }

    /// Ends a lease. The owner makes this call, on its own thread, and holds the central pool's lock. `sink` gets the
    /// segments that were in the thread cache. `true`: the cache has left the table, and the caller counts on what it had
    /// counted.
    #[must_use = "the counts of a cache that has left the table are the caller's"]
    pub(crate) fn give_up(&mut self, cache: &Arc<ThreadCache>, sink: impl FnMut(Class, Chain)) -> bool {
        Self::mine(cache).drain_all(sink);
        let spare = self.rows.iter().filter(|row| !row.leased).count();
        let Some(at) = self.rows.iter().position(|row| Arc::ptr_eq(&row.cache, cache)) else { return false };
        if spare >= SPARE {
            self.rows.swap_remove(at);
            return true;
        }
        self.rows[at].leased = false;
        false
    }

    /// The number of thread caches that are leased.
    #[cfg(all(test, not(loom)))]
    pub(super) fn leased(&self) -> usize {
        self.rows.iter().filter(|row| row.leased).count()
    }

    /// All thread caches.
    pub(crate) fn caches(&self) -> impl Iterator<Item = &Arc<ThreadCache>> + Clone {
        self.rows.iter().map(|row| &row.cache)
    }

    /// All thread caches, for the cold side to work on: after [`Gate::quiesce`] and before [`Gate::readmit`].
    pub(crate) fn quiet(&self) -> impl Iterator<Item = HeldCache<'_>> {
        self.caches().map(|cache| HeldCache::of(cache))
    }

    /// Access to a thread cache for its owner outside of the gate. The owner holds the central pool's lock, and the
    /// cold side works only under that lock. So no other thread works on the cache.
    pub(crate) fn mine(cache: &ThreadCache) -> HeldCache<'_> {
        HeldCache::of(cache)
    }

    /// The thread caches that hold segments and whose owners are idle: a look at least [`IDLE`] before `now` found the
    /// same counts. So the first look at an owner after it has worked only notes the counts. With `now` as `None` there
    /// is no clock, and all owners count as idle.
    pub(crate) fn idle(&mut self, now: Option<Instant>) -> Vec<Arc<ThreadCache>> {
        let mut idle = Vec::new();
        for TableRow { cache, seen, .. } in &mut self.rows {
            let count = cache.tally();
            let since = match seen {
                Some((before, since)) if *before == count => Some(*since),
                _ => None,
            };
            if now.is_none_or(|now| since.is_some_and(|since| now.saturating_duration_since(since) >= IDLE)) {
                if cache.any_cached() {
                    idle.push(cache.clone());
                }
            } else if let (None, Some(now)) = (since, now) {
                *seen = Some((count, now));
            }
        }
        idle
    }
}
