//! Devices that fail, die, and are drained.

use super::*;

impl World<'_> {
    /// The device is dead: what has not run never will.
    fn buried(&mut self, device: usize) {
        if std::mem::replace(&mut self.dead[device], true) {
            return;
        }
        (self.trouble, self.may_lose) = (true, true);
        let lanes = &self.lanes;
        for copy in self.copies.iter_mut().filter(|c| lanes[c.lane].device == device) {
            copy.dead = true;
            self.tally.note("copy lost with its device");
        }
        self.regions.retain(|region| lanes[region.lane].device != device);
    }

    pub(super) fn bury_lost(&mut self) {
        for device in 0..DEVICES {
            if self.machine.is_lost(device) {
                self.buried(device);
            }
        }
    }

    pub(super) fn kill(&mut self, device: usize) {
        if self.dead[device] {
            return;
        }
        self.sweep();
        self.machine.kill(device);
        self.buried(device);
    }

    pub(super) fn fault(&mut self, call: &'static str, nth: u64, failure: Failure, ops: &[Op]) {
        if self.dead == [true; DEVICES] || self.armed.is_some() {
            return;
        }
        self.sweep();
        self.armed = Some((call, failure));
        self.machine.fault(call, nth, failure);
        ops.iter().for_each(|op| self.apply(op));
        self.armed = None;
        if self.machine.calm() == 0 {
            self.tally.note(&format!("fault: {failure:?}"));
            self.trouble = true;
            let of_events = ["cuEventRecord", "cuEventCreate", "cuEventQuery"].contains(&call);
            self.may_lose |= failure == Failure::Argument && of_events;
            self.bury_lost();
        }
    }

    pub(super) fn trim(&mut self, keep: usize) {
        self.sweep();
        let held = |s: pinpool::PoolStats| s.pinned_bytes + s.unpinned_bytes;
        let before = held(self.pool().stats());
        let gone = self.pool().trim(keep);
        assert_eq!(before - held(self.pool().stats()), gone);
        if gone > 0 {
            self.tally.note("trim");
        }
    }

    pub(super) fn synchronize(&mut self, lane: usize) {
        self.sweep();
        let after = self.outstanding(lane);
        match self.lanes[lane].stream.clone().synchronize() {
            Ok(()) => {
                self.sweep();
                assert!(self.have_run(&after), "synchronized before everything has run");
            }
            Err(Error::Timeout(_)) => {}
            Err(error) => assert!(self.tolerant(), "no fault, and yet: {error}"),
        }
    }

    /// Everything that can move moves, and everything that is complete returns.
    pub(super) fn drain(&mut self) {
        let reap = |devices: &[Device]| devices.iter().for_each(|device| _ = device.reap());
        (0..DEVICES).for_each(|device| self.machine.resume(device, None));
        for _ in 0..3 {
            reap(&self.devices);
            while self.machine.step() {}
        }
        reap(&self.devices);
        self.sweep();
        let waits = self.copies.iter().find(|c| !c.dead);
        assert!(waits.is_none(), "a copy never ran");
        if let Some(pool) = self.pool.clone() {
            // What returned may have served waiters.
            let stats = pool.stats();
            assert_eq!((stats.in_flight_bytes, stats.claimed_bytes), (0, 0), "still in flight: {stats:?}");
            if stats.quarantined_bytes == 0 && !self.waiting.iter().any(Waiting::woken) {
                assert_eq!(stats.requested_bytes, self.requested(), "requested bytes: {stats:?}");
            }
        }
        self.holds.retain(|hold| self.dead[self.lanes[hold.lane].device]);
    }
}
