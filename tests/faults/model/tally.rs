//! How often each transition was taken, over all cases. One that never was fails the run: then a test of it proves
//! nothing.

use std::collections::BTreeMap;

use crate::support::hand::Failure;

#[derive(Debug, Default)]
pub struct Tally(BTreeMap<String, u64>);

/// Transitions that a run must take: those that few sequences take, and those of which many of the others are
/// made.
const REQUIRED: &[&str] = &[
    "checkout refused: withheld for a waiter",
    "checkout beside a waiter",
    "checkout refused: impossible",
    "take-back",
    "unpinned growth",
    "trim",
    "timeout",
    "future woken",
    "future cancelled while waiting",
    "future cancelled after it was granted",
    "later waiter served after an equal one",
    "submit that failed but runs",
    "submit refused, buffer back",
    "claim used",
    "claim dropped unused",
    "claim waited for",
    "in flight: wait timed out",
    "in flight: wait ended by a loss",
    "in flight: awaited, ready",
    "streams overtook each other",
    "stream waited for a busy one",
    "copy ran after another stream's",
    "copy lost with its device",
    "quarantine",
    "request made anew",
    "ended quietly",
    "buffer used after its pool",
    "shut down while buffers were out",
    "shut down and drained",
    "waiter ended by a shutdown",
];

impl Tally {
    pub fn note(&mut self, what: &str) {
        self.add(what, 1);
    }

    pub fn add(&mut self, what: &str, n: u64) {
        if n > 0 {
            *self.0.entry(what.to_owned()).or_default() += n;
        }
    }

    /// What another part of the run has taken, too.
    pub fn add_all(&mut self, other: Self) {
        other.0.iter().for_each(|(what, count)| self.add(what, *count));
    }

    /// What is missing.
    pub fn missing(&self) -> Vec<String> {
        let faults = Failure::ALL.map(|failure| format!("fault: {failure:?}"));
        let required = REQUIRED.iter().map(|what| (*what).to_owned()).chain(faults);
        required.filter(|what| !self.0.contains_key(what)).collect()
    }
}
