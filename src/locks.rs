//! Locks: parking_lot's, under each of which this thread puts foreign code off (see [`crate::foreign`]).
//!
//! A guard has a deferral that ends after the unlock. A thread that waits on a condition variable gives its lock up: what it
//! has put off by then runs first, if it holds no other lock.
//!
//! In the child of a fork nothing is locked: a thread that the child does not have may hold the lock, or a part of parking_lot's
//! table of waiting threads. Debug builds check that.

// This is the one module that may.
#![allow(clippy::disallowed_types)]

use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use crate::foreign::{self, Deferral};
use crate::os;

const IN_CHILD: &str = "a lock in the child of a fork";

/// A mutual exclusion lock.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T: ?Sized>(parking_lot::Mutex<T>);

/// What a locked [`Mutex`] is used through.
#[derive(Debug)]
#[must_use = "the lock is given up when this is dropped"]
pub(crate) struct MutexGuard<'a, T: ?Sized> {
    // Dropped first: fields are dropped in this order.
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
    /// Gives the lock up for as long as `inside` runs.
    pub(crate) fn unlocked<R>(this: &mut Self, inside: impl FnOnce() -> R) -> R {
        parking_lot::MutexGuard::unlocked(&mut this.inner, || foreign::lifted(inside))
    }

    /// Before a wait: runs what was put off, without the lock. Whether there was anything; the caller's condition may hold by
    /// then.
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

/// A condition variable. Its waits may end for no reason.
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

    pub(crate) fn wait_for<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, timeout: Duration) -> Waited {
        Waited(!guard.catch_up() && self.0.wait_for(&mut guard.inner, timeout).timed_out())
    }

    pub(crate) fn wait_until<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, deadline: Instant) -> Waited {
        Waited(!guard.catch_up() && self.0.wait_until(&mut guard.inner, deadline).timed_out())
    }
}

/// How a wait ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waited(bool);

impl Waited {
    /// Whether the time was over.
    pub(crate) fn timed_out(self) -> bool {
        self.0
    }
}

/// A lock that many may hold to read, or one to write.
#[derive(Debug, Default)]
pub(crate) struct RwLock<T: ?Sized>(parking_lot::RwLock<T>);

/// What a [`RwLock`] is read or written through.
#[derive(Debug)]
#[must_use = "the lock is given up when this is dropped"]
pub(crate) struct RwLockGuard<G> {
    // Dropped first, as above.
    inner: G,
    _deferral: Deferral,
}

impl<T> RwLock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(parking_lot::RwLock::new(value))
    }
}

impl<T: ?Sized> RwLock<T> {
    pub(crate) fn read(&self) -> RwLockGuard<parking_lot::RwLockReadGuard<'_, T>> {
        debug_assert!(!os::forked(), "{IN_CHILD}");
        RwLockGuard { inner: self.0.read(), _deferral: foreign::defer() }
    }

    pub(crate) fn write(&self) -> RwLockGuard<parking_lot::RwLockWriteGuard<'_, T>> {
        debug_assert!(!os::forked(), "{IN_CHILD}");
        RwLockGuard { inner: self.0.write(), _deferral: foreign::defer() }
    }
}

impl<G: Deref> Deref for RwLockGuard<G> {
    type Target = G::Target;

    fn deref(&self) -> &G::Target {
        &self.inner
    }
}

impl<G: DerefMut> DerefMut for RwLockGuard<G> {
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.inner
    }
}
