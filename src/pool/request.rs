//! A request: a length in bytes, and options.

use crate::error::Result;
use crate::segment::{Class, Placement, SEGMENT_ALIGN};
use crate::telemetry::ledger::Tag;

/// A request for a buffer: a length in bytes, and options, as in
/// `Request::new(10_000).align(4096).tag("weights")`. A plain length is one: `pool.checkout(4096)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub(super) len: usize,
    pub(super) align: usize,
    pub(super) tag: Tag,
}

impl Request {
    /// A buffer of `len` bytes.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self::from(len)
    }

    /// The buffer's address is a multiple of `align` bytes, a power of two of at most 2 MiB.
    /// Default: 64. Up to `align` bytes may be lost at the front of each extent of the driver's.
    #[must_use]
    pub fn align(mut self, align: usize) -> Self {
        self.align = align;
        self
    }

    /// Bytes that this request takes of a pool's capacity, rounding included. To size a pool, sum
    /// these, and add a page (4 KiB) for each buffer: segments come in runs of whole pages.
    ///
    /// # Errors
    /// [`Error::ZeroLength`](crate::Error::ZeroLength), [`Error::TooLong`](crate::Error::TooLong)
    /// on overflow, [`Error::Argument`](crate::Error::Argument) for an alignment.
    pub fn segment_bytes(&self) -> Result<usize> {
        Placement::of(self.len, self.align).map(Placement::bytes)
    }

    /// A name for the buffer's use, which [`Pool::stuck`](crate::Pool::stuck) reports of the
    /// checkouts that the pool [tracks](crate::PoolBuilder::track_checkouts) or samples.
    #[must_use]
    pub fn tag(mut self, tag: &'static str) -> Self {
        self.tag.name = Some(tag);
        self
    }

    /// The buffer is going to be held for long, such as a cache's, and that is no fault: a
    /// [`Sampler`](crate::telemetry::Sampler) does not count or log it as stuck, and
    /// [`Pool::stuck`](crate::Pool::stuck) lists it as such. Recording such a checkout, with time,
    /// tag and call site, takes some hundred nanoseconds.
    #[must_use]
    pub fn long_lived(mut self) -> Self {
        self.tag.long_lived = true;
        self
    }

    /// The class whose caches may serve the request. `None` beyond the size classes, for larger
    /// alignments, and for long-lived buffers: a hit does not record them.
    #[inline(always)]
    pub(super) fn cached_class(&self) -> Option<Class> {
        if self.align > SEGMENT_ALIGN || !self.align.is_power_of_two() || self.tag.long_lived {
            return None;
        }
        Class::of(self.len)
    }
}

impl From<usize> for Request {
    #[inline(always)]
    fn from(len: usize) -> Self {
        Self { len, align: SEGMENT_ALIGN, tag: Tag::NONE }
    }
}
