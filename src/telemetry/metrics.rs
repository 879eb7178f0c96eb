//! The metrics: one table, from which everything about a metric is made.
//!
//! A row has a metric's kind, name and labels, how it is read from a sample, and what it measures.
//! Four things are made of it: [`METRICS`] with its page, for authors of dashboards; what a poll
//! reads; the events, which tracing-opentelemetry's `MetricsLayer` turns into metrics; and what the
//! `metrics` facade gets. The table is a macro, since the name of an event's field has to be known
//! at compile time. Its kinds are that layer's prefixes: `monotonic_counter`, `gauge`, `histogram`.
//!
//! The first label says what the metric is of, a `pool` or a `device`. A row with a second label
//! reads a list of its values, each with its value. CONTRIBUTING.md has all steps to a new metric.

use std::borrow::Cow;
use std::time::Duration;

use super::counters::{BOUNDS, ClassStats, Histogram};
use super::snapshot::{DeviceStats, Snapshot};

/// The target of events that carry metrics.
pub(super) const TARGET: &str = "pinpool::metrics";
/// The level of events that carry metrics: there are hundreds a poll.
pub(super) const LEVEL: tracing::Level = tracing::Level::TRACE;

/// Events that one poll makes of one histogram at most.
const REPLAYED: u64 = 64;

/// The kind of a metric whose row begins with this prefix.
const fn kind(prefix: &str) -> &'static str {
    match prefix.as_bytes() {
        b"monotonic_counter" => "counter",
        b"gauge" => "gauge",
        _ => "histogram",
    }
}

/// One metric. [`METRICS`] lists all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Metric {
    /// The metric's name in OpenTelemetry's style, with points. It ends with the unit: `bytes`,
    /// `seconds`, `bytes_per_second`, or what is counted; a counter's has `total` after that.
    pub name: &'static str,
    /// `counter` (each poll sends the increase since the poll before), `gauge`, or `histogram`.
    pub kind: &'static str,
    /// The names of the metric's labels (attributes).
    pub labels: &'static [&'static str],
    /// What the metric measures.
    pub help: &'static str,
}

/// A poll of a pool: what its metrics are read from.
pub(super) struct PoolSample {
    pub(super) all: Snapshot,
    pub(super) peak_bytes: usize,
    pub(super) stuck_buffers: usize,
    pub(super) stuck_bytes: usize,
    /// The time of the poll, in seconds since 1970.
    pub(super) at_seconds: f64,
}

impl PoolSample {
    fn by_stride<V>(&self, of: fn(&ClassStats) -> V) -> impl Iterator<Item = (String, V)> {
        let label = |class: &ClassStats| class.stride.map_or("large".to_owned(), |stride| stride.to_string());
        self.all.classes.iter().map(move |class| (label(class), of(class)))
    }
}

/// A poll of a device: what its metrics are read from.
pub(super) struct DeviceSample {
    pub(super) stats: DeviceStats,
    pub(super) stuck_streams: usize,
    /// Bytes and entries in flight on a stream, or on all without a label of their own.
    pub(super) streams: Vec<(Cow<'static, str>, [usize; 2])>,
}

impl DeviceSample {
    fn by_stream(&self, of: fn([usize; 2]) -> usize) -> impl Iterator<Item = (Cow<'static, str>, f64)> {
        self.streams.iter().map(move |(label, flying)| (label.clone(), of(*flying) as f64))
    }
}

/// A poll of a pool or a device. A row reads the one of its first label, if it is there.
#[derive(Clone, Copy, Default)]
pub(super) struct Sample<'a> {
    pub(super) pool: Option<&'a PoolSample>,
    pub(super) device: Option<&'a DeviceSample>,
}

/// A metric's value, by the metric's kind.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Counter(u64),
    Gauge(f64),
    Histogram(Box<Histogram>),
}

