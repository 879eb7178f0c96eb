//! What keeps a device open, for whoever closes it: counts of what there is, and the news that the last call was made.
//!
//! A driver is let go by whoever needs it last: a region that is unpinned, a stream that is destroyed, an event. All of
//! these keep their driver until their own call has returned. So when the driver itself is gone, everything was given
//! back, and nothing else needs to be kept in step for that: [`Last`] goes with the driver, after the call that lets go
//! of the device, and says so here.
//!
//! The counts only tell what is still to come. They are changed where things begin and end, next to a driver call each,
//! and none of them decides anything but what is told.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::locks::{Condvar, Mutex};

use crate::error::Error;

/// A pool that keeps a device open.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldPool {
    /// The pool's name.
    pub name: String,
    /// Whether there are handles to the pool; else buffers that came from it keep its memory.
    pub open: bool,
    /// Its buffers that are checked out or in flight, those included that never come back.
    pub buffers: u64,
    /// Of these, those that never come back, since nobody can prove that the device is done with them.
    pub quarantined: u64,
    /// The bytes of these.
    pub quarantined_bytes: usize,
}

/// Something above this layer that keeps devices open.
pub(crate) trait Tenant: Send + Sync {
    /// What of it keeps the device with this context open, if anything does.
    fn holds(&self, context: u64) -> Option<HeldPool>;

    /// Whether it is gone for good.
    fn is_gone(&self) -> bool;
}

/// See the module's page.
#[derive(Default)]
pub(crate) struct Holds {
    /// Bytes of device memory.
    memory: AtomicUsize,
    /// Bytes of callers' values that are registered.
    registered: AtomicUsize,
    /// What the worker has still to do.
    jobs: AtomicUsize,
    /// What could not be given back.
    leaks: AtomicU64,
    /// Whether there is something that never comes back and is no pool's.
    has_quarantined: AtomicBool,
    lost: OnceLock<Error>,
    tenants: Mutex<Vec<Arc<dyn Tenant>>>,
    /// Drivers that have not made their last call: the one that is in use, and those of other openings that found it.
    drivers: Mutex<usize>,
    news: Condvar,
}

impl Holds {
    /// Of a device that is being opened.
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// What a driver of the device is to drop last. The first when the device is opened; others while it is open.
    pub(crate) fn last(self: &Arc<Self>) -> Last {
        *self.drivers.lock() += 1;
        Last(self.clone())
    }

    // Relaxed, here and below: sums, not signals. What was done before the end is seen by who sees the end.

    pub(crate) fn memory(&self) -> usize {
        self.memory.load(Ordering::Relaxed)
    }

    pub(crate) fn count_memory(&self, bytes: usize) {
        self.memory.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn count_memory_gone(&self, bytes: usize) {
        self.memory.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn registered(&self) -> usize {
        self.registered.load(Ordering::Relaxed)
    }

    pub(crate) fn count_registered(&self, bytes: usize) {
        self.registered.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn count_unregistered(&self, bytes: usize) {
        self.registered.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn jobs(&self) -> usize {
        self.jobs.load(Ordering::Relaxed)
    }

    pub(crate) fn count_job(&self) {
        self.jobs.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_job_done(&self) {
        self.jobs.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn leaks(&self) -> u64 {
        self.leaks.load(Ordering::Relaxed)
    }

    /// The driver did not take something back, or may not be asked to: it stays for good.
    pub(crate) fn leaked(&self, things: usize) {
        self.leaks.fetch_add(things as u64, Ordering::Relaxed);
    }

    pub(crate) fn has_quarantined(&self) -> bool {
        self.has_quarantined.load(Ordering::Relaxed)
    }

    /// Something never comes back and keeps the device open for good.
    pub(crate) fn note_quarantined(&self) {
        self.has_quarantined.store(true, Ordering::Relaxed);
    }

    pub(crate) fn lost(&self) -> Option<&Error> {
        self.lost.get()
    }

    pub(crate) fn lose(&self, error: &Error) {
        let _ = self.lost.set(error.clone());
    }

    /// Something that keeps the device open for as long as it says so.
    pub(crate) fn enter(&self, tenant: Arc<dyn Tenant>) {
        if crate::os::forked() {
            return;
        }
        // What goes is dropped after the lock is released.
        let gone: Vec<_> = {
            let mut tenants = self.tenants.lock();
            let (gone, mut here): (Vec<_>, Vec<_>) =
                std::mem::take(&mut *tenants).into_iter().partition(|tenant| tenant.is_gone());
            here.push(tenant);
            *tenants = here;
            gone
        };
        drop(gone);
    }

    /// The pools that keep the device with this context open.
    pub(crate) fn pools(&self, context: u64) -> Vec<HeldPool> {
        // In a statement of its own: asking takes locks of the pools.
        let tenants = self.tenants.lock().clone();
        tenants.iter().filter_map(|tenant| tenant.holds(context)).collect()
    }

    /// Waits until the last call was made, but not past `until`. Whether it was.
    pub(crate) fn wait(&self, until: Instant) -> bool {
        let mut drivers = self.drivers.lock();
        while *drivers > 0 {
            if self.news.wait_until(&mut drivers, until).timed_out() {
                break;
            }
        }
        *drivers == 0
    }
}

impl fmt::Debug for Holds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Holds")
            .field("jobs", &self.jobs())
            .field("leaks", &self.leaks())
            .finish_non_exhaustive()
    }
}

/// What a driver drops when the last call for its device has returned.
#[derive(Debug)]
pub(crate) struct Last(Arc<Holds>);

impl Last {
    /// Letting go of the device failed, or was not tried.
    pub(crate) fn leaked(&self) {
        self.0.leaked(1);
    }
}

impl Drop for Last {
    fn drop(&mut self) {
        if crate::os::forked() {
            return;
        }
        // Under the lock, so that who waits sees all that was done before.
        *self.0.drivers.lock() -= 1;
        self.0.news.notify_all();
    }
}
