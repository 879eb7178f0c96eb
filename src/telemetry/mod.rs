//! What operators see: statistics, events and spans, metrics, and the report on stuck buffers.
//!
//! Four questions, and who answers them:
//!
//! | question | answer |
//! | --- | --- |
//! | How full is it? | [`Pool::stats`](crate::Pool::stats), and in full [`Pool::snapshot`](crate::Pool::snapshot), with [`Device::stats`](crate::Device::stats) and [`Stream::stats`](crate::Stream::stats) |
//! | What happened? | the events and spans below, through [`tracing`] |
//! | How does it go over time? | a [`Sampler`]: the [`METRICS`] below, as events and, with the feature `metrics`, through the `metrics` facade |
//! | Who keeps what he has? | [`Pool::stuck`](crate::Pool::stuck), and its report when a wait times out |
//!
//! None of them touches a hit: a checkout from the thread's own cache reads no clock and writes no counter that threads
//! share. Where a duration is needed it is taken on a slow path, of a sample whose rate is said where it is read
//! ([`Snapshot`]). The crate installs no subscriber, no recorder and no level.
//!
//! # Spans
//!
//! | target | span | level | fields | from, to |
//! | --- | --- | --- | --- | --- |
//! | `pinpool::device` | `open` | INFO | device | [`Device::open`](crate::Device::open): loading the driver, making its context |
//! | `pinpool::device` | `close` | INFO | device | [`Device::close`](crate::Device::close) |
//! | `pinpool::pool` | `build` | INFO | pool, capacity | [`PoolBuilder::build`](crate::PoolBuilder::build), until the first extent is usable |
//! | `pinpool::pool` | `adopt` | INFO | pool | [`Pool::adopt`](crate::Pool::adopt) |
//! | `pinpool::pool` | `wait` | DEBUG | pool, bytes | a thread's wait for memory (a task's is in `pinpool.wait.seconds` only) |
//! | `pinpool::pool` | `shutdown` | INFO | pool | [`Pool::shutdown`](crate::Pool::shutdown) |
//! | `pinpool::region` | `grow` | INFO | device, bytes | memory asked of the system, until all of it came or no more does |
//! | `pinpool::region` | `pin` | INFO | device, bytes | within `grow`: one extent touched and pinned, on the device's worker thread |
//! | `pinpool::region` | `allocate` | INFO | device, bytes | within `grow`: one extent allocated by the driver |
//! | `pinpool::pipeline` | `transfer` | INFO | device, direction (upload or download), priority (bulk or foreground), bytes, what; when it is over outcome (done, cancelled or failed), copied_bytes, seconds, and error of what failed | a transfer of a [pipeline](crate::pipeline), from its start until nothing of it is under way; it lies within the spans of who started it, and no chunk has one. (A small blocking call in the foreground is made at once, and is none) |
//!
//! # Events to act on
//!
//! What a file, a driver or the system said is escaped in fields and errors, and has an end: nothing in them steers a
//! terminal or begins a line. A pool is told from others by its name, which no other pool of the process has at the
//! same time (see [`PoolBuilder::name`](crate::PoolBuilder::name)), a device by its name (a context that was adopted
//! has a number in it), and a stream by its number, which none other has in the process.
//!
//! The target says which event it is; texts may change, targets, levels and fields are kept. A filter for
//! `pinpool::pool` has those below it, too.
//!
//! | target | level | fields | what to do |
//! | --- | --- | --- | --- |
//! | `pinpool::pool::fallback` | WARN, later ones DEBUG | pool, bytes, error | plain memory was given out: raise the capacity, or find who keeps buffers |
//! | `pinpool::pool::stuck` | WARN | first pool, waited_seconds, buffers, bytes; then for each of up to eight buffers pool, state, bytes, requested, age_seconds, exact, device, stream, seq, completed, event, tag, site, those that are known | a wait timed out (at most once a minute), or a sampler found buffers out for too long: look at tag and site, or at the stream |
//! | `pinpool::pool::outstanding` | ERROR | pool, outstanding, quarantined_bytes | the pool was shut down with buffers still out: their memory is kept |
//! | `pinpool::pool::membarrier` | WARN | | a sandbox that came after the pool refuses `membarrier`: checkouts are slower from here on; put it up before the first pool is built |
//! | `pinpool::stream::stuck` | WARN | device, stream, seq, completed, events, entries, bytes, seconds | a sampler saw nothing get done there: a kernel or copy hangs |
//! | `pinpool::stream::lost` | ERROR | device, stream, error, entries | nobody will know what is complete there; the device is lost, or its driver refuses to be asked |
//! | `pinpool::stream::quarantine` | ERROR | buffers, bytes | that memory is gone until the process ends |
//! | `pinpool::device::lost` | ERROR | device, error | the device is gone until the process ends |
//! | `pinpool::device::unclosed` | WARN | device, error | [`Device::close`](crate::Device::close) gave up: the error says what keeps the device open, or was leaked |
//! | `pinpool::region::unpinned` | WARN | device, bytes, error | memory is not page-locked: raise the memlock limit |
//! | `pinpool::region::ended` | WARN | device, missing, error | the pool could not grow |
//! | `pinpool::device::leak`, `pinpool::region::leak`, `pinpool::stream::leak` | WARN, ERROR for memory | device, error, and bytes of memory | something could not be given back to the driver, which kept it |
//! | `pinpool::foreign` | ERROR | | code of the program's that the crate calls (a waker, a recorder, a source, the drop of a value) panicked, or a thread of the crate's did and goes on: the text says what follows, standard error has the panic |
//!
//! What else is logged, under `pinpool::device`, `pinpool::region`, `pinpool::pool` and `pinpool::stream`, explains and
//! needs no action.
//!
//! # Metrics
//!
//! A [`Sampler`] sends each as an event of the target `pinpool::metrics`, level INFO, with one field that has the
//! value, named in the way of `MetricsLayer` of the crate tracing-opentelemetry (`monotonic_counter.`, `gauge.` or
//! `histogram.`, and the name), and with its labels as the other fields. (That crate has gauges by its feature
//! `metrics_gauge_unstable`. The layer needs to see the level INFO of this target.) With the feature `metrics` the
//! facade's recorder gets the same under the same names. In Prometheus's text the points become underscores:
//! `pinpool_checkouts_total`. Counters are sent as what came since the poll before. Of a histogram as many values are
//! sent as durations came, each standing for its [bucket](Histogram): as events 64 at most, and in right proportion,
//! and to the recorder all. Recorders that are given [`Histogram::bounds_seconds`] for buckets count them exactly; sums
//! are good to a quarter or so.
//!
//! | name | kind | labels | what |
//! | --- | --- | --- | --- |
//! | `pinpool.memory.bytes` | gauge | pool, state | Bytes of the pool by state: free, checked_out, in_flight, quarantined, cut. They sum to locked and unlocked bytes |
//! | `pinpool.memory.locked.bytes` | gauge | pool | Bytes that are page-locked |
//! | `pinpool.memory.unlocked.bytes` | gauge | pool | Bytes that the pool serves and that are not page-locked |
//! | `pinpool.memory.capacity.bytes` | gauge | pool | Bytes that the pool may hold at most |
//! | `pinpool.memory.cached.bytes` | gauge | pool | Of the free bytes, those that threads keep |
//! | `pinpool.memory.claimed.bytes` | gauge | pool | Of the bytes in flight, those claimed for stream-ready reuse |
//! | `pinpool.memory.requested.bytes` | gauge | pool | Bytes asked for by all that is out |
//! | `pinpool.memory.rounding.bytes` | gauge | pool | Bytes given to all that is out beyond what was asked for |
//! | `pinpool.memory.largest_free.bytes` | gauge | pool | The longest free range in one piece |
//! | `pinpool.checkouts.total` | counter | pool | Segments given out |
//! | `pinpool.returns.total` | counter | pool | Segments that came back |
//! | `pinpool.misses.total` | counter | pool | Requests that the thread's own cache could not serve |
//! | `pinpool.reclaims.total` | counter | pool | Times that what threads keep was taken back |
//! | `pinpool.growths.total` | counter | pool | Regions asked of the system for a request |
//! | `pinpool.growth_failures.total` | counter | pool | Times that pinning ended early |
//! | `pinpool.waits.total` | counter | pool | Requests that had to wait |
//! | `pinpool.timeouts.total` | counter | pool | Waits given up |
//! | `pinpool.waiting.requests` | gauge | pool | Requests waiting now |
//! | `pinpool.unpinned_fallbacks.total` | counter | pool | Plain buffers given out in place of pinned ones |
//! | `pinpool.unpinned_fallback.bytes.total` | counter | pool | Their bytes |
//! | `pinpool.errors.total` | counter | pool, class | Checkouts that ended with an error, by what it means: argument, capture, transient, device_lost, shutdown |
//! | `pinpool.wait.seconds` | histogram | pool | How long requests waited for memory |
//! | `pinpool.holding.seconds` | histogram | pool | How long buffers were out; of a sample, one in eight that no cache could serve |
//! | `pinpool.pinning.bytes_per_second` | gauge | pool | Bytes pinned per second spent in pinning |
//! | `pinpool.pinning.longest_call.seconds` | gauge | pool | The longest single call that pinned |
//! | `pinpool.sampled.timestamp.seconds` | gauge | pool | When the pool was looked at last, in seconds since 1970: it stands still when the pool or its sampler is gone |
//! | `pinpool.stuck.buffers` | gauge | pool | Buffers out for longer than the sampler's threshold |
//! | `pinpool.stuck.bytes` | gauge | pool | Their bytes |
//! | `pinpool.class.free.segments` | gauge | pool, stride | Segments of a size class that can be checked out; stride is the class's bytes, or large |
//! | `pinpool.class.out.segments` | gauge | pool, stride | Segments of a size class that are checked out, in flight or quarantined |
//! | `pinpool.class.cached.segments` | gauge | pool, stride | Of the free ones, those that threads keep |
//! | `pinpool.class.checkouts.total` | counter | pool, stride | Segments of a size class given out |
//! | `pinpool.flight.seconds` | histogram | device | From submitting to being seen complete; of a sample, one in sixteen of each stream |
//! | `pinpool.device.errors.total` | counter | device, class | Errors that the driver answered with, by what they mean |
//! | `pinpool.device.submitted.total` | counter | device | Copies and holds submitted |
//! | `pinpool.device.completed.total` | counter | device | Those of them known to be complete |
//! | `pinpool.device.copied.bytes.total` | counter | device, direction | Bytes of copies that the driver accepted; direction is upload or download |
//! | `pinpool.device.registered.bytes` | gauge | device | Bytes of values registered with the device |
//! | `pinpool.device.lost` | gauge | device | 1 if the device is lost, else 0 |
//! | `pinpool.device.stuck.streams` | gauge | device | Streams with work in flight that got nothing done for longer than the sampler's threshold |
//! | `pinpool.stream.in_flight.bytes` | gauge | device, stream | Bytes of segments in flight on a stream |
//! | `pinpool.stream.in_flight.entries` | gauge | device, stream | Copies and holds in flight on a stream |

