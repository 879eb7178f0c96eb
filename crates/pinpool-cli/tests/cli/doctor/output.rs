//! The form of what is said, exit statuses, and machines that show nothing or nonsense.

use std::fs;
#[cfg(feature = "cuda")]
use std::io::{BufRead, BufReader};
use std::path::Path;
#[cfg(feature = "cuda")]
use std::process::Stdio;

use super::machine::{GPU, Machine, THP, meminfo};
use super::{NAMES, doctor, findings, stderr, stdout};
use crate::refuses;
#[cfg(feature = "cuda")]
use crate::simulation;

#[test]
fn a_healthy_machine_is_well() {
    let machine = Machine::healthy();
    let found = machine.host("1MiB");
    for name in NAMES {
        // Real, and this very machine's: how fast it copies, and whether it may pin at all.
        if !["pin", "copy"].contains(&name) {
            found.is(name, "ok");
        }
    }
    assert_eq!(found.0["device"], "host:0");
    assert_eq!(found.0["capacity_bytes"], 1 << 20);
    if found.check("pin")["status"] == "ok" {
        assert_ne!(found.check("copy")["status"], "fail");
        for key in ["pin_gb_per_s", "upload_gb_per_s", "download_gb_per_s"] {
            assert!(found.0["measured"][key].as_f64().unwrap() > 0.0, "{key}");
        }
    }
}

#[test]
fn this_machine_can_be_examined() {
    for device in ["host", "auto"] {
        let found = findings(doctor().args(["--capacity", "8MiB", "--device", device]));
        assert_ne!(found.check("device")["status"], "fail");
    }
}

#[test]
fn text_is_aligned_and_plain() {
    let machine = Machine::healthy();
    // The head says what the remedies are for.
    machine.file("/proc/meminfo", &meminfo(1000)).file("/.dockerenv", "");
    let output = machine.doctor("host", "1MiB").output().unwrap();
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "device host:0, a pool of 1 MiB, in docker");
    for name in NAMES {
        let line = lines.iter().find(|line| line.split_whitespace().nth(1) == Some(name)).expect(name);
        assert!(line.starts_with("ok ") || line.starts_with("warn ") || line.starts_with("fail "), "{line}");
        // The findings start in one column.
        assert_eq!(
            (line.find(name), line.as_bytes()[17], line.as_bytes()[18] == b' '),
            (Some(6), b' ', false),
            "{line}"
        );
    }
    let at = lines.iter().position(|line| line.starts_with("fail  memory")).expect("a failure");
    assert_eq!(lines[at + 1].find("fix: pool: a capacity of "), Some(18), "{text}");
    let last = lines.last().unwrap();
    assert!(last.ends_with(" failed") && last.contains(" ok, "), "{last}");
}

