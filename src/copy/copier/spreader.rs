//! Kernels that move bytes between the ring's slots and their places on the device.
//!
//! There is one spreader for each direction. A chunk in a slot joins the list of waiting chunks.
//! At most one kernel of a spreader is in flight, and each launch takes all chunks that wait:
//! beside other work that fills the device a launch waits for some of it to end, and a launch for
//! each chunk would wait as often. Workers call [`Spreader::advance`] in their loop.
//!
//! Where launches take long all the same, the device is busy for long, and chunks go without the
//! ring for a while ([`Spreader::is_slow`], which `route` asks).

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::device_ring::{Ring, Slot};
use super::types::Counters;
use crate::device::memory::Allocation;
use crate::device::{SPREAD_RUNS, SpreadRun, SpreadWay};
use crate::error::{Error, Result};
use crate::locks::Mutex;
use crate::stream::Stream;
use crate::stream::hold::{Resource, Retain};
use crate::stream::timeline::Ticket;

/// A launch that takes so long has waited for other work.
const SLOW: Duration = Duration::from_millis(4);
/// For how many times as long chunks then go without the ring.
const AVOID: u32 = 8;

/// A chunk's bytes in a slot, and the places on the device that they belong to.
pub(super) struct Entry {
    pub(super) run: SpreadRun,
    pub(super) memories: Arc<dyn Retain>,
    pub(super) ring: Arc<Allocation>,
    /// Given back to the ring when the kernel is complete, for a chunk that is there then.
    pub(super) slot: Option<Slot>,
    pub(super) done: Arc<OnceLock<Result<()>>>,
}

impl Entry {
    /// The kernel is complete, or was never submitted, or will never be known to be complete.
    pub(super) fn end(self, said: &Result<()>, ring: &Ring) {
        self.slot.into_iter().for_each(|slot| ring.give(slot, said.is_err()));
        let _ = self.done.set(said.clone());
    }
}

struct Launch {
    ticket: Ticket,
    entries: Vec<Entry>,
    since: Instant,
}

#[derive(Default)]
struct SpreadState {
    waiting: VecDeque<Entry>,
    flying: Option<Launch>,
    /// Until when the ring is avoided.
    avoid: Option<Instant>,
}

pub(super) struct Spreader {
    way: SpreadWay,
    pub(super) stream: Stream,
    state: Mutex<SpreadState>,
    /// Who advances has this lock. Others do not wait for it.
    advances: Mutex<()>,
}

impl Spreader {
    /// `stream`: one of the crate's own, for the kernels alone.
    pub(super) fn new(way: SpreadWay, stream: Stream) -> Self {
        Self { way, stream, state: Mutex::default(), advances: Mutex::new(()) }
    }

    /// A chunk waits for the next launch.
    pub(super) fn add(&self, entry: Entry) {
        self.state.lock().waiting.push_back(entry);
    }

    /// Whether launches take so long that chunks are copied faster without.
    pub(super) fn is_slow(&self) -> bool {
        let state = self.state.lock();
        state.flying.as_ref().is_some_and(|launch| launch.since.elapsed() > SLOW)
            || state.avoid.is_some_and(|until| Instant::now() < until)
    }

    /// Does what can be done now. Whether anything has changed.
    pub(super) fn advance(&self, ring: &Ring, counters: &Counters) -> bool {
        let Some(_alone) = self.advances.try_lock() else { return false };
        let flying = self.state.lock().flying.as_ref().map(|launch| launch.ticket.clone());
        let changed = flying.is_some();
        if let Some(ticket) = flying {
            let said = match ticket.timeline.poll_complete(ticket.seq) {
                Ok(false) => return false,
                Ok(true) => Ok(()),
                Err(error) => Err(error),
            };
            let mut state = self.state.lock();
            let landed = state.flying.take();
            let took = landed.as_ref().map_or(Duration::ZERO, |launch| launch.since.elapsed());
            if took > SLOW {
                state.avoid = Instant::now().checked_add(took * AVOID);
            }
            drop(state);
            let entries = landed.into_iter().flat_map(|launch| launch.entries);
            entries.for_each(|entry| entry.end(&said, ring));
        }
        let mut state = self.state.lock();
        let count = state.waiting.len().min(SPREAD_RUNS);
        let entries: Vec<Entry> = state.waiting.drain(..count).collect();
        drop(state);
        if entries.is_empty() {
            return changed;
        }
        match self.launch(entries, counters) {
            Ok(launch) => self.state.lock().flying = Some(launch),
            Err((entries, error)) => {
                let said = Err(error);
                entries.into_iter().for_each(|entry| entry.end(&said, ring));
            }
        }
        true
    }

    /// Starts a kernel for these. If nothing was submitted, the error brings the entries back.
    fn launch(
        &self,
        entries: Vec<Entry>,
        counters: &Counters,
    ) -> std::result::Result<Launch, (Vec<Entry>, Error)> {
        let timeline = self.stream.timeline();
        let memories: Vec<_> = entries.iter().map(|entry| entry.memories.clone()).collect();
        let keep = Resource::Object(Arc::new(memories));
        let ring = entries.first().map(|entry| entry.ring.clone() as Arc<dyn Retain>);
        let submission = match timeline.begin(keep, ring) {
            Ok(submission) => submission,
            Err(error) => return Err((entries, error)),
        };
        let runs: Vec<SpreadRun> = entries.iter().map(|entry| entry.run).collect();
        let context = timeline.context();
        // SAFETY: the entry on the timeline keeps the ring, and the memory that the rows name,
        // until an event after this call is seen complete; the slots are not given back before. The
        // tables' copies were seen complete. The kernels were loaded before there was a spreader.
        let said = context.noting(unsafe { context.driver().spread(timeline.stream(), self.way, &runs) });
        let ticket = Ticket { timeline: timeline.clone(), seq: submission.commit() };
        let mut stats = counters.lock();
        stats.launches += 1;
        stats.launched_chunks += runs.len() as u64;
        drop(stats);
        if let Err(error) = said {
            // The kernel may run all the same: the slots are in use until a later event.
            for entry in &entries {
                let _ = entry.done.set(Err(error.clone()));
            }
        }
        Ok(Launch { ticket, entries, since: Instant::now() })
    }
}
