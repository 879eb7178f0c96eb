//! What must not grow with the number of threads that have ended, of pools, sizes and streams. Times are the bench
//! `streams`'s; here is what can be counted.

use std::sync::Barrier;

use pinpool::telemetry::ClassStats;

use super::*;
use crate::threads::all_idle;

/// The thread caches of most ended threads leave their pool, and what they had counted stays.
#[test]
fn what_ended_threads_have_counted_stays() {
    const THREADS: u64 = 100;
    let pool = pool(&host().1, 64 << 20);
    let all = Barrier::new(THREADS as usize);
    let kept: Vec<_> = std::thread::scope(|scope| {
        let (pool, all) = (&pool, &all);
        let work = move |n| {
            for len in [100, 3000, 100] {
                drop(pool.checkout(len).unwrap());
            }
            let kept = pool.checkout(2000 + n as usize).unwrap();
            // So that no thread gets the cache of one that has ended.
            all.wait();
            kept
        };
        let threads: Vec<_> = (0..THREADS).map(|n| scope.spawn(move || work(n))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let stats = checked(&pool);
    assert_eq!((stats.checkouts, stats.returns), (4 * THREADS, 3 * THREADS));
    assert_eq!(stats.requested_bytes as u64, (0..THREADS).map(|n| 2000 + n).sum::<u64>());
    let classes = pool.snapshot().classes;
    let sum = |of: fn(&ClassStats) -> u64| classes.iter().map(of).sum::<u64>();
    assert_eq!((sum(|c| c.checkouts), sum(|c| c.returns)), (4 * THREADS, 3 * THREADS));
    assert_eq!(classes.iter().map(|c| c.out_bytes).sum::<usize>(), stats.checked_out_bytes);
    drop(kept);
    all_idle(&pool, &[]);
}

/// A thread finds the cache of the pool that it used last at once. With others it takes a longer way, but its own cache
/// serves all the same, and what is returned goes to the pool that it is of.
#[test]
fn more_pools_than_a_thread_has_at_hand_serve_it_from_its_caches() {
    let device = host().1;
    let pools: Vec<Pool> = (0..9).map(|_| pool(&device, 1 << 20)).collect();
    let round = || {
        let mut held: Vec<_> = pools.iter().map(|pool| filled(pool, 1000, 1)).collect();
        while !held.is_empty() {
            drop(held.swap_remove(held.len() * 3 / 7));
        }
    };
    (0..3).for_each(|_| round());
    let misses = || pools.iter().map(|pool| pool.stats().misses).collect::<Vec<_>>();
    let before = misses();
    (0..100).for_each(|_| round());
    assert_eq!(misses(), before);
    for pool in &pools {
        all_idle(pool, &[]);
        drop(pool.try_checkout(700 << 10).unwrap());
    }
}
