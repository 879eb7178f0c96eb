//! Opening a device: what it says where that fails, and what `auto` takes in its place.
//!
//! Each case has a process of its own, which loads the simulation as a library.

use pinpool::{Device, Error};

use crate::record;
use crate::support::doubles::npu::PATH as ASCEND;
use crate::support::doubles::{self, HANG, PATH as CUDA, SETUP, StandIn};

/// Of each case: the device, what differs in its environment (`library` and `sim` stand for the vendor's path and for
/// commands to the simulation), words of the error, and what `auto` takes.
const CASES: &str = "
cuda:0 / library=/no/libcuda.so.1 \
    / /no/libcuda.so.1 could not be loaded (cannot open | PINPOOL_LIBCUDA / host:0
cuda:0 / library=libm.so.6 / libm.so.6 lacks cuInit | 11.0 / host:0
cuda:0 / sim=version 10020 / supports CUDA 10.2 only | newer driver / host:0
cuda:0 / sim=devices 0 0 / failed with 100 (CUDA_ERROR_NO_DEVICE | CUDA_VISIBLE_DEVICES / host:0
cuda:0 / sim=fail cuInit 1 803 false / cuInit failed with 803 | do not fit together / cuda:0
cuda:0 / sim=fail cuInit 1 123456 false / cuInit failed with 123456 | no name for / cuda:0
cuda:0 / sim=fail cuDevicePrimaryCtxRetain 1 2 false / OUT_OF_MEMORY | may succeed later / cuda:0
cuda:0 / sim=fail cuDevicePrimaryCtxRetain 1 46 false;fail cuDevicePrimaryCtxRetain 2 46 false \
    / cuDevicePrimaryCtxRetain failed with 46 / cuda:1
acl:0 / library=libm.so.6 / libm.so.6 lacks aclInit / host:0
acl:0 / library=, ASCEND_TOOLKIT_HOME=/no, ASCEND_HOME_PATH= / /no/lib64/libascendcl.so \
    | /usr/local/Ascend/ | libascendcl.so could | PINPOOL_LIBASCENDCL / host:0
acl:0 / sim=devices 0 0 / ASCEND_RT_VISIBLE_DEVICES / host:0
acl:0 / sim=fail aclrtSetDevice 1 507033 false;fail aclrtSetDevice 2 507033 false / 507033 / acl:1
";

#[test]
fn opening_fails_with_the_cause_and_the_remedy() {
    const TEST: &str = "opening_fails_with_the_cause_and_the_remedy";
    if let [Ok(device), Ok(expected), Ok(taken)] = ["DEVICE", "EXPECTED", "TAKEN"].map(std::env::var) {
        let error = match Device::open(&device) {
            // A machine that has a library in one of the usual places.
            Ok(_) if expected.contains("/usr/local/") => return,
            opened => opened.unwrap_err(),
        };
        for part in expected.split(" | ").chain([&*device]) {
            assert!(error.to_string().contains(part), "{part:?} is not in: {error}");
        }
        // What failed once may succeed later, and then `auto` takes it; what is missing stays so. And it says
        // why.
        record::record();
        assert_eq!(Device::open("auto").unwrap().name(), taken);
        let reason = match &*taken {
            "host:0" => expected.split(" | ").next().unwrap().to_owned(),
            taken => format!("auto: taking {taken}"),
        };
        let said = format!("{:?}", record::events("pinpool::device"));
        assert!(said.contains(&reason), "{said}");
        assert!(!taken.ends_with(":1") || said.contains(&format!("{device} is not taken")), "{said}");
        return;
    }
    let Some(library) = doubles::simulation() else { return };
    for case in CASES.lines().skip(1) {
        let [device, set, expected, taken] = case.split(" / ").collect::<Vec<_>>()[..] else {
            panic!("{case}")
        };
        let (built, own, other) = match device {
            "cuda:0" => (cfg!(feature = "cuda"), CUDA, ASCEND),
            _ => (cfg!(feature = "acl"), ASCEND, CUDA),
        };
        if !built {
            continue;
        }
        let case = [("DEVICE", device), ("EXPECTED", expected), ("TAKEN", taken)];
        // The last one of a name counts.
        let mut environment = [&case[..], &[(own, &library), (other, "/no")]].concat();
        for one in set.split(", ") {
            let (name, value) = one.split_once('=').expect("a variable");
            let name = match name {
                "library" => own,
                "sim" => SETUP,
                name => name,
            };
            environment.push((name, value));
        }
        doubles::passes(TEST, &environment, HANG);
    }
}

#[test]
fn devices_that_there_are_not_are_told_and_none_is_asked_for_in_turn() {
    // In a child, which loads the simulation.
    let Some(d) = StandIn::loaded() else {
        let Some(library) = doubles::simulation() else { return };
        let test = "devices_that_there_are_not_are_told_and_none_is_asked_for_in_turn";
        return doubles::again(test, &[(ASCEND, &library)]);
    };
    let families = [("cuda", cfg!(feature = "cuda")), ("acl", cfg!(feature = "acl"))];
    for (family, _) in families.into_iter().filter(|(_, built)| *built) {
        for number in ["2", "4294967295", "", "-1", "x", "0:0"] {
            let name = format!("{family}:{number}");
            let error = Device::open(&name).unwrap_err();
            assert!(matches!(error, Error::Unavailable { .. }), "{error}");
            let (there, form) = (format!("{family}:0 to {family}:1"), format!("{family}:N"));
            assert!(
                error.to_string().contains(if number.contains(['2', '4']) { &there } else { &form }),
                "{error}"
            );
        }
        assert_eq!(Device::open(family).unwrap().name(), format!("{family}:0"));
    }
    assert!(matches!(Device::open("auto:0").unwrap_err(), Error::Unavailable { .. }));
    if cfg!(feature = "cuda") {
        assert_eq!(Device::open("auto").unwrap().name(), "cuda:0");
        // Where they cannot be counted there is no last one.
        (1..=9).for_each(|nth| d.fail("cuDeviceGetCount", nth, 999, false));
        let error = Device::open("cuda:0").unwrap_err();
        let told = matches!(&error, Error::Unavailable { why, .. } if why.contains("cuDeviceGetCount"));
        assert!(told, "{error}");
        assert!(!Device::open("auto").unwrap().name().starts_with("cuda"));
        assert_eq!(d.struck(), 2, "no call asks for the next one");
    }
}
