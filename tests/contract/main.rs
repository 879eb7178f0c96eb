//! What any device must do, seen from outside: one suite, written once, run on every device there is.
//!
//! After each test its device is closed, which waits until everything was given back: so each test shows, too, that it
//! leaves nothing behind.
//!
//! A device joins by one more test that hands a [`Kind`] to [`run`]. Nothing here knows how a device works, and nothing
//! asserts how long anything takes. `PINPOOL_REQUIRE=host:0,cuda:0` names devices whose tests must not be skipped; without
//! it a device that cannot be opened is reported and left out.
//!
//! GPUs: with one named by `PINPOOL_REQUIRE` the machine's own driver is used. Otherwise the suite runs on simulated GPUs,
//! whose driver's rules must then not have been broken, and once more on one that a test moves by hand. Ascend devices
//! likewise, with a library of today and of 2024, and in both run modes.

#![allow(unsafe_code, reason = "memory by its address")]

mod closing;
mod copier;
mod copies;
mod memories;
mod memory;
mod refusals;
mod replay;
#[path = "../support/mod.rs"]
mod support;
mod tier;
mod transfers;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pinpool::host::{HostConfig, HostNode};
use pinpool::{Device, DeviceSlice, Error, PinnedBuf, Pool, Stream, SubmitError, Unpinned};
#[cfg(any(feature = "acl", feature = "cuda"))]
use support::doubles;
use support::doubles::gpu::filled;
use support::{HANG, block_on, bytes, in_use, skip};

struct Subject {
    /// As [`Device::open`] and `PINPOOL_REQUIRE` name it.
    device: Device,
    /// Another device of the same family, where there is one.
    other: Option<Device>,
    /// Makes a device that does nothing by itself do one operation.
    step: Option<Box<dyn Fn() -> bool + Send + Sync>>,
    #[cfg_attr(
        not(any(feature = "acl", feature = "cuda")),
        allow(dead_code, reason = "only an accelerator's streams have handles")
    )]
    /// Whether the program has the handles of its streams, which must make no difference.
    shared: bool,
}

impl Subject {
    fn new(device: Device, other: Option<Device>) -> Self {
        Self { device, other, step: None, shared: false }
    }

    /// Whether several threads can wait at once: on a device that is moved by hand a waiter moves it for all.
    fn has_threads(&self) -> bool {
        self.step.is_none()
    }

    fn pool(&self, capacity: usize) -> Pool {
        Pool::builder(&self.device).capacity(capacity).unpinned(Unpinned::Allow).build().unwrap()
    }

    fn stream(&self) -> Stream {
        let stream = self.device.stream().unwrap();
        #[cfg(feature = "cuda")]
        if self.shared && !self.is_ascend() {
            pinpool::cuda::raw_stream(&stream).unwrap();
        }
        #[cfg(feature = "acl")]
        if self.shared && self.is_ascend() {
            pinpool::acl::raw_stream(&stream).unwrap();
        }
        stream
    }

    /// Whether it is no simulated device, and not the host.
    fn is_real(&self) -> bool {
        let family = self.device.name().split(':').next().unwrap_or_default();
        family != "host" && self.has_threads() && support::doubles::required_device(family)
    }

    /// No Ascend device here has managed memory, and only some can have memory registered.
    fn is_ascend(&self) -> bool {
        self.device.name().starts_with("acl")
    }

    /// Whether a host address is known to be no address of the device's.
    fn tells_addresses(&self) -> bool {
        #[cfg(feature = "acl")]
        if let Ok(about) = pinpool::acl::about(&self.device) {
            return !about.on_device;
        }
        true
    }

    /// Whether this is the refusal of a device that cannot do it.
    fn cannot(&self, error: &Error) -> bool {
        self.is_ascend() && matches!(error, Error::Unsupported(_))
    }

    fn alloc(&self, len: usize) -> DeviceSlice {
        self.device.alloc(len).unwrap()
    }

    fn pump(&self) {
        match &self.step {
            Some(step) => {
                step();
                self.device.reap();
            }
            // The other tests run beside it, on as few cores.
            None => std::thread::sleep(Duration::from_micros(20)),
        }
    }
}

