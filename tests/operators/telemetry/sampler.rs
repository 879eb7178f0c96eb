//! The sampler's events, as tracing-opentelemetry's layer would read them.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pinpool::Request;
use pinpool::telemetry::{METRICS, MetricKind, Sampler};
use tracing::Level;

use super::{Bench, eventually};
use crate::record::{Record, all, clear, event, events};

const PREFIXES: [&str; 3] = ["monotonic_counter.", "gauge.", "histogram."];

/// A metric's event: its kind and name, its value, and its labels.
fn metric(record: &Record) -> (&str, &str, f64, BTreeMap<&str, &str>) {
    let prefixed = |field: &str| PREFIXES.iter().find(|prefix| field.starts_with(**prefix)).copied();
    let values: Vec<&String> = record.fields.keys().filter(|field| prefixed(field).is_some()).collect();
    let [field] = &values[..] else { panic!("one value each: {record:?}") };
    let prefix = prefixed(field).unwrap();
    let labels = record.fields.iter().filter(|(name, _)| name != field);
    let labels = labels.map(|(name, value)| (&**name, &**value)).collect();
    (prefix.trim_end_matches('.'), &field[prefix.len()..], record.fields[*field].parse().unwrap(), labels)
}

/// The sum of a metric's values with these labels.
fn sum(name: &str, labels: &[(&str, &str)]) -> f64 {
    let found = events("pinpool::metrics");
    let found = found.iter().map(metric);
    let has = |all: &BTreeMap<&str, &str>| labels.iter().all(|(name, value)| all.get(name) == Some(value));
    found.filter(|(_, found, _, all)| *found == name && has(all)).map(|(_, _, value, _)| value).sum()
}

/// A pool on which everything has happened that there is a metric for.
fn busy() -> Bench {
    let bench = Bench::new(|builder| builder.name("busy"));
    let (stream, memory) = bench.target();
    let buf = bench.filled(4096);
    let buf = stream.upload(buf, &memory).unwrap().wait().unwrap();
    assert!(bench.pool.checkout_timeout(1 << 20, Duration::from_millis(1)).is_err());
    let all = bench.pool.checkout(900 << 10).unwrap();
    assert!(bench.pool.checkout_timeout(512 << 10, Duration::from_millis(1)).is_err());
    drop(all);
    drop(buf);
    bench
}

#[test]
fn every_metric_is_sent_as_the_table_says() {
    recorded!();
    let bench = busy();
    let stream = bench.device.stream().unwrap();
    let mut sampler = Sampler::new(&bench.pool);
    clear();
    assert!(sampler.poll());
    let found = events("pinpool::metrics");
    for record in &found {
        assert_eq!(record.level, Level::TRACE, "a log has them only where it asks for them");
        assert!(!record.fields.contains_key("message"), "a text would be a label: {record:?}");
        let (prefix, name, _, labels) = metric(record);
        let known = METRICS.iter().find(|metric| metric.name == name);
        let known = known.unwrap_or_else(|| panic!("{name} is not in the table"));
        let wanted = match known.kind {
            MetricKind::Counter => "monotonic_counter",
            MetricKind::Histogram => "histogram",
            _ => "gauge",
        };
        assert_eq!(prefix, wanted, "{name}");
        let mut wanted = known.labels.to_vec();
        wanted.sort_unstable();
        assert_eq!(labels.into_keys().collect::<Vec<_>>(), wanted, "{name}");
    }
    let sent: Vec<&str> = found.iter().map(|record| metric(record).1).collect();
    for known in METRICS {
        assert!(sent.contains(&known.name), "{} was not sent", known.name);
    }
    drop(stream);
}

