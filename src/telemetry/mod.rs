//! What operators see: statistics, events and spans, metrics, and the report on stuck buffers.
//!
//! | question | answer |
//! | --- | --- |
//! | How full is the pool? | [`Pool::stats`](crate::Pool::stats), and in full [`Pool::snapshot`](crate::Pool::snapshot), with [`Device::stats`](crate::Device::stats) and [`Stream::stats`](crate::Stream::stats) |
//! | What happened? | the events and spans below, through [`tracing`] |
//! | How does it develop? | a [`Sampler`]: the [`METRICS`] below, as events and, with the feature `metrics`, through the `metrics` facade |
//! | Which buffers do not come back? | [`Pool::stuck`](crate::Pool::stuck), and its report when a wait times out |
//!
//! None of them slows down a hit, which reads no clock and writes no shared counter. Durations are
//! taken on slow paths, often of a sample, whose rate stands where it is read ([`Snapshot`]). The
//! crate installs no subscriber and no recorder, and sets no level.
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
//! | `pinpool::region` | `grow` | INFO | device, bytes | pinning of memory for a pool, until all of it is pinned or the system gives no more |
//! | `pinpool::region` | `pin` | INFO | device, bytes | within `grow`: one extent touched and pinned, on the device's region thread |
//! | `pinpool::region` | `allocate` | INFO | device, bytes | within `grow`: one extent allocated by the driver |
//! | `pinpool::copier` | `transfer` | INFO from 16 MiB, below DEBUG | device, direction (upload or download), priority (bulk or foreground), bytes, what; at its end outcome (done, cancelled or failed), copied_bytes, seconds; and if it failed error, error.type (its [class](crate::Error::class)) and otel.status_code (ERROR) | a transfer of a [`Copier`](crate::Copier), from its start until nothing of it is under way; it lies within the spans of the call that started it. Chunks have no spans, nor have the calls for many pieces, buffers or pages |
//!
//! # Events to act on
//!
//! The target says which event it is. Texts may change; targets, levels and fields are kept. A
//! filter for `pinpool::pool` includes the targets below it.
//!
//! A pool's name is unique in the process at a time (see
//! [`PoolBuilder::name`](crate::PoolBuilder::name)), and so are a device's (an adopted context's
//! has a number in it) and a stream's number. Text from a file, a driver or the system is escaped
//! in fields and errors, and cut to a bounded length: it cannot steer a terminal or begin a line.
//!
//! | target | level | fields | what to do |
//! | --- | --- | --- | --- |
//! | `pinpool::pool::stuck` | WARN | first pool, waited_seconds, buffers, bytes, and of a wait that goes on requested, requested_buffers, waiting, growth; then for each of up to eight buffers pool, state, bytes, requested, age_seconds, exact, device, stream, seq, completed, event, long_lived, tag, site, where known, and hint where checkouts were not recorded | a wait timed out or has lasted for five seconds (at most once a minute; the list has buffers that were out when it began or have been for a second, and those whose age is not exact), or a sampler found buffers out for too long: look at tag and site, or at the stream |
//! | `pinpool::pool::outstanding` | ERROR | pool, outstanding, quarantined_bytes | the pool was shut down with buffers still out: their memory is kept |
//! | `pinpool::stream::stuck` | WARN | device, stream, seq, completed, events, entries, bytes, seconds | the stream has work in flight, and nothing of it completes: a kernel or a copy hangs |
//! | `pinpool::stream::lost` | ERROR | device, stream, error, entries | what is complete on the stream cannot be known any more: the device is lost, or its driver does not answer; restart the process |
//! | `pinpool::stream::quarantine` | ERROR | buffers, bytes | that memory cannot be used until the process ends |
//! | `pinpool::device::lost` | ERROR | device, error | the device cannot be used until the process ends |
//! | `pinpool::device::unclosed` | WARN | device, error | [`Device::close`](crate::Device::close) failed: the error says what keeps the device open, or what was leaked |
//! | `pinpool::region::unpinned` | WARN | device, bytes, error | memory is not pinned: raise the memlock limit (INFO, without error: it was pinned later) |
//! | `pinpool::region::ended` | WARN; DEBUG for tries that follow | device, missing, error | the pool could not grow |
//! | `pinpool::device::leak`, `pinpool::region::leak`, `pinpool::stream::leak` | WARN, ERROR for memory | device, error, and bytes of memory | the driver refused to take something back: it stays allocated until the process ends |
//! | `pinpool::foreign` | ERROR | | code of the program that the crate calls (a waker, a recorder, a source, the drop of a value) panicked, or a thread of the crate did and goes on: the text says what follows, standard error has the panic |
//!
//! Other events, under `pinpool::device`, `pinpool::region`, `pinpool::pool` and `pinpool::stream`,
//! explain and need no action.
//!
//! # Metrics
//!
//! [`METRICS`] lists them. A [`Sampler`] sends each value as an event of the target
//! `pinpool::metrics`, level TRACE, so that a log has them only where it asks for them. The value's
//! field has the metric's name behind `monotonic_counter.`, `gauge.` or `histogram.`, as
//! `MetricsLayer` of the crate tracing-opentelemetry expects. (Gauges need that crate's feature
//! `metrics_gauge_unstable`. The layer must see this target's level TRACE: the filter
//! `info,pinpool::metrics=trace` lets it, tracing's `release_max_level_info` does not.) The other
//! fields are the labels. With the feature `metrics` the facade's recorder gets the same.
//! Prometheus's text has underscores for points: `pinpool_checkouts_total`.
//!
//! - A counter is sent as its increase since the poll before.
//! - A histogram is sent as durations, one value for each, which stands for its
//!   [bucket](Histogram). The recorder gets all, events are 64 a poll at most, in proportion.
//!   Buckets of [`Histogram::bounds_seconds`] count exactly; sums are good to a quarter.
//!
//! Labels are bounded: the first 64 streams of a device that a sampler sees have gauges of their
//! own; all others are added up under the label `other`. The facade cannot remove a metric, and a
//! recorder keeps a gauge's last value. So the last poll of a pool, a device or a stream that has
//! ended sends zeros, and later polls nothing. An exporter needs no timeout for idle metrics
//! (`PrometheusBuilder::idle_timeout`), which would also take the server's own metrics. A server
//! that builds pools again and again gives them the same [name](crate::PoolBuilder::name).

