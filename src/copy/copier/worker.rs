//! What a thread does that moves chunks: a thread of the copier, or a caller that waits for its own job.
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
//! block: a worker that is about to call one owns chunks of that job only.
//!
//! A caller that writes the bytes of a download itself is a worker for that time. It writes its `Landed` chunks in order.

mod stages;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::config::Priority;
use super::engine::{Engine, Flight, Kept, Refusal, Then};
use super::job::{Chunk, Direction, End, Job};
use super::layout::ROW;
use super::lent::Lent;
use super::packing::{Content, Host, Packed, Packing, transfer};
use super::ring::{IDLE, Slot, Take};
use super::scheduler::{Takes as _, Woken};
use super::spreader::Entry;
use super::stats::Counters;
use super::way::Way;
use crate::buffer::PinnedBuf;
use crate::error::{Error, Result};
use crate::foreign;
use crate::pool::Checkout;
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
/// Looks without any change after which a stepped device, which has nothing left to step, never will change. After the
/// first of them a thread sleeps between two looks: the reaper, which may be in the middle of asking, needs the time.
const STILL: u32 = 100;
const YIELDS: u32 = 10;

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
    /// Down: the bytes are in the segment, and the worker writes them to where they go, or the caller does.
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
    /// Its segment, if it has one, counts: see [`super::segments`].
    counts: bool,
    stage: Option<Stage>,
}

/// See the module's page.
pub(super) struct Worker<'a> {
    engine: &'a Arc<Engine>,
    owned: Vec<Owned>,
    /// A caller's, in the pool's queue: for its segment that does not count.
    place: Option<Checkout>,
    /// The direction that it turns to next.
    next: Direction,
}

/// What the one worker of a copier without threads owns, while no thread is that worker, and where it turns to next.
#[derive(Default)]
pub(super) struct Holdings(Vec<Owned>, Direction);

/// What to do when nothing has changed.
#[derive(Default)]
struct Pause {
    since: Option<Instant>,
}

impl<'a> Worker<'a> {
    pub(super) fn new(engine: &'a Arc<Engine>) -> Self {
        Self { engine, owned: Vec::new(), place: None, next: Direction::Up }
    }

    /// The one worker of a copier without threads, on whichever thread calls. `None`: another thread is it now.
    pub(super) fn inline(engine: &'a Arc<Engine>) -> Option<Self> {
        let Holdings(owned, next) = engine.inline.lock().take()?;
        Some(Self { engine, owned, place: None, next })
    }

    /// Ends being the one worker.
    fn leave(mut self) {
        self.engine.segments.rest();
        *self.engine.inline.lock() = Some(Holdings(std::mem::take(&mut self.owned), self.next));
    }

    /// Does what can be done without waiting, on a copier without threads. Whether anything has changed.
    pub(super) fn advance(engine: &'a Arc<Engine>) -> bool {
        let Some(mut worker) = Self::inline(engine) else { return false };
        let mut any = false;
        loop {
            let mut changed = worker.turn();
            while worker.take_any() {
                changed = true;
            }
            changed |= worker.drain();
            if !changed {
                worker.leave();
                return any;
            }
            any = true;
        }
    }

    /// Waits until `until` holds of a job, on a copier without threads: its device moves only when it is told to step.
    /// Where nothing is left to step, nothing will change any more, and the job fails.
    pub(super) fn step_until(engine: &'a Arc<Engine>, job: &Job, until: impl Fn(&Job) -> bool) {
        let mut still = 0;
        while !crate::os::forked() && !until(job) {
            let stepped = engine.device.context().driver().stepped().is_some_and(|stepped| stepped.step());
            if Self::advance(engine) || stepped {
                still = 0;
                continue;
            }
            // While another thread is the worker, what it has is unknown.
            still = if engine.inline.lock().is_some() { still + 1 } else { 0 };
            if still > STILL {
                job.fail(Error::Timeout(Duration::ZERO.into()));
                if let Some(mut worker) = Self::inline(engine) {
                    worker.abandon();
                    worker.leave();
                }
            }
            match still > YIELDS {
                true => std::thread::sleep(LONG_PAUSE),
                false => crate::sync::yield_now(),
            }
        }
    }

