//! A download into memory that is made for it.

use std::borrow::Cow;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::packing::copy_out;
use super::source::Sink;
use super::source::ours::Token;
use crate::error::{Error, Result};

/// Smaller memory is not worth huge pages.
const HUGE: usize = 4 << 20;

/// A new vector that a download fills ([`Copier::download_collect`](super::Copier::download_collect)):
/// [`into_vec`](Self::into_vec) gives it when the transfer is over.
#[derive(Debug)]
pub struct Collect {
    /// Empty, with room for `len` bytes.
    vec: Vec<u8>,
    /// Its memory, which is written through this while the vector is left alone.
    start: NonNull<u8>,
    len: usize,
    put: AtomicUsize,
}

// SAFETY: the address is that of the vector's memory, which is its alone.
unsafe impl Send for Collect {}
// SAFETY: as above; chunks do not overlap, so no byte is written by two threads, and none is read before `into_vec`.
unsafe impl Sync for Collect {}

impl Collect {
    /// Memory for `len` bytes, asked for on huge pages, and not touched yet.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(super) fn new(len: usize) -> Result<Self> {
        let mut vec: Vec<u8> = Vec::new();
        vec.try_reserve_exact(len).map_err(|e| Error::OutOfMemory { wanted: len, text: e.to_string() })?;
        let start = NonNull::from(vec.spare_capacity_mut()).cast::<u8>();
        let page = crate::os::page_size();
        let front = start.as_ptr().align_offset(page);
        if len >= HUGE && front < len {
            // SAFETY: within the memory.
            let first = unsafe { start.add(front) };
            crate::os::advise_huge(first, (len - front) / page * page);
        }
        Ok(Self { vec, start, len, put: AtomicUsize::new(0) })
    }

    /// The bytes.
    ///
    /// # Errors
    /// [`Error::TooSmall`] if not all of them have arrived.
    pub fn into_vec(mut self) -> Result<Vec<u8>> {
        let have = *self.put.get_mut();
        if have != self.len {
            return Err(Error::TooSmall { need: self.len, have });
        }
        // SAFETY: the capacity is that much, and every byte was put there: chunks do not overlap, and sum up to all.
        unsafe { self.vec.set_len(self.len) };
        Ok(self.vec)
    }
}

/// The sink of the one download that fills it. Not [`Collect`] itself: its methods are public, and a program could put
/// bytes twice into that.
pub(super) struct Filler(Collect);

impl Filler {
    /// For one download.
    pub(super) fn new(collect: Collect) -> Self {
        Self(collect)
    }

    pub(super) fn into_inner(self) -> Collect {
        self.0
    }
}

impl Sink for Filler {
    fn name(&self) -> Cow<'_, str> {
        "a new vector".into()
    }

    fn may_block(&self, _: Token) -> bool {
        false
    }

    fn put(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let Self(collect) = self;
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        if offset > collect.len || bytes.len() > collect.len - offset {
            return Err(io::ErrorKind::WriteZero.into());
        }
        // SAFETY: within the memory, of which this part is this call's alone: the copier brings each byte once.
        unsafe { copy_out(bytes, collect.start.as_ptr().add(offset)) };
        // Relaxed: summed up when no thread writes any more.
        collect.put.fetch_add(bytes.len(), Ordering::Relaxed);
        Ok(())
    }
}
