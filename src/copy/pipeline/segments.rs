//! Who gets which segment of the pool, and who waits for one.
//!
//! The engine has at most so many. One that comes back is kept for the next chunk, for as long as any transfer
//! is live; then all of them go back to the pool. Of the pool it asks without waiting, so that a bulk load does not stand
//! in the pool's queue in front of others, and goes on with what it has. Only when it has none at all does one thread wait
//! in the queue, like anybody else. An eighth is kept for the foreground; and where both directions are under way neither
//! has more than half; nor have downloads that their callers drain, who may wait for another transfer before they go on. Of
//! the others as many are in use as keep threads and wire busy, the one that came back last first: what the CPU has just
//! read or written is in its caches, and there the device finds it, or puts it. The counts, and which threads hear of the
//! pool's answers: [`super::share`].

use std::future::Future as _;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use crate::locks::MutexGuard;

use super::config::Priority;
use super::engine::{Engine, Live, PATIENCE, State};
use super::job::{Direction, Job, Kind};
use super::share::{Answer, Look, Tell, Wish};
use crate::buffer::PinnedBuf;
use crate::error::{Error, Result};
use crate::pool::Request;
use crate::segment::PAGE;

/// What came of looking for a segment.
pub(super) enum Got {
    Segment(PinnedBuf),
    /// All of ours are in use: one will come back.
    NotNow,
    Failed(Error),
}

impl From<Result<PinnedBuf>> for Got {
    fn from(tried: Result<PinnedBuf>) -> Self {
        match tried {
            Ok(buf) => Self::Segment(buf),
            Err(Error::Exhausted { .. }) => Self::NotNow,
            Err(error) => Self::Failed(error),
        }
    }
}

/// Wakes a thread that waits as a task does.
struct Unparks(std::thread::Thread);

impl Wake for Unparks {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl Engine {
    /// Takes a segment for a chunk of `job`, if there is one. Waits only where the pool has none and we have none either.
    pub(super) fn acquire(
        &self,
        state: &mut MutexGuard<'_, State>,
        direction: Direction,
        job: &Arc<Job>,
        patient: bool,
    ) -> Got {
        let beside = state.windows.bytes.div_ceil(self.settings.segment);
        let most = self.settings.segments;
        let both = state.jobs.iter().any(|live| live.job.direction == direction.other());
        let half = |all: usize| if both { (all / 2).max(1) } else { all };
        let (mut all, mut own) = (most, half(most));
        if job.priority == Priority::Bulk {
            let kept = if most > 1 { (most / 8).max(1) } else { 0 };
            all = most - kept;
            own = half(all).min(self.settings.rotation);
        }
        let pulled = job.kind == Kind::Caller && direction == Direction::Down;
        if pulled {
            // Their callers may wait for another transfer before they take the next chunk: all of them together have half, and
            // each that has none yet one more, as long as one is left.
            let pulled = |live: &Live| live.job.kind == Kind::Caller && live.job.direction == Direction::Down;
            let theirs: usize =
                state.jobs.iter().filter(|live| pulled(live)).map(|live| live.job.active()).sum();
            // With those that are asked for.
            let theirs = theirs + state.share.pulling;
            let more = job.active() == 0 && state.share.pulling == 0 && theirs + 1 < own;
            if theirs >= (own / 2).max(1) && !more {
                return Got::NotNow;
            }
        }
        // What only workers do goes first.
        let patient = patient && state.has_none() && !(self.worker() > 0 && self.has_copies(state));
        let question = match state.share.look(&Wish { direction, all, own, beside, pulled, patient }) {
            Look::NotNow => return Got::NotNow,
            Look::Stashed => {
                let Some(mut buf) = state.take_near() else { return Got::NotNow };
                state.share.out[direction as usize] += 1;
                buf.clear();
                return Got::Segment(buf);
            }
            Look::Ask(question) => question,
        };
        let asked = self.outside(state, || match question.waits {
            true => Ok(self.queue_for_segment(job)),
            false => Ok(Got::from(self.pool.try_checkout(self.request()))),
        });
        let got = asked.unwrap_or_else(Got::Failed);
        let answer = match &got {
            Got::Segment(_) => Answer::Segment,
            Got::NotNow => Answer::Nothing,
            Got::Failed(_) => Answer::Failed,
        };
        match state.share.answered(question, answer, self.worker() > 0) {
            Tell::None => {}
            Tell::Dry { worker, untimed } => {
                if worker {
                    // It looks after it: see `rest`.
                    self.call(state);
                }
                if untimed {
                    // They look after it as well, since workers may be busy for long.
                    self.bells.iter().for_each(|bell| _ = bell.notify_one());
                    self.room.notify_all();
                }
            }
            Tell::All => {
                self.call(state);
                self.tell_room(state);
            }
        }
        got
    }

