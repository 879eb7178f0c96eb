//! The sampler: polls pools, and sends metrics and reports of what is stuck.
//!
//! A poll takes a [snapshot](Pool::snapshot) of each pool, subtracts the values that were sent before, and sends the
//! rest as events and, with the feature `metrics`, to the `metrics` facade. A poll takes tens of microseconds, on the
//! sampler's thread or on the caller's, and does not slow down checkouts.
//!
//! A poll also looks for what an operator has to act on: buffers that are known to have been out for too long, and
//! streams on which nothing completes.
//!
//! The sampler holds weak handles only: a pool whose last handle is dropped closes, and is not polled any more.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::metrics::{self, DeviceSample, PoolSample, Reading, Sample, Value};
use super::snapshot::{DeviceStats, Snapshot, StreamStats};
use super::stuck::{self, BufferState, Known, StuckBuffer};
use crate::error::{Error, Result};
use crate::foreign;
use crate::pool::{Pool, WeakPool};

/// Stuck buffers of a pool that one poll logs at most.
const BUFFERS_LOGGED: usize = 8;
/// Streams of a device that have gauges of their own at a time.
const STREAMS_SHOWN: usize = 16;
/// Streams of a device that ever get gauges of their own. A recorder may keep a gauge for good, so a server that makes
/// a stream for each request must not add gauges without end.
const STREAMS_NAMED: usize = 256;
/// The label of the gauges of all other streams together.
const OTHER_STREAMS: &str = "other";

/// Polls pools, and sends [metrics](super::METRICS) and events about what is stuck.
///
/// Give all pools that share a device to one sampler: each sampler sends the device's metrics, so two of them would
/// count everything twice.
///
/// ```
/// use std::time::Duration;
/// use pinpool::telemetry::Sampler;
/// use pinpool::{Device, Pool, Unpinned};
///
/// let device = Device::open("host")?;
/// let pool = Pool::builder(&device).name("weights").unpinned(Unpinned::Allow).build()?;
/// // On a thread of its own, until `sampling` is dropped. `poll` does the same on the caller's.
/// let sampler = Sampler::new(&pool).stuck_buffers_after(Duration::from_secs(300));
/// let sampling = sampler.stuck_streams_after(Duration::from_secs(30)).spawn(Duration::from_secs(10))?;
/// # drop(sampling);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "it looks only when it is polled or spawned"]
pub struct Sampler {
    pools: Vec<WatchedPool>,
    devices: BTreeMap<u64, WatchedDevice>,
    to: Receivers,
    #[cfg(feature = "metrics")]
    described: bool,
    /// `None`: never.
    buffers_after: Option<Duration>,
    streams_after: Option<Duration>,
}

#[derive(Debug)]
struct WatchedPool {
    pool: WeakPool,
    sent: Sent,
    /// The stuck buffers that were logged.
    logged: HashSet<Known>,
}

#[derive(Debug, Default)]
struct WatchedDevice {
    sent: Sent,
    streams: HashMap<u64, WatchedStream>,
    /// The streams that have gauges of their own, and the number of those that ever had.
    shown: BTreeSet<u64>,
    named: usize,
}

#[derive(Clone, Copy, Debug)]
struct WatchedStream {
    /// Entries that are complete, and the last sequence number that is.
    came: (u64, u64),
    /// The first poll that saw `came` as it is.
    since: Instant,
    logged: bool,
}

/// The name of a pool or a device, and its values as of the poll before.
#[derive(Debug, Default)]
struct Sent {
    name: String,
    values: Vec<Reading>,
}

/// A sampler that runs on a thread of its own: [`Sampler::spawn`]. Dropping it ends the thread, and waits for a poll
/// that is under way.
#[derive(Debug)]
#[must_use = "dropping it ends the sampling"]
pub struct Sampling {
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// A sampler of one pool. Its first poll sends everything that was counted since the pool was built.
    pub fn new(pool: &Pool) -> Self {
        let sampler = Self {
            pools: Vec::new(),
            devices: BTreeMap::new(),
            to: Receivers {
                events: true,
                #[cfg(feature = "metrics")]
                recorder: true,
            },
            #[cfg(feature = "metrics")]
            described: false,
            buffers_after: Some(Duration::from_secs(60)),
            streams_after: Some(Duration::from_secs(60)),
        };
        sampler.pool(pool)
    }

