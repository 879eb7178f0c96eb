//! Waiting for a sequence number, as a thread or as a task.
//!
//! A thread in [`Timeline::wait`] asks the driver by itself for a short time, then parks and leaves the asking to the
//! reaper. A task leaves a waker. Either is woken by the thread that sees the completion.

use std::sync::{Arc, OnceLock};
use std::task::Waker;
use std::time::{Duration, Instant};

use super::super::hold::After;
use super::look::Stillness;
use super::{Timeline, TimelineState};
use crate::central::Wake;
use crate::error::{Error, ErrorClass, Result};
use crate::foreign::Task;
use crate::sync::{Ordering, thread};

/// For how long a waiting thread asks continuously before it parks and leaves the asking to the reaper.
const SPIN: Duration = Duration::from_micros(50);

/// Until when, from the start of the wait, a waiting thread then asks with pauses, on a machine with cores to spare. A
/// copy behind one or two bulk chunks takes about this long, and by way of the reaper the waiter would learn of it
/// after as long again (the reaper's pause and the thread's wake).
const PAUSED_SPIN: Duration = Duration::from_micros(250);
/// The pause between two of these questions. A thread that asks without pause slows threads that submit.
const APART: Duration = Duration::from_micros(5);
/// From this number of cores on a machine has some to spare.
const MANY_CORES: usize = 8;

/// Whether this machine has cores to spare.
fn has_many_cores() -> bool {
    static MANY: OnceLock<bool> = OnceLock::new();
    *MANY.get_or_init(|| {
        cfg!(not(loom)) && std::thread::available_parallelism().is_ok_and(|n| n.get() >= MANY_CORES)
    })
}

/// A thread or a task that waits for a sequence number.
#[derive(Debug)]
pub(super) struct Waiting {
    seq: u64,
    wake: Wake,
}

impl Timeline {
    /// Whether a sequence number is complete.
    ///
    /// # Errors
    /// The error with which the stream was lost: the number never will be complete. [`Error::Forked`] in the child of a
    /// fork.
    pub(crate) fn is_complete(&self, seq: u64) -> Result<bool> {
        // First: in the child of a fork the memory is not there, even if the parent's device was done with it.
        crate::os::check_fork()?;
        // Acquire: pairs with the release in `complete`.
        if self.completed.load(Ordering::Acquire) >= seq {
            return Ok(true);
        }
        // Acquire: pairs with the release in `lose`.
        if !self.given_up.load(Ordering::Acquire) {
            return Ok(false);
        }
        let state = self.state.lock();
        match &state.lost {
            Some(_) if self.completed.load(Ordering::Acquire) >= seq => Ok(true),
            Some(error) => Err(error.clone()),
            None => Ok(false),
        }
    }

    /// [`is_complete`](Self::is_complete) after a look at the stream.
    pub(crate) fn poll_complete(&self, seq: u64) -> Result<bool> {
        if self.completed.load(Ordering::Acquire) < seq {
            self.glance(seq);
        }
        self.is_complete(seq)
    }

    /// Closes the sequence number if it is still open, so that its completion can be seen.
    ///
    /// # Errors
    /// [`Error::Capturing`]: no event can be recorded before the capture ends.
    fn flush(&self, seq: u64) -> Result<()> {
        let (open, unpublished) = {
            let state = self.state.lock();
            (state.open, state.unpublished)
        };
        // The reaper repeats a recording that failed. On a shared stream this thread tries too: if a capture is in the
        // way that only this thread can end, the wait must be refused.
        if seq >= open || (seq <= unpublished && self.is_shared()) {
            // (The capture is of this stream; or of another one, if this is the legacy default stream.)
            let closed = self.close_open();
            if self.is_shared() && closed.is_err_and(|error| error.class() == ErrorClass::Capture) {
                return Err(Error::Capturing { what: "recording an event", remedy: "end the capture first" });
            }
        }
        Ok(())
    }

