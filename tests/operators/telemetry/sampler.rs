//! The sampler: what each poll sends, as events and to a recorder, and what it logs.

use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

use metrics_exporter_prometheus::PrometheusBuilder;
use pinpool::host::{Call, Failure, Fault};
use pinpool::telemetry::{Histogram, METRICS};

use super::*;

/// What one poll has given to a recorder: the text of an exporter for Prometheus, and whether a pool is left.
pub struct Sent(String, bool);

pub fn poll(sampler: &mut Sampler) -> Sent {
    let recorder =
        PrometheusBuilder::new().set_buckets(&Histogram::bounds_seconds()).unwrap().build_recorder();
    let left = metrics::with_local_recorder(&recorder, || sampler.poll());
    Sent(recorder.handle().render(), left)
}

impl Sent {
    /// The values of a metric whose labels have these among them, side by side.
    fn values(&self, name: &str, labels: &str) -> Vec<f64> {
        let is_it = |line: &&str| line.split(['{', ' ']).next() == Some(name) && line.contains(labels);
        self.0.lines().filter(is_it).map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect()
    }

    pub fn sum(&self, name: &str, labels: &str) -> f64 {
        self.values(name, labels).iter().sum()
    }

    /// The values of all gauges with this label.
    fn gauges(&self, label: &str) -> Vec<f64> {
        let typed = |line: &str| Some(line.strip_prefix("# TYPE ")?.strip_suffix(" gauge")?.to_owned());
        self.0.lines().filter_map(typed).flat_map(|name| self.values(&name, label)).collect()
    }
}

/// A pool on which everything has happened that there is a metric for.
fn busy(name: &str) -> Bench {
    let bench = Bench::new(|builder| builder.name(name));
    let (stream, memory) = bench.target();
    let buf = bench.filled(4096);
    let buf = stream.upload(buf, &memory).unwrap().wait().unwrap();
    assert!(bench.pool.checkout_timeout(1 << 20, Duration::from_millis(1)).is_err());
    let all = bench.pool.checkout(900 << 10).unwrap();
    assert!(bench.pool.checkout_timeout(512 << 10, Duration::from_millis(1)).is_err());
    drop((all, buf));
    bench
}

#[test]
fn every_metric_is_sent_as_the_table_says() {
    recorded!();
    let bench = busy("busy");
    let _stream = bench.device.stream().unwrap();
    let mut sampler = Sampler::new(&bench.pool);
    clear();
    let sent = poll(&mut sampler);
    let mut found = events("pinpool::metrics");
    for metric in METRICS {
        let typed = metric.kind;
        let kind = if typed == "counter" { "monotonic_counter" } else { typed };
        let name = metric.name.replace('.', "_");
        for line in [format!("# HELP {name} "), format!("# TYPE {name} {typed}\n")] {
            assert!(sent.0.contains(&line), "{line:?} is missing:\n{}", sent.0);
        }
        // As an event it has its value and its labels, as tracing-opentelemetry's layer would read them.
        let field = format!("{kind}.{}", metric.name);
        let mut wanted = [metric.labels, &[&*field]].concat();
        wanted.sort_unstable();
        let before = found.len();
        found.retain(|record| {
            let is_it = record.fields.contains_key(&field);
            assert!(!is_it || record.names() == wanted, "{record:?}");
            !is_it
        });
        assert!(found.len() < before, "{field} was not sent");
    }
    assert!(found.is_empty(), "not in the table: {found:?}");
    // A log has them only where it asks for them, and a text would be a label.
    let is_plain = |record: &Record| record.level == Level::TRACE && !record.fields.contains_key("message");
    assert!(events("pinpool::metrics").iter().all(is_plain));
}

