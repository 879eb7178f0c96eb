//! Locks: parking_lot's, under which a thread defers foreign code (see [`crate::foreign`]).
//!
//! A guard holds a deferral, which ends after the unlock: what came up meanwhile runs then. A wait
//! on a condition variable gives the lock up, and what was deferred runs first, if the thread holds
//! no other lock.
//!
//! In the child of a fork the crate takes no lock: a missing thread may hold the lock, or a part of
//! parking_lot's table of waiting threads. Debug builds assert that.
//!
//! `sync` passes the mutex on, or loom's in models; modules without models use this one.

// Clippy denies these types in every other module of the library.
#![allow(clippy::disallowed_types)]

use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use crate::foreign::{self, Deferral};
use crate::os;

const IN_CHILD: &str = "a lock is used in the child of a fork";

/// A mutual exclusion lock. It is not reentrant.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T: ?Sized>(parking_lot::Mutex<T>);

/// Access to the value of a locked [`Mutex`].
#[derive(Debug)]
#[must_use = "dropping it unlocks"]
pub(crate) struct MutexGuard<'a, T: ?Sized> {
    // Declared first, so dropped first: the deferral ends after the unlock.
    inner: parking_lot::MutexGuard<'a, T>,
    _deferral: Deferral,
}

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value))
    }
}

impl<T: ?Sized> Mutex<T> {
    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        debug_assert!(!os::forked(), "{IN_CHILD}");
        MutexGuard { inner: self.0.lock(), _deferral: foreign::defer() }
    }

    #[inline]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        debug_assert!(!os::forked(), "{IN_CHILD}");
        self.0.try_lock().map(|inner| MutexGuard { inner, _deferral: foreign::defer() })
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }
}

impl<T: ?Sized> MutexGuard<'_, T> {
    /// Unlocks while `inside` runs, and locks again.
    pub(crate) fn unlocked<R>(this: &mut Self, inside: impl FnOnce() -> R) -> R {
        parking_lot::MutexGuard::unlocked(&mut this.inner, || foreign::lifted(inside))
    }

    /// Before a wait: runs what this thread has deferred, without the lock. `true`: there was
    /// something to run, and the caller's condition may hold by now.
    fn catch_up(&mut self) -> bool {
        let due = foreign::is_work_due();
        if due {
            Self::unlocked(self, || ());
        }
        due
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

/// A condition variable. A wait may end without a notification: check conditions in a loop.
#[derive(Debug, Default)]
pub(crate) struct Condvar(parking_lot::Condvar);

impl Condvar {
    pub(crate) const fn new() -> Self {
        Self(parking_lot::Condvar::new())
    }

    pub(crate) fn notify_one(&self) -> bool {
        debug_assert!(!os::forked(), "{IN_CHILD}");
        self.0.notify_one()
    }

    pub(crate) fn notify_all(&self) -> usize {
        debug_assert!(!os::forked(), "{IN_CHILD}");
        self.0.notify_all()
    }

    pub(crate) fn wait<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>) {
        if !guard.catch_up() {
            self.0.wait(&mut guard.inner);
        }
    }

    /// `true`: the time passed without a notification.
    pub(crate) fn wait_for<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, timeout: Duration) -> bool {
        !guard.catch_up() && self.0.wait_for(&mut guard.inner, timeout).timed_out()
    }

    /// `true`: the deadline passed without a notification.
    pub(crate) fn wait_until<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, deadline: Instant) -> bool {
        !guard.catch_up() && self.0.wait_until(&mut guard.inner, deadline).timed_out()
    }
}
