//! The lock-free parts: free segments, and who may move them without a lock.
//!
//! A free segment is always in exactly one of three places, and each place says who may touch it:
//!
//! | place | whose | how |
//! | --- | --- | --- |
//! | a [`cache`] | one thread's, leased from the pool | plain loads and stores, guarded by the asymmetric [`Gate`] |
//! | a [`transfer`] | nobody's: batches that thread caches gave away | two atomic operations for a batch |
//! | its run, in the arena | the central pool's lock | ordinary code |
//!
//! Segments move between the first two without any lock, a batch at a time, so a thread that only frees feeds a thread
//! that only takes. There is no device in here and no policy: how long a list may get, and when lists are taken back,
//! is the central pool's to say.

#![allow(unsafe_code)]

pub(crate) mod cache;
pub(crate) mod descriptor;
mod table;
pub(crate) mod transfer;

pub(crate) use cache::{Gate, ThreadCache, mode};
pub(crate) use descriptor::{Chain, Descriptor, Word, state};
pub(crate) use table::CacheTable;
pub(crate) use transfer::TransferCache;

use crate::segment::{CLASSES, Class};

/// The classes that thread caches and transfer caches have lists for, by their index: all. Under loom these two, whose
/// runs have six segments and four in two pages, so that models stay small; other classes then take the slow path.
const LISTED_CLASSES: std::ops::Range<usize> = if cfg!(loom) { 18..20 } else { 0..CLASSES };

/// The classes that thread caches and transfer caches have lists for.
pub(crate) fn listed() -> impl DoubleEndedIterator<Item = Class> + ExactSizeIterator {
    Class::all().take(LISTED_CLASSES.end).skip(LISTED_CLASSES.start)
}

/// How many these are.
pub(crate) const LISTS: usize = LISTED_CLASSES.end - LISTED_CLASSES.start;

/// Which list of a thread cache, or which transfer cache, is this class's; [`LISTS`] if there is none. Outside of
/// models it is the class's index.
#[inline(always)]
pub(crate) fn list_of(class: Class) -> usize {
    if cfg!(loom) { class.index().wrapping_sub(LISTED_CLASSES.start).min(LISTS) } else { class.index() }
}

#[cfg(all(test, loom))]
mod loom_models;
