//! Each event that an operator acts on, and each span, by its documented target, level and fields.

use pinpool::{Backing, HostAllocFlags};

use super::sampler::poll;
use super::*;

#[test]
fn setting_up_and_ending() {
    recorded!();
    let device = Device::open("host").unwrap();
    assert_eq!(span("pinpool::device", "open", Level::INFO, &["device"]).field("device"), "host:0");
    let pool =
        Pool::builder(&device).name("weights").capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let build = span("pinpool::pool", "build", Level::INFO, &["capacity", "pool"]);
    assert_eq!((build.field("pool"), build.field("capacity")), ("weights", "1048576"));
    pool.wait_pinned(None).unwrap();
    let grow = span("pinpool::region", "grow", Level::INFO, &["bytes", "device"]);
    assert!(grow.entered, "its time is told as busy");
    let pin = span("pinpool::region", "pin", Level::INFO, &["bytes", "device"]);
    assert_eq!((pin.field("device"), pin.within.first()), ("host:0", Some(&"grow")));
    drop(pool.adopt(vec![0u8; 64 << 10]));
    span("pinpool::pool", "adopt", Level::INFO, &["pool"]);
    assert!(pool.shutdown(Duration::from_secs(5)).drained);
    assert_eq!(span("pinpool::pool", "shutdown", Level::INFO, &["pool"]).field("pool"), "weights");
    assert!(events("pinpool::pool::outstanding").is_empty());
    // A hit of a thread's own cache tells nobody.
    let bench = Bench::new(|builder| builder);
    until("pinned", || bench.pool.stats().free_bytes > 0);
    drop(bench.pool.checkout(64).unwrap());
    clear();
    (0..100).for_each(|_| drop(bench.pool.checkout(64).unwrap()));
    assert!(all(|r| r.target.starts_with("pinpool::pool")).is_empty(), "hits are logged");
    // With a buffer out, and memory of the driver's.
    let backing = Backing::HostAlloc(HostAllocFlags::default());
    let bench = Bench::by_hand(|builder| builder.name("leaky").backing(backing));
    let allocate = span("pinpool::region", "allocate", Level::INFO, &["bytes", "device"]);
    assert_eq!((allocate.field("bytes"), allocate.within.first()), ("1048576", Some(&"grow")));
    let buf = bench.pool.checkout(100).unwrap();
    assert!(!bench.pool.shutdown(Duration::ZERO).drained);
    let fields = ["outstanding", "pool", "quarantined_bytes"];
    let left = event("pinpool::pool::outstanding", Level::ERROR, &fields);
    assert_eq!((left.field("pool"), left.field("outstanding")), ("leaky", "1"));
    drop(buf);
}

#[test]
fn waiting_and_what_is_out() {
    recorded!();
    let bench = Bench::new(|builder| builder.name("dry").track_checkouts(true));
    let kept = bench.pool.checkout(Request::new(900 << 10).tag("kv-cache")).unwrap();
    // A client that hangs up has not waited in vain: the report is left for a wait that has.
    let mut gone = bench.pool.checkout_async(512 << 10);
    assert!(crate::support::is_pending(&mut gone));
    drop(gone);
    assert!(bench.pool.try_checkout(512 << 10).is_err() && events("pinpool::pool::stuck").is_empty());
    let late = bench.pool.checkout_timeout(512 << 10, Duration::from_millis(5));
    assert!(late.is_err());
    let wait = span("pinpool::pool", "wait", Level::DEBUG, &["bytes", "pool"]);
    assert_eq!((wait.field("pool"), wait.field("bytes")), ("dry", "524288"));
    let report = events("pinpool::pool::stuck");
    let [sum, one] = &report[..] else { panic!("{report:#?}") };
    assert_eq!(sum.names(), ["buffers", "bytes", "pool", "waited_seconds"]);
    assert_eq!((sum.level, sum.field("buffers")), (Level::WARN, "1"));
    assert!(sum.field("waited_seconds").parse::<f64>().unwrap() >= 0.005);
    let fields = ["age_seconds", "bytes", "exact", "pool", "requested", "site", "state", "tag"];
    assert_eq!((one.level, one.names()), (Level::WARN, fields.to_vec()), "not in flight: no stream");
    assert_eq!((one.field("tag"), one.field("requested")), ("kv-cache", "921600"));
    assert_eq!((one.field("state"), one.field("exact")), ("checked_out", "true"));
    assert!(one.field("site").starts_with(file!()), "{one:?}");
    // Reported by itself only once.
    clear();
    assert!(bench.pool.checkout_timeout(512 << 10, Duration::from_millis(5)).is_err());
    assert!(events("pinpool::pool::stuck").is_empty());
    drop(kept);
}

