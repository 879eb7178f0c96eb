//! The one thread of a device on which calls are made that may block or synchronise the whole device: pinning,
//! unpinning, allocating and freeing device memory, destroying streams.
//!
//! Everything that is dropped anywhere in the crate and owns such a resource sends a job here, so drop never blocks and
//! no driver call is made from a callback or under somebody's lock. A stepped device has no threads: there the job runs
//! at once, on the caller's thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread::ThreadId;

use crossbeam::channel::{Sender, unbounded};

use super::Driver;
use super::holds::Holds;
use crate::error::{Error, Result};

type Job = Box<dyn FnOnce() + Send>;

/// See the module's page. Jobs run in the order in which they were sent; the thread ends when the worker is dropped and
/// its jobs are done.
#[derive(Debug)]
pub(crate) struct Worker {
    jobs: Option<Sender<Job>>,
    /// The thread that runs them, if there is one.
    thread: Option<ThreadId>,
    /// Where jobs are counted that are still to be done.
    holds: Arc<Holds>,
    forks: u32,
}

impl Worker {
    /// Starts the thread of a device. A stepped one does without.
    pub(crate) fn start(driver: &Arc<dyn Driver>, holds: &Arc<Holds>) -> Result<Self> {
        let (forks, holds) = (crate::os::forks(), holds.clone());
        if driver.stepped().is_some() {
            return Ok(Self { jobs: None, thread: None, holds, forks });
        }
        let count = holds.clone();
        let (jobs, queue) = unbounded::<Job>();
        let entering = driver.clone();
        let spawned = crate::os::thread::spawn(format!("pinpool-{}", driver.name()), move || {
            crate::sync::enter(crate::sync::Own::Worker);
            entering.enter_thread();
            drop(entering);
            for job in queue {
                run(job);
                count.count_job_done();
            }
        })
        .map_err(|e| Error::Unavailable {
            device: driver.name().into(),
            why: format!("no thread could be started: {e}"),
        })?;
        Ok(Self { jobs: Some(jobs), thread: Some(spawned.thread().id()), holds, forks })
    }

    /// Whether jobs run on the caller's thread.
    pub(crate) fn is_inline(&self) -> bool {
        self.jobs.is_none()
    }

    /// Runs a job later (or now, on a stepped device).
    pub(crate) fn send(&self, job: impl FnOnce() + Send + 'static) {
        if self.forked() {
            // There is no thread, and the queue may be as another thread had left it: whatever the job owns is leaked.
            return std::mem::forget(job);
        }
        match &self.jobs {
            // The receiver lives as long as this sender, so this cannot fail.
            Some(jobs) => {
                self.holds.count_job();
                drop(jobs.send(Box::new(job)));
            }
            None => run(Box::new(job)),
        }
    }

    fn forked(&self) -> bool {
        self.forks != crate::os::forks()
    }

    /// Runs a job and waits for its result.
    pub(crate) fn call<R: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<R> + Send + 'static,
    ) -> Result<R> {
        if self.forked() {
            return Err(Error::Forked);
        }
        // Jobs wake those who wait for memory, and a waker may be anything: on this thread it cannot wait for itself.
        if self.thread.is_some_and(|thread| thread == std::thread::current().id()) {
            return job();
        }
        let (tell, told) = mpsc::sync_channel(1);
        self.send(move || drop(tell.send(job())));
        told.recv().unwrap_or_else(|_| {
            Err(Error::Unsupported("a job of the device's worker thread panicked".into()))
        })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.forked() {
            std::mem::forget(self.jobs.take());
        }
    }
}

fn run(job: Job) {
    if catch_unwind(AssertUnwindSafe(job)).is_err() {
        tracing::error!(target: "pinpool::device", "a job of the worker thread panicked");
    }
}
