//! A simulated Ascend device, with the library of today, on the device itself, and with that of 2024.
//!
//! The simulation copies only when a caller waits, so every copy is as late as it may be; and what a library does that
//! copies from memory which was given away early, the simulation does. No such device was at hand: on a real one these
//! scenarios are not run.

use pinpool::{Device, DeviceSlice, Stream, acl};

use super::worker::{Machine, On, Setup, Site};
use crate::support::doubles::npu::{OF_2024, ON_DEVICE, TODAY};
use crate::support::doubles::{StandIn, npu_name};

/// Checkouts per scenario.
const FULL: u64 = 40_000;
const USUAL: u64 = 8_000;

/// Runs a scenario in each of the ways.
pub fn on_npu(scenario: fn(&dyn Site)) {
    for way in [TODAY, ON_DEVICE, OF_2024] {
        println!("{}", way.name);
        let site = Npu { stand_in: way.machine(), device: Device::open(&npu_name(0)).unwrap() };
        scenario(&site);
        assert_eq!(site.stand_in.report().violations, Vec::<String>::new());
    }
}

struct Npu {
    stand_in: StandIn,
    device: Device,
}

impl Site for Npu {
    fn name(&self) -> &str {
        "a simulated Ascend device"
    }

    fn targets(&self) -> (u64, u64) {
        (if super::full() { FULL } else { USUAL }, 0)
    }

    fn phases(&self, target: u64, phase: &mut dyn FnMut(On<'_>, Setup)) {
        for (shared, exact) in [(false, false), (false, true), (true, false), (true, true)] {
            let setup = Setup { workers: 2, exact, target: target / 4 };
            phase((&Late { stand_in: &self.stand_in, shared }, &self.device), setup);
        }
    }
}

struct Late<'a> {
    stand_in: &'a StandIn,
    shared: bool,
}

impl Late<'_> {
    fn fail(&self, name: &str, code: u32, after: bool) {
        self.stand_in.fail(name, 1, code, after);
    }
}

impl Machine for Late<'_> {
    fn delay(&self, stream: &Stream) {
        if self.shared {
            acl::raw_stream(stream).unwrap();
        }
    }

    fn fail_copy(&self, source: DeviceSlice) -> DeviceSlice {
        self.fail("aclrtMemcpyAsync", 507_000, true);
        source
    }

    fn fail_query(&self, capture: bool) {
        self.fail("aclrtQueryEventStatus", if capture { 107_028 } else { 207_001 }, false);
    }

    fn fail_record(&self) {
        self.fail("aclrtRecordEvent", 507_000, true);
    }

    fn calm(&self) {
        self.stand_in.calm();
    }
}
