//! Single operations by the clock: the time of the slowest of a hundred and of ten thousand, alone and while the pool
//! works on other things.
//!
//! Alone, all operations are hits: the thread's own cache serves both the checkout and the return. Beside `growing`, a
//! thread copies on the host device, so that the reaper has copies to complete, and takes large buffers for which the
//! pool has to grow. Beside `emptied` that thread also trims the pool each time: every thread's cache is then emptied
//! again and again, and the operations are hits and misses together.
//!
//! Two rows show the time that no pool can avoid: `clock` reads the clock twice, and `two_fetch_adds` makes two
//! increments in between, with the same work beside it as `growing`. Their times above the median are the machine's:
//! interrupts, and threads that lose their core to other programs.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use crossbeam::utils::CachePadded;
use pinpool::{Device, Pool, Unpinned};

use super::stores::{PLAIN, checkout};

/// The times of all operations of all threads, in ns, the shortest first.
fn times(threads: usize, iters: usize, operation: impl Fn() + Sync, beside: &(dyn Fn() + Sync)) -> Vec<u32> {
    let (barrier, done) = (Barrier::new(threads), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Relaxed: ends a loop.
            while !done.load(Ordering::Relaxed) {
                beside();
            }
        });
        let work = || {
            // Written here, so that no page fault comes while the clock runs.
            let mut times = vec![1; iters];
            (0..1000).for_each(|_| operation());
            barrier.wait();
            for time in &mut times {
                let since = Instant::now();
                operation();
                *time = since.elapsed().as_nanos() as u32;
            }
            times
        };
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let mut all: Vec<u32> =
            running.into_iter().flat_map(|thread| thread.join().expect("no thread panics")).collect();
        done.store(true, Ordering::Relaxed);
        all.sort_unstable();
        all
    })
}

pub fn table(threads: usize, quick: bool) {
    let iters = if quick { 20_000 } else { 2_000_000 };
    let device = Device::open("host").expect("the host device is always there");
    const INITIAL: usize = 256 << 20;
    let pool = Pool::builder(&device).capacity(2 << 30).initial(INITIAL).region(64 << 20);
    let pool = pool.unpinned(Unpinned::Allow).build().expect("memory for a pool");
    pool.wait_pinned(None).expect("pinning ends");
    let stream = device.stream().expect("a stream");
    let memory = device.alloc(1 << 20).expect("memory");
    thread_local! {
        static WORD: CachePadded<AtomicU64> = const { CachePadded::new(AtomicU64::new(0)) };
    }
    let clock = || {
        black_box(0);
    };
    let adds = || {
        WORD.with(|word| {
            word.fetch_add(1, Ordering::Relaxed);
            word.fetch_add(1, Ordering::Relaxed);
        });
    };
    let pair = || {
        drop(checkout(&pool, black_box(PLAIN[0])));
    };
    let idle = || std::thread::sleep(Duration::from_millis(1));
    let copies = || {
        for _ in 0..64 {
            let mut buf = pool.checkout(64 << 10).expect("the pool is large enough");
            buf.try_resize(4096, 1).expect("it fits");
            drop(stream.upload(buf, memory.slice(..4096)).expect("the device takes it"));
        }
    };
    // The buffers are kept, so that the next request makes the pool grow.
    let kept = Mutex::new(Vec::new());
    let growing = || {
        copies();
        kept.lock().expect("no thread panics").extend(pool.try_checkout(48 << 20));
        std::thread::sleep(Duration::from_millis(1));
    };
    let emptied = || {
        copies();
        pool.trim(INITIAL);
    };
    println!("\ntails: {threads} threads, {iters} operations each; ns, reading the clock included");
    println!(
        "{:>8} {:<18} {:>6} {:>6} {:>8} {:>10} {:>8}",
        "threads", "operation", "50%", "99%", "99.99%", "longest", "> 1 us"
    );
    type Run<'a> = &'a (dyn Fn() + Sync);
    let cases: [(&str, Run<'_>, Run<'_>); 6] = [
        ("clock", &clock, &idle),
        ("two_fetch_adds", &adds, &idle),
        ("adds_growing", &adds, &growing),
        ("pinpool", &pair, &idle),
        ("growing", &pair, &growing),
        ("emptied", &pair, &emptied),
    ];
    for (name, operation, beside) in cases {
        let times = times(threads, iters, operation, beside);
        kept.lock().expect("no thread panics").clear();
        pool.trim(INITIAL);
        let at = |quantile: f64| times[((times.len() as f64 * quantile) as usize).min(times.len() - 1)];
        let slow = times.iter().filter(|ns| **ns > 1000).count();
        println!(
            "{threads:>8} {name:<18} {:>6} {:>6} {:>8} {:>10} {slow:>8}",
            at(0.5),
            at(0.99),
            at(0.9999),
            at(1.0)
        );
        for (quantile, label) in [(0.5, "50"), (0.99, "99"), (0.9999, "9999")] {
            println!("@ tails_{name}_{label} {threads} {}.0 0.0 0.0", at(quantile));
        }
    }
}
