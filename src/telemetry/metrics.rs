//! The metrics by name, and how each is sent.
//!
//! One table has name, kind, unit, labels and help of each metric. Three things are made of it: the events, which
//! tracing-opentelemetry's `MetricsLayer` turns into metrics (it looks at the first part of a field's name:
//! `monotonic_counter.`, `gauge.`, `histogram.`); what the `metrics` facade is given; and [`METRICS`], for authors of
//! dashboards. The table is a macro, since a field's name has to be known when the crate is compiled.
//!
//! A new metric is a row here, a line in the sampler that sends it, and the same row on the module page of `telemetry`
//! (a test compares the two). A new label is also a field of `Labels`, a line in `Labels::named`, and a line in
//! `event!`. CONTRIBUTING.md has all steps.

use super::counters::Histogram;

/// The target of events that carry metrics.
pub(super) const TARGET: &str = "pinpool::metrics";
/// Their level: there are hundreds a poll, and a log that does not ask for them is not to have them.
pub(super) const LEVEL: tracing::Level = tracing::Level::TRACE;

/// Events that one poll makes of one histogram at most.
const REPLAYED: u64 = 64;

/// How a metric behaves.
///
/// ```
/// use pinpool::telemetry::{METRICS, MetricKind};
///
/// let durations = METRICS.iter().filter(|metric| metric.kind == MetricKind::Histogram);
/// assert!(durations.map(|metric| metric.name).any(|name| name == "pinpool.wait.seconds"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MetricKind {
    /// Counts up; each poll sends the increase since the poll before.
    Counter,
    /// A whole number that goes up and down.
    Gauge,
    /// A number with a fraction that goes up and down.
    Real,
    /// Durations.
    Histogram,
}

/// The unit of a metric's numbers.
///
/// ```
/// use pinpool::telemetry::{METRICS, MetricUnit};
///
/// let pinned = METRICS.iter().find(|metric| metric.name == "pinpool.memory.pinned.bytes");
/// assert_eq!(pinned.map(|metric| metric.unit), Some(MetricUnit::Bytes));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MetricUnit {
    /// Bytes.
    Bytes,
    /// Seconds.
    Seconds,
    /// Bytes a second.
    BytesPerSecond,
    /// A count; the metric's name says of what.
    Count,
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
    /// Its name in OpenTelemetry's style, with points.
    pub name: &'static str,
    /// How it behaves.
    pub kind: MetricKind,
    /// The unit of its numbers.
    pub unit: MetricUnit,
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

/// A value to send.
#[derive(Clone, Debug)]
pub(super) enum MetricValue {
    Count(u64),
    Level(u64),
    Real(f64),
    Durations(Box<Histogram>),
}

/// The values of a metric's labels; `None` for those that the metric does not have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Labels {
    pub(super) pool: Option<String>,
    pub(super) state: Option<&'static str>,
    pub(super) stride: Option<String>,
    pub(super) class: Option<&'static str>,
    pub(super) device: Option<String>,
    pub(super) stream: Option<String>,
    pub(super) direction: Option<&'static str>,
    pub(super) reason: Option<&'static str>,
}

impl Labels {
    /// The labels that have a value, with their names.
    #[cfg(any(test, feature = "metrics"))]
    fn named(&self) -> impl Iterator<Item = (&'static str, String)> {
        let all = [
            ("pool", self.pool.as_deref()),
            ("state", self.state),
            ("stride", self.stride.as_deref()),
            ("class", self.class),
            ("device", self.device.as_deref()),
            ("stream", self.stream.as_deref()),
            ("direction", self.direction),
            ("reason", self.reason),
        ];
        all.map(|(name, value)| value.map(|value| (name, value.to_owned()))).into_iter().flatten()
    }
}

