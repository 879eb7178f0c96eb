//! What is counted where it happens: histograms of durations, errors by class, checkouts by size class.
//!
//! These are numbers and nothing else. They lie low in the crate, so that every layer can count; the snapshot, at the
//! crate's other end, reads them, adds them up and names them. Two rules keep them cheap:
//!
//! - A hit touches nothing here. Durations are taken on slow paths only, and of a sample of known size where all of
//!   them would cost too much.
//! - A count under a lock that is held anyway is a plain number ([`Histogram`], [`ClassTally`]). A count that many
//!   threads make without a lock is a relaxed atomic ([`SharedHistogram`], [`ErrorTally`]).
//!
//! # Buckets
//!
//! All histograms have the same fixed buckets, so that any two can be added, and the difference of two is one again.
//! Their upper bounds are 1 us, 2 us, 4 us, and so on up to 2^30 us (some 18 minutes); a bound belongs to its bucket,
//! and one more bucket has all longer durations. Doubling is coarse for a benchmark and right for an operator: the
//! durations of interest span twenty powers of two, and a change by a factor of two is worth acting upon.

use std::time::Duration;

use crate::error::{Error, ErrorClass};
use crate::segment::{CLASSES, Class};
use crate::sync::{AtomicU64, Ordering};

/// Buckets with an upper bound.
const BOUNDED: usize = 31;

/// Buckets, the unbounded one included. Under loom two, since each is an atomic of the model.
const KEPT_BUCKETS: usize = if cfg!(loom) { 2 } else { BOUNDED + 1 };

/// Durations, counted in fixed buckets: upper bounds of 1 us times powers of two, and one bucket for longer ones.
///
/// Histograms can be [merged](Self::merge), and [subtracted](Self::since) from a later reading of themselves.
///
/// ```
/// use std::time::Duration;
/// use pinpool::telemetry::Histogram;
///
/// let mut durations = Histogram::default();
/// durations.record(Duration::from_micros(3));
/// durations.record(Duration::from_micros(900));
/// assert_eq!(durations.count(), 2);
/// assert_eq!(durations.quantile(0.5), Some(Duration::from_micros(4))); // the upper bound of its bucket
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; BOUNDED + 1],
    sum_ns: u64,
}

/// One bucket of a [`Histogram`]: see [`Histogram::buckets`].
///
/// ```
/// use std::time::Duration;
/// use pinpool::telemetry::{Bucket, Histogram};
///
/// let mut durations = Histogram::default();
/// durations.record(Duration::from_micros(3));
/// let filled: Vec<Bucket> = durations.buckets().filter(|bucket| bucket.count > 0).collect();
/// assert_eq!(filled[0].upper, Some(Duration::from_micros(4)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Bucket {
    /// The upper bound, which belongs to the bucket. `None`: the last bucket, which has none.
    pub upper: Option<Duration>,
    /// Durations in this bucket, without those in the buckets before.
    pub count: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: [0; BOUNDED + 1], sum_ns: 0 }
    }
}

/// The bucket of a duration.
fn bucket_of(ns: u64) -> usize {
    // (ns - 1) / 1000, so that a bound falls into its own bucket.
    let below = ns.saturating_sub(1) / 1000;
    let index = below.checked_ilog2().map_or(0, |log| log as usize + 1);
    index.min(BOUNDED)
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Histogram {
    /// Upper bounds of the buckets, in nanoseconds, each included in its bucket: 1,000 times powers of two. Durations
    /// longer than the last bound are in one more bucket.
    pub const BOUNDS_NS: [u64; BOUNDED] = {
        let mut bounds = [0; BOUNDED];
        let mut i = 0;
        while i < BOUNDED {
            bounds[i] = 1000 << i;
            i += 1;
        }
        bounds
    };

    /// [`BOUNDS_NS`](Self::BOUNDS_NS) in seconds, as exporters take them.
    #[must_use]
    pub fn bounds_seconds() -> [f64; BOUNDED] {
        Self::BOUNDS_NS.map(|ns| ns as f64 / 1e9)
    }

    /// Counts a duration.
    pub fn record(&mut self, duration: Duration) {
        let ns = nanoseconds(duration);
        self.counts[bucket_of(ns)] += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }

    /// The number of durations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sum of the durations. It may lack durations that other threads count at the moment of the reading.
    #[must_use]
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns)
    }

    /// The mean of the durations. `None` if there are none.
    #[must_use]
    pub fn mean(&self) -> Option<Duration> {
        self.sum_ns.checked_div(self.count()).map(Duration::from_nanos)
    }

    /// The buckets, shortest first.
    pub fn buckets(&self) -> impl DoubleEndedIterator<Item = Bucket> + ExactSizeIterator + '_ {
        self.counts.iter().enumerate().map(|(i, count)| Bucket {
            upper: Self::BOUNDS_NS.get(i).map(|ns| Duration::from_nanos(*ns)),
            count: *count,
        })
    }

    /// Adds the durations of another histogram.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(other.counts) {
            *mine = mine.saturating_add(theirs);
        }
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
    }

    /// The durations counted since `earlier`, an earlier reading of the same histogram.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut counts = self.counts;
        for (count, before) in counts.iter_mut().zip(earlier.counts) {
            *count = count.saturating_sub(before);
        }
        Self { counts, sum_ns: self.sum_ns.saturating_sub(earlier.sum_ns) }
    }

    /// An upper bound of the `q`-quantile (0.0 to 1.0): the bound of the bucket in which it lies, at most twice as long
    /// as the quantile. `None` for an empty histogram, and where the quantile lies beyond the last bound.
    #[must_use]
    pub fn quantile(&self, q: f64) -> Option<Duration> {
        let count = self.count();
        let rank = ((q.clamp(0.0, 1.0) * count as f64).ceil() as u64).max(1);
        let mut below = 0;
        let at = self.counts.iter().position(|n| {
            below += n;
            below >= rank
        });
        Self::BOUNDS_NS.get(at?).map(|ns| Duration::from_nanos(*ns))
    }
}

