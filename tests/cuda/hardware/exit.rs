//! Processes that end in the middle: nothing crashes and nothing hangs, whatever is under way.
//!
//! Each test starts itself again, twenty times, with `PINPOOL_HARDWARE_EXIT` saying how soon to end. The ways in which a
//! program can end are those of `tests/support/exits.rs`, which says how often and under which command they are tried.

use std::time::Duration;

use pinpool::Pool;

use super::{Gpu, doubles, open};
use crate::support::exits::{self, Way};

const EXIT: &str = "PINPOOL_HARDWARE_EXIT";
const TIMES: u64 = 20;
const LIMIT: Duration = Duration::from_secs(120);

/// Starts this test again and again; in such a child, returns the number of the run.
fn again(test: &str) -> Option<u64> {
    if let Ok(number) = std::env::var(EXIT) {
        return Some(number.parse().expect("a number"));
    }
    for number in 0..TIMES {
        let text = number.to_string();
        let child = doubles::child(test, &[(EXIT, &text)], LIMIT);
        let meant = child.stdout.contains("ending now");
        assert!(
            child.status.is_some_and(|status| status.success()) && meant,
            "{test}: run {number} {}, {}: {}",
            child.how(),
            if meant { "ending as it was meant to" } else { "before it was meant to" },
            child.last_words()
        );
        assert!(!child.stderr.contains("panicked"), "{test}: run {number}: {}", child.last_words());
    }
    println!("{test}: {TIMES} processes ended, each with 0");
    None
}

/// Ends the process as `main` would at its end, and not at the same place each time.
fn end(number: u64) -> ! {
    std::thread::sleep(Duration::from_micros(number * number * 25));
    println!("ending now");
    // The harness's own end would wait for the test.
    std::process::exit(0)
}

pub fn growing(gpu: &Gpu) {
    let Some(number) = again("a_process_may_end_while_the_pool_grows") else { return };
    let capacity = if gpu.real { 4 << 30 } else { 256 << 20 };
    let device = open(0);
    let built = Pool::builder(&device).capacity(capacity).initial(16 << 20).region(capacity / 4);
    let pool = built.extent(capacity / 16).build().expect("a pool");
    // One more than there is room for, from several threads: the pool grows, and a thread waits.
    for _ in 0..4 {
        let pool = pool.clone();
        std::thread::spawn(move || {
            let held: Vec<_> = (0..64).map(|_| pool.checkout_timeout(capacity / 128, LIMIT)).collect();
            drop(held);
        });
    }
    // What is pinned by then differs from run to run, which is the point.
    std::thread::sleep(Duration::from_millis(number));
    println!("{} bytes are pinned", pool.stats().pinned_bytes);
    end(number)
}

/// The ways in which a program can end, each of which is tried by a test of its own.
pub fn way(test: &str, way: Way) {
    exits::all(test, "cuda:0", &[way], &[]);
}
