//! Device memory, kept alive by whoever uses it: handles are counted, and each hold on a timeline has one, so a buffer
//! that is dropped early is freed late.

use std::fmt;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use super::DevicePtr;
use super::context::Context;
use crate::error::{Error, Result};

/// One allocation on a device, freed with its last handle, by the device's worker.
pub(crate) struct Allocation {
    context: Arc<Context>,
    ptr: DevicePtr,
    len: usize,
}

impl Allocation {
    pub(crate) fn new(context: &Arc<Context>, len: usize) -> Result<Arc<Self>> {
        if len == 0 {
            return Err(Error::ZeroLength);
        }
        context.alive()?;
        let maker = context.clone();
        let ptr = context.worker().call(move || maker.noting(maker.driver().allocate(len)))?;
        Ok(Arc::new(Self { context: context.clone(), ptr, len }))
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.context.forked() {
            return;
        }
        let (driver, ptr) = (self.context.driver().clone(), self.ptr);
        self.context.worker().send(move || {
            if let Err(error) = driver.free(ptr) {
                tracing::warn!(target: "pinpool::device", device = driver.name(), %error, "device memory is leaked");
            }
        });
    }
}

/// Memory of a device.
///
/// Freed when the last handle is gone: this one, its [slices](DeviceBuffer::slice), and those that copies in flight
/// hold. Its contents are undefined until a copy has written them.
#[derive(Clone)]
pub struct DeviceBuffer(DeviceSlice);

/// A range of a [`DeviceBuffer`]; a counted handle that keeps the memory alive.
#[derive(Clone)]
pub struct DeviceSlice {
    allocation: Arc<Allocation>,
    offset: usize,
    len: usize,
}

impl DeviceBuffer {
    pub(crate) fn new(context: &Arc<Context>, len: usize) -> Result<Self> {
        Ok(Self(DeviceSlice { allocation: Allocation::new(context, len)?, offset: 0, len }))
    }

    /// Length in bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// A range of it.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a range that leaves the buffer, [`Error::Empty`] for an empty one.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<DeviceSlice> {
        self.0.slice(range)
    }
}

impl DeviceSlice {
    /// Length in bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// A range of it.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a range that leaves the slice, [`Error::Empty`] for an empty one.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Self> {
        let (start, end) = bounds(range, self.len)?;
        Ok(Self { allocation: self.allocation.clone(), offset: self.offset + start, len: end - start })
    }

    /// The device's name.
    #[must_use]
    pub fn device(&self) -> &str {
        self.allocation.context.name()
    }

    pub(crate) fn ptr(&self) -> DevicePtr {
        DevicePtr(self.allocation.ptr.0 + self.offset as u64)
    }

    pub(crate) fn allocation(&self) -> Arc<Allocation> {
        self.allocation.clone()
    }

    /// Whether this is memory of that very device.
    pub(crate) fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.allocation.context, context)
    }
}

/// A range of `len` bytes as start and end.
pub(crate) fn bounds(range: impl RangeBounds<usize>, len: usize) -> Result<(usize, usize)> {
    let start = match range.start_bound() {
        Bound::Included(&n) => n,
        Bound::Excluded(&n) => n.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&n) => n.saturating_add(1),
        Bound::Excluded(&n) => n,
        Bound::Unbounded => len,
    };
    if start > end || end > len {
        return Err(Error::OutOfRange { start, end, len });
    }
    if start == end {
        return Err(Error::Empty);
    }
    Ok((start, end))
}

impl From<DeviceBuffer> for DeviceSlice {
    fn from(buffer: DeviceBuffer) -> Self {
        buffer.0
    }
}

impl From<&DeviceBuffer> for DeviceSlice {
    fn from(buffer: &DeviceBuffer) -> Self {
        buffer.0.clone()
    }
}

impl From<&Self> for DeviceSlice {
    fn from(slice: &Self) -> Self {
        slice.clone()
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer").field("device", &self.0.device()).field("len", &self.0.len).finish()
    }
}

impl fmt::Debug for DeviceSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset, len, .. } = self;
        f.debug_struct("DeviceSlice")
            .field("device", &self.device())
            .field("offset", offset)
            .field("len", len)
            .finish()
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocation").field("ptr", &self.ptr).field("len", &self.len).finish()
    }
}
