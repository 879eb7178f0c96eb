//! The command on accelerators: on stand-ins or, where `PINPOOL_REQUIRE` names one, on the machine's own.

#![cfg(any(feature = "acl", feature = "cuda"))]

#[cfg(feature = "acl")]
use std::fs;
#[cfg(feature = "acl")]
use std::path::Path;

use serde_json::Value;

#[cfg(feature = "acl")]
use super::checkpoints::checkpoint;
use super::{Files, doubles, pinpool, simulation, stderr, stdout};

#[test]
#[cfg(feature = "cuda")]
fn files_go_to_a_gpu_and_back() {
    let files = Files::new();
    let file = files.make("model", (9 << 20) + 77);
    let mut command = pinpool();
    command.args(["load", "--device", "cuda:0", "--json", "--verify"]);
    command.args(["--capacity", "4MiB", "--chunk", "100KiB"]);
    if !doubles::required() && !doubles::is_set() {
        let Some(library) = simulation() else { return };
        command.env(doubles::PATH, &library);
    }
    let output = command.arg(&file).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!((&report["device"], &report["verified"]), (&"cuda:0".into(), &true.into()), "{report}");
}

/// `--backing` says where pinned memory comes from; without it the driver allocates where memory cannot be registered
/// (attribute 99 is 0: as on a machine in confidential-computing mode).
#[test]
#[cfg(feature = "cuda")]
fn the_backing_is_chosen_or_what_the_device_can_do() {
    let Some(library) = simulation() else { return };
    let files = Files::new();
    let file = files.make("model", (1 << 20) + 77);
    let file = file.to_str().unwrap();
    let load = ["load", "--verify", "--unpinned", "refuse", "--capacity", "8MiB", "--chunk", "1MiB", file];
    let bench = ["bench", "--size", "1MiB", "--threads", "2"];
    let doctor = ["doctor", "--capacity", "8MiB"];
    // The other commands choose as the first does: of them the case that needs a choice is enough.
    for (command, cases) in [(&load[..], 0..5), (&bench, 3..4), (&doctor, 3..4)] {
        for &(setup, backing, registers, allocates) in &[
            ("", None, true, false),
            ("", Some("registered"), true, false),
            ("", Some("host-alloc"), false, true),
            // Tried once.
            ("attribute 99 0", None, true, true),
            ("attribute 99 0", Some("host-alloc"), false, true),
        ][cases]
        {
            let report = files.path("report");
            let mut run = pinpool();
            run.args(command).args(["--device", "cuda:0"]).env(doubles::PATH, &library);
            run.env(doubles::SETUP, setup).env(doubles::ascendcl::REPORT, &report);
            run.args(backing.map(|backing| format!("--backing={backing}")));
            let output = run.output().unwrap();
            let what = format!("{command:?} {setup} {backing:?}: {}{}", stdout(&output), stderr(&output));
            // The doctor's findings on this machine do not matter here.
            assert!(output.status.success() || command[0] == "doctor", "{what}");
            let calls = std::fs::read_to_string(&report).unwrap();
            let made = |name: &str| calls.contains(&format!("call {name} "));
            let found = (made("cuMemHostRegister_v2"), made("cuMemHostAlloc"));
            assert_eq!(found, (registers, allocates), "{what}");
            std::fs::remove_file(&report).unwrap();
        }
    }
    // A backing that was chosen is not changed.
    let mut run = pinpool();
    run.args(load).args(["--device", "cuda:0", "--backing", "registered"]).env(doubles::PATH, &library);
    let output = run.env(doubles::SETUP, "attribute 99 0").output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("HostAlloc"), "{}", stderr(&output));
}

