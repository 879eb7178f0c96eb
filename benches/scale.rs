//! What a call costs in a pool that holds much, beside the same call in a small one: every row is a ratio.
//!
//! A row is a piece of work and a number that grows: waiters, buffers, streams. The work is timed at the row's small end
//! and at its large ends, in one run, so a machine's speed cancels out. A row has a gate, which the last column compares
//! with.
//!
//! The rows are on the host device, where a driver costs next to nothing, so what is timed is the pool's own work.
//!
//! `cargo bench --bench scale [part of a row's name]`; `PINPOOL_BENCH_QUICK=1` leaves the largest ends out.
#![allow(missing_docs)]

use std::future::Future;
use std::hint::black_box;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use pinpool::host::{HostConfig, HostNode};
use pinpool::{Checkout, Copier, Device, PinnedBuf, Pool, Request, Unpinned};

const MIB: usize = 1 << 20;

use Gate::{Time, Times};

/// What bounds a row.
enum Gate {
    /// Each end costs at most so many times the small end.
    Times(f64),
    /// Each end costs at most this.
    Time(Duration),
}

/// What the work is, its ends (the small one first), what bounds it, and the time of one piece of it at an end.
type Row = (&'static str, &'static [usize], Gate, fn(usize) -> Duration);

const WAITERS: &[usize] = &[100, 10_000, 100_000];
const TRANSFERS: &[usize] = &[100, 10_000];

/// Developers add rows here.
const ROWS: &[Row] = &[
    ("n wait: join", WAITERS, Times(3.0), |n| waiters(n)[0]),
    ("n wait: a return that serves one", WAITERS, Times(3.0), |n| waiters(n)[1]),
    ("n wait: a return that serves none", WAITERS, Times(3.0), |n| waiters(n)[2]),
    ("n wait: leave", WAITERS, Times(3.0), |n| waiters(n)[3]),
    ("n large ones wait: join", WAITERS, Times(3.0), |n| large_waiters(n)[0]),
    ("n large ones wait: leave", WAITERS, Times(3.0), |n| large_waiters(n)[1]),
    ("a return that serves all n, each", WAITERS, Times(3.0), storm),
    ("8 MiB wait among n buffers: a return", &[1_000, 100_000], Time(Duration::from_micros(1)), |n| {
        crowd(n)[0]
    }),
    (
        "n buffers, half returned: a failing try of 8 MiB",
        &[1_000, 100_000],
        Time(Duration::from_micros(10)),
        |n| crowd(n)[1],
    ),
    ("n buffers, one quarantined: a join", &[1_000, 400_000], Time(Duration::from_micros(10)), quarantined),
    (
        "every other MiB held, 5 MiB wait for ever (0: without): a thousand checkouts of 4 KiB",
        &[0, 1],
        Times(1.0 / 0.95),
        |waiters| beside([4096, MIB - 32], 0)[waiters],
    ),
    (
        "every other MiB held, 5 MiB wait for ever (0: without): a thousand checkouts of 1 MiB",
        &[0, 1],
        Times(1.0 / 0.5),
        |waiters| beside([4096, MIB - 32], 1)[waiters],
    ),
    (
        "16 threads: 4 MiB in a pool full of small ones (over its longest hold)",
        &[1, 16],
        Time(Duration::from_millis(20)),
        under_load,
    ),
    ("n transfers at once, to places of their own: start", TRANSFERS, Times(2.0), |n| transfers(n)[0]),
    ("n transfers at once, to places of their own: end", TRANSFERS, Times(2.0), |n| transfers(n)[1]),
];

