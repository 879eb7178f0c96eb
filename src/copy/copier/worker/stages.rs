//! A chunk that a worker owns, and what the worker does with it, by stage.

use std::sync::{Arc, OnceLock};

use crate::buffer::PinnedBuf;
use crate::copy::copier::chunk::{Chunk, transfer};
use crate::copy::copier::engine::{Engine, Flight, Then};
use crate::copy::copier::job::{End, Job};
use crate::copy::copier::ring::{Slot, Take};
use crate::copy::copier::spreader::Entry;
use crate::copy::copier::types::{Direction, Kind};
use crate::error::{Error, Result};
use crate::pool::Waiter;
use crate::stream::hold::Retain;
use crate::stream::timeline::Ticket;

type Done = Arc<OnceLock<Result<()>>>;

pub(super) enum Stage {
    /// Filled, or in place: waits for a slot or a permit.
    Ready,
    /// Down: the table is on its way, in the chunk's segment or in one of its own, and the kernel collects the bytes
    /// behind it.
    Collecting(Flight, Done),
    /// Down: the bytes are in the slot, or (without a slot) where they are, and the chunk waits for a permit.
    Collected,
    /// The bytes are on their way. What follows on the device is the engine's, which has the slot now; with `Done` a
    /// kernel spreads them.
    Copying(Flight, Option<Done>),
    /// Up: the kernel spreads the bytes, or will.
    Spreading(Done),
    /// Down: the bytes are in the segment, and the worker writes them to where they go.
    Landed,
    /// The driver has refused a copy. Others that were submitted with it may be in flight: the chunk ends when they are
    /// complete.
    Refused(Ticket, Error),
}

/// What came of a look at a chunk.
pub(super) enum Step {
    Same,
    /// It is in another stage.
    Moved,
    Ended(End),
}

fn failed(error: Error) -> Step {
    Step::Ended(End::Failed(error))
}

/// See the module's page.
pub(super) struct Owned {
    pub(super) job: Arc<Job>,
    pub(super) chunk: Chunk,
    /// It has a segment of the copier's share: this one, but while that is in flight.
    pub(super) staged: bool,
    pub(super) buf: Option<PinnedBuf>,
    pub(super) slot: Option<Slot>,
    pub(super) stage: Stage,
    by_ring: bool,
}

impl Owned {
    pub(super) fn new(job: Arc<Job>, chunk: Chunk, buf: Option<PinnedBuf>) -> Self {
        let (staged, slot, stage) = (buf.is_some(), None, Stage::Ready);
        Self { job, chunk, staged, buf, slot, stage, by_ring: false }
    }

    /// Chooses the way, and fills the segment of an upload.
    pub(super) fn prepare(&mut self, engine: &Engine) -> Result<()> {
        let (job, chunk, direction) = (&self.job, &self.chunk, self.job.direction);
        // While a call of the program writes bytes from the ring, it may wait for transfers that need the ring, and
        // this worker would have a part of it.
        let may_hold_up = direction == Direction::Down && job.kind == Kind::Blocking;
        let may_use_ring = !may_hold_up && !engine.is_slow(direction);
        self.by_ring = may_use_ring && chunk.is_for_ring(engine.settings.segment);
        let Some(buf) = &mut self.buf else { return Ok(()) };
        self.by_ring &= chunk.is_for_ring(buf.capacity());
        if direction == Direction::Up {
            // SAFETY: the chunk was taken and has not ended.
            unsafe { job.plan() }.fill(chunk, buf)?;
        }
        chunk.close(direction, buf, self.by_ring);
        Ok(())
    }

    /// Writes the bytes that have landed to where they go.
    pub(super) fn drain(&self) -> Result<()> {
        let buf = self.buf.as_ref().ok_or(Error::Internal("a chunk has lost its segment"))?;
        // SAFETY: the chunk was taken and has not ended.
        unsafe { self.job.plan() }.drain(&self.chunk, buf)
    }

