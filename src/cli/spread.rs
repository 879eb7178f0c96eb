//! Spreading work over threads.
//!
//! Each thread takes the next number, in order and one at a time, so a faster thread takes more of them. After the
//! first failure no thread takes another number. The calls that have begun run to their ends, so of several failures
//! the one with the lowest number is reported.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Calls `work` once for each number below `count`, on up to `threads` threads, of which the caller's is one. A thread
/// that cannot be started is left out; the others do its share.
pub fn spread<E: Send>(
    threads: usize,
    count: usize,
    work: impl Fn(usize) -> Result<(), E> + Sync,
) -> Result<(), E> {
    // Relaxed, both: a number belongs to the thread that took it, and the flag is a hint.
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let first: Mutex<Option<(usize, E)>> = Mutex::new(None);
    let run = || {
        while !stop.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                break;
            }
            if let Err(failure) = work(number) {
                stop.store(true, Ordering::Relaxed);
                let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
                if first.as_ref().is_none_or(|(other, _)| number < *other) {
                    *first = Some((number, failure));
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(count) {
            let _ = std::thread::Builder::new().name("pinpool-work".into()).spawn_scoped(scope, run);
        }
        run();
    });
    first.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), |(_, failure)| Err(failure))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_comes_once_and_the_lowest_failure_is_told() {
        let seen: Vec<AtomicUsize> = (0..1000).map(|_| AtomicUsize::new(0)).collect();
        let all = spread(3, 1000, |number| {
            seen[number].fetch_add(1, Ordering::Relaxed);
            Ok::<_, ()>(())
        });
        assert!(all.is_ok() && seen.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        let failed = spread(3, 1000, |number| match number {
            17.. => Err(number),
            _ => Ok(()),
        });
        assert_eq!(failed, Err(17));
        assert_eq!(spread(1, 0, Err), Ok(()));
    }
}
