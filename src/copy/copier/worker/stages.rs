//! A chunk that a worker owns, and what the worker does with it, by stage.

use std::sync::{Arc, OnceLock};

use crate::buffer::PinnedBuf;
use crate::copy::copier::chunk::{Chunk, transfer};
use crate::copy::copier::device_ring::{Slot, Take};
use crate::copy::copier::engine::{Engine, Flight, Sent};
use crate::copy::copier::job::{End, Job};
use crate::copy::copier::route::is_by_ring;
use crate::copy::copier::spreader::Entry;
use crate::copy::copier::types::Direction;
use crate::device::{SpreadRun, Transfer};
use crate::error::{Error, Result};
use crate::pool::Wait;
use crate::stream::hold::Retain;
use crate::stream::timeline::Ticket;

type Done = Arc<OnceLock<Result<()>>>;

pub(super) enum Stage {
    /// Waits for a slot or a permit. The bytes are filled, in place, or collected.
    Ready,
    /// Down: the table is on its way, and the kernel collects the bytes behind it.
    Collecting(Flight, Done),
    /// The bytes are on their way, and the engine has the slot and what follows. With `Done` a
    /// kernel spreads them.
    Copying(Flight, Option<Done>),
    /// Up: the kernel spreads the bytes, or will.
    Spreading(Done),
    /// Down: the bytes are in the segment, and the worker writes them to where they go.
    Landed,
    /// The driver has refused a copy. The chunk ends when the others submitted with it are
    /// complete.
    Refused(Ticket, Error),
}

/// What came of a look at a chunk: it is in the same stage, in another one, or has ended.
pub(super) enum Step {
    Same,
    Moved,
    Ended(End),
}

fn failed(error: Error) -> Step {
    Step::Ended(End::Failed(error))
}

