//! The report on buffers that have been out for long: which, since when, and what they wait for.
//!
//! It puts together what two places know: the central pool has the checkouts that were entered in
//! the ledger ([`super::ledger`]), with time, tag and call site, and the quarantined segments; the
//! streams have what is in flight, under which sequence number, whether its event is recorded, and
//! since when a look has known of it. Other buffers are in the statistics alone.
//!
//! The places are read one after the other. So a buffer that is returned or completes between two
//! readings may still be listed, or be listed without its stream.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::panic::Location;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::central::{CentralPool, LongWait, OutSegment};
use crate::device::handle::Device;
use crate::freelist::state;
pub use crate::stream::timeline::EventState;

/// A wait that has lasted for this long is reported.
pub(crate) const LONG_WAIT: Duration = Duration::from_secs(5);
/// The shortest time between two reports that waits make.
pub(crate) const REPORT_INTERVAL: Duration = Duration::from_secs(60);
/// A report that a wait makes is about buffers that have been out for as long as the wait, or for
/// this long.
const REPORTED_AGE: Duration = Duration::from_secs(1);
/// Buffers that a report lists at most.
const BUFFERS_LISTED: usize = 8;

/// The state of a buffer that is out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BufferState {
    /// The program has the buffer: as a `PinnedBuf`, or a stream-ready buffer that was free. A
    /// buffer that is shared by `Arc` and lent to a device is in this state, too, with entries in
    /// [`awaited`](StuckBuffer::awaited).
    CheckedOut,
    /// A device may still use the buffer, and the program has the handle of the copy or hold.
    InFlight,
    /// A device may still use the buffer, whose handle was dropped: it returns by itself.
    Returning,
    /// The device is done with the buffer, whose handle has been neither waited for nor dropped.
    Completed,
    /// A stream-ready buffer claimed the memory for later work on its stream, before the device was
    /// done.
    Claimed,
    /// The memory is never used again, since the device cannot be shown to be done with it.
    Quarantined,
}

impl BufferState {
    /// The state as one word, as in events: `checked_out`, `in_flight`, `returning`, `completed`,
    /// `claimed`, `quarantined`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::CheckedOut => "checked_out",
            Self::InFlight => "in_flight",
            Self::Returning => "returning",
            Self::Completed => "completed",
            Self::Claimed => "claimed",
            Self::Quarantined => "quarantined",
        }
    }

    fn of(word: u16) -> Self {
        match word {
            state::FLIGHT => Self::InFlight,
            state::DETACHED => Self::Returning,
            state::COMPLETED => Self::Completed,
            state::CLAIMED => Self::Claimed,
            state::QUARANTINED => Self::Quarantined,
            _ => Self::CheckedOut,
        }
    }
}

/// The place on a stream that a buffer waits for. Part of [`StuckBuffer`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Awaited {
    /// The device's name.
    pub device: Arc<str>,
    /// The stream, by [`Stream::number`](crate::Stream::number).
    pub stream: u64,
    /// The sequence number under which the buffer is in flight there.
    pub seq: u64,
    /// The last sequence number of the stream that is known to be complete.
    pub completed: u64,
    /// The state of the event that covers the sequence number.
    pub event: EventState,
}

/// A buffer that has been out for long: see [`Pool::stuck`](crate::Pool::stuck).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StuckBuffer {
    /// Bytes that the buffer takes of the pool, rounding included.
    pub granted: usize,
    /// Bytes that were asked for, if that was [recorded](crate::PoolBuilder::track_checkouts).
    pub requested: Option<usize>,
    /// How long the buffer has been out, exactly or at least.
    pub age: Duration,
    /// Whether `age` counts from the checkout. If not, the checkout was not recorded, and `age`
    /// counts from when the pool found that the buffer was in flight, some milliseconds after it
    /// was submitted, or from when it was quarantined.
    pub exact: bool,
    /// The buffer's state.
    pub state: BufferState,
    /// What the buffer waits for, on each stream where it is in flight: none for a buffer that the
    /// program has, several for a shared one. Streams that have had it for less than the threshold
    /// may be missing.
    pub awaited: Vec<Awaited>,
    /// Whether the request said that the buffer is going to be held for long
    /// ([`Request::long_lived`](crate::Request::long_lived)): then no sampler counts or logs it.
    pub long_lived: bool,
    /// The tag of the request ([`Request::tag`](crate::Request::tag)), if it was recorded.
    pub tag: Option<&'static str>,
    /// The place in the program that checked the buffer out, if the checkout was recorded.
    pub site: Option<&'static Location<'static>>,
}

impl StuckBuffer {
    fn new(of: OutSegment, now: Instant, awaited: Vec<Awaited>) -> Self {
        let origin = of.entry.map(|entry| entry.origin).unwrap_or_default();
        Self {
            granted: of.granted,
            requested: of.entry.map(|entry| entry.len),
            age: now.saturating_duration_since(of.since),
            exact: of.entry.is_some(),
            state: BufferState::of(of.state),
            awaited,
            long_lived: origin.tag.long_lived,
            tag: origin.tag.name,
            site: origin.site,
        }
    }
}

