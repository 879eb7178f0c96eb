//! The threads of a copier: starting them, giving them jobs, waiting for jobs.
//!
//! A copier of a device by hand has no threads: one worker runs on whichever thread calls.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::chunk::LEAST;
use super::engine::Engine;
use super::job::Job;
use super::types::Kind;
use super::worker::Worker;
use crate::error::{Error, Result};
use crate::foreign;
use crate::locks::Mutex;

/// Looks without a change after which a device by hand, with nothing left to do, never changes.
/// After ten a thread sleeps between two looks: the reaper needs the time to ask.
const STILL: u32 = 100;

/// What a copier's handles share. Its drop lets the threads end, when all jobs are over.
pub(super) struct Workers {
    pub(super) engine: Arc<Engine>,
    /// Threads that were started.
    started: Mutex<usize>,
    /// The one worker of a copier without threads. `None`: a thread is that worker now.
    inline: Mutex<Option<Worker>>,
}

impl Workers {
    pub(super) fn new(engine: Arc<Engine>) -> Self {
        let inline = Mutex::new(Some(Worker::new(engine.clone(), Kind::Blocking)));
        Self { engine, started: Mutex::new(0), inline }
    }

    /// Starts the missing threads. One is enough: without the last one, which never blocks, jobs
    /// that block hold up the others.
    pub(super) fn start(&self) -> Result<()> {
        let mut started = self.started.lock();
        while *started < self.engine.settings.workers() {
            let engine = self.engine.clone();
            let is_last = *started == engine.settings.threads;
            let most = if is_last { Kind::Staged } else { Kind::Blocking };
            let name = format!("pinpool-copy-{}", engine.device.name());
            let spawned = crate::os::thread::spawn(name, move || {
                crate::sync::enter(crate::sync::Own::Copier);
                crate::os::sleep_precisely();
                engine.device.context().driver().enter_thread();
                foreign::live("a thread of a copier panicked: it goes on", || {
                    Worker::new(engine.clone(), most).serve()
                });
            });
            match spawned {
                Ok(_) => *started += 1,
                Err(_) if *started > 0 => return Ok(()),
                Err(error) => {
                    let (device, why) =
                        (self.engine.device.name().into(), format!("no thread could be started: {error}"));
                    return Err(Error::Unavailable { device, why });
                }
            }
        }
        Ok(())
    }

    /// Gives a job to the threads, which were started.
    pub(super) fn add(&self, job: &Arc<Job>) {
        if job.is_over() {
            return;
        }
        let chunks = usize::try_from(job.of.total).unwrap_or(usize::MAX) / LEAST + 1;
        self.engine.scheduler.add(job.clone(), chunks);
        self.advance();
    }

    /// Waits until the bytes before `offset` arrived or the job is over. `false`: at the deadline.
    pub(super) fn wait(&self, job: &Job, deadline: Option<Instant>, offset: u64) -> bool {
        if self.engine.settings.threads == 0 {
            self.step_until(job, offset);
        }
        job.wait(deadline, offset)
    }

    // --- without threads -------------------------------------------------------------------------

    /// Does what can be done at once, on a copier without threads. Whether anything changed.
    pub(super) fn advance(&self) -> bool {
        let rounds = |worker: &mut Worker| {
            std::iter::repeat_with(|| worker.round()).take_while(|moved| *moved).count()
        };
        self.as_worker(rounds).is_some_and(|moved| moved > 0)
    }

    /// Runs the one worker of a copier without threads. `None`: none, or another thread is it now.
    fn as_worker<R>(&self, run: impl FnOnce(&mut Worker) -> R) -> Option<R> {
        if self.engine.settings.threads > 0 {
            return None;
        }
        let mut worker = self.inline.lock().take()?;
        let said = run(&mut worker);
        self.engine.segments.rest();
        *self.inline.lock() = Some(worker);
        Some(said)
    }

    /// Moves a device by hand until the bytes before `offset` arrived. Where nothing is left to
    /// move, nothing will change any more, and the job fails.
    fn step_until(&self, job: &Job, offset: u64) {
        let mut still = 0;
        while !job.is_at(offset) {
            if self.engine.device.context().advance() | self.advance() {
                still = 0;
                continue;
            }
            // While another thread is the worker, what it has is unknown.
            still = if self.inline.lock().is_some() { still + 1 } else { 0 };
            if still > STILL {
                job.fail(Error::Timeout(Duration::ZERO.into()));
                self.as_worker(Worker::abandon);
            }
            std::thread::sleep(Duration::from_millis(u64::from(still > 10)));
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if crate::os::forked() {
            // The parent's threads use these.
            std::mem::forget(self.inline.get_mut().take());
            return;
        }
        self.engine.scheduler.close();
    }
}
