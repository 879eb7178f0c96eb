//! GPUs through the stand-in driver: opening, contexts, captures, trouble, and every driver call failing once.
//!
//! What any device must do is in `contract`. Here is what only CUDA has, and what only a double can be made to do. Each
//! test runs in a child of its own, which loads the stand-in; see `support/doubles`.

#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(unsafe_code, reason = "calling the stand-in")]

use std::sync::{Arc, Mutex};

use pinpool::{
    Device, DeviceSlice, Error, ErrorClass, InFlight, Lend, PinnedBuf, Pool, Stream, SubmitError, Unpinned,
};

use crate::support::doubles::faults::{self, Fault, Findings};
use crate::support::doubles::gpu::{bytes, filled, until};
use crate::support::doubles::{self, HANG, StandIn, on_stand_in};

/// A call of the driver, made by the test itself.
fn driver(stand_in: &StandIn, name: &str, a: usize, b: usize) -> u32 {
    // SAFETY: only called for functions of at most two such arguments, which are passed in registers.
    unsafe { stand_in.get::<unsafe extern "C" fn(usize, usize) -> u32>(name)(a, b) }
}

/// The same for one that writes a word to its first argument.
fn made(stand_in: &StandIn, name: &str, b: usize) -> usize {
    let mut word = 0_usize;
    assert_eq!(driver(stand_in, name, (&raw mut word) as usize, b), 0, "{name}");
    word
}

fn pool(device: &Device) -> Pool {
    let built =
        Pool::builder(device).capacity(2 << 20).initial(256 << 10).region(256 << 10).extent(128 << 10);
    built.build().unwrap()
}

/// There and back.
fn round_trip(pool: &Pool, stream: &Stream, memory: &DeviceSlice, seed: usize) {
    let sent = bytes(seed, memory.len());
    drop(stream.upload(filled(pool, &sent), memory).unwrap());
    let landing = pool.checkout_timeout(memory.len(), HANG).unwrap();
    assert!(*stream.download(memory, landing).unwrap().wait().unwrap() == *sent);
}

/// What was logged, a line each.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Log {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "pinpool::device"
    }
    fn event(&self, event: &tracing::Event<'_>) {
        struct Line(String);
        impl tracing::field::Visit for Line {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{field}={value:?} ");
            }
        }
        let mut line = Line(String::new());
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0.replace("message=", ""));
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn opening_fails_with_the_cause_and_the_remedy() {
    const TEST: &str = "opening_fails_with_the_cause_and_the_remedy";
    if let Ok(expected) = std::env::var("EXPECTED") {
        let error = Device::open("cuda:0").unwrap_err();
        for part in expected.split('|') {
            assert!(error.to_string().contains(part), "{part:?} is not in: {error}");
        }
        // What failed once may succeed later, and then `auto` takes it; what is missing stays so.
        let log = Log::default();
        let best = tracing::subscriber::with_default(log.clone(), || Device::open("auto")).unwrap();
        let once = std::env::var_os("ONCE").is_some();
        assert_eq!(best.name(), if once { "cuda:0" } else { "host:0" });
        // And it says why.
        let said = log.0.lock().unwrap().join("\n");
        let reason = if once { "auto: taking cuda:0" } else { expected.split('|').next().unwrap() };
        assert!(said.contains(reason), "{said}");
        return;
    }
    for (name, value, expected, once) in [
        (
            doubles::PATH,
            "/nowhere/libcuda.so.1",
            // The library's name is told once, and so is the device's below.
            "/nowhere/libcuda.so.1 could not be loaded (cannot open|PINPOOL_LIBCUDA",
            false,
        ),
        (doubles::PATH, "libm.so.6", "libm.so.6 lacks cuInit|11.0", false),
        ("PINPOOL_STANDIN_VERSION", "10020", "supports CUDA 10.2 only|newer driver", false),
        (
            "PINPOOL_STANDIN_DEVICES",
            "0",
            "cuInit failed with 100 (CUDA_ERROR_NO_DEVICE|CUDA_VISIBLE_DEVICES",
            false,
        ),
        ("PINPOOL_STANDIN_FAIL", "cuDriverGetVersion:1:999", "cuDriverGetVersion failed with 999", true),
        (
            "PINPOOL_STANDIN_FAIL",
            "cuDeviceGetCount:1:999",
            "device cuda:0 is not available: cuDeviceGetCount failed with 999",
            true,
        ),
        ("PINPOOL_STANDIN_FAIL", "cuInit:1:803", "cuInit failed with 803|do not fit together", true),
        ("PINPOOL_STANDIN_FAIL", "cuInit:1:123456", "cuInit failed with 123456|no name for", true),
        ("PINPOOL_STANDIN_FAIL", "cuDevicePrimaryCtxRetain:1:2", "OUT_OF_MEMORY|may succeed later", true),
    ] {
        println!("{name}={value}");
        let mut environment = vec![(name, value), ("EXPECTED", expected)];
        environment.extend(once.then_some(("ONCE", "1")));
        doubles::again(TEST, &environment);
    }
}

