//! Single hits by the clock: what the slowest of a hundred and of ten thousand take, alone and while the pool is busy with
//! other things.
//!
//! `clock` is what reading the clock twice takes, all of the machine's interruptions included. Beside `growing`, a thread
//! copies on the host device, so that there is something to reap, and now and then takes a buffer for which the pool has to
//! grow. Beside `emptied` it has the pool trimmed each time as well: then every thread's cache is taken back again and again,
//! and these are misses as often as hits.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use pinpool::{Device, Pool, Unpinned};

use super::stores::PLAIN;

/// Nanoseconds of each operation of all threads, sorted.
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
            let mut times = Vec::with_capacity(iters);
            (0..1000).for_each(|_| operation());
            barrier.wait();
            for _ in 0..iters {
                let since = Instant::now();
                operation();
                times.push(since.elapsed().as_nanos() as u32);
            }
            times
        };
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let mut all: Vec<u32> =
            running.into_iter().flat_map(|t| t.join().expect("no thread panics")).collect();
        done.store(true, Ordering::Relaxed);
        all.sort_unstable();
        all
    })
}

pub fn table(threads: usize, quick: bool) {
    let iters = if quick { 20_000 } else { 400_000 };
    let device = Device::open("host").expect("the host device is always there");
    let pool = Pool::builder(&device).capacity(2 << 30).initial(256 << 20).region(64 << 20);
    let pool = pool.unpinned(Unpinned::Allow).build().expect("memory for a pool");
    pool.wait_pinned(None).expect("pinning ends");
    let stream = device.stream().expect("a stream");
    let memory = device.alloc(1 << 20).expect("memory");
    let hit = || {
        let mut buf = pool.checkout(black_box(PLAIN[0])).expect("the pool is large enough");
        // SAFETY: just checked out.
        unsafe { super::stores::touch(buf.as_mut_ptr()) };
    };
    let idle = || std::thread::sleep(std::time::Duration::from_millis(1));
    let copies = || {
        for _ in 0..64 {
            let mut buf = pool.checkout(64 << 10).expect("the pool is large enough");
            buf.try_resize(4096, 1).expect("it fits");
            drop(stream.upload(buf, memory.slice(..4096)).expect("the device takes it"));
        }
    };
    // Kept, so that the next needs more.
    let kept = std::sync::Mutex::new(Vec::new());
    let growing = || {
        copies();
        kept.lock().expect("nobody panics").extend(pool.try_checkout(48 << 20));
        std::thread::sleep(std::time::Duration::from_millis(1));
    };
    let emptied = || {
        copies();
        kept.lock().expect("nobody panics").clear();
        pool.trim(256 << 20);
    };
    println!("\ntails: {threads} threads, {iters} operations each; ns, reading the clock included");
    println!("{:>8} {:<12} {:>8} {:>8} {:>8} {:>10}", "threads", "", "50%", "99%", "99.99%", "longest");
    let clock = || {
        black_box(0);
    };
    let cases: [(&str, &(dyn Fn() + Sync), &(dyn Fn() + Sync)); 4] = [
        ("clock", &clock, &idle),
        ("pinpool", &hit, &idle),
        ("growing", &hit, &growing),
        ("emptied", &hit, &emptied),
    ];
    for (name, operation, beside) in cases {
        let times = times(threads, iters, operation, beside);
        let at = |q: f64| times[((times.len() - 1) as f64 * q) as usize];
        println!("{threads:>8} {name:<12} {:>8} {:>8} {:>8} {:>10}", at(0.5), at(0.99), at(0.9999), at(1.0));
        for (quantile, label) in [(0.5, "50"), (0.99, "99"), (0.9999, "9999")] {
            println!("@ tails_{name}_{label} {threads} {}.0 0.0 0.0", at(quantile));
        }
    }
}
