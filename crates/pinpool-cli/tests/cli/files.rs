//! `pinpool load` of files: to the device and back, and what stands in the way.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;

use super::{
    Files, fails, limit, load, pinpool, refuses, report, skip, stderr, stdout, succeeds, tells_in_json,
    verifies,
};
#[cfg(feature = "cuda")]
use super::{doubles, simulation};

/// Of any size, the largest class of buffers and the file itself being smaller than a chunk or not. What was not
/// measured is null.
#[test]
fn a_file_goes_up_and_back() {
    let files = Files::new();
    // 20 chunks up and as many back, in segments that the copier keeps while a file is on its way.
    for (len, chunk, verify, checkouts) in [
        (5_000_003, "256KiB", true, 1..=40),
        // Each of the two workers may have checked out a segment before one of them takes the only chunk.
        (100_000, "1MiB", false, 1..=2),
        (0, "1MiB", true, 0..=0),
        (20_000_000, "6MiB", true, 1..=40),
        (20_000_000, "30MiB", true, 1..=40),
    ] {
        let file = files.make("model.bin", len);
        let mut command = load([&file]);
        command.args(["--chunk", chunk, "--threads", "2"]).args(verify.then_some("--verify"));
        let report = succeeds(&mut command, if len > 10_000_000 { 40 << 20 } else { 8 << 20 });
        assert_eq!((&report["device"], &report["bytes"]), (&"host:0".into(), &len.into()));
        assert_eq!(report["verified"].as_bool(), verify.then_some(true), "{report}");
        let measured = |key: &str| report[key].as_f64().map(|speed| speed > 0.0);
        assert_eq!(measured("upload_gb_per_s"), (len > 0).then_some(true), "{report}");
        assert_eq!(measured("download_gb_per_s"), (len > 0 && verify).then_some(true), "{report}");
        assert!(checkouts.contains(&report["pool"]["checkouts"].as_u64().unwrap()), "{chunk}: {report}");
    }
}

/// The time of a small file is told, since its speed would be 0.00 GB/s.
#[test]
fn a_tiny_file_has_a_time() {
    let files = Files::new();
    for (len, moved) in [(3, "3 bytes to host:0 in "), (2_000_000, "1.9 MiB to host:0 at ")] {
        let file = files.make("tiny.bin", len);
        let output = load([&file]).args(["--verify", "--capacity", "8MiB"]).output().unwrap();
        let told = stdout(&output);
        let line = told.lines().next().unwrap();
        assert!(line.contains(moved) && line.ends_with(", all checksums equal"), "{told}");
        assert!(line.contains(if len < 10 { " ms, back in " } else { " GB/s, back at " }), "{told}");
        assert!(!line.contains("0.00 "), "{told}");
    }
}

#[test]
fn several_files_and_any_sizes() {
    let files = Files::new();
    let sizes = [1, 4095, 4096, 4097, 0, 65_536, 65_537, 1_048_577, 3 * 65_536];
    let paths: Vec<PathBuf> =
        sizes.iter().enumerate().map(|(i, &len)| files.make(&format!("{i}"), len)).collect();
    for (chunk, threads) in [("64KiB", "1"), ("1000B", "3"), ("65537", "3")] {
        let command = &mut load(&paths);
        verifies(command.args(["--chunk", chunk, "--threads", threads]), 2 << 20, sizes.iter().sum());
    }
}

