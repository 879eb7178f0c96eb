//! Ascend devices through the crate's public face, over the stand-in library of `tests/doubles/acl`: what the
//! contract's suite, which runs there too, does not test.
//!
//! Each test runs in a process of its own for each library and machine that it is about
//! (`tests/support/doubles/npu.rs`), and afterwards no rule of the stand-in may have been broken and nothing may be
//! left there. Where `PINPOOL_REQUIRE` names an Ascend device, `what_the_device_says` runs on that.

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

use std::time::{Duration, Instant};

use pinpool::{Device, PinnedBuf, Pool, Stream, Unpinned, acl};
pub(crate) use support::doubles::ascendcl::{acl, made, says};
use support::doubles::npu::{self, on_each};
use support::doubles::{self, HANG};
use support::{bytes, skip};

/// Another test's process may be the first to build the library; this is long enough for all.
const ROUNDS: usize = 24;

/// A pool with room for that many bytes.
fn pool(device: &Device, capacity: usize) -> Pool {
    Pool::builder(device).capacity(capacity).extent(128 << 10).region(256 << 10).build().unwrap()
}

fn filled(pool: &Pool, bytes: &[u8]) -> PinnedBuf {
    let mut buf = pool.checkout_timeout(bytes.len(), HANG).unwrap();
    buf.extend_from_slice(bytes);
    buf
}

/// Up and down again, and compared.
fn round_trip(pool: &Pool, stream: &Stream, seed: usize, len: usize) {
    let (sent, memory) = (bytes(seed, len), stream.device().alloc(len).unwrap());
    drop(stream.upload(filled(pool, &sent), &memory).unwrap());
    let landing = pool.checkout_timeout(len, HANG).unwrap();
    let back = stream.download(&memory, landing).unwrap().wait().unwrap();
    assert!(*back == sent, "{len} bytes");
}

