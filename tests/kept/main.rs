//! What the crate was asked for: one short test for each thing, by the public face alone. A change that removes code
//! keeps these tests: they may be ported to another name of the same thing, and none is removed.
//!
//! | file | what stays |
//! | --- | --- |
//! | `cuda` | flags of `cudaHostAlloc`, `cudaMallocHost`, the deferred device pointer, managed memory, the device heap, one primary context, per-thread default streams, holds, graphs |
//! | `ascend` | `aclrtMallocHost` and `aclrtFreeHost`, EP and RC mode, `aclrtMemset` |
//! | `memory` | the kinds of copies, registering, adopting, announcing, trimming, device addresses, huge pages, the segment rule, size 0 |
//! | `waiting` | several buffers at once, deadlines, tasks, futures that are dropped, stream-ready claims |
//! | `trouble` | errors of earlier launches, forks, the end of the process |
//! | `misuse` | what the types rule out |
//! | `package` | dependencies, commands, the fields of a snapshot |
//!
//! Most tests run on each kind of device ([`on_every_device`]): the host's, simulated GPUs and simulated Ascend devices, with
//! drivers of several versions.

#![cfg(all(feature = "acl", feature = "cuda", target_os = "linux"))]
#![allow(unsafe_code, reason = "raw handles, and memory by its address")]

mod ascend;
mod cuda;
mod memory;
mod misuse;
mod package;
#[path = "../support/mod.rs"]
mod support;
mod trouble;
mod waiting;

use std::sync::Arc;
use std::time::Duration;

use pinpool::host::{HostConfig, HostNode};
use pinpool::{Backing, Device, Error, HostAllocFlags, Pool, Request, Stream, Unpinned};
use pinpool_sim::cuda::Driver;
use support::doubles::gpu::{Gpu, calls, filled, on_driver, on_gpu, round_trip, until};
use support::doubles::npu::{self, WAYS};
use support::doubles::{self, HANG, StandIn, gpu_name, npu_name, on_stand_in};
use support::process::forked;
use support::rig::block_on;
use support::{bytes, own_process, skip};

/// Devices of each machine, each with so many bytes of memory.
const DEVICES: u32 = 6;
const MEMORY: usize = 64 << 20;
/// Drivers of several versions; the first is what machines have today.
const DRIVERS: [Driver; 3] = [Driver::Cuda12_8, Driver::Cuda12_0, Driver::Cuda11_0];

/// What a test has.
struct On {
    /// The first device.
    device: Device,
    what: What,
}

enum What {
    Host(HostNode),
    Gpu(StandIn),
    Npu(StandIn),
}

impl On {
    fn host() -> Self {
        let node = HostNode::new(HostConfig::new().devices(DEVICES).memory(MEMORY)).unwrap();
        Self { device: Device::on(&node, 0).unwrap(), what: What::Host(node) }
    }

    fn gpus(driver: Driver) -> Self {
        let stand_in = with_devices(StandIn::gpus(driver));
        Self { device: Device::open(&gpu_name(0)).unwrap(), what: What::Gpu(stand_in) }
    }

    fn npus(way: npu::Way) -> Self {
        let stand_in = with_devices(way.machine());
        // All copies here are of whole segments, so the distance between these can be checked.
        stand_in.command("segments true");
        Self { device: Device::open(&npu_name(0)).unwrap(), what: What::Npu(stand_in) }
    }

    fn other(&self, ordinal: u32) -> Device {
        match &self.what {
            What::Host(node) => Device::on(node, ordinal).unwrap(),
            What::Gpu(_) => Device::open(&gpu_name(ordinal as usize)).unwrap(),
            What::Npu(_) => Device::open(&npu_name(ordinal as usize)).unwrap(),
        }
    }

    fn stand_in(&self) -> Option<&StandIn> {
        match &self.what {
            What::Host(_) => None,
            What::Gpu(stand_in) | What::Npu(stand_in) => Some(stand_in),
        }
    }

    fn is_gpu(&self) -> bool {
        matches!(self.what, What::Gpu(_))
    }

