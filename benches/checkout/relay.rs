//! A return on another thread than the checkout.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use crossbeam::queue::ArrayQueue;
use crossbeam::utils::Backoff;

use super::Contender;
use super::stores::{PLAIN, pool, touch};

/// From one thread to another through a queue: `make` on this thread, drop on the other.
pub fn relay<T: Send>(iters: u64, room: usize, mut make: impl FnMut() -> T) -> Duration {
    let queue = ArrayQueue::new(room);
    let barrier = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            barrier.wait();
            let backoff = Backoff::new();
            let mut left = iters;
            while left > 0 {
                match queue.pop() {
                    Some(item) => {
                        drop::<T>(item);
                        left -= 1;
                        backoff.reset();
                    }
                    None => backoff.snooze(),
                }
            }
            barrier.wait();
        });
        barrier.wait();
        let since = Instant::now();
        let backoff = Backoff::new();
        for _ in 0..iters {
            let mut item = make();
            while let Err(back) = queue.push(item) {
                item = back;
                backoff.snooze();
            }
            backoff.reset();
        }
        barrier.wait();
        since.elapsed()
    })
}

pub fn contenders() -> Vec<Contender> {
    /// Buffers that change threads together.
    const TOGETHER: u64 = 64;
    // So large that a thread may keep as many as are on the way.
    let pool = pool(1 << 30);
    let checkout = |pool: &pinpool::Pool| {
        let mut buf = pool.checkout(black_box(PLAIN[0])).expect("the pool is large enough");
        // SAFETY: just checked out, and no size is 0.
        unsafe { touch(buf.as_mut_ptr()) };
        buf
    };
    let (one, many, here) = (pool.clone(), pool.clone(), pool);
    let same_thread = move |_: usize, iters: u64| {
        let since = Instant::now();
        for _ in 0..iters {
            drop(checkout(&here));
        }
        since.elapsed()
    };
    // For whole numbers of batches, scaled to what was asked for.
    let batches = |iters: u64, time: &dyn Fn(u64) -> Duration| {
        let n = iters.div_ceil(TOGETHER);
        time(n).mul_f64(iters as f64 / (n * TOGETHER) as f64)
    };
    let tokens = move |_: usize, iters| {
        batches(iters, &|n| relay(n, 4, || (0..TOGETHER as usize).map(black_box).collect::<Vec<_>>()))
    };
    let together = move |_: usize, iters| {
        batches(iters, &|n| relay(n, 4, || (0..TOGETHER).map(|_| checkout(&many)).collect::<Vec<_>>()))
    };
    vec![
        Contender::new("bare_token", |_, iters| relay(iters, 256, || black_box(1usize))),
        Contender::new("pinpool", move |_, iters| relay(iters, 256, || checkout(&one))),
        Contender::new("bare_tokens_64", tokens),
        Contender::new("pinpool_64", together),
        Contender::new("same_thread", same_thread),
    ]
}