impl Value {
    /// What to send: what was counted after the reading before, or a gauge's level. Keeps what the
    /// next reading is compared with, the higher of two counts. A later reading may be lower (a
    /// call that refills a thread's list may count its segments as checked out and returned for a
    /// moment, and an ending stream may be counted late), and what was sent cannot be taken back.
    pub(super) fn since(&mut self, before: Option<Self>) -> Self {
        match (self, before) {
            (Self::Counter(now), Some(Self::Counter(before))) => {
                let new = now.saturating_sub(before);
                *now = before.max(*now);
                Self::Counter(new)
            }
            (Self::Histogram(now), Some(Self::Histogram(before))) => now.since(&before).into(),
            (now, _) => now.clone(),
        }
    }
}

impl From<u64> for Value {
    fn from(count: u64) -> Self {
        Self::Counter(count)
    }
}

impl From<f64> for Value {
    fn from(level: f64) -> Self {
        Self::Gauge(level)
    }
}

impl From<Histogram> for Value {
    fn from(durations: Histogram) -> Self {
        Self::Histogram(durations.into())
    }
}

/// What a value is of: the metric's place in the table, and the second label's value, if any.
pub(super) type Key = (usize, Cow<'static, str>);

/// A value that a row has read, behind the second label's value, if any.
type Reading = (Cow<'static, str>, Value);

/// What a row with one label reads.
fn one(value: impl Into<Value>) -> Vec<Reading> {
    each([("", value)])
}

/// What a row with two labels reads, each value with its second label.
fn each<L: Into<Cow<'static, str>>, V: Into<Value>>(list: impl IntoIterator<Item = (L, V)>) -> Vec<Reading> {
    list.into_iter().map(|(label, value)| (label.into(), value.into())).collect()
}

/// The part of a row that only this module needs.
struct Row {
    read: fn(Sample) -> Vec<Reading>,
    /// Sends a number as an event, with the values of the first and the second label.
    send: fn(&dyn tracing::Value, &str, &str),
}

macro_rules! table {
    ($(
        $kind:ident [$first:ident $(.$rest:ident)*] [$scope:ident $(, $label:ident)?]
        |$at:ident| $read:expr, $help:literal;
    )*) => {
        /// Every metric that a [`Sampler`](super::Sampler) sends.
        ///
        /// | name | kind | labels | what |
        /// | --- | --- | --- | --- |
        $(#[doc = concat!(
            "| `", stringify!($first) $(, ".", stringify!($rest))*, "` | ", stringify!($kind), " | ",
            stringify!($scope) $(, ", ", stringify!($label))?, " | ", $help, " |"
        )])*
        pub const METRICS: &[Metric] = &[
            $(Metric {
                name: concat!(stringify!($first) $(, ".", stringify!($rest))*),
                kind: kind(stringify!($kind)),
                labels: &[stringify!($scope) $(, stringify!($label))?],
                help: $help,
            },)*
        ];

        /// The rows of [`METRICS`], in its order.
        const ROWS: &[Row] = &[
            $(Row {
                read: |sample| sample.$scope.map_or_else(Vec::new, |$at| $read),
                send: |number, $scope, _label| {
                    $(let $label = _label;)?
                    // Without a message, which would become a label.
                    tracing::event!(target: TARGET, LEVEL, {
                        $kind.$first $(.$rest)* = number, $scope $(, $label)?
                    });
                },
            },)*
        ];
    };
}