#[test]
fn a_pool_of_one_chunk_is_enough_for_many_threads() {
    let files = Files::new();
    let file = files.make("model.bin", 1_234_567);
    // SAFETY: sysconf only reads a value.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    // The last two are the stride of a class in between, and one with a run of its own. (The copier needs five
    // pages.)
    for (chunk, segment) in
        [(16_384, 16_384 + 64u64), (65_536, 65_536 + 64), (100_000, 106_560), (5 << 20, (5 << 20) + 32)]
    {
        let capacity = segment.next_multiple_of(page);
        let chunk = chunk.to_string();
        verifies(load([&file]).args(["--chunk", &chunk, "--threads", "6"]), capacity, 1_234_567);
        // A page less than that is refused.
        let less = (capacity - page).max(1).to_string();
        refuses(load([&file]).args(["--chunk", &chunk, "--capacity", &less]), "capacity");
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
        lines[0].contains("model.bin: 97.7 KiB to host:0 in ") && lines[0].ends_with("all checksums equal")
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
    verifies(load(["--sample", "3000001"]).env("TMPDIR", files.0.path()), 8 << 20, 3_000_001);
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
    let neither = "neither an index (*.safetensors.index.json) nor a file that ends in .safetensors";
    refuses(&mut load([files.0.path()]), neither);
    refuses(&mut load([Path::new("/dev/null")]), "not a regular file");
    for size in ["", "x", "64M", "12QiB", "-5", "1.5", "1..5MiB", "0", "99999999999999999999"] {
        refuses(load([file]).arg(format!("--chunk={size}")), "--chunk");
        refuses(load([file]).arg(format!("--capacity={size}")), "--capacity");
    }
    for threads in ["0", "-1", "many", "1000000"] {
        refuses(load([file]).arg(format!("--threads={threads}")), "--threads");
    }
    let below = "a --capacity of 1 MiB is below one segment: a --chunk of 4 MiB takes 4.0 MiB";
    refuses(load([file]).args(["--capacity", "1MiB"]), below);
    refuses(load([file]).args(["--capacity", "1.5MiB"]), "1.5 MiB is below one segment");
    refuses(load([file]).args(["--capacity", "100", "--chunk", "10"]), "capacity of 100 bytes");
    refuses(load([file]).args(["--capacity", "1TiB", "--chunk", "100TiB"]), "below one segment");
    refuses(load([file]).args(["--unpinned", "maybe"]), "--unpinned");
    refuses(load([file]).arg("--fast"), "--fast");
    for (device, cause) in [("gpu", "unknown device"), ("cuda:x", "unknown device"), ("", "unknown device")] {
        let command = &mut pinpool();
        refuses(command.args(["load", "--device", device]).arg(file), cause);
    }
    // A device that is missing is no fault of the command line.
    for (device, cause) in [("host:99", "host:99"), ("cuda:99", "cuda:99"), ("acl:99", "acl")] {
        let command = &mut pinpool();
        let output = fails(command.args(["load", "--device", device]).arg(file), cause);
        assert_eq!((stdout(&output), stderr(&output).lines().count()), (String::new(), 1));
    }
    // Without any command the whole help is printed, and it is an error all the same.
    assert_eq!(pinpool().output().unwrap().status.code(), Some(2));
}

#[test]
fn errors_are_told_in_json_too() {
    let files = Files::new();
    let file = files.make("model.bin", 10_000);
    let object = tells_in_json(&mut load([files.path("missing")]), 2, "missing: No such file");
    assert!(object["device"].is_null() && object["bytes"] == 0, "{object}");
    tells_in_json(load([&file]).arg("--fast"), 2, "--fast");
    tells_in_json(load([&file]).args(["--capacity", "1MB"]), 2, "below one segment");
    for command in ["load", "bench"] {
        tells_in_json(pinpool().args([command, "--device", "gpu"]), 2, "unknown device");
        let object = tells_in_json(pinpool().args([command, "--device", "host:99"]), 1, "host:99");
        assert!(object.as_object().unwrap().len() > 5, "its usual keys: {object}");
    }
    tells_in_json(pinpool().args(["doctor", "--device", "gpu"]), 2, "unknown device");
    tells_in_json(pinpool().args(["doctor", "--capacity", "x"]), 2, "--capacity");
}

#[test]
fn a_terminal_shows_how_far_it_is() {
    let files = Files::new();
    let file = files.make("model.bin", 8 << 20);
    let pinpool = env!("CARGO_BIN_EXE_pinpool");
    let command = format!("stty cols 120; {pinpool} load --device host --verify {}", file.display());
    let mut script = Command::new("script");
    let script = script.args(["-qec", &command, "/dev/null"]).env("TERM", "xterm-256color");
    let Ok(output) = script.stdin(Stdio::null()).output() else {
        skip!("there is no script");
        return;
    };
    let told = stdout(&output);
    assert!(told.contains("of 8 MiB up") && told.contains("all checksums equal"), "{told:?}");
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
        let Some(library) = simulation() else { return };
        let file = files.make("model.bin", 1000);
        let commands = [vec!["bench"], vec!["load", file.to_str().unwrap()]];
        for command in commands {
            let with = |device: &str| {
                let mut all = pinpool();
                all.args(&command).args(["--device", device]).env(doubles::PATH, &library);
                all
            };
            // CUDA_ERROR_OUT_OF_MEMORY.
            let fault = "fail cuDevicePrimaryCtxRetain 1 2 false";
            fails(with("cuda:0").env(doubles::SETUP, fault), "cuDevicePrimaryCtxRetain");
            fails(&mut with("cuda:9"), "cuda:9");
            // The device is named once.
            let full = with("cuda:0").env(doubles::SETUP, "devices 2 500").output().unwrap();
            let told = stderr(&full);
            assert_eq!((full.status.code(), told.matches("cuda:0").count()), (Some(1), 1), "{told}");
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
        &format!("at offset {len}: it ends there, not at {}", metadata.len()),
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
        // The bytes that are named are those of one copy, with the place among them.
        let text = stderr(&output);
        let named = text.split("bytes ").nth(1).and_then(|range| range.split(' ').next()).unwrap();
        let (from, to) = named.split_once("..").unwrap();
        let named = from.parse::<u64>().unwrap()..to.parse().unwrap();
        assert!(text.contains("mismatch at offset") && named.contains(&(1 << 20)), "{text}");
        let report = report(&output);
        assert_eq!((&report["verified"], &report["bytes"]), (&false.into(), &(48 << 20).into()));
    });
}

