//! The report on buffers that are out: each state, what it waits for, and which code checked it out.

use std::time::Instant;

use pinpool::telemetry::{BufferState, EventState, StuckBuffer};

use super::*;
use crate::support::rig::block_on;

fn all<N>(bench: &Bench<N>) -> Vec<StuckBuffer> {
    bench.pool.stuck(Duration::ZERO)
}

/// The only one with this tag.
fn tagged<N>(bench: &Bench<N>, tag: &str) -> StuckBuffer {
    let mut found = all(bench);
    found.retain(|buffer| buffer.tag == Some(tag));
    assert_eq!(found.len(), 1, "{tag}: {found:#?}");
    found.remove(0)
}

fn tracked(builder: PoolBuilder) -> PoolBuilder {
    builder.track_checkouts(true)
}

#[test]
fn each_state() {
    let bench = Bench::by_hand(tracked);
    let (stream, memory) = bench.target();
    let filled = |tag| bench.filled(Request::new(4096).tag(tag));
    let out = filled("out");
    let landed = stream.upload(filled("completed"), &memory).unwrap();
    bench.settle();
    let flying = stream.upload(filled("flying"), &memory).unwrap();
    drop(stream.upload(filled("returning"), &memory).unwrap());
    let shared = Arc::new(filled("shared"));
    drop(stream.upload(shared.clone(), &memory).unwrap());

    let found = tagged(&bench, "out");
    assert_eq!((found.state, found.granted, found.requested), (BufferState::CheckedOut, 4160, Some(4096)));
    assert!(found.exact && found.awaited.is_empty());
    assert_eq!(found.site.unwrap().file(), file!());
    assert_eq!(tagged(&bench, "completed").state, BufferState::Completed);
    let found = tagged(&bench, "flying");
    assert_eq!(found.state, BufferState::InFlight);
    let [at] = &found.awaited[..] else { panic!("{found:#?}") };
    assert_eq!((&*at.device, at.stream, at.event), (bench.device.name(), stream.number(), EventState::Due));
    assert!(at.seq > at.completed, "{at:?}");
    assert_eq!(tagged(&bench, "returning").state, BufferState::Returning);
    let found = tagged(&bench, "shared");
    assert_eq!((found.state, found.awaited.len()), (BufferState::CheckedOut, 1), "kept and lent");
    // Held on two streams, it waits for both.
    let other = bench.device.stream().unwrap();
    let twice = Arc::new(bench.pool.checkout(Request::new(64).tag("twice")).unwrap());
    let held = [&stream, &other].map(|stream| {
        drop(stream.copy(memory.slice(..8).unwrap(), memory.slice(8..16).unwrap()).unwrap());
        stream.hold(twice.clone()).unwrap()
    });
    drop(twice);
    let mut at: Vec<u64> = tagged(&bench, "twice").awaited.iter().map(|at| at.stream).collect();
    at.sort_unstable();
    assert_eq!(at, [stream.number(), other.number()]);
    // A caller polls: the event is recorded.
    assert!(!flying.is_done().unwrap());
    assert_eq!(tagged(&bench, "flying").awaited[0].event, EventState::Recorded);

    bench.settle();
    drop((out, landed, flying, shared, held));
    assert!(all(&bench).is_empty(), "{:#?}", all(&bench));
    assert_eq!(bench.pool.snapshot().holding.count(), 6);
}

#[test]
fn claimed_and_quarantined() {
    // Room for one buffer, so that the next has to be claimed.
    let bench = Bench::by_hand(|builder| tracked(builder).capacity(8192));
    let (stream, memory) = bench.target();
    let buf = bench.filled(Request::new(4096).tag("first"));
    drop(stream.upload(buf, &memory).unwrap());
    let claimed = bench.pool.checkout_on(&stream, Request::new(4000).tag("second")).unwrap();
    assert!(claimed.was_claimed());
    let found = tagged(&bench, "second");
    assert_eq!((found.state, found.requested), (BufferState::Claimed, Some(4000)), "the claimer's own");
    assert_eq!(found.awaited.len(), 1);
    bench.node.kill(0);
    bench.settle();
    assert!(claimed.wait().is_err());
    let found = all(&bench);
    assert_eq!(found.iter().map(|b| b.state).collect::<Vec<_>>(), [BufferState::Quarantined]);
}

