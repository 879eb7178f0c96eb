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

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::locks::{Condvar, Mutex};

use crate::error::Error;

/// A pool that keeps a device open: one entry of [`HeldBy::pools`](crate::HeldBy::pools).
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// let pool = Pool::builder(&device).name("kv").capacity(1 << 20).unpinned(Unpinned::Allow).build()?;
/// let buffer = pool.checkout(100)?;
/// let error = device.close(std::time::Duration::ZERO).unwrap_err();
/// let held = &error.held_by().pools[0];
/// assert_eq!((held.name.as_str(), held.open, held.buffers, held.quarantined), ("kv", true, 1, 0));
/// # drop(buffer);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldPool {
    /// The pool's name.
    pub name: String,
    /// Whether there are handles to the pool. If not, buffers that came from it keep its memory.
    pub open: bool,
    /// Whether there are handles to the pool, and it was [shut down](crate::Pool::shutdown): the handles keep the device
    /// open all the same.
    pub shut_down: bool,
    /// The number of its buffers that are checked out or in flight, quarantined ones included.
    pub buffers: u64,
    /// The number of its buffers that are quarantined: they never come back, since the device cannot be shown to be
    /// done with them.
    pub quarantined: u64,
    /// The bytes of the quarantined buffers.
    pub quarantined_bytes: usize,
}

/// Something above this layer that keeps devices open.
pub(crate) trait Tenant: Send + Sync {
    /// The entry for a report: what of this keeps the device with this context open. `None`: nothing does.
    fn holds(&self, context: u64) -> Option<HeldPool>;

    /// Whether it has ended for good.
    fn is_gone(&self) -> bool;
}

/// See the module's page.
#[derive(Default)]
pub(crate) struct Holds {
    /// Bytes of device memory.
    memory: AtomicUsize,
    /// Bytes of callers' values that are registered.
    registered: AtomicUsize,
    /// Jobs that the worker has still to do.
    jobs: AtomicUsize,
    /// Things that could not be given back.
    leaks: AtomicU64,
    /// Whether something that belongs to no pool never comes back.
    has_quarantined: AtomicBool,
    lost: OnceLock<Error>,
    tenants: Mutex<Vec<Arc<dyn Tenant>>>,
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

    // Relaxed, here and below: sums, not signals. A thread that sees the end has taken the lock of `drivers` after the
    // drop of `Last`, and so sees all that was counted before.

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

    /// Counts things that the driver did not take back, or that may not be given back: they stay for good.
    pub(crate) fn leaked(&self, things: usize) {
        self.leaks.fetch_add(things as u64, Ordering::Relaxed);
    }

    pub(crate) fn has_quarantined(&self) -> bool {
        self.has_quarantined.load(Ordering::Relaxed)
    }

    /// Notes that something never comes back and keeps the device open for good.
    pub(crate) fn note_quarantined(&self) {
        self.has_quarantined.store(true, Ordering::Relaxed);
    }

    pub(crate) fn lost(&self) -> Option<&Error> {
        self.lost.get()
    }

    pub(crate) fn lose(&self, error: &Error) {
        let _ = self.lost.set(error.clone());
    }

    /// Adds something that keeps the device open for as long as it says so.
    pub(crate) fn enter(&self, tenant: Arc<dyn Tenant>) {
        // The tenants that have ended are dropped after the lock is released.
        let ended: Vec<_> = {
            let mut tenants = self.tenants.lock();
            let (ended, mut here): (Vec<_>, Vec<_>) =
                std::mem::take(&mut *tenants).into_iter().partition(|tenant| tenant.is_gone());
            here.push(tenant);
            *tenants = here;
            ended
        };
        drop(ended);
    }

    /// The pools that keep the device with this context open.
    pub(crate) fn pools(&self, context: u64) -> Vec<HeldPool> {
        // A statement of its own, which ends with the lock: `holds` takes locks of the pools.
        let tenants = self.tenants.lock().clone();
        tenants.iter().filter_map(|tenant| tenant.holds(context)).collect()
    }

    /// Waits until the last driver call has returned, but not past `until`. Returns whether that call has returned.
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
