//! The line that a test prints if it cannot run here, or not all of it.

use std::io::Write;

/// What the line of a skipped test begins with. `.ci/lib.sh` counts these lines.
pub const SKIPPED: &str = "skipped: ";
/// The test that a child process was started for.
pub const TEST: &str = "PINPOOL_TEST";

/// Prints why the running test is skipped, in the words of `format!`: one line on standard error, `skipped: TEST: WHY`.
/// The harness hides the output of a test that passes; this line goes past it.
macro_rules! skip {
    ($($why:tt)+) => {
        $crate::support::skip::write(&format!($($why)+))
    };
}
pub(crate) use skip;

pub fn write(why: &str) {
    let thread = std::thread::current();
    // The harness names a test's thread after the test, but runs the only test of a child on the main thread.
    let test = std::env::var(TEST).ok().or(thread.name().map(str::to_owned)).unwrap_or_default();
    tell(&format!("{SKIPPED}{test}: {}", why.trim().replace('\n', " ")));
}

/// Writes a line past the harness. A parent process passes it on: see `process::passes`.
pub fn tell(line: &str) {
    // In one call, so that lines of parallel tests do not mix. Where standard error is closed the line is lost.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}
