//! GPUs: on the simulated driver, and on a real GPU where `PINPOOL_REQUIRE` names one.
//!
//! `standin` tests the simulated driver itself. `hardware` and `cudarc` use the machine's driver wherever it
//! has a GPU.

#![cfg(all(feature = "cuda", target_os = "linux"))]

mod copier;
mod cudarc;
mod driver;
mod graphs;
mod hardware;
mod memory;
mod nodes;
mod per_thread;
mod pointers;
#[path = "../support/record.rs"]
mod record;
mod rig;
mod spread;
mod standin;
mod streams;
#[path = "../support/mod.rs"]
mod support;
mod systems;
