//! The bound on the bytes a second of a copier's bulk copies, of both directions together.

use std::time::{Duration, Instant};

use crate::locks::Mutex;

/// By so much a copy may come late without lowering the rate.
const SLACK: Duration = Duration::from_millis(10);
/// Effectively infinite.
const FAR: Duration = Duration::from_secs(1 << 30);

pub(super) struct Rate {
    /// `None`: no bound.
    per_second: Option<u64>,
    /// When the next copy may go.
    next: Mutex<Instant>,
}

impl Rate {
    pub(super) fn new(per_second: Option<u64>) -> Self {
        Self { per_second, next: Mutex::new(Instant::now()) }
    }

    /// Whether a copy of `bytes` bytes may go now. If so, it is counted.
    pub(super) fn is_due(&self, bytes: usize) -> bool {
        let Some(per_second) = self.per_second else { return true };
        let (now, mut next) = (Instant::now(), self.next.lock());
        if now < *next {
            return false;
        }
        let since = (*next).max(now.checked_sub(SLACK).unwrap_or(now));
        let takes = Duration::try_from_secs_f64(bytes as f64 / per_second as f64).unwrap_or(FAR);
        *next = since.checked_add(takes.min(FAR)).unwrap_or(since);
        true
    }
}