/// Of a pool that does not track, a sample of the checkouts is listed, and what streams hold, with an age since the
/// reaper has found it there. The log says how to learn more of the others.
#[test]
fn without_tracking_a_sample_and_what_is_in_flight_are_listed() {
    recorded!();
    let bench = Bench::new(|builder| builder);
    // The first checkout misses, and is the sample; the others are not.
    let mut bufs: Vec<_> =
        (0..20).map(|_| bench.pool.checkout(Request::new(64).tag("kept")).unwrap()).collect();
    let recorded = all(&bench);
    assert!((1..20).contains(&recorded.len()), "{} of 20 were entered", recorded.len());
    assert!(recorded.iter().all(|buffer| buffer.exact && buffer.tag == Some("kept")), "{recorded:#?}");
    // Nor is another one that misses.
    let (missed, large) = (bench.pool.checkout(5000).unwrap(), bench.pool.checkout(800 << 10).unwrap());
    assert_eq!(all(&bench).len(), recorded.len());
    let stream = bench.device.stream().unwrap();
    bench.node.hang(0);
    let since = Instant::now();
    let held = stream.hold(missed).unwrap();
    let found = |threshold: Duration| {
        let mut found = bench.pool.stuck(threshold);
        found.retain(|buffer| !buffer.exact);
        found
    };
    let [one] = &found(Duration::ZERO)[..] else { panic!("{:#?}", all(&bench)) };
    assert_eq!((one.state, one.granted, one.tag, one.requested), (BufferState::InFlight, 5184, None, None));
    assert_eq!(one.awaited[0].stream, stream.number());
    const LONG: Duration = Duration::from_millis(20);
    until("it has been in flight for long", || !found(LONG).is_empty());
    let age = found(LONG)[0].age;
    assert!(age >= LONG && age <= since.elapsed(), "{age:?}");
    // Another one beside it is younger.
    let other = stream.hold(bufs.pop().unwrap()).unwrap();
    let ages: Vec<Duration> = found(Duration::ZERO).iter().map(|buffer| buffer.age).collect();
    assert!(ages.len() == 2 && ages[0] > LONG && ages[1] < ages[0], "{ages:?}");
    assert!(bench.pool.checkout_timeout(512 << 10, Duration::from_millis(5)).is_err());
    let report = events("pinpool::pool::stuck");
    let hint = |one: &&Record| one.field("hint").contains("PoolBuilder::track_checkouts");
    let (unknown, known): (Vec<_>, Vec<_>) = report[1..].iter().partition(hint);
    assert!(hint(&&report[0]) && unknown.len() == 2 && !known.is_empty(), "{report:#?}");
    for one in unknown {
        assert!(!one.names().contains(&"tag") && !one.names().contains(&"site"), "{one:?}");
        assert_eq!((one.field("state"), one.field("stream")), ("in_flight", &*stream.number().to_string()));
    }
    bench.node.resume(0);
    drop((held.wait().unwrap(), other.wait().unwrap(), bufs, large));
    assert!(all(&bench).is_empty());
    bench.pool.check().unwrap();
}

#[test]
fn every_way_to_check_out_is_tracked() {
    let bench = Bench::by_hand(tracked);
    let stream = bench.device.stream().unwrap();
    let request = |tag| Request::new(64).tag(tag);
    let pool = &bench.pool;
    let line = line!();
    let one = pool.checkout(request("checkout")).unwrap();
    let two = pool.try_checkout(request("try")).unwrap();
    let three = pool.checkout_timeout(request("timeout"), Duration::ZERO).unwrap();
    let four = pool.checkout_many(&[request("many-1"), request("many-2")], None).unwrap();
    let five = pool.checkout_on(&stream, request("on")).unwrap();
    let six = pool.try_checkout_on(&stream, request("try-on")).unwrap();
    let seven = block_on(pool.checkout_async(request("async")));
    let ways = ["checkout", "try", "timeout", "many-1", "on", "try-on", "async"];
    for (tag, at) in ways.into_iter().zip(1..).chain([("many-2", 4)]) {
        let site = tagged(&bench, tag).site.unwrap();
        assert_eq!((site.file(), site.line()), (file!(), line + at), "{tag}");
    }
    drop((one, two, three, four, five, six, seven.unwrap()));
    assert!(all(&bench).is_empty());
}

/// The events about waits of a pool, not those about single buffers.
fn reports(pool: &str) -> Vec<Record> {
    let mut all = events("pinpool::pool::stuck");
    all.retain(|event| event.field("pool") == pool && event.fields.contains_key("waited_seconds"));
    all
}

/// Every kind of wait, each at a pool of its own; and many that wait at one pool.
#[test]
fn a_wait_that_lasts_is_reported_once_before_it_ends() {
    recorded!();
    type Wait = fn(&Bench) -> pinpool::Result<()>;
    let waits: [(&str, Wait, usize); 6] = [
        ("blocking", |bench| bench.pool.checkout(500_000).map(drop), 1),
        ("many", |bench| bench.pool.checkout_many(&[500_000.into(), 8.into()], None).map(drop), 1),
        ("stream", |bench| bench.pool.checkout_on(&bench.device.stream()?, 500_000).map(drop), 1),
        ("async", |bench| block_on(bench.pool.checkout_async(500_000)).map(drop), 1),
        ("crowd", |bench| bench.pool.checkout(500_000).map(drop), 40),
        (
            "copier",
            |bench| {
                let copier = Copier::builder(&bench.pool, &bench.device).build()?;
                let memory = bench.device.alloc(2_000_000)?;
                copier.upload_slice(&vec![7; 2_000_000], &memory)
            },
            1,
        ),
    ];
    std::thread::scope(|scope| {
        for (name, wait, count) in waits {
            scope.spawn(move || {
                let bench = Bench::new(|builder| tracked(builder).name(name));
                let all = bench.pool.checkout(Request::new(1_040_000).tag(name)).unwrap();
                let since = Instant::now();
                std::thread::scope(|scope| {
                    let waiting: Vec<_> = (0..count).map(|_| scope.spawn(|| wait(&bench))).collect();
                    until("the wait is reported", || !reports(name).is_empty());
                    assert!(since.elapsed() >= Duration::from_secs(4), "{name}: too early");
                    let found = reports(name);
                    let seconds: f64 = found[0].field("waited_seconds").parse().unwrap();
                    assert!(found[0].level == tracing::Level::WARN && seconds > 4.0, "{name}: {found:?}");
                    let fields = ["requested", "waiting"].map(|field| found[0].field(field));
                    let [asked, waiting_too] = fields.map(|field| field.parse::<usize>().unwrap());
                    // A copier makes do with short segments.
                    assert!(asked >= 16_000 && waiting_too == count, "{name}: {found:?}");
                    let out =
                        || events("pinpool::pool::stuck").into_iter().any(|event| event.field("tag") == name);
                    until("the buffer that is out is told", out);
                    drop(all);
                    waiting.into_iter().for_each(|waiting| waiting.join().unwrap().unwrap());
                });
                // (`events::waiting_and_what_is_out` has that a second one comes no sooner than a minute later.)
                assert_eq!(reports(name).len(), 1, "{name}");
            });
        }
    });
}
