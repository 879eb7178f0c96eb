//! Streams: ordered queues of a device, and what is in flight on them.
//!
//! A stream has a *timeline*: a list of what was submitted to it, in order, each entry under a
//! sequence number. Events that are recorded on the stream tell up to which sequence number the
//! device is done. An entry keeps the memory that its copy uses, and lets it go when an event that
//! covers the entry was seen complete. One thread of each device, the *reaper*, asks about the
//! events, returns segments to their pools and wakes waiters. A thread that waits for a copy asks,
//! too.
//!
//! # Invariants
//!
//! - An entry completes only when an event that was recorded after its driver call was seen
//!   complete. An error never reads as complete: what cannot be shown to be done is quarantined.
//! - Handles own no memory in flight; the timeline does. A dropped or forgotten handle ends no
//!   copy.
//! - No driver call and no code of the program runs under a timeline's lock.
//! - A [`Stream`] keeps its device open, and thereby its reaper. A busy timeline is on the reaper's
//!   list, which keeps the timeline alive.
//!
//! # Files, in the order to read them
//!
//! [`hold`] says how memory is kept for a device. [`timeline`] is the core: how the crate knows
//! that a copy is done. [`timeline::reaper`] is the thread that finds it out. [`handle`] has
//! [`Stream`], the public handle, above [`Device`](crate::Device). `loom_models` has the models of
//! all this.
//!
//! `buffer`, `device::handle`, `copy`, `pool`, `telemetry::stuck`, `cuda` and `acl` call this
//! module. It calls `central` (to return segments), `device` (the driver) and `freelist` (the
//! segments' state words).

mod handle;
pub(crate) mod hold;
#[cfg(all(test, loom))]
mod loom_models;
pub(crate) mod timeline;

pub use handle::Stream;
