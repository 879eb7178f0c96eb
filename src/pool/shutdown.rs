//! Shutting a pool down: it is closed, and its buffers are waited for.

use std::time::{Duration, Instant};

use super::Pool;

/// How [`Pool::shutdown`] ended.
#[must_use = "it says whether buffers are still out"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shutdown {
    /// Whether every buffer came back.
    pub drained: bool,
    /// Segments that are still checked out, in flight or quarantined, and keep their memory.
    pub outstanding: u64,
    /// Bytes that are quarantined; their memory stays until the process ends.
    pub quarantined_bytes: usize,
}

impl Pool {
    /// Closes the pool, and waits until every buffer has come back, for at most `timeout`.
    /// Checkouts fail with [`Error::Closed`](crate::Error::Closed) at once. Buffers still out at
    /// the end keep their memory; they are logged and counted. The call blocks: a task makes it on
    /// another thread. In the child of a fork it returns at once. Free memory stays pinned until
    /// [`trim(0)`](Self::trim), or until the region thread unpins it after the last handle's drop.
    pub fn shutdown(&self, timeout: Duration) -> Shutdown {
        // The devices and their threads are the parent's: nothing here can be waited for.
        if crate::os::forked() {
            return Shutdown { drained: false, outstanding: 0, quarantined_bytes: 0 };
        }
        let span = crate::foreign::span!(INFO, target: "pinpool::pool", "shutdown", pool = self.name());
        let _entered = span.enter();
        let deadline = Instant::now().checked_add(timeout);
        let central = &self.0.central;
        central.close();
        loop {
            let moved = self.advance();
            let (left, snapshot) = (central.outstanding(), central.snapshot());
            let (stuck, quarantined_bytes) = (snapshot.quarantined_segments, snapshot.quarantined);
            let late = deadline.is_some_and(|d| Instant::now() >= d);
            if left <= stuck || late || (self.is_by_hand() && !moved) {
                if left > 0 {
                    crate::foreign::error!(
                        target: "pinpool::pool::outstanding", pool = self.name(), outstanding = left, quarantined_bytes,
                        "the pool was shut down with buffers still out: their memory is kept"
                    );
                }
                return Shutdown { drained: left == 0, outstanding: left, quarantined_bytes };
            }
            if !moved {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }
}
