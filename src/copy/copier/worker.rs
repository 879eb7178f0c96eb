//! What a thread does that moves chunks.
//!
//! A worker owns each of its chunks from the moment in which it takes the chunk to the chunk's end. Chunks go through
//! these stages:
//!
//! ```text
//!   up:    take, fill -> Ready -> (slot, permit) -> Copying -> [Spreading] -> end
//!   down:  take -> Ready -> (slot) -> [Collecting] -> Collected -> (permit) -> Copying -> Landed -> end
//! ```
//!
//! The stages in brackets are those of chunks that go through the device ring. A worker has at most [`MOST`] segments.
//! Pinned blocks of the program's go the same way, without a segment: the device reads or writes them where they are, and
//! no CPU moves their bytes. Their chunks have no `Landed`.
//!
//! Nothing waits in the loop: each round looks at each chunk, lets the spreaders go on, takes another chunk if there is
//! room, and writes the bytes of one chunk that has landed. To fill a chunk and to write one take as long as several
//! copies, and the link would be idle for so long if the worker had not submitted all that it can before. Only a worker
//! that owns no chunk parks. So a worker that sleeps holds nothing that another one needs. Sources, sinks and files may
//! block: a worker that is about to call one owns chunks of that job only. One thread never does, and is free for the
//! other jobs.

mod stages;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::chunk::{Chunk, ROW};
use super::engine::{Engine, Flight, Refusal, Then};
use super::job::{End, Job};
use super::lent::Lent;
use super::packing::{Host, Packed, Way, transfer};
use super::ring::{IDLE, Slot, Take};
use super::spreader::Entry;
use super::stats::count;
use super::types::{Direction, Priority};
use crate::buffer::PinnedBuf;
use crate::error::{Error, Result};
use crate::foreign;
use crate::stream::hold::Retain;
use crate::stream::timeline::Ticket;

/// Segments of a worker at most: of bulk jobs, and in all. Bulk chunks may wait for a permit, or for a stream that waits.
const MOST: usize = 3;
const MOST_URGENT: usize = 5;
/// Chunks of a worker at most, those included that have no segment any more.
const MOST_CHUNKS: usize = 16;
/// For how long a worker that has found nothing to do looks again at once.
const SPIN: Duration = Duration::from_micros(200);
/// How long it sleeps between two looks after that.
const PAUSE: Duration = Duration::from_micros(50);
const LONG_PAUSE: Duration = Duration::from_millis(1);

type Done = Arc<OnceLock<Result<()>>>;

enum Stage {
    /// Filled, or laid out: waits for a slot or a permit.
    Ready(Host),
    /// Down: the table is on its way, and the kernel collects the bytes behind it. `flight`: the table, in the chunk's
    /// segment or (with `lent`) in one of its own.
    Collecting { flight: Flight, lent: Option<Lent>, slot: Slot, done: Done },
    /// Down: the bytes are in the slot, or (without a slot) where they are, and the chunk waits for a permit.
    Collected(Host, Option<Slot>),
    /// The bytes are on their way. What follows on the device is the engine's; with `done` a kernel spreads them.
    Copying { flight: Flight, done: Option<Done> },
    /// Up: the kernel spreads the bytes, or will.
    Spreading(Done),
    /// Down: the bytes are in the segment, and the worker writes them to where they go.
    Landed(PinnedBuf),
    /// The driver has refused a copy. Others that were submitted with it may be in flight: the chunk ends when they are
    /// complete.
    Refused { ticket: Ticket, error: Error, slot: Option<Slot> },
}

/// What came of a look at a chunk.
enum Step {
    /// Nothing has changed.
    Same(Stage),
    /// It is in another stage.
    Moved(Stage),
    Ended(End),
}

/// A chunk that a worker owns.
struct Owned {
    job: Arc<Job>,
    chunk: Chunk,
    packed: Packed,
    /// It has a segment of the copier's share.
    staged: bool,
    stage: Option<Stage>,
}

/// See the module's page.
pub(super) struct Worker {
    engine: Arc<Engine>,
    owned: Vec<Owned>,
    /// It takes chunks of jobs that may block, too.
    may_block: bool,
    /// The direction that it turns to next.
    next: Direction,
}

impl Worker {
    pub(super) fn new(engine: Arc<Engine>, may_block: bool) -> Self {
        Self { engine, owned: Vec::new(), may_block, next: Direction::Up }
    }