table! {
    gauge [pinpool.memory.bytes] [pool, state] |p| each([
        ("free", p.all.pool.free_bytes as f64),
        ("checked_out", p.all.pool.checked_out_bytes as f64),
        ("in_flight", p.all.pool.in_flight_bytes as f64),
        ("quarantined", p.all.pool.quarantined_bytes as f64),
        ("cut", p.all.pool.cut_bytes as f64),
    ]),
        "Bytes of the pool by state: free, checked_out, in_flight, quarantined, cut. Their sum: pinned and unpinned.";
    gauge [pinpool.memory.pinned.bytes] [pool] |p| one(p.all.pool.pinned_bytes as f64),
        "Bytes that are pinned.";
    gauge [pinpool.memory.unpinned.bytes] [pool] |p| one(p.all.pool.unpinned_bytes as f64),
        "Bytes that the pool serves and that are not pinned.";
    gauge [pinpool.memory.capacity.bytes] [pool] |p| one(p.all.pool.capacity_bytes as f64),
        "Bytes that the pool may hold at most.";
    gauge [pinpool.memory.cached.bytes] [pool] |p| one(p.all.pool.cached_bytes as f64),
        "The part of the free bytes that is cached for the next checkouts.";
    gauge [pinpool.memory.claimed.bytes] [pool] |p| one(p.all.pool.claimed_bytes as f64),
        "The part of the bytes in flight that stream-ready buffers have claimed.";
    gauge [pinpool.memory.requested.bytes] [pool] |p| one(p.all.pool.requested_bytes as f64),
        "The lengths asked for, of all buffers that are out.";
    gauge [pinpool.memory.rounding.bytes] [pool] |p| one(p.all.pool.rounding_bytes as f64),
        "Bytes given to buffers that are out beyond the lengths asked for.";
    gauge [pinpool.memory.largest_free.bytes] [pool] |p| one(p.all.pool.largest_free_bytes as f64),
        "The longest free range in one piece.";
    gauge [pinpool.memory.peak.bytes] [pool] |p| one(p.peak_bytes as f64),
        "The most bytes at a time since the poll before that were in use or cached by threads.";
    monotonic_counter [pinpool.checkouts.total] [pool] |p| one(p.all.pool.checkouts),
        "Segments checked out.";
    monotonic_counter [pinpool.returns.total] [pool] |p| one(p.all.pool.returns),
        "Segments that came back.";
    monotonic_counter [pinpool.misses.total] [pool] |p| one(p.all.pool.misses),
        "Requests that the thread's own cache could not serve.";
    monotonic_counter [pinpool.reclaims.total] [pool] |p| one(p.all.pool.reclaims),
        "Times that cached segments were taken back from the threads.";
    monotonic_counter [pinpool.growths.total] [pool] |p| one(p.all.pool.growths),
        "Regions that the pool began to pin because a request found nothing.";
    monotonic_counter [pinpool.growth_failures.total] [pool] |p| one(p.all.pool.growth_failures),
        "Times that pinning ended before all of a region was pinned.";
    monotonic_counter [pinpool.waits.total] [pool] |p| one(p.all.pool.waits),
        "Requests that had to wait.";
    monotonic_counter [pinpool.timeouts.total] [pool] |p| one(p.all.pool.timeouts),
        "Waits that were given up at their deadline.";
    monotonic_counter [pinpool.abandoned.total] [pool] |p| one(p.all.pool.abandoned),
        "Waits whose future was dropped: a client went away, or a runtime's own timeout passed.";
    monotonic_counter [pinpool.refused.total] [pool, reason]
        |p| each([
            ("exhausted", p.all.pool.exhausted),
            ("queue_full", p.all.pool.queue_full),
            ("impossible", p.all.pool.impossible),
            ("closed", p.all.pool.errors.closed),
        ]),
        "Checkouts that the pool refused, by reason: exhausted, queue_full, impossible, closed.";
    gauge [pinpool.waiting.requests] [pool] |p| one(p.all.pool.waiting as f64),
        "Requests that wait now.";
    monotonic_counter [pinpool.errors.total] [pool, class] |p| each(p.all.pool.errors.by_class()),
        "Checkouts that ended with an error, by its class: argument, capture, transient, closed, cancelled, device_lost, driver_shutdown.";
    histogram [pinpool.wait.seconds] [pool] |p| one(p.all.waiting),
        "How long requests waited for memory.";
    histogram [pinpool.holding.seconds] [pool] |p| one(p.all.holding),
        "How long buffers were out; of a sample, one in eight of the checkouts that no cache served.";
    gauge [pinpool.pinning.bytes_per_second] [pool]
        |p| one(p.all.pinning.bytes_per_second().unwrap_or(0.0)),
        "Bytes pinned per second spent in pinning.";
    gauge [pinpool.pinning.longest_call.seconds] [pool]
        |p| one(p.all.pinning.longest_call.as_secs_f64()),
        "The longest single call that pinned.";
    gauge [pinpool.sampled.timestamp.seconds] [pool] |p| one(p.at_seconds),
        "When the sampler last looked at the pool, in seconds since 1970; 0 when the pool has ended.";
    gauge [pinpool.stuck.buffers] [pool] |p| one(p.stuck_buffers as f64),
        "Buffers known to be out for longer than the sampler's threshold, long-lived and quarantined ones left out.";
    gauge [pinpool.stuck.bytes] [pool] |p| one(p.stuck_bytes as f64),
        "Bytes of buffers known to be out for longer than the sampler's threshold, long-lived and quarantined ones left out.";
    gauge [pinpool.class.free.segments] [pool, stride] |p| each(p.by_stride(|class| class.free as f64)),
        "Segments of a size class that can be checked out; stride is the class's bytes, or large.";
    gauge [pinpool.class.out.segments] [pool, stride] |p| each(p.by_stride(|class| class.out as f64)),
        "Segments of a size class that are checked out, in flight or quarantined.";
    gauge [pinpool.class.cached.segments] [pool, stride] |p| each(p.by_stride(|class| class.cached as f64)),
        "The part of the free segments of a size class that is cached for the next checkouts.";
    monotonic_counter [pinpool.class.checkouts.total] [pool, stride]
        |p| each(p.by_stride(|class| class.checkouts)),
        "Segments of a size class checked out.";
    histogram [pinpool.flight.seconds] [device] |d| one(d.stats.flight),
        "From submitting to being seen complete; of a sample, one in sixteen of each stream.";
    monotonic_counter [pinpool.device.errors.total] [device, class]
        |d| each(d.stats.errors.by_class()),
        "Driver calls that failed, by the class of the error.";
    monotonic_counter [pinpool.device.submitted.total] [device] |d| one(d.stats.submitted),
        "Copies and holds submitted.";
    monotonic_counter [pinpool.device.completed.total] [device] |d| one(d.stats.completed),
        "Copies and holds known to be complete.";
    monotonic_counter [pinpool.device.copied.bytes.total] [device, direction]
        |d| each([("upload", d.stats.uploaded_bytes), ("download", d.stats.downloaded_bytes)]),
        "Bytes of copies that the driver accepted; direction is upload or download.";
    gauge [pinpool.device.registered.bytes] [device] |d| one(d.stats.registered_bytes as f64),
        "Bytes of values registered with the device.";
    gauge [pinpool.device.lost] [device] |d| one(f64::from(d.stats.lost.is_some())),
        "1 if the device is lost, else 0.";
    gauge [pinpool.device.stuck.streams] [device] |d| one(d.stuck_streams as f64),
        "Streams on which nothing completed for longer than the sampler's threshold, with work in flight.";
    gauge [pinpool.stream.in_flight.bytes] [device, stream]
        |d| each(d.by_stream(|[bytes, _]| bytes)),
        "Bytes of segments in flight on a stream: on one with a gauge of its own, or under other on the rest together.";
    gauge [pinpool.stream.in_flight.entries] [device, stream]
        |d| each(d.by_stream(|[_, entries]| entries)),
        "Copies and holds in flight on a stream: on one with a gauge of its own, or under other on the rest together.";
}

