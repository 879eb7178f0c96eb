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
            self.graves.push(copy.host);
            self.tally.note("copy lost with its device");
        }
        let regions = std::mem::take(&mut self.regions).into_iter();
        let (ruins, others): (Vec<_>, _) = regions.partition(|r| lanes[r.lane].device == device);
        self.regions = others;
        self.ruins[device] = ruins.into_iter().next().map(|region| region.memory);
        self.tally.note("poison");
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
        self.tally.note("device killed");
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
            self.tally.fault(call, failure);
            self.trouble = true;
            let of_events = ["cuEventRecord", "cuEventCreate", "cuEventQuery"].contains(&call);
            self.may_lose |= failure == Failure::Argument && of_events;
            self.bury_lost();
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
            self.detached.clear();
            let stats = pool.stats();
            assert_eq!((stats.in_flight_bytes, stats.claimed_bytes), (0, 0), "still in flight: {stats:?}");
            if stats.quarantined_bytes == 0 && !self.waiting.iter().any(Waiting::woken) {
                assert_eq!(stats.requested_bytes, self.requested(), "requested bytes: {stats:?}");
            }
        }
        self.holds.retain(|hold| self.dead[self.lanes[hold.lane].device]);
        self.tally.note("everything drained");
    }
}
