//! Adopted memory: the program gives a value whose bytes the pool may cut up. They are pinned where
//! they are and kept as a region; the value is dropped when the region goes.
//!
//! The pool uses the whole pages inside of the value's bytes. They are pinned extent by extent,
//! each in a job of its own, like regions that the pool maps. But no extent is handed out before
//! all of them are pinned, so that on any failure the program gets its memory back as it was.

use std::ops::DerefMut;
use std::ptr::NonNull;
use std::sync::Arc;

use stable_deref_trait::StableDeref;

use super::make::{RegionSource, page};
use super::{Extent, Owner, Region, RegionInfo, Regions};
use crate::amount::amount;
use crate::error::{Error, Result, SubmitError};
use crate::foreign::Owned;

/// A value that is to be adopted.
pub(crate) struct Adoptee<T> {
    /// In a box, so that the value itself does not move while its bytes are in use: moving a value
    /// may assert that nothing else reaches what it points to.
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

impl Regions {
    /// Pins memory, makes it a region, and hands its extents to `owner`. Waits for the region
    /// thread. After an error nothing of it is pinned, or the memory is leaked.
    pub(crate) fn adopt<T>(
        self: &Arc<Self>,
        adoptee: Adoptee<T>,
        owner: &Arc<dyn Owner>,
    ) -> Result<RegionInfo, SubmitError<T>>
    where
        T: DerefMut<Target = [u8]> + StableDeref + Send + 'static,
    {
        let Adoptee { memory, base, len: whole } = adoptee;
        self.begin(whole);
        let mut context = self.context();
        let begun = |context: &_| Region::new(base, RegionSource::Adopted(None), context);
        let (mut region, mut came, mut times) = (begun(&context), 0, Vec::new());
        while came < whole {
            // The region stays here, with what it lists: a job that panics loses what it owns.
            let (regions, part) = (self.clone(), begun(&context));
            let len = self.options.extent.min(whole - came);
            let called = context.worker().call(move || {
                // SAFETY: whole pages of the adoption's memory, kept until they were unregistered.
                Ok(unsafe { regions.pin_extent(&part.context, part.at(came), len, true) })
            });
            let (error, is_known) = match called {
                Ok((Ok(pinned), took)) => {
                    region.extents.push(Extent { offset: came, len, pinned });
                    came += len;
                    times.push([took, took]);
                    continue;
                }
                // The device was found to be lost by this very call, before it has pinned anything.
                Ok((Err(error), _)) if came == 0 && self.goes_on_after(Some(&error)) => {
                    context = self.context();
                    region = begun(&context);
                    continue;
                }
                Ok((Err(error), _)) => (error, true),
                // The job panicked, and may have pinned its extent or not.
                Err(error) => (error, false),
            };
            let undone = context.worker().call(move || Ok(region.undo()));
            // The caller gets the error; it is no failure of the pool's own growth.
            self.ended(whole, None, Some(owner));
            if is_known && undone == Ok(true) {
                return Err(SubmitError { error, buffer: Some(*memory) });
            }
            if !is_known {
                context.holds().leaked(1);
            }
            std::mem::forget(memory);
            return Err(SubmitError { error, buffer: None });
        }
        region.source = RegionSource::Adopted(Some(Owned::new(memory)));
        let extents = region.extents.clone();
        let info = self.add(region);
        for (extent, times) in extents.into_iter().zip(times) {
            // SAFETY: within the region.
            let start = unsafe { info.base.add(extent.offset) };
            self.hand_over(info.id, start, extent, times, owner);
        }
        self.ended(0, None, Some(owner));
        Ok(info)
    }
}
