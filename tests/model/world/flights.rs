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
        assert!(trip.allowed.contains(&bytes), "a buffer came back with wrong bytes");
        self.bufs.push(Held { buf, bytes });
    }

    /// A wait has ended with an error.
    fn lost(&mut self, trip: Trip, error: &Error, own: bool) {
        let timeout = matches!(error, Error::Timeout(_));
        self.tally.note(if timeout {
            "in flight: wait timed out"
        } else {
            "in flight: wait ended by a loss"
        });
        assert!(timeout || self.tolerant(), "no fault, and yet: {error}");
        self.graves.extend(trip.range.filter(|_| own && !timeout));
        self.detached.push(trip.capacity);
    }

    pub(super) fn wait(&mut self, at: usize) {
        let Some(Flight { handle, trip, .. }) = self.take_flight(at) else { return };
        let own = matches!(handle, Handle::Own(_));
        let result = match handle {
            Handle::Own(flight) => flight.wait().map(Some),
            Handle::Shared(flight) => flight.wait().map(|_| None),
            Handle::Nothing(flight) => flight.wait().map(|()| None),
        };
        match result {
            Ok(Some(buf)) => {
                self.tally.note("in flight: waited for");
                self.back(buf, trip);
            }
            Ok(None) => self.done(&trip.after),
            Err(error) => {
                // A failed wait loses the buffer, so it stands for a drop.
                if own {
                    self.dropped(&trip);
                }
                self.lost(trip, &error, own);
            }
        }
    }

    /// The handle to a buffer in flight is gone.
    fn dropped(&mut self, trip: &Trip) {
        let Some(range) = trip.range else { return };
        self.holds.push(Hold { range, after: trip.after.clone(), lane: trip.lane });
    }

    pub(super) fn keep(&mut self, flight: Flight, keep: Keep) {
        match keep {
            Keep::Keep => self.flights.push(flight),
            Keep::Drop => self.let_go(flight),
            Keep::Forget => {
                // A claimed segment's address is not known.
                self.forgotten.push((flight.trip.range.unwrap_or_default(), flight.trip.capacity));
                self.tally.note("in flight: forgotten");
                std::mem::forget(flight.handle);
            }
        }
    }

    pub(super) fn let_go(&mut self, flight: Flight) {
        self.tally.note("in flight: dropped");
        if !matches!(flight.handle, Handle::Nothing(_)) {
            self.detached.push(flight.trip.capacity);
        }
        // A shared buffer has other handles too; its copies stand for it.
        if matches!(flight.handle, Handle::Own(_)) {
            self.dropped(&flight.trip);
        }
    }

    pub(super) fn wait_for(&mut self, waiter: usize, other: usize) {
        self.sweep();
        let after = self.outstanding(other);
        let result = self.lanes[waiter].stream.wait_for(&self.lanes[other].stream);
        if self.lanes[waiter].device != self.lanes[other].device {
            assert!(matches!(result, Err(Error::Mismatch { .. })), "{result:?}");
            self.tally.note("refused: wrong device");
            return;
        }
        if let Err(error) = result {
            return assert!(self.tolerant(), "no fault, and yet: {error}");
        }
        let busy = !after.is_empty();
        self.tally.note(if busy { "stream waited for a busy one" } else { "stream waited for an idle one" });
        let from = self.id();
        self.behind.push(Behind { lane: waiter, from, after });
    }

    pub(super) fn is_done(&mut self, at: usize) {
        if self.flights.is_empty() {
            return;
        }
        let Flight { handle, trip, .. } = &self.flights[at % self.flights.len()];
        let done = match handle {
            Handle::Own(f) => f.is_done(),
            Handle::Shared(f) => f.is_done(),
            Handle::Nothing(f) => f.is_done(),
        };
        match done {
            Ok(true) => {
                let after = trip.after.clone();
                self.done(&after);
                self.tally.note("in flight: asked, done");
            }
            Ok(false) => self.tally.note("in flight: asked, not done"),
            Err(error) => assert!(self.tolerant(), "no fault, and yet: {error}"),
        }
    }

    pub(super) fn poll_flight(&mut self, at: usize) {
        let Some(mut flight) = self.take_flight(at) else { return };
        let flag = flight.flag.get_or_insert_with(Arc::default).clone();
        let woken = flag.0.swap(false, Ordering::SeqCst);
        let waker = Waker::from(flag);
        let Handle::Own(handle) = &mut flight.handle else { return self.flights.push(flight) };
        match Pin::new(handle).poll(&mut Context::from_waker(&waker)) {
            Poll::Pending => {
                assert!(!woken, "woken in vain");
                self.tally.note("in flight: awaited, pending");
                self.flights.push(flight);
            }
            Poll::Ready(Ok(buf)) => {
                self.tally.note("in flight: awaited, ready");
                self.back(buf, flight.trip);
            }
            Poll::Ready(Err(error)) => self.lost(flight.trip, &error, true),
        }
    }
}
