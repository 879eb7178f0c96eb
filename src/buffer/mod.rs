//! Buffers as types: what may be done with a segment is which type it is.
//!
//! | type | the CPU may | the device may | how it comes about |
//! | --- | --- | --- | --- |
//! | [`PinnedBuf`] | read what was written, write | nothing | `pool.checkout`, `InFlight::wait` |
//! | [`StreamBuf`] | nothing | use it on one stream, in order | `pool.checkout_on` |
//! | [`InFlight`] | nothing | read or write it, any time until done | `stream.upload`, `stream.download`, `stream.hold` |
//!
//! Submitting a copy takes the buffer, so nobody can write under it. An in-flight handle may be waited for, awaited,
//! asked, or dropped: then the segment goes back to its pool by itself. All of them may be forgotten
//! ([`std::mem::forget`]): that leaks the segment, and never lets anyone reuse it early, because what is in flight
//! belongs to the stream's timeline and not to the handle.
//!
//! Here is [`PinnedBuf`]; `stream` and `flight` have the other two, `lend` what can be lent to a device, `registered`
//! values that are lent where they are, and `unpinned` what is given out in place of a segment.

#![allow(unsafe_code)]

mod flight;
mod lend;
mod registered;
mod stream;
mod unpinned;

use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::{Deref, DerefMut};

use bytemuck::{AnyBitPattern, NoUninit, Pod};
use bytes::BufMut;
use bytes::buf::UninitSlice;

pub use crate::central::Token;
use crate::central::{CentralPool, Fresh, Segment};
use crate::device::context::Context as DeviceContext;
use crate::device::handle::Device;
use crate::error::{Error, Result};

pub use flight::InFlight;
pub use lend::Lend;
pub(crate) use lend::{joint, sealed};
pub use registered::Registered;
pub use stream::StreamBuf;
pub use unpinned::{HostBuf, UnpinnedBuf};

/// A host-ready buffer of page-locked memory: yours alone, no device work outstanding.
///
/// A buffer of fixed capacity in the way of `bytes::BytesMut`: it starts out empty and only what was written can be
/// read, so no request sees another's bytes. It starts on a multiple of 64 bytes (or of the alignment asked for), and
/// its capacity is exactly the length asked for. Dropped, it goes back to its pool; it stays usable when the pool is
/// dropped first.
///
/// It derefs to the bytes that were written, which are none at first: `buf[..n]` panics until they are there.
/// To fill it there are [`try_extend_from_slice`](Self::try_extend_from_slice), [`std::io::Write`]
/// (`io::copy` from a file) and `bytes::BufMut` (tokio's `read_buf`). None of them needs the memory to be
/// filled by `try_resize` first.
///
/// In the child of a fork a buffer's memory may not exist: leave it alone there.
pub struct PinnedBuf {
    segment: Segment,
    /// Bytes written, from the start.
    ///
    /// # Invariant
    /// At most the capacity; that many bytes are initialised.
    len: usize,
}

impl Drop for PinnedBuf {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: a PinnedBuf owns its segment host-ready, and this is the end of it.
        unsafe { self.segment.alias().release() }
    }
}

fn no_view<T>(len: usize, error: bytemuck::PodCastError) -> Error {
    Error::View(match error {
        bytemuck::PodCastError::OutputSliceWouldHaveSlop => {
            format!("{len} bytes are no whole number of {} bytes each", size_of::<T>())
        }
        error => error.to_string(),
    })
}

impl From<Fresh> for PinnedBuf {
    #[inline(always)]
    fn from(fresh: Fresh) -> Self {
        Self { segment: fresh.into_segment(), len: 0 }
    }
}

impl PinnedBuf {
    /// Takes back what went out as a token, once.
    pub(crate) fn redeem(central: &CentralPool, token: Token) -> Option<Self> {
        let (segment, len) = central.redeem(token)?;
        // SAFETY: it went in as a buffer with so many bytes written, and came out once.
        Some(unsafe { Self::new(segment, len) })
    }

    #[cfg(all(test, loom))]
    pub(crate) fn segment(&self) -> &Segment {
        &self.segment
    }

    /// # Safety
    /// The segment is out, host-ready, and the caller's to give; `len` bytes of it are initialised.
    #[inline(always)]
    pub(crate) unsafe fn new(segment: Segment, len: usize) -> Self {
        Self { segment, len }
    }

    /// What it is made of, in place of the buffer.
    pub(crate) fn into_segment(self) -> Segment {
        self.into_parts().0
    }

    fn into_parts(self) -> (Segment, usize) {
        let this = ManuallyDrop::new(self);
        (this.segment.alias(), this.len)
    }

