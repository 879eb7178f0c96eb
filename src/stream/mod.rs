//! Streams: ordered queues of a device, and what is in flight on them.
//!
//! [`timeline`] says how it is known that a copy is done, [`reaper`] who finds out.

#[cfg(all(test, loom))]
mod loom_models;
pub(crate) mod reaper;
pub(crate) mod timeline;

use std::fmt;
use std::sync::Arc;

use crate::device::memory::DeviceBuffer;
use crate::error::{Error, Result};
use crate::runtime::Device;
use timeline::{Lent, Timeline};

/// An ordered queue of a device. What is submitted to one stream happens in that order; streams are independent of each
/// other. Cloning gives another handle to the same stream.
///
/// Dropping the last handle does not wait: what is in flight stays in flight and returns as always.
#[derive(Clone)]
pub struct Stream {
    timeline: Arc<Timeline>,
    /// Keeps the reaper awake for this stream.
    device: Device,
}

impl Stream {
    pub(crate) fn create(device: &Device) -> Result<Self> {
        let context = device.context().clone();
        context.alive()?;
        let maker = context.clone();
        let handle = context.worker().call(move || maker.noting(maker.driver().create_stream()))?;
        let timeline = Timeline::new(context, handle, true, device.listing().clone());
        Ok(Self { timeline, device: device.clone() })
    }

    pub(crate) fn timeline(&self) -> &Arc<Timeline> {
        &self.timeline
    }

    /// The device that the stream belongs to.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Device memory of `len` bytes in this stream's order, uninitialised, aligned to 256 bytes at least.
    ///
    /// It can be used at once: on this stream nothing has to be waited for, and when a copy of this crate uses it on
    /// another stream of the device, that stream is made to wait for what this one was told so far, until the
    /// allocation is known to have happened. (For kernels of your own on other streams that is up to you:
    /// [`wait_for`](Self::wait_for).) Neither allocating nor freeing synchronises the device. It is freed in this
    /// stream's order once the last handle is gone and the last copy in flight is done; the stream lives until then.
    ///
    /// On a GPU this is `cuMemAllocAsync`, from the device's current memory pool, whose settings are left as they are: by
    /// the driver's default a pool gives back to the system what is free when a stream, an event or the context is next
    /// *synchronised with*, which this crate itself hardly ever does. A server that wants to keep memory, or to see it
    /// go, sets `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD` or calls `cuMemPoolTrimTo`.
    ///
    /// Where a device has no such memory (a driver before CUDA 11.2, a device without memory pools) this is
    /// [`Device::alloc`]: usable alike, but the device may be synchronised.
    ///
    /// # Errors
    /// As for [`Device::alloc`]; what the stream was lost with.
    pub fn alloc(&self, len: usize) -> Result<DeviceBuffer> {
        if len == 0 {
            return Err(Error::ZeroLength);
        }
        // The one place for what a stream must be like to allocate on: a stream that is being captured would make the
        // allocation a part of the graph, and is to be refused here.
        self.timeline.usable()?;
        let context = self.timeline.context();
        if !context.driver().orders_memory() {
            return self.device.alloc(len);
        }
        // As for a copy: the entry first, its tick after the driver was called. So the mark of that tick covers the
        // allocation, and once it is complete the memory is there for everyone.
        let submission = self.timeline.begin(Lent::Object(Box::new(())), None).map_err(|(error, _)| error)?;
        let made = context.noting(context.driver().allocate_on(self.timeline.stream(), len));
        let tick = submission.commit();
        Ok(DeviceBuffer::ordered(context, made?, len, self.timeline.clone(), tick))
    }

    /// What is submitted to this stream from now on starts only after everything submitted to `other` so far. The
    /// caller does not wait. Both must be streams of one device.
    ///
    /// # Errors
    /// [`Error::WrongDevice`]; what the driver says; what either stream was lost with.
    pub fn wait_for(&self, other: &Self) -> Result<()> {
        if !Arc::ptr_eq(self.timeline.context(), other.timeline.context()) {
            return Err(Error::WrongDevice { device: self.device.name().into() });
        }
        self.timeline.usable()?;
        other.timeline.wait_here(self.timeline.stream())
    }

    /// Waits until everything submitted so far is done.
    ///
    /// # Errors
    /// What the stream was lost with.
    pub fn synchronize(&self) -> Result<()> {
        let tick = self.timeline.checkpoint()?;
        self.timeline.wait(tick, None)
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("device", &self.device.name()).finish_non_exhaustive()
    }
}
