//! A checkout and a return with a stream in between: a hold keeps the buffer until the stream's work so far is
//! complete, and then the buffer returns by itself.
//!
//! On the GPU `cuda:0`; without one the group is left out. Each thread has a stream of its own without any other work,
//! so the figure is the cost of the bookkeeping, not of a copy.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use pinpool::{Device, Pool};

use super::Contender;
use super::measure::small;
use super::stores::{PLAIN, checkout};

fn held(device: &Device, pool: &Pool, threads: usize, iters: u64) -> Duration {
    let barrier = Barrier::new(threads);
    let sum: Duration = std::thread::scope(|scope| {
        let work = || {
            let stream = device.stream().expect("a stream");
            let run = |n: u64| {
                for _ in 0..n {
                    drop(stream.hold(checkout(pool, PLAIN[0])).expect("the device is there"));
                }
            };
            run(1000);
            barrier.wait();
            let since = Instant::now();
            run(iters);
            let taken = since.elapsed();
            stream.synchronize().expect("the device is there");
            taken
        };
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        running.into_iter().map(|t| t.join().expect("no thread panics")).sum()
    });
    sum / threads as u32
}

pub fn contenders() -> Vec<Contender> {
    let Ok(device) = Device::open("cuda:0") else { return Vec::new() };
    let pool = small::pool(&device, 2 << 30);
    vec![Contender::new("pinpool_held", move |threads, iters| held(&device, &pool, threads, iters))]
}
