//! The metrics by name, and how each is sent.
//!
//! One table has all of them: name, kind, unit, labels, and what it is. From it follow the events that
//! tracing-opentelemetry's `MetricsLayer` turns into metrics (it goes by the first part of a field's name:
//! `monotonic_counter.`, `gauge.`, `histogram.`), what the `metrics` facade is told, and [`METRICS`], for whoever
//! writes dashboards. A field's name has to be known when the crate is compiled; that is why the table is a macro.

use super::counters::Histogram;

/// The target of events that carry metrics.
pub(super) const TARGET: &str = "pinpool::metrics";

/// Events that one poll makes of one histogram at most.
const REPLAYED: u64 = 64;

/// How a metric behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MetricKind {
    /// Counts up; each poll sends what came since the one before.
    Counter,
    /// Has a value at a moment: a whole number.
    Gauge,
    /// The same, with a fraction.
    Real,
    /// Durations.
    Histogram,
}

/// What a metric's numbers are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MetricUnit {
    /// Bytes.
    Bytes,
    /// Seconds.
    Seconds,
    /// Bytes a second.
    BytesPerSecond,
    /// Things that are counted: the name says which.
    Count,
}

/// One metric. All of them: [`METRICS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Metric {
    /// Its name, in OpenTelemetry's manner. In Prometheus's, the points are underscores.
    pub name: &'static str,
    /// How it behaves.
    pub kind: MetricKind,
    /// What its numbers are of.
    pub unit: MetricUnit,
    /// Its labels (attributes).
    pub labels: &'static [&'static str],
    /// What it is.
    pub help: &'static str,
}

impl Metric {
    /// The name as Prometheus has it.
    #[must_use]
    pub fn prometheus_name(&self) -> String {
        self.name.replace('.', "_")
    }
}

/// A value to be sent.
#[derive(Clone, Debug)]
pub(super) enum MetricValue {
    Count(u64),
    Level(u64),
    Real(f64),
    Durations(Box<Histogram>),
}

/// The labels that a value has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Labels {
    pub(super) pool: Option<String>,
    pub(super) state: Option<&'static str>,
    pub(super) stride: Option<String>,
    pub(super) class: Option<&'static str>,
    pub(super) device: Option<String>,
    pub(super) stream: Option<String>,
    pub(super) direction: Option<&'static str>,
}

impl Labels {
    /// Those that there are, by name.
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
        ];
        all.map(|(name, value)| value.map(|value| (name, value.to_owned()))).into_iter().flatten()
    }
}

/// One event. Labels that are not there are left out of it.
macro_rules! event {
    ($prefix:ident, [$($part:ident).+], $value:expr, $labels:ident) => {
        // Without a text: that would be a label too.
        tracing::event!(target: TARGET, tracing::Level::INFO, {
            $prefix.$($part).+ = $value,
            pool = $labels.pool.as_deref(),
            state = $labels.state,
            stride = $labels.stride.as_deref(),
            class = $labels.class,
            device = $labels.device.as_deref(),
            stream = $labels.stream.as_deref(),
            direction = $labels.direction
        })
    };
}

