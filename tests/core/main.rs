//! The pool itself, on the host device: checkout and return, threads, requests that wait, growth and its limits,
//! closing, host functions, and a fork.

mod async_server;
mod buffers;
mod closing;
mod errors;
mod fork;
mod launch;
mod limits;
mod memlock;
mod regressions;
mod running_out;
mod scale;
mod smoke;
#[path = "../support/mod.rs"]
mod support;
mod threads;
mod too_large;
