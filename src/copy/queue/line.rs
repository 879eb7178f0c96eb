//! Lines: a lane as its handles have it. How a copy gets there, how its handle waits, asks, and leaves, and how a
//! stream is made to come after it.
//!
//! What is pushed is submitted by whoever has the role, at the latest by the queue's thread, so a handle need do
//! nothing for that; but an order after a copy needs its sequence number, which it has when it is submitted, and so
//! helps.

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::flow::Flow;
use super::lane::{Entry, Lane};
use crate::central::Wake;
use crate::device::Transfer;
use crate::device::memory::Allocation;
use crate::error::{Error, Result};
use crate::foreign::Task;
use crate::stream::Stream;
use crate::stream::awaited::{AwaitedCopy, Range};
use crate::stream::timeline::{Resource, WaitKey};
use crate::sync::{Own, yield_now};

/// How long a waker on the queue's thread tries to submit what it asked to be preceded by.
const GIVE_UP: Duration = Duration::from_millis(100);

/// What handles have of a lane. One for each lane and queue, so that counting its handles disturbs no other lane.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) flow: Arc<Flow>,
    pub(super) lane: u32,
}

impl Line {
    pub(super) fn lane(&self) -> &Lane {
        self.flow.lane(self.lane)
    }

    /// Pushes a copy, or submits it at once where there is nothing else to submit: its number.
    pub(super) fn submit(
        &self,
        mut entry: Entry<'_>,
        transfer: Transfer,
        resource: Resource,
        memory: Arc<Allocation>,
    ) -> u64 {
        let flow = &self.flow;
        if let Some(role) = flow.direct() {
            if let Some(next) = entry.next(self.lane) {
                // Whoever shares the lane is not kept out while the driver is called.
                drop(entry);
                return flow.submit_lone(role, next, transfer, resource, memory);
            }
        }
        let number = entry.push(flow.filled(), self.lane, transfer, resource, memory);
        drop(entry);
        flow.rouse();
        number
    }
}

impl AwaitedCopy for Line {
    fn poll_done(&self, range: &Range) -> Result<bool> {
        crate::os::check_fork()?;
        if self.lane().verdict(range)? {
            return Ok(true);
        }
        self.flow.look();
        self.lane().verdict(range)
    }

    fn wait(&self, range: &Range, deadline: Option<Instant>) -> Result<()> {
        self.flow.wait(self.lane(), range, deadline)
    }

    fn wake_later(&self, range: &Range, key: &mut Option<WaitKey>, waker: &Waker) -> Result<bool> {
        self.forget_waker(key);
        if self.poll_done(range)? {
            return Ok(true);
        }
        // Cloned before the lock: that is the caller's code.
        *key = self.lane().lie_down(range.last, Wake::Task(Task::of(waker)));
        if key.is_some() {
            self.flow.timeline().expedite();
            return Ok(false);
        }
        self.lane().verdict(range)
    }

    fn forget_waker(&self, key: &mut Option<WaitKey>) {
        // In the child of a fork the lock may be anyone's.
        if let Some(key) = key.take().filter(|_| !crate::os::forked()) {
            self.lane().get_up(key);
        }
    }

    fn precede(&self, range: &Range, stream: &Stream) -> Result<()> {
        crate::os::check_fork()?;
        let lane = self.lane();
        let (submits, since) = (crate::sync::own() == Some(Own::Submitter), Instant::now());
        while !lane.is_sent(range.last) {
            if lane.verdict(range)? {
                return Ok(());
            }
            // It never will be where nothing is submitted any more. Whoever has the role says so to each lane; that may
            // be this very thread, in a waker.
            self.flow.timeline().usable()?;
            // Under way: somebody submits just now, or is about to. In a waker on the queue's own thread that is nobody
            // else; unless it is in the midst of submitting.
            if submits && !self.flow.submit() && since.elapsed() > GIVE_UP {
                return Err(Error::Unsupported(
                    "an order after a copy that is not submitted yet, from a waker on the thread that submits; wake a task or \
                     thread of your own, and call there"
                        .into(),
                ));
            }
            // Last: who has submitted sees to what has come in meanwhile.
            self.flow.rouse();
            yield_now();
        }
        if lane.verdict(range)? {
            return Ok(());
        }
        stream.follow(self.flow.timeline())
    }

    fn leave(&self, range: &Range, quiet: bool) {
        if !crate::os::forked() {
            self.lane().leave(range, quiet);
        }
    }
}