// The folder is on two layers. `counters` (what is counted where it happens), `ledger` (when
// segments were checked out) and `stuck` (the report) lie low, for every module above. `snapshot`
// (all counts at one moment), `metrics` (the table) and `sampler` (which sends them) lie above
// `pool`, for the program. To read in this order.
pub(crate) mod counters;
pub(crate) mod ledger;
mod metrics;
mod sampler;
mod snapshot;
pub(crate) mod stuck;

use std::time::Duration;

pub use counters::{ClassStats, ErrorCounts, Histogram};
pub use metrics::{METRICS, Metric};
pub use sampler::{Sampler, Sampling};
pub use snapshot::{DeviceStats, Snapshot, StreamStats};
pub use stuck::{Awaited, BufferState, EventState, StuckBuffer};

use crate::pool::Pool;

impl Pool {
    /// Lists the buffers that are known to have been out for at least `threshold`, oldest first:
    /// size, age, state, the stream and event that each waits for, and its call site. Known are
    ///
    /// - recorded checkouts: all of a pool that [tracks its
    ///   checkouts](crate::PoolBuilder::track_checkouts); elsewhere the checkouts of
    ///   [long-lived](crate::Request::long_lived) buffers, and one in eight of the checkouts that no
    ///   cache served. Their ages are exact;
    /// - what streams hold in flight, by the time since the pool found it there, some milliseconds
    ///   after it was submitted;
    /// - quarantined buffers.
    ///
    /// **Other buffers of the program are counted in the statistics only**
    /// ([`PoolStats`](crate::PoolStats), [`Snapshot`]): a checkout that a cache serves leaves no
    /// record. To find one, build with [`track_checkouts`](crate::PoolBuilder::track_checkouts).
    ///
    /// # What it costs
    ///
    /// A call looks at each recorded checkout under the pool's lock, and at all that is in flight
    /// under the lock of each stream. Checkouts and returns of thread caches go on.
    ///
    /// The same list is logged when a wait for memory times out, at most once a minute, if a
    /// subscriber listens: see the events of [`telemetry`](crate::telemetry).
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
    ///     eprintln!("{} bytes, {:?} for {:?}, from {:?}", buffer.granted, buffer.state, buffer.age, buffer.site);
    /// }
    /// # drop(kept);
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    #[must_use]
    pub fn stuck(&self, threshold: Duration) -> Vec<StuckBuffer> {
        stuck::find(threshold, self.central(), self.devices()).into_values().collect()
    }
}
