//! The segments of a copier: how many are in use, which are free, and how it waits for the pool.
//!
//! When a chunk has ended, its segment is free for the next chunk of any worker. Without work the
//! free ones return to the pool. An eighth of the share is kept for the foreground, at least a
//! segment if there are four: bulk chunks may keep theirs for as long as the rate wants. The
//! segments of a reader or a writer (`read_write`) do not count, since a reader or a writer may
//! wait for another transfer.
//!
//! The copier waits in the pool's queue only if it has no segment in use, and in one place for all
//! workers. Otherwise it asks from time to time, and takes a short one, too, since the others may
//! be blocked. A short segment returns to the pool behind its chunk: the next may be longer.

use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::types::{BESIDE, Kind, Priority, Settings};
use crate::buffer::PinnedBuf;
use crate::error::{Error, Result};
use crate::locks::Mutex;
use crate::pool::{Checkout, Pool, Request, Wait};
use crate::segment::PAGE;

/// After the pool had none, it is asked again after this time.
const RETRY: Duration = Duration::from_millis(1);
/// Bytes of a segment at least: the chunk has a page.
const LEAST: usize = PAGE + BESIDE;

/// How many of these segments transfers of a priority use. Transfers that may block leave one
/// segment to the others, if there are two.
fn usable(segments: usize, priority: Priority, kind: Kind) -> usize {
    let bulk = segments - (segments / 8).max(usize::from(segments > 3));
    match priority {
        _ if kind == Kind::Blocking => (bulk - 1).max(1),
        Priority::Foreground => segments,
        Priority::Bulk => bulk,
    }
}

pub(super) struct Segments {
    pub(super) pool: Pool,
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
    pub(super) fn new(pool: Pool, settings: &Settings) -> Self {
        let (len, most) = (settings.segment, settings.segments);
        Self { pool, len, most, state: Mutex::default() }
    }

    fn request(len: usize) -> Request {
        Request::new(len).align(PAGE)
    }

    /// Bytes that a chunk may have in this segment.
    pub(super) fn room(&self, segment: &PinnedBuf) -> usize {
        segment.capacity().min(self.len) - BESIDE
    }

    /// A segment. `None`: not now. The copier waits in the pool's queue if it has none.
    pub(super) fn take(&self, priority: Priority, kind: Kind) -> Result<Option<PinnedBuf>> {
        let mut state = self.state.lock();
        if state.used >= usable(self.most, priority, kind) {
            return Ok(None);
        }
        if let Some(buf) = state.free.pop() {
            state.used += 1;
            return Ok(Some(buf));
        }
        // A copier without a segment gets a place in the queue, so it is not held up.
        let is_busy = state.used > 0;
        if state.waiting.is_none() && is_busy && state.retry.is_some_and(|retry| Instant::now() < retry) {
            return Ok(None);
        }
        state.used += 1;
        let waiting = state.waiting.take();
        drop(state);
        let got = match waiting {
            Some(place) => self.look(place),
            None => self.ask(is_busy),
        };
        if !matches!(got, Ok(Some(_))) {
            self.state.lock().used -= 1;
        }
        got
    }

    /// Asks the pool. A copier that has none joins the queue.
    fn ask(&self, is_busy: bool) -> Result<Option<PinnedBuf>> {
        let found = self.longest(LEAST)?;
        if is_busy && found.as_ref().is_none_or(|buf| buf.capacity() < self.len) {
            self.state.lock().retry = Instant::now().checked_add(RETRY);
        }
        if is_busy || found.is_some() {
            return Ok(found);
        }
        self.look(self.pool.checkout_async(Self::request(LEAST)).unbounded())
    }

    /// Looks whether what was asked for has come. It wakes no task: workers ask while they work.
    fn look(&self, mut place: Checkout) -> Result<Option<PinnedBuf>> {
        match Pin::new(&mut place).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(got) => self.or_longer(got?).map(Some),
            Poll::Pending => {
                let before = self.state.lock().waiting.replace(place);
                drop(before);
                Ok(None)
            }
        }
    }

    /// A segment of full length; if the pool has none, its longest one of `least` bytes or more.
    fn longest(&self, least: usize) -> Result<Option<PinnedBuf>> {
        let ask = |len| self.pool.for_copier(Self::request(len), Wait::Retry);
        let got = match ask(self.len) {
            // A segment of whole pages, with its header.
            Err(Error::Exhausted(short)) => match short.largest.min(self.len).saturating_sub(32) {
                len if len < least => return Ok(None),
                len => ask(len),
            },
            got => got,
        };
        match got {
            Err(Error::Exhausted(_)) => Ok(None),
            got => got.map(Some),
        }
    }

    /// What was waited for is as short as can be: takes a longer one, if there is any by now.
    fn or_longer(&self, short: PinnedBuf) -> Result<PinnedBuf> {
        Ok(self.longest(short.capacity() + PAGE)?.unwrap_or(short))
    }

    /// A second segment for a call whose reader or writer may wait for another transfer of the
    /// copier: only one of full length, and only if the share and the pool have one left for that
    /// transfer.
    pub(super) fn second(&self) -> Result<Option<PinnedBuf>> {
        if self.state.lock().used >= usable(self.most, Priority::Bulk, Kind::Blocking) {
            return Ok(None);
        }
        let Some(second) = self.longest(self.len)? else { return Ok(None) };
        Ok(self.longest(LEAST)?.map(|_left| second))
    }

    /// Waits for a segment that does not count, for at most `most`.
    pub(super) fn wait(&self, most: Option<Duration>) -> Result<PinnedBuf> {
        if let Some(buf) = self.longest(LEAST)? {
            return Ok(buf);
        }
        self.or_longer(self.pool.for_copier(Self::request(LEAST), Wait::Thread(most))?)
    }

    /// What the pool lacks for a segment, as the error of a request.
    pub(super) fn shortage(&self) -> Error {
        self.pool.shortage(Self::request(LEAST))
    }

    /// No chunk uses it any more. `None`: it has returned to the pool by itself, or will.
    pub(super) fn give(&self, buf: Option<PinnedBuf>) {
        let (full, short) = match buf {
            Some(mut buf) if buf.capacity() >= self.len => {
                buf.clear();
                (Some(buf), None)
            }
            buf => (None, buf),
        };
        let mut state = self.state.lock();
        state.used -= 1;
        state.free.extend(full);
        drop(state);
        drop(short);
    }

    /// Gives free segments back to the pool, and gives up the place in its queue: there is no work.
    pub(super) fn rest(&self) {
        let mut state = self.state.lock();
        let left = (std::mem::take(&mut state.free), state.waiting.take());
        drop(state);
        drop(left);
    }
}
