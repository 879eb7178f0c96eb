//! A pool's numbers, and the check of all its invariants.
//!
//! Each number is counted where it happens, and added up here. Bytes in flight are known to the
//! streams' timelines alone, so `stats` reads both, and clamps what moves in between.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Pool;
use crate::central::{CentralPool, CentralSnapshot};
use crate::error::Result;
use crate::freelist::state;
use crate::telemetry::counters::ErrorCounts;

/// A pool's bytes and counts at one moment: [`Pool::stats`].
///
/// `free_bytes + checked_out_bytes + in_flight_bytes + quarantined_bytes + cut_bytes = pinned_bytes
/// + unpinned_bytes`, always. Each part is exact, but for calls under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Bytes that are page-locked.
    pub pinned_bytes: usize,
    /// Bytes of the pool that are not page-locked: refused by the system, or managed memory.
    pub unpinned_bytes: usize,
    /// Bytes that can be checked out.
    pub free_bytes: usize,
    /// The part of the free bytes that is cached for the next checkouts, by or between threads.
    pub cached_bytes: usize,
    /// Bytes of buffers that the program has, rounding included.
    pub checked_out_bytes: usize,
    /// Bytes that a device may still use. A buffer that is shared by `Arc` is not among them: it
    /// counts as checked out until its last owner, program or device, lets go of it.
    pub in_flight_bytes: usize,
    /// The part of the bytes in flight that stream-ready buffers have claimed.
    pub claimed_bytes: usize,
    /// Bytes that are never used again, since the device cannot be shown to be done with them.
    pub quarantined_bytes: usize,
    /// Bytes that lie between segments and that no segment covers.
    pub cut_bytes: usize,
    /// The lengths asked for, of all buffers that are checked out, in flight or quarantined.
    pub requested_bytes: usize,
    /// Bytes given to buffers that are checked out, in flight or quarantined, rounding included.
    pub granted_bytes: usize,
    /// `granted_bytes - requested_bytes`: bytes lost to rounding. (Bytes lost between segments are
    /// [`cut_bytes`](Self::cut_bytes).)
    pub rounding_bytes: usize,
    /// The longest free range in one piece, cached segments left out.
    pub largest_free_bytes: usize,
    /// The cap on pinned and unpinned bytes.
    pub capacity_bytes: usize,
    /// Segments checked out since the pool was built.
    pub checkouts: u64,
    /// Segments that came back since the pool was built.
    pub returns: u64,
    /// Requests that the caller's own cache could not serve, successful or not.
    pub misses: u64,
    /// Times that cached segments were taken back from the threads.
    pub reclaims: u64,
    /// Regions begun because a request found nothing, failed ones included.
    pub growths: u64,
    /// Times that pinning ended before all of a region was pinned.
    pub growth_failures: u64,
    /// Requests that had to wait.
    pub waits: u64,
    /// Waits that were given up at their deadline.
    pub timeouts: u64,
    /// Waits that a dropped future gave up: a client left, or a runtime's own timeout passed.
    pub abandoned: u64,
    /// Requests that wait now.
    pub waiting: usize,
    /// Checkouts that ended with an error, by [class](crate::ErrorClass). Exhaustion and timeouts
    /// are transient.
    pub errors: ErrorCounts,
    /// Checkouts that ended with [`Error::Exhausted`](crate::Error::Exhausted): nothing was free,
    /// and the call did not wait.
    pub exhausted: u64,
    /// Checkouts that ended with [`Error::QueueFull`](crate::Error::QueueFull): as many requests
    /// waited as the pool allows.
    pub queue_full: u64,
    /// Checkouts that ended with [`Error::Impossible`](crate::Error::Impossible): no wait could
    /// help.
    pub impossible: u64,
}

