//! What is in flight: waited for, polled, returned or lost.

use super::*;

impl World<'_> {
    pub(super) fn take_flight(&mut self, at: usize) -> Option<Flight> {
        (!self.flights.is_empty()).then(|| self.flights.swap_remove(at % self.flights.len()))
    }

    /// A buffer has returned: all copies that it waited for have run, and it holds what it should.
    pub(super) fn back(&mut self, buf: PinnedBuf, flight: (Option<Range>, usize, Expect, Vec<u64>)) {
        let (range, capacity, expect, after) = flight;
        self.sweep();
        assert!(
            self.pool.is_none() || self.have_run(&after),
            "a buffer came back before its copies have run"
        );
        let found = (buf.as_ptr() as usize, span(buf.capacity()));
        assert_eq!(buf.capacity(), capacity);
        match range {
            Some(range) => assert_eq!(range, found, "another buffer came back"),
            // Claimed: host-ready now, so nothing of an earlier owner may be left.
            None => self.assert_free(found),
        }
        let bytes = buf.to_vec();
        match expect {
            Expect::Same(same) => assert!(bytes == same, "the bytes of a buffer changed in flight"),
            Expect::OneOf(allowed) => assert!(allowed.contains(&bytes), "a download brought wrong bytes"),
        }
        self.bufs.push(Live { buf, bytes });
    }

    /// A wait has ended with an error.
    pub(super) fn lost(&mut self, range: Option<Range>, capacity: usize, error: &Error, own: bool) {
        if let Error::Timeout(_) = error {
            self.tally.note("in flight: wait timed out");
        } else {
            assert!(self.tolerant(), "no fault, and yet: {error}");
            self.tally.note("in flight: wait ended by a loss");
            if own {
                self.graves.extend(range);
            }
        }
        self.detached.push(capacity);
    }

    pub(super) fn wait(&mut self, at: usize) {
        let Some(Flight { handle, range, capacity, expect, after, .. }) = self.take_flight(at) else {
            return;
        };
        // A failed wait loses the buffer, so it stands for a drop.
        let hold = range.map(|range| Hold { range, after: after.clone(), lanes: Vec::new() });
        match handle {
            Handle::Own(flight) => match flight.wait() {
                Ok(buf) => {
                    self.tally.note("in flight: waited for");
                    self.back(buf, (range, capacity, expect, after));
                }
                Err(error) => {
                    self.holds.extend(hold);
                    self.lost(range, capacity, &error, true);
                }
            },
            Handle::Shared(flight) => match flight.wait() {
                Ok(buf) => {
                    self.sweep();
                    assert!(self.pool.is_none() || self.have_run(&after));
                    drop(buf);
                }
                Err(error) => self.lost(range, capacity, &error, false),
            },
            Handle::Nothing(flight) => match flight.wait() {
                Ok(()) => {
                    self.sweep();
                    assert!(self.pool.is_none() || self.have_run(&after));
                }
                Err(error) => self.lost(None, 0, &error, false),
            },
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
        match result {
            Ok(()) => {
                let (busy, from) = (!after.is_empty(), self.id());
                self.tally.note(if busy {
                    "stream waited for a busy one"
                } else {
                    "stream waited for an idle one"
                });
                self.behind.push(Behind { lane: waiter, from, after });
            }
            Err(error) => assert!(self.tolerant(), "no fault, and yet: {error}"),
        }
    }

    pub(super) fn is_done(&mut self, at: usize) {
        if self.flights.is_empty() {
            return;
        }
        let at = at % self.flights.len();
        let done = match &self.flights[at].handle {
            Handle::Own(f) => f.is_done(),
            Handle::Shared(f) => f.is_done(),
            Handle::Nothing(f) => f.is_done(),
        };
        match done {
            Ok(true) => {
                self.sweep();
                let after = self.flights[at].after.clone();
                assert!(self.pool.is_none() || self.have_run(&after), "said to be done before it was");
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
        let mut cx = Context::from_waker(&waker);
        let Handle::Own(handle) = &mut flight.handle else { return self.flights.push(flight) };
        match Pin::new(handle).poll(&mut cx) {
            Poll::Pending => {
                assert!(!woken || matches!(flight.expect, Expect::Same(_)), "woken in vain");
                self.tally.note("in flight: awaited, pending");
                self.flights.push(flight);
            }
            Poll::Ready(result) => {
                let Flight { handle, range, capacity, expect, after, .. } = flight;
                drop(handle);
                match result {
                    Ok(buf) => {
                        self.tally.note("in flight: awaited, ready");
                        self.back(buf, (range, capacity, expect, after));
                    }
                    Err(error) => self.lost(range, capacity, &error, true),
                }
            }
        }
    }
}
