//! The form of what is said, exit statuses, and machines that show nothing or nonsense.

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
    machine.available(0).file("/.dockerenv", "");
    let output = machine.doctor("host", "1MiB").output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    // A text is cut: so many of its letters are shown.
    let expected = include_str!("unwell.txt").replace("(Ws)", &"W".repeat(4952));
    assert_eq!(stdout(&output), expected);
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
    let mut text = String::new();
    crate::reads_until(&mut child.stdout.take().unwrap(), &mut text, "  pin  ");
    assert!(child.try_wait().unwrap().is_none(), "the trial is not over");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(text.starts_with("device cuda:0, a pool of 1 MiB\n") && text.contains("memlock"), "{text}");
}

/// Whatever the files hold, every check is there and nothing panics: [`findings`] looks. A thing that they do
/// not show is reported as unknown.
#[test]
fn machines_that_show_nonsense() {
    for change in [
        ": > \"$0\"",
        "printf '\\377\\0\\n\\303: -' > \"$0\"",
        "echo -1 > \"$0\"",
        "truncate --size $(($(wc -c < \"$0\") / 2)) \"$0\"",
        // Numbers as large as they get, in the middle of everything.
        "sed -Ei ':a; s/(^|\\s)[0-9]{1,19}(\\s|$)/\\118446744073709551615\\2/; ta' \"$0\"",
        // Folders where files should be.
        "rm \"$0\" && mkdir \"$0\"",
    ] {
        let machine = Machine::healthy();
        machine.pci(0).node(1, 1 << 30, "8-15");
        let mut files = Command::new("find");
        files.arg(machine.root()).args(["-type", "f", "-exec", "sh", "-c", change, "{}", ";"]);
        let done = files.output().unwrap();
        assert!(done.status.success() && done.stderr.is_empty(), "{change}: {done:?}");
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
