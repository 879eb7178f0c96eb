//! Ascend devices through the crate's public face, on simulated ones (`crates/pinpool-sim`): what the contract's
//! suite, which runs there too, does not test.
//!
//! Each test has a machine of its own for each library that it is about (`tests/support/doubles/npu.rs`), and
//! afterwards no rule may have been broken and nothing may be left there. Where `PINPOOL_REQUIRE` names an Ascend
//! device, `what_the_device_says` runs on that.

#![cfg(all(feature = "acl", target_os = "linux"))]
#![allow(unsafe_code, reason = "calling the library beside pinpool")]

mod closing;
mod contexts;
mod events;
mod exits;
mod failing;
mod lost;
mod memory;
mod opening;
mod sharing;
mod standin;
#[path = "../support/mod.rs"]
mod support;

use std::time::Duration;

use pinpool::{Device, DeviceSlice, Error, ErrorClass, PinnedBuf, Pool, Stream, Unpinned, acl};
use support::doubles::ascendcl::{PATH, REPORT, acl, made, report_of, says};
use support::doubles::gpu::{calls, filled, until};
use support::doubles::npu::{self, OF_2024, ON_DEVICE, TODAY, on_each};
use support::doubles::{self, HANG, SETUP, StandIn, npu_name};
use support::{bytes, skip};

/// The path of the simulation as a library. `None`, and said: it is not there.
fn simulation() -> Option<String> {
    let library = doubles::library();
    if library.is_none() {
        skip!("the simulation is not beside the executable");
    }
    library.map(|path| path.into_os_string().into_string().unwrap())
}

/// Of copies up and down again.
const ROUNDS: usize = 24;

fn open(number: usize) -> Device {
    Device::open(&npu_name(number)).unwrap()
}

/// The first device, with a pool, a stream and memory of that length.
fn first(len: usize) -> (Device, Pool, Stream, DeviceSlice) {
    let device = open(0);
    let (pool, stream, memory) =
        (pool(&device, 1 << 20), device.stream().unwrap(), device.alloc(len).unwrap());
    (device, pool, stream, memory)
}

/// A pool with room for that many bytes.
fn pool(device: &Device, capacity: usize) -> Pool {
    Pool::builder(device).capacity(capacity).extent(128 << 10).region(256 << 10).build().unwrap()
}

/// Up and down again, and compared.
fn round_trip(pool: &Pool, stream: &Stream, seed: usize, len: usize) {
    let (sent, memory) = (bytes(seed, len), stream.device().alloc(len).unwrap());
    drop(stream.upload(filled(pool, &sent), &memory).unwrap());
    let landing = pool.checkout_timeout(len, HANG).unwrap();
    let back = stream.download(&memory, landing).unwrap().wait().unwrap();
    assert!(*back == sent, "{len} bytes");
}

/// The library's text about this thread's latest error, if there is one that nobody has asked for.
fn message(stand_in: &StandIn) -> Option<String> {
    // SAFETY: acl.h has the signature; the result is null or a string until the next call.
    unsafe {
        let text = stand_in.get::<extern "C" fn() -> *const std::ffi::c_char>("aclGetRecentErrMsg")();
        (!text.is_null()).then(|| std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned())
    }
}

#[test]
fn what_the_device_says() {
    let tell = || {
        let device = open(0);
        let about = acl::about(&device).unwrap();
        println!("{about:#?}");
        let pool = Pool::builder(&device).capacity(64 << 20).build().unwrap();
        for region in pool.regions() {
            println!(
                "{region:?}, aligned to {} bytes",
                1_u64 << region.base.as_ptr().addr().trailing_zeros()
            );
        }
        round_trip(&pool, &device.stream().unwrap(), 1, 1 << 20);
        about
    };
    if npu::required() {
        tell();
        return;
    }
    on_each(&npu::WAYS, |stand_in| {
        let about = tell();
        assert_eq!(about.on_device, stand_in.is("rc true"));
        let has = |name: &'static str| about.later.contains(&(name, true));
        for (name, _) in &about.later {
            assert_eq!(has(name), stand_in.has(name), "{name}");
        }
    });
}