#[test]
fn auto_takes_the_next_gpu_where_the_first_cannot_be_had() {
    const TEST: &str = "auto_takes_the_next_gpu_where_the_first_cannot_be_had";
    if !doubles::is_set() {
        // Taken by another process, as a GPU in exclusive mode is.
        return doubles::again(TEST, &[("PINPOOL_STANDIN_FAIL", "cuDevicePrimaryCtxRetain:1:46")]);
    }
    let log = Log::default();
    let best = tracing::subscriber::with_default(log.clone(), || Device::open("auto")).unwrap();
    assert_eq!(best.name(), "cuda:1");
    let said = log.0.lock().unwrap().join("\n");
    assert!(said.contains("cuda:0 cannot be opened") && said.contains("taking cuda:1"), "{said}");
}

/// Each GPU would be asked for in turn, and there is no last one.
#[test]
fn auto_goes_on_without_gpus_where_they_cannot_be_counted() {
    on_stand_in("auto_goes_on_without_gpus_where_they_cannot_be_counted", |d| {
        for nth in 1..=9 {
            d.fail("cuDeviceGetCount", nth, 999, false);
        }
        let error = Device::open("cuda:0").unwrap_err();
        assert!(
            matches!(&error, Error::Unavailable { why, .. } if why.contains("cuDeviceGetCount")),
            "{error}"
        );
        assert!(!Device::open("auto").unwrap().name().starts_with("cuda"));
        assert_eq!(d.struck(), 2, "no call asks for the next one");
    });
}

#[test]
fn a_bad_ordinal_is_told_which_there_are() {
    on_stand_in("a_bad_ordinal_is_told_which_there_are", |_| {
        for name in ["cuda:2", "cuda:4294967295"] {
            let error = Device::open(name).unwrap_err();
            assert!(matches!(error, Error::UnknownDevice { .. }), "{error}");
            assert!(error.to_string().contains("cuda:0 to cuda:1"), "{error}");
        }
        for name in ["cuda:", "cuda:-1", "cuda:x", "cuda:4294967296", "cuda:0:0", "auto:0"] {
            assert!(matches!(Device::open(name).unwrap_err(), Error::UnknownDevice { .. }), "{name}");
        }
        assert_eq!(Device::open("cuda").unwrap().name(), "cuda:0");
        assert_eq!(Device::open("auto").unwrap().name(), "cuda:0");
    });
}

#[test]
fn the_callers_context_and_mode_are_left_alone() {
    on_stand_in("the_callers_context_and_mode_are_left_alone", |d| {
        let device = Device::open("cuda:0").unwrap();
        let other = made(d, "cuDevicePrimaryCtxRetain", 1);
        // Once with none, once with another GPU's, once with the pool's own.
        let same = made(d, "cuDevicePrimaryCtxRetain", 0);
        for context in [0, other, same] {
            assert_eq!(driver(d, "cuCtxSetCurrent", context, 0), 0);
            let (pool, stream, memory) =
                (pool(&device), device.stream().unwrap(), device.alloc(50_000).unwrap());
            round_trip(&pool, &stream, &memory, 1);
            stream.upload_blocking(&bytes(2, 50_000), &memory).unwrap();
            device.stream().unwrap().wait_for(&stream).unwrap();
            // Refused by the driver: put back all the same.
            d.fail("cuMemcpyHtoDAsync_v2", 1, 1, false);
            drop(stream.upload(filled(&pool, &bytes(1, 100)), &memory).unwrap_err());
            assert_eq!(made(d, "cuCtxGetCurrent", 0), context);
            let mut mode = 1_u32;
            assert_eq!(driver(d, "cuThreadExchangeStreamCaptureMode", (&raw mut mode) as usize, 0), 0);
            assert_eq!(mode, 0, "global, as threads begin");
            mode = 0;
            assert_eq!(driver(d, "cuThreadExchangeStreamCaptureMode", (&raw mut mode) as usize, 0), 0);
        }
        drop(device);
        assert_eq!(driver(d, "cuDevicePrimaryCtxRelease_v2", 0, 0), 0);
        assert_eq!(driver(d, "cuDevicePrimaryCtxRelease_v2", 1, 0), 0);
        let report = d.final_report();
        assert_eq!((report.violations, report.leaks), (vec![], vec![]));
    });
}

