//! DLPack 1: a buffer as a tensor of bytes, for libraries that import by `from_dlpack`.
//!
//! The consumer of a capsule renames it, and calls the deleter when it is done with the tensor, on
//! any thread, with the interpreter's lock or without. A capsule that nobody consumed deletes its
//! tensor itself.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};

use pyo3::ffi;
use pyo3::prelude::*;

use crate::buffer::Buffer;

pub(crate) const CPU: c_int = 1;
pub(crate) const CUDA_HOST: c_int = 3;
const NAME: &CStr = c"dltensor_versioned";

/// `DLManagedTensorVersioned` with its `DLTensor`, as `dlpack.h` has them.
#[repr(C)]
struct Tensor {
    version: [u32; 2],
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Tensor)>,
    flags: u64,
    data: *mut c_void,
    device: [c_int; 2],
    dimensions: c_int,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    offset: u64,
}

/// A tensor, and what it points to.
struct Exported {
    tensor: Tensor,
    shape: i64,
    stride: i64,
    buffer: Py<Buffer>,
}

/// A capsule with a tensor over all of the buffer, which counts as a view until the tensor is
/// deleted.
pub(crate) fn capsule(buffer: &Bound<'_, Buffer>, device: c_int) -> PyResult<Py<PyAny>> {
    let (data, len) = buffer.get().view()?;
    let tensor = Tensor {
        version: [1, 0],
        manager: std::ptr::null_mut(),
        deleter: Some(delete),
        flags: 0,
        data,
        device: [device, 0],
        dimensions: 1,
        // Unsigned numbers.
        code: 1,
        bits: 8,
        lanes: 1,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        offset: 0,
    };
    let exported = Exported { tensor, shape: len as i64, stride: 1, buffer: buffer.clone().unbind() };
    let exported = Box::into_raw(Box::new(exported));
    // SAFETY: just made, and nobody else's yet.
    let tensor = unsafe {
        (*exported).tensor.manager = exported.cast();
        (*exported).tensor.shape = &raw mut (*exported).shape;
        (*exported).tensor.strides = &raw mut (*exported).stride;
        &raw mut (*exported).tensor
    };
    // SAFETY: the name is static. The capsule has the tensor now, and deletes it unless a consumer
    // takes it.
    let made = unsafe { ffi::PyCapsule_New(tensor.cast(), NAME.as_ptr(), Some(end)) };
    if made.is_null() {
        // SAFETY: nobody has the tensor.
        unsafe { delete(tensor) };
        return Err(PyErr::fetch(buffer.py()));
    }
    // SAFETY: a new reference, which is this one's.
    Ok(unsafe { Bound::from_owned_ptr(buffer.py(), made) }.unbind())
}

/// # Safety
/// Called once for a tensor of [`capsule`], by whoever has it.
unsafe extern "C" fn delete(tensor: *mut Tensor) {
    // SAFETY: `capsule` has made it of a box, which `manager` is.
    let exported = unsafe { Box::from_raw((*tensor).manager.cast::<Exported>()) };
    exported.buffer.get().unview();
    // Without an interpreter the buffer is never dropped.
    let mut buffer = Some(exported.buffer);
    Python::try_attach(|_| drop(buffer.take()));
    std::mem::forget(buffer);
}

/// # Safety
/// The interpreter's, at the end of a capsule of [`capsule`].
unsafe extern "C" fn end(capsule: *mut ffi::PyObject) {
    // SAFETY: a capsule that was taken has another name.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}
