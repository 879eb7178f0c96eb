//! Putting chunks on the wire.
//!
//! At most so many bulk chunks are submitted and not complete in each direction (the *depth*): six unless told, and two
//! while the foreground is about, and one by one while it waits for a copy. Two keep the wire busy only if each arrival is seen at once; but with two somebody else's
//! copy never waits for more than these. What is filled and cannot go yet waits in `ready`, outside of the driver, where a
//! foreground chunk overtakes it. Whoever has filled a segment, or given one back, or seen a chunk arrive
//! ([`super::arrival`]) submits what can be submitted (*pumps*).
//!
//! Chunks go to the streams of a direction in turn, and there are as many streams as chunks on the wire: a device that
//! has more to do on a stream does that first, and copies on other streams starve (on an H200 for 20 ms beside one stream
//! that is never empty). But it loses a few microseconds where it goes from one stream to another, and more on the way
//! down. So a few chunks ([`RUNS`]) follow each other on a stream before it is the next one's turn, as long as the foreground
//! is not about. On an H200 downloads reach 0.96 of the link so instead of 0.89, and somebody else's copy waits for 1.3 ms instead of
//! 0.8 (seen with uploads made so); uploads gain a hundredth. (Not where the CPU makes the copies: there a stream is a thread.) Only the chunks of a window all go at once ([`super::window`]).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::locks::MutexGuard;

use super::config::Priority;
use super::engine::{Engine, Live, State};
use super::job::{Body, Direction, End, Job, Kind};
use super::plan::{Chunk, Parts};
use super::segments::Got;
use crate::buffer::{InFlight, Lend, PinnedBuf};
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result, SubmitError};
use crate::stream::Stream;

/// A value that is page-locked where it is.
pub(super) trait InPlace: Send + Sync {
    /// Submits the copy of a part of it.
    fn submit(&self, stream: &Stream, start: usize, to: &DeviceSlice) -> Result<Box<dyn Arrives>>;

    /// A part of it has arrived: whether it is what it should be.
    fn arrived(&self, _start: usize, _len: usize) -> Result<()> {
        Ok(())
    }
}

/// A value that several copies share.
pub(super) struct Shared<B>(pub(super) Arc<B>)
where
    Arc<B>: Lend;

impl<B: Send + Sync + 'static> InPlace for Shared<B>
where
    Arc<B>: Lend + 'static,
{
    fn submit(&self, stream: &Stream, start: usize, to: &DeviceSlice) -> Result<Box<dyn Arrives>> {
        let flight = stream.upload_part(self.0.clone(), start..start + to.len(), to)?;
        Ok(Box::new(flight))
    }
}

/// A copy that is on the wire.
pub(super) trait Arrives: Send {
    /// Whether it is there. Errors are told by waiting.
    fn is_here(&self) -> bool;

    /// The same, after at most so long.
    fn is_here_within(&self, time: Duration) -> bool;

    /// Waits for it.
    fn arrive(self: Box<Self>) -> Result<()>;
}

impl<B: Lend> Arrives for InFlight<B> {
    fn is_here(&self) -> bool {
        self.is_done() != Ok(false)
    }

    fn is_here_within(&self, time: Duration) -> bool {
        self.is_done_within(time)
    }

    fn arrive(self: Box<Self>) -> Result<()> {
        (*self).wait().map(drop)
    }
}

/// What an upload's chunk is in.
pub(super) enum Load {
    /// A segment, with the bytes from so far in.
    Segment(PinnedBuf, usize),
    /// Memory of the caller's, or a window of a file, with the chunk from so far in.
    InPlace(Arc<dyn InPlace>, usize),
}

/// A chunk that is filled and waits for the wire.
pub(super) struct Ready {
    pub(super) job: Arc<Job>,
    pub(super) index: usize,
    pub(super) chunk: Chunk,
    pub(super) load: Load,
    /// The worker that has filled it (0: none).
    pub(super) by: usize,
    /// It goes whatever is on the wire: nothing can be submitted while the next window is registered.
    pub(super) at_once: bool,
}