/// Reads all metrics of a sample.
pub(super) fn read(sample: Sample<'_>) -> impl Iterator<Item = (Key, Value)> {
    ROWS.iter().enumerate().flat_map(move |(row, Row { read, .. })| {
        read(sample).into_iter().map(move |(label, value)| ((row, label), value))
    })
}

/// Sends a value as events. `first`: the value of the first label.
pub(super) fn send_event((row, label): &Key, value: &Value, first: &str) {
    let send = |number: &dyn tracing::Value| (ROWS[*row].send)(number, first, label);
    match value {
        Value::Counter(count) => send(count),
        Value::Gauge(level) => send(level),
        Value::Histogram(durations) => thinned(durations).for_each(|seconds| send(&seconds)),
    }
}

/// The duration, in seconds, sent for each of a bucket: three quarters of the upper bound.
fn stands_for(upper: Option<Duration>) -> f64 {
    0.75 * upper.unwrap_or(BOUNDS[BOUNDS.len() - 1] * 2).as_secs_f64()
}

/// The durations of a histogram, each as what stands for it. More than [`REPLAYED`] are thinned, in
/// the same proportions, to at least one a bucket: there are half as many buckets.
fn thinned(durations: &Histogram) -> impl Iterator<Item = f64> + '_ {
    let all = durations.count();
    let shown = move |count: u64| match all {
        0..=REPLAYED => count,
        _ => 1.max((u128::from(count) * u128::from(REPLAYED / 2) / u128::from(all)) as u64),
    };
    let buckets = durations.buckets().filter(|(_, count)| *count > 0);
    buckets.flat_map(move |(upper, count)| std::iter::repeat_n(stands_for(upper), shown(count) as usize))
}

