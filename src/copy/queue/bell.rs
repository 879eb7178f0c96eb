//! When the submitter sleeps, and who wakes it.
//!
//! Two parties must not miss each other: whoever pushes a copy, and whoever stops looking for copies, be it the thread
//! that lies down to sleep or a pushing thread that submitted its own copy and is done with that. Each says first what
//! it has done (a lane is filled; asleep; the role is free), then fences, and then looks at what the other says. So at
//! least one of the two sees the other, and no copy is left lying with nobody to submit it. The fences are sequentially
//! consistent; with either of them gone the loom model finds the copy that is left behind.
//!
//! The role of submitting is taken by try-acquire and never waited for.

use std::sync::OnceLock;

use crate::sync::{AtomicBool, Ordering, fence, thread};

/// Where a queue's thread is woken.
#[derive(Debug, Default)]
pub(super) struct Bell {
    asleep: AtomicBool,
    /// No more handles: what is there is submitted, and then the thread ends.
    closing: AtomicBool,
    sleeper: OnceLock<thread::Thread>,
}

impl Bell {
    /// The thread introduces itself. Until then, and where there is none, it counts as asleep.
    pub(super) fn asleep() -> Self {
        Self { asleep: AtomicBool::new(true), closing: AtomicBool::new(false), sleeper: OnceLock::new() }
    }

    pub(super) fn introduce(&self, sleeper: thread::Thread) {
        let _ = self.sleeper.set(sleeper);
        self.asleep.swap(false, Ordering::Relaxed);
    }

    /// Whether the thread sleeps, for who has just filled a lane.
    pub(super) fn is_asleep(&self) -> bool {
        fence(Ordering::SeqCst);
        self.asleep.load(Ordering::Relaxed)
    }

    /// The same as a hint, for who goes on to look when it says no.
    pub(super) fn seems_asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
    }

    /// Wakes the thread.
    pub(super) fn ring(&self) {
        // Looked at first, so that the line stays shared while the thread is up. Relaxed: unparking hands over what the
        // sleeper is to see.
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            if let Some(sleeper) = self.sleeper.get() {
                sleeper.unpark();
            }
        }
    }

    /// No more handles.
    pub(super) fn close(&self) {
        // Release: pairs with the acquire in `is_closing`.
        self.closing.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        self.ring();
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Sleeps until somebody rings, unless `idle` says that there is something to do after all. The thread's own call.
    pub(super) fn sleep(&self, idle: impl Fn() -> bool) {
        // Exchanges, here and below, for the models' sake: the order of a plain store and of another thread's exchange
        // is left open there.
        self.asleep.swap(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if idle() && !self.is_closing() {
            while self.asleep.load(Ordering::Relaxed) {
                thread::park_until(None);
            }
        }
        self.asleep.swap(false, Ordering::Relaxed);
    }
}

/// The right to submit.
#[derive(Debug)]
pub(super) struct Role(AtomicBool);

/// It, held.
#[derive(Debug)]
pub(super) struct Held<'a>(&'a Role);

impl Role {
    pub(super) fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Whether somebody has it just now, who may give it up as this returns.
    pub(super) fn is_taken(&self) -> bool {
        // Acquire: pairs with the release of who gave it up: what that one has submitted is seen after this.
        self.0.load(Ordering::Acquire)
    }

    /// `None`: somebody else has it, and looks again when it is given up.
    pub(super) fn try_take(&self) -> Option<Held<'_>> {
        // Acquire: pairs with the release below, so that submitters follow one another.
        let taken = self.0.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        // Not `then_some`, whose value would be made in any case, and give up what another one has by being dropped.
        taken.is_ok().then(|| Held(self))
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::Release);
        // Whoever gave it up looks again after this.
        fence(Ordering::SeqCst);
    }
}