/// A histogram that many threads count into.
#[derive(Debug)]
pub(crate) struct SharedHistogram {
    // Relaxed, all of them: they are sums, and no thread concludes from one what another has done.
    counts: [AtomicU64; KEPT_BUCKETS],
    sum_ns: AtomicU64,
}

impl SharedHistogram {
    pub(crate) fn new() -> Self {
        Self { counts: std::array::from_fn(|_| AtomicU64::new(0)), sum_ns: AtomicU64::new(0) }
    }

    pub(crate) fn record(&self, duration: Duration) {
        let ns = nanoseconds(duration);
        let count = &self.counts[bucket_of(ns).min(KEPT_BUCKETS - 1)];
        count.fetch_add(1, Ordering::Relaxed);
        // After the count: a mean that is read in between is too small, and not beyond all durations.
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Histogram {
        let mut all = Histogram { sum_ns: self.sum_ns.load(Ordering::Relaxed), ..Histogram::default() };
        for (count, shared) in all.counts.iter_mut().zip(&self.counts) {
            *count = shared.load(Ordering::Relaxed);
        }
        all
    }
}

/// Errors, counted by their [class](ErrorClass).
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow).build()?;
/// assert!(pool.checkout(1 << 40).is_err()); // more than the capacity
/// assert_eq!((pool.stats().errors.argument, pool.stats().errors.total()), (1, 1));
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ErrorCounts {
    /// Errors of [`ErrorClass::Argument`]: the call could not succeed as it was made.
    pub argument: u64,
    /// Errors of [`ErrorClass::Capture`]: the stream was being captured.
    pub capture: u64,
    /// Errors of [`ErrorClass::Transient`]: out of memory, timed out.
    pub transient: u64,
    /// Errors of [`ErrorClass::Closed`]: the program had shut the pool down.
    pub closed: u64,
    /// Errors of [`ErrorClass::Cancelled`]: the program had cancelled it.
    pub cancelled: u64,
    /// Errors of [`ErrorClass::DeviceLost`]: the call lost the device, or found it lost.
    pub device_lost: u64,
    /// Errors of [`ErrorClass::DriverShutdown`]: the driver was shutting down.
    pub driver_shutdown: u64,
}

impl ErrorCounts {
    /// The errors of all classes.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.by_class().iter().map(|(_, count)| count).sum()
    }

    /// The counts with the names of their classes, as the label `class` of the metrics has them.
    #[must_use]
    pub fn by_class(&self) -> [(&'static str, u64); 7] {
        let Self { argument, capture, transient, closed, cancelled, device_lost, driver_shutdown } = *self;
        [
            ("argument", argument),
            ("capture", capture),
            ("transient", transient),
            ("closed", closed),
            ("cancelled", cancelled),
            ("device_lost", device_lost),
            ("driver_shutdown", driver_shutdown),
        ]
    }
}

/// Errors by class, counted by many threads. (The standard library's atomics, and not loom's: no protocol reads them.)
#[derive(Debug, Default)]
pub(crate) struct ErrorTally([std::sync::atomic::AtomicU64; 7]);

