//! The metrics: one table, of which everything about a metric is made.
//!
//! A row has the kind, name and labels of a metric, how it is read from a sample, and what it measures. Four
//! things are made of it: [`METRICS`] with its page, for authors of dashboards; what a poll reads; the events, which
//! tracing-opentelemetry's `MetricsLayer` turns into metrics (it looks at the first part of a field's name:
//! `monotonic_counter.`, `gauge.`, `histogram.`); and what the `metrics` facade is given. The table is a macro, since a
//! field's name has to be known when the crate is compiled.
//!
//! The first label says what the metric is of, a `pool` or a `device`. A row with a second label reads a list of label
//! values, each with its value. CONTRIBUTING.md has all steps to a new metric.

use std::borrow::Cow;
use std::time::Duration;

use super::counters::{BOUNDS, ClassStats, Histogram};
use super::snapshot::{DeviceStats, Snapshot};

/// The target of events that carry metrics.
pub(super) const TARGET: &str = "pinpool::metrics";
/// Their level: there are hundreds a poll, and a log that does not ask for them is not to have them.
pub(super) const LEVEL: tracing::Level = tracing::Level::TRACE;

/// Events that one poll makes of one histogram at most.
const REPLAYED: u64 = 64;

/// How a metric behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MetricKind {
    /// Counts up; each poll sends the increase since the poll before.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Durations.
    Histogram,
}

/// One metric. [`METRICS`] lists all of them.
///
/// ```
/// for metric in pinpool::telemetry::METRICS {
///     println!("{} {:?}: {}", metric.prometheus_name(), metric.labels, metric.help);
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Metric {
    /// Its name in OpenTelemetry's style, with points. It ends with the unit: `bytes`, `seconds`, `bytes_per_second`, or
    /// what is counted; a counter's has `total` after that.
    pub name: &'static str,
    /// How it behaves.
    pub kind: MetricKind,
    /// The names of its labels (attributes).
    pub labels: &'static [&'static str],
    /// What it measures.
    pub help: &'static str,
}

impl Metric {
    /// The name in Prometheus's style: underscores in place of the points.
    #[must_use]
    pub fn prometheus_name(&self) -> String {
        self.name.replace('.', "_")
    }
}

/// A poll of a pool: what its metrics are read from.
pub(super) struct PoolSample {
    pub(super) snapshot: Snapshot,
    pub(super) peak_bytes: usize,
    pub(super) stuck_buffers: usize,
    pub(super) stuck_bytes: usize,
    /// The time of the poll, in seconds since 1970.
    pub(super) at_seconds: f64,
}

impl PoolSample {
    fn by_stride(&self, of: fn(&ClassStats) -> u64) -> impl Iterator<Item = (String, u64)> {
        let label = |class: &ClassStats| class.stride.map_or("large".to_owned(), |stride| stride.to_string());
        self.snapshot.classes.iter().map(move |class| (label(class), of(class)))
    }
}

/// A poll of a device: what its metrics are read from.
pub(super) struct DeviceSample {
    pub(super) stats: DeviceStats,
    pub(super) stuck_streams: usize,
    pub(super) streams: Vec<StreamSample>,
}

/// What is in flight on one stream, or on all streams that have no label of their own.
#[derive(Default)]
pub(super) struct StreamSample {
    pub(super) label: Cow<'static, str>,
    pub(super) bytes: usize,
    pub(super) entries: usize,
}

impl DeviceSample {
    fn by_stream(&self, of: fn(&StreamSample) -> usize) -> impl Iterator<Item = (Cow<'static, str>, usize)> {
        self.streams.iter().map(move |stream| (stream.label.clone(), of(stream)))
    }
}

