//! Devices that fail, die, and are drained.

use super::*;

impl World<'_> {
    /// The device is dead: what has not run never will.
    pub(super) fn buried(&mut self, device: usize) {
        if std::mem::replace(&mut self.dead[device], true) {
            return;
        }
        (self.trouble, self.may_lose) = (true, true);
        for copy in self.copies.iter_mut().filter(|c| c.device == device) {
            copy.dead = true;
            self.graves.push(copy.host);
            self.tally.note("copy lost with its device");
        }
        if let Some(region) = self.regions.iter().find(|r| r.device == device) {
            self.ruins[device] = Some(region.memory.clone());
        }
        self.regions.retain(|r| r.device != device);
        self.tally.note("poison");
    }

    pub(super) fn kill(&mut self, device: usize) {
        if self.dead[device] {
            return;
        }
        self.sweep();
        self.tally.note("device killed");
        self.node.kill(device as u32);
        self.buried(device);
    }

    pub(super) fn fault(&mut self, device: usize, call: Call, nth: u64, failure: Failure, ops: &[Op]) {
        if self.dead[device] || self.armed.is_some() {
            return;
        }
        self.sweep();
        let fault = Fault { device: device as u32, call, nth, failure };
        self.armed = Some(fault);
        self.node.fail(fault);
        for op in ops {
            self.apply(op);
        }
        let struck = self.node.clear_faults() == 0;
        self.armed = None;
        if struck {
            self.tally.fault(call, failure);
            self.trouble = true;
            let of_events = matches!(call, Call::Record | Call::CreateEvent | Call::Query);
            self.may_lose |= failure == Failure::Argument && of_events;
            if failure == Failure::DeviceLost {
                self.buried(device);
            }
        }
    }

    pub(super) fn reap_all(&self) {
        for device in &self.devices {
            device.reap();
        }
    }

    /// Everything that can move moves, and everything that is complete returns.
    pub(super) fn drain(&mut self) {
        for device in 0..DEVICES {
            self.node.resume(device as u32);
        }
        for _ in 0..3 {
            self.reap_all();
            while self.node.step() {}
        }
        self.reap_all();
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
        self.holds.retain(|h| h.lanes.iter().any(|&l| self.dead[self.lanes[l].device]));
        self.tally.note("everything drained");
    }
}