impl ErrorTally {
    pub(crate) fn note(&self, error: &Error) {
        let at = match error.class() {
            ErrorClass::Argument => 0,
            ErrorClass::Capture => 1,
            ErrorClass::Transient => 2,
            ErrorClass::Closed => 3,
            ErrorClass::Cancelled => 4,
            ErrorClass::DeviceLost => 5,
            ErrorClass::DriverShutdown => 6,
        };
        // Relaxed, here and below: a sum, from which no thread concludes anything.
        self.0[at].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> ErrorCounts {
        let [argument, capture, transient, closed, cancelled, device_lost, driver_shutdown] =
            std::array::from_fn(|i| self.0[i].load(Ordering::Relaxed));
        ErrorCounts { argument, capture, transient, closed, cancelled, device_lost, driver_shutdown }
    }
}

/// Checkouts that ended with one of the errors that a pool refuses requests with, by reason:
/// [`PoolStats::refused`](crate::PoolStats::refused).
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build()?;
/// let most = pool.checkout(900_000)?;
/// assert!(pool.try_checkout(500_000).is_err());
/// assert_eq!((pool.stats().refused.exhausted, pool.stats().refused.total()), (1, 1));
/// # drop(most);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RefusedCounts {
    /// [`Error::Exhausted`]: nothing was free, and the call did not wait.
    pub exhausted: u64,
    /// [`Error::QueueFull`]: as many requests waited as the pool allows.
    pub queue_full: u64,
    /// [`Error::Impossible`]: no wait could help.
    pub impossible: u64,
    /// [`Error::Closed`]: the pool was shut down, or was while the request waited.
    pub closed: u64,
}

impl RefusedCounts {
    /// The checkouts that were refused for any of these reasons.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.by_reason().iter().map(|(_, count)| count).sum()
    }

    /// The counts with the names of their reasons: `exhausted`, `queue_full`, `impossible`, `closed`.
    #[must_use]
    pub fn by_reason(&self) -> [(&'static str, u64); 4] {
        let Self { exhausted, queue_full, impossible, closed } = *self;
        [("exhausted", exhausted), ("queue_full", queue_full), ("impossible", impossible), ("closed", closed)]
    }
}

/// Refused checkouts by reason, counted by many threads.
#[derive(Debug, Default)]
pub(crate) struct RefusedTally([std::sync::atomic::AtomicU64; 4]);

impl RefusedTally {
    /// Counts an error that is a refusal.
    pub(crate) fn note(&self, error: &Error) {
        let at = match error {
            Error::Exhausted { .. } => 0,
            Error::QueueFull { .. } => 1,
            Error::Impossible { .. } => 2,
            Error::Closed => 3,
            _ => return,
        };
        // Relaxed, here and below: as in `ErrorTally`.
        self.0[at].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> RefusedCounts {
        let [exhausted, queue_full, impossible, closed] =
            std::array::from_fn(|i| self.0[i].load(Ordering::Relaxed));
        RefusedCounts { exhausted, queue_full, impossible, closed }
    }
}

/// Segments checked out and returned on the slow path, by class, and those of threads whose caches are gone; kept under
/// the central pool's lock. Segments without a
/// class (large or aligned ones, which have a run of their own) take the slow path always.
#[derive(Debug)]
pub(crate) struct ClassTally {
    takes: [u64; CLASSES + 1],
    puts: [u64; CLASSES + 1],
    /// Bytes of segments without a class that are out.
    large_bytes: usize,
}

impl ClassTally {
    pub(crate) fn new() -> Self {
        Self { takes: [0; CLASSES + 1], puts: [0; CLASSES + 1], large_bytes: 0 }
    }

    pub(crate) fn took(&mut self, class: Option<Class>, granted: usize) {
        self.takes[class.map_or(CLASSES, Class::index)] += 1;
        if class.is_none() {
            self.large_bytes += granted;
        }
    }

    pub(crate) fn gave(&mut self, class: Option<Class>, granted: usize) {
        self.puts[class.map_or(CLASSES, Class::index)] += 1;
        if class.is_none() {
            self.large_bytes = self.large_bytes.saturating_sub(granted);
        }
    }

    /// Counts on the checkouts and returns that a thread cache has counted.
    pub(crate) fn count_on(&mut self, class: Class, takes: u64, puts: u64) {
        let at = class.index();
        self.takes[at] = self.takes[at].wrapping_add(takes);
        self.puts[at] = self.puts[at].wrapping_add(puts);
    }