/// A poll of a pool or of a device. A row reads the one that its first label names; with neither, nothing is read.
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
    /// The value to send: what was counted after the earlier reading `before`, or a gauge's level.
    pub(super) fn since(&self, before: Option<&Self>) -> Self {
        match (self, before) {
            (Self::Counter(now), Some(Self::Counter(before))) => Self::Counter(now.saturating_sub(*before)),
            (Self::Histogram(now), Some(Self::Histogram(before))) => {
                Self::Histogram(now.since(before).into())
            }
            _ => self.clone(),
        }
    }

    /// The value to subtract from the next reading: the higher of two counts. A later reading may be lower, since a call
    /// that refills a thread's list may count its segments as checked out and returned for a moment, and since a stream
    /// that ends may be counted late; and what was sent cannot be taken back.
    pub(super) fn or_later(self, before: Option<Self>) -> Self {
        match (self, before) {
            (Self::Counter(now), Some(Self::Counter(before))) => Self::Counter(now.max(before)),
            (now, _) => now,
        }
    }
}

/// Values of one metric, each with its second label, which is empty where the metric has none.
type Readings = Vec<(Cow<'static, str>, Value)>;

/// The part of a row that only this module needs.
struct Row {
    read: fn(Sample) -> Option<Readings>,
    /// Sends a value as events, with the values of the first and the second label.
    send: fn(&Value, &str, &str),
}

macro_rules! send {
    (Counter, $value:ident, $($rest:tt)*) => {
        if let Value::Counter(count) = $value {
            event!(monotonic_counter, *count, $($rest)*)
        }
    };
    (Gauge, $value:ident, $($rest:tt)*) => {
        if let Value::Gauge(level) = $value {
            event!(gauge, *level, $($rest)*)
        }
    };
    (Histogram, $value:ident, $($rest:tt)*) => {
        if let Value::Histogram(durations) = $value {
            for seconds in thinned(durations) {
                event!(histogram, seconds, $($rest)*)
            }
        }
    };
}

macro_rules! event {
    ($prefix:ident, $value:expr, [$($part:ident).+], $($label:ident),+) => {
        // Without a message, which would become a label.
        tracing::event!(target: TARGET, LEVEL, { $prefix.$($part).+ = $value, $($label),+ })
    };
}

macro_rules! value {
    (Histogram, $value:expr) => {
        Value::Histogram($value.into())
    };
    ($kind:ident, $value:expr) => {
        Value::$kind($value as _)
    };
}

macro_rules! readings {
    ($kind:ident, $read:expr, $scope:ident) => {
        vec![(Cow::Borrowed(""), value!($kind, $read))]
    };
    ($kind:ident, $read:expr, $scope:ident, $label:ident) => {
        $read.into_iter().map(|(label, value)| (Cow::from(label), value!($kind, value))).collect()
    };
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
                kind: MetricKind::$kind,
                labels: &[stringify!($scope) $(, stringify!($label))?],
                help: $help,
            },)*
        ];

        /// The rows of [`METRICS`], in its order.
        const ROWS: &[Row] = &[
            $(Row {
                read: |sample| {
                    let $at = sample.$scope?;
                    Some(readings!($kind, $read, $scope $(, $label)?))
                },
                send: |value, $scope, _label| {
                    $(let $label = _label;)?
                    send!($kind, value, [$first $(.$rest)*], $scope $(, $label)?);
                },
            },)*
        ];
    };
}

