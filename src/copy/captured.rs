//! Copies that become a part of a graph, and buffers that are kept for as long as it.
//!
//! While a stream is captured nothing runs. A copy that is submitted then becomes a node of the graph, which reads or
//! writes its buffer whenever the graph is launched, at any later time; no event of ours says when the last time was.
//! So the buffer is tied to the graph itself: the driver counts what a graph keeps, hands it on to what is made from
//! the graph, and calls when all of that is gone ([`keep_with_graph`](crate::device::Driver::keep_with_graph)).
//!
//! # How a buffer is owned
//!
//! By two: the graph (through the driver's count) and the [`GraphBuf`] that the caller got. The last of them drops
//! the buffer, which returns to its pool as any other; the graph's share is dropped by the device's worker, since the
//! driver's callback must do nothing of the kind.
//!
//! The graph is made to keep the buffer *before* the copy is submitted, and afterwards it is asked whether the capture
//! is still that one. Where it is not, the copy went to the stream, or into another graph, or nowhere: then the
//! stream's timeline becomes a third owner.

#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::fmt;
use std::sync::Arc;

use super::DeviceRange;
use crate::buffer::{Lend, PinnedBuf};
use crate::device::Transfer;
use crate::device::memory::Allocation;
use crate::error::{Error, Result, SubmitError};
use crate::stream::Stream;
use crate::stream::timeline::{Quarantined, Resource, Retain};

const CAPTURING: &str = "making a copy a part of the graph";
const SPOILED: &str = "the capture is spoiled: end it, and begin another";
const ENDED: &str =
    "the capture ended meanwhile; do not begin or end one while another thread submits to the same stream";

/// What a graph keeps.
struct Kept<B> {
    /// Taken out only if no graph has it. The graph's side never looks inside.
    buf: UnsafeCell<Option<B>>,
    _memory: Option<Arc<Allocation>>,
}

// SAFETY: a buffer that goes from thread to thread, and device memory, which is both.
unsafe impl<B: Send> Send for Kept<B> {}
// SAFETY: of its owners only the one `GraphBuf` looks at the buffer, by its own borrowing rules; the others drop it.
unsafe impl<B: Send + Sync> Sync for Kept<B> {}

/// A buffer that a captured graph reads or writes: [`Stream::upload_captured`] and its like give it.
///
/// The buffer and the device memory of its copy are kept until the graph, everything made from it (executable graphs,
/// those updated by `cuGraphExecUpdate` among them, clones, graphs that have it as a child) and all launches of these
/// are gone, whether this handle is kept or not. When both are gone, the buffer returns to its pool by itself. Until
/// then it counts as checked out ([`PoolStats::checked_out_bytes`](crate::PoolStats::checked_out_bytes)), and if the
/// driver ends first, it never returns.
///
/// Between launches the buffer can be refilled or read, which only the caller can know to be safe.
///
/// ```no_run
/// # fn demo(stream: pinpool::Stream, buf: pinpool::PinnedBuf, weights: pinpool::DeviceBuffer)
/// # -> Result<(), pinpool::Error> {
/// // The server has begun to capture `stream`.
/// let mut input = stream.upload_captured(buf, &weights)?;
/// // It ends the capture, instantiates the graph, and for each request:
/// // SAFETY: the last launch was waited for, and the next one is not there yet.
/// let bytes = unsafe { input.get_mut() };
/// bytes.clear();
/// bytes.try_extend_from_slice(b"the next request")?;
/// // ... then it launches the graph.
/// # Ok(()) }
/// ```
///
/// What a launch has downloaded can be read when the caller has said how much that is:
///
/// ```no_run
/// # fn demo(mut output: pinpool::GraphBuf<pinpool::PinnedBuf>) {
/// // SAFETY: the launch was waited for, and the next one is not there yet.
/// let bytes = unsafe { output.get_mut() };
/// // SAFETY: the graph has filled the buffer.
/// unsafe { bytes.assume_written(bytes.capacity()) };
/// println!("{:?}", &bytes[..]);
/// # }
/// ```
#[must_use = "dropping it is fine: the graph keeps the buffer; say so with `drop`"]
pub struct GraphBuf<B> {
    kept: Arc<Kept<B>>,
}

impl<B> GraphBuf<B> {
    /// The buffer.
    ///
    /// # Safety
    /// While it is borrowed, no launch of a graph that *writes* to it is under way or begins.
    #[must_use]
    pub unsafe fn get(&self) -> &B {
        // SAFETY: taken out only where no `GraphBuf` is made; ours alone to look at, and the caller's word for the
        // bytes.
        unsafe { (*self.kept.buf.get()).as_ref().unwrap_unchecked() }
    }

