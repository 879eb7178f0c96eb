//! Copies beyond a single upload: the copier with pieces, sources, files and sinks. All on host devices.

mod bulk;
mod pieces;
mod setup;
mod threads;
