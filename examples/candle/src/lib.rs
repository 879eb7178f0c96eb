//! Candle models whose weights arrive through pinpool: [`Weights`] and [`PinpoolVarBuilder`] load, [`Pinned`] moves
//! single tensors by the pool's buffers, and [`model`], [`checkpoint`] and [`server`] are what the program needs beside.

#![deny(unsafe_code)]

pub mod checkpoint;
pub mod measure;
pub mod model;
mod pinned;
mod place;
pub mod server;
mod weights;

pub use pinned::Pinned;
pub use weights::{Opening, PinpoolVarBuilder, Weights};

/// An error of the crate as one of candle's.
fn wrap(error: pinpool::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}
