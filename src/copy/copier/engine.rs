//! What the workers of a copier share, and how they submit copies.
//!
//! At most [`depth`](Settings) bulk copies are in flight in each direction, and one beside a
//! foreground copy, so that others have room. A [rate](Rate) may hold them back, too.
//!
//! Two locks say what is to be done: the scheduler's, and under it a job's. All others are short,
//! and none is taken under another. Who asks the driver for completions tries a lock for that.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::device_ring::{Ring, Slot};
use super::rate::Rate;
use super::scheduler::Scheduler;
use super::segments::Segments;
use super::spreader::{Entry, Spreader};
use super::types::{Counters, Direction, Kind, Priority, Settings};
use crate::buffer::{InFlight, Lend, PinnedBuf};
use crate::central::Segment;
use crate::copy::NOT_YET;
use crate::device::handle::Device;
use crate::device::{DevicePtr, SpreadWay, Transfer};
use crate::error::{Error, Result};
use crate::foreign;
use crate::locks::Mutex;
use crate::pool::Pool;
use crate::sealed::KEY;
use crate::stream::Stream;
use crate::stream::hold::{Resource, Retain};
use crate::stream::timeline::Ticket;

/// Chunks that follow each other on a stream, up and down. The device loses some microseconds
/// between two streams, most on the way down; but a stream that is never empty holds up others.
const RUNS: [usize; 2] = [2, 8];

/// The streams of one direction, which chunks use in rotation, and the copies in flight there.
struct Lane {
    streams: Vec<Stream>,
    /// For the foreground.
    urgent: Stream,
    turn: AtomicUsize,
    flying: Mutex<Flying>,
    /// Held by the thread that asks which copies are complete, and takes them out. Any worker may:
    /// the one that submitted a copy may be busy filling its next segment.
    asks: Mutex<()>,
}

#[derive(Default)]
struct Flying {
    /// Bulk copies that are in flight or about to be submitted.
    bulk: usize,
    sent: Vec<Sent>,
}

/// A copy that was submitted, and what follows it on the device.
pub(super) struct Sent {
    pub(super) ticket: Ticket,
    /// The slot that is free when the copy is complete; and what the kernel spreads then.
    pub(super) slot: Option<Slot>,
    pub(super) entry: Option<Entry>,
    pub(super) priority: Priority,
}

pub(super) struct Engine {
    pub(super) device: Device,
    pub(super) settings: Settings,
    pub(super) scheduler: Scheduler,
    pub(super) ring: Ring,
    /// One for each direction. `None`: the device has no kernels.
    pub(super) spreaders: Option<[Spreader; 2]>,
    pub(super) counters: Arc<Counters>,
    /// Foreground copies in flight. Relaxed throughout: a hint for copies that come later.
    urgent: AtomicUsize,
    rate: Rate,
    lanes: [Lane; 2],
    pub(super) segments: Segments,
}

impl Engine {
    pub(super) fn new(pool: Pool, device: Device, settings: Settings) -> Result<Arc<Self>> {
        let lane = || -> Result<Lane> {
            let streams = (0..settings.depth).map(|_| device.stream()).collect::<Result<_>>()?;
            let urgent = device.urgent_stream()?;
            let (turn, flying, asks) = (AtomicUsize::new(0), Mutex::default(), Mutex::new(()));
            Ok(Lane { streams, urgent, turn, flying, asks })
        };
        let lanes = [lane()?, lane()?];
        let spreaders = if settings.ring == 0 { None } else { Self::spreaders(&device)? };
        Ok(Arc::new(Self {
            ring: Ring::new(settings.segment, settings.ring),
            device,
            settings,
            scheduler: Scheduler::default(),
            spreaders,
            counters: Arc::default(),
            urgent: AtomicUsize::new(0),
            rate: Rate::new(settings.rate),
            lanes,
            segments: Segments::new(pool, &settings),
        }))
    }