/// The events that a value makes.
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
        /// Names a metric of the table.
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
        "Bytes of the pool by state: free, checked_out, in_flight, quarantined, cut. They sum to locked and unlocked bytes.";
    LockedBytes: Gauge, [pinpool.memory.locked.bytes], Bytes, [pool], "Bytes that are page-locked.";
    UnlockedBytes: Gauge, [pinpool.memory.unlocked.bytes], Bytes, [pool],
        "Bytes that the pool serves and that are not page-locked.";
    CapacityBytes: Gauge, [pinpool.memory.capacity.bytes], Bytes, [pool], "Bytes that the pool may hold at most.";
    CachedBytes: Gauge, [pinpool.memory.cached.bytes], Bytes, [pool], "Of the free bytes, those that threads keep.";
    ClaimedBytes: Gauge, [pinpool.memory.claimed.bytes], Bytes, [pool],
        "Of the bytes in flight, those claimed for stream-ready reuse.";
    RequestedBytes: Gauge, [pinpool.memory.requested.bytes], Bytes, [pool], "Bytes asked for by all that is out.";
    RoundingBytes: Gauge, [pinpool.memory.rounding.bytes], Bytes, [pool],
        "Bytes given to all that is out beyond what was asked for.";
    LargestFreeBytes: Gauge, [pinpool.memory.largest_free.bytes], Bytes, [pool], "The longest free range in one piece.";
    Checkouts: Counter, [pinpool.checkouts.total], Count, [pool], "Segments given out.";
    Returns: Counter, [pinpool.returns.total], Count, [pool], "Segments that came back.";
    Misses: Counter, [pinpool.misses.total], Count, [pool], "Requests that the thread's own cache could not serve.";
    Reclaims: Counter, [pinpool.reclaims.total], Count, [pool], "Times that what threads keep was taken back.";
    Growths: Counter, [pinpool.growths.total], Count, [pool], "Regions asked of the system for a request.";
    GrowthFailures: Counter, [pinpool.growth_failures.total], Count, [pool], "Times that pinning ended early.";
    Waits: Counter, [pinpool.waits.total], Count, [pool], "Requests that had to wait.";
    Timeouts: Counter, [pinpool.timeouts.total], Count, [pool], "Waits given up.";
    Waiting: Gauge, [pinpool.waiting.requests], Count, [pool], "Requests waiting now.";
    Fallbacks: Counter, [pinpool.unpinned_fallbacks.total], Count, [pool], "Plain buffers given out in place of pinned ones.";
    FallbackBytes: Counter, [pinpool.unpinned_fallback.bytes.total], Bytes, [pool], "Their bytes.";
    Errors: Counter, [pinpool.errors.total], Count, [pool, class],
        "Checkouts that ended with an error, by what it means: argument, capture, transient, device_lost, shutdown.";
    WaitSeconds: Histogram, [pinpool.wait.seconds], Seconds, [pool], "How long requests waited for memory.";
    HoldingSeconds: Histogram, [pinpool.holding.seconds], Seconds, [pool],
        "How long buffers were out; of a sample, one in eight that no cache could serve.";
    PinningSpeed: Real, [pinpool.pinning.bytes_per_second], BytesPerSecond, [pool], "Bytes pinned per second spent in pinning.";
    LongestPin: Real, [pinpool.pinning.longest_call.seconds], Seconds, [pool], "The longest single call that pinned.";
    Sampled: Real, [pinpool.sampled.timestamp.seconds], Seconds, [pool],
        "When the pool was looked at last, in seconds since 1970: it stands still when the pool or its sampler is gone.";
    StuckBuffers: Gauge, [pinpool.stuck.buffers], Count, [pool], "Buffers out for longer than the sampler's threshold.";
    StuckBytes: Gauge, [pinpool.stuck.bytes], Bytes, [pool], "Their bytes.";
    ClassFree: Gauge, [pinpool.class.free.segments], Count, [pool, stride],
        "Segments of a size class that can be checked out; stride is the class's bytes, or large.";
    ClassOut: Gauge, [pinpool.class.out.segments], Count, [pool, stride],
        "Segments of a size class that are checked out, in flight or quarantined.";
    ClassCached: Gauge, [pinpool.class.cached.segments], Count, [pool, stride], "Of the free ones, those that threads keep.";
    ClassCheckouts: Counter, [pinpool.class.checkouts.total], Count, [pool, stride], "Segments of a size class given out.";
    FlightSeconds: Histogram, [pinpool.flight.seconds], Seconds, [device],
        "From submitting to being seen complete; of a sample, one in sixteen of each stream.";
    DeviceErrors: Counter, [pinpool.device.errors.total], Count, [device, class],
        "Errors that the driver answered with, by what they mean.";
    DeviceSubmitted: Counter, [pinpool.device.submitted.total], Count, [device], "Copies and holds submitted.";
    DeviceCompleted: Counter, [pinpool.device.completed.total], Count, [device], "Those of them known to be complete.";
    DeviceCopied: Counter, [pinpool.device.copied.bytes.total], Bytes, [device, direction],
        "Bytes of copies that the driver accepted; direction is upload or download.";
    DeviceRegistered: Gauge, [pinpool.device.registered.bytes], Bytes, [device], "Bytes of values registered with the device.";
    DeviceLost: Gauge, [pinpool.device.lost], Count, [device], "1 if the device is lost, else 0.";
    StuckStreams: Gauge, [pinpool.device.stuck.streams], Count, [device],
        "Streams with work in flight that got nothing done for longer than the sampler's threshold.";
    StreamBytes: Gauge, [pinpool.stream.in_flight.bytes], Bytes, [device, stream], "Bytes of segments in flight on a stream.";
    StreamEntries: Gauge, [pinpool.stream.in_flight.entries], Count, [device, stream], "Copies and holds in flight on a stream.";
}

impl Id {
    #[cfg(any(test, feature = "metrics"))]
    fn metric(self) -> &'static Metric {
        // The enum's order is the table's.
        &METRICS[self as usize]
    }
}

/// A duration that stands for those of a bucket, in seconds: three quarters of its upper bound.
fn stands_for(upper: Option<std::time::Duration>) -> f64 {
    let last = Histogram::BOUNDS_NS[Histogram::BOUNDS_NS.len() - 1] as f64 * 2.0;
    upper.map_or(last, |upper| upper.as_nanos() as f64) * 0.75 / 1e9
}

/// The durations of a histogram, as a value for each bucket and how often: in right proportion, where there are too
/// many.
fn thinned(durations: &Histogram) -> Vec<(f64, u64)> {
    let all = durations.count();
    let buckets = || durations.buckets().filter(|bucket| bucket.count > 0);
    // One of each bucket, however rare; the others share what is left.
    let rest = REPLAYED.saturating_sub(buckets().count() as u64);
    let shown = |count: u64| match all {
        0..=REPLAYED => count,
        _ => 1 + (u128::from(count) * u128::from(rest) / u128::from(all)) as u64,
    };
    buckets().map(|bucket| (stands_for(bucket.upper), shown(bucket.count))).collect()
}

/// Tells the facade what each metric is.
#[cfg(feature = "metrics")]
pub(super) fn describe() {
    metrics::with_recorder(|recorder| {
        for metric in METRICS {
            let unit = Some(match metric.unit {
                MetricUnit::Bytes => metrics::Unit::Bytes,
                MetricUnit::Seconds => metrics::Unit::Seconds,
                // The facade has no bytes a second, but bits in several sizes; the name says it.
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

/// Sends a value to the facade. Histograms are exact where the recorder has [our bounds](Histogram::BOUNDS_NS).
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
