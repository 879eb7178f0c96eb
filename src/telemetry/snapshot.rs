//! The snapshot: everything that a pool and its devices have counted, at one moment.
//!
//! [`Pool::stats`] is the short form, a few numbers that can be asked for at any time. [`Pool::snapshot`] adds what
//! dashboards want: the parts by size class, the devices with their streams, and histograms. Both only add up what was
//! counted where it happened ([`super::counters`]), and neither stops those who check out.
//!
//! # How exact it is
//!
//! When nobody moves, everything is exact. Under way, the sums hold all the same, since the parts are worked out from
//! one reading of each counter: `free + checked_out + in_flight + quarantined + cut = pinned + unpinned`, and the
//! classes' bytes out sum to those of the pool. Each single part may be off by what the calls moved that were made
//! while the snapshot was taken, some microseconds: a segment each, or, where a call refilled or emptied a thread's
//! list, as many as fit into it (at most 64).

use std::time::Duration;

use super::counters::{ErrorCounts, Histogram};
use crate::device::handle::Device;
use crate::error::Error;
use crate::pool::{Pool, PoolStats};
use crate::region::Pinning;
use crate::stream::Stream;
use crate::stream::timeline::Timeline;

/// Everything about a pool and its devices at one moment: see [`Pool::snapshot`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Snapshot {
    /// Bytes by state, and counts.
    pub pool: PoolStats,
    /// The parts by size class, smallest first, and last what has no class. Classes that were never used are left out.
    /// Where the pool has several stores (reserves, NUMA nodes), a class is the sum over them.
    pub classes: Vec<ClassStats>,
    /// The devices that the pool serves, with all their streams, whichever pool's buffers are on these.
    pub devices: Vec<DeviceStats>,
    /// How pinning has come along.
    pub pinning: Pinning,
    /// How long requests waited in the queue, from joining it to a grant, an error or giving up.
    pub waiting: Histogram,
    /// How long buffers were out, from the checkout until the segment was back, flights included. Of a sample: one in
    /// eight of the checkouts that nothing which threads have cached could serve, or all with
    /// [`track_checkouts`](crate::PoolBuilder::track_checkouts). What is served from caches is never timed, so threads
    /// that hit all the time are seen by their first checkouts only.
    pub holding: Histogram,
    /// How long flights took on the pool's devices, from submitting to being seen complete: see
    /// [`DeviceStats::flight`].
    pub flight: Histogram,
}

/// Segments of one size class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClassStats {
    /// Bytes from one segment to the next. `None`: segments without a class, which have pages of their own.
    pub stride: Option<usize>,
    /// Segments that were cut and can be checked out. (What has no class is cut when it is asked for.)
    pub free: u64,
    /// Of these, those that threads keep.
    pub cached: u64,
    /// Segments that are checked out, in flight or quarantined.
    pub out: u64,
    /// Bytes of these.
    pub out_bytes: usize,
    /// Segments given out since the pool was built.
    pub checkouts: u64,
    /// Segments that came back.
    pub returns: u64,
}

/// A device and what is in flight on it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeviceStats {
    /// Its name.
    pub name: String,
    /// What it was lost with, if it was.
    pub lost: Option<Error>,
    /// Bytes of callers' values that are registered with it.
    pub registered_bytes: usize,
    /// What its driver answered with an error, by what that means; matters of the moment among them.
    pub errors: ErrorCounts,
    /// Copies and holds submitted to all its streams, those that are no more included.
    pub submitted: u64,
    /// Those of them that are known to be complete.
    pub completed: u64,
    /// Bytes of uploads that the driver accepted, blocking ones included. What a graph copies is not known here, nor
    /// what stays within the device or the host.
    pub uploaded_bytes: u64,
    /// The same of downloads.
    pub downloaded_bytes: u64,
    /// How long they took, from submitting to being seen complete by whoever asked first: the reaper's pause, an eighth
    /// of the flight and at most 1 ms, is within it. Of a sample: the first of every sixteen submissions to each
    /// stream.
    pub flight: Histogram,
    /// Its streams: those that somebody has a handle to, or that anything is in flight on.
    pub streams: Vec<StreamStats>,
}

/// A stream and what is in flight on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamStats {
    /// Its [number](Stream::number).
    pub stream: u64,
    /// Copies and holds submitted to it.
    pub submitted: u64,
    /// Those of them that are known to be complete. On a stream that was lost, what was quarantined never is.
    pub completed: u64,
    /// Copies and holds in flight.
    pub in_flight: usize,
    /// Bytes of pools' segments in flight, without what several streams hold together, or what an `Arc` shares.
    pub in_flight_bytes: usize,
    /// Of these, bytes claimed for stream-ready reuse.
    pub claimed_bytes: usize,
    /// The open sequence number: it counts up as work is submitted and marked.
    pub seq: u64,
    /// The last sequence number that is known to be complete.
    pub completed_seq: u64,
    /// Events that were recorded and not seen complete yet.
    pub events: usize,
    /// Whether the stream is lost.
    pub lost: bool,
}

