//! Copies beyond a single upload: the copier with pieces, pushes, sources, files and sinks. All on host devices.

mod bulk;
mod pieces;
mod push;
mod slices;
#[path = "../support/mod.rs"]
mod support;
