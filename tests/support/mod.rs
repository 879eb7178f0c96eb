//! What the executables of tests/ share: see tests/README.md.

#![allow(dead_code, unused_imports, unused_macros, reason = "each executable uses a part of it")]

pub mod doubles;
pub mod kernels;
pub mod panicking;
pub mod process;
pub mod rig;
pub mod skip;

pub(crate) use process::own_process;
pub(crate) use skip::skip;
