//! The report on buffers that are out: each state, what it waits for, and which code checked it out.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pinpool::telemetry::{BufferState, EventState, Sampler, StuckBuffer};
use pinpool::{Copier, PoolBuilder, Request};

use super::{Bench, eventually};
use crate::record::events;
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
    recorded!();
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
    // A caller polls: the event is recorded.
    assert!(!flying.is_done().unwrap());
    assert_eq!(tagged(&bench, "flying").awaited[0].event, EventState::Recorded);

    bench.settle();
    drop((out, landed, flying, shared));
    assert!(all(&bench).is_empty(), "{:#?}", all(&bench));
    assert_eq!(bench.pool.snapshot().holding.count(), 5);
}

#[test]
fn claimed_and_quarantined() {
    recorded!();
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

#[test]
fn a_buffer_held_on_two_streams_waits_for_both() {
    recorded!();
    let bench = Bench::by_hand(tracked);
    let streams = [bench.device.stream().unwrap(), bench.device.stream().unwrap()];
    let memory = bench.device.alloc(64).unwrap();
    for stream in &streams {
        drop(stream.copy(memory.slice(..8).unwrap(), memory.slice(8..16).unwrap()).unwrap());
    }
    let buf = Arc::new(bench.pool.checkout(Request::new(64).tag("both")).unwrap());
    let held = [0, 1].map(|i: usize| streams[i].hold(buf.clone()).unwrap());
    drop(buf);
    let mut at: Vec<u64> = tagged(&bench, "both").awaited.iter().map(|at| at.stream).collect();
    at.sort_unstable();
    assert_eq!(at, [streams[0].number(), streams[1].number()]);
    bench.settle();
    drop(held);
    assert!(all(&bench).is_empty());
}

/// Blocks that a copier copies from where they are, one of them in parts; and bytes that it packs, whose buffer waits for
/// nothing, beside the segment that they are packed in.
#[test]
fn what_a_copier_moves_waits_for_its_stream() {
    recorded!();
    let bench = Bench::by_hand(tracked);
    let copier = Copier::builder(&bench.pool, &bench.device).chunk(16 << 10).build().unwrap();
    let memory = bench.device.alloc(1 << 20).unwrap();
    let filled = |tag, len| bench.filled(Request::new(len).tag(tag));
    let place = |i: usize, len| memory.slice(i * LONG..i * LONG + len).unwrap();
    // A block of so many bytes fits into no chunk; three short ones fit into one.
    const LONG: usize = 20 << 10;
    const SHORT: usize = 4 << 10;
    let tags = ["block-0", "block-1", "block-2"];
    let blocks = tags.iter().enumerate().map(|(i, tag)| (filled(tag, SHORT), place(i, SHORT))).collect();
    let sent = copier.upload_pages(blocks).unwrap();
    // Parts of one buffer, which waits for its stream once.
    let thrice = Arc::new(filled("thrice", SHORT));
    let parts = (3..6).map(|i| (thrice.clone(), place(i, SHORT))).collect();
    let of_one = copier.upload_pages(parts).unwrap();
    let long = copier.upload_pages(vec![(filled("long", LONG), place(6, LONG))]).unwrap();
    let packed = filled("packed", 1000);
    let of_bytes = copier.upload(packed.to_vec(), place(7, 1000)).unwrap();
    let mut streams: Vec<u64> = Vec::new();
    for (tag, state) in [
        ("thrice", BufferState::CheckedOut),
        ("block-0", BufferState::InFlight),
        ("block-1", BufferState::InFlight),
        ("block-2", BufferState::InFlight),
    ] {
        let found = tagged(&bench, tag);
        assert_eq!(found.state, state, "{tag}");
        let [at] = &found.awaited[..] else { panic!("{found:#?}") };
        assert_eq!((&*at.device, at.event), (bench.device.name(), EventState::Recorded), "{tag}");
        assert!(at.seq > at.completed, "{at:?}");
        streams.push(at.stream);
    }
    assert!(streams[1..].iter().all(|stream| *stream == streams[1]), "of one batch: {streams:?}");
    let found = tagged(&bench, "long");
    assert_eq!((found.state, found.awaited.is_empty()), (BufferState::InFlight, false));
    let found = tagged(&bench, "packed");
    assert_eq!((found.state, found.awaited.len()), (BufferState::CheckedOut, 0));
    let mut segments = all(&bench);
    segments.retain(|buffer| buffer.tag.is_none());
    let [segment] = &segments[..] else { panic!("{segments:#?}") };
    assert_eq!((segment.state, segment.awaited.len()), (BufferState::InFlight, 1));
    while bench.node.queued(0) > 0 {
        bench.settle();
        copier.reap();
    }
    assert!(tags.iter().chain(&["long"]).all(|tag| tagged(&bench, tag).awaited.is_empty()));
    drop((sent.wait().unwrap(), of_one.wait().unwrap(), long.wait().unwrap(), thrice, packed));
    of_bytes.wait().unwrap();
    assert!(all(&bench).is_empty());
}

#[test]
fn ages_and_order() {
    recorded!();
    let bench = Bench::by_hand(tracked);
    let old = bench.pool.checkout(Request::new(64).tag("old")).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    let new = bench.pool.checkout(Request::new(64).tag("new")).unwrap();
    let tags: Vec<_> = all(&bench).iter().map(|buffer| buffer.tag.unwrap()).collect();
    assert_eq!(tags, ["old", "new"], "oldest first");
    let found = bench.pool.stuck(Duration::from_millis(30));
    assert!(found.iter().any(|buffer| buffer.tag == Some("old")), "{found:#?}");
    assert!(bench.pool.stuck(Duration::from_secs(3600)).is_empty());
    // One that is forgotten shows for good.
    std::mem::forget(old);
    drop(new);
    let left = tagged(&bench, "old");
    assert_eq!((left.state, all(&bench).len()), (BufferState::CheckedOut, 1));
}

/// Of a pool that does not track, a sample of the checkouts is listed, and what streams hold, with an age since the
/// reaper has found it there.
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
    let missed = bench.pool.checkout(5000).unwrap();
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
    eventually("it has been in flight for long", || !found(LONG).is_empty());
    let age = found(LONG)[0].age;
    assert!(age >= LONG && age <= since.elapsed(), "{age:?}");
    // Another one beside it is younger.
    let other = stream.hold(bufs.pop().unwrap()).unwrap();
    let ages: Vec<Duration> = found(Duration::ZERO).iter().map(|buffer| buffer.age).collect();
    assert!(ages.len() == 2 && ages[0] > LONG && ages[1] < ages[0], "{ages:?}");
    bench.node.resume(0);
    drop((held.wait().unwrap(), other.wait().unwrap(), bufs));
    assert!(all(&bench).is_empty());
    bench.pool.check().unwrap();
}

