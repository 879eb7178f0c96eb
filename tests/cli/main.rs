//! The `pinpool` command as its users meet it: the built binary, its output and its exit status.
//!
//! Everything runs on the host device, which is always there; once on a GPU, and once on an Ascend device, of the
//! stand-in driver or, where `PINPOOL_REQUIRE` names one, of the machine's own. What needs hundreds of megabytes runs
//! only with `PINPOOL_FULL=1`.

#![cfg(all(feature = "cli", target_os = "linux"))]
#![allow(unsafe_code)]

mod doctor;
mod hostile;
#[path = "../support/mod.rs"]
mod support;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;
#[cfg(any(feature = "acl", feature = "cuda"))]
use support::doubles;
use support::skip;

fn pinpool() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinpool"));
    command.stdin(Stdio::null());
    command
}

/// `pinpool load --device host`, and so on.
fn load<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = pinpool();
    command.args(["load", "--device", "host"]).args(args);
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The JSON object on the last line, with exactly the keys that are promised, and the pool's sums right.
fn report(output: &Output) -> Value {
    let text = stdout(output);
    let report: Value = serde_json::from_str(text.lines().last().expect("a last line")).unwrap();
    let keys = |v: &Value| {
        let mut keys: Vec<String> = v.as_object().unwrap().keys().cloned().collect();
        keys.sort();
        keys
    };
    assert_eq!(
        keys(&report),
        ["bytes", "device", "download_gb_per_s", "pool", "upload_gb_per_s", "verified"]
    );
    assert_eq!(
        keys(&report["pool"]),
        [
            "checked_out_bytes",
            "checkouts",
            "cut_bytes",
            "free_bytes",
            "in_flight_bytes",
            "pinned_bytes",
            "quarantined_bytes",
            "unpinned_bytes",
            "waits"
        ]
    );
    let pool = |key: &str| report["pool"][key].as_u64().unwrap();
    let parts =
        ["free_bytes", "checked_out_bytes", "in_flight_bytes", "quarantined_bytes", "cut_bytes"].map(pool);
    assert_eq!(parts.iter().sum::<u64>(), pool("pinned_bytes") + pool("unpinned_bytes"), "{report}");
    assert_eq!(parts[1..4], [0, 0, 0], "everything is back: {report}");
    report
}

/// Success: the report, with the pool within its capacity.
fn succeeds(command: &mut Command, capacity: u64) -> Value {
    let output = command.arg("--json").arg("--capacity").arg(capacity.to_string()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{command:?}: {}", stderr(&output));
    let report = report(&output);
    let held =
        report["pool"]["pinned_bytes"].as_u64().unwrap() + report["pool"]["unpinned_bytes"].as_u64().unwrap();
    assert!(held > 0 && held <= capacity, "{held} of {capacity}");
    report
}

/// A refusal: exit status 2, one line that names the cause, nothing on stdout.
fn refuses(command: &mut Command, cause: &str) {
    let output = command.output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{command:?}: {text}");
    assert_eq!(text.lines().count(), 1, "{command:?}: {text}");
    assert!(text.contains(cause), "{command:?} should name {cause:?}: {text}");
    assert_eq!(stdout(&output), "", "{command:?}");
}

/// A failure: exit status 1, and a last line on stderr that names the cause.
fn fails(command: &mut Command, cause: &str) -> Output {
    let output = command.output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{command:?}: {text}");
    let line = text.lines().find(|l| l.starts_with("error: ")).unwrap_or_default();
    assert!(line.contains(cause), "{command:?} should name {cause:?}: {text}");
    output
}

struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A file of bytes that do not repeat.
    fn make(&self, name: &str, len: usize) -> PathBuf {
        let path = self.path(name);
        let mut state = len as u64 | 1;
        let mut bytes = vec![0; len.min(1 << 20)];
        let mut file = File::create(&path).unwrap();
        let mut left = len;
        while left > 0 {
            for byte in &mut bytes {
                // A linear congruential generator with the constants of Knuth's MMIX; the upper bits are the good ones.
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                *byte = (state >> 56) as u8;
            }
            let part = left.min(bytes.len());
            file.write_all(&bytes[..part]).unwrap();
            left -= part;
        }
        path
    }
}

