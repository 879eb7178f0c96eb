//! A flow: all copies of a queue in one direction, which go through one stream.
//!
//! # From push to landing
//!
//! ```text
//!   push            lanes[t].queue     any thread: under the lane's lock, which is its own
//!   submit          a batch            whoever has the role: one call to the driver, one entry, one mark
//!   land            landed, words      whoever sees the mark complete: waiting threads, the reaper, the idle submitter
//! ```
//!
//! # Who submits
//!
//! Under load the queue's thread, so that pushing costs no driver call. It stays awake for a while after the last copy,
//! and then sleeps. A copy that is pushed while it sleeps, with next to nothing in flight, is submitted by the thread
//! that pushes it: waking another would take ten times as long. Where nothing else is to be submitted it goes to the
//! driver as it is, past lists and queues. From the [`DIRECT`]th batch in flight on the thread is woken all the same,
//! since then there is load.
//!
//! # Batches
//!
//! What has come in is submitted, and nothing is waited for: under load batches grow by themselves, since more comes in
//! while one is submitted. Within a batch there is no order, so it ends before the first copy that writes where another
//! of the batch writes. (In the other direction nothing can overlap: device memory is only read, and what is written to
//! is each copy's own.) And it ends after so many bytes: to the device the driver is fastest with batches of 64 pieces
//! of 16 KiB, and a mark is to come soon behind large ones.
//!
//! A stream gets its batches from one flow alone. (One thread that calls the driver for two streams by turns gets a
//! tenth of the rate to the device, whatever the batches: measured on an H200, driver 580.)
//!
//! # Errors
//!
//! A copy that the driver refuses fails alone, and its memory is in flight like the others' until the batch's mark is
//! complete. Where the timeline takes nothing any more (the device is dead, the stream lost) each lane is lost with
//! that error: what was not submitted is let go at once, what is in flight is quarantined with the timeline.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam::utils::CachePadded;

use super::bell::{Bell, Held, Role};
use super::lane::{Booked, Changes, Filled, Lane, Next, Piece};
use super::may_wait;
use super::overlap::Overlap;
use crate::central::Wake;
use crate::device::Transfer;
use crate::device::memory::Allocation;
use crate::error::{Error, Result};
use crate::foreign;
use crate::stream::awaited::Range;
use crate::stream::timeline::{
    Quarantined, Resource, Retain, RetainedResource, SPIN, Stillness, Timeline, Upstream,
};
use crate::sync::{AtomicBool, AtomicU32, Mutex, Ordering, thread, yield_now};

/// Copies of a batch at most. (With more than 256 the driver becomes slower again.)
const MOST: usize = 256;
/// Bytes after which a batch ends; and after which one to the device ends that has as many copies as it takes.
const MOST_BYTES: usize = 4 << 20;
const ENOUGH: (usize, usize) = (64, 1 << 20);
/// Copies of one lane that a batch takes before it looks at the next lane, unless they are rows of a rectangle.
const TURN: usize = 64;
/// Batches in flight up to which a pushing thread submits by itself, while the queue's thread sleeps.
const DIRECT: u32 = 4;
/// Between two questions while several batches are in flight.
const PAUSE: Duration = Duration::from_micros(5);
/// Emptied lists that are kept for the next batches.
const SPARE: usize = 16;

/// What the submitter works with. Taken out while the role is held.
#[derive(Debug, Default)]
struct Desk {
    /// For each lane what was taken out of it and is not submitted.
    taken: Vec<VecDeque<Piece>>,
    /// Which of these there are.
    rest: u64,
    /// The lane that is first next time.
    next: usize,
    transfers: Vec<Transfer>,
    runs: Vec<Run>,
    overlap: Overlap,
}

/// Neighbours of a batch that are of one lane: their numbers follow each other.
#[derive(Clone, Copy, Debug)]
struct Run {
    lane: u32,
    first: u64,
    /// Place in the batch.
    at: usize,
    len: usize,
}

