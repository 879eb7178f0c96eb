//! Finding the library, and the errors where that fails.

use super::*;

const PART: &str = "PINPOOL_TEST_PART";

/// Runs a part of a test in a process of its own, with an environment; `true` in that process.
fn part(test: &str, part: &str, environment: &[(&str, &str)]) -> bool {
    if let Ok(now) = std::env::var(PART) {
        return now == part;
    }
    doubles::passes(test, &[&[(PART, part)], environment].concat(), HANG);
    false
}

/// Why a device cannot be opened, in these words among others.
fn says(name: &str, words: &[&str]) {
    match Device::open(name) {
        Err(Error::Unavailable { device, why }) if device == name => {
            assert!(words.iter().all(|word| why.contains(word)), "{words:?} are not in: {why}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_library_is_found_or_named() {
    let test = "opening::a_library_is_found_or_named";
    let Some(library) = simulation() else { return };
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(home.path().join("lib64")).unwrap();
    std::fs::copy(library, home.path().join("lib64/libascendcl.so")).unwrap();
    if part(test, "home", &[("ASCEND_TOOLKIT_HOME", home.path().to_str().unwrap()), (PATH, "")]) {
        assert_eq!(Device::open("acl").unwrap().name(), "acl:0");
    }
    if part(test, "another", &[(PATH, "libm.so.6")]) {
        says("acl:0", &["libm.so.6 lacks aclInit"]);
    }
    let homes = [("ASCEND_TOOLKIT_HOME", "/nowhere/toolkit"), ("ASCEND_HOME_PATH", ""), (PATH, "")];
    // Unless this machine has one.
    if part(test, "nowhere", &homes) && Device::open("acl:0").is_err() {
        let places =
            ["/nowhere/toolkit/lib64/libascendcl.so", "/usr/local/Ascend/", "libascendcl.so could", PATH];
        says("acl:0", &places);
    }
}

#[test]
fn devices_that_are_not_there_are_named() {
    let test = "opening::devices_that_are_not_there_are_named";
    let Some(library) = simulation() else { return };
    let with = |setup| [(PATH, &*library), (SETUP, setup), (doubles::PATH, "/nowhere")];
    if part(test, "none", &with("devices 0 0")) {
        says("acl:0", &["ASCEND_RT_VISIBLE_DEVICES"]);
        // Going on without a device is a line in the log, not an error.
        assert_eq!(Device::open("auto").unwrap().name(), "host:0");
    }
    if part(test, "two", &with("")) {
        says("acl:2", &["there are acl:0 to acl:1"]);
        says("acl:4000000000", &["acl:1"]);
        says("acl:x", &["acl:N"]);
        // The first of the kinds that there are.
        let device = Device::open("auto").unwrap();
        assert_eq!(device.name(), "acl:0");
        // Open already: the same.
        let stream = open(0).stream().unwrap();
        assert!(device.stream().unwrap().wait_for(&stream).is_ok());
    }
    if part(test, "taken", &with("fail aclrtSetDevice 1 507033 false")) {
        // The first device is busy, so the second is taken in its place.
        assert_eq!(Device::open("auto").unwrap().name(), "acl:1");
    }
}