/// Emits one event. Labels without a value are left out.
macro_rules! event {
    ($prefix:ident, [$($part:ident).+], $value:expr, $labels:ident) => {
        // Without a message, which would become a label.
        tracing::event!(target: TARGET, LEVEL, {
            $prefix.$($part).+ = $value,
            pool = $labels.pool.as_deref(),
            state = $labels.state,
            stride = $labels.stride.as_deref(),
            class = $labels.class,
            device = $labels.device.as_deref(),
            stream = $labels.stream.as_deref(),
            direction = $labels.direction,
            reason = $labels.reason
        })
    };
}

/// Emits the events of a value: one, or of durations one for each that is shown.
macro_rules! send {
    (Counter, $name:tt, $value:ident, $labels:ident) => {
        if let MetricValue::Count(count) = *$value {
            event!(monotonic_counter, $name, count, $labels)
        }
    };
    (Gauge, $name:tt, $value:ident, $labels:ident) => {
        if let MetricValue::Level(level) = *$value {
            event!(gauge, $name, level, $labels)
        }
    };
    (Real, $name:tt, $value:ident, $labels:ident) => {
        if let MetricValue::Real(real) = *$value {
            event!(gauge, $name, real, $labels)
        }
    };
    (Histogram, $name:tt, $value:ident, $labels:ident) => {
        if let MetricValue::Durations(durations) = $value {
            for (seconds, count) in thinned(durations) {
                for _ in 0..count {
                    event!(histogram, $name, seconds, $labels)
                }
            }
        }
    };
}

macro_rules! table {
    ($($id:ident: $kind:ident, [$first:ident $(.$rest:ident)*], $unit:ident, [$($label:ident),*], $help:literal;)*) => {
        /// The metrics, in the order of the table.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(super) enum Id {
            $($id,)*
        }

        /// Every metric that a [`Sampler`](super::Sampler) sends.
        pub const METRICS: &[Metric] = &[
            $(Metric {
                name: concat!(stringify!($first) $(, ".", stringify!($rest))*),
                kind: MetricKind::$kind,
                unit: MetricUnit::$unit,
                labels: &[$(stringify!($label)),*],
                help: $help,
            },)*
        ];

        /// Sends a value as events.
        pub(super) fn send_event(id: Id, value: &MetricValue, labels: &Labels) {
            match id {
                $(Id::$id => send!($kind, [$first $(.$rest)*], value, labels),)*
            }
        }
    };
}

