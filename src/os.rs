//! placeholder
#![allow(unsafe_code)]
use std::ptr::NonNull;
pub(crate) fn membarrier_register() -> bool { false }
pub(crate) fn membarrier() {}
pub(crate) fn page_size() -> usize { 4096 }
pub(crate) fn at_fork(_: fn(), _: fn(), _: fn()) -> bool { true }
pub(crate) fn map(_len: usize, _a: usize) -> crate::Result<NonNull<u8>> { Err(crate::Error::Closed) }
pub(crate) unsafe fn unmap(_b: NonNull<u8>, _len: usize) { }
pub(crate) unsafe fn dont_fork(_b: NonNull<u8>, _len: usize) -> bool { true}
pub(crate) unsafe fn advise_huge(_b: NonNull<u8>, _len: usize) -> bool { true}