impl Pool {
    /// The pool's bytes by state, and counts. The call takes a few microseconds, and does not slow
    /// down other threads. In the child of a fork it has only misses and errors.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.stats_of(|central| central.snapshot())
    }

    /// [`stats`](Self::stats), made of a snapshot that `snapshot` takes of the central pool.
    pub(crate) fn stats_of(&self, snapshot: impl FnOnce(&CentralPool) -> CentralSnapshot) -> PoolStats {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let [exhausted, queue_full, impossible] = self.0.refused.each_ref().map(read);
        let errors = self.0.errors.read();
        let unlocked = PoolStats {
            misses: read(&self.0.misses),
            errors,
            exhausted,
            queue_full,
            impossible,
            ..PoolStats::default()
        };
        if crate::os::forked() {
            return unlocked;
        }
        let central = self.central();
        let (in_flight, claimed) = self.flight();
        let s = snapshot(central);
        let in_flight_bytes = in_flight.min(s.out);
        let granted_bytes = s.out + s.quarantined;
        PoolStats {
            pinned_bytes: s.total - s.unpinned,
            unpinned_bytes: s.unpinned,
            free_bytes: s.free,
            cached_bytes: s.cached,
            checked_out_bytes: s.out - in_flight_bytes,
            in_flight_bytes,
            claimed_bytes: claimed.min(in_flight_bytes),
            quarantined_bytes: s.quarantined,
            cut_bytes: s.cut,
            requested_bytes: s.requested,
            granted_bytes,
            rounding_bytes: granted_bytes.saturating_sub(s.requested),
            largest_free_bytes: s.largest_free,
            capacity_bytes: central.config().capacity,
            checkouts: s.takes,
            returns: s.puts,
            reclaims: s.stats.reclaims,
            growths: s.stats.growths,
            growth_failures: s.stats.growth_failures,
            waits: s.stats.waits,
            timeouts: s.stats.timeouts,
            abandoned: s.stats.abandoned,
            waiting: s.waiting,
            ..unlocked
        }
    }

    /// Bytes in flight, and how many of these are claimed, from sums that do not depend on the
    /// number of streams.
    fn flight(&self) -> (usize, usize) {
        let (bytes, claimed) = self.central().flight();
        (self.central().unlisted_bytes().0 + bytes, claimed)
    }

    /// [`Pool::flight`], added up from the streams, and a number that changes when a copy is
    /// submitted or completes. `None`: memory that no stream lists is changing.
    fn flight_by_stream(&self) -> Option<(usize, usize, u64)> {
        let (mut bytes, is_stable) = self.central().unlisted_bytes();
        let (mut claimed, mut moves) = (0, 0);
        for timeline in self.0.devices.iter().flat_map(|d| d.listing().known()) {
            let (flying, lent, moved) = timeline.flight(self.central().number());
            (bytes, claimed, moves) = (bytes + flying, claimed + lent, moves + moved);
        }
        is_stable.then_some((bytes, claimed, moves))
    }

    /// Checks every invariant of the pool, for tests, fuzzing and diagnosis: no two segments
    /// overlap; each lies inside its extent, is aligned, spans what its length needs, is in one
    /// state and in as many lists as that state allows; and the bytes by state sum up (if nothing
    /// else uses the pool). The call takes milliseconds; meanwhile no thread uses its cache.
    ///
    /// Returns [`stats`](Self::stats), with the bytes checked out, in flight, claimed and
    /// quarantined summed over the segments themselves. (A buffer whose copy is complete and whose
    /// handle was not waited for yet is checked out.)
    ///
    /// # Errors
    /// The first violation, in words.
    pub fn check(&self) -> Result<PoolStats, String> {
        crate::os::check_fork().map_err(|error| error.to_string())?;
        let central = self.central();
        let (before, by_stream, kept) = (central.snapshot(), self.flight_by_stream(), self.flight());
        let (mut out, mut flying, mut lent, mut quarantined) = (0, 0, 0, 0);
        central.check(|state, bytes| match state {
            None => {}
            Some(state::HOST | state::COMPLETED) => out += bytes,
            Some(state::FLIGHT | state::DETACHED) => flying += bytes,
            Some(state::CLAIMED) => {
                flying += bytes;
                lent += bytes;
            }
            _ => quarantined += bytes,
        })?;
        let s = central.snapshot();
        // Nothing has moved meanwhile: then all of it is of one moment.
        if let Some((in_flight, claimed, _)) =
            by_stream.filter(|sums| s == before && Some(*sums) == self.flight_by_stream())
        {
            let (capacity, sum) = (central.config().capacity, s.free + s.out + s.quarantined + s.cut);
            // Checked out and quarantined, in flight and claimed: as kept, by segments, by streams.
            let kept = (s.out, s.quarantined, kept.0, kept.1);
            let counted = (s.out, s.quarantined, in_flight, claimed);
            let found = (out + flying, quarantined, flying, lent);
            if sum != s.total || s.total > capacity || counted != found || kept != found {
                return Err(format!(
                    "the parts sum to {sum} of {} held, of at most {capacity}; (out, quarantined, in flight, claimed) \
                     are {found:?}, {counted:?} by the streams, and summed up as {kept:?}: {s:?}",
                    s.total
                ));
            }
        }
        Ok(PoolStats {
            checked_out_bytes: out,
            in_flight_bytes: flying,
            claimed_bytes: lent,
            quarantined_bytes: quarantined,
            ..self.stats()
        })
    }
}
