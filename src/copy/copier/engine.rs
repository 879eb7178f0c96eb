//! What the workers of a copier share, and how they submit copies.
//!
//! Bulk copies leave room for others: at most [`depth`](Settings) of them are in flight in each direction, and one while
//! a foreground copy is in flight. A rate bounds the bytes a second of both directions together.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::flights::Flights;
use super::job::Job;
use super::packing::Host;
use super::ring::{Ring, Slot};
use super::scheduler::{Kind, Scheduler, Takes};
use super::segments::Segments;
use super::spreader::{Entry, Spreader};
use super::stats::Counters;
use super::types::{Direction, Priority, Settings};
use crate::buffer::{InFlight, Lend, PinnedBuf};
use crate::copy::NOT_YET;
use crate::copy::overlap::first_in_the_way;
use crate::device::handle::Device;
use crate::device::{SpreadWay, Transfer};
use crate::error::{Error, Result};
use crate::foreign;
use crate::locks::Mutex;
use crate::pool::Pool;
use crate::sealed::KEY;
use crate::stream::Stream;
use crate::stream::hold::{Resource, Retain};
use crate::stream::timeline::{Submission, Ticket};

/// Chunks that follow each other on a stream, up and down. The device loses a few microseconds where it goes from one
/// stream to another, and more on the way down; but a stream that is never empty holds up copies on other streams.
const RUNS: [usize; 2] = [2, 8];
/// By so much a copy may come late without lowering the rate.
const SLACK: Duration = Duration::from_millis(10);
/// Effectively infinite.
const FAR: Duration = Duration::from_secs(1 << 30);

impl Takes for Arc<Job> {
    fn may_take(&self) -> bool {
        Job::may_take(self)
    }

    fn kind(&self) -> Kind {
        let Job { priority, direction, may_block, needs_segment, .. } = **self;
        Kind { priority, direction, may_block, needs_segment }
    }
}

/// The streams of one direction, which chunks use by turns, and the copies in flight there.
struct Lane {
    streams: Vec<Stream>,
    /// For the foreground.
    urgent: Stream,
    turn: AtomicUsize,
    flights: Flights<Sent>,
}

struct Sent {
    ticket: Ticket,
    then: Then,
    priority: Priority,
}

/// What follows a chunk's copy.
pub(super) enum Then {
    Nothing,
    /// The slot is free.
    Give(Slot),
    /// The bytes are in a slot, and the kernel spreads them.
    Spread(Entry),
}

/// See the module's page.
pub(super) struct Engine {
    pub(super) device: Device,
    pub(super) settings: Settings,
    pub(super) scheduler: Scheduler<Arc<Job>>,
    pub(super) ring: Ring,
    /// One for each direction. `None`: the device has no kernels.
    pub(super) spreaders: Option<[Spreader; 2]>,
    pub(super) counters: Arc<Counters>,
    /// Foreground copies in flight. Relaxed throughout: a hint for copies that come later.
    urgent: AtomicUsize,
    /// When the next bulk copy may go, by the rate.
    next: Mutex<Instant>,
    lanes: [Lane; 2],
    pub(super) segments: Segments,
}

impl Engine {
    pub(super) fn new(pool: Pool, device: Device, settings: Settings) -> Result<Arc<Self>> {
        let lane = || -> Result<Lane> {
            let streams = (0..settings.depth).map(|_| device.stream()).collect::<Result<_>>()?;
            let urgent = device.urgent_stream()?;
            Ok(Lane { streams, urgent, turn: AtomicUsize::new(0), flights: Flights::new() })
        };
        let lanes = [lane()?, lane()?];
        let spreaders = if settings.ring == 0 { None } else { Self::spreaders(&device)? };
        Ok(Arc::new(Self {
            ring: Ring::new(settings.segment, settings.ring),
            device,
            settings,
            scheduler: Scheduler::new(),
            spreaders,
            counters: Arc::default(),
            urgent: AtomicUsize::new(0),
            next: Mutex::new(Instant::now()),
            lanes,
            segments: Segments::new(pool, &settings),
        }))
    }

    /// The spreaders, if the device has the kernels.
    fn spreaders(device: &Device) -> Result<Option<[Spreader; 2]>> {
        let context = device.context().clone();
        let loading = context.clone();
        // On the region thread: the driver may wait for other work of the process while it loads code.
        match context.worker().call(move || loading.driver().load_spread()) {
            Ok(()) => {}
            Err(error) if error.is_device_lost() => return Err(error),
            // The host device's copies are the CPU's own.
            Err(Error::Unsupported(_)) if context.driver().takes_ordinary_memory() => return Ok(None),
            Err(error) => {
                foreign::info!(
                    target: "pinpool::copier", device = device.name(), %error,
                    "the kernels that spread pieces cannot be loaded: pieces are copied in batches instead"
                );
                return Ok(None);
            }
        }
        let spreader = |way| Ok::<_, Error>(Spreader::new(way, device.urgent_stream()?));
        Ok(Some([spreader(SpreadWay::Spread)?, spreader(SpreadWay::Collect)?]))
    }

