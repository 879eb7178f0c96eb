//! A child that loads the simulated libascendcl by its path.

use std::path::{Path, PathBuf};

use super::{Report, library, named};

/// The variable that pinpool reads.
pub const PATH: &str = "PINPOOL_LIBASCENDCL";
/// A file that the report is written to when the process exits.
pub const REPORT: &str = "PINPOOL_SIM_REPORT";

/// The simulation that the environment names, or the one beside this executable.
pub fn named_or_built() -> Option<PathBuf> {
    named(PATH).or_else(library)
}

/// The report of a process that had [`REPORT`] set and has ended. `None`: there is none.
pub fn report_of(path: &Path) -> Option<Report> {
    std::fs::read_to_string(path).ok().map(|text| Report::parse(&text))
}
