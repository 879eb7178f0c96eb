//! What is counted where it happens: durations, errors by class, checkouts by size class.
//!
//! These are numbers and nothing else. They lie low in the crate, so that every layer can count;
//! the snapshot, at the other end, reads, adds and names them. Two rules keep them cheap:
//!
//! - A hit touches nothing here. Durations are taken on slow paths only, and of a sample of known
//!   size where all of them would cost too much.
//! - A count under a lock is a plain number ([`Histogram`], [`ClassTally`]). A count that many
//!   threads make without a lock is a relaxed atomic ([`ErrorTally`]).
//!
//! All histograms have the same fixed buckets, so that any two can be added, and the difference of
//! two is one. Doubling bounds are coarse for a benchmark and right for an operator: durations of
//! interest span twenty powers of two, and a change by a factor of two is worth acting upon.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::error::{Error, ErrorClass};
use crate::segment::{CLASSES, Class};

/// Buckets with an upper bound.
const BOUNDED: usize = 31;

/// Upper bounds of the buckets, each included in its bucket.
pub(super) const BOUNDS: [Duration; BOUNDED] = {
    let mut bounds = [Duration::ZERO; BOUNDED];
    let mut i = 0;
    while i < BOUNDED {
        bounds[i] = Duration::from_micros(1 << i);
        i += 1;
    }
    bounds
};

/// Durations in fixed buckets: upper bounds of 1 us times powers of two, and one for the rest.
///
/// An earlier reading can be [subtracted](Self::since) from a later one of the same histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; BOUNDED + 1],
    sum_ns: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: [0; BOUNDED + 1], sum_ns: 0 }
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Histogram {
    /// Upper bounds of the buckets in seconds, as exporters take them: 1 us times powers of two.
    /// Each is included in its bucket; durations beyond the last bound are in one more bucket.
    #[must_use]
    pub fn bounds_seconds() -> [f64; BOUNDED] {
        BOUNDS.map(|bound| bound.as_secs_f64())
    }

    /// Counts a duration.
    pub(crate) fn record(&mut self, duration: Duration) {
        self.counts[BOUNDS.partition_point(|bound| *bound < duration)] += 1;
        self.sum_ns = self.sum_ns.saturating_add(nanoseconds(duration));
    }

    /// The number of durations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sum of the durations.
    #[must_use]
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns)
    }

    /// The upper bound of each bucket and the durations in it, shortest first. The bound belongs to
    /// the bucket; the last bucket has none. Buckets do not include those before them.
    pub fn buckets(
        &self,
    ) -> impl DoubleEndedIterator<Item = (Option<Duration>, u64)> + ExactSizeIterator + '_ {
        self.counts.iter().enumerate().map(|(i, count)| (BOUNDS.get(i).copied(), *count))
    }

    /// Adds the durations of another histogram.
    pub(crate) fn merge(&mut self, other: &Self) {
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

    /// An upper bound of the `q`-quantile (0.0 to 1.0): its bucket's bound, at most twice as long
    /// as the quantile. `None` for an empty histogram, and for a quantile beyond the last bound.
    #[must_use]
    pub fn quantile(&self, q: f64) -> Option<Duration> {
        let count = self.count();
        let rank = ((q.clamp(0.0, 1.0) * count as f64).ceil() as u64).max(1);
        let mut below = 0;
        let at = self.counts.iter().position(|n| {
            below += n;
            below >= rank
        });
        BOUNDS.get(at?).copied()
    }
}

/// Errors, counted by their [class](ErrorClass).
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
    /// The sum of all counts.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.by_class().iter().map(|(_, count)| count).sum()
    }

    /// Each count with its name, which is the value of the metric's label.
    #[must_use]
    pub fn by_class(&self) -> [(&'static str, u64); ERROR_CLASSES] {
        [
            (ErrorClass::Argument, self.argument),
            (ErrorClass::Capture, self.capture),
            (ErrorClass::Transient, self.transient),
            (ErrorClass::Closed, self.closed),
            (ErrorClass::Cancelled, self.cancelled),
            (ErrorClass::DeviceLost, self.device_lost),
            (ErrorClass::DriverShutdown, self.driver_shutdown),
        ]
        .map(|(class, count)| (class.name(), count))
    }
}

const ERROR_CLASSES: usize = ErrorClass::DriverShutdown as usize + 1;

/// Counts of errors that many threads make, by class in the order of [`ErrorClass`]. The atomics
/// are the standard library's: no protocol reads them. They are relaxed: no thread concludes from a
/// count what another has done.
#[derive(Debug, Default)]
pub(crate) struct ErrorTally([AtomicU64; ERROR_CLASSES]);

