//! A download whose caller writes the bytes, in order, on its own thread: into a pipe, a socket, a compressor.
//!
//! The caller is a worker for that time, of this job alone: it takes the chunks, submits their copies, and writes each
//! chunk's bytes when it has landed and all before it are written. Meanwhile the copies of the next ones go on. The
//! writer is code of the program's and may panic: then the drop of [`Pull`] ends the job.

use std::io::Write;
use std::sync::Arc;

use super::engine::Engine;
use super::job::Job;
use super::ranges::Pulled;
use super::worker::Worker;
use crate::error::Result;

/// See the module's page.
pub(super) struct Pull<'a> {
    job: &'a Arc<Job>,
    worker: Worker<'a>,
}

impl<'a> Pull<'a> {
    pub(super) fn new(engine: &'a Arc<Engine>, job: &'a Arc<Job>) -> Self {
        Self { job, worker: Worker::new(engine) }
    }

    /// Writes all of it. How many bytes.
    pub(super) fn write_to(mut self, work: &Pulled, writer: &mut impl Write, name: &str) -> Result<u64> {
        let mut written = 0;
        for index in 0.. {
            let Some(n) = self.worker.pull(self.job, index) else { break };
            // The chunk stays where it is while the writer runs, which may panic.
            let Some((chunk, bytes)) = self.worker.landed(n) else { break };
            let said = work.write(chunk, bytes, |part| writer.write_all(part), name, written);
            crate::os::check_fork()?;
            written += said.as_ref().map_or(0, |bytes| *bytes);
            self.worker.written(n, said.map(drop));
        }
        crate::os::check_fork()?;
        self.job.outcome().unwrap_or(Ok(())).map(|()| written)
    }
}

impl Drop for Pull<'_> {
    fn drop(&mut self) {
        if crate::os::forked() {
            return;
        }
        self.job.cancel();
        // What is under way is waited for: the segments are this worker's.
        self.worker.assist(self.job, Job::is_over);
    }
}
