//! The one thread of a device on which calls are made that may block or synchronise the whole device: pinning,
//! unpinning, allocating and freeing device memory, destroying streams.
//!
//! Everything that is dropped anywhere in the crate and owns such a resource sends a job here, so drop never blocks and
//! no driver call is made from a callback or under somebody's lock. A stepped device has no threads: there the job runs
//! at once, on the caller's thread, or where that one puts foreign code off, right after that.

use std::sync::{Arc, mpsc};
use std::thread::ThreadId;

use crossbeam::channel::{Sender, unbounded};

use super::Driver;
use super::holds::Holds;
use crate::error::{Error, Result};
use crate::foreign;

type WorkerJob = Box<dyn FnOnce() + Send>;

/// See the module's page. Jobs run in the order in which they were sent; the thread ends when the worker is dropped and
/// its jobs are done.
#[derive(Debug)]
pub(crate) struct Worker {
    jobs: Option<Sender<WorkerJob>>,
    /// The thread that runs them, if there is one.
    thread: Option<ThreadId>,
    /// Where jobs are counted that are still to be done.
    holds: Arc<Holds>,
}

impl Worker {
    /// Starts the thread of a device. A stepped one does without.
    pub(crate) fn start(driver: &Arc<dyn Driver>, holds: &Arc<Holds>) -> Result<Self> {
        let holds = holds.clone();
        if driver.stepped().is_some() {
            return Ok(Self { jobs: None, thread: None, holds });
        }
        let count = holds.clone();
        let (jobs, queue) = unbounded::<WorkerJob>();
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
        Ok(Self { jobs: Some(jobs), thread: Some(spawned.thread().id()), holds })
    }

    /// Whether jobs run on the caller's thread.
    pub(crate) fn is_inline(&self) -> bool {
        self.jobs.is_none()
    }

    /// Runs a job later (on a stepped device now, or where foreign code is put off, right after that).
    pub(crate) fn send(&self, job: impl FnOnce() + Send + 'static) {
        if crate::os::forked() {
            // There is no thread, and the queue may be as another thread had left it: whatever the job owns is leaked.
            return std::mem::forget(job);
        }
        match &self.jobs {
            Some(jobs) => {
                self.holds.count_job();
                if let Err(job) = jobs.send(Box::new(job)) {
                    // The thread is gone, and with it what could undo what the job owns.
                    self.holds.count_job_done();
                    self.holds.leaked(1);
                    std::mem::forget(job);
                    foreign::error!(target: "pinpool::device::leak", "the device's worker thread is gone: what it was to free is leaked");
                }
            }
            // The caller may be in the midst of a submission, and the job may call anything.
            None => foreign::when_allowed(Box::new(move || run(Box::new(job)))),
        }
    }

    /// Runs a job and waits for its result.
    pub(crate) fn call<R: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<R> + Send + 'static,
    ) -> Result<R> {
        crate::os::check_fork()?;
        // Jobs wake those who wait for memory, and a waker may be anything: on this thread it cannot wait for itself.
        if self.thread.is_some_and(|thread| thread == std::thread::current().id()) {
            return job();
        }
        if self.is_inline() {
            return foreign::survive(JOB_PANICKED, job)
                .unwrap_or(Err(Error::Internal("a job of the device panicked")));
        }
        let (tell, told) = mpsc::sync_channel(1);
        self.send(move || drop(tell.send(job())));
        told.recv().unwrap_or_else(|_| {
            Err(Error::Internal("the device's worker thread is gone, or a job of it panicked"))
        })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if crate::os::forked() {
            std::mem::forget(self.jobs.take());
        }
    }
}

const JOB_PANICKED: &str = "a job of the worker thread panicked: what it owned may be leaked";

/// Jobs guard the foreign code that they call: what panics is a mistake of the crate's. The thread goes on.
fn run(job: WorkerJob) {
    _ = foreign::survive(JOB_PANICKED, job);
}
