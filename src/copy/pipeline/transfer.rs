//! The handle of a transfer that goes on by itself.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::Handle;
use super::arrival::{SURELY, last_of};
use super::engine::{Engine, may_wait};
use super::job::{Job, Progress};
use crate::error::{Error, Result, SubmitError};
use crate::foreign;

/// A transfer under way. Wait for it, await it (no runtime is assumed), look at it, cancel it.
///
/// **Dropped, it is cancelled**; [`detach`](Self::detach) lets it go on. A cancelled transfer begins no further chunk;
/// its source (or sink) is dropped, and its segments return, when the chunks under way are complete. No call waits for
/// that.
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned, pipeline::Pipeline};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (pipeline, memory) = (Pipeline::builder(&pool, &device).build()?, device.alloc(1 << 20)?);
/// let transfer = pipeline.upload(vec![7; 1 << 20], &memory)?;
/// if transfer.wait_landed(4096) {
///     // The first 4096 bytes are on the device.
/// }
/// let bytes = transfer.wait()?; // the source comes back
/// # drop(bytes);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[must_use = "dropping it cancels the transfer; wait for it, await it, or detach it"]
pub struct Transfer<T: Send + Sync + 'static> {
    handle: Arc<Handle>,
    job: Arc<Job>,
    value: Option<Arc<T>>,
    waker: Option<u64>,
    detached: bool,
}

impl<T: Send + Sync + 'static> Transfer<T> {
    pub(super) fn new(handle: Arc<Handle>, job: Arc<Job>, value: Arc<T>) -> Self {
        Self { handle, job, value: Some(value), waker: None, detached: false }
    }

    /// How far it has come. (In the child of a fork: not at all, and it is over.)
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.job.progress()
    }

    /// Whether it is over, one way or another. Then waiting for it returns at once.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.job.outcome().is_some()
    }

    /// Waits until it is over, and gives the source or sink back.
    ///
    /// # Errors
    /// With the source or sink: [`Error::Read`], [`Error::Shrunk`], [`Error::Write`]; [`Error::Transfer`] with what the
    /// pool or the device said; [`Error::Cancelled`]. Of several the one that lies first in the source. What is on the
    /// device (or in the sink) then is undefined, but for what [`Progress::landed_to`] says. [`Error::Unsupported`] on
    /// a thread of the library's (in a waker, a source or a sink), which must not wait, unless it is over: then it is
    /// cancelled, and what it was about is dropped when the device has let go of it.
    pub fn wait(mut self) -> Result<T, SubmitError<T>> {
        match may_wait() {
            Err(error) if !self.is_over() => return Err(SubmitError { error, buffer: None }),
            _ => {}
        }
        self.job.wait_over(None);
        self.take()
    }

    /// The same, for at most so long. On a thread of the library's it only looks.
    ///
    /// # Errors
    /// [`Error::Timeout`] with the handle itself; all others with what it was about, inside of the inner result.
    #[allow(clippy::type_complexity, clippy::result_large_err, reason = "the handle back, or the outcome")]
    pub fn wait_timeout(mut self, timeout: Duration) -> Result<Result<T, SubmitError<T>>, SubmitError<Self>> {
        let deadline = Instant::now().checked_add(if may_wait().is_ok() { timeout } else { Duration::ZERO });
        if self.job.wait_over(deadline) {
            return Ok(self.take());
        }
        Err(SubmitError { error: Error::Timeout(timeout.into()), buffer: Some(self) })
    }

    /// Waits until all bytes of the source before this offset are copied, or until the transfer is over. Whether they
    /// are copied. (A loader uses the first tensors while the last are being read.)
    #[must_use]
    pub fn wait_landed(&self, offset: u64) -> bool {
        // On a thread that has to do the work nobody waits.
        if may_wait().is_ok() {
            self.job.wait(None, |progress| progress.landed_to >= offset);
        }
        self.job.progress().landed_to >= offset
    }

    /// [`wait_landed`](Self::wait_landed) for a task, which is woken when more is copied.
    pub fn poll_landed(&mut self, cx: &mut Context<'_>, offset: u64) -> Poll<bool> {
        let landed = |job: &Job| job.progress().landed_to >= offset;
        if landed(&self.job) {
            return Poll::Ready(true);
        }
        let over = self.job.wake_later(&mut self.waker, cx.waker()).is_some();
        // Looked at again: it may have arrived before the waker was there.
        match landed(&self.job) {
            true => Poll::Ready(true),
            false if over => Poll::Ready(false),
            false => Poll::Pending,
        }
    }

    /// Cancels the transfer: no further chunk is begun. Waiting for it tells when it is over, with [`Error::Cancelled`]
    /// unless all was copied before.
    pub fn cancel(&self) {
        self.handle.engine.cancel(&self.job);
    }

    /// A handle that cancels it, for another thread.
    #[must_use]
    pub fn canceller(&self) -> Canceller {
        Canceller {
            engine: self.handle.engine.own.clone(),
            job: Arc::downgrade(&self.job),
            last: self.job.last.clone(),
        }
    }

    /// Cancels it, and waits until nothing of it is under way, where this thread may.
    #[cfg(feature = "safetensors")]
    pub(crate) fn settle(self) {
        self.cancel();
        if may_wait().is_ok() {
            self.job.wait_over(None);
        }
    }

    /// Lets the transfer go on without its handle.
    pub fn detach(mut self) {
        self.detached = true;
    }

    fn take(&mut self) -> Result<T, SubmitError<T>> {
        let outcome = self.job.outcome();
        let value = match outcome {
            // The job has let go of its share.
            Some(Ok(())) => self.value.take().and_then(|value| last_of(value, SURELY)),
            // A copy that failed may be on the wire for long.
            _ => self.value.take().and_then(Arc::into_inner),
        };
        match (outcome, value) {
            (Some(Ok(())), Some(value)) => Ok(value),
            (Some(Err(error)), buffer) => Err(SubmitError { error, buffer }),
            (_, buffer) => {
                let error = Error::Unsupported("a transfer was polled after it was ready".into());
                Err(SubmitError { error, buffer })
            }
        }
    }
}

