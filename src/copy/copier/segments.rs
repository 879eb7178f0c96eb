//! The segments of a copier: how many are in use, which are free, and how it waits for the pool.
//!
//! A segment whose chunk has ended is free for the next chunk, of whichever worker. When there is no work left, the free
//! ones return to the pool. An eighth of the share is kept for the foreground, at least a segment if there are four:
//! bulk chunks may keep theirs for as long as the rate wants. Calls whose caller fills or drains the chunks itself leave
//! one segment more, since the caller may wait for another transfer meanwhile; for that, each of them has one segment
//! that does not count.
//!
//! The copier waits in the pool's queue only if it has no segment in use, and in one place, whichever worker asks.
//! Otherwise it asks again from time to time.

use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::config::{Priority, Settings};
use crate::buffer::PinnedBuf;
use crate::device::handle::Device;
use crate::error::{Error, Result};
use crate::locks::Mutex;
use crate::pool::{Checkout, Pool, Request};
use crate::segment::PAGE;

/// After the pool had none, it is asked again when so much time has passed.
const RETRY: Duration = Duration::from_millis(1);

/// How many of so many segments transfers of a priority use.
pub(super) fn usable(segments: usize, priority: Priority) -> usize {
    match priority {
        Priority::Foreground => segments,
        Priority::Bulk => segments - (segments / 8).max(usize::from(segments > 3)),
    }
}

/// See the module's page.
pub(super) struct Segments {
    pub(super) pool: Pool,
    device: Device,
    /// Bytes of one.
    len: usize,
    /// How many there are at most.
    most: usize,
    state: Mutex<SegmentsState>,
}

#[derive(Default)]
struct SegmentsState {
    used: usize,
    free: Vec<PinnedBuf>,
    /// The place in the pool's queue.
    waiting: Option<Checkout>,
    /// The pool had none, and is not asked again before this.
    retry: Option<Instant>,
}

impl Segments {
    pub(super) fn new(pool: Pool, device: Device, settings: &Settings) -> Self {
        let (len, most) = (settings.segment, settings.segments);
        Self { pool, device, len, most, state: Mutex::default() }
    }

    pub(super) fn request(&self) -> Request<'_> {
        Request::new(self.len).align(PAGE).near(&self.device)
    }

    /// How many are in use.
    pub(super) fn used(&self) -> usize {
        self.state.lock().used
    }

    /// A segment. `None`: not now. `waits`: the chunk needs one, so the copier waits in the pool's queue if it has none.
    pub(super) fn take(&self, priority: Priority, waits: bool) -> Result<Option<PinnedBuf>> {
        self.take_within(usable(self.most, priority), waits)
    }

    /// A segment for a caller that fills or drains chunks itself, and has one already.
    pub(super) fn take_more(&self, priority: Priority) -> Result<Option<PinnedBuf>> {
        self.take_within(usable(self.most, priority).saturating_sub(1), false)
    }

    fn take_within(&self, most: usize, waits: bool) -> Result<Option<PinnedBuf>> {
        let mut state = self.state.lock();
        if state.used >= most {
            return Ok(None);
        }
        if let Some(buf) = state.free.pop() {
            state.used += 1;
            return Ok(Some(buf));
        }
        // What the copier waits for is looked at by workers that wait for it: they give the place up.
        if state.waiting.is_some() && !waits {
            return Ok(None);
        }
        // A chunk that needs a segment while none is in use gets a place in the queue, so it is not held up.
        let is_early = |retry| Instant::now() < retry;
        if state.waiting.is_none() && (!waits || state.used > 0) && state.retry.is_some_and(is_early) {
            return Ok(None);
        }
        state.used += 1;
        let asked = state.waiting.take();
        drop(state);
        let got = self.ask(asked, waits);
        if !matches!(got, Ok(Some(_))) {
            self.state.lock().used -= 1;
        }
        got
    }

    /// Asks the pool, or looks whether what was asked for has come.
    fn ask(&self, asked: Option<Checkout>, waits: bool) -> Result<Option<PinnedBuf>> {
        let mut asked = match asked {
            Some(asked) => asked,
            None => match self.pool.try_checkout(self.request()) {
                Err(Error::Exhausted { .. }) => {
                    let mut state = self.state.lock();
                    // The one is that which this call asks for.
                    if !waits || state.used > 1 || state.waiting.is_some() {
                        state.retry = Instant::now().checked_add(RETRY);
                        return Ok(None);
                    }
                    drop(state);
                    self.ask_pool()
                }
                got => return got.map(Some),
            },
        };
        let got = look(&mut asked);
        if matches!(got, Ok(None)) {
            let before = self.state.lock().waiting.replace(asked);
            drop(before);
        }
        got
    }

    /// There is none now.
    pub(super) fn exhausted(&self) -> Error {
        Error::Exhausted { len: self.len, capacity: self.pool.room().0, growth: None, shortage: None }
    }

    /// Waits in the pool's queue for a segment that does not count.
    pub(super) fn ask_pool(&self) -> Checkout {
        self.pool.checkout_async(self.request()).unbounded()
    }

    /// No chunk uses it any more.
    pub(super) fn give(&self, mut buf: PinnedBuf) {
        buf.clear();
        let mut state = self.state.lock();
        state.used -= 1;
        state.free.push(buf);
    }

    /// One that was in use has returned to the pool by itself, or will.
    pub(super) fn gone(&self) {
        self.state.lock().used -= 1;
    }

    /// There is no work: free segments return to the pool, and the place in its queue is given up.
    pub(super) fn rest(&self) {
        let mut state = self.state.lock();
        let left = (std::mem::take(&mut state.free), state.waiting.take());
        drop(state);
        drop(left);
    }
}

/// Whether what was asked for has come. No task is woken when it does: workers ask while there is work.
pub(super) fn look(asked: &mut Checkout) -> Result<Option<PinnedBuf>> {
    match Pin::new(asked).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(got) => got.map(Some),
        Poll::Pending => Ok(None),
    }
}

impl Drop for Segments {
    fn drop(&mut self) {
        if crate::os::forked() {
            // The parent's.
            std::mem::forget(std::mem::take(self.state.get_mut()));
        }
    }
}
