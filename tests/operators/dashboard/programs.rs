//! Finding programs that may be missing, and running them within bounds.

use std::path::PathBuf;
use std::process::{Command, Output};

use super::PATIENCE;
use crate::support::{doubles, skip};

/// Where the first of these programs is. Without it the test is skipped and says so, or fails where `PINPOOL_REQUIRE`
/// names `kind`.
pub fn find(kind: &str, names: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = names.iter().find_map(|name| {
        std::env::split_paths(&path).map(|folder| folder.join(name)).find(|program| program.is_file())
    });
    if found.is_none() {
        let required = std::env::var("PINPOOL_REQUIRE").unwrap_or_default();
        assert!(
            !required.split(',').any(|name| name.trim() == kind),
            "PINPOOL_REQUIRE names {kind}, and none of {names:?} is in PATH"
        );
        skip!("none of {names:?} is in PATH ({kind})");
    }
    found
}

/// Runs it to its end, and kills it if that does not come.
pub fn run(command: &mut Command) -> Output {
    let ended = doubles::ended(command, PATIENCE);
    let status = ended.status.unwrap_or_else(|| panic!("{command:?} does not end"));
    Output { status, stdout: ended.stdout.into_bytes(), stderr: ended.stderr.into_bytes() }
}
