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

#![allow(unsafe_code)]

mod registered;

use std::future::Future;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytemuck::{AnyBitPattern, NoUninit, Pod};
use bytes::BufMut;
use bytes::buf::UninitSlice;

use crate::depot::{Depot, Fresh, Segment};
use crate::device::context::Context as DeviceContext;
use crate::error::{Error, Result, SubmitError};
use crate::freelist::state;
use crate::runtime::Device;
use crate::stream::Stream;
use crate::stream::awaited::Place;
use crate::stream::timeline::{Gone, Joint, Keep, Lent, Ticket, Timeline, WaitKey};

pub use registered::Registered;

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
    pub(crate) fn redeem(depot: &Depot, token: Token) -> Option<Self> {
        let (segment, len) = depot.redeem(usize::try_from(token.key).ok()?, token.nonce)?;
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
        let (context, depot) = (device.context(), self.segment.depot());
        if context.forked() {
            return Err(Error::Forked);
        }
        if !depot.config().serves.contains(&context.id()) {
            return Err(Error::WrongDevice { device: device.name().into() });
        }
        context.alive()?;
        let at = self.segment.base();
        if depot.is_managed(at) {
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

    /// The same buffer with its first `len` bytes zero, written by the device's driver or the CPU, whichever is right there.
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
    /// checked out until [`Pool::redeem`](crate::Pool::redeem).
    #[must_use = "without the token the segment is lost to the pool"]
    pub fn into_token(self) -> Token {
        let (segment, len) = self.into_parts();
        let pool = segment.depot().number();
        // The depot stays alive: the segment is still out.
        let depot: *const Depot = segment.depot();
        // SAFETY: as above.
        let (key, nonce) = unsafe { &*depot }.deposit(segment, len);
        Token { pool, key: key as u64, nonce }
    }
}

/// A buffer as three numbers. A copy of it, a made-up one, or one that was redeemed before is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token {
    pub(crate) pool: u64,
    pub(crate) key: u64,
    pub(crate) nonce: u64,
}

impl Token {
    /// The token as numbers.
    #[must_use]
    pub fn to_raw(self) -> [u64; 3] {
        [self.pool, self.key, self.nonce]
    }

    /// A token from numbers. Wrong ones are refused when it is redeemed.
    #[must_use]
    pub fn from_raw([pool, key, nonce]: [u64; 3]) -> Self {
        Self { pool, key, nonce }
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

/// A buffer that was asked for while the pool was short, and is plain memory.
///
/// It takes part in blocking copies only (`upload_blocking`): an asynchronous copy from pageable memory would not be
/// asynchronous, or on some devices silently wrong.
#[derive(Debug)]
pub struct UnpinnedBuf {
    bytes: Vec<u8>,
    capacity: usize,
}

impl UnpinnedBuf {
    pub(crate) fn new(capacity: usize) -> Result<Self> {
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(capacity)
            .map_err(|e| Error::OutOfMemory { wanted: capacity, text: e.to_string() })?;
        Ok(Self { bytes, capacity })
    }

    /// Bytes that fit.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// [`Error::TooSmall`] if they do not fit.
    pub fn try_extend_from_slice(&mut self, bytes: &[u8]) -> Result<()> {
        let have = self.capacity - self.bytes.len();
        if bytes.len() > have {
            return Err(Error::TooSmall { need: bytes.len(), have });
        }
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    /// Makes it `len` bytes long: cut off, or filled up with `value`.
    ///
    /// # Errors
    /// [`Error::TooSmall`] if `len` is beyond the capacity.
    pub fn try_resize(&mut self, len: usize, value: u8) -> Result<()> {
        if len > self.capacity {
            return Err(Error::TooSmall { need: len, have: self.capacity });
        }
        self.bytes.resize(len, value);
        Ok(())
    }

    /// Forgets what was written.
    pub fn clear(&mut self) {
        self.bytes.clear();
    }
}

impl Deref for UnpinnedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for UnpinnedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

/// What [`Pool::checkout_or_unpinned`](crate::Pool::checkout_or_unpinned) gives.
#[derive(Debug)]
pub enum HostBuf {
    /// A segment of the pool.
    Pinned(PinnedBuf),
    /// The pool was short: plain memory.
    Unpinned(UnpinnedBuf),
}

// --- in flight -------------------------------------------------------------------------------------------------------

/// What can be lent to a device and comes back when it is done: [`PinnedBuf`] and [`Registered`], an `Arc` of either for
/// one buffer that feeds several copies, and `()` where no buffer of ours is involved, as in a copy within the device.
/// Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be lent to a device",
    label = "the device may still use it when this call has returned",
    note = "asynchronous calls take a `PinnedBuf`, a `Registered` value, or an `Arc` of either; borrowed and plain memory is copied by `upload_blocking`"
)]
pub trait Lend: sealed::Lend {}

impl Lend for PinnedBuf {}
impl Lend for Arc<PinnedBuf> {}
impl Lend for () {}

pub(crate) mod sealed {
    use super::{DeviceContext, Error, Lent, Result};