    /// Adds a pool.
    pub fn pool(mut self, pool: &Pool) -> Self {
        self.pools.push(WatchedPool {
            pool: pool.downgrade(),
            sent: Sent { name: pool.name().to_owned(), values: Vec::new() },
            logged: HashSet::new(),
        });
        self
    }

    /// Whether metrics are sent as events, of the target `pinpool::metrics` and the level TRACE: a log that does not
    /// ask for that does not have them. Default: yes.
    pub fn events(mut self, events: bool) -> Self {
        self.to.events = events;
        self
    }

    /// Whether metrics are sent to the recorder of the `metrics` facade. Default: yes.
    #[cfg(feature = "metrics")]
    pub fn recorder(mut self, recorder: bool) -> Self {
        self.to.recorder = recorder;
        self
    }

    /// The time after which buffers and streams count as stuck: both of
    /// [`stuck_buffers_after`](Self::stuck_buffers_after) and [`stuck_streams_after`](Self::stuck_streams_after).
    /// Default: a minute.
    pub fn stuck_after(self, threshold: Duration) -> Self {
        self.stuck_buffers_after(threshold).stuck_streams_after(threshold)
    }

    /// The time after which a buffer that is known to be out counts as stuck, and is logged, once. `Duration::MAX`:
    /// never. Default: a minute. [`Pool::stuck`] says which buffers are known, and what a look for them costs. Buffers
    /// that are [meant](crate::Request::long_lived) to be held for long never count, nor do quarantined ones.
    ///
    /// One poll logs at most eight buffers of a pool, the oldest first; the next polls log the others.
    pub fn stuck_buffers_after(mut self, threshold: Duration) -> Self {
        self.buffers_after = (threshold < Duration::MAX).then_some(threshold);
        self
    }

    /// The time after which a stream counts as stuck that has work in flight of which nothing completes. It is logged
    /// once. `Duration::MAX`: never. Default: a minute.
    pub fn stuck_streams_after(mut self, threshold: Duration) -> Self {
        self.streams_after = (threshold < Duration::MAX).then_some(threshold);
        self
    }

    /// Polls once, on this thread, which calls the subscriber and the recorder. Whether any of the pools is still open:
    /// in the child of a fork none is.
    pub fn poll(&mut self) -> bool {
        if crate::os::forked() {
            return false;
        }
        #[cfg(feature = "metrics")]
        if self.to.recorder && !std::mem::replace(&mut self.described, true) {
            _ = foreign::call(RECORDER_PANICKED, metrics::describe);
        }
        let now = Instant::now();
        // Where no subscriber takes the level, not even the labels are looked at.
        let mut to = self.to;
        to.events = to.events && foreign::listens(metrics::LEVEL);
        let mut devices: BTreeMap<u64, DeviceStats> = BTreeMap::new();
        self.pools.retain_mut(|watched| {
            let Some(pool) = watched.pool.upgrade() else {
                watched.sent.send(Sample::default(), to);
                return false;
            };
            let stats = watched.poll(&pool, self.buffers_after, to);
            devices.extend(pool.devices().iter().map(|device| device.context().id()).zip(stats));
            true
        });
        self.devices.retain(|id, watched| {
            let stays = devices.contains_key(id);
            if !stays {
                watched.sent.send(Sample::default(), to);
            }
            stays
        });
        for (id, stats) in devices {
            self.devices.entry(id).or_default().poll(stats, now, self.streams_after, to);
        }
        !self.pools.is_empty()
    }

