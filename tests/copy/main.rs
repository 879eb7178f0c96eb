//! Copies beyond a single upload: the copy queue, and the copier with pieces, sources, files and sinks. All on host
//! devices.

mod bulk;
mod pieces;
mod push;
mod queue;
#[path = "../support/mod.rs"]
mod support;
