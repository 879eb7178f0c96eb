//! Accelerators, in what the contract's suite does not test: on simulated devices, and on real ones where
//! `PINPOOL_REQUIRE` names one.

#![cfg(all(any(feature = "acl", feature = "cuda"), target_os = "linux"))]

#[cfg(feature = "acl")]
mod acl;
#[cfg(feature = "cuda")]
mod cuda;
mod opening;
#[path = "../support/record.rs"]
mod record;
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "what only drivers of GPUs have, and real ones"))]
mod script;
#[path = "../support/mod.rs"]
mod support;
