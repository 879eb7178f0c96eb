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
mod region;
mod stream;
mod buffer;
mod runtime;
mod copy;
mod config;
mod pool;
