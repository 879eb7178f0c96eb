//! pinpool
#![allow(dead_code)]
mod error;
mod os;
mod sync;
mod device;
pub use error::{DeviceError, Error, ErrorClass, Result, SubmitError};
mod segment;
mod freelist;
mod arena;
mod depot;
