//! What keeps a device open, and how its driver makes the last call.
//!
//! Each thing that makes a call when it ends (a region, a stream, an event, device memory) keeps
//! its driver until that call has returned. So no count is needed: a dropped driver makes the last
//! call, which lets go of the device. That call may take the whole device down for this process,
//! and may change the current context: a thread of its own makes it. Its [`Last`] is dropped after
//! it, and wakes [`Holds::wait`].
//!
//! The counts of [`Holds`] say what is still to be given back, for the report of a close that
//! fails, and for whether waiting on is of any use. No memory is freed by them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::error::Error;
pub(crate) use crate::foreign::KeepAlive;
use crate::locks::{Condvar, Mutex};

/// A sum of what is still to be given back.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicUsize);

impl Count {
    // Relaxed, in this file: sums and flags, not signals. A thread that sees the end has taken the
    // lock of `drivers` after the drop of `Last`, and so sees all that was counted before.
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

/// What keeps a device open. It outlives the device's context.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    /// Bytes of device memory.
    pub(crate) memory: Count,
    /// Bytes of callers' values that are registered.
    pub(crate) registered: Count,
    /// Jobs that the worker has still to do.
    pub(crate) jobs: Count,
    /// Things that the driver did not take back, or that may not be given back.
    pub(crate) leaks: Count,
    /// Whether something that belongs to no pool never comes back.
    has_quarantined: AtomicBool,
    /// The error that the device was lost with.
    pub(crate) lost: OnceLock<Error>,
    /// Whether the device does nothing by itself: it has no threads, so the thread that drops its
    /// driver makes the last calls.
    pub(crate) by_hand: bool,
    /// Drivers that have not made their last call: the one in use, and those of later opens, which
    /// found the device open already.
    drivers: Mutex<usize>,
    news: Condvar,
}

impl Holds {
    pub(crate) fn new(by_hand: bool) -> Arc<Self> {
        Arc::new(Self { by_hand, ..Self::default() })
    }

    pub(crate) fn leaked(&self, things: usize) {
        self.leaks.add(things);
    }

    pub(crate) fn has_quarantined(&self) -> bool {
        self.has_quarantined.load(Ordering::Relaxed)
    }

    /// Notes that something never comes back and keeps the device open until the process ends.
    pub(crate) fn note_quarantined(&self) {
        self.has_quarantined.store(true, Ordering::Relaxed);
    }

    /// Waits, until `until`, for the last driver call to return. Whether it has returned.
    pub(crate) fn wait(&self, until: Instant) -> bool {
        let mut drivers = self.drivers.lock();
        while *drivers > 0 && !self.news.wait_until(&mut drivers, until) {}
        *drivers == 0
    }
}

/// What a driver drops when the last call for its device has returned.
#[derive(Debug)]
struct Last(Arc<Holds>);

impl Drop for Last {
    fn drop(&mut self) {
        // Under the lock: a thread in `wait` then sees everything that was done before.
        *self.0.drivers.lock() -= 1;
        self.0.news.notify_all();
    }
}

/// What a driver drops when it ends.
#[derive(Debug, Default)]
pub(crate) struct Ending {
    /// What keeps an adopted context alive, if the program gave something.
    keep_alive: OnceLock<KeepAlive>,
    /// Dropped after `keep_alive`, as the field behind it: that drop may make a driver call.
    last: OnceLock<Last>,
}

impl Ending {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Keeps the first of these. A later one is for the same context, and is not needed.
    pub(super) fn keep(&self, keep_alive: KeepAlive) {
        let _ = self.keep_alive.set(keep_alive);
    }

    /// Has a device wait for this driver's last call.
    pub(super) fn tell(&self, holds: &Arc<Holds>) {
        *holds.drivers.lock() += 1;
        let _ = self.last.set(Last(holds.clone()));
    }

    /// Notes that something of the device's stays until the process ends.
    pub(super) fn leaked(&self) {
        self.last.get().into_iter().for_each(|last| last.0.leaked(1));
    }

    /// Makes the last calls, on a thread of their own: `let_go` says whether the device was let go
    /// of. Where no thread can be started the device is leaked. What keeps an adopted context alive
    /// is dropped behind the calls.
    pub(super) fn end(&mut self, device: &str, let_go: impl FnOnce() -> bool + Send + 'static) {
        let (kept, last) = (self.keep_alive.take(), Arc::new(self.last.take()));
        let by_hand = last.as_ref().as_ref().is_some_and(|last| last.0.by_hand);
        let goes = last.clone();
        let end = move || {
            if !let_go() {
                goes.iter().for_each(|last| last.0.leaked(1));
            }
            drop(kept);
        };
        if by_hand {
            return end();
        }
        if let Err(error) = crate::os::thread::spawn(format!("pinpool-end-{device}"), end) {
            last.iter().for_each(|last| last.0.leaked(1));
            crate::foreign::warn!(target: "pinpool::device::leak", device, %error, "a device is not let go of");
        }
    }
}