    /// The buffer, to be changed: refilled for the next launch, or told what a launch has written
    /// ([`PinnedBuf::assume_written`]). The graph's copies keep the address and the length that they were captured
    /// with.
    ///
    /// # Safety
    /// - While it is borrowed, no launch of a graph that reads or writes it is under way or begins.
    /// - It is not moved out (by [`std::mem::replace`], say): the graph goes on using its memory.
    #[must_use]
    pub unsafe fn get_mut(&mut self) -> &mut B {
        // SAFETY: as above, and we are borrowed for it.
        unsafe { (*self.kept.buf.get()).as_mut().unwrap_unchecked() }
    }

    /// Whether anything but this handle still keeps the buffer. `false` is final, and comes a moment after the last
    /// graph is gone.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        Arc::strong_count(&self.kept) > 1
    }

    /// The buffer, host-ready, if nothing else keeps it any more.
    ///
    /// # Errors
    /// The handle, while a graph still has the buffer.
    pub fn reclaim(self) -> Result<B, Self> {
        match Arc::try_unwrap(self.kept) {
            // SAFETY: as in `get`. The last other owner is gone, and with it every graph.
            Ok(kept) => Ok(unsafe { kept.buf.into_inner().unwrap_unchecked() }),
            Err(kept) => Err(Self { kept }),
        }
    }
}

impl GraphBuf<PinnedBuf> {
    /// Start of the segment, which stays where it is for as long as this handle or a graph is there. What may be done
    /// through it when is as for [`get`](Self::get) and [`get_mut`](Self::get_mut).
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        // SAFETY: nothing of the memory is looked at.
        unsafe { self.get() }.as_ptr().cast_mut()
    }

    /// Bytes that fit.
    #[must_use]
    pub fn capacity(&self) -> usize {
        // SAFETY: as above.
        unsafe { self.get() }.capacity()
    }
}

impl<B> fmt::Debug for GraphBuf<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphBuf").field("kept", &self.is_kept()).finish_non_exhaustive()
    }
}

/// The timeline's share.
struct Share<B> {
    _kept: Arc<Kept<B>>,
}

impl<B> fmt::Debug for Share<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Share")
    }
}

impl<B: Send + Sync> Retain for Share<B> {
    fn quarantine(self: Box<Self>) -> Quarantined {
        // Never let go: then the buffer stays checked out for good.
        std::mem::forget(self);
        Quarantined::default()
    }
}

