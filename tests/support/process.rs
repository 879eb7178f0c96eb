//! Tests in processes of their own: a test starts itself again from this same executable.

#![allow(unsafe_code, reason = "a fork")]

use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::Duration;

use super::skip::{SKIPPED, TEST, tell};

/// The test that a child process was started for by [`own_process!`].
const OWN: &str = "PINPOOL_TEST_OWN";

/// The first line of a test that needs a process to itself: what follows runs in a child process, in which no other
/// test runs. For what belongs to the whole process: the subscriber of `tracing`, the panic hook, limits, a fork, a
/// count of threads.
macro_rules! own_process {
    () => {
        fn here() {}
        if !$crate::support::process::is_own(std::any::type_name_of_val(&here)) {
            return;
        }
    };
}
pub(crate) use own_process;

/// Whether this process is the child for a test, by the type name of a function within that test. If it is not, the
/// child has run when this returns.
///
/// # Panics
/// If the test fails in the child.
pub fn is_own(here: &str) -> bool {
    // `executable::module::test::here`.
    let path = here.split_once("::").and_then(|(_, path)| path.rsplit_once("::"));
    let (test, _) = path.unwrap_or_else(|| panic!("{here} is no function of a test"));
    if std::env::var(OWN).is_ok_and(|own| own == test) {
        return true;
    }
    let output = command(test).env(OWN, test).output().expect("this executable can be started again");
    passed(test, "in a process of its own", &output);
    false
}

/// This executable again, for one test. The test's name is its path or the end of it: `closing::what_hangs`.
///
/// # Panics
/// If no test has the name, or several have it.
pub fn command(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this executable has a path"));
    let path = path_of(test);
    command.args([&path, "--exact", "--nocapture", "--test-threads=1"]).env(TEST, path);
    command
}

/// The path of the one test with this name.
fn path_of(test: &str) -> String {
    static ALL: OnceLock<Vec<String>> = OnceLock::new();
    let all = ALL.get_or_init(|| {
        let list =
            Command::new(std::env::current_exe().expect("this executable has a path")).arg("--list").output();
        let list = String::from_utf8(list.expect("this executable can be started again").stdout)
            .expect("names in UTF-8");
        list.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
    });
    let is_it =
        |path: &&String| *path == test || path.strip_suffix(test).is_some_and(|rest| rest.ends_with("::"));
    let found: Vec<_> = all.iter().filter(is_it).collect();
    let [path] = found[..] else { panic!("the tests named {test}: {found:?}") };
    path.clone()
}

/// Prints the output of a child as this test's own, and reports which tests the child skipped.
pub fn forward(stdout: &str, stderr: &str) {
    print!("{stdout}");
    for line in stderr.lines() {
        match line.find(SKIPPED) {
            Some(at) => tell(&line[at..]),
            None => eprintln!("{line}"),
        }
    }
}

/// The child ran the test, and the test passed there.
pub fn passed(test: &str, how: &str, output: &Output) {
    let stdout = String::from_utf8_lossy(&output.stdout);
    forward(&stdout, &String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{test} failed {how}: {}", output.status);
    assert!(stdout.contains("1 passed"), "{test} did not run");
}

/// Runs `child` in a fork of this process, and says how it ended: its exit code, or `None` if it hung or was killed. The
/// child may not print (locks of the parent's threads may be held for ever), nor unwind into the test harness.
pub fn forked(child: impl FnOnce() -> i32) -> Option<i32> {
    // SAFETY: the child calls only what is under test here, which is to be safe in a fork, and then `_exit`.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork failed");
    if pid == 0 {
        // SAFETY: a signal for a child that hangs, which ends it.
        unsafe { libc::alarm(20) };
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(99);
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(code) };
    }
    // Long enough for any child that does not hang.
    for _ in 0..6000 {
        let mut status = 0;
        // SAFETY: our child, and a place for its status.
        let ended = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
        if ended == pid {
            return libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    // SAFETY: our child, which is not reaped yet.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), 0);
    }
    None
}
