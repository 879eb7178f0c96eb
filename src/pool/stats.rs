//! What a pool says of itself in numbers, and the check of all its invariants.

use std::sync::atomic::Ordering;

use super::{Pool, Store};
use crate::central::{CentralPool, CentralSnapshot};
use crate::error::Result;
use crate::freelist::state;
use crate::telemetry::counters::ErrorCounts;

/// How often sums that change while they are added up are added up again.
const STATS_READS: usize = 8;

/// A pool's bytes and counts at one moment.
///
/// `free_bytes + checked_out_bytes + in_flight_bytes + quarantined_bytes + cut_bytes = pinned_bytes + unpinned_bytes`,
/// always; each part is exact when nobody moves, and otherwise off by no more than the calls under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Locked bytes.
    pub pinned_bytes: usize,
    /// Bytes that the pool serves and that are not locked: the system refused to, or it is managed memory.
    pub unpinned_bytes: usize,
    /// Bytes that can be checked out.
    pub free_bytes: usize,
    /// Of the free bytes, those that threads keep for their next checkouts.
    pub cached_bytes: usize,
    /// Bytes of buffers in somebody's hands, rounding included.
    pub checked_out_bytes: usize,
    /// Bytes that a device may still use, those among them that a copy queue has not submitted yet. A buffer shared by
    /// `Arc` is not among them: it counts as checked out until the last that has it is gone, a device included.
    pub in_flight_bytes: usize,
    /// Of the bytes in flight, those claimed for stream-ready reuse.
    pub claimed_bytes: usize,
    /// Bytes never to be reused.
    pub quarantined_bytes: usize,
    /// Bytes between segments that no segment covers.
    pub cut_bytes: usize,
    /// Bytes asked for by all that is checked out, in flight or quarantined.
    pub requested_bytes: usize,
    /// Bytes given to these: the sum of the three.
    pub granted_bytes: usize,
    /// The difference: bytes lost to rounding, which are within the three. (What is lost between segments is
    /// [`cut_bytes`](Self::cut_bytes).)
    pub rounding_bytes: usize,
    /// The longest free range in one piece, not counting what threads keep.
    pub largest_free_bytes: usize,
    /// The cap on pinned and unpinned bytes.
    pub capacity_bytes: usize,
    /// Segments given out since the pool was built.
    pub checkouts: u64,
    /// Segments that came back.
    pub returns: u64,
    /// Requests that the caller's own cache could not serve, successful or not.
    pub misses: u64,
    /// Times that what threads keep was taken back.
    pub reclaims: u64,
    /// Regions asked of the system because a request found nothing, those that came only in part or not at all among
    /// them.
    pub growths: u64,
    /// Times that pinning ended early.
    pub growth_failures: u64,
    /// Requests that had to wait.
    pub waits: u64,
    /// Waits given up.
    pub timeouts: u64,
    /// Requests waiting now.
    pub waiting: usize,
    /// Plain buffers given out because the pool was short.
    pub unpinned_fallbacks: u64,
    /// Their bytes.
    pub unpinned_fallback_bytes: u64,
    /// Checkouts that ended with an error, by what it means. [`Error::Exhausted`](crate::Error::Exhausted) and
    /// [`Error::Timeout`](crate::Error::Timeout) are matters of the
    /// moment; one that then falls back to plain memory is among them.
    pub errors: ErrorCounts,
}

/// How [`Pool::shutdown`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shutdown {
    /// Whether everything came back.
    pub drained: bool,
    /// Segments that are still out or in flight. Their memory stays for as long as they do.
    pub outstanding: u64,
    /// Bytes never to be reused; their memory stays for good.
    pub quarantined_bytes: usize,
}

/// What [`Pool::check`] found, by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Census {
    /// Bytes of free segments in runs, thread caches and transfer caches (free runs are not cut into segments).
    pub free: usize,
    /// Bytes checked out, or completed and waiting for their handle.
    pub checked_out: usize,
    /// Bytes in flight.
    pub in_flight: usize,
    /// Of these, claimed.
    pub claimed: usize,
    /// Bytes quarantined.
    pub quarantined: usize,
}

