//! Where an upload's bytes come from, and where a download's go.
//!
//! Both are used at offsets, by several threads at once, which makes them fast. A stream of bytes
//! goes through [`Copier::upload_read`](super::Copier::upload_read) instead.

use std::any::Any;
use std::borrow::Cow;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;

use super::stores;
use crate::error::{Error, Result};
use crate::foreign;
use crate::sealed::Key;

/// A source of an upload that can be read anywhere, by several threads at once.
///
/// Implemented for owned bytes (`Vec<u8>`, `Box<[u8]>`, `Arc<[u8]>`, `Arc<Vec<u8>>`, `Bytes`,
/// `&'static [u8]`) and for [`FileSource`](super::FileSource). Implement it for object stores,
/// decompressors, generators, but not over a mapped file: the process dies if it becomes shorter.
///
/// ```
/// use pinpool::copier::{Fill, Source};
///
/// /// A megabyte in which each byte is its offset, modulo 256.
/// struct Ramp;
///
/// impl Source for Ramp {
///     fn len(&self) -> u64 {
///         1 << 20
///     }
///     fn fill(&self, offset: u64, into: &mut Fill<'_>) -> std::io::Result<()> {
///         (offset..).take(into.remaining()).for_each(|at| _ = into.push(&[at as u8]));
///         Ok(())
///     }
/// }
/// # use pinpool::{Device, Pool, Unpinned, Copier};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (copier, memory) = (Copier::builder(&pool, &device).build()?, device.alloc(1 << 20)?);
/// copier.upload(Ramp, &memory)?.wait()?;
/// # assert_eq!(copier.download(memory.slice(256..258), Vec::new())?.wait()?, [0, 1]);
/// # Ok::<(), pinpool::Error>(())
/// ```
pub trait Source: Send + Sync + 'static {
    /// The length, in bytes.
    fn len(&self) -> u64;

    /// Whether the source has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The source's name in errors and events.
    fn name(&self) -> Cow<'_, str> {
        "the source".into()
    }

    /// Fills all of `into` with the bytes from `offset` on. It is called on the copier's threads
    /// and may block, which holds up one of them and a segment. It may wait for transfers that
    /// cannot block, which go on beside it; other sources, sinks and files may have to wait. With a
    /// share of one segment it holds up all, and must not wait for its copier.
    ///
    /// # Errors
    /// The transfer ends with it as [`Error::Read`](crate::Error::Read), also after too few bytes.
    fn fill(&self, offset: u64, into: &mut Fill<'_>) -> io::Result<()>;

    /// Whether [`fill`](Self::fill) may block. Ours alone to say.
    #[doc(hidden)]
    fn may_block(&self, _: Key) -> bool {
        true
    }
}

/// Bytes of a source, by its own word.
pub(super) fn length(source: &impl Source) -> Result<u64> {
    let panicked = "it panicked when it was asked for its length";
    foreign::call("a source panicked when it was asked for its length: it is refused", || source.len())
        .ok_or_else(|| read_error("the source", 0, &io::Error::other(panicked)))
}