#[test]
fn a_capture_elsewhere_survives_everything() {
    on_stand_in("a_capture_elsewhere_survives_everything", |d| {
        let device = Device::open("cuda:0").unwrap();
        let context = made(d, "cuDevicePrimaryCtxRetain", 0);
        assert_eq!(driver(d, "cuCtxSetCurrent", context, 0), 0);
        let captured = made(d, "cuStreamCreate", 1);
        // In global mode: unsafe calls of any thread would spoil it, this thread's among them.
        assert_eq!(driver(d, "cuStreamBeginCapture_v2", captured, 0), 0);
        let pool = pool(&device);
        let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
        let memory = device.alloc(100_000).unwrap();
        for round in 0..20 {
            round_trip(&pool, &stream, &memory, round);
            other.wait_for(&stream).unwrap();
        }
        // Checked now, since a blocking copy that a capture forbids waits for the capture's end.
        assert_eq!(d.report().violations, Vec::<String>::new());
        stream.upload_blocking(&bytes(7, 100_000), &memory).unwrap();
        // The pool grows, and is trimmed.
        drop((0..15).map(|_| filled(&pool, &bytes(1, 100_000))).collect::<Vec<_>>());
        pool.trim(0);
        // The reaper polls by itself.
        drop(stream.upload(filled(&pool, &bytes(1, 1000)), &memory).unwrap());
        until("the buffer comes back", || pool.stats().in_flight_bytes == 0);
        drop((pool, stream, other, memory, device));
        let mut graph = 0_usize;
        assert_eq!(driver(d, "cuStreamEndCapture", captured, (&raw mut graph) as usize), 0, "it is spoiled");
        assert_eq!(driver(d, "cuGraphDestroy", graph, 0), 0);
        assert_eq!(driver(d, "cuStreamDestroy_v2", captured, 0), 0);
        assert_eq!(driver(d, "cuDevicePrimaryCtxRelease_v2", 0, 0), 0);
        let report = d.final_report();
        assert_eq!((report.violations, report.leaks), (vec![], vec![]));
    });
}

#[test]
fn a_sticky_error_ends_this_gpu_and_no_other() {
    on_stand_in("a_sticky_error_ends_this_gpu_and_no_other", |d| {
        let (device, healthy) = (Device::open("cuda:0").unwrap(), Device::open("cuda:1").unwrap());
        let pool = Pool::builder(&device).device(&healthy).capacity(2 << 20).build().unwrap();
        let (stream, memory) = (device.stream().unwrap(), device.alloc(10_000).unwrap());
        d.hang(true);
        let waited = stream.upload(filled(&pool, &bytes(1, 10_000)), &memory).unwrap();
        drop(stream.upload(filled(&pool, &bytes(2, 10_000)), &memory).unwrap());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| waited.wait().unwrap_err());
            d.kill(0, 700);
            let error = waiter.join().unwrap();
            assert!(
                error.class() == ErrorClass::DeviceLost && error.to_string().contains("ILLEGAL_ADDRESS"),
                "{error}"
            );
        });
        d.hang(false);
        assert!(device.lost().is_some_and(|e| e.is_device_lost()));
        until("all is quarantined", || pool.stats().in_flight_bytes == 0);
        assert!(pool.stats().quarantined_bytes >= 20_000, "{:?}", pool.stats());
        // Refused at once, with the buffer.
        let refused = stream.upload(filled(&pool, &bytes(3, 100)), &memory).unwrap_err();
        assert!(refused.error.is_device_lost() && refused.buffer.is_some());
        assert!(
            device.alloc(1).unwrap_err().is_device_lost() && device.stream().unwrap_err().is_device_lost()
        );
        // The other one serves on.
        let memory = healthy.alloc(10_000).unwrap();
        round_trip(&pool, &healthy.stream().unwrap(), &memory, 4);
        assert_eq!(healthy.lost(), None);
        pool.check().unwrap();
        assert_eq!(d.report().violations, Vec::<String>::new());
    });
}

