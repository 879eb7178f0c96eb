//! The form of what is said, exit statuses, and machines that show nothing or nonsense.

use std::fs;

use super::*;

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

/// A text of the system's files may come from a stranger: a mount point, a group's name, a driver's.
#[test]
fn text_is_aligned_and_cannot_steer_a_terminal() {
    let machine = Machine::healthy();
    let evil = "\u{1b}[2Jx\u{7}\u{9b}31m\u{202e}";
    machine.file(&format!("{THP}/enabled"), &format!("always [mad{evil}{}] never\n", "W".repeat(1 << 20)));
    // The head says what the remedies are for.
    machine.file("/proc/meminfo", &meminfo(1000)).file("/.dockerenv", "");
    let output = machine.doctor("host", "1MiB").output().unwrap();
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(!text.contains(|c: char| c != '\n' && (c.is_control() || c == '\u{202e}')), "{text:?}");
    assert!(text.contains("mad\\u{1b}[2Jx\\u{7}\\u{9b}31m\\u{202e}WWW") && text.len() < 20_000);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "device host:0, a pool of 1 MiB, in docker");
    for name in NAMES {
        let line = lines.iter().find(|line| line.split_whitespace().nth(1) == Some(name)).expect(name);
        let status = line.split_whitespace().next().unwrap();
        assert!(["ok", "warn", "fail"].contains(&status), "{line}");
        // The findings start in one column.
        let is_free = [line.as_bytes()[17], line.as_bytes()[18]].map(|byte| byte == b' ');
        assert_eq!((line.find(name), is_free), (Some(6), [true, false]), "{line}");
    }
    let at = lines.iter().position(|line| line.starts_with("fail  memory")).expect("a failure");
    assert_eq!(lines[at + 1].find("fix: pool: a capacity of "), Some(18), "{text}");
    let last = lines.last().unwrap();
    assert!(last.ends_with(" failed") && last.contains(" ok, "), "{last}");
    machine.host("1MiB").is("huge-pages", "ok: \\u{9b}31m");
}

/// Whatever ends the process in the trial, what the files say is on the screen by then.
#[cfg(feature = "cuda")]
#[test]
fn what_needs_no_trial_is_printed_before_the_trial() {
    let Some(library) = simulation() else { return };
    let machine = Machine::healthy();
    machine.pci(0);
    // The trial ends with a look at the link, which nobody answers here.
    let pipe = machine.root().join(&BUS[1..]).join(GPU).join("current_link_speed");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut command = machine.doctor("cuda:0", "1MiB");
    let mut child = command.env(doubles::PATH, library).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let (mut text, mut lines) = (String::new(), child.stdout.take().unwrap());
    while !text.contains("  pin  ") {
        let mut piece = [0; 4096];
        let len = std::io::Read::read(&mut lines, &mut piece).unwrap();
        assert!(len > 0, "it ended: {text}");
        text += &String::from_utf8_lossy(&piece[..len]);
    }
    assert!(child.try_wait().unwrap().is_none(), "the trial is not over");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(text.starts_with("device cuda:0, a pool of 1 MiB\n") && text.contains("memlock"), "{text}");
}

fn each_file(dir: &Path, change: &dyn Fn(&Path)) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            _ if path.is_symlink() => {}
            true => each_file(&path, change),
            false => change(&path),
        }
    }
}

/// Whatever the files hold, every check is there and nothing panics: [`findings`] looks. A thing that they do
/// not show is reported as unknown.
#[test]
fn machines_that_show_nonsense() {
    let write = |bytes: &'static [u8]| move |path: &Path| fs::write(path, bytes).unwrap();
    let (empty, strange, negative) = (write(b""), write(b"\xff\0\n\xc3: -"), write(b"-1\n"));
    let halve = |path: &Path| {
        let bytes = fs::read(path).unwrap();
        fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
    };
    // Numbers as large as they get, in the middle of everything.
    let enlarge = |path: &Path| {
        let text = fs::read_to_string(path).unwrap();
        let most = u64::MAX.to_string();
        let word = |word: &str| match word.trim().parse::<u64>() {
            Ok(_) => word.replace(word.trim(), &most),
            Err(_) => word.to_owned(),
        };
        fs::write(path, text.split_inclusive([' ', '\n']).map(word).collect::<String>()).unwrap();
    };
    // Folders where files should be.
    let replace = |path: &Path| {
        fs::remove_file(path).unwrap();
        fs::create_dir(path).unwrap();
    };
    let changes: [&dyn Fn(&Path); 6] = [&empty, &strange, &negative, &halve, &enlarge, &replace];
    for change in changes {
        let machine = Machine::healthy();
        machine.pci(0).node(1, 1 << 30, "8-15");
        each_file(machine.root(), change);
        machine.host("1MiB");
        machine.gpu("1TiB");
    }
    let nothing = Machine::healthy();
    nothing.without("/proc").without("/sys");
    let found = nothing.host("1MiB");
    for name in ["memlock", "memory", "cgroup", "huge-pages"] {
        found.is(name, "warn: cannot be read => mount /proc and /sys");
    }
    found.is("numa", "ok").is("device", "ok").is("link", "ok");
}
