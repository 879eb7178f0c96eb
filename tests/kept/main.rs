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
//! | `package` | dependencies, commands, the fields of a snapshot |
//!
//! Most tests run on each kind of device ([`on_every_device`]): the host's, the stand-in libcuda and the stand-in
//! libascendcl in their versions. Each run has a process of its own.

#![cfg(all(feature = "acl", feature = "cuda", target_os = "linux"))]
#![allow(unsafe_code, reason = "raw handles, and memory by its address")]

mod ascend;
mod cuda;
mod memory;
mod package;
#[path = "../support/mod.rs"]
mod support;
mod trouble;
mod waiting;

use std::ffi::OsStr;
use std::time::{Duration, Instant};

use pinpool::host::{HostConfig, HostNode};
use pinpool::{Device, Error, PinnedBuf, Pool, Stream, Unpinned};
use support::doubles::gpu::{Gpu, on_gpu};
use support::doubles::npu::{self, WAYS, Way};
use support::doubles::{self, HANG, StandIn};
use support::{process, skip};

/// Set in the child that runs a test on the host device.
const ON_HOST: &str = "PINPOOL_TEST_ON_HOST";
/// Devices of each node and of each stand-in.
const DEVICES: u32 = 6;
/// Far longer than a test takes: a process that runs for longer hangs.
const LIMIT: Duration = Duration::from_secs(120);
/// The stand-in libcuda as it is today, and as drivers of other versions.
const CUDA_VERSIONS: [&str; 4] = ["", "cuda13", "cuda12", "cuda11"];

/// What a test has in its process.
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
    /// `None` in the process that starts the others.
    fn of_this_process() -> Option<Self> {
        if doubles::is_set() {
            let stand_in = StandIn::of_this_process().expect("the stand-in libcuda");
            return Some(Self { device: Device::open("cuda:0").unwrap(), what: What::Gpu(stand_in) });
        }
        if npu::is_set() {
            let stand_in = npu::stand_in().expect("the stand-in libascendcl");
            return Some(Self { device: Device::open("acl:0").unwrap(), what: What::Npu(stand_in) });
        }
        std::env::var_os(ON_HOST)?;
        let node = HostNode::new(HostConfig::new().devices(DEVICES).memory(64 << 20)).unwrap();
        Some(Self { device: Device::on(&node, 0).unwrap(), what: What::Host(node) })
    }

    fn other(&self, ordinal: u32) -> Device {
        match &self.what {
            What::Host(node) => Device::on(node, ordinal).unwrap(),
            What::Gpu(_) => Device::open(&format!("cuda:{ordinal}")).unwrap(),
            What::Npu(_) => Device::open(&format!("acl:{ordinal}")).unwrap(),
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
            What::Gpu(stand_in) | What::Npu(stand_in) => {
                let report = stand_in.final_report();
                assert_eq!((report.violations, report.leaks), (vec![], vec![]));
            }
        }
    }
}

/// Runs the body of a test on each kind of device, each in a process of its own; afterwards nothing is left there.
fn on_every_device(test: &str, body: impl FnOnce(&On)) {
    on_every_device_leaving(test, |on| {
        body(&on);
        on.ends();
    });
}

/// The same for a test that leaves things behind.
fn on_every_device_leaving(test: &str, body: impl FnOnce(On)) {
    if let Some(on) = On::of_this_process() {
        return body(on);
    }
    again(test, "on the host device", &[(ON_HOST, OsStr::new("1"))]);
    on_each_libcuda(test);
    WAYS.iter().for_each(|way| on_libascendcl(test, *way));
}

/// Runs the body of a test on each version of the stand-in libcuda, or on the GPU that `PINPOOL_REQUIRE` names.
fn on_each_gpu(test: &str, body: impl FnOnce(&Gpu)) {
    match doubles::is_set() || doubles::required() {
        true => on_gpu(test, body),
        false => on_each_libcuda(test),
    }
}

/// Runs the body of a test on each Ascend library and machine.
fn on_each_npu(test: &str, body: impl FnOnce(&On)) {
    if !npu::is_set() {
        return WAYS.iter().for_each(|way| on_libascendcl(test, *way));
    }
    let on = On::of_this_process().expect("this is the child");
    body(&on);
    on.ends();
}

fn on_each_libcuda(test: &str) {
    for version in CUDA_VERSIONS {
        let library = if version.is_empty() { doubles::named_or_built() } else { doubles::older(version) };
        match library {
            Some(library) => {
                again(test, &format!("on libcuda {version}"), &[(doubles::PATH, library.as_os_str())])
            }
            None => return skip!("there is no cargo to build the stand-in libcuda with"),
        }
    }
}

fn on_libascendcl(test: &str, way: Way) {
    let Some(library) = way.library() else {
        return skip!("there is no cargo to build the stand-in libascendcl with");
    };
    let mut environment = vec![(doubles::ascendcl::PATH, library.as_os_str())];
    environment.extend(way.environment.iter().map(|(name, value)| (*name, OsStr::new(value))));
    again(test, way.name, &environment);
}

/// Runs this very test again in a process of its own, with more in its environment.
fn again(test: &str, how: &str, environment: &[(&str, &OsStr)]) {
    let devices = DEVICES.to_string();
    let mut command = process::command(test);
    // All copies here are of whole segments, so the stand-in libascendcl can check the distance between these.
    command.env("PINPOOL_STANDIN_DEVICES", &devices).env("PINPOOL_STANDIN_SEGMENTS", "1");
    let child = doubles::ended(command.envs(environment.iter().copied()), LIMIT);
    process::forward(&child.stdout, &child.stderr);
    let passed = child.status.is_some_and(|status| status.success()) && child.stdout.contains("1 passed");
    assert!(passed, "{test} {how}: the child {}: {}", child.how(), child.last_words());
}

fn calls(stand_in: &StandIn, name: &str) -> u64 {
    stand_in.report().calls.iter().find(|call| call.0 == name).map_or(0, |call| call.1)
}

/// The flags that a call of the stand-in libcuda was made with, and how often: `("cuMemHostAlloc 3", 2)`.
fn flags(stand_in: &StandIn, name: &str) -> Vec<(String, u64)> {
    let mut flags = stand_in.report().flags;
    flags.retain(|(call, _)| call.split(' ').next() == Some(name));
    flags
}

fn filled(pool: &Pool, bytes: &[u8]) -> PinnedBuf {
    let mut buf = pool.checkout_timeout(bytes.len(), HANG).unwrap();
    buf.extend_from_slice(bytes);
    buf
}

/// Up and down again, and compared.
fn round_trip(pool: &Pool, stream: &Stream, sent: &[u8]) {
    let memory = stream.device().alloc(sent.len()).unwrap();
    drop(stream.upload(filled(pool, sent), &memory).unwrap());
    let landing = pool.checkout_timeout(sent.len(), HANG).unwrap();
    assert!(*stream.download(&memory, landing).unwrap().wait().unwrap() == *sent);
}

/// Waits until it is so.
fn until(what: &str, mut so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !so() {
        assert!(since.elapsed() < HANG, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
