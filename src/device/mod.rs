//! The contract: what a device must do.
//!
//! Everything below this module (regions, timelines, the pool) is written against [`Driver`] and nothing else, so the
//! host device, CUDA and Ascend differ only behind this trait. A driver is told what to do and says what happened; it
//! keeps no policy: when to mark a stream, when a buffer is free, who waits, is decided above the contract.
//!
//! # The rules that every driver keeps
//!
//! 1. *Order.* What is submitted to one stream happens in that order. Nothing orders two streams but
//!    [`Driver::wait_event`].
//! 2. *Lateness.* A copy may read its source and write its target at any time between the call and the moment when an
//!    event recorded after it is complete. No one may assume that it happened earlier.
//! 3. *Events.* [`Driver::record`] covers all that was submitted to the stream before. An event may be recorded again
//!    once it was seen complete. An event never recorded asks as complete, so nobody asks about one that was not.
//! 4. *Errors never read as done.* [`Driver::query`] says `Ok(true)` only if the work is over.
//! 5. *A failed submit decides nothing.* After an error from [`Driver::copy`] the copy may or may not run.
//! 6. *Blocking calls let go.* [`Driver::copy_blocking`] returns only when the device will not touch the memory again,
//!    with an error as well as without.
//! 7. *Threads.* All calls may come from any thread. Calls that may block or synchronise a device ([`Driver::pin`],
//!    [`Driver::unpin`], [`Driver::allocate`], [`Driver::free`], destroying) come from the device's
//!    [`Worker`](worker::Worker) only, and none is made under a lock of ours.
//! 8. *Sticky.* After an error of class [`Sticky`](crate::ErrorClass::Sticky) every later call on that device fails
//!    with that class, and no copy of that device touches host memory any more.
//! 9. *Captures.* Where [`Driver::capturing`] says so, nothing is submitted to the stream or recorded on it but what is to
//!    be a part of the graph. An event that was recorded all the same is never complete: asked about, it is an error of class
//!    [`Capture`](crate::ErrorClass::Capture).

#![allow(unsafe_code)]

pub(crate) mod context;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub mod host;
pub(crate) mod memory;
pub(crate) mod worker;

use std::fmt;
use std::ptr::NonNull;

use crate::error::Result;

/// A stream as its driver knows it. Never used again once destroyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StreamHandle(pub u64);

/// An event as its driver knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct EventHandle(pub u64);

/// An address in a device's memory. Adding bytes to it stays within one allocation or is refused by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct DevicePtr(pub u64);

/// One copy of `len` bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Transfer {
    /// Host to device.
    Upload { src: *const u8, dst: DevicePtr, len: usize },
    /// Device to host.
    Download { src: DevicePtr, dst: *mut u8, len: usize },
    /// Within the device.
    OnDevice { src: DevicePtr, dst: DevicePtr, len: usize },
}

/// What a driver calls when a graph is gone: from a callback, so it neither blocks nor calls the driver.
pub(crate) type Gone = Box<dyn FnOnce() + Send>;

/// What a device must do. The module's page has the rules.
pub(crate) trait Driver: fmt::Debug + Send + Sync + 'static {
    /// The device as [`Device::open`](crate::Device::open) names it, such as `host:0`.
    fn name(&self) -> &str;

    /// Devices of one family can share pinned memory.
    fn family(&self) -> &'static str;

    /// A device that does nothing by itself: work happens when [`Stepped::step`] is called. `None` for all others.
    fn stepped(&self) -> Option<&dyn Stepped> {
        None
    }

    /// This driver as a context of CUDA's, for what only that has. `None` for all others.
    #[cfg(feature = "cuda")]
    fn cuda(&self) -> Option<&cuda::Cuda> {
        None
    }

    /// Called once, and first, on each thread of ours that makes calls: the driver may set the thread up for good.
    fn enter_thread(&self) {}

    /// Whether recording an event can block the caller (then ticks are closed at submit, not by the reaper).
    fn record_may_block(&self) -> bool {
        false
    }

    /// Locks the pages of `base..base + len` (both multiples of the system's page size) and makes them known to the
    /// device. On an error nothing is left locked.
    ///
    /// # Safety
    /// The range is mapped, writable, and stays mapped until [`Driver::unpin`] has succeeded.
    unsafe fn pin(&self, base: NonNull<u8>, len: usize) -> Result<()>;

    /// Undoes one [`Driver::pin`]. After an error the range must stay mapped for good.
    ///
    /// # Safety
    /// `base` and `len` are those of one earlier successful `pin`, undone at most once, and no copy uses the range.
    unsafe fn unpin(&self, base: NonNull<u8>, len: usize) -> Result<()>;

    /// Device memory of `len` bytes, uninitialised, aligned to 256 bytes at least.
    fn allocate(&self, len: usize) -> Result<DevicePtr>;

    /// Frees device memory. It must not be in use.
    fn free(&self, ptr: DevicePtr) -> Result<()>;

    /// A new stream.
    fn create_stream(&self) -> Result<StreamHandle>;

    /// Destroys a stream of ours when all its work is done.
    fn destroy_stream(&self, stream: StreamHandle) -> Result<()>;

    /// Submits a copy. Returns before it has happened.
    ///
    /// # Safety
    /// Host memory named by `transfer` is valid, not written (as a source) and not touched (as a target) until an
    /// event recorded on `stream` after this call is complete. After an error the same holds.
    unsafe fn copy(&self, stream: StreamHandle, transfer: Transfer) -> Result<()>;

    /// Copies in stream order and returns when the device has let go of the memory, on an error too.
    ///
    /// # Safety
    /// Host memory named by `transfer` is valid, and not written (as a source) or touched (as a target) by others,
    /// until this call returns. It need not be pinned.
    unsafe fn copy_blocking(&self, stream: StreamHandle, transfer: Transfer) -> Result<()>;

    /// A new event, never recorded.
    fn create_event(&self) -> Result<EventHandle>;

    /// Destroys an event that is complete or was never recorded.
    fn destroy_event(&self, event: EventHandle) -> Result<()>;

    /// Records `event` on `stream`.
    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()>;

    /// Whether all that `event` covers is done. `Ok(false)`: not yet. Never blocks.
    fn query(&self, event: EventHandle) -> Result<bool>;

    /// Work submitted to `stream` from now on starts only after `event` is complete.
    fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()>;

    /// Whether `stream` is being captured into a graph, spoiled captures included. Only asked about streams that others
    /// can reach. Never blocks, and harms no capture.
    fn capturing(&self, _stream: StreamHandle) -> Result<bool> {
        Ok(false)
    }

    /// The number of the capture that `stream` is in, which no other capture has or had.
    fn capture_id(&self, _stream: StreamHandle) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Makes the graph that `stream` is being captured into keep something: `gone` is called when that graph, everything
    /// made from it, and every launch of these is gone. Gives the capture's number; `None`: the stream is in no capture.
    /// After `None` and after an error `gone` is dropped or called, at any time.
    fn keep_with_graph(&self, _stream: StreamHandle, gone: Gone) -> Result<Option<u64>> {
        drop(gone);
        Ok(None)
    }
}

/// A device that a test moves by hand.
pub(crate) trait Stepped {
    /// Lets something happen, chosen by the device's own seed. `false`: nothing can.
    fn step(&self) -> bool;
}
