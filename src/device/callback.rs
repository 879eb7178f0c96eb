//! Copies from host memory to host memory in a stream's order: a driver calls a function of the crate's on one of the
//! driver's own threads, and the function makes the copy and no driver call.
//!
//! The function's argument is a number, the key of an entry in a table. A driver may refuse a function or lose its
//! device, and may yet call the function later, so the entry can never be freed on such a guess. It stays then, and
//! that is all that is leaked.

use std::ffi::c_void;

use crate::locks::Mutex;
use slab::Slab;

/// What a host function copies.
struct HostCopy {
    src: *const u8,
    dst: *mut u8,
    len: usize,
}

// SAFETY: the caller that submits it vouches for both ranges until the work was seen complete, on whichever thread it
// runs.
unsafe impl Send for HostCopy {}

/// The copies that host functions have been queued for. A function knows its copy by its key here.
static COPIES: Mutex<Slab<HostCopy>> = Mutex::new(Slab::new());

/// A function and its argument: the first call copies these bytes, and later ones do nothing. A call needs what the
/// copy needs.
pub(crate) fn copy(
    src: *const u8,
    dst: *mut u8,
    len: usize,
) -> (unsafe extern "C" fn(*mut c_void), *mut c_void) {
    let place = COPIES.lock().insert(HostCopy { src, dst, len });
    (run, std::ptr::without_provenance_mut(place))
}

/// Makes the copy with this key, once.
///
/// # Safety
/// `place` is the key of a [`HostCopy`] in [`COPIES`], and its two ranges are as `Driver::copy` asks for.
unsafe extern "C" fn run(place: *mut c_void) {
    let copy = COPIES.lock().try_remove(place.addr());
    if let Some(HostCopy { src, dst, len }) = copy {
        // SAFETY: the driver calls this in the stream's order, and the caller of `Driver::copy` has promised both
        // ranges until that work is complete.
        unsafe { dst.copy_from_nonoverlapping(src, len) };
    }
}