/// What errors and events call a source or sink, by its own word.
pub(super) fn name(or: &'static str, ask: impl FnOnce() -> String) -> Cow<'static, str> {
    foreign::call("a source or sink panicked when it was asked for its name", ask)
        .map_or(Cow::Borrowed(or), Cow::Owned)
}

/// A sink of a download that several threads write at once. Each chunk comes once, in any order.
///
/// Implemented for [`FileSink`](super::FileSink), and for `Vec<u8>`, whose memory is used and which
/// grows to the last range's end: what no range covers is zero. Ranges that overlap are refused,
/// and after an error a vector has its old length.
pub trait Sink: Send + Sync + 'static {
    /// The sink's name in errors and events.
    fn name(&self) -> Cow<'_, str> {
        "the target".into()
    }

    /// Takes bytes that belong at `offset`. It may block, as [`Source::fill`] may.
    ///
    /// # Errors
    /// The transfer ends with it as [`Error::Write`](crate::Error::Write).
    fn put(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// Shorter vectors are not worth huge pages.
const HUGE: usize = 4 << 20;

impl Sink for Vec<u8> {
    fn name(&self) -> Cow<'_, str> {
        "a vector".into()
    }

    fn put(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// The vector, of a sink that is one. Its memory is written without [`put`](Sink::put).
pub(super) fn vector_of(sink: &mut impl Sink) -> Option<&mut Vec<u8>> {
    (sink as &mut dyn Any).downcast_mut()
}

/// The first byte of a vector, with room up to `end`. `overlap`: some byte would be written twice.
pub(super) fn room(vector: &mut Vec<u8>, end: u64, overlap: bool) -> Result<*mut u8> {
    if overlap {
        let text = "a download to memory with ranges that overlap; download to each byte once";
        return Err(Error::Argument(text.into()));
    }
    let wanted = usize::try_from(end).unwrap_or(usize::MAX).saturating_sub(vector.len());
    vector.try_reserve_exact(wanted).map_err(|e| Error::OutOfMemory { wanted, text: e.to_string() })?;
    // Touching new memory is what takes longest: on huge pages where the system has them.
    let (spare, page) = (vector.spare_capacity_mut().as_mut_ptr().cast::<u8>(), crate::os::page_size());
    let front = spare.align_offset(page);
    let first = NonNull::new(spare.wrapping_add(front));
    if let Some(first) = first.filter(|_| wanted >= HUGE && front < wanted) {
        crate::os::advise_huge(first, (wanted - front) / page * page);
    }
    // The length stays until all is there.
    Ok(vector.as_mut_ptr())
}

/// Gives a vector its length, where the bytes up to `end` are there now, but for these gaps.
///
/// # Safety
/// [`room`] was made for them, and all others behind the vector's length were written.
pub(super) unsafe fn grow(vector: &mut Vec<u8>, gaps: impl Iterator<Item = Range<u64>>, end: u64) {
    let len = vector.len();
    let spare = vector.spare_capacity_mut();
    for gap in gaps {
        // What the vector had stays as it is.
        let [from, to] = [gap.start, gap.end].map(|at| (at as usize).saturating_sub(len));
        spare[from..to].fill(MaybeUninit::new(0));
    }
    // SAFETY: the caller's promise; those in gaps were written just now.
    unsafe { vector.set_len(len.max(end as usize)) };
}

/// The part of a pinned segment that a [`Source`] fills, from front to back. As [`std::io::Write`]
/// it takes no more than fits.
#[derive(Debug)]
pub struct Fill<'a> {
    place: &'a mut [MaybeUninit<u8>],
    filled: usize,
}

impl<'a> Fill<'a> {
    pub(super) fn new(place: &'a mut [MaybeUninit<u8>]) -> Self {
        Self { place, filled: 0 }
    }

    /// Bytes that are there.
    pub(super) fn filled(&self) -> usize {
        self.filled
    }

    /// Bytes that are still to be filled.
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.place.len() - self.filled
    }

    /// Appends the bytes that fit, and returns how many these are.
    pub fn push(&mut self, bytes: &[u8]) -> usize {
        let n = bytes.len().min(self.remaining());
        stores::copy(&bytes[..n], &mut self.spare()[..n]);
        // SAFETY: just written.
        unsafe { self.advance(n) };
        n
    }

    /// The memory to fill. What is put there counts after [`advance`](Self::advance).
    pub fn spare(&mut self) -> &mut [MaybeUninit<u8>] {
        &mut self.place[self.filled..]
    }

    /// Counts `n` more bytes as filled.
    ///
    /// # Safety
    /// `n` is at most [`remaining`](Self::remaining), and that many bytes at the front of
    /// [`spare`](Self::spare) are initialised.
    pub unsafe fn advance(&mut self, n: usize) {
        debug_assert!(n <= self.remaining());
        self.filled += n;
    }
}

impl io::Write for Fill<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(self.push(bytes))
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

macro_rules! bytes_are_a_source {
    ($($type:ty),*) => {$(
        impl Source for $type {
            fn len(&self) -> u64 {
                <[u8]>::len(self) as u64
            }
            fn name(&self) -> Cow<'_, str> {
                "bytes in memory".into()
            }
            fn fill(&self, offset: u64, into: &mut Fill<'_>) -> io::Result<()> {
                let rest = usize::try_from(offset).ok().and_then(|offset| self.get(offset..));
                into.push(rest.unwrap_or_default());
                Ok(())
            }
            fn may_block(&self, _: Key) -> bool {
                false
            }
        }
    )*};
}
bytes_are_a_source!(Vec<u8>, Box<[u8]>, Arc<[u8]>, Arc<Vec<u8>>, Bytes, &'static [u8]);

pub(crate) fn read_error(what: &str, offset: u64, error: &io::Error) -> Error {
    let (what, mut kind, mut text) = (what.into(), error.kind(), error.to_string());
    // These two have no stable kind of their own.
    if let Some(libc::EMFILE | libc::ENFILE) = error.raw_os_error() {
        (kind, text) = (
            io::ErrorKind::QuotaExceeded,
            text + "; raise the limit on open files (ulimit -n), or close some",
        );
    }
    Error::Read { what, offset, kind, text }
}

pub(super) fn write_error(what: &str, offset: u64, error: &io::Error) -> Error {
    Error::Write { what: what.into(), offset, kind: error.kind(), text: error.to_string() }
}

/// The error of a source that has become shorter than `len` bytes since a transfer of it began.
pub(super) fn shrunk(what: String, end: u64, len: u64) -> Error {
    let text = format!(
        "it ends there, not at {len}: it has become shorter since its length was taken; load it again while no process \
         writes to it"
    );
    Error::Read { what, offset: end, kind: io::ErrorKind::UnexpectedEof, text }
}

/// The error of a range that leaves what is read or written.
pub(super) fn leaves(start: u64, end: u64, len: u64) -> Error {
    let [start, end, len] = [start, end, len].map(|n| usize::try_from(n).unwrap_or(usize::MAX));
    Error::out_of_range(start, end, len)
}
