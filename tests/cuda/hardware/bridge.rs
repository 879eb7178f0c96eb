//! The parts of pinpool that give out and take raw handles and addresses, in one place.
//!
//! `None` would mean that this build lacks a part; what needs it is then skipped, which fails while `PINPOOL_REQUIRE`
//! names a GPU.

use std::ffi::c_void;

use pinpool::{Device, DeviceSlice, PinnedBuf, Result, Stream};

pub use pointers::{address, heap_limit, raw_memory, set_heap_limit};
pub use streams::{adopt_stream, hold_captured, raw_stream};

/// `pinpool::cuda::{raw_stream, adopt_stream}`, `Stream::hold_captured`.
mod streams {
    use super::*;

    /// The driver's handle of a stream.
    pub fn raw_stream(stream: &Stream) -> Option<usize> {
        Some(pinpool::cuda::raw_stream(stream).expect("a stream of a GPU") as usize)
    }

    /// A stream of the driver's, which stays alive until all that is submitted to it is done.
    pub fn adopt_stream(device: &Device, stream: usize) -> Option<Result<Stream>> {
        // SAFETY: the caller's promise, in the line above.
        Some(unsafe { pinpool::cuda::adopt_stream(device, stream as *mut c_void, ()) })
    }

    /// Gives a buffer to the graph that the stream is captured into, which alone keeps it from then on.
    pub fn hold_captured(stream: &Stream, buf: PinnedBuf) -> Option<Result<()>> {
        Some(stream.hold_captured(buf).map_err(|refused| refused.error))
    }
}

/// `Device::raw_memory`, `DeviceSlice::address`, `pinpool::cuda::{device_heap_limit, set_device_heap_limit}`.
mod pointers {
    use super::*;

    /// Where device memory is.
    pub fn address(memory: &DeviceSlice) -> Option<u64> {
        Some(memory.address())
    }

    /// Memory that the program owns, which stays allocated until all that uses it is complete.
    pub fn raw_memory(device: &Device, address: u64, len: usize) -> Option<Result<DeviceSlice>> {
        // SAFETY: the caller's promise, in the line above.
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
