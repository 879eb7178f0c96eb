//! The report on buffers that have been out for long: which, since when, and what they wait for.
//!
//! A pool that runs dry is either too small or somebody keeps what he has. The report tells which: for each buffer that
//! is out it puts together what three places know, one after the other and without holding two of their locks at once:
//!
//! - the central pool: that the segment is out, in which state, and since when ([`super::ledger`]);
//! - the streams: on which of them it is in flight, under which sequence number, and whether that sequence number's
//!   event is recorded;
//! - whoever asked for it: tag and call site, where the checkout was entered.
//!
//! What is returned or completes between the looks may still be listed, or be listed without its stream.

use std::cmp::Reverse;
use std::panic::Location;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::central::{CentralPool, OutSegment};
use crate::device::handle::Device;
use crate::freelist::state;
pub use crate::stream::timeline::EventState;

/// Reports that nobody asked for come at most so often.
pub(crate) const REPORT_INTERVAL: Duration = Duration::from_secs(60);
/// Buffers that such a report lists at most.
const BUFFERS_LISTED: usize = 8;

/// What has become of a buffer that is out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BufferState {
    /// In somebody's hands: a `PinnedBuf`, a token, a stream-ready buffer that was free. One that is shared by `Arc`
    /// and lent to a device says so by [`awaited`](StuckBuffer::awaited).
    CheckedOut,
    /// A device may still use it, and somebody has its handle.
    InFlight,
    /// A device may still use it. Its handle was dropped: it returns by itself when the device is done.
    Returning,
    /// The device is done; the handle has not been waited for, nor dropped.
    Completed,
    /// Claimed for later work on the same stream before the device was done.
    Claimed,
    /// Never to be reused.
    Quarantined,
}

impl BufferState {
    /// The state in words of one word each, as events and metrics have it.
    #[must_use]
    pub fn name(self) -> &'static str {
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

/// The place on a stream that a buffer waits for.
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
    /// What has become of the event that covers the sequence number.
    pub event: EventState,
}

/// A buffer that has been out for long.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StuckBuffer {
    /// Its descriptor and since when it is out, so that one that was reported is known again, and apart from the
    /// descriptor's next.
    pub(super) known_by: (usize, Instant),
    /// Bytes that it takes of the pool.
    pub granted: usize,
    /// Bytes that were asked for, if its checkout was entered.
    pub requested: Option<usize>,
    /// How long it has been out: exactly, or at least so long.
    pub age: Duration,
    /// Whether `age` counts from the checkout itself, and not from the first look that saw it out.
    pub exact: bool,
    /// What has become of it.
    pub state: BufferState,
    /// What it waits for, on each stream where it is in flight: none for what is in somebody's hands, several for a
    /// hold over several streams. A copy that was pushed to a [`CopyQueue`](crate::CopyQueue) and is not submitted yet
    /// has none, since it is on no stream; then its queue's [`outstanding`](crate::QueueStats::outstanding) says more.
    pub awaited: Vec<Awaited>,
    /// The tag that it was asked for with ([`Request::tag`](crate::Request::tag)), if its checkout was entered.
    pub tag: Option<&'static str>,
    /// Where it was asked for, if its checkout was entered.
    pub site: Option<&'static Location<'static>>,
}

/// All buffers that have been out for at least so long, oldest first.
pub(crate) fn find<'a>(
    threshold: Duration,
    centrals: impl Iterator<Item = &'a Arc<CentralPool>>,
    devices: &[Device],
) -> Vec<StuckBuffer> {
    let mut out: Vec<OutSegment> = centrals.flat_map(|central| central.out_for(threshold)).collect();
    if out.is_empty() {
        return Vec::new();
    }
    // While they are small: the oldest first, and of these the largest.
    out.sort_by_cached_key(|segment| Reverse((segment.age, segment.granted)));
    let mut awaited: Vec<(usize, Awaited)> = Vec::new();
    for device in devices {
        let name: Arc<str> = device.name().into();
        for timeline in device.listing().known() {
            let (stream, completed) = (timeline.number(), timeline.look().completed_seq);
            timeline.for_each_kept(|descriptor, seq, event| {
                awaited.push((descriptor, Awaited { device: name.clone(), stream, seq, completed, event }));
            });
        }
    }
    // Those of one buffer, of several streams, stay in the order of the streams.
    awaited.sort_by_key(|(descriptor, _)| *descriptor);
    // A buffer of which a batch copies many parts is in it as often.
    awaited.dedup_by(|(descriptor, next), (other, last)| {
        descriptor == other
            && (next.stream, next.seq) == (last.stream, last.seq)
            && Arc::ptr_eq(&next.device, &last.device)
    });
    let buffer = |segment: OutSegment| {
        let OutSegment { descriptor, state, granted, age, entry } = segment;
        let from = awaited.partition_point(|(of, _)| *of < descriptor);
        let mine = awaited[from..].iter().take_while(|(of, _)| *of == descriptor);
        StuckBuffer {
            known_by: (descriptor, entry.since),
            granted,
            requested: entry.len,
            age,
            exact: entry.exact,
            state: BufferState::of(state),
            awaited: mine.map(|(_, awaited)| awaited.clone()).collect(),
            tag: entry.origin.tag,
            site: entry.origin.site,
        }
    };
    out.into_iter().map(buffer).collect()
}

/// Logs what is out, since a wait for memory has timed out.
pub(crate) fn report<'a>(
    pool: &str,
    waited: Duration,
    centrals: impl Iterator<Item = &'a Arc<CentralPool>>,
    devices: &[Device],
) {
    // The look is not for nobody.
    if !crate::foreign::listens(tracing::Level::WARN) {
        return;
    }
    let all = find(Duration::ZERO, centrals, devices);
    let bytes: usize = all.iter().map(|buffer| buffer.granted).sum();
    crate::foreign::warn!(
        target: "pinpool::pool::stuck", pool, waited_seconds = waited.as_secs_f64(), buffers = all.len(), bytes,
        "a wait for memory timed out; the buffers that have been out for longest follow"
    );
    for buffer in all.iter().take(BUFFERS_LISTED) {
        emit(pool, buffer);
    }
}

/// One buffer of a report.
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
        device = at.map(|at| &*at.device),
        stream = at.map(|at| at.stream),
        seq = at.map(|at| at.seq),
        completed = at.map(|at| at.completed),
        event = at.map(|at| at.event.name()),
        tag = buffer.tag,
        site = buffer.site.map(tracing::field::display),
        "a buffer is out"
    );
}
