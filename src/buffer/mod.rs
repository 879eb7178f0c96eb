//! Buffers as types: a segment's type says what may be done with it. The crate's page has a table.
//!
//! Every one of them may be forgotten ([`std::mem::forget`]). That leaks the segment and never
//! causes early reuse: what is in flight belongs to the stream's timeline, not to the handle.
//!
//! # How a handle and its timeline share a segment
//!
//! Each has a value for the same segment (`Segment::alias` makes the second one). The segment's
//! state word decides which of the two acts (`freelist::descriptor`). While the word says FLIGHT,
//! neither may touch the memory. A timeline that completes first sets COMPLETED, and the handle has
//! the segment; a handle that is dropped first sets DETACHED, and the timeline returns it.
//!
//! # Invariants
//!
//! - A [`PinnedBuf`] owns its segment alone, and no device work on it is outstanding. Its first
//!   `len` bytes are initialised, and `len` is at most the capacity.
//! - Each segment is returned once: by the buffer's drop, by the handle, or by the timeline.
//!
//! `lend` has what can be lent to a device, `registered` values that are lent where they are.

#![allow(unsafe_code)]

mod flight;
mod lend;
mod registered;
mod stream;

use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::{Deref, DerefMut};

use bytemuck::{AnyBitPattern, NoUninit};
use bytes::BufMut;
use bytes::buf::UninitSlice;

use crate::central::{Fresh, Segment};
use crate::device::handle::Device;
use crate::error::{Error, Result};

pub use flight::InFlight;
pub use lend::Lend;
pub use registered::Registered;
pub use stream::StreamBuf;

/// What [`Error::Mismatch`](crate::Error::Mismatch) calls a buffer.
const BUFFER: &str = "a buffer from a pool";

/// A host-ready buffer of page-locked memory: the CPU alone uses it, no device work is outstanding.
///
/// It has a fixed capacity, exactly the length that was asked for, and starts out empty, like a
/// `bytes::BytesMut`. It starts on a multiple of 64 bytes, or of the alignment that was asked for.
/// Dropping the buffer returns its memory to the pool; it may outlive the pool's handles.
///
/// The buffer derefs to the bytes that were written, none at first: `buf[..n]` panics until they
/// are there. [`try_extend_from_slice`](Self::try_extend_from_slice), [`std::io::Write`]
/// (`io::copy` from a file) and `bytes::BufMut` (tokio's `read_buf`) fill it.
///
/// In the child of a fork the memory of a buffer may not exist: the child must not touch it.
///
/// ```
/// use pinpool::{Device, Pool, Unpinned};
///
/// let device = Device::open("host")?;
/// let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build()?;
/// let mut buf = pool.checkout(1000)?;
/// assert!(buf.is_empty() && buf.capacity() == 1000);
/// buf.try_extend_from(&[1.0_f32, 2.0])?;
/// assert_eq!(buf.view::<f32>()?, [1.0, 2.0]);
/// assert!(buf.try_resize(1001, 0).is_err());
/// # Ok::<(), pinpool::Error>(())
/// ```
///
/// The body of an HTTP answer is made of it without a copy: `bytes::Bytes::from_owner(buf)` (bytes
/// 1.9 or later). The buffer returns when the server has sent the body and drops it.
pub struct PinnedBuf {
    segment: Segment,
    /// Bytes written, from the start.
    ///
    /// # Invariant
    /// At most the capacity, and that many bytes are initialised.
    len: usize,
}

impl Drop for PinnedBuf {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: a PinnedBuf owns its segment host-ready, and this is the end of it.
        unsafe { self.segment.alias().release() }
    }
}

impl From<Fresh> for PinnedBuf {
    #[inline(always)]
    fn from(fresh: Fresh) -> Self {
        Self { segment: fresh.into_segment(), len: 0 }
    }
}

impl PinnedBuf {
    /// # Safety
    /// The segment is checked out, host-ready, the caller's, and `len` bytes are initialised.
    #[inline(always)]
    pub(crate) unsafe fn new(segment: Segment, len: usize) -> Self {
        Self { segment, len }
    }

    /// Takes the segment out of the buffer, which is not dropped.
    pub(crate) fn into_segment(self) -> Segment {
        ManuallyDrop::new(self).segment.alias()
    }