    /// Waits until a sequence number is complete.
    ///
    /// # Errors
    /// [`Error::Timeout`], on a stepped device without a deadline too, if nothing is left to step; the errors of
    /// [`is_complete`](Self::is_complete) and `flush`; [`Error::Unsupported`] on a thread that completes entries.
    pub(crate) fn wait(self: &Arc<Self>, seq: u64, deadline: Option<Instant>) -> Result<()> {
        if self.is_complete(seq)? {
            return Ok(());
        }
        let since = Instant::now();
        let late = |now: Instant| deadline.is_some_and(|d| now >= d);
        if crate::sync::finds_out() {
            // The thread would wait for itself.
            return Err(Error::Unsupported(
                "a wait for a copy from a waker, which runs on a thread that completes copies; wake a task or a thread \
                 of your own, and wait there"
                    .into(),
            ));
        }
        self.flush(seq)?;
        if let Some(stepped) = self.context.driver().stepped() {
            let mut still = Stillness::default();
            loop {
                let busy = self.is_busy();
                self.advance(true);
                let busy = busy | self.is_busy();
                if self.is_complete(seq)? {
                    return Ok(());
                }
                if stepped.step() {
                    still.stepped();
                } else if still.is_final(busy) || busy && late(Instant::now()) {
                    // A stepped device that has nothing to step now has nothing later either.
                    return Err(Error::Timeout(since.elapsed().into()));
                }
            }
        }
        while since.elapsed() < SPIN {
            if !self.ask() {
                std::hint::spin_loop();
                thread_yield();
            }
            if self.is_complete(seq)? {
                return Ok(());
            }
        }
        while has_many_cores() && since.elapsed() < PAUSED_SPIN && !late(Instant::now()) {
            let asked = Instant::now();
            self.ask();
            if self.is_complete(seq)? {
                return Ok(());
            }
            while asked.elapsed() < APART {
                std::hint::spin_loop();
            }
            thread_yield();
        }
        loop {
            let key = {
                let mut state = self.state.lock();
                if state.lost.is_some() || self.completed.load(Ordering::Relaxed) >= seq {
                    None
                } else {
                    Some(state.wait(seq, Wake::Thread(thread::current())))
                }
            };
            if let Some(key) = key {
                self.reaper.expedite(self.number);
                thread::park_until(deadline);
                let _thread = self.state.lock().stop_waiting(key);
            }
            if self.is_complete(seq)? {
                return Ok(());
            }
            if late(Instant::now()) {
                return Err(Error::Timeout(since.elapsed().into()));
            }
        }
    }

    /// Leaves a waker, in place of the one left under `key` before. `true`: complete already, and no waker was left.
    pub(crate) fn wake_later(
        self: &Arc<Self>,
        seq: u64,
        key: &mut Option<u64>,
        waker: &Waker,
    ) -> Result<bool> {
        crate::os::check_fork()?;
        self.forget_waker(key);
        // If a capture is in the way, the reaper closes the number after it, and a task can wait for that.
        let _ = self.flush(seq);
        if self.poll_complete(seq)? {
            return Ok(true);
        }
        // Before the lock: cloning a waker is foreign code.
        let task = Task::of(waker);
        {
            let mut state = self.state.lock();
            if state.lost.is_none() && self.completed.load(Ordering::Relaxed) < seq {
                *key = Some(state.wait(seq, Wake::Task(task)));
            }
        }
        if key.is_some() {
            self.reaper.expedite(self.number);
            return Ok(false);
        }
        self.is_complete(seq)
    }

    /// Removes the waker that was left under `key`.
    pub(crate) fn forget_waker(&self, key: &mut Option<u64>) {
        // In the child of a fork another thread of the parent may hold the lock for ever.
        if let Some(key) = key.take().filter(|_| !crate::os::forked()) {
            // Dropped after the lock: the waker may be the last owner of a task, and the task of buffers.
            let waker = self.state.lock().stop_waiting(key);
            drop(waker);
        }
    }
}

impl TimelineState {
    pub(super) fn take_wakes(&mut self, after: &mut After, due: impl Fn(u64) -> bool) {
        let keys: Vec<u64> = self.waiting.iter().filter(|(_, w)| due(w.seq)).map(|(key, _)| *key).collect();
        after.wakes.extend(keys.into_iter().filter_map(|key| self.stop_waiting(key)));
    }

    fn wait(&mut self, seq: u64, wake: Wake) -> u64 {
        self.next_wait += 1;
        self.waiting.insert(self.next_wait, Waiting { seq, wake });
        self.next_wait
    }

    #[must_use = "to be dropped after the lock"]
    fn stop_waiting(&mut self, key: u64) -> Option<Wake> {
        self.waiting.remove(&key).map(|waiting| waiting.wake)
    }
}

fn thread_yield() {
    crate::sync::yield_now();
}
