//! The host devices, on whose threads streams run late and against each other, some with random delays.

use std::time::Duration;

use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode};
use pinpool::{Device, DeviceSlice};

use super::checkouts;
use super::worker::{Machine, Phase, Site};

pub fn site() -> Site {
    let target = checkouts(1_700_000, 10_000);
    let phases = [(0, false, 52), (0, true, 47), (50, false, 1)].map(|(delay, exact, share)| {
        let config = HostConfig::new().late(Duration::from_micros(delay), 5);
        let node = HostNode::new(config.memory(1 << 20)).unwrap();
        let device = Device::on(&node, 0).unwrap();
        Phase { device, machine: Box::new(OnHost(node)), workers: 2, exact, target: target * share / 100 }
    });
    Site { name: "host devices".into(), target, phases: phases.into(), stand_in: None }
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