#[test]
fn values_are_those_of_the_snapshot() {
    recorded!();
    let bench = busy();
    let kept = bench.pool.checkout(1000).unwrap();
    let mut sampler = Sampler::new(&bench.pool);
    clear();
    sampler.poll();
    let stats = bench.pool.stats();
    let whole: f64 = sum("pinpool.memory.bytes", &[("pool", "busy")]);
    assert_eq!(whole as usize, stats.pinned_bytes + stats.unpinned_bytes, "the states sum to the whole");
    let out = sum("pinpool.memory.bytes", &[("state", "checked_out")]) as usize;
    assert_eq!((out, stats.checked_out_bytes), (1088, 1088));
    assert_eq!(sum("pinpool.checkouts.total", &[]) as u64, stats.checkouts);
    assert_eq!(sum("pinpool.errors.total", &[("class", "transient")]) as u64, stats.errors.transient);
    assert_eq!(sum("pinpool.class.out.segments", &[("stride", "1088")]) as u64, 1);
    let waits = all(|record| record.fields.contains_key("histogram.pinpool.wait.seconds"));
    assert_eq!(waits.len() as u64, stats.waits, "one value for each wait");
    // The second poll sends what was counted since.
    clear();
    drop(bench.pool.checkout(1000).unwrap());
    sampler.poll();
    assert_eq!(sum("pinpool.checkouts.total", &[]), 1.0);
    assert_eq!(sum("pinpool.errors.total", &[]), 0.0);
    assert!(all(|record| record.fields.contains_key("histogram.pinpool.wait.seconds")).is_empty());
    drop(kept);
}

#[test]
fn two_pools_share_a_device() {
    recorded!();
    let bench = busy();
    let other = Bench::with((), bench.device.clone(), |builder| builder.name("other")).pool;
    let mut sampler = Sampler::new(&bench.pool).pool(&other);
    clear();
    sampler.poll();
    let submitted = bench.device.stats().submitted;
    assert_eq!(sum("pinpool.device.submitted.total", &[]) as u64, submitted, "counted once");
    assert_eq!(sum("pinpool.memory.capacity.bytes", &[("pool", "other")]) as usize, 1 << 20);
}

#[test]
fn a_thread_polls_until_it_is_dropped() {
    recorded!();
    let bench = Bench::new(|builder| builder.name("threaded"));
    let sampling = Sampler::new(&bench.pool).spawn(Duration::from_millis(10)).unwrap();
    let polls = || all(|record| record.fields.contains_key("gauge.pinpool.waiting.requests")).len();
    eventually("three polls", || polls() >= 3);
    drop(sampling);
    let after = polls();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(polls(), after, "none after it was dropped");
}

#[test]
fn a_stream_that_hangs_is_told_once() {
    recorded!();
    let bench = Bench::new(|builder| builder);
    let (stream, memory) = bench.target();
    bench.node.hang(0);
    let sent = stream.upload(bench.filled(4096), &memory).unwrap();
    let threshold = Duration::from_millis(20);
    let mut sampler = Sampler::new(&bench.pool).stuck_after(threshold);
    sampler.poll();
    assert!(events("pinpool::stream::stuck").is_empty(), "seen for the first time");
    std::thread::sleep(threshold);
    sampler.poll();
    sampler.poll();
    let fields = ["bytes", "completed", "device", "entries", "events", "seconds", "seq", "stream"];
    let stuck = event("pinpool::stream::stuck", Level::WARN, &fields);
    assert_eq!((stuck.field("entries"), stuck.field("bytes")), ("1", "4160"));
    assert_eq!(stuck.field("stream"), stream.number().to_string());
    assert_eq!(sum("pinpool.device.stuck.streams", &[]), 2.0, "as long as it is");
    let buffers = events("pinpool::pool::stuck");
    assert_eq!(buffers.len(), 1, "and the buffer on it, once: {buffers:#?}");
    assert_eq!((buffers[0].field("state"), buffers[0].field("device")), ("in_flight", "host:0"));
    let fields = buffers[0].names();
    assert!(["stream", "seq", "completed", "event"].iter().all(|name| fields.contains(name)), "{fields:?}");
    // Running again, it is stuck no more; hanging again, it is reported again.
    bench.node.resume(0);
    let mut buf = sent.wait().unwrap();
    clear();
    sampler.poll();
    assert_eq!(sum("pinpool.device.stuck.streams", &[]), 0.0);
    buf.try_resize(4096, 2).unwrap();
    bench.node.hang(0);
    let sent = stream.upload(buf, &memory).unwrap();
    sampler.poll();
    std::thread::sleep(threshold);
    sampler.poll();
    assert_eq!(events("pinpool::stream::stuck").len(), 1);
    bench.node.resume(0);
    drop(sent.wait().unwrap());
}

