//! What is waited for by number, and is no sequence number of a timeline.
//!
//! A copy that goes through a queue has no sequence number before the queue has submitted it. What it has from the
//! start is its number in a line, and lines are finished from the front. Handles ([`crate::buffer::InFlight`]) know
//! lines only by this trait, since what makes them is far below.

use std::fmt;
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use super::Stream;
use super::timeline::WaitKey;
use crate::error::Result;

/// A line. Numbers start at 1; a range is of the numbers that one handle waits for.
pub(crate) trait Awaited: fmt::Debug + Send + Sync {
    /// Whether all up to the range's end are done. Has a look, and never waits.
    ///
    /// # Errors
    /// What one of the range failed with, or all were lost with.
    fn poll_done(&self, range: &Range) -> Result<bool>;

    /// Waits until they are.
    ///
    /// # Errors
    /// The same, and [`Error::Timeout`](crate::Error::Timeout).
    fn wait(&self, range: &Range, deadline: Option<Instant>) -> Result<()>;

    /// Leaves a waker, in place of the one left before under `key`. `true`: done already, nothing was left.
    fn wake_later(&self, range: &Range, key: &mut Option<WaitKey>, waker: &Waker) -> Result<bool>;

    /// Takes it back.
    fn forget_waker(&self, key: &mut Option<WaitKey>);

    /// Makes `stream` start its later work only after they are done. Waits until they are submitted, no longer.
    fn precede(&self, range: &Range, stream: &Stream) -> Result<()>;

    /// Nobody will ask about the range any more. `quiet`: what its copies were lent does not tell that later.
    fn leave(&self, range: &Range, quiet: bool);
}

/// Numbers of a line, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) first: u64,
    pub(crate) last: u64,
}

impl Range {
    /// Up to `last`, by someone who asks about no copy's failure.
    pub(crate) fn whole(last: u64) -> Self {
        Self { first: u64::MAX, last }
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.first > self.last
    }
}

/// A handle's place in a line. Dropped, it leaves it.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) line: Arc<dyn Awaited>,
    pub(crate) range: Range,
    /// What was lent does not know whether this is there: objects, as against segments.
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
