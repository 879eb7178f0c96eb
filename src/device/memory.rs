//! Device memory, kept alive by whoever uses it: handles are counted, and each hold on a timeline has one, so a buffer
//! that is dropped early is freed late.
//!
//! An allocation comes from one of three places, and all three are used alike in copies:
//!
//! - *Plain*: ours, there for every stream at once, and freed by a call that may synchronise the device.
//! - *Ordered*: ours, there in the order of the stream that it was allocated on, its [`Home`], and freed in that order.
//!   Another stream that uses it is first made to wait for the home's. When it is freed every hold is gone, the home's
//!   own for the allocation among them, so all was seen complete, and it does not matter which stream used it. Where
//!   others can reach the home it is not freed there, since nobody can tell them when that happens.
//! - *Foreign*: somebody else's. We keep what owns it, and let that go where we would free.
//!
//! Whatever the end is, it happens on the device's worker: the last handle may be dropped anywhere, under locks of the
//! caller's or on a thread of the driver's.

use std::fmt;
use std::ops::{Bound, RangeBounds};
use std::sync::{Arc, OnceLock};

use crate::locks::Mutex;

use super::context::Context;
use super::{DevicePtr, StreamHandle};
use crate::error::{AddressFault, Error, ErrorClass, Result};

/// The stream that memory was allocated on.
pub(crate) trait Home: fmt::Debug + Send + Sync {
    /// The stream in whose order memory is freed. `None` where others can reach it: they may destroy it when all of its
    /// work is done, or capture it at any time.
    fn handle(&self) -> Option<StreamHandle>;

    /// Sees to it that later work on the stream `user`, of the same device, comes after everything that was submitted
    /// here up to `seq`.
    fn admit(self: Arc<Self>, seq: u64, user: StreamHandle) -> Result<()>;

    /// An error, unless everything that was submitted here up to `seq` is known to be complete.
    fn is_there(self: Arc<Self>, seq: u64) -> Result<()>;
}

/// Where memory comes from, and so where it goes.
enum AllocationOrigin {
    Plain,
    /// There from `seq` on, which is told at the end of making it.
    Ordered {
        home: Arc<dyn Home>,
        seq: OnceLock<u64>,
    },
    /// The owner, if it is told. (The lock is never taken: it makes any owner `Sync`.)
    Foreign(Option<Mutex<Box<dyn Send>>>),
}

/// One allocation on a device, let go with its last handle, by the device's worker.
pub(crate) struct Allocation {
    context: Arc<Context>,
    ptr: DevicePtr,
    len: usize,
    origin: AllocationOrigin,
}

impl Allocation {
    /// Plain memory.
    fn plain(context: &Arc<Context>, len: usize) -> Result<Arc<Self>> {
        if len == 0 {
            return Err(Error::ZeroLength);
        }
        context.alive()?;
        let maker = context.clone();
        let ptr = context.worker().call(move || maker.noting(maker.driver().allocate(len)))?;
        Ok(Self::new(context, ptr, len, AllocationOrigin::Plain))
    }

    fn new(context: &Arc<Context>, ptr: DevicePtr, len: usize, origin: AllocationOrigin) -> Arc<Self> {
        context.holds().count_memory(len);
        Arc::new(Self { context: context.clone(), ptr, len, origin })
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.context.holds().count_memory_gone(self.len);
        let origin = std::mem::replace(&mut self.origin, AllocationOrigin::Foreign(None));
        if matches!(origin, AllocationOrigin::Foreign(None)) {
            return;
        }
        // In the child of a fork whatever the job owns is forgotten, since none of that is there.
        let (context, ptr) = (self.context.clone(), self.ptr);
        self.context.worker().send(move || {
            // A driver that has ended is not called any more.
            let ended = context.poisoned().is_some_and(|error| error.class() == ErrorClass::Shutdown);
            let freed = match origin {
                AllocationOrigin::Foreign(owner) => return crate::foreign::discard(owner),
                _ if ended => return,
                AllocationOrigin::Plain => context.driver().free(ptr),
                // The stream goes only after that, if this was the last that needed it.
                AllocationOrigin::Ordered { home, .. } => match home.handle() {
                    Some(stream) => context.driver().free_on(stream, ptr),
                    None => context.driver().free(ptr),
                },
            };
            if let Err(error) = freed {
                context.holds().leaked(1);
                crate::foreign::warn!(target: "pinpool::device::leak", device = context.name(), %error, "device memory is leaked");
            }
        });
    }
}

/// Memory of a device.
///
/// Freed when the last handle is gone: this one, its [slices](DeviceBuffer::slice), and those that copies in flight
/// hold. Its contents are undefined until a copy has written them.
///
/// From [`Device::alloc`](crate::Device::alloc), or in a stream's order from [`Stream::alloc`](crate::Stream::alloc).
#[derive(Clone)]
pub struct DeviceBuffer(DeviceSlice);

