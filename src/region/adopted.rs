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

use super::make::{Source, page, undo};
use super::{Extent, Owner, RegionInfo, Regions, info};
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
        let (mut extents, mut came, id) = (Vec::new(), 0, self.next_id());
        while came < whole {
            // SAFETY: within the value.
            let at = unsafe { base.add(came) };
            let len = self.options.extent.min(whole - came);
            let mut extent = Extent::new(id, at, len, Source::Adopted(None), &context);
            // The others stay here: a job that panics loses what it owns.
            let regions = self.clone();
            let called = context.worker().call(move || {
                // SAFETY: whole pages of the adoption's memory, kept until they were unregistered.
                Ok(unsafe { regions.pin_extent(&mut extent) }.map(|()| extent))
            });
            let (error, is_known) = match called {
                Ok(Ok(extent)) => {
                    extents.push(extent);
                    came += len;
                    continue;
                }
                // The device was found to be lost by this very call, before it has pinned anything.
                Ok(Err(error)) if came == 0 && self.goes_on_after(Some(&error)) => {
                    context = self.context();
                    continue;
                }
                Ok(Err(error)) => (error, true),
                // The job panicked, and may have pinned its extent or not.
                Err(error) => (error, false),
            };
            let undone = context.worker().call(move || Ok(undo(&extents)));
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
        extents[0].source = Source::Adopted(Some(Owned::new(memory)));
        let info = info(&extents);
        let bases: Vec<NonNull<u8>> = extents.iter().map(|extent| extent.base).collect();
        self.progress.lock().regions.insert(id, extents);
        for base in bases {
            self.hand_over(id, base, owner);
        }
        self.ended(0, None, Some(owner));
        Ok(info)
    }
}