    /// Looks at all chunks, takes another one, and drains one. Whether anything has changed. To fill and to drain a chunk are
    /// the long steps, so the chunks are looked at between the two.
    fn round(&mut self, take: impl FnOnce(&mut Self) -> bool) -> bool {
        let mut changed = self.turn();
        if take(self) {
            changed = true;
            if self.owned.iter().any(|owned| matches!(owned.stage, Some(Stage::Landed(_)))) {
                self.turn();
            }
        }
        self.drain() | changed
    }

    /// The life of a thread of the copier.
    pub(super) fn serve(&mut self) {
        let mut pause = Pause::default();
        while !crate::os::forked() {
            let changed = self.round(Self::take_any);
            let again = || !self.owned.is_empty() || self.engine.scheduler.has_work();
            if !pause.after(changed, again) && self.park() {
                return;
            }
        }
    }

    /// Moves chunks of this job, on a thread that waits for it, until `until` holds.
    pub(super) fn assist(&mut self, job: &Arc<Job>, until: impl Fn(&Job) -> bool) {
        let mut pause = Pause::default();
        while !crate::os::forked() {
            let changed = self.round(|worker| worker.take(job));
            let again = || !self.owned.is_empty() || job.may_take();
            let wait = || job.wait(Instant::now().checked_add(LONG_PAUSE), &until);
            // What was left was with the copier's threads.
            if !pause.after(changed, again) && wait() {
                return;
            }
        }
    }

    /// Moves chunks of a job, on a thread that waits for it, until there is none for it: a worker that is woken needs longer
    /// to wake than a short copy to arrive, and of a long job one more thread fills or drains chunks. Of chunks that wait for
    /// a slot or a permit it has one at a time, since there may be many such threads.
    pub(super) fn hasten(&mut self, job: &Arc<Job>) {
        let waits = |owned: &Owned| matches!(owned.stage, Some(Stage::Ready(_) | Stage::Collected(..)));
        let mut pause = Pause::default();
        while !crate::os::forked() {
            let changed = self.round(|worker| !worker.owned.iter().any(waits) && worker.take(job));
            if !pause.after(changed, || !self.owned.is_empty()) {
                return;
            }
        }
    }

    /// For a caller that writes a download's bytes: goes on until the chunk with this index has landed, or the job is
    /// over. The chunk's place among those that are owned.
    pub(super) fn pull(&mut self, job: &Arc<Job>, index: usize) -> Option<usize> {
        let mut pause = Pause::default();
        while !crate::os::forked() && !job.is_over() {
            let is_due =
                |owned: &Owned| owned.chunk.index == index && matches!(owned.stage, Some(Stage::Landed(_)));
            if let Some(n) = self.owned.iter().position(is_due) {
                return Some(n);
            }
            let changed = self.round(|worker| worker.take(job));
            pause.after(changed, || true);
        }
        None
    }

    /// A chunk that has landed, and its bytes.
    pub(super) fn landed(&self, n: usize) -> Option<(&Chunk, &[u8])> {
        match &self.owned.get(n)?.stage {
            Some(Stage::Landed(buf)) => Some((&self.owned[n].chunk, buf)),
            _ => None,
        }
    }

    /// A chunk that had landed was written, or could not be.
    pub(super) fn written(&mut self, n: usize, said: Result<()>) {
        let Owned { job, chunk, stage, counts, .. } = self.owned.remove(n);
        if let Some(Stage::Landed(buf)) = stage {
            self.give(buf, counts);
        }
        self.end(&job, &chunk, said.into());
    }

