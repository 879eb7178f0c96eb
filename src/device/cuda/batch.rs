//! Many copies by one call: `cuMemcpyBatchAsync`.
//!
//! A call of its own costs a small copy some 2.5 us, a place in a batch 0.3 us. The driver's conditions (driver API
//! manual on the call) are kept above and here: a stream of ours, never the default one and never captured; no length
//! of zero; nothing that depends on another copy of the batch. There are two forms of the call, of CUDA 12.8 and of
//! 13.0, which differ in whether it says where it failed. That place is not used: after an error nobody knows which
//! copies of the batch were submitted, so each is submitted again by itself. A copy that runs twice writes the same
//! bytes twice, since its source is not written meanwhile; and then each error is its own copy's.
//!
//! Copies that are the rows of a rectangle are taken out first, and go by a call of their own (`rows.rs`).

#![allow(unsafe_code)]

use std::cell::RefCell;

use super::api::{CUdeviceptr, CUmemcpyAttributes, CudaCode};
use super::{Cuda, rows, stream};
use crate::device::{Driver, StreamHandle, Transfer};
use crate::error::{Error, Result};

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: sources are read in stream order, not earlier.
const IN_STREAM_ORDER: i32 = 1;

/// The call's arguments.
#[derive(Default)]
struct Lists {
    targets: Vec<CUdeviceptr>,
    sources: Vec<CUdeviceptr>,
    lengths: Vec<usize>,
}

thread_local! {
    /// Kept, so that a batch allocates nothing.
    static BATCH_LISTS: RefCell<Lists> = RefCell::new(Lists::default());
}

impl Lists {
    fn fill(&mut self, transfers: &[Transfer]) {
        let Self { targets, sources, lengths } = self;
        targets.clear();
        sources.clear();
        lengths.clear();
        for transfer in transfers {
            // All addresses are one space (driver API manual, "Unified Addressing").
            let (source, target, len) = match *transfer {
                Transfer::Upload { src, dst, len } => (src.expose_provenance() as u64, dst.0, len),
                Transfer::Download { src, dst, len } => (src.0, dst.expose_provenance() as u64, len),
                Transfer::OnDevice { src, dst, len } => (src.0, dst.0, len),
                Transfer::OnHost { src, dst, len } => {
                    (src.expose_provenance() as u64, dst.expose_provenance() as u64, len)
                }
            };
            targets.push(target);
            sources.push(source);
            lengths.push(len);
        }
    }
}

/// Whether a call for all of these settles them: it was taken, or nothing will be taken any more.
fn concluded(said: Result<()>, transfers: &[Transfer], failed: &mut dyn FnMut(usize, Error)) -> bool {
    match said {
        Ok(()) => true,
        Err(error) if error.is_device_lost() => {
            (0..transfers.len()).for_each(|place| failed(place, error.clone()));
            true
        }
        Err(_) => false,
    }
}

impl Cuda {
    /// As [`Driver::copy_many`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn copy_batch(
        &self,
        handle: StreamHandle,
        transfers: &[Transfer],
        failed: &mut dyn FnMut(usize, Error),
    ) {
        let mut from = 0;
        while from < transfers.len() {
            let (part, is_rectangle) = rows::part(transfers, from);
            from = part.end;
            let (first, part) = (part.start, &transfers[part]);
            let mut failed = |place, error| failed(first + place, error);
            // SAFETY: the caller's word.
            let done = is_rectangle
                && unsafe { self.try_rows(handle, part) }
                    .is_some_and(|said| concluded(said, part, &mut failed));
            if !done {
                // SAFETY: as above.
                unsafe { self.copy_part(handle, part, &mut failed) };
            }
        }
    }

    /// The same for copies that are no rectangle.
    ///
    /// # Safety
    /// As there.
    unsafe fn copy_part(
        &self,
        handle: StreamHandle,
        transfers: &[Transfer],
        failed: &mut dyn FnMut(usize, Error),
    ) {
        // A batch of one would cost more than a copy. What is within the host is a host function's.
        let batched = transfers.len() > 1
            && !transfers.iter().any(|transfer| matches!(transfer, Transfer::OnHost { .. }))
            // SAFETY: the caller's word.
            && unsafe { self.try_batch(handle, transfers) }.is_some_and(|said| {
                match &said {
                    Err(error) if !error.is_device_lost() => crate::foreign::debug!(
                        target: "pinpool::stream", device = &*self.name, %error, copies = transfers.len(),
                        "a batch was refused: its copies go one by one"
                    ),
                    _ => (),
                }
                concluded(said, transfers, failed)
            });
        if batched {
            return;
        }
        for (place, transfer) in transfers.iter().enumerate() {
            // SAFETY: the caller's word.
            if let Err(error) = unsafe { self.copy(handle, *transfer) } {
                failed(place, error);
            }
        }
    }

    /// All of them by one call. `None`: this driver has none.
    ///
    /// # Safety
    /// As for [`Driver::copy_many`].
    unsafe fn try_batch(&self, handle: StreamHandle, transfers: &[Transfer]) -> Option<Result<()>> {
        let (newer, older) = (self.api.copy_batch_v2, self.api.copy_batch);
        if newer.is_none() && older.is_none() {
            return None;
        }
        let _current = match self.current() {
            Ok(current) => current,
            Err(error) => return Some(Err(error)),
        };
        // One set of attributes for all, which begins with the first copy. Where memory lies the driver sees by itself.
        let mut attributes =
            CUmemcpyAttributes { source_order: IN_STREAM_ORDER, source: [0; 2], target: [0; 2], flags: 0 };
        let mut first = 0;
        BATCH_LISTS.with_borrow_mut(|lists| {
            lists.fill(transfers);
            let Lists { targets, sources, lengths } = lists;
            let (count, stream) = (transfers.len(), stream(handle));
            let code = if let Some(call) = newer {
                // SAFETY: the caller's word for the copies; the lists are read before the call returns.
                unsafe {
                    call(
                        targets.as_ptr(),
                        sources.as_ptr(),
                        lengths.as_ptr(),
                        count,
                        &raw mut attributes,
                        &raw mut first,
                        1,
                        stream,
                    )
                }
            } else if let Some(call) = older {
                let mut fault = 0;
                // SAFETY: as above.
                unsafe {
                    call(
                        targets.as_mut_ptr(),
                        sources.as_mut_ptr(),
                        lengths.as_mut_ptr(),
                        count,
                        &raw mut attributes,
                        &raw mut first,
                        1,
                        &raw mut fault,
                        stream,
                    )
                }
            } else {
                CudaCode::SUCCESS
            };
            Some(self.said("cuMemcpyBatchAsync", code))
        })
    }
}
