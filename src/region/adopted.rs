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
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use stable_deref_trait::StableDeref;

use super::source::{RegionSource, page};
use super::{AGAIN, Extent, Region, RegionId, RegionInfo, Regions, Unpinned, leave_room};
use crate::device::context::Context;
use crate::error::{Error, ErrorClass, RegisterError, Result};
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
    pub(crate) fn new(memory: T) -> Result<Self, RegisterError<T>> {
        let mut memory = Box::new(memory);
        let bytes: &mut [u8] = &mut memory;
        let (have, page) = (bytes.len(), page());
        let front = bytes.as_ptr().align_offset(page);
        match bytes.get_mut(front..).map(|rest| (rest.len() / page * page, NonNull::from(rest).cast::<u8>()))
        {
            Some((len, base)) if len > 0 => Ok(Self { memory, base, len }),
            _ => {
                let error = Error::NoWholePage { len: have, page };
                Err(RegisterError { error, memory: Some(*memory) })
            }
        }
    }

    /// The number of bytes that the pool can use.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Makes an error that gives the value back. Nothing of the value is pinned.
    pub(crate) fn refused(self, error: Error) -> RegisterError<T> {
        RegisterError { error, memory: Some(*self.memory) }
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
    /// Pins memory and makes it a region, of which nothing is handed out yet: a call of [`Regions::served`] is to
    /// follow. Waits for the region thread. After an error nothing of it is pinned, or the memory is leaked.
    pub(crate) fn adopt<T>(&self, adoptee: Adoptee<T>) -> Result<AdoptedRegion, RegisterError<T>>
    where
        T: DerefMut<Target = [u8]> + StableDeref + Send + 'static,
    {
        let (len, mut context) = (adoptee.len, self.context());
        {
            let mut progress = self.progress.lock();
            progress.busy += 1;
            progress.pinning.wanted += len;
        }
        let mut extents: Vec<Extent> = Vec::new();
        let (mut offset, mut last, mut longest) = (0, None, Duration::ZERO);
        let mut busy = Duration::ZERO;
        while offset < len {
            // The pause is on the caller's thread, which waits anyway, so that the worker can do other jobs.
            leave_room(last);
            // SAFETY: within the memory.
            let start = unsafe { adoptee.base.add(offset) };
            let piece = AdoptedPiece { start, len: self.options.extent.min(len - offset) };
            let (pinned, took) = self.pin_piece(&context, piece);
            last = Some((Instant::now(), took));
            longest = longest.max(took);
            busy += took;
            match pinned {
                Ok(pinned) => extents.push(Extent::new(offset, piece.len, pinned)),
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
                    return Err(RegisterError { error, memory: None });
                }
            }
            offset += piece.len;
        }
        // Relaxed: the numbers are only to differ.
        let id = RegionId(self.numbers.fetch_add(1, Ordering::Relaxed) + 1);
        let pieces = extents.iter().map(|e| (e.offset, e.len, e.is_pinned())).collect();
        let source = RegionSource::AdoptedRegion(Owned::new(adoptee.memory));
        let region = Region {
            id,
            base: adoptee.base,
            len,
            extents,
            node: None,
            ready: 0,
            whole: false,
            source,
            context,
        };
        let info = region.info();
        let mut progress = self.progress.lock();
        progress.regions.push(region);
        progress.pinning.busy += busy;
        progress.pinning.made += len;
        progress.pinning.longest_call = progress.pinning.longest_call.max(longest);
        Ok(AdoptedRegion { info, pieces })
    }

    /// The pool serves from all of an adopted region now.
    pub(crate) fn served(self: &Arc<Self>, id: RegionId) {
        self.is_whole(id);
        let again = self.progress.lock().regions.iter().any(|r| r.id == id && r.unpinned(0).is_some());
        if again {
            self.pin_again_after(AGAIN);
        }
        self.progress.lock().busy -= 1;
        self.wake();
    }

    /// Pins a piece. Returns whether it is pinned, and how long the call took. With [`Unpinned::Allow`] a piece that is
    /// not pinned is no error.
    fn pin_piece(&self, device: &Arc<Context>, piece: AdoptedPiece) -> (Result<bool>, Duration) {
        let context = device.clone();
        let called = device.worker().call(move || {
            let AdoptedPiece { start, len } = { piece };
            let before = Instant::now();
            // SAFETY: whole pages of memory that the adoption owns, and keeps until they were unregistered.
            let pinned = context.noting(unsafe { context.driver().register(start, len, false) });
            Ok((pinned, before.elapsed()))
        });
        let (pinned, took) = called.unwrap_or_else(|error| (Err(error), Duration::ZERO));
        let pinned = match pinned {
            Ok(()) => Ok(true),
            Err(e) if self.options.unpinned == Unpinned::Allow && e.class() == ErrorClass::Transient => {
                crate::foreign::warn!(
                    target: "pinpool::region::unpinned", device = device.name(), bytes = piece.len, error = %e,
                    "adopted memory is not pinned: copies from it are slower and may block"
                );
                Ok(false)
            }
            Err(e) => Err(e),
        };
        (pinned, took)
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
            unsafe { context.driver().unregister(start, len) }
        });
        if let Err(error) = unpinned {
            device.holds().leaked(1);
            crate::foreign::error!(
                target: "pinpool::region::leak", device = device.name(), bytes = adoptee.len, %error,
                "adopted memory cannot be unpinned: it is leaked"
            );
            clean = false;
        }
    }
    clean
}

/// An adopted region whose extents are to be handed over.
pub(crate) struct AdoptedRegion {
    pub(crate) info: RegionInfo,
    /// Offset, length, and whether it is pinned.
    pieces: Vec<(usize, usize, bool)>,
}

impl AdoptedRegion {
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (NonNull<u8>, usize, bool)> + '_ {
        // SAFETY: within the region.
        self.pieces.iter().map(|&(offset, len, pinned)| (unsafe { self.info.base.add(offset) }, len, pinned))
    }
}