/// A chunk on the wire.
pub(super) struct Flying {
    pub(super) job: Arc<Job>,
    pub(super) index: usize,
    pub(super) wanted: u64,
    /// The worker that its segment is nearest to: the one that has filled it, or drained it last (0: none).
    pub(super) by: usize,
    /// Counts what is submitted in its direction.
    pub(super) number: u64,
    pub(super) flight: Flight,
}

pub(super) enum Flight {
    Segment(InFlight<PinnedBuf>),
    /// One segment, several copies.
    Parts(Arc<PinnedBuf>, Vec<InFlight<Arc<PinnedBuf>>>),
    /// With where the chunk is in it, and how long.
    InPlace(Vec<Box<dyn Arrives>>, Arc<dyn InPlace>, usize, usize),
    /// One of its copies was refused, and others, or even that one, are on the wire: it has failed when they are through. With
    /// the segment, or none any more, if there is one.
    Refused {
        flights: Vec<Box<dyn Arrives>>,
        segment: Option<Option<Arc<PinnedBuf>>>,
        error: Error,
    },
}

impl Flight {
    /// A copy was refused, and the device may be making it, or some that were submitted before it.
    fn refused(
        mut flights: Vec<Box<dyn Arrives>>,
        segment: Option<Option<Arc<PinnedBuf>>>,
        error: Error,
        stream: &Stream,
    ) -> Self {
        // Behind all that may be on the stream. Where it is refused as well the device is lost, or about to be.
        if let Ok(behind) = stream.hold(()) {
            flights.push(Box::new(behind));
        }
        Self::Refused { flights, segment, error }
    }
}

/// For how long a chunk makes others wait for the rate, at most.
const AT_MOST: Duration = Duration::from_secs(30 * 24 * 3600);

/// Chunks that follow each other on a stream, up and down.
const RUNS: [usize; 2] = [2, 8];

/// One direction's wire.
#[derive(Default)]
pub(super) struct Wire {
    /// Filled, for the foreground and for all others.
    pub(super) ready: [VecDeque<Ready>; 2],
    /// Submitted, the oldest first, and looked after by nobody.
    pub(super) flying: VecDeque<Flying>,
    /// Workers that look after one more each.
    pub(super) attended: usize,
    /// Chunks submitted so far.
    sent: u64,
    /// Submitted or being submitted, and not seen to be complete: foreground, and others.
    pub(super) on: [usize; 2],
    /// Chunks that were given a stream.
    turn: usize,
}

/// In which place of a pair a priority is.
pub(super) fn place(priority: Priority) -> usize {
    match priority {
        Priority::Foreground => 0,
        Priority::Bulk => 1,
    }
}

impl Wire {
    /// A chunk was submitted.
    fn flies(&mut self, flying: Flying) {
        self.sent += 1;
        self.flying.push_back(Flying { number: self.sent, ..flying });
    }

    /// Nothing is waiting and nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.ready.iter().all(VecDeque::is_empty) && self.on == [0, 0]
    }
}

impl State {
    /// Downloads that may begin a chunk that is staged.
    fn downloads(&self, priority: Priority) -> impl Iterator<Item = &Arc<Job>> {
        let may = move |live: &&Live| {
            live.job.direction == Direction::Down
                && live.job.priority == priority
                && live.behind.is_empty()
                && live.job.kind != Kind::Direct
                && live.job.has_next()
        };
        self.jobs.iter().filter(may).map(|live| &live.job)
    }
}

impl State {
    /// What was sent ahead of the old rate is still to be waited for, at the new one.
    pub(super) fn set_rate(&mut self, rate: Option<u64>) {
        let now = Instant::now();
        let debt = match (self.rate, self.due) {
            (Some(old), Some(due)) => due.saturating_duration_since(now).as_secs_f64() * old as f64,
            _ => 0.0,
        };
        self.rate = rate;
        self.due = None;
        self.owe(debt, now);
    }

