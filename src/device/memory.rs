//! Device memory. Its handles are counted, and each copy in flight has one, so memory that is
//! dropped early is freed late. The crate allocated it, or took it from the program with an owner.
//!
//! The end of an allocation is a job of the device's worker: the last handle may be dropped on any
//! thread, under locks of the caller's or in a callback of the driver's.

use std::fmt;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use crate::locks::Mutex;

use super::DevicePtr;
use super::context::Context;
use crate::error::{Error, Result, SubmitError};

/// One allocation on a device.
pub(crate) struct Allocation {
    context: Arc<Context>,
    ptr: DevicePtr,
    len: usize,
    /// What the worker does after the last handle is dropped. The job keeps the context until it
    /// has ended. (The lock is never taken: it makes the job `Sync`.)
    end: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Allocation {
    /// The whole of a new allocation.
    fn whole(
        context: &Arc<Context>,
        ptr: DevicePtr,
        len: usize,
        end: Option<Box<dyn FnOnce() + Send>>,
    ) -> DeviceSlice {
        context.holds().memory.add(len);
        let allocation = Arc::new(Self { context: context.clone(), ptr, len, end: Mutex::new(end) });
        DeviceSlice { allocation, offset: 0, len }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.context.holds().memory.sub(self.len);
        // In the child of a fork `send` leaks the job, since none of what it owns exists there.
        self.end.get_mut().take().into_iter().for_each(|end| self.context.worker().send(end));
    }
}

/// Memory of a device: an allocation ([`Device::alloc`](crate::Device::alloc)), the program's
/// ([`Device::raw_memory`](crate::Device::raw_memory)), or a [range](Self::slice) of either.
///
/// It is a counted handle: the memory is freed after the last one is dropped, its clones, its
/// slices, and those that copies in flight hold. Dropping a handle never blocks. The contents of an
/// allocation are undefined until a copy has written them.
///
/// **Memory that is used again** is not guarded as host buffers are: a copy whose handle was
/// dropped may still use it. The next use must come after that copy: on its stream, on one that
/// [waits for it](crate::Stream::wait_for), or when [`stream.hold(())`](crate::Stream::hold) has
/// been awaited.
///
/// ```
/// # use pinpool::{Device, Error};
/// # let device = Device::open("host")?;
/// let weights = device.alloc(100)?;
/// let second_half = weights.slice(50..)?;
/// assert_eq!((second_half.len(), second_half.address()), (50, weights.address() + 50));
/// assert!(matches!(weights.slice(50..101), Err(Error::Argument(_))));
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone)]
pub struct DeviceSlice {
    allocation: Arc<Allocation>,
    offset: usize,
    len: usize,
}

/// Ranges of one length at even distances in device memory, such as a page of each layer of a
/// cache, in one handle. [`Copier::upload_pages`](crate::Copier::upload_pages) takes it for a list.
///
/// ```
/// # use pinpool::Device;
/// # let device = Device::open("host")?;
/// const PLANE: usize = 100 * 4096; // a hundred pages
/// let cache = device.alloc(64 * PLANE)?;
/// let block = cache.strided(7 * 4096..8 * 4096, PLANE, 64)?; // page 7 of each plane
/// assert_eq!(block.get(2)?.address(), cache.address() + 2 * PLANE as u64 + 7 * 4096);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct StridedSlice {
    /// From the first byte of the first range to the last byte of the last one.
    pub(crate) whole: DeviceSlice,
    /// Bytes of a range.
    pub(crate) len: usize,
    pub(crate) stride: usize,
    count: usize,
}

impl StridedSlice {
    /// How many ranges there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// One of the ranges, by its number from 0 on.
    ///
    /// # Errors
    /// [`Error::Argument`] where there are fewer.
    pub fn get(&self, n: usize) -> Result<DeviceSlice> {
        let start = n.saturating_mul(self.stride);
        self.whole.slice(start..start.saturating_add(self.len))
    }
}

