//! How many bulk copies may be in flight, and how fast.
//!
//! Bulk copies leave room for others: at most a *depth* of them is in flight in each direction, and one while a foreground
//! copy is in flight. A rate bounds the bytes a second of both directions together. Foreground copies need no permit of
//! these.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::types::Settings;
use crate::locks::Mutex;

/// By so much a copy may come late without lowering the rate.
const SLACK: Duration = Duration::from_millis(10);
/// Effectively infinite.
const FAR: Duration = Duration::from_secs(1 << 30);

/// See the module's page.
#[derive(Debug)]
pub(super) struct Permits {
    depth: usize,
    /// Foreground copies in flight. Relaxed throughout: a hint for copies that come later.
    urgent: AtomicUsize,
    /// Bytes a second.
    rate: Option<u64>,
    /// When the next bulk copy may go.
    next: Mutex<Instant>,
}

impl Permits {
    pub(super) fn new(settings: &Settings) -> Self {
        let Settings { depth, rate, .. } = *settings;
        Self { depth, urgent: AtomicUsize::new(0), rate, next: Mutex::new(Instant::now()) }
    }

    /// Bulk copies that may be in flight in one direction.
    pub(super) fn depth(&self) -> usize {
        if self.urgent.load(Ordering::Relaxed) > 0 { 1 } else { self.depth }
    }

    /// A foreground copy begins.
    pub(super) fn hurry(&self) {
        self.urgent.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn calm(&self) {
        self.urgent.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether a bulk copy of so many bytes may go now. If so, it counts.
    pub(super) fn may_go(&self, bytes: usize) -> bool {
        let Some(per_second) = self.rate else { return true };
        let (now, mut next) = (Instant::now(), self.next.lock());
        if now < *next {
            return false;
        }
        // A copy that comes a little late does not lower the rate.
        let since = (*next).max(now.checked_sub(SLACK).unwrap_or(now));
        let takes = Duration::try_from_secs_f64(bytes as f64 / per_second as f64).unwrap_or(FAR);
        *next = since.checked_add(takes.min(FAR)).unwrap_or(since);
        true
    }
}