table! {
    Gauge [pinpool.memory.bytes] [pool, state]
        |p| [
            ("free", p.snapshot.pool.free_bytes),
            ("checked_out", p.snapshot.pool.checked_out_bytes),
            ("in_flight", p.snapshot.pool.in_flight_bytes),
            ("quarantined", p.snapshot.pool.quarantined_bytes),
            ("cut", p.snapshot.pool.cut_bytes),
        ],
        "Bytes of the pool by state: free, checked_out, in_flight, quarantined, cut. Their sum: pinned and unpinned.";
    Gauge [pinpool.memory.pinned.bytes] [pool] |p| p.snapshot.pool.pinned_bytes,
        "Bytes that are pinned.";
    Gauge [pinpool.memory.unpinned.bytes] [pool] |p| p.snapshot.pool.unpinned_bytes,
        "Bytes that the pool serves and that are not pinned.";
    Gauge [pinpool.memory.capacity.bytes] [pool] |p| p.snapshot.pool.capacity_bytes,
        "Bytes that the pool may hold at most.";
    Gauge [pinpool.memory.cached.bytes] [pool] |p| p.snapshot.pool.cached_bytes,
        "Of the free bytes, those that are cached for the next checkouts.";
    Gauge [pinpool.memory.claimed.bytes] [pool] |p| p.snapshot.pool.claimed_bytes,
        "Of the bytes in flight, those that a stream-ready buffer has claimed.";
    Gauge [pinpool.memory.requested.bytes] [pool] |p| p.snapshot.pool.requested_bytes,
        "The lengths asked for, of all buffers that are out.";
    Gauge [pinpool.memory.rounding.bytes] [pool] |p| p.snapshot.pool.rounding_bytes,
        "Bytes given to buffers that are out beyond the lengths asked for.";
    Gauge [pinpool.memory.largest_free.bytes] [pool] |p| p.snapshot.pool.largest_free_bytes,
        "The longest free range in one piece.";
    Gauge [pinpool.memory.peak.bytes] [pool] |p| p.peak_bytes,
        "The most bytes at a time since the poll before that were in use or cached by threads.";
    Counter [pinpool.checkouts.total] [pool] |p| p.snapshot.pool.checkouts,
        "Segments checked out.";
    Counter [pinpool.returns.total] [pool] |p| p.snapshot.pool.returns,
        "Segments that came back.";
    Counter [pinpool.misses.total] [pool] |p| p.snapshot.pool.misses,
        "Requests that the thread's own cache could not serve.";
    Counter [pinpool.reclaims.total] [pool] |p| p.snapshot.pool.reclaims,
        "Times that cached segments were taken back from the threads.";
    Counter [pinpool.growths.total] [pool] |p| p.snapshot.pool.growths,
        "Regions that the pool began to pin because a request found nothing.";
    Counter [pinpool.growth_failures.total] [pool] |p| p.snapshot.pool.growth_failures,
        "Times that pinning ended before all of a region was pinned.";
    Counter [pinpool.waits.total] [pool] |p| p.snapshot.pool.waits,
        "Requests that had to wait.";
    Counter [pinpool.timeouts.total] [pool] |p| p.snapshot.pool.timeouts,
        "Waits that were given up at their deadline.";
    Counter [pinpool.abandoned.total] [pool] |p| p.snapshot.pool.abandoned,
        "Waits whose future was dropped: a client went away, or a runtime's own timeout passed.";
    Counter [pinpool.refused.total] [pool, reason] |p| p.snapshot.pool.refused.by_reason(),
        "Checkouts that the pool refused, by reason: exhausted, queue_full, impossible, closed.";
    Gauge [pinpool.waiting.requests] [pool] |p| p.snapshot.pool.waiting,
        "Requests that wait now.";
    Counter [pinpool.errors.total] [pool, class] |p| p.snapshot.pool.errors.by_class(),
        "Checkouts that ended with an error, by its class: argument, capture, transient, closed, cancelled, device_lost, driver_shutdown.";
    Histogram [pinpool.wait.seconds] [pool] |p| p.snapshot.waiting,
        "How long requests waited for memory.";
    Histogram [pinpool.holding.seconds] [pool] |p| p.snapshot.holding,
        "How long buffers were out; of a sample, one in eight of those that no cache served.";
    Gauge [pinpool.pinning.bytes_per_second] [pool]
        |p| p.snapshot.pinning.bytes_per_second().unwrap_or(0.0),
        "Bytes pinned per second spent in pinning.";
    Gauge [pinpool.pinning.longest_call.seconds] [pool]
        |p| p.snapshot.pinning.longest_call.as_secs_f64(), "The longest single call that pinned.";
    Gauge [pinpool.sampled.timestamp.seconds] [pool] |p| p.at_seconds,
        "When the sampler last looked at the pool, in seconds since 1970; 0 when the pool has ended.";
    Gauge [pinpool.stuck.buffers] [pool] |p| p.stuck_buffers,
        "Buffers known to be out for longer than the sampler's threshold, long-lived and quarantined ones left out.";
    Gauge [pinpool.stuck.bytes] [pool] |p| p.stuck_bytes,
        "Bytes of buffers known to be out for longer than the sampler's threshold, long-lived and quarantined ones left out.";
    Gauge [pinpool.class.free.segments] [pool, stride] |p| p.by_stride(|class| class.free),
        "Segments of a size class that can be checked out; stride is the class's bytes, or large.";
    Gauge [pinpool.class.out.segments] [pool, stride] |p| p.by_stride(|class| class.out),
        "Segments of a size class that are checked out, in flight or quarantined.";
    Gauge [pinpool.class.cached.segments] [pool, stride] |p| p.by_stride(|class| class.cached),
        "Of the free segments of a size class, those that are cached for the next checkouts.";
    Counter [pinpool.class.checkouts.total] [pool, stride] |p| p.by_stride(|class| class.checkouts),
        "Segments of a size class checked out.";
    Histogram [pinpool.flight.seconds] [device] |d| d.stats.flight,
        "From submitting to being seen complete; of a sample, one in sixteen of each stream.";
    Counter [pinpool.device.errors.total] [device, class] |d| d.stats.errors.by_class(),
        "Driver calls that failed, by the class of the error.";
    Counter [pinpool.device.submitted.total] [device] |d| d.stats.submitted,
        "Copies and holds submitted.";
    Counter [pinpool.device.completed.total] [device] |d| d.stats.completed,
        "Copies and holds known to be complete.";
    Counter [pinpool.device.copied.bytes.total] [device, direction]
        |d| [("upload", d.stats.uploaded_bytes), ("download", d.stats.downloaded_bytes)],
        "Bytes of copies that the driver accepted; direction is upload or download.";
    Gauge [pinpool.device.registered.bytes] [device] |d| d.stats.registered_bytes,
        "Bytes of values registered with the device.";
    Gauge [pinpool.device.lost] [device] |d| u64::from(d.stats.lost.is_some()),
        "1 if the device is lost, else 0.";
    Gauge [pinpool.device.stuck.streams] [device] |d| d.stuck_streams,
        "Streams with work in flight of which nothing completed for longer than the sampler's threshold.";
    Gauge [pinpool.stream.in_flight.bytes] [device, stream] |d| d.by_stream(|stream| stream.bytes),
        "Bytes of segments in flight on a stream: on one of the busiest, or under other on the rest together.";
    Gauge [pinpool.stream.in_flight.entries] [device, stream]
        |d| d.by_stream(|stream| stream.entries),
        "Copies and holds in flight on a stream: on one of the busiest, or under other on the rest together.";
}

