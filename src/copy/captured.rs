//! Buffers that are kept for as long as a graph.
//!
//! While a stream is captured nothing runs. What is submitted then becomes a node of the graph, which reads or writes
//! its buffer whenever the graph is launched, at any later time, and no event of ours says when the last time was. So
//! the buffer is tied to the graph itself: the driver counts what a graph keeps, hands it on to what is made from the
//! graph, and calls when all of that is gone ([`keep_with_graph`](crate::device::Driver::keep_with_graph)). The
//! device's worker then drops the buffer, since the driver's callback must do nothing of the kind.

use std::sync::Arc;

use crate::buffer::Lend;
use crate::error::{Error, Result, SubmitError};
use crate::locks::Mutex;
use crate::stream::Stream;

impl Stream {
    /// Keeps `buf` for as long as the graph that this stream is being captured into: for servers whose captured kernels
    /// and copies use the buffer.
    ///
    /// The buffer is kept until the graph, everything made from it (executable graphs, those updated by
    /// `cuGraphExecUpdate` among them, clones, graphs that have it as a child) and all launches of these are gone. Then
    /// it returns to its pool by itself. Until then it counts as checked out
    /// ([`PoolStats::checked_out_bytes`](crate::PoolStats::checked_out_bytes)), and if the driver ends first, it never
    /// returns. An `Arc` of a buffer stays readable by its other owners meanwhile; that no launch writes what they read
    /// is for the program to see to.
    ///
    /// The order of this call and of the captured work that uses the buffer makes no difference, as long as both are in
    /// the same capture. After a refusal nothing is kept: the graph must not be launched when the buffer is gone.
    ///
    /// # Errors
    /// With the buffer: [`Error::Mismatch`]; [`Error::Argument`] on a stream that is in no capture (use
    /// [`hold`](Self::hold)); [`Error::Capturing`] if the capture is spoiled; [`Error::Unsupported`] on drivers before
    /// CUDA 11.3; what the driver says; a lost device.
    ///
    /// ```no_run
    /// # fn demo(stream: pinpool::Stream, buf: pinpool::PinnedBuf) -> Result<(), pinpool::Error> {
    /// // The server has begun to capture `stream`, and has launched a kernel there that reads the buffer in place.
    /// stream.hold_captured(buf)?;
    /// // It ends the capture, instantiates the graph, and launches it as often as it likes.
    /// # Ok(()) }
    /// ```
    pub fn hold_captured<B: Lend + 'static>(&self, buf: B) -> Result<(), SubmitError<B>> {
        let timeline = self.timeline();
        let usable = self.may_use(&buf).and_then(|()| timeline.usable());
        let ((), buf) = SubmitError::unless(usable, buf)?;
        let context = timeline.context();
        // After a refusal the driver may still have the function; then what it finds here is nothing.
        let kept = Arc::new(Mutex::new(Some(buf)));
        let (theirs, home, worker) = (kept.clone(), context.clone(), context.worker().clone());
        // Called from the driver's callback, where neither a driver call nor waiting is allowed: it only sends. Nor is
        // the last of a context let go there, whose owner may destroy it then; the last of a worker may be.
        let gone = Box::new(move || worker.send(move || drop((theirs, home))));
        let error = match context.noting(context.driver().keep_with_graph(timeline.stream(), gone)) {
            Ok(true) => return Ok(()),
            Ok(false) => match timeline.is_capturing() {
                Ok(false) => Error::Argument(
                    "hold_captured needs a stream that is being captured into a graph, and this one is not; use hold \
                     where nothing is captured"
                        .into(),
                ),
                Ok(true) => Error::Capturing {
                    what: "keeping a buffer with the graph",
                    remedy: "the capture is spoiled: end it, and begin another",
                },
                Err(error) => error,
            },
            Err(error) => error,
        };
        let buffer = kept.lock().take();
        Err(SubmitError { error, buffer })
    }
}
