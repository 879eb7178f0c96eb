//! What must hold after every step, and at the end.

use super::*;

impl World<'_> {
    /// Everything that must hold after every step.
    pub fn check(&mut self) {
        self.sweep();
        for live in &self.bufs {
            assert!(*live.buf == *live.bytes, "a host-ready buffer was written to");
        }
        for shared in &self.shared {
            assert!(**shared.buf == *shared.bytes, "a shared buffer was written to");
        }
        let mut owned = self.owned();
        owned.sort_unstable();
        for pair in owned.windows(2).filter(|p| p[0].1 > 0) {
            assert!(!overlap(pair[0], pair[1]), "{:x?} overlap", pair);
        }
        for (device, handle) in self.devices.iter().enumerate() {
            let lost = handle.lost();
            assert!(lost.is_none() || self.dead[device], "lost without a reason: {lost:?}");
        }
        let Some(pool) = self.pool.clone() else { return };
        let found = pool.check().unwrap();
        let s = pool.stats();
        let parts =
            s.free_bytes + s.checked_out_bytes + s.in_flight_bytes + s.quarantined_bytes + s.cut_bytes;
        assert_eq!(parts, s.pinned_bytes + s.unpinned_bytes, "{s:?}");
        assert!(s.pinned_bytes + s.unpinned_bytes <= s.capacity_bytes, "{s:?}");
        assert_eq!(s.capacity_bytes, self.setup.capacity * KIB);
        assert_eq!(
            (found.checked_out_bytes, found.in_flight_bytes, found.claimed_bytes, found.quarantined_bytes),
            (s.checked_out_bytes, s.in_flight_bytes, s.claimed_bytes, s.quarantined_bytes),
        );
        let regions: usize = pool.regions().iter().map(|r| r.len).sum();
        assert_eq!(regions, s.pinned_bytes + s.unpinned_bytes);
        let least = self.requested();
        assert!(s.requested_bytes >= least, "{} requested, {least} in our hands: {s:?}", s.requested_bytes);
        let used = s.checked_out_bytes + s.in_flight_bytes + s.quarantined_bytes;
        let needed: usize = owned.iter().map(|r| r.1).sum();
        assert!(used >= needed && used >= s.requested_bytes, "{needed} bytes are needed: {s:?}");
        assert!(self.may_lose || s.quarantined_bytes == 0, "quarantined without a reason: {s:?}");
        self.check_waiting();
        for (what, count) in [
            ("take-back", s.reclaims),
            ("timeout", s.timeouts),
            ("unpinned growth", s.unpinned_bytes as u64),
            ("quarantine", s.quarantined_bytes as u64),
        ] {
            self.tally.add(what, count.min(1));
        }
    }

    // --- the end -----------------------------------------------------------------------------------------------------

    /// Ends the case, and takes everything back.
    pub fn end(mut self) {
        match self.setup.end {
            End::Quiet => self.made_anew(),
            End::DropPool => self.drop_pool(),
            End::Shutdown => self.shutdown(),
        }
        self.waiting.clear();
        self.bufs.clear();
        self.shared.clear();
        self.flights.clear();
        self.drain();
        // The devices now hold what was sent, however late the copies ran.
        for Region { memory, bytes, .. } in &self.regions {
            // Submitted with an error and not queued, or lost, are not in the list.
            assert!(self.machine.read(memory) == *bytes, "wrong bytes arrived");
        }
        self.regions.clear();
        let quiet = !self.may_lose && self.setup.end == End::Quiet;
        if let (Some(pool), true) = (self.pool.clone(), quiet) {
            let s = pool.stats();
            assert_eq!((s.checked_out_bytes, s.requested_bytes, s.checkouts - s.returns), (0, 0, 0), "{s:?}");
            pool.trim(0);
            let s = pool.stats();
            assert_eq!(s.pinned_bytes + s.unpinned_bytes, 0, "all that is idle goes: {s:?}");
            if !self.trouble {
                // With everything back, the longest request can be served.
                let most = self.setup.extent.min(self.setup.capacity) * KIB;
                drop(pool.checkout(most - 4096.min(most / 2)).unwrap());
            }
            self.tally.note("ended quietly");
        }
        self.pool = None;
        self.lanes.clear();
        self.copies.clear();
        drop(self.helper.0);
        self.helper.1.join().unwrap();
        self.devices.clear();
        // After a fault something may be kept. The driver's rules hold all the same.
        let (wrong, may_keep) = (self.machine.wrong(), self.may_lose || self.trouble);
        let is_wrong = |line: &&str| !may_keep || !line.starts_with("leak");
        assert_eq!(wrong.lines().find(is_wrong), None, "a rule was broken, or something was kept");
    }

    /// What waits, however often the queue is looked at, is not served when it is made anew either,
    /// if nothing comes back meanwhile.
    fn made_anew(&mut self) {
        self.drain();
        self.poll_waiting();
        // A growth that was refused is tried again.
        let Some(waiting) = self.waiting.pop().filter(|_| !self.trouble) else { return };
        let pool = self.pool();
        let requests: Vec<_> = waiting.sizes.iter().map(|size| Self::request(*size)).collect();
        let is_served = || pool.checkout_many(&requests, Some(Duration::ZERO)).is_ok();
        // Each 64 requests have the queue looked at.
        let served = (0..520).any(|_| is_served());
        assert!(!served, "a request is served before an equal one: {requests:?}");
        if !waiting.woken() {
            drop(waiting);
            // What was withheld for it may have served another.
            let another = self.waiting.iter().any(Waiting::woken);
            assert!(another || !is_served(), "waited, and is served when made anew: {requests:?}");
            self.tally.note("request made anew");
        }
    }

    pub(super) fn drop_pool(&mut self) {
        self.poll_waiting();
        // A future holds the pool.
        self.waiting.clear();
        self.sweep();
        self.pool = None;
        // From here on host memory is unmapped with the last buffer in it: only what reaches device memory can be seen.
        self.copies.retain(|c| matches!(c.seen, Seen::Device(_)));
        for at in 0..self.bufs.len().min(3) {
            self.check();
            self.upload(at, at, true);
            self.tally.note("buffer used after its pool");
        }
        while !self.flights.is_empty() {
            self.wait(0);
            self.check();
        }
    }

    pub(super) fn shutdown(&mut self) {
        self.sweep();
        let down = self.pool().shutdown(Duration::from_secs(3600));
        self.closed = true;
        self.sweep();
        self.poll_waiting();
        assert!(self.waiting.is_empty(), "a shutdown left a waiter");
        let ours = !self.bufs.is_empty() || !self.shared.is_empty();
        assert!(!(down.drained && ours), "drained, and yet something is out");
        assert_eq!(down.drained, down.outstanding == 0);
        self.tally.note(if down.drained {
            "shut down and drained"
        } else {
            "shut down while buffers were out"
        });
        let size = Size { len: 64, align: 64 };
        let bufs = self.bufs.len();
        self.checkout(size, false, Who::Main);
        self.checkout(size, true, Who::Fresh);
        self.join(&[size]);
        assert_eq!(self.bufs.len(), bufs, "a closed pool served a request");
    }
}
