//! What a thread does that moves chunks: a thread of the copier, or a caller that waits for its own job.
//!
//! A worker owns each of its chunks from the moment in which it takes the chunk to the chunk's end. Chunks go through
//! these stages:
//!
//! ```text
//!   up:    take, fill -> Filled -> (slot, permit) -> Copying -> [Spreading] -> end
//!   down:  take -> Laid -> (slot) -> [Collecting] -> Collected -> (permit) -> Copying -> drain, end
//! ```
//!
//! The stages in brackets are those of chunks that go through the device ring. A worker has at most [`MOST`] segments.
//! A segment whose copy is complete takes the worker's next chunk.
//!
//! Nothing waits in the loop: each turn looks at each chunk, lets the spreaders go on, and takes another chunk if there
//! is room. Only a worker that owns no chunk parks or waits for a segment. So a worker that waits holds nothing that
//! another one needs.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::engine::{Engine, Kept, Then};
use super::job::{Chunk, Direction, End, Job, Needs};
use super::layout::{ROW, Stretch, table_at};
use super::lent::Lent;
use super::packing::{Content, Packed, Packing, Pages, transfer, write_table};
use super::ring::{IDLE, Slot, Take};
use super::scheduler::Woken;
use super::spreader::Entry;
use super::stats::Counters;
use super::way::{Way, way};
use crate::buffer::sealed::Lend;
use crate::buffer::{InFlight, PinnedBuf};
use crate::device::{DevicePtr, SpreadRun, Transfer};
use crate::error::{Error, Result};
use crate::foreign;
use crate::sealed::KEY;
use crate::stream::timeline::{RetainedResource, Ticket};

/// Segments of a worker at most.
const MOST: usize = 3;
/// Chunks of a worker at most, those included that have no segment any more.
const MOST_CHUNKS: usize = 16;
/// For how long a worker that has found nothing to do looks again at once.
const SPIN: Duration = Duration::from_micros(200);
/// How long it sleeps between two looks after that.
const PAUSE: Duration = Duration::from_micros(50);
const LONG_PAUSE: Duration = Duration::from_millis(1);
/// For how long a worker waits for a segment before it looks whether its job still wants one.
const PATIENCE: Duration = Duration::from_millis(10);
/// Looks without any change after which a stepped device, which has nothing left to step, never will change.
const STILL: u32 = 100;

/// A chunk's copy in flight.
enum Flight {
    Segment(InFlight<PinnedBuf>),
    /// With what tells that the buffers are back.
    InPlace(Ticket, Arc<OnceLock<()>>),
}

impl Flight {
    /// Whether it is seen to be complete, or will never be. Asks no driver: the engine does so for all copies.
    fn is_over(&self) -> bool {
        match self {
            Self::Segment(flight) => flight.is_seen_done() != Ok(false),
            Self::InPlace(ticket, back) => match ticket.timeline.is_complete(ticket.seq) {
                // The thread that saw the copies complete gives the buffers back a moment later.
                Ok(complete) => complete && back.get().is_some(),
                Err(_) => true,
            },
        }
    }

    /// After [`is_over`](Self::is_over): how the copy ended, and the segment.
    fn end(self) -> Result<Option<PinnedBuf>> {
        match self {
            Self::Segment(flight) => match flight.is_seen_done()? {
                true => flight.wait().map(Some),
                false => Err(Error::Internal("a copy's end was asked for before it was there")),
            },
            Self::InPlace(ticket, _) => ticket.timeline.is_complete(ticket.seq).map(|_| None),
        }
    }
}

type Done = Arc<OnceLock<Result<()>>>;