table! {
    MemoryBytes: Gauge, [pinpool.memory.bytes], Bytes, [pool, state],
        "Bytes of the pool by state: free, checked_out, in_flight, quarantined, cut. Their sum: pinned and unpinned.";
    PinnedBytes: Gauge, [pinpool.memory.pinned.bytes], Bytes, [pool], "Bytes that are pinned.";
    UnpinnedBytes: Gauge, [pinpool.memory.unpinned.bytes], Bytes, [pool],
        "Bytes that the pool serves and that are not pinned.";
    CapacityBytes: Gauge, [pinpool.memory.capacity.bytes], Bytes, [pool], "Bytes that the pool may hold at most.";
    CachedBytes: Gauge, [pinpool.memory.cached.bytes], Bytes, [pool],
        "Of the free bytes, those that are cached for the next checkouts.";
    ClaimedBytes: Gauge, [pinpool.memory.claimed.bytes], Bytes, [pool],
        "Of the bytes in flight, those that a stream-ready buffer has claimed.";
    RequestedBytes: Gauge, [pinpool.memory.requested.bytes], Bytes, [pool],
        "The lengths asked for, of all buffers that are out.";
    RoundingBytes: Gauge, [pinpool.memory.rounding.bytes], Bytes, [pool],
        "Bytes given to buffers that are out beyond the lengths asked for.";
    LargestFreeBytes: Gauge, [pinpool.memory.largest_free.bytes], Bytes, [pool], "The longest free range in one piece.";
    PeakBytes: Gauge, [pinpool.memory.peak.bytes], Bytes, [pool],
        "The most bytes at a time since the poll before that were in use or cached by threads.";
    Checkouts: Counter, [pinpool.checkouts.total], Count, [pool], "Segments checked out.";
    Returns: Counter, [pinpool.returns.total], Count, [pool], "Segments that came back.";
    Misses: Counter, [pinpool.misses.total], Count, [pool], "Requests that the thread's own cache could not serve.";
    Reclaims: Counter, [pinpool.reclaims.total], Count, [pool],
        "Times that cached segments were taken back from the threads.";
    Growths: Counter, [pinpool.growths.total], Count, [pool],
        "Regions that the pool began to pin because a request found nothing.";
    GrowthFailures: Counter, [pinpool.growth_failures.total], Count, [pool],
        "Times that pinning ended before all of a region was pinned.";
    Waits: Counter, [pinpool.waits.total], Count, [pool], "Requests that had to wait.";
    Timeouts: Counter, [pinpool.timeouts.total], Count, [pool], "Waits that were given up at their deadline.";
    Abandoned: Counter, [pinpool.abandoned.total], Count, [pool],
        "Waits whose future was dropped: a client went away, or a runtime's own timeout passed.";
    Refused: Counter, [pinpool.refused.total], Count, [pool, reason],
        "Checkouts that the pool refused, by reason: exhausted, queue_full, impossible, closed.";
    Waiting: Gauge, [pinpool.waiting.requests], Count, [pool], "Requests that wait now.";
    Errors: Counter, [pinpool.errors.total], Count, [pool, class],
        "Checkouts that ended with an error, by its class: argument, capture, transient, closed, cancelled, device_lost, driver_shutdown.";
    WaitSeconds: Histogram, [pinpool.wait.seconds], Seconds, [pool], "How long requests waited for memory.";
    HoldingSeconds: Histogram, [pinpool.holding.seconds], Seconds, [pool],
        "How long buffers were out; of a sample, one in eight of those that no cache served.";
    PinningSpeed: Real, [pinpool.pinning.bytes_per_second], BytesPerSecond, [pool],
        "Bytes pinned per second spent in pinning.";
    LongestPin: Real, [pinpool.pinning.longest_call.seconds], Seconds, [pool], "The longest single call that pinned.";
    Sampled: Real, [pinpool.sampled.timestamp.seconds], Seconds, [pool],
        "When the sampler last looked at the pool, in seconds since 1970; 0 when the pool has ended.";
    StuckBuffers: Gauge, [pinpool.stuck.buffers], Count, [pool],
        "Buffers known to be out for longer than the sampler's threshold, long-lived and quarantined ones left out.";
    StuckBytes: Gauge, [pinpool.stuck.bytes], Bytes, [pool],
        "Bytes of buffers known to be out for longer than the sampler's threshold, long-lived and quarantined ones left out.";
    ClassFree: Gauge, [pinpool.class.free.segments], Count, [pool, stride],
        "Segments of a size class that can be checked out; stride is the class's bytes, or large.";
    ClassOut: Gauge, [pinpool.class.out.segments], Count, [pool, stride],
        "Segments of a size class that are checked out, in flight or quarantined.";
    ClassCached: Gauge, [pinpool.class.cached.segments], Count, [pool, stride],
        "Of the free segments of a size class, those that are cached for the next checkouts.";
    ClassCheckouts: Counter, [pinpool.class.checkouts.total], Count, [pool, stride],
        "Segments of a size class checked out.";
    FlightSeconds: Histogram, [pinpool.flight.seconds], Seconds, [device],
        "From submitting to being seen complete; of a sample, one in sixteen of each stream.";
    DeviceErrors: Counter, [pinpool.device.errors.total], Count, [device, class],
        "Driver calls that failed, by the class of the error.";
    DeviceSubmitted: Counter, [pinpool.device.submitted.total], Count, [device], "Copies and holds submitted.";
    DeviceCompleted: Counter, [pinpool.device.completed.total], Count, [device],
        "Copies and holds known to be complete.";
    DeviceCopied: Counter, [pinpool.device.copied.bytes.total], Bytes, [device, direction],
        "Bytes of copies that the driver accepted; direction is upload or download.";
    DeviceRegistered: Gauge, [pinpool.device.registered.bytes], Bytes, [device],
        "Bytes of values registered with the device.";
    DeviceLost: Gauge, [pinpool.device.lost], Count, [device], "1 if the device is lost, else 0.";
    StuckStreams: Gauge, [pinpool.device.stuck.streams], Count, [device],
        "Streams with work in flight of which nothing completed for longer than the sampler's threshold.";
    StreamBytes: Gauge, [pinpool.stream.in_flight.bytes], Bytes, [device, stream],
        "Bytes of segments in flight on a stream: on one of the busiest, or under other on the rest together.";
    StreamEntries: Gauge, [pinpool.stream.in_flight.entries], Count, [device, stream],
        "Copies and holds in flight on a stream: on one of the busiest, or under other on the rest together.";
}

