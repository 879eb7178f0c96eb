//! Waiting for a sequence number, as a thread or as a task.

use std::sync::{Arc, OnceLock};
use std::task::Waker;
use std::time::{Duration, Instant};

use super::look::Stillness;
use super::retained::After;
use super::{Timeline, TimelineState};
use crate::central::Wake;
use crate::error::{Error, ErrorClass, Result};
use crate::foreign::Task;
use crate::sync::{Ordering, thread};

/// How long a waiting thread asks by itself before it parks and leaves the asking to the reaper.
pub(crate) const SPIN: Duration = Duration::from_micros(50);

/// How long it asks now and then after that, where the machine has cores to spare: a copy behind a bulk chunk or two
/// takes so long, and to find out by way of the reaper takes as long again (its pause, and waking the thread).
const PAUSED_SPIN: Duration = Duration::from_micros(250);
/// Between two questions then: who asks all the time is in the way of those who submit.
const APART: Duration = Duration::from_micros(5);
/// Cores of a machine that has some to spare.
const MANY_CORES: usize = 8;

/// Whether this machine has cores to spare.
fn has_many_cores() -> bool {
    static MANY: OnceLock<bool> = OnceLock::new();
    *MANY.get_or_init(|| {
        cfg!(not(loom)) && std::thread::available_parallelism().is_ok_and(|n| n.get() >= MANY_CORES)
    })
}

/// Someone who waits for a sequence number.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) id: u64,
    pub(super) seq: u64,
    pub(super) wake: Wake,
}

/// Names someone who waits. The place may be another's by now, the number is never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WaitKey {
    pub(crate) place: usize,
    pub(crate) id: u64,
}

impl Timeline {
    /// Whether a sequence number is complete.
    ///
    /// # Errors
    /// The stream is lost: it never will be. Or this is the child of a fork.
    pub(crate) fn is_complete(&self, seq: u64) -> Result<bool> {
        // First: what the parent's device was done with is not there either.
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

    /// The same, after having had a look.
    pub(crate) fn poll_complete(&self, seq: u64) -> Result<bool> {
        if self.completed.load(Ordering::Acquire) < seq {
            self.glance(seq);
        }
        self.is_complete(seq)
    }

    /// Closes the sequence number if it is still open, so that its completion can be seen.
    ///
    /// # Errors
    /// [`Error::Capturing`]: no event can be recorded before the capture was ended.
    fn flush(&self, seq: u64) -> Result<()> {
        let (open, unpublished) = {
            let state = self.state.lock();
            (state.open, state.unpublished)
        };
        // What failed is tried again by the reaper, but for a capture that this very thread may be about to end.
        if seq >= open || (seq <= unpublished && self.is_shared()) {
            // (Of this stream, or on the legacy default stream of another.)
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
    /// [`Error::Timeout`], or what the stream was lost with.
    pub(crate) fn wait(self: &Arc<Self>, seq: u64, deadline: Option<Instant>) -> Result<()> {
        if self.is_complete(seq)? {
            return Ok(());
        }
        let since = Instant::now();
        let late = |now: Instant| deadline.is_some_and(|d| now >= d);
        if crate::sync::finds_out() {
            // It would wait for itself.
            return Err(Error::Unsupported(
                "a wait for a copy from a waker, which runs on the thread that finds out what is done; wake a task or thread \
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
                    // A device that cannot move by itself will not do so later either.
                    return Err(Error::Timeout(since.elapsed()));
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
                self.reaper.expedite(self);
                thread::park_until(deadline);
                let _thread = self.state.lock().stop_waiting(key);
            }
            if self.is_complete(seq)? {
                return Ok(());
            }
            if late(Instant::now()) {
                return Err(Error::Timeout(since.elapsed()));
            }
        }
    }

    /// Leaves a waker, in place of the one left before under `key`. `true`: complete already, nothing was left.
    pub(crate) fn wake_later(
        self: &Arc<Self>,
        seq: u64,
        key: &mut Option<WaitKey>,
        waker: &Waker,
    ) -> Result<bool> {
        crate::os::check_fork()?;
        self.forget_waker(key);
        // During a capture the reaper makes up for it later, and a task can wait for that.
        let _ = self.flush(seq);
        if self.poll_complete(seq)? {
            return Ok(true);
        }
        // Before the lock: to clone a waker is foreign code.
        let task = Task::of(waker);
        {
            let mut state = self.state.lock();
            if state.lost.is_none() && self.completed.load(Ordering::Relaxed) < seq {
                *key = Some(state.wait(seq, Wake::Task(task)));
            }
        }
        if key.is_some() {
            self.reaper.expedite(self);
            return Ok(false);
        }
        self.is_complete(seq)
    }

    /// Takes the waker back.
    pub(crate) fn forget_waker(&self, key: &mut Option<WaitKey>) {
        // In the child of a fork the lock may be anyone's.
        if let Some(key) = key.take().filter(|_| !crate::os::forked()) {
            // Dropped after the lock, since a task may go with it, and buffers with the task.
            let waker = self.state.lock().stop_waiting(key);
            drop(waker);
        }
    }
}

impl TimelineState {
    pub(super) fn take_wakes(&mut self, after: &mut After, due: impl Fn(u64) -> bool) {
        if self.waiting.is_empty() {
            return;
        }
        let places: Vec<usize> = self.waiting.iter().filter(|(_, w)| due(w.seq)).map(|(k, _)| k).collect();
        after.wakes.extend(places.into_iter().map(|k| self.waiting.remove(k).wake));
    }

    fn wait(&mut self, seq: u64, wake: Wake) -> WaitKey {
        self.next_wait += 1;
        let id = self.next_wait;
        WaitKey { place: self.waiting.insert(Waiting { id, seq, wake }), id }
    }

    #[must_use = "to be dropped after the lock"]
    fn stop_waiting(&mut self, key: WaitKey) -> Option<Wake> {
        let theirs = self.waiting.get(key.place).is_some_and(|w| w.id == key.id);
        theirs.then(|| self.waiting.remove(key.place).wake)
    }
}

fn thread_yield() {
    crate::sync::yield_now();
}
