//! What operators see: statistics, events and spans, metrics, and the report on stuck buffers.
//!
//! PLACEHOLDER
pub(crate) mod counters;
pub(crate) mod ledger;
mod snapshot;
pub(crate) mod stuck;

use std::time::Duration;

pub use counters::{Bucket, ErrorCounts, Histogram};
pub use snapshot::{ClassStats, DeviceStats, Snapshot, StreamStats};
pub use stuck::{Awaited, BufferState, Mark, StuckBuffer};

use crate::pool::Pool;

impl Pool {
    /// Every buffer that has been out for at least `threshold`, oldest first: its size, age and state, the stream and the mark
    /// that it waits for, and who asked for it.
    ///
    /// Ages cost a hit nothing, so they are known exactly only of checkouts that were entered: all of them with
    /// [`PoolBuilder::track_checkouts`](crate::PoolBuilder::track_checkouts), and otherwise a sample. Of the others it is
    /// known how long they have been *seen* out: call this (or run a [`Sampler`]) from time to time, and what one call sees
    /// counts from there in the next. With a threshold of zero everything that is out is listed.
    ///
    /// The look takes milliseconds for large pools, and keeps everyone out of their caches meanwhile. It also happens by
    /// itself when a wait for memory times out, at most once a minute, if anyone listens: see the events of
    /// [`telemetry`](crate::telemetry).
    ///
    /// ```
    /// use std::time::Duration;
    /// use pinpool::{Device, Pool, Request, Unpinned};
    ///
    /// let device = Device::open("host")?;
    /// let pool = Pool::builder(&device).track_checkouts(true).unpinned(Unpinned::Allow).build()?;
    /// let kept = pool.checkout(Request::new(4096).tag("kv-cache"))?;
    /// for buffer in pool.stuck(Duration::ZERO) {
    ///     assert_eq!((buffer.tag, buffer.requested), (Some("kv-cache"), Some(4096)));
    ///     eprintln!("out for {:?}: {} bytes, {:?}, asked for at {:?}", buffer.age, buffer.granted, buffer.state, buffer.site);
    /// }
    /// # drop(kept);
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    #[must_use]
    pub fn stuck(&self, threshold: Duration) -> Vec<StuckBuffer> {
        stuck::find(threshold, self.depots(), self.devices())
    }
}
