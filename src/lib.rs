//! pinpool
#![allow(dead_code)]

// In the order of the layers: each knows only those above it.
mod arena;
mod buffer;
mod config;
mod copy;
mod depot;
mod device;
mod error;
mod freelist;
mod os;
mod pool;
mod region;
mod runtime;
pub mod segment;
mod stream;
mod sync;

pub use buffer::{HostBuf, InFlight, Lend, PinnedBuf, StreamBuf, Token, UnpinnedBuf};
pub use config::PoolBuilder;
pub use copy::{DeviceRange, Landing};
pub use device::host;
pub use device::memory::{DeviceBuffer, DeviceSlice};
pub use error::{DeviceError, Error, ErrorClass, Result, SubmitError};
pub use pool::{Census, Checkout, CheckoutMany, Pool, PoolStats, Request, Shutdown};
pub use region::{Pinning, RegionId, RegionInfo, Unpinned};
pub use runtime::Device;
pub use stream::Stream;
