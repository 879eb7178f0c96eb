//! The report on buffers that have been out for long: which, since when, and what they wait for.
//!
//! A pool is exhausted because it is too small, or because buffers are kept for too long. The report tells which. For
//! each buffer that is out it puts together what three places know:
//!
//! - the central pool: that the segment is out, in which state, and since when ([`super::ledger`]);
//! - the streams: on which of them it is in flight, under which sequence number, and whether the event of that sequence
//!   number is recorded;
//! - the ledger's entry, if the checkout was entered: tag and call site.
//!
//! The places are read one after the other, and no two of their locks are held at once. So a buffer that is returned or
//! completes between two readings may still be listed, or be listed without its stream.

use std::cmp::Reverse;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::central::{CentralPool, LongWait, OutSegment};
use crate::device::handle::Device;
use crate::freelist::state;
pub use crate::stream::timeline::EventState;

/// A wait that has lasted for so long is reported.
pub(crate) const LONG_WAIT: Duration = Duration::from_secs(5);
/// The shortest time between two reports that waits make.
pub(crate) const REPORT_INTERVAL: Duration = Duration::from_secs(60);
/// Such a report is about buffers that have been out for as long as the wait, or for this long.
const REPORTED_AGE: Duration = Duration::from_secs(1);
/// Buffers that such a report lists at most.
const BUFFERS_LISTED: usize = 8;

/// The state of a buffer that is out.
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow).build()?;
/// use pinpool::telemetry::BufferState;
///
/// let buf = pool.checkout(4096)?;
/// let stuck = pool.stuck(std::time::Duration::ZERO);
/// assert_eq!(stuck[0].state, BufferState::CheckedOut);
/// # drop(buf);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BufferState {
    /// The program has it: as a `PinnedBuf`, a token, or a stream-ready buffer that was free. A buffer that is shared
    /// by `Arc` and lent to a device is in this state, and has entries in [`awaited`](StuckBuffer::awaited).
    CheckedOut,
    /// A device may still use it, and the program has the handle of the copy or hold.
    InFlight,
    /// A device may still use it, and its handle was dropped: it returns by itself when the device is done.
    Returning,
    /// The device is done with it; its handle has been neither waited for nor dropped.
    Completed,
    /// A stream-ready buffer claimed it for later work on the same stream, before the device was done with it.
    Claimed,
    /// It is never used again, since the device cannot be shown to be done with it.
    Quarantined,
}

impl BufferState {
    /// The state as one word, as in events: `checked_out`, `in_flight`, `returning`, `completed`, `claimed`,
    /// `quarantined`.
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

/// The place on a stream that a buffer waits for. Part of [`StuckBuffer`].
///
/// ```
/// use pinpool::telemetry::StuckBuffer;
///
/// fn show(buffer: &StuckBuffer) {
///     for at in &buffer.awaited {
///         let behind = at.seq.saturating_sub(at.completed);
///         println!("stream {} of {} is {behind} behind: {:?}", at.stream, at.device, at.event);
///     }
/// }
/// ```
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
///
/// ```
/// use pinpool::telemetry::StuckBuffer;
///
/// fn show(buffer: &StuckBuffer) -> String {
///     let (age, from) = (buffer.age, buffer.site.map_or("unknown", |site| site.file()));
///     format!("{} bytes, {} for {age:?}, tag {:?}, from {from}", buffer.granted, buffer.state.name(), buffer.tag)
/// }
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct StuckBuffer {
    /// Its descriptor and since when it is out. By these a sampler recognises a checkout that it has logged, and tells
    /// it from the next checkout of the same descriptor.
    pub(super) known_by: (usize, Instant),
    /// Bytes that it takes of the pool, rounding included.
    pub granted: usize,
    /// Bytes that were asked for, if the pool [recorded](crate::PoolBuilder::track_checkouts) its checkout.
    pub requested: Option<usize>,
    /// How long it has been out, exactly or at least.
    pub age: Duration,
    /// Whether `age` counts from the checkout. If not, it counts from the first look that saw the buffer out.
    pub exact: bool,
    /// Its state.
    pub state: BufferState,
    /// What it waits for, on each stream where it is in flight: none for a buffer that the program has, several for a
    /// shared buffer that several streams have.
    pub awaited: Vec<Awaited>,
    /// Whether its request said that it is going to be held for long
    /// ([`Request::long_lived`](crate::Request::long_lived)): then no sampler counts or logs it.
    pub long_lived: bool,
    /// The tag of its request ([`Request::tag`](crate::Request::tag)), if its checkout was recorded.
    pub tag: Option<&'static str>,
    /// The place in the program that checked it out, if its checkout was recorded.
    pub site: Option<&'static Location<'static>>,
}

impl fmt::Debug for StuckBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { known_by: _, granted, requested, age, exact, state, awaited, long_lived, tag, site } =
            self;
        f.debug_struct("StuckBuffer")
            .field("granted", granted)
            .field("requested", requested)
            .field("age", age)
            .field("exact", exact)
            .field("state", state)
            .field("awaited", awaited)
            .field("long_lived", long_lived)
            .field("tag", tag)
            .field("site", &site.map(ToString::to_string))
            .finish()
    }
}

/// All buffers that have been out for at least `threshold`, oldest first.
pub(crate) fn find(threshold: Duration, central: &CentralPool, devices: &[Device]) -> Vec<StuckBuffer> {
    let mut out: Vec<OutSegment> = central.out_for(threshold);
    if out.is_empty() {
        return Vec::new();
    }
    // Sorted as `OutSegment`, which is smaller than `StuckBuffer`: the oldest first, and of these the largest.
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
    // A stable sort: the entries of one buffer stay in the order of the streams.
    awaited.sort_by_key(|(descriptor, _)| *descriptor);
    // A batch that copies several parts of a buffer has an entry for each part.
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
            long_lived: entry.origin.tag.long_lived,
            tag: entry.origin.tag.name,
            site: entry.origin.site,
        }
    };
    out.into_iter().map(buffer).collect()
}

/// Logs the buffers that are out, after a wait for memory has timed out, or while one lasts for `long`.
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
    // Those that went out later kept the request from nothing until then. Ages that are not exact may be longer.
    all.retain(|buffer| !buffer.exact || buffer.age >= waited.min(REPORTED_AGE));
    let bytes: usize = all.iter().map(|buffer| buffer.granted).sum();
    let what = if long.is_some() { "lasts for long" } else { "timed out" };
    crate::foreign::warn!(
        target: "pinpool::pool::stuck",
        pool,
        waited_seconds = waited.as_secs_f64(),
        requested = long.map(|wait| wait.bytes),
        requested_buffers = long.map(|wait| wait.buffers),
        waiting = long.map(|wait| wait.waiting),
        growth = long.and_then(|wait| wait.growth.as_ref()).map(tracing::field::display),
        buffers = all.len(),
        bytes,
        "a wait for memory {what}; the buffers that have been out for longest follow"
    );
    for buffer in all.iter().take(BUFFERS_LISTED) {
        emit(pool, buffer);
    }
}

/// What an event says of a buffer of which neither tag nor site is known.
const UNTRACKED: &str = "its checkout was not recorded: PoolBuilder::track_checkouts(true) records the tag and the place \
                         of each";

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
        device = at.map(|at| &*at.device),
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
