//! The threads of a copier: starting them, giving them jobs, waiting for jobs.
//!
//! A copier of a device by hand has no threads. There one worker moves chunks on whichever thread calls.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::chunk::LEAST;
use super::engine::Engine;
use super::job::{Job, Progress};
use super::types::Kind;
use super::worker::Worker;
use crate::error::{Error, Result};
use crate::foreign;
use crate::locks::Mutex;

/// How long a waiting thread sleeps between two looks at a device by hand.
const PAUSE: Duration = Duration::from_millis(1);
/// Looks without any change after which a device by hand, which has nothing left to do, never will change. After the
/// first of them a thread sleeps between two looks: the reaper, which may be in the middle of asking, needs the time.
const STILL: u32 = 100;
const YIELDS: u32 = 10;

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

    /// Whether the copier has no threads, since its device is moved by hand.
    fn is_inline(&self) -> bool {
        self.engine.settings.threads == 0
    }

    /// Starts the threads that are missing. One is enough. The last one never blocks; where it cannot be
    /// started, jobs that block hold up the others.
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
                    return Err(Error::Unavailable {
                        device: self.engine.device.name().into(),
                        why: format!("no thread could be started: {error}"),
                    });
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
        let chunks = usize::try_from(job.total).unwrap_or(usize::MAX) / LEAST + 1;
        self.engine.scheduler.add(job.clone(), chunks);
        self.advance();
    }

    /// Waits until `until` holds of a job. Whether it does.
    pub(super) fn wait(
        &self,
        job: &Job,
        deadline: Option<Instant>,
        until: impl Fn(&Progress) -> bool,
    ) -> bool {
        if self.is_inline() {
            self.step_until(job, &until);
        }
        job.wait(deadline, until)
    }

    // --- without threads ---------------------------------------------------------------------------------------------

    /// Does what can be done without waiting, on a copier without threads. Whether anything has changed.
    pub(super) fn advance(&self) -> bool {
        if !self.is_inline() {
            return false;
        }
        self.as_worker(|worker| {
            let mut any = false;
            while worker.round() {
                any = true;
            }
            any
        })
        .unwrap_or(false)
    }

    /// Runs the one worker on this thread. `None`: another thread is it now.
    fn as_worker<R>(&self, run: impl FnOnce(&mut Worker) -> R) -> Option<R> {
        let mut worker = self.inline.lock().take()?;
        let said = run(&mut worker);
        self.engine.segments.rest();
        *self.inline.lock() = Some(worker);
        Some(said)
    }

    /// Waits until `until` holds of a job: the device moves only when it is told to. Where nothing is left to move,
    /// nothing will change any more, and the job fails.
    fn step_until(&self, job: &Job, until: impl Fn(&Progress) -> bool) {
        let mut still = 0;
        while !until(&job.progress()) {
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
            match still > YIELDS {
                true => std::thread::sleep(PAUSE),
                false => crate::sync::yield_now(),
            }
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