/// A cache holds its buffers for as long as it likes; a kernel that takes as long hangs.
#[test]
fn buffers_that_are_meant_to_be_held_are_not_told_of() {
    recorded!();
    let bench = Bench::new(|builder| builder);
    let pool = &bench.pool;
    let cache = Request::new(1000).tag("kv-cache").long_lived();
    // Of a size that the thread's cache has: it would serve a plain request.
    drop(pool.checkout(1000).unwrap());
    let stream = bench.device.stream().unwrap();
    let mut held = pool.checkout_many(&[cache, cache], None).unwrap();
    held.extend([pool.checkout(cache).unwrap(), pool.try_checkout(cache).unwrap()]);
    held.push(pool.checkout_on(&stream, cache).unwrap().wait().unwrap());
    let mut sampler = Sampler::new(pool).stuck_after(Duration::ZERO);
    sampler.poll();
    assert!(events("pinpool::pool::stuck").is_empty(), "{:#?}", events("pinpool::pool::stuck"));
    assert_eq!((sum("pinpool.stuck.buffers", &[]), sum("pinpool.stuck.bytes", &[])), (0.0, 0.0));
    // Asked for, they are there, with tag, place and exact age though the pool does not track.
    let listed = pool.stuck(Duration::ZERO);
    assert_eq!(listed.len(), held.len());
    for buffer in &listed {
        assert!(buffer.long_lived && buffer.exact && buffer.site.is_some(), "{buffer:?}");
        assert_eq!((buffer.tag, buffer.requested), (Some("kv-cache"), Some(1000)));
    }
    // Its segment's next buffer is one like others.
    drop(held);
    bench.node.hang(0);
    let hangs = stream.hold(pool.checkout(1000).unwrap()).unwrap();
    sampler.poll();
    let told = events("pinpool::pool::stuck");
    assert!(told.len() == 1 && !told[0].fields.contains_key("long_lived"), "{told:#?}");
    bench.node.resume(0);
    drop(hangs.wait().unwrap());
    // A report on a pool without room is about whatever takes the room.
    clear();
    let _most = pool.checkout(Request::new(900 << 10).long_lived()).unwrap();
    assert!(pool.checkout_timeout(512 << 10, Duration::from_millis(1)).is_err());
    assert!(events("pinpool::pool::stuck").iter().any(|record| record.field("long_lived") == "true"));
}

/// A client that hangs up has not waited in vain, and a request that is turned away has not waited at all.
#[test]
fn clients_that_go_away_and_requests_that_are_refused_are_no_timeouts() {
    recorded!();
    let bench = Bench::new(|builder| builder.name("busy"));
    let most = bench.pool.checkout(900 << 10).unwrap();
    for _ in 0..3 {
        let mut gone = bench.pool.checkout_async(512 << 10);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(std::pin::Pin::new(&mut gone).poll(&mut context).is_pending());
    }
    assert!(bench.pool.try_checkout(512 << 10).is_err());
    assert!(bench.pool.checkout_many(&[Request::new(600 << 10); 2], None).is_err());
    let mut sampler = Sampler::new(&bench.pool);
    clear();
    sampler.poll();
    assert_eq!((sum("pinpool.abandoned.total", &[]), sum("pinpool.timeouts.total", &[])), (3.0, 0.0));
    let refused = |reason| sum("pinpool.refused.total", &[("pool", "busy"), ("reason", reason)]);
    assert_eq!((refused("exhausted"), refused("impossible"), refused("closed")), (1.0, 1.0, 0.0));
    assert!(events("pinpool::pool::stuck").is_empty(), "nothing is stuck");
    // The report is left for a wait that was in vain.
    assert!(bench.pool.checkout_timeout(512 << 10, Duration::ZERO).is_err());
    let reports = |record: &Record| record.fields.contains_key("waited_seconds");
    assert_eq!((all(reports).len(), bench.pool.stats().timeouts), (1, 1));
    drop(most);
}

