//! Lanes: where pushing threads leave their copies, and where they find out that these are done.
//!
//! A lane is the pushing threads' alone, nearly always one thread's: it has a lock that nobody else takes but the
//! submitter, once a batch, to exchange the whole queue for an empty one, and whoever lands a batch, once a batch too.
//! So a push shares no cache line with other pushing threads, and costs what an uncontended lock costs.
//!
//! Copies of a lane have numbers, are submitted in the order of these, and land in it, since all of a direction go
//! through one stream. So one number says what is done: `landed`. A handle waits for a number; it needs neither a cell
//! of its own nor a system call, unless it sleeps. (That says nothing about the order of the copies' effects: within a
//! batch there is none.)
//!
//! ```text
//!   queue (pushed, with the submitter next)  [ 41 42 43 ... ]   <- push: number 44
//!   batches in flight                        [ 17 .. 40 ]
//!   landed                                   16
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::central::{Segment, Wake};
use crate::device::Transfer;
use crate::device::memory::Allocation;
use crate::error::{Error, Result};
use crate::stream::awaited::Range;
use crate::stream::timeline::{Resource, RetainedResource, WaitKey};
use crate::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering};

/// One copy.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) transfer: Transfer,
    pub(super) loan: RetainedResource,
    /// What keeps the device memory. Of neighbours in a lane with the same memory only the last has it, since it lands
    /// last.
    pub(super) memory: Option<Arc<Allocation>>,
    pub(super) lane: u32,
    pub(super) number: u64,
}

/// Bytes of segments by pool, each with a name of one of the pool's segments: that one is there, and with it the pool,
/// for as long as the copies are not settled that the bytes are of.
#[derive(Debug, Default)]
pub(super) struct Booked(Vec<(Segment, usize)>);

impl Booked {
    pub(super) fn add(&mut self, loan: &RetainedResource) {
        let Some((segment, bytes)) = loan.booked() else { return };
        match self.0.iter_mut().find(|(other, _)| other.shares_central(segment)) {
            Some((_, sum)) => *sum += bytes,
            None => self.0.push((segment.alias(), bytes)),
        }
    }

    /// Has the pools count them as in flight, or no longer.
    pub(super) fn book(&self, sign: isize) {
        for (segment, bytes) in &self.0 {
            segment.central().joint_in_flight(sign * *bytes as isize);
        }
    }

    /// Bytes of the pool with this number.
    fn of(&self, central: u64) -> usize {
        self.0
            .iter()
            .find(|(segment, _)| segment.central().number() == central)
            .map_or(0, |(_, bytes)| *bytes)
    }
}

/// Changes of what is in flight that take more than one step: a segment's word, and what is counted. Only checks look.
#[derive(Debug, Default)]
pub(super) struct Changes {
    begun: std::sync::atomic::AtomicU64,
    over: std::sync::atomic::AtomicU64,
}

impl Changes {
    /// A change is under way until this is dropped.
    pub(super) fn begin(&self) -> impl Drop {
        struct Change<'a>(&'a Changes);
        impl Drop for Change<'_> {
            fn drop(&mut self) {
                // Release: pairs with the acquire in `over`: a check that sees it sees all of the change.
                self.0.over.fetch_add(1, std::sync::atomic::Ordering::Release);
            }
        }
        // AcqRel: what follows is not done before. Pairs with the load in `begun`.
        self.begun.fetch_add(1, std::sync::atomic::Ordering::AcqRel);
        Change(self)
    }

    pub(super) fn begun(&self) -> u64 {
        self.begun.load(std::sync::atomic::Ordering::Acquire)
    }

    /// Those that are not under way any more.
    pub(super) fn over(&self) -> u64 {
        self.over.load(std::sync::atomic::Ordering::Acquire)
    }
}