/// A checkout's place in the order of a report, the oldest first and of these the largest: since
/// when the segment is out, its bytes, and its descriptor.
pub(super) type Place = (Instant, Reverse<usize>, usize);

/// The buffers that are known to have been out for at least `threshold`, by their places.
pub(super) fn find(
    threshold: Duration,
    central: &CentralPool,
    devices: &[Device],
) -> BTreeMap<Place, StuckBuffer> {
    if crate::os::forked() {
        return BTreeMap::new();
    }
    let now = Instant::now();
    // By descriptors. A batch that copies several parts of a buffer has an entry for each part.
    let found = central.out_for(threshold).into_iter();
    let mut out: BTreeMap<usize, (OutSegment, Vec<Awaited>)> =
        found.map(|segment| (segment.descriptor, (segment, Vec::new()))).collect();
    for device in devices {
        let name: Arc<str> = device.name().into();
        for timeline in device.listing().known() {
            let (stream, completed) = (timeline.number(), timeline.look().completed_seq);
            timeline.for_each_kept(|segment, seq, event, since| {
                if !std::ptr::eq(segment.central(), central) {
                    return;
                }
                let (word, since) = (segment.descriptor(), since.unwrap_or(now));
                let descriptor = std::ptr::from_ref(word).addr();
                let (known, awaited) = match out.entry(descriptor) {
                    Entry::Occupied(known) => known.into_mut(),
                    // Most are young, and the timeline is locked: nothing is done for them.
                    Entry::Vacant(_) if now.saturating_duration_since(since) < threshold => return,
                    Entry::Vacant(place) => {
                        let (state, granted) = (word.word().state(), segment.granted());
                        let found = OutSegment { descriptor, state, granted, since, entry: None };
                        place.insert((found, Vec::new()))
                    }
                };
                if known.entry.is_none() {
                    known.since = known.since.min(since);
                }
                let next = Awaited { device: name.clone(), stream, seq, completed, event };
                if awaited.last() != Some(&next) {
                    awaited.push(next);
                }
            });
        }
    }
    let placed = |(of, awaited): (OutSegment, _)| {
        ((of.since, Reverse(of.granted), of.descriptor), StuckBuffer::new(of, now, awaited))
    };
    out.into_values().map(placed).collect()
}

/// Logs the buffers that are out, after a timed-out wait for memory, or while one lasts `long`.
pub(crate) fn report(
    pool: &str,
    waited: Duration,
    long: Option<&LongWait>,
    central: &CentralPool,
    devices: &[Device],
) {
    // Without a subscriber that listens there is nothing to look for.
    if !crate::foreign::listens(tracing::Level::WARN) {
        return;
    }
    let mut all = find(Duration::ZERO, central, devices);
    // Buffers that went out later kept the request from nothing. Inexact ages may be longer.
    all.retain(|_, buffer| !buffer.exact || buffer.age >= waited.min(REPORTED_AGE));
    let bytes: usize = all.values().map(|buffer| buffer.granted).sum();
    let what = if long.is_some() { "lasts for long" } else { "timed out" };
    let growth = long.and_then(|wait| wait.growth.as_ref()).map(ToString::to_string);
    crate::foreign::warn!(
        target: "pinpool::pool::stuck",
        pool,
        waited_seconds = waited.as_secs_f64(),
        requested = long.map(|wait| wait.bytes),
        requested_buffers = long.map(|wait| wait.buffers),
        waiting = long.map(|wait| wait.waiting),
        growth = growth.map(tracing::field::display),
        buffers = all.len(),
        bytes,
        hint = (!central.config().track).then_some(UNTRACKED),
        "a wait for memory {what}; the buffers that are known to have been out for longest follow"
    );
    all.values().take(BUFFERS_LISTED).for_each(|buffer| emit(pool, buffer));
}

/// What an event says about buffers whose checkout was not recorded.
const UNTRACKED: &str = "checkouts that were not recorded are known only while they are in flight: \
                         PoolBuilder::track_checkouts(true) records each, with its tag and place";

/// Logs one buffer of a report.
pub(super) fn emit(pool: &str, buffer: &StuckBuffer) {
    let at = buffer.awaited.first();
    crate::foreign::warn!(
        target: "pinpool::pool::stuck",
        pool,
        state = buffer.state.name(),
        bytes = buffer.granted,
        requested = buffer.requested,
        age_seconds = buffer.age.as_secs_f64(),
        exact = buffer.exact,
        device = at.map(|at| at.device.to_string()),
        stream = at.map(|at| at.stream),
        seq = at.map(|at| at.seq),
        completed = at.map(|at| at.completed),
        event = at.map(|at| at.event.name()),
        long_lived = buffer.long_lived.then_some(true),
        tag = buffer.tag,
        site = buffer.site.map(tracing::field::display),
        hint = (buffer.tag.is_none() && buffer.site.is_none()).then_some(UNTRACKED),
        "a buffer is out"
    );
}