impl Pool {
    /// Bytes and counts, reserves included. Costs a few microseconds, and nothing to those who check out. In the child
    /// of a fork only what is counted without a lock: requests and errors.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.stats_of(|central| central.snapshot())
    }

    /// The same of snapshots of the central pools that the caller takes, one of each.
    pub(crate) fn stats_of(&self, mut snapshot: impl FnMut(&CentralPool) -> CentralSnapshot) -> PoolStats {
        let mut stats = PoolStats {
            misses: self.0.misses.load(Ordering::Relaxed),
            unpinned_fallbacks: self.0.fallbacks.load(Ordering::Relaxed),
            unpinned_fallback_bytes: self.0.fallback_bytes.load(Ordering::Relaxed),
            errors: self.0.errors.read(),
            ..PoolStats::default()
        };
        for store in self.stores().filter(|_| !crate::os::forked()) {
            let (in_flight, claimed, _) = self.flight(store);
            let s = snapshot(&store.central);
            let in_flight = in_flight.min(s.out);
            stats.pinned_bytes += s.total - s.unpinned;
            stats.unpinned_bytes += s.unpinned;
            stats.free_bytes += s.free;
            stats.cached_bytes += s.cached;
            stats.checked_out_bytes += s.out - in_flight;
            stats.in_flight_bytes += in_flight;
            stats.claimed_bytes += claimed.min(in_flight);
            stats.quarantined_bytes += s.quarantined;
            stats.cut_bytes += s.cut;
            stats.requested_bytes += s.requested;
            stats.largest_free_bytes = stats.largest_free_bytes.max(s.largest_free);
            stats.capacity_bytes += store.central.config().capacity;
            stats.checkouts += s.takes;
            stats.returns += s.puts;
            stats.reclaims += s.stats.reclaims;
            stats.growths += s.stats.growths;
            stats.growth_failures += s.stats.growth_failures;
            stats.waits += s.stats.waits;
            stats.timeouts += s.stats.timeouts;
            stats.waiting += s.waiting;
        }
        stats.granted_bytes = stats.checked_out_bytes + stats.in_flight_bytes + stats.quarantined_bytes;
        stats.rounding_bytes = stats.granted_bytes.saturating_sub(stats.requested_bytes);
        stats
    }

    /// Bytes in flight, how many of these are claimed, and a number that changes when anything is submitted or
    /// completes. No number: something is half-way.
    fn flight(&self, store: &Store) -> (usize, usize, Option<u64>) {
        let (mut joint, mut settled) = store.central.joint_bytes();
        let mut left = STATS_READS;
        loop {
            let mut sum = (joint, 0, settled.then_some(0));
            for timeline in self.0.devices.iter().flat_map(|d| d.listing().known()) {
                let (flight, moves) = timeline.flight(store.central.number());
                let moves = sum.2.zip(moves).map(|(a, b): (u64, u64)| a + b);
                sum = (sum.0 + flight.bytes, sum.1 + flight.claimed, moves);
            }
            // What a queue hands on meanwhile would be counted twice, or not at all.
            let before = joint;
            (joint, settled) = store.central.joint_bytes();
            left -= 1;
            if joint == before || left == 0 {
                return sum;
            }
        }
    }

    /// Walks every invariant of the pool: segments inside their extents, aligned, spanning what the rule asks, none
    /// overlapping, each in one state and in as many lists as that state allows, and the accounting. For tests, fuzzing
    /// and trouble: takes milliseconds, and keeps everyone out of their thread caches meanwhile. The sums are compared
    /// only if nobody moves.
    ///
    /// # Errors
    /// The first violation, in words.
    pub fn check(&self) -> Result<Census, String> {
        crate::os::check_fork().map_err(|error| error.to_string())?;
        let mut all = Census::default();
        for store in self.stores() {
            let before = store.central.snapshot();
            let (in_flight, claimed, moves) = self.flight(store);
            let mut census = Census::default();
            store.central.check(|state, bytes| match state {
                None => census.free += bytes,
                Some(state::HOST | state::COMPLETED) => census.checked_out += bytes,
                Some(state::FLIGHT | state::DETACHED) => census.in_flight += bytes,
                Some(state::CLAIMED) => {
                    census.in_flight += bytes;
                    census.claimed += bytes;
                }
                _ => census.quarantined += bytes,
            })?;
            let s = store.central.snapshot();
            if s == before && moves.is_some() && (in_flight, claimed, moves) == self.flight(store) {
                let sum = s.free + s.out + s.quarantined + s.cut;
                if sum != s.total {
                    return Err(format!("the parts sum to {sum} of {}: {s:?}", s.total));
                }
                let counted = (s.out, s.quarantined, in_flight, claimed);
                let found = (
                    census.checked_out + census.in_flight,
                    census.quarantined,
                    census.in_flight,
                    census.claimed,
                );
                if counted != found {
                    return Err(format!(
                        "(out, quarantined, in flight, claimed) are {found:?}, counted as {counted:?}"
                    ));
                }
                if s.total > store.central.config().capacity {
                    return Err(format!(
                        "{} bytes are held of at most {}",
                        s.total,
                        store.central.config().capacity
                    ));
                }
            }
            all.free += census.free;
            all.checked_out += census.checked_out;
            all.in_flight += census.in_flight;
            all.claimed += census.claimed;
            all.quarantined += census.quarantined;
        }
        Ok(all)
    }
}
