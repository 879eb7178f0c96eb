//! The same through the `metrics` facade, on a recorder that keeps everything.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
use pinpool::telemetry::{Histogram, METRICS, MetricKind, Sampler};

use super::Bench;
use crate::record::{clear, events};
use crate::support::own_process;

/// Values by name and labels, each with how often it was recorded.
type Values = Arc<Mutex<BTreeMap<String, Vec<(f64, usize)>>>>;

#[derive(Default)]
struct Kept {
    values: Values,
    described: Mutex<BTreeMap<String, (&'static str, Option<Unit>)>>,
}

struct Cell {
    values: Values,
    name: String,
}

impl Cell {
    fn of(kept: &Kept, key: &Key) -> Arc<Self> {
        let labels: Vec<String> = key.labels().map(|l| format!("{}={}", l.key(), l.value())).collect();
        Arc::new(Self {
            values: kept.values.clone(),
            name: format!("{}{{{}}}", key.name(), labels.join(",")),
        })
    }
    fn keep(&self, value: f64, count: usize) {
        self.values.lock().unwrap().entry(self.name.clone()).or_default().push((value, count));
    }
}

impl CounterFn for Cell {
    fn increment(&self, value: u64) {
        self.keep(value as f64, 1);
    }
    fn absolute(&self, _: u64) {
        panic!("counters are sent as what came since");
    }
}

impl GaugeFn for Cell {
    fn increment(&self, _: f64) {
        panic!("gauges are set");
    }
    fn decrement(&self, _: f64) {
        panic!("gauges are set");
    }
    fn set(&self, value: f64) {
        self.keep(value, 1);
    }
}

impl HistogramFn for Cell {
    fn record(&self, value: f64) {
        self.keep(value, 1);
    }
    fn record_many(&self, value: f64, count: usize) {
        self.keep(value, count);
    }
}

impl Kept {
    fn describe(&self, key: &KeyName, kind: &'static str, unit: Option<Unit>) {
        self.described.lock().unwrap().insert(key.as_str().to_owned(), (kind, unit));
    }
}

impl Recorder for Kept {
    fn describe_counter(&self, key: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe(&key, "counter", unit);
    }
    fn describe_gauge(&self, key: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe(&key, "gauge", unit);
    }
    fn describe_histogram(&self, key: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe(&key, "histogram", unit);
    }
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Cell::of(self, key))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Cell::of(self, key))
    }
    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> metrics::Histogram {
        metrics::Histogram::from_arc(Cell::of(self, key))
    }
}

#[test]
fn the_recorder_gets_what_the_events_have() {
    recorded!();
    let bench = Bench::new(|builder| builder.name("fed").track_checkouts(true));
    for _ in 0..100 {
        drop(bench.pool.checkout(1000).unwrap());
    }
    let kept = Kept::default();
    let mut sampler = Sampler::new(&bench.pool);
    clear();
    metrics::with_local_recorder(&kept, || sampler.poll());
    let described = kept.described.lock().unwrap();
    assert_eq!(described.len(), METRICS.len());
    for metric in METRICS {
        let kind = match metric.kind {
            MetricKind::Counter => "counter",
            MetricKind::Histogram => "histogram",
            _ => "gauge",
        };
        assert_eq!(described[metric.name].0, kind, "{}", metric.name);
    }
    let values = kept.values.lock().unwrap();
    assert_eq!(values["pinpool.checkouts.total{pool=fed}"], [(100.0, 1)]);
    assert_eq!(values["pinpool.class.checkouts.total{pool=fed,stride=1088}"], [(100.0, 1)]);
    assert_eq!(values["pinpool.memory.capacity.bytes{pool=fed}"], [(1_048_576.0, 1)]);
    // All hundred, and each value in the bucket that it stands for.
    let held = &values["pinpool.holding.seconds{pool=fed}"];
    assert_eq!(held.iter().map(|(_, count)| count).sum::<usize>(), 100);
    let bounds = Histogram::bounds_seconds();
    let exact = bench.pool.snapshot().holding;
    for (value, count) in held {
        let at = bounds.iter().position(|bound| value <= bound).unwrap();
        assert_eq!(exact.buckets().nth(at).unwrap().count, *count as u64, "{value} s");
    }
    // As events there are at most 64, in the same names.
    let shown = events("pinpool::metrics")
        .iter()
        .filter(|r| r.fields.contains_key("histogram.pinpool.holding.seconds"))
        .count();
    assert!((1..=66).contains(&shown), "{shown}");
}

/// What an exporter answers does not grow with the streams that have come and gone, and what is gone reads zero: so the
/// exporter needs no timeout, which would take the server's own metrics with it.
#[test]
fn what_is_gone_reads_zero_and_what_is_the_servers_stays() {
    own_process!();
    let bench = Bench::new(|builder| builder.name("stays"));
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    // Once, as a server counts what is rare and tells what it has measured.
    metrics::with_local_recorder(&recorder, || {
        metrics::counter!("server.rare.total").increment(5);
        metrics::gauge!("server.link.peak.bytes_per_second").set(7.0);
    });
    let gone = Bench::with((), bench.device.clone(), |builder| builder.name("gone")).pool;
    let mut sampler = Sampler::new(&bench.pool).pool(&gone);
    let mut poll = |streams: usize| {
        let streams: Vec<_> = (0..streams).map(|_| bench.device.stream().unwrap()).collect();
        metrics::with_local_recorder(&recorder, || sampler.poll());
        drop(streams);
        recorder.handle().render()
    };
    let values = |text: &str, of: &str| -> Vec<f64> {
        let lines = text.lines().filter(|line| line.contains(of) && !line.starts_with('#'));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect()
    };
    let streams = |text: &str| values(text, "pinpool_stream_in_flight_bytes{").len();
    let text = poll(100);
    assert_eq!(streams(&text), 64 + 1, "the first, and the others' sum");
    let capacity = "pinpool_memory_capacity_bytes{pool=\"gone\"}";
    assert_eq!(values(&text, capacity), [f64::from(1 << 20)]);
    let held = gone.checkout(1000).unwrap();
    poll(0);
    drop((gone, held));
    for _ in 0..20 {
        poll(100);
    }
    let text = poll(3);
    assert_eq!(streams(&text), 64 + 1, "2,103 streams have lived");
    assert!(text.contains("stream=\"other\""), "the others' sum");
    let counts =
        |line: &&str| ["_total{", "_sum{", "_count{", "quantile="].iter().any(|mark| line.contains(mark));
    let gauges: Vec<&str> = text.lines().filter(|line| !counts(line)).collect();
    let gone = values(&gauges.join("\n"), "pool=\"gone\"");
    assert!(gone.len() > 20 && gone.iter().all(|value| *value == 0.0), "{text}");
    assert_eq!(values(&text, "server_rare_total"), [5.0]);
    assert_eq!(values(&text, "server_link_peak_bytes_per_second"), [7.0]);
    assert!(values(&text, "pinpool_memory_capacity_bytes{pool=\"stays\"}") == [f64::from(1 << 20)]);
}