    // --- permits ---------------------------------------------------------------------------------------------------

    /// Whether a chunk's copy may be submitted in this direction. After `true` [`sent`](Self::sent) is called.
    pub(super) fn may_send(&self, direction: Direction, priority: Priority, bytes: usize) -> bool {
        if priority == Priority::Foreground {
            self.urgent.fetch_add(1, Ordering::Relaxed);
            return true;
        }
        let flights = &self.lanes[direction as usize].flights;
        let depth = if self.urgent.load(Ordering::Relaxed) > 0 { 1 } else { self.settings.depth };
        let may = flights.reserve(depth) || self.land(direction) && flights.reserve(depth);
        if may && !self.is_due(bytes) {
            flights.release();
            return false;
        }
        may
    }

    /// Whether the rate lets a bulk copy of so many bytes go now. If so, it counts.
    fn is_due(&self, bytes: usize) -> bool {
        let Some(per_second) = self.settings.rate else { return true };
        let (now, mut next) = (Instant::now(), self.next.lock());
        if now < *next {
            return false;
        }
        let since = (*next).max(now.checked_sub(SLACK).unwrap_or(now));
        let takes = Duration::try_from_secs_f64(bytes as f64 / per_second as f64).unwrap_or(FAR);
        *next = since.checked_add(takes.min(FAR)).unwrap_or(since);
        true
    }

    /// A copy was submitted, or (`None`) was not.
    pub(super) fn sent(&self, direction: Direction, priority: Priority, sent: Option<(Ticket, Then)>) {
        match sent {
            Some((ticket, then)) => {
                self.lanes[direction as usize].flights.sent(Sent { ticket, then, priority });
            }
            None => self.landed(direction, priority),
        }
    }

    /// A copy is in flight no more.
    fn landed(&self, direction: Direction, priority: Priority) {
        match priority {
            Priority::Bulk => self.lanes[direction as usize].flights.release(),
            Priority::Foreground => _ = self.urgent.fetch_sub(1, Ordering::Relaxed),
        }
    }

    /// Finds out which copies of chunks are complete, and does what follows. Whether any was.
    fn land(&self, direction: Direction) -> bool {
        let Some(mut asking) = self.lanes[direction as usize].flights.ask() else { return false };
        let mut any = false;
        let mut n = 0;
        while n < asking.left.len() {
            let ticket = &asking.left[n].ticket;
            let said = match ticket.timeline.poll_complete(ticket.seq) {
                Ok(false) => {
                    n += 1;
                    continue;
                }
                Ok(true) => Ok(()),
                Err(error) => Err(error),
            };
            any = true;
            let Sent { then, priority, .. } = asking.left.remove(n);
            self.landed(direction, priority);
            match (then, &self.spreaders) {
                (Then::Nothing, _) => {}
                (Then::Give(slot), _) => self.ring.ended(slot, &said),
                (Then::Spread(entry), Some(both)) if said.is_ok() => both[direction as usize].add(entry),
                (Then::Spread(entry), _) => {
                    let _ = entry.done.set(said);
                    entry.slot.into_iter().for_each(|slot| self.ring.lose(slot));
                }
            }
        }
        any
    }

    /// The stream of the next chunk in this direction.
    pub(super) fn stream(&self, direction: Direction, priority: Priority) -> &Stream {
        let Lane { streams, urgent, turn, .. } = &self.lanes[direction as usize];
        if priority == Priority::Foreground {
            return urgent;
        }
        // Relaxed: only to spread chunks over streams.
        let turn = turn.fetch_add(1, Ordering::Relaxed);
        &streams[turn / RUNS[direction as usize] % streams.len()]
    }

    /// All streams.
    pub(super) fn streams(&self) -> impl Iterator<Item = &Stream> {
        let lanes = self.lanes.iter().flat_map(|lane| lane.streams.iter().chain([&lane.urgent]));
        lanes.chain(self.spreaders.iter().flatten().map(Spreader::stream))
    }

    /// There may be no work left: then nothing of the pool stays in use.
    pub(super) fn rest(&self) {
        if !self.scheduler.has_work(true) {
            self.segments.rest();
        }
    }