impl Id {
    #[cfg(any(test, feature = "metrics"))]
    fn metric(self) -> &'static Metric {
        // The enum and the list are made of the same table.
        &METRICS[self as usize]
    }
}

/// The duration that is sent for each one of a bucket, in seconds: three quarters of the bucket's upper bound.
fn stands_for(upper: Option<std::time::Duration>) -> f64 {
    let last = Histogram::BOUNDS_NS[Histogram::BOUNDS_NS.len() - 1] as f64 * 2.0;
    upper.map_or(last, |upper| upper.as_nanos() as f64) * 0.75 / 1e9
}

/// The durations of a histogram: for each bucket a value, and how often it is sent. Where there are more than
/// [`REPLAYED`], fewer are sent, in the same proportions.
fn thinned(durations: &Histogram) -> Vec<(f64, u64)> {
    let all = durations.count();
    let buckets = || durations.buckets().filter(|bucket| bucket.count > 0);
    // Each bucket is shown at least once; the rest is shared in proportion.
    let rest = REPLAYED.saturating_sub(buckets().count() as u64);
    let shown = |count: u64| match all {
        0..=REPLAYED => count,
        _ => 1 + (u128::from(count) * u128::from(rest) / u128::from(all)) as u64,
    };
    buckets().map(|bucket| (stands_for(bucket.upper), shown(bucket.count))).collect()
}

/// Describes each metric to the facade.
#[cfg(feature = "metrics")]
pub(super) fn describe() {
    metrics::with_recorder(|recorder| {
        for metric in METRICS {
            let unit = Some(match metric.unit {
                MetricUnit::Bytes => metrics::Unit::Bytes,
                MetricUnit::Seconds => metrics::Unit::Seconds,
                // The facade has no unit of bytes a second; the metric's name has it.
                MetricUnit::BytesPerSecond | MetricUnit::Count => metrics::Unit::Count,
            });
            let (name, help) = (metric.name.into(), metric.help.into());
            match metric.kind {
                MetricKind::Counter => recorder.describe_counter(name, unit, help),
                MetricKind::Gauge | MetricKind::Real => recorder.describe_gauge(name, unit, help),
                MetricKind::Histogram => recorder.describe_histogram(name, unit, help),
            }
        }
    });
}

