//! What any device must do, seen from outside: one suite, written once, run on every device there is.
//!
//! After each test its device is closed, which waits until everything was given back: so each test shows, too, that it
//! leaves nothing behind.
//!
//! A device joins by one more [`Subject`] in [`subjects`]. Nothing here knows how a device works, and nothing asserts
//! how long anything takes. `PINPOOL_REQUIRE=host:0,cuda:0` names devices whose tests must not be skipped; without it a
//! device that cannot be opened is reported and left out.
//!
//! GPUs: with one named by `PINPOOL_REQUIRE` the machine's own driver is used. Otherwise the suite runs on the stand-in
//! driver of `tests/doubles`, whose rules must then not have been broken. Ascend devices likewise, on the stand-in as a
//! library of today and of 2022, and in both run modes.

#![allow(unsafe_code, reason = "memory by its address")]

mod closing;
mod copier;
mod copies;
mod ends;
mod memories;
mod memory;
mod refusals;
mod replay;
#[path = "../support/mod.rs"]
mod support;
mod tier;
mod transfers;
mod waiting;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use pinpool::host::{HostConfig, HostNode};
use pinpool::{Device, DeviceSlice, Error, PinnedBuf, Pool, Request, Stream, SubmitError, Unpinned};
#[cfg(any(feature = "acl", feature = "cuda"))]
use support::doubles;
use support::{bytes, skip};
use waiting::block_on;

/// A device under test.
struct Subject {
    /// As [`Device::open`] and `PINPOOL_REQUIRE` name it.
    device: Device,
    /// Another device of the same family, where there is one.
    other: Option<Device>,
    /// Makes a device that does not move by itself do a step.
    pump: Option<HostNode>,
    #[cfg_attr(
        not(any(feature = "acl", feature = "cuda")),
        allow(dead_code, reason = "only an accelerator's streams have handles")
    )]
    /// Whether the program has the handles of its streams, which must make no difference.
    shared: bool,
}

