//! The command `pinpool`, in the interpreter's process.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command and returns its exit status. The interpreter's lock is given away meanwhile, so
/// Python's own handler of a signal does not run: the caller sets the system's before.
#[pyfunction]
pub fn command(py: Python<'_>, words: Vec<OsString>) -> u8 {
    py.detach(|| pinpool_cli::main(words))
}
