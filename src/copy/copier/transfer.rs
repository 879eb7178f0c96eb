//! The handle of a transfer.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::job::{CopyProgress, Job};
use super::pieces::Values;
use super::{may_wait, worker::Worker};
use crate::error::{Error, Result};
use crate::stream::Stream;

/// A transfer of a [`Copier`](super::Copier). Wait for it, await it (no runtime is assumed), look at it, cancel it.
///
/// Dropped, it goes on by itself: what it owns returns when the device is done with it.
///
/// # After an error
/// The error is that of the first piece, in the order of the call, whose chunk has failed. All pieces before
/// [`CopyProgress::landed_to`] have arrived; which of the others have is not known.
///
/// ```
/// # use pinpool::{Copier, Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (copier, memory) = (Copier::builder(&pool, &device).build()?, device.alloc(64)?);
/// let pieces = [(&b"hello"[..], memory.slice(..5)?), (&b"world"[..], memory.slice(32..37)?)];
/// let sent = copier.upload_pieces(&pieces)?; // the bytes have been read
/// println!("{} of {} bytes are there", sent.progress().done, sent.progress().total);
/// sent.wait()?;
/// # Ok::<(), pinpool::Error>(())
/// ```
#[must_use = "dropping it is fine: the transfer goes on; say so with `drop`"]
pub struct Copying<T = ()> {
    engine: Arc<Engine>,
    job: Arc<Job>,
    values: Option<Arc<dyn Values<Back = T>>>,
    waker: Option<u64>,
}

impl<T> Copying<T> {
    pub(super) fn new(engine: Arc<Engine>, job: Arc<Job>, values: Arc<dyn Values<Back = T>>) -> Self {
        Self { engine, job, values: Some(values), waker: None }
    }

    /// How far it has come.
    #[must_use]
    pub fn progress(&self) -> CopyProgress {
        if crate::os::forked() {
            return CopyProgress { over: true, ..CopyProgress::default() };
        }
        self.job.progress()
    }

    /// Whether it is over, with or without an error. Then waiting for it returns at once.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.progress().over
    }

    /// Waits until it is over, and gives the buffers back, in the order of the call.
    ///
    /// # Errors
    /// See [the type's page](Self); [`Error::Cancelled`] after a [`cancel`](Self::cancel) that came in time;
    /// [`Error::Unsupported`] on a thread of the crate (in a waker, say), where the wait could never end;
    /// [`Error::Forked`]. The buffers then return by themselves.
    pub fn wait(mut self) -> Result<T> {
        crate::os::check_fork()?;
        self.finish(None)?;
        self.take()
    }

    /// The same, for at most `timeout`.
    ///
    /// # Errors
    /// [`Error::Timeout`] with the handle; all others as for [`wait`](Self::wait).
    #[allow(clippy::result_large_err, reason = "the error carries the handle back")]
    pub fn wait_timeout(mut self, timeout: Duration) -> Result<T, crate::error::SubmitError<Self>> {
        let since = Instant::now();
        let waited = crate::os::check_fork().and_then(|()| self.finish(since.checked_add(timeout)));
        match waited.and_then(|()| self.take()) {
            Ok(back) => Ok(back),
            Err(error @ Error::Timeout(_)) if !self.is_over() => {
                Err(crate::error::SubmitError { error: error.waited(since), buffer: Some(self) })
            }
            Err(error) => Err(crate::error::SubmitError { error, buffer: None }),
        }
    }

    /// Waits until all pieces of the call before this one have arrived, or until the transfer is over. Whether they have
    /// arrived. On a thread of the crate it only looks.
    #[must_use]
    pub fn wait_landed(&self, piece: usize) -> bool {
        if crate::os::forked() {
            return false;
        }
        let there = |job: &Job| job.progress().landed_to >= piece;
        if may_wait().is_ok() {
            self.until(None, |job| there(job) || job.is_over());
        }
        there(&self.job)
    }

    /// Makes later work of `stream` start only after the transfer's copies. Waits until they are complete: the bytes of
    /// a chunk go to their places by a kernel that is launched when the chunk has arrived.
    ///
    /// # Errors
    /// The error of the transfer; [`Error::WrongDevice`] for a stream of another device; as for [`wait`](Self::wait).
    pub fn order(&self, stream: &Stream) -> Result<()> {
        crate::os::check_fork()?;
        if stream.device().context().id() != self.engine.device.context().id() {
            return Err(Error::WrongDevice { device: self.engine.device.name().into() });
        }
        self.finish(None)?;
        self.job.outcome().unwrap_or(Ok(()))
    }

    /// Cancels the transfer: no further chunk is begun, and chunks that are under way are dropped where that is
    /// possible. What is on the device then is undefined, but for the pieces before [`CopyProgress::landed_to`].
    pub fn cancel(&self) {
        if !crate::os::forked() {
            self.job.cancel();
        }
    }

    /// Waits until the job is over.
    fn finish(&self, deadline: Option<Instant>) -> Result<()> {
        if self.job.is_over() {
            return Ok(());
        }
        may_wait()?;
        if self.until(deadline, Job::is_over) { Ok(()) } else { Err(Error::Timeout(Duration::ZERO.into())) }
    }

    fn until(&self, deadline: Option<Instant>, until: impl Fn(&Job) -> bool) -> bool {
        if self.engine.settings.threads == 0 {
            Worker::step_until(&self.engine, &self.job, &until);
            return true;
        }
        self.job.wait(deadline, until)
    }

    fn take(&mut self) -> Result<T> {
        self.job.outcome().unwrap_or(Ok(()))?;
        match self.values.take() {
            // SAFETY: the job is over, and the handle gives the values up.
            Some(values) => unsafe { values.take() },
            None => Err(Error::Unsupported("a transfer was polled after it was ready".into())),
        }
    }
}

impl<T> Future for Copying<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        if let Err(error) = crate::os::check_fork() {
            return Poll::Ready(Err(error));
        }
        let this = &mut *self;
        if this.engine.settings.threads == 0 {
            Worker::advance(&this.engine);
        }
        // The waker first: what changes after the look wakes the task.
        if !this.job.is_over() {
            this.job.wake_later(&mut this.waker, cx.waker());
        }
        if this.job.is_over() { Poll::Ready(this.take()) } else { Poll::Pending }
    }
}

impl<T> Drop for Copying<T> {
    fn drop(&mut self) {
        if crate::os::forked() {
            // All of it is the parent's.
            std::mem::forget((self.engine.clone(), self.job.clone(), self.values.take()));
            return;
        }
        self.job.forget_waker(&mut self.waker);
    }
}

// Nothing in it is pinned in place.
impl<T> Unpin for Copying<T> {}

impl<T> std::fmt::Debug for Copying<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Copying").field("progress", &self.progress()).finish_non_exhaustive()
    }
}