    /// Checkouts and returns of a class.
    pub(crate) fn of(&self, class: Option<Class>) -> (u64, u64) {
        let at = class.map_or(CLASSES, Class::index);
        (self.takes[at], self.puts[at])
    }

    pub(crate) fn large_bytes(&self) -> usize {
        self.large_bytes
    }
}

#[cfg(all(test, loom))]
mod loom_models {
    use std::sync::Arc;

    use loom::thread::spawn;

    use super::*;
    use crate::sync::{model, step};

    #[test]
    fn loom_histogram_counts() {
        model("histogram: two count while one reads", 3, || {
            let shared = Arc::new(SharedHistogram::new());
            let counters = [1, 3].map(|us| {
                let shared = shared.clone();
                spawn(move || {
                    step();
                    shared.record(Duration::from_micros(us));
                    step();
                    shared.record(Duration::from_micros(us));
                })
            });
            step();
            let early = shared.read();
            assert!(early.count() <= 4, "counted twice: {early:?}");
            for counter in counters {
                counter.join().unwrap();
            }
            let all = shared.read();
            assert_eq!((all.count(), all.sum()), (4, Duration::from_micros(8)), "at rest nothing is missing");
            assert!(all.since(&early).count() == 4 - early.count(), "what was counted stays counted");
        });
    }

    #[test]
    fn loom_histogram_same_bucket() {
        model("histogram: two count into one bucket", 3, || {
            let shared = Arc::new(SharedHistogram::new());
            let other = spawn({
                let shared = shared.clone();
                move || {
                    step();
                    shared.record(Duration::from_micros(1));
                }
            });
            step();
            shared.record(Duration::from_micros(1));
            other.join().unwrap();
            assert_eq!(shared.read().count(), 2, "at rest nothing is missing");
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn bounds_belong_to_their_bucket() {
        for (i, bound) in Histogram::BOUNDS_NS.into_iter().enumerate() {
            assert_eq!((bucket_of(bound), bucket_of(bound + 1)), (i, i + 1), "{bound} ns");
        }
        assert_eq!((bucket_of(0), bucket_of(1), bucket_of(u64::MAX)), (0, 0, BOUNDED));
        assert_eq!(Histogram::BOUNDS_NS[20], 1_048_576_000, "a bound of some 1.05 s");
    }

    #[test]
    fn an_empty_one_has_neither_mean_nor_quantile() {
        let empty = Histogram::default();
        assert_eq!((empty.mean(), empty.quantile(0.5), empty.count()), (None, None, 0));
    }

    fn durations() -> impl Strategy<Value = Vec<u64>> {
        // Log-uniform, so that every bucket is met, the unbounded one included.
        prop::collection::vec(
            (0u32..42, 0.0f64..1.0).prop_map(|(bits, f)| ((1u64 << bits) as f64 * (1.0 + f)) as u64),
            1..60,
        )
    }

    fn of(ns: &[u64]) -> Histogram {
        let mut histogram = Histogram::default();
        ns.iter().for_each(|ns| histogram.record(Duration::from_nanos(*ns)));
        histogram
    }

    proptest! {
        #[test]
        fn merging_and_subtracting_are_inverse(a in durations(), b in durations()) {
            let both: Vec<u64> = a.iter().chain(&b).copied().collect();
            let mut merged = of(&a);
            merged.merge(&of(&b));
            prop_assert_eq!(merged, of(&both));
            prop_assert_eq!(merged.since(&of(&a)), of(&b));
            prop_assert_eq!(merged.count() as usize, both.len());
            prop_assert_eq!(merged.sum(), Duration::from_nanos(both.iter().sum()));
        }

        #[test]
        fn a_quantile_is_at_most_twice_too_long(mut ns in durations(), q in 0.01f64..1.0) {
            let found = of(&ns).quantile(q);
            ns.sort_unstable();
            let exact = ns[((q * ns.len() as f64).ceil() as usize).max(1) - 1];
            match found {
                Some(bound) => {
                    let bound = bound.as_nanos() as u64;
                    prop_assert!(exact <= bound && (bound <= 1000 || bound < exact * 2), "{exact} in {bound}");
                }
                None => prop_assert!(exact > Histogram::BOUNDS_NS[BOUNDED - 1]),
            }
        }

        #[test]
        fn the_shared_one_counts_alike(ns in durations()) {
            let shared = SharedHistogram::new();
            ns.iter().for_each(|ns| shared.record(Duration::from_nanos(*ns)));
            prop_assert_eq!(shared.read(), of(&ns));
        }
    }
}
