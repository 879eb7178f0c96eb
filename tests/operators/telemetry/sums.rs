//! Sums: the parts equal the whole, at rest exactly (against a model), and while other threads are at work as well.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pinpool::host::HostConfig;
use pinpool::telemetry::Snapshot;
use pinpool::{InFlight, PinnedBuf, Request, Stream};
use proptest::prelude::*;

use super::Bench;
use super::record::record;
use crate::support::own_process;

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

#[derive(Clone, Debug)]
enum Op {
    Take(Request),
    Return(usize),
    /// Of the buffers, this one, on one of two streams; its handle is kept or not.
    Send(usize, bool, bool),
    Wait(usize),
    Step,
    Look,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let len = prop_oneof![1usize..200, 1000usize..5000, 60_000usize..90_000];
    let request = (len, prop_oneof![4 => Just(64usize), 1 => Just(4096)]);
    let op = prop_oneof![
        4 => request.prop_map(|(len, align)| Op::Take(Request::new(len).align(align).tag("t"))),
        3 => any::<usize>().prop_map(Op::Return),
        3 => (any::<usize>(), any::<bool>(), any::<bool>()).prop_map(|(n, s, k)| Op::Send(n, s, k)),
        2 => any::<usize>().prop_map(Op::Wait),
        2 => Just(Op::Step),
        1 => Just(Op::Look),
    ];
    prop::collection::vec(op, 1..60)
}

/// What the snapshot must say: the model has no pool, only what was asked for.
#[derive(Default)]
struct Model {
    takes: u64,
    returns: u64,
    /// Placements of all that is out, by stride (0: none), with requested lengths.
    out: BTreeMap<usize, usize>,
    requested: usize,
}