    /// The spreaders, if the device has the kernels.
    fn spreaders(device: &Device) -> Result<Option<[Spreader; 2]>> {
        let (context, loading) = (device.context(), device.context().clone());
        // On the region thread: loading code may make the driver wait for the process's work.
        match context.worker().call(move || loading.driver().load_spread()) {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(error) if error.is_device_lost() => return Err(error),
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

    pub(super) fn spreader(&self, direction: Direction) -> Option<&Spreader> {
        self.spreaders.as_ref().map(|both| &both[direction as usize])
    }

    /// Whether chunks go without the ring: launches take long, or there are no kernels.
    pub(super) fn is_slow(&self, direction: Direction) -> bool {
        self.spreader(direction).is_none_or(Spreader::is_slow)
    }

    // --- permits ---------------------------------------------------------------------------------

    /// Takes a permit to submit a chunk's copy. After `true`, call [`sent`](Self::sent)
    /// or [`landed`](Self::landed).
    pub(super) fn may_send(&self, direction: Direction, priority: Priority, bytes: usize) -> bool {
        if priority == Priority::Foreground {
            self.urgent.fetch_add(1, Ordering::Relaxed);
            return true;
        }
        let depth = if self.urgent.load(Ordering::Relaxed) > 0 { 1 } else { self.settings.depth };
        let reserve = || {
            let mut flying = self.lanes[direction as usize].flying.lock();
            let room = flying.bulk < depth;
            flying.bulk += usize::from(room);
            room
        };
        if !(reserve() || self.land(direction) && reserve()) {
            return false;
        }
        let is_due = self.rate.is_due(bytes);
        if !is_due {
            self.landed(direction, priority);
        }
        is_due
    }

    /// A copy was submitted.
    pub(super) fn sent(&self, direction: Direction, sent: Sent) {
        self.lanes[direction as usize].flying.lock().sent.push(sent);
    }

    /// A copy is in flight no more, or was not submitted: gives its permit back.
    pub(super) fn landed(&self, direction: Direction, priority: Priority) {
        match priority {
            Priority::Bulk => self.lanes[direction as usize].flying.lock().bulk -= 1,
            Priority::Foreground => _ = self.urgent.fetch_sub(1, Ordering::Relaxed),
        }
    }

    /// Finds out which copies of chunks are complete, and does what follows. Whether any was.
    fn land(&self, direction: Direction) -> bool {
        let lane = &self.lanes[direction as usize];
        let Some(_alone) = lane.asks.try_lock() else { return false };
        let (mut any, mut n) = (false, 0);
        loop {
            // Asked without the lock: what follows from a completion may take long.
            let next = lane.flying.lock().sent.get(n).map(|sent| sent.ticket.clone());
            let Some(ticket) = next else { return any };
            let said = match ticket.timeline.poll_complete(ticket.seq) {
                Ok(false) => {
                    n += 1;
                    continue;
                }
                Ok(true) => Ok(()),
                Err(error) => Err(error),
            };
            any = true;
            let Sent { slot, entry, priority, .. } = lane.flying.lock().sent.remove(n);
            self.landed(direction, priority);
            slot.into_iter().for_each(|slot| self.ring.give(slot, said.is_err()));
            match (entry, self.spreader(direction)) {
                (Some(entry), Some(spreader)) if said.is_ok() => spreader.add(entry),
                (entry, _) => entry.into_iter().for_each(|entry| entry.end(&said, &self.ring)),
            }
        }
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
        lanes.chain(self.spreaders.iter().flatten().map(|spreader| &spreader.stream))
    }

    /// Gives free segments back to the pool if no job has a chunk to take.
    pub(super) fn rest(&self) {
        if self.scheduler.first(Direction::Up, Kind::Blocking).is_none() {
            self.segments.rest();
        }
    }

    /// Lets all that is on the device go on. Whether anything has changed.
    pub(super) fn advance(&self) -> bool {
        let landed = self.land(Direction::Up) | self.land(Direction::Down);
        let spreaders = self.spreaders.iter().flatten();
        spreaders.fold(landed, |changed, spreader| spreader.advance(&self.ring, &self.counters) | changed)
    }

    // --- submitting ------------------------------------------------------------------------------

    /// Submits copies of a chunk. `buf`: its segment, or one for its table, and `written`, its
    /// length afterwards. `lent`: what keeps the bytes of a chunk in place. The flight comes also
    /// after an error of the driver; an error here says that nothing was submitted.
    ///
    /// # Safety
    /// The transfers stay within `buf` and what is lent, and within `memories`.
    pub(super) unsafe fn submit(
        &self,
        stream: &Stream,
        (buf, written): (Option<PinnedBuf>, Option<usize>),
        lent: Option<Vec<Arc<dyn Retain>>>,
        transfers: &mut [Transfer],
        memories: Arc<dyn Retain>,
    ) -> Result<(Flight, Result<()>)> {
        let timeline = stream.timeline();
        let mut ticket = Ticket { timeline: timeline.clone(), seq: NOT_YET };
        let (resource, buf, back) = match lent {
            None => (buf.as_ref().map_or(Resource::Nothing, |buf| Lend::lend(buf, KEY)), buf, None),
            // As host memory: a device that dies may still write to it.
            Some(mut all) => {
                // Nothing asks for the kernel's table any more.
                if let Some(table) = buf {
                    all.push(Lend::lend(&table, KEY).shared());
                    Lend::abandon(table, KEY);
                }
                let back = Arc::new(OnceLock::new());
                (Resource::Object(Arc::new(Lent { all, back: back.clone() })), None, Some(back))
            }
        };
        let submission = timeline.begin(resource, Some(memories))?;
        let mut buf = buf.map(|buf| InFlight::new(ticket.clone(), buf, written));
        let (context, mut failed) = (self.device.context(), None);
        // Copies of one call have no order: two that write the same bytes need two calls.
        transfers.sort_unstable_by_key(|transfer| target(transfer).start);
        for call in transfers.chunk_by(|one, next| target(one).end <= target(next).start) {
            let mut fails = |_, error| _ = failed.get_or_insert(error);
            // SAFETY: the entry keeps the host's and the device's memory until an event after this
            // call is seen complete.
            unsafe { context.driver().copy_many(timeline.stream(), call, &mut fails) };
        }
        let seq = submission.commit();
        buf.iter_mut().for_each(|buf| buf.submitted(seq));
        ticket.seq = seq;
        let said = failed.map_or(Ok(()), |error| context.noting(Err(error)));
        let said = said.inspect(|()| context.count_copied(&*transfers));
        Ok((Flight { ticket, buf, back }, said))
    }
}

/// Which bytes of the device a copy writes.
fn target(transfer: &Transfer) -> Range<u64> {
    match *transfer {
        Transfer::Upload { dst: DevicePtr(start), len, .. } => start..start.saturating_add(len as u64),
        _ => 0..0,
    }
}

/// What copies of a chunk in place use. Its drop gives its shares back, and then says so.
struct Lent {
    all: Vec<Arc<dyn Retain>>,
    back: Arc<OnceLock<()>>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.all.clear();
        let _ = self.back.set(());
    }
}

impl Retain for Lent {
    fn for_each_segment(&self, visit: &mut dyn FnMut(&Segment)) -> bool {
        self.all.for_each_segment(visit)
    }
}

/// A chunk's copies in flight.
pub(super) struct Flight {
    pub(super) ticket: Ticket,
    buf: Option<InFlight<PinnedBuf>>,
    /// Set when what was lent is back, a moment after the copies were seen complete.
    back: Option<Arc<OnceLock<()>>>,
}

impl Flight {
    /// Whether it is seen complete, or never will be. The engine asks the driver for all copies.
    pub(super) fn is_over(&self) -> bool {
        let is_back = || self.back.as_ref().is_none_or(|back| back.get().is_some());
        self.ticket.timeline.is_complete(self.ticket.seq).map_or(true, |complete| complete && is_back())
    }

    /// After [`is_over`](Self::is_over): how the copy ended, and the segment.
    pub(super) fn end(self) -> Result<Option<PinnedBuf>> {
        match self.ticket.timeline.is_complete(self.ticket.seq)? {
            true => self.buf.map(InFlight::wait).transpose(),
            false => Err(Error::Internal("a copy's end was asked for before it was there")),
        }
    }
}
