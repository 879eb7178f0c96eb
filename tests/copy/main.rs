//! Copies beyond a single upload: the copy queue, pieces by a copier, and the pipeline between files and devices. All
//! on host devices.

mod pieces;
mod pipeline;
mod queue;
#[path = "../support/mod.rs"]
mod support;
