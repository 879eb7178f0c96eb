//! Bytes copied, by direction; and when a sampler last looked at a pool.

use std::time::{SystemTime, UNIX_EPOCH};

use pinpool::host::{Call, Failure, Fault};
use pinpool::telemetry::Sampler;

use super::Bench;
use crate::record::{clear, events};

/// The values of a metric's events, in order, with this label.
fn values(metric: &str, label: (&str, &str)) -> Vec<f64> {
    let found = events("pinpool::metrics").into_iter().filter(|record| {
        record.fields.contains_key(metric) && record.fields.get(label.0).is_some_and(|value| value == label.1)
    });
    found.map(|record| record.fields[metric].parse().unwrap()).collect()
}

#[test]
fn only_what_crosses_the_link_is_counted() {
    recorded!();
    let bench = Bench::new(|builder| builder);
    let (stream, memory) = (bench.device.stream().unwrap(), bench.device.alloc(8192).unwrap());
    let full = |len| {
        let mut buf = bench.pool.checkout(len).unwrap();
        buf.try_resize(len, 1).unwrap();
        buf
    };
    let mut sampler = Sampler::new(&bench.pool);
    clear();
    sampler.poll();
    stream.upload(full(4096), &memory).unwrap().wait().unwrap();
    stream.upload_part(full(4096), 96..596, &memory).unwrap().wait().unwrap();
    stream.upload_blocking(&[0; 30], &memory).unwrap();
    stream.download(memory.slice(..300), full(4096)).unwrap().wait().unwrap();
    stream.download_blocking(memory.slice(..7), &mut [0; 7]).unwrap();
    let copier = pinpool::Copier::builder(&bench.pool, &bench.device).chunk(16 << 10).build().unwrap();
    copier.upload(vec![1; 200], memory.slice(..200)).unwrap().wait().unwrap();
    // Within the device, within the host, and copies that fail: none of these count.
    stream.copy(memory.slice(..1000), memory.slice(4096..)).unwrap().wait().unwrap();
    stream.hold(full(100)).unwrap().wait().unwrap();
    assert!(stream.upload(full(8193), &memory).is_err(), "refused: it does not fit");
    bench.node.fail(Fault { device: 0, call: Call::Copy, nth: 0, failure: Failure::Transient });
    assert!(stream.upload(full(64), &memory).is_err(), "the driver refuses it");
    let stats = bench.device.stats();
    assert_eq!((stats.uploaded_bytes, stats.downloaded_bytes), (4096 + 500 + 30 + 200, 300 + 7));
    sampler.poll();
    sampler.poll();
    let of =
        |direction| values("monotonic_counter.pinpool.device.copied.bytes.total", ("direction", direction));
    assert_eq!((of("upload"), of("download")), (vec![0.0, 4826.0, 0.0], vec![0.0, 307.0, 0.0]));
}

#[test]
fn each_look_has_its_time() {
    recorded!();
    let bench = Bench::by_hand(|builder| builder.name("seen"));
    let mut sampler = Sampler::new(&bench.pool);
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    clear();
    sampler.poll();
    sampler.poll();
    let found = values("gauge.pinpool.sampled.timestamp.seconds", ("pool", "seen"));
    assert_eq!(found.len(), 2);
    // The system's time may be set at any time, and not only forward.
    assert!(found.iter().all(|seen| (seen - now()).abs() < 60.0), "{found:?}");
    drop(bench);
    clear();
    sampler.poll();
    sampler.poll();
    let last = values("gauge.pinpool.sampled.timestamp.seconds", ("pool", "seen"));
    assert_eq!(last, [0.0], "once, that it has ended");
}