enum Stage {
    /// Up: filled, and waits for a slot or a permit.
    Filled(PinnedBuf),
    /// Down: laid out, with the table in the segment, and waits for a slot.
    Laid(PinnedBuf),
    /// Waits for a permit, to be copied from or to where its bytes are.
    InPlace(Vec<Transfer>, Lent),
    /// Pages that wait for a slot or a permit.
    Pages(Pages),
    /// Down: the table of pages is on its way, and the kernel collects the pages behind it.
    CollectingPages { pages: Pages, flight: InFlight<PinnedBuf>, slot: Slot, done: Done },
    /// Down: the pages are in the slot, and wait for a permit.
    CollectedPages { pages: Pages, slot: Slot },
    /// The bytes are on their way. What follows on the device is the engine's; with `done` a kernel spreads them.
    Copying { flight: Flight, done: Option<Done> },
    /// Up: the kernel spreads the bytes, or will.
    Spreading(Done),
    /// Down: the table is on its way, and the kernel collects the bytes behind it.
    Collecting { flight: InFlight<PinnedBuf>, slot: Slot, done: Done },
    /// Down: the bytes are in the slot, or (without a slot) where they are, and the chunk waits for a permit.
    Collected { buf: PinnedBuf, slot: Option<Slot> },
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
    way: Way,
    stage: Option<Stage>,
}

/// What a worker has.
#[derive(Default)]
pub(super) struct Holdings {
    owned: Vec<Owned>,
    /// Segments that no chunk of this worker is in.
    spares: Vec<PinnedBuf>,
    /// Segments of this worker, spare or not.
    segments: usize,
}

/// See the module's page.
pub(super) struct Worker<'a> {
    engine: &'a Arc<Engine>,
    owned: Vec<Owned>,
    spares: Vec<PinnedBuf>,
    segments: usize,
}

/// What to do when nothing has changed.
struct Pause {
    since: Option<Instant>,
}

impl<'a> Worker<'a> {
    pub(super) fn new(engine: &'a Arc<Engine>) -> Self {
        Self { engine, owned: Vec::new(), spares: Vec::new(), segments: 0 }
    }

    /// The one worker of a copier without threads, on whichever thread calls. `None`: another thread is it now.
    pub(super) fn inline(engine: &'a Arc<Engine>) -> Option<Self> {
        let Holdings { owned, spares, segments } = engine.inline.lock().take()?;
        Some(Self { engine, owned, spares, segments })
    }

    /// Ends being the one worker.
    fn leave(mut self) {
        self.give_back();
        let held = Holdings {
            owned: std::mem::take(&mut self.owned),
            spares: Vec::new(),
            segments: std::mem::take(&mut self.segments),
        };
        *self.engine.inline.lock() = Some(held);
    }

    /// Does what can be done without waiting, on a copier without threads. Whether anything has changed.
    pub(super) fn advance(engine: &'a Arc<Engine>) -> bool {
        let Some(mut worker) = Self::inline(engine) else { return false };
        let mut any = false;
        loop {
            let mut changed = worker.turn();
            while worker.has_room() && engine.scheduler.first().is_some_and(|job| worker.take(&job)) {
                changed = true;
            }
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
            still += 1;
            if still > STILL {
                job.fail(Error::Timeout(Duration::ZERO));
                if let Some(mut worker) = Self::inline(engine) {
                    worker.abandon();
                    worker.leave();
                }
            }
            crate::sync::yield_now();
        }
    }

    /// The life of a thread of the copier.
    pub(super) fn serve(&mut self) {
        let mut pause = Pause { since: None };
        while !crate::os::forked() {
            let mut changed = self.turn();
            if self.has_room() {
                if let Some(job) = self.engine.scheduler.first() {
                    changed |= self.take(&job);
                }
            }
            if changed {
                pause.since = None;
            } else if !self.owned.is_empty() || self.engine.scheduler.has_work() {
                pause.rest();
            } else if self.park() {
                return;
            }
        }
    }

    /// Moves chunks of this job, on a thread that waits for it, until `until` holds.
    pub(super) fn assist(&mut self, job: &Arc<Job>, until: impl Fn(&Job) -> bool) {
        let mut pause = Pause { since: None };
        while !crate::os::forked() {
            let mut changed = self.turn();
            if self.has_room() && job.may_take() {
                changed |= self.take(job);
            }
            if changed {
                pause.since = None;
            } else if !self.owned.is_empty() || job.may_take() {
                pause.rest();
            } else if job.wait(Instant::now().checked_add(LONG_PAUSE), &until) {
                // What was left was with the copier's threads.
                return;
            }
        }
    }

