//! GPUs: on the stand-in driver of `tests/doubles/cuda`, and on a real GPU where `PINPOOL_REQUIRE` names one.
//!
//! `standin` tests the stand-in itself. `hardware` and `cudarc` use the machine's driver wherever it has a GPU.

#![cfg(all(feature = "cuda", target_os = "linux"))]

mod bulk;
mod copier;
mod cudarc;
mod driver;
mod graphs;
mod hardware;
mod memory;
mod nodes;
mod per_thread;
mod pieces;
mod pointers;
mod scattered;
mod sharing_faults;
mod spread;
mod standin;
mod streams;
#[path = "../support/mod.rs"]
mod support;
mod systems;