    /// Bytes that fit: the length asked for.
    #[inline]
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.segment.len()
    }

    /// Bytes written.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing was written yet.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that still fit.
    #[inline]
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.capacity() - self.len
    }

    /// Start of the memory. Reading beyond [`len`](Self::len) through it reads uninitialised memory.
    #[inline]
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.segment.base().as_ptr()
    }

    /// Start of the memory.
    #[inline]
    #[must_use]
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.segment.base().as_ptr()
    }

    /// Whether the memory is really page-locked. `false` only where the pool was allowed to go on unpinned, and for
    /// managed memory ([`Backing::Managed`](crate::Backing::Managed)).
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.segment.pinned()
    }

    /// Where `device` sees the start of the memory: for kernels that read or write it in place. (CUDA:
    /// `cuMemHostGetDevicePointer`; for managed memory, and on the host device, it is the host's own address.)
    ///
    /// Raw: what is done with it is the caller's word. Only work on `device` may use it, within the
    /// [capacity](Self::capacity), and only until the buffer goes back to its pool or is written to here; a
    /// [hold](crate::Stream::hold) on each stream that such work was submitted to keeps the buffer until it is done.
    ///
    /// # Errors
    /// [`Error::WrongDevice`] for a device that the pool does not serve, [`Error::Unsupported`] for one that cannot map
    /// host memory, [`Error::Forked`]; what the driver says, for memory that is not pinned among it.
    pub fn device_address(&self, device: &Device) -> Result<u64> {
        let (context, central) = (device.context(), self.segment.central());
        crate::os::check_fork()?;
        if !central.config().serves.contains(&context.id()) {
            return Err(Error::WrongDevice { device: device.name().into() });
        }
        context.alive()?;
        let at = self.segment.base();
        if central.is_managed(at) {
            return Ok(at.as_ptr().expose_provenance() as u64);
        }
        context.noting(context.driver().device_address(at))
    }

    /// Forgets what was written.
    #[inline]
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Keeps the first `len` bytes, if there are more.
    #[inline]
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// The memory that was not written yet. What is put there counts as written after [`set_len`](Self::set_len).
    #[inline]
    pub fn spare_capacity_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        // SAFETY: from `len` to the capacity is within the segment, and ours alone.
        unsafe {
            let start = self.segment.base().as_ptr().add(self.len);
            std::slice::from_raw_parts_mut(start.cast(), self.segment.len() - self.len)
        }
    }

    /// Says how many bytes are written.
    ///
    /// # Safety
    /// `len` is at most the capacity, and that many bytes from the start are initialised.
    #[inline]
    pub unsafe fn set_len(&mut self, len: usize) {
        debug_assert!(len <= self.capacity());
        self.len = len;
    }

    /// Says that a kernel, or anybody else through a raw pointer, has written the first `len` bytes.
    ///
    /// # Safety
    /// `len` is at most the capacity, and whoever wrote these bytes is done: the work that wrote them was seen complete
    /// on the host.
    #[inline]
    pub unsafe fn assume_written(&mut self, len: usize) {
        // SAFETY: the caller's word.
        unsafe { self.set_len(len) }
    }

    /// The same buffer with its first `len` bytes zero, written by the device's driver or the CPU, whichever is right
    /// there.
    pub(crate) fn zeroed(mut self, context: &DeviceContext, len: usize) -> Result<Self> {
        self.clear();
        let spare = self.spare_capacity_mut();
        let len = len.min(spare.len());
        // SAFETY: the buffer's own bytes, which nobody else uses.
        context.noting(unsafe { context.driver().zero(std::ptr::NonNull::from(spare).cast(), len) })?;
        // SAFETY: just written.
        unsafe { self.set_len(len) };
        Ok(self)
    }

    /// Appends bytes.
    ///
    /// # Panics
    /// If they do not fit. [`try_extend_from_slice`](Self::try_extend_from_slice) returns an error instead.
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
        // SAFETY: they fit, and a slice of someone else's cannot overlap memory that is ours alone.
        unsafe {
            let end = self.segment.base().as_ptr().add(self.len);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), end, bytes.len());
        }
        self.len += bytes.len();
        Ok(())
    }

    /// Appends values as their bytes.
    ///
    /// # Errors
    /// [`Error::TooSmall`] if they do not fit.
    pub fn try_extend_from<T: NoUninit>(&mut self, values: &[T]) -> Result<()> {
        self.try_extend_from_slice(bytemuck::cast_slice(values))
    }

    /// Makes it `len` bytes long: cut off, or filled up with `value`.
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

    /// What was written, as values.
    ///
    /// # Errors
    /// [`Error::View`] if the length is no multiple of the type's size. (The start is aligned to 64.)
    pub fn view<T: AnyBitPattern>(&self) -> Result<&[T]> {
        bytemuck::try_cast_slice(self).map_err(|e| no_view::<T>(self.len, e))
    }

    /// What was written, as values to change.
    ///
    /// # Errors
    /// As for [`view`](Self::view).
    pub fn view_mut<T: Pod>(&mut self) -> Result<&mut [T]> {
        let len = self.len;
        bytemuck::try_cast_slice_mut(self).map_err(|e| no_view::<T>(len, e))
    }

    /// Puts the buffer behind a plain value, for passing it through code that knows only numbers. The segment stays
    /// checked out until [`Pool::redeem`](crate::Pool::redeem). (In the child of a fork, where nothing is redeemed, for
    /// good.)
    #[must_use = "without the token the segment is lost to the pool"]
    pub fn into_token(self) -> Token {
        let (segment, len) = self.into_parts();
        // The central pool stays alive: the segment is still out.
        let central: *const CentralPool = segment.central();
        // SAFETY: as above.
        unsafe { &*central }.deposit(segment, len)
    }
}

impl Deref for PinnedBuf {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes are initialised (the invariant), and nobody writes while we are borrowed.
        unsafe { std::slice::from_raw_parts(self.segment.base().as_ptr(), self.len) }
    }
}

impl DerefMut for PinnedBuf {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and ours alone.
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

/// Writes as much as fits. `Ok(0)` when full, so `write_all` ends with [`std::io::ErrorKind::WriteZero`].
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

// SAFETY: `chunk_mut` is the spare capacity, which `advance_mut` shortens from its front by what was written.
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