fn stride_of(request: Request, len: usize) -> usize {
    let align = if request == Request::new(len).tag("t") { 64 } else { 4096 };
    // The rule: the length and 32 bytes, up to the next stride; strides are multiples of 64 up to 1088, and 64 more
    // than eighths of a doubling from there to 4 MiB + 64.
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

/// A buffer, and what the model knows it by.
type Known<B> = (B, usize, usize);

fn run(ops: Vec<Op>, track: bool) {
    let bench = Bench::stepped(|builder| builder.track_checkouts(track));
    let streams: [Stream; 2] = std::array::from_fn(|_| bench.device.stream().unwrap());
    let memory = bench.device.alloc(100_000).unwrap();
    let mut model = Model::default();
    let mut bufs: Vec<Known<PinnedBuf>> = Vec::new();
    let mut flights: Vec<Known<InFlight<PinnedBuf>>> = Vec::new();
    // The model is not told when a dropped handle's copy is complete; so all of these are returned before the next
    // look.
    let mut dropped: Vec<(usize, usize)> = Vec::new();
    let mut submitted = 0;
    let gone = |model: &mut Model, stride: usize, len: usize| {
        model.returns += 1;
        *model.out.get_mut(&stride).unwrap() -= 1;
        model.requested -= len;
    };
    for op in ops {
        match op {
            Op::Take(request) => {
                let Ok(buf) = bench.pool.try_checkout(request) else { continue };
                let (len, stride) = (buf.capacity(), stride_of(request, buf.capacity()));
                model.takes += 1;
                *model.out.entry(stride).or_default() += 1;
                model.requested += len;
                bufs.push((buf, stride, len));
            }
            Op::Return(n) if !bufs.is_empty() => {
                let (buf, stride, len) = bufs.swap_remove(n % bufs.len());
                drop(buf);
                gone(&mut model, stride, len);
            }
            Op::Send(n, stream, keep) if !bufs.is_empty() => {
                let (mut buf, stride, len) = bufs.swap_remove(n % bufs.len());
                buf.try_resize(len, 1).unwrap();
                let sent = streams[usize::from(stream)].upload(buf, &memory).unwrap();
                submitted += 1;
                match keep {
                    true => flights.push((sent, stride, len)),
                    false => dropped.push((stride, len)),
                }
            }
            Op::Wait(n) if !flights.is_empty() => {
                let (sent, stride, len) = flights.swap_remove(n % flights.len());
                bufs.push((sent.wait().unwrap(), stride, len));
            }
            Op::Step => {
                bench.node.step();
                bench.device.reap();
            }
            Op::Look => sums_hold(&bench.pool.snapshot()),
            _ => {}
        }
        sums_hold(&bench.pool.snapshot());
    }
    bench.settle();
    for (stride, len) in dropped {
        gone(&mut model, stride, len);
    }
    let s = bench.pool.snapshot();
    sums_hold(&s);
    assert_eq!(s.pool, bench.pool.stats(), "both ways to look agree at rest");
    assert_eq!((s.pool.checkouts, s.pool.returns), (model.takes, model.returns));
    assert_eq!(s.pool.requested_bytes, model.requested);
    assert_eq!((s.pool.in_flight_bytes, s.pool.quarantined_bytes), (0, 0), "all has landed");
    for class in &s.classes {
        let out = model.out.get(&class.stride.unwrap_or(0)).copied().unwrap_or(0);
        assert_eq!(class.out, out as u64, "{class:?}");
        assert!(class.cached <= class.free);
    }
    let classed: usize = model.out.iter().filter(|(stride, _)| **stride > 0).map(|(s, n)| s * n).sum();
    let large = s.classes.iter().find(|class| class.stride.is_none()).map_or(0, |class| class.out_bytes);
    assert_eq!(s.pool.granted_bytes, classed + large);
    assert_eq!((s.devices[0].submitted, s.devices[0].completed), (submitted, submitted));
    let (listed, out) =
        (bench.pool.stuck(std::time::Duration::ZERO).len(), model.out.values().sum::<usize>());
    assert!(if track { listed == out } else { listed <= out }, "{listed} of {out}");
    if track {
        assert_eq!(s.holding.count(), model.returns, "each was timed");
        assert_eq!((s.pool.misses >= model.takes, s.pool.cached_bytes), (true, 0));
    }
    bench.pool.check().unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn at_rest_the_parts_are_the_models(ops in ops(), track in any::<bool>()) {
        run(ops, track);
    }
}

#[test]
fn under_way_the_sums_hold() {
    own_process!();
    record();
    let bench = Bench::new(HostConfig::new(), |builder| builder);
    let stop = AtomicBool::new(false);
    let done = AtomicU64::new(0);
    let pass: passing::Passing = Default::default();
    std::thread::scope(|scope| {
        // One thread checks out what another returns, two keep to themselves, one submits.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                if let Ok(buf) = bench.pool.checkout(1000) {
                    pass.push(buf);
                }
            }
        });
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                drop(pass.pop());
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
        for len in [1000, 70_000] {
            let (bench, stop) = (&bench, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    drop(bench.pool.checkout(len));
                }
            });
        }
        let (stream, memory) = (bench.device.stream().unwrap(), bench.device.alloc(4096).unwrap());
        scope.spawn({
            let (bench, stop) = (&bench, &stop);
            move || {
                while !stop.load(Ordering::Relaxed) {
                    let Ok(mut buf) = bench.pool.checkout(4096) else { continue };
                    if buf.try_resize(4096, 1).is_ok() {
                        drop(stream.upload(buf, &memory));
                    }
                }
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
    pass.clear();
    super::eventually("all is back", || bench.pool.stats().granted_bytes == 0);
    let s = bench.pool.snapshot();
    sums_hold(&s);
    assert_eq!((s.pool.checkouts - s.pool.returns, s.pool.requested_bytes), (0, 0));
    bench.pool.check().unwrap();
}

/// A short queue between two threads.
mod passing {
    use std::collections::VecDeque;
    use std::sync::Mutex;

    use pinpool::PinnedBuf;

    #[derive(Default)]
    pub struct Passing(Mutex<VecDeque<PinnedBuf>>);

    impl Passing {
        /// A buffer that would make the queue long is dropped here.
        pub fn push(&self, buf: PinnedBuf) {
            let mut queue = self.0.lock().unwrap();
            if queue.len() < 16 {
                queue.push_back(buf);
            }
        }
        pub fn pop(&self) -> Option<PinnedBuf> {
            self.0.lock().unwrap().pop_front()
        }
        pub fn clear(&self) {
            self.0.lock().unwrap().clear();
        }
    }
}