/// Describes each metric to the facade.
#[cfg(feature = "metrics")]
pub(super) fn describe() {
    metrics::with_recorder(|recorder| {
        for metric in METRICS {
            // The facade has no unit of bytes a second; the metric's name has it.
            let unit = match metric.name.trim_end_matches(".total").rsplit('.').next() {
                Some("bytes") => Some(metrics::Unit::Bytes),
                Some("seconds") => Some(metrics::Unit::Seconds),
                _ => Some(metrics::Unit::Count),
            };
            let (name, help) = (metric.name.into(), metric.help.into());
            match metric.kind {
                "counter" => recorder.describe_counter(name, unit, help),
                "gauge" => recorder.describe_gauge(name, unit, help),
                _ => recorder.describe_histogram(name, unit, help),
            }
        }
    });
}

/// Sends a value to the facade. Counts of a histogram are exact where the recorder's buckets have
/// the bounds of [`Histogram::bounds_seconds`].
#[cfg(feature = "metrics")]
pub(super) fn send_to_recorder((row, label): &Key, value: &Value, first: &str) {
    static RECORDER_METADATA: metrics::Metadata<'static> =
        metrics::Metadata::new(TARGET, metrics::Level::INFO, Some(module_path!()));
    let metric = &METRICS[*row];
    let labels = metric.labels.iter().zip([first, &**label]);
    let labels: Vec<metrics::Label> =
        labels.map(|(name, value)| metrics::Label::new(*name, value.to_owned())).collect();
    let key = metrics::Key::from_parts(metric.name, labels);
    metrics::with_recorder(|recorder| match value {
        Value::Counter(count) => recorder.register_counter(&key, &RECORDER_METADATA).increment(*count),
        Value::Gauge(level) => recorder.register_gauge(&key, &RECORDER_METADATA).set(*level),
        Value::Histogram(durations) => {
            for (upper, count) in durations.buckets().filter(|(_, count)| *count > 0) {
                let histogram = recorder.register_histogram(&key, &RECORDER_METADATA);
                histogram.record_many(stands_for(upper), count as usize);
            }
        }
    });
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_right_for_both_manners() {
        let mut seen = HashSet::new();
        for metric in METRICS {
            let name = metric.name.replace('.', "_");
            assert!(name.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_')), "{name}");
            assert_eq!(metric.kind == "counter", name.ends_with("_total"), "{name}");
            assert!(metric.kind != "histogram" || name.ends_with("_seconds"), "{name}");
            assert!(seen.insert(name), "twice");
        }
    }

    #[test]
    fn durations_are_replayed_in_their_buckets_and_too_many_are_thinned_in_proportion() {
        let mut histogram = Histogram::default();
        (0..3).for_each(|_| histogram.record(Duration::from_millis(1)));
        assert_eq!(thinned(&histogram).count(), 3, "few are shown one by one");
        (0..6000).for_each(|_| histogram.record(Duration::from_secs(1)));
        let shown = |upper: Duration| thinned(&histogram).filter(|s| *s == stands_for(Some(upper))).count();
        assert_eq!((shown(BOUNDS[10]), shown(BOUNDS[20])), (1, 31), "what is rare is shown all the same");
        // Every bucket has something, and all but one have little.
        BOUNDS.iter().for_each(|bound| histogram.record(*bound));
        histogram.record(Duration::MAX);
        assert!(thinned(&histogram).count() <= REPLAYED as usize);
        let mut again = Histogram::default();
        thinned(&histogram).for_each(|seconds| again.record(Duration::from_secs_f64(seconds)));
        assert!(again.buckets().all(|(_, count)| count > 0), "each is in the bucket that it stands for");
    }
}
