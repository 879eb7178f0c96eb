//! What any device must do, seen from outside: one suite, written once, run on every device there is.
//!
//! After each test its device is closed, which waits until everything was given back: so each of them shows, too, that nothing
//! of what it did stays behind.
//!
//! A device joins by one more [`Subject`] in [`subjects`]. Nothing here knows how a device works, and nothing asserts
//! how long anything takes. `PINPOOL_REQUIRE=host:0,cuda:0` names devices whose tests must not be skipped; without it a
//! device that cannot be opened is reported and left out.
//!
//! GPUs: with one named by `PINPOOL_REQUIRE` the machine's own driver is used. Otherwise the suite runs on the stand-in
//! driver of `tests/doubles`, whose rules must then not have been broken. Ascend devices likewise, on the stand-in as a library
//! of today and of 2022, and in both run modes.

#![allow(unsafe_code, reason = "memory by its address")]

#[path = "contract/closing.rs"]
mod closing;
#[cfg(any(feature = "acl", feature = "cuda"))]
mod doubles;
#[path = "contract/memories.rs"]
mod memories;
#[path = "contract/memory.rs"]
mod memory;
#[path = "contract/queue.rs"]
mod queue;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use pinpool::host::{HostConfig, HostNode};
use pinpool::{
    AddressFault, CopyQueue, Device, DeviceBuffer, DeviceSlice, Error, HostBuf, InFlight, PinnedBuf, Pool,
    QueueOptions, Request, Stream, SubmitError, Unpinned,
};

/// A device under test.
struct Subject {
    /// As [`Device::open`] and `PINPOOL_REQUIRE` name it.
    device: Device,
    /// Another device of the same family, where there is one.
    other: Option<Device>,
    /// Lets a device that does not move by itself make a step.
    pump: Option<HostNode>,
    #[cfg_attr(
        not(any(feature = "acl", feature = "cuda")),
        allow(dead_code, reason = "only an accelerator's streams have handles")
    )]
    /// Whether others have the handles of its streams, which must make no difference.
    shared: bool,
}

impl Subject {
    /// Whether several threads can wait at once: on a stepped device the one who waits moves it for all.
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

    /// There are no devices of Ascend's with managed memory here, and only some that can have memory registered.
    fn is_ascend(&self) -> bool {
        self.device.name().starts_with("acl")
    }

    /// Whether an address of the host's is known to be none of the device's.
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