/// Waits until it is so; no test asserts how long that takes.
fn until(what: &str, mut so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !so() {
        assert!(since.elapsed() < HANG, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// How often a call was made so far.
fn calls(stand_in: &doubles::StandIn, name: &str) -> u64 {
    stand_in.report().calls.iter().find(|call| call.0 == name).map_or(0, |call| call.1)
}

#[test]
fn what_the_device_says() {
    let tell = || {
        let device = Device::open("acl:0").unwrap();
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
    on_each("what_the_device_says", &npu::WAYS, |stand_in| {
        let about = tell();
        assert_eq!(about.on_device, std::env::var("PINPOOL_STANDIN_RC").is_ok_and(|rc| rc == "1"));
        let has = |name: &'static str| about.later.contains(&(name, true));
        for (name, _) in &about.later {
            assert_eq!(has(name), stand_in.has(name), "{name}");
        }
        // The best kind of event that the library has.
        let best =
            ["aclrtCreateEventExWithFlag", "aclrtCreateEventWithFlag"].into_iter().find(|call| has(call));
        assert_eq!(about.events, best.unwrap_or("aclrtCreateEvent"));
    });
}

#[test]
fn two_devices_and_many_threads() {
    on_each("two_devices_and_many_threads", &npu::WAYS, |_| {
        let devices = [0, 1].map(|n| Device::open(&format!("acl:{n}")).unwrap());
        let pool = Pool::builder(&devices[0]).device(&devices[1]).capacity(4 << 20).extent(512 << 10);
        let pool = pool.region(1 << 20).build().unwrap();
        std::thread::scope(|scope| {
            for worker in 0..6 {
                let (pool, device) = (&pool, &devices[worker % 2]);
                scope.spawn(move || {
                    let (stream, memory) = (device.stream().unwrap(), device.alloc(200_000).unwrap());
                    for round in 0..ROUNDS {
                        let len = 1 + (worker * 7919 + round * 104_729) % 200_000;
                        let sent = bytes(worker * 1000 + round, len);
                        drop(stream.upload(filled(pool, &sent), memory.slice(..len)).unwrap());
                        let landing = pool.checkout_timeout(len, HANG).unwrap();
                        let back = stream.download(memory.slice(..len), landing).unwrap();
                        assert!(*back.wait().unwrap() == sent);
                    }
                });
            }
        });
        pool.check().unwrap();
        let stats = pool.stats();
        assert_eq!((stats.in_flight_bytes, stats.quarantined_bytes, stats.unpinned_bytes), (0, 0, 0));
        assert!(pool.shutdown(HANG).drained);
    });
}

#[test]
fn nothing_is_called_after_the_end() {
    on_each("nothing_is_called_after_the_end", &[npu::TODAY, npu::EARLY_2022], |stand_in| {
        let device = Device::open("acl:0").unwrap();
        let (pool, stream) = (pool(&device, 1 << 20), device.stream().unwrap());
        let memory = device.alloc(10_000).unwrap();
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

/// Runs after the crate's own exit handler, which was registered later; the library's come last.
extern "C" fn look_at_the_end() {
    let stand_in = npu::stand_in().expect("it is there");
    let before = stand_in.report();
    std::thread::sleep(Duration::from_millis(50));
    let after = stand_in.report();
    let held = |report: &doubles::Report| report.leaks.iter().any(|leak| leak.starts_with("hosts"));
    // Part of the work was done; otherwise this shows nothing.
    println!("held at the end: {}", held(&before));
    let code = if before.calls == after.calls && before.violations.is_empty() { 0 } else { 3 };
    // SAFETY: ends the process as it is.
    unsafe { libc::_exit(code) };
}

#[test]
fn nothing_is_called_while_the_process_ends() {
    const ENDS: &str = "PINPOOL_TEST_ENDS";
    let test = "nothing_is_called_while_the_process_ends";
    if std::env::var_os(ENDS).is_none() {
        let Some(library) = npu::TODAY.library() else {
            return skip!("nothing to build with");
        };
        let environment = [(ENDS, "1"), (doubles::ascendcl::PATH, library.to_str().unwrap())];
        let child = doubles::child(test, &environment, HANG);
        let ended = child.status.and_then(|status| status.code());
        assert_eq!(ended, Some(0), "the child {}: {}", child.how(), child.last_words());
        assert!(child.stdout.contains("held at the end: true"), "it ended too late to show anything");
        return;
    }
    // SAFETY: the function lives as long as the process.
    assert_eq!(unsafe { libc::atexit(look_at_the_end) }, 0);
    let device = Device::open("acl:0").unwrap();
    // Much memory to be freed, range by range, by a thread of the crate's.
    let pool = Pool::builder(&device).capacity(16 << 20).region(16 << 20).extent(4096).build().unwrap();
    pool.wait_pinned(Some(HANG)).unwrap();
    drop((pool, device));
    std::process::exit(0);
}

#[test]
fn plain_memory_is_never_copied_from_asynchronously() {
    on_each("plain_memory_is_never_copied_from_asynchronously", &npu::WAYS, |stand_in| {
        let device = Device::open("acl:0").unwrap();
        let stream = device.stream().unwrap();
        let memory = device.alloc(100_000).unwrap();
        // SAFETY: the double's `control.rs` has the signature.
        unsafe { stand_in.get::<extern "C" fn(usize, usize)>("standin_host_limits")(1 << 30, 4096) };
        // Where memory can be registered, the pool pins it after a while. SAFETY: as above.
        unsafe { stand_in.get::<extern "C" fn(bool, bool)>("standin_abilities")(false, false) };
        let refused = Pool::builder(&device).capacity(1 << 20).build().unwrap_err().to_string();
        for part in
            ["acl:0: aclrtMallocHost", "207001", "ACL_ERROR_RT_MEMORY_ALLOCATION", "ulimit -l", "memory.max"]
        {
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