/// See the module's page.
#[derive(Debug)]
pub(super) struct Flow {
    timeline: Arc<Timeline>,
    lanes: Box<[CachePadded<Lane>]>,
    filled: CachePadded<Filled>,
    depth: u64,
    /// Whether copies of it can be in each other's way.
    writes: bool,
    role: CachePadded<Role>,
    desk: Mutex<Desk>,
    /// Something that was taken out of a lane is not submitted yet. Changed by who has the role.
    left: AtomicBool,
    /// More came in than went out when somebody looked last: who can push elsewhere may do so.
    pressed: CachePadded<AtomicBool>,
    /// Batches submitted and not landed.
    flying: CachePadded<AtomicU32>,
    spare: Mutex<Vec<Vec<Piece>>>,
    /// When somebody may ask again what is done, in ns from `since`. (Not loom's: it may be missed or doubled.)
    asked: std::sync::atomic::AtomicU64,
    since: Instant,
    /// Submitted so far. (Not loom's: sums, no signals.)
    batches: std::sync::atomic::AtomicU64,
    copies: std::sync::atomic::AtomicU64,
    bell: Arc<Bell>,
    changes: Changes,
}

impl Upstream for Flow {
    fn queued(&self, central: u64) -> (usize, Option<u64>) {
        let over = self.changes.over();
        let (mut bytes, mut pushed) = (0, 0);
        for lane in self.lanes() {
            let lane = lane.queued(central);
            (bytes, pushed) = (bytes + lane.0, pushed + lane.1);
        }
        // Last: a change that has begun while the lanes were looked at counts as under way.
        let begun = self.changes.begun();
        (bytes, (begun == over).then_some(begun + pushed))
    }
}

impl Flow {
    pub(super) fn new(
        timeline: Arc<Timeline>,
        lanes: usize,
        depth: u64,
        writes: bool,
        bell: Arc<Bell>,
    ) -> Arc<Self> {
        let feeds = timeline.clone();
        let desk = Desk { taken: (0..lanes).map(|_| VecDeque::new()).collect(), ..Desk::default() };
        let flow = Arc::new(Self {
            timeline,
            lanes: (0..lanes).map(|_| CachePadded::new(Lane::new())).collect(),
            filled: CachePadded::new(Filled::default()),
            depth,
            writes,
            role: CachePadded::new(Role::new()),
            desk: Mutex::new(desk),
            left: AtomicBool::new(false),
            pressed: CachePadded::new(AtomicBool::new(false)),
            flying: CachePadded::new(AtomicU32::new(0)),
            spare: Mutex::new(Vec::new()),
            asked: 0.into(),
            since: Instant::now(),
            batches: 0.into(),
            copies: 0.into(),
            bell,
            changes: Changes::default(),
        });
        let upstream: Weak<Self> = Arc::downgrade(&flow);
        feeds.fed_by(upstream);
        flow
    }

    pub(super) fn timeline(&self) -> &Arc<Timeline> {
        &self.timeline
    }

    pub(super) fn lanes(&self) -> impl Iterator<Item = &Lane> {
        self.lanes.iter().map(|lane| &**lane)
    }

    pub(super) fn lane(&self, lane: u32) -> &Lane {
        &self.lanes[lane as usize]
    }

    /// For who pushes.
    pub(super) fn filled(&self) -> &Filled {
        &self.filled
    }

    pub(super) fn depth(&self) -> u64 {
        self.depth
    }

    /// Batches and copies submitted so far.
    pub(super) fn submitted(&self) -> (u64, u64) {
        let relaxed = std::sync::atomic::Ordering::Relaxed;
        (self.batches.load(relaxed), self.copies.load(relaxed))
    }

    fn is_stepped(&self) -> bool {
        self.timeline.context().driver().stepped().is_some()
    }

    // --- submitting --------------------------------------------------------------------------------------------------

    /// Whether there is anything to submit.
    pub(super) fn is_filled(&self) -> bool {
        self.filled.lanes() != 0 || self.left.load(Ordering::Relaxed)
    }

    /// Whether all is submitted, where nothing is pushed any more. Not while somebody is in the midst of submitting:
    /// what was taken out of the lanes may be left over.
    pub(super) fn is_over(&self) -> bool {
        self.role.try_take().is_some_and(|_held| !self.is_filled())
    }

    /// A lane was filled: sees to it that somebody submits.
    pub(super) fn rouse(self: &Arc<Self>) {
        if !self.bell.is_asleep() {
            return;
        }
        if self.is_stepped() {
            // There is no thread.
            while self.is_filled() && self.submit() {}
            return;
        }
        if self.flying.load(Ordering::Relaxed) < DIRECT {
            // Where the role is not free, whoever has it looks again.
            if !self.submit() || !self.is_filled() {
                return;
            }
        }
        self.bell.ring();
    }