    /// Polls on a thread of its own, at once and then every `interval` (10 ms at least), until all pools are closed or
    /// the handle is dropped.
    ///
    /// # Errors
    /// [`Error::Unavailable`] where no thread can be started; [`Error::Forked`].
    pub fn spawn(mut self, interval: Duration) -> Result<Sampling> {
        crate::os::check_fork()?;
        let interval = interval.max(Duration::from_millis(10));
        let (stop, stopped) = sync_channel::<()>(0);
        let sample = move || {
            let mut poll =
                || foreign::survive("a poll panicked: the sampler goes on", || self.poll()).unwrap_or(true);
            while poll() && matches!(stopped.recv_timeout(interval), Err(RecvTimeoutError::Timeout)) {}
        };
        let thread = crate::os::thread::spawn("pinpool-sample", sample).map_err(|e| Error::Unavailable {
            device: "the sampler".into(),
            why: format!("no thread could be started: {e}"),
        })?;
        Ok(Sampling { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Sampling {
    fn drop(&mut self) {
        let (stop, thread) = (self.stop.take(), self.thread.take());
        if crate::os::forked() {
            // The thread is the parent's.
            return std::mem::forget((stop, thread));
        }
        // Without a sender the thread's `recv_timeout` ends at once.
        drop(stop);
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

#[cfg(feature = "metrics")]
const RECORDER_PANICKED: &str = "a recorder panicked: the value that it was given may be lost";

/// Where the sampler sends values to.
#[derive(Clone, Copy, Debug)]
struct Receivers {
    events: bool,
    #[cfg(feature = "metrics")]
    recorder: bool,
}

impl Receivers {
    fn send(self, reading: &Reading, first: &str) {
        if self.events {
            foreign::tell_now(|| metrics::send_event(reading, first));
        }
        #[cfg(feature = "metrics")]
        if self.recorder {
            _ = foreign::call(RECORDER_PANICKED, || metrics::send_to_recorder(reading, first));
        }
    }
}

impl Sent {
    /// Sends a sample: counters and histograms as what was counted since the poll before. A gauge that was read then
    /// and is read no more is sent as zero, once, since a recorder keeps the last value of each.
    fn send(&mut self, sample: Sample, to: Receivers) {
        let mut before: Vec<Option<Reading>> =
            std::mem::take(&mut self.values).into_iter().map(Some).collect();
        // Readings come in the order of the poll before, but for labels that came or went: so the search begins behind
        // the one that was found last.
        let mut at = 0;
        for mut reading in metrics::read(sample) {
            let is_same = |was: &Reading| (was.row, &was.label) == (reading.row, &reading.label);
            let found = (at..before.len()).chain(0..at).find(|at| before[*at].as_ref().is_some_and(is_same));
            let was = found.and_then(|found| before[found].take().map(|was| was.value));
            at = found.map_or(at, |found| found + 1);
            let new = reading.value.since(was);
            let now = std::mem::replace(&mut reading.value, new);
            to.send(&reading, &self.name);
            self.values.push(Reading { value: now, ..reading });
        }
        for mut last in before.into_iter().flatten() {
            if let Value::Gauge(level) = &mut last.value {
                *level = 0.0;
                to.send(&last, &self.name);
            } else {
                // Kept for the difference, should it be read again.
                self.values.push(last);
            }
        }
    }
}

impl WatchedPool {
    /// Returns the counts of the pool's devices.
    fn poll(&mut self, pool: &Pool, stuck_after: Option<Duration>, to: Receivers) -> Vec<DeviceStats> {
        let mut stuck =
            stuck_after.map_or(Vec::new(), |after| stuck::find(after, pool.central(), pool.devices()));
        // Nothing keeps a quarantined buffer that could let go of it.
        stuck.retain(|(_, buffer)| !buffer.long_lived && buffer.state != BufferState::Quarantined);
        self.log(pool.name(), &stuck);
        let Snapshot { pool: stats, classes, devices, pinning, waiting, holding, .. } = pool.snapshot();
        let sample = PoolSample {
            stats,
            classes,
            pinning,
            waiting,
            holding,
            peak_bytes: pool.central().take_peak(),
            stuck_buffers: stuck.len(),
            stuck_bytes: stuck.iter().map(|(_, buffer)| buffer.granted).sum(),
            at_seconds: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
        };
        self.sent.send(Sample { pool: Some(&sample), device: None }, to);
        devices
    }

    fn log(&mut self, pool: &str, stuck: &[(Known, StuckBuffer)]) {
        // A buffer that is not found any more is forgotten, and logged again should it be stuck later. Buffers beyond
        // `BUFFERS_LOGGED` are not entered, so that one of the next polls logs them.
        let before = std::mem::take(&mut self.logged);
        let mut left = BUFFERS_LOGGED;
        for (known, buffer) in stuck {
            if !before.contains(known) {
                if left == 0 {
                    continue;
                }
                left -= 1;
                stuck::emit(pool, buffer);
            }
            self.logged.insert(*known);
        }
    }
}

impl WatchedDevice {
    fn poll(&mut self, stats: DeviceStats, now: Instant, stuck_after: Option<Duration>, to: Receivers) {
        self.sent.name.clone_from(&stats.name);
        let is_there = |number: &u64| stats.streams.binary_search_by_key(number, |s| s.stream).is_ok();
        self.streams.retain(|number, _| is_there(number));
        let stuck = stats.streams.iter().filter(|s| self.is_stuck(&stats.name, s, now, stuck_after));
        let stuck_streams = stuck.count();
        let streams = self.divide(&stats.streams);
        let sample = DeviceSample { stats, stuck_streams, streams };
        self.sent.send(Sample { pool: None, device: Some(&sample) }, to);
    }

    /// Chooses the streams that have gauges of their own, and adds up all others. A chosen one stays for as long as it
    /// has work in flight, or nothing else needs its place; a server with few streams sees all of them.
    fn divide(&mut self, streams: &[StreamStats]) -> Vec<(Cow<'static, str>, [usize; 2])> {
        let before = std::mem::take(&mut self.shown);
        let mut streams: Vec<&StreamStats> = streams.iter().collect();
        streams.sort_by_key(|s| {
            Reverse((s.in_flight > 0, before.contains(&s.stream), s.in_flight_bytes, s.in_flight))
        });
        let (mut samples, mut others) = (Vec::new(), [0; 2]);
        for stream in &streams {
            let is_new = !before.contains(&stream.stream);
            let flying = [stream.in_flight_bytes, stream.in_flight];
            if self.shown.len() < STREAMS_SHOWN && (!is_new || self.named < STREAMS_NAMED) {
                self.named += usize::from(is_new);
                self.shown.insert(stream.stream);
                samples.push((stream.stream.to_string().into(), flying));
            } else {
                others.iter_mut().zip(flying).for_each(|(sum, more)| *sum += more);
            }
        }
        if self.shown.len() < streams.len() {
            samples.push((OTHER_STREAMS.into(), others));
        }
        samples
    }

    /// Whether a stream has had work in flight for at least `after`, of which nothing completed. Logs it once.
    fn is_stuck(
        &mut self,
        device: &str,
        stream: &StreamStats,
        now: Instant,
        after: Option<Duration>,
    ) -> bool {
        let came = (stream.completed, stream.completed_seq);
        let fresh = WatchedStream { came, since: now, logged: false };
        let watched = self.streams.entry(stream.stream).or_insert(fresh);
        if stream.in_flight == 0 || stream.lost || watched.came != came {
            *watched = fresh;
            return false;
        }
        let idle = now.saturating_duration_since(watched.since);
        let stuck = after.is_some_and(|after| idle >= after);
        if stuck && !std::mem::replace(&mut watched.logged, true) {
            crate::foreign::warn!(
                target: "pinpool::stream::stuck",
                device,
                stream = stream.stream,
                seq = stream.seq,
                completed = stream.completed_seq,
                events = stream.events,
                entries = stream.in_flight,
                bytes = stream.in_flight_bytes,
                seconds = idle.as_secs_f64(),
                "a stream completes nothing: its kernels or copies hang, or wait for an event of another stream"
            );
        }
        stuck
    }
}
