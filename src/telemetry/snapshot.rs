//! The snapshot: everything that a pool and its devices have counted where it happened
//! ([`super::counters`]), at one moment.

use super::counters::{ClassStats, ErrorCounts, Histogram};
use crate::device::handle::Device;
use crate::error::Error;
use crate::pool::{Pool, PoolStats};
use crate::region::Pinning;
use crate::stream::Stream;
pub use crate::stream::timeline::StreamStats;

/// Everything about a pool and its devices at one moment: [`Pool::snapshot`].
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow).build()?;
/// let snapshot = pool.snapshot();
/// println!("{} of {} bytes free", snapshot.pool.free_bytes, snapshot.pool.capacity_bytes);
/// println!("half of all waits took at most {:?}", snapshot.waiting.quantile(0.5));
/// assert_eq!(snapshot.devices.len(), 1);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Snapshot {
    /// Bytes by state, and counts.
    pub pool: PoolStats,
    /// Counts by size class, smallest first; segments without a class come last. Classes that
    /// were never used are left out.
    pub classes: Vec<ClassStats>,
    /// The devices that the pool serves, with all their streams, also those of other pools.
    pub devices: Vec<DeviceStats>,
    /// How far pinning has come.
    pub pinning: Pinning,
    /// How long requests waited in the queue, until they were granted, failed, or gave up.
    pub waiting: Histogram,
    /// How long buffers were out, from the checkout until the segment was back, with the time in
    /// flight. Of a sample: one in eight of the checkouts that no cache served, or all with
    /// [`track_checkouts`](crate::PoolBuilder::track_checkouts). A thread that always hits is in it
    /// with its first ones only.
    pub holding: Histogram,
    /// How long flights took on the pool's devices, from submitting to being seen complete: see
    /// [`DeviceStats::flight`].
    pub flight: Histogram,
}

/// A device's counts: [`Device::stats`].
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (stream, memory) = (device.stream()?, device.alloc(5)?);
/// let mut buf = pool.checkout(5)?;
/// buf.extend_from_slice(b"hello");
/// stream.upload(buf, &memory)?.wait()?;
/// let stats = device.stats();
/// assert_eq!((stats.submitted, stats.completed, stats.uploaded_bytes), (1, 1, 5));
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeviceStats {
    /// The device's name.
    pub name: String,
    /// The error that it was lost with, if it was.
    pub lost: Option<Error>,
    /// Bytes of the program's values that are [registered](Device::register) with it, leaked ones
    /// included. Pools have their own count.
    pub registered_bytes: usize,
    /// Driver calls that failed, by the class of the error.
    pub errors: ErrorCounts,
    /// Copies and holds submitted to its streams, ended ones included.
    pub submitted: u64,
    /// Copies and holds known to be complete.
    pub completed: u64,
    /// Bytes of uploads that the driver accepted, blocking ones included. Copies that a graph makes
    /// are not counted, nor are those within the device or within the host.
    pub uploaded_bytes: u64,
    /// Bytes of downloads that the driver accepted, counted in the same way.
    pub downloaded_bytes: u64,
    /// How long copies and holds took, from submitting to being seen complete. That is later than
    /// their end by up to an eighth of the time, and by at most 1 ms, where no thread waits for
    /// them. Of a sample: the first of every sixteen submissions to each stream.
    pub flight: Histogram,
    /// The streams that the program has a handle to, and the streams with work in flight.
    pub streams: Vec<StreamStats>,
}

impl Pool {
    /// Everything that was counted: bytes by state and by size class, the devices and their
    /// streams, histograms of waiting, holding and flights.
    ///
    /// While no thread uses the pool, all of it is exact. Otherwise the sums hold, since each
    /// counter is read once: `free + checked_out + in_flight + quarantined + cut = pinned +
    /// unpinned`, and the bytes out of the classes sum to those of the pool. A part may be off by
    /// what was moved meanwhile: a segment for each checkout or return, or up to 64.
    ///
    /// The call takes some microseconds and does not slow down checkouts: it reads a counter for
    /// each size class and thread, and visits each run of segments under the pool's lock. In the
    /// child of a fork it has only what is counted without a lock, as [`stats`](Self::stats) has.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let (mut waiting, mut holding, mut classes) =
            (Histogram::default(), Histogram::default(), Vec::new());
        let pool = self.stats_of(|central| {
            let (snapshot, by_class) = central.snapshot_by_class();
            (classes, (waiting, holding)) = (by_class, central.histograms());
            snapshot
        });
        let devices: Vec<DeviceStats> = self.devices().iter().map(Device::stats).collect();
        let mut flight = Histogram::default();
        devices.iter().for_each(|device| flight.merge(&device.flight));
        Snapshot { pool, classes, devices, pinning: self.pinning(), waiting, holding, flight }
    }
}

impl Device {
    /// The device's counts since it was opened, and what is in flight on it. The call takes a few
    /// microseconds a stream. In the child of a fork there are neither streams nor flights.
    #[must_use]
    pub fn stats(&self) -> DeviceStats {
        let context = self.context();
        let [mut submitted, mut completed] = context.past();
        let [uploaded_bytes, downloaded_bytes] = context.copied();
        let (known, flight) = match crate::os::forked() {
            true => Default::default(),
            false => (self.listing().known(), *context.flights.lock()),
        };
        let mut streams: Vec<StreamStats> = known.iter().map(|timeline| timeline.look()).collect();
        for stream in &streams {
            submitted += stream.submitted;
            completed += stream.completed;
        }
        streams.sort_by_key(|stream| stream.stream);
        DeviceStats {
            name: self.name().into(),
            lost: self.lost(),
            registered_bytes: context.holds().registered.get(),
            errors: context.errors.read(),
            submitted,
            completed,
            uploaded_bytes,
            downloaded_bytes,
            flight,
            streams,
        }
    }
}

impl Stream {
    /// The stream's counts, and what is in flight on it. In the child of a fork all are zero.
    #[must_use]
    pub fn stats(&self) -> StreamStats {
        match crate::os::forked() {
            true => StreamStats { stream: self.number(), ..StreamStats::default() },
            false => self.timeline().look(),
        }
    }
}
