//! Plain memory for who would rather have that than none: it takes part in blocking copies only.

use std::ops::{Deref, DerefMut};

use super::PinnedBuf;
use crate::error::{Error, Result};

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
