//! The same through the `metrics` facade, on the recorder of an exporter for Prometheus.

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusRecorder};
use pinpool::telemetry::{Histogram, METRICS, MetricKind, Sampler};

use super::Bench;
use crate::record::{clear, events};
use crate::support::own_process;

fn text(recorder: &PrometheusRecorder) -> String {
    recorder.handle().render()
}

/// The values of the lines that begin so.
fn values(text: &str, of: &str) -> Vec<f64> {
    let lines = text.lines().filter(|line| line.starts_with(of));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect()
}

#[test]
fn the_recorder_gets_what_the_events_have() {
    recorded!();
    let bench = Bench::new(|builder| builder.name("fed").track_checkouts(true));
    for _ in 0..100 {
        drop(bench.pool.checkout(1000).unwrap());
    }
    let recorder =
        PrometheusBuilder::new().set_buckets(&Histogram::bounds_seconds()).unwrap().build_recorder();
    let mut sampler = Sampler::new(&bench.pool);
    clear();
    // Counters are sent as what came since: a second look adds nothing.
    metrics::with_local_recorder(&recorder, || (sampler.poll(), sampler.poll()));
    let text = text(&recorder);
    let mut unsent = Vec::new();
    for metric in METRICS {
        let kind = match metric.kind {
            MetricKind::Counter => "counter",
            MetricKind::Histogram => "histogram",
            _ => "gauge",
        };
        let name = metric.prometheus_name();
        let described = text.contains(&format!("# HELP {name} "));
        let typed = text.lines().find_map(|line| line.strip_prefix(&format!("# TYPE {name} ")));
        match typed {
            Some(typed) => assert!(typed == kind && described, "{name}: {typed}"),
            None => unsent.push(metric.name),
        }
    }
    // Nothing has waited, and no stream has been used.
    let streams = ["pinpool.stream.in_flight.bytes", "pinpool.stream.in_flight.entries"];
    assert_eq!(unsent, [&["pinpool.wait.seconds", "pinpool.flight.seconds"][..], &streams].concat());
    assert_eq!(values(&text, "pinpool_checkouts_total{pool=\"fed\"}"), [100.0]);
    assert_eq!(values(&text, "pinpool_class_checkouts_total{pool=\"fed\",stride=\"1088\"}"), [100.0]);
    assert_eq!(values(&text, "pinpool_memory_capacity_bytes{pool=\"fed\"}"), [1_048_576.0]);
    // All hundred, and each value in the bucket that it stands for.
    let held = values(&text, "pinpool_holding_seconds_bucket{pool=\"fed\"");
    let mut sum = 0;
    let exact: Vec<f64> = (bench.pool.snapshot().holding.buckets())
        .map(|bucket| {
            sum += bucket.count;
            sum as f64
        })
        .collect();
    assert_eq!((sum, held.last()), (100, Some(&100.0)));
    assert!(exact.iter().zip(&held).all(|(exact, held)| exact == held), "{exact:?}, {held:?}");
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
    let recorder = PrometheusBuilder::new().build_recorder();
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
        text(&recorder)
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
    let of_gone: Vec<&str> = gauges.into_iter().filter(|line| line.contains("pool=\"gone\"")).collect();
    let gone = values(&of_gone.join("\n"), "pinpool_");
    assert!(gone.len() > 20 && gone.iter().all(|value| *value == 0.0), "{text}");
    assert_eq!(values(&text, "server_rare_total"), [5.0]);
    assert_eq!(values(&text, "server_link_peak_bytes_per_second"), [7.0]);
    assert!(values(&text, "pinpool_memory_capacity_bytes{pool=\"stays\"}") == [f64::from(1 << 20)]);
}
