//! The host devices: on threads, where streams run late and against each other, some with random delays, and stepped,
//! where a copy runs only when no thread can go on without it or the seed says so.

use std::time::Duration;

use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode};
use pinpool::{Device, DeviceSlice};

use super::plain::{Engine, Late, Words};
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
        let target = if super::full() { FULL } else { 16_000 };
        (target, target)
    }

    fn is_late(&self) -> bool {
        true
    }

    fn phases(&self, target: u64, phase: &mut dyn FnMut(On<'_>, Setup)) {
        let late = |max| HostConfig::new().late(max, 5);
        for (config, stepped, workers, exact, target) in [
            (late(Duration::ZERO), false, 2, false, target * 40 / 100),
            (late(Duration::ZERO), false, 2, true, target * 34 / 100),
            (late(Duration::from_micros(50)), false, 2, false, target / 100),
            (HostConfig::new().stepped(1), true, 1, false, target / 8),
            (HostConfig::new().stepped(2), true, 1, true, target / 8),
        ] {
            let node = HostNode::new(config.memory(1 << 20)).unwrap();
            let device = Device::on(&node, 0).unwrap();
            phase((&OnHost { node, stepped }, &device), Setup { workers, exact, target });
        }
    }

    fn engine(&self, lag: usize) -> Box<dyn Engine> {
        Box::new(Late::new(lag))
    }

    fn buffer(&self) -> Words {
        Words::new()
    }

    fn slot(&self) -> Words {
        Words::new()
    }
}

struct OnHost {
    node: HostNode,
    stepped: bool,
}

impl OnHost {
    fn fail(&self, call: Call, failure: Failure) {
        self.node.fail(Fault { device: 0, call, nth: 0, failure });
    }
}

impl Machine for OnHost {
    fn is_stepped(&self) -> bool {
        self.stepped
    }

    fn step(&self) -> bool {
        self.node.step()
    }

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
        self.node.clear_faults();
    }
}
