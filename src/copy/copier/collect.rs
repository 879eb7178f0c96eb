//! A download into memory that is made for it.

use std::sync::Arc;

use super::pieces::Values;
use super::ranges::Kept;
use crate::error::{Error, Result};

/// Smaller memory is not worth huge pages.
const HUGE: usize = 4 << 20;

/// A new vector that a download fills ([`Copier::download_collect`](super::Copier::download_collect)):
/// [`into_vec`](Self::into_vec) gives it when the transfer is over.
#[derive(Debug)]
pub struct Collect {
    /// Empty, with room for `len` bytes. Its memory is written through an address while the vector is left alone.
    vec: Vec<u8>,
    len: usize,
    is_full: bool,
}

impl Collect {
    /// Memory for `len` bytes, asked for on huge pages, and not touched yet; and its address.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(super) fn new(len: usize) -> Result<(Self, *mut u8)> {
        let mut vec: Vec<u8> = Vec::new();
        vec.try_reserve_exact(len).map_err(|e| Error::OutOfMemory { wanted: len, text: e.to_string() })?;
        let start = vec.as_mut_ptr();
        let page = crate::os::page_size();
        let front = start.align_offset(page);
        if let Some(first) =
            std::ptr::NonNull::new(start.wrapping_add(front)).filter(|_| len >= HUGE && front < len)
        {
            crate::os::advise_huge(first, (len - front) / page * page);
        }
        Ok((Self { vec, len, is_full: false }, start))
    }

    /// The bytes.
    ///
    /// # Errors
    /// [`Error::TooSmall`] if not all of them have arrived.
    pub fn into_vec(mut self) -> Result<Vec<u8>> {
        if !self.is_full {
            return Err(Error::TooSmall { need: self.len, have: 0 });
        }
        // SAFETY: the capacity is that much, and the transfer, which has ended well, has written every byte.
        unsafe { self.vec.set_len(self.len) };
        Ok(self.vec)
    }
}

/// The value of a download that fills it.
pub(super) struct Collected(pub(super) Arc<Kept<Collect>>);

impl Values for Collected {
    type Back = Collect;

    unsafe fn take(&self) -> Result<Collect> {
        // SAFETY: the caller's promise.
        unsafe { self.0.take() }.map(|collect| Collect { is_full: true, ..collect })
    }

    unsafe fn rescue(&self) -> Option<Collect> {
        // SAFETY: the caller's promise.
        unsafe { self.0.rescue() }
    }
}
