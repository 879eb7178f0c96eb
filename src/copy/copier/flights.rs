//! The copies of chunks that are in flight in one direction, and which thread finds out that they are complete.
//!
//! At most so many are in flight as the copier is deep, so that a copy of the program's own waits for no more than
//! these. Any thread that needs room, or looks after its own chunks, asks which of them are complete: the thread that
//! submitted a copy may be busy filling its next segment. Asking is a role that one thread has at a time. It takes the
//! copies out, asks without the lock, and puts back those that are in flight, before those that were submitted
//! meanwhile.

use crate::sync::Mutex;

/// See the module's page. `S`: a copy that was submitted.
pub(super) struct Flights<S> {
    /// Copies at most.
    depth: usize,
    state: Mutex<Flying<S>>,
}

struct Flying<S> {
    /// Copies that are about to be submitted.
    reserved: usize,
    sent: Vec<S>,
    /// How many of those a thread has taken out to ask about them.
    asked: usize,
}

impl<S> Flights<S> {
    pub(super) fn new(depth: usize) -> Self {
        Self { depth, state: Mutex::new(Flying { reserved: 0, sent: Vec::new(), asked: 0 }) }
    }

    /// Whether there is room for a copy. After `true` [`sent`](Self::sent) is called.
    pub(super) fn reserve(&self) -> bool {
        let mut flying = self.state.lock();
        let room = flying.reserved + flying.sent.len() + flying.asked < self.depth;
        flying.reserved += usize::from(room);
        room
    }

    /// A copy was submitted, or (`None`) was not.
    pub(super) fn sent(&self, sent: Option<S>) {
        let mut flying = self.state.lock();
        flying.reserved -= 1;
        flying.sent.extend(sent);
    }

    /// Takes the role of asking. `None`: another thread has it, or nothing is in flight.
    pub(super) fn ask(&self) -> Option<Asking<'_, S>> {
        let mut flying = self.state.lock();
        if flying.asked > 0 || flying.sent.is_empty() {
            return None;
        }
        flying.asked = flying.sent.len();
        let left = std::mem::take(&mut flying.sent);
        drop(flying);
        Some(Asking { flights: self, left })
    }
}

/// The role of asking. Its end puts back what is left: the copies that are in flight.
pub(super) struct Asking<'a, S> {
    flights: &'a Flights<S>,
    pub(super) left: Vec<S>,
}

impl<S> Drop for Asking<'_, S> {
    fn drop(&mut self) {
        let mut flying = self.flights.state.lock();
        flying.asked = 0;
        let later = std::mem::replace(&mut flying.sent, std::mem::take(&mut self.left));
        flying.sent.extend(later);
    }
}
