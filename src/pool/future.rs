//! A checkout for a task: a future that waits in the queue, and leaves it when dropped. The first
//! poll takes all steps like a thread, and joins the queue; later polls look at the entry.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::panic::Location;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use super::{Begun, Pool, Request, Wait};
use crate::buffer::PinnedBuf;
use crate::central::{self, Fresh};
use crate::error::{Error, Result};
use crate::foreign::Task;
use crate::timer::Planned;

/// The future of [`Pool::checkout_async`] and [`Pool::checkout_many_async`]. Dropped before it is
/// ready, it leaves the queue, gives back what it was granted, and counts as
/// [abandoned](crate::PoolStats::abandoned). [`timeout`](Self::timeout) gives it a deadline.
///
/// The thread that returns the memory wakes the task, or the timer's thread, the only
/// one of the process: a waker that blocks holds up every deadline of the process.
#[must_use = "nothing happens until it is awaited"]
pub struct Checkout<T = PinnedBuf> {
    pool: Pool,
    requests: Vec<Request>,
    site: &'static Location<'static>,
    /// When it first got a deadline, or began to wait. A hit reads no clock.
    since: Option<Instant>,
    /// The most requests that may wait, this one included.
    max_waiting: usize,
    stage: Stage,
    deadline: Option<Instant>,
    alarm: Option<Alarm>,
    output: PhantomData<fn() -> T>,
}

#[derive(Clone, Copy)]
enum Stage {
    /// The future was not polled yet.
    New,
    /// The request waits in the pool's queue, under this key.
    Waits(usize),
    Over,
}

/// The wake at the deadline, of the task that polled last. Dropped, it wakes none.
struct Alarm(Planned);

impl Drop for Alarm {
    fn drop(&mut self) {
        crate::timer::cancel(self.0);
    }
}

impl<T> Checkout<T> {
    pub(super) fn new(pool: &Pool, requests: Vec<Request>, site: &'static Location<'static>) -> Self {
        Self {
            pool: pool.clone(),
            requests,
            site,
            since: None,
            max_waiting: pool.0.max_waiting,
            stage: Stage::New,
            deadline: None,
            alarm: None,
            output: PhantomData,
        }
    }

    /// Gives the request a deadline, `timeout` from now on, after which the future is ready with
    /// [`Error::Timeout`](crate::Error::Timeout). The last deadline counts. The crate's own timer
    /// wakes the task, so this works on any runtime, and without one.
    #[must_use = "nothing happens until it is awaited"]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        let now = Instant::now();
        self.since.get_or_insert(now);
        self.deadline = now.checked_add(timeout);
        // It was set for another deadline.
        self.alarm = None;
        self
    }

    /// Joins the queue however many requests wait: for waits of the crate's own.
    pub(crate) fn unbounded(mut self) -> Self {
        self.max_waiting = usize::MAX;
        self
    }

    fn poll_bufs(&mut self, cx: &mut Context<'_>) -> Poll<Result<Vec<PinnedBuf>>> {
        let granted = ready!(self.poll_granted(cx));
        let bufs = granted.map(|granted| self.pool.entered(granted, &self.requests, self.site));
        Poll::Ready(bufs.map_err(|error| self.pool.failed(error)))
    }

    /// What the request was granted, by the first poll or by the queue since.
    fn poll_granted(&mut self, cx: &mut Context<'_>) -> Poll<Result<Vec<Fresh>>> {
        let key = match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::New => {
                self.since.get_or_insert_with(Instant::now);
                match self.pool.begin(&self.requests, Wait::Task(cx.waker()), self.max_waiting)? {
                    Begun::Granted(granted) => return Poll::Ready(Ok(granted)),
                    Begun::Waits(key) => key,
                }
            }
            Stage::Waits(key) => key,
            Stage::Over => {
                return Poll::Ready(Err(Error::Argument("a checkout was polled after it was ready".into())));
            }
        };
        match self.pool.central().look(key, Some(cx.waker())) {
            Some(outcome) => Poll::Ready(outcome),
            None => {
                self.stage = Stage::Waits(key);
                self.poll_late(key, cx)
            }
        }
    }

    /// Looks at the deadline of a request that waits, and has the task woken then.
    fn poll_late(&mut self, key: usize, cx: &Context<'_>) -> Poll<Result<Vec<Fresh>>> {
        let Some(deadline) = self.deadline else { return Poll::Pending };
        if Instant::now() < deadline {
            let task = Task::of(cx.waker());
            self.alarm = Some(Alarm(crate::timer::at_time(deadline, move || task.wake())));
            return Poll::Pending;
        }
        self.stage = Stage::Over;
        let len = central::sum(self.requests.iter().map(|request| request.len));
        Poll::Ready(self.pool.central().give_up(key, len, self.since.unwrap_or(deadline)))
    }
}

impl Future for Checkout {
    type Output = Result<PinnedBuf>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let (Stage::New, [request]) = (self.stage, &self.requests[..]) {
            let cached = self.pool.hit(*request);
            if let Some(buf) = cached.or_else(|| self.pool.refill(*request).map(PinnedBuf::from)) {
                self.stage = Stage::Over;
                return Poll::Ready(Ok(buf));
            }
        }
        let bufs = ready!(self.poll_bufs(cx));
        Poll::Ready(bufs.and_then(|mut bufs| bufs.pop().ok_or(Error::ZeroLength)))
    }
}

impl Future for Checkout<Vec<PinnedBuf>> {
    type Output = Result<Vec<PinnedBuf>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_bufs(cx)
    }
}

impl<T> Drop for Checkout<T> {
    fn drop(&mut self) {
        if let Stage::Waits(key) = self.stage {
            self.pool.central().leave(key);
        }
    }
}

impl<T> fmt::Debug for Checkout<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let waiting = matches!(self.stage, Stage::Waits(_));
        f.debug_struct("Checkout").field("waiting", &waiting).finish_non_exhaustive()
    }
}
