//! The first GPU of the machine, where there is one.
//!
//! There each scenario has a process of its own, since an address that was freed on purpose must not be given
//! out again to another test. In half of the phases the streams' handles are given out and a kernel of a
//! tenth of a millisecond now and then holds a stream up, so that dozens of copies are in flight behind it
//! while their handles are dropped.
//!
//! A real driver cannot be told to fail: copies that are to fail are from memory that its owner has freed,
//! which the driver refuses when it is called.

use std::sync::OnceLock;
use std::time::Duration;

use pinpool::{Device, DeviceSlice, Stream, cuda};

use super::checkouts;
use super::worker::{Machine, Phase, Site};
use crate::support::doubles::{self, gpu::Raw};
use crate::support::kernels::Kernels;

/// Set in a child, which is to run on the real GPU.
const REAL: &str = "PINPOOL_REPLAY_GPU";
/// Longer than any scenario takes.
const LIMIT: Duration = Duration::from_secs(560);
/// How long the kernels run that hold up a stream.
const HOLD_UP_NANOSECONDS: u64 = 100_000;
/// Bytes that are freed on purpose: more than any block that the driver cuts small allocations from.
const GONE: usize = 64 << 20;

/// Runs a scenario in a child on the machine's GPU. `false`: there is none.
pub fn in_a_child(test: &str) -> bool {
    let library = match doubles::real_driver() {
        Ok((path, text)) => {
            println!("{test}: on {text}");
            path
        }
        Err(why) => {
            assert!(!doubles::required(), "{test}: PINPOOL_REQUIRE names a GPU: {why}");
            return false;
        }
    };
    let library = library.to_str().expect("a path in UTF-8");
    // Kernels are loaded with their module, not when they are first launched, which may wait for whatever
    // runs.
    let environment = [(REAL, "1"), (doubles::PATH, library), ("CUDA_MODULE_LOADING", "EAGER")];
    doubles::passes(test, &environment, LIMIT);
    true
}

/// The site of such a child. `None`: this process is none.
pub fn of_child() -> Option<Site> {
    /// The driver beside pinpool, and the primary context, which pinpool works in too.
    static DRIVER: OnceLock<(Raw, usize)> = OnceLock::new();
    std::env::var_os(REAL)?;
    let named = std::env::var_os(doubles::PATH).expect("the child is told which library to load");
    let (raw, context) = DRIVER.get_or_init(|| {
        let raw = Raw::at(named.as_ref());
        let context = raw.enter(0);
        (raw, context)
    });
    let target = checkouts(1_700_000, 10_000);
    let phases = [(false, false), (false, true), (true, false), (true, true)].map(|(shared, exact)| {
        let kernels = shared.then(|| Kernels::load(raw));
        let machine = Box::new(Real { raw, context: *context, kernels, gone: OnceLock::new() });
        let device = Device::open("cuda:0").unwrap();
        Phase { device, machine, workers: 2, exact, target: target / 4 }
    });
    Some(Site { name: "a real GPU".into(), target, phases: phases.into(), stand_in: None })
}

struct Real {
    raw: &'static Raw,
    context: usize,
    /// Where streams' handles are given out.
    kernels: Option<Kernels<'static>>,
    gone: OnceLock<DeviceSlice>,
}

impl Machine for Real {
    fn ready(&self, device: &Device) {
        self.enter();
        let at = self.raw.memory(GONE);
        // SAFETY: what is copied from it is refused from here on: nothing is allocated any more in this phase
        // that could lie there, and it is not written to.
        let memory = unsafe { device.raw_memory(at as u64, GONE, ()) }.unwrap();
        self.raw.ok("cuMemFree_v2", &[at]);
        assert!(self.gone.set(memory).is_ok(), "a phase begins once");
    }

    fn enter(&self) {
        self.raw.current(self.context);
    }

    fn delay(&self, stream: &Stream) {
        if let Some(kernels) = &self.kernels {
            kernels.spin(HOLD_UP_NANOSECONDS, cuda::raw_stream(stream).unwrap() as usize);
        }
    }

    fn fail_copy(&self, source: DeviceSlice) -> DeviceSlice {
        let gone = self.gone.get().expect("the phase has begun");
        gone.slice(..source.len()).unwrap()
    }
}
