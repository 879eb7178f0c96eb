//! What a handle waits for while its copy has no sequence number on a timeline.
//!
//! A copy queue submits a copy some time after the caller has handed it over, and only then the copy gets a sequence
//! number. From the start the copy has a number in one of the queue's *lines*. A line has copies in the order in which
//! they were handed over, and completes from the front. Handles ([`crate::buffer::InFlight`]) know lines by the trait
//! [`AwaitedCopy`] alone, since the queues are in a layer above.

use std::fmt;
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use super::Stream;
use super::timeline::WaitKey;
use crate::error::Result;

/// A line. Numbers start at 1; a range has the numbers that one handle waits for.
pub(crate) trait AwaitedCopy: fmt::Debug + Send + Sync {
    /// Whether all numbers up to the range's end are complete. May ask the driver; never waits.
    ///
    /// # Errors
    /// The error of a copy in the range, or the one with which the whole line was lost.
    fn poll_done(&self, range: &Range) -> Result<bool>;

    /// Waits until all numbers up to the range's end are complete.
    ///
    /// # Errors
    /// As for `poll_done`, and [`Error::Timeout`](crate::Error::Timeout).
    fn wait(&self, range: &Range, deadline: Option<Instant>) -> Result<()>;

    /// Leaves a waker, in place of the one left under `key` before. `true`: complete already, and no waker was left.
    fn wake_later(&self, range: &Range, key: &mut Option<WaitKey>, waker: &Waker) -> Result<bool>;

    /// Removes the waker that was left under `key`.
    fn forget_waker(&self, key: &mut Option<WaitKey>);

    /// Makes later work of `stream` start only after the range is complete. Waits until the range is submitted, no
    /// longer.
    fn precede(&self, range: &Range, stream: &Stream) -> Result<()>;

    /// The handle is dropped, and asks about the range no more. `quiet`: the resources of its copies cannot tell that
    /// the handle was dropped, so the line has to know it from this call.
    fn leave(&self, range: &Range, quiet: bool);
}

/// Numbers of a line, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) first: u64,
    pub(crate) last: u64,
}

impl Range {
    /// All numbers up to `last`, for a caller that does not ask about the failures of single copies.
    pub(crate) fn whole(last: u64) -> Self {
        Self { first: u64::MAX, last }
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.first > self.last
    }
}

/// A handle's place in a line. Dropping it leaves the line.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) line: Arc<dyn AwaitedCopy>,
    pub(crate) range: Range,
    /// The copy's resource does not show that this handle was dropped. A segment shows it by its state word; an object
    /// has none, so for objects this is `true`.
    pub(crate) quiet: bool,
}

impl Place {
    pub(crate) fn poll_done(&self) -> Result<bool> {
        self.line.poll_done(&self.range)
    }

    pub(crate) fn wait(&self, deadline: Option<Instant>) -> Result<()> {
        self.line.wait(&self.range, deadline)
    }

    pub(crate) fn wake_later(&self, key: &mut Option<WaitKey>, waker: &Waker) -> Result<bool> {
        self.line.wake_later(&self.range, key, waker)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.line.leave(&self.range, self.quiet);
    }
}
