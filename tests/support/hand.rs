//! Simulated GPUs that a test moves by hand: nothing runs until the test says so, and the same seed and calls give the
//! same run.
//!
//! The devices have no threads of the crate's ([`Device::by_hand`]). What is submitted stays queued in the simulation
//! until [`Machine::step`] runs one operation, or a call that waits does. Used by the fuzz targets too.
//!
//! A test fails if it broke a rule of the driver's by the time it drops its machine.

use std::sync::Arc;

use pinpool::{Device, DeviceSlice};
use pinpool_sim::cuda::Driver;
use pinpool_sim::{Fault, Machine as Gpus};

/// The driver's calls that a pool and copies make.
pub const CALLS: [&str; 15] = [
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuStreamWaitEvent",
];

/// Whether the call puts an operation into a stream's queue.
pub fn queues(call: &str) -> bool {
    call.starts_with("cuMemcpy") || ["cuEventRecord", "cuStreamWaitEvent"].contains(&call)
}

/// How a call fails: with the class of error that the name says, before it has done anything, but for the last two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    Argument,
    Transient,
    DeviceLost,
    Capture,
    /// A transient error, but what the call queues runs all the same. Of a call that queues nothing it is a transient error.
    RunsAnyway,
    /// The call succeeds, but what it queues does not run, nor what follows on that stream, until [`Machine::resume`]. Of
    /// a call that queues nothing it is no failure.
    Stall,
}

impl Failure {
    pub const ALL: [Self; 6] =
        [Self::Argument, Self::Transient, Self::DeviceLost, Self::Capture, Self::RunsAnyway, Self::Stall];

    fn code(self) -> u32 {
        match self {
            Self::Argument => 400,
            Self::Transient | Self::RunsAnyway => 2,
            Self::DeviceLost => 700,
            Self::Capture => 900,
            Self::Stall => 0,
        }
    }
}

/// What the last owner of a machine drops.
#[derive(Debug)]
struct Guard(Gpus);

impl Drop for Guard {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let broken = lines(self.0, |line| line.starts_with("violation"));
            assert_eq!(broken, "", "rules of the driver's were broken");
        }
    }
}

fn lines(gpus: Gpus, wanted: impl Fn(&str) -> bool) -> String {
    gpus.command("report").lines().filter(|line| wanted(line)).collect::<Vec<_>>().join("\n")
}

/// A machine of GPUs that only the test moves, by what the simulation has for that (`pinpool_sim::Machine`).
#[derive(Clone, Debug)]
pub struct Machine {
    gpus: Gpus,
    devices: usize,
    guard: Arc<Guard>,
}

impl std::ops::Deref for Machine {
    type Target = Gpus;
    fn deref(&self) -> &Gpus {
        &self.gpus
    }
}

impl Machine {
    /// So many GPUs with so many bytes of memory each, whose order of steps follows from the seed.
    pub fn new(devices: usize, memory: usize, seed: u64) -> Self {
        let gpus = Gpus::gpus(Driver::Cuda12_8);
        // SAFETY: the simulation's functions have the driver's signatures, and stay.
        unsafe { pinpool::cuda::install(gpus.ordinal(0), &|name| gpus.symbol(name)) }
            .expect("the simulation has every call");
        gpus.command(&format!("setup devices {devices} {memory}"));
        gpus.command(&format!("by-hand {seed}"));
        Self { gpus, devices, guard: Arc::new(Guard(gpus)) }
    }

    /// As it was made, with nothing left of what was: for many short runs, since a machine stays to the process's end.
    /// No device is used any more.
    pub fn renew(&self, seed: u64) {
        (0..self.devices).for_each(|device| Device::abandon(&self.name(device)));
        self.command("reset");
        self.command(&format!("by-hand {seed}"));
        self.enter();
    }

    /// The name by which a device is opened.
    pub fn name(&self, device: usize) -> String {
        format!("cuda:{}", self.gpus.ordinal(device))
    }

    /// Opens a device, or gives another handle to it.
    pub fn device(&self, device: usize) -> Device {
        let gpus = self.gpus;
        Device::by_hand(&self.name(device), move || gpus.step()).expect("it can be opened")
    }

    /// Makes the nth call of that name from now on fail once, before it has done anything.
    pub fn fail(&self, call: &str, nth: u64, code: u32) {
        self.gpus.fail(Fault { call: call.into(), left: nth, code, after: false });
    }

    /// The same by the kind of failure.
    pub fn fault(&self, call: &str, nth: u64, failure: Failure) {
        let after = failure == Failure::Stall || (failure == Failure::RunsAnyway && queues(call));
        self.gpus.fail(Fault { call: call.into(), left: nth, code: failure.code(), after });
    }

    /// No call fails any more. Returns how many were still to fail.
    pub fn calm(&self) -> usize {
        self.gpus.calm().len()
    }

    /// Does something while no call fails.
    pub fn calmly<R>(&self, body: impl FnOnce() -> R) -> R {
        let faults = self.gpus.calm();
        let result = body();
        faults.into_iter().for_each(|fault| self.gpus.fail(fault));
        result
    }

    /// While it is set nothing runs.
    pub fn hang(&self, hung: bool) {
        self.command(&format!("hang {hung}"));
    }

    /// Loses a device: an illegal address was used.
    pub fn kill(&self, device: usize) {
        self.command(&format!("kill {device} 700"));
    }

    /// What device memory holds now. Nothing runs for it.
    pub fn read(&self, memory: &DeviceSlice) -> Vec<u8> {
        self.gpus.read(memory.address(), memory.len())
    }

    /// Rules that were broken, and what was not given back, a line each.
    pub fn wrong(&self) -> String {
        lines(self.gpus, |line| line.starts_with("violation") || line.starts_with("leak"))
    }

    /// The simulation's report: broken rules, what is left, counts of calls.
    pub fn report(&self) -> String {
        self.command("report")
    }
}
