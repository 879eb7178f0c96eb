//! How often each transition was taken, over all cases. One that never was fails the run: then a test of it proves
//! nothing.

use std::collections::BTreeMap;

use crate::support::hand::Failure;

#[derive(Debug, Default)]
pub struct Tally(BTreeMap<String, u64>);

/// Every transition that a run must take.
const REQUIRED: &[&str] = &[
    "checkout",
    "checkout on another thread",
    "checkout refused: exhausted",
    "checkout refused: withheld for a waiter",
    "checkout beside a waiter",
    "checkout refused: impossible",
    "checkout refused: bad request",
    "checkout of several",
    "checkout of several refused",
    "miss",
    "take-back",
    "grow",
    "growing failed",
    "unpinned growth",
    "trim",
    "wait",
    "timeout",
    "future ready at once",
    "future woken",
    "future cancelled while waiting",
    "future cancelled after it was granted",
    "later waiter served after an equal one",
    "upload",
    "upload of a part",
    "upload shared by two streams",
    "submit that failed but runs",
    "submit refused, buffer back",
    "upload refused by a dead device",
    "download",
    "copy within the device",
    "blocking copy",
    "hold",
    "claim",
    "claim used",
    "claim dropped unused",
    "claim waited for",
    "stream-ready but free",
    "refused: wrong stream",
    "refused: wrong device",
    "in flight: waited for",
    "in flight: wait timed out",
    "in flight: wait ended by a loss",
    "in flight: asked, done",
    "in flight: asked, not done",
    "in flight: awaited, ready",
    "in flight: awaited, pending",
    "in flight: dropped",
    "in flight: forgotten",
    "buffer forgotten",
    "return on another thread",
    "stream stepped",
    "streams overtook each other",
    "stream hung",
    "stream resumed",
    "stream waited for a busy one",
    "stream waited for an idle one",
    "copy ran after another stream's",
    "synchronized",
    "everything drained",
    "device memory dropped under a copy",
    "copy arrived and was verified",
    "copy lost with its device",
    "quarantine",
    "poison",
    "device killed",
    "ended quietly",
    "pool dropped while buffers were out",
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
            match self.0.get_mut(what) {
                Some(count) => *count += n,
                None => drop(self.0.insert(what.to_owned(), n)),
            }
        }
    }

    /// What another part of the run has taken, too.
    pub fn add_all(&mut self, other: Self) {
        other.0.iter().for_each(|(what, count)| self.add(what, *count));
    }

    pub fn fault(&mut self, call: &str, failure: Failure) {
        self.note(&fault_name(call, failure));
    }

    /// Prints everything, and says what is missing.
    pub fn report(&self, faults: impl Iterator<Item = (&'static str, Failure)>) -> Vec<String> {
        println!("{:>9}  transition", "taken");
        for (what, count) in &self.0 {
            println!("{count:>9}  {what}");
        }
        let faults = faults.map(|(call, failure)| fault_name(call, failure));
        let required = REQUIRED.iter().map(|s| (*s).to_owned()).chain(faults);
        required.filter(|what| !self.0.contains_key(what)).collect()
    }
}

fn fault_name(call: &str, failure: Failure) -> String {
    format!("fault: {call} {failure:?}")
}