    /// Moves the chunk on, if it can be.
    pub(super) fn step(&mut self, engine: &Engine) -> Step {
        match &self.stage {
            Stage::Ready | Stage::Collected | Stage::Landed if self.job.is_stopped() => {
                Step::Ended(End::Dropped)
            }
            Stage::Ready => self.ready(engine),
            Stage::Collecting(_, done) => match done.get() {
                None => Step::Same,
                Some(Ok(())) => self.collected(),
                Some(Err(error)) => failed(error.clone()),
            },
            Stage::Collected => self.copy(engine),
            Stage::Copying(flight, _) if flight.is_over() => self.copied(engine),
            Stage::Spreading(done) => match done.get() {
                Some(said) => Step::Ended(said.clone().into()),
                None => Step::Same,
            },
            Stage::Copying(..) | Stage::Landed => Step::Same,
            Stage::Refused(ticket, error) => match ticket.timeline.poll_complete(ticket.seq) {
                Ok(false) => Step::Same,
                Ok(true) | Err(_) => failed(error.clone()),
            },
        }
    }

    fn moved(&mut self, stage: Stage) -> Step {
        self.stage = stage;
        Step::Moved
    }

    /// Sends the chunk off, by way of a slot of the ring or without.
    fn ready(&mut self, engine: &Engine) -> Step {
        let direction = self.job.direction;
        if self.by_ring {
            match engine.ring.take(&engine.device) {
                Take::Full if !engine.is_slow(direction) => return Step::Same,
                Take::Full | Take::None => {}
                Take::Slot(slot) if direction == Direction::Down => return self.collect(engine, slot),
                Take::Slot(slot) => self.slot = Some(slot),
            }
        }
        self.copy(engine)
    }

    /// The table of a chunk in place: in a small segment of its own, which returns by itself.
    fn table(&self, engine: &Engine) -> Option<PinnedBuf> {
        let pool = &engine.segments.pool;
        let mut table = pool.for_copier(self.chunk.table_len().into(), Waiter::Retry).ok()?;
        // SAFETY: checked out with room for the rows; segments start on a multiple of 64.
        unsafe { self.chunk.write_table(table.as_mut_ptr()) };
        Some(table)
    }

    /// Has the bytes of the chunk collected in a slot.
    fn collect(&mut self, engine: &Engine, slot: Slot) -> Step {
        let (at, len) = (self.chunk.table_at(), self.chunk.table_len());
        let Some(spreader) = engine.spreader(Direction::Down) else {
            return failed(Error::Internal("a slot without kernels"));
        };
        let (buf, from) = if self.staged { (self.buf.take(), at) } else { (self.table(engine), 0) };
        let Some(mut buf) = buf else {
            engine.ring.give(slot);
            return self.copy(engine);
        };
        let copy = transfer(Direction::Up, buf.as_mut_ptr().wrapping_add(from), slot.at(at), len);
        let ring = slot.memory.allocation();
        // On the kernel's stream, so that the kernel comes after it. SAFETY: within the segment and the slot.
        let sent = unsafe { engine.submit(spreader.stream(), (Some(buf), None), None, &mut [copy], ring) };
        let (entry, done) = self.entry(&slot);
        self.slot = Some(slot);
        match sent {
            Ok((flight, Ok(()))) => {
                spreader.add(entry);
                self.moved(Stage::Collecting(flight, done))
            }
            Ok((flight, Err(error))) => self.moved(Stage::Refused(flight.ticket, error)),
            Err(error) => {
                self.give_slot(engine);
                failed(error)
            }
        }
    }

    /// Nothing uses the slot, if there is one.
    fn give_slot(&mut self, engine: &Engine) {
        self.slot.take().into_iter().for_each(|slot| engine.ring.give(slot));
    }

    /// The bytes are in the slot. The table's copy comes before the kernel on the same stream, so it is complete.
    fn collected(&mut self) -> Step {
        let Stage::Collecting(flight, _) = std::mem::replace(&mut self.stage, Stage::Collected) else {
            return Step::Same;
        };
        match flight.end() {
            Ok(buf) => {
                self.buf = buf.filter(|_| self.staged);
                Step::Moved
            }
            Err(error) => failed(error),
        }
    }

    /// What a kernel does for the chunk in a slot, which is not given back then.
    fn entry(&self, slot: &Slot) -> (Entry, Done) {
        let done = Done::default();
        let (run, memories, ring) =
            (self.chunk.spread(slot), self.job.memories.clone(), slot.memory.allocation());
        (Entry { run, memories, ring, slot: None, done: done.clone() }, done)
    }

