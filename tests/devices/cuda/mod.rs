//! GPUs: on the simulated driver, and on a real GPU where `PINPOOL_REQUIRE` names one.
//!
//! `standin` tests the simulated driver itself. `hardware` and `cudarc` use the machine's driver wherever it
//! has a GPU.

mod copier;
mod cudarc;
mod graphs;
mod hardware;
mod memory;
mod per_thread;
mod rig;
mod spread;
mod standin;
mod streams;
mod systems;
