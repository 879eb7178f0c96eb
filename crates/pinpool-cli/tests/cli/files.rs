//! `pinpool load` of files: to the device and back, and what stands in the way.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{
    Folder, fails, limit, load, object, pinpool, refuses, report, skip, stderr, stdout, succeeds, verifies,
};
#[cfg(feature = "cuda")]
use super::{doubles, simulation};

/// Of any size, the largest class of buffers and the file itself being smaller than a chunk or not. What was not
/// measured is null.
#[test]
fn files_go_up_and_back() {
    let files = Folder::new();
    // 20 chunks up and as many back, in segments that the copier keeps while a file is on its way.
    for (len, chunk, verify, checkouts) in [
        (5_000_003, "256KiB", true, 1..=40),
        // Each of the two workers may have checked out a segment before one of them takes the only chunk.
        (100_000, "1MiB", false, 1..=2),
        (0, "1MiB", true, 0..=0),
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

#[test]
fn a_pool_of_one_chunk_is_enough_for_many_threads() {
    let files = Folder::new();
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

/// The time of a small file is told, since its speed would be 0.00 GB/s.
#[test]
fn text_for_people() {
    let files = Folder::new();
    for (len, moved, back) in [
        (3, "file: 3 bytes to host:0 in ", " ms, back in "),
        (2_000_000, "file: 1.9 MiB to host:0 at ", " GB/s, back at "),
    ] {
        let file = files.make("file", len);
        let output = load([&file]).args(["--verify", "--capacity", "8MiB"]).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        let told = stdout(&output);
        let [line, pool] = told.lines().collect::<Vec<_>>()[..] else { panic!("{told}") };
        assert!(line.contains(moved) && line.contains(back) && !line.contains("0.00 "), "{told}");
        assert!(line.ends_with(", all checksums equal") && pool.starts_with("pool: "), "{told}");
        // No terminal, no progress bar; at most the one warning that memory is not pinned.
        assert!(stderr(&output).lines().all(|l| l.starts_with("warning: ")), "{}", stderr(&output));
    }
    let file = files.make("file", 8 << 20);
    let pinpool = env!("CARGO_BIN_EXE_pinpool");
    let command = format!("stty cols 120; {pinpool} load --device host --verify {}", file.display());
    let mut script = Command::new("script");
    let script = script.args(["-qec", &command, "/dev/null"]).env("TERM", "xterm-256color");
    let Ok(output) = script.stdin(Stdio::null()).output() else {
        return skip!("in part: there is no script");
    };
    let told = stdout(&output);
    assert!(told.contains("of 8 MiB up") && told.contains("all checksums equal"), "{told:?}");
}

#[test]
fn a_sample_is_made_and_removed() {
    let files = Folder::new();
    let left = || fs::read_dir(files.path()).unwrap().count();
    verifies(load(["--sample", "3000001"]).env("TMPDIR", files.path()), 8 << 20, 3_000_001);
    assert_eq!(left(), 0);

    // Nor does one stay behind when the command is killed in the middle, at whatever time.
    for wait in [1, 30, 100] {
        let command = &mut load(["--sample", "1GiB"]);
        let mut child = command.env("TMPDIR", files.path()).stdout(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(wait));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(left(), 0);
    }
    fails(load(["--sample", "1MiB"]).env("TMPDIR", files.path().join("nowhere")), "nowhere");
}

/// A device that is there and fails, or has no room, is no fault of the command line, and neither is a file
/// that cannot be read.
#[test]
fn what_fails_is_told_from_what_cannot_be_obeyed() {
    let files = Folder::new();
    // Its first byte cannot be read, by any process.
    let index = files.path().join("m.safetensors.index.json");
    std::os::unix::fs::symlink("/proc/self/mem", &index).unwrap();
    fails(&mut load([&index]), "cannot be read at offset 0");
    // The kernel says a page, and has a line.
    let path = Path::new("/sys/devices/system/cpu/online");
    if let (Ok(metadata), Ok(text)) = (fs::metadata(path), fs::read(path)) {
        let why = format!("at offset {}: it ends there, not at {}", text.len(), metadata.len());
        fails(load([path]).args(["--capacity", "8MiB"]), &why);
    }
    // Nothing but a hole. If the file system does not take it, a smaller one that no memory holds either.
    let large = files.path().join("large");
    let file = File::create(&large).unwrap();
    if [8u64 << 40, 2 << 40].iter().any(|&len| file.set_len(len).is_ok()) {
        let report = report(&fails(load([&large]).args(["--capacity", "8MiB", "--json"]), "no room"));
        assert!(report["bytes"] == 0 && report["verified"].is_null(), "{report}");
    }

    #[cfg(feature = "cuda")]
    if !doubles::required() && !doubles::is_set() {
        let Some(library) = simulation() else { return };
        let file = files.make("model.bin", 1000);
        for command in [&["bench"][..], &["load", file.to_str().unwrap()]] {
            let with = |device: &str, setup: &str| {
                let mut all = pinpool();
                all.args(command).args(["--device", device]);
                all.env(doubles::PATH, &library).env(doubles::SETUP, setup);
                all
            };
            // CUDA_ERROR_OUT_OF_MEMORY.
            let fault = "fail cuDevicePrimaryCtxRetain 1 2 false";
            fails(&mut with("cuda:0", fault), "cuDevicePrimaryCtxRetain");
            fails(&mut with("cuda:9", ""), "cuda:9");
            // The device is named once.
            let told = stderr(&fails(&mut with("cuda:0", "devices 2 500"), "cuda:0"));
            assert_eq!(told.matches("cuda:0").count(), 1, "{told}");
        }
    }
}

#[test]
fn a_file_that_changes_under_the_command_is_a_mismatch() {
    let files = Folder::new();
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
    let files = Folder::new();
    let file = files.make("model.bin", 100_000);
    let loads = ["load", "--device", "host", "--capacity", "8MiB", file.to_str().unwrap()];
    let doctor = ["doctor", "--device", "host", "--capacity", "1MiB", "--pin", "1MiB"];
    for (command, more) in [
        (&loads[..], "--json"),
        (&loads, "--verify"),
        (&loads, "--help"),
        (&doctor, "--json"),
        (&doctor, "-v"),
    ] {
        let mut run = pinpool();
        run.args(command).arg(more).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = run.spawn().unwrap();
        drop(child.stdout.take());
        let mut errors = String::new();
        child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        let code = child.wait().unwrap().code();
        // The doctor's findings on this machine do not matter here.
        let ends = code == Some(0) || command[0] == "doctor" && code == Some(1);
        assert!(ends && !errors.contains("panicked"), "{command:?} {code:?}: {errors}");
    }
    let mut child = load([files.path().join("missing")]).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(2));
}

#[test]
fn without_the_right_to_lock_it_warns_once_or_fails_as_told() {
    let files = Folder::new();
    let file = files.make("model.bin", 3 << 20);
    let limited = |mut command: Command| {
        limit(&mut command, libc::RLIMIT_MEMLOCK, 65_536);
        command.arg("--json");
        command
    };
    let load = |unpinned| {
        limited(load([file.as_os_str(), "--verify".as_ref(), "--unpinned".as_ref(), OsStr::new(unpinned)]))
    };
    // A capacity of several extents, each of which is refused.
    let output = load("allow").args(["--capacity", "200MiB"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let report = report(&output);
    let bytes = ["pinned_bytes", "unpinned_bytes"].map(|key| report["pool"][key].as_u64());
    assert_eq!((bytes, &report["verified"]), ([Some(0), Some(200 << 20)], &true.into()), "{report}");
    let text = stderr(&output);
    let warns = text.starts_with("warning: ") && text.contains("not pinned");
    assert!(warns && text.lines().count() == 1, "{text}");

    let text = stderr(&fails(&mut load("refuse"), "memlock limit"));
    assert_eq!(text.lines().count(), 1, "{text}");

    // A bench's figures then measure other memory than their names say, and the object says so.
    let mut bench = pinpool();
    bench.args(["bench", "--device", "host", "--size", "1MiB", "--threads", "2"]);
    let output = limited(bench).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(object(&output)["unpinned"], true);
}