fn main() {
    let asked: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let quick = std::env::var_os("PINPOOL_BENCH_QUICK").is_some();
    println!("| work | few | many | times | at most |\n| --- | --- | --- | --- | --- |");
    for (name, ends, gate, work) in ROWS {
        if !asked.is_empty() && !asked.iter().any(|part| name.contains(part.as_str())) {
            continue;
        }
        // The best of three: what disturbs a run only makes it longer.
        let best = |n: usize| (n, (0..3).map(|_| work(n)).min().unwrap_or_default());
        let ends = ends.iter().copied().filter(|n| !quick || *n <= 10_000);
        let ends: Vec<(usize, Duration)> = ends.map(best).collect();
        let (small, time) = ends[0];
        let times = |(_, end): &(usize, Duration)| end.as_secs_f64() / time.as_secs_f64().max(1e-9);
        // Every end is judged, the small one and the largest are told.
        let (holds, bound) = match gate {
            Times(most) => (ends.iter().all(|end| times(end) <= *most), format!("{most:.2} times")),
            Time(most) => (ends.iter().all(|(_, time)| time <= most), format!("{most:?}")),
        };
        let last = &ends[ends.len() - 1];
        let verdict = if holds { "holds" } else { "MISSED" };
        println!(
            "| {name} | {small}: {time:.1?} | {}: {:.1?} | {:.2} | {bound}: {verdict} |",
            last.0,
            last.1,
            times(last)
        );
    }
}

// --- helpers ---------------------------------------------------------------------------------------------------------

/// A pool of so many bytes on a host device of its own, all of it there from the beginning.
fn pool(capacity: usize) -> Pool {
    let node = HostNode::new(HostConfig::new().memory(MIB)).expect("a node");
    let device = Device::on(&node, 0).expect("a device");
    let builder = Pool::builder(&device).capacity(capacity).region(capacity).extent(capacity);
    let pool = builder.unpinned(Unpinned::Allow).build().expect("a pool");
    drop(pool.checkout(capacity - 32).expect("all of it"));
    pool
}

/// The time of each of `n` calls.
fn each<T>(n: usize, call: impl FnMut(usize) -> T) -> (Duration, Vec<T>) {
    let mut out = Vec::with_capacity(n);
    let since = Instant::now();
    out.extend((0..n).map(call));
    (since.elapsed() / n.max(1) as u32, out)
}

type Waiting = Pin<Box<Checkout>>;

fn wait(pool: &Pool, request: Request) -> Waiting {
    let mut future = Box::pin(pool.checkout_async(request));
    assert!(poll(&mut future).is_none(), "there was no need to wait");
    future
}

fn poll(future: &mut Waiting) -> Option<PinnedBuf> {
    match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(buf) => Some(buf.expect("a buffer")),
        Poll::Pending => None,
    }
}

// --- waiters ---------------------------------------------------------------------------------------------------------

/// `n` requests wait for 4 KiB: another joins, a return serves one, a return serves none, one leaves.
fn waiters(n: usize) -> [Duration; 4] {
    const FEW: usize = 64;
    let pool = pool(8 * MIB);
    // Buffers of another size beside those that are waited for. Of sixteen neighbours one comes back, which gives no
    // memory to others.
    let mut other: Vec<PinnedBuf> = (0..64 * FEW).map(|_| pool.checkout(200).expect("room")).collect();
    let mut held: Vec<PinnedBuf> = std::iter::from_fn(|| pool.try_checkout(4096).ok()).collect();
    let mut waiting: Vec<Waiting> = (0..n).map(|_| wait(&pool, 4096.into())).collect();
    let (join, more) = each(FEW, |_| wait(&pool, 4096.into()));
    let (leave, _) = {
        let mut more = more.into_iter();
        each(FEW, |_| drop(more.next()))
    };
    // The waiters have pushed what belongs to these out of the processor's caches.
    other.iter().for_each(|buf| _ = std::hint::black_box(buf.capacity()));
    let (none, _) = each(4 * FEW, |at| drop(other.swap_remove(16 * (4 * FEW - 1 - at))));
    let (serve, _) = each(FEW, |_| drop(held.pop()));
    let served = waiting.iter_mut().filter_map(poll).count();
    assert!(served >= FEW.min(n), "{served}");
    [join, serve, none, leave]
}