/// A buffer that went out while the request was waiting kept it from nothing until then.
#[test]
fn what_is_younger_than_the_wait_is_not_reported() {
    recorded!();
    let bench = Bench::new(|builder| builder.track_checkouts(true));
    let pool = &bench.pool;
    let old = pool.checkout(Request::new(600 << 10).tag("old")).unwrap();
    std::thread::scope(|scope| {
        let late = scope.spawn(|| pool.checkout_timeout(900 << 10, Duration::from_millis(300)));
        until("it waits", || pool.stats().waiting > 0);
        std::thread::sleep(Duration::from_millis(5));
        let young = pool.try_checkout(Request::new(64).tag("young")).unwrap();
        assert!(late.join().unwrap().is_err());
        drop(young);
    });
    let report = events("pinpool::pool::stuck");
    let tags: Vec<&str> = report[1..].iter().map(|event| event.field("tag")).collect();
    assert_eq!((report[0].field("buffers"), &tags[..]), ("1", &["old"][..]), "{report:#?}");
    drop(old);
}

/// No code keeps memory that is lost, so that nobody can let go of it: it is not stuck, and has an event and
/// a gauge of its own.
#[test]
fn a_lost_device_and_all_that_is_quarantined() {
    recorded!();
    let bench = Bench::by_hand(|builder| builder.track_checkouts(true));
    let (stream, memory) = bench.target();
    let filled = || bench.filled(4096);
    // One buffer in one copy, and one that two copies share.
    let sent = stream.upload(filled(), &memory).unwrap();
    let shared = std::sync::Arc::new(filled());
    let lent = [(); 2].map(|()| stream.upload(shared.clone(), &memory).unwrap());
    bench.node.kill(0);
    assert!(sent.wait().is_err());
    let lost = event("pinpool::device::lost", Level::ERROR, &["device", "error"]);
    assert_eq!(lost.field("device"), bench.device.name());
    let fields = ["device", "entries", "error", "stream"];
    let stream_lost = event("pinpool::stream::lost", Level::ERROR, &fields);
    assert_eq!(stream_lost.field("stream"), stream.number().to_string());
    let gone = event("pinpool::stream::quarantine", Level::ERROR, &["buffers", "bytes"]);
    assert_eq!((gone.field("buffers"), gone.field("bytes")), ("2", &*(2 * 4160).to_string()));
    assert_eq!(bench.pool.stats().quarantined_bytes, 2 * 4160);
    let kept = bench.pool.checkout(64).unwrap();
    let sent = poll(&mut Sampler::new(&bench.pool).stuck_after(Duration::ZERO));
    assert_eq!(sent.sum("pinpool_stuck_buffers", ""), 1.0, "the one that the program has");
    assert_eq!(sent.sum("pinpool_memory_bytes", "state=\"quarantined\""), 2.0 * 4160.0);
    let listed = bench.pool.stuck(Duration::ZERO).len();
    assert_eq!((listed, events("pinpool::pool::stuck").len()), (3, 1), "asked for, all are there");
    drop((shared, lent, kept));
}

#[test]
fn memory_that_is_not_pinned_and_growing_that_ends_early() {
    recorded!();
    let grows = |unpinned| {
        let bench = Bench::by_hand(|builder| builder.initial(512 << 10).region(512 << 10).unpinned(unpinned));
        let first = bench.pool.checkout(400 << 10).unwrap();
        clear();
        bench.fail("cuMemHostRegister_v2");
        (bench.pool.try_checkout(400 << 10).map(drop), bench, first)
    };
    let (second, bench, _first) = grows(Unpinned::Allow);
    second.unwrap();
    let unpinned = event("pinpool::region::unpinned", Level::WARN, &["bytes", "device", "error"]);
    assert_eq!((unpinned.field("device"), unpinned.field("bytes")), (bench.device.name(), "524288"));
    let (second, bench, _first) = grows(Unpinned::Refuse);
    second.unwrap_err();
    let ended = event("pinpool::region::ended", Level::WARN, &["device", "error", "missing"]);
    assert_eq!(ended.field("missing"), "524288");
    let stats = bench.pool.stats();
    assert_eq!((stats.growths, stats.growth_failures, stats.errors.transient), (1, 1, 1));
    // As long as no growth succeeds, it is told once.
    bench.fail("cuMemHostRegister_v2");
    assert!(bench.pool.try_checkout(400 << 10).is_err());
    let levels: Vec<Level> = events("pinpool::region::ended").iter().map(|event| event.level).collect();
    assert_eq!(levels, [Level::WARN, Level::DEBUG]);
}

#[test]
fn what_the_driver_does_not_take_back() {
    recorded!();
    let bench = Bench::by_hand(|builder| builder);
    bench.fail("cuMemHostUnregister");
    assert_eq!(bench.pool.trim(0), 1 << 20);
    let leak = event("pinpool::region::leak", Level::ERROR, &["bytes", "device", "error"]);
    assert_eq!(leak.field("bytes"), "1048576");
    bench.fail("cuStreamDestroy_v2");
    drop(bench.device.stream().unwrap());
    event("pinpool::stream::leak", Level::WARN, &["device", "error"]);
    bench.fail("cuMemFree_v2");
    drop(bench.device.alloc(64).unwrap());
    assert_eq!(events("pinpool::device::leak").len(), 1);
}