#[test]
fn the_driver_may_end_before_the_pool() {
    on_stand_in("the_driver_may_end_before_the_pool", |d| {
        let device = Device::open("cuda:0").unwrap();
        let (pool, stream, memory) = (pool(&device), device.stream().unwrap(), device.alloc(10_000).unwrap());
        d.hang(true);
        let flight = stream.upload(filled(&pool, &bytes(1, 10_000)), &memory).unwrap();
        d.fail("cuEventQuery", 1, 4, false);
        let error = flight.wait().unwrap_err();
        assert_eq!(error.class(), ErrorClass::DriverShutdown, "{error}");
        assert!(device.lost().is_some());
        // What was in flight is leaked; nothing waits for it, and nothing calls a driver that is not there.
        drop((pool, stream, memory, device));
    });
}

#[test]
fn a_blocking_copy_returns_only_when_the_driver_has_let_go() {
    on_stand_in("a_blocking_copy_returns_only_when_the_driver_has_let_go", |d| {
        let device = Device::open("cuda:0").unwrap();
        let (pool, stream, memory) = (pool(&device), device.stream().unwrap(), device.alloc(10_000).unwrap());
        for (round, code) in [1, 2, 900, 999].into_iter().enumerate() {
            (1..4).for_each(|_| d.fail("cuStreamSynchronize", 1, code, false));
            let before = d.struck();
            let sent = bytes(round, 10_000);
            let mut borrowed = sent.clone();
            stream.upload_blocking(&borrowed, &memory).unwrap();
            // Would be copied, were the copy still to run.
            borrowed.fill(0xEE);
            let landing = pool.checkout(10_000).unwrap();
            assert!(*stream.download(&memory, landing).unwrap().wait().unwrap() == *sent);
            assert!(d.struck() > before, "nothing was made to fail");
        }
        // The copy is refused, or is said to be and runs all the same.
        for after in [false, true] {
            d.fail("cuMemcpyDtoHAsync_v2", 1, 1, after);
            let mut borrowed = vec![0; 10_000];
            let error = stream.download_blocking(&memory, &mut borrowed).unwrap_err();
            assert_eq!(error.class(), ErrorClass::Argument);
            assert_eq!(borrowed.iter().all(|b| *b == 0), !after, "it is over, one way or the other");
        }
        assert_eq!(device.lost(), None);
        assert_eq!(d.report().violations, Vec::<String>::new());
    });
}

#[test]
fn memory_that_cannot_be_pinned_is_refused_or_said_to_be_plain() {
    on_stand_in("memory_that_cannot_be_pinned_is_refused_or_said_to_be_plain", |d| {
        let device = Device::open("cuda:0").unwrap();
        d.fail("cuMemHostRegister_v2", 1, 2, false);
        let error = Pool::builder(&device).capacity(1 << 20).build().unwrap_err();
        assert_eq!(error.class(), ErrorClass::Transient, "{error}");
        d.fail("cuMemHostRegister_v2", 1, 2, false);
        let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
        let (stream, memory) = (device.stream().unwrap(), device.alloc(10_000).unwrap());
        round_trip(&pool, &stream, &memory, 1);
        assert!(pool.stats().unpinned_bytes > 0);
        assert!(d.report().notes.iter().any(|n| n.starts_with("PAGEABLE")), "copied all the same");
    });
}

// --- every call fails once
// -----------------------------------------------------------------------------------------------

const LEN: usize = 4000;
const BIG: usize = 100 << 10;

/// A careful server: tries again where that makes sense, and never believes an error.
type Server = Findings;

impl Server {
    fn buffer(&mut self, pool: &Pool, seed: usize, len: usize) -> Option<PinnedBuf> {
        let mut buf = self.again("checkout", || pool.checkout_timeout(len, HANG))?;
        buf.extend_from_slice(&bytes(seed, len));
        Some(buf)
    }

    fn finish<B: Lend>(&mut self, flight: InFlight<B>) -> Option<B> {
        match flight.wait_timeout(HANG) {
            Ok(buf) => Some(buf),
            Err(SubmitError { buffer: Some(_), .. }) => {
                self.wrong("a wait hangs");
                None
            }
            Err(SubmitError { error, buffer: None }) => {
                self.dead |= error.is_device_lost();
                if !error.is_device_lost() {
                    self.wrong(format!("a wait ended with {error}, and the device is not lost"));
                }
                None
            }
        }
    }