    /// So many bytes go: the next chunk when the rate allows it, if there is one.
    fn owe(&mut self, bytes: f64, from: Instant) {
        let Some(rate) = self.rate else { return };
        let takes = Duration::try_from_secs_f64(bytes / rate as f64).unwrap_or(AT_MOST).min(AT_MOST);
        self.due = Some(from + takes);
    }
}

impl Engine {
    /// Submits whatever may go now.
    pub(super) fn pump(&self, state: &mut MutexGuard<'_, State>, direction: Direction) {
        loop {
            let pumped = match direction {
                Direction::Up => self.pump_up(state),
                Direction::Down => self.pump_down(state),
            };
            if !pumped {
                return;
            }
        }
    }

    /// Whether the wire takes another chunk of this kind now.
    pub(super) fn free(&self, state: &State, direction: Direction, priority: Priority) -> bool {
        let on = state.wires[direction as usize].on[place(priority)];
        let most = match priority {
            Priority::Bulk if self.is_urgent(state, direction) => 1,
            _ if state.is_calm() => self.settings.deep,
            _ => self.settings.depth,
        };
        on < most && (priority == Priority::Foreground || state.in_time())
    }

    pub(super) fn takes_off(state: &mut State, direction: Direction, priority: Priority, bytes: usize) {
        state.wires[direction as usize].on[place(priority)] += 1;
        if priority == Priority::Bulk {
            let now = Instant::now();
            let from = state.due.map_or(now, |due| due.max(now));
            state.owe(bytes as f64, from);
        }
    }

    fn pump_up(&self, state: &mut MutexGuard<'_, State>) -> bool {
        for priority in [Priority::Foreground, Priority::Bulk] {
            let ready = &state.wires[Direction::Up as usize].ready[place(priority)];
            let at_once = ready.front().is_some_and(|ready| ready.at_once);
            let at_once = at_once && state.in_time() && !self.is_urgent(state, Direction::Up);
            let may = self.free(state, Direction::Up, priority) || at_once;
            if !may {
                continue;
            }
            let filled = state.wires[Direction::Up as usize].ready[place(priority)].pop_front();
            let ready = match filled {
                Some(ready) => ready,
                None => {
                    // The place first: others submit while we look at it.
                    let events = state.share.events;
                    state.wires[Direction::Up as usize].on[place(priority)] += 1;
                    let next = self.next_in_place(state, priority);
                    state.wires[Direction::Up as usize].on[place(priority)] -= 1;
                    match next {
                        Some(ready) => ready,
                        None if state.share.events != events => return true,
                        None => continue,
                    }
                }
            };
            if ready.job.stopped() {
                self.discard(state, ready);
                return true;
            }
            Self::takes_off(state, Direction::Up, priority, ready.chunk.len);
            let stream = self.stream(state, Direction::Up, priority);
            let (job, index) = (ready.job.clone(), ready.index);
            let at = ready.chunk.at;
            let staged = matches!(ready.load, Load::Segment(..));
            let sent = self.outside(state, || Ok(send(ready, &stream)));
            match sent.unwrap_or_else(|unwound| Err((unwound, None))) {
                Ok(flying) => {
                    state.wires[Direction::Up as usize].flies(flying);
                    self.bells[Direction::Up as usize].notify_one();
                }
                Err((error, buf)) => {
                    state.wires[Direction::Up as usize].on[place(priority)] -= 1;
                    if staged {
                        self.give_back(state, Direction::Up, buf);
                    } else {
                        self.call(state);
                    }
                    let error = job.failed_at(at, error);
                    self.end(state, &job, index, Err(error));
                }
            }
            return true;
        }
        false
    }

