//! What keeps a device open: counts for [`Device::close`](crate::Device::close), and the news that the last driver call
//! has returned.
//!
//! The end needs no count. Each thing that makes a call when it ends (a region that is unpinned, a stream or an event
//! that is destroyed) keeps a reference to its driver until that call has returned. So when the driver is dropped, all
//! of them have ended. The driver owns a [`Last`] and drops it after the call that lets go of the device, and that drop
//! wakes the threads in [`Holds::wait`].
//!
//! The counts say what is still to be given back. Each is changed next to a driver call, where a thing begins or ends.
//! They go into the report of a close that fails, and decide whether waiting on is of any use; no memory is freed by
//! them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::error::Error;
use crate::locks::{Condvar, Mutex};

/// A sum of what is still to be given back.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicUsize);

impl Count {
    // Relaxed, here and below: sums, not signals. A thread that sees the end has taken the lock of `drivers` after the
    // drop of `Last`, and so sees all that was counted before.
    pub(crate) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self, amount: usize) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    pub(crate) fn sub(&self, amount: usize) {
        self.0.fetch_sub(amount, Ordering::Relaxed);
    }
}

/// See the module's page.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    /// Bytes of device memory.
    pub(crate) memory: Count,
    /// Bytes of callers' values that are registered.
    pub(crate) registered: Count,
    /// Jobs that the worker has still to do.
    pub(crate) jobs: Count,
    /// Things that could not be given back.
    pub(crate) leaks: Count,
    /// Whether something that belongs to no pool never comes back.
    has_quarantined: AtomicBool,
    lost: OnceLock<Error>,
    /// Drivers that have not made their last call: the one that is in use, and those that were made by a later open,
    /// which found the device open already.
    drivers: Mutex<usize>,
    news: Condvar,
}

impl Holds {
    /// For a device that is being opened.
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// What a driver of the device drops last. The first is made when the device is opened, others while it is open.
    pub(crate) fn last(self: &Arc<Self>) -> Last {
        *self.drivers.lock() += 1;
        Last(self.clone())
    }

    /// Counts things that the driver did not take back, or that may not be given back: they stay for good.
    pub(crate) fn leaked(&self, things: usize) {
        self.leaks.add(things);
    }

    // Relaxed, here and below: as in `Count`.
    pub(crate) fn has_quarantined(&self) -> bool {
        self.has_quarantined.load(Ordering::Relaxed)
    }

    /// Notes that something never comes back and keeps the device open for good.
    pub(crate) fn note_quarantined(&self) {
        self.has_quarantined.store(true, Ordering::Relaxed);
    }

    /// The error that the device was lost with, if it was.
    pub(crate) fn lost(&self) -> Option<&Error> {
        self.lost.get()
    }

    /// Notes that the device is lost. Returns whether it was not until now.
    pub(crate) fn lose(&self, error: &Error) -> bool {
        self.lost.set(error.clone()).is_ok()
    }

    /// Waits until the last driver call has returned, but not past `until`. Returns whether that call has returned.
    pub(crate) fn wait(&self, until: Instant) -> bool {
        let mut drivers = self.drivers.lock();
        while *drivers > 0 {
            if self.news.wait_until(&mut drivers, until) {
                break;
            }
        }
        *drivers == 0
    }
}

/// What a driver drops when the last call for its device has returned.
#[derive(Debug)]
pub(crate) struct Last(Arc<Holds>);

impl Last {
    /// Notes that letting go of the device failed, or was not tried.
    pub(crate) fn leaked(&self) {
        self.0.leaked(1);
    }
}

impl Drop for Last {
    fn drop(&mut self) {
        // Under the lock: a thread in `wait` then sees everything that was done before.
        *self.0.drivers.lock() -= 1;
        self.0.news.notify_all();
    }
}
