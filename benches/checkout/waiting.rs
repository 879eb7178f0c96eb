//! The time from the return of a segment until the thread that waits for it has the buffer.
//!
//! One thread waits, another returns the pool's only segment; the clock runs from just before the return until the
//! waiting thread has the buffer. Beside it the same exchange with a mutex and a condition variable. The giver returns
//! the segment only when the waiter waits and has had time to fall asleep.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pinpool::{PinnedBuf, Pool};

use super::Contender;
use super::stores::pool;

/// An exchange between a waiter and a giver, which take turns.
trait Exchange: Sync {
    /// Waits, and calls `now` as soon as the wait is over.
    fn wait(&self, now: impl FnOnce());
    /// Waits until the waiter waits, calls `now`, and then gives.
    fn give(&self, now: impl FnOnce());
}

fn hand_over(exchange: &impl Exchange, iters: u64) -> Duration {
    let (start, given, sum) = (Instant::now(), AtomicU64::new(0), AtomicU64::new(0));
    let now = || start.elapsed().as_nanos() as u64;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..iters {
                // Relaxed: the exchange itself orders the store before the load.
                exchange.wait(|| {
                    sum.fetch_add(now() - given.load(Ordering::Relaxed), Ordering::Relaxed);
                });
            }
        });
        for _ in 0..iters {
            exchange.give(|| given.store(now(), Ordering::Relaxed));
        }
    });
    Duration::from_nanos(sum.load(Ordering::Relaxed))
}

/// Long enough for the waiter to fall asleep.
fn pause() {
    std::thread::sleep(Duration::from_micros(50));
}

/// A pool with one segment.
struct One(Pool);

impl One {
    fn only(&self) -> PinnedBuf {
        loop {
            match self.0.try_checkout(60 << 10) {
                Ok(buf) => return buf,
                Err(_) => std::thread::yield_now(),
            }
        }
    }
}

impl Exchange for One {
    fn wait(&self, now: impl FnOnce()) {
        // The giver has it first.
        while self.0.stats().checked_out_bytes == 0 {
            std::thread::yield_now();
        }
        let buf = self.0.checkout(60 << 10).expect("comes back");
        now();
        drop(buf);
    }
    fn give(&self, now: impl FnOnce()) {
        let buf = self.only();
        while self.0.stats().waiting == 0 {
            std::thread::yield_now();
        }
        pause();
        now();
        drop(buf);
    }
}

/// Two flags: a thread waits; it was given what it waits for.
#[derive(Default)]
struct Flags {
    state: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl Exchange for Flags {
    fn wait(&self, now: impl FnOnce()) {
        let mut state = self.state.lock();
        state.0 = true;
        while !state.1 {
            self.changed.wait(&mut state);
        }
        *state = (false, false);
        now();
    }
    fn give(&self, now: impl FnOnce()) {
        while !matches!(*self.state.lock(), (true, false)) {
            std::thread::yield_now();
        }
        pause();
        now();
        self.state.lock().1 = true;
        self.changed.notify_one();
    }
}

pub fn contenders() -> Vec<Contender> {
    let (flags, one) = (Flags::default(), One(pool(64 << 10)));
    vec![
        Contender::new("mutex_and_condvar", move |_, iters| hand_over(&flags, iters)),
        Contender::new("pinpool", move |_, iters| hand_over(&one, iters)),
    ]
}
