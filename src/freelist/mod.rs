//! The lock-free parts: lists of free segments that threads use without the central pool's lock.
//!
//! In this folder *the pool* is a central pool ([`crate::central`]). Each has one [`Gate`], which
//! an owner *enters* before it works on its thread cache ([`cache`] has the protocol).
//!
//! A free segment is in exactly one of three places. The place says which thread may touch it:
//!
//! | place | which thread | how |
//! | --- | --- | --- |
//! | a thread cache ([`cache`]) | its *owner*, the thread that leases it | plain loads and stores behind the [`Gate`] |
//! | a transfer cache ([`transfer`]) | any thread that is inside the gate | the lock of one of its stacks, once for a batch |
//! | its run, in the arena | the thread that holds the central pool's lock | ordinary code |
//!
//! Segments move between the first two places without the central pool's lock, a batch at a time.
//! The central pool decides how long a list may get and when lists are reclaimed.
//!
//! # Invariants
//!
//! - A free segment is in one list; one *out* (checked out, in flight, quarantined) is in none.
//! - One thread at a time writes to a thread cache's lists: its owner inside the gate; its owner
//!   under the central pool's lock; or that lock's holder, having shut the owner out.
//! - A descriptor in a list is alive: the arena frees a run's descriptors once all of them are in
//!   the run's own list.
//!
//! To be read in this order: [`descriptor`] (what the pool knows of one segment), [`cache`] (the
//! fast path and its gate), [`transfer`], `table` (the thread caches of a pool). `loom_models`
//! checks the orderings; `.ci/planted/` has mistakes that it must catch. Modules above the central
//! pool use state words only.

#![allow(unsafe_code)]

pub(crate) mod cache;
pub(crate) mod descriptor;
mod table;
pub(crate) mod transfer;

pub(crate) use cache::{Gate, ThreadCache};
pub(crate) use descriptor::{Chain, Descriptor, Word, state};
pub(crate) use table::CacheTable;
pub(crate) use transfer::TransferCache;

use crate::segment::{CLASSES, Class};

/// The classes that thread caches and transfer caches have lists for: all. Loom models have two,
/// whose runs have six and four segments in two pages. The others take the slow path there.
const LISTED_CLASSES: std::ops::Range<usize> = if cfg!(loom) { 18..20 } else { 0..CLASSES };

/// Number of classes that have lists.
pub(crate) const LISTS: usize = LISTED_CLASSES.end - LISTED_CLASSES.start;

/// The classes that have lists.
pub(crate) fn listed() -> impl DoubleEndedIterator<Item = Class> + ExactSizeIterator {
    Class::all().take(LISTED_CLASSES.end).skip(LISTED_CLASSES.start)
}

/// The index of a class's list in a thread cache, and of its transfer cache. [`LISTS`] for a class
/// without a list. Outside of models it is the class's index.
#[inline(always)]
pub(crate) fn list_of(class: Class) -> usize {
    if cfg!(loom) { class.index().wrapping_sub(LISTED_CLASSES.start).min(LISTS) } else { class.index() }
}

#[cfg(all(test, loom))]
mod loom_models;
