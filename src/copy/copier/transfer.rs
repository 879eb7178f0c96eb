//! The handle of a transfer.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::job::{Job, Progress, Values};
use super::{Copier, may_wait};
use crate::error::{Error, Result, SubmitError};
use crate::stream::Stream;

/// A transfer of a [`Copier`]. Wait for it, await it (no runtime is assumed), look at it, cancel it, order streams
/// behind it.
///
/// It is [ordered](super#ordering) with no other transfer: wait for it before another one uses its memory.
///
/// Dropped, it goes on by itself, as every copy of this crate does: what it owns returns, or is dropped, when it is
/// over. A transfer that is not wanted any more is [cancelled](Self::cancel). No drop waits.
///
/// # After an error
/// The error is that of the first byte, in the order of the call, whose chunk has failed. What lies before
/// [`Progress::landed_to`] has arrived; which of the rest has is not known. A source or sink comes back with the error;
/// buffers that a device may still use return to their pools by themselves.
///
/// ```
/// # use pinpool::{Copier, Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (copier, memory) = (Copier::builder(&pool, &device).build()?, device.alloc(1 << 20)?);
/// let load = copier.upload(vec![7; 1 << 20], &memory)?;
/// if load.wait_landed(4096) {
///     // The first 4096 bytes are on the device.
/// }
/// let bytes = load.wait()?; // the source comes back
/// # drop(bytes);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[must_use = "dropping it is fine: the transfer goes on; say so with `drop`"]
pub struct Transfer<T> {
    copier: Copier,
    job: Arc<Job>,
    values: Option<Arc<dyn Values<Back = T>>>,
}

impl<T> Transfer<T> {
    pub(super) fn new(copier: Copier, job: Arc<Job>, values: Arc<dyn Values<Back = T>>) -> Self {
        Self { copier, job, values: Some(values) }
    }

    fn engine(&self) -> &Arc<Engine> {
        self.copier.engine()
    }

    /// How far it has come. (In the child of a fork: not at all, and it is over.)
    #[must_use]
    pub fn progress(&self) -> Progress {
        if crate::os::forked() {
            return Progress { over: true, ..Progress::default() };
        }
        self.job.progress()
    }