#[test]
fn values_are_those_of_the_snapshot_and_counters_what_came_since() {
    let bench = busy("valued");
    let other = Bench::with((), bench.device.clone(), |builder| builder.name("beside")).pool;
    let kept = bench.pool.checkout(1000).unwrap();
    bench.node.fail(Fault { device: 0, call: Call::Allocate, nth: 0, failure: Failure::Transient });
    assert!(bench.device.alloc(64).is_err());
    // The reaper may look at the stream a last time.
    until("its stream has ended", || bench.device.stats().streams.is_empty());
    let mut sampler = Sampler::new(&bench.pool).pool(&other);
    let sent = poll(&mut sampler);
    let (stats, snapshot) = (bench.pool.stats(), bench.pool.snapshot());
    let own = |name: &str, labels: &str| sent.sum(name, &format!("pool=\"valued\"{labels}")) as usize;
    let whole = own("pinpool_memory_bytes", "");
    assert_eq!(whole, stats.pinned_bytes + stats.unpinned_bytes, "the states sum to the whole");
    let out = own("pinpool_memory_bytes", ",state=\"checked_out\"");
    assert_eq!((out, stats.checked_out_bytes), (1088, 1088));
    assert_eq!(own("pinpool_checkouts_total", "") as u64, stats.checkouts);
    assert_eq!(own("pinpool_errors_total", ",class=\"transient\"") as u64, stats.errors.transient);
    assert_eq!(own("pinpool_class_out_segments", ",stride=\"1088\""), 1);
    let counted =
        ["timeouts", "abandoned", "refused"].map(|name| own(&format!("pinpool_{name}_total"), "") as u64);
    assert_eq!(
        counted,
        [stats.timeouts, stats.abandoned, stats.exhausted + stats.queue_full + stats.impossible]
    );
    assert_eq!(own("pinpool_wait_seconds_count", "") as u64, stats.waits, "one value for each wait");
    // Each duration is in the bucket that it stands for.
    let mut sum = 0;
    let buckets = snapshot.holding.buckets().map(|(_, count)| {
        sum += count;
        sum as f64
    });
    let held = sent.values("pinpool_holding_seconds_bucket", "pool=\"valued\"");
    assert!(!held.is_empty() && buckets.zip(&held).all(|(exact, held)| exact == *held), "{held:?}");
    // (The system's time may be set at any time, and not only forward.)
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    let at = sent.values("pinpool_sampled_timestamp_seconds", "pool=\"valued\"");
    assert!(at.len() == 1 && (at[0] - now).abs() < 60.0, "{at:?}");
    // Of a device that two pools share everything is counted once, and stays when its streams have ended.
    let (submitted, device) = (sent.sum("pinpool_device_submitted_total", "") as u64, bench.device.stats());
    assert_eq!((submitted, device.completed, device.streams.len()), (device.submitted, 1, 0));
    let failed = sent.sum("pinpool_device_errors_total", "class=\"transient\"") as u64;
    assert_eq!((failed, device.errors.transient, device.errors.total()), (1, 1, 1));
    assert_eq!(sent.values("pinpool_memory_capacity_bytes", "pool=\"beside\""), [f64::from(1 << 20)]);
    // The second poll sends what was counted since.
    drop(bench.pool.checkout(1000).unwrap());
    let sent = poll(&mut sampler);
    assert_eq!(sent.sum("pinpool_checkouts_total", ""), 1.0);
    assert_eq!(sent.sum("pinpool_errors_total", "") + sent.sum("pinpool_wait_seconds_count", ""), 0.0);
    drop(kept);
}