    /// Stands in the pool's queue, like anybody, until there is a segment, or the transfer has stopped, or there is something else
    /// to do.
    fn queue_for_segment(&self, job: &Job) -> Got {
        if self.device.context().driver().stepped().is_some() {
            // Nothing moves there unless it is waited for.
            return match self.pool.checkout_timeout(self.request(), PATIENCE) {
                Err(Error::Timeout(_)) => Got::NotNow,
                tried => Got::from(tried),
            };
        }
        let has_copies = || self.has_copies(&self.state.lock());
        // A worker: others cannot do it.
        let is_needed = || self.worker() > 0 && has_copies();
        let waker = Waker::from(Arc::new(Unparks(std::thread::current())));
        // As a task: whoever looks up from time to time keeps his place.
        let mut place = pin!(self.pool.checkout_async(self.request()));
        loop {
            match place.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(tried) => return Got::from(tried),
                Poll::Pending if job.stopped() || is_needed() => return Got::NotNow,
                Poll::Pending => {
                    if has_copies() {
                        // What a watcher would see to, that stands here.
                        self.call(&self.state.lock());
                    }
                    std::thread::park_timeout(PATIENCE);
                }
            }
        }
    }

    /// Whether there is something to do that needs no segment, for which the one who waits for a segment may be the only one.
    fn has_copies(&self, state: &State) -> bool {
        let mut priorities = [Priority::Foreground, Priority::Bulk].into_iter();
        priorities.any(|priority| self.copies(state, priority).is_some())
    }

    /// What is asked of the pool for a segment.
    pub(super) fn request(&self) -> Request<'_> {
        Request::new(self.settings.chunk + 2 * PAGE).align(PAGE).near(&self.device)
    }

    /// A segment comes back, or (`None`) has gone to the pool or is lost.
    pub(super) fn give_back(
        &self,
        state: &mut MutexGuard<'_, State>,
        direction: Direction,
        buf: Option<PinnedBuf>,
    ) {
        self.put_back(state, direction, buf);
        self.call(state);
        self.made_room(state);
    }

    /// The same, by a worker that looks for work right after it, and takes the segment if there is nothing more urgent:
    /// nobody has to be woken for it.
    pub(super) fn bring_back(&self, state: &mut MutexGuard<'_, State>, direction: Direction, buf: PinnedBuf) {
        self.put_back(state, direction, Some(buf));
        if state.share.stash.len() > 1 {
            self.call(state);
        }
        self.made_room(state);
    }

    fn put_back(&self, state: &mut MutexGuard<'_, State>, direction: Direction, buf: Option<PinnedBuf>) {
        state.share.out[direction as usize] -= 1;
        match buf {
            Some(buf) if !state.jobs.is_empty() => state.share.stash.push(buf),
            buf => Self::drop_outside(state, buf),
        }
        // Behind that: who has asked the pool just before would say that it has nothing.
        state.share.came_back();
    }

    /// The pool had nothing some time ago: it is to be asked again. Whoever waits for a segment does this from time to time, as
    /// all others may be busy for long.
    pub(super) fn look_again(&self, state: &mut MutexGuard<'_, State>) {
        if state.share.is_dry_no_more() {
            self.made_room(state);
            // A worker that has found it so may be about to sleep for long.
            self.call(state);
        }
    }

    /// Tells those who wait for a segment, workers left out.
    pub(super) fn made_room(&self, state: &mut MutexGuard<'_, State>) {
        state.share.events += 1;
        self.tell_room(state);
    }

    fn tell_room(&self, state: &mut MutexGuard<'_, State>) {
        self.room.notify_all();
        if state.jobs.iter().any(|live| live.job.direction == Direction::Down) {
            self.bells[Direction::Down as usize].notify_one();
        }
        let wakers = std::mem::take(&mut state.wakers);
        if !wakers.is_empty() {
            MutexGuard::unlocked(state, || wakers.into_iter().for_each(|(_, task)| task.wake()));
        }
    }
}
