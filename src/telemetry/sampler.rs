//! The sampler: polls pools, and sends metrics and reports of what is stuck.
//!
//! A poll takes a [snapshot](Pool::snapshot) of each pool, subtracts the values that were sent before, and sends the
//! rest as events and, with the feature `metrics`, to the `metrics` facade. A poll takes tens of microseconds, on the
//! sampler's thread or on the caller's, and does not slow down checkouts.
//!
//! From time to time a poll also looks for what an operator has to act on: buffers that are known to have been out for
//! too long, and streams on which nothing completes.
//!
//! The sampler holds weak handles only: a pool whose last handle is dropped closes, and is not polled any more.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::counters::{ErrorCounts, Histogram};
use super::metrics::{self, Id, Labels, MetricValue};
use super::snapshot::{ClassStats, DeviceStats, StreamStats};
use super::stuck;
use crate::device::handle::Device;
use crate::error::{Error, Result};
use crate::foreign;
use crate::pool::{Pool, PoolStats, WeakPool};
use crate::region::Pinning;

/// Stuck buffers of a pool that one poll logs at most.
const BUFFERS_LOGGED: usize = 8;
/// Streams of a device that have gauges of their own at a time.
const STREAMS_SHOWN: usize = 16;
/// Streams of a device that ever get gauges of their own. A recorder may keep a gauge for good, so a server that makes a
/// stream for each request must not add gauges without end.
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
    pools: Vec<Watched>,
    devices: HashMap<u64, WatchedDevice>,
    events: bool,
    #[cfg(feature = "metrics")]
    recorder: bool,
    #[cfg(feature = "metrics")]
    described: bool,
    /// `None`: never.
    buffers_after: Option<Duration>,
    streams_after: Option<Duration>,
    /// When the sampler last looked for stuck buffers.
    looked: Option<Instant>,
}

/// A pool, and the values of the poll before.
#[derive(Debug)]
struct Watched {
    pool: WeakPool,
    name: String,
    stats: PoolStats,
    classes: Vec<ClassStats>,
    waiting: Histogram,
    holding: Histogram,
    /// The stuck buffers that were logged, by their descriptors and since when they were out.
    logged: HashSet<(usize, Instant)>,
}

/// A device, and the values of the poll before.
#[derive(Debug, Default)]
struct WatchedDevice {
    name: String,
    submitted: u64,
    completed: u64,
    copied: [u64; 2],
    flight: Histogram,
    errors: ErrorCounts,
    streams: HashMap<u64, WatchedStream>,
    /// The streams that have gauges of their own, and the number of those that ever had.
    shown: BTreeSet<u64>,
    named: usize,
    /// Whether there were other streams at any poll.
    others: bool,
}

#[derive(Debug)]
struct WatchedStream {
    completed: u64,
    seq: u64,
    /// The first poll that saw `completed` and `seq` as they are.
    since: Instant,
    logged: bool,
}