#[test]
fn a_closed_pipe_is_no_panic() {
    let files = Files::new();
    let file = files.make("model.bin", 100_000);
    let loads = ["load", "--capacity", "8MiB", file.to_str().unwrap()];
    let doctor = ["doctor", "--capacity", "1MiB", "--pin", "1MiB"];
    for (command, more, ends) in [
        (&loads[..], Some("--json"), true),
        (&loads, None, true),
        (&loads, Some("--help"), true),
        // The doctor's findings on this machine do not matter here.
        (&doctor, Some("--json"), false),
        (&doctor, None, false),
    ] {
        let mut run = pinpool();
        run.args(command).args(["--device", "host"]).args(more);
        let mut child = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut errors = String::new();
        child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        let code = child.wait().unwrap().code();
        assert!(code == Some(0) || (!ends && code == Some(1)), "{command:?} {code:?}: {errors}");
        assert!(!errors.contains("panicked") && (ends || errors.is_empty()), "{command:?}: {errors}");
    }
    // Stderr too.
    let mut child = load([files.path("missing")]).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(2));
}

#[test]
fn without_the_right_to_lock_it_warns_once_or_fails_as_told() {
    let files = Files::new();
    let file = files.make("model.bin", 3 << 20);
    let args = |unpinned| {
        load([file.as_os_str(), "--verify".as_ref(), "--unpinned".as_ref(), std::ffi::OsStr::new(unpinned)])
    };
    // A capacity of several extents, each of which is refused.
    let limited = |mut command: Command| {
        limit(&mut command, libc::RLIMIT_MEMLOCK, 65_536);
        command
    };
    let mut command = limited(args("allow"));
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

    let output = fails(limited(args("refuse")).arg("--json"), "memlock limit");
    assert_eq!(stderr(&output).lines().count(), 1, "{}", stderr(&output));

    // A bench's figures then measure other memory than their names say, and the object says so.
    let mut command = pinpool();
    command.args(["bench", "--json", "--device", "host", "--size", "1MiB", "--threads", "2"]);
    let output = limited(command).output().unwrap();
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
    println!("{}", verifies(load([&file]).args(["--threads", "2"]), 64 << 20, 300 << 20));
    // And the sample of the command in the README.
    let command = &mut load(["--threads", "2"]);
    println!("{}", verifies(command.env("TMPDIR", files.0.path()), 64 << 20, 1 << 30));
}