    /// Submits a batch, unless somebody else submits. After this, what is filled must be looked at again.
    pub(super) fn submit(self: &Arc<Self>) -> bool {
        let Some(role) = self.role.try_take() else { return false };
        self.submit_as(&role);
        true
    }

    fn submit_as(self: &Arc<Self>, _role: &Held<'_>) {
        // Taken out, so that no driver call is made under the lock. Whoever has the role is alone with it.
        let mut seat = Seat { flow: self, desk: std::mem::take(&mut *self.desk.lock()) };
        let desk = &mut seat.desk;
        let mut pieces = self.spare.lock().pop().unwrap_or_default();
        let full = {
            let _change = self.changes.begin();
            desk.collect(&self.lanes, &self.filled, self.writes, &mut pieces)
        };
        let is_left = desk.rest | self.filled.lanes() != 0;
        if full && is_left && pieces.len() >= ENOUGH.0 && !self.is_pressed() {
            self.pressed.store(true, Ordering::Relaxed);
        }
        if self.writes && pieces.len() > 1 {
            let keep = desk.overlap.first_in_the_way(&pieces).max(1);
            while pieces.len() > keep {
                let Some(piece) = pieces.pop() else { break };
                desk.rest |= 1 << piece.lane;
                desk.taken[piece.lane as usize].push_front(piece);
            }
        }
        if pieces.is_empty() {
            return;
        }
        let Desk { transfers, runs, .. } = desk;
        transfers.clear();
        transfers.extend(pieces.iter().map(|piece| piece.transfer));
        find_runs(&pieces, runs);
        let booked = booked(&pieces);
        self.hand_over(transfers, runs, Load::Many(pieces, booked));
    }

