//! What an address is told to be that names no memory for copies.

use crate::error::Error;

/// Why an address names no memory that a device's copies can use.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AddressFault {
    #[error("it is null")]
    Null,
    #[error(
        "that is {}; it is the host's side of a copy: use a buffer of a pool, or the blocking copies, which take \
         borrowed memory", if *.registered { "page-locked host memory" } else { "ordinary host memory" }
    )]
    Host { registered: bool },
    #[error("that is memory of {device}; copy on a stream of that device, or through the host")]
    OtherDevice { device: String },
    #[cfg_attr(
        not(feature = "cuda"),
        allow(dead_code, reason = "only CUDA has several contexts of a device")
    )]
    #[error(
        "another context of the GPU allocated it, and only with peer access between the two could it be used here; \
         allocate it in the device's own context, which is the primary one, like the runtime API's and the frameworks'"
    )]
    OtherContext,
    #[error(
        "the allocation there starts at {start:#x} and has {size} bytes, and the range leaves it by {over}"
    )]
    PastEnd { start: u64, size: usize, over: usize },
    #[error(
        "the driver knows no memory there; either a kernel's own malloc or new gave it (the device-side heap, which \
         no copy call accepts: have a kernel copy it to memory of cudaMalloc, cuMemAlloc or `Device::alloc`, and name \
         that), or it was freed"
    )]
    Unknown,
}

impl AddressFault {
    /// The error for `len` bytes at `address`, which were to be memory of `device`.
    #[cold]
    pub(crate) fn of(self, device: &str, address: u64, len: usize) -> Error {
        let what = format!("{len} bytes at address {address:#x}");
        Error::Argument(format!("{what} cannot be used as memory of {device}: {self}"))
    }
}
