//! Going over a file in chunks, with several threads that each have a stream.
//!
//! The chunks are handed out in order, one at a time, so threads that are faster do more of them. The first failure
//! stops the handing out; chunks that are under way are finished, so of several failures the one that lies first in the
//! file is reported.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pinpool::Stream;

use super::Failure;

/// One piece of the file.
#[derive(Clone, Copy, Debug)]
pub struct Chunk {
    pub index: usize,
    pub offset: u64,
    pub len: usize,
}

impl Chunk {
    /// Its place in device memory that mirrors the file.
    pub fn range(self) -> std::ops::Range<usize> {
        let start = self.offset as usize;
        start..start + self.len
    }
}

/// How many chunks a file has.
pub fn count(len: u64, chunk: usize) -> u64 {
    len.div_ceil(chunk as u64)
}

/// Calls `work` once for each chunk, on as many threads as there are streams, and returns when the streams are done
/// with it all. A thread that cannot be started is done without, if there is another.
pub fn sweep(
    streams: &[Stream],
    len: u64,
    chunk: usize,
    work: impl Fn(&Stream, Chunk) -> Result<(), Failure> + Sync,
) -> Result<(), Failure> {
    let next = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let first: Mutex<Option<(u64, Failure)>> = Mutex::new(None);
    let fail = |offset: u64, failure: Failure| {
        stop.store(true, Ordering::Relaxed);
        let mut first = first.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if first.as_ref().is_none_or(|(at, _)| offset < *at) {
            *first = Some((offset, failure));
        }
    };
    let run = |stream: &Stream| {
        while !stop.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(offset) = index.checked_mul(chunk as u64).filter(|&o| o < len) else { break };
            let size = (len - offset).min(chunk as u64) as usize;
            if let Err(failure) = work(stream, Chunk { index: index as usize, offset, len: size }) {
                fail(offset, failure);
            }
        }
        if let Err(error) = stream.synchronize() {
            fail(u64::MAX, Failure::Failed(error.to_string()));
        }
    };
    std::thread::scope(|scope| {
        let useful = usize::try_from(count(len, chunk)).unwrap_or(usize::MAX);
        let mut started = 0;
        for stream in streams.iter().take(useful) {
            let run = &run;
            match std::thread::Builder::new()
                .name("pinpool-load".into())
                .spawn_scoped(scope, move || run(stream))
            {
                Ok(_) => started += 1,
                Err(error) if started == 0 => {
                    fail(u64::MAX, Failure::Failed(format!("no thread can be started: {error}")));
                }
                Err(_) => break,
            }
        }
    });
    match first.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        Some((_, failure)) => Err(failure),
        None => Ok(()),
    }
}