#[test]
fn a_thread_polls_until_it_is_dropped() {
    recorded!();
    let bench = Bench::new(|builder| builder.name("threaded"));
    let sampling = Sampler::new(&bench.pool).spawn(Duration::from_millis(10)).unwrap();
    let polls = || all(|record| record.fields.contains_key("gauge.pinpool.waiting.requests")).len();
    until("three polls", || polls() >= 3);
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
    let new = || Sampler::new(&bench.pool);
    for mut sampler in [new(), new().stuck_after(Duration::MAX)] {
        (0..2).for_each(|_| _ = sampler.poll());
        assert!(events("pinpool::pool::stuck").is_empty(), "within a minute, and never");
    }
    let threshold = Duration::from_millis(20);
    let mut sampler = new().stuck_after(threshold);
    sampler.poll();
    assert!(events("pinpool::stream::stuck").is_empty(), "seen for the first time");
    std::thread::sleep(threshold);
    for _ in 0..2 {
        assert_eq!(poll(&mut sampler).sum("pinpool_device_stuck_streams", ""), 1.0, "as long as it is");
    }
    let fields = ["bytes", "completed", "device", "entries", "events", "seconds", "seq", "stream"];
    let stuck = event("pinpool::stream::stuck", Level::WARN, &fields);
    assert_eq!((stuck.field("entries"), stuck.field("bytes")), ("1", "4160"));
    assert_eq!(stuck.field("stream"), stream.number().to_string());
    let buffers = events("pinpool::pool::stuck");
    assert_eq!(buffers.len(), 1, "and the buffer on it, once: {buffers:#?}");
    assert_eq!((buffers[0].field("state"), buffers[0].field("device")), ("in_flight", "host:0"));
    let fields = buffers[0].names();
    assert!(["stream", "seq", "completed", "event"].iter().all(|name| fields.contains(name)), "{fields:?}");
    // Running again, it is stuck no more; hanging again, it is reported again.
    bench.node.resume(0);
    let mut buf = sent.wait().unwrap();
    assert_eq!(poll(&mut sampler).sum("pinpool_device_stuck_streams", ""), 0.0);
    buf.try_resize(4096, 2).unwrap();
    bench.node.hang(0);
    let sent = stream.upload(buf, &memory).unwrap();
    sampler.poll();
    std::thread::sleep(threshold);
    sampler.poll();
    assert_eq!(events("pinpool::stream::stuck").len(), 2);
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
    let sent = poll(&mut sampler);
    assert_eq!(sent.sum("pinpool_stuck_buffers", "") + sent.sum("pinpool_stuck_bytes", ""), 0.0);
    assert!(events("pinpool::pool::stuck").is_empty(), "{:#?}", events("pinpool::pool::stuck"));
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

/// A gauge that is polled shows nothing of what came and went between two polls.
#[test]
fn a_burst_between_two_polls_shows() {
    let bench = Bench::new(|builder| builder);
    let mut sampler = Sampler::new(&bench.pool);
    let mut peak = || poll(&mut sampler).sum("pinpool_memory_peak_bytes", "") as usize;
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

/// A recorder keeps a gauge's last value for good. What it is given does not grow with the streams that have
/// come and gone.
#[test]
fn what_has_ended_reads_zero_once() {
    let node = HostNode::new(HostConfig::new().devices(2)).unwrap();
    let device = Device::on(&node, 1).unwrap();
    let Bench { pool: stays, node, device } = Bench::with(node, device, |builder| builder.name("stays"));
    let Bench { node: other, device: leaving, pool: gone } = busy("leaving");
    let kept = gone.checkout(1000).unwrap();
    let mut sampler = Sampler::new(&stays).pool(&gone).stuck_after(Duration::ZERO);
    let labels = ["pool=\"leaving\"", "device=\"host:0\""];
    let sent = poll(&mut sampler);
    let before = labels.map(|label| sent.gauges(label).len());
    assert!(before[0] > 20 && before[1] >= 3, "{before:?}");
    drop((kept, gone, leaving));
    until("its memory is gone", || other.live(0).pinned_bytes == 0);
    let sent = poll(&mut sampler);
    assert!(sent.1, "one pool is left");
    let zeros = |count| vec![0.0; count];
    assert_eq!(labels.map(|label| sent.gauges(label)), before.map(zeros), "each gauge once more");
    // Streams that end.
    let mut names = BTreeSet::new();
    for (count, told) in [(100, 65), (0, 65), (100, 1), (3, 1)] {
        let streams: Vec<_> = (0..count).map(|_| device.stream().unwrap()).collect();
        let sent = poll(&mut sampler);
        drop(streams);
        let lines = sent.0.lines().filter_map(|line| line.split_once("pinpool_stream_in_flight_bytes{"));
        let lines: Vec<String> = lines.map(|(_, line)| line.split('}').next().unwrap().to_owned()).collect();
        assert_eq!(lines.len(), told, "{lines:?}");
        names.extend(lines);
    }
    assert_eq!(names.len(), 64 + 1, "the first, and the others' sum");
    let sent = poll(&mut sampler);
    assert_eq!(labels.map(|label| sent.gauges(label).len()), [0, 0], "and no more");
    assert!(!sent.gauges("pool=\"stays\"").is_empty());
    // The last poll of a sampler whose last pool has closed says so, too.
    drop((stays, device));
    until("its memory is gone", || node.live(1).pinned_bytes == 0);
    let sent = poll(&mut sampler);
    let ended = sent.gauges("pool=\"stays\"");
    assert!(!sent.1 && !ended.is_empty() && ended.iter().all(|value| *value == 0.0), "{ended:?}");
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
    // One poll logs eight, the oldest first, and the next polls log the others.
    let bufs: Vec<_> = (0..20).map(|_| bench.pool.checkout(Request::new(64).tag("many")).unwrap()).collect();
    std::thread::sleep(threshold);
    clear();
    for wanted in [8, 16, 20, 20] {
        sampler.poll();
        assert_eq!(events("pinpool::pool::stuck").len(), wanted);
    }
    drop(bufs);
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
    let sent = poll(&mut Sampler::new(&first).pool(&second).stuck_after(Duration::ZERO));
    for (name, capacity, count) in [("twin", 1 << 20, 0.0), ("twin#2", 2 << 20, 1.0)] {
        let of = |metric: &str| sent.values(&format!("pinpool_{metric}"), &format!("pool=\"{name}\""));
        assert_eq!(of("memory_capacity_bytes"), [f64::from(capacity)]);
        for metric in ["checkouts_total", "timeouts_total", "stuck_buffers"] {
            assert_eq!(of(metric), [count], "{metric} of {name}");
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

#[test]
fn only_what_crosses_the_link_is_counted() {
    let bench = Bench::by_hand(|builder| builder);
    let (stream, memory) = (bench.device.stream().unwrap(), bench.device.alloc(8192).unwrap());
    let mut sampler = Sampler::new(&bench.pool);
    let mut seen = || {
        let sent = poll(&mut sampler);
        ["upload", "download"].map(|way| sent.sum("pinpool_device_copied_bytes_total", way))
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
fn waits_and_holding_are_timed() {
    let bench = Bench::new(|builder| builder.track_checkouts(true));
    let all = bench.pool.checkout(900 << 10).unwrap();
    let pause = Duration::from_millis(20);
    let error = bench.pool.checkout_timeout(512 << 10, pause).unwrap_err();
    let Error::Timeout(waited) = error else { panic!("{error}") };
    let first = bench.pool.snapshot().waiting;
    assert_eq!(first.count(), 1);
    // The search in other caches counts as part of the given time, and not as a wait.
    assert!(Duration::ZERO < first.sum() && first.sum() <= waited.time, "{first:?}");
    // A granted wait counts as well. The request has begun before it is seen to wait.
    let granted = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| bench.pool.checkout(512 << 10).is_ok());
        until("it waits", || bench.pool.stats().waiting == 1);
        std::thread::sleep(pause);
        drop(all);
        waiter.join().unwrap()
    });
    assert!(granted);
    let s = bench.pool.snapshot();
    assert_eq!((s.waiting.count(), s.pool.waits, s.pool.timeouts), (2, 2, 1));
    assert!(s.waiting.sum() - first.sum() >= pause, "{:?}", s.waiting);
    assert!(s.waiting.quantile(1.0).is_some_and(|bound| bound >= pause));
    // A pool that tracks times each checkout, and caches none.
    assert_eq!((s.holding.count(), s.pool.cached_bytes), (2, 0));
    assert!(s.holding.sum() >= pause, "{:?}", s.holding);
}