    /// A large buffer without waiting for other buffers, since this test has them all: it is only there to make the
    /// pool grow.
    fn grown(&mut self, pool: &Pool) -> Option<PinnedBuf> {
        for _ in 0..4 {
            match pool.try_checkout(BIG) {
                Ok(buf) => return Some(buf),
                Err(Error::Exhausted(_)) => {}
                Err(error) => self.wrong(format!("growing: {error}")),
            }
            let pinning = self.again("wait_pinned", || pool.wait_pinned(Some(HANG)))?;
            if pinning.error.is_some_and(|e| e.is_device_lost()) {
                self.dead = true;
                return None;
            }
        }
        self.wrong("the pool does not grow");
        None
    }

    /// The same bytes each time, so that it makes no difference whether a refused copy ran.
    fn upload(
        &mut self,
        pool: &Pool,
        stream: &Stream,
        to: &DeviceSlice,
        seed: usize,
    ) -> Option<InFlight<PinnedBuf>> {
        for _ in 0..2 {
            let buf = self.buffer(pool, seed, LEN)?;
            match stream.upload(buf, to) {
                Ok(flight) => return Some(flight),
                Err(e) if e.error.is_device_lost() => {
                    self.dead = true;
                    return None;
                }
                Err(SubmitError { buffer: Some(buf), .. }) if *buf != *bytes(seed, LEN) => {
                    self.wrong("a refused upload changed its buffer");
                }
                Err(_) => {}
            }
        }
        self.wrong("an upload failed twice");
        None
    }

    fn download(&mut self, pool: &Pool, stream: &Stream, from: &DeviceSlice, seed: usize) -> Option<()> {
        for ready in [true, false] {
            let flight = if ready {
                let landing = self.again("checkout_on", || pool.checkout_on(stream, LEN))?;
                stream.download(from, landing).map_err(Error::from)
            } else {
                let landing = self.again("checkout", || pool.checkout_timeout(LEN, HANG))?;
                stream.download(from, landing).map_err(Error::from)
            };
            match flight {
                Ok(flight) => {
                    let buf = self.finish(flight)?;
                    if *buf != *bytes(seed, LEN) {
                        self.wrong("wrong bytes, reported as done");
                    }
                    return Some(());
                }
                Err(error) if error.is_device_lost() => {
                    self.dead = true;
                    return None;
                }
                Err(_) => {}
            }
        }
        self.wrong("a download failed twice");
        None
    }

    /// Memory by its address, copies between host memory, the heap's limit.
    fn memories(&mut self, device: &Device, pool: &Pool, [one, two]: [&Stream; 2]) -> Option<()> {
        let memory = self.again("alloc", || device.alloc(LEN))?;
        drop(self.upload(pool, two, &memory, 7)?);
        let (address, owner) = (memory.address(), memory.clone());
        let raw = self.again("raw memory", || {
            // SAFETY: the owner keeps it, and one stream uses it.
            Ok(unsafe { device.raw_memory(address, LEN, owner.clone()) }?)
        })?;
        drop((memory, owner));
        let mut back = vec![0; LEN];
        self.again("raw download", || two.download_blocking(&raw, &mut back))?;
        drop(raw);
        if back != bytes(7, LEN) {
            self.wrong("wrong bytes by address");
        }
        for attempt in 0..2 {
            let (from, to) =
                (self.buffer(pool, 8, LEN)?, self.again("checkout", || pool.checkout_timeout(LEN, HANG))?);
            match one.copy_host(from, to) {
                Ok((from, to)) => {
                    drop(from);
                    if self.finish(to).is_some_and(|buf| *buf != *bytes(8, LEN)) {
                        self.wrong("wrong bytes on the host, reported as done");
                    }
                    break;
                }
                Err(e) if e.error.is_device_lost() => {
                    self.dead = true;
                    return None;
                }
                Err(e) if attempt == 1 => self.wrong(format!("a copy on the host failed twice: {e}")),
                Err(_) => {}
            }
        }
        let limit = self.again("heap limit", || pinpool::cuda::device_heap_limit(device))?;
        self.again("set heap limit", || pinpool::cuda::set_device_heap_limit(device, limit))
    }

