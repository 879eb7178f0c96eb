//! Accelerators: what opening one says, and a GPU of the stand-in driver on a fabricated bus.

use super::findings;
#[cfg(feature = "cuda")]
use super::machine::GPU;
use super::machine::Machine;
use crate::support::skip;
#[cfg(feature = "cuda")]
use crate::{doubles, simulation};

/// Opening the device has the cause and the remedy.
#[test]
fn an_accelerator_that_does_not_open() {
    let machine = Machine::healthy();
    let why = if cfg!(feature = "cuda") { "could not be loaded" } else { "no support" };
    machine.gpu("1MiB").is("device", &format!("fail: cuda:0 & {why} => as the message says"));
    machine.gpu("1MiB").is("link", "ok").is("numa", "ok");
}

#[test]
fn auto_without_an_accelerator_is_a_warning() {
    if ["cuda:0", "acl:0"].iter().any(|name| pinpool::Device::open(name).is_ok()) {
        skip!("this machine's own accelerator opens");
        return;
    }
    let machine = Machine::healthy();
    let found = findings(&mut machine.doctor("auto", "1MiB"));
    found.is("device", "warn: host:0;  & cuda:0 & acl:0 => --device host");
    machine.host("1MiB").is("device", "ok");
}

/// The stand-in driver's GPU, on a fabricated bus: the speed expected of its link, and the doctor's words about it.
#[cfg(feature = "cuda")]
#[test]
fn what_a_link_should_give_on_a_gpu() {
    let Some(library) = simulation() else { return };
    let machine = Machine::healthy();
    let device = format!("/sys/devices/pci0000:64/0000:64:01.0/{GPU}");
    machine.pci(GPU, 0);
    let look = || findings(machine.doctor("cuda:0", "1MiB").env(doubles::PATH, &library));
    let link = |speed: &str, width: &str| {
        machine
            .file(&format!("{device}/current_link_speed"), &format!("{speed}\n"))
            .file(&format!("{device}/current_link_width"), &format!("{width}\n"));
    };
    let expected = |value: &serde_json::Value| value["measured"]["expected_gb_per_s"].as_f64();

    let found = look();
    found.is("link", "ok: shows no PCIe link").is("device", "ok: cuda:0 at ffff:ff:00.7");
    found.is("copy", "ok: every byte came back");
    assert_eq!(expected(&found.0), None);

    link("32.0 GT/s PCIe", "16");
    machine
        .file(&format!("{device}/max_link_speed"), "32.0 GT/s PCIe\n")
        .file(&format!("{device}/max_link_width"), "16\n");
    let found = look();
    found.is("link", "ok: 32 GT/s x16 & 55.5 GB/s");
    // 32 GT/s on 16 lanes, of 130 bits 128, of those 88%.
    assert!((expected(&found.0).unwrap() - 55.45).abs() < 0.01, "{}", found.0);

    link("32.0 GT/s PCIe", "8");
    look().is("link", "warn: 32 GT/s x8 & can do 32 GT/s x16 => bifurcation");
    link("2.5 GT/s PCIe", "16");
    let found = look();
    found.is("link", "warn: 2.5 GT/s x16 & can do 32 GT/s => aer");
    assert!((expected(&found.0).unwrap() - 3.52).abs() < 0.01, "{}", found.0);
    link("32.0 GT/s PCIe", "16");
    for (speed, width) in [("Unknown", "16"), ("32.0 GT/s PCIe", "0"), ("32.0 GT/s PCIe", "255")] {
        link(speed, width);
        look().is("link", "ok: shows no PCIe link");
    }
    // More than any processor copies: the doctor says so.
    link("64.0 GT/s PCIe", "32");
    look().is("copy", "warn: its link should give 207.7 GB/s => numa");

    // The limit of locked memory does not count what NVIDIA's driver pins.
    machine.memlock("65536");
    look().is("memlock", "warn: does not count & RDMA");
}

#[cfg(feature = "cuda")]
#[test]
fn a_device_that_fails_is_told() {
    let Some(library) = simulation() else { return };
    let machine = Machine::healthy();
    for call in ["cuStreamCreate", "cuMemAlloc_v2", "cuMemcpyHtoDAsync_v2", "cuMemHostRegister_v2"] {
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
}

/// What the first registration of a device costs, however few bytes it has, is not the speed of pinning.
#[cfg(feature = "cuda")]
#[test]
fn the_first_registrations_own_cost_is_not_the_speed_of_pinning() {
    let Some(library) = simulation() else { return };
    let machine = Machine::healthy();
    let mut command = super::doctor();
    command.args(["--device", "cuda:0", "--capacity", "64MiB", "--pin", "64MiB", "--root"]);
    command.arg(machine.root()).env(doubles::PATH, &library).env(doubles::SETUP, "first-pin 5000");
    let found = findings(&mut command);
    let speed = found.0["measured"]["pin_gb_per_s"].as_f64().unwrap();
    assert!(speed > 0.064 / 5.0, "{}", found.0);
}