impl Stream {
    /// Makes an upload a part of the graph that this stream is being captured into: whenever the graph is launched,
    /// what is in `src` *then* is copied into `dst`. As many bytes as are written to `src` now; `dst` must be at least
    /// as long.
    ///
    /// # Errors
    /// With the buffer: as for [`upload`](Self::upload), [`Error::NotCapturing`] on a stream that is in no capture,
    /// [`Error::Capturing`] for memory of [`Stream::alloc`] whose stream is not known to have come to it,
    /// [`Error::Unsupported`] on drivers before CUDA 11.3. With `buffer: None` what the driver said: the graph keeps
    /// the buffer then.
    pub fn upload_captured<B: Lend + Sync + 'static>(
        &self,
        src: B,
        dst: impl DeviceRange,
    ) -> Result<GraphBuf<B>, SubmitError<B>> {
        let checked = self.own(dst).and_then(|dst| {
            self.usable_for(&src)?;
            let bytes = super::written(&src)?;
            Error::unless_fits(bytes.len(), dst.len())?;
            dst.is_there()?;
            Ok((Transfer::Upload { src: bytes.as_ptr(), dst: dst.ptr(), len: bytes.len() }, dst))
        });
        let ((transfer, dst), src) = SubmitError::unless(checked, src)?;
        let (kept, capture) =
            self.tie(src, Some(dst.allocation()), "upload_captured", "use upload where nothing is captured")?;
        // SAFETY: the graph keeps the source and the device memory for as long as it may copy.
        unsafe { self.capture(transfer, kept, capture) }
    }

    /// Makes a download a part of the graph that this stream is being captured into: whenever the graph is launched,
    /// `src` is copied to the front of `landing`, which must be at least as long. What has landed counts as written
    /// when the caller says so ([`GraphBuf::get_mut`], [`PinnedBuf::assume_written`]).
    ///
    /// # Errors
    /// As for [`upload_captured`](Self::upload_captured).
    pub fn download_captured(
        &self,
        src: impl DeviceRange,
        landing: PinnedBuf,
    ) -> Result<GraphBuf<PinnedBuf>, SubmitError<PinnedBuf>> {
        let checked = self.own(src).and_then(|src| {
            self.usable_for(&landing)?;
            Error::unless_fits(src.len(), landing.capacity())?;
            src.is_there().map(|()| src)
        });
        let (src, mut landing) = SubmitError::unless(checked, landing)?;
        let transfer = Transfer::Download { src: src.ptr(), dst: landing.as_mut_ptr(), len: src.len() };
        let remedy = "use download where nothing is captured";
        let (kept, capture) = self.tie(landing, Some(src.allocation()), "download_captured", remedy)?;
        // SAFETY: as above.
        unsafe { self.capture(transfer, kept, capture) }
    }

    /// Keeps `buf` for as long as the graph that this stream is being captured into, and everything made from it: for
    /// servers whose own captured kernels and copies use the buffer.
    ///
    /// # Errors
    /// With the buffer: as for [`upload_captured`](Self::upload_captured).
    pub fn hold_captured<B: Lend + Sync + 'static>(&self, buf: B) -> Result<GraphBuf<B>, SubmitError<B>> {
        let ((), buf) = SubmitError::unless(self.usable_for(&buf), buf)?;
        let (kept, _) = self.tie(buf, None, "hold_captured", "use hold where nothing is captured")?;
        Ok(GraphBuf { kept })
    }

    fn usable_for<B: Lend>(&self, buf: &B) -> Result<()> {
        self.may_use(buf)?;
        self.timeline().usable()
    }

    /// Makes the graph that is being captured an owner of the buffer. With the capture's number.
    fn tie<B: Lend + Sync + 'static>(
        &self,
        buf: B,
        memory: Option<Arc<Allocation>>,
        what: &'static str,
        otherwise: &'static str,
    ) -> Result<(Arc<Kept<B>>, u64), SubmitError<B>> {
        let timeline = self.timeline();
        let context = timeline.context();
        let kept = Arc::new(Kept { buf: UnsafeCell::new(Some(buf)), _memory: memory });
        let (theirs, home, worker) = (kept.clone(), context.clone(), context.worker().clone());
        // Called from the driver's callback, where neither a driver call nor waiting is allowed: it only sends. Nor is
        // the last of a context let go there, whose owner may destroy it then; the last of a worker may be.
        let gone = Box::new(move || worker.send(move || drop((theirs, home))));
        let error = match context.noting(context.driver().keep_with_graph(timeline.stream(), gone)) {
            Ok(Some(capture)) => return Ok((kept, capture)),
            Ok(None) => match timeline.is_capturing() {
                Ok(false) => Error::NotCapturing { what, remedy: otherwise },
                Ok(true) => Error::Capturing { what, remedy: SPOILED },
                Err(error) => error,
            },
            Err(error) => error,
        };
        // SAFETY: no copy was submitted and no `GraphBuf` made; the other owner, if it is still there, only drops.
        let buffer = unsafe { (*kept.buf.get()).take() };
        Err(SubmitError { error, buffer })
    }

    /// # Safety
    /// The buffer and the device memory that `transfer` names are in `kept`, which the graph of `capture` keeps.
    unsafe fn capture<B: Lend + Sync + 'static>(
        &self,
        transfer: Transfer,
        kept: Arc<Kept<B>>,
        capture: u64,
    ) -> Result<GraphBuf<B>, SubmitError<B>> {
        let timeline = self.timeline();
        let context = timeline.context();
        // Not counted as copied: nothing is until the graph runs. SAFETY: while the capture goes on, the graph keeps
        // what the copy uses. Where it does not, the timeline does, below.
        let submitted = context.noting(unsafe { context.driver().copy(timeline.stream(), transfer) });
        let placed = match context.noting(context.driver().capture_id(timeline.stream())) {
            // An error says nothing about the capture: then the promise of the thread that captures holds, that it goes on.
            now if now.is_err() || now == Ok(Some(capture)) => {
                return match submitted {
                    Ok(()) => Ok(GraphBuf { kept }),
                    Err(error) => Err(SubmitError { error, buffer: None }),
                };
            }
            // Perhaps on the stream: what is recorded there from now on comes after it.
            Ok(None) => {
                let share = Resource::Object(Box::new(Share { _kept: kept.clone() }));
                timeline.begin(share, None).map(|submission| submission.commit()).is_ok()
            }
            // Perhaps in that other graph, which does not keep it.
            _ => false,
        };
        if !placed {
            // There is no event that tells when the copy is done.
            std::mem::forget(kept);
        }
        let error = submitted.err().unwrap_or(Error::Capturing { what: CAPTURING, remedy: ENDED });
        Err(SubmitError { error, buffer: None })
    }
}