    /// The right to submit a copy that is in no lane's queue, if no other thread submits, nothing else is to be
    /// submitted, and hardly anything is in flight. After this, what is filled must be looked at again.
    pub(super) fn direct(&self) -> Option<Held<'_>> {
        // Whether the thread sleeps is a hint here: the role decides.
        if !self.bell.seems_asleep() || self.flying.load(Ordering::Relaxed) >= DIRECT {
            return None;
        }
        self.role.try_take().filter(|_| !self.is_filled())
    }

    /// Submits a copy at once, which is the next of its lane: its number.
    pub(super) fn submit_lone(
        self: &Arc<Self>,
        role: Held<'_>,
        next: Next,
        transfer: Transfer,
        resource: Resource,
        memory: Arc<Allocation>,
    ) -> u64 {
        let piece = {
            let _change = self.changes.begin();
            let piece = next.piece(transfer, resource, memory);
            book(&piece.loan, 1);
            piece
        };
        let number = piece.number;
        let run = Run { lane: piece.lane, first: piece.number, at: 0, len: 1 };
        self.hand_over(&[piece.transfer], &[run], Load::One(piece));
        drop(role);
        if self.is_filled() {
            self.rouse();
        }
        number
    }

    /// Hands a batch to the driver.
    fn hand_over(self: &Arc<Self>, transfers: &[Transfer], runs: &[Run], load: Load) {
        let submission = match self.timeline.begin(Resource::Object(Box::new(())), None) {
            Ok(submission) => submission,
            Err((error, _)) => return self.refuse(load, runs, &error),
        };
        self.flying.fetch_add(1, Ordering::Relaxed);
        self.batches.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.copies.fetch_add(transfers.len() as u64, std::sync::atomic::Ordering::Relaxed);
        submission.carry(Box::new(Batch { flow: self.clone(), load: Some(load) }));
        let context = self.timeline.context();
        // Declared after the submission, and so dropped before it: what was not made must not read as complete.
        let unmade = Unmade(self, runs);
        let mut failed = Vec::new();
        // SAFETY: the entry keeps what the copies use until a mark after this call is seen complete, and none of them
        // writes where another one does.
        unsafe {
            context
                .driver()
                .copy_many(self.timeline.stream(), transfers, &mut |at, error| failed.push((at, error)));
        }
        std::mem::forget(unmade);
        let accepted = |&(at, _): &(usize, _)| !failed.iter().any(|(failed, _)| *failed == at);
        context.count_copied(transfers.iter().enumerate().filter(accepted).map(|(_, transfer)| transfer));
        for (at, error) in failed {
            let Err(error) = context.noting::<()>(Err(error)) else { continue };
            if let Some(run) = runs.iter().find(|run| (run.at..run.at + run.len).contains(&at)) {
                self.lanes[run.lane as usize].fail(run.first + (at - run.at) as u64, error);
            }
        }
        submission.commit();
        // One mark a batch.
        self.timeline.close();
        for run in runs.iter() {
            self.lanes[run.lane as usize].sent(run.first + run.len as u64 - 1);
        }
    }

    /// Nothing can be submitted any more, and of these nothing was.
    fn refuse(&self, load: Load, runs: &[Run], error: &Error) {
        if crate::os::forked() {
            // The parent's.
            return std::mem::forget(load);
        }
        let lives = self.timeline.context().poisoned().is_none();
        let _change = self.changes.begin();
        load.unbook();
        // Whoever does this has the role: nobody who is woken may wait here.
        crate::sync::landing(|| {
            load.for_each(|mut piece| {
                if lives {
                    // It may keep the memory of one that was submitted before, and may be queued still: see `lose`.
                    std::mem::forget(piece.memory.take());
                }
                // Should one of them unwind, the lanes are to hear of it all the same.
                _ = foreign::survive(
                    "letting go of a refused copy's buffer panicked: it may be leaked",
                    || piece.loan.complete(),
                );
            });
            for run in runs {
                // Not landed: what was submitted before may be in flight, and is lost with the timeline.
                self.lanes[run.lane as usize].lose(error);
            }
        });
    }

    // --- landing -----------------------------------------------------------------------------------------------------

    /// A batch is out of the device's hands.
    fn land(&self, load: Load) {
        let _change = self.changes.begin();
        // Before any of the segments is settled.
        load.unbook();
        match load {
            Load::One(piece) => self.settle(piece, true),
            Load::Many(mut pieces, _) => {
                let mut left = pieces.drain(..).peekable();
                while let Some(piece) = left.next() {
                    let last = left.peek().is_none_or(|next| next.lane != piece.lane);
                    self.settle(piece, last);
                }
                drop(left);
                let mut spare = self.spare.lock();
                if spare.len() < SPARE {
                    spare.push(pieces);
                }
            }
        }
        self.flying.fetch_sub(1, Ordering::Relaxed);
    }

    /// The same for one of its copies; `last`: of its lane's.
    fn settle(&self, piece: Piece, last: bool) {
        let Piece { loan, memory, number, lane, .. } = piece;
        let lane = &self.lanes[lane as usize];
        if loan.complete() {
            lane.leave(&Range { first: number, last: number }, false);
        }
        drop(memory);
        // The words first: whoever sees the number finds them settled.
        if last {
            lane.land(number);
        }
    }

    /// Nobody will ever know whether a batch is. What that takes out of use.
    fn lose(&self, load: Load) -> Quarantined {
        let _change = self.changes.begin();
        load.unbook();
        let context = self.timeline.context();
        let error = self.timeline.usable().err().unwrap_or(Error::QueueClosed);
        let runs = load.runs();
        let mut lost = Vec::new();
        load.for_each(|mut piece| {
            let memory = piece.memory.take();
            if context.poisoned().is_none() {
                // The copy may still be queued, and the device may die of finding the memory freed.
                std::mem::forget(memory);
            }
            lost.push(piece.loan.quarantine());
        });
        let gone = lost.into_iter().sum();
        runs.iter().for_each(|run| self.lanes[run.lane as usize].lose(&error));
        self.flying.fetch_sub(1, Ordering::Relaxed);
        gone
    }

    /// Has a look at what is in flight.
    pub(super) fn look(self: &Arc<Self>) {
        if self.is_stepped() {
            self.rouse();
            self.timeline.advance(true);
        } else {
            self.ask();
        }
    }

    /// Asks what is done, unless somebody did just now. Each question is a call to the driver, which keeps the one up
    /// that submits; while several batches are in flight none will be done in the next microsecond.
    fn ask(&self) {
        if self.flying.load(Ordering::Relaxed) > 1 {
            let now = self.since.elapsed().as_nanos() as u64;
            let due = self.asked.load(std::sync::atomic::Ordering::Relaxed);
            if now < due {
                return;
            }
            self.asked.store(now + PAUSE.as_nanos() as u64, std::sync::atomic::Ordering::Relaxed);
        }
        self.timeline.ask();
    }

    /// Whether more comes in than goes out.
    pub(super) fn is_pressed(&self) -> bool {
        // Relaxed: a hint.
        self.pressed.load(Ordering::Relaxed)
    }

    /// Nothing is left to be submitted.
    pub(super) fn relax(&self) {
        if self.is_pressed() {
            self.pressed.store(false, Ordering::Relaxed);
        }
    }

    /// Whether anything is in flight.
    pub(super) fn is_flying(&self) -> bool {
        self.flying.load(Ordering::Relaxed) > 0
    }

    // --- waiting -----------------------------------------------------------------------------------------------------

    /// Waits until all of a lane's up to the range's end are done.
    pub(super) fn wait(
        self: &Arc<Self>,
        lane: &Lane,
        range: &Range,
        deadline: Option<Instant>,
    ) -> Result<()> {
        crate::os::check_fork()?;
        if lane.verdict(range)? {
            return Ok(());
        }
        if !may_wait() {
            // It would wait for itself.
            return Err(Error::Unsupported(
                "a wait for a copy from a waker, which runs on a thread that finds out what is done; wake a task or thread of \
                 your own, and wait there"
                    .into(),
            ));
        }
        let since = Instant::now();
        if let Some(stepped) = self.timeline.context().driver().stepped() {
            let is_busy = || self.role.is_taken() || self.timeline.is_busy();
            let is_late = || deadline.is_some_and(|deadline| Instant::now() >= deadline);
            let mut still = Stillness::default();
            loop {
                let busy = is_busy();
                self.look();
                let busy = busy | is_busy();
                if lane.verdict(range)? {
                    return Ok(());
                }
                if stepped.step() {
                    still.stepped();
                } else if still.is_final(busy) || busy && is_late() {
                    return Err(Error::Timeout(since.elapsed().into()));
                }
            }
        }
        while since.elapsed() < SPIN {
            self.ask();
            if lane.verdict(range)? {
                return Ok(());
            }
            std::hint::spin_loop();
            yield_now();
        }
        loop {
            if let Some(key) = lane.lie_down(range.last, Wake::Thread(thread::current())) {
                self.timeline.expedite();
                thread::park_until(deadline);
                lane.get_up(key);
            }
            if lane.verdict(range)? {
                return Ok(());
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(Error::Timeout(since.elapsed().into()));
            }
        }
    }
}

