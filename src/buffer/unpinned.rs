//! Plain memory for programs that prefer it to an error while the pool is short. It takes part in blocking copies only.

use std::ops::{Deref, DerefMut};

use super::PinnedBuf;
use crate::error::{Error, Result};

/// Plain memory, which was given out because the pool was short
/// ([`Pool::checkout_or_unpinned`](crate::Pool::checkout_or_unpinned)).
///
/// It takes part in blocking copies only (`upload_blocking`): an asynchronous copy from pageable memory would not be
/// asynchronous, and on some devices silently wrong. It starts out empty and derefs to the bytes that were written.
///
/// # Examples
///
/// ```
/// # use pinpool::{Device, HostBuf, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(1 << 16).unpinned(Unpinned::Allow).build()?;
/// # let (stream, memory) = (device.stream()?, device.alloc(3)?);
/// let all: Vec<_> = std::iter::from_fn(|| pool.try_checkout(4096).ok()).collect(); // now the pool is empty
/// let HostBuf::Unpinned(mut buf) = pool.checkout_or_unpinned(3)? else { panic!("pinned") };
/// buf.try_extend_from_slice(b"abc")?;
/// stream.upload_blocking(&buf, &memory)?;
/// # Ok::<(), pinpool::Error>(())
/// ```
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

    /// The number of bytes that fit: the length that was asked for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Appends bytes, or returns an error.
    ///
    /// # Errors
    /// [`Error::TooSmall`] if they do not fit; nothing is appended then.
    pub fn try_extend_from_slice(&mut self, bytes: &[u8]) -> Result<()> {
        let have = self.capacity - self.bytes.len();
        if bytes.len() > have {
            return Err(Error::TooSmall { need: bytes.len(), have });
        }
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    /// Sets the length to `len` bytes: cuts the buffer off, or fills it up with `value`.
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

    /// Forgets what was written: the buffer is empty again.
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

/// The result of [`Pool::checkout_or_unpinned`](crate::Pool::checkout_or_unpinned): pool memory, or plain memory.
///
/// # Examples
///
/// ```
/// # use pinpool::{Device, HostBuf, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (stream, memory) = (device.stream()?, device.alloc(3)?);
/// match pool.checkout_or_unpinned(3)? {
///     HostBuf::Pinned(mut buf) => {
///         buf.extend_from_slice(b"abc");
///         drop(stream.upload(buf, &memory)?); // returns at once
///     }
///     HostBuf::Unpinned(mut buf) => {
///         buf.try_extend_from_slice(b"abc")?;
///         stream.upload_blocking(&buf, &memory)?; // waits
///     }
/// }
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Debug)]
pub enum HostBuf {
    /// Memory of the pool.
    Pinned(PinnedBuf),
    /// Plain memory: the pool was short.
    Unpinned(UnpinnedBuf),
}
