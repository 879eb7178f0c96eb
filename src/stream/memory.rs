//! Device memory in a stream's order.
//!
//! The driver's own allocator works so: memory is there for what is submitted to the stream after the call, and goes
//! when the stream comes to the call that frees it. Two things are added, so that every copy call can take it. The
//! allocation has a sequence number of its stream's timeline, and before another stream uses the memory it waits for
//! that stream, unless the sequence number is known to be complete. And the memory is freed when no hold is left, so
//! that no use of it is under way on any stream.

use std::sync::Arc;

use super::Stream;
use super::timeline::{Resource, Timeline};
use crate::device::StreamHandle;
use crate::device::memory::{DeviceBuffer, Home};
use crate::error::{Error, Result};

const NOT_THERE: &str = "the use of memory whose own stream has not come to it yet";
const BEFORE: &str = "synchronise with that stream before the capture begins";

impl Stream {
    /// Device memory of `len` bytes in this stream's order, uninitialised, aligned to 256 bytes at least.
    ///
    /// It can be used at once: on this stream nothing has to be waited for, and when a copy of this crate uses it on
    /// another stream of the device, that stream is made to wait for what this one was told so far, until the
    /// allocation is known to have happened. (For kernels of your own on other streams that is up to you:
    /// [`wait_for`](Self::wait_for). A copy that becomes a part of a graph is refused until then.) It is freed by the
    /// device's worker thread once the last handle is gone and the last copy in flight is done: in this stream's order,
    /// or where others can reach the stream by `cuMemFree`, which gets into no capture of theirs and does not need the
    /// stream. A stream of ours lives until then. Neither allocating nor freeing synchronises the device (for
    /// `cuMemFree` of such memory so says the CUDA programming guide, "Stream-Ordered Memory Allocator"). So kernels of
    /// your own must be done with it before the last handle is dropped; that they were queued on this stream before is
    /// not enough.
    ///
    /// On a GPU this is `cuMemAllocAsync`, from the device's current memory pool, whose settings are left as they are:
    /// by the driver's default a pool gives back to the system what is free when a stream, an event or the context is
    /// next *synchronised with*, which this crate itself hardly ever does. A server that wants to keep memory, or to
    /// see it go, sets `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD` or calls `cuMemPoolTrimTo`.
    ///
    /// What is made a part of a graph ([`upload_captured`](Self::upload_captured)) can use it once this stream has come
    /// to it, since the graph may be launched on any stream: [`synchronize`](Self::synchronize) before the capture
    /// begins.
    ///
    /// Where a device has no such memory (a driver before CUDA 11.2, a device without memory pools) this is
    /// [`Device::alloc`](crate::Device::alloc): usable alike, but the device may be synchronised.
    ///
    /// # Errors
    /// As for [`Device::alloc`](crate::Device::alloc); [`Error::Capturing`]; what the stream was lost with.
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
        // As for a copy: the entry first, its sequence number after the driver was called. So the event of that
        // sequence number covers the allocation, and once it is complete the memory is there for everyone.
        let submission =
            self.timeline.begin(Resource::Object(Box::new(())), None).map_err(|(error, _)| error)?;
        let made = context.noting(context.driver().allocate_on(self.timeline.stream(), len));
        let made = made.map(|ptr| DeviceBuffer::ordered(context, ptr, len, self.timeline.clone()));
        if let Ok(buffer) = &made {
            // So it is not freed before it was there.
            submission.keep(buffer.allocation());
        }
        let seq = submission.commit();
        made.inspect(|buffer| buffer.there_from(seq))
    }
}

/// Memory that was allocated on this stream keeps it. While that memory is in flight here the two hold each other; the
/// holds go when their sequence number is complete, or when the device is lost, and leave nothing behind.
impl Home for Timeline {
    fn handle(&self) -> Option<StreamHandle> {
        (!self.is_shared()).then(|| self.stream())
    }

    fn admit(self: Arc<Self>, seq: u64, user: StreamHandle) -> Result<()> {
        if user == self.stream() || self.is_complete(seq)? {
            return Ok(());
        }
        // An event of a capture would draw the other stream into it.
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
