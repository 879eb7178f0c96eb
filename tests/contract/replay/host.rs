//! The host devices, on whose threads streams run late and against each other, some with random delays.

use std::time::Duration;

use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode};
use pinpool::{Device, DeviceSlice};

use super::worker::{Machine, On, Setup, Site};

/// Checkouts per scenario when everything is run.
const FULL: u64 = 1_700_000;
const _: () = assert!(6 * FULL >= 10_000_000 && FULL >= 1_000_000);

pub struct Host;

impl Site for Host {
    fn name(&self) -> &str {
        "host devices"
    }

    fn targets(&self) -> (u64, u64) {
        let target = if super::full() { FULL } else { 10_000 };
        (target, target)
    }

    fn phases(&self, target: u64, phase: &mut dyn FnMut(On<'_>, Setup)) {
        for (delay, exact, share) in [(0, false, 52), (0, true, 47), (50, false, 1)] {
            let config = HostConfig::new().late(Duration::from_micros(delay), 5);
            let node = HostNode::new(config.memory(1 << 20)).unwrap();
            let device = Device::on(&node, 0).unwrap();
            phase((&OnHost(node), &device), Setup { workers: 2, exact, target: target * share / 100 });
        }
    }
}

struct OnHost(HostNode);

impl OnHost {
    fn fail(&self, call: Call, failure: Failure) {
        self.0.fail(Fault { device: 0, call, nth: 0, failure });
    }
}

impl Machine for OnHost {
    fn fail_copy(&self, source: DeviceSlice) -> DeviceSlice {
        self.fail(Call::Copy, Failure::RunsAnyway);
        source
    }

    fn fail_query(&self, capture: bool) {
        self.fail(Call::Query, if capture { Failure::Capture } else { Failure::Transient });
    }

    fn fail_record(&self) {
        self.fail(Call::Record, Failure::RunsAnyway);
    }

    fn calm(&self) {
        self.0.clear_faults();
    }
}
