//! Checking out, one and many, at once and in the queue.

use super::*;

impl World<'_> {
    pub(super) fn request(size: Size) -> Request {
        Request::new(size.len).align(size.align)
    }

    pub(super) fn largest(&self) -> usize {
        self.setup.extent.min(self.setup.capacity) * KIB - 32
    }

    pub(super) fn is_bad(&self, size: Size) -> bool {
        size.len == 0 || !size.align.is_power_of_two() || size.align > 2 << 20 || size.len > self.largest()
    }

    /// Checks a new buffer from all sides, and fills it.
    pub(super) fn admit(&mut self, buf: PinnedBuf, size: Size) {
        assert_eq!((buf.capacity(), buf.len()), (size.len, 0), "another buffer than was asked for");
        let address = buf.as_ptr() as usize;
        assert_eq!(address % size.align.max(64), 0, "misaligned");
        self.assert_free((address, span(size.len)));
        let id = self.id();
        let bytes = pattern(id, size.len);
        let mut buf = buf;
        buf.extend_from_slice(&bytes);
        self.bufs.push(Held { buf, bytes });
    }

    /// A refusal must have its reason.
    pub(super) fn refused(&mut self, sizes: &[Size], error: &Error) {
        match error {
            Error::ZeroLength => assert!(sizes.iter().any(|s| s.len == 0)),
            Error::Argument(text) if text.contains("no alignment") => {
                assert!(sizes.iter().any(|s| !s.align.is_power_of_two() || s.align > 2 << 20));
            }
            Error::TooLong { .. } => assert!(sizes.iter().any(|s| s.len > self.largest())),
            Error::Exhausted(shortage) => self.explained(sizes, Some(shortage)),
            Error::Timeout(waited) => self.explained(sizes, waited.shortage.as_deref()),
            Error::Impossible { .. } => {
                // No region of the pool need be longer than this.
                let piece = self.setup.region.min(self.setup.extent) * KIB;
                let long = sizes.iter().any(|s| span(s.len) > piece);
                let aligned = sizes.iter().any(|s| s.align > 4096);
                let reason = self.trouble || sizes.len() > 1 || long || aligned;
                assert!(reason, "impossible without a reason: {error}");
                self.tally.note("checkout refused: impossible");
            }
            Error::Closed => assert!(self.closed),
            Error::Device(_) => assert!(self.tolerant(), "no fault, and yet: {error}"),
            _ => panic!("unexpected: {error}"),
        }
    }

    /// A request goes without only what lies in the windows of others: outside of them there is no range for it.
    fn explained(&mut self, sizes: &[Size], shortage: Option<&Shortage>) {
        let Some(shortage) = shortage else { return };
        assert!(shortage.withheld <= shortage.free, "{shortage:?}");
        assert_eq!(shortage.requested, sizes.iter().map(|s| s.len).sum::<usize>());
        if shortage.withheld > 0 {
            assert!(shortage.withheld_for > 0, "withheld for no one: {shortage:?}");
            self.tally.note("checkout refused: withheld for a waiter");
        }
        if let [size] = sizes {
            let bytes = Self::request(*size).segment_bytes().unwrap();
            let fits = size.align <= 4096 && bytes <= shortage.largest;
            assert!(!fits, "{size:?} was refused, and there was room for it: {shortage:?}");
        }
    }

    pub(super) fn checkout(&mut self, size: Size, waits: bool, who: Who) {
        let pool = self.pool();
        let job = move || {
            let request = Self::request(size);
            if waits { pool.checkout(request) } else { pool.try_checkout(request) }
        };
        let result = self.on(who, job).map(|buf| vec![buf]);
        if result.is_ok() {
            assert!(!self.is_bad(size), "a bad request was served: {size:?}");
            if self.waiting.iter().any(|waiter| !waiter.woken()) {
                self.tally.note("checkout beside a waiter");
            }
        }
        self.served(&[size], result);
    }

    pub(super) fn many(&mut self, sizes: &[Size], waits: bool) {
        let requests: Vec<_> = sizes.iter().map(|s| Self::request(*s)).collect();
        let result = self.pool().checkout_many(&requests, (!waits).then_some(Duration::ZERO));
        self.served(sizes, result);
    }

    /// What came of a request.
    fn served(&mut self, sizes: &[Size], result: Result<Vec<PinnedBuf>>) {
        match result {
            Ok(bufs) => {
                assert_eq!(bufs.len(), sizes.len());
                bufs.into_iter().zip(sizes).for_each(|(buf, size)| self.admit(buf, *size));
            }
            Err(error) => self.refused(sizes, &error),
        }
    }

    /// Checks out all that there is of this size, and does something with the index of each.
    pub(super) fn take_all(&mut self, size: Size, mut and: impl FnMut(&mut Self, usize)) {
        for _ in 0..64 {
            let before = self.bufs.len();
            self.checkout(size, false, Who::Main);
            if self.bufs.len() == before {
                return;
            }
            and(self, before);
        }
    }

    // --- waiting -----------------------------------------------------------------------------------------------------

    pub(super) fn join(&mut self, sizes: &[Size]) {
        if self.waiting.len() >= 8 {
            return;
        }
        let requests: Vec<_> = sizes.iter().map(|s| Self::request(*s)).collect();
        let future: Pin<Box<dyn Future<Output = _>>> = match &requests[..] {
            [request] => {
                let one = self.pool().checkout_async(*request);
                Box::pin(async { one.await.map(|buf| vec![buf]) })
            }
            _ => Box::pin(self.pool().checkout_many_async(&requests)),
        };
        let mut waiting = Waiting { future, flag: Arc::default(), sizes: sizes.to_vec() };
        match waiting.poll() {
            Poll::Pending => self.waiting.push(waiting),
            Poll::Ready(result) => self.served(sizes, result),
        }
    }

    pub(super) fn poll_waiting(&mut self) {
        let mut at = 0;
        while at < self.waiting.len() {
            if !self.waiting[at].woken() {
                at += 1;
                continue;
            }
            let mut waiting = self.waiting.remove(at);
            let Poll::Ready(result) = waiting.poll() else { panic!("woken in vain") };
            self.tally.note("future woken");
            if matches!(result, Err(Error::Closed)) {
                self.tally.note("waiter ended by a shutdown");
            }
            self.served(&waiting.sizes, result);
        }
    }

    pub(super) fn cancel(&mut self, at: usize) {
        if self.waiting.is_empty() {
            return;
        }
        let waiting = self.waiting.remove(at % self.waiting.len());
        self.tally.note(if waiting.woken() {
            "future cancelled after it was granted"
        } else {
            "future cancelled while waiting"
        });
        drop(waiting);
    }

    /// A waiter that was not woken must still wait, and equal requests are served in their order.
    pub(super) fn check_waiting(&mut self) {
        for at in 0..self.waiting.len() {
            if self.waiting[at].woken() {
                let sizes = self.waiting[at].sizes.clone();
                let earlier = self.waiting[..at].iter().find(|w| !w.woken() && w.sizes == sizes);
                assert!(earlier.is_none(), "an equal request was served before an earlier one");
                if self.waiting[..at].iter().any(|w| w.sizes == sizes) {
                    self.tally.note("later waiter served after an equal one");
                }
            } else {
                let poll = self.waiting[at].poll();
                assert!(poll.is_pending(), "ready, but not woken: {:?}", poll.map(|r| r.map(|b| b.len())));
            }
        }
        if let Some(pool) = &self.pool {
            let waiting = self.waiting.iter().filter(|w| !w.woken()).count();
            assert_eq!(pool.stats().waiting, waiting, "the pool counts other waiters than the model");
        }
    }
}