/// Memory that is lost is told of by its own event and gauge. No code keeps it, so that nobody can let go of it.
#[test]
fn quarantined_buffers_are_not_stuck() {
    recorded!();
    let bench = Bench::by_hand(|builder| builder.track_checkouts(true));
    let (stream, memory) = bench.target();
    let sent = stream.upload(bench.filled(4096), &memory).unwrap();
    let kept = bench.pool.checkout(64).unwrap();
    bench.node.kill(0);
    assert!(sent.wait().is_err());
    assert_eq!(bench.pool.stats().quarantined_bytes, 4160);
    clear();
    Sampler::new(&bench.pool).stuck_after(Duration::ZERO).poll();
    assert_eq!(sum("pinpool.stuck.buffers", &[]), 1.0, "the one that the program has");
    assert_eq!(events("pinpool::pool::stuck").len(), 1);
    assert_eq!(sum("pinpool.memory.bytes", &[("state", "quarantined")]), 4160.0);
    assert_eq!(bench.pool.stuck(Duration::ZERO).len(), 2, "asked for, it is there");
    drop(kept);
}

/// A gauge that is polled shows nothing of what came and went between two polls.
#[test]
fn a_burst_between_two_polls_shows() {
    recorded!();
    let bench = Bench::new(|builder| builder.name("bursts"));
    let mut sampler = Sampler::new(&bench.pool);
    let mut peak = || {
        clear();
        sampler.poll();
        sum("pinpool.memory.peak.bytes", &[("pool", "bursts")]) as usize
    };
    peak();
    drop(bench.pool.checkout(900 << 10).unwrap());
    assert_eq!(bench.pool.stats().checked_out_bytes, 0);
    let seen = peak();
    assert!(((900 << 10)..=(1 << 20)).contains(&seen), "{seen}");
    // Each poll begins anew, with what is out then.
    assert!(peak() < 300 << 10);
    let kept = bench.pool.checkout(500 << 10).unwrap();
    assert!(peak() >= 500 << 10);
    assert!(peak() >= 500 << 10, "it is still out");
    drop(kept);
}

/// A recorder keeps a gauge's last value for good.
#[test]
fn what_has_ended_reads_zero() {
    recorded!();
    let node = pinpool::host::HostNode::new(pinpool::host::HostConfig::new().devices(2)).unwrap();
    let device = pinpool::Device::on(&node, 1).unwrap();
    let Bench { pool: stays, node, .. } = Bench::with(node, device, |builder| builder.name("stays"));
    let Bench { node: other, device: leaving, pool: gone } = busy();
    let kept = gone.checkout(1000).unwrap();
    let mut sampler = Sampler::new(&stays).pool(&gone).stuck_after(Duration::ZERO);
    clear();
    sampler.poll();
    let gauges = |record: &Record| record.fields.keys().any(|field| field.starts_with("gauge."));
    let of = |label: &str, value: &str| all(|r| gauges(r) && r.fields.get(label).is_some_and(|v| v == value));
    let (of_pool, of_device) = (of("pool", "busy").len(), of("device", leaving.name()).len());
    assert!(of_pool > 20 && of_device >= 3, "{of_pool} {of_device}");
    let name = leaving.name().to_owned();
    drop((kept, gone, leaving));
    eventually("its memory is gone", || other.live(0).pinned_bytes == 0);
    clear();
    assert!(sampler.poll(), "one pool is left");
    for (ended, count) in [(of("pool", "busy"), of_pool), (of("device", &name), of_device)] {
        assert_eq!(ended.len(), count, "each gauge once more");
        for record in &ended {
            assert_eq!(metric(record).2, 0.0, "{record:?}");
        }
    }
    clear();
    sampler.poll();
    assert!(of("pool", "busy").is_empty() && of("device", &name).is_empty(), "and no more");
    assert!(!of("pool", "stays").is_empty());
    // The last poll of a sampler whose last pool has closed says so, too.
    drop(stays);
    eventually("its memory is gone", || node.live(0).pinned_bytes == 0);
    clear();
    assert!(!sampler.poll());
    let ended = of("pool", "stays");
    assert!(!ended.is_empty() && ended.iter().all(|record| metric(record).2 == 0.0), "{ended:?}");
}

