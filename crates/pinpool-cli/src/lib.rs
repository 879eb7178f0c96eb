//! The `pinpool` command. `load` moves files to a device and back through a pool, `bench` measures
//! the link to a device, `doctor` looks for what stands in the way of pinning and copying, and
//! `top` shows the pools of a running process.
//!
//! This file parses the command line; the folder `cli` does the work. The binary `pinpool` and the
//! Python package's `python -m pinpool` call [`main`]. The exit status is 0 when everything was
//! moved (and verified, if asked) or measured, 1 for a mismatch, a device or a disk that fails,
//! memory that cannot be had or a result that cannot be written, and 2 for a command line that
//! cannot be obeyed. A line on stderr says why. A closed pipe causes no panic: the output is
//! dropped, and the exit status stays.

mod cli;

use std::ffi::OsString;

use clap::Parser;

/// Runs the command, with its name as the first word, as help texts show it. Returns the exit
/// status. Nothing here handles signals: those that end the process end the command.
pub fn main(words: impl IntoIterator<Item = OsString>) -> u8 {
    let words: Vec<OsString> = words.into_iter().collect();
    match cli::args::Args::try_parse_from(&words) {
        Ok(args) => cli::run(&args),
        Err(error) => cli::refuse(&error, words.iter().any(|word| word == "--json")),
    }
}