    pub trait Lend: Sized + Send + Unpin {
        /// What goes on the timeline.
        #[doc(hidden)]
        #[allow(private_interfaces)]
        fn lend(&self) -> Lent;
        /// The device is done: back to the owner. `written`: bytes that it wrote.
        #[doc(hidden)]
        fn finish(self, written: Option<usize>) -> Result<Self>;
        /// The handle is dropped while the device is not done.
        #[doc(hidden)]
        fn abandon(self);
        /// Written bytes, if the CPU may read them.
        #[doc(hidden)]
        fn bytes(&self) -> &[u8];
        /// Start and capacity, to be written by a device; with an error for what cannot be written to.
        #[doc(hidden)]
        fn target(&self) -> Result<(*mut u8, usize)> {
            Err(Error::Unsupported("a shared buffer cannot be written to".into()))
        }
        /// Whether this device may use it.
        #[doc(hidden)]
        #[allow(private_interfaces)]
        fn serves(&self, context: &DeviceContext) -> bool;
    }
}

impl sealed::Lend for PinnedBuf {
    #[allow(private_interfaces)]
    fn lend(&self) -> Lent {
        Lent::Segment(self.segment.alias())
    }

    fn finish(mut self, written: Option<usize>) -> Result<Self> {
        let slot = self.segment.slot();
        if slot.word().state() == state::LANDED {
            slot.set(state::HOST);
            self.len = written.unwrap_or(self.len);
            return Ok(self);
        }
        // Quarantined: it is nobody's any more.
        std::mem::forget(self);
        Err(Error::Unsupported(
            "the buffer was quarantined: nobody can prove that the device is done with it".into(),
        ))
    }

    fn abandon(self) {
        let (segment, _) = self.into_parts();
        let slot = segment.slot();
        let word = slot.word();
        let detached = match word.state() {
            state::FLIGHT if cfg!(pinpool_planted = "detach_by_store") => Ok(slot.set(state::DETACHED)),
            state::FLIGHT => slot.exchange(word, state::DETACHED),
            _ => Err(word),
        };
        // The timeline was faster: the device is done, and the segment waited for us.
        if detached.is_err_and(|found| found.state() == state::LANDED) {
            slot.set(state::HOST);
            // SAFETY: landed, so every mark that covers it was seen complete; the handle owned it and is gone.
            unsafe { segment.release() };
        }
    }

    fn bytes(&self) -> &[u8] {
        self
    }

    fn target(&self) -> Result<(*mut u8, usize)> {
        Ok((self.segment.base().as_ptr(), self.segment.len()))
    }