#[test]
fn buffers_and_streams_are_told_of_after_the_threshold() {
    recorded!();
    let bench = Bench::new(|builder| builder);
    let (stream, memory) = bench.target();
    bench.node.hang(0);
    let sent = stream.upload(bench.filled(4096), &memory).unwrap();
    let told = |mut sampler: Sampler| {
        clear();
        (0..2).for_each(|_| _ = sampler.poll());
        (events("pinpool::pool::stuck").len(), events("pinpool::stream::stuck").len())
    };
    let new = || Sampler::new(&bench.pool);
    assert_eq!(told(new()), (0, 0), "within a minute");
    assert_eq!(told(new().stuck_after(Duration::ZERO)), (1, 1));
    assert_eq!(told(new().stuck_after(Duration::MAX)), (0, 0));
    bench.node.resume(0);
    drop(sent.wait().unwrap());
}

#[test]
fn a_stream_that_ends_is_shown_empty() {
    recorded!();
    let bench = busy();
    let stream = bench.device.stream().unwrap();
    let number = stream.number().to_string();
    let mut sampler = Sampler::new(&bench.pool);
    sampler.poll();
    drop(stream);
    clear();
    sampler.poll();
    let last = |record: &Record| record.field("stream") == number;
    assert_eq!(all(last).len(), 2, "its last values");
    clear();
    sampler.poll();
    assert!(all(last).is_empty());
}

#[test]
fn the_next_buffer_of_a_segment_is_told_as_well() {
    recorded!();
    let bench = Bench::new(|builder| builder.track_checkouts(true));
    let threshold = Duration::from_millis(5);
    let mut sampler = Sampler::new(&bench.pool).stuck_after(threshold);
    // The lowest free segment is taken first, so both have the same.
    for (n, tag) in [(1, "first"), (2, "second")] {
        let buf = bench.pool.checkout(Request::new(64).tag(tag)).unwrap();
        std::thread::sleep(threshold);
        sampler.poll();
        let told = events("pinpool::pool::stuck");
        assert_eq!(told.len(), n, "no look in between has seen it come back: {told:#?}");
        assert_eq!(told[n - 1].field("tag"), tag);
        drop(buf);
    }
}

/// Two pools of one name would look like one to a reader of the metrics: the second has a number. A pool that is built
/// anew continues under the name of the dropped one.
#[test]
fn pools_of_one_name_are_told_apart() {
    recorded!();
    let twin = |capacity: usize| Bench::new(|builder| builder.name("twin").capacity(capacity)).pool;
    let (first, second) = (twin(1 << 20), twin(2 << 20));
    assert_eq!((first.name(), second.name()), ("twin", "twin#2"));
    let _kept = second.checkout(1 << 20).unwrap();
    assert!(second.checkout_timeout(3 << 19, Duration::from_millis(1)).is_err());
    let mut sampler = Sampler::new(&first).pool(&second).stuck_after(Duration::ZERO);
    clear();
    sampler.poll();
    let capacity = |pool: &str| sum("pinpool.memory.capacity.bytes", &[("pool", pool)]);
    assert_eq!((capacity("twin"), capacity("twin#2")), (f64::from(1 << 20), f64::from(2 << 20)));
    for (name, count) in [("twin", 0.0), ("twin#2", 1.0)] {
        for metric in ["pinpool.checkouts.total", "pinpool.timeouts.total", "pinpool.stuck.buffers"] {
            assert_eq!(sum(metric, &[("pool", name)]), count, "{metric} of {name}");
        }
    }
    let stuck = events("pinpool::pool::stuck");
    assert!(!stuck.is_empty() && stuck.iter().all(|record| record.fields["pool"] == "twin#2"), "{stuck:?}");
    // Another pool replaces the first, while a sampler looks at the first all the time.
    let sampling = Sampler::new(&first).spawn(Duration::from_millis(10)).unwrap();
    drop(first);
    let again = twin(1 << 20);
    assert_eq!(again.name(), "twin");
    drop(sampling);
}