/// Joins and leaves among `n` requests that are too large for any class to serve.
fn large_waiters(n: usize) -> [Duration; 2] {
    const FEW: usize = 64;
    let pool = pool(16 * MIB);
    let held = pool.checkout(12 * MIB).expect("room");
    let waiting: Vec<Waiting> = (0..n).map(|_| wait(&pool, (6 * MIB).into())).collect();
    let (join, more) = each(FEW, |_| wait(&pool, (6 * MIB).into()));
    let (leave, _) = {
        let mut more = more.into_iter();
        each(FEW, |_| drop(more.next()))
    };
    drop((waiting, held));
    [join, leave]
}

/// `n` requests wait, and one return serves all of them.
fn storm(n: usize) -> Duration {
    let pool = pool((n * 300).next_multiple_of(MIB) + MIB);
    let all = pool.checkout(pool.stats().capacity_bytes - 32).expect("all of it");
    let mut waiting: Vec<Waiting> = (0..n).map(|_| wait(&pool, 200.into())).collect();
    let since = Instant::now();
    drop(all);
    let time = since.elapsed() / n as u32;
    let served: Vec<PinnedBuf> = waiting.iter_mut().filter_map(poll).collect();
    assert_eq!(served.len(), n);
    time
}

// --- many buffers ----------------------------------------------------------------------------------------------------

/// `n` buffers of 4 KiB, of which every other one is returned: a return, and a failing try.
fn crowd(n: usize) -> [Duration; 2] {
    let pool = pool((n * 4160).next_multiple_of(MIB).max(16 * MIB) + 2 * MIB);
    let mut held: Vec<PinnedBuf> = std::iter::from_fn(|| pool.try_checkout(4096).ok()).collect();
    let mut at = 0;
    held.retain(|_| {
        at += 1;
        at % 2 == 0
    });
    let _ = pool.try_checkout(8 * MIB);
    let (fail, _) = each(64, |_| black_box(pool.try_checkout(8 * MIB).is_err()));
    let waiter = wait(&pool, (8 * MIB).into());
    // From the whole pool.
    let step = held.len() / 1024 + 1;
    let back: Vec<PinnedBuf> = (0..held.len() / step).rev().map(|at| held.swap_remove(at * step)).collect();
    let count = back.len();
    let mut back = back.into_iter();
    let (give, _) = each(count, |_| drop(back.next()));
    drop(waiter);
    [give, fail]
}

/// `n` buffers of 256 bytes, of which one is quarantined: a request of 1 MiB joins the queue.
fn quarantined(n: usize) -> Duration {
    let node = HostNode::new(HostConfig::new().memory(MIB).devices(2)).expect("a node");
    let devices = [0, 1].map(|index| Device::on(&node, index).expect("a device"));
    let capacity = (n * 320).next_multiple_of(MIB) + 4 * MIB;
    let builder = Pool::builder(&devices[0]).device(&devices[1]).capacity(capacity).region(capacity);
    let pool = builder.extent(capacity).unpinned(Unpinned::Allow).build().expect("a pool");
    let stream = devices[1].stream().expect("a stream");
    let lost = pool.checkout(256).expect("room");
    let _held: Vec<PinnedBuf> = std::iter::from_fn(|| pool.try_checkout(256).ok()).collect();
    node.kill(1);
    drop(stream.hold(lost));
    let since = Instant::now();
    while pool.stats().quarantined_bytes == 0 && since.elapsed() < Duration::from_secs(5) {
        pool.devices().iter().for_each(|device| _ = device.reap());
    }
    assert!(pool.stats().quarantined_bytes > 0, "nothing was quarantined");
    // Each waiter leaves again.
    let times = (0..64).map(|_| {
        let mut future = Box::pin(pool.checkout_async(MIB));
        let _ = pool.try_checkout(MIB);
        let since = Instant::now();
        assert!(poll(&mut future).is_none());
        since.elapsed()
    });
    times.min().unwrap_or_default()
}

// --- beside a large request ------------------------------------------------------------------------------------------