impl ErrorTally {
    pub(crate) fn note(&self, error: &Error) {
        self.0[error.class() as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> ErrorCounts {
        let counts = self.0.each_ref().map(|count| count.load(Ordering::Relaxed));
        let [argument, capture, transient, closed, cancelled, device_lost, driver_shutdown] = counts;
        ErrorCounts { argument, capture, transient, closed, cancelled, device_lost, driver_shutdown }
    }
}

/// The segments of one size class. Part of [`Snapshot`](super::Snapshot).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClassStats {
    /// Bytes from one segment to the next. `None`: segments without a class, in whole pages.
    pub stride: Option<usize>,
    /// Segments that are cut and can be checked out. (Those without a class are cut on demand.)
    pub free: u64,
    /// The part of the free segments that is cached for the next checkouts.
    pub cached: u64,
    /// Segments that are checked out, in flight or quarantined.
    pub out: u64,
    /// Bytes of the segments that are out.
    pub out_bytes: usize,
    /// Segments checked out since the pool was built.
    pub checkouts: u64,
    /// Segments that came back since the pool was built.
    pub returns: u64,
}

/// Segments checked out and returned on the slow path, by class, and by threads whose caches are
/// gone; under the central pool's lock. Segments without a class (large or aligned) always take
/// the slow path. Counts wrap: a cache may count the return of the slow path's checkout.
#[derive(Clone, Debug)]
pub(crate) struct ClassTally {
    /// Checkouts and returns of each class, and last of segments without one.
    counts: [(u64, u64); CLASSES + 1],
    /// Bytes of segments without a class that are out.
    large_bytes: u64,
}

impl ClassTally {
    pub(crate) fn new() -> Self {
        Self { counts: [(0, 0); CLASSES + 1], large_bytes: 0 }
    }

    /// Counts on the checkouts and returns that a thread cache has counted.
    pub(crate) fn count_on(&mut self, class: impl Into<Option<Class>>, takes: u64, puts: u64) {
        let (taken, put) = &mut self.counts[class.into().map_or(CLASSES, Class::index)];
        (*taken, *put) = (taken.wrapping_add(takes), put.wrapping_add(puts));
    }

    pub(crate) fn took(&mut self, class: Option<Class>, granted: usize) {
        self.count_on(class, 1, 0);
        if class.is_none() {
            self.large_bytes = self.large_bytes.wrapping_add(granted as u64);
        }
    }

    pub(crate) fn gave(&mut self, class: Option<Class>, granted: usize) {
        self.count_on(class, 0, 1);
        if class.is_none() {
            self.large_bytes = self.large_bytes.wrapping_sub(granted as u64);
        }
    }

    /// All checkouts and returns, and the bytes that are out.
    pub(crate) fn sums(&self) -> (u64, u64, u64) {
        let (mut all_takes, mut all_puts, mut out) = (0u64, 0u64, self.large_bytes);
        for (at, (takes, puts)) in self.counts.iter().enumerate() {
            (all_takes, all_puts) = (all_takes.wrapping_add(*takes), all_puts.wrapping_add(*puts));
            let stride = Class::new(at).map_or(0, Class::stride) as u64;
            out = out.wrapping_add(takes.wrapping_sub(*puts).wrapping_mul(stride));
        }
        (all_takes, all_puts, out)
    }

    /// Checkouts and returns of a class.
    pub(crate) fn of(&self, class: Option<Class>) -> (u64, u64) {
        self.counts[class.map_or(CLASSES, Class::index)]
    }

    pub(crate) fn large_bytes(&self) -> usize {
        self.large_bytes as usize
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn bounds_belong_to_their_bucket() {
        for (i, bound) in BOUNDS.into_iter().enumerate() {
            let mut both = of(&[nanoseconds(bound), nanoseconds(bound) + 1]);
            assert_eq!((both.counts[i], both.counts[i + 1]), (1, 1), "{bound:?}");
            both.merge(&of(&[0, 1, u64::MAX]));
            assert_eq!((both.buckets().next().unwrap().1 >= 2, both.count()), (true, 5));
        }
        assert_eq!(BOUNDS[20], Duration::from_nanos(1_048_576_000), "a bound of some 1.05 s");
        assert_eq!(Histogram::default().quantile(0.5), None);
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
                None => prop_assert!(exact > nanoseconds(BOUNDS[BOUNDED - 1])),
            }
        }
    }
}
