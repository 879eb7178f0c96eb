//! Copies between host memory that a driver makes in a stream's order by calling a function of ours on a thread of its
//! own. The function makes no driver call.
//!
//! What it is to copy is found by a number, so that one which is never called (since the driver refused it, or the device
//! died) leaves nothing but an entry: nobody can say that it will not be called after all.

use std::ffi::c_void;

use crate::locks::Mutex;
use slab::Slab;

/// What a host function is to copy.
struct HostCopy {
    src: *const u8,
    dst: *mut u8,
    len: usize,
}

// SAFETY: whoever submits it vouches for both ranges until the work was seen complete, on whichever thread it runs.
unsafe impl Send for HostCopy {}

/// The copies that host functions have been queued for, each known to its function by its place.
static COPIES: Mutex<Slab<HostCopy>> = Mutex::new(Slab::new());

/// A function and its argument, by which these bytes are copied once. Calling it is as unsafe as the copy is.
pub(crate) fn copy(
    src: *const u8,
    dst: *mut u8,
    len: usize,
) -> (unsafe extern "C" fn(*mut c_void), *mut c_void) {
    let place = COPIES.lock().insert(HostCopy { src, dst, len });
    (run, std::ptr::without_provenance_mut(place))
}

/// Makes no driver call.
///
/// # Safety
/// `place` is that of a [`HostCopy`] in [`COPIES`], whose two ranges are as `Driver::copy` has them.
unsafe extern "C" fn run(place: *mut c_void) {
    let copy = COPIES.lock().try_remove(place.addr());
    if let Some(HostCopy { src, dst, len }) = copy {
        // SAFETY: the caller's word.
        unsafe { dst.copy_from_nonoverlapping(src, len) };
    }
}