    fn alloc(&self, len: usize) -> DeviceBuffer {
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

/// This one forgets a handle on the host device, which therefore stays open.
const FORGETS: &str = "a copy queue is dropped in every order";

/// The suite.
const TESTS: &[Test] = &[
    ("round trips of many sizes and offsets", round_trips),
    ("nothing beside a copy's range is touched", bounds_are_kept),
    ("a stream keeps its order", stream_order),
    ("streams do not disturb each other", independence),
    ("a source may be overwritten after the wait", lateness),
    ("a dropped buffer is not reused early", early_reuse),
    ("a hold covers what came before it", holds),
    ("a hold covers several streams", joint_holds),
    ("device memory lives as long as its copies", memory_is_kept),
    ("one buffer feeds several streams", shared),
    ("stream-ready buffers", stream_ready),
    ("refusals give the buffer back", refusals),
    ("what needs a capture is refused without one", uncaptured),
    ("blocking copies", blocking),
    ("plain memory where the pool is short", plain),
    ("aligned and large buffers", aligned),
    ("timeouts leave everything usable", timeouts),
    ("handles can be awaited", awaited),
    ("handles can be asked", asked),
    ("everything dropped in every order", drops),
    ("many threads", threads),
    ("copies between host memory", memories::host_copies),
    ("memory in stream order", memories::ordered),
    ("memory by its address", memories::by_address),
    ("memory of every backing", memory::backings),
    ("adopted memory", memory::adopted),
    ("adopting is refused with the memory", memory::adopting_refused),
    ("registered values", memory::registered),
    ("a registered value outlives its copies", memory::registered_is_kept),
    ("values that are only read", memory::read_only),
    ("mapped files and shared memory", memory::mapped),
    ("addresses on the device", memory::addresses),
    ("round trips through a copy queue", queue::round_trips),
    ("a copy queue's order", queue::order),
    ("copies of a queue that overlap", queue::overlaps),
    ("what a copy queue refuses", queue::refusals),
    ("a copy queue that is full", queue::depth),
    ("copies of a queue are awaited", queue::awaited),
    (FORGETS, queue::drops),
    ("a copy queue of many threads", queue::threads),
    ("many pieces gathered and scattered", queue::gathers),
];

/// Those that end with the device.
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

/// Runs the suite on the devices whose names start so, and tells how many tests were run.
fn run(family: &str) -> usize {
    let required = std::env::var("PINPOOL_REQUIRE").unwrap_or_default();
    let names = required.split(',').map(str::trim).filter(|n| !n.is_empty());
    // Names of no family at all are missed by the host's test.
    let others = ["acl", "cuda"];
    let is_other = |name: &str| others.iter().any(|other| name.starts_with(other));
    let of_family = |name: &str| name.starts_with(family) || (family == "host" && !is_other(name));
    let mut missing: Vec<&str> = names.filter(|n| of_family(n)).collect();
    let mut run = 0;
    for (name, kind, open) in subjects().into_iter().filter(|s| s.0.starts_with(family)) {
        match open() {
            Ok(first) => {
                drop(first);
                missing.retain(|n| *n != name);
                for (test, call) in TESTS {
                    println!("{name} ({kind}): {test}");
                    let subject = open().unwrap();
                    call(&subject);
                    if !(family == "host" && *test == FORGETS) {
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
                    foreign(&subject);
                    run += 1;
                }
            }
            Err(error) => println!("{name} ({kind}): skipped, {error}"),
        }
    }
    println!("{run} tests run on {family} devices");
    assert!(missing.is_empty(), "PINPOOL_REQUIRE names devices that were not tested: {missing:?}");
    run
}

#[test]
fn the_contract_holds_on_the_host_device() {
    assert!(run("host") >= TESTS.len());
}

#[test]
#[cfg(feature = "cuda")]
fn the_contract_holds_on_gpus() {
    if !doubles::required() && !doubles::is_set() {
        return doubles::again("the_contract_holds_on_gpus", &[("PINPOOL_REQUIRE", "cuda:0")]);
    }
    let run = run("cuda");
    assert!(run >= TESTS.len());
    if let Some(stand_in) = doubles::StandIn::of_this_process() {
        let report = stand_in.final_report();
        assert!(report.over, "a device is still open: {report:?}");
        assert_eq!((report.violations, report.leaks), (Vec::new(), Vec::new()));
        assert_eq!(run, 3 * PER_DEVICE, "the stand-in has two GPUs");
    }
}

#[test]
#[cfg(feature = "acl")]
fn the_contract_holds_on_ascend() {
    use doubles::npu;
    if !npu::required() && !npu::is_set() {
        let test = "the_contract_holds_on_ascend";
        return npu::WAYS.iter().for_each(|way| way.again(test, &[("PINPOOL_REQUIRE", "acl:0")]));
    }
    let run = run("acl");
    assert!(run >= TESTS.len());
    if let Some(stand_in) = npu::stand_in() {
        npu::no_trace(&stand_in);
        assert_eq!(run, 3 * PER_DEVICE, "the stand-in has two NPUs");
    }
}

#[test]
#[cfg(not(feature = "acl"))]
fn npus_are_not_built_in() {
    run("acl");
}

#[test]
#[cfg(not(feature = "cuda"))]
fn gpus_are_not_built_in() {
    run("cuda");
}

/// Bytes that depend on their place.
fn bytes(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(31) ^ i >> 8).wrapping_add(seed.wrapping_mul(97)) as u8).collect()
}

fn filled(pool: &Pool, bytes: &[u8]) -> PinnedBuf {
    let mut buf = pool.checkout(bytes.len()).unwrap();
    buf.extend_from_slice(bytes);
    buf
}

fn fetch(pool: &Pool, stream: &Stream, memory: &DeviceBuffer) -> Vec<u8> {
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

fn round_trips(on: &Subject) {
    let (pool, stream) = (on.pool(24 << 20), on.stream());
    let memory = on.alloc((4 << 20) + 8192);
    let sizes = [1, 2, 31, 32, 33, 63, 64, 65, 255, 1000, 4095, 4096, 4097, 65_537, 1 << 20, (3 << 20) + 7];
    for (i, len) in sizes.into_iter().enumerate() {
        for (j, offset) in [0, 1, 63, 4096, 4097].into_iter().enumerate() {
            let sent = bytes(i * 8 + j, len + j);
            let buf = filled(&pool, &sent);
            drop(stream.upload_part(buf, j.., memory.slice(offset..offset + len)).unwrap());
            let landing = pool.checkout(len).unwrap();
            let back = stream.download(memory.slice(offset..offset + len), landing).unwrap().wait().unwrap();
            assert!(*back == sent[j..], "{len} bytes at {offset}");
        }
    }
}

fn bounds_are_kept(on: &Subject) {
    let (pool, stream) = (on.pool(4 << 20), on.stream());
    let memory = on.alloc(10_000);
    drop(stream.upload(filled(&pool, &[1; 10_000]), &memory).unwrap());
    drop(stream.upload(filled(&pool, &[2; 333]), memory.slice(77..410)).unwrap());
    let mut expected = vec![1; 10_000];
    expected[77..410].fill(2);
    assert!(fetch(&pool, &stream, &memory) == expected);
    // On the host side, what lies behind a part stays as it was.
    let mut landing = filled(&pool, &[9; 5000]);
    landing.truncate(4999);
    let back = stream.download(memory.slice(0..100), landing).unwrap().wait().unwrap();
    assert!(*back == expected[..100], "the length is that of the copy");
}

fn stream_order(on: &Subject) {
    let (pool, stream) = (on.pool(8 << 20), on.stream());
    let (x, y) = (on.alloc(300_000), on.alloc(300_000));
    for round in 0..8 {
        let (a, b) = (bytes(round, 300_000), bytes(round + 100, 300_000));
        drop(stream.upload(filled(&pool, &a), &x).unwrap());
        drop(stream.copy(&x, &y).unwrap());
        drop(stream.upload(filled(&pool, &b), &x).unwrap());
        let first = stream.download(&y, pool.checkout(300_000).unwrap()).unwrap();
        let second = stream.download(&x, pool.checkout(300_000).unwrap()).unwrap();
        assert!(*second.wait().unwrap() == *b);
        assert!(first.is_done().unwrap(), "a later copy was done first");
        assert!(*first.wait().unwrap() == *a);
    }
}

fn independence(on: &Subject) {
    let pool = on.pool(24 << 20);
    let streams: Vec<Stream> = (0..4).map(|_| on.stream()).collect();
    let memories: Vec<DeviceBuffer> = (0..4).map(|_| on.alloc(200_000)).collect();
    let mut last = vec![Vec::new(); 4];
    for round in 0..40 {
        let at = round * 7 % 4;
        last[at] = bytes(round, 200_000);
        drop(streams[at].upload(filled(&pool, &last[at]), &memories[at]).unwrap());
    }
    for at in [2, 0, 3, 1] {
        assert!(fetch(&pool, &streams[at], &memories[at]) == last[at], "stream {at}");
    }
}

fn lateness(on: &Subject) {
    let (pool, stream) = (on.pool(4 << 20), on.stream());
    let memory = on.alloc(100_000);
    let mut buf = filled(&pool, &bytes(0, 100_000));
    for round in 0..20 {
        let sent = bytes(round, 100_000);
        buf.copy_from_slice(&sent);
        buf = stream.upload(buf, &memory).unwrap().wait().unwrap();
        assert!(*buf == *sent, "an upload leaves its source as it was");
        buf.fill(0xFF);
        assert!(fetch(&pool, &stream, &memory) == sent);
    }
}

fn early_reuse(on: &Subject) {
    // Room for few buffers, so that they are wanted again at once.
    let (pool, stream) = (on.pool(256 << 10), on.stream());
    let memories: Vec<DeviceBuffer> = (0..64).map(|_| on.alloc(30_000)).collect();
    for (i, memory) in memories.iter().enumerate() {
        let buf = filled(&pool, &bytes(i, 30_000));
        drop(stream.upload(buf, memory).unwrap());
    }
    for (i, memory) in memories.iter().enumerate() {
        assert!(fetch(&pool, &stream, memory) == bytes(i, 30_000), "copy {i}");
    }
    stream.synchronize().unwrap();
    let stats = pool.stats();
    assert_eq!((stats.in_flight_bytes, stats.checked_out_bytes), (0, 0), "{stats:?}");
    pool.check().unwrap();
}

fn holds(on: &Subject) {
    let (pool, stream) = (on.pool(8 << 20), on.stream());
    let memory = on.alloc(1 << 20);
    let sent = stream.upload(filled(&pool, &bytes(1, 1 << 20)), &memory).unwrap();
    let held = stream.hold(filled(&pool, b"held")).unwrap();
    assert!(*held.wait().unwrap() == *b"held");
    assert!(sent.is_done().unwrap(), "the hold was over before the copy");
}

fn joint_holds(on: &Subject) {
    let pool = on.pool(16 << 20);
    let streams = [on.stream(), on.stream(), on.stream()];
    let sent: Vec<InFlight<PinnedBuf>> = streams
        .iter()
        .map(|s| s.upload(filled(&pool, &bytes(1, 500_000)), on.alloc(500_000)).unwrap())
        .collect();
    let all: Vec<&Stream> = streams.iter().collect();
    let held = Stream::hold_on_all(&all, filled(&pool, b"held")).unwrap();
    assert!(*held.wait().unwrap() == *b"held");
    for sent in sent {
        assert!(sent.is_done().unwrap(), "the hold was over before a copy");
    }
    let error = refusal(Stream::hold_on_all(&[], filled(&pool, b"held")), b"held");
    assert_eq!(error, Error::Empty);
    drop(Stream::hold_on_all(&all, filled(&pool, b"held")).unwrap());
    streams.iter().for_each(|s| s.synchronize().unwrap());
    assert_eq!(pool.stats().in_flight_bytes, 0);
}

fn memory_is_kept(on: &Subject) {
    let (pool, stream) = (on.pool(8 << 20), on.stream());
    let kept = on.alloc(50_000);
    for round in 0..30 {
        let memory = on.alloc(50_000);
        drop(stream.upload(filled(&pool, &bytes(round, 50_000)), &memory).unwrap());
        drop(stream.copy(&memory, &kept).unwrap());
        drop(memory);
        // Would be given the same memory, were it freed.
        let other = on.alloc(50_000);
        stream.upload_blocking(&[0xEE; 50_000], &other).unwrap();
        assert!(fetch(&pool, &stream, &kept) == bytes(round, 50_000), "round {round}");
    }
    assert_eq!(on.device.lost(), None);
}

fn shared(on: &Subject) {
    let pool = on.pool(4 << 20);
    let streams = [on.stream(), on.stream()];
    let sent = bytes(3, 70_000);
    let buf = Arc::new(filled(&pool, &sent));
    let memories: Vec<DeviceBuffer> = (0..6).map(|_| on.alloc(70_000)).collect();
    for (i, memory) in memories.iter().enumerate() {
        drop(streams[i % 2].upload(buf.clone(), memory).unwrap());
    }
    assert!(**buf == *sent, "it can be read meanwhile");
    drop(buf);
    for (i, memory) in memories.iter().enumerate() {
        assert!(fetch(&pool, &streams[i % 2], memory) == sent);
    }
    streams.iter().for_each(|s| s.synchronize().unwrap());
    assert_eq!(pool.stats().checked_out_bytes, 0);
}

fn stream_ready(on: &Subject) {
    // Room for two, so that what is in flight must be claimed.
    let (pool, stream, other) = (on.pool(160 << 10), on.stream(), on.stream());
    let (from, to) = (on.alloc(60_000), on.alloc(60_000));
    for round in 0..50 {
        let sent = bytes(round, 60_000);
        drop(stream.upload(filled(&pool, &sent), &from).unwrap());
        drop(stream.copy(&from, &to).unwrap());
        let landing = pool.checkout_on(&stream, 60_000).unwrap();
        let landing = match other.download(&to, landing) {
            Err(SubmitError { error: Error::WrongStream, buffer: Some(landing) }) => landing,
            wrong => panic!("used on another stream: {wrong:?}"),
        };
        assert!(*stream.download(&to, landing).unwrap().wait().unwrap() == *sent);
        drop(pool.checkout_on(&stream, 60_000).unwrap());
        assert_eq!(pool.checkout_on(&stream, 60_000).unwrap().wait().unwrap().len(), 0);
    }
    pool.check().unwrap();
}

fn refusals(on: &Subject) {
    let (pool, stream) = (on.pool(4 << 20), on.stream());
    let memory = on.alloc(1000);
    let sent = bytes(0, 2000);
    let full = || filled(&pool, &sent);
    let small = Error::TooSmall { need: 2000, have: 1000 };
    assert_eq!(refusal(stream.upload(full(), &memory), &sent), small);
    let outside = |start, end, len| Error::OutOfRange { start, end, len };
    assert_eq!(refusal(stream.upload(full(), memory.slice(10..1001)), &sent), outside(10, 1001, 1000));
    assert_eq!(refusal(stream.upload_part(full(), 1999..2001, &memory), &sent), outside(1999, 2001, 2000));
    #[expect(clippy::reversed_empty_ranges, reason = "that is the misuse")]
    let backwards = stream.upload_part(full(), 20..10, &memory);
    assert_eq!(refusal(backwards, &sent), outside(20, 10, 2000));
    assert_eq!(refusal(stream.upload_part(full(), 5..5, &memory), &sent), Error::Empty);
    assert_eq!(refusal(stream.upload(pool.checkout(8).unwrap(), &memory), &[]), Error::Empty);
    assert_eq!(refusal(stream.download(memory.slice(3..3), full()), &sent), Error::Empty);
    let landing = pool.checkout(999).unwrap();
    let error = refusal(stream.download(&memory, landing), &[]);
    assert_eq!(error, Error::TooSmall { need: 1000, have: 999 });
    let error = stream.copy(&memory, memory.slice(1..)).unwrap_err();
    assert_eq!(error, Error::TooSmall { need: 1000, have: 999 });
    assert_eq!(on.device.alloc(0).unwrap_err(), Error::ZeroLength);
    assert!(memory.slice(..).unwrap().slice(1..=1000).is_err());
    // Nothing of that has harmed anything.
    stream.synchronize().unwrap();
    let stats = pool.stats();
    assert_eq!((stats.in_flight_bytes, stats.checked_out_bytes, stats.quarantined_bytes), (0, 0, 0));
}

/// Only where there is another device.
fn foreign(on: &Subject) {
    let Some(other) = &on.other else { return };
    let (pool, stream) = (on.pool(1 << 20), on.stream());
    let (stranger, far) = (other.stream().unwrap(), other.alloc(100).unwrap());
    let sent = bytes(0, 100);
    let wrong = |error: Error| assert!(matches!(error, Error::WrongDevice { .. }), "{error}");
    wrong(refusal(stream.upload(filled(&pool, &sent), &far), &sent));
    wrong(refusal(stream.download(&far, filled(&pool, &sent)), &sent));
    wrong(stream.copy(&far, on.alloc(100)).unwrap_err());
    wrong(stream.upload_blocking(&sent, &far).unwrap_err());
    wrong(stream.download_blocking(&far, &mut [0; 100]).unwrap_err());
    wrong(stream.upload_blocking(&sent, stranger.alloc(100).unwrap()).unwrap_err());
    stranger.synchronize().unwrap();
    let (from, to) = (filled(&pool, &sent), pool.checkout(100).unwrap());
    wrong(stranger.copy_host(from, to).unwrap_err().error);
    // SAFETY: refused.
    let error = unsafe { on.device.raw_memory(far.address(), 100, ()) }.unwrap_err().error;
    let fault = AddressFault::OtherDevice { device: other.name().into() };
    assert!(matches!(&error, Error::BadAddress { fault: found, .. } if *found == fault), "{error}");
    // The pool does not serve the other device.
    wrong(refusal(stranger.upload(filled(&pool, &sent), &far), &sent));
    wrong(refusal(stranger.hold(filled(&pool, &sent)), &sent));
    wrong(refusal(Stream::hold_on_all(&[&stream, &stranger], filled(&pool, &sent)), &sent));
    wrong(pool.checkout_on(&stranger, 100).unwrap_err());
    // One that does serves both.
    let both =
        Pool::builder(&on.device).device(other).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let buf = stranger.upload(filled(&both, &sent), &far).unwrap().wait().unwrap();
    let near = on.alloc(100);
    drop(stream.upload(buf, &near).unwrap());
    assert!(fetch(&both, &stream, &near) == sent && fetch(&both, &stranger, &far) == sent);
}

fn uncaptured(on: &Subject) {
    let (pool, stream, memory) = (on.pool(1 << 20), on.stream(), on.alloc(1000));
    let sent = bytes(1, 1000);
    let shared = Arc::new(filled(&pool, &sent));
    let errors = [
        refusal(stream.upload_captured(filled(&pool, &sent), &memory), &sent),
        refusal(stream.download_captured(&memory, filled(&pool, &sent)), &sent),
        refusal(stream.hold_captured(filled(&pool, &sent)), &sent),
        stream.upload_captured(shared.clone(), &memory).unwrap_err().into(),
    ];
    for error in errors {
        assert!(matches!(error, Error::NotCapturing { .. }), "{error}");
    }
    assert_eq!(Arc::strong_count(&shared), 1);
    drop(shared);
    assert_eq!(pool.stats().checked_out_bytes, 0);
}

fn blocking(on: &Subject) {
    let (pool, stream) = (on.pool(4 << 20), on.stream());
    let memory = on.alloc(100_001);
    let sent = bytes(5, 100_001);
    // Unpinned, at odd addresses.
    stream.upload_blocking(&sent[1..], memory.slice(..100_000)).unwrap();
    let mut back = vec![0; 100_001];
    stream.download_blocking(memory.slice(..100_000), &mut back[1..]).unwrap();
    assert!(back[1..] == sent[1..]);
    // In the stream's order.
    drop(stream.upload(filled(&pool, &sent), &memory).unwrap());
    stream.download_blocking(&memory, &mut back).unwrap();
    assert!(back == sent);
    stream.upload_blocking(&[7; 50], memory.slice(50..100)).unwrap();
    assert!(fetch(&pool, &stream, &memory)[50..100] == [7; 50]);
    assert_eq!(stream.upload_blocking(&[], &memory), Err(Error::Empty));
    let error = stream.download_blocking(&memory, &mut [0; 10]);
    assert_eq!(error, Err(Error::TooSmall { need: 100_001, have: 10 }));
}

fn plain(on: &Subject) {
    let (pool, stream) = (on.pool(64 << 10), on.stream());
    let _all = pool.checkout(50_000).unwrap();
    let HostBuf::Unpinned(mut buf) = pool.checkout_or_unpinned(50_000).unwrap() else {
        panic!("the pool had room for more than it has");
    };
    let memory = on.alloc(50_000);
    buf.try_extend_from_slice(&bytes(1, 50_000)).unwrap();
    stream.upload_blocking(&buf, &memory).unwrap();
    buf.fill(0);
    stream.download_blocking(&memory, &mut buf).unwrap();
    assert!(*buf == *bytes(1, 50_000));
    assert_eq!(pool.stats().unpinned_fallbacks, 1);
}

fn aligned(on: &Subject) {
    let (pool, stream) = (on.pool(24 << 20), on.stream());
    let memory = on.alloc(6 << 20);
    for (len, align) in [(1, 1), (100, 64), (5000, 4096), (4096, 4096), (100_000, 2 << 20), (6 << 20, 4096)] {
        let mut buf = pool.checkout(Request::new(len).align(align)).unwrap();
        assert_eq!(buf.as_ptr() as usize % align.max(64), 0);
        buf.extend_from_slice(&bytes(align, len));
        let buf = stream.upload(buf, &memory).unwrap().wait().unwrap();
        assert!(*buf == *bytes(align, len));
        let landing = pool.checkout(Request::new(len).align(align)).unwrap();
        let back = stream.download(memory.slice(..len), landing).unwrap().wait().unwrap();
        assert!(*back == *buf);
    }
}

fn timeouts(on: &Subject) {
    let (pool, stream) = (on.pool(2 << 20), on.stream());
    let memory = on.alloc(1 << 20);
    for timeout in [Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(3600), Duration::MAX] {
        let sent = bytes(1, 1 << 20);
        let flight = stream.upload(filled(&pool, &sent), &memory).unwrap();
        let buf = match flight.wait_timeout(timeout) {
            Ok(buf) => buf,
            Err(SubmitError { error: Error::Timeout(_), buffer: Some(flight) }) => flight.wait().unwrap(),
            Err(wrong) => panic!("{wrong:?}"),
        };
        assert!(*buf == *sent);
    }
    let all: Vec<PinnedBuf> = std::iter::from_fn(|| pool.try_checkout(60_000).ok()).collect();
    let late = pool.checkout_timeout(60_000, Duration::from_millis(1)).unwrap_err();
    assert!(matches!(late, Error::Timeout(_)), "{late}");
    let late = pool.checkout_many(&[60_000.into(), 60_000.into()], Some(Duration::ZERO)).unwrap_err();
    assert!(matches!(late, Error::Timeout(_)), "{late}");
    assert_eq!(pool.stats().waiting, 0);
    drop(all);
    drop(pool.checkout_timeout(60_000, Duration::ZERO).unwrap());
    pool.check().unwrap();
}

/// Polls until it is ready, after each wake-up only.
fn block_on<F: Future + Unpin>(on: &Subject, mut future: F) -> F::Output {
    #[derive(Default)]
    struct Wakes(AtomicUsize);
    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let wakes = Arc::new(Wakes::default());
    let waker = Waker::from(wakes.clone());
    loop {
        let before = wakes.0.load(Ordering::SeqCst);
        if let Poll::Ready(output) = Pin::new(&mut future).poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        while wakes.0.load(Ordering::SeqCst) == before {
            on.pump();
        }
    }
}

fn awaited(on: &Subject) {
    let (pool, stream) = (on.pool(128 << 10), on.stream());
    let memory = on.alloc(50_000);
    for round in 0..30 {
        let sent = bytes(round, 50_000);
        let mut buf = block_on(on, pool.checkout_async(50_000)).unwrap();
        buf.extend_from_slice(&sent);
        let buf = block_on(on, stream.upload(buf, &memory).unwrap()).unwrap();
        assert!(*buf == *sent);
        let both = block_on(on, stream.download(&memory, buf).unwrap()).unwrap();
        assert!(*both == *sent);
        drop(stream.upload(both, &memory).unwrap());
        // Two, of a pool that has room for two, one of them in flight.
        let two = block_on(on, pool.checkout_many_async([50_000.into(), 50_000.into()])).unwrap();
        assert_eq!(two.len(), 2);
    }
}

fn asked(on: &Subject) {
    let (pool, stream) = (on.pool(4 << 20), on.stream());
    let flight = stream.upload(filled(&pool, &bytes(0, 1 << 20)), on.alloc(1 << 20)).unwrap();
    while !flight.is_done().unwrap() {
        on.pump();
    }
    assert!(*flight.wait().unwrap() == *bytes(0, 1 << 20));
}

fn drops(on: &Subject) {
    // Every order of six things: the pool, the stream, device memory, a buffer, two handles to something in flight.
    fn orders(left: &mut Vec<usize>, order: &mut Vec<usize>, all: &mut Vec<Vec<usize>>) {
        if left.is_empty() {
            all.push(order.clone());
        }
        for at in 0..left.len() {
            let one = left.remove(at);
            order.push(one);
            orders(left, order, all);
            order.pop();
            left.insert(at, one);
        }
    }
    let mut all = Vec::new();
    orders(&mut (0..6).collect(), &mut Vec::new(), &mut all);
    assert_eq!(all.len(), 720);
    let mut pools: Vec<Pool> = Vec::new();
    // Not every order gets a pool of its own: making one is not what is tested here.
    for (n, order) in all.into_iter().enumerate() {
        if n % 6 == 0 {
            pools = vec![on.pool(256 << 10)];
        }
        let mut pool = if n % 6 == 5 { pools.pop() } else { pools.first().cloned() };
        let mut stream = Some(on.stream());
        let mut memory = Some(on.alloc(1000));
        let mut flights = {
            let (pool, stream) = (pool.as_ref().unwrap(), stream.as_ref().unwrap());
            let sent = stream.upload(filled(pool, &bytes(n, 1000)), memory.as_ref().unwrap()).unwrap();
            let landing = pool.checkout(1000).unwrap();
            [Some(sent), Some(stream.download(memory.as_ref().unwrap(), landing).unwrap())]
        };
        let mut buf = Some(filled(pool.as_ref().unwrap(), &bytes(n, 10)));
        for what in order {
            match what {
                0 => pool = None,
                1 => stream = None,
                2 => memory = None,
                3 => assert!(*buf.take().unwrap() == *bytes(n, 10)),
                4 => drop(flights[0].take()),
                // Whatever is gone by now, this still arrives.
                _ => assert!(*flights[1].take().unwrap().wait().unwrap() == *bytes(n, 1000), "order {n}"),
            }
        }
        assert!(pool.is_none() && stream.is_none() && memory.is_none());
    }
    assert_eq!(on.device.lost(), None);
}

fn threads(on: &Subject) {
    let count = if on.has_threads() { 4 } else { 1 };
    let pool = on.pool(2 << 20);
    let streams = [on.stream(), on.stream()];
    std::thread::scope(|scope| {
        for thread in 0..count {
            let (pool, streams) = (&pool, &streams);
            scope.spawn(move || {
                let memory = on.alloc(40_000);
                for round in 0..60 {
                    let len = 1 + (round * 977 + thread * 131) % 40_000;
                    let sent = bytes(thread * 1000 + round, len);
                    let stream = &streams[(thread + round) % 2];
                    drop(stream.upload(filled(pool, &sent), &memory).unwrap());
                    let landing = pool.checkout_on(stream, len).unwrap();
                    let back = stream.download(memory.slice(..len), landing).unwrap().wait().unwrap();
                    assert!(*back == *sent, "thread {thread}, round {round}");
                }
            });
        }
    });
    streams.iter().for_each(|s| s.synchronize().unwrap());
    let stats = pool.stats();
    assert_eq!((stats.in_flight_bytes, stats.checked_out_bytes), (0, 0), "{stats:?}");
    pool.check().unwrap();
}
