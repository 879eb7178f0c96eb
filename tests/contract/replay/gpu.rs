//! The first GPU of the machine, or, where there is none, a simulated one.
//!
//! On a real GPU each scenario has a process of its own, since an address that was freed on purpose must not be given out
//! again to another test.
//!
//! In half of the phases only pinpool uses the streams; in the others their handles are given out, and on a real GPU a
//! kernel of a tenth of a millisecond now and then holds a stream up, so that dozens of copies are in flight behind it
//! while their handles are dropped. A simulated GPU copies only when a caller waits; in two more phases a simulated GPU is
//! moved by hand, where a copy runs only when the worker cannot go on without it or the seed says so.
//!
//! Failures: the simulation reports calls as failed that were done. A real driver cannot be told to; there the copies
//! that are to fail are from memory that its owner has freed, which the driver refuses when it is called.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use pinpool::{Device, DeviceSlice, Stream, cuda};
use pinpool_sim::cuda::Driver;

use super::worker::{Machine, On, Setup, Site};
use crate::support::doubles::{self, StandIn, gpu_name};
use crate::support::hand;
use crate::support::kernels::{Kernels, Raw};

/// Set in a child, which is to run on the real GPU.
const REAL: &str = "PINPOOL_REPLAY_GPU";
/// Longer than any scenario takes.
const LIMIT: Duration = Duration::from_secs(560);
/// Checkouts per scenario: on a real GPU and on a simulated one when everything is run, and otherwise.
const FULL: u64 = 1_700_000;
const FULL_SIMULATED: u64 = 60_000;
const USUAL: u64 = 10_000;
/// How long the kernels run that hold up a stream.
const HOLD_UP_NANOSECONDS: u64 = 100_000;
/// Bytes that are freed on purpose: more than any block that the driver cuts small allocations from.
const GONE: usize = 64 << 20;

/// Runs a scenario on a GPU.
pub fn on_gpu(test: &str, scenario: fn(&dyn Site)) {
    if std::env::var_os(REAL).is_some() {
        let named = std::env::var_os(doubles::PATH).expect("the child is told which library to load");
        return scenario(&Gpu::new(Raw::new(named.as_ref()), true));
    }
    let library = match doubles::real_driver() {
        Ok((path, text)) => {
            println!("{test}: on {text}");
            path
        }
        Err(why) => {
            assert!(!doubles::required(), "{test}: PINPOOL_REQUIRE names a GPU: {why}");
            let stand_in = StandIn::gpus(Driver::Cuda12_8);
            scenario(&Gpu::new(Raw::of(stand_in.clone()), false));
            return assert_eq!(stand_in.report().violations, Vec::<String>::new());
        }
    };
    let library = library.to_str().expect("a path in UTF-8");
    // Kernels are loaded with their module, not when they are first launched, which may wait for whatever runs.
    let environment = [(REAL, "1"), (doubles::PATH, library), ("CUDA_MODULE_LOADING", "EAGER")];
    let child = doubles::child(test, &environment, LIMIT);
    crate::support::process::forward(&child.stdout, &child.stderr);
    let ended_well = child.status.is_some_and(|status| status.success());
    assert!(ended_well, "{test}: the child {}: {}", child.how(), child.last_words());
    assert!(child.stdout.contains("1 passed"), "{test} did not run");
}

/// The driver beside pinpool, never unloaded.
struct Inner {
    raw: Raw,
    /// The primary context, which pinpool works in too.
    context: usize,
    real: bool,
}

impl Inner {
    fn enter(&self) {
        self.raw.set_current(self.context);
    }
}

struct Gpu {
    inner: &'static Inner,
    device: Device,
    /// Whether it is a real one.
    kernels: Option<Arc<Kernels<'static>>>,
}

impl Gpu {
    fn new(raw: Raw, real: bool) -> Self {
        let context = raw.enter(0);
        let inner = super::kept(Inner { raw, context, real });
        let kernels = real.then(|| Arc::new(Kernels::load(&inner.raw)));
        Self { inner, device: Device::open(&gpu_name(0)).unwrap(), kernels }
    }
}

