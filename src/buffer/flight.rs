//! The handle of what a device may still use: [`InFlight`], waited for, awaited, asked or dropped.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::Lend;
use crate::error::{Error, Result, SubmitError};
use crate::sealed::KEY;
use crate::stream::Stream;
use crate::stream::timeline::Ticket;

/// A copy or a hold in flight, with the buffer that a device may still read or write. Wait for it,
/// await it (under any async runtime), ask it, or drop it. What was submitted cannot be called off.
///
/// After a drop the buffer returns to its pool by itself once the device is done. If the stream is
/// lost, that is never known: the buffer is quarantined, and a wait returns the error that says
/// why. [`Stream::synchronize`](crate::Stream::synchronize) tells how such copies ended.
#[must_use = "dropping it is fine: the buffer returns by itself when the device is done; say so with `drop`"]
pub struct InFlight<B: Lend> {
    ticket: Ticket,
    value: Option<B>,
    written: Option<usize>,
    /// The key of the waker that was left with the timeline.
    waker: Option<u64>,
}

impl<B: Lend> InFlight<B> {
    pub(crate) fn new(ticket: Ticket, value: B, written: Option<usize>) -> Self {
        Self { ticket, value: Some(value), written, waker: None }
    }

    /// Makes later work of `stream` start only after this copy or hold is complete.
    pub(crate) fn precede(&self, stream: &Stream) -> Result<()> {
        if self.ticket.timeline.is_complete(self.ticket.seq)? {
            return Ok(());
        }
        stream.follow(&self.ticket.timeline)
    }

    /// The driver call has returned: sets the sequence number.
    pub(crate) fn submitted(&mut self, seq: u64) {
        self.ticket.seq = seq;
    }

    /// Whether the copy or hold is complete. Never waits.
    ///
    /// # Errors
    /// The error with which the stream was lost; else [as every call](Error#every-call).
    pub fn is_done(&self) -> Result<bool> {
        self.ticket.timeline.poll_complete(self.ticket.seq)
    }

    fn finish(&mut self) -> Result<B> {
        let polled = || Error::Unsupported("an in-flight handle was polled after it was ready".into());
        self.value.take().ok_or_else(polled)?.finish(self.written, KEY)
    }

    /// Waits until the copy or hold is complete, and gives the buffer back, host-ready.
    ///
    /// # Errors
    /// [As every wait](Error#waits). After [`Error::Capturing`] the buffer returns by itself.
    pub fn wait(mut self) -> Result<B> {
        self.ticket.timeline.wait(self.ticket.seq, None)?;
        self.finish()
    }

    /// Waits like [`wait`](Self::wait), for at most `timeout`.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait). [`Error::Timeout`] and [`Error::Capturing`] come with the
    /// handle.
    #[allow(clippy::result_large_err, reason = "the error carries the handle back")]
    pub fn wait_timeout(mut self, timeout: Duration) -> Result<B, SubmitError<Self>> {
        let since = Instant::now();
        let waited = self.ticket.timeline.wait(self.ticket.seq, since.checked_add(timeout));
        waited.map_err(|error| error.waited(since)).and_then(|()| self.finish()).map_err(|error| {
            let stays = matches!(error, Error::Timeout(_) | Error::Capturing { .. });
            SubmitError { error, buffer: stays.then_some(self) }
        })
    }
}

impl<B: Lend> Future for InFlight<B> {
    type Output = Result<B>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<B>> {
        let this = &mut *self;
        match this.ticket.timeline.wake_later(this.ticket.seq, &mut this.waker, cx.waker()) {
            Ok(true) => Poll::Ready(this.finish()),
            Ok(false) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl<B: Lend> Drop for InFlight<B> {
    fn drop(&mut self) {
        // First: a value that is still here when the handle's fields are dropped, by a panic too,
        // would be returned as if it were host-ready.
        if let Some(value) = self.value.take() {
            value.abandon(KEY);
        }
        self.ticket.timeline.forget_waker(self.ticket.seq, &mut self.waker);
    }
}

impl<B: Lend> std::fmt::Debug for InFlight<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InFlight").field("seq", &self.ticket.seq).finish_non_exhaustive()
    }
}