/// Sends a value to the facade. Counts of a histogram are exact where the recorder's buckets have the bounds of
/// [`Histogram::BOUNDS_NS`].
#[cfg(feature = "metrics")]
pub(super) fn send_to_recorder(id: Id, value: &MetricValue, labels: &Labels) {
    static RECORDER_METADATA: metrics::Metadata<'static> =
        metrics::Metadata::new(TARGET, metrics::Level::INFO, Some(module_path!()));
    let labels: Vec<metrics::Label> =
        labels.named().map(|(name, value)| metrics::Label::new(name, value)).collect();
    let key = metrics::Key::from_parts(id.metric().name, labels);
    metrics::with_recorder(|recorder| match value {
        MetricValue::Count(count) => recorder.register_counter(&key, &RECORDER_METADATA).increment(*count),
        MetricValue::Level(level) => recorder.register_gauge(&key, &RECORDER_METADATA).set(*level as f64),
        MetricValue::Real(real) => recorder.register_gauge(&key, &RECORDER_METADATA).set(*real),
        MetricValue::Durations(durations) => {
            let histogram = recorder.register_histogram(&key, &RECORDER_METADATA);
            for bucket in durations.buckets().filter(|bucket| bucket.count > 0) {
                histogram.record_many(stands_for(bucket.upper), bucket.count as usize);
            }
        }
    });
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashSet;
    use std::time::Duration;

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
            let unit = match metric.unit {
                MetricUnit::Bytes => name.trim_end_matches("_total").ends_with("_bytes"),
                MetricUnit::Seconds => name.ends_with("_seconds"),
                MetricUnit::BytesPerSecond => name.ends_with("_bytes_per_second"),
                MetricUnit::Count => !name.contains("_bytes") && !name.contains("_seconds"),
            };
            assert!(unit, "{name} does not say that it is of {:?}", metric.unit);
            assert!(metric.kind != MetricKind::Histogram || metric.unit == MetricUnit::Seconds, "{name}");
        }
    }

    #[test]
    fn the_page_has_the_table() {
        let page = include_str!("mod.rs");
        for metric in METRICS {
            let kind = match metric.kind {
                MetricKind::Counter => "counter",
                MetricKind::Gauge | MetricKind::Real => "gauge",
                MetricKind::Histogram => "histogram",
            };
            let row = format!("//! | `{}` | {kind} | {} |", metric.name, metric.labels.join(", "));
            assert!(page.contains(&row), "the page of the module lacks\n{row} {} |", metric.help);
        }
        assert_eq!(page.matches("//! | `pinpool.").count(), METRICS.len(), "the page has rows of its own");
    }

    #[test]
    fn ids_are_in_the_tables_order() {
        assert_eq!(Id::MemoryBytes.metric().name, "pinpool.memory.bytes");
        assert_eq!(Id::StreamEntries.metric().name, METRICS[METRICS.len() - 1].name);
    }

    #[test]
    fn a_bucket_is_stood_for_by_one_of_its_own() {
        for (ns, upper) in Histogram::BOUNDS_NS.iter().map(|ns| (*ns, Some(Duration::from_nanos(*ns)))) {
            let mut histogram = Histogram::default();
            histogram.record(Duration::from_secs_f64(stands_for(upper)));
            let bucket = histogram.buckets().find(|bucket| bucket.count == 1).unwrap();
            assert_eq!(bucket.upper, upper, "{ns} ns");
        }
        let mut histogram = Histogram::default();
        histogram.record(Duration::from_secs_f64(stands_for(None)));
        assert_eq!(histogram.buckets().next_back().unwrap().count, 1);
    }

    #[test]
    fn too_many_are_thinned_in_proportion() {
        let mut histogram = Histogram::default();
        (0..3).for_each(|_| histogram.record(Duration::from_millis(1)));
        assert_eq!(thinned(&histogram).iter().map(|(_, n)| n).sum::<u64>(), 3, "few are shown one by one");
        (0..6000).for_each(|_| histogram.record(Duration::from_secs(1)));
        let shown = thinned(&histogram);
        assert_eq!(
            shown.iter().map(|(_, n)| *n).collect::<Vec<_>>(),
            [1, 62],
            "what is rare is shown all the same"
        );
        // As many buckets as there are, of which all but one have little.
        for ns in &Histogram::BOUNDS_NS {
            histogram.record(Duration::from_nanos(*ns));
        }
        histogram.record(Duration::MAX);
        let shown = thinned(&histogram);
        assert_eq!(shown.len(), Histogram::BOUNDS_NS.len() + 1);
        assert!(shown.iter().all(|(_, n)| *n > 0) && shown.iter().map(|(_, n)| n).sum::<u64>() <= REPLAYED);
    }

    #[test]
    fn labels_are_those_that_are_there() {
        let labels = Labels { pool: Some("a".into()), state: Some("free"), ..Labels::default() };
        let named: Vec<_> = labels.named().collect();
        assert_eq!(named, [("pool", "a".into()), ("state", "free".into())]);
    }
}