    /// Sleeps until there may be work. `true`: there will be none.
    fn park(&mut self) -> bool {
        self.give_back();
        let deadline =
            self.engine.ring.rest().and_then(|rest| Instant::now().checked_add(rest.max(IDLE / 8)));
        self.engine.scheduler.park(deadline) == Woken::Closed
    }

    fn give_back(&mut self) {
        for buf in self.spares.drain(..) {
            drop(buf);
            self.segments -= 1;
            self.engine.segment_gone();
        }
    }

    /// Whether the worker may take another chunk.
    fn has_room(&self) -> bool {
        let busy = self.segments - self.spares.len();
        busy < MOST && self.owned.len() < MOST_CHUNKS
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
            match self.step(n, stage) {
                Step::Same(stage) => {
                    self.owned[n].stage = Some(stage);
                    n += 1;
                }
                Step::Moved(stage) => {
                    self.owned[n].stage = Some(stage);
                    changed = true;
                    n += 1;
                }
                Step::Ended(end) => {
                    let Owned { job, chunk, .. } = self.owned.remove(n);
                    Counters::add(&self.engine.counters.chunks, 1);
                    job.end(&chunk, end);
                    changed = true;
                }
            }
        }
        changed
    }

    /// Moves a chunk on, if it can be.
    fn step(&mut self, n: usize, stage: Stage) -> Step {
        match stage {
            Stage::Filled(buf) => self.send(n, buf),
            Stage::Laid(buf) => self.collect(n, buf),
            Stage::InPlace(transfers, lent) => self.send_in_place(n, transfers, lent),
            Stage::Pages(pages) => self.send_pages(n, pages),
            Stage::CollectingPages { pages, flight, slot, done } => match done.get().cloned() {
                None => Step::Same(Stage::CollectingPages { pages, flight, slot, done }),
                Some(Ok(())) => Step::Moved(Stage::CollectedPages { pages, slot }),
                Some(Err(error)) => {
                    self.engine.ring.lose(slot);
                    Step::Ended(End::Failed(error))
                }
            },
            Stage::CollectedPages { pages, slot } => self.fetch_pages(n, pages, slot),
            Stage::Copying { flight, done } => {
                if !flight.is_over() {
                    return Step::Same(Stage::Copying { flight, done });
                }
                self.copied(n, flight.end(), done)
            }
            Stage::Spreading(done) => match done.get() {
                Some(said) => Step::Ended(said.clone().into()),
                None => Step::Same(Stage::Spreading(done)),
            },
            Stage::Collecting { flight, slot, done } => match done.get().cloned() {
                None => Step::Same(Stage::Collecting { flight, slot, done }),
                // The table's copy comes before the kernel on the same stream, so it is complete.
                Some(Ok(())) => match Flight::Segment(flight).end() {
                    Ok(Some(buf)) => Step::Moved(Stage::Collected { buf, slot: Some(slot) }),
                    other => self.lost(other.err(), Some(slot)),
                },
                Some(Err(error)) => {
                    drop(flight);
                    self.lost(Some(error), Some(slot))
                }
            },
            Stage::Collected { buf, slot } => self.fetch(n, buf, slot),
        }
    }

    /// A chunk has failed with a segment that is not this worker's any more, and perhaps a slot that is still in use.
    fn lost(&mut self, error: Option<Error>, slot: Option<Slot>) -> Step {
        slot.into_iter().for_each(|slot| self.engine.ring.lose(slot));
        self.segments -= 1;
        self.engine.segment_gone();
        Step::Ended(End::Failed(error.unwrap_or(Error::Internal("a chunk has lost its segment"))))
    }

    /// Ends a chunk whose segment no copy uses.
    fn stopped(&mut self, buf: PinnedBuf, slot: Option<Slot>, end: End) -> Step {
        slot.into_iter().for_each(|slot| self.engine.ring.give(slot));
        self.spares.push(buf);
        Step::Ended(end)
    }

    // --- taking ------------------------------------------------------------------------------------------------------

    /// Takes a chunk of a job, if there is a segment for it or it needs none.
    fn take(&mut self, job: &Arc<Job>) -> bool {
        let Some(needs) = job.needs() else { return false };
        let buf = match needs {
            Needs::Nothing => None,
            Needs::Segment | Needs::SegmentIfAny => match self.segment(job, needs) {
                Ok(buf) => buf,
                Err(error) => {
                    job.fail(error);
                    return true;
                }
            },
        };
        // A pinned buffer is copied from where it is only where no worker has a segment that will be free.
        if buf.is_none()
            && (needs == Needs::Segment || needs == Needs::SegmentIfAny && self.engine.has_segments())
        {
            return false;
        }
        let Some(chunk) = job.take(buf.is_some()) else {
            self.spares.extend(buf);
            return false;
        };
        self.prepare(job, chunk, buf);
        true
    }

    /// A segment for the next chunk. `None`: not now.
    fn segment(&mut self, job: &Job, needs: Needs) -> Result<Option<PinnedBuf>> {
        if let Some(buf) = self.spares.pop() {
            return Ok(Some(buf));
        }
        if !self.engine.count_segment() {
            return Ok(None);
        }
        let got = match self.engine.pool.try_checkout(self.engine.request()) {
            // Only a worker that holds no segment waits, as any other request does.
            Err(Error::Exhausted { .. })
                if needs == Needs::Segment
                    && self.segments == 0
                    && self.owned.is_empty()
                    && job.may_take() =>
            {
                let (pool, request) = (&self.engine.pool, self.engine.request());
                match crate::sync::free_to_wait(|| pool.checkout_timeout(request, PATIENCE)) {
                    Err(Error::Timeout(_)) => Ok(None),
                    got => got.map(Some),
                }
            }
            Err(Error::Exhausted { .. }) => Ok(None),
            got => got.map(Some),
        };
        match got {
            Ok(Some(buf)) => {
                self.segments += 1;
                Ok(Some(buf))
            }
            other => {
                self.engine.segment_gone();
                // With a lost device a pool says that it has nothing more to give, which is not the cause.
                other.map_err(|error| self.engine.device.lost().unwrap_or(error))
            }
        }
    }

    /// Lays a chunk out, and fills it.
    fn prepare(&mut self, job: &Arc<Job>, chunk: Chunk, mut buf: Option<PinnedBuf>) {
        let direction = job.direction;
        let mut packing = Packing::new(direction, buf.as_mut().zip(chunk.most));
        let prepared = foreign::call("a source of a transfer panicked: the transfer fails", || {
            // SAFETY: the chunk was taken and is not prepared yet.
            unsafe { job.work() }.prepare(&chunk, &mut packing)
        });
        let content = prepared.unwrap_or(Err(Error::Internal("a source of a transfer panicked")));
        let (stretches, bytes) = packing.shape();
        let ring = self.engine.spreaders.as_ref().is_some_and(|both| !both[direction as usize].is_slow());
        let way = if ring { way(stretches, bytes) } else { Way::Batch };
        let packed = packing.finish(way == Way::Ring);
        job.prepared();
        let stage = match (content, buf) {
            (Ok(Content::Packed), Some(buf)) if direction == Direction::Up => Stage::Filled(buf),
            (Ok(Content::Packed), Some(buf)) => Stage::Laid(buf),
            (Ok(Content::InPlace(transfers, lent)), buf) => {
                self.spares.extend(buf);
                Stage::InPlace(transfers, lent)
            }
            (Ok(Content::Pages(pages)), buf) => {
                self.spares.extend(buf);
                Stage::Pages(pages)
            }
            (content, buf) => {
                self.spares.extend(buf);
                let error = content.err().unwrap_or(Error::Internal("a chunk has no segment"));
                return job.end(&chunk, End::Failed(error));
            }
        };
        self.owned.push(Owned { job: job.clone(), chunk, packed, way, stage: Some(stage) });
    }

    // --- to the device -----------------------------------------------------------------------------------------------

    /// Submits the copy of a filled chunk.
    fn send(&mut self, n: usize, buf: PinnedBuf) -> Step {
        let Owned { job, chunk, packed, way, .. } = &self.owned[n];
        if job.is_stopped() {
            return self.stopped(buf, None, End::Dropped);
        }
        let slot = match way {
            Way::Batch => None,
            Way::Ring => match self.engine.slot() {
                Take::Slot(slot) => Some(slot),
                Take::Full if !self.is_slow(job.direction) => return Step::Same(Stage::Filled(buf)),
                Take::Full | Take::None => None,
            },
        };
        if !self.engine.may_send(Direction::Up) {
            slot.into_iter().for_each(|slot| self.engine.ring.give(slot));
            return Step::Same(Stage::Filled(buf));
        }
        let base = buf.as_ptr();
        let (transfers, kept, counter) = match &slot {
            Some(slot) => {
                let len = table_at(packed.data) + packed.rows * ROW;
                let copy = Transfer::Upload { src: base, dst: slot.at(0), len };
                (vec![copy], Kept::Ring(slot.memory.allocation()), &self.engine.counters.ring)
            }
            None => {
                // SAFETY: within the segment, as the layout has it.
                let src = |offset| unsafe { base.add(offset) };
                let copy = |stretch: &Stretch| Transfer::Upload {
                    src: src(stretch.offset),
                    dst: stretch.place,
                    len: stretch.len,
                };
                let copies = packed.stretches.iter().map(copy).collect();
                (copies, Kept::Job(&job.memories), &self.engine.counters.batch)
            }
        };
        Counters::add(counter, chunk.bytes);
        let stream = self.engine.stream(Direction::Up);
        // SAFETY: within the segment, and within the slot or the job's memory.
        match unsafe { self.engine.submit(stream, buf, &transfers, &kept, None) } {
            Ok(flight) => {
                let (then, done) = self.then_spread(n, slot);
                self.engine.sent(Direction::Up, flight.ticket().map(|ticket| (ticket, then)));
                Step::Moved(Stage::Copying { flight: Flight::Segment(flight), done })
            }
            Err(error) => {
                self.engine.sent(Direction::Up, None);
                self.lost(Some(error), slot)
            }
        }
    }

    /// What follows the copy of an upload's chunk.
    fn then_spread(&self, n: usize, slot: Option<Slot>) -> (Then, Option<Done>) {
        let Some(slot) = slot else { return (Then::Nothing, None) };
        let (Owned { job, packed, .. }, done) = (&self.owned[n], Done::default());
        let entry = Entry {
            run: run(&slot, packed),
            memories: job.memories.clone(),
            ring: slot.memory.allocation(),
            slot: Some(slot),
            done: done.clone(),
        };
        (Then::Spread(entry), Some(done))
    }

    fn send_in_place(&mut self, n: usize, transfers: Vec<Transfer>, lent: Lent) -> Step {
        let Owned { job, chunk, .. } = &self.owned[n];
        if job.is_stopped() {
            // The device never got them.
            return Step::Ended(End::Dropped);
        }
        let direction = job.direction;
        if !self.engine.may_send(direction) {
            return Step::Same(Stage::InPlace(transfers, lent));
        }
        Counters::add(&self.engine.counters.in_place, chunk.bytes);
        let kept = Kept::Job(&job.memories);
        // SAFETY: the buffers are among what is lent, and the device memory is the job's.
        unsafe { self.submit_in_place(direction, &transfers, lent, &kept, Then::Nothing, None) }
    }

    /// Submits copies of memory that is lent, and hands what follows to the engine.
    ///
    /// # Safety
    /// The transfers stay within what is lent and kept.
    unsafe fn submit_in_place(
        &self,
        direction: Direction,
        transfers: &[Transfer],
        lent: Lent,
        kept: &Kept<'_>,
        then: Then,
        done: Option<Done>,
    ) -> Step {
        let (stream, back) = (self.engine.stream(direction), lent.back.clone());
        // SAFETY: the caller's promise.
        match unsafe { self.engine.submit_in_place(stream, transfers, lent, kept) } {
            Ok(ticket) => {
                self.engine.sent(direction, Some((ticket.clone(), then)));
                Step::Moved(Stage::Copying { flight: Flight::InPlace(ticket, back), done })
            }
            Err(error) => {
                self.engine.sent(direction, None);
                match then {
                    Then::Give(slot) | Then::Spread(Entry { slot: Some(slot), .. }) => {
                        self.engine.ring.lose(slot)
                    }
                    Then::Nothing | Then::Spread(_) => {}
                }
                Step::Ended(End::Failed(error))
            }
        }
    }

    // --- pages -------------------------------------------------------------------------------------------------------

    /// Has pages copied to a slot, or collected in one; or copied one by one.
    fn send_pages(&mut self, n: usize, pages: Pages) -> Step {
        let direction = self.owned[n].job.direction;
        let ring = self.engine.spreaders.as_ref().filter(|both| !both[direction as usize].is_slow());
        let wanted = way(pages.stretches.len(), pages.data) == Way::Ring && ring.is_some();
        if self.owned[n].job.is_stopped() {
            return Step::Ended(End::Dropped);
        }
        let rows: usize = pages.stretches.iter().map(|stretch| stretch.rows().count()).sum();
        let slot = if wanted { self.engine.slot() } else { Take::None };
        let slot = match slot {
            Take::Slot(slot) => slot,
            Take::Full if !self.is_slow(direction) => return Step::Same(Stage::Pages(pages)),
            Take::Full | Take::None => {
                return self.send_in_place(n, pages.transfers(direction), pages.lent);
            }
        };
        // The table is in a small segment of its own, which returns by itself.
        let table = match self.engine.pool.try_checkout(rows * ROW) {
            Ok(table) => table,
            Err(_) => {
                self.engine.ring.give(slot);
                return self.send_in_place(n, pages.transfers(direction), pages.lent);
            }
        };
        let at = table_at(pages.data);
        self.owned[n].packed = Packed { data: pages.data, rows, stretches: Vec::new() };
        match direction {
            Direction::Up => self.upload_pages(n, pages, slot, table, at),
            Direction::Down => self.collect_pages(n, pages, slot, table, at),
        }
    }

    fn upload_pages(&mut self, n: usize, pages: Pages, slot: Slot, mut table: PinnedBuf, at: usize) -> Step {
        if !self.engine.may_send(Direction::Up) {
            self.engine.ring.give(slot);
            return Step::Same(Stage::Pages(pages));
        }
        let Owned { chunk, packed, .. } = &self.owned[n];
        let host = table.as_mut_ptr();
        // SAFETY: checked out with room for the rows; segments start on a multiple of 64.
        unsafe { write_table(host, &pages.stretches) };
        let Pages { runs, mut lent, .. } = pages;
        let mut transfers: Vec<Transfer> =
            runs.iter().map(|run| transfer(Direction::Up, run.host, slot.at(run.offset), run.len)).collect();
        transfers.push(transfer(Direction::Up, host, slot.at(at), packed.rows * ROW));
        // Lent with the pages, and not asked for any more.
        lent.retained.push(RetainedResource::of(Lend::lend(&table, KEY)));
        Lend::abandon(table, KEY);
        Counters::add(&self.engine.counters.ring, chunk.bytes);
        let kept = Kept::Ring(slot.memory.allocation());
        let (then, done) = self.then_spread(n, Some(slot));
        // SAFETY: blocks and table are lent, and the device memory is the slot's.
        unsafe { self.submit_in_place(Direction::Up, &transfers, lent, &kept, then, done) }
    }

    fn collect_pages(&mut self, n: usize, pages: Pages, slot: Slot, mut table: PinnedBuf, at: usize) -> Step {
        let Some(both) = &self.engine.spreaders else { return Step::Same(Stage::Pages(pages)) };
        let Owned { job, packed, .. } = &self.owned[n];
        let (spreader, host) = (&both[Direction::Down as usize], table.as_mut_ptr());
        // SAFETY: as in `upload_pages`.
        unsafe { write_table(host, &pages.stretches) };
        let copy = transfer(Direction::Up, host, slot.at(at), packed.rows * ROW);
        let ring = slot.memory.allocation();
        // SAFETY: within the segment and the slot.
        match unsafe {
            self.engine.submit(spreader.stream(), table, &[copy], &Kept::Ring(ring.clone()), None)
        } {
            Ok(flight) => {
                let done = Done::default();
                spreader.add(Entry {
                    run: run(&slot, packed),
                    memories: job.memories.clone(),
                    ring,
                    slot: None,
                    done: done.clone(),
                });
                Step::Moved(Stage::CollectingPages { pages, flight, slot, done })
            }
            Err(error) => {
                self.engine.ring.lose(slot);
                Step::Ended(End::Failed(error))
            }
        }
    }

    fn fetch_pages(&mut self, n: usize, pages: Pages, slot: Slot) -> Step {
        let Owned { job, chunk, .. } = &self.owned[n];
        if job.is_stopped() {
            self.engine.ring.give(slot);
            return Step::Ended(End::Dropped);
        }
        if !self.engine.may_send(Direction::Down) {
            return Step::Same(Stage::CollectedPages { pages, slot });
        }
        let Pages { runs, lent, .. } = pages;
        let down =
            |run: &super::packing::Run| transfer(Direction::Down, run.host, slot.at(run.offset), run.len);
        let transfers: Vec<Transfer> = runs.iter().map(down).collect();
        Counters::add(&self.engine.counters.ring, chunk.bytes);
        let kept = Kept::Ring(slot.memory.allocation());
        // SAFETY: the blocks are lent, and the device memory is the slot's.
        unsafe { self.submit_in_place(Direction::Down, &transfers, lent, &kept, Then::Give(slot), None) }
    }

    /// The copy of a chunk has ended.
    fn copied(&mut self, n: usize, ended: Result<Option<PinnedBuf>>, done: Option<Done>) -> Step {
        let Owned { job, chunk, .. } = &self.owned[n];
        let buf = match ended {
            Ok(buf) => buf,
            Err(error) if chunk.most.is_some() => return self.lost(Some(error), None),
            Err(error) => return Step::Ended(End::Failed(error)),
        };
        match (job.direction, buf) {
            (Direction::Up, buf) => {
                self.spares.extend(buf);
                done.map_or(Step::Ended(End::Arrived), |done| Step::Moved(Stage::Spreading(done)))
            }
            (Direction::Down, None) => Step::Ended(End::Arrived),
            (Direction::Down, Some(buf)) => {
                let drained = if job.is_stopped() {
                    End::Dropped
                } else {
                    // SAFETY: the chunk was taken and has not ended.
                    let drain = || unsafe { job.work() }.drain(chunk, &buf);
                    foreign::call("a target of a transfer panicked: the transfer fails", drain)
                        .unwrap_or(Err(Error::Internal("a target of a transfer panicked")))
                        .into()
                };
                self.stopped(buf, None, drained)
            }
        }
    }

    fn is_slow(&self, direction: Direction) -> bool {
        self.engine.spreaders.as_ref().is_none_or(|both| both[direction as usize].is_slow())
    }

    // --- from the device ---------------------------------------------------------------------------------------------

    /// Has the bytes of a chunk collected in a slot, if it goes that way.
    fn collect(&mut self, n: usize, buf: PinnedBuf) -> Step {
        let Owned { job, packed, way, .. } = &self.owned[n];
        if job.is_stopped() {
            return self.stopped(buf, None, End::Dropped);
        }
        let slot = match way {
            Way::Batch => None,
            Way::Ring => match self.engine.slot() {
                Take::Slot(slot) => Some(slot),
                Take::Full if !self.is_slow(job.direction) => return Step::Same(Stage::Laid(buf)),
                Take::Full | Take::None => None,
            },
        };
        let (Some(slot), Some(both)) = (slot, &self.engine.spreaders) else {
            return Step::Moved(Stage::Collected { buf, slot: None });
        };
        let spreader = &both[Direction::Down as usize];
        let at = table_at(packed.data);
        // SAFETY: within the segment.
        let src = unsafe { buf.as_ptr().add(at) };
        let table = Transfer::Upload { src, dst: slot.at(at), len: packed.rows * ROW };
        let ring = slot.memory.allocation();
        // On the kernel's stream, so that the kernel comes after it. SAFETY: within the segment and the slot.
        let sent =
            unsafe { self.engine.submit(spreader.stream(), buf, &[table], &Kept::Ring(ring.clone()), None) };
        match sent {
            Ok(flight) => {
                let done = Done::default();
                spreader.add(Entry {
                    run: run(&slot, packed),
                    memories: job.memories.clone(),
                    ring,
                    slot: None,
                    done: done.clone(),
                });
                Step::Moved(Stage::Collecting { flight, slot, done })
            }
            Err(error) => self.lost(Some(error), Some(slot)),
        }
    }

    /// Submits the copy of a chunk's bytes into its segment.
    fn fetch(&mut self, n: usize, mut buf: PinnedBuf, slot: Option<Slot>) -> Step {
        let Owned { job, chunk, packed, .. } = &self.owned[n];
        if job.is_stopped() {
            return self.stopped(buf, slot, End::Dropped);
        }
        if !self.engine.may_send(Direction::Down) {
            return Step::Same(Stage::Collected { buf, slot });
        }
        let base = buf.as_mut_ptr();
        let (transfers, kept, counter) = match &slot {
            Some(slot) => {
                let copy = Transfer::Download { src: slot.at(0), dst: base, len: packed.data };
                (vec![copy], Kept::Ring(slot.memory.allocation()), &self.engine.counters.ring)
            }
            None => {
                // SAFETY: within the segment, as the layout has it.
                let dst = |offset| unsafe { base.add(offset) };
                let copy = |stretch: &Stretch| Transfer::Download {
                    src: stretch.place,
                    dst: dst(stretch.offset),
                    len: stretch.len,
                };
                let copies = packed.stretches.iter().map(copy).collect();
                (copies, Kept::Job(&job.memories), &self.engine.counters.batch)
            }
        };
        Counters::add(counter, chunk.bytes);
        let (stream, written) = (self.engine.stream(Direction::Down), Some(packed.data));
        // SAFETY: within the segment, and within the slot or the job's memory.
        match unsafe { self.engine.submit(stream, buf, &transfers, &kept, written) } {
            Ok(flight) => {
                let then = slot.map_or(Then::Nothing, Then::Give);
                self.engine.sent(Direction::Down, flight.ticket().map(|ticket| (ticket, then)));
                Step::Moved(Stage::Copying { flight: Flight::Segment(flight), done: None })
            }
            Err(error) => {
                self.engine.sent(Direction::Down, None);
                self.lost(Some(error), slot)
            }
        }
    }

    /// Ends all chunks: nothing of them will change any more.
    fn abandon(&mut self) {
        for Owned { job, chunk, .. } in self.owned.drain(..) {
            job.end(&chunk, End::Failed(Error::Timeout(Duration::ZERO)));
        }
        for _ in self.spares.len()..self.segments {
            self.engine.segment_gone();
        }
        self.segments = self.spares.len();
    }
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        if crate::os::forked() {
            std::mem::forget((std::mem::take(&mut self.owned), std::mem::take(&mut self.spares)));
            return;
        }
        // By a panic only: a worker that returns owns no chunk.
        self.abandon();
        self.give_back();
    }
}

/// The run of a chunk that is in a slot.
fn run(slot: &Slot, packed: &Packed) -> SpreadRun {
    let at = |offset| -> DevicePtr { slot.at(offset) };
    SpreadRun { packed: at(0), table: at(table_at(packed.data)), rows: packed.rows as u32 }
}

impl Pause {
    fn rest(&mut self) {
        let since = *self.since.get_or_insert_with(Instant::now);
        let waited = since.elapsed();
        if waited < SPIN {
            std::hint::spin_loop();
            crate::sync::yield_now();
        } else {
            std::thread::sleep(if waited < 100 * SPIN { PAUSE } else { LONG_PAUSE });
        }
    }
}