/// A sampler that runs on a thread of its own: [`Sampler::spawn`]. Dropping it ends the thread, and waits for a poll
/// that is under way.
///
/// ```
/// # use std::time::Duration;
/// # use pinpool::{Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow).build()?;
/// use pinpool::telemetry::{Sampler, Sampling};
///
/// struct Server {
///     pool: Pool,
///     sampling: Sampling, // dropped with the server
/// }
/// let sampling = Sampler::new(&pool).spawn(Duration::from_secs(10))?;
/// let server = Server { pool, sampling };
/// # drop((server.pool, server.sampling));
/// # Ok::<(), pinpool::Error>(())
/// ```
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
            devices: HashMap::new(),
            events: true,
            #[cfg(feature = "metrics")]
            recorder: true,
            #[cfg(feature = "metrics")]
            described: false,
            buffers_after: Some(Duration::from_secs(60)),
            streams_after: Some(Duration::from_secs(60)),
            looked: None,
        };
        sampler.pool(pool)
    }

    /// Adds a pool.
    pub fn pool(mut self, pool: &Pool) -> Self {
        self.pools.push(Watched {
            pool: pool.downgrade(),
            name: pool.name().to_owned(),
            stats: PoolStats::default(),
            classes: Vec::new(),
            waiting: Histogram::default(),
            holding: Histogram::default(),
            logged: HashSet::new(),
        });
        self
    }

    /// Whether metrics are sent as events, of the target `pinpool::metrics` and the level TRACE: a log that does not ask
    /// for that does not have them. Default: yes.
    pub fn events(mut self, events: bool) -> Self {
        self.events = events;
        self
    }

    /// Whether metrics are sent to the recorder of the `metrics` facade. Default: yes.
    #[cfg(feature = "metrics")]
    pub fn recorder(mut self, recorder: bool) -> Self {
        self.recorder = recorder;
        self
    }

    /// The time after which buffers and streams count as stuck: both of
    /// [`stuck_buffers_after`](Self::stuck_buffers_after) and [`stuck_streams_after`](Self::stuck_streams_after).
    /// Default: a minute.
    pub fn stuck_after(self, threshold: Duration) -> Self {
        self.stuck_buffers_after(threshold).stuck_streams_after(threshold)
    }

    /// The time after which a buffer that is known to be out counts as stuck, and is logged, once. `Duration::MAX`: never.
    /// Default: a minute. [`Pool::stuck`] says which buffers are known, and what a look for them costs. Buffers that are
    /// [meant](crate::Request::long_lived) to be held for long never count, nor do quarantined ones.
    ///
    /// Buffers are looked for at polls, four times within the threshold. One look logs at most eight buffers of a pool,
    /// the oldest first; the next looks log the others.
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
        if self.recorder && !std::mem::replace(&mut self.described, true) {
            _ = foreign::call(RECORDER_PANICKED, metrics::describe);
        }
        let now = Instant::now();
        let look = self.buffers_after.filter(|after| {
            self.looked.is_none_or(|looked| now.saturating_duration_since(looked) >= *after / 4)
        });
        if look.is_some() {
            self.looked = Some(now);
        }
        let mut sender = Sender::new(self);
        let mut seen: Vec<Device> = Vec::new();
        self.pools.retain_mut(|watched| {
            let Some(pool) = watched.pool.upgrade() else {
                watched.send_end(&mut sender);
                return false;
            };
            watched.send(&pool, &mut sender, look);
            for device in pool.devices() {
                if seen.iter().all(|known| known.context().id() != device.context().id()) {
                    seen.push(device.clone());
                }
            }
            true
        });
        let present: HashSet<u64> = seen.iter().map(|device| device.context().id()).collect();
        self.devices.retain(|id, watched| {
            let stays = present.contains(id);
            if !stays {
                watched.send_end(&mut sender);
            }
            stays
        });
        for device in seen {
            let watched = self.devices.entry(device.context().id()).or_default();
            watched.send(&device.stats(), &mut sender, now, self.streams_after);
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

/// Sends values to where the sampler is told to.
struct Sender {
    events: bool,
    #[cfg(feature = "metrics")]
    recorder: bool,
}

impl Sender {
    fn new(sampler: &Sampler) -> Self {
        Self {
            // Where no subscriber takes the level, not even the labels are looked at.
            events: sampler.events && foreign::listens(metrics::LEVEL),
            #[cfg(feature = "metrics")]
            recorder: sampler.recorder,
        }
    }

    fn send(&mut self, id: Id, value: MetricValue, labels: &Labels) {
        if self.events {
            foreign::tell_now(|| metrics::send_event(id, &value, labels));
        }
        #[cfg(feature = "metrics")]
        if self.recorder {
            _ = foreign::call(RECORDER_PANICKED, || metrics::send_to_recorder(id, &value, labels));
        }
    }

    fn level(&mut self, id: Id, level: usize, labels: &Labels) {
        self.send(id, MetricValue::Level(level as u64), labels);
    }

    /// Sends the increase of a counter.
    fn count(&mut self, id: Id, now: u64, before: u64, labels: &Labels) {
        self.send(id, MetricValue::Count(now.saturating_sub(before)), labels);
    }

    fn durations(&mut self, id: Id, now: &Histogram, before: &Histogram, labels: &Labels) {
        let new = now.since(before);
        if new.count() > 0 {
            self.send(id, MetricValue::Durations(Box::new(new)), labels);
        }
    }

    fn errors(&mut self, id: Id, now: ErrorCounts, before: ErrorCounts, labels: &Labels) {
        for ((class, now), (_, before)) in now.by_class().into_iter().zip(before.by_class()) {
            self.count(id, now, before, &Labels { class: Some(class), ..labels.clone() });
        }
    }
}

impl Watched {
    fn send(&mut self, pool: &Pool, to: &mut Sender, look: Option<Duration>) {
        let labels = &self.labels();
        let mut now = pool.snapshot();
        // A call that refills a thread's list may count its segments as checked out and returned for a moment, so a
        // later reading may be lower. A counter never goes back: what was sent is sent.
        now.pool.checkouts = now.pool.checkouts.max(self.stats.checkouts);
        now.pool.returns = now.pool.returns.max(self.stats.returns);
        for class in &mut now.classes {
            let before = self.classes.iter().find(|c| c.stride == class.stride).map_or(0, |c| c.checkouts);
            class.checkouts = class.checkouts.max(before);
        }
        send_bytes(&now.pool, pool.central().take_peak(), to, labels);
        self.send_counts(&now.pool, to, labels);
        to.durations(Id::WaitSeconds, &now.waiting, &self.waiting, labels);
        to.durations(Id::HoldingSeconds, &now.holding, &self.holding, labels);
        send_pinning(&now.pinning, to, labels);
        if let Ok(since) = SystemTime::now().duration_since(UNIX_EPOCH) {
            to.send(Id::Sampled, MetricValue::Real(since.as_secs_f64()), labels);
        }
        for class in &now.classes {
            let labels = &send_class(class, to, labels);
            let before = self.classes.iter().find(|c| c.stride == class.stride).map_or(0, |c| c.checkouts);
            to.count(Id::ClassCheckouts, class.checkouts, before, labels);
        }
        if let Some(threshold) = look {
            self.send_stuck(pool, to, labels, threshold);
        }
        (self.stats, self.classes, self.waiting, self.holding) =
            (now.pool, now.classes, now.waiting, now.holding);
    }

    fn labels(&self) -> Labels {
        Labels { pool: Some(self.name.clone()), ..Labels::default() }
    }

    /// Sends zeros for the gauges of a pool that has closed, since a recorder keeps the last value of each.
    fn send_end(&self, to: &mut Sender) {
        let labels = &self.labels();
        send_bytes(&PoolStats::default(), 0, to, labels);
        send_pinning(&Pinning::default(), to, labels);
        to.send(Id::Sampled, MetricValue::Real(0.0), labels);
        for ClassStats { stride, .. } in &self.classes {
            let gone = ClassStats { stride: *stride, ..ClassStats::default() };
            send_class(&gone, to, labels);
        }
        to.level(Id::StuckBuffers, 0, labels);
        to.level(Id::StuckBytes, 0, labels);
    }

    fn send_counts(&self, now: &PoolStats, to: &mut Sender, labels: &Labels) {
        let was = &self.stats;
        let counts = [
            (Id::Checkouts, now.checkouts, was.checkouts),
            (Id::Returns, now.returns, was.returns),
            (Id::Misses, now.misses, was.misses),
            (Id::Reclaims, now.reclaims, was.reclaims),
            (Id::Growths, now.growths, was.growths),
            (Id::GrowthFailures, now.growth_failures, was.growth_failures),
            (Id::Waits, now.waits, was.waits),
            (Id::Timeouts, now.timeouts, was.timeouts),
            (Id::Abandoned, now.abandoned, was.abandoned),
        ];
        counts.into_iter().for_each(|(id, now, before)| to.count(id, now, before, labels));
        to.errors(Id::Errors, now.errors, was.errors, labels);
        for ((reason, now), (_, before)) in now.refused.by_reason().into_iter().zip(was.refused.by_reason()) {
            to.count(Id::Refused, now, before, &Labels { reason: Some(reason), ..labels.clone() });
        }
    }

    fn send_stuck(&mut self, pool: &Pool, to: &mut Sender, labels: &Labels, threshold: Duration) {
        let mut found = stuck::find(threshold, pool.central(), pool.devices());
        // Nothing keeps a quarantined buffer that could let go of it.
        found.retain(|buffer| !buffer.long_lived && buffer.state != stuck::BufferState::Quarantined);
        to.level(Id::StuckBuffers, found.len(), labels);
        to.level(Id::StuckBytes, found.iter().map(|buffer| buffer.granted).sum(), labels);
        // A buffer that is not found any more is forgotten, and logged again should it be stuck later. Buffers beyond
        // `BUFFERS_LOGGED` are not entered, so that one of the next looks logs them.
        let mut logged = HashSet::with_capacity(found.len().min(self.logged.len() + BUFFERS_LOGGED));
        let mut left = BUFFERS_LOGGED;
        for buffer in &found {
            if self.logged.contains(&buffer.known_by) {
                logged.insert(buffer.known_by);
            } else if left > 0 {
                left -= 1;
                stuck::emit(pool.name(), buffer);
                logged.insert(buffer.known_by);
            }
        }
        self.logged = logged;
    }
}

fn send_bytes(now: &PoolStats, peak: usize, to: &mut Sender, labels: &Labels) {
    let states = [
        ("free", now.free_bytes),
        ("checked_out", now.checked_out_bytes),
        ("in_flight", now.in_flight_bytes),
        ("quarantined", now.quarantined_bytes),
        ("cut", now.cut_bytes),
    ];
    for (state, bytes) in states {
        to.level(Id::MemoryBytes, bytes, &Labels { state: Some(state), ..labels.clone() });
    }
    let levels = [
        (Id::PinnedBytes, now.pinned_bytes),
        (Id::UnpinnedBytes, now.unpinned_bytes),
        (Id::CapacityBytes, now.capacity_bytes),
        (Id::CachedBytes, now.cached_bytes),
        (Id::ClaimedBytes, now.claimed_bytes),
        (Id::RequestedBytes, now.requested_bytes),
        (Id::RoundingBytes, now.rounding_bytes),
        (Id::LargestFreeBytes, now.largest_free_bytes),
        (Id::PeakBytes, peak),
        (Id::Waiting, now.waiting),
    ];
    levels.into_iter().for_each(|(id, level)| to.level(id, level, labels));
}

/// Sends the gauges of a size class. Returns its labels.
fn send_class(class: &ClassStats, to: &mut Sender, labels: &Labels) -> Labels {
    let stride = class.stride.map_or_else(|| "large".to_owned(), |stride| stride.to_string());
    let labels = Labels { stride: Some(stride), ..labels.clone() };
    to.send(Id::ClassFree, MetricValue::Level(class.free), &labels);
    to.send(Id::ClassOut, MetricValue::Level(class.out), &labels);
    to.send(Id::ClassCached, MetricValue::Level(class.cached), &labels);
    labels
}

fn send_pinning(now: &Pinning, to: &mut Sender, labels: &Labels) {
    to.send(Id::PinningSpeed, MetricValue::Real(now.bytes_per_second().unwrap_or(0.0)), labels);
    to.send(Id::LongestPin, MetricValue::Real(now.longest_call.as_secs_f64()), labels);
}

impl WatchedDevice {
    fn send(&mut self, stats: &DeviceStats, to: &mut Sender, now: Instant, stuck_after: Option<Duration>) {
        self.name.clone_from(&stats.name);
        let labels = &self.labels();
        to.durations(Id::FlightSeconds, &stats.flight, &self.flight, labels);
        to.errors(Id::DeviceErrors, stats.errors, self.errors, labels);
        to.count(Id::DeviceSubmitted, stats.submitted, self.submitted, labels);
        to.count(Id::DeviceCompleted, stats.completed, self.completed, labels);
        let copied = [stats.uploaded_bytes, stats.downloaded_bytes];
        for (i, direction) in ["upload", "download"].into_iter().enumerate() {
            let labels = &Labels { direction: Some(direction), ..labels.clone() };
            to.count(Id::DeviceCopied, copied[i], self.copied[i], labels);
        }
        self.copied = copied;
        to.level(Id::DeviceRegistered, stats.registered_bytes, labels);
        to.level(Id::DeviceLost, usize::from(stats.lost.is_some()), labels);
        let mut stuck = 0;
        for stream in &stats.streams {
            stuck += usize::from(self.is_stuck(&stats.name, stream, now, stuck_after));
        }
        to.level(Id::StuckStreams, stuck, labels);
        let is_there = |number: &u64| stats.streams.binary_search_by_key(number, |s| s.stream).is_ok();
        self.streams.retain(|number, _| is_there(number));
        self.send_streams(&stats.streams, to, labels);
        // A stream that ends between two readings is counted late, never twice.
        self.submitted = self.submitted.max(stats.submitted);
        self.completed = self.completed.max(stats.completed);
        (self.flight, self.errors) = (stats.flight, stats.errors);
    }

    fn labels(&self) -> Labels {
        Labels { device: Some(self.name.clone()), ..Labels::default() }
    }

    /// Sends zeros for the gauges of a device that no pool serves any more.
    fn send_end(&mut self, to: &mut Sender) {
        let labels = &self.labels();
        for id in [Id::DeviceRegistered, Id::DeviceLost, Id::StuckStreams] {
            to.level(id, 0, labels);
        }
        self.send_streams(&[], to, labels);
    }

    /// Sends the gauges of streams: of the busiest their own, and of all others their sums. `streams` are in the order of
    /// their numbers.
    fn send_streams(&mut self, streams: &[StreamStats], to: &mut Sender, labels: &Labels) {
        let mut send = |stream: String, bytes: usize, entries: usize| {
            let labels = &Labels { stream: Some(stream), ..labels.clone() };
            to.level(Id::StreamBytes, bytes, labels);
            to.level(Id::StreamEntries, entries, labels);
        };
        for number in self.choose_shown(streams) {
            // The last values of a stream that has ended, or is shown no more: its gauges would otherwise stand where
            // they were.
            send(number.to_string(), 0, 0);
        }
        let (mut bytes, mut entries) = (0, 0);
        for stream in streams {
            if self.shown.contains(&stream.stream) {
                send(stream.stream.to_string(), stream.in_flight_bytes, stream.in_flight);
            } else {
                self.others = true;
                bytes += stream.in_flight_bytes;
                entries += stream.in_flight;
            }
        }
        if self.others {
            send(OTHER_STREAMS.into(), bytes, entries);
        }
    }

    /// Chooses the streams that have gauges of their own. One that is shown stays for as long as it has work in flight,
    /// or nothing else needs its place. Returns those that are shown no more.
    fn choose_shown(&mut self, streams: &[StreamStats]) -> Vec<u64> {
        let mut waiting: Vec<&StreamStats> =
            streams.iter().filter(|s| s.in_flight > 0 && !self.shown.contains(&s.stream)).collect();
        waiting.sort_by_key(|s| std::cmp::Reverse((s.in_flight_bytes, s.in_flight)));
        waiting.truncate(STREAMS_SHOWN.min(STREAMS_NAMED - self.named));
        let find =
            |number: u64| streams.binary_search_by_key(&number, |s| s.stream).ok().map(|at| &streams[at]);
        let mut gone: Vec<u64> = self.shown.iter().copied().filter(|n| find(*n).is_none()).collect();
        gone.iter().for_each(|number| _ = self.shown.remove(number));
        let need = (self.shown.len() + waiting.len()).saturating_sub(STREAMS_SHOWN);
        let idle: Vec<u64> = self
            .shown
            .iter()
            .copied()
            .filter(|n| find(*n).is_some_and(|s| s.in_flight == 0))
            .take(need)
            .collect();
        idle.iter().for_each(|number| _ = self.shown.remove(number));
        gone.extend(idle);
        // Places that are left go to streams without work, so that a server with few streams sees all of them.
        let idle = streams.iter().filter(|s| s.in_flight == 0 && !gone.contains(&s.stream));
        for stream in waiting.into_iter().chain(idle) {
            if self.shown.len() >= STREAMS_SHOWN || self.named >= STREAMS_NAMED {
                break;
            }
            self.named += usize::from(self.shown.insert(stream.stream));
        }
        gone
    }

    /// Whether a stream has had work in flight for at least `after`, of which nothing completed. Logs it once.
    fn is_stuck(
        &mut self,
        device: &str,
        stream: &StreamStats,
        now: Instant,
        after: Option<Duration>,
    ) -> bool {
        let (completed, seq) = (stream.completed, stream.completed_seq);
        let fresh = || WatchedStream { completed, seq, since: now, logged: false };
        let watched = self.streams.entry(stream.stream).or_insert_with(fresh);
        if stream.in_flight == 0 || stream.lost || (watched.completed, watched.seq) != (completed, seq) {
            *watched = fresh();
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