/// Whether the last copies of what is before, `first` and then `second`, and the next copy are at even distances.
fn are_rows(first: Option<&Piece>, second: &Piece, next: &Piece) -> bool {
    let Some(first) = first else { return false };
    let distance = first.transfer.distance(&second.transfer);
    distance.is_some() && distance == second.transfer.distance(&next.transfer)
}

fn find_runs(pieces: &[Piece], runs: &mut Vec<Run>) {
    runs.clear();
    for (at, piece) in pieces.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if run.lane == piece.lane => run.len += 1,
            _ => runs.push(Run { lane: piece.lane, first: piece.number, at, len: 1 }),
        }
    }
}

/// Bytes of a batch, by pools.
fn booked(pieces: &[Piece]) -> Booked {
    let mut booked = Booked::default();
    pieces.iter().for_each(|piece| booked.add(&piece.loan));
    booked
}

/// What a batch has.
#[derive(Debug)]
enum Load {
    /// A lone copy, in no list.
    One(Piece),
    /// With the bytes that are booked.
    Many(Vec<Piece>, Booked),
}

impl Load {
    /// Its bytes are in flight no longer.
    fn unbook(&self) {
        match self {
            Self::One(piece) => book(&piece.loan, -1),
            Self::Many(_, booked) => booked.book(-1),
        }
    }

    fn runs(&self) -> Vec<Run> {
        let mut runs = Vec::new();
        match self {
            Self::One(piece) => find_runs(std::slice::from_ref(piece), &mut runs),
            Self::Many(pieces, _) => find_runs(pieces, &mut runs),
        }
        runs
    }

    fn for_each(self, each: impl FnMut(Piece)) {
        match self {
            Self::One(piece) => std::iter::once(piece).for_each(each),
            Self::Many(pieces, _) => pieces.into_iter().for_each(each),
        }
    }
}

/// Who submits, at the desk. It is put back whatever happens meanwhile.
struct Seat<'a> {
    flow: &'a Flow,
    desk: Desk,
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        self.flow.left.store(self.desk.rest != 0, Ordering::Relaxed);
        *self.flow.desk.lock() = std::mem::take(&mut self.desk);
    }
}

