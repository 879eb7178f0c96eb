//! What is counted where it happens: histograms of durations, errors by class, checkouts by size class.
//!
//! These are numbers and nothing else. They stand low in the crate, so that every layer can count; who reads them, adds
//! them up and names them is `telemetry`, at its other end. Two rules keep them cheap:
//!
//! - Nothing here is touched by a hit. Durations are taken on slow paths only, and where even that would be felt, of a
//!   sample of known size.
//! - What is counted under a lock anyway is a plain number ([`Histogram`], [`ClassTally`]); what many threads count
//!   without one is a relaxed atomic ([`SharedHistogram`], [`ErrorTally`]).
//!
//! # Buckets
//!
//! All histograms have the same fixed buckets, so that any two can be added and a difference of two is one again: upper
//! bounds of 1 us, 2 us, 4 us, and so on up to 2^30 us (some 18 minutes), a bound belonging to its bucket, and one
//! bucket for what is longer. Doubling is coarse for a benchmark and right for an operator: an interval of twenty
//! powers of two is of interest, and a factor of two is what one acts upon.

use std::time::Duration;

use crate::error::{Error, ErrorClass};
use crate::segment::{CLASSES, Class};
use crate::sync::{AtomicU64, Ordering};

/// Buckets with an upper bound.
const BOUNDED: usize = 31;

/// Buckets, the unbounded one included. Under loom a few will do, since each is an atomic of the model.
const KEPT_BUCKETS: usize = if cfg!(loom) { 2 } else { BOUNDED + 1 };

/// Durations, counted in fixed buckets: upper bounds of 1 us times powers of two, and one bucket for the rest.
///
/// Histograms can be [merged](Self::merge), and [subtracted](Self::since) from a later reading of themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; BOUNDED + 1],
    sum_ns: u64,
}

/// One bucket of a [`Histogram`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Bucket {
    /// The longest duration in it; `None`: anything longer than the bucket before.
    pub upper: Option<Duration>,
    /// Durations in this bucket alone (not in those before).
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
    /// Upper bounds of the buckets, in nanoseconds, each included in its bucket: 1,000 times powers of two. What is
    /// longer than the last is in one more bucket.
    pub const BOUNDS_NS: [u64; BOUNDED] = {
        let mut bounds = [0; BOUNDED];
        let mut i = 0;
        while i < BOUNDED {
            bounds[i] = 1000 << i;
            i += 1;
        }
        bounds
    };

    /// The same in seconds, as exporters want them.
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

    /// Durations counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Their sum. (Of what several threads count at once, it may lack what is being counted just now.)
    #[must_use]
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns)
    }

    /// Their mean. `None` if there are none.
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

    /// Adds another one's durations.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(other.counts) {
            *mine = mine.saturating_add(theirs);
        }
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
    }

    /// What was counted since `earlier` was read from the same place.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut counts = self.counts;
        for (count, before) in counts.iter_mut().zip(earlier.counts) {
            *count = count.saturating_sub(before);
        }
        Self { counts, sum_ns: self.sum_ns.saturating_sub(earlier.sum_ns) }
    }

    /// An upper bound of the `q`-quantile (0.0 to 1.0): that of the bucket in which it lies, at most twice too long.
    /// `None` for an empty histogram, and where it lies beyond the last bound.
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
    // Relaxed, all of them: sums, not signals. Nothing is read on the strength of one.
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
        #[cfg(not(pinpool_planted = "histogram_adds_plainly"))]
        count.fetch_add(1, Ordering::Relaxed);
        #[cfg(pinpool_planted = "histogram_adds_plainly")]
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        // After its count: a mean taken just now is too small rather than absurd.
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

/// How many errors there were, by what they mean ([`ErrorClass`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ErrorCounts {
    /// Wrong calls.
    pub argument: u64,
    /// Calls refused because of a capture.
    pub capture: u64,
    /// Matters of the moment: out of memory, timed out.
    pub transient: u64,
    /// Calls that found the device lost, or lost it.
    pub device_lost: u64,
    /// Calls that came after the driver's end.
    pub shutdown: u64,
}

impl ErrorCounts {
    /// All of them.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.by_class().iter().map(|(_, count)| count).sum()
    }

    /// Each with the name that metrics have for it.
    #[must_use]
    pub fn by_class(&self) -> [(&'static str, u64); 5] {
        let Self { argument, capture, transient, device_lost, shutdown } = *self;
        [
            ("argument", argument),
            ("capture", capture),
            ("transient", transient),
            ("device_lost", device_lost),
            ("shutdown", shutdown),
        ]
    }
}

/// Errors by class, counted by many threads. (Not loom's: no protocol looks.)
#[derive(Debug, Default)]
pub(crate) struct ErrorTally([std::sync::atomic::AtomicU64; 5]);

impl ErrorTally {
    pub(crate) fn note(&self, error: &Error) {
        let at = match error.class() {
            ErrorClass::Argument => 0,
            ErrorClass::Capture => 1,
            ErrorClass::Transient => 2,
            ErrorClass::DeviceLost => 3,
            ErrorClass::Shutdown => 4,
        };
        // Relaxed, here and below: a sum, not a signal.
        self.0[at].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> ErrorCounts {
        let [argument, capture, transient, device_lost, shutdown] =
            std::array::from_fn(|i| self.0[i].load(Ordering::Relaxed));
        ErrorCounts { argument, capture, transient, device_lost, shutdown }
    }
}

/// Segments given out and returned on the slow path, by class; kept under the central pool's lock. Those without a
/// class (large or aligned ones, which have a run of their own) come and go by the slow path only.
#[derive(Debug)]
pub(crate) struct ClassTally {
    takes: [u64; CLASSES + 1],
    puts: [u64; CLASSES + 1],
    /// Bytes of those without a class that are out.
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

    /// Takes and returns of a class.
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
