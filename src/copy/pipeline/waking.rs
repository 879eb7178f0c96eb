//! Who wakes whom among the threads of a pipeline.
//!
//! Waking a thread takes as long as copying a chunk, and nearly as much of the one that wakes it. So nobody is woken for
//! what the one who would wake him does anyway ([`Engine::bring_back`]). A worker that runs out of work while a transfer is
//! live looks around now and then for a moment before it sleeps, where the machine has cores to spare; while it is awake, a
//! *call* is one more on a counter, which it takes down. At the end of the last transfer nobody is called: so one that
//! follows soon finds them awake. And those who sleep when a transfer starts are woken one by one, by
//! its caller and by each other, with the lock given up: told together they would wake one behind the other, each when
//! the one before it has let go of the lock.
//!
//! A call is never lost: it is taken by somebody who looks for work under the lock afterwards, or passed on to one that
//! sleeps when nobody is awake for it any more.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::locks::MutexGuard;

use super::arrival::PAUSE;
use super::engine::{Engine, PATIENCE, State};

thread_local! {
    /// Which worker this is, from 1 on, of the engine at that address.
    static WORKER: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

impl Engine {
    /// This thread is our worker of that number, counted from 0.
    pub(super) fn begin_work(&self, number: usize) {
        WORKER.set((std::ptr::from_ref(self).addr(), number + 1));
    }

    /// Has so many workers look for work, those who are awake first; the others are [roused](Self::rouse) when the lock
    /// is given up.
    pub(super) fn call_some(&self, state: &mut State, workers: usize) {
        for _ in 0..workers {
            // Besides those who are called already, for something else.
            if self.calls.load(Ordering::Relaxed) < state.awake {
                self.calls.fetch_add(1, Ordering::Relaxed);
            } else if state.asleep < self.settings.threads {
                state.asleep += 1;
            }
        }
    }

    /// Has a worker look for work: one that is awake, or else one that sleeps.
    pub(super) fn call(&self, state: &State) {
        if self.calls.load(Ordering::Relaxed) < state.awake {
            self.calls.fetch_add(1, Ordering::Relaxed);
        } else {
            self.work.notify_one();
        }
    }

    /// Has all of them look.
    pub(super) fn call_all(&self, state: &State) {
        self.calls.store(state.awake, Ordering::Relaxed);
        self.work.notify_all();
    }

    /// Takes one of the calls.
    pub(super) fn is_called(&self) -> bool {
        let take = |calls: usize| calls.checked_sub(1);
        self.calls.load(Ordering::Relaxed) > 0
            && self.calls.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }

    /// Wakes one more of those that are to be woken for a transfer that has started. Whether there was one.
    pub(super) fn rouse(&self) -> bool {
        {
            let mut state = self.state.lock();
            if state.asleep == 0 {
                return false;
            }
            state.asleep -= 1;
        }
        // With the lock given up: it is what he takes first.
        self.work.notify_one()
    }

    /// Waits without the lock, and with an ear for calls.
    pub(super) fn listen<T>(&self, state: &mut MutexGuard<'_, State>, wait: impl FnOnce() -> T) -> T {
        state.awake += 1;
        let value = MutexGuard::unlocked(state, wait);
        state.awake -= 1;
        value
    }

    /// Passes on the calls that nobody is awake for any more.
    pub(super) fn pass_on(&self, state: &State) {
        while self.calls.load(Ordering::Relaxed) > state.awake && self.is_called() {
            self.work.notify_one();
        }
    }

    /// A worker has found nothing to do, and rests until it is called: for a while looking around, and then asleep. So those
    /// that were busy last are called first, and those that are not needed sleep.
    pub(super) fn rest(&self, state: &mut MutexGuard<'_, State>) {
        // As it was found: others may take it upon them to look again, and have by now.
        let dry = state.share.dry;
        if !state.jobs.is_empty() && !self.settings.patience.is_zero() {
            let heard = self.listen(state, || {
                let since = Instant::now();
                loop {
                    if self.is_called() {
                        return true;
                    }
                    if since.elapsed() >= self.settings.patience {
                        return false;
                    }
                    std::thread::sleep(PAUSE);
                }
            });
            // Called since it stopped listening.
            let called = heard || self.is_called();
            self.pass_on(state);
            if called {
                return;
            }
        }
        if (dry || state.share.dry) && !state.jobs.is_empty() {
            // The pool had nothing, and what we have may stay with a caller who waits for somebody else.
            if self.work.wait_for(state, PATIENCE).timed_out() {
                self.look_again(state);
            }
        } else {
            self.work.wait(state);
        }
        if state.asleep > 0 {
            MutexGuard::unlocked(state, || self.rouse());
        }
    }

    /// Which of our workers this thread is, from 1 on; 0 for all others.
    pub(super) fn worker(&self) -> usize {
        let (engine, number) = WORKER.get();
        if engine == std::ptr::from_ref(self).addr() { number } else { 0 }
    }
}