    /// What keeps the chunk's bytes, unless they are in a segment.
    fn lend(&self) -> Result<Option<Vec<Arc<dyn Retain>>>> {
        if self.staged {
            return Ok(None);
        }
        // SAFETY: the chunk was taken and has not ended.
        let lent = unsafe { self.job.plan() }.lend(&self.chunk);
        lent.map(Some).ok_or(Error::Internal("a chunk in place has lost its blocks"))
    }

    /// Submits the copies of the chunk: between the host and the slot, or the places on the device.
    fn copy(&mut self, engine: &Engine) -> Step {
        let (direction, priority, bytes) = (self.job.direction, self.job.priority, self.chunk.bytes);
        let is_up = direction == Direction::Up;
        if !engine.may_send(direction, priority, bytes) {
            self.stage = if is_up { Stage::Ready } else { Stage::Collected };
            if is_up {
                // It has nothing in the slot yet.
                self.give_slot(engine);
            }
            return Step::Same;
        }
        let needs_table = is_up && !self.staged && self.slot.is_some();
        let mut buf = if needs_table { self.table(engine) } else { self.buf.take() };
        if needs_table && buf.is_none() {
            self.give_slot(engine);
        }
        let segment = buf.as_mut().filter(|_| self.staged);
        let segment = segment.map(|buf| (buf.as_mut_ptr(), if is_up { buf.len() } else { self.chunk.data }));
        let mut transfers = self.chunk.transfers(direction, segment, self.slot.as_ref());
        if let (true, Some(table), Some(slot)) = (needs_table, &mut buf, &self.slot) {
            let (place, len) = (slot.at(self.chunk.table_at()), self.chunk.table_len());
            transfers.push(transfer(direction, table.as_mut_ptr(), place, len));
        }
        let mut stats = engine.counters.lock();
        *match self.slot {
            Some(_) => &mut stats.ring_bytes,
            None if self.staged => &mut stats.batch_bytes,
            None => &mut stats.in_place_bytes,
        } += bytes as u64;
        drop(stats);
        let memories: Arc<dyn Retain> = match &self.slot {
            Some(slot) => slot.memory.allocation(),
            None => self.job.memories.clone(),
        };
        let stream = engine.stream(direction, priority);
        let buf = (buf, (!is_up).then_some(self.chunk.data));
        let sent = self.lend().and_then(|lent| {
            // SAFETY: within the segment, or what is lent, as it was laid out, and within the slot or the job's memory.
            unsafe { engine.submit(stream, buf, lent, &mut transfers, memories) }
        });
        match sent {
            Ok((flight, Ok(()))) => {
                let (then, done) = match self.slot.take() {
                    None => (Then::Nothing, None),
                    Some(slot) if !is_up => (Then::Give(slot), None),
                    Some(slot) => {
                        let (entry, done) = self.entry(&slot);
                        (Then::Spread(Entry { slot: Some(slot), ..entry }), Some(done))
                    }
                };
                engine.sent(direction, priority, Some((flight.ticket.clone(), then)));
                self.moved(Stage::Copying(flight, done))
            }
            Ok((flight, Err(error))) => {
                engine.sent(direction, priority, None);
                self.moved(Stage::Refused(flight.ticket, error))
            }
            Err(error) => {
                engine.sent(direction, priority, None);
                self.give_slot(engine);
                failed(error)
            }
        }
    }

    /// The copies of the chunk have ended.
    fn copied(&mut self, engine: &Engine) -> Step {
        let Stage::Copying(flight, done) = std::mem::replace(&mut self.stage, Stage::Landed) else {
            return Step::Same;
        };
        let buf = match flight.end() {
            Ok(buf) => buf.filter(|_| self.staged),
            Err(error) => return failed(error),
        };
        match (self.job.direction, buf) {
            (Direction::Up, buf) => {
                self.staged = false;
                buf.into_iter().for_each(|buf| engine.segments.give(buf));
                done.map_or(Step::Ended(End::Arrived), |done| self.moved(Stage::Spreading(done)))
            }
            (Direction::Down, None) => Step::Ended(End::Arrived),
            (Direction::Down, buf) => {
                self.buf = buf;
                Step::Moved
            }
        }
    }
}
