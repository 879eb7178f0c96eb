//! Accelerators: what opening one says, and a GPU of the stand-in driver on a fabricated bus.

use super::*;

/// Opening the device has the cause and the remedy.
#[test]
fn a_device_that_does_not_open() {
    let machine = Machine::healthy();
    let why = if cfg!(feature = "cuda") { "could not be loaded" } else { "no support" };
    let found = machine.gpu("1MiB");
    found.is("device", &format!("fail: cuda:0 & {why} => as the message says"));
    found.is("link", "ok").is("numa", "ok").is("copy", "warn: not tried");
    assert!(found.0["measured"]["upload_gb_per_s"].is_null());
    let found = findings(&mut machine.doctor("host:99", "1MiB"));
    found.is("device", "fail: host:99").is("pin", "warn: not tried");
    if ["cuda:0", "acl:0"].iter().any(|name| pinpool::Device::open(name).is_ok()) {
        return skip!("in part: this machine's own accelerator opens");
    }
    let found = findings(&mut machine.doctor("auto", "1MiB"));
    found.is("device", "warn: host:0;  & cuda:0 & acl:0 => --device host");
}

/// The stand-in driver's GPU, on a fabricated bus: the speed expected of its link, and the doctor's words about it.
#[cfg(feature = "cuda")]
#[test]
fn what_a_link_should_give_on_a_gpu() {
    let Some(library) = simulation() else { return };
    let machine = Machine::healthy();
    machine.pci(0);
    let look = || findings(machine.doctor("cuda:0", "1MiB").env(doubles::PATH, &library));
    let found = look();
    found.is("link", "ok: shows no PCIe link").is("device", "ok: cuda:0 at ffff:ff:00.7");
    found.is("copy", "ok: every byte came back");
    let link = |which: &str, speed: &str, width: &str| {
        machine.file(&format!("{BUS}/{GPU}/{which}_link_speed"), &format!("{speed}\n"));
        machine.file(&format!("{BUS}/{GPU}/{which}_link_width"), &format!("{width}\n"));
    };
    link("max", "32.0 GT/s PCIe", "16");
    for (speed, width, told, expected) in [
        // 32 GT/s on 16 lanes, of 130 bits 128, of those 88%.
        ("32.0 GT/s PCIe", "16", "ok: 32 GT/s x16 & 55.5 GB/s", Some(55.45)),
        ("32.0 GT/s PCIe", "8", "warn: 32 GT/s x8 & can do 32 GT/s x16 => bifurcation", Some(27.73)),
        ("Unknown", "16", "ok: shows no PCIe link", None),
        ("64.0 GT/s PCIe", "32", "ok: 64 GT/s x32", Some(207.7)),
    ] {
        link("current", speed, width);
        let found = look();
        found.is("link", told);
        let gives = found.0["measured"]["expected_gb_per_s"].as_f64();
        assert_eq!(gives.map(|gives| gives.round()), expected.map(f64::round), "{}", found.0);
    }
    // The last is more than any processor copies, and the doctor says so. The limit of locked memory does not
    // count what NVIDIA's driver pins.
    machine.memlock("65536");
    look()
        .is("copy", "warn: its link should give 207.7 GB/s => numa")
        .is("memlock", "warn: does not count & RDMA");
}

#[cfg(feature = "cuda")]
#[test]
fn a_device_that_fails_is_told() {
    let Some(library) = simulation() else { return };
    let machine = Machine::healthy();
    for call in
        ["cuStreamCreateWithPriority", "cuMemAlloc_v2", "cuMemcpyHtoDAsync_v2", "cuMemHostRegister_v2"]
    {
        let mut command = machine.doctor("cuda:0", "1MiB");
        // CUDA_ERROR_ILLEGAL_ADDRESS, after which the device is lost.
        command.env(doubles::PATH, &library).env(doubles::SETUP, format!("fail {call} 1 700 false"));
        let found = findings(&mut command);
        let checks = found.0["checks"].as_array().unwrap();
        let failed: Vec<_> = checks.iter().filter(|check| check["status"] == "fail").collect();
        let name = if call == "cuMemHostRegister_v2" { "pin" } else { "copy" };
        assert!(failed.len() == 1 && failed[0]["name"] == name, "{call}: {failed:?}");
        assert!(failed[0]["found"].as_str().unwrap().contains(call.trim_end_matches("_v2")), "{failed:?}");
    }
    // What the first registration of a device costs, however few bytes it has, is not the speed of pinning.
    let mut command = machine.trial("cuda:0", "16MiB", "16MiB");
    command.env(doubles::PATH, &library).env(doubles::SETUP, "first-pin 1000");
    let found = findings(&mut command);
    assert!(found.0["measured"]["pin_gb_per_s"].as_f64().unwrap() > 0.016, "{}", found.0);
}