    #[allow(private_interfaces)]
    fn serves(&self, context: &DeviceContext) -> bool {
        self.segment.depot().config().serves.contains(&context.id())
    }
}

impl sealed::Lend for Arc<PinnedBuf> {
    #[allow(private_interfaces)]
    fn lend(&self) -> Lent {
        Lent::Object(Box::new(SharedBuf(self.clone())))
    }
    fn finish(self, _: Option<usize>) -> Result<Self> {
        Ok(self)
    }
    fn abandon(self) {}
    fn bytes(&self) -> &[u8] {
        self
    }
    #[allow(private_interfaces)]
    fn serves(&self, context: &DeviceContext) -> bool {
        self.segment.depot().config().serves.contains(&context.id())
    }
}

impl sealed::Lend for () {
    #[allow(private_interfaces)]
    fn lend(&self) -> Lent {
        Lent::Object(Box::new(()))
    }
    fn finish(self, _: Option<usize>) -> Result<Self> {
        Ok(self)
    }
    fn abandon(self) {}
    fn bytes(&self) -> &[u8] {
        &[]
    }
    #[allow(private_interfaces)]
    fn serves(&self, _: &DeviceContext) -> bool {
        true
    }
}

#[derive(Debug)]
struct SharedBuf(Arc<PinnedBuf>);

impl Keep for SharedBuf {
    fn slot(&self) -> Option<usize> {
        Some(std::ptr::from_ref(self.0.segment.slot()).addr())
    }

    fn quarantine(self: Box<Self>) -> Gone {
        let segment = self.0.segment.alias();
        let word = segment.slot().word();
        // Leaked, so the segment is never returned; whoever still has the Arc may go on reading. The first to lose it
        // books it.
        std::mem::forget(self);
        let first = word.state() == state::HOST && segment.slot().exchange(word, state::QUARANTINED).is_ok();
        if first { Gone::one(segment) } else { Gone::default() }
    }
}

#[derive(Debug)]
enum Tickets {
    One(Ticket),
    /// For a hold over several streams.
    Many(Vec<Ticket>),
    /// For a copy that goes through a queue.
    Queued(Place),
}

impl Tickets {
    fn all(&self) -> &[Ticket] {
        match self {
            Self::One(ticket) => std::slice::from_ref(ticket),
            Self::Many(tickets) => tickets,
            Self::Queued(_) => &[],
        }
    }
}

/// Something a device may still read or write. Wait for it, await it (no runtime is assumed), ask, or drop it.
///
/// Dropped, the buffer goes back to its pool once the device is done, with nobody waiting. An error means that nobody
/// can prove that the device is done: the buffer is quarantined, and the error says why. Whether the copies
/// of dropped handles came through, [`Stream::synchronize`](crate::Stream::synchronize) tells afterwards.
#[must_use = "dropping it is fine: the buffer returns by itself when the device is done; say so with `drop`"]
pub struct InFlight<B: Lend> {
    tickets: Tickets,
    value: Option<B>,
    written: Option<usize>,
    /// Which of the tickets has our waker, and under which key.
    waker: (usize, Option<WaitKey>),
}

impl<B: Lend> InFlight<B> {
    pub(crate) fn new(ticket: Ticket, value: B, written: Option<usize>) -> Self {
        Self { tickets: Tickets::One(ticket), value: Some(value), written, waker: (0, None) }
    }

    /// A copy that a queue will submit.
    pub(crate) fn queued(place: Place, value: B, written: Option<usize>) -> Self {
        Self { tickets: Tickets::Queued(place), value: Some(value), written, waker: (0, None) }
    }

    /// Makes the stream start its later work only after this is done.
    pub(crate) fn precede(&self, stream: &Stream) -> Result<()> {
        if let Tickets::Queued(place) = &self.tickets {
            return place.line.precede(&place.range, stream);
        }
        self.tickets.all().iter().try_for_each(|ticket| {
            if ticket.timeline.is_complete(ticket.tick)? {
                return Ok(());
            }
            stream.follow(&ticket.timeline)
        })
    }

    /// The driver call has returned, and this is the tick.
    pub(crate) fn submitted(&mut self, tick: u64) {
        if let Tickets::One(ticket) = &mut self.tickets {
            ticket.tick = tick;
        }
    }

    /// A hold over several streams, whose tickets follow.
    pub(crate) fn joint(value: B, streams: usize) -> Self {
        let tickets = Tickets::Many(Vec::with_capacity(streams));
        Self { tickets, value: Some(value), written: None, waker: (0, None) }
    }

