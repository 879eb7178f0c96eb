//! A test that cannot run here says so.

use std::io::Write;

/// What the line of a skipped test begins with. `.ci/lib.sh` counts these lines.
pub const SKIPPED: &str = "skipped: ";

/// Writes `skipped: TEST: WHY`, one line, to standard error, past the harness, which shows nothing of what a test that passes
/// prints. A parent process passes the line on: see `process::forward`.
pub fn skip(test: &str, why: &str) {
    tell(&format!("{SKIPPED}{test}: {}", why.trim().replace('\n', " ")));
}

/// Writes a line past the harness.
pub(super) fn tell(line: &str) {
    // In one call, so that lines of parallel tests do not mix. Where standard error is closed the line is lost.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}