    /// A chunk has ended, and its segment was given back.
    fn end(&self, job: &Job, chunk: &Chunk, end: End) {
        Counters::add(&self.engine.counters.chunks, 1);
        // Before a caller can hear of the end: nothing of the pool is in use without work.
        if !self.engine.scheduler.has_work() {
            self.engine.segments.rest();
        }
        job.end(chunk, end);
    }

    /// Sleeps until there may be work. `true`: there will be none.
    fn park(&mut self) -> bool {
        self.engine.segments.rest();
        let deadline =
            self.engine.ring.rest().and_then(|rest| Instant::now().checked_add(rest.max(IDLE / 8)));
        self.engine.scheduler.park(deadline) == Woken::Closed
    }

    /// A segment that no chunk uses any more.
    fn give(&self, buf: PinnedBuf, counts: bool) {
        if counts { self.engine.segments.give(buf) } else { drop(buf) }
    }

    /// Whether the worker may take another chunk of this job.
    fn has_room(&self, job: &Job) -> bool {
        let busy = self.owned.iter().filter(|owned| owned.chunk.most.is_some()).count();
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
        let scheduler = &self.engine.scheduler;
        let Some(first) = scheduler.first(self.next) else { return false };
        let taken = match self.take(&first) {
            true => Some(first),
            // Chunks that need no segment would go on for ever where the job waits for the worker's own to end.
            false if self.has_to_wait(&first) => None,
            false => scheduler.without_segment(self.next).filter(|other| self.take(other)),
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
        let got = if job.needs_segment { self.segment(job) } else { Ok(None) };
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
        let room = segment.as_ref().map(|(buf, _)| self.engine.segments.room(buf));
        match (job.take(room), segment) {
            (Some(chunk), segment) => self.prepare(job, chunk, segment),
            (None, segment) => {
                match segment {
                    Some((buf, true)) => self.engine.give(buf),
                    other => drop(other),
                }
                return false;
            }
        }
        true
    }

    /// Whether a job's chunk is not to be taken before others have ended. A call that blocks holds up the worker's other
    /// chunks: they are of the same job, or there is none. An upload's chunk that is owned has been filled.
    fn has_to_wait(&self, job: &Arc<Job>) -> bool {
        let blocks = |owned: &Owned| owned.job.may_block && owned.job.direction == Direction::Down;
        self.owned.iter().any(|owned| !Arc::ptr_eq(&owned.job, job) && (job.may_block || blocks(owned)))
    }

    /// A segment for the next chunk, and whether it counts. `None`: not now.
    fn segment(&mut self, job: &Job) -> Result<Option<(PinnedBuf, bool)>> {
        let segments = &self.engine.segments;
        if !job.is_pulled {
            return Ok(segments.take(job.priority)?.map(|buf| (buf, true)));
        }
        if self.owned.iter().any(|owned| !owned.counts) {
            return Ok(segments.take_more(job.priority)?.map(|buf| (buf, true)));
        }
        let got = match &mut self.place {
            Some(place) => segments.look(place),
            None => segments.try_any(),
        };
        match got {
            Ok(None) => _ = self.place.get_or_insert_with(|| segments.ask_pool()),
            _ => self.place = None,
        }
        Ok(got?.map(|buf| (buf, false)))
    }

    /// Lays a chunk out, and fills it.
    fn prepare(&mut self, job: &Arc<Job>, chunk: Chunk, segment: Option<(PinnedBuf, bool)>) {
        let direction = job.direction;
        let (mut buf, mut counts) = segment.map_or((None, false), |(buf, counts)| (Some(buf), counts));
        let mut packing = Packing::new(direction, buf.as_mut().zip(chunk.most));
        if direction == Direction::Up {
            self.may_block(job);
        }
        let prepared = foreign::survive("the work of a transfer panicked: the transfer fails", || {
            // SAFETY: the chunk was taken and is not prepared yet.
            unsafe { job.work() }.prepare(&chunk, &mut packing)
        });
        let content = prepared.unwrap_or(Err(Error::Internal("the work of a transfer panicked")));
        let (stretches, room) = (packing.stretches, self.ring_room(job));
        let laid_out = match (content, buf) {
            (Ok(Content::Packed), Some(mut buf)) => {
                let packed = Packed::in_segment(direction, &mut buf, stretches, room);
                Ok((Host::Segment(buf), packed))
            }
            (content, buf) => {
                // The chunk needs none.
                buf.into_iter().for_each(|buf| self.give(buf, std::mem::take(&mut counts)));
                match content {
                    Ok(Content::Lent(mut packed, lent)) => {
                        packed.choose(room);
                        Ok((Host::Lent(lent), packed))
                    }
                    Ok(Content::Brought(mut brought)) => {
                        counts = brought.counts;
                        let (segment, stretches) = (&mut brought.segment, brought.stretches);
                        let packed = Packed::in_segment(direction, segment, stretches, room);
                        Ok((Host::Segment(brought.segment), packed))
                    }
                    Ok(Content::Packed) => Err(Error::Internal("a chunk has no segment")),
                    Err(error) => Err(error),
                }
            }
        };
        job.prepared();
        match laid_out {
            Ok((host, packed)) => {
                let (job, stage) = (job.clone(), Some(Stage::Ready(host)));
                self.owned.push(Owned { job, chunk, packed, counts, stage });
            }
            Err(error) => job.end(&chunk, End::Failed(error)),
        }
    }

    /// Before a call of this job's work that may block: another worker is to look for what is left, since this one does
    /// not for a while.
    fn may_block(&self, job: &Job) {
        if job.may_block && self.engine.scheduler.has_work() {
            self.engine.scheduler.poke();
        }
    }

    /// Bytes of a slot, for a chunk of this job. 0: it goes without the ring.
    fn ring_room(&self, job: &Job) -> usize {
        // While a call of the program writes such bytes, it may wait for transfers that need the ring, and this worker
        // would have a part of it.
        let may_hold_up = job.direction == Direction::Down && (job.is_pulled || job.may_block);
        if may_hold_up || self.is_slow(job.direction) { 0 } else { self.engine.settings.segment }
    }

    /// Writes the bytes of one chunk that has landed. Whether there was one.
    fn drain(&mut self) -> bool {
        let is_due = |owned: &Owned| matches!(owned.stage, Some(Stage::Landed(_))) && !owned.job.is_pulled;
        let due = self.owned.iter().position(is_due);
        let Some((n, (chunk, bytes))) = due.and_then(|n| Some((n, self.landed(n)?))) else { return false };
        let job = &self.owned[n].job;
        self.may_block(job);
        // SAFETY: the chunk was taken and has not ended.
        let drain = || unsafe { job.work() }.drain(chunk, bytes);
        let said = foreign::survive("the work of a transfer panicked: the transfer fails", drain)
            .unwrap_or(Err(Error::Internal("the work of a transfer panicked")));
        self.written(n, said);
        true
    }

    /// Ends all chunks: nothing of them will change any more.
    fn abandon(&mut self) {
        for Owned { job, chunk, counts, .. } in self.owned.drain(..) {
            if counts {
                self.engine.segments.gone();
            }
            job.end(&chunk, End::Failed(Error::Timeout(Duration::ZERO.into())));
        }
    }
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        if crate::os::forked() {
            std::mem::forget((std::mem::take(&mut self.owned), self.place.take()));
            return;
        }
        // By a panic only: a worker that returns owns no chunk.
        self.abandon();
    }
}

impl Pause {
    /// After a look at everything: rests before the next one, unless something has changed. `false`: there is nothing to
    /// look at `again`.
    fn after(&mut self, changed: bool, again: impl FnOnce() -> bool) -> bool {
        if changed {
            self.since = None;
            return true;
        }
        if !again() {
            return false;
        }
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        if waited < SPIN {
            std::hint::spin_loop();
            crate::sync::yield_now();
        } else {
            std::thread::sleep(if waited < 100 * SPIN { PAUSE } else { LONG_PAUSE });
        }
        true
    }
}
