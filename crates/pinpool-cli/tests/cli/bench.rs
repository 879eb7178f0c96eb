//! `pinpool bench`: its table, its object, and what it cannot measure.

use std::os::unix::process::CommandExt;

use serde_json::Value;

#[cfg(feature = "cuda")]
use super::{doubles, simulation};
use super::{fails, keys, limit, pinpool, refuses, skip, stderr, stdout};

/// `pinpool bench`: its table, and the object on its last line.
fn bench(args: &[&str], device: &str) -> (String, Value) {
    let mut command = pinpool();
    command.args(["bench", "--json", "--device", device, "--size", "8MiB"]).args(args);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    let report: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    is_bench(&report);
    assert_eq!((&report["size_bytes"], &report["error"]), (&(8 << 20).into(), &Value::Null));
    (text, report)
}

/// The object has exactly the keys that are promised, and figures.
fn is_bench(report: &Value) {
    let all = "copier_download_gb_per_s copier_upload_gb_per_s device error memcpy_gb_per_s \
               pageable_upload_gb_per_s pinned_peak_download_gb_per_s pinned_peak_upload_gb_per_s rounds \
               size_bytes threads unpinned";
    assert_eq!(keys(report), all);
    for (key, value) in report.as_object().unwrap() {
        if key.ends_with("gb_per_s") {
            assert!(value.as_f64().unwrap() > 0.0, "{key}: {value}");
        }
    }
    assert!(report["unpinned"].is_boolean() && report["rounds"] == 5, "{report}");
}

#[test]
fn the_bench_measures_the_host_device() {
    let (text, report) = bench(&["--threads", "3"], "host");
    assert_eq!((&report["device"], &report["threads"]), (&"host:0".into(), &3.into()));
    assert!(text.starts_with("host:0, 3 threads, copies of 8 MiB, best of 5\n"), "{text}");
    assert!(text.contains("copier, from the device") && text.contains('%'), "{text}");
    // Beside each figure what memory gives as many threads: of that, copies in memory are all.
    let memory: Vec<&str> = text.lines().filter(|line| line.starts_with("copies in memory")).collect();
    assert!(
        text.contains("of copies in memory") && memory.len() == 1 && memory[0].ends_with(" 100.0%"),
        "{text}"
    );

    let output = pinpool().args(["bench", "--device", "host", "--size", "1MiB"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(!stdout(&output).contains('{'), "no JSON unless asked for");
    refuses(pinpool().args(["bench", "--device", "host", "--size", "x"]), "--size");
    refuses(pinpool().args(["bench", "--device", "nothing"]), "unknown device");
    fails(pinpool().args(["bench", "--device", "host", "--size", "4096TiB"]), "no room to measure");
}

/// On a simulated GPU that cannot be closed: a measured figure is printed, even if closing the device then fails.
#[test]
#[cfg(feature = "cuda")]
fn the_bench_measures_a_gpu() {
    if doubles::required() || doubles::is_set() {
        let (_, report) = bench(&["--threads", "2"], "cuda:0");
        return assert_eq!((&report["device"], &report["threads"]), (&"cuda:0".into(), &2.into()));
    }
    let Some(library) = simulation() else { return };
    let mut command = pinpool();
    command.args(["bench", "--json", "--device", "cuda:0", "--size", "1MiB", "--threads", "2"]);
    // CUDA_ERROR_INVALID_VALUE: the memory is leaked.
    let command = command.env(doubles::PATH, &library).env(doubles::SETUP, "fail cuMemFree_v2 1 1 false");
    let output = fails(command, "not everything was given back");
    let text = stdout(&output);
    assert!(text.starts_with("cuda:0, 2 threads, copies of 1 MiB, best of 5\n"), "{text}");
    let report: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    is_bench(&report);
    assert_eq!((&report["device"], &report["threads"]), (&"cuda:0".into(), &2.into()));
}

/// Sizes whose eighth is no size class: what is rounded up has to be in the pool's capacity.
#[test]
fn the_bench_takes_any_size() {
    // An eighth of 5 pieces of 16 KiB, and others.
    for (size, told) in [("640KiB", "640 KiB"), ("5MB", "4.8 MiB"), ("1", "128 KiB")] {
        let mut command = pinpool();
        command.args(["bench", "--device", "host", "--threads", "2", "--size", size]);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{size}: {}", stderr(&output));
        let text = stdout(&output);
        assert!(text.starts_with(&format!("host:0, 2 threads, copies of {told}, best of 5\n")), "{text}");
        assert!(!text.contains("memory is small"), "nothing is: {text}");
    }
}

#[test]
fn threads_that_cannot_be_had_are_no_panic() {
    // A user id of no running process here, so that the limit counts this command's threads alone.
    const NOBODY: u32 = 65_533;
    let mut codes = Vec::new();
    // Until there are enough: how many that is depends on what the command makes.
    for most in (2..200).step_by(3) {
        let mut command = pinpool();
        command.args(["bench", "--device", "host", "--threads", "8", "--size", "1MiB"]);
        command.uid(NOBODY).gid(NOBODY);
        limit(&mut command, libc::RLIMIT_NPROC, most);
        match command.output() {
            Ok(output) => {
                let text = stderr(&output);
                assert!(!text.contains("panicked"), "{most}: {text}");
                codes.push(output.status.code());
                if output.status.success() {
                    break;
                }
                assert!(output.status.code() == Some(1) && text.contains("thread"), "{most}: {text}");
            }
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                skip!("this user cannot be another one, or that one not come here: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        }
    }
    // Both too few and enough were tried.
    assert!(codes.first() == Some(&Some(1)) && codes.last() == Some(&Some(0)), "{codes:?}");
}
