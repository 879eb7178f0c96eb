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
            assert!(
                handle.lost().is_none() || self.dead[device],
                "lost without a reason: {:?}",
                handle.lost()
            );
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
        self.check_snapshot(&pool, s);
        // Exact but for buffers that are about to return, and for a grant to a future that was not polled since.
        let (least, unknown) = (self.requested(), self.detached.iter().sum::<usize>());
        assert!(s.requested_bytes >= least, "{} requested, {least} in our hands: {s:?}", s.requested_bytes);
        if !self.waiting.iter().any(Waiting::woken) && !self.may_lose {
            assert!(s.requested_bytes <= least + unknown, "{} + {unknown} in our hands: {s:?}", least);
        }
        let used = s.checked_out_bytes + s.in_flight_bytes + s.quarantined_bytes;
        let needed: usize = owned.iter().map(|r| r.1).sum();
        assert!(used >= needed && used >= s.requested_bytes, "{needed} bytes are needed: {s:?}");
        assert!(self.may_lose || s.quarantined_bytes == 0, "quarantined without a reason: {s:?}");
        self.check_waiting();
        self.count(s);
    }

    /// The long form of the statistics says what the short one does, in parts that are the whole.
    pub(super) fn check_snapshot(&self, pool: &Pool, s: pinpool::PoolStats) {
        let all = pool.snapshot();
        assert_eq!(all.pool, s, "no thread moves");
        let sum = |part: fn(&ClassStats) -> u64| all.classes.iter().map(part).sum::<u64>();
        assert_eq!(sum(|c| c.out_bytes as u64), s.granted_bytes as u64, "{all:#?}");
        assert_eq!((sum(|c| c.checkouts), sum(|c| c.returns)), (s.checkouts, s.returns), "{all:#?}");
        assert_eq!(sum(|c| c.out), s.checkouts - s.returns, "{all:#?}");
        assert_eq!(s.granted_bytes, s.requested_bytes + s.rounding_bytes, "{s:?}");
        let streams = all.devices.iter().flat_map(|device| &device.streams);
        let flying: usize = streams.map(|stream| stream.in_flight_bytes).sum();
        assert!(flying <= s.in_flight_bytes, "{flying}: {all:#?}");
        for device in &all.devices {
            assert!(device.completed <= device.submitted, "{device:?}");
        }
    }

    /// Counts the transitions that only the statistics show.
    pub(super) fn count(&mut self, s: pinpool::PoolStats) {
        let was = std::mem::replace(&mut self.seen, s);
        self.tally.add("miss", s.misses - was.misses);
        self.tally.add("take-back", s.reclaims - was.reclaims);
        self.tally.add("wait", s.waits - was.waits);
        self.tally.add("timeout", s.timeouts - was.timeouts);
        let held = |s: &pinpool::PoolStats| s.pinned_bytes + s.unpinned_bytes;
        self.tally.add("grow", u64::from(held(&s) > held(&was)));
        self.tally.add("unpinned growth", u64::from(s.unpinned_bytes > was.unpinned_bytes));
        self.tally.add("quarantine", u64::from(s.quarantined_bytes > was.quarantined_bytes));
    }

    // --- the end -----------------------------------------------------------------------------------------------------

    /// Ends the case, and takes everything back.
    pub fn end(mut self) {
        match self.setup.end {
            End::Quiet => {}
            End::DropPool => self.drop_pool(),
            End::Shutdown => self.shutdown(),
        }
        self.waiting.clear();
        self.bufs.clear();
        self.shared.clear();
        self.flights.clear();
        self.drain();
        // The devices now hold what was sent, however late the copies ran.
        for Region { memory, bytes, lane, .. } in &self.regions {
            // Submitted with an error and not queued, or lost, are not in the list.
            let dead = self.dead[self.lanes[*lane].device];
            assert!(dead || self.machine.read(memory) == *bytes, "wrong bytes arrived");
        }
        self.regions.clear();
        self.ruins = Default::default();
        let stuck = !self.forgotten.is_empty() || self.may_lose;
        let quiet = !stuck && self.setup.end == End::Quiet;
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
        self.helper = Helper::new(self.machine);
        if let Some(failure) = self.setup.closing {
            self.machine.fault("cuEventDestroy_v2", 1, failure);
            self.trouble = true;
        }
        self.devices.clear();
        if let (0, Some(failure)) = (self.machine.calm(), self.setup.closing) {
            self.tally.fault("cuEventDestroy_v2", failure);
        }
        // After a fault something may be kept. The driver's rules hold all the same.
        let (wrong, may_keep) = (self.machine.wrong(), stuck || self.trouble);
        let is_wrong = |line: &&str| !may_keep || !line.starts_with("leak");
        assert_eq!(wrong.lines().find(is_wrong), None, "a rule was broken, or something was kept");
    }

    pub(super) fn drop_pool(&mut self) {
        self.poll_waiting();
        // A future holds the pool.
        self.waiting.clear();
        self.sweep();
        let out = !self.bufs.is_empty() || !self.flights.is_empty();
        self.pool = None;
        // From here on host memory is unmapped with the last buffer in it: only what reaches device memory can be seen.
        self.copies.retain(|c| matches!(c.seen, Seen::Device(_)));
        if out {
            self.tally.note("pool dropped while buffers were out");
        }
        for at in 0..self.bufs.len().min(3) {
            self.check();
            self.upload(at, at, None, Keep::Keep, false);
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
        self.checkout(size, Patience::Try, Who::Main);
        self.checkout(size, Patience::Forever, Who::Fresh);
        assert!(self.bufs.iter().all(|b| *b.buf == *b.bytes));
        let bufs = self.bufs.len();
        self.join(&[size]);
        assert_eq!(self.bufs.len(), bufs, "a closed pool served a request");
    }
}
