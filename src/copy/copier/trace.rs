//! The span of a transfer: from when it was started until nothing of it is under way any more.
//!
//! The span is made on the thread that starts the transfer, so that it lies within that thread's
//! spans. The thread that ends the transfer closes it, before any waiter hears of the end. It is
//! never entered: workers interleave many transfers. Subscribers are called under no lock.
//!
//! `error.type` and `otel.status_code` are OpenTelemetry's names, by which tracing-opentelemetry's
//! layer marks a failed span.

use std::time::Duration;

use tracing::field::{Empty, display};

use super::types::{Direction, Priority};
use crate::error::{Error, Result};
use crate::escape::text;
use crate::foreign::{self, Span};

/// Transfers from this length on have an INFO span. Shorter ones, which answer requests, have a
/// DEBUG span: they would fill a server's log.
const LARGE: u64 = 16 << 20;

/// Makes the span at a level.
macro_rules! transfer {
    ($level:ident, $($field:ident),*) => {
        foreign::span!(
            $level, target: "pinpool::copier", "transfer", $($field,)*
            outcome = Empty, copied_bytes = Empty, seconds = Empty, error = Empty, "error.type" = Empty,
            otel.status_code = Empty
        )
    };
}

/// See the module's page. Dropped without an end, the span closes and says nothing of how it went.
pub(super) struct Trace(Span);

impl Trace {
    pub(super) fn begin(device: &str, way: Direction, priority: Priority, bytes: u64, what: &str) -> Self {
        let direction = if way == Direction::Up { "upload" } else { "download" };
        let priority = match priority {
            Priority::Foreground => "foreground",
            Priority::Bulk => "bulk",
        };
        let what = &*text(what);
        Self(match bytes {
            LARGE.. => transfer!(INFO, device, direction, priority, bytes, what),
            _ => transfer!(DEBUG, device, direction, priority, bytes, what),
        })
    }

    /// Records how the transfer ended, after `copied` bytes, and closes the span.
    pub(super) fn end(&self, result: &Result<()>, copied: u64, elapsed: Duration) {
        self.0.record(|span| {
            let (outcome, error) = match result {
                Ok(()) => ("done", None),
                Err(Error::Cancelled { .. }) => ("cancelled", None),
                Err(error) => ("failed", Some(error)),
            };
            span.record("outcome", outcome);
            span.record("copied_bytes", copied);
            span.record("seconds", elapsed.as_secs_f64());
            if let Some(error) = error {
                span.record("error", display(error));
                span.record("error.type", error.class().name());
                span.record("otel.status_code", "ERROR");
            }
        });
    }
}