    pub(crate) fn add(&mut self, ticket: Ticket) {
        if let Tickets::Many(tickets) = &mut self.tickets {
            tickets.push(ticket);
        }
    }

    /// Whether the device is done. Never waits.
    ///
    /// # Errors
    /// What the stream was lost with: it never will be.
    pub fn is_done(&self) -> Result<bool> {
        if let Tickets::Queued(place) = &self.tickets {
            return place.poll_done();
        }
        for ticket in self.tickets.all() {
            if !ticket.timeline.poll_complete(ticket.tick)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn finish(&mut self) -> Result<B> {
        match self.value.take() {
            Some(value) => value.finish(self.written),
            None => Err(Error::Unsupported("an in-flight handle was polled after it was ready".into())),
        }
    }

    fn wait_all(&self, deadline: Option<Instant>) -> Result<()> {
        if let Tickets::Queued(place) = &self.tickets {
            return place.wait(deadline);
        }
        self.tickets.all().iter().try_for_each(|t| t.timeline.wait(t.tick, deadline))
    }

    /// Waits until the device is done and gives the buffer back, host-ready.
    ///
    /// # Errors
    /// What the stream was lost with. [`Error::Capturing`] where that cannot be known before a capture of the stream ends;
    /// the buffer then returns by itself. (On a stepped device also [`Error::Timeout`], where nothing can move any more.)
    pub fn wait(mut self) -> Result<B> {
        self.wait_all(None)?;
        self.finish()
    }

    /// The same, for at most so long.
    ///
    /// # Errors
    /// [`Error::Timeout`] and [`Error::Capturing`] come with the handle, to be waited for again or dropped.
    #[allow(clippy::result_large_err, reason = "the error carries the handle back")]
    pub fn wait_timeout(mut self, timeout: Duration) -> Result<B, SubmitError<Self>> {
        let deadline = Instant::now().checked_add(timeout);
        match self.wait_all(deadline).and_then(|()| self.finish()) {
            Ok(value) => Ok(value),
            Err(error @ (Error::Timeout(_) | Error::Capturing { .. })) => {
                Err(SubmitError { error, buffer: Some(self) })
            }
            Err(error) => Err(SubmitError { error, buffer: None }),
        }
    }
}

impl<B: Lend> Future for InFlight<B> {
    type Output = Result<B>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<B>> {
        let this = &mut *self;
        if let Tickets::Queued(place) = &this.tickets {
            return match place.wake_later(&mut this.waker.1, cx.waker()) {
                Ok(true) => Poll::Ready(this.finish()),
                Ok(false) => Poll::Pending,
                Err(error) => {
                    if let Some(value) = this.value.take() {
                        value.abandon();
                    }
                    Poll::Ready(Err(error))
                }
            };
        }
        // One at a time: the waker is left with the first that is not done, and the others wait their turn.
        while let Some(ticket) = this.tickets.all().get(this.waker.0) {
            match ticket.timeline.wake_later(ticket.tick, &mut this.waker.1, cx.waker()) {
                Ok(true) => this.waker.0 += 1,
                Ok(false) => return Poll::Pending,
                Err(error) => {
                    if let Some(value) = this.value.take() {
                        value.abandon();
                    }
                    return Poll::Ready(Err(error));
                }
            }
        }
        Poll::Ready(this.finish())
    }
}

impl<B: Lend> Drop for InFlight<B> {
    fn drop(&mut self) {
        // First: a value that is still here when this ends, by a panic too, is dropped as if it were host-ready.
        if let Some(value) = self.value.take() {
            value.abandon();
        }
        if let Tickets::Queued(place) = &self.tickets {
            return place.line.forget_waker(&mut self.waker.1);
        }
        if let Some(ticket) = self.tickets.all().get(self.waker.0) {
            ticket.timeline.forget_waker(&mut self.waker.1);
        }
    }
}

impl<B: Lend> std::fmt::Debug for InFlight<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ticks: Vec<u64> = self.tickets.all().iter().map(|t| t.tick).collect();
        f.debug_struct("InFlight").field("ticks", &ticks).finish_non_exhaustive()
    }
}

// --- stream-ready ----------------------------------------------------------------------------------------------------

/// A stream-ready buffer: a device may still use it, but only earlier on this very stream, so that later work on this
/// stream may use it too. The CPU may not touch it.
///
/// Used on another stream, the call is refused and returns the buffer. Dropped unused, it goes back where it was.
pub struct StreamBuf {
    timeline: Arc<Timeline>,
    kind: Ready,
    segment: Segment,
}

#[derive(Debug)]
enum Ready {
    /// A fresh segment: host-ready in fact.
    Fresh,
    /// Claimed while in flight, under this key.
    Claimed(usize),
}

impl StreamBuf {
    /// Host-ready is ready for any stream.
    pub(crate) fn ready(timeline: Arc<Timeline>, buf: PinnedBuf) -> Self {
        Self { timeline, kind: Ready::Fresh, segment: buf.into_parts().0 }
    }