impl Subject {
    /// Whether several threads can wait at once: on a stepped device a waiter steps the device for all.
    fn has_threads(&self) -> bool {
        self.pump.is_none()
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

    /// No Ascend device here has managed memory, and only some can have memory registered.
    fn is_ascend(&self) -> bool {
        self.device.name().starts_with("acl")
    }

    /// Whether a host address is known to be no address of the device's.
    fn tells_addresses(&self) -> bool {
        #[cfg(feature = "acl")]
        if let Ok(about) = pinpool::acl::about(&self.device) {
            return !about.on_device || about.later.contains(&("aclrtPointerGetAttributes", true));
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
        match &self.pump {
            Some(node) => {
                node.step();
                self.device.reap();
            }
            None => std::thread::yield_now(),
        }
    }
}

type Test = (&'static str, fn(&Subject));
type LastTest = (&'static str, fn(Subject));
type Open = fn() -> Result<Subject, Error>;

/// The devices: what `PINPOOL_REQUIRE` calls them, what they are, how they are opened.
fn subjects() -> Vec<(&'static str, &'static str, Open)> {
    fn on(config: HostConfig) -> Result<(HostNode, Device, Device), Error> {
        let node = HostNode::new(config.devices(2).memory(256 << 20))?;
        let (device, other) = (Device::on(&node, 0)?, Device::on(&node, 1)?);
        Ok((node, device, other))
    }
    fn with_threads(config: HostConfig) -> Result<Subject, Error> {
        let (_, device, other) = on(config)?;
        Ok(Subject { device, other: Some(other), pump: None, shared: false })
    }
    vec![
        ("host:0", "the system's", || {
            Ok(Subject { device: Device::open("host:0")?, other: None, pump: None, shared: false })
        }),
        ("host:0", "with threads", || with_threads(HostConfig::new())),
        ("host:0", "late", || with_threads(HostConfig::new().late(Duration::from_micros(200), 7))),
        ("host:0", "stepped", || {
            let (node, device, other) = on(HostConfig::new().stepped(11))?;
            Ok(Subject { device, other: Some(other), pump: Some(node), shared: false })
        }),
        ("cuda:0", "the first GPU", || {
            let device = Device::open("cuda:0")?;
            // Only where there is more than one.
            Ok(Subject { device, other: Device::open("cuda:1").ok(), pump: None, shared: false })
        }),
        ("cuda:0", "the first GPU, its streams given out", || {
            let device = Device::open("cuda:0")?;
            Ok(Subject { device, other: Device::open("cuda:1").ok(), pump: None, shared: true })
        }),
        ("cuda:1", "the second GPU", || {
            let device = Device::open("cuda:1")?;
            Ok(Subject { device, other: Device::open("cuda:0").ok(), pump: None, shared: false })
        }),
        ("acl:0", "the first NPU", || {
            let device = Device::open("acl:0")?;
            Ok(Subject { device, other: Device::open("acl:1").ok(), pump: None, shared: false })
        }),
        ("acl:0", "the first NPU, its streams given out", || {
            let device = Device::open("acl:0")?;
            Ok(Subject { device, other: Device::open("acl:1").ok(), pump: None, shared: true })
        }),
        ("acl:1", "the second NPU", || {
            let device = Device::open("acl:1")?;
            Ok(Subject { device, other: Device::open("acl:0").ok(), pump: None, shared: false })
        }),
    ]
}

/// The host devices' test leaks a handle, so that device stays open.
const FORGETS: &str = "transfers and their copier are dropped in every order";

/// The suite.
const TESTS: &[Test] = &[
    ("round trips of many sizes and offsets", copies::round_trips),
    ("nothing beside a copy's range is touched", copies::bounds_are_kept),
    ("a stream keeps its order", copies::stream_order),
    ("streams do not disturb each other", copies::independence),
    ("a source may be overwritten after the wait", copies::lateness),
    ("a dropped buffer is not reused early", copies::early_reuse),
    ("a hold covers what came before it", copies::holds),
    ("device memory lives as long as its copies", copies::memory_is_kept),
    ("one buffer feeds several streams", copies::shared),
    ("stream-ready buffers", copies::stream_ready),
    ("refusals give the buffer back", refusals::refusals),
    ("what needs a capture is refused without one", refusals::uncaptured),
    ("blocking copies", copies::blocking),
    ("aligned and large buffers", copies::aligned),
    ("timeouts leave everything usable", waiting::timeouts),
    ("handles can be awaited", waiting::awaited),
    ("handles can be asked", waiting::asked),
    ("everything dropped in every order", ends::drops),
    ("many threads", ends::threads),
    ("copies between host memory", memories::host_copies),
    ("memory by its address", memories::by_address),
    ("memory of every backing", memory::backings),
    ("adopted memory", memory::adopted),
    ("adopting is refused with the memory", memory::adopting_refused),
    ("registered values", memory::registered),
    ("a registered value outlives its copies", memory::registered_is_kept),
    ("values that are only read", memory::read_only),
    ("mapped files and shared memory", memory::mapped),
    ("addresses on the device", memory::addresses),
    ("order of transfers and streams", transfers::order),
    ("transfers are awaited", transfers::awaited),
    (FORGETS, transfers::drops),
    ("transfers of many threads", transfers::threads),
    ("a host tier of many threads", tier::storm),
    ("many pieces both ways", copier::pieces),
    ("many pinned blocks both ways", copier::blocks),
];

/// Tests that end with the device.
const CLOSING: &[LastTest] = &[
    ("a device is closed with what was dropped just now", closing::at_once),
    ("what keeps a device open is told", closing::told),
    ("what others drop is waited for", closing::waited_for),
    ("a device is closed and opened again", closing::again),
    ("a device is closed by an owner that it drops", closing::from_an_owner),
];

/// Tests of each device that has a sibling.
#[cfg(any(feature = "cuda", feature = "acl"))]
const PER_DEVICE: usize = TESTS.len() + CLOSING.len() + 1;

/// Runs the suite on the devices whose names start so, at most that many, and returns how many tests ran.
fn run(family: &str, most: usize) -> usize {
    let required = std::env::var("PINPOOL_REQUIRE").unwrap_or_default();
    let names = required.split(',').map(str::trim).filter(|n| !n.is_empty());
    // Names of no family at all make the host's test fail.
    let others = ["acl", "cuda"];
    let is_other = |name: &str| others.iter().any(|other| name.starts_with(other));
    let of_family = |name: &str| name.starts_with(family) || (family == "host" && !is_other(name));
    let mut missing: Vec<&str> = names.filter(|n| of_family(n)).collect();
    let mut run = 0;
    for (name, kind, open) in subjects().into_iter().filter(|s| s.0.starts_with(family)).take(most) {
        match open() {
            Ok(first) => {
                drop(first);
                missing.retain(|n| *n != name);
                for (test, call) in TESTS {
                    println!("{name} ({kind}): {test}");
                    let subject = open().unwrap();
                    call(&subject);
                    if !(family == "host" && FORGETS == *test) {
                        subject.close();
                    }
                    run += 1;
                }
                for (test, call) in CLOSING {
                    println!("{name} ({kind}): {test}");
                    call(open().unwrap());
                    run += 1;
                }
                let subject = open().unwrap();
                if subject.other.is_some() {
                    println!("{name} ({kind}): memory and buffers of other devices are refused");
                    refusals::foreign(&subject);
                    run += 1;
                }
            }
            Err(error) => skip!("{name} ({kind}): {error}"),
        }
    }
    println!("{run} tests run on {family} devices");
    assert!(missing.is_empty(), "PINPOOL_REQUIRE names devices that were not tested: {missing:?}");
    run
}

#[test]
fn the_contract_holds_on_the_host_device() {
    assert!(run("host", usize::MAX) >= TESTS.len());
}

#[test]
#[cfg(feature = "cuda")]
fn the_contract_holds_on_gpus() {
    if !doubles::required() && !doubles::is_set() {
        return doubles::again("the_contract_holds_on_gpus", &[("PINPOOL_REQUIRE", "cuda:0")]);
    }
    let run = run("cuda", usize::MAX);
    assert!(run >= TESTS.len());
    if let Some(stand_in) = doubles::StandIn::of_this_process() {
        let report = stand_in.final_report();
        assert!(report.over, "a device is still open: {report:?}");
        assert_eq!((report.violations, report.leaks), (Vec::new(), Vec::new()));
        assert_eq!(run, 3 * PER_DEVICE, "the stand-in has two GPUs");
    }
}

/// A test for each way in which libraries and devices differ, since each takes long.
#[cfg(feature = "acl")]
macro_rules! on_ascend {
    ($($test:ident: $way:expr;)*) => {
        $(
            #[test]
            fn $test() {
                on_ascend(stringify!($test), &$way);
            }
        )*

        #[test]
        fn each_way_of_ascend_has_its_contract() {
            assert_eq!([$($way.name),*], doubles::npu::WAYS.map(|way| way.name));
        }
    };
}

#[cfg(feature = "acl")]
on_ascend! {
    the_contract_holds_on_ascend: doubles::npu::TODAY;
    the_contract_holds_on_the_device_itself: doubles::npu::ON_DEVICE;
    the_contract_holds_with_the_library_of_late_2022: doubles::npu::LATE_2022;
    the_contract_holds_with_the_library_of_early_2022: doubles::npu::EARLY_2022;
    the_contract_holds_on_the_device_in_2022: doubles::npu::ON_DEVICE_2022;
}

#[cfg(feature = "acl")]
fn on_ascend(test: &str, way: &doubles::npu::Way) {
    use doubles::npu;
    if !npu::is_set() {
        match npu::required() {
            false => return way.again(test, &[("PINPOOL_REQUIRE", "acl:0")]),
            // The machine has one library.
            true if way.name != npu::TODAY.name => return,
            true => {}
        }
    }
    // What the library lacks does not depend on which of its devices is used: one of them, unless all is asked for.
    let all = way.name == npu::TODAY.name || std::env::var_os("PINPOOL_FULL").is_some();
    let devices = if all { 3 } else { 1 };
    let run = run("acl", devices);
    assert!(run >= TESTS.len());
    if let Some(stand_in) = npu::stand_in() {
        npu::no_trace(&stand_in);
        assert_eq!(run, devices * PER_DEVICE, "the stand-in has two NPUs");
    }
}

#[test]
#[cfg(not(feature = "acl"))]
fn npus_are_not_built_in() {
    run("acl", usize::MAX);
}

#[test]
#[cfg(not(feature = "cuda"))]
fn gpus_are_not_built_in() {
    run("cuda", usize::MAX);
}

fn filled(pool: &Pool, bytes: &[u8]) -> PinnedBuf {
    let mut buf = pool.checkout(bytes.len()).unwrap();
    buf.extend_from_slice(bytes);
    buf
}

fn fetch(pool: &Pool, stream: &Stream, memory: &DeviceSlice) -> Vec<u8> {
    let landing = pool.checkout(memory.len()).unwrap();
    stream.download(memory, landing).unwrap().wait().unwrap().to_vec()
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