impl<T: Send + Sync + 'static> Future for Transfer<T> {
    type Output = Result<T, SubmitError<T>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        match this.job.wake_later(&mut this.waker, cx.waker()) {
            Some(_) => Poll::Ready(this.take()),
            None => Poll::Pending,
        }
    }
}

impl<T: Send + Sync + 'static> Drop for Transfer<T> {
    fn drop(&mut self) {
        if crate::os::forked() {
            // The parent's, as what it is about.
            return std::mem::forget(self.value.take());
        }
        self.job.forget_waker(&mut self.waker);
        if !self.detached {
            self.handle.engine.cancel(&self.job);
        }
        foreign::discard(self.value.take());
    }
}

// Nothing in it is pinned in place.
impl<T: Send + Sync + 'static> Unpin for Transfer<T> {}

impl<T: Send + Sync + 'static> std::fmt::Debug for Transfer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfer")
            .field("of", &self.job.name)
            .field("progress", &self.job.progress())
            .finish_non_exhaustive()
    }
}

/// Looks at a transfer and cancels it, from any thread: [`Transfer::canceller`].
///
/// It keeps neither the transfer's memory nor the pipeline.
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned, pipeline::Pipeline};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (pipeline, memory) = (Pipeline::builder(&pool, &device).build()?, device.alloc(1 << 20)?);
/// let transfer = pipeline.upload(vec![7; 1 << 20], &memory)?;
/// let canceller = transfer.canceller();
/// std::thread::spawn(move || canceller.cancel());
/// match transfer.wait() {
///     Ok(_) => println!("it was copied before"),
///     Err(refused) => println!("{}", refused.error),
/// }
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone)]
pub struct Canceller {
    engine: Weak<Engine>,
    job: Weak<Job>,
    last: Arc<OnceLock<Progress>>,
}

impl Canceller {
    /// As [`Transfer::cancel`].
    pub fn cancel(&self) {
        if let (Some(engine), Some(job)) = (self.engine.upgrade(), self.job.upgrade()) {
            engine.cancel(&job);
        }
    }

    /// How far the transfer has come.
    #[must_use]
    pub fn progress(&self) -> Progress {
        // In this order: none goes before it is over.
        match self.job.upgrade() {
            Some(job) => job.progress(),
            None => self.last.get().copied().unwrap_or(Progress { over: true, ..Progress::default() }),
        }
    }
}

impl std::fmt::Debug for Canceller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Canceller").field("progress", &self.progress()).finish_non_exhaustive()
    }
}