/// A value that was read, by the metric's place in the table and the value of its second label.
pub(super) type Key = (usize, Cow<'static, str>);

/// Reads all metrics of a sample.
pub(super) fn read(sample: Sample<'_>) -> impl Iterator<Item = (Key, Value)> + '_ {
    let rows = ROWS.iter().enumerate();
    rows.filter_map(move |(row, Row { read, .. })| Some((row, read(sample)?)))
        .flat_map(|(row, readings)| readings.into_iter().map(move |(label, value)| ((row, label), value)))
}

/// Sends a value as events. `first`: the value of the first label.
pub(super) fn send_event(key: &Key, value: &Value, first: &str) {
    (ROWS[key.0].send)(value, first, &key.1);
}

/// The duration that is sent for each one of a bucket, in seconds: three quarters of the bucket's upper bound.
fn stands_for(upper: Option<Duration>) -> f64 {
    0.75 * upper.unwrap_or(BOUNDS[BOUNDS.len() - 1] * 2).as_secs_f64()
}

/// The durations of a histogram, each as what stands for it. Where there are more than [`REPLAYED`], there are fewer, in
/// the same proportions.
fn thinned(durations: &Histogram) -> Vec<f64> {
    let all = durations.count();
    let buckets = || durations.buckets().filter(|bucket| bucket.count > 0);
    // Each bucket is shown at least once; the rest is shared in proportion.
    let rest = REPLAYED.saturating_sub(buckets().count() as u64);
    let shown = |count: u64| match all {
        0..=REPLAYED => count,
        _ => 1 + (u128::from(count) * u128::from(rest) / u128::from(all)) as u64,
    };
    buckets().flat_map(|b| std::iter::repeat_n(stands_for(b.upper), shown(b.count) as usize)).collect()
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
                MetricKind::Counter => recorder.describe_counter(name, unit, help),
                MetricKind::Gauge => recorder.describe_gauge(name, unit, help),
                MetricKind::Histogram => recorder.describe_histogram(name, unit, help),
            }
        }
    });
}