impl Desk {
    /// Fills a batch from the lanes, each in turn. Whether it is full.
    fn collect(
        &mut self,
        lanes: &[CachePadded<Lane>],
        filled: &Filled,
        writes: bool,
        batch: &mut Vec<Piece>,
    ) -> bool {
        let (mut copies, mut bytes) = (0, 0);
        let is_full = |copies: usize, bytes, rows: &dyn Fn() -> bool| {
            let enough = writes && copies >= ENOUGH.0 && bytes >= ENOUGH.1;
            copies >= MOST || bytes >= MOST_BYTES || enough && !rows()
        };
        loop {
            let there = self.rest | filled.lanes();
            if there == 0 {
                return false;
            }
            // From where the last batch ended, and around.
            let (later, sooner) = (there & (u64::MAX << self.next), there & !(u64::MAX << self.next));
            for mut bits in [later, sooner] {
                while bits != 0 {
                    let at = bits.trailing_zeros() as usize;
                    bits &= bits - 1;
                    let Some(taken) = self.taken.get_mut(at) else { continue };
                    if taken.is_empty() {
                        lanes[at].take(filled, at, taken);
                    }
                    let before = batch.len();
                    let mut turn = 0;
                    // Rows of a rectangle, the more the better.
                    let rows = |turn: usize| {
                        let piece = |n: usize| if n < before { batch.get(n) } else { taken.get(n - before) };
                        let n = before + turn;
                        match (n.checked_sub(1).and_then(piece), piece(n)) {
                            (Some(last), Some(next)) => {
                                are_rows(n.checked_sub(2).and_then(piece), last, next)
                            }
                            _ => false,
                        }
                    };
                    while let Some(next) = taken.get(turn) {
                        let stays = turn < TURN || rows(turn);
                        if !stays || is_full(copies, bytes, &|| rows(turn)) {
                            break;
                        }
                        bytes += next.transfer.len();
                        copies += 1;
                        turn += 1;
                    }
                    batch.extend(taken.drain(..turn));
                    if taken.is_empty() {
                        self.rest &= !(1 << at);
                    } else {
                        self.rest |= 1 << at;
                    }
                    let next = taken.front();
                    let goes_on = || match (&batch[..], next) {
                        ([.., a, b], Some(c)) => are_rows(Some(a), b, c),
                        ([b], Some(c)) => are_rows(None, b, c),
                        _ => false,
                    };
                    if is_full(copies, bytes, &goes_on) {
                        self.next = (at + 1) % lanes.len();
                        return true;
                    }
                }
            }
        }
    }
}

/// Copies that the driver is being called for. Dropped by unwinding, all of them count as failed.
struct Unmade<'a>(&'a Flow, &'a [Run]);

impl Drop for Unmade<'_> {
    fn drop(&mut self) {
        const WHY: Error = Error::Internal("the submission of copies panicked");
        for Run { lane, first, len, .. } in self.1 {
            (0..*len as u64).for_each(|n| self.0.lanes[*lane as usize].fail(first + n, WHY));
        }
    }
}

/// Books the bytes of one loan as in flight, or no longer.
fn book(loan: &RetainedResource, sign: isize) {
    if let Some((segment, bytes)) = loan.booked() {
        segment.central().joint_in_flight(sign * bytes as isize);
    }
}

/// What a timeline keeps of a batch. Dropped when its mark is complete.
#[derive(Debug)]
struct Batch {
    flow: Arc<Flow>,
    /// Nothing: dealt with.
    load: Option<Load>,
}

impl Drop for Batch {
    fn drop(&mut self) {
        let Some(load) = self.load.take() else { return };
        if crate::os::forked() {
            // The parent's.
            return std::mem::forget(load);
        }
        self.flow.land(load);
    }
}

impl Retain for Batch {
    fn quarantine(mut self: Box<Self>) -> Quarantined {
        self.load.take().map_or_else(Quarantined::default, |load| self.flow.lose(load))
    }

    fn for_each_descriptor(&self, visit: &mut dyn FnMut(usize)) {
        let pieces = match &self.load {
            Some(Load::One(piece)) => std::slice::from_ref(piece),
            Some(Load::Many(pieces, _)) => &pieces[..],
            None => &[],
        };
        pieces.iter().for_each(|piece| piece.loan.for_each_descriptor(visit));
    }
}