    fn is_npu(&self) -> bool {
        matches!(self.what, What::Npu(_))
    }

    /// Whether this is an Ascend device's refusal of what such devices or libraries lack.
    fn lacks(&self, error: &Error) -> bool {
        self.is_npu() && matches!(error, Error::Unsupported(_))
    }

    /// A GPU's driver has got this call, with these flags, so often, and none with others.
    fn was_called(&self, call: &str, count: u64) {
        if let What::Gpu(stand_in) = &self.what {
            let name = call.split(' ').next().unwrap();
            assert_eq!(flags(stand_in, name), [(call.to_owned(), count)]);
        }
    }

    /// How often a call of the stand-in was made so far; 0 on the host.
    fn calls(&self, name: &str) -> u64 {
        self.stand_in().map_or(0, |stand_in| calls(stand_in, name))
    }

    fn pool(&self, capacity: usize) -> Pool {
        Pool::builder(&self.device).capacity(capacity).unpinned(Unpinned::Allow).build().unwrap()
    }

    fn stream(&self) -> Stream {
        self.device.stream().unwrap()
    }

    /// While it is set, nothing that was submitted to the first device runs.
    fn hang(&self, hung: bool) {
        match (&self.what, hung) {
            (What::Host(node), true) => node.hang(0),
            (What::Host(node), false) => node.resume(0),
            (What::Gpu(stand_in) | What::Npu(stand_in), hung) => stand_in.hang(hung),
        }
    }

    /// A device is lost, as by a launch that went wrong earlier.
    fn kill(&self, ordinal: u32) {
        match &self.what {
            What::Host(node) => node.kill(ordinal),
            What::Gpu(stand_in) => stand_in.kill(ordinal as usize, 700),
            What::Npu(stand_in) => stand_in.kill(ordinal as usize, 507_010),
        }
    }

    /// The test has dropped everything else: the device closes, no rule was broken, and nothing is left.
    fn ends(self) {
        let Self { device, what } = self;
        if let Err(error) = device.close(HANG) {
            panic!("{error}");
        }
        match what {
            What::Host(node) => {
                let live = node.live(0);
                assert_eq!((live.streams, live.allocations, live.pinned_bytes), (0, 0, 0), "{live:?}");
            }
            What::Gpu(stand_in) | What::Npu(stand_in) => stand_in.no_trace(),
        }
    }
}

fn with_devices(stand_in: StandIn) -> StandIn {
    stand_in.command(&format!("devices {DEVICES} {MEMORY}"));
    stand_in
}

/// Runs the body of a test on each kind of device; afterwards nothing is left there.
fn on_every_device(body: impl Fn(&On)) {
    on_every_device_leaving(|on| {
        body(&on);
        on.ends();
    });
}

/// The same for a test that leaves things behind.
fn on_every_device_leaving(body: impl Fn(On)) {
    if doubles::simulated_elsewhere() {
        return;
    }
    println!("on the host device");
    body(On::host());
    for driver in DRIVERS {
        println!("on {driver:?}");
        body(On::gpus(driver));
    }
    for way in WAYS {
        println!("on {}", way.name);
        body(On::npus(way));
    }
}

/// Runs the body of a test with each version of the driver, or on the GPU that `PINPOOL_REQUIRE` names.
fn on_each_gpu(body: impl Fn(&Gpu)) {
    if doubles::required() {
        return on_gpu(body);
    }
    for driver in DRIVERS {
        println!("on {driver:?}");
        on_driver(driver, &body);
    }
}

/// Runs the body of a test with each Ascend library and machine.
fn on_each_npu(body: impl Fn(&On)) {
    for way in WAYS {
        println!("on {}", way.name);
        let on = On::npus(way);
        body(&on);
        on.ends();
    }
}

/// The flags that a call of the stand-in libcuda was made with, and how often: `("cuMemHostAlloc 3", 2)`.
fn flags(stand_in: &StandIn, name: &str) -> Vec<(String, u64)> {
    let mut flags = stand_in.report().flags;
    flags.retain(|(call, _)| call.split(' ').next() == Some(name));
    flags
}
