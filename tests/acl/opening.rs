//! Finding the library, initialising it, and the errors where that fails.

use super::*;

/// Runs a part of this test in a process of its own, with an environment; `true` in that process.
fn part(test: &str, part: &str, environment: &[(&str, &str)]) -> bool {
    const PART: &str = "PINPOOL_TEST_PART";
    if let Ok(now) = std::env::var(PART) {
        return now == part;
    }
    let mut all = vec![(PART, part)];
    all.extend(environment);
    let child = doubles::child(test, &all, HANG);
    assert!(
        child.status.is_some_and(|s| s.success()),
        "{part}: the child {}: {}",
        child.how(),
        child.last_words()
    );
    assert!(child.stdout.contains("1 passed"), "{part} did not run");
    false
}

fn why(name: &str) -> String {
    match Device::open(name) {
        Err(Error::Unavailable { device, why }) if device == name => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_library_that_cannot_be_used_is_named() {
    let test = "opening::a_library_that_cannot_be_used_is_named";
    if part(test, "missing", &[(PATH, "/nowhere/libascendcl.so")]) {
        let why = why("acl:0");
        assert!(why.contains("/nowhere/libascendcl.so") && why.contains(PATH), "{why}");
    }
    if part(test, "another", &[(PATH, "libm.so.6")]) {
        let why = why("acl:0");
        assert!(why.contains("libm.so.6 lacks aclInit"), "{why}");
    }
    let homes = [("ASCEND_TOOLKIT_HOME", "/nowhere/toolkit"), ("ASCEND_HOME_PATH", ""), (PATH, "")];
    if part(test, "nowhere", &homes) {
        if Device::open("acl:0").is_ok() {
            // This machine has one.
            return;
        }
        let why = why("acl:0");
        for place in
            ["libascendcl.so could", "/nowhere/toolkit/lib64/libascendcl.so", "/usr/local/Ascend/", PATH]
        {
            assert!(why.contains(place), "{why}");
        }
    }
}

#[test]
fn a_toolkit_is_found_by_its_home() {
    let test = "opening::a_toolkit_is_found_by_its_home";
    let Some(library) = simulation() else { return };
    let home = std::env::temp_dir().join(format!("pinpool-toolkit-{}", std::process::id()));
    if std::env::var_os("PINPOOL_TEST_PART").is_none() {
        std::fs::create_dir_all(home.join("lib64")).unwrap();
        std::fs::copy(library, home.join("lib64/libascendcl.so")).unwrap();
    }
    if part(test, "home", &[("ASCEND_TOOLKIT_HOME", home.to_str().unwrap()), (PATH, "")]) {
        let device = Device::open("acl").unwrap();
        assert_eq!(device.name(), "acl:0");
    } else {
        let _ = std::fs::remove_dir_all(home);
    }
}

#[test]
fn devices_that_are_not_there_are_named() {
    let test = "opening::devices_that_are_not_there_are_named";
    let Some(library) = simulation() else { return };
    let with = |setup| [(PATH, &*library), (SETUP, setup), (doubles::PATH, "/nowhere")];
    if part(test, "none", &with("devices 0 0")) {
        let why = why("acl:0");
        assert!(why.contains("ASCEND_RT_VISIBLE_DEVICES"), "{why}");
        // Going on without a device is a line in the log, not an error.
        assert_eq!(Device::open("auto").unwrap().name(), "host:0");
    }
    if part(test, "two", &with("")) {
        let known = |name: &str| match Device::open(name) {
            Err(Error::UnknownDevice { name: of, known }) if of == name => known,
            other => panic!("{other:?}"),
        };
        assert_eq!(known("acl:2"), "there are acl:0 to acl:1");
        assert!(known("acl:4000000000").contains("acl:1"));
        assert!(known("acl:x").contains("acl:N"));
        // The first of the kinds that there are.
        let device = Device::open("auto").unwrap();
        assert_eq!(device.name(), "acl:0");
        // Open already: the same.
        let stream = Device::open("acl:0").unwrap().stream().unwrap();
        assert!(device.stream().unwrap().wait_for(&stream).is_ok());
    }
    if part(test, "taken", &with("fail aclrtSetDevice 1 507033 false")) {
        // The first device is busy, so the second is taken in its place.
        assert_eq!(Device::open("auto").unwrap().name(), "acl:1");
    }
}

#[test]
fn a_call_that_fails_while_a_device_is_opened_is_named() {
    on_each(&[TODAY], |stand_in| {
        for (call, code) in [
            ("aclInit", 500_000),
            ("aclrtGetDeviceCount", 107_000),
            ("aclrtSetDevice", 507_033),
            ("aclrtGetRunMode", 107_000),
            ("aclrtGetCurrentContext", 107_002),
        ] {
            stand_in.fail(call, 1, code, false);
            let error = Device::open(&npu_name(0)).unwrap_err().to_string();
            for part in [npu_name(0), call.to_owned(), code.to_string()] {
                assert!(error.contains(&part), "{error}");
            }
            // The cause of the failure is over.
            drop(open(0));
            npu::no_trace(stand_in);
        }
    });
}

#[test]
fn who_initialised_it_first_makes_no_difference() {
    on_each(&[TODAY, OF_2024], |stand_in| {
        let server = contexts::Server { stand_in };
        says!(server, 0, "aclInit", 0);
        let device = open(0);
        assert_eq!(device.name(), &*npu_name(0));
        // The server goes on, and may have set the same device.
        says!(server, 0, "aclrtSetDevice", 0);
        drop(device);
        until("the device is let go", || calls(stand_in, "aclrtResetDevice") > 0);
        made!(server, "aclrtGetCurrentContext");
        says!(server, 0, "aclrtResetDevice", 0);
    });
}