#[derive(Debug, Default)]
struct State {
    /// The number of the last copy that was pushed.
    pushed: u64,
    queue: VecDeque<Piece>,
    /// Of what is in the queue. Segments are in flight by their words from the push on, and a push touches nothing that
    /// other threads write: so the lane counts them, until they are taken out and the pool does.
    booked: Booked,
    /// Who waits, by the number waited for. The second number tells those apart who wait for the same.
    waiting: BTreeMap<(u64, u64), Wake>,
    next_wait: u64,
    /// What copies failed with that somebody may ask about, until asked.
    failures: BTreeMap<u64, Error>,
    /// Copies that are not submitted, about which nobody will ask.
    left: Vec<Range>,
    /// Nothing lands here any more.
    lost: Option<Error>,
    closed: bool,
}

/// See the module's page.
#[derive(Debug)]
pub(super) struct Lane {
    /// The last of those that are done, or that failed and are out of the device's hands.
    landed: AtomicU64,
    /// The last that was handed to the driver.
    sent: AtomicU64,
    /// Whether `failures` has any. Changed under the lock.
    failed: AtomicBool,
    /// Whether there is a `lost`. Changed under the lock, once.
    is_lost: AtomicBool,
    state: Mutex<State>,
}

impl Lane {
    pub(super) fn new() -> Self {
        Self {
            landed: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            is_lost: AtomicBool::new(false),
            state: Mutex::new(State::default()),
        }
    }

    // --- pushing -----------------------------------------------------------------------------------------------------

