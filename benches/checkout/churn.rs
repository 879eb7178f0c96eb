//! A pool after many checkouts and returns in random order, beside a new pool.

use std::hint::black_box;
use std::time::Instant;

use pinpool::{PinnedBuf, Pool};

use super::Contender;
use super::measure::small::Random;
use super::stores::{checkout, pool};

/// Pairs and bursts on the new pool and on the churned one, on the measuring thread.
pub fn churned() -> Vec<Contender> {
    const SEGMENTS: usize = 65_536;
    const LEN: usize = 4096;
    /// More than a thread cache holds of one class.
    const BURST: usize = 256;
    let capacity = SEGMENTS * (LEN + 64) * 9 / 8;
    let fresh = pool(capacity);
    let worn = pool(capacity);
    let mut random = Random(7);
    let mut live: Vec<PinnedBuf> =
        (0..SEGMENTS).map(|_| worn.checkout(LEN).expect("the pool is large enough")).collect();
    for _ in 0..SEGMENTS / 2 {
        let at = random.below(live.len());
        drop(live.swap_remove(at));
    }
    let pair = |pool: &Pool, iters: u64| {
        let since = Instant::now();
        for _ in 0..iters {
            drop(checkout(pool, black_box(LEN)));
        }
        since.elapsed()
    };
    let burst = |pool: &Pool, iters: u64| {
        let mut held = Vec::with_capacity(BURST);
        let since = Instant::now();
        for _ in 0..iters.div_ceil(BURST as u64) {
            for _ in 0..BURST {
                held.push(checkout(pool, black_box(LEN)));
            }
            held.clear();
        }
        since.elapsed().mul_f64(iters as f64 / iters.next_multiple_of(BURST as u64) as f64)
    };
    let (fresh2, worn2) = (fresh.clone(), worn.clone());
    // The contender owns the live half of the segments, so they stay out as long as it is measured.
    let worn_pair = move |_: usize, iters| {
        black_box(&live);
        pair(&worn, iters)
    };
    vec![
        Contender::new("empty", move |_, iters| pair(&fresh, iters)),
        Contender::new("churned", worn_pair),
        Contender::new("empty_bursts", move |_, iters| burst(&fresh2, iters)),
        Contender::new("churned_bursts", move |_, iters| burst(&worn2, iters)),
    ]
}