    pub(crate) fn claimed(timeline: Arc<Timeline>, key: usize, segment: Segment) -> Self {
        Self { timeline, kind: Ready::Claimed(key), segment }
    }

    /// Bytes that fit.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.segment.len()
    }

    /// Whether the segment was claimed while it was in flight, rather than taken from the free ones.
    #[must_use]
    pub fn was_claimed(&self) -> bool {
        matches!(self.kind, Ready::Claimed(_))
    }

    pub(crate) fn timeline(&self) -> &Arc<Timeline> {
        &self.timeline
    }

    pub(crate) fn segment(&self) -> &Segment {
        &self.segment
    }

    /// What goes on the timeline, which must be this buffer's own. The buffer is not dropped any more.
    pub(crate) fn into_lent(self) -> (Lent, Segment) {
        let this = ManuallyDrop::new(self);
        // SAFETY: read once; `this` is never dropped.
        let timeline = unsafe { std::ptr::read(&this.timeline) };
        drop(timeline);
        let lent = match this.kind {
            Ready::Fresh => Lent::Segment(this.segment.alias()),
            Ready::Claimed(key) => Lent::Claimed(key),
        };
        (lent, this.segment.alias())
    }

    /// Waits until the earlier work is done and gives the buffer, host-ready and empty.
    ///
    /// # Errors
    /// What the stream was lost with.
    pub fn wait(self) -> Result<PinnedBuf> {
        if self.timeline.forked() {
            return Err(Error::Forked);
        }
        if let Ready::Claimed(key) = self.kind {
            if let Some(tick) = self.timeline.claimed_until(key) {
                self.timeline.wait(tick, None)?;
            }
        }
        let this = ManuallyDrop::new(self);
        // SAFETY: read once; `this` is never dropped.
        let timeline = unsafe { std::ptr::read(&this.timeline) };
        let segment = match this.kind {
            Ready::Fresh => Some(this.segment.alias()),
            Ready::Claimed(key) => timeline.resolve_claim(key),
        };
        match segment {
            // SAFETY: host-ready: fresh, or every mark that covers it was seen complete. Ours, and nothing is written.
            Some(segment) => Ok(unsafe { PinnedBuf::new(segment, 0) }),
            None => Err(timeline.context().alive().err().unwrap_or(Error::Closed)),
        }
    }
}

impl Drop for StreamBuf {
    fn drop(&mut self) {
        match self.kind {
            // SAFETY: fresh: host-ready, ours, and this is the end of it.
            Ready::Fresh => unsafe { self.segment.alias().release() },
            Ready::Claimed(key) => self.timeline.unclaim(key),
        }
    }
}

impl std::fmt::Debug for StreamBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamBuf")
            .field("capacity", &self.capacity())
            .field("claimed", &self.was_claimed())
            .finish()
    }
}

/// The parts of a hold over several streams.
pub(crate) fn joint(buf: &PinnedBuf, streams: usize) -> Arc<Joint> {
    Joint::new(buf.segment.alias(), streams as u32)
}
