//! The region thread of a device, which the type [`Worker`] stands for: the one thread for calls
//! that may block or synchronise the whole device. It pins and unpins host memory, registers
//! values, allocates and frees device memory, makes and destroys streams, and destroys events.
//!
//! Each value that owns such a resource sends a job here when it is dropped: a drop never blocks,
//! and no driver call is made from a callback or under a lock. Jobs run in their order.
//!
//! Each such value keeps the device's context until its call has returned, in its job at last, and
//! the context keeps the worker. So no count is needed: when nothing can send jobs any more, the
//! thread makes the last call, which lets go of the device, and ends. That call may take the whole
//! device down for this process, and may change the current context, which is the thread's own.
//!
//! [`Holds`] outlives all of it. Its counts say what is still to be given back, for the report of a
//! close that fails, and for whether waiting on is of any use. No memory is freed by them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::ThreadId;
use std::time::Instant;

use crossbeam::channel::{Sender, unbounded};

use super::Driver;
use crate::error::{Error, Result};
use crate::foreign::{self, KeepAlive};
use crate::locks::{Condvar, Mutex};

type WorkerJob = Box<dyn FnOnce() + Send>;

const JOB_PANICKED: &str = "a job of the worker thread panicked: what it owned may be leaked";

/// A sum of what is still to be given back.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicUsize);

impl Count {
    // Relaxed, in this file: sums and flags, not signals. A thread that sees the end has taken the
    // lock of `over` after the last call, and so sees all that was counted before.
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
    /// context makes the last call.
    pub(crate) by_hand: bool,
    /// What keeps an adopted context alive, if the program gave something.
    keep_alive: Mutex<Option<KeepAlive>>,
    /// Whether the last call was made.
    over: Mutex<bool>,
    ended: Condvar,
}

impl Holds {
    pub(super) fn new(by_hand: bool) -> Arc<Self> {
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

    /// Keeps the first of these. A later one is for the same context, and is not needed.
    pub(super) fn keep(&self, keep_alive: KeepAlive) {
        self.keep_alive.lock().get_or_insert(keep_alive);
    }

    /// Makes the last call of an opening of the device.
    pub(super) fn let_go(&self, driver: &dyn Driver) {
        if foreign::survive(JOB_PANICKED, || driver.let_go()) != Some(true) {
            self.leaked(1);
        }
    }

    /// Makes the last call for the device, and drops what keeps an adopted context alive.
    pub(super) fn end(&self, driver: Arc<dyn Driver>) {
        self.let_go(&*driver);
        drop(driver);
        let kept = self.keep_alive.lock().take();
        drop(kept);
        // Under the lock: a thread in `wait` then sees everything that was done before.
        *self.over.lock() = true;
        self.ended.notify_all();
    }

    /// Waits, until `until`, for the last driver call to return. Whether it has returned.
    pub(crate) fn wait(&self, until: Instant) -> bool {
        let mut over = self.over.lock();
        while !*over && !self.ended.wait_until(&mut over, until) {}
        *over
    }
}

/// See the module's page. The thread ends when the worker is dropped and its jobs are done.
#[derive(Debug)]
pub(crate) struct Worker {
    /// The thread that runs the jobs, and the way to it. A device by hand has none.
    thread: Option<(ThreadId, Sender<WorkerJob>)>,
    /// Counts the jobs that are still to be done.
    holds: Arc<Holds>,
}

impl Worker {
    /// Starts the thread of a device, unless that is by hand. Where no thread can be started the
    /// device is not let go of.
    pub(super) fn start(driver: &Arc<dyn Driver>, holds: &Arc<Holds>) -> Result<Self> {
        if holds.by_hand {
            return Ok(Self { thread: None, holds: holds.clone() });
        }
        let (jobs, queue) = unbounded::<WorkerJob>();
        let (own, count) = (driver.clone(), holds.clone());
        let spawned = crate::os::thread::spawn(format!("pinpool-{}", driver.name()), move || {
            crate::sync::enter(crate::sync::Own::Worker);
            own.enter_thread();
            for job in queue {
                // Jobs catch panics of foreign code, so a panic is a mistake of the crate's.
                _ = foreign::survive(JOB_PANICKED, job);
                count.jobs.sub(1);
            }
            count.end(own);
        });
        let spawned = spawned.map_err(|error| {
            let device = driver.name();
            crate::foreign::warn!(target: "pinpool::device::leak", device, %error, "a device is not let go of");
            let why = format!("no thread could be started: {error}");
            Error::Unavailable { device: device.into(), why }
        })?;
        Ok(Self { thread: Some((spawned.thread().id(), jobs)), holds: holds.clone() })
    }

    /// Runs a job later; on a device by hand now, or when this thread may run foreign code.
    pub(crate) fn send(&self, job: impl FnOnce() + Send + 'static) {
        if crate::os::forked() {
            // There is no thread, and the fork may have copied the queue in the middle of another
            // thread's change. So the job is leaked, with what it owns.
            return std::mem::forget(job);
        }
        let Some((_, jobs)) = &self.thread else {
            // The caller may be in the middle of a submit, and the job may call foreign code.
            return foreign::when_allowed(move || _ = foreign::survive(JOB_PANICKED, job));
        };
        self.holds.jobs.add(1);
        if let Err(job) = jobs.send(Box::new(job)) {
            // The thread has ended, and no other thread may give back what the job owns.
            self.holds.jobs.sub(1);
            self.holds.leaked(1);
            std::mem::forget(job);
            foreign::error!(target: "pinpool::device::leak", "the device's worker thread has ended: what it was to free is leaked");
        }
    }

    /// Runs a job and waits for its result.
    pub(crate) fn call<R: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<R> + Send + 'static,
    ) -> Result<R> {
        crate::os::check_fork()?;
        let ended = "the device's worker thread has ended, or a job of it panicked";
        match &self.thread {
            None => foreign::survive(JOB_PANICKED, job).unwrap_or(Err(Error::Internal(ended))),
            // A job wakes the waiters for memory, and a waker is foreign code, which may call this:
            // the thread cannot wait for itself.
            Some((thread, _)) if *thread == std::thread::current().id() => job(),
            Some(_) => {
                let (tell, told) = mpsc::sync_channel(1);
                self.send(move || drop(tell.send(job())));
                told.recv().unwrap_or(Err(Error::Internal(ended)))
            }
        }
    }
}
