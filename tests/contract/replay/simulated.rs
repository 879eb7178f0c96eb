//! Simulated devices. They copy only when a caller waits, so every copy is as late as it may be; and what a
//! library does that copies from memory which was given away early, the simulation does. Their calls are
//! reported as failed and were done all the same.
//!
//! GPUs are simulated twice: by themselves, and moved by hand, where a copy runs only when the worker cannot
//! go on without it or the seed says so. Ascend devices have the library of today, on a host and on the
//! device itself, and that of 2024. No Ascend device was at hand: on a real one these scenarios are not run.
//!
//! In half of the phases only pinpool uses the streams; in the others their handles are given out.

use pinpool::{Device, DeviceSlice, Stream};

use super::checkouts;
use super::worker::{Machine, Phase, Site};
use crate::support::doubles::{self, StandIn};

/// The commands that make a copy, a poll, a poll because of a capture, and the record of an event fail.
type Fails = [&'static str; 4];

struct Late {
    /// Sends a command to the simulation.
    tell: Box<dyn Fn(&str) + Send + Sync>,
    /// Makes one that is moved by hand do one operation.
    step: Option<Box<dyn Fn() -> bool + Send + Sync>>,
    fails: Fails,
    /// Gives out a stream's handle.
    share: Option<fn(&Stream)>,
}

impl Machine for Late {
    fn step(&self) -> Option<bool> {
        self.step.as_ref().map(|step| step())
    }

    fn delay(&self, stream: &Stream) {
        if let Some(share) = self.share {
            share(stream);
        }
    }

    fn fail_copy(&self, source: DeviceSlice) -> DeviceSlice {
        (self.tell)(self.fails[0]);
        source
    }

    fn fail_query(&self, capture: bool) {
        (self.tell)(self.fails[1 + usize::from(capture)]);
    }

    fn fail_record(&self) {
        (self.tell)(self.fails[3]);
    }

    fn calm(&self) {
        (self.tell)("calm");
    }
}

/// Phases on two threads.
fn phases(stand_in: &StandIn, name: &str, fails: Fails, share: fn(&Stream), target: u64) -> Vec<Phase> {
    let phase = |(shared, exact): (bool, bool)| {
        let stand_in = stand_in.clone();
        let tell = Box::new(move |command: &str| drop(stand_in.command(command)));
        let machine = Box::new(Late { tell, step: None, fails, share: shared.then_some(share) });
        Phase { device: Device::open(name).unwrap(), machine, workers: 2, exact, target }
    };
    [(false, false), (false, true), (true, false), (true, true)].map(phase).into()
}

#[cfg(feature = "cuda")]
pub fn gpus() -> Site {
    const FAILS: Fails = [
        "fail cuMemcpyDtoHAsync_v2 1 999 true",
        "fail cuEventQuery 1 2 false",
        "fail cuEventQuery 1 900 false",
        "fail cuEventRecord 1 999 true",
    ];
    let stand_in = StandIn::gpus(pinpool_sim::cuda::Driver::Cuda12_8);
    let share = |stream: &Stream| _ = pinpool::cuda::raw_stream(stream).unwrap();
    let target = checkouts(60_000, 10_000);
    let mut phases = phases(&stand_in, &doubles::gpu_name(0), FAILS, share, target / 5);
    phases.extend([(1, false), (2, true)].map(|(seed, exact)| {
        let by_hand = crate::support::hand::Machine::new(1, 1 << 20, seed);
        let (device, told) = (by_hand.device(0), by_hand.clone());
        let tell = Box::new(move |command: &str| drop(told.command(command)));
        let step: Box<dyn Fn() -> bool + Send + Sync> = Box::new(move || by_hand.step());
        let machine = Box::new(Late { tell, step: Some(step), fails: FAILS, share: None });
        Phase { device, machine, workers: 1, exact, target: target / 10 }
    }));
    Site { name: "simulated GPUs".into(), target, phases, stand_in: Some(stand_in) }
}

#[cfg(feature = "acl")]
pub fn npus(way: doubles::npu::Way) -> Site {
    const FAILS: Fails = [
        "fail aclrtMemcpyAsync 1 507000 true",
        "fail aclrtQueryEventStatus 1 207001 false",
        "fail aclrtQueryEventStatus 1 107028 false",
        "fail aclrtRecordEvent 1 507000 true",
    ];
    let stand_in = way.machine();
    let share = |stream: &Stream| _ = pinpool::acl::raw_stream(stream).unwrap();
    let target = checkouts(40_000, 4_000);
    let phases = phases(&stand_in, &doubles::npu_name(0), FAILS, share, target / 4);
    Site { name: format!("an NPU, {}", way.name), target, phases, stand_in: Some(stand_in) }
}