#[test]
fn a_file_goes_up_and_back() {
    let files = Files::new();
    let file = files.make("model.bin", 5_000_003);
    let report = succeeds(load([&file]).args(["--verify", "--chunk", "256KiB"]), 8 << 20);
    assert_eq!(report["device"], "host:0");
    assert_eq!(report["bytes"], 5_000_003);
    assert_eq!(report["verified"], true);
    assert!(report["upload_gb_per_s"].as_f64().unwrap() > 0.0);
    assert!(report["download_gb_per_s"].as_f64().unwrap() > 0.0);
    // 20 chunks up and as many back, in segments that the pipeline keeps while a file is on its way.
    let checkouts = report["pool"]["checkouts"].as_u64().unwrap();
    assert!((1..=40).contains(&checkouts), "{report}");
}

#[test]
fn what_was_not_measured_is_null() {
    let files = Files::new();
    let file = files.make("model.bin", 100_000);
    let report = succeeds(&mut load([&file]), 8 << 20);
    assert_eq!(report["bytes"], 100_000);
    assert!(report["upload_gb_per_s"].is_f64());
    assert!(report["download_gb_per_s"].is_null() && report["verified"].is_null(), "{report}");
    assert_eq!(report["pool"]["checkouts"], 1);
}

#[test]
fn an_empty_file_is_fine() {
    let files = Files::new();
    let file = files.make("empty", 0);
    let report = succeeds(load([&file]).arg("--verify"), 8 << 20);
    assert_eq!((&report["bytes"], &report["verified"]), (&0.into(), &true.into()));
    assert!(report["upload_gb_per_s"].is_null() && report["download_gb_per_s"].is_null(), "{report}");
    assert_eq!(report["pool"]["checkouts"], 0);
}

#[test]
fn several_files_and_any_sizes() {
    let files = Files::new();
    let sizes = [1, 4095, 4096, 4097, 0, 65_536, 65_537, 1_048_577, 3 * 65_536];
    let paths: Vec<PathBuf> =
        sizes.iter().enumerate().map(|(i, &len)| files.make(&format!("{i}"), len)).collect();
    for chunk in ["64KiB", "1000B", "65537"] {
        for threads in ["1", "3"] {
            let command = &mut load(&paths);
            let report =
                succeeds(command.args(["--verify", "--chunk", chunk, "--threads", threads]), 2 << 20);
            assert_eq!(report["bytes"], sizes.iter().sum::<usize>());
            assert_eq!(report["verified"], true);
        }
    }
}

#[test]
fn a_pool_of_one_chunk_is_enough_for_many_threads() {
    let files = Files::new();
    let file = files.make("model.bin", 1_234_567);
    // SAFETY: sysconf only reads a value.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    // The last two are the stride of a class in between, and one with a run of its own. (The pipeline needs five
    // pages.)
    for (chunk, segment) in
        [(16_384, 16_384 + 64u64), (65_536, 65_536 + 64), (100_000, 106_560), (5 << 20, (5 << 20) + 32)]
    {
        let capacity = segment.next_multiple_of(page);
        let chunk = chunk.to_string();
        let report =
            succeeds(load([&file]).args(["--verify", "--chunk", &chunk, "--threads", "6"]), capacity);
        assert_eq!((&report["bytes"], &report["verified"]), (&1_234_567.into(), &true.into()));
        // A page less than that is refused.
        let less = (capacity - page).max(1).to_string();
        refuses(load([&file]).args(["--chunk", &chunk, "--capacity", &less]), "capacity");
    }
}

#[test]
fn a_chunk_larger_than_the_file_and_than_the_largest_class() {
    let files = Files::new();
    let file = files.make("model.bin", 20_000_000);
    for chunk in ["6MiB", "12MiB", "16MiB", "30MiB"] {
        let report = succeeds(load([&file]).args(["--verify", "--chunk", chunk, "--threads", "2"]), 40 << 20);
        assert_eq!((&report["bytes"], &report["verified"]), (&20_000_000.into(), &true.into()));
    }
}