    /// A place for one more copy, to be filled at once: the lane is locked meanwhile.
    ///
    /// # Errors
    /// [`Error::QueueFull`], [`Error::QueueClosed`], what the lane was lost with.
    pub(super) fn enter(&self, depth: u64) -> Result<Entry<'_>> {
        let state = self.state.lock();
        if state.closed {
            return Err(Error::QueueClosed);
        }
        if let Some(error) = &state.lost {
            return Err(error.clone());
        }
        let room = depth.saturating_sub(state.pushed - self.landed.load(Ordering::Relaxed));
        if room == 0 {
            return Err(Error::QueueFull { depth: usize::try_from(depth).unwrap_or(usize::MAX) });
        }
        Ok(Entry { state, room })
    }

    /// The number that has landed when the lane has room for one more.
    pub(super) fn room_after(&self, depth: u64) -> u64 {
        (self.state.lock().pushed + 1).saturating_sub(depth)
    }

    /// The number of the last copy that was pushed.
    pub(super) fn pushed(&self) -> u64 {
        self.state.lock().pushed
    }

    /// Bytes of a pool in the queue, and the number of the last copy that was pushed.
    pub(super) fn queued(&self, central: u64) -> (usize, u64) {
        let state = self.state.lock();
        (state.booked.of(central), state.pushed)
    }

    /// Copies that are pushed and have not landed.
    pub(super) fn outstanding(&self) -> u64 {
        self.state.lock().pushed - self.landed.load(Ordering::Relaxed)
    }

    /// Takes no more.
    pub(super) fn close(&self) -> u64 {
        let mut state = self.state.lock();
        state.closed = true;
        state.pushed
    }

    // --- submitting --------------------------------------------------------------------------------------------------

    /// All that was pushed, for an empty queue. The pools count it as in flight from here on.
    pub(super) fn take(&self, filled: &Filled, lane: usize, empty: &mut VecDeque<Piece>) {
        debug_assert!(empty.is_empty(), "copies would be lost");
        let mut state = self.state.lock();
        std::mem::swap(&mut state.queue, empty);
        state.booked.book(1);
        state.booked.0.clear();
        filled.0.fetch_and(!(1 << lane), Ordering::Relaxed);
    }

    /// All up to this one were handed to the driver, and have a sequence number.
    pub(super) fn sent(&self, number: u64) {
        // Release: pairs with the acquire in `is_sent`: who sees it finds the sequence number on the timeline.
        self.sent.store(number, Ordering::Release);
    }

    pub(super) fn is_sent(&self, number: u64) -> bool {
        self.sent.load(Ordering::Acquire) >= number
    }

    // --- landing -----------------------------------------------------------------------------------------------------

    /// A copy failed. It lands like the others.
    pub(super) fn fail(&self, number: u64, error: Error) {
        let mut state = self.state.lock();
        if state.left.iter().any(|range| (range.first..=range.last).contains(&number)) {
            return;
        }
        state.failures.insert(number, error);
        // Release: pairs with the acquire in `verdict`. (Whoever sees `landed` sees it in any case.)
        self.failed.store(true, Ordering::Release);
    }

    /// All up to this one are out of the device's hands, and settled with their handles.
    pub(super) fn land(&self, number: u64) {
        let mut woken = BTreeMap::new();
        {
            let mut state = self.state.lock();
            debug_assert!(number > self.landed.load(Ordering::Relaxed), "a lane lands in order");
            // Release: pairs with the acquire in `has_landed`. Under the lock, so that nobody lies down to sleep in
            // between.
            self.landed.store(number, Ordering::Release);
            if !state.waiting.is_empty() {
                let later = state.waiting.split_off(&(number + 1, 0));
                woken = std::mem::replace(&mut state.waiting, later);
            }
        }
        woken.into_values().for_each(Wake::wake);
    }

    /// Nothing lands here any more.
    pub(super) fn lose(&self, error: &Error) {
        let woken = {
            let mut state = self.state.lock();
            state.lost.get_or_insert_with(|| error.clone());
            // Release: pairs with the acquire in `verdict`.
            self.is_lost.store(true, Ordering::Release);
            std::mem::take(&mut state.waiting)
        };
        woken.into_values().for_each(Wake::wake);
    }

    // --- waiting -----------------------------------------------------------------------------------------------------

    pub(super) fn has_landed(&self, number: u64) -> bool {
        // Acquire: pairs with the release in `land`: who sees it finds the words settled.
        self.landed.load(Ordering::Acquire) >= number
    }

    /// What became of the copies of a range. `Ok(false)`: nothing yet.
    pub(super) fn verdict(&self, range: &Range) -> Result<bool> {
        if self.has_landed(range.last) {
            return self.failure(range);
        }
        // Asked again and again by who waits: not under the lock.
        if !self.is_lost.load(Ordering::Acquire) {
            return Ok(false);
        }
        let state = self.state.lock();
        match &state.lost {
            _ if self.has_landed(range.last) => {
                drop(state);
                self.failure(range)
            }
            Some(error) => Err(error.clone()),
            None => Ok(false),
        }
    }

    fn failure(&self, range: &Range) -> Result<bool> {
        // Acquire: pairs with the release in `fail`.
        if self.failed.load(Ordering::Acquire) && !range.is_whole() {
            if let Some((_, error)) = self.state.lock().failures.range(range.first..=range.last).next() {
                return Err(error.clone());
            }
        }
        Ok(true)
    }

    /// Nobody will ask about these any more. `quiet`: nor does anybody say so again when they have landed.
    pub(super) fn leave(&self, range: &Range, quiet: bool) {
        // What is submitted has failed by now, or never will. (Acquire, in both: pairs with the releases in `sent` and
        // `fail`.)
        let early = quiet && !self.is_sent(range.last) && !self.is_lost.load(Ordering::Relaxed);
        if range.is_whole() || !(early || self.failed.load(Ordering::Acquire)) {
            return;
        }
        let mut state = self.state.lock();
        if early {
            state.left.retain(|range| !self.is_sent(range.last));
            state.left.push(*range);
        }
        let theirs: Vec<u64> =
            state.failures.range(range.first..=range.last).map(|(number, _)| *number).collect();
        for number in theirs {
            state.failures.remove(&number);
        }
        if state.failures.is_empty() {
            self.failed.store(false, Ordering::Relaxed);
        }
    }

    /// Puts somebody down to be woken when this number has landed, or the lane is lost. `None`: that is so already.
    pub(super) fn lie_down(&self, number: u64, wake: Wake) -> Option<WaitKey> {
        let mut state = self.state.lock();
        if state.lost.is_some() || self.has_landed(number) {
            drop(state);
            return None;
        }
        state.next_wait += 1;
        let id = state.next_wait;
        state.waiting.insert((number, id), wake);
        Some(WaitKey { place: usize::try_from(number).unwrap_or(usize::MAX), id })
    }

    /// Takes it back.
    pub(super) fn get_up(&self, key: WaitKey) {
        let wake = self.state.lock().waiting.remove(&(key.place as u64, key.id));
        // After the lock: a task may go with it.
        drop(wake);
    }
}

