//! Processes that end in the middle: nothing crashes and nothing hangs, whatever is under way.

use std::time::Duration;

use pinpool::Pool;

use super::{Gpu, doubles, open};
use crate::support::exits::{self, WAYS, Way};

/// How soon a child is to end that a test has started.
const EXIT: &str = "PINPOOL_HARDWARE_EXIT";
const TIMES: u64 = 20;
const LIMIT: Duration = Duration::from_secs(120);

/// A child ends as `main` would at its end, and not at the same place each time.
pub fn growing(gpu: &Gpu) {
    const TEST: &str = "a_process_may_end_while_the_pool_grows";
    let Ok(number) = std::env::var(EXIT) else {
        for number in 0..TIMES {
            let child = doubles::child(TEST, &[(EXIT, &number.to_string())], LIMIT);
            let ended = child.status.is_some_and(|status| status.success());
            let meant = child.stdout.contains("ending now") && !child.stderr.contains("panicked");
            assert!(ended && meant, "{TEST}: run {number} {}: {}", child.how(), child.last_words());
        }
        return;
    };
    let number: u64 = number.parse().expect("a number");
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
    std::thread::sleep(Duration::from_micros(number * 1000 + number * number * 25));
    println!("ending now, {} bytes are pinned", pool.stats().pinned_bytes);
    // The harness's own end would wait for the test.
    std::process::exit(0)
}

/// In each way in which a program can end: `tests/support/exits.rs` says how often and under which command.
/// (`kept` has three of them on the simulated driver.)
pub fn ways(gpu: &Gpu) {
    let in_kept = [Way::ReturnBusy, Way::ExitElsewhere, Way::Fork];
    let ways: Vec<Way> = WAYS.into_iter().filter(|way| gpu.real || !in_kept.contains(way)).collect();
    exits::all("a_process_may_end_in_every_way", "cuda:0", &ways, &[]);
}
