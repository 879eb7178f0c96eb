//! The system calls. (placeholder)
#![allow(unsafe_code)]
pub(crate) fn membarrier_register() -> bool { false }
pub(crate) fn membarrier() {}
pub(crate) fn page_size() -> usize { 4096 }
pub(crate) fn at_fork(_: fn(), _: fn(), _: fn()) -> bool { true }
