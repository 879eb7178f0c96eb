//! The parts of pinpool that give out and take raw handles and addresses, in one place.
//!
//! They come with other changes. Until a part is there, its functions here say `None`, and what needs them is skipped,
//! which fails while `PINPOOL_REQUIRE` names a GPU. To switch a part on, delete the line `#[cfg(any())]` before it, and the
//! module of `None`s behind it.

#[allow(unused_imports, reason = "for parts that are switched on")]
use std::ffi::c_void;

use pinpool::{Device, DeviceBuffer, DeviceSlice, PinnedBuf, Result, Stream};

pub use pointers::{address, heap_limit, raw_memory, set_heap_limit};
pub use streams::{adopt_stream, raw_stream, upload_captured};

/// `pinpool::cuda::{raw_stream, adopt_stream}`, `Stream::upload_captured`.
#[cfg(any())]
mod streams {
    use super::*;

    /// The driver's handle of a stream.
    pub fn raw_stream(stream: &Stream) -> Option<usize> {
        Some(pinpool::cuda::raw_stream(stream).expect("a stream of a GPU") as usize)
    }

    /// A stream of the driver's, which stays alive until all that is submitted to it is done.
    pub fn adopt_stream(device: &Device, stream: usize) -> Option<Result<Stream>> {
        // SAFETY: the caller's word, in the line above.
        Some(unsafe { pinpool::cuda::adopt_stream(device, stream as *mut c_void) })
    }

    /// Makes an upload a part of the graph that the stream is captured into, which alone keeps the buffer from then on.
    pub fn upload_captured(stream: &Stream, buf: PinnedBuf, to: &DeviceBuffer) -> Option<Result<()>> {
        Some(stream.upload_captured(buf, to).map(drop).map_err(|refused| refused.error))
    }
}

#[cfg(not(any()))]
mod streams {
    use super::*;

    pub fn raw_stream(_: &Stream) -> Option<usize> {
        None
    }

    pub fn adopt_stream(_: &Device, _: usize) -> Option<Result<Stream>> {
        None
    }

    pub fn upload_captured(_: &Stream, _: PinnedBuf, _: &DeviceBuffer) -> Option<Result<()>> {
        None
    }
}

/// `Device::raw_memory`, `DeviceBuffer::address`, `pinpool::cuda::{device_heap_limit, set_device_heap_limit}`.
#[cfg(any())]
mod pointers {
    use super::*;

    /// Where device memory is.
    pub fn address(memory: &DeviceBuffer) -> Option<u64> {
        Some(memory.address())
    }

    /// Memory that somebody else has, which stays allocated until all that uses it is done.
    pub fn raw_memory(device: &Device, address: u64, len: usize) -> Option<Result<DeviceSlice>> {
        // SAFETY: the caller's word, in the line above.
        Some(unsafe { device.raw_memory(address, len, ()) }.map_err(|refused| refused.error))
    }

    /// Bytes of the heap that kernels allocate from.
    pub fn heap_limit(device: &Device) -> Option<Result<usize>> {
        Some(pinpool::cuda::device_heap_limit(device))
    }

    pub fn set_heap_limit(device: &Device, bytes: usize) -> Option<Result<()>> {
        Some(pinpool::cuda::set_device_heap_limit(device, bytes))
    }
}

#[cfg(not(any()))]
mod pointers {
    use super::*;

    pub fn address(_: &DeviceBuffer) -> Option<u64> {
        None
    }

    pub fn raw_memory(_: &Device, _: u64, _: usize) -> Option<Result<DeviceSlice>> {
        None
    }

    pub fn heap_limit(_: &Device) -> Option<Result<usize>> {
        None
    }

    pub fn set_heap_limit(_: &Device, _: usize) -> Option<Result<()>> {
        None
    }
}