    /// The number of bytes that fit: the length that was asked for.
    #[inline]
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.segment.len()
    }

    /// The number of bytes that still fit.
    #[inline]
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.capacity() - self.len
    }

    /// The start of the memory, to write. Reading through it beyond the bytes that were written
    /// reads uninitialised memory.
    #[inline]
    #[must_use]
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.segment.base().as_ptr()
    }

    /// Whether the memory is page-locked. `false` only where
    /// [`Unpinned::Allow`](crate::Unpinned::Allow) let the pool go on without page locks, and for
    /// managed memory ([`Backing::Managed`](crate::Backing::Managed)). It may become `true` while
    /// the buffer is out: the pool locks such memory later where it can.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.segment.pinned()
    }

    /// The address at which `device` sees the start of the memory, for kernels that use it in
    /// place. (CUDA: `cuMemHostGetDevicePointer`. Managed memory and the host device have the
    /// host's address.)
    ///
    /// The address is raw: only work on `device` may use it, within the [capacity](Self::capacity),
    /// and only until the buffer returns to its pool or the CPU writes to it. A
    /// [hold](crate::Stream::hold) on each stream of such work keeps the buffer until it is done.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a device that the pool does not serve; [`Error::Unsupported`] for a
    /// device that cannot map host memory; else [as every call](Error#every-call), also for memory
    /// that is not pinned.
    pub fn device_address(&self, device: &Device) -> Result<u64> {
        let (context, central) = (device.context(), self.segment.central());
        central.config().check_serves(BUFFER, context)?;
        context.alive()?;
        let at = self.segment.base();
        if central.is_managed(at) {
            return Ok(at.as_ptr().expose_provenance() as u64);
        }
        context.noting(context.driver().device_address(at))
    }

    /// Forgets what was written: the buffer is empty again.
    #[inline]
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Keeps the first `len` bytes and forgets the rest. Does nothing if fewer were written.
    #[inline]
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// The memory that was not written yet. Bytes put there count as written after
    /// [`set_len`](Self::set_len).
    #[inline]
    pub fn spare_capacity_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        // SAFETY: from `len` to the capacity is within the segment, which this buffer owns alone.
        unsafe {
            let start = self.segment.base().as_ptr().add(self.len);
            std::slice::from_raw_parts_mut(start.cast(), self.segment.len() - self.len)
        }
    }

    /// Sets the number of bytes that count as written: after the program or a kernel has written
    /// them through a raw pointer.
    ///
    /// # Safety
    /// `len` is at most the capacity, that many bytes from the start are initialised, and work of a
    /// device that wrote them was seen complete on the host.
    #[inline]
    pub unsafe fn set_len(&mut self, len: usize) {
        debug_assert!(len <= self.capacity());
        self.len = len;
    }

    /// Appends bytes.
    ///
    /// # Panics
    /// If they do not fit; [`try_extend_from_slice`](Self::try_extend_from_slice) does not panic.
    #[inline]
    pub fn extend_from_slice(&mut self, bytes: &[u8]) {
        if let Err(error) = self.try_extend_from_slice(bytes) {
            panic!("{error}");
        }
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// [`Error::TooSmall`] if they do not fit; nothing is appended then.
    #[inline]
    pub fn try_extend_from_slice(&mut self, bytes: &[u8]) -> Result<()> {
        if bytes.len() > self.remaining() {
            return Err(Error::TooSmall { need: bytes.len(), have: self.remaining() });
        }
        // SAFETY: they fit, and a borrowed slice cannot overlap memory that this buffer owns alone.
        unsafe {
            let end = self.segment.base().as_ptr().add(self.len);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), end, bytes.len());
        }
        self.len += bytes.len();
        Ok(())
    }

    /// Appends the bytes of values.
    ///
    /// # Errors
    /// [`Error::TooSmall`] if they do not fit; nothing is appended then.
    pub fn try_extend_from<T: NoUninit>(&mut self, values: &[T]) -> Result<()> {
        self.try_extend_from_slice(bytemuck::cast_slice(values))
    }

    /// Sets the length to `len` bytes: cuts the buffer off, or fills it up with `value`.
    ///
    /// # Errors
    /// [`Error::TooSmall`] if `len` is beyond the capacity.
    pub fn try_resize(&mut self, len: usize, value: u8) -> Result<()> {
        if len > self.capacity() {
            return Err(Error::TooSmall { need: len, have: self.capacity() });
        }
        if len > self.len {
            // SAFETY: from `self.len` to `len` is within the segment.
            unsafe { self.segment.base().as_ptr().add(self.len).write_bytes(value, len - self.len) };
        }
        self.len = len;
        Ok(())
    }

    /// The bytes that were written, as values.
    ///
    /// # Errors
    /// [`Error::Argument`] if their number is no multiple of the type's size.
    pub fn view<T: AnyBitPattern>(&self) -> Result<&[T]> {
        bytemuck::try_cast_slice(self).map_err(|error| {
            let (len, size) = (self.len, size_of::<T>());
            Error::Argument(format!("{len} bytes cannot be viewed as values of {size} bytes each: {error}"))
        })
    }
}

impl Deref for PinnedBuf {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes are initialised (invariant), and nothing writes during the borrow.
        unsafe { std::slice::from_raw_parts(self.segment.base().as_ptr(), self.len) }
    }
}

impl DerefMut for PinnedBuf {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.segment.base().as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for PinnedBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for PinnedBuf {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl std::fmt::Debug for PinnedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PinnedBuf")
            .field("len", &self.len)
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}

/// Writes as much as fits. `Ok(0)` when full: `write_all` ends with `ErrorKind::WriteZero`.
impl std::io::Write for PinnedBuf {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let n = bytes.len().min(self.remaining());
        self.try_extend_from_slice(&bytes[..n])?;
        Ok(n)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

// SAFETY: `chunk_mut` is the spare capacity; `advance_mut` cuts off its front what was written.
unsafe impl BufMut for PinnedBuf {
    fn remaining_mut(&self) -> usize {
        self.remaining()
    }

    /// # Panics
    /// If `n` is beyond what remains, as [`BufMut`] documents.
    unsafe fn advance_mut(&mut self, n: usize) {
        assert!(n <= self.remaining(), "advanced by {n} of {} bytes that remain", self.remaining());
        self.len += n;
    }

    fn chunk_mut(&mut self) -> &mut UninitSlice {
        self.spare_capacity_mut().into()
    }
}
