//! `pinpool bench`: its table, its object, and what it cannot measure.

use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

use serde_json::{Value, json};

#[cfg(feature = "cuda")]
use super::{doubles, simulation};
use super::{fails, keys, limit, object, pinpool, skip, stderr, stdout};

/// A bench by three threads.
fn bench(device: &str, size: &str) -> Command {
    let mut command = pinpool();
    command.args(["bench", "--threads", "3", "--json", "--device", device, "--size", size]);
    command
}

/// The table that begins so, and the object with exactly the keys that are promised, and figures.
fn measured(output: &Output, head: &str, size: u64) -> Value {
    let (text, report) = (stdout(output), object(output));
    assert!(text.starts_with(&format!("{head}, best of 5\n")), "{text}");
    // Beside each figure what memory gives as many threads: of that, copies in memory are all.
    let memory: Vec<&str> = text.lines().filter(|line| line.starts_with("copies in memory")).collect();
    assert!(memory.len() == 1 && memory[0].ends_with(" 100.0%"), "{text}");
    let all = "copier_download_gb_per_s copier_upload_gb_per_s device error memcpy_gb_per_s \
               pageable_upload_gb_per_s pinned_peak_download_gb_per_s pinned_peak_upload_gb_per_s rounds \
               size_bytes threads unpinned";
    assert_eq!(keys(&report), all);
    for (key, value) in report.as_object().unwrap() {
        assert!(!key.ends_with("gb_per_s") || value.as_f64().unwrap() > 0.0, "{key}: {value}");
    }
    let device = head.split(',').next().unwrap();
    let found = ["device", "threads", "rounds", "size_bytes"].map(|key| report[key].clone());
    assert_eq!(found, [json!(device), json!(3), json!(5), json!(size)], "{report}");
    report
}

#[test]
fn the_bench_measures_the_host_device() {
    // An eighth of 640 KiB is no size class: what is rounded up has to be in the pool's capacity.
    for (size, told, bytes) in
        [("640KiB", "640 KiB", 640 << 10), ("5MB", "4.8 MiB", 38 << 17), ("1", "128 KiB", 1 << 17)]
    {
        let output = bench("host", size).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{size}: {}", stderr(&output));
        let report = measured(&output, &format!("host:0, 3 threads, copies of {told}"), bytes);
        assert!(report["error"].is_null() && report["unpinned"].is_boolean(), "{report}");
    }
    fails(&mut bench("host", "4096TiB"), "no room to measure");
}

/// On a simulated GPU that cannot be closed: a measured figure is printed, even if closing the device then fails.
#[test]
#[cfg(feature = "cuda")]
fn the_bench_measures_a_gpu() {
    let (mut command, head) = (bench("cuda:0", "1MiB"), "cuda:0, 3 threads, copies of 1 MiB");
    if doubles::required() || doubles::is_set() {
        let output = command.output().unwrap();
        return assert!(measured(&output, head, 1 << 20)["error"].is_null());
    }
    let Some(library) = simulation() else { return };
    // CUDA_ERROR_INVALID_VALUE: the memory is leaked.
    command.env(doubles::PATH, &library).env(doubles::SETUP, "fail cuMemFree_v2 1 1 false");
    measured(&fails(&mut command, "not everything was given back"), head, 1 << 20);
}

#[test]
fn threads_that_cannot_be_had_are_no_panic() {
    // A user id of no running process here, so that the limit counts this command's threads alone.
    const NOBODY: u32 = 65_533;
    let mut failed = false;
    // Until there are enough: how many that is depends on what the command makes.
    for most in (2..200).step_by(3) {
        let mut command = bench("host", "1MiB");
        command.uid(NOBODY).gid(NOBODY);
        let output = match limit(&mut command, libc::RLIMIT_NPROC, most).output() {
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                return skip!("this user cannot be another one, or that one not come here: {error}");
            }
            output => output.unwrap(),
        };
        if output.status.success() {
            return assert!(failed, "too few were tried, too");
        }
        failed = true;
        let text = stderr(&output);
        assert!(!text.contains("panicked"), "{most}: {text}");
        assert!(output.status.code() == Some(1) && text.contains("thread"), "{most}: {text}");
    }
    panic!("no number was enough");
}
