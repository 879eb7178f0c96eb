//! The handle of what a device may still read or write: to be waited for, awaited, asked, or dropped.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::Lend;
use crate::error::{Error, Result, SubmitError};
use crate::sealed::KEY;
use crate::stream::Stream;
use crate::stream::awaited::Place;
use crate::stream::timeline::{Ticket, WaitKey};

#[derive(Debug)]
enum Tickets {
    One(Ticket),
    /// For a hold over several streams.
    Many(Vec<Ticket>),
    /// For a copy that goes through a queue.
    Queued(Place),
}

impl Tickets {
    fn all(&self) -> &[Ticket] {
        match self {
            Self::One(ticket) => std::slice::from_ref(ticket),
            Self::Many(tickets) => tickets,
            Self::Queued(_) => &[],
        }
    }
}

/// Something a device may still read or write. Wait for it, await it (no runtime is assumed), ask, or drop it.
///
/// Dropped, the buffer goes back to its pool once the device is done, with nobody waiting. An error means that nobody
/// can prove that the device is done: the buffer is quarantined, and the error says why. Whether the copies
/// of dropped handles came through, [`Stream::synchronize`](crate::Stream::synchronize) tells afterwards.
#[must_use = "dropping it is fine: the buffer returns by itself when the device is done; say so with `drop`"]
pub struct InFlight<B: Lend> {
    tickets: Tickets,
    value: Option<B>,
    written: Option<usize>,
    /// Which of the tickets has our waker, and under which key.
    waker: (usize, Option<WaitKey>),
}

impl<B: Lend> InFlight<B> {
    pub(crate) fn new(ticket: Ticket, value: B, written: Option<usize>) -> Self {
        Self { tickets: Tickets::One(ticket), value: Some(value), written, waker: (0, None) }
    }

    /// A copy that a queue will submit.
    pub(crate) fn queued(place: Place, value: B, written: Option<usize>) -> Self {
        Self { tickets: Tickets::Queued(place), value: Some(value), written, waker: (0, None) }
    }

    /// Makes the stream start its later work only after this is done.
    pub(crate) fn precede(&self, stream: &Stream) -> Result<()> {
        if let Tickets::Queued(place) = &self.tickets {
            return place.line.precede(&place.range, stream);
        }
        self.tickets.all().iter().try_for_each(|ticket| {
            if ticket.timeline.is_complete(ticket.seq)? {
                return Ok(());
            }
            stream.follow(&ticket.timeline)
        })
    }

    /// The driver call has returned, and this is the sequence number.
    pub(crate) fn submitted(&mut self, seq: u64) {
        if let Tickets::One(ticket) = &mut self.tickets {
            ticket.seq = seq;
        }
    }

    /// A hold over several streams, whose tickets follow.
    pub(crate) fn joint(value: B, streams: usize) -> Self {
        let tickets = Tickets::Many(Vec::with_capacity(streams));
        Self { tickets, value: Some(value), written: None, waker: (0, None) }
    }

    pub(crate) fn add(&mut self, ticket: Ticket) {
        if let Tickets::Many(tickets) = &mut self.tickets {
            tickets.push(ticket);
        }
    }

    /// Whether the device is done. Never waits.
    ///
    /// # Errors
    /// What the stream was lost with: it never will be.
    pub fn is_done(&self) -> Result<bool> {
        if let Tickets::Queued(place) = &self.tickets {
            return place.poll_done();
        }
        for ticket in self.tickets.all() {
            if !ticket.timeline.poll_complete(ticket.seq)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether it is done, or lost, after at most so long.
    pub(crate) fn is_done_within(&self, time: Duration) -> bool {
        !matches!(self.wait_all(Instant::now().checked_add(time)), Err(Error::Timeout(_)))
    }

    fn finish(&mut self) -> Result<B> {
        match self.value.take() {
            Some(value) => value.finish(self.written, KEY),
            None => Err(Error::Unsupported("an in-flight handle was polled after it was ready".into())),
        }
    }

    fn wait_all(&self, deadline: Option<Instant>) -> Result<()> {
        if let Tickets::Queued(place) = &self.tickets {
            return place.wait(deadline);
        }
        self.tickets.all().iter().try_for_each(|t| t.timeline.wait(t.seq, deadline))
    }

    /// Waits until the device is done and gives the buffer back, host-ready.
    ///
    /// # Errors
    /// What the stream was lost with. [`Error::Capturing`] where that cannot be known before a capture of the stream
    /// ends; the buffer then returns by itself. (On a stepped device also [`Error::Timeout`], where nothing can move
    /// any more.)
    pub fn wait(mut self) -> Result<B> {
        self.wait_all(None)?;
        self.finish()
    }

    /// The same, for at most so long.
    ///
    /// # Errors
    /// [`Error::Timeout`] and [`Error::Capturing`] come with the handle, to be waited for again or dropped.
    #[allow(clippy::result_large_err, reason = "the error carries the handle back")]
    pub fn wait_timeout(mut self, timeout: Duration) -> Result<B, SubmitError<Self>> {
        let since = Instant::now();
        let waited = self.wait_all(since.checked_add(timeout)).map_err(|error| error.waited(since));
        match waited.and_then(|()| self.finish()) {
            Ok(value) => Ok(value),
            Err(error @ (Error::Timeout(_) | Error::Capturing { .. })) => {
                Err(SubmitError { error, buffer: Some(self) })
            }
            Err(error) => Err(SubmitError { error, buffer: None }),
        }
    }
}

impl<B: Lend> Future for InFlight<B> {
    type Output = Result<B>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<B>> {
        let this = &mut *self;
        if let Tickets::Queued(place) = &this.tickets {
            return match place.wake_later(&mut this.waker.1, cx.waker()) {
                Ok(true) => Poll::Ready(this.finish()),
                Ok(false) => Poll::Pending,
                Err(error) => {
                    if let Some(value) = this.value.take() {
                        value.abandon(KEY);
                    }
                    Poll::Ready(Err(error))
                }
            };
        }
        // One at a time: the waker is left with the first that is not done, and the others wait their turn.
        while let Some(ticket) = this.tickets.all().get(this.waker.0) {
            match ticket.timeline.wake_later(ticket.seq, &mut this.waker.1, cx.waker()) {
                Ok(true) => this.waker.0 += 1,
                Ok(false) => return Poll::Pending,
                Err(error) => {
                    if let Some(value) = this.value.take() {
                        value.abandon(KEY);
                    }
                    return Poll::Ready(Err(error));
                }
            }
        }
        Poll::Ready(this.finish())
    }
}

impl<B: Lend> Drop for InFlight<B> {
    fn drop(&mut self) {
        // First: a value that is still here when this ends, by a panic too, is dropped as if it were host-ready.
        if let Some(value) = self.value.take() {
            value.abandon(KEY);
        }
        if let Tickets::Queued(place) = &self.tickets {
            return place.line.forget_waker(&mut self.waker.1);
        }
        if let Some(ticket) = self.tickets.all().get(self.waker.0) {
            ticket.timeline.forget_waker(&mut self.waker.1);
        }
    }
}

impl<B: Lend> std::fmt::Debug for InFlight<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let seqs: Vec<u64> = self.tickets.all().iter().map(|t| t.seq).collect();
        f.debug_struct("InFlight").field("sequence numbers", &seqs).finish_non_exhaustive()
    }
}
