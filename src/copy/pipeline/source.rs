//! Where an upload's bytes come from, and where a download's go.
//!
//! Both are read and written at offsets, by several threads at once, since that is what makes them fast. What can only
//! be read in order goes through [`Pipeline::upload_read`](super::Pipeline::upload_read) or a [`Feed`](super::Feed)
//! instead.

use std::borrow::Cow;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::sync::Arc;

use bytes::Bytes;

use super::stores::{self, Stores};
use crate::buffer::PinnedBuf;
use crate::error::{Error, Result};
use crate::foreign;

/// A source of an upload that can be read anywhere, by several threads at once.
///
/// Implemented for owned bytes: `Vec<u8>`, `Box<[u8]>`, `Arc<[u8]>`, `Arc<Vec<u8>>`, `Bytes`, `&'static [u8]`.
/// Implement it for object stores, decompressors, generators. Do not implement it by reading a mapped file: should the
/// file become shorter, the process dies; a [`FileSource`](super::FileSource) reports an error.
///
/// ```
/// use pinpool::pipeline::{Fill, Source};
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
/// # use pinpool::{Device, Pool, Unpinned, pipeline::Pipeline};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (pipeline, memory) = (Pipeline::builder(&pool, &device).build()?, device.alloc(1 << 20)?);
/// pipeline.upload(Ramp, &memory)?.wait()?;
/// # assert_eq!(pipeline.download_vec(memory.slice(256..258))?, [0, 1]);
/// # Ok::<(), pinpool::Error>(())
/// ```
pub trait Source: Send + Sync + 'static {
    /// Bytes that there are.
    fn len(&self) -> u64;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What errors and progress call it.
    fn name(&self) -> Cow<'_, str> {
        "the source".into()
    }

    /// Puts bytes from `offset` on into `into`, until that is full. Called on the pipeline's threads; it may block, and
    /// then holds up one of them.
    ///
    /// # Errors
    /// Whatever the transfer is to end with, as [`Error::Read`](crate::Error::Read). Too few bytes without an error end
    /// it with [`Error::Shrunk`](crate::Error::Shrunk).
    fn fill(&self, offset: u64, into: &mut Fill<'_>) -> io::Result<()>;

    /// Its bytes, where it is memory that stays as it is for as long as it is shared. Ours alone to say.
    #[doc(hidden)]
    fn memory(&self, _: ours::Token) -> Option<&[u8]> {
        None
    }
}

/// Bytes of a source, by its own word.
pub(super) fn length(source: &impl Source) -> Result<u64> {
    let len =
        foreign::call("a source panicked when it was asked for its length: it is refused", || source.len());
    len.ok_or_else(|| Error::Read {
        what: "the source".into(),
        offset: 0,
        kind: io::ErrorKind::Other,
        text: "it panicked when it was asked for its length".into(),
    })
}

/// What a source or sink is called, by its own word.
pub(super) fn name<'a>(or: &str, ask: impl FnOnce() -> Cow<'a, str>) -> String {
    foreign::call("a source or sink panicked when it was asked for its name", || ask().into_owned())
        .unwrap_or_else(|| or.into())
}

pub(super) mod ours {
    //! What cannot be named elsewhere: methods that take it can be overridden here only.

    /// See the module's page.
    #[derive(Clone, Copy, Debug)]
    pub struct Token;

    /// Memory to be written.
    #[derive(Clone, Copy, Debug)]
    pub struct Place {
        pub(in super::super) start: *mut u8,
        pub(in super::super) len: usize,
    }
}

/// A sink of a download that can be written anywhere, by several threads at once. Chunks come in any order, each once.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use pinpool::pipeline::Sink;
///
/// /// Sums the bytes up.
/// #[derive(Default)]
/// struct Sum(AtomicU64);
///
/// impl Sink for Sum {
///     fn put(&self, _offset: u64, bytes: &[u8]) -> std::io::Result<()> {
///         self.0.fetch_add(bytes.iter().map(|byte| u64::from(*byte)).sum(), Ordering::Relaxed);
///         Ok(())
///     }
/// }
/// # use pinpool::{Device, Pool, Unpinned, pipeline::Pipeline};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (pipeline, memory) = (Pipeline::builder(&pool, &device).build()?, device.alloc(1000)?);
/// # pipeline.upload_slice(&[2; 1000], &memory)?;
/// let sum = pipeline.download(&memory, Sum::default())?.wait()?;
/// assert_eq!(sum.0.into_inner(), 2000);
/// # Ok::<(), pinpool::Error>(())
/// ```
pub trait Sink: Send + Sync + 'static {
    /// What errors and progress call it.
    fn name(&self) -> Cow<'_, str> {
        "the target".into()
    }

    /// Takes bytes that belong at `offset`.
    ///
    /// # Errors
    /// Whatever the transfer is to end with, as [`Error::Write`](crate::Error::Write).
    fn put(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// What errors call this offset of the transfer: where the bytes lie in what is written. Ours alone to say.
    #[doc(hidden)]
    fn lies_at(&self, offset: u64, _: ours::Token) -> u64 {
        offset
    }

    /// Where its bytes go, if that is memory that nobody else uses. Ours alone to say.
    #[doc(hidden)]
    fn place(&self, _: ours::Token) -> Option<ours::Place> {
        None
    }

    /// So many bytes were written there.
    #[doc(hidden)]
    fn placed(&self, _: usize, _: ours::Token) {}
}

