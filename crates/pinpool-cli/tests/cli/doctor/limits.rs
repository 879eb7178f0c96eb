//! Limits of the process and of the kernel: fabricated, and set for real.

use super::*;
use crate::limit;

#[test]
fn a_memlock_limit_fails_with_the_remedy_of_the_place() {
    let machine = Machine::healthy();
    machine.locks("ok: unlimited");
    machine.memlock("8388608").locks(
        "fail: 8 MiB & 256 MiB & no CAP_IPC_LOCK => LimitMEMLOCK=infinity & \
         sudo prlimit --memlock=unlimited:unlimited & limits.conf & !docker",
    );
    machine.host("4MiB").is("memlock", "ok: enough");
    // A process that may raise its limit needs no administrator.
    machine.memlock("8388608/unlimited").locks("fail: => ulimit -l 262144 & !sudo prlimit");
    machine.memlock("8388608/16777216").locks("fail: => sudo prlimit");
    // What is locked already counts.
    machine.memlock("268435456").locks("ok");
    machine.status("VmLck:", "131072 kB").locks("fail");
    machine.host("128MiB").is("memlock", "ok");

    // In containers the remedy is the container's.
    machine.file("/.dockerenv", "").memlock("8388608/unlimited");
    machine.locks("fail: => shell: ulimit -l & docker run: --ulimit memlock=-1:-1 & !systemd");
    // (Kubelets' containers show signs of other tools too.) Windows Subsystem for Linux is no container, though systemd
    // calls it one.
    machine.file("/var/run/secrets/kubernetes.io/serviceaccount/token", "");
    machine.locks(
        "fail: => kubernetes: securityContext.capabilities.add: [\"IPC_LOCK\"] & containerd & !docker",
    );
    let wsl = Machine::healthy();
    wsl.memlock("65536").file("/run/systemd/container", "wsl\n").locks("fail: => systemd, in");
}

#[test]
fn the_capability_sets_the_limit_aside_outside_of_user_namespaces() {
    let machine = Machine::healthy();
    machine.memlock("65536").status("CapEff:", "0000000000004000");
    // The user's own id alone; and the map of rootless containers: a range of subordinate numbers besides.
    let own = "         0       1000          1\n";
    for (map, told) in [
        ("         0          0 4294967295\n", "ok: 64 KiB & CAP_IPC_LOCK"),
        (own, "fail: user namespace"),
        (&format!("{own}         1     100000      65536\n"), "fail: user namespace"),
        ("", "ok"),
    ] {
        machine.file("/proc/self/uid_map", map).locks(told);
    }
    // All but that one.
    machine.status("CapEff:", "ffffffffffffbfff").locks("fail: no CAP_IPC_LOCK");
}

/// The doctor, on this very machine, under a limit of its own.
fn limited(resource: libc::__rlimit_resource_t, value: u64) -> Command {
    let mut command = doctor();
    limit(command.args(["--device", "host"]), resource, value);
    command
}

#[test]
fn without_the_right_to_lock_the_check_and_the_pinning_agree() {
    let found = findings(&mut limited(libc::RLIMIT_MEMLOCK, 65_536));
    found
        .is("memlock", "fail: 64 KiB & no CAP_IPC_LOCK")
        .is("pin", "fail: could not be pinned & limit is 64 KiB => see memlock")
        .is("copy", "warn: nothing could be pinned")
        .is("device", "ok: host:0");
    let fix = found.check("memlock")["fix"].as_str().unwrap();
    let remedies = ["LimitMEMLOCK=infinity", "--ulimit memlock=-1", "IPC_LOCK"];
    assert!(remedies.iter().any(|remedy| fix.contains(remedy)), "{fix}");
    // In a user namespace every process has all capabilities, and may lock no more for it.
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user"]);
        command
    };
    if unshare().arg("true").output().is_ok_and(|output| output.status.success()) {
        let mut command = unshare();
        command.args([env!("CARGO_BIN_EXE_pinpool"), "doctor", "--device", "host"]);
        let found = findings(limit(&mut command, libc::RLIMIT_MEMLOCK, 65_536));
        found.is("memlock", "fail: user namespace").is("pin", "fail: limit is 64 KiB");
    } else {
        skip!("in part: there is no unshare, or user namespaces are forbidden");
    }
    // Memory within the limit can be locked, if this process may set such a limit.
    let mut hard = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a live value that the call fills.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut hard) }, 0);
    if hard.rlim_max < 4 << 20 {
        return skip!("in part: the limit cannot be as high as 4 MiB here");
    }
    let found = findings(limited(libc::RLIMIT_MEMLOCK, 4 << 20).args(["--capacity", "1MiB"]));
    found.is("memlock", "ok: enough").is("pin", "ok: 1 MiB");
    assert_ne!(found.check("copy")["status"], "fail");
}

/// Where memory runs out during the run the doctor says so, and prints the other findings with it.
#[test]
fn without_address_space_all_checks_are_told() {
    for kib in [307_200_u64, 380 << 10, 450 << 10] {
        // (Which looks whether they are all there.)
        findings(&mut limited(libc::RLIMIT_AS, kib << 10));
    }
}
