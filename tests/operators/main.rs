//! What operators see: events, metrics and snapshots; and the dashboard, `pinpool top` and the alerts that read them.

mod dashboard;
#[path = "../support/mod.rs"]
mod support;
mod telemetry;