/// The place in a pinned segment that a [`Source`] fills, from front to back. Also a [`std::io::Write`], which takes no
/// more than fits.
///
/// ```
/// use std::io::Read;
/// use pinpool::pipeline::Fill;
///
/// /// Fills `into` from a reader, in the manner of [`Source::fill`](pinpool::pipeline::Source::fill).
/// fn fill_from(reader: &mut impl Read, into: &mut Fill<'_>) -> std::io::Result<()> {
///     let left = into.remaining() as u64;
///     std::io::copy(&mut reader.take(left), into).map(drop)
/// }
/// ```
#[derive(Debug)]
pub struct Fill<'a> {
    buf: &'a mut PinnedBuf,
    left: usize,
    stores: Stores,
}

impl<'a> Fill<'a> {
    /// `left` is at most what remains.
    pub(super) fn new(buf: &'a mut PinnedBuf, left: usize, stores: Stores) -> Self {
        let left = left.min(buf.remaining());
        Self { buf, left, stores }
    }

    /// Bytes still to come.
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.left
    }

    /// Appends bytes; those that do not fit are left out. How many were taken.
    pub fn push(&mut self, bytes: &[u8]) -> usize {
        let n = bytes.len().min(self.left);
        let stores = self.stores;
        stores::copy(&bytes[..n], &mut self.spare()[..n], stores);
        // SAFETY: just written.
        unsafe { self.advance(n) };
        n
    }

    /// The memory to fill. What is put there counts after [`advance`](Self::advance).
    pub fn spare(&mut self) -> &mut [MaybeUninit<u8>] {
        let left = self.left;
        &mut self.buf.spare_capacity_mut()[..left]
    }

    /// Says that `n` more bytes are there.
    ///
    /// # Safety
    /// `n` is at most [`remaining`](Self::remaining), and that many bytes at the front of [`spare`](Self::spare) are
    /// initialised.
    pub unsafe fn advance(&mut self, n: usize) {
        debug_assert!(n <= self.left);
        let len = self.buf.len();
        // SAFETY: the caller's word.
        unsafe { self.buf.set_len(len + n) };
        self.left -= n;
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

fn fill_from(bytes: &[u8], offset: u64, into: &mut Fill<'_>) {
    let rest = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..));
    into.push(rest.unwrap_or_default());
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
                fill_from(self, offset, into);
                Ok(())
            }
            fn memory(&self, _: ours::Token) -> Option<&[u8]> {
                Some(self)
            }
        }
    )*};
}
bytes_are_a_source!(Vec<u8>, Box<[u8]>, Arc<[u8]>, Bytes, &'static [u8]);

impl Source for Arc<Vec<u8>> {
    fn len(&self) -> u64 {
        self.deref().len() as u64
    }
    fn name(&self) -> Cow<'_, str> {
        "bytes in memory".into()
    }
    fn fill(&self, offset: u64, into: &mut Fill<'_>) -> io::Result<()> {
        fill_from(self, offset, into);
        Ok(())
    }
    fn memory(&self, _: ours::Token) -> Option<&[u8]> {
        Some(self)
    }
}

/// Borrowed bytes, for blocking calls, which see to it that they outlive the transfer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Borrowed {
    start: *const u8,
    len: usize,
}

// SAFETY: an address; the bytes are shared with whoever lent them, and are only read.
unsafe impl Send for Borrowed {}
// SAFETY: as above.
unsafe impl Sync for Borrowed {}

impl Borrowed {
    /// # Safety
    /// Whoever has this, or a copy of it, is done with it before the borrow ends.
    pub(super) unsafe fn new(bytes: &[u8]) -> Self {
        Self { start: bytes.as_ptr(), len: bytes.len() }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: by the word given to `new` they are still borrowed.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl Source for Borrowed {
    fn len(&self) -> u64 {
        self.len as u64
    }
    fn name(&self) -> Cow<'_, str> {
        "bytes in memory".into()
    }
    fn fill(&self, offset: u64, into: &mut Fill<'_>) -> io::Result<()> {
        fill_from(self.bytes(), offset, into);
        Ok(())
    }
    fn memory(&self, _: ours::Token) -> Option<&[u8]> {
        Some(self.bytes())
    }
}

/// Memory that a download lands in, borrowed or owned by whoever waits for the transfer. Not initialised, perhaps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Landing {
    start: *mut u8,
    len: usize,
    stores: Stores,
}

// SAFETY: an address; each byte is written by one thread.
unsafe impl Send for Landing {}
// SAFETY: as above.
unsafe impl Sync for Landing {}

impl Landing {
    /// # Safety
    /// Until whoever has this, or a copy of it, is done with it, nobody else uses the `len` bytes at `start`, and they
    /// can be written.
    pub(super) unsafe fn new(start: *mut u8, len: usize, stores: Stores) -> Self {
        Self { start, len, stores }
    }
}

impl Sink for Landing {
    fn name(&self) -> Cow<'_, str> {
        "memory".into()
    }
    fn put(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        if offset > self.len || bytes.len() > self.len - offset {
            return Err(io::ErrorKind::WriteZero.into());
        }
        // SAFETY: within the memory, which nobody else uses; chunks do not overlap.
        let there = unsafe {
            std::slice::from_raw_parts_mut(self.start.add(offset).cast::<MaybeUninit<u8>>(), bytes.len())
        };
        stores::copy(bytes, there, self.stores);
        Ok(())
    }
    fn place(&self, _: ours::Token) -> Option<ours::Place> {
        Some(ours::Place { start: self.start, len: self.len })
    }
}
