//! Ascend devices through the crate's public face, on simulated ones (`crates/pinpool-sim`): what the contract's
//! suite, which runs there too, does not test.
//!
//! Each test has a machine of its own for each library that it is about (`tests/support/doubles/npu.rs`), and
//! afterwards no rule may have been broken and nothing may be left there. Where `PINPOOL_REQUIRE` names an Ascend
//! device, `what_the_device_says` runs on that.

#![allow(unsafe_code, reason = "handles of a server's own")]

mod ending;
mod failing;
mod memory;
mod sharing;
mod standin;

use crate::support::bytes;
use crate::support::doubles::gpu::{calls, filled, pool, round_trip, until};
use crate::support::doubles::npu::PATH;
use crate::support::doubles::npu::{self, OF_2024, ON_DEVICE, TODAY, on_each};
use crate::support::doubles::{self, HANG, StandIn, npu_name, simulation};
use pinpool::{Device, DeviceSlice, Error, ErrorClass, Pool, Stream, acl};

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

/// The context that is current on this thread. 0: none.
fn current(server: &StandIn) -> usize {
    let mut current = 0_usize;
    let code = server.call("aclrtGetCurrentContext", &[(&raw mut current).expose_provenance()]);
    assert!(code == if current == 0 { 107_002 } else { 0 }, "{code}");
    current
}

#[test]
fn what_the_device_says() {
    let tell = || {
        let device = open(0);
        let about = acl::about(&device).unwrap();
        println!("{about:#?}");
        round_trip(&pool(&device, 1 << 20), &device.stream().unwrap(), &bytes(1, 100_000));
        about
    };
    if npu::required() {
        tell();
        return;
    }
    on_each(&npu::WAYS, |stand_in| {
        let about = tell();
        assert_eq!(about.on_device, stand_in.is("rc true"));
        for (name, has) in about.later {
            assert_eq!(has, stand_in.has(name), "{name}");
        }
    });
}

/// In the middle of its work, in each way that `tests/support/exits.rs` has. (`kept` has them on the
/// simulated library.)
#[test]
fn a_process_may_end_in_any_way() {
    if npu::required() {
        crate::support::exits::all("a_process_may_end_in_any_way", "acl:0", &[]);
    }
}

#[test]
fn a_library_is_found_in_the_toolkits_home() {
    const TEST: &str = "acl::a_library_is_found_in_the_toolkits_home";
    const HOME: &str = "ASCEND_TOOLKIT_HOME";
    if std::env::var_os("PINPOOL_TEST_HOME").is_some() {
        return assert_eq!(Device::open("acl").unwrap().name(), "acl:0");
    }
    let Some(library) = simulation() else { return };
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(home.path().join("lib64")).unwrap();
    std::fs::copy(library, home.path().join("lib64/libascendcl.so")).unwrap();
    let environment = [("PINPOOL_TEST_HOME", "1"), (HOME, home.path().to_str().unwrap()), (PATH, "")];
    doubles::passes(TEST, &environment, HANG);
}
