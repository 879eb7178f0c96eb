//! Streams that only one thread can name: CUDA's per-thread default stream is one handle for
//! another stream on every thread. Only the thread that adopted it can submit to it.

use std::thread::{ThreadId, current};

use super::StreamHandle;

/// The thread that a stream is confined to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Confined {
    /// No other thread has or had this number. (The system's numbers are given again.)
    thread: ThreadId,
    /// A stream of which an event, recorded on any thread, covers all work of the confined one: the
    /// reaper records there what could not be recorded on the confined thread.
    pub(crate) covering: StreamHandle,
}

impl Confined {
    /// Confined to the calling thread.
    pub(crate) fn here(covering: StreamHandle) -> Self {
        Self { thread: current().id(), covering }
    }

    /// Whether the calling thread is the one.
    pub(crate) fn is_here(&self) -> bool {
        self.thread == current().id()
    }
}
