//! Sources, files, sinks, readers and writers by a copier on the host device: what arrives, what goes wrong, what is left behind, and how it behaves beside
//! others.
#![allow(missing_docs, clippy::unwrap_used)]

mod ending;
mod files;
mod manners;
mod memory;
mod readers;
mod scarce;
mod shapes;
mod trouble;
mod waiting;

pub use crate::support::rig::{Rig, Whole, block_on, pattern};