    /// Everything that makes a driver call, most of them more than once. `None`: the device is lost.
    fn serve(&mut self) -> Option<()> {
        let device = self.again("open", || Device::open("cuda:0"))?;
        let pool = self.again("build", || {
            let pool = Pool::builder(&device).capacity(1 << 20).initial(256 << 10);
            pool.region(256 << 10).extent(128 << 10).build()
        })?;
        let streams = [(); 2].map(|()| self.again("stream", || device.stream()));
        let [Some(one), Some(two)] = streams else { return None };
        let (near, far) =
            (self.again("alloc", || device.alloc(LEN))?, self.again("alloc", || device.alloc(LEN))?);
        // More than a sequence number has room for, and dropped.
        for _ in 0..20 {
            drop(self.upload(&pool, &one, &near, 1)?);
        }
        drop(self.again("copy", || one.copy(&near, &far))?);
        self.again("wait_for", || two.wait_for(&one))?;
        self.download(&pool, &two, &far, 1)?;
        let flight = self.upload(&pool, &two, &far, 2)?;
        let buf = self.finish(flight)?;
        if *buf != *bytes(2, LEN) {
            self.wrong("a buffer came back from an upload with other bytes");
        }
        drop(buf);
        self.memories(&device, &pool, [&one, &two])?;
        self.again("upload_blocking", || one.upload_blocking(&bytes(3, LEN), &near))?;
        let mut back = vec![0; LEN];
        self.again("download_blocking", || one.download_blocking(&near, &mut back))?;
        if back != bytes(3, LEN) {
            self.wrong("wrong bytes after a blocking download");
        }
        let buf = self.buffer(&pool, 4, LEN)?;
        match two.hold(buf) {
            Ok(held) => drop(self.finish(held)),
            Err(e) => self.dead |= e.error.is_device_lost(),
        }
        // The pool grows to its capacity and is trimmed.
        let mut all = Vec::new();
        for _ in 0..6 {
            all.push(self.grown(&pool)?);
        }
        drop(all);
        pool.trim(0);
        drop(self.upload(&pool, &one, &near, 6)?);
        self.again("synchronize", || one.synchronize())?;
        self.again("synchronize", || two.synchronize())?;
        self.download(&pool, &one, &near, 6)?;
        until("nothing is in flight", || {
            device.reap();
            pool.stats().in_flight_bytes == 0 || device.lost().is_some()
        });
        if device.lost().is_some() {
            self.dead = true;
            return None;
        }
        let stats = pool.stats();
        if (stats.checked_out_bytes, stats.quarantined_bytes) != (0, 0) {
            self.wrong(format!("{stats:?}"));
        }
        if let Err(error) = pool.check() {
            self.wrong(format!("{error:?}"));
        }
        Some(())
    }
}

/// A run with one call failing. Returns what is wrong with it.
fn run(stand_in: &StandIn, fault: Option<Fault<'_>>) -> (Vec<String>, doubles::Report) {
    let served = faults::on_a_thread(stand_in, fault, || {
        let mut server = Server::default();
        server.serve();
        server
    });
    let Some(mut server) = served else {
        return (vec!["it panicked".into()], stand_in.report());
    };
    let lost = faults::is_final(fault);
    let report = if lost { stand_in.report() } else { stand_in.final_report() };
    if !report.over && !lost {
        server.wrong("the device is never closed");
    }
    // The failing call was to give memory back itself.
    let may_leak = match fault.map_or("", |f| f.0) {
        // Without a context nothing is given back.
        name if name.starts_with("cuCtx") => "streams events allocations registrations",
        "cuMemFree_v2" => "allocations",
        "cuMemHostUnregister" => "registrations",
        "cuStreamDestroy_v2" => "streams",
        "cuEventDestroy_v2" => "events",
        "cuDevicePrimaryCtxRelease_v2" => "contexts",
        _ => "",
    };
    (server.judged(&report, fault, may_leak), report)
}

#[test]
fn every_driver_call_fails_once() {
    const TEST: &str = "every_driver_call_fails_once";
    on_stand_in(TEST, |stand_in| {
        let queues = |name: &str| {
            ["cuMemcpy", "cuEventRecord", "cuStreamWaitEvent"].iter().any(|q| name.starts_with(q))
        };
        let sweep = faults::Sweep {
            test: TEST,
            // Its first calls, one amid the others, and the last.
            turns: &|_, count| vec![1, 2, count / 2, count],
            codes: &|name| {
                let both = [1, 2, 900, 999].into_iter().flat_map(|c| [(c, false), (c, true)]);
                both.filter(|(_, after)| !after || queues(name)).collect()
            },
            apart: &|_, _, _| vec![700, 4],
            run: &mut |fault| {
                let (wrong, report) = run(stand_in, fault);
                assert!(fault.is_some() || report.calls.len() >= 28, "the scenario makes few of the calls");
                (wrong, report)
            },
        };
        sweep.all(stand_in, &[]);
    });
}
