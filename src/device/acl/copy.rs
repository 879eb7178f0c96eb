//! Copies, and which of them may be asynchronous.
//!
//! `aclrtMemcpyAsync` is for page-locked host memory and, by the documentation of CANN 6.0 to 9.0,
//! for multiples of 64 bytes on both sides. Some versions take pageable memory, and the copy then
//! fails in unpredictable ways. So every other copy is made *in place*: the call drains the stream,
//! then copies by `aclrtMemcpy`, which takes any memory, and returns when the copy is complete.
//! (Another thread's work on the stream comes before or after it, as it may anyway.)
//!
//! Copies of borrowed memory are made in place, too, but by way of memory of the crate's own, and
//! longer ones in parts, between which other threads' work may come. The documentation does not say
//! that a copy ends with its device: when it is lost, the copy may still read or write. The crate's
//! memory is then leaked; borrowed memory never had its address given to the library.

use std::ffi::{c_int, c_void};

use super::host::locked;
use super::{Acl, stream};
use crate::device::vendor::wait_out;
use crate::device::{DevicePtr, StreamHandle, Transfer};
use crate::error::Result;

/// Addresses of an asynchronous copy are multiples of this, in bytes, on both sides.
const COPY_ALIGN: usize = 64;
/// The most bytes of borrowed memory that are copied at a time.
const STAGED: usize = 4 << 20;

/// acl_rt.h: aclrtMemcpyKind.
const HOST_TO_DEVICE: c_int = 1;
const DEVICE_TO_HOST: c_int = 2;
const DEVICE_TO_DEVICE: c_int = 3;

/// The arguments of the library's copy calls, for a copy with the device on one side or both.
#[derive(Clone, Copy)]
struct CopyCall {
    dst: *mut c_void,
    src: *const c_void,
    len: usize,
    kind: c_int,
}

fn device(ptr: DevicePtr) -> *mut c_void {
    std::ptr::without_provenance_mut(ptr.0 as usize)
}

impl Acl {
    /// # Safety
    /// As for [`Driver::copy`](crate::device::Driver::copy).
    pub(super) unsafe fn submit_copy(&self, on: StreamHandle, transfer: Transfer) -> Result<()> {
        let (call, is_locked) = match transfer {
            Transfer::Upload { src, dst, len } => {
                let call = CopyCall { dst: device(dst), src: src.cast(), len, kind: HOST_TO_DEVICE };
                (call, locked(src.addr(), len).is_some())
            }
            Transfer::Download { src, dst, len } => {
                let call = CopyCall { dst: dst.cast(), src: device(src), len, kind: DEVICE_TO_HOST };
                (call, locked(dst.addr(), len).is_some())
            }
            Transfer::OnDevice { src, dst, len } => {
                (CopyCall { dst: device(dst), src: device(src), len, kind: DEVICE_TO_DEVICE }, true)
            }
            Transfer::OnHost { src, dst, len } => {
                let _current = self.current()?;
                self.drained_stream(on)?;
                // SAFETY: the caller promises both ranges; the stream's earlier work is complete.
                unsafe { dst.copy_from_nonoverlapping(src, len) };
                return Ok(());
            }
        };
        if !is_locked || call.dst.addr() % COPY_ALIGN != 0 || call.src.addr() % COPY_ALIGN != 0 {
            // SAFETY: the caller's promise holds for longer than this call.
            return unsafe { self.copy_in_place(on, call) };
        }
        let _current = self.current()?;
        let CopyCall { dst, src, len, kind } = call;
        // SAFETY: the caller promises the page-locked memory; the device's is in its allocation.
        let code = unsafe { self.api.copy_async.call(dst, len, src, len, kind, stream(on)) };
        self.said("aclrtMemcpyAsync", code)
    }

    /// # Safety
    /// As for [`Driver::copy_blocking`](crate::device::Driver::copy_blocking).
    pub(super) unsafe fn copy_here(&self, on: StreamHandle, transfer: Transfer) -> Result<()> {
        let (host, there, len, up) = match transfer {
            Transfer::Upload { src, dst, len } => (src.cast_mut(), device(dst), len, true),
            Transfer::Download { src, dst, len } => (dst, device(src), len, false),
            Transfer::OnDevice { .. } | Transfer::OnHost { .. } => {
                // SAFETY: the caller promises both ranges until this returns.
                let copied = unsafe { self.submit_copy(on, transfer) };
                return wait_out(&self.name, || self.drained()).and(copied);
            }
        };
        // Whole pages of its own: other memory on a page may be page-locked, and the library may
        // refuse memory that is locked in part.
        let page = crate::os::page_size();
        let mut staging = vec![0_u8; len.min(STAGED).next_multiple_of(page) + page];
        let first_page = staging.as_ptr().align_offset(page).min(page);
        for from in (0..len).step_by(STAGED) {
            let (len, there) = (STAGED.min(len - from), there.wrapping_byte_add(from));
            let staged: *mut u8 = staging[first_page..].as_mut_ptr();
            let call = match up {
                true => CopyCall { dst: there, src: staged.cast(), len, kind: HOST_TO_DEVICE },
                false => CopyCall { dst: staged.cast(), src: there, len, kind: DEVICE_TO_HOST },
            };
            // SAFETY: within the range, which the caller promises until this returns; the staging
            // memory lies elsewhere, has room for `len` bytes, and is free: the copy before has
            // succeeded.
            let copied = unsafe {
                let host = host.add(from);
                if up {
                    staged.copy_from_nonoverlapping(host, len);
                }
                let copied = self.copy_in_place(on, call);
                if !up && copied.is_ok() {
                    host.copy_from_nonoverlapping(staged, len);
                }
                copied
            };
            if let Err(error) = copied {
                // Where the device is lost or the process ends, the copy may still run.
                if self.alive().is_err() {
                    self.leaked();
                    std::mem::forget(staging);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Copies after the stream's earlier work, and returns when the copy has ended, on an error
    /// too. It may not have ended if the device is lost.
    ///
    /// # Safety
    /// Host memory is valid, and nothing else writes it (as a source) or touches it (as a target),
    /// until the copy has ended.
    unsafe fn copy_in_place(
        &self,
        on: StreamHandle,
        CopyCall { dst, src, len, kind }: CopyCall,
    ) -> Result<()> {
        let copied = {
            let _current = self.current()?;
            // Where this fails nothing of the copy was submitted.
            self.drained_stream(on)?;
            // SAFETY: the caller promises the host memory; the device's is within its allocation.
            self.said("aclrtMemcpy", unsafe { self.api.copy.call(dst, len, src, len, kind) })
        };
        if copied.is_err() {
            // A copy that failed may still run.
            let _ = wait_out(&self.name, || self.drained());
        }
        copied
    }
}
