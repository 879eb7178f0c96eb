//! `pinpool top`: its files that fetch and show are compiled a second time here, since the command would take
//! the minutes that it remembers. What a run of the command alone shows is in `fetching`.

#[path = "../../../../../tests/operators/dashboard/fake.rs"]
mod fake;
mod fetching;
#[path = "../../../src/cli/top/scrape.rs"]
mod scrape;
mod showing;
#[allow(dead_code, reason = "the command's loop uses the rest")]
#[path = "../../../src/cli/top/view.rs"]
mod view;
