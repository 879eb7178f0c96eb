//! The time from the return of a segment until the thread that waits for it has the buffer.
//!
//! One thread waits, another returns the pool's only segment; the clock runs from just before the return until the
//! waiting thread has the buffer. Beside it the same exchange with a mutex and a condition variable. The giver returns
//! the segment only when the waiter waits and has had time to fall asleep.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pinpool::Pool;

use super::Contender;
use super::stores::pool;

/// The time from `give` to the end of `wait`, which take turns: `wait` calls its function as soon as the wait is over, and
/// `give` waits until the waiter waits, calls its function, and then gives.
fn hand_over(iters: u64, wait: impl Fn(&dyn Fn()) + Send, give: impl Fn(&dyn Fn())) -> Duration {
    let (start, given, sum) = (Instant::now(), AtomicU64::new(0), AtomicU64::new(0));
    let now = || start.elapsed().as_nanos() as u64;
    std::thread::scope(|scope| {
        // Relaxed: the exchange itself orders the store before the load.
        let over = || _ = sum.fetch_add(now() - given.load(Ordering::Relaxed), Ordering::Relaxed);
        scope.spawn(move || (0..iters).for_each(|_| wait(&over)));
        (0..iters).for_each(|_| give(&|| given.store(now(), Ordering::Relaxed)));
    });
    Duration::from_nanos(sum.load(Ordering::Relaxed))
}

/// Long enough for the waiter to fall asleep.
fn pause() {
    std::thread::sleep(Duration::from_micros(50));
}

/// By a pool with one segment.
fn by_pool(pool: &Pool, iters: u64) -> Duration {
    const LEN: usize = 60 << 10;
    let wait = |over: &dyn Fn()| {
        // The giver has it first.
        while pool.stats().checked_out_bytes == 0 {
            std::thread::yield_now();
        }
        let buf = pool.checkout(LEN).expect("comes back");
        over();
        drop(buf);
    };
    let give = |gives: &dyn Fn()| {
        let buf = loop {
            match pool.try_checkout(LEN) {
                Ok(buf) => break buf,
                Err(_) => std::thread::yield_now(),
            }
        };
        while pool.stats().waiting == 0 {
            std::thread::yield_now();
        }
        pause();
        gives();
        drop(buf);
    };
    hand_over(iters, wait, give)
}

/// By two flags: a thread waits; it was given what it waits for.
fn by_flags(iters: u64) -> Duration {
    let (state, changed) = (Mutex::new((false, false)), Condvar::new());
    let wait = |over: &dyn Fn()| {
        let mut state = state.lock();
        state.0 = true;
        while !state.1 {
            changed.wait(&mut state);
        }
        *state = (false, false);
        over();
    };
    let give = |gives: &dyn Fn()| {
        while !matches!(*state.lock(), (true, false)) {
            std::thread::yield_now();
        }
        pause();
        gives();
        state.lock().1 = true;
        changed.notify_one();
    };
    hand_over(iters, wait, give)
}

pub fn contenders() -> Vec<Contender> {
    let one = pool(64 << 10);
    vec![
        Contender::new("mutex_and_condvar", |_, iters| by_flags(iters)),
        Contender::new("pinpool", move |_, iters| by_pool(&one, iters)),
    ]
}