    /// The next chunk of what needs no staging.
    fn next_in_place(&self, state: &mut MutexGuard<'_, State>, priority: Priority) -> Option<Ready> {
        let next = state.jobs.iter().find(|live| {
            live.job.kind == Kind::InPlace
                && live.job.priority == priority
                && live.behind.is_empty()
                && live.job.has_next()
        });
        let job = next?.job.clone();
        // From here on it is not over before this chunk is.
        let (index, _) = job.begin(1)?;
        let found = self.outside(state, || match job.body().as_ref().map(|body| &***body) {
            Some(Body::InPlace(place)) => Ok((job.plan.chunk(index)?, place.clone())),
            _ => Err(Error::Closed),
        });
        match found {
            Ok((chunk, place)) => {
                let load = Load::InPlace(place, chunk.at as usize);
                Some(Ready { job, index, chunk, load, by: 0, at_once: false })
            }
            Err(error) => {
                self.end(state, &job, index, Err(error));
                // It may have found the place taken.
                self.call_copier(state);
                None
            }
        }
    }

    fn pump_down(&self, state: &mut MutexGuard<'_, State>) -> bool {
        for priority in [Priority::Foreground, Priority::Bulk] {
            if !self.free(state, Direction::Down, priority) {
                continue;
            }
            let events = state.share.events;
            // Each in turn: one whose caller does not go on may have all that it is to have.
            let jobs: Vec<Arc<Job>> = state.downloads(priority).cloned().collect();
            let mut got = None;
            // First the place on the wire, so that nobody takes it while we look for a segment.
            state.wires[Direction::Down as usize].on[place(priority)] += 1;
            for job in &jobs {
                match self.acquire(state, Direction::Down, job, false) {
                    Got::NotNow => {}
                    Got::Segment(buf) => got = Some((job, Got::Segment(buf))),
                    Got::Failed(error) => got = Some((job, Got::Failed(error))),
                }
                if got.is_some() {
                    break;
                }
            }
            state.wires[Direction::Down as usize].on[place(priority)] -= 1;
            if !jobs.is_empty() && !matches!(got, Some((_, Got::Segment(_)))) {
                // A worker may have found the place taken, which nobody uses.
                self.call_copier(state);
            }
            let first = jobs.first().filter(|_| got.is_none() && state.has_none());
            if let Some(job) = first {
                // In the pool's queue, and without that place, which others can use meanwhile.
                match self.acquire(state, Direction::Down, job, true) {
                    Got::NotNow => {}
                    Got::Segment(buf) => {
                        // Whoever is first by now has it.
                        self.give_back(state, Direction::Down, Some(buf));
                        return true;
                    }
                    Got::Failed(error) => got = Some((job, Got::Failed(error))),
                }
            }
            let (job, buf) = match got {
                Some((job, Got::Segment(buf))) => (job.clone(), buf),
                Some((job, Got::Failed(error))) => {
                    self.fail(state, job, error);
                    return true;
                }
                // Somebody who has brought one meanwhile has found the place taken.
                _ if state.share.events != events => return true,
                _ => continue,
            };
            let Some((index, _)) = job.begin(1) else {
                // Somebody else has taken the last.
                self.give_back(state, Direction::Down, Some(buf));
                return true;
            };
            let chunk = job.plan.chunk(index);
            let (at, len) = job.plan.range(index);
            Self::takes_off(state, Direction::Down, priority, len);
            let stream = self.stream(state, Direction::Down, priority);
            let sent = self.outside(state, || {
                let sent = match chunk.map(|chunk| chunk.parts) {
                    Ok(Parts::Whole(from)) => stream.download(from, buf),
                    // Not so: downloads are cut into chunks of one part each.
                    Ok(Parts::Several(_)) => Err(SubmitError::refused(Error::Empty, buf)),
                    Err(error) => Err(SubmitError::refused(error, buf)),
                };
                Ok(match sent {
                    Ok(flight) => Ok(Flight::Segment(flight)),
                    Err(SubmitError { error, buffer: Some(buf) }) => Err((error, Some(buf))),
                    Err(SubmitError { error, .. }) => {
                        Ok(Flight::refused(Vec::new(), Some(None), error, &stream))
                    }
                })
            });
            match sent.unwrap_or_else(|unwound| Err((unwound, None))) {
                Ok(flight) => {
                    let wanted = len as u64;
                    let flying = Flying { job, index, wanted, by: self.worker(), number: 0, flight };
                    state.wires[Direction::Down as usize].flies(flying);
                    self.bells[Direction::Down as usize].notify_one();
                }
                Err((error, buf)) => {
                    state.wires[Direction::Down as usize].on[place(priority)] -= 1;
                    self.give_back(state, Direction::Down, buf);
                    let error = job.failed_at(at, error);
                    self.end(state, &job, index, Err(error));
                }
            }
            return true;
        }
        false
    }

