//! A checkout and a return on one thread, one at a time or with many buffers out.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use super::Contender;
use super::measure::small::Random;
use super::stores::{Bare, LIVE, MIXED, Malloc, PLAIN, Pinpool, Stacks, Store, TwoFetchAdds, pool};

/// The pattern of each thread's operations.
#[derive(Clone, Copy)]
pub enum Work {
    /// Check out, return.
    Pair,
    /// Replace one of [`LIVE`] buffers.
    Live,
}

/// One thread's operations: `warm` of them, the barrier, and `iters` on the clock.
pub fn turn<S: Store>(
    store: &S,
    work: Work,
    sizes: usize,
    seed: u64,
    iters: u64,
    barrier: &Barrier,
) -> Duration {
    let mut local = store.local();
    let warm = 1000;
    match work {
        Work::Pair => {
            let mut run = |n: u64| {
                for _ in 0..n {
                    let buf = store.take(&mut local, black_box(0));
                    store.give(&mut local, buf);
                }
            };
            run(warm);
            barrier.wait();
            let since = Instant::now();
            run(iters);
            since.elapsed()
        }
        Work::Live => {
            let mut random = Random(0x9E37_79B9_7F4A_7C15 ^ (seed << 32 | 1));
            let steps: Vec<(usize, usize)> =
                (0..1 << 14).map(|_| (random.below(LIVE), random.below(sizes))).collect();
            let mut live: Vec<S::Buf> =
                (0..LIVE).map(|_| store.take(&mut local, random.below(sizes))).collect();
            let mut steps = steps.iter().cycle();
            let mut run = |n: u64| {
                for _ in 0..n {
                    let Some(&(at, size)) = steps.next() else { return };
                    // The place is found first. If code that can panic came in between, the new buffer would have to be
                    // in memory for unwinding, written in words and then read in wider pieces, and the processor would
                    // wait for that longer than for all the rest.
                    let place = &mut live[at];
                    let old = std::mem::replace(place, store.take(&mut local, size));
                    store.give(&mut local, old);
                }
            };
            run(warm * 20);
            barrier.wait();
            let since = Instant::now();
            run(iters);
            let taken = since.elapsed();
            live.drain(..).for_each(|buf| store.give(&mut local, buf));
            taken
        }
    }
}

/// The mean over the threads of the wall time that `iters` operations took.
pub fn measure<S: Store>(store: &S, work: Work, sizes: usize, threads: usize, iters: u64) -> Duration {
    let barrier = Barrier::new(threads);
    let sum: Duration = std::thread::scope(|scope| {
        let start = |n| {
            let barrier = &barrier;
            scope.spawn(move || turn(store, work, sizes, n as u64, iters, barrier))
        };
        let running: Vec<_> = (0..threads).map(start).collect();
        running.into_iter().map(|t| t.join().expect("no thread panics")).sum()
    });
    sum / threads as u32
}

/// A contender: a store under a pattern, with `sizes` sizes.
pub fn entry<S: Store + 'static>(name: &'static str, store: S, work: Work, sizes: usize) -> Contender {
    Contender::new(name, move |threads, iters| measure(&store, work, sizes, threads, iters))
}

pub fn contenders(work: Work, most_threads: usize) -> Vec<Contender> {
    let (sizes, each) = match work {
        Work::Pair => (PLAIN, 4),
        Work::Live => (MIXED, LIVE + 2),
    };
    let n = sizes.len();
    // Some gigabytes, as in a server: a thread cache may then hold 64 segments of each size here.
    let pool = pool(2 << 30);
    vec![
        entry("two_fetch_adds", TwoFetchAdds, work, n),
        entry("pinpool", Pinpool::new(pool, sizes), work, n),
        entry("bare_stack", Bare { sizes, each }, work, n),
        entry("parking_lot_vec", Stacks::new(sizes, most_threads * each), work, n),
        entry("glibc", Malloc { sizes }, work, n),
    ]
}
