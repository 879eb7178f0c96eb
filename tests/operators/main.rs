//! What operators see: events, metrics and snapshots; and the dashboard, `pinpool top` and the alerts that read them.

mod dashboard;
#[cfg(feature = "cuda")]
#[path = "../support/record.rs"]
mod record;
#[path = "../support/mod.rs"]
mod support;
#[cfg(feature = "cuda")]
mod telemetry;