/// Whatever ends the process in the trial, what the files say is on the screen by then.
#[cfg(feature = "cuda")]
#[test]
fn what_needs_no_trial_is_printed_before_the_trial() {
    let Some(library) = simulation() else { return };
    let machine = Machine::healthy();
    machine.pci(GPU, 0);
    // The trial ends with a look at the link, which nobody answers here.
    let device = format!("/sys/devices/pci0000:64/0000:64:01.0/{GPU}");
    let pipe = machine.root().join(device.trim_start_matches('/')).join("current_link_speed");
    let path = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
    // SAFETY: the path is a string that ends with a zero.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    let mut command = machine.doctor("cuda:0", "1MiB");
    let mut child = command.env(crate::doubles::PATH, library).stdout(Stdio::piped()).spawn().unwrap();
    let mut text = String::new();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let (told, heard) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        while lines.read_line(&mut line).is_ok_and(|n| n > 0) && told.send(std::mem::take(&mut line)).is_ok()
        {
        }
    });
    while let Ok(line) = heard.recv_timeout(std::time::Duration::from_secs(20)) {
        text += &line;
        if text.contains("  pin  ") {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(text.contains("  pin  "), "not all is said before the trial: {text}");
    assert!(text.starts_with("device cuda:0, a pool of 1 MiB\n") && text.contains("memlock"), "{text}");
}

#[test]
fn sizes_are_read() {
    let machine = Machine::healthy();
    let good = [("1", 1), ("4096", 4096), ("64MiB", 64 << 20), ("2 GiB", 2 << 30), ("3kb", 3000), ("7B", 7)];
    for (text, bytes) in good
        .into_iter()
        .chain([("1tib", 1 << 40), (" 5 ", 5), ("2Tb", 2_000_000_000_000_u64)])
        .chain([("1.5GiB", 3 << 29), ("0.1 mib", 104_857), ("2.50KB", 2500)])
    {
        assert_eq!(machine.host(text).0["capacity_bytes"], bytes, "{text:?}");
    }
    let bad = ",MiB,-1,1.5,1.5B,1.GiB,.5GiB,1.5.5GiB,0.0001KiB,64M,64MiBs,64ib,12 34,0,0MiB,99999999TiB,99999999999999999999,1é,1 é";
    for text in bad.split(',') {
        let output = doctor().arg(format!("--capacity={text}")).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{text:?}");
        assert!(stderr(&output).contains("--capacity"), "{text:?}: {}", stderr(&output));
    }
}

#[test]
fn sizes_are_told() {
    let machine = Machine::healthy();
    for (bytes, told) in [
        (1023, "1023 bytes"),
        (64 << 10, "64 KiB"),
        (256 << 20, "256 MiB"),
        ((3 << 30) + (1 << 29), "3.5 GiB"),
        (2 << 40, "2 TiB"),
    ] {
        let text = stdout(&machine.doctor("host", &u64::to_string(&bytes)).output().unwrap());
        assert!(text.starts_with(&format!("device host:0, a pool of {told}\n")), "{text}");
    }
}

#[test]
fn command_lines_that_cannot_be_obeyed() {
    for (args, cause) in [
        (["--device", "gpu"], "gpu"),
        (["--device", "cuda:x"], "cuda:x"),
        (["--device", "auto:1"], "auto:1"),
        (["--device", ""], "unknown device"),
        (["--capacity", "0"], "--capacity"),
        (["--root", ""], "--root"),
    ] {
        refuses(doctor().args(args), cause);
    }
    let help = stdout(&doctor().arg("--help").output().unwrap());
    for option in ["--device", "--capacity", "--pin", "--json", "Exit status"] {
        assert!(help.contains(option), "{option}");
    }
    assert!(!help.contains("--root"), "{help}");
}

#[test]
fn a_device_that_is_not_there_is_a_failure() {
    let machine = Machine::healthy();
    let found = findings(&mut machine.doctor("host:99", "1MiB"));
    found.is("device", "fail: host:99").is("pin", "warn: not tried");
    let found = machine.gpu("1MiB");
    found.is("device", "fail: cuda:0").is("copy", "warn: not tried");
    assert!(found.0["measured"]["upload_gb_per_s"].is_null());
}

/// A thing that the files do not show is reported as unknown.
#[test]
fn a_machine_that_shows_nothing() {
    let nothing = tempfile::tempdir().unwrap();
    let args = ["--device", "host", "--capacity", "1MiB", "--pin", "1MiB", "--root"];
    let found = findings(doctor().args(args).arg(nothing.path()));
    for name in ["memlock", "memory", "cgroup", "huge-pages"] {
        found.is(name, "warn: cannot be read => mount /proc and /sys");
    }
    for name in ["numa", "device", "link"] {
        found.is(name, "ok");
    }
}

fn each_file(dir: &Path, change: &dyn Fn(&Path)) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_symlink() {
            continue;
        }
        if path.is_dir() { each_file(&path, change) } else { change(&path) }
    }
}

/// Whatever the files hold, every check is there and nothing panics: [`findings`] looks.
#[test]
fn machines_that_show_nonsense() {
    let changes: [&dyn Fn(&Path); 6] = [
        &|path| fs::write(path, "").unwrap(),
        &|path| fs::write(path, [0xff, 0, b'\n', 0xc3, b':', b' ', b'-']).unwrap(),
        &|path| fs::write(path, "-1\n").unwrap(),
        &|path| fs::write(path, format!("{}\n", u64::MAX)).unwrap(),
        &|path| {
            let bytes = fs::read(path).unwrap();
            fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
        },
        // Numbers as large as they get, in the middle of everything.
        &|path| {
            let text = fs::read_to_string(path).unwrap();
            let digits = |c: char| c.is_ascii_digit();
            let text: Vec<String> = text
                .split_inclusive(' ')
                .map(|w| {
                    if w.trim().chars().all(digits) && !w.trim().is_empty() {
                        format!("{} ", u64::MAX)
                    } else {
                        w.into()
                    }
                })
                .collect();
            fs::write(path, text.concat()).unwrap();
        },
    ];
    for change in changes {
        let machine = Machine::healthy();
        machine.pci(GPU, 0).node(1, 1 << 30, "8-15");
        each_file(machine.root(), change);
        machine.host("1MiB");
        machine.gpu("1TiB");
    }
    // Folders where files should be.
    let machine = Machine::healthy();
    each_file(machine.root(), &|path| {
        fs::remove_file(path).unwrap();
        fs::create_dir(path).unwrap();
    });
    machine.gpu("1TiB");
}

/// A text of the system's files may come from a stranger: a mount point, a group's name, a driver's.
#[test]
fn what_files_say_cannot_steer_a_terminal() {
    let machine = Machine::healthy();
    let evil = "\u{1b}[2Jx\u{7}\u{9b}31m\u{202e}";
    machine.file(&format!("{THP}/enabled"), &format!("always [mad{evil}{}] never\n", "W".repeat(1 << 20)));
    let output = machine.doctor("host", "1MiB").output().unwrap();
    let text = stdout(&output);
    assert!(!text.contains(|c: char| c != '\n' && (c.is_control() || c == '\u{202e}')), "{text:?}");
    assert!(text.contains("mad\\u{1b}[2Jx\\u{7}\\u{9b}31m\\u{202e}WWW") && text.len() < 20_000);
    let found = machine.host("1MiB");
    assert!(found.check("huge-pages")["found"].as_str().unwrap().contains("\\u{9b}31m"));
}
