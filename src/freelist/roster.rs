//! The shards of a pool: which threads lease them, and which of these are idle.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Shard;
use super::shard::{Gate, Held};
use super::slot::Chain;
use crate::segment::Class;

/// For how long an owner must have done nothing to count as idle. What it then finds its shard emptied of costs it one
/// miss, which is nothing to who comes so rarely. (In models, where time is none, nobody ever is.)
const IDLE: Duration = if cfg!(loom) { Duration::MAX } else { Duration::from_millis(1) };

/// A shard's place in the roster.
#[derive(Debug)]
struct Place {
    shard: Arc<Shard>,
    leased: bool,
    /// The thread that leases it, or did last.
    owner: u32,
    /// What the owner had counted when this was first seen, and when that was.
    seen: Option<((u64, u64), Instant)>,
}

/// The shards of a pool and who leases them. Lives under the central pool's lock.
#[derive(Debug, Default)]
pub(crate) struct Roster {
    places: Vec<Place>,
}

impl Roster {
    /// A shard for a thread: one that nobody leases, or a new one.
    pub(crate) fn lease(&mut self, gate: &Gate) -> Arc<Shard> {
        let owner = crate::sync::thread_number();
        if let Some(place) = self.places.iter_mut().find(|place| !place.leased) {
            (place.leased, place.owner) = (true, owner);
            return place.shard.clone();
        }
        let shard = Arc::new(Shard::new(self.places.len(), gate));
        self.places.push(Place { shard: shard.clone(), leased: true, owner, seen: None });
        shard
    }

    /// Ends a lease; the owner's own call, on its thread. What the shard cached goes to `sink`.
    pub(crate) fn give_up(&mut self, shard: &Arc<Shard>, sink: impl FnMut(Class, Chain)) {
        Self::mine(shard).drain_all(sink);
        if let Some(place) = self.places.iter_mut().find(|place| Arc::ptr_eq(&place.shard, shard)) {
            place.leased = false;
        }
    }

    /// Planted: a shard is drained by its owner as if nobody else could be at it.
    #[cfg(pinpool_planted = "exit_drains_unlocked")]
    pub(crate) fn drain_unlocked(shard: &Shard) -> Vec<Chain> {
        let mut chains = Vec::new();
        Self::mine(shard).drain_all(|_, chain| chains.push(chain));
        chains
    }

    /// The shards that are leased, each with its owner.
    pub(super) fn leases(&self) -> impl Iterator<Item = (&Arc<Shard>, u32)> {
        self.places.iter().filter(|place| place.leased).map(|place| (&place.shard, place.owner))
    }

    /// All shards.
    pub(crate) fn shards(&self) -> impl Iterator<Item = &Arc<Shard>> + Clone {
        self.places.iter().map(|place| &place.shard)
    }

    /// The shards to work on, after [`Gate::quiesce`] and before [`Gate::open`].
    pub(crate) fn quiet(&self) -> impl Iterator<Item = Held<'_>> {
        self.shards().map(|shard| Held::of(shard))
    }

    /// A shard, for the thread that leases it and that holds the central pool's lock: it is here and not inside the
    /// gate, and the cold side works only under that lock.
    pub(crate) fn mine(shard: &Shard) -> Held<'_> {
        Held::of(shard)
    }

    /// The shards in which something is cached and whose owners have done nothing for a while, as far as that was
    /// looked at: the first look at an owner that works only notes that it does. `None`: there is no clock, and all are
    /// idle.
    pub(crate) fn idle(&mut self, now: Option<Instant>) -> Vec<Arc<Shard>> {
        let mut idle = Vec::new();
        for Place { shard, seen, .. } in &mut self.places {
            let count = shard.tally();
            let since = match seen {
                Some((before, since)) if *before == count => Some(*since),
                _ => None,
            };
            if now.is_none_or(|now| since.is_some_and(|since| now.saturating_duration_since(since) >= IDLE)) {
                if shard.caches() {
                    idle.push(shard.clone());
                }
            } else if let (None, Some(now)) = (since, now) {
                *seen = Some((count, now));
            }
        }
        idle
    }
}