pub(crate) mod counters;
pub(crate) mod ledger;
mod metrics;
mod sampler;
mod snapshot;
pub(crate) mod stuck;

use std::time::Duration;

pub use counters::{Bucket, ErrorCounts, Histogram};
pub use metrics::{METRICS, Metric, MetricKind, MetricUnit};
pub use sampler::{Sampler, Sampling};
pub use snapshot::{ClassStats, DeviceStats, Snapshot, StreamStats};
pub use stuck::{Awaited, BufferState, EventState, StuckBuffer};

use crate::pool::Pool;

impl Pool {
    /// Every buffer that has been out for at least `threshold`, oldest first: its size, age and state, the stream and
    /// the event that it waits for, and who asked for it.
    ///
    /// Ages cost a hit nothing, so they are known exactly only of checkouts that were entered: all of them with
    /// [`PoolBuilder::track_checkouts`](crate::PoolBuilder::track_checkouts), and otherwise a sample. Of the others it
    /// is known how long they have been *seen* out: call this (or run a [`Sampler`]) from time to time, and what one
    /// call sees counts from there in the next. Such an age is never too long, and starts anew whenever the buffer
    /// might have been returned and checked out again in between: it is good for what is in flight, and for classes in
    /// which nothing comes back, and says little of a class with much coming and going. With a threshold of zero
    /// everything that is out is listed.
    ///
    /// The look takes some 15 us for each thousand buffers that are out, and 50 to 200 us more for each thousand that
    /// it lists. It goes piece by piece: who checks out or returns meanwhile is kept out of his cache while it is
    /// learned what caches hold, and waits for a piece of some 4,000 segments at most, tens of microseconds. It also
    /// happens by itself when a wait for memory times out, at most once a minute, if anyone listens: see the events of
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
        stuck::find(threshold, self.centrals(), self.devices())
    }
}
