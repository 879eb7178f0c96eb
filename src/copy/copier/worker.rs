//! What a thread does that moves chunks.
//!
//! A worker owns a chunk from taking it to the chunk's end. Chunks go through these stages:
//!
//! ```text
//!   up:    take, fill -> Ready -> (slot, permit) -> Copying -> [Spreading] -> end
//!   down:  take -> Ready -> (slot) -> [Collecting -> Ready] -> (permit) -> Copying -> Landed -> end
//! ```
//!
//! Chunks that go through the device ring have the stages in brackets. Chunks of pinned blocks have
//! neither a segment nor `Landed`.
//!
//! Nothing waits in the loop: each round looks at each chunk, lets the spreaders go on, takes
//! another chunk if there is room, and writes the bytes of one that has landed. A worker parks only
//! without chunks, so a sleeping one holds nothing that another needs. Sources, sinks and files may
//! block: a worker that is about to call one owns chunks of that job only. One thread never does.

mod stages;

use std::sync::Arc;
use std::time::{Duration, Instant};

use self::stages::{Owned, Stage, Step};
use super::device_ring::IDLE;
use super::engine::Engine;
use super::job::{End, Job};
use super::types::{Direction, Kind, Priority};
use crate::error::{Error, Result};
use crate::foreign;

/// The most segments of a worker: of bulk jobs, and in all. Bulk chunks may wait for a permit.
const MOST: usize = 3;
const MOST_URGENT: usize = 5;
/// Chunks of a worker at most, those included that have no segment any more.
const MOST_CHUNKS: usize = 16;
/// For how long a worker that has found nothing to do looks again at once.
const SPIN: Duration = Duration::from_micros(200);
/// How long it sleeps between two looks after that.
const PAUSE: Duration = Duration::from_micros(50);
const LONG_PAUSE: Duration = Duration::from_millis(1);

pub(super) struct Worker {
    engine: Arc<Engine>,
    owned: Vec<Owned>,
    /// The worker takes chunks of this kind, and of lesser ones.
    most: Kind,
    /// The direction that it turns to next.
    next: Direction,
}

impl Worker {
    pub(super) fn new(engine: Arc<Engine>, most: Kind) -> Self {
        Self { engine, owned: Vec::new(), most, next: Direction::Up }
    }

    /// Looks at all chunks, takes another one, and drains one. Filling and draining take long, so
    /// the chunks are looked at between the two. Whether anything has changed.
    pub(super) fn round(&mut self) -> bool {
        let mut changed = self.turn();
        if self.take_any() {
            changed = true;
            if self.owned.iter().any(|owned| matches!(owned.stage, Stage::Landed)) {
                self.turn();
            }
        }
        self.drain() || changed
    }

    /// The life of a thread of the copier.
    pub(super) fn serve(&mut self) {
        // Since when nothing has changed.
        let mut still = None;
        loop {
            if self.round() {
                still = None;
            } else if !self.owned.is_empty() || self.engine.scheduler.first(self.next, self.most).is_some() {
                let waited = still.get_or_insert_with(Instant::now).elapsed();
                if waited < SPIN {
                    std::hint::spin_loop();
                    crate::sync::yield_now();
                } else {
                    std::thread::sleep(if waited < 100 * SPIN { PAUSE } else { LONG_PAUSE });
                }
            } else if self.park() {
                return;
            }
        }
    }

    /// A chunk has ended.
    fn end(&self, owned: Owned, end: End) {
        let engine = &self.engine;
        match (owned.staged, owned.buf) {
            (true, buf) => engine.segments.give(buf),
            (false, table) => drop(table),
        }
        // After a failure a copy or a kernel may still use the slot.
        let is_lost = matches!(end, End::Failed(_));
        owned.slot.into_iter().for_each(|slot| engine.ring.give(slot, is_lost));
        engine.counters.lock().chunks += 1;
        // Before a caller can hear of the end: nothing of the pool is in use without work.
        engine.rest();
        owned.job.end(&owned.chunk, end);
    }

    /// Sleeps until there may be work. `true`: there will be none.
    fn park(&mut self) -> bool {
        self.engine.segments.rest();
        let deadline =
            self.engine.ring.rest().and_then(|rest| Instant::now().checked_add(rest.max(IDLE / 8)));
        !self.engine.scheduler.park(deadline, self.most)
    }

    /// Whether the worker may take another chunk of this job.
    fn has_room(&self, job: &Job) -> bool {
        let busy = self.owned.iter().filter(|owned| owned.job.kind != Kind::InPlace).count();
        let segments = if job.of.priority == Priority::Foreground { MOST_URGENT } else { MOST };
        self.owned.len() < MOST_CHUNKS && (job.kind == Kind::InPlace || busy < segments)
    }