/// A range of a [`DeviceBuffer`], or of memory that somebody else allocated
/// ([`Device::raw_memory`](crate::Device::raw_memory)); a counted handle that keeps the memory alive.
#[derive(Clone)]
pub struct DeviceSlice {
    allocation: Arc<Allocation>,
    offset: usize,
    len: usize,
}

impl DeviceBuffer {
    pub(crate) fn new(context: &Arc<Context>, len: usize) -> Result<Self> {
        Ok(Self(DeviceSlice { allocation: Allocation::plain(context, len)?, offset: 0, len }))
    }

    /// What was allocated in a stream's order, by a call that is to get a sequence number there.
    pub(crate) fn ordered(context: &Arc<Context>, ptr: DevicePtr, len: usize, home: Arc<dyn Home>) -> Self {
        let origin = AllocationOrigin::Ordered { home, seq: OnceLock::new() };
        let allocation = Allocation::new(context, ptr, len, origin);
        Self(DeviceSlice { allocation, offset: 0, len })
    }

    pub(crate) fn allocation(&self) -> Arc<Allocation> {
        self.0.allocation()
    }

    /// The call got its sequence number. Before the buffer is anybody's.
    pub(crate) fn there_from(&self, now: u64) {
        if let AllocationOrigin::Ordered { seq, .. } = &self.0.allocation.origin {
            let _ = seq.set(now);
        }
    }

    /// Where it starts in the device's memory. See [`DeviceSlice::address`].
    #[must_use]
    pub fn address(&self) -> u64 {
        self.0.address()
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
    /// Memory of somebody else, once the driver has said that its copies can use it. After an error the owner comes
    /// back.
    ///
    /// # Safety
    /// As for [`Device::raw_memory`](crate::Device::raw_memory).
    pub(crate) unsafe fn foreign<O: Send + 'static>(
        context: &Arc<Context>,
        address: u64,
        len: usize,
        owner: O,
    ) -> std::result::Result<Self, (Error, O)> {
        let ptr = DevicePtr(address);
        let fault = |fault| Error::BadAddress { device: context.name().into(), address, len, fault };
        let checked = match (address, len) {
            _ if crate::os::forked() => Err(Error::Forked),
            (_, 0) => Err(Error::Empty),
            (0, _) => Err(fault(AddressFault::Null)),
            _ => context.alive().and_then(|()| context.noting(context.driver().examine(ptr, len))),
        };
        if let Err(error) = checked {
            return Err((error, owner));
        }
        let told = std::mem::needs_drop::<O>();
        let origin = AllocationOrigin::Foreign(told.then(|| Mutex::new(Box::new(owner) as Box<dyn Send>)));
        let allocation = Allocation::new(context, ptr, len, origin);
        Ok(Self { allocation, offset: 0, len })
    }

    /// Where it starts in the device's memory, for kernels and copies of your own: on a GPU a `CUdeviceptr`. It is no
    /// address that the CPU could read.
    ///
    /// What uses it must be done before the last handle to the memory is dropped. And what was allocated by
    /// [`Stream::alloc`](crate::Stream::alloc) must be used behind that call: on the same stream, or on one that
    /// [waits](crate::Stream::wait_for) for it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.ptr().0
    }

    /// Makes a stream that is about to use the memory wait until it is there. Before every use: for most memory, and on
    /// most streams, there is nothing to do.
    pub(crate) fn admit(&self, user: StreamHandle) -> Result<()> {
        match &self.allocation.origin {
            AllocationOrigin::Ordered { home, seq } => home.clone().admit(told(seq), user),
            AllocationOrigin::Plain | AllocationOrigin::Foreign(_) => Ok(()),
        }
    }

    /// The same for a graph, which may be launched on any stream: so it has to be there already.
    pub(crate) fn is_there(&self) -> Result<()> {
        match &self.allocation.origin {
            AllocationOrigin::Ordered { home, seq } => home.clone().is_there(told(seq)),
            AllocationOrigin::Plain | AllocationOrigin::Foreign(_) => Ok(()),
        }
    }

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

    /// This range and the one that follows it in the same allocation, as one.
    pub(crate) fn joined(&self, next: &Self) -> Option<Self> {
        let follows =
            Arc::ptr_eq(&self.allocation, &next.allocation) && self.offset + self.len == next.offset;
        follows.then(|| Self { len: self.len + next.len, ..self.clone() })
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

    pub(crate) fn into_allocation(self) -> Arc<Allocation> {
        self.allocation
    }

    /// Stands for the allocation: no two that exist have the same.
    pub(crate) fn allocation_number(&self) -> u64 {
        Arc::as_ptr(&self.allocation).addr() as u64
    }

    /// Whether this is memory of that very device.
    pub(crate) fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.allocation.context, context)
    }
}

fn told(seq: &OnceLock<u64>) -> u64 {
    seq.get().copied().unwrap_or(u64::MAX)
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
