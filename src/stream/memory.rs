//! Device memory in a stream's order.
//!
//! The driver's allocator works in stream order: memory can be used by what is submitted to the stream after the
//! allocation, and is freed when the stream comes to the call that frees it. This module adds two things, so that every
//! copy call can take such memory. First, the allocation has a sequence number on its stream's timeline; unless that is
//! known to be complete, another stream waits for the allocation's stream before it uses the memory. Second, the memory
//! is freed when no hold is left, so that no stream uses it any more.

use std::sync::Arc;

use super::Stream;
use super::timeline::{Resource, Timeline};
use crate::device::StreamHandle;
use crate::device::memory::{DeviceBuffer, Home};
use crate::error::{Error, Result};

const NOT_THERE: &str = "the use of memory whose own stream has not come to it yet";
const BEFORE: &str = "synchronise with that stream before the capture begins";

impl Stream {
    /// Allocates `len` bytes of device memory in this stream's order: uninitialised, aligned to at least 256 bytes.
    ///
    /// The memory can be used at once. On this stream nothing has to be waited for. When a copy of this crate uses it
    /// on another stream of the device, that stream is made to wait for what was submitted to this one so far, until
    /// the allocation is known to have happened. (For kernels of the program on other streams the program does the same
    /// with [`wait_for`](Self::wait_for). A copy that becomes a part of a graph is refused until then.)
    ///
    /// The device's region thread frees the memory after the last handle was dropped and the last copy that uses it is
    /// complete. It frees in this stream's order; if the program can reach the stream too, by `cuMemFree`, which
    /// becomes part of no capture and does not need the stream. A stream of the crate's lives until then. Neither
    /// allocating nor freeing synchronises the device (for `cuMemFree` of such memory the CUDA programming guide says
    /// so, "Stream-Ordered Memory Allocator"). So kernels of the program must be complete before the last handle is
    /// dropped; that they were queued on this stream earlier is not enough.
    ///
    /// On a GPU this is `cuMemAllocAsync`, from the device's current memory pool, whose settings are left as they are.
    /// By the driver's default that pool gives free memory back to the system when a stream, an event or the context is
    /// next *synchronised with*, which this crate hardly ever does. A server that wants to keep memory, or to see it
    /// returned, sets `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD` or calls `cuMemPoolTrimTo`.
    ///
    /// A copy that is made a part of a graph ([`upload_captured`](Self::upload_captured)) can use the memory once this
    /// stream has come to the allocation, since the graph may be launched on any stream:
    /// [`synchronize`](Self::synchronize) before the capture begins.
    ///
    /// A device without such memory (a driver before CUDA 11.2, a device without memory pools) allocates by
    /// [`Device::alloc`](crate::Device::alloc): the memory is used alike, but the call may synchronise the device.
    ///
    /// # Errors
    /// As for [`Device::alloc`](crate::Device::alloc); [`Error::Capturing`] if the stream is being captured; the error
    /// with which the stream was lost.
    ///
    /// # Examples
    ///
    /// ```
    /// # use pinpool::Device;
    /// let device = Device::open("host")?;
    /// let stream = device.stream()?;
    /// let logits = stream.alloc(4096)?;
    /// stream.upload_blocking(&[1; 16], logits.slice(..16))?;
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    pub fn alloc(&self, len: usize) -> Result<DeviceBuffer> {
        if len == 0 {
            return Err(Error::ZeroLength);
        }
        self.timeline.usable()?;
        self.timeline
            .not_capturing("an allocation in the stream's order", "allocate before the capture begins")?;
        let context = self.timeline.context();
        if !context.driver().orders_memory() {
            return self.device.alloc(len);
        }
        // As for a copy: the entry is made first and gets its sequence number after the driver call. So the event of
        // that sequence number covers the allocation, and once it is complete any stream can use the memory.
        let submission =
            self.timeline.begin(Resource::Object(Box::new(())), None).map_err(|(error, _)| error)?;
        let made = context.noting(context.driver().allocate_on(self.timeline.stream(), len));
        let made = made.map(|ptr| DeviceBuffer::ordered(context, ptr, len, self.timeline.clone()));
        if let Ok(buffer) = &made {
            // The entry keeps the allocation, so that it is not freed before it has happened.
            submission.keep(buffer.allocation());
        }
        let seq = submission.commit();
        made.inspect(|buffer| buffer.there_from(seq))
    }
}

/// Memory that was allocated on this stream keeps the timeline. While the memory is in flight here, the timeline keeps
/// the memory too; the entries leave when their sequence number is complete or the device is lost, which ends the
/// cycle.
impl Home for Timeline {
    fn handle(&self) -> Option<StreamHandle> {
        (!self.is_shared()).then(|| self.stream())
    }

    fn admit(self: Arc<Self>, seq: u64, user: StreamHandle) -> Result<()> {
        // A confined stream's handle stands for another stream on another thread.
        let same = user == self.stream() && self.nameable().is_ok();
        if same || self.is_complete(seq)? {
            return Ok(());
        }
        // An event of a capture would draw the other stream into the capture.
        self.not_capturing(NOT_THERE, BEFORE)?;
        self.wait_here(user)
    }

    fn is_there(self: Arc<Self>, seq: u64) -> Result<()> {
        if self.poll_complete(seq)? {
            return Ok(());
        }
        Err(Error::Capturing { what: NOT_THERE, remedy: BEFORE })
    }
}