/// A name is the server's, and may come from input of its clients.
#[test]
fn a_pools_name_is_plain_and_short_wherever_it_is_shown() {
    recorded!();
    clear();
    let evil = format!("a\u{1b}[2J\nx\u{202e}{}", "W".repeat(9 << 20));
    let bench = Bench::new(|builder| builder.name(evil));
    let plain = format!("a\\u{{1b}}[2J\\nx\\u{{202e}}{}...", "W".repeat(79));
    assert_eq!(bench.pool.name(), plain);
    Sampler::new(&bench.pool).poll();
    let all = all(|_| true);
    let pools: Vec<&String> = all.iter().filter_map(|record| record.fields.get("pool")).collect();
    assert!(pools.len() > 20 && pools.iter().all(|name| **name == plain), "{pools:?}");
}

#[test]
fn only_what_crosses_the_link_is_counted() {
    recorded!();
    let bench = Bench::by_hand(|builder| builder);
    let (stream, memory) = (bench.device.stream().unwrap(), bench.device.alloc(8192).unwrap());
    let mut sampler = Sampler::new(&bench.pool);
    let mut seen = || {
        clear();
        sampler.poll();
        ["upload", "download"]
            .map(|direction| sum("pinpool.device.copied.bytes.total", &[("direction", direction)]))
    };
    assert_eq!(seen(), [0.0, 0.0]);
    stream.upload(bench.filled(4096), &memory).unwrap().wait().unwrap();
    stream.upload_part(bench.filled(4096), 96..596, &memory).unwrap().wait().unwrap();
    stream.upload_blocking(&[0; 30], &memory).unwrap();
    stream.download(memory.slice(..300), bench.filled(4096)).unwrap().wait().unwrap();
    stream.download_blocking(memory.slice(..7), &mut [0; 7]).unwrap();
    let copier = pinpool::Copier::builder(&bench.pool, &bench.device).chunk(16 << 10).build().unwrap();
    copier.upload(vec![1; 200], memory.slice(..200)).unwrap().wait().unwrap();
    // Within the device, within the host, and copies that fail: none of these count.
    stream.copy(memory.slice(..1000), memory.slice(4096..)).unwrap().wait().unwrap();
    stream.hold(bench.filled(100)).unwrap().wait().unwrap();
    assert!(stream.upload(bench.filled(8193), &memory).is_err(), "refused: it does not fit");
    bench.fail("cuMemcpyHtoDAsync_v2");
    assert!(stream.upload(bench.filled(64), &memory).is_err(), "the driver refuses it");
    let stats = bench.device.stats();
    assert_eq!((stats.uploaded_bytes, stats.downloaded_bytes), (4096 + 500 + 30 + 200, 300 + 7));
    assert_eq!((seen(), seen()), ([4826.0, 307.0], [0.0, 0.0]));
}

#[test]
fn each_look_has_its_time() {
    recorded!();
    let bench = Bench::by_hand(|builder| builder.name("seen"));
    let mut sampler = Sampler::new(&bench.pool);
    let looks = || -> Vec<f64> {
        let found = all(|record| record.fields.contains_key("gauge.pinpool.sampled.timestamp.seconds"));
        found.iter().map(|record| metric(record).2).collect()
    };
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    clear();
    sampler.poll();
    sampler.poll();
    let found = looks();
    assert_eq!(found.len(), 2);
    // The system's time may be set at any time, and not only forward.
    assert!(found.iter().all(|seen| (seen - now()).abs() < 60.0), "{found:?}");
    drop(bench);
    clear();
    sampler.poll();
    sampler.poll();
    assert_eq!(looks(), [0.0], "once, that it has ended");
}
