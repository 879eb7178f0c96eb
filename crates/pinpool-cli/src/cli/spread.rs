//! Spreading work over threads.
//!
//! Each thread takes the next number, in order and one at a time, so a faster thread takes more of
//! them. After the first failure no thread takes another number.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Calls `work` once for each number below `count`, on up to `threads` threads, of which the
/// caller's is one. A thread that cannot be started is left out; the others do its share.
pub fn spread<E: Send>(
    threads: usize,
    count: usize,
    work: impl Fn(usize) -> Result<(), E> + Sync,
) -> Result<(), E> {
    // Relaxed, both: a number belongs to the thread that took it, and the flag is a hint.
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let first: Mutex<Option<E>> = Mutex::new(None);
    let run = || {
        while !stop.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                break;
            }
            if let Err(failure) = work(number) {
                stop.store(true, Ordering::Relaxed);
                first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(count) {
            let _ = std::thread::Builder::new().name("pinpool-work".into()).spawn_scoped(scope, run);
        }
        run();
    });
    first.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// Cuts a slice into one part for each thread, and calls `work` with each part and where it starts.
pub fn each<T: Send>(all: &mut [T], threads: usize, work: impl Fn(usize, &mut [T]) + Sync) {
    // So long that two threads seldom write to one page.
    const STEP: usize = 16 << 10;
    let part = all.len().div_ceil(threads).next_multiple_of(STEP);
    let parts: Vec<_> = all.chunks_mut(part).map(Mutex::new).collect();
    let Ok(()) = spread(threads, parts.len(), |number| {
        work(number * part, &mut parts[number].lock().unwrap_or_else(PoisonError::into_inner));
        Ok::<_, Infallible>(())
    });
}
