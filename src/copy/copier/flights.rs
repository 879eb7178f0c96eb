//! The copies of chunks that are in flight in one direction, and which thread finds out that they are complete.
//!
//! Any thread that needs room, or looks after its own chunks, asks which copies are complete: the thread that submitted a
//! copy may be busy filling its next segment. Asking is a role that one thread has at a time. It takes the copies out,
//! asks without the lock, and puts back those that are in flight, before those that were submitted meanwhile.

use crate::sync::Mutex;

/// See the module's page. `S`: a copy that was submitted.
pub(super) struct Flights<S> {
    state: Mutex<Flying<S>>,
}

struct Flying<S> {
    /// Bulk copies that are in flight or about to be submitted.
    bulk: usize,
    sent: Vec<S>,
    /// A thread has taken out all that were sent, to ask about them.
    is_asking: bool,
}

impl<S> Flights<S> {
    pub(super) fn new() -> Self {
        Self { state: Mutex::new(Flying { bulk: 0, sent: Vec::new(), is_asking: false }) }
    }

    /// Whether there is room for a bulk copy, where so many may be in flight. After `true` [`release`](Self::release) is
    /// called, when it is in flight no more or was not submitted.
    pub(super) fn reserve(&self, depth: usize) -> bool {
        let mut flying = self.state.lock();
        let room = flying.bulk < depth;
        flying.bulk += usize::from(room);
        room
    }

    pub(super) fn release(&self) {
        self.state.lock().bulk -= 1;
    }

    /// A copy was submitted.
    pub(super) fn sent(&self, sent: S) {
        self.state.lock().sent.push(sent);
    }

    /// Takes the role of asking. `None`: another thread has it, or nothing is in flight.
    pub(super) fn ask(&self) -> Option<Asking<'_, S>> {
        let mut flying = self.state.lock();
        if flying.is_asking || flying.sent.is_empty() {
            return None;
        }
        flying.is_asking = true;
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
        flying.is_asking = false;
        let later = std::mem::replace(&mut flying.sent, std::mem::take(&mut self.left));
        flying.sent.extend(later);
    }
}
