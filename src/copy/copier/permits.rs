//! How many bulk copies may be in flight, and how fast.
//!
//! Bulk copies leave room for others: at most a *depth* of them is in flight in each direction, fewer while there is
//! foreground work now and then, and one while a foreground copy is in flight or while a program has asked for it
//! ([`GiveWay`](super::GiveWay)). A rate bounds the bytes a second of both directions together. Foreground copies need
//! no permit of these.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::config::{Priority, Settings};
use crate::locks::Mutex;

/// For how long after foreground work bulk copies are shallow.
const SHALLOW_FOR: Duration = Duration::from_millis(100);
/// By so much a copy may come late without lowering the rate.
const SLACK: Duration = Duration::from_millis(10);
/// As good as never.
const FAR: Duration = Duration::from_secs(1 << 30);

/// See the module's page.
#[derive(Debug)]
pub(super) struct Permits {
    depth: usize,
    shallow: usize,
    /// Foreground copies in flight, and guards for which way is given. Relaxed throughout, as is the next one: a hint
    /// for copies that come later.
    urgent: AtomicUsize,
    /// When there was foreground work, in milliseconds since `start`, plus 1.
    last_urgent: AtomicU64,
    start: Instant,
    rate: Mutex<Rate>,
}

#[derive(Debug)]
struct Rate {
    per_second: Option<u64>,
    /// When the next bulk copy may go.
    next: Instant,
}

impl Permits {
    pub(super) fn new(settings: &Settings) -> Self {
        let start = Instant::now();
        Self {
            depth: settings.depth,
            shallow: settings.shallow,
            urgent: AtomicUsize::new(0),
            last_urgent: AtomicU64::new(0),
            start,
            rate: Mutex::new(Rate { per_second: settings.rate, next: start }),
        }
    }

    /// Bulk copies that may be in flight in one direction.
    pub(super) fn depth(&self) -> usize {
        if self.urgent.load(Ordering::Relaxed) > 0 {
            return 1;
        }
        match self.last_urgent.load(Ordering::Relaxed) {
            0 => self.depth,
            last => {
                let since = self.start.elapsed().saturating_sub(Duration::from_millis(last));
                if since < SHALLOW_FOR { self.shallow } else { self.depth }
            }
        }
    }

    /// Foreground work begins, or way is given.
    pub(super) fn hurry(&self) {
        self.urgent.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn calm(&self) {
        let now = self.start.elapsed().as_millis() as u64 + 1;
        self.last_urgent.store(now, Ordering::Relaxed);
        self.urgent.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn set_rate(&self, per_second: Option<u64>) {
        let mut rate = self.rate.lock();
        let (old, new) = (rate.per_second, per_second.filter(|rate| *rate > 0));
        rate.per_second = new;
        let now = Instant::now();
        // The bytes that the next copy still waits for.
        let left = old.map_or(0.0, |old| rate.next.saturating_duration_since(now).as_secs_f64() * old as f64);
        rate.next = new.map_or(now, |new| after(now, left, new));
    }

    /// Whether a copy of so many bytes may go now. If so, it counts.
    pub(super) fn may_go(&self, priority: Priority, bytes: usize) -> bool {
        if priority == Priority::Foreground {
            return true;
        }
        let mut rate = self.rate.lock();
        let Some(per_second) = rate.per_second else { return true };
        let now = Instant::now();
        if now < rate.next {
            return false;
        }
        // A copy that comes a little late does not lower the rate.
        let since = rate.next.max(now.checked_sub(SLACK).unwrap_or(now));
        rate.next = after(since, bytes as f64, per_second);
        true
    }
}

/// When so many bytes have gone at this rate.
fn after(since: Instant, bytes: f64, per_second: u64) -> Instant {
    let takes = Duration::try_from_secs_f64(bytes / per_second as f64).unwrap_or(FAR);
    since.checked_add(takes.min(FAR)).unwrap_or(since)
}
