//! What operators see: events, metrics and snapshots; and the dashboard, `pinpool top` and the alerts that read them.

#![cfg(all(feature = "cuda", feature = "metrics", target_os = "linux"))]

mod dashboard;
#[path = "../support/record.rs"]
mod record;
#[path = "../support/mod.rs"]
mod support;
mod telemetry;
