//! The dashboard as an operator meets it: the page in a browser, and the metrics in a Prometheus. (`pinpool top`
//! has tests beside the command.)
//!
//! The example's server runs within this process, under its load; conditions that it does not reach at once (alarms, a
//! server that ends, hostile names) come from [`fake`] servers. The browser and Prometheus are real programs, Debian's
//! packages `chromium` and `prometheus`. Where one is missing its tests say that they were skipped, and fail if
//! `PINPOOL_REQUIRE` names `browser` or `prometheus`.

#![cfg(all(feature = "metrics", target_os = "linux"))]

mod browser;
mod exported;
mod fake;
mod programs;
mod prometheus;
mod server;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use server::{PATIENCE, get, server};

/// A file of the example.
fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/dashboard").join(name)
}

/// Browsers and the like are heavy: one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