    /// Looks at all chunks once.
    fn turn(&mut self) -> bool {
        let mut changed = self.engine.advance();
        let mut n = 0;
        while n < self.owned.len() {
            match self.owned[n].step(&self.engine) {
                Step::Same => n += 1,
                Step::Moved => {
                    changed = true;
                    n += 1;
                }
                Step::Ended(end) => {
                    let owned = self.owned.remove(n);
                    self.end(owned, end);
                    changed = true;
                }
            }
        }
        changed
    }

    // --- taking ----------------------------------------------------------------------------------

    /// Takes the next chunk, alternating between uploads and downloads so that both directions of
    /// the link stay busy. A job that waits until the worker owns less keeps its turn: otherwise
    /// jobs of the other direction might never let it have one.
    fn take_any(&mut self) -> bool {
        let engine = self.engine.clone();
        let first = engine.scheduler.first(self.next, self.most);
        let taken = first.and_then(|first| match self.take(&first) {
            true => Some(first),
            // Else chunks without a segment would go on for ever while the job waits for their end.
            false if self.has_to_wait(&first) => None,
            false => engine.scheduler.first(self.next, Kind::InPlace).filter(|other| self.take(other)),
        });
        taken.is_some_and(|job| {
            self.next = job.of.direction.other();
            true
        })
    }

    /// Takes a chunk of a job, if there is a segment for it or it needs none.
    fn take(&mut self, job: &Arc<Job>) -> bool {
        if !job.may_take() || !self.has_room(job) || self.has_to_wait(job) {
            return false;
        }
        let segments = &self.engine.segments;
        let segment = match job.kind {
            Kind::InPlace => None,
            kind => match segments.take(job.of.priority, kind) {
                Ok(None) => return false,
                Ok(segment) => segment,
                Err(error) => {
                    // With a lost device a pool says that it has nothing, which is not the cause.
                    job.fail(self.engine.device.lost().unwrap_or(error));
                    return true;
                }
            },
        };
        let Some(chunk) = job.take(segment.as_ref().map(|buf| segments.room(buf))) else {
            if segment.is_some() {
                segments.give(segment);
            }
            self.engine.rest();
            return false;
        };
        let mut owned = Owned::new(job.clone(), chunk, segment);
        if job.of.direction == Direction::Up {
            self.leave_to_others(job);
        }
        match survived(|| owned.prepare(&self.engine)) {
            Ok(()) => self.owned.push(owned),
            Err(error) => self.end(owned, End::Failed(error)),
        }
        true
    }

    /// Whether a job's chunk has to wait until others have ended. A call that blocks holds up the
    /// worker's other chunks, so these are of the same job, or read the same file with the same
    /// priority. An owned upload's chunk was filled.
    fn has_to_wait(&self, job: &Arc<Job>) -> bool {
        let blocks = |job: &Job| job.kind == Kind::Blocking;
        let holds_up = |other: &Job| blocks(job) || blocks(other) && other.of.direction == Direction::Down;
        let is_like = |other: &Job| other.file == job.file && other.of.priority == job.of.priority;
        let apart = |other| !Arc::ptr_eq(other, job) && (job.file.is_none() || !is_like(other));
        self.owned.iter().any(|Owned { job: other, .. }| holds_up(other) && apart(other))
    }

    /// Wakes another worker before a call that may block: this one looks for no work for a while.
    fn leave_to_others(&self, job: &Job) {
        if job.kind == Kind::Blocking {
            self.engine.scheduler.poke();
        }
    }

    /// Writes the bytes of one chunk that has landed. Whether there was one.
    fn drain(&mut self) -> bool {
        let Some(n) = self.owned.iter().position(|owned| matches!(owned.stage, Stage::Landed)) else {
            return false;
        };
        self.leave_to_others(&self.owned[n].job);
        let said = survived(|| self.owned[n].drain());
        let owned = self.owned.remove(n);
        self.end(owned, said.into());
        true
    }

    /// Ends all chunks: nothing of them will change any more.
    pub(super) fn abandon(&mut self) {
        for owned in std::mem::take(&mut self.owned) {
            self.end(owned, End::Failed(Error::Timeout(Duration::ZERO.into())));
        }
    }
}

/// Runs a plan's work. A panic there is a mistake of the crate's, and ends the transfer.
pub(super) fn survived<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    foreign::survive("the work of a transfer panicked: the transfer fails", work)
        .unwrap_or(Err(Error::Internal("the work of a transfer panicked")))
}

impl Drop for Worker {
    fn drop(&mut self) {
        // A panic, or the last handle of a copier without threads: returning threads own none.
        self.abandon();
    }
}
