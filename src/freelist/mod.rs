//! The lock-free parts: free segments, and who may move them without a lock.
//!
//! A free segment is always in exactly one of three places, and each place says who may touch it:
//!
//! | place | whose | how |
//! | --- | --- | --- |
//! | a [`shard`] | one thread's, leased from the pool | plain loads and stores, guarded by the asymmetric [`Gate`] |
//! | a [`rack`] | nobody's: whole chains that shards gave away | one atomic swap |
//! | its run, in the arena | the depot's lock | ordinary code |
//!
//! Segments move between the first two without any lock, a *chain* at a time, so a thread that only frees feeds a thread
//! that only takes. There is no device in here and no policy: how long a list may get, and when lists are taken back, is
//! the depot's to say.

#![allow(unsafe_code)]

pub(crate) mod rack;
pub(crate) mod shard;
pub(crate) mod slot;

pub(crate) use rack::Rack;
pub(crate) use shard::{Gate, Roster, Shard, mode};
pub(crate) use slot::{Chain, Slot, Word, state};

#[cfg(all(test, loom))]
mod loom_models;
