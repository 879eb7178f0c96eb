//! What is in flight: waited for, polled, returned or lost.

use super::*;

impl World<'_> {
    pub(super) fn take_flight(&mut self, at: usize) -> Option<Flight> {
        (!self.flights.is_empty()).then(|| self.flights.swap_remove(at % self.flights.len()))
    }

    /// Something in flight is done: all copies that it waited for have run.
    fn done(&mut self, after: &[u64]) {
        self.sweep();
        assert!(self.pool.is_none() || self.have_run(after), "it is done before its copies have run");
    }

    /// A buffer has returned, and holds what it should.
    fn back(&mut self, buf: PinnedBuf, trip: Trip) {
        self.done(&trip.after);
        assert_eq!(buf.capacity(), trip.capacity);
        match trip.range {
            Some(known) => assert_eq!(known, range(&buf), "another buffer came back"),
            // Claimed: host-ready now, so nothing of an earlier owner may be left.
            None => self.assert_free(range(&buf)),
        }
        let bytes = buf.to_vec();
        assert!(bytes == trip.bytes, "a buffer came back with wrong bytes");
        self.bufs.push(Held { buf, bytes });
    }

    /// A wait has ended with an error.
    fn lost(&mut self, trip: Trip, error: &Error) {
        if matches!(error, Error::Timeout(_)) {
            return self.tally.note("in flight: wait timed out");
        }
        self.tally.note("in flight: wait ended by a loss");
        assert!(self.tolerant(), "no fault, and yet: {error}");
        self.graves.extend(trip.range);
    }

    pub(super) fn wait(&mut self, at: usize) {
        let Some(Flight { handle, trip, .. }) = self.take_flight(at) else { return };
        match handle.wait() {
            Ok(buf) => self.back(buf, trip),
            Err(error) => {
                // A failed wait loses the buffer, so it stands for a drop.
                self.dropped(&trip);
                self.lost(trip, &error);
            }
        }
    }

    /// The handle to a buffer in flight is gone.
    pub(super) fn dropped(&mut self, trip: &Trip) {
        let Some(range) = trip.range else { return };
        self.holds.push(Hold { range, after: trip.after.clone(), lane: trip.lane });
    }

    pub(super) fn keep(&mut self, flight: Flight, keep: bool) {
        match keep {
            true => self.flights.push(flight),
            false => self.dropped(&flight.trip),
        }
    }

    pub(super) fn wait_for(&mut self, waiter: usize, other: usize) {
        self.sweep();
        let after = self.outstanding(other);
        let result = self.lanes[waiter].stream.wait_for(&self.lanes[other].stream);
        if self.lanes[waiter].device != self.lanes[other].device {
            return assert!(matches!(result, Err(Error::Mismatch { .. })), "{result:?}");
        }
        if let Err(error) = result {
            return assert!(self.tolerant(), "no fault, and yet: {error}");
        }
        if !after.is_empty() {
            self.tally.note("stream waited for a busy one");
        }
        let from = self.id();
        self.behind.push(Behind { lane: waiter, from, after });
    }

    pub(super) fn is_done(&mut self, at: usize) {
        if self.flights.is_empty() {
            return;
        }
        let Flight { handle, trip, .. } = &self.flights[at % self.flights.len()];
        match handle.is_done() {
            Ok(true) => {
                let after = trip.after.clone();
                self.done(&after);
            }
            Ok(false) => {}
            Err(error) => assert!(self.tolerant(), "no fault, and yet: {error}"),
        }
    }

    pub(super) fn poll_flight(&mut self, at: usize) {
        let Some(mut flight) = self.take_flight(at) else { return };
        let flag = flight.flag.get_or_insert_with(Arc::default).clone();
        let woken = flag.0.swap(false, Ordering::SeqCst);
        let waker = Waker::from(flag);
        match Pin::new(&mut flight.handle).poll(&mut Context::from_waker(&waker)) {
            Poll::Pending => {
                assert!(!woken, "woken in vain");
                self.flights.push(flight);
            }
            Poll::Ready(Ok(buf)) => {
                self.tally.note("in flight: awaited, ready");
                self.back(buf, flight.trip);
            }
            Poll::Ready(Err(error)) => self.lost(flight.trip, &error),
        }
    }
}
