//! The command on accelerators: on stand-ins or, where `PINPOOL_REQUIRE` names one, on the machine's own.

#![cfg(any(feature = "acl", feature = "cuda"))]

use super::checkpoints::checkpoint;
use super::{Folder, doubles, pinpool, report, simulation, stderr, stdout};

/// Tensors that start and end anywhere.
const LENS: [usize; 8] = [700_000, 0, 3, 16_384, 16_384, 3_000_000, 1, 77_777];

/// `--backing` says where pinned memory comes from; without it the driver allocates where memory cannot be registered
/// (attribute 99 is 0: as on a machine in confidential-computing mode).
#[test]
#[cfg(feature = "cuda")]
fn the_backing_is_chosen_or_what_the_device_can_do() {
    let Some(library) = simulation() else { return };
    let files = Folder::new();
    let file = files.make("model", (1 << 20) + 77);
    let load = ["load", "--verify", "--unpinned", "refuse", "--capacity", "8MiB", file.to_str().unwrap()];
    let bench = ["bench", "--size", "1MiB", "--threads", "2"];
    let doctor = ["doctor", "--capacity", "8MiB"];
    for (command, setup, backing, registers, allocates) in [
        (&load[..], "", "", true, false),
        (&load, "", "--backing=host-alloc", false, true),
        (&load, "attribute 99 0", "--backing=host-alloc", false, true),
        // Registering is tried once; the other commands choose as this one does. A backing that was chosen is
        // not changed.
        (&load, "attribute 99 0", "", true, true),
        (&bench, "attribute 99 0", "", true, true),
        (&doctor, "attribute 99 0", "", true, true),
        (&load, "attribute 99 0", "--backing=registered", true, false),
    ] {
        let report = files.path().join("report");
        let mut run = pinpool();
        run.args(command).args(["--device", "cuda:0"]).args((!backing.is_empty()).then_some(backing));
        run.env(doubles::PATH, &library).env(doubles::SETUP, setup).env(doubles::npu::REPORT, &report);
        let output = run.output().unwrap();
        let what = format!("{command:?} {setup} {backing}: {}{}", stdout(&output), stderr(&output));
        let is_refused = registers && !allocates && !setup.is_empty();
        // The doctor's findings on this machine do not matter here.
        assert!(output.status.success() != is_refused || command[0] == "doctor", "{what}");
        assert!(!is_refused || stderr(&output).contains("HostAlloc"), "{what}");
        let calls = std::fs::read_to_string(&report).unwrap();
        let made = |name: &str| calls.contains(&format!("call {name} "));
        assert_eq!((made("cuMemHostRegister_v2"), made("cuMemHostAlloc")), (registers, allocates), "{what}");
    }
}

/// Each command that opens a device, on an Ascend device over the stand-in: no rule was broken, nothing is
/// left, and no call came after the device was closed. On a machine's own library only the command's own
/// output counts.
#[test]
#[cfg(feature = "acl")]
fn every_command_leaves_an_npu_in_order() {
    use doubles::npu::{self, PATH, REPORT, report_of};

    let files = Folder::new();
    let file = files.make("model", (9 << 20) + 77);
    let tensors = files.put("model.safetensors", checkpoint(&LENS));
    let bytes = (9 << 20) + 77 + LENS.iter().sum::<usize>();
    let (file, tensors) = (file.to_str().unwrap(), tensors.to_str().unwrap());
    let load = ["load", "--json", "--verify", "--capacity", "4MiB", "--chunk", "100KiB", file, tensors];
    for command in [
        &load[..],
        &["bench", "--size", "1MiB", "--threads", "2"],
        &["doctor", "--capacity", "4MiB"],
        // Refused after the device was opened.
        &["load", "--capacity", "4KiB", "--chunk", "1MiB"],
    ] {
        for (way, device) in [(npu::TODAY, "acl:0"), (npu::ON_DEVICE, "acl:1")] {
            let device = if npu::required() { "acl:0" } else { device };
            let (written, mut run) = (files.path().join("report"), pinpool());
            run.args(command).args(["--device", device]);
            if !npu::required() {
                let Some(library) = simulation() else { return };
                run.env(PATH, library).env(REPORT, &written).env(doubles::SETUP, way.setup());
            }
            let output = run.output().unwrap();
            let what = format!("{command:?} {} on {device}: {}", way.name, stderr(&output));
            if command == load {
                assert!(output.status.success(), "{what}");
                let report = report(&output);
                let found = (&report["device"], &report["verified"], &report["bytes"]);
                assert_eq!(found, (&device.into(), &true.into(), &bytes.into()), "{what}");
                assert_eq!(report["pool"]["unpinned_bytes"], 0, "{what}");
            }
            // The doctor's findings on this machine, and what is refused, do not matter here.
            assert!(output.status.code().is_some_and(|code| code < 3), "{what}");
            assert!(command[0] != "bench" || output.status.success(), "{what}");
            if npu::required() {
                break;
            }
            let report = report_of(&written).expect("the stand-in wrote what it had seen");
            println!("{what}");
            report.no_trace();
            let made = |name: &str| report.calls.iter().find(|call| call.0 == name).map_or(0, |call| call.1);
            let found = ["aclrtSetDevice", "aclrtResetDevice"].map(made);
            assert_eq!((found, report.last.as_deref()), ([1, 1], Some("aclrtResetDevice")), "{what}");
            assert!(command != load || made("aclrtMemcpyAsync") + made("aclrtMemcpy") > 90, "{what}");
        }
    }
}
