//! Step 7 of a checkout for a task: a future that waits in the queue, and leaves it when it is dropped.
//!
//! A future owns its plan and no reference to a store: the plan names the central pool by its number. The first poll
//! tries like a thread, and joins the queue if there is nothing; later polls look at the queue's entry. While memory
//! for the main store is being pinned, a request for a reserve takes what comes there first.

use std::fmt;
use std::future::Future;
use std::panic::Location;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::{Obtained, OwnedPlan, Pool, RequestPlan};
use crate::buffer::PinnedBuf;
use crate::central::{CentralPool, Fresh, WaitOutcome, Wake, Want};
use crate::error::{Error, Result};
use crate::foreign::Task;
use crate::telemetry::ledger::Tag;

/// The future of [`Pool::checkout_async`]. Dropped before it is ready, it leaves the queue.
///
/// ```
/// # use pinpool::{Checkout, Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow).build()?;
/// # fn block_on<F: std::future::Future>(future: F) -> F::Output {
/// #     let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
/// #     let mut future = std::pin::pin!(future);
/// #     loop {
/// #         if let std::task::Poll::Ready(output) = future.as_mut().poll(&mut cx) {
/// #             return output;
/// #         }
/// #     }
/// # }
/// async fn fill(checkout: Checkout) -> pinpool::Result<usize> {
///     let mut buf = checkout.await?;
///     buf.extend_from_slice(b"hello");
///     Ok(buf.len())
/// }
/// assert_eq!(block_on(fill(pool.checkout_async(4096)))?, 5);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "nothing happens until it is awaited"]
pub struct Checkout(pub(super) CheckoutMany);

impl Future for Checkout {
    type Output = Result<PinnedBuf>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let bufs = std::task::ready!(Pin::new(&mut self.0).poll(cx));
        Poll::Ready(bufs.and_then(|mut bufs| bufs.pop().ok_or(Error::ZeroLength)))
    }
}

/// The future of [`Pool::checkout_many_async`]. Dropped before it is ready, it leaves the queue, and segments that it
/// was granted meanwhile return to the pool.
///
/// ```
/// # use pinpool::{CheckoutMany, Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow).build()?;
/// # fn block_on<F: std::future::Future>(future: F) -> F::Output {
/// #     let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
/// #     let mut future = std::pin::pin!(future);
/// #     loop {
/// #         if let std::task::Poll::Ready(output) = future.as_mut().poll(&mut cx) {
/// #             return output;
/// #         }
/// #     }
/// # }
/// async fn count(checkout: CheckoutMany) -> pinpool::Result<usize> {
///     Ok(checkout.await?.len())
/// }
/// assert_eq!(block_on(count(pool.checkout_many_async([4096.into(), 512.into()])))?, 2);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[must_use = "nothing happens until it is awaited"]
pub struct CheckoutMany {
    pub(super) pool: Pool,
    /// `None` after the first poll.
    pub(super) plan: Option<Result<OwnedPlan>>,
    /// The central pool where the request waits, and its entry in the queue there.
    pub(super) waiting: Option<(Arc<CentralPool>, usize)>,
    /// The wants for the main store, while memory for it is being pinned.
    pub(super) first: Option<Vec<Want>>,
    pub(super) tags: Vec<Tag>,
    pub(super) site: &'static Location<'static>,
}

impl CheckoutMany {
    /// The first poll: tries, and joins the queue. `None`: the request waits.
    fn start(&mut self, cx: &Context<'_>) -> Result<Option<Vec<Fresh>>> {
        let Some(plan) = self.plan.take() else { return Ok(None) };
        let (first, number, wants) = plan?;
        if wants.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let pool = self.pool.clone();
        let Some(store) = pool.stores().find(|s| s.central.number() == number) else {
            return Err(Error::Closed);
        };
        let plan = RequestPlan { first, store, wants };
        let growing = match pool.try_hard(&plan)? {
            Obtained::Granted(granted) => return Ok(Some(granted)),
            Obtained::Nothing { growing } => growing,
        };
        let central = store.central.clone();
        let key = central.join(plan.wants, Wake::Task(Task::of(cx.waker())), growing)?;
        self.waiting = Some((central, key));
        self.first = plan.first;
        Ok(None)
    }
}

impl Future for CheckoutMany {
    type Output = Result<Vec<PinnedBuf>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let granted = std::task::ready!(self.poll_granted(cx));
        let pool = &self.pool;
        Poll::Ready(match granted {
            Ok(granted) => Ok(pool.entered(granted, self.tags.iter().copied(), self.site)),
            Err(error) => Err(pool.failed(error)),
        })
    }
}

impl CheckoutMany {
    fn poll_granted(&mut self, cx: &mut Context<'_>) -> Poll<Result<Vec<Fresh>>> {
        if let Some(granted) = self.start(cx).transpose() {
            return Poll::Ready(granted);
        }
        let Some((central, key)) = self.waiting.take() else {
            return Poll::Ready(Err(Error::Config("a checkout was polled after it was ready".into())));
        };
        match central.look(key, Some(cx.waker())) {
            WaitOutcome::Waiting => {
                self.waiting = Some((central.clone(), key));
                let Some(first) = self.first.take() else { return Poll::Pending };
                let (grown, over) = self.pool.take_grown(&first, cx.waker());
                if let Some(granted) = grown {
                    self.waiting = None;
                    central.leave(key, false);
                    return Poll::Ready(Ok(granted));
                }
                self.first = (!over).then_some(first);
                Poll::Pending
            }
            WaitOutcome::Granted(granted) => Poll::Ready(Ok(granted)),
            WaitOutcome::Failed(error) => Poll::Ready(Err(error)),
        }
    }
}

impl Drop for CheckoutMany {
    fn drop(&mut self) {
        if let Some((central, key)) = self.waiting.take() {
            central.leave(key, false);
        }
    }
}

impl fmt::Debug for CheckoutMany {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckoutMany").field("waiting", &self.waiting.is_some()).finish_non_exhaustive()
    }
}
