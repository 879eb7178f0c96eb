//! Finding the library.

use super::*;

#[test]
fn a_library_is_found_in_the_toolkits_home() {
    const TEST: &str = "opening::a_library_is_found_in_the_toolkits_home";
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
