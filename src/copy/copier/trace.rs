//! The span of a transfer: from when it was started until nothing of it is under way any more.
//!
//! The span is made on the thread that starts the transfer, so that it lies within that thread's spans. The thread that
//! ends the transfer fills it in and closes it, before any waiter hears of the end. The span is never entered: workers
//! interleave the chunks of many transfers, and a chunk is too small for a span. Subscribers are foreign code, so they
//! are called under no lock.
//!
//! A server that answers each request with a transfer would fill its log with their spans: those of less than [`LARGE`]
//! are for debugging.

use std::time::Duration;

use tracing::field::Empty;

use super::types::{Direction, Priority};
use crate::error::{Error, Result};
use crate::escape::{TEXT, clean};
use crate::foreign::{self, Span};

/// Bytes from which a transfer's span is an INFO one.
const LARGE: u64 = 16 << 20;

/// Makes the span at a level.
macro_rules! transfer {
    ($level:ident, $($field:ident),*) => {
        foreign::span!(
            $level, target: "pinpool::copier", "transfer", $($field,)*
            outcome = Empty, copied_bytes = Empty, seconds = Empty, error = Empty
        )
    };
}

/// See the module's page. Dropped without an end, the span closes and says nothing of how it went.
#[derive(Debug)]
pub(super) struct Trace(Span);

impl Trace {
    pub(super) fn begin(
        device: &str,
        direction: Direction,
        priority: Priority,
        bytes: u64,
        what: &str,
    ) -> Self {
        let direction = match direction {
            Direction::Up => "upload",
            Direction::Down => "download",
        };
        let priority = match priority {
            Priority::Bulk => "bulk",
            Priority::Foreground => "foreground",
        };
        let what = &*clean(what, TEXT);
        Self(match bytes {
            LARGE.. => transfer!(INFO, device, direction, priority, bytes, what),
            _ => transfer!(DEBUG, device, direction, priority, bytes, what),
        })
    }

    /// It is over, after so many bytes.
    pub(super) fn end(&self, result: &Result<()>, copied: u64, elapsed: Duration) {
        self.0.record(|span| {
            let outcome = match result {
                Ok(()) => "done",
                Err(Error::Cancelled { .. }) => "cancelled",
                Err(_) => "failed",
            };
            span.record("outcome", outcome);
            span.record("copied_bytes", copied);
            span.record("seconds", elapsed.as_secs_f64());
            if let (Err(error), "failed") = (result, outcome) {
                span.record("error", tracing::field::display(error));
            }
        });
    }
}
