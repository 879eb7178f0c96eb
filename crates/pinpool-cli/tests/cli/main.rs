//! The `pinpool` command as its users meet it: the built binary, its output and its exit status.
//!
//! Everything runs on the host device, which is always there; once on a GPU, and once on an Ascend device, of the
//! stand-in driver or, where `PINPOOL_REQUIRE` names one, of the machine's own.

#![cfg(target_os = "linux")]
#![allow(unsafe_code)]

mod bench;
mod checkpoints;
#[allow(dead_code, reason = "the built binary runs most of it")]
#[path = "../../src/cli/mod.rs"]
mod cli;
mod devices;
mod doctor;
mod files;
#[path = "../../../pinpool-safetensors/tests/safetensors/files.rs"]
mod folder;
mod hostile;
mod kept;
mod refusals;
#[path = "../../../../tests/support/mod.rs"]
mod support;
mod top;

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};

use folder::Folder;
use serde_json::Value;
#[cfg(any(feature = "acl", feature = "cuda"))]
use support::doubles::{self, simulation};
use support::skip;

fn pinpool() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinpool"));
    command.stdin(Stdio::null());
    command
}

/// `pinpool load --device host`, and so on.
fn load<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
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

/// Reads on until the text has these words.
fn reads_until(from: &mut impl Read, text: &mut String, words: &str) {
    while !text.contains(words) {
        let mut piece = [0; 4096];
        let len = from.read(&mut piece).unwrap_or(0);
        assert!(len > 0, "no {words:?} in {text:?}");
        *text += &String::from_utf8_lossy(&piece[..len]);
    }
}

/// No terminal obeys the text.
#[track_caller]
fn is_plain(text: &str) {
    let bad = |c: char| c != '\n' && (c.is_control() || "\u{200b}\u{202e}".contains(c));
    assert!(!text.contains(bad), "{text:?}");
}

/// An object's keys in order.
fn keys(object: &Value) -> String {
    let mut keys: Vec<&str> = object.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys.join(" ")
}

/// The JSON object on the last line.
fn object(output: &Output) -> Value {
    serde_json::from_str(stdout(output).lines().last().expect("a last line")).unwrap()
}

/// The object of a load, with exactly the keys that are promised, and the pool's sums right.
fn report(output: &Output) -> Value {
    let report = object(output);
    assert_eq!(keys(&report), "bytes device download_gb_per_s error pool upload_gb_per_s verified");
    let of_pool = "checked_out_bytes checkouts cut_bytes free_bytes in_flight_bytes pinned_bytes \
                   quarantined_bytes unpinned_bytes waits";
    assert_eq!(keys(&report["pool"]), of_pool);
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
    // For nothing, nothing is pinned.
    assert!((held > 0) == (report["bytes"] != 0) && held <= capacity, "{held} of {capacity}");
    assert!(report["error"].is_null(), "{report}");
    report
}

/// So many bytes are loaded, and checked.
#[track_caller]
fn verifies(command: &mut Command, capacity: u64, bytes: usize) -> Value {
    let report = succeeds(command.arg("--verify"), capacity);
    assert_eq!((&report["bytes"], &report["verified"]), (&bytes.into(), &true.into()));
    report
}

/// A refusal: exit status 2, one line that names the cause, nothing on stdout.
fn refuses(command: &mut Command, cause: &str) {
    let output = command.output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{command:?}: {text}");
    assert_eq!(text.lines().count(), 1, "{command:?}: {text}");
    assert!(text.contains(cause), "{command:?} should name {cause:?}: {text}");
    // A path may be long, and is said whole.
    assert!(text.len() < 10_000, "{command:?}: {} bytes", text.len());
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

/// Runs the command under a limit of its own.
fn limit(command: &mut Command, resource: libc::__rlimit_resource_t, most: u64) -> &mut Command {
    // SAFETY: between fork and exec only system calls are made, which is allowed there.
    unsafe {
        command.pre_exec(move || {
            let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
            if libc::setrlimit(resource, &raw const limit) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            if resource == libc::RLIMIT_MEMLOCK {
                // CAP_IPC_LOCK sets that limit aside. What the bounding set lacks no executable gives back, and a
                // process that may not drop it does not have it.
                libc::prctl(libc::PR_CAPBSET_DROP, 14, 0, 0, 0);
            }
            Ok(())
        })
    }
}
