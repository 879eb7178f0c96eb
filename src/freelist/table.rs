//! The thread caches of a pool: which threads lease them, and which of these are idle.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ThreadCache;
use super::cache::{Gate, HeldCache};
use super::descriptor::Chain;
use crate::segment::Class;

/// For how long an owner must have done nothing to count as idle. What it then finds its thread cache emptied of costs
/// it one miss, which is nothing to who comes so rarely. (In models, where time is none, nobody ever is.)
const IDLE: Duration = if cfg!(loom) { Duration::MAX } else { Duration::from_millis(1) };

/// A thread cache's place in the roster.
#[derive(Debug)]
struct TableRow {
    cache: Arc<ThreadCache>,
    leased: bool,
    /// The thread that leases it, or did last.
    owner: u32,
    /// What the owner had counted when this was first seen, and when that was.
    seen: Option<((u64, u64), Instant)>,
}

/// The thread caches of a pool and who leases them. Lives under the central pool's lock.
#[derive(Debug, Default)]
pub(crate) struct CacheTable {
    rows: Vec<TableRow>,
}

impl CacheTable {
    /// A thread cache for a thread: one that nobody leases, or a new one.
    pub(crate) fn lease(&mut self, gate: &Gate) -> Arc<ThreadCache> {
        let owner = crate::sync::thread_number();
        if let Some(row) = self.rows.iter_mut().find(|row| !row.leased) {
            (row.leased, row.owner) = (true, owner);
            return row.cache.clone();
        }
        let cache = Arc::new(ThreadCache::new(self.rows.len(), gate));
        self.rows.push(TableRow { cache: cache.clone(), leased: true, owner, seen: None });
        cache
    }

    /// Ends a lease; the owner's own call, on its thread. What the thread cache cached goes to `sink`.
    pub(crate) fn give_up(&mut self, cache: &Arc<ThreadCache>, sink: impl FnMut(Class, Chain)) {
        Self::mine(cache).drain_all(sink);
        if let Some(row) = self.rows.iter_mut().find(|row| Arc::ptr_eq(&row.cache, cache)) {
            row.leased = false;
        }
    }

    /// Planted: a thread cache is drained by its owner as if nobody else could be at it.
    #[cfg(pinpool_planted = "exit_drains_unlocked")]
    pub(crate) fn drain_unlocked(cache: &ThreadCache) -> Vec<Chain> {
        let mut chains = Vec::new();
        Self::mine(cache).drain_all(|_, chain| chains.push(chain));
        chains
    }

    /// The thread caches that are leased, each with its owner.
    pub(super) fn leases(&self) -> impl Iterator<Item = (&Arc<ThreadCache>, u32)> {
        self.rows.iter().filter(|row| row.leased).map(|row| (&row.cache, row.owner))
    }

    /// All thread caches.
    pub(crate) fn caches(&self) -> impl Iterator<Item = &Arc<ThreadCache>> + Clone {
        self.rows.iter().map(|row| &row.cache)
    }

    /// The thread caches to work on, after [`Gate::quiesce`] and before [`Gate::readmit`].
    pub(crate) fn quiet(&self) -> impl Iterator<Item = HeldCache<'_>> {
        self.caches().map(|cache| HeldCache::of(cache))
    }

    /// A thread cache, for the thread that leases it and that holds the central pool's lock: it is here and not inside
    /// the gate, and the cold side works only under that lock.
    pub(crate) fn mine(cache: &ThreadCache) -> HeldCache<'_> {
        HeldCache::of(cache)
    }

    /// The thread caches in which something is cached and whose owners have done nothing for a while, as far as that
    /// was looked at: the first look at an owner that works only notes that it does. `None`: there is no clock, and all
    /// are idle.
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
