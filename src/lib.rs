//! pinpool
#![allow(dead_code)]
mod error;
mod os;
mod sync;
mod device;
pub use device::host;
pub use error::{DeviceError, Error, ErrorClass, Result, SubmitError};
