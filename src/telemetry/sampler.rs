//! The sampler: polls pools, and sends metrics and reports of what is stuck.
//!
//! A poll takes a [snapshot](Pool::snapshot) of each pool, subtracts what was sent before, and
//! sends the rest as events and, with the feature `metrics`, to the facade. It also looks for what
//! an operator has to act on: buffers known to have been out for too long, and streams on which
//! nothing completes. That takes tens of microseconds, and does not slow down checkouts.
//!
//! (Which checkouts are sampled, so that they can be reported as stuck, is decided in `ledger`.)
//!
//! The sampler holds weak handles: a pool whose last handle is dropped closes, and is polled no
//! more.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Bound;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::metrics::{self, DeviceSample, Key, PoolSample, Sample, Value};
use super::snapshot::{DeviceStats, StreamStats};
use super::stuck::{self, BufferState, Place, StuckBuffer};
use crate::error::{Error, Result};
use crate::foreign;
use crate::pool::{Pool, WeakPool};

/// Stuck buffers of a pool that one poll logs at most.
const BUFFERS_LOGGED: usize = 8;
/// Streams of a device that have gauges of their own: the first that a sampler sees. A recorder may
/// keep a gauge for ever, so a stream for each request must not add gauges without end.
const STREAMS_NAMED: usize = 64;
/// The label of the gauges of all other streams together.
const OTHER_STREAMS: &str = "other";

/// Polls pools, and sends [metrics](super::METRICS) and events about what is stuck.
///
/// Give all pools of a device to one sampler: two would count the device's metrics twice.
///
/// ```
/// use std::time::Duration;
/// use pinpool::telemetry::Sampler;
/// use pinpool::{Device, Pool, Unpinned};
///
/// let device = Device::open("host")?;
/// let pool = Pool::builder(&device).name("weights").unpinned(Unpinned::Allow).build()?;
/// // On a thread of its own, until `sampling` is dropped. `poll` does the same on the caller's.
/// let sampler = Sampler::new(&pool).stuck_after(Duration::from_secs(300));
/// let sampling = sampler.spawn(Duration::from_secs(10))?;
/// # drop(sampling);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "it looks only when it is polled or spawned"]
pub struct Sampler {
    pools: Vec<WatchedPool>,
    devices: BTreeMap<u64, WatchedDevice>,
    /// The time after which buffers and streams are stuck.
    stuck_after: Duration,
}

#[derive(Debug)]
struct WatchedPool {
    pool: WeakPool,
    sent: Sent,
    /// The last stuck buffer that was logged. Buffers that get stuck later have places behind it.
    logged: Option<Place>,
}

#[derive(Debug, Default)]
struct WatchedDevice {
    sent: Sent,
    streams: HashMap<u64, WatchedStream>,
    /// The streams that have gauges of their own, or had.
    named: HashSet<u64>,
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
    values: BTreeMap<Key, Value>,
}

/// A sampler that runs on a thread of its own: [`Sampler::spawn`]. Dropping it ends the thread, and
/// waits for a poll that is under way.
#[derive(Debug)]
#[must_use = "dropping it ends the sampling"]
pub struct Sampling {
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// A sampler of one pool. Its first poll sends all that was counted since the pool was built.
    pub fn new(pool: &Pool) -> Self {
        let sampler =
            Self { pools: Vec::new(), devices: BTreeMap::new(), stuck_after: Duration::from_secs(60) };
        sampler.pool(pool)
    }

    /// Adds a pool.
    pub fn pool(mut self, pool: &Pool) -> Self {
        self.pools.push(WatchedPool {
            pool: pool.downgrade(),
            sent: Sent { name: pool.name().to_owned(), values: BTreeMap::new() },
            logged: None,
        });
        self
    }

    /// The time after which a buffer known to be out is stuck, and a stream with work in flight of
    /// which nothing completes. Each is logged once. `Duration::MAX`: never. Default: 60 s.
    ///
    /// [`Pool::stuck`] says which buffers are known, and what a look costs.
    /// [Long-lived](crate::Request::long_lived) and quarantined buffers never count. One poll logs
    /// at most eight buffers of a pool, the oldest first; the next polls log the others.
    pub fn stuck_after(mut self, threshold: Duration) -> Self {
        self.stuck_after = threshold;
        self
    }

    /// Polls once, on this thread, which calls the subscriber and the recorder. Returns whether any
    /// of the pools is still open: in the child of a fork none is.
    pub fn poll(&mut self) -> bool {
        if crate::os::forked() {
            return false;
        }
        #[cfg(feature = "metrics")]
        let _ = foreign::call(RECORDER_PANICKED, metrics::describe);
        let now = Instant::now();
        // Where no subscriber takes the level, not even the labels are looked at.
        let events = foreign::listens(metrics::LEVEL);
        let mut devices: BTreeMap<u64, DeviceStats> = BTreeMap::new();
        self.pools.retain_mut(|watched| {
            let Some(pool) = watched.pool.upgrade() else {
                watched.sent.send(Sample::default(), events);
                return false;
            };
            let stats = watched.poll(&pool, self.stuck_after, events);
            devices.extend(pool.devices().iter().map(|device| device.context().id()).zip(stats));
            true
        });
        self.devices.retain(|id, watched| {
            let stays = devices.contains_key(id);
            if !stays {
                watched.sent.send(Sample::default(), events);
            }
            stays
        });
        for (id, stats) in devices {
            self.devices.entry(id).or_default().poll(stats, now, self.stuck_after, events);
        }
        !self.pools.is_empty()
    }