#[test]
fn text_for_people() {
    let files = Files::new();
    let file = files.make("model.bin", 100_000);
    let output = load([&file]).args(["--verify", "--capacity", "8MiB"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let text = stdout(&output);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(
        lines[0].contains("model.bin: 100.00 kB to host:0 at ") && lines[0].ends_with("all checksums equal")
    );
    assert!(lines[1].starts_with("pool: "), "{text}");
    // No terminal, no progress bar; at most the one warning that memory is not pinned.
    assert!(stderr(&output).lines().all(|l| l.starts_with("warning: ")), "{}", stderr(&output));

    let help = pinpool().arg("--help").output().unwrap();
    assert_eq!(help.status.code(), Some(0));
    assert!(stdout(&help).contains("load") && stdout(&help).contains("Exit status"));
    let help = pinpool().args(["load", "--help"]).output().unwrap();
    for option in
        ["--device", "--capacity", "--chunk", "--threads", "--unpinned", "--verify", "--json", "[FILE]"]
    {
        assert!(stdout(&help).contains(option), "{option}");
    }
    let version = pinpool().arg("--version").output().unwrap();
    assert_eq!(stdout(&version).trim(), concat!("pinpool ", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_sample_is_made_and_removed() {
    let files = Files::new();
    let left = || fs::read_dir(files.0.path()).unwrap().count();
    let command = &mut load(["--sample", "3000001", "--verify"]);
    let report = succeeds(command.env("TMPDIR", files.0.path()), 8 << 20);
    assert_eq!((&report["bytes"], &report["verified"]), (&3_000_001.into(), &true.into()));
    assert_eq!(left(), 0);

    // Nor does one stay behind when the command is killed in the middle, at whatever time.
    for wait in [1, 30, 100] {
        let command = &mut load(["--sample", "1GiB"]);
        let mut child = command.env("TMPDIR", files.0.path()).stdout(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(wait));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(left(), 0);
    }
    fails(load(["--sample", "1MiB"]).env("TMPDIR", files.path("nowhere")), "nowhere");
    refuses(load(["--sample", "1MiB", "file"]).env("TMPDIR", files.0.path()), "--sample");
}

#[test]
fn what_cannot_be_obeyed_is_refused() {
    let files = Files::new();
    let file = &files.make("model.bin", 10_000);
    let missing = &files.path("missing");
    refuses(&mut load([missing]), "missing: No such file");
    refuses(&mut load([file, missing]), "missing: No such file");
    let neither = "neither model.safetensors.index.json nor a file that ends in .safetensors";
    refuses(&mut load([files.0.path()]), neither);
    refuses(&mut load([Path::new("/dev/null")]), "not a regular file");
    for size in ["", "x", "64M", "12QiB", "-5", "1.5MiB", "0", "99999999999999999999"] {
        refuses(load([file]).arg(format!("--chunk={size}")), "--chunk");
        refuses(load([file]).arg(format!("--capacity={size}")), "--capacity");
    }
    for threads in ["0", "-1", "many", "1000000"] {
        refuses(load([file]).arg(format!("--threads={threads}")), "--threads");
    }
    refuses(load([file]).args(["--capacity", "1MiB"]), "below one segment");
    refuses(load([file]).args(["--capacity", "100", "--chunk", "10"]), "capacity of 100 bytes");
    refuses(load([file]).args(["--capacity", "1TiB", "--chunk", "100TiB"]), "below one segment");
    refuses(load([file]).args(["--unpinned", "maybe"]), "--unpinned");
    refuses(load([file]).arg("--fast"), "--fast");
    for (device, cause) in [
        ("gpu", "unknown device"),
        ("host:99", "host:99"),
        ("cuda:99", "cuda:99"),
        ("acl:0", "acl"),
        ("", "unknown device"),
    ] {
        let command = &mut pinpool();
        refuses(command.args(["load", "--device", device]).arg(file), cause);
    }
    // Without any command the whole help is printed, and it is an error all the same.
    assert_eq!(pinpool().output().unwrap().status.code(), Some(2));
}

#[test]
#[cfg(feature = "cuda")]
fn files_go_to_a_gpu_and_back() {
    let files = Files::new();
    let file = files.make("model", (9 << 20) + 77);
    let mut command = pinpool();
    command.args([
        "load",
        "--device",
        "cuda:0",
        "--json",
        "--verify",
        "--capacity",
        "4MiB",
        "--chunk",
        "100KiB",
    ]);
    if !doubles::required() && !doubles::is_set() {
        let Some(library) = doubles::library() else {
            skip!("there is no cargo to build the stand-in libcuda with");
            return;
        };
        command.env(doubles::PATH, &library);
    }
    let output = command.arg(&file).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!((&report["device"], &report["verified"]), (&"cuda:0".into(), &true.into()), "{report}");
}

/// Runs the command on both Ascend devices, over the stand-in in each of these ways; then no rule was broken, nothing
/// is left, and no call came after the device was closed. On a machine's own library only the command's own output
/// counts.
#[cfg(feature = "acl")]
fn on_npus(ways: &[doubles::npu::Way], run: impl Fn(&str, &[(&str, &Path)]), calls: &[&str]) {
    use doubles::ascendcl::{PATH, REPORT, report_of};
    use doubles::npu;

    if npu::required() {
        return run("acl:0", &[]);
    }
    let files = Files::new();
    for way in ways {
        let Some(library) = way.library() else {
            skip!("there is no cargo to build the stand-in libascendcl with");
            return;
        };
        for device in ["acl:0", "acl:1"] {
            let written = files.path("report");
            let mut environment = vec![(PATH, &*library), (REPORT, &*written)];
            environment.extend(way.environment.iter().map(|(name, value)| (*name, Path::new(value))));
            run(device, &environment);
            let report = report_of(&written).expect("the stand-in wrote what it had seen");
            let what = format!("{} on {device}: {report:?}", way.name);
            assert_eq!(report.violations, Vec::<String>::new(), "{what}");
            assert_eq!(report.leaks, Vec::<String>::new(), "{what}");
            assert!(report.over, "the device is still set: {what}");
            let made = |name: &str| report.calls.iter().find(|call| call.0 == name).map_or(0, |call| call.1);
            assert_eq!(
                (made("aclFinalize"), made("aclrtSetDevice"), made("aclrtResetDevice")),
                (0, 1, 1),
                "{what}"
            );
            assert_eq!(report.last.as_deref(), Some("aclrtResetDevice"), "a call came after it: {what}");
            let sum: u64 = calls.iter().map(|call| made(call)).sum();
            assert!(calls.is_empty() || sum > 90, "{what}");
            fs::remove_file(&written).unwrap();
        }
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
        on_npus(&[doubles::npu::ON_DEVICE, doubles::npu::LATE_2022], run, &[]);
    }
}

#[test]
fn a_device_without_room_is_a_failure() {
    let files = Files::new();
    let path = files.path("large");
    let file = File::create(&path).unwrap();
    // Nothing but a hole. If the file system does not take it, a smaller one that no memory holds either.
    if [8u64 << 40, 2 << 40].iter().all(|&len| file.set_len(len).is_err()) {
        skip!("this file system has no files of 2 TiB");
        return;
    }
    let output = fails(load([&path]).args(["--capacity", "8MiB", "--json"]), "no room");
    let report = report(&output);
    assert_eq!(report["bytes"], 0);
    assert!(report["upload_gb_per_s"].is_null() && report["verified"].is_null());
}

/// A device that is there and fails is no fault of the command line, and neither is a file that cannot be read.
#[test]
fn what_fails_is_told_from_what_cannot_be_obeyed() {
    let files = Files::new();
    // Its first byte cannot be read, by any process.
    let index = files.path("m.safetensors.index.json");
    std::os::unix::fs::symlink("/proc/self/mem", &index).unwrap();
    fails(&mut load([&index]), "cannot be read at offset 0");
    refuses(&mut load([&files.path(&"long".repeat(1000))]), "File name too long");
    refuses(&mut load([&files.path("missing.safetensors")]), "No such file");

    #[cfg(feature = "cuda")]
    if !doubles::required() && !doubles::is_set() {
        let Some(library) = doubles::library() else {
            skip!("in part: there is no cargo to build the stand-in libcuda with");
            return;
        };
        let file = files.make("model.bin", 1000);
        let commands = [vec!["bench"], vec!["load", file.to_str().unwrap()]];
        for command in commands {
            let with = |device: &str| {
                let mut all = pinpool();
                all.args(&command).args(["--device", device]).env(doubles::PATH, &library);
                all
            };
            // CUDA_ERROR_OUT_OF_MEMORY.
            let fault = "cuDevicePrimaryCtxRetain:1:2";
            fails(with("cuda:0").env("PINPOOL_STANDIN_FAIL", fault), "cuDevicePrimaryCtxRetain");
            refuses(&mut with("cuda:9"), "cuda:9");
        }
    }
}

#[test]
fn a_file_that_is_shorter_than_it_says_is_a_failure() {
    // Such a file is always there: the kernel says a page, and has a line.
    let path = Path::new("/sys/devices/system/cpu/online");
    let Ok(metadata) = fs::metadata(path) else {
        skip!("no {}", path.display());
        return;
    };
    let len = fs::read(path).unwrap().len();
    assert!((len as u64) < metadata.len());
    fails(
        load([path]).args(["--capacity", "8MiB"]),
        &format!("ends at byte {len}, not at {}", metadata.len()),
    );
}

#[test]
fn a_file_that_changes_under_the_command_is_a_mismatch() {
    let files = Files::new();
    let path = files.make("changing", 48 << 20);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut count = 0u64;
            while !done.load(Ordering::Relaxed) {
                count += 1;
                file.write_all_at(&count.to_le_bytes(), 1 << 20).unwrap();
            }
        });
        // Between its two looks at that place the command moves 48 MB, and the number hardly ever stays the same.
        let output = (0..20)
            .map(|_| load([&path]).args(["--verify", "--json", "--chunk", "1MiB"]).output().unwrap())
            .find(|output| output.status.code() != Some(0));
        done.store(true, Ordering::Relaxed);
        let output = output.expect("a mismatch");
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains("mismatch at offset 1048576"), "{}", stderr(&output));
        let report = report(&output);
        assert_eq!((&report["verified"], &report["bytes"]), (&false.into(), &(48 << 20).into()));
    });
}