pub(super) struct Owned {
    pub(super) job: Arc<Job>,
    pub(super) chunk: Chunk,
    /// `buf` is a segment of the copier's share, or `None` while that is in flight. If not staged,
    /// `buf` is a small buffer for the table of a chunk in place.
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
        let (job, chunk, direction) = (&self.job, &self.chunk, self.job.of.direction);
        let segment = self.buf.as_ref().map(PinnedBuf::capacity);
        self.by_ring = is_by_ring(chunk, segment, direction, job.kind, engine);
        let Some(buf) = &mut self.buf else { return Ok(()) };
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
            Stage::Ready | Stage::Landed if self.job.is_stopped() => Step::Ended(End::Dropped),
            Stage::Ready => self.ready(engine),
            Stage::Collecting(_, done) => match done.get() {
                None => Step::Same,
                Some(Ok(())) => self.collected(),
                Some(Err(error)) => failed(error.clone()),
            },
            Stage::Copying(flight, _) if flight.is_over() => self.copied(engine),
            Stage::Spreading(done) => done.get().map_or(Step::Same, |said| Step::Ended(said.clone().into())),
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
        let direction = self.job.of.direction;
        if self.by_ring && self.slot.is_none() {
            match engine.ring.take(&engine.device) {
                Take::Full if !engine.is_slow(direction) => return Step::Same,
                Take::Full | Take::None => {}
                Take::Slot(slot) if direction == Direction::Down => return self.collect(engine, slot),
                Take::Slot(slot) => self.slot = Some(slot),
            }
        }
        self.copy(engine)
    }

    /// The copy of the chunk's table to the slot. A chunk in place checks out a small segment for
    /// it now: none is held while waiting for a slot or a permit. `None`: the pool has none.
    fn table(&mut self, engine: &Engine, slot: &Slot) -> Option<Transfer> {
        let (at, len) = (self.chunk.table_at(), self.chunk.table_len());
        if !self.staged {
            let mut table = engine.segments.pool.for_copier(len.into(), Wait::Retry).ok()?;
            // SAFETY: checked out with room for the rows; segments start on a multiple of 64.
            unsafe { self.chunk.write_table(table.as_mut_ptr()) };
            self.buf = Some(table);
        }
        let from = self.buf.as_mut()?.as_mut_ptr().wrapping_add(if self.staged { at } else { 0 });
        Some(transfer(Direction::Up, from, slot.at(at), len))
    }

    /// Has the bytes of the chunk collected in a slot.
    fn collect(&mut self, engine: &Engine, slot: Slot) -> Step {
        let Some(spreader) = engine.spreader(Direction::Down) else {
            return failed(Error::Internal("a slot without kernels"));
        };
        let Some(copy) = self.table(engine, &slot) else {
            engine.ring.give(slot, false);
            return self.copy(engine);
        };
        let (buf, ring) = (self.buf.take(), slot.memory.allocation());
        // On the kernel's stream, ahead of the kernel. SAFETY: within the segment and the slot.
        let sent = unsafe { engine.submit(&spreader.stream, (buf, None), None, &mut [copy], ring) };
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
        self.slot.take().into_iter().for_each(|slot| engine.ring.give(slot, false));
    }

    /// The bytes are in the slot. The table's copy came before the kernel on the same stream.
    fn collected(&mut self) -> Step {
        let Stage::Collecting(flight, _) = std::mem::replace(&mut self.stage, Stage::Ready) else {
            return Step::Same;
        };
        flight.end().map_or_else(failed, |buf| {
            self.buf = buf.filter(|_| self.staged);
            Step::Moved
        })
    }

    /// What a kernel does for the chunk in a slot, which is not given back then.
    fn entry(&self, slot: &Slot) -> (Entry, Done) {
        let (done, memories, table) = (Done::default(), self.job.of.memories.clone(), self.chunk.table_at());
        let run = SpreadRun { packed: slot.at(0), table: slot.at(table), rows: self.chunk.rows as u32 };
        (Entry { run, memories, ring: slot.memory.allocation(), slot: None, done: done.clone() }, done)
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
        let (direction, priority, bytes) = (self.job.of.direction, self.job.of.priority, self.chunk.bytes);
        let is_up = direction == Direction::Up;
        if !engine.may_send(direction, priority, bytes) {
            if is_up {
                // It has nothing in the slot yet.
                self.give_slot(engine);
            }
            return Step::Same;
        }
        let mut table = None;
        if let Some(slot) = self.slot.take_if(|_| is_up && !self.staged) {
            table = self.table(engine, &slot);
            self.slot = Some(slot);
            if table.is_none() {
                self.give_slot(engine);
            }
        }
        let mut buf = self.buf.take();
        let segment = buf.as_mut().filter(|_| self.staged);
        let segment = segment.map(|buf| (buf.as_mut_ptr(), if is_up { buf.len() } else { self.chunk.data }));
        let mut transfers = self.chunk.transfers(direction, segment, self.slot.as_ref());
        transfers.extend(table);
        let mut stats = engine.counters.lock();
        *match self.slot {
            Some(_) => &mut stats.ring_bytes,
            None if self.staged => &mut stats.batch_bytes,
            None => &mut stats.in_place_bytes,
        } += bytes as u64;
        drop(stats);
        let memories: Arc<dyn Retain> = match &self.slot {
            Some(slot) => slot.memory.allocation(),
            None => self.job.of.memories.clone(),
        };
        let stream = engine.stream(direction, priority);
        let buf = (buf, (!is_up).then_some(self.chunk.data));
        let sent = self.lend().and_then(|lent| {
            // SAFETY: as laid out: in the segment or what is lent, and in the slot or the job's
            // memory.
            unsafe { engine.submit(stream, buf, lent, &mut transfers, memories) }
        });
        match sent {
            Ok((flight, Ok(()))) => {
                let (mut slot, mut entry, mut done) = (self.slot.take(), None, None);
                if let Some(slot) = slot.take_if(|_| is_up) {
                    let (spread, when) = self.entry(&slot);
                    (entry, done) = (Some(Entry { slot: Some(slot), ..spread }), Some(when));
                }
                let ticket = flight.ticket.clone();
                engine.sent(direction, Sent { ticket, slot, entry, priority });
                self.moved(Stage::Copying(flight, done))
            }
            Ok((flight, Err(error))) => {
                engine.landed(direction, priority);
                self.moved(Stage::Refused(flight.ticket, error))
            }
            Err(error) => {
                engine.landed(direction, priority);
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
        if self.job.of.direction == Direction::Down && self.staged {
            self.buf = buf;
            return Step::Moved;
        }
        if std::mem::take(&mut self.staged) {
            engine.segments.give(buf);
        }
        done.map_or(Step::Ended(End::Arrived), |done| self.moved(Stage::Spreading(done)))
    }
}