#[test]
fn every_way_to_check_out_is_tracked() {
    recorded!();
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
    let wanted = [
        ("checkout", 1),
        ("try", 2),
        ("timeout", 3),
        ("many-1", 4),
        ("many-2", 4),
        ("on", 5),
        ("try-on", 6),
        ("async", 7),
    ];
    for (tag, at) in wanted {
        let site = tagged(&bench, tag).site.unwrap();
        assert_eq!((site.file(), site.line()), (file!(), line + at), "{tag}");
    }
    drop((one, two, three, four, five, six, seven.unwrap()));
    assert!(all(&bench).is_empty());
}

#[test]
fn each_is_logged_once_if_not_by_the_first_look() {
    const TAGS: [&str; 20] =
        ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p", "q", "r", "s", "t"];
    recorded!();
    let bench = Bench::by_hand(tracked);
    let _out = TAGS.map(|tag| bench.pool.checkout(Request::new(64).tag(tag)).unwrap());
    let mut sampler = Sampler::new(&bench.pool).stuck_after(Duration::ZERO);
    let logged = [8, 16, 20, 20].map(|wanted| {
        sampler.poll();
        let mut tags: Vec<String> = Vec::new();
        tags.extend(events("pinpool::pool::stuck").iter().map(|event| event.field("tag").to_owned()));
        assert_eq!(tags.len(), wanted, "{tags:?}");
        tags
    });
    let mut all = logged[3].clone();
    all.sort_unstable();
    assert_eq!(all, TAGS, "each once");
}

/// The events about waits of a pool, not those about single buffers.
fn reports(pool: &str) -> Vec<crate::record::Record> {
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
                    eventually("the wait is reported", || !reports(name).is_empty());
                    assert!(since.elapsed() >= Duration::from_secs(4), "{name}: too early");
                    let found = reports(name);
                    let seconds: f64 = found[0].field("waited_seconds").parse().unwrap();
                    assert!(found[0].level == tracing::Level::WARN && seconds > 4.0, "{name}: {found:?}");
                    let [asked, waiting_too] =
                        ["requested", "waiting"].map(|field| found[0].field(field).parse::<usize>());
                    // A copier makes do with short segments.
                    assert!(asked.unwrap() >= 16_000 && waiting_too == Ok(count), "{name}: {found:?}");
                    let out =
                        || events("pinpool::pool::stuck").into_iter().any(|event| event.field("tag") == name);
                    eventually("the buffer that is out is told", out);
                    // No second one, while it goes on and when it ends.
                    std::thread::sleep(Duration::from_secs(6));
                    drop(all);
                    waiting.into_iter().for_each(|waiting| waiting.join().unwrap().unwrap());
                });
                assert_eq!(reports(name).len(), 1, "{name}");
            });
        }
    });
}

#[test]
fn looks_go_on_while_others_come_and_go() {
    recorded!();
    const MOST: usize = 100;
    let bench = Bench::new(|builder| tracked(builder).capacity(32 << 20));
    let pool = &bench.pool;
    pool.wait_pinned(None).unwrap();
    // Buffers that stay have another length than those that come and go, so the report tells them apart.
    let kept: Vec<_> = (0..6000).map(|_| pool.checkout(1000).unwrap()).collect();
    let over = AtomicBool::new(false);
    let churn = |seed: usize| {
        let mut some = Vec::new();
        let mut n = seed;
        while !over.load(Ordering::Relaxed) {
            n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            match n >> 60 {
                0..9 if some.len() < MOST => some.extend(pool.try_checkout(100).ok()),
                0..14 => drop(some.pop()),
                _ => some.truncate(some.len() / 2),
            }
        }
    };
    std::thread::scope(|scope| {
        let churn = &churn;
        (1..=3).for_each(|seed| _ = scope.spawn(move || churn(seed)));
        let start = Instant::now();
        for _ in 0..15 {
            let report = pool.stuck(Duration::ZERO);
            let (stay, move_on): (Vec<_>, Vec<_>) = report.iter().partition(|buffer| buffer.granted > 1000);
            assert_eq!(stay.len(), kept.len(), "each of those that are out all the time is there once");
            assert!(move_on.len() <= 3 * MOST, "{} that no thread has", move_on.len());
            assert!(move_on.iter().all(|buffer| buffer.exact && buffer.age <= start.elapsed()));
        }
        over.store(true, Ordering::Relaxed);
    });
    drop(kept);
    assert!(all(&bench).is_empty());
    pool.check().unwrap();
}