impl Site for Gpu {
    fn name(&self) -> &str {
        if self.inner.real { "a real GPU" } else { "a simulated GPU" }
    }

    fn targets(&self) -> (u64, u64) {
        let full = if self.inner.real { FULL } else { FULL_SIMULATED };
        (if super::full() { full } else { USUAL }, 0)
    }

    fn phases(&self, target: u64, phase: &mut dyn FnMut(On<'_>, Setup)) {
        let by_itself = if self.inner.real { target / 4 } else { target / 5 };
        for (shared, exact) in [(false, false), (false, true), (true, false), (true, true)] {
            let setup = Setup { workers: 2, exact, target: by_itself };
            let (inner, kernels) = (self.inner, self.kernels.clone());
            if inner.real {
                phase((&Real { inner, kernels, shared, gone: OnceLock::new() }, &self.device), setup);
            } else {
                let tell = |command: &str| drop(inner.raw.stand_in().command(command));
                phase((&Late { tell: &tell, hand: None, shared }, &self.device), setup);
            }
        }
        for (seed, exact) in [(1, false), (2, true)].into_iter().filter(|_| !self.inner.real) {
            let machine = hand::Machine::new(1, 1 << 20, seed);
            let tell = |command: &str| drop(machine.command(command));
            let on = Late { tell: &tell, hand: Some(&machine), shared: false };
            phase((&on, &machine.device(0)), Setup { workers: 1, exact, target: target / 10 });
        }
    }
}

struct Late<'a> {
    /// Sends a command to the simulation.
    tell: &'a (dyn Fn(&str) + Sync),
    /// The machine that is moved by hand, if it is.
    hand: Option<&'a hand::Machine>,
    shared: bool,
}

impl Machine for Late<'_> {
    fn by_hand(&self) -> bool {
        self.hand.is_some()
    }

    fn step(&self) -> bool {
        self.hand.is_some_and(hand::Machine::step)
    }

    fn delay(&self, stream: &Stream) {
        if self.shared {
            cuda::raw_stream(stream).unwrap();
        }
    }

    fn fail_copy(&self, source: DeviceSlice) -> DeviceSlice {
        (self.tell)("fail cuMemcpyDtoHAsync_v2 1 999 true");
        source
    }

    fn fail_query(&self, capture: bool) {
        (self.tell)(&format!("fail cuEventQuery 1 {} false", if capture { 900 } else { 2 }));
    }

    fn fail_record(&self) {
        (self.tell)("fail cuEventRecord 1 999 true");
    }

    fn calm(&self) {
        (self.tell)("calm");
    }
}

struct Real {
    inner: &'static Inner,
    kernels: Option<Arc<Kernels<'static>>>,
    shared: bool,
    gone: OnceLock<DeviceSlice>,
}

impl Machine for Real {
    fn ready(&self, device: &Device) {
        self.inner.enter();
        let at = self.inner.raw.alloc(GONE);
        // SAFETY: what is copied from it is refused from here on: nothing is allocated any more in this phase that
        // could lie there, and it is not written to.
        let memory = unsafe { device.raw_memory(at, GONE, ()) }.unwrap();
        self.inner.raw.free(at);
        assert!(self.gone.set(memory).is_ok(), "a phase begins once");
    }

    fn enter(&self) {
        self.inner.enter();
    }

    fn delay(&self, stream: &Stream) {
        if let Some(kernels) = self.kernels.as_ref().filter(|_| self.shared) {
            kernels.spin(HOLD_UP_NANOSECONDS, cuda::raw_stream(stream).unwrap() as usize);
        }
    }

    fn fail_copy(&self, source: DeviceSlice) -> DeviceSlice {
        let gone = self.gone.get().expect("the phase has begun");
        gone.slice(..source.len()).unwrap()
    }
}
