//! Streams that only one thread can name.
//!
//! CUDA's per-thread default stream is one handle, which stands for another stream on every thread. So only the thread
//! that adopted it can submit to it, and record its events. Events are asked about on any thread.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use super::StreamHandle;

/// The thread that a stream is confined to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Confined {
    thread: u64,
    /// A stream of which an event, recorded on any thread, covers all work of the confined one: where an event could not
    /// be recorded on its own thread, the reaper records the next one there.
    pub(crate) covering: StreamHandle,
}

impl Confined {
    /// Confined to the calling thread.
    pub(crate) fn here(covering: StreamHandle) -> Self {
        Self { thread: thread(), covering }
    }

    /// Whether the calling thread is the one.
    pub(crate) fn is_here(&self) -> bool {
        self.thread == thread()
    }
}

/// A number of the calling thread that no other thread has or had. (The system's numbers are given again.)
fn thread() -> u64 {
    // Relaxed: only the number has to be unique.
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local!(static NUMBER: Cell<u64> = const { Cell::new(0) });
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_thread_that_made_it_and_no_later_one() {
        let confined = Confined::here(StreamHandle(1));
        assert!(confined.is_here());
        for _ in 0..100 {
            std::thread::spawn(move || assert!(!confined.is_here())).join().unwrap();
        }
    }
}