    /// Polls on a thread of its own, at once and then every `interval` (10 ms at least), until all
    /// pools are closed or the handle is dropped.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if no thread starts; else [as every call](Error#every-call).
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

/// Sends a value to whoever takes it. `first`: the value of the first label.
fn send(key: &Key, value: &Value, first: &str, events: bool) {
    if events {
        foreign::tell_now(|| metrics::send_event(key, value, first));
    }
    #[cfg(feature = "metrics")]
    let _ = foreign::call(RECORDER_PANICKED, || metrics::send_to_recorder(key, value, first));
}

impl Sent {
    /// Sends a sample: counters and histograms as what was counted since the poll before. A gauge
    /// that is read no more is sent as zero, once, since a recorder keeps the last value.
    fn send(&mut self, sample: Sample, events: bool) {
        let mut before = std::mem::take(&mut self.values);
        for (key, mut value) in metrics::read(sample) {
            let new = value.since(before.remove(&key));
            send(&key, &new, &self.name, events);
            self.values.insert(key, value);
        }
        for (key, last) in before {
            if let Value::Gauge(_) = last {
                send(&key, &Value::Gauge(0.0), &self.name, events);
            } else {
                // Kept for the difference, should it be read again.
                self.values.insert(key, last);
            }
        }
    }
}

impl WatchedPool {
    /// Returns the counts of the pool's devices.
    fn poll(&mut self, pool: &Pool, stuck_after: Duration, events: bool) -> Vec<DeviceStats> {
        let mut stuck = BTreeMap::new();
        if stuck_after < Duration::MAX {
            stuck = stuck::find(stuck_after, pool.central(), pool.devices());
        }
        // Nothing keeps a quarantined buffer that could let go of it.
        stuck.retain(|_, buffer| !buffer.long_lived && buffer.state != BufferState::Quarantined);
        self.log(pool.name(), &stuck);
        let sample = PoolSample {
            all: pool.snapshot(),
            peak_bytes: pool.central().take_peak(),
            stuck_buffers: stuck.len(),
            stuck_bytes: stuck.values().map(|buffer| buffer.granted).sum(),
            at_seconds: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
        };
        self.sent.send(Sample { pool: Some(&sample), device: None }, events);
        sample.all.devices
    }

    /// Logs the next buffers behind the last one that was logged.
    fn log(&mut self, pool: &str, stuck: &BTreeMap<Place, StuckBuffer>) {
        let from = self.logged.map_or(Bound::Unbounded, Bound::Excluded);
        for (place, buffer) in stuck.range((from, Bound::Unbounded)).take(BUFFERS_LOGGED) {
            stuck::emit(pool, buffer);
            self.logged = Some(*place);
        }
    }
}

impl WatchedDevice {
    fn poll(&mut self, stats: DeviceStats, now: Instant, stuck_after: Duration, events: bool) {
        self.sent.name.clone_from(&stats.name);
        let is_there = |number: &u64| stats.streams.binary_search_by_key(number, |s| s.stream).is_ok();
        self.streams.retain(|number, _| is_there(number));
        let stuck = stats.streams.iter().filter(|s| self.is_stuck(&stats.name, s, now, stuck_after));
        let stuck_streams = stuck.count();
        let streams = self.divide(&stats.streams);
        let sample = DeviceSample { stats, stuck_streams, streams };
        self.sent.send(Sample { pool: None, device: Some(&sample) }, events);
    }

    /// What is in flight on each stream with gauges of its own, and on all others together.
    fn divide(&mut self, streams: &[StreamStats]) -> Vec<(Cow<'static, str>, [usize; 2])> {
        let (mut samples, mut others) = (Vec::new(), None);
        for stream in streams {
            if self.named.len() < STREAMS_NAMED {
                self.named.insert(stream.stream);
            }
            if self.named.contains(&stream.stream) {
                samples.push((stream.stream.to_string().into(), [stream.in_flight_bytes, stream.in_flight]));
            } else {
                let [bytes, entries] = others.get_or_insert([0; 2]);
                *bytes += stream.in_flight_bytes;
                *entries += stream.in_flight;
            }
        }
        samples.extend(others.map(|sums| (OTHER_STREAMS.into(), sums)));
        samples
    }

    /// Whether nothing has completed for `after` on a stream with work in flight. Logs it once.
    fn is_stuck(&mut self, device: &str, stream: &StreamStats, now: Instant, after: Duration) -> bool {
        let came = (stream.completed, stream.completed_seq);
        let fresh = WatchedStream { came, since: now, logged: false };
        let watched = self.streams.entry(stream.stream).or_insert(fresh);
        if stream.in_flight == 0 || stream.lost || watched.came != came {
            *watched = fresh;
            return false;
        }
        let idle = now.saturating_duration_since(watched.since);
        let stuck = idle >= after;
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
