//! Calling the simulated libascendcl without pinpool in between; and the child that loads it by its path.

use std::path::{Path, PathBuf};

use super::{Report, library};

/// The variable that pinpool reads.
pub const PATH: &str = "PINPOOL_LIBASCENDCL";
/// A file that the report is written to when the process exits.
pub const REPORT: &str = "PINPOOL_SIM_REPORT";

/// The simulation that the environment names, or the one beside this executable.
pub fn named_or_built() -> Option<PathBuf> {
    let named = std::env::var_os(PATH).filter(|path| !path.is_empty()).map(PathBuf::from);
    named.or_else(library)
}

/// The report of a process that had [`REPORT`] set and has ended. `None`: there is none.
pub fn report_of(path: &Path) -> Option<Report> {
    std::fs::read_to_string(path).ok().map(|text| Report::parse(&text))
}

/// Calls an entry point whose arguments are all numbers of the size of a pointer, or are passed like one.
macro_rules! acl {
    ($acl:expr, $name:literal $(, $argument:expr)*) => {{
        // SAFETY: on the machines that pinpool supports integer and pointer arguments are passed alike, each in a
        // register of its own, and what the tests point at is valid.
        unsafe {
            let function = $acl.stand_in.get::<unsafe extern "C" fn($($crate::support::doubles::ascendcl::word!($argument)),*) -> u32>($name);
            function($($argument as usize),*)
        }
    }};
}

/// A word for each argument.
macro_rules! word {
    ($argument:expr) => {
        usize
    };
}

/// The same for a call that writes one word to its first argument and must succeed.
macro_rules! made {
    ($acl:expr, $name:literal $(, $argument:expr)*) => {{
        let mut made = 0_usize;
        assert_eq!($crate::support::doubles::ascendcl::acl!($acl, $name, &raw mut made $(, $argument)*), 0, $name);
        made
    }};
}

/// A call that must give this code.
macro_rules! says {
    ($acl:expr, $code:expr, $name:literal $(, $argument:expr)*) => {
        assert_eq!($crate::support::doubles::ascendcl::acl!($acl, $name $(, $argument)*), $code, $name)
    };
}

#[allow(unused_imports, reason = "each test uses a part of it")]
pub(crate) use {acl, made, says, word};
