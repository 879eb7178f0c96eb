//! The handle of a transfer.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::job::{END, Job, Progress, Values};
use super::{Copier, may_wait};
use crate::error::{Error, Result, SubmitError};
use crate::stream::Stream;

/// A transfer of a [`Copier`]. Wait for it, await it (no runtime is assumed), look at it, cancel
/// it, order streams behind it.
///
/// No other transfer is [ordered](super#ordering) with it: wait before another uses its memory.
///
/// Dropped, it goes on by itself, and what it owns returns or is dropped at its end.
/// [`cancel`](Self::cancel) stops it. Threads that share it in an `Arc` cancel it and wait for it
/// ([`wait_landed`](Self::wait_landed), [`outcome`](Self::outcome)); a task awaits `&mut` of it,
/// and cancels it when told to.
///
/// # After an error
/// The error belongs to the first byte, in the order of the call, whose chunk has failed. What lies
/// before [`Progress::landed_to`] has arrived, and maybe some of the rest. A source or sink comes
/// back with the error; buffers that a device may still use return to their pools.
#[must_use = "dropping it is fine: the transfer goes on; say so with `drop`"]
pub struct Transfer<T> {
    copier: Copier,
    job: Arc<Job>,
    values: Option<Arc<dyn Values<T>>>,
}

impl<T> Transfer<T> {
    pub(super) fn new(copier: Copier, job: Arc<Job>, values: Arc<dyn Values<T>>) -> Self {
        Self { copier, job, values: Some(values) }
    }

    /// How far the transfer has come. (In the child of a fork: not at all, and it is over.)
    #[must_use]
    pub fn progress(&self) -> Progress {
        if crate::os::forked() {
            return Progress { over: true, ..Progress::default() };
        }
        self.job.progress()
    }

    /// Whether the transfer is over, with or without an error. Then waiting for it returns at once.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.progress().over
    }

    /// Waits until the transfer is over, and gives back what the call was given: the source or
    /// sink, or the buffers in the order of the call.
    ///
    /// # Errors
    /// [As every transfer](Error#transfers), after its start.
    pub fn wait(mut self) -> Result<T, SubmitError<T>> {
        match self.finish() {
            Ok(()) => self.take(),
            Err(error) => Err(SubmitError { error, buffer: None }),
        }
    }

    /// Waits like [`wait`](Self::wait), for at most `timeout`. On a thread of the crate it only
    /// looks.
    ///
    /// # Errors
    /// [`Error::Timeout`] with the handle; else as for [`wait`](Self::wait), in the inner result.
    #[allow(clippy::type_complexity, clippy::result_large_err, reason = "the handle back, or the outcome")]
    pub fn wait_timeout(mut self, timeout: Duration) -> Result<Result<T, SubmitError<T>>, SubmitError<Self>> {
        let since = Instant::now();
        let timeout = if may_wait().is_ok() { timeout } else { Duration::ZERO };
        if self.is_over() || self.copier.workers.wait(&self.job, since.checked_add(timeout), END) {
            return Ok(self.take());
        }
        Err(SubmitError { error: Error::Timeout(Duration::ZERO.into()).waited(since), buffer: Some(self) })
    }

    /// How the transfer ended, for threads that share the handle. `None`: it is not over.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    #[must_use]
    pub fn outcome(&self) -> Option<Result<()>> {
        if crate::os::forked() {
            return Some(Err(Error::Forked));
        }
        self.job.outcome()
    }

    /// Waits until all bytes before this offset have arrived ([`Progress::landed_to`]), or the
    /// transfer is over. Returns whether they have arrived. On a thread of the crate it only looks.
    ///
    /// What has arrived can be used while the rest is under way, by all work and all transfers that
    /// are started from then on. Where a source blocks, a chunk's arrival is told when the thread
    /// that moves the chunk has returned from the source.
    #[must_use]
    pub fn wait_landed(&self, offset: u64) -> bool {
        if crate::os::forked() {
            return false;
        }
        if may_wait().is_ok() {
            self.copier.workers.wait(&self.job, None, offset);
        }
        self.progress().landed_to >= offset
    }

    /// [`wait_landed`](Self::wait_landed) for a task, which is woken when more has arrived. Any
    /// number of tasks and threads may wait so for one transfer.
    pub fn poll_landed(&self, cx: &mut Context<'_>, offset: u64) -> Poll<bool> {
        match self.poll_at(cx, offset.min(END - 1)) {
            true => Poll::Ready(self.progress().landed_to >= offset),
            false => Poll::Pending,
        }
    }

    /// Whether all before this offset arrived or the job is over. If not, the task is woken then.
    fn poll_at(&self, cx: &mut Context<'_>, offset: u64) -> bool {
        if crate::os::forked() || self.job.is_at(offset) {
            return true;
        }
        self.copier.workers.advance();
        self.job.poll(cx.waker(), offset)
    }

    /// Makes later work of `stream` start after the transfer's copies, for which the call waits.
    /// [`wait_landed`](Self::wait_landed) orders a stream behind a part of a transfer.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait), and [`Error::Mismatch`] for a stream of another device.
    // The host waits: the event would have to be recorded behind the last kernel, which is launched
    // when its chunk has arrived. A stream that waits for a value in memory (cuStreamWaitValue) may
    // never end: the driver waits for streams in calls of its own choice, maybe on the thread that
    // brings the bytes.
    pub fn order(&self, stream: &Stream) -> Result<()> {
        let device = self.copier.device();
        if stream.device().context().id() != device.context().id() {
            return Err(Error::wrong_stream(stream.device().name(), device.name()));
        }
        self.finish()?;
        self.job.outcome().unwrap_or(Ok(()))
    }

    /// Cancels the transfer: no further chunk is begun, and chunks under way are dropped where
    /// possible. Waiting tells when it is over. What is on the device then is undefined, but for
    /// the bytes before [`Progress::landed_to`].
    pub fn cancel(&self) {
        if !self.is_over() {
            self.job.cancel();
        }
    }

    /// Waits until the job is over.
    fn finish(&self) -> Result<()> {
        crate::os::check_fork()?;
        if !self.job.is_over() {
            may_wait()?;
            self.copier.workers.wait(&self.job, None, END);
        }
        Ok(())
    }

    /// The outcome of a job that is over.
    fn take(&mut self) -> Result<T, SubmitError<T>> {
        let refused = |error| SubmitError { error, buffer: None };
        crate::os::check_fork().map_err(refused)?;
        match (self.job.outcome(), self.values.take()) {
            (Some(outcome), Some(values)) => values.back(outcome),
            _ => Err(refused(Error::Unsupported("a transfer was polled after it was ready".into()))),
        }
    }
}

impl<T> Future for Transfer<T> {
    type Output = Result<T, SubmitError<T>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.poll_at(cx, END) { Poll::Ready(self.take()) } else { Poll::Pending }
    }
}

impl<T> Drop for Transfer<T> {
    fn drop(&mut self) {
        if crate::os::forked() {
            // All of it is the parent's.
            std::mem::forget((self.job.clone(), self.values.take()));
            return;
        }
        self.job.forget_tasks();
    }
}

impl<T> std::fmt::Debug for Transfer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfer")
            .field("of", &self.job.name())
            .field("progress", &self.progress())
            .finish_non_exhaustive()
    }
}