impl Snapshot {
    /// Bytes pinned per second of the time spent in pinning. `None` before the first.
    #[must_use]
    pub fn pinning_bytes_per_second(&self) -> Option<f64> {
        self.pinning.bytes_per_second()
    }

    /// The longest single call that pinned: what other users of the driver may have had to wait for.
    #[must_use]
    pub fn longest_pinning_call(&self) -> Duration {
        self.pinning.longest_call
    }
}

impl Pool {
    /// Everything that was counted: bytes by state and by size class, the devices and their streams, histograms of
    /// waiting, holding and flights. The module page of [`telemetry`](crate::telemetry) says how exact it is.
    ///
    /// In the child of a fork it has what is counted without a lock, as [`stats`](Self::stats) has.
    ///
    /// Costs those who check out nothing, and the caller some microseconds: it reads 113 counters of each thread that
    /// uses the pool, and visits each run of segments under the pool's lock.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let (mut waiting, mut holding) = (Histogram::default(), Histogram::default());
        let mut classes: Vec<ClassStats> = Vec::new();
        let pool = self.stats_of(|central| {
            let (snapshot, counts) = central.snapshot_by_class();
            for count in counts {
                let stride = count.class.map(|class| class.stride());
                let part = ClassStats {
                    stride,
                    free: count.free,
                    cached: count.cached,
                    out: count.out,
                    out_bytes: count.out_bytes,
                    checkouts: count.takes,
                    returns: count.puts,
                };
                match classes.iter_mut().find(|class| class.stride == stride) {
                    Some(class) => class.add(&part),
                    None => classes.push(part),
                }
            }
            let (waited, held) = central.histograms();
            waiting.merge(&waited);
            holding.merge(&held);
            snapshot
        });
        classes.sort_by_key(|class| class.stride.unwrap_or(usize::MAX));
        let devices: Vec<DeviceStats> = self.devices().iter().map(Device::stats).collect();
        let mut flight = Histogram::default();
        devices.iter().for_each(|device| flight.merge(&device.flight));
        Snapshot { pool, classes, devices, pinning: self.pinning(), waiting, holding, flight }
    }
}

impl ClassStats {
    fn add(&mut self, other: &Self) {
        self.free += other.free;
        self.cached += other.cached;
        self.out += other.out;
        self.out_bytes += other.out_bytes;
        self.checkouts = self.checkouts.wrapping_add(other.checkouts);
        self.returns = self.returns.wrapping_add(other.returns);
    }
}

impl Device {
    /// What is in flight on the device, and what has been since it was opened. Costs a few microseconds for each
    /// stream. (In the child of a fork there are none.)
    #[must_use]
    pub fn stats(&self) -> DeviceStats {
        let context = self.context();
        let [mut submitted, mut completed] = context.past();
        let [uploaded_bytes, downloaded_bytes] = context.copied();
        let known = if crate::os::forked() { Vec::new() } else { self.listing().known() };
        let mut streams: Vec<StreamStats> = known.iter().map(|timeline| of(timeline)).collect();
        for stream in &streams {
            submitted += stream.submitted;
            completed += stream.completed;
        }
        streams.sort_by_key(|stream| stream.stream);
        DeviceStats {
            name: self.name().into(),
            lost: self.lost(),
            registered_bytes: context.holds().registered(),
            errors: context.errors().read(),
            submitted,
            completed,
            uploaded_bytes,
            downloaded_bytes,
            flight: context.flights().read(),
            streams,
        }
    }
}

impl Stream {
    /// What is in flight on the stream, and what has been. (In the child of a fork: nothing.)
    #[must_use]
    pub fn stats(&self) -> StreamStats {
        of(self.timeline())
    }
}

fn of(timeline: &Timeline) -> StreamStats {
    let look = if crate::os::forked() { Default::default() } else { timeline.look() };
    StreamStats {
        stream: timeline.number(),
        submitted: look.submitted,
        completed: look.completed,
        in_flight: look.entries,
        in_flight_bytes: look.flight.bytes,
        claimed_bytes: look.flight.claimed,
        seq: look.open,
        completed_seq: look.completed_seq,
        events: look.events,
        lost: look.lost,
    }
}