/// On two devices that share a pool, from many threads and with copies in flight at the end.
#[test]
fn everything_is_given_back_by_the_time_that_devices_are_closed() {
    on_each(&npu::WAYS, |stand_in| {
        let devices = [open(0), open(1)];
        let shared = Pool::builder(&devices[0]).device(&devices[1]).capacity(4 << 20).extent(512 << 10);
        let shared = shared.region(1 << 20).build().unwrap();
        std::thread::scope(|scope| {
            for worker in 0..6 {
                let (shared, device) = (&shared, &devices[worker % 2]);
                scope.spawn(move || {
                    let (own, stream) = (pool(device, 1 << 20), device.stream().unwrap());
                    let memory = device.alloc(200_000).unwrap();
                    for round in 0..ROUNDS {
                        let len = 1 + (worker * 7919 + round * 104_729) % 200_000;
                        let sent = bytes(worker * 1000 + round, len);
                        drop(stream.upload(filled(shared, &sent), memory.slice(..len)).unwrap());
                        let landing = shared.checkout_timeout(len, HANG).unwrap();
                        let back = stream.download(memory.slice(..len), landing).unwrap();
                        assert!(*back.wait().unwrap() == sent);
                    }
                    for from in [&own, shared, &own] {
                        drop(stream.upload(filled(from, &[1; 20_000]), &memory).unwrap());
                    }
                });
            }
        });
        shared.check().unwrap();
        let stats = shared.stats();
        assert_eq!((stats.quarantined_bytes, stats.unpinned_bytes), (0, 0));
        drop(shared);
        std::thread::scope(|scope| {
            for device in devices {
                scope.spawn(|| device.close(HANG).unwrap());
            }
        });
        let report = stand_in.report();
        assert!(report.over && report.leaks.is_empty(), "{report:?}");
    });
}

#[test]
fn nothing_is_called_after_the_end() {
    on_each(&[npu::TODAY, npu::OF_2024], |stand_in| {
        let (device, pool, stream, memory) = first(10_000);
        // Copies are late here: all of these are in flight when their pool, stream, memory and device are dropped.
        for round in 0..20 {
            drop(stream.upload(filled(&pool, &bytes(round, 10_000)), &memory).unwrap());
        }
        drop((device, pool, stream, memory));
        let ended = npu::no_trace(stand_in);
        // A late call has had time to come.
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(stand_in.report().calls, ended.calls);
    });
}

#[test]
fn nothing_is_called_while_the_process_ends() {
    if std::env::var_os(REPORT).is_none() {
        let Some(library) = simulation() else { return };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report");
        let environment = [(PATH, &*library), (REPORT, path.to_str().unwrap())];
        let child = doubles::child("nothing_is_called_while_the_process_ends", &environment, HANG);
        let ended = child.status.and_then(|status| status.code());
        assert_eq!(ended, Some(0), "the child {}: {}", child.how(), child.last_words());
        let report = report_of(&path).unwrap();
        assert_eq!(report.violations, Vec::<String>::new());
        let held = report.leaks.iter().any(|leak| leak.starts_with("hosts"));
        return assert!(held, "it ended too late to show anything");
    }
    let device = open(0);
    // Much memory to be freed, range by range, by a thread of the crate's.
    let pool = Pool::builder(&device).capacity(16 << 20).region(16 << 20).extent(4096).build().unwrap();
    pool.wait_pinned(Some(HANG)).unwrap();
    drop((pool, device));
    std::process::exit(0);
}

#[test]
fn plain_memory_is_never_copied_from_asynchronously() {
    on_each(&npu::WAYS, |stand_in| {
        let device = open(0);
        let stream = device.stream().unwrap();
        let memory = device.alloc(100_000).unwrap();
        stand_in.command("host 1073741824 4096");
        // Where memory can be registered, the pool pins it after a while.
        stand_in.command("registers false");
        let refused = Pool::builder(&device).capacity(1 << 20).build().unwrap_err().to_string();
        for part in [
            &*format!("{}: aclrtMallocHost", npu_name(0)),
            "207001",
            "ACL_ERROR_RT_MEMORY_ALLOCATION",
            "ulimit -l",
            "memory.max",
        ] {
            assert!(refused.contains(part), "{refused}");
        }
        let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
        assert_eq!((pool.stats().pinned_bytes, pool.stats().unpinned_bytes), (0, 1 << 20));
        for round in 0..ROUNDS {
            let sent = bytes(round, 100_000);
            let buf = filled(&pool, &sent);
            assert!(!buf.is_pinned());
            drop(stream.upload(buf, &memory).unwrap());
            let landing = pool.checkout_on(&stream, 100_000).unwrap();
            assert!(*stream.download(&memory, landing).unwrap().wait().unwrap() == sent);
            // Memory of no pool.
            stream.upload_blocking(&sent[..777], memory.slice(100..877)).unwrap();
            let mut back = vec![0; 777];
            stream.download_blocking(memory.slice(100..877), &mut back).unwrap();
            assert!(back == sent[..777]);
        }
        assert_eq!(calls(stand_in, "aclrtMemcpyAsync"), 0);
        assert!(calls(stand_in, "aclrtMemcpy") >= 4 * ROUNDS as u64);
    });
}

/// A pool of another kind of device.
fn pool_on_host() -> Pool {
    let host = Device::open("host:0").unwrap();
    Pool::builder(&host).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap()
}
