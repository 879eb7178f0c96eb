//! `pinpool top`: against the example's server, fabricated ones, and none.

#![cfg(target_os = "linux")]
#![allow(dead_code, reason = "what it shares with the dashboard's tests has more")]

#[path = "../../src/cli/amount.rs"]
mod amount;
#[path = "../../src/cli/escape.rs"]
mod escape;
#[path = "../../../../tests/operators/dashboard/fake.rs"]
mod fake;
mod history;
#[path = "../../../../tests/operators/dashboard/programs.rs"]
mod programs;
#[path = "../../../../tests/operators/dashboard/server.rs"]
mod server;
#[path = "../../../../tests/support/mod.rs"]
mod support;
mod top;

use server::{PATIENCE, server};
