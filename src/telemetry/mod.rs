//! What operators see: statistics, events and spans, metrics, and the report on stuck buffers.
//!
//! | question | answer |
//! | --- | --- |
//! | How full is the pool? | [`Pool::stats`](crate::Pool::stats), and in full [`Pool::snapshot`](crate::Pool::snapshot), with [`Device::stats`](crate::Device::stats) and [`Stream::stats`](crate::Stream::stats) |
//! | What happened? | the events and spans below, through [`tracing`] |
//! | How does it develop? | a [`Sampler`]: the [`METRICS`] below, as events and, with the feature `metrics`, through the `metrics` facade |
//! | Which buffers do not come back? | [`Pool::stuck`](crate::Pool::stuck), and its report when a wait times out |
//!
//! None of them slows down a checkout from the thread's own cache, which reads no clock and writes no counter that
//! threads share. Durations are taken on slow paths, and often of a sample, whose rate is documented where it is read
//! ([`Snapshot`]). The crate installs no subscriber and no recorder, and sets no level.
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
//! | `pinpool::copier` | `transfer` | INFO from 16 MiB, below DEBUG | device, direction (upload or download), priority (bulk or foreground), bytes, what; at its end outcome (done, cancelled or failed), copied_bytes, seconds, and error if it failed | a transfer of a [`Copier`](crate::Copier), from its start until nothing of it is under way; it lies within the spans of the call that started it. Chunks have no spans, nor have the calls for many pieces, buffers or pages |
//!
//! # Events to act on
//!
//! The target says which event it is. Texts may change; targets, levels and fields are kept. A filter for
//! `pinpool::pool` includes the targets below it.
//!
//! A pool has a name that no other pool of the process has at the same time (see
//! [`PoolBuilder::name`](crate::PoolBuilder::name)); the name of a device is unique too (that of an adopted context has
//! a number in it), and so is the number of a stream. Text from a file, a driver or the system is escaped in fields and
//! errors, and cut to a bounded length: it cannot steer a terminal or begin a line.
//!
//! | target | level | fields | what to do |
//! | --- | --- | --- | --- |
//! | `pinpool::pool::stuck` | WARN | first pool, waited_seconds, buffers, bytes, and of a wait that goes on requested, requested_buffers, waiting, growth; then for each of up to eight buffers pool, state, bytes, requested, age_seconds, exact, device, stream, seq, completed, event, long_lived, tag, site, those that are known, and hint where checkouts were not recorded | a wait timed out or has lasted for five seconds (at most once a minute; the list has buffers that were out when it began or have been for a second, and those whose age is not exact), or a sampler found buffers out for too long: look at tag and site, or at the stream |
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
//! Other events, under `pinpool::device`, `pinpool::region`, `pinpool::pool` and `pinpool::stream`, explain and need no
//! action.
//!
//! # Metrics
//!
//! [`METRICS`] lists them. A [`Sampler`] sends each value as an event of the target `pinpool::metrics`, level TRACE, so
//! that a log has them only where it asks for them. The field with the value has the metric's name with
//! `monotonic_counter.`, `gauge.` or `histogram.` before it, as `MetricsLayer` of the crate tracing-opentelemetry
//! expects. (Gauges need that crate's feature `metrics_gauge_unstable`. The layer must see the level TRACE of this
//! target: a filter `info,pinpool::metrics=trace` lets it, and a build with tracing's `release_max_level_info` or the
//! like has no such events.) The other fields are the labels. With the feature `metrics` the facade's recorder gets the
//! same values under the same names. In Prometheus's text the points become underscores: `pinpool_checkouts_total`.
//!
//! - A counter is sent as its increase since the poll before.
//! - A histogram is sent as durations, one value for each, which stands for its [bucket](Histogram). The recorder gets
//!   all of them; as events at most 64 are sent a poll, in the same proportions. A recorder whose buckets have the
//!   bounds of [`Histogram::bounds_seconds`] counts exactly; sums are good to a quarter or so.
//!
//! Labels are bounded: the first 64 streams of a device that a sampler sees have gauges of their own; all others are
//! added up under the label `other`. The facade has no call that removes a metric, and a recorder keeps the last value
//! of a gauge. So the last poll of a pool, a device or a stream that has ended sends
//! zeros, and later polls nothing. An exporter needs no timeout for idle metrics (`PrometheusBuilder::idle_timeout`):
//! that holds for the whole process, and would take away the server's own counters and what it sets but once. A server
//! that builds pools again and again gives them the same [name](crate::PoolBuilder::name).

// The folder is on two layers. `counters` (what is counted where it happens), `ledger` (when segments were checked out)
// and `stuck` (the report) lie low, and every module above them may use them. `snapshot` (all counts at one moment),
// `metrics` (the table) and `sampler` (which sends them) lie above `pool`; the program alone calls these. To read in
// this order.
pub(crate) mod counters;
pub(crate) mod ledger;
mod metrics;
mod sampler;
mod snapshot;
pub(crate) mod stuck;

use std::time::Duration;

pub use counters::{Bucket, ClassStats, ErrorCounts, Histogram, RefusedCounts};
pub use metrics::{METRICS, Metric, MetricKind};
pub use sampler::{Sampler, Sampling};
pub use snapshot::{DeviceStats, Snapshot, StreamStats};
pub use stuck::{Awaited, BufferState, EventState, StuckBuffer};

use crate::pool::Pool;

impl Pool {
    /// Lists the buffers that are known to have been out for at least `threshold`, oldest first: size, age and state,
    /// the stream and the event that each waits for, and the place in the program that checked it out. These are
    ///
    /// - recorded checkouts: all of a pool that
    ///   [tracks its checkouts](crate::PoolBuilder::track_checkouts); elsewhere those of
    ///   [long-lived](crate::Request::long_lived) buffers, and one in eight of those that no cache served. Their ages
    ///   are exact;
    /// - what streams hold in flight, by the time since the pool found it there, some milliseconds after it was
    ///   submitted;
    /// - quarantined buffers.
    ///
    /// **Other buffers that the program has are counted in the statistics only** ([`PoolStats`](crate::PoolStats),
    /// [`Snapshot`]), since a checkout that a cache serves reads no clock and leaves no record. To find out which of
    /// them does not come back, build the pool with [`track_checkouts`](crate::PoolBuilder::track_checkouts).
    ///
    /// # What it costs
    ///
    /// A call looks at each recorded checkout under the pool's lock, and at all that is in flight under the lock of
    /// each stream. Checkouts and returns of thread caches go on.
    ///
    /// The same list is logged when a wait for memory times out, at most once a minute, if a subscriber listens: see
    /// the events of [`telemetry`](crate::telemetry).
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
        let found = stuck::find(threshold, self.central(), self.devices());
        found.into_iter().map(|(_, buffer)| buffer).collect()
    }
}