    /// Looks at all chunks, takes another one, and drains one. Whether anything has changed. To fill and to drain a chunk are
    /// the long steps, so the chunks are looked at between the two.
    pub(super) fn round(&mut self) -> bool {
        let mut changed = self.turn();
        if self.take_any() {
            changed = true;
            if self.owned.iter().any(|owned| matches!(owned.stage, Some(Stage::Landed(_)))) {
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
            } else if !self.owned.is_empty() || self.engine.scheduler.has_work(self.may_block) {
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

    /// A chunk has ended, and its segment was given back.
    fn end(&self, job: &Job, chunk: &Chunk, end: End) {
        count(&self.engine.counters, |stats| stats.chunks += 1);
        // Before a caller can hear of the end: nothing of the pool is in use without work.
        self.engine.rest();
        job.end(chunk, end);
    }

    /// Sleeps until there may be work. `true`: there will be none.
    fn park(&mut self) -> bool {
        self.engine.segments.rest();
        let deadline =
            self.engine.ring.rest().and_then(|rest| Instant::now().checked_add(rest.max(IDLE / 8)));
        !self.engine.scheduler.park(deadline, self.may_block)
    }

    /// Whether the worker may take another chunk of this job.
    fn has_room(&self, job: &Job) -> bool {
        let busy = self.owned.iter().filter(|owned| owned.job.needs_segment).count();
        let segments = if job.priority == Priority::Foreground { MOST_URGENT } else { MOST };
        self.owned.len() < MOST_CHUNKS && (!job.needs_segment || busy < segments)
    }

    /// Looks at all chunks once.
    fn turn(&mut self) -> bool {
        let mut changed = self.engine.advance();
        let mut n = 0;
        while n < self.owned.len() {
            let Some(stage) = self.owned[n].stage.take() else {
                self.owned.remove(n);
                continue;
            };
            let (stage, moved) = match self.step(n, stage) {
                Step::Same(stage) => (stage, false),
                Step::Moved(stage) => (stage, true),
                Step::Ended(end) => {
                    let Owned { job, chunk, .. } = self.owned.remove(n);
                    self.end(&job, &chunk, end);
                    changed = true;
                    continue;
                }
            };
            self.owned[n].stage = Some(stage);
            changed |= moved;
            n += 1;
        }
        changed
    }

    // --- taking ------------------------------------------------------------------------------------------------------

    /// Takes a chunk of the first job of which one can be taken, by turns of one direction and the other, so that both
    /// directions of the link are busy. A job that has to wait until the worker owns less keeps its turn meanwhile: else
    /// those of the other direction might never let it have one.
    fn take_any(&mut self) -> bool {
        let engine = self.engine.clone();
        let Some(first) = engine.scheduler.first(self.next, self.may_block) else { return false };
        let taken = match self.take(&first) {
            true => Some(first),
            // Chunks that need no segment would go on for ever where the job waits for the worker's own to end.
            false if self.has_to_wait(&first) => None,
            false => engine.scheduler.without_segment(self.next).filter(|other| self.take(other)),
        };
        let Some(job) = taken else { return false };
        self.next = job.direction.other();
        true
    }

    /// Takes a chunk of a job, if there is a segment for it or it needs none.
    fn take(&mut self, job: &Arc<Job>) -> bool {
        if !job.may_take() || !self.has_room(job) || self.has_to_wait(job) {
            return false;
        }
        let segments = &self.engine.segments;
        let got = if job.needs_segment { segments.take(job.priority, job.may_block) } else { Ok(None) };
        let segment = match got {
            Ok(segment) => segment,
            Err(error) => {
                // With a lost device a pool says that it has nothing more to give, which is not the cause.
                job.fail(self.engine.device.lost().unwrap_or(error));
                return true;
            }
        };
        if segment.is_none() && job.needs_segment {
            return false;
        }
        let Some(chunk) = job.take(segment.as_ref().map(|buf| segments.room(buf))) else {
            segment.into_iter().for_each(|buf| segments.give(buf));
            self.engine.rest();
            return false;
        };
        self.prepare(job, chunk, segment);
        true
    }

    /// Whether a job's chunk is not to be taken before others have ended. A call that blocks holds up the worker's other
    /// chunks: they are of the same job, or there is none. An upload's chunk that is owned has been filled.
    fn has_to_wait(&self, job: &Arc<Job>) -> bool {
        let blocks = |owned: &Owned| owned.job.may_block && owned.job.direction == Direction::Down;
        self.owned.iter().any(|owned| !Arc::ptr_eq(&owned.job, job) && (job.may_block || blocks(owned)))
    }

    /// Lays a chunk out, and fills it.
    fn prepare(&mut self, job: &Arc<Job>, mut chunk: Chunk, mut segment: Option<PinnedBuf>) {
        let (direction, room) = (job.direction, self.ring_room(job));
        if direction == Direction::Up {
            self.leave_to_others(job);
        }
        let prepared = survived(|| {
            // SAFETY: the chunk was taken and has not ended.
            let plan = unsafe { job.plan() };
            match &mut segment {
                Some(segment) if direction == Direction::Up => plan.fill(&chunk, segment).map(|()| None),
                Some(_) => Ok(None),
                None => Ok(plan.lend(&chunk)),
            }
        });
        let laid_out = match (prepared, segment) {
            (Ok(None), Some(mut buf)) => {
                let stretches = std::mem::take(&mut chunk.stretches);
                let packed = Packed::in_segment(direction, &mut buf, stretches, room);
                Ok((Host::Segment(buf), packed))
            }
            (Ok(Some((mut packed, lent))), None) => {
                packed.choose(room);
                Ok((Host::Lent(lent), packed))
            }
            (prepared, segment) => {
                segment.into_iter().for_each(|buf| self.engine.segments.give(buf));
                Err(prepared.err().unwrap_or(Error::Internal("a chunk's bytes are not where its job says")))
            }
        };
        match laid_out {
            Ok((host, packed)) => {
                let (job, staged) = (job.clone(), matches!(host, Host::Segment(_)));
                self.owned.push(Owned { job, chunk, packed, staged, stage: Some(Stage::Ready(host)) });
            }
            Err(error) => {
                self.engine.rest();
                job.end(&chunk, End::Failed(error));
            }
        }
    }

    /// Before a call of this job's work that may block: another worker is to look for what is left, since this one does
    /// not for a while.
    fn leave_to_others(&self, job: &Job) {
        if job.may_block && self.engine.scheduler.has_work(true) {
            self.engine.scheduler.poke();
        }
    }

    /// Bytes of a slot, for a chunk of this job. 0: it goes without the ring.
    fn ring_room(&self, job: &Job) -> usize {
        // While a call of the program writes such bytes, it may wait for transfers that need the ring, and this worker
        // would have a part of it.
        let may_hold_up = job.direction == Direction::Down && job.may_block;
        if may_hold_up || self.is_slow(job.direction) { 0 } else { self.engine.settings.segment }
    }

    /// Writes the bytes of one chunk that has landed. Whether there was one.
    fn drain(&mut self) -> bool {
        let is_due = |owned: &Owned| matches!(owned.stage, Some(Stage::Landed(_)));
        let Some(n) = self.owned.iter().position(is_due) else { return false };
        let Owned { job, chunk, stage: Some(Stage::Landed(buf)), .. } = &self.owned[n] else { return false };
        self.leave_to_others(job);
        // SAFETY: the chunk was taken and has not ended.
        let said = survived(|| unsafe { job.plan() }.drain(chunk, buf));
        let Owned { job, chunk, stage, .. } = self.owned.remove(n);
        if let Some(Stage::Landed(buf)) = stage {
            self.engine.segments.give(buf);
        }
        self.end(&job, &chunk, said.into());
        true
    }

    /// Ends all chunks: nothing of them will change any more.
    pub(super) fn abandon(&mut self) {
        for Owned { job, chunk, staged, .. } in self.owned.drain(..) {
            if staged {
                self.engine.segments.gone();
            }
            job.end(&chunk, End::Failed(Error::Timeout(Duration::ZERO.into())));
        }
    }
}

/// Runs a plan's work. A panic there is a mistake of the crate's, and ends the transfer.
fn survived<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    foreign::survive("the work of a transfer panicked: the transfer fails", work)
        .unwrap_or(Err(Error::Internal("the work of a transfer panicked")))
}

impl Drop for Worker {
    fn drop(&mut self) {
        // By a panic, or with the last handle of a copier without threads: a thread that returns owns no chunk.
        self.abandon();
    }
}