/// Sends a value to the facade. Counts of a histogram are exact where the recorder's buckets have the bounds of
/// [`Histogram::bounds_seconds`].
#[cfg(feature = "metrics")]
pub(super) fn send_to_recorder(key: &Key, value: &Value, first: &str) {
    static RECORDER_METADATA: metrics::Metadata<'static> =
        metrics::Metadata::new(TARGET, metrics::Level::INFO, Some(module_path!()));
    let metric = &METRICS[key.0];
    let labels = metric.labels.iter().zip([first, &*key.1]);
    let labels: Vec<metrics::Label> =
        labels.map(|(name, value)| metrics::Label::new(*name, value.to_owned())).collect();
    let key = metrics::Key::from_parts(metric.name, labels);
    metrics::with_recorder(|recorder| match value {
        Value::Counter(count) => recorder.register_counter(&key, &RECORDER_METADATA).increment(*count),
        Value::Gauge(level) => recorder.register_gauge(&key, &RECORDER_METADATA).set(*level),
        Value::Histogram(durations) => {
            for bucket in durations.buckets().filter(|bucket| bucket.count > 0) {
                let histogram = recorder.register_histogram(&key, &RECORDER_METADATA);
                histogram.record_many(stands_for(bucket.upper), bucket.count as usize);
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
            let name = metric.prometheus_name();
            assert!(seen.insert(name.clone()), "{name} is there twice");
            assert!(
                name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'),
                "{name}"
            );
            assert_eq!(metric.kind == MetricKind::Counter, name.ends_with("_total"), "{name}");
            assert!(metric.kind != MetricKind::Histogram || name.ends_with("_seconds"), "{name}");
        }
    }

    #[test]
    fn a_bucket_is_stood_for_by_one_of_its_own() {
        for upper in BOUNDS.map(Some).into_iter().chain([None]) {
            let mut histogram = Histogram::default();
            histogram.record(Duration::from_secs_f64(stands_for(upper)));
            let bucket = histogram.buckets().find(|bucket| bucket.count == 1).unwrap();
            assert_eq!(bucket.upper, upper);
        }
    }

    #[test]
    fn too_many_are_thinned_in_proportion() {
        let mut histogram = Histogram::default();
        (0..3).for_each(|_| histogram.record(Duration::from_millis(1)));
        assert_eq!(thinned(&histogram).len(), 3, "few are shown one by one");
        (0..6000).for_each(|_| histogram.record(Duration::from_secs(1)));
        let shown = |upper: Duration| {
            thinned(&histogram).iter().filter(|seconds| **seconds == stands_for(Some(upper))).count()
        };
        assert_eq!((shown(BOUNDS[10]), shown(BOUNDS[20])), (1, 62), "what is rare is shown all the same");
        // As many buckets as there are, of which all but one have little.
        for bound in BOUNDS {
            histogram.record(bound);
        }
        histogram.record(Duration::MAX);
        let mut shown = thinned(&histogram);
        assert!(shown.len() <= REPLAYED as usize);
        shown.dedup();
        assert_eq!(shown.len(), BOUNDS.len() + 1);
    }
}
