//! `pinpool top`: what fetches and shows is called here, since the command would take the minutes that it remembers.
//! What a run of the command alone shows is in `fetching`.

#[allow(dead_code, reason = "the dashboard's tests use the rest")]
#[path = "../../../../../tests/operators/dashboard/fake.rs"]
mod fake;
mod fetching;
mod showing;