/// A thousand pairs of checkout and return of each length, of which `which` is given, without a request that waits and
/// with one for 5 MiB that waits for ever. Every other MiB of the pool is held: the request's window has free segments of
/// 1 MiB, and some that are out.
fn beside(lens: [usize; 2], which: usize) -> [Duration; 2] {
    // Both ends by turns, once: they take microseconds, and a processor's clock changes.
    static ALL: std::sync::OnceLock<[[Duration; 2]; 2]> = std::sync::OnceLock::new();
    let measure = |len: usize| {
        let pools = [pool(24 * MIB), pool(24 * MIB)];
        let _held = pools.each_ref().map(|pool| {
            let all: Vec<_> = (0..24).map_while(|_| pool.try_checkout(MIB - 32).ok()).collect();
            all.into_iter().step_by(2).collect::<Vec<_>>()
        });
        pools.iter().for_each(|pool| drop(pool.checkout(len).expect("room")));
        let _waiting = wait(&pools[1], (5 * MIB).into());
        let run = |pool: &Pool, n: usize| {
            let since = Instant::now();
            for _ in 0..n {
                drop(black_box(pool.checkout(len).expect("room")));
            }
            since.elapsed() / (n / 1000) as u32
        };
        pools.iter().for_each(|pool| _ = run(pool, 100_000));
        let mut best = [Duration::MAX; 2];
        // Short, so that some are not disturbed.
        for _ in 0..50 {
            for (pool, best) in pools.iter().zip(&mut best) {
                *best = run(pool, 50_000).min(*best);
            }
        }
        best
    };
    ALL.get_or_init(|| lens.map(measure))[which]
}

/// How long a request of 4 MiB waits in a pool that `threads` threads keep full of small buffers, each held for up to
/// 5 ms.
fn under_load(threads: usize) -> Duration {
    let pool = pool(16 * MIB);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let relaxed = std::sync::atomic::Ordering::Relaxed;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (pool, stop) = (&pool, &stop);
            scope.spawn(move || {
                let len = [1000, 4096, 16_000, 60_000][thread % 4];
                let mut held = std::collections::VecDeque::new();
                while !stop.load(relaxed) {
                    while held.front().is_some_and(|(since, _): &(Instant, PinnedBuf)| {
                        since.elapsed() > Duration::from_millis(5)
                    }) {
                        held.pop_front();
                    }
                    match pool.try_checkout(len) {
                        Ok(buf) => held.push_back((Instant::now(), buf)),
                        Err(_) => std::thread::sleep(Duration::from_micros(200)),
                    }
                }
            });
        }
        std::thread::sleep(Duration::from_millis(50));
        let times = (0..20).map(|_| {
            // The small ones take again what the last one left.
            std::thread::sleep(Duration::from_millis(20));
            let since = Instant::now();
            drop(pool.checkout_timeout(4 * MIB, Duration::from_secs(20)).expect("it is served"));
            since.elapsed()
        });
        let mut times: Vec<Duration> = times.collect();
        stop.store(true, relaxed);
        times.sort_unstable();
        times[times.len() / 2]
    })
}

// --- transfers -------------------------------------------------------------------------------------------------------

/// `n` transfers of 4 KiB are started while the device hangs, and end when it goes on.
fn transfers(n: usize) -> [Duration; 2] {
    const LEN: usize = 4096;
    let node = HostNode::new(HostConfig::new().memory(64 * MIB)).expect("a node");
    let device = Device::on(&node, 0).expect("a device");
    let capacity = 128 * MIB;
    let builder = Pool::builder(&device).capacity(capacity).region(capacity).initial(capacity);
    let pool = builder.unpinned(Unpinned::Allow).build().expect("a pool");
    let copier = Copier::builder(&pool, &device).threads(2).build().expect("a copier");
    let memory = device.alloc(n * LEN).expect("device memory");
    let place = |i: usize| memory.slice(i * LEN..(i + 1) * LEN).expect("within");
    let bytes = Arc::new(vec![7; LEN]);
    let upload = |i: usize| copier.upload(bytes.clone(), place(i)).expect("it starts");
    // The threads start with the first one.
    upload(0).wait().expect("it ends");
    node.hang(0);
    let (start, sent) = each(n, upload);
    node.resume(0);
    let mut sent = sent.into_iter();
    let (end, _) = each(n, |_| sent.next().map(|sent| sent.wait().expect("it ends")));
    [start, end]
}
