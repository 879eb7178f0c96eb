//! Adopted memory: the program gives a value whose bytes the pool may cut up. They are pinned where they are and kept
//! as a region; the value is dropped when the region goes.
//!
//! The pool uses the whole pages inside of the value's bytes. They are pinned extent by extent, each in a job of its
//! own, like regions that the pool maps. But no extent is handed out before all of them are pinned, so that on any
//! failure the program gets its memory back as it was. Nothing is written to the memory before a segment of it is
//! handed out.

use std::ops::DerefMut;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use stable_deref_trait::StableDeref;

use super::make::{RegionSource, page, unpin};
use super::{Extent, Pinned, RegionId, RegionInfo, Regions};
use crate::amount::amount;
use crate::device::context::Context;
use crate::error::{Error, Result, SubmitError};
use crate::foreign::Owned;

/// A value that is to be adopted.
pub(crate) struct Adoptee<T> {
    /// In a box, so that the value itself does not move while its bytes are in use: moving a value may assert that
    /// nothing else reaches what it points to.
    memory: Box<T>,
    /// The whole pages in its bytes.
    base: NonNull<u8>,
    len: usize,
}

impl<T> Adoptee<T> {
    fn at(&self, offset: usize) -> NonNull<u8> {
        // SAFETY: callers pass offsets within the memory.
        unsafe { self.base.add(offset) }
    }
}

impl<T> Adoptee<T>
where
    T: DerefMut<Target = [u8]> + StableDeref + Send + 'static,
{
    /// Finds the whole pages. An error gives the value back.
    pub(crate) fn new(memory: T) -> Result<Self, SubmitError<T>> {
        let mut memory = Box::new(memory);
        let bytes: &mut [u8] = &mut memory;
        let (have, page) = (bytes.len(), page());
        let front = bytes.as_ptr().align_offset(page);
        match bytes.get_mut(front..).map(|rest| (rest.len() / page * page, NonNull::from(rest).cast::<u8>()))
        {
            Some((len, base)) if len > 0 => Ok(Self { memory, base, len }),
            _ => {
                let (len, page) = (amount(have), amount(page));
                let error = Error::Argument(format!(
                    "{len} of memory to adopt have no whole page of {page} in them; give a larger piece, or one that \
                     starts on a page"
                ));
                Err(SubmitError { error, buffer: Some(*memory) })
            }
        }
    }

    /// The number of bytes that the pool can use.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Makes an error that gives the value back. Nothing of the value is pinned.
    pub(crate) fn refused(self, error: Error) -> SubmitError<T> {
        SubmitError { error, buffer: Some(*self.memory) }
    }
}

/// An address for a job on the region thread.
#[derive(Clone, Copy)]
struct AdoptedAt(NonNull<u8>);

// SAFETY: the adoption owns the memory, and waits for the job.
unsafe impl Send for AdoptedAt {}

impl Regions {
    /// Pins memory, makes it a region, and hands its extents to `serve`. Waits for the region thread. After an error
    /// nothing of it is pinned, or the memory is leaked.
    pub(crate) fn adopt<T>(
        self: &Arc<Self>,
        adoptee: Adoptee<T>,
        mut serve: impl FnMut(RegionId, NonNull<u8>, usize, bool),
    ) -> Result<RegionInfo, SubmitError<T>>
    where
        T: DerefMut<Target = [u8]> + StableDeref + Send + 'static,
    {
        let (whole, mut context) = (adoptee.len, self.context());
        self.begin(whole);
        let mut extents: Vec<Extent> = Vec::new();
        let (mut offset, mut busy, mut longest) = (0, Duration::ZERO, Duration::ZERO);
        while offset < whole {
            let len = self.options.extent.min(whole - offset);
            let regions = self.clone();
            let called = on_worker(&context, adoptee.at(offset), move |device, start| {
                // SAFETY: whole pages of memory that the adoption owns, and keeps until they were unregistered.
                let (pinned, took) = unsafe { regions.pin_extent(device, start, len, true) };
                Ok((pinned?, took))
            });
            match called {
                Ok((pinned, took)) => {
                    busy += took;
                    longest = longest.max(took);
                    extents.push(Extent { offset, len, pinned });
                }
                // The device was found to be lost by this very call, before it has pinned anything.
                Err(error) if extents.is_empty() && self.goes_on_after(Some(&error)) => {
                    context = self.context();
                    continue;
                }
                Err(error) => {
                    // A call that panicked may have pinned the piece or not.
                    let doubtful = matches!(error, Error::Internal(_));
                    if doubtful {
                        context.holds().leaked(1);
                    }
                    let clean = roll_back(&context, &adoptee, &extents) && !doubtful;
                    // The caller gets the error; it is no failure of the pool's own growth.
                    self.ended(whole, None, || ());
                    if clean {
                        return Err(adoptee.refused(error));
                    }
                    std::mem::forget(adoptee.memory);
                    return Err(SubmitError { error, buffer: None });
                }
            }
            offset += len;
        }
        let source = RegionSource::Adopted(Owned::new(adoptee.memory));
        let info = self.add(adoptee.base, whole, extents.clone(), source, None, &context);
        for Extent { offset, len, pinned } in extents {
            // SAFETY: within the region.
            serve(info.id, unsafe { info.base.add(offset) }, len, pinned == Pinned::Yes);
        }
        self.served(info.id, whole, busy, longest);
        self.ended(0, None, || ());
        Ok(info)
    }
}

/// Calls `call` on the region thread with an address of memory that is being adopted, and waits for it.
fn on_worker<R: Send + 'static>(
    device: &Arc<Context>,
    start: NonNull<u8>,
    call: impl FnOnce(&Context, NonNull<u8>) -> Result<R> + Send + 'static,
) -> Result<R> {
    let (context, start) = (device.clone(), AdoptedAt(start));
    device.worker().call(move || {
        let AdoptedAt(start) = { start };
        call(&context, start)
    })
}

/// Unpins what was pinned, the last extent first. Returns whether nothing is pinned any more.
fn roll_back<T>(device: &Arc<Context>, adoptee: &Adoptee<T>, extents: &[Extent]) -> bool {
    let mut clean = true;
    for Extent { offset, len, .. } in extents.iter().rev().filter(|e| e.pinned == Pinned::Yes).copied() {
        let unpinned = on_worker(device, adoptee.at(offset), move |context, start| {
            // SAFETY: pinned once, unpinned once, and never handed out.
            Ok(unsafe { unpin(context, start, len) })
        });
        clean &= unpinned.unwrap_or_else(|_| {
            device.holds().leaked(1);
            false
        });
    }
    clean
}
