//! A segment that comes back to a thread that waits for it: how long until that thread has it.
//!
//! Two threads share what there is one of, and each asks for it again as soon as it has given it back. The pool serves first
//! come, first served, so whoever waits is next; the mutex and the condition variable do the same by whose turn it is. An
//! operation is one hand-over.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::Contender;
use super::stores::pool;

/// Two threads run this with their number; the time both took.
fn two(work: impl Fn(usize) + Sync) -> Duration {
    let barrier = Barrier::new(2);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            barrier.wait();
            work(1);
        });
        barrier.wait();
        let since = Instant::now();
        work(0);
        other.join().expect("no thread panics");
        since.elapsed()
    })
}

pub fn contenders() -> Vec<Contender> {
    // Room for one segment.
    let pool = pool(64 << 10);
    let condvar = |_: usize, iters: u64| {
        let (turn, changed) = (Mutex::new(0usize), Condvar::new());
        two(|me| {
            for _ in 0..iters / 2 {
                let mut turn = turn.lock();
                while *turn != me {
                    changed.wait(&mut turn);
                }
                *turn = 1 - me;
                changed.notify_one();
            }
        })
    };
    // Whoever gives it back finds the other waiting, but for the first few times: it asks again while that one wakes.
    let hand_over = move |_: usize, iters: u64| {
        two(|_| {
            for _ in 0..iters / 2 {
                drop(pool.checkout(60 << 10).expect("comes back"));
            }
        })
    };
    vec![Contender::new("mutex_and_condvar", condvar), Contender::new("pinpool", hand_over)]
}