    /// Lets all that is on the device go on. Whether anything has changed.
    pub(super) fn advance(&self) -> bool {
        let landed = self.land(Direction::Up) | self.land(Direction::Down);
        let spreaders = self.spreaders.iter().flatten();
        spreaders.fold(landed, |changed, spreader| spreader.advance(&self.ring) | changed)
    }

    // --- submitting --------------------------------------------------------------------------------------------------

    /// Submits copies of a chunk. `written`: the length that its segment has when they are complete. After an error the
    /// segment, or what is lent, returns by itself when the device is known to be done with it.
    ///
    /// # Safety
    /// The transfers stay within the segment, or what is lent, and within `memories`.
    pub(super) unsafe fn submit(
        &self,
        stream: &Stream,
        host: Host,
        transfers: &[Transfer],
        memories: Arc<dyn Retain>,
        written: Option<usize>,
    ) -> std::result::Result<Flight, Refusal> {
        let timeline = stream.timeline();
        let ticket = Ticket { timeline: timeline.clone(), seq: NOT_YET };
        let begin = |resource| timeline.begin(resource, Some(memories)).map_err(|(error, _)| error);
        let (submission, mut flight) = match host {
            Host::Segment(buf) => {
                let submission = begin(Lend::lend(&buf, KEY))?;
                (submission, Flight::Segment(InFlight::new(ticket, buf, written)))
            }
            Host::Lent(lent) => {
                let back = lent.back.clone();
                (begin(Resource::Object(Arc::new(lent)))?, Flight::Lent(ticket, back))
            }
        };
        // SAFETY: the entry keeps the host's and the device's memory until an event after this call is seen complete.
        let (seq, said) = unsafe { self.copy_all(stream, transfers, submission) };
        match &mut flight {
            Flight::Segment(flight) => flight.submitted(seq),
            Flight::Lent(ticket, _) => ticket.seq = seq,
        }
        said.map_err(|error| Refusal { error, ticket: Some(flight.ticket().clone()) }).map(|()| flight)
    }

    /// # Safety
    /// The submission keeps all that the transfers name.
    unsafe fn copy_all(
        &self,
        stream: &Stream,
        transfers: &[Transfer],
        submission: Submission<'_>,
    ) -> (u64, Result<()>) {
        let context = self.device.context();
        let mut failed = None;
        let mut rest = transfers;
        while !rest.is_empty() {
            // Copies of one call have no order, so those that write the same bytes are in different calls.
            let count = first_in_the_way(rest).max(1);
            let (call, later) = rest.split_at(count);
            // SAFETY: the caller's promise.
            unsafe {
                context.driver().copy_many(stream.timeline().stream(), call, &mut |_, error| {
                    failed.get_or_insert(error);
                });
            }
            rest = later;
        }
        let seq = submission.commit();
        match failed {
            Some(error) => (seq, context.noting(Err(error))),
            None => {
                context.count_copied(transfers);
                (seq, Ok(()))
            }
        }
    }
}

/// A chunk's copies in flight.
pub(super) enum Flight {
    Segment(InFlight<PinnedBuf>),
    /// With what tells that what was lent is back.
    Lent(Ticket, Arc<OnceLock<()>>),
}

impl Flight {
    pub(super) fn ticket(&self) -> &Ticket {
        match self {
            Self::Segment(flight) => flight.ticket(),
            Self::Lent(ticket, _) => ticket,
        }
    }

    /// Whether it is seen to be complete, or will never be. Asks no driver: the engine does so for all copies.
    pub(super) fn is_over(&self) -> bool {
        match self {
            Self::Segment(flight) => flight.is_seen_done() != Ok(false),
            Self::Lent(ticket, back) => match ticket.timeline.is_complete(ticket.seq) {
                // The thread that saw the copies complete gives the buffers back a moment later.
                Ok(complete) => complete && back.get().is_some(),
                Err(_) => true,
            },
        }
    }

    /// After [`is_over`](Self::is_over): how the copy ended, and the segment.
    pub(super) fn end(self) -> Result<Option<PinnedBuf>> {
        match self {
            Self::Segment(flight) => match flight.is_seen_done()? {
                true => flight.wait().map(Some),
                false => Err(Error::Internal("a copy's end was asked for before it was there")),
            },
            Self::Lent(ticket, _) => ticket.timeline.is_complete(ticket.seq).map(|_| None),
        }
    }
}

/// The driver has refused a copy. `ticket`: what was submitted with it, if anything was.
pub(super) struct Refusal {
    pub(super) error: Error,
    pub(super) ticket: Option<Ticket>,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self { error, ticket: None }
    }
}
