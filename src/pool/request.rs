//! What is asked for: a length, and what may be said about where it is to come from.

use crate::device::handle::Device;
use crate::error::Result;
use crate::segment::{Placement, SEGMENT_ALIGN};

/// What is asked for. A plain length is a request too: `pool.checkout(4096)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    pub(super) len: usize,
    pub(super) align: usize,
    pub(super) reserve: Option<&'a str>,
    /// The context of the device that it is to be near, and its name.
    pub(super) near: Option<(u64, &'a str)>,
    pub(super) tag: Option<&'static str>,
}

impl<'a> Request<'a> {
    /// A buffer of `len` bytes.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self { len, align: SEGMENT_ALIGN, reserve: None, near: None, tag: None }
    }

    /// Starting on a multiple of `align` bytes: a power of two of at most 2 MiB. (Every buffer starts on one of 64.)
    /// Memory that the driver allocates starts on a page only, so of each extent there as much may be lost in front.
    #[must_use]
    pub fn align(mut self, align: usize) -> Self {
        self.align = align;
        self
    }

    /// Bytes that this request takes of a pool's capacity, rounding included. To size a pool for several buffers,
    /// multiply, and add a page (4 KiB) for each: segments come in runs of whole pages.
    ///
    /// # Errors
    /// [`Error::ZeroLength`](crate::Error::ZeroLength), [`Error::TooLong`](crate::Error::TooLong) on overflow,
    /// [`Error::BadAlignment`](crate::Error::BadAlignment).
    pub fn segment_bytes(&self) -> Result<usize> {
        Placement::of(self.len, self.align).map(Placement::bytes)
    }

    /// From the reserve of this name, if the pool proper has nothing free. Reserves lie near the pool's first device.
    #[must_use]
    pub fn reserve(mut self, name: &'a str) -> Self {
        self.reserve = Some(name);
        self
    }

    /// From memory on the NUMA node of this device, one of the pool's. It makes a difference where the pool's devices
    /// hang on several nodes; see [`PoolBuilder::device`](crate::PoolBuilder::device). A device that the pool does not
    /// serve is [`Error::WrongDevice`](crate::Error::WrongDevice). A request that names a reserve too comes from the
    /// reserve's node.
    #[must_use]
    pub fn near(mut self, device: &'a Device) -> Self {
        self.near = Some((device.context().id(), device.name()));
        self
    }
}

impl Request<'_> {
    /// What the buffer is for, as [`Pool::stuck`](crate::Pool::stuck) shall say it. Kept where the checkout is
    /// [entered](crate::PoolBuilder::track_checkouts), and costs nothing elsewhere.
    #[must_use]
    pub fn tag(mut self, tag: &'static str) -> Self {
        self.tag = Some(tag);
        self
    }
}

impl From<usize> for Request<'_> {
    #[inline(always)]
    fn from(len: usize) -> Self {
        Self { len, align: SEGMENT_ALIGN, reserve: None, near: None, tag: None }
    }
}