    pub(super) fn stream(&self, state: &mut State, direction: Direction, priority: Priority) -> Stream {
        let streams = &self.streams[direction as usize];
        if priority == Priority::Foreground {
            return streams.foreground.clone();
        }
        let run = if self.looks && state.is_calm() { RUNS[direction as usize] } else { 1 };
        let wire = &mut state.wires[direction as usize];
        wire.turn = wire.turn.wrapping_add(1);
        streams.bulk[wire.turn / run % streams.bulk.len()].clone()
    }

    /// Drops a filled chunk of a job that has stopped.
    pub(super) fn discard(&self, state: &mut MutexGuard<'_, State>, ready: Ready) {
        let Ready { job, index, load, .. } = ready;
        match load {
            Load::Segment(buf, _) => self.give_back(state, Direction::Up, Some(buf)),
            Load::InPlace(place, _) => Self::drop_outside(state, place),
        }
        self.end(state, &job, index, End::Dropped);
    }
}

/// Submits a chunk. On an error nothing of it is on the wire, and the segment is not used.
fn send(ready: Ready, stream: &Stream) -> Result<Flying, (Error, Option<PinnedBuf>)> {
    let Ready { job, index, chunk, load, by, .. } = ready;
    let wanted = chunk.wanted();
    let flight = match (load, chunk.parts) {
        (Load::Segment(buf, lead), Parts::Whole(to)) => {
            match stream.upload_part(buf, lead..lead + to.len(), to) {
                Ok(flight) => Flight::Segment(flight),
                Err(SubmitError { error, buffer: Some(buf) }) => return Err((error, Some(buf))),
                Err(SubmitError { error, .. }) => Flight::refused(Vec::new(), Some(None), error, stream),
            }
        }
        (Load::Segment(buf, lead), Parts::Several(parts)) => {
            let shared = Arc::new(buf);
            let (mut flights, mut refused) = (Vec::with_capacity(parts.len()), None);
            for part in parts {
                let start = lead + part.offset;
                let len = part.device.len();
                match stream.upload_part(shared.clone(), start..start + len, part.device) {
                    Ok(flight) => flights.push(flight),
                    Err(SubmitError { error, .. }) => {
                        refused = Some(error);
                        break;
                    }
                }
            }
            match refused {
                None => Flight::Parts(shared, flights),
                Some(error) => {
                    let flights = flights.into_iter().map(|flight| Box::new(flight) as Box<dyn Arrives>);
                    Flight::refused(flights.collect(), Some(Some(shared)), error, stream)
                }
            }
        }
        (Load::InPlace(place, start), parts) => {
            let (len, mut flights) = (chunk.len, Vec::new());
            let parts = match parts {
                Parts::Whole(to) => vec![(0, to)],
                Parts::Several(parts) => parts.into_iter().map(|p| (p.offset, p.device)).collect(),
            };
            let mut refused = None;
            for (offset, to) in parts {
                match place.submit(stream, start + offset, &to) {
                    Ok(flight) => flights.push(flight),
                    Err(error) => {
                        refused = Some(error);
                        break;
                    }
                }
            }
            match refused {
                None => Flight::InPlace(flights, place, start, len),
                Some(error) => Flight::refused(flights, None, error, stream),
            }
        }
    };
    Ok(Flying { job, index, wanted, by, number: 0, flight })
}