/// Which lanes have anything in their queues, a bit for each: one look, wherever copies were pushed. A bit is changed
/// under its lane's lock, and only when the queue stops or begins to be empty, so that pushing threads hardly ever meet
/// here.
#[derive(Debug, Default)]
pub(super) struct Filled(AtomicU64);

impl Filled {
    pub(super) fn lanes(&self) -> u64 {
        // Relaxed: what is there is found under the lane's lock; that it is looked for in time is the bell's affair.
        self.0.load(Ordering::Relaxed)
    }
}

/// A lane, locked, with room.
pub(super) struct Entry<'a> {
    state: MutexGuard<'a, State>,
    room: u64,
}

impl Entry<'_> {
    /// A copy that is not pushed, but the lane's next to be submitted by who asks, who has the role. `None`: others are
    /// before it.
    pub(super) fn next(&mut self, lane: u32) -> Option<Next> {
        if self.room == 0 || !self.state.queue.is_empty() {
            return None;
        }
        self.room -= 1;
        self.state.pushed += 1;
        Some(Next { lane, number: self.state.pushed })
    }

    /// Pushes a copy, for which there must be room, and gives its number.
    pub(super) fn push(
        &mut self,
        filled: &Filled,
        lane: u32,
        transfer: Transfer,
        resource: Resource,
        memory: Arc<Allocation>,
    ) -> u64 {
        debug_assert!(self.room > 0, "pushed where there is no room");
        self.room = self.room.saturating_sub(1);
        let state = &mut *self.state;
        state.pushed += 1;
        let number = state.pushed;
        // A count that many threads change is worth sparing: the one before hands its own on, since it lands before.
        let memory = match state.queue.back_mut().map(|before| &mut before.memory) {
            Some(before) if before.as_ref().is_some_and(|m| Arc::ptr_eq(m, &memory)) => before.take(),
            _ => Some(memory),
        };
        if state.queue.is_empty() {
            filled.0.fetch_or(1 << lane, Ordering::Relaxed);
        }
        let loan = RetainedResource::of(resource);
        state.booked.add(&loan);
        state.queue.push_back(Piece { transfer, loan, memory, lane, number });
        number
    }
}

/// A place in a lane, to be submitted at once.
pub(super) struct Next {
    lane: u32,
    number: u64,
}

impl Next {
    pub(super) fn piece(self, transfer: Transfer, resource: Resource, memory: Arc<Allocation>) -> Piece {
        let Self { lane, number } = self;
        Piece { transfer, loan: RetainedResource::of(resource), memory: Some(memory), lane, number }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn one(number: u64) -> Range {
        Range { first: number, last: number }
    }

    /// What nobody can ask about is not kept, whether its handle went before or after the copy failed.
    #[test]
    fn failures_go_with_their_handles() {
        let lane = Lane::new();
        lane.leave(&Range { first: 1, last: 2 }, true);
        (1..=4).for_each(|number| lane.fail(number, Error::QueueClosed));
        lane.sent(4);
        lane.leave(&one(3), true);
        assert_eq!(lane.state.lock().failures.keys().copied().collect::<Vec<_>>(), [4]);
        lane.land(4);
        assert_eq!(lane.verdict(&one(4)), Err(Error::QueueClosed));
        lane.leave(&one(4), true);
        assert!(lane.state.lock().failures.is_empty() && !lane.failed.load(Ordering::Relaxed));
        // Those that were left are forgotten as they are submitted.
        lane.leave(&one(5), true);
        lane.sent(5);
        lane.leave(&one(6), true);
        assert_eq!(lane.state.lock().left, [one(6)]);
    }
}
