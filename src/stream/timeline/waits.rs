//! Waiting for a sequence number, as a thread or as a task.
//!
//! A thread in [`Timeline::wait`] asks the driver by itself for a short time, then parks and leaves
//! the asking to the reaper. A task leaves a waker. Either is woken by the thread that sees the
//! completion.

use std::sync::{Arc, OnceLock};
use std::task::Waker;
use std::time::{Duration, Instant};

use super::Timeline;
use crate::central::Wake;
use crate::error::{Error, ErrorClass, Result};
use crate::foreign::Task;
use crate::sync::{Ordering, thread};

/// For how long a waiting thread asks without pause before it leaves the asking to the reaper.
const SPIN: Duration = Duration::from_micros(50);

/// Until when, from the start of the wait, a waiting thread then asks with pauses, on a machine
/// with cores to spare. A copy behind one or two bulk chunks takes about this long, and by way of
/// the reaper the waiter would learn of it after as long again (the reaper's pause and the thread's
/// wake).
const PAUSED_SPIN: Duration = Duration::from_micros(250);
/// The pause between two such questions: asking without pause slows threads that submit.
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

impl Timeline {
    /// Whether a sequence number is complete.
    ///
    /// # Errors
    /// The error with which the stream was lost: the number never will be complete.
    /// [`Error::Forked`] in the child of a fork.
    pub(crate) fn is_complete(&self, seq: u64) -> Result<bool> {
        // First: in a fork's child the memory is not there, even if the parent's device was done.
        crate::os::check_fork()?;
        // Before the load: `completed` is raised no more once the stream is lost.
        let not_lost = self.not_lost();
        // Acquire: pairs with the release in `complete`.
        match self.completed.load(Ordering::Acquire) >= seq {
            true => Ok(true),
            false => not_lost.map(|()| false),
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
        // The reaper repeats a recording that failed. On a shared stream this thread tries too: if
        // a capture is in the way that only this thread can end, the wait must be refused.
        let is_due = {
            let state = self.state.lock();
            // Only changed under the lock, which is held here.
            let completed = self.completed.load(Ordering::Relaxed);
            seq >= state.open || self.is_shared() && seq > state.covered().max(completed)
        };
        if is_due {
            // (The capture is of this stream; or of another, if this is the legacy default stream.)
            let closed = self.close();
            if self.is_shared() && closed.is_err_and(|error| error.class() == ErrorClass::Capture) {
                return Err(Error::Capturing { what: "recording an event", remedy: "end the capture first" });
            }
        }
        Ok(())
    }

    /// Waits until a sequence number is complete.
    ///
    /// # Errors
    /// [`Error::Timeout`], on a device by hand without a deadline too, if nothing can move any
    /// more; the errors of [`is_complete`](Self::is_complete) and `flush`; [`Error::Unsupported`]
    /// on a thread that completes entries.
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
        if self.context.is_by_hand() {
            // A recording that fails is tried again: nothing is left only if that is so three times
            // in a row.
            let mut still = 0;
            while still < 3 {
                self.advance(true);
                if self.is_complete(seq)? {
                    return Ok(());
                }
                still = if self.context.advance() { 0 } else { still + 1 };
            }
            return Err(Error::Timeout(since.elapsed().into()));
        }
        let spin = if has_many_cores() { PAUSED_SPIN } else { SPIN };
        loop {
            let asked = Instant::now();
            let is_paused = asked - since >= SPIN;
            if asked - since >= spin || is_paused && late(asked) {
                break;
            }
            let progress = self.ask();
            if self.is_complete(seq)? {
                return Ok(());
            }
            while is_paused && asked.elapsed() < APART {
                std::hint::spin_loop();
            }
            if is_paused || !progress {
                crate::sync::yield_now();
            }
        }
        loop {
            if let Some(key) = self.enter_waiter(seq, || Wake::Thread(thread::current())) {
                thread::park_until(deadline);
                let _thread = self.state.lock().waiting.remove(&(seq, key));
            }
            if self.is_complete(seq)? {
                return Ok(());
            }
            if late(Instant::now()) {
                return Err(Error::Timeout(since.elapsed().into()));
            }
        }
    }

    /// Leaves a waker, in place of the one left under `key` before. `true`: complete already, and
    /// no waker was left.
    pub(crate) fn wake_later(
        self: &Arc<Self>,
        seq: u64,
        key: &mut Option<u64>,
        waker: &Waker,
    ) -> Result<bool> {
        crate::os::check_fork()?;
        self.forget_waker(seq, key);
        // If a capture is in the way, the reaper closes the number after it; a task can wait.
        let _ = self.flush(seq);
        if self.poll_complete(seq)? {
            return Ok(true);
        }
        // Before the lock: cloning a waker is foreign code.
        let task = Task::of(waker);
        *key = self.enter_waiter(seq, || Wake::Task(task));
        if key.is_some() { Ok(false) } else { self.is_complete(seq) }
    }

    /// Enters a thread or a task that is to be woken, unless the number is complete or the stream
    /// lost. Returns its key.
    fn enter_waiter(&self, seq: u64, wake: impl FnOnce() -> Wake) -> Option<u64> {
        let mut state = self.state.lock();
        if self.lost.get().is_some() || self.completed.load(Ordering::Relaxed) >= seq {
            return None;
        }
        state.next_wait += 1;
        let key = state.next_wait;
        state.waiting.insert((seq, key), wake());
        drop(state);
        self.listing.expedite(self);
        Some(key)
    }

    /// Removes the waker that was left for `seq` under `key`.
    pub(crate) fn forget_waker(&self, seq: u64, key: &mut Option<u64>) {
        // In the child of a fork another thread of the parent may hold the lock for ever.
        if let Some(key) = key.take().filter(|_| !crate::os::forked()) {
            // Dropped after the lock: the waker may own a task, and the task buffers.
            let waker = self.state.lock().waiting.remove(&(seq, key));
            drop(waker);
        }
    }
}
