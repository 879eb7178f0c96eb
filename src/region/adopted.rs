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
use super::{Extent, RegionId, RegionInfo, Regions};
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

/// A range for a job on the region thread.
#[derive(Clone, Copy)]
struct AdoptedPiece {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the adoption owns the memory, and waits for the job.
unsafe impl Send for AdoptedPiece {}

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
        let (len, mut context) = (adoptee.len, self.context());
        self.begin(len);
        let mut extents: Vec<Extent> = Vec::new();
        let (mut offset, mut busy, mut longest) = (0, Duration::ZERO, Duration::ZERO);
        while offset < len {
            // SAFETY: within the memory.
            let start = unsafe { adoptee.base.add(offset) };
            let piece = AdoptedPiece { start, len: self.options.extent.min(len - offset) };
            let (regions, device) = (self.clone(), context.clone());
            let called = context.worker().call(move || {
                let AdoptedPiece { start, len } = { piece };
                // SAFETY: whole pages of memory that the adoption owns, and keeps until they were unregistered.
                let (pinned, took) = unsafe { regions.pin_extent(&device, start, len, true) };
                Ok((pinned?, took))
            });
            match called {
                Ok((pinned, took)) => {
                    busy += took;
                    longest = longest.max(took);
                    extents.push(Extent::new(offset, piece.len, pinned));
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
                    self.ended(len, None, || ());
                    if clean {
                        return Err(adoptee.refused(error));
                    }
                    std::mem::forget(adoptee.memory);
                    return Err(SubmitError { error, buffer: None });
                }
            }
            offset += piece.len;
        }
        let pieces: Vec<_> = extents.iter().map(|e| (e.offset, e.len, e.is_pinned())).collect();
        let source = RegionSource::Adopted(Owned::new(adoptee.memory));
        let info = self.add(adoptee.base, len, extents, source, None, &context);
        for (offset, len, pinned) in pieces {
            // SAFETY: within the region.
            serve(info.id, unsafe { info.base.add(offset) }, len, pinned);
        }
        self.served(info.id, len, busy, longest);
        self.progress.lock().busy -= 1;
        self.wake();
        Ok(info)
    }
}

/// Unpins what was pinned, the last extent first. Returns whether nothing is pinned any more.
fn roll_back<T>(device: &Arc<Context>, adoptee: &Adoptee<T>, extents: &[Extent]) -> bool {
    let mut clean = true;
    for extent in extents.iter().rev().filter(|e| e.is_pinned()) {
        // SAFETY: within the memory.
        let start = unsafe { adoptee.base.add(extent.offset) };
        let (piece, context) = (AdoptedPiece { start, len: extent.len }, device.clone());
        let unpinned = device.worker().call(move || {
            let AdoptedPiece { start, len } = { piece };
            // SAFETY: pinned once, unpinned once, and never handed out.
            Ok(unsafe { unpin(&context, start, len, true) })
        });
        clean &= unpinned.unwrap_or_else(|_| {
            device.holds().leaked(1);
            false
        });
    }
    clean
}
