//! Sums: the parts equal the whole, at rest exactly, and while other threads are at work as well.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;

use pinpool::telemetry::Snapshot;
use pinpool::{InFlight, PinnedBuf, Request, Stream};

use super::Bench;

/// What holds at any time.
fn sums_hold(s: &Snapshot) {
    let p = &s.pool;
    let parts = p.free_bytes + p.checked_out_bytes + p.in_flight_bytes + p.quarantined_bytes + p.cut_bytes;
    assert_eq!(parts, p.pinned_bytes + p.unpinned_bytes, "{p:?}");
    assert_eq!(p.granted_bytes, p.checked_out_bytes + p.in_flight_bytes + p.quarantined_bytes);
    let out: usize = s.classes.iter().map(|class| class.out_bytes).sum();
    assert_eq!(out, p.granted_bytes, "the classes' parts: {s:#?}");
    assert!(p.claimed_bytes <= p.in_flight_bytes && p.cached_bytes <= p.free_bytes, "{p:?}");
    assert_eq!(s.classes.iter().map(|c| c.checkouts).sum::<u64>(), p.checkouts, "{s:#?}");
    assert_eq!(s.classes.iter().map(|c| c.returns).sum::<u64>(), p.returns, "{s:#?}");
}

/// The stride of what is asked for, 0 where it has none. The rule: the length and 32 bytes, up to the next stride; strides
/// are multiples of 64 up to 1088, and 64 more than eighths of a doubling from there to 4 MiB + 64.
fn stride_of(len: usize, align: usize) -> usize {
    let span = len.next_multiple_of(32) + 32;
    match span {
        _ if align > 64 || span > (4 << 20) + 64 => 0,
        _ if span <= 1088 => span.next_multiple_of(64),
        _ => {
            let step = (span - 64).next_power_of_two() / 16;
            (span - 64).next_multiple_of(step) + 64
        }
    }
}

/// Random work on a device that the test moves. What the snapshot must say follows from what was asked for.
fn run(seed: u64, track: bool) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut below = |bound: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as usize % bound
    };
    let bench = Bench::by_hand(|builder| builder.track_checkouts(track));
    let streams: [Stream; 2] = std::array::from_fn(|_| bench.device.stream().unwrap());
    let memory = bench.device.alloc(100_000).unwrap();
    // With their strides and lengths.
    let mut bufs: Vec<(PinnedBuf, [usize; 2])> = Vec::new();
    let mut flights: Vec<(InFlight<PinnedBuf>, [usize; 2])> = Vec::new();
    let (mut takes, mut returns, mut submitted) = (0, 0, 0);
    for _ in 0..60 {
        match below(14) {
            0..4 => {
                let len = [1 + below(200), 1000 + below(4000), 60_000 + below(30_000)][below(3)];
                let align = [64, 64, 64, 64, 4096][below(5)];
                let Ok(buf) = bench.pool.try_checkout(Request::new(len).align(align).tag("t")) else {
                    continue;
                };
                bufs.push((buf, [stride_of(len, align), len]));
                takes += 1;
            }
            4..7 if !bufs.is_empty() => {
                drop(bufs.swap_remove(below(bufs.len())));
                returns += 1;
            }
            7..10 if !bufs.is_empty() => {
                let (mut buf, known) = bufs.swap_remove(below(bufs.len()));
                buf.try_resize(known[1], 1).unwrap();
                let sent = streams[below(2)].upload(buf, &memory).unwrap();
                submitted += 1;
                match below(2) {
                    0 => flights.push((sent, known)),
                    // Its handle is dropped: it is back before the sums are compared.
                    _ => returns += 1,
                }
            }
            10..12 if !flights.is_empty() => {
                let (sent, known) = flights.swap_remove(below(flights.len()));
                bufs.push((sent.wait().unwrap(), known));
            }
            _ => {
                bench.node.step();
                bench.device.reap();
            }
        }
        sums_hold(&bench.pool.snapshot());
    }
    bench.settle();
    let s = bench.pool.snapshot();
    sums_hold(&s);
    assert_eq!(s.pool, bench.pool.stats(), "both ways to look agree at rest");
    assert_eq!((s.pool.checkouts, s.pool.returns), (takes, returns));
    assert_eq!((s.pool.in_flight_bytes, s.pool.quarantined_bytes), (0, 0), "all has landed");
    let out: Vec<[usize; 2]> =
        bufs.iter().map(|(_, known)| *known).chain(flights.iter().map(|(_, known)| *known)).collect();
    assert_eq!(s.pool.requested_bytes, out.iter().map(|[_, len]| len).sum::<usize>());
    for class in &s.classes {
        let count = out.iter().filter(|[stride, _]| *stride == class.stride.unwrap_or(0)).count();
        assert_eq!(class.out, count as u64, "{class:?}");
        assert!(class.cached <= class.free);
    }
    let large = s.classes.iter().find(|class| class.stride.is_none()).map_or(0, |class| class.out_bytes);
    assert_eq!(s.pool.granted_bytes, out.iter().map(|[stride, _]| stride).sum::<usize>() + large);
    assert_eq!((s.devices[0].submitted, s.devices[0].completed), (submitted, submitted));
    let listed = bench.pool.stuck(std::time::Duration::ZERO).len();
    assert!(if track { listed == out.len() } else { listed <= out.len() }, "{listed} of {}", out.len());
    if track {
        assert_eq!(s.holding.count(), returns, "each was timed");
        assert_eq!((s.pool.misses >= takes, s.pool.cached_bytes), (true, 0));
    }
    bench.pool.check().unwrap();
}

#[test]
fn at_rest_the_parts_are_those_that_were_asked_for() {
    for seed in 1..=48 {
        for track in [false, true] {
            println!("seed {seed}, {track}");
            run(seed, track);
        }
    }
}

#[test]
fn under_way_the_sums_hold() {
    recorded!();
    let bench = Bench::new(|builder| builder);
    let stop = AtomicBool::new(false);
    let done = AtomicU64::new(0);
    let (pass, passed) = mpsc::sync_channel(16);
    std::thread::scope(|scope| {
        let (bench, stop, done) = (&bench, &stop, &done);
        // One thread checks out what another returns, two keep to themselves, one submits.
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                // One that would make the queue long is dropped here.
                drop(pass.try_send(bench.pool.checkout(1000)));
            }
        });
        scope.spawn(move || {
            for buf in passed {
                drop(buf);
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
        for len in [1000, 70_000] {
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    drop(bench.pool.checkout(len));
                }
            });
        }
        let (stream, memory) = bench.target();
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                drop(stream.upload(bench.filled(4096), &memory));
            }
        });
        while done.load(Ordering::Relaxed) < 3000 {
            let s = bench.pool.snapshot();
            sums_hold(&s);
            assert!(s.devices[0].completed <= s.devices[0].submitted);
            let _ = bench.pool.stuck(std::time::Duration::ZERO);
        }
        stop.store(true, Ordering::Relaxed);
    });
    super::eventually("all is back", || bench.pool.stats().granted_bytes == 0);
    let s = bench.pool.snapshot();
    sums_hold(&s);
    assert_eq!((s.pool.checkouts - s.pool.returns, s.pool.requested_bytes), (0, 0));
    bench.pool.check().unwrap();
}
