//! Tests in processes of their own: a test starts itself again from this same executable.

#![allow(unsafe_code, reason = "a fork, and limits")]

use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use super::HANG;
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
    passed(test, &ended(command(test).arg("--exact").env(OWN, test), 20 * HANG));
    false
}

/// This executable again, for one test, by its path or a part of it that no other test's path has.
pub fn command(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this executable has a path"));
    command.args([test, "--nocapture", "--test-threads=1"]).env(TEST, test);
    command
}

/// The names of this process's threads that begin so.
pub fn threads(begin: &str) -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("a list of threads").flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.map(|name| name.trim().to_owned()).filter(|name| name.starts_with(begin)).collect()
}

/// Lets this process have so much of a resource. Returns how much it was.
pub fn limit(resource: libc::__rlimit_resource_t, most: u64) -> u64 {
    let mut old = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes to the struct, and then reads one.
    unsafe {
        assert_eq!(libc::getrlimit(resource, &raw mut old), 0);
        let new = libc::rlimit { rlim_cur: most, ..old };
        assert_eq!(libc::setrlimit(resource, &raw const new), 0);
    }
    old.rlim_cur
}

pub struct Ended {
    /// `None`: it took too long, and was ended.
    pub status: Option<ExitStatus>,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    /// Words that follow "the child" in a sentence.
    pub fn how(&self) -> String {
        match self.status {
            Some(status) => format!("ended with {status}"),
            None => "hung and was ended".into(),
        }
    }

    /// Its last output, for a message: errors first, since a panic is printed there.
    pub fn last_words(&self) -> String {
        let text = if self.stderr.trim().is_empty() { &self.stdout } else { &self.stderr };
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        lines[lines.len().saturating_sub(8)..].join(" | ")
    }
}

/// Runs a command for at most `limit`. Its end is returned, not judged.
pub fn ended(command: &mut Command, limit: Duration) -> Ended {
    // Its last output is to be the reason.
    command.env("RUST_BACKTRACE", "0").stdin(Stdio::null());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it can be started");
    let (pid, (over, wait)) = (child.id() as libc::pid_t, mpsc::channel::<()>());
    let watch = std::thread::spawn(move || {
        let hangs = wait.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout);
        // SAFETY: a signal for the child, which this function has not seen the end of.
        hangs.then(|| unsafe { libc::kill(pid, libc::SIGKILL) });
        hangs
    });
    let output = child.wait_with_output().expect("a child can be waited for");
    drop(over);
    let hung = watch.join().expect("the watch");
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let status = Some(output.status).filter(|_| !hung);
    Ended { status, stdout: text(&output.stdout), stderr: text(&output.stderr) }
}

/// The same for a test of this very executable, with more in its environment.
pub fn child(test: &str, environment: &[(&str, &str)], limit: Duration) -> Ended {
    ended(command(test).envs(environment.iter().copied()), limit)
}

/// The same for a child in which the test passes.
pub fn passes(test: &str, environment: &[(&str, &str)], limit: Duration) {
    println!("{test} {environment:?}");
    passed(test, &child(test, environment, limit));
}

/// The test has passed in a child, whose output is printed as this test's own, with the tests that it skipped.
fn passed(test: &str, child: &Ended) {
    print!("{}", child.stdout);
    for line in child.stderr.lines() {
        match line.find(SKIPPED) {
            Some(at) => tell(&line[at..]),
            None => eprintln!("{line}"),
        }
    }
    let passed = child.status.is_some_and(|status| status.success()) && child.stdout.contains("1 passed");
    assert!(passed, "{test}: the child {}: {}", child.how(), child.last_words());
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