/// Runs the command on an Ascend device, over the stand-in in each of these ways, on both devices by turns; then no rule was
/// broken, nothing is left, and no call came after the device was closed. On a machine's own library only the command's own output
/// counts.
#[cfg(feature = "acl")]
fn on_npus(ways: &[doubles::npu::Way], run: impl Fn(&str, &[(&str, &Path)]), calls: &[&str]) {
    use doubles::ascendcl::{PATH, REPORT, report_of};
    use doubles::npu;

    if npu::required() {
        return run("acl:0", &[]);
    }
    let Some(library) = simulation() else { return };
    let files = Files::new();
    // The devices take turns: a way is one of the library, and not of a device.
    for (way, device) in ways.iter().zip(["acl:0", "acl:1"].into_iter().cycle()) {
        let (setup, written) = (way.setup(), files.path("report"));
        run(device, &[(PATH, &library), (REPORT, &written), (doubles::SETUP, Path::new(&setup))]);
        let report = report_of(&written).expect("the stand-in wrote what it had seen");
        let what = format!("{} on {device}: {report:?}", way.name);
        assert_eq!((&report.violations, &report.leaks), (&Vec::new(), &Vec::new()), "{what}");
        assert!(report.over, "the device is still set: {what}");
        let made = |name: &str| report.calls.iter().find(|call| call.0 == name).map_or(0, |call| call.1);
        let found = ["aclFinalize", "aclrtSetDevice", "aclrtResetDevice"].map(made);
        assert_eq!(found, [0, 1, 1], "{what}");
        assert_eq!(report.last.as_deref(), Some("aclrtResetDevice"), "a call came after it: {what}");
        let sum: u64 = calls.iter().map(|call| made(call)).sum();
        assert!(calls.is_empty() || sum > 90, "{what}");
        fs::remove_file(&written).unwrap();
    }
}

#[test]
#[cfg(feature = "acl")]
fn files_go_to_an_npu_and_back() {
    let files = Files::new();
    let file = files.make("model", (9 << 20) + 77);
    let tensors = files.path("model.safetensors");
    // Whose tensors start and end anywhere.
    fs::write(&tensors, checkpoint(&[700_000, 0, 3, 16_384, 16_384, 3_000_000, 1, 77_777])).unwrap();
    let bytes = fs::metadata(&file).unwrap().len() + 700_000 + 3 + 2 * 16_384 + 3_000_000 + 1 + 77_777;
    let run = |device: &str, environment: &[(&str, &Path)]| {
        let mut command = pinpool();
        command.args(["load", "--device", device, "--json", "--verify", "--capacity", "4MiB"]);
        command.args(["--chunk", "100KiB", "--threads", "5"]).envs(environment.iter().copied());
        let output = command.args([&file, &tensors]).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let report: Value = serde_json::from_str(stdout(&output).lines().last().unwrap()).unwrap();
        let found = (&report["device"], &report["verified"], &report["bytes"]);
        assert_eq!(found, (&device.into(), &true.into(), &bytes.into()), "{report}");
        assert_eq!(
            (&report["pool"]["unpinned_bytes"], &report["pool"]["quarantined_bytes"]),
            (&0.into(), &0.into())
        );
    };
    on_npus(&doubles::npu::WAYS, run, &["aclrtMemcpyAsync", "aclrtMemcpy"]);
}

/// The other commands that open a device close it, too.
#[test]
#[cfg(feature = "acl")]
fn every_command_leaves_an_npu_in_order() {
    for command in [
        &["bench", "--size", "1MiB", "--threads", "2", "--device"][..],
        &["doctor", "--capacity", "4MiB", "--device"],
        // Refused after the device was opened.
        &["load", "--capacity", "4KiB", "--chunk", "1MiB", "--device"],
    ] {
        let run = |device: &str, environment: &[(&str, &Path)]| {
            let output =
                pinpool().args(command).arg(device).envs(environment.iter().copied()).output().unwrap();
            // The doctor's findings on this machine, and what is refused, do not matter here.
            assert!(output.status.code().is_some_and(|code| code < 3), "{command:?}: {}", stderr(&output));
            assert!(command[0] != "bench" || output.status.success(), "{}", stderr(&output));
        };
        on_npus(&[doubles::npu::ON_DEVICE, doubles::npu::OF_2024], run, &[]);
    }
}