impl DeviceSlice {
    /// Memory that the driver allocates, all of it.
    pub(crate) fn allocate(context: &Arc<Context>, len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::ZeroLength);
        }
        context.alive()?;
        let maker = context.clone();
        let ptr = context.worker().call(move || maker.noting(maker.driver().allocate(len)))?;
        let keeper = context.clone();
        let free = move || {
            if keeper.is_shut_down() {
                return;
            }
            if let Err(error) = keeper.driver().free(ptr) {
                keeper.holds().leaked(1);
                crate::foreign::warn!(target: "pinpool::device::leak", device = keeper.name(), %error, "device memory is leaked");
            }
        };
        Ok(Allocation::whole(context, ptr, len, Some(Box::new(free))))
    }

    /// Memory that the crate did not allocate, once the driver has said that its copies can use it.
    /// An error carries the owner back.
    ///
    /// # Safety
    /// As for [`Device::raw_memory`](crate::Device::raw_memory).
    pub(crate) unsafe fn foreign<O: Send + 'static>(
        context: &Arc<Context>,
        address: u64,
        len: usize,
        owner: O,
    ) -> Result<Self, SubmitError<O>> {
        let ptr = DevicePtr(address);
        let checked = match (address, len) {
            (_, 0) => Err(Error::empty()),
            (0, _) => Err(AddressFault::Null.of(context.name(), address, len)),
            _ => context.alive().and_then(|()| context.noting(context.driver().examine(ptr, len))),
        };
        if let Err(error) = checked {
            return Err(SubmitError::refused(error, owner));
        }
        let keeper = context.clone();
        let end = move || {
            crate::foreign::discard(owner);
            drop(keeper);
        };
        let end = std::mem::needs_drop::<O>().then(|| Box::new(end) as Box<_>);
        Ok(Allocation::whole(context, ptr, len, end))
    }

    /// The device address of its first byte, for kernels and copies of the program's own: on a GPU
    /// a `CUdeviceptr`. The CPU cannot read there.
    ///
    /// Work that uses the address must be complete before the last handle to the memory is dropped.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.ptr().0
    }

    /// Length in bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// A range of it, in bytes.
    ///
    /// # Errors
    /// [`Error::Argument`] for a range that leaves the slice, and for an empty one.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Self> {
        let (start, end) = bounds(range, self.len)?;
        Ok(Self { allocation: self.allocation.clone(), offset: self.offset + start, len: end - start })
    }

    /// `count` ranges of one length: `first`, in bytes, then each `stride` behind the one before.
    ///
    /// # Errors
    /// [`Error::Argument`] where the last one leaves the slice, where they overlap (a stride of
    /// less than their length), for an empty range, and for none.
    pub fn strided(
        &self,
        first: impl RangeBounds<usize>,
        stride: usize,
        count: usize,
    ) -> Result<StridedSlice> {
        let (start, end) = bounds(first, self.len)?;
        let (len, more) = (end - start, count.checked_sub(1).ok_or_else(Error::empty)?);
        if stride < len && more > 0 {
            let text =
                format!("ranges of {len} bytes with a stride of {stride} overlap: it takes at least {len}");
            return Err(Error::Argument(text));
        }
        let whole = self.slice(start..end.saturating_add(stride.saturating_mul(more)))?;
        Ok(StridedSlice { whole, len, stride: stride.max(len), count })
    }

    /// This range and the one that follows it in the same allocation, as one.
    pub(crate) fn joined(&self, next: &Self) -> Option<Self> {
        let follows =
            Arc::ptr_eq(&self.allocation, &next.allocation) && self.offset + self.len == next.offset;
        follows.then(|| Self { len: self.len + next.len, ..self.clone() })
    }

    /// The device's name.
    pub(crate) fn device(&self) -> &str {
        self.allocation.context.name()
    }

    pub(crate) fn ptr(&self) -> DevicePtr {
        DevicePtr(self.allocation.ptr.0 + self.offset as u64)
    }

    pub(crate) fn allocation(&self) -> Arc<Allocation> {
        self.allocation.clone()
    }

    /// A number for the allocation. No two allocations that exist at a time have the same.
    pub(crate) fn allocation_number(&self) -> u64 {
        Arc::as_ptr(&self.allocation).addr() as u64
    }

    /// [`Error::Mismatch`], unless it is memory of this device.
    #[inline]
    pub(crate) fn check_is_of(&self, context: &Arc<Context>) -> Result<()> {
        if Arc::ptr_eq(&self.allocation.context, context) {
            return Ok(());
        }
        Err(Error::wrong_memory(self.device(), context.name()))
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
        return Err(Error::out_of_range(start, end, len));
    }
    if start == end {
        return Err(Error::empty());
    }
    Ok((start, end))
}

impl From<&Self> for DeviceSlice {
    fn from(slice: &Self) -> Self {
        slice.clone()
    }
}

impl fmt::Debug for DeviceSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceSlice")
            .field("device", &self.device())
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish()
    }
}

/// Why an address names no memory that a device's copies can use.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AddressFault {
    #[error("it is null")]
    Null,
    #[error(
        "that is {}; it is the host's side of a copy: use a buffer of a pool, or the blocking copies, which take \
         borrowed memory", if *.registered { "page-locked host memory" } else { "ordinary host memory" }
    )]
    Host { registered: bool },
    #[error("that is memory of {device}; copy on a stream of that device, or through the host")]
    OtherDevice { device: String },
    #[cfg_attr(
        not(feature = "cuda"),
        allow(dead_code, reason = "only CUDA has several contexts of a device")
    )]
    #[error(
        "another context of the GPU allocated it, and only with peer access between the two could it be used here; \
         allocate it in the device's own context, which is the primary one, like the runtime API's and the frameworks'"
    )]
    OtherContext,
    #[error(
        "the allocation there starts at {start:#x} and has {size} bytes, and the range leaves it by {over}"
    )]
    PastEnd { start: u64, size: usize, over: usize },
    #[error(
        "the driver knows no memory there; either a kernel's own malloc or new gave it (the device-side heap, which \
         no copy call accepts: have a kernel copy it to memory of cudaMalloc, cuMemAlloc or `Device::alloc`, and name \
         that), or it was freed"
    )]
    Unknown,
}

impl AddressFault {
    /// The error for `len` bytes at `address`, which were to be memory of `device`.
    #[cold]
    pub(crate) fn of(self, device: &str, address: u64, len: usize) -> Error {
        let what = format!("{len} bytes at address {address:#x}");
        Error::Argument(format!("{what} cannot be used as memory of {device}: {self}"))
    }
}
