//! The region thread of a device, which the type [`Worker`] stands for: the one thread for calls
//! that may block or synchronise the whole device. It pins and unpins host memory, registers
//! values, allocates and frees device memory, makes and destroys streams, and destroys events.
//!
//! Each value that owns such a resource sends a job here when it is dropped: a drop never blocks,
//! and no driver call is made from a callback or under a lock. Jobs run in their order.

use std::sync::{Arc, mpsc};
use std::thread::ThreadId;

use crossbeam::channel::{Sender, unbounded};

use super::Driver;
use super::ending::Holds;
use crate::error::{Error, Result};
use crate::foreign;

type WorkerJob = Box<dyn FnOnce() + Send>;

const JOB_PANICKED: &str = "a job of the worker thread panicked: what it owned may be leaked";

/// See the module's page. The thread ends when the worker is dropped and its jobs are done.
#[derive(Debug)]
pub(crate) struct Worker {
    /// The thread that runs the jobs, and the way to it. A device by hand has none.
    thread: Option<(ThreadId, Sender<WorkerJob>)>,
    /// Counts the jobs that are still to be done.
    holds: Arc<Holds>,
}

impl Worker {
    /// Starts the thread of a device, unless that is by hand.
    pub(crate) fn start(driver: &Arc<dyn Driver>, holds: &Arc<Holds>) -> Result<Self> {
        if holds.by_hand {
            return Ok(Self { thread: None, holds: holds.clone() });
        }
        let (jobs, queue) = unbounded::<WorkerJob>();
        let (entering, count) = (driver.clone(), holds.clone());
        let spawned = crate::os::thread::spawn(format!("pinpool-{}", driver.name()), move || {
            crate::sync::enter(crate::sync::Own::Worker);
            entering.enter_thread();
            drop(entering);
            for job in queue {
                // Jobs catch panics of foreign code, so a panic is a mistake of the crate's.
                _ = foreign::survive(JOB_PANICKED, job);
                count.jobs.sub(1);
            }
        });
        let spawned = spawned.map_err(|e| Error::Unavailable {
            device: driver.name().into(),
            why: format!("no thread could be started: {e}"),
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
