//! Simulated drivers: a `libcuda` and a `libascendcl` without a device, for tests on machines without an accelerator.
//!
//! [`cuda`] and [`acl`] have a driver's entry points each, over one machine. It keeps the drivers' rules as strictly as
//! they can be read ([`rules`] lists them). Where a driver would let something pass that pinpool's own contract
//! forbids, the simulation does what the driver does and writes the violation down.
//!
//! # How it works
//!
//! There are no threads and no devices. A stream is a queue; what is submitted is queued and nothing more. Queued work
//! runs when a call finds out about it, and no more of it than the call needs: a query of an event first says "not ready" a few
//! times, then runs what the event covers; synchronising runs all of it. So every copy is as late as the rules allow,
//! and a program that reads or reuses memory early gets the wrong bytes each time, not now and then. (What this cannot
//! show is a copy that runs *while* the CPU works: for that there are real drivers and the host device's threads.)
//!
//! Device memory is ordinary memory under made-up addresses that no CPU can read, filled with 0xA5 when it is
//! allocated, as is host memory. Contexts, streams and events are numbers that are never used twice, unless a test
//! wants the handle of a destroyed stream to be given to the next one.
//!
//! # Worlds
//!
//! A *world* is a machine with a few devices of one vendor: what it has, what is queued there, what was broken, and
//! which calls are to fail. Each is behind a lock of its own. A test makes a world for itself ([`Machine`]), hands the
//! entry points to pinpool in its own process, and opens devices by the numbers that the world has given them. Handles
//! and device addresses carry the number of their world, so a call finds its world by them, and a call without any by
//! the calling thread's current context. Tests that run at the same time do not see each other.
//!
//! World 0 is that of a library which is loaded by its path. The variable `PINPOOL_SIM` has the commands that set it
//! up, with semicolons between them (`devices 6 268435456;fail aclInit 1 500000 false`), and the program that loaded it
//! sends its GPUs more of them by `sim_cuda`. In a process that has worlds of its own, calls of threads that are in
//! none of them come there too; `strays` says which rules these broke.
//!
//! # The end of the process
//!
//! The library takes itself down in an exit handler, which is registered when it is loaded, and again when it is
//! initialised. A call that comes later is refused and written down as END-1, and calls that are under way at that
//! moment as END-2: a vendor's library may crash then. The report of a process that ends so is written to the file that
//! `PINPOOL_SIM_REPORT` names, and then the handler takes some time, in which late calls can come.

// A call has the name that the driver's header gives it.
#![allow(non_snake_case)]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a driver has locks and threads of its own, which are none of the crate's"
)]

pub mod acl;
mod common;
mod control;
pub mod cuda;
mod end;
pub mod rules;
mod world;

pub use common::Machine;
pub use world::Fault;