/// A checkpoint of tensors with these lengths, and its bytes.
fn checkpoint(lens: &[usize]) -> Vec<u8> {
    let (mut header, mut end) = (String::from("{"), 0);
    for (number, len) in lens.iter().enumerate() {
        let comma = if number > 0 { "," } else { "" };
        let to = end + len;
        header +=
            &format!(r#"{comma}"t.{number}":{{"dtype":"U8","shape":[{len}],"data_offsets":[{end},{to}]}}"#);
        end = to;
    }
    header.push('}');
    let bytes = (0..end).map(|i| (i / 251 + i % 251) as u8);
    (header.len() as u64).to_le_bytes().into_iter().chain(header.bytes()).chain(bytes).collect()
}

#[test]
fn checkpoints_are_loaded_and_checked_tensor_by_tensor() {
    let files = Files::new();
    let lens = [70_000, 0, 3, 16_384, 16_384, 300_000, 1];
    let first = files.path("model-1.safetensors");
    let second = files.path("model-2.safetensors");
    fs::write(&first, checkpoint(&lens)).unwrap();
    fs::write(&second, checkpoint(&[0])).unwrap();
    let bytes: usize = lens.iter().sum();
    let report = succeeds(load([&first, &second]).args(["--verify", "--chunk", "64KiB"]), 4 << 20);
    assert_eq!((&report["bytes"], &report["verified"]), (&bytes.into(), &true.into()));
    assert!(report["upload_gb_per_s"].as_f64().unwrap() > 0.0);
    assert!(report["download_gb_per_s"].as_f64().unwrap() > 0.0);

    let output = load([&first]).args(["--verify", "--capacity", "8MiB"]).output().unwrap();
    let text = stdout(&output);
    assert!(text.contains("model-1.safetensors: 7 tensors, 402.77 kB to host:0 at "), "{text}");
    assert!(text.contains("all checksums equal"), "{text}");

    // By an index, of which one tensor is wanted.
    let index = files.path("model.safetensors.index.json");
    fs::write(&index, r#"{"weight_map":{"t.3":"model-1.safetensors"}}"#).unwrap();
    let report = succeeds(load([&index]).arg("--verify"), 8 << 20);
    assert_eq!((&report["bytes"], &report["verified"]), (&16_384.into(), &true.into()));
    // By its folder: the index that is there, and without it all files.
    let report = succeeds(load([files.0.path()]).arg("--verify"), 8 << 20);
    assert_eq!((&report["bytes"], &report["verified"]), (&16_384.into(), &true.into()));
    fs::remove_file(&index).unwrap();
    fs::write(&second, checkpoint(&[])).unwrap();
    let report = succeeds(load([files.0.path()]).arg("--verify"), 8 << 20);
    assert_eq!((&report["bytes"], &report["verified"]), (&bytes.into(), &true.into()));
    // What is wrong with it is told as for the files.
    std::os::unix::fs::symlink(files.path("gone"), &index).unwrap();
    refuses(&mut load([files.0.path()]), "model.safetensors.index.json");
}

#[test]
fn checkpoints_that_lie_are_refused_by_tensor() {
    let files = Files::new();
    let path = files.path("lies.safetensors");
    let mut bytes = checkpoint(&[10, 20]);
    bytes.pop();
    fs::write(&path, &bytes).unwrap();
    refuses(&mut load([&path]), "lies.safetensors is refused: tensor \"t.1\" lies at 10..30 of 29 bytes");
    fs::write(&path, [7; 30]).unwrap();
    refuses(&mut load([&path]), "no safetensors file");
    let index = files.path("model.safetensors.index.json");
    fs::write(&index, r#"{"weight_map":{"t":"../lies.safetensors"}}"#).unwrap();
    refuses(&mut load([&index]), "no name of a file beside the index");
}

/// A file of a stranger may be long; what the command keeps of it in memory is not much longer.
#[test]
fn nonsense_of_tens_of_megabytes_is_refused_in_little_memory() {
    let files = Files::new();
    let long = |front: &str| format!("{front}{}[]]", "[],".repeat(20 << 20));
    let header = files.path("nonsense.safetensors");
    let text = long(r#"{"t":["#) + "}";
    fs::write(&header, [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()).unwrap();
    let index = files.path("nonsense.safetensors.index.json");
    fs::write(&index, long(r#"{"metadata":["#) + r#","weight_map":{}}"#).unwrap();
    // One tensor with thirty million axes, and one whose name is everything.
    let axes = files.path("axes.safetensors");
    let shape = "1,".repeat(30 << 20);
    let text = format!(r#"{{"t":{{"dtype":"U8","shape":[{shape}1],"data_offsets":[0,2]}}}}"#);
    fs::write(&axes, [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &[0; 2]].concat()).unwrap();
    let name = files.path("name.safetensors");
    let text = format!(r#"{{"{}":7}}"#, "n".repeat(60 << 20));
    fs::write(&name, [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()).unwrap();
    for (path, cause) in [
        (&header, "tensor \"t\" is not described"),
        (&index, "names no tensor"),
        (&axes, "its shape has more than 64 axes"),
        (&name, "nnn...\" is not described"),
    ] {
        let command = &mut load([path]);
        refuses(squeeze(command, 300 << 20), cause);
        assert!(stderr(&command.output().unwrap()).len() < 1000);
    }
}

/// `pinpool bench`: its table, and the object on its last line.
fn bench(args: &[&str], device: &str) -> (String, Value) {
    let mut command = pinpool();
    command.args(["bench", "--json", "--device", device, "--size", "24MiB"]).args(args);
    #[cfg(feature = "cuda")]
    if device == "cuda:0" && !doubles::required() && !doubles::is_set() {
        if let Some(library) = doubles::library() {
            command.env(doubles::PATH, &library);
        }
    }
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    let report: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    is_bench(&report);
    assert_eq!(report["size_bytes"], 24 << 20);
    (text, report)
}

/// The object has exactly the keys that are promised, and figures.
fn is_bench(report: &Value) {
    let mut keys: Vec<&String> = report.as_object().unwrap().keys().collect();
    keys.sort();
    assert_eq!(
        keys,
        [
            "device",
            "gather_gb_per_s",
            "memcpy_gb_per_s",
            "pageable_upload_gb_per_s",
            "pinned_peak_download_gb_per_s",
            "pinned_peak_upload_gb_per_s",
            "pipeline_download_gb_per_s",
            "pipeline_upload_gb_per_s",
            "size_bytes",
            "threads",
            "unpinned"
        ]
    );
    for (key, value) in report.as_object().unwrap() {
        if key.ends_with("gb_per_s") {
            assert!(value.as_f64().unwrap() > 0.0, "{key}: {value}");
        }
    }
    assert!(report["unpinned"].is_boolean(), "{report}");
}

#[test]
fn the_bench_measures_the_host_device() {
    let (text, report) = bench(&["--threads", "3"], "host");
    assert_eq!((&report["device"], &report["threads"]), (&"host:0".into(), &3.into()));
    assert!(text.starts_with("host:0, 3 threads, copies of 24 MiB, best of 5\n"), "{text}");
    assert!(text.contains("pipeline, from the device") && text.contains('%'), "{text}");
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

#[test]
#[cfg(feature = "cuda")]
fn the_bench_measures_a_gpu() {
    if !doubles::required() && !doubles::is_set() && doubles::library().is_none() {
        skip!("there is no cargo to build the stand-in libcuda with");
        return;
    }
    let (_, report) = bench(&["--threads", "2"], "cuda:0");
    assert_eq!((&report["device"], &report["threads"]), (&"cuda:0".into(), &2.into()));
}

/// A measured figure is printed, even if closing the device then fails.
#[test]
#[cfg(feature = "cuda")]
fn figures_are_printed_where_the_device_cannot_be_closed() {
    if doubles::required() || doubles::is_set() {
        skip!("this needs the stand-in libcuda");
        return;
    }
    let Some(library) = doubles::library() else {
        skip!("there is no cargo to build the stand-in libcuda with");
        return;
    };
    let mut command = pinpool();
    command.args(["bench", "--json", "--device", "cuda:0", "--size", "1MiB", "--threads", "2"]);
    // CUDA_ERROR_INVALID_VALUE: the memory is leaked.
    let command = command.env(doubles::PATH, &library).env("PINPOOL_STANDIN_FAIL", "cuMemFree_v2:1:1");
    let output = fails(command, "not everything was given back");
    let text = stdout(&output);
    assert!(text.starts_with("cuda:0, 2 threads, copies of 1 MiB, best of 5\n"), "{text}");
    is_bench(&serde_json::from_str(text.lines().last().unwrap()).unwrap());
}

/// Limits the command's address space.
fn squeeze(command: &mut Command, bytes: u64) -> &mut Command {
    // SAFETY: between fork and exec only a system call is made, which is allowed there.
    unsafe {
        command.pre_exec(move || {
            let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
            match libc::setrlimit(libc::RLIMIT_AS, &raw const limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        })
    }
}

/// The output of a command that must have ended by then.
fn ends(command: &mut Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let since = std::time::Instant::now();
    while child.try_wait().unwrap().is_none() {
        if since.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("{command:?} hangs: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}

/// Sizes whose eighth is no size class: what is rounded up has to be in the pool's capacity.
#[test]
fn the_bench_takes_any_size() {
    for (size, told) in [
        ("5MB", "4.8 MiB"),
        ("10MB", "9.5 MiB"),
        ("17MiB", "17 MiB"),
        ("3000000", "2.8 MiB"),
        ("1", "128 KiB"),
    ] {
        let output = ends(pinpool().args(["bench", "--device", "host", "--threads", "2", "--size", size]));
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
    for most in (2..48).step_by(3) {
        let mut command = pinpool();
        command.args(["bench", "--device", "host", "--threads", "8", "--size", "1MiB"]);
        command.uid(NOBODY).gid(NOBODY);
        // SAFETY: between fork and exec only a system call is made, which is allowed there.
        unsafe {
            command.pre_exec(move || {
                let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
                match libc::setrlimit(libc::RLIMIT_NPROC, &raw const limit) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            });
        }
        match command.output() {
            Ok(output) => {
                let text = stderr(&output);
                assert!(output.status.code().is_some_and(|code| code <= 2), "{most}: {text}");
                assert!(!text.contains("panicked"), "{most}: {text}");
                codes.push(output.status.code());
            }
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                skip!("this user cannot be another one, or that one not come here: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        }
    }
    // Both too few and enough were tried.
    assert!(codes.contains(&Some(1)) && codes.last() == Some(&Some(0)), "{codes:?}");
}

#[test]
fn a_closed_pipe_is_no_panic() {
    let files = Files::new();
    let file = files.make("model.bin", 100_000);
    for args in [vec!["--json"], vec![], vec!["--help"]] {
        let mut command = load([&file]);
        let mut child = command
            .args(["--capacity", "8MiB"])
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let mut errors = String::new();
        child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0), "{errors}");
        assert!(!errors.contains("panicked"), "{errors}");
    }
    // Stderr too.
    let mut child = load([files.path("missing")]).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(2));
}

/// The command with a memlock limit of `limit` bytes and without the right to exceed it.
fn limited(limit: u64, mut command: Command) -> Command {
    // SAFETY: between fork and exec only system calls are made, which is allowed there.
    unsafe {
        command.pre_exec(move || {
            let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
            if libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // CAP_IPC_LOCK. Fails where the test has no right to drop it: then it is not root, and does not have it
            // either.
            libc::prctl(libc::PR_CAPBSET_DROP, 14, 0, 0, 0);
            Ok(())
        });
    }
    command
}

#[test]
fn without_the_right_to_lock_it_warns_once_or_fails_as_told() {
    let files = Files::new();
    let file = files.make("model.bin", 3 << 20);
    let args = |unpinned| {
        load([file.as_os_str(), "--verify".as_ref(), "--unpinned".as_ref(), std::ffi::OsStr::new(unpinned)])
    };
    // A capacity of several extents, each of which is refused.
    let mut command = limited(65_536, args("allow"));
    let output = command.args(["--json", "--capacity", "200MiB"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let report = report(&output);
    assert_eq!(report["pool"]["pinned_bytes"], 0, "locking was to fail");
    assert_eq!(report["pool"]["unpinned_bytes"], 200 << 20);
    assert_eq!(report["verified"], true);
    let text = stderr(&output);
    assert!(
        text.starts_with("warning: ") && text.lines().count() == 1 && text.contains("not pinned"),
        "{text}"
    );

    let output = fails(limited(65_536, args("refuse")).arg("--json"), "memlock limit");
    assert_eq!(stderr(&output).lines().count(), 1, "{}", stderr(&output));

    // A bench's figures then measure other memory than their names say, and the object says so.
    let mut command = pinpool();
    command.args(["bench", "--json", "--device", "host", "--size", "1MiB", "--threads", "2"]);
    let output = limited(65_536, command).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let report: Value = serde_json::from_str(stdout(&output).lines().last().unwrap()).unwrap();
    assert_eq!((&report["unpinned"], &report["size_bytes"]), (&true.into(), &(1 << 20).into()), "{report}");
}

#[test]
fn hundreds_of_megabytes_through_64_mib() {
    if std::env::var_os("PINPOOL_FULL").is_none() {
        skip!("set PINPOOL_FULL=1");
        return;
    }
    let files = Files::new();
    let file = files.make("model.bin", 300 << 20);
    let report = succeeds(load([&file]).args(["--verify", "--threads", "2"]), 64 << 20);
    assert_eq!((&report["bytes"], &report["verified"]), (&(300 << 20).into(), &true.into()));
    println!("{report}");
    // And the sample of the command in the README.
    let report = succeeds(load(["--verify", "--threads", "2"]).env("TMPDIR", files.0.path()), 64 << 20);
    assert_eq!((&report["bytes"], &report["verified"]), (&(1 << 30).into(), &true.into()));
    println!("{report}");
}