type Test = (&'static str, fn(&Subject));
type LastTest = (&'static str, fn(Subject));
type Open = Box<dyn Fn() -> Result<Subject, Error>>;
/// A kind of device: what `PINPOOL_REQUIRE` calls it, what it is, how it is opened.
type Kind = (&'static str, &'static str, Open);

/// The first device of an accelerator and, if there is one, the second: of these the last has its streams given out.
#[cfg(any(feature = "acl", feature = "cuda"))]
fn accelerators([first, second]: [&'static str; 2], names: [String; 2]) -> [Kind; 2] {
    let last = usize::from(Device::open(&names[1]).is_ok());
    let kinds = [
        (first, "the first", 0, false),
        ([first, second][last], "the last, its streams given out", last, true),
    ];
    kinds.map(|(name, kind, at, shared)| -> Kind {
        let names = names.clone();
        let open = move || {
            let device = Device::open(&names[at])?;
            // Only where there is more than one.
            Ok(Subject { shared, ..Subject::new(device, Device::open(&names[1 - at]).ok()) })
        };
        (name, kind, Box::new(open))
    })
}

const TESTS: &[Test] = &[
    ("round trips of many sizes and offsets", copies::round_trips),
    ("nothing beside a copy's range is touched", copies::bounds_are_kept),
    ("a stream keeps its order", copies::stream_order),
    ("a hold covers what came before it", copies::holds),
    ("device memory lives as long as its copies", copies::memory_is_kept),
    ("stream-ready buffers", copies::stream_ready),
    ("refusals give the buffer back", refusals::refusals),
    ("memory and buffers of other devices are refused", refusals::foreign),
    ("blocking copies", copies::blocking),
    ("everything dropped in every order", closing::drops),
    ("copies between host memory", memories::host_copies),
    ("memory by its address", memories::by_address),
    ("memory of every backing", memory::backings),
    ("adopted memory", memory::adopted),
    ("registered values", memory::registered),
    ("a registered value outlives its copies", memory::registered_is_kept),
    ("mapped files and shared memory", memory::mapped),
    ("order of transfers and streams", transfers::order),
    ("transfers and their copier are dropped in every order", transfers::drops),
    ("a host tier of many threads", tier::storm),
    ("random pieces and pages both ways", copier::pieces),
    ("pinned blocks, and what is refused", copier::blocks),
    ("replay: a buffer returns on drop while in flight, and is overwritten", replay::returned),
    ("replay: a download is read at once", replay::read_at_once),
    ("replay: two streams share a buffer", replay::shared),
    ("replay: a request is aborted half way", replay::aborted),
];

const CLOSING: &[LastTest] = &[
    ("what keeps a device open is told", closing::told),
    ("a device is closed and opened again", closing::again),
    ("a device is closed by an owner that it drops", closing::from_an_owner),
];

/// Runs the suite on a kind of device, which each test opens anew.
fn suite(kind: &str, open: &dyn Fn() -> Result<Subject, Error>) {
    for (test, call) in TESTS {
        println!("{kind}: {test}");
        let subject = open().unwrap();
        call(&subject);
        subject.close();
    }
    for (test, call) in CLOSING {
        println!("{kind}: {test}");
        call(open().unwrap());
    }
}

/// Runs the suite on the kinds of devices of a family, as far as they can be opened. Returns on how many.
fn run(family: &str, kinds: impl IntoIterator<Item = Kind>) -> usize {
    let required = std::env::var("PINPOOL_REQUIRE").unwrap_or_default();
    let names = required.split(',').map(str::trim).filter(|n| !n.is_empty());
    // Names of no family, or of one that is not built in, make the host's test fail.
    let others = [("acl", cfg!(feature = "acl")), ("cuda", cfg!(feature = "cuda"))];
    let is_other = |name: &str| others.iter().any(|(other, built)| *built && name.starts_with(other));
    let of_family = |name: &&str| name.starts_with(family) || (family == "host" && !is_other(name));
    let mut missing: Vec<&str> = names.filter(of_family).collect();
    let mut run = 0;
    for (name, kind, open) in kinds {
        match open() {
            Ok(first) => {
                drop(first);
                missing.retain(|n| *n != name);
                suite(&format!("{name} ({kind})"), &open);
                run += 1;
            }
            Err(error) => skip!("{name} ({kind}): {error}"),
        }
    }
    println!("run on {run} kinds of {family} devices");
    assert!(missing.is_empty(), "PINPOOL_REQUIRE names devices that were not tested: {missing:?}");
    run
}

#[test]
fn the_contract_holds_on_the_host_device() {
    let system: Open = Box::new(|| Ok(Subject::new(Device::open("host:0")?, None)));
    let late: Open = Box::new(|| {
        let config = HostConfig::new().devices(2).memory(256 << 20).late(Duration::from_micros(200), 7);
        let node = HostNode::new(config)?;
        Ok(Subject::new(Device::on(&node, 0)?, Some(Device::on(&node, 1)?)))
    });
    let kinds: [Kind; 2] = [("host:0", "the system's", system), ("host:0", "late, the first of two", late)];
    assert_eq!(run("host", kinds), 2);
}

#[test]
#[cfg(feature = "cuda")]
fn the_contract_holds_on_gpus() {
    use doubles::{StandIn, gpu_name, required};
    let stand_in = (!required()).then(|| StandIn::gpus(pinpool_sim::cuda::Driver::Cuda12_8));
    let run = run("cuda", accelerators(["cuda:0", "cuda:1"], [0, 1].map(gpu_name)));
    assert!(run > 0);
    if let Some(stand_in) = stand_in {
        stand_in.no_trace();
        assert_eq!(run, 2, "the simulated machine has two GPUs");
    }
}

/// Nothing of it runs until a test, or a call that waits, says so.
#[test]
#[cfg(feature = "cuda")]
fn the_contract_holds_on_a_gpu_that_is_moved_by_hand() {
    if doubles::simulated_elsewhere() {
        return;
    }
    let machine = support::hand::Machine::new(2, 256 << 20, 11);
    let open = || {
        let own = machine.clone();
        let subject = Subject::new(machine.device(0), Some(machine.device(1)));
        Ok(Subject { step: Some(Box::new(move || own.step())), ..subject })
    };
    suite("a GPU, by hand", &open);
    doubles::Report::parse(&machine.report()).no_trace();
    doubles::no_strays();
}

/// In each way in which libraries and devices differ, at once: the first on a real device as well.
#[test]
#[cfg(feature = "acl")]
fn the_contract_holds_on_ascend() {
    std::thread::scope(|scope| {
        doubles::npu::WAYS.into_iter().for_each(|way| drop(scope.spawn(move || on_ascend(way))));
    });
}

#[cfg(feature = "acl")]
fn on_ascend(way: doubles::npu::Way) {
    use doubles::npu;
    let real = npu::required();
    if real && way.name != npu::TODAY.name {
        // The machine has one library.
        return;
    }
    let stand_in = (!real).then(|| way.machine());
    // What the library lacks does not depend on which of its devices is used: one of them, unless all is asked for.
    let all = way.name == npu::TODAY.name || std::env::var_os("PINPOOL_FULL").is_some();
    let devices = if all { 2 } else { 1 };
    let kinds = accelerators(["acl:0", "acl:1"], [0, 1].map(doubles::npu_name));
    let run = run("acl", kinds.into_iter().take(devices));
    assert!(run > 0);
    if let Some(stand_in) = stand_in {
        stand_in.no_trace();
        assert_eq!(run, devices, "the simulated machine has two NPUs");
    }
}

fn fetch(pool: &Pool, stream: &Stream, memory: &DeviceSlice) -> Vec<u8> {
    let landing = pool.checkout(memory.len()).unwrap();
    stream.download(memory, landing).unwrap().wait().unwrap().to_vec()
}

/// A misuse, which the error tells in these words.
fn argument(error: &Error, says: &str) {
    assert!(matches!(error, Error::Argument(text) if text.contains(says)), "{says:?} is not in: {error}");
}

/// What is of another device or stream.
fn mismatch(error: &Error) {
    assert!(matches!(error, Error::Mismatch { .. }), "{error}");
}

fn until(on: &Subject, what: &str, mut so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !so() {
        assert!(since.elapsed() < HANG, "never: {what}");
        on.pump();
    }
}

/// All of a pool is back, though the thread that completes copies may need a little longer.
fn all_back(on: &Subject, pool: &Pool) {
    until(on, "all is back", || in_use(pool) == 0);
    pool.check().unwrap();
}

/// A stream-ready buffer on another stream.
fn not_ready(error: &Error) {
    assert!(matches!(error, Error::Mismatch { what: "a stream-ready buffer", .. }), "{error}");
}

/// A refused submit that must give the buffer back unharmed.
fn refusal<T: std::fmt::Debug>(result: Result<T, SubmitError<PinnedBuf>>, expected: &[u8]) -> Error {
    match result {
        Err(SubmitError { error, buffer: Some(buf) }) => {
            assert!(*buf == *expected, "the buffer came back changed");
            error
        }
        wrong => panic!("not refused with its buffer: {wrong:?}"),
    }
}