    /// Whether it is over, with or without an error. Then waiting for it returns at once.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.progress().over
    }

    /// Waits until it is over, and gives back what the call was given: the source or sink, or the buffers in the order
    /// of the call.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Write`]; what the pool or the device said, inside of [`Error::Transfer`] where a
    /// source, sink or slice is copied; [`Error::Timeout`] after the transfer's deadline ([`Copier::with_timeout`]);
    /// [`Error::Cancelled`] after a [`cancel`](Self::cancel) that came in time; [`Error::Unsupported`] on a thread of
    /// the crate (in a waker, a source or a sink), where the wait could never end: a transfer that was started goes on
    /// then; [`Error::Forked`].
    pub fn wait(mut self) -> Result<T, SubmitError<T>> {
        match self.finish() {
            Ok(()) => self.take(),
            Err(error) => Err(SubmitError { error, buffer: None }),
        }
    }

    /// The same, for at most `timeout`. On a thread of the crate it only looks.
    ///
    /// # Errors
    /// [`Error::Timeout`] with the handle; all others as for [`wait`](Self::wait), inside of the inner result.
    #[allow(clippy::type_complexity, clippy::result_large_err, reason = "the handle back, or the outcome")]
    pub fn wait_timeout(mut self, timeout: Duration) -> Result<Result<T, SubmitError<T>>, SubmitError<Self>> {
        let since = Instant::now();
        let timeout = if may_wait().is_ok() { timeout } else { Duration::ZERO };
        if self.is_over() || self.until(since.checked_add(timeout), |progress| progress.over) {
            return Ok(self.take());
        }
        Err(SubmitError { error: Error::Timeout(Duration::ZERO.into()).waited(since), buffer: Some(self) })
    }

    /// How it ended, for those that share the handle. `None`: it is not over.
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

    /// Waits until all bytes before this offset have arrived ([`Progress::landed_to`]), or until the transfer is over.
    /// Whether they have arrived. On a thread of the crate it only looks.
    ///
    /// What has arrived can be used while the rest is under way: by all that is submitted to any stream from then on,
    /// and by all transfers that are started from then on.
    ///
    /// Where a source blocks, a chunk's arrival is told when the thread that moves the chunk has returned from the
    /// source.
    #[must_use]
    pub fn wait_landed(&self, offset: u64) -> bool {
        if crate::os::forked() {
            return false;
        }
        if may_wait().is_ok() {
            self.until(None, |progress| progress.landed_to >= offset || progress.over);
        }
        self.progress().landed_to >= offset
    }

    /// [`wait_landed`](Self::wait_landed) for a task, which is woken when more has arrived. Any number of tasks and
    /// threads may wait so for one transfer.
    pub fn poll_landed(&self, cx: &mut Context<'_>, offset: u64) -> Poll<bool> {
        let there = |progress: Progress| progress.landed_to >= offset || progress.over;
        if !there(self.progress()) {
            self.copier.workers.advance();
            // The waker first: what changes after the look wakes the task.
            self.job.wake_landed(cx.waker(), offset);
            if !there(self.progress()) {
                return Poll::Pending;
            }
        }
        Poll::Ready(self.progress().landed_to >= offset)
    }

    /// Makes later work of `stream` start only after the transfer's copies. Waits until they are complete: the bytes of
    /// a chunk go to their places by a kernel that is launched when the chunk has arrived.
    ///
    /// Behind a part of a transfer a stream is ordered by [`wait_landed`](Self::wait_landed): what is submitted to it
    /// afterwards finds the part's bytes. So the stream itself
    /// never waits, and has all that it was given before to do meanwhile. (The example `kv_tier` makes each part a
    /// transfer of its own, and orders the stream behind one after the other.)
    ///
    /// # Errors
    /// The error of the transfer; [`Error::Mismatch`] for a stream of another device; as for [`wait`](Self::wait).
    // Why the host waits, and not the device. An event would have to be recorded behind the part's last kernel, which
    // is launched when its chunk has arrived: the host would wait until then all the same, and save the rest of a
    // moment. A stream that waits for a value in memory (cuStreamWaitValue) could be told earlier, and may never end:
    // the driver waits for streams in calls of its own choice (an allocation that is freed, a kernel that is loaded,
    // the legacy stream), also in those of the thread that is to bring the bytes, and a transfer that fails would have
    // to write the value, too, into a stream whose kernels then compute with bytes that never came.
    pub fn order(&self, stream: &Stream) -> Result<()> {
        if stream.device().context().id() != self.engine().device.context().id() {
            return Err(Error::wrong_stream(stream.device().name(), self.engine().device.name()));
        }
        self.finish()?;
        self.job.outcome().unwrap_or(Ok(()))
    }

    /// Cancels the transfer: no further chunk is begun, and chunks that are under way are dropped where that is
    /// possible. Waiting tells when it is over. What is on the device then is undefined, but for the bytes before
    /// [`Progress::landed_to`].
    pub fn cancel(&self) {
        if !self.is_over() {
            self.job.cancel();
        }
    }

    /// A handle that looks at it and cancels it, for another thread.
    #[must_use]
    pub fn canceller(&self) -> Canceller {
        Canceller { job: Arc::downgrade(&self.job), last: self.job.last.clone() }
    }

    /// Waits until the job is over.
    fn finish(&self) -> Result<()> {
        crate::os::check_fork()?;
        if self.job.is_over() {
            return Ok(());
        }
        may_wait()?;
        if self.until(None, |progress| progress.over) {
            Ok(())
        } else {
            Err(Error::Timeout(Duration::ZERO.into()))
        }
    }

    fn until(&self, deadline: Option<Instant>, until: impl Fn(&Progress) -> bool) -> bool {
        self.copier.workers.wait(&self.job, deadline, until)
    }

    /// The outcome of a job that is over.
    fn take(&mut self) -> Result<T, SubmitError<T>> {
        let polled = || Error::Unsupported("a transfer was polled after it was ready".into());
        if let Err(error) = crate::os::check_fork() {
            return Err(SubmitError { error, buffer: None });
        }
        match (self.job.outcome(), self.values.take()) {
            (Some(outcome), Some(values)) => values.back(outcome),
            _ => Err(SubmitError { error: polled(), buffer: None }),
        }
    }
}

impl<T> Future for Transfer<T> {
    type Output = Result<T, SubmitError<T>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if !self.is_over() {
            self.copier.workers.advance();
            // The waker first, as for `poll_landed`.
            self.job.wake_later(cx.waker());
            if !self.is_over() {
                return Poll::Pending;
            }
        }
        Poll::Ready(self.take())
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

// Nothing in it is pinned in place.
impl<T> Unpin for Transfer<T> {}

impl<T> std::fmt::Debug for Transfer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfer")
            .field("of", &self.job.name.as_deref().unwrap_or("pieces"))
            .field("progress", &self.progress())
            .finish_non_exhaustive()
    }
}

/// Looks at a transfer and cancels it, from any thread: [`Transfer::canceller`].
///
/// It keeps neither the transfer's memory nor the copier.
#[derive(Clone)]
pub struct Canceller {
    job: Weak<Job>,
    last: Arc<OnceLock<Progress>>,
}

impl Canceller {
    /// As [`Transfer::cancel`].
    pub fn cancel(&self) {
        if let Some(job) = self.job.upgrade().filter(|_| !self.progress().over) {
            job.cancel();
        }
    }

    /// How far the transfer has come.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let over = Progress { over: true, ..Progress::default() };
        if crate::os::forked() {
            return over;
        }
        // In this order: no job goes before it is over.
        match self.job.upgrade() {
            Some(job) => job.progress(),
            None => self.last.get().copied().unwrap_or(over),
        }
    }
}

impl std::fmt::Debug for Canceller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Canceller").field("progress", &self.progress()).finish_non_exhaustive()
    }
}
